"""The registry of container formats. Each format is implemented by one module, which is loaded on first use.

Other packages add formats through the entry point group `packer.formats` (see `packer.registry`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from cache.errors import FormatError, NotFlatError
from cache.messages import quoted
from packer.formats.base import Format, Window
from packer.formats.tfrecord import starts_record
from packer.registry import HEAD_BYTES, Entry, Registry

__all__ = [
    "REGISTRY",
    "FormatEntry",
    "format_aliases",
    "format_named",
    "format_of_file",
    "format_of_head",
    "resolve_format",
    "writable_formats",
]

_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, kw_only=True)
class FormatEntry(Entry):
    """A container format.

    aliases: other names of the format.
    name_part: a part of the names of its files, for names without a suffix.
    without_suffix: whether a file without a suffix, and without recognised content, counts as this format.
    may_be: whether a file that matches only by name could be of this format, by its first bytes.
    writes: whether `packer convert` can write it.
    """

    aliases: tuple[str, ...] = ()
    name_part: str = ""
    without_suffix: bool = False
    may_be: Callable[[bytes], bool] | None = field(default=None, compare=False)
    writes: bool = True

    def is_name(self, name: str) -> bool:
        return super().is_name(name) or (bool(self.name_part) and self.name_part in name.lower())


def _may_be_tar(head: bytes) -> bool:
    return len(head) == HEAD_BYTES or not head.strip(b"\0")


REGISTRY = Registry(
    "packer.formats",
    FormatEntry,
    (
        FormatEntry(
            name="hdf5",
            title="an HDF5 file",
            home="packer.formats.hdf5:FORMAT",
            magic=((0, b"\x89HDF\r\n\x1a\n"),),
            suffixes=(".h5", ".hdf5", ".hdf", ".he5"),
            aliases=("h5", "hdf"),
        ),
        FormatEntry(
            name="tfrecord",
            title="a TFRecord file",
            home="packer.formats.tfrecord:FORMAT",
            claims=starts_record,
            suffixes=(".tfrecord", ".tfrecords", ".tfrec"),
            name_part="tfrecord",
            without_suffix=True,
            aliases=("tfrecords",),
        ),
        FormatEntry(
            name="tar",
            title="a WebDataset tar",
            home="packer.formats.tar:FORMAT",
            magic=((257, b"ustar"),),
            suffixes=(".tar",),
            may_be=_may_be_tar,
            aliases=("webdataset", "wds"),
        ),
        FormatEntry(
            name="recordio",
            title="an MXNet RecordIO file",
            home="packer.formats.recordio:FORMAT",
            magic=((0, b"\x0a\x23\xd7\xce"),),
            suffixes=(".rec",),
            writes=False,
        ),
    ),
)


def format_named(name: str) -> Format:
    """The format with a name: "hdf5", "tfrecord", "tar", …. Raises FormatError for an unknown name."""
    entry = REGISTRY.get(name)
    if entry is None:
        raise FormatError(f"no format {name!r}; there are {', '.join(REGISTRY.names())}")
    return cast(Format, entry.load())


def writable_formats() -> tuple[str, ...]:
    """The names of the formats that can be written."""
    return tuple(entry.name for entry in REGISTRY if entry.writes)


def resolve_format(text: str) -> str:
    """The name of a format to write, given in any case or as an alias. Raises ValueError for an unknown one."""
    folded = str(text).strip().casefold()
    for entry in REGISTRY:
        if folded in (entry.name, *entry.aliases) and entry.writes:
            return entry.name
    raise ValueError(f"to must be one of {', '.join(writable_formats())} ({format_aliases()}), not {text!r}")


def format_aliases() -> str:
    """Other names of formats, for a message."""
    return ", ".join(f"{alias} for {entry.name}" for entry in REGISTRY if entry.writes for alias in entry.aliases)


def format_of_file(path: Path) -> Format:
    """The format of a shard, by its content, or, if that is not recognised, by its name.

    Raises FormatError for an unknown format, and NotFlatError for a compressed file.
    """
    with Window(path) as window:
        head = window.read(0, min(HEAD_BYTES, window.size))
    if head.startswith(_GZIP) and REGISTRY.of_content(head) is None:
        raise NotFlatError(
            f"{path}: compressed with gzip, so no sample is one byte range; run  packer convert {quoted(path)} "
            f"--to tfrecord|tar|hdf5"
        )
    entry = format_of_head(head, path.name)
    if entry is None:
        *titles, last = (known.title for known in REGISTRY)
        raise FormatError(f"{path}: neither {', '.join(titles)} nor {last}, by its content or its name")
    return cast(Format, entry.load())


def format_of_head(head: bytes, name: str) -> FormatEntry | None:
    """The format of a file that begins with `head` and is called `name`; None if unknown."""
    matching = REGISTRY.of_content(head)
    if matching is not None:
        return matching
    for entry in REGISTRY:
        named_so = entry.is_name(name) or (entry.without_suffix and "." not in name)
        if named_so and (entry.may_be is None or entry.may_be(head)):
            return entry
    return None
