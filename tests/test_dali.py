"""DALI on the CPU: the same samples, labels and pixels as our loader, resume, worker processes and errors."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from dali_cases import CROPS, WITH_PROCESSES, dali, fn, labels_of, same_epochs, same_pixels
from image_cases import XMP_PREFIX, encoded, with_segments, xmp
from loader_options import grouped
from PIL import Image
from suites.programs import run_python

import packer
import readers
from cache.errors import BadSampleError, MissingExtraError, ResumeError, WorkerError
from packer.testing.samples import make_image
from readers import Decode, Ranks
from readers.augment import (
    CenterCrop,
    MixUp,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
)
from readers.dali import (
    BatchSource,
    DaliLoader,
    PipelineOptions,
    SampleSource,
    Source,
    classification,
    external_source,
    pipeline,
)
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
        encoded = fn.external_source(lambda: [np.frombuffer(jpeg, np.uint8) for jpeg in data], dtype=dali.types.UINT8)
        pipe.set_outputs(fn.decoders.image(encoded, output_type=dali.types.RGB))
    (images,) = pipe.run()
    return [np.array(images[i]) for i in range(len(data))]


# --- the same as our loader -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["packed", "folder", "cached"])
def test_samples_labels_and_crops_equal_those_of_our_loader(
    kind: str, photos: Path, packed: Callable[[str], Path], place: dict[str, Any]
) -> None:
    reader: Any = (
        readers.open_folder(photos) if kind == "folder" else readers.open(packed("tar")).select(labels=["bee"])
    )
    if kind == "cached":
        reader = readers.cached(reader, **place)
    loader = ImageLoader(reader, 8, augment=CROPS, seed=3, decode=Decode(layout="NCHW"), threads=1)
    dali_loader = DaliLoader(reader, 8, augment=CROPS, seed=3)
    same_epochs(loader, dali_loader)
    del loader, dali_loader
    reader.close()


def test_whole_images_equal_ours_to_the_bit(reader: readers.Reader) -> None:
    """Through external_source in a user-defined pipeline; EXIF orientations 1 to 8 are among the images."""

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


def test_layouts_and_dtypes(reader: readers.Reader) -> None:
    ops = [*CROPS, Normalize((0.5,) * 3, (0.5,) * 3)]
    for layout in ("NCHW", "NHWC"):
        loader = ImageLoader(reader, 8, augment=ops, seed=5, decode=Decode(layout=layout), threads=1)
        options = PipelineOptions(layout=layout, dtype="float16", fused_decoding=False)
        dali_loader = DaliLoader(reader, 8, augment=ops, seed=5, options=options)
        images, labels = next(iter(dali_loader))
        assert images.dtype == torch.float16 and labels.dtype == torch.int64
        same_pixels(next(iter(loader))[0], images, 127.5)
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
    for content, pixels in zip(data, decoded(data), strict=True):
        assert np.array_equal(decode_image(content), pixels), content[:16]
    deep = Image.fromarray(np.random.default_rng(1).integers(0, 65536, (20, 30), np.uint16))
    grey = [encoded(deep, kind) for kind in ("PNG", "TIFF")]
    for content, pixels in zip(grey, decoded(grey), strict=True):
        assert np.abs(decode_image(content).astype(int) - pixels).max() <= 1


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (with_segments(make_image(1), XMP_PREFIX + xmp(6)), "its orientation does not come from EXIF"),
        (make_image(2).replace(b"\xff\xda", b"stray\xff\xda"), "stray bytes or a damaged segment"),
        (encoded(Image.new("RGB", (32, 24)), "PNG")[:-12], "our decoder tolerates this damage"),
        (encoded(Image.new("RGB", (32, 24)), "GIF"), "DALI does not decode GIF images"),
    ],
    ids=["XMP", "stray bytes", "truncated", "GIF"],
)
def test_images_that_only_dali_refuses_are_named(tmp_path: Path, data: bytes, reason: str) -> None:
    """Before DALI gets them, by their headers; or after DALI failed, where a graph does not need headers."""
    (tmp_path / "a.jpg").write_bytes(make_image(3))
    (tmp_path / "b.jpg").write_bytes(data)
    reader = readers.open_folder(tmp_path)
    with pytest.raises(BadSampleError, match=rf"sample 1 \(b\): .*{reason}"):
        list(DaliLoader(reader, 2, augment=CROPS, shuffle=False))
    if "GIF" in reason:
        with pytest.raises(BadSampleError, match=rf"sample 1 \(b\): .*{reason}"):
            list(DaliLoader(reader, 1, graph=fn.decoders.image, shuffle=False))


def test_the_graph_for_a_gpu_can_be_defined(reader: readers.Reader) -> None:
    """Whole images are decoded, then cropped. Running the graph needs a GPU."""
    made = pipeline(Source(reader, 8, augment=CROPS), PipelineOptions(device="cuda", device_id=0))
    made._build_graph()
    operators = [type(operator._op).__name__ for operator in made._ops]
    assert "Image" in operators and "Slice" in operators and "ImageSlice" not in operators


# --- epochs and resume ------------------------------------------------------------------------------------------
def test_states_are_shared_with_our_loader(reader: readers.Reader) -> None:
    loader = ImageLoader(reader, 8, augment=CROPS, seed=7, decode=Decode(layout="NCHW"), threads=1)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    dali_loader = DaliLoader(reader, 8, augment=CROPS, seed=0)
    with pytest.warns(UserWarning, match="began with the decoder 'cpu' and continues with 'dali'"):
        dali_loader.load_state_dict(state)
    for (images, labels), (others, other_labels) in zip(batches, dali_loader, strict=True):
        assert labels.tolist() == other_labels.tolist()
        same_pixels(images, others)
    assert dali_loader.state_dict() == {**loader.state_dict(), "decoder": "dali"}
    with pytest.raises(ResumeError, match="of the data set"):
        dali_loader.load_state_dict({**state, "fingerprint": "other"})


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


def test_pipelines_resume_from_our_states_and_from_dali_checkpoints(reader: readers.Reader) -> None:
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


# --- worker processes ---------------------------------------------------------------------------------------------


def test_two_workers_give_the_same_batches_as_none(reader: readers.Reader) -> None:
    alone = DaliLoader(reader, 8, augment=CROPS, seed=3, ranks=Ranks(tail="exact"))
    options = PipelineOptions(workers=2, start_method="spawn")
    together = DaliLoader(reader, 8, augment=CROPS, seed=3, ranks=Ranks(tail="exact"), options=options)
    for _ in range(2):
        for (images, labels), (others, other_labels) in zip(alone, together, strict=True):
            assert torch.equal(images, others) and torch.equal(labels, other_labels)
    assert len(multiprocessing.active_children()) >= 2, "no worker was started: this test proves nothing"
    together.close()


def test_a_pipeline_of_single_samples(reader: readers.Reader) -> None:
    @dali.pipeline_def(batch_size=8, num_threads=1, device_id=None, py_num_workers=2, py_start_method="fork")
    def labels_only(per: Any, parallel: bool) -> Any:
        return external_source(reader, 8, seed=5, parallel=parallel, per=per)[::-1]

    def epoch(**options: Any) -> list[list[int]]:
        pipe, labels = labels_only(enable_conditionals=True, **options), []
        while True:
            try:
                labels.append(np.array(pipe.run()[0].as_array()).ravel().tolist())
            except StopIteration:
                return labels

    expected = epoch(per="batch", parallel=False)
    assert len(expected) == 5 and epoch(per="sample", parallel=False) == expected
    assert epoch(per="sample", parallel=True) == expected == epoch(per="batch", parallel=True)


def test_leaving_early_ends_the_workers(reader: readers.Reader) -> None:
    before = set(multiprocessing.active_children())  # a pool that other tests share
    loader = DaliLoader(reader, 8, augment=CROPS, options=PipelineOptions(workers=2, start_method="fork"))
    for _ in loader:
        assert len(set(multiprocessing.active_children()) - before) == 2
        break
    assert set(multiprocessing.active_children()) <= before
    assert len(labels_of(loader)) == 5


def test_a_program_ends_with_a_loop_under_way(packed: Callable[[str], Path]) -> None:
    """Also with finalizers that were registered before DALI's workers started, which `multiprocessing` runs first."""
    script = f"""
import weakref
kept = type("Kept", (), {{}})()
weakref.finalize(kept, int)
import readers
from readers.dali import DaliLoader, PipelineOptions, classification
reader = readers.open({str(packed("hdf5"))!r})
options = PipelineOptions(workers=2, start_method="fork")
loaders = [DaliLoader(reader, 8, augment=classification(32), options=options, output="numpy") for _ in range(2)]
assert len(list(loaders[0])) == 5
loop = iter(loaders[1])
next(loop)
print("the end")
"""
    done = run_python("-c", script)
    assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr


