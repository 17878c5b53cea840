"""Ready-made pipelines over `external_source`, with rocAL's fused operators, on its CPU or GPU backend.

    celeba         centre crop → resize → mirror, normalise to [-1, 1]        (generative models of faces)
    resnet_train   random resized crop → mirror, normalise                    (ImageNet training)
    resnet_eval    resize of the short side → centre crop, normalise          (ImageNet evaluation)

Each returns a built pipeline for `RocalLoader`; images come out as float32 [batch_size, 3, size, size]. Means and
deviations are of values in 0..255. rocAL resizes bilinearly without antialiasing, and draws crops and flips by itself
from `seed`: they are not those of `readers.augment`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from readers.augment import IMAGENET_MEAN, IMAGENET_STD
from readers.errors import DatasetError
from readers.rocal.graph import Backend, Machine, built
from readers.rocal.library import Library
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
    crop: int = 178,
    flip: float = 0.5,
    backend: Backend = "cpu",
    threads: int | None = None,
    device_id: int | None = None,
    seed: int = 0,
) -> Any:
    """Aligned faces (178 x 218 pixels): the middle `crop` x `crop`, resized to `size`, mirrored with probability
    `flip`, values in [-1, 1].

    Raises DatasetError for images of several sizes, whose crops rocAL would take at several scales; ValueError for a
    crop that they do not have.
    """
    _check_one_size(source, crop)
    _check_probability(flip)

    def ops(rocal: Library, images: Any) -> Any:
        types = rocal.types
        middle = rocal.fn.crop(images, crop=[crop, crop], output_layout=types.NHWC, output_dtype=types.UINT8)
        return rocal.fn.resize_mirror_normalize(
            middle,
            resize_width=size,
            resize_height=size,
            mean=_MIDDLE,
            std=_MIDDLE,
            mirror=rocal.fn.random.coin_flip(probability=flip),
            output_layout=types.NCHW,
            output_dtype=types.FLOAT,
        )

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
        box = rocal.fn.resize_crop(
            images,
            resize_width=size,
            resize_height=size,
            output_layout=rocal.types.NHWC,
            output_dtype=rocal.types.UINT8,
        )
        return _normalised(rocal, box, size, rocal.fn.random.coin_flip(probability=flip))

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
        return _normalised(rocal, small, size, 0)

    return ops


def _normalised(rocal: Library, images: Any, size: int, mirror: Any) -> Any:
    # The size goes into `crop`: its default is a pair of zeros, before which crop_w and crop_h do not count.
    return rocal.fn.crop_mirror_normalize(
        images,
        crop=[size, size],
        mean=_MEAN,
        std=_STD,
        mirror=mirror,
        output_layout=rocal.types.NCHW,
        output_dtype=rocal.types.FLOAT,
    )


def _check_probability(flip: float) -> None:
    if not 0 <= flip <= 1:
        raise ValueError(f"flip is a probability, not {flip}")


def _over(source: RocalSource, ops: Ops, machine: Machine, seed: int) -> Any:
    def graph(rocal: Library) -> Any:
        return ops(rocal, encoded_images(rocal, source))

    return built(graph, machine, batch_size=source.batch_size, seed=seed, prefetch=source.options.prefetch)


def _check_one_size(source: RocalSource, crop: int) -> None:
    info = source.reader.info
    known = info.height > 0
    sizes = np.unique(np.stack([info.height[known], info.width[known]]), axis=1)
    if sizes.shape[1] > 1:
        raise DatasetError(
            f"the images have {sizes.shape[1]} sizes, such as {sizes[0, 0]} x {sizes[1, 0]} and {sizes[0, 1]} x "
            f"{sizes[1, 1]} (height, width): this pipeline wants one, as aligned faces have; use resnet_train"
        )
    if crop > min(source.max_height, source.max_width):
        raise ValueError(f"the crop {crop} is larger than the images, {source.max_height} x {source.max_width}")
