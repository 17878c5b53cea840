"""What the samplers of a DataLoader share: epoch after epoch of a feed, states, and what trainers do with them.

A sampler hands out units: `EpochSampler` the numbers of samples, `EpochBatchSampler` lists of them. A unit is what a
rank has of one step of the feed; a sampler of several ranks' batches hands out `units_of_step` of them in a step.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

from torch.utils.data import get_worker_info

from cache.errors import TrainerError
from readers.decode import DECODER
from readers.feed import Feed, FeedOptions, Start
from readers.order import Order
from readers.order.base import Stepped
from readers.order.schedule import Tail
from readers.reader import Reader
from readers.torch.dataset import ImageDataset
from readers.trainers import LIGHTNING, Trainer, calling_package, check_epoch, find_trainer

if TYPE_CHECKING:
    from readers.torch.iterable import ImageStream

__all__ = ["Epochs"]

_Unit = TypeVar("_Unit")


@dataclass(frozen=True)
class _Set:
    """What a state says of a data set: a sampler uses nothing else of it, and pickles without it."""

    fingerprint: str
    samples: int

    def __len__(self) -> int:
        return self.samples


class Epochs(ABC, Generic[_Unit]):
    """Each iteration is the next epoch. Arguments as those of `EpochSampler`; batch_size: of the feed."""

    _counted: ClassVar[str]  # what the units are called
    _stateful: ClassVar[str]  # the DataLoader to write, where a plain one has no state
    _to_accelerate: ClassVar[str]  # the sampler to write, where accelerate deals out what it gives
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
        self._feed = Feed(cast(Reader, dataset), order, batch_size, options)
        self._last_ranks, self._unpickled = self._feed.ranks, False
        # Where the next iteration begins, whether a state has put it there, and the iteration that was begun last.
        self._next = Start()
        self._loaded = False
        self._refused: TrainerError | None = None
        self._current: _Iteration[_Unit] | None = None
        self._stream: ImageStream | None = None  # says where this sampler is, if there is one
        self.feed.schedule()

    @abstractmethod
    def _units_from(self, start: Start) -> Iterator[_Unit]:
        """What is handed out from there to the end of the epoch."""

    # --- where it is --------------------------------------------------------------------------------------------
    @property
    def feed(self) -> Feed:
        """For the rank that this process is now."""
        rank, world_size = self._ranks()
        return replace(self._feed, options=replace(self._feed.options, rank=rank, world_size=world_size))

    @property
    def order(self) -> Order:
        return self._feed.order

    @property
    def tail(self) -> Tail:
        return self._feed.options.tail

    @property
    def rank(self) -> int:
        return self._ranks()[0]

    @property
    def substitutes(self) -> bool:
        """Whether samples say what may replace them: unless the data set is known, and replaces none."""
        return self._dataset is None or self._dataset.on_error == "substitute"

    @property
    def world_size(self) -> int:
        return self._ranks()[1]

    @property
    def epoch(self) -> int:
        """The epoch of the iteration under way, or else of the next one."""
        current = self._current
        if self._stream is None and current is not None and current.finished:
            return self._next.epoch
        return self.start.epoch

    @property
    def start(self) -> Start:
        """Where the iteration that was begun last began, or else the next one begins."""
        if self._stream is not None:
            return self._stream.start
        return self._next if self._current is None else self._current.start

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be of `epoch`: from the position of a state that was loaded, or else from its start.

        Raises TrainerError where a framework calls this and would lose the position of a state.
        """
        if epoch < 0:
            raise ValueError(f"an epoch is 0 or more, not {epoch}")
        if self._stream is not None:
            return self._stream.set_epoch(epoch)
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused
        check_epoch(epoch, self._next.epoch if self._loaded else None)
        current = self._current
        if calling_package() in LIGHTNING and current is not None and current.start.epoch == epoch:
            return None  # it names an epoch after it has begun it
        if self._next.epoch != epoch:
            self._put(Start(epoch))
        return None

    def __len__(self) -> int:
        """What a whole epoch has, also one that was resumed; see `left`."""
        return self.units_after(Start())

    @property
    def left(self) -> int:
        """What has not been handed out of the iteration under way, or else of the next one."""
        current = self._current
        if current is None or current.finished:
            return self.units_after(self._next)
        return current.left

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
        current = self._current
        if self._stream is not None:
            return dict(self._stream.state_dict()["sampler"])
        if current is not None and current.trainer.asks_ahead and calling_package() != "torchdata":
            raise TrainerError(
                f"the DataLoader has asked for indices that training has not seen, so this sampler cannot say where "
                f"training is; write  sampler.state_after({self._counted} this rank has trained on)  or  "
                f"{self._stateful}"
            )
        return self._feed.token(self._next if current is None or current.finished else current.position)

    def _state_after(self, steps: int) -> dict[str, Any]:
        return self._feed.token(self.feed.at(self.start).after(steps))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration begin there. Raises ResumeError for another set or another kind of order."""
        if self._stream is not None:
            return self._stream.load_state_dict(state)
        start = self.start_of(state)
        self._put(self.feed.or_next(start) if start.cursor else start)
        self._loaded = True
        return None

    # --- for the iterations, and for ImageStream ------------------------------------------------------------------
    def start_of(self, state: Mapping[str, Any]) -> Start:
        """The position of a state, whose seed is used from now on. Raises ResumeError."""
        feed = self._feed.resumed(state)
        self._feed = feed.at(Start())
        return feed.start

    def begin(self, iteration: _Iteration[_Unit], restored: Start | None = None) -> Start:
        """Make `iteration` the one under way, and return where it begins: where a state says, if it is from one.

        Raises TrainerError.
        """
        trainer = find_trainer()
        self._check_sharing(trainer)
        if restored is None:
            start = self._choose_start(trainer)
        else:
            ended = trainer.at_end and trainer.epoch == restored.epoch + 1
            start = Start(restored.epoch + 1) if ended else restored
        self._check_batches(start, trainer)
        if restored is None:
            self._report()
        iteration.trainer, self._current, self._loaded = trainer, iteration, False
        self._next = Start(start.epoch + 1)
        return start

    def follow_stream(self, stream: ImageStream) -> None:
        """From now on the stream, whose workers walk through the epochs, says where this sampler is."""
        self._stream = stream

    # --- inside -------------------------------------------------------------------------------------------------
    def _ranks(self) -> tuple[int, int]:
        """As given, or as the launcher says now; in a spawned worker of a DataLoader, as it said where that started."""
        if not (self._unpickled and get_worker_info() is not None):
            self._last_ranks = self._feed.ranks
        return self._last_ranks

    def _check_sharing(self, trainer: Trainer) -> None:
        """Raise TrainerError where accelerate would deal out what it should not, or nothing deals it out."""
        trainer.check_sharing(self.world_size, self._to_accelerate)

    def _choose_start(self, trainer: Trainer) -> Start:
        """Where the next iteration begins: the trainer's epoch, and a state that the trainer has not loaded, count."""
        if trainer.epoch is not None and trainer.epoch != self._next.epoch:
            check_epoch(trainer.epoch, self._next.epoch if self._loaded else None, trainer.name)
            self._put(Start(trainer.epoch))
        start = self._next
        missed = trainer.missed_state(start.epoch, len(self.order)) if not start.cursor else None
        return start if missed is None else self.start_of(missed)

    def _report(self) -> None:
        if self._dataset is not None and self._current is not None and (report := self._dataset.report()):
            warnings.warn(f"epoch {self._current.start.epoch}: {report}", stacklevel=4)

    def _check_batches(self, start: Start, trainer: Trainer) -> None:
        left = trainer.batches_of(self.units_after(start))
        try:
            trainer.check_resume(left, trainer.batches_of(len(self)), self._stateful)
        except TrainerError as error:
            if not trainer.asks_ahead:
                raise
            self._refused = error  # Lightning hides what is raised here; it names the epoch before it takes a batch

    def _put(self, start: Start) -> None:
        self._next, self._current, self._loaded = start, None, False

    def __getstate__(self) -> dict[str, Any]:
        self._ranks()
        return {**self.__dict__, "_current": None, "_unpickled": True}


