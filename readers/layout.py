"""`dataset.json`: what a packed set is. It is the commit point: a directory without it is not a set.

    {
      "kind": "packer-dataset", "version": 1,                         2 where "edited" or "separate" is there
      "format": "hdf5" | "tfrecord" | "tar",
      "fields": {"image": "image", "mask": "mask", "json": "json"},   name -> what its bytes are (`readers.fields`)
      "classes": ["n01440764", …],                                    position = label
      "label_offset": 0,                                              the shards store label + label_offset
      "splits": {
        "train": {
          "samples": 9469, "root": "train", "index": "train.index",
          "shards": [{"path": "train-00000-of-00008.h5", "bytes": 123, "samples": 1184, "crc32c": "0a1b2c3d"}, …],
          "columns": {"label.npy": {"bytes": 75880, "crc32c": "4e5f6071"}, …}      every file of the index
        }, …
      },
      "adopted": {"image_key": "jpg", "label_key": null, "fields": {}},  how shards made elsewhere are read
      "made": {…},                                                    how it was made; see `DatasetInfo.fingerprint`
      "documents": ["README.md", "SHA256SUMS", "classes.txt"],        what is there for people, and follows the set
      "edited": […], "separate": […], "history": […], "retired": […]    what was done to it since: `readers.history`
    }

`root` is the folder of the source tree that the split came from ("" for none). Paths are relative to the directory
and stay inside it. Sizes are bytes. Shards and columns have a "sha256", too, unless the set is
without SHA256SUMS. Unknown members are ignored, so that later versions can add some. Sets of earlier versions have no
`columns`: `packer verify` compares their index with the shards, `packer index` adds the checksums.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from cache.errors import BadNameError, DatasetError, UnknownNameError
from cache.files import FileState, PathError, read_with_state
from readers.history import Operation, Retired, parse_edited, parse_history, parse_made, parse_retired, parse_separate
from readers.index import column_names
from readers.names import DATASET_FILE, DOCUMENTS, WORK_FOLDER, FieldName, IndexPath, ShardPath, SplitName

__all__ = [
    "DATASET_FILE",
    "FIELD_KINDS",
    "KIND_SUFFIXES",
    "MAX_JSON_BYTES",
    "AdoptedKeys",
    "ColumnFile",
    "DatasetInfo",
    "ShardInfo",
    "SplitInfo",
    "parse_dataset_info",
    "read_dataset_info",
    "same_split",
]

KIND = "packer-dataset"
VERSION = 1
EDITED_VERSION = 2  # earlier versions of packer would take the shards' word for what the index says otherwise
FIELD_KINDS = ("image", "file", "json", "mask", "boxes", "points", "array", "text", "target", "pixels")
# Of the files and members of fields that came from no file.
KIND_SUFFIXES = {"json": "json", "boxes": "npy", "points": "npy", "array": "npy", "text": "txt", "target": "npy"}
MAX_JSON_BYTES = 1 << 30
_SAME = ("val", "valid", "validation")
_CRC, _SHA256 = re.compile("[0-9a-fA-F]{8}"), re.compile("[0-9a-f]{64}")
_FORMAT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}")
_T = TypeVar("_T")
_Name = TypeVar("_Name", SplitName, FieldName, ShardPath, IndexPath)


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One shard: its path (relative to the set's directory), size, samples, and the CRC32C of the whole file.

    sha256: of the whole file, 64 hex digits; "" where it is unknown, which makes it no other shard.
    """

    path: str
    bytes: int
    samples: int
    crc32c: int
    sha256: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class ColumnFile:
    """One file of an index: its size, and the CRC32C of all of it. sha256: as of a shard."""

    bytes: int
    crc32c: int
    sha256: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class SplitInfo:
    """One split: its shards in order, the directory of its index, and the files of that by name.

    columns is empty for an index that was made without checksums.
    """

    samples: int
    shards: tuple[ShardInfo, ...]
    index: str
    root: str = ""
    columns: Mapping[str, ColumnFile] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AdoptedKeys:
    """The names in shards made elsewhere, as the user gave them: see `packer.formats.base.LocateOptions`."""

    image_key: str | None = None
    label_key: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """The content of `dataset.json`.

    read_from: the state of the file that it was read from; None where it came from elsewhere. It is not compared.
    """

    format: str
    fields: Mapping[str, str]
    classes: tuple[str, ...]
    splits: Mapping[str, SplitInfo]
    label_offset: int = 0
    made: Mapping[str, Any] = field(default_factory=dict)
    adopted: AdoptedKeys = AdoptedKeys()
    edited: tuple[str, ...] = ()
    separate: tuple[str, ...] = ()
    history: tuple[Operation, ...] = ()
    retired: tuple[Retired, ...] = ()
    documents: tuple[str, ...] = ()
    read_from: FileState | None = field(default=None, compare=False, repr=False)

    @property
    def column_names(self) -> list[str]:
        """The files that the index of every split has."""
        return column_names(self.fields, self.separate)

    def split(self, name: str | None, where: str | Path) -> tuple[str, SplitInfo]:
        """The split called `name` (val, valid and validation stand for each other); None: the only one, or train."""
        if name is None:
            if len(self.splits) == 1:
                name = next(iter(self.splits))
            elif "train" in self.splits:
                name = "train"
            else:
                raise UnknownNameError(f"{where}: say which split you want: {', '.join(self.splits)}")
        for candidate in (name, *same_split(name)):
            if candidate in self.splits:
                return candidate, self.splits[candidate]
        raise UnknownNameError(f"{where}: no split {name!r}; it has {', '.join(self.splits) or 'none'}")

    def fingerprint(self) -> str:
        """32 hex digits that change with the bytes of any shard or of the index, and with the meaning of the labels.

        Without checksums of the index they cover the shards alone; see `covers_index`.
        """
        digest = hashlib.blake2b(digest_size=16)
        digest.update(json.dumps([self.format, dict(self.fields), self.classes, self.label_offset]).encode())
        for name, split in self.splits.items():
            digest.update(json.dumps([name, [[s.bytes, s.samples, s.crc32c] for s in split.shards]]).encode())
            if split.columns:
                known = [(file, c.crc32c) for file, c in split.columns.items()]
                digest.update(json.dumps(sorted(known)).encode())
        return digest.hexdigest()

    def contents(self) -> dict[str, str]:
        """A text for each shard and each folder of an index, by their paths, that differs for other bytes."""
        found: dict[str, str] = {}
        for split in self.splits.values():
            found |= {shard.path: f"{shard.bytes}-{shard.crc32c:08x}" for shard in split.shards}
            columns = sorted((name, c.crc32c) for name, c in split.columns.items())
            digest = hashlib.blake2b(json.dumps(columns).encode(), digest_size=8).hexdigest()
            found[split.index] = f"{split.samples}-{digest}"
        return found

    def covers_index(self, split: str) -> bool:
        """Whether `fingerprint` covers the index of a split: by its checksums or, in a set that a conversion wrote, by
        the shards, from which every label and byte range follows."""
        return bool(self.splits[split].columns) or "indexed_by" not in self.made

    def to_json(self) -> str:
        splits = {
            name: {
                "samples": split.samples,
                "root": split.root,
                "index": split.index,
                "shards": [
                    {"path": shard.path, "bytes": shard.bytes, "samples": shard.samples, **_checksums_json(shard)}
                    for shard in split.shards
                ],
            }
            | ({"columns": _columns_json(split.columns)} if split.columns else {})
            for name, split in self.splits.items()
        }
        content = {
            "kind": KIND,
            "version": EDITED_VERSION if self.edited or self.separate else VERSION,
            "format": self.format,
            "fields": dict(self.fields),
            "classes": list(self.classes),
            "label_offset": self.label_offset,
            "splits": splits,
            "made": dict(self.made),
        }
        if self.adopted != AdoptedKeys():
            content["adopted"] = asdict(self.adopted)
        later: dict[str, Any] = {"edited": list(self.edited), "separate": list(self.separate)}
        later["history"] = [operation.to_json() for operation in self.history]
        later["retired"] = [asdict(retired) for retired in self.retired]
        later["documents"] = [name for name in DOCUMENTS if name in self.documents]
        content |= {name: value for name, value in later.items() if value}
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _columns_json(columns: Mapping[str, ColumnFile]) -> dict[str, Any]:
    return {name: {"bytes": column.bytes, **_checksums_json(column)} for name, column in columns.items()}


