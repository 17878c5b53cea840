"""GPU: from a set to normalised batches on the device, ours and everybody's, and the fused kernel against its bound.

    python benchmarks/gpu.py --tree TREE --work DIR [--batch 256] [--n 25600] [--threads N] [--trace FILE] …

TREE holds class folders of JPEG files; sets are made from it below DIR, once and outside the clock. Batches are
float16, a random box of 224 x 224, flipped, normalised. The ladder rows differ in where bytes come from (files, or
our cache in shared memory) and in who decodes; those with a `cpu_share` divide decoding between CPU and GPU. --trace
writes a profile of our first loader row for chrome://tracing, in which decode, kernels and the consumer's work can be
seen to overlap. Without a GPU every row says why it did not run; `--device cpu` runs ours.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_kernel
import gpu_rows
import pipeline_sets
from gpu_rows import MakeBatches, Task
from harness import Benchmark, Contender, base_parser, main
from machine import cpu_seconds_of_tree, warm
from report import PEERS, Claim, Column

__all__ = ["measure"]

_WARM_BATCHES = 8
_TRACED_BATCHES = 10


def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """Images/s once all is under way, as a training sees it that waits for each batch on its own stream."""
    task = Task(arguments.tree, arguments.work, arguments.batch, arguments.threads, arguments.device)
    if chosen.options.get("figures"):
        figures: dict[str, Any] = chosen.function(task)
        return figures
    before = _device_mb(task)
    make: MakeBatches = chosen.function(task)
    started = time.perf_counter()
    batches = _endless(make)
    _look_at(next(batches), task)
    first = time.perf_counter() - started
    for _ in range(_WARM_BATCHES):
        _look_at(next(batches), task)
    _wait(task)
    if arguments.trace and chosen.name == gpu_rows.CODEC:
        _trace(batches, task, arguments.trace)
    count, cpu, started = 0, cpu_seconds_of_tree(), time.perf_counter()
    while count < arguments.n:
        count += _look_at(next(batches), task)
    _wait(task)
    seconds, cpu = time.perf_counter() - started, cpu_seconds_of_tree() - cpu
    return {
        "images_s": count / seconds,
        "first_s": first,
        "cpu_us": 1e6 * cpu / count,
        "cpus": cpu / seconds,
        "device_mb": _device_mb(task) - before,
        "images": count,
    } | _shares(make)


def _shares(make: MakeBatches) -> dict[str, Any]:
    """Of the images that the device could decode, the share that the CPU does in the end: of our loaders."""
    loader = make()
    share = getattr(loader.stats(), "cpu_share", None) if hasattr(loader, "stats") else None
    return {} if share is None else {"cpu_share": share}


def _endless(make: MakeBatches) -> Iterator[Any]:
    while True:
        nothing = True
        for batch in make():
            nothing = False
            yield batch
        if nothing:
            raise RuntimeError("an epoch without a batch: fewer images than --batch?")


def _look_at(batch: Any, task: Task) -> int:
    """Use every value, on the consumer's stream."""
    images = batch[0]
    expected = (task.batch, 3, gpu_rows.SIZE, gpu_rows.SIZE)
    if tuple(images.shape) != expected or str(images.dtype) != "torch.float16":
        raise ValueError(f"a batch of {images.dtype} {tuple(images.shape)}, expected torch.float16 {expected}")
    images.sum()
    return len(images)


def _wait(task: Task) -> None:
    if task.device == "cuda":
        import torch

        torch.cuda.synchronize()


def _device_mb(task: Task) -> float:
    """GPU memory in use by all processes: libraries allocate outside torch."""
    if task.device != "cuda":
        return 0.0
    import torch

    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e6


def _trace(batches: Iterator[Any], task: Task, place: Path) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(_TRACED_BATCHES):
            _look_at(next(batches), task)
        _wait(task)
    profiler.export_chrome_trace(str(place))


def before(chosen: Contender, arguments: argparse.Namespace) -> None:
    """Make the sets that a row reads, and have them in the page cache."""
    for name in chosen.options["data"]:
        if name == "tree":
            warm([arguments.tree])
            continue
        try:
            pipeline_sets.make(name, arguments.tree, arguments.work, {"main": sys.executable})
        except (KeyError, subprocess.SubprocessError) as error:
            print(f"cannot make {name}: {error!r}", file=sys.stderr)  # the contender's process finds nothing there


def parser() -> argparse.ArgumentParser:
    options = base_parser(__doc__)
    options.add_argument("--tree", required=True, type=Path, help="folder of class folders of JPEG files")
    options.add_argument("--work", required=True, type=Path, help="folder for the sets")
    options.add_argument("--batch", type=int, default=256, help="images in a batch")
    options.add_argument("--n", type=int, default=25600, help="images in the clock")
    options.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each row")
    options.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options.add_argument("--trace", type=Path, metavar="FILE", help="write a profile of our first loader row")
    return options


BENCHMARK = Benchmark(
    title="GPU, batches of float16 on the device",
    columns=(
        Column("images_s", "images/s (min–max)"),
        Column("gb_s", "GB/s"),
        Column("first_s", "first batch s", "{:.2f}"),
        Column("cpu_us", "CPU µs/image"),
        Column("cpus", "CPUs busy", "{:.1f}"),
        Column("cpu_share", "CPU's share", "{:.2f}"),
        Column("device_mb", "GPU MB"),
    ),
    key="images_s",
    limits=(("images_s", PEERS), ("gb_s", gpu_kernel.COPY)),
    measure=measure,
    before=before,
    claims=(
        Claim(gpu_rows.CODEC, "images_s", 1.0, "DALI GPU, file reader"),
        Claim(gpu_rows.CODEC, "images_s", 1.0, "DALI GPU, webdataset reader"),
        Claim(gpu_rows.CODEC, "images_s", 3.0, gpu_rows.V2),
        Claim(gpu_kernel.KERNEL, "gb_s", 0.6, gpu_kernel.COPY),
    ),
)


if __name__ == "__main__":
    main(BENCHMARK, parser())
