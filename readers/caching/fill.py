"""Fill a cache before, or ahead of, its readers.

Blocks of samples are read together from the source, converted to the kept form, and stored. Cached samples are skipped,
so several processes and threads may fill the same cache. Each process starts at a different block; when it meets
another process it continues at a random block, so little is read twice, for any number of processes and start times.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from cache.locks import call_after_fork, copy_event
from cache.node import detect_ranks, usable_cpus
from readers.caching.store import Cached
from readers.order import Order
from readers.reader import SAMPLE_ERRORS, Reader, read_good
from readers.table import Table

_BLOCK_SAMPLES = 64
_LEAST_SAMPLES, _BLOCKS = 4, 256
_AHEAD_SAMPLES = 16
_JOIN_SECONDS = 10.0
_NICE = 10
_Ints = npt.NDArray[np.int64]


def prefill(
    table: Table,
    store: Cached,
    threads: int | None = None,
    order: Order | None = None,
    epoch: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """See `CachedReader.prefill`."""
    if threads is not None and threads < 1:
        raise ValueError(f"threads is at least 1, not {threads}")
    if store.shared is None:
        return 0
    source = _source(table, store)
    blocks = list(_blocks(table, store, order, epoch))
    walk = _Walk(len(blocks), _start(len(blocks), store.shared.stats().users))
    done = [0, 0]
    lock = threading.Lock()

    def fill() -> int:
        samples = 0
        while (number := walk.next()) is not None:
            block = blocks[number]
            filled = [_fill_block(source, store, block, name) for name in store.slots.fields]
            if any(met for _, met in filled):
                walk.leave()
            samples += len(block)
            if progress is not None:
                with lock:
                    done[0] += len(block)
                    done[1] += sum(stored for stored, _ in filled)
                    progress(*done)
        return samples

    from concurrent.futures import ThreadPoolExecutor  # slow to import

    count = threads or usable_cpus()
    with ThreadPoolExecutor(count, thread_name_prefix="packer-fill") as pool:
        try:
            futures = [pool.submit(fill) for _ in range(count)]
            return sum(future.result() for future in futures)
        finally:
            walk.end()


class _Walk:
    """The order in which the threads of one process fill `count` blocks, from block `start` on."""

    def __init__(self, count: int, start: int) -> None:
        self._open = bytearray(b"\1" * count)
        self._at = start
        self._lock = threading.Lock()

    def next(self) -> int | None:
        """The next block that no thread has taken, None after the last."""
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
        """Continue at a random block, because another process fills this part."""
        with self._lock:
            self._at = random.randrange(len(self._open))

    def end(self) -> None:
        """Leave no next block."""
        with self._lock:
            self._open = bytearray(len(self._open))


def _start(blocks: int, users: int) -> int:
    """The block to start at: this rank's share; without ranks the first, or a random one if others use the cache."""
    ranks = detect_ranks()
    if ranks.local_world_size > 1:
        return blocks * ranks.local_rank // ranks.local_world_size
    return random.randrange(blocks) if users > 1 and blocks else 0


class FillAhead:
    """A thread that fills a cache in the order of an epoch; several ranks of a node take blocks in turn.

    It holds no reference to the reader, whose `close` stops it.
    """

    def __init__(self, table: Table, store: Cached, order: Order, epoch: int, start: int) -> None:
        self._stopped = threading.Event()
        self.filled = 0
        self.error: BaseException | None = None
        call_after_fork(self)
        self._thread = threading.Thread(
            target=self._run, args=(table, store, order, epoch, start), name="packer-fill-ahead", daemon=True
        )
        self._thread.start()

    def after_fork(self) -> None:
        """Replace the event in a forked child, which does not have the thread."""
        self._stopped = copy_event(self._stopped)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the thread has ended; returns whether it has. Raises its error of reading the source."""
        self._thread.join(seconds)
        if self.error is not None:
            raise self.error
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Stop after the block that is being read."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    def _run(self, table: Table, store: Cached, order: Order, epoch: int, start: int) -> None:
        _be_nice()
        source = _source(table, store)
        ranks = detect_ranks()
        step = _AHEAD_SAMPLES * ranks.local_world_size
        try:
            for first in range(start + _AHEAD_SAMPLES * ranks.local_rank, len(order), step):
                if self._stopped.is_set() or not store.has_room:
                    return
                positions = np.arange(first, min(first + _AHEAD_SAMPLES, len(order)), dtype=np.int64)
                rows = table.at(order.indices(epoch, positions))
                block = np.unique(rows[store.subset.mask(rows)])
                for name in store.slots.fields:
                    _fill_block(source, store, block, name)
                self.filled += len(block)
        except BaseException as error:
            self.error = error


def _source(table: Table, store: Cached) -> Reader:
    """A reader below the cache with all rows as samples."""
    return Reader(Table(table.columns), store.source)


def _blocks(table: Table, store: Cached, order: Order | None, epoch: int) -> Iterator[_Ints]:
    """The rows that have a slot, in blocks; smaller blocks for a small set, so that all processes get some."""
    size = max(_LEAST_SAMPLES, min(_BLOCK_SAMPLES, len(store.subset) // _BLOCKS))
    if order is None:
        for run in store.subset.kept():
            yield from (run[at : at + size] for at in range(0, len(run), size))
        return
    for first in range(0, len(order), size):
        positions = np.arange(first, min(first + size, len(order)), dtype=np.int64)
        rows = table.at(order.indices(epoch, positions))
        yield rows[store.subset.mask(rows)]


def _fill_block(source: Reader, store: Cached, block: _Ints, name: str) -> tuple[int, bool]:
    """Fill a block; returns the bytes stored, and whether another process has filled a part of the block."""
    if not store.has_room:
        return 0, False
    number, payloads = source.table.number(name), store.slots.payloads
    missing = block[~store.has(payloads.number(block, number))]
    met = len(missing) < len(block)
    if name != "image":
        missing = missing[source.sizes(name)[missing] > 0]  # a sample may lack a field
    if not len(missing):
        return 0, met
    shards = source.table.columns.column("shard")[missing].tolist()
    stored = left = 0
    for row, shard, data in zip(missing.tolist(), shards, read_good(source, missing, name), strict=True):
        if data is None:
            continue
        try:
            converted = store.convert(payloads.number(row, number), data)
        except SAMPLE_ERRORS:
            continue
        if store.put(payloads.number(row, number), shard, converted):
            stored += len(converted)
        else:
            left += 1
    return stored, met or (left > 0 and int((~store.has(payloads.number(missing, number))).sum()) < left)


def _be_nice() -> None:
    """Lower this thread's priority below those that decode and train; on Linux priorities are by thread."""
    with suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
