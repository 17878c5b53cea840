"""A JPEG to its quantised coefficients: entropy decoding, once, and packing. What cannot be kept is `Refused`."""

from __future__ import annotations

import math
import threading
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError
from readers.coefficients.compiled import Functions, load_functions, unsupported_reason
from readers.coefficients.layout import (
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

__all__ = ["LARGEST", "MAX_RATIO", "Memory", "encode", "encode_strictly", "lend"]

MAX_RATIO = 2  # times the JPEG, beyond which its own bytes are the better use of memory
LARGEST = 8191  # of a coefficient times its multiplier: four times what 8-bit samples give, and free of overflow
_LARGEST_RESULT = 0xFFFFFFFF
_LEAST_BLOCK_BYTES, _BLOCK_BYTES = 4, 128
_KEPT_TABLES = 64
_KEPT_BYTES = 64 << 20
_TABLE_BYTES = 9216  # of Huffman codes, and some more
_SPARE_BYTES = 2048  # behind entropy-coded data: what may be read of one more block
_PLACES = (2 * SPARSE_OF_ZIGZAG).astype(np.uint8)  # in bytes
_NO_SCAN = np.zeros((1, 6), np.int64)
_REASONS = {
    1: "it is truncated",
    2: "a restart marker out of turn",
    3: "fewer restart markers than its interval says",
    4: "bytes are left over before a marker",
    5: "a code that its Huffman table does not have",
    6: "more than 64 coefficients in a block",
    7: "it is truncated",
    8: "a coefficient of more bits than a refinement has",
    9: "its coefficients take too many times the bytes of the JPEG",
    10: "coefficients beyond what images of 8 bits have",
}
_local = threading.local()


def encode(data: Buffer) -> bytes | None:
    """The coefficients of a JPEG as `layout` says; None where its own bytes are to be kept.

    Decoding them gives the JPEG's pixels to the bit. Raises MissingExtraError without numba.
    """
    kept = lend(data)
    return None if kept is None else bytes(kept)


def lend(data: Buffer) -> memoryview | None:
    """The same in memory of this thread, which its next encoding overwrites: for those who store the bytes at once."""
    try:
        return _encode(data, MAX_RATIO, _memory_of_thread())
    except Refused:
        return None


def encode_strictly(data: Buffer, max_ratio: float = MAX_RATIO, memory: Memory | None = None) -> bytes:
    """The same; raises Refused, with the reason, where `encode` gives None.

    max_ratio: bytes of the result to those of the JPEG. What encoding takes of memory is bounded by the result.
    memory: to work in (default: that of this thread).
    """
    return bytes(_encode(data, max_ratio, memory or _memory_of_thread()))


class Memory:
    """What a thread uses for one image after another; large images get memory of their own."""

    def __init__(self) -> None:
        self._parts: dict[str, npt.NDArray[np.uint8]] = {}

    def take(self, name: str, size: int) -> npt.NDArray[np.uint8]:
        """At least `size` bytes, which hold anything; those of a name are the same ones each time."""
        found = self._parts.get(name)
        if found is None or len(found) < size:
            found = np.empty(size + (size >> 2), np.uint8)
            if len(found) <= _KEPT_BYTES:
                self._parts[name] = found
        return found


def _memory_of_thread() -> Memory:
    if not hasattr(_local, "memory"):
        _local.memory = Memory()
    memory: Memory = _local.memory
    return memory


def _encode(data: Buffer, max_ratio: float, memory: Memory) -> memoryview:
    """The coefficients, in `memory`. Raises Refused."""
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
    room = min(int(max_ratio * len(data)), _LARGEST_RESULT)
    blocks = sum(math.prod(blocks_of(shape, component)) for component in range(shape.components))
    if blocks * _LEAST_BLOCK_BYTES > room or room < shape.rows_at + TAIL_BYTES:
        raise Refused(_REASONS[9])
    return _encoded(functions, frame, shape, address, room, memory)


class _Planes:
    """Where the blocks of each component are: those that fill up the last MCUs included."""

    def __init__(self, frame: Frame, shape: Shape) -> None:
        self.mcus = -(-frame.height // (8 * frame.down)), -(-frame.width // (8 * frame.across))
        luma = (frame.down, frame.across) if frame.components == 3 else (1, 1)
        self.factors = [luma] + [(1, 1)] * (frame.components - 1)
        self.needed = [blocks_of(shape, component) for component in range(frame.components)]
        # A sequential scan of everything is packed line by line.
        self.is_one_scan = not frame.is_progressive and len(frame.scans) == 1
        lines = 1 if self.is_one_scan else self.mcus[0]
        self.strides, self.firsts, self.count = [], [], 0
        for down, across in self.factors:
            self.firsts.append(self.count)
            self.strides.append(self.mcus[1] * across)
            self.count += lines * down * self.mcus[1] * across


class _Prepared(NamedTuple):
    """A scan as compiled functions take it. memory: what they are given the addresses of."""

    data: int
    intervals: npt.NDArray[np.int64]
    counts: tuple[int, int, int]
    plan: npt.NDArray[np.int64]
    memory: list[npt.NDArray[np.uint8]]


def _encoded(functions: Functions, frame: Frame, shape: Shape, address: int, room: int, memory: Memory) -> memoryview:
    """The whole image, in `memory`. Raises Refused."""
    planes = _Planes(frame, shape)
    blocks = memory.take("blocks", planes.count * _BLOCK_BYTES)
    if planes.is_one_scan:
        scan = _prepared(functions, frame.scans[0], address, planes, memory)
    else:
        blocks[: planes.count * _BLOCK_BYTES] = 0
        for one in frame.scans:
            _read_scan(functions, one, _prepared(functions, one, address, planes, memory), blocks, frame.is_progressive)
        scan = _Prepared(0, _NO_SCAN, (planes.mcus[0], 0, 0), _NO_SCAN, [])

    # A row is begun where it goes, before its bytes are counted; its other parts are made apart.
    widest = planes.needed[0][1]
    spare = 12 * widest + 16
    out = memory.take("image", room + spare)
    apart = memory.take("components", (frame.components - 1) * (room + spare))
    sizes = [size * widest + 16 for size in (8, 32, 32, 256)]
    row = memory.take("row", sum(sizes))
    parts = tuple(row.ctypes.data + sum(sizes[:number]) for number in range(4))
    target = out.ctypes.data
    limits = [_limits(steps.tobytes()) for steps in frame.steps]
    begins = [target + shape.rows_at]
    begins += [apart.ctypes.data + number * (room + spare) for number in range(frame.components - 1)]
    where = zip(planes.needed, planes.firsts, planes.strides, planes.factors, limits, begins, strict=True)
    components = np.array(
        [
            (*size, first, stride, down, least.ctypes.data, at, at)
            for size, first, stride, (down, _), least, at in where
        ],
        np.int64,
    )
    addresses = (blocks.ctypes.data, _PLACES.ctypes.data, target + shape.index_at, target)
    image = (shape.rows_at, room, room - shape.rows_at - TAIL_BYTES)
    total = functions.encode_lines(*scan[:4], components, parts, addresses, image)
    _check(-total)
    whole = out.data[:total]
    whole[TABLES_AT : shape.index_at] = b"".join([_multipliers(steps.tobytes()) for steps in frame.steps])
    whole[:TABLES_AT] = pack_header(shape._replace(total_bytes=total), whole[TABLES_AT:])
    return whole.toreadonly()


def _prepared(functions: Functions, scan: Scan, address: int, planes: _Planes, memory: Memory) -> _Prepared:
    """The bytes of a scan without what markers need, and its tables. Raises Refused."""
    is_single = len(scan.components) == 1
    lines, across = planes.needed[scan.components[0]] if is_single else planes.mcus
    restarts = (lines * across - 1) // scan.restart if scan.restart else 0
    if restarts > scan.stop - scan.start:
        raise Refused(_REASONS[3])
    clean = memory.take("scan", scan.stop - scan.start + _SPARE_BYTES)
    intervals = np.zeros((2, restarts + 1), np.int64)
    target = clean.ctypes.data
    _check(functions.unstuff(address + scan.start, address + scan.stop, target, intervals))
    plan, used = [], [clean]
    for component, dc, ac in zip(scan.components, scan.dc, scan.ac, strict=True):
        down, wide = (1, 1) if is_single else planes.factors[component]
        tables = [_NO_TABLE if table is None else _table(table) for table in (dc, ac)]
        plan.append((planes.firsts[component], planes.strides[component], wide, down, *(t.ctypes.data for t in tables)))
        used += tables
    return _Prepared(target, intervals, (lines, across, scan.restart), np.array(plan, np.int64), used)


def _read_scan(
    functions: Functions, scan: Scan, prepared: _Prepared, blocks: npt.NDArray[np.uint8], is_progressive: bool
) -> None:
    """Decode a scan into the blocks. Raises Refused."""
    addresses = (blocks.ctypes.data, _PLACES.ctypes.data)
    if is_progressive:
        band = np.array((scan.first, scan.last, scan.high, scan.low), np.int64)
        _check(functions.read_progressive(*prepared[:4], *addresses, band))
    else:
        _check(functions.read_sequential(*prepared[:4], *addresses))


def _check(result: int) -> None:
    if result in _REASONS:
        raise Refused(_REASONS[result])


_NO_TABLE = np.zeros(_TABLE_BYTES, np.uint8)


@lru_cache(maxsize=_KEPT_TABLES)
def _table(table: HuffmanTable) -> npt.NDArray[np.uint8]:
    """What decodes its codes, see `kernels.entropy`."""
    found = np.empty(_TABLE_BYTES, np.uint8)
    codes = np.frombuffer(table.counts + table.symbols, np.uint8)
    load_functions().build_table(codes, found.ctypes.data)
    return found


@lru_cache(maxsize=_KEPT_TABLES)
def _limits(steps: bytes) -> npt.NDArray[np.int16]:
    """The largest value of each coefficient in the order SPARSE, int16 [64], and the least of these. steps: int64."""
    found = np.minimum(LARGEST // np.frombuffer(steps, np.int64), LARGEST)[SPARSE_ZIGZAG]
    return np.append(found, found.min()).astype(np.int16)


@lru_cache(maxsize=_KEPT_TABLES)
def _multipliers(steps: bytes) -> bytes:
    return np.frombuffer(steps, np.int64)[WORKING_ZIGZAG].astype("<i2").tobytes()
