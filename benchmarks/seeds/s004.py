"""Containers (files, HDF5, TFRecord, tar) × loaders (PyTorch, DALI, this project's) × few or extensive augmentation.

    python benchmarks/seeds/s004.py [--task imagenet,faces] [--batch 32] [--step MS] [--images DIR] [--smoke]

few: resize, random crop, random flip. extensive: also random brightness, contrast and saturation. imagenet: JPEGs of
500 x 375, short side 256, crop 224. faces: JPEGs of 112 x 112 in InsightFace's way, resized to 128, crop 112. All rows
hand out float32 [n, 3, crop, crop], normalised, with as many processes or threads, from a warm page cache.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from experiment import Check, Experiment, main, parser
from harness import CONTENDERS, Benchmark, Contender, NotHere, contender
from images import make
from machine import prime, warm
from report import Column
from s004_checks import check_rows, check_tree, time_baseline
from s004_clock import STEP_FILE, has_resnet, key, make_step, measure_row, sleep_of
from s004_dali import dali_row, loader_row
from s004_page import SHARE_OF_STEPS, publish
from s004_sets import EXTENSIVE, FEW, LOADS, TASKS, Job, Scale, make_sets
from s004_torch import DATASET, FILES, PIXELS

from cache.node import usable_cpus

_RESNET = "limit: ResNet-50, batches in memory"
_PRIME_BYTES = 1 << 30
_SMOKE_ROWS = (FILES, PIXELS, DATASET, dali_row("files"), loader_row("HDF5"), dali_row("files", "gpu"))


@contender(_RESNET, exact=False, note="the step alone, on one batch of noise")
def resnet(job: Job) -> Callable[[], Any]:
    if not has_resnet():
        raise NotHere("needs an NVIDIA GPU and torchvision; here the step is a sleep")
    import torch

    batch = torch.randn(job.batch, 3, job.task.crop, job.task.crop), torch.zeros(job.batch, dtype=torch.int64)
    return lambda: iter([batch] * (job.count // job.batch))


# --- before the clock -------------------------------------------------------------------------------------------------
def check(arguments: argparse.Namespace) -> Iterator[Check]:
    """Make the sets, compare what the rows deliver, and find how long the step is."""
    scale = Scale.of(arguments)
    for task in arguments.task:
        _make(scale, task, arguments.images)
    rows = [name for name in _chosen(arguments) if name != _RESNET]
    yield from check_rows(rows, [scale.check_job(task) for task in arguments.task])
    steps = _step_seconds(scale, arguments)
    (scale.work / STEP_FILE).write_text(json.dumps(steps))
    for task, seconds in steps.items():
        found = "ResNet-50 on this GPU" if seconds is None else f"a sleep of {1e3 * seconds:.1f} ms"
        yield Check(f"{task}: the step after each batch of {scale.batch}", found, seconds is None or seconds > 0)
    if arguments.smoke and not arguments.only:
        arguments.only = ",".join(_SMOKE_ROWS)  # of the others, what they deliver has been compared


def _make(scale: Scale, task: str, source: Path | None) -> None:
    """The sets of a task and those of its checks; a folder that is there is taken as it is."""
    folder = scale.folder(task)
    if folder.exists():
        return
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tree = make(partial / "tree", scale.count(task), size=TASKS[task].size, source=source)
    check_tree(tree, partial / "check" / "tree", scale.check_job(task).batch * scale.shards)
    for place in (partial, partial / "check"):
        make_sets(place, scale.shards, TASKS[task])
    partial.rename(folder)


def _chosen(arguments: argparse.Namespace) -> list[str]:
    """As `harness.drive` chooses them."""
    only, skip = (text.split(",") if text else [] for text in (arguments.only, arguments.skip))
    names = [name for name in CONTENDERS if not only or any(part in name for part in only)]
    return [name for name in names if not any(part in name for part in skip)]


def _step_seconds(scale: Scale, arguments: argparse.Namespace) -> dict[str, float | None]:
    """Steps that take the share of the baseline's epoch that they had there; None: ResNet-50 itself."""
    if arguments.step is not None or has_resnet():
        return dict.fromkeys(arguments.task, None if arguments.step is None else arguments.step / 1e3)
    batches = time_baseline([scale.job(task, EXTENSIVE) for task in arguments.task])
    return {task: SHARE_OF_STEPS * seconds for task, seconds in batches.items()}


# --- the rows ---------------------------------------------------------------------------------------------------------
def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """All tasks and loads of a row, one after the other."""
    if not arguments.smoke:
        prime(_PRIME_BYTES)
    scale, exact = Scale.of(arguments), chosen.options["exact"]
    figures: dict[str, Any] = {}
    for task in arguments.task:
        step = make_step(sleep_of(scale.work, task))
        for load in LOADS:
            figures |= measure_row(chosen.function, scale.job(task, load), exact=exact, step=step)
            gc.collect()  # the loader's processes and threads end before the next one's begin
    return figures


def before(chosen: Contender, arguments: argparse.Namespace) -> None:
    """Have the sets in the page cache."""
    warm(Scale.of(arguments).folder(task) for task in arguments.task)


def _tasks(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in TASKS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(TASKS)}")
    return names


def _parser() -> argparse.ArgumentParser:
    options = parser(__doc__)
    options.add_argument("--task", type=_tasks, default=list(TASKS), help="imagenet, faces, or both with a comma")
    options.add_argument("--batch", type=int, help="images in a batch (32; with --smoke 8)")
    options.add_argument("--workers", type=int, default=usable_cpus(), help="processes or threads of each row")
    options.add_argument("--step", type=float, metavar="MS", help="length of the step; default: see the page")
    options.set_defaults(rounds=2)
    return options


BENCHMARK = Benchmark(
    title="Containers, DALI and ImageLoader for ResNet-50: loading and epoch time",
    columns=tuple(Column(key("imagenet", load, "batch_ms"), f"{load}: ms a batch") for load in LOADS),
    key=key("imagenet", FEW, "batch_ms"),
    limits=(),
    measure=measure,
    before=before,
    less_is_better=True,
)
EXPERIMENT = Experiment(
    name="s004",
    document="Importance of Data Loading Pipeline in Training Deep Neural Networks (arXiv:2005.02130, April 2020)",
    about=(
        "It trained ResNet-50 on ImageNet (8 V100) and on a part of InsightFace (4 TITAN), from JPEG files and "
        "from a dedicated reader (HDF5, TFRecord), with and without DALI, with few and extensive augmentation, and "
        "took the time of loading and of an epoch. Here: the same containers and systems, and tar, on one machine."
    ),
    benchmark=BENCHMARK,
    check=check,
    publish=publish,
)

if __name__ == "__main__":
    main(EXPERIMENT, _parser())
