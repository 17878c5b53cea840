"""The set that is in a place already, and what of it a change would lose: samples, shards, splits, classes, fields."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cache.text import plural
from readers.errors import DatasetError
from readers.layout import DATASET_FILE, DatasetInfo, ShardInfo, read_dataset_info

__all__ = ["ExistingSet", "find_set", "listed", "losses"]

_NAMED = 3


@dataclass(frozen=True)
class ExistingSet:
    """A directory with a dataset.json. info: None where that cannot be read; fault then says why."""

    root: Path
    info: DatasetInfo | None
    fault: str = ""

    @cached_property
    def split_of(self) -> dict[str, str]:
        """The split of each shard, by the shard's real path."""
        splits = self.info.splits.items() if self.info else ()
        return {os.path.realpath(self.root / shard.path): name for name, split in splits for shard in split.shards}

    def has(self, path: Path) -> bool:
        """Whether a file is one of the set's shards."""
        return os.path.realpath(path) in self.split_of


def find_set(root: Path) -> ExistingSet | None:
    """The set in a directory; None where there is no dataset.json."""
    if not os.path.lexists(root / DATASET_FILE):
        return None
    try:
        return ExistingSet(root, read_dataset_info(root))
    except DatasetError as error:
        return ExistingSet(root, None, str(error))


def losses(old: DatasetInfo, new: DatasetInfo) -> list[str]:
    """What `old` has and `new`, in the same directory, has not; in words, empty where nothing is lost.

    A shard is known by its path. One whose bytes differ counts as a loss too: its old checksums are the only thing by
    which damage can be told from a change.
    """
    there = {shard.path: shard for split in new.splits.values() for shard in split.shards}
    known = [shard for split in old.splits.values() for shard in split.shards]
    found: list[str] = []
    gone = [shard for shard in known if shard.path not in there]
    if gone:
        samples = sum(shard.samples for shard in gone)
        found.append(f"{plural(samples, 'sample')} in {plural(len(gone), 'shard')} ({_paths(gone)})")
    for shard in known:
        now = there.get(shard.path)
        if now is not None and now.samples < shard.samples:
            lost = plural(shard.samples - now.samples, "sample")
            found.append(f"{lost} of {shard.path}, which had {shard.samples} and has {now.samples}")
    changed = [
        s for s in known if s.path in there and (s.bytes, s.crc32c) != (there[s.path].bytes, there[s.path].crc32c)
    ]
    if changed:
        found.append(
            f"the checksums of {plural(len(changed), 'shard')} ({_paths(changed)}), whose bytes are not those that "
            f"were indexed: damaged, or rewritten"
        )
    found += _names("split", old.splits.keys() - {name for name, split in new.splits.items() if split.shards})
    if old.classes != new.classes[: len(old.classes)]:
        missing = [name for name in old.classes if name not in new.classes]
        found += _names("class", missing) if missing else ["the order of the classes"]
    return found + _names("field", [name for name in old.fields if name not in new.fields])


def listed(names: Sequence[str]) -> str:
    """The first few of some names."""
    return ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")


def _names(what: str, names: Collection[str]) -> list[str]:
    return [f"{plural(len(names), what)} ({listed(sorted(names))})"] if names else []


def _paths(shards: Sequence[ShardInfo]) -> str:
    return listed([shard.path for shard in shards])