def _checksums_json(file: ShardInfo | ColumnFile) -> dict[str, str]:
    return {"crc32c": f"{file.crc32c:08x}"} | ({"sha256": file.sha256} if file.sha256 else {})


def same_split(name: str) -> tuple[str, ...]:
    """Other names of the same split."""
    return tuple(other for other in _SAME if other != name) if name in _SAME else ()


def read_dataset_info(directory: str | os.PathLike[str]) -> DatasetInfo:
    """Read and check a set's `dataset.json`.

    Raises DatasetError where it is missing, malformed, of another version, or names a path outside the set.
    """
    path = Path(directory) / DATASET_FILE
    try:
        text, state = read_with_state(path, MAX_JSON_BYTES)
    except FileNotFoundError:
        raise DatasetError(_no_dataset(Path(directory))) from None
    except NotADirectoryError:
        raise DatasetError(f"{directory} is a file, not a packed set; adopt a shard with  packer index") from None
    except PathError as error:
        raise DatasetError(f"{error}; it is not the description of a packed set") from None
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error.strerror}") from error
    return replace(parse_dataset_info(text, path), read_from=state)


def parse_dataset_info(text: bytes, where: str | Path) -> DatasetInfo:
    """Check the text of a `dataset.json` that came from `where`. Raises DatasetError."""
    try:
        content = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DatasetError(
            f"{where}: cannot be read as JSON: {error}; restore it, or write it again with  packer index"
        ) from error
    return _parse(content, where)


