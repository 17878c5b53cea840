"""The index columns of one shard while it is made, and their file: a part.

A part is a NumPy .npz (no pickle) with the columns of `readers.index` for the samples of one shard, except `shard`,
and `meta`, the shard's own facts as UTF-8 JSON. Writing the index of a split is putting its parts together.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt

from cache.errors import DatasetError, OutputError
from cache.files import Folder, open_regular, sync_file
from packer.formats.base import PackedSample, Payloads
from packer.formats.window import Window
from readers.headers import MEDIA, ImageHeader
from readers.index import ABSENT, COLUMNS, FIELD_COLUMNS, column_names, encode_name
from readers.layout import ColumnFile, ShardInfo
from readers.sample import NO_LABEL
from readers.strings import Strings

__all__ = [
    "LeftOut",
    "PartMeta",
    "ShardColumns",
    "column_files",
    "header_row",
    "is_index",
    "load_meta",
    "load_part",
    "remove_index",
    "save_part",
    "string_columns",
    "write_index",
]

_HEADER_COLUMNS = ("height", "width", "components", "process", "orientation", "media")
_MEDIA_CODE = {media: code for code, media in enumerate(MEDIA)}
_BLOCK_SAMPLES = 4096
_Row: TypeAlias = tuple[str, int, tuple[str, ...], ImageHeader | None]  # key, label, file names, header
_NO_HEADER = ImageHeader("", 0, 0, 0, 0, 1)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file that is not in the set: its name within the split, why, and what was done (skipped, quarantined)."""

    name: str
    reason: str
    action: str


