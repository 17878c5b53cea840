"""Indices for a DataLoader, in an order that can be resumed exactly on any number of ranks and workers."""

from __future__ import annotations

import itertools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

from torch.utils.data import DistributedSampler, Sampler, get_worker_info

from cache.errors import TrainerError
from readers.decode import DECODER
from readers.feed import FeedOptions, Start, Steps
from readers.loop import Place as StreamPlace
from readers.loop import Position, Progress, check_batches
from readers.order import Order
from readers.order.base import Int64s, Stepped
from readers.order.schedule import Tail
from readers.reader import Reader
from readers.torch.dataset import ImageDataset
from readers.torch.rendering import Place
from readers.trainers import LIGHTNING, Trainer, calling_package, find_trainer

# What the samplers of a DataLoader share: epoch after epoch of a feed, states, and what trainers do with them.
#
# A sampler hands out units: `EpochSampler` the numbers of samples, `EpochBatchSampler` lists of them. A unit is what a
# rank has of one step of the feed; a sampler of several ranks' batches hands out `units_of_step` of them in a step.


_Unit = TypeVar("_Unit")


@dataclass(frozen=True)
class _Set:
    """What a state says of a data set; a sampler pickles without the data set itself."""

    fingerprint: str
    samples: int

    def __len__(self) -> int:
        return self.samples


