"""How many bytes a set takes in a cache, and how many of its samples are kept where there is room for less.

Exact where the index tells, else estimated from a few samples from all over the set.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cache import SharedByteCache
from cache.errors import BadSampleError, DamagedSampleError, UnknownNameError
from cache.filesystem import Budget, cache_budget
from cache.stores import Buffer
from readers.cached.compression import may_pay, share_left
from readers.cached.form import Form, Recoded
from readers.cached.store import Slots
from readers.cached.subset import Weights
from readers.headers import MEDIA
from readers.reader import Reader
from readers.sample import headers_of
from readers.units import parse_size

__all__ = ["SAMPLE_ERRORS", "Capacity", "Measures", "budget", "measure", "read_good"]

Capacity: TypeAlias = int | float | str
SAMPLE_ERRORS = (BadSampleError, DamagedSampleError, UnknownNameError)
_PEEKED, _TAKEN, _TAKEN_BYTES = 16, 256, 32 << 20
_MARGIN = 1.1  # of what is estimated: room that is missing costs hits, room that is left over costs little
_SLOT_BYTES = 64  # a payload begins at a multiple of this
_TERMS_BYTES = 4096
_SLACK = 200  # one part in so many is left for payloads that are stored again after their bytes went wrong
_COMPRESSED = tuple(MEDIA.index(name) for name in ("jpeg", "png", "webp", "gif"))
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Measures:
    """form: with its rate, where it has one. shares: of the bytes of each field that compression leaves. mean: bytes of
    a converted image, where no index knows better. reader: of whole columns, whose samples are rows."""

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
            return np.full(len(rows), int(self.mean * _MARGIN) + 1, np.int64)
        form = replace(self.form, rate=self.form.rate * _MARGIN) if isinstance(self.form, Recoded) else self.form
        return form.bytes(form.info(self.reader.image_info(rows)), sizes)


def measure(reader: Reader, slots: Slots, form: Form, compress: bool) -> Measures:
    """Look at a few samples where that is needed: none of an indexed set of JPEGs kept as they are or decoded."""
    shares: dict[str, float] = {}
    mean = 0.0
    for name in slots.fields:
        if name == "image" and form.converts:
            if isinstance(form, Recoded) or not reader.table.has_headers:
                rate, mean = _converted(reader, slots, form)
                form = replace(form, rate=rate) if isinstance(form, Recoded) else form
        elif compress:
            share = _compressed(reader, slots, name)
            if share < 1:
                shares[name] = share
    return Measures(reader, slots, form, shares, mean)


def budget(capacity: Capacity, measures: Measures, directory: Path | None) -> tuple[int, int]:
    """(threshold of the subset, bytes to reserve); 0 bytes for no cache. directory: None for memory without one.

    Raises ValueError for a capacity that means nothing, `cache.errors.CacheError`.
    """
    every, weights = measures.slots.subset, measures.weights()
    asked, share = _asked(capacity)
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
            f"the cache keeps {kept:,} of {len(every):,} samples: {_limited(room, directory, whole)}", stacklevel=4
        )
    return (chosen.threshold, limit) if kept else (0, 0)


def read_good(reader: Reader, indices: _Ints, field: str) -> list[Buffer | None]:
    """Payloads; None for what cannot be read, which is for those that want it to hear of."""
    try:
        return list(reader.read_many(indices, field))
    except SAMPLE_ERRORS:
        pass
    found: list[Buffer | None] = []
    for index in indices.tolist():
        try:
            found.append(reader.read(index, field))
        except SAMPLE_ERRORS:
            found.append(None)
    return found


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
    return share_left(_some(reader, taken, name))


def _converted(reader: Reader, slots: Slots, form: Form) -> tuple[float, float]:
    """(bytes per pixel of images that change, bytes of an image) as it is kept."""
    found = []
    for image in _some(reader, slots.subset.spread(4 * _PEEKED), "image"):
        try:
            found.append((form.convert(image), image))
        except SAMPLE_ERRORS:
            continue
    if not found:
        return 1.0, 0.0
    info = headers_of(converted for converted, _ in found)
    sizes = np.array([len(converted) for converted, _ in found])
    changed = np.array([converted is not image for converted, image in found])
    pixels = (info.height.astype(np.int64) * info.width)[changed]
    rate = float(sizes[changed].sum() / pixels.sum()) if pixels.sum() else 1.0
    return rate, float(sizes.mean())


def _some(reader: Reader, indices: _Ints, name: str) -> list[Buffer]:
    return [data for data in read_good(reader, indices, name) if data is not None]


def _limited(room: Budget, directory: Path | None, whole: int) -> str:
    """What leaves so little room, and what to do."""
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


def _asked(capacity: Capacity) -> tuple[int | None, float | None]:
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
    """What payloads take of the cache."""
    return np.maximum(_SLOT_BYTES, -(-sizes // _SLOT_BYTES) * _SLOT_BYTES)
