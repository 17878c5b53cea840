"""Loops over loaders, samplers and streams: every (epoch, sample) once, wherever they stop and on any number of
ranks."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import make_jpeg, tree_of
from torch.utils.data import DataLoader
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

import packer
import readers
from cache.errors import BadSampleError, ResumeError, TrainerError, UnknownNameError
from cache.stores import Extents, StoreOver
from readers import Ranks
from readers.augment import RandomHorizontalFlip, RandomResizedCrop
from readers.decode import DECODER
from readers.feed import FeedOptions, Start, Steps
from readers.loader import ImageLoader
from readers.order import BlockShuffled, Sequential, Shuffled, Weighted
from readers.replaying import find_states
from readers.table import Buffer
from readers.torch import EpochBatchSampler, EpochSampler, ImageDataset, ImageStream

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]
COUNT = 50
FAULTS = pytest.mark.faults


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[readers.Reader]:
    """50 JPEGs of several sizes in five classes, with captions."""
    root = tmp_path_factory.mktemp("loops")
    tree_of(root, {f"{i:02d}.jpg": make_jpeg(i, (16 + 4 * (i % 3), 16)) for i in range(COUNT)})
    rows = ["path,label,caption", *(f"{root / f'{i:02d}.jpg'},{i % 5},text {i}" for i in range(COUNT))]
    (root / "table.csv").write_text("\n".join(rows))
    packer.convert(root / "table.csv", to="tar", output=root / "set", shards=packer.Shards(samples=20))
    with readers.open(root / "set") as opened:
        yield opened


class NoImages(StoreOver):
    """A store that refuses to read the images, which are the first of two fields."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def read_one(self, row: int, shard: int, offset: int, length: int) -> Buffer:
        assert row % 2, "an image was read"
        return self.source.read_one(row, shard, offset, length)

    def read(self, extents: Extents) -> list[Buffer]:
        assert (extents.row % 2).all(), "images were read"
        return self.source.read(extents)


# --- one loop after the other -------------------------------------------------------------------------------------
def loader_of(reader: Any, batch_size: int = 10, **options: Any) -> ImageLoader:
    return ImageLoader(reader, batch_size, **{"order": Shuffled(COUNT, 3), "fields": ("index",), **options})


def indices_of(loader: Any) -> list[int]:
    return [int(index) for (batch, *_) in loader for index in batch]


def expected(epoch: int, seed: int = 3) -> list[int]:
    return list(Shuffled(COUNT, seed).indices(epoch, np.arange(COUNT)).tolist())


def test_the_length_is_the_batches_of_a_whole_epoch(reader: readers.Reader) -> None:
    loader = loader_of(reader)
    stream = iter(loader)
    next(stream), next(stream)
    assert len(loader) == 5 and loader.left == 3 and loader.seed == 3
    other = loader_of(reader)
    other.load_state_dict(loader.state_dict())
    assert len(other) == 5 and other.left == 3
    assert indices_of(other) == expected(0)[20:] and other.left == 5
    sampler = EpochSampler(Shuffled(COUNT, 3), reader)
    sampler.load_state_dict(loader.state_dict())
    assert len(sampler) == COUNT and sampler.left == 30
    assert len(DataLoader(ImageDataset(reader), 10, sampler=sampler)) == 5


