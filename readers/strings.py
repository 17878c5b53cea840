"""A column of strings: one UTF-8 blob and n + 1 offsets, so that a billion keys are two mapped files.

blob     uint8  [total bytes]   the strings one after the other, UTF-8, without terminators
offsets  uint64 [n + 1]         string i is blob[offsets[i]:offsets[i + 1]]
"""

from __future__ import annotations

import itertools
import operator
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar, overload

import numpy as np
import numpy.typing as npt

from cache.errors import DatasetError

_BLOCK = 4096
_T = TypeVar("_T")
_S = TypeVar("_S", bound="Strings")


class LazySequence(Sequence[_T]):
    """A read-only sequence whose items are built on use; equal to any sequence of the same items.

    A subclass defines `__len__`, and `_at` or `_between` or both.
    """

    __slots__ = ()

    def _at(self, number: int) -> _T:
        """Item `number`, 0 <= number < len."""
        return next(self._between(number, number + 1))

    def _between(self, first: int, stop: int) -> Iterator[_T]:
        """The items [first, stop)."""
        return map(self._at, range(first, stop))

    def __iter__(self) -> Iterator[_T]:
        return self._between(0, len(self))

    @overload
    def __getitem__(self, index: int) -> _T: ...
    @overload
    def __getitem__(self, index: slice) -> list[_T]: ...
    def __getitem__(self, index: int | slice) -> _T | list[_T]:
        n = len(self)
        if isinstance(index, slice):
            first, stop, step = index.indices(n)
            numbers = range(first, stop, step)
            return list(self._between(first, max(first, stop)) if step == 1 else map(self._at, numbers))
        if not -n <= index < n:
            raise IndexError(f"index {index} is outside the {n} items")
        return self._at(index + n if index < 0 else index)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, (str, bytes)):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]


