"""Which stage starves a training job: a pipeline with two planted bottlenecks is diagnosed, repaired, diagnosed again.

    python benchmarks/seeds/s001.py [--seconds 20] [--batch 32] [--smoke]

`examples/toy_pipeline.py` contains the pipeline, its repairs and the figures of the article. A row is a diagnosis of
one variant by `packer.diagnose`. On the CPU the step is simulated, since a network would take the cores from the
workers; the rows with a GPU train a network. --s3 s3://BUCKET/SET compares downloads of a packed set by s5cmd and by
packer.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median, mode
from typing import Any

from experiment import Check, Experiment, Page, main, parser
from harness import REPOSITORY, Contender, NotHere, Results
from machine import folder_bytes
from systems import installed, need_gpu

import packer
from cache.node import usable_cpus
from packer.tools.report import charts

VARIANTS = ("as it is", "fix 1", "fix 1 and 2")
ALONE = "the step alone"
CULPRITS = ("transform 3", "read", "none")
_WARM_STEPS = 3


def toy() -> Any:
    """The example."""
    folder = str(REPOSITORY / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module("toy_pipeline")


# --- rows -------------------------------------------------------------------------------------------------------------
def diagnosed(arguments: argparse.Namespace, variant: str, device: str | None = None) -> dict[str, Any]:
    """Diagnose a variant. Without a device the step is simulated, and takes the same time in all rows."""
    example = toy()
    if device is None:
        how: dict[str, Any] = {"simulate_step": json.loads(_step_file(arguments).read_text())}
    else:
        how = {"step": example.make_step(device), "device": device}
    loader = example.make_loader(variant, arguments.batch, usable_cpus(), pin_memory=device is not None)
    result = packer.diagnose(loader, seconds=arguments.seconds, **how)
    lines = {ALONE: result.step.per_second, **example.steps_per_second(variant, result)}
    return {
        **lines,
        "steps_s": result.full.per_second,
        "busy": result.utilization,
        "bound": 1 / result.bound,
        "culprit": result.culprit or "none",
        "verdict": result.verdict,
    }


def _step_file(arguments: argparse.Namespace) -> Path:
    """The file of the seconds of the simulated step."""
    return Path(arguments.work, "step.json")


def copied(batches: Iterable[Any]) -> Iterator[Any]:
    for images, labels in batches:
        yield images.to("cuda", non_blocking=True), labels.to("cuda", non_blocking=True)


def prefetched(batches: Iterable[Any]) -> Iterable[Any]:
    from readers.torch import DevicePrefetcher

    return DevicePrefetcher(batches, "cuda")


def prefetched_by_torchtnt(batches: Iterable[Any]) -> Iterable[Any]:
    import torch
    from torchtnt.utils.data import CudaDataPrefetcher

    ahead: Iterable[Any] = CudaDataPrefetcher(batches, torch.device("cuda"), num_prefetch_batches=2)
    return ahead


AHEAD: dict[str, Callable[[Iterable[Any]], Iterable[Any]]] = {
    "in the step": copied, "DevicePrefetcher": prefetched, "CudaDataPrefetcher": prefetched_by_torchtnt,
}  # fmt: skip


def trained(arguments: argparse.Namespace, ahead: str) -> dict[str, Any]:
    """Steps/s of training on the repaired pipeline; the function `ahead` copies its batches to the GPU."""
    import torch

    example = toy()
    step = example.make_step("cuda")
    count, started = -_WARM_STEPS, 0.0
    loader = example.make_loader("fix 1 and 2", arguments.batch, usable_cpus(), pin_memory=True)
    for batch in AHEAD[ahead](loader):
        if not count:
            torch.cuda.synchronize()
            started = time.perf_counter()
        step(batch)
        count += 1
        if count > 0 and time.perf_counter() - started > arguments.seconds:
            break
    torch.cuda.synchronize()
    return {"steps_s": count / (time.perf_counter() - started)}


def downloaded(arguments: argparse.Namespace, by: str) -> dict[str, Any]:
    if arguments.s3 is None:
        raise NotHere("needs a packed set in an object store: --s3 s3://BUCKET/SET")
    folder = arguments.work / "download"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    started = time.perf_counter()
    {"s5cmd": by_s5cmd, "us": by_us}[by](arguments.s3, folder)
    seconds, size = time.perf_counter() - started, folder_bytes(folder)
    shutil.rmtree(folder)
    return {"mb_s": size / 1e6 / seconds, "mb": size / 1e6}


def by_s5cmd(url: str, folder: Path) -> None:
    command = ["s5cmd", "cp", f"{url.rstrip('/')}/*", f"{folder}/"]
    if endpoint := os.environ.get("AWS_ENDPOINT_URL"):
        command[1:1] = ["--endpoint-url", endpoint]
    subprocess.run(command, check=True, capture_output=True)


def by_us(url: str, folder: Path) -> None:
    import readers

    with readers.stage(url, folder, any_filesystem=True):
        pass


def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """Steps/s of each line of the ladder and of the whole pipeline, or MB/s of a download."""
    if chosen.options.get("gpu"):
        need_gpu()
    if not installed(needs := chosen.options.get("needs", ())):
        raise NotHere(f"not installed: pip install {' '.join(needs)}")
    program = chosen.options.get("program")
    if program is not None and shutil.which(program) is None:
        raise NotHere(f"{program} is not installed")
    figures: dict[str, Any] = chosen.function(arguments)
    return figures


# --- checks -----------------------------------------------------------------------------------------------------------
def check(arguments: argparse.Namespace) -> Iterator[Check]:
    """Check that the repairs change no result: masks, colours, and whole transforms with the same random numbers."""
    import numpy as np
    import torch

    if arguments.images is not None:
        print("s001 makes its images of random values, as the article does: --images is not used", file=sys.stderr)
    example, draw = toy(), np.random.default_rng(1)
    slow, quick = example.RandomMask(), example.QuickMask()
    masks = [draw.random((int(draw.integers(8, 161)), int(draw.integers(8, 161)))) < 1 / 64 for _ in range(50)]
    same = sum(np.array_equal(slow.dilate(mask), quick.dilate(mask)) for mask in masks)
    yield Check("the mask, dilated both ways", f"{same} of {len(masks)} the same", same == len(masks))

    np.random.seed(1)
    shares = [np.mean([member.draw((160, 160)).mean() for _ in range(100)]) for member in (slow, quick)]
    shown = " and ".join(f"{share:.5f}" for share in shares)
    yield Check("share of the pixels that are drawn, 1/64", shown, all(abs(64 * s - 1) < 0.04 for s in shares))

    image = torch.randint(0, 256, (3, 160, 160), dtype=torch.uint8)
    apart = float((example.Scale()(example.ConvertColor()(image)) - example.ScaledColor()(image)).abs().max())
    yield Check("colours, converted both ways", f"at most {apart:.1e} apart, values to 1", apart < 1e-5)

    apart = 0.0
    for seed in range(10):
        raw, made = draw.integers(0, 256, (256, 256, 3), np.uint8), []
        mask = draw.random((example.SIDE, example.SIDE)) < 1 / 64
        for transform in (example.slow_transform(), example.quick_transform()):
            for member in transform.transforms:
                if isinstance(member, example.RandomMask):
                    member.draw = lambda shape, mask=mask: mask
            torch.manual_seed(seed)
            made.append(transform(raw))
        apart = max(apart, float((made[0] - made[1]).abs().max()))
    yield Check("whole transforms with the same draws", f"at most {apart:.1e} apart on 10 images", apart < 1e-5)

    seconds = example.simulated_seconds(arguments.batch, usable_cpus())
    _step_file(arguments).write_text(json.dumps(seconds))


# --- the page ---------------------------------------------------------------------------------------------------------
def _shares(results: Results, prefix: str) -> dict[str, float]:
    """The rate of each line divided by that of the step alone in the same diagnosis; empty if a row did not run."""
    shares = {}
    for variant, lines in toy().LINES.items():
        for line in lines:
            of_step = [run[line] / run[ALONE] for run in results.get(prefix + variant, ()) if line in run]
            if of_step:
                shares[line] = median(of_step)
    return shares if len(shares) == len(toy().ARTICLE) else {}


def claims(results: Results, arguments: argparse.Namespace) -> Iterator[Check]:
    raw, both = "raw image in memory", "fix 1 and 2"
    for prefix, suffix in (("", ""), ("GPU: ", ", on the GPU")):
        if not (shares := _shares(results, prefix)):
            continue
        runs = (results[prefix + variant] for variant in VARIANTS)
        named = [mode(run["culprit"] for run in some if "culprit" in run) for some in runs]
        promise = f"the bottlenecks are the mask, then reading, then none{suffix}"
        yield Check(promise, ", ".join(named), tuple(named) == CULPRITS)
        yield Check(
            f"transforms halve the rate, and reading halves the rest{suffix}",
            f"{shares['processed sample in memory']:.0%}, {shares[raw]:.0%}, {shares['as it is']:.0%} of the step "
            f"alone; there 94 %, 50 %, 26 %",
            shares["processed sample in memory"] > 1.5 * shares[raw] > 1.2 * 1.5 * shares["as it is"],
        )
        yield Check(
            f"the repaired transform costs nothing, but reading does{suffix}",
            f"{shares['fix 1, raw image in memory']:.0%} and {shares['fix 1']:.0%}; there 94 % and 37 %",
            shares["fix 1, raw image in memory"] > 0.85 and shares["fix 1"] < 0.75,
        )
        yield Check(
            f"with both repairs the data keep up{suffix}", f"{shares[both]:.0%}; there 94 %", shares[both] > 0.85
        )


def ladders(page: Page, results: Results, arguments: argparse.Namespace) -> None:
    """The lines of the article's ladder, and the measured lines."""
    article = toy().ARTICLE
    there = {line: steps / article[ALONE] for line, steps in article.items()}
    for prefix, where in (("", "here"), ("GPU: ", "on the GPU")):
        if not (measured := _shares(results, prefix)):
            continue
        page.text(f"## The ladder, {where}")
        page.table(
            ("batches come from", "there: steps/s", "of the step alone", f"{where}: of the step alone"),
            [[line, f"{article[line]:.2f}", f"{there[line]:.0%}", f"{measured[line]:.0%}"] for line in article],
        )
        shares = {
            "the article": [100 * there[line] for line in article],
            where: [100 * measured[line] for line in article],
        }
        caption = "Share of the rate of the step alone, by what is in memory"
        page.chart("ladder" + "-gpu" * bool(prefix), charts.bars([*article], shares, unit="%"), caption)
        named = {name: [run["culprit"] for run in results[prefix + name] if "culprit" in run] for name in VARIANTS}
        page.text(
            "Named, by round: " + "; ".join(f"{name}: {', '.join(culprits)}" for name, culprits in named.items()) + "."
        )


EXPERIMENT = Experiment.read(
    __file__, [diagnosed, trained, downloaded], measure=measure, check=check, claims=claims, more=ladders
)

if __name__ == "__main__":
    given = parser(__doc__)
    given.add_argument("--s3", metavar="URL", help="a packed set in an object store, for the rows that download it")
    main(EXPERIMENT, given)
