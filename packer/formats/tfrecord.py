"""TFRecord shards of `tf.train.Example`, with the feature names of the ImageNet records.

    record   u64le length · u32le mcrc(length bytes) · data · u32le mcrc(data)
    mcrc     ((crc >> 15 | crc << 17) + 0xa282ead8) mod 2^32, crc = CRC32C       (tensorflow/core/lib/io/record_writer)

    image/encoded                 the image, unchanged
    image/format                  "JPEG", "PNG", …
    image/height, /width, /channels, image/colorspace   of the image as stored
    image/filename                the original file name within the split's folder
    image/class/label             label + label_offset; the class name is in /synset and /text; absent without a label
    image/key                     only if the key is not the file name without its last suffix
    <field>/encoded, /filename    further fields;  json: the `json` field

The image is the last feature of a record, so all others can be read without it.

In foreign records, the image is the first of IMAGE_FEATURES, the label the first of LABEL_FEATURES, the name the first
of NAME_FEATURES and the class the first of CLASS_FEATURES that a record has, unless options name others. A text label
is the name of its class. <field>/encoded is a field if its name is a valid field name; all other features are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from pathlib import Path
from struct import Struct
from typing import ClassVar, NamedTuple

from crc32c import crc32c

from cache.errors import FormatError, NotFlatError
from cache.messages import quoted
from packer.formats.base import (
    ChainedPayloads,
    GatherFile,
    Located,
    LocateOptions,
    PackedSample,
    ShardSpec,
    WalkedFormat,
    Window,
    WrittenShard,
    is_field,
    key_by_number,
    without_offset,
)
from readers.headers import ImageHeader
from readers.opening.tree import key_of_name
from readers.table import ABSENT, NO_LABEL, Buffer

__all__ = [
    "FORMAT",
    "RECORD_HEAD_BYTES",
    "Feature",
    "TFRecordFormat",
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


# TFRecord bytes: the checksums of records, and their `tf.train.Example`, built and parsed without copying.
#
#     Example  { Features features = 1 }
#     Features { map<string, Feature> feature = 1 }        a map entry is { string key = 1; Feature value = 2 }
#     Feature  { oneof { BytesList bytes_list = 1; FloatList float_list = 2; Int64List int64_list = 3 } }
#     *List    { repeated value = 1 }                      int64 values packed or not
#
# (tensorflow/core/example/{example,feature}.proto; the wire format is that of protobuf's encoding guide.) A length-
# delimited value is one byte range of the record, so a sample in a TFRecord has a flat address.


RECORD_HEAD_BYTES = 12
_MAX_FEATURES = 1 << 16
_MAX_VALUES = 1 << 20


def masked_crc(crc: int) -> int:
    """Mask a CRC32C as TFRecord does: rotated and offset, since CRCs of data that contain CRCs are weak."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def starts_record(head: bytes) -> bool:
    """Whether `head` is the start of a TFRecord: a length, which may equal any magic number, and its checksum."""
    stated = int.from_bytes(head[8:RECORD_HEAD_BYTES], "little")
    return len(head) >= RECORD_HEAD_BYTES and stated == masked_crc(crc32c(head[:8]))


def varint(value: int) -> bytes:
    """Base-128 encoding of a value from 0 to 2^64 - 1."""
    if value < 0x80:
        return _BYTES[value]
    return _BYTES[value & 0x7F | 0x80] + _rest(value >> 7)


_BYTES = [bytes((value,)) for value in range(256)]
_rest = lru_cache(4096)(varint)  # lengths recur but for their lower bits


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
    """The beginning of a map entry with one bytes value of `length`; the value must follow."""
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
    """A feature of an Example.

    kind: "bytes", "float", "int64" or "" (empty). ranges: of bytes values, in the record. values: int64 values.
    """

    kind: str
    ranges: list[tuple[int, int]]
    values: list[int]


def walk(data: memoryview) -> dict[str, Feature]:
    """Every feature of a serialised Example. The last of a repeated name wins, as in protobuf maps.

    Raises FormatError if the bytes are not an Example.
    """
    features: dict[str, Feature] = {}
    for number, wire, start, stop in _fields(data, 0, len(data)):
        if number != 1 or wire != 2:
            continue
        for number2, wire2, start2, stop2 in _fields(data, start, stop):
            if number2 == 1 and wire2 == 2:
                name, feature = _entry(data, start2, stop2)
                features[name] = feature
                if len(features) > _MAX_FEATURES:
                    raise FormatError(f"more than {_MAX_FEATURES} features in one record")
    return features


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
    fields = []
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
        fields.append((number, wire, start, position))
        if len(fields) > _MAX_VALUES:
            raise FormatError(f"more than {_MAX_VALUES} fields in one message")
    return fields


