"""The values of a sample, and the files that they are read from."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

from readers.usage.record import Series

__all__ = ["Files", "Probe", "Readings"]

Probe = Callable[["Readings"], None]

_FILE_BYTES = 4 << 20
_CHUNK_BYTES = 1 << 16


class Readings:
    """The values of one sample, from gauges and from what counters and their clocks gained since the one before.

    A counter that fell, because it wrapped or its device was removed and came back, has no value in this sample.
    """

    def __init__(self) -> None:
        self.series: dict[str, Series] = {}
        self.values: dict[str, float] = {}
        self._before: dict[str, tuple[float, float]] = {}
        self._now: dict[str, tuple[float, float]] = {}
        self._time = 0.0

    def begin(self, now: float) -> None:
        """A new sample, at a time in seconds."""
        self._time, self.values = now, {}
        self._before, self._now = self._now, {}

    def gauge(self, name: str, value: float, unit: str = "1", full: float | None = None) -> None:
        if name not in self.series or self.series[name].full is None:
            self.series[name] = Series(name[:200], unit, full if full is None or full > 0 else None)
        self.values[name] = value

    def rate(self, name: str, counter: float, unit: str = "bytes/s", full: float | None = None) -> None:
        """What a counter gained, a second."""
        self._gained(name, counter, self._time, unit, full)

    def share(self, name: str, part: float, whole: float | None = None) -> None:
        """What one counter gained of what another did; by default of the time, in seconds."""
        self._gained(name, part, self._time if whole is None else whole, "share", 1.0)

    def _gained(self, name: str, part: float, whole: float, unit: str, full: float | None) -> None:
        before, self._now[name] = self._before.get(name), (part, whole)
        value = math.nan
        if before is not None and part >= before[0] and whole > before[1]:
            value = (part - before[0]) / (whole - before[1])
            value = min(value, 1.0) if unit == "share" else value
        self.gauge(name, value, unit, full)


class Files:
    """Small files below a root that are read again and again, through descriptors that stay open."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root
        self._open: dict[str, int] = {}

    def text(self, path: str) -> str:
        """The content of a file, at most 4 MiB of it; "" where it cannot be read."""
        try:
            if path not in self._open:
                self._open[path] = os.open(self.root / path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            parts, size = [], 0
            while size < _FILE_BYTES and (part := os.pread(self._open[path], _CHUNK_BYTES, size)):
                parts.append(part)
                size += len(part)
            return b"".join(parts).decode("utf-8", "replace")
        except OSError:
            self._forget(path)
            return ""

    def once(self, path: str) -> str:
        """The same through a descriptor that is closed again, for what there may be many of."""
        text = self.text(path)
        self._forget(path)
        return text

    def names(self, path: str) -> list[str]:
        """The names in a directory, sorted; none where it cannot be read."""
        try:
            return sorted(os.listdir(self.root / path))
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        return (self.root / path).exists()

    def number(self, path: str) -> int | None:
        """The whole number that is all of a file, read once; None where there is none, or it is negative."""
        try:
            text = (self.root / path).read_text().strip()
        except (OSError, ValueError):
            return None
        return int(text) if text.isdecimal() else None

    def close(self) -> None:
        for path in list(self._open):
            self._forget(path)

    def _forget(self, path: str) -> None:
        descriptor = self._open.pop(path, None)
        if descriptor is not None:
            os.close(descriptor)
