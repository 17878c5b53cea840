"""A set as a value: the samples of each split, and their labels. Other values are derived from it.

    import packer

    whole = packer.table("imagenet")
    large = whole.where("min_side >= 64").drop(keys=["n01440764/bad"])
    parts = large.split({"train": 0.9, "val": 0.1}, seed=0, stratify=True)
    parts.save("imagenet-parts")              # a new set: an index, and links to the shards
    whole.relabel({"crane bird": "crane"}).save()     # changes the set itself, unless another process changed it

Only indexes are read, and nothing is written until `save`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cache.errors import OutputError, SourceError, UnknownNameError
from cache.messages import Silent, Watcher, listed, plural
from packer import __version__
from packer.conversion.plan import check_splits
from packer.output import Result, local_output, output_errors
from packer.sets.change import Change
from packer.sets.deal import as_groups, deal, deal_groups
from packer.sets.pieces import (
    LabelChange,
    Piece,
    PieceColumns,
    check_alike,
    check_targets,
    decode_of,
    labels_by_key,
    mapped_classes,
    open_pieces,
    read_labels,
    renumbering,
    shards_of_split,
    target_forms,
    unified_classes,
    unified_fields,
)
from packer.sources.base import place_name
from readers.layout import EDITS, DatasetInfo, Operation, ShardInfo, SplitInfo, SplitName, now, read_dataset_info
from readers.table import NO_LABEL, repeated
from readers.where import Facts, complete_columns, group_values, parse_where

__all__ = [
    "PruneResult",
    "SaveResult",
    "SetTable",
    "Step",
    "drop",
    "merge",
    "operation",
    "origin_of",
    "prune",
    "read_keys",
    "relabel",
    "save",
    "split",
    "subset",
    "table",
    "without_values",
    "write_table",
]


# --- saving: the indexes, dataset.json, and in another directory links to the shards --------------------------------


_KEPT = ("by", "indexed_by", "source", "options")


@dataclass(frozen=True, slots=True)
class SaveResult(Result):
    """The result of a change of a set. splits: samples by split name. Sizes are in bytes.

    samples_before: of the original set, or of the first of several.
    shards: number of shards of the set; written_bytes: bytes of shards written by this operation.
    linked: number of linked shards of other sets; symbolic: those linked symbolically, on another filesystem.
    payload_bytes: of the samples; shard_bytes: of the shards, including unused bytes.
    left_out: files of a source that are not samples; skipped: samples that the set already had.
    with_field: samples with the added field; unmatched: files for it that belong to no sample.
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
    """Write a new set to the directory `output`, or, without one, change the original set of the table.

    dry_run: write nothing.

    No byte of a shard is written. A new set has hard links to the shards of its source sets, so it does not need them;
    on another filesystem the links are symbolic, with a warning, and the source sets must stay.

    Raises OutputError if the set was changed since the table was opened, or `output` is neither empty nor new.
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
    """Write a table as the set of a directory. See `save`."""
    with output_errors():
        writing = _Writing(table, change.root, change)
        info = writing.write()
    symbolic = change.commit(info)
    if symbolic:
        watcher.note(
            f"warning: {plural(symbolic, 'shard')} on other filesystems {'is' if symbolic == 1 else 'are'} linked by "
            f"name: {change.root} needs the sets that it was made from at their places"
        )
    return writing.result(symbolic=symbolic)


def operation(name: str, arguments: Mapping[str, Any], samples: tuple[int, int]) -> Operation:
    """An entry of the history, with the present time."""
    return Operation(name, arguments, now(), f"packer {__version__}", samples)


def origin_of(*infos: DatasetInfo, payload_bytes: int) -> dict[str, Any]:
    """The field `made` of a set that was made from others: like that of the first, with the sources of all of them."""
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
        self._sets = {root: number for number, root in enumerate(dict.fromkeys(p.root for p in table.pieces), 1)}
        self._names: dict[Path, str] = {}
        self._shards = {name: shards_of_split(pieces, self._separate) for name, pieces in table.splits.items()}

    def write(self) -> DatasetInfo:
        """Write the indexes of changed splits into the working folder; returns the description of the set."""
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
        first = pieces[0]
        is_same = len(pieces) == 1 and first.is_whole and first.split == name and first.root == self._root
        if (
            known is not None
            and is_same
            and (tuple(known.fields), known.separate) == (tuple(self._fields), self._separate)
        ):
            return known.splits[name]
        shards, numbers = self._shards[name]
        columns = [PieceColumns(piece, new, self._separate) for piece, new in zip(pieces, numbers, strict=True)]
        counts = [len(piece) for piece in pieces]
        infos = [replace(shard, path=self._path(piece, shard)) for piece, shard in shards]
        folder, separate = _folder_of(name, pieces[0]), self._separate
        return self._change.write_index(name, columns, counts, self._fields, infos, root=folder, separate=separate)

    def _path(self, piece: Piece, shard: ShardInfo) -> str:
        """The path of a shard in the new set: unchanged for the set's own shards, that of a link for others."""
        assert self._change is not None
        if self._change.info is not None and piece.root == self._root:
            return shard.path
        source = piece.root / shard.path
        if source not in self._names:
            number = self._sets[piece.root]
            names = itertools.chain([shard.path], (f"{n}/{shard.path}" for n in itertools.count(number)))
            self._names[source] = self._change.free(name for name in names if name not in self._change.links)
            self._change.links[self._names[source]] = (source, shard)
        return self._names[source]

    def _payload_bytes(self) -> int:
        tables = [piece.table for piece in self._table.pieces]
        return sum(int(table.field_column(name, "length").sum()) for table in tables for name in table.fields)

    def result(self, *, symbolic: int = 0, dry_run: bool = False) -> SaveResult:
        table = self._table
        shards = {
            piece.root / shard.path: shard for of_split in self._shards.values() for piece, shard in of_split.shards
        }
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
            linked=len(self._names),
            symbolic=symbolic,
            dry_run=dry_run,
        )