def test_ranks_are_determined_at_the_start_of_a_loop(reader: readers.Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some launchers start the ranks after the loader was made."""
    loader = loader_of(reader, 5, order=Sequential(COUNT))
    sampler = EpochSampler(Sequential(COUNT), reader)
    assert loader.world_size == sampler.world_size == 1
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert next(iter(loader))[0].tolist() == [5, 6, 7, 8, 9] and (loader.rank, loader.world_size) == (1, 2)
    assert list(sampler) == list(range(1, COUNT, 2)) and len(sampler) == 25


# --- the end of an epoch ------------------------------------------------------------------------------------------
def test_an_evaluation_loads_every_sample(reader: readers.Reader) -> None:
    assert indices_of(ImageLoader(reader, 64, shuffle=False, fields=("index",))) == list(range(COUNT))
    ranks = [
        ImageLoader(reader, 7, shuffle=False, fields=("index",), ranks=Ranks(rank=r, world_size=3)) for r in range(3)
    ]
    assert len({len(loader) for loader in ranks}) == 1, "ranks have different numbers of batches"
    assert sorted(index for loader in ranks for index in indices_of(loader)) == list(range(COUNT))
    assert len(ImageLoader(reader, 7, shuffle=False, ranks=Ranks(tail="drop_last"), fields=("index",))) == 7
    stream = ImageStream(ImageDataset(reader, fields=("index",)), EpochSampler(Sequential(COUNT), reader), 64)
    assert indices_of(DataLoader(stream, batch_size=None)) == list(range(COUNT))


def test_an_epoch_without_a_batch_is_an_error(reader: readers.Reader) -> None:
    message = r"50 samples has no batch of 64 .*give tail='exact', or a smaller batch_size"
    with pytest.raises(ValueError, match=message):
        ImageLoader(reader, 64)
    with pytest.raises(ValueError, match="50 samples has no batch of 30 on each of 2 ranks"):
        ImageLoader(reader, 30, ranks=Ranks(rank=0, world_size=2))
    with pytest.raises(ValueError, match="no samples to load"):
        ImageLoader(reader, 4, order=Weighted(np.ones(COUNT), samples=0))
    dataset, sampler = ImageDataset(reader, fields=("index",)), EpochSampler(Shuffled(COUNT), reader)
    for make in (DataLoader, StatefulDataLoader):
        for workers in (0, 1):
            with pytest.raises(ValueError, match=r"no batch of 64 .*drop_last=True leaves out smaller ones"):
                list(make(dataset, 64, sampler=sampler, drop_last=True, num_workers=workers))
    with pytest.raises(ValueError, match="50 samples has no batch of 1 on each of 60 ranks"):
        EpochSampler(Shuffled(COUNT), reader, rank=0, world_size=60)
    with pytest.raises(ValueError, match="no batch of 64 samples"):
        ImageStream(ImageDataset(reader), EpochSampler(Shuffled(COUNT), reader), 64)


# --- the content of a batch ---------------------------------------------------------------------------------------
def test_without_the_field_image_no_image_is_read(reader: readers.Reader) -> None:
    fields = ("label", "key", "index", "json")
    without = readers.Reader(reader.table, NoImages(reader.store))
    labels, keys, indices, texts = next(iter(ImageLoader(without, 10, fields=fields, seed=1)))
    assert labels.tolist() == reader.labels[indices.numpy()].tolist() and keys == [reader.keys[i] for i in indices]
    assert [text["caption"] for text in texts] == [f"text {i}" for i in indices.tolist()]
    dataset = ImageDataset(without, fields=fields)
    label, key, index, text = dataset[7]
    assert (label, key, index) == (int(reader.labels[7]), reader.keys[7], 7)
    assert text["caption"] == "text 7"
    assert [item[2] for item in dataset.__getitems__([3, 1])] == [3, 1]


def test_batches_can_be_dictionaries(reader: readers.Reader) -> None:
    names = {"pixel_values": "image", "labels": "label"}
    few = reader.select(indices=[0, 3, 6, 9])
    loaded = next(iter(ImageLoader(few, 4, shuffle=False, fields=names)))
    collated = next(iter(DataLoader(ImageDataset(few, fields=names), 4)))
    assert list(loaded) == list(collated) == ["pixel_values", "labels"]
    assert torch.equal(loaded["labels"], collated["labels"])
    assert torch.equal(loaded["pixel_values"], collated["pixel_values"])


@pytest.mark.parametrize("make", [lambda r, f: ImageLoader(r, 4, fields=f), lambda r, f: ImageDataset(r, fields=f)])
def test_missing_fields(reader: readers.Reader, make: Callable[..., Any]) -> None:
    with pytest.raises(UnknownNameError, match="no field 'mask'; a batch can have image, label, key, index, json"):
        make(reader, ("image", "mask"))
    with pytest.raises(UnknownNameError, match=r"write  fields=\('label',\)"):
        make(reader, "label")


def test_a_batch_of_only_bad_samples_is_an_error(tmp_path: Path) -> None:
    for i in range(8):
        (tmp_path / f"{i}.jpg").write_bytes(make_jpeg(i) if i < 4 else b"no image")
    reader = readers.open_folder(tmp_path)
    loader = DataLoader(ImageDataset(reader, on_error="skip"), 4, num_workers=1)
    stream = iter(loader)
    assert len(next(stream)[0]) == 4
    with pytest.raises(BadSampleError, match=r"all 4 samples of a batch are bad.*sample 4 \(4\)"):
        next(stream)
    replaced = DataLoader(ImageDataset(reader, on_error="substitute"), 6)
    assert len(next(iter(replaced))[0]) == 6
    alone = DataLoader(ImageDataset(reader, on_error="substitute"), sampler=[4, 5], batch_size=2)
    with pytest.raises(BadSampleError, match="substitutes of a bad sample are bad, too"):  # no other sample is known
        next(iter(alone))


# --- stops at random ----------------------------------------------------------------------------------------------
class Step(NamedTuple):
    """The samples of all ranks in a step, and the state after it."""

    epoch: int
    samples: list[int]
    state: dict[str, Any]


def by_loader(reader: Any, order: Any, state: Any, world: int, batch: int) -> Iterator[Step]:
    ranks = [
        ImageLoader(reader, batch, order=order, ranks=Ranks(tail="exact", rank=r, world_size=world), fields=("index",))
        for r in range(world)
    ]
    for loader in ranks:
        if state is not None:
            loader.load_state_dict(state)
    while True:
        epoch = ranks[0].epoch
        for parts in zip(*ranks, strict=True):
            states = [loader.state_dict() for loader in ranks]
            assert all(state == states[0] for state in states), "the state is the same on every rank"
            yield Step(epoch, [int(i) for (part,) in parts for i in part], states[0])


def by_torch(kind: str, reader: Any, order: Any, state: Any, world: int, batch: int) -> Iterator[Step]:
    """A sampler, a batch sampler or a stream in DataLoaders, or StatefulDataLoaders and nodes, which save the state
    themselves."""
    dataset, is_nodes = ImageDataset(reader, fields=("index",)), kind == "nodes"
    ranks = [{"rank": rank, "world_size": world, "tail": "exact"} for rank in range(world)]
    places: list[Any]
    if kind == "batches":
        places = [EpochBatchSampler(order, dataset, batch, **options) for options in ranks]
        loaders: list[Any] = [DataLoader(dataset, batch_sampler=place) for place in places]
    else:
        places = [EpochSampler(order, dataset, **options) for options in ranks]
    if kind == "stream":
        places = [ImageStream(dataset, sampler, batch, drop_last=False) for sampler in places]
        loaders = [DataLoader(stream, batch_size=None) for stream in places]
    elif is_nodes:
        made = [nodes.Batcher(nodes.SamplerWrapper(sampler), batch, drop_last=False) for sampler in places]
        loaders = [nodes.Loader(nodes.Mapper(loader, dataset.__getitems__)) for loader in made]
    elif kind != "batches":
        kinds = {"sampler": DataLoader, "stateful": StatefulDataLoader}
        loaders = [kinds[kind](dataset, batch, sampler=sampler) for sampler in places]
    for place in places:
        if state is not None:
            place.load_state_dict(state)
    while True:
        epoch = places[0].epoch
        for step, parts in enumerate(zip_longest(*loaders, fillvalue=() if is_nodes else ((),)), 1):
            epoch = places[0].epoch if kind == "stream" else epoch  # of a stream: that of the last iteration
            seen = [int(index) for part in parts for (index,) in (part if is_nodes else zip(*part, strict=True))]
            units = step if kind == "batches" else step * batch
            states = [place.state_after(units) for place in places]
            assert states == states[:1] * world, "the state is the same on every rank"
            if kind in ("stateful", "nodes"):  # they count returned samples
                own = [token for loader in loaders for token in find_states(loader.state_dict()).values()]
                states = [max(own, key=lambda token: (token["epoch"], token["cursor"]))]
            yield Step(epoch, seen, states[0])


def by_reader(reader: Any, order: Any, state: Any, world: int, batch: int) -> Iterator[Step]:
    """`reader.stream`, over the rows of a schedule."""
    row_of = {bytes(data): row for row, data in enumerate(reader.stream())}
    feeds = [Steps(reader, order, batch, FeedOptions(rank, world, "exact", decoder=DECODER)) for rank in range(world)]
    if state is not None:
        feeds = [feed.resumed(state) for feed in feeds]
    start = feeds[0].start
    while True:
        feeds = [feed.at(start).joined(start, None) for feed in feeds]
        for step in range(feeds[0].steps()):
            rows = [row for feed in feeds for row in feed.rows(start.epoch, step)[1].tolist()]
            seen = [row_of[bytes(data)] for data in reader.stream(rows)]
            yield Step(start.epoch, seen, feeds[0].token(feeds[0].or_next(feeds[0].after(step + 1))))
        start = Start(start.epoch + 1)


WALKS: dict[str, Any] = {"loader": by_loader, "reader.stream": by_reader}
WALKS |= {kind: partial(by_torch, kind) for kind in ("sampler", "batches", "stream", "stateful", "nodes")}
# Ranks, samples of each in a step, and steps until the run stops; an epoch has 50 samples.
CHAINS: dict[str, list[tuple[int, int, int]]] = {
    "ends of epochs": [(2, 5, 5), (5, 10, 1), (2, 25, 1), (1, 50, 1), (5, 5, 4)],
    "nothing done": [(1, 4, 0), (3, 2, 4), (2, 3, 0), (2, 3, 0), (4, 1, 7), (1, 9, 0)],
    "six": [(1, 3, 7), (5, 2, 2), (2, 9, 1), (3, 3, 6), (1, 1, 11), (4, 4, 5)],
    "two": [(4, 6, 2), (3, 7, 4)],
}


def run_chain(reader: Any, order: Any, runs: Any, seed: Any = "") -> None:
    """Runs that continue one another, each (walk, ranks, batch size, steps): every epoch has every sample once, in its
    order, and `readers.replay` returns the samples of each step."""
    state: dict[str, Any] | None = None
    steps: list[Step] = []

    def go(walk: Any, world: int, batch: int, count: int | None, epochs: float = math.inf) -> None:
        nonlocal state
        for step in islice(walk(reader, order, state, world, batch), count):
            if step.epoch > epochs:
                break
            steps.append(step)
            state = json.loads(json.dumps(step.state))

    for run in runs:
        go(*run)
    last = steps[-1].epoch
    if state is not None and state["epoch"] == last:  # the rest of the epoch under way
        go(by_loader, 1, 1, None, last)
    for epoch in range(last + 1):
        at = 0
        for step in (step for step in steps if step.epoch == epoch):
            in_order = sorted(order.indices(epoch, np.arange(at, at + len(step.samples))).tolist())
            assert sorted(step.samples) == in_order, f"{seed}: epoch {epoch} at position {at}"
            at += len(step.samples)
        assert at == COUNT, f"{seed}: epoch {epoch} has {at} samples"
    replayed = readers.replay(state or {}, reader, order=order)
    for number, step in enumerate(steps):
        rows = sorted(sample.row for sample in replayed.step(number).samples)
        assert rows == sorted(step.samples), f"{seed}: replay of step {number}"


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("feed", [*WALKS, "each in turn"])
def test_chains_of_resumes_lose_and_repeat_nothing(reader: readers.Reader, feed: str, chain: str) -> None:
    """Each run has other ranks and batches than the run that it resumes; also with alternating feeds."""
    walks = itertools.cycle(WALKS.values()) if feed == "each in turn" else itertools.repeat(WALKS[feed])
    run_chain(reader, Shuffled(COUNT, 3), [(walk, *run) for walk, run in zip(walks, CHAINS[chain], strict=False)])


@pytest.mark.parametrize(("stops", "seed"), [(25, 0), *(pytest.param(50, i, marks=FAULTS) for i in range(100, 140))])
def test_nothing_is_lost_or_repeated_by_any_successor(reader: readers.Reader, stops: int, seed: int) -> None:
    """Stops at random, and continues each time with another feed, other ranks and batches."""
    draw = random.Random(seed)
    order = draw.choice((Shuffled(COUNT, seed + 1), BlockShuffled(np.arange(0, COUNT + 1, 5), 2, seed + 1)))
    walks = list(WALKS.values())
    runs = [(draw.choice(walks), draw.randint(1, 5), draw.randint(1, 9), draw.randint(0, 9)) for _ in range(stops)]
    run_chain(reader, order, runs, f"seed {seed}")


# --- torchdata ----------------------------------------------------------------------------------------------------
def stateful(reader: Any, kind: str, workers: int, batch: int, **options: Any) -> StatefulDataLoader[Any]:
    dataset = ImageDataset(reader, fields=("index",))
    sampler = EpochSampler(Shuffled(COUNT, 3), dataset)
    if kind == "sampler":
        return StatefulDataLoader(dataset, batch, sampler=sampler, num_workers=workers, **options)
    stream = ImageStream(dataset, sampler, batch, drop_last=False)
    return StatefulDataLoader(stream, batch_size=None, num_workers=workers, **options)


@pytest.mark.parametrize(("kind", "workers"), [("sampler", 2), ("stream", 0), ("stream", 2)])
def test_the_state_of_a_finished_epoch_continues_with_the_next(reader: readers.Reader, kind: str, workers: int) -> None:
    """With a last batch that is not full, and with a full one; repeatedly."""
    for batch in (16, 25):
        state = None
        for epoch in range(3):
            loader = stateful(reader, kind, workers, batch)
            if state is not None:
                loader.load_state_dict(state)
            assert indices_of(loader) == expected(epoch), f"epoch {epoch} in batches of {batch}"
            state = loader.state_dict()


@pytest.mark.parametrize("kind", ["sampler", "stream"])
@pytest.mark.parametrize(
    ("workers", "batch", "stops"),
    [
        (2, 8, 3),
        *(pytest.param(workers, batch, 30, marks=FAULTS) for workers in (1, 3) for batch in (8, 25)),
        *(pytest.param(0, batch, 200, marks=FAULTS) for batch in (8, 25)),
    ],
)
def test_stateful_loaders_stop_anywhere(
    reader: readers.Reader, kind: str, workers: int, batch: int, stops: int
) -> None:
    """Every epoch in its order, no sample twice, though each stop continues in a new loader."""
    draw, seen, state = random.Random(stops), [], None
    for _ in range(stops):
        loader = stateful(reader, kind, workers, batch, persistent_workers=workers > 0 and draw.random() < 0.5)
        if state is not None:
            loader.load_state_dict(state)
        steps = draw.randint(1, 2 * -(-COUNT // batch))
        while steps > 0:
            stream = iter(loader)
            got = [numbers.tolist() for (numbers,) in islice(stream, steps)]
            seen += [number for numbers in got for number in numbers]
            steps -= max(1, len(got))
            state = loader.state_dict()
            del stream
    whole = [number for epoch in range(len(seen) // COUNT + 1) for number in expected(epoch)]
    assert seen == whole[: len(seen)]


@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_ops_continue_their_random_numbers_with_torchs_sampler(reader: readers.Reader, workers: int) -> None:
    """The state holds the state of torch's generator, unless our sampler determines the random numbers by position."""

    def loader(dataset: ImageDataset) -> StatefulDataLoader[Any]:
        return StatefulDataLoader(dataset, 8, shuffle=True, num_workers=workers)

    ops = [RandomResizedCrop(8), RandomHorizontalFlip()]
    first, again = loader(ImageDataset(reader, ops)), loader(ImageDataset(reader, ops))
    stream = iter(first)
    next(stream)
    again.load_state_dict(first.state_dict())
    rest = list(stream)
    assert len(rest) == 6
    assert all(torch.equal(a[0], b[0]) for a, b in zip(rest, again, strict=True))
    dataset = ImageDataset(reader, ops)
    assert "generator" in json.loads(json.dumps(dataset.state_dict()))
    EpochSampler(Shuffled(COUNT, 3), dataset)
    assert "generator" not in dataset.state_dict()


@pytest.mark.parametrize(("kind", "workers"), [("sampler", 2), ("stream", 0), ("stream", 2)])
def test_set_epoch_counts_after_a_state_before_the_first_loop(reader: readers.Reader, kind: str, workers: int) -> None:
    """To save that state, a StatefulDataLoader makes its first iterator, whose workers start at once."""
    for epochs in ([0, 1], [3, 4], [0, 3]):
        loader = stateful(reader, kind, workers, 8)
        position = loader.sampler if kind == "sampler" else loader.dataset
        loader.state_dict()
        for epoch in epochs:
            position.set_epoch(epoch)
            assert indices_of(loader) == expected(epoch)
    loader = stateful(reader, kind, workers, 8)
    position = loader.sampler if kind == "sampler" else loader.dataset
    loader.state_dict()
    position.load_state_dict(EpochSampler(Shuffled(COUNT, 3), reader).state_after(20))
    assert indices_of(loader) == expected(0)[20:]


# --- streams ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "persistent_workers": True}])
def test_a_stream_knows_its_epoch(reader: readers.Reader, options: dict[str, Any]) -> None:
    dataset = ImageDataset(reader, fields=("index",))

    def make() -> tuple[EpochSampler, ImageStream, DataLoader[Any]]:
        sampler = EpochSampler(Shuffled(COUNT, 3), dataset)
        stream = ImageStream(dataset, sampler, 8, drop_last=False)
        return sampler, stream, DataLoader(stream, batch_size=None, **options)

    sampler, stream, loader = make()
    assert indices_of(loader) == expected(0) and indices_of(loader) == expected(1)
    stream.set_epoch(9)
    assert indices_of(loader) == expected(9)
    stream.set_epoch(2)
    for steps, _ in enumerate(loader, 1):
        if steps == 3:
            break
    state = stream.state_after(24)
    assert (state["epoch"], state["cursor"]) == (2, 24) and sampler.state_after(24) == state and sampler.epoch == 2
    for saved, rest in ((state, [expected(2)[24:]]), (stream.state_after(COUNT), [])):
        _, resumed, loader = make()
        resumed.load_state_dict(saved)
        epochs = [*rest, expected(3), expected(4)]
        assert [indices_of(loader) for _ in epochs] == epochs


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=FAULTS)])
def test_two_iterators_over_a_stream_are_two_epochs(reader: readers.Reader, context: str) -> None:
    for _ in range(2):
        dataset = ImageDataset(reader, fields=("index",))
        stream = ImageStream(dataset, EpochSampler(Shuffled(COUNT, 3), dataset), 8, drop_last=False)
        loader = DataLoader(stream, batch_size=None, num_workers=2, multiprocessing_context=context)
        first, second = iter(loader), iter(loader)
        seen = [[index for pair in zip(first, second, strict=True) for index in pair[i][0].tolist()] for i in (0,)]
        assert seen[0] in (expected(0), expected(1))
        assert stream.epoch in (0, 1) and indices_of(loader) == expected(2)


