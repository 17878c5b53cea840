"""Changes of sets as functions of paths: what `packer merge`, `split`, `subset`, `relabel`, `drop` and `prune` do.

Each is one or two methods of `packer.sets.table.SetTable` and its `save`. Without an output the set itself is changed,
under its lock, so that of two commands at once the second works on what the first has made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from cache.errors import SourceError
from cache.messages import Silent, Watcher
from packer.output import Result
from packer.sets.change import Change
from packer.sets.relabel import LabelChange, read_labels
from packer.sets.save import SaveResult, write_table
from packer.sets.table import SetTable, table

__all__ = ["PruneResult", "drop", "merge", "prune", "read_keys", "relabel", "split", "subset"]

_Path: TypeAlias = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class PruneResult(Result):
    """What was removed of earlier states of a set."""

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
    """One set of several, split by split. See `SetTable.concat` for what they must have in common."""
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
    """Deal the samples of a set, or of one split, to new splits; see `SetTable.split`."""
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
    """A new set of some samples. choose: as lambda whole: whole.where("min_side >= 64").limit(1000)."""
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
    """Give classes other names, or samples other labels. labels: a table with the columns key and label.

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
    """Take samples out of the index of a set; see `SetTable.drop`. Their bytes stay in the shards (`packer.erase`)."""
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
    """Keys from a text file, one a line. Raises SourceError."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path}: cannot be read as text in UTF-8: {error}") from error
    keys = [line.removesuffix("\r") for line in text.split("\n") if line.strip()]
    if not keys:
        raise SourceError(f"{path}: holds no keys; expected one a line")
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
