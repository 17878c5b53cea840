"""Erase samples: from the index, the shards, the earlier states and the history of a set, in one step.

    choose     the samples, by their keys or an expression
    rewrite    each shard that has one of them, without them, into the working folder; other shards do not change
    index      of the splits that had them, or that have new shards; the order of rows does not change
    commit     dataset.json names the new shards and indexes, and no retired file
    remove     the old shards and indexes, and all retired files

The list of new names (`packer.sets.change`) contains the old ones, too. A kill before the commit leaves the old set; a
kill after it leaves old files, which the next command that changes the set removes first. If the same erasure is run
again, it finds no such samples, and is done.

Copies outside the directory cannot be erased: other names (hard links) of a shard, staged copies, and caches in shared
memory. Those that are visible are reported, with the command that removes them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import readers
from cache.checksums import file_sha256
from cache.errors import BadSampleError, DamagedSampleError, PackerError, SourceError, UnknownNameError
from cache.files import Folder
from cache.messages import Counter, Silent, Watcher, plural, quoted
from packer.columns import PartMeta, ShardColumns, load_part, save_part
from packer.conversion.pack import Cancelled, check_room, disk_full
from packer.documents import has_checksums
from packer.formats import format_named, writable_formats
from packer.formats.base import PackedSample, ShardSpec
from packer.node import list_caches, staged_copies
from packer.output import Result, output_errors
from packer.sets.change import Change, files_of
from packer.sets.pieces import Piece, PieceColumns, shards_of_split
from packer.sets.table import SetTable, operation, origin_of, table, without_values
from packer.workers import Workers, run_shards
from readers.headers import read_header
from readers.headers.base import stored_bytes
from readers.layout import DATASET_FILE, PIXELS, WORK_FOLDER, AdoptedKeys, DatasetInfo, ShardInfo, read_dataset_info
from readers.staging import AS_FILES
from readers.table import ABSENT, NO_LABEL, Buffer

__all__ = ["CopyLeft", "EraseResult", "erase"]

Int64s = npt.NDArray[np.int64]
_FLUSH_BYTES = 8 << 20
_AGAIN = "run the same command again: nothing is erased so far"


@dataclass(frozen=True, slots=True)
class CopyLeft:
    """A place that may have more of the erased samples.

    what: "link", "staged", "cache"; "dropped": samples in shards of this set that were dropped from the index earlier;
        "class": the name of a class that has lost all its samples.
    where: a shard or a set, a directory, or the name of a cache or class.
    advice: what removes it.
    """

    what: str
    where: str
    advice: str


@dataclass(frozen=True, slots=True)
class EraseResult(Result):
    """The result of an erasure. Sizes are in bytes.

    splits: remaining samples, by split.
    samples: number of erased samples, of samples_before; 0 if a killed erasure was completed.
    rewritten: number of rewritten shards, of written_bytes.
    removed: number of removed shards and indexes, including those of earlier states, of removed_bytes.
    copies: copies out of reach.
    unknown: other files in the directory, which were not checked.
    """

    path: Path
    splits: dict[str, int]
    samples: int
    samples_before: int
    rewritten: int
    written_bytes: int
    removed: tuple[str, ...]
    removed_bytes: int
    copies: tuple[CopyLeft, ...] = ()
    unknown: tuple[str, ...] = ()
    dry_run: bool = False


def erase(
    path: str | os.PathLike[str],
    *,
    where: str | None = None,
    keys: Iterable[str] | None = None,
    split: str | None = None,
    workers: int | None = None,
    engine: Executor | None = None,
    dry_run: bool = False,
    watcher: Watcher | None = None,
) -> EraseResult:
    """Remove samples from a set so that none of its files contains them any more.

    where: an expression, such as 'patient == "P0"'; keys: of the samples. One of the two.
    split: only samples of this split.
    workers, engine: as for `packer.append`.
    dry_run: report what would be erased, and write nothing.

    Shards without such samples do not change. Readers that have the set open cannot continue to read it, as after
    `packer.prune`. The history records that samples were erased, but not which. Bytes on the disk are freed, not
    overwritten.

    Raises UnknownNameError (no such key), SourceError (no sample is chosen; all are; shards that packer did not
    write), BadSampleError for a damaged sample in one of the shards, and the errors of other changes.
    """
    root, watcher, crew = Path(path), watcher or Silent(), Workers(workers, engine)
    listed = None if keys is None else sorted(keys)
    request = hashlib.sha256(json.dumps([where, listed, split]).encode()).hexdigest()
    if dry_run:
        return _Erasure(table(root), where, listed, split).result(dry_run=True)
    with Change(root, watcher) as change, output_errors(root):
        try:
            erasure = _Erasure(table(root), where, listed, split)
        except (SourceError, UnknownNameError):
            if change.completed != request:
                raise
            counts = table(root).counts  # a killed command had committed this erasure; its files are removed now
            return EraseResult(root, counts, 0, sum(counts.values()), 0, 0, (), 0)
        metas = erasure.rewrite(change, crew, watcher)
        info = erasure.write(change, metas)
        result = erasure.result(metas)
        change.commit(info, erases=request)
        return result


class _Item(NamedTuple):
    """A remaining sample: its split, its number there, and its number among the remaining samples of the split."""

    split: str
    number: int
    new: int


@dataclass(frozen=True, slots=True)
class _Task:
    """A shard to rewrite. samples: (split, number in it), in the order of the file."""

    root: Path
    old: str
    new: str
    work: str  # its name in the working folder
    format: str
    spec: ShardSpec
    with_labels: bool
    checksums: bool
    samples: tuple[tuple[str, int], ...]

    @property
    def title(self) -> str:
        """The name of the task in the log."""
        return self.old


class _Erasure:
    """The samples to erase, and the shards that have them."""

    def __init__(self, whole: SetTable, where: str | None, keys: Sequence[str] | None, split: str | None) -> None:
        self._whole, self._info, self._root = whole, whole.info, whole.root
        self._check_shards()
        try:
            self._left = whole.drop(where, keys=keys, split=split)
        except UnknownNameError as error:
            if keys is None:
                raise
            raise UnknownNameError(f"{error}{self._of_dropped()}") from error
        except SourceError as error:
            raise SourceError(f"{error}; to erase the whole set, remove the directory {self._root}") from error
        if len(self._left) == len(whole):
            reason = "no keys are given" if where is None else f"{where!r:.200} is false for all its samples"
            raise SourceError(f"{self._root}: nothing is erased: {reason}{self._of_dropped()}")
        self._arguments = {"keys": "listed"} if where is None else without_values({"where": where})
        self._kept = {name: piece for name, (piece,) in self._left.splits.items()}
        self._gone = {name: self._lost(name, piece) for name, (piece,) in whole.splits.items()}
        self.shards = self._affected()
        self._taken = set[str]()  # names of new shards

    def _of_dropped(self) -> str:
        """Advice if samples were dropped earlier, which no index names any more."""
        return "".join(
            f". Shards may hold samples that were dropped: {copy.advice}" for copy in _dropped(self._info, self._root)
        )

    def _check_shards(self) -> None:
        """Refuse shards that packer must not remove."""
        info = self._info
        if "by" not in info.made or info.adopted != AdoptedKeys() or info.format not in writable_formats():
            raise SourceError(
                f"{self._root}: its shards were made elsewhere, and packer neither writes nor removes such files; make "
                f"a set of packer's own with  packer reshard {quoted(self._root)} -o DIR , erase from that, and remove "
                f"the shards yourself"
            )

    def _lost(self, name: str, piece: Piece) -> Int64s:
        """The numbers of the erased samples of a split."""
        kept = self._kept.get(name)
        return np.setdiff1d(np.arange(len(piece)), _rows(kept) if kept is not None else np.zeros(0, np.int64))

    def _affected(self) -> list[str]:
        """The paths of the shards with a payload of an erased sample."""
        paths = dict[str, None]()
        for name, (piece,) in self._whole.splits.items():
            if len(self._gone[name]):
                shards, gone = self._info.splits[name].shards, piece.table.take(self._gone[name])
                for field in gone.fields:
                    has = gone.field_column(field, "offset") != np.uint64(ABSENT)
                    paths |= {shards[i].path: None for i in np.unique(gone.shard_column(field)[has]).tolist()}
                paths |= {shards[i].path: None for i in np.unique(gone.column("shard")).tolist()}
        return list(paths)

    # --- shards -------------------------------------------------------------------------------------------------
    def rewrite(self, change: Change, workers: Workers, watcher: Watcher) -> dict[str, PartMeta]:
        """Rewrite the shards without these samples into the working folder; empty ones are left out."""
        tasks = [task for number, path in enumerate(self.shards) for task in self._task(change, path, number)]
        samples = sum(len(task.samples) for task in tasks)
        size = sum(self._shard(path).bytes for path in self.shards)
        check_room(self._root, self._staying_bytes())
        metas = run_shards(_write_shard, tasks, len(tasks), workers, watcher, (samples, size), folder=change.work.path)
        return {task.old: meta for task, meta in zip(tasks, metas, strict=True)}

    def _staying_bytes(self) -> int:
        """Bytes of the payloads that are written again."""
        total = 0
        for path in self.shards:
            for field in self._info.fields:
                for name, rows in self._in_shard(path, field):
                    if len(rows):
                        total += int(self._kept[name].table.field_column(field, "length")[rows].sum())
        return total

    def _shard(self, path: str) -> ShardInfo:
        return next(shard for split in self._info.splits.values() for shard in split.shards if shard.path == path)

    def _task(self, change: Change, path: str, number: int) -> Iterator[_Task]:
        """How a shard is rewritten; nothing if no sample is left in it."""
        items = self._items(path)
        if not items:
            return
        info = self._info
        split = next(name for name, known in info.splits.items() if any(s.path == path for s in known.shards))
        is_main = any(len(rows) for _, rows in self._in_shard(path, "shard"))
        fields = {
            name: kind
            for name, kind in info.fields.items()
            if (is_main and name not in info.separate) or any(len(rows) for _, rows in self._in_shard(path, name))
        }
        stem, dot, suffix = path.rpartition(".")
        stem = re.sub(r"\.\d+$", "", stem)  # added by an earlier erasure
        names = (f"{stem}.{again}{dot}{suffix}" for again in range(2, 1 << 30))
        new = change.free(name for name in names if name not in self._taken)
        self._taken.add(new)
        count = sum(1 for shard in info.splits[split].shards if shard.samples) if is_main else 0
        spec = ShardSpec(split, fields, info.classes, info.label_offset, count)
        samples = tuple((item.split, item.number) for item in items)
        work = f"{number}.shard"
        yield _Task(self._root, path, new, work, info.format, spec, is_main, has_checksums(info), samples)

    def _in_shard(self, path: str, column: str) -> Iterator[tuple[str, Int64s]]:
        """By split, the numbers, among the remaining samples, of those in a shard: whole samples, or this field."""
        for name, piece in self._kept.items():
            numbers = [i for i, shard in enumerate(self._info.splits[name].shards) if shard.path == path]
            shards = piece.table.column("shard") if column == "shard" else _shards_of_field(piece, column)
            yield name, np.flatnonzero(np.isin(shards, numbers))

    def _items(self, path: str) -> list[_Item]:
        """The remaining samples of a shard, in the order of the file."""
        places: dict[tuple[str, int], int] = {}
        for column in ("shard", *self._info.fields):
            for name, rows in self._in_shard(path, column):
                piece = self._kept[name]
                for new in rows.tolist():
                    places.setdefault((name, new), 1 << 63)
                if column in piece.table.fields:
                    offsets = piece.table.field_column(column, "offset")[rows].tolist()
                    for new, offset in zip(rows.tolist(), offsets, strict=True):
                        places[name, new] = min(places[name, new], offset)
        ordered = sorted(places, key=lambda item: (places[item], item[1]))
        return [_Item(name, int(_rows(self._kept[name])[new]), new) for name, new in ordered]

    # --- indexes ------------------------------------------------------------------------------------------------
    def write(self, change: Change, metas: Mapping[str, PartMeta]) -> DatasetInfo:
        """Write the indexes into the working folder; returns the new description."""
        info = self._info
        change.moves |= {f"{self.shards.index(path)}.shard": meta.shard.path for path, meta in metas.items()}
        columns = self._new_columns(change, metas)
        splits = {}
        for name, piece in self._kept.items():
            old = info.splits[name]
            if not len(self._gone[name]) and not any(shard.path in self.shards for shard in old.shards):
                splits[name] = old
                continue
            piece = replace(piece, extra=columns[name])
            numbered = shards_of_split([piece], info.separate)
            shards = [
                replace(metas[shard.path].shard, samples=shard.samples) if shard.path in metas else shard
                for _, shard in numbered.shards
            ]
            of_piece = PieceColumns(piece, numbered.numbers[0], info.separate)
            splits[name] = change.write_index(
                name, [of_piece], [len(piece)], info.fields, shards, root=old.root, separate=info.separate
            )
        made = self._made()
        after = operation("erase", self._arguments, (len(self._whole), len(self._left)))
        history = [replace(old, arguments=without_values(old.arguments)) for old in info.history]
        return replace(info, splits=splits, made=made, history=(*history, after))

    def _new_columns(self, change: Change, metas: Mapping[str, PartMeta]) -> dict[str, dict[str, npt.NDArray[Any]]]:
        """By split, the locations of the payloads of the remaining samples, in new or unchanged shards."""
        columns = {
            name: {f"{field}.offset": piece.table.field_column(field, "offset").copy() for field in piece.table.fields}
            for name, piece in self._kept.items()
        }
        for path in metas:
            items = self._items(path)
            with load_part(change.work.path / f"{self.shards.index(path)}.shard.part") as part:
                for field in self._info.fields:
                    if f"{field}.offset" not in part:
                        continue
                    for item, offset in zip(items, part[f"{field}.offset"], strict=True):
                        if offset != np.uint64(ABSENT):
                            columns[item.split][f"{field}.offset"][item.new] = offset
        return columns

    def _made(self) -> dict[str, Any]:
        lost = sum(
            int(piece.table.take(self._gone[name]).field_column(field, "length").sum())
            for name, (piece,) in self._whole.splits.items()
            for field in piece.table.fields
        )
        made = origin_of(self._info, payload_bytes=int(self._info.made.get("payload_bytes", 0)) - lost)
        return made | {"options": without_values(made["options"])}

    # --- the result ---------------------------------------------------------------------------------------------
    def result(self, metas: Mapping[str, PartMeta] | None = None, *, dry_run: bool = False) -> EraseResult:
        info = self._info
        changed = [
            split
            for name, split in info.splits.items()
            if len(self._gone[name]) or any(shard.path in self.shards for shard in split.shards)
        ]
        removed = dict.fromkeys([*self.shards, *(s.index for s in changed), *(old.path for old in info.retired)])
        written = [meta.shard.bytes for meta in (metas or {}).values()]
        return EraseResult(
            path=self._root,
            splits=self._left.counts,
            samples=len(self._whole) - len(self._left),
            samples_before=len(self._whole),
            rewritten=len(written) if metas is not None else sum(bool(self._items(path)) for path in self.shards),
            written_bytes=sum(written),
            removed=tuple(removed),
            removed_bytes=sum(_bytes_of(self._root / path) for path in removed),
            copies=(*self._lost_classes(), *_copies(self._root, info, self.shards)),
            unknown=tuple(_unknown(self._root, info)),
            dry_run=dry_run,
        )

    def _lost_classes(self) -> Iterator[CopyLeft]:
        """Classes that lose all samples: they keep their names, and the others their numbers."""
        labels = [piece.current_labels[self._gone[name]] for name, (piece,) in self._whole.splits.items()]
        left = [piece.current_labels for piece in self._kept.values()]
        for label in np.setdiff1d(np.concatenate(labels), np.concatenate(left)).tolist():
            if 0 <= label < len(self._info.classes):
                advice = (
                    f"its name stays in the set;  packer convert {quoted(self._root)} --classes …  makes one without"
                )
                yield CopyLeft("class", self._info.classes[label], advice)


def _rows(piece: Piece) -> Int64s:
    """The numbers of a piece's samples in their original split."""
    rows = piece.table.rows
    return np.arange(len(piece)) if rows is None else rows


