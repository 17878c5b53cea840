"""The one place that imports DALI, when it is first needed."""

from __future__ import annotations

from typing import Any, NamedTuple

from readers.errors import MissingExtraError

__all__ = ["Dali", "load_dali", "load_torch_iterator"]

_OLDEST = (2, 3)  # before, a parallel external source could hand out memory that was in use again


class Dali(NamedTuple):
    """What we use of DALI: the functional operators, its types, and the class Pipeline."""

    fn: Any
    types: Any
    pipeline: Any


def load_dali() -> Dali:
    """Raises MissingExtraError where DALI is not installed, or older than 2.3."""
    try:
        import nvidia.dali as dali
        from nvidia.dali import fn, types
    except (ImportError, OSError) as error:  # OSError: a library that does not fit this system
        raise MissingExtraError("NVIDIA DALI", "dali", "readers.dali") from error
    if tuple(int(part) for part in dali.__version__.split(".")[:2]) < _OLDEST:
        found = f"DALI from 2.3 on (found {dali.__version__})"
        raise MissingExtraError(found, "dali", "readers.dali")
    return Dali(fn, types, dali.Pipeline)


def load_torch_iterator() -> Any:
    """DALI's iterator that gives torch tensors. Raises MissingExtraError."""
    load_dali()
    try:
        import torch  # noqa: F401  the plug-in below would only say that a module is missing
    except ImportError as error:
        raise MissingExtraError("torch", "torch", "DaliLoader(output='torch')") from error
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    return DALIGenericIterator
