"""Functions of the rows of `pipeline.py` and `dali.py`; `pipeline.toml` lists the rows.

Ours: the loader with threads, and the data set in torch's DataLoader. Peers: decoding in worker processes of torch's
DataLoader; libraries with their own loaders (SPDL's threads, FFCV, DALI on the CPU, LitData, LanceDB, Grain); and
torchdata's threads, Grain (JAX) and tf.data over our sets. A library that leaves decoding to its user gets the fastest
decoder of the peers: simplejpeg at a fraction of the size, and cv2.
"""

from __future__ import annotations

import functools
import glob
import itertools
import os
import random
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pipeline_sets as sets
from harness import register
from machine import list_tree
from pipeline_job import CELEB_BOX, MANY_EPOCHS, Job, MakeLoader, pipeline, scaled_decode

__all__ = ["register_rows"]


def ops(job: Job) -> list[Any]:
    """The ops of the task on an image."""
    from readers.augment import CELEBA_CROP, Normalize, RandomHorizontalFlip, RandomResizedCrop, Resize

    crop = [CELEBA_CROP, Resize(64)] if job.celeb else [RandomResizedCrop(224)]
    finish = [Normalize(tuple(job.mean), tuple(job.std))] if job.floats else []
    return [*crop, RandomHorizontalFlip(), *finish]


def _reader(job: Job, name: str = sets.HDF5) -> Any:
    import readers

    return readers.open(job.output(name))


def image_loader(job: Job, of: str, decoder: str = "", cached: bool = False) -> MakeLoader:
    """cached: read from a cache of coefficients in memory, which is filled first."""
    import readers
    from readers.loader import ImageLoader

    reader = _reader(job, of)
    if cached:
        reader = readers.cached(reader, keep="coefficients", backend="memfd")
        reader.prefill(job.workers)
    options = {"decode": readers.Decode(decoder=decoder)} if decoder else {}
    return lambda: ImageLoader(reader, job.batch, augment=ops(job), threads=job.workers, seed=1, **options)


def _in_torch(job: Job, dataset: Any) -> MakeLoader:
    from torch.utils.data import DataLoader, RandomSampler

    sampler = RandomSampler(dataset, num_samples=len(dataset) * MANY_EPOCHS)
    return lambda: DataLoader(dataset, job.batch, sampler=sampler, num_workers=job.workers, drop_last=True)


def image_dataset(job: Job) -> MakeLoader:
    from readers.torch import ImageDataset

    return _in_torch(job, ImageDataset(_reader(job), ops(job)))


# --- torchvision ------------------------------------------------------------------------------------------------------
def _celeb_box() -> Any:
    from torchvision.transforms.v2.functional import crop

    return functools.partial(crop, **dict(zip(("top", "left", "height", "width"), CELEB_BOX, strict=True)))


def image_folder(job: Job) -> MakeLoader:
    from torchvision import transforms as T
    from torchvision.datasets import ImageFolder

    crop = [_celeb_box(), T.Resize(64)] if job.celeb else [T.RandomResizedCrop(224)]
    finish = [T.ToTensor(), T.Normalize(job.mean, job.std)] if job.floats else [T.PILToTensor()]
    return _in_torch(job, ImageFolder(str(job.tree), T.Compose([*crop, T.RandomHorizontalFlip(), *finish])))


def _tensor_ops(job: Job) -> Any:
    """The task's ops of torchvision.transforms.v2, for uint8 tensors [3, h, w]."""
    import torch
    from torchvision.transforms import v2 as T

    crop = [_celeb_box(), T.Resize(64, antialias=True)] if job.celeb else [T.RandomResizedCrop(224, antialias=True)]
    finish = [T.ToDtype(torch.float32, scale=True), T.Normalize(job.mean, job.std)] if job.floats else []
    return T.Compose([*crop, T.RandomHorizontalFlip(), *finish])


def torchvision_io(job: Job) -> MakeLoader:
    from torchvision.datasets import ImageFolder
    from torchvision.io import ImageReadMode, decode_image, read_file

    read = {"loader": lambda path: decode_image(read_file(path), ImageReadMode.RGB)}
    return _in_torch(job, ImageFolder(str(job.tree), _tensor_ops(job), **read))


def normalized(images: Any, job: Job) -> Any:
    """uint8 [n, h, w, 3] as normalised float32 [n, 3, h, w]."""
    import torch

    mean, std = (255 * torch.tensor(values).view(1, 3, 1, 1) for values in (job.mean, job.std))
    planes = torch.from_numpy(images).permute(0, 3, 1, 2)
    return planes.to(torch.float32, memory_format=torch.contiguous_format).sub_(mean).mul_(1 / std)


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


