"""The criteria of a selection, and the samples of a reader that fulfil all of them.

They are evaluated from cheap to expensive: header facts, for which a folder has to read files, come last.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError, SourceError, UnknownNameError
from readers.index import ABSENT
from readers.sample import Buffer, ImageInfo
from readers.table import Table, checked_indices
from readers.where import Texts, parse_where

if TYPE_CHECKING:
    from readers.reader import Reader

__all__ = ["Criteria", "TableFacts", "complete_columns", "folders_of", "json_columns", "json_payloads"]

_JSON_BLOCK = 4096
_SHOWN = 5
_TURNED = 5  # EXIF orientations from 5 on exchange height and width


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
    where: str | None = None
    fraction: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise ValueError(f"fraction is {self.fraction}, expected more than 0 and at most 1")
        if self.where is not None:
            parse_where(self.where)

    def apply(self, reader: Reader) -> npt.NDArray[np.int64]:
        """The numbers of the samples, int64: in stored order, or in that of `indices` where given.

        Raises SourceError where none is left, UnknownNameError for classes and keys that the reader lacks.
        """
        left = self._named(reader)
        left = self._by_label(left, reader)
        left = self._by_bytes(left, reader)
        left = self._by_key(left, reader)
        left = self._by_side(left, reader)
        left = self._by_facts(left, reader)
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

    def _by_facts(self, left: npt.NDArray[np.int64], reader: Reader) -> npt.NDArray[np.int64]:
        if self.where is None:
            return left
        split = getattr(reader.table.columns, "split", "")
        facts = TableFacts(
            reader.table.take(left),
            lambda: reader.image_info(left),
            split,
            columns=lambda names: json_columns(json_payloads(reader, left), names),
        )
        return left[parse_where(self.where).mask(facts)]

    def _describe(self) -> str:
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "seed"}
        return ", ".join(f"{name}={value!r:.60}" for name, value in given.items() if value is not None)


class TableFacts:
    """The samples of a table as `readers.where` looks at them.

    headers: reads the header facts, where the table does not have them.
    split: the name of the split.
    labels, classes: in place of those of the table.
    columns: reads the columns of the table that the set was packed from; see `readers.where.Facts.columns`.
    """

    def __init__(
        self,
        table: Table,
        headers: Callable[[], ImageInfo] | None = None,
        split: str = "",
        labels: npt.NDArray[Any] | None = None,
        classes: Sequence[str] | None = None,
        columns: Callable[[Collection[str]], Mapping[str, Sequence[Any]]] | None = None,
    ) -> None:
        self.classes = table.classes if classes is None else classes
        self._read_columns = columns
        self._table, self._read_headers, self._split, self._labels = table, headers, split, labels

    def __len__(self) -> int:
        return len(self._table)

    def labels(self) -> npt.NDArray[Any]:
        return self._table.labels if self._labels is None else self._labels

    def numbers(self, name: str) -> npt.NDArray[Any]:
        if name == "bytes":
            return self._table.sizes()
        if name in ("orientation", "components"):
            values: npt.NDArray[Any] = getattr(self._headers, name)
            return np.where(self._headers.height > 0, values, np.nan)
        height, width = self._size
        if name == "aspect":
            return width / height
        if name == "pixels":
            return width * height
        return {"min_side": np.minimum(width, height), "max_side": np.maximum(width, height), "width": width}.get(
            name, height
        )

    def texts(self, name: str) -> Texts:
        if name == "folder":
            return folders_of(self.texts("key").values)
        if name == "key":
            return Texts(self._table.keys)
        if name == "split":
            return Texts((self._split,), np.zeros(len(self), np.int64))
        if name == "class_name":
            names = (*self.classes, "")
            labels = self.labels()
            return Texts(names, np.where((labels >= 0) & (labels < len(self.classes)), labels, len(self.classes)))
        from readers.headers import MEDIA

        return Texts(MEDIA, self._headers.media)

    def has(self, field: str) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = self._table.field_column(field, "offset") != np.uint64(ABSENT)
        return found

    def columns(self, names: Collection[str]) -> Mapping[str, Sequence[Any]]:
        return {} if self._read_columns is None else self._read_columns(names)

    @cached_property
    def _headers(self) -> ImageInfo:
        return self._table.headers(None) if self._read_headers is None else self._read_headers()

    @cached_property
    def _size(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """(height, width) of the images as displayed; NaN where they are not known."""
        height, width = (getattr(self._headers, name).astype(np.float64) for name in ("height", "width"))
        height[height == 0] = width[width == 0] = np.nan
        turned = self._headers.orientation >= _TURNED
        return np.where(turned, width, height), np.where(turned, height, width)


def json_payloads(reader: Reader, indices: npt.NDArray[np.int64]) -> Iterator[tuple[str, Buffer | None]]:
    """The key of each of these samples, and its field json; None where it has none, or it is not of this kind."""
    keys = reader.table.take(indices).keys
    if reader.kinds.get("json") != "json":
        yield from ((key, None) for key in keys)
        return
    has = reader.table.field_column("json", "offset")[indices] != np.uint64(ABSENT)
    for first in range(0, len(indices), _JSON_BLOCK):
        block = slice(first, first + _JSON_BLOCK)
        found = iter(reader.read_many(indices[block][has[block]], "json"))
        yield from zip(keys[block], (next(found) if there else None for there in has[block]), strict=True)


def json_columns(payloads: Iterable[tuple[str, Buffer | None]], names: Collection[str]) -> dict[str, list[Any]]:
    """The members of the JSON objects of n samples as columns: those of `names` with n values, None for none.

    payloads: with the names of the samples. The lists of other members are empty; what is no object has no members.

    Raises BadSampleError for what is not JSON.
    """
    columns: dict[str, list[Any]] = {}
    for number, (key, data) in enumerate(payloads):
        try:
            members = {} if data is None else json.loads(bytes(data))
        except (ValueError, RecursionError) as error:
            raise BadSampleError(f"{key}: the field json is not JSON in UTF-8: {error}") from error
        for name in members if isinstance(members, dict) else ():
            column = columns.setdefault(name, [])
            if name in names:
                column += [None] * (number - len(column))
                column.append(members[name])
    for name in columns.keys() & set(names):
        columns[name] += [None] * (number + 1 - len(columns[name]))
    return columns


def complete_columns(parts: Sequence[dict[str, list[Any]]], counts: Sequence[int]) -> None:
    """Give each part of a table the columns of all its parts, without values. counts: samples of each part."""
    for name in dict.fromkeys(name for part in parts for name in part):
        for part, count in zip(parts, counts, strict=True):
            part.setdefault(name, [])
            part[name] = part[name] or [None] * count


def folders_of(keys: Iterable[str]) -> Texts:
    """What comes before the last slash of each key, "" without one."""
    return Texts([key.rpartition("/")[0] for key in keys])


def _keys(left: npt.NDArray[np.int64], reader: Reader) -> Iterable[str]:
    keys = reader.keys
    return keys if len(left) == len(reader) and bool((np.diff(left) == 1).all()) else (keys[i] for i in left.tolist())


def _share(count: int, fraction: float, seed: int) -> npt.NDArray[np.int64]:
    """At least one of range(count), in rising order; those of a smaller fraction are among those of a larger one."""
    from readers.order.permutation import Permutation

    wanted = max(1, round(count * fraction))
    return np.sort(Permutation(count, seed, purpose="fraction").forward(np.arange(wanted, dtype=np.int64)))
