"""Ours in `pipeline.py`: the loader with threads, and the data set in torch's DataLoader."""

from __future__ import annotations

import functools
import glob
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pipeline_sets as sets
from machine import list_tree
from pipeline_job import CELEB_BOX, MANY_EPOCHS, Job, MakeLoader, pipeline
from scaled_jpeg import scaled_decode

__all__ = ["COEFFICIENTS", "DATASET", "LIBJPEG", "LOADER", "RECODED", "ops"]

LOADER = "ours: ImageLoader"
LIBJPEG = "ours: ImageLoader, libjpeg"
RECODED = "ours: ImageLoader, set re-encoded"
COEFFICIENTS = "ours: ImageLoader, coefficients"
DATASET = "ours: ImageDataset + DataLoader"
_LOADER_IMPORTS = "torch readers.loader readers.augment"
_DATASET_IMPORTS = "torch.utils.data readers.torch readers.augment"


def ops(job: Job) -> list[Any]:
    """What the task does to an image."""
    from readers.augment import CELEBA_CROP, Normalize, RandomHorizontalFlip, RandomResizedCrop, Resize

    crop = [CELEBA_CROP, Resize(64)] if job.celeb else [RandomResizedCrop(224)]
    finish = [Normalize(tuple(job.mean), tuple(job.std))] if job.floats else []
    return [*crop, RandomHorizontalFlip(), *finish]


def _loader(job: Job, name: str, **options: Any) -> MakeLoader:
    import readers
    from readers.loader import ImageLoader

    reader = readers.open(job.output(name))
    return lambda: ImageLoader(reader, job.batch, augment=ops(job), threads=job.workers, seed=1, **options)


@pipeline(LOADER, imports=_LOADER_IMPORTS, data=[sets.HDF5], modes=("imagenet", "celeb", "recoded"))
def image_loader(job: Job) -> MakeLoader:
    return _loader(job, sets.HDF5)


@pipeline(
    LIBJPEG,
    imports=_LOADER_IMPORTS,
    data=[sets.HDF5],
    note='the same bytes and pixels, with decoder="cpu"',
)
def image_loader_libjpeg(job: Job) -> MakeLoader:
    from readers import Decode

    return _loader(job, sets.HDF5, decode=Decode(decoder="cpu"))


@pipeline(f"{LOADER}, tar", kinds=["u8"], imports=_LOADER_IMPORTS, data=[sets.TAR], note="as the row above; tar shards")
def image_loader_tar(job: Job) -> MakeLoader:
    return _loader(job, sets.TAR)


@pipeline(
    RECODED,
    imports=_LOADER_IMPORTS,
    data=[sets.RECODED],
    modes=["recoded"],
    note=f"packed with --resize-short {sets.SHORT_SIDE} --quality {sets.QUALITY}",
)
def image_loader_recoded(job: Job) -> MakeLoader:
    return _loader(job, sets.RECODED)


@pipeline(
    COEFFICIENTS,
    imports=_LOADER_IMPORTS,
    data=[sets.HDF5],
    apart=True,
    note="the same pixels, from a cache in memory that is filled before: not counted",
)
def image_loader_coefficients(job: Job) -> MakeLoader:
    import readers
    from readers.loader import ImageLoader

    reader = readers.cached(readers.open(job.output(sets.HDF5)), keep="coefficients", backend="memfd")
    reader.prefill(job.workers)
    return lambda: ImageLoader(reader, job.batch, augment=ops(job), threads=job.workers, seed=1)


def _data_loader(job: Job, transform: Any) -> MakeLoader:
    from torch.utils.data import DataLoader, RandomSampler

    import readers
    from readers.torch import ImageDataset

    dataset = ImageDataset(readers.open(job.output(sets.HDF5)), transform)
    sampler = RandomSampler(dataset, num_samples=len(dataset) * MANY_EPOCHS)
    return lambda: DataLoader(dataset, job.batch, sampler=sampler, num_workers=job.workers, drop_last=True)


