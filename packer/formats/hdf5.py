"""HDF5 shards: one contiguous 1-D uint8 data set a field, so that every sample is one flat byte range.

    /<field>/data     uint8  [bytes]  contiguous; all samples one after the other
    /<field>/offset   uint64 [n]      first byte in data; 2^64 - 1 where the sample lacks the field
    /<field>/length   uint64 [n]
    /<field>/name     UTF-8  [n]      original file names (fixed length, deflated); only where there are any
    /image            uint8  [n, height, width, 3]  contiguous, in place of its group: raw pixels (kind "pixels"),
                      whose names are in /image_name
    /label            int64  [n]      label + label_offset; -1 for none
    /key              UTF-8  [n]
    root attributes   format "packer", version 1, split, fields and kinds, label_offset, classes
                      (as the data set /classes where they do not fit an attribute)

Contiguous data sets cannot grow, and how many bytes a shard will hold is known only when its last sample is in. So
the image bytes are streamed to where HDF5 will put them (the first large object of a file is at byte 4096); then
h5py writes the same file with the right sizes and nothing in it, as a sparse skeleton, and its metadata is copied
around the streamed bytes. Further fields are spooled to files of their own and copied in. Memory stays constant.
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from cache.checksums import crc32c_combine
from cache.errors import FormatError
from packer.formats.base import Format, Located, LocateOptions, PackedSample, Payloads, ShardSpec, WrittenShard
from packer.formats.files import GatherFile
from packer.formats.hdf5_foreign import locate_foreign, splits_of
from packer.formats.hdf5_guard import (
    Hdf5Places,
    as_text,
    flat_start,
    read_column,
    read_strings,
    refuse_other_files,
    translated,
)
from readers.index import ABSENT
from readers.layout import FIELD_KINDS
from readers.pixels import PIXELS
from readers.sample import NO_LABEL
from readers.strings import NamesBuilder

__all__ = ["FORMAT", "Hdf5Format"]

_DATA_START = 4096  # of the first data set, by the alignment we ask for; checked on every shard
_SMALL_BYTES = _DATA_START  # smaller data sets are not aligned: h5py writes them itself
_COPY_BYTES = 8 << 20
_CHUNK_CACHE_BYTES = 64 << 20
_BLOCK_TEXTS = 4096
_ATTRIBUTE_BYTES = 60_000  # an attribute must stay under 64 KiB
_VERSION = 1


class Hdf5Writer:
    """Writes one shard; image payloads are not copied, further fields are spooled to files of their own."""

    def __init__(self, path: Path, spec: ShardSpec) -> None:
        self._path, self._spec = path, spec
        self._skeleton = path.with_name(path.name + "~skeleton")
        self._files = {
            name: GatherFile(path if number == 0 else path.with_name(f"{path.name}.{name}"), _DATA_START)
            for number, name in enumerate(spec.fields)
        }
        self._fields = tuple(self._files.items())
        self._payloads = {name: Payloads() for name in spec.fields}
        self._names = {name: NamesBuilder() for name in spec.fields}
        self._keys = NamesBuilder()
        self._labels = array("q")
        self._pixels = next((name for name, kind in spec.fields.items() if kind == PIXELS), "")
        self._side = (1, 1)  # (height, width) of raw pixels

    def add(self, sample: PackedSample) -> None:
        for number, (field, file) in enumerate(self._fields):
            payload = sample.payloads[number]
            self._names[field].append(sample.names[number])
            if payload is None:
                self._payloads[field].append(ABSENT, 0, 0)
                continue
            length, crc = len(payload), crc32c(payload)
            self._payloads[field].append(file.position - _DATA_START, length, crc)
            file.checksum.add(b"", crc, length)
            file.append((payload,), length)
        if self._pixels and sample.header is not None:
            self._side = sample.header.height, sample.header.width
        self._keys.append(sample.key)
        label = sample.label
        self._labels.append(label if label == NO_LABEL else label + self._spec.label_offset)

    def flush(self) -> None:
        for _, file in self._fields:
            file.flush()

    def finish(self) -> WrittenShard:
        self.flush()
        main = self._fields[0][1]
        try:
            starts = self._write_skeleton()
        except RuntimeError as error:  # a system error of a file that HDF5 closes, as on a full disk
            found = re.search(r"errno = (\d+)", str(error))
            if found is None:
                raise
            raise OSError(int(found[1]), os.strerror(int(found[1])), str(self._skeleton)) from error
        crc, size = self._assemble(main, starts)
        main.sync_and_close()
        for _, spool in self._fields[1:]:
            spool.abort()
        self._skeleton.unlink()
        for field, payloads in self._payloads.items():
            column = np.array(payloads.offset, np.uint64)
            column[column != ABSENT] += np.uint64(starts[field])
            payloads.offset = array("Q", column.tobytes())
        return WrittenShard(size, crc, self._payloads)

    def abort(self) -> None:
        for _, file in self._fields:
            file.abort()
        self._skeleton.unlink(missing_ok=True)

    def _write_skeleton(self) -> dict[str, int]:
        """The file without the payloads of large fields; returns where each field's data starts (0: it is empty)."""
        self._skeleton.unlink(missing_ok=True)
        starts = {}
        with _create(self._skeleton) as file:
            for field, gather in self._fields:
                size = gather.position - _DATA_START
                if field == self._pixels:
                    data = _contiguous(file, field, (len(self._labels), *self._side, 3))
                else:
                    data = _contiguous(_group(file, field), "data", (size,))
                starts[field] = data.get_offset() or 0
                if 0 < size < _SMALL_BYTES:
                    small = os.pread(gather.descriptor, size, _DATA_START)
                    data.write(h5py.h5s.ALL, h5py.h5s.ALL, np.frombuffer(small, np.uint8).reshape(data.shape))
            first, gather = self._fields[0]
            if gather.position - _DATA_START >= _SMALL_BYTES and starts[first] != _DATA_START:
                raise FormatError(
                    f"{self._path}: this HDF5 library put the first data set at byte {starts[first]}, expected "
                    f"{_DATA_START}; report it with the output of  python -c 'import h5py; print(h5py.version.info)'"
                )
            self._write_tables(file)
        return starts

    def _write_tables(self, file: Any) -> None:
        for field, names in self._names.items():
            if field == self._pixels:
                if len(names.build().blob):
                    _write_strings(file, f"{field}_name", names)
                continue
            group = file[field]
            group.create_dataset("offset", data=np.array(self._payloads[field].offset, np.uint64))
            group.create_dataset("length", data=np.array(self._payloads[field].length, np.uint64))
            if len(names.build().blob):
                _write_strings(group, "name", names)
        file.create_dataset("label", data=np.array(self._labels, np.int64))
        _write_strings(file, "key", self._keys)
        spec = self._spec
        file.attrs["format"] = _fixed("packer")
        file.attrs["version"] = _VERSION
        file.attrs["split"] = _fixed(spec.split)
        file.attrs["label_offset"] = spec.label_offset
        file.attrs["fields"] = _fixed_list(spec.fields)
        file.attrs["field_kinds"] = _fixed_list(spec.fields.values())
        classes = _fixed_list(spec.classes)
        if classes.nbytes < _ATTRIBUTE_BYTES:
            file.attrs["classes"] = classes
        else:
            file.create_dataset("classes", data=classes, compression="gzip", compression_opts=1)

    def _assemble(self, main: GatherFile, starts: dict[str, int]) -> tuple[int, int]:
        """Copy the skeleton's metadata and the spooled fields around the streamed bytes.

        Returns the CRC32C and the size of the whole file.
        """
        regions = sorted(
            (starts[field], file.position - _DATA_START, number, file)
            for number, (field, file) in enumerate(self._fields)
            if file.position - _DATA_START >= _SMALL_BYTES
        )
        crc = position = 0
        with open(self._skeleton, "rb") as skeleton:
            size = os.fstat(skeleton.fileno()).st_size
            os.ftruncate(main.descriptor, size)
            for start, length, number, file in regions:
                crc = _copy(skeleton.fileno(), position, main.descriptor, position, start - position, crc)
                if number == 0:
                    crc = crc32c_combine(crc, main.checksum.value(), length)
                else:
                    crc = _copy(file.descriptor, _DATA_START, main.descriptor, start, length, crc)
                position = start + length
            crc = _copy(skeleton.fileno(), position, main.descriptor, position, size - position, crc)
        return crc, size


