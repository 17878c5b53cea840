"""Execute a plan on the CPU: decode the box, resize it, flip it, and store it in its row of a batch.

Where ops on pixels come before a crop or resize, an image goes through several such passes
(`readers.augment.geometry`), each on the result of the one before it.

Resizing is torch's antialiased kernels for uint8: Pillow's arithmetic (within 1 of 255), and the fastest of its quality
(docs/performance.md). Images of one size are decoded side by side, so that one call resizes them all: a call of torch
costs some 10 µs and releases the interpreter's lock twice, as much as a tenth of a small image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import as_strided

from cache.errors import BadSampleError
from readers.augment.geometry import Job, Pass
from readers.augment.ops.base import Interpolation, Op, window
from readers.augment.ops.color import Normalize, channel_factors
from readers.decode import Scratch, decode_image
from readers.decode.region import lent
from readers.sample import Buffer

__all__ = ["MAX_STACK_BYTES", "Finish", "Renderer", "Stack", "alike", "apply_steps", "box_of", "render_pass"]

MAX_STACK_BYTES = 4 << 20  # larger images gain nothing: decoding takes far longer than a call
_resize_into: Any = torch.ops.aten._upsample_bilinear2d_aa.out
_resize_bicubic_into: Any = torch.ops.aten._upsample_bicubic2d_aa.out
# About what fits into the cache next to a core.
_GROUP_VALUES = 1 << 18


class Finish:
    """How pixels end up in a batch: flipped, normalised, in its dtype and order of axes.

    planar: images are [3, height, width] in memory, not [height, width, 3]. Threads may share it.
    """

    def __init__(self, dtype: torch.dtype, planar: bool, normalize: Normalize | None) -> None:
        self.dtype, self.planar = dtype, planar
        self._scale, self._shift = torch.tensor(channel_factors(normalize))
        self._rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def in_place(self) -> bool:
        """Whether pixels can be made in the batch itself."""
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
    """Flip images in place, those with the same flips together. Jobs with pixel ops have been flipped already."""
    for flips in {job[3] for job in jobs} - {()}:
        images = [row for row, job in zip(rows, jobs, strict=True) if job[3] == flips and not job[4]]
        if len(images) == 1:
            images[0].copy_(torch.flip(images[0], flips))
        elif images:
            torch._foreach_copy_(images, torch.flip(torch.cat(images), flips).unsafe_split(1))


class Renderer:
    """Encoded bytes to pixels, for one thread. interpolation: of the resize of its jobs. compiled: see `decode_image`.

    lap: called with the name of a stage when it has ended, of an image or of several that are treated together:
        "decode", "resize", "augment"; None where nobody wants to know.
    """

    def __init__(self, interpolation: Interpolation | None = None, *, compiled: bool = False) -> None:
        self._bicubic, self._compiled = interpolation == "bicubic", compiled
        self._scratch = Scratch()
        self._temporary = torch.empty(0, dtype=torch.uint8)
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._stack: Stack | None = None
        self.lap: Callable[[str], None] | None = None

    def chunk(self, count: int, height: int, width: int) -> torch.Tensor:
        """uint8 [count, 3, height, width], channels last; valid until the next call."""
        return self.chunks([(count, 3, height, width)])[0]

    def chunks(self, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """The same for several of these shapes, [count, 3, height, width], at once."""
        values = sum(map(math.prod, shapes))
        if self._chunk.numel() < values:
            self._chunk = torch.empty(values, dtype=torch.uint8)
        chunks, start = [], 0
        for shape in shapes:
            count, channels, height, width = shape
            part = self._chunk[start : start + math.prod(shape)]
            chunks.append(part.view(count, height, width, channels).permute(0, 3, 1, 2))
            start += math.prod(shape)
        return chunks

    def render(self, data: Buffer, job: Job, size: tuple[int, int], out: torch.Tensor) -> None:
        """One image into out, uint8 [1, 3, out_height, out_width], channels last. A job without pixel ops is left
        unflipped: that is quicker for many images at once.

        size: (height, width) of the upright image, as the plan took it. Raises BadSampleError.
        """
        earlier = job[5]
        region = earlier[0][0] if earlier else job[0]
        image = _image(decode_image(data, region, self._scratch, size, compiled=self._compiled))
        if self.lap is not None:
            self.lap("decode")
        for number, made in enumerate(earlier):
            image = render_pass(image if not number else box_of(image, made[0]), made, self._resized)
            if self.lap is not None:
                self.lap("augment")
        self._store(box_of(image, job[0]) if earlier else image, job, out)

    def render_alike(
        self,
        data: Sequence[Buffer | Exception],
        jobs: Sequence[Job],
        sizes: Sequence[tuple[int, int]],
        out: torch.Tensor,
    ) -> bool:
        """The same for n images, out [n, 3, out_height, out_width], if one call can resize several of them.

        False, with undefined contents of `out`, where they differ, are large, or one of them cannot be decoded.
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
        region, resized, corner, *_ = jobs[0]
        images = []
        try:
            for some, slot in zip(data, stack.slots, strict=False):
                if isinstance(some, Exception):
                    return False
                images.append(decode_image(some, region, slot, stack.size, compiled=self._compiled))
        except BadSampleError:
            return False
        if self.lap is not None:
            self.lap("decode")
        whole = resized == (out.shape[2], out.shape[3]) and corner == (0, 0)
        together = stack.together(images) if whole else None
        if together is None:
            for image, job, place in zip(images, jobs, out.split(1), strict=True):
                self._store(_image(image), job, place)
            return True
        pixels = torch.from_numpy(together).permute(0, 3, 1, 2)
        if pixels.shape[2:] == resized:
            out.copy_(pixels)
            if self.lap is not None:
                self.lap("augment")
        else:
            self._resize(pixels, resized, out)
        return True

    def _store(self, image: torch.Tensor, job: Job, out: torch.Tensor) -> None:
        """Resize and crop an image, uint8 [1, 3, height, width], apply the pixel ops, and store the result in `out`."""
        _, resized, corner, flips, steps, _ = job
        final = (out.shape[2], out.shape[3])
        cropped = resized != final or corner != (0, 0)
        if image.shape[2:] != resized:
            direct = not cropped and not steps
            target = out if direct else self._memory(resized)
            self._resize(image, resized, target)
            if direct:
                return
            image = target
        if cropped:
            image = window(image, corner, final)
        if steps:
            image = apply_steps(torch.flip(image, flips) if flips else image, steps)
        out.copy_(image)
        if self.lap is not None:
            self.lap("augment")

    def _resize(self, image: torch.Tensor, size: tuple[int, int], out: torch.Tensor) -> None:
        into = _resize_bicubic_into if self._bicubic else _resize_into
        into(image, size, False, None, None, out=out)
        if self.lap is not None:
            self.lap("resize")

    def _resized(self, image: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        out = torch.empty((1, *size, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
        self._resize(image, size, out)
        return out

    def _memory(self, size: tuple[int, int]) -> torch.Tensor:
        """[1, 3, height, width] of this thread, channels last."""
        if self._temporary.shape[2:] != size:
            self._temporary = torch.empty((1, *size, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
        return self._temporary


def _image(pixels: npt.NDArray[np.uint8]) -> torch.Tensor:
    """Pixels [height, width, 3] as [1, 3, height, width], in their memory where torch can step through it."""
    if min(pixels.strides) < 0:
        pixels = np.ascontiguousarray(pixels)
    return torch.from_numpy(lent(pixels).transpose(2, 0, 1)[None])


def box_of(image: torch.Tensor, region: Sequence[int]) -> torch.Tensor:
    """The box (top, left, height, width, …) of an image [1, 3, height, width]: a view."""
    top, left, height, width, *_ = region
    return image[:, :, top : top + height, left : left + width]


def apply_steps(image: torch.Tensor, steps: Sequence[tuple[Op, list[float]]]) -> torch.Tensor:
    """The ops on pixels, on one image [1, 3, height, width]: float32, of whole values from 0 to 255."""
    image = image.contiguous().to(torch.float32)
    for op, parameters in steps:
        image = op.apply(image, (parameters,))
    return image.round_()


def render_pass(
    image: torch.Tensor, made: Pass, resized: Callable[[torch.Tensor, tuple[int, int]], torch.Tensor]
) -> torch.Tensor:
    """What a part before the last makes of its box, uint8 [1, 3, height, width], channels last.

    resized: the image in this (height, width), uint8 or whole values.
    """
    _, size, corner, flips, steps, crop = made
    if image.shape[2:] != size:
        image = resized(image, size)
    image = window(image, corner, crop)
    image = torch.flip(image, flips) if flips else image
    image = apply_steps(image, steps) if steps else image
    return image.to(torch.uint8, memory_format=torch.channels_last)


def alike(jobs: Sequence[Job], sizes: Sequence[tuple[int, int]]) -> bool:
    """Whether two or more images have one size and the same job, apart from flips, and nothing to do with pixels."""
    if len(jobs) < 2 or jobs[0][0] != jobs[1][0] or jobs[0][5]:
        return False
    first, size = jobs[0][:3], sizes[0]
    return all(job[:3] == first and not job[4] for job in jobs) and all(other == size for other in sizes)


class _Slot(Scratch):
    __slots__ = ("_slot",)

    def __init__(self, slot: memoryview) -> None:
        super().__init__()
        self._slot = slot

    def pixels(self, size: int) -> bytearray | memoryview:
        return self._slot if size <= len(self._slot) else super().pixels(size)


class Stack:
    """`count` slots for images of `size` (height, width), each of height * width * 3 bytes.

    A JPEG is decoded to the beginning of its slot, and boxes at the same place of each slot are one tensor without a
    copy.
    """

    def __init__(self, count: int, size: tuple[int, int]) -> None:
        self.count, self.size = count, size
        self._memory = np.empty((count, size[0] * size[1] * 3), np.uint8)
        self.slots: list[Scratch] = [_Slot(slot.data) for slot in self._memory]

    def together(self, images: Sequence[npt.NDArray[np.uint8]]) -> npt.NDArray[np.uint8] | None:
        """One array [n, height, width, 3] over images at the same place of the first n slots, else None."""
        first, step = images[0], self._memory.shape[1]
        start = _address(first)
        if not 0 <= start - _address(self._memory) < step or min(first.strides) < 0:
            return None
        for number, image in enumerate(images):
            if image.shape != first.shape or image.strides != first.strides or _address(image) != start + number * step:
                return None
        return as_strided(first, (len(images), *first.shape), (step, *first.strides))


def _address(image: npt.NDArray[np.uint8]) -> int:
    address: int = image.__array_interface__["data"][0]
    return address
