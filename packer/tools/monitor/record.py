"""`Usage`: what a machine did over time, as columns of numbers with names.

A sample covers the time since the one before it. Samples of a long run are means over longer intervals (see `Buffer`),
and each counts by its duration: half a minute of idling is half a minute in every percentile, however many samples it
was.

    series       "cpu busy", "cpu0 busy", "gpu0 busy", "vda read", "eth0 in", "loader queue", "images", …
    units        share (0 to 1), bytes, bytes/s, cores, watts, 1/s, 1 (a plain number)
    full         the most that a series can be, where that is known: the size of memory, the speed of a link
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cache.errors import FormatError, OutputError
from cache.files import PathError, open_regular
from cache.locks import call_after_fork, take_lock
from cache.messages import human_bytes, human_seconds, table, wrapped

__all__ = [
    "Buffer",
    "Comparison",
    "HeatRow",
    "Limits",
    "Mark",
    "Percentiles",
    "RecordFile",
    "Series",
    "Usage",
    "compare",
    "comparison_lines",
    "comparison_tables",
    "format_value",
    "load",
    "percentiles_table",
    "read_usage",
    "save",
    "usage_lines",
]

UNITS = ("share", "bytes", "bytes/s", "cores", "watts", "1/s", "1")
Floats = npt.NDArray[np.float64]
Row: TypeAlias = tuple[float, float, npt.NDArray[Any]]  # end, duration, values
_PERCENTILES = (0.5, 0.9, 0.95, 0.99)
_CORE = re.compile(r"cpu(\d{1,6}) busy")
_LARGEST = 1e18


class Limits:
    """What a record may have at most; files with more are refused."""

    SERIES = 4096
    SAMPLES = 1_000_000
    VALUES = 20_000_000
    MARKS = 100_000
    NAME = 200


@dataclass(frozen=True, slots=True)
class Series:
    """A column. full: the most it can be, None where that is not known."""

    name: str
    unit: str = "1"
    full: float | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that began, in seconds from the beginning of the record.

    steps, images: a second, from here to the next mark, where that was measured by more than the series of these names.
    """

    name: str
    seconds: float
    steps: float | None = None
    images: float | None = None


class Percentiles(NamedTuple):
    """Of the values of a series, each weighted by the time that it covers; at the end their mean."""

    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float
    mean: float


@dataclass(frozen=True, slots=True)
class HeatRow:
    """A series as a row of a heat map. values: shares of `full`, 0 to 1, None where nothing is known.

    full: what 1 stands for; the largest value of the row where the series has no limit.
    """

    name: str
    unit: str
    full: float
    values: tuple[float | None, ...]


