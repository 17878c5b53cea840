"""Everything that is no plain JPEG, decoded by Pillow: PNG, WebP, GIF, BMP, TIFF, and JPEGs that take Pillow to read.

As RGB: what Pillow's `convert("RGB")` makes of the first frame or page, without alpha. Two exceptions, where that would
be wrong without a word:

- Grey of 16 bits is shifted to 8, as Pillow does it for colours of 16 bits, where `convert` takes all above 255 for
  white. Of 12 bits, in a TIFF, the upper 8 as well.
- Floating point and integers of 32 bits or with a sign have no 8-bit RGB form that everyone agrees on: refused.

Pillow turns TIFFs upright by itself and leaves the others as they are stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError
from readers.decode.orient import upright, upright_size
from readers.headers import ImageHeader
from readers.headers.pillow import opened
from readers.sample import Buffer

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "EIGHT_BITS",
    "as_stored",
    "bits_of",
    "bits_of_grey",
    "check_size",
    "decode_whole",
    "layout_of",
    "tiles_of",
    "without_rgb",
]

_WITHOUT_RGB = {"F": "floating-point samples", "I": "integers of 32 bits or with a sign"}
_NO_RGB = "holds {}, which have no 8-bit RGB form; decode='unchanged' reads it"
_MISREAD = "holds {} bits a channel in planes, which Pillow misreads; write it anew with its channels interleaved"
_BYTE = 8
EIGHT_BITS = ("RGB", "RGBA", "RGBX", "CMYK", "LAB", "L", "LA")
_BITS_PER_SAMPLE = 258


def decode_whole(data: Buffer, header: ImageHeader) -> npt.NDArray[np.uint8]:
    """Upright RGB pixels, uint8 [height, width, 3]. Raises BadSampleError."""
    with opened(data, header.media) as image:
        bits = bits_of_grey(image)
        reason = without_rgb(image)
        if reason:
            raise BadSampleError(reason)
        image.load()
        check_size(image, header)
        if bits:
            grey = (np.asarray(image) >> (bits - 8)).astype(np.uint8)
            return upright(np.repeat(grey[:, :, None], 3, axis=2), as_stored(header))
        plain = image.convert("LA") if image.mode == "La" else image  # which Pillow converts to nothing else
        return upright(np.array(plain.convert("RGB")), as_stored(header))


def without_rgb(image: Image) -> str:
    """Why an image has no 8-bit RGB form, or Pillow gets it wrong; "" where all is well."""
    if bits_of_grey(image):
        return ""
    if bits_of(image) > _BYTE and image.mode in EIGHT_BITS and ";" not in layout_of(image):
        return _MISREAD.format(bits_of(image))
    return _NO_RGB.format(_WITHOUT_RGB[image.mode]) if image.mode in _WITHOUT_RGB else ""


def bits_of_grey(image: Image) -> int:
    """Bits of the samples of a grey image that has more than 8 of them, without a sign; 0 of any other."""
    if image.mode.startswith("I;16"):
        return bits_of(image) if bits_of(image) in range(9, 17) else 16
    # Pillow before 11 has no other mode for a PNG of 16 bits.
    return 16 if image.mode == "I" and image.format == "PNG" else 0


def bits_of(image: Image) -> int:
    """Bits of a sample of a TIFF, as its tag says; 8 for other media, whose depths have modes of their own."""
    found = getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE, (_BYTE,))
    return max((bits for bits in found if isinstance(bits, int)), default=_BYTE)


def layout_of(image: Image) -> str:
    """Pillow's name for how the values of a pixel lie in the file; "" where they lie apart."""
    arguments = (tile[-1] for tile in tiles_of(image))
    names = {one[0] if isinstance(one, tuple) and one else one for one in arguments}
    name = names.pop() if len(names) == 1 else ""
    return name if isinstance(name, str) else ""


def tiles_of(image: Image) -> list[Any]:
    """The parts of the file that hold pixels: (decoder, box, offset, arguments) each, before they are loaded."""
    tiles: list[Any] = getattr(image, "tile", [])
    return tiles


def check_size(image: Image, header: ImageHeader) -> None:
    """Raise BadSampleError for a decoded image that is not of the size that its header says."""
    expected = (header.height, header.width)
    if header.media == "tiff":
        expected = upright_size(*expected, header.orientation)
    found = (image.height, image.width)
    if found != expected:
        raise BadSampleError(f"expected {expected} pixels (height, width), found {found}")


def as_stored(header: ImageHeader) -> int:
    """The orientation in which Pillow leaves the pixels."""
    return 1 if header.media == "tiff" else header.orientation