@dataclass(frozen=True, slots=True)
class PartMeta:
    """The facts of one finished shard.

    fields, unreadable (images without a readable header), class_names (label -> name), class_conflict (a label with two
    names, "" for none) and max_label are those of a shard that was adopted; a shard we wrote has the fields of its set.
    remarks: how many images each of the remarks of `packer.conversion.images` is about, and the name of the first.
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

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> PartMeta:
        value = json.loads(text)
        left_out = tuple(LeftOut(**item) for item in value["left_out"])
        shard = ShardInfo(**value.pop("shard"))
        remarks = {kind: (int(count), str(first)) for kind, (count, first) in value.get("remarks", {}).items()}
        fields = tuple(value["fields"])
        return cls(**value | {"shard": shard, "left_out": left_out, "fields": fields, "remarks": remarks})


class ShardColumns:
    """Collects the index columns of one shard, sample by sample; some 100 bytes of memory for each."""

    def __init__(self, fields: Sequence[str]) -> None:
        self._fields = tuple(fields)
        self._blocks: list[dict[str, npt.NDArray[Any]]] = []
        self._samples: list[_Row] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, sample: PackedSample) -> None:
        """One sample, whose payloads are not looked at."""
        self._samples.append((sample.key, sample.label, sample.names, sample.header))
        self._count += 1
        if len(self._samples) == _BLOCK_SAMPLES:
            self._compact()

    def arrays(self, payloads: Mapping[str, Payloads]) -> dict[str, npt.NDArray[Any]]:
        """The columns, given where the payloads of each field lie."""
        self._compact()
        blocks = self._blocks or [self._block([])]
        found = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
        for name in ("key", *(f"{field_name}.name" for field_name in self._fields)):
            found[f"{name}.offset"] = _joined_offsets([block[f"{name}.offset"] for block in blocks])
        for name in self._fields:
            for column, dtype in FIELD_COLUMNS.items():
                found[f"{name}.{column}"] = np.array(getattr(payloads[name], column), dtype)
        return found

    def _compact(self) -> None:
        """Turn what was collected into arrays, which take a tenth of the memory of Python objects."""
        if self._samples:
            self._blocks.append(self._block(self._samples))
            self._samples = []

    def _block(self, samples: Sequence[_Row]) -> dict[str, npt.NDArray[Any]]:
        keys = [key for key, _, _, _ in samples]
        found = {"label": np.array([label for _, label, _, _ in samples], COLUMNS["label"])}
        headers = [header or _NO_HEADER for _, _, _, header in samples]
        media, height, width, components, process, orientation = zip(*headers, strict=True) if headers else ((),) * 6
        codes = [_MEDIA_CODE[name] for name in media]
        values = (height, width, components, process, orientation, codes)
        for name, column in zip(_HEADER_COLUMNS, values, strict=True):
            found[name] = np.array(column, COLUMNS[name])
        found |= string_columns("key", keys)
        for number, name in enumerate(self._fields):
            names = [encode_name(names[number], key) for key, _, names, _ in samples]
            found |= string_columns(f"{name}.name", names)
        return found


def header_row(header: ImageHeader | None) -> dict[str, int]:
    """What the header columns hold of an image; None: of no image, or one whose header cannot be read."""
    media, *values = header or _NO_HEADER
    return dict(zip(_HEADER_COLUMNS, (*values, _MEDIA_CODE[media]), strict=True))


def _joined_offsets(parts: Sequence[npt.NDArray[np.uint64]]) -> npt.NDArray[np.uint64]:
    """The offsets of string columns put one behind the other."""
    start = np.zeros(1, np.uint64)
    joined = [start]
    for offsets in parts:
        joined.append(offsets[1:] + start)
        start = start + offsets[-1]
    return np.concatenate(joined)


def string_columns(name: str, strings: Iterable[str]) -> dict[str, npt.NDArray[Any]]:
    """The two columns of a string column."""
    column = Strings.of(strings)
    return {name: column.blob, f"{name}.offset": column.offsets}


def save_part(path: Path, arrays: dict[str, npt.NDArray[Any]], meta: PartMeta) -> None:
    """Write a part: it appears whole."""
    memory = io.BytesIO()
    columns: dict[str, Any] = {**arrays, "meta": np.frombuffer(meta.to_json().encode(), np.uint8)}
    np.savez(memory, **columns)
    with Folder(path.parent) as folder:
        folder.write(path.name, memory.getbuffer())


@contextmanager
def load_part(path: Path) -> Iterator[Any]:
    """An open part: a mapping from column to array, which reads a column when asked. Raises DatasetError."""
    try:
        file = open_regular(path)
    except OSError as error:
        raise DatasetError(f"{path}: not the part of an index it should be: {error}") from error
    with file:
        try:
            part = np.load(file, allow_pickle=False)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise DatasetError(f"{path}: not the part of an index it should be: {error}") from error
        if not isinstance(part, np.lib.npyio.NpzFile):
            raise DatasetError(f"{path}: not the part of an index it should be: a single array")
        with part:
            yield part


def load_meta(path: Path) -> PartMeta:
    """The facts of the shard a part belongs to. Raises DatasetError."""
    with load_part(path) as part:
        try:
            return PartMeta.from_json(part["meta"].tobytes().decode())
        except (KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
            raise DatasetError(f"{path}: its meta record cannot be read: {error}") from error


def write_index(
    place: Folder,
    name: str,
    parts: Sequence[Path],
    samples: Sequence[int],
    fields: Sequence[str],
    *,
    scratch: Folder,
) -> dict[str, ColumnFile]:
    """Write every column of `readers.index` to the folder `name` in `place`, with everything on the disk at the end.

    An index of that name is replaced. parts: one per shard, in order; samples: how many each has. scratch: a folder
    of the same filesystem, where the index is made. Returns size and CRC32C of
    every file. Raises OutputError where other files are in the way.
    """
    temporary = f"{name}.tmp"
    scratch.remove_tree(temporary)
    fixed = {name: dtype for name, dtype in COLUMNS.items() if name != "shard"}
    fixed |= {f"{field}.{name}": dtype for field in fields for name, dtype in FIELD_COLUMNS.items()}
    strings = ["key", *(f"{field}.name" for field in fields)]
    with scratch.folder(temporary, create=True) as folder:
        files = _Files(folder)
        try:
            _write_parts(files, parts, samples, fixed, strings)
            files.sync()
        finally:
            files.close()
        folder.sync()
        columns = column_files(folder.path, column_names(fields))
    if not remove_index(place, name):
        raise OutputError(f"{place.path / name}: holds other things than an index and is in the way; move it elsewhere")
    scratch.rename(temporary, name, place)
    return columns


def column_files(folder: Path, names: Iterable[str]) -> dict[str, ColumnFile]:
    """Size and CRC32C of the files of an index, by name. Raises FormatError for one that is missing or no file."""
    found = {}
    for name in sorted(names):
        with Window(folder / name) as window:
            found[name] = ColumnFile(window.size, window.checksum())
    return found


def remove_index(place: Folder, name: str) -> bool:
    """Remove the columns in the folder `name`, and the folder; False where something else in it stays.

    Raises PathError where it is no folder.
    """
    if not place.kind(name):
        return True
    with place.folder(name) as folder:
        for column in folder.names():
            if _is_column(folder, column):
                folder.unlink(column)
    return place.remove_folder(name)


def is_index(place: Folder, name: str) -> bool:
    """Whether `remove_index` would remove all of it. Raises PathError where it is no folder."""
    if not place.kind(name):
        return True
    with place.folder(name) as folder:
        return all(_is_column(folder, column) for column in folder.names())


def _is_column(folder: Folder, name: str) -> bool:
    return name.endswith(".npy") and folder.kind(name) in ("file", "link")


def _write_parts(
    files: _Files, parts: Sequence[Path], samples: Sequence[int], fixed: dict[str, str], strings: list[str]
) -> None:
    total = sum(samples)
    for name, dtype in {"shard": COLUMNS["shard"], **fixed}.items():
        files.start(name, dtype, total)
    blob_bytes = dict.fromkeys(strings, 0)
    for name in strings:
        files.start(name, "|u1", 0)  # how long the blob is shows at the end
        files.start(f"{name}.offset", "<u8", total + 1)
        files.add(f"{name}.offset", np.zeros(1, "<u8"))
    for number, (path, count) in enumerate(zip(parts, samples, strict=True)):
        files.add("shard", np.full(count, number, COLUMNS["shard"]))
        with load_part(path) as part:
            for name, dtype in fixed.items():
                files.add(name, part[name] if name in part else _absent(name, dtype, count))
            for name in strings:
                if name not in part:  # no sample of this shard has the field
                    files.add(f"{name}.offset", np.full(count, blob_bytes[name], "<u8"))
                    continue
                files.add(name, part[name])
                offsets = part[f"{name}.offset"]
                files.add(f"{name}.offset", offsets[1:] + np.uint64(blob_bytes[name]))
                blob_bytes[name] += int(offsets[-1])
    for name, size in blob_bytes.items():
        files.restart(name, "|u1", size)


def _absent(name: str, dtype: str, count: int) -> Any:
    """A field column of a shard in which no sample has the field."""
    return np.full(count, ABSENT if name.endswith(".offset") else 0, dtype)


class _Files:
    """The open column files."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._files: dict[str, BinaryIO] = {}

    def start(self, name: str, dtype: str, length: int) -> None:
        self._files[name] = self._folder.create(f"{name}.npy")
        self._header(name, dtype, length)

    def restart(self, name: str, dtype: str, length: int) -> None:
        """Write the header again, now that the length is known; it takes the same place for any length."""
        self._files[name].seek(0)
        self._header(name, dtype, length)

    def _header(self, name: str, dtype: str, length: int) -> None:
        content = {
            "descr": np.lib.format.dtype_to_descr(np.dtype(dtype)),
            "fortran_order": False,
            "shape": (length,),
        }
        np.lib.format.write_array_header_1_0(self._files[name], content)

    def add(self, name: str, array: Any) -> None:
        self._files[name].write(np.ascontiguousarray(array).data)

    def sync(self) -> None:
        """Have all of them on the disk."""
        for file in self._files.values():
            sync_file(file)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
