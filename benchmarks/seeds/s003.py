"""Where images come from, and who decodes them: files, /dev/shm, byte caches, an MPI window, a GPU, or no file at all.

    python benchmarks/seeds/s003.py [--count 8192] [--seconds 2] [--smoke]

Rows that read measure the bytes alone, one image at a time; rows that decode, batches of `--batch-size` uint8 images in
random order, with as many worker processes or threads as there are CPUs. Rows that are cold begin with an empty page
cache, which needs root; without it only the files of this experiment leave it.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import random
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
from experiment import Check, Experiment, main, parser
from harness import CONTENDERS, Benchmark, Contender, NotHere
from machine import chill, cpu_seconds_of_tree, folder_bytes, prime, warm
from report import Column
from s003_devices import GPU_ROWS
from s003_page import publish
from s003_rows import Job, ranks
from s003_sources import SOURCES, Place, example, prepare

from cache.node import usable_cpus
from readers.augment import IMAGENET_MEAN, IMAGENET_STD

_CHECKED = 512
_PRIME_BYTES = 1 << 28
_WARM_BATCHES = 4
# More than any row makes ahead: they were read before the page cache was emptied.
_AHEAD_BATCHES = 6
_LOOK_EVERY = 32
_TARGET_BYTES = 1 << 22


def job_of(arguments: argparse.Namespace, folder: str = "full") -> Job:
    """What the rows get; sizes are those of the options, or small ones with --smoke."""
    seconds = arguments.seconds or (0.2 if arguments.smoke else 2.0)
    return Job(Place(arguments.work / folder), arguments.batch_size, usable_cpus(), seconds)


# --- what is measured -------------------------------------------------------------------------------------------------
def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """Images/s of a row, and the CPU time of all its processes for an image."""
    job, kind, cold = job_of(arguments), chosen.options["kind"], chosen.options.get("cold", False)
    if kind == "own":
        return dict(chosen.function(job))
    prime(_PRIME_BYTES)
    with chosen.function(job) as found:
        return (_read if kind == "read" else _consume)(found, job, cold)


def _read(source: Any, job: Job, cold: bool) -> dict[str, Any]:
    """One image after the other, in random order, copied into a buffer that is there."""
    order = list(range(len(source.labels)))
    random.Random(1).shuffle(order)
    target = memoryview(bytearray(_TARGET_BYTES))
    figures: dict[str, Any] = {"cache": _chill(job)} if cold else {}
    cpu, started, count, seconds = cpu_seconds_of_tree(), time.perf_counter(), 0, 0.0
    while seconds < job.seconds and not (cold and count):
        for index in order:
            data = source.read(index)
            target[: len(data)] = data
            count += 1
            if not count % 64 and time.perf_counter() - started > job.seconds:
                break
        seconds = time.perf_counter() - started
    return {"images_s": count / seconds, "cpu_us": 1e6 * (cpu_seconds_of_tree() - cpu) / count, **figures}


def _consume(batches: Iterator[Any], job: Job, cold: bool) -> dict[str, Any]:
    """Batches in whose pixels the main process looks, but which it does not copy."""
    started = time.perf_counter()
    count = _look(next(batches))
    figures: dict[str, Any] = {"first_s": time.perf_counter() - started}
    for _ in range(_WARM_BATCHES - 1):
        _look(next(batches))
    limit = float("inf")
    if cold:
        figures["cache"] = _chill(job)
        for _ in range(_AHEAD_BATCHES):
            _look(next(batches))
        limit = len(list(job.place.tree.glob("*/*"))) - (_WARM_BATCHES + 2 * _AHEAD_BATCHES) * job.batch
    cpu, started, count, seconds = cpu_seconds_of_tree(), time.perf_counter(), 0, 0.0
    while not count or (seconds < job.seconds and count < limit):
        count += _look(next(batches))
        seconds = time.perf_counter() - started
    figures |= {"images_s": count / seconds, "cpu_us": 1e6 * (cpu_seconds_of_tree() - cpu) / count}
    batches.close()  # type: ignore[attr-defined]  # ends the workers, so that they leave the caches
    return figures


def _look(batch: Any) -> int:
    """Read some pixels of a batch, which also waits for a device."""
    images, _ = batch
    if tuple(images.shape[1:]) != (3, 224, 224):
        raise ValueError(f"a batch of images {tuple(images.shape)}, expected [n, 3, 224, 224]")
    float(images[:, :, ::_LOOK_EVERY, ::_LOOK_EVERY].sum())
    return len(images)


def _chill(job: Job) -> str:
    return chill([job.place.tree, job.place.packed])


def before(chosen: Contender, arguments: argparse.Namespace) -> None:
    """For rows that are not cold: the files are in the page cache, also after a row that was."""
    if chosen.options["kind"] != "own" and not chosen.options.get("cold"):
        place = job_of(arguments).place
        warm([place.tree, place.packed])


# --- what must hold ---------------------------------------------------------------------------------------------------
def check(arguments: argparse.Namespace) -> Iterator[Check]:
    """The same bytes from every source, the same pixels and labels from every row, every image once."""
    if arguments.smoke and not arguments.only:
        for name in [n for n, row in CONTENDERS.items() if not (row.options.get("smoke") or n in GPU_ROWS)]:
            del CONTENDERS[name]
    stack = ExitStack()
    atexit.register(stack.close)
    count = arguments.count or (256 if arguments.smoke else 8192)
    count += -count % arguments.batch_size
    job = job_of(arguments)
    arguments.seconds_of = prepare(job.place, count, arguments.images, stack)
    arguments.count = count
    yield _different(job, arguments)
    small = job if count <= _CHECKED else job_of(arguments, "small")
    if small is not job:
        prepare(small.place, _CHECKED + -_CHECKED % small.batch, arguments.images, stack)
    yield from _same_bytes(job)
    yield from _same_pixels(small)
    yield _same_drawing()


def _different(job: Job, arguments: argparse.Namespace) -> Check:
    """Otherwise the next checks would not see which image is where."""
    with job.source("files") as source:
        found = len({zlib.crc32(source.read(i)) for i in range(len(source.labels))})
    kilobytes = folder_bytes(job.place.tree) / 1e3 / arguments.count
    text = f"{arguments.count:,} of {kilobytes:.1f} kB, {found:,} of them different"
    return Check("JPEGs of 224 x 224 pixels", text, found == arguments.count or arguments.images is not None)


def _same_bytes(job: Job) -> Iterator[Check]:
    expected: list[Any] = []
    for name in SOURCES:
        with job.source(name) as source:
            found = sorted((zlib.crc32(source.read(i)), label) for i, label in enumerate(source.labels))
        expected = expected or found
        yield _compared(f"bytes and labels, {name}", found, expected)


def _same_pixels(job: Job) -> Iterator[Check]:
    """An epoch of every row that can run here. Of a mirrored image the smaller of the two checksums counts."""
    import simplejpeg

    expected = {}
    with job.source("files") as source:
        for floats in (False, True):
            images = ((simplejpeg.decode_jpeg(source.read(i), "RGB"), label) for i, label in enumerate(source.labels))
            expected[floats] = sorted((_checksum(pixels, floats), label) for pixels, label in images)
    try:
        pixels = sorted((decoded, label) for _, decoded, label in ranks(job, "check"))
        yield _compared("pixels and labels, MPI window", pixels, expected[False])
    except NotHere as reason:
        yield Check("pixels and labels, MPI window", f"not compared: {reason}", True)
    for name, row in CONTENDERS.items():
        if row.options["kind"] != "batches":
            continue
        floats = row.options.get("floats", False)
        try:
            for module in row.imports:
                importlib.import_module(module)
        except Exception:
            continue  # the row says why it does not run
        try:
            with row.function(job) as batches:
                found = _epoch(batches, len(expected[floats]), floats)
        except NotHere:
            continue
        yield _compared(f"pixels and labels, {name}", found, expected[floats])


def _epoch(batches: Any, count: int, floats: bool) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for images, labels in batches:
        for image, label in zip(images, labels, strict=True):
            pixels = np.asarray(image.cpu() if hasattr(image, "cpu") else image).transpose(1, 2, 0)
            if floats:
                pixels = (255 * (pixels * np.array(IMAGENET_STD) + np.array(IMAGENET_MEAN))).round().astype(np.uint8)
            found.append((_checksum(pixels, floats), int(label)))
        if len(found) >= count:
            break
    batches.close()
    return sorted(found)


def _checksum(pixels: Any, mirrored: bool) -> int:
    images = (pixels, pixels[:, ::-1]) if mirrored else (pixels,)
    return min(zlib.crc32(np.ascontiguousarray(image)) for image in images)


def _compared(what: str, found: list[Any], expected: list[Any]) -> Check:
    right = (Counter(found) & Counter(expected)).total()
    return Check(what, f"{right:,} of {len(expected):,} the same", found == expected)


def _same_drawing() -> Check:
    """The device draws what the files show."""
    what = "images drawn by NumPy and by JAX from the same bytes"
    try:
        import jax.numpy as jnp
    except ImportError:
        return Check(what, "not compared: jax is not installed", True)
    text = example("make_text")
    images, letters = [], []
    for array in (np.asarray, jnp.asarray):
        draw = np.random.default_rng(1)
        made, read = text.text_images(
            lambda shape, array=array, draw=draw: array(draw.integers(0, 256, shape, np.uint8)),
            8, array(text.LETTERS), array(text.glyphs(*text.CELL)), text.GRID,
        )  # fmt: skip
        images.append(np.asarray(made).astype(int))
        letters.append(np.asarray(read))
    most = int(abs(images[0] - images[1]).max())
    return Check(what, f"at most {most} of 255 apart", most <= 1 and bool((letters[0] == letters[1]).all()))


BENCHMARK = Benchmark(
    title="Files, caches, decoders, and data made on the device",
    columns=(Column("images_s", "images/s"), Column("cpu_us", "CPU µs/image")),
    key="images_s",
    limits=(),
    measure=measure,
    before=before,
)
EXPERIMENT = Experiment(
    name="s003",
    document="“Working with Data on GPUs: I/O, Data Transfer & Generation”, Florian Kaspar, 9 October 2025",
    about=(
        "The talk reads 64,000 generated JPEGs of 224 x 224 pixels, about 1 GB, from a file system, /dev/shm and a "
        "cache of their bytes, decodes them on the CPU or the GPU, and finally makes them on the GPU. Here fewer such "
        "images of random text take every one of these ways that the machine has, and ours."
    ),
    benchmark=BENCHMARK,
    check=check,
    publish=publish,
)


def options() -> argparse.ArgumentParser:
    found = parser(__doc__)
    found.add_argument("--count", type=int, help="images; default 8192, with --smoke 256")
    found.add_argument("--seconds", type=float, help="of the clock of a row; default 2, with --smoke 0.2")
    found.add_argument("--batch-size", type=int, default=64)
    return found


if __name__ == "__main__":
    main(EXPERIMENT, options())
