"""Orders with locality: by blocks, by shards in the order of staging, and by parts of nodes.

`BlockShuffled` permutes blocks, runs of consecutive samples of about `block_bytes`; `window` consecutive blocks of the
result form a window, whose samples are permuted. Storage sees reads close to each other, but reads of whole blocks only
if one process takes all batches of a window, because each rank reads only its own samples. A batch of b samples comes
from the blocks of one window, so it mixes about window / (window + b) as well as a global shuffle, by
`readers.order.quality`. A set sorted by class needs a window of hundreds of blocks; for a set shuffled when packed the
default is enough.

`StagedFirst` is for an epoch during which the set is still being staged. An order that adapted to the staged files
would depend on timing, so ranks would disagree and it could not be resumed. So this order is fixed, and staging follows
it: `readers.stage(…, background=True, order=order)` copies the shards in the order of `shards()`. Each shard is divided
at random into `window` parts of one size. Round r of the epoch adds the r-th shard and takes one part of each of the
last `window` shards, all of them shuffled together:

    round 0   A0                  window 3; A, B, C, … in the order of staging
    round 1   A1 B0
    round 2   A2 B1 C0
    round 3      B2 C1 D0
    round 4         C2 D1 E0

So a round needs only its own and earlier shards, training follows half a window behind the copies, and a batch mixes
samples of `window` shards (fewer in the first and last rounds). Every sample comes once an epoch. For a sample that is
not staged in time, the reader waits, or reads it from the source (`readers.open` with `fallback`).

`NodeLocal` restricts each node to its own part of the samples, and exchanges all parts every few epochs. A node with a
copy of its part on local disks or in memory reads nothing from the shared file system in between. Part g is a
contiguous slice of the samples; sizes differ by at most one. Position p belongs to node p mod nodes, to the end of the
epoch: nodes with parts larger by one come first, so the last positions are theirs.

Memory: 8 bytes a block, and 16 more for each of the two epochs used last; about 32 bytes for each part of a shard, for
each of the two epochs used last.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt

from readers.order.base import (
    Int64s,
    Permutation,
    PlainOrder,
    Spec,
    check_counter,
    check_samples,
    derive_keys,
    digest_of,
    permute_each,
)

_CHUNK_SAMPLES = 1 << 20
_Table = TypeVar("_Table")


class _Sized(Protocol):
    def sizes(self, field: str = ...) -> Int64s: ...


class _Shard(Protocol):
    @property
    def samples(self) -> int: ...


class _Split(Protocol):
    @property
    def shards(self) -> Sequence[_Shard]: ...


@dataclass(frozen=True, eq=False)
class _OfRuns(PlainOrder, Generic[_Table]):
    """An order over runs of consecutive samples, with a table for each epoch; the last two tables are kept."""

    starts: Int64s = field(repr=False)
    _tables: dict[tuple[int, int], _Table] = field(init=False, repr=False, default_factory=dict)
    _run: ClassVar[str]
    _least: ClassVar[int]  # samples of a run

    def __post_init__(self) -> None:
        super().__post_init__()
        starts = np.asarray(self.starts, np.int64)
        if starts.ndim != 1 or not starts.size or starts[0] != 0 or bool((np.diff(starts) < self._least).any()):
            raise ValueError(f"{self._run} starts must rise from 0 to the number of samples")
        object.__setattr__(self, "starts", starts)

    def __len__(self) -> int:
        return int(self.starts[-1])

    @abstractmethod
    def _compute_table(self, epoch: int) -> _Table: ...

    def _table(self, epoch: int) -> _Table:
        table = self._tables.get((self.seed, epoch))
        if table is None:
            table = self._compute_table(epoch)
            for old in list(self._tables)[:-1]:
                self._tables.pop(old, None)
            self._tables[self.seed, epoch] = table
        return table

    @property
    def table_bytes(self) -> int:
        """Bytes of memory of the starts and of the kept tables."""
        columns = [column for table in self._tables.values() for column in cast("tuple[Int64s, ...]", table)]
        return self.starts.nbytes + sum(column.nbytes for column in columns)

    @cached_property
    def _digest(self) -> str:
        return digest_of(self.starts)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": {}}


# --- blocks -----------------------------------------------------------------------------------------------------
class _Blocks(NamedTuple):
    """The blocks of an epoch in their order, and the first position of each (and the end of the last)."""

    blocks: Int64s
    starts: Int64s


@dataclass(frozen=True, eq=False)
class BlockShuffled(_OfRuns[_Blocks]):
    """starts: int64 [blocks + 1], rising from 0 to the number of samples: block b is starts[b] to starts[b + 1].

    Raises ValueError for starts that do not rise or a window below 1. Make one from a reader with `block_shuffled`.
    """

    window: int = 64
    seed: int = 0
    _run, _least = "block", 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1:
            raise ValueError(f"window is {self.window}, expected at least 1 block")

    @property
    def blocks(self) -> int:
        return len(self.starts) - 1

    @property
    def open_positions(self) -> int:
        """Number of positions within which all samples of a block come: about those of a window."""
        return min(len(self), -(-self.window * len(self) // max(1, self.blocks)))

    @property
    def open_samples(self) -> int:
        """Number of samples of all blocks that are read at a time: a window is read before the previous one ends."""
        return min(len(self), 2 * self.open_positions)

    def is_read_alone(self, processes: int, workers: int, batch_size: int) -> bool:
        """Whether each process reads separate blocks: only with a single process."""
        return processes == workers == 1

    def visits(self, epoch: int, positions: Int64s) -> Int64s:
        """For each position, the place of its block in the epoch's sequence of blocks, int64 [k]."""
        table = self._table(epoch)
        place = np.empty(self.blocks, np.int64)
        place[table.blocks] = np.arange(self.blocks)
        return place[self.starts.searchsorted(self._samples_at(epoch, positions), side="right") - 1]

    def samples_of(self, epoch: int, visits: Int64s) -> list[Int64s]:
        """The samples of the blocks at these places of the sequence."""
        return [np.arange(*self.starts[block : block + 2]) for block in self._table(epoch).blocks[visits].tolist()]

    def spec(self) -> Spec:
        spec: Spec = {"kind": "block-shuffled", "samples": len(self), "window": self.window}
        return {**spec, "blocks": self.blocks, "starts": self._digest}

    def _samples_at(self, epoch: int, positions: Int64s) -> Int64s:
        table = self._table(epoch)
        window = (table.starts.searchsorted(positions, side="right") - 1) // self.window
        first = table.starts[window * self.window]
        last = table.starts[np.minimum((window + 1) * self.window, self.blocks)]
        keys = derive_keys(self.seed, epoch, "block window")
        shuffled = first + permute_each(positions - first, last - first, window, keys)
        slot = table.starts.searchsorted(shuffled, side="right") - 1
        return self.starts[table.blocks[slot]] + shuffled - table.starts[slot]

    def _compute_table(self, epoch: int) -> _Blocks:
        permutation = Permutation(self.blocks, self.seed, epoch, "blocks")
        blocks = permutation.forward(np.arange(self.blocks, dtype=np.int64))
        return _Blocks(blocks, np.append(0, np.cumsum(np.diff(self.starts)[blocks])))


