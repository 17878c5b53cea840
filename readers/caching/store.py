"""A cache over any store: payloads in their kept form, in memory that the processes of a node share.

A hit is a view of shared memory, without a lock or a copy (unless it was compressed). A miss is read from the store
below, together with the other misses of the batch, converted, and stored for all processes. Payloads that do not fit
are returned without being stored. Views stay valid as long as they are referenced: nothing is evicted or overwritten.

The shared memory has numbered slots:

    0                      the settings that all users share, as JSON
    then, field by field   one slot for each row of the subset
"""

from __future__ import annotations

import json
import time
import warnings
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from cache import SharedByteCache
from cache.errors import StaleIndexError
from cache.filesystem import Budget, cache_budget
from cache.messages import parse_size
from cache.stores import Buffer, Extents, Int64s, Store, StoreOver
from cache.stores.base import TIERS, Payloads
from readers.caching.form import Coefficients, Form, compress, compressed_share, decompress, may_pay, rate_of, with_rate
from readers.headers import MEDIA, sniff
from readers.order.base import Permutation, UInt64s, counter_hash, derive_keys
from readers.reader import SAMPLE_ERRORS, Reader, read_good
from readers.table import Columns, headers_of

_AGREE_SECONDS = 2.0


@dataclass(frozen=True)
class CacheSettings:
    """The settings on which the users of a cache must agree; the first process writes them into the shared memory.

    threshold: see `Subset`.
    packed: the fields that are compressed.
    rate: the form's measured rate; 0 for forms without one.
    """

    threshold: int
    packed: tuple[str, ...] = ()
    rate: float = 0.0

    def to_json(self) -> bytes:
        return json.dumps({"threshold": self.threshold, "packed": self.packed, "rate": self.rate}).encode()


def agree(shared: SharedByteCache, proposed: CacheSettings) -> CacheSettings | None:
    """The settings of the first process; None if they cannot be read."""
    until = time.monotonic() + _AGREE_SECONDS
    while True:
        text = shared.get(0)
        if text is not None:
            try:
                content = json.loads(bytes(text))
                return CacheSettings(
                    int(content["threshold"]), tuple(map(str, content["packed"])), float(content["rate"])
                )
            except (ValueError, KeyError, TypeError):
                return None
        # Refused while another process writes its settings.
        if not shared.put(0, proposed.to_json()) and time.monotonic() > until:
            return None
        time.sleep(0.001)


# The subset of samples that a cache keeps, their slots, and their bytes.
#
# If not all samples fit, those whose hash is below a threshold are kept. The hash depends only on the sample's row, so
# every process and every job chooses the same samples, in any order of epochs; a smaller cache keeps a subset of a
# larger one. Nothing is evicted: each sample is read once an epoch, so a fixed subset gives hits in proportion to its
# size, whereas keeping the latest samples would give none.
#
# Sizes are exact if the index has them, else estimated from a few samples spread over the set. No array is as long as
# the set: samples are processed in runs of about a million.


Capacity: TypeAlias = int | float | str
_PEEKED, _TAKEN, _TAKEN_BYTES = 16, 256, 32 << 20
_MARGIN = 1.1  # factor on estimates: missing room costs hits, spare room costs little
_SLOT_BYTES = 64  # payloads are aligned to this
_SETTINGS_BYTES = 4096
_SLACK = 200  # 1/200 of the room is for payloads that are stored again after damage
_COMPRESSED = tuple(MEDIA.index(name) for name in ("jpeg", "png", "webp", "gif"))
EVERYTHING = 1 << 64  # the threshold that keeps all rows rows rows
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
    """The `rows` (a range, or ascending int64) whose hash is below `threshold` (0 to 2^64)."""

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
        return np.where(np.append(self.rows, -1)[at] == rows, at, -1)

    def keeps(self, row: int) -> bool:
        """Whether a row is kept."""
        return self.rank(row) >= 0 and (self.threshold == EVERYTHING or _hash(row) < self.threshold)

    def mask(self, rows: _Ints) -> npt.NDArray[np.bool_]:
        """Whether each of `rows` is kept, bool of the same shape."""
        return (self.ranks(rows) >= 0) & self._below(rows)

    def kept(self) -> Iterator[_Ints]:
        """The kept rows in stored order, in runs."""
        for run in self._runs():
            yield run[self._below(run)]

    def total(self, weights: Weights) -> int:
        """Sum of the weights of the kept rows."""
        return sum(int(weights(run).sum()) for run in self.kept())

    def limited(self, limit: int, weights: Weights) -> Subset:
        """The subset with the largest threshold at which the weights of its rows sum to at most `limit`.

        weights: returns the weights of some rows, int64, non-negative.
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
        """At most `count` rows spread over the set, always the same ones, in stored order."""
        numbers = np.arange(min(count, len(self)), dtype=np.int64)
        ranks = np.sort(Permutation(len(self), 0, purpose="measured").forward(numbers))
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
            hashed = counter_hash(_KEY, run)
            inside = (hashed >> _SHIFT) == np.uint64(number)
            hashes.append(hashed[inside])
            heavy.append(weights(run[inside]))
        return np.concatenate(hashes), np.concatenate(heavy)

    def _runs(self) -> Iterator[_Ints]:
        for first in range(0, len(self), _RUN):
            part = self.rows[first : first + _RUN]
            yield np.arange(part.start, part.stop, dtype=np.int64) if isinstance(part, range) else part


def _hash(row: int) -> int:
    """`counter_hash` of one number with Python integers: one microsecond instead of NumPy's twenty."""
    value = (int(row) * _GOLDEN + int(_KEY)) & _MASK
    value = ((value ^ value >> 30) * _MIX_1) & _MASK
    value = ((value ^ value >> 27) * _MIX_2) & _MASK
    return value ^ value >> 31


