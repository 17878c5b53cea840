"""The rows of `s003.py` on the CPU: who reads the images, decodes them, augments them.

kind     what the function of a row gives
read     a source, to be read image by image
batches  an endless iterator of (images, labels), images [n, 3, height, width]
own      the figures themselves

Rows with `cold` begin with an empty page cache.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness import NotHere, contender
from s003_sources import SOURCES, Place, Source, cached

from readers import Decode
from readers.augment import IMAGENET_MEAN as MEAN
from readers.augment import IMAGENET_STD as STD
from readers.augment import Normalize, RandomHorizontalFlip

__all__ = ["Job", "data_loader", "image_loader", "ranks"]

_MANY_EPOCHS = 1000
_RANKS = 2


@dataclass(frozen=True)
class Job:
    """What a row gets. workers: processes of a DataLoader, threads of an ImageLoader. seconds: of the clock."""

    place: Place
    batch: int
    workers: int
    seconds: float

    def source(self, name: str) -> AbstractContextManager[Source]:
        found: AbstractContextManager[Source] = SOURCES[name](self.place)
        return found


# --- reading ------------------------------------------------------------------------------------------------------
def _reads(name: str, source: str, **options: Any) -> None:
    contender(name, kind="read", **options)(lambda job: job.source(source))


_reads("read: files", "files", smoke=True)
_reads("read: files, cold", "files", cold=True)
_reads("read: files in /dev/shm", "files in /dev/shm", smoke=True, note="made by `packer stage --as files`")
_reads("read: byte array", "byte array", smoke=True, note="all bytes end to end, and an array of their ends")
_reads("ours: read, packed set", "packed set", smoke=True)
_reads("ours: read, packed set, cold", "packed set", cold=True)
_reads("ours: read, byte cache", "byte cache", smoke=True, note="`readers.cached` over the files")
_reads("ours: read, half in the byte cache, cold", "half in the byte cache", cold=True, note="the rest from the files")


def ranks(job: Job, mode: str) -> Any:
    """What the first of two ranks prints; see `s003_mpi`. Raises NotHere without MPI."""
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if mpiexec is None:
        raise NotHere("needs MPI: mpiexec is not installed (pip install mpich mpi4py)")
    # An MPI that pip has installed is next to its mpiexec.
    libraries = f"{Path(mpiexec).resolve().parent.parent / 'lib'}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    script = Path(__file__).with_name("s003_mpi.py")
    command = [mpiexec, "-n", str(_RANKS), sys.executable, str(script), str(job.place.packed), mode]
    command += ["--seconds", str(job.seconds), "--batch", str(job.batch)]
    environment = {**os.environ, "LD_LIBRARY_PATH": libraries}
    how: Any = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run(command, env=environment, check=False, **how)
    if "cannot load MPI library" in done.stderr:
        raise NotHere("needs MPI: mpi4py finds no library of it")
    if done.returncode:
        raise RuntimeError(f"mpiexec ended with {done.returncode}: {done.stderr[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


@contender("ours: read, MPI window", imports="mpi4py", kind="own", smoke=True, note="two ranks at once, both counted")
def mpi_read(job: Job) -> dict[str, float]:
    figures: dict[str, float] = ranks(job, "read")
    return figures


# --- decoding on the CPU --------------------------------------------------------------------------------------------
def _simplejpeg(data: Any) -> Any:
    import simplejpeg

    return simplejpeg.decode_jpeg(data, "RGB")


def _pillow(data: Any) -> Any:
    from PIL import Image

    return np.array(Image.open(io.BytesIO(data)).convert("RGB"))


def _torchvision(data: Any) -> Any:
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg

    return decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)


class _Samples:
    """A data set for torch's DataLoader, as one writes it: read, decode, label."""

    def __init__(self, source: Source, decode: Callable[[Any], Any]) -> None:
        self.source, self.decode = source, decode

    def __len__(self) -> int:
        return len(self.source.labels)

    def __getitem__(self, index: int) -> Any:
        return self.decode(self.source.read(index)), self.source.labels[index]


def data_loader(job: Job, source: Source, decode: Callable[[Any], Any], collate: Any = None) -> Iterator[Any]:
    """Batches of all samples in random order, again and again; a generator, whose end ends the workers."""
    from torch.utils.data import DataLoader, RandomSampler

    samples: Any = _Samples(source, decode)
    sampler = RandomSampler(samples, num_samples=len(samples) * _MANY_EPOCHS)
    options = {"sampler": sampler, "num_workers": job.workers, "drop_last": True, "collate_fn": collate}
    yield from DataLoader(samples, job.batch, **options)


def _planes(batches: Iterator[Any]) -> Iterator[Any]:
    """Images as [n, 3, height, width]; no pixel moves."""
    for images, labels in batches:
        yield (images if images.shape[1] == 3 else images.permute(0, 3, 1, 2)), labels


def _decoded(
    name: str, source: str, decode: Callable[[Any], Any] = _simplejpeg, imports: str = "simplejpeg", **options: Any
) -> None:
    @contender(name, imports=f"torch.utils.data {imports}", kind="batches", **options)
    @contextmanager
    def row(job: Job) -> Iterator[Iterator[Any]]:
        with job.source(source) as found:
            yield _planes(data_loader(job, found, decode))


_decoded("DataLoader: files", "files", smoke=True, note="decoded with simplejpeg, as by all DataLoaders not named else")
_decoded("DataLoader: files, Pillow", "files", _pillow, "PIL.Image")
_decoded("DataLoader: files, torchvision", "files", _torchvision, "torchvision.io", note="decode_jpeg on the CPU")
_decoded("DataLoader: files, cold", "files", cold=True, note="the rest of one epoch")
_decoded("DataLoader: files in /dev/shm", "files in /dev/shm")
_decoded("DataLoader: byte array", "byte array", note="in memory that the workers share")
_decoded("ours: DataLoader, byte cache", "byte cache")
_decoded("ours: DataLoader, half in the byte cache, cold", "half in the byte cache", cold=True)