def _folder_of(split: str, piece: Piece) -> str:
    """The folder of the source tree that a split is extracted to."""
    folder = piece.info.splits[piece.split].root
    return folder if split == piece.split or not folder else split


Int64s = npt.NDArray[np.int64]
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Step:
    """One operation, its arguments, and the number of samples before and after."""

    operation: str
    arguments: Mapping[str, Any]
    samples: tuple[int, int]


def table(path: str | os.PathLike[str]) -> SetTable:
    """The table of the packed set in a directory. Raises DatasetError."""
    root = Path(path)
    info = read_dataset_info(root)
    return SetTable(root, info, info.classes, open_pieces(root, info))


@dataclass(frozen=True)
class SetTable:
    """The samples of all splits of an existing or future set.

    root, info: the original set; `concat` keeps those of the first.
    classes: names by label.
    splits: the pieces of each split; see `packer.sets.pieces`.
    steps: operations since the original set.
    changed: differences between index and shards, names of `readers.layout.EDITS`.
    """

    root: Path
    info: DatasetInfo
    classes: tuple[str, ...]
    splits: Mapping[str, tuple[Piece, ...]]
    steps: tuple[Step, ...] = ()
    changed: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return sum(self.counts.values())

    @property
    def counts(self) -> dict[str, int]:
        """Samples by split."""
        return {name: sum(map(len, pieces)) for name, pieces in self.splits.items()}

    @property
    def pieces(self) -> list[Piece]:
        return [piece for pieces in self.splits.values() for piece in pieces]

    @property
    def bases(self) -> dict[str, DatasetInfo]:
        """The sets that the samples are from, by their titles, the first one first."""
        return {str(self.root): self.info} | {str(piece.root): piece.info for piece in self.pieces}

    @property
    def fields(self) -> dict[str, str]:
        """Name -> kind, for all sets. Raises SourceError if a field has two kinds."""
        return unified_fields({title: info.fields for title, info in self.bases.items()})

    @property
    def highest_label(self) -> int:
        """The highest class number of any sample; NO_LABEL (-1) if none has a label."""
        return max((int(piece.current_labels.max(initial=NO_LABEL)) for piece in self.pieces), default=NO_LABEL)

    def labels(self, split: str) -> Int64s:
        """Class numbers of the samples of a split, int64 [n]."""
        return np.concatenate([piece.current_labels for piece in self._split(split)])

    def keys(self, split: str) -> list[str]:
        """The keys of the samples of a split."""
        return [key for piece in self._split(split) for key in piece.keys]

    # --- samples ------------------------------------------------------------------------------------------------
    def of_split(self, split: str) -> SetTable:
        """The samples of one split. Raises UnknownNameError."""
        return self._next({split: self._split(split)}, "subset", {"split": split})

    def where(self, text: str, *, split: str | None = None) -> SetTable:
        """The samples for which an expression is true; with `split`, only samples of this split.

        Raises ValueError, and UnknownNameError for unknown classes and fields. See `readers.where`.
        """
        return self._filtered(self._mask_where(text), split, "subset", {"where": text})

    def select(self, keys: Iterable[str], *, split: str | None = None) -> SetTable:
        """The samples with these keys. Raises UnknownNameError for a key that no sample has."""
        return self._filtered(self._mask_keys(keys, split), split, "subset", {"keys": "listed"})

    def drop(
        self, where: str | None = None, *, keys: Iterable[str] | None = None, split: str | None = None
    ) -> SetTable:
        """All samples except those for which an expression is true, or that have one of these keys. The history records
        neither the keys nor the values that `where` compares keys and columns with.

        split: only samples of this split. Raises the errors of `where` and `select`.
        """
        if (where is None) == (keys is None):
            raise ValueError("select the samples to drop by either an expression (where=…) or keys (keys=…)")
        mask = self._mask_where(where) if where is not None else self._mask_keys(keys or (), split)
        arguments = without_values({"where": where}) if where is not None else {"keys": "listed"}
        return self._filtered(lambda name, piece: ~mask(name, piece), split, "drop", arguments, others_stay=True)

    def without(self, samples: Mapping[str, Int64s], operation: str, arguments: Mapping[str, Any]) -> SetTable:
        """All samples except these (ascending numbers in each split); operation, arguments: for the history."""
        masks = {name: np.ones(count, np.bool_) for name, count in self.counts.items()}
        for name, numbers in samples.items():
            masks[self._name(name)][numbers] = False
        return self._filtered(self._mask_of(masks), None, operation, arguments)

    def every(self, step: int, *, split: str | None = None) -> SetTable:
        """Every `step`-th sample of each split, beginning with the first."""
        if step < 1:
            raise ValueError(f"every is {step}, expected at least 1")
        return self._counted(lambda count: np.arange(0, count, step), split, {"every": step})

    def limit(self, count: int, *, seed: int | None = None, split: str | None = None) -> SetTable:
        """At most `count` samples of each split: the first ones, or random ones drawn with `seed`."""
        if count < 1:
            raise ValueError(f"limit is {count}, expected at least 1")

        def selected(total: int) -> Int64s:
            if seed is None or total <= count:
                return np.arange(min(count, total))
            return np.sort(np.random.RandomState(seed).permutation(total)[:count].astype(np.int64))

        return self._counted(selected, split, {"limit": count} | ({} if seed is None else {"seed": seed}))

    # --- splits, labels, other sets -----------------------------------------------------------------------------
    def split(
        self,
        fractions: Mapping[str, float],
        *,
        seed: int = 0,
        stratify: bool = False,
        group: str | None = None,
        split: str | None = None,
    ) -> SetTable:
        """Divide all samples, or those of one split, at random into new splits.

        fractions: the share of each split; the shares sum to 1.
        seed: from 0 to 2^32 - 1.
        stratify: divide every class in these shares, as closely as possible.
        group: a column of the table from which the set was packed, such as "patient", or "folder", the folder of the
            key: samples with the same value stay together.

        Splits have exactly their share of samples, to within one; with `group`, as closely as the groups allow. Other
        splits do not change. Raises ValueError, BadNameError, UnknownNameError (no such column), and SourceError if a
        split would be empty, or a sample is in no group.
        """
        names = {str(SplitName(name)): share for name, share in fractions.items()}
        dealt = self.splits if split is None else {self._name(split): self._split(split)}
        taken = [name for name in names if name in self.splits and name not in dealt]
        if taken:
            raise ValueError(f"there is a split {taken[0]!r} already; choose another name")
        pieces = [piece for parts in dealt.values() for piece in parts]
        self._check_keys(pieces, "deal one split at a time with split=NAME")
        labels = np.concatenate([piece.current_labels for piece in pieces]) if pieces else np.zeros(0, np.int64)
        labels = labels if stratify else np.zeros(len(labels), np.int64)
        if group is None:
            part = deal(labels, list(names.values()), seed)
        else:
            part = deal_groups(self._groups(pieces, group), labels, list(names.values()), seed)
        starts = np.cumsum([0, *map(len, pieces)])
        new: dict[str, tuple[Piece, ...]] = {}
        for number, name in enumerate(names):
            rows = [np.flatnonzero(part[a:b] == number) for a, b in itertools.pairwise(starts)]
            new[name] = tuple(
                piece.take(selected) for piece, selected in zip(pieces, rows, strict=True) if len(selected)
            )
            if not new[name]:
                whole = "" if group is None else f", since no {group} may be in two splits"
                raise SourceError(f"{self.root}: no sample of {len(labels):,} would be in {name!r}{whole}")
        kept = {name: parts for name, parts in self.splits.items() if name not in dealt}
        arguments: dict[str, Any] = {"fractions": dict(fractions), "seed": seed, "stratify": stratify}
        arguments |= {} if group is None else {"group": group}
        return self._next({**new, **kept}, "split", arguments | ({} if split is None else {"split": split}), "samples")

    def relabel(
        self,
        names: Mapping[str, str] | None = None,
        *,
        labels: LabelChange | None = None,
        classes: Sequence[str] | None = None,
    ) -> SetTable:
        """Change class names or labels.

        names: old name -> new name; a class that gets the name of another class is joined with it.
        labels: the class of single samples by key, as read by `packer.sets.pieces.read_labels`.
        classes: names by label, for a set without names.

        Raises UnknownNameError for an unknown class or key, ValueError.
        """
        if sum(argument is not None for argument in (names, labels, classes)) != 1:
            raise ValueError("give one of names, labels and classes")
        if classes is not None:
            return self._named(classes)
        if names is not None:
            new, numbers = mapped_classes(self.classes, names, str(self.root))
            changed = {
                name: tuple(piece.relabelled(numbers) for piece in pieces) for name, pieces in self.splits.items()
            }
            relabelled = self._next(changed, "relabel", {"map": dict(names)}, *self._edit_of_labels(changed))
            return replace(relabelled, classes=new)
        assert labels is not None
        new, changed = labels_by_key(self.splits, self.classes, labels)
        relabelled = self._next(
            changed, "relabel", {"labels": place_name(labels.title)}, *self._edit_of_labels(changed)
        )
        return replace(relabelled, classes=new)

    def concat(self, *others: SetTable, prefix_keys: bool = False) -> SetTable:
        """The samples of this set, then those of other sets, split by split; classes are unified by name.

        prefix_keys: prefix each key with the name of the set's directory and a slash, with a number if two sets have
            the same name.

        Raises SourceError if the sets cannot be joined (`packer.sets.pieces`), or share a key in one split.
        """
        tables = [self, *others]
        bases = {title: info for table in tables for title, info in table.bases.items()}
        check_alike(bases)
        check_targets({title: target_forms(Path(title), info) for title, info in bases.items()})
        classes = unified_classes([(str(table.root), table.classes, table.highest_label) for table in tables])
        splits: dict[str, tuple[Piece, ...]] = {}
        names = [table.root.resolve().name for table in tables]
        for i, table in enumerate(tables):
            own = names[i] if names.count(names[i]) == 1 else f"{names[i]}-{i}"
            numbers = renumbering(table.classes, classes) if table.classes else None
            for name, pieces in table.splits.items():
                more = [piece if numbers is None else piece.relabelled(numbers) for piece in pieces]
                if prefix_keys:
                    more = [replace(piece, prefix=f"{own}/{piece.prefix}") for piece in more]
                splits[name] = (*splits.get(name, ()), *more)
        for parts in splits.values():
            self._check_keys(parts, "prefix all keys with the names of the sets by prefix_keys=True")
        changed = {*self._edit_of_labels(splits), *(("keys",) if prefix_keys else ())}
        changed |= {edit for table in tables for edit in table.changed}
        merged = self._next(splits, "merge", {"sets": [place_name(table.root) for table in tables]}, *changed)
        return replace(merged, classes=classes)

    def save(self, output: str | os.PathLike[str] | None = None, **options: Any) -> SaveResult:
        """Write a new set to `output`, or by default change the set itself; see `packer.sets.table.save`."""
        return save(self, output, **options)

    # --- inside -------------------------------------------------------------------------------------------------
    def _next(
        self, splits: Mapping[str, tuple[Piece, ...]], operation: str, arguments: Mapping[str, Any], *changed: str
    ) -> SetTable:
        assert all(change in EDITS for change in changed)
        check_splits(splits, str(self.root))
        after = sum(len(piece) for pieces in splits.values() for piece in pieces)
        if not after:
            raise SourceError(f"{self.root}: none of the {plural(len(self), 'sample')} is left")
        step = Step(operation, arguments, (len(self), after))
        splits = {name: pieces for name, pieces in splits.items() if any(map(len, pieces))}
        return replace(self, splits=splits, steps=(*self.steps, step), changed=self.changed | set(changed))

    def _filtered(
        self,
        mask: Callable[[str, Piece], npt.NDArray[np.bool_]],
        split: str | None,
        operation: str,
        arguments: Mapping[str, Any],
        others_stay: bool = False,
    ) -> SetTable:
        selected = None if split is None else self._name(split)
        splits: dict[str, tuple[Piece, ...]] = {}
        for name, pieces in self.splits.items():
            if selected in (None, name):
                kept = (piece.take(np.flatnonzero(mask(name, piece))) for piece in pieces)
                splits[name] = tuple(piece for piece in kept if len(piece))
            elif others_stay:
                splits[name] = pieces
        before, after = len(self), sum(len(piece) for pieces in splits.values() for piece in pieces)
        arguments = dict(arguments) | ({} if split is None else {"split": split})
        return self._next(splits, operation, arguments, *(("samples",) if after < before else ()))

    def _counted(self, choose: Callable[[int], Int64s], split: str | None, arguments: Mapping[str, Any]) -> SetTable:
        selected: dict[str, npt.NDArray[np.bool_]] = {}
        for name, count in self.counts.items():
            selected[name] = np.zeros(count, np.bool_)
            selected[name][choose(count)] = True
        return self._filtered(self._mask_of(selected), split, "subset", arguments)

    def _mask_of(self, masks: Mapping[str, npt.NDArray[np.bool_]]) -> Callable[[str, Piece], npt.NDArray[np.bool_]]:
        starts = {id(piece): start for pieces in self.splits.values() for piece, start in _starts(pieces)}
        return lambda name, piece: masks[name][starts[id(piece)] : starts[id(piece)] + len(piece)]

    def _mask_where(self, text: str) -> Callable[[str, Piece], npt.NDArray[np.bool_]]:
        where, facts = parse_where(text), self._facts()
        return lambda name, piece: where.mask(facts(name, piece))

    def _facts(self) -> Callable[[str, Piece], Facts]:
        """The facts for expressions about a piece of a split."""
        fields, columns = list(self.fields), cache(self._columns)  # read once, and only if used
        return lambda name, piece: piece.facts(
            name, self.classes, fields, lambda names: columns(frozenset(names))[id(piece)]
        )

    def _columns(self, names: frozenset[str]) -> Mapping[int, Mapping[str, Sequence[Any]]]:
        """By the id of each piece, the columns of the tables of all sets; those of `names` with their values."""
        parts = [piece.columns(names) for piece in self.pieces]
        complete_columns(parts, list(map(len, self.pieces)))
        return {id(piece): columns for piece, columns in zip(self.pieces, parts, strict=True)}

    def _groups(self, pieces: Sequence[Piece], name: str) -> Int64s:
        """The group number of each sample of these pieces."""
        facts = self._facts()
        values = [value for piece in pieces for value in group_values(facts("", piece), name)]
        return as_groups(values, [key for piece in pieces for key in piece.keys], name, self.root)

    def _mask_keys(self, keys: Iterable[str], split: str | None) -> Callable[[str, Piece], npt.NDArray[np.bool_]]:
        chosen = frozenset(keys)
        splits = self.splits if split is None else {self._name(split): self._split(split)}
        known = {key for pieces in splits.values() for piece in pieces for key in piece.keys if key in chosen}
        missing = sorted(chosen - known)
        if missing:
            some = listed([repr(key) for key in missing], _SHOWN)
            raise UnknownNameError(f"{self.root}: no sample has {plural(len(missing), 'key')} of those given: {some}")
        return lambda name, piece: np.fromiter((key in chosen for key in piece.keys), np.bool_, len(piece))

    def _named(self, classes: Sequence[str]) -> SetTable:
        highest = self.highest_label
        if self.classes:
            raise ValueError(
                f"{self.root}: its classes have names ({listed(self.classes)}); rename them with names={{old: new}}"
            )
        if len(set(classes)) < len(classes) or len(classes) <= highest:
            raise ValueError(f"expected at least {highest + 1} different names of classes, found {len(set(classes))}")
        return replace(self._next(self.splits, "relabel", {"classes": len(classes)}), classes=tuple(classes))

    def _edit_of_labels(self, splits: Mapping[str, Collection[Piece]]) -> tuple[str, ...]:
        return ("labels",) if any(piece.labels is not None for pieces in splits.values() for piece in pieces) else ()

    def _check_keys(self, pieces: Sequence[Piece], advice: str) -> None:
        """Raise SourceError if two samples of a split would have the same key."""
        if len(pieces) < 2:
            return
        count = sum(map(len, pieces))
        doubles = repeated(lambda: (key for piece in pieces for key in piece.keys), count)
        starts, seen = np.cumsum([0, *map(len, pieces)]), dict[str, int]()
        for position in doubles.tolist():
            number = int(np.searchsorted(starts, position, "right")) - 1
            key = pieces[number].keys[position - int(starts[number])]
            other = seen.setdefault(key, number)
            if other != number:
                raise SourceError(
                    f"the key {key!r} is in {pieces[other].root} ({pieces[other].split}) and in {pieces[number].root} "
                    f"({pieces[number].split}), but keys are unique in a split; {advice}, or drop one of the samples"
                )

    def _name(self, split: str) -> str:
        if split not in self.splits:
            raise UnknownNameError(f"{self.root}: no split {split!r}; it has {', '.join(self.splits)}")
        return split

    def _split(self, split: str) -> tuple[Piece, ...]:
        return self.splits[self._name(split)]


