"""Recognising a set: whether files that a reader opens later are still those of the set that it was opened from.

Shards, and most columns of the index, are opened when they are first needed, also by a reader that was unpickled in
another process. By then the directory may hold another set, with the same names and sizes. Two things tell:

    the set       dataset.json is the last file of a set that is written and the first that is removed. So a file that
                  was opened while dataset.json still was the one that had been read belongs to the set. Where it is
                  another file, it is read again: a copy of the same set is as good, and commands that change a set
                  leave the files that readers need, listed or as retired.
    the samples   The last sample of each shard is compared with its CRC32C in the index, since a shard may be put in
                  the place of another by hand. One that was restored, copied or linked is the same shard.

This is done when a process opens a shard for the first time, or in another state than before. Nothing is stored on the
disk: inodes and times are those that this reader has seen.
"""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cache.errors import DatasetError, MissingError, StaleIndexError
from cache.files import FileState
from cache.messages import quoted
from cache.stores.files import OpenFile, unreadable
from readers.index import ABSENT, Columns
from readers.layout import DatasetInfo, read_dataset_info
from readers.names import DATASET_FILE

__all__ = ["OpenedSet", "Recognised"]

_SAMPLES = 5  # of a shard, that are compared where the last one is wrong


class OpenedSet:
    """One split of the set in the directory `root`, in the state in which dataset.json was read (`info`).

    place: the directory or the address of the set, as messages name it.
    """

    def __init__(self, root: Path, info: DatasetInfo, split: str, place: str = "") -> None:
        self.root, self.info, self.split, self.place = root, info, split, place or str(root)
        self._seen: tuple[Any, frozenset[str]] = (info.read_from, frozenset())

    def check(self, path: str) -> None:
        """Raise StaleIndexError where a file that was just opened is not of this set.

        path: of the shard, or of the folder of the index, as dataset.json names it.
        """
        try:
            gone, lost = self._look()
        except OSError as error:
            raise unreadable(str(self.root / DATASET_FILE), error) from error
        if gone or path in lost:
            raise self._replaced(gone, f"{path} is of another set") from None

    def explained(self, error: Exception) -> Exception:
        """The StaleIndexError of a set that was replaced, or `error`, which occurred with one of its files."""
        if str(error).startswith(self._prefix):
            return error
        try:
            gone, lost = self._look()
        except OSError:
            return error
        return self._replaced(gone, str(error)) if gone or lost else error

    def _state(self) -> Any:
        """What differs after a change of dataset.json. Raises OSError."""
        return FileState.at(self.root / DATASET_FILE)

    def _read(self) -> tuple[Any, DatasetInfo]:
        """dataset.json as it is now, and its `_state`. Raises DatasetError, OSError."""
        now = read_dataset_info(self.root)
        return now.read_from, now

    def _look(self) -> tuple[str, frozenset[str]]:
        """Why there is no set any more, "" where there is; and which files of the split are no longer part of it."""
        seen, lost = self._seen
        try:
            if self._state() != seen:
                state, now = self._read()
                lost = self._lost_in(now)
                self._seen = state, lost
            return "", lost
        except (FileNotFoundError, MissingError):
            return f"is being replaced or was removed (its {DATASET_FILE} has gone)", frozenset()
        except DatasetError as error:
            return f"is being replaced or was damaged ({error})", frozenset()

    def _lost_in(self, now: DatasetInfo) -> frozenset[str]:
        """The paths of this split at which the set `now` has something else, or nothing."""
        of_split = replace(self.info, splits={self.split: self.info.splits[self.split]})
        kept = {retired.path: retired.content for retired in now.retired} | now.contents()
        return frozenset(path for path, content in of_split.contents().items() if kept.get(path) not in (content, ""))

    @property
    def _prefix(self) -> str:
        return f"{self.place}: the set "

    def _replaced(self, gone: str, detail: str) -> StaleIndexError:
        state = gone or "has been replaced by another"
        return StaleIndexError(f"{self._prefix}{state} since it was opened; open it again when that is done ({detail})")


class Recognised:
    """For `Files`: raises StaleIndexError for a shard that is not the one that the index describes.

    opened: the set that the shard is in; None where only its samples can tell.
    samples: compare some; False where every one that is read is compared, so that a damaged shard can be read in part.
    """

    def __init__(self, columns: Columns, opened: OpenedSet | None, samples: bool = True) -> None:
        self.columns, self.opened, self.samples = columns, opened, samples

    def __call__(self, shard: int, path: str, file: OpenFile) -> None:
        if self.opened is not None:
            self.opened.check(path)
        if not self.samples:
            return
        field, first, stop = self._rows(shard)
        if stop == first or self._is_right(file, field, stop - 1):
            return
        others = {first + (stop - 1 - first) * i // (_SAMPLES - 1) for i in range(_SAMPLES - 1)} - {stop - 1}
        if others and all(self._is_right(file, field, row) for row in others):
            return  # one damaged sample, which reading it reports
        raise StaleIndexError(
            f"{file.path}: not the shard that was indexed, though it has its size: samples have another CRC32C than in "
            f"the index; bring the right one back, or, if it is damaged, read what is whole of it with verify=True;  "
            f"packer verify {quoted(self.columns.place)}  names the rest"
        )

    def _rows(self, shard: int) -> tuple[str, int, int]:
        """A field that is in the shard, and the rows [first, stop) that have it there; none where that is unknown."""
        columns = self.columns
        fields = [next((field for field in columns.fields if field not in columns.separate), ""), *columns.separate]
        for field in filter(None, fields):
            of_rows = columns.shard_column(field)  # samples are in the order of their shards
            first, stop = of_rows.searchsorted(np.array([shard, shard + 1], of_rows.dtype)).tolist()
            if first < stop and of_rows[first] == of_rows[stop - 1] == shard:
                return field, first, stop
        return "", 0, 0

    def _is_right(self, file: OpenFile, field: str, row: int) -> bool:
        """Whether a payload has the checksum of the index; True where there is nothing to compare."""
        from crc32c import crc32c

        offset, length, expected = (
            int(self.columns.field_column(field, name)[row]) for name in ("offset", "length", "crc32c")
        )
        if offset == ABSENT or not length or offset + length > file.bytes:
            return True
        try:
            return crc32c(file.reread(offset, length) if file.view is None else file.view[offset:][:length]) == expected
        except StaleIndexError as error:
            if getattr(error.__cause__, "errno", None) == errno.ESTALE:
                raise
            return True  # reading the sample reports it
