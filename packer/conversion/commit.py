"""Turn the complete shards of a conversion into a set: index, shards, report, documents, `dataset.json` last.

After a kill, the next run of the same command finds the shards either in the working folder or already in the set,
and commits again; an incomplete set never has a `dataset.json`.

A set that is to be replaced is examined before any part of it is removed. Its dataset.json names shards and indexes,
but
is not trusted: nothing behind a link is removed, of an index only its columns, and of shards only those that packer
wrote and links to others. A set that cannot be read is not replaced. The removal first moves dataset.json into the
working folder, so that an interrupted commit can continue.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from cache.checksums import file_sha256
from cache.errors import DatasetError, OutputError
from cache.files import Folder, PathError
from cache.messages import listed, plural, quoted
from packer.columns import PartMeta, is_index, remove_index, write_index
from packer.conversion.journal import REPLACED_FOLDER, Journal
from packer.conversion.plan import Plan, PlannedShard
from packer.documents import remove_documents, write_dataset_info
from packer.output import output_errors
from packer.sources.base import SourceListing
from readers.layout import (
    DATASET_FILE,
    QUARANTINE_FOLDER,
    REPORT_FILE,
    DatasetInfo,
    ShardInfo,
    SplitInfo,
    read_dataset_info,
)

__all__ = ["commit", "replaced_set"]

_MOST_NAMES = 5


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
        infos = tuple(_with_checksum(place, meta.shard, made) for _, meta in chosen)
        splits[split] = SplitInfo(sum(counts), infos, index, listing.splits[split].root, columns)
    _write_report(journal, plan.shards, metas, listing)
    _move_up(work, place, QUARANTINE_FOLDER)
    place.sync()
    first = next(iter(plan.specs.values()))
    info = DatasetInfo(container, first.fields, first.classes, splits, first.label_offset, made)
    info = write_dataset_info(place, info, scratch=work)
    journal.remove()
    return info


def _with_checksum(place: Folder, shard: ShardInfo, made: Mapping[str, Any]) -> ShardInfo:
    """A shard with its SHA-256, which is missing if an earlier run packed it without checksums."""
    if shard.sha256 or not made.get("options", {}).get("checksums"):
        return shard
    return replace(shard, sha256=file_sha256(place.path / shard.path))


def _move_up(work: Folder, place: Folder, name: str) -> None:
    """Move a shard or a folder into the set, unless an interrupted commit has done so."""
    if not work.kind(name):
        return
    if place.kind(name):
        raise OutputError(
            f"{place.path / name}: is in the way of the new set; move it elsewhere and run the same command again"
        )
    work.rename(name, name, place)


@output_errors()
def replaced_set(journal: Journal) -> _ReplacedSet | None:
    """The set that this conversion replaces, or has begun to replace; None if there is none.

    Raises OutputError if its dataset.json cannot be read, or names files that must not be removed.
    """
    for where in (journal.out, journal.folder / REPLACED_FOLDER):
        if os.path.lexists(where / DATASET_FILE):
            try:
                return _ReplacedSet(journal.place, read_dataset_info(where))
            except DatasetError as error:
                raise OutputError(
                    f"{error}. So it is unknown what overwrite=True would remove; repair the set with  "
                    f"packer index {quoted(journal.out)} , remove the directory yourself, or choose another output"
                ) from error
            except PathError as error:
                raise OutputError(
                    f"{error}; the set in {journal.out} names it. Remove that set yourself, or choose another output"
                ) from error
    return None


class _ReplacedSet:
    """The parts of the set in `place`. kept: shards that are kept, because packer did not write them."""

    def __init__(self, place: Folder, info: DatasetInfo) -> None:
        self._place, self._info = place, info
        shards = {shard.path: place.kind(shard.path) for split in info.splits.values() for shard in split.shards}
        written = "by" in info.made
        self._shards = [name for name, kind in shards.items() if kind == "link" or (written and kind == "file")]
        self.kept = [name for name, kind in shards.items() if kind and name not in self._shards]
        self._indexes = [split.index for split in info.splits.values()]
        for retired in info.retired:
            kind = place.kind(retired.path)
            if kind == "folder" and is_index(place, retired.path):
                self._indexes.append(retired.path)
            elif kind == "link" or (written and kind == "file"):
                self._shards.append(retired.path)
        for index in self._indexes:
            if place.kind(index):
                place.folder(index).close()  # raises if a part of its path is a link or not a folder
        left_out = info.made.get("left_out")
        self._quarantine = isinstance(left_out, dict) and "quarantined" in left_out

    @output_errors()
    def check(self, plan: Plan, read: Iterable[str | os.PathLike[str]]) -> None:
        """Raise OutputError if a kept file is in the way of `plan`, or if one of `read` would be removed."""
        place = self._place
        staying = [shard.name for shard in plan.shards if shard.name not in self._shards and place.kind(shard.name)]
        for name in [*staying, *(f"{split}.index" for split in plan.specs)]:
            if name in staying or not is_index(place, name):
                raise OutputError(
                    f"{place.path / name}: is in the way of the new set, and overwrite=True removes nothing that "
                    f"packer did not write; move it, or choose another output"
                )
        removed = set(self._identities())
        for path in read:
            try:
                status = os.stat(path)
            except OSError:  # reading it will raise a clearer error
                continue
            if (status.st_dev, status.st_ino) in removed:
                raise OutputError(
                    f"{os.fspath(path)}: belongs to the set in {place.path}, which overwrite=True would remove before "
                    f"its source is safe; choose another output"
                )

    def changes(self, plan: Plan, listing: SourceListing) -> Iterator[str]:
        """Lines for the user that describe the replacement."""
        info = self._info
        samples = sum(split.samples for split in info.splits.values())
        splits = ", ".join(f"{name} {split.samples:,}" for name, split in info.splits.items())
        yield (
            f"replacing the set in {self._place.path}: {plural(samples, 'sample')} "
            f"({splits or 'no splits'}), {plural(len(info.classes), 'class')}, by {plural(plan.samples, 'sample')}, "
            f"{plural(len(listing.classes), 'class')}"
        )
        for kind, old, new in (
            ("splits", info.splits, plan.specs),
            ("classes", info.classes, listing.classes),
            ("fields", info.fields, listing.fields),
        ):
            gone = [name for name in old if name not in set(new)]
            if gone:
                yield f"warning: {kind} that the new set does not have: {listed(gone, _MOST_NAMES)}"
        if self.kept:
            yield f"these shards are kept, because packer did not write them: {listed(self.kept, _MOST_NAMES)}"

    @output_errors()
    def remove(self, journal: Journal) -> None:
        """Remove the set, or the remains of an interrupted removal."""
        place, work = journal.place, journal.work
        if place.kind(DATASET_FILE):
            work.folder(REPLACED_FOLDER, create=True).close()
            place.rename(DATASET_FILE, f"{REPLACED_FOLDER}/{DATASET_FILE}", work)
            place.sync()
        for name in self._shards:
            place.unlink(name)
        for name in self._indexes:
            remove_index(place, name)
        place.unlink(REPORT_FILE)
        remove_documents(place, self._info.documents)
        if self._quarantine:
            place.remove_tree(QUARANTINE_FOLDER)
        work.remove_tree(REPLACED_FOLDER)

    def _identities(self) -> Iterator[tuple[int, int]]:
        """Device and inode of every file to be removed."""
        place = self._place
        for name in (*self._shards, *self._info.documents, REPORT_FILE, DATASET_FILE):
            status = place.lstat(name)
            if status is not None:
                yield status.st_dev, status.st_ino
        folders = [name for name in self._indexes if place.kind(name)]
        if self._quarantine and place.kind(QUARANTINE_FOLDER) == "folder":
            folders.append(QUARANTINE_FOLDER)
        for name in folders:
            with place.folder(name) as folder:
                for _, _, files, descriptor in os.fwalk(".", dir_fd=folder.descriptor):
                    for file in files:
                        status = os.stat(file, dir_fd=descriptor, follow_symlinks=False)
                        yield status.st_dev, status.st_ino


def _write_report(
    journal: Journal, shards: Sequence[PlannedShard], metas: Sequence[PartMeta], listing: SourceListing
) -> None:
    """Write one JSON object per line for every file of the source that is not in the set; no file if there are none."""
    lines = [{"name": name, "reason": reason, "action": "not packed"} for name, reason in listing.left_out]
    for shard, meta in zip(shards, metas, strict=True):
        lines += [
            {"split": shard.split, **asdict(item), "action": item.action or "not packed"} for item in meta.left_out
        ]
    if lines:
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        journal.place.write(REPORT_FILE, text.encode("utf-8", "surrogateescape"), scratch=journal.work)
