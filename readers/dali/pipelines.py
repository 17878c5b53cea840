"""DALI pipelines: `external_source` for your own pipelines, and `pipeline` for lists of `readers.augment` ops."""

from __future__ import annotations

import multiprocessing.util
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from cache.errors import MissingExtraError, WorkerError
from cache.node import own_gpu, usable_cpus
from readers.augment.ops.base import Interpolation, Op, Stage, rounded_node
from readers.augment.ops.boxes import ResizeToBucket
from readers.augment.recipe import Part, Recipe
from readers.dali.source import BatchSource, SampleSource, Source, has_flips, has_size
from readers.feed import OnError, check_choice
from readers.options import Ranks, accepts_old_names
from readers.order.base import Order, Stepped
from readers.reader import Reader

# Running DALI pipelines, with results as torch tensors or NumPy arrays. Only this module imports DALI.
#
# A pipeline with worker processes is monitored. DALI communicates with its workers through locks in shared memory: a
# worker that is killed (out of memory) may hold a lock, or be counted by a condition, and then no call into DALI
# returns. So a thread makes the calls, and the caller waits for it while checking the workers. A stuck thread is
# abandoned.


Output: TypeAlias = Literal["torch", "numpy"]
_OLDEST = (2, 3)  # in earlier versions, a parallel external source could reuse memory that DALI was still reading
_CHECK_SECONDS = 0.2
_GRACE_SECONDS = 2.0  # DALI detects and reports most deaths of workers itself
_JOIN_SECONDS = 10.0


def load_dali() -> Any:
    """The module nvidia.dali. Raises MissingExtraError if it is not installed, or older than 2.3."""
    try:
        import nvidia.dali as dali
    except (ImportError, OSError) as error:  # OSError: a library that does not fit this system
        raise MissingExtraError("NVIDIA DALI", "dali", "readers.dali") from error
    if tuple(int(part) for part in dali.__version__.split(".")[:2]) < _OLDEST:
        raise MissingExtraError(f"DALI from 2.3 on (found {dali.__version__})", "dali", "readers.dali")
    return dali


def gpu_count() -> int | None:
    """Number of GPUs that DALI sees; None if unknown."""
    from nvidia.dali import backend

    try:
        return int(backend.GetCUDADeviceCount())  # type: ignore[attr-defined]  # of its C module
    except RuntimeError:  # no driver: making a pipeline raises the error
        return None


def empty_batch(output: Output, shape: tuple[int, ...], dtype: str, device: str) -> tuple[Any, Any]:
    """Images and labels of a batch without samples, in the form of a run. device: torch's name of the device."""
    images = as_output(np.empty((0, *shape), dtype), output)
    return images if output == "numpy" else images.to(device), as_output(np.empty(0, np.int64), output)


def as_output(array: npt.NDArray[Any], output: Output) -> Any:
    """An array in the form of outputs: a tensor on the CPU, or the array itself."""
    if output == "numpy":
        return array
    import torch

    return torch.from_numpy(array)


class Run(ABC):
    """A running pipeline, epoch after epoch. Dropping it ends the pipeline and its processes."""

    @abstractmethod
    def take(self) -> tuple[Any, ...]:
        """The outputs of the next batch, in separate memory: images, and the others as int64 [n].

        Raises StopIteration at the end of an epoch, and DALI's errors.
        """

    @abstractmethod
    def reset(self) -> None:
        """Begin the next epoch; allowed only after StopIteration."""

    def stream(self) -> AbstractContextManager[Any]:
        """A context for another thread, in which `take` returns images for the current CUDA stream of this one."""
        return nullcontext()


def start_run(pipeline: Any, outputs: Sequence[str], output: Output, workers: int) -> Run:
    """Start a pipeline with these outputs. Raises MissingExtraError."""
    open_run = partial(_TorchRun, _torch_iterator(), outputs) if output == "torch" else _ArrayRun
    if not workers:
        return open_run(pipeline)
    before = multiprocessing.active_children()
    pipeline.start_py_workers()
    started = [child for child in multiprocessing.active_children() if child not in before]
    return _WatchedRun(open_run(pipeline), started)


