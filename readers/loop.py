"""Loops over a feed: where training is, what a state saves of it, and batches that are made ahead.

A loader has one position, between two batches. A loop begins with its first batch and advances the position with each;
a loop that is left early ends its epoch. Ranks are found when a loop begins, since a loader may be made before its
ranks are started. What frameworks do with a loader is checked here, by `readers.trainers`.

    Position     what sets, saves and restores it                     RocalSource
    FeedLoader   a position that is iterated over                     ImageLoader, DaliLoader
    Ahead        results made ahead by one thread                     the device stage of ImageLoader, RocalSource
"""

from __future__ import annotations

import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from cache.errors import TrainerError
from cache.locks import call_after_fork
from readers.feed import BadSample, Feed, OnError, Start, summarise
from readers.order import Order
from readers.order.schedule import Tail
from readers.reader import Reader
from readers.trainers import (
    RESUMES_AT_END,
    calling_package,
    check_epoch,
    check_skipping,
    find_trainer,
    keep_environment,
)

__all__ = ["Ahead", "FeedLoader", "Maker", "Position", "Stopped", "ended_by_fork"]

_T = TypeVar("_T")
_JOIN_SECONDS = 10.0
_WAKE_SECONDS = 1.0


class Position:
    """A position in the epochs of a feed, and the bad samples of the epoch under way."""

    def __init__(self, feed: Feed) -> None:
        self._feed, self._position = feed, feed.start
        self._begun = self._loaded = False  # whether a loop has begun there, and whether a state was loaded
        self._bad: list[BadSample] = []

    # --- the arguments --------------------------------------------------------------------------------------------
    @property
    def reader(self) -> Reader:
        return self._feed.reader

    @property
    def batch_size(self) -> int:
        return self._feed.batch_size

    @property
    def order(self) -> Order:
        """The order of whole epochs."""
        return self._feed.order

    @property
    def seed(self) -> int:
        return self._feed.seed

    @property
    def tail(self) -> Tail:
        return self._feed.options.tail

    @property
    def on_error(self) -> OnError:
        return self._feed.options.on_error

    @property
    def rank(self) -> int:
        return self._feed.ranks[0]

    @property
    def world_size(self) -> int:
        return self._feed.ranks[1]

    # --- where it is ----------------------------------------------------------------------------------------------
    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self._position.epoch

    @property
    def left(self) -> int:
        """Batches of the loop under way, or else of the next one, that have not been handed out on this rank."""
        return self._feed.at(self._position).steps()

    @property
    def bad_samples(self) -> tuple[BadSample, ...]:
        """The samples skipped or replaced in the current or, between loops, the last epoch, on this rank."""
        return tuple(sorted(self._bad, key=lambda sample: sample.position))

    def set_epoch(self, epoch: int) -> None:
        """Let the next loop be of `epoch`: from the position of a loaded state, or else from its start.

        Raises TrainerError where a framework calls this and would lose the position of a state.
        """
        if epoch < 0:
            raise ValueError(f"an epoch is 0 or more, not {epoch}")
        ended = epoch + 1 == self.epoch and not self._position.cursor  # Lightning names it once more after a validation
        if self._loaded and ended and calling_package() in RESUMES_AT_END:
            return self._seek(Start(epoch, len(self.order)))
        if self._loaded and epoch == self.epoch:
            return None
        if self._loaded and epoch == self.epoch + 1:
            done = self._feed.at(Start()).steps() - self.left
            if find_trainer().has_ended_after(done):
                return self._seek(Start(epoch))
        check_epoch(epoch, self.epoch if self._loaded else None)
        return self._seek(Start(epoch))

    def state_dict(self) -> dict[str, Any]:
        """A small dictionary of plain values; the same on every rank, for any number of ranks."""
        return self._feed.token(self._feed.or_next(self._position))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next loop begin where `state` was taken, by this or another kind of loader.

        Raises ResumeError for a state of another set or another kind of order; warns where another decoder made it.
        """
        self._feed = self._feed.resumed(state)
        start = self._feed.start
        self._seek(self._feed.or_next(start) if start.cursor else start)
        self._loaded = True

    # --- inside ---------------------------------------------------------------------------------------------------
    def _seek(self, start: Start) -> None:
        """Let the next loop begin there; a loop under way ends."""
        self._interrupt()
        self._position, self._begun, self._loaded = start, False, False

    def _interrupt(self) -> None:
        """End the loop under way."""

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


class FeedLoader(Position, ABC):
    """Each `for` loop is one epoch."""

    def __init__(self, feed: Feed) -> None:
        super().__init__(feed)
        self._running: weakref.ref[_Loop] | None = None
        self._check_batches()

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

    @property
    def ready(self) -> int:
        """Batches that wait for the training, as seen at this moment: 0 between two loops, and if that is not known."""
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

    def _begin(self, loop: _Loop) -> None:
        """Make `loop` the loop under way. Raises TrainerError."""
        running = self._running() if self._running else None
        if self._begun:
            if running is not None:
                running.overtake()
            self._seek(Start(self.epoch + 1))
        self._check_batches()
        keep_environment()
        trainer = find_trainer()
        missed = None if self._position.cursor else trainer.missed_state(self.epoch, len(self.order))
        if missed is not None:
            self._feed = self._feed.resumed(missed)
            self._seek(self._feed.start)
        trainer.check_resume(self.left, len(self))
        self._begun, self._loaded, self._running, self._bad = True, False, weakref.ref(loop), []

    def _interrupt(self) -> None:
        running = self._running() if self._running else None
        if running is not None:
            running.close()

    def _check_batches(self) -> None:
        """Raise ValueError for an epoch without a batch."""
        if len(self):
            return
        if not len(self.order):
            raise ValueError("there are no samples to load: the set, the selection or the order is empty")
        whole, ranks = self.batch_size * self.world_size, self.world_size
        raise ValueError(
            f"an epoch of {len(self.order)} samples has no batch of {self.batch_size} on each of {ranks} ranks "
            f"({whole} samples) and tail='drop_last' leaves out smaller ones: give tail='exact', or a smaller "
            f"batch_size"
        )


class _Loop(Iterator[Any]):
    """One run through the rest of an epoch. It begins with its first batch: an unused iterator takes no epoch.

    Closed at its end, on any exception, and when dropped.
    """

    def __init__(self, loader: FeedLoader) -> None:
        self._loader = loader
        self._maker: Maker | None = None
        self._begun = self._overtaken = False

    def __next__(self) -> Any:
        loader = self._loader
        if not self._begun:
            self._begin()
        if self._overtaken:
            kind = type(loader).__name__
            raise TrainerError(
                f"another loop over this loader has begun, which ended this one: a loader has one position; "
                f"for two loops at once make two loaders:  {kind}(reader, …)"
            )
        if self._maker is None:
            raise StopIteration
        if self._step == self._steps:
            maker, self._maker = self._maker, None
            self._finalizer.detach()
            loader._end_epoch(maker)
            loader._seek(Start(loader.epoch + 1))
            raise StopIteration
        try:
            result, bad = loader._finish(self._maker.take())
        except BaseException:
            self.close()
            raise
        loader._bad.extend(bad)
        self._step += 1
        loader._position = self._feed.after(self._step)
        if self._step == self._steps:
            loader._warn(stacklevel=2)  # with the last batch: trainers that count batches stop there
        return result

    @property
    def ready(self) -> int:
        return int(getattr(self._maker, "ready", 0))

    def close(self) -> None:
        """End the work on further batches; there will be no more."""
        self._begun = True
        if self._maker is not None:
            self._maker = None
            self._finalizer()

    def overtake(self) -> None:
        """Another loop begins: this one, if there are batches left in it, cannot continue."""
        self._overtaken = self._maker is not None and self._step < self._steps
        self.close()

    def _begin(self) -> None:
        loader = self._loader
        loader._begin(self)
        self._begun = True
        self._feed = loader._feed.at(loader._position).ranked()
        self._steps, self._step = self._feed.steps(), 0
        self._maker = loader._open(self._feed)
        self._finalizer = weakref.finalize(self, self._maker.stop)


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
