"""Our samples as nodes of a DALI graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from readers.dali.backend import load_dali
from readers.dali.source import BatchSource, SampleSource, Source
from readers.feed import OnError
from readers.order import Order
from readers.order.schedule import Tail
from readers.reader import Reader

__all__ = ["Per", "external_source", "source_nodes"]

Per: TypeAlias = Literal["batch", "sample"]
_PER = ("batch", "sample")


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

    reader: any of ours. batch_size: that of the pipeline. seed to on_error: as for `DaliLoader`. state:
    where to go on, from `DaliLoader`, `ImageLoader` or `Source.state_after`. parallel: read in the worker processes of
    the pipeline (py_num_workers), which hold `ahead` batches ready; per: whether a worker makes whole batches or, with
    tail="drop_last" alone, single samples. Each epoch of the pipeline ends with StopIteration; after
    `pipeline.reset()` comes the next one.

    Without `parallel` DALI gets views of the reader's memory, and nothing is copied. Raises MissingExtraError,
    ResumeError, ValueError.
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
    encoded, label, *_ = source_nodes(source, parallel=parallel, per=per, ahead=ahead)
    return encoded, label


def source_nodes(source: Source, *, parallel: bool = False, per: Per = "batch", ahead: int = 2) -> list[Any]:
    """One node for each part of a batch (see `readers.dali.source`), in the graph that is being defined."""
    dali = load_dali()
    pipeline = dali.pipeline.current()
    if pipeline is None:
        raise ValueError("no pipeline is being defined: call this in a function with @pipeline_def, or in `with pipe:`")
    if pipeline.max_batch_size != source.batch_size:
        raise ValueError(f"the pipeline has batches of {pipeline.max_batch_size}, the source of {source.batch_size}")
    if per not in _PER:
        raise ValueError(f"per is one of {', '.join(_PER)}, not {per!r}")
    if per == "sample" and source.schedule.tail != "drop_last":
        raise ValueError(
            f"samples one by one make no short batches, as tail={source.schedule.tail!r} has: "
            f"use per='batch' or tail='drop_last'"
        )
    if per == "sample" and source.on_error == "skip":
        raise ValueError("samples one by one make no short batches, as on_error='skip' needs: use per='batch'")
    types = dali.types
    dtypes = [types.UINT8, types.INT64]
    if source.recipe is not None:
        steps = [types.FLOAT] * len(source.recipe.pixel_ops)
        dtypes += [*([types.INT64] if source.boxed else []), types.FLOAT, types.INT32, *steps]
    if source.on_error != "raise":
        dtypes.append(types.INT64)
    # The pool copies what its workers give; only without one does DALI use our memory, for as long as a batch is on
    # its way through the pipeline, and one is being made.
    kept = 0 if parallel else _under_way(pipeline.prefetch_queue_depth) + 1
    how = {"parallel": True, "prefetch_queue_depth": ahead} if parallel else {"no_copy": True}
    how |= {"batch": per == "batch", "batch_info": True}
    call = BatchSource(source, kept) if per == "batch" else SampleSource(source, kept)
    ndims = [1] * len(dtypes)
    nodes = dali.fn.external_source(call, num_outputs=len(dtypes), dtype=dtypes, ndim=ndims, **how)
    return list(nodes)


def _under_way(depth: int | Mapping[str, int]) -> int:
    """Batches in a pipeline with this `prefetch_queue_depth`: one number, or one for each of its two queues."""
    if isinstance(depth, Mapping):
        cpu, gpu = depth["cpu_size"], depth["gpu_size"]
        return cpu * gpu if cpu != gpu else cpu
    return depth
