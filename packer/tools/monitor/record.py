"""`Usage`: the utilisation of a machine over time as named columns of numbers; its file, and a comparison of two.

A sample covers the time since the previous sample. Samples of a long run are means over longer intervals (see
`Buffer`). Percentiles weight each sample by its duration, so half a minute of idling counts the same in any number of
samples.

    series       "cpu busy", "cpu0 busy", "gpu0 busy", "vda read", "eth0 in", "loader queue", "images", …
    units        share (0 to 1), bytes, bytes/s, cores, watts, 1/s, 1 (a plain number)
    full         the largest possible value of a series, if known: the size of memory, the speed of a link

The file is JSON, with one document per line:

    {"packer usage": 1, "host": …, "started": …, "interval": …}       first
    {"series": [{"name": …, "unit": …, "full": …}, …]}                further columns, after the existing ones
    {"t": 12.5, "d": 0.5, "v": [0.25, null, …]}                       a row: its end, duration, and value of each column
    {"mark": "epoch 1", "t": 12.7}

A line is written by one system call, so a killed process leaves at most its last line incomplete. Columns may be added
at any time; earlier rows are shorter.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
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
    "Row",
    "Series",
    "Usage",
    "compare",
    "comparison_lines",
    "comparison_tables",
    "format_value",
    "load",
    "percentiles_table",
    "read_usage",
    "usage_lines",
]

Floats = npt.NDArray[np.float64]
Row: TypeAlias = tuple[float, float, Any]  # end, duration, values
_UNITS = ("share", "bytes", "bytes/s", "cores", "watts", "1/s", "1")
_PERCENTILES = (0.5, 0.9, 0.95, 0.99)
_CORE = re.compile(r"cpu(\d{1,6}) busy")
_LARGEST = 1e18


class Limits:
    """The limits of a record; files that exceed them are refused."""

    SERIES = 4096
    LINES = 1_000_000
    VALUES = 20_000_000
    MARKS = 100_000
    NAME = 200
    FILE_BYTES = 256 << 20


class Series(NamedTuple):
    """A column. full: its largest possible value; None if unknown."""

    name: str
    unit: str = "1"
    full: float | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """The beginning of something. seconds: time from the beginning of the record.

    steps, images: rates per second from here to the next mark, if measured other than by the series of these names.
    """

    name: str
    seconds: float
    steps: float | None = None
    images: float | None = None


class Percentiles(NamedTuple):
    """Percentiles and mean of the values of a series, weighted by duration."""

    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float
    mean: float


class HeatRow(NamedTuple):
    """A series as a row of a heat map. values: shares of `full`, 0 to 1; None if unknown.

    full: the value that 1 stands for: the limit of the series, or else the largest value of the row.
    """

    name: str
    unit: str
    full: float
    values: tuple[float | None, ...]


@dataclass(frozen=True, eq=False)
class Usage:
    """The utilisation of a machine over time.

    host: name of the machine. started: Unix time. interval: the requested seconds between samples.
    series: the columns.
    times: float64 [n], seconds from the beginning to the end of each sample; increasing.
    durations: float64 [n], seconds that each sample covers.
    values: float64 [n, series]; NaN if unknown.
    marks: sorted by time.
    """

    host: str
    started: float
    interval: float
    series: tuple[Series, ...]
    times: Floats
    durations: Floats
    values: Floats
    marks: tuple[Mark, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds from the beginning to the end of the last sample."""
        return float(self.times[-1]) if len(self.times) else 0.0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(entry.name for entry in self.series)

    def column(self, name: str) -> Floats:
        """The values of a series, float64 [n]; all NaN for an unknown name."""
        if name not in self.names:
            return np.full(len(self.times), np.nan)
        return self.values[:, self.names.index(name)]

    def percentiles(self) -> dict[str, Percentiles]:
        """Percentiles by series, without those that have no values."""
        known = {name: ~np.isnan(self.values[:, number]) for number, name in enumerate(self.names)}
        return {
            name: _percentiles(self.column(name)[some], self.durations[some])
            for name, some in known.items()
            if some.any()
        }

    def between(self, start: float, end: float) -> Usage:
        """The samples whose middle is in [start, end), with unchanged times."""
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
        """A readable version: the most important series first, cores last, without series that are always 0.

        most_cores: the most series of cores; if there are more cores, neighbours are averaged. 0 leaves out all cores.
        """
        known = self.percentiles()
        series = [
            entry
            for entry in self.series
            if not _CORE.fullmatch(entry.name) and np.nansum(np.abs(self.column(entry.name)))
        ]
        series.sort(key=_importance)
        columns = [self.column(entry.name) for entry in series]
        cores = sorted((int(match[1]), name) for name in known if (match := _CORE.fullmatch(name)))
        together = math.ceil(len(cores) / max(1, most_cores)) or 1
        for start in range(0, len(cores) if most_cores else 0, together):
            some = cores[start : start + together]
            columns.append(_mean(np.stack([self.column(name) for _, name in some])))
            last = f"–{some[-1][0]}" if len(some) > 1 else ""
            series.append(Series(f"cpu{some[0][0]}{last} busy", "share", 1.0))
        values = np.stack(columns, 1) if columns else np.empty((len(self.times), 0))
        return replace(self, series=tuple(series), values=values)

    def heat_rows(self, columns: int = 120, seconds: float | None = None) -> list[HeatRow]:
        """Each series as a row of a heat map, in `columns` equal steps from 0 to `seconds`, by default to the end."""
        end = self.seconds if seconds is None else seconds
        if not len(self.times) or end <= 0:
            return []
        edges, starts = (
            np.linspace(0.0, end, columns + 1),
            np.concatenate([self.times[:1] - self.durations[:1], self.times]),
        )

        def in_steps(weights: Floats) -> Floats:
            sums = np.concatenate([[0.0], np.cumsum(weights * self.durations)])
            return np.diff(np.interp(edges, starts, sums))

        rows = []
        for entry in self.series:
            column = self.column(entry.name)
            full = entry.full or float(np.nanmax([*column, 0.0])) or 1.0
            known = in_steps(np.where(np.isnan(column), 0.0, 1.0))
            shares = in_steps(np.nan_to_num(column)) / np.where(known > 1e-9, known * full, np.nan)
            values = (None if math.isnan(share) else share for share in np.clip(shares, 0.0, 1.0).tolist())
            rows.append(HeatRow(entry.name, entry.unit, full, tuple(values)))
        return rows

    def to_dict(self) -> dict[str, Any]:
        """The record as numbers, strings, lists and dictionaries, for `from_dict`. Unknown values are None."""
        return {
            "host": self.host,
            "started": self.started,
            "interval": self.interval,
            "series": [entry._asdict() for entry in self.series],
            "times": _plain(self.times),
            "durations": _plain(self.durations),
            "values": {name: _plain(self.values[:, number]) for number, name in enumerate(self.names)},
            "marks": [asdict(mark) for mark in self.marks],
            "percentiles": {name: values._asdict() for name, values in self.percentiles().items()},
        }

    @staticmethod
    def from_dict(document: Mapping[str, Any]) -> Usage:
        """Read the output of `to_dict`, which is not trusted. Raises FormatError for anything else."""
        try:
            series = list(map(_series, document["series"]))
            columns = [document["values"][entry.name] for entry in series]
            rows = zip(document["times"], document["durations"], zip(*columns, strict=True), strict=True)
            marks = [_mark(entry["name"], entry["seconds"], entry) for entry in document["marks"]]
            return _checked(document, series, [_row(*row) for row in rows], marks)
        except _ODD as error:
            raise FormatError(f"its series, times, values and marks do not fit together: {error!r:.100}") from None


