"""GPUs for a record: what their vendors' libraries say, as values of a sample.

A vendor's library is asked by one file each, which gives `Gpu`s: functions that give a number, or raise. A function
that raises gives no value in this sample; one that never gave a value is dropped after the first samples, since many
GPUs lack one or the other (a MIG slice has no utilisation, some boards have no power meter).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from readers.usage.readings import Readings

__all__ = ["Gauge", "Gpu", "GpuProbe", "visible_devices"]

_TRIES = 3


@dataclass(frozen=True)
class Gauge:
    """Something that a GPU can be asked. read: raises where it has no answer. slow: takes milliseconds, so GPUs are
    asked in turns."""

    what: str
    unit: str
    read: Callable[[], float]
    full: float | None = None
    slow: bool = False


@dataclass(frozen=True)
class Gpu:
    """number: as its vendor's tools count. uuid: "" where it has none."""

    number: int
    gauges: Sequence[Gauge]
    uuid: str = ""


@dataclass
class _State:
    gpu: Gpu
    failures: dict[str, int] = field(default_factory=dict)
    known: dict[str, float] = field(default_factory=dict)


def visible_devices(gpus: Sequence[Gpu], environ: Mapping[str, str] | None = None) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES or its counterpart of ROCm leaves to this job; all of them without it.

    All of them, too, if it names something else than numbers and the beginnings of UUIDs, as slices of GPUs.
    """
    env = os.environ if environ is None else environ
    names = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    text = next((env[name] for name in names if env.get(name)), "")
    chosen = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        fits = [gpu for gpu in gpus if (word.isdecimal() and gpu.number == int(word))
                or (not word.isdecimal() and gpu.uuid.startswith(word))]  # fmt: skip
        if len(fits) != 1:
            return list(gpus)
        chosen += fits
    return chosen or list(gpus)


class GpuProbe:
    """Reads all gauges of all GPUs, slow ones of one GPU a sample; the others keep their last value."""

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self._asked = [_State(gpu) for gpu in gpus]
        self._count = 0

    def __call__(self, readings: Readings) -> None:
        for number, asked in enumerate(self._asked):
            for gauge in asked.gpu.gauges:
                if gauge.what in asked.known or asked.failures.get(gauge.what, 0) < _TRIES:
                    turn = not gauge.slow or self._count % len(self._asked) == number
                    value = self._read(asked, gauge) if turn else asked.known.get(gauge.what, math.nan)
                    readings.gauge(f"gpu{asked.gpu.number} {gauge.what}", value, gauge.unit, gauge.full)
        self._count += 1

    @staticmethod
    def _read(asked: _State, gauge: Gauge) -> float:
        try:
            value = float(gauge.read())
        except Exception:
            asked.failures[gauge.what] = asked.failures.get(gauge.what, 0) + 1
            return math.nan
        asked.known[gauge.what] = value
        return value
