"""Helpers for tests of coefficients: JPEGs of all kinds, an independent reader of the bytes."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import simplejpeg
from image_cases import picture
from PIL import Image

__all__ = ["SAMPLINGS", "exact", "made_jpeg", "reduced", "stored_coefficients"]

SAMPLINGS = {"444": (1, 1), "422": (2, 1), "440": (1, 2), "420": (2, 2)}


def made_jpeg(
    height: int, width: int, sampling: str = "444", quality: int = 90, noise: bool = False, seed: int = 1
) -> bytes:
    """A baseline JPEG of a picture, or of noise; sampling "gray" for one component."""
    if noise:
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    else:
        pixels = np.ascontiguousarray(picture(height, width, seed))
    if sampling == "gray":
        grey: bytes = simplejpeg.encode_jpeg(np.ascontiguousarray(pixels[..., :1]), quality, "GRAY", "Gray")
        return grey
    data: bytes = simplejpeg.encode_jpeg(pixels, quality, "RGB", sampling)
    return data


def exact(data: bytes) -> npt.NDArray[np.uint8]:
    """The exact pixels of libjpeg-turbo, without rotation by orientation."""
    pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(data, "RGB", fastdct=False, fastupsample=False)
    return pixels


def reduced(data: bytes, factor: int) -> npt.NDArray[np.uint8]:
    """The same pixels at 1/factor of the size. factor is at most the sides: only then does Pillow choose this scale."""
    with Image.open(io.BytesIO(data)) as image:
        image.draft("RGB", (image.width // factor, image.height // factor))
        return np.asarray(image.convert("RGB"))


def stored_coefficients(data: bytes) -> tuple[list[npt.NDArray[np.int64]], list[npt.NDArray[np.int64]]]:
    """Blocks [rows, columns, 8, 8] of each component, and its multipliers [8, 8], read by the documented layout."""
    height, width, _, components, sampling, _, _ = struct.unpack_from("<HHBBBBI", data, 12)
    across, down = divmod(sampling, 16)
    at = 24 + 128 * components
    blocks, steps = [], []
    for component in range(components):
        h, v = (across, down) if component else (1, 1)
        rows, columns = -(-height // (8 * v)), -(-width // (8 * h))
        stored = np.zeros((rows, columns, 8, 8), np.int64)
        for row in range(rows):
            begin, end = struct.unpack_from("<II", data, at + 4 * row)
            _read_row(data[begin:end], stored[row])
        at += 4 * rows
        blocks.append(stored)
        table = np.zeros((8, 8), np.int64)
        values = iter(struct.unpack_from("<64h", data, 24 + 128 * component))
        for pair in ((0, 4), (2, 6), (1, 5), (3, 7)):
            for column in range(8):
                for line in pair:
                    table[line, column] = next(values)
        steps.append(table)
    return blocks, steps


def _read_row(row: bytes, blocks: npt.NDArray[np.int64]) -> None:
    """Read one row of blocks into `blocks` [n, 8, 8]."""
    width = len(blocks)
    blocks[:, 0, 0] = np.frombuffer(row, "<i2", width)
    kinds: list[list[Any]] = [[], []]
    at = 4 * width
    for kind in (0, 1):
        for head in row[(2 + kind) * width : (3 + kind) * width]:
            mask = 0
            for byte in range(8):
                if head >> byte & 1:
                    mask |= row[at] << 8 * byte
                    at += 1
            kinds[kind].append(mask)
    for kind in (0, 1):
        number = 0
        for block, mask in enumerate(kinds[kind]):
            for bit in range(64):
                if mask >> bit & 1:
                    digit = row[at + number // 2] >> 4 * (number % 2) & 15
                    blocks[(block, *_position(bit))] += (digit - 16 * (digit > 7)) * 16**kind
                    number += 1
        at += (number + 1) // 2
    for block, bit, digit in struct.iter_unpack("<HBb", row[at:]):
        blocks[(block, *_position(bit))] += 256 * digit


def _position(bit: int) -> tuple[int, int]:
    """(line, column) of a bit of a mask: tiles of two lines and four columns, a byte each."""
    tile, inner = divmod(bit, 8)
    return 2 * (tile // 2) + inner % 2, 4 * (tile % 2) + inner // 2
