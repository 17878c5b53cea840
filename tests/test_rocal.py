"""Pipelines and loaders of rocAL, on rocAL itself where it is importable, otherwise on a double that has its traps."""

from __future__ import annotations

import gc
import importlib.util
import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rocal_images import SIZE, box_of, folder_of, mapped, numbers_of, solid
from suites.programs import run_python

import packer
import readers
from cache.errors import BadSampleError, DatasetError, PipelineError, UnknownNameError
from readers.augment import CELEBA_CROP, Crop
from readers.loader import ImageLoader
from readers.rocal import RocalLoader, celeba, external_source, pipelines, resnet_eval, resnet_train
from readers.rocal.pipelines import Machine, built, encoded_images

pytestmark = pytest.mark.rocal
BATCH = 4
MEAN, STD = (255 * np.array(v).reshape(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
SIZES = [(96, 80), (60, 120), (128, 64), (40, 40)]
MIDDLE = Crop(4, 8, 32, 32)  # of rocal_images.SIZE


@pytest.fixture
def reader(tmp_path: Path) -> readers.Reader:
    return folder_of(tmp_path / "images", {number: solid(number) for number in range(22)})


def faces(reader: Any, **options: Any) -> RocalLoader:
    """A pipeline whose images keep their colours: only flips are drawn."""
    fields = options.pop("fields", ("image", "label"))
    source = external_source(reader, BATCH, **{"seed": 3, "world_size": 1, "rank": 0, **options})
    return RocalLoader(celeba(source, size=16, crop=MIDDLE, threads=1), source, fields=fields)


def epoch_of(loader: RocalLoader) -> list[list[int]]:
    """The images of each batch, which must be those of its labels."""
    batches = []
    for images, labels in loader:
        assert images.dtype == np.float32 and images.shape == (len(labels), 3, 16, 16) and labels.dtype == np.int64
        assert numbers_of(images) == labels.tolist()
        batches.append(labels.tolist())
    return batches


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "packer-rocal-ahead"]


def test_every_epoch_is_whole_whatever_rocal_does_at_its_end(rocal: Any, reader: Any) -> None:
    """A naive user has some of these wrong: see test_rocal_double.py."""
    with faces(reader, tail="exact") as loader:
        epochs = []
        for epoch in range(20):
            assert loader.epoch == epoch and len(loader) == 6
            batches = epoch_of(loader)
            assert [len(batch) for batch in batches] == [4, 4, 4, 4, 4, 2]
            assert sorted(flat(batches)) == list(range(22))
            epochs.append(batches)
        assert epochs[0] != epochs[1]
    assert reading_threads() == []


def test_a_rank_without_a_sample_in_the_last_step(rocal: Any, tmp_path: Path) -> None:
    reader = folder_of(tmp_path / "images", {number: solid(number) for number in range(9)})
    with faces(reader, rank=0, world_size=2, tail="exact") as loader:
        assert [len(batch) for batch in epoch_of(loader)] == [4, 0]


@pytest.mark.parametrize("after", [0, 3])
def test_a_loop_left_early(rocal: Any, reader: Any, after: int) -> None:
    with faces(reader) as loader:
        for epoch in range(4):
            loop = iter(loader)
            for _ in range(after):
                next(loop)
            assert loader.epoch == epoch
            del loop
        assert len(epoch_of(loader)) == 5 and loader.epoch == 5, "the loops left early were epochs 0 to 3"
    assert reading_threads() == []


def test_an_exception_in_the_loop(rocal: Any, reader: Any) -> None:
    with faces(reader) as loader:
        with pytest.raises(ZeroDivisionError):
            for _ in loader:
                1 / 0  # noqa: B018
        assert len(epoch_of(loader)) == 5
    with pytest.raises(ZeroDivisionError), faces(reader) as loader:
        for _ in loader:
            1 / 0  # noqa: B018


@pytest.mark.parametrize("batches", [0, 2, 99])
def test_closing_and_dropping_at_any_time(rocal: Any, reader: Any, batches: int) -> None:
    """Release would hang; the fixture checks that the double noticed none."""
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


def test_an_error_of_the_source(rocal: Any, tmp_path: Path) -> None:
    images = {number: solid(number) for number in range(12)}
    images[7] = images[7][:-2]
    reader = folder_of(tmp_path / "images", images)
    with faces(reader, shuffle=False) as loader:
        seen = []
        for _ in range(2):
            with pytest.raises(BadSampleError, match=r"sample 7 \(007/image7\).*truncated.*on_error='skip'"):
                for _, labels in loader:
                    seen += labels.tolist()
        assert seen == [0, 1, 2, 3] * 2, "the batches before are handed out"


def test_bad_samples_are_skipped_and_reported(rocal: Any, tmp_path: Path) -> None:
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


def test_what_rocal_does_not_decode_is_converted(rocal: Any, tmp_path: Path) -> None:
    """It would be another image, or garbage, under the label of the right one."""
    exif = bytes.fromhex("4578696600004d4d002a00000008000101120003000000010006000000000000")
    images = {
        0: solid(0, "PNG"),
        1: solid(1, mode="CMYK"),
        2: solid(2, progressive=True),
        3: solid(3, exif=exif, size=SIZE[::-1]),
        4: solid(4, "WEBP", lossless=True),
        5: solid(5, "BMP"),
        6: solid(6),
        7: solid(7),
    }
    reader = folder_of(tmp_path / "images", images)
    with faces(reader, shuffle=False) as loader:
        assert epoch_of(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert loader.source.converted == {
            "png images": 1,
            "JPEGs of 4 components": 1,
            "JPEGs to be turned upright": 1,
            "webp images": 1,
            "bmp images": 1,
        }


def test_a_state_of_our_own_loader(rocal: Any, reader: Any) -> None:
    ours = ImageLoader(reader, BATCH, seed=3, threads=1, rank=0, world_size=1)
    loop = iter(ours)
    next(loop)
    with faces(reader) as loader:
        with pytest.warns(UserWarning, match="with 'rocal'"):
            loader.load_state_dict(ours.state_dict())
        assert epoch_of(loader) == [labels.tolist() for _, labels in loop]


def sizes_of(root: Path, count: int) -> Any:
    """A source of mapped images of SIZES."""
    reader = folder_of(root / "images", {number: mapped(number, SIZES[number % 4]) for number in range(count)})
    return external_source(reader, BATCH, rank=0, world_size=1)


def boxes_of(loader: RocalLoader) -> Iterator[tuple[int, tuple[float, ...]]]:
    """(number, box) of each image of an epoch, which must be the image of its label."""
    for images, labels in loader:
        for image, label in zip(images * STD + MEAN, labels.tolist(), strict=True):
            number, box = box_of(image.transpose(1, 2, 0), SIZES[label % 4])
            assert number == label
            yield number, box


def test_resnet_train_shows_a_box_of_each_image_and_nothing_else(rocal: Any, tmp_path: Path) -> None:
    """Boxes smaller and larger than the result: pixels that are not written would be uninitialised memory."""
    source = sizes_of(tmp_path, 32)
    areas, mirrored = [], 0
    with RocalLoader(resnet_train(source, size=48, threads=1, seed=2), source) as loader:
        for number, (left, top, right, bottom) in boxes_of(loader):
            mirrored += right < left
            left, right = sorted((left, right))
            width, height = SIZES[number % 4]
            assert -2 < left < right < width + 2 and -2 < top < bottom < height + 2, "beyond the image"
            areas.append((right - left) * (bottom - top) / (width * height))
    assert len(areas) == 32 and min(areas) > 0.04 and max(areas) < 1.1
    assert max(areas) - min(areas) > 0.3, "no random boxes"
    assert 4 <= mirrored <= 28, "no random flips"


def test_resnet_eval_shows_the_middle(rocal: Any, tmp_path: Path) -> None:
    source = sizes_of(tmp_path, 8)
    with RocalLoader(resnet_eval(source, size=28, resize=32, threads=1), source) as loader:
        for number, box in boxes_of(loader):
            width, height = SIZES[number % 4]
            side = min(width, height) * 28 / 32
            expected = ((width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2)
            np.testing.assert_allclose(box, expected, atol=1.5, err_msg=f"image {number} of {width} x {height}")


@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_celeba_shows_the_box_of_the_reference(rocal: Any, tmp_path: Path, flip: float) -> None:
    """Against Pillow, without antialiasing, as rocAL has none."""
    images = {i: mapped(i, (178, 218)) for i in range(4)}
    source = external_source(folder_of(tmp_path / "images", images), BATCH, shuffle=False, rank=0, world_size=1)
    with RocalLoader(celeba(source, flip=flip, threads=1), source) as loader:
        ((shown, labels),) = list(loader)
    top, left, height, width = CELEBA_CROP.top, CELEBA_CROP.left, CELEBA_CROP.height, CELEBA_CROP.width
    assert (top, left, height, width) == (40, 15, 148, 148)
    for pixels, label in zip(shown * 127.5 + 127.5, labels.tolist(), strict=True):
        with Image.open(io.BytesIO(images[label])) as whole:
            corners = (left, top, left + width, top + height)
            expected = np.asarray(whole.transform((64, 64), Image.Transform.EXTENT, corners, Image.Resampling.BILINEAR))
        expected = expected[:, ::-1] if flip else expected
        assert np.abs(pixels.transpose(1, 2, 0) - expected).max() < 2, "another box, or another image"


@pytest.mark.parametrize("batch", [0, 3])
def test_images_under_the_labels_of_others_raise_at_the_end(rocal_double: Any, reader: Any, batch: int) -> None:
    """rocAL's thread may take an image twice while a batch is fed; all images after it come a row late."""
    rocal_double.SLIPS.add(batch)
    with faces(reader, shuffle=False, tail="drop_last") as loader:
        seen = []
        with pytest.raises(PipelineError, match=r"took 1 images twice in this epoch.*1 rows late"):
            for images, labels in loader:
                seen.append((numbers_of(images), labels.tolist()))
        wrong = [number for number, (shown, labels) in enumerate(seen) if shown != labels]
        assert len(seen) == 5 and wrong == list(range(batch, 5)), "the double does not shift images"
        assert len(epoch_of(loader)) == 5, "the next epoch is right again"


def test_a_loop_left_early_is_judged_when_the_next_begins(rocal_double: Any, reader: Any) -> None:
    rocal_double.SLIPS.add(1)
    with faces(reader) as loader:
        for number, _ in enumerate(loader):
            if number == 2:
                break
        with pytest.raises(PipelineError, match="took 1 images twice"):
            iter(loader)
        assert len(epoch_of(loader)) == 5


def test_a_packed_set(rocal: Any, reader: Any, tmp_path: Path) -> None:
    packer.convert(tmp_path / "images", to="tar", output=tmp_path / "set", workers=1)
    with readers.open(tmp_path / "set", backend="mmap") as packed, faces(packed, tail="exact") as loader:
        assert sorted(flat(epoch_of(loader))) == list(range(22))


def test_pipelines_refuse_what_does_not_fit(rocal: Any, reader: Any, tmp_path: Path) -> None:
    source = external_source(reader, BATCH)
    larger = external_source(reader, BATCH, max_height=80, max_width=96)
    for call, message in [
        (lambda: celeba(source), r"Crop\(top=40, .* is not within the images, 40 x 48"),
        (lambda: celeba(larger, crop=MIDDLE), "max_height=40 and max_width=48"),
        (lambda: celeba(source, crop=MIDDLE, flip=2), "flip is a probability"),
        (lambda: celeba(source, crop=MIDDLE, backend="tpu"), "backend is one of cpu, gpu"),
        (lambda: resnet_train(source, threads=0), "threads is 1 or more"),
        (lambda: resnet_eval(source, size=224, resize=200), "resize 200 is smaller"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    several = folder_of(tmp_path / "several", {0: solid(0), 1: solid(1, size=(50, 50))})
    with pytest.raises(DatasetError, match=r"2 sizes.*40 x 48; 50 x 50"):
        celeba(external_source(several, 2))
    with pytest.raises(UnknownNameError, match="no field 'mask'"):
        RocalLoader(None, source, fields=("mask",))
    pipeline = celeba(source, crop=MIDDLE, size=16)
    with pytest.raises(ValueError, match="another source"):
        RocalLoader(pipeline, external_source(reader, BATCH))
    RocalLoader(pipeline, source).close()
    with pytest.raises(ValueError, match="has, or had, a loader"):
        RocalLoader(pipeline, source)
    assert (source.max_width, source.max_height) == SIZE


@pytest.fixture
def breaking(rocal_double: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Makes an iterator of rocAL go wrong: from its third step on until `broken` is False, a function is called."""
    from amd.rocal.plugin import generic

    def install(instead: Any) -> Any:
        class Broken(generic.ROCALGenericIterator):  # type: ignore[misc,name-defined]
            broken, steps = True, 0

            def __next__(self) -> Any:
                self.steps += 1
                return instead(self) if self.broken and self.steps > 2 else super().__next__()

        monkeypatch.setattr(generic, "ROCALGenericIterator", Broken)
        return Broken

    return install


def fails(*_: Any) -> Any:
    raise RuntimeError("Loader module failed")


def ends(iterator: Any) -> Any:
    raise StopIteration


@pytest.mark.parametrize(
    ("instead", "message"),
    [(fails, "rocAL failed: Loader module failed"), (ends, "ended the epoch")],
)
def test_errors_inside_rocal(rocal_double: Any, reader: Any, breaking: Any, instead: Any, message: str) -> None:
    broken, loader = breaking(instead), faces(reader, shuffle=False)
    with pytest.raises(PipelineError, match=message):
        list(loader)
    broken.broken = False
    loader.close()
    assert reading_threads() == [] and rocal_double.FAULTS == []


def test_a_pipeline_that_does_not_end_is_never_released(rocal_double: Any, reader: Any, breaking: Any) -> None:
    """Better a leak than a release that does not return."""
    breaking(lambda iterator: iterator.output_list and (iterator.output_list, None))
    loader = faces(reader, shuffle=False)
    loop = iter(loader)
    next(loop), next(loop)
    with pytest.raises(PipelineError, match="does not end: 8 steps"):
        loader.close()
    del loader, loop
    gc.collect()
    assert not rocal_double.CONTEXTS[-1].released and rocal_double.FAULTS == [] and reading_threads() == []


def test_a_pipeline_that_cannot_be_built(rocal_double: Any, reader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """rocAL leaves the interpreter, and prints to stdout."""
    source = external_source(reader, BATCH)
    with monkeypatch.context() as patch, pytest.raises(PipelineError, match="cannot build this pipeline"):
        patch.setattr(rocal_double, "rocalVerify", lambda context: 2)
        celeba(source, crop=MIDDLE)
    monkeypatch.setattr(rocal_double, "rocalCreate", fails)
    with pytest.raises(PipelineError, match="cannot make this pipeline"):
        celeba(source, crop=MIDDLE)


def test_nothing_is_printed_to_stdout(rocal: Any, reader: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Not by rocAL's C++ either, for those who read JSON there."""
    with faces(reader) as loader:
        epoch_of(loader)
        epoch_of(loader)
    print("ours")
    captured = capfd.readouterr()
    assert captured.out == "ours\n" and "kernels" in captured.err


@pytest.mark.parametrize(
    "spoiled",
    [
        lambda fn, images: None,
        lambda fn, images: fn.resize(images, resize_width=0, resize_height=0),
        lambda fn, images: fn.resize(fn.resize(images), resize_width=8, resize_height=8),
    ],
    ids=["None", "an operator that fails", "one in the middle"],
)
def test_a_graph_that_fails_is_an_error(rocal: Any, reader: Any, spoiled: Any) -> None:
    """rocAL ends the process by a segmentation fault."""
    source = external_source(reader, BATCH, rank=0, world_size=1)
    with pytest.raises(PipelineError, match="the graph returned None, as an operator of rocAL does that fails"):
        built(lambda library: spoiled(library.fn, encoded_images(library, source)), Machine(), batch_size=4, seed=0)


def test_a_gpu_that_this_rocal_cannot_use_is_refused(
    rocal: Any, reader: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rocAL would silently run on the CPU. A build is known by the libraries it is linked with."""
    maps, library = tmp_path / "maps", tmp_path / "librocal.so.2"
    maps.write_text(f"7f00-7f01 r-xp 00000000 08:01 12 {library}\n7f01-7f02 rw-p 0 0:0 0\n")
    for content, expected in ((b"\0libopenvx.so.1\0", False), (b"\0libamdhip64.so.6\0", True)):
        library.write_bytes(content)
        assert pipelines.gpu_backend(maps) is expected
    assert pipelines.gpu_backend(tmp_path / "none") is None
    monkeypatch.setattr(pipelines, "gpu_backend", lambda: False)
    source = external_source(reader, BATCH, rank=0, world_size=1)
    with pytest.raises(PipelineError, match=r'built for the CPU alone.* give backend="cpu"'):
        celeba(source, crop=MIDDLE, backend="gpu")


def test_the_build_of_rocal_is_recognised() -> None:
    if not Path("/proc/self/maps").exists() or importlib.util.find_spec("rocal_pybind") is None:
        pytest.skip("needs rocAL itself")
    importlib.import_module("rocal_pybind")
    assert pipelines.gpu_backend() is not None, "librocal is loaded and was not found"


def test_a_seed_is_that_of_the_first_pipeline_of_a_process(rocal: Any, tmp_path: Path) -> None:
    """rocAL's generators continue from one pipeline to the next, as docs/rocal.md says."""
    folder_of(tmp_path / "images", {number: mapped(number, (96, 80)) for number in range(8)}).close()
    script = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent / "rocal_double")] * bool(rocal)!r}
import readers
from readers.rocal import RocalLoader, external_source, resnet_train
for _ in range(2):
    source = external_source(readers.open_folder({str(tmp_path / "images")!r}), 4, rank=0, world_size=1)
    with RocalLoader(resnet_train(source, size=16, threads=1, seed=7), source) as loader:
        print([round(float(images.sum())) for images, _ in loader])
"""
    seen = [run_python("-c", script, check=True).stdout.splitlines() for _ in range(2)]
    assert seen[0][0] == seen[1][0], "the first pipelines of two processes draw alike"
    assert seen[0][0] != seen[0][1], "the second pipeline of a process draws as the first: say so in docs/rocal.md"


def test_errors_at_the_end_of_an_epoch_stay_inside_the_padding(rocal_double: Any, reader: Any) -> None:
    """With the source and rocAL's iterator, without our loader, for all endings of an epoch that the double has."""
    from amd.rocal.plugin.generic import ROCALGenericIterator

    endings = set()
    for seed in range(20):
        rocal_double.seed_traps(seed)
        source = external_source(reader, BATCH, seed=3, tail="exact", rank=0, world_size=1)
        iterator = ROCALGenericIterator(celeba(source, size=16, crop=MIDDLE, threads=1))
        endings.add(rocal_double.CONTEXTS[-1].ending)
        seen = []
        for number, (outputs, labels) in enumerate(iterator):
            if number < len(source):
                samples = labels >= 0
                assert numbers_of(outputs[0][samples]) == labels[samples].tolist()
                seen += labels[samples].tolist()
        assert sorted(seen) == list(range(22))
        source.close()
    assert endings == {"right", "stale", "lost", "extra"} and rocal_double.FAULTS == []


def test_a_graph_of_your_own(rocal: Any, reader: Any) -> None:
    source = external_source(reader, BATCH, rank=0, world_size=1)

    def graph(library: Any) -> Any:
        return library.fn.resize(encoded_images(library, source), resize_width=10, resize_height=6)

    pipeline = built(graph, Machine(threads=1), batch_size=BATCH, seed=0)
    with RocalLoader(pipeline, source) as loader:
        for images, labels in loader:
            assert images.dtype == np.uint8 and images.shape == (4, 6, 10, 3)
            assert numbers_of(images.transpose(0, 3, 1, 2).astype(np.float32), 0, 1) == labels.tolist()


def test_where_a_pipeline_runs(rocal_double: Any, reader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from amd.rocal import types

    monkeypatch.setattr(pipelines, "gpu_backend", lambda: True)
    made: list[tuple[Any, ...]] = []
    create = rocal_double.rocalCreate
    monkeypatch.setattr(rocal_double, "rocalCreate", lambda *given: made.append(given) or create(*given))
    for name, value in {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    source = external_source(reader, BATCH)
    assert (source.rank, source.world_size) == (3, 4)
    celeba(source, crop=MIDDLE, backend="gpu", threads=5, seed=9)
    celeba(source, crop=MIDDLE, backend="gpu", device_id=7, threads=5)
    celeba(source, crop=MIDDLE, threads=2)
    assert made == [(4, types.GPU, 1, 5, 2, 9), (4, types.GPU, 7, 5, 2, 0), (4, types.CPU, 0, 2, 2, 0)]


def test_an_interpreter_that_ends_in_the_middle_of_a_loop(rocal_double: Any, tmp_path: Path) -> None:
    folder_of(tmp_path / "images", {number: solid(number) for number in range(22)}).close()
    script = f"""
import atexit, sys
sys.path.insert(0, {str(Path(__file__).parent / "rocal_double")!r})
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
