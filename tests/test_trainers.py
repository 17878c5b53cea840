"""Training frameworks themselves, over our loaders: every (epoch, sample) once, also after a stop, also on two ranks.

What a framework makes impossible is refused with the line to write, and that line works.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_jpeg, tree_of
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from trainer_cases import QUIET, Seen, module_of, on_ranks, reports, trainer_of

import packer
import readers
from cache.errors import ResumeError, TrainerError
from readers.loader import ImageLoader
from readers.order import Shuffled
from readers.torch import EpochSampler, ImageDataset, ImageStream

pytestmark = QUIET
COUNT, BATCH, EPOCHS = 30, 4, 3
ORDER = Shuffled(COUNT, 1)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[readers.Reader]:
    root = tmp_path_factory.mktemp("trainers")
    tree_of(root / "images", {f"class{i % 3}/{i:02d}.jpg": make_jpeg(i, (8, 8)) for i in range(COUNT)})
    packer.convert(root / "images", to="tar", output=root / "set")
    with readers.open(root / "set") as opened:
        yield opened


def make(reader: Any, kind: str, batch: int = BATCH, **sampler: Any) -> Any:
    """ "loader", or "plain", "stateful", "stream" or "stateful stream" and a number of workers."""
    if kind == "loader":
        return ImageLoader(reader, batch, order=ORDER, fields=("index", "image"), threads=1)
    dataset = ImageDataset(reader, fields=("index", "image"))
    *how, workers = kind.split()
    loader = StatefulDataLoader if how[0] == "stateful" else DataLoader
    indices = EpochSampler(ORDER, dataset, **sampler)
    if how[-1] == "stream":
        return loader(ImageStream(dataset, indices, batch), batch_size=None, num_workers=int(workers))
    return loader(dataset, batch, sampler=indices, num_workers=int(workers), drop_last=True)


def check_whole(samples: list[int]) -> None:
    """Three whole epochs, whatever their numbers."""
    assert len(samples) == 28 * 3
    assert [len({*samples[at : at + 28]}) for at in (0, 28, 56)] == [28] * 3, "a sample comes twice in an epoch"


def check(seen: Seen, epochs: int, ranks: int = 1, whole: bool = False) -> None:
    """All whole batches of every epoch, in its order where one rank has seen all of them; none lost, none twice."""
    assert {epoch for epoch, _ in seen} == set(range(epochs)), "the framework's epochs are ours"
    for epoch in range(epochs):
        samples = [sample for number, batch in seen if number == epoch for sample in batch]
        count = COUNT if whole else COUNT // (BATCH * ranks) * BATCH * ranks
        wanted = ORDER.indices(epoch, np.arange(count)).tolist()
        lost, twice = set(wanted) - set(samples), len(samples) - len(set(samples))
        assert not lost and not twice and len(samples) == count, f"epoch {epoch}: lost {lost}, {twice} twice"
        assert ranks > 1 or samples == wanted, f"epoch {epoch}: another order"


# --- Lightning ----------------------------------------------------------------------------------------------------
KINDS = ["loader", "plain 0", "plain 2", "stateful 2", "stream 2", "stateful stream 2"]


@pytest.mark.parametrize("kind", KINDS)
def test_lightning_trains_whole_epochs(lightning: Any, reader: Any, tmp_path: Path, kind: str) -> None:
    module = module_of(lightning)
    trainer_of(lightning, tmp_path, max_epochs=2).fit(module, make(reader, kind))
    resumed = module_of(lightning)
    trainer_of(lightning, tmp_path).fit(resumed, make(reader, kind), ckpt_path=tmp_path / "ended.ckpt")
    check(module.seen + resumed.seen, EPOCHS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [9, 14])
def test_lightning_resumes_in_mid_epoch(lightning: Any, reader: Any, tmp_path: Path, kind: str, stop: int) -> None:
    """After 2 of 7 batches of epoch 1, and after its last one."""
    module = module_of(lightning)
    trainer_of(lightning, tmp_path, stop).fit(module, make(reader, kind))
    resumed, trainer = module_of(lightning), trainer_of(lightning, tmp_path)
    if stop == 9 and kind in ("plain 0", "plain 2", "stream 2"):
        with pytest.raises(TrainerError, match=r"resumes after batch 2 of epoch 1.*write  StatefulDataLoader\("):
            trainer.fit(resumed, make(reader, kind), ckpt_path=tmp_path / "stopped.ckpt")
        return
    if stop == 14 and kind == "stateful stream 2":
        with pytest.raises(
            TrainerError, match=r"Lightning begins epoch 2, .* at the end of one.*write  StatefulDataLoader\(dataset"
        ):
            trainer.fit(resumed, make(reader, kind), ckpt_path=tmp_path / "stopped.ckpt")
        return
    trainer.fit(resumed, make(reader, kind), ckpt_path=tmp_path / "stopped.ckpt")
    check(module.seen + resumed.seen, EPOCHS)


@pytest.mark.parametrize("kind", ["loader", "stateful 2"])
def test_lightning_validates_in_between(lightning: Any, reader: Any, tmp_path: Path, kind: str) -> None:
    """With a sanity check, several validations an epoch, and a checkpoint that is saved by the last of them."""
    module, resumed = module_of(lightning), module_of(lightning)
    options: dict[str, Any] = {"val_check_interval": 0.25, "num_sanity_val_steps": 1}
    validation = ImageLoader(reader, 7, shuffle=False, fields=("index", "image"), threads=1)
    trainer_of(lightning, tmp_path, max_epochs=1, **options).fit(module, make(reader, kind), validation)
    trainer = trainer_of(lightning, tmp_path, **options)
    trainer.fit(resumed, make(reader, kind), validation, ckpt_path=tmp_path / "ended.ckpt")
    check(module.seen + resumed.seen, EPOCHS)


@pytest.mark.parametrize("kind", ["loader", "stateful 0"])
def test_lightning_with_other_batches_in_mid_epoch_is_refused(
    lightning: Any, reader: Any, tmp_path: Path, kind: str
) -> None:
    trainer_of(lightning, tmp_path, 9).fit(module_of(lightning), make(reader, kind))
    with pytest.raises(TrainerError, match=r"Lightning has counted 2 .*another batch size or number of ranks"):
        trainer_of(lightning, tmp_path).fit(
            module_of(lightning), make(reader, kind, 8), ckpt_path=tmp_path / "stopped.ckpt"
        )
    smaller = module_of(lightning)
    trainer_of(lightning, tmp_path, max_epochs=2).fit(
        smaller, make(reader, kind, 2), ckpt_path=tmp_path / "stopped.ckpt"
    )
    assert [i for _, batch in smaller.seen for i in batch] == ORDER.indices(1, np.arange(8, COUNT)).tolist()
    resumed = module_of(lightning)
    trainer = trainer_of(lightning, tmp_path, max_epochs=2)
    trainer.fit(resumed, make(reader, kind, 2), ckpt_path=tmp_path / "ended.ckpt")
    assert len(resumed.seen) in (0, 15), "the end of an epoch is fine with any batches"


def test_lightning_repeats_no_sample_of_a_state(lightning: Any, reader: Any, tmp_path: Path) -> None:
    loader, state = make(reader, "loader"), EpochSampler(ORDER, reader).state_after(8)
    loader.load_state_dict({**state, "epoch": 2})
    with pytest.raises(TrainerError, match=r"Lightning begins epoch 0, .* epoch 2.*write|with  trainer.fit\("):
        trainer_of(lightning, tmp_path).fit(module_of(lightning), loader)


@pytest.mark.parametrize("kind", ["loader", "stateful 0"])
@pytest.mark.parametrize("stop", [3, 5])
def test_lightning_resumes_in_epochs_that_it_limits(
    lightning: Any, reader: Any, tmp_path: Path, kind: str, stop: int
) -> None:
    """From the last batch of an epoch that limit_train_batches ends after 3 of 7, and from the middle of one."""
    seen: Seen = []
    for end, checkpoint in ((stop, None), (9, tmp_path / "stopped.ckpt")):
        module, trainer = module_of(lightning), trainer_of(lightning, tmp_path, end, limit_train_batches=3)
        trainer.fit(module, make(reader, kind), ckpt_path=checkpoint)
        seen += module.seen
    wanted = [
        (epoch, ORDER.indices(epoch, np.arange(4 * i, 4 * i + 4)).tolist()) for epoch in range(3) for i in range(3)
    ]
    assert seen == wanted


IN_STEP = ["loader", "stateful 0", "stateful 2", "stateful stream 0", "stateful stream 1", "stateful stream 2"]


class Stopped(Exception):
    """A training that dies inside a step."""


def stopped_in_step(
    lightning: Any, reader: Any, folder: Path, kind: str, step: int, batch: int = BATCH, checkpoint: Any = None
) -> Seen:
    """What was trained on by a run that saved a checkpoint inside step number `step`, as OnExceptionCheckpoint does."""
    module, trainer = module_of(lightning), trainer_of(lightning, folder)
    train = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        if len(module.seen) == step:
            trainer.save_checkpoint(folder / "stopped.ckpt")
            raise Stopped
        return train(batch, batch_idx)

    module.training_step = training_step
    with pytest.raises(Stopped):
        trainer.fit(module, make(reader, kind, batch), ckpt_path=checkpoint)
    return list(module.seen)


@pytest.mark.parametrize("kind", IN_STEP)
@pytest.mark.parametrize("step", [0, 9, 13])
def test_the_batch_under_way_is_trained_on_again(
    lightning: Any, reader: Any, tmp_path: Path, kind: str, step: int
) -> None:
    """Of checkpoints saved inside a step: the first one, the middle of an epoch, and its last batch."""
    seen = stopped_in_step(lightning, reader, tmp_path, kind, step)
    resumed, trainer = module_of(lightning), trainer_of(lightning, tmp_path)
    trainer.fit(resumed, make(reader, kind), ckpt_path=tmp_path / "stopped.ckpt")
    check(seen + resumed.seen, EPOCHS)


@pytest.mark.parametrize("kind", [kind for kind in IN_STEP if "2" in kind])
def test_a_batch_that_is_stopped_again_and_again(lightning: Any, reader: Any, tmp_path: Path, kind: str) -> None:
    """In the first step of a resumed run: its workers have made no other batch by then."""
    seen = stopped_in_step(lightning, reader, tmp_path, kind, 3)
    for step in (0, 0, 1, 0):
        seen += stopped_in_step(lightning, reader, tmp_path, kind, step, checkpoint=tmp_path / "stopped.ckpt")
    resumed, trainer = module_of(lightning), trainer_of(lightning, tmp_path)
    trainer.fit(resumed, make(reader, kind), ckpt_path=tmp_path / "stopped.ckpt")
    check(seen + resumed.seen, EPOCHS)


@pytest.mark.parametrize("kind", ["loader", "stateful 0", "stateful stream 0"])
def test_a_batch_under_way_of_another_size_is_refused(lightning: Any, reader: Any, tmp_path: Path, kind: str) -> None:
    stopped_in_step(lightning, reader, tmp_path, kind, 9)
    with pytest.raises(TrainerError, match=r"saved this checkpoint inside the step of batch 2 of epoch 1"):
        trainer_of(lightning, tmp_path).fit(
            module_of(lightning), make(reader, kind, 2), ckpt_path=tmp_path / "stopped.ckpt"
        )


def test_a_checkpoint_before_lightning_sees_a_batch_holds_it(lightning: Any, reader: Any, tmp_path: Path) -> None:
    """Slurm's signal may come when the loader has handed out a batch and the trainer has yet to count it."""
    module, trainer = module_of(lightning), trainer_of(lightning, tmp_path)
    transfer = module.transfer_batch_to_device

    def transfer_batch_to_device(*given: Any) -> Any:
        if len(module.seen) == 9:
            trainer.save_checkpoint(tmp_path / "stopped.ckpt")
            raise Stopped
        return transfer(*given)

    module.transfer_batch_to_device = transfer_batch_to_device
    with pytest.raises(Stopped):
        trainer.fit(module, make(reader, "loader"))
    resumed = module_of(lightning)
    trainer_of(lightning, tmp_path).fit(resumed, make(reader, "loader"), ckpt_path=tmp_path / "stopped.ckpt")
    check(module.seen + resumed.seen, EPOCHS)


