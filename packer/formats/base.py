"""The interface of formats: a format locates the samples of any shard, and most formats also write shards.

The law, tested for every format that writes: the ranges reported by a writer are those that `locate` finds in the file,
and reading a range gives the payload. Shards can therefore be adopted without copying, and any index can be rebuilt.

Only `locate` interprets foreign layouts: `packer index` adopts the samples that it finds, and `packer convert` packs
them (`packer.sources.shards`), so both give the same keys, labels, classes and fields. Conversion calls it with
`lenient`, which also finds samples that are not a single byte range.

A format is a module with one subclass of `Format`, and an entry in the registry of `packer.formats`.
"""

from __future__ import annotations

import io
import os
import stat
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cache.checksums import JoinedChecksum, crc32c, crc32c_shift
from cache.errors import BadNameError, FormatError
from cache.files import sync_file
from cache.filesystem import write_behind
from cache.system import CLOEXEC, READ, pread
from readers.headers import ImageHeader
from readers.layout import DatasetInfo, FieldName
from readers.table import NO_LABEL, Buffer

__all__ = [
    "Arena",
    "ChainedPayloads",
    "Format",
    "GatherFile",
    "LocateOptions",
    "Located",
    "PackedSample",
    "Payloads",
    "PlaceReader",
    "ShardSpec",
    "ShardWriter",
    "WalkedFormat",
    "Window",
    "WrittenShard",
    "is_field",
    "key_by_number",
    "locate_options",
    "png_of",
    "shard_stem",
    "without_offset",
]


# ------------------------------------------------------------------------------
# Shard files: read through a sliding window, written in large gathered writes.
#
# A `Window` saves the walkers of tar, TFRecord and RecordIO a system call for each small read. It uses `pread` instead
# of a memory map, so that truncating a file during a walk causes an error and not a SIGBUS.
#
# A `GatherFile` does not copy: it keeps references to pieces until `flush`, so their memory must not change before.


_WINDOW_BYTES = 1 << 20
_CHECKSUM_BYTES = 8 << 20
_MAX_PIECES = min(1024, os.sysconf("SC_IOV_MAX")) if hasattr(os, "sysconf") else 1024
_FLUSH_BYTES = 256 << 10
_WRITE_BEHIND_BYTES = 8 << 20


class Window:
    """Random access to `size` bytes of a regular file. Raises FormatError for any other kind of file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = 0
        self._data = b""
        try:
            self._descriptor = os.open(path, READ)
        except OSError as error:
            raise FormatError(f"{path}: cannot be opened: {error.strerror}") from error
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._descriptor)
            raise FormatError(f"{path}: not a regular file")
        self.size = status.st_size

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes at `offset`. Raises FormatError if the file ends earlier."""
        inside = offset - self._start
        if inside < 0 or inside + length > len(self._data):
            if offset + length > self.size:
                raise FormatError(
                    f"{self.path}: ends at byte {self.size}, {length} bytes were expected at {offset}: truncated?"
                )
            self._data = self._fetch(offset, max(length, min(_WINDOW_BYTES, self.size - offset)))
            self._start, inside = offset, 0
        return self._data[inside : inside + length]

    def read_up_to(self, offset: int, length: int) -> bytes:
        """`length` bytes at `offset`, or fewer at the end of the file."""
        return self.read(offset, min(length, self.size - offset)) if offset < self.size else b""

    def _fetch(self, offset: int, length: int) -> bytes:
        parts = []
        while length > 0:
            part = pread(self._descriptor, min(length, 1 << 30), offset)
            if not part:
                raise FormatError(f"{self.path}: shrank to {offset} bytes while it was being read")
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def checksum(self) -> int:
        """CRC32C of the whole file."""
        crc = 0
        for offset in range(0, self.size, _CHECKSUM_BYTES):
            crc = crc32c(self.read(offset, min(_CHECKSUM_BYTES, self.size - offset)), crc)
        return crc

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


class GatherFile:
    """A new file at `path` (which must not exist), written from position `start` on.

    position: offset of the next piece. checksum: of the file; the caller of `append` updates it.
    """

    __slots__ = ("_announced", "_bytes", "_pieces", "checksum", "descriptor", "path", "position")

    def __init__(self, path: Path, start: int = 0) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | CLOEXEC, 0o666)
        if start:
            os.lseek(self.descriptor, start, os.SEEK_SET)
        self.position = start
        self.checksum = JoinedChecksum()
        self._pieces: list[Buffer] = []
        self._bytes = 0
        self._announced = start  # write-back has been requested up to here

    def append(self, pieces: tuple[Buffer, ...], total_bytes: int) -> None:
        """Queue pieces of `total_bytes` in total."""
        self._pieces += pieces
        self.position += total_bytes
        self._bytes += total_bytes
        if self._bytes >= _FLUSH_BYTES or len(self._pieces) >= _MAX_PIECES:
            self.flush()

    def flush(self) -> None:
        """Write the queue."""
        pieces = self._pieces
        if not pieces:
            return
        for first in range(0, len(pieces), _MAX_PIECES):
            self._write(pieces[first : first + _MAX_PIECES])
        if self.position - self._announced >= _WRITE_BEHIND_BYTES:
            write_behind(self.descriptor, self._announced, self.position - self._announced)
            self._announced = self.position
        self._pieces = []
        self._bytes = 0

    def _write(self, pieces: list[Buffer]) -> None:
        left = sum(map(len, pieces))
        while left:
            written = os.writev(self.descriptor, pieces)
            left -= written
            if not left:
                return
            while pieces and written >= len(pieces[0]):
                written -= len(pieces[0])
                pieces = pieces[1:]
            pieces = [memoryview(pieces[0])[written:], *pieces[1:]]

    def sync_and_close(self) -> None:
        """Flush the file, sync it to the disk, and close it."""
        self.flush()
        sync_file(self.descriptor)
        self.close()

    def close(self) -> None:
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)

    def abort(self) -> None:
        """Close and remove the file."""
        self._pieces = []
        self.close()
        self.path.unlink(missing_ok=True)


