"""`packer.extract`: write the original files of a set, with their names and bytes.

Files go to OUT/<split's folder>/<original name>. Samples that were not files get a name from their key: `key.json` for
a json field, `key.jpg` and so on for an image. If folders do not show the labels, they go to `labels.csv` (columns
path, label, class, split), which `packer convert` reads as a manifest. Splits that are extracted one after the other,
or at the same time, share that file: rows are added to it. A foreign table of that name is not touched.

Workers write the samples in runs. Name collisions are found before any file is written: of files with equal bytes one
is written; different bytes are an error.

Raw pixels are written as PNG.

Names in the set are not trusted: nothing is written outside OUT, through a link, or over another file. Files are
written to `OUT/.extracting/<random>/` and renamed, so a killed extraction leaves no partial file under a final name;
the next extraction removes its unlocked folder.
"""

from __future__ import annotations

import csv
import fnmatch
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import numpy as np

import readers
from cache.errors import BadNameError, OutputError, UnknownNameError
from cache.files import BusyError, Folder
from cache.messages import Counter, Silent, Watcher, plural
from packer.columns import check_columns
from packer.formats.base import png_of
from packer.output import Result, local_output, output_errors
from packer.workers import Workers, run_shards
from readers.decode import decode_image
from readers.layout import PIXELS, DatasetInfo, RelativePath, read_dataset_info, shortened
from readers.staging import (
    LABELS_FILE,
    LABELS_HEADER,
    LabelRow,
    are_class_folders,
    label_table,
    original_files,
    without_apostrophe,
)
from readers.table import ABSENT, Buffer, repeated

__all__ = ["ExtractResult", "extract"]

_WORK_FOLDER = ".extracting"
_LOCK = "lock"
_TASK_SAMPLES, _REPORT_SAMPLES = 2048, 64
_LABELS_BYTES = 1 << 32
_LABELS_LOCK, _LABELS_LOCK_SECONDS = "labels.lock", 120.0


@dataclass(frozen=True, slots=True)
class ExtractResult(Result):
    """The number of written files and their bytes.

    kept: existing files with the same bytes.
    renamed: files with a shortened name, because the original is too long.
    """

    output: Path
    files: int
    bytes: int
    kept: int
    labels_file: bool
    renamed: int = 0


def extract(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    split: str | None = None,
    keys: Sequence[str] = (),
    overwrite: bool = False,
    workers: int | None = None,
    engine: Executor | None = None,
    watcher: Watcher | None = None,
) -> ExtractResult:
    """Write the files of a set below `output`.

    split: extract this split only.
    keys: shell patterns of the keys to extract; empty: all.
    overwrite: replace existing files with other bytes.
    workers: number of processes; default the CPUs that this process may use.
    engine: an executor to write files with, by default local processes; see `packer.open_engine`.

    The checksums of the index and of every sample are verified. Raises OutputError (a name leads out of `output`, or a
    file is in the way), UnknownNameError (no key matches), DatasetError (a damaged index) and DamagedSampleError.
    """
    root, out = Path(path), local_output(output)
    info = read_dataset_info(root)
    names = list(info.splits) if split is None else [info.split(split, root)[0]]
    for name in names:
        check_columns(root, info.splits[name])  # they contain the file names
    watcher, crew = watcher or Silent(), Workers(workers, engine)
    with output_errors(), Folder(out, create=True) as place, _working(place) as (shared, own), ExitStack() as opened:
        splits = [opened.enter_context(readers.open(root, name, verify=True)) for name in names]
        chosen = [_chosen(reader, keys) for reader in splits]
        if keys and not sum(map(len, chosen)):
            raise UnknownNameError(f"{root}: no key matches {', '.join(keys)}")
        labels = not _folders_are_classes(root, info)
        doubles = _doubles(splits, chosen, out)
        if labels:
            _check_labels_name(splits, chosen, out)
        tasks = [
            _Task(root, name, tuple(run), out, own.path.relative_to(out).as_posix(), overwrite, doubles[number])
            for number, name in enumerate(names)
            for run in _runs(chosen[number])
        ]
        size = sum(map(len, chosen)), 0
        done = run_shards(extract_samples, tasks, len(tasks), crew, watcher, size, folder=own.path)
        rows = [row for part in done for row in part.labels]
        labels = labels and bool(rows)
        if labels:
            _add_labels(place, rows, overwrite, shared, own)
    renamed = sum(part.renamed for part in done)
    if renamed:
        watcher.note(f"warning: {plural(renamed, 'name')} too long for a file, and shortened")
    files, size_bytes, kept = (sum(getattr(part, name) for part in done) for name in ("files", "bytes", "kept"))
    return ExtractResult(out, files, size_bytes, kept, labels, renamed)


def _chosen(reader: readers.Reader, patterns: Sequence[str]) -> Sequence[int]:
    """The samples whose key matches any of the patterns; all samples if there are no patterns."""
    if not patterns:
        return range(len(reader))
    return [i for i, key in enumerate(reader.keys) if any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)]