@contender("stocaching: half of the pixels", imports="torch.utils.data stocaching", kind="batches", note="kept decoded")
@contextmanager
def stochastic(job: Job) -> Iterator[Iterator[Any]]:
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
        yield _planes(data_loader(job, Source(read, source.labels), lambda pixels: pixels))


@contender("ours: DataLoader, half of the pixels", imports="torch.utils.data", kind="batches", note="kept decoded")
@contextmanager
def half_of_the_pixels(job: Job) -> Iterator[Iterator[Any]]:
    from readers.decode import decode_image

    with cached(job.place, 0.5, "decoded:224") as reader:
        source = Source(reader.read, reader.labels.tolist())
        yield _planes(data_loader(job, source, lambda data: np.array(decode_image(data))))


@contender("ours: decoded, MPI window", imports="mpi4py", kind="own", note="two ranks, each decodes into batches")
def mpi_decoded(job: Job) -> dict[str, float]:
    figures: dict[str, float] = ranks(job, "decode")
    return figures


# --- ours -----------------------------------------------------------------------------------------------------------
def image_loader(job: Job, reader: Any, **options: Any) -> Iterator[Any]:
    from readers.loader import ImageLoader

    loader = ImageLoader(reader, job.batch, threads=job.workers, **options)
    while True:
        yield from loader


@contender("ours: ImageLoader, files", imports="torch readers.loader", kind="batches")
@contextmanager
def loader_files(job: Job) -> Iterator[Iterator[Any]]:
    import readers

    with readers.open_folder(job.place.tree) as reader:
        yield image_loader(job, reader)


@contender("ours: ImageLoader, packed set", imports="torch readers.loader", kind="batches", smoke=True)
@contextmanager
def loader_packed(job: Job) -> Iterator[Iterator[Any]]:
    import readers

    with readers.open(job.place.packed) as reader:
        yield image_loader(job, reader)


@contender("ours: ImageLoader, packed set, cold", imports="torch readers.loader", kind="batches", cold=True)
@contextmanager
def loader_packed_cold(job: Job) -> Iterator[Iterator[Any]]:
    with loader_packed(job) as batches:
        yield batches


def _cached_loader(name: str, keep: str, **options: Any) -> None:
    @contender(name, imports="torch readers.loader", kind="batches", **options)
    @contextmanager
    def row(job: Job) -> Iterator[Iterator[Any]]:
        with cached(job.place, keep=keep) as reader:
            yield image_loader(job, reader)


_cached_loader("ours: ImageLoader, byte cache", "encoded", smoke=True)
_cached_loader("ours: ImageLoader, all pixels kept", "decoded:224", note="nine times the bytes in memory")


# --- augmenting -----------------------------------------------------------------------------------------------------
@contender("augmented: Pillow", imports="torch.utils.data PIL.Image", kind="batches", floats=True)
@contextmanager
def pillow_augmented(job: Job) -> Iterator[Iterator[Any]]:
    """As torchvision's transforms do it."""
    import pillow_transforms

    transforms = [pillow_transforms.RandomHorizontalFlip(), pillow_transforms.ToTensor()]
    change = pillow_transforms.Compose([*transforms, pillow_transforms.Normalize(MEAN, STD)])
    with job.source("files") as source:
        decode = pillow_transforms.read_image
        yield _planes(data_loader(job, source, lambda data: change(decode(bytes(data)))))


@contender("augmented: albumentations", imports="torch.utils.data albumentations", kind="batches", floats=True)
@contextmanager
def albumented(job: Job) -> Iterator[Iterator[Any]]:
    import albumentations

    change = albumentations.Compose([albumentations.HorizontalFlip(p=0.5), albumentations.Normalize(MEAN, STD)])
    with job.source("files") as source:
        yield _planes(data_loader(job, source, lambda data: change(image=_simplejpeg(data))["image"]))


@contender("augmented: dm-pix", imports="torch readers.loader dm_pix", kind="batches", floats=True, jax=True)
@contextmanager
def dm_pix(job: Job) -> Iterator[Iterator[Any]]:
    """Decoded batches lent to JAX by DLPack, and changed there."""
    import dm_pix as pix
    import jax
    import jax.numpy as jnp

    import readers

    mean, std = 255 * jnp.array(MEAN), 255 * jnp.array(STD)

    @jax.jit
    def change(key: jax.Array, images: jax.Array) -> jax.Array:
        flipped = jax.vmap(pix.random_flip_left_right)(jax.random.split(key, len(images)), images)
        return (flipped.astype(jnp.float32) - mean) / std

    def changed(batches: Iterator[Any]) -> Iterator[Any]:
        for number, (images, labels) in enumerate(batches):
            made = change(jax.random.key(number), jnp.from_dlpack(images))
            yield jax.block_until_ready(made).transpose(0, 3, 1, 2), labels

    with readers.open_folder(job.place.tree) as reader:
        yield changed(image_loader(job, reader, decode=Decode(layout="NHWC")))


@contender("ours: augmented, ImageLoader", imports="torch readers.loader", kind="batches", floats=True)
@contextmanager
def augmented(job: Job) -> Iterator[Iterator[Any]]:
    import readers

    with readers.open_folder(job.place.tree) as reader:
        yield image_loader(job, reader, augment=[RandomHorizontalFlip(), Normalize(MEAN, STD)])
