"""The engine "mpi": `mpiexec -n N packer convert … --engine mpi`. Rank 0 runs the command, the others its tasks.

If a rank dies, MPI ends the whole job; running the same command again continues the conversion.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any

from cache.errors import MissingExtraError, WorkerError

__all__ = ["open_mpi"]


@contextmanager
def open_mpi(scheduler: str | None = None) -> Iterator[Executor | None]:
    """Open the engine, in all ranks of MPI.COMM_WORLD; see `packer.open_engine`.

    Raises ValueError (a scheduler is named), WorkerError (a single rank), MissingExtraError.
    """
    if scheduler is not None:
        raise ValueError(
            "scheduler is the address of a cluster; MPI has none, its ranks are started by mpiexec or srun"
        )
    try:
        from mpi4py import MPI
        from mpi4py.futures import MPICommExecutor
    except (ImportError, RuntimeError) as error:  # RuntimeError: no MPI library could be loaded
        raise MissingExtraError(f"mpi4py and an MPI library ({error})", "mpi", "the engine mpi") from error
    comm = MPI.COMM_WORLD
    if comm.Get_size() < 2:
        library = MPI.Get_library_version().split("\n")[0].strip("\0 ")
        raise WorkerError(
            f"MPI has started one process only, but one rank runs the command while the others pack: run  mpiexec -n N "
            f"packer … --engine mpi. If you did, that mpiexec is of another MPI than mpi4py, which has {library:.80}"
        )
    if comm.Get_rank() > 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 stops the tasks
    pool: Any = MPICommExecutor(comm, root=0)
    with pool as executor:
        if executor is not None:
            executor.slots = comm.Get_size() - 1
            yield executor
            return
    yield None