_ARENA_BYTES = 256 << 10  # fits in the cache of a core: with 2 MiB, packing takes up to twice as long


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """The description of a set that a writer needs, and that a shard may store.

    fields: name -> kind. shards: number of shards of the split, 0 if unknown.
    """

    split: str
    fields: Mapping[str, str]
    classes: tuple[str, ...] = ()
    label_offset: int = 0
    shards: int = 0


class PackedSample(NamedTuple):
    """One sample to be written to a shard.

    payloads, names: in the order of the spec's fields; None for a missing field, "" for a field without a file name.
    label: NO_LABEL if none. header: of the image, None if there is no image.
    """

    key: str
    label: int
    payloads: tuple[Buffer | None, ...]
    names: tuple[str, ...]
    header: ImageHeader | None


class Payloads:
    """Offset, length and CRC32C of a field's payload in every sample; ABSENT, 0 and 0 if a sample lacks the field."""

    __slots__ = ("crc32c", "length", "offset")

    def __init__(self) -> None:
        self.offset, self.length, self.crc32c = array("Q"), array("Q"), array("I")

    def append(self, offset: int, length: int, crc: int) -> None:
        self.offset.append(offset)
        self.length.append(length)
        self.crc32c.append(crc)


class ChainedPayloads(Payloads):
    """Payloads whose CRC32C is derived from a running checksum of the file, instead of being computed separately.

    Until `separate`, `before` and `crc32c` have the running checksum at the start and the end of each payload.
    """

    __slots__ = ("before",)

    def __init__(self) -> None:
        super().__init__()
        self.before = array("I")

    def append(self, offset: int, length: int, crc: int, before: int = 0) -> None:
        self.offset.append(offset)
        self.length.append(length)
        self.crc32c.append(crc)
        self.before.append(before)

    def separate(self) -> None:
        """Replace the running checksums in `crc32c` by the CRC32C of each payload."""
        shifted = crc32c_shift(np.array(self.before, np.uint32), np.array(self.length, np.uint64))
        self.crc32c = array("I", (np.array(self.crc32c, np.uint32) ^ shifted).tobytes())


class WrittenShard(NamedTuple):
    """A finished shard: size and CRC32C of the whole file, and its payloads by field."""

    bytes: int
    crc32c: int
    payloads: Mapping[str, Payloads]


class Located(NamedTuple):
    """One sample found in a shard: ranges[field] = (offset, length) in bytes, names[field] = original file name.

    class_name: of the label, if the shard states it; with NO_LABEL the shard has no number for it.
    split: the split that the shard assigns, "" if none.
    left_behind: information in the shard that no field keeps.
    fault: why the sample cannot be read, with `lenient`.
    left_out: why the object named by `key` is not a sample, with `lenient`.
    pixels: (height, width) if the image is raw pixels [height, width, 3].
    place, bytes: of an image that is not one byte range, with `lenient`: the argument for the format's PlaceReader,
    and the approximate size. main: the field of that image.
    """

    key: str
    label: int
    ranges: dict[str, tuple[int, int]]
    names: dict[str, str]
    class_name: str = ""
    split: str = ""
    left_behind: tuple[str, ...] = ()
    fault: str = ""
    left_out: str = ""
    place: tuple[Any, ...] | None = None
    bytes: int = 0
    pixels: tuple[int, int] | None = None
    main: str = "image"


@dataclass(frozen=True, slots=True)
class LocateOptions:
    """How to read a foreign shard. None selects the format's usual names.

    image_key, label_key: a tar extension (alternatives joined by ";"), a tf.train.Example feature or an HDF5 data set.
    extra_fields: further field name -> key in the shard.
    label_offset: subtracted from the labels in the shard.
    check_payload: also verify the format's own checksums of the payload.
    lenient: return damaged samples with their `fault`, samples without a flat range with their `place`, and objects
    that should be samples but are not with `left_out`, instead of raising or skipping.
    """

    image_key: str | None = None
    label_key: str | None = None
    extra_fields: Mapping[str, str] = field(default_factory=dict)
    label_offset: int = 0
    check_payload: bool = False
    lenient: bool = False


