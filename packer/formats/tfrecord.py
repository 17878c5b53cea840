"""TFRecord shards of `tf.train.Example`, with the feature names of the ImageNet records.

    record   u64le length · u32le mcrc(length bytes) · data · u32le mcrc(data)
    mcrc     ((crc >> 15 | crc << 17) + 0xa282ead8) mod 2^32, crc = CRC32C       (tensorflow/core/lib/io/record_writer)

    image/encoded                 the image as it is
    image/format                  "JPEG", "PNG", …
    image/height, /width, /channels, image/colorspace   of the image as stored
    image/filename                the original file name within the split's folder
    image/class/label             label + label_offset; with /synset and /text the class name; absent without a label
    image/key                     only where the key is not the file name without its last suffix
    <field>/encoded, /filename    further fields;  json: the `json` field

The image comes last in a record, behind a short head that a walker reads at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from struct import Struct

import numpy as np
from crc32c import crc32c

from packer.formats.base import Located, LocateOptions, PackedSample, Payloads, ShardSpec, WrittenShard
from packer.formats.checksum import crc32c_shift, masked_crc
from packer.formats.example import (
    Feature,
    bytes_feature,
    features_header,
    int64_feature,
    open_bytes_feature,
    walk,
)
from packer.formats.gather import GatherFile
from packer.formats.window import Window
from readers.errors import FormatError, NotFlatError
from readers.headers import ImageHeader
from readers.index import ABSENT
from readers.sample import NO_LABEL, Buffer
from readers.tree import key_of_name

__all__ = ["FORMAT", "TFRecordFormat", "record_ranges"]

_LENGTH = Struct("<Q")
_CRC = Struct("<I")
_HEAD_BYTES = 12
_COLORSPACE = {1: b"Grayscale", 3: b"RGB", 4: b"CMYK"}
_MAX_RECORD_BYTES = 1 << 40


class TFRecordWriter:
    """Writes one shard; payloads are not copied."""

    def __init__(self, path: Path, spec: ShardSpec) -> None:
        self._file = GatherFile(path)
        self._spec = spec
        self._fields = tuple(
            (name, f"{name}/filename", "json" if name == kind == "json" else f"{name}/encoded")
            for name, kind in spec.fields.items()
        )
        self._payloads = {name: Payloads() for name in spec.fields}
        # Until `finish`, the CRC32C is that of the record up to the payload's end; beside it, that up to its start.
        self._columns = tuple(self._payloads.values())
        self._before = tuple(array("I") for _ in self._columns)
        self._label_features: dict[int, bytes] = {NO_LABEL: b""}
        self._media_features: dict[tuple[str, int], bytes] = {}
        self._image_number = list(spec.fields).index("image")

    def add(self, sample: PackedSample) -> None:
        head = self._image_features(sample.header) + self._class_features(sample.label)
        key_is_told = False
        parts: list[tuple[int, bytes, Buffer]] = []
        last: Buffer | None = None
        for number, (field, name_feature, payload_feature) in enumerate(self._fields):
            payload, name = sample.payloads[number], sample.names[number]
            if name:
                head += bytes_feature(name_feature, name.encode())
            if payload is None:
                self._columns[number].append(ABSENT, 0, 0)
                self._before[number].append(0)
            if field == "image":
                key_is_told = bool(name) and key_of_name(name) == sample.key
                last = payload
            elif payload is not None:
                parts.append((number, open_bytes_feature(payload_feature, len(payload)), payload))
        if not key_is_told:
            head += bytes_feature("image/key", sample.key.encode())
        if last is not None:
            parts.append((self._image_number, open_bytes_feature("image/encoded", len(last)), last))
        self._write(head, parts)

    def _write(self, head: bytes, parts: list[tuple[int, bytes, Buffer]]) -> None:
        """One record: `head`, then (field number, what opens its feature, payload) of each payload."""
        length = sum([len(opening) + len(payload) for _, opening, payload in parts])
        data = features_header(len(head) + length) + head
        record_bytes = len(data) + length
        prefix = _LENGTH.pack(record_bytes)
        prefix += _CRC.pack(masked_crc(crc32c(prefix)))
        position, crc = self._file.position + _HEAD_BYTES, 0
        pieces: list[Buffer] = [prefix]
        for number, opening, payload in parts:
            data += opening
            before = crc32c(data, crc)
            crc = crc32c(payload, before)
            position += len(data)
            size = len(payload)
            self._columns[number].append(position, size, crc)
            self._before[number].append(before)
            position += size
            pieces += (data, payload)
            data = b""
        crc = crc32c(data, crc)
        footer = _CRC.pack(masked_crc(crc))
        self._file.checksum.add(prefix, crc, record_bytes)
        self._file.checksum.add(footer)
        self._file.append((*pieces, data, footer) if data else (*pieces, footer), _HEAD_BYTES + record_bytes + 4)

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
        for payloads, before in zip(self._columns, self._before, strict=True):
            shifted = crc32c_shift(np.array(before, np.uint32), np.array(payloads.length, np.uint64))
            crcs = np.array(payloads.crc32c, np.uint32) ^ shifted
            payloads.crc32c = array("I", crcs.tobytes())
        return WrittenShard(self._file.position, self._file.checksum.value(), self._payloads)

    def abort(self) -> None:
        self._file.abort()


class TFRecordFormat:
    """TFRecords of tf.train.Example."""

    name = "tfrecord"

    def shard_name(self, split: str, number: int, count: int) -> str:
        return f"{split}-{number:05d}-of-{count:05d}.tfrecord"

    def open_writer(self, path: Path, spec: ShardSpec) -> TFRecordWriter:
        return TFRecordWriter(path, spec)

    def describe(self, path: Path) -> ShardSpec | None:
        return None

    def locate(self, path: Path, options: LocateOptions) -> Iterator[Located]:
        with Window(path) as window:
            for number, (start, length) in enumerate(record_ranges(window, options.check_payload)):
                data = memoryview(window.read(start, length))
                try:
                    yield _sample(window, data, start, number, path.stem, options)
                except FormatError as error:
                    raise FormatError(f"{path}: record {number} at byte {start - _HEAD_BYTES}: {error}") from error


def record_ranges(window: Window, check_payload: bool = False) -> Iterator[tuple[int, int]]:
    """(start, length) of the data of each record; the record begins 12 bytes before and ends 4 after.

    Raises FormatError, NotFlatError.
    """
    position = 0
    while position < window.size:
        start, length = _record(window, position, check_payload)
        yield start, length
        position = start + length + 4


def _record(window: Window, position: int, check_payload: bool) -> tuple[int, int]:
    """(start, length) of the data of the record at `position`, its length's checksum verified."""
    head = window.read(position, _HEAD_BYTES)
    length, stated = _LENGTH.unpack_from(head)[0], _CRC.unpack_from(head, 8)[0]
    if masked_crc(crc32c(head[:8])) != stated:
        if position == 0 and head[:2] == b"\x1f\x8b":  # a length may look the same, but not with its checksum
            raise NotFlatError(
                f"{window.path}: compressed with gzip, so no sample is one byte range; run  packer convert "
                f"{window.path} --to tfrecord"
            )
        raise FormatError(
            f"{window.path}: the record at byte {position} has a wrong length checksum: damaged, or no TFRecord "
            f"(a zlib-compressed one must be unpacked first)"
        )
    if length > _MAX_RECORD_BYTES or position + _HEAD_BYTES + length + 4 > window.size:
        raise FormatError(
            f"{window.path}: the record at byte {position} has {length} bytes, but the file ends at "
            f"{window.size}: truncated?"
        )
    if check_payload:
        data = window.read(position + _HEAD_BYTES, length + 4)
        if masked_crc(crc32c(memoryview(data)[:length])) != _CRC.unpack_from(data, length)[0]:
            raise FormatError(f"{window.path}: the record at byte {position} has a wrong data checksum: damaged")
    return position + _HEAD_BYTES, length


