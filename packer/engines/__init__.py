"""Engines: where the tasks of a command run, if not in processes of this machine.

An engine is a `concurrent.futures.Executor`. Commands give it one call for each shard (`packer.workers.run_shards`).
Any executor will do whose workers

    import packer, of the same version, and see the files of the command at the same paths
    run each call at least once: one that runs twice, even at the same time, leaves the same files

so an executor may repeat the calls of a worker that it has lost. Nothing else is asked of it: calls and results are
bytes, the error of a call is part of its result, and progress and stop go through files (`packer.workers`).

`open_engine` opens one by its name. An entry names a function open(scheduler), a context manager that gives the
executor, or None in a process that has worked for another one and is done. Other packages add entries through the
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
    """One engine. title: of where tasks run; home: its function open(scheduler)."""


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
    """The names that `open_engine` knows."""
    return REGISTRY.names()


@contextmanager
def open_engine(name: str, scheduler: str | None = None) -> Iterator[Executor | None]:
    """Open an engine for the arguments engine= of this package, while the block runs.

    name: "mpi", "dask" or "ray", or that of an installed package.
    scheduler: the address of a cluster; default what its own environment variables say.

        with packer.open_engine("mpi") as engine:
            if engine is not None:
                packer.convert("imagenet", to="tar", run=packer.Run(engine=engine))

    With "mpi" all ranks come here: rank 0 gets the engine, the others work until its block ends, and then get None.

    Raises ValueError (no such engine, or no cluster to be found), MissingExtraError, WorkerError (no connection).
    """
    entry = REGISTRY.get(name)
    if entry is None:
        raise ValueError(f"there is no engine {name!r}; choose one of {', '.join(engine_names())}")
    with entry.load()(scheduler) as executor:
        yield executor
