"""Training frameworks themselves, over our loaders: every (epoch, sample) once, also after a stop, also on two ranks.

What a framework makes impossible is refused with the line to write, and that line works.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_jpeg
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import packer
import readers
from readers.errors import TrainerError
from readers.loader import ImageLoader
from readers.order import Shuffled
from readers.torch import EpochSampler, ImageDataset, ImageStream

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    # What the frameworks say about themselves, each other and the tests' tiny models.
    pytest.mark.filterwarnings("ignore::UserWarning:(lightning|accelerate|transformers|torch).*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(lightning|accelerate|transformers|torch).*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:(lightning|accelerate|transformers|torch).*"),
]
COUNT, BATCH, EPOCHS = 30, 4, 3
ORDER = Shuffled(COUNT, 1)
Seen = list[tuple[int, list[int]]]  # (the framework's epoch, samples of a batch), in the order of training


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[readers.ShardReader]:
    root = tmp_path_factory.mktemp("trainers")
    for i in range(COUNT):
        folder = root / "images" / f"class{i % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i:02d}.jpg").write_bytes(make_jpeg(i, (8, 8)))
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


def told(folder: Path, name: str) -> list[Any]:
    """What the ranks of a run have written."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}-*.json"))]


# --- Lightning ----------------------------------------------------------------------------------------------------
@pytest.fixture
def lightning() -> Any:
    module = pytest.importorskip("lightning", reason="lightning is not installed")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return module


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
    """A trainer that keeps a checkpoint of each epoch's end; stop: it saves and ends after so many steps."""
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.environments import LightningEnvironment

    class Stop(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
            if trainer.global_step == stop:
                trainer.save_checkpoint(folder / "stopped.ckpt")
                trainer.should_stop = True

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    callbacks = [ModelCheckpoint(folder, filename="ended", enable_version_counter=False), Stop()]
    environment = LightningEnvironment()
    options = {"max_epochs": EPOCHS, "accelerator": "cpu", "devices": 1, **quiet, **options}
    return lightning.Trainer(default_root_dir=folder, callbacks=callbacks, plugins=[environment], **options)


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
        with pytest.raises(TrainerError, match=r"after the last batch of epoch 1.*write  StatefulDataLoader\(dataset"):
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


@pytest.mark.parametrize("kind", ["loader", "stateful 0", "stateful 2"])
def test_lightning_with_other_batches_in_mid_epoch_is_refused(
    lightning: Any, reader: Any, tmp_path: Path, kind: str
) -> None:
    trainer_of(lightning, tmp_path, 9).fit(module_of(lightning), make(reader, kind))
    with pytest.raises(TrainerError, match=r"Lightning has counted 2 .*another batch size or number of ranks"):
        trainer_of(lightning, tmp_path).fit(
            module_of(lightning), make(reader, kind, 2), ckpt_path=tmp_path / "stopped.ckpt"
        )
    resumed = module_of(lightning)
    trainer = trainer_of(lightning, tmp_path, max_epochs=2)
    trainer.fit(resumed, make(reader, kind, 2), ckpt_path=tmp_path / "ended.ckpt")
    assert len(resumed.seen) in (0, 15), "the end of an epoch is fine with any batches"


def test_lightning_does_not_repeat_what_a_state_has_seen(lightning: Any, reader: Any, tmp_path: Path) -> None:
    loader, state = make(reader, "loader"), EpochSampler(ORDER, reader).state_after(8)
    loader.load_state_dict({**state, "epoch": 2})
    with pytest.raises(TrainerError, match=r"Lightning begins epoch 0, .* epoch 2.*write|with  trainer.fit\("):
        trainer_of(lightning, tmp_path).fit(module_of(lightning), loader)


@pytest.mark.parametrize("kind", ["loader", "plain 0", "stream 2"])
def test_lightning_on_two_ranks(lightning: Any, reader: Any, tmp_path: Path, kind: str) -> None:
    """The ranks begin after the loader was made. Lightning leaves the sampler alone."""
    from lightning.pytorch import callbacks

    class Tell(callbacks.Callback):  # type: ignore[misc]
        def on_train_end(self, trainer: Any, module: Any) -> None:
            (tmp_path / f"ranks-{trainer.global_rank}.json").write_text(json.dumps(module.seen))

    seen: Seen = []
    stops = ((9, None), (0, tmp_path / "stopped.ckpt")) if kind == "loader" else ((0, None),)
    for stop, checkpoint in stops:
        trainer = trainer_of(lightning, tmp_path, stop, devices=2, strategy="ddp_fork")
        trainer.callbacks.append(Tell())
        trainer.fit(module_of(lightning), make(reader, kind), ckpt_path=checkpoint)
        parts = told(tmp_path, "ranks")
        assert len(parts) == 2 and len(parts[0]) == len(parts[1]), "both ranks made the same number of steps"
        seen += [(epoch, batch) for part in parts for epoch, batch in part]
    check(seen, EPOCHS, ranks=2)


# --- accelerate ---------------------------------------------------------------------------------------------------
@pytest.fixture
def accelerate() -> Iterator[Any]:
    module = pytest.importorskip("accelerate", reason="accelerate is not installed")
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield module
    AcceleratorState._reset_state(reset_partial_state=True)
