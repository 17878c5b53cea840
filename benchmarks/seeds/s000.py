"""Loading faces for a diffusion model by PyTorch's DataLoader, packer, DALI and rocAL, and a comparison of the models.

    python benchmarks/seeds/s000.py [--images CELEBA] [--smoke]

--images: CelebA's aligned images, which are used unchanged, or other JPEGs, which are resized to the size of CelebA's.
The rows of rocAL need rocAL importable: PYTHONPATH=/opt/rocm/lib.

A row's function takes a `Job` and returns batches (images, labels) without end: float32 [n, 3, 64, 64] from -1 to 1.
"""

from __future__ import annotations

import argparse
import glob
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from experiment import Check, Experiment, compared, figure, main, parser  # isort: skip  (sets the path)
import numpy as np
import systems
from harness import CONTENDERS, REPOSITORY, Contender, NotHere, Results, slug
from machine import Clock, list_tree, prime, warm

# Top, left, height and width of the crop of CelebA's images; the side of the resized crop; the size of images.
BOX, SIZE, FACE, BATCH = (40, 15, 148, 148), 64, (178, 218), 128
HALF = (0.5, 0.5, 0.5)
COMPARED = 1024  # images of a compared epoch
CELEBA = 162_770  # images of CelebA's training part
MODEL_BATCH, AT_ONCE, SEED = 16, 64, 0
BASELINE, LOADER = "PyTorch DataLoader, Pillow", "ours: ImageLoader"
END_TO_END, MODEL, FAULT = ", end to end", ", model", "values from 0 to 1, model"
Batches = Iterable[tuple[Any, Any]]


@dataclass(frozen=True)
class Job:
    """tree: class folders of JPEGs. packed: the packed set of the tree. in_order: DataLoaders use packer's order."""

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


def pillow(job: Job) -> Batches:
    import pillow_transforms as T

    steps = [T.Crop(*BOX), T.Resize((SIZE, SIZE)), T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize(HALF, HALF)]
    return _torch_loader(job, T.Folder(job.tree, T.Compose(steps)))


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


def image_dataset(job: Job) -> Batches:
    from readers.augment import celeba
    from readers.torch import ImageDataset

    return _torch_loader(job, ImageDataset(job.reader(), celeba(SIZE)))


def image_loader(job: Job, device: str) -> Batches:
    from readers.augment import celeba

    return systems.image_loader(job.reader(), job.batch, celeba(SIZE), job.workers, device, seed=job.seed)


def dali_loader(job: Job, device: str) -> Batches:
    from readers.augment import celeba

    return systems.dali_loader(job.reader(), job.batch, celeba(SIZE), job.workers, device, seed=job.seed)


def dali_files(job: Job, device: str) -> Batches:
    (top, left, height, width), (whole_width, whole_height) = BOX, FACE
    at = {"crop_pos_y": top / (whole_height - height), "crop_pos_x": left / (whole_width - width)}

    def graph(fn: Any, decoders: str) -> Any:
        encoded, labels = fn.readers.file(file_root=str(job.tree), random_shuffle=True)
        faces = fn.decoders.image_crop(encoded, device=decoders, crop=(height, width), **at)
        resized = fn.resize(faces, size=[SIZE, SIZE])
        return systems.normalized(fn, resized, HALF, HALF, mirror=fn.random.coin_flip()), labels

    return systems.dali(job.batch, job.workers, device, graph)


def _need_rocal(device: str) -> None:
    """Raises NotHere, with the requirements of rocAL."""
    from readers.rocal.pipelines import MissingRocalError, gpu_backend, load_rocal

    try:
        load_rocal("this row")
    except MissingRocalError as error:
        raise NotHere(str(error)) from None
    if device == "cuda" and gpu_backend() is False:
        raise NotHere("this rocAL is built for the CPU alone: needs an AMD GPU, and ROCm's (PYTHONPATH=/opt/rocm/lib)")


def rocal_files(job: Job, device: Any) -> Batches:
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


def rocal_loader(job: Job, device: Any) -> Batches:
    _need_rocal(device)
    from readers import Ranks
    from readers.rocal import RocalLoader, celeba, external_source

    source = external_source(job.reader(), job.batch, seed=job.seed, ranks=Ranks(rank=0, world_size=1))
    with RocalLoader(celeba(source, size=SIZE, device=device, threads=job.workers), source) as loader:
        yield from systems.endless(loader)


