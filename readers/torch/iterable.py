"""The same batches as a stream, for those who want an iterable data set."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from readers.torch.dataset import ImageDataset
from readers.torch.sampler import EpochSampler

__all__ = ["ImageStream"]

_EPOCH, _ITERATION = 0, 1
_PATIENCE_SECONDS = 120.0
_MODULUS = (1 << 62) - 1


class ImageStream(IterableDataset[Any]):
    """Batches of `dataset` in the order of `sampler`: for `DataLoader(stream, batch_size=None, num_workers=…)`.

    Worker w of W makes the batches w, w + W, …, and DataLoader takes from the workers in turn, so the order does not
    depend on their number. drop_last: leave out a last batch that is not full. collate: default_collate.

    Each iteration is the next epoch, with persistent workers or without: what the workers have begun stands in memory
    that they share. The samplers they hold are copies, so go to another place with the methods of the stream.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        sampler: EpochSampler,
        batch_size: int,
        *,
        drop_last: bool = True,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"a batch has 1 sample or more, not {batch_size}")
        self.dataset, self.sampler, self.batch_size = dataset, sampler, batch_size
        self.drop_last, self.collate = drop_last, collate
        # The epoch, and a number for the iteration of a DataLoader that has begun it: 0 for none.
        self._shared = torch.zeros(2, dtype=torch.int64).share_memory_()
        self._shared[_EPOCH] = sampler.epoch
        self._number, self._iterations, self._restored = 0, 0, False

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration at the start of `epoch`, in all workers."""
        self.sampler.set_epoch(epoch)
        self._shared[_EPOCH], self._shared[_ITERATION] = epoch, 0

    def __len__(self) -> int:
        full, rest = divmod(len(self.sampler), self.batch_size)
        return full if self.drop_last or not rest else full + 1

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        if info is not None and not self._restored:
            # Persistent workers keep their seed, others come with a new one: with the count, neither comes twice.
            self._iterations += 1
            self._join_epoch(worker, (info.seed - worker + self._iterations) % _MODULUS + 1)
        if not self._restored:
            self._number = 0
        self._restored = False
        batch: list[int] = []
        for index in self.sampler:
            batch.append(index)
            if len(batch) == self.batch_size:
                number, full, batch = self._number, batch, []
                self._number += 1
                if number % workers == worker:
                    yield self._collated(full)
        if batch and not self.drop_last and self._number % workers == worker:
            yield self._collated(batch)

    def state_dict(self) -> dict[str, Any]:
        """The state of the sampler, and the number of the next batch: which worker makes it."""
        return {"sampler": self.sampler.state_dict(), "number": self._number}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration of this copy begin there. Raises ResumeError as `EpochSampler` does."""
        self.sampler.load_state_dict(state["sampler"])
        self._number, self._restored = int(state["number"]), True

    def _collated(self, batch: list[int]) -> Any:
        return self.collate(self.dataset.__getitems__(batch))

    def _join_epoch(self, worker: int, iteration: int) -> None:
        """Agree with the other workers of this iteration on the epoch: the first one says which it is."""
        shared = self._shared
        if worker == 0:
            if int(shared[_ITERATION]) not in (0, iteration):
                shared[_EPOCH] += 1
            shared[_ITERATION] = iteration
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while int(shared[_ITERATION]) != iteration:
            if time.monotonic() > deadline:
                raise RuntimeError(f"worker {worker} has waited {_PATIENCE_SECONDS} s for worker 0 to begin an epoch")
            time.sleep(0.001)
        self.sampler.join_epoch(int(shared[_EPOCH]))
