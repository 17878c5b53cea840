"""The positions of each rank in each step of an epoch, relative to a global cursor; and the resume token.

    whole = batch_size * world_size        samples of a step
    base  = cursor + s * whole             step s takes the positions base to base + whole
    base + r * batch_size + i              the i-th of rank r, i < batch_size

If positions belong to nodes (order.groups = G > 1), node g = r // (world_size / G) gets only the positions p with
p mod G = g:

    base + G * (l * batch_size + i) + g    the i-th of rank l of node g, l = r mod (world_size / G)

That needs world_size and cursor to be multiples of G; otherwise ranks take slices as above.

After a step, all ranks together have seen exactly the positions from the cursor to `cursor_after`, so a run may stop
after any step and continue with another world size and batch size without losing or repeating samples. The tail, the m
positions at the end that do not fill a step, is handled by:

    drop_last   leaving them out in this epoch
    pad         ceil(m / world_size) samples for every rank, filled up by repeats from the start of the epoch
    exact       every position once, as evenly as possible; ranks may get fewer samples, or none: an empty array

A resume token is the position of a training job in its epoch: a small dictionary to save with the model. It counts
global positions, independent of ranks, batch size and workers. On a resume it is checked against the data set
(fingerprint and number of samples), the order (`spec`) and the decoder.

    {"kind": "packer-resume", "version": 1, "seed": 7, "epoch": 3, "cursor": 81920, "samples": 1281167,
     "fingerprint": "…", "decoder": "…", "order": {"kind": "shuffled", "samples": 1281167}}

Unknown members are ignored, so that later versions can add some. Two bind no resume and are for `readers.replay`:
"run", how positions were dealt out since the run began (`Segment`), and "made", the processing of the samples.

An order that divides its epochs into steps itself (`readers.order.base.Stepped`) has a `SteppedSchedule`: each step is
divided into slices as above, and there is no tail.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args

import numpy as np

from cache.errors import ResumeError
from readers.order.base import Int64s, Order, Spec, Stepped

Tail = Literal["drop_last", "pad", "exact"]
TAILS = get_args(Tail)
_Order = TypeVar("_Order", bound=Order)
_KIND, _VERSION = "packer-resume", 1
_COUNTS = {"seed": 1 << 64, "epoch": 1 << 64, "cursor": 1 << 62, "samples": 1 << 62}
_TEXTS = ("fingerprint", "decoder")
_MAX_TEXT, _MAX_PARAMETERS = 1024, 64
MOST_SEGMENTS = 128
_MAX_OPS, _MAX_OP_TEXT = 64, 1 << 14


@dataclass(frozen=True)
class Schedule:
    """The share of one rank in every step; all ranks have the same number of steps. Raises ValueError.

    batch_size: samples of one rank in a step.
    """

    order: Order
    batch_size: int
    rank: int = 0
    world_size: int = 1
    tail: Tail = "drop_last"

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.world_size < 1:
            raise ValueError(f"batch_size {self.batch_size} and world_size {self.world_size} must be at least 1")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is outside the world of {self.world_size}")
        if self.tail not in TAILS:
            raise ValueError(f"tail must be one of {', '.join(TAILS)}, not {self.tail!r}")

    @property
    def step_samples(self) -> int:
        """Samples of a whole step, all ranks together."""
        return self.batch_size * self.world_size

    def steps(self, cursor: int = 0) -> int:
        """Steps from `cursor` to the end of the epoch."""
        rest = self._rest(cursor)
        return rest // self.step_samples if self.tail == "drop_last" else -(-rest // self.step_samples)

    def positions(self, step: int, cursor: int = 0) -> Int64s:
        """This rank's positions in a step counted from `cursor`: int64 [batch_size], or fewer at the tail.

        Raises IndexError for a step beyond the end of the epoch.
        """
        self._check_step(step, cursor)
        groups = self._groups(cursor)
        group, local = divmod(self.rank, self.world_size // groups)
        base = cursor + step * self.step_samples
        rest = len(self.order) - base
        if rest >= self.step_samples:
            first, last = local * self.batch_size, (local + 1) * self.batch_size
        elif self.tail == "pad":
            share = -(-rest // self.world_size)
            first, last = local * share, (local + 1) * share
        else:
            group_samples, ranks = (rest - group + groups - 1) // groups, self.world_size // groups
            first, last = local * group_samples // ranks, (local + 1) * group_samples // ranks
        return self._wrapped(base + group + groups * np.arange(first, last, dtype=np.int64), group, groups)

    def cursor_after(self, step: int, cursor: int = 0) -> int:
        """The global cursor after all ranks have done a step counted from `cursor`."""
        self._check_step(step, cursor)
        return min(len(self.order), cursor + (step + 1) * self.step_samples)

    def samples(self, cursor: int = 0) -> int:
        """Samples of this rank from `cursor` to the end of the epoch, repeats included."""
        steps = self.steps(cursor)
        if not steps:
            return 0
        return (steps - 1) * self.batch_size + len(self.positions(steps - 1, cursor))

    def block(self, step: int, cursor: int, most: int) -> Int64s:
        """This rank's positions in a step and following steps of the same size, at most `most` positions together.

        int64 [steps, samples of a step], at least one step.
        """
        positions = self.positions(step, cursor)[None]
        whole = (len(self.order) - cursor) // self.step_samples
        count = min(most // self.batch_size, whole - step)
        if count > 1:  # whole steps differ by a constant; the tail is a separate block
            positions = positions + self.step_samples * np.arange(count, dtype=np.int64)[:, None]
        return positions

    def alike(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """The positions whose samples may replace those at n positions, as (first, length) of runs, int64 [n] each.

        Any position of the epoch may replace any other.
        """
        return np.zeros(len(positions), np.int64), np.full(len(positions), len(self.order), np.int64)

    def _rest(self, cursor: int) -> int:
        if not 0 <= cursor <= len(self.order):
            raise ValueError(f"the cursor {cursor} is outside the epoch of {len(self.order)} positions")
        return len(self.order) - cursor

    def _check_step(self, step: int, cursor: int) -> None:
        steps = self.steps(cursor)
        if not 0 <= step < steps:
            raise IndexError(f"step {step} is outside the {steps} steps from position {cursor} to the epoch's end")

    def _groups(self, cursor: int) -> int:
        groups = self.order.groups
        return groups if self.world_size % groups == 0 and cursor % groups == 0 else 1

    def _wrapped(self, positions: Int64s, group: int, groups: int) -> Int64s:
        """Wrap positions beyond the end of the epoch to its start, to positions of the same node."""
        length = len(self.order)
        if not positions.size or int(positions[-1]) < length:
            return positions
        own = (length - group + groups - 1) // groups
        if own == 0:  # the node has no positions to repeat, because the epoch has fewer samples than nodes
            return positions % length
        return positions // groups % own * groups + group


@dataclass(frozen=True)
class SteppedSchedule(Schedule):
    """The share of one rank in the steps of a `Stepped` order, slices of these; `tail` is ignored. Raises ValueError.

    batch_size: the largest number of samples of one rank in a step.
    """

    epoch: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        order = self._stepped
        if (self.batch_size, self.world_size) != (order.largest_batch, order.world_size):
            raise ValueError(
                f"the order was made for {order.world_size} ranks and batches of up to {order.largest_batch} samples, "
                f"but this loop has {self.world_size} and {self.batch_size}; give the order and the loader the same"
            )

    @property
    def _stepped(self) -> Stepped:
        return cast(Stepped, self.order)

    @property
    def _bounds(self) -> Int64s:
        return self._stepped.step_bounds(self.epoch)

    def steps(self, cursor: int = 0) -> int:
        return len(self._bounds) - 1 - self._first(cursor)

    def positions(self, step: int, cursor: int = 0) -> Int64s:
        self._check_step(step, cursor)
        begin, end = self._bounds[self._first(cursor) + step :][:2].tolist()
        share = (end - begin) // self.world_size
        first = begin + share * self.rank
        return np.arange(first, first + share, dtype=np.int64)

    def cursor_after(self, step: int, cursor: int = 0) -> int:
        self._check_step(step, cursor)
        return int(self._bounds[self._first(cursor) + step + 1])

    def samples(self, cursor: int = 0) -> int:
        return (int(self._bounds[-1]) - cursor) // self.world_size

    def block(self, step: int, cursor: int, most: int) -> Int64s:
        return self.positions(step, cursor)[None]

    def alike(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """The positions of the same step, whose samples are in the same bucket."""
        steps = self._bounds.searchsorted(positions, side="right")
        return self._bounds[steps - 1], self._bounds[steps] - self._bounds[steps - 1]

    def _first(self, cursor: int) -> int:
        """The number of the step that begins at `cursor`."""
        self._rest(cursor)
        first = int(self._bounds.searchsorted(cursor))
        if self._bounds[first] != cursor:
            raise ValueError(f"no step of epoch {self.epoch} begins at the cursor {cursor}")
        return first


def make_schedule(order: Order, epoch: int, batch_size: int, rank: int, world_size: int, tail: Tail) -> Schedule:
    """The schedule of an epoch of any order. Raises ValueError."""
    if isinstance(order, Stepped):
        return SteppedSchedule(order, batch_size, rank, world_size, tail, epoch)
    return Schedule(order, batch_size, rank, world_size, tail)


# --- resume tokens ----------------------------------------------------------------------------------------------
# Endings of a decoder's name if composing the ops changes pixels (`readers.augment.compose`).
COMPOSED, OP_BY_OP = "composed geometry", "geometry op by op"
_COMPOSE = {COMPOSED: "auto", OP_BY_OP: "exact"}


class Segment(NamedTuple):
    """How positions are dealt out from `cursor` of `epoch` on, until the next segment of a run.

    step: steps of the run before it, each of all ranks together; -1 where that is not known.
    batch_size: samples of one rank in a step.
    partial: None for batches that are slices of a step, as those of a `Schedule`; of batches that a DataLoader makes of
        single samples, which ranks take in turn, whether its last one may be smaller.
    order: the `spec` of the order.
    """

    step: int
    epoch: int
    cursor: int
    batch_size: int
    world_size: int
    tail: Tail
    partial: bool | None
    order: Spec


@dataclass(frozen=True)
class ResumeToken:
    """The position of a training job: all ranks together have trained on `cursor` positions of epoch `epoch`.

    fingerprint: of the reader.
    decoder: the name of what decodes, such as "simplejpeg 1.8"; "" for none.
    order: the `spec` of the order.
    samples: of the data set.
    run: the segments of the run, the last MOST_SEGMENTS of them; none where nothing was recorded.
    made: "ops", the text of each op by view, or a sentence that says why there are none; "images", as `readers.Decode`
        has it; "on_error". Empty where it is not known.

    Raises ResumeError for invalid values.
    """

    seed: int
    epoch: int
    cursor: int
    fingerprint: str
    decoder: str
    order: Spec
    samples: int
    run: tuple[Segment, ...] = ()
    made: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, limit in _COUNTS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < limit:
                raise ResumeError(f"resume token: {name} is {_short(value)}, expected an integer below {limit}")
        for name in _TEXTS:
            value = getattr(self, name)
            if not isinstance(value, str) or len(value) > _MAX_TEXT:
                raise ResumeError(f"resume token: {name} is {_short(value)}, expected a string")
        _check_order(self.order)
        _check_made(self.made)

    def to_dict(self) -> dict[str, Any]:
        """Strings, integers and one dictionary of these, for JSON or a checkpoint."""
        values = {name: getattr(self, name) for name in (*_COUNTS, *_TEXTS)}
        state: dict[str, Any] = {"kind": _KIND, "version": _VERSION, **values, "order": dict(self.order)}
        if self.run:
            state["run"] = [segment._asdict() for segment in self.run]
            for segment in state["run"]:
                if segment["order"] == self.order:
                    del segment["order"]
        if self.made:
            state["made"] = dict(self.made)
        return state

    @classmethod
    def from_dict(cls, content: Any) -> ResumeToken:
        """The inverse of `to_dict`; raises ResumeError for anything that it cannot have written."""
        if not isinstance(content, Mapping) or content.get("kind") != _KIND:
            raise ResumeError(
                f"not a resume token: expected an object of kind {_KIND!r}, as state_dict() gives, found "
                f"{_short(content)}"
            )
        version = content.get("version")
        if version != _VERSION or isinstance(version, bool):
            raise ResumeError(
                f"resume token of version {_short(version)}, this packer reads version {_VERSION}; upgrade packer"
            )
        names = (*_COUNTS, *_TEXTS, "order")
        missing = [name for name in names if name not in content]
        if missing:
            raise ResumeError(f"resume token without {', '.join(missing)}: save it again from the run")
        more = {"run": _parse_run(content.get("run", ()), content["order"]), "made": content.get("made", {})}
        token = cls(**{name: content[name] for name in names}, **more)
        return replace(token, order=dict(token.order))

    def resumed(self, order: _Order) -> _Order:
        """`order` as it was in the epoch of this token (see `Order.resumed`), for one of its seed.

        Raises ResumeError for a cursor that is beyond the epoch's end.
        """
        began = cast(
            _Order, order.resumed(self.order, self.epoch, self.cursor)
        )  # an order resumes as one of its own kind
        if self.cursor > len(began):
            raise ResumeError(
                f"resume token: cursor {self.cursor} is beyond the {len(began)} positions of an epoch; no run of this "
                f"order has written it"
            )
        return began

    def check(
        self, *, fingerprint: str, order_spec: Mapping[str, Any], decoder: str, samples: int | None = None
    ) -> None:
        """Check that a run with this data set, order and decoder may continue from here.

        Raises ResumeError for another data set, another kind of order, or geometry that is composed in one and made op
        by op in the other; warns where another decoder would give slightly other pixels. Parameters of the order are
        checked by `Order.resumed`.
        """
        count = order_spec.get("samples") if samples is None else samples
        if fingerprint != self.fingerprint or (count is not None and count != self.samples):
            raise ResumeError(
                f"the resume token is of the data set {self.fingerprint} with {self.samples} samples, this one is "
                f"{fingerprint} with {count}; open the one that the run began with, or start without the token"
            )
        kind = order_spec.get("kind")
        if kind != self.order["kind"]:
            raise ResumeError(
                f"the epoch began with the order {self.order['kind']!r}, this run has {kind!r}; resume with "
                f"{self.order['kind']!r}, or start a new epoch"
            )
        began, now = (_COMPOSE.get(name.rpartition(", ")[2]) for name in (self.decoder, decoder))
        if began and now and began != now:
            raise ResumeError(
                f"the epoch began with compose={began!r}, this run has {now!r}, which makes other pixels; resume with "
                f"Decode(compose={began!r}), or start a new epoch"
            )
        if decoder != self.decoder:
            warnings.warn(
                f"the epoch began with the decoder {self.decoder!r} and continues with {decoder!r}: "
                f"pixels may differ slightly",
                UserWarning,
                stacklevel=2,
            )


def _check_order(order: Any) -> None:
    if not isinstance(order, Mapping) or not isinstance(order.get("kind"), str) or len(order) > _MAX_PARAMETERS:
        raise ResumeError(f"resume token: order is {_short(order)}, expected the spec of an order")
    for name, value in order.items():
        plain = isinstance(value, (str, int, float)) and not isinstance(value, bool)
        if not isinstance(name, str) or not plain or (isinstance(value, float) and not math.isfinite(value)):
            raise ResumeError(f"resume token: order has {_short(name)}: {_short(value)}, expected a text or a number")


def _parse_run(run: Any, order: Any) -> tuple[Segment, ...]:
    if not isinstance(run, Sequence) or isinstance(run, str) or len(run) > MOST_SEGMENTS:
        raise ResumeError(f"resume token: run is {_short(run)}, expected at most {MOST_SEGMENTS} segments")
    segments = []
    for part in run:
        try:
            segment = Segment(**{"order": order, **part})
        except TypeError:
            raise ResumeError(f"resume token: run has {_short(part)}, expected {', '.join(Segment._fields)}") from None
        numbers = (segment.step + 1, *segment[1:3], segment.batch_size - 1, segment.world_size - 1)
        limits = (1 << 62, _COUNTS["epoch"], _COUNTS["cursor"], 1 << 31, 1 << 31)
        fits = (type(number) is int and 0 <= number < limit for number, limit in zip(numbers, limits, strict=True))
        if not all(fits) or segment.tail not in TAILS or segment.partial not in (None, False, True):
            raise ResumeError(f"resume token: run has {_short(part)}, which no run can have had")
        _check_order(segment.order)
        segments.append(segment)
    return tuple(segments)


def _check_made(made: Any) -> None:
    ops: Any = made.get("ops", "") if isinstance(made, Mapping) else None
    views: Any = [ops] if isinstance(ops, str) else ops
    fits = isinstance(views, Sequence) and len(views) <= _MAX_OPS and len(made) <= _MAX_PARAMETERS
    texts = [made.get(name, "") for name in ("images", "on_error")] if fits else []
    for view in views if fits else ():
        of_view = [view] if isinstance(view, str) else view
        fits = fits and isinstance(of_view, Sequence) and len(of_view) <= _MAX_OPS
        texts += of_view if fits else ()
    if not fits or not all(isinstance(text, str) and len(text) <= _MAX_OP_TEXT for text in texts):
        raise ResumeError(f"resume token: made is {_short(made)}, expected the ops of each view")


def _short(value: Any) -> str:
    return f"{value!r:.80}"