def same(job: Job, row: str, on_gpu: bool = False) -> Batches:
    """The batches of another row, for training."""
    if on_gpu:
        systems.need_gpu()
    made: Batches = CONTENDERS[row].function(job)
    return made


# --- checks -----------------------------------------------------------------------------------------------------------
def make_job(arguments: argparse.Namespace, folder: str = "all") -> Job:
    return Job(arguments.work / folder / "tree", arguments.work / folder / "hdf5", arguments.workers)


def _compared_job(arguments: argparse.Namespace) -> Job:
    """A job over some of the images, each in its own class, so that labels identify images; in packer's order if
    possible."""
    return replace(make_job(arguments, "some"), in_order=True)


def check(arguments: argparse.Namespace) -> Iterator[Check]:
    """Compare every loader's images with Pillow's, and the loaders in packer's order with each other."""
    from PIL import Image
    from pillow_transforms import crop, read_image, resize

    import packer

    if arguments.count < BATCH or arguments.count % BATCH:
        sys.exit(f"s000: --count is {arguments.count}, expected a multiple of {BATCH}")
    job, some, source = make_job(arguments), _compared_job(arguments), arguments.images
    try:
        first = None if source is None else next(source.rglob("*.jpg"), None)
        are_faces = first is not None and Image.open(first).size == FACE
        systems.make_images(job.tree, arguments.count, None if are_faces else FACE, source=source, quality=60)
    except (ValueError, OSError) as error:
        sys.exit(f"s000: {error}")
    files = systems.class_each(job.tree, some.tree, min(arguments.count, COMPARED))
    for each in (job, some):
        packer.convert(each.tree, "hdf5", each.packed, overwrite=True)
        warm([each.tree, each.packed])
    with some.reader() as reader:
        rows = zip(files, reader.read_many(range(len(reader))), reader.labels, strict=False)
        same = sum(Path(path).read_bytes() == bytes(data) and label == kept for (path, label), data, kept in rows)
        holds = same == len(files) == len(reader)
    yield Check("the packed set has the bytes and labels of the files", f"{same} of {len(files)}", holds)
    pixels = [np.asarray(resize(crop(read_image(path), *BOX), (SIZE, SIZE))) for path, _ in files]
    np.save(arguments.work / "reference.npy", np.stack(pixels))
    ran = compared(EXPERIMENT, arguments, END_TO_END, MODEL, smoke=f"{BASELINE},{LOADER}")
    for name, run in ran.items():
        yield _check_pixels(name, run, len(files))
    if not any("error" in run for run in ran.values()):
        yield from _check_order(ran, len(files), some)


