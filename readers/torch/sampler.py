"""Indices for a DataLoader, in an order that can be resumed exactly on any number of ranks and workers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import DistributedSampler, Sampler

from cache.errors import TrainerError
from readers.feed import Feed, Start
from readers.order import Order
from readers.order.base import Int64s, Stepped
from readers.order.schedule import Tail
from readers.reader import Reader
from readers.torch.dataset import ImageDataset, Place
from readers.torch.epochs import Epochs
from readers.trainers import Trainer

__all__ = ["EpochBatchSampler", "EpochSampler"]


class EpochSampler(Epochs[int], DistributedSampler[int]):  # type: ignore[override]  # its attributes are properties here
    """The samples of one rank, epoch after epoch: each iteration is the next epoch.

    Ranks take positions in turn, so after k samples on every rank of W the first k x W positions of the epoch are done:
    that number, and no more, is what a resume needs.

    source: a reader, or the `ImageDataset` that the indices are for. It lets the state say which set it belongs to; the
        bad samples of a data set are also reported, as a warning, when the epoch after them begins.
    rank, world_size: when not given, found in torch.distributed, torchrun, Slurm or MPI each time an iteration begins.
    tail: "drop_last", "pad" or "exact" (see `readers.order.Schedule`).

    Stateful in the sense of torchdata: StatefulDataLoader saves and restores it. A plain DataLoader asks for more
    indices than it has handed out; there, save `state_after` of the samples that training has seen.

    It is a DistributedSampler, so frameworks that share other samplers out among the ranks leave this one alone. Those
    that share it out all the same get a TrainerError with the line to write.

    Raises ValueError for an order that makes batches itself, such as `Bucketed`: see `EpochBatchSampler`.
    """

    _counted = "samples"
    _stateful = "StatefulDataLoader(dataset, batch_size, sampler=sampler, …)  of torchdata.stateful_dataloader"
    _to_accelerate = "EpochSampler(order, dataset, rank=0, world_size=1)"

    def __init__(
        self,
        order: Order,
        source: Reader | ImageDataset | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        tail: Tail = "drop_last",
    ) -> None:
        if isinstance(order, Stepped) and order.largest_batch > 1:
            raise ValueError(
                f"{type(order).__name__} makes batches itself, and EpochSampler gives single samples: write  "
                f"DataLoader(dataset, batch_sampler=EpochBatchSampler(order, dataset))"
            )
        super().__init__(order, source, 1, rank, world_size, tail)

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """The world size, as DistributedSampler calls it."""
        return self.world_size

    def state_after(self, samples: int) -> dict[str, Any]:
        """The position after `samples` samples, on every rank, of the iteration that was begun last."""
        return self._state_after(samples)

    def samples_from(self, start: Start) -> Iterator[Place]:
        """The samples of this rank from there to the end of the epoch."""
        feed = self.feed.at(start)
        for positions, rows in feed.blocks(start.epoch):
            yield from _places(feed, positions.ravel(), rows.ravel(), self.substitutes)

    _units_from = samples_from


class EpochBatchSampler(Epochs[list[int]], Sampler[list[int]]):
    """The batches of one rank, epoch after epoch, for orders that make batches themselves, and for all others.

        order = Bucketed(buckets.of(reader.info), batch_size=32, seed=7)
        loader = DataLoader(dataset, batch_sampler=EpochBatchSampler(order, dataset), num_workers=4)

    A batch is a list of indices. Under `Bucketed` all ranks have the same number of them in a step, of one bucket; a
    data set with on_error="substitute" replaces a bad sample by another one of its step.

    order, source, rank, world_size, tail: as for `EpochSampler`. A rank with nothing left in the last step of
        tail="exact" has one batch less.
    batch_size: samples of a rank in a step; the order's own by default, and needed where it has none.
    all_ranks: give the batches of all ranks of each step in turn, from rank 0 on, for accelerate, which deals the
        batches of a prepared DataLoader out to its processes. Of as many ranks as the order was made for.

    States are those of `EpochSampler` and `ImageLoader`, and what it says of DataLoaders holds here: StatefulDataLoader
    saves and restores it; next to a plain one, save `state_after` of the batches that training has seen. Lightning on
    several ranks leaves it alone with Trainer(use_distributed_sampler=False). Raises ValueError.
    """

    _counted = "batches"
    _stateful = "StatefulDataLoader(dataset, batch_sampler=sampler, …)  of torchdata.stateful_dataloader"
    _to_accelerate = "EpochBatchSampler(order, dataset, all_ranks=True)"

    def __init__(
        self,
        order: Order,
        source: Reader | ImageDataset | None = None,
        batch_size: int | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        tail: Tail = "drop_last",
        all_ranks: bool = False,
    ) -> None:
        if batch_size is None:
            if not isinstance(order, Stepped):
                raise ValueError(f"{type(order).__name__} makes no batches itself: give EpochBatchSampler a batch_size")
            batch_size = order.largest_batch
        if all_ranks and tail == "exact" and not isinstance(order, Stepped):
            raise ValueError("with tail='exact' ranks differ in their batches: all_ranks=True needs another tail")
        self._all_ranks = all_ranks
        super().__init__(order, source, batch_size, rank, world_size, tail)

    @property
    def sampler(self) -> EpochBatchSampler:
        """The object whose `set_epoch` trainers call."""
        return self

    @property
    def units_of_step(self) -> int:  # type: ignore[override]
        return self.world_size if self._all_ranks else 1

    def state_after(self, batches: int) -> dict[str, Any]:
        """The position after `batches` batches, on every rank, of the iteration that was begun last."""
        return self._state_after(batches)

    def _units_from(self, start: Start) -> Iterator[list[int]]:
        feed = self.feed.at(start)
        if not self._all_ranks:
            yield from _batches_from(feed, self.substitutes)
            return
        options = [replace(feed.options, rank=rank) for rank in range(self.world_size)]
        ranks = [_batches_from(replace(feed, options=of_rank), self.substitutes) for of_rank in options]
        for step in zip(*ranks, strict=True):
            yield from step

    def _check_sharing(self, trainer: Trainer) -> None:
        if not self._all_ranks:
            super()._check_sharing(trainer)
        elif trainer.processes != self.world_size:
            raise TrainerError(
                f"all_ranks=True gives the batches of {self.world_size} ranks in turn, and accelerate deals them out "
                f"to {trainer.processes}: prepare the DataLoader on as many processes, or leave all_ranks out"
            )


def _batches_from(feed: Feed, substitutes: bool) -> Iterator[list[int]]:
    """The batches of a feed's rank from its start to the end of the epoch."""
    for positions, rows in feed.blocks(feed.start.epoch):
        for places, numbers in zip(positions, rows, strict=True):
            if len(numbers):
                yield list(_places(feed, places, numbers, substitutes))


def _places(feed: Feed, positions: Int64s, rows: Int64s, substitutes: bool) -> Iterator[Place]:
    """The samples at some positions of a feed's first epoch. substitutes: whether they may have to be replaced."""
    seed, epoch = feed.seed, feed.start.epoch
    others = feed.others(epoch, positions).tolist() if substitutes else itertools.repeat(())
    for row, position, instead in zip(rows.tolist(), positions.tolist(), others, strict=False):
        yield Place(row, seed, epoch, position, instead)
