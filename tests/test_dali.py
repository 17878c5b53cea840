"""DALI itself, on the CPU: the same samples, labels and pixels as our own loader, resume, processes and errors."""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_jpeg
from image_cases import XMP_PREFIX, encoded, with_segments, xmp
from PIL import Image
from suites.programs import run_python

import packer
import readers
from cache.errors import BadSampleError, MissingExtraError, ResumeError, WorkerError
from readers.augment import (
    CenterCrop,
    ColorJitter,
    Crop,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
)
from readers.dali import DaliLoader, PipelineOptions, Source, celeba, classification, external_source, pipeline
from readers.decode import decode_image
from readers.loader import ImageLoader
from readers.order import Shuffled

try:
    import nvidia.dali as dali
    from nvidia.dali import fn
except (ImportError, OSError) as error:
    pytest.skip(f"DALI is not installed: {error}", allow_module_level=True)

pytestmark = [
    # DALI leaves a socket to the garbage collector when it spawns a worker.
    pytest.mark.filterwarnings("ignore:unclosed <socket.socket:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*unclosed <socket.socket:pytest.PytestUnraisableExceptionWarning"),
]

CROPS = [RandomResizedCrop(32), RandomHorizontalFlip()]
FORMATS = ("hdf5", "tfrecord", "tar")
# Both resize by a triangle filter and round; DALI's weights come from a table. Of 255.
MEAN_DIFFERENCE, MOST_DIFFERENCE = 0.5, 6


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """42 images of several sizes, upright and turned, in two classes."""
    root = tmp_path_factory.mktemp("photos") / "images"
    for number in range(42):
        folder = root / "train" / ("ant", "bee")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        exif = Image.Exif()
        exif[0x0112] = 1 + number % 8
        (folder / f"{number:02d}.jpg").write_bytes(make_jpeg(number, (56 + 4 * (number % 5), 64), exif=exif))
    return root


@pytest.fixture(scope="module")
def packed(photos: Path, pack: Callable[..., Path]) -> Callable[[str], Path]:
    return lambda to: pack(photos, to, samples_per_shard=16)


@pytest.fixture
def reader(packed: Callable[[str], Path]) -> Iterator[readers.Reader]:
    with readers.open(packed("hdf5")) as reader:
        yield reader


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = multiprocessing.active_children()
    yield
    gc.collect()
    assert [child for child in multiprocessing.active_children() if child not in before] == []


def same_pixels(ours: Any, theirs: Any, scale: float = 1.0) -> None:
    difference = np.abs(np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)) * scale
    assert ours.shape == theirs.shape
    assert difference.mean() <= MEAN_DIFFERENCE and difference.max() < MOST_DIFFERENCE + 0.01


def same_epochs(ours: ImageLoader, theirs: DaliLoader, epochs: int = 2, scale: float = 1.0) -> None:
    for _ in range(epochs):
        for (images, labels), (others, other_labels) in zip(ours, theirs, strict=True):
            assert np.asarray(labels).tolist() == np.asarray(other_labels).tolist()
            same_pixels(images, others, scale)


def decoded(data: list[bytes]) -> list[np.ndarray[Any, Any]]:
    """What DALI makes of each, whole."""
    pipe = dali.Pipeline(batch_size=len(data), num_threads=2, device_id=None)
    with pipe:
        encoded = fn.external_source(lambda: [np.frombuffer(one, np.uint8) for one in data], dtype=dali.types.UINT8)
        pipe.set_outputs(fn.decoders.image(encoded, output_type=dali.types.RGB))
    (images,) = pipe.run()
    return [np.array(images[i]) for i in range(len(data))]


# --- the same as ours ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("to", FORMATS)
def test_samples_labels_and_crops_are_those_of_our_loader(packed: Callable[[str], Path], to: str) -> None:
    with readers.open(packed(to)) as reader:
        ours = ImageLoader(reader, 8, augment=CROPS, seed=3, layout="NCHW", threads=1)
        same_epochs(ours, DaliLoader(reader, 8, augment=CROPS, seed=3))


