"""The index of a split: its columns while a shard is made, the part file of each shard, and the index folder.

part     <shard>.part      NumPy .npz (no pickle): the columns of `readers.table` for the samples of one shard,
                           except `shard`; and `meta`, the facts of the shard as UTF-8 JSON
index    <split>.index/    the parts of a split joined, column by column, in constant memory
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import zipfile
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from cache.checksums import crc32c, file_sha256
from cache.errors import DatasetError, FormatError, OutputError
from cache.files import Folder, open_regular, sync_file
from cache.messages import quoted
from packer.formats.base import PackedSample, Payloads, Window
from readers.headers import MEDIA, ImageHeader
from readers.layout import ColumnFile, ShardInfo, SplitInfo
from readers.table import ABSENT, COLUMNS, FIELD_COLUMNS, NO_LABEL, column_names, encode_name

__all__ = [
    "HEADER_COLUMNS",
    "LeftOut",
    "PartColumns",
    "PartMeta",
    "ShardColumns",
    "check_columns",
    "column_files",
    "damaged_columns",
    "header_values",
    "is_index",
    "load_meta",
    "load_part",
    "remove_index",
    "save_part",
    "write_index",
    "write_npy_header",
]

HEADER_COLUMNS = ("height", "width", "components", "process", "orientation", "media")
_MEDIA_CODE = {media: code for code, media in enumerate(MEDIA)}
_BLOCK_ROWS = 1024
_NO_HEADER = ImageHeader("", 0, 0, 0, 0, 1)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file that is not in the set: its name within the split, the reason, and the action (skipped, quarantined)."""

    name: str
    reason: str
    action: str