@dataclass(frozen=True)
class Slots:
    """The slots of a cache: slot 0 has the settings, then one slot for each row of the subset, field by field.

    numbers: positions of the kept fields among all fields of the table.
    payloads: the numbering of the table's payloads.
    """

    fields: tuple[str, ...]
    numbers: tuple[int, ...]
    payloads: Payloads
    subset: Subset

    def __len__(self) -> int:
        return 1 + len(self.fields) * len(self.subset)

    def first(self, field: str) -> int:
        """The slot of a field's first row."""
        return 1 + self.fields.index(field) * len(self.subset)

    def one(self, row: int) -> int:
        """The slot of an extent, by its row; -1 for none."""
        sample, number = divmod(row, self.payloads.width)  # inlined, because it runs for each hit
        rank = self.subset.rank(sample) if number in self.numbers else -1
        return rank if rank < 0 else 1 + self.numbers.index(number) * len(self.subset) + rank

    def many(self, rows: _Ints) -> _Ints:
        """`one` for many extents."""
        samples, numbers = self.payloads.sample(rows), self.payloads.field(rows)
        firsts = np.full(self.payloads.width, -1, np.int64)
        firsts[list(self.numbers)] = 1 + np.arange(len(self.numbers)) * len(self.subset)
        ranks, first = self.subset.ranks(samples), firsts[numbers]
        return np.where((ranks < 0) | (first < 0), -1, first + ranks)


