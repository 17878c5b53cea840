"""A listed and planned conversion, and the file that saves it, so that no other process lists the source again.

`OUT/.packing/listing` is written after the plan and before the first shard. Whoever packs a shard reads only the rows
of that shard: a local worker, a task of an array job, a conversion that was killed and continues.

    block of each shard    rows as encoded below, in the order of the plan
    shards                 int64 [shards, 5]: samples, bytes of the source, offset, length and CRC32C of the block
    left out               UTF-8 JSON: [[path, reason], …]
    folders                UTF-8 JSON: [[path below the source, time of modification in ns], …]
    head                   UTF-8 JSON: question, fingerprint, positions of the last three, and the rest of the listing
    tail                   uint64 bytes of the head, uint32 CRC32C of it, "PKLS"

The file answers one question (`question_of`): this source, these options. It is not used for another question, if a
folder of the source has another modification time (a file was added, removed or renamed), or with overwrite=True. A
file that was overwritten in place is noticed when it is read: its size and time are compared with those of the listing.
Damaged data are never used.

    prepare   list and plan                                               -> Prepared
    save      write it to the working folder, which its owner has locked  -> Prepared that reads the rows from there
    load      read it from the working folder, in any process             -> Prepared, or None: list again
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cache.checksums import crc32c
from cache.errors import DatasetError, OutputError, SourceError, UnknownNameError
from cache.files import Folder
from cache.messages import Watcher, plural, quoted
from cache.system import pread
from packer import __version__
from packer.columns import PartMeta
from packer.conversion.commit import commit
from packer.conversion.images import remarks_of
from packer.conversion.journal import Journal
from packer.conversion.options import Choose, ConvertOptions
from packer.conversion.plan import Plan, PlannedShard
from packer.conversion.result import count_by_action, refuse_nothing, refuse_unknown, refuse_unlike
from packer.formats import format_named
from packer.formats.base import ShardSpec
from packer.sources.base import (
    FieldNames,
    ListingBuilder,
    NumberPlaces,
    Slice,
    SomeSamples,
    Source,
    SourceListing,
    SplitListing,
    stored_title,
)
from packer.sources.folder import TreeListing
from readers.layout import WORK_FOLDER, DatasetInfo, FieldName, SplitName
from readers.opening.tree import Rows, TreeFiles, TreeSplit
from readers.table import Names, Strings

__all__ = [
    "JOB_FILE",
    "LISTING_FILE",
    "Job",
    "Prepared",
    "SavedSamples",
    "decode_rows",
    "encode_rows",
    "load",
    "load_job",
    "question_of",
    "save",
    "task_list",
]


# ------------------------------------------------------------------------------
# Rows of a listing as bytes, without pickle, for a worker on another machine or in a later run.
#
#     uint32      bytes of the header
#     header      JSON: {"root": folder of the split, "columns": [[name, dtype, numbers], …]}
#     columns     one after the other, little-endian, as the header has them
#
#     folders, folders.offset    strings (`readers.table`): folders of the files, with a "/" at the end; "" the root
#     folder                     int32 [k]   which of them a file is in
#     names, names.offset        strings: names of the files in their folders
#     bytes, stamps, labels      int64 [k]
#     whole                      uint8 [k]   1: the key is the name with its suffix
#
# A block is not trusted: names and folders must not lead out of the root of the source, and numbers must be in bounds.


_COLUMNS = {
    "folders": "|u1",
    "folders.offset": "<u8",
    "folder": "<i4",
    "names": "|u1",
    "names.offset": "<u8",
    "bytes": "<i8",
    "stamps": "<i8",
    "labels": "<i8",
    "whole": "|u1",
}
_MAX_HEADER_BYTES = 1 << 16
_SLASH, _DOT = 47, 46


def can_save(listing: SplitListing) -> bool:
    """Whether the rows of a listing can be encoded; only those of a file tree can."""
    return isinstance(listing, TreeListing)


def encode_rows(listing: SplitListing, rows: Rows) -> bytes:
    """Some rows of a listing that `can_save`."""
    assert isinstance(listing, TreeListing)
    indices = np.arange(rows.start, rows.stop, rows.step) if isinstance(rows, range) else rows
    folders, folder, names, facts = listing.part.files.take(rows).compact()
    paths = Names.of(folders)
    values: dict[str, npt.NDArray[Any]] = {
        "folders": paths.blob,
        "folders.offset": paths.offsets,
        "folder": folder,
        "names": names.blob,
        "names.offset": names.offsets,
        "bytes": facts[:, 0],
        "stamps": facts[:, 1],
        "labels": listing.labels[indices],
        "whole": listing.whole[indices],
    }
    columns = {name: np.ascontiguousarray(values[name], dtype) for name, dtype in _COLUMNS.items()}
    shapes = [[name, _COLUMNS[name], len(column)] for name, column in columns.items()]
    header = json.dumps({"root": listing.root, "columns": shapes}).encode()
    return b"".join((len(header).to_bytes(4, "little"), header, *(column.data for column in columns.values())))


def decode_rows(data: bytes, classes: int, stamped: bool = True) -> TreeListing:
    """The listing of the rows encoded by `encode_rows`. Raises DatasetError for an invalid block.

    classes: number of classes of the set. stamped: see `TreeListing`.
    """
    try:
        return _decode(memoryview(data), classes, stamped)
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError) as error:
        raise DatasetError(f"is not a block of rows: {error}") from error


def _decode(data: memoryview, classes: int, stamped: bool) -> TreeListing:
    size = int.from_bytes(data[:4], "little")
    if size > _MAX_HEADER_BYTES:
        raise ValueError(f"its header has {size:,} bytes")
    header, at, columns = json.loads(bytes(data[4 : 4 + size])), 4 + size, {}
    for (name, dtype), (title, kind, count) in zip(_COLUMNS.items(), header["columns"], strict=True):
        if (title, kind) != (name, dtype) or not 0 <= count <= len(data):
            raise ValueError(f"column {title!r:.80} of {kind!r:.20}, expected {name} of {dtype}")
        columns[name] = np.frombuffer(data, dtype, count, at)
        at += columns[name].nbytes
    root, count = header["root"], len(columns["folder"])
    folders = list(Names(columns["folders"], columns["folders.offset"]))
    names = Names(columns["names"], columns["names.offset"])
    if at != len(data) or any(len(columns[name]) != count for name in ("bytes", "stamps", "labels", "whole")):
        raise ValueError("its columns have different lengths")
    _check_bounds("folder", columns["folder"], 0, len(folders))
    _check_bounds("labels", columns["labels"], -1, classes)
    _check_names(names, count)
    skip = f"{root}/" if root else ""
    if not isinstance(root, str) or not all(path.startswith(skip) and _is_folder(path) for path in folders):
        raise ValueError("a folder leads out of the source")
    facts = np.zeros((count, 3), np.int64)
    facts[:, 0], facts[:, 1] = columns["bytes"], columns["stamps"]
    part = TreeSplit(root, TreeFiles(folders, columns["folder"], names, facts), columns["labels"].astype(np.int32))
    return TreeListing(part, columns["whole"] != 0, stamped)


def _check_bounds(name: str, numbers: npt.NDArray[Any], first: int, stop: int) -> None:
    if len(numbers) and not first <= int(numbers.min()) <= int(numbers.max()) < stop:
        raise ValueError(f"{name}: a number is outside {first} … {stop - 1}")


def _check_names(names: Strings, count: int) -> None:
    """Check names of files in a folder. The walk omits hidden names, so none is ".."."""
    starts, stops = names.offsets[:-1], names.offsets[1:]
    if len(names) != count or bool((starts >= stops).any()):
        raise ValueError("a name is empty")
    if bool((names.blob == _SLASH).any() or (names.blob == 0).any() or (names.blob[starts] == _DOT).any()):
        raise ValueError("a name is not that of a file in its folder")


def _is_folder(path: str) -> bool:
    """Whether it is "", or plain names that each end with a "/"."""
    parts: Sequence[str] = path.split("/")
    return "\0" not in path and not parts[-1] and all(part and part[0] != "." for part in parts[:-1])


LISTING_FILE = "listing"
_MAGIC, _VERSION = b"PKLS", 1
_TAIL_BYTES = 16
_MAX_HEAD_BYTES = 1 << 26
_MAX_BLOCK_BYTES = 1 << 36
_SAVED_COLUMNS = ("splits", "fields", "classes", "left_out", "warnings", "watched")
_MORE = tuple(one.name for one in fields(SourceListing) if one.name not in _SAVED_COLUMNS)


@dataclass(frozen=True, slots=True)
class SavedSamples:
    """The samples of one shard, in the listing of the set in `out`; cheap to send, since `slices` reads them.

    stamped: whether changed files are refused; False in the process that has just listed them.
    """

    out: Path
    offset: int
    length: int
    crc32c: int
    classes: int
    stamped: bool

    def slices(self) -> Iterator[Slice]:
        """All samples, a thousand at a time. Raises SourceError if they cannot be read."""
        return self.listing().slices()

    def listing(self) -> SplitListing:
        """Their columns."""
        path = self.out / WORK_FOLDER / LISTING_FILE
        try:
            with Folder(self.out) as out, out.folder(WORK_FOLDER) as work, work.open(LISTING_FILE) as file:
                data = _read(file.fileno(), self.offset, self.length, self.crc32c)
            return decode_rows(data, self.classes, self.stamped)
        except (OSError, DatasetError) as error:
            raise SourceError(
                f"{path}: the listing of the source cannot be read ({error}); remove that file and run the same "
                f"command again, which lists again and keeps complete shards"
            ) from error


@dataclass(frozen=True, slots=True)
class Prepared:
    """A conversion before packing.

    listing: if saved, without the rows of its splits, which `samples` reads.
    rows: of each shard of the plan, if they are saved.
    """

    plan: Plan
    listing: SourceListing
    rows: tuple[SavedSamples, ...] | None = None

    def samples(self, number: int) -> SomeSamples | SavedSamples:
        """The samples of shard `number` of the plan, in the form that is sent to a worker."""
        if self.rows is not None:
            return self.rows[number]
        shard = self.plan.shards[number]
        return SomeSamples(self.listing.splits[shard.split], shard.indices)

    def paths(self, source: Source) -> Iterator[str | os.PathLike[str]]:
        """Every file that the samples are read from."""
        if self.rows is None:
            yield from source.paths(self.listing)
            return
        for shard, rows in zip(self.plan.shards, self.rows, strict=True):
            yield from source.paths(replace(self.listing, splits={shard.split: rows.listing()}))


def question_of(source: Source, options: ConvertOptions, choice: Choose) -> str:
    """A digest of everything but files that determines listing and plan; "" for a source whose listing is not saved."""
    identity = getattr(source, "identity", "")
    if not identity:
        return ""
    settings = options.to_json()
    settings.pop("checksums", None)
    del settings["on_error"]  # as in the plan's fingerprint
    text = json.dumps([_VERSION, identity, settings, asdict(choice)])
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def save(out: Path, work: Folder, question: str, prepared: Prepared) -> Prepared:
    """Write `prepared` to the working folder of the set in `out`, and drop its rows.

    Returns the same object if the question is "", or if listings of its kind are not saved. Raises OSError.
    """
    plan, listing = prepared.plan, prepared.listing
    if not question or listing.watched is None or not all(map(can_save, listing.splits.values())):
        return prepared
    table = np.zeros((len(plan.shards), 5), np.int64)
    with work.writing(LISTING_FILE, durable=False) as file:
        offset = 0
        for i, shard in enumerate(plan.shards):
            block = encode_rows(listing.splits[shard.split], shard.indices)
            table[i] = len(shard.indices), shard.source_bytes, offset, len(block), crc32c(block)
            offset += file.write(block)
        places = {}
        folders, times = listing.watched
        for name, content in (
            ("shards", table.astype("<i8").tobytes()),
            ("left_out", _json(listing.left_out)),
            ("folders", _json(list(zip(folders, times.tolist(), strict=True)))),
        ):
            places[name] = [offset, len(content), crc32c(content)]
            offset += file.write(content)
        head = {
            "question": question,
            "fingerprint": plan.fingerprint,
            "splits": [[name, part.root, plan.specs[name].shards] for name, part in listing.splits.items()],
            "fields": dict(listing.fields),
            "classes": listing.classes,
            "warnings": listing.warnings,
            "more": {name: getattr(listing, name) for name in _MORE},
            **places,
        }
        content = _json(head)
        file.write(content)
        file.write(len(content).to_bytes(8, "little") + crc32c(content).to_bytes(4, "little") + _MAGIC)
    return _prepared(out, plan, listing, table, stamped=False)


def load(out: Path, question: str, options: ConvertOptions, root: str | os.PathLike[str] | None) -> Prepared | None:
    """Load a saved listing and plan from the working folder of the set in `out`, for the same question.

    root: the folder of the source, whose folders must be unchanged since the listing; None: skip that check.

    None if there is nothing, or it is for another question, or cannot be read.
    """
    try:
        with Folder(out) as place, place.folder(WORK_FOLDER) as work, work.open(LISTING_FILE) as file:
            return _load(out, file.fileno(), question, options, root) if question else None
    except (OSError, DatasetError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _load(
    out: Path, file: int, question: str, options: ConvertOptions, root: str | os.PathLike[str] | None
) -> Prepared | None:
    size = os.fstat(file).st_size
    tail = pread(file, _TAIL_BYTES, size - _TAIL_BYTES)
    length = int.from_bytes(tail[:8], "little")
    if tail[12:] != _MAGIC or length > min(size, _MAX_HEAD_BYTES):
        return None
    head = json.loads(_read(file, size - _TAIL_BYTES - length, length, int.from_bytes(tail[8:12], "little")))
    if head["question"] != question:
        return None
    if root is not None and not _is_current(root, json.loads(_read(file, *head["folders"]))):
        return None
    table = np.frombuffer(_read(file, *head["shards"]), "<i8").reshape(-1, 5)
    left_out = [(str(path), str(reason)) for path, reason in json.loads(_read(file, *head["left_out"]))]
    more = {name: head["more"][name] for name in _MORE}
    if not all(isinstance(value, str | int | None) for value in more.values()):
        raise ValueError("a word or a number is expected of each property of a listing")
    listing = SourceListing(
        {SplitName(name): _without_rows(str(folder)) for name, folder, _ in head["splits"]},
        {FieldName(name): str(kind) for name, kind in head["fields"].items()},
        tuple(map(str, head["classes"])),
        left_out,
        list(map(str, head["warnings"])),
        **more,
    )
    counts = {str(name): int(count) for name, _, count in head["splits"]}
    plan = _plan(options, listing, counts, table, str(head["fingerprint"]))
    return _prepared(out, plan, listing, table, stamped=True)


def _plan(
    options: ConvertOptions,
    listing: SourceListing,
    counts: dict[str, int],
    table: npt.NDArray[np.int64],
    fingerprint: str,
) -> Plan:
    """counts: shards by split, in the order of the table."""
    if min(counts.values(), default=0) < 0 or sum(counts.values()) != len(table):
        raise ValueError("the shards do not match those of the splits")
    container, shards, specs = format_named(options.to), [], {}
    rows = iter(table.tolist())
    for split, count in counts.items():
        specs[split] = ShardSpec(
            split, options.packed_fields(listing.fields), listing.classes, options.shards.label_offset, count
        )
        first = 0
        for number in range(count):
            samples, size, *_ = next(rows)
            if samples < 0 or size < 0:
                raise ValueError("a shard has a negative size")
            name = container.shard_name(split, number, count)
            shards.append(PlannedShard(split, name, range(first, first + samples), size))
            first += samples
    return Plan(tuple(shards), specs, fingerprint)


def _prepared(out: Path, plan: Plan, listing: SourceListing, table: npt.NDArray[np.int64], stamped: bool) -> Prepared:
    classes = len(listing.classes)
    rows = tuple(
        SavedSamples(out, offset, length, crc, classes, stamped) for _, _, offset, length, crc in table.tolist()
    )
    splits = {name: _without_rows(part.root) for name, part in listing.splits.items()}
    shards = tuple(shard._replace(indices=range(len(shard.indices))) for shard in plan.shards)
    return Prepared(replace(plan, shards=shards), replace(listing, splits=splits), rows)


def _without_rows(root: str) -> SplitListing:
    none, nothing = np.empty(0, np.int64), Strings.of(())
    return SplitListing(root, nothing, none, FieldNames(nothing), none, NumberPlaces(none[:, None]), none)


def _is_current(root: str | os.PathLike[str], folders: list[tuple[str, int]]) -> bool:
    """Whether every folder has the modification time of the listing."""
    try:
        return all(os.stat(os.path.join(root, path)).st_mtime_ns == time for path, time in folders)
    except OSError:
        return False


def _json(value: Any) -> bytes:
    """Encode as JSON. Names that are not UTF-8 are kept: lone surrogates become escapes."""
    return json.dumps(value).encode()


def _read(file: int, offset: int, length: int, checksum: int) -> bytes:
    """Read a part of an open file. Raises DatasetError if its bytes are damaged."""
    size = os.fstat(file).st_size
    if not 0 <= offset <= offset + length <= size or length > _MAX_BLOCK_BYTES:
        raise DatasetError(f"[{offset}, {offset + length}) is not within its {size} bytes")
    data = bytearray()
    while len(data) < length:
        part = pread(file, min(length - len(data), 1 << 30), offset + len(data))
        if not part:
            raise DatasetError(f"ends at byte {offset + len(data)}")
        data += part
    if crc32c(data) != checksum:
        raise DatasetError(f"the bytes from {offset} are not those that were written")
    return bytes(data)


# The file with everything that `packer commit` needs to make a set from complete shards.
#
# `OUT/.packing/job.json`, written by the first task of several:
#
#     tasks        number of tasks
#     title, root  of the source; source: the title as dataset.json has it
#     to, on_error, options    of the conversion; options as dataset.json has them
#     fingerprint  of the plan
#     splits       [[name, folder of the source, shards], …]: the names of the shards follow
#     fields, label_offset, classes, left_out, warnings, not_chosen    of the listing
#
# `Job.finish` is the end of every conversion.


JOB_FILE = "job.json"
_JOB_VERSION = 2
_MAX_BYTES, _MAX_SHARDS = 1 << 30, 1 << 24


@dataclass(frozen=True, slots=True)
class Job:
    """A conversion whose shards are packed: everything except the samples. listing: may be without its rows."""

    plan: Plan
    listing: SourceListing
    to: str
    on_error: str
    options: Mapping[str, Any]
    title: str
    root: str
    source: str
    tasks: int = 1

    @classmethod
    def of(cls, source: Source, options: ConvertOptions, prepared: Prepared, tasks: int = 1) -> Job:
        """The job of a conversion that is listed and planned."""
        names = source.title, str(getattr(source, "root", "")), stored_title(source)
        return cls.of_plan(prepared.plan, prepared.listing, options, names, tasks)

    @classmethod
    def of_plan(
        cls, plan: Plan, listing: SourceListing, options: ConvertOptions, names: tuple[str, str, str], tasks: int = 1
    ) -> Job:
        """names: title and root of the source, and its title as dataset.json has it."""
        settings = {name: value for name, value in options.to_json().items() if value is not None}
        return cls(plan, listing, options.to, options.on_error, settings, *names, tasks)

    def finish(self, journal: Journal, metas: Sequence[PartMeta], watcher: Watcher) -> DatasetInfo:
        """Make the set from the shards; metas are parallel to the plan's shards. Raises SourceError if it is empty."""
        remarks = remarks_of(meta.remarks for meta in metas)
        for remark in remarks:
            watcher.note(f"warning: {remark}")
        try:
            refuse_unlike(self.title, metas)
            refuse_unknown(self.title, metas)
            refuse_nothing(self.title, self.root, self.listing, self.plan, metas)
        except (SourceError, UnknownNameError):
            journal.remove()
            with suppress(OSError):  # fails if it still contains the old set
                journal.out.rmdir()
            raise
        made: dict[str, Any] = {
            "by": f"packer {__version__}",
            "source": self.source,
            "options": self.options,
            "plan": self.plan.fingerprint,
            "payload_bytes": sum(meta.payload_bytes for meta in metas),
            "left_out": count_by_action(metas),
            **({"remarks": list(remarks)} if remarks else {}),
        }
        return commit(journal, self.plan, metas, self.listing, self.to, made)

    def save(self, work: Folder) -> None:
        """Write the file into the working folder."""
        listing, specs = self.listing, self.plan.specs
        content = {
            "version": _JOB_VERSION,
            "tasks": self.tasks,
            "title": self.title,
            "root": self.root,
            "source": self.source,
            "to": self.to,
            "on_error": self.on_error,
            "options": self.options,
            "fingerprint": self.plan.fingerprint,
            "splits": [[name, part.root, specs[name].shards] for name, part in listing.splits.items()],
            "fields": dict(next(iter(specs.values())).fields if specs else listing.fields),
            "label_offset": next(iter(specs.values())).label_offset if specs else 0,
            "classes": listing.classes,
            "left_out": listing.left_out,
            "warnings": listing.warnings,
            "not_chosen": listing.not_chosen,
        }
        work.write(JOB_FILE, json.dumps(content).encode())

    def whole(self, journal: Journal) -> list[PartMeta]:
        """The facts of all shards. Raises OutputError if some are missing, with the tasks to run."""
        metas = [journal.load_whole(shard, self.plan, self.on_error) for shard in self.plan.shards]
        missing = [number for number, meta in enumerate(metas) if meta is None]
        if missing:
            tasks = sorted({number % self.tasks for number in missing})
            task = f"--task {tasks[0]}/{self.tasks}" + ("  and the others" if len(tasks) > 1 else "")
            raise OutputError(
                f"{journal.out}: {len(missing)} of {plural(len(metas), 'shard')} are missing, those of "
                f"{plural(len(tasks), 'task')} of {self.tasks}: run the same  packer convert … {task}  "
                f"again (as an array job of Slurm: sbatch "
                f"--array={task_list(tasks)} SCRIPT), then  packer commit {quoted(journal.out)}"
            )
        return [meta for meta in metas if meta is not None]


