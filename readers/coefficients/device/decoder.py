"""The host part of decoding coefficients on a device: checks, copies, and the tables of the kernels.

The bytes of a batch are copied unchanged in one copy, each image at a multiple of 16 bytes. The tables of the kernels
are computed here for all images together, and follow in a second copy: a line for each component of each box, a line
for each box, and for each program the line that it works on.

The bytes are not trusted. Before the copy, `vetted_shape` checks the checksum, and the beginning of every row against
the next one and the length of the data; the kernels then read within rows only. Whether the parts of a row fit is only
known on the device, so `decode` waits for the kernels and reports these images as damaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from cache.errors import BadSampleError
from readers.coefficients.decode import stored_box
from readers.coefficients.layout import (
    INDEX_BYTES,
    MEDIUM,
    TABLE_BYTES,
    TABLES_AT,
    TAIL_BYTES,
    Shape,
    blocks_of,
    check_sum,
    parse_coefficients,
)
from readers.decode.batch import Decoded
from readers.decode.device import Picture
from readers.decode.region import Region, check_header
from readers.headers.base import Buffer

__all__ = ["CoefficientDecoder", "Uploaded", "places_of", "vetted_shape"]

_BLOCK = 8
_LEAST_BLOCK_BYTES = 4
_MOST_BLOCK_BYTES = 2 + 2 + 16 + 64 + 63 * 4  # DC, heads, masks, digits, top digits
_ALIGNMENT = 16
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}  # defaults depend on the version; the kernels use only integers
_Ints: TypeAlias = npt.NDArray[np.int64]


def vetted_shape(data: Buffer, size: tuple[int, int] | None = None) -> Shape:
    """The header of coefficients that are safe to decode on a device. Raises BadSampleError for any others.

    size: the (height, width) of the upright image in the index. The checksum is compared, and the rows are checked to
    be within the image, so a kernel that reads within rows reads within the image.
    """
    shape = parse_coefficients(data)
    check_header(shape.header, size)
    check_sum(data, shape)
    rows, widths = zip(*(blocks_of(shape, component) for component in range(shape.components)), strict=True)
    index = np.frombuffer(data, "<u4", sum(rows) + 1, shape.index_at).astype(np.int64)
    lengths, width = np.diff(index), np.repeat(widths, rows)
    fit = (lengths >= _LEAST_BLOCK_BYTES * width) & (lengths <= _MOST_BLOCK_BYTES * width)
    if not fit.all() or index[0] < shape.rows_at or index[-1] > shape.total_bytes - TAIL_BYTES:
        raise _damaged(shape)
    return shape


def _damaged(shape: Shape) -> BadSampleError:
    return BadSampleError(f"{MEDIUM} image: its parts do not fit into its {shape.total_bytes} bytes (damaged)")


def places_of(lengths: Sequence[int]) -> tuple[list[int], int]:
    """The offsets of images of these lengths in one block of memory, multiples of 16, and its size in bytes."""
    ends = np.cumsum([-(-length // _ALIGNMENT) * _ALIGNMENT for length in lengths]).tolist()
    return [0, *ends][: len(lengths)], ends[-1] if ends else 0


@dataclass(frozen=True)
class Uploaded:
    """Images on a device. data: uint8, their bytes; offsets: of each in data; shapes: from `vetted_shape`."""

    data: torch.Tensor
    offsets: Sequence[int]
    shapes: Sequence[Shape]


class CoefficientDecoder:
    """Decodes boxes of images from coefficients on one device; for one thread at a time.

    name: the name of the decoder in resume tokens. Raises MissingExtraError without triton.
    """

    def __init__(self, device: torch.device) -> None:
        from readers.coefficients.device import kernels

        self.device, self.name = device, f"{MEDIUM}/{device.type}"
        self._kernels: Any = kernels

    def upload(self, images: Sequence[Buffer], shapes: Sequence[Shape]) -> Uploaded:
        """Copy images to the device, in one copy on the current stream. shapes: from `vetted_shape`, of each image."""
        offsets, total = places_of([shape.total_bytes for shape in shapes])
        host = torch.empty(total, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        memory = host.numpy()
        for image, offset, shape in zip(images, offsets, shapes, strict=True):
            memory[offset : offset + shape.total_bytes] = np.frombuffer(image, np.uint8, shape.total_bytes)
        return Uploaded(host.to(self.device, non_blocking=True), offsets, shapes)

    def decode(self, uploaded: Uploaded, regions: Sequence[Region]) -> list[Decoded]:
        """The box of each image as stored, at the scale of its region; a BadSampleError for each damaged image.

        The pixels are those of `readers.coefficients.decode`. The kernels run on the current stream, and the host waits
        for them. Raises ValueError for a region outside its image.
        """
        if not regions:
            return []
        boxes = [stored_box(*pair) for pair in zip(uploaded.shapes, regions, strict=True)]
        plan = _plan(uploaded, boxes, [region.coarse for region in regions], self._kernels.PIXELS)
        parts = self._to_device(plan)
        samples = torch.empty(plan.samples, dtype=torch.uint8, device=self.device)
        pixels = torch.empty(plan.pixels, dtype=torch.uint8, device=self.device)
        damaged = torch.zeros(len(regions), dtype=torch.int32, device=self.device)
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            for size, programs in parts.row_programs.items():
                arguments = (uploaded.data, parts.rows, programs, samples, damaged)
                kernel = self._kernels.decode_rows[(len(programs),)]
                kernel(*arguments, BLOCKS=self._kernels.BLOCKS, SIZE=size, **_OPTIONS)
            kernel = self._kernels.make_pixels[(len(parts.box_programs),)]
            kernel(parts.boxes, parts.box_programs, samples, pixels, PIXELS=self._kernels.PIXELS, **_OPTIONS)
        return [
            _damaged(shape) if is_damaged else Picture(pixels[at : at + 3 * h * w].view(3, h, w), shape.orientation)
            for shape, (h, w), at, is_damaged in zip(
                uploaded.shapes, plan.sizes, plan.offsets, damaged.tolist(), strict=True
            )
        ]

    def _to_device(self, plan: _Plan) -> _Parts:
        """Copy all tables in one copy, each at a multiple of 16 bytes."""
        arrays = [plan.rows, plan.boxes, plan.box_programs, *plan.row_programs.values()]
        starts, total = _placed(np.array([array.size + (array.size & 1) for array in arrays], np.int64))
        places = [slice(start, start + array.size) for start, array in zip(starts.tolist(), arrays, strict=True)]
        host = torch.empty(total, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        for place, array in zip(places, arrays, strict=True):
            host[place] = torch.from_numpy(array.reshape(-1))
        there = host.to(self.device, non_blocking=True)
        rows, boxes, box_programs, *row_programs = (there[place] for place in places)
        return _Parts(rows, boxes, dict(zip(plan.row_programs, row_programs, strict=True)), box_programs)


class _Parts(NamedTuple):
    """The tables of `rows` and `pixels` on the device, int64, and for each program its line of them. row_programs: by
    the side of a decoded block in samples (8, 4, 2 or 1)."""

    rows: torch.Tensor
    boxes: torch.Tensor
    row_programs: dict[int, torch.Tensor]
    box_programs: torch.Tensor


class _Plan(NamedTuple):
    """The same tables on the host. samples, pixels: bytes for the samples and the pixels of all boxes. sizes, offsets:
    (height, width) of each box, and the offset of its pixels."""

    rows: _Ints
    boxes: _Ints
    row_programs: dict[int, _Ints]
    box_programs: _Ints
    samples: int
    pixels: int
    sizes: list[tuple[int, int]]
    offsets: list[int]


def _plan(
    uploaded: Uploaded,
    boxes: Sequence[tuple[int, tuple[int, int, int, int]]],
    are_coarse: Sequence[bool],
    pixels_of_program: int,
) -> _Plan:
    """The tables for boxes from `stored_box`. Arrays are [n] for images and [n, 3] for components. As in jdmaster.c,
    subsampled chroma is scaled down less than luma if it then needs less upsampling, or none."""
    count, shapes = len(boxes), uploaded.shapes
    reduce = np.array([reduce for reduce, _ in boxes], np.int64)
    top, left, height, width = np.array([box for _, box in boxes], np.int64).T
    coarse = np.array(are_coarse, np.bool_)
    components = np.array([shape.components for shape in shapes], np.int64)
    sides = np.array([(shape.height, shape.width) for shape in shapes], np.int64)
    sampling = np.ones((count, 3, 2), np.int64)
    sampling[:, 1:] = np.array([(shape.down, shape.across) for shape in shapes], np.int64)[:, None]
    present = np.arange(3) < components[:, None]
    size = (_BLOCK // reduce)[:, None]
    own = np.repeat(size, 3, 1)
    for _ in range(3):
        grows = (own < _BLOCK) & (sampling * size[..., None] % (2 * own[..., None]) == 0).all(2)
        own = np.where(grows, 2 * own, own)

    # On both axes, lines and columns, [n, 3, 2]: in samples of a component, and in its blocks
    ratio = sampling * size[..., None] // own[..., None] - 1
    extent = -(-sides[:, None] * own[..., None] // (sampling * _BLOCK))
    blocks = -(-sides[:, None] // (sampling * _BLOCK))
    begin, end = (np.stack(pair, 1)[:, None] for pair in ((top, left), (top + height, left + width)))
    first = np.maximum((begin >> ratio) - ratio, 0) // own[..., None]
    last = np.minimum(((end - 1) >> ratio) + ratio, extent - 1) // own[..., None] + 1
    lines, stride = np.moveaxis((last - first) * own[..., None], 2, 0)
    at, samples = _placed(np.where(present, lines * stride, 0))
    origin = at - first[..., 0] * own * stride - first[..., 1] * own

    index_at = np.array([shape.index_at for shape in shapes], np.int64)[:, None]
    index_at = index_at + INDEX_BYTES * (np.cumsum(blocks[..., 0], 1) - blocks[..., 0] + first[..., 0])
    steps_at = np.broadcast_to(TABLES_AT + TABLE_BYTES * np.arange(3), (count, 3))
    counts = np.where(present, last[..., 0] - first[..., 0], 0).reshape(-1)
    starts = np.zeros(3 * count, np.int64)
    row_programs = {}
    for samples_of_block in np.unique(own[present]).tolist():
        chosen = np.flatnonzero(present.reshape(-1) & (own.reshape(-1) == samples_of_block))
        starts[chosen] = np.cumsum(counts[chosen]) - counts[chosen]
        row_programs[samples_of_block] = np.repeat(chosen, counts[chosen])
    offsets, images = (np.repeat(np.asarray(values, np.int64), 3) for values in (uploaded.offsets, range(count)))
    of_rows = (offsets, index_at, steps_at, blocks[..., 1], first[..., 1], last[..., 1], at, stride, starts, images)

    is_fancy = (size[:, 0] > 1) & ~coarse & ~((ratio[:, 1, 1] > 0) & (extent[:, 1, 1] <= 2))
    down, across = ratio[:, 1].T
    programs = -(-height * width // pixels_of_program)
    out, pixels = _placed(3 * height * width)
    of_boxes = (
        *(top, left, height, width, *origin.T, stride[:, 0], stride[:, 1], components, across, down),
        *(across * is_fancy, down * is_fancy, extent[:, 1, 1], extent[:, 1, 0], out, np.cumsum(programs) - programs),
    )
    return _Plan(
        np.stack([np.reshape(column, -1) for column in of_rows], 1),
        np.stack(of_boxes, 1),
        row_programs,
        np.repeat(np.arange(count), programs),
        samples,
        pixels,
        list(zip(height.tolist(), width.tolist(), strict=True)),
        out.tolist(),
    )


def _placed(sizes: _Ints) -> tuple[_Ints, int]:
    """The offsets of parts of these sizes, one after another, and their total size."""
    ends = np.cumsum(sizes)
    return (ends - sizes.reshape(-1)).reshape(sizes.shape), int(ends[-1])
