"""Write the index of a split: put the parts of its shards together, column by column, in constant memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from cache.errors import OutputError
from cache.files import Folder, sync_file
from packer.columns import load_part
from packer.formats.files import Window
from readers.index import ABSENT, COLUMNS, FIELD_COLUMNS, column_names
from readers.layout import ColumnFile

__all__ = ["column_files", "is_index", "remove_index", "write_index"]


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
