"""Training with Lightning, continued on any number of ranks with the next batch.

    torchrun --nproc-per-node 2 examples/train_lightning.py SET

Lightning counts batches, so do not change `--batch-size`, the number of samples of a step on all ranks together.
"""

import argparse
import os
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.functional import cross_entropy

from readers import Decode
from readers.augment import CenterCrop, RandomHorizontalFlip, RandomResizedCrop, Resize
from readers.frameworks.lightning import PackerDataModule


class Classifier(lightning.LightningModule):
    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten())
        self.network.append(nn.Linear(256, classes))

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        return cross_entropy(self.network(batch[0]), batch[1])

    def validation_step(self, batch: Any, number: int) -> None:
        right = (self.network(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", right, prog_bar=True, sync_dist=True, batch_size=len(batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("set")
    parser.add_argument("--folder", default="checkpoints", help="folder of the checkpoints")
    for name, value in {"epochs": 3, "batch-size": 64, "size": 64, "save-every": 50, "classes": 10}.items():
        parser.add_argument(f"--{name}", type=int, default=value)  # batch-size: samples of a step, all ranks together
    options = parser.parse_args()
    lightning.seed_everything(0, verbose=False)
    train = [RandomResizedCrop(options.size), RandomHorizontalFlip()]
    val = [Resize(options.size), CenterCrop(options.size)]
    ranks, ops = int(os.environ.get("WORLD_SIZE", "1")), {"augment": train, "eval_augment": val}
    data = PackerDataModule(options.set, options.batch_size // ranks, decode=Decode(dtype=torch.float32), **ops)
    saver = ModelCheckpoint(options.folder, every_n_train_steps=options.save_every, save_last=True, save_top_k=0)
    trainer = lightning.Trainer(max_epochs=options.epochs, devices=ranks, callbacks=[saver], logger=False)
    trainer.fit(Classifier(options.classes), data, ckpt_path="last")


if __name__ == "__main__":
    main()
