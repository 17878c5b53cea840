"""Execute a plan on the CPU: decode the box, resize it, flip it, and store it in its row of a batch.

If ops on pixels come before a crop or resize, an image goes through several passes (`readers.augment.geometry`), each
on the result of the pass before.

Resizing uses torch's antialiased kernels for uint8, which have Pillow's arithmetic (within 1 of 255) and are the
fastest of this quality (docs/performance.md). Images of one size are decoded side by side and resized by one call: a
call of torch takes some 10 µs and releases the interpreter's lock twice, a tenth of the time of a small image.

If possible, the codec of `readers.coefficients` decodes, resizes and flips an image in one call, with the same values:
a baseline JPEG, or coefficients of a cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import as_strided

from cache.errors import BadSampleError
from readers.augment.compose import Moved, fit_of
from readers.augment.geometry import Job, Pass, Steps
from readers.augment.ops.base import Interpolation, Op, affine, map_of_halves, window
from readers.augment.ops.color import Normalize, channel_factors
from readers.augment.recipe import Recipe
from readers.decode import Scratch, decode_image, decode_unchanged
from readers.decode.region import lent
from readers.headers.base import MAGIC as COEFFICIENTS
from readers.headers.base import PIXELS_MAGIC
from readers.reader import SAMPLE_ERRORS, Reader
from readers.table import Buffer

if TYPE_CHECKING:
    from readers.coefficients import Scaling
    from readers.coefficients.decode import Table

_JPEG = b"\xff\xd8\xff"
MAX_STACK_BYTES = 4 << 20  # larger images gain nothing: decoding takes far longer than a call of torch


def alike(jobs: Sequence[Job], sizes: Sequence[tuple[int, int]]) -> bool:
    """Whether two or more images have one size and the same job except for flips, without pixel ops."""
    if len(jobs) < 2 or jobs[0].last.region != jobs[1].last.region or jobs[0].before:
        return False
    first, size = jobs[0].last[:3], sizes[0]
    return all(job.last[:3] == first and not job.last.steps for job in jobs) and all(other == size for other in sizes)


class _Slot(Scratch):
    __slots__ = ("_slot",)

    def __init__(self, slot: memoryview) -> None:
        super().__init__()
        self._slot = slot

    def pixels(self, size: int) -> bytearray | memoryview:
        return self._slot if size <= len(self._slot) else super().pixels(size)


class Stack:
    """`count` slots for images of `size` (height, width), each of height * width * 3 bytes.

    JPEGs are decoded to the beginning of their slots, so boxes at the same place of each slot form one array without a
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


_resize_into: Any = torch.ops.aten._upsample_bilinear2d_aa.out
_resize_bicubic_into: Any = torch.ops.aten._upsample_bicubic2d_aa.out
# Values that fit about into a core's L2 cache.
_GROUP_VALUES = 1 << 18


