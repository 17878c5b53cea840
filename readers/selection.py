"""Some samples of a reader, as a reader: the same bytes, labels and classes under new numbers.

    few = reader.select(labels=["cat", "dog"], min_side=224)
    tenth = few.select(fraction=0.1, seed=1)

Nothing is copied but the list of chosen samples: int64 [k], 8 bytes each. Where not every worker should hold that, make
`SelectedReader(base, numpy.load(path, mmap_mode="r"))`: such an array stays mapped and is pickled by its path.
"""

from __future__ import annotations

import hashlib
import mmap
import operator
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, cast, overload

import numpy as np
import numpy.typing as npt

from readers.criteria import Criteria, checked_indices
from readers.errors import StaleIndexError, UnknownNameError
from readers.sample import Buffer, ImageInfo, Reader, Sample

__all__ = ["Selectable", "SelectedReader", "select"]


def select(
    reader: Reader,
    *,
    labels: int | str | Iterable[int | str] | None = None,
    keys: str | Iterable[str] | None = None,
    min_bytes: int | None = None,
    max_bytes: int | None = None,
    min_side: int | None = None,
    indices: npt.ArrayLike | None = None,
    mask: npt.ArrayLike | None = None,
    fraction: float | None = None,
    seed: int = 0,
) -> SelectedReader:
    """The samples that fulfil everything asked, in stored order, or in that of `indices` where given.

    labels: class numbers or names. keys: all of these, or a pattern with * ? [abc], in which * also stands for "/".
    min_bytes, max_bytes: of the encoded image. min_side: of the shorter side in pixels, by the image's header. indices:
    sample numbers, which may repeat. mask: bool [n]. fraction: that share of what is left, drawn by `seed`; a smaller
    fraction is part of a larger one. Raises SourceError where nothing is left, UnknownNameError for a class or key that
    the reader lacks, IndexError, and ValueError for arguments that mean nothing.
    """
    criteria = Criteria(labels, keys, min_bytes, max_bytes, min_side, indices, mask, fraction, seed)
    chosen = criteria.chosen(reader)
    if isinstance(reader, SelectedReader):
        return SelectedReader(reader.base, reader.indices[chosen])
    return SelectedReader(reader, chosen)


class Selectable:
    """What gives a reader its method `select`, and reader[3], reader[-1], reader[0:3], reader["n01440764/1"]."""

    select = select

    @overload
    def __getitem__(self, which: int | str) -> Sample: ...
    @overload
    def __getitem__(self, which: slice) -> list[Sample]: ...
    def __getitem__(self, which: int | str | slice) -> Sample | list[Sample]:
        """A sample by number or key, a list of samples by slice.

        A key is looked for from the first sample on: where many are wanted, `select(keys=…)`. Raises IndexError,
        UnknownNameError (no such key) and TypeError.
        """
        reader = cast(Reader, self)
        if isinstance(which, slice):
            return [self.sample(i) for i in range(*which.indices(len(reader)))]
        if isinstance(which, str):
            return self.sample(_numbered(reader, which))
        try:
            index = operator.index(which)
        except TypeError:
            raise TypeError(
                f"a sample is named by its number, its key or a slice, not by {type(which).__name__}; for many at once "
                f"there are select(indices=…) and read_many(…)"
            ) from None
        return self.sample(index)

    def sample(self, index: int) -> Sample:
        """One sample with all its fields."""
        raise NotImplementedError


def _numbered(reader: Reader, key: str) -> int:
    for number, found in enumerate(reader.keys):
        if found == key:
            return number
    such = f"; the first is {reader.keys[0]!r}" if len(reader) else ""
    raise UnknownNameError(f"{reader}: no sample has the key {key!r}{such}")


