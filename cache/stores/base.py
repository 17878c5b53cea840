"""What a store promises: the bytes at extents.

An extent is one run of bytes in one shard. A store knows no samples, fields, images or containers: a table says where
the bytes of a sample are, and a store gets them, from files, from a server, from a copy with its source behind it, or
from a cache over any other store. So stores stack, and one that is made elsewhere needs a single method, `read_one`.

An extent that is not inside its shard, a shard that is gone, and one that is not as large as it was are a
StaleIndexError, never other bytes. Stores pickle by what they were opened
with, their threads share them, and they work in forked children.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["Buffer", "Extents", "Int64s", "Shards", "Store", "StoreOver"]

Buffer: TypeAlias = bytes | memoryview
Int64s: TypeAlias = npt.NDArray[np.int64]
_S = TypeVar("_S", bound="Store")


class Extents(NamedTuple):
    """Where k payloads are: int64 arrays of length k.

    row: a number that no other payload of the table has, the same in every process; caches use it as their key.
    shard: position in the store's list of shards. offset, length: bytes.
    """

    row: Int64s
    shard: Int64s
    offset: Int64s
    length: Int64s

    def take(self, which: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Extents:
        """Some of them, by position or by mask."""
        return Extents(*(column[which] for column in self))


class Shards(NamedTuple):
    """The shards of a store: their paths, relative to where they are, and their sizes in bytes."""

    paths: Sequence[str]
    bytes: Sequence[int]


class Store(ABC):
    """Bytes at extents; see the module."""

    @abstractmethod
    def read_one(self, row: int, shard: int, offset: int, length: int) -> Buffer:
        """The bytes of one extent. Raises StaleIndexError."""

    def read(self, extents: Extents) -> list[Buffer]:
        """The bytes of many extents, in the order asked for. Views stay as they are for as long as they are held."""
        return [self.read_one(*one) for one in zip(*(column.tolist() for column in extents), strict=True)]

    def prefetch(self, extents: Extents, below_bytes: int | None = None) -> None:  # noqa: B027
        """Announce extents that will be read soon; returns at once.

        below_bytes: leave out runs of this size and more, which keep a disk busy by themselves.
        """

    def check(self, shard: int) -> None:  # noqa: B027
        """Compare the size of a shard with what is known of it. Raises StaleIndexError."""

    def place(self, shard: int) -> str:
        """The path or address of a shard, for messages and for readers of their own."""
        return f"shard {shard}"

    @property
    def tracks_files(self) -> bool:
        """Whether files are read under their names, so that they may be rewritten: then `state` and `is_current` say
        so. Elsewhere the table vouches for the bytes."""
        return False

    def state(self) -> str:
        """What tells the files as they were listed from those in another state."""
        return ""

    def is_current(self, shard: int) -> bool:
        """Whether the file of a shard is still the one that `state` speaks of."""
        return True

    def stats(self) -> Any:
        """What was read from where, of a store that counts it (`CopyStats`, `CachedStats`); None elsewhere."""
        return None

    def close(self) -> None:  # noqa: B027
        """Let go of what is open; the next read opens it again."""

    def __enter__(self: _S) -> _S:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class StoreOver(Store):
    """What a store over another one passes on."""

    source: Store

    def prefetch(self, extents: Extents, below_bytes: int | None = None) -> None:
        self.source.prefetch(extents, below_bytes)

    def check(self, shard: int) -> None:
        self.source.check(shard)

    def place(self, shard: int) -> str:
        return self.source.place(shard)

    @property
    def tracks_files(self) -> bool:
        return self.source.tracks_files

    def state(self) -> str:
        return self.source.state()

    def is_current(self, shard: int) -> bool:
        return self.source.is_current(shard)

    def stats(self) -> Any:
        return self.source.stats()

    def close(self) -> None:
        self.source.close()
