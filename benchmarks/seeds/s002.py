"""imagenette2 and three ResNets with more and more flips and rotations: PyTorch against DALI and packer.

    python benchmarks/seeds/s002.py [--smoke] [--images DIR] [--rounds 2] [--workers N]

Each image is flipped left to right (p = 0.5), flipped top to bottom (p = 0.5) and rotated by -5 to 5 degrees 1, 4, 8 or
12 times before a random box of it is resized to 224 pixels; in all rows a rotation keeps the size, and uncovered
corners are black. A row takes a `Job` and returns batches (images, labels) without end.

With a GPU that torch uses, and torchvision, a step trains the model, on 10 classes, as in the sample code of the
document. Without them a step sleeps for the step time of the document's faster trial, times a factor: the PyTorch
row's time per batch at load 1, measured, over the document's. So steps and loaders have the same proportions as in the
document.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from experiment import Check, Column, Experiment, Page, Section, figure, main, parser, ratio  # isort: skip
import numpy as np
import systems
from harness import CONTENDERS, Contender, Results, slug
from machine import Clock, has_gpu, list_tree, warm

import packer
from packer.tools.monitor import load as load_usage
from packer.tools.report import charts

SIZE, DEGREES, LOADS = 224, 5, (1, 4, 8, 12)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PYTORCH, PYTORCH_LINEAR = "PyTorch DataLoader", "PyTorch DataLoader, bilinear rotation"
DALI, DALI_GPU = "DALI, CPU operators", "DALI, GPU operators"
OURS, OURS_NEAREST, OURS_GPU = "ours: ImageLoader", "ours: ImageLoader, nearest pixel", "ours: ImageLoader, GPU"
DALI_LOADER = "ours: DaliLoader, CPU"
# The document's seconds per epoch, by model and load: PyTorch on the CPU, DALI on the GPU; and its steps per epoch.
SECONDS = {
    "ResNet-18": {1: (41.67, 21.3), 4: (49.95, 21.37), 8: (61.92, 21.08), 12: (77.82, 21.33)},
    "ResNet-50": {1: (72.64, 46.94), 4: (75.21, 45.02), 8: (81.22, 46.29), 12: (88.89, 46.43)},
    "ResNet-152": {1: (166.96, 119.96), 4: (169.68, 115.23), 8: (169.03, 117.73), 12: (173.18, 114.38)},
}
STEPS, MODELS, FIRST = 298, tuple(SECONDS), "ResNet-18"
QUANTILES = ("p50", "p95")
Step = Callable[[Any, Any], None]
# Allowed mean differences, on the scale 0 to 255: resized images; a single transform by Pillow, which drops the
# fraction of every bilinear value; the same random numbers in DALI.
_LARGEST = {"samples": 4.0, "map": 1.0, "dali": 1.0}


@dataclass(frozen=True)
class Job:
    """tree: class folders of JPEG files. packed: the packed set of the tree. load: rounds of flips and rotations; 0:
    whole images are only resized. ordered: in the order of the names, not shuffled."""

    tree: Path
    packed: Path
    batch: int
    workers: int
    load: int
    ordered: bool = False

    def order(self) -> Any:
        """The order of the names, or None for the row's own shuffle."""
        from readers.order import Sequential

        return Sequential(len(list_tree(self.tree))) if self.ordered else None

    def reader(self) -> Any:
        import readers

        return readers.open(self.packed)


def make_job(arguments: argparse.Namespace, load: int, *, compared: bool = False) -> Job:
    """compared: a job over the few images of the checks, each in its own class, in the order of their names."""
    work: Path = arguments.work / ("some" if compared else "all")
    return Job(work / "tree", work / "packed", arguments.batch, arguments.workers, load, ordered=compared)


def loads(arguments: argparse.Namespace) -> tuple[int, ...]:
    return (1, 3) if arguments.smoke else LOADS


# --- rows -------------------------------------------------------------------------------------------------------------
def pytorch(job: Job, bilinear: bool = False) -> Iterable[Any]:
    import pillow_transforms as T
    import torch

    turns = [T.RandomHorizontalFlip(), T.RandomVerticalFlip(), T.RandomRotation(DEGREES, bilinear)] * job.load
    box = T.RandomResizedCrop(SIZE) if job.load else T.Resize((SIZE, SIZE))
    data = T.Folder(job.tree, T.Compose([*turns, box, T.ToTensor(), T.Normalize(MEAN, STD)]))
    pinned = torch.cuda.is_available()
    return systems.data_loader(data, job.batch, job.workers, order=job.order(), pin_memory=pinned)