def task_list(numbers: Sequence[int]) -> str:
    """Ascending numbers in the syntax of batch systems: 0,3-5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def load_job(work: Folder) -> Job | None:
    """The job whose tasks have packed into this folder; None if there is none. Raises OutputError if unreadable."""
    if not work.kind(JOB_FILE):
        return None
    path = work.path / JOB_FILE
    try:
        return _parsed(json.loads(work.read(JOB_FILE, _MAX_BYTES)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise OutputError(f"{path}: cannot be read ({error!r:.200}); run any of its tasks again") from error


def _parsed(document: dict[str, Any]) -> Job:
    if document["version"] != _JOB_VERSION:
        raise ValueError(f"version {document['version']}, this packer reads {_JOB_VERSION}")
    splits = [(SplitName(name), str(root), int(count)) for name, root, count in document["splits"]]
    if not 0 <= sum(count for _, _, count in splits) <= _MAX_SHARDS or min(count for _, _, count in splits) < 0:
        raise ValueError("impossible numbers of shards")
    tasks = int(document["tasks"])
    if tasks < 1:
        raise ValueError(f"{tasks} tasks")
    fields = {str(FieldName(name)): str(kind) for name, kind in document["fields"].items()}
    listing = SourceListing(
        {name: ListingBuilder(len(fields)).build(root) for name, root, _ in splits},
        fields,
        tuple(map(str, document["classes"])),
        [(str(path), str(reason)) for path, reason in document["left_out"]],
        list(map(str, document["warnings"])),
        not_chosen=int(document["not_chosen"]),
    )
    container, offset = format_named(str(document["to"])), int(document["label_offset"])
    specs: dict[str, ShardSpec] = {
        name: ShardSpec(name, fields, listing.classes, offset, count) for name, _, count in splits
    }
    shards = tuple(
        PlannedShard(name, container.shard_name(name, number, count), range(0), 0)
        for name, _, count in splits
        for number in range(count)
    )
    plan = Plan(shards, specs, str(document["fingerprint"]))
    options = dict(document["options"])
    title, root = str(document["title"]), str(document["root"])
    return Job(
        plan, listing, container.name, str(document["on_error"]), options, title, root, str(document["source"]), tasks
    )
