"""`Usage`: what a machine did over time, as columns of numbers with names.

A sample covers the time since the one before it. Samples of a long run are means over longer intervals (see
`readers.usage.buffer`), and each counts by its duration: half a minute of idling is half a minute in every percentile,
however many samples it was.

    series       "cpu busy", "cpu0 busy", "gpu0 busy", "vda read", "eth0 in", "loader queue", "images", …
    units        share (0 to 1), bytes, bytes/s, cores, watts, 1/s, 1 (a plain number)
    full         the most that a series can be, where that is known: the size of memory, the speed of a link
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cache.errors import FormatError

__all__ = [
    "UNITS",
    "Floats",
    "HeatRow",
    "Limits",
    "Mark",
    "Percentiles",
    "Row",
    "Series",
    "Usage",
    "UsageReader",
    "arrays_of",
    "importance",
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
