"""What the samplers of a DataLoader share: epoch after epoch of a feed, states, and what trainers do with them.

A sampler hands out units: `EpochSampler` the numbers of samples, `EpochBatchSampler` lists of them. A unit is what a
rank has of one step of the feed; a sampler of several ranks' batches hands out `units_of_step` of them in a step.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar, cast

from torch.utils.data import get_worker_info

from cache.errors import TrainerError
from readers.decode import DECODER
from readers.feed import Feed, FeedOptions, Start
from readers.order import Order
from readers.order.base import Stepped
from readers.order.schedule import Tail
from readers.position import Place, Position, Progress, check_batches
from readers.reader import Reader
from readers.torch.dataset import ImageDataset
from readers.trainers import LIGHTNING, Trainer, calling_package, find_trainer

__all__ = ["Epochs"]

_Unit = TypeVar("_Unit")


@dataclass(frozen=True)
class _Set:
    """What a state says of a data set: a sampler uses nothing else of it, and pickles without it."""

    fingerprint: str
    samples: int

    def __len__(self) -> int:
        return self.samples


class Epochs(Position, ABC, Generic[_Unit]):
    """Each iteration is the next epoch. Arguments as those of `EpochSampler`; batch_size: of the feed."""

    _counted: ClassVar[str]  # what the units are called
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
        decoder = DECODER if self._dataset is None else self._dataset.decoder
        options = FeedOptions(rank, world_size, tail, decoder=decoder)
        Position.__init__(self, Feed(cast(Reader, dataset), order, batch_size, options))
        self._last_ranks, self._unpickled = self._feed.ranks, False
        self._refused: TrainerError | None = None
        self._reported: int | None = None  # the epoch that was begun last, whose bad samples are reported after it
        self.early: Any = None  # a StatefulDataLoader that has begun a loop only for a state, by a weak reference
        check_batches(self.feed)

    @abstractmethod
    def _units_from(self, start: Start) -> Iterator[_Unit]:
        """What is handed out from there to the end of the epoch."""

    # --- where it is --------------------------------------------------------------------------------------------
    @property
    def feed(self) -> Feed:
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
        return self._feed.token(self.feed.at(self.start).after(steps))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration begin there. Raises ResumeError for another set or another kind of order."""
        self._recall()
        super().load_state_dict(state)
        self._place.renew()

    # --- for the iterations, and for ImageStream ------------------------------------------------------------------
    def serve_stream(self, place: Place, name: str, stateful: str, to_accelerate: str) -> None:
        """Keep the position where a stream's workers find it, and name the stream in advice."""
        self._place, self._name, self._stateful, self._to_accelerate = place, name, stateful, to_accelerate

    def begin(self, trainer: Trainer, restored: Start | None = None, key: object = None) -> Progress:
        """Begin an iteration for a trainer, where a state says if it is from one. Raises TrainerError.

        key: that of the iteration whose parts several workers make.
        """
        self._check_sharing(trainer)
        check_batches(self.feed, 1 if trainer.partial else trainer.batch_size)
        was_loaded = restored is not None or (self._loaded and self._place.begun is None)
        start = self._place.begin(lambda: self._choose_start(trainer, restored), key)
        self._loaded, self.early = was_loaded, trainer.early
        self._progress = Progress(self.feed.at(start), trainer, self.units_of_step)
        return self._progress

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