def dali(job: Job, device: str) -> Iterable[Any]:
    def graph(fn: Any, decoders: str) -> Any:
        encoded, labels = fn.readers.file(file_root=str(job.tree), random_shuffle=not job.ordered)
        pixels = fn.decoders.image(encoded, device=decoders)
        for _ in range(job.load):
            pixels = fn.flip(pixels, horizontal=fn.random.coin_flip(), vertical=fn.random.coin_flip())
            angle = fn.random.uniform(range=[-DEGREES, DEGREES])
            pixels = fn.rotate(pixels, angle=angle, keep_size=True, fill_value=0)
        pixels = (fn.random_resized_crop if job.load else fn.resize)(pixels, size=[SIZE, SIZE])
        return systems.normalized(fn, pixels, MEAN, STD), labels

    return systems.dali(job.batch, job.workers, device, graph)


def ops(load: int, bilinear: bool = True) -> list[Any]:
    """The ops of our rows."""
    from readers import augment as A

    box = A.RandomResizedCrop(SIZE) if load else A.Resize((SIZE, SIZE))
    rotation = A.RandomRotation(DEGREES, "bilinear" if bilinear else "nearest")
    return [*[A.RandomHorizontalFlip(), A.RandomVerticalFlip(), rotation] * load, box, A.Normalize(MEAN, STD)]


def image_loader(job: Job, bilinear: bool = True, device: str = "cpu", compose: str = "auto") -> Iterable[Any]:
    from readers import Decode

    how, decode = ops(job.load, bilinear), Decode(layout="NCHW", compose=compose)  # type: ignore[arg-type]
    shuffle = not job.ordered
    return systems.image_loader(job.reader(), job.batch, how, job.workers, device, shuffle=shuffle, decode=decode)


def dali_loader(job: Job, device: str) -> Iterable[Any]:
    return systems.dali_loader(job.reader(), job.batch, ops(job.load), job.workers, device, shuffle=not job.ordered)


# --- checks -----------------------------------------------------------------------------------------------------------
def check(arguments: argparse.Namespace) -> Iterator[Check]:
    """Make the data; compare samples, labels and pixels; determine the length of steps."""
    first = make_job(arguments, 1)
    some, size = make_job(arguments, 0, compared=True), (160, 120) if arguments.smoke else None
    systems.make_images(first.tree, arguments.count, size, source=arguments.images)
    systems.class_each(first.tree, some.tree, arguments.compared + -arguments.compared % arguments.batch)
    for job in (first, some):
        if not job.packed.exists():
            packer.convert(job.tree, "tar", job.packed)
    warm([first.tree, first.packed])
    for name in (PYTORCH, DALI, OURS, DALI_LOADER):
        if systems.installed(CONTENDERS[name].imports):
            yield _same_samples(name, arguments)
    for load in loads(arguments):
        yield from _same_draws(load, arguments)
    if not trains():
        batches = iter(CONTENDERS[PYTORCH].function(first))
        for _ in range(2):
            next(batches)
        ms, _ = time_batches(batches, look, 2 * arguments.seconds, 4)
        _factor_file(arguments).write_text(json.dumps(ms * STEPS / SECONDS[FIRST][1][0] / 1e3))


def _same_samples(name: str, arguments: argparse.Namespace) -> Check:
    """Check that a row that only resizes returns the samples of the files, in their order."""
    from pillow_transforms import read_image, resize

    job = make_job(arguments, 0, compared=True)
    references = [np.asarray(resize(read_image(path), (SIZE, SIZE))) for path, _ in list_tree(job.tree)]
    run, count = systems.compare(CONTENDERS[name].function(job), np.stack(references), MEAN, STD), len(references)
    text = (
        f"{run['right']} of {count} labels; pixels differ from Pillow's by {run['worst']:.2f} of 255 on the worst image"
    )
    in_order = run["order"] == systems.digest(range(run["images"])) and not run["flipped"]
    right = run["right"] == count and in_order and run["worst"] < _LARGEST["samples"]
    return Check(f"{name}: samples and labels as the files have them", text, right)


