"""A toy training job with two planted bottlenecks, which is diagnosed, repaired, and diagnosed again.

    python examples/toy_pipeline.py [--seconds 20] [--workers N] [--train DEVICE]

The raw data are random images. Five transforms follow: conversion to a tensor, a random crop, a random mask that a
convolution dilates, a change of the colour space, a scale. The same loop is diagnosed three times:

1. "as it is": a member of the transform is the bottleneck. Fix 1 gives the same result with less work: crop first,
   dilate by boolean operations, change colours and scale in one matrix product.
2. "fix 1": loading the raw images is the bottleneck. Fix 2 uses smaller raw images.
3. "fix 1 and 2": the data keep up.

The pipeline is modelled on the article "PyTorch Model Performance Analysis and Optimization, part 8", whose figures are
printed next to the measured ones. The step is simulated, because a network on the CPU would compete with the workers
for the cores, and the ladder would show that. It takes 0.9 of the time in which the workers load the raw images of a
batch, so that the ladder has the same shape on any machine. `--train cuda` trains a small network instead. Needs torch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import nn
from torch.utils.data import DataLoader, Dataset

import packer
from cache.node import usable_cpus
from packer.tools.diagnose import Diagnosis
from packer.tools.diagnose.ladder import diagnosis_lines, verdict_lines

RAW_SIDE, SMALL_RAW_SIDE, SIDE = 1024, 192, 160
RADIUS = 10
CLASSES = 10
STEP_PER_RAW = 0.9
# RGB to YCbCr, as in JPEG (ITU-T T.871).
COLOURS = torch.tensor([[0.299, 0.587, 0.114], [-0.16874, -0.33126, 0.5], [0.5, -0.41869, -0.08131]])
SHIFT = torch.tensor([0.0, 128.0, 128.0])
# Steps/s in the article, on a GPU and four CPUs.
ARTICLE = {
    "the step alone": 3.45,
    "batch on the host": 3.33,
    "processed sample in memory": 3.23,
    "raw image in memory": 1.72,
    "as it is": 0.89,
    "fix 1, raw image in memory": 3.23,
    "fix 1": 1.28,
    "fix 1 and 2": 3.23,
}


class Compose:
    """Applies transforms one after the other; the diagnosis finds them in `transforms`."""

    def __init__(self, *transforms: Callable[[Any], Any]) -> None:
        self.transforms = list(transforms)

    def __call__(self, value: Any) -> Any:
        for transform in self.transforms:
            value = transform(value)
        return value


class FakeImages(Dataset[Any]):
    """Random images [side, side, 3], uint8, and labels."""

    def __init__(self, side: int, transform: Compose) -> None:
        self.side, self.transform = side, transform

    def __len__(self) -> int:
        return 10_000

    def raw(self, index: int) -> np.ndarray[Any, Any]:
        return np.random.default_rng(index).integers(0, 256, (self.side, self.side, 3), np.uint8)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(self.raw(index)), index % CLASSES


# --- as it is ---------------------------------------------------------------------------------------------------------
class ToTensor:
    def __call__(self, image: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(image).permute(2, 0, 1).contiguous()


class RandomCrop:
    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        top, left = (int(torch.randint(0, size - SIDE + 1, ())) for size in image.shape[1:])
        return image[:, top : top + SIDE, left : left + SIDE]


class RandomMask:
    """Blacks out one pixel in 64, and the pixels at most RADIUS steps around it."""

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        mask = self.draw(image.shape[1:])
        image = image.clone()
        image[torch.from_numpy(self.dilate(mask)).expand(3, -1, -1)] = 0
        return image

    def draw(self, shape: Sequence[int]) -> np.ndarray[Any, Any]:
        return np.random.uniform(size=shape) < 1 / 64

    def dilate(self, mask: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        steps = np.abs(np.arange(-RADIUS, RADIUS + 1))
        kernel = (steps[:, None] + steps <= RADIUS).astype(float)
        windows = sliding_window_view(np.pad(mask.astype(float), RADIUS), kernel.shape)
        return np.asarray(np.einsum("ijkl,kl->ij", windows, kernel) > 0)


class ConvertColor:
    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        image = image.to(torch.get_default_dtype())
        return torch.matmul(COLOURS, image.reshape(3, -1)).view(image.shape) + SHIFT[:, None, None]


class Scale:
    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return image / 255


# --- the repairs: the same result with less work ----------------------------------------------------------------------
class CropToTensor:
    """Crops before the copy to a tensor, so that it copies fewer pixels."""

    def __call__(self, image: np.ndarray[Any, Any]) -> torch.Tensor:
        top, left = (int(torch.randint(0, size - SIDE + 1, ())) for size in image.shape[:2])
        return torch.from_numpy(image[top : top + SIDE, left : left + SIDE]).permute(2, 0, 1).contiguous()


class QuickMask(RandomMask):
    """Draws one random byte per pixel, dilates by `or`, and masks the pixels by a product."""

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return image * torch.from_numpy(~self.dilate(self.draw(image.shape[1:])))

    def draw(self, shape: Sequence[int]) -> np.ndarray[Any, Any]:
        return np.random.randint(0, 256, shape, np.uint8) < 4

    def dilate(self, mask: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        for _ in range(RADIUS):
            dilated = mask.copy()
            for target, source in ((np.s_[1:], np.s_[:-1]), (np.s_[:-1], np.s_[1:])):
                dilated[target] |= mask[source]
                dilated[:, target] |= mask[:, source]
            mask = dilated
        return mask


class ScaledColor:
    """Changes the colour space and scales as one affine map."""

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return torch.addmm(SHIFT[:, None] / 255, COLOURS / 255, image.reshape(3, -1).float()).view(image.shape)


def slow_transform() -> Compose:
    return Compose(ToTensor(), RandomCrop(), RandomMask(), ConvertColor(), Scale())


def quick_transform() -> Compose:
    return Compose(CropToTensor(), QuickMask(), ScaledColor())


# The pipeline and its repairs: side of the raw images, and the function that makes the transform.
VARIANTS: dict[str, tuple[int, Callable[[], Compose]]] = {
    "as it is": (RAW_SIDE, slow_transform),
    "fix 1": (RAW_SIDE, quick_transform),
    "fix 1 and 2": (SMALL_RAW_SIDE, quick_transform),
}
# The table's lines from each variant's diagnosis: name in ARTICLE, and the last stage that runs.
LINES: dict[str, dict[str, str]] = {
    "as it is": {
        "the step alone": "step",
        "batch on the host": "copy",
        "processed sample in memory": "collate",
        "raw image in memory": "transform 1",
        "as it is": "storage",
    },
    "fix 1": {"fix 1, raw image in memory": "transform 1", "fix 1": "storage"},
    "fix 1 and 2": {"fix 1 and 2": "storage"},
}


# --- the loop ---------------------------------------------------------------------------------------------------------
def make_loader(variant: str, batch_size: int, workers: int, *, pin_memory: bool = False) -> DataLoader[Any]:
    """Make the loader of a variant."""
    side, transform = VARIANTS[variant]
    return DataLoader(FakeImages(side, transform()), batch_size, num_workers=workers, pin_memory=pin_memory)


def make_step(device: str) -> Callable[[Any], object]:
    """Make a training step of a small convolutional network on a device."""
    layers = [nn.Conv2d(3, 16, 5, 4), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(4)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 16, CLASSES)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)

    def step(batch: Any) -> None:
        images, labels = batch
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def simulated_seconds(batch_size: int, workers: int) -> float:
    """Seconds of a simulated step, from the least CPU time of loading a raw image."""
    images = FakeImages(RAW_SIDE, slow_transform())

    def times() -> Iterator[float]:
        for index in range(30):
            start = time.thread_time()
            images.raw(index)
            yield time.thread_time() - start

    return STEP_PER_RAW * min(times()) * batch_size / workers


def steps_per_second(variant: str, result: Diagnosis) -> dict[str, float]:
    """The table's lines from the diagnosis of a variant; without a copy, the line of the copy is the step alone."""
    rates = {rung.stage: rung.time.per_second for rung in result.rungs}
    rates |= {"storage": result.full.per_second, "copy": rates.get("copy", result.step.per_second)}
    return {line: rates[stage] for line, stage in LINES[variant].items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of each diagnosis; default 20")
    parser.add_argument("--workers", type=int, default=usable_cpus(), help="default: the number of usable CPUs")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--train", metavar="DEVICE", help="train a small network on it; default: a simulated step")
    arguments = parser.parse_args()

    how: dict[str, Any] = {"seconds": arguments.seconds}
    if arguments.train:
        how |= {"step": make_step(arguments.train), "device": arguments.train}
    else:
        how["simulate_step"] = simulated_seconds(arguments.batch_size, arguments.workers)

    measured: dict[str, float] = {}
    culprits = []
    for variant in VARIANTS:
        loader = make_loader(variant, arguments.batch_size, arguments.workers, pin_memory=bool(arguments.train))
        result = packer.diagnose(loader, **how)
        print(f"--- {variant}", *diagnosis_lines(result), *verdict_lines(result), "", sep="\n", flush=True)
        measured |= steps_per_second(variant, result)
        culprits.append(result.culprit or "none")

    print(f"{'':28s}{'article':>10s}{'here':>10s}   share of the step alone")
    for line, steps in measured.items():
        of_step = f"{ARTICLE[line] / ARTICLE['the step alone']:10.0%}{steps / measured['the step alone']:10.0%}"
        print(f"{line:28s}{ARTICLE[line]:10.2f}{steps:10.2f}{of_step}")
    print("culprits:", ", ".join(culprits))


if __name__ == "__main__":
    main()