@dataclass(frozen=True)
class Measures:
    """The bytes that samples take in a cache.

    reader: a reader over all rows of the columns.
    form: the form with its measured rate, if it has one.
    shares: for each field, the share of bytes that compression leaves.
    mean: mean bytes of a converted image, if no index has image headers.
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
        stored = np.minimum(sizes, np.ceil(sizes * share * _MARGIN).astype(np.int64)) if share < 1 else sizes
        return np.where(sizes > 0, _padded(stored), 0) if name != "image" else _padded(stored)

    def _converted(self, rows: _Ints, sizes: _Ints) -> _Ints:
        if not self.reader.table.has_headers:
            mean = np.full(len(rows), int(self.mean * _MARGIN) + 1, np.int64)
            if not isinstance(self.form, Coefficients):
                return mean
            return np.where(sizes > 0, np.ceil(sizes * self.form.rate * _MARGIN).astype(np.int64), mean)
        form = with_rate(self.form, rate_of(self.form) * _MARGIN)
        return form.bytes(form.info(self.reader.image_info(rows)), sizes)


def measure(reader: Reader, slots: Slots, form: Form, compress: bool) -> Measures:
    """Measure a few samples if needed; none for an indexed set of JPEGs that are kept unchanged or decoded."""
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
    """(threshold of the subset, bytes to reserve); 0 bytes mean no cache. directory: None for memory without one.

    Raises ValueError for an invalid capacity, and `cache.errors.CacheError`.
    """
    every, weights = measures.slots.subset, measures.weights()
    bytes_asked, share = _parse_capacity(capacity)
    if not len(every) or share == 0 or bytes_asked == 0:
        return 0, 0
    if share is not None:
        chosen = every.limited(round(share * len(every)), lambda run: run * 0 + 1)
        kept = chosen.total(weights)
        return chosen.threshold, _SETTINGS_BYTES + kept + kept // _SLACK
    payload = every.total(weights)
    whole = _SETTINGS_BYTES + payload + payload // _SLACK
    room = cache_budget(directory) if bytes_asked is None else None
    table = SharedByteCache.table_bytes(len(measures.slots))
    limit = min(whole, max(0, room.bytes - table) if room is not None else bytes_asked or 0)
    if limit >= whole:
        return every.threshold, whole
    chosen = every.limited(max(0, limit - _SETTINGS_BYTES - limit // _SLACK), weights)
    kept = sum(len(run) for run in chosen.kept())
    if room is not None and (room.is_cramped or not kept):
        warnings.warn(
            f"the cache keeps {kept:,} of {len(every):,} samples: {_explain(room, directory, whole)}", stacklevel=4
        )
    elif not kept:
        largest = max(int(weights(run).max(initial=0)) for run in every.kept())
        least = (_SETTINGS_BYTES + largest + 1) * _SLACK // (_SLACK - 1) + 1
        warnings.warn(
            f"a capacity of {bytes_asked:,} bytes keeps no sample, so all samples are read without a cache: one takes "
            f"up to {least:,} bytes, all {len(every):,} take {whole:,}",
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
    """(rate, mean bytes of an image) in the kept form.

    The rate is bytes per pixel of images that are converted; for coefficients, bytes per byte of a JPEG, or of any
    image if no index tells which images are JPEGs.
    """
    pairs = []
    for image in _some(reader, slots.subset.spread(4 * _PEEKED), "image"):
        with suppress(*SAMPLE_ERRORS):
            pairs.append((form.convert(image), image))
    if not pairs:
        return 1.0, 0.0
    sizes = np.array([len(converted) for converted, _ in pairs])
    if isinstance(form, Coefficients):
        before = np.array([len(image) for _, image in pairs])
        rated = np.array([sniff(image) == "jpeg" or not reader.table.has_headers for _, image in pairs])
        return float(sizes[rated].sum() / max(1, before[rated].sum())) or 1.0, float(sizes.mean())
    info = headers_of(converted for converted, _ in pairs)
    changed = np.array([converted is not image for converted, image in pairs])
    pixels = (info.height.astype(np.int64) * info.width)[changed]
    rate = float(sizes[changed].sum() / pixels.sum()) if pixels.sum() else 1.0
    return rate, float(sizes.mean())


def _some(reader: Reader, indices: _Ints, name: str) -> list[Buffer]:
    return [data for data in read_good(reader, indices, name) if data is not None]


def _explain(room: Budget, directory: Path | None, whole: int) -> str:
    """The limit of the cache's room, and the remedy."""
    if room.is_cramped:
        return (
            f"{directory} has {room.size_bytes or 0:,} bytes, the set takes {whole:,}; start a container with "
            f"--shm-size (or --ipc=host), or name a larger tmpfs with directory="
        )
    free = room.memory_bytes if room.memory_bytes is not None else room.directory_bytes
    if room.memory_bytes is not None and room.directory_bytes is not None:
        free = min(room.memory_bytes, room.directory_bytes)
    where = "of memory" if free == room.memory_bytes else f"in {directory}"
    return f"only {free:,} bytes {where} are free, which is the margin; request more, or see  packer cache ls"


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
            raise ValueError(f"capacity as a share is from 0 to 1, not {capacity}; give bytes as an int")
        return None, capacity
    size = parse_size(capacity) if isinstance(capacity, str) else capacity
    if size < 0:
        raise ValueError(f"capacity is {size} bytes, expected 0 or more")
    return size, None