@pytest.mark.parametrize("to", FORMATS)
def test_whole_images_are_ours_to_the_bit(packed: Callable[[str], Path], to: str) -> None:
    """Through external_source in a pipeline of one's own; EXIF orientations 1 to 8 among them."""

    @dali.pipeline_def(batch_size=7, num_threads=2, device_id=None)
    def whole(reader: readers.Reader) -> Any:
        encoded, label = external_source(reader, 7, seed=1, tail="exact")
        return encoded, fn.decoders.image(encoded, output_type=dali.types.RGB), label

    with readers.open(packed(to)) as reader:
        pipe, source = whole(reader), Source(reader, 7, seed=1, tail="exact")
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


@pytest.mark.parametrize("kind", ["folder", "selection", "cached", "mmap"])
def test_every_kind_of_reader(kind: str, photos: Path, packed: Callable[[str], Path], place: dict[str, Any]) -> None:
    if kind == "folder":
        reader: Any = readers.open_folder(photos)
    else:
        reader = readers.open(packed("tar"), backend="mmap" if kind == "mmap" else "pread")
    if kind == "selection":
        reader = reader.select(labels=["bee"])
    if kind == "cached":
        reader = readers.cached(reader, **place)
    ops = [*CROPS, Normalize((0.5,) * 3, (0.5,) * 3)]
    ours = ImageLoader(reader, 8, augment=ops, seed=3, layout="NCHW", threads=1)
    theirs = DaliLoader(reader, 8, augment=ops, seed=3)
    same_epochs(ours, theirs, scale=127.5)
    del ours, theirs
    reader.close()


@pytest.mark.parametrize(
    "ops",
    [
        classification(32, train=False),
        [CenterCrop(40), Resize((24, 30)), RandomVerticalFlip(), RandomHorizontalFlip()],
        [Resize((40, 44)), RandomCrop((30, 35))],
        [RandomCrop(32)],
        [Crop(3, 5, 40, 41), RandomVerticalFlip(1.0)],
        celeba(28, crop=Crop(7, 3, 40, 40)),
    ],
    ids=lambda ops: "-".join(type(op).__name__ for op in ops),
)
def test_lists_of_ops(reader: readers.Reader, ops: list[Any]) -> None:
    scale = 255 * 0.225 if isinstance(ops[-1], Normalize) else 1.0
    ours = ImageLoader(reader, 8, augment=ops, seed=5, layout="NCHW", threads=1)
    same_epochs(ours, DaliLoader(reader, 8, augment=ops, seed=5, output="numpy"), epochs=1, scale=scale)


def test_layouts_and_dtypes(reader: readers.Reader) -> None:
    ops = [*CROPS, Normalize((0.5,) * 3, (0.5,) * 3)]
    for layout in ("NCHW", "NHWC"):
        ours = ImageLoader(reader, 8, augment=ops, seed=5, layout=layout, threads=1)
        options = PipelineOptions(layout=layout, dtype="float16", fused_decoding=False)
        theirs = DaliLoader(reader, 8, augment=ops, seed=5, options=options)
        images, labels = next(iter(theirs))
        assert images.dtype == torch.float16 and labels.dtype == torch.int64
        same_pixels(next(iter(ours))[0], images, 127.5)
    images, _ = next(iter(DaliLoader(reader, 8, augment=CROPS, options=PipelineOptions(dtype="float32"))))
    assert images.dtype == torch.float32 and 0 <= float(images.min()) < 0.1 and 0.9 < float(images.max()) <= 1


