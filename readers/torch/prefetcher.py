"""Batches of any loader, copied to a device while the training step runs.

    loader's thread: next batch ──► pin ──► copy, on a separate stream ──► queue of `prefetch` batches ──► training

Pinned memory makes the copy asynchronous; the thread pins batches that are not pinned yet. An event marks the end of
the copy: the stream of the training loop waits for it on the device, and every tensor is recorded on that stream, so
that its memory is not reused too early (`readers.decode.device`). Source tensors are kept until the copy is done.

The idea is from TorchTNT's CudaDataPrefetcher.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from readers.decode.device import DecodeStream, Ready
from readers.loop import Ahead, Stopped

_ENDLESS = sys.maxsize


class DevicePrefetcher:
    """Iterate over the batches of a loader on a device; the next batches are copied meanwhile.

        loader = DevicePrefetcher(DataLoader(dataset, 256, num_workers=8, pin_memory=True), "cuda")
        for images, labels in loader:       # on the GPU
            ...

    loader: any iterable of batches. Tensors in tuples, lists, mappings, named tuples, dataclasses and PackedSequences
        are copied; everything else is returned unchanged.
    device: target device. On the CPU and devices other than CUDA a thread makes batches ahead and copies them
        synchronously; a loader without workers then works while the step runs.
    prefetch: batches that wait on the device, besides the one in use.

    `len`, `set_epoch` and all other attributes are the loader's: `sampler`, `dataset`, `batch_size`, …. A loader that
    has `state_dict` and `load_state_dict`, such as torchdata's StatefulDataLoader, is resumed exactly: its state is
    taken after each batch, and `state_dict` returns the state after the batch returned last, not after those made
    ahead. A plain DataLoader has no state; use `EpochSampler.state_after`.

    A loop begins with its first batch. Leaving it ends the thread after its current batch; a new loop ends the loop
    before it, which then raises RuntimeError. An error of the loader is raised after the batches before it.
    """

    def __new__(cls, loader: Iterable[Any], *args: Any, **options: Any) -> DevicePrefetcher:
        # Frameworks look for the methods on the class, so only the class for loaders with a state defines them.
        stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        return super().__new__(_Stateful if stateful and cls is DevicePrefetcher else cls)

    def __init__(self, loader: Iterable[Any], device: torch.device | str, *, prefetch: int = 2) -> None:
        if prefetch < 1:
            raise ValueError(f"prefetch is at least 1, not {prefetch}")
        from readers.loader.loader import find_device

        self.loader, self.device, self.prefetch = loader, find_device(device), prefetch
        self._stream = DecodeStream(self.device)  # one for all loops: torch reserves the memory of a stream for it
        self._running: weakref.ref[_Iteration] | None = None
        self._handed_out: Any = None  # state after the batch returned last; the loader may be ahead of it

    def __iter__(self) -> Iterator[Any]:
        return _Iteration(self)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "loader" or name.startswith("__"):  # not set yet while unpickling or copying
            raise AttributeError(name)
        return getattr(self.loader, name)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the loader, or else of its samplers, for the next loop; ends a loop under way."""
        self._end()
        self._handed_out = None
        loader: Any = self.loader
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
            return
        batches = getattr(loader, "batch_sampler", None)
        samplers: list[Any] = [getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)]
        for sampler in samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
                return

    def _begin(self, iteration: _Iteration) -> None:
        self._end()
        self._running = weakref.ref(iteration)

    def _end(self) -> None:
        """End the loop under way."""
        running = self._running() if self._running is not None else None
        if running is not None:
            running.close()


class _Stateful(DevicePrefetcher):
    """A prefetcher over a loader with a state."""

    def state_dict(self) -> Any:
        """The loader's state after the batch returned last."""
        return self.loader.state_dict() if self._handed_out is None else copy.deepcopy(self._handed_out)  # type: ignore[attr-defined]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next loop at the position of a state; ends a loop under way."""
        self._end()
        self._handed_out = None
        self.loader.load_state_dict(state)  # type: ignore[attr-defined]


class _Prepared(NamedTuple):
    """A batch on the device. tensors: its tensors, usable after `ready`. state: the loader's, after this batch."""

    batch: Any
    tensors: list[torch.Tensor]
    ready: Ready
    state: Any


