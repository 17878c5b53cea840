"""Local worker processes, with the counters of all shards in shared memory; and tasks on other nodes by an engine.

Workers ignore Ctrl-C (the parent stops them through the counters) and die with their parent. They are forked if that
is safe, which starts them at once, and spawned in programs that already run threads.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import logging
import mmap
import multiprocessing
import os
import pickle
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    as_completed,
    wait,
)
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ParamSpec, TypeAlias, TypeVar

from cache.errors import PackerError, SourceError, WorkerError
from cache.files import Folder, read_regular
from cache.messages import Counter, Watcher, plural
from cache.node import usable_cpus
from packer import __version__

__all__ = [
    "Counters",
    "InlineExecutor",
    "TaskCounter",
    "Workers",
    "open_processes",
    "run_shards",
    "run_task",
    "without_gc",
]

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
_PR_SET_PDEATHSIG = 1
_MOST_ON_WINDOWS = 61  # limit of a ProcessPoolExecutor on Windows
_ALLOCATIONS = 100_000

_counters: Any = None


class Counters:
    """Progress of all shards in memory shared with the workers: three numbers per shard, and a stop flag."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def totals(self) -> tuple[int, int, int]:
        """(samples, source bytes, samples left out) so far in this run."""
        values = self.array[1:]
        return sum(values[0::3]), sum(values[1::3]), sum(values[2::3])

    def stop(self) -> None:
        self.array[0] = 1


class _ShardCounter:
    def __init__(self, array: Any, shard: int) -> None:
        self._array, self._first = array, 1 + 3 * shard

    def report(self, samples: int, payload_bytes: int, left_out: int = 0) -> None:
        self._array[self._first] += samples
        self._array[self._first + 1] += payload_bytes
        self._array[self._first + 2] += left_out

    def stopped(self) -> bool:
        return bool(self._array[0])


