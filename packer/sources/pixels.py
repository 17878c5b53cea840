"""The base of sources of raw pixels in images of equal size, which become PNG without loss."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import numpy.typing as npt

from cache.errors import SourceError
from packer.formats.base import Arena, png_of
from packer.sources.base import FileSource, SourceListing, numbered, refusing
from packer.sources.streams import ByteFile, open_bytes
from readers.fields import encode_field
from readers.table import Buffer

__all__ = ["ArrayBlock", "PixelBlock", "PixelSource", "ZipMember", "check_image_bytes"]

_MAX_IMAGE_BYTES = 1 << 28
_NPY_BYTES = 4096  # above the header of any array
_PNG_BYTES = 128  # the signature, the chunks IHDR and IEND, and the framing of the data
_CHUNK = 1 << 14  # deflate stores incompressible data in blocks, each with a few bytes of overhead


def check_image_bytes(where: object, count: int) -> None:
    """Raise SourceError unless an image or array of `count` raw bytes is of plausible size."""
    if not 0 < count <= _MAX_IMAGE_BYTES:
        raise SourceError(f"{where}: samples of {count:,} bytes each, expected from 1 to {_MAX_IMAGE_BYTES:,}")


@dataclass(frozen=True, slots=True)
class PixelBlock:
    """Images of equal size in a file, one record after the other.

    start: offset of the first record. head: bytes of a record before its pixels.
    height, width, channels: shape of an image, whose pixels are uint8; channels 0 means [height, width].
    planes: the channels are stored one after the other, [channels, height, width].
    compression: of the file (`packer.sources.streams`). member: name of the member if the file is a zip archive.
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

    def open(self) -> ByteFile:
        """Open the file, the member, or the content of the compressed file."""
        return ZipMember(self.path, self.member) if self.member else open_bytes(self.path, self.compression)

    @property
    def record_bytes(self) -> int:
        return self.head + self.height * self.width * max(1, self.channels)

    @property
    def image_bytes(self) -> int:
        """An upper bound on the size of an image as PNG, and on that of its record."""
        raw = self.record_bytes + self.height
        return raw + _PNG_BYTES + raw // _CHUNK * 16

    def pixels(self, record: Buffer) -> npt.NDArray[np.uint8]:
        """The pixels of a record, [height, width] or [height, width, channels]."""
        flat: npt.NDArray[np.uint8] = np.frombuffer(record, np.uint8, offset=self.head)
        if not self.channels:
            return flat.reshape(self.height, self.width)
        if self.planes:
            return np.moveaxis(flat.reshape(self.channels, self.height, self.width), 0, -1)
        return flat.reshape(self.height, self.width, self.channels)

    def encoded(self, record: Buffer) -> Buffer:
        """The main field of a record."""
        return png_of(self.pixels(record))


@dataclass(frozen=True, slots=True)
class ArrayBlock(PixelBlock):
    """Records that are arrays of numbers instead of images. dtype, shape: of each."""

    dtype: str = ""
    shape: tuple[int, ...] = ()

    @property
    def record_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize * math.prod(self.shape)

    @property
    def image_bytes(self) -> int:
        return self.record_bytes + _NPY_BYTES

    def encoded(self, record: Buffer) -> Buffer:
        return encode_field("array", np.frombuffer(record, self.dtype).reshape(self.shape))


class PixelSource(FileSource):
    """A source of `PixelBlock`s, all images or all arrays. `list_files` calls `begin`, then `add` for each split.

    Place: (number of the block, number of the image in it). has_json: whether samples have a field json (`json_of`).
    """

    has_json = False

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__(root)
        self.blocks: list[PixelBlock] = []

    def json_of(self, block: PixelBlock, index: int) -> bytes | None:
        """The field json of an image, if the source `has_json`."""
        return None

    def begin(self) -> SourceListing:
        """A listing without splits."""
        self.blocks = []
        return SourceListing({}, {"image": "image"} | ({"json": "json"} if self.has_json else {}))

    def add(self, listing: SourceListing, split: str, blocks: Sequence[PixelBlock], labels: Any) -> None:
        """Add a split of these blocks to the listing. labels: int64 [images], -1 for none."""
        if isinstance(blocks[0], ArrayBlock):
            listing.fields = {"array": "array"}
        counts = [block.count for block in blocks]
        numbers = np.repeat(np.arange(len(self.blocks), len(self.blocks) + len(blocks)), counts)
        inside = [np.arange(count) for count in counts]
        places = np.column_stack((numbers, np.concatenate(inside))).astype(np.int64)
        sizes = np.repeat([block.image_bytes + 256 * self.has_json for block in blocks], counts)
        listing.splits[split] = numbered(split, places, sizes, len(listing.fields), labels)
        listing.shuffles &= not any(block.compression or block.member for block in blocks)
        self.blocks += blocks

    @contextmanager
    def open_files(self) -> Iterator[PixelReader]:
        with ExitStack() as opened:
            yield PixelReader(self, opened)


class PixelReader:
    """Reads images of blocks, opening every file once."""

    def __init__(self, source: PixelSource, opened: ExitStack) -> None:
        self._source, self._opened = source, opened
        self._files: dict[tuple[Path, str], ByteFile] = {}

    def read(self, place: tuple[int, int], arena: Arena) -> Sequence[Buffer | None]:
        number, index = place
        block = self._source.blocks[number]
        key = (block.path, block.member)
        if key not in self._files:
            self._files[key] = self._opened.enter_context(block.open())
        record = arena.rest()[: block.record_bytes]
        self._files[key].read_into(block.start + index * block.record_bytes, record)
        image = block.encoded(record)
        return (image, self._source.json_of(block, index)) if self._source.has_json else (image,)


class ZipMember(ByteFile):
    """The content of a member of a zip archive, read forward; reading before the current position starts over."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self._where = path, f"{path}: {name}"
        with refusing(self._where, "damaged or truncated"):
            self._archive = ZipFile(path)
            self._file = self._archive.open(name)

    def read_into(self, offset: int, target: memoryview) -> None:
        with refusing(self._where, "damaged or truncated"):
            if self._file.seek(offset) == offset and self._file.readinto(target) == len(target):  # type: ignore[attr-defined]
                return
        raise SourceError(f"{self._where}: ends inside its array: damaged or truncated")

    def close(self) -> None:
        self._file.close()
        self._archive.close()