def test_all_media_that_both_decode() -> None:
    def encode(kind: str, mode: str = "RGB", **options: Any) -> bytes:
        pixels = np.random.default_rng(1).integers(0, 256, (10, 12, 3), dtype=np.uint8)
        out = io.BytesIO()
        Image.fromarray(pixels).resize((48, 40)).convert(mode).save(out, kind, **options)
        return out.getvalue()

    data = []
    for orientation in range(1, 9):
        turned = Image.Exif()
        turned[0x0112] = orientation
        data += [encode(kind, exif=turned) for kind in ("PNG", "WEBP", "TIFF", "JPEG")]
    data += [encode("JPEG", mode) for mode in ("L", "CMYK")] + [encode("PNG", mode) for mode in ("L", "P", "RGBA")]
    data += [encode("BMP"), encode("JPEG", progressive=True), encode("JPEG", subsampling=2, quality=60)]
    for one, theirs in zip(data, decoded(data), strict=True):
        ours = decode_image(one)
        assert np.array_equal(ours, theirs), one[:16]
    deep = np.random.default_rng(1).integers(0, 65536, (20, 30), np.uint16)
    grey = [encoded(Image.fromarray(deep), kind) for kind in ("PNG", "TIFF")]
    for one, theirs in zip(grey, decoded(grey), strict=True):
        assert np.abs(decode_image(one).astype(int) - theirs).max() <= 1


def test_what_dali_would_not_turn_or_stumbles_over_is_named(tmp_path: Path) -> None:
    odd = {
        "its orientation does not come from EXIF": with_segments(make_jpeg(1), XMP_PREFIX + xmp(6)),
        "stray bytes or a damaged segment": make_jpeg(2).replace(b"\xff\xda", b"stray\xff\xda"),
        "our decoder goes past this damage": encoded(Image.new("RGB", (32, 24)), "PNG")[:-12],
    }
    for number, (reason, data) in enumerate(odd.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "a.jpg").write_bytes(make_jpeg(3))
        (folder / "b.jpg").write_bytes(data)
        loader = DaliLoader(readers.open_folder(folder), 2, augment=CROPS, shuffle=False)
        with pytest.raises(BadSampleError, match=rf"sample 1 \(b\): .*{reason}"):
            list(loader)


# --- epochs, tails, resume ----------------------------------------------------------------------------------------
def labels_of(loader: DaliLoader) -> list[list[int]]:
    return [np.asarray(labels).tolist() for _, labels in loader]


@pytest.mark.parametrize(("tail", "sizes"), [("drop_last", [8] * 5), ("pad", [8] * 5 + [2]), ("exact", [8] * 5 + [2])])
@pytest.mark.parametrize("output", ["torch", "numpy"])
def test_lengths_and_tails(reader: readers.Reader, tail: Any, sizes: list[int], output: Any) -> None:
    loader = DaliLoader(reader, 8, augment=CROPS, tail=tail, output=output)
    assert len(loader) == len(sizes)
    for epoch in range(3):
        assert loader.epoch == epoch and [len(labels) for labels in labels_of(loader)] == sizes


def test_a_rank_without_samples_in_the_last_step(reader: readers.Reader) -> None:
    some = reader.select(indices=list(range(26)))
    for output in ("torch", "numpy"):
        loader = DaliLoader(some, 4, augment=CROPS, output=output, rank=0, world_size=3, tail="exact")
        *_, (images, labels) = iter(loader)
        assert len(loader) == 3 and images.shape == (0, 3, 32, 32) and len(labels) == 0
        assert str(images.dtype).endswith("uint8") and len(labels_of(loader)) == 3


@pytest.mark.parametrize("output", ["torch", "numpy"])
def test_resume_in_mid_epoch_is_exact(reader: readers.Reader, output: Any) -> None:
    def loader() -> DaliLoader:
        return DaliLoader(reader, 8, augment=CROPS, seed=7, output=output)

    whole = [batch for _ in range(2) for batch in loader_epoch(loader(), 2)]
    first = loader()
    for _, _ in zip(range(3), first, strict=False):
        state = first.state_dict()
    second = loader()
    second.load_state_dict(state)
    assert second.epoch == 0 and second.left == 2 and len(second) == 5
    rest = [batch for _ in range(2) for batch in second]
    for (images, labels), (others, other_labels) in zip(whole[3:10], rest, strict=True):
        assert np.array_equal(images, others) and np.array_equal(labels, other_labels)


