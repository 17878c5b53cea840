"""Other frameworks in `pipeline.py`, over our sets: torchdata's threads, Grain (JAX) and tf.data."""

from __future__ import annotations

import random
from typing import Any

import pipeline_sets as sets
from pipeline_job import Job, MakeLoader, pipeline
from pipeline_rows import ops

__all__: list[str] = []

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
