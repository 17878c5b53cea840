"""Perceptual hashes: numbers of images that differ in few bits where the images look alike.

A difference hash of 128 bits: the image in grey is averaged to 9 x 8 and to 8 x 9 pixels, and each bit says whether a
pixel is brighter than its neighbour on the left, or above. It stays nearly the same when an image is encoded again,
resized, or made a little brighter (N. Krawetz, "Kind of Like That", 2013, describes the horizontal half). An image
without any structure has no such hash.

JPEGs are decoded at 1/8 of their size where 32 pixels are left, which costs a fraction of decoding them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from readers.decode import Region, Scratch, decode_image
from readers.headers import read_header
from readers.sample import Buffer

__all__ = ["BITS", "difference_hash", "near_pairs"]

BITS = 128
_ROWS, _LEAST_CONTRAST = 8, 8.0
_SCALES, _LEAST_SIDE = (8, 4, 2), 32  # what is left of the shorter side
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R BT.601
_MOST_PAIRS = 1 << 22
_POPCOUNT = np.array([bin(number).count("1") for number in range(1 << 16)], np.uint8)


def difference_hash(image: Buffer, scratch: Scratch | None = None) -> npt.NDArray[np.uint64] | None:
    """The hash of an encoded image, uint64 [2]; None for one without structure. Raises BadSampleError."""
    height, width = read_header(image).upright_size
    reduce = next((scale for scale in _SCALES if min(height, width) >= scale * _LEAST_SIDE), 1)
    pixels = decode_image(image, Region(0, 0, height, width, reduce, True), scratch)
    grey = pixels.astype(np.float32) @ _LUMA
    # The last pixel of a reduced image may be a part of one.
    size = (height / reduce, width / reduce) if len(grey) < height else (height, width)
    across, below = _averaged(grey, size, (_ROWS, _ROWS + 1)), _averaged(grey, size, (_ROWS + 1, _ROWS))
    if float(across.max() - across.min()) < _LEAST_CONTRAST:
        return None
    bits = np.concatenate([(np.diff(across, axis=1) > 0).ravel(), (np.diff(below, axis=0) > 0).ravel()])
    return np.packbits(bits).view(">u8").astype(np.uint64)


def _averaged(
    grey: npt.NDArray[np.float32], size: tuple[float, float], counts: tuple[int, int]
) -> npt.NDArray[np.float64]:
    """The mean of each box of a grid over `size` (rows, columns), whose edges may be inside pixels."""
    values = grey.astype(np.float64)
    for whole, count in zip(size, counts, strict=True):  # rows, and after turning the result, columns
        sums = np.concatenate([np.zeros((1, values.shape[1])), np.cumsum(values, axis=0)])
        edges = np.linspace(0, whole, count + 1)
        pixel = np.minimum(edges.astype(int), len(values) - 1)
        upto = sums[pixel] + (edges - pixel)[:, None] * values[pixel]
        values = (np.diff(upto, axis=0) * (count / whole)).T
    return values


def near_pairs(hashes: npt.NDArray[np.uint64], threshold: int) -> Iterator[npt.NDArray[np.int64]]:
    """Pairs of hashes (uint64 [n, 2]) that differ in at most `threshold` bits: blocks of int64 [k, 2], some twice.

    Two such hashes have at least one of threshold + 1 bands of bits in common, so only those with a common band are
    compared.
    """
    bits = np.unpackbits(hashes.astype(">u8").view(np.uint8).reshape(len(hashes), -1), axis=1)
    for band in np.array_split(np.arange(BITS), threshold + 1):
        keys = np.packbits(bits[:, band], axis=1)
        _, group = np.unique(keys, axis=0, return_inverse=True)
        order = np.argsort(group.reshape(-1), kind="stable")
        starts = np.flatnonzero(np.diff(group.reshape(-1)[order], prepend=-1))
        for first, stop in itertools.pairwise([*starts.tolist(), len(order)]):
            yield from _within(order[first:stop], hashes, threshold)


def _within(
    members: npt.NDArray[np.int64], hashes: npt.NDArray[np.uint64], threshold: int
) -> Iterator[npt.NDArray[np.int64]]:
    step = max(1, _MOST_PAIRS // max(1, len(members)))
    for first in range(0, len(members) if len(members) > 1 else 0, step):
        some = members[first : first + step]
        differing = hashes[some][:, None, :] ^ hashes[members][None, :, :]
        distance = _POPCOUNT[differing.view(np.uint16)].sum(axis=-1, dtype=np.int64)
        a, b = np.nonzero(distance <= threshold)
        found = np.stack([some[a], members[b]], axis=1)
        found = found[found[:, 0] < found[:, 1]]
        if len(found):
            yield found