@dataclass(frozen=True, eq=False)
class Usage:
    """Utilisation over time.

    host: of what machine. started: Unix time. interval: seconds between samples, as asked for.
    series: the columns.
    times: float64 [n], seconds from the beginning to the end of each sample; increasing.
    durations: float64 [n], seconds that each sample covers.
    values: float64 [n, series], NaN where nothing is known.
    marks: by time.

    Raises FormatError for columns that contradict each other.
    """

    host: str
    started: float
    interval: float
    series: tuple[Series, ...]
    times: Floats
    durations: Floats
    values: Floats
    marks: tuple[Mark, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.times)
        if self.values.shape != (count, len(self.series)) or len(self.durations) != count:
            raise FormatError(f"a record of {count} samples: its columns have {self.values.shape} values")
        if count and not (np.all(np.diff(self.times) > 0) and np.all(self.durations > 0)):
            raise FormatError("a record's times do not increase")
        if len({one.name for one in self.series}) != len(self.series):
            raise FormatError("a record has two series of the same name")

    @property
    def seconds(self) -> float:
        """From the beginning to the last sample."""
        return float(self.times[-1]) if len(self.times) else 0.0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.series)

    def column(self, name: str) -> Floats:
        """float64 [n], the values of a series; all NaN where there is none of this name."""
        if name not in self.names:
            return np.full(len(self.times), np.nan)
        return self.values[:, self.names.index(name)]

    def percentiles(self) -> dict[str, Percentiles]:
        """By series; those without a value are left out."""
        found = {}
        for number, one in enumerate(self.series):
            column = self.values[:, number]
            if (known := ~np.isnan(column)).any():
                found[one.name] = _percentiles(column[known], self.durations[known])
        return found

    def between(self, start: float, end: float) -> Usage:
        """The samples whose middle is in [start, end); times stay what they are."""
        middles = self.times - self.durations / 2
        some = (middles >= start) & (middles < end)
        marks = tuple(mark for mark in self.marks if start <= mark.seconds < end)
        times, durations, values = self.times[some], self.durations[some], self.values[some]
        return replace(self, times=times, durations=durations, values=values, marks=marks)

    def spans(self) -> list[tuple[Mark, Usage]]:
        """The samples from each mark to the next one, or to the end."""
        ends = [*(mark.seconds for mark in self.marks), math.inf][1:]
        return [(mark, self.between(mark.seconds, end)) for mark, end in zip(self.marks, ends, strict=True)]

    def summary(self, most_cores: int = 32) -> Usage:
        """For people: what matters most first, cores last; of many cores, neighbours become one series, their mean.

        Series that are 0 all the time, as of idle disks, are left out. most_cores: 0 leaves out all cores.
        """
        known = self.percentiles()
        cores = sorted((int(found[1]), one) for one in known if (found := _CORE.fullmatch(one)))
        together = math.ceil(len(cores) / max(1, most_cores)) or 1
        series = [
            one for one in self.series if not _CORE.fullmatch(one.name) and np.nansum(np.abs(self.column(one.name))) > 0
        ]
        series.sort(key=importance)
        columns = [self.column(one.name) for one in series]
        for start in range(0, len(cores) if most_cores else 0, together):
            some = cores[start : start + together]
            both = np.stack([self.column(name) for _, name in some])
            count = (~np.isnan(both)).sum(0)
            columns.append(np.where(count > 0, np.nansum(both, 0) / np.maximum(count, 1), np.nan))
            last = f"–{some[-1][0]}" if len(some) > 1 else ""
            series.append(Series(f"cpu{some[0][0]}{last} busy", "share", 1.0))
        values = np.stack(columns, 1) if columns else np.empty((len(self.times), 0))
        return replace(self, series=tuple(series), values=values)

    def heat_rows(self, columns: int = 120, seconds: float | None = None) -> list[HeatRow]:
        """Each series as a row of a heat map, in `columns` steps of equal length from 0 to `seconds`, or the end."""
        end = self.seconds if seconds is None else seconds
        if not len(self.times) or end <= 0:
            return []
        edges = np.linspace(0.0, end, columns + 1)
        return [self._heat_row(one, self.column(one.name), edges) for one in self.series]

    def to_dict(self) -> dict[str, Any]:
        """Everything as numbers, texts, lists and dictionaries; `from_dict` reads it. Unknown values are None."""
        values = {one.name: _plain(self.values[:, number]) for number, one in enumerate(self.series)}
        return {
            "host": self.host,
            "started": self.started,
            "interval": self.interval,
            "series": [asdict(one) for one in self.series],
            "times": _plain(self.times),
            "durations": _plain(self.durations),
            "values": values,
            "marks": [asdict(mark) for mark in self.marks],
            "percentiles": {name: found._asdict() for name, found in self.percentiles().items()},
        }

    @staticmethod
    def from_dict(document: Mapping[str, Any]) -> Usage:
        """What `to_dict` made. Raises FormatError for anything else: nothing in it is trusted."""
        reader = UsageReader(document)
        reader.take({"series": document.get("series")})
        try:
            columns = [document["values"][one.name] for one in reader.series]
            for end, duration, *row in zip(document["times"], document["durations"], *columns, strict=True):
                reader.take({"t": end, "d": duration, "v": row})
            for mark in document["marks"]:
                reader.take({**mark, "mark": mark["name"], "t": mark["seconds"]})
        except FormatError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"its times, durations, values and marks do not fit together: {error!r:.100}") from None
        return reader.usage()

    def _heat_row(self, one: Series, column: Floats, edges: Floats) -> HeatRow:
        start = self.times[0] - self.durations[0]
        known = ~np.isnan(column)
        at = np.concatenate([[start], self.times])

        def until(weights: Floats) -> Floats:  # the integral from the start to each edge
            return np.diff(np.interp(edges, at, np.concatenate([[0.0], np.cumsum(weights * self.durations)])))

        whole, part = until(np.where(known, column, 0.0)), until(known.astype(np.float64))
        full = one.full or float(np.nanmax([*column, 0.0])) or 1.0
        means = [
            min(1.0, max(0.0, float(total / weight) / full)) if weight > 1e-9 else None
            for total, weight in zip(whole, part, strict=True)
        ]
        return HeatRow(one.name, one.unit, full, tuple(means))


