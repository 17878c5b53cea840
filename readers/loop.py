"""Loops over a feed, whose batches are made ahead.

Loaders, samplers and streams have one `Position`, which a loop advances with each batch:

    next      where the next loop begins: the epoch after that of the last loop, or what a state or `set_epoch` says
    begun     where the last loop began; None since `next` was set
    progress  what that loop has handed out, in the process that runs it

A loop begins with its first batch. It takes `next` with it, which then is the epoch after it, and ends its epoch
wherever it is left. What frameworks do with a position is checked here, by `readers.trainers`: who would lose or repeat
samples gets a TrainerError with the line to write.

`Place` keeps `next` and `begun`; that of `ImageStream` is in memory that the workers of a DataLoader share.

Ranks are found when a loop begins, since a loader may be made before its ranks are started.

    Position      where training is in the epochs of a feed           the samplers of readers.torch
    FeedPosition  a position with the arguments of a loader           RocalSource
    FeedLoader    one that is iterated over                           ImageLoader, DaliLoader
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

    @property
    def first(self) -> int | None:
        """The epoch that was begun first, where loops begin in other processes; None otherwise."""
        return None

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
    first: steps of the run before it; -1 where that is not known.
    finished: whether the loop has said that it is over.
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
        self._loaded = False  # whether a state says where the next loop begins
        self._progress: Progress | None = None
        # Steps of the run before the next loop, as for `Steps.joined`; and whether the last loop was of this run.
        self._done: int | None = None
        self._is_same_run = True

    @property
    def feed(self) -> Steps:
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
        self._loaded, self._done = True, self._feed.step_at(start)

    # --- inside ---------------------------------------------------------------------------------------------------
    @property
    def _position(self) -> Start:
        """After what was handed out last; after a whole loop, where the next one begins."""
        progress = self._progress
        return self._place.next if progress is None or progress.finished else progress.position

    def _put(self, start: Start) -> None:
        """Let the next loop begin there: the position is no longer that of a loop under way."""
        self._place.put(start)
        self._done = self._steps_done()
        self._progress, self._loaded = None, False

    def _steps_done(self) -> int | None:
        """Steps of the run so far, as for `Steps.joined`: counted where this process has had a loop."""
        progress = self._progress
        if progress is None or not (self._is_same_run and progress.feed.run):
            return self._done
        segment, feed = progress.feed.run[-1], progress.feed
        taken = progress.taken // progress.per_step
        if progress.finished or taken >= feed.steps():
            batches = feed.batches_in(segment, feed.start.epoch)
            return None if progress.first < 0 else progress.first + batches
        if progress.trainer.asks_ahead or progress.first < 0:
            return -1 if taken or progress.first < 0 else progress.first
        return progress.first + taken // (1 if segment.partial is None else segment.batch_size)

    def _join(self, start: Start, batch_size: int = 0, partial: bool | None = None) -> tuple[tuple[Segment, ...], int]:
        """The record of the run with a loop that begins there, and the steps before that."""
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


def check_batches(feed: Steps, whole: int = 1) -> None:
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


class FeedPosition(Position):
    """A position, the arguments of its feed, and the bad samples of the epoch under way."""

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
        """Batches of the loop under way, or else of the next one, that have not been handed out on this rank."""
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
        """The next batch; raises what making it raised."""

    def stop(self) -> None:
        """End the work on further batches; there will be no more."""


class FeedLoader(FeedPosition, ABC):
    """Each `for` loop is one epoch."""

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
        """The reader, under the name by which trainers ask a loader for its samples."""
        return self.reader

    @property
    def batch_sampler(self) -> None:
        """None: for trainers that look for one. Raises TrainerError in accelerate's skip_first_batches."""
        check_skipping()

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank, also in an epoch that was resumed; see `left`."""
        return self._feed.at(Start()).steps()

    def state_dict(self) -> dict[str, Any]:
        """A small dictionary of plain values; the same on every rank, for any number of ranks."""
        progress, counted = self._progress, find_trainer().counted
        if progress is not None and progress.taken and progress.trainer.batches + progress.taken - 1 == counted:
            return self._feed.token(progress.feed.after(progress.taken - 1))  # Lightning has yet to see the last batch
        return super().state_dict()

    @property
    def ready(self) -> int:
        """Batches that wait for training, as seen at this moment: 0 between two loops, and if that is not known."""
        loop = self._running() if self._running else None
        return 0 if loop is None else loop.ready

    def __iter__(self) -> Iterator[Any]:
        return _Loop(self)

    @abstractmethod
    def _open(self, feed: Feed) -> Maker:
        """Begin to make the batches from `feed.start` to the end of its epoch."""

    @abstractmethod
    def _finish(self, made: Any) -> tuple[Any, Sequence[BadSample]]:
        """The batch that a loop hands out, from the result of the maker, and the bad samples in it."""

    def _end_epoch(self, maker: Maker) -> None:
        """All batches of an epoch were taken."""
        maker.stop()

    def _begin(self, loop: _Loop) -> Progress:
        """Make `loop` the loop under way. Raises TrainerError."""
        if self._place.begun is not None:
            self._interrupt("another loop over this loader has begun")
        check_batches(self._feed)
        keep_environment()
        trainer, start = find_trainer(), self._place.next
        missed = None if start.cursor else trainer.missed_state(start.epoch, len(self.order))
        if missed is not None:
            start = self._start_of(missed)
        if trainer.has_done(len(self)):
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
        """End the loop under way."""
        running = self._running() if self._running else None
        if running is not None:
            running.interrupt(reason)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_running": None}  # a copy has no loop, only its position


class _Loop(Iterator[Any]):
    """One run through the rest of an epoch. It begins with its first batch: an unused iterator takes no epoch.

    Closed at its end, on any exception, and when dropped.
    """

    def __init__(self, loader: FeedLoader) -> None:
        self._loader = loader
        self._progress: Progress | None = None
        self._maker: Maker | None = None
        self._reason = ""  # why it has ended though batches were left

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
        """End the work on further batches; there will be no more."""
        if self._maker is not None:
            self._maker = None
            self._finalizer()

    def interrupt(self, reason: str) -> None:
        """Close it, which is an error for who goes on with it while batches are left."""
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
    """There will be no more batches: their maker was stopped while a consumer waited for one."""


def ended_by_fork() -> TrainerError:
    return TrainerError(
        "this loop began before the process was forked, and its threads are the parent's; begin a new one in the "
        "child:  for batch in loader"
    )


class Ahead(Generic[_T]):
    """`make(0)` to `make(steps - 1)`, in order, at most `depth` of them made and not yet taken.

    One lock guards everything. The thread is a daemon, holds no reference to the consumer, and ends after the last one.
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
        """Those that are made and not yet taken, as seen at this moment."""
        return len(self._made)

    def take(self) -> _T:
        """The next one. Raises what making it raised, once those before it are taken, and Stopped after `stop`."""
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
        """End the thread; one in the middle of a batch finishes it first.

        Its error is dropped: the traceback has the frames of the caller, which would stay, with all that they refer to,
        until garbage is collected. Workers of a DataLoader that end like that take 5 s each.
        """
        with self._changed:
            self._stopped, self._error = True, None
            self._made.clear()
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    def after_fork(self) -> None:
        """In a forked child, which has no such thread."""
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