def test_the_position_may_be_set_while_workers_start(reader: readers.Reader) -> None:
    """However far the workers are: no process hangs, and each worker makes its part of the same epoch."""
    for epoch in range(4):
        dataset = ImageDataset(reader, fields=("index",))
        stream = ImageStream(dataset, EpochSampler(Shuffled(COUNT, 3), dataset), 8, drop_last=False)
        loop = iter(DataLoader(stream, batch_size=None, num_workers=3))
        stream.set_epoch(epoch + 5)
        seen = [index for (batch,) in loop for index in batch.tolist()]
        assert seen in (expected(0), expected(epoch + 5))


def test_a_stream_names_the_loader_with_its_state(reader: readers.Reader) -> None:
    dataset = ImageDataset(reader, fields=("index",))
    stream = ImageStream(dataset, EpochSampler(Shuffled(COUNT, 3), dataset), 10)
    loader = DataLoader(stream, batch_size=None, num_workers=1, persistent_workers=True)
    next(iter(loader))
    with pytest.raises(TrainerError, match=r"write  stream.state_after\("):
        stream.state_dict()
    stream.load_state_dict(stream.state_after(10))
    with pytest.raises(ResumeError, match="make a new DataLoader"):
        next(iter(loader))


def test_a_sampler_reports_that_it_does_not_know_the_position_of_training(reader: readers.Reader) -> None:
    dataset = ImageDataset(reader, fields=("index",))
    sampler = EpochSampler(Shuffled(COUNT, 3), dataset)
    assert sampler.state_dict()["cursor"] == 0
    next(iter(DataLoader(dataset, 5, sampler=sampler, num_workers=2)))
    with pytest.raises(TrainerError, match=r"write  sampler.state_after\(.*StatefulDataLoader\("):
        sampler.state_dict()
    assert sampler.state_after(5)["cursor"] == 5
    next(iter(DataLoader(dataset, 5, sampler=sampler)))
    assert sampler.state_dict()["cursor"] == 5, "without workers the sampler knows it"