def _padded(sizes: _Ints) -> _Ints:
    """Bytes that payloads take in the cache."""
    return np.maximum(_SLOT_BYTES, -(-sizes // _SLOT_BYTES) * _SLOT_BYTES)


Check: TypeAlias = Literal["never", "first", "always"]
CHECKS = ("never", "first", "always")
_COUNTED_TOGETHER = 64
_LEAST_BYTES = 64  # bytes of the shortest payload


class Cached(StoreOver):
    """`source` behind shared memory.

    Without shared memory (`shared` is None) nothing is kept, but images are still converted, except to forms for
    decoders, which accept the original as well.

    columns: the columns to whose rows extents refer.
    check: when payloads are compared with their CRC32C, from the index or else from the shared memory.

    Files that were rewritten since they were listed are never stored, and dropped when they are checked.
    """

    def __init__(
        self,
        source: Store,
        shared: SharedByteCache | None,
        slots: Slots,
        settings: CacheSettings,
        form: Form,
        columns: Columns,
        check: Check = "never",
    ) -> None:
        self.source, self.shared, self.slots, self.settings = source, shared, slots, settings
        self.form, self.columns, self.check_payloads = form, columns, check
        self._setup()

    def _setup(self) -> None:
        self.subset = replace(self.slots.subset, threshold=self.settings.threshold)
        fields = self.columns.fields
        self._image = fields.index("image") if "image" in fields and self.form.converts else -1
        self._packed = {fields.index(name) for name in self.settings.packed}
        self._plain = self.check_payloads == "never" and not self._packed
        self._tracks_files = bool(self.source.state)
        self._checked = bytearray()
        self._hit_bytes: deque[int] = deque()
        # Most sets have one field that is kept unchanged: then the slot is the row plus a constant.
        rows = self.slots.subset.rows
        self._start = self._stop = self._shift = 0
        if self._plain and self.slots.payloads.width == 1 and isinstance(rows, range) and self.shared is not None:
            self._start, self._stop, self._shift = rows.start, rows.stop, 1 - rows.start
            self._fetch = self.shared.get

    # --- reading ------------------------------------------------------------------------------------------------
    def read_one(self, row: int, shard: int, offset: int, length: int) -> Buffer:
        data = self.hit(row)
        if data is not None:
            return data
        data = self._look_up(row, shard)
        if data is None:
            return self._store(row, shard, self.source.read_one(row, shard, offset, length))
        self._note_hit(data)
        return data

    @property
    def by_row(self) -> Cached | None:
        return self if self._start < self._stop else None

    def hit(self, row: int) -> Buffer | None:
        """The cached payload of a row if a single look-up finds it; None does not mean that it is not cached."""
        if not self._start <= row < self._stop:
            return None
        data = self._fetch(row + self._shift)
        if data is not None:
            self._note_hit(data)
        return data

    def read(self, extents: Extents) -> list[Buffer]:
        start, below = time.perf_counter_ns(), 0
        rows, shards = extents.row.tolist(), extents.shard.tolist()
        if self.shared is None:
            results: list[Buffer | None] = [None] * len(rows)
        elif self._plain:
            fetch = self.shared.get
            results = [fetch(slot) if slot >= 0 else None for slot in self.slots.many(extents.row).tolist()]
        else:
            results = [self._look_up(row, shard) for row, shard in zip(rows, shards, strict=True)]
        self._count(results)
        missing = [i for i, data in enumerate(results) if data is None]
        if missing:
            below = time.perf_counter_ns()
            payloads = self.source.read(extents.take(np.array(missing, np.int64)))
            below = time.perf_counter_ns() - below
            for i, data in zip(missing, payloads, strict=True):
                results[i] = self._store(rows[i], shards[i], data)
        TIERS.nanoseconds += time.perf_counter_ns() - start - below
        return results  # type: ignore[return-value]

    def prefetch(self, extents: Extents, below_bytes: int | None = None) -> None:
        """Announce the extents that are not cached."""
        missing = extents.take(~self.has(extents.row))
        if len(missing.row):
            self.source.prefetch(missing, below_bytes)

    def has(self, rows: Int64s) -> npt.NDArray[np.bool_]:
        """Whether each row's extent is cached."""
        shared = self.shared
        if shared is None:
            return np.zeros(len(rows), np.bool_)
        return np.array([slot >= 0 and shared.has(slot) for slot in self.slots.many(rows).tolist()], np.bool_)

    def holds(self, extents: Extents) -> npt.NDArray[np.bool_]:
        return self.has(extents.row) | self.source.holds(extents)

    def drop_damaged(self, row: int) -> bool:
        """Drop a damaged copy of a payload; returns whether there was one, so that reading it again helps."""
        slot = self.slots.one(row)
        return self.shared is not None and slot >= 0 and self.shared.has(slot) and not self.shared.check(slot)

    def close(self) -> None:
        """Leave the shared memory and close the store below; later reads pass through."""
        self._count_hits()
        shared, self.shared = self.shared, None
        self._start = self._stop = 0
        if shared is not None:
            shared.close()
        self.source.close()

    def __getstate__(self) -> dict[str, Any]:
        names = ("source", "shared", "slots", "settings", "form", "columns", "check_payloads")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._setup()

    # --- filling ------------------------------------------------------------------------------------------------
    @property
    def has_room(self) -> bool:
        """Whether the shortest payload still fits."""
        return self.shared is not None and self.shared.capacity_bytes - self.shared.used_bytes >= _LEAST_BYTES

    def convert(self, row: int, data: Buffer) -> Buffer:
        """The payload in its kept form, possibly in this thread's memory, which the next call overwrites.

        Raises BadSampleError.
        """
        return self.form.lend(data) if self._image >= 0 and self.slots.payloads.field(row) == self._image else data

    def put(self, row: int, shard: int, converted: Buffer) -> bool:
        """Store a converted payload; False if it is cached already, is being written, does not fit, or comes from a
        file that was rewritten (checked here, after the read)."""
        slot = self.slots.one(row)
        if self.shared is None or slot < 0 or not self._is_current(shard):
            return False
        return self.shared.put(
            slot, compress(converted) if self.slots.payloads.field(row) in self._packed else converted
        )

    def stats(self) -> CachedStats:
        """Use and hits of the cache; takes time in proportion to the number of samples."""
        if self.shared is None:
            return CachedStats(self.form.kind, len(self.subset), 0, 0)
        self._count_hits()
        first = self.slots.first(self.slots.fields[0])
        present = int(self.shared.present()[first : first + len(self.subset)].sum())
        kept = sum(len(run) for run in self.subset.kept())
        return CachedStats(
            self.form.kind,
            len(self.subset),
            kept,
            present,
            self.shared.capacity_bytes,
            self.shared.used_bytes,
            **asdict(self.shared.stats()),
        )

    # --- inside -------------------------------------------------------------------------------------------------
    def _look_up(self, row: int, shard: int) -> Buffer | None:
        shared, slot = self.shared, self.slots.one(row)
        if shared is None or slot < 0:
            return None
        stored = shared.get(slot)
        if stored is None or self._plain:
            return stored
        try:
            data = decompress(stored) if self.slots.payloads.field(row) in self._packed else stored
        except ValueError:
            shared.drop(slot)
            return None
        if self.check_payloads == "never" or (self.check_payloads == "first" and self._was_checked(slot)):
            return data
        if not (self._is_current(shard) and self._is_right(shared, slot, data, row)):
            shared.drop(slot)
            return None
        if self._checked:
            self._checked[slot] = 1
        return data

    def _is_current(self, shard: int) -> bool:
        """Whether a file is still in the state in which it was listed."""
        if self._tracks_files:
            try:
                self.source.check(shard)
            except StaleIndexError:
                return False
        return True

    def _was_checked(self, slot: int) -> bool:
        if not self._checked:
            self._checked = bytearray(len(self.slots))
        return bool(self._checked[slot])

    def _is_right(self, shared: SharedByteCache, slot: int, data: Buffer, row: int) -> bool:
        sample, number = self.slots.payloads.sample(row), self.slots.payloads.field(row)
        if not self.columns.has_checksums or number == self._image:  # the index has checksums of originals only
            return shared.check(slot)
        from crc32c import crc32c

        return crc32c(data) == int(self.columns.field_column(self.columns.fields[number], "crc32c")[sample])

    def _store(self, row: int, shard: int, data: Buffer) -> Buffer:
        """Convert a payload, store it if it has a slot, and return it in the form for the consumer."""
        kept = self._has_place(row)
        converted = data if self.form.is_for_decoders and not kept else self.convert(row, data)
        if self.shared is None or self.slots.payloads.field(row) not in self.slots.numbers:
            return _owned(converted, data)
        slot = self.slots.one(row)
        if not (kept and (self.put(row, shard, converted) or self.shared.has(slot))):
            self.shared.count(passed=1)
            return _owned(converted, data)
        self.shared.count(misses=1)
        # Return the shared copy, so that the process need not hold a second one.
        stored = self.shared.get(slot) if self._plain else None
        return _owned(converted, data) if stored is None else stored

    def _has_place(self, row: int) -> bool:
        """Whether a payload has a slot and, for forms whose conversion is optional, whether there is also room."""
        if self.shared is None or (self.form.is_for_decoders and self.shared.full):
            return False
        return self.slots.one(row) >= 0 and self.subset.keeps(self.slots.payloads.sample(row))

    def hits(self, rows: Int64s) -> list[Buffer | None]:
        """`hit` for many rows, counted together."""
        if self._start == self._stop:
            return [None] * len(rows)
        start, stop, shift, fetch = self._start, self._stop, self._shift, self._fetch
        payloads: list[Buffer | None] = [fetch(row + shift) if start <= row < stop else None for row in rows.tolist()]
        self._count(payloads)
        return payloads

    def _count(self, payloads: list[Buffer | None]) -> None:
        sizes = [len(data) for data in payloads if data is not None]
        if sizes and self.shared is not None:
            size = sum(sizes)
            self.shared.count(hits=len(sizes), hit_bytes=size)
            TIERS.hits += len(sizes)
            TIERS.hit_bytes += size

    def _note_hit(self, data: Buffer) -> None:
        self._hit_bytes.append(len(data))
        if len(self._hit_bytes) >= _COUNTED_TOGETHER:
            self._count_hits()

    def _count_hits(self) -> None:
        """Add the hits since the last call to the shared statistics, in one addition, because each takes a lock."""
        hits = size = 0
        try:
            while True:  # each is taken by one thread only
                size += self._hit_bytes.popleft()
                hits += 1
        except IndexError:
            if hits and self.shared is not None:
                self.shared.count(hits=hits, hit_bytes=size)


class Originals(StoreOver):
    """The store for consumers other than decoders: images from below a cache of coefficients, other fields from it.

    below: the store below the cache, with the original images.
    """

    def __init__(self, source: Cached, below: Store) -> None:
        self.source: Cached = source
        self.below = below
        fields = source.columns.fields
        self._image, self._payloads = fields.index("image") if "image" in fields else -1, Payloads(len(fields))

    def read_one(self, row: int, shard: int, offset: int, length: int) -> Buffer:
        return self._store_of(row).read_one(row, shard, offset, length)

    def read(self, extents: Extents) -> list[Buffer]:
        images = self._payloads.field(extents.row) == self._image
        if images.all() or not images.any():
            return (self.below if images.any() else self.source).read(extents)
        return [self.read_one(*extent) for extent in zip(*(column.tolist() for column in extents), strict=True)]

    def prefetch(self, extents: Extents, below_bytes: int | None = None) -> None:
        images = self._payloads.field(extents.row) == self._image
        for store, which in ((self.below, images), (self.source, ~images)):
            if which.any():
                store.prefetch(extents.take(which), below_bytes)

    def close(self) -> None:
        self.source.close()
        self.below.close()

    def _store_of(self, row: int) -> Store:
        return self.below if self._payloads.field(row) == self._image else self.source


def _owned(converted: Buffer, data: Buffer) -> Buffer:
    """A converted payload that the next conversion cannot overwrite: `data` itself, or a copy."""
    return converted if converted is data else bytes(converted)


@dataclass(frozen=True, slots=True)
class CachedStats:
    """Statistics of one cache, over all processes that use or used it.

    Hits of single reads are counted 64 at a time, so up to 63 are lost if a process ends without closing the reader.

    samples: number of samples of the set, or of this node's part.
    kept: samples that have a slot.
    present: samples whose first field is cached.
    capacity_bytes, used_bytes: bytes for payloads.
    hits, hit_bytes: reads served by the cache.
    misses: reads of samples that have a slot but were not cached yet.
    passed: reads of samples without a slot.
    puts, put_bytes: payloads stored.
    dropped: damaged payloads dropped.
    users: processes that have it open.
    """

    kind: str
    samples: int
    kept: int
    present: int
    capacity_bytes: int = 0
    used_bytes: int = 0
    hits: int = 0
    misses: int = 0
    hit_bytes: int = 0
    puts: int = 0
    put_bytes: int = 0
    passed: int = 0
    dropped: int = 0
    users: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits per read, 0 to 1."""
        return self.hits / max(1, self.hits + self.misses + self.passed)

    @property
    def filled(self) -> float:
        """Share of the samples with a slot that are cached, 0 to 1."""
        return self.present / max(1, self.kept)

    def to_dict(self) -> dict[str, Any]:
        """All values and rates as a dictionary for JSON."""
        return {**asdict(self), "hit_rate": self.hit_rate, "filled": self.filled}
