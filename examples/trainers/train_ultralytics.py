"""Ultralytics' classification over a packed set: `get_dataset` and `get_dataloader` of its trainer are replaced.

    python train_ultralytics.py SET --epochs 3 --output runs            # the same command continues with the next epoch

Ultralytics saves between epochs only; a continued run has the samples and crops of an uninterrupted one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from ultralytics.models.yolo.classify import ClassificationTrainer

import readers
from readers.augment import CenterCrop, RandomHorizontalFlip, RandomResizedCrop, Resize
from readers.loader import Decode, ImageLoader


class Loader(ImageLoader):
    drop_last, num_workers, reset = True, 0, lambda self: None  # attributes that Ultralytics reads


class PackedTrainer(ClassificationTrainer):
    def get_dataset(self) -> dict[str, Any]:
        names = dict(enumerate(readers.open(self.args.data, "train").classes))
        return {"train": "train", "val": "val", "test": None, "nc": len(names), "names": names, "channels": 3}

    def get_dataloader(self, dataset_path: str, batch_size: int = 16, rank: int = 0, mode: str = "train") -> Loader:
        size, is_training = self.args.imgsz, mode == "train"
        ops = [RandomResizedCrop(size), RandomHorizontalFlip()] if is_training else [Resize(size), CenterCrop(size)]
        options = {"seed": self.args.seed, "decode": Decode(dtype=torch.float32), "shuffle": is_training}
        fields, reader = {"img": "image", "cls": "label", "index": "index"}, readers.open(self.args.data, dataset_path)
        return Loader(reader, batch_size, augment=ops, fields=fields, **options)

    def preprocess_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        print("trained on", batch["index"].tolist(), f"epoch {self.epoch}, mean {batch['img'].mean():.6f}")
        return super().preprocess_batch(batch)

    def final_eval(self) -> None:
        """Do nothing: Ultralytics' final evaluation needs a folder of images."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("set"), parser.add_argument("--epochs", type=int), parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    last = args.output.resolve() / "run/weights/last.pt"
    own = {"data": args.set, "epochs": args.epochs, "project": str(args.output.resolve()), "name": "run"}
    own |= {"imgsz": 32, "batch": 4, "plots": False, "amp": False, "exist_ok": True, "device": "cpu"}
    trainer = PackedTrainer(overrides={"model": "yolo11n-cls.yaml", "resume": last.exists() and str(last), **own})
    trainer.add_callback("on_train_epoch_start", lambda trainer: trainer.train_loader.set_epoch(trainer.epoch))
    trainer.train()


if __name__ == "__main__":
    main()
