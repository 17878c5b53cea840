"""Running DALI pipelines, as torch tensors or NumPy arrays. The only module that imports DALI.

A pipeline with worker processes is watched. DALI talks to its workers through locks in shared memory: a worker that is
killed (out of memory) may hold one, or be counted by a condition, and then no call into DALI returns. So a thread makes
the calls, and the caller waits for that thread and checks the workers meanwhile. A thread that is stuck is abandoned.
"""

from __future__ import annotations

import multiprocessing.util
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from cache.errors import MissingExtraError, WorkerError

__all__ = ["Output", "Run", "as_output", "empty_batch", "gpu_count", "load_dali", "start_run"]

Output: TypeAlias = Literal["torch", "numpy"]
_OLDEST = (2, 3)  # before, a parallel external source could reuse memory that DALI still read
_CHECK_SECONDS = 0.2
_GRACE_SECONDS = 2.0  # DALI notices most deaths by itself and reports them
_JOIN_SECONDS = 10.0


def load_dali() -> Any:
    """The module nvidia.dali. Raises MissingExtraError where it is not installed, or older than 2.3."""
    try:
        import nvidia.dali as dali
    except (ImportError, OSError) as error:  # OSError: a library that does not fit this system
        raise MissingExtraError("NVIDIA DALI", "dali", "readers.dali") from error
    if tuple(int(part) for part in dali.__version__.split(".")[:2]) < _OLDEST:
        raise MissingExtraError(f"DALI from 2.3 on (found {dali.__version__})", "dali", "readers.dali")
    return dali


def gpu_count() -> int | None:
    """How many GPUs DALI sees; None where it cannot say."""
    from nvidia.dali import backend

    try:
        return int(backend.GetCUDADeviceCount())  # type: ignore[attr-defined]  # of its C module
    except RuntimeError:  # there is no driver: making a pipeline says so
        return None


def empty_batch(output: Output, shape: tuple[int, ...], dtype: str, device: str) -> tuple[Any, Any]:
    """Images and labels of a batch without samples, as a run returns them. device: as torch names it."""
    images = as_output(np.empty((0, *shape), dtype), output)
    return images if output == "numpy" else images.to(device), as_output(np.empty(0, np.int64), output)


def as_output(array: npt.NDArray[Any], output: Output) -> Any:
    """An array as outputs are: a tensor on the CPU, or as it is."""
    if output == "numpy":
        return array
    import torch

    return torch.from_numpy(array)


class Run(ABC):
    """A running pipeline, epoch after epoch. Dropping it ends the pipeline and its processes."""

    @abstractmethod
    def take(self) -> tuple[Any, ...]:
        """The outputs of the next batch, in memory of their own: images, and int64 [n] each.

        Raises StopIteration at the end of an epoch, and what DALI raises.
        """

    @abstractmethod
    def reset(self) -> None:
        """Begin the next epoch; only after StopIteration."""

    def stream(self) -> AbstractContextManager[Any]:
        """A context for another thread, in which `take` returns images for the current CUDA stream of this one."""
        return nullcontext()


def start_run(pipeline: Any, outputs: Sequence[str], output: Output, workers: int) -> Run:
    """Start a pipeline with these outputs. Raises MissingExtraError."""
    open_run = partial(_TorchRun, _torch_iterator(), outputs) if output == "torch" else _ArrayRun
    if not workers:
        return open_run(pipeline)
    before = multiprocessing.active_children()
    pipeline.start_py_workers()
    started = [child for child in multiprocessing.active_children() if child not in before]
    return _WatchedRun(open_run(pipeline), started)


def _torch_iterator() -> Any:
    """DALI's iterator of torch tensors. Raises MissingExtraError."""
    try:
        import torch  # noqa: F401  the plug-in below would only say that a module is missing
    except ImportError as error:
        raise MissingExtraError("torch", "torch", "DaliLoader(output='torch')") from error
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    return DALIGenericIterator


