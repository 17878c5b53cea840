"""What the segments of a baseline JPEG say of its scan, as the compiled codec takes it, so that boxes decode from it.

Of a box, samples are made of the blocks that it needs, and of no others: libjpeg makes samples of every block from the
first row to the last one that is wanted. Here the codes of the blocks around the box are passed over, some at a time,
and nothing behind the box is read. The pixels are libjpeg-turbo's to the bit. JPEGs are left to libjpeg that are
progressive, have restarts, more than one scan or colours other than grey and YCbCr, or of which it would report
something.

What the segments before the scan say is worked out once for all JPEGs that say the same.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from readers.coefficients.compiled import tables_of
from readers.coefficients.encode import LARGEST
from readers.coefficients.layout import WORKING_ZIGZAG, Shape
from readers.coefficients.markers import Refused, read_markers
from readers.decode.region import has_clean_header
from readers.headers import ImageHeader
from readers.headers.base import Buffer

__all__ = ["Strips", "strips_of"]

_SCAN, _ADOBE, _COLOURS = 0xFFDA, 0xFFEE, 0xFFE2
_FRAMES = (0xFFC0, 0xFFC1)
# Quantisation, Huffman codes, restart interval, JFIF, Adobe: they decide what the coefficients mean.
_TELLING = frozenset((0xFFDB, 0xFFC4, 0xFFDD, 0xFFE0, _ADOBE))
_SILENT = frozenset((*range(0xFFE1, 0xFFF0), 0xFFFE)) - {_ADOBE, _COLOURS}
_MOST_HEAD_BYTES = 2048
_LEAST_SIDE = 64
_KEPT_CODINGS = 256
_START, _END = b"\xff\xd8", b"\xff\xd9"
_segment = struct.Struct(">HH").unpack_from


class _Coding(NamedTuple):
    """sampling: components, and how often chroma is subsampled across and down. tables: see `_codec/module.c`."""

    sampling: tuple[int, int, int]
    tables: tuple[bytes, bytes, bytes]


class Strips(NamedTuple):
    """A JPEG that the codec decodes: where its entropy-coded bytes begin, and what they mean."""

    start: int
    tables: tuple[bytes, bytes, bytes]
    shape: Shape


_codings: OrderedDict[bytes, _Coding | None] = OrderedDict()


def strips_of(data: Buffer, header: ImageHeader) -> Strips | None:
    """How to decode boxes of a JPEG with this header; None where libjpeg is to decode it."""
    if min(header.height, header.width) < _LEAST_SIDE:
        return None  # nothing to gain, and TurboJPEG takes other scales for a few pixels
    coding, start = _find_coding(data)
    if coding is None:
        return None
    shape = Shape(header.height, header.width, *coding.sampling, header.orientation, len(data))
    return Strips(start, coding.tables, shape)


def _find_coding(data: Buffer) -> tuple[_Coding | None, int]:
    """The coding of a JPEG, or None; and the byte at which its entropy-coded data begin."""
    telling, at, has_colours = [_START], 2, False
    try:
        code, size = _segment(data, at)
        while code != _SCAN:
            if code in _TELLING:
                telling.append(bytes(data[at : at + 2 + size]))
            elif code in _FRAMES:
                telling.append(bytes(data[at : at + 5]) + bytes(4) + bytes(data[at + 9 : at + 2 + size]))
            elif code == _COLOURS:
                has_colours = True
            elif code not in _SILENT:
                return None, 0
            at += 2 + size
            code, size = _segment(data, at)
    except struct.error:
        return None, 0
    start = at + 2 + size
    telling.append(bytes(data[at:start]))
    head = b"".join(telling)
    if start > len(data) or (has_colours and not has_clean_header(data)):  # TurboJPEG looks at colour profiles, too
        return None, start
    if head not in _codings:
        coding = _make_coding(bytes(data[:start])) if has_clean_header(data) else None
        if len(head) > _MOST_HEAD_BYTES:
            return coding, start
        _codings[head] = coding
        if len(_codings) > _KEPT_CODINGS:
            _codings.popitem(last=False)
        return coding, start
    return _codings[head], start


def _make_coding(head: bytes) -> _Coding | None:
    """The coding by the segments up to the scan."""
    try:
        frame = read_markers(head + b"\0" + _END, lambda at: at + 1)
    except Refused:
        return None
    scan = frame.scans[0]
    if frame.is_progressive or len(frame.scans) > 1 or scan.restart or len(scan.components) < frame.components:
        return None
    pairs = [(steps, np.minimum(LARGEST // steps, LARGEST)) for steps in frame.steps]
    values = np.array(pairs)[..., WORKING_ZIGZAG].astype(np.int16).tobytes()
    kinds = [(True, table) for table in scan.dc if table] + [(False, table) for table in scan.ac if table]
    used = tuple(dict.fromkeys(kinds))
    numbers = bytes(used.index(kind) for kind in kinds)
    return _Coding((frame.components, frame.across, frame.down), (numbers, values, tables_of(used)))
