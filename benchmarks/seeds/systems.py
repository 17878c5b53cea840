"""Shared code of the experiments: trees of JPEGs (from a folder of images, or synthetic), endless loaders (PyTorch,
packer, DALI with packer's random numbers or its own), and comparisons of their images with Pillow's."""

from __future__ import annotations

import hashlib
import importlib
import io
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import experiment  # noqa: F401  (it sets the path)
import numpy as np
from harness import NotHere
from machine import has_gpu, list_tree

_DIFFERENT = 200  # synthetic images repeat after this number, as separate files
LOADER = "torch readers.loader readers.augment"  # what to import for `image_loader`
DALI = "torch nvidia.dali.plugin.pytorch readers.dali"
_MANY_EPOCHS = 1000  # for samplers that start the next epoch themselves, so that small sets have no pauses
_PREFETCH = 2
Batches = Iterator[Any]


def need_gpu(device: str = "cuda") -> None:
    """Raise NotHere if `device` is a GPU and PyTorch finds none; does not import torch without a driver."""
    if device != "cpu" and not has_gpu():
        raise NotHere("needs a CUDA GPU")


def installed(modules: Iterable[str]) -> bool:
    """Whether a row's modules can be imported; the row itself reports the reason."""
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception:
        return False
    return True


def endless(loader: Iterable[Any]) -> Batches:
    while True:
        yield from loader


def data_loader(dataset: Any, batch: int, workers: int, *, seed: int = 1, order: Any = None, **options: Any) -> Batches:
    """Endless batches of torch's DataLoader. order: of `readers.order`; None: the DataLoader's shuffle."""
    import torch
    from torch.utils.data import DataLoader, RandomSampler

    generator = torch.Generator().manual_seed(seed)
    sampler: Any = RandomSampler(dataset, num_samples=len(dataset) * _MANY_EPOCHS, generator=generator)
    if order is not None:
        from readers.torch import EpochSampler

        sampler = EpochSampler(order, rank=0, world_size=1)
    options = {"drop_last": True, "num_workers": workers, "generator": generator, **options}
    yield from endless(DataLoader(dataset, batch, sampler=sampler, **options))


def image_loader(
    reader: Any, batch: int, ops: Any, threads: int, device: str = "cpu", *, layout: Any = "NCHW", **options: Any
) -> Batches:
    need_gpu(device)
    from readers import Decode, Ranks
    from readers.loader import ImageLoader

    how = {"seed": 1, "decode": Decode(layout=layout), "ranks": Ranks(rank=0, world_size=1)}
    options = {**how, **options}
    return endless(ImageLoader(reader, batch, augment=ops, threads=threads, device=device, **options))


def dali_loader(reader: Any, batch: int, ops: Any, threads: int, device: str = "cpu", **options: Any) -> Batches:
    need_gpu(device)
    from readers import Ranks
    from readers.dali import DaliLoader, PipelineOptions

    how = {"options": PipelineOptions(device=device, threads=threads, prefetch=_PREFETCH), "seed": 1}
    return endless(DaliLoader(reader, batch, augment=ops, ranks=Ranks(rank=0, world_size=1), **{**how, **options}))


def dali(
    batch: int, threads: int, device: str, graph: Callable[[Any, str], tuple[Any, Any]], *, digits: bool = False
) -> Batches:
    """Endless batches of a DALI pipeline. graph: (fn, device of decoders) -> images, labels. digits: labels are padded
    decimal digits."""
    need_gpu(device)
    from nvidia.dali import Pipeline, fn
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    on_gpu = device != "cpu"
    options = {"device_id": 0 if on_gpu else None, "prefetch_queue_depth": _PREFETCH, "seed": 1}
    pipeline = Pipeline(batch_size=batch, num_threads=threads, **options)
    with pipeline:
        pipeline.set_outputs(*graph(fn, "mixed" if on_gpu else "cpu"))
    for (made,) in endless(DALIGenericIterator([pipeline], ["images", "labels"], auto_reset=True)):
        labels = made["labels"].long()
        yield made["images"], _number(labels) if digits else labels.flatten()


def _number(digits: Any) -> Any:
    """Convert [n, k] character codes, zeros after the last digit, to [n] numbers."""
    value = digits[:, 0] * 0
    for column in digits.T:
        value = value.where(column == 0, 10 * value + column - ord("0"))
    return value


def normalized(fn: Any, images: Any, mean: Iterable[float], std: Iterable[float], **options: Any) -> Any:
    """Normalise to float32 [n, 3, height, width] in DALI; mean and std of values from 0 to 1."""
    from nvidia.dali import types

    scaled = {"mean": [255 * value for value in mean], "std": [255 * value for value in std]}
    return fn.crop_mirror_normalize(images, dtype=types.FLOAT, output_layout="CHW", **scaled, **options)


def check_batch(images: Any, batch: int, side: int) -> None:
    """Raise ValueError for a batch that is not float32 [batch, 3, side, side]."""
    dtype, shape = str(images.dtype).removeprefix("torch."), (batch, 3, side, side)
    if tuple(images.shape) != shape or dtype != "float32":
        raise ValueError(f"a batch of {dtype} {tuple(images.shape)}, expected float32 {shape}")