@pytest.mark.parametrize("kind", KINDS)
def test_one_loader_to_train_and_to_validate_loses_nothing(
    lightning: Any, reader: Any, tmp_path: Path, kind: str
) -> None:
    """Within an epoch two loops over one ImageLoader are an error; between epochs it may validate."""
    loader, module = make(reader, kind), module_of(lightning)
    trainer_of(lightning, tmp_path).fit(module, loader, loader)
    check(module.seen, EPOCHS)
    module, options = module_of(lightning), {"val_check_interval": 2, "num_sanity_val_steps": 0}
    loader = make(reader, kind)
    trainer = trainer_of(lightning, tmp_path, **options)
    if kind == "loader":
        with pytest.raises(TrainerError, match=r"ended this loop: .*training and validation, make two loaders"):
            trainer.fit(module, loader, loader)
    else:
        trainer.fit(module, loader, loader)
        check(module.seen, EPOCHS)


@pytest.mark.parametrize("kind", KINDS)
def test_loaders_that_are_made_again_each_epoch(lightning: Any, reader: Any, tmp_path: Path, kind: str) -> None:
    """reload_dataloaders_every_n_epochs, which makes two iterators an epoch; then the same loader in a new Trainer."""
    module = module_of(lightning)
    loader = make(reader, kind)
    module.train_dataloader = lambda: loader
    for _ in range(2):
        module.seen.clear()
        trainer_of(lightning, tmp_path, reload_dataloaders_every_n_epochs=1).fit(module)
        check(module.seen, EPOCHS)


