"""Which HDF5 data sets are one flat byte range of their file, and reading the small tables beside them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from readers.errors import FormatError, NotFlatError

__all__ = ["as_text", "flat_start", "not_flat", "read_column", "read_strings"]


def as_text(value: Any) -> str:
    """An HDF5 string, which h5py gives as bytes or str."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def flat_start(data: Any, path: Path) -> int:
    """First byte in the file of a contiguous, unfiltered uint8 data set. Raises NotFlatError with the reason."""
    if data.dtype != np.uint8 or data.ndim != 1:
        raise NotFlatError(not_flat(data, path, f"has dtype {data.dtype} and shape {data.shape}, not 1-D uint8"))
    if data.file.filename != os.fspath(path):
        raise NotFlatError(not_flat(data, path, f"is a link into another file, {data.file.filename},"))
    if data.chunks is not None:
        how = f"is chunked with {data.compression}" if data.compression else "is chunked"
        raise NotFlatError(not_flat(data, path, how))
    if data.id.get_create_plist().get_external_count():
        raise NotFlatError(not_flat(data, path, "lies in an external file"))
    offset = data.id.get_offset()
    if offset is None:
        if data.size == 0:
            return 0
        raise NotFlatError(not_flat(data, path, "has no storage of its own (compact, or never written)"))
    return int(offset)


def not_flat(data: Any, path: Path, why: str) -> str:
    return f"{path}: {data.name} {why}, so no sample is one byte range; run  packer convert {path} --to hdf5"


def read_column(data: Any, n: int, path: Path) -> npt.NDArray[Any]:
    """A one-dimensional data set of n numbers; FormatError for another shape."""
    if data.shape != (n,):
        raise FormatError(f"{path}: {data.name} has shape {data.shape}, expected ({n},)")
    return np.asarray(data[:])


def read_strings(data: Any) -> list[str]:
    """A one-dimensional data set of strings."""
    return [as_text(value) for value in data[:]]