def _same_draws(load: int, arguments: argparse.Namespace) -> Iterator[Check]:
    """Compare the images of ImageLoader with Pillow and, op by op, with DALI, for the random numbers of its recipe."""
    from pillow_transforms import read_image

    from readers.augment import Recipe

    job, count = make_job(arguments, load, compared=True), arguments.compared
    files = [read_image(path) for path, _ in list_tree(job.tree)[:count]]
    sizes = np.array([(image.height, image.width) for image in files])
    plan = Recipe(ops(load), compose=True).plan(1, 0, np.arange(count), sizes[:, 0], sizes[:, 1])
    steps = {len(made.first.steps) for made in plan.jobs()}
    promise = f"load {load}: packer moves the pixels of an image once, by one map of all flips and rotations"
    yield Check(promise, f"steps of an image: {steps}", steps == {1})
    for bilinear, name in {True: OURS, False: OURS_NEAREST}.items():
        pixels, bound = _pixels(CONTENDERS[name].function(job), job, count), _LARGEST["map"]
        pairs = zip(pixels, (_by_plan(image, plan, i, bilinear) for i, image in enumerate(files)), strict=True)
        apart = float(np.mean([np.abs(a - np.asarray(b, np.float32)).mean() for a, b in pairs]))
        how = "bilinear" if bilinear else "nearest pixel"
        promise = f"load {load}: packer against one Image.transform by Pillow with the same draws, {how}"
        yield Check(promise, f"{apart:.2f} of 255 on average", apart < bound)
    if systems.installed(CONTENDERS[DALI_LOADER].imports):
        exact, by_dali = image_loader(job, compose="exact"), CONTENDERS[DALI_LOADER].function(job)
        apart = float(np.abs(_pixels(exact, job, count) - _pixels(by_dali, job, count)).mean())
        promise = (
            f"load {load}: ImageLoader, op by op, against DaliLoader, both with their own draws, which are the same"
        )
        yield Check(promise, f"{apart:.2f} of 255 on average", apart < _LARGEST["dali"])


def _by_plan(image: Any, plan: Any, number: int, bilinear: bool) -> Any:
    """Transform an image with Pillow by the plan of a recipe: all ops that move pixels as one matrix, which also
    enlarges bilinearly."""
    from PIL import Image
    from pillow_transforms import crop, resize

    (before,), box = plan.before, plan.boxes
    to_middle = np.array([[1, 0, -image.width / 2], [0, 1, -image.height / 2], [0, 0, 1]])
    total = np.linalg.inv(to_middle)
    steps = [(op.flip_axis, float(parameters[number, 0])) for op, parameters in before.steps]
    for axis, value in ((3, before.hflip[number]), (2, before.vflip[number]), *steps):
        turn = 0.0 if axis else np.radians(value)
        matrix = np.array([[np.cos(turn), -np.sin(turn), 0], [np.sin(turn), np.cos(turn), 0], [0, 0, 1]])
        if axis and value:
            matrix[3 - axis, 3 - axis] = -1
        total = total @ matrix
    top, left, height, width = (int(side[number]) for side in (box.top, box.left, box.height, box.width))
    total = total @ to_middle
    method = Image.Resampling.BILINEAR if bilinear else Image.Resampling.NEAREST
    if bilinear and max(height, width) <= SIZE:
        total = total @ np.array([[width / SIZE, 0, left], [0, height / SIZE, top], [0, 0, 1]])
        return image.transform((SIZE, SIZE), Image.Transform.AFFINE, tuple(total[:2].ravel()), method)
    moved = image.transform(image.size, Image.Transform.AFFINE, tuple(total[:2].ravel()), method)
    return resize(crop(moved, top, left, height, width), (SIZE, SIZE))


