"""TFRecord in bytes: the checksums of records, and the `tf.train.Example` in one, built and walked without copying.

    Example  { Features features = 1 }
    Features { map<string, Feature> feature = 1 }        a map entry is { string key = 1; Feature value = 2 }
    Feature  { oneof { BytesList bytes_list = 1; FloatList float_list = 2; Int64List int64_list = 3 } }
    *List    { repeated value = 1 }                      int64 values packed or not

(tensorflow/core/example/{example,feature}.proto; the wire format is that of protobuf's encoding guide.) A length-
delimited value is one byte range of the record, so a sample in a TFRecord has a flat address.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

from crc32c import crc32c

from cache.errors import FormatError

__all__ = [
    "RECORD_HEAD_BYTES",
    "Feature",
    "bytes_feature",
    "features_header",
    "int64_feature",
    "masked_crc",
    "open_bytes_feature",
    "starts_record",
    "varint",
    "varint_at",
    "walk",
]

RECORD_HEAD_BYTES = 12
_MAX_FEATURES = 1 << 16
_MAX_VALUES = 1 << 20


def masked_crc(crc: int) -> int:
    """A CRC32C as TFRecord stores it: rotated and shifted, so that a CRC of data with CRCs in it stays meaningful."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def starts_record(head: bytes) -> bool:
    """Whether a record of TFRecord begins here: its length may look like any magic number, but its checksum follows."""
    stated = int.from_bytes(head[8:RECORD_HEAD_BYTES], "little")
    return len(head) >= RECORD_HEAD_BYTES and stated == masked_crc(crc32c(head[:8]))


def varint(value: int) -> bytes:
    """Base-128 encoding of a value from 0 to 2^64 - 1."""
    if value < 0x80:
        return bytes((value,))
    if value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _field(tag: int, data: bytes) -> bytes:
    return bytes((tag << 3 | 2,)) + varint(len(data)) + data


def bytes_feature(name: str, value: bytes) -> bytes:
    """A map entry with one bytes value."""
    return _opening(name, len(value)) + value


@lru_cache(4096)  # the sides of images recur
def int64_feature(name: str, value: int) -> bytes:
    """A map entry with one int64 value, packed."""
    number = varint(value & (1 << 64) - 1)
    return _field(1, _key(name) + _field(2, _field(3, _field(1, number))))


def open_bytes_feature(name: str, length: int) -> bytes:
    """A map entry with one bytes value of `length`, up to but without the value, which must follow."""
    value = b"\x0a" + varint(length)
    bytes_list = b"\x0a" + varint(len(value) + length)
    feature_length = len(bytes_list) + len(value) + length
    feature = b"\x12" + varint(feature_length)
    key = _key(name)
    return b"\x0a" + varint(len(key) + len(feature) + feature_length) + key + feature + bytes_list + value


_opening = lru_cache(1024)(open_bytes_feature)  # for short values, whose lengths recur


@cache
def _key(name: str) -> bytes:
    return _field(1, name.encode())


def features_header(length: int) -> bytes:
    """The start of an Example whose map entries take `length` bytes."""
    return b"\x0a" + varint(length)


class Feature(NamedTuple):
    """One feature: kind "bytes", "float", "int64" or "" (empty); byte ranges of its bytes values in the record,
    or its int64 values."""

    kind: str
    ranges: list[tuple[int, int]]
    values: list[int]


def walk(data: memoryview) -> dict[str, Feature]:
    """Every feature of a serialised Example. The last of a repeated name wins, as in protobuf maps.

    Raises FormatError where the bytes are not an Example.
    """
    found: dict[str, Feature] = {}
    for number, wire, start, stop in _fields(data, 0, len(data)):
        if number != 1 or wire != 2:
            continue
        for number2, wire2, start2, stop2 in _fields(data, start, stop):
            if number2 == 1 and wire2 == 2:
                name, feature = _entry(data, start2, stop2)
                found[name] = feature
                if len(found) > _MAX_FEATURES:
                    raise FormatError(f"more than {_MAX_FEATURES} features in one record")
    return found


def _entry(data: memoryview, start: int, stop: int) -> tuple[str, Feature]:
    name, feature = "", Feature("", [], [])
    for number, wire, a, b in _fields(data, start, stop):
        if number == 1 and wire == 2:
            name = str(data[a:b], "utf-8", "replace")
        elif number == 2 and wire == 2:
            feature = _feature(data, a, b)
    return name, feature


def _feature(data: memoryview, start: int, stop: int) -> Feature:
    feature = Feature("", [], [])
    for number, wire, a, b in _fields(data, start, stop):
        if wire != 2:
            continue
        if number == 1:
            ranges = [(x, y) for n, w, x, y in _fields(data, a, b) if n == 1 and w == 2]
            feature = Feature("bytes", ranges, [])
        elif number == 2:
            feature = Feature("float", [], [])
        elif number == 3:
            feature = Feature("int64", [], _int64_values(data, a, b))
    return feature


def _int64_values(data: memoryview, start: int, stop: int) -> list[int]:
    values: list[int] = []
    for number, wire, a, b in _fields(data, start, stop):
        if number != 1:
            continue
        if wire == 0:
            values.append(_signed(varint_at(data, a, b)[0]))
        elif wire == 2:
            while a < b:
                value, a = varint_at(data, a, b)
                values.append(_signed(value))
                if len(values) > _MAX_VALUES:
                    raise FormatError(f"more than {_MAX_VALUES} values in one feature")
    return values


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _fields(data: memoryview, position: int, stop: int) -> list[tuple[int, int, int, int]]:
    """(field number, wire type, start, stop) of every field in [position, stop). Raises FormatError."""
    found = []
    while position < stop:
        tag, position = varint_at(data, position, stop)
        number, wire = tag >> 3, tag & 7
        start = position
        if wire == 0:
            _, position = varint_at(data, position, stop)
        elif wire == 2:
            length, start = varint_at(data, position, stop)
            position = start + length
        elif wire == 1:
            position += 8
        elif wire == 5:
            position += 4
        else:
            raise FormatError(f"wire type {wire} at byte {position} is not one of a tf.train.Example")
        if position > stop:
            raise FormatError(f"a field at byte {start} runs {position - stop} bytes past its end")
        found.append((number, wire, start, position))
        if len(found) > _MAX_VALUES:
            raise FormatError(f"more than {_MAX_VALUES} fields in one message")
    return found


def varint_at(data: memoryview, position: int, stop: int) -> tuple[int, int]:
    """(value, where it ends) of the number at `position`. Raises FormatError where it is too long or cut off."""
    value = shift = 0
    while position < stop:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, position
        shift += 7
        if shift > 63:
            raise FormatError(f"a number of more than ten bytes at byte {position}")
    raise FormatError(f"a number is cut off at byte {stop}")
