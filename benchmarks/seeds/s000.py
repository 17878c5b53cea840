"""Loading faces for a diffusion model: PyTorch's DataLoader, ours, DALI and rocAL, and whether the model is the same.

    python benchmarks/seeds/s000.py [--images CELEBA] [--smoke]

--images: CelebA's aligned images, which are taken as they are, or other JPEGs, which are made as large. The rows of
rocAL run where it can be imported: PYTHONPATH=/opt/rocm/lib.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from experiment import Check, Experiment, main, parser  # isort: skip  (it sets the path)
import numpy as np
from harness import CONTENDERS, REPOSITORY, Benchmark, Contender, drive
from machine import cpu_seconds_of_tree, list_tree, prime
from report import Column
from s000_job import BATCH, BOX, COMPARED, SIZE, Job, make_images, make_job
from s000_loaders import BASELINE, END_TO_END, LOADER
from s000_page import publish
from s000_pixels import Reference, compare
from s000_training import check_features

from cache.node import usable_cpus

_PRIME_BYTES = 1 << 30


# --- before the clock -------------------------------------------------------------------------------------------------
def check(arguments: argparse.Namespace) -> Iterator[Check]:
    """Every loader's images against Pillow's; those of our order against each other."""
    check_features(arguments.features)
    for count in {arguments.count, min(arguments.count, COMPARED)}:
        make_images(arguments, count)
    job = make_job(arguments, min(arguments.count, COMPARED))
    yield _check_set(job)
    reference = Reference.of(job.tree, BOX, SIZE)
    reference.save(arguments.work / "reference.npz")
    sys.argv.append("--compare")
    try:
        some = {"skip": ",".join(filter(None, (arguments.skip, END_TO_END)))}
        if arguments.smoke and not arguments.only:
            some["only"] = f"{BASELINE},{LOADER}"
        results = drive(BENCHMARK, argparse.Namespace(**{**vars(arguments), **some, "rounds": 1}))
    finally:
        sys.argv.remove("--compare")
    ran = {name: runs[0] for name, runs in results.items() if runs and "missing" not in runs[0]}
    for name, run in ran.items():
        yield _check_pixels(name, run, len(reference.labels))
    if not any("error" in run for run in ran.values()):
        yield from _check_order(ran, reference, job)


def _check_set(job: Job) -> Check:
    """The set has the files, in the order in which they are listed."""
    import readers

    paths = [(Path(path), label) for path, label in list_tree(job.tree)]
    with readers.open(job.packed) as reader:
        same = sum(
            bytes(reader.read(row)) == path.read_bytes() and int(reader.labels[row]) == label
            for row, (path, label) in enumerate(paths)
        )
        expected = len(paths) == len(reader)
    return Check(
        "the packed set has the bytes and labels of the files",
        f"{same} of {len(paths)}",
        expected and same == len(paths),
    )


def _check_pixels(name: str, run: dict[str, Any], count: int) -> Check:
    what = f"{name}: every sample once, with its label, as Pillow makes it or mirrored"
    if "error" in run:
        return Check(what, str(run["error"]), False)
    bound = CONTENDERS[name].options["bound"]
    found = (
        f"{run['whole']} of {count}, {run['flipped']:.0%} mirrored; {run['mean']:.2f} of 255 from Pillow's on average, "
        f"the worst image {run['worst']:.2f} (allowed: {bound:g}), the worst value {run['largest']:.0f}"
    )
    even = abs(run["flipped"] - 0.5) < 5 * 0.5 / math.sqrt(count)
    # A value of Pillow's own rows has passed through float32.
    return Check(what, found, run["images"] == run["whole"] == count and even and run["worst"] <= bound + 1e-3)


def _check_order(ran: dict[str, dict[str, Any]], reference: Reference, job: Job) -> Iterator[Check]:
    """The rows in our order have the batches that `readers.order` says; ours have the same flips."""
    from readers.order import Shuffled

    count = len(reference.labels)
    due = reference.image_of[Shuffled(count, job.seed).indices(0, np.arange(count))]
    order = hashlib.sha256(due.tobytes()).hexdigest()
    ordered = [name for name in ran if CONTENDERS[name].options.get("ordered")]
    others = [name for name in ordered if ran[name]["order"] != order]
    what = f"in the same order, the same images in all {count // job.batch} batches, up to the flips"
    if ordered:
        yield Check(what, f"not in {'; '.join(others)}" if others else "; ".join(ordered), not others)
    drawn = [name for name in ordered if CONTENDERS[name].options.get("draws")]
    ways = len({ran[name]["flips"] for name in drawn})
    if ways:
        yield Check(
            "the flips of readers.augment are the same",
            "; ".join(drawn) if ways == 1 else f"{ways} different ones",
            ways == 1,
        )


# --- rows -------------------------------------------------------------------------------------------------------------
def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """Images/s and CPU time once all is under way; with --compare the comparison of an epoch."""
    if arguments.compare:
        job = replace(make_job(arguments, min(arguments.count, COMPARED)), in_order=True)
        return asdict(compare(chosen.function(job), Reference.load(arguments.work / "reference.npz")))
    job = make_job(arguments, arguments.count)
    if not arguments.smoke:
        prime(_PRIME_BYTES)
    batches = iter(chosen.function(job))
    if chosen.options.get("trains"):
        return _train_rate(batches, arguments)
    started = time.perf_counter()
    _check_batch(next(batches)[0])
    first = time.perf_counter() - started
    for _ in range(arguments.warm):
        next(batches)
    count, cpu, started = 0, cpu_seconds_of_tree(), time.perf_counter()
    while count < arguments.n:
        found = next(batches)[0]
        float(found[-1, 0, 0, 0])  # on a GPU, it is there then
        count += len(found)
    seconds = time.perf_counter() - started
    cpu = cpu_seconds_of_tree() - cpu
    return {"images_s": count / seconds, "first_s": first, "cpu_us": 1e6 * cpu / count, "images": count}


def _check_batch(found: Any) -> None:
    dtype, shape = str(found.dtype).removeprefix("torch."), (BATCH, 3, SIZE, SIZE)
    if tuple(found.shape) != shape or dtype != "float32":
        raise ValueError(f"a batch of {dtype} {tuple(found.shape)}, expected float32 {shape}")


def _train_rate(batches: Iterator[Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Images/s of the document's training on the GPU, and the share of the time in which it waits for a batch."""
    import torch

    sys.path.append(str(REPOSITORY / "examples"))
    from ddpm_model import Learner, Settings

    learner = Learner(Settings(), SIZE, 0, torch.device("cuda"))
    for _ in range(arguments.warm):
        learner.learn(torch.as_tensor(next(batches)[0]))
    count, waited, started = 0, 0.0, time.perf_counter()
    while count < arguments.n:
        asked = time.perf_counter()
        found = torch.as_tensor(next(batches)[0])
        waited += time.perf_counter() - asked
        learner.learn(found)  # ends when the step has ended, as it returns the loss
        count += len(found)
    seconds = time.perf_counter() - started
    return {"train_images_s": count / seconds, "waits_percent": 100 * waited / seconds}


