"""Headers by Pillow: of BMP, AVIF, HEIC and JPEG XL, and of images that `readers.headers.formats` refuses although they
can be decoded.

For a BMP, Pillow reports where uncompressed pixels end, so a truncated file is found without decoding. The parsers of
the other formats refuse damage that may affect no pixels, for example missing last bytes, or a tag with a wrong offset.
Pillow then decodes the whole image: an image with lost pixels remains refused, and any other has the pixels that
`readers.decode` returns.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from cache.errors import BadSampleError
from readers.headers.base import MAX_PIXELS, Buffer, ImageHeader, truncated, unpack
from readers.headers.formats import UPRIGHT, check_scans

if TYPE_CHECKING:
    from PIL.Image import Image


_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
PLUGINS = {"avif": "AVIF", "heif": "HEIF", "jxl": "JXL"}
_BOX = struct.Struct(">I4s")
_JXL_STREAM, _JXL_PART = b"jxlc", b"jxlp"
_JXL_SIDES = (9, 13, 18, 30)
_JXL_RATIOS = ((1, 1), (12, 10), (4, 3), (3, 2), (16, 9), (5, 4), (2, 1))  # width to height


def missing_plugin(media: str) -> str:
    """What to install to decode a medium; "" if it is installed, and now registered with Pillow."""
    with suppress(ImportError):
        if media == "avif":
            from PIL import AvifImagePlugin

            return "" if AvifImagePlugin.SUPPORTED else "a Pillow built with libavif, as its wheels are"
        if media == "heif":
            import pillow_heif

            pillow_heif.register_heif_opener()
        if media == "jxl":
            from pillow_jxl import JpegXLImagePlugin

            JpegXLImagePlugin.DECODE_THREADS = 0  # readers already decode several images in parallel
        return ""
    return "pip install 'pillow>=11.3'" if media == "avif" else f"pip install 'packer-vision[{media}]'"


def _formats(data: Buffer, media: str) -> tuple[str, ...]:
    """The names of the formats with which Pillow opens an image of this medium.

    Raises BadSampleError without the plug-in, and for a JPEG XL of too many pixels, because opening decodes it.
    """
    if media not in PLUGINS:
        return _FORMATS
    if missing := missing_plugin(media):
        raise BadSampleError(f"is not read by any installed package:  {missing}")
    if media == "jxl":
        height, width = _jxl_size(data)
        if height * width > MAX_PIXELS // 2:
            raise BadSampleError(f"{height} x {width} pixels are more than the {MAX_PIXELS // 2} decoded")
    return (PLUGINS[media],)


def _boxes(data: Buffer, media: str) -> Iterator[tuple[bytes, int, int]]:
    """(kind, first byte of the content, end) of each box of an ISO file. Raises BadSampleError for a truncated box."""
    at = 0
    while at < len(data):
        size, kind = unpack(media, _BOX, data, at)
        start = at + _BOX.size
        if size == 1:
            size, start = int.from_bytes(data[start : start + 8], "big"), start + 8
        end = at + size if size else len(data)
        if not start <= end <= len(data):
            raise truncated(media, at, f"a box of {size} bytes", data)
        yield kind, start, end
        at = end


def _jxl_size(data: Buffer) -> tuple[int, int]:
    """(height, width) in the header of a JPEG XL (ISO/IEC 18181-1, SizeHeader). Raises BadSampleError."""
    start = 0
    if data[:1] != b"\xff":
        streams = ((kind, at) for kind, at, _ in _boxes(data, "jxl") if kind in (_JXL_STREAM, _JXL_PART))
        kind, start = next(streams, (_JXL_STREAM, len(data)))
        start += 4 * (kind == _JXL_PART)
    bits = int.from_bytes(data[start + 2 : start + 12], "little")

    def take(count: int) -> int:
        nonlocal bits
        value, bits = bits & ((1 << count) - 1), bits >> count
        return value

    is_small = take(1)

    def side() -> int:
        return 8 * (take(5) + 1) if is_small else 1 + take(_JXL_SIDES[take(2)])

    height = side()
    ratio = take(3)
    if not ratio:
        return height, side()
    over, under = _JXL_RATIOS[ratio - 1]
    return height, height * over // under


class OpenedHeader(ImageHeader):
    """A header with the image that Pillow opened for it."""

    image: Image


def parse_iso(data: Buffer, media: str, *, keep: bool = False) -> ImageHeader:
    """Parse the header of an AVIF, HEIC or JPEG XL. Raises BadSampleError.

    Pillow's plug-in decodes a JPEG XL when it opens it. keep: return an OpenedHeader, from which `opened` takes it.
    """
    if data[:1] != b"\xff" and not {b"mdat", _JXL_STREAM, _JXL_PART} & {kind for kind, _, _ in _boxes(data, media)}:
        raise truncated(media, 0, "a box with the pixels", data)
    with opened(data, media) as image:
        header = OpenedHeader(media, image.height, image.width, len(image.getbands()), 0, _orientation(image))
    if not keep:
        return ImageHeader(*header)
    header.image = image
    return header


def iso_bits(data: Buffer) -> int:
    """Bits per value of an AVIF or HEIC, from the first codec configuration in its box "meta"; 8 without one."""
    meta = next((bytes(data[at:end]) for kind, at, end in _boxes(data, "iso") if kind == b"meta"), b"")
    av1, hevc = meta.find(b"av1C"), meta.find(b"hvcC")  # AV1-ISOBMFF 2.3.3; ISO/IEC 14496-15, 8.3.2.1
    if av1 >= 0 and len(meta) > av1 + 6:
        return 12 if meta[av1 + 6] & 0x20 else 10 if meta[av1 + 6] & 0x40 else 8
    return 8 + (meta[hevc + 21] & 7) if hevc >= 0 and len(meta) > hevc + 21 else 8


def iso_frames(data: Buffer, media: str) -> int:
    """The number of images that Pillow finds in an AVIF or HEIC. Raises BadSampleError."""
    with opened(data, media) as image:
        return int(getattr(image, "n_frames", 1))


def _orientation(image: Image) -> int:
    rotated = image.getexif().get(_ORIENTATION, UPRIGHT)
    return int(rotated) if rotated in range(1, 9) else UPRIGHT


_ORIENTATION = 0x0112


@contextmanager
def opened(data: Buffer, media: str, header: ImageHeader | None = None) -> Iterator[Image]:
    """The image opened by Pillow, or kept in `header`. Any error in the block is raised as BadSampleError."""
    from PIL import Image, UnidentifiedImageError

    try:
        kept = header.image if isinstance(header, OpenedHeader) else None
        with kept or Image.open(io.BytesIO(data), formats=_formats(data, media)) as image:
            if image.width * image.height > MAX_PIXELS:
                raise BadSampleError(f"{image.height} x {image.width} pixels are more than the {MAX_PIXELS} decoded")
            if media == "jpeg":
                check_scans(data, 0, image.width * image.height)
            yield image
    except BadSampleError as error:
        raise BadSampleError(f"{media} image: {error}") from error
    except UnidentifiedImageError as error:
        raise BadSampleError(f"{media} image: damaged, or of a kind that Pillow does not read") from error
    except MemoryError as error:
        raise BadSampleError(f"{media} image: there is not enough memory to decode it") from error
    except Image.DecompressionBombError as error:
        raise BadSampleError(f"{media} image: {error} PIL.Image.MAX_IMAGE_PIXELS sets half that limit.") from error
    except Exception as error:  # Pillow's plug-ins raise any type
        raise BadSampleError(f"{media} image: {error or type(error).__name__}") from error


def tiles_of(image: Image) -> list[Any]:
    """The parts of the file with pixels, (decoder, box, offset, arguments) each; only known before the image is
    loaded."""
    tiles: list[Any] = getattr(image, "tile", [])
    return tiles


def parse_bmp(data: Buffer) -> ImageHeader:
    """Parse the header of a BMP. Raises BadSampleError. Compressed pixels are decoded to find their end."""
    end = 0
    with opened(data, "bmp") as image:
        decoder, _, start, arguments = tiles_of(image)[0]
        if decoder == "raw":
            end = start + arguments[1] * image.height
        else:
            image.load()
        header = ImageHeader("bmp", image.height, image.width, len(image.getbands()), 0, UPRIGHT)
    if end > len(data):
        raise truncated("bmp", start, f"pixels up to byte {end}", data)
    return header


def parse_decodable(data: Buffer, media: str) -> ImageHeader:
    """The header of an image that Pillow can decode; `process` is 0, also for a JPEG. Raises BadSampleError."""
    with opened(data, media) as image:
        image.load()
        # On loading, Pillow rotates a TIFF upright and drops the tag.
        valid = UPRIGHT if media == "tiff" else _orientation(image)
        return ImageHeader(media, image.height, image.width, len(image.getbands()), 0, valid)
