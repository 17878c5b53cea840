"""decode="unchanged": images of any depth and number of channels through the ops, alike in `ImageLoader` and
`ImageDataset`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from conftest import by_subject, make_jpeg, tree_of
from image_cases import encoded
from loader_options import grouped
from PIL import Image
from torch.utils.data import DataLoader

import packer
import readers
from cache.errors import BadSampleError
from packer.tools.diagnose.imageloader import make_pipeline
from packer.tools.diagnose.pipeline import IterablePipeline
from readers import Views
from readers.augment import (
    CenterCrop,
    ColorJitter,
    Crop,
    CutMix,
    GaussianBlur,
    MixUp,
    Normalize,
    Op,
    RandAugment,
    RandomCrop,
    RandomErasing,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    Resize,
    Stage,
    TrivialAugmentWide,
)
from readers.loader import ImageLoader
from readers.order import Sequential, Shuffled
from readers.torch import EpochSampler, ImageDataset, ImageStream

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]
COUNT, HEIGHT, WIDTH = 12, 40, 48
FLIP, TURN = RandomHorizontalFlip(p=1.0), RandomVerticalFlip(p=1.0)


def values(kind: str, number: int, channels: int = 0) -> npt.NDArray[Any]:
    """Smooth waves over the whole range of a dtype, on which wrong interpolation would show."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    planes = [0.5 + 0.5 * np.sin(x / (3 + number % 5) + y / 7 + plane) for plane in range(max(1, channels))]
    shares = np.stack(planes, axis=2) if channels else planes[0]
    if kind == "float32":
        return (shares * 8.0 - 2.0).astype(np.float32)
    low, high = {"uint8": (0, 255), "uint16": (0, 65535), "12 bits": (0, 4095), "int32": (-(1 << 30), 1 << 30)}[kind]
    dtype = {"12 bits": np.uint16}.get(kind) or np.dtype(kind)
    return np.rint(low + shares * (high - low)).astype(dtype)


def packed(root: Path, images: dict[str, bytes], **options: Any) -> readers.Reader:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        packer.convert(tree_of(root / "images", images), to="hdf5", output=root / "set", **by_subject(options))
    return readers.open(root / "set")


@dataclass(frozen=True)
class Kind:
    dtype: str
    medium: str
    channels: int = 0

    def image(self, number: int) -> npt.NDArray[Any]:
        return values(self.dtype, number, self.channels)

    def reader(self, root: Path) -> readers.Reader:
        files = [encoded(Image.fromarray(self.image(i)), self.medium) for i in range(COUNT)]
        images = {f"a/{i:02}.{self.medium.lower()}": data for i, data in enumerate(files)}
        return packed(root, images, decode="unchanged")


KINDS = {
    "grey of 8 bits": Kind("uint8", "PNG"),
    "grey and alpha": Kind("uint8", "PNG", 2),
    "colours": Kind("uint8", "PNG", 3),
    "colours and alpha": Kind("uint8", "PNG", 4),
    "grey of 12 bits": Kind("12 bits", "PNG"),
    "grey of 16 bits": Kind("uint16", "PNG"),
    "grey TIFF of 16 bits": Kind("uint16", "TIFF"),
    "floating point": Kind("float32", "TIFF"),
    "integers of 32 bits": Kind("int32", "TIFF"),
}


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], readers.Reader]:
    made: dict[str, readers.Reader] = {}

    def get(name: str) -> readers.Reader:
        if name not in made:
            made[name] = KINDS[name].reader(tmp_path_factory.mktemp("unchanged"))
        return made[name]

    return get


def whole_epoch(reader: readers.Reader, ops: Sequence[Op], **options: Any) -> torch.Tensor:
    arguments: dict[str, Any] = {"order": Sequential(len(reader)), "threads": 2, **options}
    loader = ImageLoader(reader, 4, **grouped({"augment": ops, "decode": "unchanged", **arguments}))
    return torch.cat([images for images, _ in loader])


def arrays(images: torch.Tensor) -> npt.NDArray[Any]:
    """The arrays of a set: [n, height, width], or [n, height, width, channels] with several channels."""
    pixels = images.permute(0, 2, 3, 1).contiguous().numpy()
    return pixels[..., 0] if pixels.shape[3] == 1 else pixels