@pipeline(DATASET, imports=_DATASET_IMPORTS, data=[sets.HDF5], note="our ops; worker processes")
def image_dataset(job: Job) -> MakeLoader:
    return _data_loader(job, ops(job))


# Peers in `pipeline.py` that decode in worker processes of torch's DataLoader, or of one derived from it.


FOLDER = "ImageFolder + PIL"
_PIL = "Pillow's antialiased bilinear"
_VISION = "torch.utils.data torchvision.datasets torchvision.transforms.v2 torchvision.io"


def _celeb_box() -> Any:
    from torchvision.transforms.v2.functional import crop

    return functools.partial(crop, **dict(zip(("top", "left", "height", "width"), CELEB_BOX, strict=True)))


def _pil_transforms(job: Job) -> Any:
    from torchvision import transforms as T

    crop = [_celeb_box(), T.Resize(64)] if job.celeb else [T.RandomResizedCrop(224)]
    finish = [T.ToTensor(), T.Normalize(job.mean, job.std)] if job.floats else [T.PILToTensor()]
    return T.Compose([*crop, T.RandomHorizontalFlip(), *finish])


def tensor_transforms(job: Job) -> Any:
    """The same with torchvision.transforms.v2, for uint8 tensors [3, h, w]."""
    import torch
    from torchvision.transforms import v2 as T

    crop = [_celeb_box(), T.Resize(64, antialias=True)] if job.celeb else [T.RandomResizedCrop(224, antialias=True)]
    finish = [T.ToDtype(torch.float32, scale=True), T.Normalize(job.mean, job.std)] if job.floats else []
    return T.Compose([*crop, T.RandomHorizontalFlip(), *finish])


def _folder_loader(job: Job, transform: Any, **options: Any) -> MakeLoader:
    from torch.utils.data import DataLoader, RandomSampler
    from torchvision.datasets import ImageFolder

    dataset = ImageFolder(str(job.tree), transform, **options)
    sampler = RandomSampler(dataset, num_samples=len(dataset) * MANY_EPOCHS)
    return lambda: DataLoader(dataset, job.batch, sampler=sampler, num_workers=job.workers, drop_last=True)


@pipeline(FOLDER, imports=_VISION, data=["tree"], note=f"transforms on PIL images; {_PIL}")
def image_folder(job: Job) -> MakeLoader:
    return _folder_loader(job, _pil_transforms(job))


def _read_tensor(path: str) -> Any:
    from torchvision.io import ImageReadMode, decode_image, read_file

    return decode_image(read_file(path), ImageReadMode.RGB)


@pipeline(
    "torchvision.io + transforms.v2", imports=_VISION, data=["tree"], note="tensors; antialiased, as is the default"
)
def torchvision_io(job: Job) -> MakeLoader:
    return _folder_loader(job, tensor_transforms(job), loader=_read_tensor)


def normalized(images: Any, job: Job) -> Any:
    """uint8 [n, h, w, 3] as normalised float32 [n, 3, h, w]."""
    import torch

    mean, std = (255 * torch.tensor(values).view(1, 3, 1, 1) for values in (job.mean, job.std))
    planes = torch.from_numpy(images).permute(0, 3, 1, 2)
    return planes.to(torch.float32, memory_format=torch.contiguous_format).sub_(mean).mul_(1 / std)


# Peers in `pipeline.py` with loaders of their own: SPDL's threads, FFCV, DALI on the CPU.


FFCV = "FFCV, its own JPEGs"
FFCV_SHORT = "FFCV, its own JPEGs of short side 256"

# --- SPDL -----------------------------------------------------------------------------------------------------------


def _spdl(job: Job, make_batch: Callable[[list[str]], Any]) -> MakeLoader:
    """Whole batches in `workers` threads, paths in random order without end."""
    import torch
    from spdl.pipeline import PipelineBuilder

    torch.set_num_threads(1)
    items = [path for path, _ in list_tree(job.tree)]

    def source() -> Iterator[list[str]]:
        while True:
            random.shuffle(items)
            for start in range(0, len(items) - job.batch + 1, job.batch):
                yield items[start : start + job.batch]

    def batches() -> Iterator[Any]:
        builder = PipelineBuilder().add_source(source()).pipe(make_batch, concurrency=job.workers).add_sink(2)
        built = builder.build(num_threads=job.workers)
        with built.auto_stop():
            for images in built:
                yield images, None

    return batches


