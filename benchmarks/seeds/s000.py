"""Loading faces for a diffusion model: PyTorch's DataLoader, ours, DALI and rocAL, and whether the model is the same.

    python benchmarks/seeds/s000.py [--images CELEBA] [--smoke]

--images: CelebA's aligned images, which are taken as they are, or other JPEGs, which are made as large. The rows of
rocAL run where it can be imported: PYTHONPATH=/opt/rocm/lib.

A row's function gets a `Job` and returns batches (images, labels) without end: float32 [n, 3, 64, 64] from -1 to 1.
Options of the rows: `bound`, how far an image may be from that of Pillow, as the mean over its values, of 255.
`ordered`: whether it can have the order of `readers.order`, so that its batches are those of the other such rows.
`draws`: whether its flips are drawn by `readers.augment`. `trains`: "epoch" or "model", what is trained on the batches.
"""

from __future__ import annotations

import argparse
import glob
import hashlib
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from experiment import Check, Column, Experiment, Section, figure, main, parser, ratio  # isort: skip  (sets the path)
import images
import numpy as np
import systems
from harness import CONTENDERS, REPOSITORY, Contender, NotHere, Results, contender, drive, slug
from machine import cpu_seconds_of_tree, list_tree, prime, warm

# Top, left, height and width of what is cut out of CelebA's images, and the side of what is made of it.
BOX, SIZE, FACE, BATCH = (40, 15, 148, 148), 64, (178, 218), 128
HALF = (0.5, 0.5, 0.5)
COMPARED = 1024  # images of an epoch that is compared
CELEBA = 162_770  # images of CelebA's training part
MODEL_BATCH, AT_ONCE, SEED = 16, 64, 0
BASELINE, LOADER = "PyTorch DataLoader, Pillow", "ours: ImageLoader"
ROCAL_HOST, ROCAL_HIP = "rocAL, files, host", "rocAL, files, HIP"
END_TO_END, MODEL, FAULT = ", end to end", ", model", "values from 0 to 1, model"
# Seconds of loading there (MI250X, MI300X): with PyTorch, rocAL on the host, rocAL on the GPU.
DOCUMENT = {BASELINE: (52.13, 49.41), ROCAL_HOST: (26.20, 21.18), ROCAL_HIP: (21.00, 18.18)}
Batches = Iterable[tuple[Any, Any]]


@dataclass(frozen=True)
class Job:
    """tree: class folders of JPEGs. packed: the same as a set. in_order: DataLoaders take the samples in our order."""

    tree: Path
    packed: Path
    workers: int
    batch: int = BATCH
    seed: int = 1
    in_order: bool = False

    def reader(self) -> Any:
        import readers

        return readers.open(self.packed)


# --- rows -------------------------------------------------------------------------------------------------------------
def _torch_loader(job: Job, dataset: Any) -> Batches:
    from readers.order import Shuffled

    order = Shuffled(len(dataset), job.seed) if job.in_order else None
    return systems.data_loader(dataset, job.batch, job.workers, seed=job.seed, order=order)


@contender(
    BASELINE, imports="torch.utils.data pillow_transforms", bound=0.0, ordered=True,
    note="the baseline of the document: read, decode, crop, resize, flip, to a tensor, normalise, one after the other",
)  # fmt: skip
def pillow(job: Job) -> Batches:
    import pillow_transforms as T

    steps = [T.Crop(*BOX), T.Resize((SIZE, SIZE)), T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize(HALF, HALF)]
    return _torch_loader(job, T.Folder(job.tree, T.Compose(steps)))


@contender(
    "TensorFlow, tf.data on files", imports="tensorflow", bound=3.0,
    note="what TensorFlow Datasets hands out; decodes the box only, antialiased",
)  # fmt: skip
def tf_data(job: Job) -> Batches:
    import tensorflow as tf

    def load(path: Any, label: Any) -> Any:
        image = tf.image.decode_and_crop_jpeg(tf.io.read_file(path), BOX, channels=3)
        image = tf.image.random_flip_left_right(tf.image.resize(image, (SIZE, SIZE), antialias=True))
        return tf.transpose(image, (2, 0, 1)) / 127.5 - 1, label

    paths, labels = map(list, zip(*list_tree(job.tree), strict=True))
    files = tf.data.Dataset.from_tensor_slices((paths, labels)).shuffle(len(paths), job.seed).repeat()
    batches = files.map(load, num_parallel_calls=job.workers).batch(job.batch, drop_remainder=True).prefetch(2)
    options = tf.data.Options()
    options.threading.private_threadpool_size = job.workers
    return batches.with_options(options).as_numpy_iterator()


