"""Encoded bytes to upright RGB pixels on the CPU, whatever the image is."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from readers.decode.jpeg import check_coding, decode_rows
from readers.decode.orient import upright, upright_size
from readers.decode.pillow import decode_whole
from readers.decode.raw import pixels_of
from readers.decode.region import Region, Scratch, check_pixels
from readers.errors import BadSampleError
from readers.headers import read_frame
from readers.sample import Buffer

__all__ = ["DECODER", "decode_image"]

# Named in resume tokens: another decoder may give slightly other pixels.
DECODER = "cpu"


def decode_image(
    data: Buffer,
    region: Region | tuple[int, int, int, int, int, bool] | None = None,
    scratch: Scratch | None = None,
    size: tuple[int, int] | None = None,
) -> npt.NDArray[np.uint8]:
    """RGB pixels of an encoded image, upright, uint8 [height, width, 3].

    region: the part that is wanted (None: all of it). Only JPEGs can be reduced; of other images the box comes in full
    size. scratch: memory to use; the result may lie in it, and lasts until its next use. Of an image that is decoded
    already the result is a read-only view of `data`. size: the (height, width) that the index promises for the upright
    image. Raises BadSampleError.
    """
    header, frame = read_frame(data)
    seen = upright_size(header.height, header.width, header.orientation)
    if size is not None and seen != size:
        raise BadSampleError(f"{header.media} image: the index says {size[0]} x {size[1]} pixels, found {seen}")
    check_pixels(header.height, header.width)
    if region is None:
        region = Region(0, 0, *seen)
    top, left, height, width, reduce, coarse = region
    if header.orientation != 1 and (header.height % reduce or header.width % reduce):
        reduce = 1  # the decoder counts its squares from the stored corner, which is another one
    pixels = None
    if frame:
        check_coding(data, header, frame)
    if frame and header.components != 4:
        bottom = top + height if header.orientation == 1 else header.height
        pixels = decode_rows(data, header, frame, bottom, reduce, coarse, scratch or Scratch())
        if pixels is not None and header.orientation != 1:
            pixels = upright(pixels, header.orientation)
    if pixels is None:
        pixels, reduce = (pixels_of if header.media == "pixels" else decode_whole)(data, header), 1
    top, left, height, width = top // reduce, left // reduce, -(-height // reduce), -(-width // reduce)
    return pixels[top : top + height, left : left + width]