def compare(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    references = np.load(arguments.work / "reference.npy")
    return systems.compare(chosen.function(_compared_job(arguments)), references, HALF, HALF)


def _check_pixels(name: str, run: dict[str, Any], count: int) -> Check:
    promise = f"{name}: every sample once, with its label, as Pillow makes it or mirrored"
    if "error" in run:
        return Check(promise, str(run["error"]), False)
    bound = CONTENDERS[name].options["bound"]
    text = (
        f"{run['right']} of {count}, {run['flipped']:.0%} mirrored; {run['mean']:.2f} of 255 from Pillow's on average, "
        f"the worst image {run['worst']:.2f} (allowed: {bound:g}), the worst value {run['largest']:.0f}"
    )
    even = abs(run["flipped"] - 0.5) < 5 * 0.5 / math.sqrt(count)
    # Even in Pillow's rows, values are converted to float32 and back.
    return Check(promise, text, run["images"] == run["right"] == count and even and run["worst"] <= bound + 1e-3)


def _check_order(ran: dict[str, dict[str, Any]], count: int, job: Job) -> Iterator[Check]:
    """Check that rows in packer's order have the batches of `readers.order`, and packer's rows equal flips."""
    from readers.order import Shuffled

    due = systems.digest(Shuffled(count, job.seed).indices(0, np.arange(count)))
    ordered = [name for name in ran if CONTENDERS[name].options.get("ordered")]
    others = [name for name in ordered if ran[name]["order"] != due]
    promise = f"in the same order, the same images in all {count // job.batch} batches, up to the flips"
    yield Check(promise, f"not in {'; '.join(others)}" if others else "; ".join(ordered), not others)
    drawn = [name for name in ordered if CONTENDERS[name].options.get("draws")]
    if drawn:
        same = len({ran[name]["flips"] for name in drawn}) == 1
        yield Check("the flips of readers.augment are the same", "; ".join(drawn) if same else "not the same", same)


# --- measurement ------------------------------------------------------------------------------------------------------
def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """Images/s and CPU time after a warm-up."""
    job = make_job(arguments)
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
    clock, count = Clock(), 0
    while count < arguments.n:
        pixels = next(batches)[0]
        float(pixels[-1, 0, 0, 0])  # waits for a batch on a GPU
        count += len(pixels)
    figures = clock.figures(count)
    return {**figures, "first_s": first, "celeba_s": CELEBA / figures["images_s"]}


def _learner(full: bool, seed: int) -> Any:
    import torch

    sys.path.append(str(REPOSITORY / "examples"))
    from ddpm_model import TINY, Learner, Settings

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Learner(Settings() if full else TINY, SIZE, seed, torch.device(device))


def _train_rate(batches: Iterator[Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Images/s of training the document's network on the GPU, and the share of time that it waits for batches."""
    import torch

    learner = _learner(True, SEED)
    for _ in range(arguments.warm):
        learner.learn(torch.as_tensor(next(batches)[0]))
    count, waited, started = 0, 0.0, time.perf_counter()
    while count < arguments.n:
        requested = time.perf_counter()
        batch = torch.as_tensor(next(batches)[0])
        waited += time.perf_counter() - requested
        learner.learn(batch)  # returns the loss, so it waits for the end of the step
        count += len(batch)
    seconds = time.perf_counter() - started
    return {"train_images_s": count / seconds, "waits_percent": 100 * waited / seconds}


def _model(chosen: Contender, job: Job, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train a model of each seed, once for all rounds: its loss with the same noise for all models, and its samples."""
    import torch

    saved = _features_of(arguments, chosen.name)
    if saved.exists():
        return dict(json.loads(saved.with_suffix(".json").read_text()))
    torch.set_num_threads(1)
    images = np.load(arguments.work / "reference.npy").transpose(0, 3, 1, 2)
    reference = torch.from_numpy(np.stack(list({image.tobytes(): image for image in images}.values())))
    judged, network, features = reference[: arguments.judged].float() / 127.5 - 1, feature_network(), []
    figures: dict[str, Any] = {}
    for seed in range(1 if chosen.name == FAULT else arguments.seeds):
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
    """The file of the features of each seed's samples, [seeds, n, d]."""
    return Path(arguments.work, f"{slug(name)}.npy")


def feature_network() -> Any:
    """A function from uint8 images, a tensor [n, 3, h, w], to features [n, 32]: three convolutions with fixed random
    weights, and the means of their maps. The features describe colours, contrasts and textures, not faces."""
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
    names = [name + MODEL for name in (BASELINE, LOADER)]
    if not all(figure(results, name, "loss") for name in (*names, FAULT)):
        return
    losses = [[results[name][0][f"loss {seed}"] for seed in range(arguments.seeds)] for name in names]
    spread, apart = max(max(some) - min(some) for some in losses), abs(mean(losses[0]) - mean(losses[1]))
    text = f"the means of {arguments.seeds} seeds differ by {apart:.4f}, the seeds of a loader by up to {spread:.4f}"
    yield Check("a model trained on packer's batches has the same loss", text, apart <= spread)
    baseline, loader, (fault,) = (np.load(_features_of(arguments, name)) for name in (*names, FAULT))
    loaders = mean(frechet_distance(a, b) for a, b in zip(baseline, loader, strict=True))
    seeds = [
        frechet_distance(some[i], some[j]) for some in (baseline, loader) for i in range(len(some)) for j in range(i)
    ]
    yield Check(
        "it draws the same images: their Fréchet distance is no larger than from seed to seed",
        f"between the loaders with a seed {loaders:.3g}, from seed to seed {min(seeds):.3g} to {max(seeds):.3g}; "
        f"with a fault, values from 0 to 1, {frechet_distance(baseline[0], fault):.3g}",
        loaders <= max(seeds),
    )


EXPERIMENT = Experiment.read(
    __file__,
    [pillow, tf_data, image_dataset, image_loader, dali_files, dali_loader, rocal_files, rocal_loader, same],
    measure=measure,
    check=check,
    compare=compare,
    claims=claims,
)

if __name__ == "__main__":
    given = parser(__doc__)
    given.add_argument("--full", action="store_true", help="train the document's network, for a GPU")
    main(EXPERIMENT, given)