def arrays_of(rows: Sequence[Row], columns: int) -> tuple[Floats, Floats, Floats]:
    """Times [n], durations [n] and values [n, columns] of rows, NaN where one is shorter."""
    values = np.full((len(rows), columns), np.nan)
    for number, (_, _, row) in enumerate(rows):
        values[number, : len(row)] = row
    times, durations = (np.array([row[column] for row in rows], np.float64) for column in (0, 1))
    return times, durations, values


class UsageReader:
    """A record from the documents of its file, one after the other. Each is checked, and raises FormatError.

    head: has host, started and interval.
    """

    def __init__(self, head: Mapping[str, Any]) -> None:
        self.series: list[Series] = []
        self._host = _name(head.get("host"), "host")
        times = _numbers([head.get("started"), head.get("interval")], "started, interval")
        self._started, self._interval = times.tolist()
        self._rows: list[Row] = []
        self._marks: list[Mark] = []

    def take(self, document: Any) -> None:
        """Series, a row, or a mark."""
        if not isinstance(document, dict):
            raise FormatError("expected a JSON object")
        if "mark" in document:
            self._marks.append(_mark({**document, "name": document["mark"], "seconds": document.get("t")}))
        elif "series" in document:
            more = document["series"]
            if not isinstance(more, list) or len(more) + len(self.series) > Limits.SERIES:
                raise FormatError(f"series: expected a list, of at most {Limits.SERIES:,} altogether")
            self.series += [_series(one) for one in more]
        elif "v" in document:
            values = document["v"]
            if not isinstance(values, list) or len(values) > len(self.series):
                raise FormatError(f"a row: expected at most {len(self.series)} values, as many as there are series")
            end, duration = _numbers([document.get("t"), document.get("d")], "a row's time and duration")
            self._rows.append((end, duration, _numbers(values, "a row", unknown=True)))
        if len(self._rows) > Limits.SAMPLES or len(self._marks) > Limits.MARKS:
            raise FormatError(f"more than {Limits.SAMPLES:,} rows or {Limits.MARKS:,} marks")
        if len(self._rows) * len(self.series) > Limits.VALUES:
            raise FormatError(f"more than {Limits.VALUES:,} values")

    def usage(self) -> Usage:
        """The record so far."""
        arrays = arrays_of(self._rows, len(self.series))
        marks = tuple(sorted(self._marks, key=lambda mark: mark.seconds))
        return Usage(self._host, self._started, self._interval, tuple(self.series), *arrays, marks)


def importance(one: Series) -> int:
    """The place of a series among those of a summary, from 0."""
    kind = one.name.split()[0].rstrip("0123456789")
    if one.unit == "1/s":
        return 0
    if kind == "gpu" or one.unit == "1":
        return 1
    return {"cpu": 2, "job": 3, "io": 4, "memory": 6, "page": 6, "processes": 7}.get(kind, 5)


def _name(value: Any, what: str = "a name") -> str:
    """A short text. Raises FormatError."""
    if not isinstance(value, str) or not 0 < len(value) <= Limits.NAME:
        raise FormatError(f"{what}: expected a text of at most {Limits.NAME} characters, found {_excerpt(value)}")
    return value


def _numbers(values: Sequence[Any], what: str, *, unknown: bool = False) -> Floats:
    """float64 [n]. unknown: None stands for NaN. Raises FormatError for other things than moderate numbers."""
    found = np.empty(len(values))
    for number, value in enumerate(values):
        if value is None and unknown:
            found[number] = math.nan
        elif type(value) in (int, float) and -_LARGEST <= value <= _LARGEST:
            found[number] = value
        else:
            raise FormatError(f"{what}: expected a number, found {_excerpt(value)}")
    return found


