"""Reading byte ranges of files, including files compressed as a whole (gzip, bzip2, xz, zstd).

A compressed stream is read forward only: reading at an offset unpacks and discards everything before it, and reading
before the current position starts over. Memory use is constant. Nothing is written to disk.

Each output shard of a conversion is a task with a separate reader. To save readers from unpacking the archive from its
start, a reader leaves its stream with the source's `StreamKeeper`, and the next reader in the same process continues
from there. Unpickling a keeper in a worker returns the keeper which that process already has for the file. A keeper
closes its stream when it is deleted.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from cache.errors import SourceError
from cache.system import READ, preadv
from packer.formats import REGISTRY
from packer.formats.base import Window
from packer.registry import HEAD_BYTES
from packer.sources.base import file_stamp

__all__ = [
    "ByteFile",
    "PlainFile",
    "StreamKeeper",
    "StreamWindow",
    "UnpackedStream",
    "compression_of",
    "open_bytes",
    "unpacked_head",
]

_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_STEP_BYTES = 1 << 20
_BOMB_BYTES = 1 << 30
_BOMB_RATIO = 1000  # images hardly compress; deflate reaches 1032 on zeros
_UNKNOWN_SIZE = 1 << 62


def compression_of(path: Path) -> str:
    """The compression of a file, by its first bytes: "gzip", "bzip2", "xz", "zstd", or "" for none of them."""
    try:
        with open(path, "rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise SourceError(f"{path}: cannot be opened: {error.strerror}") from error
    compression = next((name for magic, name in _MAGIC.items() if head.startswith(magic)), "")
    # The length of a TFRecord file's first record may equal a magic number; the record's checksum tells them apart.
    return "" if compression and REGISTRY.of_content(head) is not None else compression


def unpacked_head(path: Path, count: int) -> bytes:
    """The first bytes, up to `count`, of a file or of a compressed file's content; b"" if that is damaged."""
    compression = compression_of(path)
    target = bytearray(count)
    if not compression:
        with open(path, "rb") as file:
            return bytes(target[: file.readinto(target)])
    try:
        with UnpackedStream(path, compression) as stream:
            return bytes(target[: stream.read_up_to(0, memoryview(target))])
    except SourceError:  # reported when the file is listed
        return b""


_F = TypeVar("_F", bound="ByteFile")


