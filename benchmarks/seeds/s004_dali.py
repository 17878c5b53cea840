"""The rows of `s004.py` in DALI, on the CPU and on a GPU, and those of this project's loader.

DALI's own graphs draw crops and colours by DALI's random numbers and operators; `DaliLoader` and `ImageLoader` by this
project's, which are the same in both.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness import NotHere, contender
from s004_sets import EXTENSIVE, JITTER, Job
from s004_torch import MakeEpoch, operations

from readers import Decode

__all__ = ["DALI_LOADER", "FORMATS", "LOADER", "SEED", "dali_row", "loader_row"]

FORMATS = ("files", "HDF5", "TFRecord", "tar")
DALI_LOADER = "ours: DaliLoader from HDF5"
LOADER = "ours: ImageLoader"
SEED = 1
_PREFETCH = 2
_NO_GPU = "needs an NVIDIA GPU"
_DALI = "numpy nvidia.dali readers.dali"


def dali_row(form: str, device: str = "cpu") -> str:
    """The name of a row."""
    return f"DALI on {'the CPU' if device == 'cpu' else 'a GPU'} from {form}"


def loader_row(form: str) -> str:
    return f"{LOADER} from {form}"


# --- DALI's graph -----------------------------------------------------------------------------------------------------
def _files(job: Job) -> tuple[Any, Any]:
    from nvidia.dali import fn

    return fn.readers.file(file_root=str(job.tree), shuffle_after_epoch=job.is_random)


def _tfrecord(job: Job) -> tuple[Any, Any]:
    from nvidia.dali import fn
    from nvidia.dali import tfrecord as tf

    image, label = "image/encoded", "image/class/label"
    features = {image: tf.FixedLenFeature((), tf.string, ""), label: tf.FixedLenFeature([1], tf.int64, -1)}
    found = fn.readers.tfrecord(
        path=job.shards("tfrecord", ".tfrecord"),
        index_path=job.shards("tfrecord", ".idx"),
        features=features,
        random_shuffle=job.is_random,
    )
    return found[image], found[label]


def _tar(job: Job) -> tuple[Any, Any]:
    from nvidia.dali import fn

    paths, indexes = job.shards("tar", ".tar"), job.shards("tar", ".idx")
    image, label = fn.readers.webdataset(
        paths=paths, index_paths=indexes, ext=["jpg", "cls"], random_shuffle=job.is_random
    )
    return image, label  # label: ASCII digits


def _hdf5(job: Job) -> tuple[Any, Any]:
    import readers
    from readers.dali import external_source

    reader = readers.open(job.require("hdf5"))
    return external_source(reader, job.batch, seed=SEED, shuffle=job.is_random)


def _recordio(job: Job) -> tuple[Any, Any]:
    from nvidia.dali import fn

    records = job.require("recordio")
    return fn.readers.mxnet(
        path=str(records / "train.rec"), index_path=str(records / "train.idx"), shuffle_after_epoch=job.is_random
    )


def _lmdb(job: Job) -> tuple[Any, Any]:
    from nvidia.dali import fn

    return fn.readers.caffe(path=str(job.require("lmdb")), random_shuffle=job.is_random)


def _coco(job: Job) -> tuple[Any, Any]:
    from nvidia.dali import fn

    image, _, label = fn.readers.coco(
        file_root=str(job.tree),
        annotations_file=str(job.require("coco.json")),
        avoid_class_remapping=True,
        shuffle_after_epoch=job.is_random,
    )
    return image, label


_READERS: dict[str, tuple[Callable[[Job], tuple[Any, Any]], str]] = {
    "files": (_files, "its file reader"),
    "TFRecord": (_tfrecord, "its reader, our shards and our index; a buffer of 1,024"),
    "tar": (_tar, "its webdataset reader, our shards and our index; a buffer of 1,024"),
    "HDF5": (_hdf5, "ExternalSource: readers.dali.external_source over our shards"),
    "MXNet RecordIO": (_recordio, "its reader, files as im2rec writes them"),
    "LMDB of Caffe": (_lmdb, "its reader; a buffer of 1,024"),
    "COCO": (_coco, "its reader: the files, and annotations in JSON"),
}


def _images(job: Job, encoded: Any, device: str) -> Any:
    """By DALI's own operators: whole images decoded, resized with antialiasing, ColorTwist on the crop, normalised."""
    from nvidia.dali import fn, types

    task, crop = job.task, {"crop_pos_x": 0.5, "crop_pos_y": 0.5}
    images = fn.decoders.image(encoded, device="cpu" if device == "cpu" else "mixed", output_type=types.RGB)
    images = fn.resize(images, resize_shorter=task.resize, subpixel_scale=False)
    if job.is_random:
        crop = {name: fn.random.uniform(range=(0.0, 1.0)) for name in crop} | {"mirror": fn.random.coin_flip()}
    if job.load == EXTENSIVE:
        # On the crop, as in the other rows: it has fewer pixels.
        images = fn.crop(images, crop=(task.crop, task.crop), **{k: v for k, v in crop.items() if k != "mirror"})
        crop = {"mirror": crop["mirror"]}
        factors = {name: fn.random.uniform(range=(1 - JITTER, 1 + JITTER)) for name in _FACTORS}
        images = fn.color_twist(images, **factors)
    return fn.crop_mirror_normalize(
        images,
        crop=(task.crop, task.crop),
        mean=[255 * value for value in task.mean],
        std=[255 * value for value in task.std],
        dtype=types.FLOAT,
        output_layout="CHW",
        rounding="truncate",  # of the middle of an odd number of pixels
        **crop,
    )


