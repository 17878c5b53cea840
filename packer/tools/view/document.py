"""The documents that the page reads: `view.json` and the documents of orders.

Orders are computed at the first request, and kept. Some need all samples to be read: damaged samples, and the facts of
sources without an index. The first request starts reading, and requests are answered with the progress until it ends.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

import numpy as np
import numpy.lib.format
import numpy.typing as npt
from crc32c import crc32c

from cache.errors import PackerError, UnknownNameError
from cache.messages import human_bytes
from packer.tools.view.places import Place, open_place
from packer.tools.view.predictions import OrderColumn, Predictions, Run, read_predictions
from packer.verification import header_difference
from readers.headers import MEDIA
from readers.headers.base import stored_bytes
from readers.layout import PIXELS
from readers.reader import Reader, field_payloads, json_payloads
from readers.table import FIELD_COLUMNS, NO_LABEL, Buffer, ImageInfo, MemoryColumns, Strings, headers_of, upright_sides
from readers.where import TableFacts, json_columns, parse_where

__all__ = [
    "FORMAT",
    "Body",
    "Bytes",
    "Column",
    "Pending",
    "SplitView",
    "View",
    "checksum_of",
    "examined",
    "open_view",
    "order_document",
    "same_bytes",
]


# --- Columns as virtual .npy files: a header and the bytes of an array, readable by range.
class Body(Protocol):
    """The body of an answer, readable by range."""

    @property
    def size(self) -> int: ...

    def read(self, start: int, stop: int) -> bytes | memoryview:
        """Bytes [start, stop), which must be inside the body."""


@dataclass(frozen=True)
class Bytes:
    """Bytes in memory."""

    data: bytes | memoryview

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, start: int, stop: int) -> bytes | memoryview:
        return self.data[start:stop]


@dataclass(frozen=True)
class Column:
    """A one-dimensional array, in the format of numpy.save."""

    values: npt.NDArray[Any]

    @cached_property
    def header(self) -> bytes:
        """The bytes before the values; their length is a multiple of 64."""
        memory = io.BytesIO()
        described = numpy.lib.format.header_data_from_array_1_0(np.empty(0, self.values.dtype))
        numpy.lib.format.write_array_header_1_0(memory, {**described, "shape": self.values.shape})
        return memory.getvalue()

    @property
    def size(self) -> int:
        return len(self.header) + self.values.nbytes

    def read(self, start: int, stop: int) -> bytes | memoryview:
        head, width = len(self.header), self.values.itemsize
        if start >= head:
            first, last = (start - head) // width, -(-(stop - head) // width)
            data = np.ascontiguousarray(self.values[first:last]).tobytes()
            return memoryview(data)[start - head - first * width :][: stop - start]
        return self.header[start:stop] + (bytes(self.read(head, stop)) if stop > head else b"")

    def described(self, url: str) -> dict[str, Any]:
        """The description of a column in documents."""
        return {"url": url, "dtype": self.values.dtype.str, "length": len(self.values), "start": len(self.header)}


def columns_of(reader: Reader, info: ImageInfo | None) -> dict[str, npt.NDArray[Any]]:
    """The known columns of a split, by the file names of an index without .npy.

    info: header facts, for a source without an index; None if they have not been read.
    """
    return dict(_columns(reader, info))


def _columns(reader: Reader, info: ImageInfo | None) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    columns = reader.table.columns
    packed = not isinstance(columns, MemoryColumns)
    yield "label", reader.labels
    yield from _texts("key", columns.keys())
    if packed:
        info = reader.info
        yield "shard", columns.column("shard")
    if info is not None:
        yield from zip(ImageInfo._fields, info, strict=True)
    for field in reader.fields:
        if packed:
            for name in FIELD_COLUMNS:
                yield f"{field}.{name}", columns.field_column(field, name)
            if field in columns.separate:
                yield f"{field}.shard", columns.shard_column(field)
        elif (lengths := columns.field_column(field, "length")).any():
            yield f"{field}.length", lengths
        yield from _texts(f"{field}.name", columns.names(field))


def _texts(name: str, texts: Strings) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    if len(texts.blob):
        yield name, texts.blob
        yield f"{name}.offset", texts.offsets


# --- Orders of the samples of a split, with runs, and histograms, computed by sorting columns.
# An order is a list of sample numbers, uint32, divided into named runs: the order by class is sorted by label, with a
# run for each class. Bar i of a histogram is run i of the order of the same name, so that a click on a bar shows its
# samples. Samples without the value are in a last run, "unknown", which has no bar.
UNKNOWN = "unknown"
_MOST_BINS, _MOST_GROUPS = 32, 10_000
_STEPS = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)  # in a decade, at about equal ratios
_LINEAR_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_WIDE = 20.0  # above this ratio of largest to smallest value, bins grow with the value
Values = npt.NDArray[np.float64]
BINNED = {
    "bytes": ("file size", "bytes"),
    "size": ("number of pixels", "pixels"),
    "side": ("shorter side", "pixels"),
    "aspect": ("aspect ratio (width / height)", ""),
}
"""Orders by a number: title and unit."""


class Histogram(NamedTuple):
    """A histogram. edges: float64 [k + 1], the last one inclusive. counts: int64 [k]."""

    edges: Values
    counts: npt.NDArray[np.int64]


def values_of(name: str, info: ImageInfo | None, sizes: npt.NDArray[np.int64]) -> Values | None:
    """The values that an order of BINNED sorts by, float64 [n], NaN if unknown; None if all are unknown.

    sizes: bytes of the images, 0 if unknown.
    """
    if name == "bytes":
        return np.where(sizes > 0, sizes, np.nan) if sizes.any() else None
    if info is None:
        return None
    heights, widths = (sides.astype(np.float64) for sides in upright_sides(info))
    heights[(heights == 0) | (widths == 0)] = np.nan
    if name == "aspect":
        return widths / heights
    return heights * widths if name == "size" else np.minimum(heights, widths)


# --- numbers --------------------------------------------------------------------------------------------------------
def histogram(values: Values) -> Histogram:
    """The histogram of all known values, with round edges; without bins if no value is known."""
    known = values[~np.isnan(values)]
    if not len(known):
        return Histogram(np.zeros(0), np.zeros(0, np.int64))
    edges = _edges(float(known.min()), float(known.max()))
    return Histogram(edges, np.histogram(known, edges)[0].astype(np.int64))


def by_number(values: Values, edges: Values) -> OrderColumn:
    """Samples by ascending value, with a run for each bin; equal values in stored order, unknown ones last."""
    order = np.argsort(values, kind="stable").astype(np.uint32)
    known = len(values) - int(np.isnan(values).sum())
    rising = values[order[:known]]
    bounds = [*np.searchsorted(rising, edges[:-1]).tolist(), known]
    names = [f"{_edge_text(low)} – {_edge_text(high)}" for low, high in itertools.pairwise(edges.tolist())]
    runs = [Run(name, a, b - a) for name, (a, b) in zip(names, itertools.pairwise(bounds), strict=False)]
    return OrderColumn(order, _with_rest(runs, known, len(order)))


def _edges(low: float, high: float) -> Values:
    if high == low:
        return np.array([low, high if high > low else low + 1])
    if low > 0 and high / low > _WIDE:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        steps = _STEPS if (last - first) * len(_STEPS) <= 2 * _MOST_BINS else _STEPS[:1]
        rising = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    else:
        rough = (high - low) / _MOST_BINS
        base = 10.0 ** math.floor(math.log10(rough))
        step = next(base * factor for factor in _LINEAR_STEPS if base * factor >= rough)
        start = math.floor(low / step)
        rising = [step * number for number in range(start, start + 3 * _MOST_BINS)]
    begin = max(i for i, edge in enumerate(rising) if edge <= low or i == 0)
    end = next((i for i, edge in enumerate(rising) if edge >= high), len(rising) - 1)
    return np.array(rising[begin : max(end, begin + 1) + 1])


def _edge_text(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:.3g}"


# --- names ----------------------------------------------------------------------------------------------------------
def by_class(labels: npt.NDArray[np.int64], classes: Sequence[str]) -> OrderColumn:
    """Samples by label, with a run for each class that has any; those without a label last, in a run named ""."""
    if not len(labels):
        return OrderColumn(np.zeros(0, np.uint32), [])
    known = labels >= 0
    last = int(labels.max()) + 1 if known.any() else 0
    marks = np.where(known, labels, last)
    order = np.argsort(marks, kind="stable").astype(np.uint32)
    values, first, counts = np.unique(marks[order], return_index=True, return_counts=True)

    def name(label: int) -> str:
        return "" if label == last else classes[label] if label < len(classes) else str(label)

    runs = zip(map(name, values.tolist()), first.tolist(), counts.tolist(), strict=True)
    return OrderColumn(order, [Run(*run) for run in runs])


def by_value(values: Sequence[Any]) -> OrderColumn:
    """Samples by a column of their table, with a run for each value: ascending numbers, texts, then empty values.

    Values after the first ten thousand share one run, so that the list is short enough for a browser.
    """
    texts = ["" if value is None else value if isinstance(value, str) else json.dumps(value) for value in values]
    names = sorted(set(texts), key=lambda text: (not text, _rank(text)))
    place = {name: number for number, name in enumerate(names)}
    marks = np.fromiter(map(place.__getitem__, texts), np.int64, len(texts))
    bounds = np.cumsum([0, *np.bincount(marks, minlength=len(names)).tolist()]).tolist()
    runs = [Run(name, first, end - first) for name, (first, end) in zip(names, itertools.pairwise(bounds), strict=True)]
    return OrderColumn(np.argsort(marks, kind="stable").astype(np.uint32), _shortened(runs, len(texts), "values"))


def _rank(text: str) -> tuple[float, str]:
    try:
        number = float(text)
    except ValueError:
        number = math.inf
    return (number if number == number else math.inf, text)


def _shortened(runs: list[Run], total: int, noun: str) -> list[Run]:
    if len(runs) <= _MOST_GROUPS:
        return runs
    first = runs[_MOST_GROUPS].first
    return [*runs[:_MOST_GROUPS], Run(f"{len(runs) - _MOST_GROUPS:,} more {noun}", first, total - first)]


def chosen_of(order: OrderColumn, mask: npt.NDArray[np.bool_]) -> OrderColumn:
    """The samples of an order that a mask selects, in the same order and runs."""
    kept = mask[order.values]
    before = np.concatenate(([0], np.cumsum(kept)))
    runs = [Run(name, int(before[a]), int(before[a + n] - before[a])) for name, a, n in order.runs]
    return OrderColumn(order.values[kept], runs)


def by_medium(media: npt.NDArray[np.uint8]) -> OrderColumn:
    """Samples by image format, with a run for each; those with an unreadable header last."""
    marks = np.where(media == 0, 255, media)
    order = np.argsort(marks, kind="stable").astype(np.uint32)
    codes, first, counts = np.unique(marks[order], return_index=True, return_counts=True)
    names = [MEDIA[code] if code < len(MEDIA) else UNKNOWN for code in codes.tolist()]
    return OrderColumn(order, [Run(*run) for run in zip(names, first.tolist(), counts.tolist(), strict=True)])


def by_key(keys: Strings) -> OrderColumn:
    """Samples sorted by their keys in UTF-8."""
    blob, bounds = keys.blob.tobytes(), keys.offsets.tolist()
    texts = [blob[a:b] for a, b in itertools.pairwise(bounds)]
    order = sorted(range(len(texts)), key=texts.__getitem__)
    return OrderColumn(np.array(order, np.uint32), [])


def same_bytes(sizes: npt.NDArray[Any], checksums: npt.NDArray[Any], keys: Sequence[str]) -> OrderColumn:
    """The samples that share size and CRC32C with others, with a run for each group, named by its first key.

    sizes: 0 leaves a sample out. Groups after the first ten thousand share one run, so that the list is short enough
    for a browser.
    """
    there = np.flatnonzero(sizes)
    marks = (sizes.astype(np.uint64) << np.uint64(32)) ^ checksums.astype(np.uint64)
    order = there[np.argsort(marks[there], kind="stable")]
    new = np.flatnonzero(np.diff(marks[order], prepend=~marks[order[:1]]) != 0)
    counts = np.diff([*new.tolist(), len(order)])
    groups = [order[first : first + count] for first, count in zip(new[counts > 1], counts[counts > 1], strict=True)]
    groups.sort(key=lambda group: int(group[0]))
    firsts = np.cumsum([0, *map(len, groups)]).tolist()
    named = (keys[int(group[0])] if i < _MOST_GROUPS else "" for i, group in enumerate(groups))
    runs = [Run(name, first, len(group)) for name, first, group in zip(named, firsts, groups, strict=False)]
    joined = np.concatenate([np.zeros(0, np.int64), *groups])
    return OrderColumn(joined.astype(np.uint32), _shortened(runs, len(joined), "groups"))


def _with_rest(runs: list[Run], known: int, total: int) -> list[Run]:
    return [*runs, Run(UNKNOWN, known, total - known)] if total > known else runs


# --- Reading every sample of a split once, in the background, for damage and for facts without an index.
# The bytes of each field are compared with the checksum in the index, and the header of each image with its columns.
# Without an index, the same pass gives the columns: sides, format, bytes and checksum of each image.


class Scan:
    """One pass over a split, in a separate thread.

    done: number of samples read. faulty: whether each sample is damaged, bool [n]. info, sizes, checksums: headers,
    bytes and CRC32C of the images of a source without an index, each [n]; 0 for an unreadable image.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._failure = ""
        self.faulty = np.zeros(len(reader), np.bool_)
        self.done = 0
        count = len(reader) if isinstance(reader.table.columns, MemoryColumns) else 0
        self.info = headers_of([None] * count)
        self.sizes, self.checksums = np.zeros(count, np.int64), np.zeros(count, np.uint32)

    def start(self) -> None:
        """Start the pass, if it has not been started."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="packer-view-scan", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Stop the pass, whether or not it is finished."""
        self._stop.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    @property
    def finished(self) -> bool:
        return self.done == len(self._reader) and (self._thread is None or not self._thread.is_alive())

    def progress(self) -> dict[str, Any]:
        """The progress, for documents."""
        error = {"error": {"type": "ScanError", "message": self._failure}} if self._failure else {}
        return {"done": self.done, "total": len(self._reader), **error}

    def _run(self) -> None:
        try:
            for index in range(len(self._reader)):
                if self._stop.is_set():
                    return
                faults = [self._examine(index, field) for field in self._reader.fields]
                self.faulty[index] = any(faults)
                self.done = index + 1
        except (PackerError, OSError, MemoryError) as error:
            self._failure = str(error) or type(error).__name__

    def _examine(self, index: int, field: str) -> str:
        """Read a field of a sample, and return its fault, "" for none."""
        data, fault = examined(self._reader, index, field)
        if field != "image" or not len(self.sizes) or data is None:
            return fault
        header = headers_of([data])
        for name in ImageInfo._fields:
            getattr(self.info, name)[index] = getattr(header, name)[0]
        self.sizes[index], self.checksums[index] = len(data), crc32c(data)
        return fault if int(header.height[0]) else "the header of the image cannot be read"


