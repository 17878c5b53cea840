"""Execute a plan on the CPU: decode the box, resize it, flip it, and put it into its place in a batch.

Resizing is torch's antialiased bilinear kernel for uint8: Pillow's arithmetic (within 1 of 255), and the fastest of its
quality (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from readers.augment.ops import Normalize
from readers.augment.pixels import apply_pixel_op
from readers.augment.recipe import Job
from readers.decode import Scratch, decode_image
from readers.decode.raw import lent
from readers.sample import Buffer

__all__ = ["Finish", "Renderer"]

_resize_into: Any = torch.ops.aten._upsample_bilinear2d_aa.out
# About what fits into the cache next to a core.
_GROUP_VALUES = 1 << 17


class Finish:
    """How pixels end up in a batch: flipped, normalised, in its dtype and order of axes.

    planar: images are [3, height, width] in memory, not [height, width, 3]. Threads may share it.
    """

    def __init__(self, dtype: torch.dtype, planar: bool, normalize: Normalize | None) -> None:
        self.dtype, self.planar = dtype, planar
        mean, std = (normalize.mean, normalize.std) if normalize else ((0.0,) * 3, (1.0,) * 3)
        self._scale = torch.tensor([1.0 / (255.0 * s) for s in std])
        self._shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)])
        self._tables: dict[torch.Size, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def in_place(self) -> bool:
        """Whether pixels can be made where they will stay."""
        return self.dtype == torch.uint8 and not self.planar

    def store(self, pixels: torch.Tensor, jobs: Sequence[Job], out: torch.Tensor) -> None:
        """pixels: uint8 [k, 3, height, width], channels last; out: the same shape, or `pixels` itself where in_place.

        A few images at a time: one call serves many small images, and large ones stay in the cache.
        """
        count = len(jobs)
        group = max(1, _GROUP_VALUES // max(1, pixels[0].numel())) if count else 1
        for start in range(0, count, group):
            some = slice(start, start + group)
            for job, image in zip(jobs[some], pixels[some].split(1), strict=True):
                if job.flips and not job.steps:
                    image.copy_(torch.flip(image, [axis + 2 for axis in job.flips]))
            if not self.in_place:
                self._convert(pixels[some], out[some])

    def _convert(self, pixels: torch.Tensor, out: torch.Tensor) -> None:
        if self.dtype == torch.uint8:
            out.copy_(pixels)
            return
        # In the order of memory all of this is arithmetic on flat arrays, which is several times faster.
        if self.planar:
            source, flat = pixels.contiguous(), out
        else:
            source, flat = pixels.permute(0, 2, 3, 1), out.permute(0, 2, 3, 1)
        scale, shift = self._table(flat.shape)
        values = torch.empty(flat.shape, dtype=torch.float32)
        values.copy_(source)
        if self.dtype == torch.float32:
            torch.addcmul(shift, values, scale, out=flat)
        else:
            flat.copy_(torch.addcmul(shift, values, scale, out=values))

    def _table(self, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
        """Factors and summands for every value of some images."""
        table = self._tables.get(shape)
        if table is None:
            channels = (1, 3, 1, 1) if self.planar else (1, 1, 1, 3)
            scale, shift = (values.view(channels).expand(shape).contiguous() for values in (self._scale, self._shift))
            table = self._tables[shape] = (scale, shift)
        return table


class Renderer:
    """What one thread needs to turn encoded bytes into pixels."""

    def __init__(self) -> None:
        self._scratch = Scratch()
        self._temporary = torch.empty(0, dtype=torch.uint8)
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def chunk(self, count: int, height: int, width: int) -> torch.Tensor:
        """uint8 [count, 3, height, width], channels last; valid until the next call."""
        values = count * height * width * 3
        if self._chunk.numel() < values:
            self._chunk = torch.empty(values, dtype=torch.uint8)
        return self._chunk[:values].view(count, height, width, 3).permute(0, 3, 1, 2)

    def render(self, data: Buffer, job: Job, size: tuple[int, int], out: torch.Tensor) -> None:
        """One image into out, uint8 [1, 3, out_height, out_width], channels last. A job without pixel ops is left
        unflipped: that is quicker for many images at once.

        size: (height, width) of the upright image, as the plan took it. Raises BadSampleError.
        """
        region, resized, corner, flips, steps = job
        pixels = decode_image(data, region, self._scratch, size)
        if min(pixels.strides) < 0:
            pixels = np.ascontiguousarray(pixels)
        image = torch.from_numpy(lent(pixels).transpose(2, 0, 1)[None])
        final = (out.shape[2], out.shape[3])
        if pixels.shape[:2] != resized:
            direct = resized == final and not steps
            target = out if direct else self._memory(resized)
            _resize_into(image, resized, False, None, None, out=target)
            if direct:
                return
            image = target
        if resized != final:
            top, left = corner
            image = image[:, :, top : top + final[0], left : left + final[1]]
        if steps:
            image = torch.flip(image, [axis + 2 for axis in flips]) if flips else image
            values = image[0].contiguous().to(torch.float32)
            for op, parameters in steps:
                values = apply_pixel_op(op, parameters, values)
            image = values[None].round_()
        out.copy_(image)

    def _memory(self, size: tuple[int, int]) -> torch.Tensor:
        """[1, 3, height, width] of this thread, channels last."""
        if self._temporary.shape[2:] != size:
            self._temporary = torch.empty((1, *size, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
        return self._temporary
