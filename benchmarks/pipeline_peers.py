"""Peers in `pipeline.py` that decode in worker processes of torch's DataLoader, or of one derived from it."""

from __future__ import annotations

import functools
from typing import Any

from pipeline_job import CELEB_BOX, MANY_EPOCHS, Job, MakeLoader, pipeline

__all__ = ["FOLDER", "normalized", "tensor_transforms"]

FOLDER = "ImageFolder + PIL"
_PIL = "Pillow's antialiased bilinear"
_VISION = "torch.utils.data torchvision.datasets torchvision.transforms.v2 torchvision.io"


def _celeb_box() -> Any:
    from torchvision.transforms.v2.functional import crop

    return functools.partial(crop, **dict(zip(("top", "left", "height", "width"), CELEB_BOX, strict=True)))


def _pil_transforms(job: Job) -> Any:
    from torchvision import transforms as T

    crop = [_celeb_box(), T.Resize(64)] if job.celeb else [T.RandomResizedCrop(224)]
    finish = [T.ToTensor(), T.Normalize(job.mean, job.std)] if job.floats else [T.PILToTensor()]
    return T.Compose([*crop, T.RandomHorizontalFlip(), *finish])


def tensor_transforms(job: Job) -> Any:
    """The same with torchvision.transforms.v2, for uint8 tensors [3, h, w]."""
    import torch
    from torchvision.transforms import v2 as T

    crop = [_celeb_box(), T.Resize(64, antialias=True)] if job.celeb else [T.RandomResizedCrop(224, antialias=True)]
    finish = [T.ToDtype(torch.float32, scale=True), T.Normalize(job.mean, job.std)] if job.floats else []
    return T.Compose([*crop, T.RandomHorizontalFlip(), *finish])


def _folder_loader(job: Job, transform: Any, **options: Any) -> MakeLoader:
    from torch.utils.data import DataLoader, RandomSampler
    from torchvision.datasets import ImageFolder

    dataset = ImageFolder(str(job.tree), transform, **options)
    sampler = RandomSampler(dataset, num_samples=len(dataset) * MANY_EPOCHS)
    return lambda: DataLoader(dataset, job.batch, sampler=sampler, num_workers=job.workers, drop_last=True)


@pipeline(FOLDER, imports=_VISION, data=["tree"], note=f"transforms on PIL images; {_PIL}")
def image_folder(job: Job) -> MakeLoader:
    return _folder_loader(job, _pil_transforms(job))


def _read_tensor(path: str) -> Any:
    from torchvision.io import ImageReadMode, decode_image, read_file

    return decode_image(read_file(path), ImageReadMode.RGB)


@pipeline(
    "torchvision.io + transforms.v2", imports=_VISION, data=["tree"], note="tensors; antialiased, as is the default"
)
def torchvision_io(job: Job) -> MakeLoader:
    return _folder_loader(job, tensor_transforms(job), loader=_read_tensor)


def normalized(images: Any, job: Job) -> Any:
    """uint8 [n, h, w, 3] as normalised float32 [n, 3, h, w]."""
    import torch

    mean, std = (255 * torch.tensor(values).view(1, 3, 1, 1) for values in (job.mean, job.std))
    planes = torch.from_numpy(images).permute(0, 3, 1, 2)
    return planes.to(torch.float32, memory_format=torch.contiguous_format).sub_(mean).mul_(1 / std)
