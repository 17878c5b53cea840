"""PyTorch data sets and samplers over any reader. Needs torch: `pip install 'packer[torch]'`.

dataset = ImageDataset(reader, transform=[RandomResizedCrop(224), RandomHorizontalFlip()])
sampler = EpochSampler(Shuffled(len(reader), seed=1), reader)
loader = DataLoader(dataset, batch_size=64, sampler=sampler, num_workers=4, persistent_workers=True)
"""

from __future__ import annotations

from readers.errors import MissingExtraError

try:
    import torch  # noqa: F401
except ImportError as error:
    raise MissingExtraError("torch", "torch", "readers.torch") from error

from readers.torch.dataset import ImageDataset
from readers.torch.iterable import ImageStream
from readers.torch.sampler import EpochSampler, Place

__all__ = ["EpochSampler", "ImageDataset", "ImageStream", "Place"]