def _shards_of_field(piece: Piece, field: str) -> Int64s:
    """The shard with a field of each sample; -1 if it lacks the field."""
    if field not in piece.table.fields:
        return np.full(len(piece), -1)
    has = piece.table.field_column(field, "offset") != np.uint64(ABSENT)
    return np.where(has, piece.table.shard_column(field).astype(np.int64), -1)


def _bytes_of(path: Path) -> int:
    """Bytes of a file, or of the files in a folder."""
    try:
        return sum(file.stat().st_size for file in path.iterdir()) if path.is_dir() else path.lstat().st_size
    except OSError:
        return 0


# --- one shard, in a worker -----------------------------------------------------------------------------------------
def _write_shard(task: _Task, counter: Counter) -> PartMeta:
    """Write the remaining samples of a shard, byte for byte, each verified against its checksum."""
    with Folder(task.root) as root, root.folder(WORK_FOLDER) as work, ExitStack() as opened:
        splits = {name: opened.enter_context(readers.open(task.root, name, verify=True)) for name in dict(task.samples)}
        writer = format_named(task.format).open_writer(work.path / f"{task.work}.tmp", task.spec)
        columns, size = ShardColumns(list(task.spec.fields)), 0
        try:
            pending = 0
            for split, number in task.samples:
                sample = _packed(splits[split], number, task)
                writer.add(sample)
                columns.add(sample)
                more = sum(len(data) for data in sample.payloads if data is not None)
                pending, size = pending + more, size + more
                counter.report(1, more)
                if pending > _FLUSH_BYTES:
                    writer.flush()
                    pending = 0
                    if counter.stopped():
                        raise Cancelled
            written = writer.finish()
        except BaseException as error:
            writer.abort()
            full = disk_full(error, task.root, _AGAIN) if isinstance(error, OSError) else None
            if full is not None:
                raise full from error
            if not isinstance(error, DamagedSampleError):
                raise
            raise BadSampleError(
                f"{error}; so its shard cannot be rewritten, and nothing is erased: erase this sample, too, or "
                f"restore the shard"
            ) from error
        work.rename(f"{task.work}.tmp", task.work)
        sha256 = file_sha256(work.path / task.work) if task.checksums else ""
        samples = len(task.samples) if task.with_labels else 0
        meta = PartMeta(ShardInfo(task.new, written.bytes, samples, written.crc32c, sha256), size)
        save_part(work.path / f"{task.work}.part", columns.arrays(written.payloads), meta)
        return meta


