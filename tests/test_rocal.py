"""Pipelines and loaders of rocAL, on rocAL itself where it is importable, otherwise on a double with its traps; and the
external source alone: its batches, and which images it converts or refuses.

`test_feed_contract` tests complete epochs, resuming, and bad samples.
"""

from __future__ import annotations

import gc
import io
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loader_options import grouped
from PIL import Image
from rocal_images import (
    BATCH,
    MIDDLE,
    SIZE,
    box_of,
    colour,
    epoch_of,
    faces,
    folder_of,
    mapped,
    numbers_of,
    reading_threads,
    solid,
)
from suites.programs import run_python

import readers
from cache.errors import BadSampleError, DatasetError, MissingExtraError, PipelineError, UnknownNameError
from readers import Ranks
from readers.augment import CELEBA_CROP
from readers.decode import decode_image
from readers.headers import parse_header
from readers.loader import ImageLoader
from readers.loop import Ahead
from readers.rocal import (
    MissingRocalError,
    RocalLoader,
    celeba,
    external_source,
    pipelines,
    resnet_eval,
    resnet_train,
)
from readers.rocal.pipelines import Machine, built, encoded_images
from readers.rocal.source import PADDING_BATCHES, Limits, Vetted, vet

pytestmark = pytest.mark.rocal
MEAN, STD = (255 * np.array(v).reshape(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
SIZES = [(96, 80), (60, 120), (128, 64), (40, 40)]
ONE = Ranks(rank=0, world_size=1)
TURNED = bytes.fromhex("4578696600004d4d002a00000008000101120003000000010006000000000000")
DOUBLE = str(Path(__file__).parent / "rocal_double")


@pytest.fixture
def reader(tmp_path: Path) -> readers.Reader:
    return folder_of(tmp_path / "images", {number: solid(number) for number in range(22)})


# --- epochs -------------------------------------------------------------------------------------------------------
def test_every_epoch_is_complete_whatever_rocal_does_at_its_end(
    rocal: Any, reader: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """A first-time user gets some of these endings wrong. stdout stays empty, since other programs read JSON from
    it."""
    with faces(reader, tail="exact") as loader:
        for epoch in range(20):
            assert loader.epoch == epoch and len(loader) == 6
            batches = epoch_of(loader)
            assert [len(batch) for batch in batches] == [4, 4, 4, 4, 4, 2]
            assert sorted(number for batch in batches for number in batch) == list(range(22))
    assert reading_threads() == []
    captured = capfd.readouterr()
    assert captured.out == "" and "kernels" in captured.err


@pytest.mark.parametrize("batches", [0, 2, 99])
def test_closing_and_dropping_at_any_time(rocal: Any, reader: Any, batches: int) -> None:
    """Releasing the pipeline would hang; the fixture checks that the double recorded no fault."""
    for drop in (True, False):
        loader = faces(reader)
        for number, _ in enumerate(loader if batches else ()):
            if number + 1 == batches:
                break
        if drop:
            del loader
            gc.collect()
        else:
            loader.close()
            loader.close()
            with pytest.raises(PipelineError, match="the loader is closed"):
                iter(loader)
        assert reading_threads() == []


def test_images_that_rocal_cannot_decode_are_converted(rocal: Any, tmp_path: Path) -> None:
    """rocAL would return another image, or garbage, with the label of the right one."""
    kinds: dict[int, dict[str, Any]] = {
        0: {"kind": "PNG"},
        1: {"mode": "CMYK"},
        2: {"progressive": True},
        3: {"exif": TURNED, "size": SIZE[::-1]},
        4: {"kind": "WEBP", "lossless": True},
        5: {"kind": "BMP"},
    }
    reader = folder_of(tmp_path / "images", {number: solid(number, **kinds.get(number, {})) for number in range(8)})
    with faces(reader, shuffle=False) as loader:
        assert epoch_of(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
        reasons = ("png images", "JPEGs of 4 components", "JPEGs to be turned upright", "webp images", "bmp images")
        assert loader.source.converted == dict.fromkeys(reasons, 1)


def test_bad_samples_are_reported_with_the_rest_of_a_batch(rocal: Any, tmp_path: Path) -> None:
    images = {number: solid(number) for number in range(12)}
    images |= {5: images[5][:-2], 7: images[7][:40]}
    reader = folder_of(tmp_path / "images", images)
    with faces(reader, shuffle=False, on_error="skip", fields=("image", "index", "key")) as loader:
        with pytest.warns(UserWarning, match="2 bad samples were skipped, the first is sample 5"):
            batches = [(numbers_of(images), indices.tolist(), keys) for images, indices, keys in loader]
        assert [numbers for numbers, _, _ in batches] == [[0, 1, 2, 3], [4, 6], [8, 9, 10, 11]]
        assert batches[1][1:] == ([4, 6], ["004/image4", "006/image6"])
        bad = [(sample.index, sample.position, sample.key) for sample in loader.bad_samples]
        assert bad == [(5, 5, "005/image5"), (7, 7, "007/image7")] and "truncated" in loader.bad_samples[0].reason


def test_a_state_of_our_loader(rocal: Any, reader: Any) -> None:
    image_loader = ImageLoader(reader, BATCH, seed=3, threads=1, ranks=ONE)
    loop = iter(image_loader)
    next(loop)
    with faces(reader) as loader:
        with pytest.warns(UserWarning, match="with 'rocal'"):
            loader.load_state_dict(image_loader.state_dict())
        assert epoch_of(loader) == [labels.tolist() for _, labels in loop]


def test_shifted_images_raise_at_the_end_of_an_epoch(rocal_double: Any, reader: Any) -> None:
    """rocAL's thread may take an image twice while a batch is fed; all later images are then one row late."""
    rocal_double.SLIPS.add(1)
    with faces(reader, shuffle=False, tail="drop_last") as loader:
        seen = []
        with pytest.raises(PipelineError, match=r"took 1 images twice in this epoch.*1 rows late"):
            for images, labels in loader:
                seen.append(numbers_of(images) == labels.tolist())
        assert seen == [True, False, False, False, False], "the double did not shift images"
        assert len(epoch_of(loader)) == 5, "the next epoch is wrong, too"
    with faces(reader) as loader:
        for number, _ in enumerate(loader):
            if number == 2:
                break
        with pytest.raises(PipelineError, match="took 1 images twice"):
            iter(loader)
        assert len(epoch_of(loader)) == 5


def test_errors_at_the_end_of_an_epoch_stay_inside_the_padding(rocal_double: Any, reader: Any) -> None:
    """With the source and rocAL's iterator, without our loader, for all epoch endings of the double."""
    from amd.rocal.plugin.generic import ROCALGenericIterator

    endings = set()
    for seed in range(20):
        rocal_double.seed_traps(seed)
        source = external_source(reader, BATCH, seed=3, ranks=Ranks(tail="exact", rank=0, world_size=1))
        iterator = ROCALGenericIterator(celeba(source, size=16, crop=MIDDLE, threads=1))
        endings.add(rocal_double.CONTEXTS[-1].ending)
        seen = []
        for (outputs, labels), _ in zip(iterator, range(len(source)), strict=False):
            samples = labels >= 0
            assert numbers_of(outputs[0][samples]) == labels[samples].tolist()
            seen += labels[samples].tolist()
        for _ in iterator:
            pass
        assert sorted(seen) == list(range(22))
        source.close()
    assert endings == {"right", "stale", "lost", "extra"} and rocal_double.FAULTS == []


# --- the images of pipelines --------------------------------------------------------------------------------------
def boxes_of(root: Path, count: int, pipeline: Any, **options: Any) -> Iterator[tuple[int, tuple[float, ...]]]:
    """The (number, box) of each of the images of SIZES; the number must match the label."""
    reader = folder_of(root / "images", {number: mapped(number, SIZES[number % 4]) for number in range(count)})
    source = external_source(reader, BATCH, ranks=ONE)
    with RocalLoader(pipeline(source, threads=1, **options), source) as loader:
        for images, labels in loader:
            for image, label in zip(images * STD + MEAN, labels.tolist(), strict=True):
                number, box = box_of(image.transpose(1, 2, 0), SIZES[label % 4])
                assert number == label
                yield number, box


def test_resnet_train_shows_exactly_one_box_of_each_image(rocal: Any, tmp_path: Path) -> None:
    """Boxes smaller and larger than the output: pixels that were not written would be uninitialised memory."""
    areas, mirrored = [], 0
    for number, (left, top, right, bottom) in boxes_of(tmp_path, 32, resnet_train, size=48, seed=2):
        mirrored += right < left
        left, right = sorted((left, right))
        width, height = SIZES[number % 4]
        assert -2 < left < right < width + 2 and -2 < top < bottom < height + 2, "a box exceeds the image"
        areas.append((right - left) * (bottom - top) / (width * height))
    assert len(areas) == 32 and min(areas) > 0.04 and max(areas) < 1.1
    assert max(areas) - min(areas) > 0.3, "no random boxes"
    assert 4 <= mirrored <= 28, "no random flips"


def test_resnet_eval_shows_the_middle(rocal: Any, tmp_path: Path) -> None:
    for number, box in boxes_of(tmp_path, 8, resnet_eval, size=28, resize=32):
        width, height = SIZES[number % 4]
        side = min(width, height) * 28 / 32
        expected = ((width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2)
        np.testing.assert_allclose(box, expected, atol=1.5, err_msg=f"image {number} of {width} x {height}")


@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_celeba_shows_the_box_of_the_reference(rocal: Any, tmp_path: Path, flip: float) -> None:
    """Compared with Pillow without antialiasing, as rocAL has none."""
    images = {i: mapped(i, (178, 218)) for i in range(4)}
    source = external_source(folder_of(tmp_path / "images", images), BATCH, shuffle=False, ranks=ONE)
    with RocalLoader(celeba(source, flip=flip, threads=1), source) as loader:
        ((shown, labels),) = list(loader)
    top, left, height, width = CELEBA_CROP.top, CELEBA_CROP.left, CELEBA_CROP.height, CELEBA_CROP.width
    for pixels, label in zip(shown * 127.5 + 127.5, labels.tolist(), strict=True):
        with Image.open(io.BytesIO(images[label])) as whole:
            corners = (left, top, left + width, top + height)
            expected = np.asarray(whole.transform((64, 64), Image.Transform.EXTENT, corners, Image.Resampling.BILINEAR))
        expected = expected[:, ::-1] if flip else expected
        assert np.abs(pixels.transpose(1, 2, 0) - expected).max() < 2, "another box, or another image"


def test_a_user_defined_rocal_graph(rocal: Any, reader: Any) -> None:
    source = external_source(reader, BATCH, ranks=ONE)

    def graph(library: Any) -> Any:
        return library.fn.resize(encoded_images(library, source), resize_width=10, resize_height=6)

    with RocalLoader(built(graph, Machine(threads=1), batch_size=BATCH, seed=0), source) as loader:
        for images, labels in loader:
            assert images.dtype == np.uint8 and images.shape == (4, 6, 10, 3)
            assert numbers_of(images.transpose(0, 3, 1, 2).astype(np.float32), 0, 1) == labels.tolist()


def test_pipelines_refuse_invalid_options(rocal: Any, reader: Any, tmp_path: Path) -> None:
    source = external_source(reader, BATCH)
    larger = external_source(reader, BATCH, max_height=80, max_width=96)
    for call, message in [
        (lambda: celeba(source), r"Crop\(top=40, .* is not within the images, 40 x 48"),
        (lambda: celeba(larger, crop=MIDDLE), "max_height=40 and max_width=48"),
        (lambda: celeba(source, crop=MIDDLE, flip=2), "flip is a probability"),
        (lambda: celeba(source, crop=MIDDLE, device="gpu"), "device is one of cpu, cuda, not 'gpu'"),
        (lambda: resnet_train(source, threads=0), "threads is 1 or more"),
        (lambda: resnet_eval(source, size=224, resize=200), "resize 200 is smaller"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    sizes = folder_of(tmp_path / "several", {0: solid(0), 1: solid(1, size=(50, 50))})
    with pytest.raises(DatasetError, match=r"2 sizes.*40 x 48; 50 x 50"):
        celeba(external_source(sizes, 2))
    with pytest.raises(UnknownNameError, match="no field 'mask'"):
        RocalLoader(None, source, fields=("mask",))
    pipeline = celeba(source, crop=MIDDLE, size=16)
    with pytest.raises(ValueError, match="another source"):
        RocalLoader(pipeline, external_source(reader, BATCH))
    RocalLoader(pipeline, source).close()
    with pytest.raises(ValueError, match="has, or had, a loader"):
        RocalLoader(pipeline, source)


# --- faults of rocAL ----------------------------------------------------------------------------------------------
def fails(*_: Any) -> Any:
    raise RuntimeError("Loader module failed")


def ends(iterator: Any) -> Any:
    raise StopIteration


def never_ends(iterator: Any) -> Any:
    return iterator.output_list, None


@pytest.mark.parametrize(
    ("instead", "message"),
    [(fails, "rocAL failed: Loader module failed"), (ends, "ended the epoch"), (never_ends, "does not end: 8 steps")],
)
def test_errors_inside_rocal(
    rocal_double: Any, reader: Any, monkeypatch: pytest.MonkeyPatch, instead: Any, message: str
) -> None:
    """From the third step on. A pipeline that does not end is never released: a leak is better than a call that
    hangs."""
    from amd.rocal.plugin import generic

    class Broken(generic.ROCALGenericIterator):  # type: ignore[misc,name-defined]
        broken, steps = True, 0

        def __next__(self) -> Any:
            self.steps += 1
            return instead(self) if self.broken and self.steps > 2 else super().__next__()

    monkeypatch.setattr(generic, "ROCALGenericIterator", Broken)
    loader = faces(reader, shuffle=False)
    loop = iter(loader)
    with pytest.raises(PipelineError, match=message):
        next(loop), next(loop)
        if instead is never_ends:
            loader.close()
        next(loop)
    Broken.broken = False
    loader.close()
    del loader, loop
    gc.collect()
    assert rocal_double.CONTEXTS[-1].released == (instead is not never_ends)
    assert reading_threads() == [] and rocal_double.FAULTS == []


def test_a_pipeline_that_cannot_be_built(rocal_double: Any, reader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """rocAL exits the interpreter, or ends the process by a segmentation fault."""
    source = external_source(reader, BATCH, ranks=ONE)
    with monkeypatch.context() as patch, pytest.raises(PipelineError, match="cannot build this pipeline"):
        patch.setattr(rocal_double, "rocalVerify", lambda context: 2)
        celeba(source, crop=MIDDLE)
    with monkeypatch.context() as patch, pytest.raises(PipelineError, match="cannot make this pipeline"):
        patch.setattr(rocal_double, "rocalCreate", fails)
        celeba(source, crop=MIDDLE)

    def graph(library: Any) -> Any:
        return library.fn.resize(encoded_images(library, source), resize_width=0, resize_height=0)

    with pytest.raises(PipelineError, match="the graph returned None, like failing operators of rocAL"):
        built(graph, Machine(), batch_size=4, seed=0)


def test_a_gpu_that_this_rocal_cannot_use_is_refused(
    rocal: Any, reader: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rocAL would silently run on the CPU. A build is recognised by the libraries that it is linked with."""
    maps, library = tmp_path / "maps", tmp_path / "librocal.so.2"
    maps.write_text(f"7f00-7f01 r-xp 00000000 08:01 12 {library}\n7f01-7f02 rw-p 0 0:0 0\n")
    for content, expected in ((b"\0libopenvx.so.1\0", False), (b"\0libamdhip64.so.6\0", True)):
        library.write_bytes(content)
        assert pipelines.gpu_backend(maps) is expected
    assert pipelines.gpu_backend(tmp_path / "none") is None
    monkeypatch.setattr(pipelines, "gpu_backend", lambda: False)
    with pytest.raises(PipelineError, match=r'built for the CPU alone.* give device="cpu"'):
        celeba(external_source(reader, BATCH, ranks=ONE), crop=MIDDLE, device="cuda")


def test_the_device_of_a_pipeline(rocal_double: Any, reader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from amd.rocal import types

    monkeypatch.setattr(pipelines, "gpu_backend", lambda: True)
    made: list[tuple[Any, ...]] = []
    create = rocal_double.rocalCreate
    monkeypatch.setattr(rocal_double, "rocalCreate", lambda *args: made.append(args) or create(*args))
    for name, value in {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    source = external_source(reader, BATCH)
    assert (source.rank, source.world_size) == (3, 4)
    celeba(source, crop=MIDDLE, device="cuda", threads=5, seed=9)
    celeba(source, crop=MIDDLE, device="cuda", device_id=7, threads=5)
    celeba(source, crop=MIDDLE, threads=2)
    assert made == [(4, types.GPU, 1, 5, 2, 9), (4, types.GPU, 7, 5, 2, 0), (4, types.CPU, 0, 2, 2, 0)]
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    celeba(source, crop=MIDDLE, device="cuda", threads=5)
    assert made[-1][2] == 0, "not the only GPU that this rank sees"


def test_an_interpreter_that_ends_in_the_middle_of_a_loop(rocal_double: Any, tmp_path: Path) -> None:
    folder_of(tmp_path / "images", {number: solid(number) for number in range(22)}).close()
    script = f"""
import atexit, sys
sys.path.insert(0, {DOUBLE!r})
import rocal_pybind, readers
atexit.register(lambda: print(context.waiting, context.released, rocal_pybind.FAULTS))
from readers.augment import Crop
from readers.rocal import RocalLoader, celeba, external_source
source = external_source(readers.open_folder({str(tmp_path / "images")!r}), 4)
loader = RocalLoader(celeba(source, size=16, crop=Crop(4, 8, 32, 32)), source)
(context,) = rocal_pybind.CONTEXTS
loop = iter(loader)
next(loop)
print(context.waiting)
"""
    done = run_python("-c", script)
    assert (done.returncode, done.stdout) == (0, "True\nFalse True []\n"), done.stderr


def test_without_rocal_the_message_names_the_installation(reader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amd", None)
    source = external_source(reader, BATCH, ranks=ONE)
    with pytest.raises(MissingRocalError, match=r"no wheel.*install ROCm.*PYTHONPATH=/opt/rocm/lib") as caught:
        celeba(source, crop=MIDDLE)
    assert isinstance(caught.value, MissingExtraError) and isinstance(caught.value, ImportError)


# --- the source alone ---------------------------------------------------------------------------------------------
class Wrapped:
    """A reader with changed attributes."""

    def __init__(self, base: Any, **changed: Any) -> None:
        self._base = base
        self.__dict__.update(changed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def __len__(self) -> int:
        return len(self._base)


def fed_by(source: Any, batches: int) -> list[Any]:
    fed = [next(source) for _ in range(batches)]
    source.close()
    return fed


def vetted(data: bytes, limits: Any = (100, 100), size: tuple[int, int] = (0, 0), convert: bool = True) -> Vetted:
    return vet(data, Limits(*limits), size=size, convert=convert, quality=95)


def test_the_content_of_a_batch(tmp_path: Path, reader: Any) -> None:
    """Views of the bytes read, padded to a batch; and padding batches after the last one."""
    read: list[bytes] = []

    def read_many(indices: Any, field: str = "image") -> Sequence[Any]:
        data = reader.read_many(indices, field)
        read.extend(data)
        return data

    ranks = Ranks(rank=0, world_size=1, tail="exact")
    source = external_source(Wrapped(reader, read_many=read_many), BATCH, seed=1, ranks=ranks)
    assert iter(source) is source and (len(source), source.n) == (6, (6 + PADDING_BATCHES) * BATCH)
    fed = fed_by(source, 6 + PADDING_BATCHES + 3)
    seen = []
    for images, labels, lengths in fed:
        assert isinstance(images, list) and isinstance(lengths, list) and isinstance(labels, np.ndarray)
        assert len(images) == len(lengths) == BATCH and labels.shape == (BATCH,) and labels.dtype == np.int32
        for image, label, length in zip(images, labels.tolist(), lengths, strict=True):
            assert image.dtype == np.uint8 and image.ndim == 1 and image.flags.c_contiguous and image.size == length
            assert parse_header(image.tobytes()).media == "jpeg"
            if label >= 0:
                assert image.tobytes() == solid(label)
                assert np.shares_memory(image, np.frombuffer(read[len(seen)], np.uint8)), "the image was copied"
                seen.append(label)
    assert sorted(seen) == list(range(22))
    assert fed[5][1].tolist()[2:] == [-1, -1] and all((labels == -1).all() for _, labels, _ in fed[6:])


def test_fed_images_stay_in_memory_for_a_while(reader: Any) -> None:
    """rocAL stores addresses only; the batch that it is decoding, and those in its queues, must stay in memory."""
    source = external_source(reader, 2, ranks=ONE)
    source.start()
    references = []
    for _ in range(11):
        images, _, _ = next(source)
        references.append(weakref.ref(images[0]))
        del images
    gc.collect()
    assert [reference() is not None for reference in references[-6:]] == [True] * 6
    assert all(reference() is None for reference in references[:4]), "memory was not released"
    source.close()
    gc.collect()
    assert all(reference() is None for reference in references[:-1])


def test_reading_ahead_is_bounded_and_ends(reader: Any) -> None:
    batches: list[int] = []
    fourth = threading.Event()

    def read_many(indices: Any, field: str = "image") -> Sequence[Any]:
        batches.append(len(indices))
        if len(batches) > 3:
            fourth.set()
        return list(reader.read_many(indices, field))

    source = external_source(Wrapped(reader, read_many=read_many), 2, ahead=3, ranks=ONE)
    assert batches == [], "images were read before the epoch began"
    source.start()
    assert not fourth.wait(0.3)
    next(source)
    assert fourth.wait(300), "no batch was read after one was taken"
    source.close()
    assert reading_threads() == []
    source.start()
    del source
    gc.collect()
    assert reading_threads() == []


def test_results_before_an_error_are_handed_out() -> None:
    def make(step: int) -> int:
        if step == 2:
            raise KeyError("two")
        return step

    ahead = Ahead(make, 5, 4, "test")
    assert (ahead.take(), ahead.take()) == (0, 1)
    for _ in range(2):
        with pytest.raises(KeyError, match="two"):
            ahead.take()
    ahead.stop()
    done = Ahead(lambda step: step, 1, 4, "test")
    assert done.take() == 0
    with pytest.raises(RuntimeError, match="no further batch"):
        done.take()


KINDS = ["PNG RGB", "PNG L", "PNG 1", "JPEG CMYK", "WEBP RGB", "GIF RGB", "BMP RGB", "TIFF RGB", "JPEG turned"]


@pytest.mark.parametrize("kind", KINDS)
def test_converted_images_become_baseline_jpegs(kind: str) -> None:
    format, mode = kind.split()
    data = solid(9, exif=TURNED) if mode == "turned" else solid(9, format, mode)
    image = vetted(data)
    jpeg = image.data.tobytes()
    process = parse_header(jpeg).process
    factors = jpeg[jpeg.index(bytes([0xFF, process])) + 11 :: 3][:3]  # of the frame header: T.81, B.2.2
    assert image.reason and process == 0xC0 and factors == b"\x11\x11\x11"
    before, after = decode_image(data), decode_image(jpeg)
    assert before.shape == after.shape and np.abs(before.astype(int) - after).mean() < 3
    with pytest.raises(BadSampleError, match=r"rocAL does not decode.*convert=True"):
        vetted(data, convert=False)


def test_images_that_rocal_decodes_are_unchanged_and_others_converted() -> None:
    for options in ({}, {"progressive": True}, {"mode": "L"}, {"subsampling": 2}):
        data = solid(9, **options)  # type: ignore[arg-type]
        image = vetted(data, (10, 10), (40, 48))
        assert (image.reason, image.data.tobytes()) == ("", data), options
    image = vetted(solid(9, size=(400, 100)), (20, 20), (100, 400))  # rocAL would crop it
    header = parse_header(image.data.tobytes())
    assert (header.height, header.width) == (40, 160) and "over 8 times 20 x 20" in image.reason
    assert np.abs(decode_image(image.data.tobytes()).astype(int) - colour(9)).max() <= 4
    # TurboJPEG does not decode after a libjpeg warning about the header.
    image = vetted(solid(3).replace(b"\xff\xda", b"stray\xff\xda"), size=(40, 48))
    assert image.reason == "JPEGs with damage before their pixels"
    assert np.abs(decode_image(image.data.tobytes()).astype(int) - colour(3)).max() <= 4


@pytest.mark.parametrize(
    ("at", "value", "reason"),
    [(-1, 12, "JPEGs of 12 bits"), (6, 0x31, "JPEGs of unusual colour sampling"), (9, 0x21, "unusual colour sampling")],
)
def test_jpegs_of_which_turbojpeg_reads_only_the_header(at: int, value: int, reason: str) -> None:
    """rocAL would show uninitialised memory."""
    data = bytearray(solid(3))
    data[data.index(b"\xff\xc0") + 5 + at] = value
    with pytest.raises(BadSampleError, match=rf"rocAL does not decode .*{reason}"):
        vetted(bytes(data), convert=False)
    if value == 12:
        with pytest.raises(BadSampleError, match="has 12 bits a sample"):
            vetted(bytes(data))
    else:
        difference = np.abs(decode_image(vetted(bytes(data)).data.tobytes()).astype(int) - decode_image(bytes(data)))
        assert difference.mean() < 4


def test_images_that_differ_from_their_header_are_bad_samples() -> None:
    for cut in (3, 10, 150, -40, -2, -1):
        with pytest.raises(BadSampleError, match=r"truncated|expected"):
            vetted(solid(3)[:cut])
    with pytest.raises(BadSampleError, match="the index says 41 x 48 pixels, found 40 x 48"):
        vetted(solid(3), size=(41, 48))


def test_a_batch_without_its_bad_samples(tmp_path: Path) -> None:
    """rocAL ends the process where it can decode no image of a batch, and accepts no short batch."""
    images = {number: solid(number) if number > 3 else solid(number)[:-2] for number in range(8)}
    images |= {4: solid(4, "PNG"), 6: solid(6, mode="CMYK")}
    reader = folder_of(tmp_path / "images", images)
    source = external_source(reader, BATCH, shuffle=False, convert=False, on_error="skip", ranks=ONE)
    (grey, labels, _), (_, others, _) = fed_by(source, 2)
    assert labels.tolist() == [-1] * 4 and others.tolist() == [5, 7, -1, -1]
    assert all(decode_image(image.tobytes()).shape == (16, 16, 3) for image in grey)
    assert [(bad.key, bad.reason.partition(";")[0]) for bad in source.bad_samples[4:]] == [
        ("004/image4", "rocAL does not decode png images"),
        ("006/image6", "rocAL does not decode JPEGs of 4 components"),
    ]


def test_limits_come_from_the_index(tmp_path: Path) -> None:
    images = {0: solid(0, size=(70, 30)), 1: solid(1, size=(20, 60), exif=TURNED), 2: solid(2, size=(50, 40))}
    reader = folder_of(tmp_path / "images", images)
    source = external_source(reader, 2, ranks=ONE)
    assert (source.max_height, source.max_width) == (40, 70), "the second upright image is not 60 wide and 20 high"
    source = external_source(reader, 2, max_height=33, ranks=ONE)
    assert (source.max_height, source.max_width) == (33, 70)
    large = folder_of(tmp_path / "large", {0: solid(0, size=(1500, 16))})
    assert external_source(large, 2, ranks=ONE).max_width == 1024
    unknown = Wrapped(reader, info=reader.info._replace(height=np.zeros(3, np.uint32), width=np.zeros(3, np.uint32)))
    with pytest.raises(DatasetError, match="give max_height and max_width"):
        external_source(unknown, 2, ranks=ONE)
    assert external_source(unknown, 2, max_height=9, max_width=8, ranks=ONE).max_width == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 1}, "batch_size of 2 or more"),
        ({"quality": 80}, "quality is 95 to 100, not 80"),
        ({"ahead": 0}, "ahead is 1 or more"),
        ({"max_height": 0, "max_width": 5}, "max_height and max_width are 1 or more"),
        ({"on_error": "ignore"}, "on_error is one of raise, skip, substitute"),
        ({"rank": 3, "world_size": 1}, "rank 3 is outside the world of 1"),
    ],
)
def test_options_are_checked(reader: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        external_source(reader, **grouped({"batch_size": BATCH, **options}))


def test_labels_must_fit_into_32_bits(reader: Any) -> None:
    source = external_source(Wrapped(reader, labels=reader.labels + (1 << 31)), BATCH, ranks=ONE)
    with pytest.raises(ValueError, match="labels of 32 bits"):
        next(source)
    source.close()
