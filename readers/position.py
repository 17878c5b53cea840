"""Where training is in the epochs of a feed: the one position of loaders, samplers and streams.

    next      where the next loop begins: the epoch after that of the last loop, or what a state or `set_epoch` says
    begun     where the last loop began; None since `next` was set
    progress  what that loop has handed out, in the process that runs it

A loop begins with its first batch. It takes `next` with it, which then is the epoch after it, and ends its epoch
wherever it is left. What frameworks do with a position is checked here, by `readers.trainers`: who would lose or repeat
samples gets a TrainerError with the line to write.

`Place` keeps `next` and `begun`; that of `ImageStream` is in memory that the workers of a DataLoader share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cache.errors import TrainerError
from readers.feed import Feed, Start
from readers.order import Order
from readers.order.schedule import Tail
from readers.trainers import LIGHTNING, Trainer, calling_package, check_epoch, find_trainer

__all__ = ["Place", "Position", "Progress", "check_batches"]


class Place:
    """Where the next loop begins, and where the last one began."""

    def __init__(self, start: Start) -> None:
        self._next: Start = start
        self._begun: Start | None = None

    @property
    def next(self) -> Start:
        return self._next

    @property
    def begun(self) -> Start | None:
        return self._begun

    def put(self, start: Start) -> None:
        """Let the next loop begin there."""
        self._next, self._begun = start, None

    def begin(self, choose: Callable[[], Start], key: object = None) -> Start:
        """A loop begins where `choose` says; copies of it in other processes, with the same key, begin there, too."""
        start = choose()
        self._next, self._begun = Start(start.epoch + 1), start
        return start

    def renew(self) -> None:
        """A state was loaded, which copies in other processes know nothing of."""


@dataclass
class Progress:
    """What a loop has handed out: `taken` units, `per_step` of them in a step of `feed`, which begins where it does.

    trainer: who asked for it.
    finished: whether the loop has said that it is over.
    """

    feed: Feed
    trainer: Trainer = field(default_factory=Trainer)
    per_step: int = 1
    taken: int = 0
    finished: bool = False

    @property
    def position(self) -> Start:
        return self.feed.after(self.taken // self.per_step)


class Position:
    """A position in the epochs of a feed."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._place = Place(feed.start)
        self._loaded = False  # whether a state says where the next loop begins
        self._progress: Progress | None = None

    @property
    def feed(self) -> Feed:
        """For the rank that this process is now."""
        return self._feed

    @property
    def order(self) -> Order:
        """The order of whole epochs."""
        return self._feed.order

    @property
    def tail(self) -> Tail:
        return self._feed.options.tail

    @property
    def rank(self) -> int:
        return self.feed.ranks[0]

    @property
    def world_size(self) -> int:
        return self.feed.ranks[1]

    # --- where it is ----------------------------------------------------------------------------------------------
    @property
    def _start(self) -> Start:
        """Where the loop that was begun last began, or else the next one begins."""
        return self._place.begun or self._place.next

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        finished = self._progress is not None and self._progress.finished
        return (self._place.next if finished else self._start).epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next loop be of `epoch`: from the position of a loaded state, or else from its start.

        Raises TrainerError where a framework calls this and would lose the position of a state.
        """
        if epoch < 0:
            raise ValueError(f"an epoch is 0 or more, not {epoch}")
        start = self._start_in(epoch, find_trainer())
        if self._place.begun is not None or start != self._place.next:
            self._put(start)

    def state_dict(self) -> dict[str, Any]:
        """A small dictionary of plain values; the same on every rank, for any number of ranks."""
        return self._feed.token(self.feed.or_next(self._position))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next loop begin where `state` was taken, by this or another kind of loader.

        Raises ResumeError for a state of another set or another kind of order; warns where another decoder made it.
        """
        start = self._before_batch(self._start_of(state), find_trainer())
        self._put(self.feed.or_next(start) if start.cursor else start)
        self._loaded = True

    # --- inside ---------------------------------------------------------------------------------------------------
    @property
    def _position(self) -> Start:
        """After what was handed out last; after a whole loop, where the next one begins."""
        progress = self._progress
        return self._place.next if progress is None or progress.finished else progress.position

    def _put(self, start: Start) -> None:
        """Let the next loop begin there: the position is no longer that of a loop under way."""
        self._place.put(start)
        self._progress, self._loaded = None, False

    def _start_of(self, state: Mapping[str, Any]) -> Start:
        """The position of a state, whose seed is used from now on. Raises ResumeError."""
        feed = self._feed.resumed(state)
        self._feed = feed.at(Start())
        return feed.start

    def _start_in(self, epoch: int, trainer: Trainer, name: str = "") -> Start:
        """Where the next loop begins if it is to be of `epoch`, as the framework `name` says. Raises TrainerError."""
        there = self._place.next
        if epoch == there.epoch:
            return there
        if self._loaded and self._place.begun is None:
            if epoch + 1 == there.epoch and not there.cursor and calling_package() in LIGHTNING:
                return Start(epoch, len(self.order))  # it begins with an epoch that has no batch left, and then ends it
            if trainer.has_left(epoch, there.epoch, self._steps_before(there)):
                return Start(epoch)
            if trainer.counts_on(epoch, there.epoch, self._steps_before(there)):
                return there
            check_epoch(epoch, there.epoch, name)
        return Start(epoch)

    def _steps_before(self, start: Start) -> int:
        """How many batches of the epoch are done there, as counted by a trainer."""
        return self.feed.at(Start()).steps() - self.feed.at(start).steps()

    def _before_batch(self, start: Start, trainer: Trainer) -> Start:
        """`start`, or where the last batch before it began, which Lightning had under way when it saved the state.

        Raises TrainerError where the state is not that after the batch under way.
        """
        if not trainer.under_way:
            return start
        epoch = start.epoch if start.cursor else max(0, start.epoch - 1)  # the state after a last batch is of the next
        feed = self.feed.at(Start(epoch, 0, start.order))
        after = feed.after((trainer.batches + 1) * trainer.batch_size)
        if (after if start.cursor else feed.or_next(after))[:2] != start[:2]:
            raise TrainerError(
                f"Lightning saved this checkpoint inside the step of batch {trainer.batches} of epoch {epoch}, which "
                f"is to be trained on again, but with these batches the state is not that after it: resume with the "
                f"batch size and number of ranks of the checkpoint, or from another one"
            )
        return feed.after(trainer.batches * trainer.batch_size)


def check_batches(feed: Feed, whole: int = 1) -> None:
    """Raise ValueError for epochs without a batch: of `whole` steps, where a DataLoader leaves out smaller ones."""
    if feed.at(Start()).steps() >= whole:
        return
    samples, ranks, batch_size = len(feed.order), feed.ranks[1], feed.batch_size * whole
    if not samples:
        raise ValueError("there are no samples to load: the set, the selection or the order is empty")
    left_out = "tail='drop_last' leaves out smaller ones: give tail='exact'"
    if whole > 1:
        left_out = "drop_last=True leaves out smaller ones: leave it out"
    raise ValueError(
        f"an epoch of {samples} samples has no batch of {batch_size} on each of {ranks} ranks ({batch_size * ranks} "
        f"samples) and {left_out}, or a smaller batch_size"
    )