def examined(reader: Reader, index: int, field: str) -> tuple[Buffer | None, str]:
    """(the bytes of a field, its fault). Bytes are None if the field is missing or unreadable; the fault is "" if none.

    The bytes are compared with the checksum in the index, and the header of an image with its columns.
    """
    try:
        data = reader.read(index, field) if reader.has(index, field) else None
    except UnknownNameError:  # a source shows only at the read that the sample lacks the field
        return None, ""
    except (PackerError, OSError) as error:
        return None, f"field {field}: {error}"
    fault, columns = "", reader.table.columns
    if not isinstance(columns, MemoryColumns):
        if data is not None and columns.has_checksums:
            actual, expected = checksum_of(reader, field, data), int(reader.table.field_column(field, "crc32c")[index])
            if actual != expected:
                fault = f"field {field} is damaged: CRC32C {actual:08x}, expected {expected:08x}"
        if field == "image" and not fault and reader.table.has_headers:
            fault = header_difference(reader.info, index, data)
    return data, fault


def checksum_of(reader: Reader, field: str, data: Buffer) -> int:
    """The CRC32C of a field, as stored in an index."""
    return int(crc32c(stored_bytes(data) if reader.kinds[field] == PIXELS else data))


FORMAT = 1
_TITLES = {
    "bytes": "file size",
    "size": "number of pixels",
    "side": "shorter side",
    "aspect": "aspect ratio",
    "media": "file format",
    "mistakes": "mistakes, worst first",
    "confusion": "given → predicted",
}
_MOST_CLASSES = 200  # bars of a histogram
_MOST_INLINE = 100_000  # characters of a list in view.json; a longer list has a separate document
_KEPT_SELECTIONS = 16
_COLUMN = "column-"  # prefix of the names of orders by a column of the table, before its number
_LISTED = frozenset({"class", "key", "unlabelled", "mistakes", "confusion"})  # orders that only need a listing
_PROBED, _MOST_COLUMNS = 100, 100
_MOST_SEARCHED = 256 << 20  # bytes of texts
_HEADER_NAMES = {"width", "height", "min_side", "max_side", "pixels", "aspect", "medium", "orientation", "components"}