@contender(
    "ours: ImageDataset in a DataLoader", imports="torch.utils.data readers.torch readers.augment",
    bound=2.0, ordered=True, draws=True, note="a packed set; the same operations in worker processes of PyTorch",
)  # fmt: skip
def image_dataset(job: Job) -> Batches:
    from readers.augment import celeba
    from readers.torch import ImageDataset

    return _torch_loader(job, ImageDataset(job.reader(), celeba(SIZE)))


def _image_loader(job: Job, device: str) -> Batches:
    from readers.augment import celeba

    return systems.image_loader(job.reader(), job.batch, celeba(SIZE), job.workers, device, seed=job.seed)


def _dali_loader(job: Job, device: str) -> Batches:
    from readers.augment import celeba

    return systems.dali_loader(job.reader(), job.batch, celeba(SIZE), job.workers, device, seed=job.seed)


def _dali_files(job: Job, device: str) -> Batches:
    (top, left, height, width), (whole_width, whole_height) = BOX, FACE
    at = {"crop_pos_y": top / (whole_height - height), "crop_pos_x": left / (whole_width - width)}

    def graph(fn: Any, decoders: str) -> Any:
        encoded, labels = fn.readers.file(file_root=str(job.tree), random_shuffle=True)
        faces = fn.decoders.image_crop(encoded, device=decoders, crop=(height, width), **at)
        resized = fn.resize(faces, size=[SIZE, SIZE])
        return systems.normalized(fn, resized, HALF, HALF, mirror=fn.random.coin_flip()), labels

    return systems.dali(job.batch, job.workers, device, graph)


def _need_rocal(device: str) -> None:
    """Raises NotHere, saying where it would run."""
    from readers.rocal.pipelines import MissingRocalError, gpu_backend, load_rocal

    try:
        load_rocal("this row")
    except MissingRocalError as error:
        raise NotHere(str(error)) from None
    if device == "cuda" and gpu_backend() is False:
        raise NotHere("this rocAL is built for the CPU alone: needs an AMD GPU, and ROCm's (PYTHONPATH=/opt/rocm/lib)")


