"""Quality: the difference between each library's resizing and Pillow's antialiased bilinear, on the same boxes.

    python benchmarks/resize_quality.py --tree FOLDER --work DIR [--images 200] [--python ffcv=PATH] …

Our planner draws the boxes of RandomResizedCrop at each target size; for small targets our decoder reads some boxes at
1/2, 1/4 or 1/8. Figures are mean absolute differences on the scale 0 to 255, over all values of all images. Only JPEGs
of three components without an EXIF orientation are used.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import REPOSITORY, Benchmark, Contender, NotHere, contender, main
from machine import files_below
from pipeline_job import scaled_decode
from report import Claim, Column

# Rows of `resize_quality.py`: one library each that decodes boxes of JPEGs and resizes them to squares.
#
# A function takes a `Task` and yields uint8 [size, size, 3] for each of its boxes. The rows draw no random numbers.


OURS = "ours: readers.augment"


@dataclass(frozen=True)
class Task:
    """boxes: (top, left, height, width, reduce, coarse) of each path's image; reduce and coarse from our planner."""

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
    from readers.augment.geometry import Job, Pass
    from readers.decode import Region

    size, renderer = (task.size, task.size), Renderer()
    for data, shape, box in task.items():
        out = torch.empty((1, *size, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
        renderer.render(data, Job(Pass(Region(*box), size, (0, 0), (), (), size)), tuple(shape), out)
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


for _name, _shrink, _scaled, _note in (
    ("cv2 INTER_AREA", "INTER_AREA", False, "INTER_LINEAR where it does not shrink both sides"),
    ("cv2 INTER_AREA, scaled decoding", "INTER_AREA", True,
     "at the smallest scale that holds the size; the box is rounded to pixels of that scale"),
    ("cv2 INTER_LINEAR", "INTER_LINEAR", False, "not antialiased"),
):  # fmt: skip
    contender(_name, imports="cv2 simplejpeg", note=_note)(functools.partial(_cv2, shrink=_shrink, scaled=_scaled))


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
        # exact: do not round the box to whole pixels of the colour planes.
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


SIZES = (224, 96, 64)
_SEED = 1


def measure(chosen: Contender, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one library at every size: the mean difference, and the largest difference of an image."""
    import numpy as np

    figures: dict[str, Any] = {}
    for size in SIZES:
        place = _place(arguments, size)
        task = Task(**json.loads(place.with_suffix(".json").read_text()))
        expected = np.load(place.with_suffix(".npy"), mmap_mode="r")
        results = np.stack([np.array(image) for image in chosen.function(task)])
        by_image = np.abs(results.astype(np.int16) - expected).mean(axis=(1, 2, 3))
        figures[f"difference_{size}"] = float(by_image.mean())
        figures[f"worst_{size}"] = float(by_image.max())
        if chosen.name == OURS:
            figures[f"reduced_{size}"] = sum(box[4] > 1 for box in task.boxes)
    return figures


def _place(arguments: argparse.Namespace, size: int) -> Path:
    return Path(arguments.work) / f"boxes-{size}-of-{arguments.images}"


def before(chosen: Contender, arguments: argparse.Namespace) -> None:
    """Draw the boxes, and resize them with Pillow, once."""
    for size in SIZES:
        place = _place(arguments, size)
        if not place.with_suffix(".json").exists():
            _prepare(place, arguments, size)


def _prepare(place: Path, arguments: argparse.Namespace, size: int) -> None:
    if str(REPOSITORY) not in sys.path:
        sys.path.append(str(REPOSITORY))
    import numpy as np

    from readers.augment import RandomResizedCrop, Recipe
    from readers.headers import parse_header

    paths, shapes = [], []
    for path in files_below(arguments.tree):
        header = parse_header(Path(path).read_bytes())
        if header.media == "jpeg" and header.components == 3 and header.orientation == 1:
            paths.append(path)
            shapes.append((header.height, header.width))
        if len(paths) == arguments.images:
            break
    heights, widths = np.array(shapes, np.int64).T
    recipe = Recipe([RandomResizedCrop(size)])
    jobs = recipe.plan(_SEED, 0, np.arange(len(paths)), heights, widths).jobs()
    task = Task(paths, shapes, [job.last.region for job in jobs], size)
    place.parent.mkdir(parents=True, exist_ok=True)
    np.save(place.with_suffix(".npy"), np.stack(list(reference(task))))
    place.with_suffix(".json").write_text(json.dumps(vars(task)))


BENCHMARK = Benchmark(
    title="Resizing, difference from Pillow's antialiased bilinear",
    columns=(
        *(Column(f"difference_{size}", f"to {size}: mean", "{:.2f}") for size in SIZES),
        *(Column(f"worst_{size}", f"{size}: worst image", "{:.2f}") for size in SIZES),
        *(Column(f"reduced_{size}", f"{size}: boxes reduced") for size in SIZES),
    ),
    key=f"difference_{SIZES[-1]}",
    limits=(),
    measure=measure,
    before=before,
    less_is_better=True,
    claims=tuple(Claim(OURS, f"difference_{size}", at_most=1.5) for size in SIZES),
)


if __name__ == "__main__":
    main(
        BENCHMARK,
        __doc__,
        tree="any folder of JPEG files, at any depth",
        work="folder for the boxes and Pillow's results",
        images=(200, "how many"),
        rounds=1,
    )