# --- results ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", KINDS)
def test_images_keep_their_depth_and_channels_and_crops_and_flips_move_the_values(sets: Any, name: str) -> None:
    reader, expected = sets(name), np.stack([KINDS[name].image(i) for i in range(COUNT)])
    for layout in ("channels_last", "NCHW", "NHWC"):
        images = whole_epoch(reader, [], layout=layout)
        images = images.permute(0, 3, 1, 2) if layout == "NHWC" else images
        assert images.shape[:2] == (COUNT, max(1, KINDS[name].channels)) and np.array_equal(arrays(images), expected)
        assert images.dtype == ImageLoader(reader, 4, decode="unchanged").dtype == torch.from_numpy(expected).dtype
    box = expected[:, 5:25, 7:31]
    assert np.array_equal(arrays(whole_epoch(sets(name), [Crop(5, 7, 20, 24)])), box)
    assert np.array_equal(arrays(whole_epoch(sets(name), [Crop(5, 7, 20, 24), FLIP])), box[:, :, ::-1])
    assert np.array_equal(arrays(whole_epoch(sets(name), [Crop(5, 7, 20, 24), TURN])), box[:, ::-1])
    assert np.array_equal(arrays(whole_epoch(sets(name), [FLIP, TURN])), expected[:, ::-1, ::-1])
    padded = arrays(whole_epoch(sets(name), [RandomCrop((HEIGHT + 8, WIDTH + 8), padding=4)]))
    assert np.array_equal(padded[:, 4:-4, 4:-4], expected) and not padded[:, :4].any()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_resizes_equal_pillow_in_floating_point(sets: Any, name: str, interpolation: Any) -> None:
    kind, size = KINDS[name], (23, 31)
    resized = arrays(whole_epoch(sets(name), [Resize(size, interpolation=interpolation)]))
    method = Image.Resampling.BICUBIC if interpolation == "bicubic" else Image.Resampling.BILINEAR
    for number in range(COUNT):
        planes = np.atleast_3d(kind.image(number)).transpose(2, 0, 1).astype(np.float32)
        made = np.stack([np.asarray(Image.fromarray(plane).resize(size[::-1], method)) for plane in planes], axis=2)
        limits = {"uint8": (0, 255), "uint16": (0, 65535), "12 bits": (0, 65535)}.get(kind.dtype, (-np.inf, np.inf))
        expected = np.clip(made, *limits).squeeze()
        # Whole values; Pillow's float32 keeps 24 of 32 bits, and 8-bit kernels round between the two passes.
        most = {"uint8": 1.5, "int32": 512.0, "float32": 1e-4}.get(kind.dtype, 0.55)
        assert np.abs(resized[number].astype(np.float64) - expected).max() <= most


def test_16_bit_images_are_rotated_blurred_and_erased_like_floats(sets: Any) -> None:
    """Compared with the same ops on floats, which have no steps to round to."""
    reader, original = sets("grey of 16 bits"), values("uint16", 0)
    for op in (RandomRotation(25), GaussianBlur((1.0, 2.0)), RandomErasing(1.0, value=0.0)):
        deep = whole_epoch(reader, [op], seed=3)[:1].to(torch.float64)
        floats = packed_floats(reader, op)
        assert (deep - floats * 65535.0).abs().max() <= 0.6 and not np.array_equal(deep[0, 0].numpy(), original)


def packed_floats(reader: readers.Reader, op: Op) -> torch.Tensor:
    """The first image as float32 from 0 to 1, after the arithmetic of an op."""
    loader = ImageLoader(reader, 4, augment=[op], order=Sequential(len(reader)), seed=3, decode="unchanged")
    ((_, parameters),) = loader.recipe.plan(3, 0, np.array([0]), np.array([HEIGHT]), np.array([WIDTH])).steps
    image = torch.from_numpy(values("uint16", 0).astype(np.float32) / 65535.0)[None, None]
    return op.apply(image, parameters.tolist()).to(torch.float64)