def varint_at(data: memoryview, position: int, stop: int) -> tuple[int, int]:
    """(value, end position) of the number at `position`. Raises FormatError if it is too long or cut off."""
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


_LENGTH = Struct("<Q")
_CRC = Struct("<I")
_COLORSPACE = {1: b"Grayscale", 3: b"RGB", 4: b"CMYK"}
_FRAME_BYTES = 16
_MAX_RECORD_BYTES = 1 << 31  # the limit of protocol buffers
_DERIVED = ("image/format", "image/height", "image/width", "image/channels", "image/colorspace", "image/key")

IMAGE_FEATURES = ("image/encoded", "image", "image_raw", "encoded", "jpeg", "img")
LABEL_FEATURES = ("image/class/label", "label", "class", "target")
NAME_FEATURES = ("image/filename", "filename", "file_name")
CLASS_FEATURES = ("image/class/synset", "image/class/text")


class TFRecordWriter:
    """Writes a TFRecord shard; payloads are not copied."""

    def __init__(self, path: Path, spec: ShardSpec) -> None:
        self._file = GatherFile(path)
        self._spec = spec
        self._fields = tuple(
            (name, f"{name}/filename", "json" if name == kind == "json" else f"{name}/encoded")
            for name, kind in spec.fields.items()
        )
        self._payloads = {name: ChainedPayloads() for name in spec.fields}  # checksums run from the start of a record
        self._columns = tuple(self._payloads.values())
        self._footer = b""  # of the last record, which is not yet in the checksum of the file
        self._label_features: dict[int, bytes] = {NO_LABEL: b""}
        self._media_features: dict[tuple[str, int], bytes] = {}
        self._image_number = list(spec.fields).index("image") if "image" in spec.fields else -1

    def add(self, sample: PackedSample) -> None:
        head = self._image_features(sample.header) + self._class_features(sample.label)
        key_follows = False
        parts: list[tuple[int, bytes, Buffer]] = []
        last: Buffer | None = None
        for number, (field, name_feature, payload_feature) in enumerate(self._fields):
            payload, name = sample.payloads[number], sample.names[number]
            if name:
                head += bytes_feature(name_feature, name.encode())
            if payload is None:
                self._columns[number].append(ABSENT, 0, 0)
            if field == "image":
                key_follows = bool(name) and key_of_name(name) == sample.key
                last = payload
            elif payload is not None:
                parts.append((number, open_bytes_feature(payload_feature, len(payload)), payload))
        if not key_follows:
            head += bytes_feature("image/key", sample.key.encode())
        if last is not None:
            parts.append((self._image_number, open_bytes_feature("image/encoded", len(last)), last))
        self._write(head, parts)

    def _write(self, head: bytes, parts: list[tuple[int, bytes, Buffer]]) -> None:
        """Write one record: `head`, then (field number, head of its feature, payload) for each payload."""
        length = sum([len(opening) + len(payload) for _, opening, payload in parts])
        data = features_header(len(head) + length) + head
        record_bytes = len(data) + length
        prefix = _LENGTH.pack(record_bytes)
        prefix += _CRC.pack(masked_crc(crc32c(prefix)))
        position, crc = self._file.position + RECORD_HEAD_BYTES, 0
        pieces: list[Buffer] = [prefix]
        for number, opening, payload in parts:
            data += opening
            before = crc32c(data, crc)
            crc = crc32c(payload, before)
            position += len(data)
            size = len(payload)
            self._columns[number].append(position, size, crc, before)
            position += size
            pieces += (data, payload)
            data = b""
        crc = crc32c(data, crc)
        footer = _CRC.pack(masked_crc(crc))
        self._file.checksum.add(self._footer + prefix, crc, record_bytes)
        self._footer = footer
        self._file.append((*pieces, data, footer) if data else (*pieces, footer), RECORD_HEAD_BYTES + record_bytes + 4)

    def _image_features(self, header: ImageHeader | None) -> bytes:
        if header is None:
            return b""
        constant = self._media_features.get((header.media, header.components))
        if constant is None:
            constant = bytes_feature("image/format", header.media.upper().encode())
            constant += int64_feature("image/channels", header.components)
            constant += bytes_feature("image/colorspace", _COLORSPACE.get(header.components, b"RGBA"))
            self._media_features[header.media, header.components] = constant
        return constant + int64_feature("image/height", header.height) + int64_feature("image/width", header.width)

    def _class_features(self, label: int) -> bytes:
        features = self._label_features.get(label)
        if features is None:
            features = int64_feature("image/class/label", label + self._spec.label_offset)
            if label < len(self._spec.classes):
                name = self._spec.classes[label].encode()
                features += bytes_feature("image/class/synset", name) + bytes_feature("image/class/text", name)
            self._label_features[label] = features
        return features

    def flush(self) -> None:
        self._file.flush()

    def finish(self) -> WrittenShard:
        self._file.sync_and_close()
        self._file.checksum.add(self._footer)
        for payloads in self._columns:
            payloads.separate()
        return WrittenShard(self._file.position, self._file.checksum.value(), self._payloads)

    def abort(self) -> None:
        self._file.abort()


