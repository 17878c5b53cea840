"""Data sets in threads: torchdata's nodes, executors, and what torch's own thread workers will need.

The same items as in processes, on any thread, and an exact resume.
"""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from conftest import pack_few
from torch.utils.data import DataLoader, default_collate
from torchdata import nodes

import readers
from readers.augment import Op, RandomHorizontalFlip, RandomResizedCrop, Stage
from readers.order import Shuffled
from readers.torch import EpochSampler, ImageDataset, ImageStream

COUNT, BATCH = 30, 4
OPS = [RandomResizedCrop(16), RandomHorizontalFlip()]
ORDER = Shuffled(COUNT, 1)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_few(tmp_path_factory.mktemp("threads"), COUNT)


@pytest.fixture
def reader(packed: Path) -> Iterator[readers.Reader]:
    with readers.open(packed) as opened:
        yield opened


def dataset_of(reader: readers.Reader) -> ImageDataset:
    return ImageDataset(reader, OPS, fields=("index", "image"))


def threaded(reader: readers.Reader, threads: int = 3, method: str = "thread") -> nodes.Loader[Any]:
    """torchdata's pipeline of nodes: batches of indices, each made by one of some workers."""
    dataset = dataset_of(reader)
    indices = nodes.Batcher(nodes.SamplerWrapper(EpochSampler(ORDER, dataset)), BATCH, drop_last=True)

    def load(batch: list[int]) -> Any:
        return default_collate(dataset.__getitems__(batch))

    return nodes.Loader(nodes.ParallelMapper(indices, load, num_workers=threads, method=method))  # type: ignore[arg-type]


def by_processes(reader: readers.Reader, workers: int = 2) -> DataLoader[Any]:
    dataset = dataset_of(reader)
    sampler = EpochSampler(ORDER, dataset)
    return DataLoader(dataset, BATCH, sampler=sampler, num_workers=workers, drop_last=True)


def same(found: Any, expected: Any) -> bool:
    return all(
        torch.equal(a, b) for one, other in zip(found, expected, strict=True) for a, b in zip(one, other, strict=True)
    )


def test_threads_make_the_batches_of_processes(reader: readers.Reader) -> None:
    """Also in the second epoch: what is drawn depends neither on the worker nor on how many there are."""
    processes, threads = by_processes(reader), threaded(reader)
    for _ in range(2):
        expected = list(processes)
        assert len(expected) == COUNT // BATCH and same(list(threads), expected)


@pytest.mark.parametrize("stop", [3, COUNT // BATCH])
def test_nodes_resume_exactly(reader: readers.Reader, stop: int) -> None:
    """In mid-epoch, and at an epoch's end; with another number of threads."""
    loader, epochs = threaded(reader), 3
    whole = [copy.copy(batch) for _ in range(epochs) for batch in loader]
    loader = threaded(reader)
    batches = iter(loader)
    seen = [next(batches) for _ in range(stop)]
    resumed = threaded(reader, 1)
    resumed.load_state_dict(loader.state_dict())
    while len(seen) < len(whole):
        seen += list(resumed)
    assert same(seen, whole)


def test_many_threads_share_a_data_set(reader: readers.Reader) -> None:
    """An executor's threads, which ask for single items and for many at once, and a copy that is pickled meanwhile."""
    dataset = dataset_of(reader)
    places = [list(batch) for batch in torch.utils.data.BatchSampler(EpochSampler(ORDER, dataset), BATCH, True)]
    expected = [[item[1] for item in dataset.__getitems__(batch)] for batch in places]

    def one(number: int) -> bool:
        batch = places[number % len(places)]
        items = [dataset[place] for place in batch] if number % 2 else dataset.__getitems__(batch)
        return all(
            torch.equal(item[1], image) for item, image in zip(items, expected[number % len(places)], strict=True)
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(60)))


def test_a_stream_in_a_thread_is_that_of_the_loader(reader: readers.Reader) -> None:
    dataset = dataset_of(reader)
    stream = ImageStream(dataset, EpochSampler(ORDER, dataset), BATCH)
    expected = list(DataLoader(ImageStream(dataset, EpochSampler(ORDER, dataset), BATCH), batch_size=None))
    loader = nodes.Loader(nodes.Prefetcher(nodes.IterableWrapper(stream), 2))
    assert same(list(loader), expected)


def test_threads_may_all_be_the_first_to_read(reader: readers.Reader, request: pytest.FixtureRequest) -> None:
    expected = [bytes(data) for data in reader.read_many(range(8))]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    request.addfinalizer(lambda: sys.setswitchinterval(before))
    with ThreadPoolExecutor(8) as pool:
        for _ in range(30):
            fresh, together = pickle.loads(pickle.dumps(reader)), threading.Barrier(8)

            def read(index: int, reader: readers.Reader = fresh, together: threading.Barrier = together) -> bytes:
                together.wait(300)
                return bytes(reader.read(index))

            assert list(pool.map(read, range(8))) == expected


@dataclass(frozen=True)
class Threads(Op):
    """Notes how many cores torch's operations may use."""

    noted: list[int]
    stage: ClassVar[Stage] = Stage.PIXELS

    def plan(self, planner: Any, u: Any) -> None:
        planner.step(self, np.zeros((len(u), 1)))

    def apply(self, images: torch.Tensor, rows: Any) -> torch.Tensor:
        self.noted.append(torch.get_num_threads())
        return images


def test_an_item_is_made_on_one_core_and_torch_keeps_its_threads(reader: readers.Reader) -> None:
    """Threads of torch that wait for each other made an item take eight times as long."""
    noted: list[int] = []
    dataset, before = ImageDataset(reader, [RandomResizedCrop(16), Threads(noted)]), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        dataset[0], dataset.__getitems__([1, 2])
        assert noted == [1] * 3 and torch.get_num_threads() == 3
        in_thread: list[int] = []
        thread = threading.Thread(target=lambda: (dataset[0], in_thread.append(torch.get_num_threads())))
        thread.start()
        thread.join()
        assert noted == [1] * 4 and in_thread == [3]
    finally:
        torch.set_num_threads(before)