def _no_dataset(directory: Path) -> str:
    if not directory.exists():
        return f"{directory}: no such directory; check the path, and that this node sees it"
    if (directory / WORK_FOLDER).is_dir():
        return (
            f"{directory}: an unfinished conversion (no dataset.json); wait for it, or if it has ended run the same  "
            f"packer convert  again"
        )
    return f"{directory}: not a packed set (no dataset.json); make one with  packer convert  or  packer index"


def _writer(content: Any) -> str:
    made = content.get("made")
    by = made.get("by") or made.get("indexed_by") if isinstance(made, dict) else None
    return f", written by {by:.40}" if isinstance(by, str) else ""


def _parse(content: Any, path: str | Path) -> DatasetInfo:
    top = _Object(content, f"{path}")
    if top.get("kind", str) != KIND:
        raise DatasetError(f"{path}: kind is {content.get('kind')!r}, expected {KIND!r}")
    version = top.get("version", int)
    if version not in (VERSION, EDITED_VERSION):
        raise DatasetError(
            f"{path}: version {version}{_writer(content)}; this packer reads versions {VERSION} and {EDITED_VERSION}; "
            f"upgrade packer"
        )
    format_name = top.get("format", str)
    if not _FORMAT.fullmatch(format_name):  # any container: readers know byte ranges only
        raise DatasetError(f"{path}: format {format_name!r:.80}, expected the name of one, such as 'tar'")
    fields: dict[str, str] = top.get("fields", dict)
    if not fields or any(kind not in FIELD_KINDS for kind in fields.values()):
        raise DatasetError(f"{path}: fields must map names to {', '.join(FIELD_KINDS)}, found {fields!r:.200}")
    classes: list[str] = top.get("classes", list)
    if not all(isinstance(name, str) for name in classes):
        raise DatasetError(f"{path}: classes must be a list of strings")
    try:
        separate = parse_separate(content.get("separate", []), fields)
        edited, retired = parse_edited(content.get("edited", [])), parse_retired(content.get("retired", []))
    except ValueError as error:
        raise DatasetError(f"{path}: {error}") from error
    documents = content.get("documents", [])
    splits: dict[str, SplitInfo] = {}
    listed: dict[str, Any] = top.get("splits", dict)
    for name, value in listed.items():
        where = _Object(value, f"{path}: split {name!r:.80}")
        splits[_checked(SplitName, name, path)] = _parse_split(where, column_names(fields, separate))
    label_offset = top.get("label_offset", int)
    if abs(label_offset) >= 1 << 31:
        raise DatasetError(f"{path}: label_offset is {label_offset}, expected one below 2^31")
    return DatasetInfo(
        format=format_name,
        fields={_checked(FieldName, name, path): kind for name, kind in fields.items()},
        classes=tuple(classes),
        splits=splits,
        label_offset=label_offset,
        made=parse_made(content.get("made")),
        adopted=_parse_adopted(_Object(content.get("adopted", {}), f"{path}: adopted")),
        edited=edited,
        separate=separate,
        history=parse_history(content.get("history")),
        retired=retired,
        documents=tuple(name for name in DOCUMENTS if isinstance(documents, list) and name in documents),
    )


