"""`readers.replay` and `packer replay`: every replayed step equals the trained one, for every kind of loader, across
resumes."""

from __future__ import annotations

import json
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Packer, make_jpeg, tree_of
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from trainer_cases import QUIET, module_of, trainer_of

import packer
import readers
from cache.errors import ResumeError, UnknownNameError
from readers import Decode, Ranks, Views
from readers.augment import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    MixUp,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
)
from readers.loader import ImageLoader
from readers.order import (
    Bucketed,
    ClassBalanced,
    Mixed,
    NodeLocal,
    Sequential,
    Shuffled,
    Weighted,
    block_shuffled,
    woven,
)
from readers.replaying import Replay, find_states
from readers.torch import EpochBatchSampler, EpochSampler, ImageDataset, ImageStream

pytestmark = [*QUIET, pytest.mark.filterwarnings("ignore:samples of one block of this order:UserWarning")]
COUNT = 50
OPS = [RandomResizedCrop(12), RandomHorizontalFlip(), RandomRotation(20)]
FIELDS = ("image", "index")
KINDS = ("loader", "sampler 0", "sampler 2", "batches 0", "stream 0", "stream 2", "stateful 2", "stateful stream 2")
RUNS = ((4, 3, 6), (2, 5, 4), (3, 2, 11))  # ranks, samples of each in a step, steps until the run is killed


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """50 JPEGs of three sizes in two classes, and another split."""
    root = tmp_path_factory.mktemp("replay")
    files = {f"train/c{i % 2}/{i:02d}.jpg": make_jpeg(i, (20 + 4 * (i % 3), 16)) for i in range(COUNT)}
    tree_of(root / "images", files | {f"val/c0/{i}.jpg": make_jpeg(90 + i, (16, 16)) for i in range(7)})
    packer.convert(root / "images", to="tar", output=root / "set", run=packer.Run(workers=1))
    return root / "set"


# --- runs ---------------------------------------------------------------------------------------------------------
def trained(
    reader: Any, kind: str, state: Any, world: int, batch: int, order: Any = None, **options: Any
) -> Iterator[tuple[list[Any], Any]]:
    """Each step: the batch of every rank, and the state after it."""
    order = order or Shuffled(COUNT, 3)
    name, workers = ("loader", 0) if kind == "loader" else (kind[:-2], int(kind[-1]))
    places, loaders = [], []
    for rank in range(world):
        if name == "loader":
            ranks = Ranks(rank, world)
            made = {"order": order, "ranks": ranks, "threads": 1, "augment": OPS, "fields": FIELDS}
            places.append(ImageLoader(reader, batch, **{**made, **options}))
            loaders.append(places[-1])
            continue
        dataset, ranked = ImageDataset(reader, OPS, fields=FIELDS), {"rank": rank, "world_size": world}
        maker = StatefulDataLoader if "stateful" in name else DataLoader
        if name == "batches":
            places.append(EpochBatchSampler(order, dataset, batch, **ranked))
            loaders.append(maker(dataset, batch_sampler=places[-1], num_workers=workers))
        else:
            sampler = EpochSampler(order, dataset, **ranked)
            is_stream = "stream" in name
            places.append(ImageStream(dataset, sampler, batch, drop_last=False) if is_stream else sampler)
            batching = {"batch_size": None} if is_stream else {"batch_size": batch, "sampler": sampler}
            loaders.append(maker(places[-1] if is_stream else dataset, num_workers=workers, **batching))
    for place in places:
        if state is not None:
            place.load_state_dict(state)
    while True:
        for step, batches in enumerate(zip(*loaders, strict=True), 1):
            if name.startswith("stateful"):
                (token, *_) = find_states(loaders[0].state_dict()).values()
                tokens = [max(find_states(dl.state_dict()).values(), key=lambda t: t["cursor"]) for dl in loaders]
                token = tokens[0]
            else:
                units = step if name == "batches" else step * batch
                token = places[0].state_dict() if name == "loader" else places[0].state_after(units)
            yield list(batches), json.loads(json.dumps(token))


