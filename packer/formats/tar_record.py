"""What a tar shard says of its set, behind the end of the archive, where no reader of samples looks.

    … members · two blocks of zeros · header of "__packer__" · the record · zeros up to a full tar record

Tar programs stop at the zeros. The record has two lines: a JSON object with split, fields, classes, label_offset and
shards (how many the split has); and {"crc32c": "0a1b2c3d", "position": 12345}, the CRC32C of the first and the byte at
which the header is, so that a shard which has another shard as a member is not taken for that one.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from crc32c import crc32c

from cache.errors import BadNameError, FormatError
from packer.formats.base import ShardSpec
from packer.formats.files import Window
from packer.formats.ustar import BLOCK_BYTES, RECORD_NAME, end_of_archive, member_header
from readers.layout import FIELD_KINDS, FieldName, SplitName

__all__ = ["end_with_record", "read_record"]

_TAIL_BYTES = 16 << 10  # more than the zeros at the end and the second line
_LAST_LINE = re.compile(rb'\n\{"crc32c": "([0-9a-f]{8})", "position": ([0-9]{1,18})\}\n\Z')
_MAX_RECORD_BYTES = 1 << 30


def end_with_record(position: int, spec: ShardSpec) -> bytes:
    """The end of an archive of `position` bytes, with the record of its set."""
    content = {
        "split": spec.split,
        "fields": dict(spec.fields),
        "classes": list(spec.classes),
        "label_offset": spec.label_offset,
        "shards": spec.shards,
    }
    first = json.dumps(content, ensure_ascii=False).encode()
    start = position + 2 * BLOCK_BYTES
    record = first + b'\n{"crc32c": "%08x", "position": %d}\n' % (crc32c(first), start)
    end = bytes(2 * BLOCK_BYTES) + member_header(RECORD_NAME, len(record)) + record + bytes(-len(record) % BLOCK_BYTES)
    return end + end_of_archive(position + len(end))


def read_record(path: Path) -> ShardSpec | None:
    """The record of its set in a shard; None without one. Raises FormatError where it is damaged."""
    with Window(path) as window:
        tail_start = max(0, window.size - _TAIL_BYTES)
        tail = window.read(tail_start, window.size - tail_start).rstrip(b"\0")
        match = _LAST_LINE.search(tail)
        if match is None:
            return None
        start, stop = int(match[2]), tail_start + match.start()
        size = tail_start + len(tail) - start - BLOCK_BYTES
        if not 0 < size < _MAX_RECORD_BYTES or start < 2 * BLOCK_BYTES:
            return None
        if window.read(start, BLOCK_BYTES) != member_header(RECORD_NAME, size):
            return None  # the record of a shard that is a member of this one
        first = window.read(start + BLOCK_BYTES, stop - start - BLOCK_BYTES)
    try:
        if crc32c(first) != int(match[1], 16):
            raise ValueError(f"its CRC32C is {crc32c(first):08x}, expected {match[1].decode()}")
        return _spec(json.loads(first))
    except (BadNameError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise FormatError(
            f"{path}: what it says of its set at byte {start} is damaged: {error}; restore the shard, or adopt it "
            f"without that by naming the image:  image_key='jpg'"
        ) from error


def _spec(content: Any) -> ShardSpec:
    fields: dict[str, str] = {FieldName(name): str(kind) for name, kind in content["fields"].items()}
    classes, offset, shards = content["classes"], content["label_offset"], content["shards"]
    if not fields or not set(fields.values()) <= set(FIELD_KINDS):
        raise ValueError(f"fields are {fields!r:.80}")
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise ValueError("classes are not a list of names")
    if not isinstance(offset, int) or abs(offset) >= 1 << 31 or not isinstance(shards, int) or shards < 0:
        raise ValueError(f"label_offset is {offset!r:.40}, shards is {shards!r:.40}")
    return ShardSpec(SplitName(content["split"]), fields, tuple(classes), offset, shards)
