"""A DALI pipeline from a list of `readers.augment` ops: the crops, flips and values that `ImageLoader` gives.

    CPU    encoded → decode the box alone → resize → crop, flip, normalise
    GPU    encoded → decode the whole image ("mixed") → cut the box out → resize → crop, flip, normalise

Ops on pixels (`Op.dali`) come between the flip and the normalisation.

Boxes and flips come with the samples, drawn by (seed, epoch, position): DALI's own random numbers are not used, and a
resumed epoch has the same crops. On the GPU whole images are decoded by default, since decoding a part of an image
crashed with nvImageCodec 0.9.0 on some GPUs (its issue 55).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from cache.node import usable_cpus
from cache.ranks import detect_ranks
from readers.augment import classification
from readers.augment.ops.base import Stage
from readers.augment.recipe import Recipe
from readers.dali.backend import Dali, load_dali
from readers.dali.nodes import source_nodes
from readers.dali.source import Source
from readers.feed import check_choice

__all__ = ["Graph", "PipelineOptions", "classification", "pipeline"]

Graph: TypeAlias = Callable[[Any], Any]
_CHOICES = {
    "device": ("cpu", "gpu"),
    "start_method": ("spawn", "fork"),
    "layout": ("NCHW", "NHWC"),
    "dtype": (None, "uint8", "float32", "float16"),
}


@dataclass(frozen=True)
class PipelineOptions:
    """How a pipeline runs. Raises ValueError for values that mean nothing.

    device: where images are decoded and augmented. device_id: the GPU, by default the rank's number on this node.
    threads: of DALI on the CPU, by default this rank's share of the CPUs. prefetch: batches that DALI works ahead.
    workers: processes that read, started by `start_method`; 0 reads in this process. layout: of the images. dtype: by
    default uint8, or float32 where the ops end with Normalize. fused_decoding: decode the box alone; by default on the
    CPU. fancy_upsampling: the GPU interpolates colours as libjpeg does on the CPU.
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
    """A `nvidia.dali.Pipeline` with the outputs (images, labels), neither built nor started; behind them, where the
    source skips or replaces bad samples, which samples these are: int64 [n, 1].

    source: with the ops to execute, unless a graph is given. graph: a function from the encoded node to that of the
    images, for what our ops cannot say; random operators in it draw by DALI's seed, which a resume does not restore.
    Labels are int64 [n, 1] on the CPU. Raises ValueError for ops that DALI pipelines here do not have, and for results
    of no fixed size.
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
    dali, ranks = load_dali(), detect_ranks()
    device_id = None
    if options.device == "gpu":
        device_id = ranks.local_rank if options.device_id is None else options.device_id
    made = dali.pipeline(
        batch_size=source.batch_size,
        num_threads=options.threads or usable_cpus(),
        device_id=device_id,
        seed=source.seed % (1 << 31),
        prefetch_queue_depth=options.prefetch,
        py_num_workers=max(1, options.workers),
        py_start_method=options.start_method,
    )
    with made:
        encoded, label, *columns = source_nodes(source, parallel=options.workers > 0, ahead=options.prefetch)
        rows = [] if source.on_error == "raise" else [columns.pop()]
        if graph is not None:
            images = graph(encoded)
        else:
            assert source.recipe is not None
            images = _Augmented(dali, source.recipe, options).images(encoded, columns)
        made.set_outputs(images, label, *rows)
    return made


class _Augmented:
    """The nodes that carry out a recipe."""

    def __init__(self, dali: Dali, recipe: Recipe, options: PipelineOptions) -> None:
        self._fn, self._types, self._recipe, self._options = dali.fn, dali.types, recipe, options
        self._gpu = options.device == "gpu"

    def images(self, encoded: Any, columns: list[Any]) -> Any:
        """columns: the nodes of what the source says of each image, behind encoded and label."""
        fn, types, recipe = self._fn, self._types, self._recipe
        box, (resized, flips, *steps) = columns[: recipe.boxed], columns[recipe.boxed :]
        images = self._decode(encoded, *box)
        if recipe.interpolation is not None:
            # Ours and Pillow's arithmetic: a filter as wide as the reduction, rounded to whole values.
            filters = {"bilinear": types.INTERP_LINEAR, "bicubic": types.INTERP_CUBIC}
            how = {"interp_type": filters[recipe.interpolation], "antialias": True}
            images = fn.resize(images, size=resized[0:2], **how)
        place_y, place_x, mirror = resized[2], resized[3], flips[0]
        if recipe.hangs_over:
            start = fn.cast(resized[2:4], dtype=types.INT32)
            images = fn.slice(images, start, recipe.out_size, axes=[0, 1], out_of_bounds_policy="pad", fill_values=0)
            place_y = place_x = 0.5
        if any(op.flip_axis == 2 for op in recipe.ops):
            images = fn.flip(images, horizontal=0, vertical=flips[1])
            place_y = place_y + flips[1] * (1 - 2 * place_y)  # the crop, which follows, counts from the other edge
        if steps:
            images = fn.crop(images, crop=recipe.out_size, crop_pos_y=place_y, crop_pos_x=place_x)
            images = fn.flip(images, horizontal=mirror)
            place_y, place_x, mirror = 0.5, 0.5, 0
        for op, parameters in zip(recipe.pixel_ops, steps, strict=True):
            images = op.dali(fn, images, parameters)
        mean, std, dtype = _values(recipe, self._options, types)
        return fn.crop_mirror_normalize(
            images,
            crop=recipe.out_size,
            crop_pos_y=place_y,
            crop_pos_x=place_x,
            mirror=mirror,
            mean=mean,
            std=std,
            dtype=dtype,
            output_layout=self._options.layout[1:],
        )

    def _decode(self, encoded: Any, box: Any = None) -> Any:
        """The box of each image, upright, RGB; the whole image without one."""
        fn, options = self._fn, self._options
        how: dict[str, Any] = {"device": "mixed" if self._gpu else "cpu", "output_type": self._types.RGB}
        if self._gpu:
            how["jpeg_fancy_upsampling"] = options.fancy_upsampling
        if box is None:
            return fn.decoders.image(encoded, **how)
        fused = not self._gpu if options.fused_decoding is None else options.fused_decoding
        start, shape = box[0:2], box[2:4]
        if fused:
            return fn.decoders.image_slice(encoded, start, shape, axes=[0, 1], **how)
        return fn.slice(fn.decoders.image(encoded, **how), start, shape, axes=[0, 1])


def _values(recipe: Recipe, options: PipelineOptions, types: Any) -> tuple[list[float], list[float], Any]:
    """Mean and deviation in 0..255, as DALI wants them, and the type of the result."""
    dtypes = {"uint8": types.UINT8, "float32": types.FLOAT, "float16": types.FLOAT16}
    if recipe.normalize is not None:
        mean, std = recipe.normalize.mean, recipe.normalize.std
        return [255 * m for m in mean], [255 * s for s in std], dtypes[options.dtype or "float32"]
    scale = 1.0 if options.dtype in (None, "uint8") else 255.0
    return [0.0] * 3, [scale] * 3, dtypes[options.dtype or "uint8"]


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
