"""Sources and decoders of images: files, /dev/shm, byte caches, an MPI window, a GPU, and images made on the device.

    python benchmarks/seeds/s003.py [--count 8192] [--seconds 1.5] [--smoke]

Rows of reading read one image at a time and do not decode; rows of decoding make batches of `--batch` uint8 images in
random order, with one worker process or thread per CPU. Cold rows begin with an empty page cache, which needs root;
without root only the files of this experiment are dropped from it.

A row's function takes a `Job`; its result depends on its `kind`:

read     a source, which is read image by image
batches  an endless iterator of (images, labels), images [n, 3, height, width]
own      the figures
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import io
import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from experiment import Check, Experiment, main, parser, ratio  # isort: skip  (it sets the path)
import numpy as np
import systems
from harness import CONTENDERS, REPOSITORY, Contender, NotHere, Results, keep_rows
from machine import Clock, chill, folder_bytes, list_tree, prime, warm

from readers.augment import IMAGENET_MEAN as MEAN
from readers.augment import IMAGENET_STD as STD
from readers.order import NodeLocal, Shuffled
from readers.order.quality import shuffle_quality

_CHECKED = 512
_WARM_BATCHES, _AHEAD_BATCHES = 4, 6  # ahead: no row makes more batches before the page cache is emptied
FILES, MADE, TRAINED = "DataLoader: files", "JAX: made on the device", "JAX: made and trained on"


# --- sources of bytes: usable inside their `with`, whose entry fills caches and memory --------------------------------
class Source(NamedTuple):
    """read: the bytes of an image; each source has its own numbering. labels: of all images."""

    read: Callable[[int], Any]
    labels: list[int]


@dataclass(frozen=True)
class Job:
    """A row's arguments. root: a folder with the same images three times: tree, packed, and shared, a link to the
    staged copy, which exists while the process that staged it runs. workers: processes or threads. seconds: of the
    measurement."""

    root: Path
    batch: int
    workers: int
    seconds: float

    @property
    def tree(self) -> Path:
        return self.root / "tree"

    @property
    def packed(self) -> Path:
        return self.root / "packed"

    @property
    def shared(self) -> Path:
        return self.root / "shared"

    def source(self, name: str) -> AbstractContextManager[Source]:
        made: AbstractContextManager[Source] = SOURCES[name](self)
        return made


def example(name: str) -> Any:
    """A module of examples/."""
    folder = str(REPOSITORY / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def prepare(job: Job, count: int, source: Path | None, stack: ExitStack) -> None:
    """Make missing sets from JPEGs of a folder or of random text; `stack` removes the copy in /dev/shm."""
    import packer
    import readers

    job.root.mkdir(parents=True, exist_ok=True)
    if source is not None:
        systems.make_images(job.tree, count, (224, 224), classes=2, source=source)
    elif not job.tree.exists():
        example("make_text").write_text(job.tree, count)
    if not job.packed.exists():
        packer.convert(job.tree, to="hdf5", output=job.packed)
    job.shared.unlink(missing_ok=True)
    if Path("/dev/shm").is_dir():
        target = stack.enter_context(tempfile.TemporaryDirectory(prefix="s003-", dir="/dev/shm"))
        staged = readers.stage(job.packed, target, form="files", cleanup="atexit")
        job.shared.symlink_to(stack.enter_context(staged))
        stack.callback(job.shared.unlink, missing_ok=True)


def _files_of(folder: Path) -> Source:
    paths = list_tree(folder)

    def read(index: int) -> bytes:
        with open(paths[index][0], "rb") as file:
            return file.read()

    return Source(read, [label for _, label in paths])


@contextmanager
def _files(job: Job) -> Iterator[Source]:
    yield _files_of(job.tree)


@contextmanager
def _shared_files(job: Job) -> Iterator[Source]:
    if not job.shared.exists():
        raise NotHere("there is no /dev/shm here")
    yield _files_of(job.shared)


@contextmanager
def _byte_array(job: Job) -> Iterator[Source]:
    """The document's cache: all bytes end to end, and the end of each image; shared with forked workers."""
    files = _files_of(job.tree)
    data = [files.read(index) for index in range(len(files.labels))]
    ends = np.cumsum([len(image) for image in data])
    starts = ends - [len(image) for image in data]
    memory = mmap.mmap(-1, int(ends[-1]))
    memory[:] = b"".join(data)
    array = np.frombuffer(memory, np.uint8)
    yield Source(lambda index: array[starts[index] : ends[index]], files.labels)


