"""imagenette2 and three ResNets under a growing load of flips and turns: PyTorch against DALI and ours.

    python benchmarks/seeds/s002.py [--smoke] [--images DIR] [--rounds 2] [--workers N]

Each image is flipped left to right, flipped top to bottom and turned 1, 4, 8 or 12 times before a random box of it is
resized to 224 pixels. Rows are in `s002_rows.py`, the loop and what stands for the models in `s002_steps.py`.
"""

from __future__ import annotations

import argparse
import gc
import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import images
import s002_page
from experiment import Check, Experiment, Page, main, parser
from harness import CONTENDERS, Benchmark, Contender, Results, slug
from machine import list_tree, warm
from s002_rows import BATCH, DALI, DALI_LOADER, LOADS, MEAN, OURS, OURS_NEAREST, PYTORCH, SIZE, STD, Job, ops
from s002_steps import MODELS, Sleeps, doc_ms, look, make_steps, time_batches, trains, watch

from cache.node import usable_cpus

_CHECKED = (PYTORCH, DALI, OURS, DALI_LOADER)
_SLEEPS = "sleeps.json"
# Mean differences of 255 that checks allow: of resized images; for each turn by Pillow, which drops the fraction of
# every value; of the nearest pixels, where two are equally near; of the same draws in DALI.
_LARGEST = {"samples": 4.0, "turn": 0.7, "nearest": 1.0, "dali": 1.0}


@dataclass(frozen=True)
class Settings:
    """images: files. size: their width and height, None: as they are. loads: of flips and turns. compared: images that
    the checks compare. warm: batches before the clock. seconds, least: of each figure, and batches at least. watched:
    seconds of utilisation."""

    images: int = 1280
    size: tuple[int, int] | None = None
    batch: int = BATCH
    loads: tuple[int, ...] = LOADS
    compared: int = 16
    warm: int = 2
    seconds: float = 1.0
    least: int = 3
    watched: float = 6.0


def settings(arguments: argparse.Namespace) -> Settings:
    if not arguments.smoke:
        return Settings()
    return Settings(64, (160, 120), 8, (1, 3), warm=2, seconds=0.2, least=2, watched=1.0)


def job(arguments: argparse.Namespace, load: int, *, ordered: bool = False) -> Job:
    work: Path = arguments.work
    return Job(work / "tree", work / "packed", settings(arguments).batch, arguments.workers, load, ordered)


# --- before the clock -------------------------------------------------------------------------------------------------
def check(arguments: argparse.Namespace) -> Iterator[Check]:
    """Make the data; compare samples, labels and pixels; find out how long steps are."""
    import packer

    some = settings(arguments)
    first = job(arguments, 1)
    images.make(first.tree, some.images, size=some.size, source=arguments.images)
    if not first.packed.exists():
        packer.convert(first.tree, "tar", first.packed)
    warm([first.tree, first.packed])
    for name in _CHECKED:
        if _is_installed(CONTENDERS[name]):
            yield _same_samples(name, arguments)
    for load in some.loads:
        yield from _same_draws(load, arguments)
    if not trains():
        batches = iter(CONTENDERS[PYTORCH].function(first))
        for _ in range(some.warm):
            next(batches)
        ms, _ = time_batches(batches, look, 2 * some.seconds, 2 * some.least)
        Sleeps(ms / doc_ms(MODELS[0], 1, 0)).save(arguments.work / _SLEEPS)


def _is_installed(chosen: Contender) -> bool:
    try:
        for module in chosen.imports:
            importlib.import_module(module)
    except ImportError:
        return False
    return True


def _same_samples(name: str, arguments: argparse.Namespace) -> Check:
    """Whether a row gives the samples of the files, in their order, where it only resizes them."""
    import numpy as np
    from pillow_transforms import read_image, resize

    first, count = job(arguments, 0, ordered=True), settings(arguments).compared
    files = list_tree(first.tree)[:count]
    pixels, labels = _pixels(CONTENDERS[name].function(first), count)
    same = sum(label == expected for label, (_, expected) in zip(labels, files, strict=True))
    by_image = [
        float(np.abs(found - np.asarray(resize(read_image(path), (SIZE, SIZE)), np.float32)).mean())
        for found, (path, _) in zip(pixels, files, strict=True)
    ]
    found = f"{same} of {count} labels; pixels differ from Pillow's by {max(by_image):.2f} of 255 on the worst image"
    return Check(
        f"{name}: samples and labels as the files have them",
        found,
        same == count and max(by_image) < _LARGEST["samples"],
    )


