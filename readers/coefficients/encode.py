"""Encode a JPEG as its quantised coefficients, by entropy decoding and packing. Unsupported images are `Refused`."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError
from readers.coefficients.compiled import load_codec, tables_of, unsupported_reason
from readers.coefficients.layout import (
    SPARSE_ZIGZAG,
    TABLES_AT,
    TAIL_BYTES,
    WORKING_ZIGZAG,
    Shape,
    blocks_of,
    pack_header,
)
from readers.coefficients.markers import Frame, HuffmanTable, Refused, read_markers
from readers.headers import parse_header, sniff
from readers.headers.base import Buffer

__all__ = ["LARGEST", "MAX_RATIO", "encode", "encode_strictly", "lend"]

MAX_RATIO = 2  # most bytes relative to the JPEG; beyond it, keeping the JPEG is the better use of memory
LARGEST = 8191  # largest coefficient times its multiplier: four times the range of 8-bit samples, without overflow
_LARGEST_RESULT = 0xFFFFFFFF
_LEAST_BLOCK_BYTES = 4
_KEPT_TABLES = 64
_SCAN_COLUMNS = 17
_TOO_LONG = 9
_REASONS = {
    1: "it is truncated",
    2: "a restart marker out of order",
    3: "fewer restart markers than its interval says",
    4: "bytes are left over before a marker",
    5: "a code that its Huffman table does not have",
    6: "more than 64 coefficients in a block",
    7: "it is truncated",
    8: "a coefficient with more bits than a refinement allows",
    _TOO_LONG: "its coefficients take too many times the JPEG's bytes",
    10: "coefficients beyond what images of 8 bits have",
}


def encode(data: Buffer) -> bytes | None:
    """The coefficients of a JPEG in the form of `layout`; None if the JPEG itself should be kept.

    Decoding them gives the JPEG's pixels, bit for bit.
    """
    kept = lend(data)
    return None if kept is None else bytes(kept)


def lend(data: Buffer) -> memoryview | None:
    """`encode` without a copy, for callers that store the bytes at once."""
    try:
        return memoryview(_encode(data, MAX_RATIO)).toreadonly()
    except Refused:
        return None


def encode_strictly(data: Buffer, max_ratio: float = MAX_RATIO) -> bytes:
    """`encode` that raises Refused, with the reason, instead of returning None.

    max_ratio: most bytes of the result relative to the JPEG. The memory for encoding is bounded by the result.
    """
    return bytes(_encode(data, max_ratio))


def _encode(data: Buffer, max_ratio: float) -> bytearray:
    if sniff(data) != "jpeg":
        raise Refused("it is not a JPEG")
    if reason := unsupported_reason():
        raise Refused(reason)
    codec = load_codec()
    try:
        header = parse_header(data)
    except BadSampleError as error:
        raise Refused(str(error)) from error
    frame = read_markers(data, lambda at: codec.find_marker(data, at))
    shape = Shape(frame.height, frame.width, frame.components, frame.across, frame.down, header.orientation, 0)
    room = min(int(max_ratio * len(data)), _LARGEST_RESULT)
    blocks = sum(math.prod(blocks_of(shape, component)) for component in range(shape.components))
    if blocks * _LEAST_BLOCK_BYTES > room or room < shape.rows_at + TAIL_BYTES:
        raise Refused(_REASONS[_TOO_LONG])
    scans, used = _scans_of(frame)
    limits = np.concatenate([_limits(steps.tobytes()) for steps in frame.steps])
    made: bytearray | int = codec.encode(data, shape[:5], frame.is_progressive, scans, tables_of(used), limits, room)
    if isinstance(made, int):
        raise Refused(_REASONS[made])
    made[TABLES_AT : shape.index_at] = b"".join([_multipliers(steps.tobytes()) for steps in frame.steps])
    made[:TABLES_AT] = pack_header(shape._replace(total_bytes=len(made)), memoryview(made)[TABLES_AT:])
    return made


def _scans_of(frame: Frame) -> tuple[npt.NDArray[np.int64], tuple[tuple[bool, HuffmanTable], ...]]:
    """Scans in the form of the codec's arguments, and the Huffman tables to which they refer by number."""
    used: dict[tuple[bool, HuffmanTable], int] = {}
    rows = []
    for scan in frame.scans:
        row = [scan.start, scan.stop, scan.restart, scan.first, scan.last, scan.high, scan.low, len(scan.components)]
        for component, dc, ac in zip(scan.components, scan.dc, scan.ac, strict=True):
            kinds = (True, dc), (frame.is_progressive, ac)
            row += [
                component,
                *(-1 if table is None else used.setdefault((raw, table), len(used)) for raw, table in kinds),
            ]
        rows.append(row + [0] * (_SCAN_COLUMNS - len(row)))
    return np.array(rows, np.int64), tuple(used)


@lru_cache(maxsize=_KEPT_TABLES)
def _limits(steps: bytes) -> npt.NDArray[np.int16]:
    """The largest value of each coefficient in the order SPARSE, and the least of these, int16 [65]. steps: int64."""
    largest = np.minimum(LARGEST // np.frombuffer(steps, np.int64), LARGEST)[SPARSE_ZIGZAG]
    return np.append(largest, largest.min()).astype(np.int16)


@lru_cache(maxsize=_KEPT_TABLES)
def _multipliers(steps: bytes) -> bytes:
    return np.frombuffer(steps, np.int64)[WORKING_ZIGZAG].astype("<i2").tobytes()
