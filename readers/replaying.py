"""Replay of a training run: the samples of any past or future step, what their ops drew, and their pixels.

    replayed = readers.replay("runs/last.ckpt", reader)      # or a state, or a loader
    for sample in replayed.step(48_213).samples:
        print(sample.rank, sample.key, [draw.text for draw in sample.draws])
    replayed.who("n01440764/n01440764_10026")                # the steps that have this sample

A state holds the seed, the order, the position, the ops, and the record of the run. The record says from which step on
how many ranks took how many samples each (`readers.order.schedule.Segment`). A replay uses the same orders, schedules,
plans and loaders as training; nothing is computed in a second way.

Steps are counted from 0 over all epochs and resumes of the run. A step is one batch of the loader: with gradients
accumulated over k batches, update u of a trainer consists of steps k u to k u + k - 1. A DataLoader that leaves an
epoch early has prefetched more batches than training has seen. The number of steps in that epoch, and the numbers of
all later steps, are then unknown.
"""

from __future__ import annotations

import json
import os
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError, MissingExtraError, ResumeError, UnknownNameError
from readers.augment.described import Draw, draws_of, op_of
from readers.augment.ops import Normalize, Op
from readers.feed import Feed, FeedOptions, Start, choose_tail, for_decoding
from readers.loop import Position
from readers.options import Decode, Ranks, Views
from readers.order import ClassBalanced, NodeLocal, Order, Sequential, Shuffled, StagedFirst, Woven
from readers.order.base import Int64s, Spec
from readers.order.local import shard_starts
from readers.order.schedule import OP_BY_OP, ResumeToken, Segment, Tail
from readers.reader import Reader
from readers.table import NO_LABEL, upright_sides

__all__ = ["Appearance", "Replay", "ReplayedSample", "ReplayedStep", "find_states", "replay"]

_MOST_JSON, _DEEPEST = 256 << 20, 64
_TORCH = (".ckpt", ".pt", ".pth", ".pkl", ".bin", ".tar")
_AT_ONCE = 1 << 20


