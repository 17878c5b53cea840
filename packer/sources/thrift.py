"""Structs in Thrift's compact protocol, as plain values, without a description of them.

    struct    a field after the other, then a zero byte; a struct is {number of the field: value}
    field     a byte: the step from the number of the field before (0: the number follows), and the type
    values    whole numbers as zigzag varints; bytes with their length before them; lists of one type; structs

(The compact protocol is in Thrift's documentation: thrift-compact-protocol.md of apache/thrift.)
"""

from __future__ import annotations

from typing import Any

from cache.errors import FormatError
from packer.formats.example import varint_at

__all__ = ["Struct", "read_struct"]

Struct = dict[int, Any]

_MAX_DEPTH = 16
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)


def read_struct(data: memoryview, position: int = 0, depth: int = 0) -> tuple[Struct, int]:
    """The struct at `position`, and where it ends. Raises FormatError where it is none, or is cut off."""
    if depth > _MAX_DEPTH:
        raise FormatError("structs are nested too deep")
    found: Struct = {}
    field = 0
    while True:
        head, position = _byte(data, position)
        if not head:
            return found, position
        if head >> 4:
            field += head >> 4
        else:
            field, position = _number(data, position)
        kind = head & 15
        if kind in (_TRUE, _FALSE):
            found[field] = kind == _TRUE
        else:
            found[field], position = _value(data, position, kind, depth)


def _value(data: memoryview, position: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (_I16, _I32, _I64):
        return _number(data, position)
    if kind == _STRUCT:
        return read_struct(data, position, depth + 1)
    if kind in (_LIST, _SET):
        return _list(data, position, depth + 1)
    if kind in (_TRUE, _FALSE, _BYTE):
        return _byte(data, position)
    if kind not in (_BINARY, _DOUBLE):
        raise FormatError(f"a value of the type {kind}")
    length, position = varint_at(data, position, len(data)) if kind == _BINARY else (8, position)
    if length > len(data) - position:
        raise FormatError(f"{length:,} bytes at {position}, of {len(data):,}")
    return bytes(data[position : position + length]), position + length


def _list(data: memoryview, position: int, depth: int) -> tuple[list[Any], int]:
    if depth > _MAX_DEPTH:
        raise FormatError("lists are nested too deep")
    head, position = _byte(data, position)
    count = head >> 4
    if count == 15:
        count, position = varint_at(data, position, len(data))
    if count > len(data) - position:
        raise FormatError(f"a list of {count:,} values in {len(data) - position:,} bytes")
    found = []
    for _ in range(count):
        value, position = _value(data, position, head & 15, depth)
        found.append(value)
    return found, position


def _byte(data: memoryview, position: int) -> tuple[int, int]:
    if position >= len(data):
        raise FormatError(f"it is cut off at byte {position}")
    return data[position], position + 1


def _number(data: memoryview, position: int) -> tuple[int, int]:
    value, position = varint_at(data, position, len(data))
    return (value >> 1) ^ -(value & 1), position
