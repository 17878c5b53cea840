"""Substitutes of bad samples: the same sample at the same position, in every loader."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_jpeg, tree_of
from loader_options import grouped
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, SubsetRandomSampler

import packer
import readers
from packer.testing.samples import overwrite
from readers.augment import RandomResizedCrop
from readers.dali import Source
from readers.loader import ImageLoader
from readers.order import Bucketed, Mixed, Order, Shuffled, Weighted
from readers.order.base import Stepped
from readers.torch import EpochBatchSampler, EpochSampler, ImageDataset, ImageStream

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:.* bad samples were replaced:UserWarning"),
]
COUNT, BATCH = 60, 6
BAD = frozenset(range(0, COUNT, 4))
FIRST = COUNT // 2
CROP = [RandomResizedCrop(16)]


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> readers.Reader:
    root = tmp_path_factory.mktemp("substitutes")
    images = {f"class{i % 2}/photo{i:03d}.jpg": make_jpeg(i, (40, 32)) for i in range(COUNT)}
    packer.convert(tree_of(root / "images", images), to="hdf5", output=root / "set")
    reader = readers.open(root / "set")
    for number in BAD:
        overwrite(reader, number, b"")
    return reader


ORDERS: dict[str, Callable[[], Order]] = {
    "shuffled": lambda: Shuffled(COUNT, 5),
    "weighted": lambda: Weighted(np.arange(COUNT) < FIRST, seed=5),
    "mixed": lambda: Mixed([FIRST, COUNT - FIRST], [1, 0], seed=5),
    "bucketed": lambda: Bucketed(np.arange(COUNT) // 10, BATCH, 1, seed=5),
}


def rows_and_pixels(batches: Any) -> tuple[list[int], torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        listed = list(batches)
    return [row for _, rows in listed for row in rows.tolist()], torch.cat([images for images, _ in listed])


@pytest.mark.parametrize(("name", "workers"), [("shuffled", 2), ("weighted", 0), ("mixed", 0), ("bucketed", 2)])
def test_every_consumer_uses_the_same_substitutes(damaged: readers.Reader, name: str, workers: int) -> None:
    make, options = ORDERS[name], {"fields": ("image", "index"), "on_error": "substitute"}
    loader = ImageLoader(damaged, BATCH, order=make(), **grouped({"augment": CROP, "threads": 1, **options}))  # type: ignore[arg-type]
    expected, pixels = rows_and_pixels(loader)
    assert len(loader.bad_samples) and not BAD & {*expected}
    dataset = ImageDataset(damaged, CROP, exact_colours=False, **options)  # type: ignore[arg-type]
    batches = DataLoader(
        dataset, batch_sampler=EpochBatchSampler(make(), dataset, batch_size=BATCH), num_workers=workers
    )
    rows, same = rows_and_pixels(batches)
    assert rows == expected and torch.equal(same, pixels)
    source = Source(damaged, BATCH, order=make(), on_error="substitute")
    assert [int(row) for step in range(source.batches(0)) for row in source.batch(0, step)[-1].ravel()] == expected
    if isinstance(make(), Stepped):
        return
    for source in (dataset, damaged, None):  # a sampler may not know the data set of its indices
        single = DataLoader(dataset, BATCH, sampler=EpochSampler(make(), source), num_workers=workers)
        assert rows_and_pixels(single)[0] == expected
    stream = ImageStream(dataset, EpochSampler(make(), dataset), BATCH)
    assert rows_and_pixels(DataLoader(stream, batch_size=None, num_workers=workers))[0] == expected


@pytest.mark.parametrize("name", ["weighted", "mixed"])
def test_a_sample_outside_the_order_is_never_a_substitute(damaged: readers.Reader, name: str) -> None:
    dataset = ImageDataset(damaged, CROP, fields=("image", "index"), on_error="substitute")
    for epoch in range(3):
        sampler = EpochSampler(ORDERS[name](), dataset)
        sampler.set_epoch(epoch)
        rows, _ = rows_and_pixels(DataLoader(dataset, BATCH, sampler=sampler))
        assert len(rows) == COUNT and max(rows) < FIRST
    assert dataset.bad_samples


def test_substitutes_under_samplers_of_torch(damaged: readers.Reader) -> None:
    """Without a known order, the substitute is another sample of the batch; for a single sample it is any sample of the
    set."""
    dataset = ImageDataset(damaged, CROP, fields=("image", "index"), on_error="substitute")
    chosen = [*range(FIRST)]
    rows, _ = rows_and_pixels(DataLoader(dataset, BATCH, sampler=SubsetRandomSampler(chosen)))
    assert len(rows) == FIRST and max(rows) < FIRST
    batches = BatchSampler(SequentialSampler(range(8)), 4, drop_last=False)
    once = [rows_and_pixels(DataLoader(dataset, batch_sampler=batches))[0] for _ in range(2)]
    assert once[0] == once[1] and {*once[0][:4]} <= {1, 2, 3} and {*once[0][4:]} <= {5, 6, 7}
    alone = {int(dataset[row][1]) for row in BAD}
    assert not alone & BAD and alone == {int(dataset[row][1]) for row in BAD}


def test_places_carry_substitutes_only_on_request(damaged: readers.Reader) -> None:
    for on_error, count in (("raise", 0), ("skip", 0), ("substitute", 16)):
        dataset = ImageDataset(damaged, on_error=on_error)  # type: ignore[arg-type]
        place = next(iter(EpochSampler(Shuffled(COUNT, 5), dataset)))
        assert len(place.others) == count  # type: ignore[attr-defined]
