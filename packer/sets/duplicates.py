"""Identical or similar images: find the groups, and keep one image of each.

Identical: equal in size and CRC32C by the index, then compared byte by byte. Similar: perceptual hashes that differ in
at most `threshold` of 128 bits, directly or through other images of the group. All splits are compared with each other,
so an image of val that also occurs in train is found.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import readers
from cache.errors import BadSampleError, SourceError, UnknownNameError
from cache.messages import Counter, Silent, Watcher
from packer.output import Result
from packer.sets.table import SaveResult, SetTable, table
from packer.workers import Workers, run_shards
from readers.decode import Region, Scratch, decode_image
from readers.headers import read_header
from readers.table import ABSENT, Buffer

__all__ = ["BITS", "KEEP", "DedupResult", "Duplicate", "dedup", "difference_hash", "near_pairs"]


# --- perceptual hashes ----------------------------------------------------------------------------------------------
# A difference hash of 128 bits: the image in grey is averaged to 9 x 8 and to 8 x 9 pixels, and each bit says whether a
# pixel is brighter than its neighbour on the left, or above. It hardly changes when an image is encoded again, resized,
# or made a little brighter (N. Krawetz, "Kind of Like That", 2013, describes the horizontal half). An image without any
# structure has no hash. JPEGs are decoded at 1/8 of their size if 32 pixels are left, at a fraction of the cost of a
# full decode.


BITS = 128
_ROWS, _LEAST_CONTRAST = 8, 8.0
_SCALES, _LEAST_SIDE = (8, 4, 2), 32  # the least shorter side after scaling
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R BT.601
_MOST_PAIRS = 1 << 22
_POPCOUNT = np.array([bin(number).count("1") for number in range(1 << 16)], np.uint8)


def difference_hash(image: Buffer, scratch: Scratch | None = None) -> npt.NDArray[np.uint64] | None:
    """The hash of an encoded image, uint64 [2]; None for an image without structure. Raises BadSampleError."""
    height, width = read_header(image).upright_size
    reduce = next((scale for scale in _SCALES if min(height, width) >= scale * _LEAST_SIDE), 1)
    pixels = decode_image(image, Region(0, 0, height, width, reduce, True), scratch)
    grey = pixels.astype(np.float32) @ _LUMA
    # The last pixel of a reduced image may cover only a part of one.
    size = (height / reduce, width / reduce) if len(grey) < height else (height, width)
    across, below = _averaged(grey, size, (_ROWS, _ROWS + 1)), _averaged(grey, size, (_ROWS + 1, _ROWS))
    if float(across.max() - across.min()) < _LEAST_CONTRAST:
        return None
    bits = np.concatenate([(np.diff(across, axis=1) > 0).ravel(), (np.diff(below, axis=0) > 0).ravel()])
    return np.packbits(bits).view(">u8").astype(np.uint64)


def _averaged(
    grey: npt.NDArray[np.float32], size: tuple[float, float], counts: tuple[int, int]
) -> npt.NDArray[np.float64]:
    """The mean of each box of a grid over `size` (rows, columns), whose edges may be inside pixels."""
    values = grey.astype(np.float64)
    for whole, count in zip(size, counts, strict=True):  # rows, then, after a transposition, columns
        sums = np.concatenate([np.zeros((1, values.shape[1])), np.cumsum(values, axis=0)])
        edges = np.linspace(0, whole, count + 1)
        pixel = np.minimum(edges.astype(int), len(values) - 1)
        upto = sums[pixel] + (edges - pixel)[:, None] * values[pixel]
        values = (np.diff(upto, axis=0) * (count / whole)).T
    return values


def near_pairs(hashes: npt.NDArray[np.uint64], threshold: int) -> Iterator[npt.NDArray[np.int64]]:
    """Pairs of hashes (uint64 [n, 2]) that differ in at most `threshold` bits: blocks of int64 [k, 2], some twice.

    Two such hashes agree in at least one of threshold + 1 bands of bits, so only hashes with a common band are
    compared.
    """
    bits = np.unpackbits(hashes.astype(">u8").view(np.uint8).reshape(len(hashes), -1), axis=1)
    for band in np.array_split(np.arange(BITS), threshold + 1):
        keys = np.packbits(bits[:, band], axis=1)
        _, group = np.unique(keys, axis=0, return_inverse=True)
        order = np.argsort(group.reshape(-1), kind="stable")
        starts = np.flatnonzero(np.diff(group.reshape(-1)[order], prepend=-1))
        for first, stop in itertools.pairwise([*starts.tolist(), len(order)]):
            yield from _within(order[first:stop], hashes, threshold)


def _within(
    members: npt.NDArray[np.int64], hashes: npt.NDArray[np.uint64], threshold: int
) -> Iterator[npt.NDArray[np.int64]]:
    step = max(1, _MOST_PAIRS // max(1, len(members)))
    for first in range(0, len(members) if len(members) > 1 else 0, step):
        some = members[first : first + step]
        differing = hashes[some][:, None, :] ^ hashes[members][None, :, :]
        distance = _POPCOUNT[differing.view(np.uint16)].sum(axis=-1, dtype=np.int64)
        a, b = np.nonzero(distance <= threshold)
        pairs = np.stack([some[a], members[b]], axis=1)
        pairs = pairs[pairs[:, 0] < pairs[:, 1]]
        if len(pairs):
            yield pairs


KEEP = ("first", "largest")
Int64s = npt.NDArray[np.int64]
_TASK_SAMPLES = 2048
_REPORT_SAMPLES = 64


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A sample of a group: its split and key, and whether it is kept."""

    split: str
    key: str
    kept: bool


