"""Columns as .npy files that need not exist: a header, and the bytes of an array, any range of which can be read."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.lib.format
import numpy.typing as npt

from readers.index import FIELD_COLUMNS, MemoryColumns
from readers.reader import Reader
from readers.sample import ImageInfo
from readers.strings import Strings

__all__ = ["Body", "Bytes", "Column", "columns_of"]


class Body(Protocol):
    """Bytes of which ranges are sent."""

    @property
    def size(self) -> int: ...

    def read(self, start: int, stop: int) -> bytes | memoryview:
        """Bytes [start, stop), which are inside."""


@dataclass(frozen=True)
class Bytes:
    """Bytes in memory."""

    data: bytes | memoryview

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, start: int, stop: int) -> bytes | memoryview:
        return self.data[start:stop]


@dataclass(frozen=True)
class Column:
    """One-dimensional values, as numpy.save writes them."""

    values: npt.NDArray[Any]

    @cached_property
    def header(self) -> bytes:
        """What comes before the values; its length is a multiple of 64."""
        memory = io.BytesIO()
        described = numpy.lib.format.header_data_from_array_1_0(np.empty(0, self.values.dtype))
        numpy.lib.format.write_array_header_1_0(memory, {**described, "shape": self.values.shape})
        return memory.getvalue()

    @property
    def size(self) -> int:
        return len(self.header) + self.values.nbytes

    def read(self, start: int, stop: int) -> bytes | memoryview:
        head, width = len(self.header), self.values.itemsize
        if start >= head:
            first, last = (start - head) // width, -(-(stop - head) // width)
            data = np.ascontiguousarray(self.values[first:last]).tobytes()
            return memoryview(data)[start - head - first * width :][: stop - start]
        return self.header[start:stop] + (bytes(self.read(head, stop)) if stop > head else b"")

    def described(self, url: str) -> dict[str, Any]:
        """As documents name a column."""
        return {"url": url, "dtype": self.values.dtype.str, "length": len(self.values), "start": len(self.header)}


def columns_of(reader: Reader, info: ImageInfo | None) -> dict[str, npt.NDArray[Any]]:
    """The columns of a split by the names of the files of an index, without .npy; those that say something.

    info: header facts that were read where there is no index.
    """
    return dict(_columns(reader, info))


def _columns(reader: Reader, info: ImageInfo | None) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    columns = reader.table.columns
    packed = not isinstance(columns, MemoryColumns)
    yield "label", reader.labels
    yield from _texts("key", columns.keys())
    if packed:
        info = reader.info
        yield "shard", columns.column("shard")
    if info is not None:
        yield from zip(ImageInfo._fields, info, strict=True)
    for field in reader.fields:
        if packed:
            for name in FIELD_COLUMNS:
                yield f"{field}.{name}", columns.field_column(field, name)
            if field in columns.separate:
                yield f"{field}.shard", columns.shard_column(field)
        elif (lengths := columns.field_column(field, "length")).any():
            yield f"{field}.length", lengths
        yield from _texts(f"{field}.name", columns.names(field))


def _texts(name: str, texts: Strings) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    if len(texts.blob):
        yield name, texts.blob
        yield f"{name}.offset", texts.offsets
