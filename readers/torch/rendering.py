"""Decode and augment the images of a list together: what happens to each is planned for all of them at once.

A plan costs some two hundred microseconds in numpy, whether it is for one image or for a hundred; next to images that a
cache holds decoded that would be as much as everything else.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from readers.augment import Recipe
from readers.augment.cpu import Finish, Renderer
from readers.augment.recipe import Job
from readers.decode.orient import upright_size
from readers.errors import BadSampleError, DamagedSampleError, UnknownNameError
from readers.headers import parse_header
from readers.sample import Buffer

__all__ = ["Draw", "render_many"]

Draw = tuple[int, int, int]  # seed, epoch and position: what an image's draws follow from
Rendered = torch.Tensor | Exception
_TOGETHER = 16


def render_many(
    recipe: Recipe, finish: Finish, renderer: Renderer, draws: Sequence[Draw], images: Sequence[Buffer | Exception]
) -> list[Rendered]:
    """The result of each image, [3, height, width]; an error for a bad one, and for what is an error already."""
    results: list[Rendered] = []
    groups: dict[tuple[int, int], list[int]] = {}
    sizes: dict[int, tuple[int, int]] = {}
    for row, (image, (seed, epoch, _)) in enumerate(zip(images, draws, strict=True)):
        try:
            if isinstance(image, Exception):
                raise image
            header = parse_header(image)
        except (BadSampleError, DamagedSampleError, UnknownNameError) as error:
            results.append(error)
            continue
        results.append(BadSampleError("not rendered"))
        sizes[row] = upright_size(header.height, header.width, header.orientation)
        groups.setdefault((seed, epoch), []).append(row)
    for (seed, epoch), rows in groups.items():
        heights, widths = np.array([sizes[row] for row in rows]).T
        plan = recipe.plan(seed, epoch, np.array([draws[row][2] for row in rows]), heights, widths)
        for place, refused in plan.boxes.bad.items():
            results[rows[place]] = refused
        shapes = zip(plan.boxes.out_height.tolist(), plan.boxes.out_width.tolist(), strict=True)
        whole = zip(rows, plan.jobs(), shapes, strict=True)
        good = [task for place, task in enumerate(whole) if place not in plan.boxes.bad]
        together = 1 if recipe.out_size is None else _TOGETHER
        for start in range(0, len(good), together):
            _render(finish, renderer, good[start : start + together], images, sizes, results)
    return results


def _render(
    finish: Finish,
    renderer: Renderer,
    tasks: Sequence[tuple[int, Job, tuple[int, int]]],
    images: Sequence[Buffer | Exception],
    sizes: dict[int, tuple[int, int]],
    results: list[Rendered],
) -> None:
    """A few images of one shape."""
    shape = tasks[0][2]
    pixels = renderer.chunk(len(tasks), *shape)
    out = torch.empty((len(tasks), 3, *shape), dtype=finish.dtype)
    for (row, job, _), place, result in zip(tasks, pixels.split(1), out, strict=True):
        image = images[row]
        assert not isinstance(image, Exception)
        try:
            renderer.render(image, job, sizes[row], place)
            results[row] = result
        except BadSampleError as error:
            results[row] = error
    finish.store(pixels, [job for _, job, _ in tasks], out)