def block_starts(sizes: npt.NDArray[Any], block_bytes: int) -> Int64s:
    """The starts of blocks of about `block_bytes`, int64 [blocks + 1].

    A block begins at each sample whose offset in the sum of sizes is in another multiple of block_bytes; a sample
    larger than that is a block alone or ends one. sizes: bytes of each sample, [n], read in one pass of chunks.
    """
    if block_bytes < 1:
        raise ValueError(f"block_bytes is {block_bytes}, expected at least 1")
    starts, before, total = [], -1, 0
    for first in range(0, len(sizes), _CHUNK_SAMPLES):
        part = np.maximum(np.asarray(sizes[first : first + _CHUNK_SAMPLES], np.int64), 0)
        ends = np.cumsum(part) + total
        cells = (ends - part) // block_bytes
        starts.append(first + np.flatnonzero(np.diff(cells, prepend=before)))
        before, total = int(cells[-1]), int(ends[-1])
    return np.concatenate([*starts, [len(sizes)]]).astype(np.int64)


def block_shuffled(
    reader: _Sized, seed: int = 0, block_bytes: int = 8 << 20, window: int = 64, field: str = ""
) -> BlockShuffled:
    """A block shuffle for a reader, by the bytes of one field; reads the column of lengths once."""
    return BlockShuffled(block_starts(reader.sizes(field), block_bytes), window, seed)


