"""A column of strings: one UTF-8 blob and n + 1 offsets, so that a billion keys are two mapped files.

blob     uint8  [total bytes]   the strings one after the other, UTF-8, without terminators
offsets  uint64 [n + 1]         string i is blob[offsets[i]:offsets[i + 1]]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from readers.errors import DatasetError

__all__ = ["Strings"]


class Strings(Sequence[str]):
    """A read-only sequence of strings over a blob and its offsets; nothing is decoded until asked for.

    Raises DatasetError where the offsets are not a rising sequence inside the blob.
    """

    __slots__ = ("blob", "offsets")

    def __init__(self, blob: npt.NDArray[np.uint8], offsets: npt.NDArray[np.uint64]) -> None:
        if len(offsets) == 0:
            raise DatasetError("a string column needs at least one offset, found none")
        if int(offsets[0]) != 0 or int(offsets[-1]) != len(blob):
            raise DatasetError(
                f"string offsets must run from 0 to the blob's {len(blob)} bytes, "
                f"found {int(offsets[0])} to {int(offsets[-1])}"
            )
        self.blob = blob
        self.offsets = offsets

    @classmethod
    def of(cls, strings: Iterable[str]) -> Strings:
        """A column from Python strings. Lone surrogates (names that are not UTF-8) raise UnicodeEncodeError."""
        encoded = [text.encode() for text in strings]
        offsets = np.zeros(len(encoded) + 1, np.uint64)
        np.cumsum([len(text) for text in encoded], out=offsets[1:])
        return cls(np.frombuffer(b"".join(encoded), np.uint8), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        n = len(self)
        i = index + n if index < 0 else index
        if not 0 <= i < n:
            raise IndexError(f"index {index} is outside the {n} strings of this column")
        start, stop = int(self.offsets[i]), int(self.offsets[i + 1])
        if not start <= stop <= len(self.blob):
            raise DatasetError(f"string {i} has the offsets {start} to {stop}, outside the blob of {len(self.blob)}")
        try:
            return str(self.blob[start:stop].tobytes(), "utf-8")
        except UnicodeDecodeError as error:
            raise DatasetError(f"string {i} is not UTF-8: {error}") from error

    def __iter__(self) -> Iterator[str]:
        bounds = self.offsets
        if len(bounds) > 2 and bool((bounds[1:] < bounds[:-1]).any()):
            raise DatasetError("the offsets of a string column fall instead of rising")
        step = 65536
        for first in range(0, len(self), step):
            part = bounds[first : first + step + 1].tolist()
            blob = self.blob[part[0] : part[-1]].tobytes()
            for start, stop in itertools.pairwise(part):
                try:
                    yield str(blob[start - part[0] : stop - part[0]], "utf-8")
                except UnicodeDecodeError as error:
                    raise DatasetError(f"a string of this column is not UTF-8: {error}") from error

    def take(self, indices: npt.NDArray[Any]) -> Strings:
        """The strings at `indices` (int64 [k]) as a new column."""
        first, last = self.offsets[indices], self.offsets[indices + 1]
        if bool(((first > last) | (last > len(self.blob))).any()):
            raise DatasetError(
                f"the offsets of a string column fall, or lead out of its blob of {len(self.blob)} bytes"
            )
        starts = first.astype(np.int64)
        lengths = last.astype(np.int64) - starts
        offsets = np.zeros(len(indices) + 1, np.uint64)
        np.cumsum(lengths, out=offsets[1:])
        # byte j of the new blob comes from byte j + shift of the old one, where shift is constant per string
        shift = np.repeat(starts - offsets[:-1].astype(np.int64), lengths)
        return Strings(self.blob[shift + np.arange(len(shift))], offsets)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Strings):
            return np.array_equal(self.offsets, other.offsets) and np.array_equal(self.blob, other.blob)
        if isinstance(other, Sequence) and not isinstance(other, (str, bytes)):
            return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(repr(text) for text in self[:3])
        return f"Strings([{shown}{', …' if len(self) > 3 else ''}], n={len(self)})"
