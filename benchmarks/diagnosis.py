"""Does `packer.diagnose` name the planted bottleneck, and predict the speed without it?

    python benchmarks/diagnosis.py --runs 10 [--cases "slow reading" "ours: slow decoding"]

Each case is a loader with one slow stage, and the same loader without that stage. A run diagnoses the first loader and
measures the second. The table shows how often the bottleneck was named, and the error of the predicted step time
(`bound`) against the measured one: median and largest.
"""

from __future__ import annotations

import argparse
import io
import itertools
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

import packer
import readers
from cache.stores import Buffer, Store, StoreOver
from readers.augment import ColorJitter, RandomHorizontalFlip, RandomResizedCrop
from readers.loader import ImageLoader
from readers.reader import Reader

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from diagnosis_loaders import BATCH, FAST, SLOW, Compose, Wait

STEP = 0.02


@dataclass(frozen=True)
class Case:
    """make, options: the arguments of a diagnosis. culprit: the bottleneck it must name. without, options_without: the
    same arguments without that bottleneck. step: returns the seconds of the simulated step, called before each run;
    None: the default seconds."""

    make: Callable[[], Any]
    culprit: str
    without: Callable[[], Any]
    options: dict[str, Any] = field(default_factory=dict)
    options_without: dict[str, Any] = field(default_factory=dict)
    step: Callable[[], float] | None = None


def slow_copy(batch: Any) -> Any:
    time.sleep(0.05)
    return batch


def free_copy(batch: Any) -> Any:
    return batch


# --- loaders of torch -------------------------------------------------------------------------------------------------
class Compute:
    """Computes for about `seconds` on an idle CPU: the same work on each call, however busy the CPUs are."""

    def __init__(self, seconds: float) -> None:
        self.rounds = max(1, round(seconds / _round_seconds()))

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        for _ in range(self.rounds):
            _work()
        return image


def _work() -> None:
    total = 0
    for number in range(2000):
        total += number * number


def _round_seconds(known: list[float] = []) -> float:  # noqa: B006  measured once
    if not known:
        start = time.process_time()
        for _ in range(1000):
            _work()
        known.append((time.process_time() - start) / 1000)
    return known[0]


class Images(Dataset[Any]):
    """first: seconds of a sample's first read in a process, like storage behind a cache. read: seconds of every
    read."""

    def __init__(self, read: Callable[[Any], Any], members: Sequence[Callable[[Any], Any]], first: float = 0.0) -> None:
        self.read, self.first, self.transform = read, first, Compose(members)
        self.seen: set[int] = set()

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.0 if index in self.seen else self.first)
        self.seen.add(index)
        return self.transform(self.read(torch.zeros(3, 64, 64))), index


def slow_collate(samples: Any) -> Any:
    time.sleep(BATCH * SLOW)
    return default_collate(samples)


def _loader(
    work: type[Wait] | type[Compute] = Wait,
    *,
    read: float = FAST,
    members: Sequence[float] = (FAST, FAST, FAST),
    first: float = 0.0,
    workers: int = 2,
    collate: Callable[[Any], Any] | None = None,
) -> Callable[[], Any]:
    def make() -> Any:
        data = Images(work(read), [work(seconds) for seconds in members], first)
        return DataLoader(data, batch_size=BATCH, num_workers=workers, collate_fn=collate)

    return make


def foreign_cases() -> dict[str, Case]:
    """Cases of a torch DataLoader. Slow stages wait, except in the cases that compute."""
    fast, copies = _loader(), {"copy": free_copy}
    cases = {
        "slow storage behind a cache": Case(_loader(first=SLOW), "storage", fast),
        "slow reading": Case(_loader(read=SLOW), "read", _loader(read=0.0)),
        "reading that computes": Case(_loader(Compute, read=SLOW), "read", _loader(Compute, read=0.0)),
    }
    for n, (name, work) in itertools.product(range(3), (("slow", Wait), ("computing", Compute))):
        slow, free = (tuple(each if i == n else FAST for i in range(3)) for each in (SLOW, 0.0))
        cases[f"{name} member {n + 1} of 3"] = Case(
            _loader(work, members=slow), f"transform {n + 1}", _loader(work, members=free)
        )
    return cases | {
        "slow collate": Case(_loader(collate=slow_collate), "collate", fast),
        "slow copy": Case(fast, "copy", fast, {"copy": slow_copy}, copies),
        "a worker too few": Case(_loader(read=0.004), "workers", _loader(read=0.004, workers=3)),
        "slow training": Case(fast, "", fast, {"simulate_step": 0.1}, {"simulate_step": 0.1}),
        "nothing": Case(fast, "", fast),
    }


# --- our loader -------------------------------------------------------------------------------------------------------
class SlowStore(StoreOver):
    """Waits at each read of an extent, or only at the first, like storage whose files are not in memory yet."""

    def __init__(self, source: Store, seconds: float, *, first: bool) -> None:
        self.source, self.seconds, self.first = source, seconds, first
        self.seen: set[int] = set()

    def read_one(self, row: int, shard: int, offset: int, length: int) -> Buffer:
        if not (self.first and row in self.seen):
            time.sleep(self.seconds)
        self.seen.add(row)
        return self.source.read_one(row, shard, offset, length)