# --- plain DataLoader ---------------------------------------------------------------------------------------------
def kinds_of_workers() -> Iterator[Any]:
    for context in ("fork", "spawn", "forkserver"):
        for persistent in (False, True):
            for stream in (False, True):
                usual = (context == "fork" and persistent == stream) or (context == "spawn" and persistent and stream)
                yield pytest.param(context, persistent, stream, marks=() if usual else FAULTS)


@pytest.mark.parametrize(("context", "persistent", "stream"), [*kinds_of_workers()])
def test_workers_walk_through_epochs(reader: readers.Reader, context: str, persistent: bool, stream: bool) -> None:
    """Their images equal those that this process makes."""
    dataset = ImageDataset(reader, [RandomResizedCrop(8), RandomHorizontalFlip()], fields=("index", "image"))
    sampler, place = EpochSampler(Shuffled(COUNT, 3), dataset), EpochSampler(Shuffled(COUNT, 3))
    workers = 1 if context == "spawn" else 2
    options: dict[str, Any] = {"multiprocessing_context": context, "persistent_workers": persistent}
    if stream:
        loader = DataLoader(ImageStream(dataset, sampler, 8, drop_last=False), None, num_workers=workers, **options)
    else:
        loader = DataLoader(dataset, 8, sampler=sampler, num_workers=workers, **options)
    assert len(loader) == 7
    for epoch in range(2):
        indices, images = map(torch.cat, zip(*loader, strict=True))
        assert indices.tolist() == expected(epoch)
        assert torch.equal(images, torch.stack([image for _, image in dataset.__getitems__(list(place))]))
