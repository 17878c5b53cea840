"""One sample: what is known of it, its bytes, and small pictures of it.

Pictures are decoded here and encoded again, a few at a time and none above a number of pixels, so that neither a bomb
nor many requests exhaust the machine.
"""

from __future__ import annotations

import io
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from cache.errors import BadSampleError, PackerError, UnknownNameError
from cache.node import usable_cpus
from packer.comparison import header_difference
from packer.formats.base import png_of
from readers.decode import Region, decode_image
from readers.fields import decode_field
from readers.headers import read_header, sniff
from readers.index import MemoryColumns
from readers.pixels import PIXELS, stored_bytes
from readers.reader import Reader
from readers.sample import NO_LABEL, Buffer

__all__ = ["MEDIA_TYPES", "MOST_PIXELS", "as_png", "field_bytes", "sample_document", "thumbnail"]

MEDIA_TYPES = {
    "jpeg": "image/jpeg",
    "png": "image/png",
    "webp": "image/webp",
    "gif": "image/gif",
    "bmp": "image/bmp",
    "tiff": "image/tiff",
}
MOST_PIXELS = 50_000_000  # of a picture that is decoded here; 150 MB of RGB
_BYTES = "application/octet-stream"
_PROCESSES = {0xC0: "baseline", 0xC1: "extended", 0xC2: "progressive", 0xC3: "lossless"}
_QUALITY = 82
_decoding = threading.BoundedSemaphore(max(1, usable_cpus()))


def sample_document(reader: Reader, index: int) -> dict[str, Any]:
    """What is known of a sample; all of its fields are read, and their checksums computed."""
    label = int(reader.labels[index])
    found: dict[str, Any] = {
        "index": index,
        "key": reader.keys[index],
        "label": None if label == NO_LABEL else label,
        "class": reader.classes[label] if 0 <= label < len(reader.classes) else "",
        "fields": [],
    }
    faults: list[str] = []
    for field in reader.fields:
        if reader.has(index, field):
            entry, fault = _field(reader, index, field, found)
            if entry:
                found["fields"].append(entry)
            faults += [fault] if fault else []
    return found | ({"error": "; ".join(faults)} if faults else {})


def _field(reader: Reader, index: int, field: str, found: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """(what is known of a field, what is wrong with it)."""
    kind, columns, row = reader.kinds[field], reader.table.columns, reader.table.row(index)
    entry: dict[str, Any] = {"name": field, "kind": kind}
    name = reader.name(index, field)
    if name:
        entry["file"] = name
    if not isinstance(columns, MemoryColumns):
        shard, offset, length = reader.table.extents([index], field)[1:]
        entry |= {
            "shard": reader.split_info.shards[int(shard[0])].path,
            "offset": int(offset[0]),
            "length": int(length[0]),
            "crc32c": f"{int(columns.field_column(field, 'crc32c')[row]):08x}",
        }
    try:
        data = reader.read(index, field)
    except UnknownNameError:  # of a source, which says only now that the sample lacks it
        return {}, ""
    except (PackerError, OSError) as error:
        return entry, f"field {field}: {error}"
    entry["bytes"] = len(data)
    entry["computed"] = f"{crc32c(stored_bytes(data) if kind == PIXELS else data):08x}"
    media = sniff(data)
    if media:
        entry["media"] = media
    fault = ""
    if "crc32c" in entry and columns.has_checksums and entry["crc32c"] != entry["computed"]:
        fault = f"field {field} is damaged: CRC32C {entry['computed']}, expected {entry['crc32c']}"
    if field == "image":
        fault = _add_header(reader, index, data, found) or fault
    return entry, fault


def _add_header(reader: Reader, index: int, data: Buffer, found: dict[str, Any]) -> str:
    """Add what the header of an image says; what is wrong with it."""
    try:
        header = read_header(data)
    except BadSampleError as error:
        return f"the image cannot be read: {error}"
    height, width = header.upright_size
    found["header"] = {
        "width": width,
        "height": height,
        "components": header.components,
        "process": _PROCESSES.get(header.process, f"SOF{header.process & 15}") if header.process else "",
        "orientation": header.orientation,
        "media": header.media,
    }
    return header_difference(reader.info, index, data) if reader.table.has_headers else ""


def field_bytes(reader: Reader, index: int, field: str) -> tuple[Buffer, str]:
    """(the bytes of a field, their media type). Pixels without a coding are sent as PNG. Raises PackerError."""
    data = reader.read(index, field)
    media = sniff(data)
    if media:
        return data, MEDIA_TYPES[media]
    if reader.kinds[field] == PIXELS:
        return as_png(reader, index, field), MEDIA_TYPES["png"]
    return data, _BYTES


def as_png(reader: Reader, index: int, field: str) -> bytes:
    """A field as PNG: an image upright and in RGB, a mask in its own numbers, 8 or 16 bits. Raises PackerError."""
    data = reader.read(index, field)
    _check_size(data)
    with _decoding:
        if reader.kinds[field] == "mask":
            return png_of(_plain(decode_field("mask", data)))
        return png_of(decode_image(data))


def _plain(mask: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if mask.dtype.itemsize <= 2:
        return mask
    if mask.size and not 0 <= int(mask.min()) <= int(mask.max()) < 1 << 16:
        raise BadSampleError(f"a mask with numbers from {mask.min()} to {mask.max()} cannot be shown as PNG")
    return mask.astype(np.uint16)


def thumbnail(reader: Reader, index: int, side: int) -> bytes:
    """The image of a sample as JPEG, upright, its longer side `side` pixels or less. Raises PackerError."""
    from PIL import Image

    data = reader.read(index)
    height, width = _check_size(data)
    reduce = next((scale for scale in (8, 4, 2) if max(height, width) >= scale * side), 1)
    with _decoding:
        image = Image.fromarray(decode_image(data, Region(0, 0, height, width, reduce, True)))
        image.thumbnail((side, side))
    memory = io.BytesIO()
    image.save(memory, "JPEG", quality=_QUALITY)
    return memory.getvalue()


def _check_size(data: Buffer) -> tuple[int, int]:
    """(height, width) of an upright image. Raises BadSampleError for one with too many pixels."""
    header = read_header(data)
    if header.height * header.width > MOST_PIXELS:
        raise BadSampleError(f"{header.width} x {header.height} pixels are too many to be shown here")
    return header.upright_size
