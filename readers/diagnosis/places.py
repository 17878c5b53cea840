"""How fast the samples of a set can be read where they are, and in other places: a sample of them is copied there.

The same samples are read everywhere, in the same random order, by the store that reads them in training: one by one,
and in batches, sorted by place, the next batch announced where reads are slow. First with their pages dropped from the
page cache, then from it. Of a tmpfs memory is the medium, so there are no cold reads.

Copies are in `.packer-places-…` below the place, with mode 0700, and are removed by whatever ends the measurement
except SIGKILL. A shard of the copy has the payloads of a few samples of one shard, one after the other. Of a folder of
files the samples are copied as files and packed into shards, since both are ways to keep them.

The directory entries and inodes of a copy are in the kernel's memory, as are those of a folder that was just listed:
on a file server the first `open` of a file costs more than what is measured here.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import numpy as np

from cache.errors import SourceError
from cache.filesystem import cached_share, drop, filesystem_type, free_space, is_in_memory, is_local
from cache.messages import Silent, Watcher, plural, quoted
from cache.node import available_memory_bytes
from cache.stores import Buffer, Extents, Files, LooseFiles, Shards, Store
from readers.diagnosis.reads import PlaceReads, Reads, time_reads, time_store
from readers.reader import Reader, read_good

__all__ = ["Place", "Places", "compare_packed", "measure_places"]

_LIMIT_BYTES = 256 << 20
_MOST_SAMPLES = 4096
_FEW_SHARDS = 8
_ROOM_SHARE = 2  # at most half of the room is used
_READ_AT_ONCE = 64
_STILL_CACHED = 0.1  # of the pages: more than that, and reads were not cold
_OPENING_SECONDS = 0.1
_NEAR_BYTES = 256 << 10
_SAME = 0.1
_IN_MEMORY = "memory is its medium"
_FOLDER_FILES = 1000
_NO_SUCH_CALL = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EROFS)


@dataclass(frozen=True, slots=True)
class Place:
    """What was measured in one place.

    form: "shards" or "files"; samples, bytes: that were read; filesystem: its type, "" where it is not known.
    cold, warm: with the pages dropped, and from the page cache; None with `note` where that cannot be.
    opening: open, fstat and close of a file, of form "files".
    holds: share of the whole set that there is room for, 0 to 1; None for where the set is.
    error: why nothing was measured, "" otherwise.
    """

    path: str
    form: str
    filesystem: str = ""
    samples: int = 0
    bytes: int = 0
    cold: PlaceReads | None = None
    warm: PlaceReads | None = None
    opening: Reads | None = None
    holds: float | None = None
    note: str = ""
    error: str = ""

    @property
    def first(self) -> PlaceReads | None:
        """As they are read the first time: cold, or from memory where that is the medium."""
        return self.cold or self.warm


@dataclass(frozen=True, slots=True)
class Places:
    """rows: where the set is now, then the other places. batch_size: samples of a batch.

    best: the number of the row whose batches are read first in the least time; 0 where none is better by a tenth.
    gain: seconds a batch that it saves. advice: the same as a sentence. commands: that bring the set there.
    """

    rows: tuple[Place, ...]
    batch_size: int
    best: int
    gain: float
    advice: str
    commands: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Everything as numbers, texts, lists and dictionaries."""
        return asdict(self)