class SelectedReader(Selectable):
    """`base` seen through `indices` (int [k], which may repeat): sample i is sample indices[i] of the base.

    Closing it closes the base. Raises IndexError for indices outside the base.
    """

    def __init__(self, base: Reader, indices: npt.ArrayLike) -> None:
        self.base = base
        self.indices = checked_indices(indices, base)
        self._setup()

    def _setup(self) -> None:
        self._at = self.indices.data  # gives integers, faster than scalars
        self._labels: npt.NDArray[np.int64] | None = None
        self._info: ImageInfo | None = None
        self._fingerprint = ""

    # --- what it holds ------------------------------------------------------------------------------------------
    @property
    def fields(self) -> Sequence[str]:
        return self.base.fields

    @property
    def classes(self) -> Sequence[str]:
        """All classes of the base, so that labels keep their meaning."""
        return self.base.classes

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """Class numbers, int64 [k]; NO_LABEL (-1) where a sample has none."""
        if self._labels is None:
            self._labels = self.base.labels[self.indices]
        return self._labels

    @property
    def keys(self) -> Sequence[str]:
        """Keys of the samples; decoded one by one when asked for."""
        return _SelectedKeys(self.base.keys, self._at)

    @property
    def info(self) -> ImageInfo:
        """Image dimensions and coding, arrays [k]."""
        if self._info is None:
            self._info = self.base.image_info(self.indices)
        return self._info

    @property
    def fingerprint(self) -> str:
        """Of the base and the chosen samples in their order: 32 hex digits."""
        if not self._fingerprint:
            digest = hashlib.blake2b(self.base.fingerprint.encode() + b"\0", digest_size=16)
            digest.update(np.ascontiguousarray(self.indices, "<i8").data)
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    @property
    def files_fingerprint(self) -> str:
        """That of the base (see `readers.sample.Listed`); "" where it has none."""
        return str(getattr(self.base, "files_fingerprint", ""))

    def is_current(self, index: int) -> bool:
        """Whether the file of a sample is still the one that the base listed; yes for a base that cannot tell."""
        asked = getattr(self.base, "is_current", None)
        return asked is None or bool(asked(self._one(index)))

    def sizes(self, field: str = "image") -> npt.NDArray[np.int64]:
        """Encoded bytes of a field by sample, int64 [k]; 0 where a sample lacks it."""
        return self.base.sizes(field)[self.indices]

    def image_info(self, indices: Sequence[int] | npt.NDArray[Any]) -> ImageInfo:
        """Image dimensions and coding of some samples, in the order asked for."""
        return self.base.image_info(self._of_base(indices))

    def __len__(self) -> int:
        return len(self.indices)

    def __repr__(self) -> str:
        return f"SelectedReader({len(self)} samples of {self.base!r})"

    # --- reading ------------------------------------------------------------------------------------------------
    def read(self, index: int, field: str = "image") -> Buffer:
        """The bytes of one field of one sample."""
        return self.base.read(self._one(index), field)

    def read_many(self, indices: Sequence[int] | npt.NDArray[Any], field: str = "image") -> Sequence[Buffer]:
        """The bytes of many samples, in the order asked for."""
        return self.base.read_many(self._of_base(indices), field)

    def prefetch(self, indices: Sequence[int] | npt.NDArray[Any], field: str = "image") -> None:
        """Ask the kernel to read these samples into the page cache."""
        self.base.prefetch(self._of_base(indices), field)

    def stream(self, indices: Iterable[int] | None = None, field: str = "image") -> Iterator[Buffer]:
        """The bytes of samples in a known order (default: as selected), with the kernel asked ahead."""
        return self.base.stream(self._at if indices is None else map(self._one, indices), field)

    def sample(self, index: int) -> Sample:
        return self.base[self._one(index)]

    def __iter__(self) -> Iterator[Sample]:
        return (self.base[i] for i in self._at)

    # --- life ---------------------------------------------------------------------------------------------------
    def close(self) -> None:
        self.base.close()

    def __enter__(self) -> SelectedReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"base": self.base, "indices": _mapped_file(self.indices) or self.indices}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.base, indices = state["base"], state["indices"]
        if isinstance(indices, tuple):
            path, offset, count = indices
            try:
                indices = np.memmap(path, np.int64, "r", offset, (count,))
            except (OSError, ValueError) as error:
                raise StaleIndexError(
                    f"{path}: the indices of a selection cannot be mapped any more: {error}"
                ) from error
        self.indices = indices
        self._setup()

    # --- inside -------------------------------------------------------------------------------------------------
    def _one(self, index: int) -> int:
        try:
            return self._at[index]
        except IndexError:
            raise IndexError(f"sample {index} is outside the {len(self)} of {self}") from None

    def _of_base(self, indices: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        wanted = np.asarray(indices, np.int64)
        try:
            return self.indices[wanted]
        except IndexError:
            raise IndexError(
                f"indices {wanted.min()} to {wanted.max()} are not all inside the samples of {self}"
            ) from None


def _mapped_file(indices: npt.NDArray[np.int64]) -> tuple[str, int, int] | None:
    """(path, offset, entries) of an array that is a read-only map of a file, and not a part of such a map."""
    if not isinstance(indices, np.memmap) or indices.mode != "r" or not isinstance(indices.base, mmap.mmap):
        return None
    return str(indices.filename), indices.offset, len(indices)


class _SelectedKeys(Sequence[str]):
    """Keys of a base, seen through indices."""

    def __init__(self, keys: Sequence[str], at: memoryview) -> None:
        self._keys, self._at = keys, at

    def __len__(self) -> int:
        return len(self._at)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self._keys[i] for i in self._at[index]]
        try:
            return self._keys[self._at[index]]
        except IndexError:
            raise IndexError(f"index {index} is outside the {len(self)} keys of this selection") from None
