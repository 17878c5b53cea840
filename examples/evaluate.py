"""Evaluation with each sample exactly once, on any number of ranks, and a table of predictions in the set's order.

    python examples/evaluate.py images-hdf5 --split val --output predictions.csv
    torchrun --nproc-per-node 4 examples/evaluate.py images-hdf5 --split val --output predictions.csv

The model is a placeholder, the mean colour of each class: replace it by yours.
"""

import argparse
import csv
import os

import torch
import torch.distributed as dist

import readers
from readers import Decode, Ranks
from readers.augment import CenterCrop, Resize
from readers.loader import ImageLoader

OPS = [Resize(64), CenterCrop(64)]


def mean_colours(reader: readers.Reader) -> torch.Tensor:
    """The model's parameters, float32 [classes, 3]."""
    colours = torch.zeros(len(reader.classes), 3)
    whole = ImageLoader(
        reader, 64, augment=OPS, decode=Decode(dtype=torch.float32), shuffle=False, ranks=Ranks(rank=0, world_size=1)
    )
    for images, labels in whole:
        colours.index_add_(0, labels, images.mean((2, 3)))
    return colours / torch.bincount(torch.tensor(reader.labels), minlength=len(colours))[:, None].clamp(min=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("set", help="a packed set")
    parser.add_argument("--split", default="val")
    parser.add_argument("--output", default="predictions.csv")
    options = parser.parse_args()
    if "RANK" in os.environ:  # by torchrun
        dist.init_process_group("gloo")
    model = mean_colours(readers.open(options.set, split="train"))
    reader = readers.open(options.set, split=options.split)
    loader = ImageLoader(
        reader, 64, augment=OPS, decode=Decode(dtype=torch.float32), shuffle=False, fields=("image", "index")
    )
    guesses = torch.full((len(reader),), -1)
    for images, indices in loader:  # with shuffle=False an epoch has every sample once: tail="exact"
        guesses[indices] = torch.cdist(images.mean((2, 3)), model).argmin(1)
    if dist.is_initialized():
        dist.all_reduce(guesses, dist.ReduceOp.MAX)  # -1 where another rank had the sample
    if not dist.is_initialized() or dist.get_rank() == 0:
        with open(options.output, "w", newline="", encoding="utf-8") as file:
            rows = zip(reader.keys, reader.labels.tolist(), guesses.tolist(), strict=True)
            csv.writer(file).writerows([("key", "label", "guess"), *rows])
        right = int((guesses == torch.tensor(reader.labels)).sum())
        print(f"{len(reader)} samples, {int((guesses < 0).sum())} without a guess, {right} right: {options.output}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
