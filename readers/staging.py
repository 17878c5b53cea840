"""Staging: copy a packed set, or part of it, to this node's disk once, for all processes of the node.

    with readers.stage("/lustre/sets/imagenet-hdf5", "$SLURM_TMPDIR") as local:
        reader = readers.open(local, split="train")

Every process of the node calls `stage`. One copies, the others wait; see `cache.staging`. The copy is in
`TARGET/packer-staged-<uid>/<name>-<fingerprint>/` and stays there unless cleanup="atexit"; a later job on the node, or
the same job after a requeue, reuses it. While the context is open the copy is locked against removal.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import io
import json
import os
import re
import stat
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from cache.errors import DatasetError, MissingExtraError, PackerError, ServingError, StagingError, StagingSourceError
from cache.files import read_regular
from cache.launchers import job_name
from cache.messages import Watcher, listed, plural
from cache.node import detect_ranks
from cache.remote import Patience, Remote
from cache.serving import Rendezvous, Server, ServerProcess, ServeSettings, own_address, read_token
from cache.staging.session import CopyCounts, Session
from cache.staging.sources import CopyOptions, FolderSource, Manifest, RemoteSource, Request, Source, StagedFile
from cache.stores import Buffer, Int64s, Shards, Store
from cache.stores.base import Payloads, layer
from cache.stores.copied import Copied, Neighbours, RowOwners, ShardOwners
from cache.stores.remote import RemoteFiles
from readers.headers import MEDIA, SUFFIX, sniff
from readers.layout import (
    DATASET_FILE,
    KIND_SUFFIXES,
    MAX_JSON_BYTES,
    PIXELS,
    DatasetInfo,
    SplitInfo,
    read_dataset_info,
    shortened,
)
from readers.opening.packed import Checked, open_packed
from readers.order import NodeLocal, ResumeToken, StagedFirst
from readers.order.local import shard_starts
from readers.reader import Reader
from readers.table import ABSENT, NO_LABEL, Columns, Index, decode_name

# The files of a packed set that a node needs.
#
# Staged are whole shards, the whole index of each chosen split, and `dataset.json` last. `part=(i, n)` is the share of
# node i of n with `readers.order.NodeLocal`: every shard with a sample of `local_part(i)`. A shard at a boundary is
# staged by both nodes; without `overlap` only by the first. `fraction` takes shards from the front of each split's list
# (or of this node's share) up to that share of the bytes, at least one shard.


@dataclass(frozen=True)
class SetFiles:
    """A packed set as files.

    home: the local directory with dataset.json and the indexes.
    manifest: all files.
    head: dataset.json.
    indexes: the files of the index, by split.
    """

    home: Path
    info: DatasetInfo
    manifest: Manifest
    head: StagedFile
    indexes: dict[str, list[StagedFile]]

    def shards(self, options: StageOptions) -> list[StagedFile]:
        """The requested shards, split by split. Raises UnknownNameError."""
        chosen = []
        for name in self.splits(options):
            split = self.info.splits[name]
            listed = [self.manifest.by_path[split.shards[number].path] for number in self._share(split, options)]
            chosen += listed[: shards_of_fraction([file.bytes for file in listed], options.fraction)]
        return list(dict.fromkeys(chosen))

    def in_turn(self, shards: Sequence[StagedFile], starts: Int64s, turns: Int64s) -> list[StagedFile]:
        """`shards`, with those of the split whose shards start at `starts` first, in the order `turns`.

        Raises StagingError if no split has these shards.
        """
        splits = [split for split in self.info.splits.values() if np.array_equal(shard_starts(split), starts)]
        if not splits:
            raise StagingError(
                f"{self.manifest.source}: no split has the {len(starts) - 1} shards with {starts[-1]} samples that the "
                f"order is made for; make it with  readers.order.staged_first(reader.split_info)"
            )
        first = [self.manifest.by_path[split.shards[number].path] for split in splits for number in turns.tolist()]
        names = set(shards)
        return list(dict.fromkeys([file for file in first if file in names] + list(shards)))

    def index(self, options: StageOptions) -> list[StagedFile]:
        """The index files of the requested splits."""
        return [file for name in self.splits(options) for file in self.indexes[name]]

    def splits(self, options: StageOptions) -> list[str]:
        if options.splits is None:
            return list(self.info.splits)
        names = [options.splits] if isinstance(options.splits, str) else options.splits
        return [self.info.split(name, str(self.manifest.source))[0] for name in names]

    def _share(self, split: SplitInfo, options: StageOptions) -> Sequence[int]:
        """Numbers of the shards with samples of this node's part."""
        part = options.node_part()
        if part is None:
            return range(len(split.shards))
        node, nodes = part
        order, shards = NodeLocal(split.samples, nodes=nodes), len(split.shards)
        index = Index(self.home / split.index, split.samples, (), self.info.separate)
        columns = [index.column("shard"), *map(index.shard_column, self.info.separate)]
        try:
            if not options.overlap:
                return list(np.flatnonzero(shard_owners(columns, order, shards) == node).tolist())
            return list(np.flatnonzero(_shards_of(columns, order.local_part(node), shards)).tolist())
        except IndexError:
            raise DatasetError(f"{self.home / split.index}: names a shard that the split does not have") from None