def measure_places(
    reader: Reader,
    places: Sequence[str | os.PathLike[str]],
    *,
    batch_size: int = 64,
    seconds: float = 20.0,
    limit_bytes: int = _LIMIT_BYTES,
    watcher: Watcher | None = None,
) -> Places:
    """Read samples of a set where it is, and from copies in other directories.

    batch_size: samples of a batch.
    seconds: about how long to measure, all places together.
    limit_bytes: of the copy in each place, which also uses at most half of the room there.
    watcher: shows which place is being measured.

    A place that cannot be used is a row with its error. Raises what reading the set raises, SourceError where no sample
    can be read, and ValueError.
    """
    if batch_size < 1 or seconds <= 0 or limit_bytes < 1:
        raise ValueError(f"batch_size={batch_size}, seconds={seconds} and limit_bytes={limit_bytes}: all are positive")
    loose = isinstance(reader.store, LooseFiles)
    forms = ("files", "shards") if loose else ("shards",)
    share = seconds / (1 + len(places) * len(forms))
    sample = _choose(reader, min(limit_bytes, available_memory_bytes() // 4), share)
    columns = reader.table.columns
    total = int(np.sum(columns.shard_bytes))
    here = str(columns.path) if loose and hasattr(columns, "path") else columns.place or columns.title
    note = (watcher or Silent()).note
    note(f"reading {plural(len(sample.payloads), 'sample')} of {here}")
    rows = [_measure_here(reader, sample, batch_size, share, here, forms[0])]
    for place in places:
        for form in forms:
            note(f"reading copies of them in {os.fspath(place)}, as {form}")
            rows.append(_measure_copy(os.fspath(place), form, sample, batch_size, share, total))
            if not rows[-1].filesystem:  # not a directory, for either form
                break
    return _advise(tuple(rows), batch_size, here, loose, total)


def compare_packed(reader: Reader, batch_size: int, seconds: float = 2.0) -> str:
    """What packing a folder of files gains, in a sentence, from copies in the directory for temporary files.

    "" for another set, and if no copy fits there. Raises what reading the folder raises.
    """
    if not isinstance(reader.store, LooseFiles):
        return ""
    directory = tempfile.gettempdir()
    rows = measure_places(reader, [directory], batch_size=batch_size, seconds=seconds).rows[1:]
    files, packed = rows
    if files.warm is None or packed.warm is None:
        return ""
    text = (
        f"in {directory}, a thread reads a batch of {batch_size} from the page cache in "
        f"{1e3 * files.warm.batch.p50:.2f} ms as files and in {1e3 * packed.warm.batch.p50:.2f} ms packed"
    )
    if files.cold and packed.cold:
        text += f", cold in {1e3 * files.cold.batch.p50:.2f} and {1e3 * packed.cold.batch.p50:.2f} ms"
    return f"{text}; to pack the folder, run  packer convert"


class _Sample(NamedTuple):
    """Some samples: where they are now, and their payloads. Those of one shard follow one another."""

    extents: Extents
    payloads: list[Buffer]


def _choose(reader: Reader, limit_bytes: int, seconds: float) -> _Sample:
    """Samples of a few shards, or of many files, each shard from its first sample on."""
    shard, size = reader.table.column("shard"), reader.table.sizes()
    count = len(reader.table.columns.shard_bytes)
    draw = np.random.default_rng(0)
    wanted = max(_FEW_SHARDS, -(-_MOST_SAMPLES * count // max(1, len(size))))
    chosen = draw.permutation(count)[:wanted]
    rows = np.flatnonzero(np.isin(shard, chosen) & (size > 0))
    if not len(rows):
        rows = np.flatnonzero(size > 0)[:_MOST_SAMPLES]
        chosen = np.unique(shard[rows])
    rows = rows[np.argsort(shard[rows], kind="stable")]
    first = np.searchsorted(shard[rows], np.sort(chosen))
    groups = [group for group in np.split(rows, first[1:]) if len(group)]
    each_bytes, each = limit_bytes // min(len(groups) or 1, _FEW_SHARDS), -(-_MOST_SAMPLES // _FEW_SHARDS)
    taken, payloads, left, end = list[int](), list[Buffer](), limit_bytes, time.monotonic() + seconds
    for number in draw.permutation(len(groups)):
        group = groups[number][:each]
        group = group[np.cumsum(size[group]) <= min(left, max(each_bytes, int(size[group[0]])))]
        for begin in range(0, len(group), _READ_AT_ONCE):
            part = group[begin : begin + _READ_AT_ONCE]
            good = [(row, data) for row, data in zip(part.tolist(), read_good(reader, part), strict=True) if data]
            taken += [row for row, _ in good]
            payloads += [data for _, data in good]
            left -= sum(len(data) for _, data in good)
        if len(taken) >= _MOST_SAMPLES or (taken and time.monotonic() > end):
            break
    if not taken:
        raise SourceError(f"{reader.table.title}: no sample of {len(reader):,} could be read")
    return _Sample(reader.table.extents(np.array(taken)), payloads)


def _measure_here(reader: Reader, sample: _Sample, batch_size: int, seconds: float, path: str, form: str) -> Place:
    """The samples where they are. Only their own pages are dropped: others may be in use."""
    row = Place(path, form, samples=len(sample.payloads), bytes=sum(map(len, sample.payloads)))
    ranges = _ranges(reader.store, sample.extents)
    if all(os.path.isfile(place) for place in ranges):
        return _measure(row, reader.store, sample.extents, ranges, batch_size, seconds)
    reads = time_store(reader.store, sample.extents, batch_size, seconds, lambda: None)
    if any("://" in place for place in ranges):
        return replace(row, cold=reads, note="each time from the server, or from what a cache of it has")
    return replace(row, warm=reads, note=f"read by {type(reader.store).__name__}, whose pages cannot be dropped")


def _ranges(store: Store, extents: Extents) -> dict[str, list[tuple[int, int]]]:
    """By file, the (offset, length) ranges that the extents are in. Neighbours are one: the kernel drops no large folio
    of which a part is asked for."""
    found: dict[str, list[tuple[int, int]]] = {}
    order = np.lexsort((extents.offset, extents.shard))
    for _, shard, offset, length in zip(*(column[order].tolist() for column in extents), strict=True):
        ranges = found.setdefault(store.location(shard), [])
        if ranges and offset <= sum(ranges[-1]) + _NEAR_BYTES:
            start = ranges.pop()[0]
            offset, length = start, offset + length - start
        ranges.append((offset, length))
    return found


def _measure_copy(path: str, form: str, sample: _Sample, batch_size: int, seconds: float, total: int) -> Place:
    row = Place(path, form)
    try:
        os.listdir(path)
        row = replace(row, filesystem=filesystem_type(Path(path)))
        free = free_space(Path(path), row.filesystem)
        row = replace(row, holds=min(1.0, free.bytes / max(1, total)))
        count = int((np.cumsum(sample.extents.length) <= free.bytes // _ROOM_SHARE).sum())
        if form == "files":
            count = min(count, free.inodes // _ROOM_SHARE)
        if count < min(_FEW_SHARDS, len(sample.payloads)):
            return replace(row, error=f"no room for a sample of the set ({free.bytes / 1e6:.1f} MB free)")
        with _private_directory(path) as folder:
            write = _write_files if form == "files" else _write_shards
            store, extents, paths = write(folder, sample, count, seconds / 2)
            row = replace(row, samples=len(extents.row), bytes=int(extents.length.sum()))
            ranges = {file: [(0, os.stat(file).st_size)] for file in paths}
            with store:
                return _measure(row, store, extents, ranges, batch_size, seconds / 2)
    except OSError as error:
        return replace(row, error=error.strerror or str(error))


@contextmanager
def _private_directory(path: str) -> Iterator[str]:
    folder = os.path.join(path, f".packer-places-{token_hex(8)}")
    try:  # from here on, since a signal may come right after the directory was made
        os.mkdir(folder, 0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_Written = tuple[Store, Extents, list[str]]


def _write_shards(folder: str, sample: _Sample, count: int, seconds: float) -> _Written:
    """The first `count` samples in as many files as they have shards now, loose files in a few; fewer out of time."""
    shard = sample.extents.shard[:count]
    few = len(np.unique(shard)) <= _FEW_SHARDS or count < _FEW_SHARDS
    owner = np.unique(shard, return_inverse=True)[1] if few else np.arange(count) * _FEW_SHARDS // count
    names, sizes, rows, end = list[str](), list[int](), list[tuple[int, int, int, int]](), time.monotonic() + seconds
    for _, group in itertools.groupby(range(count), key=owner.tolist().__getitem__):
        if names and time.monotonic() > end:
            break
        names.append(f"{len(names):06d}")
        sizes.append(0)
        with open(os.path.join(folder, names[-1]), "xb") as file:
            for i in group:
                file.write(sample.payloads[i])
                rows.append((i, len(names) - 1, sizes[-1], len(sample.payloads[i])))
                sizes[-1] += len(sample.payloads[i])
    extents = Extents(*np.array(rows, np.int64).T)
    return Files(folder, Shards(names, sizes)), extents, [os.path.join(folder, name) for name in names]


def _write_files(folder: str, sample: _Sample, count: int, seconds: float) -> _Written:
    """The first `count` samples as a file each; fewer out of time."""
    names, end = list[str](), time.monotonic() + seconds
    for i, payload in enumerate(sample.payloads[:count]):
        if i >= _FEW_SHARDS and time.monotonic() > end:
            break
        inner = f"{i // _FOLDER_FILES:03d}"
        if i % _FOLDER_FILES == 0:
            os.mkdir(os.path.join(folder, inner))
        names.append(f"{inner}/{i:06d}")
        with open(os.path.join(folder, names[-1]), "xb") as file:
            file.write(payload)
    numbers, sizes = np.arange(len(names)), np.array([len(payload) for payload in sample.payloads[: len(names)]])
    store = LooseFiles(folder, names, sizes, np.zeros((len(names), 2), np.int64))
    return store, Extents(numbers, numbers, np.zeros_like(sizes), sizes), [os.path.join(folder, n) for n in names]


def _measure(
    row: Place,
    store: Store,
    extents: Extents,
    ranges: dict[str, list[tuple[int, int]]],
    batch_size: int,
    seconds: float,
) -> Place:
    """The row with its times. ranges: the parts of each file that are read."""
    file = Path(next(iter(ranges)))
    row = replace(row, filesystem=filesystem_type(file))
    if is_in_memory(file):
        row = replace(row, note=_IN_MEMORY)
    else:
        _drop(ranges, synced=False)
        cold = time_store(store, extents, batch_size, seconds / 2, lambda: _drop(ranges))
        _drop(ranges)
        shares = [cached_share(path, parts) for path, parts in ranges.items()]
        left = [share for share in shares if share is not None]
        if not left:
            row = replace(row, cold=cold, note="the kernel does not say whether the pages were dropped")
        elif np.mean(left) > _STILL_CACHED:
            row = replace(row, note=f"{np.mean(left):.0%} of the pages could not be dropped, so no read is cold")
        else:
            row = replace(row, cold=cold)
    store.read(extents)
    opening = time_reads(list(ranges), _open, _OPENING_SECONDS) if row.form == "files" else None
    return replace(row, warm=time_store(store, extents, batch_size, seconds / 4, lambda: None), opening=opening)


def _drop(ranges: dict[str, list[tuple[int, int]]], synced: bool = True) -> None:
    for path, parts in ranges.items():
        try:
            drop(path, parts, synced=synced)
        except OSError as error:
            if error.errno not in _NO_SUCH_CALL:  # otherwise what stays in the cache is seen later
                raise


def _open(path: str) -> int:
    """What a file costs before its first byte."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    os.fstat(descriptor)
    os.close(descriptor)
    return 0


def _advise(rows: tuple[Place, ...], batch_size: int, path: str, loose: bool, total: int) -> Places:
    """The place whose batches are read first in the least time, if that is less by a tenth than where the set is."""
    times = [row.first.batch.p50 if row.first else np.inf for row in rows]
    best = int(np.argmin(times))
    gain = times[0] - times[best]
    if best == 0 or gain < _SAME * times[0]:
        if not np.isfinite(times[1:]).any():
            return Places(rows, batch_size, 0, 0.0, "none of the places could be measured")
        advice = f"leave the set where it is: no place reads a batch of {batch_size} faster by a tenth"
        return Places(rows, batch_size, 0, 0.0, advice)
    row = rows[best]
    advice = (
        f"{row.path}{', packed' if loose and row.form == 'shards' else ''}: a thread reads a batch of {batch_size} "
        f"in {1e3 * times[best]:.2f} ms, {1e3 * gain:.2f} ms less than where the set is"
    )
    if total < available_memory_bytes() // 2 and rows[0].warm is not None:
        advice += (
            f"; it fits into the memory of this node, and read again from the page cache a batch takes "
            f"{1e3 * rows[0].warm.batch.p50:.2f} ms where it is"
        )
    return Places(rows, batch_size, best, gain, advice, _commands(row, path, loose))


def _commands(row: Place, path: str, loose: bool) -> tuple[str, ...]:
    commands = []
    if loose:
        packed = f"{os.path.basename(os.path.abspath(path))}-tar"
        commands.append(f"packer convert {quoted(path)} --to tar --output {quoted(packed)}")
        path = packed
    command = f"packer stage {quoted(path)} --target {quoted(row.path)}"
    if not is_local(row.filesystem):
        command += " --any-filesystem"
    if row.holds is not None and row.holds < 1:
        command += f" --fraction {max(0.01, int(90 * row.holds) / 100)}"
    return (*commands, command)
