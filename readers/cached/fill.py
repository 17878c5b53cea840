"""Fill a cache before, or ahead of, those who read from it.

Blocks of samples are read together from the source, brought into the form that is kept, and stored. What is there
already is passed over, so several processes and threads may fill the same cache: each starts at its own place.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from cache.node import usable_cpus
from cache.ranks import detect_ranks
from readers.cached.shelf import Shelf
from readers.errors import BadSampleError, DamagedSampleError, UnknownNameError
from readers.order import Order
from readers.sample import Buffer, Reader

__all__ = ["BLOCK_SAMPLES", "FillAhead", "prefill"]

BLOCK_SAMPLES = 64
_AHEAD_SAMPLES = 16
_SAMPLE_ERRORS = (BadSampleError, DamagedSampleError, UnknownNameError)
_JOIN_SECONDS = 10.0
_NICE = 10
_Ints = npt.NDArray[np.int64]


def prefill(
    base: Reader,
    shelf: Shelf,
    threads: int | None = None,
    order: Order | None = None,
    epoch: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """See `CachedReader.prefill`."""
    if threads is not None and threads < 1:
        raise ValueError(f"threads is at least 1, not {threads}")
    if shelf.store is None:
        return 0
    blocks = _turned(list(_blocks(shelf, order, epoch)))
    done = [0, 0]
    lock = threading.Lock()

    def fill(block: _Ints) -> int:
        stored = sum(_fill_block(base, shelf, block, name) for name in shelf.slots.fields)
        if progress is not None:
            with lock:
                done[0] += len(block)
                done[1] += stored
                progress(*done)
        return len(block)

    from concurrent.futures import ThreadPoolExecutor  # loaded only where it is used

    with ThreadPoolExecutor(threads or usable_cpus(), thread_name_prefix="packer-fill") as pool:
        return sum(pool.map(fill, blocks))


class FillAhead:
    """A thread that fills in the order of an epoch; holds no reference to the reader, and ends with it.

    Where several ranks of a node fill, each takes every so-many-th block.
    """

    def __init__(self, base: Reader, shelf: Shelf, order: Order, epoch: int, start: int) -> None:
        self._stopped = threading.Event()
        self.filled = 0
        self.error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(base, shelf, order, epoch, start), name="packer-fill-ahead", daemon=True
        )
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> bool:
        """Until it has ended; returns whether it has. Raises what reading the source raised."""
        self._thread.join(seconds)
        if self.error is not None:
            raise self.error
        return not self._thread.is_alive()

    def stop(self) -> None:
        """End it; a block that is being read is finished first."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    def _run(self, base: Reader, shelf: Shelf, order: Order, epoch: int, start: int) -> None:
        _be_nice()
        ranks = detect_ranks()
        step = _AHEAD_SAMPLES * ranks.local_world_size
        try:
            for first in range(start + _AHEAD_SAMPLES * ranks.local_rank, len(order), step):
                if self._stopped.is_set() or not shelf.has_room:
                    return
                positions = np.arange(first, min(first + _AHEAD_SAMPLES, len(order)), dtype=np.int64)
                indices = order.indices(epoch, positions)
                block = np.unique(indices[shelf.choice.mask(indices)])
                for name in shelf.slots.fields:
                    _fill_block(base, shelf, block, name)
                self.filled += len(block)
        except BaseException as error:
            self.error = error


def _blocks(shelf: Shelf, order: Order | None, epoch: int) -> Iterator[_Ints]:
    """The samples that have a place, in blocks."""
    if order is None:
        for run in shelf.choice.kept():
            yield from (run[at : at + BLOCK_SAMPLES] for at in range(0, len(run), BLOCK_SAMPLES))
        return
    for first in range(0, len(order), BLOCK_SAMPLES):
        positions = np.arange(first, min(first + BLOCK_SAMPLES, len(order)), dtype=np.int64)
        indices = order.indices(epoch, positions)
        yield indices[shelf.choice.mask(indices)]


def _turned(blocks: list[_Ints]) -> list[_Ints]:
    """The blocks from this rank's share on."""
    ranks = detect_ranks()
    start = len(blocks) * ranks.local_rank // ranks.local_world_size
    return blocks[start:] + blocks[:start]


def _fill_block(base: Reader, shelf: Shelf, block: _Ints, name: str) -> int:
    """Bytes stored of a block."""
    if not shelf.has_room:
        return 0
    missing = shelf.missing(block, name)
    if name != "image":
        missing = missing[base.sizes(name)[missing] > 0]  # a sample may lack a field
    if not len(missing):
        return 0
    stored = 0
    for index, data in zip(missing.tolist(), _read(base, missing, name), strict=True):
        if data is None:
            continue
        try:
            form = shelf.form(name, data)
        except _SAMPLE_ERRORS:
            continue
        if shelf.put(index, name, form):
            stored += len(form)
    return stored


def _read(base: Reader, indices: _Ints, name: str) -> list[Buffer | None]:
    """The payloads; None for what cannot be read, which is for the consumer to hear of."""
    try:
        return list(base.read_many(indices, name))
    except _SAMPLE_ERRORS:
        return [_read_one(base, index, name) for index in indices.tolist()]


def _read_one(base: Reader, index: int, name: str) -> Buffer | None:
    try:
        return base.read(index, name)
    except _SAMPLE_ERRORS:
        return None


def _be_nice() -> None:
    """Let the threads that decode and train go first; on Linux priorities are by thread."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    except (AttributeError, OSError):
        pass
