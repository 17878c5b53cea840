"""DALI itself, on the CPU: the same samples, labels and pixels as our own loader, resume, processes and errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dali_cases import CROPS, WITH_PROCESSES, dali, fn, labels_of, same_epochs, same_pixels
from image_cases import XMP_PREFIX, encoded, with_segments, xmp
from PIL import Image
from suites.programs import run_python

import packer
import readers
from cache.errors import BadSampleError, ResumeError
from packer.testing.samples import make_image
from readers import Decode, Ranks
from readers.augment import (
    CenterCrop,
    Crop,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomVerticalFlip,
    Resize,
)
from readers.dali import DaliLoader, PipelineOptions, Source, celeba, classification, external_source, pipeline
from readers.decode import decode_image
from readers.loader import ImageLoader

pytestmark = WITH_PROCESSES


@pytest.fixture(scope="module")
def packed(photos: Path, pack: Callable[..., Path]) -> Callable[[str], Path]:
    return lambda to: pack(photos, to, samples_per_shard=16)


@pytest.fixture
def reader(packed: Callable[[str], Path]) -> Iterator[readers.Reader]:
    with readers.open(packed("hdf5")) as reader:
        yield reader


def decoded(data: list[bytes]) -> list[np.ndarray[Any, Any]]:
    """The whole images, decoded by DALI."""
    pipe = dali.Pipeline(batch_size=len(data), num_threads=2, device_id=None)
    with pipe:
        encoded = fn.external_source(lambda: [np.frombuffer(one, np.uint8) for one in data], dtype=dali.types.UINT8)
        pipe.set_outputs(fn.decoders.image(encoded, output_type=dali.types.RGB))
    (images,) = pipe.run()
    return [np.array(images[i]) for i in range(len(data))]


# --- the same as our loader -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["hdf5", "tfrecord", "tar", "mmap", "folder", "selection", "cached"])
def test_samples_labels_and_crops_are_those_of_our_loader(
    kind: str, photos: Path, packed: Callable[[str], Path], place: dict[str, Any]
) -> None:
    backend: Any = "mmap" if kind == "mmap" else "pread"
    to = kind if kind in ("hdf5", "tfrecord") else "tar"
    reader: Any = readers.open_folder(photos) if kind == "folder" else readers.open(packed(to), backend=backend)
    if kind == "selection":
        reader = reader.select(labels=["bee"])
    if kind == "cached":
        reader = readers.cached(reader, **place)
    ours = ImageLoader(reader, 8, augment=CROPS, seed=3, decode=Decode(layout="NCHW"), threads=1)
    theirs = DaliLoader(reader, 8, augment=CROPS, seed=3)
    same_epochs(ours, theirs)
    del ours, theirs
    reader.close()


def test_whole_images_are_ours_to_the_bit(reader: readers.Reader) -> None:
    """Through external_source in a pipeline of the user's own; EXIF orientations 1 to 8 among them."""

    @dali.pipeline_def(batch_size=7, num_threads=2, device_id=None)
    def whole() -> Any:
        encoded, label = external_source(reader, 7, seed=1, ranks=Ranks(tail="exact"))
        return encoded, fn.decoders.image(encoded, output_type=dali.types.RGB), label

    pipe, source = whole(), Source(reader, 7, seed=1, ranks=Ranks(tail="exact"))
    for epoch in range(2):
        for step in range(source.steps(epoch)):
            encoded, images, labels = pipe.run()
            _, indices = source.samples_of(epoch, step)
            for row, index in enumerate(indices.tolist()):
                assert np.array(encoded[row]).tobytes() == bytes(reader.read(index))
                assert int(np.array(labels[row])[0]) == reader.labels[index]
                assert np.array_equal(np.array(images[row]), decode_image(reader.read(index)))
        with pytest.raises(StopIteration):
            pipe.run()
        pipe.reset()


@pytest.mark.parametrize(
    "ops",
    [
        classification(32, train=False),
        [CenterCrop(40), Resize((24, 30)), RandomVerticalFlip(), RandomHorizontalFlip()],
        [Resize((40, 44)), RandomCrop((30, 35))],
        [Crop(3, 5, 40, 41), RandomVerticalFlip(1.0)],
        celeba(28, crop=Crop(7, 3, 40, 40)),
    ],
    ids=lambda ops: "-".join(type(op).__name__ for op in ops),
)
def test_lists_of_ops(reader: readers.Reader, ops: list[Any]) -> None:
    scale = 255 * 0.225 if isinstance(ops[-1], Normalize) else 1.0
    ours = ImageLoader(reader, 8, augment=ops, seed=5, decode=Decode(layout="NCHW"), threads=1)
    same_epochs(ours, DaliLoader(reader, 8, augment=ops, seed=5, output="numpy"), epochs=1, scale=scale)


