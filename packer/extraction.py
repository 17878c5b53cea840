"""`packer.extract`: the original tree back out of a set, names and bytes.

Files go to OUT/<split's folder>/<original name>. What came from no file gets a name from its key: `key.json` for a
json field, `key.jpg` and so on for an image. Where folders do not tell the labels, `labels.csv` does (columns path,
label, class, split), which `packer convert` reads as a manifest.

Names come from the set and are not trusted: nothing is written outside OUT, through a link, or over another file.
"""

from __future__ import annotations

import csv
import fnmatch
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import readers
from packer.index_check import check_columns
from packer.output import local_output
from packer.watch import Silent, Watcher
from readers.errors import OutputError, UnknownNameError
from readers.headers import SUFFIX, sniff
from readers.index import decode_name
from readers.layout import read_dataset_info
from readers.sample import NO_LABEL, Buffer

__all__ = ["LABELS_FILE", "ExtractResult", "extract", "safe_path"]

LABELS_FILE = "labels.csv"


@dataclass(frozen=True, slots=True)
class ExtractResult:
    """What was written: files and their bytes; kept counts files that were there already with the same bytes."""

    output: Path
    files: int
    bytes: int
    kept: int
    labels_file: bool

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "output": str(self.output)}


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

    keys: shell patterns of the keys to take (none: all). split: only this one. overwrite: replace files that are
    there with other bytes. The checksums of the index and of every sample are verified. Raises OutputError (a name
    leads out of `output`, or a file is in the way), UnknownNameError (no key matches), DatasetError (a damaged index)
    and DamagedSampleError.
    """
    root, out = Path(path), local_output(output)
    info = read_dataset_info(root)
    names = list(info.splits) if split is None else [info.split(split, root)[0]]
    for name in names:
        check_columns(root, info.splits[name])  # file names are as good as the index that holds them
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{out}: cannot be made: {error.strerror}") from error
    extraction = _Extraction(out, keys, overwrite)
    for name in names:
        with readers.open(root, name, verify=True) as reader:
            extraction.run(reader, watcher or Silent())
    if keys and not extraction.files and not extraction.kept:
        raise UnknownNameError(f"{root}: no key matches {', '.join(keys)}")
    extraction.write_labels()
    return ExtractResult(out, extraction.files, extraction.bytes, extraction.kept, bool(extraction.labels))


class _Extraction:
    def __init__(self, out: Path, keys: Sequence[str], overwrite: bool) -> None:
        self._out, self._patterns, self._overwrite = out, keys, overwrite
        self._written: set[str] = set()
        self.files = self.bytes = self.kept = 0
        self.labels: list[tuple[str, int, str, str]] = []
        self._told_by_folders = True

    def run(self, reader: readers.ShardReader, watcher: Watcher) -> None:
        chosen = [i for i, key in enumerate(reader.keys) if self._wanted(key)]
        watcher.packing(len(chosen), 0, lambda: (self.files + self.kept, self.bytes))
        try:
            for i in chosen:
                for field, name in self._names(reader, i):
                    self._write(name, reader.read(i, field))
                    if field == reader.fields[0]:
                        self._note_label(reader, i, name)
        finally:
            watcher.packed()

    def _wanted(self, key: str) -> bool:
        return not self._patterns or any(fnmatch.fnmatchcase(key, pattern) for pattern in self._patterns)

    def _names(self, reader: readers.ShardReader, index: int) -> Iterator[tuple[str, str]]:
        key, root = reader.keys[index], reader.split_info.root
        for field in reader.fields:
            if not reader.has(index, field):
                continue
            name = decode_name(reader.index.names(field)[index], key)
            if not name:
                name = f"{key}.{_suffix(reader, index, field)}"
            yield field, f"{root}/{name}" if root else name

    def _write(self, name: str, payload: Buffer) -> None:
        target = safe_path(self._out, name)
        if name in self._written:
            raise OutputError(f"{target}: two samples of the set have this name; extract one split or key at a time")
        self._written.add(name)
        if target.is_symlink() or (target.exists() and not target.is_file()):
            raise OutputError(f"{target}: is in the way (a link or a directory)")
        if target.exists():
            if target.stat().st_size == len(payload) and target.read_bytes() == payload:
                self.kept += 1
                return
            if not self._overwrite:
                raise OutputError(f"{target}: exists with other bytes; add --overwrite, or choose another output")
        temporary = target.with_name(f".{target.name[:200]}.part")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
            with open(descriptor, "wb") as file:
                file.write(payload)
            temporary.replace(target)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise OutputError(error.errno, f"{target}: cannot be written: {error.strerror}") from error
        self.files += 1
        self.bytes += len(payload)

    def _note_label(self, reader: readers.ShardReader, index: int, name: str) -> None:
        label = int(reader.labels[index])
        if label == NO_LABEL:
            return
        class_name = reader.classes[label] if label < len(reader.classes) else ""
        inside = name[len(reader.split_info.root) + 1 :] if reader.split_info.root else name
        folder, slash, _ = inside.partition("/")
        self._told_by_folders &= bool(slash) and folder == class_name
        self.labels.append((name, label, class_name, reader.split))

    def write_labels(self) -> None:
        """Write labels.csv where the folders do not say everything it says."""
        if self._told_by_folders:
            self.labels = []
        if not self.labels:
            return
        target = safe_path(self._out, LABELS_FILE)
        with open(target, "w", encoding="utf-8", newline="") as file:
            table = csv.writer(file)
            table.writerow(("path", "label", "class", "split"))
            table.writerows(self.labels)


def safe_path(out: Path, name: str) -> Path:
    """out/name, its folders made. Raises OutputError where that would be outside `out` or behind a link."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name:
        raise OutputError(f"the set names the file {name!r}, which leads out of {out}; nothing is written there")
    folder = out
    for part in parts[:-1]:
        folder = folder / part
        if folder.is_symlink():
            raise OutputError(f"{folder}: is a link; nothing is written behind it")
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise OutputError(f"{folder}: cannot be made: {error.strerror}") from error
    return folder / parts[-1]


def _suffix(reader: readers.ShardReader, index: int, field: str) -> str:
    kind = reader.dataset.fields[field]
    if kind == "json":
        return "json" if field == "json" else f"{field}.json"
    media = sniff(reader.read(index, field))
    suffix = SUFFIX.get(media, "bin")
    return suffix if kind == "image" else f"{field}.{suffix}"
