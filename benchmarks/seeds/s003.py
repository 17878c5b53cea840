"""Where images come from, and who decodes them: files, /dev/shm, byte caches, an MPI window, a GPU, or no file at all.

    python benchmarks/seeds/s003.py [--count 8192] [--seconds 1.5] [--smoke]

Rows that read measure the bytes alone, one image at a time; rows that decode, batches of `--batch` uint8 images in
random order, with as many worker processes or threads as there are CPUs. Rows that are cold begin with an empty page
cache, which needs root; without it only the files of this experiment leave it.

A row's function gets a `Job`; what it gives depends on its `kind`:

read     a source, to be read image by image
batches  an endless iterator of (images, labels), images [n, 3, height, width]
own      the figures themselves
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

from experiment import Check, Column, Experiment, Section, main, parser, ratio  # isort: skip  (it sets the path)
import images
import numpy as np
import systems
from harness import CONTENDERS, REPOSITORY, Contender, NotHere, Results, contender
from machine import chill, cpu_seconds_of_tree, folder_bytes, list_tree, prime, warm

from readers.augment import IMAGENET_MEAN as MEAN
from readers.augment import IMAGENET_STD as STD
from readers.order import NodeLocal, Shuffled
from readers.order.quality import shuffle_quality

_CHECKED = 512
_WARM_BATCHES, _AHEAD_BATCHES = 4, 6  # ahead: more than any row makes before the page cache is emptied
FILES, ARRAY, SHARED = "DataLoader: files", "DataLoader: byte array", "DataLoader: files in /dev/shm"
MADE, TRAINED = "JAX: made on the device", "JAX: made and trained on"
# Images/s in the document, by the rows here that do the same.
DOCUMENT = {
    FILES: 308, ARRAY: 388, "ours: DataLoader, byte cache": 388, SHARED: 370, "read: byte array": 12_000,
    "ours: read, byte cache": 12_000, "read: files in /dev/shm": 40_000, "GPU: files": 1450, "GPU: byte array": 2100,
    "GPU: files in /dev/shm": 1920, MADE: 40_000, TRAINED: 8000,
}  # fmt: skip


# --- where the bytes come from: a source reads inside its `with`; what fills a memory is done before it is entered ----
class Source(NamedTuple):
    """read: the bytes of an image; each source numbers them its own way. labels: of all."""

    read: Callable[[int], Any]
    labels: list[int]


@dataclass(frozen=True)
class Job:
    """What a row gets. root: a folder with the same images three times: tree, packed, and shared, a link to the staged
    copy, which is there while the process that staged it runs. workers: processes or threads. seconds: of the clock."""

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
    """Make what is missing, from JPEGs of a folder or of random text; the copy in /dev/shm goes with `stack`."""
    import packer
    import readers

    job.root.mkdir(parents=True, exist_ok=True)
    if source is not None:
        images.make(job.tree, count, size=(224, 224), classes=2, source=source)
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
    """The document's cache: all bytes end to end, and where each image ends; shared with the workers, who are forks."""
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
    """Our cache over the files, filled: a reader."""
    import readers

    with readers.cached(readers.open_folder(job.tree), capacity, keep, job=f"s003-{os.getpid()}") as reader:
        reader.prefill()
        yield reader


@contextmanager
def packed(job: Job) -> Iterator[Any]:
    import readers

    with readers.open(job.packed) as reader:
        yield reader


@contextmanager
def folder(job: Job) -> Iterator[Any]:
    import readers

    with readers.open_folder(job.tree) as reader:
        yield reader


def _of(opened: Callable[[Job], Any]) -> Callable[[Job], Any]:
    @contextmanager
    def source(job: Job) -> Iterator[Source]:
        with opened(job) as reader:
            yield Source(reader.read, reader.labels.tolist())

    return source


SOURCES: dict[str, Callable[[Job], Any]] = {
    "files": _files,
    "files in /dev/shm": _shared_files,
    "byte array": _byte_array,
    "packed set": _of(packed),
    "byte cache": _of(cached),
    "half in the byte cache": _of(lambda job: cached(job, 0.5)),
}