def chain(reader: Any, kind: str, runs: Any = RUNS, **options: Any) -> tuple[list[list[Any]], list[Any]]:
    """The samples of runs that continue one another, and the state at the end of each."""
    steps: list[list[Any]] = []
    states: list[Any] = [None]
    for world, batch, count in runs:
        made = list(islice(trained(reader, kind, states[-1], world, batch, **options), count))
        steps += [batches for batches, _ in made]
        states.append(made[-1][1])
    return steps, states[1:]


def check(replayed: Replay, steps: list[list[Any]], numbers: Any) -> None:
    for number in numbers:
        step = replayed.step(number)
        assert (step.step, step.world_size) == (number, len(steps[number]))
        for rank, (images, rows) in enumerate(steps[number]):
            listed = [sample for sample in step.samples if sample.rank == rank]
            assert [sample.row for sample in listed if not sample.view] == rows.tolist(), f"step {number}, rank {rank}"
            again, same = replayed.batch(number, rank=rank)
            assert torch.equal(same, rows)
            pairs = zip(again, images, strict=True) if isinstance(images, (tuple, list)) else [(again, images)]
            assert all(torch.equal(pixels, other) for pixels, other in pairs), f"pixels of step {number}, rank {rank}"


@pytest.mark.parametrize("kind", KINDS)
def test_every_replayed_step_equals_the_trained_one(reader: Any, kind: str) -> None:
    """On 4 ranks, then 2, then 3, with other batches; past steps, and those of the next run."""
    runs = RUNS if not kind.startswith("stateful stream") else ((3, 4, 5),)  # such a state does not allow other ranks
    steps, states = chain(reader, kind, runs)
    replayed = readers.replay(states[-1], reader)
    check(replayed, steps, range(len(steps)))
    assert replayed.done == len(steps) and not replayed.without_draws
    assert [replayed.step(n).is_past for n in range(len(steps) + 1)] == [True] * len(steps) + [False]
    if len(runs) > 1:
        coming = readers.replay(states[0], reader, world_size=2, batch_size=5)
        check(coming, steps, range(10))
        assert [coming.step(n).is_past for n in (5, 6)] == [True, False]
    drawn = [draw.text for sample in replayed.step(3).samples for draw in sample.draws]
    assert any("flipped left" in text for text in drawn) and sum("RandomRotation: degrees" in text for text in drawn)


def test_a_run_whose_ranks_are_killed(reader: Any, tmp_path: Path) -> None:
    """Processes end by SIGKILL in a step after their last state: the resumed run repeats these steps."""

    def run(rank: int, world: int, batch: int, state: Any, until: int) -> None:
        for number, (batches, token) in enumerate(trained(reader, "loader", state, 1, batch, ranks=Ranks(rank, world))):
            images, rows = batches[0]
            torch.save((images, rows), tmp_path / f"{'first' if state is None else 'then'}-{number}-{rank}")
            if number + 1 == until:
                (tmp_path / f"state-{world}.json").write_text(json.dumps(token))
            if number == until:
                os.kill(os.getpid(), signal.SIGKILL)

    state = None
    for world, batch, until in ((4, 3, 5), (2, 4, 7)):
        children = []
        for rank in range(world):
            if (child := os.fork()) == 0:
                try:
                    run(rank, world, batch, state, until)
                finally:
                    os._exit(1)
            children.append(child)
        ends = [os.waitpid(child, 0)[1] for child in children]
        assert all(os.WIFSIGNALED(end) and os.WTERMSIG(end) == signal.SIGKILL for end in ends)
        state = json.loads((tmp_path / f"state-{world}.json").read_text())
    names = [("first", n, 4) for n in range(5)] + [("then", n, 2) for n in range(7)]
    steps = [[torch.load(tmp_path / f"{which}-{n}-{rank}") for rank in range(world)] for which, n, world in names]
    check(readers.replay(tmp_path / "state-2.json", reader), steps, range(12))


