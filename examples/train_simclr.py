"""Self-supervised learning: two independent views of each image (SimCLR, Chen et al., 2020, arXiv:2002.05709).

    python examples/train_simclr.py images-hdf5

A sample is read once for all its views. For DINO's crops of several sizes, give a list of ops for each view:
augment=Views([wide, wide, *[small] * 6]).
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

import readers
from readers import Decode, Views
from readers.augment import ColorJitter, GaussianBlur, RandomGrayscale, RandomHorizontalFlip, RandomResizedCrop
from readers.loader import ImageLoader


def network(width: int = 64) -> nn.Module:
    """A network from images [n, 3, h, w] to vectors [n, width]."""
    seen = (nn.Conv2d(3, 32, 5, 2), nn.ReLU(), nn.Conv2d(32, width, 5, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
    return nn.Sequential(*seen, nn.Flatten(), nn.Linear(4 * width, width), nn.ReLU(), nn.Linear(width, width))


def contrastive(first: torch.Tensor, second: torch.Tensor, temperature: float = 0.2) -> torch.Tensor:
    """The NT-Xent loss: identify, among all views of the batch, the other view of the same image."""
    views = normalize(torch.cat((first, second)))
    scores = (views @ views.T / temperature).fill_diagonal_(-torch.inf)
    return cross_entropy(scores, torch.arange(len(views), device=views.device).roll(len(first)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("set", help="a packed set; labels are not used")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    crop, colours = RandomResizedCrop(options.size, scale=(0.2, 1.0)), ColorJitter(0.4, 0.4, 0.4, 0.1)
    ops = [crop, RandomHorizontalFlip(), colours, RandomGrayscale(0.2), GaussianBlur((0.1, 2.0), p=0.5)]
    reader = readers.open(options.set, split="train")
    loader = ImageLoader(reader, 32, augment=Views(ops, 2), fields=["image"], decode=Decode(dtype=torch.float32))
    optimizer = torch.optim.AdamW((model := network()).parameters(), 2e-3)
    for epoch in range(options.epochs):
        for ((first, second),) in loader:  # float32 [32, 3, size, size], twice
            loss = contrastive(model(first), model(second))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
