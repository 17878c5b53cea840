"""Pipeline: from a set to training batches on the CPU, by our loader and its peers, with a warm page cache.

    python benchmarks/pipeline.py --task imagenet|celeb --tree TREE --work DIR [--recoded] [--python ffcv=PATH] …

imagenet: a random box to 224 x 224, flip, batches of 64. celeb: 148 x 148 of 178 x 218 to 64 x 64, flip, batches
of 128. "[u8]" rows hand out uint8, "[f32]" rows normalised floats. Each row runs five interleaved rounds of at least
300 batches and 30 s, after a warm-up. --recoded: our loader on a set of re-encoded smaller images, against FFCV on its
own. TREE may be DATA/420 of make_data.py, whose images gain least from coefficients. Sets that are missing below --work
are made first, and not timed. docs/site/chart.py makes the tables and the chart of the docs from the file of --out.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pipeline_sets
from harness import Benchmark, Contender, interpreters, keep_rows, main
from machine import Clock, prime, pss_of_tree, warm
from pipeline_job import KINDS, Job
from pipeline_rows import register_rows
from report import PEERS, Claim, Column

__all__ = ["BATCH", "before", "endless", "make_sets", "measure", "run"]

BATCH = {"imagenet": 64, "celeb": 128}
_PRIME_BYTES = 1 << 30
# Batches made during the wait for the first batch are consumed before the timing starts.
_WARM_BATCHES = 8


def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """Images/s after a warm-up; seconds to the first batch of an open set; memory of all processes."""
    job = _job(chosen, arguments)
    prime(_PRIME_BYTES)
    started = time.perf_counter()
    make_loader = chosen.function(job)
    opened = time.perf_counter() - started
    started = time.perf_counter()
    loader = make_loader()
    batches = endless(lambda: loader)
    _check(next(batches), job)
    first = time.perf_counter() - started
    for _ in range(_WARM_BATCHES):
        next(batches)
    clock, count = Clock(), 0
    while count < arguments.batches * job.batch or clock.seconds < arguments.seconds:
        images = next(batches)[0]
        images[:, 0, 0]  # read, not copied
        count += len(images)
    figures = {**clock.figures(count), "first_s": first, "open_s": opened, "pss_mb": pss_of_tree()}
    return {**figures, "images": count, "versions": _versions(chosen.imports)}


def _versions(modules: Iterable[str]) -> dict[str, str]:
    """The versions of the modules' packages."""
    packages = importlib.metadata.packages_distributions()
    names = {name for module in modules for name in packages.get(module.partition(".")[0], ())}
    return {name: importlib.metadata.version(name) for name in sorted(names)}


def endless(make: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """Batches of epoch after epoch. make: the batches of one epoch."""
    while True:
        nothing = True
        for batch in make():
            nothing = False
            yield batch
        if nothing:
            raise RuntimeError("an epoch without a batch: are there fewer images than a batch needs?")


def _check(batch: Any, job: Job) -> None:
    """Raise ValueError unless the batch has the requested dtype and shape."""
    images = batch[0]
    size, dtype = job.size, str(images.dtype).removeprefix("torch.")
    shapes = ((job.batch, 3, size, size), (job.batch, size, size, 3))
    if tuple(images.shape) not in shapes or dtype != {"u8": "uint8", "f32": "float32"}[job.kind]:
        raise ValueError(f"a batch of {dtype} {tuple(images.shape)}, expected {job.kind} {shapes[0]}")


def _job(chosen: Contender, arguments: argparse.Namespace) -> Job:
    batch = arguments.batch or BATCH[arguments.task]
    return Job(arguments.task, chosen.options["like"], arguments.tree, arguments.work, batch, arguments.workers)


def before(chosen: Contender, arguments: argparse.Namespace) -> None:
    """Make the sets that a row reads, and bring them into the page cache."""
    warm(make_sets(chosen, arguments))


def make_sets(chosen: Contender, arguments: argparse.Namespace) -> Iterator[Path]:
    """Make the sets that a row reads; yields their folders."""
    for name in chosen.options["data"]:
        if name == "tree":
            yield arguments.tree
            continue
        try:
            yield pipeline_sets.make(name, arguments.tree, arguments.work, interpreters(arguments))
        except (KeyError, subprocess.SubprocessError) as error:
            print(f"cannot make {name}: {error!r}", file=sys.stderr)  # the contender's process reports the missing set


def _claims(arguments: argparse.Namespace) -> Iterator[Claim]:
    """The promises of the project."""
    celeb, loader, column = arguments.task == "celeb", "ours: ImageLoader", "images_s"
    for kind in KINDS:
        floats = kind == "f32"
        if arguments.recoded:
            bounds: tuple[tuple[str, float, str], ...] = (
                (f"{loader}, set re-encoded", 1.3, "FFCV, its own JPEGs"),
                (f"{loader}, set re-encoded", 1.3, "FFCV, its own JPEGs of short side 256"),
                (f"{loader}, set re-encoded", 2.5, loader),
            )
        else:
            bounds = (
                (f"{loader}, coefficients", 1.5 if celeb else 2.6 if floats else 3.0, ""),
                *(() if celeb else ((f"{loader}, coefficients", 2.2, loader),)),
                (loader, 1.3 if celeb else 1.15 if floats else 1.6, ""),
                (loader, 3.8 if celeb else 2.2, "ImageFolder + PIL"),
                ("ours: ImageDataset + DataLoader", 1.5, "ImageFolder + PIL"),
            )
        for row, least, against in bounds:
            yield Claim(f"{row} [{kind}]", column, least, f"{against} [{kind}]" if against else PEERS)


def _benchmark(arguments: argparse.Namespace) -> Benchmark:
    register_rows("pipeline")
    mode, recoded = ("recoded", ", re-encoded sets") if arguments.recoded else (arguments.task, "")
    keep_rows(lambda row: mode in row.options["modes"])
    batch = arguments.batch or BATCH[arguments.task]
    original = tuple(("images_s", f"ours: ImageLoader [{kind}]") for kind in KINDS)
    subject = f"{arguments.task} on {arguments.tree.name}{recoded}"
    return Benchmark(
        title=f"Pipeline {subject}, {arguments.workers} workers, batches of {batch}, warm page cache",
        columns=(
            Column("images_s", "images/s (min–max)"),
            Column("first_s", "first batch s", "{:.2f}"),
            Column("open_s", "open s", "{:.2f}"),
            Column("import_s", "import s", "{:.2f}"),
            Column("cpu_us", "CPU µs/image"),
            Column("pss_mb", "PSS MB"),
        ),
        key="images_s",
        limits=original if arguments.recoded else (("images_s", PEERS),),
        measure=measure,
        before=before,
        claims=tuple(_claims(arguments)),
    )


def run(benchmark: Callable[[argparse.Namespace], Benchmark], description: str | None) -> None:
    """`harness.main` with the options of these benchmarks."""
    main(
        benchmark,
        description,
        tree="folder of class folders of JPEG files",
        work="folder for the sets, or the folder of pack.py --keep",
        task=("imagenet", "the work per image", tuple(BATCH)),
        recoded=(False, "ours and FFCV on re-encoded sets"),
        seconds=(30.0, "least seconds of a round"),
        batches=(300, "least batches of a round"),
        batch=(0, "images in a batch; default: 64, or 128 for celeb"),
        workers=(2, "processes or threads of each row"),
        rounds=5,
    )


if __name__ == "__main__":
    run(_benchmark, __doc__)
