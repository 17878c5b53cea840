"""The order for an epoch during which the set is still being staged: what is copied first is wanted first.

An order that looked at what is there would depend on timing: ranks would disagree about it, and no token could name
where it stood. So this order looks at nothing. It is a function of (seed, epoch, position) as all others are, and
staging follows it: `readers.stage(…, background=True, order=order)` copies the shards in the order of `shards()`.

Each shard is cut at random into `window` parts of one size. Round r of the epoch brings in the r-th shard and takes
one part of each of the last `window` shards, all of them shuffled together:

    round 0   A0                  window 3; A, B, C, … in the order of staging
    round 1   A1 B0
    round 2   A2 B1 C0
    round 3      B2 C1 D0
    round 4         C2 D1 E0

So a round needs no shard that comes later than its own, training follows half a window behind the copies, and a batch
mixes samples of `window` shards (of fewer in the first and last rounds). Every sample comes once an epoch whatever is
staged; what is not there when it is wanted is waited for, or read from the source, as the reader was told to
(`readers.open` with `fallback`).

Epochs begin to begin + epochs - 1 are of this kind, all others are those of `Shuffled`. Memory: about 32 bytes for each
part of a shard, for each of the two epochs used last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from readers.order.base import Int64s, PlainOrder, Spec, checked_positions, digest_of
from readers.order.keys import check_counter, derive_keys
from readers.order.permutation import Permutation, permute_each

__all__ = ["StagedFirst", "shard_starts", "staged_first"]


class _Shard(Protocol):
    @property
    def samples(self) -> int: ...


class _Split(Protocol):
    @property
    def shards(self) -> Sequence[_Shard]: ...


class _Epoch(NamedTuple):
    """The parts of shards as they come: which shard, the first of its samples (as permuted within the shard), and the
    position where the part begins (and the last ends). Where each round begins (and the last ends). The shards by turn.
    """

    shard: Int64s
    first: Int64s
    start: Int64s
    rounds: Int64s
    turns: Int64s


@dataclass(frozen=True, eq=False)
class StagedFirst(PlainOrder):
    """starts: int64 [shards + 1], rising from 0 to the number of samples: shard s is starts[s] to starts[s + 1].

    window: shards that a batch is mixed from. begin, epochs: the epochs that follow the staging; the job's first one
    unless told otherwise. Raises ValueError. Make one with `staged_first`.
    """

    starts: Int64s = field(repr=False)
    window: int = 4
    epochs: int = 1
    begin: int = 0
    seed: int = 0
    _tables: dict[tuple[int, int], _Epoch] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        check_counter("seed", self.seed)
        check_counter("begin", self.begin)
        if self.window < 1 or self.epochs < 1:
            raise ValueError(f"window ({self.window}) and epochs ({self.epochs}) must be at least 1")
        starts = np.asarray(self.starts, np.int64)
        if starts.ndim != 1 or not starts.size or starts[0] != 0 or bool((np.diff(starts) < 0).any()):
            raise ValueError("shard starts must rise from 0 to the number of samples")
        object.__setattr__(self, "starts", starts)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def follows(self, epoch: int) -> bool:
        """Whether this epoch follows the staging."""
        return self.begin <= epoch < self.begin + self.epochs

    def shards(self, epoch: int | None = None, cursor: int = 0) -> Int64s:
        """All shards in the order in which an epoch (by default `begin`) wants them from position `cursor` on.

        int64 [shards]. Those that it does not want any more come last. In an epoch that does not follow the staging all
        are wanted at once, so they come as in the first one that does.
        """
        wanted = self.begin if epoch is None else epoch
        follows = self.follows(wanted)
        table = self._table(wanted if follows else self.begin)
        turn = int(table.rounds.searchsorted(cursor, side="right")) - 1 if follows else 0
        return np.roll(table.turns, -max(0, turn - self._window + 1))

    def indices(self, epoch: int, positions: Int64s) -> Int64s:
        if not self.follows(epoch):
            return Permutation(len(self), self.seed, epoch).forward(positions)
        given = checked_positions(positions, len(self))
        if not given.size:
            return given
        table, flat = self._table(epoch), given.ravel()
        turn = table.rounds.searchsorted(flat, side="right") - 1
        first = table.rounds[turn]
        keys = derive_keys(self.seed, epoch, "staged round")
        place = first + permute_each(flat - first, table.rounds[turn + 1] - first, turn, keys)
        part = table.start.searchsorted(place, side="right") - 1
        shard = table.shard[part]
        start = self.starts[shard]
        keys = derive_keys(self.seed, epoch, "staged shard")
        inside = table.first[part] + place - table.start[part]
        found: Int64s = start + permute_each(inside, self.starts[shard + 1] - start, shard, keys)
        return found.reshape(given.shape)

    @cached_property
    def _digest(self) -> str:
        return digest_of(self.starts)

    def spec(self) -> Spec:
        return {
            "kind": "staged-first",
            "samples": len(self),
            "window": self.window,
            "epochs": self.epochs,
            "begin": self.begin,
            "starts": self._digest,
        }

    def resumed(self, spec: Mapping[str, Any]) -> StagedFirst:
        """Also from another window, and from other epochs that follow the staging. ResumeError for anything else."""
        names = ("window", "epochs", "begin")
        if all(isinstance(spec.get(name), int) for name in names):
            try:
                began = replace(self, **{name: spec[name] for name in names})
            except ValueError:
                began = self
            if began.spec() != self.spec() and began.spec() == spec:
                return began
        super().resumed(spec)
        return self

    # --- inside -------------------------------------------------------------------------------------------------
    @property
    def _window(self) -> int:
        return max(1, min(self.window, len(self.starts) - 1))

    def _table(self, epoch: int) -> _Epoch:
        table = self._tables.get((self.seed, epoch))
        if table is None:
            table = self._made(epoch)
            for old in list(self._tables)[:-1]:
                self._tables.pop(old, None)
            self._tables[self.seed, epoch] = table
        return table

    def _made(self, epoch: int) -> _Epoch:
        shards, window = len(self.starts) - 1, self._window
        turns = Permutation(shards, self.seed, epoch, "staged shards").forward(np.arange(shards, dtype=np.int64))
        size = (self.starts[1:] - self.starts[:-1])[turns]
        cut = np.arange(window + 1, dtype=np.int64)
        # [shards, window + 1]; what does not divide evenly comes early, which needs later shards later
        edges = size[:, None] // window * cut - (-(size[:, None] % window) * cut // window)
        # part i of the shard of turn t comes in round t + i
        in_round = np.add.outer(np.arange(shards), cut[:-1]).ravel()
        order = np.argsort(in_round, kind="stable")
        start = np.zeros(shards * window + 1, np.int64)
        np.cumsum(np.diff(edges, axis=1).ravel()[order], out=start[1:])
        rounds = start[in_round[order].searchsorted(np.arange(shards + window))] if shards else start
        return _Epoch(np.repeat(turns, window)[order], edges[:, :-1].ravel()[order], start, rounds, turns)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": {}}


def shard_starts(split: _Split) -> Int64s:
    """The first sample of each shard of a split (`reader.split_info`), and the number of all: int64 [shards + 1]."""
    return np.append(0, np.cumsum([shard.samples for shard in split.shards], dtype=np.int64))


def staged_first(split: _Split, seed: int = 0, window: int = 4, epochs: int = 1, begin: int = 0) -> StagedFirst:
    """The order for a split of a packed set, given as `reader.split_info`, that is staged in the background."""
    return StagedFirst(shard_starts(split), window, epochs, begin, seed)
