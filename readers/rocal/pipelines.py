"""Ready-made pipelines over `external_source`, with rocAL's fused operators, on its CPU or GPU backend.

    celeba         a fixed box → resize → mirror, normalise to [-1, 1]        (generative models of faces)
    resnet_train   random resized crop → mirror, normalise                    (ImageNet training)
    resnet_eval    resize of the short side → centre crop, normalise          (ImageNet evaluation)

Each returns a built pipeline for `RocalLoader`; images come out as float32 [batch_size, 3, size, size]. Means and
deviations are of values in 0..255. rocAL resizes bilinearly without antialiasing, and draws crops and flips by itself:
they are not those of `readers.augment`. Its generators belong to the process, not to a pipeline: the same `seed` gives
the same draws only in the first pipeline of a process, and two pipelines that run at once change each other's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from cache.errors import DatasetError
from readers.augment import CELEBA_CROP
from readers.augment.ops import IMAGENET_MEAN, IMAGENET_STD, Crop
from readers.feed import upright_sides
from readers.rocal.graph import Backend, Library, Machine, built
from readers.rocal.source import RocalSource

__all__ = ["Ops", "celeba", "encoded_images", "resnet_eval", "resnet_eval_ops", "resnet_train", "resnet_train_ops"]

Ops: TypeAlias = Callable[[Library, Any], Any]

_MIDDLE = [127.5, 127.5, 127.5]
_MEAN = [255 * value for value in IMAGENET_MEAN]
_STD = [255 * value for value in IMAGENET_STD]


def encoded_images(rocal: Library, source: RocalSource) -> Any:
    """The node of the decoded images, for graphs of one's own; sizes as in `external_source`."""
    images, _ = rocal.fn.external_source(
        source=source,
        mode=rocal.types.EXTSOURCE_RAW_COMPRESSED,
        max_width=source.max_width,
        max_height=source.max_height,
    )
    return images


def celeba(
    source: RocalSource,
    *,
    size: int = 64,
    crop: Crop = CELEBA_CROP,
    flip: float = 0.5,
    backend: Backend = "cpu",
    threads: int | None = None,
    device_id: int | None = None,
    seed: int = 0,
) -> Any:
    """Aligned faces (178 x 218 pixels): the box `crop`, resized to `size`, mirrored with probability `flip`, values in
    [-1, 1].

    Raises DatasetError for images of several or unknown sizes; ValueError for a box that is not within them, and for
    max_height and max_width with which rocAL would decode them at another size than their own.
    """
    _check_box(source, crop)
    _check_probability(flip)

    def ops(rocal: Library, images: Any) -> Any:
        box = rocal.fn.crop(
            images,
            crop=[crop.height, crop.width],
            crop_pos_x=float(crop.left),  # in pixels: rocAL's own defaults of 0.5 are the first row and column
            crop_pos_y=float(crop.top),
            output_layout=rocal.types.NHWC,
            output_dtype=rocal.types.UINT8,
        )
        return _resized(rocal, box, size, flip, _MIDDLE, _MIDDLE)

    return _over(source, ops, Machine(backend, threads, device_id), seed)


def resnet_train(
    source: RocalSource,
    *,
    size: int = 224,
    flip: float = 0.5,
    backend: Backend = "cpu",
    threads: int | None = None,
    device_id: int | None = None,
    seed: int = 0,
) -> Any:
    """A random box of 8 to 99 % of the image, of aspect ratio 3/4 to 4/3 (rocAL's own ranges), resized to `size`,
    mirrored with probability `flip`, and normalised by ImageNet's mean and deviation."""
    return _over(source, resnet_train_ops(size=size, flip=flip), Machine(backend, threads, device_id), seed)