def _runs(samples: Sequence[int]) -> Iterator[Sequence[int]]:
    for first in range(0, len(samples), _TASK_SAMPLES):
        yield samples[first : first + _TASK_SAMPLES]


@contextmanager
def _working(place: Folder) -> Iterator[tuple[Folder, Folder]]:
    """The folder of all extractions into `place`, and the folder of this one in it, locked."""
    while True:
        try:
            shared = place.folder(_WORK_FOLDER, create=True)
            _sweep(shared)
            token = os.urandom(8).hex()
            own = shared.folder(token, create=True)
            lock = own.lock(_LOCK)
            break
        except (FileNotFoundError, BusyError):  # another extraction has just removed it
            continue
    try:
        yield shared, own
    finally:
        _remove(shared, token)
        lock.release()
        own.close()
        place.remove_folder(_WORK_FOLDER)
        shared.close()


def _sweep(shared: Folder) -> None:
    """Remove the remains of killed extractions."""
    for name in shared.names():
        is_folder = shared.kind(name) == "folder"
        try:
            with shared.lock(f"{name}/{_LOCK}" if is_folder else name) as lock:
                if lock.supported and is_folder:
                    _remove(shared, name)
                elif lock.supported:
                    shared.unlink(name)
        except (BusyError, FileNotFoundError):
            continue


def _remove(shared: Folder, name: str) -> None:
    """Remove the folder of one extraction; the lock last, so that no other process removes it at the same time."""
    with shared.folder(name) as folder:
        for file in folder.names():
            if folder.kind(file) == "folder":  # of an engine's progress
                folder.remove_tree(file)
            elif file != _LOCK:
                folder.unlink(file)
        folder.unlink(_LOCK)
    shared.remove_folder(name)


def _folders_are_classes(root: Path, info: DatasetInfo) -> bool:
    """Whether the first folder of every labelled file is named after its class, in all splits."""
    for split in info.splits:
        with readers.open(root, split) as reader:
            if not are_class_folders(reader):
                return False
    return True


_Files = Iterator[tuple[int, int, str, str]]  # number of the reader, sample, field, name


def _files(splits: Sequence[readers.Reader], chosen: Sequence[Sequence[int]]) -> _Files:
    for number, (reader, samples) in enumerate(zip(splits, chosen, strict=True)):
        for i in samples:
            for member, name in original_files(reader, i):
                yield number, i, member, _one_form(shortened(name))


def _one_form(name: str) -> str:
    """The normalised file name: a//b is a/b."""
    return str(PurePosixPath(name)) if "//" in name or "/./" in name or name.startswith("./") else name


def _doubles(
    splits: Sequence[readers.Reader], chosen: Sequence[Sequence[int]], out: Path
) -> list[frozenset[tuple[int, str]]]:
    """(sample, field) of files with the name and bytes of an earlier one, for each reader.

    Raises OutputError for two different files with one name.
    """
    count = sum(
        int((reader.table.field_column(field, "offset")[np.asarray(samples, np.int64)] != ABSENT).sum())
        for reader, samples in zip(splits, chosen, strict=True)
        for field in reader.fields
    )
    again = set(repeated(lambda: (name for *_, name in _files(splits, chosen)), count).tolist())
    first: dict[str, tuple[int, int, str]] = {}
    doubles: list[set[tuple[int, str]]] = [set() for _ in splits]
    for place, (number, i, member, name) in enumerate(_files(splits, chosen)) if again else ():
        if place in again:
            other = first.setdefault(name, (number, i, member))
            if other != (number, i, member):
                if splits[number].read(i, member) != splits[other[0]].read(*other[1:]):
                    raise OutputError(
                        f"{out / name}: two samples of the set have this name but not the same bytes; extract one "
                        f"split or key at a time, each to a separate output"
                    )
                doubles[number].add((i, member))
    return [frozenset(of_reader) for of_reader in doubles]


def _check_labels_name(splits: Sequence[readers.Reader], chosen: Sequence[Sequence[int]], out: Path) -> None:
    """Raise OutputError if the set contains a file named labels.csv."""
    if any(name == LABELS_FILE for *_, name in _files(splits, chosen)):
        raise OutputError(
            f"{out / LABELS_FILE}: is a file of the set itself, so the labels cannot be written; read them with "
            f"readers.open"
        )


@dataclass(frozen=True, slots=True)
class _Task:
    """Samples of one split to write below `out`, through the folder `scratch` in it.

    doubles: (sample, field) of files that are not written, because an equal one is.
    """

    root: Path
    split: str
    samples: tuple[int, ...]
    out: Path
    scratch: str
    overwrite: bool
    doubles: frozenset[tuple[int, str]]


def extract_samples(task: _Task, counter: Counter) -> _Written:
    """Write the files of some samples, in a worker."""
    with (
        output_errors(),
        Folder(task.out) as place,
        place.folder(task.scratch) as scratch,
        readers.open(task.root, task.split, verify=True) as reader,
    ):
        writing = _Writing(place, scratch, task.overwrite)
        for done, i in enumerate(task.samples, 1):
            writing.add(reader, i, task.doubles)
            if done % _REPORT_SAMPLES == 0:
                counter.report(_REPORT_SAMPLES, 0)
                if counter.stopped():
                    break
        counter.report(len(task.samples) % _REPORT_SAMPLES, 0)
        return writing.written


