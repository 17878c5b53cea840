"""Training with Composer (MosaicML), continued on any number of ranks with the batch that follows.

packer convert imagenette2 --to hdf5 -o SET
composer --nproc 2 examples/train_composer.py SET
"""

import argparse
import os

import torch
from composer import ComposerModel, Trainer
from torch import nn
from torch.nn.functional import cross_entropy

import readers
from readers.augment import RandomHorizontalFlip, RandomResizedCrop
from readers.composer import LoaderCallback
from readers.loader import ImageLoader


class Classifier(ComposerModel):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten())
        self.network.append(nn.Linear(256, classes))

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.network(batch[0])

    def loss(self, outputs: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return cross_entropy(outputs, batch[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("set")
    parser.add_argument("--folder", default="checkpoints", help="where checkpoints are kept")
    for name, value in {"epochs": 3, "batch-size": 64, "size": 64, "save-every": 50}.items():
        parser.add_argument(f"--{name}", type=int, default=value)  # batch-size: samples of a step, all ranks together
    options = parser.parse_args()
    reader, ops = readers.open(options.set, split="train"), [RandomResizedCrop(options.size), RandomHorizontalFlip()]
    share = options.batch_size // int(os.environ.get("WORLD_SIZE", "1"))
    loader = ImageLoader(reader, share, augment=ops, dtype=torch.float32)
    torch.manual_seed(0)
    model = Classifier(len(reader.classes))
    saved = {
        "save_folder": options.folder,
        "save_interval": f"{options.save_every}ba",
        "run_name": "run",
        "save_overwrite": True,
    }
    limits = {"autoresume": True, "max_duration": f"{options.epochs}ep", "callbacks": LoaderCallback(loader)}
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    trainer = Trainer(model=model, train_dataloader=loader, optimizers=optimizer, **limits, **saved)
    trainer.fit()


if __name__ == "__main__":
    main()
