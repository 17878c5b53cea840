"""Loader: the cost of `ImageLoader` without decoding, its memory over epochs, and the time to its first batch.

    python benchmarks/loader_overhead.py --tree TREE --work DIR [--rounds 3] …

A stub replaces decoding and returns an array of the final size, so nothing is resized either; the rest is the order,
the plan, reading a small sample, copying it to its place in the batch and the hand-over between threads. Sets that are
missing below --work are made first (0.8 GB for ten million samples).
"""

from __future__ import annotations

import argparse
import functools
import io
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import pipeline_sets
from harness import Benchmark, Contender, contender, main, make_once, slug
from index_set import build_index
from machine import Clock, list_tree, prime, pss_of_tree, warm
from report import Claim, Column

__all__ = ["BENCHMARK", "measure"]

IMPORTS = "torch readers.loader readers.augment.cpu"
SMALL, MANY = "small", "many"
SMALL_SAMPLES, SMALL_SIDE, SMALL_BATCH = 200_000, 64, 256
OVERHEAD_IMAGES = 51_200
EARLY, LATE = (2, 3, 4), (8, 9, 10)
_PRIME_BYTES = 1 << 28


def _loader(folder: Path, arguments: argparse.Namespace, size: int, **options: Any) -> Any:
    """Open a set, and return a function that makes a loader over it."""
    import readers
    from readers.augment import RandomHorizontalFlip, RandomResizedCrop
    from readers.loader import ImageLoader

    reader = readers.open(folder)
    flip = [RandomHorizontalFlip()] if options.pop("flip", True) else []
    options = {"batch_size": 64, "threads": arguments.workers, "seed": 1, **options}
    return lambda: ImageLoader(reader, augment=[RandomResizedCrop(size), *flip], **options)


def _overhead(arguments: argparse.Namespace, threads: int, flip: bool, every: int = 0) -> dict[str, float]:
    import numpy as np

    from readers import Decode
    from readers.augment import cpu

    pixels = np.zeros((SMALL_SIDE, SMALL_SIDE, 3), np.uint8)
    cpu.decode_image = lambda *ignored, **more: pixels
    options = {"batch_size": SMALL_BATCH, "threads": threads, "flip": flip, "decode": Decode(decoder="cpu")}
    make = _loader(_folder(arguments, SMALL), arguments, SMALL_SIDE, **options)
    loader = make()
    return _timed(_with_metrics(loader, every) if every else iter(loader))


def _with_metrics(loader: Any, every: int) -> Any:
    """The batches, with a call of the loader's `metrics` every `every` batches, as in callbacks of trainers."""
    for number, batch in enumerate(loader):
        if number % every == 0:
            loader.metrics()
        yield batch


def _timed(batches: Any) -> dict[str, float]:
    for _ in range(8):
        next(batches)
    clock, count = Clock(), 0
    while count < OVERHEAD_IMAGES:
        count += len(next(batches)[0])
    figures = clock.figures(count)
    return {"us": 1e6 / figures["images_s"], "cpu_us": figures["cpu_us"]}


OVERHEAD = "ours: nothing decoded, 1 thread"
for _name, _threads, _flip, _every, _note in (
    (OVERHEAD, 1, True, 0, f"{SMALL_SIDE} x {SMALL_SIDE}, half of them flipped"),
    (f"{OVERHEAD}, no flip", 1, False, 0, ""),
    (f"{OVERHEAD}, metrics() every 50 batches", 1, True, 50, "as trainers log by default"),
    ("ours: nothing decoded, 2 threads", 2, True, 0, ""),
):
    contender(_name, imports=IMPORTS, needs=[SMALL], note=_note)(
        functools.partial(_overhead, threads=_threads, flip=_flip, every=_every)
    )


@contender("ours: nothing decoded, 1 thread, no clocks", imports=IMPORTS, needs=[SMALL], note="stats() switched off")
def overhead_no_clocks(arguments: argparse.Namespace) -> dict[str, float]:
    from readers.loader.stats import LoopTimers, ThreadClock

    for kind, names in (
        (ThreadClock, ("start", "stop", "start_rows", "stop_rows", "begin_read", "wait", "lap")),
        (LoopTimers, ("ask", "get", "hand_out", "fill")),
    ):
        for name in names:
            setattr(kind, name, lambda *ignored, **more: None)
    ThreadClock.end_read = lambda self, data: 0.0  # type: ignore[method-assign]
    return _overhead(arguments, 1, True)


class _Ready:
    """A data set that always returns the same tensor."""

    def __init__(self) -> None:
        import torch

        self.image = torch.zeros((3, SMALL_SIDE, SMALL_SIDE), dtype=torch.uint8)

    def __len__(self) -> int:
        return SMALL_SAMPLES

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.image, index


