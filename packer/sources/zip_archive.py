"""Zip archives of image trees: the central directory names the members, each is read where it is, stored or deflated.

The directory is parsed once, when the archive is listed; workers read a member's local header and its data.
Place: (offset of the local header, bytes in the archive, bytes unpacked, CRC-32, how it is packed). Sizes are
bounded before memory is taken for them, the CRC-32 of every member is verified, and members that overlap are
refused. (PKWARE, APPNOTE.TXT 6.3: 4.3.7 local file header, 4.3.12 central directory, 4.4.4 general purpose
bit flag.)
"""

from __future__ import annotations

import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path

from cache.errors import BadSampleError, SourceError
from packer.formats.base import Arena
from packer.registry import HEAD_BYTES
from packer.sources.base import FileSource, SourceListing
from packer.sources.folder import ArchiveMember, inner_name, list_members
from packer.sources.streams import PlainFile
from readers.table import Buffer

__all__ = ["ZipSource"]

_SIGNATURE = b"PK\3\4"
_LOCAL = struct.Struct("<4s22xHH")  # signature, lengths of name and extra field; 30 bytes
_ENCRYPTED, _UTF8 = 0x1, 0x800
_ENCRYPTED_METHOD, _BOMB_METHOD = -1, -2
_HEAD_PACKED_BYTES = 4 * HEAD_BYTES
_UNIX = 3
_MAX_RATIO = 1032  # of deflate: 258 bytes for two bits
_BOMB_BYTES, _BOMB_RATIO = 1 << 30, 1000
_BROKEN = (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError, OverflowError, struct.error)


class ZipSource(FileSource):
    """The members of the archive at `root`."""

    kind = "archive"

    def __init__(self, root: str | os.PathLike[str], layout: str = "auto") -> None:
        super().__init__(root)
        self.layout = layout

    def list_files(self, split: str | None) -> SourceListing:
        left_out: list[tuple[str, str]] = []
        return list_members(_members(self.root, left_out), split, self.root, left_out, self.layout)

    @contextmanager
    def open_files(self) -> Iterator[ZipReader]:
        with PlainFile(self.root) as file:
            yield ZipReader(file)


def _members(root: Path, left_out: list[tuple[str, str]]) -> list[ArchiveMember]:
    """The files of an archive. Raises SourceError for a broken one."""
    try:
        with zipfile.ZipFile(root) as archive:
            entries = archive.infolist()
    except _BROKEN as error:
        raise SourceError(f"{root}: not a zip archive, or truncated (its directory comes last): {error}") from error
    _check_layout(entries, root)
    found = []
    for entry in entries:
        name = _name(entry)
        if name.endswith("/"):
            continue
        plain, reason = inner_name(name)
        reason = reason or _reason_against(entry, name)
        if reason:
            left_out.append((name, reason))
            continue
        method = _ENCRYPTED_METHOD if entry.flag_bits & _ENCRYPTED else entry.compress_type
        method = _BOMB_METHOD if _claims_too_much(entry) else method
        place = (entry.header_offset, entry.compress_size, entry.file_size, entry.CRC, method)
        found.append(ArchiveMember(plain, 0 if method == _BOMB_METHOD else entry.file_size, place))
    return found


def _name(entry: zipfile.ZipInfo) -> str:
    """The name of a member.

    Without the flag for UTF-8 it should be in code page 437, but many tools write UTF-8.
    """
    if entry.flag_bits & _UTF8 or entry.filename.isascii():
        return entry.filename
    try:
        return entry.filename.encode("cp437").decode("utf-8")
    except UnicodeError:
        return entry.filename


def _check_layout(entries: Sequence[zipfile.ZipInfo], root: Path) -> None:
    """Members must lie in the file one after the other: overlapping ones are how a small file makes a large bomb."""
    size = root.stat().st_size
    ordered = sorted(entries, key=lambda entry: entry.header_offset)
    for entry, following in zip_longest(ordered, ordered[1:]):
        end = entry.header_offset + _LOCAL.size + entry.compress_size
        if entry.header_offset < 0 or end > size:
            raise SourceError(
                f"{root}: the member {entry.filename!r} ends at byte {end}, but the archive at {size}: "
                f"truncated or damaged"
            )
        if following is not None and end > following.header_offset:
            raise SourceError(
                f"{root}: the members {entry.filename!r} and {following.filename!r} overlap at byte "
                f"{following.header_offset}: damaged, or a decompression bomb"
            )


