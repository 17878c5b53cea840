"""Where the rows of MCUs of each JPEG begin: three more files of an index.

    image.rows.npy         uint8  [bytes]  entries, one behind the other; empty for an image that has none
    image.rows.offset.npy  uint64 [n + 1]
    image.rows.head.npy    uint8  [bytes]  heads: what a decoder needs of a file before its entropy-coded data, without
                                           height and width; each is there once

An entry is little-endian; `rows` follows from the height of the image and the sampling in its head:

    uint32               CRC32C of the rest of the entry, of the head, and of the image's own CRC32C (4 bytes)
    uint32, uint16       byte of `image.rows.head` at which the head begins, and how long it is
    uint32 [rows + 1]    the bit of the file at which a row begins (bit 0 is the upper bit of byte 0); last: where the
                         data end
    uint32 [rows + 1]    CRC32C of the file up to the first whole byte behind that bit, its stuffing included
    uint8  [rows + 1]    the byte in which that bit is, 0 where the bit is the first of a byte
    int16  [rows, components]  the DC that the first blocks of a row are counted from

So a part of a file can be compared with its checksum: the CRC32C at its end follows from that at its beginning. An
entry is read when it is needed, and nothing in it is believed before its CRC32C is right and its bits are in order and
inside the file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache.errors import DatasetError
from readers.strings import Strings

__all__ = ["MAX_HEAD_BYTES", "RowColumns", "RowEntry", "pack_entry"]

MAX_HEAD_BYTES = 4096
_START = struct.Struct("<IIH")
_BYTES_OF_ROW = 9


class RowEntry(NamedTuple):
    """What is known of the rows of one JPEG. head: its segments, with a height and width of 0.

    bits, sums, partial: [rows + 1]; dc: [rows, components]; see the module.
    """

    head: bytes
    bits: npt.NDArray[np.uint32]
    sums: npt.NDArray[np.uint32]
    partial: npt.NDArray[np.uint8]
    dc: npt.NDArray[np.int16]

    def behind(self, row: int) -> int:
        """The first whole byte of the file behind the bit at which a row begins: up to there `sums` count."""
        byte, inner = divmod(int(self.bits[row]), 8)
        return byte + (1 + (int(self.partial[row]) == 0xFF) if inner else 0)


def pack_entry(entry: RowEntry, head_at: int, crc: int) -> bytes:
    """The bytes of an entry. head_at: where its head is; crc: the CRC32C of the image."""
    from crc32c import crc32c

    columns = (entry.bits.astype("<u4"), entry.sums.astype("<u4"), entry.partial, entry.dc.astype("<i2"))
    rest = struct.pack("<IH", head_at, len(entry.head)) + b"".join(column.tobytes() for column in columns)
    return crc32c(crc.to_bytes(4, "little"), crc32c(entry.head, crc32c(rest))).to_bytes(4, "little") + rest


class RowColumns:
    """The entries of a split. strings: `image.rows`; heads: `image.rows.head`. place: the index, for messages."""

    def __init__(self, strings: Strings, heads: npt.NDArray[np.uint8], place: str) -> None:
        self._blob, self._offsets, self._heads, self._place = strings.blob, strings.offsets, heads, place

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def has(self, row: int) -> bool:
        """Whether there is an entry for an image."""
        return bool(self._offsets[row] < self._offsets[row + 1])

    def entry(self, row: int, crc: int, length: int, shape: Callable[[bytes], tuple[int, int]]) -> RowEntry:
        """The entry of an image of which `has` is true.

        crc, length: of the image. shape: its rows and components by the head. Raises DatasetError.
        """
        from crc32c import crc32c

        data = self._blob[int(self._offsets[row]) : int(self._offsets[row + 1])].tobytes()
        if len(data) < _START.size:
            raise self._damaged(row, f"{len(data)} bytes, expected {_START.size} or more")
        expected, head_at, head_bytes = _START.unpack_from(data)
        head = self._heads[head_at : head_at + head_bytes].tobytes()
        if len(head) != head_bytes or head_bytes > MAX_HEAD_BYTES:
            raise self._damaged(row, f"a head at bytes {head_at} to {head_at + head_bytes} of {len(self._heads)}")
        found = crc32c(crc.to_bytes(4, "little"), crc32c(head, crc32c(data[4:])))
        if found != expected:
            raise self._damaged(row, f"CRC32C {found:08x}, expected {expected:08x}: it is of another image, or damaged")
        try:
            rows, components = shape(head)
        except ValueError as error:
            raise self._damaged(row, f"a head that is not that of a JPEG with rows: {error}") from error
        size = _START.size + _BYTES_OF_ROW * (rows + 1) + 2 * components * rows
        if len(data) != size:
            raise self._damaged(row, f"{len(data)} bytes, expected {size} for {rows} rows")
        at, columns = _START.size, []
        for dtype, count in (("<u4", rows + 1), ("<u4", rows + 1), ("|u1", rows + 1), ("<i2", rows * components)):
            columns.append(np.frombuffer(data, dtype, count, at))
            at += columns[-1].nbytes
        bits, sums, partial, dc = columns
        entry = RowEntry(head, bits, sums, partial, dc.reshape(rows, components))
        if (bits[1:] <= bits[:-1]).any() or bits[0] & 7 or entry.behind(rows) > length:
            raise self._damaged(row, f"rows at bits {bits[0]} to {bits[-1]} that are not in order in {length} bytes")
        return entry

    def _damaged(self, row: int, what: str) -> DatasetError:
        return DatasetError(
            f"{self._place}: the entry of sample {row} has {what}; make the entries again with  packer index "
            f"--jpeg-rows"
        )
