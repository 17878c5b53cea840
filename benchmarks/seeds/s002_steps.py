"""The clock of `s002.py`: a loader by itself, and in a loop with steps as long as those of ResNet-18, -50 and -152.

With a GPU that torch uses, and torchvision, a step is that of the model: forward, backward and SGD on 10 classes, as in
the sample code of the document. Elsewhere a step sleeps: its length is what the document's faster trial took for a
step, times one factor for all, the PyTorch row's time for a batch at load 1 here over that of the document. So a step
is to the loader here what it was there.
"""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from machine import cpu_seconds_of_tree
from s002_rows import BATCH, SIZE

import packer

__all__ = [
    "MODELS",
    "QUANTILES",
    "SECONDS",
    "STEPS",
    "Sleeps",
    "doc_gain",
    "doc_ms",
    "make_steps",
    "time_batches",
    "watch",
]

MODELS = ("ResNet-18", "ResNet-50", "ResNet-152")
STEPS = 298  # of an epoch there
# Seconds an epoch there, by model and load: PyTorch on the CPU (trial A), DALI on the GPU (trial B).
SECONDS = {
    "ResNet-18": {1: (41.67, 21.3), 4: (49.95, 21.37), 8: (61.92, 21.08), 12: (77.82, 21.33)},
    "ResNet-50": {1: (72.64, 46.94), 4: (75.21, 45.02), 8: (81.22, 46.29), 12: (88.89, 46.43)},
    "ResNet-152": {1: (166.96, 119.96), 4: (169.68, 115.23), 8: (169.03, 117.73), 12: (173.18, 114.38)},
}
QUANTILES = ("min", "p50", "p90", "p95", "p99", "max")
Step = Callable[[Any, Any], None]


def doc_ms(model: str, load: int, trial: int) -> float:
    """Milliseconds a step there; trial 0: PyTorch, 1: DALI."""
    return 1e3 * SECONDS[model][load][trial] / STEPS


def doc_gain(model: str, load: int) -> float:
    """Per cent less time there."""
    slow, fast = SECONDS[model][load]
    return 100 * (1 - fast / slow)


class Sleeps:
    """How long each model's step is: the mean of the document's faster trial over the loads, times `factor`."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.ms = {model: factor * mean(doc_ms(model, load, 1) for load in SECONDS[model]) for model in MODELS}

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"factor": self.factor}))

    @staticmethod
    def load(path: Path) -> Sleeps:
        return Sleeps(json.loads(path.read_text())["factor"])

    def step(self, model: str) -> Step:
        seconds = self.ms[model] / 1e3

        def sleep(images: Any, labels: Any) -> None:
            time.sleep(seconds)

        return sleep


def trains() -> bool:
    """Whether steps are those of real models."""
    if importlib.util.find_spec("torchvision") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


def make_steps(path: Path) -> dict[str, Step]:
    """A step for each model. path: of the `Sleeps`."""
    if trains():
        return {model: _training(model) for model in MODELS}
    sleeps = Sleeps.load(path)
    return {model: sleeps.step(model) for model in MODELS}


def _training(name: str) -> Step:
    import torch
    from torchvision import models

    model = getattr(models, name.lower().replace("-", ""))(num_classes=10).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, 0.5)

    def train(images: Any, labels: Any) -> None:
        images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        loss.item()  # waits for the step to end

    for _ in range(3):  # the first steps choose kernels
        train(torch.rand(BATCH, 3, SIZE, SIZE), torch.zeros(BATCH, dtype=torch.int64))
    return train


def look(images: Any, labels: Any) -> None:
    """A step that only looks at the batch."""
    images[:, 0, 0, 0].sum().item()


def time_batches(batches: Iterator[Any], step: Step, seconds: float, least: int) -> tuple[float, float]:
    """(ms a step, CPU ms an image of all processes) over `seconds`, and at least so many batches."""
    count = images_seen = 0
    cpu, started = cpu_seconds_of_tree(), time.perf_counter()
    while count < least or time.perf_counter() - started < seconds:
        images, labels = next(batches)
        step(images, labels)
        count, images_seen = count + 1, images_seen + len(images)
    elapsed = time.perf_counter() - started
    return 1e3 * elapsed / count, 1e3 * (cpu_seconds_of_tree() - cpu) / images_seen


class _Busy:
    """The share of time in which a step was under way, since it was last asked for."""

    def __init__(self, step: Step) -> None:
        self._step, self._total, self._began = step, 0.0, 0.0
        self._asked, self._seen = time.perf_counter(), 0.0

    def __call__(self, images: Any, labels: Any) -> None:
        self._began = time.perf_counter()
        self._step(images, labels)
        began, self._began = self._began, 0.0
        self._total += time.perf_counter() - began

    def share(self) -> float:
        now, began = time.perf_counter(), self._began
        total = self._total + (now - began if began else 0.0)
        share = (total - self._seen) / max(1e-9, now - self._asked)
        self._asked, self._seen = now, total
        return min(1.0, max(0.0, share))


def watch(batches: Iterable[Any], step: Step, seconds: float, path: Path) -> dict[str, float]:
    """Percentiles of what is busy during such a loop, in per cent: "cpu_p95", "step_p95", and "gpu_p95" where there is
    a GPU. path: of the record."""

    busy = _Busy(step)
    path.unlink(missing_ok=True)
    with packer.monitor(path, interval=0.2) as sampler:
        sampler.gauge("step busy", busy.share, full=1.0)
        started = time.perf_counter()
        for images, labels in batches:
            busy(images, labels)
            sampler.step(images=len(images))
            if time.perf_counter() - started >= seconds:
                break
    found = sampler.usage().percentiles()
    names = {"cpu": "cpu busy", "step": "step busy", "gpu": "gpu0 busy"}
    return {
        f"{short}_{quantile}": 100 * getattr(found[name], quantile)
        for short, name in names.items()
        if name in found
        for quantile in QUANTILES
    }