def test_a_killed_worker_raises_instead_of_hanging(reader: readers.Reader) -> None:
    others = {child.pid for child in multiprocessing.active_children()}
    loader = DaliLoader(reader, 2, augment=CROPS, options=PipelineOptions(workers=2, start_method="fork"))
    batches = iter(loader)
    next(batches)
    child = next(child for child in multiprocessing.active_children() if child.pid not in others)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join(10)
    with pytest.raises(WorkerError, match=r"a process that reads for DALI died \(exit status -9"):
        list(batches)
    state = loader.state_dict()
    assert 0 < state["cursor"] < 42 and len(labels_of(loader)) == 21


# --- errors -------------------------------------------------------------------------------------------------------
def damaged(packed: Callable[[str], Path], folder: Path, numbers: tuple[int, ...]) -> Path:
    """A copy of a set in which some images have lost their second half."""
    shutil.copytree(packed("tar"), folder)
    with readers.open(folder) as reader:
        for number in numbers:
            shard, offset, length = reader.byte_range(number) or (folder, 0, 0)
            with open(shard, "r+b") as file:
                file.seek(offset + length // 2)
                file.write(bytes(length - length // 2))
    return folder


@pytest.mark.parametrize(
    ("workers", "verify", "reason"), [(0, False, "expected a scan and an end marker"), (2, True, "CRC32C")]
)
def test_a_bad_sample_is_named(
    packed: Callable[[str], Path], tmp_path: Path, workers: int, verify: bool, reason: str
) -> None:
    with readers.open(damaged(packed, tmp_path / "set", (13,)), verify=verify) as reader:
        options = PipelineOptions(workers=workers, start_method="fork")
        loader = DaliLoader(reader, 4, augment=CROPS, shuffle=False, options=options)
        with pytest.raises((BadSampleError, readers.DamagedSampleError), match=reason) as caught:
            list(loader)
        assert reader.keys[13] in str(caught.value) and "13" in str(caught.value)
        assert loader.state_dict()["cursor"] <= 12 and loader.epoch == 0


def test_bad_samples_are_skipped(packed: Callable[[str], Path], tmp_path: Path) -> None:
    """In batches of varying size, and in the same batches as our loader."""
    bad = (3, 13, 14, 41)
    with readers.open(damaged(packed, tmp_path / "set", bad)) as reader:
        options = PipelineOptions(workers=2, start_method="fork")
        shared: dict[str, Any] = {"augment": CROPS, "shuffle": False, "on_error": "skip", "seed": 3}
        dali_loader = DaliLoader(reader, 8, options=options, output="numpy", **grouped(shared))
        loader = ImageLoader(reader, 8, **grouped({"decode": Decode(layout="NCHW"), "threads": 1, **shared}))
        for epoch in range(2):
            with pytest.warns(UserWarning, match=rf"epoch {epoch}: 4 bad samples were skipped, the first is sample 3 "):
                same_epochs(loader, dali_loader, epochs=1)
            assert dali_loader.bad_samples == loader.bad_samples
        dali_loader.close()


def test_a_sample_that_only_dali_cannot_decode_is_left_out_of_a_new_pipeline(tmp_path: Path) -> None:
    """Its header and its end are intact, so the damage is detected only by decoding."""
    for number in range(12):
        pixels = np.random.default_rng(number).integers(0, 256, (40, 48, 3), dtype=np.uint8)
        data = bytearray(encoded(Image.fromarray(pixels), "PNG"))
        if number in (2, 9):
            data[200:900] = bytes(700)
        (tmp_path / f"{number:02d}.png").write_bytes(data)
    reader = readers.open_folder(tmp_path)
    loader = DaliLoader(reader, 4, augment=CROPS, shuffle=False, on_error="skip", output="numpy")
    for epoch in range(2):
        with pytest.warns(UserWarning, match=f"epoch {epoch}: 2 bad samples were skipped"):
            assert [len(labels) for _, labels in loader] == [3, 4, 3]
        assert [sample.key for sample in loader.bad_samples] == ["02", "09"]
    assert loader.epoch == 2 and loader.state_dict()["cursor"] == 0


def test_cached_pixels_are_refused(reader: readers.Reader, place: dict[str, Any]) -> None:
    cached = readers.cached(reader, keep="decoded:32", **place)
    for augment, graph in ((CROPS, None), (None, fn.decoders.image)):
        loader = DaliLoader(cached, 8, augment=augment, graph=graph)
        with pytest.raises(BadSampleError, match="its bytes are pixels, which DALI does not take: have"):
            next(iter(loader))
        del loader
    cached.close()


def test_errors_of_a_graph_are_not_blamed_on_samples(reader: readers.Reader) -> None:
    def crop(encoded: Any) -> Any:
        return fn.crop(fn.decoders.image(encoded), crop=(4000, 4000))

    with pytest.raises(
        WorkerError, match="DALI failed at batch 0 of epoch 0, though our own decoder reads its images: "
    ):
        list(DaliLoader(reader, 4, graph=crop))


def test_a_user_defined_graph(reader: readers.Reader) -> None:
    def graph(encoded: Any) -> Any:
        images = fn.decoders.image_random_crop(encoded, device="cpu", output_type=dali.types.RGB)
        return fn.resize(images, resize_x=20, resize_y=24)

    loader = DaliLoader(reader, 8, graph=graph, seed=3)
    assert [images.shape for images, _ in loader] == [(8, 24, 20, 3)] * 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"augment": [CenterCrop(8), MixUp()]}, r"DALI pipelines do not execute MixUp\(\): use ImageLoader, "),
        ({"augment": [Resize(32)]}, "the size of the results depends on the image"),
        ({}, "a source without ops needs a graph"),
        ({"augment": CROPS, "graph": lambda encoded: encoded}, "leave augment out where a graph is given"),
        ({"augment": CROPS, "output": "jax"}, "output is one of torch, numpy, not 'jax'"),
        ({"dtype": "uint8"}, "do not fit into uint8"),
        ({"device": "gpu"}, "device is one of cpu, cuda"),
        ({"prefetch": 0}, "prefetch is 0, expected at least 1"),
    ],
)
def test_wrong_options(reader: readers.Reader, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        if options.keys() & {"dtype", "device", "prefetch"}:
            options = {"augment": classification(32), "options": PipelineOptions(**options)}
        DaliLoader(reader, 8, **grouped(options))


def test_wrong_use_of_nodes(reader: readers.Reader) -> None:
    with pytest.raises(ValueError, match="no pipeline is being defined"):
        external_source(reader, 8)
    with dali.Pipeline(batch_size=4, num_threads=1, device_id=None):
        with pytest.raises(ValueError, match="the pipeline has batches of 4, the source of 8"):
            external_source(reader, 8)
        with pytest.raises(ValueError, match="samples one by one make no short batches"):
            external_source(reader, 4, ranks=Ranks(tail="pad"), per="sample")
        with pytest.raises(ValueError, match="no short batches, as on_error='skip' needs"):
            external_source(reader, 4, on_error="skip", per="sample")


# --- the source alone ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tree: Path, pack: Callable[..., Path]) -> Iterator[readers.Reader]:
    with readers.open(pack(tree, "hdf5", samples_per_shard=10), "train") as small:
        yield small


def info(epoch: int, step: int, row: int = 0) -> Any:
    """Like DALI's BatchInfo and SampleInfo."""
    return SimpleNamespace(epoch_idx=epoch, iteration=step, idx_in_batch=row)


def test_the_memory_of_batches_under_way_is_not_reused(small: readers.Reader) -> None:
    """The small source reuses memory for the next batch where nothing refers to it."""
    source = Source(small, 4, seed=1)
    kept = BatchSource(source, kept=3)
    addresses = []
    for step in range(6):
        (arrays, *_) = kept(info(0, step))
        addresses.append(arrays[0].__array_interface__["data"][0])
        del arrays
    assert all(len(set(addresses[i : i + 3])) == 3 for i in range(4))
    forgetful = BatchSource(source)
    first = {forgetful(info(0, step))[0][0].__array_interface__["data"][0] for step in range(6)}
    assert len(first) < 6, "the small source never reuses memory: this test proves nothing"


def test_calls_in_any_order_and_process_give_the_same_batches(small: readers.Reader) -> None:
    ops = [RandomResizedCrop(16), RandomHorizontalFlip()]
    source = Source(small, 6, augment=ops, seed=5)
    call, other = BatchSource(source, 2), pickle.loads(pickle.dumps(BatchSource(source, 2)))
    for epoch, step in ((1, 3), (0, 0), (1, 2), (0, 5)):
        (a, *columns), (b, *same) = call(info(epoch, step)), other(info(epoch, step))
        assert [x.tobytes() for x in a] == [x.tobytes() for x in b]
        assert all((x == y).all() for x, y in zip(columns, same, strict=True))
        copied = pickle.loads(pickle.dumps(SampleSource(source)))
        for row in (5, 0):
            image, *rest = copied(info(epoch, step, row))
            assert image.tobytes() == a[row].tobytes()
            assert all((x == y[row]).all() for x, y in zip(rest, columns, strict=True))


def test_parameters_of_ops_come_with_the_samples(small: readers.Reader) -> None:
    source = Source(small, 6, augment=[RandomResizedCrop(16), RandomHorizontalFlip()])
    _, _, box, resized, flips = source.batch(0, 0)
    assert box.dtype == np.int64 and box.shape == (6, 4) and (box[:, :2] + box[:, 2:] <= (24, 32)).all()
    assert resized.dtype == np.float32 and (resized[:, :2] == 16).all() and (resized[:, 2:] == 0).all()
    assert flips.dtype == np.int32 and set(flips[:, 0].tolist()) == {0, 1} and not flips[:, 1].any()
    middle = Source(small, 6, augment=[Resize(16), CenterCrop(12)])
    _, _, resized, _ = middle.batch(0, 0)  # whole images are resized, without a box
    assert resized[0].tolist() == [16.0, 21.0, 0.5, np.float32(4 / 9)]


def test_bad_samples_are_named(tmp_path: Path, jpeg: Any) -> None:
    for name, data in (("a", jpeg(1)), ("b", b""), ("c", b"no image")):
        (tmp_path / f"{name}.jpg").write_bytes(data)
    Image.new("RGB", (9, 9)).save(tmp_path / "d.gif")
    reader = readers.open_folder(tmp_path)
    plain, cropped = Source(reader, 1, shuffle=False), Source(reader, 1, shuffle=False, augment=[CenterCrop(8)])
    assert plain.batch(0, 0) and plain.batch(0, 2), "DALI has not decoded the sample yet"
    with pytest.raises(BadSampleError, match=r"sample 1 \(b\): its image has no bytes; find .* `packer verify --deep`"):
        plain.batch(0, 1)
    with pytest.raises(BadSampleError, match=r"sample 2 \(c\): its header cannot be read"):
        cropped.batch(0, 2)
    with pytest.raises(BadSampleError, match=r"sample 3 \(d\): DALI does not decode GIF images"):
        cropped.batch(0, 3)
    with pytest.raises(BadSampleError, match=r"sample 0 \(a\): CenterCrop\(size=30\) does not fit"):
        Source(reader, 1, shuffle=False, augment=[CenterCrop(30)]).batch(0, 0)


def test_a_batch_without_its_bad_samples(tmp_path: Path, jpeg: Any) -> None:
    images = {
        "a": jpeg(1),
        "b": jpeg(2)[:-300],
        "c": b"",
        "d": jpeg(3),
        "e": jpeg(4).replace(b"\xff\xda", b"x\xff\xda"),
    }
    for name, data in images.items():
        (tmp_path / f"{name}.jpg").write_bytes(data)
    reader = readers.open_folder(tmp_path)
    skipping = Source(reader, 5, augment=[RandomResizedCrop(8)], shuffle=False, on_error="skip")
    arrays, labels, *columns, rows = skipping.batch(0, 0)
    assert rows.ravel().tolist() == [0, 3] and [array.tobytes() for array in arrays] == [images["a"], images["d"]]
    assert len(labels) == 2 and all(len(column) == 2 for column in columns)
    whole = Source(reader.select(indices=[0, 3, 0, 3, 0]), 5, augment=[RandomResizedCrop(8)], shuffle=False)
    _, _, *same = whole.batch(0, 0)
    boxes, same_boxes = columns[0], same[0]
    assert (boxes[0] == same_boxes[0]).all() and (boxes[1] == same_boxes[3]).all(), "crops of other positions"
    bad = skipping.bad_samples_of(0, 0, rows.ravel())
    assert [(sample.index, sample.key) for sample in bad] == [(1, "b"), (2, "c"), (4, "e")]
    assert "expected" in bad[0].reason and "no bytes" in bad[1].reason and "stray bytes" in bad[2].reason
    replacing = pickle.loads(pickle.dumps(Source(reader, 5, shuffle=False, on_error="substitute")))
    arrays, _, rows = replacing.batch(0, 0)
    assert len(rows) == 5 and set(rows.ravel().tolist()) == {0, 3} and rows[[0, 3], 0].tolist() == [0, 3]
    assert [sample.index for sample in replacing.bad_samples_of(0, 0, rows.ravel())] == [1, 2, 4]
    assert replacing.batch(0, 0)[-1].tolist() == rows.tolist(), "the remaining samples vary"
    only_bad = Source(reader.select(indices=[1, 2]), 2, shuffle=False, on_error="skip")
    with pytest.raises(BadSampleError, match=r"sample 0 \(b\): it is the first of 2 samples .* all bad.*'substitute'"):
        only_bad.batch(0, 0)


def test_a_dali_that_is_missing_or_old_is_named(monkeypatch: pytest.MonkeyPatch, reader: readers.Reader) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "nvidia.dali", None)
        with pytest.raises(MissingExtraError, match=r"needs NVIDIA DALI: run  pip install 'packer-vision\[dali\]'"):
            external_source(reader, 4)
    monkeypatch.setattr(dali, "__version__", "2.2.9")
    with pytest.raises(MissingExtraError, match=r"needs DALI from 2.3 on \(found 2.2.9\): run  pip install 'packer-"):
        DaliLoader(reader, 8, augment=CROPS)


def test_the_example(packed: Callable[[str], Path]) -> None:
    """With smaller batches, as the set has only 42 images."""
    script = Path(packer.__file__).parent.parent / "examples" / "dali_pipeline.py"
    code = script.read_text(encoding="utf-8").replace("BATCH, SIZE = 50, 160", "BATCH, SIZE = 8, 32")
    small = packed("hdf5").parent / "example.py"
    small.write_text(code, encoding="utf-8")
    done = run_python(small, packed("hdf5"))
    assert done.returncode == 0, done.stderr
    assert "continues after 3 batches: 2 batches are left" in done.stdout
    assert "read {0: 21, 1: 21} samples by class" in done.stdout
