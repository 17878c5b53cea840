"""`RocalLoader`: the batches of a rocAL pipeline over `external_source`, as many as there are and in the order fed.

with RocalLoader(pipeline, source) as loader:
    for epoch in range(90):
        for images, labels in loader:       # arrays of your own: float32 [128, 3, 224, 224], int64 [128]
            ...

rocAL's own iterator is fed batch by batch, and drained before it is reset or released, since it would hang otherwise.

From the moment a pipeline is built its threads wait for input, and nothing else wakes them: a reset or release would
then wait forever. So every epoch ends in the same way, whether all was read, the loop was left or an error was raised:
padding is fed, the last of it as the end of the sequence, and run through to StopIteration.

    waiting   built or reset, nothing fed   → begin, close (which feeds padding first)
    fed       in the middle of an epoch     → end, which drains
    drained   StopIteration was raised      → begin, which resets; close, which releases

While a batch is fed, rocAL's thread that takes it may wake too early, take an image twice and show all later images of
the epoch one row late, under the labels of others. So the first padding batch is examined: its rows are one grey image,
and any other row is an image that should have come before.

Of the iterator `amd.rocal.plugin.generic.ROCALGenericIterator` this uses next, reset, and its attributes index,
num_batches and eos: reset does not change those, and they determine whether a further batch is fed at all. The iterator
of plugin.pytorch cannot be used, as it calls the extension with one argument too many.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from cache.errors import PipelineError
from readers.batch import Fields
from readers.feed import BadSample
from readers.rocal.pipelines import load_rocal
from readers.rocal.source import PADDING_BATCHES, PREFETCH, RocalSource, SourceBatch

__all__ = ["RocalLoader"]

_Arrays: TypeAlias = list[npt.NDArray[Any]]
_GREY = 0.1  # of normalised values: 6 of 255 or more
_used: weakref.WeakSet[Any] = weakref.WeakSet()  # a pipeline is released once, by one loader


class RocalLoader:
    """Iterate over a built pipeline; each `for` loop is one epoch.

    pipeline: built over `source`, such as those of `readers.rocal.pipelines`.
    fields: what a batch consists of: "image" (an array [n, …] for each output of the pipeline, on the host), "label"
        (int64 [n], -1 without one), "key" (list of str), "index" (int64 [n]), other fields of the set (lists of what
        `readers.fields` makes of them, None where a sample lacks one). n is batch_size, or less at the end of an epoch
        and where bad samples are skipped. Masks, boxes and points cannot follow what rocAL draws: ValueError.

    A loop that is left early ends its epoch: the next one begins the next. `state_dict` names the first batch that has
    not been handed out. Close the loader after use, or use `with`; a loader that is dropped closes itself.
    Raises MissingRocalError, and PipelineError for errors inside rocAL: at the end of an epoch, or where the next loop
    begins after one that was left, also for images that came out under the labels of others.
    """

    def __init__(self, pipeline: Any, source: RocalSource, *, fields: Sequence[str] = ("image", "label")) -> None:
        self.source, self._fields = source, Fields(fields, source.reader)
        self._fields.check_apart("rocAL draws by itself what happens to an image", "take ImageLoader")
        self._feeder = _Feeder(pipeline, source)
        self._finalizer = weakref.finalize(self, self._feeder.close)
        self._running: weakref.ref[Generator[tuple[Any, ...], None, None]] | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        return self._fields.wanted

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

        It names the samples that come next. What rocAL draws, such as crops, is drawn again.
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
            raise PipelineError("the loader is closed: build a new pipeline and a new loader")
        self._feeder.check()
        self.source.start()
        self._feeder.begin(len(self.source))
        epoch = self._batches()
        self._running = weakref.ref(epoch)
        return epoch

    def close(self) -> None:
        """End a loop under way, join the reading thread and release the pipeline. Idempotent."""
        self._finalizer()

    def __enter__(self) -> RocalLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _batches(self) -> Generator[tuple[Any, ...], None, None]:
        """The rest of an epoch. However it ends, the pipeline is drained."""
        try:
            while (batch := self.source.prepare()) is not None:
                yield self._collect(batch, self._feeder.run())
        except BaseException:
            with contextlib.suppress(PipelineError):  # the first error counts; the next loop and `close` raise this one
                self._feeder.end()
            raise
        self._feeder.end()
        self.source.finish()
        self._feeder.check()

    def _collect(self, batch: SourceBatch, outputs: _Arrays) -> tuple[Any, ...]:
        """Labels are those that were fed: the labels that rocAL returns are the same memory, which proves nothing."""
        values: list[Any] = []
        reader, fields = self.source.reader, self._fields
        stored = [fields.decode(some) for some in fields.read(reader, batch.rows)] if fields.stored else []
        for name in fields.wanted:
            if name == "image":
                values += [output[: len(batch.rows)].copy() for output in outputs]
            elif name in fields.stored:
                values.append([some[name] for some in stored])
            else:
                values.append(Fields.column(reader, batch.rows, name))
        return tuple(values)

    def _end(self) -> None:
        """End a loop under way: it returns no further batch."""
        epoch = self._running() if self._running else None
        if epoch is not None:
            epoch.close()
        self._feeder.end()


class _Feeder:
    """Runs a pipeline over the batches of its source. Raises PipelineError for all errors inside rocAL."""

    def __init__(self, pipeline: Any, source: RocalSource) -> None:
        if getattr(pipeline, "_external_source", None) is not source:
            raise ValueError("the pipeline was built over another source: give the one passed to fn.external_source")
        if pipeline in _used:
            raise ValueError("the pipeline has, or had, a loader, which releases it: build another")
        self._iterator: Any = load_rocal("RocalLoader").plugin.generic.ROCALGenericIterator(pipeline)
        _used.add(pipeline)
        self._source = source
        self._state: Literal["waiting", "fed", "drained"] = "waiting"
        self._late = 0  # rows of the padding of the last epoch that show images

    @property
    def closed(self) -> bool:
        return self._iterator is None

    def begin(self, steps: int) -> None:
        """Prepare for an epoch of `steps` batches; the one before must have been ended."""
        iterator = self._iterator
        if self._state == "drained":
            _translated(iterator.reset)
            self._state = "waiting"
        iterator.index, iterator.eos, iterator.num_batches = 0, False, steps + PADDING_BATCHES

    def run(self) -> _Arrays:
        """Feed the next batch of the source: the outputs, in memory that rocAL will reuse."""
        self._state = "fed"
        try:
            outputs, _ = _translated(self._iterator.__next__)
        except StopIteration:
            raise PipelineError("rocAL ended the epoch before its last batch") from None
        return cast(_Arrays, outputs)

    def end(self) -> None:
        """Let the epoch end here, at any of its batches. Idempotent."""
        if not self.closed:
            self._source.stop()
            if self._state == "fed":
                self._drain()

    def check(self) -> None:
        """Raises PipelineError, once, where the epoch that has ended showed images under the labels of others."""
        late, self._late = self._late, 0
        if late:
            raise PipelineError(
                f"rocAL took {late} images twice in this epoch, and showed those after them {late} rows late: labels, "
                f"keys and indices were those of other images from some batch on; go back to a checkpoint from before"
            )

    def close(self) -> None:
        """Drain and release. Where draining fails the pipeline is never released, as the release would not return."""
        iterator = self._iterator
        if iterator is None:
            return
        self._source.stop()
        try:
            if self._state != "drained":
                self._drain()
        except BaseException:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(iterator))
            raise
        finally:
            self._iterator = None
            self._source.close()

    def _drain(self) -> None:
        """Feed padding to the end of the sequence, and take what is left. The source is stopped: it returns padding."""
        iterator = self._iterator
        iterator.eos, iterator.num_batches = False, iterator.index + PADDING_BATCHES
        most = PADDING_BATCHES + 2 * PREFETCH + 2  # all queues of rocAL have at most these
        for step in range(most):
            try:
                outputs, _ = _translated(iterator.__next__)
                if step == 0 and self._state == "fed" and self._source.grey_is_grey:
                    self._late = max(_rows_with_images(output) for output in outputs)
            except StopIteration:
                if iterator.eos:  # otherwise a run failed, which rocAL reports in no other way, and its threads wait
                    self._state = "drained"
                    return
        raise PipelineError(f"rocAL does not end: {most} steps after the last batch it still has some, or fails")


def _translated(call: Callable[[], Any]) -> Any:
    """The result of a call into rocAL. Raises StopIteration as it is, all else as PipelineError."""
    try:
        return call()
    except (StopIteration, PipelineError):
        raise
    except Exception as error:
        raise PipelineError(f"rocAL failed: {error}") from error


def _rows_with_images(output: npt.NDArray[Any]) -> int:
    """How many rows of a padding batch, float [n, 3, h, w] and normalised, are not the grey image of the last row."""
    flat = output.reshape(*output.shape[:2], -1)
    grey = np.abs(flat.mean(axis=2) - flat[-1].mean(axis=1)).max(axis=1) < _GREY
    return int(np.count_nonzero(~(grey & (flat.std(axis=2).max(axis=1) < _GREY))))
