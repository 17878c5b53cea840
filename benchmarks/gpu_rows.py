"""The rows of `gpu.py`. A row takes a `Task`, and returns what its loader is: a function that makes the batches of an
epoch.

Batches are (images, …) on the device: normalised floats in float16, 224 x 224, a random box, flipped half of the time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from harness import NotHere, contender, slug
from machine import list_tree
from pipeline_sets import HDF5, TAR

from readers import Decode

__all__ = ["CODEC", "LADDER", "SIZE", "V2", "MakeBatches", "Task", "index_of"]

SIZE = 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CODEC, V2 = "ours: torchcodec", "torchvision decode + v2 transforms"
SHARES = (0.25, "auto")  # of what the GPU can decode, by the CPU; 0 is the row before
MakeBatches: TypeAlias = Callable[[], Iterable[Any]]


@dataclass(frozen=True)
class Task:
    """tree: class folders of JPEG files. work: where sets are. threads: for reading and for decoding on the CPU."""

    tree: Path
    work: Path
    batch: int
    threads: int
    device: str

    def set(self, name: str) -> Path:
        """A set made by `pipeline_sets`."""
        folder = self.work / slug(name)
        if not folder.is_dir():
            raise NotHere(f"no {folder}; making it failed")
        return folder

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

    return readers.open(task.set(HDF5))


@contender(CODEC, imports="torch", data=[HDF5], note="readers.loader, one fused kernel")
def torchcodec(task: Task) -> MakeBatches:
    return _ours(task, _packed(task), "torchcodec")


def _shared(cpu_share: Any) -> None:
    @contender(f"{CODEC} with cpu_share={cpu_share}", imports="torch", data=[HDF5], note="CPU and GPU decode at once")
    def shared(task: Task) -> MakeBatches:
        return _ours(task, _packed(task), "torchcodec", cpu_share)


for _share in SHARES:
    _shared(_share)


@contender("ours: torchvision", imports="torch", data=[HDF5], note="readers.loader, one fused kernel")
def torchvision(task: Task) -> MakeBatches:
    return _ours(task, _packed(task), "torchvision")


@contender("ours: decoded on the CPU", imports="torch", data=[HDF5], note="uint8 of 224 x 224 crosses the bus")
def on_the_cpu(task: Task) -> MakeBatches:
    return _ours(task, _packed(task), "cpu")


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


# --- the ladder: where the bytes come from, and who decodes them ----------------------------------------------------
def _ladder(name: str, keep: str, decoder: str) -> None:
    needed = "torch triton" if keep == "coefficients" else "torch"

    @contender(name, imports=needed, data=[HDF5 if keep else "tree"], apart=True)
    def rung(task: Task) -> MakeBatches:
        import readers

        if decoder == "auto":
            task.cuda()
        reader: Any = readers.open_folder(task.tree)
        if keep:
            reader = readers.cached(_packed(task), keep=keep, capacity="auto")
            reader.prefill(threads=task.threads)
        return _ours(task, reader, decoder)


LADDER = {
    "ladder: files, CPU decode": ("", "cpu"),
    "ladder: files, GPU decode": ("", "auto"),
    "ladder: cache, CPU decode": ("encoded", "cpu"),
    "ladder: cache, GPU decode": ("encoded", "auto"),
    "ladder: coefficients, CPU decode": ("coefficients", "cpu"),
    "ladder: coefficients, GPU decode": ("coefficients", "auto"),
}
for _name, _rung in LADDER.items():
    _ladder(_name, *_rung)


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
def _dali(task: Task, read: Callable[[Any], Any], *, fused: bool = True) -> MakeBatches:
    """fused: decode the random boxes only, as NVIDIA's example for ImageNet does. nvImageCodec 0.9.0 crashed at that on
    some GPUs (nvImageCodec#55), so there is a row without it."""
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
        for (batch,) in iterator:
            yield batch["images"], batch["labels"]

    built = make()
    return batches


def _dali_files(name: str, *, fused: bool) -> None:
    @contender(name, imports="torch nvidia.dali nvidia.dali.plugin.pytorch", data=["tree"])
    def dali_files(task: Task) -> MakeBatches:
        options = {"file_root": str(task.tree), "random_shuffle": True, "name": "reader", "pad_last_batch": True}
        return _dali(task, lambda fn: fn.readers.file(**options), fused=fused)


_dali_files("DALI GPU, file reader", fused=True)
_dali_files("DALI GPU, file reader, whole images decoded", fused=False)


def index_of(shard: Path) -> Path:
    """DALI's index of a tar shard (version 1.2), next to it: a line per sample, `ext offset size name` per file."""
    import tarfile

    place = shard.with_suffix(".idx")
    if not place.exists():
        lines: dict[str, list[str]] = {}
        with tarfile.open(shard) as archive:
            for member in archive:
                stem, _, extension = member.name.partition(".")
                lines.setdefault(stem, []).append(f"{extension} {member.offset_data} {member.size} {member.name}")
        place.write_text("\n".join([f"v1.2 {len(lines)}", *(" ".join(parts) for parts in lines.values())]) + "\n")
    return place


@contender("DALI GPU, webdataset reader", imports="torch nvidia.dali nvidia.dali.plugin.pytorch", data=[TAR])
def dali_webdataset(task: Task) -> MakeBatches:
    task.cuda()
    shards = sorted(task.set(TAR).glob("*.tar"))
    indexes = [str(index_of(shard)) for shard in shards]

    def read(fn: Any) -> Any:
        return fn.readers.webdataset(
            paths=[str(shard) for shard in shards],
            index_paths=indexes,
            ext=["jpg", "cls"],
            random_shuffle=True,
            name="reader",
            pad_last_batch=True,
        )

    return _dali(task, read)