class ByteFile:
    """A file to be read at offsets."""

    path: Path

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` from `offset` on. Raises SourceError if the file ends before."""
        raise NotImplementedError

    def read(self, offset: int, length: int) -> bytes:
        """Read a byte range, in pieces: a wrong length then allocates no more memory than there are data."""
        parts = []
        while length > 0:
            part = bytearray(min(length, _STEP_BYTES))
            self.read_into(offset, memoryview(part))
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return b"".join(parts)

    def close(self) -> None:
        """Close the file."""

    def __enter__(self: _F) -> _F:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_bytes(path: Path, compression: str | None = None) -> PlainFile | UnpackedStream:
    """Open a file, or the content of a compressed one. compression: as of `compression_of`, None to detect it."""
    compression = compression_of(path) if compression is None else compression
    return UnpackedStream(path, compression) if compression else PlainFile(path)


class PlainFile(ByteFile):
    """An uncompressed file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, READ)
        except OSError as error:
            raise SourceError(f"{path}: cannot be opened: {error.strerror}") from error

    def read_into(self, offset: int, target: memoryview) -> None:
        while target:
            count = preadv(self._descriptor, (target,), offset)
            if not count:
                raise SourceError(f"{self.path}: ends at byte {offset}, {len(target)} more were expected: truncated?")
            target, offset = target[count:], offset + count

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class UnpackedStream(ByteFile):
    """The content of a compressed file; `position` is the offset of the next byte in it.

    Raises SourceError for damaged or truncated files, and for decompression bombs: content over 1 GiB and over 1000
    times the size of the file. A zstd file that is cut off after the last block read is not detected.
    """

    def __init__(self, path: Path, compression: str) -> None:
        self.path, self.compression = path, compression
        self.stamp = file_stamp(path)
        self.process = os.getpid()  # a forked child shares the file position with its parent
        self._file_bytes = self.stamp[0]
        self._scratch = memoryview(bytearray(_STEP_BYTES))
        self._open()

    def _open(self) -> None:
        self.position = 0
        self._raw: BinaryIO = open(self.path, "rb", buffering=_STEP_BYTES)
        self._stream, self._errors = _unpacker(self._raw, self.compression)

    def read_some(self, target: memoryview) -> int:
        """Read up to len(target) bytes at the position. Returns their number, 0 only at the end."""
        try:
            count: int = self._stream.readinto(target)
        except self._errors as error:
            raise SourceError(
                f"{self.path}: truncated or corrupt {self.compression} data, {self.position} bytes into its "
                f"content: {error}"
            ) from error
        self.position += count
        if self.position > _BOMB_BYTES and self.position > _BOMB_RATIO * self._file_bytes:
            raise SourceError(
                f"{self.path}: {self._file_bytes} bytes unpack to more than {_BOMB_RATIO} times as many: a "
                f"decompression bomb"
            )
        return count

    def read_up_to(self, offset: int, target: memoryview) -> int:
        """Fill `target` from `offset` on, up to the end of the content. Returns the number of bytes read."""
        if offset < self.position:
            self.close()
            self._open()
        while self.position < offset:
            if not self.read_some(self._scratch[: min(_STEP_BYTES, offset - self.position)]):
                return 0
        filled = 0
        while filled < len(target):
            count = self.read_some(target[filled : filled + _STEP_BYTES])
            if not count:
                break
            filled += count
        return filled

    def read_into(self, offset: int, target: memoryview) -> None:
        if self.read_up_to(offset, target) < len(target):
            raise SourceError(
                f"{self.path}: its content ends at byte {self.position}, but {len(target)} bytes were "
                f"expected at {offset}: truncated?"
            )

    def read_to_end(self) -> None:
        """Read to the end, where checksums are verified."""
        while self.read_some(self._scratch):
            pass

    def close(self) -> None:
        self._stream.close()
        self._raw.close()


def _unpacker(raw: BinaryIO, compression: str) -> tuple[Any, tuple[type[Exception], ...]]:
    """A file object of the unpacked bytes, and the exceptions that it raises for bad data."""
    errors = (EOFError, OSError, zlib.error, lzma.LZMAError)
    if compression == "gzip":
        return gzip.GzipFile(fileobj=raw), errors
    if compression == "bzip2":
        return bz2.BZ2File(raw), errors
    if compression == "xz":
        return lzma.LZMAFile(raw), errors
    import zstandard

    unpacker = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    return unpacker.stream_reader(raw, read_across_frames=True, closefd=False), (*errors, zstandard.ZstdError)


class StreamWindow(Window):
    """A compressed file as a window for the walkers of `packer.formats`, which read forward. Its size is unknown."""

    def __init__(self, stream: UnpackedStream) -> None:
        self.path, self.size, self._stream = stream.path, _UNKNOWN_SIZE, stream

    def read(self, offset: int, length: int) -> bytes:
        return self._stream.read(offset, length)

    def read_up_to(self, offset: int, length: int) -> bytes:
        data = bytearray(length)
        return bytes(data[: self._stream.read_up_to(offset, memoryview(data))])

    def __exit__(self, *_: object) -> None:
        self._stream.close()


class StreamKeeper:
    """Opens a file for a source's readers, and keeps the stream of a process's last reader for its next one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream: UnpackedStream | None = None

    @contextmanager
    def open(self) -> Iterator[PlainFile | UnpackedStream]:
        """Open the file. The stream of a compressed file is kept for the next reader, unless there was an error."""
        compression = compression_of(self.path)
        file: PlainFile | UnpackedStream = self._take(compression) if compression else PlainFile(self.path)
        try:
            yield file
        except BaseException:
            file.close()
            raise
        if isinstance(file, UnpackedStream):
            self._close()
            self._stream = file
        else:
            file.close()

    def _take(self, compression: str) -> UnpackedStream:
        """The stream that is kept, if it is still valid, else a new one."""
        stream = self._stream
        if stream is not None and stream.process == os.getpid() and stream.stamp == file_stamp(self.path):
            self._stream = None
            return stream
        self._close()
        return UnpackedStream(self.path, compression)

    def _close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return _keeper_of, (self.path,)

    def __del__(self) -> None:
        self._close()


@lru_cache(1)
def _keeper_of(path: Path) -> StreamKeeper:
    """The keeper of this process, of one file at a time."""
    return StreamKeeper(path)
