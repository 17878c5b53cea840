"""Rows of `resize_quality.py`: boxes of JPEGs, decoded and resized to squares, each by one library.

A function takes a `Task` and yields uint8 [size, size, 3] for each of its boxes. Nothing is random here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from harness import NotHere, contender
from scaled_jpeg import scaled_decode

__all__ = ["OURS", "Task", "reference"]

OURS = "ours: readers.augment"


@dataclass(frozen=True)
class Task:
    """boxes: (top, left, height, width, reduce, coarse) of each path's image, the last two as our planner allows."""

    paths: list[str]
    shapes: list[tuple[int, int]]
    boxes: list[tuple[int, int, int, int, int, bool]]
    size: int

    def items(self) -> Iterator[tuple[bytes, tuple[int, int], tuple[int, int, int, int, int, bool]]]:
        for path, shape, box in zip(self.paths, self.shapes, self.boxes, strict=True):
            with open(path, "rb") as file:
                yield file.read(), shape, box


def _pil(data: bytes) -> Any:
    import io

    from PIL import Image

    return Image.open(io.BytesIO(data)).convert("RGB")


def reference(task: Task) -> Iterator[Any]:
    """Pillow: the whole image, the box, antialiased bilinear."""
    import numpy as np
    from PIL import Image

    for data, _, (top, left, height, width, *_) in task.items():
        box = _pil(data).crop((left, top, left + width, top + height))
        yield np.asarray(box.resize((task.size, task.size), Image.Resampling.BILINEAR))


@contender(OURS, imports="torch readers.augment.cpu")
def ours(task: Task) -> Iterator[Any]:
    import torch

    from readers.augment.cpu import Renderer

    size, renderer = (task.size, task.size), Renderer()
    for data, shape, box in task.items():
        out = torch.empty((1, *size, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
        renderer.render(data, (box, size, (0, 0), (), ()), tuple(shape), out)
        yield out[0].permute(1, 2, 0).numpy()


@contender(
    f"{OURS}, never reduced",
    imports="torch readers.augment.cpu",
    note="decoded in full size, which costs more",
)
def ours_full(task: Task) -> Iterator[Any]:
    boxes = [(*box[:4], 1, False) for box in task.boxes]
    return ours(Task(task.paths, task.shapes, boxes, task.size))


def _cv2(task: Task, shrink: str, scaled: bool) -> Iterator[Any]:
    import cv2

    size = task.size
    for data, shape, box in task.items():
        image, (top, left, height, width) = scaled_decode(data, shape, box[:4], size if scaled else 0)
        method = getattr(cv2, shrink) if height > size and width > size else cv2.INTER_LINEAR
        yield cv2.resize(image[top : top + height, left : left + width], (size, size), interpolation=method)


@contender("cv2 INTER_AREA", imports="cv2 simplejpeg", note="INTER_LINEAR where it does not shrink both sides")
def cv2_area(task: Task) -> Iterator[Any]:
    return _cv2(task, "INTER_AREA", False)


@contender(
    "cv2 INTER_AREA, scaled decoding",
    imports="cv2 simplejpeg",
    note="at the smallest scale that holds the size; the box is rounded to pixels of that scale",
)
def cv2_area_scaled(task: Task) -> Iterator[Any]:
    return _cv2(task, "INTER_AREA", True)


@contender("cv2 INTER_LINEAR", imports="cv2 simplejpeg", note="not antialiased")
def cv2_linear(task: Task) -> Iterator[Any]:
    return _cv2(task, "INTER_LINEAR", False)


@contender("torchvision v2 antialias", imports="torch torchvision.transforms.v2.functional torchvision.io")
def torchvision_v2(task: Task) -> Iterator[Any]:
    import torch
    from torchvision.io import ImageReadMode, decode_image
    from torchvision.transforms.v2 import functional as F

    for data, _, (top, left, height, width, *_) in task.items():
        image = decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)
        out = F.resized_crop(image, top, left, height, width, [task.size, task.size], antialias=True)
        yield out.permute(1, 2, 0).numpy()


@contender("SPDL ffmpeg, bilinear", imports="spdl.io", note="crop and scale=bilinear as filters")
def spdl_ffmpeg(task: Task) -> Iterator[Any]:
    import spdl.io

    for path, (top, left, height, width, *_) in zip(task.paths, task.boxes, strict=True):
        # exact: the box as it is, not rounded to whole pixels of the colour planes.
        crop = f"crop={width}:{height}:{left}:{top}:exact=1"
        scale = f"scale={task.size}:{task.size}:flags=bilinear,format=pix_fmts=rgb24"
        frames = spdl.io.decode_packets(spdl.io.demux_image(path), filter_desc=f"{crop},{scale}")
        yield spdl.io.to_numpy(spdl.io.convert_frames(frames))


@contender("FFCV", python="ffcv", imports="numpy ffcv.libffcv PIL.Image", note="its resize_crop on Pillow's pixels")
def ffcv(task: Task) -> Iterator[Any]:
    import numpy as np
    from ffcv.libffcv import resize_crop

    for data, _, (top, left, height, width, *_) in task.items():
        out = np.empty((task.size, task.size, 3), np.uint8)
        resize_crop(np.array(_pil(data)), top, top + height, left, left + width, out)
        yield out


@contender("DALI CPU", python="dali", imports="numpy nvidia.dali", note="decoders.image_slice, resize (triangular)")
def dali(task: Task) -> Iterator[Any]:
    import numpy as np
    from nvidia.dali import fn, pipeline_def

    if not task.boxes:
        raise NotHere("no images")
    encoded = [np.frombuffer(data, np.uint8) for data, _, _ in task.items()]
    corners = [np.array(box[:2], np.int32) for box in task.boxes]
    sides = [np.array(box[2:4], np.int32) for box in task.boxes]

    @pipeline_def(batch_size=1, num_threads=1, device_id=None)
    def graph() -> Any:
        data, corner, side = (
            fn.external_source(values, batch=False, cycle="raise") for values in (encoded, corners, sides)
        )
        image = fn.decoders.image_slice(data, device="cpu", start=corner, shape=side, axis_names="HW")
        return fn.resize(image, size=[task.size, task.size])

    built = graph()
    built.build()
    for _ in encoded:
        (images,) = built.run()
        yield np.asarray(images.as_tensor())[0]
