"""`dataset.json`: the description of a packed set. It is the commit point: a directory without it is not a set.

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
      "documents": ["README.md", "SHA256SUMS", "classes.txt"],        documents for people, updated with the set
      "edited": […], "separate": […], "history": […], "retired": […]    changes since the conversion: `History`
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
import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, TypeVar

from cache.errors import BadNameError, DatasetError, UnknownNameError
from cache.files import FileState, PathError, read_with_state
from readers.table import column_names

# Names from untrusted input, each checked once on creation: a value of one of these types is valid.
#
#     SplitName      a split: part of file names ("train-000000.tar", "train.index") and of options
#     FieldName      a field: part of the names of index columns ("mask.offset.npy")
#     RelativePath   a file below a folder: "/" between its parts, never absolute, never with ".."
#     ShardPath      a RelativePath of a shard in its set, other than the set's own files
#     IndexPath      a RelativePath of the folder of an index in its set, likewise
#
# They are strings and print, compare and pickle like strings. Creating one raises BadNameError with the allowed form.


DATASET_FILE = "dataset.json"
REPORT_FILE = "left-out.jsonl"
README_FILE, SUMS_FILE, CLASSES_FILE = "README.md", "SHA256SUMS", "classes.txt"
DOCUMENTS = (README_FILE, SUMS_FILE, CLASSES_FILE)  # for people without packer: `packer.documents`
QUARANTINE_FOLDER = "quarantine"
WORK_FOLDER = ".packing"
_MAX_NAME_BYTES = 200  # file names have at most 255, and shards and columns add to a name
_MAX_PART_BYTES = 255
_MAX_SUFFIX_BYTES = 16
_USUAL = re.compile(
    r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}(/[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99})*"
)  # a path that needs no normalising
_FORBIDDEN = frozenset("/\\ ")
_P = TypeVar("_P", bound="RelativePath")
_S = TypeVar("_S", bound="_InSet")
_OF_THE_SET = (DATASET_FILE, REPORT_FILE, *DOCUMENTS)


class SplitName(str):
    """The name of a split."""

    __slots__ = ()

    def __new__(cls, text: str) -> SplitName:
        return super().__new__(cls, _plain(text, "a split"))


class FieldName(str):
    """The name of a field, in any container; `packer.sources.manifest` has the additional rules of tar."""

    __slots__ = ()

    def __new__(cls, text: str) -> FieldName:
        _plain(text, "a field")
        if text == "key" or text.endswith(".name"):  # key.offset.npy and x.name.offset.npy are separate columns
            raise BadNameError(
                f"{text!r} cannot be the name of a field: the index has columns of that name; choose another"
            )
        return super().__new__(cls, text)


class RelativePath(str):
    """A path below a folder, without "." and double slashes. It may still lead through a link: see `cache.files`."""

    __slots__ = ()

    def __new__(cls: type[_P], text: str) -> _P:
        path = PurePosixPath(text)
        if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in text or not _is_utf8(text):
            raise BadNameError(
                f"{text!r} leads outside: expected a path below a folder, not absolute, and without '..'"
            )
        long = next((part for part in path.parts if len(part.encode()) > _MAX_PART_BYTES), None)
        if long is not None:
            raise BadNameError(
                f"{text[:80]!r}…: a part of this path has {len(long.encode())} bytes, and no file name has more "
                f"than {_MAX_PART_BYTES}; rename it"
            )
        return super().__new__(cls, path)


class _InSet(RelativePath):
    """A path in a set, outside the names in `reserved`."""

    __slots__ = ()
    reserved: ClassVar[frozenset[str]]

    def __new__(cls: type[_S], text: str) -> _S:
        usual = _USUAL.fullmatch(text)  # ten times as fast as PurePosixPath, for sets with 10,000 shards
        first = text.partition("/")[0] if usual else next(iter(PurePosixPath(text).parts), "")
        if first in cls.reserved:
            raise BadNameError(f"{text!r} leads outside the paths of shards and indexes: {first} belongs to the set")
        return str.__new__(cls, text) if usual else RelativePath.__new__(cls, text)


class ShardPath(_InSet):
    """The path of a shard in its set."""

    __slots__ = ()
    reserved = frozenset({*_OF_THE_SET, WORK_FOLDER})


class IndexPath(_InSet):
    """The path of the index of a split in its set."""

    __slots__ = ()
    reserved = frozenset({*_OF_THE_SET, WORK_FOLDER, QUARANTINE_FOLDER})


def shortened(path: str) -> str:
    """`path` with each part that is too long for a file name truncated and marked with a hash of the whole part.

    Archives and packed sets can hold longer names than file systems.
    """
    return "/".join(_fitting(part) for part in path.split("/"))


def _fitting(part: str) -> str:
    encoded = part.encode("utf-8", "surrogateescape")
    if len(encoded) <= _MAX_PART_BYTES:
        return part
    suffix = posixpath.splitext(part)[1].encode("utf-8", "surrogateescape")
    tail = b"~" + hashlib.blake2b(encoded, digest_size=4).hexdigest().encode()
    tail += suffix if len(suffix) <= _MAX_SUFFIX_BYTES else b""
    return (encoded[: _MAX_PART_BYTES - len(tail)].decode(errors="ignore").encode() + tail).decode(errors="ignore")


def _plain(text: str, noun: str) -> str:
    """Return `text` if it can be part of a file name, an option and a line of text. Raises BadNameError."""
    good = bool(text) and text[0] != "." and text.isprintable() and not _FORBIDDEN & set(text)
    if not good or len(text.encode()) > _MAX_NAME_BYTES:
        raise BadNameError(
            f"{text[:80]!r} cannot be the name of {noun}: take up to {_MAX_NAME_BYTES} bytes of letters, digits, "
            f"'_', '-' and '.', with no '.' in front, and no blank or slash"
        )
    return text


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can have lone surrogates, which file names cannot
        return False
    return True


KIND = "packer-dataset"
PIXELS = "pixels"  # the kind of images that are raw pixels
VERSION = 1
EDITED_VERSION = 2  # earlier versions of packer would trust the shards where the index overrides them
FIELD_KINDS = ("image", "file", "json", "mask", "boxes", "points", "array", "text", "target", "pixels")
# Suffixes of the files and members of fields that came from no file.
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

    sha256: of the whole file, 64 hex digits; "" if unknown; not compared.
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
    """One split: its shards in order, the directory of its index, and the index files by name.

    columns is empty for an index made without checksums.
    """

    samples: int
    shards: tuple[ShardInfo, ...]
    index: str
    root: str = ""
    columns: Mapping[str, ColumnFile] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AdoptedKeys:
    """The user's names of keys and labels in shards made by other tools: see `packer.formats.base.LocateOptions`."""

    image_key: str | None = None
    label_key: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """The content of `dataset.json`.

    read_from: the state of the file that it was read from; None if it came from elsewhere; not compared.
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
        """The file names of every split's index."""
        return column_names(self.fields, self.separate)

    def split(self, name: str | None, where: str | Path) -> tuple[str, SplitInfo]:
        """The split called `name` (val, valid and validation are synonyms); None: the only split, or train."""
        if name is None:
            if len(self.splits) == 1:
                name = next(iter(self.splits))
            elif "train" in self.splits:
                name = "train"
            else:
                raise UnknownNameError(f"{where}: choose a split: {', '.join(self.splits)}")
        for candidate in (name, *same_split(name)):
            if candidate in self.splits:
                return candidate, self.splits[candidate]
        raise UnknownNameError(f"{where}: no split {name!r}; it has {', '.join(self.splits) or 'none'}")

    def fingerprint(self) -> str:
        """32 hex digits that change with the bytes of any shard or of the index, and with the classes.

        Without checksums of the index they cover only the shards; see `covers_index`.
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
        """A text that identifies the bytes of each shard and each index folder, by their paths."""
        contents: dict[str, str] = {}
        for split in self.splits.values():
            contents |= {shard.path: f"{shard.bytes}-{shard.crc32c:08x}" for shard in split.shards}
            columns = sorted((name, c.crc32c) for name, c in split.columns.items())
            digest = hashlib.blake2b(json.dumps(columns).encode(), digest_size=8).hexdigest()
            contents[split.index] = f"{split.samples}-{digest}"
        return contents

    def covers_index(self, split: str) -> bool:
        """Whether `fingerprint` covers the index of a split: by its checksums or, in a set written by a conversion, by
        the shards, which determine every label and byte range."""
        return bool(self.splits[split].columns) or "indexed_by" not in self.made

    def to_json(self) -> str:
        content: dict[str, Any] = {
            "kind": KIND,
            "version": EDITED_VERSION if self.edited or self.separate else VERSION,
            "format": self.format,
            "fields": dict(self.fields),
            "classes": self.classes,
            "label_offset": self.label_offset,
            "splits": {name: _split_json(split) for name, split in self.splits.items()},
            "made": dict(self.made),
        }
        if self.adopted != AdoptedKeys():
            content["adopted"] = asdict(self.adopted)
        for name in ("edited", "separate"):
            content[name] = getattr(self, name)
        for name in ("history", "retired"):
            content[name] = [asdict(entry) for entry in getattr(self, name)]
        content["documents"] = [name for name in DOCUMENTS if name in self.documents]
        later = ("edited", "separate", "history", "retired", "documents")
        known = {name: value for name, value in content.items() if value or name not in later}
        return json.dumps(known, indent=1, ensure_ascii=False) + "\n"


def _split_json(split: SplitInfo) -> dict[str, Any]:
    shards = [
        {"path": shard.path, "bytes": shard.bytes, "samples": shard.samples, **_checksums_json(shard)}
        for shard in split.shards
    ]
    content = {"samples": split.samples, "root": split.root, "index": split.index, "shards": shards}
    columns = {name: {"bytes": file.bytes, **_checksums_json(file)} for name, file in split.columns.items()}
    return content | ({"columns": columns} if columns else {})


def _checksums_json(file: ShardInfo | ColumnFile) -> dict[str, str]:
    return {"crc32c": f"{file.crc32c:08x}"} | ({"sha256": file.sha256} if file.sha256 else {})


def same_split(name: str) -> tuple[str, ...]:
    """Other names of the same split."""
    return tuple(other for other in _SAME if other != name) if name in _SAME else ()


def read_dataset_info(directory: str | os.PathLike[str]) -> DatasetInfo:
    """Read and check a set's `dataset.json`.

    Raises DatasetError if it is missing, malformed, of another version, or names a path outside the set.
    """
    path = Path(directory) / DATASET_FILE
    try:
        text, state = read_with_state(path, MAX_JSON_BYTES)
    except FileNotFoundError:
        raise DatasetError(_no_dataset(Path(directory))) from None
    except NotADirectoryError:
        raise DatasetError(f"{directory} is a file, not a packed set; adopt a shard with  packer index") from None
    except PathError as error:
        raise DatasetError(f"{error}; expected the description of a packed set") from None
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
    if not _FORMAT.fullmatch(format_name):  # any container: readers use only byte ranges
        raise DatasetError(f"{path}: format {format_name!r:.80}, expected the name of one, such as 'tar'")
    fields: dict[str, str] = top.get("fields", dict)
    if not fields or any(kind not in FIELD_KINDS for kind in fields.values()):
        raise DatasetError(f"{path}: fields must map names to {', '.join(FIELD_KINDS)}, found {fields!r:.200}")
    classes: list[str] = top.get("classes", list)
    if not all(isinstance(name, str) for name in classes):
        raise DatasetError(f"{path}: classes must be a list of strings")
    label_offset = top.get("label_offset", int)
    if abs(label_offset) >= 1 << 31:
        raise DatasetError(f"{path}: label_offset is {label_offset}, expected one below 2^31")
    separate = top.names("separate", fields, "the fields are {}")
    documents, made, adopted = (content.get(name) for name in ("documents", "made", "adopted"))
    splits: dict[str, Any] = top.get("splits", dict)
    return DatasetInfo(
        format=format_name,
        fields={_checked(FieldName, name, path): kind for name, kind in fields.items()},
        classes=tuple(classes),
        splits={
            _checked(SplitName, name, path): _parse_split(
                _Object(value, f"{path}: split {name!r:.80}"), sorted(column_names(fields, separate))
            )
            for name, value in splits.items()
        },
        label_offset=label_offset,
        made={name: value for name, value in made.items() if _is_valid_member(name, value)}
        if isinstance(made, dict)
        else {},
        adopted=_parse_adopted(_Object({} if adopted is None else adopted, f"{path}: adopted")),
        edited=tuple(sorted(set(top.names("edited", EDITS, "this packer knows {}; upgrade packer")))),
        separate=tuple(FieldName(name) for name in fields if name in separate),
        history=tuple(filter(None, map(_parse_operation, top.items("history", default=True)))),
        retired=tuple(_parse_retired(_Object(value, f"{path}: retired")) for value in top.items("retired")),
        documents=tuple(name for name in DOCUMENTS if isinstance(documents, list) and name in documents),
    )


def _parse_adopted(value: _Object) -> AdoptedKeys:
    image_key, label_key = value.value.get("image_key"), value.value.get("label_key")
    fields = value.value.get("fields", {})
    names = [key for key in (image_key, label_key) if key is not None]
    if not isinstance(fields, dict) or not all(isinstance(key, str) for key in (*names, *fields.values())):
        raise DatasetError(f"{value.where}: expected names, found {value.value!r:.80}")
    return AdoptedKeys(image_key, label_key, fields)


def _parse_split(split: _Object, column_names: Iterable[str]) -> SplitInfo:
    listed: list[Any] = split.get("shards", list)
    objects = [_Object(value, f"{split.where}: shard {number}") for number, value in enumerate(listed)]
    shards = tuple(
        ShardInfo(
            shard.named(ShardPath, "path"),
            shard.count("bytes"),
            shard.count("samples"),
            *shard.checksums(),
        )
        for shard in objects
    )
    samples, in_shards = split.count("samples"), sum(shard.samples for shard in shards)
    if samples != in_shards:
        raise DatasetError(f"{split.where}: {samples} samples, but its shards hold {in_shards}")
    files: dict[str, Any] = split.get("columns", dict) if "columns" in split.value else {}
    columns = {
        name: _Object(files.get(name), f"{split.where}: column {name}")
        for name in column_names
        if "columns" in split.value
    }
    known = {name: ColumnFile(column.count("bytes"), *column.checksums()) for name, column in columns.items()}
    return SplitInfo(samples, shards, split.named(IndexPath, "index"), split.get("root", str), known)


def _parse_retired(value: _Object) -> Retired:
    since, content = value.get("since", str), value.value.get("content", "")
    if not _is_time(since) or not isinstance(content, str):
        raise DatasetError(f"{value.where}: expected a path and a time, found {value.value!r:.80}")
    return Retired(value.named(ShardPath, "path"), since, content)


def _parse_operation(item: Any) -> Operation | None:
    """An entry of the history; None for an invalid one."""
    item = item if isinstance(item, dict) else {}
    texts = [item.get(name) for name in ("operation", "date", "version")]
    arguments, samples = item.get("arguments"), item.get("samples")
    counts = isinstance(samples, list) and len(samples) == 2 and all(map(_is_count, samples))
    if not counts or not isinstance(arguments, dict) or not all(isinstance(text, str) for text in texts):
        return None
    operation, date, version = map(str, texts)
    return Operation(operation, arguments, date, version, (samples[0], samples[1]))


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

    def items(self, name: str, default: bool = False) -> list[Any]:
        """A list; empty if it is missing. default: also empty if it is not a list."""
        value: Any = self.value.get(name, [])
        if isinstance(value, list) or not default:
            return self.get(name, list) if name in self.value else []
        return []

    def names(self, name: str, known: Iterable[str], message: str) -> list[str]:
        """A list of names, all of them in `known`; empty if it is missing."""
        names = self.items(name)
        unknown = [entry for entry in names if not isinstance(entry, str) or entry not in known]
        if unknown:
            raise DatasetError(f"{self.where}: {name} names {unknown[0]!r:.80}, {message.format(', '.join(known))}")
        return names

    def count(self, name: str) -> int:
        value: Any = self.value.get(name)
        if type(value) is int and 0 <= value < 1 << 63:
            return value
        raise DatasetError(f"{self.where}: {name} is {self.get(name, int)}, expected a count")

    def checksums(self) -> tuple[int, str]:
        """(CRC32C, SHA-256); the latter is "" if unknown."""
        crc, sha256 = self.value.get("crc32c"), self.value.get("sha256") or ""
        if not isinstance(crc, str) or not _CRC.fullmatch(crc):
            raise DatasetError(f"{self.where}: crc32c is {crc!r:.80}, expected 8 hex digits")
        if sha256 and not (isinstance(sha256, str) and _SHA256.fullmatch(sha256)):
            raise DatasetError(f"{self.where}: sha256 is {sha256!r:.80}, expected 64 hex digits")
        return int(crc, 16), sha256

    def named(self, kind: type[_Name], name: str) -> _Name:
        return _checked(kind, self.get(name, str), f"{self.where}: {name}")


def _checked(kind: type[_Name], text: str, where: str | Path) -> _Name:
    try:
        return kind(text)
    except BadNameError as error:
        raise DatasetError(f"{where}: {error}") from error


def _is_valid_member(name: str, member: Any) -> bool:
    """Whether a member of `made` has the expected type; other members are ignored."""
    if name in ("by", "indexed_by", "source", "plan"):
        return isinstance(member, str)
    if name == "payload_bytes":
        return _is_count(member)
    if name == "left_out":
        return isinstance(member, dict) and all(map(_is_count, member.values()))
    return name != "options" or (isinstance(member, dict) and isinstance(member.get("split", ""), str))


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_time(text: str) -> bool:
    try:
        return bool(_TIME.fullmatch(text)) and bool(datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ"))
    except ValueError:
        return False


# Members of dataset.json on changes of a set since it was packed, and on files that remain from earlier states.
#
#     "edited": ["labels", "samples"]    properties in which the index overrides the shards: EDITS
#     "separate": ["mask"]               fields in separate shards, which are listed with 0 samples; the index has
#                                        a column <field>.shard.npy for each
#     "history": [{"operation": "append", "arguments": {"source": "new"}, "date": "2026-01-31T12:00:00Z",
#                  "version": "packer 0.1.0", "samples": [before, after]}, …]
#     "retired": [{"path": "train.index", "since": "2026-01-31T12:00:00Z", "content": "36-0a1b2c3d"}, …]
#
# Retired files belong to earlier states; readers that opened the set before the change need them, and identify them by
# `DatasetInfo.contents`. History is for people: invalid entries are left out. Times are UTC.


EDITS = {
    "keys": "the index has other keys",
    "labels": "the index has other labels",
    "samples": "the index has other samples, or another order",
}
"""Properties in which an index can override its shards."""
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


@dataclass(frozen=True, slots=True)
class Operation:
    """One change of a set. date: UTC, ISO 8601. samples: before and after."""

    operation: str
    arguments: Mapping[str, Any]
    date: str
    version: str
    samples: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Retired:
    """A shard or index folder that the set no longer uses, since the time `since`.

    content: its text in `DatasetInfo.contents`; "" in sets of earlier versions.
    """

    path: str
    since: str
    content: str = ""

    @property
    def age_seconds(self) -> float:
        since = datetime.strptime(self.since, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
        return (datetime.now(UTC) - since).total_seconds()


def now() -> str:
    """The current time in the form of dataset.json."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