def loader_epoch(loader: DaliLoader, epochs: int) -> Iterator[Any]:
    for _ in range(epochs):
        yield from loader


def test_states_are_shared_with_our_loader(reader: readers.Reader) -> None:
    ours = ImageLoader(reader, 8, augment=CROPS, seed=7, layout="NCHW", threads=1)
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
    with pytest.raises(ResumeError):
        theirs.load_state_dict({**state, "fingerprint": "other"})


def test_an_epoch_that_has_nothing_left(reader: readers.Reader) -> None:
    loader, straight = (DaliLoader(reader, 8, augment=CROPS, seed=2) for _ in range(2))
    loader.load_state_dict({**loader.state_dict(), "cursor": 40})
    assert loader.epoch == 1 and loader.left == len(loader) == 5
    straight.set_epoch(1)
    assert labels_of(loader) == labels_of(straight)


def test_closing_keeps_the_place(reader: readers.Reader) -> None:
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


def test_dali_restores_its_own_checkpoints(reader: readers.Reader) -> None:
    @dali.pipeline_def(batch_size=8, num_threads=1, device_id=None, enable_checkpointing=True)
    def encoded_only() -> Any:
        return external_source(reader, 8, seed=5)

    def run(pipe: Any, count: int) -> list[bytes]:
        return [np.array(pipe.run()[0][0]).tobytes() for _ in range(count)]

    pipe = encoded_only()
    run(pipe, 2)
    checkpoint, rest = pipe.checkpoint(), run(pipe, 3)
    assert run(encoded_only(checkpoint=checkpoint), 3) == rest


# --- processes ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_two_workers_give_what_none_do(reader: readers.Reader, start_method: Any) -> None:
    alone = DaliLoader(reader, 8, augment=CROPS, seed=3, tail="exact")
    options = PipelineOptions(workers=2, start_method=start_method)
    together = DaliLoader(reader, 8, augment=CROPS, seed=3, tail="exact", options=options)
    for _ in range(2):
        for (images, labels), (others, other_labels) in zip(alone, together, strict=True):
            assert torch.equal(images, others) and torch.equal(labels, other_labels)
    assert len(multiprocessing.active_children()) >= 2, "no worker was started: this test shows nothing"
    together.close()


@pytest.mark.parametrize("conditionals", [False, True])
def test_samples_one_by_one(reader: readers.Reader, conditionals: bool) -> None:
    start_method = "fork" if conditionals else "spawn"

    @dali.pipeline_def(batch_size=8, num_threads=1, device_id=None, py_num_workers=2, py_start_method=start_method)
    def labels_only(per: Any, parallel: bool) -> Any:
        return external_source(reader, 8, seed=5, parallel=parallel, per=per)[::-1]

    def epoch(**options: Any) -> list[list[int]]:
        pipe, found = labels_only(enable_conditionals=conditionals, **options), []
        while True:
            try:
                found.append(np.array(pipe.run()[0].as_array()).ravel().tolist())
            except StopIteration:
                return found

    expected = epoch(per="batch", parallel=False)
    assert len(expected) == 5 and epoch(per="sample", parallel=False) == expected
    assert epoch(per="sample", parallel=True) == expected == epoch(per="batch", parallel=True)


def test_leaving_early_ends_the_workers(reader: readers.Reader) -> None:
    loader = DaliLoader(reader, 8, augment=CROPS, options=PipelineOptions(workers=2, start_method="fork"))
    for _ in loader:
        assert len(multiprocessing.active_children()) == 2
        break
    assert multiprocessing.active_children() == []
    assert len(labels_of(loader)) == 5


def test_a_program_ends_with_a_loop_under_way(packed: Callable[[str], Path]) -> None:
    """And with finalizers that were there before DALI's workers; `multiprocessing` waits for those that run."""
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
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr


