"""The cuts of our own loaders: a few samples of a reader in the page cache, encoded in memory, and decoded in memory.

Decoding and augmenting are one pass over each image (only the part needed by a crop is decoded), so the time of
"decode" is the time that the pass saves if it starts from pixels.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cache.errors import PackerError
from packer.tools.diagnose.cuts import Cuts, RecordedCuts
from packer.tools.diagnose.pipeline import Stage
from readers.caching import CachedReader, cached
from readers.reader import Reader
from readers.torch import ImageDataset, Place

__all__ = ["TierCuts", "Tiers"]

_TOGETHER = 16  # samples
_MEMORY_BYTES = 1 << 30  # per cache
_FILLED = 0.9
_TIMED_SECONDS = 1.0


@dataclass(frozen=True)
class Tiers:
    """The readers for the cuts of a loader.

    readers: readers of the original samples, of their encoded bytes in memory in the form that decoders get, and of
    their pixels in memory. rows: rows of the samples in the whole reader. size_error: see `Pipeline`.
    """

    rows: Sequence[int]
    readers: tuple[Reader, CachedReader, CachedReader]
    size_error: float

    @classmethod
    def of(cls, reader: Reader, rows: Sequence[int]) -> Tiers:
        """Make the readers for some rows, or for the first of them if the pixels of all take more than 1 GiB."""
        rows = _rows_that_fit(reader, rows)
        few = reader.select(indices=list(rows))
        kept = "encoded" if few.for_decoding() is few else "coefficients"  # the form that decoders get
        encoded = cached(few, _MEMORY_BYTES, keep=kept, backend="memfd")
        with warnings.catch_warnings():  # the diagnosed loader also reduces images to 8 bits, and warns about it
            warnings.filterwarnings("ignore", ".*a cache that keeps images decoded")
            pixels = cached(few, _MEMORY_BYTES, keep="decoded", backend="memfd")
        try:
            error = abs(float(few.sizes().mean() / reader.sizes().mean()) - 1)
        except (OSError, PackerError, ZeroDivisionError):  # the sizes of some files are unknown
            error = 0.0
        return cls(rows, (few, encoded, pixels), error if np.isfinite(error) else 0.0)

    def stages(self, times: Sequence[tuple[float, float]], decoder: str, ops: Sequence[Any]) -> tuple[Stage, ...]:
        """The stages read, decode and augment. times: seconds and CPU seconds over each of the readers."""
        (read, decode), names = itertools.pairwise(times), ", ".join(type(op).__name__ for op in ops) or "nothing"
        return (
            Stage("read", f"{type(self.readers[0].store).__name__}, in the page cache", *_less(*read)),
            Stage("decode", decoder, *_less(*decode)),
            Stage("augment", names, *times[-1]),
        )


def _rows_that_fit(reader: Reader, rows: Sequence[int]) -> Sequence[int]:
    """The first of these rows, at least one, whose pixels fit into a cache of `_MEMORY_BYTES`."""
    info = reader.image_info(np.asarray(rows, np.int64))
    pixels = np.cumsum(3 * info.height.astype(np.int64) * info.width)
    return rows[: max(1, int(np.searchsorted(pixels, _FILLED * _MEMORY_BYTES)))]


def _less(more: tuple[float, float], few: tuple[float, float]) -> tuple[float, float]:
    return max(0.0, more[0] - few[0]), max(0.0, more[1] - few[1])


class TierCuts(Cuts):
    """The cuts of an `ImageDataset`: read, decode, then its ops ("augment") or the members of its transform."""

    def __init__(self, loader: Any, data: ImageDataset, indices: Sequence[Any]) -> None:
        tiers = Tiers.of(data.reader, list(dict.fromkeys(int(index) for index in indices)))
        kept = {row: number for number, row in enumerate(tiers.rows)}
        places = [_moved(index, kept[int(index)]) for index in indices if int(index) in kept]
        self.size_error, self.count = tiers.size_error, len(places)
        self._data = [_Slotted(data.over(reader), places) for reader in tiers.readers]
        times = [_time(each) for each in self._data]  # also fills the caches
        self._inner = RecordedCuts(loader, self._data[-1], range(len(places)))
        self.notes, self.count = self._inner.notes, min(self.count, self._inner.count)
        ops = isinstance(data.transform, Sequence)
        self._shift = 2 if ops else 1  # number of stages before those of the inner cuts
        stages = tiers.stages(times, f"{type(data).__name__}, to {data.output}", data.transform if ops else ())  # type: ignore[arg-type]
        self.stages = (*stages[: 3 if ops else 2], *self._inner.stages[1:])

    @staticmethod
    def can_cut(data: ImageDataset) -> bool:
        """Whether a cache can keep the decoded images of the data set."""
        return data.decode == "RGB" and "image" in data.fields

    def data(self, cut: int) -> Any:
        return self._data[cut] if cut < 2 else self._inner.data(cut - self._shift)

    def without(self, number: int) -> Any | None:
        return self._inner.without(number - self._shift, self._data[0]) if number >= 2 and self._shift == 1 else None


class _Slotted:
    """A data set by slot. places: the index of each slot in the data set."""

    def __init__(self, dataset: ImageDataset, places: Sequence[int]) -> None:
        self.dataset, self.places = dataset, places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, slot: int) -> Any:
        return self.dataset[self.places[slot]]

    def __getitems__(self, slots: Sequence[int]) -> list[Any]:
        return self.dataset.__getitems__([self.places[slot] for slot in slots])


def _moved(index: int, row: int) -> int:
    """An index with the same random draws for another row."""
    return Place(row, index.seed, index.epoch, index.position, index.others) if isinstance(index, Place) else row


def _time(data: _Slotted) -> tuple[float, float]:
    """Seconds and CPU seconds per sample by one thread, after all samples were read once."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    try:
        for slot in range(len(data)):
            data[slot]
        start, cpu, done = time.perf_counter(), time.thread_time(), 0
        while not done or (done < len(data) and time.perf_counter() - start < _TIMED_SECONDS):
            data.__getitems__(range(done, min(done + _TOGETHER, len(data))))
            done = min(done + _TOGETHER, len(data))
        return (time.perf_counter() - start) / done, (time.thread_time() - cpu) / done
    finally:
        torch.set_num_threads(threads)
