"""What a source promises: a quick listing of its samples, and their bytes, read in the worker.

`list` looks at names and sizes only and runs once. `open` gives, in each worker, something that reads the samples of
a slice of that listing into the worker's arena. A source object is small and picklable.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from packer.conversion.arena import Arena
from readers.errors import SourceError
from readers.sample import Buffer

__all__ = [
    "PickledSlice",
    "Slice",
    "Source",
    "SourceListing",
    "SourceReader",
    "SplitListing",
    "StrayReader",
    "check_names",
]


_BLOCK_SAMPLES = 1024
PickledSlice: TypeAlias = bytes


class Slice(NamedTuple):
    """Some samples of a split, as a worker gets them: parallel lists.

    names[i]: original file name of each field, "" for none. bytes[i]: of all fields together, 0 if unknown.
    places[i]: whatever the source's reader needs to find the sample.
    """

    keys: list[str]
    labels: list[int]
    names: list[tuple[str, ...]]
    bytes: list[int]
    places: list[Any]


@dataclass(slots=True)
class SplitListing:
    """All samples of one split, in the order they will be packed; root is the folder the split came from.

    stamps: modification times or other marks of change, part of what makes two listings the same.
    """

    root: str = ""
    keys: list[str] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    names: list[tuple[str, ...]] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    places: list[Any] = field(default_factory=list)
    stamps: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.keys)

    def blocks(self, indices: npt.NDArray[np.int64] | range) -> tuple[PickledSlice, ...]:
        """The samples at `indices`, for a worker: pickled slices of a thousand samples each.

        A worker unpacks one at a time, so a shard of millions of samples costs it little memory.
        """
        parts = (indices[first : first + _BLOCK_SAMPLES] for first in range(0, len(indices), _BLOCK_SAMPLES))
        return tuple(pickle.dumps(tuple(self._slice(part)), pickle.HIGHEST_PROTOCOL) for part in parts)

    def _slice(self, indices: npt.NDArray[np.int64] | range) -> Slice:
        if isinstance(indices, range):
            part = slice(indices.start, indices.stop)
            return Slice(self.keys[part], self.labels[part], self.names[part], self.bytes[part], self.places[part])
        order = indices.tolist()
        columns = (self.keys, self.labels, self.names, self.bytes, self.places)
        return Slice(*([column[i] for i in order] for column in columns))


@dataclass(slots=True)
class SourceListing:
    """What a source holds.

    left_out: (path, reason) of files that are not samples. skip_strays: a file that turns out to be no image, and is
    not named like one, is left out rather than an error; the source's reader is a `StrayReader`. shuffles: samples can
    be read in any order at no great cost.
    """

    splits: dict[str, SplitListing]
    fields: Mapping[str, str]
    classes: tuple[str, ...] = ()
    left_out: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    skip_strays: bool = False
    shuffles: bool = True


class SourceReader(Protocol):
    """Reads samples in a worker."""

    def read(self, place: Any, arena: Arena) -> Sequence[Buffer | None]:
        """The payload of every field, None where absent; in the arena or in memory of its own.

        Raises BadSampleError (this sample cannot be had) or SourceError (nothing can).
        """

    def __enter__(self) -> SourceReader: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class StrayReader(SourceReader, Protocol):
    """A reader of files of which some may be no image: with `skip_strays`, they are looked at before they are read."""

    def head(self, place: Any) -> bytes:
        """The first bytes of a file, up to HEAD_BYTES of `packer.sources.contents`. Raises as `read` does."""


class Source(Protocol):
    """Where samples come from."""

    @property
    def title(self) -> str:
        """What it is, for people and for dataset.json."""

    def list(self, split: str | None) -> SourceListing:
        """Every sample of every split, or of the one split named. Raises SourceError."""

    def open(self) -> SourceReader: ...

    def paths(self, listing: SourceListing) -> Iterator[str | os.PathLike[str]]:
        """Every file that its samples are read from, so that none of them is overwritten by what is made of them."""


def check_names(names: Sequence[str], where: str) -> None:
    """Refuse names that no container can keep: not UTF-8, NUL, absolute, or with a `..` in them."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise SourceError(f"{where}: the name {name!r} is not UTF-8; rename it (see convmv)") from error
        if not name or "\0" in name or name[0] == "/" or (".." in name and ".." in PurePosixPath(name).parts):
            raise SourceError(f"{where}: {name!r} is no name for a sample: empty, absolute, or leads out of its folder")
