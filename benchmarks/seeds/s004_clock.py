"""The clock of `s004.py`: what loading takes alone, and what a training waits for it.

Two epochs are measured of each row, task and load, after batches that warm it up: one that takes batches as fast as
they come, and one with a step after each. The step is a sleep, or ResNet-50 where a GPU and torchvision are.
"""

from __future__ import annotations

import importlib.util
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from machine import cpu_seconds_of_tree, list_tree
from s004_sets import Job
from s004_torch import MakeEpoch

__all__ = ["STEP_FILE", "Step", "has_resnet", "key", "load_epoch", "make_step", "measure_row", "sleep_of"]

Step: TypeAlias = Callable[[Any, Any], None]
STEP_FILE = "step.json"
_WARM_BATCHES = 4


def key(task: str, load: str, name: str) -> str:
    """The name of a figure: batch_ms, load_s, epoch_s, wait_s, cpu_us."""
    return f"{task} {load} {name}"


def measure_row(make: Callable[[Job], MakeEpoch], job: Job, *, exact: bool, step: Step) -> dict[str, float]:
    """The figures of one task and load. exact: whether each epoch holds each sample once."""
    make_epoch = make(job)
    for _, _ in zip(range(_WARM_BATCHES), make_epoch(), strict=False):
        pass
    load_s, cpu_s, labels = load_epoch(make_epoch)
    _check_labels(labels, job, exact)
    epoch_s, wait_s, batches = _epoch_with(make_epoch, step)
    if batches != job.count // job.batch:
        raise ValueError(f"an epoch of {batches} batches, expected {job.count // job.batch}")
    figures = {"batch_ms": 1e3 * load_s / batches, "load_s": load_s, "epoch_s": epoch_s, "wait_s": wait_s}
    figures |= {"wait_ms": 1e3 * wait_s / batches, "cpu_us": 1e6 * cpu_s / len(labels)}
    return {key(job.task.name, job.load, name): value for name, value in figures.items()}


def load_epoch(make_epoch: MakeEpoch) -> tuple[float, float, list[int]]:
    """Seconds and CPU seconds of an epoch whose batches are looked at and dropped, and its labels."""
    labels: list[int] = []
    cpu, started = cpu_seconds_of_tree(), time.perf_counter()
    for images, found in make_epoch():
        images[:, 0, 0, 0]  # looked at, not copied
        labels += found.tolist()
    return time.perf_counter() - started, cpu_seconds_of_tree() - cpu, labels


def _check_labels(labels: list[int], job: Job, exact: bool) -> None:
    """Raise ValueError for an epoch of other samples than the tree's."""
    expected = Counter(label for _, label in list_tree(job.tree))
    found = Counter(labels)
    if found != expected if exact else (len(labels) != sum(expected.values()) or not found.keys() <= expected.keys()):
        raise ValueError(f"an epoch has the labels {dict(found)}, the tree {dict(expected)}")


def _epoch_with(make_epoch: MakeEpoch, step: Step) -> tuple[float, float, int]:
    """Seconds of an epoch with steps, seconds that these waited for batches, and batches."""
    waited, count, started = 0.0, 0, time.perf_counter()
    batches = iter(make_epoch())
    while True:
        asked = time.perf_counter()
        batch = next(batches, None)
        waited += time.perf_counter() - asked
        if batch is None:
            return time.perf_counter() - started, waited, count
        step(*batch)
        count += 1


# --- the step ---------------------------------------------------------------------------------------------------------
def has_resnet() -> bool:
    """Whether ResNet-50 can be trained here; looks for the driver's device first, which costs nothing."""
    if not Path("/dev/nvidiactl").exists() or importlib.util.find_spec("torchvision") is None:
        return False
    import torch

    return torch.cuda.is_available()


def make_step(seconds: float | None) -> Step:
    """A sleep of so many seconds; None: a step of ResNet-50 on the GPU."""
    return _ResNet() if seconds is None else lambda images, labels: time.sleep(seconds)


def sleep_of(folder: Path, task: str) -> float | None:
    """Seconds of the step that the checks left for the rows; None: ResNet-50."""
    seconds: float | None = json.loads((folder / STEP_FILE).read_text())[task]
    return seconds


class _ResNet:
    """Forward, backward and SGD of ResNet-50 in float32, on batches in the memory of any device."""

    def __init__(self) -> None:
        import torch
        from torchvision.models import resnet50

        self._model = resnet50(num_classes=1000).to("cuda").train()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1, momentum=0.9)

    def __call__(self, images: Any, labels: Any) -> None:
        import torch

        inputs = torch.as_tensor(images).to("cuda", non_blocking=True)
        targets = torch.as_tensor(labels).to("cuda", torch.int64, non_blocking=True)
        self._optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(self._model(inputs), targets).backward()
        self._optimizer.step()
        torch.cuda.synchronize()  # or the next wait would hold what is left of this step
