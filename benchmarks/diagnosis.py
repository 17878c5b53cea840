"""Does `readers.diagnose` name the culprit that was planted, and predict what is gained without it?

    python benchmarks/diagnosis.py --runs 10

Each case is a torch DataLoader with one slow stage, which waits and does not compute, and the same loader without it. A
run diagnoses the first and measures the second. The table says how often the culprit was named, and by how much the
predicted time of a step (`bound`) is off the measured one: median and largest error.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

import readers

FAST, SLOW, STEP, BATCH = 0.0005, 0.008, 0.02, 8


class Compose:
    def __init__(self, seconds: tuple[float, ...]) -> None:
        self.transforms = [Wait(each) for each in seconds]

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        for member in self.transforms:
            image = member(image)
        return image


class Wait:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return image


class Images(Dataset[Any]):
    """first: seconds of the first read of a sample in a process, as of storage behind a cache; read: of every read."""

    def __init__(self, read: float = FAST, members: tuple[float, ...] = (FAST, FAST, FAST), first: float = 0.0) -> None:
        self.read, self.first, self.transform = read, first, Compose(members)
        self.seen: set[int] = set()

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.read + (0.0 if index in self.seen else self.first))
        self.seen.add(index)
        return self.transform(torch.zeros(3, 64, 64)), index


def loader(data: Images | None = None, workers: int = 2, collate: Callable[[Any], Any] | None = None) -> Any:
    return DataLoader(data or Images(), batch_size=BATCH, num_workers=workers, collate_fn=collate)


def slow_collate(samples: Any) -> Any:
    time.sleep(BATCH * SLOW)
    return default_collate(samples)


def slow_copy(batch: Any) -> Any:
    time.sleep(0.05)
    return batch


def free_copy(batch: Any) -> Any:
    return batch


# Name: (the loader, options, the culprit, the loader and the options without it).
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any], str, Callable[[], Any], dict[str, Any]]] = {
    "slow storage": (lambda: loader(Images(first=SLOW)), {}, "storage", loader, {}),
    "slow reading": (lambda: loader(Images(read=SLOW)), {}, "read", lambda: loader(Images(read=0.0)), {}),
    **{
        f"slow member {n + 1} of 3": (
            lambda n=n: loader(Images(members=tuple(SLOW if i == n else FAST for i in range(3)))),
            {},
            f"transform {n + 1}",
            lambda n=n: loader(Images(members=tuple(0.0 if i == n else FAST for i in range(3)))),
            {},
        )
        for n in range(3)
    },
    "slow collate": (lambda: loader(collate=slow_collate), {}, "collate", loader, {}),
    "slow copy": (loader, {"copy": slow_copy}, "copy", loader, {"copy": free_copy}),
    "a worker too few": (
        lambda: loader(Images(read=0.004)), {}, "workers", lambda: loader(Images(read=0.004), workers=3), {},
    ),
    "slow training": (loader, {"simulate_step": 0.1}, "", loader, {"simulate_step": 0.1}),
    "nothing": (loader, {}, "", loader, {}),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=8.0, help="of a diagnosis")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    arguments = parser.parse_args()
    print("| planted | named | else | ms a step | predicted | measured | error: median | largest | s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in arguments.cases:
        make, options, culprit, make_without, options_without = CASES[name]
        found, steps, bounds, without, seconds = [], [], [], [], []
        for _ in range(arguments.runs):
            start = time.perf_counter()
            result = readers.diagnose(make(), seconds=arguments.seconds, **{"simulate_step": STEP, **options})
            seconds.append(time.perf_counter() - start)
            mended = readers.diagnose(
                make_without(), seconds=arguments.seconds / 2, **{"simulate_step": STEP, **options_without}
            )
            found.append(result.culprit)
            steps.append(result.full.seconds)
            bounds.append(result.bound)
            without.append(mended.full.seconds)
        errors = [abs(bound / real - 1) for bound, real in zip(bounds, without, strict=True)]
        others = ", ".join(sorted({each or "nothing" for each in found if each != culprit}))
        times = " | ".join(f"{1e3 * statistics.median(each):.1f}" for each in (steps, bounds, without))
        print(
            f"| {name} | {found.count(culprit)} of {arguments.runs} | {others} | {times} | "
            f"{statistics.median(errors):.0%} | {max(errors):.0%} | {statistics.median(seconds):.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
