"""The batches of a data set as a stream: an iterable data set for DataLoader, with a position in shared memory."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from cache.errors import ResumeError, TrainerError
from readers.feed import Start, choose_tail
from readers.torch.dataset import ImageDataset, Place
from readers.torch.sampler import EpochSampler
from readers.trainers import calling_package, check_epoch, find_trainer

__all__ = ["ImageStream"]

_MODULUS = (1 << 62) - 1
_RESTORED = -1
_VERSION, _ITERATION, _CURRENT, _NEXT = 0, 1, slice(2, 4), slice(4, 6)  # columns of the shared position
_PATIENCE_SECONDS = 120.0
_ROWS = 1024  # ranks that share memory are those of one node, and numbered one after the other
_STATEFUL = "StatefulDataLoader(stream, batch_size=None, …)  of torchdata.stateful_dataloader"
_TO_ACCELERATE = "ImageStream(dataset, EpochSampler(order, dataset, rank=0, world_size=1), batch_size)"


class ImageStream(IterableDataset[Any]):
    """Batches of `dataset` in the order of `sampler`: for `DataLoader(stream, batch_size=None, num_workers=…)`.

    drop_last: leave out a last batch that is not full; by default where the order shuffles.
    collate: by default that of the data set.

    Worker w of W makes the batches w, w + W, …, and DataLoader takes from the workers in turn, so the order does not
    depend on their number. Each iteration is the next epoch, with persistent workers or without: the epoch that the
    workers have begun is in memory that they share, where the sampler, too, reads it. So `state_after` of either knows
    the epoch.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        sampler: EpochSampler,
        batch_size: int,
        *,
        drop_last: bool | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"a batch has 1 sample or more, not {batch_size}")
        if not isinstance(sampler, EpochSampler):
            raise ValueError("a stream cuts single samples into batches: give it an EpochSampler, not a batch sampler")
        self.dataset, self.sampler, self.batch_size = dataset, sampler, batch_size
        self.drop_last = choose_tail(None, sampler.order) == "drop_last" if drop_last is None else drop_last
        self.collate = dataset.collate if collate is None else collate
        start = sampler.start
        self._order, self._version = start.order, 0
        self._shared = _SharedPosition(sampler, start.epoch, start.cursor)
        self._iterations = 0
        self._restored: tuple[Start, int] | None = None
        self._current: _Batches | None = None
        self._loaded = False
        sampler.follow_stream(self)
        if not len(self):
            raise ValueError(
                f"an epoch has no batch of {batch_size} samples: rank {sampler.rank} of {sampler.world_size} has "
                f"{len(sampler)}; give drop_last=False and tail='exact', or a smaller batch_size"
            )

    # --- where it is --------------------------------------------------------------------------------------------
    @property
    def epoch(self) -> int:
        """The epoch of the iteration begun last, or else of the next one."""
        return self.start.epoch

    @property
    def start(self) -> Start:
        """Where the iteration that was begun last began, or else the next one begins."""
        return self._start_at(*(self._shared.current if self._shared.begun else self._shared.next))

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be of `epoch`, in all workers: from the position of a loaded state, or its start.

        Raises TrainerError where a framework calls this and would lose samples or the position of a state.
        """
        if epoch < 0:
            raise ValueError(f"an epoch is 0 or more, not {epoch}")
        find_trainer().check_sharing(self.sampler.world_size, _TO_ACCELERATE)
        check_epoch(epoch, self._shared.next[0] if self._loaded and not self._shared.begun else None)
        if self._shared.next[0] != epoch:
            self._put(Start(epoch))

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank, also in an epoch that was resumed."""
        full, rest = divmod(len(self.sampler), self.batch_size)
        total = full if self.drop_last or not rest else full + 1
        self._join_lightning(total)
        return total

    # --- state --------------------------------------------------------------------------------------------------
    def state_after(self, samples: int) -> dict[str, Any]:
        """The position after `samples` samples, on every rank, of the iteration that was begun last."""
        feed = self.sampler.feed
        return feed.token(feed.at(self.start).after(samples))

    def state_dict(self) -> dict[str, Any]:
        """For StatefulDataLoader: the position of this copy, and the number of its next batch: which worker makes it.

        Raises TrainerError where workers make the batches: this copy does not know which ones training has seen.
        """
        current = self._current
        if current is None and self._shared.begun and get_worker_info() is None and calling_package() != "torchdata":
            raise TrainerError(
                "the workers of the DataLoader are ahead of training, so this stream cannot say where training is; "
                "write  stream.state_after(samples this rank has trained on)"
            )
        start, number = (self._start_at(*self._shared.next), 0) if current is None else current.position
        return {"sampler": self.sampler.feed.token(start), "number": number}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration begin there. Takes states of samplers and loaders, too. Raises ResumeError."""
        token, number = state.get("sampler", state), state.get("number")
        if not isinstance(token, Mapping) or not isinstance(number, int | None):
            raise ResumeError("not the state of a stream: expected a sampler's state and a batch's number")
        start = self.sampler.start_of(token)
        if number is not None:  # of one copy of a stream: for the one iterator that is made next here
            self._restored, self._order = (start, number), start.order
            self._shared.begin(_RESTORED, start.epoch, start.cursor)
            return
        self._put(self.sampler.feed.or_next(start) if start.cursor else start)
        self._version, self._loaded = self._shared.renew(), True

    # --- inside -------------------------------------------------------------------------------------------------
    def __iter__(self) -> Iterator[Any]:
        """The next epoch; it begins when its first batch is asked for."""
        info = get_worker_info()
        self._iterations += 1
        # Persistent workers keep their seed, others come with a new one: with the count, neither comes twice.
        number = self._iterations if info is None else (info.seed - info.id + self._iterations) % _MODULUS + 1
        restored, self._restored = self._restored, None
        self._current = _Batches(self, number, restored)
        return self._current

    def begin(self, number: int) -> Start:
        """Where the iteration of this number begins, whose first batch is asked for in this process now."""
        info, shared = get_worker_info(), self._shared
        if self._version != shared.version:
            raise ResumeError(
                "a state was loaded while workers were running, who know nothing of it; make a new DataLoader after "
                "load_state_dict, or leave persistent_workers out"
            )
        if info is None:
            find_trainer().check_sharing(self.sampler.world_size, _TO_ACCELERATE)
        if info is None or info.id == 0:
            shared.begin(number, *shared.next)
        return self._start_at(*shared.join(number))

    def start_of(self, number: int) -> Start:
        """Where the iteration of this number, the last or the next one, began or begins."""
        upcoming = self._shared.next
        return self._start_at(*(self._shared.current if self._shared.iteration == number else upcoming))

    def _start_at(self, epoch: int, cursor: int) -> Start:
        return Start(epoch, cursor, self._order if cursor else None)

    def _join_lightning(self, total: int) -> None:
        """Lightning does not name epochs to a stream, but asks for its length before it begins or resumes."""
        trainer, epoch = find_trainer(), self._shared.next[0]
        if trainer.name != "Lightning" or trainer.epoch is None or self._shared.begun:
            return
        at_end = trainer.at_end or trainer.missed_state(trainer.epoch, 0) is not None
        if at_end and trainer.keeps_account:
            raise TrainerError(
                f"Lightning begins epoch {trainer.epoch}, but the state of this stream in the checkpoint is in the "
                f"middle or at the end of one: samples would be lost or repeated; write  "
                f"StatefulDataLoader(dataset, batch_size, sampler=sampler, …)  in place of the stream"
            )
        if 0 < trainer.batches < total and not trainer.keeps_account:
            raise TrainerError(
                f"Lightning resumes after batch {trainer.batches} of epoch {trainer.epoch}, but a DataLoader has no "
                f"state: it would begin with the first batches again and leave out the last; write  {_STATEFUL}"
            )
        if trainer.epoch != epoch:
            check_epoch(trainer.epoch, epoch if self._loaded else None, trainer.name)
            self._put(Start(trainer.epoch))

    def _put(self, start: Start) -> None:
        self._order, self._restored, self._current = start.order, None, None
        self._shared.put_next(start.epoch, start.cursor)
        self._loaded = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_current": None}


class _Batches(Iterator[Any]):
    """The batches of one epoch, or of the rest of one, that this worker makes."""

    def __init__(self, stream: ImageStream, iteration: int, restored: tuple[Start, int] | None) -> None:
        self._stream, self._iteration = stream, iteration
        self._start: Start | None
        self._start, self._number = restored or (None, 0)
        self._taken = 0
        self._indices: Iterator[Place] | None = None

    @property
    def position(self) -> tuple[Start, int]:
        """The position after the last batch that was made here, and the number of the next one."""
        start = self._stream.start_of(self._iteration) if self._start is None else self._start
        return self._stream.sampler.feed.at(start).after(self._taken), self._number

    def __next__(self) -> Any:
        stream, info = self._stream, get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        if self._indices is None:
            if self._start is None:
                self._start = stream.begin(self._iteration)
            self._indices = stream.sampler.samples_from(self._start)
        while batch := list(itertools.islice(self._indices, stream.batch_size)):
            self._taken += len(batch)
            if len(batch) < stream.batch_size and stream.drop_last:
                break
            self._number += 1
            if (self._number - 1) % workers == worker:
                return stream.collate(stream.dataset.__getitems__(batch))
        raise StopIteration


class _SharedPosition:
    """Where a stream is in its epochs: in memory that all processes with a copy of it share.

        int64[ranks, 6], one row a rank, since ranks that are forked or spawned with a stream share its memory, too:

                   version     raised by each state that the stream was given, so that older copies notice
                   iteration   which iteration of a DataLoader was begun last; 0 for none, RESTORED for one from a state
                   epoch, cursor            where that one began
                   next epoch, next cursor  where the next one begins

    Worker 0 of an iteration begins it: it makes the next position the current one, names the iteration, and only then
    advances the next position. The other workers wait for the name; until they see it, the next position is theirs. The
    process that made the stream may be none of the ranks, and sets the position of all of them.

    Pickles to the same memory where DataLoader starts workers. sampler: says which rank this process is.
    """

    def __init__(self, sampler: EpochSampler, epoch: int, cursor: int) -> None:
        self._sampler, self._maker = sampler, os.getpid()
        self._rows = torch.zeros((_ROWS, 6), dtype=torch.int64).share_memory_()
        self.put_next(epoch, cursor)

    @property
    def _values(self) -> torch.Tensor:
        row: torch.Tensor = self._rows[self._sampler.rank % _ROWS]
        return row

    @property
    def _settable(self) -> torch.Tensor:
        """The rows whose next position this process sets."""
        return self._rows if os.getpid() == self._maker else self._values[None]

    @property
    def version(self) -> int:
        return int(self._values[_VERSION])

    @property
    def iteration(self) -> int:
        return int(self._values[_ITERATION])

    @property
    def begun(self) -> bool:
        """Whether an iteration was begun since the next position was set."""
        return self.iteration != 0

    @property
    def current(self) -> tuple[int, int]:
        """(epoch, cursor) where the iteration that was begun last began."""
        epoch, cursor = self._values[_CURRENT].tolist()
        return epoch, cursor

    @property
    def next(self) -> tuple[int, int]:
        """(epoch, cursor) where the next iteration begins."""
        epoch, cursor = self._values[_NEXT].tolist()
        return epoch, cursor

    def put_next(self, epoch: int, cursor: int) -> None:
        """Let the next iteration begin there."""
        rows = self._settable
        rows[:, _NEXT] = torch.tensor((epoch, cursor))
        rows[:, _ITERATION] = 0

    def renew(self) -> int:
        """A new version."""
        self._settable[:, _VERSION] = self.version + 1
        return self.version

    def begin(self, iteration: int, epoch: int, cursor: int) -> None:
        """The iteration of this number, not 0, begins there; the one after it is the next epoch."""
        values = self._values
        values[_CURRENT] = torch.tensor((epoch, cursor))
        values[_ITERATION] = iteration
        values[_NEXT] = torch.tensor((epoch + 1, 0))

    def join(self, iteration: int) -> tuple[int, int]:
        """Wait until worker 0 has begun the iteration; returns where."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while self.iteration != iteration:
            if time.monotonic() > deadline:
                raise RuntimeError(f"worker 0 of this DataLoader has not begun an epoch for {_PATIENCE_SECONDS:g} s")
            time.sleep(0.001)
        return self.current