# --- staging ----------------------------------------------------------------------------------------------------
class _Parts(NamedTuple):
    """The parts of shards in the order of an epoch.

    shard: the shard of each part. first: its first sample in the shard's permutation. start: its first position (and
    the end of the last). rounds: the first part of each round (and the end of the last). turns: the shards by turn.
    """

    shard: Int64s
    first: Int64s
    start: Int64s
    rounds: Int64s
    turns: Int64s


@dataclass(frozen=True, eq=False)
class StagedFirst(_OfRuns[_Parts]):
    """Epochs begin to begin + epochs - 1 follow the staging; all others are as in `Shuffled`.

    starts: int64 [shards + 1], rising from 0 to the number of samples: shard s is starts[s] to starts[s + 1].
    window: shards from which a batch is mixed. begin, epochs: default: the job's first epoch. Raises ValueError. Make
    one with `staged_first`. An epoch is also resumed with another window, begin or number of epochs.
    """

    window: int = 4
    epochs: int = 1
    begin: int = 0
    seed: int = 0
    _run, _least = "shard", 0
    _kept_by_epoch = ("window", "epochs", "begin")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counter("begin", self.begin)
        if self.window < 1 or self.epochs < 1:
            raise ValueError(f"window ({self.window}) and epochs ({self.epochs}) must be at least 1")

    def follows(self, epoch: int) -> bool:
        """Whether this epoch follows the staging."""
        return self.begin <= epoch < self.begin + self.epochs

    def shards(self, epoch: int | None = None, cursor: int = 0) -> Int64s:
        """All shards in the order in which an epoch (default: `begin`) reads them from position `cursor` on.

        int64 [shards]. Shards that are not read any more come last. An epoch that does not follow the staging reads
        all shards at once, so the order is that of the first epoch that follows it.
        """
        epoch = self.begin if epoch is None else epoch
        follows = self.follows(epoch)
        table = self._table(epoch if follows else self.begin)
        turn = int(table.rounds.searchsorted(cursor, side="right")) - 1 if follows else 0
        return np.roll(table.turns, -max(0, turn - self._mixed_shards + 1))

    def spec(self) -> Spec:
        spec: Spec = {"kind": "staged-first", "samples": len(self), "window": self.window, "epochs": self.epochs}
        return {**spec, "begin": self.begin, "starts": self._digest}

    def _samples_at(self, epoch: int, positions: Int64s) -> Int64s:
        if not self.follows(epoch):
            return Permutation(len(self), self.seed, epoch).forward(positions)
        table = self._table(epoch)
        turn = table.rounds.searchsorted(positions, side="right") - 1
        first = table.rounds[turn]
        keys = derive_keys(self.seed, epoch, "staged round")
        shuffled = first + permute_each(positions - first, table.rounds[turn + 1] - first, turn, keys)
        part = table.start.searchsorted(shuffled, side="right") - 1
        shard = table.shard[part]
        start = self.starts[shard]
        keys = derive_keys(self.seed, epoch, "staged shard")
        inside = table.first[part] + shuffled - table.start[part]
        samples: Int64s = start + permute_each(inside, self.starts[shard + 1] - start, shard, keys)
        return samples

    @property
    def _mixed_shards(self) -> int:
        return max(1, min(self.window, len(self.starts) - 1))

    def _compute_table(self, epoch: int) -> _Parts:
        shards, window = len(self.starts) - 1, self._mixed_shards
        turns = Permutation(shards, self.seed, epoch, "staged shards").forward(np.arange(shards, dtype=np.int64))
        size = np.diff(self.starts)[turns]
        cut = np.arange(window + 1, dtype=np.int64)
        # [shards, window + 1]; remainders come early, so that later shards are needed later
        edges = size[:, None] // window * cut - (-(size[:, None] % window) * cut // window)
        # part i of the shard of turn t comes in round t + i
        in_round = np.add.outer(np.arange(shards), cut[:-1]).ravel()
        order = np.argsort(in_round, kind="stable")
        start = np.append(0, np.cumsum(np.diff(edges, axis=1).ravel()[order]))
        rounds = start[in_round[order].searchsorted(np.arange(shards + window))] if shards else start
        return _Parts(np.repeat(turns, window)[order], edges[:, :-1].ravel()[order], start, rounds, turns)


