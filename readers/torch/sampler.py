"""Indices for a DataLoader, in an order that can be resumed exactly on any number of ranks and workers."""

from __future__ import annotations

import itertools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from torch.utils.data import DistributedSampler, Sampler, get_worker_info

from cache.errors import TrainerError
from readers.decode import DECODER
from readers.feed import ORDER_AT_ONCE, FeedOptions, Start, Steps
from readers.loop import Place as StreamPlace
from readers.loop import Position, Progress, check_batches
from readers.order import Order
from readers.order.base import Int64s, Stepped
from readers.order.schedule import Tail
from readers.reader import Reader
from readers.torch.dataset import ImageDataset
from readers.torch.rendering import Place
from readers.trainers import LIGHTNING, Trainer, calling_package, find_trainer

# A sampler yields units: `EpochSampler` sample numbers, `EpochBatchSampler` lists of them. A unit is one rank's part of
# a step of the feed; a sampler that yields the batches of all ranks has `units_of_step` units in a step.


_Unit = TypeVar("_Unit")


@dataclass(frozen=True)
class _Set:
    """A data set's entries in a state; a sampler pickles these instead of the data set."""

    fingerprint: str
    samples: int

    def __len__(self) -> int:
        return self.samples


class Epochs(Position, ABC, Generic[_Unit]):
    """The base of both samplers: each iteration is the next epoch.

    Arguments as for `EpochSampler`; batch_size: of the feed.
    """

    _counted: ClassVar[str]  # name of the units in messages
    _batched = False  # whether a DataLoader makes batches of the units
    _name = "sampler"
    _stateful: str  # in messages: the DataLoader to use if a plain one has no state
    _to_accelerate: str  # in messages: the sampler to use with accelerate
    units_of_step: int = 1

    def __init__(
        self,
        order: Order,
        source: Reader | ImageDataset | None,
        batch_size: int,
        rank: int | None,
        world_size: int | None,
        tail: Tail,
    ) -> None:
        reader = source.reader if isinstance(source, ImageDataset) else source
        self._dataset = source if isinstance(source, ImageDataset) else None
        samples = int(order.spec()["samples"]) if isinstance(order, Stepped) else len(order)
        dataset = _Set("", samples) if reader is None else _Set(reader.fingerprint, len(reader))
        decoder, made = (DECODER, {}) if self._dataset is None else (self._dataset.decoder, self._dataset.made)
        options = FeedOptions(rank, world_size, tail, decoder=decoder, made=made)
        Position.__init__(self, Steps(dataset, order, batch_size, options))
        self._last_ranks, self._unpickled = self._feed.ranks, False
        self._refused: TrainerError | None = None
        self._of_stream: tuple[int, bool] | None = None
        self._reported: int | None = None  # epoch of the last iteration; its bad samples are reported after it
        self.early: Any = None  # weak reference to a StatefulDataLoader that began a loop only to take a state
        check_batches(self.feed)
        if self._dataset is not None:
            self._dataset.follow(None if isinstance(order, Stepped) else order)

    @abstractmethod
    def _units_from(self, start: Start) -> Iterator[_Unit]:
        """The units from `start` to the end of the epoch."""

    # --- where it is --------------------------------------------------------------------------------------------
    @property
    def feed(self) -> Steps:
        """The feed of this process's current rank."""
        if not (self._unpickled and get_worker_info() is not None):  # a spawned worker cannot detect its rank
            self._last_ranks = self._feed.ranks
        rank, world_size = self._last_ranks
        return replace(self._feed, options=replace(self._feed.options, rank=rank, world_size=world_size))

    @property
    def substitutes(self) -> bool:
        """Whether samples carry their substitutes: False only if the data set is known and does not substitute."""
        return self._dataset is None or self._dataset.on_error == "substitute"

    @property
    def start(self) -> Start:
        """Start of the current or last iteration; before the first, of the next one."""
        return self._start

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, which begins at the position of a loaded state, if any.

        Raises TrainerError if the calling framework would lose the position of a state.
        """
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused
        if calling_package() == "torchdata" and epoch < self._place.next.epoch:
            return  # torchdata's nodes count one epoch too few after a state from the end of an epoch
        trainer, under_way = find_trainer(), self._progress
        self._keep(trainer)
        if under_way is not None and under_way.trainer.too_early:
            raise trainer.began_too_early()
        if trainer.processes > 1:
            self._check_sharing(trainer)  # checked here on all processes; only those that load reach the first batch
        if self.start.epoch == epoch:
            is_named_late = calling_package() in LIGHTNING and self._place.begun is not None
            if is_named_late or self._early_loader() is not None:
                return
        self._recall()
        super().set_epoch(epoch)

    def __len__(self) -> int:
        """Units of a whole epoch, also while an epoch is resumed; see `left`."""
        return self.units_after(Start())

    @property
    def left(self) -> int:
        """Units left in the iteration under way, or else in the next one."""
        progress = self._progress
        if progress is None or progress.finished:
            return self.units_after(self._place.next)
        return self.units_after(progress.feed.start) - progress.taken

    def units_after(self, start: Start) -> int:
        """Number of units from `start` to the end of the epoch."""
        return self.feed.at(start).batches() * self.units_of_step

    def __iter__(self) -> Iterator[_Unit]:
        """The next epoch; it begins with the request for its first unit."""
        return _Iteration(self)

    # --- state --------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """The position after the last unit yielded; after the last unit of an epoch, the next epoch.

        Raises TrainerError if a DataLoader has taken indices ahead of training.
        """
        progress, begun = self._progress, self._place.begun is not None
        is_ahead = begun if progress is None else progress.trainer.asks_ahead
        if is_ahead and get_worker_info() is None and calling_package() != "torchdata":
            raise TrainerError(
                f"the DataLoader takes indices ahead of training, so this {self._name} does not know the position of "
                f"training; write  {self._name}.state_after({self._counted} this rank has trained on)  or  "
                f"{self._stateful}"
            )
        return super().state_dict()

    def _state_after(self, steps: int) -> dict[str, Any]:
        if self._progress is None:
            self._join_stream(self.start)
        return self._feed.token(self.feed.at(self.start).after(steps))

    def _join_stream(self, start: Start) -> None:
        """Keep the record of a run whose loops begin in the workers of a stream."""
        if self._of_stream is not None:
            self._join(start, *self._of_stream)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next iteration at the position of a state. Raises ResumeError for another set or kind of order."""
        self._recall()
        super().load_state_dict(state)
        self._join_stream(self._place.next)
        self._place.renew()

    # --- for the iterations, and for ImageStream ------------------------------------------------------------------
    def serve_stream(
        self, place: StreamPlace, name: str, stateful: str, to_accelerate: str, batches: tuple[int, bool]
    ) -> None:
        """Keep the position where a stream's workers find it, and name the stream in advice. batches: their size, and
        whether the last one may be smaller."""
        self._place, self._name, self._stateful, self._to_accelerate = place, name, stateful, to_accelerate
        self._of_stream = batches

    def begin(self, trainer: Trainer, restored: Start | None = None, key: object = None) -> Progress:
        """Begin an iteration for a trainer, at `restored` if given. Raises TrainerError.

        key: identifies an iteration that several workers share.
        """
        self._check_sharing(trainer)
        check_batches(self.feed, 1 if trainer.partial else trainer.batch_size)
        was_loaded = restored is not None or (self._loaded and self._place.begun is None)
        start = self._place.begin(lambda: self._choose_start(trainer, restored), key)
        self._loaded, self.early = was_loaded, trainer.early
        self._progress = self._joined(start, trainer)
        return self._progress

    def _joined(self, start: Start, trainer: Trainer) -> Progress:
        """An iteration from there on, which has joined the record of the run."""
        dealt = (trainer.batch_size, trainer.partial) if self._batched else (0, None)
        run, first = self._join(start, *dealt)
        first = -1 if get_worker_info() is not None else first  # which makes some of the batches
        return Progress(replace(self.feed.at(start), run=run), trainer, self.units_of_step, first)

    def restored(self, state: Mapping[str, Any]) -> Start:
        """The position of a state, whose seed is used from now on. Raises ResumeError."""
        return self._start_of(state)

    def place_of(self, start: Start, units: int) -> Start:
        """The position after `units` units of the epoch of `start`."""
        return self.feed.at(Start(start.epoch, 0, start.order)).after(units // self.units_of_step)

    def report(self) -> None:
        """Warn of the bad samples of the iteration before."""
        if self._dataset is not None and self._reported is not None and (report := self._dataset.report()):
            warnings.warn(f"epoch {self._reported}: {report}", stacklevel=3)

    # --- inside -------------------------------------------------------------------------------------------------
    def _check_sharing(self, trainer: Trainer) -> None:
        """Raise TrainerError if accelerate would share out units wrongly, or if nothing shares them out."""
        trainer.check_sharing(self.world_size, self._to_accelerate)

    def _choose_start(self, trainer: Trainer, restored: Start | None) -> Start:
        """The start of an iteration, by the trainer's epoch and a state that the trainer has not loaded."""
        start = restored
        if start is None:
            epoch = self._place.next.epoch if trainer.epoch is None else trainer.epoch
            start = self._start_in(epoch, trainer, trainer.name)
            start = start if start.cursor else self._missed(start, trainer)
            if trainer.has_done(trainer.batches_of(len(self)), self._miscounted):
                start = Start(start.epoch, len(self.order))
        elif trainer.epoch == start.epoch and trainer.has_done(trainer.batches_of(len(self))):
            start = Start(start.epoch, len(self.order))  # limit_train_batches
        elif trainer.at_end and trainer.epoch == start.epoch + 1:
            start = Start(start.epoch + 1)
        else:
            start = self._before_batch(start, trainer)
        self._check_resume(start, trainer)
        return start

    def _check_resume(self, start: Start, trainer: Trainer) -> None:
        left = trainer.batches_of(self.units_after(start))
        try:
            trainer.check_resume(left, trainer.batches_of(len(self)), self._stateful)
        except TrainerError as error:
            self._refuse(error, trainer)

    def _before_batch(self, start: Start, trainer: Trainer) -> Start:
        try:
            return super()._before_batch(start, trainer)
        except TrainerError as error:
            self._refuse(error, trainer)
            return start

    def _refuse(self, error: TrainerError, trainer: Trainer) -> None:
        if not trainer.asks_ahead:
            raise error
        self._refused = error  # Lightning hides an error raised now; it calls set_epoch before it takes a batch

    def _early_loader(self) -> Any:
        """The StatefulDataLoader that began a loop only to take a state, until its first real loop takes it over."""
        loader = None if self.early is None else self.early()
        return loader if loader is not None and loader._initial_iter_for_state_dict else None

    def _recall(self) -> None:
        """Undo a loop begun only to take a state, so that the position can be set."""
        loader, begun, loaded = self._early_loader(), self._place.begun, self._loaded
        if loader is not None:
            loader.load_state_dict({})  # forgets the iterator
            self._put(begun or self._place.next)
            self._loaded = loaded

    def __getstate__(self) -> dict[str, Any]:
        self._last_ranks = self.feed.ranks
        return {**self.__dict__, "early": None, "_unpickled": True}


class _Iteration(Iterator[_Unit]):
    """One epoch, or the rest of one. It begins with the request for its first unit, or with a state.

    torchdata keeps the state of this iterator; for a state from the end of an epoch it makes two iterators: an
    exhausted one, and the next epoch.
    """

    def __init__(self, sampler: Epochs[_Unit]) -> None:
        self._sampler = sampler
        self._progress: Progress | None = None
        self._units: Iterator[_Unit] | None = None

    def __next__(self) -> _Unit:
        sampler = self._sampler
        if self._progress is None:
            sampler.report()
            self._progress = sampler.begin(find_trainer())
            sampler._reported = self._progress.feed.start.epoch
        if self._units is None:
            self._units = sampler._units_from(self._progress.feed.start)
        try:
            unit = next(self._units)
        except StopIteration:
            self._progress.finished = True
            raise
        self._progress.taken += 1
        return unit

    def state_dict(self) -> dict[str, Any]:
        """The position in this iteration, also at its end."""
        start = self._sampler._place.next if self._progress is None else self._progress.position
        return self._sampler.feed.token(start)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of a state, in that epoch only. Raises ResumeError."""
        self._progress = self._sampler.begin(find_trainer(), self._sampler.restored(state))


class EpochSampler(Epochs[int], DistributedSampler[int]):  # type: ignore[override]  # its attributes are properties here
    """The samples of one rank, epoch after epoch: each iteration is the next epoch.

    Ranks take positions in turn, so after k samples on each of W ranks the first k x W positions of the epoch are done:
    a resume needs only this number.

    source: a reader, or the `ImageDataset` that the indices are for. Its fingerprint becomes part of the state; bad
        samples of a data set are also reported, in a warning, when the next epoch begins.
    rank, world_size: default: detected from torch.distributed, torchrun, Slurm or MPI each time an iteration begins.
    tail: "drop_last", "pad" or "exact" (see `readers.order.Schedule`).

    Stateful in the sense of torchdata: StatefulDataLoader saves and restores it. A plain DataLoader takes indices ahead
    of training; there, save `state_after` of the samples that training has used.

    It is a DistributedSampler, so frameworks that shard other samplers among the ranks leave this one alone. A
    framework that shards it anyway gets a TrainerError with the line to write.

    Raises ValueError for an order that makes batches itself, such as `Bucketed`: see `EpochBatchSampler`.
    """

    _counted = "samples"
    _batched = True
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
                f"{type(order).__name__} makes batches itself, but EpochSampler yields single samples: write  "
                f"DataLoader(dataset, batch_sampler=EpochBatchSampler(order, dataset))"
            )
        super().__init__(order, source, 1, rank, world_size, tail)

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """The world size, as DistributedSampler calls it."""
        return self.world_size

    def state_after(self, samples: int) -> dict[str, Any]:
        """The position after `samples` samples on every rank of the current or last iteration."""
        return self._state_after(samples)

    def samples_from(self, start: Start) -> Iterator[Place]:
        """The samples of this rank from `start` to the end of the epoch."""
        feed = self.feed.at(start)
        for positions, rows in feed.blocks(start.epoch):
            yield from _places(feed, positions.ravel(), rows.ravel(), self.substitutes)

    _units_from = samples_from

    def batches_from(self, start: Start, size: int, worker: int, workers: int) -> Iterator[tuple[int, list[Place]]]:
        """(size, samples) of all batches from `start` to the end of the epoch, the last of which may be smaller.

        The order is computed only for every `workers`-th batch from the `worker`-th on; others have no samples.
        """
        feed = self.feed.at(start)
        order = feed.schedule(start.epoch)[0].order
        for positions in feed.positions(start.epoch, -(-ORDER_AT_ONCE // size) * size * workers):
            batches = np.split(positions, range(size, len(positions), size))
            own = np.concatenate([positions[:0], *batches[worker::workers]])
            places = _places(feed, own, order.indices(start.epoch, own), self.substitutes)
            for number, batch in enumerate(batches):
                yield len(batch), list(itertools.islice(places, len(batch) * (number % workers == worker)))


class EpochBatchSampler(Epochs[list[int]], Sampler[list[int]]):
    """The batches of one rank, epoch after epoch, for any order, including those that make batches themselves.

        order = Bucketed(buckets.of(reader.info), batch_size=32, seed=7)
        loader = DataLoader(dataset, batch_sampler=EpochBatchSampler(order, dataset), num_workers=4)

    A batch is a list of indices. With `Bucketed` all ranks have batches of the same size and bucket in a step; a data
    set with on_error="substitute" replaces a bad sample by another sample of its step.

    order, source, rank, world_size, tail: as for `EpochSampler`. With tail="exact" a rank without samples in the last
        step has one batch less.
    batch_size: samples of a rank in a step; default: the order's batch size; required if the order makes no batches.
    all_ranks: yield the batches of all ranks of each step in turn, starting at rank 0, for accelerate, which
        distributes the batches of a prepared DataLoader among its processes.

    States are interchangeable with those of `EpochSampler` and `ImageLoader`. StatefulDataLoader saves and restores it;
    with a plain DataLoader, save `state_after` of the batches that training has used. On several ranks Lightning needs
    Trainer(use_distributed_sampler=False). Raises ValueError.
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
            raise ValueError(
                "with tail='exact' ranks may differ in their number of batches: all_ranks=True needs another tail"
            )
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
        """The position after `batches` batches on every rank of the current or last iteration."""
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
                f"all_ranks=True yields the batches of {self.world_size} ranks in turn, but accelerate distributes "
                f"them among {trainer.processes}: prepare the DataLoader on as many processes, or leave all_ranks out"
            )


def _batches_from(feed: Steps, substitutes: bool) -> Iterator[list[int]]:
    """The batches of a feed's rank from its start to the end of the epoch."""
    for positions, rows in feed.blocks(feed.start.epoch):
        for places, numbers in zip(positions, rows, strict=True):
            if len(numbers):
                yield list(_places(feed, places, numbers, substitutes))


def _places(feed: Steps, positions: Int64s, rows: Int64s, substitutes: bool) -> Iterator[Place]:
    """The samples at some positions of a feed's first epoch. substitutes: whether to attach their substitutes."""
    seed, epoch = feed.seed, feed.start.epoch
    others = feed.others(epoch, positions).tolist() if substitutes else itertools.repeat(())
    ranks = feed.ranks[1]
    for row, position, instead in zip(rows.tolist(), positions.tolist(), others, strict=False):
        yield Place(row, seed, epoch, position, instead, ranks)
