"""Classes of very different sizes: draw every class equally often, or samples by weights.

    python examples/train_balanced.py images-hdf5
    python examples/train_balanced.py images-hdf5 --power 0.5

By default no sample of a class repeats before all others of the class were drawn. With --power P a class is drawn in
proportion to size ** P: 1 is the distribution of the set, 0 draws all classes equally often.
"""

import argparse

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import readers
from readers import Decode
from readers.augment import RandomHorizontalFlip, RandomResizedCrop
from readers.loader import ImageLoader
from readers.order import ClassBalanced, Weighted


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("set", help="a packed set with classes")
    parser.add_argument("--power", type=float, default=0.0)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    reader = readers.open(options.set, split="train")
    sizes = np.bincount(reader.labels, minlength=len(reader.classes))
    if options.power:
        order = Weighted(sizes[reader.labels] ** (options.power - 1), seed=1)  # with replacement
    else:
        order = ClassBalanced(reader.labels, seed=1)
    ops = [RandomResizedCrop(64, scale=(0.5, 1.0)), RandomHorizontalFlip()]
    loader = ImageLoader(reader, 32, order=order, augment=ops, decode=Decode(dtype=torch.float32))
    seen = (nn.Conv2d(3, 32, 5, 2), nn.ReLU(), nn.Conv2d(32, 64, 5, 2), nn.ReLU(), nn.AdaptiveMaxPool2d(1))
    model = nn.Sequential(*seen, nn.Flatten(), nn.Linear(64, len(reader.classes)))
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    print(f"samples per class: {sizes.tolist()}")
    for epoch in range(options.epochs):
        drawn = torch.zeros(len(reader.classes), dtype=torch.int64)
        for images, labels in loader:
            drawn += torch.bincount(labels, minlength=len(drawn))
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}, drawn per class: {drawn.tolist()}")


if __name__ == "__main__":
    main()
