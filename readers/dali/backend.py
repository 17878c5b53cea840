"""DALI itself: the one place that imports it, and running pipelines as torch tensors or NumPy arrays.

A pipeline with worker processes is watched: one that dies is an error, where DALI alone might wait for it for ever.
DALI talks to its workers through locks in shared memory. A worker that is killed (out of memory) may hold one, or be
waited for by a condition that counts it; then no call into DALI returns. So the calls are made in a thread, and
whatever wants a batch waits for the thread and looks after the workers meanwhile. A thread that got stuck is left to
itself.
"""

from __future__ import annotations

import multiprocessing.util
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.process import BaseProcess
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

from cache.errors import MissingExtraError, WorkerError

__all__ = ["Dali", "Output", "Run", "empty_batch", "load_dali", "start_run"]

Output: TypeAlias = Literal["torch", "numpy"]
_OLDEST = (2, 3)  # before, a parallel external source could hand out memory that was in use again
_LOOK_SECONDS = 0.2
_GRACE_SECONDS = 2.0  # DALI notices most deaths by itself and says so
_JOIN_SECONDS = 10.0


class Dali(NamedTuple):
    """What we use of DALI: the functional operators, its types, and the class Pipeline."""

    fn: Any
    types: Any
    pipeline: Any


def load_dali() -> Dali:
    """Raises MissingExtraError where DALI is not installed, or older than 2.3."""
    try:
        import nvidia.dali as dali
        from nvidia.dali import fn, types
    except (ImportError, OSError) as error:  # OSError: a library that does not fit this system
        raise MissingExtraError("NVIDIA DALI", "dali", "readers.dali") from error
    if tuple(int(part) for part in dali.__version__.split(".")[:2]) < _OLDEST:
        found = f"DALI from 2.3 on (found {dali.__version__})"
        raise MissingExtraError(found, "dali", "readers.dali")
    return Dali(fn, types, dali.Pipeline)


class Run(Protocol):
    """A running pipeline, epoch after epoch. Dropping it ends the pipeline and its processes."""

    def take(self) -> tuple[Any, ...]:
        """The outputs of the next batch, which stay as they are: images, and int64 [n] each. Raises StopIteration at
        the end of an epoch, and whatever DALI does."""

    def reset(self) -> None:
        """Begin the next epoch; only after StopIteration."""

    def here(self) -> AbstractContextManager[Any]:
        """Within this, `take` in another thread gives images as it would in the one that calls `here`."""


def start_run(pipeline: Any, outputs: Sequence[str], output: Output, workers: int) -> Run:
    """Start a pipeline with these outputs. Raises MissingExtraError."""
    iterator = _torch_iterator() if output == "torch" else None
    return _WatchedRun(pipeline, outputs, iterator) if workers else _open(pipeline, outputs, iterator)


def empty_batch(output: Output, shape: tuple[int, ...], dtype: str, device: str) -> tuple[Any, Any]:
    """Images and labels of a batch without samples, as a run would give them. device: as torch names it."""
    if output == "numpy":
        return np.empty((0, *shape), dtype), np.empty(0, np.int64)
    import torch

    return torch.empty((0, *shape), dtype=getattr(torch, dtype), device=device), torch.empty(0, dtype=torch.int64)


def _torch_iterator() -> Any:
    """DALI's iterator that gives torch tensors. Raises MissingExtraError."""
    try:
        import torch  # noqa: F401  the plug-in below would only say that a module is missing
    except ImportError as error:
        raise MissingExtraError("torch", "torch", "DaliLoader(output='torch')") from error
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    return DALIGenericIterator


def _open(pipeline: Any, outputs: Sequence[str], iterator: Any) -> Run:
    """iterator: the class that gives torch tensors, None for arrays."""
    return _ArrayRun(pipeline) if iterator is None else _TorchRun(pipeline, outputs, iterator)


