"""`packer.extract`: write the original tree of a set, with its names and bytes.

Files go to OUT/<split's folder>/<original name>. What was not a file gets a name from its key: `key.json` for a
json field, `key.jpg` and so on for an image. Where folders do not show the labels, `labels.csv` does (columns path,
label, class, split), which `packer convert` reads as a manifest. Splits that are extracted one after the other, even
at the same time, share that file: rows are added to it. A table of another kind is not touched.

Raw pixels are written as PNG. Names come from the set and are not trusted: nothing is written outside OUT, through a
link, or over another file. Files are written in `OUT/.extracting/<random>/` and renamed, so that a killed extraction
leaves no partial file under a name of the set; what it leaves in that folder, which is then unlocked, the next one
removes."""

from __future__ import annotations

import csv
import fnmatch
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import readers
from cache.errors import BadNameError, OutputError, UnknownNameError
from cache.files import BusyError, Folder
from cache.messages import Silent, Watcher, plural
from packer.comparison import check_columns
from packer.formats.base import png_of
from packer.output import Result, local_output, output_errors
from readers.decode import decode_image
from readers.layout import DatasetInfo, read_dataset_info
from readers.names import RelativePath, shortened
from readers.originals import LABELS_FILE, LABELS_HEADER, LabelRow, are_class_folders, label_table, original_files
from readers.pixels import PIXELS
from readers.sample import Buffer

__all__ = ["ExtractResult", "extract"]

_WORK_FOLDER = ".extracting"
_LOCK = "lock"
_LABELS_BYTES = 1 << 32
_LABELS_LOCK, _LABELS_LOCK_SECONDS = "labels.lock", 120.0