def locate_options(info: DatasetInfo) -> LocateOptions:
    """The options to read the shards of a set."""
    keys = info.adopted
    return LocateOptions(keys.image_key, keys.label_key, keys.fields, info.label_offset)


def without_offset(stored: int, options: LocateOptions) -> int:
    """The label for the number `stored` in a shard."""
    return NO_LABEL if stored == NO_LABEL else stored - options.label_offset


def is_field(name: str) -> bool:
    """Whether a name from a foreign shard is valid for a field in every container."""
    try:
        return FieldName(name) == name.lower()
    except BadNameError:
        return False


def shard_stem(path: Path) -> str:
    """The name of a shard without its suffixes."""
    name = path.name
    for suffix in (".gz", ".bz2", ".xz", ".zst"):
        name = name.removesuffix(suffix)
    return Path(name).stem


def key_by_number(path: Path, number: int) -> str:
    """The key of a sample that has none in the shard."""
    return f"{shard_stem(path)}/{number:08d}"


class Arena:
    """A worker's memory for samples, which is filled from front to back, then reused, and grows for larger samples.

    Writers keep references to payloads until they are flushed, so `flush` is called before memory is reused.
    """

    __slots__ = ("_block", "_flush", "_used")

    def __init__(self, flush: Callable[[], None], size: int = _ARENA_BYTES) -> None:
        self._block = memoryview(bytearray(size))
        self._used = 0
        self._flush = flush

    def begin(self, size: int) -> None:
        """Make room for a sample of `size` bytes, which may overwrite earlier samples."""
        if self._used + size > len(self._block):
            self._flush()
            self._used = 0
            if size > len(self._block):
                self._block = memoryview(bytearray(size))

    def rest(self) -> memoryview:
        """The free memory: read into it, then `take` the bytes read."""
        return self._block[self._used :]

    def take(self, size: int) -> memoryview:
        """The next `size` bytes."""
        start = self._used
        self._used = start + size
        return self._block[start : start + size]


def png_of(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Encode 8-bit pixels [height, width] or [height, width, channels] as PNG."""
    from PIL import Image

    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    memory = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(memory, "PNG")
    return memory.getvalue()


class ShardWriter(Protocol):
    """Writes one shard. Payloads given to `add` must stay valid and unchanged until `flush` or `finish` returns."""

    def add(self, sample: PackedSample) -> None: ...

    def flush(self) -> None:
        """Write everything added so far."""

    def finish(self) -> WrittenShard:
        """Complete the file, sync it to the disk, and close it."""

    def abort(self) -> None:
        """Close and remove the unfinished file."""


class PlaceReader(Protocol):
    """Reads images that are not one byte range."""

    def read(self, place: tuple[Any, ...]) -> Buffer:
        """The image at a `Located.place`. Raises BadSampleError."""


class Format(ABC):
    """A container format. `locate` is required; formats that can be written also need `shard_name`, `open_writer`."""

    name: str
    exports: ClassVar[Mapping[str, str]] = {}
    """Index files that other libraries read for shards of this format: target -> suffix."""
    unindexed: ClassVar[Mapping[str, str]] = {}
    """Targets that read shards of this format without an index: target -> how."""

    @abstractmethod
    def locate(self, path: Path, options: LocateOptions) -> Iterator[Located]:
        """Find every sample, in file order. Raises FormatError (broken) or NotFlatError (no flat byte ranges)."""

    def shard_name(self, split: str, number: int, count: int) -> str:
        """File name of shard `number` of `count`."""
        raise FormatError(f"{self.name} shards are read, not written")

    def open_writer(self, path: Path, spec: ShardSpec) -> ShardWriter:
        """Start a new file at `path`, which must not exist."""
        raise FormatError(f"{self.name} shards are read, not written")

    def describe(self, path: Path) -> ShardSpec | None:
        """The file's own description of the set; None if the format or the file has no such record."""
        return None

    def splits(self, path: Path, options: LocateOptions) -> tuple[str, ...]:
        """The splits that a foreign file names for its samples; () if it names none."""
        return ()

    def index_head(self, target: str, samples: int) -> str:
        """The lines that precede the lines of samples in an index for `target`."""
        return ""

    def index_lines(self, target: str, window: Window) -> Iterator[str]:
        """One line per sample of an index for one of `exports`. Raises FormatError if it cannot be written."""
        raise FormatError(f"{window.path}: {target} has no index of {self.name} shards")

    def open_places(self, path: Path) -> AbstractContextManager[PlaceReader]:
        """A reader for the images that `locate` returned with a place."""
        raise FormatError(f"{path}: {self.name} has flat samples only")


class WalkedFormat(Format):
    """A format that is read from front to back, so that it can also be read from a compressed stream."""

    def locate(self, path: Path, options: LocateOptions) -> Iterator[Located]:
        with Window(path) as window:
            yield from self.walk(window, options)

    @abstractmethod
    def walk(self, window: Window, options: LocateOptions) -> Iterator[Located]:
        """Find every sample in an open file, as `locate`. Reads forward only; the file's size may be unknown."""
