"""USTAR member headers: those of packer are built here, and those of any tar program are read.

A header is 512 bytes (POSIX.1-1988, pax(1) "ustar Interchange Format"):

    0 name[100] · 100 mode[8] · 108 uid[8] · 116 gid[8] · 124 size[12] · 136 mtime[12] · 148 checksum[8] ·
    156 typeflag · 157 linkname[100] · 257 magic "ustar\\0" "00" · 265 uname[32] · 297 gname[32] · 345 prefix[155]

Numbers are octal text; sizes of 8 GiB and more come as GNU base-256. The checksum is the sum of all bytes with its
own field taken as blanks. Data follows, padded to 512. Two blocks of zeros end the archive. Another archive may follow
them, as where several were joined by `cat`; programs differ in whether they read it (GNU tar with --ignore-zeros), and
here it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cache.errors import FormatError
from packer.formats.base import Window

__all__ = [
    "BLOCK_BYTES",
    "MAX_NAME_BYTES",
    "MAX_SIZE_BYTES",
    "RECORD_NAME",
    "Member",
    "end_of_archive",
    "header_sum",
    "member_header",
    "walk",
]

BLOCK_BYTES = 512
MAX_NAME_BYTES = 100
MAX_SIZE_BYTES = 8**11 - 1
RECORD_NAME = b"__packer__"  # of what `packer.formats.tar` writes behind the end
_RECORD_BYTES = 20 * BLOCK_BYTES
_MAX_META_BYTES = 1 << 20
_MAX_GAP_BYTES = 16 << 20  # of zeros between archives

_NO_NAME = bytes(MAX_NAME_BYTES)
_HEAD = b"0000644\0" + b"0000000\0" + b"0000000\0"
_MTIME = b"\0" + b"00000000000\0"  # behind the end of the size
_TAIL = b"0" + bytes(100) + b"ustar\x0000" + bytes(BLOCK_BYTES - 265)
_CONSTANT_SUM = sum(_HEAD) + sum(_MTIME) + 8 * ord(" ") + sum(_TAIL)


class Member(NamedTuple):
    """A member found by `walk`: its name, type flag, where its data starts and how long it is."""

    name: str
    type: str
    offset: int
    size: int
    linkname: str


def member_header(name: bytes, size: int) -> bytes:
    """The header of a regular file (mode 0644, owner 0, time 0). Raises FormatError past USTAR's limits."""
    if len(name) > MAX_NAME_BYTES or size > MAX_SIZE_BYTES:
        raise FormatError(f"tar member {name[:120]!r} of {size} bytes does not fit a USTAR header")
    digits = b"%011o" % size
    checksum = _CONSTANT_SUM + sum(name) + sum(digits)
    return b"".join((name, _NO_NAME[len(name) :], _HEAD, digits, _MTIME, b"%06o\0 " % checksum, _TAIL))


def end_of_archive(position: int) -> bytes:
    """The zeros that end an archive of `position` bytes: two blocks, then up to a full record of 20."""
    return bytes(2 * BLOCK_BYTES + -(position + 2 * BLOCK_BYTES) % _RECORD_BYTES)


def walk(window: Window, strays: list[int] | None = None) -> Iterator[Member]:
    """Every member in file order, also of archives that follow, with GNU long names and PAX paths and sizes applied.

    strays: gets the byte behind the end at which something is that is no archive.

    Raises FormatError for a wrong checksum, a size that runs past the end, a sparse member or a missing end.
    """
    position, long_name, long_link = 0, "", ""
    pax: dict[str, str] = {}
    while position + BLOCK_BYTES <= window.size:
        block = window.read(position, BLOCK_BYTES)
        if not block.strip(b"\0"):
            following, is_archive = _after_end(window, position)
            if not is_archive:
                if strays is not None and following >= 0:
                    strays.append(following)
                return
            position, long_name, long_link, pax = following, "", "", {}
            continue
        _check_sum(block, window.path, position)
        kind = chr(block[156])
        size = _number(block[124:136], window.path, position)
        if "size" in pax:
            size = _pax_size(pax["size"], window.path, position)
        data = position + BLOCK_BYTES
        if data + size > window.size:
            raise FormatError(
                f"{window.path}: the member at byte {position} has {size} bytes of data, but the file ends at "
                f"{window.size}: truncated?"
            )
        position = data + (size + BLOCK_BYTES - 1) // BLOCK_BYTES * BLOCK_BYTES
        if kind == "L":
            long_name = _meta(window, data, size).rstrip(b"\0").decode("utf-8", "surrogateescape")
        elif kind == "K":
            long_link = _meta(window, data, size).rstrip(b"\0").decode("utf-8", "surrogateescape")
        elif kind == "x":
            pax = _parse_pax(_meta(window, data, size), window.path, data)
        elif kind != "g":
            if kind == "S" or any(name.startswith("GNU.sparse") for name in pax):
                raise FormatError(f"{window.path}: sparse member at byte {data - BLOCK_BYTES}; its data is not flat")
            name = pax.get("path") or long_name or _name(block)
            link = pax.get("linkpath") or long_link or _text(block[157:257])
            yield Member(name, kind if kind != "\0" else "0", data, size, link)
            long_name, long_link, pax = "", "", {}
    if position > window.size:
        raise FormatError(f"{window.path}: ends inside the padding of its last member: truncated?")
    raise FormatError(f"{window.path}: ends at byte {window.size} without the two blocks of zeros: truncated?")