@dataclass(frozen=True, slots=True)
class DedupResult(Result):
    """The groups of duplicates. duplicates: samples that are dropped; unread: images that could not be decoded.

    across_splits, across_classes: groups with samples in more than one split, or with more than one label.
    saved: the new set, or the change of the set; None without a change.
    """

    path: Path
    samples: int
    groups: tuple[tuple[Duplicate, ...], ...]
    duplicates: int
    across_splits: int
    across_classes: int
    unread: int
    saved: SaveResult | None

    def to_dict(self) -> dict[str, Any]:
        groups = [[{"split": d.split, "key": d.key, "kept": d.kept} for d in group] for group in self.groups]
        saved = None if self.saved is None else self.saved.to_dict()
        plain = {
            name: getattr(self, name) for name in ("samples", "duplicates", "across_splits", "across_classes", "unread")
        }
        return {"path": str(self.path), **plain, "groups": groups, "saved": saved}


def dedup(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    near: int | None = None,
    keep: str = "first",
    prefer: str | None = None,
    workers: int | None = None,
    engine: Executor | None = None,
    dry_run: bool = False,
    watcher: Watcher | None = None,
) -> DedupResult:
    """Drop all but one sample of each group of duplicates.

    output: a new set, which is made even if there are no duplicates; default the set itself.
    near: also images whose perceptual hashes differ in at most this many of 128 bits, 0 to 20; 6 finds resized and
        re-encoded copies. All images are decoded, at 1/8.
    keep: "first" in stored order, or "largest" in pixels, then in bytes.
    prefer: the split whose samples are preferably kept.
    engine: an executor to decode images with, by default local processes; see `packer.open_engine`.
    dry_run: only report.

    Raises DatasetError, UnknownNameError (no such split), ValueError, OutputError.
    """
    if keep not in KEEP:
        raise ValueError(f"keep must be one of {', '.join(KEEP)}, not {keep!r}")
    if near is not None and not 0 <= near <= 20:
        raise ValueError(f"near is {near}, expected 0 to 20 of {BITS} bits")
    root, watcher, crew = Path(path), watcher or Silent(), Workers(workers, engine)
    opened = table(root)
    if near is not None and "image" not in opened.info.fields:
        raise SourceError(
            f"{root}: near compares images, and this set has {', '.join(opened.info.fields)}; leave it out"
        )
    if prefer is not None and prefer not in opened.splits:
        raise UnknownNameError(f"{root}: no split {prefer!r}; it has {', '.join(opened.splits)}")
    with _Search(opened, watcher) as search:
        pairs = [search.same()]
        if near is not None:
            pairs += search.alike(near, crew)
        members, kept = search.groups(pairs, keep, prefer)
    dropped = np.sort(np.concatenate([np.zeros(0, np.int64), *(g[g != k] for g, k in zip(members, kept, strict=True))]))
    saved = None
    if len(dropped) or output is not None:
        arguments = {"near": near, "keep": keep} | ({} if prefer is None else {"prefer": prefer})
        smaller = opened.without(search.by_split(dropped), "dedup", arguments)
        saved = smaller.save(output, dry_run=dry_run, watcher=watcher)
    groups = tuple(
        tuple(Duplicate(*search.name(i), kept=i == k) for i in group.tolist())
        for group, k in zip(members, kept, strict=True)
    )
    labels = np.concatenate([opened.labels(name) for name in opened.splits])
    return DedupResult(
        path=root,
        samples=len(opened),
        groups=groups,
        duplicates=len(dropped),
        across_splits=sum(len({duplicate.split for duplicate in group}) > 1 for group in groups),
        across_classes=sum(len(set(labels[group].tolist())) > 1 for group in members),
        unread=search.unread,
        saved=saved,
    )


