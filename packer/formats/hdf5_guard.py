"""HDF5 files that others made: one file is read, and no other; no more memory is taken than the file can fill.

An HDF5 file may say that a part of it lies elsewhere: behind an external link, in the raw files of a data set with
external storage, or in the sources of a virtual data set. HDF5 opens these as soon as it is asked for a shape or a
value, whoever wrote their names, and waits for ever where one is a named pipe. So links and creation properties,
which lie in the file itself, are looked at first, and such a file is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from packer.formats.hdf5_flat import as_text
from readers.errors import FormatError, NotFlatError, PackerError

__all__ = ["DAMAGED", "check_claim", "check_data_set", "read_table", "refuse_other_files", "translated"]

# What h5py raises over a damaged file depends on which byte is damaged; all of it means the same.
DAMAGED = (
    *(ArithmeticError, AssertionError, AttributeError, BufferError, EOFError, LookupError, MemoryError),
    *(OSError, RuntimeError, SystemError, TypeError, ValueError),
)
_MAX_RATIO = 1032  # of deflate, the best that bytes which are not all alike are packed
_ALWAYS_FINE_BYTES = 64 << 20
_MAX_VALUE_BYTES = 1 << 31


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Whatever h5py raises over the file at `path` becomes a FormatError that names it."""
    try:
        yield
    except PackerError:
        raise
    except MemoryError as error:
        raise FormatError(f"{path}: needs more memory than there is; it may claim more data than it holds") from error
    except DAMAGED as error:
        raise FormatError(
            f"{path}: HDF5 cannot read it, damaged or truncated: {error or type(error).__name__}"
        ) from error


def refuse_other_files(file: Any, path: Path) -> list[str]:
    """Raise NotFlatError where anything in an open file lies in another one; nothing of that is opened.

    Returns the names of soft links that lead nowhere; one that leads back to itself is an error.
    """
    soft, external, strange = [], [], []

    def see_link(name: bytes, info: Any) -> None:
        if info.type == h5py.h5l.TYPE_SOFT:
            soft.append(as_text(name))
        elif info.type == h5py.h5l.TYPE_EXTERNAL:
            external.append(name)
        elif info.type != h5py.h5l.TYPE_HARD:
            strange.append(as_text(name))

    # Nothing may be raised, nor asked, while HDF5 itself is walking.
    file.id.links.visit(see_link, info=True)
    if external:
        other, inside = map(as_text, file.id.links.get_val(external[0]))
        raise NotFlatError(
            f"{path}: /{as_text(external[0])} is a link into another file, {other!r} ({inside}); only what lies "
            f"in a file itself is read: name that file instead, or put all into one file with  "
            f"h5repack --merge {path} NEW.h5"
        )
    if strange:
        raise NotFlatError(f"{path}: /{strange[0]} is a link of a kind that only other programs know")
    found = file.visititems(lambda _, item: _elsewhere(item, path) if isinstance(item, h5py.Dataset) else None)
    if found:
        raise NotFlatError(found)
    return [name for name in soft if _leads_nowhere(file, name, path)]


def _leads_nowhere(file: Any, name: str, path: Path) -> bool:
    try:
        return file.get(name) is None
    except RuntimeError as error:
        raise FormatError(f"{path}: /{name} is a soft link that leads back to itself") from error


def check_data_set(data: Any, path: Path) -> None:
    """Raise NotFlatError where the bytes of a data set lie in other files. Does not ask for its shape."""
    found = _elsewhere(data, path)
    if found:
        raise NotFlatError(found)


def _elsewhere(data: Any, path: Path) -> str | None:
    """What to say of a data set whose bytes lie in other files."""
    properties = data.id.get_create_plist()
    if properties.get_layout() == h5py.h5d.VIRTUAL:
        where = "is a virtual data set, whose bytes lie in other files"
    elif properties.get_external_count():
        where = f"has its bytes in an external file, {as_text(properties.get_external(0)[0])!r}"
    else:
        return None
    return (
        f"{path}: {data.name} {where}; only what lies in a file itself is read: put all into one file with  "
        f"h5repack -l CONTI {path} NEW.h5"
    )


def check_claim(data: Any, path: Path, count: int = 1) -> None:
    """Raise FormatError where the values of a data set (or 1 of `count`) are larger than what is stored can be.

    A data set may claim any size; what was never written is read as zeros, and takes memory as if it had been.
    """
    size = data.size * data.dtype.itemsize
    stored = data.id.get_storage_size()
    if size > _ALWAYS_FINE_BYTES and size > _MAX_RATIO * stored:
        raise FormatError(
            f"{path}: {data.name} claims {size:,} bytes, but {stored:,} are stored: damaged, or never written"
        )
    if size // max(1, count) > _MAX_VALUE_BYTES:
        raise FormatError(
            f"{path}: {data.name} has values of {size // count:,} bytes, expected at most {_MAX_VALUE_BYTES:,}"
        )


def read_table(data: Any, path: Path) -> npt.NDArray[Any]:
    """All values of a small data set: numbers or strings."""
    check_claim(data, path)
    return np.asarray(data[:])