class Finish:
    """Stores pixels in a batch: flips and normalises them, and converts dtype and layout. Threads may share it.

    planar: images are [3, height, width] in memory, not [height, width, 3].
    """

    def __init__(self, dtype: torch.dtype, planar: bool, normalize: Normalize | None) -> None:
        self.dtype, self.planar = dtype, planar
        self._scale, self._shift = torch.tensor(channel_factors(normalize))
        self._rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._scaling: Scaling | None = None
        self._is_scaled = dtype == torch.float32

    @property
    def in_place(self) -> bool:
        """Whether pixels can be rendered directly into the batch."""
        return self.dtype == torch.uint8 and not self.planar

    @property
    def by_codec(self) -> bool:
        """Whether the compiled codec can store these values."""
        return self.dtype == torch.uint8 or self.scaling() is not None

    def scaling(self) -> Scaling | None:
        """The factors with which the compiled codec makes the same float32 values, bit for bit; None for other dtypes.

        Whether torch rounds once or twice depends on its build, so all 256 bytes are tried.
        """
        if self._is_scaled and self._scaling is None:
            self._scaling = self._find_scaling()
            self._is_scaled = self._scaling is not None
        return self._scaling

    def _find_scaling(self) -> Scaling | None:
        from readers.coefficients import Scaling  # loads crc32c

        pixels = torch.arange(256, dtype=torch.uint8).view(1, 16, 16, 1).repeat(1, 1, 1, 3).permute(0, 3, 1, 2)
        probe = torch.empty((1, 3, 16, 16) if self.planar else (1, 16, 16, 3))
        probe = probe if self.planar else probe.permute(0, 3, 1, 2)
        self._convert(pixels, probe)
        values, expected = np.arange(256, dtype=np.float32)[:, None], probe.reshape(3, 256).numpy().T
        scale, shift = self._scale.numpy(), self._shift.numpy()
        both = np.stack((scale, shift))
        if np.array_equal(values * scale + shift, expected):
            return Scaling(both, False)
        once = (values.astype(np.float64) * scale + shift).astype(np.float32)
        return Scaling(both, True) if not self.planar and np.array_equal(once, expected) else None

    def store(
        self, pixels: torch.Tensor, rows: Sequence[torch.Tensor], jobs: Sequence[Job | None], out: torch.Tensor
    ) -> None:
        """Finish images and store them in a batch.

        pixels: uint8 [k, 3, height, width], channels last. rows: `pixels` by image, [1, 3, height, width] each. jobs:
        the remaining job of each, None for an image already in `out`. out: the same shape as `pixels`, or `pixels`
        itself if in_place.

        Works on a few images at a time: one call serves many small images, and large ones stay in the CPU's cache.
        """
        group = max(1, _GROUP_VALUES // max(1, pixels[0].numel())) if jobs else 1
        for some in _left(jobs, group):
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
            # Factors of a whole row, because broadcasting three of them takes several times as long.
            scale, shift = self._row(width)
            torch.addcmul(shift, values, scale, out=values)
        if values is not flat:
            flat.copy_(values)

    def _row(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Factors and summands for the values of a row of pixels."""
        if width not in self._rows:
            self._rows[width] = (self._scale.repeat(width), self._shift.repeat(width))
        return self._rows[width]


def _left(jobs: Sequence[Job | None], most: int) -> Iterator[slice]:
    """The positions of jobs that are not None, in runs of at most `most`."""
    start = 0
    for stop in range(1, len(jobs) + 1):
        if jobs[stop - 1] is None:
            start = stop
        elif stop == len(jobs) or stop - start == most or jobs[stop] is None:
            yield slice(start, stop)
            start = stop


def _flip(rows: Sequence[torch.Tensor], jobs: Sequence[Job | None]) -> None:
    """Flip images in place, those with the same flips together. Images with pixel ops are flipped already."""
    for flips in {job.last.flips for job in jobs if job} - {()}:
        both = [(row, job.last) for row, job in zip(rows, jobs, strict=True) if job]
        images = [row for row, last in both if last.flips == flips and not last.steps]
        if len(images) == 1:
            images[0].copy_(torch.flip(images[0], flips))
        elif images:
            torch._foreach_copy_(images, torch.flip(torch.cat(images), flips).unsafe_split(1))


def unflipped(job: Job) -> Job:
    return job._replace(last=job.last._replace(flips=()))


class Renderer:
    """Renders encoded images to pixels; for one thread.

    interpolation: filter of the resizes. finish: stores results in a batch, if given. compiled: see `decode_image`.
    lap: called with the name of each finished stage, "decode", "resize" or "augment", for one or several images; None
        if not needed.
    """

    def __init__(
        self, interpolation: Interpolation | None = None, finish: Finish | None = None, *, compiled: bool = True
    ) -> None:
        from readers.coefficients import unsupported_reason  # loads crc32c

        self._bicubic, self._finish = interpolation == "bicubic", finish
        self._compiled = compiled and not unsupported_reason()
        self._scratch = Scratch()
        self._temporary = torch.empty(0, dtype=torch.uint8)
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._stack: Stack | None = None
        self.lap: Callable[[str], None] | None = None

    def chunk(self, count: int, height: int, width: int) -> torch.Tensor:
        """uint8 [count, 3, height, width], channels last; valid until the next call."""
        return self.chunks([(count, 3, height, width)])[0]

    def chunks(self, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """`chunk` for several shapes [count, 3, height, width] at once."""
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

    def render(
        self, data: Buffer, job: Job, size: tuple[int, int], out: torch.Tensor, whole: torch.Tensor | None = None
    ) -> Job | None:
        """Render one image into `out`, uint8 [1, 3, out_height, out_width], channels last.

        Returns the job that remains for `Finish.store`: usually the flips, which are faster for many images at once.

        size: (height, width) of the upright image, as in the plan. whole: the image's place in a batch; if that is
        faster, the finished image is stored there, and None is returned. Raises BadSampleError.
        """
        if self._resizes_at_once(data, job):
            finish = self._finish if self._finish is not None and self._finish.by_codec else None
            if whole is not None and finish is not None and not job.last.steps:
                if self._render_at_once(data, job.last, size, whole, finish.scaling()):
                    return None
            elif self._render_at_once(data, job.last, size, out, None):
                return unflipped(job)
        image = _image(decode_image(data, job.first.region, self._scratch, size, compiled=self._compiled))
        if self.lap is not None:
            self.lap("decode")
        interpolation: Interpolation = "bicubic" if self._bicubic else "bilinear"
        for made, then in zip(job.before, (*job.before, job.last)[1:], strict=True):
            image = render_pass(image, made, then, self._resized, interpolation)
            if self.lap is not None:
                self.lap("augment")
        self._store(image, job.last, out)
        return job

    def _resizes_at_once(self, data: Buffer | Exception, job: Job) -> bool:
        """Whether the compiled codec may decode and resize an image in one call."""
        if isinstance(data, Exception) or self._bicubic or job.before:
            return False
        if data[: len(COEFFICIENTS)] != COEFFICIENTS and not (self._compiled and data[: len(_JPEG)] == _JPEG):
            return False
        region = job.last.region
        return job.last.resized != (-(-region.height // region.reduce), -(-region.width // region.reduce))

    def _render_at_once(
        self, data: Buffer, made: Pass, size: tuple[int, int], out: torch.Tensor, scaling: Scaling | None
    ) -> bool:
        """Decode, resize and flip one image into `out` by the codec; False if the codec does not support the image.

        scaling: factors for float32, for which `out` may have any layout.
        """
        from readers.coefficients import decode_resized  # loads crc32c

        region, resized, corner, flips, steps, _ = made
        height, width = out.shape[2:]
        if min(corner) < 0 or corner[0] + height > resized[0] or corner[1] + width > resized[1]:
            return False  # the codec does not pad with black
        target = self._memory((height, width)) if steps else out
        pixels = target[0].permute(1, 2, 0).numpy()
        arguments = data, region, resized, pixels
        if not decode_resized(*arguments, corner=corner, flips=(2 in flips, 3 in flips), scaling=scaling, size=size):
            return False
        if self.lap is not None:
            self.lap("decode")
        if steps:
            out.copy_(apply_steps(target, (), steps))
            if self.lap is not None:
                self.lap("augment")
        return True

    def render_boxes(
        self,
        data: Sequence[Buffer | Exception],
        table: Table,
        sizes: Sequence[tuple[int, int]],
        out: torch.Tensor,
        whole: torch.Tensor,
    ) -> tuple[list[bool], bool]:
        """Decode, resize and flip n images by one call of the compiled codec, where possible; damaged ones are skipped.

        Returns the mask of the rendered images, and whether they are finished, in `whole`, or else in `out`; both are
        [n, 3, out_height, out_width], with undefined contents for skipped images. table: the result of
        `tabulate_boxes` for these images. sizes: of the upright images.
        """
        from readers.coefficients import decode_boxes  # loads crc32c

        finish = self._finish if self._finish is not None and self._finish.by_codec else None
        pixels = (out if finish is None else whole).permute(0, 2, 3, 1).numpy()
        scaling = None if finish is None else finish.scaling()
        done = decode_boxes(data, table, sizes, pixels, scaling, jpegs=self._compiled)
        if self.lap is not None and any(done):
            self.lap("decode")
        return done, finish is not None

    def render_alike(
        self,
        data: Sequence[Buffer | Exception],
        jobs: Sequence[Job],
        sizes: Sequence[tuple[int, int]],
        out: torch.Tensor,
    ) -> bool:
        """The same for n images, out [n, 3, out_height, out_width], if one call can resize several of them.

        False, with undefined contents of `out`, if they differ or are large, if one of them cannot be decoded, or if
        separate calls are faster.
        """
        if not alike(jobs, sizes) or self._resizes_at_once(data[0], jobs[0]):
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
        region, resized, corner, *_ = jobs[0].last
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
                self._store(_image(image), job.last, place)
            return True
        pixels = torch.from_numpy(together).permute(0, 3, 1, 2)
        if pixels.shape[2:] == resized:
            out.copy_(pixels)
            if self.lap is not None:
                self.lap("augment")
        else:
            self._resize(pixels, resized, out)
        return True

    def _store(self, image: torch.Tensor, made: Pass, out: torch.Tensor) -> None:
        """Resize and crop an image, uint8 [1, 3, height, width], apply the pixel ops, and store the result in `out`."""
        _, resized, corner, flips, steps, final = made
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
            image = apply_steps(image, flips, steps)
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
        """This thread's memory for an image [1, 3, height, width], channels last."""
        if self._temporary.shape[2:] != size:
            self._temporary = torch.empty((1, *size, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
        return self._temporary


def _image(pixels: npt.NDArray[np.uint8]) -> torch.Tensor:
    """Pixels [height, width, 3] as [1, 3, height, width], without a copy if torch supports their strides."""
    if min(pixels.strides) < 0:
        pixels = np.ascontiguousarray(pixels)
    return torch.from_numpy(lent(pixels).transpose(2, 0, 1)[None])


def box_of(image: torch.Tensor, region: Sequence[int]) -> torch.Tensor:
    """The box (top, left, height, width, …) of an image [1, 3, height, width]: a view."""
    top, left, height, width, *_ = region
    return image[:, :, top : top + height, left : left + width]


def apply_steps(
    image: torch.Tensor,
    flips: tuple[int, ...],
    steps: Steps,
    box: Sequence[int] | None = None,
    fit: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Flip one image [1, 3, height, width] and apply ops on pixels; integers from 0 to 255 in float32, or in uint8 if
    pixels were only moved. box, fit: as for `_stepped`."""
    (op, parameters), rest = steps[0], steps[1:]
    if isinstance(op, Moved) and (not rest or op.sampling == "nearest") and _moves_bytes(image):
        moved = _moved(image, flips, op, parameters, *((None, None) if rest else (box, fit)))
        if not rest:
            return moved
        image, flips, steps = moved, (), rest
    image = torch.flip(image, flips) if flips else image
    return _stepped(image.contiguous().to(torch.float32), steps, box, fit).round_()


def _stepped(image: torch.Tensor, steps: Steps, box: Sequence[int] | None, fit: tuple[int, int] | None) -> torch.Tensor:
    """Apply ops on pixels to one float32 image.

    box: the part of the result to return, (top, left, height, width, …). fit: (height, width) to which a final move
    resizes the box.
    """
    *some, (op, parameters) = steps
    for applied, values in some:
        image = applied.apply(image, (values,))
    if isinstance(op, Moved):
        return affine(image, (parameters,), op.sampling, box, fit)
    image = op.apply(image, (parameters,))
    return image if box is None else box_of(image, box)


def _moves_bytes(image: torch.Tensor) -> bool:
    """Whether the compiled codec can move the pixels of an image."""
    from readers.coefficients import unsupported_reason  # loads crc32c

    return image.dtype == torch.uint8 and image.device.type == "cpu" and not unsupported_reason()


def _moved(
    image: torch.Tensor,
    flips: tuple[int, ...],
    op: Moved,
    matrix: Sequence[float],
    box: Sequence[int] | None,
    fit: tuple[int, int] | None,
) -> torch.Tensor:
    """An image, uint8 [1, 3, height, width], flipped and warped as by `affine`, rounded."""
    from readers.coefficients.compiled import load_codec

    pixels = image[0].permute(1, 2, 0).numpy()
    if pixels.strides[1:] != (3, 1):
        pixels = np.ascontiguousarray(pixels)
    by, (*grid, height, width) = map_of_halves(matrix, (image.shape[2], image.shape[3]), box, fit)
    made = np.empty((height, width, 3), np.uint8)
    flipped = pixels[:: -1 if 2 in flips else 1, :: -1 if 3 in flips else 1]
    load_codec().affine(flipped, made, by, tuple(grid), op.sampling == "nearest")
    return torch.from_numpy(made).permute(2, 0, 1)[None]


def render_pass(
    image: torch.Tensor,
    made: Pass,
    then: Pass,
    resized: Callable[[torch.Tensor, tuple[int, int]], torch.Tensor],
    interpolation: Interpolation | None,
) -> torch.Tensor:
    """Render a part before the last; returns the box of the next part, `then`, which may be resized already.

    image: its box, uint8 [1, 3, height, width], channels last. resized: resizes an image to (height, width), to uint8
    or integers. interpolation: filter of the resizes.
    """
    _, size, corner, flips, steps, crop = made
    if image.shape[2:] != size:
        image = resized(image, size)
    image = window(image, corner, crop)
    if steps:
        image = apply_steps(image, flips, steps, then.region, fit_of(made, then, interpolation))
    else:
        image = box_of(torch.flip(image, flips) if flips else image, then.region)
    return image.to(torch.uint8, memory_format=torch.channels_last)


# Execute a plan on images in their own depth and channels, for decode="unchanged".
#
#     of the file    crops, flips, resizes in    ops on pixels in          result    as floats
#     uint8          uint8                       float32, 0 to 255         uint8     x / 255
#     uint16         float32                     float32, x / 257          uint16    x / 65535
#     int32          float64                     none                      int32     x
#     float32        float32                     float32, x                float32   x
#
# Integers are rounded where `Renderer` rounds them: after a resize, and after ops on pixels. Normalize or `dtype`
# converts to floats and divides uint8 and uint16 by their largest value, as torchvision's `to_dtype(scale=True)`; an
# image of 12 bits has 0 to 4095 of 65535. The other dtypes have no known largest value and are not scaled.
#
# Images are decoded whole, by the same code with or without ops, so that every consumer gets the same values.


_LARGEST = {"uint8": 255.0, "uint16": 65535.0}
_COMPUTED = {"uint16": np.float32, "int32": np.float64, "float32": np.float32}
_TO_BYTES = 257.0  # 65535 / 255


class UnchangedRenderer:
    """Renders encoded images in their own depth and channels; for one thread.

    recipes: the recipes of all views, with the same Normalize and interpolation. dtype: dtype of the results: float32,
    float16 or bfloat16; None for the images' own, or float32 with Normalize.
    lap: as for `readers.augment.cpu.Renderer`.
    """

    def __init__(self, recipes: Sequence[Recipe], dtype: torch.dtype | None = None) -> None:
        self._recipes, self._normalize = recipes, recipes[0].normalize
        self._dtype = torch.float32 if dtype is None and self._normalize is not None else dtype
        self._bicubic = recipes[0].interpolation == "bicubic"
        # Palette indices may be moved, but arithmetic on them is meaningless.
        ops = [op for recipe in recipes for op in recipe.ops]
        self._moves_only = self._dtype is None and not any(op.resize_filter or _is_arithmetic(op) for op in ops)
        self._accepted: set[tuple[str, int]] = set()
        self._factors: dict[tuple[str, int], torch.Tensor] = {}
        self.lap: Callable[[str], None] | None = None

    def render(
        self, data: Buffer, job: Job, size: tuple[int, int], out: torch.Tensor, whole: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One image, [1, channels, height, width]. Raises BadSampleError.

        size: (height, width) of the upright image, as in the plan. out, whole: unused, as in `Renderer.render`.
        """
        pixels = decode_own(data, size, indices=self._moves_only)
        kind, channels = pixels.dtype.name, 1 if pixels.ndim == 2 else pixels.shape[2]
        self._check(kind, channels)
        self._note("decode")
        top, left, height, width, *_ = job.first.region
        image = _computable(pixels[top : top + height, left : left + width])
        interpolation: Interpolation = "bicubic" if self._bicubic else "bilinear"
        passes = *job.before, job.last
        for made, then in zip(passes, (*passes[1:], None), strict=True):
            _, resized, corner, flips, steps, final = made
            if image.shape[2:] != resized:
                image = self._resized(image, resized, kind)
            image = window(image, corner, final)
            image = torch.flip(image, flips) if flips else image
            if steps:
                fit = None if then is None else fit_of(made, then, interpolation)
                image = _stepped_as(kind, image, steps, None if then is None else then.region, fit)
            elif then is not None:
                image = box_of(image, then.region)
        finished = self._finished(image, kind)
        self._note("augment")
        return finished

    def _check(self, kind: str, channels: int) -> None:
        """Raise BadSampleError for images that an op rejects."""
        if (kind, channels) in self._accepted:
            return
        for recipe in self._recipes:
            reason = recipe.refuses(kind, channels)
            if reason:
                raise BadSampleError(reason)
        self._accepted.add((kind, channels))

    def _note(self, stage: str) -> None:
        if self.lap is not None:
            self.lap(stage)

    def _resized(self, image: torch.Tensor, size: tuple[int, int], kind: str) -> torch.Tensor:
        ops: Any = torch.ops.aten
        resize = ops._upsample_bicubic2d_aa if self._bicubic else ops._upsample_bilinear2d_aa
        made: torch.Tensor = resize(image, size, False, None, None)
        self._note("resize")
        if kind == "uint16":
            return made.round_().clamp_(0, _LARGEST[kind])
        return made.round_() if kind == "int32" else made

    def _finished(self, image: torch.Tensor, kind: str) -> torch.Tensor:
        """The image in the dtype of the result, scaled and normalised if that is a float."""
        if self._dtype is None:
            return image.to(dtype_of(kind))
        channels = image.shape[1]
        factors = self._factors.get((kind, channels))
        if factors is None:
            made = channel_factors(self._normalize, _LARGEST.get(kind, 1.0), channels)
            factors = self._factors[kind, channels] = torch.tensor(made).view(2, 1, channels, 1, 1)
        return torch.addcmul(factors[1], image.to(torch.float32), factors[0]).to(self._dtype)


def decode_own(data: Buffer, size: tuple[int, int] | None = None, *, indices: bool = True) -> npt.NDArray[Any]:
    """`decode_unchanged`, which also accepts raw pixels. indices: as there. Raises BadSampleError."""
    if data[: len(PIXELS_MAGIC)] == PIXELS_MAGIC:  # of a set of raw pixels; `check_unchanged` excludes caches
        return np.array(decode_image(data, None, None, size))
    return decode_unchanged(data, size, indices=indices)


def pixels_to_tensor(pixels: npt.NDArray[Any]) -> torch.Tensor:
    """Pixels [height, width] or [height, width, channels] as a tensor [channels, height, width]; uint16 becomes int32
    before torch 2.3, which lacks the dtype."""
    if pixels.dtype == np.uint16 and not hasattr(torch, "uint16"):
        pixels = pixels.astype(np.int32)
    tensor = torch.from_numpy(pixels)
    return tensor[None] if tensor.ndim == 2 else tensor.permute(2, 0, 1)


def check_unchanged(reader: Any) -> None:
    """Raise ValueError for images that a cache has converted to 8-bit RGB."""
    while reader is not None:
        keep: Any = getattr(reader, "keep", None)
        kind = getattr(keep, "kind", "encoded")
        if kind != "encoded" and not keep.is_for_decoders:
            raise ValueError(f"decode='unchanged' over a cache that keeps images {kind}: open it with keep='encoded'")
        reader = getattr(reader, "base", None)


def kind_of_first(reader: Reader) -> tuple[str, int] | None:
    """(dtype, channels) of the first image, which is decoded; None if there is none, or if it is bad."""
    try:
        pixels = decode_own(reader.read(0)) if len(reader) else None
    except SAMPLE_ERRORS:
        return None
    return None if pixels is None else (pixels.dtype.name, 1 if pixels.ndim == 2 else pixels.shape[2])


def _is_arithmetic(op: Op) -> bool:
    """Whether an op computes with values instead of only moving pixels."""
    return bool(op.refuses("int32", 1))


def _computable(pixels: npt.NDArray[Any]) -> torch.Tensor:
    """Pixels as a tensor [1, channels, height, width] of a dtype for which torch has all operations."""
    values = np.ascontiguousarray(pixels, _COMPUTED.get(pixels.dtype.name, pixels.dtype))
    return pixels_to_tensor(values)[None]


def _stepped_as(
    kind: str, image: torch.Tensor, steps: Steps, box: Sequence[int] | None, fit: tuple[int, int] | None
) -> torch.Tensor:
    """`_stepped` on one image, in its dtype; integers are rounded."""
    dtype = image.dtype
    values = image.contiguous().to(torch.float32)
    values = values / _TO_BYTES if kind == "uint16" else values.clone()
    values = _stepped(values, steps, box, fit)
    if kind == "uint16":
        values = (values * _TO_BYTES).round_().clamp_(0, _LARGEST[kind])
    elif kind != "float32":
        values = values.round_()
    return values.to(dtype)


def dtype_of(kind: str) -> torch.dtype:
    """The torch dtype of images of this NumPy dtype."""
    dtype: torch.dtype = getattr(torch, kind if hasattr(torch, kind) else "int32")
    return dtype
