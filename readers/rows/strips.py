"""A strip: a small JPEG that holds some rows of another one, for any decoder.

    head, with the strip's height │ a row that is made │ the file's own bytes, from the first row to the last │ FF D9

Entropy-coded data begin anywhere in a byte, and a DC is the difference to the one before. So the rows follow a row of
MCUs that ends where the first of them begins, within a byte, and leaves the DC from which it counts. It is made of the
Huffman codes that the file has itself and about 200 bytes long; its pixels mean nothing. A strip from the first row of
the file has no such row.

Source: ITU-T T.81, annexes B and F.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from cache.errors import DamagedSampleError
from readers.coefficients.markers import Frame, HuffmanTable, Refused, read_markers
from readers.rows.entries import RowEntry
from readers.sample import Buffer

__all__ = ["Strip", "StripRange", "can_begin", "find_strip", "make_row", "make_strip", "rows_of"]

_END = b"\xff\xd9"
_CONTEXT_ROWS = 8  # one at 1/8 of the size
_LEAST_ROW = 2  # before it there is nothing to gain
_MOST_RUN = 7  # seven times such a code are in a block
_MOST_DIFFERENCES = 256
_KEPT_HEADS = 1024


class Strip(NamedTuple):
    """A JPEG of some rows of an image, or all of it.

    first_row: which row of the image, as stored, the first one of the JPEG is. It is a multiple of 8.
    height: rows of a strip; 0 for a whole image. A strip says nothing of the orientation.
    """

    data: Buffer
    first_row: int = 0
    height: int = 0


class StripRange(NamedTuple):
    """Which bytes of a file, from start to stop, a strip is made of; rows of MCUs are from first to last."""

    start: int
    stop: int
    first: int
    last: int


class _Head(NamedTuple):
    """What a head says. height_at: where the frame states the height. dc: bits of each size, as text, by component.

    same: an MCU without a change, as text. filler: a component, and an AC code with an odd number of bits.
    """

    frame: Frame
    height_at: int
    dc: list[dict[int, str]]
    ends: list[str]
    same: str
    filler: tuple[int, str]


def rows_of(head: bytes, height: int) -> tuple[int, int]:
    """(rows of MCUs, components) of a JPEG of this height. Raises ValueError for a head that has no strips."""
    frame = shape_of(head).frame
    return -(-height // (8 * frame.down)), frame.components


def find_strip(entry: RowEntry, size: tuple[int, int], top: int, bottom: int) -> StripRange:
    """Which part of a file is needed for the rows of pixels from top to bottom, as stored.

    size: (height, width) of the image. Chroma that is stored with fewer rows is interpolated from the rows above and
    below, so these are included, at every scale of a decoder.
    """
    frame = shape_of(entry.head).frame
    rows, pixels = len(entry.dc), 8 * frame.down
    context = _CONTEXT_ROWS if frame.down > 1 else 0
    first = max(0, top - context) // pixels
    last = min(rows, -(-(bottom + context) // pixels))
    first = min(first, rows - 1) if first >= _LEAST_ROW else 0
    return StripRange(entry.behind(first), entry.behind(last), first, last)


def make_strip(entry: RowEntry, part: Buffer, which: StripRange, size: tuple[int, int]) -> Strip:
    """The strip of the bytes from `which.start` to `which.stop` of a file.

    size: (height, width) of the image. Raises DamagedSampleError for bytes that do not have their checksum.
    """
    from crc32c import crc32c

    first, last = which.first, which.last
    found, expected = crc32c(part, int(entry.sums[first])), int(entry.sums[last])
    if found != expected:
        raise DamagedSampleError(
            f"its bytes from {which.start} to {which.stop} have the CRC32C {found:08x}, not {expected:08x}"
        )
    head = shape_of(entry.head)
    pixels = 8 * head.frame.down
    first_row = (first - 1) * pixels if first else 0
    height = min(size[0], last * pixels) - first_row
    data = bytearray(entry.head)
    data[head.height_at : head.height_at + 4] = height.to_bytes(2, "big") + size[1].to_bytes(2, "big")
    made = make_row(entry, first, size[1]) if first else b""
    return Strip(b"".join((data, made, part, _END)), first_row, height)


def can_begin(entry: RowEntry, width: int) -> bool:
    """Whether a strip can begin with any row of a file."""
    try:
        head = shape_of(entry.head)
        sizes = [{int(size).bit_length() for size in np.abs(column, dtype=np.int64)} for column in entry.dc.T]
        if not all(wanted <= codes.keys() for wanted, codes in zip(sizes, head.dc, strict=True)):
            for row in range(_LEAST_ROW, len(entry.dc)):
                make_row(entry, row, width)
    except ValueError:
        return False
    return True


def make_row(entry: RowEntry, row: int, width: int) -> bytes:
    """A row of MCUs that ends where a row of the file begins, with the bits of its byte that belong to that row.

    Raises ValueError where the Huffman codes of the file have none of what that takes.
    """
    head = shape_of(entry.head)
    frame = head.frame
    across = -(-width // (8 * frame.across))
    left = [_differences(int(value), codes) for value, codes in zip(entry.dc[row], head.dc, strict=True)]
    blocks: list[str] = []
    mcus = 0
    while any(left) or not mcus:
        for component, codes in enumerate(head.dc):
            for _ in range(_blocks(frame, component)):
                value = left[component].pop(0) if left[component] else 0
                blocks += (_coded(value, codes), head.ends[component])
        mcus += 1
    if mcus > across:
        raise ValueError("a row is too short for its DC")
    inner = int(entry.bits[row]) & 7
    component, code = head.filler
    missing = (inner - sum(map(len, blocks)) - len(head.same) * (across - mcus)) & 7
    fillers = missing * pow(len(code), -1, 8) & 7
    place = 2 * sum(_blocks(frame, before) for before in range(component)) + 1
    blocks.insert(place, code * fillers)
    bits = "".join(blocks) + head.same * (across - mcus)
    if inner:
        bits += f"{int(entry.partial[row]) & (0xFF >> inner):0{8 - inner}b}"
    return int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")


# --- heads ------------------------------------------------------------------------------------------------------
_heads: OrderedDict[bytes, _Head] = OrderedDict()


def shape_of(head: bytes) -> _Head:
    """What a head says. Raises ValueError where strips cannot be made of such JPEGs."""
    found = _heads.get(head)
    if found is None:
        found = _heads[head] = _parse_head(head)
        if len(_heads) > _KEPT_HEADS:
            _heads.popitem(last=False)
    return found


def _parse_head(head: bytes) -> _Head:
    height_at = _height_at(head)
    sized = bytearray(head)
    sized[height_at : height_at + 4] = b"\0\1\0\1"
    try:
        frame = read_markers(bytes(sized) + b"\0" + _END, lambda at: at + 1)
    except Refused as error:
        raise ValueError(str(error)) from error
    scan = frame.scans[0]
    if frame.is_progressive or len(frame.scans) > 1 or scan.restart or len(scan.components) < frame.components:
        raise ValueError("progressive, with restarts, or of several scans")
    dc = [_codes(table) for table in scan.dc]
    ac = [_codes(table) for table in scan.ac]
    fillers = [
        (component, bits + "1" * (symbol & 15))
        for component, codes in enumerate(ac)
        for symbol, bits in codes.items()
        if symbol & 15 and symbol >> 4 <= _MOST_RUN and (len(bits) + (symbol & 15)) & 1
    ]
    if not fillers or any(0 not in codes for codes in (*dc, *ac)):
        raise ValueError("Huffman tables without a code that a row needs")
    ends = [codes[0] for codes in ac]
    same = "".join((dc[c][0] + ends[c]) * _blocks(frame, c) for c in range(frame.components))
    return _Head(frame, height_at, dc, ends, same, min(fillers, key=lambda one: len(one[1])))


def _height_at(head: bytes) -> int:
    """The byte at which the frame states the height. Raises ValueError."""
    at = 2
    while at + 9 <= len(head):
        code, size = int.from_bytes(head[at : at + 2], "big"), int.from_bytes(head[at + 2 : at + 4], "big")
        if code in (0xFFC0, 0xFFC1):
            return at + 5
        at += 2 + size
    raise ValueError("no frame")


def _blocks(frame: Frame, component: int) -> int:
    """Blocks of a component in an MCU."""
    return frame.across * frame.down if component == 0 else 1


def _codes(table: HuffmanTable | None) -> dict[int, str]:
    """The codes of a table, as text, by symbol."""
    assert table is not None  # as of every sequential scan
    found: dict[int, str] = {}
    code = number = 0
    for bits, count in enumerate(table.counts, 1):
        for symbol in table.symbols[number : number + count]:
            found.setdefault(symbol, f"{code:0{bits}b}")
            code += 1
        number += count
        code <<= 1
    return found


def _differences(value: int, codes: dict[int, str]) -> list[int]:
    """Differences that add up to `value`, of sizes that have a code. Raises ValueError where there are none."""
    found: list[int] = []
    while value:
        size = max((size for size in codes if size and size <= abs(value).bit_length()), default=0)
        if not size or len(found) == _MOST_DIFFERENCES:
            raise ValueError("Huffman tables without a code for a DC")
        step = min(abs(value), (1 << size) - 1)
        found.append(step if value > 0 else -step)
        value -= found[-1]
    return found


def _coded(value: int, codes: dict[int, str]) -> str:
    size = abs(value).bit_length()
    return codes[size] + (f"{value if value > 0 else value + (1 << size) - 1:0{size}b}" if size else "")
