"""The DALI graph of a recipe: the nodes of the images from those of the encoded ones and of what happens to each.

    CPU    encoded → decode only the box → resize → crop, flip, ops on pixels, normalise
    GPU    encoded → decode the whole image ("mixed") → cut out the box → the same

A crop or resize behind ops on pixels begins another part (`readers.augment.recipe`): box, resize, crop, flips and ops
once more. Ops on pixels (`Op.dali`) work on float32, and each part is rounded to uint8, as by `readers.augment.cpu`.

Boxes, flips and the parameters of ops come with the samples, drawn by (seed, epoch, position): DALI's own random
numbers are not used, and a resumed epoch has the same images. On the GPU whole images are decoded by default, since
decoding a part of an image crashed with nvImageCodec 0.9.0 on some GPUs (its issue 55).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from readers.augment.ops.aspect import ResizeToBucket
from readers.augment.ops.base import Interpolation, Op, Stage
from readers.augment.ops.nodes import rounded_node
from readers.augment.recipe import Part, Recipe
from readers.dali.source import has_flips, has_size
from readers.feed import check_choice
from readers.order.base import Order, Stepped

__all__ = ["PipelineOptions", "augmented", "check_recipe"]

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
    """Raise ValueError for what a pipeline does not execute."""
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
    """The node of the images after a recipe. columns: nodes of what the ops do to each, see `readers.dali.source`."""
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
    """What a part before the last makes of its resized images."""
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
    """The images of a batch, from the resized ones of the last part."""
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
    """Our and Pillow's arithmetic: a filter as wide as the reduction, rounded to whole values."""
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