_FACTORS = ("brightness", "contrast", "saturation")


def _dali(form: str, device: str, job: Job) -> MakeEpoch:
    from nvidia.dali import Pipeline

    if device == "gpu":
        _require_gpu()
    read, _ = _READERS[form]
    pipeline = Pipeline(
        batch_size=job.batch,
        num_threads=job.workers,
        device_id=0 if device == "gpu" else None,
        prefetch_queue_depth=_PREFETCH,
    )
    with pipeline:
        encoded, labels = read(job)
        pipeline.set_outputs(_images(job, encoded, device), labels)
    endless = _run(pipeline, form == "tar")
    return lambda: itertools.islice(endless, job.count // job.batch)


def _run(pipeline: Any, are_digits: bool) -> Iterator[Any]:
    """Batches without end. Images are DALI's memory, labels int64 arrays."""
    import numpy as np

    while True:
        try:
            images, labels = pipeline.run()
        except StopIteration:
            pipeline.reset()
            continue
        if are_digits:
            found = [int(bytes(np.asarray(labels.at(i)))) for i in range(len(labels))]
        else:
            found = np.asarray(labels.as_array()).ravel()
        yield _on_device(images.as_tensor()), np.asarray(found, np.int64)


def _on_device(images: Any) -> Any:
    """An array over DALI's memory; a tensor where that is a GPU's."""
    import numpy as np

    if hasattr(images, "__array_interface__") or hasattr(images, "__array__"):
        return np.asarray(images)
    import torch

    return torch.from_dlpack(images)


# DALI's graphs have no end: what is counted as an epoch may hold the end of one and the beginning of the next.
for _form, (_, _note) in _READERS.items():
    contender(dali_row(_form), imports=_DALI, exact=False, note=_note)(functools.partial(_dali, _form, "cpu"))
for _form in FORMATS:
    contender(dali_row(_form, "gpu"), exact=False, note="as on the CPU; nvJPEG decodes")(
        functools.partial(_dali, _form, "gpu")
    )


# --- ours -------------------------------------------------------------------------------------------------------------
def _require_gpu() -> None:
    """Raises NotHere; looks for the driver's device first, which costs nothing."""
    if not Path("/dev/nvidiactl").exists():
        raise NotHere(_NO_GPU)
    import torch

    if not torch.cuda.is_available():
        raise NotHere(f"{_NO_GPU} that torch can use")


def _dali_loader(device: Any, job: Job) -> MakeEpoch:
    if device == "cuda":
        _require_gpu()
    import readers
    from readers.dali import DaliLoader, PipelineOptions

    options = PipelineOptions(device=device, threads=job.workers, prefetch=_PREFETCH)
    reader = readers.open(job.require("hdf5"))
    output = "numpy" if device == "cpu" else "torch"
    loader = DaliLoader(reader, job.batch, augment=operations(job), options=options, output=output, seed=SEED)
    return lambda: loader


def _image_loader(form: str, device: str, job: Job) -> MakeEpoch:
    if device == "cuda":
        _require_gpu()
    import readers
    from readers.loader import ImageLoader

    name = {"files": "tree", "MXNet RecordIO": "recordio", "RecordIO of InsightFace": "insightface"}.get(form)
    path = job.require(name or form.lower())
    reader = readers.open_folder(path) if form == "files" else readers.open(path)
    options = {"threads": job.workers, "decode": Decode(layout="NCHW"), "device": device}
    loader = ImageLoader(reader, job.batch, augment=operations(job), seed=SEED, **options)
    return lambda: loader


_OURS = "torch readers.loader readers.augment"
contender(DALI_LOADER, imports=_DALI, exact=True, note="our crops and colours, executed by DALI")(
    functools.partial(_dali_loader, "cpu")
)
contender("ours: DaliLoader on a GPU from HDF5", exact=True, note="as on the CPU; nvJPEG decodes")(
    functools.partial(_dali_loader, "cuda")
)
for _form, _note in {
    "files": "the tree as it is, without an index",
    "HDF5": "one process, a thread for each worker of the others",
    "TFRecord": "",
    "tar": "",
    "MXNet RecordIO": "`packer index` on the file as it is",
    "RecordIO of InsightFace": "likewise; its records without images, which DALI's reader hands out, are left out",
}.items():
    contender(loader_row(_form), imports=_OURS, exact=True, note=_note)(functools.partial(_image_loader, _form, "cpu"))
contender(f"{LOADER} on a GPU from HDF5", exact=True, note="a share of the images decoded there")(
    functools.partial(_image_loader, "HDF5", "cuda")
)