class InlineExecutor(Executor):
    """Runs each task immediately in this process: for a single worker, and for debugging."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        return future


def open_processes(
    workers: int, shards: int, note: Callable[[str], None], *, inline: bool = True
) -> tuple[Executor, Counters]:
    """An executor with `workers` processes, and the counters of its tasks. inline: a single worker is this process.

    Processes share locks and counters in /dev/shm; if that is missing, this process does the work, and `note` is
    called.
    """
    numbers = 3 * shards + 1
    workers = min(workers, _MOST_ON_WINDOWS) if sys.platform == "win32" else workers
    if workers > 1 or not inline:
        safe = sys.platform == "linux" and threading.active_count() == 1
        context: Any = multiprocessing.get_context("fork" if safe else "spawn")
        try:
            if safe:  # inherited memory; multiprocessing's briefly needs a file, which a kill would leave behind
                array: Any = (ctypes.c_uint64 * numbers).from_buffer(mmap.mmap(-1, 8 * numbers))
            else:
                array = context.RawArray(ctypes.c_uint64, numbers)
            pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(array, os.getpid()))
            return pool, Counters(array)
        except (OSError, ImportError) as error:  # ImportError: a system without semaphores
            note(
                f"worker processes need a writable /dev/shm ({error}), so this process does all the work; mount "
                f"a tmpfs there, or pass workers=1 to confirm this"
            )
    counters = Counters((ctypes.c_uint64 * numbers)())
    _share(counters.array)
    return InlineExecutor(), counters


def run_task(work: Callable[[T, Counter], R], task: T, number: int) -> R:
    """In a worker: run a task with the counter of its shard."""
    return work(task, _ShardCounter(_counters, number))


def _share(array: Any) -> None:
    global _counters
    _counters = array


def _start(array: Any, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # the parent died before the line above could take effect
    _collect_rarely()
    _share(array)


def _collect_rarely() -> None:
    """In a worker: ignore objects inherited by the fork, whose pages a collection would copy, and collect rarely."""
    gc.freeze()
    gc.set_threshold(_ALLOCATIONS, 50, 50)


# Run shard tasks: in local processes, or by an engine (`packer.engines`).
#
# Python's cyclic garbage collector is switched off, or runs rarely, while there are millions of small objects without
# cycles: it would visit all of them each time their number has grown by a quarter, which is 5 % of the time for packing
# small files. Objects without cycles are freed as always.


# ------------------------------------------------------------------------------
# Progress and stop requests of a run, as files that all nodes see.
#
#     <folder>/.run-<16 hex digits>.tmp/stop    "0"; "1" when the run ends early, and no file at all when it is over
#     <folder>/.run-<16 hex digits>.tmp/<task>  samples, source bytes and samples left out so far, three uint64
#
# The process that runs a command makes the directory and removes it. A task writes its file in place, at most twice a
# second. `stop` exists from the beginning, since a network filesystem may cache for a while that a name is missing, and
# each check opens it again, because such a filesystem then asks its server. A task that runs twice at the same time
# writes the same file from two nodes; the progress is then that of either.


Progress: TypeAlias = "tuple[int, int, int]"  # samples, source bytes, samples left out

_STOP = "stop"
_ATTEMPTS = 3
_DONE = struct.Struct("<QQQ")
_WRITE_SECONDS = _LOOK_SECONDS = 0.5
_READ_SECONDS = 2.0
_APPEAR_SECONDS, _LATE_SECONDS = 10.0, 0.5
_GONE = (errno.ENOENT, errno.ESTALE, errno.ENOTDIR)


class Board:
    """The files of one run, in a separate directory in `folder`; close it, or use it in a `with`.

    path: that directory; None if it cannot be made, in which case only whole tasks count as progress.
    """

    def __init__(self, folder: Path) -> None:
        self.path: Path | None = Path(os.path.abspath(folder)) / f".run-{os.urandom(8).hex()}.tmp"
        try:
            with Folder(folder) as parent, parent.folder(self.path.name, create=True) as files:
                files.write(_STOP, b"0", durable=False)
        except OSError:
            self.path = None
        self._running: set[int] = set()
        self._finished = self._seen = (0, 0, 0)
        self._read_at = 0.0

    def begin(self, task: int) -> None:
        """A task has been handed out."""
        self._running.add(task)

    def end(self, task: int, done: Progress) -> None:
        """A task has ended, after this progress."""
        self._running.discard(task)
        self._finished = _sum(self._finished, done)

    def totals(self) -> Progress:
        """(samples, source bytes, samples left out) so far in this run."""
        now = time.monotonic()
        if now >= self._read_at:
            self._seen = _sum(*map(self._read, sorted(self._running)))
            self._read_at = now + _READ_SECONDS
        return _sum(self._finished, self._seen)

    def _read(self, task: int) -> Progress:
        if self.path is None:
            return 0, 0, 0
        try:
            samples, source_bytes, left_out = _DONE.unpack(read_regular(self.path / str(task), _DONE.size))
        except (OSError, struct.error):  # not begun, or being written
            return 0, 0, 0
        return samples, source_bytes, left_out

    def stop(self) -> None:
        """Tell all tasks to stop."""
        if self.path is not None:
            with suppress(OSError), open(self.path / _STOP, "r+b") as file:
                file.write(b"1")

    def close(self) -> None:
        """Remove the files; tasks that still run stop."""
        for _ in range(_ATTEMPTS if self.path is not None else 0):  # a task may write its file during this check
            assert self.path is not None
            with suppress(OSError), Folder(self.path.parent) as parent:
                parent.remove_tree(self.path.name)
                return

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _sum(*parts: Progress) -> Progress:
    return sum(part[0] for part in parts), sum(part[1] for part in parts), sum(part[2] for part in parts)


class TaskCounter:
    """Reports the progress of a task, on any node, to the board at `path`; None: to none.

    done: samples, source bytes and samples left out so far.
    """

    def __init__(self, path: Path | None, task: int) -> None:
        self._path, self._task = path, task
        self._look_at = self._write_at = 0.0
        self._stopped = False
        self.done: Progress = (0, 0, 0)

    def check_visible(self) -> None:
        """Raise WorkerError if this machine does not see the board, or no longer.

        A network filesystem may cache for a while that a directory was missing, but the name of a board is new to it.
        """
        started = time.monotonic()
        while self._path is not None and not (self._path / _STOP).exists():
            folder = self._path.parent
            if time.monotonic() > started + (_LATE_SECONDS if folder.exists() else _APPEAR_SECONDS):
                raise WorkerError(
                    f"{os.uname().nodename} does not see {self._path} (is that command over?); all workers must see "
                    f"source and output at the same paths, on a shared filesystem"
                )
            time.sleep(0.1)

    def report(self, samples: int, payload_bytes: int, left_out: int = 0) -> None:
        self.done = _sum(self.done, (samples, payload_bytes, left_out))
        now = time.monotonic()
        if self._path is not None and now >= self._write_at:
            self._write_at = now + _WRITE_SECONDS
            with suppress(OSError):
                descriptor = os.open(self._path / str(self._task), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
                try:
                    os.pwrite(descriptor, _DONE.pack(*self.done), 0)
                finally:
                    os.close(descriptor)

    def stopped(self) -> bool:
        now = time.monotonic()
        if self._path is not None and not self._stopped and now >= self._look_at:
            self._look_at = now + _LOOK_SECONDS
            try:
                with open(self._path / _STOP, "rb") as file:
                    self._stopped = file.read(1) != b"0"
            except OSError as error:
                self._stopped = error.errno in _GONE
        return self._stopped


# ------------------------------------------------------------------------------
# One call of a task by an engine: bytes in, bytes out, on any node.
#
# The task is pickled here and not by the engine, so that all engines accept the same tasks, and a task that cannot be
# pickled is an error before any is sent. The result contains the error of the task, since engines treat exceptions in
# different ways.


@dataclass(frozen=True, slots=True)
class Call:
    """A task for a worker.

    number: of the task in its run.
    board: the directory for the run's progress and stop requests, None for none.
    work, task: of `packer.workers.run_shards`, pickled.
    folder: the current directory of the process that runs the command, to which paths are relative.
    version: its version of packer.
    """

    number: int
    board: str | None
    work: bytes
    folder: str
    version: str = __version__

    @classmethod
    def of(cls, number: int, board: Path | None, work: Callable[..., Any], task: Any) -> Call:
        """Raises SourceError if the task cannot be pickled."""
        try:
            pickled = pickle.dumps((work, task), pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # pickling runs code of the source
            raise SourceError(
                f"the source cannot be sent to workers: {error}; run without an engine and with workers=1"
            ) from error
        return cls(number, None if board is None else str(board), pickled, os.getcwd())


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended. value: the result, or the error; trace: of an unexpected error, as text."""

    number: int
    is_error: bool
    value: Any
    done: Progress
    trace: str = ""

    def result(self) -> Any:
        """The result. Raises the error of the task."""
        if not self.is_error:
            return self.value
        raise self.value from (_InWorker(self.trace) if self.trace else None)


