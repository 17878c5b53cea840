"""Indices for a DataLoader, in an order that can be resumed exactly on any number of ranks and workers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch.utils.data import DistributedSampler, get_worker_info

from cache.ranks import rank_and_world_size
from readers.decode import DECODER
from readers.errors import TrainerError
from readers.order import Order, ResumeToken, Schedule
from readers.order.base import Int64s
from readers.order.schedule import Tail
from readers.sample import Reader
from readers.torch.dataset import ImageDataset
from readers.torch.place import Place
from readers.trainers import LIGHTNING, Trainer, calling_package, check_epoch, find_trainer

__all__ = ["EpochSampler", "Start"]

_BLOCK = 1024
_STATEFUL = "StatefulDataLoader(dataset, batch_size, sampler=sampler, …)  of torchdata.stateful_dataloader"
_TO_ACCELERATE = "EpochSampler(order, dataset, rank=0, world_size=1)"


class Start(NamedTuple):
    """Where an iteration begins, and the order it has: after a resume, the one that the epoch began with."""

    epoch: int
    cursor: int
    order: Order


class Follower(Protocol):
    """A stream of this sampler's samples: it walks through the epochs in other processes, and knows where they are."""

    @property
    def start(self) -> Start: ...

    def set_epoch(self, epoch: int) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class EpochSampler(DistributedSampler[int]):
    """The samples of one rank, epoch after epoch: each iteration is the next epoch.

    Ranks take positions in turn, so after k samples on every rank of W the first k x W positions of the epoch are done:
    that number, and no more, is what a resume needs. rank and world_size: when not given, found in torch.distributed,
    torchrun, Slurm or MPI each time an iteration begins. tail: "drop_last", "pad" or "exact" (see
    `readers.order.Schedule`).

    Stateful in the sense of torchdata: StatefulDataLoader saves and restores it. A plain DataLoader asks for more
    indices than it has handed out; for that one, `state_after` names a place by the samples that training has seen.
    source: a reader, or the `ImageDataset` that the indices are for. It lets the state say which set it belongs to; a
    data set also reports its bad samples as a warning, when the epoch after them begins.

    It is a DistributedSampler, so frameworks that share other samplers out among the ranks leave this one alone. Those
    that share it out all the same get a TrainerError with the line to write.
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
        self.tail: Tail = tail
        self._given = (rank, world_size)
        self._found, self._carried = rank_and_world_size(rank, world_size, order.groups), False
        reader = source.reader if isinstance(source, ImageDataset) else source
        self._dataset = source if isinstance(source, ImageDataset) else None
        self._fingerprint = reader.fingerprint if reader is not None else ""
        self._samples = len(reader) if reader is not None else len(order)
        self._spec: tuple[Order, dict[str, str | int | float]] | None = None
        # Where the next iteration begins, whether a state has put it there, and the iteration that was begun last.
        self._next = Start(0, 0, order)
        self._loaded = False
        self._refused: TrainerError | None = None
        self._current: _Iteration | None = None
        self._stream: Follower | None = None
        self.schedule_of(self._next)

    # --- where it is --------------------------------------------------------------------------------------------
    @property
    def rank(self) -> int:  # type: ignore[override]
        return self.find_rank()

    def find_rank(self) -> int:
        return self._ranks()[0]

    @property
    def world_size(self) -> int:
        return self._ranks()[1]

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """The world size, as DistributedSampler calls it."""
        return self.world_size

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """The epoch of the iteration under way, or else of the next one."""
        current = self._current
        if self._stream is None and current is not None and current.finished:
            return self._next.epoch
        return self.start.epoch

    @property
    def start(self) -> Start:
        """Where the iteration that was begun last began, or else the next one begins."""
        if self._stream is not None:
            return self._stream.start
        return self._next if self._current is None else self._current.start

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be of `epoch`: from where a state that was loaded has put it, or else from its start.

        Raises TrainerError where it is a framework that calls, and would leave the place of a state unused.
        """
        if epoch < 0:
            raise ValueError(f"an epoch is 0 or more, not {epoch}")
        if self._stream is not None:
            return self._stream.set_epoch(epoch)
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused
        check_epoch(epoch, self._next.epoch if self._loaded else None)
        current = self._current
        if calling_package() in LIGHTNING and current is not None and current.start.epoch == epoch:
            return None  # it names an epoch after it has begun it
        if self._next.epoch != epoch:
            self._put(Start(epoch, 0, self.order))
        return None

    def __len__(self) -> int:
        """Samples of a whole epoch on this rank, also in an epoch that was resumed; see `left`."""
        return self.schedule_of(Start(0, 0, self.order)).samples()

    @property
    def left(self) -> int:
        """Samples of the iteration under way, or else of the next one, that have not been handed out on this rank."""
        current = self._current
        if current is None or current.finished:
            return self.schedule_of(self._next).samples(self._next.cursor)
        return current.left

    def __iter__(self) -> Iterator[int]:
        """The next epoch; it begins when its first index is asked for."""
        return _Iteration(self)

    # --- state --------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """The place after the last index that was handed out; after the last of an iteration, the next epoch.

        Raises TrainerError where a DataLoader has asked for indices that training has not seen.
        """
        current = self._current
        if self._stream is not None:
            return dict(self._stream.state_dict()["sampler"])
        if current is not None:
            self._check_account(current)
        return self.token(self._next if current is None or current.finished else current.place)

    def state_after(self, samples: int) -> dict[str, Any]:
        """The place after `samples` samples, on every rank, of the iteration that was begun last."""
        return self.token(self.place_after(self.start, samples))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration begin there. Raises ResumeError for another set or another kind of order."""
        if self._stream is not None:
            return self._stream.load_state_dict(state)
        self._put(self.start_of(state))
        if self._next.cursor and not self.schedule_of(self._next).steps(self._next.cursor):
            self._next = Start(self._next.epoch + 1, 0, self.order)
        self._loaded = True
        return None

    # --- for the iterations, and for ImageStream ------------------------------------------------------------------
    def schedule_of(self, start: Start) -> Schedule:
        return Schedule(start.order, 1, *self._ranks(), self.tail)

    def place_after(self, start: Start, samples: int) -> Start:
        schedule = self.schedule_of(start)
        step = min(samples, schedule.steps(start.cursor)) - 1
        return start._replace(cursor=schedule.cursor_after(step, start.cursor)) if step >= 0 else start

    def start_of(self, state: Mapping[str, Any]) -> Start:
        """What a state names; its seed counts from now on. Raises ResumeError."""
        token = ResumeToken.from_dict(state)
        spec = self.order.spec()
        token.check(fingerprint=self._fingerprint, order_spec=spec, decoder=DECODER, samples=self._samples)
        self.order = self.order.with_seed(token.seed)
        return Start(token.epoch, token.cursor, token.resumed(self.order))

    def token(self, start: Start) -> dict[str, Any]:
        if self._spec is None or self._spec[0] is not start.order:
            self._spec = start.order, start.order.spec()
        seed, spec = start.order.seed, self._spec[1]
        token = ResumeToken(seed, start.epoch, start.cursor, self._fingerprint, DECODER, spec, self._samples)
        return token.to_dict()

    def begun(self, iteration: _Iteration) -> Start:
        """Where an iteration begins whose first index is asked for now. Raises TrainerError."""
        trainer = find_trainer()
        trainer.check_sharing(self.world_size, _TO_ACCELERATE)
        if trainer.epoch is not None and trainer.epoch != self._next.epoch:
            check_epoch(trainer.epoch, self._next.epoch if self._loaded else None, trainer.name)
            self._put(Start(trainer.epoch, 0, self.order))
        start = self._next
        self._check_batches(start, trainer)
        self._report()
        self.follow(iteration, start, trainer)
        return start

    def restored(self, iteration: _Iteration, start: Start) -> Start:
        """The same for an iteration that begins where a state says."""
        trainer = find_trainer()
        if trainer.at_end and trainer.epoch == start.epoch + 1:
            start = Start(start.epoch + 1, 0, self.order)
        trainer.check_sharing(self.world_size, _TO_ACCELERATE)
        self._check_batches(start, trainer)
        self.follow(iteration, start, trainer)
        return start

    def places(self, start: Start) -> Iterator[Place]:
        """The samples of this rank from there to the end of the epoch."""
        for positions in self._positions(start):
            indices = start.order.indices(start.epoch, positions)
            for index, position in zip(indices.tolist(), positions.tolist(), strict=True):
                yield Place(index, start.order.seed, start.epoch, position)

    def follow_stream(self, stream: Follower) -> None:
        """From now on the stream says where this sampler is."""
        self._stream = stream

    def follow(self, iteration: _Iteration, start: Start, trainer: Trainer) -> None:
        """This iteration is the one under way; the next one is the next epoch."""
        iteration.trainer, self._current, self._loaded = trainer, iteration, False
        self._next = Start(start.epoch + 1, 0, self.order)

    # --- inside -------------------------------------------------------------------------------------------------
    def _positions(self, start: Start) -> Iterator[Int64s]:
        """The positions of this rank from the cursor on, some at a time."""
        schedule, first = self.schedule_of(start), start.cursor
        world_size = schedule.world_size
        whole = (len(schedule.order) - first) // world_size
        for step in range(0, whole, _BLOCK):
            steps = np.arange(min(_BLOCK, whole - step), dtype=np.int64)
            yield schedule.positions(step, first) + steps * world_size
        if schedule.steps(first) > whole:
            yield schedule.positions(whole, first)

    def _ranks(self) -> tuple[int, int]:
        """As given, or as the launcher says now; in a spawned worker of a DataLoader, as it said where that started."""
        if self._given[0] is None and not (self._carried and get_worker_info() is not None):
            self._found = rank_and_world_size(None, None, self.order.groups)
        return self._found

    def _report(self) -> None:
        told = self._dataset.report() if self._dataset is not None and self._current is not None else ""
        if told and self._current is not None:
            warnings.warn(f"epoch {self._current.start.epoch}: {told}", stacklevel=4)

    def _check_batches(self, start: Start, trainer: Trainer) -> None:
        left = trainer.batches_of(self.schedule_of(start).samples(start.cursor))
        try:
            trainer.check_resume(left, trainer.batches_of(len(self)), _STATEFUL)
        except TrainerError as error:
            if not trainer.asks_ahead:
                raise
            self._refused = error  # Lightning hides what is raised here; it names the epoch before it takes a batch

    def _put(self, start: Start) -> None:
        self._next, self._current, self._loaded = start, None, False

    def _check_account(self, current: _Iteration) -> None:
        if current.trainer.asks_ahead and calling_package() != "torchdata":
            raise TrainerError(
                f"the DataLoader has asked for indices that training has not seen, so this sampler cannot say where "
                f"training is; write  sampler.state_after(samples this rank has trained on)  or  {_STATEFUL}"
            )

    def __getstate__(self) -> dict[str, Any]:
        self._ranks()
        return {**self.__dict__, "_current": None, "_carried": True}


