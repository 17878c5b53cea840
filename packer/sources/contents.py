"""What the files of a tree are that hold no image we read: told by their first bytes, then by their names.

A tree may be one of containers, or of images in a format that we cannot read. Its files are then named for what they
are, and the command that takes them is named with them.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from cache.text import plural
from packer.formats import REGISTRY as FORMATS
from packer.formats.example import starts_record
from packer.sources import REGISTRY as SOURCES
from readers.headers import FOREIGN_SUFFIXES, foreign_medium, sniff
from readers.sample import Buffer
from readers.tree import has_image_suffix

__all__ = ["EMPTY", "HEAD_BYTES", "NOT_AN_IMAGE", "advice", "contents_of", "is_stray", "reason_of"]

HEAD_BYTES = 512
NOT_AN_IMAGE = "not an image"
EMPTY = "empty, 0 bytes"

_MAGIC = {
    b"PAR1": "Parquet",
    b"\x89HDF\r\n\x1a\n": "HDF5",
    b"ARROW1": "Arrow",
    b"\x93NUMPY": "NumPy array",
    b"SQLite format 3\0": "SQLite",
    b"\x0a\x23\xd7\xce": "MXNet RecordIO",
    b"MATLAB 5.0": "MATLAB",
    b"%PDF-": "PDF",
    b"PK\3\4": "zip archive",
    b"PK\5\6": "zip archive",
    b"7z\xbc\xaf\x27\x1c": "7z archive",
    b"Rar!\x1a\7": "RAR archive",
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x1aE\xdf\xa3": "video",
}
_SUFFIXES = {
    ".npz": "NumPy arrays",
    ".beton": "FFCV",
    ".pkl": "pickle",
    ".pickle": "pickle",
    ".pt": "PyTorch",
    ".pth": "PyTorch",
    ".rec": "MXNet RecordIO",
    ".mp4": "video",
    ".avi": "video",
    ".csv": "table",
    ".tsv": "table",
    ".jsonl": "table",
    ".ndjson": "table",
    ".json": "JSON",
    ".xml": "XML",
}
_LMDB_MAGIC = (16, b"\xde\xc0\xef\xbe")
_TAR_MAGIC = (257, b"ustar")
# What a kind is read by: {first} is the first such file, {folder} the one it lies in.
_COMMANDS = {
    "Parquet": "packer convert {first}",
    "table": "packer convert {first}",
    "HDF5": "packer convert {first}  (or packer index, where it holds images as they are)",
    "TFRecord": "packer convert {first}  (or  packer index {folder}, for all of them)",
    "zip archive": "packer convert {first}",
    "tar archive": "packer convert {first}  (or  packer index {folder}, for WebDataset shards)",
    **dict.fromkeys(("gzip", "bzip2", "xz", "zstd"), "packer convert {first}, where that is a tar or a TFRecord"),
}
_PLAIN = (*(f"{NOT_AN_IMAGE}: {kind}" for kind in ("text", "JSON", "XML")), NOT_AN_IMAGE, EMPTY, "hidden")
_NO_COMMAND = "no command reads this: write its images as files, or name them in a .csv of paths and labels"


def is_stray(head: Buffer, name: str) -> bool:
    """Whether a file is no image, and is not meant to be one, neither by its first bytes nor by its name."""
    suffix = PurePosixPath(name).suffix.lower()
    meant = has_image_suffix(name) or suffix in FOREIGN_SUFFIXES
    return not (meant or sniff(head) or foreign_medium(head))


def contents_of(head: Buffer, name: str) -> str:
    """What a file holds: "Parquet", "tar archive", "text", …; "" where nothing tells."""
    start = bytes(head[:HEAD_BYTES])
    suffix = PurePosixPath(name).suffix.lower()
    if suffix == ".npz":
        return _SUFFIXES[suffix]
    if starts_record(start):
        return "TFRecord"
    for magic, kind in _MAGIC.items():
        if start.startswith(magic):
            return kind
    for (at, magic), kind in ((_TAR_MAGIC, "tar archive"), (_LMDB_MAGIC, "LMDB")):
        if start[at : at + len(magic)] == magic:
            return kind
    if start[4:8] == b"ftyp":
        return "video"
    if suffix in _SUFFIXES:
        return _SUFFIXES[suffix]
    entry = FORMATS.of_content(start) or SOURCES.of_content(start)
    return entry.title.partition(" ")[2] if entry else "text" if start and _is_text(start) else ""


def _command(kind: str) -> str:
    """What to run for files of a kind."""
    if any(kind in entry.title for entry in FORMATS):
        return _COMMANDS.get(kind, "packer convert {first}  (or  packer index {folder}, for all of them)")
    entry = next((entry for entry in SOURCES if kind in entry.title), None)
    found = "" if entry is None else "packer convert {folder}" if entry.inside else "packer convert {first}"
    return _COMMANDS.get(kind) or found or _NO_COMMAND


def _is_text(start: bytes) -> bool:
    try:
        return "\0" not in codecs.getincrementaldecoder("utf-8")().decode(start)  # which may be cut inside a letter
    except UnicodeDecodeError:
        return False


def reason_of(head: Buffer, name: str) -> str:
    """Why a stray is left out."""
    if not len(head):
        return EMPTY
    kind = contents_of(head, name)
    return f"{NOT_AN_IMAGE}: {kind}" if kind else NOT_AN_IMAGE


def advice(root: str, left_out: Iterable[tuple[str, str]], counts: Mapping[str, int]) -> str:
    """What a tree without images holds, by kind, and which command takes it. left_out: (name, reason) of its files."""
    first: dict[str, str] = {}
    for name, reason in left_out:
        first.setdefault(reason, name)
    lines = []
    for reason, count in sorted(counts.items(), key=lambda item: (item[0] in _PLAIN, -item[1])):
        kind = reason.partition(f"{NOT_AN_IMAGE}: ")[2]
        line = f"{plural(count, 'file')}: {reason}"
        if kind and reason in first and reason not in _PLAIN:
            path = PurePosixPath(root, first[reason])
            line += f"; {_command(kind).format(first=path, folder=path.parent)}"
        lines.append(line)
    return "\n  ".join(lines)