def _same_draws(load: int, arguments: argparse.Namespace) -> Iterator[Check]:
    """What ImageLoader makes of images, against Pillow and DALI with the draws that its recipe makes for them."""
    import numpy as np
    from pillow_transforms import read_image

    from readers.augment import Recipe

    first, count = job(arguments, load, ordered=True), settings(arguments).compared
    files = [read_image(path) for path, _ in list_tree(first.tree)[:count]]
    sizes = np.array([(image.height, image.width) for image in files])
    plan = Recipe(ops(load)).plan(1, 0, np.arange(count), sizes[:, 0], sizes[:, 1])
    steps = [op for op, _ in plan.before[0].steps]
    flips = sum(bool(op.flip_axis) for op in steps)
    yield Check(
        f"load {load}: ours merges no turns, and no flips but those before the first turn",
        f"turns of an image: {len(steps) - flips}; flips behind the first of them: {flips}",
        (len(steps) - flips, flips) == (load, 2 * load - 2),
    )
    ours, _ = _pixels(CONTENDERS[OURS].function(first), count)
    nearest, _ = _pixels(CONTENDERS[OURS_NEAREST].function(first), count)

    def compare(ours: Any, others: Iterable[Any]) -> tuple[float, float]:
        """(mean difference, by how much the others are darker)"""
        apart = [a - np.asarray(b, np.float32) for a, b in zip(ours, others, strict=True)]
        return float(np.mean([np.abs(one).mean() for one in apart])), float(np.mean([one.mean() for one in apart]))

    what = f"load {load}: ours against Pillow with the same draws"
    apart, darker = compare(ours, (_by_plan(image, plan, i, True) for i, image in enumerate(files)))
    found = f"{apart:.2f} of 255 on average; Pillow is {darker:.2f} darker, as it drops a fraction at every turn"
    yield Check(f"{what}, bilinear", found, apart < 1 + _LARGEST["turn"] * load)
    apart, _ = compare(nearest, (_by_plan(image, plan, i, False) for i, image in enumerate(files)))
    yield Check(f"{what}, nearest pixel", f"{apart:.2f} of 255 on average", apart < _LARGEST["nearest"])
    if _is_installed(CONTENDERS[DALI_LOADER]):
        theirs, _ = _pixels(CONTENDERS[DALI_LOADER].function(first), count)
        dali, _ = compare(ours, theirs)
        what = f"load {load}: ImageLoader against DaliLoader, both with their own draws, which are the same"
        yield Check(what, f"{dali:.2f} of 255 on average", dali < _LARGEST["dali"])


def _by_plan(image: Any, plan: Any, number: int, bilinear: bool) -> Any:
    """An image by Pillow, by the plan of a recipe."""
    from pillow_transforms import crop, hflip, resize, rotate, vflip

    (before,), box = plan.before, plan.boxes
    image = hflip(image) if before.hflip[number] else image
    image = vflip(image) if before.vflip[number] else image
    for op, parameters in before.steps:
        value = float(parameters[number, 0])
        if not op.flip_axis:
            image = rotate(image, value, bilinear=bilinear)
        elif value:
            image = hflip(image) if op.flip_axis == 3 else vflip(image)
    edges = (int(side[number]) for side in (box.top, box.left, box.height, box.width))
    return resize(crop(image, *edges), (SIZE, SIZE))


def _pixels(loader: Iterable[Any], count: int) -> tuple[Any, list[int]]:
    """The first images of a row as float32 [count, height, width, 3], 0 to 255, and their labels."""
    import numpy as np

    found, labels = [], []
    for batch, numbers in loader:
        found.append(batch.cpu().numpy().transpose(0, 2, 3, 1))
        labels += numbers.tolist()
        if len(labels) >= count:
            break
    return 255 * (np.concatenate(found)[:count] * np.float32(STD) + np.float32(MEAN)), labels[:count]


# --- the clock --------------------------------------------------------------------------------------------------------
def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """Of each load: "alone 4", ms a batch of the loader by itself; "cpu 4", CPU ms an image then; "ResNet-18 4", ms a
    step of the loop; and of the last load what was busy in a loop with the first model."""
    some, option, figures = settings(arguments), chosen.options.get, {}
    steps = make_steps(arguments.work / _SLEEPS)
    least = max(some.least, option("least", 0))
    for load in (some.loads[0], some.loads[-1]) if option("ends") else some.loads:
        batches = iter(chosen.function(job(arguments, load)))
        _check_batch(next(batches)[0], some)
        for _ in range(some.warm):
            next(batches)
        figures[f"alone {load}"], figures[f"cpu {load}"] = time_batches(batches, look, some.seconds, least)
        for model in MODELS[: option("models", len(MODELS))]:
            figures[f"{model} {load}"], _ = time_batches(batches, steps[model], some.seconds, least)
        if load == some.loads[-1] and option("watched"):
            figures |= watch(batches, steps[MODELS[0]], some.watched, _record(chosen.name, arguments))
        del batches
        gc.collect()  # ends worker processes and pipelines
    return figures


def _check_batch(batch: Any, some: Settings) -> None:
    shape = (some.batch, 3, SIZE, SIZE)
    if tuple(batch.shape) != shape or str(batch.dtype) != "torch.float32":
        raise ValueError(f"a batch of {batch.dtype} {tuple(batch.shape)}, expected float32 {shape}")


def _record(name: str, arguments: argparse.Namespace) -> Path:
    return Path(arguments.work, f"usage-{slug(name)}.jsonl")


def publish(page: Page, results: Results, arguments: argparse.Namespace) -> None:
    sleeps = None if trains() else Sleeps.load(arguments.work / _SLEEPS)
    records = {name: _record(name, arguments) for name in CONTENDERS}
    s002_page.publish(page, results, settings(arguments).loads, sleeps, records)


EXPERIMENT = Experiment(
    name="s002",
    document="Accelerate computer vision training using GPU preprocessing with NVIDIA DALI on Amazon SageMaker, AWS "
    "Machine Learning Blog",
    about="It trained ResNet-18, -50 and -152 on imagenette2 (13,395 JPEGs of 144 kB on average, batches of 32, 8 CPUs "
    "and one V100), with images flipped and turned 1, 4, 8 or 12 times before they are resized: by PyTorch's "
    "DataLoader on the CPU, and by DALI on the GPU, which took 28 to 73 % less time. Here PyTorch, DALI and ours do "
    "the same work.",
    benchmark=Benchmark(
        title="Heavy augmentation: PyTorch, DALI and ours under three models",
        columns=(),
        key="alone 1",
        limits=(),
        measure=measure,
        less_is_better=True,
    ),
    check=check,
    publish=publish,
)

if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--workers", type=int, default=usable_cpus(), help="processes or threads of each row")
    options.set_defaults(rounds=2)
    main(EXPERIMENT, options)