def spdl_simplejpeg(job: Job) -> MakeLoader:
    import cv2
    import numpy as np

    cv2.setNumThreads(0)

    def make_batch(paths: list[str]) -> Any:
        images = np.empty((job.batch, job.size, job.size, 3), np.uint8)
        for path, image in zip(paths, images, strict=True):
            with open(path, "rb") as file:
                _into(file.read(), job, image)
        return normalized(images, job) if job.floats else images

    return _spdl(job, make_batch)


def _into(data: Any, job: Job, out: Any, chance: Any = random) -> None:
    import cv2
    import simplejpeg

    height, width, _, _ = simplejpeg.decode_jpeg_header(data)
    image, box = scaled_decode(data, (height, width), job.box(height, width, chance), 0 if job.celeb else job.size)
    top, left, h, w = box
    image = image[top : top + h, left : left + w]
    size = (job.size, job.size)
    method = cv2.INTER_AREA if h > job.size and w > job.size else cv2.INTER_LINEAR
    if chance.random() < 0.5:
        cv2.resize(image, size, dst=out, interpolation=method)
    else:
        cv2.flip(cv2.resize(image, size, interpolation=method), 1, dst=out)


def _image(data: Any, job: Job, chance: Any = random) -> Any:
    """One image by `_into`: uint8 [size, size, 3], or normalised floats [3, size, size]."""
    import numpy as np

    image = np.empty((job.size, job.size, 3), np.uint8)
    _into(data, job, image, chance)
    return normalized(image[None], job)[0] if job.floats else image


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
def ffcv(job: Job, of: str) -> MakeLoader:
    import numpy as np
    from ffcv import transforms as T
    from ffcv.fields.decoders import IntDecoder
    from ffcv.fields.rgb_image import CenterCropRGBImageDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption

    path = os.path.join(job.output(of), "a.beton")
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