# --- rows that read ---------------------------------------------------------------------------------------------------
for _name, _source, _options in (
    ("read: files", "files", {"smoke": True}),
    ("read: files, cold", "files", {"cold": True}),
    ("read: files in /dev/shm", "files in /dev/shm", {"smoke": True, "note": "made by `packer stage --as files`"}),
    ("read: byte array", "byte array", {"smoke": True, "note": "all bytes end to end, and an array of their ends"}),
    ("ours: read, packed set", "packed set", {"smoke": True}),
    ("ours: read, packed set, cold", "packed set", {"cold": True}),
    ("ours: read, byte cache", "byte cache", {"smoke": True, "note": "`readers.cached` over the files"}),
    ("ours: read, half in the byte cache, cold", "half in the byte cache", {"cold": True}),
):
    contender(_name, kind="read", **_options)(lambda job, source=_source: job.source(source))


def ranks(job: Job, mode: str) -> Any:
    """What the first of two ranks prints; see `s003_mpi`. Raises NotHere without MPI."""
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if mpiexec is None:
        raise NotHere("needs MPI: mpiexec is not installed (pip install mpich mpi4py)")
    # An MPI that pip has installed is next to its mpiexec.
    libraries = f"{Path(mpiexec).resolve().parent.parent / 'lib'}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    script = Path(__file__).with_name("s003_mpi.py")
    command = [mpiexec, "-n", "2", sys.executable, str(script), str(job.packed), mode]
    command += ["--seconds", str(job.seconds), "--batch", str(job.batch)]
    how: Any = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run(command, env={**os.environ, "LD_LIBRARY_PATH": libraries}, check=False, **how)
    if "cannot load MPI library" in done.stderr:
        raise NotHere("needs MPI: mpi4py finds no library of it")
    if done.returncode:
        raise RuntimeError(f"mpiexec ended with {done.returncode}: {done.stderr[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


_MPI: dict[str, Any] = {"imports": "mpi4py", "kind": "own"}
contender("ours: read, MPI window", smoke=True, note="two ranks at once, both counted", **_MPI)(
    lambda job: ranks(job, "read")
)
contender("ours: decoded, MPI window", note="two ranks, each decodes into batches", **_MPI)(
    lambda job: ranks(job, "decode")
)


# --- rows in torch's DataLoader ---------------------------------------------------------------------------------------
def _simplejpeg(data: Any) -> Any:
    import simplejpeg

    return simplejpeg.decode_jpeg(data, "RGB")


def _pillow(data: Any) -> Any:
    from PIL import Image

    return np.array(Image.open(io.BytesIO(data)).convert("RGB"))


def _torchvision(data: Any) -> Any:
    from torchvision.io import ImageReadMode, decode_jpeg

    return decode_jpeg(_tensor(data), ImageReadMode.RGB)


def _tensor(data: Any) -> Any:
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _augmented(data: Any) -> Any:
    """As torchvision's transforms do it."""
    import pillow_transforms as T

    return T.Compose([T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize(MEAN, STD)])(T.read_image(bytes(data)))


def _albumented(data: Any) -> Any:
    import albumentations as A

    change = A.Compose([A.HorizontalFlip(p=0.5), A.Normalize(MEAN, STD)])
    return change(image=_simplejpeg(data))["image"]


class _Samples:
    """A data set for torch's DataLoader, as one writes it: read, decode, label."""

    def __init__(self, source: Source, decode: Callable[[Any], Any]) -> None:
        self.source, self.decode = source, decode

    def __len__(self) -> int:
        return len(self.source.labels)

    def __getitem__(self, index: int) -> Any:
        return self.decode(self.source.read(index)), self.source.labels[index]


def _planes(batches: Iterator[Any]) -> Iterator[Any]:
    """Images as [n, 3, height, width]; no pixel moves."""
    for pixels, labels in batches:
        yield (pixels if pixels.shape[1] == 3 else pixels.permute(0, 3, 1, 2)), labels


@contextmanager
def _decoded(job: Job, source: Callable[[Job], Any], decode: Callable[[Any], Any]) -> Iterator[Iterator[Any]]:
    with source(job) as opened:
        yield _planes(systems.data_loader(_Samples(opened, decode), job.batch, job.workers))


@contextmanager
def _stochastic(job: Job) -> Iterator[Source]:
    """stocaching, with half of the pixels."""
    import torch
    from stocaching import SharedCache

    with job.source("files") as source:
        count = len(source.labels)
        room = count // 2 * 3 * 224 * 224 / (1 << 30)
        kept = SharedCache(size_limit_gib=room, dataset_len=count, data_dims=(224, 224, 3), dtype=torch.uint8)

        def read(index: int) -> Any:
            pixels = kept.get_slot(index)
            if pixels is None:
                pixels = torch.from_numpy(_simplejpeg(source.read(index)))
                kept.set_slot(index, pixels, allow_overwrite=True)
            return pixels

        for index in range(count):
            read(index)
        yield Source(read, source.labels)


def _kept(data: Any) -> Any:
    from readers.decode import decode_image

    return np.array(decode_image(data))


_HALF_OF_THE_PIXELS = _of(lambda job: cached(job, 0.5, "decoded:224"))
for _name, _source, _decode, _imports, _options in (
    (FILES, "files", _simplejpeg, "simplejpeg", {"smoke": True, "note": "by simplejpeg, as all that name no other"}),
    (f"{FILES}, Pillow", "files", _pillow, "PIL.Image", {}),
    (f"{FILES}, torchvision", "files", _torchvision, "torchvision.io", {"note": "decode_jpeg on the CPU"}),
    (f"{FILES}, cold", "files", _simplejpeg, "simplejpeg", {"cold": True, "note": "the rest of one epoch"}),
    (SHARED, "files in /dev/shm", _simplejpeg, "simplejpeg", {}),
    (ARRAY, "byte array", _simplejpeg, "simplejpeg", {"note": "in memory that the workers share"}),
    ("ours: DataLoader, byte cache", "byte cache", _simplejpeg, "simplejpeg", {}),
    ("ours: DataLoader, half in the byte cache, cold", "half in the byte cache", _simplejpeg, "", {"cold": True}),
    ("stocaching: half of the pixels", _stochastic, lambda pixels: pixels, "stocaching", {"note": "kept decoded"}),
    ("ours: DataLoader, half of the pixels", _HALF_OF_THE_PIXELS, _kept, "", {"note": "kept decoded"}),
    ("augmented: Pillow", "files", _augmented, "PIL.Image", {"floats": True}),
    ("augmented: albumentations", "files", _albumented, "albumentations", {"floats": True}),
):
    _opened: Any = SOURCES[_source] if isinstance(_source, str) else _source
    contender(_name, imports=f"torch.utils.data {_imports}", kind="batches", **_options)(
        lambda job, opened=_opened, decode=_decode: _decoded(job, opened, decode)
    )


@contextmanager
def _decoded_on_gpu(job: Job, source: str) -> Iterator[Iterator[Any]]:
    """Read by the workers; decode_jpeg of torchvision, a list at a time."""
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
        samples = _Samples(opened, _tensor)
        yield decode(systems.data_loader(samples, job.batch, job.workers, collate_fn=pairs))


for _source in ("files", "byte array", "files in /dev/shm"):
    contender(f"GPU: {_source}", kind="batches", smoke=True)(lambda job, source=_source: _decoded_on_gpu(job, source))


# --- rows in our loader, and in JAX -----------------------------------------------------------------------------------
@contextmanager
def _loaded(job: Job, opened: Callable[[Job], Any], **options: Any) -> Iterator[Iterator[Any]]:
    systems.need_gpu(options.get("device", "cpu"))
    with opened(job) as reader:
        yield systems.image_loader(reader, job.batch, options.pop("augment", ()), job.workers, **options)


def _mirrored() -> list[Any]:
    from readers.augment import Normalize, RandomHorizontalFlip

    return [RandomHorizontalFlip(), Normalize(MEAN, STD)]


for _name, _opened, _more, _options in (
    ("ours: ImageLoader, files", folder, {}, {}),
    ("ours: ImageLoader, packed set", packed, {}, {"smoke": True}),
    ("ours: ImageLoader, packed set, cold", packed, {}, {"cold": True}),
    ("ours: ImageLoader, byte cache", cached, {}, {"smoke": True}),
    ("ours: ImageLoader, all pixels kept", lambda job: cached(job, keep="decoded:224"), {},
     {"note": "nine times the bytes in memory"}),
    ("ours: augmented, ImageLoader", folder, {"augment": _mirrored()}, {"floats": True}),
    ("ours: GPU, ImageLoader, files", folder, {"device": "cuda"}, {"smoke": True}),
    ("ours: GPU, ImageLoader, byte cache", cached, {"device": "cuda"}, {"smoke": True}),
):  # fmt: skip
    _needed = "" if "GPU" in _name else systems.LOADER
    contender(_name, imports=_needed, kind="batches", **_options)(
        lambda job, opened=_opened, more=_more: _loaded(job, opened, **more)
    )


def _rate(job: Job, count: int, call: Callable[[int], Any]) -> dict[str, Any]:
    """call: makes or uses `count` images; the first call compiles."""
    import jax

    jax.block_until_ready(call(0))
    cpu, started, calls = cpu_seconds_of_tree(), time.perf_counter(), 0
    while not calls or time.perf_counter() - started < job.seconds:
        calls += 1
        jax.block_until_ready(call(calls))
    seconds, cpu, done = time.perf_counter() - started, cpu_seconds_of_tree() - cpu, calls * count
    return {"images_s": done / seconds, "cpu_us": 1e6 * cpu / done, "jax": jax.default_backend()}


@contender(MADE, imports="jax", kind="own", smoke=True)
def jax_alone(job: Job) -> dict[str, Any]:
    import jax

    made = example("generate_jax")
    make, task = jax.jit(made.make_batch, static_argnums=(0, 2)), made.Task(batch=job.batch)
    return _rate(job, job.batch, lambda call: make(task, made.new_key(call), job.batch))


@contender(TRAINED, imports="jax", kind="own", note="`examples/generate_jax.py`, two steps a call")
def jax_trained(job: Job) -> dict[str, Any]:
    made = example("generate_jax")
    task = made.Task(batch=job.batch)
    state = made.begin(task, 0)
    return _rate(job, 2 * job.batch, lambda call: made.train(task, state, made.new_key(call), 2))


@contender("ours: packed set, trained on in JAX", imports=f"{systems.LOADER} jax", kind="own", note="the same step")
def jax_loaded(job: Job) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    made = example("generate_jax")
    task = made.Task(batch=job.batch)
    step, state = jax.jit(made.step, static_argnums=0), made.begin(task, 0)
    with _loaded(job, packed, layout="NHWC") as batches:

        def call(number: int) -> Any:
            pixels, labels = next(batches)
            return step(task, state, jnp.from_dlpack(pixels), jnp.from_dlpack(labels.int()) == 0)

        return _rate(job, job.batch, call)


# --- how well orders mix ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _View:
    """What one node, or without a number all of them, see of a node-local order: in epochs of one kind alone."""

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


def _mixing(job: Job, nodes: int) -> dict[str, float]:
    count = len(list_tree(job.tree))
    if nodes == 1:
        return {"all_nodes": shuffle_quality(Shuffled(count)), "one_node": 1.0}
    order = NodeLocal(count, nodes)
    views: list[Any] = [_View(order, False), _View(order, False, 0), _View(order, True, 0)]
    return dict(zip(("all_nodes", "one_node", "exchange"), map(shuffle_quality, views), strict=True))


for _nodes in (1, 2, 8):
    _name = f"order: NodeLocal, {_nodes} nodes" if _nodes > 1 else "order: Shuffled"
    contender(_name, kind="own")(lambda job, nodes=_nodes: _mixing(job, nodes))


# --- what is measured -------------------------------------------------------------------------------------------------
def job_of(arguments: argparse.Namespace, folder: str = "full") -> Job:
    return Job(arguments.work / folder, arguments.batch, arguments.workers, arguments.seconds)


def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """Images/s of a row, and the CPU time of all its processes for an image."""
    job, kind, cold = job_of(arguments), chosen.options["kind"], chosen.options.get("cold", False)
    if kind == "own":
        return dict(chosen.function(job))
    prime(1 << 28)
    with chosen.function(job) as opened:
        return (_read if kind == "read" else _consume)(opened, job, cold)


def _read(source: Source, job: Job, cold: bool) -> dict[str, Any]:
    """One image after the other, in random order, copied into a buffer that is there."""
    order = list(range(len(source.labels)))
    random.Random(1).shuffle(order)
    target = memoryview(bytearray(1 << 22))
    figures: dict[str, Any] = {"cache": chill([job.tree, job.packed])} if cold else {}
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
        figures["cache"] = chill([job.tree, job.packed])
        for _ in range(_AHEAD_BATCHES):
            _look(next(batches))
        limit = len(list_tree(job.tree)) - (_WARM_BATCHES + 2 * _AHEAD_BATCHES) * job.batch
    cpu, started, count, seconds = cpu_seconds_of_tree(), time.perf_counter(), 0, 0.0
    while not count or (seconds < job.seconds and count < limit):
        count += _look(next(batches))
        seconds = time.perf_counter() - started
    return {"images_s": count / seconds, "cpu_us": 1e6 * (cpu_seconds_of_tree() - cpu) / count, **figures}


def _look(batch: Any) -> int:
    pixels = batch[0]
    if tuple(pixels.shape[1:]) != (3, 224, 224):
        raise ValueError(f"a batch of {tuple(pixels.shape)}, expected [n, 3, 224, 224]")
    float(pixels[:, :, ::32, ::32].sum())
    return len(pixels)


def before(chosen: Contender, arguments: argparse.Namespace) -> None:
    """For rows that are not cold: the files are in the page cache, also after a row that was."""
    if chosen.options["kind"] != "own" and not chosen.options.get("cold"):
        warm([job_of(arguments).tree, job_of(arguments).packed])


# --- what must hold ---------------------------------------------------------------------------------------------------
def check(arguments: argparse.Namespace) -> Iterator[Check]:
    """The same bytes from every source, the same pixels and labels from every row, every image once."""
    if arguments.smoke and not arguments.only:
        for name in [name for name, row in CONTENDERS.items() if not row.options.get("smoke")]:
            del CONTENDERS[name]
    stack = ExitStack()
    atexit.register(stack.close)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the copy in /dev/shm is removed then, too
    arguments.count += -arguments.count % arguments.batch
    job = job_of(arguments)
    prepare(job, arguments.count, arguments.images, stack)
    small = job if arguments.count <= _CHECKED else job_of(arguments, "small")
    if small is not job:
        prepare(small, _CHECKED + -_CHECKED % small.batch, arguments.images, stack)
    expected: list[Any] = []
    for name in SOURCES:
        with job.source(name) as source:
            items = sorted((zlib.crc32(source.read(i)), label) for i, label in enumerate(source.labels))
        if not expected:  # were they the same, the next checks would not see which image is where
            expected, different = items, len({checksum for checksum, _ in items})
            size = folder_bytes(job.tree) / 1e3 / len(items)
            text = f"{len(items):,} of {size:.1f} kB, {different:,} of them different"
            yield Check("JPEGs of 224 x 224 pixels", text, different == len(items) or arguments.images is not None)
        yield _compared(f"bytes and labels, {name}", items, expected)
    yield from _same_pixels(small)
    yield _same_drawing()


def _same_pixels(job: Job) -> Iterator[Check]:
    """An epoch of every row that can run here. Of a mirrored image the smaller of the two checksums counts."""
    with job.source("files") as source:
        decoded = [(_simplejpeg(source.read(i)), label) for i, label in enumerate(source.labels)]
    expected = {f: sorted((_checksum(pixels, f), label) for pixels, label in decoded) for f in (False, True)}
    try:
        pixels = sorted((decoded, label) for _, decoded, label in ranks(job, "check"))
        yield _compared("pixels and labels, MPI window", pixels, expected[False])
    except NotHere as reason:
        yield Check("pixels and labels, MPI window", f"not compared: {reason}", True)
    for name, row in CONTENDERS.items():
        floats = row.options.get("floats", False)
        if row.options["kind"] == "batches" and systems.installed(row.imports):
            try:
                with row.function(job) as batches:
                    items = _epoch(batches, len(decoded), floats)
            except NotHere:
                continue  # the row says why
            yield _compared(f"pixels and labels, {name}", items, expected[floats])


def _epoch(batches: Any, count: int, floats: bool) -> list[tuple[int, int]]:
    items: list[tuple[int, int]] = []
    for some, labels in batches:
        for image, label in zip(some, labels, strict=True):
            pixels = np.asarray(image.cpu() if hasattr(image, "cpu") else image).transpose(1, 2, 0)
            if floats:
                pixels = (255 * (pixels * np.array(STD) + np.array(MEAN))).round().astype(np.uint8)
            items.append((_checksum(pixels, floats), int(label)))
        if len(items) >= count:
            break
    batches.close()
    return sorted(items)


def _checksum(pixels: Any, mirrored: bool) -> int:
    return min(zlib.crc32(np.ascontiguousarray(one)) for one in ((pixels, pixels[:, ::-1]) if mirrored else (pixels,)))


def _compared(what: str, items: list[Any], expected: list[Any]) -> Check:
    right = (Counter(items) & Counter(expected)).total()
    return Check(what, f"{right:,} of {len(expected):,} the same", items == expected)


def _same_drawing() -> Check:
    """The device draws what the files show."""
    what = "images drawn by NumPy and by JAX from the same bytes"
    if not systems.installed(["jax.numpy"]):
        return Check(what, "not compared: jax is not installed", True)
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
    return Check(what, f"at most {most} of 255 apart", most <= 1 and bool((letters == read).all()))


# --- the page ---------------------------------------------------------------------------------------------------------
def claims(results: Results, arguments: argparse.Namespace) -> Iterator[Check]:
    """What the document's figures say, as far as both sides ran here."""
    on_device = any(run.get("jax") not in (None, "cpu") for run in results.get(MADE, ()))
    for what, row, other, least in (
        ("decoded images come faster from a byte cache than from files", ARRAY, FILES, 1),
        ("and faster from files in /dev/shm than from files", SHARED, FILES, 1),
        ("bytes come many times faster from a cache than decoded images do", "read: byte array", ARRAY, 5),
        ("a GPU decodes images from files several times faster than a CPU", "GPU: files", FILES, 2),
        ("a cache gains more where a GPU decodes", "GPU: byte array", "GPU: files", 1.1),
        ("images are made on the device faster than they are read and decoded", MADE, FILES, 1),
        ("training on images made on the device is faster than reading and decoding", TRAINED, FILES, 1),
    ):
        times = ratio(results, row, other, "images_s")
        if times is not None and (on_device or not row.startswith("JAX")):
            yield Check(what, f"{times:.2f} times; there {DOCUMENT[row] / DOCUMENT[other]:.2f}", times > least)


def sections(arguments: argparse.Namespace) -> Iterator[Section]:
    columns = Column("images_s", "images/s"), Column("cpu_us", "CPU µs an image")
    for name, title, begins, text in (
        ("read", "Reading, without decoding", ("read: ", "ours: read, "),
         "One process reads one image after the other in random order. The two ranks of the MPI window read at once."),
        ("decoded", "Read and decoded on the CPU",
         ("DataLoader: ", "stocaching: ", "ours: DataLoader, ", "ours: decoded, ", "ours: ImageLoader, "),
         "Batches of uint8 images. A DataLoader takes them from as many worker processes as ImageLoader has threads."),
        ("augmented", "Mirrored at random and normalised, as float32", ("augmented: ", "ours: augmented, "),
         "Files, decoded with simplejpeg; with Pillow in the row of its name."),
        ("gpu", "Decoded on a GPU", ("GPU: ", "ours: GPU, "), "Batches on the GPU."),
        ("jax", "Made on the device", ("JAX: ", "ours: packed set, trained"),
         "JAX draws the images from random bytes, and trains a small network on them in one compiled program; the last "
         "row trains it on a packed set, lent to JAX by DLPack. On a CPU all of it shares the same cores: these rows "
         "say what it costs to do without files there, and nothing of a GPU."),
    ):  # fmt: skip
        charted = int(name in ("read", "decoded", "jax"))
        yield Section(name, title, columns, begins, base=FILES, there=DOCUMENT, text=text, charted=charted)
    mixing = ("all_nodes", "all nodes"), ("one_node", "one node"), ("exchange", "one node, eighth epoch")
    text = (
        "`readers.order.NodeLocal` keeps each node to its own part of the samples, and exchanges all parts in every "
        "eighth epoch. How well a batch of 256 mixes the set, next to a global shuffle (1), by `readers.order.quality`."
    )
    columns = tuple(Column(key, heading, "{:.2f}") for key, heading in mixing)
    yield Section("order", "Shuffling on each node, and over all nodes sometimes", columns, text=text, charted=0)


EXPERIMENT = Experiment(
    name="s003",
    title="Files, caches, decoders, and data made on the device",
    document="“Working with Data on GPUs: I/O, Data Transfer & Generation”, Florian Kaspar, 9 October 2025",
    about=(
        "The talk reads 64,000 generated JPEGs of 224 x 224 pixels, about 1 GB, from a file system, /dev/shm and a "
        "cache of their bytes, decodes them on the CPU or the GPU, and finally makes them on the GPU. Here fewer such "
        "images of random text take every one of these ways that the machine has, and ours."
    ),
    measure=measure,
    check=check,
    before=before,
    sections=sections,
    claims=claims,
    limits=(
        "The talk measured on nodes of a computing centre with a shared file system and GPUs; here the files are on a "
        "local disk, and only ratios mean anything. Its rows decode with torchvision, in one process as it seems; all "
        "rows here decode with libjpeg-turbo, and with all CPUs. Rows that are not cold find the files in memory, as "
        "every epoch but the first does where the set fits into it; on a shared file system it often does not. ROOT, "
        "nvCOMP and parallel HDF5, which it names without figures, have a paragraph in [README.md](README.md).",
    ),
    sizes={
        "count": (256, 8192, "images"),
        "seconds": (0.2, 1.5, "seconds of the clock of a row"),
        "batch": (64, 64, "images in a batch"),
    },
)

if __name__ == "__main__":
    main(EXPERIMENT, parser(__doc__))
