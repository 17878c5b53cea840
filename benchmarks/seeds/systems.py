"""The loaders that several of the experiments run: PyTorch's, ours, and DALI's by our draws or its own; without end."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import experiment  # noqa: F401  (it sets the path)
from harness import NotHere
from machine import has_gpu

__all__ = [
    "DALI",
    "LOADER",
    "check_batch",
    "dali",
    "dali_loader",
    "data_loader",
    "endless",
    "image_loader",
    "installed",
    "need_gpu",
    "normalized",
    "resnet_step",
    "sleep_step",
]

LOADER = "torch readers.loader readers.augment"  # what to import for `image_loader`
DALI = "torch nvidia.dali.plugin.pytorch readers.dali"
_MANY_EPOCHS = 1000  # for samplers that continue by themselves, so that a small set has no pauses between epochs
_PREFETCH = 2
Batches = Iterator[Any]


def need_gpu(device: str = "cuda") -> None:
    """Raises NotHere where the device is a GPU and PyTorch has none; quickly where there is no driver."""
    if device != "cpu" and not has_gpu():
        raise NotHere("needs a CUDA GPU")


def installed(modules: Iterable[str]) -> bool:
    """Whether a row's imports can be imported; the row itself says why not."""
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
    """torch's DataLoader. order: a `readers.order`; None: its own shuffle."""
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
    """DALI's own graph. graph: (fn, device of decoders) -> images, labels. digits: labels are padded decimal digits."""
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
    """[n, k] character codes, with zeros behind the last digit, as [n] numbers."""
    value = digits[:, 0] * 0
    for column in digits.T:
        value = value.where(column == 0, 10 * value + column - ord("0"))
    return value


def normalized(fn: Any, images: Any, mean: Iterable[float], std: Iterable[float], **options: Any) -> Any:
    """float32 [n, 3, height, width] in DALI; mean and std are of values from 0 to 1."""
    from nvidia.dali import types

    scaled = {"mean": [255 * value for value in mean], "std": [255 * value for value in std]}
    return fn.crop_mirror_normalize(images, dtype=types.FLOAT, output_layout="CHW", **scaled, **options)


def check_batch(images: Any, batch: int, side: int) -> None:
    """Raises ValueError for a batch that is not float32 [batch, 3, side, side]."""
    dtype, shape = str(images.dtype).removeprefix("torch."), (batch, 3, side, side)
    if tuple(images.shape) != shape or dtype != "float32":
        raise ValueError(f"a batch of {dtype} {tuple(images.shape)}, expected float32 {shape}")


def resnet_step(name: str, classes: int) -> Callable[[Any, Any], None]:
    """Forward, backward and SGD of a model of torchvision on the GPU; it returns when the step has ended."""
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