def _series(value: Any) -> Series:
    """A series from its name, unit and limit. Raises FormatError."""
    if not isinstance(value, Mapping) or value.get("unit") not in UNITS:
        raise FormatError(f"a series: expected its name, and a unit of {', '.join(UNITS)}, found {_excerpt(value)}")
    full = None if value.get("full") is None else float(_numbers([value["full"]], "full")[0])
    if full is not None and full <= 0:
        raise FormatError(f"a series: its limit is {full}, expected more than 0")
    return Series(_name(value.get("name")), value["unit"], full)


def _mark(value: Any) -> Mark:
    """A mark from its name and time. Raises FormatError."""
    if not isinstance(value, Mapping):
        raise FormatError(f"a mark: expected its name and time, found {_excerpt(value)}")
    (seconds,) = _numbers([value.get("seconds")], "a mark").tolist()
    rates = _numbers([value.get("steps"), value.get("images")], "a mark", unknown=True).tolist()
    return Mark(_name(value.get("name")), seconds, *(None if math.isnan(rate) else rate for rate in rates))


def _excerpt(value: Any) -> str:
    """The beginning of a value, for a message."""
    return f"{len(value):,} items" if isinstance(value, (list, dict)) else ascii(value)[:60]


def _plain(column: Floats) -> list[float | None]:
    return [None if math.isnan(value) else float(f"{value:.6g}") for value in column.tolist()]


def _percentiles(values: Floats, weights: Floats) -> Percentiles:
    """The smallest value that at least so much of the time is not above."""
    order = np.argsort(values, kind="stable")
    values, weights = values[order], weights[order]
    until = np.cumsum(weights)
    rows = np.searchsorted(until, np.array(_PERCENTILES) * until[-1] * (1 - 1e-12))
    p50, p90, p95, p99 = values[np.minimum(rows, len(values) - 1)].tolist()
    mean = float(np.average(values, weights=weights))
    return Percentiles(float(values[0]), p50, p90, p95, p99, float(values[-1]), mean)


# --- Samples in bounded memory, and in a file that is whole up to its last line at any time.
# `Buffer` keeps at most `capacity` rows. When they are full, neighbours are merged into their mean by time, and each
# row after that is the mean of twice as many samples. So a run of an hour and one of a week take the same memory, and
# the file grows by a number of rows each time the length of the run doubles.
#
# The file is JSON, a document a line:
#
#     {"packer usage": 1, "host": …, "started": …, "interval": …}       first
#     {"series": [{"name": …, "unit": …, "full": …}, …]}                more columns, after those that there are
#     {"t": 12.5, "d": 0.5, "v": [0.25, null, …]}                       a row: its end, its duration, a value by column
#     {"mark": "epoch 1", "t": 12.7}
#
# A line is written by one system call, so a process that is killed leaves at most its last line unfinished. Columns may
# be added at any time; rows before that are shorter.
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


# --- What a record says in one sentence: what is busy, what is idle, and so what the run probably waits for.
# The sentence follows medians (p50, by time), so a slow start or an evaluation at the end does not decide it. It is a
# reading of counters: only a diagnosis, which replaces stages by memory, measures what a stage costs.
_BUSY = 0.9  # of the CPUs or the GPU
_DISK_BUSY = 0.8
_LINK_FULL = 0.8
_PRESSED = 0.2  # of the time some task waited for I/O
_THROTTLED = 0.1
_NEARLY_FULL = 0.95
_STEADY = 0.5  # of p95: a rate whose median is above this does not come in bursts
_LEAST_RATE = 1e6  # bytes a second: less is not a load
_GPU = re.compile(r"gpu\d+ busy")
_REMOTE = re.compile(r"(?:nfs|lustre) .* read")
_NOTHING = Percentiles(*[0.0] * 7)


def read_usage(usage: Usage) -> str:
    """The sentence, with figures."""
    return _Reading(usage).sentence()


def format_value(value: float | None, unit: str) -> str:
    """A value for people: 98 %, 1.34 GB, 140 MB/s, 2.5."""
    if value is None or value != value:
        return "–"
    if unit == "share":
        return f"{100 * value:.0f} %"
    if unit in ("bytes", "bytes/s"):
        return human_bytes(value) + unit[5:]
    shown = f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{shown} W" if unit == "watts" else shown + unit[1:] if unit == "1/s" else shown