@contextmanager
def cached(job: Job, capacity: float = 1.0, keep: str = "encoded") -> Iterator[Any]:
    """A reader over the files with packer's cache, filled."""
    import readers

    with readers.cached(readers.open_folder(job.tree), capacity, keep, job=f"s003-{os.getpid()}") as reader:
        reader.prefill()
        yield reader


def packed(job: Job) -> Any:
    import readers

    return readers.open(job.packed)


def folder(job: Job) -> Any:
    import readers

    return readers.open_folder(job.tree)


def _of(opened: Callable[[Job], Any]) -> Callable[[Job], Any]:
    @contextmanager
    def source(job: Job) -> Iterator[Source]:
        with opened(job) as reader:
            yield Source(reader.read, reader.labels.tolist())

    return source


@contextmanager
def _stochastic(job: Job) -> Iterator[Source]:
    """stocaching, with half of the images, decoded."""
    import torch
    from stocaching import SharedCache

    with job.source("files") as source:
        count = len(source.labels)
        room = count // 2 * 3 * 224 * 224 / (1 << 30)
        kept = SharedCache(size_limit_gib=room, dataset_len=count, data_dims=(224, 224, 3), dtype=torch.uint8)

        def read(index: int) -> Any:
            pixels = kept.get_slot(index)
            if pixels is None:
                pixels = torch.from_numpy(simplejpeg(source.read(index)))
                kept.set_slot(index, pixels, allow_overwrite=True)
            return pixels

        for index in range(count):
            read(index)
        yield Source(read, source.labels)


SOURCES: dict[str, Callable[[Job], Any]] = {
    "files": _files,
    "files in /dev/shm": _shared_files,
    "byte array": _byte_array,
    "packed set": _of(packed),
    "byte cache": _of(cached),
    "half in the byte cache": _of(lambda job: cached(job, 0.5)),
    "half of the pixels": _of(lambda job: cached(job, 0.5, "decoded:224")),
    "stocaching": _stochastic,
}
OF_BYTES = [*SOURCES][:6]
OPENED = {"files": folder, "packed set": packed, "byte cache": cached,
          "pixels": lambda job: cached(job, keep="decoded:224")}  # fmt: skip


# --- rows that read ---------------------------------------------------------------------------------------------------
def read(job: Job, source: str) -> AbstractContextManager[Source]:
    return job.source(source)


