"""The threads of a loader: they take rows of batches in order, and the consumer gets whole batches in order.

Their work is defined in `readers.loader.work`. One lock of the crew guards all its state. The crew holds no reference
to the loader or its iterator, so dropping those stops it. Threads are daemons: the interpreter does not wait for them
at exit.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from cache.locks import call_after_fork
from readers.augment.cpu import Renderer
from readers.loader.stats import LoopTimers, ThreadClock
from readers.loader.work import Batch, EpochWork
from readers.loop import Stopped, ended_by_fork

_JOIN_SECONDS = 10.0


class Crew:
    """`threads` threads that make the batches of an epoch; at most `ahead` batches are begun and not yet taken.

    fill: called under the lock with whether all batches that may be begun are done; None if not needed.
    stays: whether the threads wait for `redo` after the last batch, until `stop`.
    """

    def __init__(
        self,
        work: EpochWork,
        threads: int,
        ahead: int,
        rows_at_once: int,
        timers: LoopTimers,
        fill: Callable[[bool], None] | None,
        stays: bool = False,
    ) -> None:
        self._work, self._steps, self._ahead, self._rows = work, work.steps, ahead, rows_at_once
        self._timers, self._report_full, self._stays = timers, fill, stays
        self._changed = threading.Condition()
        self._queue: deque[tuple[Batch, int, int]] = deque()
        self._done: dict[int, Batch] = {}
        self._next_step = self._taken = 0
        self._planning = self._stopped = False
        self._failure: BaseException | None = None
        names = (f"packer-loader-{number}" for number in range(threads))
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for name in names]
        self._ready = threading.Barrier(threads + 1)
        call_after_fork(self)
        self._start()

    @property
    def ready(self) -> int:
        """Number of batches that can be taken without waiting, at this moment."""
        return len(self._done) if self._taken in self._done else 0

    def take(self) -> Batch:
        """The next batch; blocks until it is complete. Raises the error of its planning, and Stopped after `stop`."""
        with self._changed:
            while self._taken not in self._done:
                if self._failure is not None:
                    raise self._failure
                if self._stopped:
                    raise Stopped("the threads of this loop were stopped")
                self._changed.wait()
            batch = self._done.pop(self._taken)
            self._taken += 1
            self._note_fill()
            self._changed.notify_all()
        return batch

    def redo(self, batch: Batch, rows: Sequence[int]) -> None:
        """Fill some rows of a batch that was taken again, before all other work; blocks until they are filled."""
        with self._changed:
            batch.pending = len(rows)
            self._queue.extendleft((batch, row, row + 1) for row in reversed(rows))
            self._changed.notify_all()
            while self._done.pop(batch.step, None) is None:
                if self._failure is not None:
                    raise self._failure
                if self._stopped:
                    raise Stopped("the threads of this loop were stopped")
                self._changed.wait()

    def stop(self) -> None:
        """End the threads; those in the middle of a row finish it first."""
        with self._changed:
            self._stopped, self._failure = True, None  # the error's traceback refers to the caller's frames
            self._queue.clear()
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(_JOIN_SECONDS)

    def after_fork(self) -> None:
        """Mark the loop as the parent's, in a forked child, which has none of the threads."""
        self._changed, self._threads = threading.Condition(), []
        self._queue.clear()
        self._done.clear()
        self._failure = ended_by_fork()

    def _start(self) -> None:
        """Start the threads, each with torch operations on one core, because the crew itself is the parallelism.

        `torch.set_num_threads` sets the number for the calling thread and the default for new threads; so each thread
        sets its own, and then the default is restored.
        """
        default = torch.get_num_threads()
        for thread in self._threads:
            thread.start()
        self._ready.wait()
        torch.set_num_threads(default)

    def _run(self) -> None:
        torch.get_num_threads()  # makes this thread take the default now; otherwise it would at its first operation
        torch.set_num_threads(1)
        self._ready.wait()
        tools = self._work.tools()
        clock = self._timers.crew_clock(threading.current_thread().name)
        while True:
            start = time.perf_counter_ns()
            task = self._next()
            clock.wait(start)
            if task is None:
                return
            if isinstance(task, int):
                self._plan(task, clock)
            else:
                self._fill(task, tools, clock)

    def _next(self) -> int | tuple[Batch, int, int] | None:
        """A batch to plan (its number), rows to fill, or None at the end."""
        with self._changed:
            while not self._stopped and self._failure is None:
                may_plan = (
                    not self._planning
                    and self._next_step < self._steps
                    and self._next_step < self._taken + self._ahead
                    and len(self._queue) < len(self._threads)
                )
                if may_plan:
                    self._planning = True
                    self._next_step += 1
                    return self._next_step - 1
                if self._queue:
                    return self._queue.popleft()
                if self._next_step >= self._steps and not self._planning and not self._stays:
                    return None
                self._changed.wait()
        return None

    def _plan(self, step: int, clock: ThreadClock) -> None:
        clock.start()
        try:
            batch = self._work.plan(step, clock)
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            return
        count, rows = len(batch.indices), self._rows
        tasks = [(batch, start, min(start + rows, count)) for start in range(0, count, rows)]
        batch.pending = len(tasks)
        clock.stop("plan", batch=step)
        with self._changed:
            self._planning = False
            self._queue.extend(tasks)
            if not tasks:
                self._done[step] = batch
                self._note_fill()
            self._changed.notify_all()

    def _fill(self, task: tuple[Batch, int, int], tools: Renderer, clock: ThreadClock) -> None:
        batch, start, stop = task
        error: BaseException | None = None
        tools.lap = clock.start_rows()
        try:
            self._work.fill(batch, start, stop, tools)
        except BaseException as caught:
            error = caught
        clock.stop_rows(0 if start in batch.refused else stop - start, batch=batch.step, row=start)
        with self._changed:
            batch.pending -= 1
            # Of several errors in a batch, the first row's is raised, regardless of the order of the threads.
            if error is not None and (batch.error is None or start < batch.error_row):
                batch.error, batch.error_row = error, start
            if batch.pending:
                return
        clock.start()
        try:
            self._work.complete(batch)
        except BaseException as caught:
            batch.error = batch.error or caught
        clock.stop("collate", batch=batch.step)
        with self._changed:
            self._done[batch.step] = batch
            self._note_fill()
            self._changed.notify_all()

    def _note_fill(self) -> None:
        """Report, under the lock, whether there is nothing to do until a batch is taken."""
        if self._report_full is not None:
            begun = self._next_step - self._taken
            last = self._next_step >= self._steps or begun >= self._ahead
            self._report_full(last and 0 < begun == len(self._done))
