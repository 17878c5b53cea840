"""Rows of `gpu.py` without a loader: kernels alone, and the memory bandwidth that bounds them.

GB/s are of the bytes that must be moved. Of the fused kernel these are the pixels of the boxes once, and the batch; its
images are real ones, decoded before. Of coefficients they are those of the whole images, and the pixels of the boxes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpu_rows import MEAN, SIZE, STD, Task
from harness import contender
from machine import list_tree

__all__ = ["COEFFICIENTS", "COPY", "KERNEL"]

KERNEL, COPY = "ours: kernel alone", "limit: copy within the GPU"
COEFFICIENTS = "ours: coefficients to boxes alone"
_COPIED_BYTES = 1 << 30
_LAUNCHES = 50
# (tile, block, warps) as `readers.augment.fused.Tiling`; the first is the default.
TILINGS = (
    (16, 32, 16, 32, 4),
    (16, 32, 16, 64, 4),
    (16, 16, 16, 32, 4),
    (32, 32, 16, 32, 4),
    (32, 32, 16, 32, 8),
    (32, 32, 32, 32, 4),
    (32, 64, 16, 64, 8),
    (16, 64, 16, 64, 4),
)


def seconds_of(work: Callable[[], object]) -> float:
    """Of one call, queued many times, by the GPU's clock."""
    import torch

    for _ in range(3):
        work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(_LAUNCHES):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1000 / _LAUNCHES


@contender(COPY, imports="torch", figures=True, data=[], note="1 GiB read and written")
def copy(task: Task) -> dict[str, Any]:
    import torch

    task.cuda()
    source = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return {"gb_s": 2 * _COPIED_BYTES / seconds_of(lambda: target.copy_(source)) / 1e9}


@contender(
    KERNEL, imports="torch triton", figures=True, data=["tree"], note="boxes of one batch, float16, channels last"
)
def kernel(task: Task) -> dict[str, Any]:
    import numpy as np
    import torch

    from readers.augment import Normalize, RandomHorizontalFlip, RandomResizedCrop, Recipe
    from readers.augment.fused import BatchRenderer
    from readers.decode import decode_image
    from readers.decode.device import Picture

    task.cuda()
    device = torch.device("cuda", 0)
    pictures = []
    for path, _ in list_tree(task.tree)[: task.batch]:
        with open(path, "rb") as file:
            pixels = np.ascontiguousarray(decode_image(file.read()).transpose(2, 0, 1))
        pictures.append(Picture(torch.from_numpy(pixels).to(device)))
    sizes = np.array([picture.size for picture in pictures])
    recipe = Recipe([RandomResizedCrop(SIZE), RandomHorizontalFlip(), Normalize(MEAN, STD)])
    jobs = recipe.plan(0, 0, np.arange(len(pictures)), sizes[:, 0], sizes[:, 1]).jobs()
    # What must be read and written at least: the pixels of the boxes once, and the batch.
    moved = sum(3 * job[0][2] * job[0][3] for job in jobs) + len(jobs) * 3 * SIZE * SIZE * 2
    figures: dict[str, Any] = {}
    for tiling in TILINGS:
        renderer = BatchRenderer(
            device, dtype=torch.float16, normalize=recipe.normalize, engine="triton", tiling=tiling
        )
        renderer.render(pictures, jobs, (SIZE, SIZE))
        out = torch.empty((len(jobs), 3, SIZE, SIZE), dtype=torch.float16, device=device)
        out = out.contiguous(memory_format=torch.channels_last)
        launch = renderer.prepared(pictures, jobs, out)  # the table is uploaded before the clock
        seconds = seconds_of(launch)
        figures["gb_s" if tiling == TILINGS[0] else f"gb_s {tiling}"] = moved / seconds / 1e9
        if tiling == TILINGS[0]:
            figures["images_s"] = len(jobs) / seconds
    return figures


@contender(
    COEFFICIENTS,
    imports="torch triton",
    figures=True,
    data=["tree"],
    note="boxes of one batch, their tables and the wait for the device included; the upload apart",
)
def coefficients(task: Task) -> dict[str, Any]:
    import numpy as np
    import torch

    from readers.augment import RandomResizedCrop, Recipe
    from readers.coefficients import encode
    from readers.coefficients.device.decoder import CoefficientDecoder, vetted_shape
    from readers.decode import Region

    task.cuda()
    images = []
    for path, _ in list_tree(task.tree):
        with open(path, "rb") as file:
            kept = encode(file.read())
        if kept is not None:
            images.append(kept)
        if len(images) == task.batch:
            break
    shapes = [vetted_shape(image) for image in images]
    sizes = np.array([shape.header.upright_size for shape in shapes])
    jobs = Recipe([RandomResizedCrop(SIZE)]).plan(0, 0, np.arange(len(images)), sizes[:, 0], sizes[:, 1]).jobs()
    regions = [Region(*job[0]) for job in jobs]
    decoder = CoefficientDecoder(torch.device("cuda", 0))
    uploaded = decoder.upload(images, shapes)
    found = decoder.decode(uploaded, regions)
    moved = uploaded.data.numel() + sum(picture.pixels.numel() for picture in found)  # type: ignore[union-attr]
    seconds = seconds_of(lambda: decoder.decode(uploaded, regions))
    copying = seconds_of(lambda: decoder.upload(images, shapes))
    return {
        "images_s": len(images) / seconds,
        "gb_s": moved / seconds / 1e9,
        "images_s uploaded": len(images) / copying,
        "gb_s uploaded": uploaded.data.numel() / copying / 1e9,
    }
