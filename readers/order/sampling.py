"""Orders that do not have every sample once: drawn by weight, and every class equally often.

`Weighted` draws with replacement. An epoch of `ClassBalanced` is a sequence of rounds; a round has each class once, in
a separate order. A class gives its samples in a permuted cycle: all of them once, then all of them again in another
order.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from cache.errors import ResumeError
from cache.node import rank_and_world_size
from readers.order.base import (
    MAX_SAMPLES,
    Int64s,
    Permutation,
    PlainOrder,
    Spec,
    check_counter,
    check_samples,
    derive_keys,
    digest_of,
    permute_each,
    uniform,
)


@dataclass(frozen=True, eq=False)
class Weighted(PlainOrder):
    """P(sample i at a position) = weights[i] / sum(weights), independent of all other positions.

    weights: float [n], finite and non-negative, not all 0.
    samples: positions in an epoch; default: n.

    Takes 8 bytes a sample for the cumulative weights. Raises ValueError for invalid weights.
    """

    weights: npt.ArrayLike = field(repr=False)
    samples: int | None = None
    seed: int = 0
    _cumulative: npt.NDArray[np.float64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples is not None:
            check_samples(self.samples)
        weights = np.asarray(self.weights, np.float64)
        if weights.ndim != 1 or not weights.size:
            raise ValueError(f"weights must be one number for each sample, found an array of shape {weights.shape}")
        bad = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
        if bad.size:
            raise ValueError(f"the weight of sample {bad[0]} is {weights[bad[0]]}, expected a finite number from 0 up")
        with np.errstate(over="ignore"):
            cumulative = np.cumsum(weights)
        if not 0 < cumulative[-1] < np.inf:
            raise ValueError(f"the weights add up to {cumulative[-1]}, expected a finite sum above 0")
        object.__setattr__(self, "_cumulative", cumulative)

    def __len__(self) -> int:
        return len(self._cumulative) if self.samples is None else self.samples

    def spec(self) -> Spec:
        return {"kind": "weighted", "samples": len(self._cumulative), "length": len(self), "weights": self._digest}

    def _samples_at(self, epoch: int, positions: Int64s) -> Int64s:
        key = derive_keys(self.seed, epoch, "weighted")[0]
        # u < 1 and rounding keep the product below the sum; "right" of equal sums is a sample with weight
        drawn = uniform(key, positions) * self._cumulative[-1]
        samples: Int64s = self._cumulative.searchsorted(drawn, side="right").astype(np.int64)
        return samples

    @cached_property
    def _digest(self) -> str:
        return digest_of(self._cumulative)


@dataclass(frozen=True, eq=False)
class ClassBalanced(PlainOrder):
    """Draws each class that has samples len / classes times an epoch, plus or minus one.

    labels: int [n]; samples with a negative one (NO_LABEL) are never drawn. samples: positions in an epoch, by
    default as many as there are labelled samples. Memory: 8 bytes a sample. Raises ValueError where no sample has a
    label.
    """

    labels: npt.ArrayLike = field(repr=False)
    samples: int | None = None
    seed: int = 0
    _members: Int64s = field(init=False, repr=False)  # samples by class
    _starts: Int64s = field(init=False, repr=False)  # of each class in _members, and their number

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples is not None:
            check_samples(self.samples)
        labels = np.asarray(self.labels)
        if labels.ndim != 1 or (labels.size and labels.dtype.kind not in "iu"):
            raise ValueError(f"labels must be integers, one for each sample; found {labels.dtype} {labels.shape}")
        members = np.argsort(labels, kind="stable").astype(np.int64)
        ranked = labels[members]
        members, ranked = members[ranked >= 0], ranked[ranked >= 0]
        if not members.size:
            raise ValueError(f"no sample to balance: none of the {labels.size} has a label")
        starts = np.flatnonzero(np.diff(ranked, prepend=-1, append=-1)).astype(np.int64)
        object.__setattr__(self, "_members", members)
        object.__setattr__(self, "_starts", starts)

    def __len__(self) -> int:
        return len(self._members) if self.samples is None else self.samples

    @property
    def classes(self) -> int:
        """Classes that have samples."""
        return len(self._starts) - 1

    def spec(self) -> Spec:
        spec: Spec = {"kind": "class-balanced", "samples": int(np.size(self.labels))}
        return {**spec, "length": len(self), "labels": self._digest}

    def _samples_at(self, epoch: int, positions: Int64s) -> Int64s:
        turn, slot = np.divmod(positions, self.classes)
        order_keys = derive_keys(self.seed, epoch, "balanced classes")
        number = permute_each(slot, np.full(slot.shape, self.classes), turn, order_keys)
        start = self._starts[number]
        size = self._starts[number + 1] - start
        cycle, inside = np.divmod(turn, size)
        cycle_keys = derive_keys(self.seed, epoch, "balanced samples")
        chosen = permute_each(inside, size, cycle * self.classes + number, cycle_keys)
        samples: Int64s = self._members[start + chosen]
        return samples

    @cached_property
    def _digest(self) -> str:
        return digest_of(self._members, self._starts)


# `Mixed` is an order over several sets in fixed shares, for a reader made by `readers.concat`.
#
#     reader = readers.concat([photos, drawings])
#     order = Mixed([len(photos), len(drawings)], weights=[0.9, 0.1], seed=7)
#     loader = ImageLoader(reader, 256, order=order)
#
# An epoch has a fixed number of positions for each set, so its share is exact in every epoch and on any number of
# ranks. Position p of the epoch is draw q = P(p), where P permutes all positions; the first quota of draws is the
# first set's, and so on. The samples of a set come in cycles that continue from epoch to epoch: all of them once in one
# order, then all of them again in another. So no sample of a set comes twice before all others have come once, even if
# an epoch has room for only a part of the set, and a small set that fills half of every epoch repeats evenly.


@dataclass(frozen=True, eq=False)
class Mixed(PlainOrder):
    """sizes: samples of each set, in the order in which they were concatenated.

    weights: the share of each set, any finite numbers from 0 up; default: the sizes.
    samples: positions in an epoch; default: the number of samples.

    The shares are rounded to whole positions, the largest remainders up. Memory: 24 bytes a set. Raises ValueError.
    """

    sizes: Sequence[int]
    weights: Sequence[float] | None = None
    samples: int | None = None
    seed: int = 0
    _starts: Int64s = field(init=False, repr=False)  # of the sets among the samples
    _quotas: Int64s = field(init=False, repr=False)  # positions of each set in an epoch
    _ends: Int64s = field(init=False, repr=False)  # of the quotas

    def __post_init__(self) -> None:
        super().__post_init__()
        for size in self.sizes:
            check_samples(size)
        sizes = np.array(self.sizes, np.int64)
        if not len(sizes):
            raise ValueError("a mixture needs at least one set, but sizes is empty")
        length = int(sizes.sum()) if self.samples is None else self.samples
        check_samples(length)
        quotas = _quotas(sizes.astype(np.float64) if self.weights is None else self.weights, sizes, length)
        object.__setattr__(self, "_starts", np.cumsum(sizes) - sizes)
        object.__setattr__(self, "_quotas", quotas)
        object.__setattr__(self, "_ends", np.cumsum(quotas))

    @property
    def quotas(self) -> tuple[int, ...]:
        """Positions of each set in an epoch."""
        return tuple(self._quotas.tolist())

    def __len__(self) -> int:
        return int(self._ends[-1])

    def spec(self) -> Spec:
        sizes = np.array(self.sizes, np.int64)
        spec: Spec = {"kind": "mixed", "samples": int(sizes.sum()), "length": len(self), "sets": len(sizes)}
        return {**spec, "quotas": digest_of(sizes, self._quotas)}

    def _samples_at(self, epoch: int, positions: Int64s) -> Int64s:
        draws = Permutation(len(self), self.seed, epoch, "mixed").forward(positions)
        number = self._ends.searchsorted(draws, side="right")
        # Samples taken by earlier epochs of each set: cycles are counted from epoch 0, with keys independent of epochs.
        before = [divmod(epoch * quota, size or 1) for quota, size in zip(self.quotas, self.sizes, strict=True)]
        cycles, first = (np.array([pair[i] % MAX_SAMPLES for pair in before], np.int64)[number] for i in (0, 1))
        size = np.array(self.sizes, np.int64)[number]
        more, inside = np.divmod(first + draws - (self._ends - self._quotas)[number], size)
        tweak = (cycles + more) % (MAX_SAMPLES // len(self.sizes)) * len(self.sizes) + number
        keys = derive_keys(self.seed, 0, "mixed samples")
        samples: Int64s = self._starts[number] + permute_each(inside, size, tweak, keys)
        return samples


def _quotas(weights: npt.ArrayLike, sizes: Int64s, length: int) -> Int64s:
    """Positions of each set, by the largest-remainder method. Raises ValueError for invalid weights."""
    shares = np.asarray(weights, np.float64)
    if shares.shape != sizes.shape or not (np.isfinite(shares) & (shares >= 0)).all():
        raise ValueError(f"weights are {len(sizes)} finite numbers from 0 up, one for each set, not {weights!r:.200}")
    total = float(shares.sum())
    if not np.isfinite(total) or (total == 0 and length):
        raise ValueError(f"the weights add up to {total}, expected a finite sum above 0")
    if not length:
        return np.zeros(len(sizes), np.int64)
    exact = shares / total * length
    quotas = np.floor(exact).astype(np.int64)
    left = length - int(quotas.sum())
    quotas[np.argsort(quotas - exact, kind="stable")[:left]] += 1
    empty = np.flatnonzero((sizes == 0) & (quotas > 0))
    if len(empty):
        raise ValueError(f"set {empty[0]} has a weight, {shares[empty[0]]}, but no samples; leave it out")
    return quotas


# `Bucketed` is an order in which all samples of a step, on all ranks, belong to one bucket, such as one image shape.
#
#     buckets = AspectBuckets.of_area(512 * 512)                       # readers.augment: shapes, height and width
#     order = Bucketed(buckets.of(reader.info), batch_size=32, seed=7)
#     loader = ImageLoader(reader, 32, order=order, augment=[ResizeToBucket(buckets), RandomHorizontalFlip()])
#
# The samples of each bucket are permuted and cut into steps; the steps of all buckets come in a random sequence.
# A table has an entry for each step, not for each sample: its bucket, and its start in the bucket's permutation.
#
#     position p ─► step s, by the bounds of the steps ─► bucket b, and place q in it ─► sample P_b(q)
#
# A step has batch_size x world_size samples, so these numbers are part of the order. An epoch that is resumed with
# other numbers keeps its finished steps, and divides the remaining samples of each bucket into new steps: a bucket's
# samples are used by ascending q, so the rest of its permutation remains, and no sample is lost or repeated. The spec
# of the order lists the cursors from which sizes apply ("0:32*8;8192:32*6"), so an epoch may be resumed repeatedly.
#
# The samples at the end of a bucket that do not fill a step:
#
#     pad         repeats of the bucket's first samples fill the step: every sample comes at least once
#     drop_last   they are left out in this epoch (see `left_out`); they differ from epoch to epoch
#
# Memory: 4 bytes a sample, below 2^32 of them, and 24 bytes a step for each of the two epochs used last.


_MAX_BUCKETS = 1 << 15
_MAX_CHANGES = 1 << 12


class _Stage(NamedTuple):
    """From `cursor` of an epoch on, each of `world_size` ranks takes batch_sizes[b] samples of bucket b in a step."""

    cursor: int
    batch_sizes: tuple[int, ...]  # one for all buckets, or one for each
    world_size: int

    def step_samples(self, buckets: int) -> Int64s:
        """Samples of a step by bucket, of all ranks, int64 [buckets]."""
        sizes = np.array(self.batch_sizes, np.int64) * self.world_size
        return np.broadcast_to(sizes, (buckets,))

    def __str__(self) -> str:
        return f"{self.cursor}:{','.join(map(str, self.batch_sizes))}*{self.world_size}"


class _Steps(NamedTuple):
    """The steps of an epoch, in their sequence.

    bounds: position where each begins, and the last ends. bucket: of each. first: place in its bucket's permutation.
    """

    bounds: Int64s
    bucket: Int64s
    first: Int64s


@dataclass(frozen=True, eq=False)
class Bucketed(PlainOrder):
    """An order whose steps have samples of one bucket each.

    buckets: int [n], the bucket of each sample, from 0 up.
    batch_size: samples of one rank in a step: one number, or one for each bucket (`AspectBuckets.batch_sizes` gives
        sizes with about equal numbers of pixels). The loader gets the largest.
    world_size: ranks; by default found in torch.distributed or the launcher's variables, here and now.
    tail: "pad" or "drop_last"; the tail of the loader has no meaning, since all steps are whole.

    Raises ValueError.
    """

    buckets: npt.ArrayLike = field(repr=False)
    batch_size: int | Sequence[int] = 1
    world_size: int | None = None
    tail: Literal["pad", "drop_last"] = "pad"
    seed: int = 0
    _members: npt.NDArray[np.integer[Any]] = field(init=False, repr=False)  # samples by bucket
    _starts: Int64s = field(init=False, repr=False)  # of each bucket in _members, and their number
    _stages: tuple[_Stage, ...] = field(init=False, repr=False)
    _epoch: int | None = field(init=False, repr=False, default=None)  # that has more than one stage
    _tables: dict[tuple[int, int], _Steps] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        buckets = np.asarray(self.buckets)
        if buckets.ndim != 1 or (buckets.size and buckets.dtype.kind not in "iu"):
            raise ValueError(f"buckets are integers, one for each sample; found {buckets.dtype} {buckets.shape}")
        count = int(buckets.max()) + 1 if buckets.size else 0
        if buckets.size and (int(buckets.min()) < 0 or count > _MAX_BUCKETS):
            raise ValueError(f"buckets are numbers from 0 to {_MAX_BUCKETS - 1}, found {buckets.min()} to {count - 1}")
        sizes = (self.batch_size,) if isinstance(self.batch_size, (int, np.integer)) else tuple(self.batch_size)
        if not sizes or min(sizes) < 1 or (len(sizes) > 1 and len(sizes) < count):
            raise ValueError(
                f"batch_size is one number from 1 up, or one for each of the {count} buckets, not {self.batch_size!r}"
            )
        if self.tail not in ("pad", "drop_last"):
            raise ValueError(f"tail is pad or drop_last, not {self.tail!r}")
        world_size = rank_and_world_size(None, None)[1] if self.world_size is None else self.world_size
        if world_size < 1:
            raise ValueError(f"world_size is at least 1, not {world_size}")
        object.__setattr__(self, "world_size", world_size)
        small = buckets.astype(np.uint16, copy=False)  # which sorts by radix
        members = np.argsort(small, kind="stable").astype(np.uint32 if len(small) < 1 << 32 else np.int64)
        counts = np.bincount(small, minlength=max(count, len(sizes)))
        object.__setattr__(self, "_members", members)
        object.__setattr__(self, "_starts", np.append(0, np.cumsum(counts)).astype(np.int64))
        object.__setattr__(self, "_stages", (_Stage(0, tuple(map(int, sizes)), int(world_size)),))
        object.__setattr__(self, "buckets", small)

    # --- steps ----------------------------------------------------------------------------------------------------
    @property
    def largest_batch(self) -> int:
        """Largest number of samples of one rank in a step."""
        return max(self._stages[-1].batch_sizes)

    def step_bounds(self, epoch: int) -> Int64s:
        """The first position of each step of an epoch, and the end of the last: int64 [steps + 1], read-only."""
        return self._table(epoch).bounds

    def step_buckets(self, epoch: int) -> Int64s:
        """The bucket of each step of an epoch, int64 [steps], read-only."""
        return self._table(epoch).bucket

    def left_out(self, epoch: int) -> Int64s:
        """The samples left out of an epoch, int64 [k], sorted; none with tail="pad"."""
        dealt = np.zeros(len(self._members), np.bool_)
        for first in range(0, self._length(epoch), 1 << 20):
            last = min(first + (1 << 20), self._length(epoch))
            dealt[self.indices(epoch, np.arange(first, last))] = True
        return np.flatnonzero(~dealt)

    # --- an order ---------------------------------------------------------------------------------------------------
    def __len__(self) -> int:
        return self._length(self._epoch or 0)

    def spec(self) -> Spec:
        steps = ";".join(map(str, self._stages))
        spec: Spec = {"kind": "bucketed", "samples": len(self._members), "buckets": self._digest}
        return {**spec, "tail": self.tail, "steps": steps}

    def with_seed(self, seed: int) -> Bucketed:
        other = copy.copy(self)
        object.__setattr__(other, "seed", check_counter("seed", seed))
        object.__setattr__(other, "_tables", {})
        return other

    def resumed(self, spec: Mapping[str, Any], epoch: int = 0, cursor: int = 0) -> Bucketed:
        began, current = dict(spec), self.spec()
        stages, now = _parse(began.pop("steps", None), len(self._starts) - 1), self._stages[-1]
        current.pop("steps")
        if began != current or not stages:
            return super().resumed(spec)  # raises ResumeError
        if stages[-1][1:] != now[1:]:
            stages = (*(stage for stage in stages if stage.cursor < cursor), now._replace(cursor=cursor))
        if stages == self._stages:
            return self
        other = copy.copy(self)
        object.__setattr__(other, "_stages", stages)
        object.__setattr__(other, "_epoch", epoch)
        object.__setattr__(other, "_tables", {})
        if any(cursor not in other._bounds_until(epoch, number) for number, cursor in other._cuts()):
            raise ResumeError(f"the epoch was resumed at {spec['steps']!r:.200}, but no step of this order ends there")
        return other

    def recorded(self, spec: Mapping[str, Any], epoch: int, cursor: int) -> Bucketed:
        """The order of this spec, with the batches and ranks of its last stage."""
        last = (_parse(spec.get("steps"), len(self._starts) - 1) or self._stages)[-1]
        sizes = last.batch_sizes if len(last.batch_sizes) > 1 else last.batch_sizes[0]
        return replace(self, batch_size=sizes, world_size=last.world_size).resumed(spec, epoch, cursor)

    def indices(self, epoch: int, positions: Int64s) -> Int64s:
        array = np.asarray(positions, np.int64)
        length = self._length(epoch)
        if array.size and int(array.ravel().view(np.uint64).max()) >= length:
            raise IndexError(
                f"positions {array.min()} to {array.max()} are not all inside the {length} of epoch {epoch}"
            )
        return self._samples_at(epoch, array.ravel()).reshape(array.shape) if array.size else array

    def _samples_at(self, epoch: int, positions: Int64s) -> Int64s:
        table = self._table(epoch)
        step = table.bounds.searchsorted(positions, side="right") - 1
        bucket = table.bucket[step]
        size = self._starts[bucket + 1] - self._starts[bucket]
        place = (table.first[step] + positions - table.bounds[step]) % size  # beyond the end are repeats
        keys = derive_keys(self.seed, epoch, "bucket samples")
        samples: Int64s = self._members[self._starts[bucket] + permute_each(place, size, bucket, keys)].astype(np.int64)
        return samples

    # --- inside -----------------------------------------------------------------------------------------------------
    def _length(self, epoch: int) -> int:
        return int(self._table(epoch).bounds[-1])

    def _table(self, epoch: int) -> _Steps:
        table = self._tables.get((self.seed, epoch))
        if table is None:
            table = self._compute_table(epoch, self._stages if epoch == self._epoch else self._stages[-1:])
            for old in list(self._tables)[:-1]:
                self._tables.pop(old, None)
            self._tables[self.seed, epoch] = table
        return table

    def _compute_table(self, epoch: int, stages: Sequence[_Stage]) -> _Steps:
        sizes, begin = np.diff(self._starts), 0
        taken = np.zeros(len(sizes), np.int64)
        parts: list[_Steps] = []
        for number, stage in enumerate(stages):
            part = self._cut(epoch, number, stage, np.maximum(sizes - taken, 0))
            first = part.first + taken[part.bucket]
            bounds = part.bounds + begin
            if number + 1 < len(stages):
                steps = int(bounds.searchsorted(stages[number + 1].cursor))
                bounds, first, part = bounds[: steps + 1], first[:steps], part._replace(bucket=part.bucket[:steps])
                counts = np.bincount(part.bucket, minlength=len(sizes))
                taken = taken + counts * stage.step_samples(len(sizes))
                begin = int(bounds[-1])
            parts.append(_Steps(bounds[:-1] if number + 1 < len(stages) else bounds, part.bucket, first))
        table = _Steps(*map(np.concatenate, zip(*parts, strict=True)))
        for column in table:
            column.flags.writeable = False
        return table

    def _cut(self, epoch: int, number: int, stage: _Stage, left: Int64s) -> _Steps:
        """The steps for `left` remaining samples of each bucket, with positions counted from the first of these."""
        sizes = stage.step_samples(len(left))
        counts = left // sizes if self.tail == "drop_last" else -(-left // sizes)
        in_turn = np.repeat(np.arange(len(left), dtype=np.int64), counts)
        permutation = Permutation(len(in_turn), self.seed, epoch, f"bucket steps {number}")
        bucket = in_turn[permutation.forward(np.arange(len(in_turn), dtype=np.int64))]
        # The first step of a bucket in the sequence takes its first samples.
        turn = np.empty(len(bucket), np.int64)
        turn[np.argsort(bucket, kind="stable")] = np.arange(len(bucket)) - np.repeat(np.cumsum(counts) - counts, counts)
        return _Steps(np.append(0, np.cumsum(sizes[bucket])), bucket, turn * sizes[bucket])

    def _cuts(self) -> list[tuple[int, int]]:
        """(stages before it, cursor) of every change of the sizes."""
        return [(number, stage.cursor) for number, stage in enumerate(self._stages) if number]

    def _bounds_until(self, epoch: int, number: int) -> Int64s:
        """The step bounds of an epoch that has only its first `number` stages."""
        return self._compute_table(epoch, self._stages[:number]).bounds

    @cached_property
    def _digest(self) -> str:
        return digest_of(np.asarray(self.buckets), np.diff(self._starts))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": {}}


def _parse(text: Any, buckets: int) -> tuple[_Stage, ...]:
    """The stages of a spec; none for an invalid text."""
    if not isinstance(text, str) or not text.isascii() or text.count(";") > _MAX_CHANGES:
        return ()
    stages: list[_Stage] = []
    for part in text.split(";"):
        cursor, _, rest = part.partition(":")
        sizes, _, world_size = rest.partition("*")
        numbers = [cursor, world_size, *sizes.split(",")]
        if not all(number.isdigit() and len(number) < 19 for number in numbers) or max(map(int, numbers[1:])) >> 31:
            return ()
        stage = _Stage(int(cursor), tuple(map(int, sizes.split(","))), int(world_size))
        last = stages[-1].cursor if stages else -1
        whole = len(stage.batch_sizes) in (1, buckets) and min(*stage.batch_sizes, stage.world_size, 1 << 62) > 0
        if not whole or not last < stage.cursor or (not stages and stage.cursor) or str(stage) != part:
            return ()
        stages.append(stage)
    return tuple(stages)