def _spdl_simplejpeg(job: Job, scaled: bool) -> MakeLoader:
    import cv2
    import numpy as np

    cv2.setNumThreads(0)

    def make_batch(paths: list[str]) -> Any:
        images = np.empty((job.batch, job.size, job.size, 3), np.uint8)
        for path, image in zip(paths, images, strict=True):
            with open(path, "rb") as file:
                _into(file.read(), job, image, scaled)
        return normalized(images, job) if job.floats else images

    return _spdl(job, make_batch)


_CV2 = "INTER_AREA where it shrinks, else INTER_LINEAR"
_CV2_IMPORTS = "torch spdl.pipeline simplejpeg cv2"


@pipeline(
    "SPDL threads, simplejpeg + cv2",
    imports=_CV2_IMPORTS,
    data=["tree"],
    note=f"random boxes are decoded at a fraction of the size where they are large enough, fixed ones in full; {_CV2}",
)
def spdl_simplejpeg(job: Job) -> MakeLoader:
    return _spdl_simplejpeg(job, not job.celeb)


def _into(data: bytes, job: Job, out: Any, scaled: bool) -> None:
    import cv2
    import simplejpeg

    height, width, _, _ = simplejpeg.decode_jpeg_header(data)
    image, box = scaled_decode(data, (height, width), job.box(height, width), job.size if scaled else 0)
    top, left, h, w = box
    image = image[top : top + h, left : left + w]
    size = (job.size, job.size)
    method = cv2.INTER_AREA if h > job.size and w > job.size else cv2.INTER_LINEAR
    if random.random() < 0.5:
        cv2.resize(image, size, dst=out, interpolation=method)
    else:
        cv2.flip(cv2.resize(image, size, interpolation=method), 1, dst=out)


@pipeline(
    "SPDL threads, ffmpeg",
    imports="torch spdl.pipeline spdl.io",
    data=["tree"],
    note="crop and scale=bilinear as filters of ffmpeg",
)
def spdl_ffmpeg(job: Job) -> MakeLoader:
    import spdl.io

    def decode(path: str) -> Any:
        packets = spdl.io.demux_image(path)
        top, left, height, width = job.box(packets.codec.height, packets.codec.width)
        flip = ",hflip" if random.random() < 0.5 else ""
        scale = f"scale={job.size}:{job.size}:flags=bilinear{flip},format=pix_fmts=rgb24"
        return spdl.io.decode_packets(packets, filter_desc=f"crop={width}:{height}:{left}:{top}:exact=1,{scale}")

    def make_batch(paths: list[str]) -> Any:
        images = spdl.io.to_numpy(spdl.io.convert_frames([decode(path) for path in paths]))
        return normalized(images, job) if job.floats else images

    return _spdl(job, make_batch)


# --- FFCV -----------------------------------------------------------------------------------------------------------
_FFCV_IMPORTS = "torch ffcv.loader ffcv.fields.rgb_image ffcv.fields.decoders ffcv.transforms"
_FFCV_NOTE = (
    "its code is compiled for the first batch; cv2's INTER_AREA; faces: the middle box, the only one it cuts out"
)


def _ffcv(job: Job, name: str) -> MakeLoader:
    import numpy as np
    from ffcv import transforms as T
    from ffcv.fields.decoders import IntDecoder
    from ffcv.fields.rgb_image import CenterCropRGBImageDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption

    path = os.path.join(job.output(name), "a.beton")
    size = (job.size, job.size)
    crop = CenterCropRGBImageDecoder(size, 148 / 178) if job.celeb else RandomResizedCropRGBImageDecoder(size)
    mean, std = 255 * np.array(job.mean), 255 * np.array(job.std)
    finish = [T.NormalizeImage(mean, std, np.float32)] if job.floats else []
    pipelines = {
        "image": [crop, T.RandomHorizontalFlip(), *finish, T.ToTensor(), T.ToTorchImage()],
        "label": [IntDecoder()],
    }
    options = {"num_workers": job.workers, "order": OrderOption.RANDOM, "os_cache": True, "drop_last": True}
    return lambda: Loader(path, batch_size=job.batch, pipelines=pipelines, **options)


