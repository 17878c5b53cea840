"""`RocalLoader`: the batches of a rocAL pipeline over `external_source`, as many as there are and in the order fed.

with RocalLoader(pipeline, source) as loader:
    for epoch in range(90):
        for images, labels in loader:       # arrays of your own: float32 [128, 3, 224, 224], int64 [128]
            ...
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from readers.errors import PipelineError, UnknownNameError
from readers.rocal.feeder import Arrays, Feeder
from readers.rocal.source import RocalSource
from readers.rocal.work import BadSample, SourceBatch

__all__ = ["RocalLoader"]

_FIELDS = ("image", "label", "key", "index")


class RocalLoader:
    """Iterate over a built pipeline; each `for` loop is one epoch.

    pipeline: built over `source`, such as those of `readers.rocal.pipelines`. fields: what a batch is made of: "image"
    (an array [n, …] for each output of the pipeline, on the host), "label" (int64 [n], -1 without one), "key" (list of
    str), "index" (int64 [n]). n is batch_size, or less at the end of an epoch and where bad samples are skipped.

    A loop that is left early ends its epoch: the next one begins the next. `state_dict` names the first batch that has
    not been handed out. Close the loader when done with it, or use `with`; one that is dropped closes itself.
    Raises MissingRocalError, and PipelineError for what goes wrong inside rocAL: at the end of an epoch, or where the
    next loop begins after one that was left, also for images that came out under the labels of others.
    """

    def __init__(self, pipeline: Any, source: RocalSource, *, fields: Sequence[str] = ("image", "label")) -> None:
        for name in fields:
            if name not in _FIELDS:
                raise UnknownNameError(f"no field {name!r}; a batch can have {', '.join(_FIELDS)}")
        self.source, self.fields = source, tuple(fields)
        self._feeder = Feeder(pipeline, source)
        self._finalizer = weakref.finalize(self, self._feeder.close)
        self._running: weakref.ref[_Epoch] | None = None

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self.source.epoch

    @property
    def bad_samples(self) -> tuple[BadSample, ...]:
        """The samples skipped or replaced in the current or, between loops, the last epoch, on this rank."""
        return self.source.bad_samples

    def set_epoch(self, epoch: int) -> None:
        """Begin the next loop at the start of `epoch`."""
        self._end()
        self.source.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """A small dictionary of plain values; the same on every rank, and good for any number of ranks.

        It says which samples come next. What rocAL draws, such as crops, it draws anew.
        """
        return self.source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next loop begin where `state` was taken. Raises ResumeError; warns for that of another decoder."""
        self._end()
        self.source.load_state_dict(state)

    def __len__(self) -> int:
        """Batches of the loop under way on this rank, or of the next one: an epoch, or the rest of a resumed one."""
        return len(self.source)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        self._end()
        if self._feeder.closed:
            raise PipelineError("the loader is closed: build the pipeline and the loader anew")
        self._feeder.check()
        self.source.start()
        epoch = _Epoch(self._feeder, self.source, self.fields)
        self._running = weakref.ref(epoch)
        return epoch

    def close(self) -> None:
        """End a loop under way, join the reading thread and release the pipeline. Idempotent."""
        self._finalizer()

    def __enter__(self) -> RocalLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self) -> None:
        """A loop under way gets no further batch."""
        epoch = self._running() if self._running else None
        if epoch is not None:
            epoch.close()
        elif not self._feeder.closed:
            self._feeder.end()


class _Epoch(Iterator[tuple[Any, ...]]):
    """One run through the rest of an epoch. Ended by its end, by any exception, and when dropped."""

    def __init__(self, feeder: Feeder, source: RocalSource, fields: tuple[str, ...]) -> None:
        self._feeder, self._source, self._fields = feeder, source, fields
        feeder.begin(source.steps)
        self._finalizer = weakref.finalize(self, _end, feeder)

    def __next__(self) -> tuple[Any, ...]:
        if not self._finalizer.alive:
            raise StopIteration
        try:
            batch = self._source.prepare()
            if batch is None:
                self.close()
                self._source.finish()
                self._feeder.check()
                raise StopIteration
            return self._collect(batch, self._feeder.run())
        except BaseException:
            with contextlib.suppress(PipelineError):  # what went wrong first is what counts; `RocalLoader.close` tells
                self.close()
            raise

    def close(self) -> None:
        """Drain the pipeline; there are no more batches."""
        if self._finalizer.detach() is not None:
            _end(self._feeder)

    def _collect(self, batch: SourceBatch, outputs: Arrays) -> tuple[Any, ...]:
        """Labels are those that were fed. What rocAL gives back as labels are the same bytes, which show nothing."""
        count = batch.count
        fields: list[Any] = []
        for name in self._fields:
            if name == "image":
                fields += [output[:count].copy() for output in outputs]
            elif name == "label":
                fields.append(batch.labels[:count].astype(np.int64))
            elif name == "index":
                fields.append(batch.indices)
            else:
                keys = self._source.reader.keys
                fields.append([keys[i] for i in batch.indices.tolist()])
        return tuple(fields)


def _end(feeder: Feeder) -> None:
    if not feeder.closed:
        feeder.end()
