"""The criteria of a selection, and the samples of a reader that fulfil all of them.

They are evaluated from cheap to expensive: header facts, for which a folder has to read files, come last.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cache.errors import SourceError, UnknownNameError
from readers.table import checked_indices

if TYPE_CHECKING:
    from readers.reader import Reader

__all__ = ["Criteria"]

_SHOWN = 5


@dataclass(frozen=True)
class Criteria:
    """The arguments of `readers.reader.Reader.select`. Raises ValueError for invalid ones."""

    labels: int | str | Iterable[int | str] | None = None
    keys: str | Iterable[str] | None = None
    min_bytes: int | None = None
    max_bytes: int | None = None
    min_side: int | None = None
    indices: npt.ArrayLike | None = None
    mask: npt.ArrayLike | None = None
    fraction: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise ValueError(f"fraction is {self.fraction}, expected more than 0 and at most 1")

    def apply(self, reader: Reader) -> npt.NDArray[np.int64]:
        """The numbers of the samples, int64: in stored order, or in that of `indices` where given.

        Raises SourceError where none is left, UnknownNameError for classes and keys that the reader lacks.
        """
        left = self._named(reader)
        left = self._by_label(left, reader)
        left = self._by_bytes(left, reader)
        left = self._by_key(left, reader)
        left = self._by_side(left, reader)
        if self.fraction is not None and left.size:
            left = left[_share(len(left), self.fraction, self.seed)]
        if not left.size:
            raise SourceError(
                f"nothing is selected: none of the {len(reader)} samples of {reader} has {self._describe()}"
            )
        return left

    def _named(self, reader: Reader) -> npt.NDArray[np.int64]:
        left = np.arange(len(reader), dtype=np.int64)
        if self.indices is not None:
            left = checked_indices(self.indices, reader)
        if self.mask is None:
            return left
        mask = np.asarray(self.mask)
        if mask.dtype != np.bool_ or mask.shape != (len(reader),):
            raise ValueError(f"mask must be bool [{len(reader)}], found {mask.dtype} {list(mask.shape)}")
        wanted: npt.NDArray[np.int64] = left[mask[left]]
        return wanted

    def _by_label(self, left: npt.NDArray[np.int64], reader: Reader) -> npt.NDArray[np.int64]:
        if self.labels is None:
            return left
        asked = [self.labels] if isinstance(self.labels, (int, str, np.integer)) else list(self.labels)
        numbers = {name: number for number, name in enumerate(reader.classes)}
        count = len(numbers)
        unknown = [x for x in asked if (x not in numbers if isinstance(x, str) else count and not -1 <= x < count)]
        if unknown:
            known = ", ".join(list(numbers)[:_SHOWN]) + (", …" if count > _SHOWN else "")
            raise UnknownNameError(f"{reader}: no class {unknown[0]!r}; it has {count}: {known or 'none'}")
        wanted = np.array([numbers[x] if isinstance(x, str) else x for x in asked], np.int64)
        return left[np.isin(reader.labels[left], wanted)]

    def _by_bytes(self, left: npt.NDArray[np.int64], reader: Reader) -> npt.NDArray[np.int64]:
        if self.min_bytes is None and self.max_bytes is None:
            return left
        sizes = reader.sizes()[left]
        fits = np.ones(len(left), np.bool_)
        if self.min_bytes is not None:
            fits &= sizes >= self.min_bytes
        if self.max_bytes is not None:
            fits &= sizes <= self.max_bytes
        return left[fits]

    def _by_key(self, left: npt.NDArray[np.int64], reader: Reader) -> npt.NDArray[np.int64]:
        if self.keys is None:
            return left
        if isinstance(self.keys, str):
            matches = re.compile(fnmatch.translate(self.keys)).match
            fits = [matches(key) is not None for key in _keys(left, reader)]
            return left[np.array(fits, np.bool_)]
        wanted = set(self.keys)
        fits, found = [], set()
        for key in _keys(left, reader):
            fits.append(key in wanted)
            if fits[-1]:
                found.add(key)
        missing = sorted(wanted - found)
        if missing:
            few = ", ".join(map(repr, missing[:_SHOWN])) + (", …" if len(missing) > _SHOWN else "")
            raise UnknownNameError(f"{reader}: {len(missing)} keys are not among the {len(left)} asked: {few}")
        return left[np.array(fits, np.bool_)]

    def _by_side(self, left: npt.NDArray[np.int64], reader: Reader) -> npt.NDArray[np.int64]:
        if self.min_side is None:
            return left
        info = reader.image_info(left)
        return left[np.minimum(info.height, info.width) >= self.min_side]

    def _describe(self) -> str:
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "seed"}
        return ", ".join(f"{name}={value!r:.60}" for name, value in given.items() if value is not None)


def _keys(left: npt.NDArray[np.int64], reader: Reader) -> Iterable[str]:
    keys = reader.keys
    return keys if len(left) == len(reader) and bool((np.diff(left) == 1).all()) else (keys[i] for i in left.tolist())


def _share(count: int, fraction: float, seed: int) -> npt.NDArray[np.int64]:
    """At least one of range(count), in rising order; those of a smaller fraction are among those of a larger one."""
    from readers.order.permutation import Permutation

    wanted = max(1, round(count * fraction))
    return np.sort(Permutation(count, seed, purpose="fraction").forward(np.arange(wanted, dtype=np.int64)))
