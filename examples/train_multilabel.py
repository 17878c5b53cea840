"""Several labels an image: a target made of the sample's JSON, in a plain DataLoader.

    packer convert samples.jsonl --to hdf5 -o SET
    python examples/train_multilabel.py SET --tags red round striped

A line of the table is {"path": "1.jpg", "tags": ["red", "round"]}, of which the tags become the field json.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader

import readers
from readers.augment import Normalize, RandomHorizontalFlip, RandomResizedCrop
from readers.augment.ops import IMAGENET_MEAN, IMAGENET_STD
from readers.order import Shuffled
from readers.torch import EpochSampler, ImageDataset


def target(tags: list[str], label: int, sample: dict[str, Any]) -> torch.Tensor:
    """float32 [tags]: 1 for those that the sample has."""
    return torch.tensor([float(tag in sample["json"]["tags"]) for tag in tags])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("set", help="a packed set with a field json")
    parser.add_argument("--tags", nargs="+", required=True)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    ops = [RandomResizedCrop(64, scale=(0.5, 1.0)), RandomHorizontalFlip(), Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    reader = readers.open(options.set, split="train")
    fields = {"pixels": "image", "targets": "label", "json": "json"}
    dataset = ImageDataset(reader, ops, target_transform=partial(target, options.tags), fields=fields)
    sampler = EpochSampler(Shuffled(len(reader), seed=1), dataset)
    loader = DataLoader(dataset, 16, sampler=sampler, num_workers=2, collate_fn=dataset.collate)
    seen = (nn.Conv2d(3, 32, 5, 2, 2), nn.ReLU(), nn.Conv2d(32, 64, 5, 2, 2), nn.ReLU())
    model = nn.Sequential(*seen, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, len(options.tags)))
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for epoch in range(options.epochs):
        for batch in loader:
            scores = model(batch["pixels"])
            loss = binary_cross_entropy_with_logits(scores, batch["targets"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        right = ((scores > 0) == (batch["targets"] > 0)).float().mean()
        print(f"epoch {epoch}: loss {loss.item():.3f}, {right:.0%} of the last tags are right")


if __name__ == "__main__":
    main()
