"""How the images that a device could decode are shared out between the device and the CPU.

Which of them the CPU decodes follows from (seed, epoch, position) and the share, not from batches, ranks or threads:
where the share is a number, a resumed run decodes every image where the whole run would have decoded it.

    fraction(position * φ + start of the epoch) < share          φ: the golden ratio

Multiples of the golden ratio spread evenly over [0, 1). Of n positions in a row the CPU therefore decodes share * n,
give or take three, and no batch waits for an unlucky draw. A larger share adds images to those of a smaller one.

With "auto" the share follows what both cost, so that both are done with a batch at the same time. If the images of a
batch that the device could decode have W bytes, then

    the device takes     d0 + d (1 - share) W            d0: copies and the kernel
    n threads take       (c0 + c share W) / n            c0: planning, reading, images that only the CPU decodes

which are equal at  share = (d0 + d W - c0 / n) / (d W + c W / n). All of these are measured in every batch; d and c are
nanoseconds a byte, since the bytes of a JPEG predict its time better than its pixels do (docs/gpu.md).
"""

from __future__ import annotations

from numbers import Real
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from readers.order.base import Int64s
from readers.order.permutation import derive_keys

__all__ = ["CpuShare", "Share", "Spent"]

CpuShare: TypeAlias = float | Literal["auto"]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # the fraction of the golden ratio, in units of 2 ** -64
_11 = np.uint64(11)

_FIRST = 0.25
_UNUSUAL = 2  # batches in which libraries are loaded, the kernel is compiled and threads start
_MEASURED = 4  # batches, before the share moves
_FORGOTTEN = 1 / 16  # of what is known, with every batch
_LEAST = 1 / 32  # of the images on either side, so that the rates of both stay known
_STEP = 1 / 16  # of the smaller side: a share that would move by less stays, and does not follow noise


class Spent(NamedTuple):
    """What a batch took, in nanoseconds.

    images: of the batch, wherever they were decoded.
    cpu: of all threads together. shared: of that, for images that the device could have decoded, of `shared_bytes`.
    device: from the beginning of the batch to its end. decoded: of that, for decoding `device_bytes`.
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

    value: the share of the next batch, 0 to 1. One thread adds what batches took; any may read. Raises ValueError.
    """

    def __init__(self, wanted: CpuShare = 0.0, threads: int = 1) -> None:
        if isinstance(wanted, str):
            valid = wanted == "auto"
        else:
            valid = isinstance(wanted, Real) and not isinstance(wanted, bool) and 0 <= wanted <= 1
        if not valid:
            raise ValueError(f"cpu_share is 'auto' or a number from 0 to 1, not {wanted!r}")
        self.wanted: CpuShare = "auto" if isinstance(wanted, str) else float(wanted)
        self.value = _FIRST if isinstance(wanted, str) else float(wanted)
        self._threads, self._batches = threads, 0
        self._device, self._device_rest = _Mean(), _Mean()
        self._cpu, self._cpu_rest = _Mean(), _Mean()
        self._bytes = _Mean()

    @property
    def is_measured(self) -> bool:
        return self.wanted == "auto"

    def choose(self, seed: int, epoch: int, positions: Int64s) -> npt.NDArray[np.bool_]:
        """Which of the images at these positions, int64 [n], the CPU decodes in place of the device, bool [n]."""
        start, *_ = derive_keys(seed, epoch, "cpu share")
        fractions = ((positions.astype(np.uint64) * _GOLDEN + start) >> _11) * 2.0**-53
        return np.asarray(fractions < self.value)

    def add(self, batch: Spent) -> None:
        """Learn from a batch, and move the share if that is worth it."""
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
    """An amount a unit over the last batches. A batch that is out of line, as by a read that was stalled, counts for no
    more than twice the mean."""

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