def _sample(window: Window, data: memoryview, start: int, number: int, shard: str, options: LocateOptions) -> Located:
    features = walk(data)
    image_key = options.image_key or "image/encoded"
    if image_key not in features and image_key != "image/encoded":
        raise FormatError(f"no feature {image_key!r}; it has {', '.join(sorted(features)) or 'none'}")
    if options.image_key is None and image_key not in features and not _ours(features):
        raise FormatError(
            f"no feature 'image/encoded'; it has {', '.join(sorted(features)) or 'none'}; "
            f"name the image with  --image-key"
        )
    names: dict[str, str] = {}
    ranges: dict[str, tuple[int, int]] = {}
    wanted = {"image": image_key, **options.extra_fields}
    for name, feature in features.items():
        field = next((f for f, key in wanted.items() if key == name), "")
        if not field and _field_of(name) not in wanted:  # where another feature was asked for, this one is not it
            field = _field_of(name)
        if name.endswith("/filename") and feature.ranges:
            a, b = feature.ranges[0]
            names[name[: -len("/filename")]] = str(data[a:b], "utf-8", "replace")
        elif field and feature.ranges:
            a, b = feature.ranges[0]
            ranges[field] = (start + a, b - a)
    label = NO_LABEL
    label_feature = features.get(options.label_key or "image/class/label")
    if label_feature and label_feature.values:
        label = label_feature.values[0] - options.label_offset
    elif options.label_key and not label_feature:
        raise FormatError(f"no feature {options.label_key!r}; it has {', '.join(sorted(features))}")
    key = _first_text(features.get("image/key"), data)
    if not key:
        key = key_of_name(names["image"]) if names.get("image") else f"{shard}/{number:08d}"
    return Located(key, label, ranges, names, _first_text(features.get("image/class/synset"), data))


def _first_text(feature: Feature | None, data: memoryview) -> str:
    if feature is None or not feature.ranges:
        return ""
    a, b = feature.ranges[0]
    return str(data[a:b], "utf-8", "replace")


def _field_of(feature: str) -> str:
    """The field a feature name stands for by our own naming; "" for none."""
    if feature == "json":
        return "json"
    if feature.endswith("/encoded") and feature.count("/") == 1:
        return feature[: -len("/encoded")]
    return ""


def _ours(features: dict[str, Feature]) -> bool:
    return "image/key" in features or "image/filename" in features


FORMAT = TFRecordFormat()
