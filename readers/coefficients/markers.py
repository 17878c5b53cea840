"""The segments of a JPEG that its coefficients depend on: the frame, the scans, and the tables of each scan.

    frame ──► scans: (components, bands, bits, Huffman tables, restart interval, bytes of entropy-coded data)

Source: ITU-T T.81, annexes B, F and G. `Refused`, with the reason, is raised for an image that libjpeg would warn
about, or that the format of `readers.coefficients.layout` cannot represent. A cache keeps these images encoded.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from readers.coefficients.layout import SUBSAMPLINGS
from readers.headers.base import Buffer

__all__ = ["Frame", "HuffmanTable", "Refused", "Scan", "read_markers"]

_BASELINE, _EXTENDED, _PROGRESSIVE = 0xC0, 0xC1, 0xC2
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_END, _SCAN, _QUANTISATION, _HUFFMAN, _RESTART = 0xD9, 0xDA, 0xDB, 0xC4, 0xDD
_JFIF, _ADOBE = 0xE0, 0xEE
_RGB_NAMES = (ord("R"), ord("G"), ord("B"))
_COEFFICIENTS = 64
_LARGEST_STEP = 32_767  # libjpeg's multipliers are signed 16-bit numbers
_MOST_SEGMENTS = 1 << 16
_KEPT_SEGMENTS = 64

_segment = struct.Struct(">HH").unpack_from


class Refused(ValueError):
    """The coefficients of a JPEG cannot be kept; the message says why."""


class HuffmanTable(NamedTuple):
    """The number of codes of each length from 1 to 16 bits (16 bytes), and the symbol of each code in order."""

    counts: bytes
    symbols: bytes


class Scan(NamedTuple):
    """One scan.

    components: their numbers in the frame. dc, ac: the Huffman tables of each, None if the scan needs none.
    first, last: the first and last coefficient in the scan, in zigzag order. low: number of lowest bits that the scan
    leaves out. high: the `low` of the scan before it of these coefficients, 0 if there is none.
    restart: the restart interval in MCUs, 0 for none. start, stop: the byte range of the entropy-coded data.
    """

    components: tuple[int, ...]
    dc: tuple[HuffmanTable | None, ...]
    ac: tuple[HuffmanTable | None, ...]
    first: int
    last: int
    high: int
    low: int
    restart: int
    start: int
    stop: int


@dataclass
class Frame:
    """The frame header of an image, and its scans. steps: for each component 64 multipliers, in zigzag order.

    process: the low byte of the SOF marker. across, down: the sampling factors of luma. names, tables: of each
    component, its identifier and the number of its quantisation table.
    """

    process: int
    height: int
    width: int
    components: int
    across: int
    down: int
    names: tuple[int, ...]
    tables: tuple[int, ...]
    steps: list[npt.NDArray[np.int64]] = field(default_factory=list)
    scans: list[Scan] = field(default_factory=list)

    @property
    def is_progressive(self) -> bool:
        return self.process == _PROGRESSIVE


@dataclass
class _State:
    """The tables and parameters that the segments read so far define."""

    steps: dict[int, npt.NDArray[np.int64]] = field(default_factory=dict)
    huffman: dict[tuple[int, int], HuffmanTable] = field(default_factory=dict)
    restart: int = 0
    is_jfif: bool = False
    adobe: int = -1  # the transform in the Adobe segment, -1 without one


def read_markers(data: Buffer, find_marker: Callable[[int], int]) -> Frame:
    """Read the frame and the scans of a JPEG whose first three bytes are FF D8 FF. Raises Refused.

    find_marker: returns the position of the first marker at or after a byte, restart markers excepted, or the length
        of `data` if there is none.
    """
    state, frame, at = _State(), None, 2
    try:
        for _ in range(_MOST_SEGMENTS):
            code, size = _segment(data, at)
            if code >> 8 != 0xFF or code & 0xFF == 0xFF:
                if code != 0xFFFF:
                    raise Refused(f"no marker at byte {at}")
                at += 1  # any number of FF may come before a marker
                continue
            marker, body, end = code & 0xFF, at + 4, at + 2 + size
            if marker == _END or size < 2 or end > len(data):
                break
            if marker in _FRAMES:
                if frame is not None:
                    raise Refused("two frames")
                frame = _read_frame(marker, bytes(data[body:end]))
            elif marker == _SCAN:
                if frame is None:
                    raise Refused("a scan before the frame")
                at = find_marker(end)
                _read_scan(frame, state, data, body, end, at)
                continue
            else:
                _define(state, frame, marker, bytes(data[body:end]) if marker < 0xE1 or marker == _ADOBE else b"")
            at = end
    except (struct.error, IndexError):
        # The last segment is followed by two bytes only, normally the end marker.
        if bytes(data[at : at + 2]) != b"\xff\xd9":
            raise Refused("it is truncated") from None
    else:
        if marker != _END:
            raise Refused(f"a damaged segment at byte {at}")
    if frame is None:
        raise Refused("no frame")
    _check_colours(frame, state)
    _check_coverage(frame)
    return frame


def _read_frame(process: int, body: bytes) -> Frame:
    if process not in (_BASELINE, _EXTENDED, _PROGRESSIVE):
        raise Refused(f"process SOF{process & 15}")
    bits, height, width, components = struct.unpack_from(">BHHB", body)
    if bits != 8 or components not in (1, 3) or not height or not width or len(body) != 6 + 3 * components:
        raise Refused(f"{bits} bits, {components} components, {height} x {width} pixels")
    names, samplings, tables = (tuple(body[6 + i :: 3]) for i in range(3))
    factors = [divmod(factor, 16) for factor in samplings]
    across, down = factors[0] if components == 3 else (1, 1)
    if components == 3 and ((across, down) not in SUBSAMPLINGS or factors[1:] != [(1, 1), (1, 1)]):
        raise Refused(f"sampling factors {factors}")
    if len(set(names)) < components or not all(1 <= factor <= 4 for pair in factors for factor in pair):
        raise Refused("two components of one name, or sampling factors beyond 4")
    return Frame(process, height, width, components, across, down, names, tables)


def _define(state: _State, frame: Frame | None, marker: int, body: bytes) -> None:
    """Read a segment that defines tables, the restart interval, or the colour space. Raises Refused."""
    if marker == _QUANTISATION:
        if frame is not None and frame.scans:
            raise Refused("tables of quantisation that change between scans")
        state.steps.update(_read_quantisation(body))
    elif marker == _HUFFMAN:
        state.huffman.update(_read_huffman(body))
    elif marker == _RESTART:
        (state.restart,) = struct.unpack(">H", body)
    elif marker == _JFIF and body[:5] == b"JFIF\0" and len(body) >= 14:
        state.is_jfif = True
    elif marker == _ADOBE and body[:5] == b"Adobe" and len(body) >= 12:
        state.adobe = body[11]
    elif marker < _SCAN and marker != 0x01:
        raise Refused(f"a segment FF{marker:02X}")


# Most images have the same table segments as another image.
@lru_cache(maxsize=_KEPT_SEGMENTS)
def _read_quantisation(body: bytes) -> dict[int, npt.NDArray[np.int64]]:
    """The multipliers of each table, int64 [64], by table number. Raises Refused."""
    tables: dict[int, npt.NDArray[np.int64]] = {}
    at = 0
    while at < len(body):
        wide, number = divmod(body[at], 16)
        dtype = np.dtype(">u2") if wide else np.dtype(np.uint8)
        stop = at + 1 + _COEFFICIENTS * dtype.itemsize
        if wide > 1 or number > 3 or stop > len(body):
            raise Refused("a damaged table of quantisation")
        tables[number] = np.frombuffer(body[at + 1 : stop], dtype).astype(np.int64)
        tables[number].flags.writeable = False
        at = stop
    return tables


@lru_cache(maxsize=_KEPT_SEGMENTS)
def _read_huffman(body: bytes) -> dict[tuple[int, int], HuffmanTable]:
    """The tables by (kind, number); the kind is 0 for DC and 1 for AC. Raises Refused."""
    tables: dict[tuple[int, int], HuffmanTable] = {}
    at = 0
    while at < len(body):
        kind, number = divmod(body[at], 16)
        counts = body[at + 1 : at + 17]
        stop = at + 17 + sum(counts)
        if kind > 1 or number > 3 or len(counts) < 16 or stop > len(body):
            raise Refused("a damaged Huffman table")
        tables[kind, number] = HuffmanTable(counts, body[at + 17 : stop])
        at = stop
    return tables


def _read_scan(frame: Frame, state: _State, data: Buffer, body: int, end: int, stop: int) -> None:
    """Add the scan with its header in bytes `body` to `end` and its data in `end` to `stop`. Raises Refused."""
    header = bytes(data[body:end])
    count = header[0]
    if not 1 <= count <= frame.components or len(header) != 4 + 2 * count:
        raise Refused("a damaged scan header")
    components = tuple(
        frame.names.index(entry) if entry in frame.names else -1 for entry in header[1 : 1 + 2 * count : 2]
    )
    if min(components) < 0 or list(components) != sorted(set(components)):
        raise Refused("a scan of unknown components, or in another order than the frame")
    selectors = [divmod(entry, 16) for entry in header[2 : 2 + 2 * count : 2]]
    first, last, bits = header[1 + 2 * count :]
    high, low = divmod(bits, 16)
    is_band = first > 0
    if frame.is_progressive:
        if (last < first if is_band else last > 0) or last > 63 or (is_band and count > 1) or low > 13:
            raise Refused("a damaged progressive scan")
        if high and low != high - 1:
            raise Refused("a scan that refines by more than a bit")
    elif (first, last, bits) != (0, _COEFFICIENTS - 1, 0):
        raise Refused("a sequential scan with only a part of the coefficients")
    needs_dc = not is_band and not (frame.is_progressive and high)
    needs_ac = is_band or not frame.is_progressive
    dc = tuple(_table(state, 0, entry[0]) if needs_dc else None for entry in selectors)
    ac = tuple(_table(state, 1, entry[1]) if needs_ac else None for entry in selectors)
    if stop == len(data):
        raise Refused("it is truncated")
    while stop > end and data[stop - 1] == 0xFF:  # any number of FF may come before a marker
        stop -= 1
    if not frame.scans:
        frame.steps = [_steps(state, number) for number in frame.tables]
    frame.scans.append(Scan(components, dc, ac, first, last, high, low, state.restart, end, stop))


def _table(state: _State, kind: int, number: int) -> HuffmanTable:
    """A Huffman table, checked to be a prefix code. Raises Refused.

    kind: 0 for DC, with sizes up to 15 as symbols; 1 for AC.
    """
    table = state.huffman.get((kind, number))
    if table is None:
        raise Refused("a scan without its Huffman table")
    code = 0
    for bits, count in enumerate(table.counts, 1):
        code += count
        if count and code >= 1 << bits:  # T.81 does not allow a code of only ones
            raise Refused("a Huffman table that is not a code")
        code <<= 1
    if len(table.symbols) > 256 or (kind == 0 and max(table.symbols, default=0) > 15):
        raise Refused("a Huffman table of unknown symbols")
    return table


def _steps(state: _State, number: int) -> npt.NDArray[np.int64]:
    steps = state.steps.get(number)
    if steps is None:
        raise Refused("a component without its table of quantisation")
    least, largest = steps.min(), steps.max()
    if least < 1 or largest > _LARGEST_STEP:
        raise Refused(f"quantisation by {least} to {largest}")
    return steps


def _check_colours(frame: Frame, state: _State) -> None:
    """Raise Refused unless libjpeg interprets the components as grey, or as Y, Cb and Cr."""
    if frame.components == 3:
        is_rgb = state.adobe == 0 or (not state.is_jfif and state.adobe < 0 and frame.names == _RGB_NAMES)
        if is_rgb or state.adobe > 1:
            raise Refused("colours other than YCbCr")


def _check_coverage(frame: Frame) -> None:
    """Raise Refused unless the scans contain every bit of every coefficient once, in an order that libjpeg accepts
    without a warning. libjpeg smooths the blocks of incomplete progressive images, so their pixels would differ."""
    if not frame.is_progressive and len(frame.scans) == 1 and len(frame.scans[0].components) == frame.components:
        return
    known = np.full((frame.components, _COEFFICIENTS), -1)  # the lowest known bit of each coefficient, -1 for none
    for scan in frame.scans:
        for component in scan.components:
            band = known[component, scan.first : scan.last + 1]
            if (scan.first and known[component, 0] < 0) or (band != (scan.high if scan.high else -1)).any():
                raise Refused("scans in an unusual order")
            band[:] = scan.low
    if known.any():
        raise Refused("it is not complete")
