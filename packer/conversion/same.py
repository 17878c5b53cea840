"""Whether what is packed already is what a program's data set hands out now: its samples are read again and compared.

The listing of such a data set says its length and little more (`SourceListing.sampled`). So before a set, or shards of
a conversion that was stopped, are taken for those of this one, workers compare labels and payloads with them, by key
and checksum: images, and what follows them, only where they are packed as they are handed out. Samples that were left
out are not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

import readers
from cache.checksums import crc32c
from cache.errors import BadSampleError
from cache.messages import Counter
from packer.columns import load_part
from packer.conversion.pack import Cancelled
from packer.formats.base import Arena
from packer.sources.base import LabellingReader, Samples, Source
from readers.index import ABSENT
from readers.strings import Strings

__all__ = ["AS_GIVEN", "PackedTask", "first_difference"]

AS_GIVEN = ("text", "json", "array", "target", "file")
"""Kinds of fields that no op and no re-encoding changes."""
_REPORT_SAMPLES = 64


@dataclass(frozen=True, slots=True)
class PackedTask:
    """Samples of a source, and where they are packed: in a whole shard, or in a set.

    fields: all of the source; compared: those whose payloads are packed as they are.
    part: of the shard; None: the samples are these rows, (first, stop), of this split of the set at `root`.
    """

    source: Source
    samples: Samples
    fields: tuple[str, ...]
    compared: frozenset[str]
    root: Path
    split: str
    part: Path | None = None
    rows: tuple[int, int] = (0, 0)

    def packed(self) -> dict[str, tuple[int, list[int | None]]]:
        """Label, and checksum of each payload, by key."""
        if self.part is not None:
            with load_part(self.part) as part:
                keys = Strings(part["key"], part["key.offset"])
                columns = [(part[f"{name}.offset"], part[f"{name}.crc32c"]) for name in self.fields]
                return _by_key(keys, part["label"], columns)
        with readers.open(self.root, self.split) as reader:
            rows, table = slice(*self.rows), reader.table
            columns = [
                (table.field_column(name, "offset")[rows], table.field_column(name, "crc32c")[rows])
                for name in self.fields
            ]
            return _by_key(reader.keys[rows], reader.labels[rows], columns)


def _by_key(
    keys: Sequence[str], labels: npt.NDArray[Any], columns: Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]]
) -> dict[str, tuple[int, list[int | None]]]:
    checksums = [
        [None if offset == ABSENT else crc for offset, crc in zip(offsets.tolist(), crcs.tolist(), strict=True)]
        for offsets, crcs in columns
    ]
    rows = zip(labels.tolist(), zip(*checksums, strict=True), strict=True)
    return {key: (label, list(found)) for key, (label, found) in zip(keys, rows, strict=True)}


def first_difference(task: PackedTask, counter: Counter) -> str:
    """What the first sample is that is packed otherwise than the source has it now; "" where none is."""
    packed, arena = task.packed(), Arena(lambda: None)
    with task.source.open() as reader:
        for block in task.samples.slices():
            for i, place in enumerate(block.places):
                key = block.keys[i]
                if key in packed:
                    try:
                        payloads = reader.read(place, arena)
                        label = reader.label(place) if isinstance(reader, LabellingReader) else block.labels[i]
                    except BadSampleError as error:
                        return f"{key}: {error}"
                    was, checksums = packed[key]
                    if label != was:
                        return f"{key}: its label was {was} and is {label} now"
                    for name, payload, known in zip(task.fields, payloads, checksums, strict=True):
                        if name in task.compared and (None if payload is None else crc32c(payload)) != known:
                            return f"{key}: its {name} is another one now"
                if i % _REPORT_SAMPLES == _REPORT_SAMPLES - 1 and counter.stopped():
                    raise Cancelled
            counter.report(len(block.places), 0)
    return ""
