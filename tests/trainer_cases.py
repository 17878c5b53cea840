"""Lightning and accelerate for tests: modules that record their samples, trainers that stop, and several ranks."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

__all__ = ["EPOCHS", "QUIET", "Seen", "module_of", "on_ranks", "reports", "trainer_of"]

EPOCHS = 3
Seen = list[tuple[int, list[int]]]  # (the framework's epoch, samples of a batch), in the order of training
# Warnings of the frameworks about themselves, each other and the tiny models of the tests.
QUIET = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    *(
        pytest.mark.filterwarnings(f"ignore::{kind}:(lightning|accelerate|transformers|torch).*")
        for kind in ("UserWarning", "DeprecationWarning", "FutureWarning")
    ),
]


def reports(folder: Path, name: str) -> list[Any]:
    """The output of the ranks of a run."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}-*.json"))]


def module_of(lightning: Any) -> Any:
    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen: Seen = []

        def training_step(self, batch: Any, number: int) -> Any:
            self.seen.append((self.current_epoch, batch[0].tolist()))
            return self.layer(batch[1].float().mean().view(1, 1)).sum()

        def validation_step(self, batch: Any, number: int) -> None:
            assert len(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.0)

    return Module()


def trainer_of(lightning: Any, folder: Path, stop: int = 0, **options: Any) -> Any:
    """A trainer that keeps a checkpoint at the end of each epoch; stop: save and end after this many steps."""
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.environments import LightningEnvironment

    class Stop(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == stop:
                trainer.save_checkpoint(folder / "stopped.ckpt")
                trainer.should_stop = True

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    callbacks = [ModelCheckpoint(folder, filename="ended", enable_version_counter=False), Stop()]
    environment = LightningEnvironment()
    options = {"max_epochs": EPOCHS, "accelerator": "cpu", "devices": 1, **quiet, **options}
    return lightning.Trainer(default_root_dir=folder, callbacks=callbacks, plugins=[environment], **options)


def one_rank(rank: int, work: Callable[[int], Any], folder: Path, ranks: int, port: int) -> None:
    variables = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "1"})
    torch.set_num_threads(1)
    (folder / f"work-{rank}.json").write_text(json.dumps(work(rank)))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def on_ranks(work: Callable[[int], Any], folder: Path, ranks: int = 2) -> list[Any]:
    """The results of `work(rank)` in forked processes, with the environment of torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(one_rank, (work, folder, ranks, port), ranks, start_method="fork")
    return reports(folder, "work")
