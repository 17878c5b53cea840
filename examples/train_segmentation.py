"""Semantic segmentation: masks that follow the crops, flips and rotations of their images.

    packer convert samples.csv --to hdf5 --field mask:mask=mask_path -o SET
    python examples/train_segmentation.py SET --classes 21

The table has columns of image files and mask files; pixels of masks are class numbers, or 255 for no class.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import readers
from readers.augment import ColorJitter, Normalize, RandomHorizontalFlip, RandomResizedCrop, RandomRotation
from readers.augment.ops import IMAGENET_MEAN, IMAGENET_STD
from readers.loader import FieldOptions, ImageLoader

IGNORED = 255


def network(classes: int, width: int = 16) -> nn.Module:
    """A network from images [n, 3, h, w] to scores [n, classes, h, w]; sides must be multiples of 4."""
    shapes = [(3, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2), (4 * width, 2 * width, 1)]
    layers = [(nn.Conv2d(a, b, 3, step, 1), nn.BatchNorm2d(b), nn.ReLU()) for a, b, step in shapes]
    up = nn.Upsample(scale_factor=4, mode="bilinear")
    return nn.Sequential(*(part for layer in layers for part in layer), up, nn.Conv2d(2 * width, classes, 3, 1, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("set", help="a packed set with a field mask")
    parser.add_argument("--classes", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--size", type=int, default=128, help="a multiple of 4")
    options = parser.parse_args()
    crop, turn = RandomResizedCrop(options.size, scale=(0.25, 1.0)), RandomRotation(15)
    ops = [crop, RandomHorizontalFlip(), turn, ColorJitter(0.2, 0.2), Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    rule = FieldOptions(names=("image", "mask"), mask_fill=IGNORED)  # for pixels outside the rotated image
    reader = readers.open(options.set, split="train")
    loader = ImageLoader(reader, 16, augment=ops, fields=rule)
    optimizer = torch.optim.AdamW((model := network(options.classes)).parameters(), 2e-3)
    for epoch in range(options.epochs):
        right = known = 0
        for images, masks in loader:  # float32 [n, 3, size, size], uint8 [n, size, size]
            scores, targets = model(images), masks.long()
            loss = cross_entropy(scores, targets, ignore_index=IGNORED)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right, known = right + int((scores.argmax(1) == targets).sum()), known + int((targets != IGNORED).sum())
        print(f"epoch {epoch}: {right / max(known, 1):.1%} of the pixels are right, loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