class TFRecordFormat(WalkedFormat):
    """TFRecord files of tf.train.Example."""

    name = "tfrecord"
    exports: ClassVar[Mapping[str, str]] = {"dali": ".idx", "tfrecord": ".tfindex"}
    unindexed: ClassVar[Mapping[str, str]] = {
        "rocal": "it reads them without one, from a directory made by readers.rocal.native.tfrecord_layout"
    }

    def shard_name(self, split: str, number: int, count: int) -> str:
        return f"{split}-{number:05d}-of-{count:05d}.tfrecord"

    def open_writer(self, path: Path, spec: ShardSpec) -> TFRecordWriter:
        return TFRecordWriter(path, spec)

    def walk(self, window: Window, options: LocateOptions) -> Iterator[Located]:
        for number, (start, length, fault) in enumerate(_records(window, options.check_payload)):
            position = start - RECORD_HEAD_BYTES
            if fault and not options.lenient:
                raise FormatError(f"{window.path}: {fault}")
            if fault:
                yield Located(key_by_number(window.path, number), NO_LABEL, {}, {}, fault=fault)
                continue
            try:
                data = memoryview(window.read(start, length))
                sample = _sample(data, start, options, required=number == 0 or not options.lenient)
            except FormatError as error:
                raise FormatError(f"{window.path}: record {number} at byte {position}: {error}") from error
            if "image" not in sample.ranges and options.lenient:
                sample = sample._replace(fault=f"the record at byte {position} has no image")
            yield sample if sample.key else sample._replace(key=key_by_number(window.path, number))

    def index_lines(self, target: str, window: Window) -> Iterator[str]:
        """<offset> <bytes> of each record, including its length and checksums."""
        for start, length, _ in _records(window, check_payload=False):
            yield f"{start - RECORD_HEAD_BYTES} {length + _FRAME_BYTES}\n"


def _records(window: Window, check_payload: bool) -> Iterator[tuple[int, int, str]]:
    """(start of the data, its length, its fault or "") of each record, with the checksum of its length verified.

    check_payload: verify the checksum of the data, too.
    """
    position = 0
    while head := window.read_up_to(position, RECORD_HEAD_BYTES):
        if len(head) < RECORD_HEAD_BYTES:
            raise FormatError(f"{window.path}: ends inside the record at byte {position}: truncated?")
        length, start = int(_LENGTH.unpack_from(head)[0]), position + RECORD_HEAD_BYTES
        if not starts_record(head):
            if position == 0 and head[:2] == b"\x1f\x8b":  # a length may look the same, but not with its checksum
                raise NotFlatError(
                    f"{window.path}: compressed with gzip, so no sample is one byte range; run  packer convert "
                    f"{quoted(window.path)} --to tfrecord"
                )
            raise FormatError(
                f"{window.path}: the record at byte {position} has a wrong length checksum: damaged, or not a TFRecord "
                f"(a zlib-compressed one must be unpacked first)"
            )
        if start + length + 4 > window.size:
            raise FormatError(
                f"{window.path}: the record at byte {position} has {length} bytes, but the file ends at "
                f"{window.size}: truncated?"
            )
        if length > _MAX_RECORD_BYTES:
            raise FormatError(
                f"{window.path}: the record at byte {position} has {length} bytes, too many for an Example"
            )
        fault = ""
        if check_payload:
            data = window.read(start, length + 4)
            if masked_crc(crc32c(memoryview(data)[:length])) != _CRC.unpack_from(data, length)[0]:
                fault = f"the record at byte {position} has a wrong checksum: damaged"
        yield start, length, fault
        position = start + length + 4