def test_a_killed_worker_is_an_error_and_no_hang(reader: readers.Reader) -> None:
    loader = DaliLoader(reader, 2, augment=CROPS, options=PipelineOptions(workers=2, start_method="fork"))
    batches = iter(loader)
    next(batches)
    child = multiprocessing.active_children()[0]
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join(10)
    with pytest.raises(WorkerError, match=r"a process that reads for DALI died \(exit status -9"):
        list(batches)
    state = loader.state_dict()
    assert 0 < state["cursor"] < 42 and len(labels_of(loader)) == 21


# --- errors -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("how", "reason"), [("cut", "expected a scan and an end marker"), ("gone", "CRC32C")])
def test_a_bad_sample_is_named(photos: Path, tmp_path: Path, workers: int, how: str, reason: str) -> None:
    packer.convert(photos, to="tar", output=tmp_path / "set", workers=1)
    shard = tmp_path / "set" / "train-000000.tar"
    with readers.open(tmp_path / "set") as reader:
        found = reader.byte_range(13)
        assert found is not None
        _, offset, length = found
    with open(shard, "r+b") as file:
        file.seek(offset + length // 2)
        file.write(bytes(length - length // 2))
    options = PipelineOptions(workers=workers, start_method="fork")
    with readers.open(tmp_path / "set", verify=how == "gone") as reader:
        key = reader.keys[13]
        loader = DaliLoader(reader, 4, augment=CROPS, shuffle=False, options=options)
        with pytest.raises((BadSampleError, readers.DamagedSampleError), match=reason) as caught:
            list(loader)
        assert key in str(caught.value) and "13" in str(caught.value)
        assert loader.state_dict()["cursor"] <= 12 and loader.epoch == 0


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


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("output", ["torch", "numpy"])
def test_bad_samples_are_skipped(packed: Callable[[str], Path], tmp_path: Path, workers: int, output: Any) -> None:
    """In batches of other sizes, and in the same batches as our own loader."""
    bad = (3, 13, 14, 41)
    with readers.open(damaged(packed, tmp_path / "set", bad)) as reader:
        options = PipelineOptions(workers=workers, start_method="fork")
        given: dict[str, Any] = {"augment": CROPS, "shuffle": False, "on_error": "skip", "seed": 3}
        theirs = DaliLoader(reader, 8, options=options, output=output, **given)
        ours = ImageLoader(reader, 8, layout="NCHW", threads=1, **given)
        for epoch in range(2):
            with pytest.warns(UserWarning, match=rf"epoch {epoch}: 4 bad samples were skipped, the first is sample 3 "):
                same_epochs(ours, theirs, epochs=1)
            assert theirs.bad_samples == ours.bad_samples
        theirs.close()


def test_bad_samples_are_replaced_also_after_a_resume(packed: Callable[[str], Path], tmp_path: Path) -> None:
    bad = Shuffled(42, 7).indices(0, np.array([0, 20, 33])).tolist()
    with readers.open(damaged(packed, tmp_path / "set", tuple(bad))) as reader:

        def loader() -> DaliLoader:
            return DaliLoader(reader, 8, augment=CROPS, seed=7, tail="exact", on_error="substitute")

        with pytest.warns(UserWarning, match="epoch 0: 3 bad samples were replaced"):
            whole = list(loader())
        assert sum(len(labels) for _, labels in whole) == 42
        first = loader()
        for _, _ in zip(range(2), first, strict=False):
            state = first.state_dict()
        second = loader()
        second.load_state_dict(state)
        with pytest.warns(UserWarning, match="epoch 0: 2 bad samples were replaced"):
            rest = list(second)
        for (images, labels), (others, other_labels) in zip(whole[2:], rest, strict=True):
            assert torch.equal(images, others) and torch.equal(labels, other_labels)
        assert [sample.index for sample in (*first.bad_samples, *second.bad_samples)] == bad


def test_a_sample_that_only_dali_fails_on_is_left_out_of_a_new_pipeline(tmp_path: Path) -> None:
    """Its header and its end are whole, so that nothing is known of it until it is decoded."""
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


def test_what_dali_does_not_decode_is_named(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jpg").write_bytes(make_jpeg(1))
    Image.new("RGB", (32, 24)).save(tmp_path / "c.gif")
    loader = DaliLoader(
        readers.open_folder(tmp_path), 1, graph=lambda encoded: fn.decoders.image(encoded), shuffle=False
    )
    with pytest.raises(BadSampleError, match=r"sample 2 \(c\): DALI does not decode GIF images"):
        list(loader)


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


def test_a_graph_of_ones_own(reader: readers.Reader) -> None:
    def graph(encoded: Any) -> Any:
        images = fn.decoders.image_random_crop(encoded, device="cpu", output_type=dali.types.RGB)
        return fn.resize(images, resize_x=20, resize_y=24)

    loader = DaliLoader(reader, 8, graph=graph, seed=3)
    assert [images.shape for images, _ in loader] == [(8, 24, 20, 3)] * 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"augment": [ColorJitter(0.1)]}, "DALI pipelines do not execute ColorJitter: use ImageLoader, "),
        ({"augment": [Resize(32)]}, "the size of the results depends on the image"),
        ({}, "a source without ops needs a graph"),
        ({"augment": CROPS, "graph": lambda encoded: encoded}, "leave augment out where a graph is given"),
        ({"augment": CROPS, "on_error": "ignore"}, "on_error is one of raise, skip, substitute, not 'ignore'"),
        ({"augment": CROPS, "output": "jax"}, "output is one of torch, numpy, not 'jax'"),
        ({"augment": classification(32), "options": PipelineOptions(dtype="uint8")}, "do not fit into uint8"),
    ],
)
def test_wrong_options(reader: readers.Reader, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DaliLoader(reader, 8, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"device": "cuda"}, "device is one of cpu, gpu"), ({"prefetch": 0}, "prefetch is 0, expected at least 1")],
)
def test_wrong_pipeline_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PipelineOptions(**options)


