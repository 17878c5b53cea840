"""Sources whose samples are in several files: what they share, and equal images of raw pixels in files.

The files are noted while they are listed, with their size and time, and compared before a worker reads them. Raw pixels
become PNG, which keeps each of them.
"""

from __future__ import annotations

import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Protocol
from zipfile import BadZipFile, ZipFile
from zlib import error as ZlibError

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from cache.errors import BadNameError, SourceError
from packer.formats.base import Arena, key_by_number, png_of
from packer.sources.base import FieldNames, NumberPlaces, SourceListing, SourceReader, SplitListing, file_stamp
from packer.sources.streams import PlainFile, UnpackedStream
from packer.sources.tables import is_missing
from readers.layout import SplitName, same_split
from readers.table import Buffer, Strings

__all__ = [
    "FilesSource",
    "PixelBlock",
    "PixelSets",
    "PixelSource",
    "PixelSplit",
    "ZipMember",
    "check_image_bytes",
    "numbered_keys",
    "numbered_names",
    "split_named",
    "split_of_value",
    "splits_by_value",
]

_MAX_IMAGE_BYTES = 1 << 28
_PNG_BYTES = 128  # of signature, chunks IHDR and IEND, and the ends of the data
_CHUNK = 1 << 14  # deflate stores what it cannot compress in blocks, with a few bytes for each


class FilesSource(ABC):
    """A source of several files, which must not change between `list` and the reading. kind: what it is."""

    kind: ClassVar[str]

    def __init__(self, root: Path) -> None:
        self.root = root
        self._stamps: dict[Path, tuple[int, int]] = {}

    @property
    def title(self) -> str:
        return f"{self.kind} {self.root}"

    def list(self, split: str | None) -> SourceListing:
        self._stamps = {}
        listing = self.list_files(split)
        stamp = crc32c(repr(list(self._stamps.items())).encode("utf-8", "surrogatepass"))
        for part in listing.splits.values():
            part.stamps = np.full(len(part), stamp, np.int64)
        return listing

    def note(self, path: Path) -> Path:
        """`path`, which is one of the files that samples are read from. Raises SourceError where it is no file."""
        try:
            found = path.stat()
        except OSError as error:
            raise SourceError(f"{path}: cannot be examined: {error.strerror}") from error
        if not stat.S_ISREG(found.st_mode):
            raise SourceError(f"{path}: not a regular file")
        self._stamps[path] = (found.st_size, found.st_mtime_ns)
        return path

    def check(self, path: Path) -> None:
        """Raise SourceError where a file is not as it was when it was listed."""
        if file_stamp(path) != self._stamps.get(path):
            raise SourceError(f"{path}: has changed since it was listed; run the same command again")

    def paths(self, listing: SourceListing) -> Iterator[Path]:
        yield from self._stamps

    @abstractmethod
    def list_files(self, split: str | None) -> SourceListing:
        """The listing, without stamps. Calls `note` for each file before it is read."""

    @abstractmethod
    def open(self) -> AbstractContextManager[SourceReader]:
        """A reader, which calls `check` for each file that it opens."""


def split_named(split: str, known: Iterable[str], where: object) -> str:
    """The split that is meant: validation is also called val and valid. Raises SourceError where there is none."""
    found = [*known]
    if split in found:
        return split
    for name in same_split(split):
        if name in found:
            return name
    raise SourceError(f"{where}: no split {split!r}; it has {', '.join(found)}")


def splits_by_value(part: SplitListing, values: Sequence[Any], where: str) -> dict[str, SplitListing]:
    """The samples of a listing, dealt to the splits that a column names, in the order of their first samples.

    values: of the column, by sample. where: the column, for messages. Raises SourceError for a value that is no name.
    """
    rows: dict[Any, list[int]] = {}
    for row, value in enumerate(values):
        rows.setdefault(value, []).append(row)
    splits: dict[str, list[int]] = {}
    for value, its in rows.items():
        splits.setdefault(split_of_value(value, f"{where}, row {its[0] + 1}"), []).extend(its)
    return {name: part.take(np.array(sorted(its), np.int64)) for name, its in splits.items()}


def split_of_value(value: Any, where: str) -> str:
    """The split that a value of a column names. Raises SourceError."""
    try:
        return SplitName("" if is_missing(value) else str(value).strip())
    except BadNameError as error:
        raise SourceError(f"{where}: {error}") from error


def numbered_keys(split: str, count: int) -> Strings:
    """Keys of samples that have no names: their numbers in the split."""
    return Strings.of(key_by_number(Path(split), number) for number in range(count))


def numbered_names(count: int, fields: int) -> FieldNames:
    """The file names of samples that come from no files."""
    nothing = Strings(np.empty(0, np.uint8), np.zeros(count + 1, np.uint64))
    return FieldNames(*[nothing] * fields)


def check_image_bytes(where: object, count: int) -> None:
    """Refuse images of more raw bytes than any in a set of equal ones has."""
    if not 0 < count <= _MAX_IMAGE_BYTES:
        raise SourceError(f"{where}: images of {count:,} bytes each, expected from 1 to {_MAX_IMAGE_BYTES:,}")


