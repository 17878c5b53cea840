"""Several readers as one, one after the other: their tables and stores, joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cache.stores.base import Joined, Part
from readers.index import FIELD_COLUMNS, Columns, MemoryColumns, encode_name
from readers.reader import Reader
from readers.sample import NO_LABEL, ImageInfo
from readers.strings import Strings
from readers.table import Table

__all__ = ["concat", "concat_tables"]


def concat(readers: Sequence[Reader]) -> Reader:
    """One reader after the other, as one: classes are unified by name, and labels renumbered.

    Closing it closes all of them. Raises ValueError for readers without the same fields in the same order, and for
    readers whose images are converted (cache the result instead).
    """
    if not readers:
        raise ValueError("concat takes one reader or more, and the list is empty")
    tables = [reader.table for reader in readers]
    joined = concat_tables(tables)
    parts = [
        Part(reader.store, len(table.columns.shard_bytes), len(table), table.rows, len(table.fields))
        for reader, table in zip(readers, tables, strict=True)
    ]
    return Reader(joined, Joined(parts))


def concat_tables(tables: Sequence[Table]) -> Table:
    """One table after the other; labels are renumbered by the names of the classes, which are those of all, in order.

    The columns are copied into memory. Shards are numbered one table after the other, as
    `cache.stores.base.Joined` takes them. Raises ValueError for tables without one order of the same fields.
    """
    if not tables or any(list(table.kinds.items()) != list(tables[0].kinds.items()) or table.forms for table in tables):
        raise ValueError("concat takes tables of the same fields, in order and kind, of images as they are stored")
    fields = tables[0].fields
    classes = tuple(dict.fromkeys(name for table in tables for name in table.classes))
    numbers = {name: number for number, name in enumerate(classes)}
    headers = [name for name in ImageInfo._fields if all(table.has_headers for table in tables)]
    separate = {field for table in tables for field in table.columns.separate}
    parts: dict[str, list[npt.NDArray[Any]]] = {}
    shards, sizes = 0, list[int]()
    for table in tables:
        new_label = np.array([*(numbers[name] for name in table.classes), NO_LABEL], np.int64)
        parts.setdefault("label", []).append(new_label[table.labels] if table.classes else table.labels)
        parts.setdefault("shard", []).append(table.column("shard").astype(np.int64) + shards)
        for field in separate:
            parts.setdefault(f"{field}.shard", []).append(table.shard_column(field).astype(np.int64) + shards)
        for name in headers:
            parts.setdefault(name, []).append(table.column(name))
        for field in fields:
            for name in FIELD_COLUMNS:
                parts.setdefault(f"{field}.{name}", []).append(table.field_column(field, name))
        sizes += list(table.columns.shard_bytes)
        shards = len(sizes)
    columns = {name: np.concatenate(found) for name, found in parts.items()}
    keys = Strings.of(key for table in tables for key in table.keys)
    names = {
        field: Strings.of(
            encode_name(table.name(i, field), table.keys[i]) for table in tables for i in range(len(table))
        )
        for field in fields
    }
    title, kinds = " + ".join(table.title for table in tables), tables[0].kinds
    whole = _JoinedColumns(keys, columns, fields, classes, names=names, kinds=kinds, shard_bytes=sizes, title=title)
    whole.parts = [table.columns for table in tables]
    return Table(whole)


class _JoinedColumns(MemoryColumns):
    parts: Sequence[Columns] = ()

    def explained(self, error: Exception) -> Exception:
        """As one of the sets explains it."""
        return next((other for part in self.parts if (other := part.explained(error)) is not error), error)