def _remote_set_files(url: str) -> SetFiles:
    """The files of the set at an address, for staging; its indexes are fetched.

    The fingerprint covers dataset.json (and so the CRC32C of every shard), its metadata on the server, and the sizes of
    the index columns. Raises DatasetError, RemoteError, StaleIndexError, OutputError, MissingExtraError.
    """
    from readers.opening.remote import RemoteHome

    remote = Remote(url)
    home = RemoteHome(remote)
    columns = {}
    for name, split in home.info.splits.items():
        folder = home.fetch_index(name)
        files = sorted(home.info.column_names)
        columns[name] = [(f"{split.index}/{file}", (folder / file).stat().st_size) for file in files]
    from_here = frozenset([DATASET_FILE, *(path for column in columns.values() for path, _ in column)])
    source = RemoteSource(remote, home.path, from_here)
    return describe_files(source, remote.url.name, home.path, home.info, home.text, columns, home.state.encode())


def shard_owners(columns: Sequence[npt.NDArray[Any]], order: NodeLocal, shards: int) -> Int64s:
    """The first node whose part has samples of each shard: int64 [shards], -1 for shards without samples.

    columns: the shard of each sample, for the images and for each field with separate shards. Raises IndexError for
    shard numbers that are not below `shards`.
    """
    owners = np.full(shards, -1, np.int64)
    for number in range(order.nodes):
        owners[_shards_of(columns, order.local_part(number), shards) & (owners < 0)] = number
    return owners


def _shards_of(columns: Sequence[npt.NDArray[Any]], samples: range, shards: int) -> npt.NDArray[np.bool_]:
    """Whether each shard has some of the samples: bool [shards]."""
    used = np.zeros(shards, np.bool_)
    for column in columns:
        used[column[samples.start : samples.stop]] = True
    return used


def shards_of_fraction(sizes: Sequence[int], fraction: float) -> int:
    """Number of shards at the front that hold `fraction` of the bytes; at least one if there is any."""
    sums = np.cumsum(np.asarray(sizes, np.int64))
    before = np.append(0, sums)[:-1]
    return int(((before < fraction * (sums[-1] if len(sums) else 0)) | (before == 0)).sum())


def set_files(dataset: str | os.PathLike[str]) -> SetFiles:
    """The files of a packed set. Raises DatasetError, StagingError."""
    home = Path(os.path.realpath(dataset))
    text = _bytes_of(home / DATASET_FILE)
    info = read_dataset_info(home)
    if text != _bytes_of(home / DATASET_FILE):
        raise StagingError(f"{home / DATASET_FILE}: is being rewritten; stage again when it is complete")
    columns = {name: _columns(home, split.index) for name, split in info.splits.items()}
    return describe_files(FolderSource(home), home.name, home, info, text, columns)


def describe_files(
    source: Source,
    name: str,
    home: Path,
    info: DatasetInfo,
    text: bytes,
    columns: Mapping[str, Sequence[tuple[Any, ...]]],
    state: bytes = b"",
) -> SetFiles:
    """The files of a set at `source`, with all indexes in `home`.

    text: the content of dataset.json, which `info` was read from.
    columns: for each split, (path, bytes, and anything that distinguishes versions) of the files of its index.
    state: anything else that distinguishes versions of the set.
    """
    from crc32c import crc32c

    digest = hashlib.blake2b(text + state, digest_size=16)
    indexes = {}
    for split, files in columns.items():
        digest.update(json.dumps([split, files]).encode())
        checksums = {file: column.crc32c for file, column in info.splits[split].columns.items()}
        indexes[split] = [StagedFile(path, size, checksums.get(path.rpartition("/")[2])) for path, size, *_ in files]
    head = StagedFile(DATASET_FILE, len(text), crc32c(text))
    shards = [StagedFile(s.path, s.bytes, s.crc32c) for split in info.splits.values() for s in split.shards]
    unique = {file.path: file for file in (*shards, *chain.from_iterable(indexes.values()), head)}
    manifest = Manifest(source, name, digest.hexdigest(), tuple(unique.values()), last=DATASET_FILE)
    return SetFiles(home, info, manifest, head, indexes)


def _bytes_of(path: Path) -> bytes:
    try:
        return read_regular(path, MAX_JSON_BYTES)
    except OSError:
        return b""  # read_dataset_info then raises the reason