class _Iteration(Iterator[int]):
    """The indices of one epoch, or of the rest of one. It begins with its first index, or with a state.

    torchdata keeps the state of this iterator, and makes two of them for the state of an epoch that is over: one that
    has nothing left, and the next epoch.
    """

    def __init__(self, sampler: EpochSampler) -> None:
        self._sampler = sampler
        self._start: Start | None = None
        self._indices: Iterator[int] | None = None
        self._taken, self.finished = 0, False
        self.trainer = Trainer()

    @property
    def start(self) -> Start:
        return self._sampler._next if self._start is None else self._start

    @property
    def place(self) -> Start:
        """After the last index that was handed out."""
        return self._sampler.place_after(self.start, self._taken)

    @property
    def left(self) -> int:
        return self._sampler.schedule_of(self.start).samples(self.start.cursor) - self._taken

    def __next__(self) -> int:
        if self._indices is None:
            if self._start is None:
                self._start = self._sampler.begun(self)
            self._indices = self._sampler.places(self._start)
        try:
            index = next(self._indices)
        except StopIteration:
            self.finished = True
            raise
        self._taken += 1
        return index

    def state_dict(self) -> dict[str, Any]:
        """The place in this iteration, also at its end."""
        return self._sampler.token(self.place)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, in that epoch only. Raises ResumeError."""
        self._start = self._sampler.restored(self, self._sampler.start_of(state))