@dataclass(slots=True)
class _Written:
    """The files that a worker has written, with the rows of its samples for labels.csv."""

    files: int = 0
    bytes: int = 0
    kept: int = 0
    renamed: int = 0
    labels: list[LabelRow] = field(default_factory=list)


class _Writing:
    def __init__(self, place: Folder, scratch: Folder, overwrite: bool) -> None:
        self._place, self._scratch, self._overwrite = place, scratch, overwrite
        self._folder, self._folder_name = place, ""
        self.written = _Written()

    def add(self, reader: readers.Reader, index: int, doubles: frozenset[tuple[int, str]]) -> None:
        """Write the files of one sample."""
        for name_of, original in original_files(reader, index):
            name = self._safe(original)
            if (index, name_of) in doubles:
                self.written.kept += 1
            else:
                payload = reader.read(index, name_of)
                self._write(name, png_of(decode_image(payload)) if reader.kinds[name_of] == PIXELS else payload)
            if name_of == reader.fields[0]:
                row = LabelRow.of(reader, index, name)
                self.written.labels += [row] if row is not None else []

    def _safe(self, name: str) -> RelativePath:
        """Check a name as a path below the output."""
        short = shortened(name)
        self.written.renamed += short != name
        try:
            path = RelativePath(short)
        except BadNameError as error:
            raise OutputError(
                f"the set names the file {name!r:.200}, which leads out of {self._place.path}; it is not written"
            ) from error
        if path.partition("/")[0] == _WORK_FOLDER:
            raise OutputError(
                f"the set names the file {name!r:.200}, and {_WORK_FOLDER} is reserved for temporary files"
            )
        return path

    def _write(self, name: RelativePath, payload: Buffer) -> None:
        folder, _, last = name.rpartition("/")
        if folder != self._folder_name:
            self._folder = self._place.folder(folder, create=True) if folder else self._place
            self._folder_name = folder
        if self._is_there(last, name, payload):
            self.written.kept += 1
            return
        self._folder.write(last, payload, durable=False, scratch=self._scratch)
        self.written.files += 1
        self.written.bytes += len(payload)

    def _is_there(self, last: str, name: str, payload: Buffer) -> bool:
        """Whether the file exists with these bytes. Raises OutputError for a file that must not be replaced."""
        target = self._place.path / name
        status = self._folder.lstat(last)
        if status is None:
            return False
        kind = self._folder.kind(last)
        if kind != "file":
            raise OutputError(f"{target}: is in the way (a {kind})")
        if status.st_size == len(payload) and self._folder.read(last, len(payload)) == payload:
            return True
        if not self._overwrite:
            raise OutputError(f"{target}: exists with other bytes; pass overwrite=True, or choose another output")
        return False


def _add_labels(place: Folder, rows: Iterable[LabelRow], overwrite: bool, shared: Folder, scratch: Folder) -> None:
    """Add rows to the labels.csv of `place`; with `overwrite` a row of the same file and split is replaced.

    shared: the folder of all extractions, for the lock; scratch: the folder of this one. Raises OutputError if packer
    did not write the table, or if it gives a file another label.
    """
    with shared.lock(_LABELS_LOCK, _LABELS_LOCK_SECONDS):
        kind = place.kind(LABELS_FILE)
        if kind not in ("", "file"):
            raise OutputError(f"{place.path / LABELS_FILE}: is in the way (a {kind})")
        try:
            known = _read_labels(place)
        except OutputError:
            if not overwrite:
                raise
            known = {}
        for row in rows:
            other = known.setdefault((row.path, row.split), row)
            if other != row and not overwrite:
                raise OutputError(
                    f"{place.path / LABELS_FILE}: says {other.label} {other.name!r} of {row.path!r}, the set says "
                    f"{row.label} {row.name!r}; pass overwrite=True, or choose another output"
                )
            known[row.path, row.split] = row
        place.write(LABELS_FILE, label_table(known.values()), scratch=scratch)
        shared.unlink(_LABELS_LOCK)


def _read_labels(place: Folder) -> dict[tuple[str, str], LabelRow]:
    """The rows of labels.csv, by path and split."""
    where = place.path / LABELS_FILE
    if not place.kind(LABELS_FILE):
        return {}
    try:
        header, *rows = csv.reader(
            io.StringIO(place.read(LABELS_FILE, _LABELS_BYTES).decode(), newline=""), strict=True
        )
        if tuple(header) != LABELS_HEADER:
            raise ValueError(f"its columns are {', '.join(header)[:80]}")
        labels = [LabelRow(*map(without_apostrophe, row)) for row in rows]
    except (ValueError, TypeError, csv.Error) as error:
        raise OutputError(
            f"{where}: exists, and is not a table of labels by packer ({error}); pass overwrite=True to replace it, "
            f"or choose another output"
        ) from error
    return {(row.path, row.split): row for row in labels}
