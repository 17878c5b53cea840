"""Make the kept form of an image: decode it, resize it with antialiasing, and encode it again or keep the pixels.

Images are decoded as augmenting decodes them: a JPEG is first scaled in the DCT where that leaves enough to resize.
Then Pillow resizes: Lanczos for what is encoded again, as packing does it; as the ops say for pixels, with results
within 2 of 255 of those of torch's kernels, which augmenting uses (docs/cache.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import simplejpeg

from cache.errors import BadSampleError
from cache.stores import Buffer
from readers.augment.geometry import Boxes, Pass, Plan
from readers.augment.ops import Op
from readers.augment.recipe import Recipe
from readers.decode import Region, decode_image
from readers.decode.region import with_header
from readers.headers import read_header
from readers.headers.base import shrunk, upright_size

__all__ = ["boxes_of", "decoded", "passes_of", "recoded"]

_Pixels = npt.NDArray[np.uint8]
_Ints = npt.NDArray[np.int64]


def recoded(image: Buffer, short_side: int, quality: int) -> Buffer:
    """An upright RGB JPEG with this short side; the image itself where its own is not longer. Raises BadSampleError."""
    header = read_header(image)
    if min(header.height, header.width) <= short_side:
        return image
    height, width = upright_size(header.height, header.width, header.orientation)
    target_width, target_height = shrunk(width, height, short_side / min(width, height))
    reduce = 1
    while reduce < 8 and min(height, width) >= 4 * reduce * short_side and min(height, width) >= 32 * reduce:
        reduce *= 2  # at twice the size or more, the resize that is left hides what the DCT's scaling does otherwise
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
    """Where the pixels come from, for upright images of these sizes; `ops` draw nothing."""
    return _plan(ops, heights, widths).boxes


def passes_of(ops: Sequence[Op], heights: _Ints, widths: _Ints) -> list[Pass]:
    """The same as `readers.augment.geometry` states it, by image."""
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
