"""`DaliLoader`: batches of a reader's images from a DALI pipeline, with the order and resume of `ImageLoader`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from cache.errors import BadSampleError, PackerError, WorkerError
from cache.node import usable_cpus
from readers.augment.geometry import Job
from readers.augment.ops import Op
from readers.batch import Fields
from readers.dali.pipelines import Graph, Output, PipelineOptions, Run, as_output, empty_batch, pipeline, start_run
from readers.dali.source import Source, refusal
from readers.decode import decode_image
from readers.feed import BadSample, Feed, OnError, Start, bad_sample, check_choice
from readers.loop import FeedLoader, Maker
from readers.options import FieldOptions, Ranks, accepts_old_names
from readers.order import Order
from readers.order.base import Int64s
from readers.reader import SAMPLE_ERRORS, Reader
from readers.table import upright_sides

# Fields other than the image are decoded by threads next to the DALI pipeline, and moved like the images.
#
# DALI gets only images: it decodes neither palettes nor masks of 16 or 32 bits, and has no operator that leaves out
# boxes together with their labels. So the values are those of `ImageLoader`, bit for bit, made from the plan that the
# pipeline gets with the images. They are made ahead, like batches.


_ROWS_AT_ONCE = 8
_Values = dict[str, Any]


class BadField(Exception):
    """A field of the sample at this row and position of its epoch is bad."""

    def __init__(self, row: int, position: int, error: Exception) -> None:
        super().__init__(str(error))
        self.row, self.position, self.error = row, position, error


class FieldBatches:
    """Makes the stored fields of the consecutive batches of a pipeline.

    ahead: number of batches to make in advance.
    """

    def __init__(self, fields: Fields, threads: int, ahead: int) -> None:
        self._fields, self._ahead = fields, ahead
        self._threads = ThreadPoolExecutor(threads, "packer-fields")
        self._source: Source | None = None
        self._asked: dict[tuple[int, int], list[Future[list[_Values | Exception]]]] = {}

    def take(self, source: Source, epoch: int, step: int, returned: Int64s | None) -> list[_Values]:
        """The values of a batch by sample.

        returned: the rows that the pipeline returned, None if these are the planned rows. Raises BadField, and other
        errors of reading.
        """
        if source is not self._source:
            self._source, self._asked = source, {}
        for number in range(step, min(step + 1 + self._ahead, source.batches(epoch))):
            if (epoch, number) not in self._asked:
                self._asked[epoch, number] = self._ask(source, epoch, *source.samples_of(epoch, number))
        positions, rows = source.samples_of(epoch, step)
        values = [item for part in self._asked.pop((epoch, step)) for item in part.result()]
        if returned is not None:
            kept = source.kept(epoch, step, returned)
            positions, rows, values = positions[kept], rows[kept], [values[i] for i in kept.tolist()]
            for i in np.flatnonzero(rows != returned).tolist():
                (values[i],) = self._make(source, epoch, positions[i : i + 1], returned[i : i + 1])
            rows = returned
        good: list[_Values] = []
        for value, row, position in zip(values, rows.tolist(), positions.tolist(), strict=True):
            if isinstance(value, Exception):
                raise BadField(row, position, value)
            good.append(value)
        return good

    def stop(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ask(
        self, source: Source, epoch: int, positions: Int64s, rows: Int64s
    ) -> list[Future[list[_Values | Exception]]]:
        parts = [slice(i, i + _ROWS_AT_ONCE) for i in range(0, len(rows), _ROWS_AT_ONCE)]
        return [self._threads.submit(self._make, source, epoch, positions[part], rows[part]) for part in parts]

    def _make(self, source: Source, epoch: int, positions: Int64s, rows: Int64s) -> list[_Values | Exception]:
        """The values of some samples, or the errors of making them."""
        reader, fields = source.feed.reader, self._fields
        moved: list[tuple[Job, tuple[int, int]] | tuple[()]] = [()] * len(rows)
        if fields.moving:
            info, plan = source.plan(epoch, positions, rows)
            if info is not None and plan is not None:
                sizes = zip(*(side.tolist() for side in upright_sides(info)), strict=True)
                moved = list(zip(plan.jobs(), sizes, strict=True))
        made: list[_Values | Exception] = []
        for row, payloads, how in zip(rows.tolist(), fields.read(reader, rows), moved, strict=True):
            try:
                made.append(fields.decode(payloads, fields.placement(reader, row, *how)))
            except SAMPLE_ERRORS as error:
                made.append(error)
        return made


def collated(fields: Fields, values: Sequence[_Values], output: Output) -> dict[str, Any]:
    """The fields of a batch: masks as one array if every sample of the set has one; all others as lists."""
    columns = {name: [some[name] for some in values] for name in fields.stored}
    if output == "torch":
        from readers.collate import stack_masks, to_tensor

        columns = {name: [to_tensor(fields.kind(name), value) for value in columns[name]] for name in columns}
        return {n: stack_masks(some) if n in fields.stacked and some else some for n, some in columns.items()}
    return {n: np.stack(_alike(some)) if n in fields.stacked and some else some for n, some in columns.items()}


def _alike(masks: Sequence[Any]) -> Sequence[Any]:
    """Masks in one dtype, uint8 or int32, as in `readers.collate`."""
    return masks if all(mask.dtype == np.uint8 for mask in masks) else [mask.astype(np.int32) for mask in masks]


_OUTPUTS = ("torch", "numpy")
_ERROR_CHARACTERS = 400


class DaliLoader(FeedLoader):
    """Iterate over batches of a DALI pipeline, by default (images, labels); each `for` loop is one epoch.

        loader = DaliLoader(reader, 256, augment=classification(224), options=PipelineOptions(device="cuda"), seed=7)

    augment: ops, as for `readers.loader.ImageLoader`, with the same crops and flips; see `readers.dali.pipeline`.
    graph: in place of augment, see `readers.dali.pipeline`.
    order, shuffle, seed, ranks: as for `readers.loader.ImageLoader`, with the same samples.
    fields: as for `readers.loader.ImageLoader`, with the same values: masks, boxes and points follow the
        image through `augment`, and cannot through `graph`. "image" is always one of them.
    options: where and how the pipeline runs; as many threads once more decode other fields.
    output: "torch" tensors (images on the pipeline's device, all else on the CPU) or "numpy" arrays.
    on_error: "raise"; "skip" (smaller batches; DALI takes no empty batch, so one of bad samples alone is an error); or
        "substitute" (another sample); see `bad_samples`. An image that only DALI fails on ends its pipeline: a new one
        continues without it, in this epoch and the later ones.

    The pipeline starts with the first loop and lives until an epoch is left early, an error, or the loader's end. A
    loop begins with its first batch. Raises TrainerError where two loops run at once, or a framework would lose or
    repeat batches. `state_dict` names the first batch that has not been handed out; `load_state_dict` lets the next
    loop begin there, on any number of ranks, also with a state of ImageLoader.
    """

    @accepts_old_names
    def __init__(
        self,
        reader: Reader,
        batch_size: int,
        *,
        augment: Sequence[Op] | None = None,
        graph: Graph | None = None,
        options: PipelineOptions | None = None,
        fields: Sequence[str] | Mapping[str, str] | FieldOptions = ("image", "label"),
        output: Output = "torch",
        order: Order | None = None,
        shuffle: bool = True,
        seed: int | None = None,
        ranks: Ranks | None = None,
        on_error: OnError = "raise",
    ) -> None:
        check_choice("output", output, _OUTPUTS)
        self.options, self.output, self._graph = options or PipelineOptions(), output, graph
        self._fields = _checked(Fields(fields, reader), augment, graph)
        self._source = Source(
            reader,
            batch_size,
            augment=augment,
            order=order,
            shuffle=shuffle,
            seed=seed,
            ranks=ranks,
            on_error=on_error,
        )
        self._undecodable: dict[int, str] = {}  # rows on which DALI failed, with the reason
        self._idle: _Batches | None = None  # a pipeline at the end of an epoch
        pipeline(self._source, self.options, graph=graph)  # only checks the arguments; nothing is started
        feed = self._source.feed
        stated = ranks or Ranks()
        super().__init__(replace(feed, options=replace(feed.options, rank=stated.rank, world_size=stated.world_size)))

    @property
    def fields(self) -> tuple[str, ...]:
        return self._fields.wanted

    def close(self) -> None:
        """Stop the pipeline and its processes, and end the current loop; the next loop starts them again."""
        if self._place.begun is not None:
            self._interrupt("this loader was closed")
            self._put(self._place.next)
        self._idle = None

    # --- one epoch ------------------------------------------------------------------------------------------------
    def _open(self, feed: Feed) -> Maker:
        idle, self._idle = self._idle, None
        if idle is not None and idle.next_epoch(feed):
            return idle
        source = self._source.over(feed).without(self._undecodable)
        return _Batches(source, self.options, self._graph, self._fields, self.output, self._undecodable)

    def _finish(self, made: tuple[Any, Sequence[BadSample]]) -> tuple[Any, Sequence[BadSample]]:
        return made

    def _end_epoch(self, maker: Maker) -> None:
        assert isinstance(maker, _Batches)
        if maker.at_end():
            self._idle = maker


class _Batches:
    """The batches of a pipeline, which may run for several epochs.

    source: the source of the running pipeline, or of the next one.
    options, graph, fields, output: as for `DaliLoader`.
    undecodable: receives the rows that DALI fails on, and those with a bad field.
    """

    def __init__(
        self,
        source: Source,
        options: PipelineOptions,
        graph: Graph | None,
        fields: Fields,
        output: Output,
        undecodable: dict[int, str],
    ) -> None:
        self._source, self._options, self._graph, self._output = source, options, graph, output
        self._fields, self._undecodable = fields, undecodable
        self._values = _decoded_beside(fields, options)
        self._run: Run | None = None
        self._epoch = self._step = 0  # as DALI counts them
        self._batches = source.batches()

    def take(self) -> tuple[Any, Sequence[BadSample]]:
        """(fields of a batch, its bad samples)."""
        if self._step == self._batches:
            return self._batch(*self._empty(), np.empty(0, np.int64), []), ()
        values: list[dict[str, Any]] = []
        while True:
            try:
                if self._run is None:
                    self._run = self._start()
                images, labels, *rows = self._run.take()
                returned = np.asarray(rows[0]) if rows else None
                if self._values is not None:
                    values = self._values.take(self._source, self._epoch, self._step, returned)
                break
            except StopIteration:
                self._run = None
                ended = f"DALI ended epoch {self._number} after {self._step} of {self._batches} batches"
                raise WorkerError(f"{ended}; start the loop again from the last state_dict") from None
            except BadField as bad:
                self._run = None  # its prefetched batches contain the bad sample
                self._leave_out(bad.row, bad.position, bad.error)
                continue
            except Exception as error:
                self._run = None  # a failed pipeline cannot continue
                problem = error.with_traceback(None)  # its frames would keep the pipeline alive
            except BaseException:
                self._run = None
                raise
            self._recover(problem)
        bad_samples: Sequence[BadSample] = ()
        if returned is None:
            returned = self._source.samples_of(self._epoch, self._step)[1]
        else:
            bad_samples = self._source.bad_samples_of(self._epoch, self._step, returned)
        self._step += 1
        return self._batch(images, labels, returned, values), bad_samples

    def stop(self) -> None:
        """Stop the pipeline."""
        self._run = None
        if self._values is not None:
            self._values.stop()

    def at_end(self) -> bool:
        """Whether the pipeline has noticed the end of its epoch, so that it can be used for the next one."""
        try:
            if self._run is not None:
                self._run.take()
        except StopIteration:
            return True
        return False

    def next_epoch(self, feed: Feed) -> bool:
        """Continue with the first epoch of `feed` if it is the pipeline's next epoch; returns whether it is."""
        if self._source.feed.at(Start(self._number + 1)) != feed or self._run is None:
            return False
        self._epoch, self._step = self._epoch + 1, 0
        self._batches = self._source.batches(self._epoch)
        self._run.reset()
        return True

    # --- inside ---------------------------------------------------------------------------------------------------
    @property
    def _number(self) -> int:
        """The epoch in the numbering of the order."""
        return self._source.feed.start.epoch + self._epoch

    def _start(self) -> Run:
        unstarted = pipeline(self._source, self._options, graph=self._graph)
        outputs = ("image", "label") if self._source.on_error == "raise" else ("image", "label", "row")
        return start_run(unstarted, outputs, self._output, self._options.workers)

    def _batch(self, images: Any, labels: Any, rows: Int64s, values: Sequence[dict[str, Any]]) -> Any:
        """The fields of a batch. rows: the rows of its samples."""
        columns = collated(self._fields, values, self._output)

        def field(name: str) -> Any:
            if name in columns:
                return columns[name]
            if name in ("image", "label"):
                return images if name == "image" else labels
            column = Fields.column(self._source.feed.reader, rows, name)
            return as_output(column, self._output) if isinstance(column, np.ndarray) else column

        return self._fields.collect(field)

    def _empty(self) -> tuple[Any, Any]:
        """Images and labels of an empty batch, for a rank without samples in the last step."""
        recipe, options = self._source.recipe, self._options
        if recipe is None or recipe.out_size is None:
            return empty_batch(self._output, (), options.dtype or "uint8", "cpu")
        height, width = recipe.out_size
        shape = (3, height, width) if options.layout == "NCHW" else (height, width, 3)
        dtype = options.dtype or ("uint8" if recipe.normalize is None else "float32")
        return empty_batch(self._output, shape, dtype, options.device)

    def _recover(self, error: Exception) -> None:
        """Continue without the sample that made the pipeline fail, if on_error allows it; otherwise raise the error."""
        if isinstance(error, PackerError):
            raise error
        under_way = range(self._step, min(self._batches, self._step + 2 * self._options.prefetch + 2))
        culprit = _diagnose(self._source, self._epoch, under_way)
        if culprit is None:
            raise WorkerError(
                f"DALI failed at batch {self._step} of epoch {self._number}, though our own decoder reads its images: "
                f"{_essence(error)}"
            ) from error
        row, reason = culprit
        self._leave_out(row, 0, BadSampleError(reason))

    def _leave_out(self, row: int, position: int, error: Exception) -> None:
        """Start the next pipeline at this step without a sample. Raises BadSampleError with on_error="raise"."""
        feed = self._source.feed
        bad_sample(feed.reader, feed.options.on_error, row, position, error)
        self._undecodable[row] = str(error)
        self._source = self._source.without(self._undecodable).over(feed.at(feed.after(self._step, self._number)))
        self._epoch = self._step = 0
        self._batches = self._source.batches()


def _checked(fields: Fields, augment: Sequence[Op] | None, graph: Graph | None) -> Fields:
    """Raise ValueError for fields that a pipeline cannot make, or that would not follow its images."""
    if "image" not in fields.wanted:
        raise ValueError("a DALI pipeline makes images: name 'image' in fields, or take ImageLoader for other fields")
    if graph is not None:
        fields.check_apart("what a graph does to an image is not known", "give ops as augment")
    fields.check_ops(augment or ())
    return fields


def _decoded_beside(fields: Fields, options: PipelineOptions) -> FieldBatches | None:
    return FieldBatches(fields, options.threads or usable_cpus(), options.prefetch) if fields.stored else None


def _diagnose(source: Source, epoch: int, steps: range) -> tuple[int, str] | None:
    """(row, reason) of the first bad sample in the unfinished batches when DALI failed, or None.

    DALI's messages name neither key nor batch. So the batches are read again in this process, which raises the error
    of a worker process, and their images are decoded by this package's decoder.
    """
    for step in steps:
        for row, data in source.images(epoch, step):
            reason = refusal(data)
            try:
                if not reason:
                    decode_image(data)
            except BadSampleError as error:
                reason = str(error)
            if reason:
                return row, reason
    return None


def _essence(error: Exception) -> str:
    """The lines of a DALI message that describe the error, without its place in the graph."""
    lines = [line.strip() for line in str(error).splitlines()]
    if "encountered:" in lines:
        lines = lines[lines.index("encountered:") + 1 :]
    text = " ".join(line for line in lines if line and not line.startswith("Current pipeline object"))
    return text[-_ERROR_CHARACTERS:] or type(error).__name__
