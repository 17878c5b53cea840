"""Pipelines and loaders of rocAL, on rocAL itself where it is importable, otherwise on a double that has its traps."""

from __future__ import annotations

import gc
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rocal_images import (
    BATCH,
    MIDDLE,
    SIZE,
    box_of,
    epoch_of,
    faces,
    flat,
    folder_of,
    mapped,
    numbers_of,
    reading_threads,
    solid,
)

import packer
import readers
from cache.errors import BadSampleError, DatasetError, PipelineError, UnknownNameError
from readers import Ranks
from readers.augment import CELEBA_CROP
from readers.loader import ImageLoader
from readers.rocal import RocalLoader, celeba, external_source, resnet_eval, resnet_train

pytestmark = pytest.mark.rocal
MEAN, STD = (255 * np.array(v).reshape(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
SIZES = [(96, 80), (60, 120), (128, 64), (40, 40)]


@pytest.fixture
def reader(tmp_path: Path) -> readers.Reader:
    return folder_of(tmp_path / "images", {number: solid(number) for number in range(22)})


def test_every_epoch_is_whole_whatever_rocal_does_at_its_end(rocal: Any, reader: Any) -> None:
    """A naive user has some of these wrong."""
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
    ours = ImageLoader(reader, BATCH, seed=3, threads=1, ranks=Ranks(rank=0, world_size=1))
    loop = iter(ours)
    next(loop)
    with faces(reader) as loader:
        with pytest.warns(UserWarning, match="with 'rocal'"):
            loader.load_state_dict(ours.state_dict())
        assert epoch_of(loader) == [labels.tolist() for _, labels in loop]


def sizes_of(root: Path, count: int) -> Any:
    """A source of mapped images of SIZES."""
    reader = folder_of(root / "images", {number: mapped(number, SIZES[number % 4]) for number in range(count)})
    return external_source(reader, BATCH, ranks=Ranks(rank=0, world_size=1))


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
    source = external_source(
        folder_of(tmp_path / "images", images), BATCH, shuffle=False, ranks=Ranks(rank=0, world_size=1)
    )
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
    packer.convert(tmp_path / "images", to="tar", output=tmp_path / "set", run=packer.Run(workers=1))
    with readers.open(tmp_path / "set", backend="mmap") as packed, faces(packed, tail="exact") as loader:
        assert sorted(flat(epoch_of(loader))) == list(range(22))


def test_pipelines_refuse_what_does_not_fit(rocal: Any, reader: Any, tmp_path: Path) -> None:
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