def without_values(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an operation for the history, without the values that `where` compares keys and columns with.

    They may name the people whose samples are removed.
    """
    where = arguments.get("where")
    if not isinstance(where, str):
        return dict(arguments)
    try:
        return {**arguments, "where": parse_where(where).without_values}
    except ValueError:  # written by a later version
        return {**arguments, "where": "…"}


def _starts(pieces: Sequence[Piece]) -> Iterable[tuple[Piece, int]]:
    start = 0
    for piece in pieces:
        yield piece, start
        start += len(piece)


# --- changes as functions of paths, for the command line ------------------------------------------------------------
# Without an output the set itself is changed, under its lock, so that of two concurrent commands the second works on
# the result of the first.


_Path: TypeAlias = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class PruneResult(Result):
    """The removed files of earlier states of a set."""

    path: Path
    files: tuple[str, ...]
    bytes: int
    dry_run: bool = False


def merge(
    paths: Sequence[_Path],
    output: _Path,
    *,
    prefix_keys: bool = False,
    dry_run: bool = False,
    watcher: Watcher | None = None,
) -> SaveResult:
    """Merge sets, split by split. See `SetTable.concat` for the requirements."""
    if len(paths) < 2:
        raise ValueError(f"expected two sets or more to merge, found {len(paths)}")
    first, *others = map(table, paths)
    return first.concat(*others, prefix_keys=prefix_keys).save(output, dry_run=dry_run, watcher=watcher)


def split(
    path: _Path,
    fractions: Mapping[str, float],
    output: _Path | None = None,
    *,
    seed: int = 0,
    stratify: bool = False,
    group: str | None = None,
    split: str | None = None,
    dry_run: bool = False,
    watcher: Watcher | None = None,
) -> SaveResult:
    """Divide the samples of a set, or of one split, into new splits; see `SetTable.split`."""
    return _changed(
        path,
        output,
        lambda whole: whole.split(fractions, seed=seed, stratify=stratify, group=group, split=split),
        dry_run,
        watcher,
    )


def subset(
    path: _Path,
    output: _Path,
    choose: Callable[[SetTable], SetTable],
    *,
    dry_run: bool = False,
    watcher: Watcher | None = None,
) -> SaveResult:
    """A new set of some samples. choose: such as lambda whole: whole.where("min_side >= 64").limit(1000)."""
    return choose(table(path)).save(output, dry_run=dry_run, watcher=watcher)


def relabel(
    path: _Path,
    output: _Path | None = None,
    *,
    names: Mapping[str, str] | None = None,
    labels: _Path | LabelChange | None = None,
    classes: Sequence[str] | None = None,
    dry_run: bool = False,
    watcher: Watcher | None = None,
) -> SaveResult:
    """Rename classes, or give samples other labels. labels: a table with the columns key and label.

    See `SetTable.relabel`.
    """
    change = read_labels(Path(labels)) if isinstance(labels, (str, os.PathLike)) else labels
    return _changed(path, output, lambda whole: whole.relabel(names, labels=change, classes=classes), dry_run, watcher)


def drop(
    path: _Path,
    output: _Path | None = None,
    *,
    where: str | None = None,
    keys: Iterable[str] | None = None,
    split: str | None = None,
    dry_run: bool = False,
    watcher: Watcher | None = None,
) -> SaveResult:
    """Remove samples from the index of a set; see `SetTable.drop`. Their bytes stay in the shards (`packer.erase`)."""
    return _changed(path, output, lambda whole: whole.drop(where, keys=keys, split=split), dry_run, watcher)


def prune(path: _Path, *, dry_run: bool = False, watcher: Watcher | None = None) -> PruneResult:
    """Remove the indexes and shards of earlier states of a set, which readers may still have open."""
    root = Path(path)
    if dry_run:
        info = table(root).info
        return PruneResult(root, tuple(retired.path for retired in info.retired), 0, dry_run)
    with Change(root, watcher or Silent()) as change:
        assert change.info is not None
        files = tuple(retired.path for retired in change.info.retired)
        return PruneResult(root, files, change.remove_retired())


def read_keys(path: _Path) -> list[str]:
    """Keys from a text file, one per line. Raises SourceError."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path}: cannot be read as text in UTF-8: {error}") from error
    keys = [line.removesuffix("\r") for line in text.split("\n") if line.strip()]
    if not keys:
        raise SourceError(f"{path}: has no keys; expected one per line")
    return keys


def _changed(
    path: _Path,
    output: _Path | None,
    change_of: Callable[[SetTable], SetTable],
    dry_run: bool,
    watcher: Watcher | None,
) -> SaveResult:
    if output is not None or dry_run:
        return change_of(table(path)).save(output, dry_run=dry_run, watcher=watcher)
    root, watcher = Path(path), watcher or Silent()
    with Change(root, watcher) as change:
        return write_table(change, change_of(table(root)), watcher)
