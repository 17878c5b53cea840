"""A pytest plug-in: in accelerate's tests of state, a packed set of n images replaces each list or range of n numbers;
ImageDataset and EpochSampler read it, and an item is the sample's number."""

from __future__ import annotations

from typing import Any

import torchdata.stateful_dataloader.stateful_dataloader as stateful
from sets import Images, apply, is_ours  # noqa: F401
from torch.utils.data import DataLoader

from readers.order import Sequential
from readers.torch import EpochSampler

NOT_OURS = {  # part of a test's name: reason to skip it
    "test_batch_sampler_": "has no data set",
    "test_skip_batch_sampler": "has no data set",
    "test_split_batches_": "has no data set",
    "test_iterable_dataset_": "checks how accelerate divides its toy iterable sets",
}


def ours(kind: Any) -> None:
    make = kind.__init__

    def made(self: Any, dataset: Any, *args: Any, **options: Any) -> None:
        if isinstance(dataset, list | range):
            dataset = Images(len(dataset), number=True)
            if not any(options.get(name) for name in ("sampler", "batch_sampler", "shuffle")):
                options["sampler"] = EpochSampler(Sequential(len(dataset)), dataset, rank=0, world_size=1)
        make(self, dataset, *args, **options)

    kind.__init__ = made


ours(DataLoader)
ours(stateful.StatefulDataLoader)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    apply(items, {}, NOT_OURS)
