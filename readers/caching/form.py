"""Forms in which a cache keeps images: encoded bytes, a smaller JPEG, or pixels after the first augmentation ops.

    "encoded"                      the stored bytes
    Recoded(256, quality=90)       "recoded:256@90": resized to this short side and encoded again
    Decoded([Resize(256)])         "decoded:256": uint8 pixels after deterministic ops
    Coefficients()                 "coefficients": JPEGs without their entropy coding, for the decoders of this package

Coefficients decode to the pixels of the JPEG, and only decoders get them (`Reader.for_decoding`): a plain read returns
the JPEG from below the cache. An image shows only when it is read whether it becomes coefficients; other images keep
their bytes.

A kept form depends only on the original image, and its description (`info`) only on the original's header. So every
process returns the same, whether a sample was in the cache or not.

In the cache, payloads that are not compressed already (BMP, uncompressed TIFF, raw arrays, text) become zstd frames
if that saves space. JPEG, PNG, WebP and GIF are stored unchanged, also within the same field: bytes that begin with
zstd's magic (RFC 8878, 3.1.1) are a frame, all others are the payload. A payload that itself begins with the magic
always becomes a frame.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import simplejpeg

from cache.errors import BadSampleError
from cache.plugins import installed_callable, installed_names
from cache.stores import Buffer, Int64s
from readers.augment.geometry import Boxes, Pass, Plan
from readers.augment.ops import Op, Resize, Stage
from readers.augment.recipe import Recipe
from readers.decode import Region, decode_image
from readers.decode.region import with_header
from readers.headers import MEDIA, read_header, sniff
from readers.headers.base import MAGIC, PIXELS_HEADER_BYTES, VERSION, shrunk, shrunk_sides, upright_size
from readers.table import ImageInfo, upright_sides

_JPEG, _PIXELS = MEDIA.index("jpeg"), MEDIA.index("pixels")
_BASELINE = 0xC0
COMPRESSED_MEDIA = ("jpeg", "png", "webp", "gif")
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_LEVEL = 3
_WORTHWHILE = 0.9  # fields are compressed if at most this share of their bytes is left
_local = threading.local()


class Form:
    """The form in which images are kept; this base class keeps them unchanged. See also `readers.table.Form`.

    Forms are immutable, pickled, and shared between threads.

    converts: whether images are converted from the stored form.
    is_for_decoders: whether only decoders get the kept form, which decodes to the same pixels as the original.
    """

    __slots__ = ()
    converts, is_for_decoders = True, False

    @property
    def kind(self) -> str:
        return "encoded"

    def info(self, original: ImageInfo) -> ImageInfo:
        return original

    def bytes(self, info: ImageInfo, original: Int64s) -> Int64s:
        return original

    def passes(self, original: ImageInfo) -> list[Pass]:
        """The resize of each whole image, as passes of `readers.augment.geometry`."""
        sides = (side.tolist() for info in (original, self.info(original)) for side in upright_sides(info))
        return [
            Pass(Region(0, 0, rows, columns), (height, width), (0, 0), (), (), (height, width))
            for rows, columns, height, width in zip(*sides, strict=True)
        ]

    def convert(self, image: Buffer) -> Buffer:
        """The kept form of an encoded image. Raises BadSampleError."""
        return image

    def lend(self, image: Buffer) -> Buffer:
        """As `convert`, but the result may be in this thread's memory, which the next call overwrites."""
        return self.convert(image)


@dataclass(frozen=True, slots=True)
class Encoded(Form):
    """Keeps the stored bytes."""

    converts = False


