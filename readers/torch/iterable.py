"""The batches of a data set as a stream: an iterable data set for DataLoader, with a position in shared memory."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from cache.errors import ResumeError, TrainerError
from cache.locks import alone
from cache.system import at_fork, require
from readers.feed import Start, choose_tail
from readers.loop import Place, Progress
from readers.order.base import Int64s
from readers.torch.dataset import ImageDataset
from readers.torch.sampler import EpochSampler
from readers.trainers import Trainer, calling_package, check_persistent, find_trainer

_ROWS = 1024  # only the ranks of one node, which have consecutive numbers, share the memory
_ITERATIONS = 8  # most iterations that are looked up; more never begin at once
_VERSION, _BEGUN, _NEXT, _COUNT, _FIRST, _HEADER = (
    0,
    slice(1, 4),
    slice(4, 6),
    6,
    7,
    8,
)  # columns of the shared position
_ROW = _HEADER + 4 * _ITERATIONS
_STATEFUL = "StatefulDataLoader(stream, batch_size=None, …)  of torchdata.stateful_dataloader"
_TO_ACCELERATE = "ImageStream(dataset, EpochSampler(order, dataset, rank=0, world_size=1), batch_size)"


class ImageStream(IterableDataset[Any]):
    """Batches of `dataset` in the order of `sampler`: for `DataLoader(stream, batch_size=None, num_workers=…)`.

    drop_last: leave out a last batch that is not full; default: True if the order shuffles.
    collate: default: `dataset.collate`.

    Worker w of W makes the batches w, w + W, …, and DataLoader takes batches from the workers in turn, so the order
    does not depend on their number. Each iteration is the next epoch, with or without persistent workers: the position
    of the sampler is in memory that the workers share, so `state_after` of stream and sampler knows the epoch.
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
            raise ValueError(f"batch_size is at least 1, not {batch_size}")
        if not isinstance(sampler, EpochSampler):
            raise ValueError("a stream makes batches of single samples: give it an EpochSampler, not a batch sampler")
        self.dataset, self.sampler, self.batch_size = dataset, sampler, batch_size
        self.drop_last = choose_tail(sampler.order) == "drop_last" if drop_last is None else drop_last
        self.collate = dataset.collate if collate is None else collate
        self._place = _SharedPlace(sampler)
        self._process, self._iterations = os.getpid(), 0  # of this process
        self._starter: Trainer | None = None  # trainer of the process that spawned this one with a copy of the stream
        self._restored: tuple[Start, int] | None = None
        self._refused: ResumeError | None = None
        self._current: _Batches | None = None
        batches = (batch_size, not self.drop_last)
        sampler.serve_stream(self._place, "stream", _STATEFUL, _TO_ACCELERATE, batches)
        if not len(self):
            raise ValueError(
                f"an epoch has no batch of {batch_size} samples: rank {sampler.rank} of {sampler.world_size} has "
                f"{len(sampler)}; give drop_last=False and tail='exact', or a smaller batch_size"
            )

    # --- where it is --------------------------------------------------------------------------------------------
    @property
    def epoch(self) -> int:
        """Epoch of the current or last iteration; before the first, of the next one."""
        return self.start.epoch

    @property
    def start(self) -> Start:
        """Start of the current or last iteration; before the first, of the next one."""
        return self.sampler.start

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration in all workers; it begins at the position of a loaded state, if any.

        Raises TrainerError if the calling framework would lose samples or the position of a state.
        """
        trainer = find_trainer()
        self.sampler.set_epoch(epoch)
        samples = len(self.sampler)
        rest = (samples - samples % self.batch_size if self.drop_last else samples) % (
            self.batch_size * max(1, trainer.repeats)
        )
        if trainer.repeats and rest % trainer.processes:
            batch_size = self.batch_size + -self.batch_size % trainer.processes
            raise TrainerError(
                f"accelerate would repeat {-rest % trainer.processes} samples in each epoch, because the last {rest} "
                f"do not divide evenly among {trainer.processes} processes: write  "
                f"ImageStream(dataset, sampler, {batch_size}, drop_last=True)"
            )

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank, also while an epoch is resumed."""
        check_persistent(self)  # Lightning asks for this before each use of a DataLoader
        full, rest = divmod(len(self.sampler), self.batch_size)
        return full if self.drop_last or not rest else full + 1

    # --- state --------------------------------------------------------------------------------------------------
    def state_after(self, samples: int) -> dict[str, Any]:
        """The position after `samples` samples on every rank of the current or last iteration."""
        return self.sampler.state_after(samples)

    def state_dict(self) -> dict[str, Any]:
        """For StatefulDataLoader: the position of this copy, and its next batch's number, which selects the worker.

        Raises TrainerError if workers make the batches: this copy does not know how many of them training has used.
        """
        current, progress = self._current, None if self._current is None else self._current.progress
        if calling_package() == "torchdata":  # it asks for the newest iterator, which may not have begun
            token = self.sampler.feed.token(self._place.next if progress is None else progress.position)
        else:
            token = self.sampler.state_dict()
        number = 0 if current is None or progress is None else current.number
        return {"sampler": token, "number": number, "batch_size": self.batch_size, "ranks": self.sampler.world_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next iteration at the position of a state of a stream, sampler or loader. Raises ResumeError."""
        token, number, info = state.get("sampler", state), state.get("number"), get_worker_info()
        if not isinstance(token, Mapping) or not isinstance(number, int | None):
            raise ResumeError("not the state of a stream: expected a sampler's state and a batch number")
        if number is None or (info is None and calling_package() != "torchdata"):
            self.sampler.load_state_dict(token)
            return
        start, expected = self.sampler.restored(token), (self.batch_size, self.sampler.world_size)
        saved = (state.get("batch_size", expected[0]), state.get("ranks", expected[1]))
        shared = info is not None and info.num_workers > 1 and self.sampler.units_after(start) >= self.batch_size
        if info is not None and shared and saved != expected:
            self._refused = ResumeError(  # raised with the first batch: Lightning hides an earlier error
                f"the state was saved by {info.num_workers} workers with batches of {saved[0]} samples on {saved[1]} "
                f"ranks, but this stream has batches of {expected[0]} on {expected[1]}: samples would be lost or "
                f"repeated; resume with those of the state, or from  "
                f"stream.state_after(samples this rank has trained on)"
            )
        self._restored = (start, number)  # for the next iterator of this process

    # --- inside -------------------------------------------------------------------------------------------------
    def __iter__(self) -> Iterator[Any]:
        """The next epoch; it begins with the request for its first batch."""
        if self._process != os.getpid():
            self._process, self._iterations = os.getpid(), 0
        self._iterations += 1
        self._current = _Batches(self)
        if self._restored is not None or get_worker_info() is not None:  # a worker needs its first batch at once
            try:
                self._current.begin()
            except (ResumeError, TrainerError, ValueError) as error:
                self._current.error = error  # raised now it would end the worker without a message
        return self._current

    def begin(self) -> tuple[Progress, int]:
        """Begin an iteration in this process; returns its progress and the number of its first batch."""
        info, place, trainer = get_worker_info(), self._place, self._trainer()
        workers, seed = (info.num_workers, info.seed - info.id) if info else (0, 0)
        if place.is_stale:
            raise ResumeError(
                "a state was loaded while workers were running, and they cannot see it; make a new DataLoader after "
                "load_state_dict, or leave out persistent_workers"
            )
        if trainer.too_early:
            raise trainer.began_too_early()
        if trainer.keeps_account and (trainer.at_end or trainer.missed_state(trainer.epoch or 0, 0) is not None):
            raise TrainerError(
                f"Lightning begins epoch {trainer.epoch}, but this stream's state in the checkpoint is in the middle "
                f"or at the end of an epoch: samples would be lost or repeated; write  "
                f"StatefulDataLoader(dataset, batch_size, sampler=sampler, …)  in place of the stream"
            )
        if self._refused is not None:
            raise self._refused
        restored, self._restored = self._restored, None
        if restored is None:
            return self.sampler.begin(trainer, key=(seed, self._iterations) if info else None), 0
        place.forget(seed)  # a restored DataLoader has the seed of the DataLoader that it continues
        start, number = restored
        if workers > 1:  # the state of a worker is the position after the last batch that it made
            if trainer.under_way:  # the batch under way is made again, by the worker that is asked first
                since = trainer.batches + 1 - self._batches_before(start)
                if not 0 <= since < workers:
                    raise trainer.no_batch_before(start.epoch)
                number += since
                start = self.sampler.place_of(start, trainer.batches * self.batch_size)
            trainer = replace(trainer, under_way=False, batches=0)
        return self.sampler.begin(trainer, start), number

    def _batches_before(self, start: Start) -> int:
        """Number of batches of the epoch before a position."""
        full, rest = divmod(self.sampler.units_after(Start()) - self.sampler.units_after(start), self.batch_size)
        return full if self.drop_last or not rest else full + 1

    def _trainer(self) -> Trainer:
        """The trainer that begins an iteration; for a worker's first iteration, the one that started the worker."""
        trainer = Trainer()
        if get_worker_info() is None or self._iterations == 1:
            trainer = self._starter or find_trainer()  # a forked worker still has the parent's call stack
        return replace(trainer, batch_size=self.batch_size, partial=not self.drop_last, asks_ahead=False)

    def __getstate__(self) -> dict[str, Any]:
        starter = None
        if get_spawning_popen() is not None:
            starter = find_trainer()
            _note_early(starter)
        return {**self.__dict__, "_current": None, "_starter": starter}


class _Batches(Iterator[Any]):
    """This worker's batches of an epoch or of its rest. number: of the next batch, counted over all workers."""

    def __init__(self, stream: ImageStream) -> None:
        self._stream = stream
        self.progress: Progress | None = None
        self.error: Exception | None = None
        self.number = 0

    @property
    def collate_fn(self) -> Any:
        """Looked up on the call stack by the data set (`readers.torch.rendering`)."""
        return self._stream.collate

    def begin(self) -> Progress:
        self.progress, self.number = self._stream.begin()
        info, stream = get_worker_info(), self._stream
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        first = (worker - self.number) % workers
        self._batches = stream.sampler.batches_from(self.progress.feed.start, stream.batch_size, first, workers)
        return self.progress

    def __next__(self) -> Any:
        if self.error is not None:
            raise self.error
        stream, progress = self._stream, self.progress or self.begin()
        for samples, places in self._batches:
            progress.taken += samples
            if samples < stream.batch_size and stream.drop_last:
                break
            self.number += 1
            if places:
                return stream.collate(stream.dataset.__getitems__(places))
        raise StopIteration


class _SharedPlace(Place):
    """The position of a stream, in memory that all processes with a copy of the stream share.

        int64[ranks, 40], one row a rank, because ranks that are forked or spawned with a stream share its memory, too:

                   version                incremented by each loaded state, so that older copies notice
                   1, epoch, cursor       start of the last iteration; 0 since the next position was set
                   epoch, cursor          start of the next iteration
                   count                  of the iterations that were begun by several workers
               first                  the epoch that was begun first, and 1
                   seed, number, epoch, cursor, 8 times: those that were begun last

    The first worker to arrive begins an iteration, under a lock; the others look it up by the seed of their DataLoader
    and the number of iterations so far. The process that made the stream need not be a rank; it sets the position of
    all ranks.

    Pickles to the same memory when DataLoader starts workers, otherwise to separate memory. sampler: knows the rank of
    this process.
    """

    def __init__(self, sampler: EpochSampler) -> None:
        require("a position that the workers of ImageStream share", hasattr(os, "memfd_create"))
        self._sampler = sampler
        self._make(os.memfd_create("packer-position", os.MFD_CLOEXEC))
        self._version, self._maker = 0, os.getpid()
        self.put(sampler.start)

    def _make(self, descriptor: int) -> None:
        self._file = descriptor
        weakref.finalize(self, os.close, descriptor).atexit = False
        os.truncate(descriptor, _ROWS * _ROW * 8)
        self._rows = np.frombuffer(mmap.mmap(descriptor, 0), np.int64).reshape(_ROWS, _ROW)

    @property
    def _row(self) -> Int64s:
        row: Int64s = self._rows[self._sampler.rank % _ROWS]
        return row

    @property
    def next(self) -> Start:
        return self._start_at(self._row[_NEXT])

    @property
    def begun(self) -> Start | None:
        is_begun, *begun = self._row[_BEGUN]
        return self._start_at(begun) if is_begun else None

    @property
    def first(self) -> int | None:
        return int(self._row[_FIRST]) - 1 if self._row[_FIRST] else None

    def _start_at(self, values: Any) -> Start:
        epoch, cursor = map(int, values)
        return Start(epoch, cursor, self._order if cursor else None)

    @property
    def is_stale(self) -> bool:
        """Whether another process has loaded a state since this process got its copy."""
        return bool(self._version != self._row[_VERSION])

    def renew(self) -> None:
        self._version = int(self._row[_VERSION]) + 1
        self._settable[:, _VERSION] = self._version

    @property
    def _settable(self) -> Int64s:
        """The rows whose next position this process sets."""
        return self._rows if os.getpid() == self._maker else self._row[None]

    def put(self, start: Start) -> None:
        self._order = start.order
        with alone(self._file):
            rows = self._settable
            rows[:, _NEXT] = start[:2]
            rows[:, _BEGUN] = 0

    def begin(self, choose: Callable[[], Start], key: Any = None) -> Start:
        with alone(self._file):
            row = self._row
            known = row[_HEADER:].reshape(_ITERATIONS, 4)
            if key is not None and len(matches := known[(known[:, :2] == key).all(1)]):
                return self._start_at(matches[0, 2:])
            start = choose()
            self._order = start.order or self._order
            if key is not None:
                known[row[_COUNT] % _ITERATIONS] = *key, *start[:2]
                row[_COUNT] += 1
            row[_BEGUN] = 1, *start[:2]
            row[_FIRST] = row[_FIRST] or start.epoch + 1
            row[_NEXT] = start.epoch + 1, 0
        return start

    def forget(self, seed: int) -> None:
        """Drop the iterations with this seed: they were another DataLoader's."""
        known = self._row[_HEADER:].reshape(_ITERATIONS, 4)
        known[known[:, 0] == seed] = 0

    def __getstate__(self) -> dict[str, Any]:
        shared = get_spawning_popen() is not None
        state = {**self.__dict__, "_rows": None if shared else self._rows.copy(), "_file": None}
        return {**state, "_file": DupFd(self._file)} if shared else state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        rows = state["_rows"]
        if rows is None:
            self._make(state["_file"].detach())
        else:
            self._make(os.memfd_create("packer-position", os.MFD_CLOEXEC))
            self._rows[:], self._maker = rows, os.getpid()


def _note_early(trainer: Trainer | None = None) -> None:
    """Tell a stream which StatefulDataLoader is starting workers only to take a state."""
    early = (trainer or find_trainer()).early
    stream = None if early is None else getattr(early(), "dataset", None)
    if isinstance(stream, ImageStream):
        stream.sampler.early = early


at_fork(before=_note_early)
