"""`DaliLoader`: a reader's images in batches that a DALI pipeline makes, with the order and resume of `ImageLoader`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from readers.augment.ops import Op
from readers.dali.diagnosis import diagnose
from readers.dali.feeds import Feed, Output, empty_batch, open_feed
from readers.dali.pipelines import Graph, PipelineOptions, pipeline
from readers.dali.source import Source
from readers.dali.watched import WatchedFeed
from readers.errors import TrainerError, WorkerError
from readers.order import Order
from readers.order.schedule import Tail
from readers.sample import Reader
from readers.trainers import LIGHTNING, calling_package, check_epoch, find_trainer

__all__ = ["DaliLoader"]

_OUTPUTS = ("torch", "numpy")


class DaliLoader:
    """Each `for` loop is one epoch of (images, labels): labels int64 [n], -1 without one.

        loader = DaliLoader(reader, 256, augment=classification(224), options=PipelineOptions(device="gpu"), seed=7)

    augment, order to tail: as for `readers.loader.ImageLoader`, with the same samples, crops and flips in the same
    places. graph: in place of augment, see `readers.dali.pipeline`. options: where and how the pipeline runs. output:
    "torch" tensors (images on the pipeline's device) or "numpy" arrays.

    The pipeline starts with the first loop and lives until an epoch is left early, an error, or the loader's end. A
    loop begins with its first batch. Raises TrainerError where two loops run at once, or a framework would lose or
    repeat batches. `state_dict` names the first batch that has not been handed out; `load_state_dict` lets the next
    loop begin there, on any number of ranks, also with a state of ImageLoader.
    """

    def __init__(
        self,
        reader: Reader,
        batch_size: int,
        *,
        augment: Sequence[Op] | None = None,
        graph: Graph | None = None,
        options: PipelineOptions | None = None,
        output: Output = "torch",
        order: Order | None = None,
        shuffle: bool = True,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        tail: Tail | None = None,
    ) -> None:
        if output not in _OUTPUTS:
            raise ValueError(f"output is one of {', '.join(_OUTPUTS)}, not {output!r}")
        self.options, self.output, self._graph = options or PipelineOptions(), output, graph
        self._source = Source(
            reader,
            batch_size,
            augment=augment,
            order=order,
            shuffle=shuffle,
            seed=seed,
            rank=rank,
            world_size=world_size,
            tail=tail,
        )
        pipeline(self._source, self.options, graph=graph)  # says at once what is wrong; nothing is started
        self._next: tuple[int, int] = (0, 0)  # DALI's epoch of `_source`, and the step there
        self._begun = self._loaded = False
        self._idle: Feed | None = None  # a pipeline of `_source` at the end of the epoch before `_next`
        self._running: weakref.ref[_Epoch] | None = None

    # --- where it is --------------------------------------------------------------------------------------------
    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self._source.start.epoch + self._next[0]

    @property
    def sampler(self) -> DaliLoader:
        """What trainers call `set_epoch` of."""
        return self

    @property
    def batch_sampler(self) -> None:
        """None: for trainers that look for one."""

    def set_epoch(self, epoch: int) -> None:
        """Let the next loop be of `epoch`: from where a state that was loaded has put it, or else from its start.

        Raises TrainerError where it is a framework that calls, and would leave the place of a state unused.
        """
        if epoch < 0:
            raise ValueError(f"an epoch is 0 or more, not {epoch}")
        ended = epoch + 1 == self.epoch and not self._source.start.cursor  # as in ImageLoader
        if self._loaded and ended and calling_package() in LIGHTNING:
            return self._restart(self._source.starting(epoch, len(self._source.order)))
        if self._loaded and epoch == self.epoch:
            return None
        check_epoch(epoch, self.epoch if self._loaded else None)
        return self._restart(self._source.starting(epoch))

    def state_dict(self) -> dict[str, Any]:
        """A small dictionary of plain values; the same on every rank, and good for any number of ranks."""
        return self._source.state_after(*self._next)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next loop begin where `state` was taken.

        Raises ResumeError for a state of another set or another kind of order; warns where another decoder made it.
        """
        source = self._source.resumed(state)
        if source.start.cursor and not source.steps():  # too few are left for these ranks
            source = source.starting(source.start.epoch + 1)
        self._restart(source)
        self._loaded = True

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank, also in an epoch that was resumed; see `left`."""
        return self._source.schedule.steps()

    @property
    def left(self) -> int:
        """Batches of the loop under way, or else of the next one, that have not been handed out on this rank."""
        epoch, step = self._next
        return self._source.steps(epoch) - step

    def close(self) -> None:
        """End the pipeline and its processes, and a loop under way with its epoch; the next loop starts them again."""
        if self._begun:
            self._restart(self._source.starting(self.epoch + 1))
        self._idle = None

    # --- one epoch ----------------------------------------------------------------------------------------------
    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return _Epoch(self)

    def _begin(self, epoch: _Epoch) -> None:
        """Make `epoch` the loop under way. Raises TrainerError."""
        running = self._running() if self._running else None
        if self._begun and running is not None:
            running.overtaken()
        if self._begun:  # the last loop was left early: DALI cannot go on from there to the next epoch
            self._restart(self._source.starting(self.epoch + 1))
        elif self._idle is None and self._next[0]:  # a new pipeline begins to count epochs
            self._restart(self._source.starting(self.epoch))
        find_trainer().check_resume(self.left, len(self))
        self._begun, self._loaded, self._running = True, False, weakref.ref(epoch)

    def _restart(self, source: Source) -> None:
        running = self._running() if self._running else None
        if running is not None:
            running.close()
        self._source, self._next, self._idle = source, (0, 0), None
        self._begun = self._loaded = False

    def _open(self) -> Feed:
        feed, self._idle = self._idle, None
        if feed is not None:
            feed.reset()
            return feed
        made = pipeline(self._source, self.options, graph=self._graph)
        return WatchedFeed(made, self.output) if self.options.workers else open_feed(made, self.output)

    def _empty(self) -> tuple[Any, Any]:
        """The batch of a rank that has no sample left in the last step."""
        recipe, options = self._source.recipe, self.options
        if recipe is None or recipe.out_size is None:
            return empty_batch(self.output, (), options.dtype or "uint8", "cpu")
        height, width = recipe.out_size
        shape = (3, height, width) if options.layout == "NCHW" else (height, width, 3)
        dtype = options.dtype or ("uint8" if recipe.normalize is None else "float32")
        return empty_batch(self.output, shape, dtype, options.device.replace("gpu", "cuda"))


class _Epoch(Iterator[tuple[Any, Any]]):
    """One run through the rest of an epoch. Its pipeline goes back to the loader at the end, and otherwise ends."""

    def __init__(self, loader: DaliLoader) -> None:
        self._loader = loader
        self._feed: Feed | None = None
        self._begun = self._closed = self._overtaken = False

    def __next__(self) -> tuple[Any, Any]:
        if not self._begun:
            self._begin()
        if self._overtaken:
            raise TrainerError(
                "another loop over this loader has begun, which ended this one: a loader has one place in one epoch; "
                "for two loops at once make two loaders:  DaliLoader(reader, …)"
            )
        if self._closed:
            raise StopIteration
        if self._step == self._steps:
            self._end()
            raise StopIteration
        result = self._take() if self._step < self._batches else self._loader._empty()
        self._step += 1
        self._loader._next = (self._number, self._step)
        return result

    def close(self) -> None:
        """End the pipeline; there are no more batches."""
        self._begun = self._closed = True
        self._feed = None

    def overtaken(self) -> None:
        """Another loop begins: this one, if there are batches left in it, cannot go on."""
        self._overtaken = not self._closed and self._step < self._steps
        self.close()

    def _begin(self) -> None:
        loader = self._loader
        loader._begin(self)
        self._begun, self._source = True, loader._source
        self._number, self._step = loader._next
        self._steps, self._batches = self._source.steps(self._number), self._source.batches(self._number)

    def _take(self) -> tuple[Any, Any]:
        problem: Exception
        try:
            if self._feed is None:
                self._feed = self._loader._open()
            return self._feed.take()
        except StopIteration:
            told = f"DALI ended epoch {self._loader.epoch} after {self._step} of {self._batches} batches"
            problem = WorkerError(f"{told}; start the loop again from the last state_dict")
        except Exception as error:
            self.close()  # a failed pipeline is of no more use
            under_way = range(self._step, min(self._batches, self._step + 2 * self._loader.options.prefetch + 2))
            problem = diagnose(self._source, self._number, under_way, error)
            if problem is not error:
                problem.__cause__ = error.with_traceback(None)  # whose frames would keep the pipeline alive
        except BaseException:
            self.close()
            raise
        self.close()
        raise problem

    def _end(self) -> None:
        feed, loader = self._feed, self._loader
        self.close()
        if feed is not None:
            try:
                feed.take()
            except StopIteration:
                loader._idle = feed
        loader._next, loader._begun = (self._number + 1, 0), False
