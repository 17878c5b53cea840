"""The values in a sample of an MDS shard: what each encoding holds, and its bytes as fields.

    sample      uint32 sizes of the columns of no fixed size, then the values of all columns
    encodings   bytes; str (UTF-8); int (int64); uint8 … float64; str_int, str_float, str_decimal (text); json
                jpeg, png (encoded images); pil (uint32 width, height and length of the mode; the mode; pixels)
                ndarray:dtype:shape, where what is not given is in the value: a byte for the dtype, a byte for the
                number of dimensions and the width of each, the dimensions; then the values
                pkl (refused)

Numbers are little-endian. (streaming/base/format/mds/encodings.py of mosaicml/streaming documents them.)
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError
from packer.formats.base import png_of
from readers.sample import Buffer

__all__ = ["MdsColumn", "array_of", "content_of", "image_of", "ranges_of", "value_of"]

_SCALARS = {
    "int": "<i8",
    **{f"{kind}int{bits}": f"<{kind or 'i'}{bits // 8}" for kind in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"<f{bits // 8}" for bits in (16, 32, 64)},
}
_DTYPES = {
    8: "u1",
    9: "i1",
    16: "<u2",
    17: "<i2",
    18: "<f2",
    32: "<u4",
    33: "<i4",
    34: "<f4",
    64: "<u8",
    65: "<i8",
    66: "<f8",
}
_NAMED_DTYPES = {name: dtype for name, dtype in _SCALARS.items() if name != "int"}
_CHANNELS_OF_MODE = {"L": 0, "RGB": 3, "RGBA": 4}
_PIL = struct.Struct("<III")
_MAX_MODE_BYTES = 16
_MAX_TEXT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class MdsColumn:
    """A column. size: the bytes of each value, 0 where they differ."""

    name: str
    encoding: str
    size: int

    @property
    def kind(self) -> str:
        """The encoding without its options."""
        return self.encoding.partition(":")[0]


def content_of(column: MdsColumn) -> str | None:
    """What a column holds, as in `packer.sources.roles`; None for an encoding that is not known."""
    kind = column.kind
    if kind in ("jpeg", "png", "pil"):
        return "image"
    if kind.startswith("float"):
        return "number"
    if kind in ("str_int", "int") or (kind in _SCALARS and not kind.startswith("float")):
        return "integer"
    contents = {"str": "text", "ndarray": "array", "bytes": "bytes", "json": "value"}
    return contents.get(kind, "value" if kind in ("str_float", "str_decimal") or kind in _SCALARS else None)


def ranges_of(columns: Sequence[MdsColumn], sample: memoryview) -> list[tuple[int, int]]:
    """(start, stop) of each value in a sample. Raises BadSampleError where they do not fill it."""
    count = sum(not column.size for column in columns)
    if len(sample) < 4 * count:
        raise BadSampleError(f"has {len(sample)} bytes, expected the sizes of {count} columns")
    sizes = iter(struct.unpack_from(f"<{count}I", sample))
    position, found = 4 * count, []
    for column in columns:
        size = column.size or next(sizes)
        found.append((position, position + size))
        position += size
    if position != len(sample):
        raise BadSampleError(f"has {len(sample):,} bytes, but its columns take {position:,}: damaged")
    return found


def image_of(column: MdsColumn, data: memoryview) -> Buffer:
    """An encoded image; pixels as PNG. Raises BadSampleError."""
    if column.kind == "ndarray":
        array = array_of(column, data)
        if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
            raise BadSampleError(f"is {array.dtype} {list(array.shape)}, expected uint8 [h, w] or [h, w, 1, 3 or 4]")
        return png_of(array)
    if column.kind != "pil":
        return data
    if len(data) < _PIL.size:
        raise BadSampleError(f"has {len(data)} bytes, expected a size and a mode")
    width, height, mode_bytes = _PIL.unpack_from(data)
    mode = bytes(data[_PIL.size : _PIL.size + min(mode_bytes, _MAX_MODE_BYTES)]).decode("latin-1")
    channels = _CHANNELS_OF_MODE.get(mode)
    if channels is None:
        raise BadSampleError(f"has pixels of the mode {mode!r}, expected {', '.join(_CHANNELS_OF_MODE)}")
    pixels = np.frombuffer(data[_PIL.size + mode_bytes :], np.uint8)
    if pixels.size != width * height * max(1, channels) or not pixels.size:
        raise BadSampleError(f"has {pixels.size:,} bytes of pixels, expected {width} x {height} of {mode}")
    return png_of(pixels.reshape(height, width, channels) if channels else pixels.reshape(height, width))


def array_of(column: MdsColumn, data: memoryview) -> npt.NDArray[Any]:
    """The array in a value. Raises BadSampleError."""
    _, _, options = column.encoding.partition(":")
    name, _, sides = options.partition(":")
    try:
        if name:
            dtype = np.dtype(_NAMED_DTYPES[name])
        else:
            dtype, data = np.dtype(_DTYPES[data[0]]), data[1:]
        if sides:
            shape = tuple(int(side) for side in sides.split(","))
        else:
            dimensions, width = data[0] >> 2, 1 << (data[0] & 3)
            end = 1 + dimensions * width
            shape = tuple(np.frombuffer(data[1:end], f"<u{width}", dimensions).tolist())
            data = data[end:]
        if math.prod(shape) * dtype.itemsize != len(data):
            raise BadSampleError(f"has {len(data):,} bytes of values, expected {list(shape)} of {dtype}")
        return np.frombuffer(data, dtype).reshape(shape)
    except (KeyError, IndexError, ValueError) as error:
        raise BadSampleError(f"is not an array: {error!r:.80}") from error


def value_of(column: MdsColumn, data: memoryview) -> Any:
    """A number, a text, or what JSON holds. Raises BadSampleError."""
    kind = column.kind
    try:
        if kind in _SCALARS:
            return np.frombuffer(data, _SCALARS[kind]).item()
        if len(data) > _MAX_TEXT_BYTES:
            raise BadSampleError(f"has {len(data):,} bytes of text, expected at most {_MAX_TEXT_BYTES:,}")
        text = bytes(data).decode("utf-8")
        if kind == "json":
            return json.loads(text)
        if kind == "str_int":
            return int(text)
        return float(text) if kind == "str_float" else text
    except (ValueError, RecursionError) as error:
        raise BadSampleError(f"is not of the encoding {kind!r}: {error}") from error
