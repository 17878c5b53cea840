"""Several labels per image: a column with lists of names becomes a vector of 0 and 1, the label of each sample.

    packer convert samples.jsonl --label-column tags --to hdf5 -o SET
    python examples/train_multilabel.py SET

A line of the table is {"path": "1.jpg", "tags": ["red", "round"]}. Scores ("score": 0.7) and vectors are packed and
loaded in the same way.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader

import readers
from readers.augment import Normalize, RandomHorizontalFlip, RandomResizedCrop
from readers.augment.ops import IMAGENET_MEAN, IMAGENET_STD
from readers.order import Shuffled
from readers.torch import EpochSampler, ImageDataset


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("set", help="a packed set whose labels are lists of names")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    ops = [RandomResizedCrop(64, scale=(0.5, 1.0)), RandomHorizontalFlip(), Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    reader = readers.open(options.set, split="train")
    dataset = ImageDataset(reader, ops)
    sampler = EpochSampler(Shuffled(len(reader), seed=1), dataset)
    loader = DataLoader(dataset, 16, sampler=sampler, num_workers=2)
    seen = (nn.Conv2d(3, 32, 5, 2, 2), nn.ReLU(), nn.Conv2d(32, 64, 5, 2, 2), nn.ReLU())
    model = nn.Sequential(*seen, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, len(reader.classes)))
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for epoch in range(options.epochs):
        for images, targets in loader:  # float32 [16, 3, 64, 64], [16, classes]
            scores = model(images)
            loss = binary_cross_entropy_with_logits(scores, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        right = ((scores > 0) == (targets > 0)).float().mean()
        print(f"epoch {epoch}: loss {loss.item():.3f}, {right:.0%} of the last tags are right")


if __name__ == "__main__":
    main()