@pytest.mark.parametrize("kind", ["loader", "stateful 0", "stateful 2", "stateful stream 2"])
@pytest.mark.parametrize("steps", [(5, 21), (5, 6, 21)])
def test_epochs_that_max_steps_cuts_short_are_continued(
    lightning: Any, reader: Any, tmp_path: Path, kind: str, steps: tuple[int, ...]
) -> None:
    """Lightning counts such an epoch as done, and trains its rest under the next number."""
    samples: list[int] = []
    checkpoint = None
    for stop in steps:
        module = module_of(lightning)
        trainer = trainer_of(lightning, tmp_path, max_steps=stop, max_epochs=-1)
        trainer.fit(module, make(reader, kind), ckpt_path=checkpoint)
        checkpoint = tmp_path / "ended.ckpt"
        if kind == "loader":
            trainer.save_checkpoint(checkpoint := tmp_path / "after.ckpt")
        samples += [sample for _, batch in module.seen for sample in batch]
    check_whole(samples)


@pytest.mark.parametrize("kind", ["loader", "plain 2", "stateful 0", "stream 2"])
def test_an_epoch_that_max_steps_ends_is_whole(lightning: Any, reader: Any, tmp_path: Path, kind: str) -> None:
    """Lightning begins the next one as if all its batches were done, and would take one of them."""
    seen: Seen = []
    for steps, checkpoint in ((7, None), (21, tmp_path / "ended.ckpt")):
        module = module_of(lightning)
        trainer = trainer_of(lightning, tmp_path, max_steps=steps, max_epochs=-1)
        trainer.fit(module, make(reader, kind), ckpt_path=checkpoint)
        seen += module.seen
    check_whole([sample for _, batch in seen for sample in batch])


