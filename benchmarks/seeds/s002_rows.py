"""The systems of `s002.py`: JPEGs of about 500 x 375 to normalised float32 [32, 3, 224, 224], in batches without end.

A row takes a `Job` and returns an iterable of (images, labels). Its load is how many times each image is flipped left
to right (p = 0.5), flipped top to bottom (p = 0.5) and turned by -5 to 5 degrees, before a random box is resized. All
rows draw for each image, keep its size when they turn it, and leave black what comes into view.

Options of a row: models, how many of them it runs under (default: all); ends, only the lowest and the highest load;
watched, whether utilisation is recorded; least, batches of a figure (worker processes finish theirs in pairs).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import NotHere, contender

from readers import Decode

__all__ = [
    "BATCH",
    "DALI",
    "DALI_GPU",
    "DALI_LOADER",
    "LOADS",
    "MEAN",
    "OURS",
    "OURS_GPU",
    "OURS_NEAREST",
    "PYTORCH",
    "PYTORCH_LINEAR",
    "SIZE",
    "STD",
    "Job",
    "ops",
]

BATCH, SIZE, DEGREES = 32, 224, 5
LOADS = (1, 4, 8, 12)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PYTORCH, PYTORCH_LINEAR = "PyTorch DataLoader", "PyTorch DataLoader, bilinear rotation"
DALI, DALI_GPU = "DALI, CPU operators", "DALI, GPU operators"
OURS, OURS_NEAREST = "ours: ImageLoader", "ours: ImageLoader, nearest pixel"
DALI_LOADER = "ours: DaliLoader, CPU"
OURS_GPU, DALI_LOADER_GPU = "ours: ImageLoader, GPU", "ours: DaliLoader, GPU"
_MANY_EPOCHS = 1000
_PREFETCH = 2


@dataclass(frozen=True)
class Job:
    """tree: class folders of JPEG files. packed: the same as a packed set. threads: or worker processes.

    load: 0 for images that are only resized as a whole. ordered: in the order of the names, not shuffled.
    """

    tree: Path
    packed: Path
    batch: int
    threads: int
    load: int
    ordered: bool = False


# --- PyTorch ----------------------------------------------------------------------------------------------------------
_PILLOW = "Pillow, by the functions that torchvision's transforms call; worker processes"


@contender(
    PYTORCH,
    imports="torch.utils.data PIL",
    note=f"{_PILLOW}; nearest neighbours when it turns, its default",
    least=4,
    watched=True,
)
def pytorch(job: Job) -> Iterable[Any]:
    return _pytorch(job, bilinear=False)


@contender(
    PYTORCH_LINEAR,
    imports="torch.utils.data PIL",
    note="the same; turns are bilinear, as in the rows below",
    least=4,
    watched=True,
)
def pytorch_linear(job: Job) -> Iterable[Any]:
    return _pytorch(job, bilinear=True)


def _pytorch(job: Job, *, bilinear: bool) -> Iterable[Any]:
    import pillow_transforms as T
    import torch
    from torch.utils.data import DataLoader, RandomSampler

    load = [T.RandomHorizontalFlip(), T.RandomVerticalFlip(), T.RandomRotation(DEGREES, bilinear)] * job.load
    box = T.RandomResizedCrop(SIZE) if job.load else T.Resize((SIZE, SIZE))
    data = T.Folder(job.tree, T.Compose([*load, box, T.ToTensor(), T.Normalize(MEAN, STD)]))
    sampler = None if job.ordered else RandomSampler(data, num_samples=len(data) * _MANY_EPOCHS)
    pinned = torch.cuda.is_available()
    return DataLoader(data, job.batch, sampler=sampler, num_workers=job.threads, pin_memory=pinned)


# --- DALI -------------------------------------------------------------------------------------------------------------
_DALI_IMPORTS = "torch nvidia.dali.plugin.pytorch"
_DALI_NOTE = "its file reader; whole images decoded; one operator flips both ways, and turns are bilinear, its default"


@contender(DALI, imports=_DALI_IMPORTS, note=_DALI_NOTE, models=1, ends=True)
def dali_cpu(job: Job) -> Iterable[Any]:
    return _dali(job, "cpu")


@contender(DALI_GPU, note=f"{_DALI_NOTE}; decoded there too", watched=True)
def dali_gpu(job: Job) -> Iterable[Any]:
    _need_gpu("nvidia.dali")
    return _dali(job, "gpu")


def _dali(job: Job, device: str) -> Iterator[Any]:
    from nvidia.dali import Pipeline, fn, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    on_gpu = device == "gpu"
    pipeline = Pipeline(
        batch_size=job.batch,
        num_threads=job.threads,
        device_id=0 if on_gpu else None,
        prefetch_queue_depth=_PREFETCH,
        seed=1,
    )
    with pipeline:
        encoded, labels = fn.readers.file(file_root=str(job.tree), random_shuffle=not job.ordered)
        images = fn.decoders.image(encoded, device="mixed" if on_gpu else "cpu", output_type=types.RGB)
        for _ in range(job.load):
            images = fn.flip(images, horizontal=fn.random.coin_flip(), vertical=fn.random.coin_flip())
            angle = fn.random.uniform(range=[-DEGREES, DEGREES])
            images = fn.rotate(images, angle=angle, keep_size=True, fill_value=0)
        images = (fn.random_resized_crop if job.load else fn.resize)(images, size=[SIZE, SIZE])
        mean, std = ([255 * value for value in values] for values in (MEAN, STD))
        images = fn.crop_mirror_normalize(images, mean=mean, std=std, dtype=types.FLOAT, output_layout="CHW")
        pipeline.set_outputs(images, labels)
    for (batch,) in DALIGenericIterator([pipeline], ["images", "labels"]):
        yield batch["images"], batch["labels"].squeeze(1).long()


# --- ours -------------------------------------------------------------------------------------------------------------
_OURS_NOTE = (
    "every turn is made by itself, in float32, and rounded after the last one; of the flips only the two before the "
    "first turn are made at once"
)


def ops(load: int, *, bilinear: bool = True) -> list[Any]:
    """The ops of our rows. bilinear: how it turns."""
    from readers.augment import (
        Normalize,
        RandomHorizontalFlip,
        RandomResizedCrop,
        RandomRotation,
        RandomVerticalFlip,
        Resize,
    )

    box = RandomResizedCrop(SIZE) if load else Resize((SIZE, SIZE))
    rotation = RandomRotation(DEGREES, "bilinear" if bilinear else "nearest")
    turns = [RandomHorizontalFlip(), RandomVerticalFlip(), rotation] * load
    return [*turns, box, Normalize(MEAN, STD)]


@contender(OURS, imports="torch readers.loader", note=f"a packed set; turns are bilinear; {_OURS_NOTE}", watched=True)
def image_loader(job: Job) -> Iterable[Any]:
    return _image_loader(job)


@contender(
    OURS_NEAREST, imports="torch readers.loader", note="the same; turns as PyTorch does by default", watched=True
)
def image_loader_nearest(job: Job) -> Iterable[Any]:
    return _image_loader(job, bilinear=False)


@contender(OURS_GPU, note="a packed set; decoded and augmented there, as far as its decoder can", watched=True)
def image_loader_gpu(job: Job) -> Iterable[Any]:
    _need_gpu()
    return _image_loader(job, device="cuda")


def _image_loader(job: Job, *, bilinear: bool = True, **options: Any) -> Iterator[Any]:
    import readers
    from readers.loader import ImageLoader

    loader = ImageLoader(
        readers.open(job.packed),
        job.batch,
        augment=ops(job.load, bilinear=bilinear),
        shuffle=not job.ordered,
        seed=1,
        threads=job.threads,
        decode=Decode(layout="NCHW"),
        **options,
    )
    while True:
        yield from loader


@contender(
    DALI_LOADER,
    imports="torch nvidia.dali readers.dali",
    note="a packed set; flips, turns and boxes are drawn by us, as for ImageLoader, and made by DALI in float32",
    models=0,
    ends=True,
)
def dali_loader(job: Job) -> Iterable[Any]:
    return _dali_loader(job, "cpu")


@contender(DALI_LOADER_GPU, note="as on the CPU; decoded there too", watched=True)
def dali_loader_gpu(job: Job) -> Iterable[Any]:
    _need_gpu("nvidia.dali")
    return _dali_loader(job, "cuda")


def _dali_loader(job: Job, device: Any) -> Iterator[Any]:
    import readers
    from readers.dali import DaliLoader, PipelineOptions

    options = PipelineOptions(device=device, threads=job.threads, prefetch=_PREFETCH)
    loader = DaliLoader(
        readers.open(job.packed), job.batch, augment=ops(job.load), options=options, shuffle=not job.ordered, seed=1
    )
    while True:
        yield from loader


def _need_gpu(module: str = "torch") -> None:
    """Raise NotHere without a GPU that torch can use, or without a module; quickly where there is no driver."""
    if not any(os.path.exists(device) for device in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")):
        raise NotHere("needs a GPU, and this machine has none")
    try:
        importlib.import_module(module)
        import torch
    except ImportError as error:
        raise NotHere(f"not installed ({error})") from error
    if not torch.cuda.is_available():
        raise NotHere(f"needs a GPU that torch can use; torch {torch.__version__} finds none")