def _torch_iterator() -> Any:
    """DALI's iterator of torch tensors. Raises MissingExtraError."""
    try:
        import torch  # noqa: F401  the plug-in below would only say that a module is missing
    except ImportError as error:
        raise MissingExtraError("torch", "torch", "DaliLoader(output='torch')") from error
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    return DALIGenericIterator


class _TorchRun(Run):
    """A run by DALI's iterator. Images are on the pipeline's device, all other outputs on the CPU."""

    def __init__(self, iterator: Any, outputs: Sequence[str], pipeline: Any) -> None:
        self._device_id, self._outputs = pipeline.device_id, outputs
        self._iterator = iterator([pipeline], list(outputs), size=-1, prepare_first_batch=False)

    def take(self) -> tuple[Any, ...]:
        (batch,) = next(self._iterator)
        images, *numbers = (batch[name] for name in self._outputs)
        return (images, *(values.flatten() for values in numbers))

    def reset(self) -> None:
        self._iterator.reset()

    def stream(self) -> AbstractContextManager[Any]:
        if self._device_id is None:
            return nullcontext()
        import torch

        # DALI makes the current stream wait for its images, and the current stream differs between threads.
        stream: AbstractContextManager[Any] = torch.cuda.stream(torch.cuda.current_stream(self._device_id))
        return stream