def test_a_state_that_a_stateful_loader_has_forgotten(lightning: Any, reader: Any, tmp_path: Path) -> None:
    """At the end of fit Lightning shuts its workers down."""
    trainer = trainer_of(lightning, tmp_path, max_steps=5, max_epochs=-1)
    trainer.fit(module_of(lightning), make(reader, "stateful 0"))
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    trainer = trainer_of(lightning, tmp_path, max_steps=21, max_epochs=-1)
    with pytest.raises(TrainerError, match="forgets where it was at the end of fit; resume from a checkpoint that"):
        trainer.fit(module_of(lightning), make(reader, "stateful 0"), ckpt_path=tmp_path / "after.ckpt")


@pytest.mark.parametrize("kind", ["loader", "stateful 0", "stateful stream 1", "stateful stream 2"])
def test_larger_batches_in_mid_epoch_are_refused(lightning: Any, reader: Any, tmp_path: Path, kind: str) -> None:
    trainer_of(lightning, tmp_path, 9).fit(module_of(lightning), make(reader, kind))
    with pytest.raises((TrainerError, ResumeError), match=r"has counted 2 |share out batches of 4 samples"):
        trainer_of(lightning, tmp_path).fit(
            module_of(lightning), make(reader, kind, 8), ckpt_path=tmp_path / "stopped.ckpt"
        )