class _InWorker(Exception):
    """The traceback of an error in a worker."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def run_call(call: bytes) -> bytes:
    """In a worker: run a pickled Call; returns the pickled Outcome."""
    task: Call = pickle.loads(call)
    counter = TaskCounter(None if task.board is None else Path(task.board), task.number)
    trace = ""
    try:
        value, is_error = _run(task, counter), False
    except Exception as error:
        value, is_error = error, True
        if not isinstance(error, (PackerError, MemoryError)):
            trace = traceback.format_exc()
    outcome = Outcome(task.number, is_error, value, counter.done, trace)
    try:
        pickled = pickle.dumps(outcome, pickle.HIGHEST_PROTOCOL)
        if is_error:
            pickle.loads(pickled)  # errors with their own arguments may fail to unpickle
        return pickled
    except Exception:
        text = f"{os.uname().nodename}: {type(value).__name__}: {value}"
        return pickle.dumps(Outcome(task.number, True, WorkerError(text), (0, 0, 0), trace))


def _run(call: Call, counter: TaskCounter) -> Any:
    node = os.uname().nodename
    if call.version != __version__:
        raise WorkerError(
            f"{node} has packer {__version__}, the command runs {call.version}; use one environment on all nodes"
        )
    if os.getcwd() != call.folder:
        try:
            os.chdir(call.folder)
        except OSError as error:
            raise WorkerError(
                f"{node} cannot enter {call.folder}: {error.strerror}; start the command in a directory that all "
                f"workers see"
            ) from error
    counter.check_visible()
    try:
        work, task = pickle.loads(call.work)
    except Exception as error:  # unpickling runs code of the source
        raise SourceError(
            f"the source cannot be used on {node}: {error}; its class must be in a module that workers can import, "
            f"which a script's own are not"
        ) from error
    return work(task, counter)


_log = logging.getLogger(__name__)
_AHEAD = 16  # tasks waiting at an engine, besides the running ones
_UNKNOWN_SLOTS = 256
_WIND_DOWN_SECONDS, _PATIENCE_SECONDS = 10.0, 1.0


@dataclass(frozen=True)
class Workers:
    """Where the tasks of a command run.

    count: concurrent tasks; None: with processes, the CPUs that this process may use; with an engine, its slots.
    engine: None for local processes.
    """

    count: int | None = None
    engine: Executor | None = None

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise ValueError(f"workers must be at least 1, not {self.count}")
        if not isinstance(self.engine, Executor | None):
            raise TypeError(f"engine is an Executor, as returned by packer.open_engine, not {self.engine!r:.80}")

    def at_most(self, count: int | None) -> Workers:
        """A copy with at most this many concurrent tasks."""
        return self if count is None else Workers(min(count, self.count or count), self.engine)


def run_shards(
    work: Callable[[T, Counter], R],
    tasks: Iterable[T],
    count: int,
    workers: Workers,
    watcher: Watcher,
    size: tuple[int, int],
    *,
    source: object = None,
    folder: Path | None = None,
) -> list[R]:
    """Run `work` on `count` tasks; results are in the order of the tasks.

    watcher: shows progress; size: (samples, bytes) in total.
    source: the caller's part of the tasks; SourceError is raised if it cannot be pickled.
    folder: of the output, seen by all workers, for progress files; default the current directory.

    A task that has a `title` is logged under it when it is done.

    A task is pickled shortly before a worker runs it. On the first error, or Ctrl-C, the other tasks are stopped and
    the error is raised; a worker that dies is a WorkerError, unless the engine replaces it.
    """
    if count == 0:
        return []
    if workers.engine is not None:
        with Board(folder or Path()) as board:
            try:
                watcher.begin(*size, board.totals)
                return _Run(workers, board, watcher).results(work, tasks, count)
            finally:
                watcher.end()
    is_isolated = bool(getattr(source, "isolated", False))
    executor, counters = open_processes(
        min(workers.count or usable_cpus(), count), count, watcher.note, inline=not is_isolated
    )
    inline = isinstance(executor, InlineExecutor)
    futures: list[Future[R]] = []
    titles: dict[Future[R], str] = {}
    _log.info(
        "%s for %s",
        "this process alone" if inline else plural(min(workers.count or usable_cpus(), count), "worker process"),
        plural(count, "task"),
    )
    try:
        if not inline:
            _check_sendable(source)
        if inline:  # the work happens in submit
            watcher.begin(*size, counters.totals)
        for number, task in enumerate(tasks):
            futures.append(executor.submit(run_task, work, task, number))
            titles[futures[-1]] = _title(task, number)
            if inline:
                futures[-1].result()
        if not inline:  # the display has a thread, which must not exist when workers are forked
            watcher.begin(*size, counters.totals)
        for finished, future in enumerate(as_completed(futures), 1):
            if future.exception() is not None:
                break
            _log.info("%s: done, %d of %d", titles[future], finished, count)
        for future in futures:
            if future.done() and not future.cancelled():
                future.result()  # raises the error of the first failed task
        return [future.result() for future in futures]
    except BrokenExecutor as error:
        damaged = f", or because {getattr(source, 'title', 'the source')} is damaged" if is_isolated else ""
        raise WorkerError(
            f"a worker process died, perhaps because the system ran out of memory{damaged}; run the same command again "
            f"(fewer workers need less memory): complete shards are kept"
        ) from error
    finally:
        counters.stop()
        for future in futures:  # shutdown(cancel_futures=True) loses tasks that cannot be pickled, and waits
            future.cancel()
        executor.shutdown(wait=True)
        watcher.end()


def _title(task: object, number: int) -> str:
    """The name of a task in the log: its title, if it has one."""
    return str(getattr(task, "title", f"part {number + 1}"))


def _check_sendable(source: object) -> None:
    """Check in advance, since the feeder thread of a pool hangs on an unpicklable task (cpython issue 94777)."""
    try:
        pickle.dumps(source, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # pickling runs code of the source
        raise SourceError(f"the source cannot be sent to worker processes: {error}; use workers=1") from error


class _Run:
    """Tasks passed to an engine, a limited number at a time, since waiting tasks take its memory."""

    def __init__(self, workers: Workers, board: Board, watcher: Watcher) -> None:
        assert workers.engine is not None
        self._engine, self._most, self._board = workers.engine, workers.count, board
        self._waiting: dict[Future[bytes], int] = {}
        self._watcher, self._is_noted = watcher, False

    def results(self, work: Callable[..., Any], tasks: Iterable[Any], count: int) -> list[Any]:
        outcomes: list[Any] = [None] * count
        titles, finished = dict[int, str](), 0
        coming = enumerate(tasks)
        try:
            while True:
                for number, task in islice(coming, max(0, self._room() - len(self._waiting))):
                    titles[number] = _title(task, number)
                    call = pickle.dumps(Call.of(number, self._board.path, work, task), pickle.HIGHEST_PROTOCOL)
                    self._waiting[self._engine.submit(run_call, call)] = number
                    self._board.begin(number)
                if not self._waiting:
                    return outcomes
                done = self._next_done()
                for future in sorted(done, key=self._waiting.__getitem__):
                    number, outcome = self._waiting.pop(future), _outcome(future)
                    self._board.end(number, outcome.done)
                    outcomes[number] = outcome.result()
                    finished += 1
                    _log.info("%s: done, %d of %d", titles.pop(number), finished, count)
        finally:
            self._board.stop()
            for future in self._waiting:
                future.cancel()
            wait(self._waiting, _WIND_DOWN_SECONDS)

    def _next_done(self) -> set[Future[bytes]]:
        """The next finished tasks; notes once if there is no worker to run any."""
        while True:
            done, _ = wait(self._waiting, _PATIENCE_SECONDS, return_when=FIRST_COMPLETED)
            if done:
                return done
            if not self._is_noted and getattr(self._engine, "slots", 1) == 0:
                self._watcher.note("the engine has no workers; waiting for some to join it")
                self._is_noted = True

    def _room(self) -> int:
        """How many tasks the engine should have; it may grow and shrink."""
        if self._most is not None:
            return self._most
        slots = int(getattr(self._engine, "slots", _UNKNOWN_SLOTS))
        return slots + max(slots, _AHEAD)


def _outcome(future: Future[bytes]) -> Outcome:
    try:
        outcome: Outcome = pickle.loads(future.result())
    except Exception as error:  # each engine has its own errors
        raise WorkerError(
            f"the engine has lost a shard ({type(error).__name__}: {error}); run the same command again: complete "
            f"shards are kept"
        ) from error
    return outcome


@contextmanager
def without_gc() -> Iterator[None]:
    """Switch the garbage collector off in this process, in all of its threads."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
