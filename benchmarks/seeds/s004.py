"""Containers (files, HDF5, TFRecord, tar) × loaders (PyTorch, DALI, packer) × few or extensive augmentation.

    python benchmarks/seeds/s004.py [--task imagenet,faces] [--batch 32] [--step MS] [--images DIR] [--smoke]

few: resize, random crop, random flip. extensive: also random brightness, contrast and saturation. imagenet: JPEGs of
500 x 375, short side 256, crop 224. faces: JPEGs of 112 x 112 as in InsightFace, resized to 128, crop 112. All rows
yield normalised float32 [n, 3, crop, crop] without end, with the same number of processes or threads, from a warm page
cache.

Each combination of row, task and load runs a warm-up epoch and two measured epochs: one takes batches as fast as
possible, the other runs a step after each batch: a sleep, or ResNet-50 with a GPU and torchvision. Before that, each
row runs without random operations over images that each have their own class, so that labels identify images, and is
compared with Pillow's result for the same file.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiment import Check, Column, Experiment, Section, compared, figure, main, parser, ratio  # isort: skip
import numpy as np
import systems
from harness import Contender, NotHere, Results, slug
from machine import Clock, has_gpu, list_tree, prime, warm

FEW, EXTENSIVE, CENTRE = "few", "extensive", "centre"  # centre: resize, crop to the middle; nothing is random
LOADS, JITTER, SHARDS = (FEW, EXTENSIVE), 0.4, 4
FILES, HDF5, PIXELS = "PyTorch from files", "PyTorch from HDF5 of JPEGs", "PyTorch from HDF5 of pixels"
DATASET, DALI_LOADER = "ours: ImageDataset from HDF5", "ours: DaliLoader from HDF5"
DALI_FILES, LOADER = "DALI on the CPU from files", "ours: ImageLoader from HDF5"
RESNET = "limit: ResNet-50, batches in memory"
_SMOKE = (FILES, PIXELS, DATASET, DALI_FILES, LOADER, DALI_LOADER)
# Seconds per epoch of ImageNet in the document: 2200; 1300 with DALI; 1800 became 1300 with only a dedicated reader.
SLOW, READER_SLOW, FAST = 2200.0, 1800.0, 1300.0
# Allowed largest and mean difference to Pillow, on the scale 0 to 255, by prefix of rows' names. For DALI's filter and
# packer's see docs/dali.md.
BOUNDS = {"PyTorch": (0.0, 0.0), "ours: Image": (8.0, 0.1), "DALI": (16.0, 0.6), "ours: Dali": (16.0, 0.6)}
OTHER_COLOURS = (20.0, 1.0)
_SHUFFLED = 1000
Batches = Iterable[Any]


@dataclass(frozen=True)
class Task:
    """Width and height of the images; short side after the resize; side of the crop; number of images."""

    name: str
    size: tuple[int, int]
    resize: int
    crop: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    images: int


_HALF = (0.5, 0.5, 0.5)
TASKS = {
    "imagenet": Task("imagenet", (500, 375), 256, 224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 256),
    "faces": Task("faces", (112, 112), 128, 112, _HALF, _HALF, 1024),
}


@dataclass(frozen=True)
class Job:
    """A row's arguments: it makes normalised batches of [batch, 3, crop, crop] from the sets in `folder`."""

    task: Task
    load: str
    folder: Path
    batch: int
    workers: int

    @property
    def is_random(self) -> bool:
        return self.load != CENTRE

    @property
    def items(self) -> list[tuple[str, int]]:
        return list_tree(self.folder / "tree")

    def shards(self, name: str, suffix: str) -> list[str]:
        return sorted(str(path) for path in (self.folder / name).iterdir() if path.name.endswith(suffix))

    def check(self) -> Job:
        """The same job over the few images of the checks."""
        return replace(self, load=CENTRE, folder=self.folder / "check", batch=min(8, self.batch))


def job_of(arguments: argparse.Namespace, task: str, load: str) -> Job:
    unit = arguments.batch * SHARDS
    count = max(1, round((1 if arguments.smoke else TASKS[task].images) / unit)) * unit
    return Job(TASKS[task], load, arguments.work / f"{task}-{count}", arguments.batch, arguments.workers)