@pipeline(
    FFCV,
    python="ffcv",
    imports=_FFCV_IMPORTS,
    data=[sets.FFCV_FULL],
    modes=("imagenet", "celeb", "recoded"),
    apart=True,
    note=f"re-encoded by its writer, quality {sets.QUALITY}, size kept; {_FFCV_NOTE}",
)
def ffcv_full(job: Job) -> MakeLoader:
    return _ffcv(job, sets.FFCV_FULL)


@pipeline(
    FFCV_SHORT,
    python="ffcv",
    imports=_FFCV_IMPORTS,
    data=[sets.FFCV_SHORT],
    modes=["recoded"],
    apart=True,
    note=f"made small before its writer re-encoded them, quality {sets.QUALITY}; {_FFCV_NOTE}",
)
def ffcv_short(job: Job) -> MakeLoader:
    return _ffcv(job, sets.FFCV_SHORT)


# --- DALI -----------------------------------------------------------------------------------------------------------
_DALI_NOTE = "decodes the box only; antialiased triangular filter; the pipeline is built for the first batch"


def dali_graph(job: Job, read: Callable[[], tuple[Any, Any]], processes: int = 1) -> MakeLoader:
    """Batches without end: where a reader ends an epoch, the next begins. processes: of a parallel external source."""
    import numpy as np
    from nvidia.dali import fn, pipeline_def, types

    options = {"prefetch_queue_depth": 2, "py_num_workers": processes, "py_start_method": "spawn"}

    @pipeline_def(batch_size=job.batch, num_threads=job.workers, device_id=None, **options)
    def graph() -> Any:
        encoded, labels = read()
        flip = fn.random.coin_flip()
        if job.celeb:
            images = fn.decoders.image_crop(encoded, device="cpu", **job.dali_crop)
        else:
            area, ratio = [0.08, 1.0], [3 / 4, 4 / 3]
            images = fn.decoders.image_random_crop(encoded, device="cpu", random_area=area, random_aspect_ratio=ratio)
        images = fn.resize(images, size=[job.size, job.size])
        if not job.floats:
            return fn.flip(images, horizontal=flip), labels
        mean, std = ([255 * value for value in values] for values in (job.mean, job.std))
        images = fn.crop_mirror_normalize(
            images, mirror=flip, mean=mean, std=std, dtype=types.FLOAT, output_layout="CHW"
        )
        return images, labels

    def batches() -> Iterator[Any]:
        built = graph()
        built.build()
        while True:
            try:
                images, labels = built.run()
            except StopIteration:
                built.reset()
                continue
            yield np.asarray(images.as_tensor()), labels

    return batches


_DALI = {"python": "dali", "imports": "numpy nvidia.dali nvidia.dali.tfrecord", "note": _DALI_NOTE}


@pipeline("DALI CPU, file reader", data=["tree"], **_DALI)
def dali_file(job: Job) -> MakeLoader:
    from nvidia.dali import fn

    return dali_graph(job, lambda: fn.readers.file(file_root=str(job.tree), random_shuffle=True))


@pipeline("DALI CPU, webdataset reader on our tar shards", data=[sets.TAR], **_DALI)
def dali_webdataset(job: Job) -> MakeLoader:
    from nvidia.dali import fn

    paths = sorted(glob.glob(os.path.join(job.output(sets.TAR), "*.tar")))
    return dali_graph(job, lambda: fn.readers.webdataset(paths=paths, ext=["jpg", "cls"], random_shuffle=True))


