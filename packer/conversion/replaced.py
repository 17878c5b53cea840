"""The set that `--overwrite` replaces: known before anything of it is removed, and no more is removed than was made.

Its dataset.json names shards and indexes, and is not trusted: nothing behind a link is removed, of an index its
columns only, and of shards those that packer wrote, and links to others. What cannot be read is not replaced, since
nobody could say what that would remove. The first step of the removal moves dataset.json into the working folder, so
that a commit that is cut off goes on from there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from cache.files import Folder, PathError
from cache.text import plural
from packer.conversion.journal import REPLACED_FOLDER, Journal
from packer.conversion.plan import Plan
from packer.index_writer import is_index, remove_index
from packer.output import output_errors
from packer.sources.base import SourceListing
from readers.errors import DatasetError, OutputError
from readers.layout import DATASET_FILE, DatasetInfo, read_dataset_info
from readers.names import QUARANTINE_FOLDER, REPORT_FILE

__all__ = ["ReplacedSet", "replaced_set"]

_NAMED = 5


@output_errors()
def replaced_set(journal: Journal) -> ReplacedSet | None:
    """The set that this conversion replaces, or has begun to; None where there is none.

    Raises OutputError where its dataset.json cannot be read, or names what may not be removed.
    """
    for where in (journal.out, journal.folder / REPLACED_FOLDER):
        if os.path.lexists(where / DATASET_FILE):
            try:
                return ReplacedSet(journal.place, read_dataset_info(where))
            except DatasetError as error:
                raise OutputError(
                    f"{error}. So nobody can say what --overwrite would remove; repair the set with  packer index "
                    f"{journal.out}, remove the directory yourself, or choose another output with -o"
                ) from error
            except PathError as error:
                raise OutputError(
                    f"{error}; the set in {journal.out} names it. Remove that set yourself, or choose another output "
                    f"with -o"
                ) from error
    return None


class ReplacedSet:
    """What the set in `place` consists of. kept: shards that stay, because packer did not write them."""

    def __init__(self, place: Folder, info: DatasetInfo) -> None:
        self._place, self._info = place, info
        shards = {shard.path: place.kind(shard.path) for split in info.splits.values() for shard in split.shards}
        written = "by" in info.made
        self._shards = [name for name, kind in shards.items() if kind == "link" or (written and kind == "file")]
        self.kept = [name for name, kind in shards.items() if kind and name not in self._shards]
        self._indexes = [split.index for split in info.splits.values()]
        for index in self._indexes:
            if place.kind(index):
                place.folder(index).close()  # a link in its path, or something else than a folder, is an error
        left_out = info.made.get("left_out")
        self._quarantine = isinstance(left_out, dict) and "quarantined" in left_out

    @output_errors()
    def check(self, plan: Plan, read: Iterable[str | os.PathLike[str]]) -> None:
        """Raises OutputError where a file that stays is in the way of `plan`, or one of `read` would be removed."""
        place = self._place
        names = [*(shard.name for shard in plan.shards), *(f"{split}.index" for split in plan.specs)]
        going = {*self._shards, *(name for name in self._indexes if is_index(place, name))}
        for name in names:
            if name not in going and place.kind(name):
                raise OutputError(
                    f"{place.path / name}: is in the way of the new set, and --overwrite removes nothing that packer "
                    f"did not write; move it, or choose another output with -o"
                )
        removed = set(self._identities())
        for path in read:
            try:
                found = os.stat(path)
            except OSError:  # whoever reads it says so
                continue
            if (found.st_dev, found.st_ino) in removed:
                raise OutputError(
                    f"{os.fspath(path)}: belongs to the set in {place.path}, which --overwrite would remove before "
                    f"its source is safe; choose another output with -o"
                )

    def told(self, plan: Plan, listing: SourceListing) -> Iterator[str]:
        """What goes and what stays, for the user."""
        info = self._info
        samples = sum(split.samples for split in info.splits.values())
        splits = ", ".join(f"{name} {split.samples:,}" for name, split in info.splits.items())
        yield (
            f"replacing the set in {self._place.path}: {plural(samples, 'sample')} "
            f"({splits or 'no splits'}), {plural(len(info.classes), 'class')}, by {plural(plan.samples, 'sample')}, "
            f"{plural(len(listing.classes), 'class')}"
        )
        for what, old, new in (
            ("splits", info.splits, plan.specs),
            ("classes", info.classes, listing.classes),
            ("fields", info.fields, listing.fields),
        ):
            gone = [name for name in old if name not in set(new)]
            if gone:
                yield f"warning: {what} that the new set does not have: {_named(gone)}"
        if self.kept:
            yield f"these shards stay, because packer did not write them: {_named(self.kept)}"

    @output_errors()
    def remove(self, journal: Journal) -> None:
        """Remove it; called again after a crash, go on."""
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
        if self._quarantine:
            place.remove_tree(QUARANTINE_FOLDER)
        work.remove_tree(REPLACED_FOLDER)

    def _identities(self) -> Iterator[tuple[int, int]]:
        """Device and inode of every file that goes."""
        place = self._place
        for name in (*self._shards, REPORT_FILE, DATASET_FILE):
            found = place.lstat(name)
            if found is not None:
                yield found.st_dev, found.st_ino
        folders = [name for name in self._indexes if place.kind(name)]
        if self._quarantine and place.kind(QUARANTINE_FOLDER) == "folder":
            folders.append(QUARANTINE_FOLDER)
        for name in folders:
            with place.folder(name) as folder:
                for _, _, files, descriptor in os.fwalk(".", dir_fd=folder.descriptor):
                    for file in files:
                        found = os.stat(file, dir_fd=descriptor, follow_symlinks=False)
                        yield found.st_dev, found.st_ino


def _named(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _NAMED:,} more" if len(listed) > _NAMED else ""
    return ", ".join(listed[:_NAMED]) + more
