"""Names from outside, each checked once, where it enters: a value of one of these types is valid.

    SplitName      a split: part of file names ("train-000000.tar", "train.index") and of options
    FieldName      a field: part of the names of index columns ("mask.offset.npy")
    RelativePath   a file below a folder: "/" between its parts, never absolute, never with ".."
    ShardPath      a RelativePath of a shard in its set, other than the set's own files
    IndexPath      a RelativePath of the folder of an index in its set, likewise

They are strings and print, compare and pickle as such. Creating one raises BadNameError, which says what is allowed.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from pathlib import PurePosixPath
from typing import ClassVar, TypeVar

from cache.errors import BadNameError

__all__ = [
    "CLASSES_FILE",
    "DATASET_FILE",
    "DOCUMENTS",
    "QUARANTINE_FOLDER",
    "README_FILE",
    "REPORT_FILE",
    "SUMS_FILE",
    "WORK_FOLDER",
    "FieldName",
    "IndexPath",
    "RelativePath",
    "ShardPath",
    "SplitName",
    "shortened",
]

DATASET_FILE = "dataset.json"
REPORT_FILE = "left-out.jsonl"
README_FILE, SUMS_FILE, CLASSES_FILE = "README.md", "SHA256SUMS", "classes.txt"
DOCUMENTS = (README_FILE, SUMS_FILE, CLASSES_FILE)  # for people without packer: `packer.documents`
QUARANTINE_FOLDER = "quarantine"
WORK_FOLDER = ".packing"
_MAX_NAME_BYTES = 200  # file names have 255, and shards and columns add to a name
_MAX_PART_BYTES = 255
_MAX_SUFFIX_BYTES = 16
_USUAL = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}(/[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99})*")  # a path as it is
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
    """The name of a field, in any container; `packer.sources.manifest` knows what a tar asks for beyond this."""

    __slots__ = ()

    def __new__(cls, text: str) -> FieldName:
        _plain(text, "a field")
        if text == "key" or text.endswith(".name"):  # key.offset.npy and x.name.offset.npy are columns of their own
            raise BadNameError(f"{text!r} cannot be the name of a field: the index has such columns; choose another")
        return super().__new__(cls, text)


class RelativePath(str):
    """A path below a folder, without "." and doubled slashes. It may still lead through a link: see `cache.files`."""

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
    """A path of a set, other than those below `reserved`."""

    __slots__ = ()
    reserved: ClassVar[frozenset[str]]

    def __new__(cls: type[_S], text: str) -> _S:
        usual = _USUAL.fullmatch(text)  # which PurePosixPath takes ten times as long to find out, of 10,000 shards
        first = text.partition("/")[0] if usual else next(iter(PurePosixPath(text).parts), "")
        if first in cls.reserved:
            raise BadNameError(f"{text!r} leads outside what a shard or an index may be: {first} is the set's own")
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
    """`path` with each part that is too long for a file name cut and marked with a hash of the whole part.

    Archives and packed sets can hold such names; file systems cannot.
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


def _plain(text: str, what: str) -> str:
    """`text` if it can be part of a file name, of an option and of a line of text. Raises BadNameError."""
    good = bool(text) and text[0] != "." and text.isprintable() and not _FORBIDDEN & set(text)
    if not good or len(text.encode()) > _MAX_NAME_BYTES:
        raise BadNameError(
            f"{text[:80]!r} cannot be the name of {what}: take up to {_MAX_NAME_BYTES} bytes of letters, digits, "
            f"'_', '-' and '.', with no '.' in front, and no blank or slash"
        )
    return text


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can spell lone surrogates, which no file name holds
        return False
    return True