def test_brightness_and_contrast_of_16_bit_images(sets: Any) -> None:
    reader, jitter = sets("grey of 16 bits"), ColorJitter(0.4, 0.4, 0.4, 0.2)
    jittered = arrays(whole_epoch(reader, [jitter], seed=2)).astype(np.float64)
    recipe = ImageLoader(reader, 4, augment=[jitter], decode="unchanged").recipe
    many = np.arange(COUNT), np.full(COUNT, HEIGHT), np.full(COUNT, WIDTH)
    ((_, factors),) = recipe.plan(2, 0, *many).steps
    for number, (brightness, contrast, *_) in enumerate(factors.tolist()):
        bright = np.clip(values("uint16", number) * brightness, 0, 65535)
        expected = np.clip(contrast * bright + (1 - contrast) * bright.mean(), 0, 65535)
        assert np.abs(jittered[number] - expected).max() <= 1.0
    assert not np.array_equal(jittered[0], values("uint16", 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_floats_are_shares_of_the_largest_value(sets: Any, dtype: torch.dtype) -> None:
    for name, largest in (("grey of 12 bits", 65535), ("grey of 8 bits", 255), ("floating point", 1)):
        expected = torch.from_numpy(KINDS[name].image(3).astype(np.float32) / largest).to(dtype)
        floats = whole_epoch(sets(name), [], dtype=dtype)
        near = 1e-2 if dtype != torch.float32 else 1e-6
        assert floats.dtype == dtype and torch.allclose(floats[3, 0], expected, rtol=near)


def test_normalize_takes_a_mean_for_each_channel(sets: Any) -> None:
    normalised = whole_epoch(sets("grey of 16 bits"), [Normalize((0.4,), (0.2,))])
    expected = (values("uint16", 5) / 65535.0 - 0.4) / 0.2
    assert normalised.dtype == torch.float32 and np.abs(normalised[5, 0].numpy() - expected).max() < 1e-5
    two = whole_epoch(sets("grey and alpha"), [Normalize((0.4, 0.0), (0.2, 1.0))])
    assert np.abs(two[0, 1].numpy() - values("uint8", 0, 2)[..., 1] / 255.0).max() < 1e-6


# --- every consumer -----------------------------------------------------------------------------------------------
LISTS: dict[str, list[Op]] = {
    "a crop": [CenterCrop(24)],
    "a random box": [RandomResizedCrop(24, interpolation="bicubic"), RandomHorizontalFlip(), RandomVerticalFlip()],
    "ops before the resize": [RandomRotation(30), RandomHorizontalFlip(), Resize((20, 24)), GaussianBlur()],
    "colours": [Resize((20, 24)), ColorJitter(0.4, 0.4, 0.4, 0.2), RandomGrayscale(0.5), RandomErasing(1.0, value=9.0)],
    "normalised": [RandomResizedCrop(24), RandomErasing(1.0, value="random"), Normalize((0.4,), (0.2,))],
}


@pytest.mark.parametrize("ops", LISTS)
def test_loader_data_set_and_stream_give_the_same_bits(sets: Any, ops: str) -> None:
    reader, order = sets("grey of 12 bits"), Shuffled(COUNT, 4)
    expected = whole_epoch(reader, LISTS[ops], order=order)
    assert torch.equal(whole_epoch(reader, LISTS[ops], order=order, threads=1, layout="NCHW"), expected)
    dataset = ImageDataset(reader, LISTS[ops], "unchanged")
    processes = 2 if ops == "a random box" else 0
    loader = DataLoader(dataset, 4, sampler=EpochSampler(order, dataset), num_workers=processes)
    assert torch.equal(torch.cat([images for images, _ in loader]), expected)
    stream = ImageStream(dataset, EpochSampler(order, dataset), 4)
    assert torch.equal(torch.cat([images for images, _ in DataLoader(stream, batch_size=None)]), expected)


def test_8_bit_colours_equal_those_of_the_default(tmp_path: Path) -> None:
    reader = packed(tmp_path, {f"a/{i}.jpg": make_jpeg(i, (HEIGHT, WIDTH)) for i in range(4)})
    ops = [Crop(3, 5, 30, 32), Resize((16, 20)), ColorJitter(0.3, 0.3, 0.3), RandomHorizontalFlip()]
    options: Any = {"order": Sequential(4), "augment": ops, "exact_colours": True}
    (plain, _), (own, _) = (
        next(iter(ImageLoader(reader, 4, **grouped({"decode": d, **options})))) for d in ("RGB", "unchanged")
    )
    assert own.dtype == torch.uint8 and torch.equal(own, plain)


def test_views_and_mixtures(sets: Any) -> None:
    reader, ops = sets("grey of 16 bits"), [RandomResizedCrop(16)]
    options: Any = {"order": Sequential(COUNT), "decode": "unchanged"}
    views, _ = next(iter(ImageLoader(reader, 4, **grouped({"augment": Views(ops, 2), **options}))))
    assert [view.shape for view in views] == [(4, 1, 16, 16)] * 2 and not torch.equal(*views)
    plain = whole_epoch(reader, ops)[:4].to(torch.float64)
    for op in (MixUp(), CutMix()):
        images, shares = next(iter(ImageLoader(reader, 4, **grouped({"augment": [*ops, op], **options}))))
        assert images.dtype == torch.uint16 and shares.shape == (4, 1)
        low, high = (torch.stack([plain, plain.roll(1, 0)]).amin(0), torch.stack([plain, plain.roll(1, 0)]).amax(0))
        pixels = images.to(torch.float64)
        assert bool(((pixels >= low - 1) & (pixels <= high + 1)).all()) and not torch.equal(pixels, plain)


def test_bad_samples_are_skipped_and_replaced(tmp_path: Path) -> None:
    images = {f"a/{i}.png": encoded(Image.fromarray(values("uint16", i)), "PNG") for i in range(8)}
    reader = packed(tmp_path, images, decode="unchanged")
    path, offset, length = reader.byte_range(2) or ("", 0, 0)
    with open(path, "r+b") as file:
        file.seek(offset + length // 2)
        file.write(b"\0" * 40)
    options: Any = {"order": Sequential(8), "decode": "unchanged", "fields": ("image", "index"), "threads": 1}
    for on_error, expected in (("skip", [0, 1, 3]), ("substitute", None)):
        loader = ImageLoader(readers.open(reader.path), 4, on_error=on_error, **grouped(options))
        with pytest.warns(UserWarning, match=r"1 bad samples .* \(a/2\)"):
            (pictures, rows), _ = list(loader)
        assert len(pictures) == len(rows) and (expected is None or rows.tolist() == expected)
        for picture, row in zip(pictures, rows.tolist(), strict=True):
            assert row != 2 and np.array_equal(picture[0].numpy(), values("uint16", row))


# --- refused ops and options --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Own(Op):
    stage = Stage.PIXELS

    def apply(self, images: torch.Tensor, rows: Any) -> torch.Tensor:
        return images


REFUSED: list[tuple[str, Op, str]] = [
    ("grey of 16 bits", RandAugment(), r"RandAugment\(\) is defined for 8-bit RGB, but .* uint16 with 1 chan"),
    ("colours and alpha", TrivialAugmentWide(), "TrivialAugmentWide.* 8-bit RGB, but .* uint8 with 4 channels"),
    ("grey of 16 bits", Own(), r"Own\(\) is defined for 8-bit RGB"),
    ("floating point", ColorJitter(0.4), "ColorJitter.* is defined for uint8 and uint16, but .* float32"),
    ("grey and alpha", RandomGrayscale(), "RandomGrayscale.* is defined for 1 or 3 channels, .* with 2 channels"),
    ("floating point", RandomErasing(value=3.0), "RandomErasing.* defined for uint8 and uint16"),
    ("grey of 16 bits", RandomErasing(value=(1.0, 2.0, 3.0)), "has a value for each of 3 channels"),
    ("integers of 32 bits", GaussianBlur(), "GaussianBlur.* uint8 and uint16 and float32, .* are int32"),
    ("grey of 16 bits", Normalize((0.5,) * 3, (0.2,) * 3), "Normalize.* is for 3 channels, .* with 1 channel:"),
]
UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"dtype": torch.uint8}, "gives images in their own dtype: leave dtype out"),
    ({"decoder": "torchcodec"}, "is done by the CPU: leave decoder='torchcodec' out"),
    ({"decode": "L"}, "decode is one of RGB, unchanged, not 'L'"),
]


