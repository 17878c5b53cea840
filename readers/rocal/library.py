"""The one place that imports rocAL.

rocAL is no package of PyPI: it comes with ROCm, and its Python modules lie in /opt/rocm/lib.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from readers.errors import MissingExtraError

__all__ = ["Library", "MissingRocalError", "load_rocal"]


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
