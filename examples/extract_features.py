"""Features of every sample in the set's order, and a nearest-neighbour classifier on them.

    python examples/extract_features.py images-hdf5 --output features

Writes features/train.npy and val.npy, float32 [samples, width], row i for sample i. The encoder is a placeholder with
random weights: replace it by yours.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import nn

import readers
from readers.augment import classification
from readers.loader import ImageLoader


def network(width: int = 64) -> nn.Module:
    layers = (nn.Conv2d(3, 32, 5, 2), nn.ReLU(), nn.Conv2d(32, width, 5, 2), nn.AdaptiveMaxPool2d(1), nn.Flatten())
    return nn.Sequential(*layers).eval()


@torch.no_grad()
def features_of(reader: readers.Reader, model: nn.Module, path: Path, size: int) -> torch.Tensor:
    """Features [samples, width] of unit length, written to `path` batch by batch, so that memory need not hold them."""
    ops, fields = classification(size, train=False), ("image", "index")
    loader = ImageLoader(reader, 64, augment=ops, shuffle=False, fields=fields)
    kept = None
    for images, indices in loader:  # in stored order, the fastest on any storage
        features = nn.functional.normalize(model(images)).numpy()
        if kept is None:
            kept = np.lib.format.open_memmap(path, "w+", np.float32, (len(reader), features.shape[1]))
        kept[indices.numpy()] = features
    return torch.from_numpy(np.load(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("set", help="a packed set with the splits train and val")
    parser.add_argument("--output", type=Path, default=Path("features"))
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--neighbours", type=int, default=5)
    options = parser.parse_args()
    options.output.mkdir(exist_ok=True)
    torch.manual_seed(0)
    model, known, held_out = network(), readers.open(options.set, split="train"), readers.open(options.set, split="val")
    memory = features_of(known, model, options.output / "train.npy", options.size)
    queries = features_of(held_out, model, options.output / "val.npy", options.size)
    nearest = (queries @ memory.T).topk(options.neighbours).indices
    guesses = torch.tensor(known.labels)[nearest].mode(1).values
    right = (guesses == torch.tensor(held_out.labels)).float().mean()
    print(f"{len(memory)} and {len(queries)} features of {memory.shape[1]} values; {right:.0%} right by neighbours")


if __name__ == "__main__":
    main()
