"""Samples in bounded memory, and in a file that is whole up to its last line at any time.

`Buffer` keeps at most `capacity` rows. When they are full, neighbours are merged into their mean by time, and each row
after that is the mean of twice as many samples. So a run of an hour and one of a week take the same memory, and the
file grows by a number of rows each time the length of the run doubles.

The file is JSON, a document a line:

    {"packer usage": 1, "host": …, "started": …, "interval": …}       first
    {"series": [{"name": …, "unit": …, "full": …}, …]}                more columns, after those that there are
    {"t": 12.5, "d": 0.5, "v": [0.25, null, …]}                       a row: its end, its duration, a value by column
    {"mark": "epoch 1", "t": 12.7}

A line is written by one system call, so a process that is killed leaves at most its last line unfinished. Columns may
be added at any time; rows before that are shorter.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cache.errors import FormatError, OutputError
from cache.files import PathError, open_regular
from cache.locks import call_after_fork, take_lock
from readers.usage.record import Floats, Mark, Row, Series, Usage, UsageReader, arrays_of

__all__ = ["Buffer", "RecordFile", "load", "save"]

_HEAD = "packer usage"
_START = f'{{"{_HEAD}"'.encode()
_VERSION = 1
_NEITHER = "neither a record of  packer monitor --output FILE  nor what  packer diagnose --json  prints"
_LINE_BYTES = 1 << 20
_DOCUMENT_BYTES = 256 << 20


class Buffer:
    """Rows of samples; see the module. columns: of the widest row so far."""

    def __init__(self, capacity: int = 8192) -> None:
        if capacity < 2 or capacity % 2:
            raise ValueError(f"capacity={capacity}: expected an even number of rows")
        self.columns = 0
        self._capacity = capacity
        self._samples_a_row = 1
        self._rows: list[Row] = []
        self._open = _OpenRow()

    def add(self, end: float, duration: float, values: Sequence[float]) -> Row | None:
        """Take a sample; the row (end, duration, values) that it completes, if it does."""
        self._open.add(end, duration, np.asarray(values, np.float64))
        return self.flush() if self._open.samples >= self._samples_a_row else None

    def flush(self) -> Row | None:
        """Complete the row that is open, if there is one."""
        if not self._open.samples:
            return None
        row, self._open = self._open.row(), _OpenRow()
        self.columns = max(self.columns, len(row[2]))
        self._rows.append((*row[:2], row[2].astype(np.float32)))
        if len(self._rows) == self._capacity:
            self._merge()
        return row

    def arrays(self) -> tuple[Floats, Floats, Floats]:
        """Copies of times, durations and values, with the row that is open."""
        rows = [*self._rows, *([self._open.row()] if self._open.samples else [])]
        return arrays_of(rows, max([self.columns, *(len(row[2]) for row in rows[-1:])]))

    def _merge(self) -> None:
        """Rows 0 and 1 become one, and so on."""
        times, durations, values = arrays_of(self._rows, self.columns)
        weights = np.where(np.isnan(values), 0.0, durations[:, None]).reshape(-1, 2, self.columns)
        total = weights.sum(1)
        means = np.nansum(values.reshape(weights.shape) * weights, 1) / np.where(total > 0, total, np.nan)
        pairs = zip(times[1::2].tolist(), durations.reshape(-1, 2).sum(1).tolist(), means, strict=True)
        self._rows = [(end, duration, row.astype(np.float32)) for end, duration, row in pairs]
        self._samples_a_row *= 2


class _OpenRow:
    """The mean by time of samples that follow one another."""

    def __init__(self) -> None:
        self.samples = 0
        self._end = self._duration = 0.0
        self._sums, self._known = np.empty(0), np.empty(0)

    def add(self, end: float, duration: float, values: Floats) -> None:
        if len(values) > len(self._sums):
            more = np.zeros(len(values) - len(self._sums))
            self._sums, self._known = np.append(self._sums, more), np.append(self._known, more)
        known = ~np.isnan(values)
        self._sums[: len(values)] += np.where(known, values, 0.0) * duration
        self._known[: len(values)] += known * duration
        self.samples, self._end, self._duration = self.samples + 1, end, self._duration + duration

    def row(self) -> Row:
        known = np.where(self._known > 0, self._known, np.nan)
        return self._end, self._duration, self._sums / known


class RecordFile:
    """The file of a record while it is written, locked. Raises OutputError where something else has this name."""

    def __init__(self, path: str | os.PathLike[str], head: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self._columns = 0
        _check_replaceable(self.path)
        # Not atomic_write: the file is to be read while the run is under way. Unbuffered: a fork copies no line.
        self._file = open(self.path, "ab", buffering=0)
        lock = take_lock(self._file.fileno())
        if lock is None:
            self._file.close()
            raise OutputError(f"{self.path}: another process is writing its record here; give another name")
        self._lock = lock
        call_after_fork(self)
        self._file.truncate(0)
        self._write({_HEAD: _VERSION, **head})

    def row(self, series: Sequence[Series], end: float, duration: float, values: Sequence[float]) -> None:
        """A row, and before it what is new of the columns."""
        if new := series[self._columns : len(values)]:
            self._write({"series": [{"name": one.name, "unit": one.unit, "full": one.full} for one in new]})
            self._columns += len(new)
        numbers = ", ".join("null" if math.isnan(value) else f"{value:.5g}" for value in values)
        self._line(f'{{"t": {end:.6f}, "d": {duration:.6f}, "v": [{numbers}]}}')

    def mark(self, mark: Mark) -> None:
        rates = {name: rate for name, rate in (("steps", mark.steps), ("images", mark.images)) if rate is not None}
        self._write({"mark": mark.name, "t": round(mark.seconds, 6), **rates})

    def close(self) -> None:
        self._file.close()
        self._lock.release()

    def after_fork(self) -> None:
        """In a forked child, which would keep the file locked after the end of its parent."""
        self.close()

    def _write(self, document: Mapping[str, Any]) -> None:
        self._line(json.dumps(document))

    def _line(self, text: str) -> None:
        left = memoryview(f"{text}\n".encode())
        while left:
            left = left[self._file.write(left) or 0 :]


def save(usage: Usage, path: str | os.PathLike[str]) -> None:
    """Write a record as a file that `load` reads. Raises OutputError where something else has this name."""
    file = RecordFile(path, {"host": usage.host, "started": usage.started, "interval": usage.interval})
    try:
        for row, (end, duration) in enumerate(zip(usage.times, usage.durations, strict=True)):
            file.row(usage.series, end, duration, usage.values[row].tolist())
        for mark in usage.marks:
            file.mark(mark)
    finally:
        file.close()


def load(path: str | os.PathLike[str]) -> Usage:
    """A record from its file, or from the JSON of a diagnosis. A last line that is not whole is left out.

    Raises OSError, and FormatError, with the line, for what is not such a file: nothing in it is trusted.
    """
    with open_regular(path) as file:
        number, reading = 1, None
        try:
            first = file.readline(_LINE_BYTES)
            if not first.startswith(_START):
                return _of_diagnosis(first + file.read(_DOCUMENT_BYTES))
            head = _parsed(first)
            if head[_HEAD] != _VERSION:
                found = ascii(head[_HEAD])[:20]
                raise FormatError(f"a record of version {found}, expected {_VERSION}: update packer")
            reading = UsageReader(head)
            while line := file.readline(_LINE_BYTES):
                number += 1
                if not line.endswith(b"\n"):
                    if len(line) == _LINE_BYTES:
                        raise FormatError(f"a line of more than {_LINE_BYTES:,} bytes")
                    break
                reading.take(_parsed(line))
            return reading.usage()
        except FormatError as error:
            where = f"line {number}: " if reading is not None else ""
            raise FormatError(f"{os.fspath(path)}: {where}{error}") from None


def _of_diagnosis(text: bytes) -> Usage:
    if len(text) >= _DOCUMENT_BYTES:
        raise FormatError(f"more than {_DOCUMENT_BYTES:,} bytes: not a record of packer monitor")
    try:
        document = _parsed(text)
    except FormatError as error:
        raise FormatError(f"{_NEITHER} ({error})") from None
    found = document.get("usage", document) if isinstance(document, dict) else None
    if not isinstance(found, dict) or "durations" not in found:
        raise FormatError(_NEITHER)
    return Usage.from_dict(found)


def _parsed(text: bytes) -> Any:
    """A JSON document. Raises FormatError, for numbers that JSON does not have, too."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not JSON: {str(error)[:100]}") from None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def _check_replaceable(path: Path) -> None:
    """A record may be replaced by a new one, other files may not."""
    try:
        with open_regular(path) as file:
            start = file.read(len(_START))
    except FileNotFoundError:
        return
    except PathError as error:
        raise OutputError(f"{error}; give another name") from error
    if start not in (b"", _START):
        raise OutputError(f"{path}: is not a record of packer monitor, and is not replaced; give another name")
