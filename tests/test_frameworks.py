"""Our classes for training frameworks, inside the frameworks: every (epoch, sample) once, also after stops.

`test_trainers` has what frameworks do with loaders by themselves.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_jpeg, tree_of
from test_trainers import BATCH, COUNT, EPOCHS, NAMES, ORDER, Seen, check, module_of, on_ranks, pytestmark, trainer_of

import packer
import readers
from cache.errors import TrainerError, UnknownNameError
from readers.augment import CenterCrop, RandomHorizontalFlip
from readers.loader import ImageLoader
from readers.torch import ImageDataset

__all__ = ["pytestmark"]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 samples to train on, 7 to validate with."""
    root = tmp_path_factory.mktemp("frameworks")
    files = {f"train/class{i % 3}/{i:02d}.jpg": make_jpeg(i, (8, 8)) for i in range(COUNT)}
    tree_of(root / "images", files | {f"val/class{i % 3}/{i}.jpg": make_jpeg(50 + i, (8, 8)) for i in range(7)})
    packer.convert(root / "images", to="tar", output=root / "set", run=packer.Run(workers=1))
    return root / "set"


@pytest.fixture
def reader(packed: Path) -> Iterator[readers.Reader]:
    with readers.open(packed, "train") as opened:
        yield opened


# --- Lightning ----------------------------------------------------------------------------------------------------
@pytest.fixture
def lightning() -> Any:
    return pytest.importorskip("lightning", reason="lightning is not installed")


def data_module(packed: Path, **options: Any) -> Any:
    from readers.frameworks.lightning import PackerDataModule

    given = {"augment": [RandomHorizontalFlip()], "order": None, "seed": 1, "fields": ("index", "image"), "threads": 1}
    return PackerDataModule(packed, BATCH, **{**given, **options})


@pytest.mark.parametrize("stop", [9, 14])
def test_a_data_module_resumes_in_mid_epoch(lightning: Any, packed: Path, tmp_path: Path, stop: int) -> None:
    options = {"stage": {"target": str(tmp_path / "node")}, "cache": {"capacity": "1MiB", "backend": "memfd"}}
    first, second = module_of(lightning), module_of(lightning)
    trainer_of(lightning, tmp_path, stop).fit(first, datamodule=data_module(packed))
    trainer = trainer_of(lightning, tmp_path)
    trainer.fit(second, datamodule=data_module(packed, **options), ckpt_path=tmp_path / "stopped.ckpt")
    check(first.seen + second.seen, EPOCHS)


