"""A JPEG to its quantised coefficients: entropy decoding, once, and packing. What cannot be kept is `Refused`."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError
from readers.coefficients.compiled import Functions, load_functions, unsupported_reason
from readers.coefficients.layout import (
    INDEX_BYTES,
    SPARSE_OF_ZIGZAG,
    SPARSE_ZIGZAG,
    TABLES_AT,
    TAIL_BYTES,
    WORKING_ZIGZAG,
    Shape,
    blocks_of,
    pack_header,
)
from readers.coefficients.markers import Frame, HuffmanTable, Refused, Scan, read_markers
from readers.headers import parse_header, sniff
from readers.headers.base import Buffer

__all__ = ["LARGEST", "MAX_RATIO", "built_table", "encode", "encode_strictly"]

MAX_RATIO = 2  # times the JPEG, beyond which its own bytes are the better use of memory
LARGEST = 8191  # of a coefficient times its multiplier: four times what 8-bit samples give, and free of overflow
_LEAST_BLOCK_BYTES = 4
_TABLES = 8
_KEPT_TABLES = 64
_KEPT_BYTES = 64 << 20
_LOOK_ENTRIES = 1 << 11
_SPARE_BYTES = 2048  # behind entropy-coded data: what may be read of one more block
_REASONS = {
    1: "it is truncated",
    2: "a restart marker out of turn",
    3: "fewer restart markers than its interval says",
    4: "bytes are left over before a marker",
    5: "a code that its Huffman table does not have",
    6: "more than 64 coefficients in a block",
    7: "it is truncated",
    8: "a coefficient of more bits than a refinement has",
    -1: "its coefficients take too many times the bytes of the JPEG",
    -2: "coefficients beyond what images of 8 bits have",
}


def encode(data: Buffer) -> bytes | None:
    """The coefficients of a JPEG as `layout` says; None where its own bytes are to be kept.

    Decoding them gives the JPEG's pixels to the bit. Raises MissingExtraError without numba.
    """
    try:
        return encode_strictly(data)
    except Refused:
        return None


def encode_strictly(data: Buffer, max_ratio: float = MAX_RATIO) -> bytes:
    """The same; raises Refused, with the reason, where `encode` gives None.

    max_ratio: bytes of the result to those of the JPEG. What encoding takes of memory is bounded by the result.
    """
    if sniff(data) != "jpeg":
        raise Refused("it is not a JPEG")
    reason = unsupported_reason()
    if reason:
        raise Refused(reason)
    functions = load_functions()
    try:
        header = parse_header(data)
    except BadSampleError as error:
        raise Refused(str(error)) from error
    source = np.frombuffer(data, np.uint8)
    address = source.ctypes.data
    frame = read_markers(data, lambda at: functions.find_marker(address + at, address + len(data)) - address)
    shape = Shape(frame.height, frame.width, frame.components, frame.across, frame.down, header.orientation, 0)
    blocks = sum(math.prod(blocks_of(shape, component)) for component in range(shape.components))
    room = int(max_ratio * len(data))
    if blocks * _LEAST_BLOCK_BYTES > room:
        raise Refused(_REASONS[-1])
    if not hasattr(_local, "memory"):
        _local.memory = _Memory()
    memory: _Memory = _local.memory
    planes = _Planes(frame, shape, memory)
    for scan in frame.scans:
        _read_scan(functions, frame, scan, address, planes, memory)
    return _pack(functions, frame, shape, planes, memory.bytes_of(room))


class _Memory:
    """What a thread uses for one image after another; large images get memory of their own."""

    def __init__(self) -> None:
        self.bytes = np.empty(0, np.uint8)
        self.blocks = np.empty((0, 64), np.int16)
        self.tables: dict[HuffmanTable, tuple[npt.NDArray[Any], ...]] = {}
        self.look = np.zeros((_TABLES, _LOOK_ENTRIES), np.int32)
        self.largest = np.zeros((_TABLES, 18), np.int64)
        self.offsets = np.zeros((_TABLES, 18), np.int64)
        self.symbols = np.zeros((_TABLES, 256), np.uint8)

    def bytes_of(self, size: int) -> npt.NDArray[np.uint8]:
        found = self.bytes
        if len(found) < size:
            found = np.empty(size + (size >> 2), np.uint8)
            if found.nbytes <= _KEPT_BYTES:
                self.bytes = found
        return found[:size]

    def blocks_of(self, count: int) -> npt.NDArray[np.int16]:
        found = self.blocks
        if len(found) < count:
            found = np.empty((count + (count >> 2), 64), np.int16)
            if found.nbytes <= _KEPT_BYTES:
                self.blocks = found
        return found[:count]

    def load_tables(self, functions: Functions, tables: list[HuffmanTable]) -> None:
        """Put the tables of a scan into the rows of `look` and the others."""
        for row, table in enumerate(tables):
            built = self.tables.get(table)
            if built is None:
                built = built_table(functions, table)
                if len(self.tables) >= _KEPT_TABLES:
                    self.tables.clear()
                self.tables[table] = built
            self.look[row], self.largest[row], self.offsets[row], self.symbols[row] = built


_local = threading.local()


def built_table(functions: Functions, table: HuffmanTable) -> tuple[npt.NDArray[Any], ...]:
    symbols = np.zeros(256, np.uint8)
    symbols[: len(table.symbols)] = np.frombuffer(table.symbols, np.uint8)
    look = np.empty(_LOOK_ENTRIES, np.int32)
    largest, offsets = np.zeros(18, np.int64), np.zeros(18, np.int64)
    functions.build_table(np.frombuffer(table.counts, np.uint8).copy(), symbols, look, largest, offsets)
    return look, largest, offsets, symbols


class _Planes:
    """Where the blocks of each component are: those that fill up the last MCUs included."""

    def __init__(self, frame: Frame, shape: Shape, memory: _Memory) -> None:
        self.mcus = -(-frame.height // (8 * frame.down)), -(-frame.width // (8 * frame.across))
        luma = (frame.down, frame.across) if frame.components == 3 else (1, 1)
        self.factors = [luma] + [(1, 1)] * (frame.components - 1)
        self.needed = [blocks_of(shape, component) for component in range(frame.components)]
        self.strides, self.firsts, count = [], [], 0
        for down, across in self.factors:
            self.firsts.append(count)
            self.strides.append(self.mcus[1] * across)
            count += self.mcus[0] * down * self.mcus[1] * across
        self.blocks = memory.blocks_of(count)
        if frame.is_progressive:
            self.blocks[:] = 0


def _read_scan(functions: Functions, frame: Frame, scan: Scan, address: int, planes: _Planes, memory: _Memory) -> None:
    """Decode a scan into the blocks. Raises Refused."""
    is_single = len(scan.components) == 1
    lines, across = planes.needed[scan.components[0]] if is_single else planes.mcus
    restarts = (lines * across - 1) // scan.restart if scan.restart else 0
    if restarts > scan.stop - scan.start:
        raise Refused(_REASONS[3])
    clean = memory.bytes_of(scan.stop - scan.start + _SPARE_BYTES)
    intervals = np.zeros((2, restarts + 1), np.int64)
    target = clean.ctypes.data
    _check(functions.unstuff(address + scan.start, address + scan.stop, target, intervals))
    tables = list(dict.fromkeys(table for table in (*scan.dc, *scan.ac) if table is not None))
    memory.load_tables(functions, tables)
    plan = np.zeros((len(scan.components), 6), np.int64)
    for row, component in enumerate(scan.components):
        down, wide = (1, 1) if is_single else planes.factors[component]
        dc, ac = scan.dc[row], scan.ac[row]
        numbers = (tables.index(dc) if dc else 0, tables.index(ac) if ac else 0)
        plan[row] = (planes.firsts[component], planes.strides[component], wide, down, *numbers)
    built = (memory.look, memory.largest, memory.offsets, memory.symbols)
    counts = (lines * across, across, scan.restart)
    arguments = (target, intervals, counts, plan, built, planes.blocks, SPARSE_OF_ZIGZAG)
    if frame.is_progressive:
        band = np.array((scan.first, scan.last, scan.high, scan.low), np.int64)
        _check(functions.read_progressive(*arguments, band))
    else:
        _check(functions.read_sequential(*arguments))


def _check(result: int) -> None:
    if result in _REASONS:
        raise Refused(_REASONS[result])


def _pack(functions: Functions, frame: Frame, shape: Shape, planes: _Planes, out: npt.NDArray[np.uint8]) -> bytes:
    """The whole image, made in `out`. Raises Refused."""
    room = len(out)
    widest = planes.needed[0][1]
    sizes = [size * widest + 32 for size in (8, 8, 32, 32, 256)]
    memory = np.empty(sum(sizes), np.uint8)
    parts = memory.ctypes.data + np.cumsum([0, *sizes[:-1]])
    if room < shape.rows_at + TAIL_BYTES:
        raise Refused(_REASONS[-1])
    ends = [np.array([shape.rows_at], np.int64)]
    at = shape.rows_at
    for component, (rows, width) in enumerate(planes.needed):
        steps = frame.steps[component]
        limits = np.minimum(LARGEST // steps, LARGEST)[SPARSE_ZIGZAG].astype(np.int16)
        first = planes.blocks[planes.firsts[component] :].ctypes.data
        behind = np.zeros(rows, np.int64)
        counts = (rows, width, planes.strides[component])
        place = (out.ctypes.data + at, room - TAIL_BYTES - at)
        written = functions.pack_rows(first, counts, place, limits.ctypes.data, parts, behind)
        _check(min(written, 0))
        ends.append(at + behind)
        at += written
    tables = np.concatenate([steps[WORKING_ZIGZAG] for steps in frame.steps]).astype("<i2")
    index = np.concatenate(ends).astype("<u4")
    out[TABLES_AT : shape.index_at] = tables.view(np.uint8)
    out[shape.index_at : shape.index_at + INDEX_BYTES * len(index)] = index.view(np.uint8)
    total = at + TAIL_BYTES
    out[at:total] = 0
    whole = memoryview(out.data)[:total]
    whole[:TABLES_AT] = pack_header(shape._replace(total_bytes=total), whole[TABLES_AT:])
    return whole.tobytes()