# --- the sets ---------------------------------------------------------------------------------------------------------
def make_sets(arguments: argparse.Namespace, task: str) -> None:
    """Make the sets of a task and of its checks; an existing folder stays unchanged."""
    job = job_of(arguments, task, FEW)
    if job.folder.exists():
        return
    count, partial = int(job.folder.name.rpartition("-")[2]), job.folder.with_name(job.folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    systems.make_images(partial / "tree", count, job.task.size, source=arguments.images)
    systems.class_each(partial / "tree", partial / "check" / "tree", job.check().batch * SHARDS)
    for folder in (partial, partial / "check"):
        _pack(folder, job.task)
    partial.rename(job.folder)


def _pack(folder: Path, task: Task) -> None:
    """Write hdf5/, tfrecord/ and tar/: packed sets with DALI's indexes; images.h5: JPEGs of variable length; pixels.h5:
    a chunk per image, resized and cropped to a square. The document's HDF5 files held one of the two; it does not say
    which."""
    import h5py
    import pillow_transforms as T

    import packer

    items, side = list_tree(folder / "tree"), task.resize
    for form in ("hdf5", "tfrecord", "tar"):
        how = {"shards": packer.Shards(samples=-(-len(items) // SHARDS)), "run": packer.Run(workers=1)}
        packer.convert(folder / "tree", form, folder / form, **how)
    for form in ("tfrecord", "tar"):
        packer.export_index(folder / form, "dali")
    square = T.Compose([T.Resize(side), T.CenterCrop(side)])
    with h5py.File(folder / "images.h5", "w") as encoded, h5py.File(folder / "pixels.h5", "w") as pixels:
        jpegs = encoded.create_dataset("images", (len(items),), h5py.vlen_dtype(np.uint8))
        arrays = pixels.create_dataset("images", (len(items), side, side, 3), np.uint8, chunks=(1, side, side, 3))
        encoded["labels"] = pixels["labels"] = np.array([label for _, label in items], np.int64)
        for number, (path, _) in enumerate(items):
            jpegs[number] = np.frombuffer(Path(path).read_bytes(), np.uint8)
            arrays[number] = np.asarray(square(T.read_image(path)))


# --- rows in torch's DataLoader ---------------------------------------------------------------------------------------
def transforms(job: Job, *, resized: bool = False) -> Any:
    """torchvision's transforms of Pillow images. resized: the images are resized already."""
    import pillow_transforms as T

    task = job.task
    crop = [T.RandomCrop(task.crop), T.RandomHorizontalFlip()] if job.is_random else [T.CenterCrop(task.crop)]
    jitter = [T.ColorJitter(JITTER, JITTER, JITTER)] if job.load == EXTENSIVE else []
    resize = [] if resized else [T.Resize(task.resize)]
    return T.Compose([*resize, *crop, *jitter, T.ToTensor(), T.Normalize(task.mean, task.std)])


def operations(job: Job) -> list[Any]:
    """The same transforms as packer's ops."""
    from readers import augment as A

    task = job.task
    crop = [A.RandomCrop(task.crop), A.RandomHorizontalFlip()] if job.is_random else [A.CenterCrop(task.crop)]
    jitter = [A.ColorJitter(JITTER, JITTER, JITTER)] if job.load == EXTENSIVE else []
    return [A.Resize(task.resize), *crop, *jitter, A.Normalize(task.mean, task.std)]


def _read(data: Any) -> Any:
    import pillow_transforms as T

    return T.read_image(bytes(data))


class _Hdf5:
    """A data set over one HDF5 file by h5py. read: converts an item of "images" to an image."""

    def __init__(self, path: Path, read: Callable[[Any], Any], transform: Any) -> None:
        import h5py

        self._path, self._read, self._transform, self._file = path, read, transform, None
        with h5py.File(path) as file:
            self._labels = file["labels"][:].tolist()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if self._file is None:  # opened in each worker process, because handles of HDF5 do not survive a fork
            import h5py

            self._file = h5py.File(self._path)
        return self._transform(self._read(self._file["images"][index])), self._labels[index]


def _files(job: Job) -> Any:
    import pillow_transforms as T

    return T.Folder(job.folder / "tree", transforms(job))


def _hdf5(job: Job) -> Any:
    return _Hdf5(job.folder / "images.h5", lambda data: _read(data.tobytes()), transforms(job))


def _pixels(job: Job) -> Any:
    from PIL import Image

    return _Hdf5(job.folder / "pixels.h5", Image.fromarray, transforms(job, resized=True))


def _dataset(job: Job) -> Any:
    from readers.torch import ImageDataset

    return ImageDataset(_open(job, "hdf5"), operations(job))


DATASETS = {"files": _files, "HDF5 of JPEGs": _hdf5, "HDF5 of pixels": _pixels, "ours": _dataset}


def mapped(job: Job, dataset: str) -> Batches:
    return systems.data_loader(DATASETS[dataset](job), job.batch, job.workers, persistent_workers=True)


def tfrecord(job: Job) -> Batches:
    from tfrecord.iterator_utils import shuffle_iterator
    from tfrecord.reader import tfrecord_loader
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    transform, shards = transforms(job), job.shards("tfrecord", ".tfrecord")
    features = {"image/encoded": "byte", "image/class/label": "int"}

    def finish(record: Any) -> Any:
        return transform(_read(record["image/encoded"])), int(record["image/class/label"][0])

    class Records(IterableDataset):
        def __iter__(self) -> Any:
            worker = get_worker_info()
            own_shards = shards[worker.id :: worker.num_workers]
            records = itertools.chain.from_iterable(tfrecord_loader(shard, None, features) for shard in own_shards)
            return map(finish, shuffle_iterator(records, _SHUFFLED) if job.is_random else records)

    workers = {"num_workers": job.workers, "persistent_workers": True}
    return systems.endless(DataLoader(Records(), job.batch, drop_last=True, **workers))


def tar(job: Job) -> Batches:
    import webdataset

    transform, shards = transforms(job), job.shards("tar", ".tar")

    def finish(sample: tuple[bytes, bytes]) -> Any:
        return transform(_read(sample[0])), int(sample[1])

    dataset = webdataset.WebDataset(shards, shardshuffle=len(shards) if job.is_random else False, empty_check=False)
    dataset = dataset.shuffle(_SHUFFLED if job.is_random else 0).to_tuple("jpg", "cls").map(finish)
    workers = {"num_workers": job.workers, "persistent_workers": True}
    dataset = dataset.batched(job.batch, partial=False)
    return systems.endless(webdataset.WebLoader(dataset, batch_size=None, **workers))


# --- rows in DALI and in packer's loaders -----------------------------------------------------------------------------
def _source(fn: Any, form: str, job: Job) -> tuple[Any, Any]:
    """Encoded images and labels, by DALI's reader of a container."""
    if form == "files":
        return fn.readers.file(file_root=str(job.folder / "tree"), shuffle_after_epoch=job.is_random)
    if form == "HDF5":
        from readers.dali import external_source

        return external_source(_open(job, "hdf5"), job.batch, seed=1, shuffle=job.is_random)
    name = form.lower()
    how = {"index_paths" if form == "tar" else "index_path": job.shards(name, ".idx"), "random_shuffle": job.is_random}
    if form == "tar":
        encoded, digits = fn.readers.webdataset(paths=job.shards(name, ".tar"), ext=["jpg", "cls"], **how)
        return encoded, fn.pad(digits)
    from nvidia.dali import tfrecord as tf

    image, label = "image/encoded", "image/class/label"
    features = {image: tf.FixedLenFeature((), tf.string, ""), label: tf.FixedLenFeature([1], tf.int64, -1)}
    records = fn.readers.tfrecord(path=job.shards(name, ".tfrecord"), features=features, **how)
    return records[image], records[label]


def dali(job: Job, form: str, device: str) -> Batches:
    """DALI's operators: whole images are decoded, resized with antialiasing, cropped, ColorTwist, normalised."""
    task, side = job.task, (job.task.crop, job.task.crop)

    def graph(fn: Any, decoders: str) -> Any:
        encoded, labels = _source(fn, form, job)
        made = fn.decoders.image(encoded, device=decoders)
        made = fn.resize(made, resize_shorter=task.resize, subpixel_scale=False)
        crop, mirror = {"crop_pos_x": 0.5, "crop_pos_y": 0.5}, {}
        if job.is_random:
            crop = {name: fn.random.uniform(range=(0.0, 1.0)) for name in crop}
            mirror = {"mirror": fn.random.coin_flip()}
        # Truncate, as Pillow does for the middle of an odd number of pixels.
        made = fn.crop(made, crop=side, rounding="truncate", **crop)
        if job.load == EXTENSIVE:
            names = "brightness", "contrast", "saturation"
            factors = {name: fn.random.uniform(range=(1 - JITTER, 1 + JITTER)) for name in names}
            made = fn.color_twist(made, **factors)
        return systems.normalized(fn, made, task.mean, task.std, **mirror), labels

    return systems.dali(job.batch, job.workers, device, graph, digits=form == "tar")


def _open(job: Job, name: str) -> Any:
    import readers

    return readers.open_folder(job.folder / "tree") if name == "files" else readers.open(job.folder / name)


def image_loader(job: Job, form: str, device: str) -> Batches:
    return systems.image_loader(_open(job, form.lower()), job.batch, operations(job), job.workers, device)


def dali_loader(job: Job, form: str, device: str) -> Batches:
    return systems.dali_loader(_open(job, form.lower()), job.batch, operations(job), job.workers, device)


def resnet(job: Job) -> Batches:
    if not has_resnet():
        raise NotHere("needs an NVIDIA GPU and torchvision; here the step is a sleep")
    import torch

    noise = torch.randn(job.batch, 3, job.task.crop, job.task.crop), torch.zeros(job.batch, dtype=torch.int64)
    return itertools.repeat(noise)


# --- measurement ------------------------------------------------------------------------------------------------------
def has_resnet() -> bool:
    return importlib.util.find_spec("torchvision") is not None and has_gpu()


def _step_file(arguments: argparse.Namespace) -> Path:
    """The file of the seconds of each task's step; None: ResNet-50."""
    return Path(arguments.work, "step.json")


def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all tasks and loads of a row: "TASK LOAD batch_ms", epoch_s, wait_s, waits, cpu_us."""
    if not arguments.smoke:
        prime(1 << 30)
    figures: dict[str, Any] = {}
    for task, seconds in json.loads(_step_file(arguments).read_text()).items():
        step = systems.resnet_step("ResNet-50", 1000) if seconds is None else systems.sleep_step(seconds)
        for load in LOADS:
            job = job_of(arguments, task, load)
            batches = iter(chosen.function(job))
            count = len(job.items) // job.batch
            load_epoch(batches, count)
            loading, labels = load_epoch(batches, count)
            _check_labels(labels, job, chosen.options["exact"])
            wait_s, started = 0.0, time.perf_counter()
            for _ in range(count):
                requested = time.perf_counter()
                batch = next(batches)
                wait_s += time.perf_counter() - requested
                step(*batch)
            epoch_s = time.perf_counter() - started
            each = {"batch_ms": 1e3 * job.batch / loading["images_s"], "cpu_us": loading["cpu_us"]}
            each |= {"epoch_s": epoch_s, "wait_s": wait_s, "waits": wait_s / epoch_s}
            figures |= {f"{task} {load} {name}": value for name, value in each.items()}
            del batches  # ends its processes and threads before the next ones begin
    return figures


def load_epoch(batches: Iterator[Any], count: int) -> tuple[dict[str, float], list[int]]:
    """(figures, labels) of an epoch of `count` images whose batches are read and dropped: images/s, CPU time."""
    clock, labels = Clock(), list[int]()
    for made, numbers in itertools.islice(batches, count):
        made[:, 0, 0, 0]  # read, not copied
        labels += numbers.tolist()
    return clock.figures(len(labels)), labels


def _check_labels(labels: list[int], job: Job, exact: bool) -> None:
    """Raise ValueError if the labels of an epoch differ from the tree's."""
    counts, expected = Counter(labels), Counter(label for _, label in job.items)
    if counts != expected if exact else (len(labels) != len(job.items) or not counts.keys() <= expected.keys()):
        raise ValueError(f"an epoch has the labels {dict(counts)}, the tree {dict(expected)}")


# --- checks -----------------------------------------------------------------------------------------------------------
def check(arguments: argparse.Namespace) -> Iterator[Check]:
    """Make the sets, compare the rows' images, and determine the length of the step."""
    for task in arguments.task:
        make_sets(arguments, task)
    if arguments.smoke and not arguments.only:
        arguments.only = ",".join(_SMOKE)
    ran = compared(EXPERIMENT, arguments, RESNET)
    for name, run in ran.items():
        largest, mean = next(bound for begin, bound in BOUNDS.items() if name.startswith(begin))
        promise = f"{name}: each sample once, under its label; resize and middle against Pillow"
        text = str(run.get("error") or f"at most {run['largest']:.2g} of 255, {run['mean']:.2g} on average")
        # Values were normalised in float32, and converted back.
        good = (
            "error" not in run and run["complete"] and run["largest"] <= largest + 1e-3 and run["mean"] <= mean + 1e-3
        )
        yield Check(promise, f"{text} (bounds {largest:g} and {mean:g})", good)
    if {DALI_LOADER, LOADER} <= ran.keys():
        for task, load in itertools.product(arguments.task, LOADS):
            yield _same_draws(arguments, task, load)
    steps: dict[str, float | None] = {}
    for task in arguments.task:
        seconds = None if has_resnet() else arguments.step / 1e3 if arguments.step else None
        if seconds is None and not has_resnet():  # the steps' share of the baseline's epoch, as in the document
            seconds = FAST / SLOW * ran[FILES][f"{task} batch_s"]
        steps[task] = seconds
        text = "ResNet-50 on this GPU" if seconds is None else f"a sleep of {1e3 * seconds:.1f} ms"
        yield Check(f"{task}: the step after each batch of {arguments.batch}", text, seconds is None or seconds > 0)
    _step_file(arguments).write_text(json.dumps(steps))


def compare(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a row without random operations: each sample must occur once; differences to Pillow. The baseline also
    measures the time of a batch; two rows also save their results for the same random numbers."""
    import pillow_transforms as T

    runs, figures = [], {}
    for task in arguments.task:
        job = job_of(arguments, task, CENTRE).check()
        middle = T.Compose([T.Resize(job.task.resize), T.CenterCrop(job.task.crop)])
        references = np.stack([np.asarray(middle(T.read_image(path))) for path, _ in job.items])
        run = systems.compare(chosen.function(job), references, job.task.mean, job.task.std)
        runs.append({**run, "complete": run["images"] == run["right"] == len(references) and not run["flipped"]})
        if chosen.name in (DALI_LOADER, LOADER):
            for load in LOADS:
                some = itertools.islice(chosen.function(replace(job, load=load)), len(job.items) // job.batch)
                made, labels = (np.concatenate([*map(systems.on_host, each)]) for each in zip(*some, strict=True))
                np.savez(_draws(arguments, chosen.name, task, load), made=made, labels=labels)
        if chosen.name == FILES:
            whole = job_of(arguments, task, EXTENSIVE)
            batches, count = iter(chosen.function(whole)), len(whole.items) // whole.batch
            load_epoch(batches, count)
            figures[f"{task} batch_s"] = whole.batch / load_epoch(batches, count)[0]["images_s"]
    largest, mean = max(run["largest"] for run in runs), float(np.mean([run["mean"] for run in runs]))
    return {"complete": all(run["complete"] for run in runs), "largest": largest, "mean": mean, **figures}


def _draws(arguments: argparse.Namespace, *names: str) -> Path:
    return Path(arguments.work, f"{slug(' '.join(names))}.npz")


def _same_draws(arguments: argparse.Namespace, task: str, load: str) -> Check:
    with np.load(_draws(arguments, DALI_LOADER, task, load)) as a, np.load(_draws(arguments, LOADER, task, load)) as b:
        std = np.reshape(TASKS[task].std, (3, 1, 1))
        same, apart = np.array_equal(a["labels"], b["labels"]), 255 * std * np.abs(a["made"] - b["made"])
    (largest, mean), order = OTHER_COLOURS, "the same labels in the same order" if same else "other labels"
    return Check(
        f"{task}: DaliLoader and ImageLoader, {load}: order, crops, flips and colours of one seed",
        f"{order}; pixels differ by at most {apart.max():.2g} of 255, {apart.mean():.2g} on average",
        bool(same and apart.max() <= largest and apart.mean() <= mean),
    )


# --- the page ---------------------------------------------------------------------------------------------------------
def _change(less: float) -> str:
    return f"{abs(less):.0%} {'less' if less >= 0 else 'more'}"


def _less(results: Results, rows: Sequence[str], task: str, load: str) -> dict[str, float]:
    """By row that ran: the share by which an epoch with steps is shorter than PyTorch's from files."""
    times = {row: ratio(results, row, FILES, f"{task} {load} epoch_s") for row in rows}
    return {row: 1 - value for row, value in times.items() if value is not None}


def claims(results: Results, arguments: argparse.Namespace) -> Iterator[Check]:
    task, gain = arguments.task[0], 1 - FAST / SLOW
    extensive = _less(results, (DALI_FILES, LOADER, DALI_LOADER), task, EXTENSIVE)
    text = "; ".join(f"{row}: {_change(less)}" for row, less in extensive.items())
    if DALI_FILES in extensive:
        promise = f"DALI shortens an epoch with extensive augmentation by {gain:.0%}, to the time of the steps"
        yield Check(promise, f"{text}; on the CPU", extensive[DALI_FILES] >= gain - 0.05)
    if few := _less(results, (HDF5, PIXELS), task, FEW):
        text = "; ".join(f"{row}: {_change(less)}" for row, less in few.items())
        promise = f"a dedicated reader alone shortens an epoch by about {1 - FAST / READER_SLOW:.0%}"
        yield Check(promise, f"{text}; few, warm page cache", max(few.values()) >= 0.23)
    times = [ratio(results, FILES, DALI_FILES, f"{task} {load} batch_ms") for load in LOADS]
    if times[0] is not None and times[1] is not None:
        text = f"loading {times[0]:.2f} times few, {times[1]:.2f} extensive, on the CPU"
        yield Check("DALI loads 100 times as fast", f"{text}; no GPU decodes", times[1] >= 100)
        yield Check("DALI gains more where augmentation is extensive", text, times[1] > times[0])
    if (share := figure(results, FILES, f"{task} {EXTENSIVE} waits")) is not None:
        yield Check("loading is about 40 % of the epoch", f"{share:.0%}, by the length of the step", 0.3 < share < 0.5)


def sections(arguments: argparse.Namespace) -> Iterator[Section]:
    steps = json.loads(_step_file(arguments).read_text())
    for task, load in itertools.product(arguments.task, LOADS):
        about, job = TASKS[task], job_of(arguments, task, load)
        columns = tuple(
            Column(f"{task} {load} {key}", heading, form)
            for key, heading, form in (
                ("batch_ms", "ms a batch", "{:.1f}"), ("epoch_s", "epoch with steps, s", "{:.2f}"),
                ("wait_s", "of it waiting, s", "{:.2f}"), ("cpu_us", "CPU µs an image", "{:,.0f}"),
            )
        )  # fmt: skip
        step = "ResNet-50" if steps[task] is None else f"a sleep of {1e3 * steps[task]:.0f} ms in place of ResNet-50"
        text = (
            f"{len(job.items):,} JPEGs of {about.size[0]} × {about.size[1]} to {about.crop} × {about.crop}, batches of "
            f"{job.batch}, {job.workers} processes or threads; the step is {step}. Waiting: the time that steps wait "
            "for batches, which loaders prepare during the steps."
        )
        yield Section(f"{task}-{load}", f"{task}, {load} augmentation", columns, base=FILES, text=text)


EXPERIMENT = Experiment.read(
    __file__,
    [mapped, tfrecord, tar, dali, image_loader, dali_loader, resnet],
    measure=measure,
    check=check,
    compare=compare,
    before=lambda chosen, arguments: warm(job_of(arguments, task, FEW).folder for task in arguments.task),
    sections=sections,
    claims=claims,
)


def _tasks(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in TASKS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(TASKS)}")
    return names


if __name__ == "__main__":
    given = parser(__doc__)
    given.add_argument("--task", type=_tasks, default=list(TASKS), help="imagenet, faces, or both with a comma")
    given.add_argument("--step", type=float, metavar="MS", help="length of the step; default: see the page")
    given.set_defaults(rounds=2)
    main(EXPERIMENT, given)
