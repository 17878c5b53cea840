"""The loaders of `s000.py`: JPEGs of faces to batches of float32 [n, 3, 64, 64] from -1 to 1, and their labels.

Each reads an image, takes the box (40, 15, 148, 148: top, left, height, width), resizes it to 64 x 64 and flips every
other one. A row's function gets a `Job` and returns batches (images, labels) without end, epoch after epoch.

Options of the rows: `bound`, how far an image may be from that of Pillow, as the mean over its values, of 255.
`ordered`: whether it can have the order of `readers.order`, so that its batches are those of the other such rows.
`draws`: whether its flips are drawn by `readers.augment`.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from harness import CONTENDERS, NotHere, contender
from machine import list_tree
from s000_job import BOX, HEIGHT, SIZE, WIDTH, Job

from readers import Decode, Ranks

__all__ = ["BASELINE", "END_TO_END", "LOADER", "ROCAL_HIP", "ROCAL_HOST"]

HALF = (0.5, 0.5, 0.5)
# For samplers that continue by themselves, so that a small set has no pauses between epochs.
_EPOCHS = 1000
_NO_GPU = "needs a CUDA GPU"

BASELINE = "PyTorch DataLoader, Pillow"
LOADER, DATASET, DALI_LOADER = "ours: ImageLoader", "ours: ImageDataset in a DataLoader", "ours: DaliLoader, CPU"
DALI_CPU, DALI_GPU = "DALI, files, CPU", "DALI, files, GPU"
ROCAL_HOST, ROCAL_HIP = "rocAL, files, host", "rocAL, files, HIP"
END_TO_END = "end to end"

Batches = Iterable[tuple[Any, Any]]


# --- PyTorch ----------------------------------------------------------------------------------------------------------
@contender(
    BASELINE,
    imports="torch.utils.data pillow_transforms",
    bound=0.0,
    ordered=True,
    note="the baseline of the document: read, decode, crop, resize, flip, to a tensor, normalise, one after the other",
)
def pillow(job: Job) -> Batches:
    from pillow_transforms import Compose, Crop, Folder, Normalize, RandomHorizontalFlip, Resize, ToTensor

    steps = [Crop(*BOX), Resize((SIZE, SIZE)), RandomHorizontalFlip(), ToTensor(), Normalize(HALF, HALF)]
    return _data_loader(Folder(job.tree, Compose(steps)), job)


@contender(
    "PyTorch DataLoader, torchvision",
    imports="torch.utils.data torchvision.datasets torchvision.transforms",
    bound=0.0,
    ordered=True,
    note="the same with torchvision's ImageFolder and transforms",
)
def torchvision(job: Job) -> Batches:
    from torchvision import transforms as T
    from torchvision.datasets import ImageFolder

    steps = [T.Lambda(_box), T.Resize((SIZE, SIZE)), T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize(HALF, HALF)]
    return _data_loader(ImageFolder(str(job.tree), T.Compose(steps)), job)


def _box(image: Any) -> Any:
    from torchvision.transforms.functional import crop

    return crop(image, *BOX)


def _data_loader(dataset: Any, job: Job) -> Batches:
    import torch
    from torch.utils.data import DataLoader, RandomSampler

    generator = torch.Generator().manual_seed(job.seed)
    sampler: Any = RandomSampler(dataset, num_samples=len(dataset) * _EPOCHS, generator=generator)
    if job.in_order:
        from readers.order import Shuffled
        from readers.torch import EpochSampler

        sampler = EpochSampler(Shuffled(len(dataset), job.seed), rank=0, world_size=1)
    loader = DataLoader(
        dataset, job.batch, sampler=sampler, num_workers=job.workers, drop_last=True, generator=generator
    )
    return _endless(loader)


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


# --- TensorFlow -------------------------------------------------------------------------------------------------------
@contender(
    "TensorFlow, tf.data on files",
    imports="tensorflow",
    bound=3.0,
    note="what TensorFlow Datasets hands out; decodes the box only, antialiased",
)
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
    return iter(batches.with_options(options).as_numpy_iterator())


# --- ours -------------------------------------------------------------------------------------------------------------
_OURS = "torch readers.loader readers.augment"


def _image_loader(job: Job, device: str) -> Batches:
    import readers
    from readers.augment import celeba
    from readers.loader import ImageLoader

    return _endless(
        ImageLoader(
            readers.open(job.packed),
            job.batch,
            augment=celeba(SIZE),
            seed=job.seed,
            threads=job.workers,
            decode=Decode(layout="NCHW"),
            device=device,
            ranks=Ranks(rank=0, world_size=1),
        )
    )


@contender(
    LOADER,
    imports=_OURS,
    bound=2.0,
    ordered=True,
    draws=True,
    note="a packed set; only the box is decoded, at half the size where that is enough, then resized, flipped and "
    "normalised without a further copy; threads",
)
def image_loader(job: Job) -> Batches:
    return _image_loader(job, "cpu")


@contender(f"{LOADER}, GPU", bound=4.0, ordered=True, draws=True, note="decoded and finished on the GPU")
def image_loader_gpu(job: Job) -> Batches:
    _need_gpu()
    return _image_loader(job, "cuda")


@contender(
    DATASET,
    imports="torch.utils.data readers.torch readers.augment",
    bound=2.0,
    ordered=True,
    draws=True,
    note="a packed set; the same operations in worker processes of PyTorch",
)
def image_dataset(job: Job) -> Batches:
    import readers
    from readers.augment import celeba
    from readers.torch import ImageDataset

    return _data_loader(ImageDataset(readers.open(job.packed), celeba(SIZE)), job)


# --- DALI -------------------------------------------------------------------------------------------------------------
_DALI = "torch nvidia.dali nvidia.dali.plugin.pytorch"
_DALI_NOTE = "its file reader; only the box is decoded; antialiased; crop_mirror_normalize as one operator"


def _dali_files(job: Job, device: str) -> Batches:
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    top, left, height, width = BOX
    place = {"crop": (height, width), "crop_pos_y": top / (HEIGHT - height), "crop_pos_x": left / (WIDTH - width)}

    @pipeline_def(
        batch_size=job.batch, num_threads=job.workers, device_id=0 if device == "gpu" else None, seed=job.seed
    )
    def graph() -> Any:
        encoded, labels = fn.readers.file(file_root=str(job.tree), random_shuffle=True)
        images = fn.decoders.image_crop(encoded, device="mixed" if device == "gpu" else "cpu", **place)
        images = fn.crop_mirror_normalize(
            fn.resize(images, size=[SIZE, SIZE]),
            mirror=fn.random.coin_flip(),
            mean=[127.5] * 3,
            std=[127.5] * 3,
            dtype=types.FLOAT,
            output_layout="CHW",
        )
        return images, labels

    for (batch,) in DALIGenericIterator(graph(prefetch_queue_depth=2), ["images", "labels"]):
        yield batch["images"], batch["labels"].flatten()


@contender(DALI_CPU, imports=_DALI, bound=2.0, note=_DALI_NOTE)
def dali_cpu(job: Job) -> Batches:
    return _dali_files(job, "cpu")


@contender(DALI_GPU, bound=4.0, note=_DALI_NOTE)
def dali_gpu(job: Job) -> Batches:
    _need_gpu()
    return _dali_files(job, "gpu")


def _dali_loader(job: Job, device: Any) -> Batches:
    import readers
    from readers.augment import celeba
    from readers.dali import DaliLoader, PipelineOptions

    options = PipelineOptions(device=device, threads=job.workers)
    reader = readers.open(job.packed)
    return _endless(
        DaliLoader(
            reader, job.batch, augment=celeba(SIZE), options=options, seed=job.seed, ranks=Ranks(rank=0, world_size=1)
        )
    )


@contender(
    DALI_LOADER,
    imports=f"{_DALI} readers.dali",
    bound=2.0,
    ordered=True,
    draws=True,
    note="a packed set, decoded by DALI",
)
def dali_loader_cpu(job: Job) -> Batches:
    return _dali_loader(job, "cpu")


@contender("ours: DaliLoader, GPU", bound=4.0, ordered=True, draws=True, note="a packed set, decoded by DALI")
def dali_loader_gpu(job: Job) -> Batches:
    _need_gpu()
    return _dali_loader(job, "cuda")


# --- rocAL ------------------------------------------------------------------------------------------------------------
_ROCAL_NOTE = "crop and resize_mirror_normalize; resized without antialiasing"


def _need_rocal(device: str) -> None:
    """Raises NotHere, saying where it would run."""
    from readers.rocal.pipelines import MissingRocalError, gpu_backend, load_rocal

    try:
        load_rocal("this row")
    except MissingRocalError as error:
        raise NotHere(str(error)) from None
    if device == "cuda" and gpu_backend() is False:
        raise NotHere(
            "this rocAL is built for the CPU alone: needs an AMD GPU, and ROCm's rocAL (PYTHONPATH=/opt/rocm/lib)"
        )


def _rocal_files(job: Job, device: Any) -> Batches:
    _need_rocal(device)
    from amd.rocal.plugin.generic import ROCALClassificationIterator

    from readers.rocal.pipelines import Machine, built, celeba_ops

    root, ops = str(job.tree), celeba_ops(size=SIZE)
    samples = len(glob.glob(os.path.join(root, "*", "*")))

    def graph(rocal: Any) -> Any:
        files, _ = rocal.fn.readers.file(file_root=root)
        limits = {"max_decoded_height": HEIGHT, "max_decoded_width": WIDTH}
        return ops(rocal, rocal.fn.decoders.image(files, file_root=root, random_shuffle=True, **limits))

    pipeline = built(graph, Machine(device, job.workers), batch_size=job.batch, seed=job.seed)
    iterator = ROCALClassificationIterator(pipeline)
    while True:
        for _ in range(samples // job.batch):
            (images,), labels = next(iterator)
            yield images.copy(), labels
        iterator.reset()


def _rocal_loader(job: Job, device: Any) -> Batches:
    _need_rocal(device)
    import readers
    from readers.rocal import RocalLoader, celeba, external_source

    source = external_source(readers.open(job.packed), job.batch, seed=job.seed, ranks=Ranks(rank=0, world_size=1))
    with RocalLoader(celeba(source, size=SIZE, device=device, threads=job.workers), source) as loader:
        yield from _endless(loader)


@contender(ROCAL_HOST, bound=24.0, note=f"its file reader; {_ROCAL_NOTE}")
def rocal_host(job: Job) -> Batches:
    return _rocal_files(job, "cpu")


@contender(ROCAL_HIP, bound=24.0, note=f"its file reader; {_ROCAL_NOTE}")
def rocal_hip(job: Job) -> Batches:
    return _rocal_files(job, "cuda")


@contender("ours: RocalLoader, host", bound=24.0, ordered=True, note=f"a packed set; {_ROCAL_NOTE}")
def rocal_loader_host(job: Job) -> Batches:
    return _rocal_loader(job, "cpu")


@contender("ours: RocalLoader, HIP", bound=24.0, ordered=True, note=f"a packed set; {_ROCAL_NOTE}")
def rocal_loader_hip(job: Job) -> Batches:
    return _rocal_loader(job, "cuda")


# --- with the training ------------------------------------------------------------------------------------------------
def _end_to_end(name: str, function: Callable[[Job], Batches]) -> None:
    def load(job: Job) -> Batches:
        _need_gpu()
        return function(job)

    note = "the document's network trained on these batches, on the GPU"
    contender(f"{name}, {END_TO_END}", trains=True, note=note)(load)


def _need_gpu() -> None:
    """Raises NotHere where PyTorch has no GPU; without a driver that is said without PyTorch."""
    if not any(Path("/dev", name).exists() for name in ("nvidiactl", "kfd", "dxg")):
        raise NotHere(_NO_GPU)
    import torch

    if not torch.cuda.is_available():
        raise NotHere(_NO_GPU)


for _name in (BASELINE, LOADER, f"{LOADER}, GPU", ROCAL_HOST, ROCAL_HIP):
    _end_to_end(_name, CONTENDERS[_name].function)