@pytest.mark.parametrize(
    "options",
    [
        {"augment": Views(OPS, 2)},
        {"augment": [*OPS, Normalize(IMAGENET_MEAN, IMAGENET_STD), MixUp(0.8)]},
        {"augment": [RandomRotation(9), RandomRotation(9), RandomResizedCrop(12)], "decode": Decode(compose="exact")},
        {"ranks": Ranks(0, 1, "pad"), "decode": Decode(exact_colours=True)},
    ],
    ids=["views", "mixed", "exact", "padded"],
)
def test_options_of_a_loader_are_in_its_state(reader: Any, options: dict[str, Any]) -> None:
    steps, states = chain(reader, "loader", ((1, 8, 8),), **options)
    replayed = readers.replay(states[0], reader)
    check(replayed, steps, range(8))


ORDERS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "sequential": (lambda reader: Sequential(COUNT), True),
    "class-balanced": (lambda reader: ClassBalanced(reader.labels, seed=2), True),
    "node-local": (lambda reader: NodeLocal(COUNT, 2, 3, seed=4), True),
    "woven": (lambda reader: woven(reader, 5, block_bytes=2000, open=8), True),
    "block": (lambda reader: block_shuffled(reader, 5, block_bytes=4000, window=2), False),
    "weighted": (lambda reader: Weighted(np.arange(COUNT) + 1, seed=2), False),
    "mixed": (lambda reader: Mixed([20, 30], [0.5, 0.5], seed=2), False),
}


@pytest.mark.parametrize("name", ORDERS)
def test_orders(reader: Any, name: str) -> None:
    """Orders that follow from the set are rebuilt; others must be passed."""
    make, is_known = ORDERS[name]
    order = make(reader)
    steps, states = chain(reader, "loader", ((2, 4, 8), (1, 8, 9)), order=order)
    if not is_known:
        with pytest.raises(ResumeError, match=r"holds no more than a digest of the order .*give order="):
            readers.replay(states[1], reader)
    replayed = readers.replay(states[1], reader, order=None if is_known else order)
    check(replayed, steps, range(len(steps)))


def test_buckets_that_change_with_the_ranks(reader: Any) -> None:
    buckets, steps, state = np.arange(COUNT) % 3, list[Any](), None
    for world, batch, count in ((2, 4, 3), (1, 5, 6), (2, 3, 9)):
        order = Bucketed(buckets, batch, world, "drop_last", seed=3)
        made = list(islice(trained(reader, "loader", state, world, batch, order=order), count))
        steps, state = steps + [batches for batches, _ in made], made[-1][1]
    check(readers.replay(state, reader, order=order), steps, range(len(steps)))


# --- samples by step, and steps by number ----------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["loader", "sampler 0"])
@pytest.mark.parametrize("order", [Shuffled(COUNT, 3), Weighted(np.ones(COUNT), seed=3)], ids=["shuffled", "weighted"])
def test_who_lists_the_steps_of_a_sample(reader: Any, kind: str, order: Any) -> None:
    """The same as a search through all steps; a padded last batch has some samples twice."""
    options = {"ranks": Ranks(0, 1, "pad")} if kind == "loader" else {}
    _, states = chain(reader, kind, ((1, 8, 9), (1, 6, 5)), order=order, **options)
    replayed = readers.replay(states[-1], reader, order=order)
    expected: dict[str, list[Any]] = {key: [] for key in reader.keys}
    number = 0
    while (step := replayed.step(number)).epoch <= replayed.start.epoch:
        for sample in step.samples:
            expected[sample.key].append((number, step.epoch, step.number, sample.place, sample.position, step.is_past))
        number += 1
    for key, places in expected.items():
        appearances = replayed.who(key)
        assert [(a.step, a.epoch, a.number, a.place, a.position, a.is_past) for a in appearances] == places
    with pytest.raises(UnknownNameError, match="no sample has the key"):
        replayed.who("c9/99")
    assert {a.epoch for a in replayed.who("c0/00", range(5, 9))} <= {5, 6, 7, 8}


