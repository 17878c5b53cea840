"""Which samples a cache keeps, where their slots are, and how many bytes they take.

Where not all samples fit, those whose hash is below a threshold are kept. The hash is of the sample's row alone, so
every process and every job chooses the same ones, in any order of epochs; the samples of a smaller cache are among
those of a larger one. Nothing is evicted: each sample is read once an epoch, so a fixed share of the samples gives its
share of hits, where keeping the latest ones would give none.

Sizes are exact where the index has them, else estimated from a few samples from all over the set. Nothing here has an
array as long as the set: samples are processed in runs of about a million.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cache import SharedByteCache
from cache.filesystem import Budget, cache_budget
from cache.messages import parse_size
from cache.stores import Buffer
from readers.caching.form import Coefficients, Form, compressed_share, may_pay, rate_of, with_rate
from readers.headers import MEDIA, sniff
from readers.order.permutation import Permutation, UInt64s, counter_hash, derive_keys
from readers.reader import SAMPLE_ERRORS, Reader, read_good
from readers.sample import headers_of

__all__ = [
    "EVERYTHING",
    "Capacity",
    "Measures",
    "Slots",
    "Subset",
    "budget",
    "measure",
]

Capacity: TypeAlias = int | float | str
_PEEKED, _TAKEN, _TAKEN_BYTES = 16, 256, 32 << 20
_MARGIN = 1.1  # of estimates: missing room costs hits, spare room costs little
_SLOT_BYTES = 64  # a payload begins at a multiple of this
_TERMS_BYTES = 4096
_SLACK = 200  # 1/200 is left for payloads that are stored again after their bytes were damaged
_COMPRESSED = tuple(MEDIA.index(name) for name in ("jpeg", "png", "webp", "gif"))
EVERYTHING = 1 << 64  # the threshold that keeps all
_KEY = derive_keys(0, 0, "kept in a cache")[0]
_RUN = 1 << 20
_MASK = EVERYTHING - 1
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_SHIFT = np.uint64(48)
_BINS = 1 << 16
_Ints = npt.NDArray[np.int64]
Weights: TypeAlias = Callable[[_Ints], _Ints]


@dataclass(frozen=True, eq=False)
class Subset:
    """The `rows` (a range, or int64 in rising order) whose hash is below `threshold` (0 to 2^64)."""

    rows: range | _Ints
    threshold: int = EVERYTHING

    def __len__(self) -> int:
        """All rows, kept or not."""
        return len(self.rows)

    def rank(self, row: int) -> int:
        """The position of a row among `rows`; -1 for any other."""
        rows = self.rows
        if isinstance(rows, range):
            return row - rows.start if rows.start <= row < rows.stop else -1
        at = bisect_left(rows.data, row)
        return at if at < len(rows) and rows[at] == row else -1

    def ranks(self, rows: _Ints) -> _Ints:
        """`rank` of many rows."""
        if isinstance(self.rows, range):
            inside = (rows >= self.rows.start) & (rows < self.rows.stop)
            return np.where(inside, rows - self.rows.start, -1)
        at = np.searchsorted(self.rows, rows)
        found = np.append(self.rows, -1)[at] == rows
        return np.where(found, at, -1)

    def keeps(self, row: int) -> bool:
        """Whether a row is kept."""
        return self.rank(row) >= 0 and (self.threshold == EVERYTHING or _hash(row) < self.threshold)

    def mask(self, rows: _Ints) -> npt.NDArray[np.bool_]:
        """Which of these are kept, bool of the same shape."""
        return (self.ranks(rows) >= 0) & self._below(rows)

    def kept(self) -> Iterator[_Ints]:
        """The rows that are kept, in stored order, in runs."""
        for run in self._runs():
            yield run[self._below(run)]

    def total(self, weights: Weights) -> int:
        """Sum of the weights of the rows that are kept."""
        return sum(int(weights(run).sum()) for run in self.kept())

    def limited(self, limit: int, weights: Weights) -> Subset:
        """With the largest threshold at which the weights of the kept rows add up to at most `limit`.

        weights: gives those of some rows, int64, 0 or more each.
        """
        totals = np.zeros(_BINS, np.int64)
        for run in self._runs():
            bins = (counter_hash(_KEY, run) >> _SHIFT).astype(np.int64)
            np.add.at(totals, bins, weights(run))
        below = np.cumsum(totals)
        if not len(below) or int(below[-1]) <= limit:
            return replace(self, threshold=EVERYTHING)
        number = int(np.searchsorted(below, limit, side="right"))
        left = limit - (int(below[number - 1]) if number else 0)
        hashes, heavy = self._bin(number, weights)
        order = np.argsort(hashes)
        fits = int(np.searchsorted(np.cumsum(heavy[order]), left, side="right"))
        return replace(self, threshold=int(hashes[order[fits]]))

    def spread(self, count: int) -> _Ints:
        """At most `count` rows from everywhere, always the same ones, in stored order."""
        wanted = np.arange(min(count, len(self)), dtype=np.int64)
        ranks = np.sort(Permutation(len(self), 0, purpose="measured").forward(wanted))
        return ranks + self.rows.start if isinstance(self.rows, range) else self.rows[ranks]

    def _below(self, rows: _Ints) -> npt.NDArray[np.bool_]:
        if self.threshold == EVERYTHING:
            return np.ones(len(rows), np.bool_)
        below: npt.NDArray[np.bool_] = counter_hash(_KEY, rows) < np.uint64(self.threshold)
        return below

    def _bin(self, number: int, weights: Weights) -> tuple[UInt64s, _Ints]:
        """Hashes and weights of the rows whose hash begins with `number`."""
        hashes, heavy = [], []
        for run in self._runs():
            found = counter_hash(_KEY, run)
            inside = (found >> _SHIFT) == np.uint64(number)
            hashes.append(found[inside])
            heavy.append(weights(run[inside]))
        return np.concatenate(hashes), np.concatenate(heavy)

    def _runs(self) -> Iterator[_Ints]:
        for first in range(0, len(self), _RUN):
            part = self.rows[first : first + _RUN]
            yield np.arange(part.start, part.stop, dtype=np.int64) if isinstance(part, range) else part


def _hash(row: int) -> int:
    """`counter_hash` of one number, in Python's own integers: a microsecond, where NumPy takes twenty."""
    value = (int(row) * _GOLDEN + int(_KEY)) & _MASK
    value = ((value ^ value >> 30) * _MIX_1) & _MASK
    value = ((value ^ value >> 27) * _MIX_2) & _MASK
    return value ^ value >> 31