@contender(
    "torch DataLoader, 1 worker", imports="torch.utils.data", needs=[], note="the same finished tensor each time"
)
def data_loader(arguments: argparse.Namespace) -> dict[str, float]:
    from torch.utils.data import DataLoader

    return _timed(iter(DataLoader(_Ready(), SMALL_BATCH, shuffle=True, num_workers=1)))


def first_batch(arguments: argparse.Namespace, of: str) -> dict[str, float]:
    before = pss_of_tree()
    make = _loader(_folder(arguments, of), arguments, 224)
    started = time.perf_counter()
    next(iter(make()))
    return {"first_s": time.perf_counter() - started, "more_mb": pss_of_tree() - before}


FIRST, FIRST_MANY = "ours: first batch", "ours: first batch of ten million samples"
for _name, _of, _note in (
    (FIRST, pipeline_sets.HDF5, "64 images, decoded to 224; the set is open"),
    (FIRST_MANY, MANY, "as above; all samples are one image; it adds mapped pages of the index"),
):
    contender(_name, imports=IMPORTS, needs=[_of], note=_note)(functools.partial(first_batch, of=_of))


MEMORY = f"ours: {LATE[-1]} epochs"


@contender(MEMORY, imports=IMPORTS, needs=[pipeline_sets.HDF5], note="in the middle of an epoch; images decoded to 224")
def memory(arguments: argparse.Namespace) -> dict[str, float]:
    loader = _loader(_folder(arguments, pipeline_sets.HDF5), arguments, 224)()
    figures, middle = {}, len(loader) // 2
    for epoch in range(1, LATE[-1] + 1):
        for step, _ in enumerate(loader):
            if step == middle:
                figures[epoch] = pss_of_tree()
    # The memory varies by some batches from moment to moment, so each figure is the median of three epochs.
    early, late = (statistics.median(figures[epoch] for epoch in epochs) for epochs in (EARLY, LATE))
    return {"early_mb": early, "late_mb": late, "growth_mb": late - early}


def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    prime(_PRIME_BYTES)
    figures: dict[str, Any] = chosen.function(arguments)
    return figures


def _folder(arguments: argparse.Namespace, name: str) -> Path:
    if name == pipeline_sets.HDF5:
        return Path(arguments.work) / slug(name)
    return Path(arguments.work) / f"{name}-{arguments.samples if name == MANY else SMALL_SAMPLES}"


def before(chosen: Contender, arguments: argparse.Namespace) -> None:
    """Make the row's set, and bring it into the page cache."""
    for name in chosen.options["needs"]:
        folder = _folder(arguments, name)
        if name == pipeline_sets.HDF5:
            pipeline_sets.make(name, arguments.tree, arguments.work, {"main": sys.executable})
        else:
            make_once(folder, lambda unfinished, name=name: build_index(unfinished, *_content(name, arguments)))
        warm([folder])


def _content(name: str, arguments: argparse.Namespace) -> tuple[int, bytes]:
    """The number of samples, and the content of each."""
    path = list_tree(arguments.tree)[0][0]
    if name == MANY:
        return arguments.samples, Path(path).read_bytes()
    from PIL import Image

    memory = io.BytesIO()
    Image.open(path).convert("RGB").resize((SMALL_SIDE, SMALL_SIDE)).save(memory, "JPEG")
    return SMALL_SAMPLES, memory.getvalue()


BENCHMARK = Benchmark(
    title="ImageLoader apart from decoding",
    columns=(
        Column("us", "µs/image (min–max)", "{:,.1f}"),
        Column("cpu_us", "CPU µs/image", "{:,.1f}"),
        Column("first_s", "first batch s", "{:.3f}"),
        Column("more_mb", "added PSS MB", "{:,.1f}"),
        Column("early_mb", "PSS MB in epochs 2 to 4", "{:,.1f}"),
        Column("late_mb", "in epochs 8 to 10", "{:,.1f}"),
        Column("growth_mb", "growth", "{:,.1f}"),
    ),
    key="us",
    limits=(),
    measure=measure,
    before=before,
    less_is_better=True,
    claims=(
        Claim(OVERHEAD, "us", at_most=15),
        Claim(FIRST, "first_s", at_most=0.3),
        Claim(FIRST_MANY, "first_s", at_most=0.3),
        Claim(MEMORY, "growth_mb", at_most=20),
    ),
)


if __name__ == "__main__":
    main(
        BENCHMARK,
        __doc__,
        tree="folder of class folders of image files",
        work="folder for the sets, or the folder of pack.py --keep",
        samples=(10_000_000, "samples of the large set"),
        workers=(2, "threads"),
    )
