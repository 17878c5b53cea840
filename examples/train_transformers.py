"""Training with the Trainer of transformers, continued on any number of ranks with the next batch.

    packer convert imagenette2 --to hdf5 -o SET
    torchrun --nproc-per-node 2 examples/train_transformers.py SET

The Trainer counts updates, so do not change `--batch-size`, the samples of an update on all ranks together.
"""

import argparse
import os

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import TrainingArguments, set_seed

import readers
from readers import Decode
from readers.augment import RandomHorizontalFlip, RandomResizedCrop
from readers.frameworks.transformers import LoaderTrainer, last_checkpoint
from readers.loader import ImageLoader


class Classifier(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten())
        self.network.append(nn.Linear(256, classes))

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.network(pixel_values)
        return {"loss": cross_entropy(scores, labels), "logits": scores}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("set")
    parser.add_argument("--folder", default="checkpoints", help="folder of the checkpoints")
    for name, value in {"epochs": 3, "batch-size": 64, "size": 64, "save-every": 50, "accumulate": 1}.items():
        parser.add_argument(
            f"--{name}", type=int, default=value
        )  # batch-size: samples of an update, all ranks together
    options = parser.parse_args()
    set_seed(0)
    reader, ops = readers.open(options.set, split="train"), [RandomResizedCrop(options.size), RandomHorizontalFlip()]
    share = options.batch_size // int(os.environ.get("WORLD_SIZE", "1")) // options.accumulate
    names = {"pixel_values": "image", "labels": "label"}
    loader = ImageLoader(reader, share, augment=ops, fields=names, decode=Decode(dtype=torch.float32))
    saved = {"save_strategy": "steps", "save_steps": options.save_every, "save_total_limit": 2}
    quiet = {"report_to": "none", "disable_tqdm": True, "gradient_accumulation_steps": options.accumulate}
    arguments = TrainingArguments(options.folder, num_train_epochs=options.epochs, learning_rate=0.01, **saved, **quiet)
    trainer = LoaderTrainer(Classifier(len(reader.classes)), arguments, train_loader=loader)
    trainer.train(resume_from_checkpoint=last_checkpoint(options.folder))


if __name__ == "__main__":
    main()
