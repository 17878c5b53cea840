"""rocAL itself: the one place that imports it, and pipelines from a function that says what happens to the images.

rocAL is no package of PyPI: it comes with ROCm, and its Python modules are in /opt/rocm/lib.

`Pipeline.build` leaves the interpreter when it fails, the constructor raises a bare Exception, an operator that fails
gives None, of which setOutputs makes a segmentation fault, and a GPU backend that was not built is the CPU's without a
word; here all of these are a PipelineError. What rocAL prints goes to stderr, whether Python or C++ prints it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from cache.errors import MissingExtraError, PipelineError
from cache.node import detect_ranks, usable_cpus

__all__ = [
    "PREFETCH",
    "Backend",
    "Graph",
    "Library",
    "Machine",
    "MissingRocalError",
    "built",
    "gpu_backend",
    "load_rocal",
]

Backend: TypeAlias = Literal["cpu", "gpu"]
Graph: TypeAlias = Callable[["Library"], Any]
# With deeper queues rocAL's reset waits for a thread that waits for input, and holds the interpreter's lock meanwhile.
PREFETCH = 2
_STDOUT, _STDERR = 1, 2
_redirected = threading.RLock()
_MAPS = Path("/proc/self/maps")
_GPU_LIBRARIES = (b"libamdhip64", b"libOpenCL")  # one of which a rocAL with a GPU backend is linked with


class MissingRocalError(MissingExtraError):
    """rocAL cannot be imported; there is no extra that brings it."""

    def __init__(self, purpose: str, reason: str) -> None:
        ImportError.__init__(
            self,
            f"{purpose} needs rocAL ({reason}): no wheel has it, so install ROCm with rocAL and its Python bindings "
            f"(apt install rocal-dev) and run with  PYTHONPATH=/opt/rocm/lib",
        )


@dataclass(frozen=True)
class Library:
    """The modules amd.rocal.fn, .types and .plugin.generic, and the classes that are used of the others."""

    fn: Any
    types: Any
    generic: Any
    pipeline: Any


def load_rocal(purpose: str) -> Library:
    """Import rocAL. Raises MissingRocalError."""
    try:
        from amd.rocal import fn, types
        from amd.rocal.pipeline import Pipeline
        from amd.rocal.plugin import generic
    except (ImportError, OSError) as error:  # OSError: a library of ROCm that the extension module needs
        raise MissingRocalError(purpose, str(error)) from error
    return Library(fn, types, generic, Pipeline)


def gpu_backend() -> bool | None:
    """Whether the librocal of this process can run on a GPU, by what it is linked with; None where that is unknown."""
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        libraries = {line.split(maxsplit=5)[5] for line in lines if "/librocal.so" in line}
        contents = [Path(library).read_bytes() for library in libraries]
    except OSError:
        return None
    return any(name in content for content in contents for name in _GPU_LIBRARIES) if contents else None


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


def built(graph: Graph, machine: Machine, *, batch_size: int, seed: int, prefetch: int = PREFETCH) -> Any:
    """A pipeline, built, whose one output is what `graph` returns.

    prefetch: batches in rocAL's queues, 2. Raises ValueError, MissingRocalError, PipelineError.
    """
    if prefetch != PREFETCH:
        raise ValueError(
            f"prefetch is {PREFETCH}, not {prefetch}: rocAL hangs at the end of an epoch with deeper queues"
        )
    rocal = load_rocal("a rocAL pipeline")
    if machine.backend == "gpu" and gpu_backend() is False:
        raise PipelineError(
            'this rocAL was built for the CPU alone, and would run backend="gpu" there without a word: give '
            'backend="cpu", or install a rocAL built with HIP (that of ROCm, /opt/rocm/lib)'
        )
    ranks = detect_ranks()
    threads = machine.threads or usable_cpus()
    device_id = ranks.local_rank if machine.device_id is None else machine.device_id
    try:
        with _stdout_to_stderr():
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
                output = graph(rocal)
                if output is None:
                    raise PipelineError(
                        "the graph returned None, as an operator of rocAL does that fails; why it failed stands above"
                    )
                pipeline.set_outputs(output)
            pipeline.build()
    except SystemExit as error:
        raise PipelineError("rocAL cannot build this pipeline; what is wrong it printed above") from error
    except PipelineError:
        raise
    except Exception as error:
        raise PipelineError(f"rocAL cannot make this pipeline: {error}") from error
    return pipeline


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """For the whole process, as C++ has one stdout only: what other threads print meanwhile goes to stderr as well."""
    libc = ctypes.CDLL(None)
    with _redirected:
        libc.fflush(None)
        try:
            sys.stdout.flush()
            kept = os.dup(_STDOUT)
            os.dup2(_STDERR, _STDOUT)
        except (OSError, ValueError, AttributeError):  # one of them is closed, or there is none: leave them as they are
            yield
            return
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield
        finally:
            libc.fflush(None)
            os.dup2(kept, _STDOUT)
            os.close(kept)
