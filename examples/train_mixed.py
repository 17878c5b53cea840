"""Several sets in fixed shares: half of every epoch from the first, half from the second, whatever their sizes.

    python examples/train_mixed.py photos-hdf5 drawings-tar --weights 0.5 0.5

Classes of the same name are merged. Nothing is packed again, and the sets may have different formats and locations.
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import readers
from readers import Decode, Ranks
from readers.augment import RandomHorizontalFlip, RandomResizedCrop
from readers.loader import ImageLoader
from readers.order import Mixed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sets", nargs="+", help="packed sets")
    parser.add_argument("--weights", type=float, nargs="+", help="shares of the sets; default: their sizes")
    parser.add_argument("--samples", type=int, help="samples of an epoch; default: all")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    parts = [readers.open(name, split="train") for name in options.sets]
    reader, sizes = readers.concat(parts), [len(part) for part in parts]
    order = Mixed(sizes, weights=options.weights, samples=options.samples, seed=1)
    ops, fields = [RandomResizedCrop(64, scale=(0.5, 1.0)), RandomHorizontalFlip()], ("image", "label", "index")
    loader = ImageLoader(
        reader,
        32,
        order=order,
        augment=ops,
        fields=fields,
        decode=Decode(dtype=torch.float32),
        ranks=Ranks(tail="exact"),
    )
    seen = (nn.Conv2d(3, 32, 5, 2), nn.ReLU(), nn.Conv2d(32, 64, 5, 2), nn.ReLU(), nn.AdaptiveMaxPool2d(1))
    model = nn.Sequential(*seen, nn.Flatten(), nn.Linear(64, len(reader.classes)))
    optimizer, ends = torch.optim.AdamW(model.parameters(), 2e-3), torch.tensor(sizes).cumsum(0)
    for epoch in range(options.epochs):
        counts = torch.zeros(len(sizes), dtype=torch.int64)
        for images, labels, indices in loader:  # indices count through the first set, then the second, …
            counts += torch.bincount(torch.searchsorted(ends, indices, right=True), minlength=len(sizes))
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}, samples per set: {counts.tolist()}")


if __name__ == "__main__":
    main()
