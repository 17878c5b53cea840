"""rocAL's own iterator, kept from hanging: fed batch by batch, drained before it is reset or released.

From the moment a pipeline is built its threads wait for input, and nothing else wakes them: to reset or release it
then is to wait for ever. So every end of an epoch is the same, whether all was read, the loop was left or something
went wrong: padding is fed, the last of it as the end of the sequence, and run through to StopIteration.

    waiting   built or reset, nothing fed   → begin, close (which feeds padding first)
    fed       in the middle of an epoch     → end, which drains
    drained   StopIteration has come        → begin, which resets; close, which releases

While a batch is fed, rocAL's thread that takes it may be woken too early, take an image twice and show all those after
it one row late, to the end of the epoch, under the labels of others. So the first padding batch is looked at: its rows
are one grey image, and a row that is not is an image that should have come before.

Of the iterator `amd.rocal.plugin.generic.ROCALGenericIterator` this uses next, reset, and its attributes index,
num_batches and eos: reset leaves those as they are, and they say whether a further batch is fed at all. The iterator of
plugin.pytorch is of no use, as it calls the extension with one argument too many.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from readers.errors import PipelineError
from readers.rocal.library import load_rocal
from readers.rocal.source import PADDING_BATCHES, RocalSource

__all__ = ["Arrays", "Feeder"]

Arrays = list[npt.NDArray[Any]]
_GREY = 0.1  # of normalised values: 6 of 255 or more
_taken: weakref.WeakSet[Any] = weakref.WeakSet()  # a pipeline is released once, and by one


class Feeder:
    """Runs a pipeline over what its source gives. Raises PipelineError for whatever goes wrong inside rocAL."""

    def __init__(self, pipeline: Any, source: RocalSource) -> None:
        if getattr(pipeline, "_external_source", None) is not source:
            raise ValueError("the pipeline was built over another source: give the one passed to fn.external_source")
        if pipeline in _taken:
            raise ValueError("the pipeline has, or had, a loader, which releases it: build another")
        self._iterator: Any = load_rocal("RocalLoader").generic.ROCALGenericIterator(pipeline)
        _taken.add(pipeline)
        self._source = source
        self._state: Literal["waiting", "fed", "drained"] = "waiting"
        self._late = 0  # rows of the padding of the last epoch that show images

    @property
    def closed(self) -> bool:
        return self._iterator is None

    def begin(self, steps: int) -> None:
        """Make ready for an epoch of `steps` batches; the one before must have been ended."""
        iterator = self._iterator
        if self._state == "drained":
            self._guarded(iterator.reset)
            self._state = "waiting"
        iterator.index, iterator.eos, iterator.num_batches = 0, False, steps + PADDING_BATCHES

    def run(self) -> Arrays:
        """Feed the next batch of the source: the outputs, in memory that rocAL will use again."""
        self._state = "fed"
        try:
            outputs, _ = self._guarded(self._iterator.__next__)
        except StopIteration:
            raise PipelineError("rocAL ended the epoch before its last batch") from None
        return cast(Arrays, outputs)

    def end(self) -> None:
        """Let the epoch end here, wherever it is."""
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
        """Drain and release. Where that fails the pipeline is never released, as that would not return."""
        iterator, self._iterator = self._iterator, None
        if iterator is None:
            return
        self._source.stop()
        try:
            if self._state != "drained":
                self._iterator = iterator
                self._drain()
        except BaseException:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(iterator))
            raise
        finally:
            self._iterator = None
            self._source.close()

    def _drain(self) -> None:
        """Feed padding to the end of the sequence, and take what is left. The source is stopped: it gives padding."""
        iterator = self._iterator
        iterator.eos, iterator.num_batches = False, iterator.index + PADDING_BATCHES
        most = PADDING_BATCHES + 2 * self._source.options.prefetch + 2  # what all queues of rocAL hold at most
        for step in range(most):
            try:
                outputs, _ = self._guarded(iterator.__next__)
                if step == 0 and self._state == "fed" and self._source.grey_is_grey:
                    self._late = max(_rows_with_images(output) for output in outputs)
            except StopIteration:
                if iterator.eos:  # otherwise a failed run, of which rocAL says no more, and its threads wait on
                    self._state = "drained"
                    return
        raise PipelineError(f"rocAL does not end: {most} steps after the last batch it still has some, or fails")

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (StopIteration, PipelineError):
            raise
        except Exception as error:
            raise PipelineError(f"rocAL failed: {error}") from error


def _rows_with_images(output: npt.NDArray[Any]) -> int:
    """How many rows of a padding batch, float [n, 3, h, w] and normalised, are not the grey image of the last one."""
    flat = output.reshape(*output.shape[:2], -1)
    grey = np.abs(flat.mean(axis=2) - flat[-1].mean(axis=1)).max(axis=1) < _GREY
    return int(np.count_nonzero(~(grey & (flat.std(axis=2).max(axis=1) < _GREY))))