def _parse_adopted(value: _Object) -> AdoptedKeys:
    image_key, label_key = value.value.get("image_key"), value.value.get("label_key")
    fields = value.value.get("fields", {})
    given = [key for key in (image_key, label_key) if key is not None]
    if not isinstance(fields, dict) or not all(isinstance(key, str) for key in (*given, *fields.values())):
        raise DatasetError(f"{value.where}: expected names, found {value.value!r:.80}")
    return AdoptedKeys(image_key, label_key, fields)


def _parse_columns(split: _Object, names: Iterable[str]) -> dict[str, ColumnFile]:
    if "columns" not in split.value:
        return {}
    listed: dict[str, Any] = split.get("columns", dict)
    columns = {}
    for name in sorted(names):
        column = _Object(listed.get(name), f"{split.where}: column {name}")
        columns[name] = ColumnFile(column.count("bytes"), column.checksum(), column.sha256())
    return columns


def _parse_split(split: _Object, columns: Iterable[str]) -> SplitInfo:
    shards = []
    listed: list[Any] = split.get("shards", list)
    for number, value in enumerate(listed):
        shard = _Object(value, f"{split.where}: shard {number}")
        path, size, samples = shard.named(ShardPath, "path"), shard.count("bytes"), shard.count("samples")
        shards.append(ShardInfo(path, size, samples, shard.checksum(), shard.sha256()))
    samples, found = split.count("samples"), sum(shard.samples for shard in shards)
    if samples != found:
        raise DatasetError(f"{split.where}: {samples} samples, but its shards hold {found}")
    index = split.named(IndexPath, "index")
    return SplitInfo(samples, tuple(shards), index, split.get("root", str), _parse_columns(split, columns))


class _Object:
    """A JSON object whose members are fetched with their type checked."""

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise DatasetError(f"{where}: expected an object, found {type(value).__name__}")
        self.value, self.where = value, where

    def get(self, name: str, kind: type[_T]) -> _T:
        value: Any = self.value.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise DatasetError(f"{self.where}: {name} must be of type {kind.__name__}, found {value!r:.80}")
        return value

    def count(self, name: str) -> int:
        value: Any = self.value.get(name)
        if type(value) is int and 0 <= value < 1 << 63:
            return value
        raise DatasetError(f"{self.where}: {name} is {self.get(name, int)}, expected a count")

    def checksum(self) -> int:
        crc = self.get("crc32c", str)
        if not _CRC.fullmatch(crc):
            raise DatasetError(f"{self.where}: crc32c is {crc!r:.80}, expected 8 hex digits")
        return int(crc, 16)

    def sha256(self) -> str:
        digest = self.value.get("sha256", "")
        if digest and not (isinstance(digest, str) and _SHA256.fullmatch(digest)):
            raise DatasetError(f"{self.where}: sha256 is {digest!r:.80}, expected 64 hex digits")
        return digest or ""

    def named(self, kind: type[_Name], name: str) -> _Name:
        return _checked(kind, self.get(name, str), f"{self.where}: {name}")


def _checked(kind: type[_Name], text: str, where: str | Path) -> _Name:
    try:
        return kind(text)
    except BadNameError as error:
        raise DatasetError(f"{where}: {error}") from error