class Pending(Exception):
    """Raised for a request that needs all samples to be read, while they are being read."""

    def __init__(self, scan: Scan) -> None:
        super().__init__("all samples are being read")
        self.scan = scan


class SplitView:
    """A split to view, with its reader, columns, orders and histograms."""

    def __init__(self, name: str, reader: Reader, predictions: Predictions | None = None) -> None:
        if len(reader) >= 1 << 32:
            raise ValueError(f"{reader}: has more samples than can be shown (2^32); view a part of it")
        self.name, self.reader, self.predictions = name, reader, predictions
        self.scan = Scan(reader)
        self.indexed = not isinstance(reader.table.columns, MemoryColumns)
        self._lock = threading.RLock()
        self._orders: dict[str, OrderColumn] = {}
        self._selections: OrderedDict[tuple[str, ...], tuple[str, OrderColumn]] = OrderedDict()
        self._histograms: dict[str, dict[str, Any]] = {}
        self._edges: dict[str, Histogram] = {}

    # --- columns ----------------------------------------------------------------------------------------------------
    @property
    def info(self) -> ImageInfo | None:
        """The header facts of the images; None while unknown."""
        if self.indexed or self.reader.table.has_headers:
            return self.reader.info
        return self.scan.info if self.scan.finished else None

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Bytes of the images, 0 if unknown."""
        if "image" not in self.reader.fields:
            return np.zeros(len(self.reader), np.int64)
        return self.scan.sizes if not self.indexed and self.scan.finished else self.reader.sizes()

    @property
    def checksums(self) -> npt.NDArray[np.uint32] | None:
        """CRC32C of the images; None while unknown."""
        if self.indexed:
            known = self.reader.table.columns.has_checksums and "image" in self.reader.fields
            return self.reader.table.field_column("image", "crc32c") if known else None
        return self.scan.checksums if self.scan.finished else None

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """The known columns, by the file names of an index."""
        return columns_of(self.reader, self.info)

    @property
    def more_columns(self) -> dict[str, npt.NDArray[Any]]:
        """Columns that no index has, by name: those of predictions."""
        predictions = self.predictions
        return {} if predictions is None else {"predicted": predictions.labels, "score": predictions.scores}

    @cached_property
    def table_columns(self) -> tuple[str, ...]:
        """The columns of the table of the samples, found in the first samples."""
        first = np.arange(min(len(self.reader), _PROBED))
        with suppress(PackerError):
            return tuple(json_columns(json_payloads(self.reader, first), ()))[:_MOST_COLUMNS]
        return ()

    # --- orders -----------------------------------------------------------------------------------------------------
    @property
    def order_names(self) -> list[str]:
        """The names of all orders except "stored"."""
        labelled = self.reader.labels >= 0
        names = ["class"] if labelled.any() else []
        names += [*BINNED, "media"] if "image" in self.reader.fields else []
        names += ["key"] if "key" in self.columns() else []
        names += ["unlabelled"] if not labelled.all() else []
        names += ["mistakes", "confusion"] if self.predictions is not None else []
        return [*names, *(f"{_COLUMN}{i}" for i in range(len(self.table_columns))), "duplicates", "damaged"]

    def order(self, name: str) -> OrderColumn:
        """An order, computed at the first request. Raises Pending and UnknownNameError."""
        with self._lock:
            for number, selection in self._selections.values():
                if number == name:
                    return selection
            if name not in self._orders:
                if name not in self.order_names:
                    raise UnknownNameError(f"there is no order {name!r}; there are {', '.join(self.order_names)}")
                self._orders[name] = self._computed(name)
            return self._orders[name]

    def title(self, name: str) -> str:
        """The title of an order."""
        if name.startswith(_COLUMN):
            return self.table_columns[int(name.removeprefix(_COLUMN))]
        return _TITLES.get(name, name)

    def needs_scan(self, name: str) -> bool:
        """Whether an order needs all samples to be read, and they have not been."""
        if self.scan.finished or name in _LISTED or name.startswith(_COLUMN):
            return False
        if name == "duplicates":
            return self.checksums is None
        return name == "damaged" or (not self.sizes.any() if name == "bytes" else self.info is None)

    def _computed(self, name: str) -> OrderColumn:
        if self.needs_scan(name):
            self.scan.start()
            raise Pending(self.scan)
        reader, info = self.reader, self.info
        if name == "stored":
            return OrderColumn(np.arange(len(reader), dtype=np.uint32), [])
        if name.startswith(_COLUMN):
            column = self.table_columns[int(name.removeprefix(_COLUMN))]
            return by_value(json_columns(json_payloads(reader, np.arange(len(reader))), (column,))[column])
        if self.predictions is not None and name in ("mistakes", "confusion"):
            return self.predictions.order(name, reader.labels, reader.classes)
        if name == "class":
            return by_class(reader.labels, reader.classes)
        if name == "key":
            return by_key(reader.table.columns.keys())
        if name == "duplicates":
            sums = self.checksums
            if sums is None:
                return OrderColumn(np.zeros(0, np.uint32), [])
            return same_bytes(self.sizes, sums, reader.keys)
        if name in ("unlabelled", "damaged"):
            chosen = reader.labels == NO_LABEL if name == "unlabelled" else self.scan.faulty
            return OrderColumn(np.flatnonzero(chosen).astype(np.uint32), [])
        if name == "media":
            assert info is not None
            return by_medium(info.media)
        values = values_of(name, info, self.sizes)
        if values is None:
            values = np.full(len(reader), np.nan)
        return by_number(values, self._histogram(name, values).edges)

    def select(self, text: str, search: str = "", order: str = "stored") -> tuple[str, OrderColumn]:
        """Select samples, and return the name of the selection and its order.

        text: an expression of `readers.where`; "" for all samples.
        search: a part of the key, of the class name, or of a text or JSON field, ignoring case; "" for no search.
        order: the order whose sequence and runs the samples keep.

        Raises ValueError, UnknownNameError and Pending.
        """
        request, where = (text, search, order), parse_where(text) if text else None
        with self._lock:
            if request in self._selections:
                return self._selections[request]
            if where is not None and where.names & _HEADER_NAMES and self.info is None:
                self.scan.start()
                raise Pending(self.scan)
        whole = self.order(order) if order != "stored" else self._computed(order)
        facts = TableFacts(
            self.reader.table,
            self._headers,
            self.name,
            columns=lambda names: json_columns(json_payloads(self.reader, np.arange(len(self.reader))), names),
        )
        mask = np.ones(len(self.reader), np.bool_) if where is None else where.mask(facts)
        if search:
            mask &= self._found(search.casefold(), facts, mask)
        with self._lock:
            number = 1 + max((int(name.removeprefix("where-")) for name, _ in self._selections.values()), default=0)
            self._selections[request] = f"where-{number}", chosen_of(whole, mask)
            while len(self._selections) > _KEPT_SELECTIONS:
                self._selections.popitem(last=False)
            return self._selections[request]

    def _found(self, search: str, facts: TableFacts, mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Whether each sample contains a text, bool [n]; fields are searched only in a mask. Raises ValueError."""
        matches = facts.texts("key").where(lambda text: search in text.casefold())
        matches |= facts.texts("class_name").where(lambda text: search in text.casefold())
        names = [name for name in self.reader.fields if self.reader.kinds[name] in ("text", "json")]
        rest = np.flatnonzero(mask & ~matches)
        size = sum(int(self.reader.sizes(name)[rest].sum()) for name in names)
        if size > _MOST_SEARCHED:
            raise ValueError(
                f"the texts to be searched have {human_bytes(size)}, expected at most {human_bytes(_MOST_SEARCHED)}: "
                "choose fewer samples with an expression first"
            )
        for name in names:
            for index, (_, data) in zip(rest, field_payloads(self.reader, rest, name), strict=True):
                matches[index] |= data is not None and search in _text_of(data)
        return matches

    def _headers(self) -> ImageInfo:
        info = self.info
        assert info is not None
        return info

    # --- histograms -------------------------------------------------------------------------------------------------
    def histograms(self) -> dict[str, Any]:
        """The histograms that need no further samples to be read, for documents."""
        with self._lock:
            for name, (title, unit) in BINNED.items():
                if name not in self._histograms and "image" in self.reader.fields:
                    values = values_of(name, self.info, self.sizes)
                    if values is not None:
                        histogram = self._histogram(name, values)
                        numbers = {"edges": histogram.edges.tolist(), "counts": histogram.counts.tolist()}
                        self._histograms[name] = {"title": title, "unit": unit, **numbers, "order": name}
            if "media" not in self._histograms and self.info is not None and "image" in self.reader.fields:
                counts = np.bincount(self.info.media, minlength=len(MEDIA))
                found_media = [(name, int(count)) for name, count in zip(MEDIA[1:], counts[1:], strict=False) if count]
                self._histograms["media"] = _named("file format", "media", found_media)
            labels = self.reader.labels
            if "class" not in self._histograms and (labels >= 0).any() and int(labels.max()) < _MOST_CLASSES:
                runs = [run for run in self.order("class").runs if run.name]
                self._histograms["class"] = _named("class", "class", [(run.name, run.samples) for run in runs])
            return dict(self._histograms)

    def _histogram(self, name: str, values: npt.NDArray[np.float64]) -> Histogram:
        if name not in self._edges:
            self._edges[name] = histogram(values)
        return self._edges[name]


