"""The engine "dask": the workers of a running Dask cluster, found by the address of its scheduler.

Dask reruns the tasks of a lost worker on another worker, and gives up a task that has killed four workers. Workers
should have one thread each, since packing holds the interpreter's lock:  dask worker ADDRESS --nthreads 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any

from cache.errors import MissingExtraError, WorkerError

__all__ = ["open_dask"]


@contextmanager
def open_dask(scheduler: str | None = None) -> Iterator[Executor]:
    """Open the engine on a running Dask cluster.

    scheduler: tcp://host:port, or the path of a scheduler file (.json); by default from Dask's configuration.

    Raises ValueError (no scheduler is named), WorkerError (no answer), MissingExtraError.
    """
    try:
        from dask import config
        from distributed import Client
        from distributed.cfexecutor import ClientExecutor
    except ImportError as error:
        raise MissingExtraError("distributed", "dask", "the engine dask") from error
    address = scheduler or config.get("scheduler-address", None)
    if not address:
        raise ValueError("the engine dask needs a scheduler: name it with scheduler='tcp://HOST:PORT'")
    place: dict[str, Any] = {"scheduler_file": address} if address.endswith(".json") else {"address": address}
    try:
        client = Client(**place, set_as_default=False)
    except (OSError, ValueError, ImportError) as error:  # ImportError: a security option
        raise WorkerError(f"{address}: no Dask scheduler answers: {error}") from error

    class DaskExecutor(ClientExecutor):  # type: ignore[misc]
        """slots: the current number of threads of all workers."""

        @property
        def slots(self) -> int:
            return sum(client.nthreads().values())

    with client:
        yield DaskExecutor(client, pure=False)
