"""Loops over a feed, whose batches are made ahead.

A loader has one position (`readers.position`), which a loop advances with each batch. Ranks are found when a loop
begins, since a loader may be made before its ranks are started.

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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from cache.errors import TrainerError
from cache.locks import call_after_fork
from readers.feed import BadSample, Feed, OnError, Start, summarise
from readers.position import Position, Progress, check_batches
from readers.reader import Reader
from readers.trainers import check_skipping, find_trainer, keep_environment

__all__ = ["Ahead", "FeedLoader", "FeedPosition", "Maker", "Stopped", "ended_by_fork"]

_T = TypeVar("_T")
_JOIN_SECONDS = 10.0
_WAKE_SECONDS = 1.0


class FeedPosition(Position):
    """A position, the arguments of its feed, and the bad samples of the epoch under way."""

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
        self._place.begin(lambda: start)
        self._progress, self._running, self._bad = Progress(feed, trainer), weakref.ref(loop), []
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
        self._maker = self._loader._open(progress.feed)
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
