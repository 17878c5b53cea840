"""Write a table of a set: its indexes and dataset.json, and, into another directory, links to its shards."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cache.errors import OutputError
from cache.messages import Silent, Watcher, plural
from packer import __version__
from packer.columns import write_index
from packer.output import Result, local_output, output_errors
from packer.sets.change import Change
from packer.sets.pieces import Piece, PieceColumns, shards_of_split
from packer.sets.unify import decode_of
from readers.history import Operation, now
from readers.layout import DatasetInfo, ShardInfo, SplitInfo

if TYPE_CHECKING:
    from packer.sets.table import SetTable

__all__ = ["SaveResult", "free_index", "operation", "origin_of", "save", "write_table"]

_KEPT = ("by", "indexed_by", "source", "options")


@dataclass(frozen=True, slots=True)
class SaveResult(Result):
    """What was written: splits maps names to samples. Sizes are bytes.

    samples_before: of the set that it was made of, or of the first of several.
    shards: how many the set uses; written_bytes: of them, this operation has written.
    linked: shards of other sets; symbolic: those of them that are symbolic links, on another file system.
    payload_bytes: of the samples; shard_bytes: of the shards, with what they have of other samples.
    left_out: files of a source that are not samples; skipped: samples that the set had already.
    with_field: samples that have the field that was added; unmatched: files for it that are of no sample.
    """

    output: Path
    operations: tuple[str, ...]
    splits: dict[str, int]
    classes: int
    samples: int
    samples_before: int
    shards: int
    shard_bytes: int
    payload_bytes: int
    written_bytes: int = 0
    linked: int = 0
    symbolic: int = 0
    left_out: int = 0
    skipped: int = 0
    with_field: int = 0
    unmatched: int = 0
    dry_run: bool = False


def save(
    table: SetTable,
    output: str | os.PathLike[str] | None = None,
    *,
    dry_run: bool = False,
    watcher: Watcher | None = None,
) -> SaveResult:
    """Write a new set to the directory `output`, or, without one, change the set that the table is of.

    dry_run: write nothing.

    No byte of a shard is written. A new set has hard links to the shards of the sets that it is made of, so that it is
    whole without them; on another file system the links are symbolic, with a warning, and those sets must stay.

    Raises OutputError where the set has been changed since the table was opened, or `output` is not empty or new.
    """
    watcher = watcher or Silent()
    root = table.root if output is None else local_output(output)
    if dry_run:
        return _Writing(table, root, None).result(dry_run=True)
    with Change(root, watcher, new=output is not None) as change:
        if change.info is not None and replace(change.info, retired=()) != replace(table.info, retired=()):
            raise OutputError(f"{root}: has been changed since its table was opened; open it again")
        return write_table(change, table, watcher)


def write_table(change: Change, table: SetTable, watcher: Watcher) -> SaveResult:
    """Make a table the set of a directory. See `save`."""
    with output_errors():
        writing = _Writing(table, change.root, change)
        info = writing.write()
    symbolic = change.commit(info, writing.moves, writing.links)
    if symbolic:
        watcher.note(
            f"warning: {plural(symbolic, 'shard')} of other file systems {'is' if symbolic == 1 else 'are'} linked by "
            f"name: {change.root} needs the sets that it is made of where they are"
        )
    return writing.result(symbolic=symbolic)


def free_index(change: Change, split: str) -> str:
    """A name for the index of a split that nothing has."""
    return change.free(f"{split}.index{f'-{number}' if number > 1 else ''}" for number in range(1, 1 << 30))


def operation(name: str, arguments: Mapping[str, Any], samples: tuple[int, int]) -> Operation:
    """An entry of the history, made now."""
    return Operation(name, arguments, now(), f"packer {__version__}", samples)


def origin_of(*infos: DatasetInfo, payload_bytes: int) -> dict[str, Any]:
    """`made` of a set that is made of others: as the first, from the sources of all of them."""
    made = {name: infos[0].made[name] for name in _KEPT if name in infos[0].made}
    sources = dict.fromkeys(str(info.made["source"]) for info in infos if "source" in info.made)
    options = dict(made.get("options", {})) | {"decode": decode_of(*infos)}
    return made | {"source": " + ".join(sources), "options": options, "payload_bytes": payload_bytes}


class _Writing:
    """change: the directory to write; None to count only."""

    def __init__(self, table: SetTable, root: Path, change: Change | None) -> None:
        self._table, self._root, self._change = table, root, change
        self._fields = table.fields
        separate = {name for piece in table.pieces for name in piece.table.columns.separate}
        self._separate = tuple(name for name in self._fields if name in separate)
        self.moves: dict[str, str] = {}
        self.links: dict[str, tuple[Path, ShardInfo]] = {}
        self._sets = {root: number for number, root in enumerate(dict.fromkeys(p.root for p in table.pieces), 1)}
        self._names: dict[Path, str] = {}
        self._shards = {name: shards_of_split(pieces, self._separate) for name, pieces in table.splits.items()}

    def write(self) -> DatasetInfo:
        """Write the indexes of changed splits into the working folder; the description of the set."""
        table = self._table
        splits = {name: self._split(name, pieces) for name, pieces in table.splits.items()}
        infos = table.bases.values()
        edited = table.changed.union(*(info.edited for info in infos))
        return replace(
            table.info,
            fields=self._fields,
            classes=table.classes,
            splits=splits,
            made=origin_of(*infos, payload_bytes=self._payload_bytes()),
            edited=tuple(sorted(edited)),
            separate=self._separate,
            history=(*table.info.history, *(operation(s.operation, s.arguments, s.samples) for s in table.steps)),
            retired=(),
        )

    def _split(self, name: str, pieces: tuple[Piece, ...]) -> SplitInfo:
        assert self._change is not None
        known = self._change.info
        is_same = len(pieces) == 1 and pieces[0].is_whole and pieces[0].split == name
        if (
            known is not None
            and is_same
            and (tuple(known.fields), known.separate) == (tuple(self._fields), self._separate)
        ):
            return known.splits[name]
        shards, numbers = self._shards[name]
        columns = [PieceColumns(piece, new, self._separate) for piece, new in zip(pieces, numbers, strict=True)]
        counts, folder = [len(piece) for piece in pieces], f"{name}.index"
        work = self._change.work
        files = write_index(work, folder, columns, counts, list(self._fields), scratch=work, separate=self._separate)
        self.moves[folder] = free_index(self._change, name)
        infos = tuple(replace(shard, path=self._path(piece, shard)) for piece, shard in shards)
        return SplitInfo(sum(counts), infos, self.moves[folder], _folder_of(name, pieces[0]), files)

    def _path(self, piece: Piece, shard: ShardInfo) -> str:
        """The path of a shard in the new set: its own in a set that is changed, that of a link to another's."""
        assert self._change is not None
        if self._change.info is not None and piece.root == self._root:
            return shard.path
        source = piece.root / shard.path
        if source not in self._names:
            number = self._sets[piece.root]
            names = itertools.chain([shard.path], (f"{n}/{shard.path}" for n in itertools.count(number)))
            self._names[source] = self._change.free(name for name in names if name not in self.links)
            self.links[self._names[source]] = (source, shard)
        return self._names[source]

    def _payload_bytes(self) -> int:
        tables = [piece.table for piece in self._table.pieces]
        return sum(int(table.field_column(name, "length").sum()) for table in tables for name in table.fields)

    def result(self, *, symbolic: int = 0, dry_run: bool = False) -> SaveResult:
        table = self._table
        shards = {piece.root / shard.path: shard for found in self._shards.values() for piece, shard in found.shards}
        return SaveResult(
            output=self._root,
            operations=tuple(step.operation for step in table.steps),
            splits=table.counts,
            classes=len(table.classes),
            samples=len(table),
            samples_before=table.steps[0].samples[0] if table.steps else len(table),
            shards=len(shards),
            shard_bytes=sum(shard.bytes for shard in shards.values()),
            payload_bytes=self._payload_bytes(),
            linked=len(self.links),
            symbolic=symbolic,
            dry_run=dry_run,
        )


def _folder_of(split: str, piece: Piece) -> str:
    """The folder of the source tree that a split is extracted to."""
    folder = piece.info.splits[piece.split].root
    return folder if split == piece.split or not folder else split