class _TorchRun(Run):
    """By DALI's own iterator. Images are on the pipeline's device, all else on the CPU."""

    def __init__(self, iterator: Any, outputs: Sequence[str], pipeline: Any) -> None:
        self._device_id, self._outputs = pipeline.device_id, outputs
        self._iterator = iterator([pipeline], list(outputs), size=-1, prepare_first_batch=False)

    def take(self) -> tuple[Any, ...]:
        (batch,) = next(self._iterator)
        images, *numbers = (batch[name] for name in self._outputs)
        return (images, *(values.flatten() for values in numbers))

    def reset(self) -> None:
        self._iterator.reset()

    def stream(self) -> AbstractContextManager[Any]:
        if self._device_id is None:
            return nullcontext()
        import torch

        # DALI makes the current stream wait for its images, and each thread has a current stream of its own.
        stream: AbstractContextManager[Any] = torch.cuda.stream(torch.cuda.current_stream(self._device_id))
        return stream


class _ArrayRun(Run):
    """By the pipeline itself. Arrays are copies in the memory of this process, on any device of the pipeline."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline

    def take(self) -> tuple[Any, ...]:
        images, *numbers = (np.array(output.as_cpu().as_array()) for output in self._pipeline.run())
        return (images, *(values.ravel() for values in numbers))

    def reset(self) -> None:
        self._pipeline.reset()


# --- with worker processes --------------------------------------------------------------------------------------
_Call = tuple[AbstractContextManager[Any], Literal["take", "reset"]]


class _WatchedRun(Run):
    """A run whose workers have been started. Dropping it ends the pipeline and the workers.

    So does the end of the interpreter, before `multiprocessing` joins all processes that were started.
    """

    def __init__(self, run: Run, workers: list[BaseProcess]) -> None:
        self._run, self._workers = [run], workers  # the list is empty once the run has ended
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        arguments = (self._run, self._calls, self._answers)
        thread = threading.Thread(target=_serve, args=arguments, name="packer-dali", daemon=True)
        thread.start()
        multiprocessing.util.Finalize(self, _stop, (self._run, thread, self._calls, workers), exitpriority=10)

    def take(self) -> tuple[Any, ...]:
        outputs: tuple[Any, ...] = self._call("take")
        return outputs

    def reset(self) -> None:
        self._call("reset")

    def stream(self) -> AbstractContextManager[Any]:
        return self._run[0].stream()

    def _call(self, method: Literal["take", "reset"]) -> Any:
        """Have the thread call it. Raises WorkerError where a worker has died."""
        self._calls.put((self.stream(), method))
        result, error, dead_since = None, None, 0.0
        try:
            while True:
                try:
                    result, error = self._answers.get(timeout=_CHECK_SECONDS)
                    break
                except queue.Empty:
                    error = self._death()
                    dead_since = dead_since or (time.monotonic() if error else 0.0)
                    if dead_since and time.monotonic() - dead_since > _GRACE_SECONDS:
                        break
            if error is not None:
                raise error if isinstance(error, StopIteration) else self._death() or error
            return result
        finally:
            del error  # its traceback has this frame, which would keep the pipeline alive

    def _death(self) -> WorkerError | None:
        """The error that reports a dead worker, if there is one."""
        codes = [worker.exitcode for worker in self._workers if not worker.is_alive()]
        if not codes:
            return None
        return WorkerError(
            f"a process that reads for DALI died (exit status {codes[0]}; -9 often means out of memory); start the "
            f"loop again from the last state_dict, with fewer workers or a smaller prefetch"
        )


def _serve(runs: list[Run], calls: queue.SimpleQueue[Any], answers: queue.SimpleQueue[Any]) -> None:
    while (call := calls.get()) is not None:
        context, method = call
        answer: tuple[Any, BaseException | None]
        try:
            with context:
                answer = (getattr(runs[0], method)(), None)
        except BaseException as error:
            answer = (None, error.with_traceback(None))  # its frames would keep the pipeline alive
        answers.put(answer)
        del call, context, answer


def _stop(runs: list[Run], thread: threading.Thread, calls: queue.SimpleQueue[Any], workers: list[BaseProcess]) -> None:
    calls.put(None)
    stuck = any(not worker.is_alive() for worker in workers)
    thread.join(_CHECK_SECONDS if stuck else _JOIN_SECONDS)
    if thread.is_alive():
        for worker in workers:
            worker.kill()
            worker.join(_JOIN_SECONDS)
    else:
        runs.clear()