# --- LitData ----------------------------------------------------------------------------------------------------------
def litdata_chunks(job: Job, tensors: bool = False) -> MakeLoader:
    """tensors: decoded and transformed by torchvision, as LitData's own benchmark does."""
    import cv2
    import litdata
    import torch
    from torchvision.io import ImageReadMode, decode_image

    cv2.setNumThreads(0)
    transform = _tensor_ops(job)

    class Images(litdata.StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            sample = super().__getitem__(index)
            if not tensors:
                return _image(sample["image"], job), sample["label"]
            encoded = torch.frombuffer(bytearray(sample["image"]), dtype=torch.uint8)
            return transform(decode_image(encoded, ImageReadMode.RGB)), sample["label"]

    images = Images(os.path.join(job.output(sets.LITDATA), "lit"), shuffle=True, drop_last=True)
    options = {"num_workers": job.workers, "persistent_workers": True, "drop_last": True}
    return lambda: litdata.StreamingDataLoader(images, batch_size=job.batch, **options)


# --- LanceDB ----------------------------------------------------------------------------------------------------------
def lance_streaming(job: Job) -> MakeLoader:
    """Rows of a table are read 64 at a time and transformed by threads; torch's DataLoader makes batches of them."""
    import cv2
    import lancedb
    import numpy as np
    import torch
    from lancedb.streaming import StreamingDataset
    from torch.utils.data import DataLoader

    cv2.setNumThreads(0)
    torch.set_num_threads(1)  # more threads copying batches would take the cores from the decoders
    table = lancedb.connect(job.output(sets.LANCE)).open_table("images")

    def transform(rows: Any) -> list[Any]:
        images = [_image(np.frombuffer(value.as_buffer(), np.uint8), job) for value in rows["image"]]
        return list(zip(images, rows["label"].to_pylist(), strict=True))

    def batches() -> Iterator[Any]:
        for epoch in itertools.count():
            options = {"transform": transform, "transform_parallelism": job.workers}
            data = StreamingDataset(table, shuffle_seed=1, epoch=epoch, **options)
            yield from DataLoader(data, job.batch, drop_last=True)

    return batches


# --- DALI -----------------------------------------------------------------------------------------------------------
def dali_graph(job: Job, read: Callable[[], tuple[Any, Any]], processes: int = 1) -> MakeLoader:
    """Batches of epoch after epoch, without end. processes: of a parallel external source."""
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


def dali_file(job: Job) -> MakeLoader:
    from nvidia.dali import fn

    return dali_graph(job, lambda: fn.readers.file(file_root=str(job.tree), random_shuffle=True))


def dali_webdataset(job: Job, indexed: bool = False) -> MakeLoader:
    """indexed: give DALI our index; otherwise DALI makes one."""
    from nvidia.dali import fn

    folder, options = job.output(sets.TAR), {}
    if indexed:
        import packer

        options["index_paths"] = [str(file) for file in packer.export_index(folder, "dali").files]
    options |= {"paths": sorted(glob.glob(os.path.join(folder, "*.tar"))), "ext": ["jpg", "cls"]}
    return dali_graph(job, lambda: fn.readers.webdataset(random_shuffle=True, **options))


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


def dali_external(job: Job, parallel: bool = False, **options: Any) -> MakeLoader:
    """Our external source: views in this process, or (parallel) reads in DALI's worker processes."""
    from readers.dali import external_source

    reader, options = _reader(job), {"seed": 1, "parallel": parallel, "ahead": 2, **options}
    read = functools.partial(external_source, reader, job.batch, **options)
    return dali_graph(job, read, max(1, job.workers * parallel))


def dali_loader(job: Job) -> MakeLoader:
    from readers.dali import DaliLoader, PipelineOptions

    reader, options = _reader(job), PipelineOptions(threads=job.workers, prefetch=2)
    return lambda: DaliLoader(reader, job.batch, augment=ops(job), options=options, seed=1)


# --- torchdata --------------------------------------------------------------------------------------------------------
def torchdata_threads(job: Job) -> MakeLoader:
    from torch.utils.data import default_collate
    from torchdata import nodes

    from readers.order import Shuffled
    from readers.torch import EpochSampler, ImageDataset

    dataset = ImageDataset(_reader(job), ops(job))
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


def grain_source(job: Job) -> MakeLoader:
    import grain
    import numpy as np
    from PIL import Image

    from readers.frameworks.grain import GrainSource

    def augment(sample: dict[str, Any], rng: Any) -> dict[str, Any]:
        chance = random.Random(int(rng.integers(1 << 62)))
        top, left, height, width = job.box(*sample["image"].shape[:2], chance)
        picture = Image.fromarray(sample["image"])
        box = (left, top, left + width, top + height)
        picture = picture.resize((job.size, job.size), Image.Resampling.BILINEAR, box)
        image = np.asarray(picture)
        return {**sample, "image": image[:, ::-1] if chance.random() < 0.5 else image}

    source = GrainSource(_reader(job))
    return _grain(job, grain.MapDataset.source(source).shuffle(seed=1).random_map(augment, seed=1))


def grain_records(job: Job) -> MakeLoader:
    """Grain's own reader of ArrayRecord."""
    import cv2
    import grain

    def load(record: bytes, rng: Any) -> dict[str, Any]:
        cv2.setNumThreads(0)
        image = _image(memoryview(record)[:-4], job, random.Random(int(rng.integers(1 << 62))))
        return {"image": image, "label": int.from_bytes(record[-4:], "little")}

    source = grain.sources.ArrayRecordDataSource(os.path.join(job.output(sets.ARRAY_RECORD), "a.array_record"))
    return _grain(job, grain.MapDataset.source(source).shuffle(seed=1).random_map(load, seed=1))


def grain_dataset(job: Job) -> MakeLoader:
    import grain
    import numpy as np

    from readers.torch import ImageDataset, Place

    reader = _reader(job)
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
    """A function from (JPEG, label) to (uint8 [size, size, 3], label): decodes only the box, and resizes it with
    antialiasing."""
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


def tf_generator(job: Job) -> MakeLoader:
    import tensorflow as tf

    from readers.order import Shuffled

    reader = _reader(job)
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


ROWS = tomllib.loads(Path(__file__).with_name("pipeline.toml").read_text())
_MAKERS = (
    image_loader, image_dataset, image_folder, torchvision_io, spdl_simplejpeg, spdl_ffmpeg, ffcv, dali_file,
    dali_webdataset, dali_tfrecord, dali_external, dali_loader, litdata_chunks, lance_streaming, torchdata_threads,
    grain_records, grain_source, grain_dataset, tf_records, tf_generator,
)  # fmt: skip


def register_rows(of: str) -> None:
    """Register the rows of "pipeline" or "dali"."""
    register(ROWS[of], _MAKERS, pipeline)