def resnet_train_ops(*, size: int = 224, flip: float = 0.5) -> Ops:
    """What `resnet_train` does to decoded images, for other readers: (rocAL, node) -> node."""
    _check_probability(flip)

    def ops(rocal: Library, images: Any) -> Any:
        # Not resize_crop: it leaves the size of the box as the valid region of the resized image, and what comes after
        # it reads and writes that region only. The defaults of random_crop are lists, which rocAL does not take.
        box = rocal.fn.random_crop(
            images,
            crop_area_factor=None,
            crop_aspect_ratio=None,
            crop_pox_x=None,
            crop_pox_y=None,
            output_layout=rocal.types.NHWC,
            output_dtype=rocal.types.UINT8,
        )
        return _resized(rocal, box, size, flip, _MEAN, _STD)

    return ops


def resnet_eval(
    source: RocalSource,
    *,
    size: int = 224,
    resize: int = 256,
    backend: Backend = "cpu",
    threads: int | None = None,
    device_id: int | None = None,
) -> Any:
    """The short side resized to `resize`, the middle `size` x `size`, normalised by ImageNet's mean and deviation."""
    return _over(source, resnet_eval_ops(size=size, resize=resize), Machine(backend, threads, device_id), seed=0)


def resnet_eval_ops(*, size: int = 224, resize: int = 256) -> Ops:
    """What `resnet_eval` does to decoded images, for other readers: (rocAL, node) -> node."""
    if resize < size:
        raise ValueError(f"resize {resize} is smaller than size {size}: there is no such crop")

    def ops(rocal: Library, images: Any) -> Any:
        types = rocal.types
        small = rocal.fn.resize(
            images,
            resize_shorter=resize,
            scaling_mode=types.SCALING_MODE_NOT_SMALLER,
            interpolation_type=types.LINEAR_INTERPOLATION,
            output_layout=types.NHWC,
            output_dtype=types.UINT8,
        )
        # The size goes into `crop`: its default is a pair of zeros, before which crop_w and crop_h do not count.
        return rocal.fn.crop_mirror_normalize(
            small,
            crop=[size, size],
            mean=_MEAN,
            std=_STD,
            mirror=0,
            output_layout=types.NCHW,
            output_dtype=types.FLOAT,
        )

    return ops


def _resized(rocal: Library, images: Any, size: int, flip: float, mean: list[float], std: list[float]) -> Any:
    return rocal.fn.resize_mirror_normalize(
        images,
        resize_width=size,
        resize_height=size,
        mean=mean,
        std=std,
        mirror=int(flip) if flip in (0, 1) else rocal.fn.random.coin_flip(probability=flip),  # that of 1 never flips
        output_layout=rocal.types.NCHW,
        output_dtype=rocal.types.FLOAT,
    )


def _check_probability(flip: float) -> None:
    if not 0 <= flip <= 1:
        raise ValueError(f"flip is a probability, not {flip}")


def _over(source: RocalSource, ops: Ops, machine: Machine, seed: int) -> Any:
    def graph(rocal: Library) -> Any:
        return ops(rocal, encoded_images(rocal, source))

    pipeline = built(graph, machine, batch_size=source.batch_size, seed=seed, prefetch=source.options.prefetch)
    source.grey_is_grey = True
    return pipeline


def _check_box(source: RocalSource, crop: Crop) -> None:
    """The box counts in pixels of the decoded image, so all images must have one size, and be decoded at it."""
    sides = np.stack(upright_sides(source.reader.info), axis=1)
    sizes = np.unique(sides[sides.all(axis=1)], axis=0)  # those of damaged images are unknown
    if len(sizes) != 1:
        told = "; ".join(f"{height} x {width}" for height, width in sizes[:2])
        raise DatasetError(
            f"the index knows {len(sizes)} sizes of the images{', such as ' if told else ''}{told} (height x width): "
            f"this pipeline wants one, as aligned faces have; use resnet_train"
        )
    height, width = (int(side) for side in sizes[0])
    if (source.max_height, source.max_width) != (height, width):
        raise ValueError(
            f"max_height and max_width are {source.max_height} and {source.max_width}, where the images have {height} "
            f"and {width}: rocAL would decode them at another size; give external_source max_height={height} and "
            f"max_width={width}"
        )
    if crop.top + crop.height > height or crop.left + crop.width > width:
        raise ValueError(f"the box {crop} is not within the images, {height} x {width} (height, width)")