def test_layouts_and_dtypes(reader: readers.Reader) -> None:
    ops = [*CROPS, Normalize((0.5,) * 3, (0.5,) * 3)]
    for layout in ("NCHW", "NHWC"):
        ours = ImageLoader(reader, 8, augment=ops, seed=5, decode=Decode(layout=layout), threads=1)
        options = PipelineOptions(layout=layout, dtype="float16", fused_decoding=False)
        theirs = DaliLoader(reader, 8, augment=ops, seed=5, options=options)
        images, labels = next(iter(theirs))
        assert images.dtype == torch.float16 and labels.dtype == torch.int64
        same_pixels(next(iter(ours))[0], images, 127.5)
    images, _ = next(iter(DaliLoader(reader, 8, augment=CROPS, options=PipelineOptions(dtype="float32"))))
    assert images.dtype == torch.float32 and 0 <= float(images.min()) < 0.1 and 0.9 < float(images.max()) <= 1


def test_all_media_that_both_decode() -> None:
    noise = np.random.default_rng(1).integers(0, 256, (10, 12, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize((48, 40))
    data = [
        encoded(image, kind, orientation) for kind in ("PNG", "WEBP", "TIFF", "JPEG") for orientation in range(1, 9)
    ]
    data += [encoded(image.convert(mode), "JPEG") for mode in ("L", "CMYK")]
    data += [encoded(image.convert(mode), "PNG") for mode in ("L", "P", "RGBA")]
    data += [encoded(image, "BMP"), encoded(image, "JPEG", progressive=True), encoded(image, "JPEG", subsampling=2)]
    for one, theirs in zip(data, decoded(data), strict=True):
        assert np.array_equal(decode_image(one), theirs), one[:16]
    deep = Image.fromarray(np.random.default_rng(1).integers(0, 65536, (20, 30), np.uint16))
    grey = [encoded(deep, kind) for kind in ("PNG", "TIFF")]
    for one, theirs in zip(grey, decoded(grey), strict=True):
        assert np.abs(decode_image(one).astype(int) - theirs).max() <= 1


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (with_segments(make_image(1), XMP_PREFIX + xmp(6)), "its orientation does not come from EXIF"),
        (make_image(2).replace(b"\xff\xda", b"stray\xff\xda"), "stray bytes or a damaged segment"),
        (encoded(Image.new("RGB", (32, 24)), "PNG")[:-12], "our decoder goes past this damage"),
        (encoded(Image.new("RGB", (32, 24)), "GIF"), "DALI does not decode GIF images"),
    ],
    ids=["XMP", "stray bytes", "truncated", "GIF"],
)
def test_images_that_only_dali_refuses_are_named(tmp_path: Path, data: bytes, reason: str) -> None:
    """Before DALI gets them, by their headers; or after it failed, where a graph does not need headers."""
    (tmp_path / "a.jpg").write_bytes(make_image(3))
    (tmp_path / "b.jpg").write_bytes(data)
    reader = readers.open_folder(tmp_path)
    with pytest.raises(BadSampleError, match=rf"sample 1 \(b\): .*{reason}"):
        list(DaliLoader(reader, 2, augment=CROPS, shuffle=False))
    if "GIF" in reason:
        with pytest.raises(BadSampleError, match=rf"sample 1 \(b\): .*{reason}"):
            list(DaliLoader(reader, 1, graph=fn.decoders.image, shuffle=False))


def test_the_graph_for_a_gpu_can_be_defined(reader: readers.Reader) -> None:
    """Whole images are decoded, then cut. Running it needs a GPU."""
    made = pipeline(Source(reader, 8, augment=CROPS), PipelineOptions(device="cuda", device_id=0))
    made._build_graph()
    operators = [type(operator._op).__name__ for operator in made._ops]
    assert "Image" in operators and "Slice" in operators and "ImageSlice" not in operators