class _Reading:
    def __init__(self, usage: Usage) -> None:
        self._found = usage.percentiles()
        self._full = {one.name: one.full for one in usage.series if one.full}
        gpus = [value.p50 for name, value in self._found.items() if _GPU.fullmatch(name)]
        self._gpu = sum(gpus) / len(gpus) if gpus else None
        self._gpus = "the GPUs are" if len(gpus) > 1 else "the GPU is"

    def sentence(self) -> str:
        if "cpu busy" not in self._found:
            return "too short for a sample: nothing is known"
        memory = self._memory()
        return f"{self._limit()}; {memory}" if memory else self._limit()

    def _limit(self) -> str:
        cpu, gpu = self._of("cpu busy").p50, self._gpu
        if gpu is not None and gpu >= _BUSY:
            return f"{self._gpus} {_percent(gpu)} busy at p50: the input keeps up"
        device = "" if gpu is None else f" while {self._gpus} {_percent(gpu)}"
        if (throttled := self._of("job throttled").p50) >= _THROTTLED:
            return f"the CPU quota stops the job {_percent(throttled)} of the time{device}: ask for more CPUs"
        if cpu >= _BUSY:
            end = "the input starves it" if gpu is not None else "the CPUs are the limit"
            return f"CPUs are {_percent(cpu)} busy at p50{device}: {end}"
        idle = f"CPUs are {_percent(1 - cpu)} idle" + ("" if gpu is None else f" and {self._gpus} {_percent(gpu)} busy")
        if slow := self._storage():
            return f"{slow} while {idle}: storage is the limit"
        if link := self._link():
            return f"{link} while {idle}: the network is the limit"
        end = "no limit is seen"
        if gpu is not None:
            end = "the job waits for something else, as latency, locks or too few workers"
        return f"{idle}, and neither disks nor network are busy: {end}"

    def _storage(self) -> str:
        """What says that storage is waited for: a busy disk, tasks that wait for I/O, or steady reads from a server."""
        disks = {name.removesuffix(" busy"): value.p50 for name, value in self._found.items() if name.endswith(" busy")}
        disks = {name: busy for name, busy in disks.items() if self._rates(name)}
        waits = max(self._of("io pressure").p50, self._of("cpu iowait").p50)
        disk = max(disks, key=lambda name: disks[name], default="")
        if disk and (disks[disk] >= _DISK_BUSY or (waits >= _PRESSED and self._rates(disk)[0][0] > _LEAST_RATE)):
            _, verb, rate = self._rates(disk)[0]
            steadily = " steadily" if self._is_steady(rate) else ""
            value = format_value(rate.p50 if steadily else rate.mean, "bytes/s")
            return f"{disk} {verb} {value}{steadily}, busy {_percent(disks[disk])} of the time,"
        remote = {name: value for name, value in self._found.items() if _REMOTE.fullmatch(name)}
        name = max(remote, key=lambda name: remote[name].p50, default="")
        if name and self._is_steady(remote[name]):
            return f"{name.removesuffix(' read')} gives {format_value(remote[name].p50, 'bytes/s')} steadily"
        return f"tasks wait for I/O {_percent(waits)} of the time" if waits >= _PRESSED else ""

    def _link(self) -> str:
        """A network card that receives what its link can carry."""
        for name, full in self._full.items():
            rate = self._of(name).p50
            if name.endswith(" in") and rate >= _LINK_FULL * full:
                share = _percent(rate / full)
                return f"{name.removesuffix(' in')} receives {format_value(rate, 'bytes/s')}, {share} of its link,"
        return ""

    def _memory(self) -> str:
        """A warning where memory was nearly full."""
        for name in ("job memory", "memory used"):
            full, most = self._full.get(name), self._of(name)
            if full and most.p99 >= _NEARLY_FULL * full:
                return f"memory is nearly full: {human_bytes(most.max)} of {human_bytes(full)}"
        return ""

    def _rates(self, disk: str) -> list[tuple[float, str, Percentiles]]:
        """Mean, verb and percentiles of what a disk reads and writes, the larger first; none if it is not a disk."""
        named = [(f"{disk} read", "reads"), (f"{disk} write", "writes")]
        rates = [(self._of(name).mean, verb, self._of(name)) for name, verb in named if name in self._found]
        return sorted(rates, reverse=True)

    def _of(self, name: str) -> Percentiles:
        return self._found.get(name, _NOTHING)

    @staticmethod
    def _is_steady(rate: Percentiles) -> bool:
        return rate.p50 >= max(_STEADY * rate.p95, _LEAST_RATE)