def _columns(home: Path, folder: str) -> list[tuple[str, int, int]]:
    """(path, bytes, time of the last change in ns) of an index's columns, by name."""
    try:
        columns = []
        for entry in os.scandir(home / folder):
            status = entry.stat()
            if stat.S_ISREG(status.st_mode):
                columns.append((f"{folder}/{entry.name}", status.st_size, status.st_mtime_ns))
        return sorted(columns)
    except OSError as error:
        raise DatasetError(
            f"{home / folder}: the index cannot be listed: {error.strerror}; rebuild it with  packer index"
        ) from error


# The original files of a packed set: their names, and the files to stage.
#
# A payload that was packed from a file keeps the file's name below the split's folder. Other payloads get a name from
# the key: `key.json` for the field json, `key.boxes.npy` for boxes, `key.jpg` and so on for an image. Names come from
# the set and are not trusted: the writer checks each path.
#
# Staged files are in a separate folder, `TREE`, because torchvision takes every folder of a tree without splits for a
# class, including that of the copy's records.


LABELS_FILE = "labels.csv"
LABELS_HEADER = ("path", "label", "class", "split")
AS_FILES = " as files"
TREE = "files"
_FORMULA = re.compile("'*[=+@\t\r-]")
_GROUP = 32  # samples that are read together
_MOST_GROUPS = 32  # most groups kept: the rest of a group that is copied in part is never requested


def original_files(reader: Reader, index: int) -> Iterator[tuple[str, str]]:
    """(field, path of its file relative to the tree) of each payload of a sample."""
    key, root = reader.keys[index], reader.split_info.root
    for field in reader.fields:
        if reader.has(index, field):
            name = decode_name(reader.table.columns.names(field)[index], key)
            name = name or f"{key}.{_suffix(reader, index, field)}"
            yield field, f"{root}/{name}" if root else name


def _suffix(reader: Reader, index: int, field: str) -> str:
    kind = reader.dataset.fields[field]
    if kind == PIXELS:
        return "png"
    if KIND_SUFFIXES.get(kind):
        return KIND_SUFFIXES[kind] if field in ("json", reader.main) else f"{field}.{KIND_SUFFIXES[kind]}"
    media = MEDIA[int(reader.image_info([index]).media[0])] if field == reader.fields[0] else ""
    suffix = SUFFIX.get(media or sniff(reader.read(index, field)), "bin")
    return suffix if kind == "image" or field == reader.main else f"{field}.{suffix}"


def are_class_folders(reader: Reader) -> bool:
    """Whether the first folder of every labelled file of a split is named like its class."""
    labels, classes, keys = reader.labels.tolist(), reader.classes, reader.keys
    names = reader.table.columns.names(reader.fields[0])
    for i, label in enumerate(labels):
        if label == NO_LABEL:
            continue
        folder, slash, _ = (decode_name(names[i], keys[i]) or keys[i]).partition("/")
        if not slash or label >= len(classes) or folder != classes[label]:
            return False
    return True


class LabelRow(NamedTuple):
    """One file: its path in the tree, number and name of its class, and its split."""

    path: str
    label: str
    name: str
    split: str

    @classmethod
    def of(cls, reader: Reader, index: int, path: str) -> LabelRow | None:
        """The row of a sample; None if it has no label."""
        label = int(reader.labels[index])
        if label == NO_LABEL:
            return None
        return cls(path, str(label), reader.classes[label] if label < len(reader.classes) else "", reader.split)


def label_table(rows: Iterable[LabelRow]) -> bytes:
    """The content of labels.csv, which `packer convert` reads as a manifest.

    Cells that a spreadsheet would take for a formula get an apostrophe; `without_apostrophe` removes it.
    """
    text = io.StringIO(newline="")
    table = csv.writer(text)
    table.writerow(LABELS_HEADER)
    table.writerows([f"'{cell}" if _FORMULA.match(cell) else cell for cell in row] for row in rows)
    return text.getvalue().encode()


def without_apostrophe(cell: str) -> str:
    """The original text of a cell of labels.csv written by `label_table`."""
    return cell[1:] if cell[:1] == "'" and _FORMULA.match(cell) else cell


class _Place(NamedTuple):
    """The origin of a file: the split's number in a list, the sample, the field."""

    reader: int
    sample: int
    field: str


