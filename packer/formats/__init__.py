"""The container formats: one file each, found by name. Importing this loads none of them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import cast

from packer.formats.base import Format
from packer.formats.checksum import starts_record
from packer.formats.window import Window
from readers.errors import FormatError, NotFlatError
from readers.layout import FORMATS

__all__ = ["FORMATS", "format_named", "format_of_file"]

_HEAD_BYTES = 512
_MAGIC = {"hdf5": b"\x89HDF\r\n\x1a\n"}


def format_named(name: str) -> Format:
    """The format called "hdf5", "tfrecord" or "tar". Raises FormatError for any other name."""
    if name not in FORMATS:
        raise FormatError(f"no format {name!r}; there are {', '.join(FORMATS)}")
    return cast(Format, import_module(f"packer.formats.{name}").FORMAT)


def format_of_file(path: Path) -> Format:
    """The format of a shard, by its content and, for TFRecord (which has no signature), its name.

    Raises FormatError where it is none that we know, and says what it is where that is plain.
    """
    with Window(path) as window:
        head = window.read(0, min(_HEAD_BYTES, window.size))
    if head.startswith(_MAGIC["hdf5"]):
        return format_named("hdf5")
    if head[257:262] == b"ustar":
        return format_named("tar")
    if head[:2] == b"\x1f\x8b" and not starts_record(head):
        raise NotFlatError(
            f"{path}: compressed with gzip, so no sample is one byte range; run  packer convert {path} "
            f"--to tfrecord|tar|hdf5"
        )
    if "tfrecord" in path.name.lower() or not path.suffix:
        return format_named("tfrecord")
    if path.suffix == ".tar" and (not head.strip(b"\0") or len(head) == 512):
        return format_named("tar")
    raise FormatError(f"{path}: neither HDF5, tar nor TFRecord, by its content or its name")
