"""What is known of n samples without reading them: keys, labels, classes, header facts, and where their bytes are.

A table is columns and, if it has only some of their rows or another order, the numbers of these rows:

    packed     columns of an index, mapped                        readers.index, readers.opening
    folder     columns of a scan                                  readers.tree
    in memory  of a shard located elsewhere, of anything else     Table.of(…)
    take       other rows of the same columns: 8 bytes a sample
    concat     one table after the other

`take` copies no columns. Rows have the same numbers in every table over the same columns, so that a cache below a
selection keeps the same samples as a cache below the whole.
"""

from __future__ import annotations

import hashlib
import mmap
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from cache.errors import DatasetError, StaleIndexError, UnknownNameError
from cache.stores import Extents, Int64s
from cache.stores.base import Payloads
from readers.index import ABSENT, Columns, MemoryColumns, decode_name
from readers.sample import NO_LABEL, ImageInfo
from readers.strings import LazySequence, Strings

if TYPE_CHECKING:
    from readers.augment.geometry import Pass


_BLOCK = 4096


class Form(Protocol):
    """The form in which images are handed out, if not as stored: see `readers.caching.form`."""

    @property
    def kind(self) -> str:
        """A short text that differs for other forms; part of the names of caches and of fingerprints."""

    def info(self, original: ImageInfo) -> ImageInfo:
        """The header facts of the converted images, from those of the originals."""

    def bytes(self, info: ImageInfo, original: Int64s) -> Int64s:
        """Bytes of the converted images, as estimated, from their headers (`info`) and the bytes of the originals."""

    def passes(self, original: ImageInfo) -> list[Pass]:
        """How converting moves what is in each upright image (`readers.augment.geometry`)."""


