"""New shards of a set that is changed, and the indexes with their columns.

Shards are packed by the workers of a conversion into the working folder of the change.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from cache.errors import OutputError, SourceError
from cache.messages import Watcher, parse_size, quoted
from packer.columns import PartColumns, PartMeta, write_index
from packer.conversion.ops import check_ops, recorded_op
from packer.conversion.pack import ShardTask, pack_shard
from packer.conversion.plan import ConvertOptions, Plan, Reencode, make_plan
from packer.conversion.result import refuse_unlike
from packer.documents import has_checksums
from packer.formats import format_named, writable_formats
from packer.sets.change import Change
from packer.sets.pieces import Piece, PieceColumns
from packer.sets.save import SaveResult, free_index
from packer.sets.unify import decode_of
from packer.sources import Source
from packer.sources.base import SomeSamples, SourceListing
from packer.workers import Workers, run_shards
from readers.layout import AdoptedKeys, DatasetInfo, ShardInfo, SplitInfo
from readers.pixels import PIXELS
from readers.where import ERASED

__all__ = ["Indexes", "NewShards", "check_room", "options_like", "pack", "recorded_options", "result_of"]


def options_like(root: Path, info: DatasetInfo, shard_size: int | str | None) -> ConvertOptions:
    """The options of a conversion into shards like those of a set. Raises SourceError where there can be none."""
    wrong = "" if info.format in writable_formats() else f"its {info.format} shards cannot be written"
    if info.adopted != AdoptedKeys():
        wrong = "its shards name things in their own way"
    if info.label_offset < 0:
        wrong = f"its labels have the offset {info.label_offset}"
    if wrong:
        raise SourceError(
            f"{root}: {wrong}, so nothing can be added to them; run  packer reshard {quoted(root)} -o DIR  first"
        )
    if PIXELS in info.fields.values():
        raise SourceError(
            f"{root}: its images are raw pixels, so nothing can be added to them; run  packer convert {quoted(root)} "
            f"--to {quoted(info.format)} -o DIR  first, which packs them as PNG"
        )
    size = parse_size(shard_size) if isinstance(shard_size, str) else shard_size
    return ConvertOptions(
        info.format,
        shard_bytes=size,
        decode=decode_of(info),
        label_offset=info.label_offset,
        checksums=has_checksums(info),
    )


def recorded_options(root: Path, info: DatasetInfo, options: ConvertOptions) -> ConvertOptions:
    """`options` with those that the set was packed with: checks, re-encoding, ops, and which samples it takes.

    Raises SourceError where dataset.json has some that cannot be read.
    """
    recorded = info.made.get("options")
    recorded = recorded if isinstance(recorded, dict) else {}
    where = recorded.get("where")
    try:
        if isinstance(where, str) and ERASED in where:
            raise ValueError(f"the expression {where} has lost its values when samples were erased")
        found = replace(
            options,
            check=recorded.get("check", options.check),
            where=where,
            reencode=Reencode(**recorded["reencode"]) if recorded.get("reencode") else None,
            ops=tuple(map(recorded_op, recorded.get("ops") or ())),
        )
        check_ops(found.ops)
    except (ValueError, TypeError) as error:
        raise SourceError(
            f"{root}: the options that it was packed with cannot be repeated ({error}); pack the source by itself with "
            f"packer convert, and append or merge that set"
        ) from error
    return found


def check_room(root: Path, needed: int) -> None:
    """Raise OutputError where the disk of a set has less room than this."""
    free = shutil.disk_usage(root).free
    if needed > free:
        raise OutputError(f"{root}: needs {needed:,} bytes, {free:,} are free there; make room")


def pack(
    change: Change,
    source: Source,
    listing: SourceListing,
    options: ConvertOptions,
    name_of: Callable[[str], str],
    workers: Workers,
    watcher: Watcher,
) -> NewShards:
    """Pack all samples of a listing into the working folder of a change.

    name_of: what the shards of a split are called, in place of the split.

    Shards get names that nothing in the directory has: those of a second run, "train.2-…". Shards without samples are
    left out. Raises OutputError where the disk has not enough room, and as a conversion does.
    """
    container = format_named(options.to)
    plan = make_plan(listing, options, container)
    shards = []
    for split, run in itertools.groupby(plan.shards, lambda shard: shard.split):
        of_split = list(run)
        first = 2 if change.info is not None and name_of(split) in change.info.splits else 1
        for number in itertools.count(first):
            stem = name_of(split) + (f".{number}" if number > 1 else "")
            names = [container.shard_name(stem, i, len(of_split)) for i in range(len(of_split))]
            if not any(map(change.place.kind, names)):
                break
        shards += [shard._replace(name=name) for shard, name in zip(of_split, names, strict=True)]
    if options.encoding is None:
        check_room(change.root, plan.source_bytes)
    tasks = (
        ShardTask(
            source=source,
            spec=plan.specs[shard.split],
            samples=SomeSamples(listing.splits[shard.split], shard.indices),
            options=options,
            skip_strays=listing.skip_strays,
            out=change.root,
            shard=shard.name,
            where=listing.where,
        )
        for shard in shards
    )
    size = sum(len(shard.indices) for shard in shards), plan.source_bytes
    folder = change.work.path
    metas = run_shards(pack_shard, tasks, len(shards), workers, watcher, size, source=source, folder=folder)
    refuse_unlike(source.title, metas)
    splits: dict[str, list[PartMeta]] = {}
    for shard, meta in zip(shards, metas, strict=True):
        if meta.shard.samples:
            splits.setdefault(shard.split, []).append(meta)
    return NewShards(plan, splits)


@dataclass(frozen=True, slots=True)
class NewShards:
    """Shards in a working folder: what their parts say, by split."""

    plan: Plan
    splits: Mapping[str, list[PartMeta]]

    @property
    def metas(self) -> list[PartMeta]:
        return [meta for metas in self.splits.values() for meta in metas]

    @property
    def targets(self) -> dict[str, str]:
        """The form of the labels, by field, where they are not class numbers."""
        return {name: found for meta in self.metas for name, found in meta.targets.items() if name != "image"}

    @property
    def moves(self) -> dict[str, str]:
        """For `Change.commit`."""
        return {meta.shard.path: meta.shard.path for meta in self.metas}

    @property
    def written_bytes(self) -> int:
        return sum(meta.shard.bytes for meta in self.metas)

    def of_split(self, change: Change, split: str) -> tuple[list[ShardInfo], list[Path]]:
        """The shards of a split, and their parts."""
        shards = [meta.shard for meta in self.splits.get(split, ())]
        return shards, [change.work.path / f"{shard.path}.part" for shard in shards]


class Indexes:
    """Writes the indexes of a changed set into the working folder of a change.

    fields: of the set; separate: those that have shards of their own.
    moves: what `Change.commit` calls them.
    """

    def __init__(self, change: Change, fields: Iterable[str], separate: Sequence[str]) -> None:
        self._change, self._fields, self._separate = change, list(fields), separate
        self.moves: dict[str, str] = {}

    def write(
        self,
        split: str,
        piece: Piece | None,
        shards: Sequence[ShardInfo],
        parts: Sequence[Path],
        *,
        known: Sequence[ShardInfo] = (),
        root: str = "",
    ) -> SplitInfo:
        """The index of a split: what it had (`piece`, all of it), then the `parts` of new shards.

        shards: the new ones; more than parts where they are of a field only.
        known: those that the piece has.
        root: the folder of the source tree.
        """
        columns: list[Path | PartColumns] = list(parts)
        counts, numbers = (
            [shard.samples for shard in shards[: len(parts)]],
            list(range(len(known), len(known) + len(parts))),
        )
        if piece is not None:
            columns.insert(0, PieceColumns(piece, np.arange(max(1, len(known))), self._separate))
            counts.insert(0, len(piece))
            numbers.insert(0, 0)
        name, work, fields = f"{split}.index", self._change.work, self._fields
        files = write_index(work, name, columns, counts, fields, scratch=work, separate=self._separate, numbers=numbers)
        self.moves[name] = free_index(self._change, split)
        return SplitInfo(sum(counts), (*known, *shards), self.moves[name], root, files)


def result_of(root: Path, name: str, info: DatasetInfo, before: int, new: NewShards | None) -> SaveResult:
    """The result of a change that has written shards, or would."""
    shards = {shard.path: shard for split in info.splits.values() for shard in split.shards}
    return SaveResult(
        output=root,
        operations=(name,),
        splits={split: part.samples for split, part in info.splits.items()},
        classes=len(info.classes),
        samples=sum(part.samples for part in info.splits.values()),
        samples_before=before,
        shards=len(shards),
        shard_bytes=sum(shard.bytes for shard in shards.values()),
        payload_bytes=int(info.made.get("payload_bytes", 0)),
        written_bytes=new.written_bytes if new is not None else 0,
        dry_run=new is None,
    )