class _Source:
    """The thread's work. It refers neither to the prefetcher nor to the iterator, so dropping these stops it."""

    def __init__(self, loader: Any, device: torch.device, stream: DecodeStream, stateful: bool) -> None:
        self._iterator, self._device, self._stream = iter(loader), device, stream
        self._state: Callable[[], Any] | None = loader.state_dict if stateful else None
        self._copied: list[torch.Tensor] = []  # source tensors of the copies under way
        self._first = [self._next()]

    def make(self, step: int) -> _Prepared:
        """The next batch. Raises what the loader raises.

        The first batch was taken by the calling thread, which waits for it anyway: a loader looks at the call stack
        when its loop begins.
        """
        batch, state = self._first.pop() if self._first else self._next()
        tensors: list[torch.Tensor] = []
        copied: list[torch.Tensor] = []

        def move(tensor: Any) -> Any:
            copied.append(tensor)
            tensors.append(tensor.to(self._device, non_blocking=self._stream.stream is not None))
            return tensors[-1]

        with self._on_device():
            if self._stream.stream is not None:
                batch = _mapped(batch, _pinned)
            with self._stream.decoding():
                moved = _mapped(batch, move)
                self._copied = copied
                return _Prepared(moved, tensors, self._stream.mark(), state)

    def close(self) -> None:
        """Wait for the copies and drop the loader's iterator, after the thread has ended."""
        self._stream.finish()
        self._copied, self._iterator, self._state = [], iter(()), None
        self._first.clear()

    def _next(self) -> tuple[Any, Any]:
        batch = next(self._iterator)
        return batch, None if self._state is None else copy.deepcopy(self._state())

    def _on_device(self) -> AbstractContextManager[Any]:
        """Make the device current: pinning memory creates a context on the thread's current device."""
        return nullcontext() if self._stream.stream is None else torch.cuda.device(self._device)


class _Iteration(Iterator[Any]):
    """One loop; it begins with its first batch."""

    def __init__(self, prefetcher: DevicePrefetcher) -> None:
        self._prefetcher = prefetcher
        self._ahead: Ahead[_Prepared] | None = None
        self._begun = self._finished = False

    def __next__(self) -> Any:
        if self._finished:
            raise StopIteration
        prefetcher = self._prefetcher
        try:
            if not self._begun:
                self._begin()
            if self._ahead is None:
                raise Stopped("this loop was ended by another loop over this loader, or by setting its state or epoch")
            made = self._ahead.take()
        except StopIteration:
            self._finished, prefetcher._handed_out = True, None
            self.close()
            raise
        except BaseException as error:
            self._finished = not isinstance(error, Stopped)
            self.close()
            raise
        DecodeStream.hand_over(made.tensors, made.ready)
        prefetcher._handed_out = made.state
        return made.batch

    def close(self) -> None:
        """End the thread."""
        self._begun = True
        if self._ahead is not None:
            self._ahead = None
            self._finalizer()

    def _begin(self) -> None:
        prefetcher = self._prefetcher
        self._begun = True
        prefetcher._begin(self)
        source = _Source(prefetcher.loader, prefetcher.device, prefetcher._stream, isinstance(prefetcher, _Stateful))
        self._ahead = Ahead(source.make, _ENDLESS, prefetcher.prefetch, "packer-prefetcher")
        self._finalizer = weakref.finalize(self, _end, self._ahead, source)


def _end(ahead: Ahead[_Prepared], source: _Source) -> None:
    ahead.stop()
    source.close()


def _pinned(tensor: Any) -> Any:
    """The tensor in page-locked memory, if it can be pinned."""
    ordinary = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return tensor.pin_memory() if ordinary and not tensor.is_pinned() else tensor


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply `function` to each tensor of a batch; containers keep their types."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, PackedSequence):  # batch_sizes stay on the CPU
        orders = (value.sorted_indices, value.unsorted_indices)
        indices = [None if order is None else function(order) for order in orders]
        return PackedSequence(function(value.data), value.batch_sizes, *indices)
    if isinstance(value, tuple):
        items = [_mapped(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return type(value)(_mapped(item, function) for item in value)
    if isinstance(value, Mapping):
        return _with(value, {key: _mapped(item, function) for key, item in value.items()})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        copied = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(copied, field.name, _mapped(getattr(value, field.name), function))
        return copied
    return value


def _with(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the same kind with other values."""
    if type(mapping) is dict:
        return items
    copied: Any = copy.copy(mapping)
    if hasattr(copied, "update"):  # keeps a subclass's extras, such as a default factory
        copied.update(items)
        return copied
    return type(mapping)(items)  # type: ignore[call-arg]
