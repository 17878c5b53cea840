"""Execute a plan on decoded images on a device: boxes, flips, pixel ops, normalisation, dtype and memory layout.

The jobs are the same as in `readers.augment.cpu`, so the same seed gives the same crops. Boxes, flips and normalisation
are a single launch of a Triton kernel (`readers.augment.kernel`). Pixel ops follow as torch operations on the whole
batch, and then normalisation as well. Pixel ops before a crop or resize are torch operations on one image at a time,
because sizes differ; the kernel continues with their results. Without Triton, and for bicubic resizes, which the kernel
does not support, torch renders the boxes, too, one image at a time. On a GPU it resizes floats, which are rounded once
and not after each pass. An installed Triton does not always run: on first use it needs a C compiler and the headers of
Python. So "auto" first renders an image of one pixel (`triton_fault`).

Values differ by at most 1 of 255 from those of the CPU if both decode the whole image. If the CPU decodes a JPEG at
1/2, 1/4 or 1/8, or with coarse colours, that difference adds to it (docs/training.md).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
import torch.nn.functional as F

from cache.errors import install_command
from cache.messages import shortened
from readers.augment.compose import Moved, fit_of
from readers.augment.cpu import box_of, render_pass
from readers.augment.geometry import Change, Job, Pass
from readers.augment.ops.base import Interpolation, Rows, map_of_halves, window
from readers.augment.ops.color import Normalize, channel_factors
from readers.decode.device import Picture, layout, upright_tensor
from readers.decode.region import Region

Engine: TypeAlias = Literal["auto", "triton", "torch"]
# (rows of a tile, columns of a tile, rows of a block, columns of a block, warps)
Tiling: TypeAlias = tuple[int, int, int, int, int]
TILING: Tiling = (16, 32, 16, 32, 4)
_MAX_EXTENT = 1 << 31
_COMPILERS = ("gcc", "clang", "cc")  # in Triton's search order, after $CC
_NO_COMPILER = " (there is no C compiler here: install gcc, or name one in CC)"


def triton_fault(device: torch.device) -> str:
    """Why the kernel cannot be used on this device; "" if it renders an image of one pixel there correctly."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton needs a GPU, or TRITON_INTERPRET=1"
    if importlib.util.find_spec("triton") is None:
        return f"Triton is not installed: run  {install_command('triton')}"
    pixel = torch.tensor([[[40]], [[80]], [[120]]], dtype=torch.uint8)
    job = Job(Pass(Region(0, 0, 1, 1), (1, 1), (0, 0), (), (), (1, 1)))
    try:
        renderer = BatchRenderer(device, dtype=torch.uint8, engine="triton")
        made = renderer.render([Picture(pixel.to(device))], [job], (1, 1))[0].cpu()
    except Exception as error:  # errors of the compilers, the driver and the dynamic linker pass through Triton
        compiler = "" if shutil.which(os.environ.get("CC", "")) or any(map(shutil.which, _COMPILERS)) else _NO_COMPILER
        return f"Triton's first kernel fails{compiler}: {type(error).__name__}: {shortened(str(error).strip(), 300)}"
    return "" if torch.equal(made, pixel) else f"Triton's first kernel made {made.tolist()} of {pixel.tolist()}"