class _Iteration(Iterator[_Unit]):
    """One epoch, or the rest of one. It begins when it is first asked for something, or with a state.

    torchdata keeps the state of this iterator, and makes two of them for the state of an epoch that is over: one that
    has nothing left, and the next epoch.
    """

    def __init__(self, sampler: Epochs[_Unit]) -> None:
        self._sampler = sampler
        self._start: Start | None = None
        self._units: Iterator[_Unit] | None = None
        self._taken, self.finished = 0, False
        self.trainer = Trainer()

    @property
    def start(self) -> Start:
        return self._sampler._next if self._start is None else self._start

    @property
    def position(self) -> Start:
        """After what was handed out last."""
        return self._sampler.feed.at(self.start).after(self._taken // self._sampler.units_of_step)

    @property
    def left(self) -> int:
        return self._sampler.units_after(self.start) - self._taken

    def __next__(self) -> _Unit:
        if self._units is None:
            if self._start is None:
                self._start = self._sampler.begin(self)
            self._units = self._sampler._units_from(self._start)
        try:
            unit = next(self._units)
        except StopIteration:
            self.finished = True
            raise
        self._taken += 1
        return unit

    def state_dict(self) -> dict[str, Any]:
        """The position in this iteration, also at its end."""
        return self._sampler.feed.token(self.position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there, in that epoch only. Raises ResumeError."""
        self._start = self._sampler.begin(self, self._sampler.start_of(state))