@pytest.mark.parametrize("use", ["validation", "validation without a check before", "reloaded", "training alone"])
def test_persistent_workers_of_a_stream_take_lightnings_epochs(
    lightning: Any, reader: Any, tmp_path: Path, use: str
) -> None:
    """Or are refused: only their first iteration sees what Lightning does."""
    dataset = ImageDataset(reader, fields=("index", "image"))
    stream = ImageStream(dataset, EpochSampler(ORDER, dataset), BATCH)
    loader = DataLoader(stream, batch_size=None, num_workers=1, persistent_workers=True)
    checks = {"num_sanity_val_steps": 0} if use.endswith("before") else {}
    reloads = {"reload_dataloaders_every_n_epochs": 1} if use == "reloaded" else {}
    trainer, module = trainer_of(lightning, tmp_path, **checks, **reloads), module_of(lightning)
    if use == "training alone":
        trainer.fit(module, loader)
        check(module.seen, EPOCHS)
        return
    with pytest.raises(TrainerError, match=r"whole epochs would be left out; leave out persistent_workers=True"):
        trainer.fit(module, loader, loader if use.startswith("validation") else None)
    assert not module.seen


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
def test_workers_of_a_stream_resume_with_as_many_ranks(reader: Any, ranks: tuple[int, int]) -> None:
    """In the middle of an epoch; what each worker has made says nothing of other shares."""
    before, after = (make(reader, "stateful stream 2", rank=0, world_size=count) for count in ranks)
    batches = iter(before)
    next(batches)
    after.load_state_dict(before.state_dict())
    with pytest.raises(ResumeError, match=f"on each of {ranks[0]} ranks"):
        list(after)
    assert list(batches)
    after = make(reader, "stateful stream 2", rank=0, world_size=ranks[1])
    after.load_state_dict(before.state_dict())
    assert [batch[0].tolist() for batch in after], "from an epoch's end, any number of ranks takes the next one"


def test_fabric_saves_and_restores_a_loader(lightning: Any, reader: Any, tmp_path: Path) -> None:
    fabric, loader, again = (
        lightning.Fabric(accelerator="cpu", devices=1),
        make(reader, "loader"),
        make(reader, "loader"),
    )
    batches = iter(loader)
    seen = [(0, next(batches)[0].tolist()) for _ in range(2)]
    fabric.save(tmp_path / "saved", {"loader": loader})
    fabric.load(tmp_path / "saved", {"loader": again})
    check(seen + [(0, batch[0].tolist()) for batch in again], 1)
    with pytest.raises(TypeError, match="Only PyTorch DataLoader"):  # the documentation says so
        fabric.setup_dataloaders(loader)


@pytest.mark.parametrize("kind", ["loader", "plain 0", "stream 2"])
def test_lightning_on_two_ranks(lightning: Any, reader: Any, tmp_path: Path, kind: str) -> None:
    """The ranks begin after the loader was made. Lightning leaves the sampler alone."""
    from lightning.pytorch import callbacks

    class Report(callbacks.Callback):  # type: ignore[misc]
        def on_train_end(self, trainer: Any, module: Any) -> None:
            (tmp_path / f"ranks-{trainer.global_rank}.json").write_text(json.dumps(module.seen))

    seen: Seen = []
    stops = ((9, None), (0, tmp_path / "stopped.ckpt")) if kind == "loader" else ((0, None),)
    for stop, checkpoint in stops:
        trainer = trainer_of(lightning, tmp_path, stop, devices=2, strategy="ddp_fork")
        trainer.callbacks.append(Report())
        trainer.fit(module_of(lightning), make(reader, kind), ckpt_path=checkpoint)
        parts = reports(tmp_path, "ranks")
        assert len(parts) == 2 and len(parts[0]) == len(parts[1]), "both ranks made the same number of steps"
        seen += [(epoch, batch) for part in parts for epoch, batch in part]
    check(seen, EPOCHS, ranks=2)


# --- accelerate ---------------------------------------------------------------------------------------------------
def trained(loader: Any, epochs: int) -> Seen:
    return [(epoch, batch[0].tolist()) for epoch in range(epochs) for batch in loader]


def test_accelerate_leaves_our_loader_to_itself(accelerate: Any, reader: Any, tmp_path: Path) -> None:
    loader = make(reader, "loader")  # made before the ranks are started

    def work(rank: int) -> Any:
        accelerator = accelerate.Accelerator(cpu=True)
        prepared = accelerator.prepare(loader)
        assert prepared is loader and (loader.rank, loader.world_size, len(loader)) == (rank, 2, 3)
        images = next(iter(loader))[1]
        assert images.device.type == accelerator.device.type
        loader.set_epoch(0)
        return trained(prepared, EPOCHS)

    parts = on_ranks(work, tmp_path)
    check([step for part in parts for step in part], EPOCHS, ranks=2)