def _pixels(row: Iterable[Any], job: Job, count: int) -> Any:
    """The first images of a row as float32 [count, height, width, 3], 0 to 255."""
    batches = itertools.islice(row, -(-count // job.batch))
    pixels = np.concatenate([systems.on_host(batch).transpose(0, 2, 3, 1) for batch, _ in batches])[:count]
    return 255 * (pixels * np.float32(STD) + np.float32(MEAN))


# --- measurement ------------------------------------------------------------------------------------------------------
def trains() -> bool:
    """Whether a step trains a real model."""
    return importlib.util.find_spec("torchvision") is not None and has_gpu()


def _factor_file(arguments: argparse.Namespace) -> Path:
    return Path(arguments.work, "factor.json")


def _sleep_ms(arguments: argparse.Namespace, model: str) -> float:
    """The document's mean step time over the loads, of its faster trial, times the factor."""
    factor: float = json.loads(_factor_file(arguments).read_text())
    return factor * mean(1e3 * seconds / STEPS for _, seconds in SECONDS[model].values())


def look(pixels: Any, labels: Any) -> None:
    """A step that only reads a value of the batch."""
    pixels[:, 0, 0, 0].sum().item()


def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """Figures of each load: "alone 4", ms per batch of the loader alone; "cpu 4", its CPU ms per image; "ResNet-18 4",
    ms per step of the loop; and for the last load the utilisation in a loop with the first model."""
    option, figures = chosen.options.get, {}
    models = MODELS[: option("models", len(MODELS))]
    sleeps = None if trains() else {model: _sleep_ms(arguments, model) / 1e3 for model in MODELS}
    steps = {m: systems.resnet_step(m, 10) if sleeps is None else systems.sleep_step(sleeps[m]) for m in models}
    some = loads(arguments)
    for load in (some[0], some[-1]) if option("ends") else some:
        batches = iter(chosen.function(make_job(arguments, load)))
        systems.check_batch(next(batches)[0], arguments.batch, SIZE)
        for _ in range(2):
            next(batches)
        figures[f"alone {load}"], figures[f"cpu {load}"] = time_batches(batches, look, arguments.seconds, 4)
        for model, step in steps.items():
            figures[f"{model} {load}"], _ = time_batches(batches, step, arguments.seconds, 4)
        if load == some[-1] and option("watched"):
            figures |= _watch(batches, steps[FIRST], arguments.watched, _record(chosen.name, arguments))
        del batches
        gc.collect()  # ends worker processes and pipelines
    return figures


def time_batches(batches: Iterator[Any], step: Step, seconds: float, least: int) -> tuple[float, float]:
    """(ms a step, CPU ms an image of all processes) over `seconds` and at least `least` batches."""
    clock, count, images = Clock(), 0, 0
    while count < least or clock.seconds < seconds:
        pixels, labels = next(batches)
        step(pixels, labels)
        count, images = count + 1, images + len(pixels)
    figures = clock.figures(images)
    return 1e3 * images / figures["images_s"] / count, figures["cpu_us"] / 1e3


def _record(name: str, arguments: argparse.Namespace) -> Path:
    return Path(arguments.work, f"usage-{slug(name)}.jsonl")


def _watch(batches: Iterable[Any], step: Step, seconds: float, path: Path) -> dict[str, float]:
    """Percentiles of utilisation during a loop, in per cent: "cpu_p95", "step_p95", and with a GPU "gpu_p95"; "step" is
    the share of the time since the last sample in which a step was running."""
    total, began = 0.0, 0.0
    sampled, seen = time.perf_counter(), 0.0

    def share() -> float:
        nonlocal sampled, seen
        now = time.perf_counter()
        done = total + (now - began if began else 0.0)
        value, sampled, seen = (done - seen) / max(1e-9, now - sampled), now, done
        return min(1.0, max(0.0, value))

    path.unlink(missing_ok=True)
    with packer.monitor(path, interval=0.2) as sampler:
        sampler.gauge("step busy", share, full=1.0)
        started = time.perf_counter()
        for pixels, labels in batches:
            began = time.perf_counter()
            step(pixels, labels)
            total, began = total + time.perf_counter() - began, 0.0
            sampler.step(images=len(pixels))
            if time.perf_counter() - started >= seconds:
                break
    percentiles = sampler.usage().percentiles()
    names = {"cpu": "cpu busy", "step": "step busy", "gpu": "gpu0 busy"}
    return {
        f"{short}_{quantile}": 100 * getattr(percentiles[name], quantile)
        for short, name in names.items()
        if name in percentiles
        for quantile in QUANTILES
    }


# --- the page ---------------------------------------------------------------------------------------------------------
def _gains(results: Results, name: str, other: str, model: str, some: tuple[int, ...]) -> list[float]:
    """The reduction of the step time against another row, in per cent, by load."""
    times = [ratio(results, name, other, f"{model} {load}") for load in some]
    return [100 * (1 - time) for time in times if time is not None]


def claims(results: Results, arguments: argparse.Namespace) -> Iterator[Check]:
    some = loads(arguments)
    for name, other, comparison in (
        (OURS_NEAREST, PYTORCH, "packer over PyTorch, both with the nearest pixel,"),
        (OURS, PYTORCH_LINEAR, "packer over PyTorch, both with bilinear rotations,"),
        (OURS_GPU, PYTORCH, "packer on the GPU over PyTorch"),
        (DALI_GPU, PYTORCH, "DALI on the GPU over PyTorch, as in the document (28 to 73 %),"),
    ):
        gains = {model: _gains(results, name, other, model, some) for model in MODELS}
        if not all(len(row) == len(some) for row in gains.values()):
            continue
        # Gains that differ by less than three per cent count as the same.
        rises = all(row[-1] >= row[0] - 3 for row in gains.values()) and gains[FIRST][-1] > gains[FIRST][0]
        text = "; ".join(f"{model} {', '.join(f'{gain:.0f}' for gain in row)} %" for model, row in gains.items())
        yield Check(
            f"the gain of {comparison} rises with the load", f"loads {', '.join(map(str, some))}: {text}", rises
        )
        last = [row[-1] for row in gains.values()]
        falls = all(b <= a + 3 for a, b in itertools.pairwise(last)) and last[-1] < last[0]
        text = ", ".join(f"{gain:.0f}" for gain in last)
        yield Check(f"the gain of {comparison} falls with the model", f"load {some[-1]}: {text} %", falls)


def sections(arguments: argparse.Namespace) -> Iterator[Section]:
    some = loads(arguments)
    for model in MODELS:
        text = f"A step sleeps {_sleep_ms(arguments, model):.0f} ms. " if not trains() else ""
        there = ", ".join(f"{a / STEPS * 1e3:.0f} and {b / STEPS * 1e3:.0f}" for a, b in SECONDS[model].values())
        text += f"The document's ms per step at loads 1, 4, 8 and 12 with PyTorch and DALI: {there}."
        columns = tuple(Column(f"{model} {load}", f"load {load}: ms a step", "{:.1f}") for load in some)
        name = slug(model.lower())
        yield Section(name, f"Steps of a training job, {model}", columns, base=PYTORCH, text=text, charted=len(some))
    columns = tuple(
        Column(f"{key} {load}", f"load {load}: {heading}", "{:.2f}")
        for key, heading in (("cpu", "CPU ms an image"), ("alone", "ms a batch"))
        for load in some
    )
    yield Section("cpu", "The loaders alone", columns, base=PYTORCH, charted=len(some))
    names = {"step": "a step under way", "cpu": "CPUs busy", "gpu": "GPU busy"}
    columns = tuple(Column(f"{k}_{q}", f"{name}, {q}, %") for k, name in names.items() for q in QUANTILES)
    text = "Sampled five times a second. There, p95: CPUs 100 % with PyTorch and 65 % with DALI, the GPU 31 and 55 %."
    yield Section("busy", f"What was busy: {FIRST}, load {some[-1]}", columns, text=text, charted=0)


def heat_maps(page: Page, results: Results, arguments: argparse.Namespace) -> None:
    """Charts of utilisation over time, of the rows with the option `watched`."""
    for name in results:
        if figure(results, name, "cpu_p50") is None:
            continue
        usage = load_usage(_record(name, arguments)).summary()
        count = max(1, min(100, len(usage.times)))
        rows = [row for row in usage.heat_rows(count) if "busy" in row.name and row.name[:3] in ("cpu", "gpu", "ste")]
        times = [usage.seconds * column / count for column in range(count)]
        chart = charts.heat_map([row.name for row in rows], times, [row.values for row in rows])
        page.chart(f"busy-{slug(name.lower())}", chart, f"What was busy: {name}")


EXPERIMENT = Experiment.read(
    __file__,
    [pytorch, dali, image_loader, dali_loader],
    measure=measure,
    check=check,
    sections=sections,
    claims=claims,
    more=heat_maps,
)

if __name__ == "__main__":
    given = parser(__doc__)
    given.set_defaults(rounds=2)
    main(EXPERIMENT, given)