def _create(path: Path) -> Any:
    """A new HDF5 file whose large objects are aligned to _DATA_START; readable by HDF5 1.8 and later."""
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_alignment(_SMALL_BYTES, _DATA_START)
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    access.set_libver_bounds(h5py.h5f.LIBVER_V18, h5py.h5f.LIBVER_LATEST)
    creation = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    creation.set_obj_track_times(False)  # of the root group: the same samples give the same bytes, today or tomorrow
    return h5py.File(h5py.h5f.create(os.fsencode(path), h5py.h5f.ACC_EXCL, creation, access))


def _group(file: Any, name: str) -> Any:
    """A group without times; create_group of h5py before 3.15 writes them."""
    creation, link = h5py.h5p.create(h5py.h5p.GROUP_CREATE), h5py.h5p.create(h5py.h5p.LINK_CREATE)
    creation.set_obj_track_times(False)
    link.set_char_encoding(h5py.h5t.CSET_ASCII if name.isascii() else h5py.h5t.CSET_UTF8)
    return h5py.Group(h5py.h5g.create(file.id, name.encode(), lcpl=link, gcpl=creation))


def _contiguous(group: Any, name: str, shape: tuple[int, ...]) -> Any:
    """A contiguous uint8 data set that is allocated at once and never filled."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.CONTIGUOUS)
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    plist.set_obj_track_times(False)
    return h5py.h5d.create(group.id, name.encode(), h5py.h5t.STD_U8LE, h5py.h5s.create_simple(shape), plist)


def _fixed(text: str) -> npt.NDArray[Any]:
    """A string of fixed length. Those of variable length lie in a global heap, and one flipped bit in its object
    sizes makes the HDF5 library loop for ever, so that `verify` would hang instead of naming the damage."""
    encoded = text.encode()
    return np.array(encoded, h5py.string_dtype("utf-8", len(encoded) or 1))


def _fixed_list(texts: Iterable[str]) -> npt.NDArray[Any]:
    encoded = [text.encode() for text in texts]
    return np.array(encoded, h5py.string_dtype("utf-8", max(map(len, encoded), default=0) or 1))


def _write_strings(group: Any, name: str, texts: NamesBuilder) -> None:
    column = texts.build()
    width = max(int(np.diff(column.offsets).max(initial=0)), 1)
    data = np.zeros(len(column), h5py.string_dtype("utf-8", width))
    for first in range(0, len(column), _BLOCK_TEXTS):
        data[first : first + _BLOCK_TEXTS] = [text.encode() for text in column[first : first + _BLOCK_TEXTS]]
    options: dict[str, Any] = {"compression": "gzip", "compression_opts": 1} if len(data) else {}
    group.create_dataset(name, data=data, dtype=data.dtype, **options)


def _copy(source: int, source_offset: int, target: int, target_offset: int, length: int, crc: int) -> int:
    """Copy bytes between descriptors and carry the CRC32C on."""
    while length > 0:
        block = os.pread(source, min(length, _COPY_BYTES), source_offset)
        if not block:
            raise FormatError("a temporary file of this conversion shrank while it was read")
        crc = crc32c(block, crc)
        done = 0
        while done < len(block):
            done += os.pwrite(target, memoryview(block)[done:], target_offset + done)
        source_offset, target_offset = source_offset + len(block), target_offset + len(block)
        length -= len(block)
    return crc


class Hdf5Format(Format):
    """HDF5 with flat data sets."""

    name = "hdf5"

    def shard_name(self, split: str, number: int, count: int) -> str:
        return f"{split}-{number:05d}-of-{count:05d}.h5"

    def open_writer(self, path: Path, spec: ShardSpec) -> Hdf5Writer:
        return Hdf5Writer(path, spec)

    def describe(self, path: Path) -> ShardSpec | None:
        with translated(path), _open(path) as file:
            return _describe(file, path)

    def locate(self, path: Path, options: LocateOptions) -> Iterator[Located]:
        with translated(path), _open(path) as file:
            spec = _describe(file, path)
            if spec is None or options.image_key:
                broken_links = refuse_other_files(file, path)
                left_out: list[tuple[str, str]] = []
                yield from locate_foreign(file, path, options, left_out)
                if options.lenient:
                    left_out += [(name, "a soft link that leads nowhere") for name in broken_links]
                    yield from (Located(name, NO_LABEL, {}, {}, left_out=reason) for name, reason in left_out)
            else:
                yield from _locate_ours(file, path, spec)

    def splits(self, path: Path, options: LocateOptions) -> tuple[str, ...]:
        with translated(path), _open(path) as file:
            refuse_other_files(file, path)
            return splits_of(file, path, options)

    @contextmanager
    def open_places(self, path: Path) -> Iterator[Hdf5Places]:
        with translated(path), _open(path, _CHUNK_CACHE_BYTES) as file:
            yield Hdf5Places(file, path)


def _open(path: Path, cache_bytes: int | None = None) -> Any:
    if not path.is_file():  # HDF5 would wait for ever at the end of a named pipe
        raise FormatError(f"{path}: cannot be opened: missing, or not a regular file")
    try:
        return h5py.File(path, "r", locking=False, rdcc_nbytes=cache_bytes)
    except OSError as error:
        raise FormatError(f"{path}: cannot be opened as HDF5, damaged or truncated: {error}") from error


def _describe(file: Any, path: Path) -> ShardSpec | None:
    attributes = file.attrs
    if "format" not in attributes or as_text(attributes["format"]) != "packer":
        return None
    refuse_other_files(file, path)
    if int(attributes["version"]) != _VERSION:
        raise FormatError(f"{path}: version {attributes['version']}, this packer reads {_VERSION}; upgrade packer")
    classes = attributes["classes"] if "classes" in attributes else file["classes"][:] if "classes" in file else []
    fields = dict(zip(map(as_text, attributes["fields"]), map(as_text, attributes["field_kinds"]), strict=True))
    if not set(fields.values()) <= set(FIELD_KINDS):
        raise FormatError(f"{path}: its fields are {fields!r:.80}, expected kinds of {', '.join(FIELD_KINDS)}")
    return ShardSpec(
        split=as_text(attributes["split"]),
        fields=fields,
        classes=tuple(map(as_text, classes)),
        label_offset=int(attributes["label_offset"]),
    )


def _locate_ours(file: Any, path: Path, spec: ShardSpec) -> Iterator[Located]:
    keys = read_strings(file["key"])
    labels = read_column(file["label"], len(keys), path)
    pixels = next((field for field, kind in spec.fields.items() if kind == PIXELS), "")
    places = {field: file[field] for field in spec.fields if field != pixels}
    ranges = {field: _field_ranges(group, field, len(keys), path) for field, group in places.items()}
    names = {field: read_strings(group["name"]) for field, group in places.items() if "name" in group}
    if pixels:
        yield from _locate_pixels(file, path, spec, (pixels, keys, labels.tolist(), ranges, names))
        return
    for i, key in enumerate(keys):
        label = int(labels[i])
        yield Located(
            key,
            label if label == NO_LABEL else label - spec.label_offset,
            {field: (int(o[i]), int(n[i])) for field, (o, n) in ranges.items() if int(o[i]) != ABSENT},
            {field: column[i] for field, column in names.items() if column[i]},
        )


def _locate_pixels(file: Any, path: Path, spec: ShardSpec, known: tuple[Any, ...]) -> Iterator[Located]:
    """The samples of a shard with raw pixels. known: the name of their field, and what is known of the others."""
    field, keys, labels, ranges, names = known
    data = file[field]
    if data.dtype != np.uint8 or data.ndim != 4 or data.shape[0] != len(keys) or data.shape[3] != 3:
        raise FormatError(
            f"{path}: /{field} is {data.dtype} {list(data.shape)}, expected uint8 [{len(keys)}, height, width, 3]"
        )
    start, (_, height, width, _) = flat_start(data, path, 4), data.shape
    size = height * width * 3
    table = f"{field}_name"
    named = read_strings(file[table]) if table in file else [""] * len(keys)
    for i, key in enumerate(keys):
        others = {name: (int(o[i]), int(n[i])) for name, (o, n) in ranges.items() if int(o[i]) != ABSENT}
        yield Located(
            key,
            labels[i] if labels[i] == NO_LABEL else labels[i] - spec.label_offset,
            {field: (start + i * size, size), **others},
            {name: column[i] for name, column in {field: named, **names}.items() if column[i]},
            pixels=(height, width),
        )


def _field_ranges(group: Any, field: str, n: int, path: Path) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    data = group["data"]
    start = flat_start(data, path)
    offset, length = read_column(group["offset"], n, path), read_column(group["length"], n, path)
    if offset.dtype != np.uint64 or length.dtype != np.uint64:
        raise FormatError(f"{path}: /{field}/offset and length are {offset.dtype} and {length.dtype}, expected uint64")
    present = offset != ABSENT
    size = np.uint64(data.shape[0])
    if bool((present & ((length > size) | (offset > size - np.minimum(length, size)))).any()):
        raise FormatError(f"{path}: /{field}/offset and length reach outside the {size} bytes of /{field}/data")
    return np.where(present, offset + np.uint64(start), np.uint64(ABSENT)), length


FORMAT = Hdf5Format()