@dataclass(frozen=True, slots=True)
class Recoded(Form):
    """A JPEG with a smaller short side: upright, RGB, 4:2:0, resized as by `packer convert --resize-short`.

    Images whose short side is not longer keep their bytes.

    short_side: in pixels.
    quality: 1 to 100.
    rate: bytes per pixel, for estimates; measured by `readers.cached`.
    """

    short_side: int
    quality: int = 90
    rate: float = field(default=1.0, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= self.short_side <= 65_535 or not 1 <= self.quality <= 100:
            raise ValueError(
                f"Recoded needs a short side of 1 to 65535 pixels and a quality of 1 to 100, not {self.short_side} and "
                f"{self.quality}"
            )

    @property
    def kind(self) -> str:
        return f"recoded-{self.short_side}-q{self.quality}"

    def info(self, original: ImageInfo) -> ImageInfo:
        short = np.minimum(original.height, original.width)
        changed = short > self.short_side
        factor = self.short_side / np.maximum(short, 1).astype(np.float64)
        turned = changed & (original.orientation >= 5)
        height, width = (shrunk_sides(side, factor).astype(np.uint32) for side in (original.height, original.width))
        values = (
            np.where(turned, width, height),
            np.where(turned, height, width),
            np.where(changed, 3, original.components),
            np.where(changed, _BASELINE, original.process),
            np.where(changed, 1, original.orientation),
            np.where(changed, _JPEG, original.media),
        )
        return _info(values, original)

    def bytes(self, info: ImageInfo, original: Int64s) -> Int64s:
        pixels = info.height.astype(np.int64) * info.width
        short = np.minimum(info.height, info.width)
        return np.where(short < self.short_side, original, np.ceil(pixels * self.rate).astype(np.int64))

    def convert(self, image: Buffer) -> Buffer:
        return recoded(image, self.short_side, self.quality)


@dataclass(frozen=True, slots=True)
class Decoded(Form):
    """Pixels, uint8 RGB, after `ops`; without ops the whole upright image.

    ops: the leading Resize, CenterCrop and Crop of the augmentation; the loader then gets the ops after them.
    """

    ops: tuple[Op, ...] = ()

    def __init__(self, ops: Sequence[Op] = ()) -> None:
        recipe = Recipe(ops)
        for op in recipe.ops:
            if op.stage is not Stage.GEOMETRY or op.draws:
                raise ValueError(
                    f"Decoded cannot keep the result of {op!r}, which is random or not geometric; keep the leading "
                    f"Resize, CenterCrop and Crop, and give the other ops to the loader"
                )
        object.__setattr__(self, "ops", recipe.ops)

    @property
    def kind(self) -> str:
        if not self.ops:
            return "decoded"
        return "decoded-" + "-".join(re.sub(r"\W+", "_", repr(op)).strip("_").lower() for op in self.ops)

    def info(self, original: ImageInfo) -> ImageInfo:
        height, width = (side.astype(np.int64) for side in (original.height, original.width))
        turned = original.orientation >= 5
        known = (height > 0) & (width > 0)
        seen = [np.maximum(np.where(turned, *sides), 1) for sides in ((width, height), (height, width))]
        boxes = boxes_of(self.ops, *seen)
        values = (
            np.where(known, boxes.out_height, 0),
            np.where(known, boxes.out_width, 0),
            np.where(known, 3, 0),
            np.zeros(len(height), np.uint8),
            known,
            np.where(known, _PIXELS, 0),
        )
        return _info(values, original)

    def bytes(self, info: ImageInfo, original: Int64s) -> Int64s:
        pixels = info.height.astype(np.int64) * info.width
        return np.where(pixels > 0, PIXELS_HEADER_BYTES + 3 * pixels, 0)

    def passes(self, original: ImageInfo) -> list[Pass]:
        heights, widths = (np.maximum(side, 1) for side in upright_sides(original))
        return passes_of(self.ops, heights, widths)

    def convert(self, image: Buffer) -> Buffer:
        return decoded(image, self.ops)


@dataclass(frozen=True, slots=True)
class Coefficients(Form):
    """The quantised DCT coefficients of JPEGs (`readers.coefficients`); other images keep their bytes.

    rate: bytes per byte of the JPEG, for estimates; measured by `readers.cached`.
    """

    is_for_decoders = True

    rate: float = field(default=1.0, repr=False, compare=False)

    @property
    def kind(self) -> str:
        return f"coefficients-{VERSION}"

    def bytes(self, info: ImageInfo, original: Int64s) -> Int64s:
        return np.where(info.media == _JPEG, np.ceil(original * self.rate).astype(np.int64), original)

    def convert(self, image: Buffer) -> Buffer:
        """The coefficients of a JPEG; other images, and coefficients from a cache below, are returned unchanged."""
        kept = self.lend(image)
        return kept if kept is image else bytes(kept)

    def lend(self, image: Buffer) -> Buffer:
        if image[: len(MAGIC)] == MAGIC:
            return image
        from readers.coefficients import lend  # loads crc32c

        return lend(image) or image


KeepLike: TypeAlias = str | Form
_FORMS = ("coefficients", "decoded", "encoded", "recoded")


def as_form(keep: KeepLike) -> Form:
    """The form that a text names. Raises ValueError.

    NAME:PARAMETERS may also name an entry point of the group packer.forms of another distribution, a function of the
    parameters.
    """
    if not isinstance(keep, str):
        return keep
    if keep in ("encoded", "coefficients"):
        return Encoded() if keep == "encoded" else Coefficients()
    match = re.fullmatch(r"recoded:(\d+)(?:@(\d+))?", keep)
    if match:
        return Recoded(int(match[1]), int(match[2] or 90))
    match = re.fullmatch(r"decoded(?::(\d+))?", keep)
    if match:
        return Decoded([Resize(int(match[1]))] if match[1] else [])
    name, _, parameters = keep.partition(":")
    make = installed_callable("packer.forms", _FORMS, name)
    if make is not None:
        form: Form = make(parameters)
        return form
    others = "".join(f", {name}" for name in installed_names("packer.forms", _FORMS))
    raise ValueError(
        f"keep is encoded, recoded:SIDE, recoded:SIDE@QUALITY, decoded, decoded:SIDE{others} or coefficients, not "
        f"{keep!r}"
    )


def rate_of(form: Form) -> float:
    """The measured rate of a form; 0 for forms without one."""
    return form.rate if isinstance(form, Recoded | Coefficients) else 0.0


def with_rate(form: Form, rate: float) -> Form:
    """The form with a measured rate, if it has one."""
    return replace(form, rate=rate) if isinstance(form, Recoded | Coefficients) else form


def _info(values: Sequence[npt.ArrayLike], like: ImageInfo) -> ImageInfo:
    pairs = zip(values, ImageInfo._fields, strict=True)
    return ImageInfo._make(np.asarray(value).astype(getattr(like, name).dtype) for value, name in pairs)


def compress(data: Buffer) -> Buffer:
    """The bytes to store for a payload."""
    if data[:4] != _ZSTD_MAGIC and sniff(data) in COMPRESSED_MEDIA:
        return data
    frame: bytes = _codecs().compressor.compress(data)
    return frame if len(frame) < len(data) or data[:4] == _ZSTD_MAGIC else data


def decompress(stored: Buffer) -> Buffer:
    """The payload of stored bytes. Raises ValueError for a damaged frame."""
    if stored[:4] != _ZSTD_MAGIC:
        return stored
    from zstandard import ZstdError

    try:
        data: bytes = _codecs().decompressor.decompress(stored)
    except ZstdError as error:
        raise ValueError(f"a damaged zstd frame of {len(stored)} bytes: {error}") from error
    return data


def may_pay(payloads: Sequence[Buffer]) -> bool:
    """Whether enough of these bytes are uncompressed to try compression."""
    raw = sum(len(data) for data in payloads if sniff(data) not in COMPRESSED_MEDIA)
    return raw > 0 and raw >= (1 - _WORTHWHILE) * sum(len(data) for data in payloads)


def compressed_share(payloads: Sequence[Buffer]) -> float:
    """The share of bytes that compression leaves of some payloads of a field; 1.0 if it saves less than a tenth."""
    if not may_pay(payloads):
        return 1.0
    share = sum(len(compress(data)) for data in payloads) / sum(len(data) for data in payloads)
    return share if share <= _WORTHWHILE else 1.0


def _codecs() -> Any:
    """This thread's compressor and decompressor."""
    if not hasattr(_local, "compressor"):
        import zstandard

        _local.compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
        _local.decompressor = zstandard.ZstdDecompressor()
    return _local


# Conversion decodes an image, resizes it with antialiasing, and encodes it again or keeps the pixels.
#
# Images are decoded as in augmentation: a JPEG is first scaled in the DCT if that leaves enough pixels. Then Pillow
# resizes: with Lanczos before encoding, as in packing; with the filter of the ops for pixels, whose values are within
# 2 of 255 of those of torch's kernels in augmentation (docs/cache.md).


_Pixels = npt.NDArray[np.uint8]
_Ints = npt.NDArray[np.int64]


def recoded(image: Buffer, short_side: int, quality: int) -> Buffer:
    """An upright RGB JPEG with this short side; the same image if its side is not longer. Raises BadSampleError."""
    header = read_header(image)
    if min(header.height, header.width) <= short_side:
        return image
    height, width = upright_size(header.height, header.width, header.orientation)
    target_width, target_height = shrunk(width, height, short_side / min(width, height))
    reduce = 1
    while reduce < 8 and min(height, width) >= 4 * reduce * short_side and min(height, width) >= 32 * reduce:
        reduce *= 2  # with at least twice the size left, the resize hides the artefacts of scaling in the DCT
    pixels = decode_image(image, Region(0, 0, height, width, reduce))
    pixels = _resized(pixels, (target_height, target_width), "LANCZOS")
    return bytes(simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality, "RGB", "420"))