class _ArrayRun(Run):
    """A run by the pipeline itself. Arrays are copies in this process's memory, for any device of the pipeline."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline

    def take(self) -> tuple[Any, ...]:
        images, *numbers = (np.array(output.as_cpu().as_array()) for output in self._pipeline.run())
        return (images, *(values.ravel() for values in numbers))

    def reset(self) -> None:
        self._pipeline.reset()


# --- with worker processes --------------------------------------------------------------------------------------
_Call = tuple[AbstractContextManager[Any], Literal["take", "reset"]]


class _WatchedRun(Run):
    """A run whose workers have been started. Dropping it ends the pipeline and the workers.

    The end of the interpreter does so, too, before `multiprocessing` joins all started processes.
    """

    def __init__(self, run: Run, workers: list[BaseProcess]) -> None:
        self._run, self._workers = [run], workers  # the list is empty once the run has ended
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        arguments = (self._run, self._calls, self._answers)
        thread = threading.Thread(target=_serve, args=arguments, name="packer-dali", daemon=True)
        thread.start()
        multiprocessing.util.Finalize(self, _stop, (self._run, thread, self._calls, workers), exitpriority=10)

    def take(self) -> tuple[Any, ...]:
        outputs: tuple[Any, ...] = self._call("take")
        return outputs

    def reset(self) -> None:
        self._call("reset")

    def stream(self) -> AbstractContextManager[Any]:
        return self._run[0].stream()

    def _call(self, method: Literal["take", "reset"]) -> Any:
        """Let the thread call a method. Raises WorkerError if a worker has died."""
        self._calls.put((self.stream(), method))
        result, error, dead_since = None, None, 0.0
        try:
            while True:
                try:
                    result, error = self._answers.get(timeout=_CHECK_SECONDS)
                    break
                except queue.Empty:
                    error = self._death()
                    dead_since = dead_since or (time.monotonic() if error else 0.0)
                    if dead_since and time.monotonic() - dead_since > _GRACE_SECONDS:
                        break
            if error is not None:
                raise error if isinstance(error, StopIteration) else self._death() or error
            return result
        finally:
            del error  # its traceback has this frame, which would keep the pipeline alive

    def _death(self) -> WorkerError | None:
        """The error for a dead worker; None if all are alive."""
        codes = [worker.exitcode for worker in self._workers if not worker.is_alive()]
        if not codes:
            return None
        return WorkerError(
            f"a process that reads for DALI died (exit status {codes[0]}; -9 often means out of memory); start the "
            f"loop again from the last state_dict, with fewer workers or a smaller prefetch"
        )


def _serve(runs: list[Run], calls: queue.SimpleQueue[Any], answers: queue.SimpleQueue[Any]) -> None:
    while (call := calls.get()) is not None:
        context, method = call
        answer: tuple[Any, BaseException | None]
        try:
            with context:
                answer = (getattr(runs[0], method)(), None)
        except BaseException as error:
            answer = (None, error.with_traceback(None))  # its frames would keep the pipeline alive
        answers.put(answer)
        del call, context, answer


def _stop(runs: list[Run], thread: threading.Thread, calls: queue.SimpleQueue[Any], workers: list[BaseProcess]) -> None:
    calls.put(None)
    stuck = any(not worker.is_alive() for worker in workers)
    thread.join(_CHECK_SECONDS if stuck else _JOIN_SECONDS)
    if thread.is_alive():
        for worker in workers:
            worker.kill()
            worker.join(_JOIN_SECONDS)
    else:
        runs.clear()


# The DALI graph of a recipe: from nodes of encoded images and of their plan to a node of images.
#
#     CPU    encoded → decode only the box → resize → crop, flip, ops on pixels, normalise
#     GPU    encoded → decode the whole image ("mixed") → cut out the box → the same
#
# A crop or resize after ops on pixels begins another part (`readers.augment.recipe`): box, resize, crop, flips and ops
# again. Ops on pixels (`Op.dali`) work on float32, and each part is rounded to uint8, as in `readers.augment.cpu`.
#
# Boxes, flips and the parameters of ops come with the samples, drawn by (seed, epoch, position); DALI's random numbers
# are not used, so a resumed epoch has the same images. On the GPU whole images are decoded by default, because decoding
# a part of an image crashed with nvImageCodec 0.9.0 on some GPUs (its issue 55).


_CHOICES = {
    "device": ("cpu", "cuda"),
    "start_method": ("spawn", "fork"),
    "layout": ("NCHW", "NHWC"),
    "dtype": (None, "uint8", "float32", "float16"),
}


@dataclass(frozen=True)
class PipelineOptions:
    """How a pipeline runs. Raises ValueError for invalid values.

    device: where images are decoded and augmented: "cpu" or "cuda".
    device_id: the GPU, by default as for `readers.loader.ImageLoader`: that of torch.cuda.set_device, or of the rank.
    threads: of DALI on the CPU, by default this rank's share of the CPUs.
    prefetch: batches that DALI works ahead.
    workers: processes that read; 0 reads in this process.
    start_method: of these processes.
    layout: of the images.
    dtype: of the images, by default uint8, or float32 where the ops end with Normalize.
    fused_decoding: decode only the box; by default on the CPU.
    fancy_upsampling: the GPU interpolates colours as libjpeg does on the CPU.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    device_id: int | None = None
    threads: int | None = None
    prefetch: int = 2
    workers: int = 0
    start_method: Literal["spawn", "fork"] = "spawn"
    layout: Literal["NCHW", "NHWC"] = "NCHW"
    dtype: Literal["uint8", "float32", "float16"] | None = None
    fused_decoding: bool | None = None
    fancy_upsampling: bool = True

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            check_choice(name, getattr(self, name), allowed)
        for name, least in (("prefetch", 1), ("workers", 0), ("threads", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}, expected at least {least}")


def check_recipe(recipe: Recipe, options: PipelineOptions, order: Order) -> None:
    """Raise ValueError for ops and sizes that a pipeline cannot execute."""
    for op in recipe.ops:
        if op.stage is not Stage.GEOMETRY and not op.on_dali:
            raise ValueError(
                f"DALI pipelines do not execute {op!r}: use ImageLoader, which executes it on the CPU and "
                f"on a GPU (device='cuda'), or write the pipeline yourself and pass it as graph"
            )
    in_buckets = any(isinstance(op, ResizeToBucket) for op in recipe.ops)
    if recipe.out_size is None and not (in_buckets and isinstance(order, Stepped)):
        raise ValueError(
            "the size of the results depends on the image; end with RandomResizedCrop(224), with Resize(256) and "
            "CenterCrop(224), or with ResizeToBucket in batches of one shape, of order=Bucketed(…)"
        )
    if options.dtype == "uint8" and recipe.normalize is not None:
        raise ValueError("normalised values do not fit into uint8; leave Normalize out, or ask for a float dtype")


def augmented(dali: Any, recipe: Recipe, options: PipelineOptions, encoded: Any, columns: list[Any]) -> Any:
    """The node of the images after a recipe. columns: nodes of the plan (see `readers.dali.source`)."""
    nodes = iter(columns)
    images = None
    for part in recipe.parts:
        box = next(nodes) if part.boxed else None
        if images is None:
            images = _decode(dali, options, encoded, box)
        elif box is not None:
            images = dali.fn.slice(images, box[0:2], box[2:4], axes=[0, 1])
        resized = next(nodes) if has_size(part) else None
        flips = next(nodes) if has_flips(part) else None
        if part.interpolation is not None:
            images = _resized(dali, part.interpolation, images, resized)
        if part.last:
            images = _finished(dali, recipe, options, images, resized, flips, nodes)
        else:
            images = _passed(dali, part, images, resized, flips, nodes)
    return images


def _passed(dali: Any, part: Part, images: Any, resized: Any, flips: Any, nodes: Iterator[Any]) -> Any:
    """The result of a part before the last, from its resized images."""
    fn, types = dali.fn, dali.types
    if part.crops_result:
        start, shape = (fn.cast(some, dtype=types.INT32) for some in (resized[2:4], resized[4:6]))
        images = fn.slice(images, start, shape, axes=[0, 1], out_of_bounds_policy="pad", fill_values=0)
    if part.flips:
        images = fn.flip(images, horizontal=flips[0], vertical=flips[1])
    return _changed(dali, part.steps, images, nodes)


def _finished(
    dali: Any, recipe: Recipe, options: PipelineOptions, images: Any, resized: Any, flips: Any, nodes: Iterator[Any]
) -> Any:
    """The images of a batch, from the resized images of the last part."""
    fn, types, part = dali.fn, dali.types, recipe.parts[-1]
    y, x, mirror = resized[2], resized[3], flips[0]
    size = resized[4:6] if recipe.out_size is None else recipe.out_size
    if part.hangs_over:
        start = fn.cast(resized[2:4], dtype=types.INT32)
        shape = fn.cast(size, dtype=types.INT32) if recipe.out_size is None else size
        images = fn.slice(images, start, shape, axes=[0, 1], out_of_bounds_policy="pad", fill_values=0)
        y = x = 0.5
    if any(op.flip_axis == 2 for _, op in part.ops):
        images = fn.flip(images, horizontal=0, vertical=flips[1])
        y = y + flips[1] * (1 - 2 * y)  # the crop, which follows, counts from the other edge
    if part.steps:
        images = fn.crop(images, crop=size, crop_pos_y=y, crop_pos_x=x)
        images = _changed(dali, part.steps, fn.flip(images, horizontal=mirror), nodes)
        y, x, mirror = 0.5, 0.5, 0
    # DALI takes mean and deviation in 0..255.
    dtypes = {"uint8": types.UINT8, "float32": types.FLOAT, "float16": types.FLOAT16}
    if recipe.normalize is not None:
        mean, std = ([255 * value for value in values] for values in (recipe.normalize.mean, recipe.normalize.std))
        dtype = dtypes[options.dtype or "float32"]
    else:
        dtype = dtypes[options.dtype or "uint8"]
        mean, std = [0.0] * 3, [1.0 if dtype == types.UINT8 else 255.0] * 3
    return fn.crop_mirror_normalize(
        images,
        crop=size,
        crop_pos_y=y,
        crop_pos_x=x,
        mirror=mirror,
        mean=mean,
        std=std,
        dtype=dtype,
        output_layout=options.layout[1:],
    )


def _resized(dali: Any, interpolation: Interpolation, images: Any, resized: Any) -> Any:
    """Resize with the arithmetic of Pillow and `readers.augment.cpu`: antialiased, rounded to integers."""
    filters = {"bilinear": dali.types.INTERP_LINEAR, "bicubic": dali.types.INTERP_CUBIC}
    return dali.fn.resize(images, size=resized[0:2], interp_type=filters[interpolation], antialias=True)


def _changed(dali: Any, steps: tuple[Op, ...], images: Any, nodes: Iterator[Any]) -> Any:
    """uint8 images after ops on pixels."""
    if not steps:
        return images
    fn, types = dali.fn, dali.types
    images = fn.cast(images, dtype=types.FLOAT)
    for op in steps:
        images = op.dali(dali, images, next(nodes))
    return fn.reshape(fn.cast(rounded_node(dali, images), dtype=types.UINT8), layout="HWC")


def _decode(dali: Any, options: PipelineOptions, encoded: Any, box: Any = None) -> Any:
    """The box of each image, upright, RGB; the whole image without one."""
    fn, on_gpu = dali.fn, options.device == "cuda"
    arguments: dict[str, Any] = {"device": "mixed" if on_gpu else "cpu", "output_type": dali.types.RGB}
    if on_gpu:
        arguments["jpeg_fancy_upsampling"] = options.fancy_upsampling
    if box is None:
        return fn.decoders.image(encoded, **arguments)
    if not on_gpu if options.fused_decoding is None else options.fused_decoding:
        return fn.decoders.image_slice(encoded, box[0:2], box[2:4], axes=[0, 1], **arguments)
    return fn.slice(fn.decoders.image(encoded, **arguments), box[0:2], box[2:4], axes=[0, 1])


Graph: TypeAlias = Callable[[Any], Any]
Per: TypeAlias = Literal["batch", "sample"]


# --- nodes ------------------------------------------------------------------------------------------------------
@accepts_old_names
def external_source(
    reader: Reader,
    batch_size: int,
    *,
    seed: int = 0,
    order: Order | None = None,
    shuffle: bool = True,
    ranks: Ranks | None = None,
    on_error: OnError = "raise",
    state: Mapping[str, Any] | None = None,
    parallel: bool = False,
    per: Per = "batch",
    ahead: int = 2,
) -> tuple[Any, Any]:
    """(encoded, label) nodes in the graph of the pipeline being defined: uint8 [bytes] and int64 [1] per sample.

    reader: any reader of this package.
    batch_size: that of the pipeline.
    seed, order, shuffle, ranks, on_error: as for `DaliLoader`; the tail is "drop_last" by default.
    state: where to continue, from `DaliLoader`, `ImageLoader` or `Source.state_after`.
    parallel: read in the worker processes of the pipeline (py_num_workers).
    per: whether a worker makes whole batches or, with tail="drop_last" only, single samples.
    ahead: batches that worker processes prepare in advance.

    Each epoch of the pipeline ends with StopIteration; after `pipeline.reset()` comes the next one. Without `parallel`
    DALI gets views of the reader's memory, and nothing is copied. Raises MissingExtraError, ResumeError, ValueError.
    """
    source = Source(
        reader,
        batch_size,
        order=order,
        shuffle=shuffle,
        seed=seed,
        ranks=replace(ranks or Ranks(), tail=(ranks and ranks.tail) or "drop_last"),
        on_error=on_error,
    )
    if state is not None:
        source = source.resumed(state)
    encoded, label, *_ = _source_nodes(source, parallel, per, ahead)
    return encoded, label


def _source_nodes(source: Source, parallel: bool, per: Per, ahead: int) -> list[Any]:
    """One node for each part of a batch (see `readers.dali.source`), in the graph being defined."""
    dali = load_dali()
    current, feed = dali.Pipeline.current(), source.feed
    if current is None:
        raise ValueError("no pipeline is being defined: call this in a function with @pipeline_def, or in `with pipe:`")
    if current.max_batch_size != feed.batch_size:
        raise ValueError(f"the pipeline has batches of {current.max_batch_size}, the source of {feed.batch_size}")
    check_choice("per", per, ("batch", "sample"))
    if per == "sample" and feed.options.tail != "drop_last":
        raise ValueError(
            f"samples one by one make no short batches, as tail={feed.options.tail!r} has: "
            f"use per='batch' or tail='drop_last'"
        )
    if per == "sample" and source.on_error == "skip":
        raise ValueError("samples one by one make no short batches, as on_error='skip' needs: use per='batch'")
    types = dali.types
    dtypes = [types.UINT8, types.INT64]
    for part in source.recipe.parts if source.recipe is not None else ():
        dtypes += [types.INT64] * part.boxed + [types.FLOAT] * has_size(part) + [types.INT32] * has_flips(part)
        dtypes += [types.FLOAT] * len(part.steps)
    dtypes += [types.INT64] * (source.on_error != "raise")
    # Worker processes copy their results into a pool. Without them DALI uses our memory while a batch is in the
    # pipeline, and while the next batch is being made.
    kept = 0 if parallel else _batches_under_way(current.prefetch_queue_depth) + 1
    return list(
        dali.fn.external_source(
            BatchSource(source, kept) if per == "batch" else SampleSource(source, kept),
            num_outputs=len(dtypes),
            dtype=dtypes,
            ndim=[1] * len(dtypes),
            batch=per == "batch",
            batch_info=True,
            **({"parallel": True, "prefetch_queue_depth": ahead} if parallel else {"no_copy": True}),
        )
    )


def _batches_under_way(depth: int | Mapping[str, int]) -> int:
    """Batches in a pipeline with this `prefetch_queue_depth`: one number, or one for each of its two queues."""
    if isinstance(depth, Mapping):
        cpu, gpu = depth["cpu_size"], depth["gpu_size"]
        return cpu * gpu if cpu != gpu else cpu
    return depth


# --- pipelines --------------------------------------------------------------------------------------------------
def pipeline(source: Source, options: PipelineOptions | None = None, *, graph: Graph | None = None) -> Any:
    """A `nvidia.dali.Pipeline` with the outputs (images, labels), neither built nor started.

    source: with the ops to execute, unless a graph is given.
    graph: a function from the encoded node to that of the images, for what our ops cannot express. Random operators in
        it draw by DALI's seed, which a resume does not restore.

    Labels are int64 [n, 1] on the CPU. Where the source skips or replaces bad samples there is a third output, which
    samples these are: int64 [n, 1]. Raises ValueError for ops that DALI pipelines do not execute, and for results of no
    fixed size.
    """
    options = options or PipelineOptions()
    if graph is None:
        if source.recipe is None:
            raise ValueError(
                "a source without ops needs a graph: make it with augment=classification(224), or pass one"
            )
        check_recipe(source.recipe, options, source.feed.order)
    elif source.recipe is not None:
        raise ValueError("a source with ops executes those: leave augment out where a graph is given")
    dali, device_id = load_dali(), None
    if options.device == "cuda":
        device_id = own_gpu(gpu_count()) if options.device_id is None else options.device_id
    pipe = dali.Pipeline(
        batch_size=source.feed.batch_size,
        num_threads=options.threads or usable_cpus(),
        device_id=device_id,
        seed=source.feed.seed % (1 << 31),
        prefetch_queue_depth=options.prefetch,
        py_num_workers=max(1, options.workers),
        py_start_method=options.start_method,
    )
    with pipe:
        encoded, label, *columns = _source_nodes(source, options.workers > 0, "batch", options.prefetch)
        rows = [] if source.on_error == "raise" else [columns.pop()]
        if source.recipe is None:
            assert graph is not None
            images = graph(encoded)
        else:
            images = augmented(dali, source.recipe, options, encoded, columns)
        pipe.set_outputs(images, label, *rows)
    return pipe