def test_a_data_module_on_two_ranks(lightning: Any, packed: Path, tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        from lightning.pytorch.plugins.environments import TorchElasticEnvironment

        module, data = module_of(lightning), data_module(packed)
        options = {"devices": 2, "strategy": "ddp", "max_epochs": 2, "plugins": [TorchElasticEnvironment()]}
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        trainer = lightning.Trainer(default_root_dir=tmp_path, enable_checkpointing=False, **quiet, **options)
        trainer.fit(module, datamodule=data)
        assert data.reader() is None, "closed after the training"
        data.setup("test")
        return module.seen, len(data.val_dataloader()), data.test_dataloader()

    parts = on_ranks(work, tmp_path)
    check([step for part in parts for step in part[0]], 2, ranks=2)
    assert [part[1:] for part in parts] == [[1, []]] * 2


def test_a_data_module_takes_the_splits_it_is_told(lightning: Any, packed: Path) -> None:
    data = data_module(packed, train_split="val", val_split="train", eval_augment=[CenterCrop(4)])
    data.setup("fit")
    assert (len(data.reader("train")), len(data.reader("val"))) == (7, COUNT)
    assert next(iter(data.val_dataloader()))[1].shape == (BATCH, 3, 4, 4)
    data.teardown("fit")
    with pytest.raises(UnknownNameError, match="no split 'dev'"):
        data_module(packed, val_split="dev").setup("fit")


# --- transformers -------------------------------------------------------------------------------------------------
@pytest.fixture
def transformers() -> Any:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    module = pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers import Trainer  # noqa: F401  # loaded once, before ranks are forked

    module.logging.set_verbosity_error()
    return module


def train(
    reader: Any, folder: Path, stop: int = 0, start: int = 0, *, resume: bool = False, given: Any = None, **options: Any
) -> tuple[Seen, list[float]]:
    """What a Trainer trains on, from the checkpoint of step `start` to step `stop`, and its losses.

    resume: from the last checkpoint. given: other arguments of the Trainer; options: TrainingArguments.
    """
    from transformers import TrainerCallback, TrainingArguments

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

    seen: Seen = []
    losses: list[float] = []
    epoch = [0]
    quiet = {"disable_tqdm": True, "report_to": "none", "save_strategy": "no", "logging_strategy": "no"}
    batch = options.pop("batch", BATCH)
    arguments = TrainingArguments(str(folder), num_train_epochs=EPOCHS, use_cpu=True, **quiet, **options)
    loader = ImageLoader(reader, batch, order=ORDER, fields=NAMES, threads=1, augment=[RandomHorizontalFlip()])
    trainer = LoaderTrainer(Model(), arguments, train_loader=loader, callbacks=[Stop()], **(given or {}))
    trainer.train(resume_from_checkpoint=resume or (str(folder / f"checkpoint-{start}") if start else None))
    return seen, losses


@pytest.mark.parametrize("restore", [False, True])
@pytest.mark.parametrize("stop", [9, 14])
def test_the_trainer_resumes_by_our_state(
    transformers: Any, reader: Any, tmp_path: Path, stop: int, restore: bool
) -> None:
    options = {"restore_callback_states_from_checkpoint": restore, "learning_rate": 0.01}
    whole, losses = train(reader, tmp_path, **options)
    check(whole, EPOCHS)
    first, before = train(reader, tmp_path, stop, **options)
    second, after = train(reader, tmp_path, start=stop, **options)
    assert first + second == whole and before + after == losses


def test_the_trainer_goes_on_with_fewer_ranks_and_larger_batches(
    transformers: Any, reader: Any, tmp_path: Path
) -> None:
    def two(rank: int) -> Any:
        return train(reader, tmp_path, 5)[0]

    parts = on_ranks(two, tmp_path)
    after, _ = train(reader, tmp_path, start=5, batch=2 * BATCH)
    check([step for part in parts for step in part] + after, EPOCHS, ranks=2)


@pytest.mark.parametrize("other", [{"batch": 2}, {"gradient_accumulation_steps": 2}])
def test_the_trainer_that_would_lose_its_place_is_refused(
    transformers: Any, reader: Any, tmp_path: Path, other: dict[str, int]
) -> None:
    train(reader, tmp_path, 9)
    with pytest.raises(TrainerError, match=r"another batch size, number of ranks .*; keep the samples of an update"):
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


def test_a_checkpoint_that_is_not_whole_is_left_out(transformers: Any, reader: Any, tmp_path: Path) -> None:
    """A run that was killed while it saved: by itself the Trainer would begin again with the weights of step 14."""
    from readers.frameworks.transformers import last_checkpoint

    assert last_checkpoint(tmp_path / "none") is None
    train(reader, tmp_path, 9)
    train(reader, tmp_path, 14, 9)
    state = tmp_path / "checkpoint-14/trainer_state.json"
    state.write_text(state.read_text()[:100])
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-9")
    with pytest.raises(TrainerError, match=r"checkpoint-14 is not a whole checkpoint"):
        train(reader, tmp_path, start=14)
    state.unlink()
    seen, _ = train(reader, tmp_path, start=9, resume=True)
    check(train(reader, tmp_path / "before", 9)[0] + seen, EPOCHS)


def test_the_trainer_evaluates_in_between(transformers: Any, reader: Any, packed: Path, tmp_path: Path) -> None:
    """On two ranks: each sample of validation counts once, and training goes on as without."""
    with readers.open(packed, "val") as validation:

        def two(rank: int) -> Any:
            counted: list[list[int]] = []
            options = {"eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 1, "label_names": ["labels"]}
            given = {
                "eval_dataset": ImageDataset(validation, fields=NAMES),
                "compute_metrics": lambda found: counted.append(sorted(found.label_ids.tolist())) or {},
            }
            return train(reader, tmp_path, 0, given=given, **options)[0], counted

        parts = on_ranks(two, tmp_path)
    check([step for part in parts for step in part[0]], EPOCHS, ranks=2)
    assert all(len(part[1]) > 3 and all(found == list(range(7)) for found in part[1]) for part in parts)


@pytest.mark.faults
def test_the_trainer_stops_at_random(transformers: Any, reader: Any, tmp_path: Path) -> None:
    draw, stops = random.Random(1), 0
    whole, losses = train(reader, tmp_path, learning_rate=0.01)
    for _ in range(40):
        seen: Seen = []
        found: list[float] = []
        while len(seen) < len(whole):
            stop = min(len(seen) + draw.randint(1, 9), len(whole))
            more, values = train(reader, tmp_path, stop, len(seen), learning_rate=0.01)
            seen, found, stops = seen + more, found + values, stops + 1
        assert (seen, found) == (whole, losses)
    print(f"\n{stops} stops of the Trainer: 0 lost, 0 twice, the losses of an undisturbed run")


# --- torch.distributed.checkpoint ---------------------------------------------------------------------------------
def test_a_distributed_checkpoint_holds_the_loader(reader: Any, tmp_path: Path) -> None:
    """Saved by two ranks, loaded by one."""
    import torch.distributed.checkpoint as dcp

    def loader_of(reader: Any) -> ImageLoader:
        return ImageLoader(reader, BATCH, order=ORDER, fields=("index",), threads=1)

    def two(rank: int) -> Any:
        torch.distributed.init_process_group("gloo")
        loader, seen = loader_of(reader), []
        for step, (indices,) in enumerate(loader):
            seen.append((0, indices.tolist()))
            if step == 1:
                break
        dcp.save({"loader": loader}, checkpoint_id=tmp_path / "saved")
        return seen

    parts = on_ranks(two, tmp_path)
    loader = loader_of(reader)
    dcp.load({"loader": loader}, checkpoint_id=tmp_path / "saved")
    rest = [(0, indices.tolist()) for (indices,) in loader]
    seen = sorted(sample for _, batch in [*parts[0], *parts[1], *rest] for sample in batch)
    assert seen == sorted(ORDER.indices(0, np.arange(28)).tolist())
