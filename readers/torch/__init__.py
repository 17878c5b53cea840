"""PyTorch data sets and samplers over any reader.

    dataset = ImageDataset(reader, transform=[RandomResizedCrop(224), RandomHorizontalFlip()])
    sampler = EpochSampler(Shuffled(len(reader), seed=1), dataset)
    loader = DataLoader(dataset, batch_size=64, sampler=sampler, num_workers=4, persistent_workers=True)

Needs torch: `pip install 'packer-vision[torch]'`.
"""

from __future__ import annotations

from cache.errors import MissingExtraError

try:
    import torch  # noqa: F401
except ImportError as error:
    raise MissingExtraError("torch", "torch", "readers.torch") from error

from readers.options import FieldOptions
from readers.torch.dataset import ImageDataset
from readers.torch.iterable import ImageStream
from readers.torch.prefetcher import DevicePrefetcher
from readers.torch.rendering import Place
from readers.torch.sampler import EpochBatchSampler, EpochSampler

__all__ = [
    "DevicePrefetcher",
    "EpochBatchSampler",
    "EpochSampler",
    "FieldOptions",
    "ImageDataset",
    "ImageStream",
    "Place",
]
