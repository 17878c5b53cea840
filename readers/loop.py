"""Loops over a feed, whose batches are made ahead.

Loaders, samplers and streams each have one `Position`, which a loop advances with each batch:

    next      start of the next loop: the epoch after the last loop's, or as set by a state or `set_epoch`
    begun     start of the last loop; None since `next` was set
    progress  units returned by that loop, in the process that runs it

A loop begins with its first batch, at `next`, which then moves to the following epoch; leaving a loop early ends its
epoch. `readers.trainers` checks what frameworks do with a position: one that would lose or repeat samples gets a
TrainerError with the line to write.

`Place` keeps `next` and `begun`; that of `ImageStream` is in memory that the workers of a DataLoader share.

Ranks are detected when a loop begins, because a loader may be made before its ranks are started.

    Position      a position in the epochs of a feed                  the samplers of readers.torch
    FeedPosition  a position with the arguments of a loader           RocalSource
    FeedLoader    an iterable FeedPosition                            ImageLoader, DaliLoader
    Ahead         results made ahead by one thread                    the device stage of ImageLoader, RocalSource
"""

from __future__ import annotations

import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from cache.errors import TrainerError
from cache.locks import call_after_fork
from readers.feed import BadSample, Feed, OnError, Start, Steps, summarise
from readers.order import Order
from readers.order.schedule import Segment, Tail
from readers.reader import Reader
from readers.trainers import (
    LIGHTNING,
    Trainer,
    calling_package,
    check_epoch,
    check_skipping,
    find_trainer,
    keep_environment,
)

_T = TypeVar("_T")
_JOIN_SECONDS = 10.0
_WAKE_SECONDS = 1.0


class Place:
    """Start of the next loop, and of the last one."""

    def __init__(self, start: Start) -> None:
        self._next: Start = start
        self._begun: Start | None = None

    @property
    def next(self) -> Start:
        return self._next

    @property
    def begun(self) -> Start | None:
        return self._begun

    @property
    def first(self) -> int | None:
        """The first epoch that was begun, if loops begin in other processes; else None."""
        return None

    def put(self, start: Start) -> None:
        """Set the start of the next loop."""
        self._next, self._begun = start, None

    def begin(self, choose: Callable[[], Start], key: object = None) -> Start:
        """Begin a loop at `choose()`; in other processes, loops with the same key begin at the same position."""
        start = choose()
        self._next, self._begun = Start(start.epoch + 1), start
        return start

    def renew(self) -> None:
        """Note that a state was loaded, so that copies in other processes are stale."""


