"""A diffusion model trained on the batches of one loader or another, and how alike the images are that it draws.

The Fréchet distance of two sets of images is that of the normal distributions of their features (M. Heusel et al.,
"GANs Trained by a Two Time-Scale Update Rule Converge to a Local Nash Equilibrium", 2017). The features are those of a
network of fixed random weights, or of a TorchScript file: a module that takes uint8 [n, 3, h, w] and returns [n, d];
where its forward has an argument `return_features`, as NVIDIA's inception-2015-12-05.pt, that is True.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from harness import CONTENDERS, REPOSITORY
from s000_job import SIZE, Job, make_job
from s000_loaders import BASELINE, LOADER
from s000_pixels import Reference

from cache.node import usable_cpus

__all__ = [
    "BATCH",
    "FAULT",
    "Task",
    "Trained",
    "check_features",
    "feature_network",
    "frechet_distance",
    "train",
    "train_all",
]

BATCH = 16
FAULT = "for comparison: values from 0 to 1"

Features = npt.NDArray[np.float64]
_FEATURES, _SEED = 32, 0
_AT_ONCE = 64


@dataclass(frozen=True)
class Task:
    """A training. row: the loader. steps, batch: of the training. full: the document's network, in place of the tiny
    one. images: file of uint8 [n, 3, 64, 64] (.npy) on which it is judged. network: of the features, None: the fixed
    one. samples: how many are drawn. fault: values from 0 to 1, as where the last operation is forgotten.
    """

    row: str
    job: Job
    steps: int
    images: Path
    samples: int
    full: bool = False
    network: Path | None = None
    fault: bool = False


@dataclass(frozen=True)
class Trained:
    """loss: of the averaged network on the images, with the same noise for all. features: of its samples."""

    row: str
    loss: float
    features: Features


def train_all(arguments: argparse.Namespace) -> list[Trained]:
    """Trainings with PyTorch's loader, one for each seed, as many with ours, and one with a fault; two at a time, a
    thread each, on a CPU."""
    import torch

    job = make_job(arguments, arguments.count)
    reference = Reference.load(arguments.work / "reference.npz")
    judged = arguments.work / "judged.npy"
    np.save(judged, reference.images[: arguments.judged])
    options = {"full": arguments.full, "network": arguments.features}
    options |= {"steps": arguments.steps, "images": judged, "samples": arguments.samples}
    tasks = [
        Task(row, replace(job, batch=BATCH, workers=1, seed=seed), **options)
        for seed in range(arguments.trainings)
        for row in (BASELINE, LOADER)
    ]
    tasks.append(replace(tasks[0], fault=True))
    processes = 1 if torch.cuda.is_available() else min(2, usable_cpus())
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(train, tasks))


def train(task: Task) -> Trained:
    """Train, judge and sample, in this process: on a GPU where there is one, else on one thread."""
    sys.path.append(str(REPOSITORY / "examples"))
    import torch
    from ddpm_model import TINY, Learner, Settings

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    learner = Learner(Settings() if task.full else TINY, SIZE, task.job.seed, device)
    batches = iter(CONTENDERS[task.row].function(task.job))
    for _ in range(task.steps):
        batch = torch.as_tensor(next(batches)[0])
        learner.learn(batch / 2 + 0.5 if task.fault else batch)
    images = torch.from_numpy(np.load(task.images)).to(device).float() / 127.5 - 1
    with torch.no_grad():
        generator = torch.Generator(device).manual_seed(_SEED)
        judged = [len(part) * float(learner.loss(learner.average, part, generator)) for part in images.split(_AT_ONCE)]
    drawn = [learner.sample(min(_AT_ONCE, task.samples - at), at) for at in range(0, task.samples, _AT_ONCE)]
    samples = ((torch.cat(drawn) + 1) * 127.5).round().clamp(0, 255).byte()
    features = feature_network(task.network)(samples)
    return Trained(FAULT if task.fault else task.row, sum(judged) / len(images), features)


def feature_network(file: Path | None) -> Callable[[Any], Features]:
    """A function from uint8 images, a tensor [n, 3, h, w], to features [n, d]. file: TorchScript, see above.

    Raises ValueError for a file that is not TorchScript, or does not return [n, d].
    """
    import torch

    network = _fixed_network() if file is None else _load(file)

    def features(images: Any) -> Features:
        with torch.no_grad():
            found = torch.cat([network(part.cpu()) for part in images.split(_AT_ONCE)])
        if found.ndim != 2:
            raise ValueError(f"{file}: it returned {list(found.shape)}, expected [n, d] for n images")
        return np.asarray(found.double().numpy())

    return features


def check_features(file: Path | None) -> None:
    """Ends the program for a file that is not a network of features."""
    if file is not None:
        import torch

        try:
            feature_network(file)(torch.zeros(2, 3, SIZE, SIZE, dtype=torch.uint8))
        except (ValueError, RuntimeError) as error:
            sys.exit(f"s000: --features: {error}")


def _fixed_network() -> Callable[[Any], Any]:
    """Three convolutions with random weights, the same each time; the means of their maps."""
    import torch
    from torch.nn import functional as F

    generator = torch.Generator().manual_seed(_SEED)
    shapes = ((16, 3, 5, 5), (_FEATURES, 16, 3, 3), (_FEATURES, _FEATURES, 3, 3))
    weights = [torch.randn(s, generator=generator) * (2 / (s[1] * s[2] * s[3])) ** 0.5 for s in shapes]

    def network(images: Any) -> Any:
        x = images.float() / 127.5 - 1
        for weight in weights:
            x = F.leaky_relu(F.conv2d(x, weight, stride=2, padding=weight.shape[-1] // 2), 0.2)
        return x.mean(dim=(2, 3))

    return network


def _load(file: Path) -> Callable[[Any], Any]:
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript as such
            module = torch.jit.load(str(file), map_location="cpu").eval()
    except (RuntimeError, OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{file} is not a TorchScript module ({reason}); make one with torch.jit.save") from error
    if any(argument.name == "return_features" for argument in module.forward.schema.arguments):
        return lambda images: module(images, return_features=True)
    return lambda images: module(images)


def frechet_distance(first: Features, second: Features) -> float:
    """|m1 - m2|² + tr(C1 + C2 - 2 (C1 C2)^½) of the means and covariances of two sets of features [n, d].

    The trace of the root is the sum of the roots of the eigenvalues of C1^½ C2 C1^½, which is symmetric.
    """
    (mean, covariance), (other_mean, other_covariance) = (
        (features.mean(axis=0), np.atleast_2d(np.cov(features, rowvar=False))) for features in (first, second)
    )
    values, vectors = np.linalg.eigh(covariance)
    root = vectors * np.sqrt(values.clip(0)) @ vectors.T
    cross = np.linalg.eigvalsh(root @ other_covariance @ root).clip(0)
    traces = np.trace(covariance) + np.trace(other_covariance) - 2 * np.sqrt(cross).sum()
    return float(((mean - other_mean) ** 2).sum() + traces)