def _packed(reader: readers.Reader, number: int, task: _Task) -> PackedSample:
    """A sample with the fields that it has in this shard."""
    shards, payloads, names, header = reader.split_info.shards, list[Buffer | None](), list[str](), None
    for field, kind in task.spec.fields.items():
        is_here = (
            field in reader.fields
            and reader.has(number, field)
            and shards[int(reader.table.shard_column(field)[number])].path == task.old
        )
        data = reader.read(number, field) if is_here else None
        if field == "image" and data is not None:
            with suppress(BadSampleError):
                header = read_header(data)
        payloads.append(stored_bytes(data) if data is not None and kind == PIXELS else data)
        names.append(reader.name(number, field) if is_here else "")
    label = int(reader.labels[number]) if task.with_labels else NO_LABEL
    return PackedSample(reader.keys[number], label, tuple(payloads), tuple(names), header)


# --- copies out of reach ----------------------------------------------------------------------------------------------
def _copies(root: Path, info: DatasetInfo, shards: Sequence[str]) -> Iterator[CopyLeft]:
    """Copies of the samples in these shards that are visible on this node."""
    yield from _dropped(info, root)
    yield from _links(root, shards)
    place = os.path.realpath(root)
    for copy in staged_copies():
        if copy.source.removesuffix(AS_FILES) == place:
            yield CopyLeft("staged", copy.path, f"packer stage clean {quoted(root)}")
    fingerprint = info.fingerprint()
    with suppress(OSError):  # no such directory
        for cache in list_caches():
            if cache.set.partition("/")[0] == fingerprint or os.path.realpath(cache.title.rpartition(" (")[0]) == place:
                yield CopyLeft("cache", cache.name, "packer cache clean --all")


