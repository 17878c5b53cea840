"""A pytest plug-in: in accelerate's tests of state, each list or range of n numbers becomes a packed set of n images,
read by our data set in the order of our sampler; an item is the sample's number."""

from __future__ import annotations

from typing import Any

import torchdata.stateful_dataloader.stateful_dataloader as stateful
from sets import Images, apply, is_ours  # noqa: F401
from torch.utils.data import DataLoader

from readers.order import Sequential
from readers.torch import EpochSampler

NOT_OURS = {  # part of a test's name: why it does not apply
    "test_batch_sampler_": "no data set in it",
    "test_skip_batch_sampler": "no data set in it",
    "test_split_batches_": "no data set in it",
    "test_iterable_dataset_": "checks how accelerate shares out its toy iterable sets",
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
