"""Grain (JAX): a random-access source over a reader, for `grain.MapDataset.source` and `grain.DataLoader`.

    source = GrainSource(readers.open("imagenet-hdf5", "train"))
    data = grain.MapDataset.source(source).shuffle(seed=1).map(augment).batch(256)

Grain does the ordering, sharding and resuming. It saves the `repr` of a source with its state, so the repr contains the
fingerprint of the samples. This module does not import Grain.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, SupportsIndex

from readers.batch import Fields
from readers.decode import decode_image
from readers.feed import check_choice, for_decoding, substitutes_of_row, treat
from readers.fields import decode_field
from readers.reader import SAMPLE_ERRORS, Reader
from readers.table import Buffer


class GrainSource:
    """A random-access source of samples as dictionaries.

    A sample has "image" (uint8 [h, w, 3]), "label" (int, -1 for none), and any other fields by name.

    fields: "image", "label", "key", "index", and other fields of the set, decoded by their kind; None for a sample
        without the field. "label" is an array if the labels of the set are not class numbers.
    decode: False keeps images encoded, as bytes.
    on_error: "raise", or "substitute": replace a bad sample by another sample, always the same one.

    A reader is pickled as the arguments that it was opened with, so each worker process of Grain opens its own. Threads
    may share a source. Raises UnknownNameError for an unknown field, and ValueError.
    """

    def __init__(
        self,
        reader: Reader,
        fields: Sequence[str] = ("image", "label"),
        *,
        decode: bool = True,
        on_error: Literal["raise", "substitute"] = "raise",
    ) -> None:
        check_choice("on_error", on_error, ("raise", "substitute"))
        self._decode, self._on_error = decode, on_error
        self._reader, self._main = reader, getattr(reader, "main", "image")
        self._fields = Fields(fields, reader, self._main)
        self._names = tuple(fields) if self._main == "image" else self._fields.wanted
        self._images = for_decoding(reader) if decode else reader

    def __len__(self) -> int:
        return len(self._reader)

    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]:
        """One sample. Raises BadSampleError for a damaged sample, and IndexError."""
        row = operator.index(index)
        try:
            return self._make(row)
        except SAMPLE_ERRORS as error:
            others = partial(substitutes_of_row, row, range(len(self)))
            treated = treat(self._reader, self._on_error, (row, row), error, others, self._make, self._images)
        assert treated.value is not None  # no sample is skipped
        return treated.value

    def _make(self, row: int) -> dict[str, Any]:
        """The dictionary of one row. Raises SAMPLE_ERRORS."""
        fields = self._fields
        stored = fields.decode(fields.read(self._reader, [row])[0]) if fields.stored else {}
        values: dict[str, Any] = {}
        for name, field in zip(self._names, fields.wanted, strict=True):
            if field in stored:
                values[name] = stored[field]
            elif field == self._main:
                data = self._images.read(row)
                values[name] = self._value(data) if self._decode else bytes(data)
            else:
                values[name] = fields.value(self._reader, row, field)
        return values

    def _value(self, data: Buffer) -> Any:
        return decode_image(data) if self._main == "image" else decode_field(self._fields.kind(self._main), data)

    def __repr__(self) -> str:
        return f"GrainSource({self._reader.fingerprint}, {self._names}, decode={self._decode})"