def test_accelerate_shares_out_a_sampler_of_one_rank(accelerate: Any, reader: Any, tmp_path: Path) -> None:
    """The line that the refusal names, and resuming: with accelerate's skipped batches, and with our state."""

    def work(rank: int) -> Any:
        accelerator = accelerate.Accelerator(cpu=True)
        for kind in ("plain 2", "stream 0"):
            with pytest.raises(TrainerError, match=r"shares the batches .* 2 processes.*rank=0, world_size=1\)"):
                next(iter(accelerator.prepare(make(reader, kind))))
        seen = trained(accelerator.prepare(make(reader, "plain 2", rank=0, world_size=1)), EPOCHS)
        prepared = accelerator.prepare(make(reader, "plain 0", rank=0, world_size=1))
        prepared.set_epoch(1)
        skipped = [batch[0].tolist() for batch in accelerator.skip_first_batches(prepared, 2)]
        loader = make(reader, "plain 0", rank=0, world_size=1)
        loader.sampler.load_state_dict(EpochSampler(ORDER, reader, rank=0, world_size=1).state_after(16) | {"epoch": 1})
        prepared = accelerator.prepare(loader)
        with pytest.raises(TrainerError, match=r"accelerate begins epoch 0, .*with  loader.set_epoch\(1\)"):
            next(iter(prepared))
        prepared.set_epoch(1)
        resumed = [batch[0].tolist() for batch in prepared]
        stream = accelerator.prepare(make(reader, "stream 0", rank=0, world_size=1))
        return seen, skipped, resumed, trained(stream, 2)

    parts = on_ranks(work, tmp_path)
    seen = [step for part in parts for step in part[0]]
    check(seen, EPOCHS, ranks=2)
    for number in (1, 2):
        rest = sorted(sample for part in parts for batch in part[number] for sample in batch)
        assert rest == sorted(ORDER.indices(1, np.arange(16, 24)).tolist())
    dispatched = [step for part in parts for step in part[3]]
    for epoch in range(2):
        samples = {sample for number, batch in dispatched if number == epoch for sample in batch}
        assert samples == set(ORDER.indices(epoch, np.arange(28)).tolist())