# --- results ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ReplayedSample:
    """One sample of a step.

    place: its index in the batch of its rank. position: its position in the epoch. row, key, label: its row, key and
    label in the set; label is None for a sample without a label. view: the number of the view; a loader with several
    views lists each sample once per view. draws: one for each op, in list order. error: why the sample cannot be used,
    as far as the index shows it; the `on_error` of the loader decides what happens to it.
    """

    rank: int
    place: int
    position: int
    row: int
    key: str
    label: int | None
    view: int = 0
    draws: tuple[Draw, ...] = ()
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The sample as a dictionary for JSON."""
        draws = [{"op": repr(draw.op), "text": draw.text, **draw.values} for draw in self.draws]
        return {**{name: value for name, value in vars(self).items() if name != "error" or value}, "draws": draws}


@dataclass(frozen=True)
class ReplayedStep:
    """One step of a run, of all ranks or of one.

    step: its number in the run, None if unknown. number: its number in the epoch. Both count from 0.
    batch_size: samples per rank in a full step.
    is_past: whether the step is before the state. is_certain: False for the steps of an epoch that ended early at an
        unknown step: training may not have seen them.
    """

    step: int | None
    epoch: int
    number: int
    world_size: int
    batch_size: int
    is_past: bool
    is_certain: bool
    samples: tuple[ReplayedSample, ...]

    def to_dict(self) -> dict[str, Any]:
        """The step as a dictionary for JSON."""
        return {**vars(self), "samples": [sample.to_dict() for sample in self.samples]}


@dataclass(frozen=True)
class Appearance:
    """One use of a sample by the run.

    step, epoch, number, is_past, is_certain: as in `ReplayedStep`. rank, place, position: as in `ReplayedSample`.
    """

    step: int | None
    epoch: int
    number: int
    rank: int
    place: int
    position: int
    is_past: bool
    is_certain: bool


class _Stretch(NamedTuple):
    """`steps` steps of one epoch in one segment. The first is step `step` of the run (-1 if unknown) and step `number`
    of the epoch."""

    segment: Segment
    feed: Feed
    epoch: int
    step: int
    number: int
    steps: int
    is_certain: bool
    is_past: bool


# --- the run ------------------------------------------------------------------------------------------------------
class Replay:
    """The steps of a run; made by `replay`.

    feed: at the position of the state, with the record of the run. loader: the loader of the batches, None if unknown.
    ops: the ops of each view. without_draws: why draws cannot be computed, "" if they can.
    """

    def __init__(self, feed: Feed, loader: Any = None) -> None:
        self._feed, self._loader = feed, loader
        ops: Any = feed.options.made.get("ops", "the state is of a version that does not name them")
        self.ops: tuple[tuple[Op, ...], ...] = ()
        self.without_draws = ops if isinstance(ops, str) else ""
        try:
            self.ops = () if isinstance(ops, str) else tuple(tuple(map(op_of, of_view)) for of_view in ops)
        except ValueError as error:
            self.without_draws = str(error)

    @property
    def run(self) -> tuple[Segment, ...]:
        """The record of the run: for each segment its first step, and how its samples were divided among ranks."""
        return self._feed.run

    @property
    def seed(self) -> int:
        return self._feed.seed

    @property
    def start(self) -> Start:
        """The position of the state."""
        return self._feed.start

    @cached_property
    def done(self) -> int | None:
        """Number of steps before the state, None if the record does not show it."""
        step = self._feed.step_at(self.start)
        return None if step is None or step < 0 else step

    def step(self, number: int, *, epoch: int | None = None, rank: int | None = None) -> ReplayedStep:
        """Step `number` of the run, or of an epoch, for all ranks or for one.

        epoch: count steps from the start of this epoch; by default, from the start of the run. rank: by default all.

        Raises UnknownNameError for a step, epoch or rank that does not exist, or a step number not in the record.
        """
        stretch, index = self._find(number, epoch)
        return self._make(stretch, index, rank)

    def steps(
        self, first: int, last: int, *, epoch: int | None = None, rank: int | None = None
    ) -> Iterator[ReplayedStep]:
        """The steps from `first` up to, but not including, `last`; the other parameters as in `step`."""
        return (self.step(number, epoch=epoch, rank=rank) for number in range(first, last))

    def batch(self, number: int, *, epoch: int | None = None, rank: int = 0) -> Any:
        """The batch of a rank, as training got it; None if the rank has no samples in this step.

        A replay with a loader returns what that loader returns. Without one, the result is (images, rows): images is a
        tensor [n, 3, height, width], or a tuple with one for each view, and rows is int64 [n]. Bad samples are left out
        or replaced as in training.

        Raises what `step` and the loader raise, and ValueError if the ops are unknown.
        """
        stretch, index = self._find(number, epoch)
        positions, rows = self._rows(stretch, index, rank)
        if not len(rows):
            return None
        feed = stretch.feed
        if stretch.segment.partial is None:
            loader, state = (
                self._image_loader(stretch.segment, feed.order, rank),
                Start(stretch.epoch, feed.cursor(stretch.epoch, index), feed.order),
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # warnings that the state is of another decoder
                loader.load_state_dict(replace(feed, run=()).token(state))
            return next(iter(loader))
        from readers.torch import Place

        others = feed.others(stretch.epoch, positions).tolist()
        drawn = zip(rows.tolist(), positions.tolist(), others, strict=True)
        dataset = self._dataset()
        places = [Place(row, feed.seed, stretch.epoch, position, instead) for row, position, instead in drawn]
        return dataset.collate(dataset.__getitems__(places))

    def pictures(
        self, number: int, *, epoch: int | None = None, rank: int = 0
    ) -> tuple[list[npt.NDArray[np.uint8]], list[int]]:
        """The images of a batch for display, and their rows.

        The images are a list with one array for each view, uint8 [n, height, width, 3], or [n, height, width, 1] if
        they have fewer than 3 channels. Normalisation is undone, and values of more than 8 bits are scaled to 0..255.
        Raises what `batch` raises.
        """
        made = Replay(self._feed).batch(number, epoch=epoch, rank=rank)
        if made is None:
            return [], []
        images, rows = made
        views = images if isinstance(images, tuple) else (images,)
        return [_to_look_at(view.numpy(), self.ops[0]) for view in views], rows.tolist()

    def who(self, key: str, epochs: Iterable[int] | None = None) -> list[Appearance]:
        """Every use of the sample with this key, in run order.

        epochs: by default all of the record, up to the end of the epoch of the state. An epoch that does not draw the
        sample adds nothing to the list. Raises UnknownNameError for an unknown key.
        """
        row = self._feed.reader.table.find(key)
        chosen = range(self.run[0].epoch, self.start.epoch + 1) if epochs is None else sorted({*epochs})
        made: list[Appearance] = []
        for stretch in self._stretches():
            if stretch.segment is self.run[-1] and (not chosen or stretch.epoch > chosen[-1]):
                break
            if stretch.epoch in chosen and stretch.steps:
                made += self._appearances(stretch, row)
        return made

    def to_dict(self) -> dict[str, Any]:
        """The record of the run, the position, the seed and the ops, as a dictionary for JSON."""
        where = {"seed": self.seed, "epoch": self.start.epoch, "cursor": self.start.cursor, "done": self.done}
        ops = [list(map(repr, of_view)) for of_view in self.ops]
        return {
            **where,
            "run": [segment._asdict() for segment in self.run],
            "ops": ops,
            "without_draws": self.without_draws,
        }

    # --- inside ---------------------------------------------------------------------------------------------------
    def _stretches(self) -> Iterator[_Stretch]:
        """The stretches in run order; those of the last segment continue without end."""
        number, before = 0, -1
        for segment, end in zip(self.run, (*self.run[1:], None), strict=True):
            feed, step, epoch = self._feed.in_segment(segment), segment.step, segment.epoch
            left = end.step - step if end is not None and min(step, end.step) >= 0 else -1
            number = number if segment.cursor and epoch == before else 0
            while True:
                count, is_last, is_certain = feed.batches_in(segment, epoch), False, True
                if end is not None and left >= 0:
                    count = min(count, left)
                    left -= count
                    is_last = left == 0
                elif end is not None:
                    is_last = epoch >= end.epoch - (not end.cursor)
                    is_certain = not is_last
                    if is_last and end.cursor and end.epoch == epoch:
                        size = 1 if segment.partial is None else segment.batch_size
                        count = feed.units_until(Start(*end[1:3])) // size
                yield _Stretch(segment, feed, epoch, step, number, count, is_certain, end is not None)
                number, before, step, epoch = number + count, epoch, -1 if step < 0 else step + count, epoch + 1
                if is_last:
                    break
                number = 0

    def _find(self, number: int, epoch: int | None) -> tuple[_Stretch, int]:
        last, known = self.run[-1], list[_Stretch]()
        for stretch in self._stretches():
            is_open = stretch.segment is last
            if epoch is not None:
                if is_open and stretch.epoch > epoch:
                    break
                if stretch.epoch == epoch:
                    known = [*known, stretch] if stretch.number else [stretch]  # 0: the epoch was restarted
            elif 0 <= stretch.step <= number < stretch.step + stretch.steps:
                return stretch, number - stretch.step
            elif is_open and (stretch.step < 0 or number < stretch.step):
                break
        if epoch is None:
            steps = [segment.step for segment in self.run if segment.step >= 0]
            raise UnknownNameError(
                f"there is no step {number}: the record of the run begins with step {steps[0] if steps else 'unknown'}"
                + ("" if last.step >= 0 else "; later ones have no known numbers: name them by epoch=")
            )
        for stretch in known:
            if stretch.number <= number < stretch.number + stretch.steps:
                return stretch, number - stretch.number
        if not known:
            raise UnknownNameError(f"the run has no epoch {epoch}; its record begins with epoch {self.run[0].epoch}")
        total = known[-1].number + known[-1].steps
        raise UnknownNameError(f"epoch {epoch} has {total} steps, counted from 0; there is no step {number} in it")

    def _rows(self, stretch: _Stretch, index: int, rank: int) -> tuple[Int64s, Int64s]:
        """(positions, rows) of a rank in a step, int64 [n] each. Raises UnknownNameError for an unknown rank."""
        segment = stretch.segment
        if not 0 <= rank < segment.world_size:
            raise UnknownNameError(f"this step has {segment.world_size} ranks, counted from 0; there is no rank {rank}")
        feed = self._feed.in_segment(segment, rank)
        if segment.partial is None:
            return feed.rows(stretch.epoch, index)
        units = range(index * segment.batch_size, min((index + 1) * segment.batch_size, feed.steps(stretch.epoch)))
        pairs = [feed.rows(stretch.epoch, unit) for unit in units]
        positions, rows = (np.concatenate(column) for column in zip(*pairs, strict=True))
        return positions, rows

    def _make(self, stretch: _Stretch, index: int, rank: int | None) -> ReplayedStep:
        segment, samples = stretch.segment, list[ReplayedSample]()
        for member in range(segment.world_size) if rank is None else (rank,):
            samples += self._samples(stretch.epoch, member, *self._rows(stretch, index, member))
        step = None if stretch.step < 0 else stretch.step + index
        return ReplayedStep(
            step,
            stretch.epoch,
            stretch.number + index,
            segment.world_size,
            segment.batch_size,
            self._is_past(stretch, index),
            stretch.is_certain,
            tuple(samples),
        )

    def _is_past(self, stretch: _Stretch, index: int) -> bool:
        if stretch.is_past or stretch.epoch != self.start.epoch:
            return stretch.is_past or stretch.epoch < self.start.epoch
        size = 1 if stretch.segment.partial is None else stretch.segment.batch_size
        units = min((index + 1) * size, stretch.feed.steps(stretch.epoch))
        return stretch.feed.cursor(stretch.epoch, units) <= self.start.cursor

    def _samples(self, epoch: int, rank: int, positions: Int64s, rows: Int64s) -> list[ReplayedSample]:
        reader, made = self._feed.reader, list[ReplayedSample]()
        labels, keys = reader.labels, reader.keys
        heights, widths = upright_sides(for_decoding(reader).image_info(rows)) if self.ops and len(rows) else ((), ())
        sides = np.maximum(heights, 1), np.maximum(widths, 1)
        for view, ops in enumerate(self.ops or ((),)):
            draws, bad = [list[Draw]()] * len(rows), dict[int, BadSampleError]()
            if self.ops and len(rows):
                draws, plan = draws_of(ops, self.seed, epoch, positions, *sides, view)
                bad = plan.boxes.bad
            for place, (position, row) in enumerate(zip(positions.tolist(), rows.tolist(), strict=True)):
                label, error = int(labels[row]), bad.get(place)
                if self.ops and not heights[place]:
                    error = BadSampleError("the header of the image cannot be read")
                named = (keys[row], None if label == NO_LABEL else label, view, tuple(draws[place]))
                made.append(ReplayedSample(rank, place, position, row, *named, str(error or "")))
        return made

    def _appearances(self, stretch: _Stretch, row: int) -> list[Appearance]:
        segment, feed, epoch = stretch.segment, stretch.feed, stretch.epoch
        size = 1 if segment.partial is None else segment.batch_size
        units = min(feed.steps(epoch), stretch.steps * size)
        places = _positions(feed.order, epoch, row, feed.cursor(epoch, units))
        steps = {bisect_right(range(units), place, key=lambda i: feed.cursor(epoch, i + 1)) for place in places}
        made: list[Appearance] = []
        for index in sorted({*(unit // size for unit in steps if unit < units), (units - 1) // size}):
            for rank in range(segment.world_size):
                positions, rows = self._rows(stretch, index, rank)
                for place in np.flatnonzero(rows == row).tolist():
                    step = None if stretch.step < 0 else stretch.step + index
                    where = (rank, place, int(positions[place]), self._is_past(stretch, index), stretch.is_certain)
                    made.append(Appearance(step, epoch, stretch.number + index, *where))
        return made

    # --- pixels -----------------------------------------------------------------------------------------------------
    def _options(self) -> dict[str, Any]:
        """The options of a loader or data set that make the same pixels."""
        made, decoder = self._feed.options.made, self._feed.options.decoder.split(", ")
        if self.without_draws:
            raise ValueError(f"the pixels cannot be made again, as {self.without_draws}: pass the loader to replay()")
        compose: Any = "exact" if OP_BY_OP in decoder else "auto"
        decode = Decode(made.get("images") or "RGB", exact_colours="exact colours" in decoder, compose=compose)
        return {"decode": decode, "on_error": made.get("on_error") or "raise", "fields": ("image", "index")}

    def _image_loader(self, segment: Segment, order: Order, rank: int) -> Any:
        from readers.loader import ImageLoader

        ranks, size = Ranks(rank, segment.world_size, segment.tail), segment.batch_size
        if isinstance(self._loader, ImageLoader):
            return self._loader.with_options(batch_size=size, order=order, ranks=ranks, seed=None)
        return ImageLoader(
            self._feed.reader, size, order=order, augment=Views(self.ops), ranks=ranks, threads=1, **self._options()
        )

    def _dataset(self) -> Any:
        from readers.torch import ImageDataset

        dataset = getattr(self._loader, "dataset", None)
        dataset = getattr(dataset, "dataset", dataset)  # the data set of a stream
        if isinstance(dataset, ImageDataset):
            return dataset
        return ImageDataset(self._feed.reader, self.ops[0] if self.ops else None, **self._options())


def _to_look_at(images: npt.NDArray[Any], ops: Sequence[Op]) -> npt.NDArray[np.uint8]:
    """Images [n, channels, height, width] of any dtype as uint8 [n, height, width, 1 or 3], not normalised."""
    images = images[:, : 3 if images.shape[1] >= 3 else 1].transpose(0, 2, 3, 1)
    for op in ops:
        if isinstance(op, Normalize):
            images = 255 * (images * np.array(op.std, np.float32) + np.array(op.mean, np.float32))
    if images.dtype == np.uint16:
        images = images / 257
    return np.rint(images).clip(0, 255).astype(np.uint8)


def _positions(order: Order, epoch: int, row: int, until: int) -> Int64s:
    """The positions of a sample in an epoch, of those before `until`: by the inverse of a shuffle, which ignores
    `until`, or by a search through all positions."""
    if isinstance(order, Shuffled):
        return order.positions(epoch, np.array([row], np.int64))
    parts = [np.arange(first, min(first + _AT_ONCE, until)) for first in range(0, until, _AT_ONCE)]
    return np.concatenate([np.empty(0, np.int64), *(part[order.indices(epoch, part) == row] for part in parts)])


def replay(
    source: Mapping[str, Any] | str | os.PathLike[str] | Any,
    over: Reader | Any = None,
    *,
    state: str | None = None,
    order: Order | None = None,
    batch_size: int | None = None,
    world_size: int | None = None,
    sampler: bool = False,
    tail: Tail | None = None,
) -> Replay:
    """Replay a run from a saved state, a checkpoint, or its loader.

    source: the state of a loader, sampler or stream; a file or folder that contains one, for example a checkpoint
        (`find_states`); or the ImageLoader, DataLoader or sampler of the run.
    over: the reader that the run trained on, or its loader, which also provides the order and the transform.
    state: a part of the name of the state, if `source` has several.
    order: the order of the run, needed if the state holds only a digest of it (`Weighted`, `Mixed`, `Bucketed`).
    batch_size, world_size: for the steps after the state, by default the same as before it. For a state without a
        record of its run, as older versions saved it, they apply to all steps.
    sampler, tail: only for a state without a record. sampler: whether a DataLoader over an `EpochSampler` made the
        batches. tail: as for `Ranks`.

    Raises ResumeError for a state of another set or order, and for missing information; UnknownNameError if `source`
    contains no state, or states of several runs; ValueError for a source of another type, or without a reader.
    """
    loader = over if over is not None and not isinstance(over, Reader) else None
    known_feed: Feed | None = None
    if not isinstance(source, (Mapping, str, os.PathLike)):
        loader, over = source, None
    if loader is not None:
        known_feed = _feed_of(loader)
    reader = known_feed.reader if known_feed is not None else over
    if reader is None:
        raise ValueError("replay(state, reader): give the reader that the run trained on, or its loader")
    if known_feed is not None and source is loader:
        feed = known_feed
    else:
        token = ResumeToken.from_dict(_choose(find_states(source, state), reader))
        if known_feed is None:
            known = order or _order_of(token.order, reader, token.seed)
            options = FeedOptions(0, world_size or 1, tail or choose_tail(known), "raise", token.decoder)
            known_feed = Feed(reader, known, batch_size or 1, options)
        made = known_feed.options.made if loader is not None else token.made
        feed = known_feed.resumed(token.to_dict())
        feed = replace(feed, options=replace(feed.options, made=made, decoder=token.decoder))
    return Replay(_recorded(feed, batch_size, world_size, sampler), loader)


def _recorded(feed: Feed, batch_size: int | None, world_size: int | None, sampler: bool) -> Feed:
    """The feed with a record that covers all steps, past and future. Raises ResumeError."""
    start, run = feed.start, feed.run
    order = start.order or feed.order
    if run:
        last = run[-1]
        size, world_size = batch_size or last.batch_size, world_size or last.world_size
        there = replace(feed, options=replace(feed.options, rank=0, world_size=world_size, tail=last.tail))
        return replace(feed, run=there.joined(start, None, size, last.partial).run)
    if batch_size is None or world_size is None:
        raise ResumeError(
            "the state has no record of its run, like states of older versions and of runs without a step: give "
            "batch_size= and world_size= of the run"
        )
    dealt = (batch_size, world_size, feed.options.tail, True if sampler else None)
    feed = replace(feed, run=(Segment(0, 0, 0, *dealt, order.spec()),))
    if feed.between(start) is None:
        raise ResumeError(
            f"no step of {batch_size} samples on each of {world_size} ranks ends at position {start.cursor} of epoch "
            f"{start.epoch}, where the state is: the run had another batch_size or world_size"
        )
    return feed


def _feed_of(loader: Any) -> Feed:
    """The feed of a loader, DataLoader or sampler, at its position. Raises ValueError."""
    stream: Any = getattr(loader, "dataset", None)
    parts = (loader, *(getattr(loader, name, None) for name in ("batch_sampler", "sampler")), loader, stream)
    position = next((part for part in parts if isinstance(part, Position)), getattr(stream, "sampler", None))
    if not isinstance(position, Position):
        raise ValueError(f"replay() takes loaders, samplers and streams of readers, not {type(loader).__name__}")
    dataset: Any = getattr(stream, "dataset", stream)
    reader = getattr(position, "reader", None) or getattr(dataset, "reader", None)
    if reader is None:
        raise ValueError("replay(sampler): pass the DataLoader, which has the data set")
    feed = position.feed
    whole = Feed(reader, feed.order, feed.batch_size, feed.options, position._position, feed.run)
    if not feed.run:
        size, drop_last = getattr(loader, "batch_size", None), getattr(loader, "drop_last", False)
        if position is getattr(stream, "sampler", None):
            size, drop_last = stream.batch_size, stream.drop_last
        partial = not drop_last if getattr(position, "_batched", False) else None
        whole = whole.joined(whole.start, None, 0 if partial is None else size or 1, partial)
    return whole


def _order_of(spec: Spec, reader: Reader, seed: int) -> Order:
    """The order that a spec describes. Raises ResumeError if the spec and the set do not determine it."""
    kind = spec["kind"]
    known: dict[str, Any] = {name: value for name, value in spec.items() if name not in ("kind", "starts")}
    try:
        if kind in ("shuffled", "sequential", "node-local", "woven"):
            kinds: dict[Any, Any] = {"shuffled": Shuffled, "sequential": Sequential, "node-local": NodeLocal}
            order: Order = kinds.get(kind, Woven)(**known, seed=seed)
        elif kind == "class-balanced":
            order = ClassBalanced(reader.labels, int(known["length"]), seed)
        elif kind == "staged-first":
            known.pop("samples")
            order = StagedFirst(shard_starts(reader.split_info), **known, seed=seed)
        else:
            raise ValueError(f"a state holds no more than a digest of the order {kind!r}")
        if order.spec() != spec:
            raise ValueError("the set gives another order")
    except (KeyError, TypeError, ValueError) as error:
        raise ResumeError(f"the order {kind!r} of the state cannot be made again ({error}): give order=") from error
    return order


# --- states in checkpoints ------------------------------------------------------------------------------------------
def find_states(
    source: Mapping[str, Any] | str | os.PathLike[str], name: str | None = None
) -> dict[str, Mapping[str, Any]]:
    """The states of loaders, samplers and streams by name, where a name is the path of keys to the state.

    source: a mapping, a JSON file, a file written by torch.save, or a folder of these files: for example a checkpoint
        of Lightning, of the Trainer of transformers, or of accelerate. name: return only states whose names contain it.

    No content of a file is executed: torch reads it with weights_only, and objects of unknown classes become inert.

    Raises UnknownNameError if there is no state, and ResumeError for a file that cannot be read.
    """
    if isinstance(source, Mapping):
        states, problems = dict(_walk(source, "")), []
        source = "the mapping"
    else:
        path = Path(source)
        files = (
            sorted(path.iterdir(), key=lambda file: (file.suffix != ".json", file.name)) if path.is_dir() else [path]
        )
        states, problems = {}, list[str]()
        for file in files:
            if file != path and (file.suffix not in (".json", *_TORCH) or not file.is_file()):
                continue
            if states and file.suffix != ".json":
                break  # a JSON file had the state, so large files of torch need not be loaded
            try:
                states |= dict(_walk(_content(file), "" if file == path else file.name))
            except ResumeError as error:
                problems.append(str(error))
        if path.is_dir() and (path / ".metadata").exists():
            problems.append("torch.distributed.checkpoint wrote pickles, which are not executed")
    named = {key: state for key, state in states.items() if (name or "") in key}
    if named:
        return named
    if states:
        raise UnknownNameError(f"{source}: no state has {name!r} in its name: there are {', '.join(states)}")
    if problems:
        raise ResumeError(f"{source}: found no state; {'; '.join(problems[:3])}; {_INSTEAD}")
    raise UnknownNameError(f"{source}: has no state of a loader, sampler or stream of readers; {_INSTEAD}")


_INSTEAD = "save loader.state_dict() with it, or write it as JSON in the run:  json.dump(loader.state_dict(), file)"


def _walk(value: Any, name: str, depth: int = 0) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(value, Mapping):
        if value.get("kind") == "packer-resume":
            yield name or "state", value
            return
        parts: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, (list, tuple)):
        parts = enumerate(value)
    else:
        parts = vars(value).items() if isinstance(value, _Inert) else ()
    for key, part in parts:
        if depth < _DEEPEST and isinstance(part, (Mapping, list, tuple, _Inert)):
            yield from _walk(part, f"{name}.{key}".lstrip("."), depth + 1)


def _content(path: Path) -> Any:
    """The objects in a JSON file or a file of torch. Raises ResumeError, OSError and MissingExtraError."""
    with open(path, "rb") as file:
        first = file.read(4)
        if first[:1] in (b"{", b"["):
            if path.stat().st_size > _MOST_JSON:
                raise ResumeError(f"{path}: a JSON file of more than {_MOST_JSON >> 20} MiB is no state")
            try:
                return json.loads(first + file.read())
            except (ValueError, RecursionError) as error:
                raise ResumeError(f"{path}: is no JSON: {error}") from error
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError("torch", "torch", "states in checkpoints of torch") from error
    options: dict[str, Any] = {"map_location": "cpu", "weights_only": True, "mmap": first == b"PK\3\4"}
    try:
        unknown = []
        if options["mmap"] and hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint"):
            unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        with torch.serialization.safe_globals([(_Inert, name) for name in unknown]):
            return torch.load(path, **options)
    except Exception as error:  # torch raises many kinds, depending on the content
        reason = str(error).strip().partition("\n")[0]
        raise ResumeError(
            f"{path}: torch does not read it with weights_only=True ({type(error).__name__}: {reason:.200}), and "
            f"nothing else is tried, since a pickle may run any program"
        ) from error


class _Inert(dict[Any, Any]):
    """The replacement for an object of any class in a pickle; keeps its state, and runs no code of the class."""

    def __new__(cls, *given: Any, **named: Any) -> _Inert:
        return super().__new__(cls)

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _choose(states: Mapping[str, Mapping[str, Any]], reader: Reader) -> Mapping[str, Any]:
    """The state of a run over this set; the most advanced of several states of one run, for example of its workers.
    Raises UnknownNameError for states of several runs."""
    tokens = {name: ResumeToken.from_dict(state) for name, state in states.items()}
    of_set = {name: token for name, token in tokens.items() if token.fingerprint == reader.fingerprint} or tokens
    if len({(token.fingerprint, token.seed, str(token.order["kind"])) for token in of_set.values()}) > 1:
        listed = ", ".join(f"{name} (epoch {token.epoch}, seed {token.seed})" for name, token in of_set.items())
        raise UnknownNameError(f"several states: choose one by state=, a part of its name: {listed}")
    return max(of_set.values(), key=lambda token: (token.epoch, token.cursor)).to_dict()