def test_epochs_that_are_left_early(reader: Any) -> None:
    """Our loader knows its steps; a DataLoader with workers has prefetched, so its steps have no numbers."""
    loader = ImageLoader(reader, 5, order=Shuffled(COUNT, 3), augment=OPS, fields=FIELDS, threads=1)
    steps = [[batch] for count in (3, 10, 4) for batch in islice(loader, count)]
    check(readers.replay(loader.state_dict(), reader), steps, range(17))
    loader.set_epoch(7)
    steps += [[batch] for batch in islice(loader, 2)]
    replayed = readers.replay(loader.state_dict(), reader)
    check(replayed, steps, range(19))
    assert (replayed.step(17).epoch, replayed.step(1, epoch=7).step) == (7, 18)
    with pytest.raises(UnknownNameError, match="epoch 0 has 3 steps, counted from 0; there is no step 3 in it"):
        replayed.step(3, epoch=0)
    dataset = ImageDataset(reader, OPS, fields=FIELDS)
    sampler = EpochSampler(Shuffled(COUNT, 3), dataset)
    ahead = DataLoader(dataset, 5, sampler=sampler, num_workers=2)
    seen = [batch[1].tolist() for count in (3, 10) for batch in islice(ahead, count)]
    replayed = readers.replay(sampler.state_after(50), reader)
    assert [[s.row for s in replayed.step(n, epoch=1).samples] for n in range(10)] == seen[3:]
    assert not replayed.step(0, epoch=0).is_certain and replayed.step(0, epoch=1).is_certain
    assert replayed.step(0, epoch=1).step is None and replayed.done is None
    with pytest.raises(UnknownNameError, match=r"no step 99.*name them by epoch="):
        replayed.step(99)


def test_replaying_a_loader(reader: Any) -> None:
    """Also with a custom transform, whose random numbers are in no state, and before its first step."""

    def invert(image: torch.Tensor) -> torch.Tensor:
        return 255 - image[:, :16, :16]

    dataset = ImageDataset(reader, invert, fields=FIELDS)
    sampler = EpochSampler(Shuffled(COUNT, 3), dataset)
    loader = DataLoader(dataset, 5, sampler=sampler)
    before = readers.replay(loader)
    steps = [[batch] for batch in loader]
    check(before, steps, range(10))
    check(readers.replay(sampler.state_after(20), loader), steps, range(10))
    replayed = readers.replay(sampler.state_after(20), reader)
    assert replayed.step(2).samples[0].draws == () and "a function, invert" in replayed.without_draws
    with pytest.raises(ValueError, match="as the transform is a function, invert: pass the loader"):
        replayed.batch(0)
    stream = ImageStream(dataset, EpochSampler(Shuffled(COUNT, 3), dataset), 4)
    for own in (ImageLoader(reader, 4, augment=OPS, fields=FIELDS), DataLoader(stream, None)):
        check(readers.replay(own), [[batch] for batch in own], range(12))
    with pytest.raises(ValueError, match="takes loaders, samplers and streams of readers, not list"):
        readers.replay([1, 2])