def test_accelerate_on_one_process(accelerate: Any, reader: Any, tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    for kind in ("plain 2", "stream 2"):
        check(trained(accelerator.prepare(make(reader, kind)), EPOCHS), EPOCHS)
    loader = make(reader, "loader")
    accelerator.register_for_checkpointing(loader)
    batches = iter(loader)
    seen = [(0, next(batches)[0].tolist()) for _ in range(3)]
    accelerator.save_state(tmp_path / "state")
    accelerator.load_state(tmp_path / "state")
    check(seen + trained(loader, EPOCHS), EPOCHS)
    with pytest.raises(
        TrainerError, match=r"skip_first_batches .* not of this loader.*loader\.load_state_dict\(state\)"
    ):
        accelerator.skip_first_batches(loader, 2)


def test_accelerate_moves_no_environment_while_threads_decode(
    accelerate: Any, reader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libjpeg reads it with every image, and glibc before 2.41 ends the process where a variable is added meanwhile."""
    from accelerate.utils import is_cuda_available

    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "")
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK")
    names = []
    for _ in make(reader, "loader"):
        is_cuda_available()  # as save_state does
        names.append(sorted(os.environ))
    assert names[-1] == names[0] and "PYTORCH_NVML_BASED_CUDA_CHECK" in names[0]


@pytest.mark.parametrize(
    ("options", "whole"),
    [
        ({}, 24),
        ({"split_batches": True}, 28),
        ({"dispatch_batches": True}, 24),
        ({"dispatch_batches": True, "split_batches": True}, 28),
        ({"even_batches": False}, 24),
        ({"use_stateful_dataloader": True}, 24),
    ],
    ids=str,
)
def test_accelerate_shares_out_whole_batches(
    accelerate: Any, reader: Any, tmp_path: Path, options: dict[str, bool], whole: int
) -> None:
    """However it does that: every sample of them once, in the order's first `whole` positions."""

    def work(rank: int) -> Any:
        accelerator = accelerate.Accelerator(cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(**options))
        assert accelerator.prepare(loader := make(reader, "loader")) is loader
        return trained(accelerator.prepare(make(reader, "plain 0", rank=0, world_size=1)), 2)

    seen = [step for part in on_ranks(work, tmp_path) for step in part]
    for epoch in range(2):
        samples = [sample for number, batch in seen if number == epoch for sample in batch]
        assert sorted(samples) == sorted(ORDER.indices(epoch, np.arange(whole)).tolist())


@pytest.mark.parametrize("kind", ["plain 0", "plain 2", "stream 2"])
def test_accelerate_is_refused_on_all_processes(accelerate: Any, reader: Any, tmp_path: Path, kind: str) -> None:
    """Where one process loads for all, an error on that one alone leaves the others waiting."""

    def work(rank: int) -> Any:
        options = accelerate.DataLoaderConfiguration(dispatch_batches=True)
        accelerator = accelerate.Accelerator(cpu=True, dataloader_config=options)
        with pytest.raises(TrainerError, match=r"shares the batches .* 2 processes"):
            next(iter(accelerator.prepare(make(reader, kind))))
        accelerator.wait_for_everyone()
        return True

    assert on_ranks(work, tmp_path) == [True, True]


def test_accelerate_repeats_no_sample_of_a_stream(accelerate: Any, reader: Any, tmp_path: Path) -> None:
    """The last batches of an epoch, which two processes cannot share: refused, and the line to write works."""

    def work(rank: int) -> Any:
        dataset = ImageDataset(reader, fields=("index", "image"))
        sampler = EpochSampler(ORDER, dataset, rank=0, world_size=1)
        accelerator = accelerate.Accelerator(cpu=True)
        stream = ImageStream(dataset, sampler, 3, drop_last=False)
        assert len(accelerator.prepare(DataLoader(stream, batch_size=None))) == 5
        short = ImageDataset(reader.select(indices=range(29)), fields=("index", "image"))
        stream = ImageStream(short, EpochSampler(Shuffled(29, 1), short, rank=0, world_size=1), 3, drop_last=False)
        with pytest.raises(TrainerError, match=r"repeat 1 samples .* last 5 .*ImageStream\(.*, 4, drop_last=True\)"):
            next(iter(accelerator.prepare(DataLoader(stream, batch_size=None))))
        stream = ImageStream(short, EpochSampler(Shuffled(29, 1), short, rank=0, world_size=1), 4, drop_last=True)
        return trained(accelerator.prepare(DataLoader(stream, batch_size=None)), 2)

    seen = [step for part in on_ranks(work, tmp_path) for step in part]
    for epoch in range(2):
        samples = [sample for number, batch in seen if number == epoch for sample in batch]
        assert len(samples) == len({*samples}) == 28


@pytest.mark.parametrize("kind", ["plain 2", "stream 2"])
def test_accelerate_sets_the_epoch_of_a_stateful_loader(
    accelerate: Any, reader: Any, tmp_path: Path, kind: str
) -> None:
    """It asks for the state before the first loop, for which a StatefulDataLoader begins an epoch."""
    options = accelerate.DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=options)
    prepared = accelerator.prepare(make(reader, kind))
    prepared.set_epoch(2)
    for epoch in (2, 3):
        samples = [sample for batch in prepared for sample in batch[0].tolist()]
        assert samples == ORDER.indices(epoch, np.arange(28)).tolist()


# --- transformers -------------------------------------------------------------------------------------------------
NAMES = {"pixel_values": "image", "labels": "index"}


def hf_trainer(reader: Any, folder: Path, ours: bool, stop: int = 0, **options: Any) -> Any:
    """A Trainer whose model keeps what it has seen in `seen`; ours: over ImageLoader, otherwise over EpochSampler."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen: list[list[int]] = []

        def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            self.seen.append(labels.tolist())
            return {"loss": self.layer(pixel_values.float().mean().view(1, 1)).sum()}

    class Epochs(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            trainer.steps.append((int(np.ceil(state.epoch - 1e-6)) - 1, trainer.model_seen[-1]))
            control.should_save = control.should_training_stop = state.global_step == stop

        def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if ours:
                (folder / "loader.json").write_text(json.dumps(loader.state_dict()))

    class SamplerTrainer(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return EpochSampler(ORDER, self.train_dataset, rank=0, world_size=1)

    class LoaderTrainer(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return loader

    quiet = {"disable_tqdm": True, "report_to": "none", "save_strategy": "no", "logging_strategy": "no"}
    arguments = TrainingArguments(
        str(folder),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        dataloader_drop_last=True,
        use_cpu=True,
        ignore_data_skip=ours,
        **quiet,
        **options,
    )
    model = Model()
    loader = ImageLoader(reader, BATCH, order=ORDER, fields=NAMES, threads=1)
    kind = LoaderTrainer if ours else SamplerTrainer
    trainer = kind(model, arguments, train_dataset=ImageDataset(reader, fields=NAMES), callbacks=[Epochs()])
    trainer.steps, trainer.model_seen, trainer.our_loader = [], model.seen, loader
    return trainer


@pytest.fixture
def transformers(accelerate: Any) -> Any:
    module = pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers import Trainer  # noqa: F401  # loaded once, before ranks are forked

    module.logging.set_verbosity_error()
    return module


@pytest.mark.parametrize("ours", [False, True], ids=["sampler", "loader"])
@pytest.mark.parametrize("stop", [9, 14])
def test_the_trainer_of_transformers(transformers: Any, reader: Any, tmp_path: Path, ours: bool, stop: int) -> None:
    whole = hf_trainer(reader, tmp_path, ours)
    whole.train()
    check(whole.steps, EPOCHS)
    first, second = hf_trainer(reader, tmp_path, ours, stop), hf_trainer(reader, tmp_path, ours)
    first.train()
    if ours:
        second.our_loader.load_state_dict(json.loads((tmp_path / "loader.json").read_text()))
    second.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{stop}"))
    samples = [batch for _, batch in first.steps + second.steps]
    assert samples == [batch for _, batch in whole.steps], "every batch once, in its place"


def test_the_trainer_of_transformers_on_two_ranks(
    transformers: Any, accelerate: Any, reader: Any, tmp_path: Path
) -> None:
    def work(rank: int) -> Any:
        seen = {}
        for ours in (False, True):
            trainer = hf_trainer(reader, tmp_path, ours)
            trainer.train()
            seen[ours] = trainer.steps
        first = hf_trainer(reader, tmp_path, False, 5)
        first.train()
        second = hf_trainer(reader, tmp_path, False)
        second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
        return seen[False], seen[True], [batch for _, batch in first.steps + second.steps]

    parts = on_ranks(work, tmp_path)
    for number in (0, 1):
        check([step for part in parts for step in part[number]], EPOCHS, ranks=2)
    for part in parts:
        assert part[2] == [batch for _, batch in part[0]], "resumed in mid-epoch"


# --- longer -------------------------------------------------------------------------------------------------------
@pytest.mark.faults
@pytest.mark.parametrize("kind", ["loader", "stateful 0", "stateful 2"])
def test_lightning_stops_at_random(lightning: Any, reader: Any, tmp_path: Path, kind: str) -> None:
    """Each run resumes the one before it, from a checkpoint of any batch."""
    draw, stops = random.Random(1), 0
    for _ in range(6 if kind == "stateful 2" else 20):
        seen: Seen = []
        done, checkpoint = 0, None
        while done < 7 * EPOCHS:
            stop = done + draw.randint(1, 9)
            module, trainer = module_of(lightning), trainer_of(lightning, tmp_path, min(stop, 7 * EPOCHS))
            trainer.fit(module, make(reader, kind), ckpt_path=checkpoint)
            assert module.seen, f"nothing was trained on after batch {done}"
            seen += module.seen
            done, checkpoint, stops = len(seen), tmp_path / "stopped.ckpt", stops + 1
        check(seen, EPOCHS)
    print(f"\n{stops} stops of Lightning over {kind}: 0 lost, 0 twice")


SCRIPT = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import lightning, readers, test_trainers as tests
from lightning.pytorch.plugins.environments import LightningEnvironment
folder = Path(sys.argv[3])
with readers.open(sys.argv[2]) as reader:
    module = tests.module_of(lightning)
    loader = tests.make(reader, sys.argv[4])  # before the ranks are started
    tests.trainer_of(lightning, folder, devices=2, strategy="ddp").fit(module, loader)
    (folder / f"script-{module.global_rank}.json").write_text(json.dumps(module.seen))
"""


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["loader", "plain 2"])
def test_lightning_starts_the_script_for_each_rank(lightning: Any, reader: Any, tmp_path: Path, kind: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, tmp_path / "script.py", Path(__file__).parent, reader.path, tmp_path, kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    check([step for part in reports(tmp_path, "script") for step in part], EPOCHS, ranks=2)
