"""A box of a baseline JPEG by compiled functions, and where its rows begin.

Of a box, samples are made of the blocks that it needs, and of no others:
libjpeg makes samples of every block from the first row to the last one that is wanted. Here the codes of the blocks
around the box are passed over, several at a time, and nothing behind the box is read. The pixels are libjpeg-turbo's to
the bit. `None` leaves a JPEG to libjpeg: one that is progressive, has restarts, several scans or colours other than
grey and YCbCr, or of which libjpeg would report something.

What the segments before the scan say is worked out once for all JPEGs that say the same.
"""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from readers.coefficients.compiled import load_functions
from readers.coefficients.decode import address_of, memory_bytes, stored_box, working_memory
from readers.coefficients.encode import LARGEST
from readers.coefficients.layout import WORKING_OF_ZIGZAG, WORKING_ZIGZAG, Shape
from readers.coefficients.markers import HuffmanTable, Refused, read_markers
from readers.decode.region import Region, Scratch, upright
from readers.headers import ImageHeader
from readers.headers.base import Buffer

__all__ = ["decode_strips"]

_SCAN, _ADOBE, _COLOURS = 0xFFDA, 0xFFEE, 0xFFE2
_FRAMES = (0xFFC0, 0xFFC1)
# Quantisation, Huffman codes, restart interval, JFIF, Adobe: they decide what the coefficients mean.
_TELLING = frozenset((0xFFDB, 0xFFC4, 0xFFDD, 0xFFE0, _ADOBE))
_SILENT = frozenset((*range(0xFFE1, 0xFFF0), 0xFFFE)) - {_ADOBE, _COLOURS}
_MOST_HEAD_BYTES = 2048
_LEAST_SIDE = 64
_KEPT_CODINGS, _KEPT_TABLES = 1024, 64
_SPARE_BYTES = 2048
_CODES_BYTES = (4 << 11) + 512 + (2 << 12)  # as in `kernels.strips`
_PLACES = np.concatenate([WORKING_OF_ZIGZAG, np.full(192, 64)])
_START, _END = b"\xff\xd8", b"\xff\xd9"
_segment = struct.Struct(">HH").unpack_from


class _Coding(NamedTuple):
    """What the segments of a JPEG say of its scan.

    scan: see `kernels.strips`, with addresses in `multipliers` and `codes`.
    """

    components: int
    across: int
    down: int
    scan: npt.NDArray[np.int64]
    multipliers: npt.NDArray[np.int16]
    codes: npt.NDArray[np.uint8]


def decode_strips(
    data: Buffer,
    header: ImageHeader,
    region: Region,
    is_clean: Callable[[Any], bool],
    scratch: Scratch | None = None,
) -> npt.NDArray[np.uint8] | None:
    """RGB pixels of a box of a JPEG, upright, uint8 [height, width, 3]; None where libjpeg is to decode it.

    header: of `data`. is_clean: whether libjpeg reports nothing for the segments of a JPEG. The result may be a view of
    `scratch`. Raises ValueError for a region that is not inside the image, MissingExtraError, UnsupportedCpuError.
    """
    if min(header.height, header.width) < _LEAST_SIDE:
        return None  # nothing to gain, and TurboJPEG takes other scales for a few pixels
    coding, _, start = _find_coding(data, is_clean)
    if coding is None:
        return None
    shape = Shape(
        header.height, header.width, coding.components, coding.across, coding.down, header.orientation, len(data)
    )
    reduce, box = stored_box(shape, region)
    functions = load_functions()
    scratch = scratch or Scratch()
    source = address_of(np.frombuffer(data, np.uint8))
    clean = address_of(np.frombuffer(scratch.encoded(len(data) - start + _SPARE_BYTES), np.uint8))
    count = functions.copy_clean(source + start, source + len(data), clean)
    if count < 0:
        return None
    size = (box[2], box[3], 3)
    pixels = np.frombuffer(scratch.pixels(math.prod(size)), np.uint8, math.prod(size)).reshape(size)
    scale = 8 // reduce, not region.coarse and reduce < 8
    place = address_of(pixels), 3 * box[3]
    memory = working_memory.address(memory_bytes(box[3]))
    whole = (clean, count, 0), np.zeros(3, np.int64), 0
    status = functions.decode_strips(*whole, coding.scan, shape[:5], scale, box, place, memory, _PLACES)
    if status:
        return None
    turned: npt.NDArray[np.uint8] = upright(pixels, header.orientation)
    return turned


# --- what the segments say --------------------------------------------------------------------------------------
_codings: OrderedDict[bytes, _Coding | None] = OrderedDict()
_tables: OrderedDict[tuple[tuple[bool, HuffmanTable], ...], npt.NDArray[np.uint8]] = OrderedDict()


def _find_coding(data: Buffer, is_clean: Callable[[Any], bool]) -> tuple[_Coding | None, bytes, int]:
    """The coding of a JPEG, or None; its head; and the byte at which its entropy-coded data begin."""
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
                return None, b"", 0
            at += 2 + size
            code, size = _segment(data, at)
    except struct.error:
        return None, b"", 0
    start = at + 2 + size
    telling.append(bytes(data[at:start]))
    head = b"".join(telling)
    if has_colours and not is_clean(data):  # TurboJPEG looks at colour profiles, too
        return None, head, start
    try:
        return _codings[head], head, start
    except KeyError:
        coding = _make_coding(bytes(data[:start])) if is_clean(data) else None
    if len(head) <= _MOST_HEAD_BYTES:
        _codings[head] = coding
        if len(_codings) > _KEPT_CODINGS:
            _codings.popitem(last=False)
    return coding, head, start


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
    multipliers = np.ascontiguousarray(np.array(pairs)[..., WORKING_ZIGZAG], np.int16)
    kinds = [(False, table) for table in scan.dc if table] + [(True, table) for table in scan.ac if table]
    used = tuple(dict.fromkeys(kinds))
    codes = _load(used)
    rows = []
    for component in range(frame.components):
        wide, high = (frame.across, frame.down) if component == 0 and frame.components > 1 else (1, 1)
        of_codes = [codes[used.index(kinds[component + n])].ctypes.data for n in (0, frame.components)]
        of_steps = [one.ctypes.data for one in multipliers[component]]
        rows.append((wide, high, *of_codes, *of_steps))
    return _Coding(frame.components, frame.across, frame.down, np.array(rows, np.int64), multipliers, codes)


def _load(used: tuple[tuple[bool, HuffmanTable], ...]) -> npt.NDArray[np.uint8]:
    """Tables of codes, one behind the other. used: whether they are for AC, and what they are made of."""
    found = _tables.get(used)
    if found is None:
        functions = load_functions()
        found = np.zeros((len(used), _CODES_BYTES), np.uint8)
        for row, (is_ac, table) in enumerate(used):
            symbols = np.zeros(256, np.uint8)
            symbols[: len(table.symbols)] = np.frombuffer(table.symbols, np.uint8)
            functions.build_codes(np.frombuffer(table.counts, np.uint8).copy(), symbols, not is_ac, found[row])
        _tables[used] = found
        if len(_tables) > _KEPT_TABLES:
            _tables.popitem(last=False)
    return found
