"""A rocAL pipeline from a function that says what happens to the images, with rocAL's own habits taken care of.

`Pipeline.build` leaves the interpreter when it fails, the constructor raises a bare Exception, and both print; here
that is a PipelineError, and what is printed goes to stderr.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from cache.node import usable_cpus
from cache.ranks import detect_ranks
from readers.errors import PipelineError
from readers.rocal.library import Library, load_rocal

__all__ = ["Backend", "Graph", "Machine", "built"]

Backend: TypeAlias = Literal["cpu", "gpu"]
Graph: TypeAlias = Callable[[Library], Any]


@dataclass(frozen=True)
class Machine:
    """Where a pipeline runs. Raises ValueError.

    threads: that decode; None shares the CPUs of this process among the ranks of the node. With more than one, images
    may differ slightly from run to run. device_id: of the GPU; None takes the local rank.
    """

    backend: Backend = "cpu"
    threads: int | None = None
    device_id: int | None = None

    def __post_init__(self) -> None:
        if self.backend not in ("cpu", "gpu"):
            raise ValueError(f"backend is cpu or gpu, not {self.backend!r}")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads is 1 or more, not {self.threads}")


def built(graph: Graph, machine: Machine, *, batch_size: int, seed: int, prefetch: int) -> Any:
    """A pipeline, built, whose one output is what `graph` returns. Raises MissingRocalError, PipelineError."""
    rocal = load_rocal("a rocAL pipeline")
    ranks = detect_ranks()
    threads = machine.threads or usable_cpus()
    device_id = ranks.local_rank if machine.device_id is None else machine.device_id
    try:
        with contextlib.redirect_stdout(sys.stderr):
            pipeline = rocal.pipeline(
                batch_size=batch_size,
                num_threads=threads,
                device_id=device_id if machine.backend == "gpu" else 0,
                seed=seed,
                prefetch_queue_depth=prefetch,
                rocal_cpu=machine.backend == "cpu",
                tensor_layout=rocal.types.NCHW,
                tensor_dtype=rocal.types.FLOAT,
            )
            with pipeline:
                pipeline.set_outputs(graph(rocal))
            pipeline.build()
    except SystemExit as error:
        raise PipelineError("rocAL cannot build this pipeline; what is wrong it printed above") from error
    except PipelineError:
        raise
    except Exception as error:
        raise PipelineError(f"rocAL cannot make this pipeline: {error}") from error
    return pipeline