def _rocal_files(job: Job, device: Any) -> Batches:
    _need_rocal(device)
    from amd.rocal.plugin.generic import ROCALClassificationIterator

    from readers.rocal.pipelines import Machine, built, celeba_ops

    root, ops = str(job.tree), celeba_ops(size=SIZE)
    limits = dict(zip(("max_decoded_width", "max_decoded_height"), FACE, strict=True))

    def graph(rocal: Any) -> Any:
        files, _ = rocal.fn.readers.file(file_root=root)
        return ops(rocal, rocal.fn.decoders.image(files, file_root=root, random_shuffle=True, **limits))

    pipeline = built(graph, Machine(device, job.workers), batch_size=job.batch, seed=job.seed)
    iterator = ROCALClassificationIterator(pipeline)
    while True:
        for _ in range(len(glob.glob(os.path.join(root, "*", "*"))) // job.batch):
            (pixels,), labels = next(iterator)
            yield pixels.copy(), labels
        iterator.reset()


def _rocal_loader(job: Job, device: Any) -> Batches:
    _need_rocal(device)
    from readers import Ranks
    from readers.rocal import RocalLoader, celeba, external_source

    source = external_source(job.reader(), job.batch, seed=job.seed, ranks=Ranks(rank=0, world_size=1))
    with RocalLoader(celeba(source, size=SIZE, device=device, threads=job.workers), source) as loader:
        yield from systems.endless(loader)


_OURS, _ROCAL = {"ordered": True, "draws": True}, "crop and resize_mirror_normalize; resized without antialiasing"
_DALI = "its file reader; only the box is decoded; antialiased; crop_mirror_normalize as one operator"
_ON_DEVICES: tuple[tuple[Any, str, str, str, str, float, dict[str, Any]], ...] = (
    (_image_loader, LOADER, f"{LOADER}, GPU", systems.LOADER, "a packed set; only the box is decoded, at half the size "
     "where that is enough, then resized, flipped and normalised without a further copy", 2.0, _OURS),
    (_dali_files, "DALI, files, CPU", "DALI, files, GPU", systems.DALI, _DALI, 2.0, {}),
    (_dali_loader, "ours: DaliLoader, CPU", "ours: DaliLoader, GPU", systems.DALI, "a packed set, decoded by DALI", 2.0,
     _OURS),
    (_rocal_files, ROCAL_HOST, ROCAL_HIP, "", f"its file reader; {_ROCAL}", 24.0, {}),
    (_rocal_loader, "ours: RocalLoader, host", "ours: RocalLoader, HIP", "", f"a packed set; {_ROCAL}", 24.0,
     {"ordered": True}),
)  # fmt: skip
for _make, _cpu, _gpu, _imports, _note, _bound, _options in _ON_DEVICES:
    contender(_cpu, imports=_imports, note=_note, bound=_bound, **_options)(lambda job, make=_make: make(job, "cpu"))
    contender(_gpu, note=_note, bound=max(4.0, _bound), **_options)(lambda job, make=_make: make(job, "cuda"))


def _on_gpu(job: Job, name: str) -> Batches:
    systems.need_gpu()
    made: Batches = CONTENDERS[name].function(job)
    return made


for _name in (BASELINE, LOADER, f"{LOADER}, GPU", ROCAL_HOST, ROCAL_HIP):
    contender(_name + END_TO_END, trains="epoch", note="the document's network trained on these batches, on the GPU")(
        lambda job, name=_name: _on_gpu(job, name)
    )
for _name in (BASELINE, LOADER, FAULT):
    contender(
        _name.removesuffix(MODEL) + MODEL, trains="model", note="a model of each seed, judged after the training"
    )(CONTENDERS[BASELINE if _name == FAULT else _name].function)


# --- before the clock -------------------------------------------------------------------------------------------------
def make_job(arguments: argparse.Namespace, count: int) -> Job:
    """For the first `count` images."""
    tree, packed = (arguments.work / f"faces-{count}{form}" for form in ("", "-hdf5"))
    return Job(tree, packed, arguments.workers)


def _make_images(arguments: argparse.Namespace, count: int) -> Job:
    """CelebA's aligned images are taken as they are, others are made as large. Without any the program ends."""
    from PIL import Image

    import packer

    job, source = make_job(arguments, count), arguments.images
    try:
        first = None if source is None else next(source.rglob("*.jpg"), None)
        are_faces = first is not None and Image.open(first).size == FACE
        images.make(job.tree, count, size=None if are_faces else FACE, source=source, quality=60)
    except (ValueError, OSError) as error:
        sys.exit(f"s000: {error}")
    packer.convert(job.tree, "hdf5", job.packed, overwrite=True)
    warm([job.tree, job.packed])
    return job


def check(arguments: argparse.Namespace) -> Iterator[Check]:
    """Every loader's images against Pillow's; those of our order against each other."""
    if arguments.count < BATCH or arguments.count % BATCH:
        sys.exit(f"s000: --count is {arguments.count}, expected a multiple of {BATCH}")
    _make_images(arguments, arguments.count)
    job = _make_images(arguments, min(arguments.count, COMPARED))
    files = list_tree(job.tree)
    with job.reader() as reader:
        rows = zip(files, reader.read_many(range(len(reader))), reader.labels, strict=False)
        same = sum(Path(path).read_bytes() == bytes(data) and label == kept for (path, label), data, kept in rows)
        holds = same == len(files) == len(reader)
    yield Check("the packed set has the bytes and labels of the files", f"{same} of {len(files)}", holds)
    reference = Reference.of(job.tree)
    np.savez(arguments.work / "reference.npz", **reference._asdict())
    sys.argv.append("--compare")
    try:
        some = {"skip": ",".join(filter(None, (arguments.skip, END_TO_END, MODEL))), "rounds": 1}
        if arguments.smoke and not arguments.only:
            some["only"] = f"{BASELINE},{LOADER}"
        results = drive(EXPERIMENT.benchmark, argparse.Namespace(**{**vars(arguments), **some}))
    finally:
        sys.argv.remove("--compare")
    ran = {name: runs[0] for name, runs in results.items() if runs and "missing" not in runs[0]}
    for name, run in ran.items():
        yield _check_pixels(name, run, len(files))
    if not any("error" in run for run in ran.values()):
        yield from _check_order(ran, reference, job)


def _check_pixels(name: str, run: dict[str, Any], count: int) -> Check:
    what = f"{name}: every sample once, with its label, as Pillow makes it or mirrored"
    if "error" in run:
        return Check(what, str(run["error"]), False)
    bound = CONTENDERS[name].options["bound"]
    text = (
        f"{run['whole']} of {count}, {run['flipped']:.0%} mirrored; {run['mean']:.2f} of 255 from Pillow's on average, "
        f"the worst image {run['worst']:.2f} (allowed: {bound:g}), the worst value {run['largest']:.0f}"
    )
    even = abs(run["flipped"] - 0.5) < 5 * 0.5 / math.sqrt(count)
    # A value of Pillow's own rows has passed through float32.
    return Check(what, text, run["images"] == run["whole"] == count and even and run["worst"] <= bound + 1e-3)


def _check_order(ran: dict[str, dict[str, Any]], reference: Reference, job: Job) -> Iterator[Check]:
    """The rows in our order have the batches that `readers.order` says; ours have the same flips."""
    from readers.order import Shuffled

    count = len(reference.labels)
    due = _digest(reference.image_of[Shuffled(count, job.seed).indices(0, np.arange(count))])
    ordered = [name for name in ran if CONTENDERS[name].options.get("ordered")]
    others = [name for name in ordered if ran[name]["order"] != due]
    what = f"in the same order, the same images in all {count // job.batch} batches, up to the flips"
    yield Check(what, f"not in {'; '.join(others)}" if others else "; ".join(ordered), not others)
    drawn = [name for name in ordered if CONTENDERS[name].options.get("draws")]
    if drawn:
        same = len({ran[name]["flips"] for name in drawn}) == 1
        yield Check("the flips of readers.augment are the same", "; ".join(drawn) if same else "not the same", same)


# --- which sample an image is -----------------------------------------------------------------------------------------
class Reference(NamedTuple):
    """images: Pillow's, of the different files, uint8 [m, 3, 64, 64]. image_of, labels: of the files, in order."""

    images: Any
    image_of: Any
    labels: Any

    @classmethod
    def of(cls, tree: Path) -> Reference:
        """Decode a tree of class folders."""
        from pillow_transforms import crop, read_image, resize

        numbers: dict[bytes, int] = {}
        pixels, image_of, labels = [], [], []
        for path, label in list_tree(tree):
            data = Path(path).read_bytes()
            if data not in numbers:
                numbers[data] = len(pixels)
                pixels.append(np.asarray(resize(crop(read_image(data), *BOX), (SIZE, SIZE))).transpose(2, 0, 1))
            image_of.append(numbers[data])
            labels.append(label)
        return cls(np.stack(pixels), np.array(image_of), np.array(labels))


def compare(batches: Batches, reference: Reference) -> dict[str, Any]:
    """The first epoch of a loader: the nearest of Pillow's images, flipped or not, says which sample an image is.

    images: of the epoch. whole: of them, those that are a sample, with its label, that was due once. mean, worst,
    largest: difference to Pillow's image of 255, over all, of an image, of a value. flipped: share of the images.
    order, flips: texts that are the same for the same images in the same order, and for the same flips.
    """
    both = np.concatenate([_coarse(reference.images), _coarse(reference.images[..., ::-1])])
    squares = (both**2).sum(axis=1)
    near: list[int] = []
    labels: list[int] = []
    means: list[float] = []
    largest = 0.0
    for some, numbers in batches:
        pixels = (_on_host(some).astype(np.float32) + 1) * 127.5
        closest = (squares - 2 * _coarse(pixels) @ both.T).argmin(axis=1).tolist()
        near += closest
        labels += _on_host(numbers).reshape(-1).astype(int).tolist()
        for image, number in zip(pixels, closest, strict=True):
            flipped, number = divmod(number, len(reference.images))
            apart = np.abs(image - (reference.images[number][..., ::-1] if flipped else reference.images[number]))
            means.append(float(apart.mean()))
            largest = max(largest, float(apart.max()))
        if len(labels) >= len(reference.labels):
            break
    flips, numbers = np.divmod(np.array(near), len(reference.images))
    due = Counter(zip(reference.image_of.tolist(), reference.labels.tolist(), strict=True))
    whole = (due & Counter(zip(numbers.tolist(), labels, strict=True))).total()
    figures = {"images": len(near), "whole": whole, "mean": mean(means), "worst": max(means), "largest": largest}
    return figures | {"flipped": float(flips.mean()), "order": _digest(numbers), "flips": _digest(flips)}


def _digest(values: Any) -> str:
    return hashlib.sha256(values.astype(np.int64).tobytes()).hexdigest()


def _on_host(values: Any) -> Any:
    return np.asarray(values.cpu() if hasattr(values, "cpu") else values)


def _coarse(pixels: Any) -> Any:
    """Means over 8 x 8 squares, float32 [n, 3 * 8 * 8]."""
    n, planes, height, width = pixels.shape
    squares = pixels.reshape(n, planes, 8, height // 8, 8, width // 8)
    return squares.mean(axis=(3, 5), dtype=np.float32).reshape(n, -1)


# --- the clock --------------------------------------------------------------------------------------------------------
def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """Images/s and CPU time once all is under way; with --compare the comparison of an epoch."""
    if arguments.compare:
        job = replace(make_job(arguments, min(arguments.count, COMPARED)), in_order=True)
        return compare(chosen.function(job), _reference(arguments))
    job = make_job(arguments, arguments.count)
    if chosen.options.get("trains") == "model":
        return _model(chosen, job, arguments)
    if not arguments.smoke:
        prime(1 << 30)
    batches = iter(chosen.function(job))
    if chosen.options.get("trains"):
        return _train_rate(batches, arguments)
    started = time.perf_counter()
    systems.check_batch(next(batches)[0], BATCH, SIZE)
    first = time.perf_counter() - started
    for _ in range(arguments.warm):
        next(batches)
    count, cpu, started = 0, cpu_seconds_of_tree(), time.perf_counter()
    while count < arguments.n:
        pixels = next(batches)[0]
        float(pixels[-1, 0, 0, 0])  # on a GPU, it is there then
        count += len(pixels)
    seconds, cpu = time.perf_counter() - started, cpu_seconds_of_tree() - cpu
    return {
        "images_s": count / seconds, "first_s": first, "cpu_us": 1e6 * cpu / count, "celeba_s": CELEBA * seconds / count
    }  # fmt: skip


def _reference(arguments: argparse.Namespace) -> Reference:
    with np.load(arguments.work / "reference.npz") as arrays:
        return Reference(**arrays)


def _learner(full: bool, seed: int) -> Any:
    import torch

    sys.path.append(str(REPOSITORY / "examples"))
    from ddpm_model import TINY, Learner, Settings

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Learner(Settings() if full else TINY, SIZE, seed, torch.device(device))


def _train_rate(batches: Iterator[Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Images/s of the document's training on the GPU, and the share of the time in which it waits for a batch."""
    import torch

    learner = _learner(True, SEED)
    for _ in range(arguments.warm):
        learner.learn(torch.as_tensor(next(batches)[0]))
    count, waited, started = 0, 0.0, time.perf_counter()
    while count < arguments.n:
        asked = time.perf_counter()
        batch = torch.as_tensor(next(batches)[0])
        waited += time.perf_counter() - asked
        learner.learn(batch)  # ends when the step has ended, as it returns the loss
        count += len(batch)
    seconds = time.perf_counter() - started
    return {"train_images_s": count / seconds, "waits_percent": 100 * waited / seconds}


def _model(chosen: Contender, job: Job, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train a model of each seed, once for all rounds: its loss with the same noise for all, and what it draws."""
    import torch

    saved = _features_of(arguments, chosen.name)
    if saved.exists():
        return dict(json.loads(saved.with_suffix(".json").read_text()))
    torch.set_num_threads(1)
    reference = torch.from_numpy(_reference(arguments).images)
    judged, network, features = reference[: arguments.judged].float() / 127.5 - 1, feature_network(), []
    figures: dict[str, Any] = {}
    for seed in range(1 if chosen.name == FAULT else arguments.trainings):
        learner = _learner(arguments.full, seed)
        batches = iter(chosen.function(replace(job, batch=MODEL_BATCH, workers=1, seed=seed)))
        for _ in range(arguments.steps):
            batch = torch.as_tensor(next(batches)[0])
            learner.learn(batch / 2 + 0.5 if chosen.name == FAULT else batch)
        with torch.no_grad():
            generator = torch.Generator(learner.device).manual_seed(SEED)
            parts = judged.to(learner.device).split(AT_ONCE)
            losses = [len(part) * float(learner.loss(learner.average, part, generator)) for part in parts]
        figures[f"loss {seed}"] = sum(losses) / len(judged)
        drawn = [
            learner.sample(min(AT_ONCE, arguments.samples - at), at) for at in range(0, arguments.samples, AT_ONCE)
        ]
        features.append(network(((torch.cat(drawn) + 1) * 127.5).round().clamp(0, 255).byte().cpu()))
        figures[f"distance {seed}"] = frechet_distance(features[-1], network(reference))
    figures |= {name: mean(v for k, v in figures.items() if k.startswith(name)) for name in ("loss", "distance")}
    saved.with_suffix(".json").write_text(json.dumps(figures))
    np.save(saved, np.stack(features))
    return figures


def _features_of(arguments: argparse.Namespace, name: str) -> Path:
    """Of the samples of each seed, [seeds, n, d]."""
    return Path(arguments.work, f"{slug(name)}.npy")


def feature_network() -> Any:
    """A function from uint8 images, a tensor [n, 3, h, w], to features [n, 32]: three convolutions with random weights,
    the same each time, and the means of their maps. They see colours, contrasts and textures, not faces."""
    import torch
    from torch.nn import functional as F

    generator = torch.Generator().manual_seed(SEED)
    shapes = ((16, 3, 5, 5), (32, 16, 3, 3), (32, 32, 3, 3))
    weights = [torch.randn(s, generator=generator) * (2 / (s[1] * s[2] * s[3])) ** 0.5 for s in shapes]

    def features(pixels: Any) -> Any:
        x = pixels.float() / 127.5 - 1
        for weight in weights:
            x = F.leaky_relu(F.conv2d(x, weight, stride=2, padding=weight.shape[-1] // 2), 0.2)
        return x.mean(dim=(2, 3)).double().numpy()

    return features


def frechet_distance(first: Any, second: Any) -> float:
    """|m1 - m2|² + tr(C1 + C2 - 2 (C1 C2)^½) of the means and covariances of two sets of features [n, d]; M. Heusel et
    al., "GANs Trained by a Two Time-Scale Update Rule Converge to a Local Nash Equilibrium", 2017.

    The trace of the root is the sum of the roots of the eigenvalues of C1^½ C2 C1^½, which is symmetric.
    """
    covariances = [np.atleast_2d(np.cov(features, rowvar=False)) for features in (first, second)]
    values, vectors = np.linalg.eigh(covariances[0])
    root = vectors * np.sqrt(values.clip(0)) @ vectors.T
    cross = np.linalg.eigvalsh(root @ covariances[1] @ root).clip(0)
    apart = first.mean(axis=0) - second.mean(axis=0)
    return float(apart @ apart + np.trace(covariances[0] + covariances[1]) - 2 * np.sqrt(cross).sum())


# --- the page ---------------------------------------------------------------------------------------------------------
def claims(results: Results, arguments: argparse.Namespace) -> Iterator[Check]:
    times = {name: value for name in results if (value := ratio(results, name, BASELINE, "images_s"))}
    for name, what in ((LOADER, "2.0 to 2.7 times less time than with PyTorch"), (ROCAL_HOST, "2.0 to 2.3 times less")):
        if name in times:
            yield Check(f"loading with {name} takes {what}", f"{times[name]:.2f} times less", times[name] >= 2.0)
    names = [name + MODEL for name in (BASELINE, LOADER)]
    if not all(figure(results, name, "loss") for name in (*names, FAULT)):
        return
    losses = [[results[name][0][f"loss {seed}"] for seed in range(arguments.trainings)] for name in names]
    spread, apart = max(max(some) - min(some) for some in losses), abs(mean(losses[0]) - mean(losses[1]))
    text = (
        f"the means of {arguments.trainings} seeds differ by {apart:.4f}, the seeds of a loader by up to {spread:.4f}"
    )
    yield Check("a model trained on our batches has the same loss", text, apart <= spread)
    theirs, ours, (fault,) = (np.load(_features_of(arguments, name)) for name in (*names, FAULT))
    loaders = mean(frechet_distance(a, b) for a, b in zip(theirs, ours, strict=True))
    seeds = [frechet_distance(some[i], some[j]) for some in (theirs, ours) for i in range(len(some)) for j in range(i)]
    yield Check(
        "it draws the same images: their Fréchet distance is no larger than from seed to seed",
        f"between the loaders with a seed {loaders:.3g}, from seed to seed {min(seeds):.3g} to {max(seeds):.3g}; "
        f"with a fault, values from 0 to 1, {frechet_distance(theirs[0], fault):.3g}",
        loaders <= max(seeds),
    )


def sections(arguments: argparse.Namespace) -> Iterator[Section]:
    rate, cpu = Column("images_s", "images/s"), Column("cpu_us", "CPU µs an image")
    there = {name: CELEBA / mean(seconds) for name, seconds in DOCUMENT.items()}
    text = "The document's figures are for one epoch of CelebA, means of its two nodes; how many images it has is ours."
    columns = (rate, Column("celeba_s", f"s for CelebA's {CELEBA:,}"), cpu)
    yield Section("loading", "Loading", columns, base=BASELINE, there=there, text=text)
    trained = Column("train_images_s", "images/s"), Column("waits_percent", "% of the time waits for data")
    yield Section("training", "Training, end to end", trained, base=BASELINE + END_TO_END)
    judged = Column("loss", "loss, mean of the seeds", "{:.4f}"), Column("distance", "distance to the data", "{:.3g}")
    text = (
        f"{arguments.steps} steps of {MODEL_BATCH} images for each of {arguments.trainings} seeds. A loss of 1 is that "
        f"of a network that has learned nothing. Distance: Fréchet's, of {arguments.samples} samples to the images, by "
        "features of fixed random weights, which do not compare with Inception's."
    )
    yield Section("model", "The model", judged, text=text, charted=0)


EXPERIMENT = Experiment(
    name="s000",
    title="Loading CelebA for a diffusion model",
    document='"Optimizing diffusion data-loading using ROCm rocAL library", AMD, 19 June 2025',
    about=(
        "It trains a diffusion model on CelebA and replaces PyTorch's DataLoader by rocAL, whose operators crop and "
        "resize, or flip and normalise, at once: an epoch of loading takes 2.0 to 2.7 times less. Here the same "
        "pipeline (crop, 64 x 64, flip, -1 to 1, batches of 128) runs in PyTorch, in ours, in DALI and in rocAL."
    ),
    measure=measure,
    check=check,
    sections=sections,
    claims=claims,
    limits=(
        "The document measured on nodes of 64 and 96 cores with eight GPUs. It does not say how many images an epoch "
        "had, nor how many worker processes the DataLoader: ratios are what compares. The files are in the page cache; "
        "on a parallel file system the rows that open a file for each image would lose more. rocAL resizes without "
        "antialiasing, which is less work and makes other pixels.",
        "On a CPU a training step would compete with the loaders for the same cores, so nothing is said of it there: "
        "the rows end to end, and those that decode on a GPU, run where there is one.",
    ),
    sizes={
        "count": (256, 2560, f"images, a multiple of {BATCH}"),
        "n": (256, 5120, "images in the clock"),
        "warm": (2, 8, "batches before the clock"),
        "steps": (1, 150, "steps of each training"),
        "trainings": (2, 3, "seeds of each loader, at least 2"),
        "samples": (2, 64, "samples drawn after each training"),
        "judged": (16, 128, "images that give the loss"),
    },
)

if __name__ == "__main__":
    given = parser(__doc__)
    given.add_argument("--full", action="store_true", help="train the document's network, for a GPU")
    given.add_argument("--compare", action="store_true", help=argparse.SUPPRESS)
    main(EXPERIMENT, given)
