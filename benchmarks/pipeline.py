"""Pipeline: from a set to batches for training on the CPU, ours and everybody's, warm page cache.

    python benchmarks/pipeline.py --task imagenet|celeb --tree TREE --work DIR [--recoded] [--python ffcv=PATH] …

imagenet: a random box to 224 x 224, flip, batches of 64. celeb: 148 x 148 of 178 x 218 to 64 x 64, flip, batches
of 128. "[u8]" rows hand out uint8, "[f32]" rows normalised floats. --recoded: ours on a set that was packed smaller,
against FFCV on its re-encoded one. TREE may be DATA/420 of make_data.py: such images gain least from coefficients.
Sets that are not below --work yet are made first, outside the clock.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pipeline_rows
import pipeline_sets
from harness import CONTENDERS, Benchmark, Contender, base_parser, main
from machine import cpu_seconds_of_tree, prime, pss_of_tree, warm
from pipeline_job import KINDS, Job
from report import PEERS, Claim, Column

__all__ = ["measure"]

BATCH = {"imagenet": 64, "celeb": 128}
_PRIME_BYTES = 1 << 30
# What was made while we waited for the first batch is handed out before the clock starts.
_WARM_BATCHES = 8


def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """Images/s once all is under way; seconds to the first batch of a set that is open; memory of all processes."""
    job = _job(chosen, arguments)
    prime(_PRIME_BYTES)
    started = time.perf_counter()
    make_loader = chosen.function(job)
    opened = time.perf_counter() - started
    started = time.perf_counter()
    batches = _endless(make_loader())
    _check(next(batches), job)
    first = time.perf_counter() - started
    for _ in range(_WARM_BATCHES):
        next(batches)
    count, cpu, started = 0, cpu_seconds_of_tree(), time.perf_counter()
    while count < arguments.n:
        images = next(batches)[0]
        images[:, 0, 0]  # looked at, not copied
        count += len(images)
    seconds = time.perf_counter() - started
    cpu = cpu_seconds_of_tree() - cpu
    return {
        "images_s": count / seconds,
        "first_s": first,
        "open_s": opened,
        "cpu_us": 1e6 * cpu / count,
        "pss_mb": pss_of_tree(),
        "images": count,
    }


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        nothing = True
        for batch in loader:
            nothing = False
            yield batch
        if nothing:
            raise RuntimeError("an epoch without a batch")


def _check(batch: Any, job: Job) -> None:
    """Every row must deliver what it was asked for."""
    images = batch[0]
    size, dtype = job.size, str(images.dtype).removeprefix("torch.")
    shapes = ((job.batch, 3, size, size), (job.batch, size, size, 3))
    if tuple(images.shape) not in shapes or dtype != {"u8": "uint8", "f32": "float32"}[job.kind]:
        raise ValueError(f"a batch of {dtype} {tuple(images.shape)}, expected {job.kind} {shapes[0]}")


def _job(chosen: Contender, arguments: argparse.Namespace) -> Job:
    batch = arguments.batch or BATCH[arguments.task]
    return Job(arguments.task, chosen.options["like"], arguments.tree, arguments.work, batch, arguments.workers)


def before(chosen: Contender, arguments: argparse.Namespace) -> None:
    """Make the sets that a row reads, and have them in the page cache."""
    job = _job(chosen, arguments)
    interpreters = {"main": sys.executable, **dict(pair.split("=", 1) for pair in arguments.python)}
    for name in chosen.options["data"]:
        if name == "tree":
            warm([job.tree])
            continue
        try:
            pipeline_sets.make(name, job.tree, job.work, interpreters)
        except (KeyError, subprocess.SubprocessError) as error:
            print(f"cannot make {name}: {error!r}", file=sys.stderr)  # the contender's process finds nothing there
        else:
            warm([job.output(name)])


def _claims(arguments: argparse.Namespace) -> Iterator[Claim]:
    """What we promise."""
    column = "images_s"
    for kind in KINDS:
        loader, dataset, folder = (
            f"{name} [{kind}]" for name in (pipeline_rows.LOADER, pipeline_rows.DATASET, pipeline_rows.FOLDER)
        )
        if arguments.recoded:
            recoded = f"{pipeline_rows.RECODED} [{kind}]"
            yield Claim(recoded, column, 1.3, f"{pipeline_rows.FFCV} [{kind}]")
            yield Claim(recoded, column, 1.3, f"{pipeline_rows.FFCV_SHORT} [{kind}]")
            yield Claim(recoded, column, 2.5, loader)
            continue
        celeb, floats = arguments.task == "celeb", kind == "f32"
        coefficients = f"{pipeline_rows.COEFFICIENTS} [{kind}]"
        yield Claim(coefficients, column, 1.5 if celeb else 2.6 if floats else 3.0, PEERS)
        if not celeb:
            yield Claim(coefficients, column, 2.2, loader)
        yield Claim(loader, column, 1.3 if celeb else 1.15 if floats else 1.6, PEERS)
        yield Claim(loader, column, 3.8 if celeb else 2.2, folder)
        yield Claim(dataset, column, 1.5, folder)


def _benchmark(arguments: argparse.Namespace) -> Benchmark:
    recoded = ", re-encoded sets" if arguments.recoded else ""
    batch = arguments.batch or BATCH[arguments.task]
    original = tuple(("images_s", f"{pipeline_rows.LOADER} [{kind}]") for kind in KINDS)
    what = f"{arguments.task} on {arguments.tree.name}{recoded}"
    return Benchmark(
        title=f"Pipeline {what}, {arguments.workers} workers, batches of {batch}, warm page cache",
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


def parser() -> argparse.ArgumentParser:
    options = base_parser(__doc__)
    options.add_argument("--tree", required=True, type=Path, help="folder of class folders of JPEG files")
    options.add_argument("--work", required=True, type=Path, help="folder for the sets, or that of pack.py --keep")
    options.add_argument("--task", default="imagenet", choices=tuple(BATCH))
    options.add_argument("--recoded", action="store_true", help="ours and FFCV on re-encoded sets")
    options.add_argument("--n", type=int, default=2560, help="images in the clock")
    options.add_argument("--batch", type=int, help="images in a batch")
    options.add_argument("--workers", type=int, default=2, help="processes or threads of each row")
    return options


def _keep_rows(mode: str) -> None:
    for name in [name for name, row in CONTENDERS.items() if mode not in row.options["modes"]]:
        del CONTENDERS[name]


if __name__ == "__main__":
    given = parser().parse_args()
    _keep_rows("recoded" if given.recoded else given.task)
    main(_benchmark(given), parser())
