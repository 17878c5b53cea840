"""Zip archives of image trees, read without extracting them; members may be stored or deflated.

The central directory is parsed once, when the archive is listed; workers read a member's local header and data. Sizes
are checked before memory is allocated, the CRC-32 of every member is verified, and archives with overlapping members
are refused.

Place: (offset of the local header, bytes in the archive, bytes unpacked, CRC-32, compression method).

(PKWARE, APPNOTE.TXT 6.3: 4.3.7 local file header, 4.3.12 central directory, 4.4.4 general purpose bit flag.)
"""

from __future__ import annotations

import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cache.errors import BadSampleError, SourceError
from packer.formats.base import Arena
from packer.registry import HEAD_BYTES
from packer.sources.base import FileSource, SourceListing, refusing
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


class ZipSource(FileSource):
    """The images in the zip archive at `root`."""

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
    """The files in an archive; others are appended to `left_out`. Raises SourceError for a damaged archive."""
    with refusing(root, "not a zip archive, or truncated (its directory comes last)"), zipfile.ZipFile(root) as archive:
        entries = archive.infolist()
    _check_layout(entries, root)
    members = []
    for entry in entries:
        name = _name(entry)
        if name.endswith("/"):
            continue
        plain, reason = inner_name(name)
        reason = reason or _reason_against(entry, name)
        if reason:
            left_out.append((name, reason))
            continue
        ratio = _BOMB_RATIO if entry.file_size > _BOMB_BYTES else _MAX_RATIO
        is_bomb = entry.file_size > ratio * (entry.compress_size + 1)
        method = _ENCRYPTED_METHOD if entry.flag_bits & _ENCRYPTED else entry.compress_type
        method = _BOMB_METHOD if is_bomb else method
        place = (entry.header_offset, entry.compress_size, entry.file_size, entry.CRC, method)
        members.append(ArchiveMember(plain, 0 if is_bomb else entry.file_size, place))
    return members


def _name(entry: zipfile.ZipInfo) -> str:
    """The name of a member. Many tools write UTF-8 without setting its flag, which would mean code page 437."""
    try:
        return entry.filename if entry.flag_bits & _UTF8 else entry.filename.encode("cp437").decode("utf-8")
    except UnicodeError:
        return entry.filename


def _check_layout(entries: Sequence[zipfile.ZipInfo], root: Path) -> None:
    """Raise SourceError if members overlap, as in some decompression bombs, or exceed the archive."""
    size, last, last_end = root.stat().st_size, "", 0
    for entry in sorted(entries, key=lambda entry: entry.header_offset):
        end = entry.header_offset + _LOCAL.size + entry.compress_size
        if not 0 <= entry.header_offset < end <= size:
            raise SourceError(
                f"{root}: the member {entry.filename!r} ends at byte {end}, but the archive at {size}: truncated or "
                f"damaged"
            )
        if last_end > entry.header_offset:
            raise SourceError(
                f"{root}: the members {last!r} and {entry.filename!r} overlap at byte {entry.header_offset}: damaged, "
                f"or a decompression bomb"
            )
        last, last_end = entry.filename, end


def _reason_against(entry: zipfile.ZipInfo, name: str) -> str:
    kind = stat.S_IFMT(entry.external_attr >> 16) if entry.create_system == _UNIX else 0
    if "\\" in name:
        return "a backslash in its name"
    if name[1:2] == ":":
        return "an absolute name"
    return "a symbolic link" if kind == stat.S_IFLNK else "" if kind in (0, stat.S_IFREG) else "not a regular file"


class ZipReader:
    """Reads members of an archive."""

    def __init__(self, file: PlainFile) -> None:
        self._file = file

    def read(self, place: tuple[int, int, int, int, int], arena: Arena) -> Sequence[Buffer]:
        _, packed_bytes, size, crc, method = place
        start = self._start(place)
        payload: Buffer
        if method == zipfile.ZIP_STORED:
            if packed_bytes != size:
                raise BadSampleError(f"is stored in {packed_bytes} bytes, expected {size}")
            self._file.read_into(start, arena.rest()[:size])
            payload = arena.take(size)
        else:
            unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
            payload = self._inflate(unpacker, self._file.read(start, packed_bytes), size + 1)
            if len(payload) != size or not unpacker.eof:
                raise BadSampleError(f"is damaged: it does not unpack to its {size} bytes")
        actual = zlib.crc32(payload)
        if actual != crc:
            raise BadSampleError(f"is damaged: its CRC-32 is {actual:08x}, expected {crc:08x}")
        return (payload,)

    def head(self, place: tuple[int, int, int, int, int]) -> bytes:
        head = self._file.read(self._start(place), min(place[1], _HEAD_PACKED_BYTES))
        if place[-1] == zipfile.ZIP_STORED:
            return head[:HEAD_BYTES]
        return self._inflate(zlib.decompressobj(-zlib.MAX_WBITS), head, HEAD_BYTES)

    def _inflate(self, unpacker: Any, packed: bytes, most: int) -> bytes:
        try:
            return bytes(unpacker.decompress(packed, most))
        except zlib.error as error:
            raise BadSampleError(f"is damaged: {error}") from error

    def _start(self, place: tuple[int, int, int, int, int]) -> int:
        """The offset of a member's data. Raises BadSampleError for a member that cannot be read."""
        offset, packed_bytes, size, _, method = place
        if method == _ENCRYPTED_METHOD:
            raise BadSampleError("is encrypted; unpack the archive with its password, and convert the folder")
        if method == _BOMB_METHOD:
            raise BadSampleError(
                f"states {size} bytes, more than {packed_bytes} can unpack to: damaged, or a decompression bomb"
            )
        if method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise BadSampleError(f"is packed by method {method}, expected 0 (stored) or 8 (deflate); pack it again")
        signature, name_bytes, extra_bytes = _LOCAL.unpack(self._file.read(offset, _LOCAL.size))
        if signature != _SIGNATURE:
            raise BadSampleError(f"has no local header at byte {offset} of the archive")
        return offset + _LOCAL.size + int(name_bytes) + int(extra_bytes)
