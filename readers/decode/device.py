"""Decoded images on a device, as a decoder left them, and the streams by which they are handed on.

Turning an image by its EXIF orientation moves no pixel if its reader steps through it accordingly. `layout` gives these
steps, which may be negative; torch has no negative steps, so `upright_tensor` copies where it must.

`DecodeStream` is the one place where CUDA streams of decoding, augmenting and training meet. nvJPEG's hardware engine
writes its output without regard to what is queued on the stream it is given, so on GPUs that have one (A100, H100 and
later) it may overwrite a block which the allocator has given out again while queued kernels still read it
(pytorch/vision#9606, torchcodec#1634: 134 of 200 decodes). Hence:

1. Decoding has a stream of its own, and so have its blocks. Before each decode the host waits for that stream: nothing
   is queued that could still read a recycled block.
2. What is made of the pixels is queued on the same stream, after them.
3. An event marks the end. The consumer's stream waits for it, on the device, and every tensor that is handed on is
   recorded on the consumer's stream, so that its block is not given out again before the consumer has read it.

On other devices these steps do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import torch

from readers.headers.base import upright_size

__all__ = ["DecodeStream", "Layout", "Picture", "Ready", "layout", "upright_tensor"]

Ready: TypeAlias = torch.cuda.Event | None


class Picture(NamedTuple):
    """pixels: uint8 [3, height, width] as stored, with any strides. orientation: EXIF's 1 to 8, not yet applied."""

    pixels: torch.Tensor
    orientation: int = 1

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the upright image."""
        return upright_size(self.pixels.shape[1], self.pixels.shape[2], self.orientation)


class Layout(NamedTuple):
    """How the upright image is stored: address of its upper left value of red, and steps in bytes to the next row, the
    next column and the next channel."""

    address: int
    row: int
    column: int
    channel: int


def layout(picture: Picture) -> Layout:
    """How to step through the upright image; valid for as long as `picture.pixels` is alive."""
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
    """uint8 [3, height, width] as seen; `picture.pixels` itself or a view of it where possible."""
    pixels, orientation = picture
    if orientation >= 5:
        pixels = pixels.transpose(1, 2)
    axes = [axis for axis, turned in ((1, (3, 4, 7, 8)), (2, (2, 3, 6, 7))) if orientation in turned]
    return pixels.flip(axes) if axes else pixels


class DecodeStream:
    """A stream for one thread that decodes, or copies. device: with its number, where it is a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Around a decode and the work on its pixels, or around copies; what was queued before is done."""
        if self.stream is None:
            yield
            return
        self.stream.synchronize()
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> Ready:
        """The end of what has been queued, for `hand_over`."""
        return self.stream.record_event() if self.stream is not None else None

    def tick(self) -> Ready:
        """A moment in what has been queued, for `elapsed`."""
        if self.stream is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def finish(self) -> None:
        """Wait until all is done that has been queued."""
        if self.stream is not None:
            self.stream.synchronize()

    @staticmethod
    def elapsed(start: Ready, end: Ready) -> int:
        """Nanoseconds of the device between two moments that are over."""
        return 0 if start is None or end is None else round(1e6 * start.elapsed_time(end))

    @staticmethod
    def hand_over(tensors: Sequence[torch.Tensor], ready: Ready) -> None:
        """Let the current stream of the calling thread use `tensors` when they are ready; returns at once."""
        if ready is None:
            return
        for tensor in tensors:
            consumer = torch.cuda.current_stream(tensor.device)
            consumer.wait_event(ready)
            tensor.record_stream(consumer)
