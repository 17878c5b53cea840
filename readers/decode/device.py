"""Decoded images on a device in stored orientation, and the streams on which they are used.

An image need not be moved to be turned by its EXIF orientation if the kernel steps through it accordingly. `layout`
gives these steps, which may be negative; torch has no negative steps, so `upright_tensor` copies if necessary.

`DecodeStream` is the one place where CUDA streams of decoding, augmenting and training meet. nvJPEG's hardware engine
writes its output without waiting for the work queued on its stream, so on GPUs that have one (A100, H100 and
later) it may overwrite a block which the allocator has given out again while queued kernels still read it
(pytorch/vision#9606, torchcodec#1634: 134 of 200 decodes). Hence:

1. Decoding has a separate stream, and so have its blocks. Before each decode the host waits for that stream: nothing
   is queued that could still read a recycled block.
2. What is made of the pixels is queued on the same stream, after them.
3. An event marks the end. The consumer's stream waits for it, on the device, and every tensor that is handed on is
   recorded on the consumer's stream, so that its block is not given out again before the consumer has read it.

On other devices these steps do nothing.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from cache.node import find_library
from readers.headers.base import upright_size
from readers.order.base import Int64s, derive_keys

__all__ = [
    "CpuShare",
    "DecodeStream",
    "Picture",
    "Ready",
    "Share",
    "Spent",
    "has_jpeg_engine",
    "layout",
    "load_torchcodec",
    "load_torchvision",
    "upright_tensor",
]


# Sharing of images between the device and the CPU, of those that the device could decode.
#
# Whether the CPU decodes an image depends only on (seed, epoch, position) and the share, not on batches, ranks or
# threads: with a fixed share, a resumed run decodes every image on the same side as an uninterrupted run.
#
#     fraction(position * φ + start of the epoch) < share          φ: the golden ratio
#
# Multiples of the golden ratio spread evenly over [0, 1). So of n consecutive positions the CPU decodes share * n, plus
# or minus three, and no batch waits for an unlucky draw. A larger share adds images to those of a smaller one.
#
# With "auto" the share follows the measured costs, so that both sides finish a batch at the same time. If the images of
# a batch that the device could decode have W bytes, then
#
#     the device takes     d0 + d (1 - share) W            d0: copies and the kernel
#     n threads take       (c0 + c share W) / n            c0: planning, reading, images that only the CPU decodes
#
# which are equal at  share = (d0 + d W - c0 / n) / (d W + c W / n). All of these are measured in every batch; d and c
# are nanoseconds a byte, because the bytes of a JPEG predict its decoding time better than its pixels (docs/gpu.md).


CpuShare: TypeAlias = float | Literal["auto"]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # the fraction of the golden ratio, in units of 2 ** -64
_11 = np.uint64(11)

_FIRST = 0.25
_UNUSUAL = 2  # first batches to ignore: libraries are loaded, the kernel is compiled and threads start
_MEASURED = 4  # batches to measure before the share changes
_FORGOTTEN = 1 / 16  # decay of earlier measurements with every batch
_LEAST = 1 / 32  # least share of either side, so that both rates stay measured
_STEP = 1 / 16  # least change, relative to the smaller side, so that the share does not follow noise


class Spent(NamedTuple):
    """The costs of a batch in nanoseconds.

    images: number of images of the batch.
    cpu: time of all threads. shared: the part of it for images that the device could have decoded, of `shared_bytes`.
    device: time from the beginning to the end of the batch. decoded: the part of it for decoding `device_bytes`.
    """

    images: int
    cpu: int
    shared: int
    shared_bytes: int
    device: int
    decoded: int
    device_bytes: int


class Share:
    """The share of one loader: `wanted`, or the one at which its `threads` threads and its device keep pace.

    value: the share of the next batch, 0 to 1. One thread adds measurements; any thread may read. Raises ValueError.
    """

    def __init__(self, requested: CpuShare = 0.0, threads: int = 1) -> None:
        if isinstance(requested, str):
            valid = requested == "auto"
        else:
            valid = isinstance(requested, Real) and not isinstance(requested, bool) and 0 <= requested <= 1
        if not valid:
            raise ValueError(f"cpu_share is 'auto' or a number from 0 to 1, not {requested!r}")
        self.wanted: CpuShare = "auto" if isinstance(requested, str) else float(requested)
        self.value = _FIRST if isinstance(requested, str) else float(requested)
        self._threads, self._batches = threads, 0
        self._device, self._device_rest = _Mean(), _Mean()
        self._cpu, self._cpu_rest = _Mean(), _Mean()
        self._bytes = _Mean()

    @property
    def is_measured(self) -> bool:
        return self.wanted == "auto"

    def choose(self, seed: int, epoch: int, positions: Int64s) -> npt.NDArray[np.bool_]:
        """Whether the CPU decodes each of the images at these positions (int64 [n]) instead of the device, bool [n]."""
        start, *_ = derive_keys(seed, epoch, "cpu share")
        fractions = ((positions.astype(np.uint64) * _GOLDEN + start) >> _11) * 2.0**-53
        return np.asarray(fractions < self.value)

    def add(self, batch: Spent) -> None:
        """Add the measurements of a batch, and adjust the share if the change is large enough."""
        self._batches += 1
        if not self.is_measured or self._batches <= _UNUSUAL:
            return
        self._device.add(batch.decoded, batch.device_bytes)
        self._device_rest.add(batch.device - batch.decoded, batch.images)
        self._cpu.add(batch.shared, batch.shared_bytes)
        self._cpu_rest.add(batch.cpu - batch.shared, batch.images)
        self._bytes.add(batch.device_bytes + batch.shared_bytes, batch.images)
        if self._batches >= _UNUSUAL + _MEASURED:
            self._move()

    def _move(self) -> None:
        device = self._device.value * self._bytes.value
        cpu = self._cpu.value * self._bytes.value / self._threads
        if not (device and cpu):
            return  # no batch had an image for either of them
        ahead = self._device_rest.value - self._cpu_rest.value / self._threads
        target = min(max((device + ahead) / (device + cpu), _LEAST), 1 - _LEAST)
        if abs(target - self.value) >= _STEP * min(target, 1 - target):
            self.value = target


class _Mean:
    """The mean amount per unit over the last batches. An outlier, such as after a stalled read, counts at most as twice
    the mean."""

    def __init__(self) -> None:
        self._amount = self._units = 0.0

    @property
    def value(self) -> float:
        return self._amount / self._units if self._units else 0.0

    def add(self, amount: float, units: float) -> None:
        if self._amount:
            amount = min(amount, 2 * self.value * units)
        self._amount += amount - _FORGOTTEN * self._amount
        self._units += units - _FORGOTTEN * self._units


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
    """The memory layout of the upright image: address of the red value of its upper left pixel, and steps in bytes to
    the next row, column and channel."""

    address: int
    row: int
    column: int
    channel: int


def layout(picture: Picture) -> Layout:
    """The layout of the upright image; valid as long as `picture.pixels` is alive."""
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
    """The upright image, uint8 [3, height, width]; `picture.pixels` or a view of it if possible."""
    pixels, orientation = picture
    if orientation >= 5:
        pixels = pixels.transpose(1, 2)
    axes = [axis for axis, turned in ((1, (3, 4, 7, 8)), (2, (2, 3, 6, 7))) if orientation in turned]
    return pixels.flip(axes) if axes else pixels


class DecodeStream:
    """A stream for one thread that decodes or copies. device: with its number if it is a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """A context for a decode and the work on its pixels, or for copies; waits for all work queued before."""
        if self.stream is None:
            yield
            return
        self.stream.synchronize()
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> Ready:
        """An event at the end of the queued work, for `hand_over`."""
        return self.stream.record_event() if self.stream is not None else None

    def tick(self) -> Ready:
        """A timing event at the end of the queued work, for `elapsed`."""
        if self.stream is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def finish(self) -> None:
        """Wait for all queued work."""
        if self.stream is not None:
            self.stream.synchronize()

    @staticmethod
    def elapsed(start: Ready, end: Ready) -> int:
        """Nanoseconds of the device between two completed events."""
        return 0 if start is None or end is None else round(1e6 * start.elapsed_time(end))

    @staticmethod
    def hand_over(tensors: Sequence[torch.Tensor], ready: Ready) -> None:
        """Make the calling thread's current stream wait until `tensors` are ready; returns at once."""
        if ready is None:
            return
        for tensor in tensors:
            consumer = torch.cuda.current_stream(tensor.device)
            consumer.wait_event(ready)
            tensor.record_stream(consumer)


