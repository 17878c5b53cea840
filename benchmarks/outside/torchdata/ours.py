"""A pytest plug-in: in torchdata's tests of state, packer's data sets, samplers and streams replace the toy ones."""

from __future__ import annotations

from typing import Any

from sets import Images, apply, is_ours  # noqa: F401

from readers.order import Sequential, Shuffled
from readers.torch import EpochSampler, ImageStream

NOT_OURS = {  # part of a test's name: reason to skip it
    "TestStatefulDataLoaderMap_shard1::test_no_mp": "does nothing without workers",
    "TestDynamicState": "checks the lengths of its toy set's state",
    "test_iteration_error": "checks the toy set's error",
    "StateDuplication": "for a data set that is an iterator; a stream is not",
    "TestSingleIterCalled": "counts the calls of its toy set's __iter__",
    "out_of_order_iterable": "expects each worker to read half of the set; workers of a stream take batches in turn",
    "test_initialization_": "attributes of torchdata's sampler",
    "test_sampler_": "attributes of torchdata's sampler",
    "order_with_shuffle": "iterates twice over one epoch; EpochSampler's second iteration is the next epoch",
}


def stream(size: int, draws: bool = False, collate: Any = None) -> ImageStream:
    """A stream of batches of one sample. collate: makes an item of (stream, label)."""
    dataset, order = Images(size, draws=draws), Shuffled(size, seed=3) if draws else Sequential(size)
    made = ImageStream(dataset, EpochSampler(order, dataset), 1)
    if collate is not None:
        made.length, made.collate = size, lambda items: collate(made, items[0][1])
    return made


def replica(dataset: Any, num_replicas: int, rank: int, shuffle: bool = True, drop_last: bool = False) -> EpochSampler:
    order = Shuffled(len(dataset), seed=0) if shuffle else Sequential(len(dataset))
    return EpochSampler(order, dataset, rank=rank, world_size=num_replicas, tail="drop_last" if drop_last else "pad")


def numbered(sizes: list[int], increment_epoch: bool = False) -> ImageStream:
    return stream(sum(sizes), collate=(lambda made, label: (label, made.epoch)) if increment_epoch else None)


OURS = {
    "DummyMapDataset": lambda size, shuffle, include_generator=True: Images(size, draws=shuffle),
    "DummySampler": lambda size: EpochSampler(Shuffled(size, seed=3)),
    "DummyIterableDataset": lambda sizes, shuffle=False, include_generator=True: stream(sum(sizes), shuffle),
    "DummyIteratorIterableDataset": lambda samples, shuffle, include_generator: stream(len(samples), shuffle),
    "GeneratorIterable": numbered,
    "GeneratorIterableNoState": numbered,
    "PeriodicStateIterableDataset": lambda: stream(100, True),
    "CountIterCallsIter": lambda length: stream(length, collate=lambda made, label: label),
    "_TestSlowIndexDataset": lambda end, slow_index: Images(end, number=True, slow=slow_index),
    "MockDataset": lambda size: Images(size, number=True),
    "StatefulDistributedSampler": replica,
    "IterableDataset": lambda *examples, **options: stream(20),  # of the library datasets
}


def pytest_collection_modifyitems(items: list[Any]) -> None:
    apply(items, OURS, NOT_OURS)
