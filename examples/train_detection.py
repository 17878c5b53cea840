"""Object detection: boxes and their labels, which follow the crops and flips of their images.

    packer convert samples.jsonl --to hdf5 --field boxes:boxes=boxes --field box_labels:array=labels -o SET
    python examples/train_detection.py SET --classes 80

A line of the table is {"path": "1.jpg", "boxes": [[x0, y0, x1, y1], …], "labels": [3, …]}. As in CenterNet (Zhou et
al., 2019), the grid cell that contains the centre of a box predicts its class and its sides.
"""

import argparse

import torch
from torch import nn

import readers
from readers.augment import RandomHorizontalFlip, RandomResizedCrop
from readers.loader import Decode, FieldOptions, ImageLoader

SIZE, CELL = 128, 8  # pixels


def network(outputs: int) -> nn.Module:
    layers = [(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in ((3, 16), (16, 32), (32, 64))]
    return nn.Sequential(*(part for layer in layers for part in layer), nn.Conv2d(64, outputs, 3, 1, 1))


def loss_of(outputs: torch.Tensor, boxes: list[torch.Tensor], labels: list[torch.Tensor]) -> torch.Tensor:
    """outputs: [n, classes + 4, h, w], scores of classes, then x0, y0, x1, y1 in cells from the middle of a cell."""
    classes, targets = outputs.shape[1] - 4, torch.zeros_like(outputs[:, :-4])
    image = torch.cat([torch.full((len(some),), n) for n, some in enumerate(boxes)])
    corners, kind = torch.cat(boxes) / CELL, torch.cat(labels)
    x, y = ((corners[:, :2] + corners[:, 2:]) / 2).long().T.clamp(max=outputs.shape[-1] - 1)
    targets[image, kind, y, x] = 1
    offsets = corners - torch.stack((x, y, x, y), 1) - 0.5
    shape = nn.functional.l1_loss(outputs[image, classes:, y, x], offsets) if len(kind) else 0
    return nn.BCEWithLogitsLoss(pos_weight=torch.tensor(20.0))(outputs[:, :-4], targets) + 0.1 * shape


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("set", help="a packed set with fields boxes and box_labels")
    parser.add_argument("--classes", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    ops, decode = [RandomResizedCrop(SIZE, scale=(0.5, 1.0)), RandomHorizontalFlip()], Decode(dtype=torch.float32)
    fields = FieldOptions(names=("image", "boxes", "box_labels"), min_visible=0.3)
    loader = ImageLoader(readers.open(options.set, split="train"), 16, augment=ops, fields=fields, decode=decode)
    optimizer = torch.optim.AdamW((model := network(options.classes + 4)).parameters(), 2e-3)
    for epoch in range(options.epochs):
        for images, boxes, labels in loader:  # float32 [n, 3, 128, 128]; lists of float32 [k, 4] and int64 [k]
            loss = loss_of(model(images), boxes, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