def _sample(data: memoryview, start: int, options: LocateOptions, required: bool) -> Located:
    """The sample in a record whose data begin at `start`; its key is "" if the record has none.

    Raises FormatError if the data are not an Example, if its label is not a single integer, or if the image is
    `required` and missing.
    """
    features = walk(data)
    image = (options.image_key,) if options.image_key else IMAGE_FEATURES
    labels = (options.label_key,) if options.label_key else LABEL_FEATURES
    if options.label_key and options.label_key not in features:
        raise FormatError(f"no feature {options.label_key!r}; it has {', '.join(sorted(features))}")
    image_key = _first(features, image)
    is_own = "image/key" in features or "image/filename" in features  # a record of packer may lack its image
    if required and not image_key and (options.image_key or not is_own):
        raise FormatError(
            f"no feature {image[0]!r}; it has {', '.join(sorted(features)) or 'none'}; name the image with  "
            f"image_key='KEY'"
        )
    keys = {"image": image_key, **options.extra_fields}
    fields = {key: field for field, key in keys.items() if key}
    name_key, label_key = _first(features, NAME_FEATURES), next((key for key in labels if key in features), "")
    class_key = _first(features, CLASS_FEATURES) or (label_key if _is_bytes(features.get(label_key)) else "")
    used = {*fields, name_key, *CLASS_FEATURES, *labels, *_DERIVED}
    names = {"image": _text(data, features, name_key)} if name_key else {}
    ranges: dict[str, tuple[int, int]] = {}
    left_behind = []
    for name, feature in features.items():
        own, _, part = name.rpartition("/")
        field = fields.get(name, "")
        if not field and name not in used and _field_of(name) not in keys:
            field = _field_of(name)  # the options name another feature, so this one is a further field
        if field and _is_bytes(feature):
            first, stop = feature.ranges[0]
            ranges[field] = (start + first, stop - first)
        elif part == "filename" and f"{own}/encoded" in features and name != name_key:
            names[own] = _text(data, features, name)
        elif name not in used:
            left_behind.append(name)
    key = _text(data, features, "image/key") or key_of_name(names.get("image", ""))
    label = without_offset(_label(features, label_key, options), options)
    class_name = _text(data, features, class_key)
    return Located(key, label, ranges, names, class_name, left_behind=tuple(left_behind))


def _label(features: dict[str, Feature], key: str, options: LocateOptions) -> int:
    """The stored label; NO_LABEL if it is a class name, which an index could not number."""
    if key not in features or features[key].kind == "" or (options.lenient and _is_bytes(features[key])):
        return NO_LABEL
    if _is_bytes(features[key]):
        raise FormatError(
            f"the label {key!r} is text, not one int64; packer convert  gives the names of classes numbers"
        )
    kind, values = features[key].kind, features[key].values
    if kind != "int64" or len(values) > 1:
        raise FormatError(f"the label {key!r} holds {len(values)} numbers of kind {kind}, expected one int64")
    return values[0] if values else NO_LABEL


def _first(features: dict[str, Feature], names: tuple[str, ...]) -> str:
    """The first of some names with one bytes value; "" if there is none."""
    return next((name for name in names if _is_bytes(features.get(name))), "")


def _is_bytes(feature: Feature | None) -> bool:
    return feature is not None and len(feature.ranges) == 1


def _text(data: memoryview, features: dict[str, Feature], name: str) -> str:
    feature = features.get(name)
    if feature is None or not feature.ranges:
        return ""
    start, stop = feature.ranges[0]
    return str(data[start:stop], "utf-8", "replace")


def _field_of(feature: str) -> str:
    """The field that a feature represents, by its name; "" if none."""
    if feature == "json":
        return "json"
    field, _, part = feature.rpartition("/")
    return field if part == "encoded" and (field == "image" or is_field(field)) else ""


FORMAT = TFRecordFormat()