def test_ops_and_options_that_are_not_defined_for_the_images_are_refused_at_once(sets: Any) -> None:
    for name, op, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            ImageLoader(sets(name), 4, augment=[op], decode="unchanged")
        with pytest.raises(ValueError, match=message):
            ImageDataset(sets(name), [op], "unchanged")
    for options, message in UNFIT:
        with pytest.raises(ValueError, match=message):
            ImageLoader(sets("grey of 16 bits"), 4, **grouped({"decode": "unchanged", **options}))
    reader: Any = object()  # the list is checked before a set is opened
    with pytest.raises(ValueError, match=r"Normalize.* is for 1 channel, but the images are uint8 with 3 channels"):
        ImageDataset(reader, [Normalize((0.5,), (0.2,))])


def test_an_image_of_another_kind_than_the_first_is_a_bad_sample(tmp_path: Path) -> None:
    images = {"a/0.png": encoded(Image.fromarray(values("uint8", 0, 3)), "PNG")}
    images |= {f"a/{i}.png": encoded(Image.fromarray(values("uint16", i)), "PNG") for i in (1, 2)}
    reader = packed(tmp_path, images, decode="unchanged")
    loader = ImageLoader(reader, 1, augment=[RandAugment()], decode="unchanged", shuffle=False)
    with pytest.raises(BadSampleError, match=r"sample 1 \(a/1\): RandAugment.* the images are uint16 with 1 channel"):
        list(loader)
    mixed = ImageLoader(reader, 3, decode="unchanged", shuffle=False)
    message = r"of one batch differ: a/0 has 3 channels of uint8, a/1 has 1 channel of uint16; .*select"
    with pytest.raises(BadSampleError, match=message):
        list(mixed)
    assert len(list(ImageLoader(reader.select(indices=[1, 2]), 2, decode="unchanged"))) == 1


