"""DALI graphs over our samples: `external_source` for pipelines of your own, and `pipeline` from `readers.augment` ops.

    CPU    encoded → decode only the box → resize → crop, flip, normalise
    GPU    encoded → decode the whole image ("mixed") → cut out the box → resize → crop, flip, normalise

Ops on pixels (`Op.dali`) come between the flip and the normalisation.

Boxes and flips come with the samples, drawn by (seed, epoch, position): DALI's own random numbers are not used, and a
resumed epoch has the same crops. On the GPU whole images are decoded by default, since decoding a part of an image
crashed with nvImageCodec 0.9.0 on some GPUs (its issue 55).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from cache.node import detect_ranks, usable_cpus
from readers.augment.ops.base import Stage
from readers.augment.recipe import Recipe
from readers.dali.backend import load_dali
from readers.dali.source import BatchSource, SampleSource, Source
from readers.feed import OnError, check_choice
from readers.order import Order
from readers.order.schedule import Tail
from readers.reader import Reader

__all__ = ["Graph", "Per", "PipelineOptions", "external_source", "pipeline"]

Graph: TypeAlias = Callable[[Any], Any]
Per: TypeAlias = Literal["batch", "sample"]
_CHOICES = {
    "device": ("cpu", "gpu"),
    "start_method": ("spawn", "fork"),
    "layout": ("NCHW", "NHWC"),
    "dtype": (None, "uint8", "float32", "float16"),
}


# --- nodes ------------------------------------------------------------------------------------------------------
def external_source(
    reader: Reader,
    batch_size: int,
    *,
    seed: int = 0,
    order: Order | None = None,
    shuffle: bool = True,
    rank: int | None = None,
    world_size: int | None = None,
    tail: Tail = "drop_last",
    on_error: OnError = "raise",
    state: Mapping[str, Any] | None = None,
    parallel: bool = False,
    per: Per = "batch",
    ahead: int = 2,
) -> tuple[Any, Any]:
    """(encoded, label) in the graph of the pipeline that is being defined: uint8 [bytes] and int64 [1] per sample.

    reader: any reader of this package.
    batch_size: that of the pipeline.
    seed, order, shuffle, rank, world_size, tail, on_error: as for `DaliLoader`.
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
        rank=rank,
        world_size=world_size,
        tail=tail,
        on_error=on_error,
    )
    if state is not None:
        source = source.resumed(state)
    encoded, label, *_ = _source_nodes(source, parallel, per, ahead)
    return encoded, label


def _source_nodes(source: Source, parallel: bool, per: Per, ahead: int) -> list[Any]:
    """One node for each part of a batch (see `readers.dali.source`), in the graph that is being defined."""
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
    if source.recipe is not None:
        dtypes += [types.INT64] * source.recipe.boxed + [types.FLOAT, types.INT32]
        dtypes += [types.FLOAT] * len(source.recipe.pixel_ops)
    dtypes += [types.INT64] * (source.on_error != "raise")
    # Worker processes copy their results into a pool. Without them DALI uses our memory, for as long as a batch is in
    # the pipeline, and while the next one is being made.
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
@dataclass(frozen=True)
class PipelineOptions:
    """How a pipeline runs. Raises ValueError for invalid values.

    device: where images are decoded and augmented.
    device_id: the GPU, by default the rank's number on this node.
    threads: of DALI on the CPU, by default this rank's share of the CPUs.
    prefetch: batches that DALI works ahead.
    workers: processes that read; 0 reads in this process.
    start_method: of these processes.
    layout: of the images.
    dtype: of the images, by default uint8, or float32 where the ops end with Normalize.
    fused_decoding: decode only the box; by default on the CPU.
    fancy_upsampling: the GPU interpolates colours as libjpeg does on the CPU.
    """

    device: Literal["cpu", "gpu"] = "cpu"
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
        _check(source.recipe, options)
    elif source.recipe is not None:
        raise ValueError("a source with ops executes those: leave augment out where a graph is given")
    dali, device_id = load_dali(), None
    if options.device == "gpu":
        device_id = detect_ranks().local_rank if options.device_id is None else options.device_id
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
            images = _augment(dali, source.recipe, options, encoded, columns)
        pipe.set_outputs(images, label, *rows)
    return pipe


