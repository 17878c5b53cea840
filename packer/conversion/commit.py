"""Turn the whole shards of a finished conversion into a set: index, shards, report, and `dataset.json` last.

Killed in between, the next run of the same command finds the shards either in the working folder or already in
place, and commits again; no moment exists at which a set that is not whole has a `dataset.json`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packer.columns import PartMeta
from packer.conversion.journal import REPLACED_FOLDER, Journal, fsync_folder
from packer.conversion.plan import Plan, PlannedShard
from packer.index_writer import write_index
from packer.sources.base import SourceListing
from readers.errors import DatasetError
from readers.layout import DATASET_FILE, DatasetInfo, SplitInfo, read_dataset_info

__all__ = ["REPORT_FILE", "commit", "write_dataset_info"]

REPORT_FILE = "left-out.jsonl"
_QUARANTINE = "quarantine"


def commit(
    journal: Journal,
    plan: Plan,
    metas: Sequence[PartMeta],
    listing: SourceListing,
    container: str,
    made: Mapping[str, Any],
) -> DatasetInfo:
    """Write the set described by `plan` and `metas` (parallel to plan.shards) into journal.out."""
    out = journal.out
    _remove_old_set(journal)
    splits = {}
    for split, spec in plan.specs.items():
        chosen = [(s, m) for s, m in zip(plan.shards, metas, strict=True) if s.split == split]
        parts = [journal.part_path(shard) for shard, _ in chosen]
        counts = [meta.shard.samples for _, meta in chosen]
        index = f"{split}.index"
        columns = write_index(out / index, parts, counts, list(spec.fields))
        for shard, _ in chosen:
            source, target = journal.folder / shard.name, out / shard.name
            if source.exists():
                source.replace(target)
        infos = tuple(meta.shard for _, meta in chosen)
        splits[split] = SplitInfo(sum(counts), infos, index, listing.splits[split].root, columns)
    _write_report(out, plan.shards, metas, listing)
    _move_quarantine(journal.folder / _QUARANTINE, out / _QUARANTINE)
    fsync_folder(out)
    first = next(iter(plan.specs.values()))
    info = DatasetInfo(container, first.fields, first.classes, splits, first.label_offset, made)
    write_dataset_info(out, info)
    journal.remove()
    return info


def write_dataset_info(out: Path, info: DatasetInfo) -> None:
    """Write dataset.json: temporary name, fsync, rename, fsync of the folder."""
    temporary = out / (DATASET_FILE + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(info.to_json())
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(out / DATASET_FILE)
    fsync_folder(out)


def _remove_old_set(journal: Journal) -> None:
    """Remove the set that --overwrite replaces: only what its dataset.json names.

    That file is moved into the working folder first, so that a commit that is cut off here goes on from it.
    """
    out, replaced = journal.out, journal.folder / REPLACED_FOLDER
    if (out / DATASET_FILE).exists():
        replaced.mkdir(exist_ok=True)
        (out / DATASET_FILE).replace(replaced / DATASET_FILE)
        fsync_folder(out)
    if not replaced.is_dir():
        return
    try:
        old = read_dataset_info(replaced)
    except DatasetError:
        old = None  # damaged: nobody can tell what it named
    for split in old.splits.values() if old else ():
        for shard in split.shards:
            (out / shard.path).unlink(missing_ok=True)
        shutil.rmtree(out / split.index, ignore_errors=True)
    (out / REPORT_FILE).unlink(missing_ok=True)
    shutil.rmtree(out / _QUARANTINE, ignore_errors=True)
    shutil.rmtree(replaced)


def _write_report(out: Path, shards: Sequence[PlannedShard], metas: Sequence[PartMeta], listing: SourceListing) -> None:
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
        (out / REPORT_FILE).write_text(text, encoding="utf-8", errors="surrogateescape")


def _move_quarantine(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.rmtree(target, ignore_errors=True)
        source.replace(target)
