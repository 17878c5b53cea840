"""Rows of a listing as bytes, without pickle: what a worker of another machine, or of another day, needs to pack them.

    uint32      bytes of the header
    header      JSON: {"root": folder of the split, "columns": [[name, dtype, numbers], …]}
    columns     one after the other, little-endian, as the header has them

    folders, folders.offset    strings (`readers.strings`): folders of the files, with a "/" at the end; "" the root
    folder                     int32 [k]   which of them a file is in
    names, names.offset        strings: names of the files in their folders
    bytes, stamps, labels      int64 [k]
    whole                      uint8 [k]   1: the key is the name with its suffix

A block is not trusted: names and folders lead nowhere but below the root of the source, and numbers are in bounds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cache.errors import DatasetError
from packer.sources.base import SplitListing
from packer.sources.folder import TreeListing
from readers.strings import Names, Strings
from readers.tree import Rows, TreeFiles, TreeSplit

__all__ = ["can_save", "decode_rows", "encode_rows"]

_COLUMNS = {
    "folders": "|u1",
    "folders.offset": "<u8",
    "folder": "<i4",
    "names": "|u1",
    "names.offset": "<u8",
    "bytes": "<i8",
    "stamps": "<i8",
    "labels": "<i8",
    "whole": "|u1",
}
_MAX_HEADER_BYTES = 1 << 16
_SLASH, _DOT = 47, 46


def can_save(listing: SplitListing) -> bool:
    """Whether the rows of a listing can be encoded: those of a tree of files can."""
    return isinstance(listing, TreeListing)


def encode_rows(listing: SplitListing, rows: Rows) -> bytes:
    """Some rows of a listing that `can_save`."""
    assert isinstance(listing, TreeListing)
    indices = np.arange(rows.start, rows.stop, rows.step) if isinstance(rows, range) else rows
    folders, folder, names, facts = listing.part.files.take(rows).compact()
    paths = Names.of(folders)
    found: dict[str, npt.NDArray[Any]] = {
        "folders": paths.blob,
        "folders.offset": paths.offsets,
        "folder": folder,
        "names": names.blob,
        "names.offset": names.offsets,
        "bytes": facts[:, 0],
        "stamps": facts[:, 1],
        "labels": listing.labels[indices],
        "whole": listing.whole[indices],
    }
    columns = {name: np.ascontiguousarray(found[name], dtype) for name, dtype in _COLUMNS.items()}
    shapes = [[name, _COLUMNS[name], len(column)] for name, column in columns.items()]
    header = json.dumps({"root": listing.root, "columns": shapes}).encode()
    return b"".join((len(header).to_bytes(4, "little"), header, *(column.data for column in columns.values())))


def decode_rows(data: bytes, classes: int, stamped: bool = True) -> TreeListing:
    """The listing of the rows that `encode_rows` gave. Raises DatasetError for a block that is not one.

    classes: how many the set has. stamped: see `TreeListing`.
    """
    try:
        return _decode(memoryview(data), classes, stamped)
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError) as error:
        raise DatasetError(f"is not a block of rows: {error}") from error


def _decode(data: memoryview, classes: int, stamped: bool) -> TreeListing:
    size = int.from_bytes(data[:4], "little")
    if size > _MAX_HEADER_BYTES:
        raise ValueError(f"its header has {size:,} bytes")
    header, at, columns = json.loads(bytes(data[4 : 4 + size])), 4 + size, {}
    for (name, dtype), (found, kind, count) in zip(_COLUMNS.items(), header["columns"], strict=True):
        if (found, kind) != (name, dtype) or not 0 <= count <= len(data):
            raise ValueError(f"column {found!r:.80} of {kind!r:.20}, expected {name} of {dtype}")
        columns[name] = np.frombuffer(data, dtype, count, at)
        at += columns[name].nbytes
    root, count = header["root"], len(columns["folder"])
    folders = list(Names(columns["folders"], columns["folders.offset"]))
    names = Names(columns["names"], columns["names.offset"])
    if at != len(data) or any(len(columns[name]) != count for name in ("bytes", "stamps", "labels", "whole")):
        raise ValueError("its columns have different lengths")
    _check_bounds("folder", columns["folder"], 0, len(folders))
    _check_bounds("labels", columns["labels"], -1, classes)
    _check_names(names, count)
    skip = f"{root}/" if root else ""
    if not isinstance(root, str) or not all(path.startswith(skip) and _is_folder(path) for path in folders):
        raise ValueError("a folder leads out of that of the source")
    facts = np.zeros((count, 3), np.int64)
    facts[:, 0], facts[:, 1] = columns["bytes"], columns["stamps"]
    part = TreeSplit(root, TreeFiles(folders, columns["folder"], names, facts), columns["labels"].astype(np.int32))
    return TreeListing(part, columns["whole"] != 0, stamped)


def _check_bounds(name: str, numbers: npt.NDArray[Any], first: int, stop: int) -> None:
    if len(numbers) and not first <= int(numbers.min()) <= int(numbers.max()) < stop:
        raise ValueError(f"{name}: a number is outside {first} … {stop - 1}")


def _check_names(names: Strings, count: int) -> None:
    """Names in a folder are not hidden, as the walk leaves them, so none is ".."."""
    starts, stops = names.offsets[:-1], names.offsets[1:]
    if len(names) != count or bool((starts >= stops).any()):
        raise ValueError("a name is empty")
    if bool((names.blob == _SLASH).any() or (names.blob == 0).any() or (names.blob[starts] == _DOT).any()):
        raise ValueError("a name is not one of a file in its folder")


def _is_folder(path: str) -> bool:
    """Whether it is "", or plain names that each end with a "/"."""
    parts: Sequence[str] = path.split("/")
    return "\0" not in path and not parts[-1] and all(part and part[0] != "." for part in parts[:-1])
