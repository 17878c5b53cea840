"""What rocAL may be given: JPEGs that its decoder decodes, and nothing else.

rocAL decodes external sources by TurboJPEG and does not report when that fails: an image without a readable header
becomes another image of the batch, under the original label; truncated and CMYK images become garbage; EXIF orientation
is ignored. So each image is examined before it is handed over:

    a whole JPEG of 8 bits, 1 or 3 components, upright, of usual sampling    is handed over unchanged, without a copy
    any other whole image    is decoded and encoded again as a baseline JPEG, 4:4:4
    a bad header, no end marker, another size than the index's, what our decoder cannot decode    is a BadSampleError

As in `readers.decode`, damage inside the entropy-coded data is not noticed here: the CRC32C of the index finds it
(`readers.open(…, verify=True)`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import simplejpeg

from cache.errors import BadSampleError, DatasetError
from readers.decode import decode_image
from readers.decode.cpu import has_clean_header
from readers.headers import MEDIA, ImageHeader, read_frame
from readers.headers.base import shrunk, upright_size
from readers.reader import Reader
from readers.sample import Buffer, ImageInfo, upright_sides

__all__ = ["Limits", "Vetted", "blank", "decodable", "limits_of", "vet"]

_PROCESSES = (0xC0, 0xC1, 0xC2)  # baseline, extended, progressive: what TurboJPEG decodes in every version
_LUMA_SAMPLING = (0x11, 0x21, 0x22, 0x12, 0x41)  # 4:4:4, 4:2:2, 4:2:0, 4:4:0, 4:1:1
_LEAST_SCALE = 8  # TurboJPEG decodes at 1/8 or more; rocAL crops what is larger still


class Limits(NamedTuple):
    """The largest decoded image, in pixels. rocAL enlarges or reduces what it decodes to the best fit."""

    height: int
    width: int


class Vetted(NamedTuple):
    """data: contiguous, uint8 [n]. reason: why it was encoded again, "" where it was not."""

    data: npt.NDArray[np.uint8]
    reason: str


def vet(data: Buffer, limits: Limits, *, size: tuple[int, int], convert: bool, quality: int) -> Vetted:
    """The JPEG to give to rocAL for an image.

    limits: of decoded images.
    size: (height, width) as stored by the index, 0 where it does not know.
    convert: encode images again that rocAL does not decode.
    quality: of JPEGs that are encoded again.

    Raises BadSampleError for an image that is not whole, and, without `convert`, for one that rocAL does not decode.
    """
    header, frame = read_frame(data)
    if all(size) and (header.height, header.width) != size:
        raise BadSampleError(
            f"{header.media} image: the index says {size[0]} x {size[1]} pixels, found {header.height} x {header.width}"
        )
    reason = _obstacle(header, limits) or (_unusual(data, frame, header.components) if frame else "")
    if not reason:
        return Vetted(np.frombuffer(data, np.uint8), "")
    if not convert:
        raise BadSampleError(f"rocAL does not decode {reason}; convert=True encodes such images again")
    return Vetted(np.frombuffer(_encode(data, header, limits, quality), np.uint8), reason)


def blank(size: Limits) -> npt.NDArray[np.uint8]:
    """A grey JPEG, for rows of padding."""
    grey = np.full((size.height, size.width, 3), 128, np.uint8)
    return np.frombuffer(simplejpeg.encode_jpeg(grey, 95, "RGB", "444"), np.uint8)


def limits_of(reader: Reader, *, cap: int) -> Limits:
    """The largest upright height and width of a set, by its index, and neither above `cap`. Raises DatasetError."""
    height, width = upright_sides(reader.info)
    if not len(height) or not height.any():
        raise DatasetError("the index does not know the size of any image: give max_height and max_width")
    return Limits(min(int(height.max()), cap), min(int(width.max()), cap))


def decodable(info: ImageInfo) -> npt.NDArray[np.bool_]:
    """Which images rocAL decodes unchanged, by header facts of the index."""
    jpeg = (info.media == MEDIA.index("jpeg")) & np.isin(info.components, (1, 3)) & np.isin(info.process, _PROCESSES)
    return np.asarray(jpeg & (info.orientation == 1))


def _obstacle(header: ImageHeader, limits: Limits) -> str:
    """Why rocAL must not get this image unchanged, "" where it may."""
    if header.media != "jpeg":
        return f"{header.media} images"
    if header.components not in (1, 3):
        return f"JPEGs of {header.components} components"
    if header.process not in _PROCESSES:
        return f"JPEGs of process 0x{header.process:02X}"
    if header.orientation != 1:
        return "JPEGs to be turned upright"
    if header.height > _LEAST_SCALE * limits.height or header.width > _LEAST_SCALE * limits.width:
        return f"JPEGs over {_LEAST_SCALE} times {limits.height} x {limits.width} pixels"
    return ""


def _unusual(data: Buffer, frame: int, components: int) -> str:
    """Why TurboJPEG leaves a JPEG undecoded, though it reads the header; frame: the byte that holds the height.

    T.81, B.2.2: the precision comes before the height; behind height, width and the number of components come three
    bytes for each component: its id, its sampling factors and its table.
    """
    if data[frame - 1] != 8:
        return f"JPEGs of {data[frame - 1]} bits"
    factors = tuple(data[frame + 6 + 3 * i] for i in range(components))
    if components == 3 and (factors[0] not in _LUMA_SAMPLING or factors[1:] != (0x11, 0x11)):
        return "JPEGs of unusual colour sampling"
    return "" if has_clean_header(data) else "JPEGs with damage before their pixels"


def _encode(data: Buffer, header: ImageHeader, limits: Limits, quality: int) -> bytes:
    pixels = decode_image(data)
    height, width = upright_size(header.height, header.width, header.orientation)
    factor = min(_LEAST_SCALE * limits.height / height, _LEAST_SCALE * limits.width / width)
    if factor < 1:
        from PIL import Image

        small = Image.fromarray(pixels).resize(shrunk(width, height, factor), Image.Resampling.BOX, reducing_gap=2.0)
        pixels = np.asarray(small)
    try:
        encoded: bytes = simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality, "RGB", "444")
    except ValueError as error:  # more than 65,500 pixels a side
        raise BadSampleError(f"{header.media} image of {height} x {width} pixels as a JPEG: {error}") from error
    return encoded
