"""MXNet RecordIO: shards made by im2rec and `mxnet.recordio`, `x.rec` with the positions of its records in `x.idx`.

    record   u32le 0xced7230a · u32le cflag << 29 | length · data · zeros up to 4 bytes       (dmlc/recordio.h)
    cflag    0: whole; 1, 2, 3: the first, a middle and the last part of a record whose data contain the magic number
    data     u32le flag · f32le label · u64le id · u64le id2 · flag × f32le labels · image    (mxnet.recordio.IRHeader)
    x.idx    one line per record: its number, a tab, the position of its first byte

The key of a sample is the number of its record. A record in parts has no flat byte range, since the magic number was
removed from its data; it can be converted. The .idx is not needed, but one that differs from the .rec is an error.

InsightFace sets also have records without images. They are recognised by record 0 (face2rec2.py of InsightFace):

    0            labels: the number of the first record after the images · the number after the last record
    1 … n        an image with one label, or several, the first of which is its identity
    n + 1 …      an identity; labels: the number of its first image, and the number after its last
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from struct import Struct
from typing import Any

from cache.errors import BadSampleError, FormatError, NotFlatError
from cache.messages import quoted
from packer.formats.base import Located, LocateOptions, WalkedFormat, Window, key_by_number, without_offset
from readers.table import NO_LABEL

__all__ = ["FORMAT", "RecordIOFormat"]

_FRAME, _HEADER, _LABEL, _INSIGHTFACE_HEAD = Struct("<II"), Struct("<IfQQ"), Struct("<f"), Struct("<IfQQff")
_MAGIC = 0xCED7230A
_LENGTH_BITS = 29
_MAX_LABEL = 1 << 24  # above it a float32 cannot represent every whole number
_MAX_HEADER_BYTES = _HEADER.size + _LABEL.size
_MAX_INDEX_BYTES = 1 << 32


class RecordIOFormat(WalkedFormat):
    """RecordIO files of image records."""

    name = "recordio"

    def walk(self, window: Window, options: LocateOptions) -> Iterator[Located]:
        if options.image_key or options.label_key or options.extra_fields:
            raise FormatError(f"{window.path}: a RecordIO record has one image and one label, so no keys can be given")
        known = _positions(window)
        images = _insightface_images(window, known)
        number = position = count = 0
        while window.read_up_to(position, 1):
            if known is not None and position not in known:
                raise FormatError(
                    f"{window.path}: the record at byte {position} is not in {window.path.with_suffix('.idx').name}: "
                    f"one of the two is damaged, or of another file; move the .idx away to use the .rec alone"
                )
            parts = _parts(window, position)
            start, length = parts[0]
            if len(parts) == 1:
                data, size = window.read(start, min(length, _MAX_HEADER_BYTES)), length
            elif options.lenient:
                data = _joined(window, parts)
                size = len(data)
            else:
                raise NotFlatError(
                    f"{window.path}: the record at byte {position} is in {len(parts)} parts, since its data has the "
                    f"magic number in them, so it is not one byte range; run  packer convert {quoted(window.path)} "
                    f"--to tfrecord|tar|hdf5"
                )
            where = f"{window.path}: the record at byte {position}"
            label, header = _header(data, size, where, is_insightface=images is not None)
            if images is None or header < size:
                count += 1
                sample = Located(key_by_number(window.path, number), without_offset(label, options), {}, {})
                if len(parts) == 1:
                    yield sample._replace(ranges={"image": (start + header, size - header)})
                else:
                    yield sample._replace(place=(position, header), bytes=size - header)
            number, position = number + 1, _end(parts)
        if known is not None and len(known) != number:
            raise FormatError(
                f"{window.path}: {window.path.with_suffix('.idx').name} names {len(known)} records, the file has "
                f"{number}: truncated, or of another file"
            )
        if images is not None and images != count and images < _MAX_LABEL:
            raise FormatError(
                f"{window.path}: record 0 announces {images} images, the file has {count}: truncated, or damaged"
            )

    @contextmanager
    def open_places(self, path: Path) -> Iterator[_PartsReader]:
        with Window(path) as window:
            yield _PartsReader(window)


class _PartsReader:
    """Reads records in parts. Place: (position of the record, length of its header)."""

    def __init__(self, window: Window) -> None:
        self._window = window

    def read(self, place: tuple[Any, ...]) -> bytes:
        position, header = place
        try:
            return _joined(self._window, _parts(self._window, position))[header:]
        except FormatError as error:
            raise BadSampleError(f"{error} (a record in parts cannot be read from a compressed file)") from error


def _parts(window: Window, position: int) -> list[tuple[int, int]]:
    """(start of the data, its length) of every part of the record at `position`."""
    start, length, cflag = _frame(window, position)
    parts = [(start, length)]
    if cflag in (2, 3):
        raise FormatError(f"{window.path}: the record at byte {position} has no first part: damaged")
    while cflag in (1, 2):
        start, length, cflag = _frame(window, _end(parts))
        if cflag not in (2, 3):
            raise FormatError(f"{window.path}: the record at byte {position} has no last part: damaged")
        parts.append((start, length))
    return parts


def _end(parts: list[tuple[int, int]]) -> int:
    """The position of the next record."""
    start, length = parts[-1]
    return start + length + -length % 4


def _joined(window: Window, parts: list[tuple[int, int]]) -> bytes:
    """The data of a record in parts, with the removed magic numbers restored between them."""
    return _MAGIC.to_bytes(4, "little").join(window.read(start, length) for start, length in parts)


def _frame(window: Window, position: int) -> tuple[int, int, int]:
    """(start of the data, its length, cflag) of the part at `position`."""
    head = window.read_up_to(position, _FRAME.size)
    if len(head) < _FRAME.size:
        raise FormatError(f"{window.path}: ends inside the record at byte {position}: truncated?")
    magic, word = _FRAME.unpack(head)
    if magic != _MAGIC:
        raise FormatError(f"{window.path}: no record at byte {position}: damaged, or not RecordIO")
    cflag, length, start = word >> _LENGTH_BITS, word & (1 << _LENGTH_BITS) - 1, position + _FRAME.size
    if cflag > 3:
        raise FormatError(f"{window.path}: the record at byte {position} has the flag {cflag}, expected 0 to 3")
    if start + length > window.size:
        raise FormatError(
            f"{window.path}: the record at byte {position} has {length} bytes, but the file ends at {window.size}: "
            f"truncated?"
        )
    return start, length, cflag


def _insightface_images(window: Window, known: dict[int, int] | None) -> int | None:
    """The number of images stated by record 0 of an InsightFace set; None for other sets.

    Without an .idx, record 0 is the first record.
    """
    position = 0 if known is None else next((place for place, number in known.items() if number == 0), None)
    if position is None or not window.read_up_to(position, 1):
        return None
    parts = _parts(window, position)
    start, length = parts[0]
    if len(parts) > 1 or length != _INSIGHTFACE_HEAD.size:
        return None
    labels, _, number, _, behind_images, behind_all = _INSIGHTFACE_HEAD.unpack(window.read(start, length))
    if (labels, number) != (2, 0) or not 1 <= behind_images <= behind_all < float("inf"):
        return None
    return int(behind_images) - 1


def _header(data: bytes, size: int, where: str, *, is_insightface: bool) -> tuple[int, int]:
    """(label, bytes of the header) of a record of `size` bytes that begins with `data`."""
    if size < _HEADER.size:
        raise FormatError(f"{where} has {size} bytes, too few for the header of an image record")
    flag, value, _, _ = _HEADER.unpack_from(data)
    header = _HEADER.size + 4 * flag
    if header > size:
        raise FormatError(f"{where} claims {flag} labels, but has {size} bytes: damaged, or not an image record")
    if is_insightface and header == size:
        return NO_LABEL, header
    if flag > 1 and not is_insightface:
        raise FormatError(
            f"{where} has {flag} labels, expected one: images of several (such as boxes) are not read; a set of "
            f"InsightFace is, with its .idx"
        )
    if flag:
        value = _LABEL.unpack_from(data, _HEADER.size)[0]
    if not -_MAX_LABEL <= value <= _MAX_LABEL or value != int(value):
        raise FormatError(f"{where} has the label {value}, expected a whole number")
    return int(value), header


def _positions(records: Window) -> dict[int, int] | None:
    """The numbers of the records by position, from the .idx of a .rec; None without an .idx."""
    index = records.path.with_suffix(".idx")
    if not index.is_file():
        return None
    with Window(index) as window:
        if window.size > _MAX_INDEX_BYTES:
            raise FormatError(f"{index}: {window.size} bytes are too many for an index of records")
        lines = window.read(0, window.size).splitlines()
    positions: dict[int, int] = {}
    for number, line in enumerate(lines, start=1):
        columns = line.split(b"\t")
        if len(columns) != 2 or not all(column.isdigit() and len(column) < 20 for column in columns):
            raise FormatError(f"{index}: line {number} is {line[:40]!r}, expected a number, a tab and a position")
        positions[int(columns[1])] = int(columns[0])
        if int(columns[1]) >= records.size:
            raise FormatError(f"{index}: line {number} names byte {int(columns[1])}, but the .rec has {records.size}")
    if len(positions) != len(lines):
        raise FormatError(f"{index}: two lines name one position: damaged")
    return positions


FORMAT = RecordIOFormat()