class Epochs(Position, ABC, Generic[_Unit]):
    """Each iteration is the next epoch. Arguments as those of `EpochSampler`; batch_size: of the feed."""

    _counted: ClassVar[str]  # what the units are called
    _batched = False  # whether a DataLoader makes batches of them
    _name = "sampler"
    _stateful: str  # the DataLoader to write, where a plain one has no state
    _to_accelerate: str  # the sampler to write, where accelerate deals out what it gives
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
        self._reported: int | None = None  # the epoch that was begun last, whose bad samples are reported after it
        self.early: Any = None  # a StatefulDataLoader that has begun a loop only for a state, by a weak reference
        check_batches(self.feed)
        if self._dataset is not None and not isinstance(order, Stepped):
            self._dataset.follow(order)

    @abstractmethod
    def _units_from(self, start: Start) -> Iterator[_Unit]:
        """What is handed out from there to the end of the epoch."""

    # --- where it is --------------------------------------------------------------------------------------------
    @property
    def feed(self) -> Steps:
        """For the rank that this process is now."""
        if not (self._unpickled and get_worker_info() is not None):  # a spawned worker has another environment
            self._last_ranks = self._feed.ranks
        rank, world_size = self._last_ranks
        return replace(self._feed, options=replace(self._feed.options, rank=rank, world_size=world_size))

    @property
    def substitutes(self) -> bool:
        """Whether samples say what may replace them: unless the data set is known, and replaces none."""
        return self._dataset is None or self._dataset.on_error == "substitute"

    @property
    def start(self) -> Start:
        """Where the iteration that was begun last began, or else the next one begins."""
        return self._start

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be of `epoch`: from the position of a state that was loaded, or else from its start.

        Raises TrainerError where a framework calls this and would lose the position of a state.
        """
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused
        if calling_package() == "torchdata" and epoch < self._place.next.epoch:
            return  # its nodes count one epoch less after a state from the end of one
        trainer = find_trainer()
        if trainer.processes > 1:
            self._check_sharing(trainer)  # here on all of them; to the first batch come only those that load
        if self.start.epoch == epoch:
            is_named_late = calling_package() in LIGHTNING and self._place.begun is not None
            if is_named_late or self._early_loader() is not None:
                return
        self._recall()
        super().set_epoch(epoch)

    def __len__(self) -> int:
        """What a whole epoch has, also one that was resumed; see `left`."""
        return self.units_after(Start())

    @property
    def left(self) -> int:
        """What has not been handed out of the iteration under way, or else of the next one."""
        progress = self._progress
        if progress is None or progress.finished:
            return self.units_after(self._place.next)
        return self.units_after(progress.feed.start) - progress.taken

    def units_after(self, start: Start) -> int:
        """What is handed out from there to the end of the epoch: how much."""
        return self.feed.at(start).batches() * self.units_of_step

    def __iter__(self) -> Iterator[_Unit]:
        """The next epoch; it begins when it is first asked for something."""
        return _Iteration(self)

    # --- state --------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """The position after what was handed out last; after the last of an iteration, the next epoch.

        Raises TrainerError where a DataLoader has asked for more than training has seen.
        """
        progress, begun = self._progress, self._place.begun is not None
        is_ahead = begun if progress is None else progress.trainer.asks_ahead
        if is_ahead and get_worker_info() is None and calling_package() != "torchdata":
            raise TrainerError(
                f"the DataLoader has asked for indices that training has not seen, so this {self._name} cannot say "
                f"where training is; write  {self._name}.state_after({self._counted} this rank has trained on)  or  "
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
        """Let the next iteration begin there. Raises ResumeError for another set or another kind of order."""
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
        """Begin an iteration for a trainer, where a state says if it is from one. Raises TrainerError.

        key: that of the iteration whose parts several workers make.
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
        """Where a state was taken, whose seed is used from now on. Raises ResumeError."""
        return self._start_of(state)

    def place_of(self, start: Start, units: int) -> Start:
        """Where so many units of the epoch of `start` are handed out."""
        return self.feed.at(Start(start.epoch, 0, start.order)).after(units // self.units_of_step)

    def report(self) -> None:
        """Warn of the bad samples of the iteration before."""
        if self._dataset is not None and self._reported is not None and (report := self._dataset.report()):
            warnings.warn(f"epoch {self._reported}: {report}", stacklevel=3)

    # --- inside -------------------------------------------------------------------------------------------------
    def _check_sharing(self, trainer: Trainer) -> None:
        """Raise TrainerError where accelerate would deal out what it should not, or nothing deals it out."""
        trainer.check_sharing(self.world_size, self._to_accelerate)

    def _choose_start(self, trainer: Trainer, restored: Start | None) -> Start:
        """Where an iteration begins: the trainer's epoch, and a state that the trainer has not loaded, count."""
        start = restored
        if start is None:
            epoch = self._place.next.epoch if trainer.epoch is None else trainer.epoch
            start = self._start_in(epoch, trainer, trainer.name)
            missed = trainer.missed_state(start.epoch, len(self.order)) if not start.cursor else None
            start = start if missed is None else self._start_of(missed)
            if trainer.has_done(trainer.batches_of(len(self))):
                start = Start(start.epoch, len(self.order))
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
        self._refused = error  # Lightning hides what is raised here; it names the epoch before it takes a batch

    def _early_loader(self) -> Any:
        """The StatefulDataLoader that has begun a loop only for a state, until its first loop takes that over."""
        loader = None if self.early is None else self.early()
        return loader if loader is not None and loader._initial_iter_for_state_dict else None

    def _recall(self) -> None:
        """Take such a loop back, so that the position can be set."""
        loader, begun, loaded = self._early_loader(), self._place.begun, self._loaded
        if loader is not None:
            loader.load_state_dict({})  # forgets the iterator
            self._put(begun or self._place.next)
            self._loaded = loaded

    def __getstate__(self) -> dict[str, Any]:
        self._last_ranks = self.feed.ranks
        return {**self.__dict__, "early": None, "_unpickled": True}


class _Iteration(Iterator[_Unit]):
    """One epoch, or the rest of one. It begins when it is first asked for something, or with a state.

    torchdata keeps the state of this iterator, and makes two of them for the state of an epoch that is over: one that
    has nothing left, and the next epoch.
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
        """Continue from there, in that epoch only. Raises ResumeError."""
        self._progress = self._sampler.begin(find_trainer(), self._sampler.restored(state))


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


def _batches_from(feed: Steps, substitutes: bool) -> Iterator[list[int]]:
    """The batches of a feed's rank from its start to the end of the epoch."""
    for positions, rows in feed.blocks(feed.start.epoch):
        for places, numbers in zip(positions, rows, strict=True):
            if len(numbers):
                yield list(_places(feed, places, numbers, substitutes))


def _places(feed: Steps, positions: Int64s, rows: Int64s, substitutes: bool) -> Iterator[Place]:
    """The samples at some positions of a feed's first epoch. substitutes: whether they may have to be replaced."""
    seed, epoch = feed.seed, feed.start.epoch
    others = feed.others(epoch, positions).tolist() if substitutes else itertools.repeat(())
    ranks = feed.ranks[1]
    for row, position, instead in zip(rows.tolist(), positions.tolist(), others, strict=False):
        yield Place(row, seed, epoch, position, instead, ranks)
