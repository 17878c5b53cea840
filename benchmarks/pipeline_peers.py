"""Peers in `pipeline.py` that decode in worker processes of torch's DataLoader, or of one derived from it."""

from __future__ import annotations

import functools
import glob
import io
import os
import random
from typing import Any

import pipeline_sets as sets
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


def _read_bgr(path: str) -> Any:
    import cv2

    return cv2.imread(path, cv2.IMREAD_COLOR)


class _Cv2:
    """Box, resize and flip of an array [h, w, 3] in BGR."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def __call__(self, image: Any) -> Any:
        import cv2
        import torch

        cv2.setNumThreads(0)
        size = self.job.size
        top, left, height, width = self.job.box(*image.shape[:2])
        method = cv2.INTER_AREA if height > size else cv2.INTER_LINEAR
        image = cv2.resize(image[top : top + height, left : left + width], (size, size), interpolation=method)
        if random.random() < 0.5:
            image = cv2.flip(image, 1)
        image = cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
        return normalized(image[None], self.job)[0] if self.job.floats else torch.from_numpy(image)


def normalized(images: Any, job: Job) -> Any:
    """uint8 [n, h, w, 3] as normalised float32 [n, 3, h, w]."""
    import torch

    mean, std = (255 * torch.tensor(values).view(1, 3, 1, 1) for values in (job.mean, job.std))
    planes = torch.from_numpy(images).permute(0, 3, 1, 2)
    return planes.to(torch.float32, memory_format=torch.contiguous_format).sub_(mean).mul_(1 / std)


@pipeline("cv2", imports=f"{_VISION} cv2", data=["tree"], note="INTER_AREA where it shrinks, else INTER_LINEAR")
def cv2_loader(job: Job) -> MakeLoader:
    return _folder_loader(job, _Cv2(job), loader=_read_bgr)


@pipeline(
    "webdataset + PIL",
    kinds=["f32"],
    imports=f"{_VISION} webdataset",
    data=[sets.TAR],
    note=f"our tar shards, shuffle(1000), WebLoader; {_PIL}",
)
def webdataset_loader(job: Job) -> MakeLoader:
    import webdataset

    shards = sorted(glob.glob(os.path.join(job.output(sets.TAR), "*.tar")))
    dataset = webdataset.WebDataset(shards, shardshuffle=len(shards), empty_check=False).repeat().shuffle(1000)
    dataset = dataset.decode("pil").to_tuple("jpg", "cls").map_tuple(_pil_transforms(job), lambda label: label)
    dataset = dataset.batched(job.batch, partial=False)
    return lambda: webdataset.WebLoader(dataset, batch_size=None, num_workers=job.workers)


def _picture(data: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(data)).convert("RGB")


@pipeline(
    "litdata + PIL",
    kinds=["f32"],
    imports=f"{_VISION} litdata",
    data=[sets.LITDATA],
    note=f"StreamingDataLoader; {_PIL}",
)
def litdata_loader(job: Job) -> MakeLoader:
    import litdata

    transform = _pil_transforms(job)

    class Pictures(litdata.StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            sample = super().__getitem__(index)
            return transform(_picture(sample["image"])), sample["label"]

    dataset = Pictures(os.path.join(job.output(sets.LITDATA), "lit"), shuffle=True)
    options = {"batch_size": job.batch, "num_workers": job.workers, "drop_last": True, "persistent_workers": True}
    return lambda: litdata.StreamingDataLoader(dataset, **options)


@pipeline(
    "MosaicML MDS + PIL",
    kinds=["f32"],
    imports=f"{_VISION} streaming",
    data=[sets.MDS],
    note=f"StreamingDataset in a DataLoader; {_PIL}",
)
def mds_loader(job: Job) -> MakeLoader:
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    transform = _pil_transforms(job)

    class Pictures(StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            sample = super().__getitem__(index)
            return transform(_picture(sample["image"])), sample["label"]

    clean_stale_shared_memory()
    dataset = Pictures(local=os.path.join(job.output(sets.MDS), "mds"), shuffle=True, batch_size=job.batch)
    options = {"num_workers": job.workers, "drop_last": True, "persistent_workers": True}
    return lambda: DataLoader(dataset, job.batch, **options)