# Detection of a JPEG engine (A100, H100, Blackwell and some others), by nvJPEG.
#
# Without an engine nvJPEG silently decodes on the host and by kernels: on T4, V100, most GeForce cards, and in
# containers without libnvcuvid (NVIDIA_DRIVER_CAPABILITIES without "video"). torchcodec and torchvision do not report
# which of the two they use, but both request the hardware backend from nvjpegCreateEx, and so does this test.


_HARDWARE = 3  # nvjpegBackend_t, nvjpeg.h
_SUCCESS = 0


def has_jpeg_engine(maps: Path = Path("/proc/self/maps")) -> bool | None:
    """Whether the current CUDA device has a JPEG engine, by the libnvjpeg of this process; None if none is loaded.

    maps: lists the files that are mapped into this process. A decoder must have been loaded before.
    """
    has_engine = None
    for library in find_library("libnvjpeg", maps):
        try:
            nvjpeg = ctypes.CDLL(library)
            handle = ctypes.c_void_p()
            status = nvjpeg.nvjpegCreateEx(_HARDWARE, None, None, 0, ctypes.byref(handle))
        except (OSError, AttributeError):
            continue
        if status == _SUCCESS:
            nvjpeg.nvjpegDestroy(handle)
            return True
        has_engine = False
    return has_engine


