"""Does advice of `readers.diagnose` bring what it predicts?

    python benchmarks/diagnosis_apply.py --runs 5

Each case is a loader with one planted culprit. A run diagnoses it, makes the change that the case is about, and
compares the time of a step that was predicted with the one that is measured then, for as many samples as before.
--scale makes all planted times longer, for a machine that others use, too. The images of "decoding" are made first, in
--work, which must not be in memory: "slow files" stages them there.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from slow_source import SlowSource
from torch.utils.data import DataLoader, Dataset

import packer
import readers
from cache.stores import Buffer, StoreOver
from readers.augment import CenterCrop, RandomHorizontalFlip, RandomResizedCrop, Resize
from readers.diagnosis.text import diagnosis_lines, findings_lines
from readers.loader import ImageLoader
from readers.torch import ImageDataset

STEP, BATCH, IMAGES = 0.02, 8, 256
scale = 1.0


class Waits(Dataset[Any]):
    """Each sample takes 5 ms."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.005 * scale)
        return torch.zeros(3, 64, 64), index


class Normalized(Dataset[Any]):
    """8-bit values, normalised."""

    def __init__(self) -> None:
        pixels = np.random.default_rng(1).integers(0, 256, (64, 3, 64, 64)).astype(np.float32)
        self.images = (torch.from_numpy(pixels) / 255 - 0.45) / 0.22

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index % 64], index


class Slow(StoreOver):
    """Waits before each read of a sample."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def read_one(self, row: int, shard: int, offset: int, length: int) -> Buffer:
        time.sleep(0.006 * scale)
        return self.source.read_one(row, shard, offset, length)

    def read(self, extents: Any) -> list[Buffer]:
        time.sleep(0.006 * scale * len(extents.row))
        return self.source.read(extents)


def slow_reader(path: Path) -> readers.Reader:
    reader = readers.open(path, "train")
    return readers.Reader(reader.table, Slow(reader.store))


def per_byte(batch: Any) -> Any:
    """A copy of 10 MB/s."""
    time.sleep(scale * sum(leaf.nbytes for leaf in batch) / 10e6)
    return batch


SMALL = [Resize(32), CenterCrop(32)]
UNSCALED: dict[str, Any] = {"simulate_step": STEP}  # where the work is real
CROP = [RandomResizedCrop(224), RandomHorizontalFlip()]


def image_loader(path: Path) -> ImageLoader:
    return ImageLoader(readers.open(path, "train"), 32, augment=CROP)


def fixed_copy(batch: Any) -> Any:
    """30 ms, however small the batch is."""
    time.sleep(0.03 * scale)
    return batch


def by_sample(batch: Any) -> None:
    """A step of 20 ms for a batch of 8."""
    time.sleep(STEP * scale * len(batch[1]) / BATCH)


def slow_files(small: Path) -> SlowSource:
    """A batch takes 50 ms to read."""
    batch_bytes = BATCH * float(np.mean(readers.open(small, "train").sizes()))
    return SlowSource(small, batch_bytes / (0.05 * scale), latency_seconds=0.0)


@dataclass(frozen=True)
class Case:
    """make: the loader, of the sets "small" and "large". advice: the id of what is applied. options: of the diagnosis.

    around: where the loader runs, of the set "small".
    """

    make: Callable[[Path, Path], Any]
    advice: str
    options: dict[str, Any] = field(default_factory=dict)
    around: Callable[[Path], AbstractContextManager[Any]] = lambda small: nullcontext()


CASES = {
    "a worker too few": Case(lambda *_: DataLoader(Waits(), BATCH, num_workers=1), "workers"),
    "no workers": Case(lambda *_: DataLoader(Waits(), BATCH), "workers"),
    "slow reading, DataLoader": Case(
        lambda small, _: DataLoader(ImageDataset(slow_reader(small), SMALL), BATCH, num_workers=1), "cache"
    ),
    "slow reading, ImageLoader": Case(
        lambda small, _: ImageLoader(slow_reader(small), BATCH, augment=SMALL, threads=2), "cache"
    ),
    "slow files": Case(
        lambda small, _: ImageLoader(readers.open(small, "train"), BATCH, augment=SMALL, threads=2), "stage",
        around=slow_files,
    ),
    "slow copy": Case(lambda *_: DataLoader(Normalized(), BATCH, num_workers=2), "uint8", {"copy": per_byte}),
    "small batches": Case(
        lambda *_: DataLoader(Normalized(), BATCH, num_workers=2), "batch-size",
        {"copy": fixed_copy, "step": by_sample, "simulate_step": None},
    ),
    "decoding, pixels": Case(lambda _, large: image_loader(large), "decoded", UNSCALED),
    "decoding, smaller": Case(lambda _, large: image_loader(large), "shrink", UNSCALED),
    "decoding, DataLoader": Case(
        lambda _, large: DataLoader(ImageDataset(readers.open(large, "train"), CROP), 32, num_workers=2), "decoded",
        UNSCALED,
    ),
}  # fmt: skip


def make_sets(folder: Path) -> tuple[Path, Path]:
    """Packed sets of small and of large photographs, such as they compress."""
    made = []
    for name, size in (("small", (48, 40)), ("large", (800, 600))):
        for number in range(IMAGES):
            file = folder / name / "train" / f"c{number % 4}" / f"{number}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            coarse = np.random.default_rng(number).integers(0, 256, (size[1] // 8, size[0] // 8, 3), dtype=np.uint8)
            Image.fromarray(coarse).resize(size).save(file, quality=90)
        packer.convert(folder / name, "hdf5", folder / f"{name}-packed")
        made.append(folder / f"{name}-packed")
    return made[0], made[1]


def main() -> None:
    global scale
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="of a diagnosis, and of the changes")
    parser.add_argument("--scale", type=float, default=1.0, help="of the planted times")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--verbose", action="store_true", help="also print the diagnoses")
    parser.add_argument("--work", type=Path, help="where images are made; default: a temporary directory")
    arguments = parser.parse_args()
    scale = arguments.scale
    warnings.filterwarnings("ignore", "This DataLoader will create")
    print("| planted | change | applied | ms a step | predicted | measured | error: median | largest |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        sets = make_sets(Path(folder))
        for name in arguments.cases:
            print(f"| {name} | {_row(CASES[name], sets, arguments)} |", flush=True)


def _row(case: Case, sets: tuple[Path, Path], arguments: argparse.Namespace) -> str:
    found = []
    for _ in range(arguments.runs):
        given = {"simulate_step": STEP * scale, **case.options}
        with case.around(sets[0]):
            result = readers.diagnose(case.make(*sets), seconds=arguments.seconds, apply=(case.advice,), **given)
        found += [each for each in result.applied if each.measured is not None]
        if arguments.verbose:
            print("\n".join(diagnosis_lines(result) + findings_lines(result)))
    if not found:
        return f"{case.advice} | 0 of {arguments.runs} | | | | |"
    errors = [abs(each.error) for each in found if each.error is not None]
    columns = ([each.before for each in found], [each.predicted for each in found], [each.measured for each in found])
    known = [[1e3 * each for each in column if each is not None] for column in columns]
    times = " | ".join(f"{statistics.median(column):.1f}" if column else "–" for column in known)
    off = f"{statistics.median(errors):.0%} | {max(errors):.0%}" if errors else "– | –"
    return f"{found[0].change.what} | {len(found)} of {arguments.runs} | {times} | {off}"


if __name__ == "__main__":
    main()