def mpi(job: Job, mode: str) -> Any:
    """The printed figures of the first of two ranks, see `rank`. Raises NotHere without MPI."""
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if mpiexec is None:
        raise NotHere("needs MPI: mpiexec is not installed (pip install mpich mpi4py)")
    # The library of an MPI from pip is next to its mpiexec.
    libraries = f"{Path(mpiexec).resolve().parent.parent / 'lib'}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    command = [mpiexec, "-n", "2", sys.executable, __file__, "--rank", str(job.packed), mode]
    command += [str(job.batch), str(job.seconds)]
    how: Any = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run(command, env={**os.environ, "LD_LIBRARY_PATH": libraries}, check=False, **how)
    if "cannot load MPI library" in done.stderr:
        raise NotHere("needs MPI: mpi4py finds no library of it")
    if done.returncode:
        raise RuntimeError(f"mpiexec ended with {done.returncode}: {done.stderr[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def rank(packed: str, mode: str, batch: int, seconds: float) -> None:
    """The process of a rank. All ranks share a byte cache in an MPI window: together they fill it, then each reads its
    part in random order. The first rank prints the images/s of all ranks, or with `check` each image's checksum, the
    checksum of its pixels, and its label."""
    from mpi4py import MPI

    import readers

    world, pixels, done = MPI.COMM_WORLD, np.empty((batch, 224, 224, 3), np.uint8), 0
    with readers.cached(readers.open(packed), 1.0, backend="mpi", comm=world) as reader:
        reader.prefill()
        world.Barrier()
        if (present := reader.stats().present) != len(reader):
            raise RuntimeError(f"{present} of {len(reader)} images are in the window")
        indices = list(range(world.rank, len(reader), world.size))
        random.Random(world.rank).shuffle(indices)

        def decode(index: int) -> bytes:
            nonlocal done
            pixels[done % batch] = simplejpeg(reader.read(index))
            done += 1
            return b""

        if mode == "check":
            images = [(reader.read(index), int(reader.labels[index])) for index in indices]
            result: Any = [(zlib.crc32(data), zlib.crc32(simplejpeg(data)), label) for data, label in images]
        else:
            count, taken = timed_reads(decode if mode == "decode" else reader.read, indices, seconds)
            result = count / taken
        everything = world.gather(result)
        if everything is not None:
            all_of_them = [item for part in everything for item in part] if mode == "check" else sum(everything)
            print(json.dumps(all_of_them if mode == "check" else {"images_s": all_of_them}))
        world.Barrier()


# --- rows in torch's DataLoader ---------------------------------------------------------------------------------------
def simplejpeg(data: Any) -> Any:
    from simplejpeg import decode_jpeg

    return decode_jpeg(data, "RGB")


def pillow(data: Any) -> Any:
    from PIL import Image

    return np.array(Image.open(io.BytesIO(data)).convert("RGB"))


def torchvision(data: Any) -> Any:
    from torchvision.io import ImageReadMode, decode_jpeg

    return decode_jpeg(tensor(data), ImageReadMode.RGB)


def tensor(data: Any) -> Any:
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def augmented(data: Any) -> Any:
    """Augment with torchvision's transforms."""
    import pillow_transforms as T

    return T.Compose([T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize(MEAN, STD)])(T.read_image(bytes(data)))


def albumented(data: Any) -> Any:
    import albumentations as A

    change = A.Compose([A.HorizontalFlip(p=0.5), A.Normalize(MEAN, STD)])
    return change(image=simplejpeg(data))["image"]


def kept(data: Any) -> Any:
    from readers.decode import decode_image

    return np.array(decode_image(data))


DECODERS = {function.__name__: function for function in (simplejpeg, pillow, torchvision, augmented, albumented, kept)}
DECODERS["none"] = lambda pixels: pixels


class _Samples:
    """A typical data set for torch's DataLoader: read, decode, label."""

    def __init__(self, source: Source, decode: Callable[[Any], Any]) -> None:
        self.source, self.decode = source, decode

    def __len__(self) -> int:
        return len(self.source.labels)

    def __getitem__(self, index: int) -> Any:
        return self.decode(self.source.read(index)), self.source.labels[index]


def _planes(batches: Iterator[Any]) -> Iterator[Any]:
    """Images as [n, 3, height, width], without a copy."""
    for pixels, labels in batches:
        yield (pixels if pixels.shape[1] == 3 else pixels.permute(0, 3, 1, 2)), labels


@contextmanager
def decoded(job: Job, source: str, decode: str = "simplejpeg") -> Iterator[Iterator[Any]]:
    with job.source(source) as opened:
        yield _planes(systems.data_loader(_Samples(opened, DECODERS[decode]), job.batch, job.workers))


@contextmanager
def decoded_on_gpu(job: Job, source: str) -> Iterator[Iterator[Any]]:
    """Workers read; torchvision's decode_jpeg decodes a list at a time."""
    systems.need_gpu()
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg

    def decode(batches: Iterator[Any]) -> Iterator[Any]:
        for encoded, labels in batches:
            pixels = decode_jpeg(list(encoded), ImageReadMode.RGB, device="cuda")
            yield torch.stack(pixels), torch.tensor(labels).to("cuda", non_blocking=True)

    def pairs(samples: Any) -> Any:
        return tuple(zip(*samples, strict=True))

    with job.source(source) as opened:
        samples = _Samples(opened, tensor)
        yield decode(systems.data_loader(samples, job.batch, job.workers, collate_fn=pairs))


# --- rows in our loader, and in JAX -----------------------------------------------------------------------------------
@contextmanager
def loaded(job: Job, opened: str, mirrored: bool = False, **options: Any) -> Iterator[Iterator[Any]]:
    from readers.augment import Normalize, RandomHorizontalFlip

    systems.need_gpu(options.get("device", "cpu"))
    ops = [RandomHorizontalFlip(), Normalize(MEAN, STD)] if mirrored else ()
    with OPENED[opened](job) as reader:
        yield systems.image_loader(reader, job.batch, ops, job.workers, **options)


def _rate(job: Job, count: int, call: Callable[[int], Any]) -> dict[str, Any]:
    """call: makes or uses `count` images; the first call compiles."""
    import jax

    jax.block_until_ready(call(0))
    clock, calls = Clock(), 0
    while not calls or clock.seconds < job.seconds:
        calls += 1
        jax.block_until_ready(call(calls))
    return {**clock.figures(calls * count), "jax": jax.default_backend()}


def jax_alone(job: Job) -> dict[str, Any]:
    import jax

    made = example("generate_jax")
    make, task = jax.jit(made.make_batch, static_argnums=(0, 2)), made.Task(batch=job.batch)
    return _rate(job, job.batch, lambda call: make(task, made.new_key(call), job.batch))


def jax_trained(job: Job) -> dict[str, Any]:
    made = example("generate_jax")
    task = made.Task(batch=job.batch)
    state = made.begin(task, 0)
    return _rate(job, 2 * job.batch, lambda call: made.train(task, state, made.new_key(call), 2))


def jax_loaded(job: Job) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    made = example("generate_jax")
    task = made.Task(batch=job.batch)
    step, state = jax.jit(made.step, static_argnums=0), made.begin(task, 0)
    with loaded(job, "packed set", layout="NHWC") as batches:

        def call(number: int) -> Any:
            pixels, labels = next(batches)
            return step(task, state, jnp.from_dlpack(pixels), jnp.from_dlpack(labels.int()) == 0)

        return _rate(job, job.batch, call)


# --- how well orders shuffle ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _View:
    """A node-local order as seen by one node, or without a number by all nodes, in epochs of one kind only."""

    order: NodeLocal
    exchange: bool
    node: int | None = None

    def __len__(self) -> int:
        return len(self.order) if self.node is None else len(self.order.local_part(self.node))

    def spec(self) -> Mapping[str, Any]:
        return self.order.spec()

    def indices(self, epoch: int, positions: Any) -> Any:
        between = self.order.exchange_every - 1
        epoch = (epoch + 1) * (between + 1) - 1 if self.exchange else epoch // between * (between + 1) + epoch % between
        if self.node is not None:
            positions = np.asarray(positions) * self.order.nodes + self.node
        return self.order.indices(epoch, positions)


def mixing(job: Job, nodes: int) -> dict[str, float]:
    count = len(list_tree(job.tree))
    if nodes == 1:
        return {"all_nodes": shuffle_quality(Shuffled(count)), "one_node": 1.0}
    order = NodeLocal(count, nodes)
    views: list[Any] = [_View(order, False), _View(order, False, 0), _View(order, True, 0)]
    return dict(zip(("all_nodes", "one_node", "exchange"), map(shuffle_quality, views), strict=True))


# --- measurement ------------------------------------------------------------------------------------------------------
def job_of(arguments: argparse.Namespace, folder: str = "full") -> Job:
    return Job(arguments.work / folder, arguments.batch, arguments.workers, arguments.seconds)


def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """Images/s of a row, and the CPU time per image of all its processes."""
    job, kind, cold = job_of(arguments), chosen.options["kind"], chosen.options.get("cold", False)
    if kind == "own":
        return dict(chosen.function(job))
    prime(1 << 28)
    with chosen.function(job) as opened:
        return (_read if kind == "read" else _consume)(opened, job, cold)


def _read(source: Source, job: Job, cold: bool) -> dict[str, Any]:
    """Read images one by one, in random order."""
    order = list(range(len(source.labels)))
    random.Random(1).shuffle(order)
    figures: dict[str, Any] = {"cache": chill([job.tree, job.packed])} if cold else {}
    clock = Clock()
    count, _ = timed_reads(source.read, order, job.seconds, once=cold)
    return {**clock.figures(count), **figures}


def timed_reads(read: Callable[[int], Any], indices: list[int], limit: float, once: bool = False) -> tuple[int, float]:
    """(images, seconds): read images into an existing buffer for `limit` seconds; once: at most each image once."""
    target = memoryview(bytearray(1 << 22))
    started, count, seconds = time.perf_counter(), 0, 0.0
    while seconds < limit and not (once and count):
        for index in indices:
            data = read(index)
            target[: len(data)] = data
            count += 1
            if not count % 64 and time.perf_counter() - started > limit:
                break
        seconds = time.perf_counter() - started
    return count, seconds


def _consume(batches: Iterator[Any], job: Job, cold: bool) -> dict[str, Any]:
    """Consume batches: the main process reads some pixels of each, but does not copy it."""
    started = time.perf_counter()
    count = _look(next(batches))
    figures: dict[str, Any] = {"first_s": time.perf_counter() - started}
    for _ in range(_WARM_BATCHES - 1):
        _look(next(batches))
    limit = float("inf")
    if cold:
        figures["cache"] = chill([job.tree, job.packed])
        for _ in range(_AHEAD_BATCHES):
            _look(next(batches))
        limit = len(list_tree(job.tree)) - (_WARM_BATCHES + 2 * _AHEAD_BATCHES) * job.batch
    clock, count = Clock(), 0
    while not count or (clock.seconds < job.seconds and count < limit):
        count += _look(next(batches))
    return {**clock.figures(count), **figures}


def _look(batch: Any) -> int:
    pixels = batch[0]
    if tuple(pixels.shape[1:]) != (3, 224, 224):
        raise ValueError(f"a batch of {tuple(pixels.shape)}, expected [n, 3, 224, 224]")
    float(pixels[:, :, ::32, ::32].sum())
    return len(pixels)


def before(chosen: Contender, arguments: argparse.Namespace) -> None:
    """For warm rows: bring the files into the page cache, because cold rows empty it."""
    if chosen.options["kind"] != "own" and not chosen.options.get("cold"):
        warm([job_of(arguments).tree, job_of(arguments).packed])


# --- checks -----------------------------------------------------------------------------------------------------------
def check(arguments: argparse.Namespace) -> Iterator[Check]:
    """Check for the same bytes from every source, the same pixels and labels from every row, and every image once."""
    if arguments.smoke and not arguments.only:
        keep_rows(lambda row: bool(row.options.get("smoke")))
    stack = ExitStack()
    atexit.register(stack.close)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also removes the copy in /dev/shm
    arguments.count += -arguments.count % arguments.batch
    job, some = job_of(arguments), job_of(arguments, "some")
    prepare(job, arguments.count, arguments.images, stack)
    files = systems.class_each(job.tree, some.tree, min(arguments.count, _CHECKED + -_CHECKED % job.batch))
    prepare(some, 0, None, stack)
    expected: list[Any] = []
    for name in OF_BYTES:
        with job.source(name) as source:
            items = sorted((zlib.crc32(source.read(i)), label) for i, label in enumerate(source.labels))
        if not expected:  # with equal images the next checks could not see a wrong order
            expected, different = items, len({checksum for checksum, _ in items})
            size = folder_bytes(job.tree) / 1e3 / len(items)
            text = f"{len(items):,} of {size:.1f} kB, {different:,} of them different"
            yield Check("JPEGs of 224 x 224 pixels", text, different == len(items) or arguments.images is not None)
        yield _compared(f"bytes and labels, {name}", items, expected)
    yield from _same_pixels(some, np.stack([simplejpeg(Path(path).read_bytes()) for path, _ in files]))
    yield _same_drawing()


def _same_pixels(job: Job, references: Any) -> Iterator[Check]:
    """Compare an epoch of every row that can run, over images that each have their own class."""
    try:
        pixels = sorted((decoded, label) for _, decoded, label in mpi(job, "check"))
        yield _compared("pixels and labels, MPI window", pixels,
                        sorted((zlib.crc32(image), label) for label, image in enumerate(references)))  # fmt: skip
    except NotHere as reason:
        yield Check("pixels and labels, MPI window", f"not compared: {reason}", True)
    for name, row in CONTENDERS.items():
        if row.options["kind"] == "batches" and systems.installed(row.imports):
            try:
                with row.function(job) as batches:
                    run = systems.compare(batches, references, MEAN, STD)
                    batches.close()
            except NotHere:
                continue  # the row reports the reason
            # Float images are normalised, and some are mirrored.
            floats = row.options.get("floats", False)
            same = run["images"] == run["right"] == len(references) and run["largest"] <= (0.5 if floats else 0)
            text = f"{run['right']:,} of {len(references):,}, at most {run['largest']:.2g} of 255 apart"
            yield Check(f"pixels and labels, {name}", text, same and (floats or not run["flipped"]))


def _compared(promise: str, items: list[Any], expected: list[Any]) -> Check:
    right = (Counter(items) & Counter(expected)).total()
    return Check(promise, f"{right:,} of {len(expected):,} the same", items == expected)


def _same_drawing() -> Check:
    """Check that images made on the device equal the images of the files."""
    promise = "images drawn by NumPy and by JAX from the same bytes"
    if not systems.installed(["jax.numpy"]):
        return Check(promise, "not compared: jax is not installed", True)
    import jax.numpy as jnp

    text, results = example("make_text"), []
    for array in (np.asarray, jnp.asarray):
        draw = np.random.default_rng(1)
        made, read = text.text_images(
            lambda shape, array=array, draw=draw: array(draw.integers(0, 256, shape, np.uint8)),
            8, array(text.LETTERS), array(text.glyphs(*text.CELL)), text.GRID,
        )  # fmt: skip
        results.append((np.asarray(made).astype(int), np.asarray(read)))
    (pixels, letters), (others, read) = results
    most = int(abs(pixels - others).max())
    return Check(promise, f"at most {most} of 255 apart", most <= 1 and bool((letters == read).all()))


# --- the page ---------------------------------------------------------------------------------------------------------
def claims(results: Results, arguments: argparse.Namespace) -> Iterator[Check]:
    """The claims for rows in JAX, if JAX has a GPU or TPU."""
    there = EXPERIMENT.table["there"]
    on_device = any(run.get("jax") not in (None, "cpu") for run in results.get(MADE, ()))
    for promise, row in (
        ("images are made on the device faster than they are read and decoded", MADE),
        ("training on images made on the device is faster than reading and decoding", TRAINED),
    ):
        times = ratio(results, row, FILES, "images_s")
        if times is not None and on_device:
            yield Check(promise, f"{times:.2f} times; there {there[row] / there[FILES]:.2f}", times > 1)


EXPERIMENT = Experiment.read(
    __file__,
    [read, mpi, decoded, decoded_on_gpu, loaded, jax_alone, jax_trained, jax_loaded, mixing],
    measure=measure,
    check=check,
    before=before,
    claims=claims,
)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5]))
    else:
        main(EXPERIMENT, parser(__doc__))