class Originals:
    """A set as its original files; a source for staging (`cache.staging.sources`).

    labels.csv is added if the folders do not show the labels. Neighbouring samples are read together, once for all
    threads that copy them.

    files: the packed set.
    splits: the splits to include.
    opened: opens a split.

    Raises StagingError if two samples have the same file name.
    """

    def __init__(self, files: SetFiles, splits: Sequence[str], opened: Callable[[str], Reader]) -> None:
        self._title = f"{files.manifest.source}{AS_FILES}"
        self._readers = [opened(name) for name in splits]
        self._places: dict[str, _Place] = {}
        self._groups: dict[tuple[int, int], dict[int, Buffer]] = {}
        self._locks = [threading.Lock() for _ in range(64)]
        self.files_at_once = files.manifest.source.files_at_once
        if any(PIXELS in reader.kinds.values() for reader in self._readers):
            raise StagingError(
                f"{files.manifest.source}: has raw pixels, which have no original files; stage the shards"
            )
        listed, rows = [], list[LabelRow]()
        for number, reader in enumerate(self._readers):
            for file, row in self._listed(number, reader):
                listed.append(file)
                rows += [row] if row is not None else []
        has_table = rows and not all(map(are_class_folders, self._readers))
        self._table = label_table(rows) if has_table else b""
        if self._table:
            listed.append(StagedFile(f"{TREE}/{LABELS_FILE}", len(self._table), crc32c(self._table)))
        name = f"{files.manifest.name}-files"
        digest = hashlib.blake2b(f"{files.manifest.fingerprint} {AS_FILES} {TREE} {splits}".encode(), digest_size=16)
        try:
            self.manifest = Manifest(self, name, digest.hexdigest(), tuple(listed))
        except StagingError as error:
            raise StagingError(f"{error}; stage one split at a time, or the shards") from error

    def __str__(self) -> str:
        return self._title

    def location(self, file: StagedFile) -> str:
        """See `cache.staging.sources.Source`."""
        place = self._places.get(file.path)
        return f"{self._title}: {file.path}" if place is None else f"{self._title}: sample {place.sample} ({file.path})"

    def chunks(self, file: StagedFile, check: Callable[[], None]) -> Generator[memoryview, None, None]:
        """See `cache.staging.sources.Source`."""
        check()
        place = self._places.get(file.path)
        if place is None:
            yield memoryview(self._table)
            return
        try:
            data = self._payload(place)
        except (PackerError, OSError) as error:
            raise StagingSourceError(f"{self.location(file)}: cannot be read: {error}") from error
        yield memoryview(data)

    def close(self) -> None:
        """Close the set."""
        for reader in self._readers:
            reader.close()

    def _listed(self, number: int, reader: Reader) -> Iterator[tuple[StagedFile, LabelRow | None]]:
        """The files of a split, each with a row of the label table for the first file of a sample, else None."""
        facts = {field: (reader.sizes(field).tolist(), self._checksums(reader, field)) for field in reader.fields}
        for index in range(len(reader)):
            for field, name in original_files(reader, index):
                path = shortened(name)
                staged = f"{TREE}/{path}"
                self._places[staged] = _Place(number, index, field)
                sizes, checksums = facts[field]
                row = LabelRow.of(reader, index, path) if field == reader.fields[0] else None
                yield StagedFile(staged, sizes[index], checksums[index]), row

    @staticmethod
    def _checksums(reader: Reader, field: str) -> list[int]:
        checksums: list[int] = reader.table.field_column(field, "crc32c").tolist()
        return checksums

    def _payload(self, place: _Place) -> Buffer:
        """The bytes of one field; the first field is read for a group of samples at once."""
        reader = self._readers[place.reader]
        if place.field != reader.fields[0]:
            return reader.read(place.sample, place.field)
        number = place.sample // _GROUP
        group = place.reader, number
        with self._locks[number % len(self._locks)]:
            waiting = self._groups.get(group)
            if waiting is None or place.sample not in waiting:
                some = range(number * _GROUP, min(len(reader), (number + 1) * _GROUP))
                indices = [i for i in some if i >= place.sample and reader.has(i, place.field)]
                waiting = self._groups[group] = dict(zip(indices, reader.read_many(indices), strict=True))
            data = waiting.pop(place.sample)
            if not waiting:
                self._groups.pop(group, None)
            for old in list(self._groups)[:-_MOST_GROUPS]:
                self._groups.pop(old, None)
        return data


FORMS = ("shards", "files")


