"""Indices for a DataLoader, in an order that can be resumed exactly on any number of ranks and workers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Sampler

from cache.ranks import rank_and_world_size
from readers.decode import DECODER
from readers.order import Order, ResumeToken, Schedule
from readers.order.base import Int64s
from readers.order.schedule import Tail
from readers.sample import Reader
from readers.torch.dataset import ImageDataset
from readers.torch.place import Place

__all__ = ["EpochSampler"]

_BLOCK = 1024


class _Start(NamedTuple):
    """Where an iteration begins, and the order it has: after a resume, the one that the epoch began with."""

    epoch: int
    cursor: int
    order: Order


class EpochSampler(Sampler[int]):
    """The samples of one rank, epoch after epoch: each iteration is the next epoch.

    Ranks take positions in turn, so after k samples on every rank of W the first k x W positions of the epoch are done:
    that number, and no more, is what a resume needs. rank and world_size: found in torch.distributed, torchrun, Slurm
    or MPI when not given. tail: "drop_last", "pad" or "exact" (see `readers.order.Schedule`).

    Stateful in the sense of torchdata: StatefulDataLoader saves and restores it. A plain DataLoader asks for more
    indices than it has handed out; for that one, `state_after` names a place by the samples that training has seen.
    source: a reader, or the `ImageDataset` that the indices are for. It lets the state say which set it belongs to; a
    data set also reports its bad samples as a warning, when the epoch after them begins.
    """

    def __init__(
        self,
        order: Order,
        source: Reader | ImageDataset | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        tail: Tail = "drop_last",
    ) -> None:
        self.order = order
        self.rank, self.world_size = rank_and_world_size(rank, world_size, order.groups)
        self.tail: Tail = tail
        reader = source.reader if isinstance(source, ImageDataset) else source
        self._dataset = source if isinstance(source, ImageDataset) else None
        self._fingerprint = reader.fingerprint if reader is not None else ""
        self._samples = len(reader) if reader is not None else len(order)
        # Where the next iteration begins, and the one that was begun last.
        self._next = _Start(0, 0, order)
        self._current: _Start | None = None
        self._taken, self._finished = 0, False

    @property
    def epoch(self) -> int:
        """The epoch of the iteration under way, or else of the next one."""
        return (self._next if self._finished or self._current is None else self._current).epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration at the start of `epoch`."""
        self._begin_at(_Start(epoch, 0, self.order))

    def join_epoch(self, epoch: int) -> None:
        """Begin the next iteration in `epoch`: where a resume has put it if it is that one, or else at the start."""
        if self._next.epoch != epoch:
            self.set_epoch(epoch)

    def __len__(self) -> int:
        """Samples of the iteration under way, or else of the next one, on this rank."""
        start = self._next if self._finished or self._current is None else self._current
        return self._schedule(start).samples(start.cursor)

    def __iter__(self) -> Iterator[int]:
        self._report()
        start = self._current = self._next
        self._next = _Start(start.epoch + 1, 0, self.order)
        self._taken, self._finished = 0, False
        for positions in self._positions(start):
            indices = start.order.indices(start.epoch, positions)
            for index, position in zip(indices.tolist(), positions.tolist(), strict=True):
                self._taken += 1
                yield Place(index, start.order.seed, start.epoch, position)
        if self._current is start:
            self._finished = True

    def _positions(self, start: _Start) -> Iterator[Int64s]:
        """The positions of this rank from the cursor on, some at a time."""
        schedule, first = self._schedule(start), start.cursor
        whole = (len(schedule.order) - first) // self.world_size
        for step in range(0, whole, _BLOCK):
            steps = np.arange(min(_BLOCK, whole - step), dtype=np.int64)
            yield schedule.positions(step, first) + steps * self.world_size
        if schedule.steps(first) > whole:
            yield schedule.positions(whole, first)

    def state_dict(self) -> dict[str, Any]:
        """The place after the last index that was handed out; after the last of an iteration, the next epoch."""
        return self._token(self._next) if self._finished else self.state_after(self._taken)

    def state_after(self, samples: int) -> dict[str, Any]:
        """The place after `samples` samples, on every rank, of the iteration that was begun last."""
        start = self._current or self._next
        schedule = self._schedule(start)
        step = min(samples, schedule.steps(start.cursor)) - 1
        cursor = schedule.cursor_after(step, start.cursor) if step >= 0 else start.cursor
        return self._token(_Start(start.epoch, cursor, start.order))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration begin there. Raises ResumeError for another set or another kind of order."""
        token = ResumeToken.from_dict(state)
        spec = self.order.spec()
        token.check(fingerprint=self._fingerprint, order_spec=spec, decoder=DECODER, samples=self._samples)
        order = self.order.with_seed(token.seed)
        start = _Start(token.epoch, token.cursor, order.resumed(token.order))
        self.order = order
        self._begin_at(start)

    def _report(self) -> None:
        told = self._dataset.report() if self._dataset is not None and self._current is not None else ""
        if told and self._current is not None:
            warnings.warn(f"epoch {self._current.epoch}: {told}", stacklevel=3)

    def _begin_at(self, start: _Start) -> None:
        self._next, self._current, self._taken, self._finished = start, None, 0, False

    def _token(self, start: _Start) -> dict[str, Any]:
        seed, spec = start.order.seed, start.order.spec()
        token = ResumeToken(seed, start.epoch, start.cursor, self._fingerprint, DECODER, spec, self._samples)
        return token.to_dict()

    def _schedule(self, start: _Start) -> Schedule:
        return Schedule(start.order, 1, self.rank, self.world_size, self.tail)