def _percent(share: float) -> str:
    return format_value(share, "share")


# --- Two records side by side: what differs, series by series and between marks of the same name.
@dataclass(frozen=True, slots=True)
class Difference:
    """A series in both records; None in the one that lacks it."""

    name: str
    unit: str
    a: Percentiles | None
    b: Percentiles | None

    @property
    def ratio(self) -> float | None:
        """The mean in B for 1 in A; None where one is not known or A's is 0."""
        return self.b.mean / self.a.mean if self.a and self.b and self.a.mean else None


@dataclass(frozen=True, slots=True)
class SpanDifference:
    """What is between a mark and the next one, in both records: seconds, steps and images a second, None if unknown."""

    name: str
    seconds: tuple[float, float]
    steps: tuple[float | None, float | None]
    images: tuple[float | None, float | None]


@dataclass(frozen=True)
class Comparison:
    """rows: the series of both, what matters most first. spans: between marks that both have, in the order of A."""

    a: Usage
    b: Usage
    rows: tuple[Difference, ...]
    spans: tuple[SpanDifference, ...]

    @property
    def verdict(self) -> str:
        """How much faster B is, or longer it ran, and what each of them waits for."""
        first = f"A ran for {human_seconds(self.a.seconds)}, B for {human_seconds(self.b.seconds)}"
        if (rates := self._rates()) is not None:
            what, one, other = rates
            shown = [format_value(rate, "1") for rate in (other, one)]
            first = f"B makes {shown[0]} {what}, A {shown[1]}: {other / one - 1:+.0%}"
        return f"{first}. A: {read_usage(self.a)}. B: {read_usage(self.b)}."

    def _rates(self) -> tuple[str, float, float] | None:
        """What is counted, and how many of it A and B made: of the whole run, or of the slowest part of both."""
        rows = {row.name: row for row in self.rows if row.ratio is not None}
        for name in ("images", "steps"):
            row = rows.get(name)
            if row is not None and row.a is not None and row.b is not None:
                return f"{name} a second", row.a.mean, row.b.mean
        slowest = min((span for span in self.spans if all(span.steps)), key=lambda span: span.steps, default=None)
        if slowest is None:
            return None
        name, (one, other) = ("images", slowest.images) if all(slowest.images) else ("steps", slowest.steps)
        return f"{name} a second in {slowest.name!r}", one or 0.0, other or 0.0

    def to_dict(self) -> dict[str, Any]:
        """Everything as numbers, texts, lists and dictionaries, but for the values over time."""

        def plain(found: Percentiles | None) -> dict[str, float] | None:
            return None if found is None else found._asdict()

        rows = [
            {"name": row.name, "unit": row.unit, "a": plain(row.a), "b": plain(row.b), "ratio": row.ratio}
            for row in self.rows
        ]
        spans = [asdict(span) for span in self.spans]
        runs = [{"host": run.host, "started": run.started, "seconds": run.seconds} for run in (self.a, self.b)]
        return {"a": runs[0], "b": runs[1], "series": rows, "spans": spans, "verdict": self.verdict}


def compare(a: Usage, b: Usage) -> Comparison:
    """Compare two records, of the same host or of two. Single cores are left out: hosts may have unlike numbers."""
    series = {one.name: one for run in (a, b) for one in run.summary(0).series}
    both = a.percentiles(), b.percentiles()
    rows = [
        Difference(one.name, one.unit, *(found.get(one.name) for found in both))
        for one in sorted(series.values(), key=importance)
    ]
    return Comparison(a, b, tuple(rows), _spans(a, b))