@dataclass(frozen=True)
class Slots:
    """The slots of a cache: 0 is for what its users agree on, then one for each row of the subset, field by field.

    numbers: positions of the kept fields among the `width` fields of the table.
    """

    fields: tuple[str, ...]
    numbers: tuple[int, ...]
    width: int
    subset: Subset

    def __len__(self) -> int:
        return 1 + len(self.fields) * len(self.subset)

    def first(self, field: str) -> int:
        """The slot of a field's first row."""
        return 1 + self.fields.index(field) * len(self.subset)

    def one(self, row: int) -> int:
        """The slot of an extent, by its row; -1 for none."""
        sample, number = divmod(row, self.width)
        rank = self.subset.rank(sample) if number in self.numbers else -1
        return rank if rank < 0 else 1 + self.numbers.index(number) * len(self.subset) + rank

    def many(self, rows: _Ints) -> _Ints:
        """`one` for many extents."""
        samples, numbers = np.divmod(rows, self.width)
        firsts = np.full(self.width, -1, np.int64)
        firsts[list(self.numbers)] = 1 + np.arange(len(self.numbers)) * len(self.subset)
        ranks, first = self.subset.ranks(samples), firsts[numbers]
        return np.where((ranks < 0) | (first < 0), -1, first + ranks)


@dataclass(frozen=True)
class Measures:
    """What samples take in a cache.

    reader: over all rows of the columns.
    form: with its measured rate, where it has one.
    shares: of the bytes of each field that compression leaves.
    mean: bytes of a converted image, where no index has its header.
    """

    reader: Reader
    slots: Slots
    form: Form
    shares: Mapping[str, float]
    mean: float

    def weights(self) -> Weights:
        """Estimated bytes of rows with all their fields."""
        columns = {name: self.reader.sizes(name) for name in self.slots.fields}

        def of(rows: _Ints) -> _Ints:
            total = np.zeros(len(rows), np.int64)
            for name, sizes in columns.items():
                total += self._stored(name, rows, sizes[rows])
            return total

        return of

    def _stored(self, name: str, rows: _Ints, sizes: _Ints) -> _Ints:
        if name == "image" and self.form.converts:
            return _padded(self._converted(rows, sizes))
        share = self.shares.get(name, 1.0)
        found = np.minimum(sizes, np.ceil(sizes * share * _MARGIN).astype(np.int64)) if share < 1 else sizes
        return np.where(sizes > 0, _padded(found), 0) if name != "image" else _padded(found)

    def _converted(self, rows: _Ints, sizes: _Ints) -> _Ints:
        if not self.reader.table.has_headers:
            mean = np.full(len(rows), int(self.mean * _MARGIN) + 1, np.int64)
            if not isinstance(self.form, Coefficients):
                return mean
            return np.where(sizes > 0, np.ceil(sizes * self.form.rate * _MARGIN).astype(np.int64), mean)
        form = with_rate(self.form, rate_of(self.form) * _MARGIN)
        return form.bytes(form.info(self.reader.image_info(rows)), sizes)