def _text_of(data: Buffer) -> str:
    """The text of a field, case-folded for searching; JSON has its escapes resolved."""
    text = bytes(data).decode("utf-8", "replace")
    with suppress(ValueError, RecursionError):
        text = json.dumps(json.loads(text), ensure_ascii=False) if text[:1] in "[{" and "\\" in text else text
    return text.casefold()


def _named(title: str, order: str, bars: list[tuple[str, int]]) -> dict[str, Any]:
    names, counts = [name for name, _ in bars], [count for _, count in bars]
    return {"title": title, "unit": "", "names": names, "counts": counts, "order": order}


def order_document(order: OrderColumn, url: str) -> dict[str, Any]:
    """The document of an order."""
    runs = [list(run) for run in order.runs]
    return {"url": url, "start": len(Column(order.values).header), "count": len(order.values), "runs": runs}


class View:
    """A view of a place, with its splits and documents."""

    def __init__(self, place: Place, predictions: str | os.PathLike[str] | None = None) -> None:
        self.place = place
        by_split = {} if predictions is None else read_predictions(predictions, place.splits)
        self.splits = {name: SplitView(name, reader, by_split.get(name)) for name, reader in place.splits.items()}
        self._warming = threading.Thread(target=self._warm, name="packer-view-warm", daemon=True)
        self._warming.start()

    def _warm(self) -> None:
        """Compute the histograms of view.json while the browser starts; errors are reported at the request."""
        for split in self.splits.values():
            with suppress(PackerError):
                split.histograms()

    def close(self) -> None:
        """Stop background work, and close the place."""
        self._warming.join()
        for split in self.splits.values():
            split.scan.stop()
        self.place.close()

    @property
    def classes(self) -> tuple[str, ...]:
        return next((split.reader.classes for split in self.splits.values() if split.reader.classes), ())

    def document(self, batches: dict[str, Any] | None) -> dict[str, Any]:
        """The content of `view.json` for a live server. batches: `abilities` of its previews."""
        first = next(iter(self.splits.values()))
        inline = sum(map(len, self.classes)) <= _MOST_INLINE
        return {
            "format": FORMAT,
            "name": self.place.name,
            "address": self.place.address,
            "container": self.place.container,
            "live": True,
            **({"classes": list(self.classes)} if inline else {"classes": None, "classes_url": "classes.json"}),
            "fields": [{"name": name, "kind": first.reader.kinds[name]} for name in first.reader.fields],
            "media": list(MEDIA),
            "splits": {name: self.split_document(split) for name, split in self.splits.items()},
            "predictions": first.predictions and {"unknown": first.predictions.unknown},
            "can": {"where": True, "batches": batches or False, "damaged": True},
        }

    def split_document(self, split: SplitView) -> dict[str, Any]:
        """The part of `document` for a split."""
        part = quote(split.name, safe="")
        orders: dict[str, Any] = {"stored": None}
        for name in split.order_names:
            orders[name] = {
                "title": split.title(name),
                "pending": True,
                "document": f"order/{part}/{name}.json",
                "scan": split.needs_scan(name),
            }
        described = {
            name: Column(values).described(f"column/{part}/{quote(name, safe='')}.npy")
            for name, values in (split.columns() | split.more_columns).items()
        }
        shards = () if self.place.dataset is None else self.place.dataset.splits[split.name].shards
        if sum(len(shard.path) + 40 for shard in shards) > _MOST_INLINE:  # the document of a sample names its shard
            shards = ()
        return {
            "samples": len(split.reader),
            "bytes": int(split.sizes.sum()),
            "columns": described,
            "shards": [{"url": None, "bytes": shard.bytes, "path": shard.path} for shard in shards],
            "orders": orders,
            "histograms": split.histograms(),
        }


def open_view(
    place: str | os.PathLike[str], split: str | None, predictions: str | os.PathLike[str] | None = None
) -> View:
    """Open a view of a place. Raises the errors of `open_place` and `read_predictions`."""
    opened = open_place(place, split)
    try:
        return View(opened, predictions)
    except BaseException:
        opened.close()
        raise
