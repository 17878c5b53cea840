"""Which stage starves the training: a pipeline with two planted bottlenecks, diagnosed, repaired, diagnosed again.

    python benchmarks/seeds/s001.py [--seconds 20] [--batch-size 32] [--smoke]

The pipeline, its repairs and the figures of the article are those of `examples/toy_pipeline.py`. A row is a diagnosis
of one variant by `packer.diagnose`. On the CPU the step is simulated, since a network would take the cores from the
workers; the rows with a GPU train one. --s3 s3://BUCKET/SET compares the download of a packed set by s5cmd with ours.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import median, mode
from typing import Any

from experiment import Check, Experiment, Page, figure, main, parser, ratio
from harness import REPOSITORY, Benchmark, Contender, NotHere, Results, contender
from machine import folder_bytes, has_gpu
from report import Column

import packer
from cache.node import usable_cpus
from packer.tools.report import charts

__all__: list[str] = []

VARIANTS = ("as it is", "fix 1", "fix 1 and 2")
ALONE = "the step alone"
CULPRITS = ("transform 3", "read", "none")
_WARM_STEPS = 3
# Share of the time in which the GPU of the article had work, as far as it says.
_BUSY_THERE = {"as it is": "22 %", "GPU: as it is": "22 %"}


def toy() -> Any:
    """The example."""
    folder = str(REPOSITORY / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module("toy_pipeline")


# --- rows -------------------------------------------------------------------------------------------------------------
def _diagnosed(arguments: argparse.Namespace, variant: str, device: str | None = None) -> dict[str, Any]:
    """A diagnosis; without a device of a simulated step, which takes the same time in all rows."""

    example = toy()
    if device is None:
        how: dict[str, Any] = {"simulate_step": json.loads(_step_file(arguments).read_text())}
    else:
        how = {"step": example.make_step(device), "device": device}
    loader = example.make_loader(variant, _batch_size(arguments), usable_cpus(), pin_memory=device is not None)
    result = packer.diagnose(loader, seconds=_seconds(arguments), **how)
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
    """Where the seconds of the simulated step are."""
    found: Path = arguments.work / "step.json"
    return found


def _seconds(arguments: argparse.Namespace) -> float:
    return arguments.seconds or (0.4 if arguments.smoke else 20.0)


def _batch_size(arguments: argparse.Namespace) -> int:
    return arguments.batch_size or (2 if arguments.smoke else 32)


for _variant in VARIANTS:
    contender(_variant, imports="torch")(partial(_diagnosed, variant=_variant))
    contender(f"GPU: {_variant}", gpu=True, note="trains a small network")(
        partial(_diagnosed, variant=_variant, device="cuda")
    )


def _copied(batches: Iterable[Any]) -> Iterator[Any]:
    for images, labels in batches:
        yield images.to("cuda", non_blocking=True), labels.to("cuda", non_blocking=True)


def _prefetched(batches: Iterable[Any]) -> Iterable[Any]:
    from readers.torch import DevicePrefetcher

    return DevicePrefetcher(batches, "cuda")


def _prefetched_by_torchtnt(batches: Iterable[Any]) -> Iterable[Any]:
    import torch
    from torchtnt.utils.data import CudaDataPrefetcher

    found: Iterable[Any] = CudaDataPrefetcher(batches, torch.device("cuda"), num_prefetch_batches=2)
    return found


def _trained(arguments: argparse.Namespace, ahead: Callable[[Iterable[Any]], Iterable[Any]]) -> dict[str, Any]:
    """Steps/s of training on the repaired pipeline, whose batches `ahead` brings to the GPU."""
    import torch

    example = toy()
    step = example.make_step("cuda")
    count, started = -_WARM_STEPS, 0.0
    loader = example.make_loader("fix 1 and 2", _batch_size(arguments), usable_cpus(), pin_memory=True)
    for batch in ahead(loader):
        if not count:
            torch.cuda.synchronize()
            started = time.perf_counter()
        step(batch)
        count += 1
        if count > 0 and time.perf_counter() - started > _seconds(arguments):
            break
    torch.cuda.synchronize()
    return {"steps_s": count / (time.perf_counter() - started)}


for _name, _ahead, _needs in (
    ("GPU: copied in the step", _copied, ()),
    ("ours: GPU, DevicePrefetcher", _prefetched, ()),
    ("GPU: TorchTNT's CudaDataPrefetcher", _prefetched_by_torchtnt, ("torchtnt",)),
):
    contender(_name, gpu=True, needs=_needs, note="trains the repaired pipeline")(partial(_trained, ahead=_ahead))


def _downloaded(arguments: argparse.Namespace, download: Callable[[str, Path], None]) -> dict[str, Any]:
    if arguments.s3 is None:
        raise NotHere("needs a packed set in an object store: --s3 s3://BUCKET/SET")
    folder = arguments.work / "download"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    started = time.perf_counter()
    download(arguments.s3, folder)
    seconds, size = time.perf_counter() - started, folder_bytes(folder)
    shutil.rmtree(folder)
    return {"mb_s": size / 1e6 / seconds, "mb": size / 1e6}


def _by_s5cmd(url: str, folder: Path) -> None:
    command = ["s5cmd", "cp", f"{url.rstrip('/')}/*", f"{folder}/"]
    if endpoint := os.environ.get("AWS_ENDPOINT_URL"):
        command[1:1] = ["--endpoint-url", endpoint]
    subprocess.run(command, check=True, capture_output=True)


def _by_us(url: str, folder: Path) -> None:
    import readers

    with readers.stage(url, folder, any_filesystem=True):
        pass


contender("s5cmd", program="s5cmd", note="s5cmd cp of all objects")(partial(_downloaded, download=_by_s5cmd))
contender(
    "ours: readers.stage",
    imports="readers.opening.remote cache.staging.sources readers.staging obstore",
    note="the same objects; each compared with its CRC32C, and synced",
)(partial(_downloaded, download=_by_us))


def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """Steps/s of each line of the ladder and of the whole, or MB/s of a download."""
    if chosen.options.get("gpu") and not has_gpu():
        raise NotHere("needs a CUDA GPU")
    for module in chosen.options.get("needs", ()):
        if importlib.util.find_spec(module) is None:
            raise NotHere(f"not installed: pip install {module}")
    program = chosen.options.get("program")
    if program is not None and shutil.which(program) is None:
        raise NotHere(f"{program} is not installed")
    figures: dict[str, Any] = chosen.function(arguments)
    return figures


# --- what must hold ---------------------------------------------------------------------------------------------------
def check(arguments: argparse.Namespace) -> Iterator[Check]:
    """The repairs change no result: masks, colours, and whole transforms with the same draws."""
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
    shares = [np.mean([one.draw((160, 160)).mean() for _ in range(100)]) for one in (slow, quick)]
    found = " and ".join(f"{share:.5f}" for share in shares)
    yield Check("share of the pixels that are drawn, 1/64", found, all(abs(64 * s - 1) < 0.04 for s in shares))

    image = torch.randint(0, 256, (3, 160, 160), dtype=torch.uint8)
    apart = float((example.Scale()(example.ConvertColor()(image)) - example.ScaledColor()(image)).abs().max())
    yield Check("colours, converted both ways", f"at most {apart:.1e} apart, values to 1", apart < 1e-5)

    apart = 0.0
    for seed in range(10):
        raw, made = draw.integers(0, 256, (256, 256, 3), np.uint8), []
        mask = draw.random((example.SIDE, example.SIDE)) < 1 / 64
        for transform in (example.slow_transform(), example.quick_transform()):
            for one in transform.transforms:
                if isinstance(one, example.RandomMask):
                    one.draw = lambda shape, mask=mask: mask
            torch.manual_seed(seed)
            made.append(transform(raw))
        apart = max(apart, float((made[0] - made[1]).abs().max()))
    yield Check("whole transforms with the same draws", f"at most {apart:.1e} apart on 10 images", apart < 1e-5)

    seconds = example.simulated_seconds(_batch_size(arguments), usable_cpus())
    _step_file(arguments).write_text(json.dumps(seconds))


# --- the page ---------------------------------------------------------------------------------------------------------
_NAMED = (
    "The third transform is the mask. The last column is steps/s if the culprit cost nothing, which each diagnosis "
    "predicts before anything is repaired. Fix 1 repairs the transforms, and fix 2 the reading, by smaller raw images, "
    "as the article does. There the GPU had work 95 % of the time with a batch that stays on it."
)


def publish(page: Page, results: Results, arguments: argparse.Namespace) -> None:
    """The ladders of the article and of each device, who was named, and what copies and downloads took."""
    there = toy().ARTICLE
    for where, prefix in (("here", ""), ("on the GPU", "GPU: ")):
        shares = _shares(results, prefix)
        if len(shares) == len(there):
            _ladder(page, results, arguments, prefix, where, shares)
    rows = []
    for name in (*VARIANTS, *(f"GPU: {variant}" for variant in VARIANTS)):
        if culprits := _culprits(results, name):
            busy, bound = figure(results, name, "busy"), figure(results, name, "bound")
            rows.append([
                name, ", ".join(culprits), f"{100 * (busy or 0):.0f} %", _BUSY_THERE.get(name, ""),
                f"{figure(results, name, 'steps_s'):.2f}", f"{bound:.2f}",
            ])  # fmt: skip
    if rows:
        page.section("What was named")
        page.table(("", "culprit, by round", "device has work", "there", "steps/s", "predicted"), rows)
        page.text(_NAMED)
    _systems(page, results)


def _shares(results: Results, prefix: str) -> dict[str, float]:
    """Of each line, of the step alone in the same diagnosis."""
    found = {}
    for variant, lines in toy().LINES.items():
        for line in lines:
            of_step = [run[line] / run[ALONE] for run in results.get(prefix + variant, ()) if line in run]
            if of_step:
                found[line] = median(of_step)
    return found


def _ladder(
    page: Page, results: Results, arguments: argparse.Namespace, prefix: str, where: str, here: dict[str, float]
) -> None:
    article = toy().ARTICLE
    lines, there = list(article), {line: steps / article[ALONE] for line, steps in article.items()}
    named = [mode(_culprits(results, prefix + variant)) for variant in VARIANTS]
    raw, both = "raw image in memory", "fix 1 and 2"
    suffix = "" if not prefix else f", {where}"
    holds = tuple(named) == CULPRITS
    page.claim(f"the culprits are the mask, then reading, then none{suffix}", ", ".join(named), holds)
    page.claim(
        f"the transforms cost about half of the rate, reading about half of the rest{suffix}",
        f"{here['processed sample in memory']:.0%}, {here[raw]:.0%}, {here['as it is']:.0%} of the step alone; there "
        f"94 %, 50 %, 26 %",
        here["processed sample in memory"] > 1.5 * here[raw] > 1.2 * 1.5 * here["as it is"],
    )
    page.claim(
        f"the repaired transform costs nothing, but then reading does{suffix}",
        f"{here['fix 1, raw image in memory']:.0%} and {here['fix 1']:.0%}; there 94 % and 37 %",
        here["fix 1, raw image in memory"] > 0.85 and here["fix 1"] < 0.75,
    )
    page.claim(f"with both repairs the data keep up{suffix}", f"{here[both]:.0%}; there 94 %", here[both] > 0.85)
    page.section(f"The ladder, {where}")
    if not prefix:
        page.text(
            f"Batches of {_batch_size(arguments)} images, {usable_cpus()} workers, and a simulated step of "
            f"{1e3 * json.loads(_step_file(arguments).read_text()):.0f} ms: 0.9 of the time in which the workers load "
            f"the raw images of a batch, so that the ladder has the shape of the article's on any machine. There: 256 "
            f"images, 4 workers and an A10G. A step that is simulated does not compete for the CPUs, and nothing is "
            f"copied to a device: the second line cannot differ from the first."
        )
    rows = []
    for line in lines:
        variant = next(v for v in VARIANTS if line in toy().LINES[v])
        steps = figure(results, prefix + variant, line)
        rows.append([line, f"{article[line]:.2f}", f"{there[line]:.0%}", f"{steps:.2f}", f"{here[line]:.0%}"])
    page.table(("batches come from", "there: steps/s", "of the step alone", "here: steps/s", "of the step alone"), rows)
    shares = {"the article": [100 * there[line] for line in lines], where: [100 * here[line] for line in lines]}
    caption = "Share of the rate of the step alone, by what is in memory"
    page.chart("ladder" if not prefix else "ladder-gpu", charts.bars(lines, shares, unit="%"), caption)


def _culprits(results: Results, name: str) -> list[str]:
    return [run["culprit"] for run in results.get(name, ()) if "culprit" in run]


def _systems(page: Page, results: Results) -> None:
    page.section("What the article also names")
    page.text(
        "TorchTNT's CudaDataPrefetcher copies batches to a GPU ahead of the training, as "
        "`readers.torch.DevicePrefetcher` does; the rows of both train the repaired pipeline on a GPU. s5cmd downloads "
        "from object stores; ours is `readers.stage` or `packer stage` from the address, which checks what it has "
        "copied, and is done once for all processes of a node. These rows need a set in such a store (`--s3`) and, for "
        "s5cmd, the program. PyTorch's profiler shows what a step does; `packer diagnose --trace` writes such a trace, "
        "with a track for each line of the ladder."
    )
    rows = []
    for name, key, unit in (
        ("GPU: copied in the step", "steps_s", "steps/s"),
        ("ours: GPU, DevicePrefetcher", "steps_s", "steps/s"),
        ("GPU: TorchTNT's CudaDataPrefetcher", "steps_s", "steps/s"),
        ("s5cmd", "mb_s", "MB/s"),
        ("ours: readers.stage", "mb_s", "MB/s"),
    ):
        if (value := figure(results, name, key)) is not None:
            rows.append([name, f"{value:,.1f} {unit}"])
    if rows:
        page.table(("", "rate"), rows)
    found = ratio(results, "ours: readers.stage", "s5cmd", "mb_s")
    if found is not None:
        page.claim("a set is staged as fast as s5cmd downloads it", f"{found:.2f} times", found >= 0.9)


EXPERIMENT = Experiment(
    name="s001",
    document="“PyTorch Model Performance Analysis and Optimization, part 8”, on caching as a means of diagnosis",
    about=(
        "The article keeps batches, samples and raw images in memory, one after the other, measures the steps a second "
        "of each, and so finds which stage of the input starves the GPU: 0.89 steps/s as it is, 3.45 with a batch that "
        "stays on the GPU. `packer.diagnose` climbs the same ladder by itself; here it does so on a pipeline with the "
        "same two bottlenecks."
    ),
    benchmark=Benchmark(
        title="Which stage starves the training",
        columns=(Column("steps_s", "steps/s", "{:.2f}"),),
        key="steps_s",
        limits=(),
        measure=measure,
    ),
    check=check,
    publish=publish,
)


def options() -> argparse.ArgumentParser:
    found = parser(__doc__)
    found.add_argument("--seconds", type=float, help="of each diagnosis; default 20, with --smoke 0.4")
    found.add_argument("--batch-size", type=int, help="default 32, with --smoke 2")
    found.add_argument("--s3", metavar="URL", help="a packed set in an object store, for the rows that download it")
    return found


if __name__ == "__main__":
    main(EXPERIMENT, options())