# --- raw pixels ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class PixelBlock:
    """Equal images in a file, one record after the other.

    start: the first byte of the first record. head: bytes of a record before its pixels.
    height, width, channels: of an image, whose pixels are uint8; 0 channels: [height, width].
    planes: its channels are one after the other, [channels, height, width].
    compression: of the file (`packer.sources.streams`). member: of a zip archive, where the file is one.
    """

    path: Path
    count: int
    height: int
    width: int
    channels: int = 0
    start: int = 0
    head: int = 0
    planes: bool = False
    compression: str = ""
    member: str = ""

    @property
    def record_bytes(self) -> int:
        return self.head + self.height * self.width * max(1, self.channels)

    @property
    def image_bytes(self) -> int:
        """At least the bytes of a PNG, and those of a record."""
        raw = self.record_bytes + self.height
        return raw + _PNG_BYTES + raw // _CHUNK * 16

    def pixels(self, record: Buffer) -> npt.NDArray[np.uint8]:
        """The pixels [height, width] or [height, width, channels] of a record."""
        flat: npt.NDArray[np.uint8] = np.frombuffer(record, np.uint8, offset=self.head)
        if not self.channels:
            return flat.reshape(self.height, self.width)
        if self.planes:
            return np.moveaxis(flat.reshape(self.channels, self.height, self.width), 0, -1)
        return flat.reshape(self.height, self.width, self.channels)


@dataclass(frozen=True)
class PixelSplit:
    """The images of a split: blocks in order, and a label for each image (-1: none)."""

    blocks: Sequence[PixelBlock]
    labels: npt.NDArray[np.int64]


@dataclass
class PixelSets:
    """What the files hold. left_out, warnings: as in a listing."""

    splits: Mapping[str, PixelSplit]
    classes: tuple[str, ...] = ()
    left_out: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


class PixelSource(FilesSource):
    """A source of `PixelBlock`s. Place of a sample: (number of its block, number in that)."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.blocks: tuple[PixelBlock, ...] = ()
        self.has_json = False

    @abstractmethod
    def find(self, split: str | None) -> PixelSets:
        """What is there. split: the one to take, or the name of what has none."""

    def json_of(self, block: PixelBlock, index: int) -> bytes | None:
        """The field json of an image, where the source `has_json`."""
        return None

    def list_files(self, split: str | None) -> SourceListing:
        sets = self.find(split)
        wanted = [*sets.splits] if split is None else [split_named(split, sets.splits, self.root)]
        fields = {"image": "image"} | ({"json": "json"} if self.has_json else {})
        listing = SourceListing({}, fields, sets.classes, sets.left_out, sets.warnings)
        blocks: list[PixelBlock] = []
        for name in wanted:
            part = sets.splits[name]
            places = [
                np.stack((np.full(block.count, number), np.arange(block.count)), axis=1)
                for number, block in enumerate(part.blocks, len(blocks))
            ]
            sizes = [np.full(block.count, block.image_bytes + 256 * self.has_json) for block in part.blocks]
            blocks += part.blocks
            count = len(part.labels)
            if not count:
                raise SourceError(f"{self.root}: no images in {name}")
            listing.splits[name] = SplitListing(
                "",
                numbered_keys(name, count),
                part.labels,
                numbered_names(count, len(fields)),
                np.concatenate(sizes).astype(np.int64),
                NumberPlaces(np.concatenate(places).astype(np.int64)),
                np.zeros(count, np.int64),
            )
        self.blocks = tuple(blocks)
        listing.shuffles = not any(block.compression or block.member for block in blocks)
        return listing

    @contextmanager
    def open(self) -> Iterator[PixelReader]:
        with ExitStack() as opened:
            yield PixelReader(self, opened)


class PixelReader:
    """Reads images of blocks, each file of which is opened once."""

    def __init__(self, source: PixelSource, opened: ExitStack) -> None:
        self._source, self._opened = source, opened
        self._files: dict[tuple[Path, str], _Bytes] = {}

    def read(self, place: tuple[int, int], arena: Arena) -> Sequence[Buffer | None]:
        number, index = place
        block = self._source.blocks[number]
        key = (block.path, block.member)
        file = self._files.get(key)
        if file is None:
            self._source.check(block.path)
            file = self._files[key] = _opened(block)
            self._opened.callback(file.close)
        record = arena.rest()[: block.record_bytes]
        file.read_into(block.start + index * block.record_bytes, record)
        image = png_of(block.pixels(record))
        if not self._source.has_json:
            return (image,)
        return image, self._source.json_of(block, index)


class _Bytes(Protocol):
    """A file, or what it holds unpacked."""

    def read_into(self, offset: int, target: memoryview) -> None: ...
    def close(self) -> None: ...


def _opened(block: PixelBlock) -> _Bytes:
    if block.member:
        return ZipMember(block.path, block.member)
    return UnpackedStream(block.path, block.compression) if block.compression else PlainFile(block.path)


class ZipMember:
    """The content of a member of a zip archive, read forward; before the position it starts over."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self._archive: Any = None
        self._file: BinaryIO = self._guarded(self._open)

    def _open(self) -> BinaryIO:
        self._archive = ZipFile(self.path)
        return self._archive.open(self.name)  # type: ignore[no-any-return]

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` from `offset` on. Raises SourceError where there is less."""
        if self._guarded(self._file.seek, offset) != offset:
            raise self._damaged("ends before its array does")
        while target:
            part = self._guarded(self._file.read, len(target))
            if not part:
                raise self._damaged("ends before its array does")
            target[: len(part)] = part
            target = target[len(part) :]

    def _guarded(self, work: Callable[..., Any], *given: object) -> Any:
        try:
            return work(*given)
        except (BadZipFile, OSError, EOFError, ValueError, KeyError, RuntimeError, ZlibError) as error:
            raise self._damaged(f"cannot be read: {error}") from error

    def _damaged(self, what: str) -> SourceError:
        return SourceError(f"{self.path}: the member {self.name!r} {what}: damaged or truncated")

    def close(self) -> None:
        self._file.close()
        self._archive.close()