def _reason_against(entry: zipfile.ZipInfo, name: str) -> str:
    kind = stat.S_IFMT(entry.external_attr >> 16) if entry.create_system == _UNIX else 0
    if "\\" in name:
        return "a backslash in its name"
    if len(name) > 1 and name[1] == ":":
        return "an absolute name"
    if kind == stat.S_IFLNK:
        return "a symbolic link"
    if kind not in (0, stat.S_IFREG):
        return "not a regular file"
    return ""


def _claims_too_much(entry: zipfile.ZipInfo) -> bool:
    """Whether a member states more bytes than it can unpack to, or than anything but a bomb unpacks to."""
    ratio = _BOMB_RATIO if entry.file_size > _BOMB_BYTES else _MAX_RATIO
    return entry.file_size > ratio * (entry.compress_size + 1)


class ZipReader:
    """Reads members of one archive."""

    def __init__(self, file: PlainFile) -> None:
        self._file = file

    def read(self, place: tuple[int, int, int, int, int], arena: Arena) -> Sequence[Buffer]:
        offset, packed_bytes, size, crc, method = place
        _refuse(place)
        start = self._data_start(offset)
        payload: Buffer
        if method == zipfile.ZIP_STORED:
            if packed_bytes != size:
                raise BadSampleError(f"is stored in {packed_bytes} bytes, but should have {size}")
            self._file.read_into(start, arena.rest()[:size])
            payload = arena.take(size)
        elif method == zipfile.ZIP_DEFLATED:
            packed = bytearray(packed_bytes)
            self._file.read_into(start, memoryview(packed))
            payload = _inflate(packed, size)
        else:
            raise BadSampleError(f"is packed by method {method}, expected 0 (stored) or 8 (deflate); pack it again")
        found = zlib.crc32(payload)
        if found != crc:
            raise BadSampleError(f"is damaged: its CRC-32 is {found:08x}, expected {crc:08x}")
        return (payload,)

    def head(self, place: tuple[int, int, int, int, int]) -> bytes:
        offset, packed_bytes, _, _, method = place
        _refuse(place)
        head = bytearray(min(packed_bytes, _HEAD_PACKED_BYTES))
        self._file.read_into(self._data_start(offset), memoryview(head))
        try:
            return bytes(
                zlib.decompressobj(-zlib.MAX_WBITS).decompress(head, HEAD_BYTES)
                if method == zipfile.ZIP_DEFLATED
                else head[:HEAD_BYTES]
            )
        except zlib.error as error:
            raise BadSampleError(f"is damaged: {error}") from error

    def _data_start(self, offset: int) -> int:
        header = bytearray(_LOCAL.size)
        self._file.read_into(offset, memoryview(header))
        signature, name_bytes, extra_bytes = _LOCAL.unpack(header)
        if signature != _SIGNATURE:
            raise BadSampleError(f"has no local header at byte {offset} of the archive")
        return offset + _LOCAL.size + int(name_bytes) + int(extra_bytes)


def _refuse(place: tuple[int, int, int, int, int]) -> None:
    """Raise BadSampleError for a member that is not to be read at all."""
    _, packed_bytes, size, _, method = place
    if method == _ENCRYPTED_METHOD:
        raise BadSampleError("is encrypted; unpack the archive with its password, and convert the folder")
    if method == _BOMB_METHOD:
        raise BadSampleError(
            f"states {size} bytes, more than {packed_bytes} can unpack to: damaged, or a decompression bomb"
        )


def _inflate(packed: bytearray, size: int) -> bytes:
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        data = unpacker.decompress(packed, size + 1)
    except zlib.error as error:
        raise BadSampleError(f"is damaged: {error}") from error
    if len(data) != size or not unpacker.eof:
        raise BadSampleError(f"is damaged: it does not unpack to its {size} bytes")
    return data