class BatchRenderer:
    """Renders decoded images to batches on one device; for one thread at a time.

    dtype: uint8, or float32, float16, bfloat16 in 0..1 or normalised. planar: images are [3, height, width] in
    memory, not [height, width, 3]. engine: renders the boxes; "auto" is Triton if it works and the resize is not
    bicubic. `fault` is the reason if Triton does not work. interpolation: of the resize, by default bilinear.

    Raises MissingExtraError for "triton" without triton, ValueError for "triton" with bicubic, and for other engines.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        dtype: torch.dtype,
        planar: bool = False,
        normalize: Normalize | None = None,
        engine: Engine = "auto",
        tiling: Tiling = TILING,
        interpolation: Interpolation | None = None,
    ) -> None:
        if engine not in get_args(Engine):
            raise ValueError(f"engine is one of {', '.join(get_args(Engine))}, not {engine!r}")
        self.device, self.dtype, self.planar = device, dtype, planar
        self._filter = interpolation or "bilinear"
        linear = self._filter == "bilinear"
        if engine == "triton" and not linear:
            raise ValueError(
                'the Triton kernel resizes bilinearly only: use engine="torch" for interpolation="bicubic"'
            )
        self.fault = triton_fault(device) if engine == "auto" and linear else ""
        self.engine = ("torch" if self.fault or not linear else "triton") if engine == "auto" else engine
        self._factors = torch.tensor(channel_factors(normalize)).to(device)
        self._tiling = tiling
        self._kernel: Any = None
        if self.engine == "triton":
            from readers.augment.kernel import render_tiles

            self._kernel = render_tiles

    def render(self, pictures: Sequence[Picture], jobs: Sequence[Job], size: tuple[int, int]) -> torch.Tensor:
        """The batch, [n, 3, height, width] on the device, channels last in memory unless planar.

        pictures: on the device. jobs: one for each picture, with a box inside the upright picture. Boxes are used at
        full size, even if `reduce` allows a smaller scale. size: (height, width) of all results.

        Raises ValueError for a box outside its picture.
        """
        _check(pictures, jobs)
        if any(job.before for job in jobs):
            moved = {} if self._kernel is None else self._moved(pictures, jobs)
            both = list(zip(pictures, jobs, strict=True))
            made = [moved.get(i) or (self._passed(*pair) if pair[1].before else pair) for i, pair in enumerate(both)]
            pictures, jobs = zip(*made, strict=True)
        common = jobs[0].last.steps if jobs else ()
        steps = [(op, [job.last.steps[k][1] for job in jobs]) for k, (op, _) in enumerate(common)]
        whole = self._kernel is not None and not steps
        out = self._empty(len(jobs), size, self.dtype if whole else torch.uint8)
        if not out.numel():
            return out.to(self.dtype)
        if self._kernel is None:
            self._boxes_by_torch(pictures, jobs, out)
        else:
            self.prepared(pictures, jobs, out)()
        return out if whole else self._finish(out, steps)

    def _empty(self, count: int, size: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        order = torch.contiguous_format if self.planar else torch.channels_last
        return torch.empty((count, 3, *size), dtype=dtype, device=self.device, memory_format=order)

    def prepared(self, pictures: Sequence[Picture], jobs: Sequence[Job], out: torch.Tensor) -> Callable[[], None]:
        """A function that launches the kernel once, into `out`, on the current stream at the time of its call.

        Useful for measurements and repeated work. Keep `pictures` and `out` until the kernel has run. Needs Triton.
        """
        table = torch.from_numpy(_table(pictures, jobs))
        if self.device.type == "cuda":
            table = table.pin_memory().to(self.device, non_blocking=True)
        tile_y, tile_x, rows, columns, warps = self._tiling
        count, _, height, width = out.shape
        grid = (count * -(-height // tile_y) * -(-width // tile_x),)

        def launch() -> None:
            with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                self._kernel[grid](
                    table,
                    out,
                    self._factors,
                    height,
                    width,
                    *out.stride(),
                    FLOAT=out.dtype != torch.uint8,
                    TILE_Y=tile_y,
                    TILE_X=tile_x,
                    ROWS=rows,
                    COLUMNS=columns,
                    num_warps=warps,
                    enable_fp_fusion=True,
                )

        return launch

    def _boxes_by_torch(self, pictures: Sequence[Picture], jobs: Sequence[Job], out: torch.Tensor) -> None:
        """Crop, resize and flip each picture by its job into out, uint8 [n, 3, height, width]. On the CPU, the pixels
        are those of `readers.augment.cpu`."""
        size = (out.shape[2], out.shape[3])
        for picture, job, place in zip(pictures, jobs, out, strict=True):
            region, resized, corner, flips, *_ = job.last
            image = box_of(upright_tensor(picture)[None], region)
            if resized != image.shape[2:]:
                image = self._resized(image, resized)
            if resized != size or corner != (0, 0):
                image = window(image, corner, size)
            place.copy_(torch.flip(image, flips)[0] if flips else image[0])

    def _resized(self, image: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        """The resized image [1, 3, *size]: uint8 on the CPU, else float32 with values rounded to 0..255."""
        exact = self.device.type == "cpu"
        values = image if exact else image.to(torch.float32)
        values = F.interpolate(values, size, mode=self._filter, antialias=True, align_corners=False)
        return values if exact else values.round_().clamp_(0, 255)

    def _moved(self, pictures: Sequence[Picture], jobs: Sequence[Job]) -> dict[int, tuple[Picture, Job]]:
        """`_passed` in a single launch, for the images whose parts before the last are one part with a single move."""
        from readers.augment.kernel import move_tiles

        made: dict[int, tuple[Picture, Job]] = {}
        rows, maps = [], []
        for i, (picture, (last, before)) in enumerate(zip(pictures, jobs, strict=True)):
            if len(before) != 1 or len(before[0].steps) != 1 or not isinstance(before[0].steps[0][0], Moved):
                continue
            region, size, corner, flips, ((op, matrix),), crop = before[0]
            if not (region.height, region.width) == size == crop or corner != (0, 0):
                continue
            by, grid = map_of_halves(matrix, size, last.region, fit_of(before[0], last, self._filter))
            out = torch.empty((3, *grid[4:]), dtype=torch.uint8, device=self.device)
            how = 3 in flips, 2 in flips, op.sampling == "nearest"
            rows.append((*_box(picture, region), out.data_ptr(), *grid, *how))
            maps.append(by)
            made[i] = Picture(out), Job(last._replace(region=Region(0, 0, *out.shape[1:])))
        if rows:
            tile_y, tile_x, *_, warps = self._tiling
            tiles = max(-(-height // tile_y) * -(-width // tile_x) for *_, height, width, _, _, _ in rows)
            table = torch.tensor(rows, dtype=torch.int64).to(self.device, non_blocking=True)
            with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                move_tiles[(len(rows) * tiles,)](
                    table, torch.tensor(maps).to(self.device), tiles, TILE_Y=tile_y, TILE_X=tile_x, num_warps=warps
                )
        return made

    def _passed(self, picture: Picture, job: Job) -> tuple[Picture, Job]:
        """The result of all parts before the last for a picture, on its device, and the job that remains."""
        image = box_of(upright_tensor(picture)[None], job.first.region)
        for made, then in zip(job.before, (*job.before, job.last)[1:], strict=True):
            image = render_pass(image, made, then, self._resized, self._filter)
        region = Region(0, 0, image.shape[2], image.shape[3])
        return Picture(image[0]), Job(job.last._replace(region=region))

    def _finish(self, pixels: torch.Tensor, steps: Sequence[tuple[Change, Rows]]) -> torch.Tensor:
        """Apply pixel ops, normalisation and dtype to rendered boxes, uint8 [n, 3, height, width]."""
        if not steps and self.dtype == torch.uint8:
            return pixels
        values = pixels.to(torch.float32)
        for op, rows in steps:
            values = op.apply(values, rows)
        if steps:
            values = values.round_()
        if self.dtype != torch.uint8:
            scale, shift = self._factors.view(2, 1, 3, 1, 1)
            values = torch.addcmul(shift, values, scale)
        order = torch.contiguous_format if self.planar else torch.channels_last
        return values.to(self.dtype).contiguous(memory_format=order)


def _check(pictures: Sequence[Picture], jobs: Sequence[Job]) -> None:
    """Raise ValueError for a box outside its picture, which would read other memory, and for other shapes or dtypes."""
    if len(pictures) != len(jobs):
        raise ValueError(f"{len(pictures)} pictures for {len(jobs)} jobs")
    for i, (picture, job) in enumerate(zip(pictures, jobs, strict=True)):
        top, left, height, width, *_ = job.first.region
        pixels = picture.pixels
        if pixels.dtype != torch.uint8 or pixels.dim() != 3 or pixels.shape[0] != 3:
            raise ValueError(f"picture {i}: expected uint8 [3, height, width], found {pixels.dtype} {pixels.shape}")
        seen = picture.size
        if min(top, left) < 0 or min(height, width) < 1 or top + height > seen[0] or left + width > seen[1]:
            raise ValueError(f"picture {i}: box {(top, left, height, width)} is not inside its {seen} pixels")


def _table(pictures: Sequence[Picture], jobs: Sequence[Job]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The table for `render_tiles`, int64 [n, 12]; see `readers.augment.kernel`."""
    rows = [
        (*_box(picture, made.region), *made.resized, *made.corner, 3 in made.flips, 2 in made.flips)
        for picture, (made, _) in zip(pictures, jobs, strict=True)
    ]
    return np.array(rows, np.int64)


def _box(picture: Picture, region: Region) -> tuple[int, ...]:
    top, left, height, width, _, _ = region
    address, row, column, channel = layout(picture)
    if height * abs(row) + width * abs(column) >= _MAX_EXTENT:
        raise ValueError(f"a picture of steps {row} and {column} is spread too widely in memory; make it contiguous")
    return address + top * row + left * column, row, column, channel, height, width