def test_palette_indices_are_moved_without_arithmetic(tmp_path: Path) -> None:
    indices = np.arange(HEIGHT * WIDTH, dtype=np.uint8).reshape(HEIGHT, WIDTH) % 7
    picture = Image.fromarray(indices, "P")
    picture.putpalette([9 * i for i in range(21)])
    reader = packed(tmp_path, {f"a/{i}.png": encoded(picture, "PNG") for i in range(2)}, decode="unchanged")
    images = whole_epoch(reader, [Crop(2, 3, 20, 24), FLIP])
    assert np.array_equal(images[0, 0].numpy(), indices[2:22, 3:27][:, ::-1])
    for ops in ([Resize(20)], [GaussianBlur()], [Normalize((0.5,), (0.2,))]):
        with pytest.raises(BadSampleError, match="has a palette, whose indices are not values"):
            whole_epoch(reader, ops)


def test_a_set_of_raw_pixels(tmp_path: Path) -> None:
    images = {f"a/{i}.jpg": make_jpeg(i, (HEIGHT, WIDTH)) for i in range(4)}
    reader = packed(tmp_path, images, reencode=packer.Reencode("raw"))
    expected = torch.cat([images for images, _ in ImageLoader(reader, 4, shuffle=False)])
    assert torch.equal(whole_epoch(reader, []), expected)
    assert torch.equal(ImageDataset(reader, None, "unchanged")[2][0], expected[2])


# --- warnings about 8 bits -----------------------------------------------------------------------------------------
def test_a_loader_that_reduces_to_8_bits_warns_once(sets: Any) -> None:
    for name in ("grey of 16 bits", "grey TIFF of 16 bits"):
        loader = ImageLoader(sets(name), 4, shuffle=False)
        with pytest.warns(UserWarning) as caught:
            for _ in range(2):
                assert sum(len(images) for images, _ in loader) == COUNT
        (warned,) = caught
        assert "set (train)" in str(warned.message) and warned.filename == __file__
        assert "sample 0 (a/00) has more than 8 bits a channel" in str(warned.message)
        assert "decode='unchanged'" in str(warned.message)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_that_reduces_to_8_bits_warns_once(sets: Any, workers: int, capfd: Any) -> None:
    dataset = ImageDataset(sets("grey of 16 bits"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert len(list(DataLoader(dataset, 6, num_workers=workers, worker_init_fn=_show_warnings))) == 2
    warned = [str(warning.message) for warning in caught] + capfd.readouterr().err.splitlines()
    assert sum("has more than 8 bits a channel" in line for line in warned) in ((1,) if not workers else (1, 2))


def _show_warnings(worker: int) -> None:
    warnings.resetwarnings()
    warnings.showwarning = lambda message, *where: print(message, file=sys.stderr)  # not in the list of the parent


def test_no_warning_where_no_depth_is_lost(sets: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(ImageLoader(sets("grey of 8 bits"), 4))
        list(ImageLoader(sets("grey of 16 bits"), 4, decode="unchanged"))
        list(DataLoader(ImageDataset(sets("grey of 16 bits"), None, "unchanged"), 4))


def test_a_cache_that_reduces_to_8_bits_warns(sets: Any, tmp_path: Path) -> None:
    where: Any = {"directory": tmp_path, "backend": "file", "capacity": "4MiB"}
    for keep in ("decoded", "recoded:20"):
        with (
            pytest.warns(UserWarning, match=rf"a cache that keeps images {keep[:7]}.* the upper 8 .* keep='encoded'"),
            readers.cached(sets("grey of 16 bits"), keep=keep, **where) as cached,
            pytest.raises(ValueError, match="open it with keep='encoded'"),
        ):
            ImageLoader(cached, 4, decode="unchanged")
    with readers.cached(sets("grey of 16 bits"), **where) as cached:
        assert whole_epoch(cached, []).dtype == torch.uint16


def test_a_loader_of_deep_images_is_diagnosed_as_one_stage(sets: Any) -> None:
    loader = ImageLoader(sets("grey of 16 bits"), 4, augment=[RandomResizedCrop(16)], decode="unchanged", threads=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(make_pipeline(loader), IterablePipeline)
    images, _ = next(make_pipeline(loader).cached(0))
    assert images.dtype == torch.uint16
