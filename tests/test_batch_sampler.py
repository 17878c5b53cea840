"""`EpochBatchSampler`: one image shape a step on every rank, and exact stops. `test_trainers` tests trainers."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_jpeg, tree_of
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from trainer_cases import QUIET

import readers
from cache.errors import TrainerError
from readers.augment import AspectBuckets, ResizeToBucket
from readers.loader import ImageLoader
from readers.order import Bucketed, ResumeToken, Shuffled
from readers.torch import EpochBatchSampler, EpochSampler, ImageDataset, ImageStream

pytestmark = QUIET
COUNT, SEED = 36, 3
SHAPES = AspectBuckets(((12, 6), (8, 8), (6, 12)))
OPS = [ResizeToBucket(SHAPES)]
FIELDS = ("index", "image")


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[readers.Reader]:
    """36 images, 12 of each shape."""
    sizes = [(16, 16), (10, 24), (24, 10)]
    root = tmp_path_factory.mktemp("shapes")
    with readers.open_folder(tree_of(root, {f"a/{i:02}.jpg": make_jpeg(i, sizes[i % 3]) for i in range(COUNT)})) as it:
        yield it


def order_of(reader: Any, batch: Any = 3, world_size: int = 1, tail: Any = "drop_last") -> Bucketed:
    return Bucketed(SHAPES.of(reader.info), batch, world_size, tail, seed=SEED)


def samplers_of(order: Bucketed, source: Any = None) -> list[EpochBatchSampler]:
    world_size = order.world_size or 1
    return [EpochBatchSampler(order, source, rank=rank, world_size=world_size) for rank in range(world_size)]


def check_steps(reader: Any, steps: list[tuple[list[int], ...]]) -> list[int]:
    """Check steps of all ranks and return their samples: a step is of one bucket and of one size on every rank."""
    of = SHAPES.of(reader.info)
    for batches in steps:
        assert len({*map(len, batches)}) == 1, "the batch sizes of the ranks differ"
        assert len({*of[np.concatenate(batches)].tolist()}) == 1, "a step has images of two shapes"
    return [int(sample) for batches in steps for batch in batches for sample in batch]


# --- DataLoader ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("batch", [3, (2, 4, 1)])
def test_workers_give_batches_of_one_shape_on_every_rank(reader: Any, batch: Any) -> None:
    dataset = ImageDataset(reader, OPS, fields=("image", "index"))
    samplers = samplers_of(order_of(reader, batch, 2, "pad"), dataset)
    loaders = [DataLoader(dataset, batch_sampler=sampler, num_workers=2) for sampler in samplers]
    assert len({*map(len, loaders)}) == 1
    for _ in range(2):
        steps = list(zip(*loaders, strict=True))
        assert len(steps) == len(loaders[0])
        assert all(len({images.shape for images, _ in step}) == 1 for step in steps)
        seen = check_steps(reader, [tuple(rows.tolist() for _, rows in step) for step in steps])
        assert {*seen} == {*range(COUNT)}
    assert [sampler.epoch for sampler in samplers] == [2, 2]
    with pytest.raises(TrainerError, match=r"state_after\(batches this .*StatefulDataLoader\(dataset, batch_sampler"):
        next(iter(loaders[0]))
        samplers[0].state_dict()


@pytest.mark.parametrize("limit", [50, pytest.param(1000, marks=pytest.mark.faults)])
@pytest.mark.parametrize("tail", ["pad", "drop_last"])
def test_stops_with_other_ranks_and_batches(reader: Any, tail: str, limit: int) -> None:
    """Stops repeatedly in one epoch: no sample is lost or repeated."""
    draw, stops = random.Random(7), 0
    while stops < limit:
        epoch, seen, state = draw.randint(0, 3), [], None
        while True:
            sizes = draw.choice([draw.randint(1, 4), [draw.randint(1, 4) for _ in range(3)]])
            samplers = samplers_of(order_of(reader, sizes, draw.randint(1, 3), tail))
            for sampler in samplers:
                sampler.set_epoch(epoch)
                if state is not None:
                    sampler.load_state_dict(state)
            loops = [iter(sampler) for sampler in samplers]
            done = draw.randint(0, samplers[0].left) if samplers[0].epoch == epoch else 0
            seen += check_steps(reader, list(zip(*(list(islice(loop, done)) for loop in loops), strict=True)))
            if samplers[0].epoch != epoch:  # the rest is too small for a step of this size
                break
            states = [sampler.state_after(done) for sampler in samplers]
            assert all(state == states[0] for state in states)
            state, stops = json.loads(json.dumps(states[0])), stops + 1
            if not samplers[0].left:
                break
        assert state is not None
        order = ResumeToken.from_dict(state).resumed(samplers[0].order)
        counts, out = Counter(seen), order.left_out(epoch).tolist()  # type: ignore[attr-defined]
        assert sorted([*counts, *out]) == list(range(COUNT)) and (tail == "pad" or {*counts.values()} <= {1})


def test_a_stop_in_workers_and_in_our_loader(reader: Any) -> None:
    """DataLoader workers run ahead; only steps that training has received count. Each kind accepts states of the
    other."""
    dataset = ImageDataset(reader, OPS, fields=FIELDS)
    sampler = EpochBatchSampler(order_of(reader, 1), dataset)
    loop = iter(DataLoader(dataset, batch_sampler=sampler, num_workers=2))
    seen = [next(loop)[0].tolist() for _ in range(5)]
    own = ImageLoader(reader, 3, order=order_of(reader), augment=OPS, fields=FIELDS, threads=1)
    with pytest.warns(UserWarning) if dataset.decoder != own.decoder else pytest.MonkeyPatch.context():
        own.load_state_dict(sampler.state_after(5))
    batches = iter(own)
    seen += [next(batches)[0].tolist() for _ in range(3)]
    last = EpochBatchSampler(order_of(reader, 2), dataset)
    last.load_state_dict(own.state_dict())
    seen += [rows.tolist() for rows, _ in DataLoader(dataset, batch_sampler=last, num_workers=2)]
    counts = Counter(row for rows in seen for row in rows)
    assert len(counts) >= COUNT - 3 and {*counts.values()} == {1}


def test_torchdata_saves_and_restores_the_sampler(reader: Any) -> None:
    def make() -> Any:
        dataset = ImageDataset(reader, OPS, fields=FIELDS)
        sampler = EpochBatchSampler(order_of(reader), dataset)
        return StatefulDataLoader(dataset, batch_sampler=sampler, num_workers=2)

    whole = make()
    epochs = [[rows.tolist() for rows, _ in whole] for _ in range(2)]
    for done in (5, len(epochs[0])):
        first, second = make(), make()
        loop = iter(first)
        seen = [next(loop)[0].tolist() for _ in range(done)]
        second.load_state_dict(first.state_dict())
        rest = [rows.tolist() for rows, _ in second]
        assert seen + rest == epochs[0] and [rows.tolist() for rows, _ in second] == epochs[1]


def test_a_bad_sample_is_replaced_within_its_batch(tmp_path: Path) -> None:
    sizes = [(32, 32), (20, 48)]
    root = tree_of(tmp_path, {f"a/{i:02}.jpg": make_jpeg(i, sizes[i % 2]) for i in range(24)})
    with readers.open_folder(root) as reader:
        buckets = SHAPES.of(reader.info)
        bad = {4, 7, 10, 13, 16, 19}
        for row in bad:  # damaged after the headers were read
            path = root / "a" / f"{row:02}.jpg"
            path.write_bytes(path.read_bytes()[:-40])
        dataset = ImageDataset(reader, OPS, fields=("image", "index"), on_error="substitute")
        sampler = EpochBatchSampler(Bucketed(buckets, 4, 1, seed=1), dataset)
        batches = list(DataLoader(dataset, batch_sampler=sampler, num_workers=2))
    rows = [row for _, some in batches for row in some.tolist()]
    assert all(len({*buckets[some].tolist()}) == 1 for _, some in batches)
    assert len(rows) == 24 and {*rows} == {*range(24)} - bad and dataset.bad_samples == 6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda order: EpochSampler(order), r"Bucketed makes batches itself.*batch_sampler=EpochBatchSampler\(order"),
        (lambda order: EpochBatchSampler(Shuffled(9)), "Shuffled makes no batches itself: give .* a batch_size"),
        (lambda order: EpochBatchSampler(order, None, 7), "batches of up to 3 samples, but this loop has 1 and 7"),
        (lambda order: EpochBatchSampler(order, rank=0, world_size=2), "made for 1 ranks .* this loop has 2"),
        (lambda order: EpochBatchSampler(Shuffled(9), None, 2, tail="exact", all_ranks=True), "needs another tail"),
    ],
)
def test_invalid_options(reader: Any, make: Callable[[Bucketed], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(order_of(reader))


def test_a_stream_takes_single_samples(reader: Any) -> None:
    dataset = ImageDataset(reader, OPS)
    with pytest.raises(ValueError, match="give it an EpochSampler"):
        ImageStream(dataset, EpochBatchSampler(order_of(reader), dataset), 3)  # type: ignore[arg-type]