# --- epochs and resume ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("output", ["torch", "numpy"])
def test_a_rank_without_samples_in_the_last_step(reader: readers.Reader, output: Any) -> None:
    some = reader.select(indices=list(range(26)))
    loader = DaliLoader(some, 4, augment=CROPS, output=output, ranks=Ranks(rank=0, world_size=3, tail="exact"))
    *_, (images, labels) = iter(loader)
    assert len(loader) == 3 and images.shape == (0, 3, 32, 32) and len(labels) == 0
    assert str(images.dtype).endswith("uint8") and len(labels_of(loader)) == 3


def test_a_resumed_epoch_has_the_same_crops(reader: readers.Reader) -> None:
    straight, first, second = (DaliLoader(reader, 8, augment=CROPS, seed=7) for _ in range(3))
    whole = [batch for _ in range(2) for batch in straight]
    for _ in zip(range(3), first, strict=False):
        state = first.state_dict()
    second.load_state_dict(state)
    assert second.epoch == 0 and second.left == 2 and len(second) == 5
    rest = [batch for _ in range(2) for batch in second]
    for (images, labels), (others, other_labels) in zip(whole[3:], rest, strict=True):
        assert torch.equal(images, others) and torch.equal(labels, other_labels)


def test_states_are_shared_with_our_loader(reader: readers.Reader) -> None:
    ours = ImageLoader(reader, 8, augment=CROPS, seed=7, decode=Decode(layout="NCHW"), threads=1)
    batches = iter(ours)
    next(batches)
    state = ours.state_dict()
    theirs = DaliLoader(reader, 8, augment=CROPS, seed=0)
    with pytest.warns(UserWarning, match="began with the decoder 'cpu' and continues with 'dali'"):
        theirs.load_state_dict(state)
    for (images, labels), (others, other_labels) in zip(batches, theirs, strict=True):
        assert labels.tolist() == other_labels.tolist()
        same_pixels(images, others)
    assert theirs.state_dict() == {**ours.state_dict(), "decoder": "dali"}
    with pytest.raises(ResumeError, match="of the data set"):
        theirs.load_state_dict({**state, "fingerprint": "other"})


def test_a_state_behind_the_last_whole_batch_is_of_the_next_epoch(reader: readers.Reader) -> None:
    loader, straight = (DaliLoader(reader, 8, augment=CROPS, seed=2) for _ in range(2))
    loader.load_state_dict({**loader.state_dict(), "cursor": 40})
    assert loader.epoch == 1 and loader.left == len(loader) == 5
    straight.set_epoch(1)
    assert labels_of(loader) == labels_of(straight)


def test_a_closed_loader_continues(reader: readers.Reader) -> None:
    loader, straight = (DaliLoader(reader, 8, augment=CROPS, seed=2) for _ in range(2))
    epochs = [labels_of(straight) for _ in range(3)]
    loader.load_state_dict({**loader.state_dict(), "cursor": 16})
    loader.close()
    assert labels_of(loader) == epochs[0][2:]
    loader.close()
    assert labels_of(loader) == epochs[1]
    next(iter(loader))
    loader.close()
    assert loader.epoch == 3


def test_pipelines_continue_by_our_states_and_by_checkpoints_of_dali(reader: readers.Reader) -> None:
    @dali.pipeline_def(batch_size=8, num_threads=1, device_id=None, enable_checkpointing=True)
    def encoded_only(state: Any = None) -> Any:
        return external_source(reader, 8, seed=5, state=state)

    def run(pipe: Any, count: int) -> list[bytes]:
        return [np.array(pipe.run()[0][0]).tobytes() for _ in range(count)]

    pipe = encoded_only()
    run(pipe, 2)
    checkpoint, rest = pipe.checkpoint(), run(pipe, 3)
    assert run(encoded_only(checkpoint=checkpoint), 3) == rest
    assert run(encoded_only(state=Source(reader, 8, seed=5).state_after(0, 2)), 3) == rest


def test_the_example(packed: Callable[[str], Path]) -> None:
    """With smaller batches, as there are only 42 images."""
    script = Path(packer.__file__).parent.parent / "examples" / "dali_pipeline.py"
    code = script.read_text(encoding="utf-8").replace("BATCH, SIZE = 50, 160", "BATCH, SIZE = 8, 32")
    small = packed("hdf5").parent / "example.py"
    small.write_text(code, encoding="utf-8")
    done = run_python(small, packed("hdf5"), "--workers", 2)
    assert done.returncode == 0, done.stderr
    assert "continues after 3 batches: 2 batches are left" in done.stdout
    assert "saw {0: 21, 1: 21} samples by class" in done.stdout