def test_states_of_older_versions(reader: Any, packed: Path) -> None:
    """They have no record: batch size and ranks must be passed, and impossible values are refused."""
    steps, states = chain(reader, "loader", ((2, 5, 7),))
    old = {name: value for name, value in states[0].items() if name not in ("run", "made")}
    assert ImageLoader(reader, 4, order=Shuffled(COUNT, 3)).load_state_dict(old) is None
    with pytest.raises(ResumeError, match=r"no record of its run.*give batch_size= and world_size="):
        readers.replay(old, reader)
    with pytest.raises(ResumeError, match="no step of 7 samples on each of 2 ranks ends at position 20 of epoch 1"):
        readers.replay(old, reader, batch_size=7, world_size=2)
    replayed = readers.replay(old, reader, batch_size=5, world_size=2)
    assert "of a version that does not name them" in replayed.without_draws
    rows = [[sample.row for sample in replayed.step(n, rank=1).samples] for n in range(7)]
    assert rows == [step[1][1].tolist() for step in steps]
    with readers.open(packed, "val") as other, pytest.raises(ResumeError, match="the resume token is of the data set"):
        readers.replay(states[0], other)


SEGMENT = {"step": 0, "epoch": 0, "cursor": 0, "batch_size": 1, "world_size": 1, "tail": "pad", "partial": None}
WRONG = {
    "step": -2,
    "batch_size": 0,
    "world_size": 1 << 40,
    "tail": 1,
    "partial": 3,
    "order": 3,
    "cursor": True,
    "x": 1,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("run", run) for run in (3, [3], [SEGMENT] * 200, [{"step": 0}])),
        *(("made", made) for made in (3, {"ops": [3]}, {"ops": [["x" * 99999]]})),
        *(("run", [SEGMENT | {key: value}]) for key, value in WRONG.items()),
    ],
)
def test_forged_records(reader: Any, name: str, value: Any) -> None:
    state = chain(reader, "loader", ((1, 5, 1),))[1][0]
    with pytest.raises(ResumeError, match=f"resume token: {name}|expected the spec"):
        readers.replay({**state, name: value}, reader)


def test_unknown_ops_in_a_state(reader: Any) -> None:
    state = chain(reader, "loader", ((1, 5, 1),))[1][0]
    for text in ("__import__('os').system('true')", "Blur(3)", "RandomRotation(", "3"):
        replayed = readers.replay({**state, "made": {"ops": [[text]]}}, reader)
        assert replayed.without_draws and replayed.step(0).samples[0].draws == ()


# --- checkpoints ----------------------------------------------------------------------------------------------------
class Settings:
    """An object in a checkpoint next to the state, of a class that torch does not load."""

    def __init__(self) -> None:
        self.rate = 0.1


class Hostile:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


def test_lightning(lightning: Any, reader: Any, tmp_path: Path) -> None:
    module = module_of(lightning)
    module.save_hyperparameters({"settings": Settings()})
    loader = ImageLoader(reader, 5, order=Shuffled(COUNT, 3), fields=("index", "image"), threads=1, augment=OPS)
    trainer_of(lightning, tmp_path, 13).fit(module, loader)
    replayed = readers.replay(tmp_path / "stopped.ckpt", reader)
    assert replayed.done == 13
    assert [[s.row for s in replayed.step(n).samples] for n in range(13)] == [rows for _, rows in module.seen]


def test_transformers_and_accelerate(accelerate: Any, reader: Any, tmp_path: Path) -> None:
    accelerator, loader = accelerate.Accelerator(cpu=True), ImageLoader(reader, 5, augment=OPS, fields=FIELDS)
    accelerator.register_for_checkpointing(loader)
    steps = [[batch] for batch in islice(loader, 4)]
    accelerator.save_state(tmp_path / "state")
    check(readers.replay(tmp_path / "state", reader), steps, range(4))
    pytest.importorskip("transformers")
    from transformers import TrainerState

    folder = tmp_path / "checkpoint-4"
    folder.mkdir()
    callbacks = {"packer loader": {"args": {}, "attributes": {"state": loader.state_dict()}}}
    TrainerState(global_step=4, stateful_callbacks=callbacks).save_to_json(str(folder / "trainer_state.json"))
    torch.save({"lr": Hostile()}, folder / "scheduler.pt")
    assert list(find_states(folder)) == ["trainer_state.json.stateful_callbacks.packer loader.attributes.state"]
    check(readers.replay(folder, reader), steps, range(4))


