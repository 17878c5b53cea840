"""Fill a cache before, or ahead of, those who read from it.

Blocks of samples are read together from the source, brought into the form that is kept, and stored. What is there
already is passed over, so several processes and threads may fill the same cache. Each process starts at its own place
and goes on from there; where it meets another it leaves that part to it and goes on elsewhere, so that little is read
twice, however many they are and whenever they begin.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from cache.forks import renewed_event, tell_after_fork
from cache.node import usable_cpus
from cache.ranks import detect_ranks
from readers.cached.shelf import Shelf
from readers.errors import BadSampleError, DamagedSampleError, UnknownNameError
from readers.order import Order
from readers.sample import Buffer, Reader

__all__ = ["BLOCK_SAMPLES", "FillAhead", "prefill"]

BLOCK_SAMPLES = 64
_LEAST_SAMPLES, _BLOCKS = 4, 256
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
    blocks = list(_blocks(shelf, order, epoch))
    walk = _Walk(len(blocks), _start(len(blocks), shelf.store.stats().users))
    done = [0, 0]
    lock = threading.Lock()

    def fill() -> int:
        samples = 0
        while (number := walk.next()) is not None:
            block = blocks[number]
            filled = [_fill_block(base, shelf, block, name) for name in shelf.slots.fields]
            if any(met for _, met in filled):
                walk.leave()
            samples += len(block)
            if progress is not None:
                with lock:
                    done[0] += len(block)
                    done[1] += sum(stored for stored, _ in filled)
                    progress(*done)
        return samples

    from concurrent.futures import ThreadPoolExecutor  # loaded only where it is used

    count = threads or usable_cpus()
    with ThreadPoolExecutor(count, thread_name_prefix="packer-fill") as pool:
        try:
            futures = [pool.submit(fill) for _ in range(count)]
            return sum(future.result() for future in futures)
        finally:
            walk.end()


class _Walk:
    """In which order the threads of one process take `count` blocks: one by one from `start` on, or from elsewhere."""

    def __init__(self, count: int, start: int) -> None:
        self._open = bytearray(b"\1" * count)
        self._at = start
        self._lock = threading.Lock()

    def next(self) -> int | None:
        """The next block that nobody here has taken, None after the last."""
        with self._lock:
            number = self._open.find(1, self._at)
            if number < 0:
                number = self._open.find(1)
            if number < 0:
                return None
            self._open[number] = 0
            self._at = number + 1
            return number

    def leave(self) -> None:
        """Another process is at work here."""
        with self._lock:
            self._at = random.randrange(len(self._open))

    def end(self) -> None:
        """There is no next block."""
        with self._lock:
            self._open = bytearray(len(self._open))


def _start(blocks: int, users: int) -> int:
    """This rank's share; without ranks the front, or any place where others use the cache too."""
    ranks = detect_ranks()
    if ranks.local_world_size > 1:
        return blocks * ranks.local_rank // ranks.local_world_size
    return random.randrange(blocks) if users > 1 and blocks else 0


class FillAhead:
    """A thread that fills in the order of an epoch; holds no reference to the reader, and ends with it.

    Where several ranks of a node fill, each takes every so-many-th block.
    """

    def __init__(self, base: Reader, shelf: Shelf, order: Order, epoch: int, start: int) -> None:
        self._stopped = threading.Event()
        self.filled = 0
        self.error: BaseException | None = None
        tell_after_fork(self)
        self._thread = threading.Thread(
            target=self._run, args=(base, shelf, order, epoch, start), name="packer-fill-ahead", daemon=True
        )
        self._thread.start()

    def after_fork(self) -> None:
        """In a forked child, which has no such thread."""
        self._stopped = renewed_event(self._stopped)

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
    # A small set is cut into smaller ones, so that several processes find something to do.
    size = max(_LEAST_SAMPLES, min(BLOCK_SAMPLES, (shelf.slots.stop - shelf.slots.start) // _BLOCKS))
    if order is None:
        for run in shelf.choice.kept():
            yield from (run[at : at + size] for at in range(0, len(run), size))
        return
    for first in range(0, len(order), size):
        positions = np.arange(first, min(first + size, len(order)), dtype=np.int64)
        indices = order.indices(epoch, positions)
        yield indices[shelf.choice.mask(indices)]


def _fill_block(base: Reader, shelf: Shelf, block: _Ints, name: str) -> tuple[int, bool]:
    """Bytes stored of a block, and whether another process has filled some of it."""
    if not shelf.has_room:
        return 0, False
    missing = shelf.missing(block, name)
    met = len(missing) < len(block)
    if name != "image":
        missing = missing[base.sizes(name)[missing] > 0]  # a sample may lack a field
    if not len(missing):
        return 0, met
    stored = left = 0
    for index, data in zip(missing.tolist(), _read(base, missing, name), strict=True):
        if data is None:
            continue
        try:
            form = shelf.form(name, data)
        except _SAMPLE_ERRORS:
            continue
        if shelf.put(index, name, form):
            stored += len(form)
        else:
            left += 1
    return stored, met or (left > 0 and len(shelf.missing(missing, name)) < left)


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