class _TorchRun:
    """Through DALI's own iterator. Images are on the pipeline's device, all else on the CPU."""

    def __init__(self, pipeline: Any, outputs: Sequence[str], iterator: Any) -> None:
        self._device_id = pipeline.device_id
        self._outputs = tuple(outputs)
        self._iterator = iterator([pipeline], list(outputs), size=-1, prepare_first_batch=False)

    def take(self) -> tuple[Any, ...]:
        (batch,) = next(self._iterator)
        images, *numbers = (batch[name] for name in self._outputs)
        return (images, *(values.flatten() for values in numbers))

    def reset(self) -> None:
        self._iterator.reset()

    def here(self) -> AbstractContextManager[Any]:
        if self._device_id is None:
            return nullcontext()
        import torch

        # DALI makes the stream that is current wait for its images, and each thread has a current one of its own.
        stream: AbstractContextManager[Any] = torch.cuda.stream(torch.cuda.current_stream(self._device_id))
        return stream


class _ArrayRun:
    """Straight from the pipeline, as copies in this process's own memory, wherever the pipeline is."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline

    def take(self) -> tuple[Any, ...]:
        images, *numbers = (np.array(output.as_cpu().as_array()) for output in self._pipeline.run())
        return (images, *(values.ravel() for values in numbers))

    def reset(self) -> None:
        self._pipeline.reset()

    def here(self) -> AbstractContextManager[Any]:
        return nullcontext()


# --- with worker processes --------------------------------------------------------------------------------------
_Call = tuple[AbstractContextManager[Any], Callable[[Run], Any]]


class _WatchedRun:
    """A run whose workers are started at once. Dropping it ends the pipeline and the workers.

    So does the end of the interpreter, before `multiprocessing` joins all processes that were started.
    """

    def __init__(self, pipeline: Any, outputs: Sequence[str], iterator: Any) -> None:
        before = multiprocessing.active_children()
        pipeline.start_py_workers()
        self._workers = [child for child in multiprocessing.active_children() if child not in before]
        self._run = [_open(pipeline, outputs, iterator)]  # empty once it has ended
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        given = (self._run, self._calls, self._answers)
        thread = threading.Thread(target=_serve, args=given, name="packer-dali", daemon=True)
        thread.start()
        ending = (self._run, thread, self._calls, self._workers)
        multiprocessing.util.Finalize(self, _stop, ending, exitpriority=10)

    def take(self) -> tuple[Any, ...]:
        result: tuple[Any, ...] = self._call(_take)
        return result

    def reset(self) -> None:
        self._call(_reset)

    def here(self) -> AbstractContextManager[Any]:
        return self._run[0].here()

    def _call(self, function: Callable[[Run], Any]) -> Any:
        """Have the thread do it. Raises WorkerError where a worker has died."""
        self._calls.put((self.here(), function))
        dead_since: float | None = None
        while True:
            try:
                result, error = self._answers.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                dead_since = dead_since or (time.monotonic() if self._dead() else None)
                if dead_since is not None and time.monotonic() - dead_since > _GRACE_SECONDS:
                    raise self._died() from None
                continue
            if error is None:
                return result
            dead = not isinstance(error, StopIteration) and self._dead()
            try:
                raise self._died() if dead else error
            finally:
                del error  # whose traceback has this frame, which would keep the pipeline alive

    def _dead(self) -> BaseProcess | None:
        return next((worker for worker in self._workers if not worker.is_alive()), None)

    def _died(self) -> WorkerError:
        dead = self._dead()
        code = dead.exitcode if dead is not None else None
        return WorkerError(
            f"a process that reads for DALI died (exit status {code}; -9 often means out of memory); start the loop "
            f"again from the last state_dict, with fewer workers or a smaller prefetch"
        )


def _take(run: Run) -> Any:
    return run.take()


def _reset(run: Run) -> None:
    run.reset()


def _serve(runs: list[Run], calls: queue.SimpleQueue[Any], answers: queue.SimpleQueue[Any]) -> None:
    while True:
        call = calls.get()
        if call is None:
            return
        context, function = call
        answer: tuple[Any, BaseException | None]
        try:
            with context:
                answer = (function(runs[0]), None)
        except BaseException as error:
            answer = (None, error.with_traceback(None))  # whose frames would keep the pipeline alive
        answers.put(answer)
        del call, context, function, answer


def _stop(runs: list[Run], thread: threading.Thread, calls: queue.SimpleQueue[Any], workers: list[BaseProcess]) -> None:
    calls.put(None)
    stuck = any(not worker.is_alive() for worker in workers)
    thread.join(_LOOK_SECONDS if stuck else _JOIN_SECONDS)
    if thread.is_alive():
        for worker in workers:
            worker.kill()
            worker.join(_JOIN_SECONDS)
    else:
        runs.clear()
