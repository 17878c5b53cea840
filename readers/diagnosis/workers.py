"""Items and batches of data sets, made in workers as those of a DataLoader are."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from cache.errors import PipelineError

__all__ = ["batches_of", "first_of"]

_TIMEOUT = 120.0  # seconds after which a worker that gives nothing is taken to hang, if the loader does not say
_WORKER_OPTIONS = ("worker_init_fn", "multiprocessing_context")


def first_of(loader: DataLoader[Any], data: Any, indices: Sequence[Any] | None) -> Iterator[Any]:
    """The items of `data` that have these indices, or all if it is a stream; made in a worker of the loader's kind, one
    after the other, where it has workers, and in this process where they cannot leave one."""
    done = 0
    if loader.num_workers:
        options = {name: getattr(loader, name) for name in _WORKER_OPTIONS}
        items = batches_of(
            DataLoader, loader, data, batch_size=None, sampler=indices, num_workers=1, prefetch_factor=1,
            collate_fn=_sealed, **options,
        )  # fmt: skip
        try:
            for sealed in items:
                if sealed is None:
                    break
                yield pickle.loads(sealed)
                done += 1
            else:
                return
        finally:
            items.close()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    try:
        yield from itertools.islice(data, done, None) if indices is None else (data[index] for index in indices[done:])
    finally:
        torch.set_num_threads(threads)


def batches_of(kind: Any, loader: DataLoader[Any], data: Any, **options: Any) -> Generator[Any, None, None]:
    """The batches of a loader of class `kind` with these options, and the timeout of `loader`; closing ends workers.

    Raises PipelineError where they give no batch for so long.
    """
    timeout = (loader.timeout or _TIMEOUT) if loader.num_workers else 0
    iterator = iter(kind(data, timeout=timeout, **options))
    try:
        yield from iterator
    except RuntimeError as error:
        if "timed out after" in str(error):
            raise PipelineError(
                f"the workers of the DataLoader gave no batch for {timeout:g} s: they wait for something that does not "
                f"come, or need a longer timeout= of the loader"
            ) from error
        raise
    finally:
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()


def _sealed(item: Any) -> bytes | None:
    """An item as bytes, so that its tensors are not a file descriptor each; None if that is not possible."""
    try:
        return pickle.dumps(item, pickle.HIGHEST_PROTOCOL)
    except Exception:  # whatever the classes of the user raise
        return None
