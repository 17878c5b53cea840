"""Containers as other programs write them, made by hand: archives, TFRecord records, HDF5 files."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import struct
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import zstandard
from crc32c import crc32c

from packer.formats.tfrecord import masked_crc

__all__ = ["BLOCK", "COMPRESS", "HDF5_LAYOUTS", "block", "entry", "example", "feature", "hdf5_of", "message", "rec_of",
           "record", "record_head", "tar_of", "varint", "write", "zip_of"]  # fmt: skip

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "tar": bytes,
    "tar.gz": lambda data: gzip.compress(data, 6, mtime=0),
    "tar.bz2": bz2.compress,
    "tar.xz": lzma.compress,
    "tar.zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


# --- archives ---
BLOCK = 512  # of a tar


def block(name: bytes, size: bytes | int, kind: bytes = b"0") -> bytes:
    """A tar header with a correct checksum. size: the 12 bytes of the field, or a number."""
    field = b"%011o\0" % size if isinstance(size, int) else size.ljust(12, b"\0")
    head = name.ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + field + b"00000000000\0" + b" " * 8 + kind
    head += bytes(100) + b"ustar\x0000" + bytes(247)
    return head[:148] + b"%06o\0 " % sum(head) + head[156:]


def tar_of(*members: tuple[str, bytes] | tarfile.TarInfo, format: int = tarfile.GNU_FORMAT, end: bool = True) -> bytes:
    """A tar of files (name, content), and of members as raw bytes; the zeros at the end are left out unless `end`."""
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w", format=format) as archive:
        for member in members:
            info = member if isinstance(member, tarfile.TarInfo) else tarfile.TarInfo(member[0])
            content = b"" if isinstance(member, tarfile.TarInfo) else member[1]
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        size = archive.offset
    return memory.getvalue() if end else memory.getvalue()[:size]


def zip_of(*members: tuple[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", method) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return memory.getvalue()


# --- TFRecord, by the encoding rules of protocol buffers alone ---
def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = b""
    while value >= 0x80:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def message(number: int, data: bytes, length: int | None = None) -> bytes:
    """A length-delimited field; `length` states a length other than that of the data."""
    return varint(number << 3 | 2) + varint(len(data) if length is None else length) + data


def feature(value: bytes | int | Sequence[int]) -> bytes:
    if isinstance(value, bytes):
        return message(1, message(1, value))
    return message(3, message(1, b"".join(map(varint, [value] if isinstance(value, int) else value))))


def entry(name: str, content: bytes) -> bytes:
    return message(1, message(1, name.encode()) + message(2, content))


def example(*entries: bytes, **features: Any) -> bytes:
    """A tf.train.Example; __ in the name of a feature stands for /."""
    named = (entry(name.replace("__", "/"), feature(value)) for name, value in features.items())
    return message(1, b"".join((*entries, *named)))


def record_head(length: int) -> bytes:
    head = struct.pack("<Q", length)
    return head + struct.pack("<I", masked_crc(crc32c(head)))


def record(data: bytes, damaged: bool = False) -> bytes:
    return record_head(len(data)) + data + struct.pack("<I", masked_crc(crc32c(data) ^ damaged))


def rec_of(images: Sequence[bytes], labels: Sequence[int]) -> bytes:
    """MXNet records."""
    records = [struct.pack("<IfQQ", 0, label, 0, 0) + data for data, label in zip(images, labels, strict=True)]
    return b"".join(struct.pack("<II", 0xCED7230A, len(data)) + data + bytes(-len(data) % 4) for data in records)


# --- HDF5: each layout fills a file with encoded images and labels ---
Layout = Callable[..., None]


def _elements(file: Any, images: Sequence[bytes], labels: Sequence[int], **storage: Any) -> None:
    data = file.create_dataset("images", (len(images),), h5py.vlen_dtype(np.uint8), **storage)
    for i, content in enumerate(images):
        data[i] = np.frombuffer(content, np.uint8)
    file["labels"] = np.array(labels, np.int64)


def _ranges(file: Any, images: Sequence[bytes], labels: Sequence[int], **storage: Any) -> None:
    file.create_dataset("images", data=np.frombuffer(b"".join(images), np.uint8), **storage)
    file["offsets"] = np.cumsum([0, *map(len, images)])
    file["labels"] = np.array(labels, np.int8)


def _ranges_with_lengths(file: Any, images: Sequence[bytes], labels: Sequence[int], **storage: Any) -> None:
    group = file.create_group("image")
    group.create_dataset("data", data=np.frombuffer(b"".join(images), np.uint8), **storage)
    group["start"] = np.cumsum([0, *map(len, images[:-1])]).astype(np.uint64)
    group["length"] = np.array([*map(len, images)], np.uint32)
    file["y"] = np.array(labels, np.int32)


def _items(file: Any, images: Sequence[bytes], labels: Sequence[int], **storage: Any) -> None:
    for i, content in enumerate(images):
        data = file.create_dataset(f"pictures/{i + 8}", data=np.frombuffer(content, np.uint8), **storage)
        data.attrs["label"] = labels[i]


def _items_and_labels(file: Any, images: Sequence[bytes], labels: Sequence[int], **storage: Any) -> None:
    for i, content in enumerate(images):
        file.create_dataset(f"images/{i + 8}", data=np.frombuffer(content, np.uint8), **storage)
    file["labels"] = np.array(labels)


HDF5_LAYOUTS: dict[str, Layout] = {
    "elements": _elements,
    "ranges": _ranges,
    "ranges with lengths": _ranges_with_lengths,
    "items": _items,
    "items and labels": _items_and_labels,
}


def hdf5_of(path: Path, fill: Callable[..., object], *arguments: Any, **options: Any) -> Path:
    """A file that `fill` fills; arguments: those of `fill` after the open file."""
    with h5py.File(path, "w") as file:
        fill(file, *arguments, **options)
    return path
