"""What Pillow says of an image that our parsers refuse: they stop at damage beyond which all pixels may still be had.

A file without its last bytes, say, or with a tag that leads nowhere. Pillow decodes the whole image to find out, so
what has lost pixels stays refused; and what it decodes to is what `readers.decode` gives.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cache.errors import BadSampleError
from readers.headers.exif import UPRIGHT
from readers.headers.header import MAX_PIXELS, Buffer, ImageHeader

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["opened", "parse"]

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
_ORIENTATION = 0x0112


@contextmanager
def opened(data: Buffer, media: str) -> Iterator[Image]:
    """The image as Pillow opens it, not yet decoded. What goes wrong inside is a BadSampleError."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise BadSampleError(f"{image.height} x {image.width} pixels are more than the {MAX_PIXELS} decoded")
            yield image
    except BadSampleError as error:
        raise BadSampleError(f"{media} image: {error}") from error
    except UnidentifiedImageError as error:
        raise BadSampleError(f"{media} image: damaged, or of a kind that Pillow does not read") from error
    except MemoryError as error:
        raise BadSampleError(f"{media} image: there is not enough memory to decode it") from error
    except Image.DecompressionBombError as error:
        raise BadSampleError(f"{media} image: {error} PIL.Image.MAX_IMAGE_PIXELS sets half that limit.") from error
    except Exception as error:  # Pillow's plug-ins raise whatever they meet
        raise BadSampleError(f"{media} image: {error or type(error).__name__}") from error


def parse(data: Buffer, media: str) -> ImageHeader:
    """The header of an image that Pillow decodes; raises BadSampleError for others. `process` is 0, also of a JPEG."""
    with opened(data, media) as image:
        image.load()
        # Pillow has turned a TIFF upright by now, and forgotten that it did.
        rotated = UPRIGHT if media == "tiff" else image.getexif().get(_ORIENTATION, UPRIGHT)
        valid = int(rotated) if rotated in range(1, 9) else UPRIGHT
        return ImageHeader(media, image.height, image.width, len(image.getbands()), 0, valid)