def test_files_with_several_states_without_one_and_with_code(
    reader: Any, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    state = chain(reader, "loader", ((1, 5, 3),))[1][0]
    other = {**state, "seed": 8}
    torch.save({"model": torch.ones(3), "settings": Settings(), "loaders": [state, other]}, "both.pt")
    assert list(find_states("both.pt")) == ["loaders.0", "loaders.1"]
    with pytest.raises(UnknownNameError, match=r"several states: choose one by state=.*loaders.0 .*seed 3.*seed 8"):
        readers.replay("both.pt", reader)
    assert readers.replay("both.pt", reader, state="loaders.1").seed == 8
    with pytest.raises(UnknownNameError, match=r"no state has 'train' in its name: there are loaders.0"):
        readers.replay("both.pt", reader, state="train")
    torch.save({"model": Hostile(), "state": state}, "hostile.pt")
    torch.save({"state": state}, "old.pt", _use_new_zipfile_serialization=False)
    Path("plain.pkl").write_bytes(pickle.dumps({"model": Hostile(), "state": state}))
    for name in ("hostile.pt", "plain.pkl"):
        with pytest.raises(ResumeError, match=rf"{name}: torch does not read .*weights_only=True.*write it as JSON"):
            readers.replay(name, reader)
    assert not Path("executed").exists()
    assert readers.replay("old.pt", reader).done == 3
    Path("cut.json").write_text(json.dumps(state)[:-9])
    with pytest.raises(ResumeError, match="is no JSON"):
        find_states("cut.json")
    torch.save({"model": torch.ones(3)}, "none.pt")
    with pytest.raises(UnknownNameError, match="has no state of a loader"):
        find_states("none.pt")


# --- the command ----------------------------------------------------------------------------------------------------
def test_the_command(reader: Any, packed: Path, tmp_path: Path, cli_run: Packer) -> None:
    steps, states = chain(reader, "loader", ((2, 5, 6),))
    path, page = tmp_path / "state.json", tmp_path / "step.html"
    path.write_text(json.dumps({"train": states[0], "val": None}))
    status, out, _ = cli_run("replay", path, packed, "--step", "5", "--rank", "1", "--html", page)
    assert status == 0 and out.startswith("step 5, step 0 of epoch 1, trained, 2 ranks of 5 samples\n  rank 1 [0]  c")
    assert out.count("RandomRotation: degrees") == 5 == page.read_text().count("<figure><img")
    pixels = readers.replay(path, reader).pictures(5, rank=1)[0][0]
    assert np.array_equal(pixels, steps[5][1][0].permute(0, 2, 3, 1).numpy())
    document = json.loads(cli_run("replay", path, packed, "--steps", "2:4", "--json")[1])
    assert [step["step"] for step in document["steps"]] == [2, 3] and document["states"] == ["train"]
    rows = [sample["row"] for sample in document["steps"][1]["samples"]]
    assert rows == [row for _, part in steps[3] for row in part.tolist()]
    key = reader.keys[rows[0]]
    assert "step 3, step 3 of epoch 0, rank 0 [0]: trained\n" in cli_run("replay", path, packed, "--who", key)[1]
    assert "from step 0 on, epoch 0: 2 ranks of 5 samples, order shuffled" in cli_run("replay", path, packed)[1]
    for arguments, message in (
        (("--epoch", "1", "--step", "9"), "epoch 1 has 5 steps, counted from 0; there is no step 9 in it"),
        (("--step", "0", "--rank", "2"), "there is no rank 2"),
        (("--split", "val"), "the checkpoint is of the set"),
        (("--who", "c9/9"), "no sample has the key 'c9/9'"),
        (("--html", page), "give --step or --steps"),
        (("--steps", "4:2"), "is not A:B"),
    ):
        status, out, err = cli_run("replay", path, packed, *arguments)
        assert status and message in out + err and "Traceback" not in err
