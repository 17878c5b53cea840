"""Peers in `pipeline.py` with loaders of their own: SPDL's threads, FFCV, DALI on the CPU."""

from __future__ import annotations

import glob
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pipeline_sets as sets
from machine import list_tree
from pipeline_job import Job, MakeLoader, pipeline
from pipeline_peers import normalized
from scaled_jpeg import scaled_decode

__all__ = ["FFCV", "FFCV_SHORT", "dali_graph"]

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