def _augment(dali: Any, recipe: Recipe, options: PipelineOptions, encoded: Any, columns: list[Any]) -> Any:
    """The node of the images after a recipe. columns: nodes of what the ops do to each, see `readers.dali.source`."""
    fn, types = dali.fn, dali.types
    box, (resized, flips, *steps) = columns[: recipe.boxed], columns[recipe.boxed :]
    images = _decode(dali, options, encoded, *box)
    if recipe.interpolation is not None:
        # Our and Pillow's arithmetic: a filter as wide as the reduction, rounded to whole values.
        filters = {"bilinear": types.INTERP_LINEAR, "bicubic": types.INTERP_CUBIC}
        images = fn.resize(images, size=resized[0:2], interp_type=filters[recipe.interpolation], antialias=True)
    y, x, mirror = resized[2], resized[3], flips[0]
    if recipe.hangs_over:
        start = fn.cast(resized[2:4], dtype=types.INT32)
        images = fn.slice(images, start, recipe.out_size, axes=[0, 1], out_of_bounds_policy="pad", fill_values=0)
        y = x = 0.5
    if any(op.flip_axis == 2 for op in recipe.ops):
        images = fn.flip(images, horizontal=0, vertical=flips[1])
        y = y + flips[1] * (1 - 2 * y)  # the crop, which follows, counts from the other edge
    if steps:
        images = fn.crop(images, crop=recipe.out_size, crop_pos_y=y, crop_pos_x=x)
        images = fn.flip(images, horizontal=mirror)
        y, x, mirror = 0.5, 0.5, 0
    for op, parameters in zip(recipe.pixel_ops, steps, strict=True):
        images = op.dali(fn, images, parameters)
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
        crop=recipe.out_size,
        crop_pos_y=y,
        crop_pos_x=x,
        mirror=mirror,
        mean=mean,
        std=std,
        dtype=dtype,
        output_layout=options.layout[1:],
    )


def _decode(dali: Any, options: PipelineOptions, encoded: Any, box: Any = None) -> Any:
    """The box of each image, upright, RGB; the whole image without one."""
    fn, on_gpu = dali.fn, options.device == "gpu"
    arguments: dict[str, Any] = {"device": "mixed" if on_gpu else "cpu", "output_type": dali.types.RGB}
    if on_gpu:
        arguments["jpeg_fancy_upsampling"] = options.fancy_upsampling
    if box is None:
        return fn.decoders.image(encoded, **arguments)
    if not on_gpu if options.fused_decoding is None else options.fused_decoding:
        return fn.decoders.image_slice(encoded, box[0:2], box[2:4], axes=[0, 1], **arguments)
    return fn.slice(fn.decoders.image(encoded, **arguments), box[0:2], box[2:4], axes=[0, 1])


def _check(recipe: Recipe, options: PipelineOptions) -> None:
    for op in recipe.ops:
        if op.stage is not Stage.GEOMETRY and not op.on_dali:
            raise ValueError(
                f"DALI pipelines do not execute {type(op).__name__}: use ImageLoader, which executes it on the CPU and "
                f"on a GPU (device='cuda'), or write the pipeline yourself and pass it as graph"
            )
    if recipe.out_size is None:
        raise ValueError(
            "the size of the results depends on the image; end with RandomResizedCrop(224), or with Resize(256) and "
            "CenterCrop(224)"
        )
    if options.dtype == "uint8" and recipe.normalize is not None:
        raise ValueError("normalised values do not fit into uint8; leave Normalize out, or ask for a float dtype")