_LEAST_SAMPLES = 4000


def our_cases(folder: Path) -> dict[str, Case]:
    """Cases of an ImageLoader over images that are made in `folder`."""
    small, large = folder / "small", folder / "large"
    _make_images(small, (240, 320), 4000)
    _make_images(large, (2400, 3200), 32)
    crop = (RandomResizedCrop(96), RandomHorizontalFlip())
    heavy = (*crop, ColorJitter(0.4, 0.4, 0.4, 0.1))

    def make(tree: Path = small, ops: Any = crop, wait: float = 0.0, **options: Any) -> Callable[[], Any]:
        def make() -> ImageLoader:
            reader: Reader = readers.open_folder(tree, None)
            if wait:
                reader = Reader(reader.table, SlowStore(reader.store, wait, first=options.get("first", False)))
            if options.get("decoded"):
                pixels = readers.cached(reader, keep="decoded", backend="memfd")
                pixels.prefill()
                reader = pixels
            if len(reader) < _LEAST_SAMPLES:  # so many that the ends of epochs do not count
                reader = reader.select(indices=[i % len(reader) for i in range(_LEAST_SAMPLES)])
            batch, threads = options.get("batch", BATCH), options.get("threads", 2)
            return ImageLoader(reader, batch, augment=list(ops), threads=threads, seed=1)

        return make

    fast = make()
    computing, waiting = make(threads=1, batch=32), make(threads=1, batch=32, wait=FAST)
    return {
        "ours: slow storage": Case(make(wait=SLOW, first=True), "storage", fast),
        "ours: slow reading": Case(make(wait=SLOW), "read", fast),
        "ours: slow decoding": Case(make(large), "decode", make(large, decoded=True)),
        "ours: slow augmenting": Case(make(ops=heavy, batch=48), "augment", make(batch=48)),
        "ours: a thread too few": Case(
            waiting, "workers", make(batch=32, wait=FAST), step=lambda: _alone(waiting()) / 1.5
        ),
        "ours: a thread too few, computing": Case(
            computing, "workers", make(batch=32), step=lambda: _alone(computing()) / 1.5
        ),
        "ours: slow copy": Case(fast, "copy", fast, {"copy": slow_copy}, {"copy": free_copy}),
        "ours: slow training": Case(fast, "", fast, {"simulate_step": 0.1}, {"simulate_step": 0.1}),
        "ours: nothing": Case(fast, "", fast),
    }


def _make_images(tree: Path, size: tuple[int, int], count: int) -> None:
    """Write copies of a few JPEGs of smooth noise, in one class."""
    from PIL import Image

    place, draw = tree / "class", np.random.default_rng(0)
    place.mkdir(parents=True)
    encoded = []
    for _ in range(4):
        memory = io.BytesIO()
        coarse = draw.integers(0, 256, (size[0] // 8, size[1] // 8, 3), np.uint8)
        Image.fromarray(coarse).resize(size[::-1], Image.Resampling.BICUBIC).save(memory, "JPEG", quality=92)
        encoded.append(memory.getvalue())
    for number in range(count):
        (place / f"{number:05d}.jpg").write_bytes(encoded[number % len(encoded)])


def _alone(loader: ImageLoader) -> float:
    """Seconds per batch of the loader alone, without a training step."""
    batches = iter(loader)
    for _ in range(8):
        next(batches)
    start = time.perf_counter()
    for _ in range(24):
        next(batches)
    return (time.perf_counter() - start) / 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of a diagnosis")
    parser.add_argument("--cases", nargs="*", metavar="NAME", help="default: all")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than CPUs
    with tempfile.TemporaryDirectory() as folder:
        cases = foreign_cases() | our_cases(Path(folder))
        if unknown := set(arguments.cases or ()) - set(cases):
            parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(cases)}")
        print("| planted | named | other names | ms per step | predicted | measured | error: median | largest | s |")
        print("|---|---|---|---|---|---|---|---|---|")
        for name in arguments.cases or cases:
            print(f"| {name} | {_row(cases[name], arguments.runs, arguments.seconds)} |", flush=True)


def _row(case: Case, runs: int, seconds: float) -> str:
    culprits, steps, bounds, without, taken = [], [], [], [], []
    for _ in range(runs):
        step = STEP if case.step is None else case.step()
        start = time.perf_counter()
        result = packer.diagnose(case.make(), seconds=seconds, **{"simulate_step": step, **case.options})
        taken.append(time.perf_counter() - start)
        mended = packer.diagnose(case.without(), seconds=seconds / 2, **{"simulate_step": step, **case.options_without})
        culprits.append(result.culprit)
        steps.append(result.full.seconds)
        bounds.append(result.bound)
        without.append(mended.full.seconds)
    errors = [abs(bound / real - 1) for bound, real in zip(bounds, without, strict=True)]
    others = ", ".join(sorted({each or "nothing" for each in culprits if each != case.culprit}))
    times = " | ".join(f"{1e3 * statistics.median(each):.1f}" for each in (steps, bounds, without))
    return (
        f"{culprits.count(case.culprit)} of {runs} | {others} | {times} | {statistics.median(errors):.0%} | "
        f"{max(errors):.0%} | {statistics.median(taken):.0f}"
    )


if __name__ == "__main__":
    main()