@dataclass(frozen=True)
class StageOptions(CopyOptions):
    """Options of staging, besides those of `cache.staging.CopyOptions` (whose default is two threads with an order).

    splits: the splits to stage; default: all.
    form: "shards", or "files": the original files of whole splits, for programs that read a folder of images.
    part: (i, n), or "node": this node's share of the samples, as assigned by `readers.order.NodeLocal`.
    overlap: with part, whether a shard at the boundary of two parts is staged on both nodes, or only on the first, for
        nodes that share their parts (`readers.share`).
    fraction: share of the bytes to stage, above 0 and up to 1.
    background: return once the index is copied, and copy the shards in a thread.
    order: with background, copy the shards of the order's split in the order in which an epoch reads them, two at a
        time unless `threads` is given.
    resume: the token from which training resumes in that order: shards that are still to be read are copied first.
    """

    splits: tuple[str, ...] | None = None
    form: str = "shards"
    part: tuple[int, int] | str | None = None
    overlap: bool = True
    fraction: float = 1.0
    background: bool = False
    order: StagedFirst | None = None
    resume: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.order is not None and not self.background:
            raise ValueError("an order needs background=True: otherwise training starts after all files are copied")
        if self.resume is not None and self.order is None:
            raise ValueError("resume is a token of an order: give the order, too")
        if self.form not in FORMS:
            raise ValueError(f"form must be one of {', '.join(FORMS)}, not {self.form!r}")
        if self.form == "files" and (self.part is not None or self.fraction != 1 or self.background):
            raise ValueError("form='files' stages whole splits: leave out part, fraction and background")
        if not self.overlap and self.part is None:
            raise ValueError("overlap=False applies to parts of nodes: give a part, too, such as part='node'")
        if isinstance(self.part, str) and self.part != "node":
            raise ValueError(f"part must be (i, n) or 'node', not {self.part!r}")
        part = self.node_part()
        if part is not None and not 0 <= part[0] < part[1]:
            raise ValueError(f"part {part[0]}/{part[1]}: expected i/n with i from 0 to n - 1")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction must be above 0 and at most 1, not {self.fraction}")

    def turns(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
        """(first sample of each shard of the order's split, shard numbers in copying order); None without an order.

        Raises ResumeError for a token of another order.
        """
        if self.order is None:
            return None
        if self.resume is None:
            return self.order.starts, self.order.shards()
        token = ResumeToken.from_dict(self.resume)
        order = token.resumed(self.order.with_seed(token.seed))
        return order.starts, order.shards(token.epoch, token.cursor)

    def node_part(self) -> tuple[int, int] | None:
        """`part`, with "node" resolved by the launcher's variables."""
        if isinstance(self.part, str):
            ranks = detect_ranks()
            return ranks.node, ranks.nodes
        return self.part

    def copying_threads(self, source: Source) -> int:
        """The number of copying threads: two with an order, so that the first shards are complete early."""
        return 2 if self.order is not None and not self.threads else super().copying_threads(source)


class Staged:
    """A context manager that stages on entering and returns the local directory. It can be entered repeatedly."""

    def __init__(
        self,
        dataset: str | os.PathLike[str],
        target: str | os.PathLike[str] | None,
        options: StageOptions,
        watcher: Watcher | None,
    ) -> None:
        self.dataset, self.target, self.options, self.watcher = dataset, target, options, watcher
        self._session: Session | None = None

    @property
    def path(self) -> Path:
        """The local directory. Raises StagingError before the context is entered."""
        path = self._entered().path
        return path if self.options.form == "shards" else path / TREE

    @property
    def counts(self) -> CopyCounts:
        """Bytes and files that this process copied, files already present, and damaged files."""
        return self._entered().counts

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until all files are copied; False after `seconds`. Raises StagingError if staging failed."""
        return self._entered().wait(seconds)

    @property
    def begun(self) -> bool:
        """Whether staging has begun, so that `stop` has an effect."""
        return self._session is not None

    def stop(self) -> None:
        """Stop copying; callable from any thread. Entering then raises StagingError if files are missing."""
        if self._session is not None:
            self._session.stop()

    def close(self) -> None:
        """Stop copying and release the copy."""
        if self._session is not None:
            self._session.close()

    def __enter__(self) -> Path:
        self.close()
        self._session = None
        try:
            files = self._files()
            if self.options.form == "shards":
                return self._open(self._request(files))
            with closing(Originals(files, files.splits(self.options), self._open_split)) as originals:
                every = originals.manifest.files
                return self._open(Request(originals.manifest, every, (), self.target, self.options)) / TREE
        except BaseException:
            self._session = None
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _entered(self) -> Session:
        if self._session is None:
            raise StagingError("nothing is staged: use  with readers.stage(…) as local")
        return self._session

    def _open(self, request: Request) -> Path:
        self._session = Session(request, self.watcher)
        return self._session.open()

    def _open_split(self, name: str) -> Reader:
        if isinstance(self.dataset, str) and "://" in self.dataset:
            from readers.opening.remote import open_remote

            return open_remote(self.dataset, name)
        return open_packed(self.dataset, name)

    def _files(self) -> SetFiles:
        if isinstance(self.dataset, str) and "://" in self.dataset:
            return _remote_set_files(self.dataset)
        return set_files(self.dataset)

    def _request(self, files: SetFiles) -> Request:
        options = self.options
        shards, index = files.shards(options), files.index(options)
        turns = options.turns()
        if turns is not None:
            shards = files.in_turn(shards, *turns)
        first = [*index, files.head] if options.background else [*shards, *index, files.head]
        return Request(files.manifest, first, shards if options.background else (), self.target, options)


def stage(
    dataset: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = None,
    *,
    watcher: Watcher | None = None,
    **options: Any,
) -> Staged:
    """Stage a packed set to this node; a context manager that returns the local directory.

    dataset: a directory, or an address: s3://, gs://, az://, https://.
    target: a directory of this node; environment variables are expanded. None takes the first directory that is
        writable, local and large enough: those of the batch system ($SLURM_TMPDIR, …), $TMPDIR, /mnt/bb/$USER, /local,
        /scratch/local and /dev/shm.
    watcher: receives the progress.
    options: the fields of `StageOptions`.

    Raises ValueError and RemoteError, and on entering DatasetError, UnknownNameError, ResumeError or StagingError.
    """
    return Staged(dataset, target, StageOptions(**options), watcher)


# Sharing: nodes read each other's parts of a set over the cluster's network instead of from the source.
#
#     with readers.share(reader, "/home/me/job") as reader:        # every process of every node calls it
#         loader = ImageLoader(reader, 256, order=…)
#
# Node g holds part g of the samples, as assigned by `readers.order.NodeLocal`: in a cache (`readers.cached` with
# `partition`), or in a staged copy with its source as fallback (`readers.stage` with `part`). The first process of each
# node starts a server for that node; a sample of another node's part is requested from that node's server, which reads
# it through its cache or copy. If a server does not answer, or its bytes do not have the index's CRC32C, the sample is
# read from the source (`cache.stores.copied`).
#
# A server runs in a separate process, which ends with the context or with the process that started it; if it is
# killed, it is restarted. `packer serve` runs a server in the foreground, for nodes without a training job.


_S = TypeVar("_S", Server, ServerProcess)
_LONGEST_PAUSE_SECONDS = 60.0
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class ShareOptions:
    """How nodes serve their parts to each other. Raises ValueError.

    node, nodes: the number of this node, and the number of nodes; default: from the launcher.
    serve: whether this process serves its node; None: only the first process of the node does. False with
        `packer serve`.
    host: the address to listen at: a name or an address of this machine, or a network in which it has an address, such
        as "10.1.0.0/16", the same text for all nodes; None: the address of this machine's hostname.
    port: 0 for a free port.
    certificate, key: PEM files for TLS; clients trust the authorities in PACKER_HTTP_ROOT_CERTIFICATE.
    token: a file with the token, readable only by the user; None: a new token in the folder.
    timeout_seconds: how long to wait for a node's answer before reading from the source.
    wait_seconds: how long to wait for all nodes at the start.
    """

    node: int | None = None
    nodes: int | None = None
    serve: bool | None = None
    host: str | None = None
    port: int = 0
    certificate: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    token: str | os.PathLike[str] | None = None
    timeout_seconds: float = 5.0
    wait_seconds: float = 60.0

    def __post_init__(self) -> None:
        if (self.node is None) != (self.nodes is None):
            raise ValueError(f"give both node and nodes or neither, not {self.node} and {self.nodes}")
        if self.node is not None and self.nodes is not None and not 0 <= self.node < self.nodes:
            raise ValueError(f"node {self.node} is outside the {self.nodes} nodes")
        if not 0 < self.timeout_seconds <= 3600 or not 0 <= self.wait_seconds <= 86400:
            raise ValueError("timeout_seconds is above 0 and at most 3600, wait_seconds from 0 to 86400")
        if self.key is not None and self.certificate is None:
            raise ValueError("key needs a certificate: give both")

    def numbering(self) -> tuple[int, int, bool]:
        """(node, nodes, whether this process serves it)."""
        ranks = detect_ranks()
        serves = ranks.local_rank == 0 if self.serve is None else self.serve
        if self.node is not None and self.nodes is not None:
            return self.node, self.nodes, serves
        return ranks.node, ranks.nodes, serves


class Shared:
    """A context manager that serves this node, if this process should, and returns the reader over all nodes."""

    def __init__(self, reader: Reader, folder: str | os.PathLike[str], options: ShareOptions) -> None:
        _check(reader)
        self.reader, self.folder, self.options = reader, folder, options
        self.node, self.nodes, self._serves = options.numbering()
        self._server: ServerProcess | Server | None = None
        self._owner = os.getpid()
        self._rendezvous: Rendezvous | None = None
        self._url = ""
        self._lock, self._ending = threading.Lock(), threading.Event()

    @property
    def url(self) -> str:
        """The address of this process's server; "" without one."""
        return self._url

    def serve(self, start: Callable[[PayloadRanges, ServeSettings], _S]) -> _S:
        """Start the server of this node, in a process or here, and publish its address. Raises ServingError."""
        options, (rendezvous, token) = self.options, self._meet()
        host = own_address(options.host)
        certificate, key = (None if path is None else Path(path) for path in (options.certificate, options.key))
        prefix = _prefix(self.reader, self.node, self.nodes)
        settings = ServeSettings(prefix, token, host, options.port, certificate, key)
        self._server = server = start(PayloadRanges(self.reader), settings)
        shown = options.host if settings.scheme == "https" and options.host and "/" not in options.host else host
        self._url = f"{settings.scheme}://{f'[{shown}]' if ':' in shown else shown}:{server.port}"
        rendezvous.publish(self.node, self._url)
        return server

    def close(self) -> None:
        """Stop the server; other nodes then read this node's part from the source. No effect in a forked child."""
        if os.getpid() != self._owner:
            return
        self._ending.set()
        with self._lock:
            server, self._server = self._server, None
            if server is not None:
                if self._rendezvous is not None:
                    self._rendezvous.withdraw(self.node, self._url)
                server.close()
            self._url = ""

    def __enter__(self) -> Reader:
        if self.nodes == 1:
            return self.reader
        if importlib.util.find_spec("obstore") is None:
            raise MissingExtraError("obstore", "remote", "reading from other nodes")
        try:
            if self._serves and self._server is None:
                self._ending = threading.Event()
                watched = self.serve(ServerProcess), self._ending
                threading.Thread(target=self._watch, args=watched, name="packer-share", daemon=True).start()
            return self._open()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _watch(self, server: ServerProcess, ending: threading.Event) -> None:
        """Restart the server if its process was killed, after a pause that doubles if this happens often."""
        pause, since = 0.5, time.monotonic()
        while True:
            server.wait()
            server.close()
            lasted = time.monotonic() - since > 2 * _LONGEST_PAUSE_SECONDS
            pause = 1.0 if lasted else min(2 * pause, _LONGEST_PAUSE_SECONDS)
            if ending.wait(pause):
                return
            since = time.monotonic()
            with self._lock:
                if ending.is_set():
                    return
                try:
                    server = self.serve(ServerProcess)
                except ServingError as error:
                    outcome = str(error)
                else:
                    outcome = "it was started again"
            warnings.warn(f"the server process of node {self.node} has ended: {outcome}", stacklevel=2)

    def _meet(self) -> tuple[Rendezvous, str]:
        """The folder of this set and job, and the token in it."""
        made = Rendezvous.make(self.folder, job_name(os.environ), _set_name(self.reader), self.nodes)
        self._rendezvous = made
        token_file = self.options.token
        return made, made.token() if token_file is None else read_token(Path(token_file))

    def _open(self) -> Reader:
        reader, options, (rendezvous, token) = self.reader, self.options, self._meet()
        missing = rendezvous.wait(options.wait_seconds)
        if missing:
            nodes = f"{plural(len(missing), 'node')} ({listed([str(node) for node in missing])})"
            warnings.warn(
                f"{rendezvous.path}: {nodes} of {self.nodes} have not published their address; their samples are read "
                f"from the source until they do",
                stacklevel=4,
            )
        connect = _Connect(rendezvous, token, reader.table.columns, _set_name(reader), options.timeout_seconds)
        store = Neighbours(reader.store, self.node, _owners(reader, self.nodes), connect, options.timeout_seconds)
        return Reader(reader.table, store)


def share(reader: Reader, folder: str | os.PathLike[str], **options: Any) -> Shared:
    """Read samples from the nodes that hold them; a context manager that returns the reader for training.

    reader: this node's reader, over a cache of its part of the samples, or over a staged copy of its part with the
        source as fallback. Nodes share unconverted samples of one set: apply a cache that converts images, and
        selections, to the reader that this returns.
    folder: a folder on a shared file system, where nodes find each other; each job and set gets a subfolder.
    options: the fields of `ShareOptions`.

    With one node it returns `reader`. Raises ValueError, MissingExtraError, and on entering ServingError; warns if
    nodes are missing. Bytes travel unencrypted unless a certificate is given.
    """
    return Shared(reader, folder, ShareOptions(**options))


def _check(reader: Reader) -> None:
    """Raise ValueError for a reader that cannot be shared."""
    if reader.table.rows is not None:
        raise ValueError("nodes own parts of the whole set: share the whole reader, and select from the shared reader")
    if reader.table.forms or reader.decoding is not None:
        raise ValueError(
            "this reader's cache converts images, but nodes share unconverted images: share the reader below it, and "
            "cache the shared reader, as  readers.cached(shared, keep=…)"
        )
    if not reader.table.columns.has_checksums or reader.store.state:
        raise ValueError(
            f"{reader.table.title}: has no checksums to detect wrong bytes from another node; pack it with  packer "
            f"convert"
        )


def _set_name(reader: Reader) -> str:
    return hashlib.blake2b(reader.fingerprint.encode(), digest_size=8).hexdigest()


def _prefix(reader: Reader, node: int, nodes: int) -> str:
    """Prefix of the paths that a node serves; a client with another set or other parts gets a 404."""
    return f"{_set_name(reader)}-{nodes}-{node}"


def _owners(reader: Reader, nodes: int) -> RowOwners | ShardOwners:
    """The owners of samples: by shard for a staged copy, which has whole shards; otherwise by sample."""
    columns, order = reader.table.columns, NodeLocal(len(reader), nodes)
    if layer(reader.store, Copied) is not None:
        numbers = [columns.column("shard"), *map(columns.shard_column, columns.separate)]
        return ShardOwners(np.maximum(shard_owners(numbers, order, len(columns.shard_bytes)), 0))
    starts = [order.local_part(node).start for node in range(nodes)]
    return RowOwners(np.array([*starts, len(reader)], np.int64) * len(columns.fields))


@dataclass(frozen=True)
class _Connect:
    """Connects to a node by its number, for `Neighbours`."""

    rendezvous: Rendezvous
    token: str
    columns: Columns
    name: str
    timeout_seconds: float

    def __call__(self, node: int) -> Store | None:
        url = self.rendezvous.find(node)
        if url is None:
            return None
        url = replace(url, path=f"{self.name}-{self.rendezvous.nodes}-{node}", bearer=self.token)
        sizes = [int(size) for size in self.columns.shard_bytes]
        shards = Shards([str(number) for number in range(len(sizes))], sizes)
        store = RemoteFiles(url, shards, patience=Patience(self.timeout_seconds, 1), gap_bytes=0)
        return Checked(store, self.columns)


# --- payloads of a node's server -----------------------------------------------------------------------------------
class PayloadRanges:
    """The payloads of a reader as ranges of its shards, named "0", "1", …: `cache.serving.Ranges`.

    Only ranges covered by payloads are served; payloads are read by their rows, so that a cache is used. Raises
    ServingError for other ranges.
    """

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def size(self, name: str) -> int | None:
        sizes = self.reader.table.columns.shard_bytes
        return int(sizes[int(name)]) if _NUMBER.fullmatch(name) and int(name) < len(sizes) else None

    def read(self, name: str, start: int, stop: int) -> Sequence[Buffer]:
        shard, at = int(name), start
        payloads: list[tuple[int, int, int, int]] = []
        while at < stop:
            payload = next((extent for field in self._fields if (extent := field.find(shard, at)) is not None), None)
            if payload is None:
                raise ServingError(f"shard {name}: no payload covers byte {at}")
            row, offset, length = payload
            payloads.append((row, shard, offset, length))
            at = offset + length
        read_one = self.reader.store.read_one  # usually a single payload, for which `read` would plan needlessly
        return [memoryview(read_one(*extent))[max(0, start - extent[2]) : stop - extent[2]] for extent in payloads]

    def close(self) -> None:
        self.reader.close()

    @cached_property
    def _fields(self) -> list[_Field]:
        columns = self.reader.table.columns
        return [_Field(columns, number) for number in range(len(columns.fields))]

    def __getstate__(self) -> dict[str, Any]:
        return {"reader": self.reader}


class _Field:
    """Finds the payload of one field at a byte of a shard; needs no copies if payloads are stored in row order."""

    def __init__(self, columns: Columns, number: int) -> None:
        field = columns.fields[number]
        shard, offset = columns.shard_column(field), columns.field_column(field, "offset")
        length = columns.field_column(field, "length")
        self._payloads, self._number = Payloads(len(columns.fields)), number
        self._order: Int64s | None = None
        rises = (shard[1:] > shard[:-1]) | ((shard[1:] == shard[:-1]) & (offset[1:] >= offset[:-1]))
        if not (rises.all() and (offset != ABSENT).all()):
            self._order = np.lexsort((offset, shard))
            self._order = self._order[offset[self._order] != ABSENT]
            shard, offset, length = (column[self._order] for column in (shard, offset, length))
        self._offset, self._length = offset, length
        self._bounds = np.searchsorted(shard, np.arange(len(columns.shard_bytes) + 1))

    def find(self, shard: int, at: int) -> tuple[int, int, int] | None:
        """(row, offset, length) of the payload that covers a byte of a shard, with the row as in extents."""
        first, stop = int(self._bounds[shard]), int(self._bounds[shard + 1])
        place = first + int(np.searchsorted(self._offset[first:stop], np.uint64(at), side="right")) - 1
        if place < first or at >= int(self._offset[place]) + int(self._length[place]):
            return None
        row = place if self._order is None else int(self._order[place])
        return self._payloads.number(row, self._number), int(self._offset[place]), int(self._length[place])
