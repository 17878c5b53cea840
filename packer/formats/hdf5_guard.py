"""HDF5 files from elsewhere: no other file is opened, and no more memory is taken than the file can fill.

An HDF5 file may say that a part of it is elsewhere: behind an external link, in the raw files of a data set with
external storage, or in the sources of a virtual data set. HDF5 opens these as soon as it is asked for a shape or a
value, and waits for ever where one is a named pipe. So links and creation properties, which are in the file itself,
are examined first, and such a file is refused. The rest of the module finds which data sets are one flat byte range,
and reads the small tables in their groups and the images that are not flat.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError, FormatError, NotFlatError, PackerError
from cache.messages import quoted
from packer.formats.base import png_of

__all__ = [
    "Hdf5Places",
    "as_text",
    "check_claim",
    "flat_start",
    "not_flat",
    "read_column",
    "read_strings",
    "read_table",
    "refuse_other_files",
    "translated",
]

# What h5py raises over a damaged file depends on which byte is damaged; all of it means the same.
_DAMAGED = (
    *(ArithmeticError, AssertionError, AttributeError, BufferError, EOFError, LookupError, MemoryError),
    *(OSError, RuntimeError, SystemError, TypeError, ValueError),
)
_MAX_RATIO = 1032  # of deflate, the best that bytes which are not all alike are packed
_ALWAYS_FINE_BYTES = 64 << 20
_MAX_VALUE_BYTES = 1 << 31


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn what h5py raises for the file at `path` into a FormatError that names it."""
    try:
        yield
    except PackerError:
        raise
    except MemoryError as error:
        raise FormatError(f"{path}: needs more memory than there is; it may claim more data than it holds") from error
    except _DAMAGED as error:
        raise FormatError(
            f"{path}: HDF5 cannot read it, damaged or truncated: {error or type(error).__name__}"
        ) from error


def refuse_other_files(file: Any, path: Path) -> list[str]:
    """Raise NotFlatError where a part of an open file is in another file, which is not opened.

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
            f"{path}: /{as_text(external[0])} is a link into another file, {other!r} ({inside}); only what is "
            f"in the file itself is read: name that file instead, or put all into one file with  "
            f"h5repack --merge {quoted(path)} NEW.h5"
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


def _elsewhere(data: Any, path: Path) -> str | None:
    """What to say of a data set whose bytes are in other files. Its shape is not asked for."""
    properties = data.id.get_create_plist()
    if properties.get_layout() == h5py.h5d.VIRTUAL:
        where = "is a virtual data set, whose bytes are in other files"
    elif properties.get_external_count():
        where = f"has its bytes in an external file, {as_text(properties.get_external(0)[0])!r}"
    else:
        return None
    return (
        f"{path}: {data.name} {where}; only what is in the file itself is read: put all into one file with  "
        f"h5repack -l CONTI {quoted(path)} NEW.h5"
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


def as_text(value: Any) -> str:
    """An HDF5 string, which h5py gives as bytes or str."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def flat_start(data: Any, path: Path, dimensions: int = 1) -> int:
    """First byte in the file of contiguous, unfiltered bytes: 1-D uint8, or an opaque scalar.

    Raises NotFlatError with the reason.
    """
    opaque = data.shape == () and data.dtype.kind == "V" and data.dtype.names is None
    if not opaque and (data.dtype != np.uint8 or data.ndim != dimensions):
        expected = f"not {dimensions}-D uint8"
        raise NotFlatError(not_flat(data, path, f"has dtype {data.dtype} and shape {data.shape}, {expected}"))
    if data.chunks is not None:
        how = f"is chunked with {data.compression}" if data.compression else "is chunked"
        raise NotFlatError(not_flat(data, path, how))
    offset = data.id.get_offset()
    if offset is None:
        if data.size == 0:
            return 0
        raise NotFlatError(not_flat(data, path, "has no storage of its own (compact, or never written)"))
    return int(offset)


def not_flat(data: Any, path: Path, why: str) -> str:
    return f"{path}: {data.name} {why}, so no sample is one byte range; run  packer convert {quoted(path)} --to hdf5"


def read_column(data: Any, n: int, path: Path) -> npt.NDArray[Any]:
    """A one-dimensional data set of n numbers; FormatError for another shape."""
    if data.shape != (n,):
        raise FormatError(f"{path}: {data.name} has shape {data.shape}, expected ({n},)")
    return np.asarray(data[:])


def read_strings(data: Any) -> list[str]:
    """A one-dimensional data set of strings."""
    return [as_text(value) for value in data[:]]


# --- images that are not flat ---
class Hdf5Places:
    """Reads the images of an open file."""

    def __init__(self, file: Any, path: Path) -> None:
        self._file, self._path = file, path
        self._data_sets: dict[str, Any] = {}

    def read(self, place: tuple[Any, ...]) -> bytes:
        layout, name, *where = place
        try:
            if layout == "item":
                value = np.asarray(self._data_set(name)[()])
                return png_of(value) if value.ndim == 3 else value.tobytes()
            data = self._data_sets.get(name)
            if data is None:
                data = self._data_sets[name] = self._data_set(name)
            if layout == "ranges":
                return bytes(data[where[0] : where[1]].tobytes())
            array = data[where[0]]
            if layout == "elements":
                return bytes(array.tobytes())
            return png_of(np.moveaxis(array, 0, -1) if layout == "pixels-first" else array)
        except PackerError:
            raise
        except _DAMAGED as error:
            raise BadSampleError(f"cannot be read from {name}: {error or type(error).__name__}") from error

    def _data_set(self, name: str) -> Any:
        data = self._file[name]
        if elsewhere := _elsewhere(data, self._path):
            raise NotFlatError(elsewhere)
        return data