class Table:
    """`columns`, or some rows of them (int64 [k], which may repeat). forms: what images are converted to, in turn."""

    def __init__(self, columns: Columns, rows: Int64s | None = None, forms: tuple[Form, ...] = ()) -> None:
        self.columns, self.rows, self.forms = columns, rows, forms
        self._labels: npt.NDArray[np.int64] | None = None
        self._by_hash: npt.NDArray[np.int64] | None = None  # numbers of the samples by the hash of their keys
        self._fingerprint = ""
        if rows is None:
            self.labels  # noqa: B018  # read now: the files may be replaced by another set's

    @classmethod
    def of(
        cls,
        keys: Sequence[str],
        labels: Sequence[int] | None = None,
        classes: Sequence[str] = (),
        sizes: Mapping[str, npt.ArrayLike] | None = None,
        title: str = "",
    ) -> Table:
        """A table in memory, for samples of a store of your own.

        keys: n names.
        labels: class numbers, -1 for none.
        classes: names of the classes.
        sizes: bytes of each field by sample, -1 where it lacks the field; default: one field, "image", of unknown
            sizes (0).
        title: what messages call it.
        """
        n = len(keys)
        sizes = {"image": np.zeros(n, np.int64)} if sizes is None else sizes
        columns: dict[str, npt.NDArray[Any]] = {"label": np.full(n, NO_LABEL) if labels is None else np.asarray(labels)}
        for field, values in sizes.items():
            length = np.asarray(values, np.int64)
            columns[f"{field}.length"] = np.maximum(length, 0)
            columns[f"{field}.offset"] = np.where(length < 0, np.uint64(ABSENT), np.uint64(0))
        return cls(MemoryColumns(keys, columns, tuple(sizes), tuple(classes), title=title))

    # --- columns ------------------------------------------------------------------------------------------------
    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields; "image" is the first one, where there is one."""
        return self.columns.fields

    @property
    def kinds(self) -> dict[str, str]:
        """What the bytes of each field are: its kind in `readers.fields`."""
        return {name: name if name in ("image", "json") else "file" for name in self.fields} | dict(self.columns.kinds)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of all classes, including those without samples: labels keep their meaning."""
        return self.columns.classes

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """Class numbers, int64 [n]; NO_LABEL (-1) where a sample has none."""
        if self._labels is None:
            self._labels = self.column("label")
        return self._labels

    @property
    def keys(self) -> Sequence[str]:
        """Keys of the samples; decoded one by one when asked for."""
        keys = self.columns.keys()
        return keys if self.rows is None else _ChosenStrings(keys, self.rows)

    @property
    def title(self) -> str:
        """The set as messages name it."""
        of_all = self.columns.title
        return of_all if self.rows is None else f"{len(self):,} samples of {of_all}"

    @property
    def described(self) -> str:
        """The title with the number of samples."""
        return f"{self.title}, {len(self):,} samples" if self.rows is None else self.title

    @property
    def fingerprint(self) -> str:
        """A short text that differs for other data sets, other samples of this one, and other forms of them."""
        if not self._fingerprint:
            text = self.columns.fingerprint()
            if self.rows is not None:
                digest = hashlib.blake2b(text.encode() + b"\0", digest_size=16)
                digest.update(np.ascontiguousarray(self.rows, "<i8").data)
                text = digest.hexdigest()
            for form in self.forms:
                text = hashlib.blake2b(f"{text}\0{form.kind}".encode(), digest_size=16).hexdigest()
            self._fingerprint = text
        return self._fingerprint

    def column(self, name: str) -> npt.NDArray[Any]:
        """One of `readers.index.COLUMNS`, length n."""
        column = self.columns.column(name)
        return column if self.rows is None else column[self.rows]

    def field_column(self, field: str, name: str) -> npt.NDArray[Any]:
        """One of `readers.index.FIELD_COLUMNS` of a field, length n. Raises UnknownNameError."""
        self.number(field)
        column = self.columns.field_column(field, name)
        return column if self.rows is None else column[self.rows]

    def shard_column(self, field: str) -> npt.NDArray[Any]:
        """The shard that has a field of each sample, length n. Raises UnknownNameError."""
        self.number(field)
        column = self.columns.shard_column(field)
        return column if self.rows is None else column[self.rows]

    def sizes(self, field: str = "image") -> npt.NDArray[np.int64]:
        """Bytes of a field by sample, int64 [n]; 0 where a sample lacks it. Of converted images, as estimated."""
        sizes: Int64s = self.field_column(field, "length").view("<i8")
        if field == "image" and self.columns.kinds.get(field) == "pixels":
            from readers.headers.base import PIXELS_HEADER_BYTES

            sizes = sizes + PIXELS_HEADER_BYTES  # as they are handed out
        if field == "image" and self.forms:
            info = self.stored_headers(None)
            for form in self.forms:
                info = form.info(info)
                sizes = form.bytes(info, sizes)
        return sizes

    def headers(self, indices: Int64s | None) -> ImageInfo:
        """Header facts of some images (None: of all), where `has_headers`; of converted images, those after it."""
        info = self.stored_headers(indices)
        for form in self.forms:
            info = form.info(info)
        return info

    def stored_headers(self, indices: Int64s | None) -> ImageInfo:
        """`headers` of the images before they are converted."""
        columns = (self.columns.column(name) for name in ImageInfo._fields)
        rows = self.rows if indices is None else self.at(indices)
        return ImageInfo._make(column if rows is None else column[rows] for column in columns)

    @property
    def has_headers(self) -> bool:
        """Whether header facts are known without reading images."""
        return self.columns.has_headers

    def names(self, field: str = "image") -> Strings:
        """Original file names of a field as `readers.index.encode_name` stores them."""
        self.number(field)
        names = self.columns.names(field)
        return names if self.rows is None else names.take(self.rows)

    def name(self, index: int, field: str = "image") -> str:
        """The file name, relative to the split's folder, that a field came from; "" where it came from no file."""
        self.number(field)
        row = self.row(index)
        return decode_name(self.columns.names(field)[row], self.columns.keys()[row])

    def number(self, field: str) -> int:
        """Position of a field. Raises UnknownNameError."""
        try:
            return self.fields.index(field)
        except ValueError:
            raise UnknownNameError(
                f"{self.columns.place or self.title}: no field {field!r}; it has {', '.join(self.fields)}"
            ) from None

    # --- extents ----------------------------------------------------------------------------------------
    def at(self, indices: Int64s) -> Int64s:
        """The rows of samples, which count from 0."""
        return indices if self.rows is None else self.rows[indices]

    def find(self, key: str) -> int:
        """The number of the first sample with this key. Raises UnknownNameError.

        The first call builds an index of the keys, which takes 8 bytes a sample and stays in this process.
        """
        keys, wanted = self.keys, hash(key)
        if self._by_hash is None:
            hashes = np.fromiter(map(hash, keys), np.int64, len(keys))
            self._by_hash = hashes.argsort(kind="stable")
        start = bisect_left(self._by_hash.data, wanted, key=lambda number: hash(keys[number]))
        for number in self._by_hash.data[start:]:
            if keys[number] == key:
                return number
            if hash(keys[number]) != wanted:
                break
        such = f"; the first is {keys[0]!r}" if len(self) else ""
        raise UnknownNameError(f"{self.described}: no sample has the key {key!r}{such}")

    def row(self, index: int) -> int:
        """The row of one sample, which may count from the end. Raises IndexError."""
        n = len(self)
        if not -n <= index < n:
            raise IndexError(f"sample {index} is outside the {n} of {self.title or 'this table'}")
        index = index + n if index < 0 else index
        return index if self.rows is None else int(self.rows[index])

    def extents(self, indices: Sequence[int] | npt.NDArray[Any], field: str = "image") -> Extents:
        """The extents of a field of some samples, in the order asked for; stores check that they are inside a shard.

        Raises IndexError, UnknownNameError (no such field, or a sample lacks it), DatasetError (no such shard).
        """
        number = self.number(field)
        rows = self.at(checked_indices(indices, self))
        shard = self.columns.shard_column(field)[rows].astype(np.int64)
        offset = self.columns.field_column(field, "offset")[rows].view(np.int64)
        length = self.columns.field_column(field, "length")[rows].view(np.int64)
        extents = Extents(Payloads(len(self.columns.fields)).number(rows, number), shard, offset, length)
        if len(rows):
            if int(shard.max()) >= len(self.columns.shard_bytes):
                raise self.no_such_shard(int(shard.max()))
            if offset.min() < 0:  # an absent field, or no valid offset
                self.check(extents, field)
        return extents

    def check(self, extents: Extents, field: str) -> None:
        """Raise for the first extent that is not inside its shard, by the sizes in dataset.json.

        Raises UnknownNameError where a sample lacks the field, StaleIndexError for other extents.
        """
        size = np.asarray(self.columns.shard_bytes, np.uint64)[extents.shard]
        offset, length = extents.offset.view(np.uint64), extents.length.view(np.uint64)
        bad = np.flatnonzero((length > size) | (offset > size - np.minimum(length, size)))
        if len(bad):
            i = int(bad[0])
            row = Payloads(len(self.columns.fields)).sample(int(extents.row[i]))
            raise self.bad_extent(row, field, int(offset[i]), int(length[i]), int(extents.shard[i]))

    def no_such_shard(self, shard: int) -> DatasetError:
        return DatasetError(
            f"{self.columns.place}: the index names shard {shard}, the split has {len(self.columns.shard_bytes)}; "
            f"rebuild it with  packer index"
        )

    def bad_extent(self, row: int, field: str, offset: int, length: int, shard: int) -> Exception:
        """The error for an extent that is not inside its shard."""
        if offset == ABSENT:
            return UnknownNameError(f"sample {row} of {self.columns.place or self.title} has no field {field!r}")
        return StaleIndexError(
            f"{self.columns.shard_place(shard)}: the index puts sample {row} at bytes {offset} to {offset + length}, "
            f"but the shard has {self.columns.shard_bytes[shard]}; rebuild the index with  packer index"
        )

    # --- other tables -------------------------------------------------------------------------------------------
    def take(self, indices: npt.ArrayLike) -> Table:
        """The samples at `indices`, which may repeat and count from the end, in that order.

        A read-only map of a file (numpy.load(path, mmap_mode="r")) stays mapped, and is pickled by its path. Raises
        IndexError, ValueError.
        """
        chosen = checked_indices(indices, self)
        return Table(self.columns, chosen if self.rows is None else self.rows[chosen], self.forms)

    def with_kinds(self, kinds: Mapping[str, str]) -> Table:
        """The same samples, with other kinds of some fields. Raises UnknownNameError."""
        checked = {self.fields[self.number(name)]: kind for name, kind in kinds.items()}
        return Table(self.columns.with_kinds(self.kinds | checked), self.rows, self.forms)

    def __len__(self) -> int:
        return len(self.columns) if self.rows is None else len(self.rows)

    def __repr__(self) -> str:
        return f"Table({self.described})"

    def __getstate__(self) -> dict[str, Any]:
        rows = None if self.rows is None else _mapped_file(self.rows) or self.rows
        return {"columns": self.columns, "rows": rows, "forms": self.forms}

    def __setstate__(self, state: dict[str, Any]) -> None:
        rows = state["rows"]
        if isinstance(rows, tuple):
            path, offset, count = rows
            try:
                rows = np.memmap(path, np.int64, "r", offset, (count,))
            except (OSError, ValueError) as error:
                raise StaleIndexError(
                    f"{path}: the indices of a selection cannot be mapped any more: {error}"
                ) from error
        self.__init__(state["columns"], rows, state["forms"])  # type: ignore[misc]


