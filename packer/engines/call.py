"""One call of a task by an engine: bytes in, bytes out, on any node.

The task is pickled here and not by the engine: so all engines take the same, and what cannot be pickled is an error
before anything is sent. The result has the error of the task, if it ended with one, as engines differ in what they
make of exceptions.
"""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache.errors import PackerError, SourceError, WorkerError
from packer import __version__
from packer.engines.board import Progress, TaskCounter

__all__ = ["Call", "Outcome", "run_call"]


@dataclass(frozen=True, slots=True)
class Call:
    """A task for a worker.

    number: of the task in its run.
    board: the directory of the run's progress and stop, None for none.
    work, task: of `packer.workers.run_shards`, pickled.
    folder: that of the process that runs the command, from which relative paths start.
    version: of packer there.
    """

    number: int
    board: str | None
    work: bytes
    folder: str
    version: str = __version__

    @classmethod
    def of(cls, number: int, board: Path | None, work: Callable[..., Any], task: Any) -> Call:
        """Raises SourceError where the task cannot be pickled."""
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
    """In a worker: run a pickled Call; the pickled Outcome."""
    given: Call = pickle.loads(call)
    counter = TaskCounter(None if given.board is None else Path(given.board), given.number)
    trace = ""
    try:
        value, is_error = _run(given, counter), False
    except Exception as error:
        value, is_error = error, True
        if not isinstance(error, (PackerError, MemoryError)):
            trace = traceback.format_exc()
    outcome = Outcome(given.number, is_error, value, counter.done, trace)
    try:
        pickled = pickle.dumps(outcome, pickle.HIGHEST_PROTOCOL)
        if is_error:
            pickle.loads(pickled)  # errors with arguments of their own may not come back
        return pickled
    except Exception:
        text = f"{os.uname().nodename}: {type(value).__name__}: {value}"
        return pickle.dumps(Outcome(given.number, True, WorkerError(text), (0, 0, 0), trace))


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
