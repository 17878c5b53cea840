"""Everything that is no plain JPEG, decoded by Pillow: PNG, WebP, GIF, BMP, TIFF, and JPEGs in CMYK or YCCK.

What Pillow's `convert("RGB")` makes of them: the first frame, without alpha. Pillow turns TIFFs upright by itself and
leaves the others as they are stored.
"""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import numpy.typing as npt

from readers.decode.orient import upright, upright_size
from readers.errors import BadSampleError
from readers.headers import ImageHeader
from readers.sample import Buffer

__all__ = ["decode_whole"]

# What Pillow's plug-ins raise for broken files.
_ERRORS = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error)
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")


def decode_whole(data: Buffer, header: ImageHeader) -> npt.NDArray[np.uint8]:
    """Upright RGB pixels, uint8 [height, width, 3]. Raises BadSampleError."""
    from PIL import Image

    orientation = 1 if header.media == "tiff" else header.orientation
    expected = (header.height, header.width)
    if header.media == "tiff":
        expected = upright_size(*expected, header.orientation)
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            found = (image.height, image.width)
            if found != expected:
                raise BadSampleError(f"{header.media} image: expected {expected} pixels (height, width), found {found}")
            return upright(np.array(image.convert("RGB")), orientation)
    except BadSampleError:
        raise
    except (*_ERRORS, Image.DecompressionBombError) as error:
        raise BadSampleError(f"{header.media} image: {error}") from error
