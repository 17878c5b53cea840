"""Execute a plan on the CPU: decode the box, resize it, flip it, and put it into its place in a batch.

Resizing is torch's antialiased bilinear kernel for uint8: Pillow's arithmetic (within 1 of 255), and the fastest of its
quality (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from readers.augment.ops import Normalize
from readers.augment.pixels import apply_pixel_op
from readers.augment.recipe import Job
from readers.augment.stack import MAX_STACK_BYTES, Stack, alike
from readers.decode import Scratch, decode_image
from readers.decode.raw import lent
from readers.errors import BadSampleError
from readers.sample import Buffer

__all__ = ["Finish", "Renderer"]

_resize_into: Any = torch.ops.aten._upsample_bilinear2d_aa.out
# About what fits into the cache next to a core.
_GROUP_VALUES = 1 << 18


class Finish:
    """How pixels end up in a batch: flipped, normalised, in its dtype and order of axes.

    planar: images are [3, height, width] in memory, not [height, width, 3]. Threads may share it.
    """

    def __init__(self, dtype: torch.dtype, planar: bool, normalize: Normalize | None) -> None:
        self.dtype, self.planar = dtype, planar
        mean, std = (normalize.mean, normalize.std) if normalize else ((0.0,) * 3, (1.0,) * 3)
        self._scale = torch.tensor([1.0 / (255.0 * s) for s in std])
        self._shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)])
        self._rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def in_place(self) -> bool:
        """Whether pixels can be made where they will stay."""
        return self.dtype == torch.uint8 and not self.planar

    def store(self, pixels: torch.Tensor, rows: Sequence[torch.Tensor], jobs: Sequence[Job], out: torch.Tensor) -> None:
        """pixels: uint8 [k, 3, height, width], channels last; rows: `pixels` by image, [1, 3, height, width] each; out:
        the same shape as pixels, or `pixels` itself where in_place.

        A few images at a time: one call serves many small images, and large ones stay in the cache.
        """
        count = len(jobs)
        group = max(1, _GROUP_VALUES // max(1, pixels[0].numel())) if count else 1
        for start in range(0, count, group):
            some = slice(start, start + group)
            _flip(rows[some], jobs[some])
            if not self.in_place:
                self._convert(pixels[some], out[some])

    def _convert(self, pixels: torch.Tensor, out: torch.Tensor) -> None:
        if self.dtype == torch.uint8:
            out.copy_(pixels)
            return
        width = out.shape[3]
        if self.planar:
            source, flat = pixels.contiguous(), out
        else:
            source, flat = (batch.permute(0, 2, 3, 1).view(-1, width * 3) for batch in (pixels, out))
        values = flat if self.dtype == torch.float32 else torch.empty(flat.shape, dtype=torch.float32)
        values.copy_(source)
        if self.planar:
            values.mul_(self._scale.view(3, 1, 1)).add_(self._shift.view(3, 1, 1))
        else:
            # Factors for a whole row: three of them, repeated by a broadcast, would cost several times as much.
            scale, shift = self._row(width)
            torch.addcmul(shift, values, scale, out=values)
        if values is not flat:
            flat.copy_(values)

    def _row(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Factors and summands for the values of a row of pixels."""
        if width not in self._rows:
            self._rows[width] = (self._scale.repeat(width), self._shift.repeat(width))
        return self._rows[width]


def _flip(rows: Sequence[torch.Tensor], jobs: Sequence[Job]) -> None:
    """Flip images in place, those with the same flips in one go. Jobs with pixel ops have done it already."""
    for flips in {job[3] for job in jobs} - {()}:
        images = [row for row, job in zip(rows, jobs, strict=True) if job[3] == flips and not job[4]]
        if len(images) == 1:
            images[0].copy_(torch.flip(images[0], flips))
        elif images:
            torch._foreach_copy_(images, torch.flip(torch.cat(images), flips).unsafe_split(1))


class Renderer:
    """What one thread needs to turn encoded bytes into pixels."""

    def __init__(self) -> None:
        self._scratch = Scratch()
        self._temporary = torch.empty(0, dtype=torch.uint8)
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._stack: Stack | None = None

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
        self._place(decode_image(data, job[0], self._scratch, size), job, out)

    def render_alike(
        self,
        data: Sequence[Buffer | Exception],
        jobs: Sequence[Job],
        sizes: Sequence[tuple[int, int]],
        out: torch.Tensor,
    ) -> bool:
        """The same for n images, out [n, 3, out_height, out_width], if one call can resize several of them.

        False, with nothing in `out` that counts, where they differ, are large, or one of them cannot be decoded.
        """
        if not alike(jobs, sizes):
            return False
        at_once = min(len(data), MAX_STACK_BYTES // max(1, sizes[0][0] * sizes[0][1] * 3))
        if at_once < 2:
            return False
        if self._stack is None or self._stack.size != sizes[0] or self._stack.count < at_once:
            self._stack = Stack(at_once, sizes[0])
        for start in range(0, len(data), at_once):
            some = slice(start, start + at_once)
            if not self._render_stacked(data[some], jobs[some], self._stack, out[some]):
                return False
        return True

    def _render_stacked(
        self, data: Sequence[Buffer | Exception], jobs: Sequence[Job], stack: Stack, out: torch.Tensor
    ) -> bool:
        region, resized, _, _, _ = jobs[0]
        images = []
        try:
            for some, slot in zip(data, stack.slots, strict=False):
                if isinstance(some, Exception):
                    return False
                images.append(decode_image(some, region, slot, stack.size))
        except BadSampleError:
            return False
        together = stack.together(images) if resized == (out.shape[2], out.shape[3]) else None
        if together is None:
            for image, job, place in zip(images, jobs, out.split(1), strict=True):
                self._place(image, job, place)
            return True
        pixels = torch.from_numpy(together).permute(0, 3, 1, 2)
        if pixels.shape[2:] == resized:
            out.copy_(pixels)
        else:
            _resize_into(pixels, resized, False, None, None, out=out)
        return True

    def _place(self, pixels: npt.NDArray[np.uint8], job: Job, out: torch.Tensor) -> None:
        """Resize and crop decoded pixels, apply what comes after, and put the result into `out`."""
        _, resized, corner, flips, steps = job
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
            image = torch.flip(image, flips) if flips else image
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
