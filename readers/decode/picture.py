"""A decoded image on some device, as a decoder left it: not yet upright, in whatever order its values lie.

Turning an image by its EXIF orientation moves no pixel if who reads it steps through it accordingly. `layout` gives
these steps, which may be negative; torch has none such, so `upright_tensor` copies where it must.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from readers.decode.orient import upright_size

__all__ = ["Layout", "Picture", "layout", "upright_tensor"]


class Picture(NamedTuple):
    """pixels: uint8 [3, height, width] as stored, with any strides. orientation: EXIF's 1 to 8, not yet applied."""

    pixels: torch.Tensor
    orientation: int = 1

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the upright image."""
        return upright_size(self.pixels.shape[1], self.pixels.shape[2], self.orientation)


class Layout(NamedTuple):
    """Where the upright image lies: address of its upper left value of red, and steps in bytes to the next row, the
    next column and the next channel."""

    address: int
    row: int
    column: int
    channel: int


def layout(picture: Picture) -> Layout:
    """How to step through the upright image; good for as long as `picture.pixels` is alive."""
    pixels, orientation = picture
    _, height, width = pixels.shape
    channel, row, column = pixels.stride()
    address = pixels.data_ptr()
    if orientation >= 5:
        row, column, height, width = column, row, width, height
    if orientation in (3, 4, 7, 8):
        address, row = address + (height - 1) * row, -row
    if orientation in (2, 3, 6, 7):
        address, column = address + (width - 1) * column, -column
    return Layout(address, row, column, channel)


def upright_tensor(picture: Picture) -> torch.Tensor:
    """uint8 [3, height, width] as seen; `picture.pixels` itself or a view of it where that will do."""
    pixels, orientation = picture
    if orientation >= 5:
        pixels = pixels.transpose(1, 2)
    axes = [axis for axis, turned in ((1, (3, 4, 7, 8)), (2, (2, 3, 6, 7))) if orientation in turned]
    return pixels.flip(axes) if axes else pixels
