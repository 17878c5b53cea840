"""Every store keeps the contract of `suites.stores`; so does the smallest one that somebody may write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from suites.stores import NAMES, SIZES, StoreSuite

from readers.errors import StaleIndexError


class Smallest:
    """A whole file for each extent."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def read_one(self, row: int, shard: int, offset: int, length: int) -> bytes:
        try:
            data = (self.root / NAMES[shard]).read_bytes()
        except OSError as error:
            raise StaleIndexError(f"{NAMES[shard]}: {error.strerror}") from error
        if len(data) != SIZES[shard] or not 0 <= offset <= offset + length <= len(data):
            raise StaleIndexError(f"{NAMES[shard]}: {length} bytes at {offset} are not in its {len(data)}")
        return data[offset : offset + length]

    def read(self, extents: Any) -> list[bytes]:
        return [self.read_one(*one) for one in zip(*(column.tolist() for column in extents), strict=True)]

    def prefetch(self, extents: Any) -> None:
        pass

    def close(self) -> None:
        pass

    def __enter__(self) -> Smallest:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TestSmallest(StoreSuite):
    def open(self, root: Path) -> Any:
        return Smallest(root)