class Strings(LazySequence[str]):
    """A read-only sequence of strings over a blob and its offsets, each decoded on use.

    Raises DatasetError where the offsets are not a rising sequence inside the blob.
    """

    __slots__ = ("blob", "offsets")
    _errors: ClassVar[str] = "strict"

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
        encoded = [text.encode("utf-8", cls._errors) for text in strings]
        offsets = np.zeros(len(encoded) + 1, np.uint64)
        np.cumsum([len(text) for text in encoded], out=offsets[1:])
        return cls(np.frombuffer(b"".join(encoded), np.uint8), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def _at(self, number: int) -> str:
        start, stop = int(self.offsets[number]), int(self.offsets[number + 1])
        if not start <= stop <= len(self.blob):
            raise DatasetError(
                f"string {number} has the offsets {start} to {stop}, outside the blob of {len(self.blob)}"
            )
        try:
            return str(self.blob[start:stop].tobytes(), "utf-8", self._errors)
        except UnicodeDecodeError as error:
            raise DatasetError(f"string {number} is not UTF-8: {error}") from error

    def _between(self, first: int, stop: int) -> Iterator[str]:
        """The strings [first, stop), a block of them in memory at a time."""
        bounds = self.offsets
        if len(bounds) > 2 and bool((bounds[first + 1 : stop + 1] < bounds[first:stop]).any()):
            raise DatasetError("the offsets of a string column fall instead of rising")
        for start in range(first, stop, _BLOCK):
            part = bounds[start : min(start + _BLOCK, stop) + 1].tolist()
            base = part[0]
            data = self.blob[base : part[-1]].tobytes()
            if data.isascii():
                text = data.decode("ascii")
                for begin, end in itertools.pairwise(part):
                    yield text[begin - base : end - base]
                continue
            for begin, end in itertools.pairwise(part):
                try:
                    yield str(data[begin - base : end - base], "utf-8", self._errors)
                except UnicodeDecodeError as error:
                    raise DatasetError(f"a string of this column is not UTF-8: {error}") from error

    def take(self: _S, indices: npt.NDArray[Any]) -> _S:
        """The strings at `indices` (int64 [k]) as a new column."""
        offsets = np.zeros(len(indices) + 1, np.uint64)
        for first in range(0, len(indices), _BLOCK):
            part = indices[first : first + _BLOCK]
            starts, stops = self.offsets[part], self.offsets[part + 1]
            if bool(((starts > stops) | (stops > len(self.blob))).any()):
                raise DatasetError(
                    f"the offsets of a string column fall, or lead out of its blob of {len(self.blob)} bytes"
                )
            offsets[first + 1 : first + len(part) + 1] = stops - starts
        np.cumsum(offsets, out=offsets)
        blob = np.empty(int(offsets[-1]), np.uint8)
        for first in range(0, len(indices), _BLOCK):
            starts = self.offsets[indices[first : first + _BLOCK]].astype(np.int64)
            bounds = offsets[first : first + len(starts) + 1].astype(np.int64)
            # byte j of the new blob comes from byte j + shift of the old one, where shift is constant per string
            shift = np.repeat(starts - bounds[:-1], np.diff(bounds))
            blob[bounds[0] : bounds[-1]] = self.blob[shift + np.arange(bounds[0], bounds[-1])]
        return type(self)(blob, offsets)

    def __repr__(self) -> str:
        shown = ", ".join(repr(text) for text in self[:3])
        return f"Strings([{shown}{', …' if len(self) > 3 else ''}], n={len(self)})"


class Names(Strings):
    """File names: lone surrogates, which stand for bytes that are not UTF-8, are allowed."""

    __slots__ = ()
    _errors = "surrogatepass"


class NamesBuilder:
    """A column of names that grows by appending; it takes the memory of the column and at most an eighth more."""

    def __init__(self) -> None:
        self._blob = bytearray()
        self._offsets = array("Q", (0,))

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def append(self, name: str) -> None:
        """Add one name."""
        self._blob += name.encode("utf-8", "surrogatepass")
        self._offsets.append(len(self._blob))

    def extend(self, names: Sequence[str]) -> None:
        """Add a list of names."""
        start = len(self._blob)
        joined = "".join(names)
        if joined.isascii():
            self._blob += joined.encode("ascii")
            lengths = map(len, names)
        else:
            encoded = [name.encode("utf-8", "surrogatepass") for name in names]
            self._blob += b"".join(encoded)
            lengths = map(len, encoded)
        ends = itertools.accumulate(lengths, initial=start)
        next(ends)
        self._offsets.extend(ends)

    def extend_encoded(self, blob: bytes, lengths: bytes) -> None:
        """Add names as `encoded` gives them."""
        ends = np.cumsum(np.frombuffer(lengths, np.uint16), dtype=np.uint64)
        ends += np.uint64(len(self._blob))
        self._blob += blob
        self._offsets.frombytes(ends.tobytes())

    def encoded(self, first: int = 0, stop: int | None = None) -> tuple[bytes, bytes]:
        """The names [first, stop), as a process sends them to another one: their UTF-8, uint16 lengths."""
        offsets = self._offsets[first : None if stop is None else stop + 1]
        return bytes(self._blob[offsets[0] : offsets[-1]]), _lengths(np.frombuffer(offsets, np.uint64))

    def build(self) -> Names:
        """The column, over the memory of this builder: nothing can be appended while it is in use."""
        return Names(np.frombuffer(self._blob, np.uint8), np.frombuffer(self._offsets, np.uint64))


def encoded(names: Names) -> tuple[bytes, bytes]:
    """Names of at most 65,535 bytes each, as `NamesBuilder.extend_encoded` takes them: their UTF-8, uint16 lengths."""
    return names.blob.tobytes(), _lengths(names.offsets)


def _lengths(offsets: npt.NDArray[np.uint64]) -> bytes:
    return np.diff(offsets).astype(np.uint16).tobytes()


def repeated(strings: Callable[[], Iterable[str]], count: int) -> npt.NDArray[np.int64]:
    """Positions of the strings, of `count`, that occur more than once, in rising order; takes 8 bytes a string.

    They are found by their hashes, which two different strings may share: compare them before you raise.
    """
    hashes = np.fromiter(map(hash, strings()), np.int64, count)
    hashes.sort()
    doubles = hashes[1:][hashes[1:] == hashes[:-1]]
    if not len(doubles):
        return np.empty(0, np.int64)
    return np.flatnonzero(np.isin(np.fromiter(map(hash, strings()), np.int64, count), doubles))
