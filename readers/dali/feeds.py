"""A running pipeline behind one small interface, as torch tensors or NumPy arrays."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from readers.dali.backend import load_torch_iterator

__all__ = ["Feed", "Output", "empty_batch", "open_feed"]

Output: TypeAlias = Literal["torch", "numpy"]


class Feed(Protocol):
    """Batches of one pipeline, epoch after epoch. Dropping it ends the pipeline and its processes."""

    def take(self) -> tuple[Any, Any]:
        """(images, labels [n]) of the next batch, which stay as they are. Raises StopIteration at the end of an epoch,
        and whatever DALI does."""

    def reset(self) -> None:
        """Begin the next epoch; only after StopIteration."""

    def here(self) -> AbstractContextManager[Any]:
        """Within this, `take` in another thread gives images as it would in the one that calls `here`."""


class _TorchFeed:
    """Through `nvidia.dali.plugin.pytorch.DALIGenericIterator`. Images lie where the pipeline has them, labels int64 on
    the CPU."""

    def __init__(self, pipeline: Any) -> None:
        iterator = load_torch_iterator()
        self._device_id = pipeline.device_id
        self._iterator = iterator([pipeline], ["image", "label"], size=-1, prepare_first_batch=False)

    def take(self) -> tuple[Any, Any]:
        (batch,) = next(self._iterator)
        return batch["image"], batch["label"].flatten()

    def reset(self) -> None:
        self._iterator.reset()

    def here(self) -> AbstractContextManager[Any]:
        if self._device_id is None:
            return nullcontext()
        import torch

        # DALI makes the stream that is current wait for its images, and each thread has a current one of its own.
        stream: AbstractContextManager[Any] = torch.cuda.stream(torch.cuda.current_stream(self._device_id))
        return stream


class _ArrayFeed:
    """Straight from the pipeline, as copies in this process's own memory, wherever the pipeline is."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline

    def take(self) -> tuple[Any, Any]:
        images, labels = (np.array(output.as_cpu().as_array()) for output in self._pipeline.run())
        return images, labels.ravel()

    def reset(self) -> None:
        self._pipeline.reset()

    def here(self) -> AbstractContextManager[Any]:
        return nullcontext()


def open_feed(pipeline: Any, output: Output) -> Feed:
    """Start a pipeline with the outputs (images, labels)."""
    return _TorchFeed(pipeline) if output == "torch" else _ArrayFeed(pipeline)


def empty_batch(output: Output, shape: tuple[int, ...], dtype: str, device: str) -> tuple[Any, Any]:
    """A batch without samples, as the feed would give it. device: as torch names it."""
    if output == "numpy":
        return np.empty((0, *shape), dtype), np.empty(0, np.int64)
    import torch

    return torch.empty((0, *shape), dtype=getattr(torch, dtype), device=device), torch.empty(0, dtype=torch.int64)
