"""Engines: run the tasks of a command elsewhere than in local processes.

An engine is a `concurrent.futures.Executor`. Commands submit one call per shard (`packer.workers.run_shards`). The
workers of an executor must

    import the same version of packer, and see the command's files at the same paths
    run each call at least once; running it twice, even concurrently, leaves the same files

so an executor may rerun the calls of a lost worker. There are no further requirements: calls and results are bytes, the
error of a call is part of its result, and progress and stop requests are communicated through files (`packer.workers`).

`open_engine` opens an engine by name. An entry's `home` is a function open(scheduler): a context manager that yields
the executor, or None in a process that has served as a worker until the end. Other packages add entries through the
entry point group "packer.engines".
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass

from packer.registry import Entry, Registry

__all__ = ["REGISTRY", "EngineEntry", "engine_names", "open_engine"]


@dataclass(frozen=True, kw_only=True)
class EngineEntry(Entry):
    """An engine. title: where its tasks run. home: its function open(scheduler)."""


REGISTRY = Registry(
    "packer.engines",
    EngineEntry,
    (
        EngineEntry(name="mpi", title="ranks of MPI", home="packer.engines.mpi:open_mpi"),
        EngineEntry(name="dask", title="a Dask cluster", home="packer.engines.dask:open_dask"),
        EngineEntry(name="ray", title="a Ray cluster", home="packer.engines.ray:open_ray"),
    ),
)


def engine_names() -> tuple[str, ...]:
    """The names of all engines, for `open_engine`."""
    return REGISTRY.names()


@contextmanager
def open_engine(name: str, scheduler: str | None = None) -> Iterator[Executor | None]:
    """Open an engine for the arguments engine= of this package, while the block runs.

    name: "mpi", "dask" or "ray", or the name of an installed engine.
    scheduler: the address of a cluster; by default from the environment variables of Dask or Ray.

        with packer.open_engine("mpi") as engine:
            if engine is not None:
                packer.convert("imagenet", to="tar", run=packer.Run(engine=engine))

    With "mpi", all ranks call this: rank 0 gets the engine; the others work until its block ends, and then get None.

    Raises ValueError (no such engine, or no cluster found), MissingExtraError, WorkerError (no connection).
    """
    entry = REGISTRY.get(name)
    if entry is None:
        raise ValueError(f"there is no engine {name!r}; choose one of {', '.join(engine_names())}")
    with entry.load()(scheduler) as executor:
        yield executor