# --- A record from untrusted parts: each of these functions raises one of `_ODD` for invalid parts.
_ODD = (KeyError, TypeError, ValueError, AttributeError)


def _checked(head: Any, series: Sequence[Series], rows: Sequence[Row], marks: Sequence[Mark]) -> Usage:
    if len({entry.name for entry in series}) < len(series):
        raise ValueError("two series have the same name")
    if len(rows) * len(series) > Limits.VALUES or len(series) > Limits.SERIES or len(marks) > Limits.MARKS:
        raise ValueError(f"more than {Limits.VALUES:,} values, {Limits.SERIES:,} series or {Limits.MARKS:,} marks")
    if any(len(values) > len(series) for _, _, values in rows):
        raise ValueError(f"a row has more than {len(series)} values, as many as there are series")
    times, durations, values = _arrays(rows, len(series))
    if not (np.all(np.diff(times) > 0) and np.all(durations > 0)):
        raise ValueError("times do not increase")
    started, interval = _number(head["started"]), _number(head["interval"])
    by_time = tuple(sorted(marks, key=lambda mark: mark.seconds))
    return Usage(_name(head["host"]), started, interval, tuple(series), times, durations, values, by_time)


def _series(document: Any) -> Series:
    series = Series(_name(document["name"]), document["unit"], _known(document.get("full")))
    if series.unit not in _UNITS or (series.full is not None and series.full <= 0):
        raise ValueError(f"series {series.name!a}: expected a unit of {', '.join(_UNITS)}, and a limit above 0")
    return series


