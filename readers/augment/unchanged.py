"""Execute a plan on images in their own depth and channels, as decode="unchanged" gives them.

    of the file    crops, flips, resizes in    ops on pixels in          result    as floats
    uint8          uint8                       float32, 0 to 255         uint8     x / 255
    uint16         float32                     float32, x / 257          uint16    x / 65535
    int32          float64                     none                      int32     x
    float32        float32                     float32, as they are      float32   x

Integers are rounded where `readers.augment.cpu` rounds them: after a resize, and behind ops on pixels. Normalize or
`dtype` makes floats of them, and divides uint8 and uint16 by their largest value, as torchvision's
`to_dtype(scale=True)`; an image of 12 bits has 0 to 4095 of 65535. No largest value is known of the others.

Images are decoded whole, by the same code with or without ops, so that every consumer gets the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cache.errors import BadSampleError
from readers.augment.cpu import box_of
from readers.augment.geometry import Job
from readers.augment.ops.base import Op, window
from readers.augment.ops.color import channel_factors
from readers.augment.recipe import Recipe
from readers.decode import decode_image, decode_unchanged
from readers.headers.base import PIXELS_MAGIC
from readers.reader import SAMPLE_ERRORS, Reader
from readers.sample import Buffer

__all__ = [
    "UnchangedRenderer",
    "check_unchanged",
    "decode_own",
    "dtype_of",
    "kind_of_first",
    "to_tensor",
]

_LARGEST = {"uint8": 255.0, "uint16": 65535.0}
_COMPUTED = {"uint16": np.float32, "int32": np.float64, "float32": np.float32}
_TO_BYTES = 257.0  # 65535 / 255


class UnchangedRenderer:
    """Encoded bytes to finished images, for one thread.

    recipes: those of all views, of one Normalize and interpolation. dtype: of the results, float32, float16 or
    bfloat16; None for that of the images, or float32 with Normalize.
    lap: as for `readers.augment.cpu.Renderer`.
    """

    def __init__(self, recipes: Sequence[Recipe], dtype: torch.dtype | None = None) -> None:
        self._recipes, self._normalize = recipes, recipes[0].normalize
        self._dtype = torch.float32 if dtype is None and self._normalize is not None else dtype
        self._bicubic = recipes[0].interpolation == "bicubic"
        # Indices of a palette may be moved, and are no values to calculate with.
        ops = [op for recipe in recipes for op in recipe.ops]
        self._moves_only = self._dtype is None and not any(op.resize_filter or _is_arithmetic(op) for op in ops)
        self._accepted: set[tuple[str, int]] = set()
        self._factors: dict[tuple[str, int], torch.Tensor] = {}
        self.lap: Callable[[str], None] | None = None

    def render(
        self, data: Buffer, job: Job, size: tuple[int, int], out: torch.Tensor, whole: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One image, [1, channels, height, width]. size: (height, width) of the upright image, as the plan took it.
        out: its last two sides are those of the result; nothing is written to it. Raises BadSampleError."""
        pixels = decode_own(data, size, indices=self._moves_only)
        kind, channels = pixels.dtype.name, 1 if pixels.ndim == 2 else pixels.shape[2]
        self._check(kind, channels)
        self._note("decode")
        top, left, height, width, *_ = (job[5][0] if job[5] else job)[0]
        image = _computable(pixels[top : top + height, left : left + width])
        last = (*job[:5], (out.shape[2], out.shape[3]))
        for number, (region, resized, corner, flips, steps, final) in enumerate((*job[5], last)):
            if number:
                image = box_of(image, region)
            if image.shape[2:] != resized:
                image = self._resized(image, resized, kind)
            image = window(image, corner, final)
            image = torch.flip(image, flips) if flips else image
            image = _stepped(image, steps, kind) if steps else image
        finished = self._finished(image, kind)
        self._note("augment")
        return finished

    def _check(self, kind: str, channels: int) -> None:
        """Raise BadSampleError for images that an op does not take."""
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
        """In the dtype of the result."""
        if self._dtype is None:
            return image.to(dtype_of(kind))
        channels = image.shape[1]
        factors = self._factors.get((kind, channels))
        if factors is None:
            made = channel_factors(self._normalize, _LARGEST.get(kind, 1.0), channels)
            factors = self._factors[kind, channels] = torch.tensor(made).view(2, 1, channels, 1, 1)
        return torch.addcmul(factors[1], image.to(torch.float32), factors[0]).to(self._dtype)


def decode_own(data: Buffer, size: tuple[int, int] | None = None, *, indices: bool = True) -> npt.NDArray[Any]:
    """`decode_unchanged`, and the pixels of a set of raw ones. indices: see there. Raises BadSampleError."""
    if data[: len(PIXELS_MAGIC)] == PIXELS_MAGIC:  # not of a cache: `check_unchanged`
        return np.array(decode_image(data, None, None, size))
    return decode_unchanged(data, size, indices=indices)


def to_tensor(pixels: npt.NDArray[Any]) -> torch.Tensor:
    """Pixels [height, width] or [height, width, channels] as [channels, height, width]; int32 for uint16 where torch,
    before 2.3, has no such dtype."""
    if pixels.dtype == np.uint16 and not hasattr(torch, "uint16"):
        pixels = pixels.astype(np.int32)
    tensor = torch.from_numpy(pixels)
    return tensor[None] if tensor.ndim == 2 else tensor.permute(2, 0, 1)


def check_unchanged(reader: Any) -> None:
    """Raise ValueError for images that a cache has made 8-bit RGB of."""
    while reader is not None:
        keep: Any = getattr(reader, "keep", None)
        kind = getattr(keep, "kind", "encoded")
        if kind != "encoded" and not keep.is_for_decoders:
            raise ValueError(f"decode='unchanged' over a cache that keeps images {kind}: open it with keep='encoded'")
        reader = getattr(reader, "base", None)


def kind_of_first(reader: Reader) -> tuple[str, int] | None:
    """The dtype and the channels of the first image, which is decoded; None where there is none, or it is bad."""
    try:
        pixels = decode_own(reader.read(0)) if len(reader) else None
    except SAMPLE_ERRORS:
        return None
    return None if pixels is None else (pixels.dtype.name, 1 if pixels.ndim == 2 else pixels.shape[2])


def _is_arithmetic(op: Op) -> bool:
    """Whether an op calculates with values, and does not only move them."""
    return bool(op.refuses("int32", 1))


def _computable(pixels: npt.NDArray[Any]) -> torch.Tensor:
    """Pixels as a tensor [1, channels, height, width] that torch has all operations for."""
    values = np.ascontiguousarray(pixels, _COMPUTED.get(pixels.dtype.name, pixels.dtype))
    return to_tensor(values)[None]


def _stepped(image: torch.Tensor, steps: Sequence[tuple[Op, list[float]]], kind: str) -> torch.Tensor:
    """The ops on pixels, on one image; in the same dtype, rounded to whole values unless they are floats."""
    dtype = image.dtype
    values = image.contiguous().to(torch.float32)
    values = values / _TO_BYTES if kind == "uint16" else values.clone()
    for op, parameters in steps:
        values = op.apply(values, (parameters,))
    if kind == "uint16":
        values = (values * _TO_BYTES).round_().clamp_(0, _LARGEST[kind])
    elif kind != "float32":
        values = values.round_()
    return values.to(dtype)


def dtype_of(kind: str) -> torch.dtype:
    """The dtype of tensors of these images."""
    found: torch.dtype = getattr(torch, kind if hasattr(torch, kind) else "int32")
    return found
