"""The files of a tree that packer cannot read as images: recognised by their first bytes, then by their names.

A tree may consist of containers, or of images in an unsupported format. Messages then say what its files are, and name
the command that takes them. Formats and sources are recognised by their registries; other kinds are listed here.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from cache.messages import plural, quoted
from packer.formats import REGISTRY as FORMATS
from packer.registry import HEAD_BYTES
from packer.sources import REGISTRY as SOURCES
from readers.headers import FOREIGN_SUFFIXES, foreign_medium, sniff
from readers.opening.tree import has_image_suffix
from readers.table import Buffer

__all__ = ["EMPTY", "NOT_FETCHED", "advice", "is_stray", "reason_of"]

_NOT_AN_IMAGE = "not an image"
EMPTY = "empty, 0 bytes"
NOT_FETCHED = "not fetched: "
"""The beginning of the reason for which an image of a server is left out; what happened and the address follow."""

_MAGIC = {
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
    b"SQLite format 3\0": "SQLite",
    b"MATLAB 5.0": "MATLAB",
    b"%PDF-": "PDF",
    b"7z\xbc\xaf\x27\x1c": "7z archive",
    b"Rar!\x1a\7": "RAR archive",
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x1aE\xdf\xa3": "video",
}
_SUFFIXES = {
    ".pkl": "pickle",
    ".pickle": "pickle",
    ".pt": "PyTorch",
    ".pth": "PyTorch",
    ".rec": "MXNet RecordIO",
    ".arrow": "Arrow",
    ".mp4": "video",
    ".avi": "video",
    ".csv": "table",
    ".tsv": "table",
    ".jsonl": "table",
    ".ndjson": "table",
    ".json": "JSON",
    ".xml": "XML",
}
# The command that reads a kind; {first} is the first such file, {folder} its folder.
_COMMANDS = {
    "NIfTI": "write arrays, and convert their folder:  numpy.save('x.npy', nibabel.load({first}).get_fdata())",
    "Parquet": "packer convert {first}",
    "table": "packer convert {first}",
    "HDF5": "packer convert {first}  (or packer index, if it contains encoded images)",
    "tar archive": "packer convert {first}  (or  packer index {folder}, for WebDataset shards)",
    **dict.fromkeys(("gzip", "bzip2", "xz", "zstd"), "packer convert {first}, if that is a tar or a TFRecord"),
}
_PLAIN = (*(f"{_NOT_AN_IMAGE}: {kind}" for kind in ("text", "JSON", "XML")), _NOT_AN_IMAGE, EMPTY, "hidden")
_NO_COMMAND = "no command reads this: write its images as files, or name them in a .csv of paths and labels"


def is_stray(head: Buffer, name: str) -> bool:
    """Whether a file is neither an image nor meant to be one, by its first bytes and its name."""
    suffix = PurePosixPath(name).suffix.lower()
    meant = has_image_suffix(name) or suffix in FOREIGN_SUFFIXES
    return not (meant or sniff(head) or foreign_medium(head))


def _contents_of(head: Buffer, name: str) -> str:
    """The kind of content of a file: "Parquet", "tar archive", "text", …; "" if unknown."""
    start = bytes(head[:HEAD_BYTES])
    suffix = PurePosixPath(name).suffix.lower()
    if name.lower().endswith((".nii", ".nii.gz")):
        return "NIfTI"
    entry = SOURCES.of_content(start)
    kind = (
        entry.kind_of(start) if entry else next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), "")
    )
    if kind:
        return kind
    if start[4:8] == b"ftyp":
        return "video"
    return _SUFFIXES.get(suffix) or ("text" if start and _is_text(start) else "")


def _command(kind: str) -> str:
    """The command for files of a kind."""
    if kind in _COMMANDS:
        return _COMMANDS[kind]
    if any(kind in entry.title for entry in FORMATS):
        return "packer convert {first}  (or  packer index {folder}, for all of them)"
    entry = next((entry for entry in SOURCES if kind in entry.title), None)
    return _NO_COMMAND if entry is None else "packer convert {first}"


def _is_text(start: bytes) -> bool:
    try:
        return "\0" not in codecs.getincrementaldecoder("utf-8")().decode(start)  # the end may cut a character
    except UnicodeDecodeError:
        return False


def reason_of(head: Buffer, name: str) -> str:
    """The reason for leaving out a stray file."""
    if not len(head):
        return EMPTY
    kind = _contents_of(head, name)
    return f"{_NOT_AN_IMAGE}: {kind}" if kind else _NOT_AN_IMAGE


def advice(root: str, left_out: Iterable[tuple[str, str]], counts: Mapping[str, int]) -> str:
    """The content of a tree without images, by kind, and the command for it. left_out: (name, reason) of its files."""
    first: dict[str, str] = {}
    for name, reason in left_out:
        first.setdefault(reason, name)
    lines = []
    for reason, count in sorted(counts.items(), key=lambda item: (item[0] in _PLAIN, -item[1])):
        kind = reason.partition(f"{_NOT_AN_IMAGE}: ")[2]
        line = f"{plural(count, 'file')}: {reason}"
        if kind == "Arrow" and reason in first:
            folder = os.fspath(PurePosixPath(root, first[reason]).parent)
            code = f"import datasets, packer; packer.convert(datasets.load_from_disk({folder!r}), 'hdf5', 'OUT')"
            line += f"; if it is from Hugging Face's save_to_disk, run  python -c {quoted(code)}"
        elif kind and reason in first and reason not in _PLAIN:
            path = PurePosixPath(root, first[reason])
            line += f"; {_command(kind).format(first=quoted(path), folder=quoted(path.parent))}"
        lines.append(line)
    return "\n  ".join(lines)