def checked_indices(indices: npt.ArrayLike, samples: Any) -> npt.NDArray[np.int64]:
    """Sample numbers as int64 [k] from 0; negative ones count from the end. Raises ValueError and IndexError."""
    given = np.asanyarray(indices)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ValueError(f"indices must be integers in one dimension, found {given.dtype} {list(given.shape)}")
    if given.dtype != np.int64:
        given = given.astype(np.int64)
    n = len(samples)
    if given.size and (int(given.min()) < -n or int(given.max()) >= n):
        raise IndexError(f"indices {given.min()} to {given.max()} are not all inside the samples of {samples}")
    if given.size and int(given.min()) < 0:
        given = np.where(given < 0, given + n, given)
    return given


class _ChosenStrings(LazySequence[str]):
    """Strings of some rows."""

    def __init__(self, strings: Strings, rows: Int64s) -> None:
        self._strings, self._rows = strings, rows

    def __len__(self) -> int:
        return len(self._rows)

    def _at(self, number: int) -> str:
        return self._strings[int(self._rows[number])]

    def _between(self, first: int, stop: int) -> Iterator[str]:
        for start in range(first, stop, _BLOCK):
            yield from self._strings.take(self._rows[start : min(start + _BLOCK, stop)])


def _mapped_file(rows: npt.NDArray[np.int64]) -> tuple[str, int, int] | None:
    """(path, offset, entries) of an array that is a read-only map of a file, and not a part of such a map."""
    if not isinstance(rows, np.memmap) or rows.mode != "r" or not isinstance(rows.base, mmap.mmap):
        return None
    return str(rows.filename), rows.offset, len(rows)
