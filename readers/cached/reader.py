"""A reader whose samples are kept in shared memory: once per node, for every process that opens the same set.

A hit is a view of shared memory, without a lock or a copy (unless it was compressed). A miss is read from the reader
underneath, together with the other misses of the batch, and stored for everybody. What does not fit passes through.
Views stay valid for as long as anybody holds them: nothing is evicted, and nothing is ever written in place.

A thread writes nothing here that another one reads, so threads may share a reader; forked and pickled copies use the
same memory. Closing it closes the reader underneath; whoever reads on reads from that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from readers.cached.choice import Choice
from readers.cached.fill import FillAhead, prefill
from readers.cached.keep import Encoded, Keep
from readers.cached.shelf import Shelf
from readers.cached.source import indexed, info_of
from readers.cached.stats import CachedStats, stats_of
from readers.criteria import checked_indices
from readers.errors import BadSampleError, DamagedSampleError, UnknownNameError
from readers.order import Order
from readers.sample import NO_LABEL, Buffer, ImageInfo, Reader, Sample
from readers.selection import Selectable
from readers.stream import stream_ahead

__all__ = ["CachedReader"]

_SAMPLE_ERRORS = (BadSampleError, DamagedSampleError, UnknownNameError)
_Indices: TypeAlias = Sequence[int] | npt.NDArray[Any]


class CachedReader(Selectable):
    """`base` behind a cache; made by `readers.cached`. Images are handed out in the form that is kept.

    Where `keep` is not "encoded" this is another set in the eyes of a resume token: the same samples and positions, but
    slightly other pixels.
    """

    def __init__(self, base: Reader, shelf: Shelf) -> None:
        self.base, self._shelf = base, shelf
        self._setup()

    def _setup(self) -> None:
        self.keep: Keep = self._shelf.keep
        self._converts = not isinstance(self.keep, Encoded)
        self._indexed = indexed(self.base)
        self._info: ImageInfo | None = None
        self._sizes: npt.NDArray[np.int64] | None = None
        self._ahead: FillAhead | None = None

    # --- what it holds ------------------------------------------------------------------------------------------
    @property
    def fields(self) -> Sequence[str]:
        return self.base.fields

    @property
    def classes(self) -> Sequence[str]:
        return self.base.classes

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """Class numbers, int64 [n]; NO_LABEL (-1) where a sample has none."""
        return self.base.labels

    @property
    def keys(self) -> Sequence[str]:
        """Keys of the samples; decoded one by one when asked for."""
        return self.base.keys

    @property
    def info(self) -> ImageInfo:
        """Dimensions and coding of the images as they are handed out, arrays [n]."""
        if self._info is None:
            self._info = self.image_info(range(len(self)))
        return self._info

    @property
    def fingerprint(self) -> str:
        """That of the base for encoded bytes; otherwise of the base and of what is kept."""
        if not self._converts:
            return self.base.fingerprint
        text = f"{self.base.fingerprint}\0{self.keep.kind}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def files_fingerprint(self) -> str:
        """That of the base (see `readers.sample.Listed`); "" where it has none."""
        return str(getattr(self.base, "files_fingerprint", ""))

    def is_current(self, index: int) -> bool:
        """Whether the file of a sample is still the one that the base listed; yes for a base that cannot tell."""
        asked = getattr(self.base, "is_current", None)
        return asked is None or bool(asked(index))

    def sizes(self, field: str = "image") -> npt.NDArray[np.int64]:
        """Bytes of a field by sample, int64 [n]; 0 where a sample lacks it. Of recoded images, as estimated."""
        if field != "image" or not self._converts:
            return self.base.sizes(field)
        if self._sizes is None:
            self._sizes = self._shelf.form_bytes(self.info, self.base.sizes(field))
        return self._sizes

    def image_info(self, indices: _Indices) -> ImageInfo:
        """Dimensions and coding of some images as they are handed out, in the order asked for.

        Without an index underneath they come from the images themselves, which are then in the cache.
        """
        wanted = checked_indices(indices, self)
        if self._indexed:
            return self.keep.info(self.base.image_info(wanted))
        try:
            return info_of(self.read_many(wanted))
        except _SAMPLE_ERRORS:
            return info_of(map(self._if_good, wanted.tolist()))

    def __len__(self) -> int:
        return len(self.base)

    def __repr__(self) -> str:
        return f"CachedReader({self.keep.kind}, {self.base!r})"

    # --- reading ------------------------------------------------------------------------------------------------
    def read(self, index: int, field: str = "image") -> Buffer:
        """The bytes of one field of one sample, from the cache or from the base."""
        found = self._shelf.found(index, field)
        if found is not None:
            return found
        if index < 0:
            return self.read(self._from_end(index), field)
        if index >= len(self.base):
            raise IndexError(f"sample {index} is outside the {len(self)} of {self}")
        return self._shelf.stored(index, field, self.base.read(index, field))

    def read_many(self, indices: _Indices, field: str = "image") -> list[Buffer]:
        """The bytes of many samples, in the order asked for; those that are missing are read together."""
        wanted = checked_indices(indices, self)
        results = self._shelf.found_many(wanted, field)
        missing = [place for place, data in enumerate(results) if data is None]
        if missing:
            numbers = wanted[missing]
            for place, index, data in zip(missing, numbers.tolist(), self.base.read_many(numbers, field), strict=True):
                results[place] = self._shelf.stored(index, field, data)
        return results  # type: ignore[return-value]

    def prefetch(self, indices: _Indices, field: str = "image") -> None:
        """Ask the kernel for those of these samples that are not in the cache."""
        wanted = checked_indices(indices, self)
        missing = self._shelf.missing(wanted, field)
        if len(missing):
            self.base.prefetch(missing, field)

    def stream(self, indices: Iterable[int] | None = None, field: str = "image") -> Iterator[Buffer]:
        """The bytes of samples in a known order (default: as stored), with the kernel asked ahead."""
        order = range(len(self)) if indices is None else indices
        return stream_ahead(self, order, field, lambda block: self.prefetch(block, field))

    def sample(self, index: int) -> Sample:
        """One sample with all its fields."""
        fields = {}
        for name in self.fields:
            try:
                fields[name] = self.read(index, name)
            except UnknownNameError:
                continue  # this sample lacks it
        label = int(self.labels[index])
        return Sample(self.keys[index], None if label == NO_LABEL else label, fields)

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    # --- filling ------------------------------------------------------------------------------------------------
    def prefill(
        self,
        threads: int | None = None,
        *,
        order: Order | None = None,
        epoch: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Fill the cache now, in stored order or in that of an epoch; returns the number of samples that are kept.

        threads: default one per CPU this process may use. progress: called with the samples and bytes done so far, from
        any of the threads, one at a time. Processes that fill the same cache share the work. Samples that cannot be
        read are left to whoever reads them.
        """
        return prefill(self.base, self._shelf, threads, order, epoch, progress)

    def fill_ahead(self, order: Order, epoch: int, start: int = 0) -> FillAhead:
        """Fill the cache in the background, in the order of an epoch from position `start` on, ahead of its readers.

        One thread of low priority; it ends with the epoch, with a full cache, with the reader, or by `stop()`. A second
        call ends what the first one began.
        """
        if self._ahead is not None:
            self._ahead.stop()
        self._ahead = FillAhead(self.base, self._shelf, order, epoch, start)
        return self._ahead

    def stats(self) -> CachedStats:
        """How full the cache is and how often it was hit, by all processes that use it."""
        return stats_of(self._shelf)

    @property
    def kept(self) -> Choice:
        """Which samples have a place in the cache."""
        return self._shelf.choice

    # --- life ---------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Let go of the cache and close the base."""
        if self._ahead is not None:
            self._ahead.stop()
            self._ahead = None
        shelf, self._shelf = self._shelf, replace(self._shelf, store=None)
        shelf.close()
        self.base.close()

    def __enter__(self) -> CachedReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"base": self.base, "_shelf": self._shelf}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._setup()

    # --- inside -------------------------------------------------------------------------------------------------
    def _from_end(self, index: int) -> int:
        if index < -len(self):
            raise IndexError(f"sample {index} is outside the {len(self)} of {self}")
        return index + len(self)

    def _if_good(self, index: int) -> Buffer | None:
        try:
            return self.read(index)
        except _SAMPLE_ERRORS:
            return None