@pipeline("DALI CPU, tfrecord reader on our tfrecord shards", data=[sets.TFRECORD], **_DALI)
def dali_tfrecord(job: Job) -> MakeLoader:
    from nvidia.dali import fn, tfrecord

    paths = sorted(glob.glob(os.path.join(job.output(sets.TFRECORD), "*.tfrecord")))
    features = {
        "image/encoded": tfrecord.FixedLenFeature((), tfrecord.string, ""),
        "image/class/label": tfrecord.FixedLenFeature([1], tfrecord.int64, -1),
    }

    def read() -> tuple[Any, Any]:
        indexes = [f"{path}.idx" for path in paths]
        record = fn.readers.tfrecord(path=paths, index_path=indexes, features=features, random_shuffle=True)
        return record["image/encoded"], record["image/class/label"]

    return dali_graph(job, read)


# Other frameworks in `pipeline.py`, over our sets: torchdata's threads, Grain (JAX) and tf.data.


_OURS = "torch.utils.data readers.torch readers.augment"


@pipeline(
    "ours: ImageDataset + torchdata.nodes, threads",
    kinds=["u8"],
    modes=["imagenet"],
    imports=f"{_OURS} torchdata.nodes",
    data=[sets.HDF5],
    note="our ops; ParallelMapper(method='thread'), a batch each",
)
def torchdata_threads(job: Job) -> MakeLoader:
    from torch.utils.data import default_collate
    from torchdata import nodes

    import readers
    from readers.order import Shuffled
    from readers.torch import EpochSampler, ImageDataset

    dataset = ImageDataset(readers.open(job.output(sets.HDF5)), ops(job))
    sampler = EpochSampler(Shuffled(len(dataset), seed=1), dataset)

    def load(indices: list[int]) -> Any:
        return default_collate(dataset.__getitems__(indices))

    batches = nodes.Batcher(nodes.SamplerWrapper(sampler), job.batch, drop_last=True)
    mapped = nodes.ParallelMapper(batches, load, num_workers=job.workers, method="thread")
    return lambda: nodes.Loader(nodes.Prefetcher(mapped, 3))


# --- Grain ------------------------------------------------------------------------------------------------------------
def _grain(job: Job, data: Any) -> MakeLoader:
    import grain
    from absl import flags

    flags.FLAGS.mark_as_parsed()
    options = grain.MultiprocessingOptions(num_workers=job.workers, per_worker_buffer_size=2)
    loaded = data.repeat().batch(job.batch).to_iter_dataset(grain.ReadOptions(1, 2)).mp_prefetch(options)
    return lambda: ((batch["image"], batch["label"]) for batch in loaded)


@pipeline(
    "ours: GrainSource + Grain, PIL",
    kinds=["u8"],
    modes=["imagenet"],
    imports="grain readers.frameworks.grain PIL.Image",
    data=[sets.HDF5],
    note="whole images decoded by the source; box, resize and flip by Pillow; worker processes",
)
def grain_source(job: Job) -> MakeLoader:
    import grain
    import numpy as np
    from PIL import Image

    import readers
    from readers.frameworks.grain import GrainSource

    def augment(sample: dict[str, Any], rng: Any) -> dict[str, Any]:
        chance = random.Random(int(rng.integers(1 << 62)))
        top, left, height, width = job.box(*sample["image"].shape[:2], chance)
        picture = Image.fromarray(sample["image"])
        box = (left, top, left + width, top + height)
        picture = picture.resize((job.size, job.size), Image.Resampling.BILINEAR, box)
        image = np.asarray(picture)
        return {**sample, "image": image[:, ::-1] if chance.random() < 0.5 else image}

    source = GrainSource(readers.open(job.output(sets.HDF5)))
    return _grain(job, grain.MapDataset.source(source).shuffle(seed=1).random_map(augment, seed=1))