def _after_end(window: Window, position: int) -> tuple[int, bool]:
    """Where something follows the zeros at `position`, and the record of a set, and whether it is a header.

    -1 where nothing does.
    """
    stop = position + _MAX_GAP_BYTES
    while position < stop and len(block := window.read_up_to(position, BLOCK_BYTES)) == BLOCK_BYTES:
        stated = block[148:156].strip(b" \0")
        is_header = stated.isdigit() and not stated.strip(b"01234567") and int(stated, 8) == header_sum(block)
        if is_header and not block.startswith(RECORD_NAME + b"\0"):
            return position, True
        if not is_header and block.strip(b"\0"):
            return position, False
        size = _number(block[124:136], window.path, position) if is_header else 0
        position += BLOCK_BYTES + -(-size // BLOCK_BYTES) * BLOCK_BYTES
    return -1, False


def header_sum(block: bytes) -> int:
    """The checksum of a header: the sum of its bytes, with its own field taken as blanks."""
    return sum(block) - sum(block[148:156]) + 8 * ord(" ")


def _check_sum(block: bytes, path: Path, position: int) -> None:
    stated = _number(block[148:156], path, position)
    total = header_sum(block)
    if stated != total:
        raise FormatError(f"{path}: header checksum at byte {position} is {stated}, expected {total}: not a tar?")


def _number(field: bytes, path: Path, position: int) -> int:
    if field[0] & 0x80:  # GNU base-256: the rest of the field is one big-endian number
        value = int.from_bytes(field, "big") & ((1 << (8 * len(field) - 1)) - 1)
        if field[0] & 0x40 or value >= 1 << 63:
            raise FormatError(f"{path}: impossible number in the header at byte {position}")
        return value
    text = field.strip(b" \0")
    if text.strip(b"01234567"):  # int() would take signs too, and a negative size leads backwards
        raise FormatError(f"{path}: {text!r} is not an octal number in the header at byte {position}")
    return int(text, 8) if text else 0


def _pax_size(text: str, path: Path, position: int) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise FormatError(f"{path}: PAX size {text!r:.40} before byte {position} is not a size")
    return int(text)


def _meta(window: Window, offset: int, size: int) -> bytes:
    if size > _MAX_META_BYTES:
        raise FormatError(f"{window.path}: extended header of {size} bytes at {offset} is too large")
    return window.read(offset, size)


def _parse_pax(data: bytes, path: Path, offset: int) -> dict[str, str]:
    """Records "<length> <keyword>=<value>\\n"."""
    found, position = {}, 0
    while position < len(data) and data[position]:
        blank = data.find(b" ", position, position + 20)
        digits = data[position:blank]
        length = int(digits) if blank > 0 and digits.isdigit() else 0
        record = data[blank + 1 : position + length]
        if length <= len(digits) + 1 or position + length > len(data) or b"=" not in record:
            raise FormatError(f"{path}: malformed PAX record at byte {offset + position}")
        keyword, _, value = record.rstrip(b"\n").partition(b"=")
        found[keyword.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        position += length
    return found


def _name(block: bytes) -> str:
    prefix = _text(block[345:500]) if block[257:263] == b"ustar\0" else ""
    return f"{prefix}/{_text(block[:100])}" if prefix else _text(block[:100])


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")