@dataclass
class Progress:
    """The progress of a loop: `taken` units, of which a step has `per_step`, since the start of `feed`.

    trainer: the framework that runs the loop.
    first: number of steps of the run before it; -1 if unknown.
    finished: whether the loop has raised StopIteration.
    """

    feed: Steps
    trainer: Trainer = field(default_factory=Trainer)
    per_step: int = 1
    first: int = -1
    taken: int = 0
    finished: bool = False

    @property
    def position(self) -> Start:
        return self.feed.after(self.taken // self.per_step)


class Position:
    """A position in the epochs of a feed."""

    def __init__(self, feed: Steps) -> None:
        self._feed = feed
        self._place = Place(feed.start)
        self._loaded = False  # whether the start of the next loop comes from a state
        self._progress: Progress | None = None
        # Steps of the run before the next loop, as for `Steps.joined`; and whether the last loop belonged to this run.
        self._done: int | None = None
        self._is_same_run = True
        self._miscounted, self._in_step, self._batches = 0, False, 0  # of the Trainer that set the epoch

    @property
    def feed(self) -> Steps:
        """The feed of this process's current rank."""
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
        """Start of the current or last loop; before the first, of the next one."""
        return self._place.begun or self._place.next

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        finished = self._progress is not None and self._progress.finished
        return (self._place.next if finished else self._start).epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next loop, which begins at the position of a loaded state, if any.

        Raises TrainerError if the calling framework would lose the position of a state.
        """
        if epoch < 0:
            raise ValueError(f"an epoch is at least 0, not {epoch}")
        trainer = find_trainer()
        start = self._start_in(epoch, trainer)
        self._keep(trainer)
        if self._place.begun is not None or start != self._place.next:
            self._put(start)

    def state_dict(self) -> dict[str, Any]:
        """A small dictionary of plain values; the same on every rank, for any number of ranks."""
        return self._feed.token(self.feed.or_next(self._position))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next loop at the position of a state, saved by this or another kind of loader.

        Raises ResumeError for a state of another set or another kind of order; warns if its decoder differs.
        """
        start = self._before_batch(self._start_of(state), find_trainer())
        self._put(self.feed.or_next(start) if start.cursor else start)
        self._loaded, self._done = True, self._feed.step_at(start)

    # --- inside ---------------------------------------------------------------------------------------------------
    @property
    def _position(self) -> Start:
        """The position after the last unit returned; after a whole loop, the start of the next one."""
        progress = self._progress
        return self._place.next if progress is None or progress.finished else progress.position

    def _put(self, start: Start) -> None:
        """Set the start of the next loop, and forget the progress of the current loop."""
        self._place.put(start)
        self._done = self._steps_done()
        self._progress, self._loaded = None, False

    def _steps_done(self) -> int | None:
        """Number of steps of the run so far, as for `Steps.joined`; counted if this process has run a loop."""
        progress = self._progress
        if progress is None or not (self._is_same_run and progress.feed.run):
            return self._done
        segment, feed = progress.feed.run[-1], progress.feed
        taken = progress.taken // progress.per_step
        if progress.finished or taken >= (feed.steps() if segment.partial is None else feed.batches()):
            batches = feed.batches_in(segment, feed.start.epoch)
            return None if progress.first < 0 else progress.first + batches
        if progress.trainer.asks_ahead or progress.first < 0:
            return -1 if taken or progress.first < 0 else progress.first
        return progress.first + taken // (1 if segment.partial is None else segment.batch_size)

    def _join(self, start: Start, batch_size: int = 0, partial: bool | None = None) -> tuple[tuple[Segment, ...], int]:
        """The record of the run with a loop that begins at `start`, and the number of steps before it."""
        feed = self.feed
        if feed.at(start).steps():
            if not feed.run and self._place.first is not None and self._place.first < start.epoch:
                feed = feed.joined(Start(self._place.first), None, batch_size, partial)
            feed = feed.joined(start, self._steps_done(), batch_size, partial)
            self._feed = replace(self._feed, run=feed.run)
            self._done, self._is_same_run = None, True
        step = feed.step_at(start)
        return feed.run, -1 if step is None else step

    def _start_of(self, state: Mapping[str, Any]) -> Start:
        """The position of a state, whose seed is used from now on. Raises ResumeError."""
        feed = self._feed.resumed(state)
        self._feed, self._done, self._is_same_run = feed.at(Start()), None, False
        return feed.start

    def _start_in(self, epoch: int, trainer: Trainer, name: str = "") -> Start:
        """Start of the next loop in `epoch`, which the framework `name` has set. Raises TrainerError."""
        start = self._place.next
        if epoch == start.epoch:
            return start
        if self._loaded and self._place.begun is None:
            if epoch + 1 == start.epoch and not start.cursor and calling_package() in LIGHTNING:
                return Start(epoch, len(self.order))  # Lightning begins the finished epoch again, to end it
            if trainer.has_left(epoch, start.epoch, self._steps_before(start)):
                return Start(epoch)
            if trainer.counts_on(epoch, start.epoch, self._steps_before(start)):
                return start
            check_epoch(epoch, start.epoch, name)
        return Start(epoch)

    def _keep(self, trainer: Trainer) -> None:
        """Keep what Lightning knows when it sets the epoch; it resets its counts before it takes the first batch."""
        self._miscounted, self._in_step, self._batches = trainer.miscounted, trainer.under_way, trainer.batches

    def _missed(self, start: Start, trainer: Trainer) -> Start:
        """`start`, or the position of a state that Lightning did not load. Raises ResumeError, TrainerError."""
        if self._in_step:
            trainer = replace(trainer, under_way=True, batches=self._batches)
        missed = trainer.missed_state(start.epoch, len(self.order))
        return start if missed is None else self._before_batch(self._start_of(missed), trainer)

    def _steps_before(self, start: Start) -> int:
        """Number of batches of the epoch before `start`, as a trainer counts them."""
        return self.feed.at(Start()).steps() - self.feed.at(start).steps()

    def _before_batch(self, start: Start, trainer: Trainer) -> Start:
        """`start`, or the start of the batch before it if Lightning saved the state during that batch's step.

        Raises TrainerError if the state is not the one after that batch.
        """
        if not trainer.under_way:
            return start
        # The state after the last batch of an epoch belongs to the next epoch.
        epoch = start.epoch if start.cursor else max(0, start.epoch - 1)
        feed = self.feed.at(Start(epoch, 0, start.order))
        after = feed.after((trainer.batches + 1) * trainer.batch_size)
        if (after if start.cursor else feed.or_next(after))[:2] != start[:2]:
            raise trainer.no_batch_before(epoch)
        return feed.after(trainer.batches * trainer.batch_size)


def check_batches(feed: Steps, whole: int = 1) -> None:
    """Raise ValueError if an epoch has no batch. whole: steps of a batch of a DataLoader with drop_last."""
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


class FeedPosition(Position):
    """A position, the arguments of its feed, and the bad samples of the current epoch."""

    _feed: Feed

    def __init__(self, feed: Feed) -> None:
        super().__init__(feed)
        self._bad: list[BadSample] = []

    @property
    def reader(self) -> Reader:
        return self._feed.reader

    @property
    def batch_size(self) -> int:
        return self._feed.batch_size

    @property
    def seed(self) -> int:
        return self._feed.seed

    @property
    def on_error(self) -> OnError:
        return self._feed.options.on_error

    @property
    def left(self) -> int:
        """Number of batches left on this rank in the current loop, or else in the next one."""
        return self._feed.at(self._position).steps()

    @property
    def bad_samples(self) -> tuple[BadSample, ...]:
        """The samples skipped or replaced in the current or, between loops, the last epoch, on this rank."""
        return tuple(sorted(self._bad, key=lambda sample: sample.position))

    def _warn(self, stacklevel: int) -> None:
        """Warn of the bad samples of the epoch; stacklevel: as if the caller called `warnings.warn`."""
        if summary := summarise(self.bad_samples, self.epoch, self.on_error):
            warnings.warn(summary, stacklevel=stacklevel + 1)


class Maker(Protocol):
    """Makes the batches of one loop, in order."""

    def take(self) -> Any:
        """The next batch. Raises the error of making it."""

    def stop(self) -> None:
        """Stop making batches."""


class FeedLoader(FeedPosition, ABC):
    """The base of loaders: each `for` loop is one epoch."""

    def __init__(self, feed: Feed) -> None:
        super().__init__(feed)
        self._running: weakref.ref[_Loop] | None = None
        check_batches(feed)

    @property
    def sampler(self) -> Any:
        """The object whose `set_epoch` trainers call."""
        return self

    @property
    def dataset(self) -> Reader:
        """The reader, under the name that trainers look for."""
        return self.reader

    @property
    def batch_sampler(self) -> None:
        """None: for trainers that look for one. Raises TrainerError in accelerate's skip_first_batches."""
        check_skipping()

    def __len__(self) -> int:
        """Number of batches of a whole epoch on this rank, also while an epoch is resumed; see `left`."""
        return self._feed.at(Start()).steps()

    def state_dict(self) -> dict[str, Any]:
        """A small dictionary of plain values; the same on every rank, for any number of ranks."""
        progress, counted = self._progress, find_trainer().counted
        if progress is not None and progress.taken and progress.trainer.batches + progress.taken - 1 == counted:
            return self._feed.token(
                progress.feed.after(progress.taken - 1)
            )  # Lightning has not used the last batch yet
        return super().state_dict()

    @property
    def ready(self) -> int:
        """Number of batches that wait for training at this moment; 0 between loops, and if unknown."""
        loop = self._running() if self._running else None
        return 0 if loop is None else loop.ready

    def __iter__(self) -> Iterator[Any]:
        return _Loop(self)

    @abstractmethod
    def _open(self, feed: Feed) -> Maker:
        """Begin to make the batches from `feed.start` to the end of its epoch."""

    @abstractmethod
    def _finish(self, made: Any) -> tuple[Any, Sequence[BadSample]]:
        """The batch that a loop returns, from the result of the maker, and the bad samples in it."""

    def _end_epoch(self, maker: Maker) -> None:
        """Called when all batches of an epoch were taken."""
        maker.stop()

    def _begin(self, loop: _Loop) -> Progress:
        """Make `loop` the current loop. Raises TrainerError."""
        if self._place.begun is not None:
            self._interrupt("another loop over this loader has begun")
        check_batches(self._feed)
        keep_environment()
        trainer, start = find_trainer(), self._place.next
        start = start if start.cursor else self._missed(start, trainer)
        if trainer.has_done(len(self), self._miscounted):
            start = Start(start.epoch, len(self.order))
        feed = self._feed.at(start).ranked()
        trainer.check_resume(feed.steps(), len(self))
        run, first = self._join(start)
        self._place.begin(lambda: start)
        self._progress = Progress(replace(feed, run=run), trainer, first=first)
        self._running, self._bad = weakref.ref(loop), []
        return self._progress

    def _put(self, start: Start) -> None:
        self._interrupt("the position of this loader was set")
        super()._put(start)

    def _interrupt(self, reason: str) -> None:
        """End the current loop."""
        running = self._running() if self._running else None
        if running is not None:
            running.interrupt(reason)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_running": None}  # a copy gets the position, not the loop


class _Loop(Iterator[Any]):
    """One pass through the rest of an epoch. It begins with its first batch, so an unused iterator consumes no epoch.

    Closed at its end, on any exception, and when dropped.
    """

    def __init__(self, loader: FeedLoader) -> None:
        self._loader = loader
        self._progress: Progress | None = None
        self._maker: Maker | None = None
        self._reason = ""  # why the loop was ended with batches left

    def __next__(self) -> Any:
        loader, progress = self._loader, self._progress or self._begin()
        if self._reason:
            raise TrainerError(
                f"{self._reason}, which ended this loop: a loader has one position; for two loops at once, or for "
                f"training and validation, make two loaders:  {type(loader).__name__}(reader, …)"
            )
        if self._maker is None:
            raise StopIteration
        if progress.taken == self._steps:
            maker, self._maker = self._maker, None
            self._finalizer.detach()
            progress.finished = True
            loader._end_epoch(maker)
            raise StopIteration
        try:
            result, bad = loader._finish(self._maker.take())
        except BaseException:
            self.close()
            raise
        loader._bad.extend(bad)
        progress.taken += 1
        if progress.taken == self._steps:
            loader._warn(stacklevel=2)  # with the last batch: trainers that count batches stop there
        return result

    @property
    def ready(self) -> int:
        return int(getattr(self._maker, "ready", 0))

    def close(self) -> None:
        """Stop making batches."""
        if self._maker is not None:
            self._maker = None
            self._finalizer()

    def interrupt(self, reason: str) -> None:
        """Close the loop; if batches are left, its next use raises TrainerError with this reason."""
        if self._maker is not None and self._progress is not None and self._progress.taken < self._steps:
            self._reason = reason
        self.close()

    def _begin(self) -> Progress:
        progress = self._progress = self._loader._begin(self)
        self._steps = progress.feed.steps()
        feed = progress.feed
        assert isinstance(feed, Feed)
        self._maker = self._loader._open(feed)
        self._finalizer = weakref.finalize(self, self._maker.stop)
        return progress


# --- batches made ahead -----------------------------------------------------------------------------------------
class Stopped(RuntimeError):
    """The maker was stopped while a consumer waited for a batch."""


def ended_by_fork() -> TrainerError:
    return TrainerError(
        "this loop began before the process was forked, and its threads are the parent's; begin a new one in the "
        "child:  for batch in loader"
    )


class Ahead(Generic[_T]):
    """The results of `make(0)` to `make(steps - 1)`, in order; at most `depth` results are made and not yet taken.

    One lock guards all state. The thread is a daemon, holds no reference to the consumer, and ends after the last step.
    """

    def __init__(self, make: Callable[[int], _T], steps: int, depth: int, name: str) -> None:
        self._make, self._steps, self._depth = make, steps, depth
        self._changed = threading.Condition()
        self._made: deque[_T] = deque()
        self._error: BaseException | None = None
        self._stopped = False
        call_after_fork(self)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def ready(self) -> int:
        """Number of results that are made and not yet taken, at this moment."""
        return len(self._made)

    def take(self) -> _T:
        """The next result. Raises the error of making it, after the results before it, and Stopped after `stop`."""
        with self._changed:
            while not self._made:
                if self._error is not None:
                    raise self._error
                if self._stopped or not self._thread.is_alive():
                    raise Stopped("there is no further batch: the reading thread has ended")
                self._changed.wait(_WAKE_SECONDS)
            taken = self._made.popleft()
            self._changed.notify_all()
        return taken

    def stop(self) -> None:
        """End the thread, after the step that it is at.

        Its error is dropped: the traceback would keep the caller's frames, and all that they refer to, alive until the
        next garbage collection, and DataLoader workers that end in this state take 5 s each.
        """
        with self._changed:
            self._stopped, self._error = True, None
            self._made.clear()
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    def after_fork(self) -> None:
        """Mark the loop as the parent's, in a forked child, which does not have the thread."""
        self._changed, self._error = threading.Condition(), ended_by_fork()
        self._made.clear()

    def _run(self) -> None:
        for step in range(self._steps):
            with self._changed:
                while len(self._made) >= self._depth and not self._stopped:
                    self._changed.wait()
                if self._stopped:
                    return
            try:
                made = self._make(step)
            except BaseException as error:
                with self._changed:
                    self._error = None if self._stopped else error
                    self._changed.notify_all()
                return
            with self._changed:
                if not self._stopped:
                    self._made.append(made)
                self._changed.notify_all()