@dataclass(frozen=True, slots=True)
class PartMeta:
    """The facts of one finished shard.

    remarks: for each kind of remark in `packer.conversion.images`, the number of images and the name of the first.
    plan: fingerprint of the shard's plan, so that a late part of another plan is not mistaken for one of this plan.
    targets: dtype and shape of each field of this kind, as text.
    not_chosen: number of samples that had to be read to evaluate `where` and do not match it.
    asked: table columns that `where` uses; seen: columns that the samples have, those and others.

    Of adopted shards only (a shard that packer writes has the fields of its set):
    fields: the fields of any sample.
    unreadable: images without a readable header.
    class_names: label -> name.
    class_conflict: a label with two names; "" if none.
    max_label: the highest label.
    """

    shard: ShardInfo
    payload_bytes: int
    left_out: tuple[LeftOut, ...] = ()
    fields: tuple[str, ...] = ()
    unreadable: int = 0
    class_names: dict[str, str] = field(default_factory=dict)
    class_conflict: str = ""
    max_label: int = NO_LABEL
    remarks: dict[str, tuple[int, str]] = field(default_factory=dict)
    plan: str = ""
    not_chosen: int = 0
    targets: dict[str, str] = field(default_factory=dict)
    asked: tuple[str, ...] = ()
    seen: tuple[str, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> PartMeta:
        value = json.loads(text)
        left_out = tuple(LeftOut(**item) for item in value["left_out"])
        shard = ShardInfo(**value.pop("shard"))
        remarks = {kind: (int(count), str(first)) for kind, (count, first) in value.get("remarks", {}).items()}
        names = {name: tuple(value.get(name, ())) for name in ("fields", "asked", "seen")}
        return cls(**value | names | {"shard": shard, "left_out": left_out, "remarks": remarks})


class PartColumns(Protocol):
    """Columns of some samples of an index, by name; a string column consists of two, its blob and its offsets."""

    def __contains__(self, name: str) -> bool: ...
    def __getitem__(self, name: str) -> npt.NDArray[Any]: ...


class ShardColumns:
    """Collects the index columns of one shard, sample by sample, in about 100 bytes of memory per sample."""

    def __init__(self, fields: Iterable[str]) -> None:
        self._numbers = {name: array(np.dtype(COLUMNS[name]).char) for name in ("label", *HEADER_COLUMNS)}
        # Buffered, since columns grow faster by many rows at a time: label, header, key, names.
        self._rows: list[tuple[int, ImageHeader | None, str, tuple[str, ...]]] = []
        self._keys = _StringColumn()
        self._names: dict[str, _StringColumn] = {}
        for name in fields:
            self.add_field(name)

    def __len__(self) -> int:
        return len(self._keys.offsets) - 1 + len(self._rows)

    def add_field(self, name: str) -> None:
        """Add a field that no sample has so far."""
        self._extend()
        self._names[name] = _StringColumn(len(self))

    def add(self, sample: PackedSample) -> None:
        """Add a sample, ignoring its payloads; its names are in the order of the fields."""
        self._rows.append((sample.label, sample.header, sample.key, sample.names))
        if len(self._rows) >= _BLOCK_ROWS:
            self._extend()

    def _extend(self) -> None:
        if not self._rows:
            return
        labels, headers, keys, names = zip(*self._rows, strict=True)
        self._rows = []
        columns = (labels, *zip(*map(header_values, headers), strict=True))
        for numbers, values in zip(self._numbers.values(), columns, strict=True):
            numbers.extend(values)
        self._keys.extend(keys)
        for column, texts in zip(self._names.values(), zip(*names, strict=True), strict=True):
            column.extend(map(encode_name, texts, keys))

    def arrays(self, payloads: Mapping[str, Payloads]) -> dict[str, npt.NDArray[Any]]:
        """The columns, given the extents and checksums of each field's payloads."""
        self._extend()
        columns: dict[str, npt.NDArray[Any]] = {
            name: np.frombuffer(column, COLUMNS[name]) for name, column in self._numbers.items()
        }
        for name, strings in (("key", self._keys), *((f"{name}.name", names) for name, names in self._names.items())):
            columns[name] = np.frombuffer(strings.blob, np.uint8)
            columns[f"{name}.offset"] = np.frombuffer(strings.offsets, np.uint64)
        for name in self._names:
            for column, dtype in FIELD_COLUMNS.items():
                columns[f"{name}.{column}"] = np.array(getattr(payloads[name], column), dtype)
        return columns


class _StringColumn:
    """A blob of UTF-8 and its offsets, starting with `count` empty strings. Lone surrogates are an error."""

    __slots__ = ("blob", "offsets")

    def __init__(self, count: int = 0) -> None:
        self.blob, self.offsets = bytearray(), array("Q", bytes(8 * (count + 1)))

    def extend(self, texts: Iterable[str]) -> None:
        encoded = [text.encode() for text in texts]
        self.offsets.extend(itertools.accumulate(map(len, encoded), initial=self.offsets.pop()))
        self.blob += b"".join(encoded)


def header_values(header: ImageHeader | None) -> tuple[int, ...]:
    """The HEADER_COLUMNS of an image; None: no image, or one with an unreadable header."""
    header = header or _NO_HEADER
    return (*header[1:], _MEDIA_CODE[header[0]])


def save_part(path: Path, arrays: Mapping[str, npt.NDArray[Any]], meta: PartMeta) -> None:
    """Write a part atomically."""
    memory = io.BytesIO()
    columns: dict[str, Any] = {**arrays, "meta": np.frombuffer(meta.to_json().encode(), np.uint8)}
    np.savez(memory, **columns)
    with Folder(path.parent) as folder:
        folder.write(path.name, memory.getbuffer())


@contextmanager
def load_part(path: Path) -> Iterator[Any]:
    """Open a part: a mapping from names to columns, each read on access. Raises DatasetError."""
    with ExitStack() as opened:
        try:
            file = opened.enter_context(open_regular(path))
            part = np.load(file, allow_pickle=False)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise DatasetError(f"{path}: not a valid part of an index: {error}") from error
        if not isinstance(part, np.lib.npyio.NpzFile):
            raise DatasetError(f"{path}: not a valid part of an index: a single array")
        yield opened.enter_context(part)


def load_meta(path: Path) -> PartMeta:
    """The facts of the shard of a part. Raises DatasetError."""
    with load_part(path) as part:
        try:
            return PartMeta.from_json(part["meta"].tobytes().decode())
        except (KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
            raise DatasetError(f"{path}: its meta record cannot be read: {error}") from error


def write_index(
    place: Folder,
    name: str,
    parts: Sequence[Path | PartColumns],
    samples: Sequence[int],
    fields: Sequence[str],
    *,
    scratch: Folder,
    separate: Sequence[str] = (),
    numbers: Sequence[int] | None = None,
) -> dict[str, ColumnFile]:
    """Write every column of `readers.table` to the folder `name` in `place`, durably, replacing an index of that name.

    parts: in order, the part of one shard each, or columns from elsewhere, which contain their shard numbers.
    samples: number of samples of each part.
    scratch: a folder on the same filesystem, in which the index is made.
    separate: the fields that have separate shards.
    numbers: the shard number of each part; by default 0, 1, ….

    Returns size and CRC32C of every file. Raises OutputError if other files are in the way.
    """
    temporary = f"{name}.tmp"
    scratch.remove_tree(temporary)
    with scratch.folder(temporary, create=True) as folder:
        with ExitStack() as opened:
            writers = {
                name.removesuffix(".npy"): _ColumnWriter(opened.enter_context(folder.create(name)))
                for name in column_names(fields, separate)
            }
            _write_columns(
                writers, list(zip(parts, samples, numbers or range(len(parts)), strict=True)), fields, separate
            )
            written = {f"{name}.npy": writer.finish() for name, writer in writers.items()}
        folder.sync()
        again = column_files(folder.path, (name for name, file in written.items() if file is None))
        columns = {name: file or again[name] for name, file in sorted(written.items())}
    if not remove_index(place, name):
        raise OutputError(f"{place.path / name}: has other files than an index, and is in the way; move it elsewhere")
    scratch.rename(temporary, name, place)
    return columns


class _ColumnWriter:
    """Writes a one-dimensional .npy file from front to back, and computes its checksum."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._dtype, self._length = file, np.dtype("|u1"), -1
        self._crc, self._sha = 0, hashlib.sha256()
        self.bytes = 0  # without the header

    def begin(self, dtype: str, length: int = -1) -> None:
        """length: the final number of items, -1 if unknown."""
        self._dtype, self._length = np.dtype(dtype), length
        header = io.BytesIO()
        write_npy_header(header, dtype, max(0, length))
        self._write(header.getbuffer())

    def write(self, items: npt.NDArray[Any]) -> None:
        """Append items of the column's dtype."""
        data = np.ascontiguousarray(items, self._dtype).data.cast("B")
        self.bytes += len(data)
        self._write(data)

    def _write(self, data: memoryview) -> None:
        self._file.write(data)
        if self._length >= 0:
            self._crc = crc32c(data, self._crc)
            self._sha.update(data)

    def finish(self) -> ColumnFile | None:
        """Flush the file to the disk; None if its header was written last, so that it must be read again."""
        if self._length < 0:
            self._file.seek(0)
            write_npy_header(self._file, self._dtype.str, self.bytes // self._dtype.itemsize)
        sync_file(self._file)
        if self._length < 0:
            return None
        return ColumnFile(self._file.tell(), self._crc, self._sha.hexdigest())


def _write_columns(
    writers: Mapping[str, _ColumnWriter],
    parts: Sequence[tuple[Path | PartColumns, int, int]],
    fields: Sequence[str],
    separate: Sequence[str],
) -> None:
    """parts: each with its number of samples and its shard number."""
    total = sum(samples for _, samples, _ in parts)
    fixed = COLUMNS | {f"{name}.{column}": dtype for name in fields for column, dtype in FIELD_COLUMNS.items()}
    fixed |= {f"{name}.shard": COLUMNS["shard"] for name in separate}
    texts = ("key", *(f"{name}.name" for name in fields))
    for name, dtype in fixed.items():
        writers[name].begin(dtype, total)
    for name in texts:
        writers[name].begin("|u1")
        writers[f"{name}.offset"].begin("<u8", total + 1)
        writers[f"{name}.offset"].write(np.zeros(1, "<u8"))
    for source, count, number in parts:
        with load_part(source) if isinstance(source, Path) else nullcontext(source) as part:
            for name, dtype in fixed.items():
                if name in part:
                    column = part[name]
                else:  # the shard number, or a field that no sample of this shard has
                    is_shard = name == "shard" or name.endswith(".shard")
                    value = number if is_shard else ABSENT if name.endswith(".offset") else 0
                    column = np.full(count, value, dtype)
                writers[name].write(column)
            for name in texts:
                offsets = part[f"{name}.offset"][1:] if name in part else np.zeros(count, "<u8")
                writers[f"{name}.offset"].write(offsets + np.uint64(writers[name].bytes))
                if name in part:
                    writers[name].write(part[name])


def write_npy_header(file: BinaryIO, dtype: str, length: int) -> None:
    """Write the header of a .npy file; its size is the same for any length."""
    descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
    content = {"descr": descr, "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(file, content)


def column_files(folder: Path, names: Iterable[str]) -> dict[str, ColumnFile]:
    """Size and checksum of the files of an index, by name. Raises FormatError if one is missing or not a file."""
    columns = {}
    for name in sorted(names):
        with Window(folder / name) as window:
            columns[name] = ColumnFile(window.size, window.checksum(), file_sha256(folder / name))
    return columns


def remove_index(place: Folder, name: str) -> bool:
    """Remove the columns in the folder `name`, and the folder; False, without changes, if it has any other file.

    Raises PathError if it is not a folder.
    """
    if not place.kind(name):
        return True
    with place.folder(name) as folder:
        for column in folder.names():
            if _is_column(folder, column):
                folder.unlink(column)
    return place.remove_folder(name)


def is_index(place: Folder, name: str) -> bool:
    """Whether `remove_index` would remove the whole folder. Raises PathError if it is not a folder."""
    if not place.kind(name):
        return True
    with place.folder(name) as folder:
        return all(_is_column(folder, column) for column in folder.names())


def _is_column(folder: Folder, name: str) -> bool:
    return name.endswith(".npy") and folder.kind(name) in ("file", "link")


def check_columns(root: Path, split: SplitInfo) -> None:
    """Raise DatasetError if a file of a split's index does not match dataset.json. Sets without checksums pass."""
    for name, problem in damaged_columns(root, split):
        raise DatasetError(f"{root / split.index / name}: {problem}; rebuild it with  packer index {quoted(root)}")


def damaged_columns(root: Path, split: SplitInfo) -> Iterator[tuple[str, str]]:
    """(file, problem) for files that differ from dataset.json."""
    for name, known in split.columns.items():
        path = root / split.index / name
        try:
            with Window(path) as window:
                if window.size != known.bytes:
                    yield name, f"has {window.size} bytes, dataset.json says {known.bytes}"
                elif (crc := window.checksum()) != known.crc32c:
                    yield name, f"its CRC32C is {crc:08x}, dataset.json says {known.crc32c:08x}"
        except FormatError as error:
            yield name, str(error) if path.exists() else "missing index column"
