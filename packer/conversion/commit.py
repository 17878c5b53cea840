"""Turn the whole shards of a finished conversion into a set: index, shards, report, and `dataset.json` last.

Killed in between, the next run of the same command finds the shards either in the working folder or already in
place, and commits again; no moment exists at which a set that is not whole has a `dataset.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cache.files import Folder
from packer.columns import PartMeta
from packer.conversion.journal import Journal
from packer.conversion.plan import Plan, PlannedShard
from packer.conversion.replaced import replaced_set
from packer.index_writer import write_index
from packer.output import output_errors
from packer.sources.base import SourceListing
from readers.errors import OutputError
from readers.layout import DATASET_FILE, DatasetInfo, SplitInfo
from readers.names import QUARANTINE_FOLDER, REPORT_FILE

__all__ = ["commit", "write_dataset_info"]


@output_errors()
def commit(
    journal: Journal,
    plan: Plan,
    metas: Sequence[PartMeta],
    listing: SourceListing,
    container: str,
    made: Mapping[str, Any],
) -> DatasetInfo:
    """Write the set described by `plan` and `metas` (parallel to plan.shards) into journal.out."""
    place, work = journal.place, journal.work
    old = replaced_set(journal)
    if old is not None:
        old.remove(journal)
    splits = {}
    for split, spec in plan.specs.items():
        chosen = [(s, m) for s, m in zip(plan.shards, metas, strict=True) if s.split == split]
        parts = [journal.part_path(shard) for shard, _ in chosen]
        counts = [meta.shard.samples for _, meta in chosen]
        index = f"{split}.index"
        columns = write_index(place, index, parts, counts, list(spec.fields), scratch=work)
        for shard, _ in chosen:
            _move_up(work, place, shard.name)
        infos = tuple(meta.shard for _, meta in chosen)
        splits[split] = SplitInfo(sum(counts), infos, index, listing.splits[split].root, columns)
    _write_report(journal, plan.shards, metas, listing)
    _move_up(work, place, QUARANTINE_FOLDER)
    place.sync()
    first = next(iter(plan.specs.values()))
    info = DatasetInfo(container, first.fields, first.classes, splits, first.label_offset, made)
    write_dataset_info(place, info, scratch=work)
    journal.remove()
    return info


def write_dataset_info(place: Folder, info: DatasetInfo, *, scratch: Folder) -> None:
    """Write dataset.json into `place`, which makes it a set; scratch: where its temporary file goes."""
    place.write(DATASET_FILE, info.to_json().encode("utf-8"), scratch=scratch)


def _move_up(work: Folder, place: Folder, name: str) -> None:
    """Move a shard or a folder into the set, unless a commit that was cut off has done so."""
    if not work.kind(name):
        return
    if place.kind(name):
        raise OutputError(
            f"{place.path / name}: is in the way of the new set; move it elsewhere and run the same command again"
        )
    work.rename(name, name, place)


def _write_report(
    journal: Journal, shards: Sequence[PlannedShard], metas: Sequence[PartMeta], listing: SourceListing
) -> None:
    """One JSON object a line for every file of the source that is not in the set; no file where there is none."""
    lines = [{"name": name, "reason": reason, "action": "not packed"} for name, reason in listing.left_out]
    for shard, meta in zip(shards, metas, strict=True):
        lines += [
            {
                "split": shard.split,
                "name": item.name,
                "reason": item.reason,
                "action": item.action or "not packed",
            }
            for item in meta.left_out
        ]
    if lines:
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        journal.place.write(REPORT_FILE, text.encode("utf-8", "surrogateescape"), scratch=journal.work)