def _dropped(info: DatasetInfo, root: Path) -> Iterator[CopyLeft]:
    """Whether shards of the set may have samples that its index does not have."""
    if "samples" in info.edited:
        advice = f"packer reshard {quoted(root)}  and then  packer prune {quoted(root)}  remove them"
        yield CopyLeft("dropped", str(root), advice)


def _links(root: Path, shards: Sequence[str]) -> Iterator[CopyLeft]:
    """Other names of these shards: in neighbouring sets, and the number of those elsewhere."""
    names: dict[tuple[int, int], list[str]] = {}
    for path in shards:
        status = os.stat(root / path)
        names.setdefault((status.st_dev, status.st_ino), []).append(path)
        if os.path.islink(root / path):
            where = os.path.realpath(root / path)
            yield CopyLeft(
                "link",
                where,
                f"{path} is a link to it, and it is kept: erase the samples in the set that it belongs to",
            )
    more = {file: os.stat(root / paths[0]).st_nlink - len(paths) for file, paths in names.items()}
    for other in sorted(Path(os.path.realpath(root)).parent.iterdir()):
        if not (other / DATASET_FILE).is_file() or other.samefile(root):
            continue
        links = list(_shared(other, names))
        for file in links:
            more[file] -= 1
        if links:
            advice = (
                f"packer erase {quoted(other)} …  or, if that finds no such samples,  packer reshard {quoted(other)}  "
                f"and then  packer prune {quoted(other)}"
            )
            yield CopyLeft("link", str(other), advice)
    for file, count in more.items():
        if count > 0:
            name = plural(count, "more name")
            yield CopyLeft("link", str(root / names[file][0]), f"find DIR -inum {file[1]}  finds its {name}")


def _shared(other: Path, files: Collection[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Those of these files that belong to another set, too."""
    try:
        info = read_dataset_info(other)
    except PackerError:
        return
    for path in files_of(info):
        with suppress(OSError):
            status = os.stat(other / path)
            if (status.st_dev, status.st_ino) in files:
                yield status.st_dev, status.st_ino


def _unknown(root: Path, info: DatasetInfo) -> Iterator[str]:
    """Files in the directory that do not belong to the set."""
    known = {DATASET_FILE, WORK_FOLDER, *info.documents}
    known |= {path.partition("/")[0] for path in (*files_of(info), *(old.path for old in info.retired))}
    yield from sorted(name for name in os.listdir(root) if name not in known)