def resnet_step(name: str, classes: int) -> Callable[[Any, Any], None]:
    """A training step of a torchvision model on the GPU: forward, backward, SGD; returns when the step has ended."""
    import torch
    from torchvision import models

    model = getattr(models, name.lower().replace("-", ""))(num_classes=classes).cuda().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.5)

    def train(images: Any, labels: Any) -> None:
        inputs = torch.as_tensor(images).to("cuda", non_blocking=True)
        targets = torch.as_tensor(labels).to("cuda", torch.int64, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        torch.cuda.synchronize()

    return train


def sleep_step(seconds: float) -> Callable[[Any, Any], None]:
    """A step that takes no CPU and no GPU from the loader."""
    return lambda images, labels: time.sleep(seconds)


# --- against Pillow ---------------------------------------------------------------------------------------------------
def class_each(tree: Path, into: Path, count: int) -> list[tuple[str, int]]:
    """Make a tree of `count` images of another tree, each in its own class, so that labels identify images."""
    items = list_tree(tree)
    for number in range(count):
        target = into / f"class{number:05d}" / "0.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(items[number * len(items) // count][0], target)
    return list_tree(into)


def compare(batches: Iterable[Any], references: Any, mean: Any, std: Any) -> dict[str, Any]:
    """Compare an epoch of a loader, by label, with Pillow's images, uint8 [count, height, width, 3], or their mirrors.

    images: number in the epoch. right: images that occur once. mean, worst, largest: difference to Pillow's on the
    scale 0 to 255: mean of all, mean of the worst image, of a value. flipped: share of mirrored images. order, flips:
    digests of the labels, and of the mirrored images.
    """
    labels: list[int] = []
    flips, means, largest = [], [], 0.0
    for some, numbers in batches:
        pixels, numbers = on_host(some).transpose(0, 2, 3, 1), on_host(numbers).reshape(-1).astype(int).tolist()
        if pixels.dtype == np.float32:
            pixels = 255 * (pixels * np.float32(std) + np.float32(mean))
        for image, number in zip(pixels, numbers, strict=True):
            there = references[number].astype(np.float32)
            ways = [np.abs(image - other) for other in (there, there[:, ::-1])]
            flips.append(int(ways[1].mean() < ways[0].mean()))
            means.append(float(ways[flips[-1]].mean()))
            largest = max(largest, float(ways[flips[-1]].max()))
        labels += numbers
        if len(labels) >= len(references):
            break
    right = (Counter(labels) & Counter(range(len(references)))).total()
    figures = {"images": len(labels), "right": right, "mean": fmean(means), "worst": max(means), "largest": largest}
    return figures | {"flipped": fmean(flips), "order": digest(labels), "flips": digest(flips)}


def on_host(values: Any) -> Any:
    return np.asarray(values.cpu() if hasattr(values, "cpu") else values)


def digest(values: Any) -> str:
    return hashlib.sha256(np.asarray(values, np.int64).tobytes()).hexdigest()


# --- trees of JPEGs ---------------------------------------------------------------------------------------------------
def make_images(
    folder: Path,
    count: int,
    size: tuple[int, int] | None = None,
    *,
    classes: int = 10,
    source: Path | None = None,
    quality: int = 90,
) -> None:
    """Write `count` JPEGs in class folders "class0" and so on; an existing folder stays unchanged.

    size: width and height; None: copies of the source's files, or synthetic images of 500 x 375.
    source: a folder of JPEGs at any depth, which are repeated if needed. With a size, they are scaled to cover it, and
        cropped in the middle. None: synthetic images.

    Raises ValueError for a source without JPEGs.
    """
    if folder.exists():
        return
    real = sorted(p for p in source.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg")) if source else []
    if source and not real:
        raise ValueError(f"{source}: no .jpg or .jpeg files")
    partial = folder.with_name(folder.name + ".partial")
    encoded: dict[int, bytes] = {}
    for number in range(count):
        key = number % (len(real) or _DIFFERENT)
        if key not in encoded:
            if real and size is None:
                encoded[key] = real[key].read_bytes()
            else:
                image = _covering(real[key], size) if real and size else _made(key, size or (500, 375))
                encoded[key] = _jpeg(image, quality)
        path = partial / f"class{number % classes}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded[key])
    partial.rename(folder)


def _covering(path: Path, size: tuple[int, int]) -> Any:
    from PIL import Image, ImageOps

    with Image.open(path) as image:
        return ImageOps.fit(image.convert("RGB"), size, Image.Resampling.BICUBIC)


def _made(number: int, size: tuple[int, int]) -> Any:
    """Noise at several scales, which takes about as many bytes as a photograph of the same size."""
    from PIL import Image

    draw = np.random.default_rng(number)
    pixels = np.zeros((size[1], size[0], 3))
    for scale, weight in ((64, 70.0), (16, 40.0), (4, 30.0), (1, 26.0)):
        coarse = draw.random((size[1] // scale + 2, size[0] // scale + 2, 3)).astype(np.float32)
        planes = [np.asarray(Image.fromarray(coarse[..., i]).resize(size, Image.Resampling.BICUBIC)) for i in range(3)]
        pixels += weight * 2 * (np.stack(planes, -1) - 0.5)
    return Image.fromarray((128 + pixels).clip(0, 255).astype(np.uint8))


def _jpeg(image: Any, quality: int) -> bytes:
    memory = io.BytesIO()
    image.save(memory, "JPEG", quality=quality)
    return memory.getvalue()
