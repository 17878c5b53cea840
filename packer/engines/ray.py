"""The engine "ray": the workers of a running Ray cluster.

Ray reruns the tasks of a lost worker or node, at most three times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any

from cache.errors import MissingExtraError, WorkerError

__all__ = ["open_ray"]


@contextmanager
def open_ray(scheduler: str | None = None) -> Iterator[Executor]:
    """Open the engine on a running Ray cluster.

    scheduler: HOST:PORT or ray://HOST:PORT; by default RAY_ADDRESS, or the cluster of this node.

    Raises WorkerError (no cluster), MissingExtraError.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("ray", "ray", "the engine ray") from error
    was_open = ray.is_initialized()
    if not was_open:
        try:
            ray.init(address=scheduler or "auto", log_to_driver=False, logging_level="error")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise WorkerError(f"{scheduler or 'here'}: no Ray cluster answers: {error}") from error
    try:
        yield _RayExecutor(ray)
    finally:
        if not was_open:
            ray.shutdown()


class _RayExecutor(Executor):
    """Runs calls as tasks of one CPU each. slots: the current number of CPUs of all nodes."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._run = ray.remote(num_cpus=1)(_call)

    @property
    def slots(self) -> int:
        return int(self._ray.cluster_resources().get("CPU", 0))

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        reference = self._run.remote(fn, args, kwargs)
        future: Future[Any] = reference.future()
        future.add_done_callback(lambda done: self._ray.cancel(reference) if done.cancelled() else None)
        return future


def _call(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return fn(*args, **kwargs)
