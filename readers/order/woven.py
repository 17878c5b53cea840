"""An order for distant storage that reads whole blocks, with no two samples of a block in the same batch.

A block is a run of `block` consecutive samples, read at once. `open` blocks are open at a time, and a round takes one
slice of each, which is one sample if block <= open; it opens new blocks in place of those that end:

    round 0   a0 z1 y2            block 3, open 3; the epoch is a ring: its first rounds take the remaining samples of
    round 1   b0 a1 z2            the blocks that are opened in its last rounds, so all rounds are alike, and the
    round 2   c0 b1 a2            sample at a position is computed directly

A batch no larger than a round has no two samples of a block. So within one batch it mixes like a global shuffle; over
16 and more batches, like any order with as many open blocks: shuffle a set that is sorted by class when you pack it.
Each block takes one read (two if it is cut by the epoch's ends), and memory holds the remaining samples of `open`
blocks. Blocks have a different offset in each epoch, so that the same samples do not always share a block.

With `nodes` there are as many weaves side by side, each with separate blocks, and position p belongs to weave p mod
nodes; with nodes equal to the number of ranks, no two ranks read the same block. With `workers` each node has as many
weaves, which take turns by `batch_size` positions: batch k of a node belongs to weave k mod workers, as with the
workers of a DataLoader, so no two workers read the same block. Samples after the last whole round come one by one, at
the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from readers.order.base import Int64s, Permutation, PlainOrder, Spec, check_samples, derive_keys, permute_each


class _Places(NamedTuple):
    """For positions, int64 [k] each: the visit of a block (-1 for none), and the sample."""

    visit: Int64s
    sample: Int64s


@dataclass(frozen=True)
class Woven(PlainOrder):
    """An order of interleaved blocks; make one from a reader with `woven`.

    block: samples of a block.
    open: blocks that are open at a time, in each weave.
    nodes: nodes with separate weaves.
    workers: weaves of each node.
    batch_size: consecutive positions of a node in a weave; has no effect with one worker.

    An epoch can be resumed with another number of workers and another batch_size. Raises ValueError for numbers below
    1.
    """

    samples: int
    block: int = 32
    open: int = 256
    seed: int = 0
    nodes: int = 1
    workers: int = 1
    batch_size: int = 1
    _kept_by_epoch = ("workers", "batch_size")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_samples(self.samples)
        for name in ("block", "open", "nodes", "workers", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")

    def __len__(self) -> int:
        return self.samples

    @property
    def groups(self) -> int:
        return self.nodes

    @property
    def blocks(self) -> int:
        """Number of whole blocks."""
        return self.samples // self.block

    @property
    def round_samples(self) -> int:
        """Samples of a round of one weave. If block <= open, a batch of at most this size has no two of a block."""
        return self._starts * self.block

    def spec(self) -> Spec:
        sizes: Spec = {"block": self.block, "open": self.open, "nodes": self.nodes}
        dealt: Spec = {"workers": self.workers, "batch_size": self.batch_size if self.workers > 1 else 1}
        return {"kind": "woven", "samples": self.samples, **sizes, **dealt}

    def is_read_alone(self, processes: int, workers: int, batch_size: int) -> bool:
        """Whether each of `processes` ranks, with `workers` that make batches in turn, reads separate blocks."""
        return self.nodes == processes and self.workers == workers and (workers == 1 or self.batch_size == batch_size)

    def visits(self, epoch: int, positions: Int64s) -> Int64s:
        """Numbers of the block visits to which positions belong, int64 [k]; -1 for samples without one."""
        return self._places(epoch, positions).visit

    def samples_of(self, epoch: int, visits: Int64s) -> list[Int64s]:
        """The samples of each of some visits in stored order: int64, at most `block` each."""
        slots, turn = np.arange(self.block), visits // 2
        block = Permutation(max(1, self.blocks), self.seed, epoch, "woven blocks").forward(turn)
        keys, size = derive_keys(self.seed, epoch, "woven block"), len(visits) * self.block
        each = np.tile(slots, len(visits)), np.full(size, self.block), np.repeat(block, self.block)
        samples = self._moved(epoch, each[2] * self.block + permute_each(*each, keys)).reshape(-1, self.block)
        is_of_head = (turn // self._weaves // self._starts)[:, None] + self._ages(slots) >= self._rounds
        is_of_visit = is_of_head == (visits % 2)[:, None]
        return [np.sort(some[which]) for some, which in zip(samples, is_of_visit, strict=True)]

    @property
    def open_samples(self) -> int:
        """Number of samples of all blocks of a weave that are open at a time."""
        return self._starts * self._life * self.block

    @property
    def open_positions(self) -> int:
        """Number of positions within which all samples of a block come."""
        return (self.open_samples + self.batch_size) * self._weaves

    # --- inside -------------------------------------------------------------------------------------------------
    @property
    def _weaves(self) -> int:
        return self.nodes * self.workers

    @property
    def _life(self) -> int:
        """Number of rounds for which a block is open."""
        return min(self.block, self.open)

    @property
    def _starts(self) -> int:
        """Number of blocks of a weave that a round opens."""
        return max(1, min(self.open // self._life, self.blocks // self._weaves))

    @property
    def _rounds(self) -> int:
        return self.blocks // self._weaves // self._starts

    def _ages(self, slots: Int64s) -> Int64s:
        """For each slot of a block, the number of rounds after the block's opening in which it comes."""
        ages: Int64s = ((slots + 1) * self._life - 1) // self.block
        return ages

    def _moved(self, epoch: int, samples: Int64s) -> Int64s:
        """Samples shifted by the offset of this epoch's blocks."""
        first = Permutation(self.block, self.seed, epoch, "woven grid").forward(np.zeros(1, np.int64))
        moved: Int64s = (samples + first) % max(1, self.samples)
        return moved

    def _dealt(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """The weave of each position, and its place in the weave."""
        node, place = positions % self.nodes, positions // self.nodes
        if self.workers == 1:
            return node, place
        turn, within = place // self.batch_size, place % self.batch_size
        full = self._rounds * self.round_samples // self.batch_size * self.batch_size  # in batches; the rest singly
        rest = place - full * self.workers
        worker = np.where(rest < 0, turn, rest) % self.workers
        dealt = np.where(rest < 0, turn // self.workers * self.batch_size + within, full + rest // self.workers)
        return worker * self.nodes + node, dealt

    def _places(self, epoch: int, positions: Int64s) -> _Places:
        per_round = self.round_samples
        whole = self._rounds * per_round * self._weaves
        woven = positions < whole
        visit, sample = np.full(len(positions), -1), np.empty(len(positions), np.int64)
        weave, place = self._dealt(positions[woven])
        number = place // per_round
        keys = derive_keys(self.seed, epoch, "woven round")
        mixed = permute_each(
            place - number * per_round, np.full(len(place), per_round), number * self._weaves + weave, keys
        )
        slot = mixed // self._starts
        age = self._ages(slot)
        opened = (number - age) % max(1, self._rounds)
        turn = (opened * self._starts + mixed % self._starts) * self._weaves + weave
        visit[woven] = 2 * turn + (number < age)
        order = Permutation(self.blocks, self.seed, epoch, "woven blocks")
        block = order.forward(turn)
        keys = derive_keys(self.seed, epoch, "woven block")
        sample[woven] = block * self.block + permute_each(slot, np.full(len(slot), self.block), block, keys)
        # Then whole blocks that are too few for a round, and the samples after the last block.
        rest = positions[~woven] - whole
        rest = Permutation(self.samples - whole, self.seed, epoch, "woven rest").forward(rest)
        spare, spare_samples = self._rounds * self._starts * self._weaves, self.blocks * self.block - whole
        is_spare = rest < spare_samples
        of_block = order.forward(np.where(is_spare, spare + rest // self.block, 0)) if self.blocks else rest
        behind = self.blocks * self.block + rest - spare_samples
        sample[~woven] = np.where(is_spare, of_block * self.block + rest % self.block, behind)
        return _Places(visit, self._moved(epoch, sample))

    def _samples_at(self, epoch: int, positions: Int64s) -> Int64s:
        return self._places(epoch, positions).sample


class _Sized(Protocol):
    def sizes(self, field: str = ...) -> Sequence[int] | Int64s: ...


def woven(
    reader: _Sized,
    seed: int = 0,
    block_bytes: int = 256 << 10,
    open: int = 256,
    nodes: int = 1,
    field: str = "",
    *,
    workers: int = 1,
    batch_size: int = 1,
) -> Woven:
    """A woven order for a reader, by the mean size of one field; reads the column of lengths once.

    block_bytes: bytes of a block.
    open: at least the samples of a batch of one rank. Announced blocks are kept in memory, up to 256 MiB a process, so
        `open * block_bytes` should be below that.
    nodes: number of ranks.
    workers, batch_size: those of each rank's DataLoader, if its workers read (`ImageDataset`, `ImageStream`).

    Raises ValueError.
    """
    if block_bytes < 1:
        raise ValueError(f"block_bytes is {block_bytes}, expected at least 1")
    sizes = np.asarray(reader.sizes(field))
    mean = float(np.maximum(sizes, 0).mean()) if len(sizes) else 0.0
    block = max(1, round(block_bytes / max(1.0, mean)))
    return Woven(len(sizes), block, open, seed, nodes, workers, batch_size)