def test_an_old_dali_is_refused(reader: readers.Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dali, "__version__", "2.2.9")
    with pytest.raises(
        MissingExtraError, match=r"needs DALI from 2.3 on \(found 2.2.9\): run  pip install 'packer-vision\[dali\]'"
    ):
        DaliLoader(reader, 8, augment=CROPS)


def test_wrong_use_of_nodes(reader: readers.Reader) -> None:
    with pytest.raises(ValueError, match="no pipeline is being defined"):
        external_source(reader, 8)
    with dali.Pipeline(batch_size=4, num_threads=1, device_id=None):
        with pytest.raises(ValueError, match="the pipeline has batches of 4, the source of 8"):
            external_source(reader, 8)
        with pytest.raises(ValueError, match="samples one by one make no short batches"):
            external_source(reader, 4, tail="pad", per="sample")
        with pytest.raises(ValueError, match="no short batches, as on_error='skip' needs"):
            external_source(reader, 4, on_error="skip", per="sample")


def test_the_graph_for_a_gpu_can_be_defined(reader: readers.Reader) -> None:
    """No more can be had without one: whole images are decoded, then cut."""
    made = pipeline(Source(reader, 8, augment=CROPS), PipelineOptions(device="gpu", device_id=0))
    made._build_graph()
    operators = [type(operator._op).__name__ for operator in made._ops]
    assert "Image" in operators and "Slice" in operators and "ImageSlice" not in operators


@pytest.mark.parametrize("workers", [0, 2])
def test_the_example(packed: Callable[[str], Path], workers: int) -> None:
    """42 images are no batch of 50, so it runs with smaller ones."""
    script = Path(packer.__file__).parent.parent / "examples" / "dali_pipeline.py"
    code = script.read_text(encoding="utf-8").replace("BATCH, SIZE = 50, 160", "BATCH, SIZE = 8, 32")
    small = packed("hdf5").parent / "example.py"
    small.write_text(code, encoding="utf-8")
    done = run_python(small, packed("hdf5"), "--workers", workers)
    assert done.returncode == 0, done.stderr
    assert "goes on after 3 batches: 2 batches are left" in done.stdout
    assert "saw {0: 21, 1: 21} samples by class" in done.stdout
