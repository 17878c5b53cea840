"""GPU: from a set to normalised batches on the device, our loader and peers, and the fused kernel against its bound.

    python benchmarks/gpu.py --tree TREE --work DIR [--batch 256] [--n 25600] [--threads N] [--trace FILE] …

TREE holds class folders of JPEG files; sets are made from it below DIR, once and not timed. Batches are float16: a
random box resized to 224 x 224, flipped, normalised. The ladder rows differ in the source of the bytes (files, or our
cache in shared memory) and in the decoder; rows with a `cpu_share` divide decoding between CPU and GPU. --trace writes
a profile of our first loader row for chrome://tracing, which shows how decode, kernels and the consumer's work overlap.
Without a GPU every row says why it did not run; `--device cpu` runs our rows.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pipeline
from harness import Benchmark, Contender, NotHere, contender, main, output_of
from machine import Clock, list_tree
from pipeline_sets import HDF5, TAR
from report import PEERS, Claim, Column

# A row takes a `Task` and returns a function that makes the batches of an epoch. Batches are (images, …) on the device:
# normalised float16, a random box resized to 224 x 224, half of them flipped.

SIZE = 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CODEC, V2 = "ours: torchcodec", "torchvision decode + v2 transforms"
SHARES = (0.25, "auto")  # the CPU's share of the images that the GPU can decode; the row before has share 0
MakeBatches: TypeAlias = Callable[[], Iterable[Any]]


@dataclass(frozen=True)
class Task:
    """tree: class folders of JPEG files. work: folder of the sets. threads: for reading and for decoding on the CPU."""

    tree: Path
    work: Path
    batch: int
    threads: int
    device: str

    def cuda(self) -> None:
        import torch

        if self.device != "cuda":
            raise NotHere("runs on a GPU only")
        if not torch.cuda.is_available():
            raise NotHere("no CUDA device")


# --- ours -----------------------------------------------------------------------------------------------------------
def _ours(task: Task, reader: Any, decoder: Any, cpu_share: Any = 0) -> MakeBatches:
    import torch

    from cache.errors import MissingExtraError
    from readers import Decode
    from readers.augment import Normalize, RandomHorizontalFlip, RandomResizedCrop
    from readers.loader import ImageLoader

    if task.device == "cuda":
        task.cuda()
    try:
        loader = ImageLoader(
            reader,
            task.batch,
            augment=[RandomResizedCrop(SIZE), RandomHorizontalFlip(), Normalize(MEAN, STD)],
            decode=Decode(dtype=torch.float16, decoder=decoder, cpu_share=cpu_share),
            threads=task.threads,
            device=task.device,
        )
    except MissingExtraError as error:
        raise NotHere(str(error)) from error
    return lambda: loader


def _packed(task: Task) -> Any:
    import readers

    return readers.open(output_of(task.work, HDF5))


def ours(task: Task, decoder: str, cpu_share: Any = 0) -> MakeBatches:
    return _ours(task, _packed(task), decoder, cpu_share)


_KERNEL_NOTE = "readers.loader, one fused kernel"
for _name, _note, _how in (
    (CODEC, _KERNEL_NOTE, {"decoder": "torchcodec"}),
    *((f"{CODEC} with cpu_share={share}", "CPU and GPU decode at once", {"decoder": "torchcodec", "cpu_share": share})
      for share in SHARES),
    ("ours: torchvision", _KERNEL_NOTE, {"decoder": "torchvision"}),
    ("ours: decoded on the CPU", "uint8 of 224 x 224 crosses the bus", {"decoder": "cpu"}),
):  # fmt: skip
    contender(_name, imports="torch", data=[HDF5], note=_note)(functools.partial(ours, **_how))


@contender("ours: DALI, external source", imports="torch nvidia.dali", data=[HDF5], note="readers.dali over our reader")
def dali_external(task: Task) -> MakeBatches:
    task.cuda()
    try:
        from readers.dali import DaliLoader, PipelineOptions, classification
    except ImportError as error:
        raise NotHere(f"readers.dali cannot be imported ({error})") from error
    options = PipelineOptions(device="cuda", dtype="float16", threads=task.threads, prefetch=3)
    loader = DaliLoader(_packed(task), task.batch, augment=classification(SIZE), options=options)
    return lambda: loader


def rung(task: Task, keep: str, decoder: str) -> MakeBatches:
    """A row of the ladder. keep: the form of our cache, or "" for files. decoder: of our loader."""
    import readers

    if decoder == "auto":
        task.cuda()
    reader: Any = readers.open_folder(task.tree)
    if keep:
        reader = readers.cached(_packed(task), keep=keep, capacity="auto")
        reader.prefill(threads=task.threads)
    return _ours(task, reader, decoder)


for _from, _keep in {"files": "", "cache": "encoded", "coefficients": "coefficients"}.items():
    for _where, _decoder in {"CPU": "cpu", "GPU": "auto"}.items():
        contender(
            f"ladder: {_from}, {_where} decode", imports="torch triton" if _keep == "coefficients" else "torch",
            data=[HDF5 if _keep else "tree"], apart=True,
        )(functools.partial(rung, keep=_keep, decoder=_decoder))  # fmt: skip


# --- torchvision ----------------------------------------------------------------------------------------------------
@contender(V2, imports="torch torchvision.io torchvision.transforms.v2", data=["tree"], note="decode_jpeg on a list")
def torchvision_v2(task: Task) -> MakeBatches:
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg
    from torchvision.transforms import v2

    task.cuda()
    paths = [path for path, _ in list_tree(task.tree)]
    crop = v2.Compose([v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip()])
    finish = v2.Compose([v2.ToDtype(torch.float16, scale=True), v2.Normalize(MEAN, STD)])

    def read(path: str) -> Any:
        return torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)

    def batches() -> Iterator[Any]:
        random.shuffle(paths)
        with ThreadPoolExecutor(task.threads) as pool:
            for start in range(0, len(paths) - task.batch + 1, task.batch):
                encoded = list(pool.map(read, paths[start : start + task.batch]))
                images = decode_jpeg(encoded, mode=ImageReadMode.RGB, device="cuda")
                yield (finish(torch.stack([crop(image) for image in images])),)

    return batches


# --- DALI -----------------------------------------------------------------------------------------------------------
_PLUGIN = "torch nvidia.dali nvidia.dali.plugin.pytorch"


def _dali(task: Task, read: Callable[[Any], Any], *, fused: bool = True) -> MakeBatches:
    """fused: decode the random boxes only, as NVIDIA's example for ImageNet does. nvImageCodec 0.9.0 crashes there on
    some GPUs (nvImageCodec#55), so one row decodes whole images."""
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    task.cuda()

    @pipeline_def(batch_size=task.batch, num_threads=task.threads, device_id=0, prefetch_queue_depth=3)
    def make() -> Any:
        encoded, label = read(fn)
        if fused:
            images = fn.decoders.image_random_crop(encoded, device="mixed", output_type=types.RGB)
            images = fn.resize(images, size=[SIZE, SIZE], device="gpu")
        else:
            images = fn.decoders.image(encoded, device="mixed", output_type=types.RGB)
            images = fn.random_resized_crop(images, size=SIZE, device="gpu")
        images = fn.crop_mirror_normalize(
            images,
            dtype=types.FLOAT16,
            output_layout="CHW",
            mean=[255 * value for value in MEAN],
            std=[255 * value for value in STD],
            mirror=fn.random.coin_flip(),
            device="gpu",
        )
        return images, label

    def batches() -> Iterator[Any]:
        iterator = DALIGenericIterator(built, ["images", "labels"], reader_name="reader", auto_reset=True)
        return ((batch["images"], batch["labels"]) for (batch,) in iterator)

    built = make()
    return batches


_READER = {"random_shuffle": True, "name": "reader", "pad_last_batch": True}


def dali_files(task: Task, fused: bool) -> MakeBatches:
    return _dali(task, lambda fn: fn.readers.file(file_root=str(task.tree), **_READER), fused=fused)


for _name, _fused in {"file reader": True, "file reader, whole images decoded": False}.items():
    contender(f"DALI GPU, {_name}", imports=_PLUGIN, data=["tree"])(functools.partial(dali_files, fused=_fused))


@contender("DALI GPU, webdataset reader", imports=_PLUGIN, data=[TAR])
def dali_webdataset(task: Task) -> MakeBatches:
    import packer

    task.cuda()
    folder = output_of(task.work, TAR)
    indexes = packer.export_index(folder, "dali").files
    paths = {"paths": sorted(map(str, folder.glob("*.tar"))), "index_paths": list(map(str, indexes))}
    return _dali(task, lambda fn: fn.readers.webdataset(**paths, ext=["jpg", "cls"], **_READER))


# --- without a loader: kernels alone, and the memory bandwidth that bounds them ---------------------------------------
# GB/s count the bytes that must be moved: for the fused kernel the pixels of the boxes (of real images) and the batch,
# each once; for coefficients those of whole images, and the pixels of the boxes.
KERNEL, COPY = "ours: kernel alone", "limit: copy within the GPU"
COEFFICIENTS = "ours: coefficients to boxes alone"
_COPIED_BYTES = 1 << 30
_LAUNCHES = 50
# (tile, block, warps) as `readers.augment.fused.Tiling`; the first is the default.
TILINGS = (
    (16, 32, 16, 32, 4), (16, 32, 16, 64, 4), (16, 16, 16, 32, 4), (32, 32, 16, 32, 4), (32, 32, 16, 32, 8),
    (32, 32, 32, 32, 4), (32, 64, 16, 64, 8), (16, 64, 16, 64, 4),
)  # fmt: skip


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds per call, queued many times, by the GPU's clock."""
    import torch

    for _ in range(3):
        work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(_LAUNCHES):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1000 / _LAUNCHES


@contender(COPY, imports="torch", figures=True, data=[], note="1 GiB read and written")
def copy(task: Task) -> dict[str, Any]:
    import torch

    task.cuda()
    source = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return {"gb_s": 2 * _COPIED_BYTES / seconds_of(lambda: target.copy_(source)) / 1e9}


@contender(
    KERNEL, imports="torch triton", figures=True, data=["tree"], note="boxes of one batch, float16, channels last"
)
def kernel(task: Task) -> dict[str, Any]:
    import numpy as np
    import torch

    from readers.augment import Normalize, RandomHorizontalFlip, RandomResizedCrop, Recipe
    from readers.augment.fused import BatchRenderer
    from readers.decode import decode_image
    from readers.decode.device import Picture

    task.cuda()
    device = torch.device("cuda", 0)
    pictures = []
    for path, _ in list_tree(task.tree)[: task.batch]:
        pixels = np.ascontiguousarray(decode_image(Path(path).read_bytes()).transpose(2, 0, 1))
        pictures.append(Picture(torch.from_numpy(pixels).to(device)))
    sizes = np.array([picture.size for picture in pictures])
    recipe = Recipe([RandomResizedCrop(SIZE), RandomHorizontalFlip(), Normalize(MEAN, STD)])
    jobs = recipe.plan(0, 0, np.arange(len(pictures)), sizes[:, 0], sizes[:, 1]).jobs()
    # The least number of bytes read and written: the pixels of the boxes, and the batch.
    moved = sum(3 * job[0][2] * job[0][3] for job in jobs) + len(jobs) * 3 * SIZE * SIZE * 2
    figures: dict[str, Any] = {}
    for tiling in TILINGS:
        renderer = BatchRenderer(
            device, dtype=torch.float16, normalize=recipe.normalize, engine="triton", tiling=tiling
        )
        renderer.render(pictures, jobs, (SIZE, SIZE))
        out = torch.empty((len(jobs), 3, SIZE, SIZE), dtype=torch.float16, device=device)
        out = out.contiguous(memory_format=torch.channels_last)
        launch = renderer.prepared(pictures, jobs, out)  # the upload of the table is not timed
        seconds = seconds_of(launch)
        figures["gb_s" if tiling == TILINGS[0] else f"gb_s {tiling}"] = moved / seconds / 1e9
        if tiling == TILINGS[0]:
            figures["images_s"] = len(jobs) / seconds
    return figures


@contender(
    COEFFICIENTS,
    imports="torch triton",
    figures=True,
    data=["tree"],
    note="boxes of one batch, with their tables and the wait for the device, without the upload",
)
def coefficients(task: Task) -> dict[str, Any]:
    import numpy as np
    import torch

    from readers.augment import RandomResizedCrop, Recipe
    from readers.coefficients import encode
    from readers.coefficients.device.decoder import CoefficientDecoder, vetted_shape
    from readers.decode import Region

    task.cuda()
    images = []
    for path, _ in list_tree(task.tree):
        kept = encode(Path(path).read_bytes())
        if kept is not None:
            images.append(kept)
        if len(images) == task.batch:
            break
    shapes = [vetted_shape(image) for image in images]
    sizes = np.array([shape.header.upright_size for shape in shapes])
    jobs = Recipe([RandomResizedCrop(SIZE)]).plan(0, 0, np.arange(len(images)), sizes[:, 0], sizes[:, 1]).jobs()
    regions = [Region(*job[0]) for job in jobs]
    decoder = CoefficientDecoder(torch.device("cuda", 0))
    uploaded = decoder.upload(images, shapes)
    pictures = decoder.decode(uploaded, regions)
    moved = uploaded.data.numel() + sum(picture.pixels.numel() for picture in pictures)  # type: ignore[union-attr]
    seconds = seconds_of(lambda: decoder.decode(uploaded, regions))
    copying = seconds_of(lambda: decoder.upload(images, shapes))
    return {
        "images_s": len(images) / seconds,
        "gb_s": moved / seconds / 1e9,
        "images_s uploaded": len(images) / copying,
        "gb_s uploaded": uploaded.data.numel() / copying / 1e9,
    }


_WARM_BATCHES = 8
_TRACED_BATCHES = 10


def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """Images/s in the steady state, as seen by a training job that waits for each batch on its own stream."""
    task = Task(arguments.tree, arguments.work, arguments.batch, arguments.threads, arguments.device)
    if chosen.options.get("figures"):
        figures: dict[str, Any] = chosen.function(task)
        return figures
    before = _device_mb(task)
    make: MakeBatches = chosen.function(task)
    started = time.perf_counter()
    batches = pipeline.endless(make)
    _look_at(next(batches), task)
    first = time.perf_counter() - started
    for _ in range(_WARM_BATCHES):
        _look_at(next(batches), task)
    _wait(task)
    if arguments.trace and chosen.name == CODEC:
        _trace(batches, task, Path(arguments.trace))
    clock, count = Clock(), 0
    while count < arguments.n:
        count += _look_at(next(batches), task)
    _wait(task)
    rate = clock.figures(count)
    cpus = rate["cpu_us"] * rate["images_s"] / 1e6
    return {**rate, "first_s": first, "cpus": cpus, "device_mb": _device_mb(task) - before} | _shares(make)


def _shares(make: MakeBatches) -> dict[str, Any]:
    """For our loaders: the CPU's final share of the images that the device can decode."""
    loader = make()
    share = getattr(loader.stats(), "cpu_share", None) if hasattr(loader, "stats") else None
    return {} if share is None else {"cpu_share": share}


def _look_at(batch: Any, task: Task) -> int:
    """Use every value, on the consumer's stream."""
    images = batch[0]
    expected = (task.batch, 3, SIZE, SIZE)
    if tuple(images.shape) != expected or str(images.dtype) != "torch.float16":
        raise ValueError(f"a batch of {images.dtype} {tuple(images.shape)}, expected torch.float16 {expected}")
    images.sum()
    return len(images)


def _wait(task: Task) -> None:
    if task.device == "cuda":
        import torch

        torch.cuda.synchronize()


def _device_mb(task: Task) -> float:
    """GPU memory in use by all processes: libraries allocate outside torch."""
    if task.device != "cuda":
        return 0.0
    import torch

    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e6


def _trace(batches: Iterator[Any], task: Task, place: Path) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(_TRACED_BATCHES):
            _look_at(next(batches), task)
        _wait(task)
    profiler.export_chrome_trace(str(place))


BENCHMARK = Benchmark(
    title="GPU, batches of float16 on the device",
    columns=(
        Column("images_s", "images/s (min–max)"),
        Column("gb_s", "GB/s"),
        Column("first_s", "first batch s", "{:.2f}"),
        Column("cpu_us", "CPU µs/image"),
        Column("cpus", "CPUs busy", "{:.1f}"),
        Column("cpu_share", "CPU's share", "{:.2f}"),
        Column("device_mb", "GPU MB"),
    ),
    key="images_s",
    limits=(("images_s", PEERS), ("gb_s", COPY)),
    measure=measure,
    before=pipeline.before,
    claims=(
        Claim(CODEC, "images_s", 1.0, "DALI GPU, file reader"),
        Claim(CODEC, "images_s", 1.0, "DALI GPU, webdataset reader"),
        Claim(CODEC, "images_s", 3.0, V2),
        Claim(KERNEL, "gb_s", 0.6, COPY),
    ),
)


if __name__ == "__main__":
    main(
        BENCHMARK,
        __doc__,
        tree="folder of class folders of JPEG files",
        work="folder for the sets",
        batch=(256, "images in a batch"),
        n=(25600, "timed images"),
        threads=(len(os.sched_getaffinity(0)), "threads of each row"),
        device=("cuda", "where batches go", ("cuda", "cpu")),
        trace=(None, "write a profile of our first loader row to this file"),
    )