@pipeline(
    "ours: ImageDataset + Grain",
    kinds=["u8"],
    modes=["imagenet"],
    imports=f"{_OURS} grain",
    data=[sets.HDF5],
    note="our ops; only the box decoded; worker processes",
)
def grain_dataset(job: Job) -> MakeLoader:
    import grain
    import numpy as np

    import readers
    from readers.torch import ImageDataset, Place

    reader = readers.open(job.output(sets.HDF5))
    dataset = ImageDataset(reader, ops(job), fields={"image": "image", "label": "label"})

    def load(index: int, rng: Any) -> dict[str, Any]:
        item = dataset[Place(index, 0, int(rng.integers(1 << 62)), index)]
        return {name: np.asarray(value) for name, value in item.items()}

    return _grain(job, grain.MapDataset.range(len(reader)).shuffle(seed=1).random_map(load, seed=1))


# --- tf.data ----------------------------------------------------------------------------------------------------------
def _tf_threads(job: Job) -> Any:
    import tensorflow as tf

    options = tf.data.Options()
    options.threading.private_threadpool_size = job.workers
    options.threading.max_intra_op_parallelism = 1
    return options


def _tf_augment(job: Job) -> Any:
    """(JPEG, label) to (uint8 [size, size, 3], label): only the box is decoded, then an antialiased resize."""
    import tensorflow as tf

    def augment(jpeg: Any, label: Any) -> Any:
        start, size, _ = tf.image.sample_distorted_bounding_box(
            tf.io.extract_jpeg_shape(jpeg),
            tf.zeros([1, 0, 4]),
            min_object_covered=0,
            aspect_ratio_range=(3 / 4, 4 / 3),
            area_range=(0.08, 1.0),
            max_attempts=10,
            use_image_if_no_bounding_boxes=True,
        )
        window = tf.stack([start[0], start[1], size[0], size[1]])
        image = tf.image.decode_and_crop_jpeg(jpeg, window, channels=3)
        image = tf.image.resize(image, (job.size, job.size), antialias=True)
        image = tf.image.random_flip_left_right(image)
        return tf.cast(tf.round(image), tf.uint8), label

    return augment


def _tf_batches(job: Job, data: Any) -> MakeLoader:
    options = _tf_threads(job)
    loaded = data.map(_tf_augment(job), num_parallel_calls=job.workers).batch(job.batch, drop_remainder=True)
    return lambda: loaded.prefetch(3).with_options(options).as_numpy_iterator()


@pipeline(
    "tf.data, our TFRecord",
    kinds=["u8"],
    modes=["imagenet"],
    imports="tensorflow",
    python="tf",
    data=[sets.TFRECORD],
    note="its own reader, shuffle(1000) over interleaved shards; decode_and_crop_jpeg, antialiased resize",
)
def tf_records(job: Job) -> MakeLoader:
    import tensorflow as tf

    features = {
        "image/encoded": tf.io.FixedLenFeature([], tf.string),
        "image/class/label": tf.io.FixedLenFeature([], tf.int64),
    }

    def parse(record: Any) -> Any:
        example = tf.io.parse_single_example(record, features)
        return example["image/encoded"], example["image/class/label"]

    shards = tf.data.Dataset.list_files(f"{job.output(sets.TFRECORD)}/*.tfrecord", shuffle=True)
    records = shards.interleave(tf.data.TFRecordDataset, cycle_length=4).shuffle(1000).repeat()
    return _tf_batches(job, records.map(parse))


@pipeline(
    "tf.data, from_generator over our reader",
    kinds=["u8"],
    modes=["imagenet"],
    imports="tensorflow readers",
    python="tf",
    data=[sets.HDF5],
    note="our order and bytes; decode_and_crop_jpeg, antialiased resize",
)
def tf_generator(job: Job) -> MakeLoader:
    import tensorflow as tf

    import readers
    from readers.order import Shuffled

    reader = readers.open(job.output(sets.HDF5))
    order = Shuffled(len(reader), seed=1)

    def samples() -> Any:
        epoch = 0
        while True:
            rows = order.indices(epoch, range(len(reader))).tolist()
            for row, data in zip(rows, reader.stream(rows), strict=True):
                yield bytes(data), int(reader.labels[row])
            epoch += 1

    signature = (tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.int64))
    return _tf_batches(job, tf.data.Dataset.from_generator(samples, output_signature=signature))