@dataclass(frozen=True, slots=True)
class ExtractResult(Result):
    """What was written: files and their bytes.

    kept: files that existed already with the same bytes.
    renamed: files that got a shorter name because theirs is too long.
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
    watcher: Watcher | None = None,
) -> ExtractResult:
    """Write the files of a set below `output`.

    split: only this one.
    keys: shell patterns of the keys to extract; none: all.
    overwrite: replace existing files of other bytes.

    The checksums of the index and of every sample are verified. Raises OutputError (a name leads out of `output`, or a
    file is in the way), UnknownNameError (no key matches), DatasetError (a damaged index) and DamagedSampleError.
    """
    root, out = Path(path), local_output(output)
    info = read_dataset_info(root)
    names = list(info.splits) if split is None else [info.split(split, root)[0]]
    for name in names:
        check_columns(root, info.splits[name])  # which holds the file names
    watcher = watcher or Silent()
    labels = not _folders_are_classes(root, info)
    with output_errors(), Folder(out, create=True) as place, _working(place) as (shared, own):
        extraction = _Extraction(place, own, keys, overwrite)
        for name in names:
            with readers.open(root, name, verify=True) as reader:
                extraction.run(reader, watcher)
        if keys and not extraction.files and not extraction.kept:
            raise UnknownNameError(f"{root}: no key matches {', '.join(keys)}")
        labels = labels and bool(extraction.labels)
        if labels:
            extraction.check_labels_name()
            _add_labels(place, extraction.labels, overwrite, shared, own)
    if extraction.renamed:
        watcher.note(f"warning: {plural(extraction.renamed, 'name')} too long for a file, and shortened")
    return ExtractResult(out, extraction.files, extraction.bytes, extraction.kept, labels, extraction.renamed)


@contextmanager
def _working(place: Folder) -> Iterator[tuple[Folder, Folder]]:
    """The folder of all extractions into `place`, and that of this one in it, locked."""
    while True:
        try:
            shared = place.folder(_WORK_FOLDER, create=True)
            _sweep(shared)
            token = os.urandom(8).hex()
            own = shared.folder(token, create=True)
            lock = own.lock(_LOCK)
            break
        except (FileNotFoundError, BusyError):  # another extraction has just swept
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
    """Remove what killed extractions left."""
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
    """Remove the folder of one extraction; the lock last, so that no other sweeps it meanwhile."""
    with shared.folder(name) as folder:
        for file in folder.names():
            if file != _LOCK:
                folder.unlink(file)
        folder.unlink(_LOCK)
    shared.remove_folder(name)


def _folders_are_classes(root: Path, info: DatasetInfo) -> bool:
    """Whether the first folder of every labelled file has the name of its class, in all splits."""
    for split in info.splits:
        with readers.open(root, split) as reader:
            if not are_class_folders(reader):
                return False
    return True


class _Extraction:
    def __init__(self, place: Folder, scratch: Folder, keys: Sequence[str], overwrite: bool) -> None:
        self._place, self._scratch, self._patterns, self._overwrite = place, scratch, keys, overwrite
        self._written: set[str] = set()
        self._folder, self._folder_name = place, ""
        self.files = self.bytes = self.kept = self.renamed = 0
        self.labels: list[LabelRow] = []

    def run(self, reader: readers.Reader, watcher: Watcher) -> None:
        chosen = [i for i, key in enumerate(reader.keys) if self._matches(key)]
        watcher.begin(len(chosen), 0, lambda: (self.files + self.kept, self.bytes))
        try:
            for i in chosen:
                for field, given in original_files(reader, i):
                    name = self._safe(given)
                    payload = reader.read(i, field)
                    self._write(name, png_of(decode_image(payload)) if reader.kinds[field] == PIXELS else payload)
                    if field == reader.fields[0]:
                        row = LabelRow.of(reader, i, name)
                        self.labels += [row] if row is not None else []
        finally:
            watcher.end()

    def _matches(self, key: str) -> bool:
        return not self._patterns or any(fnmatch.fnmatchcase(key, pattern) for pattern in self._patterns)

    def _safe(self, name: str) -> RelativePath:
        """The name as that of a file below the output."""
        short = shortened(name)
        self.renamed += short != name
        try:
            path = RelativePath(short)
        except BadNameError as error:
            raise OutputError(
                f"the set names the file {name!r:.200}, which leads out of {self._place.path}; nothing is written there"
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
        if not self._is_there(last, name, payload):
            self._folder.write(last, payload, durable=False, scratch=self._scratch)
            self.files += 1
            self.bytes += len(payload)
        self._written.add(name)

    def _is_there(self, last: str, name: str, payload: Buffer) -> bool:
        """Whether the file is there with these bytes. Raises OutputError for what must not be replaced."""
        target = self._place.path / name
        found = self._folder.lstat(last)
        if found is None:
            return False
        kind = self._folder.kind(last)
        if kind != "file":
            raise OutputError(f"{target}: is in the way (a {kind})")
        if found.st_size == len(payload) and self._folder.read(last, len(payload)) == payload:
            self.kept += 1
            return True
        if name in self._written:
            raise OutputError(
                f"{target}: two samples of the set have this name and not the same bytes; extract one split or key at "
                f"a time, each to an output of its own"
            )
        if not self._overwrite:
            raise OutputError(f"{target}: exists with other bytes; pass overwrite=True, or choose another output")
        return False

    def check_labels_name(self) -> None:
        """Raise OutputError where the set itself holds a file named labels.csv."""
        if LABELS_FILE in self._written:
            raise OutputError(
                f"{self._place.path / LABELS_FILE}: is a file of the set itself, so the labels cannot be written; "
                f"read them with readers.open"
            )


def _add_labels(place: Folder, rows: Iterable[LabelRow], overwrite: bool, shared: Folder, scratch: Folder) -> None:
    """Add rows to the labels.csv of `place`; a row of the same file in the same split is replaced under `overwrite`.

    shared: a folder of all extractions, for the lock; scratch: that of this one. Raises OutputError where packer did
    not write the table, or it gives a file another label.
    """
    with shared.lock(_LABELS_LOCK, _LABELS_LOCK_SECONDS):
        try:
            known = _read_labels(place)
        except OutputError:
            if not overwrite:
                raise
            known = {}
        for row in rows:
            found = known.setdefault((row.path, row.split), row)
            if found != row and not overwrite:
                raise OutputError(
                    f"{place.path / LABELS_FILE}: says {found.label} {found.name!r} of {row.path!r}, the set says "
                    f"{row.label} {row.name!r}; pass overwrite=True, or choose another output"
                )
            known[row.path, row.split] = row
        place.write(LABELS_FILE, label_table(known.values()), scratch=scratch)
        shared.unlink(_LABELS_LOCK)


def _read_labels(place: Folder) -> dict[tuple[str, str], LabelRow]:
    """The rows of the table, by path and split."""
    where = place.path / LABELS_FILE
    kind = place.kind(LABELS_FILE)
    if not kind:
        return {}
    if kind != "file":
        raise OutputError(f"{where}: is in the way (a {kind})")
    try:
        header, *rows = csv.reader(
            io.StringIO(place.read(LABELS_FILE, _LABELS_BYTES).decode(), newline=""), strict=True
        )
        if tuple(header) != LABELS_HEADER:
            raise ValueError(f"its columns are {', '.join(header)[:80]}")
        found = [LabelRow(*row) for row in rows]
    except (ValueError, TypeError, csv.Error) as error:
        raise OutputError(
            f"{where}: exists, and is not a table of labels by packer ({error}); pass overwrite=True to replace it, "
            f"or choose another output"
        ) from error
    return {(row.path, row.split): row for row in found}
