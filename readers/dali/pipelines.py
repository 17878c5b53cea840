"""DALI pipelines: `external_source` for those of your own, and `pipeline` from lists of `readers.augment` ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from cache.node import own_gpu, usable_cpus
from readers.dali.backend import gpu_count, load_dali
from readers.dali.recipes import PipelineOptions, augmented, check_recipe
from readers.dali.source import BatchSource, SampleSource, Source, has_flips, has_size
from readers.feed import OnError, check_choice
from readers.order import Order
from readers.order.schedule import Tail
from readers.reader import Reader

__all__ = ["Graph", "Per", "external_source", "pipeline"]

Graph: TypeAlias = Callable[[Any], Any]
Per: TypeAlias = Literal["batch", "sample"]


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
    for part in source.recipe.parts if source.recipe is not None else ():
        dtypes += [types.INT64] * part.boxed + [types.FLOAT] * has_size(part) + [types.INT32] * has_flips(part)
        dtypes += [types.FLOAT] * len(part.steps)
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