# JPEGs by torchcodec: nvJPEG on NVIDIA's GPUs, libjpeg-turbo on the CPU. Needs `pip install 'packer-vision[gpu]'`.
#
# `torchcodec.decoders.decode_jpeg` (0.16 and later) takes a list and turns images by their EXIF orientation.


def load_torchcodec(device: torch.device) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
    """The function that decodes a list of images, uint8 [bytes] on the CPU, to uint8 [3, height, width] on `device`.

    Raises ImportError, OSError and RuntimeError, as importing torchcodec does if it is missing or incompatible.
    """
    from torchcodec.decoders import decode_jpeg

    return lambda encoded: decode_jpeg(encoded, mode="RGB", device=device)


# JPEGs by torchvision: nvJPEG on NVIDIA's GPUs, libjpeg-turbo on the CPU.
#
# `torchvision.io.decode_jpeg` takes a list since 0.20 and keeps the stored orientation. It is deprecated since 0.29, in
# favour of torchcodec, and warns at every call; this warning is silenced, because the user cannot act on it: "auto"
# prefers torchcodec. One decoder serves the process and is rebuilt when the device changes, so the device always has
# its number.
#
# No release of torchvision decodes JPEGs on AMD's GPUs: rocJPEG was removed before its release (pytorch/vision#9591),
# in favour of torchcodec (#1554, not merged at the time of writing). AMD's own builds may have it.


_DEPRECATED = "The image decoding and encoding capabilities of TorchVision are deprecated"


def load_torchvision(device: torch.device) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
    """The function that decodes a list of images, uint8 [bytes] on the CPU, to uint8 [3, height, width] on `device`.

    Raises ImportError, OSError and RuntimeError, as importing torchvision does if it is missing or incompatible.
    """
    from torchvision.io import ImageReadMode, decode_jpeg

    warnings.filterwarnings("ignore", message=_DEPRECATED, category=DeprecationWarning)
    return lambda encoded: decode_jpeg(encoded, mode=ImageReadMode.RGB, device=device)
