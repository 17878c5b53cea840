"""Headers by Pillow: of BMP, and of any image that our own parsers refuse although it decodes.

BMP is rare, and what Pillow finds when it opens one says where uncompressed pixels end; so a truncated file is noticed
without decoding it. The other parsers stop at damage that may cost no pixels: a file without its last bytes, say, or
with a tag that leads nowhere. Pillow decodes the whole image to find out, so what has lost pixels stays refused; and
what it decodes to is what `readers.decode` gives.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cache.errors import BadSampleError
from readers.headers.base import MAX_PIXELS, Buffer, ImageHeader, truncated
from readers.headers.formats import UPRIGHT, check_scans

if TYPE_CHECKING:
    from PIL.Image import Image


_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
_ORIENTATION = 0x0112


@contextmanager
def opened(data: Buffer, media: str) -> Iterator[Image]:
    """The image as Pillow opens it, not yet decoded. Any error inside is raised as a BadSampleError."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
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
    """The parts of the file that hold pixels: (decoder, box, offset, arguments) each, before they are loaded."""
    tiles: list[Any] = getattr(image, "tile", [])
    return tiles


def parse_bmp(data: Buffer) -> ImageHeader:
    """The header of a BMP; raises BadSampleError. Compressed pixels are decoded, since nothing else shows their end."""
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
    """The header of an image that Pillow decodes; raises BadSampleError for others. `process` is 0, also of a JPEG."""
    with opened(data, media) as image:
        image.load()
        # Pillow has turned a TIFF upright by now, and has dropped the tag.
        rotated = UPRIGHT if media == "tiff" else image.getexif().get(_ORIENTATION, UPRIGHT)
        valid = int(rotated) if rotated in range(1, 9) else UPRIGHT
        return ImageHeader(media, image.height, image.width, len(image.getbands()), 0, valid)
