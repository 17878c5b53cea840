"""RF-DETR over a packed set with boxes: its Lightning module and trainer, with packer's loader as its data module.

    packer convert samples.jsonl --to hdf5 --field boxes:boxes=boxes --field box_labels:array=labels -o SET
    python train_rfdetr.py SET --epochs 3 --output runs      # the same command continues, in mid-epoch

RF-DETR itself saves between epochs only; a callback of this script adds checkpoints every four steps. Its validation
needs COCO files, and is left out.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from rfdetr.config import RFDETRNanoConfig, TrainConfig
from rfdetr.training import RFDETRModelModule, build_trainer
from rfdetr.utilities.box_ops import box_xyxy_to_cxcywh
from rfdetr.utilities.tensors import NestedTensor

import readers
from readers.augment import IMAGENET_MEAN, IMAGENET_STD, Normalize, RandomHorizontalFlip, RandomResizedCrop
from readers.loader import ImageLoader

SIZE = 64  # a multiple of 32


class Detector(RFDETRModelModule):
    def on_before_batch_transfer(self, batch: dict[str, Any], dataloader_idx: int) -> tuple[NestedTensor, list[Any]]:
        print("trained on", batch["index"].tolist(), f"mean {batch['image'].mean():.6f}")
        columns = zip(batch["boxes"], batch["labels"], strict=True)
        targets = [{"boxes": box_xyxy_to_cxcywh(boxes / SIZE), "labels": labels} for boxes, labels in columns]
        padding = torch.zeros(len(targets), SIZE, SIZE, dtype=torch.bool)
        return NestedTensor(batch["image"], padding, no_padding=True), targets


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("set"), parser.add_argument("--epochs", type=int), parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    fields = {"image": "image", "boxes": "boxes", "labels": "box_labels", "index": "index"}
    ops = [RandomResizedCrop(SIZE), RandomHorizontalFlip(), Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    loader = ImageLoader(readers.open(args.set), 4, augment=ops, fields=fields, seed=1)
    shape = RFDETRNanoConfig(pretrain_weights=None, resolution=SIZE, positional_encoding_size=SIZE // 16, num_classes=2)
    options = {"dataset_dir": args.set, "output_dir": str(args.output), "epochs": args.epochs, "tensorboard": False}
    config = TrainConfig(**options, seed=1, accelerator="cpu")
    trainer, folder = build_trainer(config, shape), args.output / "steps"
    trainer.callbacks.append(ModelCheckpoint(folder, every_n_train_steps=4, save_last=True, save_top_k=0))
    last = folder / "last.ckpt"
    trainer.fit(Detector(shape, config), loader, ckpt_path=last if last.exists() else None)


if __name__ == "__main__":
    main()
