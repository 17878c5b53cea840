"""Training frameworks with our loaders and our integration classes: every (epoch, sample) once, also after stops and on
two ranks. Uses that a framework makes impossible are refused with the line to write instead, and that line works."""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_jpeg, tree_of
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from trainer_cases import EPOCHS, QUIET, Seen, module_of, on_ranks, reports, trainer_of

import packer
import readers
from cache.errors import ResumeError, TrainerError, UnknownNameError
from readers.augment import CenterCrop, RandomHorizontalFlip
from readers.loader import ImageLoader
from readers.order import Bucketed, Shuffled
from readers.torch import EpochBatchSampler, EpochSampler, ImageDataset, ImageStream

pytestmark = QUIET
COUNT, BATCH = 30, 4  # 7 full batches an epoch
ORDER = Shuffled(COUNT, 1)
BUCKETS = np.arange(COUNT) % 3
NAMES = {"pixel_values": "image", "labels": "index"}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 samples to train on, 7 to validate on."""
    root = tmp_path_factory.mktemp("trainers")
    files = {f"train/class{i % 3}/{i:02d}.jpg": make_jpeg(i, (8, 8)) for i in range(COUNT)}
    tree_of(root / "images", files | {f"val/class{i % 3}/{i}.jpg": make_jpeg(50 + i, (8, 8)) for i in range(7)})
    packer.convert(root / "images", to="tar", output=root / "set", run=packer.Run(workers=1))
    return root / "set"


def make(reader: Any, kind: str, batch: int = BATCH, order: Any = ORDER, **sampler: Any) -> Any:
    """kind: "loader"; or "plain", "stateful", "persistent", "stream" or "batches", and a number of workers."""
    if kind == "loader":
        return ImageLoader(reader, batch, order=order, fields=("index", "image"), threads=1)
    dataset = ImageDataset(reader, fields=("index", "image"))
    how, workers = kind.split()[:-1], int(kind.split()[-1])
    loader = StatefulDataLoader if "stateful" in how else DataLoader
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": "persistent" in how}
    if "batches" in how:
        return loader(dataset, batch_sampler=EpochBatchSampler(order, dataset, batch, **sampler), **options)
    indices = EpochSampler(order, dataset, **sampler)
    if "stream" in how:
        return loader(ImageStream(dataset, indices, batch), batch_size=None, **options)
    return loader(dataset, batch, sampler=indices, drop_last=True, **options)


def positions(epoch: int, first: int, last: int) -> list[int]:
    return list(ORDER.indices(epoch, np.arange(first, last)).tolist())


def check(seen: Seen, epochs: int = EPOCHS, ranks: int = 1, count: int | None = None) -> None:
    """All full batches of every epoch, in order where one rank has seen all of them; no sample lost or repeated."""
    assert {epoch for epoch, _ in seen} == set(range(epochs)), "the epochs of the framework differ from ours"
    for epoch in range(epochs):
        samples = [sample for number, batch in seen if number == epoch for sample in batch]
        if ranks > 1:
            assert sorted(samples) == sorted(positions(epoch, 0, COUNT // (BATCH * ranks) * BATCH * ranks)), epoch
        else:
            assert samples == positions(epoch, 0, count or len(samples)), f"epoch {epoch}"
            assert count or COUNT - BATCH < len(samples) <= COUNT, f"epoch {epoch}: a batch is missing"


def together(parts: list[Seen]) -> Seen:
    return [(epoch, batch) for part in parts for epoch, batch in part]


# --- Lightning ----------------------------------------------------------------------------------------------------
class Stopped(Exception):
    """Ends a training run as a crash would."""


@dataclass(frozen=True)
class Fit:
    """A run of a Trainer, which resumes the previous run.

    stop: save and end after this many steps. dies: save and crash after this many steps of this run, in the method
    `hook` of the module. after: save when fit has ended. refused: the expected error message; begun: the error comes
    after some steps. validates: with the "same" loader, or with its "own". estimates: the module asks for the number of
    steps. options: of the Trainer.
    """

    stop: int = 0
    dies: int | None = None
    hook: str = "training_step"
    after: bool = False
    refused: str = ""
    begun: bool = False
    validates: str = ""
    estimates: bool = False
    batch: int = BATCH
    options: dict[str, Any] = field(default_factory=dict)


def steps(count: int, **more: Any) -> Fit:
    return Fit(options={"max_steps": count, "max_epochs": -1}, **more)


def attempt(lightning: Any, reader: Any, folder: Path, kind: str, fit: Fit, checkpoint: Path | None) -> Seen:
    module, trainer = module_of(lightning), trainer_of(lightning, folder, fit.stop, **fit.options)
    loader, hook = make(reader, kind, fit.batch), getattr(module, fit.hook)
    own = ImageLoader(reader, 7, shuffle=False, fields=("index", "image"), threads=1)
    validation = {"own": own, "same": loader}.get(fit.validates)

    def hooked(*args: Any, **kwargs: Any) -> Any:
        if len(module.seen) == fit.dies:
            trainer.save_checkpoint(folder / "stopped.ckpt")
            raise Stopped
        return hook(*args, **kwargs)

    def run() -> None:
        trainer.fit(module, loader, validation, ckpt_path=checkpoint)

    if fit.estimates:
        optimizers = module.configure_optimizers
        module.configure_optimizers = lambda: (trainer.estimated_stepping_batches, optimizers())[1]

    if fit.dies is not None:
        setattr(module, fit.hook, hooked)
        with pytest.raises(Stopped):
            run()
    elif fit.refused:
        with pytest.raises((TrainerError, ResumeError), match=fit.refused):
            run()
        assert fit.begun or not module.seen
        return []
    else:
        run()
    if fit.after:
        trainer.save_checkpoint(folder / "stopped.ckpt")
    return list(module.seen)


def story(lightning: Any, reader: Any, folder: Path, kind: str, *fits: Fit) -> Seen:
    """The samples of runs that continue one another, without refused runs."""
    seen: Seen = []
    checkpoint = None
    for fit in fits:
        seen += attempt(lightning, reader, folder, kind, fit, checkpoint)
        if not fit.refused:
            saved = fit.stop or fit.dies is not None or fit.after
            checkpoint = folder / ("stopped.ckpt" if saved else "ended.ckpt")
    return seen


NO_STATE = r"resumes after batch 2 of epoch 1.*write  StatefulDataLoader\("
NO_END = r"Lightning begins epoch 2, .* at the end of an epoch.*write  StatefulDataLoader\(dataset"
COUNTED = r"Lightning has counted 2 .*another batch size or number of ranks|workers with batches of 4 samples"
IN_STEP = "saved this checkpoint inside the step of batch 2 of epoch 1"
LEFT_OUT = r"whole epochs would be left out; leave out persistent_workers=True"
SAME = r"ended this loop: .*training and validation, make two loaders"
TOO_EARLY = r"estimated_stepping_batches lets the workers .*pytorch-lightning#20550"
VALIDATES: dict[str, Any] = {"val_check_interval": 0.25, "num_sanity_val_steps": 1}
RELOADS, UNCHECKED = {"reload_dataloaders_every_n_epochs": 1}, {"num_sanity_val_steps": 0}
STORIES: list[tuple[str, list[Fit]]] = [
    ("loader, plain 0, stream 2, stateful 2", [Fit(options={"max_epochs": 2}), Fit()]),
    ("loader, stateful 2, stateful stream 2, stateful batches 2", [Fit(stop=9), Fit()]),
    ("plain 2, stream 2", [Fit(stop=9), Fit(refused=NO_STATE)]),
    ("batches 0", [Fit(stop=9), Fit(refused=r"StatefulDataLoader\(dataset, batch_sampler=sampler")]),
    ("loader, plain 2, stateful 2, stateful batches 0", [Fit(stop=14), Fit()]),
    ("stateful stream 2", [Fit(stop=14), Fit(refused=NO_END)]),
    ("loader, stateful 0", [Fit(stop=9), Fit(batch=8, refused=COUNTED),
                            Fit(batch=2, options={"max_epochs": 2}), Fit()]),
    ("stateful stream 2", [Fit(stop=9), Fit(batch=8, refused=COUNTED)]),
    ("loader, stateful stream 1", [Fit(dies=0), Fit()]),
    ("loader, stateful 2, stateful stream 2", [Fit(dies=9), Fit()]),
    ("loader, stateful 0, stateful stream 0", [Fit(dies=13), Fit()]),
    ("loader, stateful 0, stateful stream 0", [Fit(dies=9), Fit(batch=2, refused=IN_STEP)]),
    ("stateful 2, stateful stream 2", [Fit(dies=3), Fit(dies=0), Fit(dies=0), Fit(dies=1), Fit(dies=0), Fit()]),
    # Slurm's signal may come when the loader has handed out a batch that the trainer has not counted yet.
    ("loader", [Fit(dies=9, hook="transfer_batch_to_device"), Fit()]),
    ("loader, stateful 0, stateful 2, stateful stream 2", [Fit(stop=3), Fit(dies=0), Fit(stop=7), Fit(stop=9),
                                                           Fit(stop=14), Fit()]),
    ("plain 0, plain 2", [Fit(dies=7), Fit(stop=14), Fit()]),
    ("loader, stateful 0, stateful stream 2", [Fit(dies=3), Fit(stop=5), Fit(dies=0), Fit()]),
    ("loader, stateful 0", [Fit(stop=9, estimates=True), Fit(dies=2, estimates=True), Fit(dies=2, estimates=True),
                            Fit(stop=14, estimates=True), Fit(estimates=True)]),
    ("loader, stateful 0", [Fit(stop=14), Fit(estimates=True)]),
    ("plain 2, stateful 2, stream 2", [Fit(stop=14), Fit(estimates=True, refused=TOO_EARLY)]),
    ("plain 2, stateful 2, stateful stream 2, stateful batches 2", [Fit(stop=9),
                                                                    Fit(estimates=True, refused=TOO_EARLY)]),
    ("loader, stateful 0", [Fit(validates="own", options=VALIDATES | {"max_epochs": 1}),
                            Fit(validates="own", options=VALIDATES)]),
    ("loader, plain 0, stateful 2, stream 2", [Fit(validates="same")]),
    ("loader", [Fit(validates="same", options=UNCHECKED | {"val_check_interval": 2}, refused=SAME, begun=True)]),
    ("plain 0, stateful stream 2", [Fit(validates="same", options=UNCHECKED | {"val_check_interval": 2})]),
    ("persistent stream 1", [Fit(validates="same", refused=LEFT_OUT),
                             Fit(validates="same", options=UNCHECKED, refused=LEFT_OUT),
                             Fit(options=RELOADS, refused=LEFT_OUT), Fit()]),
]  # fmt: skip
CUT_SHORT: list[tuple[str, list[Fit]]] = [
    ("stateful 2, stateful stream 2", [steps(5), steps(6), steps(21)]),
    ("loader", [steps(5, after=True), steps(6, after=True), steps(21)]),
    ("loader, plain 2, stateful 0, stream 2", [steps(7), steps(21)]),
]


def of_each_kind(stories: list[tuple[str, list[Fit]]]) -> list[Any]:
    return [pytest.param(kind, fits, id=f"{i}-{kind}") for i, (kinds, fits) in enumerate(stories)
            for kind in kinds.split(", ")]  # fmt: skip


@pytest.mark.parametrize(("kind", "fits"), of_each_kind(STORIES))
def test_lightning_continues_or_refuses(
    lightning: Any, reader: Any, tmp_path: Path, kind: str, fits: list[Fit]
) -> None:
    """Ends of epochs, stops in the middle of one, crashes in a step, other batches, and validation in between."""
    seen = story(lightning, reader, tmp_path, kind, *fits)
    if not fits[-1].refused:
        check(seen)


@pytest.mark.parametrize(("kind", "fits"), of_each_kind(CUT_SHORT))
def test_epochs_that_max_steps_ends_or_cuts_short_are_complete(
    lightning: Any, reader: Any, tmp_path: Path, kind: str, fits: list[Fit]
) -> None:
    """Lightning counts such an epoch as finished, and trains the rest of it under the next number."""
    samples = [sample for _, batch in story(lightning, reader, tmp_path, kind, *fits) for sample in batch]
    assert len(samples) == 3 * 28
    numbers = [[positions(epoch, 0, 28) for epoch in range(9)].index(samples[at : at + 28]) for at in (0, 28, 56)]
    assert numbers[0] == 0 and numbers == sorted({*numbers}), "not complete epochs in our order"


def test_the_lost_state_of_a_stateful_loader(lightning: Any, reader: Any, tmp_path: Path) -> None:
    """At the end of fit Lightning shuts down the workers of a loader."""
    forgets = "loses its position at the end of fit; resume from a checkpoint that"
    story(lightning, reader, tmp_path, "stateful 0", steps(5, after=True), steps(21, refused=forgets))


@pytest.mark.parametrize(("kind", "stop"), [("loader", 3), ("loader", 5), ("stateful 0", 5)])
def test_epochs_that_lightning_limits(lightning: Any, reader: Any, tmp_path: Path, kind: str, stop: int) -> None:
    """limit_train_batches ends an epoch after 3 of 7 batches: resumed from its last batch, and from its middle."""
    options = {"limit_train_batches": 3}
    check(story(lightning, reader, tmp_path, kind, Fit(stop, options=options), Fit(9, options=options)), count=12)


@pytest.mark.parametrize("kind", ["loader", "stateful 0", "stateful 2"])
@pytest.mark.parametrize("dies", [3, 4, 5])
def test_epochs_that_lightning_limits_after_a_crash(
    lightning: Any, reader: Any, tmp_path: Path, kind: str, dies: int
) -> None:
    """Lightning counts one batch too few in the epoch after a crash."""
    fits = [Fit(dies=dies), Fit(stop=6), Fit()]
    limited = [replace(fit, options={"limit_train_batches": 3}) for fit in fits]
    check(story(lightning, reader, tmp_path, kind, *limited), count=12)


@pytest.mark.parametrize("kind", ["loader", "stateful 0", "stream 2"])
def test_loaders_that_are_recreated_each_epoch(lightning: Any, reader: Any, tmp_path: Path, kind: str) -> None:
    """reload_dataloaders_every_n_epochs makes two iterators an epoch; then the same loader in a new Trainer."""
    module, loader = module_of(lightning), make(reader, kind)
    module.train_dataloader = lambda: loader
    for _ in range(2):
        module.seen.clear()
        trainer_of(lightning, tmp_path, **RELOADS).fit(module)
        check(module.seen)


def test_lightning_repeats_no_sample_of_a_state(lightning: Any, reader: Any, tmp_path: Path) -> None:
    loader, state = make(reader, "loader"), EpochSampler(ORDER, reader).state_after(8)
    loader.load_state_dict({**state, "epoch": 2})
    with pytest.raises(TrainerError, match=r"Lightning begins epoch 0, .* epoch 2.*write|with  trainer.fit\("):
        trainer_of(lightning, tmp_path).fit(module_of(lightning), loader)


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
def test_workers_of_a_stream_resume_with_as_many_ranks(reader: Any, ranks: tuple[int, int]) -> None:
    """In the middle of an epoch; the progress of each worker does not carry over to other shares."""
    before, after = (make(reader, "stateful stream 2", rank=0, world_size=count) for count in ranks)
    batches = iter(before)
    next(batches)
    after.load_state_dict(before.state_dict())
    with pytest.raises(ResumeError, match=f"batches of 4 samples on {ranks[0]} ranks"):
        list(after)
    assert list(batches)
    after = make(reader, "stateful stream 2", rank=0, world_size=ranks[1])
    after.load_state_dict(before.state_dict())
    assert [batch[0].tolist() for batch in after], "from the end of an epoch, any number of ranks may continue"


def test_fabric_saves_and_restores_a_loader(lightning: Any, reader: Any, tmp_path: Path) -> None:
    fabric, loader, again = lightning.Fabric(accelerator="cpu"), make(reader, "loader"), make(reader, "loader")
    batches = iter(loader)
    seen = [(0, next(batches)[0].tolist()) for _ in range(2)]
    fabric.save(tmp_path / "saved", {"loader": loader})
    fabric.load(tmp_path / "saved", {"loader": again})
    check(seen + [(0, batch[0].tolist()) for batch in again], 1)
    with pytest.raises(TypeError, match="Only PyTorch DataLoader"):  # as documented
        fabric.setup_dataloaders(loader)


@pytest.mark.parametrize("kind", ["loader", "plain 0", "batches 2"])
def test_lightning_on_two_ranks(lightning: Any, reader: Any, tmp_path: Path, kind: str) -> None:
    """The ranks start after the loader was made. Lightning does not replace the sampler."""

    class Report(lightning.Callback):  # type: ignore[misc]
        def on_train_end(self, trainer: Any, module: Any) -> None:
            (tmp_path / f"ranks-{trainer.global_rank}.json").write_text(json.dumps(module.seen))

    seen: Seen = []
    for stop, checkpoint in ((9, None), (0, tmp_path / "stopped.ckpt")) if kind == "loader" else ((0, None),):
        options = {"devices": 2, "strategy": "ddp_fork", "use_distributed_sampler": kind != "batches 2"}
        trainer, module = trainer_of(lightning, tmp_path, stop, **options), module_of(lightning)
        trainer.callbacks.append(Report())
        if kind == "batches 2":  # made on each rank, which determines its number
            module.train_dataloader = lambda: make(reader, kind)
        trainer.fit(module, None if kind == "batches 2" else make(reader, kind), ckpt_path=checkpoint)
        parts = reports(tmp_path, "ranks")
        assert len(parts) == 2 and len(parts[0]) == len(parts[1]), "the ranks made different numbers of steps"
        seen += together(parts)
    check(seen, ranks=2)


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["loader", "stateful 0", "stateful 2"])
def test_lightning_stops_at_random(lightning: Any, reader: Any, tmp_path: Path, kind: str) -> None:
    """Each run resumes the previous one, from a checkpoint at any batch."""
    draw, stops = random.Random(1), 0
    for _ in range(6 if kind == "stateful 2" else 20):
        ends = [draw.randint(1, 9)]
        while ends[-1] < 7 * EPOCHS:
            ends.append(min(ends[-1] + draw.randint(1, 9), 7 * EPOCHS))
        check(story(lightning, reader, tmp_path, kind, *map(Fit, ends)))
        stops += len(ends)
    print(f"\n{stops} stops of Lightning over {kind}: 0 lost, 0 twice")


# --- our data module of Lightning ---------------------------------------------------------------------------------
def data_module(packed: Path, **options: Any) -> Any:
    from readers.frameworks.lightning import PackerDataModule

    usual = {"augment": [RandomHorizontalFlip()], "order": None, "seed": 1, "fields": ("index", "image"), "threads": 1}
    return PackerDataModule(packed, BATCH, **{**usual, **options})


@pytest.mark.parametrize("stop", [9, 14])
def test_a_data_module_resumes_in_mid_epoch(lightning: Any, packed: Path, tmp_path: Path, stop: int) -> None:
    options = {"stage": {"target": str(tmp_path / "node")}, "cache": {"capacity": "1MiB", "backend": "memfd"}}
    first, second = module_of(lightning), module_of(lightning)
    trainer_of(lightning, tmp_path, stop).fit(first, datamodule=data_module(packed))
    trainer = trainer_of(lightning, tmp_path)
    trainer.fit(second, datamodule=data_module(packed, **options), ckpt_path=tmp_path / "stopped.ckpt")
    check(first.seen + second.seen)


def test_a_data_module_on_two_ranks(lightning: Any, packed: Path, tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        from lightning.pytorch.plugins.environments import TorchElasticEnvironment

        module, data = module_of(lightning), data_module(packed)
        options = {"devices": 2, "strategy": "ddp", "max_epochs": 2, "plugins": [TorchElasticEnvironment()]}
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        trainer = lightning.Trainer(default_root_dir=tmp_path, enable_checkpointing=False, **quiet, **options)
        trainer.fit(module, datamodule=data)
        assert data.reader() is None, "not closed after training"
        data.setup("test")
        return module.seen, len(data.val_dataloader()), data.test_dataloader()

    parts = on_ranks(work, tmp_path)
    check(together([part[0] for part in parts]), 2, ranks=2)
    assert [part[1:] for part in parts] == [[1, []]] * 2


def test_a_data_module_uses_the_given_splits(lightning: Any, packed: Path) -> None:
    data = data_module(packed, train_split="val", val_split="train", eval_augment=[CenterCrop(4)])
    data.setup("fit")
    assert (len(data.reader("train")), len(data.reader("val"))) == (7, COUNT)
    assert next(iter(data.val_dataloader()))[1].shape == (BATCH, 3, 4, 4)
    data.teardown("fit")
    with pytest.raises(UnknownNameError, match="no split 'dev'"):
        data_module(packed, val_split="dev").setup("fit")


# --- accelerate ---------------------------------------------------------------------------------------------------
def trained(loader: Any, epochs: int = EPOCHS) -> Seen:
    return [(epoch, batch[0].tolist()) for epoch in range(epochs) for batch in loader]


SHARED: list[tuple[dict[str, bool], int]] = [
    ({}, 24),
    ({"split_batches": True}, 28),
    ({"dispatch_batches": True}, 24),
    ({"dispatch_batches": True, "split_batches": True}, 28),
    ({"even_batches": False}, 24),
    ({"use_stateful_dataloader": True}, 24),
]


def test_accelerate_on_two_processes(accelerate: Any, reader: Any, tmp_path: Path) -> None:
    """It does not touch our loader, and distributes a sampler of one rank; also resumed, by its skipped batches and by
    our state."""
    loader = make(reader, "loader")  # before the ranks are started

    def accelerator(**options: bool) -> Any:
        return accelerate.Accelerator(cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(**options))

    def work(rank: int) -> Any:
        ours = accelerator()
        assert ours.prepare(loader) is loader and (loader.rank, loader.world_size, len(loader)) == (rank, 2, 3)
        assert next(iter(loader))[1].device.type == ours.device.type
        loader.set_epoch(0)
        by_way = {"ours": trained(loader)}
        single: dict[str, Any] = {"rank": 0, "world_size": 1}
        for number, (options, _) in enumerate(SHARED):
            by_way[str(number)] = trained(accelerator(**options).prepare(make(reader, "plain 0", **single)), 2)
        prepared = ours.prepare(make(reader, "plain 0", **single))
        prepared.set_epoch(1)
        by_way["skipped"] = [(1, batch[0].tolist()) for batch in ours.skip_first_batches(prepared, 2)]
        again = make(reader, "plain 2", **single)
        again.sampler.load_state_dict(EpochSampler(ORDER, reader, **single).state_after(16) | {"epoch": 1})
        prepared = ours.prepare(again)
        with pytest.raises(TrainerError, match=r"accelerate begins epoch 0, .*with  loader.set_epoch\(1\)"):
            next(iter(prepared))
        prepared.set_epoch(1)
        by_way["resumed"] = [(1, batch[0].tolist()) for batch in prepared]
        short = ImageDataset(reader.select(indices=range(29)), fields=("index", "image"))
        stream = ImageStream(short, EpochSampler(Shuffled(29, 1), short, **single), 4, drop_last=True)
        by_way["stream"] = trained(ours.prepare(DataLoader(stream, batch_size=None)), 2)
        return by_way

    parts = on_ranks(work, tmp_path)
    by_way = {name: together([part[name] for part in parts]) for name in parts[0]}
    check(by_way["ours"], ranks=2)
    for number, (_, whole) in enumerate(SHARED):
        for epoch in range(2):
            samples = [sample for e, batch in by_way[str(number)] if e == epoch for sample in batch]
            assert sorted(samples) == sorted(positions(epoch, 0, whole)), SHARED[number]
    for name in ("skipped", "resumed"):
        assert sorted(sample for _, batch in by_way[name] for sample in batch) == sorted(positions(1, 16, 24)), name
    for epoch in range(2):
        samples = [sample for e, batch in by_way["stream"] if e == epoch for sample in batch]
        assert len(samples) == len({*samples}) == 28


def test_loaders_whose_samples_accelerate_would_repeat_are_refused_on_all_processes(
    accelerate: Any, reader: Any, tmp_path: Path
) -> None:
    """Where one process loads for all, an error on that process alone would leave the others waiting."""

    def work(rank: int) -> bool:
        for dispatch in (None, True):
            options = accelerate.DataLoaderConfiguration(dispatch_batches=dispatch)
            accelerator = accelerate.Accelerator(cpu=True, dataloader_config=options)
            for kind in ("plain 0", "plain 2", "stream 0"):
                with pytest.raises(
                    TrainerError, match=r"distributes the batches .* 2 processes.*rank=0, world_size=1\)"
                ):
                    next(iter(accelerator.prepare(make(reader, kind))))
        accelerator = accelerate.Accelerator(cpu=True)
        for count in (COUNT, 29):
            dataset = ImageDataset(reader.select(indices=range(count)), fields=("index", "image"))
            sampler = EpochSampler(Shuffled(count, 1), dataset, rank=0, world_size=1)
            prepared = accelerator.prepare(
                DataLoader(ImageStream(dataset, sampler, 3, drop_last=False), batch_size=None)
            )
            assert count < COUNT or len(prepared) == 5
        with pytest.raises(TrainerError, match=r"repeat 1 samples .* last 5 .*ImageStream\(.*, 4, drop_last=True\)"):
            next(iter(prepared))
        accelerator.wait_for_everyone()
        return True

    assert on_ranks(work, tmp_path) == [True, True]


def test_accelerate_distributes_the_batches_of_all_ranks(accelerate: Any, reader: Any, tmp_path: Path) -> None:
    """Each step uses one bucket on all processes, also resumed in mid-epoch."""
    order = Bucketed(BUCKETS, 3, 2, "pad", seed=3)

    def work(rank: int) -> Any:
        accelerator = accelerate.Accelerator(cpu=True)
        with pytest.raises(TrainerError, match=r"2 processes.*EpochBatchSampler\(order, dataset, all_ranks=True\)"):
            next(iter(accelerator.prepare(make(reader, "batches 0", 3, order))))
        prepared = accelerator.prepare(make(reader, "batches 2", 3, order, all_ranks=True))
        seen = [[batch[0].tolist() for batch in prepared] for _ in range(2)]
        assert len(seen[0]) == len(prepared)
        with pytest.raises(TrainerError, match="batches of 2 ranks in turn, but accelerate distributes them among 1"):
            next(iter(make(reader, "batches 0", 3, order, all_ranks=True)))
        again = make(reader, "batches 0", 3, order, all_ranks=True)
        again.batch_sampler.load_state_dict({**again.batch_sampler.state_after(4), "epoch": 1})
        prepared = accelerator.prepare(again)
        prepared.set_epoch(1)
        return seen, [batch[0].tolist() for batch in prepared]

    parts = on_ranks(work, tmp_path)
    for epoch in range(2):
        batches = list(zip(*(part[0][epoch] for part in parts), strict=True))
        assert all(len({*BUCKETS[[*a, *other]].tolist()}) == 1 and len(a) == len(other) for a, other in batches)
        assert {sample for step in batches for batch in step for sample in batch} == {*range(COUNT)}
    assert all(part[1] == part[0][1][4:] for part in parts)


def test_accelerate_on_one_process(accelerate: Any, reader: Any, tmp_path: Path) -> None:
    """Also a stateful loader, whose state accelerate requests before the first loop, which begins an epoch."""
    accelerator = accelerate.Accelerator(cpu=True)
    for kind in ("plain 2", "stream 2"):
        check(trained(accelerator.prepare(make(reader, kind))))
    options = accelerate.DataLoaderConfiguration(use_stateful_dataloader=True)
    for kind in ("plain 2", "stream 2"):
        prepared = accelerate.Accelerator(cpu=True, dataloader_config=options).prepare(make(reader, kind))
        prepared.set_epoch(2)
        for epoch in (2, 3):
            assert [sample for batch in prepared for sample in batch[0].tolist()] == positions(epoch, 0, 28)
    loader = make(reader, "loader")
    accelerator.register_for_checkpointing(loader)
    batches = iter(loader)
    seen = [(0, next(batches)[0].tolist()) for _ in range(3)]
    accelerator.save_state(tmp_path / "state")
    accelerator.load_state(tmp_path / "state")
    check(seen + trained(loader))
    with pytest.raises(TrainerError, match=r"skip_first_batches .* not of this loader.*loader\.load_state_dict\("):
        accelerator.skip_first_batches(loader, 2)


def test_accelerate_resumes_repeatedly(accelerate: Any, reader: Any, tmp_path: Path) -> None:
    """In mid-epoch, without a step in between, and at the end of an epoch."""
    seen: Seen = []
    for number, stop in enumerate((3, 3, 7, 16, 21)):
        accelerator, loader = accelerate.Accelerator(cpu=True), make(reader, "loader")
        accelerator.register_for_checkpointing(loader)
        if number:
            accelerator.load_state(tmp_path / str(number - 1))
        while len(seen) < stop:
            seen += [(loader.epoch, batch[0].tolist()) for batch in islice(loader, stop - len(seen))]
        accelerator.save_state(tmp_path / str(number))
    check(seen)


def test_accelerate_does_not_change_the_environment_while_threads_decode(
    accelerate: Any, reader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libjpeg reads the environment for every image, and glibc before 2.41 crashes if a variable is added meanwhile."""
    from accelerate.utils import is_cuda_available

    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "")
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK")
    names = []
    for _ in make(reader, "loader"):
        is_cuda_available()  # as in save_state
        names.append(sorted(os.environ))
    assert names[-1] == names[0] and "PYTORCH_NVML_BASED_CUDA_CHECK" in names[0]


