"""Real images: do a loader's rates in the ladder equal the rates of a plain loop over it?

    python benchmarks/diagnosis_images.py TREE [--step 100ms] [--runs 3]

TREE has a folder of JPEGs for each class. Two loaders make batches of 64 random boxes of 224 x 224, flipped, as uint8:
a torch DataLoader over a data set of Pillow images, written like torchvision's data sets, and an ImageLoader. Printed
for each loader:

images/s         the ladder's rate of the loader, with a training step that takes no time
plain loop       images/s of a loop over the loader without the tool, run before and after the diagnosis
culprit, bound   the bottleneck and the bound, with the training step --step

`pipeline.py` measures the same loaders in a plain loop. The functions that make them take no arguments, so the command
accepts them, too:

    PACKER_TREE=TREE packer diagnose benchmarks/diagnosis_images.py:folder_loader --simulate-step 100ms
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).with_name("seeds")))
import pillow_transforms as T

import packer
import readers
from readers.augment import RandomHorizontalFlip, RandomResizedCrop
from readers.loader import ImageLoader

__all__ = ["folder_loader", "image_loader"]

BATCH, SIDE, WORKERS = 64, 224, 2
_LOOP_BATCHES, _WARM_BATCHES = 24, 8


def _tree() -> Path:
    return Path(os.environ["PACKER_TREE"])


def folder_loader() -> Any:
    data = T.Folder(_tree(), T.Compose([T.RandomResizedCrop(SIDE), T.RandomHorizontalFlip(), T.PILToTensor()]))
    return DataLoader(data, BATCH, shuffle=True, num_workers=WORKERS, drop_last=True)


def image_loader() -> Any:
    reader = readers.open_folder(_tree(), None)
    return ImageLoader(reader, BATCH, augment=[RandomResizedCrop(SIDE), RandomHorizontalFlip()], threads=WORKERS)


def plain_loop(loader: Any) -> float:
    """Images/s of a loop over a loader, epoch after epoch, after a warm-up."""
    batches = (batch for _ in range(1 << 20) for batch in loader)
    for _ in range(_WARM_BATCHES):
        next(batches)
    start = time.perf_counter()
    for _ in range(_LOOP_BATCHES):
        next(batches)
    seconds = time.perf_counter() - start
    batches.close()
    return _LOOP_BATCHES * BATCH / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path)
    parser.add_argument("--step", type=lambda text: float(text.removesuffix("ms")) / 1e3, default=0.1, metavar="100ms")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of a diagnosis")
    arguments = parser.parse_args()
    os.environ["PACKER_TREE"] = str(arguments.tree)
    print("| loader | images/s, the tool | plain loop | ratio | culprit at the step | ms a step | bound |")
    print("|---|---|---|---|---|---|---|")
    for make in (folder_loader, image_loader):
        rates, looped, named, full, bounds = [], [], [], [], []
        for _ in range(arguments.runs):
            before = plain_loop(make())
            rates.append(BATCH / packer.diagnose(make(), simulate_step=0.0, seconds=arguments.seconds).full.seconds)
            looped.append((before + plain_loop(make())) / 2)
            result = packer.diagnose(make(), simulate_step=arguments.step, seconds=arguments.seconds)
            named.append(result.culprit or "nothing")
            full.append(1e3 * result.full.seconds)
            bounds.append(1e3 * result.bound)
        ratio = median(rate / loop for rate, loop in zip(rates, looped, strict=True))
        print(
            f"| {make.__name__} | {median(rates):.0f} | {median(looped):.0f} | {ratio:.2f} "
            f"| {', '.join(sorted(set(named)))} | {median(full):.1f} | {median(bounds):.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