BENCHMARK = Benchmark(
    title="Loading CelebA for a diffusion model",
    columns=(Column("images_s", "images/s"), Column("cpu_us", "CPU µs an image")),
    key="images_s",
    limits=(("images_s", BASELINE),),
    measure=measure,
)


def _options() -> argparse.ArgumentParser:
    options = parser(__doc__)
    options.add_argument("--count", type=int, metavar="N", help=f"images, a multiple of {BATCH} (2,560; smoke: 256)")
    options.add_argument("--n", type=int, help="images in the clock (5,120; smoke: 256)")
    options.add_argument("--workers", type=int, default=min(16, usable_cpus()), help="processes or threads of each row")
    options.add_argument("--steps", type=int, help="of each training (150; smoke: 1); 0: no training")
    options.add_argument("--trainings", type=int, help="seeds of each loader, at least 2 (3; smoke: 2)")
    options.add_argument("--samples", type=int, help="drawn after each training (64; smoke: 2)")
    options.add_argument("--judged", type=int, help="images that give the loss of each training (128; smoke: 16)")
    options.add_argument("--warm", type=int, help="batches before the clock (8; smoke: 2)")
    options.add_argument("--full", action="store_true", help="train the document's network, for a GPU")
    options.add_argument("--features", type=Path, metavar="FILE", help="TorchScript network of the features")
    options.add_argument("--compare", action="store_true", help=argparse.SUPPRESS)
    return options


def _set_defaults(options: argparse.ArgumentParser, words: Sequence[str]) -> argparse.ArgumentParser:
    """Those that --smoke changes. Ends the program where the numbers do not fit."""
    small = {"count": 256, "n": 256, "steps": 1, "trainings": 2, "samples": 2, "judged": 16, "warm": 2}
    large = {"count": 2560, "n": 5120, "steps": 150, "trainings": 3, "samples": 64, "judged": 128, "warm": 8}
    options.set_defaults(**(small if "--smoke" in words else large))
    given = options.parse_args(words)
    if given.count < BATCH or given.count % BATCH:
        options.error(f"--count is {given.count}, expected a multiple of {BATCH}")
    if given.trainings < 2:
        options.error(f"--trainings is {given.trainings}, expected at least 2, which are compared")
    if given.features is not None and not given.features.is_file():
        options.error(f"--features: there is no file {given.features}")
    return options


EXPERIMENT = Experiment(
    name="s000",
    document='"Optimizing diffusion data-loading using ROCm rocAL library", AMD, 19 June 2025',
    about=(
        "It trains a diffusion model on CelebA and replaces PyTorch's DataLoader by rocAL, whose operators crop and "
        "resize, or flip and normalise, at once: an epoch of loading takes 2.0 to 2.7 times less. Here the same "
        "pipeline (crop, 64 x 64, flip, -1 to 1, batches of 128) runs in PyTorch, in ours, in DALI and in rocAL."
    ),
    benchmark=BENCHMARK,
    check=check,
    publish=publish,
)

if __name__ == "__main__":
    main(EXPERIMENT, _set_defaults(_options(), sys.argv[1:]))