# --- transformers -------------------------------------------------------------------------------------------------
@pytest.fixture
def transformers(accelerate: Any) -> Any:
    module = pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers import Trainer  # noqa: F401  # loaded once, before ranks are forked

    module.logging.set_verbosity_error()
    return module


def train(
    reader: Any, folder: Path, stop: int = 0, start: int = 0, *, resume: bool = False, ours: bool = True,
    given: Any = None, **options: Any
) -> tuple[Seen, list[float]]:  # fmt: skip
    """The samples and losses of a Trainer from the checkpoint of step `start` to step `stop`.

    resume: from the last checkpoint. ours: LoaderTrainer, otherwise a Trainer with `EpochSampler`, which loads trained
    samples again. given: other arguments of the Trainer; options: TrainingArguments.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from readers.frameworks.transformers import LoaderTrainer

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            torch.nn.init.ones_(self.layer.weight)
            torch.nn.init.zeros_(self.layer.bias)

        def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            loss = self.layer(pixel_values.float().mean().view(1, 1) / 255).sum()
            if not self.training:
                return {"loss": loss, "logits": labels}
            seen.append((epoch[0], labels.tolist()))
            losses.append(loss.item())
            return {"loss": loss}

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            epoch[0] = state.global_step // -(-len(loader) // args.gradient_accumulation_steps)

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            control.should_save = control.should_training_stop = state.global_step == stop

    class SamplerTrainer(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return EpochSampler(ORDER, self.train_dataset, rank=0, world_size=1)

    seen: Seen = []
    losses: list[float] = []
    epoch = [0]
    quiet = {"disable_tqdm": True, "report_to": "none", "save_strategy": "no", "logging_strategy": "no"}
    batch = options.pop("batch", BATCH)
    if not ours:
        options |= {"per_device_train_batch_size": batch, "dataloader_drop_last": True}
    arguments = TrainingArguments(str(folder), num_train_epochs=EPOCHS, use_cpu=True, **quiet, **options)
    loader = ImageLoader(reader, batch, order=ORDER, fields=NAMES, threads=1, augment=[RandomHorizontalFlip()])
    data = {"train_loader": loader} if ours else {"train_dataset": ImageDataset(reader, fields=NAMES)}
    kind = LoaderTrainer if ours else SamplerTrainer
    trainer = kind(Model(), arguments, callbacks=[Stop()], **data, **(given or {}))
    trainer.train(resume_from_checkpoint=resume or (str(folder / f"checkpoint-{start}") if start else None))
    return seen, losses


@pytest.mark.parametrize(("ours", "stop", "restore"), [(True, 9, False), (True, 14, True), (False, 9, False)])
def test_the_trainer_resumes(
    transformers: Any, reader: Any, tmp_path: Path, ours: bool, stop: int, restore: bool
) -> None:
    options = {"restore_callback_states_from_checkpoint": restore, "learning_rate": 0.01, "ours": ours}
    whole, losses = train(reader, tmp_path, **options)
    check(whole)
    first, before = train(reader, tmp_path, stop, **options)
    second, after = train(reader, tmp_path, start=stop, **options)
    assert first + second == whole and before + after == losses


def test_the_trainer_resumes_repeatedly(transformers: Any, reader: Any, tmp_path: Path) -> None:
    seen: Seen = []
    for stop in (3, 7, 9, 14, 21):
        seen += train(reader, tmp_path, stop, len(seen))[0]
    check(seen)


def test_the_trainer_on_two_ranks(transformers: Any, reader: Any, packed: Path, tmp_path: Path) -> None:
    """LoaderTrainer continues with fewer ranks and larger batches. In between it validates: each sample counts once."""
    with readers.open(packed, "val") as validation:

        def two(rank: int) -> Any:
            counted: list[list[int]] = []
            options = {"eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 1, "label_names": ["labels"]}
            arguments = {
                "eval_dataset": ImageDataset(validation, fields=NAMES),
                "compute_metrics": lambda evaluation: counted.append(sorted(evaluation.label_ids.tolist())) or {},
            }
            evaluated = train(reader, tmp_path / "evaluated", given=arguments, **options)[0]
            by_sampler = train(reader, tmp_path / "sampler", ours=False)[0]
            return evaluated, by_sampler, train(reader, tmp_path, 5)[0], counted

        parts = on_ranks(two, tmp_path)
    rest, _ = train(reader, tmp_path, start=5, batch=2 * BATCH)
    for number, more in ((0, []), (1, []), (2, rest)):
        check(together([part[number] for part in parts]) + more, ranks=2)
    assert all(len(part[3]) > 3 and all(evaluation == list(range(7)) for evaluation in part[3]) for part in parts)


@pytest.mark.parametrize("other", [{"batch": 2}, {"gradient_accumulation_steps": 2}])
def test_a_trainer_that_would_lose_its_place_is_refused(
    transformers: Any, reader: Any, tmp_path: Path, other: dict[str, int]
) -> None:
    train(reader, tmp_path, 9)
    with pytest.raises(TrainerError, match=r"the batch size, the number of ranks .*; keep the samples of an update"):
        train(reader, tmp_path, start=9, **other)


def test_a_checkpoint_without_our_state_is_refused_in_mid_epoch(transformers: Any, reader: Any, tmp_path: Path) -> None:
    for stop, ok in ((9, False), (14, True)):
        train(reader, tmp_path, stop)
        path = tmp_path / f"checkpoint-{stop}/trainer_state.json"
        state = json.loads(path.read_text())
        del state["stateful_callbacks"]["packer loader"]
        path.write_text(json.dumps(state))
        if ok:
            assert {epoch for epoch, _ in train(reader, tmp_path, start=stop)[0]} == {2}
        else:
            with pytest.raises(TrainerError, match="has no state of a loader"):
                train(reader, tmp_path, start=stop)


def test_an_incomplete_checkpoint_is_skipped(transformers: Any, reader: Any, tmp_path: Path) -> None:
    """A run that was killed while saving: the Trainer alone would start over with the weights of step 14."""
    from readers.frameworks.transformers import last_checkpoint

    assert last_checkpoint(tmp_path / "none") is None
    before, _ = train(reader, tmp_path, 9)
    train(reader, tmp_path, 14, 9)
    state = tmp_path / "checkpoint-14/trainer_state.json"
    state.write_text(state.read_text()[:100])
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-9")
    with pytest.raises(TrainerError, match=r"checkpoint-14 is not a complete checkpoint"):
        train(reader, tmp_path, start=14)
    state.unlink()
    check(before + train(reader, tmp_path, start=9, resume=True)[0])


@pytest.mark.faults
def test_the_trainer_stops_at_random(transformers: Any, reader: Any, tmp_path: Path) -> None:
    draw, stops = random.Random(1), 0
    whole, losses = train(reader, tmp_path, learning_rate=0.01)
    for _ in range(40):
        seen: Seen = []
        all_losses: list[float] = []
        while len(seen) < len(whole):
            stop = min(len(seen) + draw.randint(1, 9), len(whole))
            more, values = train(reader, tmp_path, stop, len(seen), learning_rate=0.01)
            seen, all_losses, stops = seen + more, all_losses + values, stops + 1
        assert (seen, all_losses) == (whole, losses)
    print(f"\n{stops} stops of the Trainer: 0 lost, 0 twice, the losses of an undisturbed run")


# --- torch.distributed.checkpoint ---------------------------------------------------------------------------------
def test_a_distributed_checkpoint_holds_the_loader(reader: Any, tmp_path: Path) -> None:
    """Saved by two ranks, loaded by one."""
    import torch.distributed.checkpoint as dcp

    def two(rank: int) -> Any:
        torch.distributed.init_process_group("gloo")
        loader = make(reader, "loader")
        batches = iter(loader)
        seen = [(0, next(batches)[0].tolist()) for _ in range(2)]
        dcp.save({"loader": loader}, checkpoint_id=tmp_path / "saved")
        return seen

    parts = on_ranks(two, tmp_path)
    loader = make(reader, "loader")
    dcp.load({"loader": loader}, checkpoint_id=tmp_path / "saved")
    seen = [sample for _, batch in [*together(parts), *trained(loader, 1)] for sample in batch]
    assert sorted(seen) == sorted(positions(0, 0, 28))