def decoded(image: Buffer, ops: Sequence[Op]) -> Buffer:
    """The pixels after `ops`, behind the header of `readers.headers.base`. Raises BadSampleError."""
    header = read_header(image)
    height, width = upright_size(header.height, header.width, header.orientation)
    boxes = boxes_of(ops, np.array([height]), np.array([width]))
    if boxes.bad:
        raise boxes.bad[0]
    top, left, rows, columns, reduce = (
        int(side[0]) for side in (boxes.top, boxes.left, boxes.height, boxes.width, boxes.reduce)
    )
    pixels = decode_image(image, Region(top, left, rows, columns, reduce, bool(boxes.coarse[0])))
    filter_name = "BICUBIC" if Recipe(ops).interpolation == "bicubic" else "BILINEAR"
    pixels = _resized(pixels, (int(boxes.resized_height[0]), int(boxes.resized_width[0])), filter_name)
    top, left = int(boxes.crop_top[0]), int(boxes.crop_left[0])
    return with_header(pixels[top : top + int(boxes.out_height[0]), left : left + int(boxes.out_width[0])])


def boxes_of(ops: Sequence[Op], heights: _Ints, widths: _Ints) -> Boxes:
    """The boxes of deterministic `ops` for upright images of these sizes."""
    return _plan(ops, heights, widths).boxes


def passes_of(ops: Sequence[Op], heights: _Ints, widths: _Ints) -> list[Pass]:
    """The passes (`readers.augment.geometry`) of deterministic `ops`, by image."""
    return _plan(ops, heights, widths).passes()


def _plan(ops: Sequence[Op], heights: _Ints, widths: _Ints) -> Plan:
    return Recipe(ops).plan(0, 0, np.zeros(len(heights), np.int64), heights, widths)


def _resized(pixels: _Pixels, size: tuple[int, int], filter_name: str) -> _Pixels:
    if pixels.shape[:2] == size:
        return pixels
    from PIL import Image

    try:
        image = Image.fromarray(np.ascontiguousarray(pixels))
        return np.asarray(image.resize((size[1], size[0]), Image.Resampling[filter_name]))
    except (ValueError, MemoryError) as error:
        raise BadSampleError(f"cannot be resized to {size[0]} x {size[1]}: {error}") from error
