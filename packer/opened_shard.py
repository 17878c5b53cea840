"""A shard that anybody made, as a reader: located where it is, without an index and without a copy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from cache.errors import SourceError
from cache.stores import Files, Shards
from packer.formats import format_of_file
from packer.formats.base import LocateOptions, Payloads
from packer.sources.shards import ClassNames, field_kinds, located_samples
from readers.index import ABSENT, MemoryColumns, encode_name
from readers.reader import Reader
from readers.strings import Strings
from readers.table import Table

__all__ = ["open_shard"]


def open_shard(
    path: str | os.PathLike[str],
    *,
    image_key: str | None = None,
    label_key: str | None = None,
    label_offset: int = 0,
    fields: Mapping[str, str] | None = None,
) -> Reader:
    """Read the samples of one shard where they are: HDF5, TFRecord, tar or any other format that is registered.

    image_key, label_key: what the shard calls them; None for the format's usual names.
    label_offset: is subtracted from the labels.
    fields: further field name -> key in the shard.

    The samples are found anew each time, and have no checksums: `packer.index` adopts shards for good. Raises
    SourceError (no such file, no samples), FormatError (a broken shard, or of no known format) and NotFlatError (no
    flat byte ranges; `packer.convert` takes it).
    """
    shard = Path(path)
    if not shard.is_file():
        raise SourceError(f"{shard}: not a file; a packed set is opened with readers.open")
    options = LocateOptions(image_key, label_key, dict(fields or {}), label_offset)
    samples = list(located_samples(format_of_file(shard), shard, options))
    if not samples:
        raise SourceError(f"{shard}: has no samples")
    names = tuple(field_kinds(dict.fromkeys(name for sample in samples for name in sample.ranges)))
    classes = ClassNames()
    payloads = {name: Payloads() for name in names}
    for sample in samples:
        classes.add(sample)
        for name in names:
            payloads[name].append(*sample.ranges.get(name, (ABSENT, 0)), 0)
    columns = MemoryColumns(
        Strings.of(sample.key for sample in samples),
        {
            "label": [sample.label for sample in samples],
            **{f"{name}.offset": payloads[name].offset for name in names},
            **{f"{name}.length": payloads[name].length for name in names},
        },
        names,
        classes.in_order()[0],
        names={
            name: Strings.of(encode_name(sample.names.get(name, ""), sample.key) for sample in samples)
            for name in names
        },
        shard_bytes=[shard.stat().st_size],
        title=str(shard),
    )
    return Reader(Table(columns), Files(shard.parent, Shards((shard.name,), (shard.stat().st_size,))))