def _mark(name: Any, seconds: Any, rates: Any) -> Mark:
    return Mark(_name(name), _number(seconds), _known(rates.get("steps")), _known(rates.get("images")))


def _row(end: Any, duration: Any, values: Any) -> Row:
    return _number(end), _number(duration), [math.nan if value is None else _number(value) for value in values]


def _name(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= Limits.NAME:
        raise ValueError(f"expected a name of at most {Limits.NAME} characters, found {value!a:.60}")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= _LARGEST:
        raise ValueError(f"expected a number, found {value!a:.60}")
    return float(value)


def _known(value: Any) -> float | None:
    return None if value is None else _number(value)


def _importance(series: Series) -> int:
    """The rank of a series in a summary; 0 comes first."""
    kind = series.name.split()[0].rstrip("0123456789")
    if series.unit == "1/s":
        return 0
    if kind == "gpu" or series.unit == "1":
        return 1
    return {"cpu": 2, "job": 3, "io": 4, "memory": 6, "page": 6, "processes": 7}.get(kind, 5)


def _plain(column: Floats) -> list[float | None]:
    return [None if math.isnan(value) else float(f"{value:.6g}") for value in column.tolist()]


def _percentiles(values: Floats, weights: Floats) -> Percentiles:
    """Weighted percentiles: the smallest value that is not exceeded for at least that share of the weights."""
    order = np.argsort(values, kind="stable")
    values, weights = values[order], weights[order]
    until = np.cumsum(weights)
    rows = np.searchsorted(until, np.array(_PERCENTILES) * until[-1] * (1 - 1e-12))
    inner = values[rows.clip(max=len(values) - 1)]
    return Percentiles(*map(float, [values[0], *inner, values[-1], np.average(values, weights=weights)]))


def _mean(values: Floats, weights: Any = 1.0) -> Floats:
    """The weighted mean along the first axis, without NaN; NaN if all values are."""
    known = np.where(np.isnan(values), 0.0, weights)
    total = known.sum(0)
    return np.asarray(np.nansum(values * known, 0) / np.where(total > 0, total, np.nan))


def _arrays(rows: Sequence[Row], columns: int) -> tuple[Floats, Floats, Floats]:
    """Times [n], durations [n] and values [n, columns] of rows; shorter rows are filled with NaN."""
    values = np.full((len(rows), columns), np.nan)
    for number, (_, _, row) in enumerate(rows):
        values[number, : len(row)] = row
    times, durations = (np.array([row[column] for row in rows], np.float64) for column in (0, 1))
    return times, durations, values


# --- Samples in bounded memory, and in a file that is always complete up to its last line.
class Buffer:
    """Samples as at most `capacity` rows.

    When the buffer is full, pairs of neighbours are merged into their mean by time, and each later row is the mean of
    twice as many samples. So memory does not grow with the length of a run, and the file grows by the same number of
    rows each time that the length doubles.
    """

    def __init__(self, capacity: int = 8192) -> None:
        self._capacity, self._samples_a_row = capacity, 1
        self._rows, self._open = list[Row](), list[Row]()

    def add(self, end: float, duration: float, values: Sequence[float]) -> Row | None:
        """Add a sample, and return the row that it completes, if any."""
        self._open.append((end, duration, np.asarray(values, np.float32)))
        return self.flush() if len(self._open) >= self._samples_a_row else None

    def flush(self) -> Row | None:
        """Complete and return the open row, if there is one."""
        if not self._open:
            return None
        row, self._open = _merged(self._open), []
        self._rows.append(row)
        if len(self._rows) == self._capacity:
            self._rows = [_merged(self._rows[number : number + 2]) for number in range(0, self._capacity, 2)]
            self._samples_a_row *= 2
        return row

    def arrays(self) -> tuple[Floats, Floats, Floats]:
        """Copies of times, durations and values, with the open row."""
        rows = [*self._rows, *([_merged(self._open)] if self._open else [])]
        return _arrays(rows, max((len(row[2]) for row in rows), default=0))


def _merged(rows: Sequence[Row]) -> Row:
    """The mean, weighted by time, of consecutive rows."""
    if len(rows) == 1:
        return rows[0]
    times, durations, values = _arrays(rows, max(len(row[2]) for row in rows))
    return float(times[-1]), float(durations.sum()), _mean(values, durations[:, None]).astype(np.float32)


_HEAD, _VERSION = "packer usage", 1
_NEITHER = "neither a record of  packer monitor --output FILE  nor the output of  packer diagnose --json"
_START = f'{{"{_HEAD}"'.encode()


class RecordFile:
    """The file of a record during writing, locked. Raises OutputError if it is locked, or is not a record."""

    def __init__(self, path: str | os.PathLike[str], head: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self._columns = 0
        _check_replaceable(self.path)
        # Not atomic_write: the file must be readable during the run. Unbuffered: a fork must not copy lines.
        self._file = open(self.path, "ab", buffering=0)
        lock = take_lock(self._file.fileno())
        if lock is None:
            self._file.close()
            raise OutputError(f"{self.path}: another process is writing this record; choose another name")
        self._lock = lock
        call_after_fork(self)
        self._file.truncate(0)
        self._write({_HEAD: _VERSION, **head})

    def row(self, series: Sequence[Series], end: float, duration: float, values: Sequence[float]) -> None:
        """Write new columns, if any, then a row."""
        if new := series[self._columns : len(values)]:
            self._write({"series": [entry._asdict() for entry in new]})
            self._columns += len(new)
        numbers = [None if math.isnan(value) else float(f"{value:.5g}") for value in values]
        self._write({"t": round(end, 6), "d": round(duration, 6), "v": numbers})

    def mark(self, mark: Mark) -> None:
        self._write({"mark": mark.name, "t": round(mark.seconds, 6)})

    def close(self) -> None:
        self._file.close()
        self._lock.release()

    def after_fork(self) -> None:
        """Close the file in a forked child, which would otherwise keep it locked after the parent ends."""
        self.close()

    def _write(self, document: Mapping[str, Any]) -> None:
        left = memoryview(f"{json.dumps(document)}\n".encode())
        while left:
            left = left[self._file.write(left) or 0 :]


def _check_replaceable(path: Path) -> None:
    """Check that a path is free, empty or a record, which a new record may replace. Raises OutputError."""
    try:
        with open_regular(path) as file:
            start = file.read(len(_START))
    except FileNotFoundError:
        return
    except PathError as error:
        raise OutputError(f"{error}; choose another name") from error
    if start not in (b"", _START):
        raise OutputError(f"{path}: is not a record of packer monitor, and is not replaced; choose another name")


def load(path: str | os.PathLike[str]) -> Usage:
    """Load a record from its file or from the JSON of a diagnosis, which are not trusted.

    An incomplete last line is left out. Raises OSError, and FormatError, with the line, for an invalid file.
    """
    with open_regular(path) as file:
        text = file.read(Limits.FILE_BYTES + 1)
    try:
        if len(text) > Limits.FILE_BYTES:
            raise FormatError(f"more than {Limits.FILE_BYTES:,} bytes")
        if text.startswith(_START):
            return _of_lines(text.split(b"\n")[:-1])
        return _of_diagnosis(text)
    except FormatError as error:
        raise FormatError(f"{os.fspath(path)}: {error}") from None


def _of_lines(lines: Sequence[bytes]) -> Usage:
    number, series, rows, marks = 1, list[Series](), list[Row](), list[Mark]()
    try:
        head = _parsed(lines[0] if lines else b"")
        if head[_HEAD] != _VERSION:
            raise ValueError(f"version {head[_HEAD]!a:.20}, expected {_VERSION}: update packer")
        if len(lines) > Limits.LINES:
            raise ValueError(f"more than {Limits.LINES:,} lines")
        for line in lines[1:]:
            number += 1
            document = _parsed(line)
            if "series" in document:
                series += map(_series, document["series"])
            elif "mark" in document:
                marks.append(_mark(document["mark"], document["t"], document))
            elif "v" in document:
                rows.append(_row(document["t"], document["d"], document["v"]))
        return _checked(head, series, rows, marks)
    except _ODD as error:
        raise FormatError(f"line {number}: {error}") from None


def _of_diagnosis(text: bytes) -> Usage:
    try:
        document = _parsed(text)
        record = document.get("usage", document)
        known = "durations" in record
    except _ODD as error:
        raise FormatError(f"{_NEITHER} ({error})") from None
    if not known:
        raise FormatError(_NEITHER)
    return Usage.from_dict(record)


def _parsed(text: bytes) -> Any:
    """Parse a JSON object. Raises ValueError, also for NaN and infinities, which JSON does not have."""
    try:
        document = json.loads(text, parse_constant=lambda name: float("no number"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error!s:.100}") from None
    if not isinstance(document, dict):
        raise ValueError("expected a JSON object")
    return document


# --- A summary of a record in one sentence: busy and idle parts of the machine, and the probable bottleneck.
# It uses medians (p50, by time), so that a slow start or an evaluation at the end has no influence. It only interprets
# counters; a diagnosis, which replaces stages by memory, measures the cost of each stage.
_BUSY = 0.9  # of the CPUs or the GPU
_DISK_BUSY = 0.8
_LINK_FULL = 0.8
_PRESSED = 0.2  # of the time some task waited for I/O
_THROTTLED = 0.1
_NEARLY_FULL = 0.95
_STEADY = 0.5  # of p95: a rate with a median above this is not bursty
_LEAST_RATE = 1e6  # bytes per second: less is not a load
_NOTHING = Percentiles(*[0.0] * 7)
_Known: TypeAlias = Mapping[str, Percentiles]


def format_value(value: float | None, unit: str) -> str:
    """A value as text: 98 %, 1.34 GB, 140 MB/s, 2.5."""
    if value is None or value != value:
        return "–"
    if unit == "share":
        return f"{100 * value:.0f} %"
    if unit in ("bytes", "bytes/s"):
        return human_bytes(value) + unit[5:]
    shown = f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{shown} W" if unit == "watts" else shown + unit[1:] if unit == "1/s" else shown


def read_usage(usage: Usage) -> str:
    """Summarize a record in a sentence, with figures."""
    known = usage.percentiles()
    if "cpu busy" not in known:
        return "the run was too short for a sample"
    full = {entry.name: entry.full for entry in usage.series if entry.full and entry.name in known}
    sentence = _limit(known, full)
    for name in ("job memory", "memory used"):
        if name in full and known[name].p99 >= _NEARLY_FULL * full[name]:
            return f"{sentence}; memory is nearly full: {human_bytes(known[name].max)} of {human_bytes(full[name])}"
    return sentence


def _limit(known: _Known, full: Mapping[str, float]) -> str:
    gpus = [value.p50 for name, value in known.items() if re.fullmatch(r"gpu\d+ busy", name)]
    gpu = sum(gpus) / len(gpus) if gpus else 0.0
    device = f"the GPU{'s are' if len(gpus) > 1 else ' is'} {_percent(gpu)}"
    if gpu >= _BUSY:
        return f"{device} busy at p50: the input pipeline is fast enough"
    gpu_state = f" while {device}" if gpus else ""
    if (throttled := known.get("job throttled", _NOTHING).p50) >= _THROTTLED:
        return f"the CPU quota stops the job {_percent(throttled)} of the time{gpu_state}: request more CPUs"
    if (cpu := known["cpu busy"].p50) >= _BUSY:
        end = "the input pipeline is the limit" if gpus else "the CPUs are the limit"
        return f"CPUs are {_percent(cpu)} busy at p50{gpu_state}: {end}"
    idle = f"CPUs are {_percent(1 - cpu)} idle" + (f" and {device} busy" if gpus else "")
    if storage := _storage(known):
        return f"{storage} while {idle}: storage is the limit"
    for name, most in full.items():
        if name.endswith(" in") and (rate := known[name].p50) >= _LINK_FULL * most:
            received = f"{name.removesuffix(' in')} receives {format_value(rate, 'bytes/s')}"
            return f"{received}, {_percent(rate / most)} of its link, while {idle}: the network is the limit"
    end = "the job waits for latency, locks or too few workers" if gpus else "no limit is seen"
    return f"{idle}, and neither disks nor network are busy: {end}"


def _storage(known: _Known) -> str:
    """The evidence that storage is the limit, else "": a busy disk, tasks that wait for I/O, or steady server reads."""
    disks = [(value.p50, name.removesuffix(" busy")) for name, value in known.items() if name.endswith(" busy")]
    disks = [(busy, disk) for busy, disk in disks if f"{disk} read" in known or f"{disk} write" in known]
    waits = max(known.get(name, _NOTHING).p50 for name in ("io pressure", "cpu iowait"))
    if disks:
        busy, disk = max(disks)
        rate, verb = max(((known.get(f"{disk} {verb}", _NOTHING), verb) for verb in ("read", "write")),
                         key=lambda pair: pair[0].mean)  # fmt: skip
        if busy >= _DISK_BUSY or (waits >= _PRESSED and rate.mean > _LEAST_RATE):
            steadily = " steadily" if _is_steady(rate) else ""
            value = format_value(rate.p50 if steadily else rate.mean, "bytes/s")
            return f"{disk} {verb}s {value}{steadily}, busy {_percent(busy)} of the time,"
    servers = [(value.p50, name) for name, value in known.items() if re.fullmatch("(nfs|lustre) .* read", name)]
    most, name = max(servers, default=(0.0, ""))
    if name and _is_steady(known[name]):
        return f"{name.removesuffix(' read')} gives {format_value(most, 'bytes/s')} steadily"
    return f"tasks wait for I/O {_percent(waits)} of the time" if waits >= _PRESSED else ""


def _is_steady(rate: Percentiles) -> bool:
    return rate.p50 >= max(_STEADY * rate.p95, _LEAST_RATE)


def _percent(share: float) -> str:
    return format_value(share, "share")


# --- A comparison of two records, by series and between marks of the same name.
class Difference(NamedTuple):
    """A series in both records; None in a record without it. ratio: mean in B over mean in A; None if unknown."""

    name: str
    unit: str
    a: Percentiles | None
    b: Percentiles | None
    ratio: float | None


class SpanDifference(NamedTuple):
    """Seconds, steps/s and images/s between a mark and the next one, in both records; None if unknown."""

    name: str
    seconds: tuple[float, float]
    steps: tuple[float | None, float | None]
    images: tuple[float | None, float | None]


@dataclass(frozen=True)
class Comparison:
    """A comparison of two records.

    rows: the series of both, the most important first. spans: differences between common marks, in the order of A.
    """

    a: Usage
    b: Usage
    rows: tuple[Difference, ...]
    spans: tuple[SpanDifference, ...]

    @property
    def verdict(self) -> str:
        """The rates of B and A, or their run times without rates, and the bottleneck of each, as sentences."""
        first = f"A ran for {human_seconds(self.a.seconds)}, B for {human_seconds(self.b.seconds)}"
        for unit, rate_a, rate_b in self._rates():
            shown = [format_value(rate, "1") for rate in (rate_b, rate_a)]
            first = f"B makes {shown[0]} {unit}, A {shown[1]}: {rate_b / rate_a - 1:+.0%}"
            break
        return f"{first}. A: {read_usage(self.a)}. B: {read_usage(self.b)}."

    def _rates(self) -> Iterator[tuple[str, float, float]]:
        """Yield (name, rate in A, rate in B), of the whole run, then of the spans, the slowest of A first."""
        rows = {row.name: row for row in self.rows}
        for name in ("images", "steps"):
            row = rows.get(name)
            if row is not None and row.a and row.b and row.ratio is not None:
                yield f"{name} a second", row.a.mean, row.b.mean
        for span in sorted((span for span in self.spans if all(span.steps)), key=lambda span: span.steps[0] or 0.0):
            name, (rate_a, rate_b) = ("images", span.images) if all(span.images) else ("steps", span.steps)
            yield f"{name} a second in {span.name!r}", rate_a or 0.0, rate_b or 0.0

    def to_dict(self) -> dict[str, Any]:
        """The comparison as numbers, strings, lists and dictionaries, without the values over time."""
        runs = [{"host": run.host, "started": run.started, "seconds": run.seconds} for run in (self.a, self.b)]
        rows = [{**row._asdict(), "a": row.a and row.a._asdict(), "b": row.b and row.b._asdict()} for row in self.rows]
        spans = [span._asdict() for span in self.spans]
        return {"a": runs[0], "b": runs[1], "series": rows, "spans": spans, "verdict": self.verdict}


def compare(a: Usage, b: Usage) -> Comparison:
    """Compare two records of one or two hosts, without single cores, whose number may differ."""
    series = {entry.name: entry for run in (a, b) for entry in run.summary(0).series}
    of_a, of_b, rows, spans = a.percentiles(), b.percentiles(), list[Difference](), list[SpanDifference]()
    for entry in sorted(series.values(), key=_importance):
        before, after = of_a.get(entry.name), of_b.get(entry.name)
        ratio = after.mean / before.mean if before and after and before.mean else None
        rows.append(Difference(entry.name, entry.unit, before, after, ratio))
    rest = {mark.name: (mark, span) for mark, span in reversed(b.spans())}  # the first mark of each name
    for mark, span in a.spans():
        if mark.name in rest:
            both = (mark, span), rest.pop(mark.name)
            seconds, steps, images = zip(*map(_of_span, both), strict=True)
            spans.append(SpanDifference(mark.name, seconds, steps, images))
    return Comparison(a, b, tuple(rows), tuple(spans))


def _of_span(pair: tuple[Mark, Usage]) -> tuple[float, float | None, float | None]:
    """Seconds, steps/s and images/s of a span, with the rates of the mark or else the means of the series."""
    mark, span = pair
    means = {name: values.mean for name, values in span.percentiles().items()}
    rates = [
        means.get(name) if rate is None else rate for name, rate in (("steps", mark.steps), ("images", mark.images))
    ]
    return float(span.durations.sum()), rates[0], rates[1]


# --- A record, and a comparison of two, as lines for a terminal, and as tables, also used in reports.
_BLOCKS = " ▁▂▃▄▅▆▇█"
_STRIP, _LEAST_STRIP, _NAME_WIDTH = 24, 12, 23
_COMPARED = ("p50", "p95", "max")
_CORES = 8
_MARKS, _SPANS = 12, 40
Table: TypeAlias = tuple[Sequence[str], list[list[str]]]


def percentiles_table(usage: Usage, names: Sequence[str] = Percentiles._fields) -> Table:
    """A table of percentiles, with a row for each series that has values."""
    known = usage.percentiles()
    return ["", *names], [
        [entry.name, *(format_value(getattr(known[entry.name], name), entry.unit) for name in names)]
        for entry in usage.series
        if entry.name in known
    ]


def usage_lines(usage: Usage, columns: int = 110) -> list[str]:
    """A record as lines: percentiles of each series with a strip of its values over time, marks, and the summary.

    columns: width of the terminal; below 110, some percentiles are left out, and the strip is shorter.
    """
    summary = usage.summary(_CORES)
    names = [name for name in Percentiles._fields[:-1] if columns >= 110 or name not in ("p90", "p99")]
    width = max(_LEAST_STRIP, min(_STRIP, columns - _NAME_WIDTH - 4 - 10 * len(names)))
    headings, rows = percentiles_table(summary, names)
    strips = {row.name: "".join("·" if value is None else _BLOCKS[round(value * 8)] for value in row.values)
              for row in summary.heat_rows(width)}  # fmt: skip
    rows = [[name[:_NAME_WIDTH], *cells, strips[name]] for name, *cells in rows]
    lines = table([*headings, f"0 s to {human_seconds(usage.seconds)}".ljust(width)], rows, columns)
    if usage.marks:
        marks = [f"{mark.name} at {human_seconds(mark.seconds)}" for mark in usage.marks[:_MARKS]]
        more = f", and {len(usage.marks) - _MARKS} more" if len(usage.marks) > _MARKS else ""
        lines += ["", f"marks: {', '.join(marks)}{more}"]
    return [*lines, "", read_usage(usage)]


def comparison_tables(result: Comparison) -> list[Table]:
    """Tables of p50, p95, maximum and ratio of means of each series in both records; then of rates between marks."""
    rows = []
    for row in result.rows:
        values = [getattr(side, name, None) for name in _COMPARED for side in (row.a, row.b)]
        rows.append([row.name, *(format_value(value, row.unit) for value in values), format_value(row.ratio, "1")])
    spans = [
        [span.name, *(format_value(number, "1") for number in (*span.seconds, *span.steps, *span.images))]
        for span in result.spans[:_SPANS]
    ]
    tables: list[Table] = [(["", *_of_both(_COMPARED), "mean B/A"], rows)]
    return [*tables, (["from mark", *_of_both(("seconds", "steps/s", "images/s"))], spans)] if spans else tables


def comparison_lines(result: Comparison, width: int = 100) -> list[str]:
    """A comparison of two records as lines, with the verdict."""
    series, *spans = comparison_tables(result)
    lines = table(*series, width, optional=_of_both(("max", "p95")))
    for headings, rows in spans:
        lines += ["", *table(headings, rows[:_MARKS], width, optional=_of_both(("steps/s",)))]
    return [*lines, "", *wrapped(result.verdict, width, "")]


def _of_both(names: Sequence[str]) -> list[str]:
    return [f"{name} {which}" for name in names for which in "AB"]
