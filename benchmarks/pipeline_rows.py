"""Ours in `pipeline.py`: the loader with threads, and the data set in torch's DataLoader."""

from __future__ import annotations

from typing import Any

import pipeline_sets as sets
from pipeline_job import MANY_EPOCHS, Job, MakeLoader, pipeline

from readers import Decode

__all__ = ["COEFFICIENTS", "DATASET", "LIBJPEG", "LOADER", "RECODED", "ops"]

LOADER = "ours: ImageLoader"
LIBJPEG = "ours: ImageLoader, libjpeg"
RECODED = "ours: ImageLoader, set re-encoded"
COEFFICIENTS = "ours: ImageLoader, coefficients"
DATASET = "ours: ImageDataset + DataLoader"
_LOADER_IMPORTS = "torch readers.loader readers.augment"
_DATASET_IMPORTS = "torch.utils.data readers.torch readers.augment"


def ops(job: Job) -> list[Any]:
    """What the task does to an image."""
    from readers.augment import CELEBA_CROP, Normalize, RandomHorizontalFlip, RandomResizedCrop, Resize

    crop = [CELEBA_CROP, Resize(64)] if job.celeb else [RandomResizedCrop(224)]
    finish = [Normalize(tuple(job.mean), tuple(job.std))] if job.floats else []
    return [*crop, RandomHorizontalFlip(), *finish]


def _loader(job: Job, name: str, **options: Any) -> MakeLoader:
    import readers
    from readers.loader import ImageLoader

    reader = readers.open(job.output(name))
    return lambda: ImageLoader(reader, job.batch, augment=ops(job), threads=job.workers, seed=1, **options)


@pipeline(LOADER, imports=_LOADER_IMPORTS, data=[sets.HDF5], modes=("imagenet", "celeb", "recoded"))
def image_loader(job: Job) -> MakeLoader:
    return _loader(job, sets.HDF5)


@pipeline(
    LIBJPEG,
    imports=_LOADER_IMPORTS,
    data=[sets.HDF5],
    note='the same bytes and pixels, with decoder="cpu"',
)
def image_loader_libjpeg(job: Job) -> MakeLoader:
    return _loader(job, sets.HDF5, decode=Decode(decoder="cpu"))


@pipeline(f"{LOADER}, tar", kinds=["u8"], imports=_LOADER_IMPORTS, data=[sets.TAR], note="as the row above; tar shards")
def image_loader_tar(job: Job) -> MakeLoader:
    return _loader(job, sets.TAR)


@pipeline(
    RECODED,
    imports=_LOADER_IMPORTS,
    data=[sets.RECODED],
    modes=["recoded"],
    note=f"packed with --resize-short {sets.SHORT_SIDE} --quality {sets.QUALITY}",
)
def image_loader_recoded(job: Job) -> MakeLoader:
    return _loader(job, sets.RECODED)


@pipeline(
    COEFFICIENTS,
    imports=_LOADER_IMPORTS,
    data=[sets.HDF5],
    apart=True,
    note="the same pixels, from a cache in memory that is filled before: not counted",
)
def image_loader_coefficients(job: Job) -> MakeLoader:
    import readers
    from readers.loader import ImageLoader

    reader = readers.cached(readers.open(job.output(sets.HDF5)), keep="coefficients", backend="memfd")
    reader.prefill(job.workers)
    return lambda: ImageLoader(reader, job.batch, augment=ops(job), threads=job.workers, seed=1)


def _data_loader(job: Job, transform: Any) -> MakeLoader:
    from torch.utils.data import DataLoader, RandomSampler

    import readers
    from readers.torch import ImageDataset

    dataset = ImageDataset(readers.open(job.output(sets.HDF5)), transform)
    sampler = RandomSampler(dataset, num_samples=len(dataset) * MANY_EPOCHS)
    return lambda: DataLoader(dataset, job.batch, sampler=sampler, num_workers=job.workers, drop_last=True)


@pipeline(DATASET, imports=_DATASET_IMPORTS, data=[sets.HDF5], note="our ops; worker processes")
def image_dataset(job: Job) -> MakeLoader:
    return _data_loader(job, ops(job))
