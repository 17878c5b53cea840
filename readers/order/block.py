"""Shuffle whole blocks, then samples inside a window of blocks: large reads, and nearly as good a mix.

A block is a run of consecutive samples of about `block_bytes`. An epoch permutes the blocks; each `window` blocks that
follow each other are one window, whose samples are permuted among themselves. Storage sees reads of whole blocks, each
block once an epoch, while a window of them is in memory.

A batch of b samples comes from the blocks of one window, which says how well it mixes: about window / (window + b) as
well as a global shuffle, by `readers.order.quality`. A set sorted by class wants a window of hundreds of blocks,
and smaller blocks so that they fit into memory; one that was shuffled when it was packed can do with the default.

Memory: the block table (8 bytes a block), and as much again twice for each of the two epochs used last.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from readers.order.base import Int64s, PlainOrder, Spec, checked_positions, digest_of
from readers.order.keys import check_counter, derive_keys
from readers.order.permutation import Permutation, permute_each

__all__ = ["BlockShuffled", "block_shuffled", "block_starts"]

_CHUNK_SAMPLES = 1 << 20


class _Sized(Protocol):
    def sizes(self, field: str = ...) -> Int64s: ...


class _Epoch(NamedTuple):
    """The blocks as they come in an epoch: which one, and at which position each begins (and the last ends)."""

    blocks: Int64s
    starts: Int64s


@dataclass(frozen=True, eq=False)
class BlockShuffled(PlainOrder):
    """starts: int64 [blocks + 1], rising from 0 to the number of samples: block b is starts[b] to starts[b + 1].

    Raises ValueError for starts that do not rise or a window below 1. Make one from a reader with `block_shuffled`.
    """

    starts: Int64s = field(repr=False)
    window: int = 64
    seed: int = 0
    _epochs: dict[tuple[int, int], _Epoch] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        check_counter("seed", self.seed)
        if self.window < 1:
            raise ValueError(f"window is {self.window}, expected at least 1 block")
        starts = np.asarray(self.starts, np.int64)
        if starts.ndim != 1 or not starts.size or starts[0] != 0 or bool((np.diff(starts) <= 0).any()):
            raise ValueError("block starts must rise from 0 to the number of samples")
        object.__setattr__(self, "starts", starts)

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def blocks(self) -> int:
        return len(self.starts) - 1

    def indices(self, epoch: int, positions: Int64s) -> Int64s:
        given = checked_positions(positions, len(self))
        if not given.size:
            return given
        table = self._epoch(epoch)
        flat = given.ravel()
        window = (table.starts.searchsorted(flat, side="right") - 1) // self.window
        first = table.starts[window * self.window]
        last = table.starts[np.minimum((window + 1) * self.window, self.blocks)]
        keys = derive_keys(self.seed, epoch, "block window")
        place = first + permute_each(flat - first, last - first, window, keys)
        slot = table.starts.searchsorted(place, side="right") - 1
        return (self.starts[table.blocks[slot]] + place - table.starts[slot]).reshape(given.shape)

    @cached_property
    def _digest(self) -> str:
        return digest_of(self.starts)

    def spec(self) -> Spec:
        return {
            "kind": "block-shuffled",
            "samples": len(self),
            "window": self.window,
            "blocks": self.blocks,
            "starts": self._digest,
        }

    def _epoch(self, epoch: int) -> _Epoch:
        table = self._epochs.get((self.seed, epoch))
        if table is None:
            permutation = Permutation(self.blocks, self.seed, epoch, "blocks")
            blocks = permutation.forward(np.arange(self.blocks, dtype=np.int64))
            starts = np.zeros(self.blocks + 1, np.int64)
            np.cumsum((self.starts[1:] - self.starts[:-1])[blocks], out=starts[1:])
            table = _Epoch(blocks, starts)
            for old in list(self._epochs)[:-1]:
                self._epochs.pop(old, None)
            self._epochs[self.seed, epoch] = table
        return table

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_epochs": {}}


def block_starts(sizes: npt.NDArray[Any], block_bytes: int) -> Int64s:
    """Where blocks begin, int64 [blocks + 1]: a new one at each sample that starts in another `block_bytes` of the sum.

    sizes: bytes of each sample, [n]. One pass over them in chunks. A sample larger than block_bytes is a block alone or
    ends one.
    """
    if block_bytes < 1:
        raise ValueError(f"block_bytes is {block_bytes}, expected at least 1")
    found, before, total = [], -1, 0
    for first in range(0, len(sizes), _CHUNK_SAMPLES):
        part = np.maximum(np.asarray(sizes[first : first + _CHUNK_SAMPLES], np.int64), 0)
        ends = np.cumsum(part) + total
        cells = (ends - part) // block_bytes
        found.append(first + np.flatnonzero(np.diff(cells, prepend=before)))
        before, total = int(cells[-1]), int(ends[-1])
    return np.concatenate([*found, [len(sizes)]]).astype(np.int64)


def block_shuffled(
    reader: _Sized, seed: int = 0, block_bytes: int = 8 << 20, window: int = 64, field: str = "image"
) -> BlockShuffled:
    """A block shuffle for a reader, by the bytes of one field; reads the column of lengths once."""
    return BlockShuffled(block_starts(reader.sizes(field), block_bytes), window, seed)