def measure(reader: Reader, slots: Slots, form: Form, compress: bool) -> Measures:
    """Measure a few samples where needed: none of an indexed set of JPEGs that are kept unchanged or decoded."""
    shares: dict[str, float] = {}
    mean = 0.0
    for name in slots.fields:
        if name == "image" and form.converts:
            if rate_of(form) or not reader.table.has_headers:
                rate, mean = _converted(reader, slots, form)
                form = with_rate(form, rate)
        elif compress:
            share = _compressed(reader, slots, name)
            if share < 1:
                shares[name] = share
    return Measures(reader, slots, form, shares, mean)


def budget(capacity: Capacity, measures: Measures, directory: Path | None) -> tuple[int, int]:
    """(threshold of the subset, bytes to reserve); 0 bytes: no cache. directory: None for memory that has none.

    Raises ValueError for an invalid capacity, and `cache.errors.CacheError`.
    """
    every, weights = measures.slots.subset, measures.weights()
    asked, share = _parse_capacity(capacity)
    if not len(every) or share == 0 or asked == 0:
        return 0, 0
    if share is not None:
        chosen = every.limited(round(share * len(every)), lambda run: run * 0 + 1)
        kept = chosen.total(weights)
        return chosen.threshold, _TERMS_BYTES + kept + kept // _SLACK
    payload = every.total(weights)
    whole = _TERMS_BYTES + payload + payload // _SLACK
    room = cache_budget(directory) if asked is None else None
    table = SharedByteCache.table_bytes(len(measures.slots))
    limit = min(whole, max(0, room.bytes - table) if room is not None else asked or 0)
    if limit >= whole:
        return every.threshold, whole
    chosen = every.limited(max(0, limit - _TERMS_BYTES - limit // _SLACK), weights)
    kept = sum(len(run) for run in chosen.kept())
    if room is not None and (room.is_cramped or not kept):
        warnings.warn(
            f"the cache keeps {kept:,} of {len(every):,} samples: {_explain(room, directory, whole)}", stacklevel=4
        )
    elif not kept:
        largest = max(int(weights(run).max(initial=0)) for run in every.kept())
        least = (_TERMS_BYTES + largest + 1) * _SLACK // (_SLACK - 1) + 1
        warnings.warn(
            f"a capacity of {asked:,} bytes keeps no sample, so everything passes through: one takes up to "
            f"{least:,} bytes, all {len(every):,} take {whole:,}",
            stacklevel=4,
        )
    return (chosen.threshold, limit) if kept else (0, 0)


def _compressed(reader: Reader, slots: Slots, name: str) -> float:
    """The share of a field's bytes that compression leaves."""
    chosen = slots.subset.spread(_TAKEN)
    if name == "image" and reader.table.has_headers:
        media = reader.image_info(chosen).media
        if len(media) and np.isin(media, _COMPRESSED).mean() > 0.9:
            return 1.0
    elif not may_pay(_some(reader, slots.subset.spread(_PEEKED), name)):
        return 1.0
    sizes = reader.sizes(name)[chosen]
    taken = chosen[(sizes > 0) & (np.cumsum(sizes) <= max(_TAKEN_BYTES, int(sizes.max(initial=0))))]
    return compressed_share(_some(reader, taken, name))


def _converted(reader: Reader, slots: Slots, form: Form) -> tuple[float, float]:
    """(rate, bytes of an image) in the kept form.

    The rate is the bytes per pixel of images that change; of coefficients per byte of a JPEG, or of any image where no
    index says which images are JPEGs.
    """
    found = []
    for image in _some(reader, slots.subset.spread(4 * _PEEKED), "image"):
        with suppress(*SAMPLE_ERRORS):
            found.append((form.convert(image), image))
    if not found:
        return 1.0, 0.0
    sizes = np.array([len(converted) for converted, _ in found])
    if isinstance(form, Coefficients):
        before = np.array([len(image) for _, image in found])
        rated = np.array([sniff(image) == "jpeg" or not reader.table.has_headers for _, image in found])
        return float(sizes[rated].sum() / max(1, before[rated].sum())) or 1.0, float(sizes.mean())
    info = headers_of(converted for converted, _ in found)
    changed = np.array([converted is not image for converted, image in found])
    pixels = (info.height.astype(np.int64) * info.width)[changed]
    rate = float(sizes[changed].sum() / pixels.sum()) if pixels.sum() else 1.0
    return rate, float(sizes.mean())


def _some(reader: Reader, indices: _Ints, name: str) -> list[Buffer]:
    return [data for data in read_good(reader, indices, name) if data is not None]


def _explain(room: Budget, directory: Path | None, whole: int) -> str:
    """What limits the room, and what to do about it."""
    if room.is_cramped:
        return (
            f"{directory} has {room.size_bytes or 0:,} bytes, the set takes {whole:,}; start a container with "
            f"--shm-size (or --ipc=host), or name a larger tmpfs with directory="
        )
    found = room.memory_bytes if room.memory_bytes is not None else room.directory_bytes
    if room.memory_bytes is not None and room.directory_bytes is not None:
        found = min(room.memory_bytes, room.directory_bytes)
    where = "of memory" if found == room.memory_bytes else f"in {directory}"
    return f"only {found:,} bytes {where} are free, which is the margin; ask for more, or see  packer cache ls"


def _parse_capacity(capacity: Capacity) -> tuple[int | None, float | None]:
    """(bytes, None), (None, share) or, for "auto", (None, None)."""
    if isinstance(capacity, bool) or not isinstance(capacity, int | float | str):
        raise ValueError(f'capacity is "auto", bytes, a text such as "20GiB", or a share from 0 to 1, not {capacity!r}')
    if capacity == "auto":
        return None, None
    if isinstance(capacity, str) and capacity.strip().endswith("%"):
        capacity = float(capacity.strip()[:-1]) / 100
    if isinstance(capacity, float):
        if not 0 <= capacity <= 1:
            raise ValueError(f"capacity as a share is from 0 to 1, not {capacity}; bytes are an int")
        return None, capacity
    size = parse_size(capacity) if isinstance(capacity, str) else capacity
    if size < 0:
        raise ValueError(f"capacity is {size} bytes, expected 0 or more")
    return size, None


def _padded(sizes: _Ints) -> _Ints:
    """Bytes that payloads take in the cache."""
    return np.maximum(_SLOT_BYTES, -(-sizes // _SLOT_BYTES) * _SLOT_BYTES)