def shard_starts(split: _Split) -> Int64s:
    """The first sample of each shard of a split (`reader.split_info`), and the total: int64 [shards + 1]."""
    return np.append(0, np.cumsum([shard.samples for shard in split.shards], dtype=np.int64))


def staged_first(split: _Split, seed: int = 0, window: int = 4, epochs: int = 1, begin: int = 0) -> StagedFirst:
    """The order for a split (`reader.split_info`) of a packed set that is staged in the background."""
    return StagedFirst(shard_starts(split), window, epochs, begin, seed)


# --- nodes ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class NodeLocal(PlainOrder):
    """An order permuted within each node's part, and over all samples in every `exchange_every`-th epoch.

    Epochs exchange_every - 1, 2 * exchange_every - 1, … are those of `Shuffled`; 1 exchanges in each. A node gets its
    own positions where ranks are numbered node by node, as `cache.node` numbers them; a rank that is given to a loader
    must be of that kind. An epoch that began with other nodes, or another exchange_every, is resumed with the parts
    that it began with.
    """

    samples: int
    nodes: int
    exchange_every: int = 8
    seed: int = 0
    _kept_by_epoch = ("nodes", "exchange_every")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_samples(self.samples)
        if self.nodes < 1 or self.exchange_every < 1:
            raise ValueError(f"nodes ({self.nodes}) and exchange_every ({self.exchange_every}) must be at least 1")

    @property
    def groups(self) -> int:
        return self.nodes

    def __len__(self) -> int:
        return self.samples

    def exchanges(self, epoch: int) -> bool:
        """Whether every node needs samples of every part in this epoch."""
        return epoch % self.exchange_every == self.exchange_every - 1

    def local_part(self, node: int) -> range:
        """The samples of a node in the epochs between exchanges."""
        if not 0 <= node < self.nodes:
            raise IndexError(f"node {node} is outside the {self.nodes} of this order")
        size, longer = divmod(self.samples, self.nodes)
        start = node * size + min(node, longer)
        return range(start, start + size + (node < longer))

    def spec(self) -> Spec:
        spec: Spec = {"kind": "node-local", "samples": self.samples}
        return {**spec, "nodes": self.nodes, "exchange_every": self.exchange_every}

    def _samples_at(self, epoch: int, positions: Int64s) -> Int64s:
        if self.exchanges(epoch):
            return Permutation(self.samples, self.seed, epoch).forward(positions)
        inside, node = np.divmod(positions, self.nodes)
        size, longer = divmod(self.samples, self.nodes)
        keys = derive_keys(self.seed, epoch, "node-local")
        return node * size + np.minimum(node, longer) + permute_each(inside, size + (node < longer), node, keys)
