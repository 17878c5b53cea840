"""The Triton kernels that finish coefficients, against the decoder for CPUs. Not collected:
`test_coefficients_device.py` runs this file in a separate process under Triton's interpreter, which has to be chosen
before triton is imported."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coefficient_cases import made_jpeg
from coefficient_fuzz import Guarded
from gpu_doubles import Double, install
from image_cases import encoded, picture
from jpeg_maker import Jpeg, random_blocks
from loader_options import grouped
from triton.runtime.interpreter import InterpretedFunction

import readers
from cache.errors import BadSampleError
from readers import Decode
from readers.augment import Op, RandomHorizontalFlip, RandomResizedCrop, RandomRotation, RandomVerticalFlip
from readers.coefficients import decode, encode_strictly, parse_coefficients
from readers.coefficients.device.decoder import CoefficientDecoder, Uploaded, vetted_shape
from readers.decode import Region
from readers.decode.device import Picture, upright_tensor
from readers.loader import ImageLoader

CPU = torch.device("cpu")
# Large enough that the CPU does not decode the JPEG at a reduced scale, which the device never does.
CROP: list[Op] = [RandomResizedCrop((16, 24), (0.5, 1.0)), RandomHorizontalFlip(), RandomVerticalFlip()]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch `triton.language` once: a launch patches it to work without a GPU, and repeating that for each of our
    functions takes half of the time."""
    assert os.environ.get("TRITON_INTERPRET") == "1"
    original = InterpretedFunction.__call__

    def call(function: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        is_ours = function.fn.__module__.startswith("readers.")
        return function.rewrite()(*args, **kwargs) if is_ours else original(function, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "__call__", call)


def kept(*arguments: Any, **options: Any) -> bytes:
    return encode_strictly(made_jpeg(*arguments, **options), max_ratio=200)


def check(images: list[bytes], regions: list[Region]) -> None:
    """Compare one batch with the pixels that the CPU makes."""
    decoder = CoefficientDecoder(CPU)
    uploaded = decoder.upload(images, [vetted_shape(image) for image in images])
    for image, region, decoded in zip(images, regions, decoder.decode(uploaded, regions), strict=True):
        assert isinstance(decoded, Picture)
        assert np.array_equal(upright_tensor(decoded).permute(1, 2, 0), decode(image, region)), region


# --- pixels -------------------------------------------------------------------------------------------------------
BOXES: dict[str, tuple[tuple[int, int], list[Region]]] = {
    # the whole image, at odd sides, and at each scale; inside; at the lower right edge; not interpolated
    "420": ((18, 19), [Region(0, 0, 18, 19), Region(0, 0, 18, 19, 2), Region(0, 0, 18, 19, 8), Region(5, 7, 3, 1)]),
    "422": ((9, 35), [Region(0, 0, 9, 35), Region(0, 0, 9, 35, 4), Region(0, 0, 9, 35, 8), Region(8, 17, 1, 18)]),
    "440": ((18, 9), [Region(0, 0, 18, 9), Region(8, 0, 10, 9, 4), Region(2, 3, 4, 2, 1, True)]),
    "444": ((9, 10), [Region(0, 0, 9, 10, 2), Region(7, 2, 2, 8)]),
    "gray": ((9, 19), [Region(0, 0, 9, 19), Region(0, 8, 8, 11, 2), Region(0, 0, 9, 19, 4), Region(8, 8, 1, 11, 8)]),
}


@pytest.mark.parametrize("sampling", BOXES)
def test_boxes_at_every_scale_equal_those_of_the_cpu(sampling: str) -> None:
    """All boxes of an image are one batch."""
    size, regions = BOXES[sampling]
    check([kept(*size, sampling)] * len(regions), regions)


def test_rows_of_many_blocks_and_of_large_coefficients() -> None:
    """More blocks than a program handles at once, skipped or not; digits above 8 bits; a column of chroma."""
    wide, large = kept(3, 270, "gray"), random_blocks(np.random.default_rng(1), 8, 270, [(1, 1)], largest=300)
    images = [wide, wide, encode_strictly(Jpeg(8, 270, [(1, 1)], large).encode(), 200), kept(1, 2, "420")]
    check(images, [Region(0, 0, 3, 270), Region(1, 261, 2, 9), Region(0, 250, 8, 20), Region(0, 0, 1, 2)])


def test_sums_that_overflow_wrap_as_on_the_cpu() -> None:
    rng = np.random.default_rng(5)
    blocks = random_blocks(rng, 8, 24, [(1, 1)], largest=8191)
    blocks[0][..., 0] = rng.integers(-8191, 8192, blocks[0].shape[:2])
    image = encode_strictly(Jpeg(8, 24, [(1, 1)], blocks).encode(), 200)
    check([image] * 4, [Region(0, 0, 8, 24, reduce) for reduce in (1, 2, 4, 8)])


def test_orientations() -> None:
    images = [encode_strictly(encoded(picture(7, 12, 3).convert("L"), "JPEG", turn), 200) for turn in (4, 6)]
    check(images, [Region(2, 3, 4, 3)] * 2)


# --- damage -------------------------------------------------------------------------------------------------------
def test_data_that_the_cpu_refuses_is_refused_without_a_read_outside() -> None:
    """Rows of arbitrary bytes, which end at a protected page."""
    rng, memory, decoder, counts = np.random.default_rng(2), Guarded(4), CoefficientDecoder(CPU), Counter[bool]()
    source = kept(8, 24, "gray")
    shape, region = vetted_shape(source), Region(0, 0, 8, 24)
    index = np.frombuffer(source, "<u4", 2, shape.index_at)
    for _ in range(8):
        spoiled = bytearray(source)
        for at in rng.integers(index[0], index[-1], 3):
            spoiled[at] = rng.choice([0, 255, rng.integers(256)])
        try:
            decode(spoiled, region, is_checked=True)
            refused = False
        except BadSampleError:
            refused = True
        place = memory.at_end(int(index[-1]))
        place[:] = spoiled[: index[-1]]
        (outcome,) = decoder.decode(Uploaded(torch.from_numpy(place), [0], [shape]), [region])
        assert isinstance(outcome, BadSampleError) == refused
        counts[refused] += 1
    assert len(counts) == 2


@pytest.mark.parametrize("change", [-400, -1, 2**31])
def test_a_false_index_is_refused_before_any_copy(change: int) -> None:
    data = kept(16, 24, "420")
    shape = parse_coefficients(data)
    spoiled = bytearray(data)
    index = np.frombuffer(spoiled, "<u4", (shape.rows_at - shape.index_at) // 4, shape.index_at)
    assert vetted_shape(data, (16, 24)) == shape
    with pytest.raises(BadSampleError, match="the index says 24 x 16"):
        vetted_shape(data, (24, 16))
    index[0] = (int(index[0]) + change) % 2**32
    with pytest.raises(BadSampleError, match="CRC32C"):
        vetted_shape(spoiled)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("readers.coefficients.device.decoder.check_sum", lambda *_: None)
        with pytest.raises(BadSampleError, match="do not fit"):
            vetted_shape(spoiled)


# --- the loader ---------------------------------------------------------------------------------------------------
@pytest.fixture
def base(tmp_path: Path) -> readers.Reader:
    """Two images that are kept as coefficients; a JPEG with another sampling, for the device; a PNG."""
    images = {
        "444.jpg": made_jpeg(7, 12, "444"),
        "other.png": encoded(picture(31, 37, 6), "PNG"),
        "refused.jpg": made_jpeg(64, 66, "411"),
        "turned.jpg": encoded(picture(14, 18, 5).convert("L"), "JPEG", 6),
    }
    for name, data in images.items():
        (tmp_path / name).write_bytes(data)
    return readers.open_folder(tmp_path)


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Double:
    return install(monkeypatch, "torchvision")


def loaders(reader: readers.Reader, base: readers.Reader, **more: Any) -> tuple[ImageLoader, ImageLoader]:
    """One loader that decodes on the device, and one that does not."""
    options: dict[str, Any] = {"seed": 4, "tail": "exact", "exact_colours": True, "augment": CROP, **more}
    plain = {name: value for name, value in options.items() if name != "cpu_share"}
    return ImageLoader(reader, 4, **grouped({"decode": Decode(decoder="torchvision"), **options})), ImageLoader(
        base, 4, **grouped(plain)
    )


def compare(on_device: ImageLoader, plain: ImageLoader) -> None:
    for (images, labels), (expected, others) in zip(on_device, plain, strict=True):
        assert torch.equal(labels, others)
        images, expected = (batch if isinstance(batch, tuple) else (batch,) for batch in (images, expected))
        for a, b in zip(images, expected, strict=True):
            assert float((a.to(torch.float32) - b.to(torch.float32)).abs().max()) <= 1


def test_batches_equal_those_of_the_cpu(base: readers.Reader, double: Double, place: dict[str, Any]) -> None:
    """Coefficients go to the kernels, once for all views; JPEGs to the decoder of the device; other images to the
    CPU."""
    with readers.cached(base, keep="coefficients", **place) as reader:
        on_device, plain = loaders(reader, base, views=2)
        compare(on_device, plain)
        assert on_device.decoder == "torchvision/cpu, coefficients/cpu, exact colours"
        assert double.calls == [1] and on_device.stats().device_images == 3 and reader.stats().present == 4


@pytest.mark.filterwarnings("ignore:the device cpu failed on 1 of the first 3 images:UserWarning")
def test_the_cpu_decodes_images_that_the_kernels_cannot(
    base: readers.Reader, double: Double, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Boxes followed by further ops after the resize."""
    decode_all = CoefficientDecoder.decode

    def refuse_one(self: Any, uploaded: Any, regions: Any) -> Any:
        return [BadSampleError("refused"), *decode_all(self, uploaded, regions)[1:]]

    monkeypatch.setattr(CoefficientDecoder, "decode", refuse_one)
    with readers.cached(base, keep="coefficients", **place) as reader:
        on_device, plain = loaders(reader, base, augment=[RandomRotation(20), *CROP])
        compare(on_device, plain)
        assert (on_device.stats().device_images, on_device.stats().failed_images) == (2, 1)


def test_a_damaged_copy_is_made_again(base: readers.Reader, double: Double, place: dict[str, Any], spoil: Any) -> None:
    with readers.cached(base, keep="coefficients", **place) as reader:
        reader.prefill()
        spoil(reader.for_decoding(), list(reader.keys).index("444"), -40)
        compare(*loaders(reader, base))
        assert reader.stats().dropped == 1
