"""Execute a plan on the CPU: decode the box, resize it, flip it, and put it into its place in a batch.

Resizing is torch's antialiased bilinear kernel for uint8: Pillow's arithmetic (within 1 of 255), and the fastest of its
quality (docs/performance.md).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from readers.augment.ops import Normalize
from readers.augment.pixels import apply_pixel_op
from readers.augment.recipe import Plan
from readers.decode import Region, Scratch, decode_image
from readers.sample import Buffer

__all__ = ["Finish", "Renderer"]

_resize_into: Any = torch.ops.aten._upsample_bilinear2d_aa.out


class Finish:
    """How values end up in a batch: dtype, order of axes and normalisation.

    planar: images are [3, height, width] in memory, not [height, width, 3].
    """

    def __init__(self, dtype: torch.dtype, planar: bool, normalize: Normalize | None) -> None:
        self.dtype, self.planar = dtype, planar
        mean, std = (normalize.mean, normalize.std) if normalize else ((0.0,) * 3, (1.0,) * 3)
        self._scale = torch.tensor([1.0 / (255.0 * s) for s in std])
        self._shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)])
        self._tables: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def store(self, image: torch.Tensor, out: torch.Tensor) -> None:
        """image: [height, width, 3] uint8, or float32 with values 0 to 255; out: [height, width, 3], strided."""
        if self.dtype == torch.uint8:
            out.copy_(image if image.dtype == torch.uint8 else image.round())
            return
        height, width, _ = image.shape
        if self.planar:
            image, out = image.permute(2, 0, 1), out.permute(2, 0, 1)
        scale, shift = self._table(height, width)
        values = torch.empty(image.shape, dtype=torch.float32)
        values.copy_(image.contiguous())
        target = out if self.dtype == torch.float32 and out.is_contiguous() else values
        torch.addcmul(shift, values, scale, out=target)
        if target is values:
            out.copy_(values)

    def _table(self, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Factors and summands as large as an image: arithmetic on equal shapes is several times faster than on
        broadcast ones."""
        key = (height, width)
        table = self._tables.get(key)
        if table is None:
            shape = (3, 1, 1) if self.planar else (1, 1, 3)
            full = (3, height, width) if self.planar else (height, width, 3)
            table = tuple(t.view(shape).expand(full).contiguous() for t in (self._scale, self._shift))  # type: ignore[assignment]
            self._tables[key] = table  # type: ignore[assignment]
        return table  # type: ignore[return-value]


class Renderer:
    """What one thread needs to turn encoded bytes into images of a batch."""

    def __init__(self, finish: Finish) -> None:
        self._finish = finish
        self._scratch = Scratch()
        self._resized = torch.empty(0, dtype=torch.uint8)

    def render(self, data: Buffer, plan: Plan, i: int, size: tuple[int, int], out: torch.Tensor) -> None:
        """Image i of the plan into out, [out_height, out_width, 3] with any strides.

        size: (height, width) of the upright image, as the plan took it. Raises BadSampleError.
        """
        boxes = plan.boxes
        if i in boxes.bad:
            raise boxes.bad[i]
        box = Region(
            int(boxes.top[i]), int(boxes.left[i]), int(boxes.height[i]), int(boxes.width[i]), int(boxes.reduce[i])
        )
        pixels = decode_image(data, box, self._scratch, size)
        resized = (int(boxes.resized_height[i]), int(boxes.resized_width[i]))
        plain = not (plan.steps or plan.hflip[i] or plan.vflip[i] or resized != (out.shape[0], out.shape[1]))
        direct = plain and out.dtype == torch.uint8 and pixels.shape[:2] != resized
        image = self._resize(pixels, resized, out if direct else None)
        if direct:
            return
        top, left = int(boxes.crop_top[i]), int(boxes.crop_left[i])
        image = image[top : top + out.shape[0], left : left + out.shape[1]]
        flipped = [axis for axis, flip in ((0, plan.vflip[i]), (1, plan.hflip[i])) if flip]
        if flipped:
            image = torch.flip(image, flipped)
        if plan.steps:
            image = _pixel_steps(image, plan, i)
        self._finish.store(image, out)

    def _resize(self, pixels: npt.NDArray[np.uint8], size: tuple[int, int], out: torch.Tensor | None) -> torch.Tensor:
        """[height, width, 3] of `size`: in `out`, in memory of this thread, or `pixels` itself."""
        if any(stride < 0 for stride in pixels.strides):
            pixels = np.ascontiguousarray(pixels)
        source = torch.from_numpy(pixels)
        if pixels.shape[:2] == size:
            return source
        if out is None:
            count = size[0] * size[1] * 3
            if self._resized.numel() < count:
                self._resized = torch.empty(count, dtype=torch.uint8)
            out = self._resized[:count].view(*size, 3)
        _resize_into(_planes(source), size, False, None, None, out=_planes(out))
        return out


def _planes(image: torch.Tensor) -> torch.Tensor:
    """[height, width, 3] seen as [1, 3, height, width]."""
    return image.permute(2, 0, 1).unsqueeze(0)


def _pixel_steps(image: torch.Tensor, plan: Plan, i: int) -> torch.Tensor:
    values = image.permute(2, 0, 1).contiguous().to(torch.float32)
    for op, parameters in plan.steps:
        values = apply_pixel_op(op, parameters[i].tolist(), values)
    return values.permute(1, 2, 0)
