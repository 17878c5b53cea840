"""torchgeo's classification of images of 13 bands over a packed set: the data sets of a `NonGeoDataModule`.

    packer convert eurosat --to hdf5                          # eurosat/SPLIT/CLASS/NAME.npy, uint16 [13, h, w]
    python train_torchgeo.py SET --epochs 3 --output runs     # the same command continues, in mid-epoch

A continued run of torchgeo's random batch transforms draws other random numbers. For three bands use `ImageLoader`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader
from torchgeo.datamodules import NonGeoDataModule
from torchgeo.trainers import ClassificationTask

import readers
from readers.order import Shuffled
from readers.torch import EpochSampler, ImageDataset


def bands(split: str, path: str) -> ImageDataset:
    reader = readers.open(path, split)
    return ImageDataset(reader, torch.Tensor.float, fields={"image": "array", "label": "label", "index": "index"})


class PackedModule(NonGeoDataModule):
    mean, std = torch.tensor(0), torch.tensor(10_000)

    def train_dataloader(self) -> StatefulDataLoader[Any]:
        sampler = EpochSampler(Shuffled(len(self.train_dataset), seed=1), self.train_dataset)
        return StatefulDataLoader(self.train_dataset, self.batch_size, sampler=sampler, num_workers=1, drop_last=True)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        if self.trainer.training:
            print("trained on", batch["index"].tolist(), f"mean {batch['image'].mean():.4f}")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("set"), parser.add_argument("--epochs", type=int), parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    seed_everything(1)
    data = PackedModule(bands, batch_size=4, path=args.set)
    data.setup("fit")
    task = ClassificationTask("resnet18", in_channels=13, num_classes=len(data.train_dataset.reader.classes))
    saver = ModelCheckpoint(args.output, every_n_train_steps=4, save_last=True, save_top_k=0)
    trainer = Trainer(accelerator="cpu", max_epochs=args.epochs, logger=False, callbacks=[saver])
    trainer.fit(task, data, ckpt_path="last")


if __name__ == "__main__":
    main()