def _spans(a: Usage, b: Usage) -> tuple[SpanDifference, ...]:
    """Of the first marks of each name."""
    rest = {mark.name: (mark, span) for mark, span in reversed(b.spans())}
    spans = []
    for mark, span in a.spans():
        if mark.name in rest:
            other, there = rest.pop(mark.name)
            seconds = float(span.durations.sum()), float(there.durations.sum())
            steps = _rate(mark.steps, span, "steps"), _rate(other.steps, there, "steps")
            images = _rate(mark.images, span, "images"), _rate(other.images, there, "images")
            spans.append(SpanDifference(mark.name, seconds, steps, images))
    return tuple(spans)


def _rate(measured: float | None, usage: Usage, name: str) -> float | None:
    """What a mark says, or the mean of the series."""
    found = usage.percentiles().get(name)
    return measured if measured is not None or found is None else found.mean


# --- A record, and a comparison of two: lines for a terminal, and the tables that reports show, too.
_BLOCKS = " ▁▂▃▄▅▆▇█"
_STRIP, _LEAST_STRIP, _NAME = 24, 12, 23
_NAMES = tuple(name for name in Percentiles._fields if name != "mean")
_COMPARED = ("p50", "p95", "max")
_CORES = 8
_MARKS, _SPANS = 12, 40
Table: TypeAlias = tuple[Sequence[str], list[list[str]]]


def percentiles_table(usage: Usage, names: Sequence[str] = Percentiles._fields) -> Table:
    """A row for each series that has a value."""
    found = usage.percentiles()
    series = [one for one in usage.series if one.name in found]
    rows = [[one.name, *(format_value(getattr(found[one.name], name), one.unit) for name in names)] for one in series]
    return ["", *names], rows


def usage_lines(usage: Usage, columns: int = 110) -> list[str]:
    """Percentiles of each series, with a strip of its values over time; marks; and what that says.

    columns: of the terminal; with less than 110 some percentiles are left out, and the strip is shorter.
    """
    summary = usage.summary(_CORES)
    names = [name for name in _NAMES if columns >= 110 or name not in ("p90", "p99")]
    strip = max(_LEAST_STRIP, min(_STRIP, columns - _NAME - 4 - 10 * len(names)))
    headings, rows = percentiles_table(summary, names)
    strips = {row.name: heat_strip(row) for row in summary.heat_rows(strip)}
    rows = [[name[:_NAME], *cells, strips[name]] for name, *cells in rows]
    heading = f"0 s to {human_seconds(usage.seconds)}"
    lines = table([*headings, heading.ljust(strip)], rows, columns)
    marks = [f"{mark.name} at {human_seconds(mark.seconds)}" for mark in usage.marks[:_MARKS]]
    if marks:
        more = f", and {len(usage.marks) - _MARKS} more" if len(usage.marks) > _MARKS else ""
        lines += ["", f"marks: {', '.join(marks)}{more}"]
    return [*lines, "", read_usage(usage)]


def heat_strip(row: HeatRow) -> str:
    """A character for each value: from empty to full blocks, a dot where nothing is known."""
    return "".join("·" if value is None else _BLOCKS[round(value * (len(_BLOCKS) - 1))] for value in row.values)


def comparison_tables(result: Comparison) -> list[Table]:
    """p50, p95 and the largest value of each series in both, and the ratio of the means; then what is between marks."""
    rows = []
    for row in result.rows:
        values = [getattr(one, name, None) for name in _COMPARED for one in (row.a, row.b)]
        rows.append([row.name, *(format_value(value, row.unit) for value in values), format_value(row.ratio, "1")])
    tables: list[Table] = [(["", *_of_both(_COMPARED), "mean B/A"], rows)]
    if result.spans:
        spans = [
            [span.name, *(format_value(number, "1") for number in (*span.seconds, *span.steps, *span.images))]
            for span in result.spans[:_SPANS]
        ]
        tables.append((["from mark", *_of_both(("seconds", "steps/s", "images/s"))], spans))
    return tables


def comparison_lines(result: Comparison, width: int = 100) -> list[str]:
    """Two records side by side, and what that says."""
    series, *spans = comparison_tables(result)
    lines = table(*series, width, optional=_of_both(("max", "p95")))
    for headings, rows in spans:
        lines += ["", *table(headings, rows[:_MARKS], width, optional=_of_both(("steps/s",)))]
    return [*lines, "", *wrapped(result.verdict, width, "")]


def _of_both(names: Sequence[str]) -> list[str]:
    return [f"{name} {which}" for name in names for which in "AB"]
