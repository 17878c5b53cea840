"""What a format promises: it writes a shard, and it locates the samples of a shard that somebody else wrote.

The law, tested for each format: what the writer says it wrote is what `locate` finds in the file, and reading a
range gives the payload. That is why shards can be adopted without a copy and any index can be rebuilt.

A format is one file with one object, listed in `packer.formats`; a new one touches nothing else.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from readers.headers import ImageHeader
from readers.layout import DatasetInfo
from readers.sample import Buffer

__all__ = [
    "Format",
    "LocateOptions",
    "Located",
    "PackedSample",
    "Payloads",
    "ShardSpec",
    "ShardWriter",
    "WrittenShard",
    "locate_options",
]


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """What a writer must know about the set: the split, the fields (name -> kind), the classes, the label offset.

    shards: how many the split has, 0 where that is not known.
    """

    split: str
    fields: Mapping[str, str]
    classes: tuple[str, ...] = ()
    label_offset: int = 0
    shards: int = 0


class PackedSample(NamedTuple):
    """One sample on its way into a shard.

    payloads and names follow the order of the spec's fields; None is an absent field, "" a field from no file.
    label is NO_LABEL for none. header is the image's, where there is an image.
    """

    key: str
    label: int
    payloads: tuple[Buffer | None, ...]
    names: tuple[str, ...]
    header: ImageHeader | None


class Payloads:
    """Where the payloads of a field lie in a shard, and their CRC32C: an entry a sample; ABSENT, 0 and 0 for none."""

    __slots__ = ("crc32c", "length", "offset")

    def __init__(self) -> None:
        self.offset, self.length, self.crc32c = array("Q"), array("Q"), array("I")

    def append(self, offset: int, length: int, crc: int) -> None:
        self.offset.append(offset)
        self.length.append(length)
        self.crc32c.append(crc)


class WrittenShard(NamedTuple):
    """Size and CRC32C of the whole file, and its payloads by field."""

    bytes: int
    crc32c: int
    payloads: Mapping[str, Payloads]


class Located(NamedTuple):
    """One sample found in a shard: ranges[field] = (offset, length) in bytes, names[field] = original file name.

    class_name: of the label, where the shard says it.
    """

    key: str
    label: int
    ranges: dict[str, tuple[int, int]]
    names: dict[str, str]
    class_name: str = ""


@dataclass(frozen=True, slots=True)
class LocateOptions:
    """How to read a shard made elsewhere. None takes the format's usual names.

    image_key, label_key: a tar extension (several joined by ";"), a tf.train.Example feature or an HDF5 data set.
    extra_fields: further field name -> key in the shard. label_offset is subtracted from what the shard holds.
    check_payload: also verify the format's own checksums of the payload.
    """

    image_key: str | None = None
    label_key: str | None = None
    extra_fields: Mapping[str, str] = field(default_factory=dict)
    label_offset: int = 0
    check_payload: bool = False


def locate_options(info: DatasetInfo) -> LocateOptions:
    """How the shards of a set are read."""
    keys = info.adopted
    return LocateOptions(keys.image_key, keys.label_key, keys.fields, info.label_offset)


class ShardWriter(Protocol):
    """Writes one shard. Payloads given to `add` must stay valid and unchanged until `flush` or `finish` returns."""

    def add(self, sample: PackedSample) -> None: ...

    def flush(self) -> None:
        """Hand everything added so far to the operating system."""

    def finish(self) -> WrittenShard:
        """Complete the file, have it on the disk (fsync), and close it."""

    def abort(self) -> None:
        """Close and remove the unfinished file."""


class Format(Protocol):
    """One container format."""

    name: str

    def shard_name(self, split: str, number: int, count: int) -> str:
        """File name of shard `number` of `count`."""

    def open_writer(self, path: Path, spec: ShardSpec) -> ShardWriter:
        """Start a new file at `path`, which must not exist."""

    def locate(self, path: Path, options: LocateOptions) -> Iterator[Located]:
        """Find every sample, in file order. Raises FormatError (broken) or NotFlatError (no flat byte ranges)."""

    def describe(self, path: Path) -> ShardSpec | None:
        """What the file itself says about the set; None where the format or the file carries no such record."""
