"""The one place that imports rocAL.

rocAL is no package of PyPI: it comes with ROCm, and its Python modules lie in /opt/rocm/lib.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from readers.errors import MissingExtraError

__all__ = ["Library", "MissingRocalError", "gpu_backend", "load_rocal"]

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
