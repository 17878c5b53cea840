"""`packer.index_jpeg_rows`: note where the rows of a set's JPEGs begin, so that some of them can be read alone.

    for each image: Huffman codes ──► where rows begin ──► one strip is decoded and compared ──► its entry

The shards stay as they are; three files join each index (`readers.rows.entries`), and dataset.json names them last. An
image without an entry is read whole.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
from crc32c import crc32c

from cache.errors import BadSampleError, FormatError
from cache.files import Folder
from cache.messages import Silent, Watcher
from cache.node import usable_cpus
from packer.columns import column_files, write_npy_header
from packer.documents import write_dataset_info
from packer.output import Result, local_output, output_errors
from readers.coefficients.compiled import load_functions, unsupported_reason
from readers.coefficients.strips import note_rows
from readers.decode import Region, decode_image
from readers.decode.cpu import has_clean_header
from readers.decode.region import upright
from readers.headers import ImageHeader, parse_header, sniff
from readers.index import ROW_FILES
from readers.layout import DatasetInfo, read_dataset_info
from readers.packed import open_packed
from readers.reader import Reader
from readers.rows.entries import MAX_HEAD_BYTES, RowEntry, pack_entry
from readers.rows.strips import can_begin, find_strip, make_strip
from readers.sample import Buffer

__all__ = ["JpegRowsResult", "index_jpeg_rows", "row_entry"]

_AT_ONCE = 64
_MAX_BYTES = 1 << 29  # bits are counted in 32 bits
_COMPARED_ROWS = 16
_FIELD = "image"


@dataclass(frozen=True, slots=True)
class JpegRowsResult(Result):
    """path: the set. noted: the samples that have an entry, of `samples`. bytes: what the entries take.

    left_out: why the others have none, and how many.
    """

    path: Path
    samples: int
    noted: int
    bytes: int
    left_out: dict[str, int]


class _NoEntry(Exception):
    """Why an image has no entry."""


def index_jpeg_rows(
    path: str | os.PathLike[str], *, workers: int | None = None, watcher: Watcher | None = None
) -> JpegRowsResult:
    """Note where the rows of the JPEGs in a set begin; `Reader.read_rows` and remote readers use it.

    path: the set, on this machine. workers: threads, by default one per CPU.

    Interrupted, it leaves a set without such notes. Raises DatasetError, FormatError for a set without images,
    MissingExtraError without numba, UnsupportedCpuError, OutputError, and what reading raises.
    """
    root = local_output(path)
    info = read_dataset_info(root)
    if _FIELD not in info.fields:
        raise FormatError(f"{root}: has no field {_FIELD!r}, so there are no rows to note")
    unsupported_reason("noting where the rows of JPEGs begin")  # or why not, before anything is compiled
    load_functions()
    run = _Run(root, workers or usable_cpus(), watcher or Silent())
    with output_errors():
        return run.run(info)


def row_entry(data: Buffer) -> RowEntry:
    """The entry of an image. Raises ValueError, with the reason, where it has none."""
    try:
        return _entry(data)
    except (_NoEntry, BadSampleError) as error:
        raise ValueError(str(error)) from error


class _Run:
    def __init__(self, root: Path, workers: int, watcher: Watcher) -> None:
        self._root, self._workers, self._watcher = root, workers, watcher
        self._done = self._noted = self._bytes = 0
        self._left_out: Counter[str] = Counter()

    def run(self, info: DatasetInfo) -> JpegRowsResult:
        without = replace(
            info,
            splits={
                name: replace(split, columns={n: c for n, c in split.columns.items() if n not in ROW_FILES})
                for name, split in info.splits.items()
            },
        )
        samples = sum(split.samples for split in info.splits.values())
        self._watcher.begin(samples, 0, lambda: (self._done, 0))
        try:
            with Folder(self._root) as place:
                if without != info:  # their files are about to be replaced
                    write_dataset_info(place, without, scratch=place)
                splits = {}
                for name, split in without.splits.items():
                    with open_packed(self._root, name, verify=True) as reader, place.folder(split.index) as folder:
                        self._write(reader, folder)
                        files = column_files(folder.path, ROW_FILES)
                    splits[name] = replace(split, columns={**split.columns, **files})
                    self._bytes += sum(file.bytes for file in files.values())
                write_dataset_info(place, replace(without, splits=splits), scratch=place)
        finally:
            self._watcher.end()
        return JpegRowsResult(self._root, samples, self._noted, self._bytes, dict(self._left_out.most_common()))

    def _write(self, reader: Reader, folder: Folder) -> None:
        """The three files of a split."""
        offsets = np.zeros(len(reader) + 1, np.uint64)
        heads: dict[bytes, int] = {}
        with ExitStack() as opened:
            entries, places, all_heads = (opened.enter_context(folder.writing(name)) for name in ROW_FILES)
            for file in (entries, all_heads):
                write_npy_header(file, "|u1", 0)  # written again at the end, when the length is known
            checksums = reader.table.field_column(_FIELD, "crc32c")
            head_bytes = 0
            for number, found in enumerate(self._entries(reader)):
                offsets[number + 1] = offsets[number]
                if isinstance(found, str):
                    self._left_out[found] += 1
                    continue
                if found.head not in heads:
                    heads[found.head] = head_bytes
                    head_bytes += all_heads.write(found.head)
                packed = pack_entry(found, heads[found.head], int(checksums[number]))
                offsets[number + 1] += np.uint64(entries.write(packed))
                self._noted += 1
            write_npy_header(places, "<u8", len(offsets))
            places.write(offsets.astype("<u8").tobytes())
            _finish(entries, int(offsets[-1]))
            _finish(all_heads, head_bytes)

    def _entries(self, reader: Reader) -> Iterator[RowEntry | str]:
        """The entry of each sample, or why there is none."""
        with ThreadPoolExecutor(self._workers) as pool:
            waiting: deque[Future[RowEntry | str]] = deque()
            for number in range(len(reader)):
                if len(waiting) >= _AT_ONCE * self._workers:
                    yield self._take(waiting)
                waiting.append(pool.submit(_try, reader, number))
            while waiting:
                yield self._take(waiting)

    def _take(self, waiting: deque[Future[RowEntry | str]]) -> RowEntry | str:
        found = waiting.popleft().result()
        self._done += 1
        return found


def _try(reader: Reader, number: int) -> RowEntry | str:
    if not reader.has(number, _FIELD):
        return "it has no image"
    try:
        return _entry(reader.read(number))
    except _NoEntry as error:
        return str(error)
    except BadSampleError:
        return "it cannot be decoded"


def _entry(data: Buffer) -> RowEntry:
    if sniff(data) != "jpeg":
        raise _NoEntry("it is not a JPEG")
    if len(data) >= _MAX_BYTES:
        raise _NoEntry("it is too large")
    header = parse_header(data)
    notes = note_rows(data, header, has_clean_header)
    if notes is None:
        raise _NoEntry("it is progressive, has restarts or unusual colours, or is damaged")
    if len(notes.head) > MAX_HEAD_BYTES:
        raise _NoEntry("its tables are too large")
    view = np.frombuffer(data, np.uint8)
    byte, inner = np.divmod(notes.bits, 8)
    partial = np.where(inner > 0, view[np.minimum(byte, len(view) - 1)], 0).astype(np.uint8)
    sums = np.zeros(len(notes.bits), np.uint32)
    entry = RowEntry(notes.head, notes.bits.astype(np.uint32), sums, partial, notes.dc.astype(np.int16))
    whole, before, known = memoryview(data), 0, 0
    for row in range(len(sums)):
        behind = entry.behind(row)
        known = crc32c(whole[before:behind], known)
        sums[row], before = known, behind
    if not can_begin(entry, header.width):
        raise _NoEntry("its Huffman tables lack codes that a strip needs")
    _compare(data, entry, header)
    return entry


def _compare(data: Buffer, entry: RowEntry, header: ImageHeader) -> None:
    """Raise _NoEntry unless some rows in the middle have the pixels of the image as a strip, too."""
    size = (header.height, header.width)
    top = size[0] // 2
    box = Region(top, 0, min(_COMPARED_ROWS, size[0] - top), size[1])
    which = find_strip(entry, size, top, top + box.height)
    strip = make_strip(entry, data[which.start : which.stop], which, size)
    of_strip = decode_image(strip.data, box._replace(top=top - strip.first_row))
    if header.orientation == 1:
        whole = decode_image(data, box)
    else:  # a strip has none, so the pixels are turned back
        back = {6: 8, 8: 6}.get(header.orientation, header.orientation)
        whole = upright(decode_image(data), back)[top : top + box.height]
    if not np.array_equal(of_strip, whole):
        raise _NoEntry("its rows differ when they are decoded alone")


def _finish(file: BinaryIO, length: int) -> None:
    """Write the header of a column of bytes again, with its length."""
    file.seek(0)
    write_npy_header(file, "|u1", length)
    file.seek(0, os.SEEK_END)