class _Search:
    """All samples of a set, numbered split by split."""

    def __init__(self, opened: SetTable, watcher: Watcher) -> None:
        self._root, self._watcher, self._stack = opened.root, watcher, ExitStack()
        self._readers = [(name, readers.open(opened.root, name)) for name in opened.splits]
        self._starts = np.cumsum([0, *(len(reader) for _, reader in self._readers)])
        self._field = next(iter(opened.info.fields))
        self.unread = 0

    def __enter__(self) -> _Search:
        for _, reader in self._readers:
            self._stack.enter_context(reader)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _column(self, name: str) -> npt.NDArray[np.uint64]:
        columns = [reader.table.field_column(self._field, name).astype(np.uint64) for _, reader in self._readers]
        return np.concatenate([np.zeros(0, np.uint64), *columns])

    def same(self) -> Int64s:
        """Pairs of samples with the same bytes, int64 [k, 2]."""
        mark = (self._column("length") << np.uint64(32)) ^ self._column("crc32c")
        there = np.flatnonzero(self._column("offset") != np.uint64(ABSENT))
        order = there[np.argsort(mark[there], kind="stable")]
        new = np.flatnonzero(np.diff(mark[order], prepend=~mark[order[:1]]) != 0)
        pairs: list[tuple[int, int]] = []
        for first, stop in zip(new.tolist(), [*new[1:].tolist(), len(order)], strict=True):
            if stop - first > 1:
                pairs += self._compared(order[first:stop].tolist())
        return np.array(pairs, np.int64).reshape(-1, 2)

    def _compared(self, candidates: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Pairs of the candidates, which have equal checksums, with equal bytes."""
        distinct: list[tuple[int, bytes]] = []
        for number in candidates:
            data = bytes(self._read(number))
            other = next((known for known, known_data in distinct if known_data == data), None)
            if other is None:
                distinct.append((number, data))
            else:
                yield other, number

    def _read(self, number: int) -> Any:
        split, index = self._place(number)
        return self._readers[split][1].read(index, self._field)

    def _place(self, number: int) -> tuple[int, int]:
        split = int(np.searchsorted(self._starts, number, "right")) - 1
        return split, number - int(self._starts[split])

    def name(self, number: int) -> tuple[str, str]:
        """(split, key) of a sample."""
        split, index = self._place(number)
        return self._readers[split][0], self._readers[split][1].keys[index]

    def alike(self, threshold: int, workers: Workers) -> Iterator[Int64s]:
        """Pairs of similar samples, in blocks of int64 [k, 2]."""
        tasks = [
            _HashTask(self._root, name, self._field, first, min(first + _TASK_SAMPLES, len(reader)))
            for name, reader in self._readers
            for first in range(0, len(reader), _TASK_SAMPLES)
        ]
        size = int(self._column("length").sum())
        done = run_shards(hash_samples, tasks, len(tasks), workers, self._watcher, (int(self._starts[-1]), size))
        hashes, hashed, self.unread = (
            np.concatenate([np.zeros((0, 2), np.uint64), *(part.hashes for part in done)]),
            np.concatenate([np.zeros(0, np.bool_), *(part.found for part in done)]),
            sum(part.unread for part in done),
        )
        numbers = np.flatnonzero(hashed)
        for pairs in near_pairs(hashes[numbers], threshold):
            yield numbers[pairs]

    def groups(self, pairs: Iterable[Int64s], keep: str, prefer: str | None) -> tuple[list[Int64s], list[int]]:
        """The groups that the pairs connect, and the sample of each group to keep."""
        root: dict[int, int] = {}
        for block in pairs:
            for a, b in block.tolist():
                root[_find(root, b)] = _find(root, a)
        by_root: dict[int, list[int]] = {}
        for number in sorted(root):
            by_root.setdefault(_find(root, number), []).append(number)
        members = [np.array(group, np.int64) for group in by_root.values()]
        rank = self._rank(keep, prefer)
        return members, [int(group[np.lexsort([column[group] for column in rank])[0]]) for group in members]

    def _rank(self, keep: str, prefer: str | None) -> list[npt.NDArray[Any]]:
        """Sort keys that decide which sample of a group is kept, the primary key last, as for numpy.lexsort."""
        columns: list[npt.NDArray[Any]] = [np.arange(int(self._starts[-1]))]
        if keep == "largest":
            pixels = [reader.info.height.astype(np.int64) * reader.info.width for _, reader in self._readers]
            columns += [-self._column("length").astype(np.int64), -np.concatenate(pixels)]
        if prefer is not None:
            names = np.repeat([name for name, _ in self._readers], np.diff(self._starts))
            columns.append(names != prefer)
        return columns

    def by_split(self, numbers: Int64s) -> dict[str, Int64s]:
        """Samples, in ascending order, as numbers within each split."""
        bounds = np.searchsorted(numbers, self._starts)
        return {name: numbers[bounds[i] : bounds[i + 1]] - self._starts[i] for i, (name, _) in enumerate(self._readers)}


def _find(root: dict[int, int], number: int) -> int:
    """The representative of a sample's group; compresses the path to it."""
    above = root.setdefault(number, number)
    while above != number:
        root[number] = root[above]
        number, above = above, root[above]
    return number


@dataclass(frozen=True, slots=True)
class _HashTask:
    root: Path
    split: str
    field: str
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Hashes:
    """hashes: uint64 [n, 2]; found: whether a sample has a hash, bool [n]; unread: images that cannot be decoded."""

    hashes: npt.NDArray[np.uint64]
    found: npt.NDArray[np.bool_]
    unread: int


def hash_samples(task: _HashTask, counter: Counter) -> _Hashes:
    """The perceptual hashes of some samples of a split; runs in a worker."""
    count = task.stop - task.first
    hashes, hashed, unread = np.zeros((count, 2), np.uint64), np.zeros(count, np.bool_), 0
    scratch, size = Scratch(), 0
    with readers.open(task.root, task.split) as reader:
        has = [i for i in range(task.first, task.stop) if reader.has(i, task.field)]
        for done, (index, image) in enumerate(zip(has, reader.stream(has, task.field), strict=True), 1):
            size += len(image)
            try:
                value = difference_hash(image, scratch)
            except BadSampleError:
                unread += 1
                value = None
            if value is not None:
                hashes[index - task.first], hashed[index - task.first] = value, True
            if done % _REPORT_SAMPLES == 0:
                counter.report(_REPORT_SAMPLES, size)
                size = 0
                if counter.stopped():
                    break
    return _Hashes(hashes, hashed, unread)
