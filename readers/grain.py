"""Grain (JAX): a random-access source over a reader, for `grain.DataLoader` and `grain.MapDataset.source`.

    source = GrainSource(readers.open("imagenet-hdf5", "train"))
    data = grain.MapDataset.source(source).shuffle(seed=1).map(augment).batch(256)

Grain orders, shards and resumes by itself; what it saves of a source is its `repr`, so this names the samples. Grain
itself is not imported here.
"""

from __future__ import annotations

import operator
from typing import Any, SupportsIndex

from readers.decode import decode_image
from readers.fields import decode_field
from readers.reader import Reader

__all__ = ["GrainSource"]


class GrainSource:
    """Samples as dictionaries: "image" (uint8 [h, w, 3]), "label" (int, -1 without one), and other fields by name.

    fields: of the set, decoded by their kind, None for one that a sample lacks.
    decode: with False, images stay encoded, as bytes.

    Readers pickle as where they were opened, so that Grain's workers read by themselves.
    """

    def __init__(self, reader: Reader, fields: tuple[str, ...] = ("image", "label"), *, decode: bool = True) -> None:
        self._reader, self._fields, self._decode = reader, fields, decode
        for name in fields:
            if name not in ("label", "key"):
                reader.sizes(name)  # raises UnknownNameError

    def __len__(self) -> int:
        return len(self._reader)

    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]:
        """Raises BadSampleError for a damaged sample, IndexError."""
        row = operator.index(index)
        return {name: self._value(row, name) for name in self._fields}

    def _value(self, row: int, name: str) -> Any:
        reader = self._reader
        if name == "label":
            return int(reader.labels[row])
        if name == "key":
            return reader.keys[row]
        if not reader.has(row, name):
            return None
        data = reader.read(row, name)
        if reader.kinds[name] != "image":
            return decode_field(reader.kinds[name], data)
        return decode_image(data) if self._decode else bytes(data)

    def __repr__(self) -> str:
        return f"GrainSource({self._reader.fingerprint}, {self._fields}, decode={self._decode})"
