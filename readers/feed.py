"""A feed: the samples of each batch of a rank, the treatment of bad samples, and the position from which a run resumes.

    (epoch, step) ─► schedule: positions ─► order: rows ─► reader: bytes, or an error

`ImageLoader`, `readers.torch` and the sources of DALI and rocAL are built on this. A feed is immutable, pickles, and
has no state: any process may ask for any step, in any order, repeatedly.

    rows       numbers of samples in the reader, int64
    positions  places of the samples in the epoch, int64; they seed augmentation and substitutes
    cursor     number of positions that all ranks together have done (`readers.order.schedule`)

Only the epoch of `start` begins at a cursor; every other epoch is whole.

on_error selects the treatment of a sample that fails with SAMPLE_ERRORS. Any other error is raised, including the
StaleIndexError of a set that was replaced during the loop:

    raise       BadSampleError, which names the sample
    skip        a smaller batch
    substitute  another sample of the epoch, determined by the position
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from cache.errors import BadSampleError
from cache.node import rank_and_world_size
from readers.augment.recipe import Draws
from readers.options import Ranks
from readers.order import Order, ResumeToken, Schedule, Sequential, Shuffled
from readers.order.base import Int64s, recorded
from readers.order.schedule import MOST_SEGMENTS, Segment, Tail, make_schedule
from readers.reader import SAMPLE_ERRORS, Reader
from readers.table import Buffer

OnError: TypeAlias = Literal["raise", "skip", "substitute"]
ON_ERROR = ("raise", "skip", "substitute")
_DONE = {"raise": "reported", "skip": "skipped", "substitute": "replaced"}
_ADVICE = "find all such samples with `packer verify --deep`, or continue with on_error='skip' or 'substitute'"
_SUBSTITUTES, _SUBSTITUTE_STREAM = 16, 1 << 20
ORDER_AT_ONCE = 1024  # computing a thousand rows of an order takes little more time than one batch
_T = TypeVar("_T")
_S = TypeVar("_S", bound="Steps")


@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that was skipped or replaced: its row, its position in the epoch, its key, and the reason."""

    index: int
    position: int
    key: str
    reason: str


class Start(NamedTuple):
    """A point between two steps: `cursor` positions of `epoch` are done, on all ranks together.

    order: the order of this epoch if it differs from the feed's: a resumed epoch keeps the order that it began with.
    """

    epoch: int = 0
    cursor: int = 0
    order: Order | None = None


@dataclass(frozen=True)
class FeedOptions:
    """Options of a feed. Raises ValueError.

    rank, world_size: None for both detects them on each use.
    decoder, made: its name, and the processing of the samples, in resume tokens.
    """

    rank: int | None = None
    world_size: int | None = None
    tail: Tail = "drop_last"
    on_error: OnError = "raise"
    decoder: str = ""
    made: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("on_error", self.on_error, ON_ERROR)


class Described(Protocol):
    """The properties of a set of samples that a state records."""

    @property
    def fingerprint(self) -> str: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Steps:
    """The steps of one rank: sample numbers without their contents. Raises ValueError."""

    described: Described
    order: Order
    batch_size: int
    options: FeedOptions = field(default_factory=FeedOptions)
    start: Start = field(default_factory=Start)
    run: tuple[Segment, ...] = ()
    _ahead: dict[tuple[int, int], tuple[Int64s, Int64s]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    # --- where it begins ------------------------------------------------------------------------------------------
    @property
    def seed(self) -> int:
        """The seed of the order and of all random draws."""
        return self.order.seed

    @property
    def ranks(self) -> tuple[int, int]:
        """(rank, world size): the options, or else those of the launcher at this moment."""
        return rank_and_world_size(self.options.rank, self.options.world_size, self.order.groups)

    def ranked(self: _S) -> _S:
        """The same steps with the rank that this process has now fixed; for one loop."""
        if self.options.rank is not None:
            return self
        rank, world_size = self.ranks
        return replace(self, options=replace(self.options, rank=rank, world_size=world_size))

    def at(self: _S, start: Start) -> _S:
        """The same steps, beginning at `start`."""
        return replace(self, start=start)

    def resumed(self: _S, state: Mapping[str, Any]) -> _S:
        """The same steps, continuing from a state of any consumer on any number of ranks.

        Raises ResumeError for a state of another set or another kind of order; warns if its decoder differs.
        """
        token = ResumeToken.from_dict(state)
        fingerprint, decoder = self.described.fingerprint, self.options.decoder
        token.check(fingerprint=fingerprint, order_spec=self.order.spec(), decoder=decoder, samples=len(self.described))
        order = self.order.with_seed(token.seed)
        return replace(self, order=order, start=Start(token.epoch, token.cursor, token.resumed(order)), run=token.run)

    # --- states ---------------------------------------------------------------------------------------------------
    def token(self, start: Start) -> dict[str, Any]:
        """The state of a run at `start`: a small dictionary of plain values, the same on every rank."""
        order = self.order if start.order is None else start.order
        fingerprint, samples, decoder = self.described.fingerprint, len(self.described), self.options.decoder
        state = (order.seed, start.epoch, start.cursor, fingerprint, decoder, order.spec(), samples)
        return ResumeToken(*state, self.run, self.options.made).to_dict()

    def after(self, steps: int, epoch: int | None = None) -> Start:
        """The position after `steps` steps of an epoch (default: the first) on every rank."""
        schedule, cursor = self.schedule(epoch)
        last = min(steps, schedule.steps(cursor)) - 1
        cursor = cursor if last < 0 else schedule.cursor_after(last, cursor)
        return Start(self.start.epoch if epoch is None else epoch, cursor, schedule.order)

    def or_next(self, start: Start) -> Start:
        """`start`, or the next epoch if too few samples are left for a step on all ranks."""
        return start if self.at(start).steps() else Start(start.epoch + 1)

    # --- the record of a run ----------------------------------------------------------------------------------------
    def joined(self: _S, start: Start, done: int | None, batch_size: int = 0, partial: bool | None = None) -> _S:
        """The same steps with the record of a run in which a loop begins at `start`.

        done: steps before it; None if all epochs were run to their ends, -1 if the number of steps is unknown.
        batch_size, partial: as for `Segment`, of the DataLoader that makes batches of this feed.
        """
        size, world_size, order = batch_size or self.batch_size, self.ranks[1], (start.order or self.order).spec()
        segment = Segment(done or 0, *start[:2], size, world_size, self.options.tail, partial, order)
        known = self.step_at(start)
        if known is not None:
            if segment[3:] == self.run[-1][3:] and self.between(start) is not None and done in (None, known):
                return self
            segment = segment._replace(step=known if done is None else done)
        return replace(self, run=(*self.run, segment)[-MOST_SEGMENTS:])

    def step_at(self, start: Start) -> int | None:
        """Number of steps of the run before `start`, if it is within the last segment; -1 if unknown, None without a
        record."""
        if not self.run:
            return None
        between = self.between(start) if self.run[-1].step >= 0 else None
        return -1 if between is None else self.run[-1].step + between

    def in_segment(self: _S, segment: Segment, rank: int = 0) -> _S:
        """The feed of a rank in a segment, from its start. Raises ResumeError for another order."""
        order = recorded(self.order, segment.order, segment.epoch, segment.cursor)
        options = replace(self.options, rank=rank, world_size=segment.world_size, tail=segment.tail)
        batch_size = segment.batch_size if segment.partial is None else 1
        return replace(
            self, order=order, batch_size=batch_size, options=options, start=Start(segment.epoch, segment.cursor)
        )

    def between(self, start: Start) -> int | None:
        """Number of steps from the start of the run's last segment to `start`; None if no step ends there."""
        segment = self.run[-1]
        if start[:2] < segment[1:3]:
            return None
        feed = self.in_segment(segment)
        units, size = feed.units_until(start), 1 if segment.partial is None else segment.batch_size
        is_end = units == feed.steps(start.epoch)  # where the last batch may be smaller
        if (units % size and not is_end) or feed.cursor(start.epoch, units) != start.cursor:
            return None
        steps = feed.batches_in(segment, start.epoch) if is_end else units // size
        return steps + sum(feed.batches_in(segment, epoch) for epoch in range(segment.epoch, start.epoch))

    def units_until(self, start: Start) -> int:
        """Number of steps of an epoch, from its beginning, after which all positions before `start` are done."""
        schedule, cursor = self.schedule(start.epoch)
        return bisect_left(range(schedule.steps(cursor)), start.cursor, key=lambda i: self.cursor(start.epoch, i))

    def batches_in(self, segment: Segment, epoch: int) -> int:
        """Number of batches of an epoch of a segment, on the rank with the most."""
        full, rest = divmod(self.steps(epoch), 1 if segment.partial is None else segment.batch_size)
        return full + bool(rest and segment.partial)

    def cursor(self, epoch: int, steps: int) -> int:
        """The cursor after `steps` steps of an epoch, from its beginning."""
        schedule, cursor = self.schedule(epoch)
        return schedule.cursor_after(steps - 1, cursor) if steps else cursor

    # --- an epoch -------------------------------------------------------------------------------------------------
    def schedule(self, epoch: int | None = None) -> tuple[Schedule, int]:
        """The schedule of an epoch (default: the first), and the cursor at which it begins."""
        first = epoch is None or epoch == self.start.epoch
        order = self.start.order if first and self.start.order is not None else self.order
        of_epoch = self.start.epoch if epoch is None else epoch
        schedule = make_schedule(order, of_epoch, self.batch_size, *self.ranks, self.options.tail)
        return schedule, self.start.cursor if first else 0

    def steps(self, epoch: int | None = None) -> int:
        """Number of steps of an epoch (default: the first), the same on every rank."""
        schedule, cursor = self.schedule(epoch)
        return schedule.steps(cursor)

    def batches(self, epoch: int | None = None) -> int:
        """Number of steps in which this rank has samples: with tail="exact" it may have none in the last."""
        schedule, cursor = self.schedule(epoch)
        steps = schedule.steps(cursor)
        return steps - 1 if steps and not len(schedule.positions(steps - 1, cursor)) else steps

    def samples(self, epoch: int | None = None) -> int:
        """Number of samples of this rank in an epoch (default: the first), including repeats."""
        schedule, cursor = self.schedule(epoch)
        return schedule.samples(cursor)

    def rows(self, epoch: int, step: int) -> tuple[Int64s, Int64s]:
        """(positions, rows) of a step. Raises IndexError for a step outside the epoch."""
        pair = self._ahead.get((epoch, step))
        if pair is None:
            positions, rows = self._block(*self.schedule(epoch), epoch, step)
            block = {(epoch, step + i): pair for i, pair in enumerate(zip(positions, rows, strict=True))}
            # The previous block is kept, too: an announcer asks for later steps in turn with the next step.
            ahead = dict([*list(self._ahead.items())[-len(block) :], *block.items()])
            object.__setattr__(self, "_ahead", ahead)  # one assignment, so that threads may share the feed
            pair = block[epoch, step]
        return pair

    def blocks(self, epoch: int) -> Iterator[tuple[Int64s, Int64s]]:
        """(positions, rows) of all steps of an epoch, in blocks of several steps, each [steps, batch_size]."""
        schedule, cursor = self.schedule(epoch)
        step, steps = 0, schedule.steps(cursor)
        while step < steps:
            block = self._block(schedule, cursor, epoch, step)
            yield block
            step += len(block[0])

    def positions(self, epoch: int, most: int) -> Iterator[Int64s]:
        """The positions of this rank in an epoch, `most` at a time, and the rest."""
        schedule, cursor = self.schedule(epoch)
        left, step, steps = np.empty(0, np.int64), 0, schedule.steps(cursor)
        while step < steps:
            block = schedule.block(step, cursor, most)
            step, left = step + len(block), np.concatenate([left, block.ravel()])
            while len(left) >= most:
                yield left[:most]
                left = left[most:]
        if len(left):
            yield left

    def _block(self, schedule: Schedule, cursor: int, epoch: int, step: int) -> tuple[Int64s, Int64s]:
        positions = schedule.block(step, cursor, ORDER_AT_ONCE)
        return positions, schedule.order.indices(epoch, positions)

    def others(self, epoch: int, positions: Int64s) -> Int64s:
        """The rows that may replace the samples at n positions, int64 [n, 16], in the order in which to try them.

        Substitutes are samples of the epoch, so samples that the order leaves out are not used.
        """
        schedule = self.schedule(epoch)[0]
        first, count = schedule.alike(positions)
        chosen = substitutes(self.seed, epoch, positions, count) + first[:, None]
        return schedule.order.indices(epoch, chosen.ravel()).reshape(chosen.shape)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ahead": {}}


class Settled(NamedTuple, Generic[_T]):
    """The samples of a batch that are left after bad ones were skipped or replaced.

    places: their places among the requested samples, int64 [n].
    rows: rows of the samples or of their substitutes, int64 [n].
    values: the values made from them.
    bad: the samples that were skipped or replaced.
    """

    places: Int64s
    rows: Int64s
    values: list[_T]
    bad: list[BadSample]


@dataclass(frozen=True)
class Feed(Steps):
    """The steps of one rank over a reader. Raises ValueError."""

    described: Reader

    @property
    def reader(self) -> Reader:
        return self.described

    @classmethod
    def of(
        cls,
        reader: Reader,
        batch_size: int,
        decoder: str,
        *,
        order: Order | None,
        shuffle: bool,
        seed: int | None,
        ranks: Ranks | None,
        on_error: OnError,
        made: Mapping[str, Any] | None = None,
    ) -> Feed:
        """The feed of a loader's arguments. decoder, made: as for `FeedOptions`."""
        order, ranks = choose_order(len(reader), order, shuffle, seed), ranks or Ranks()
        tail = ranks.tail or choose_tail(order)
        options = FeedOptions(ranks.rank, ranks.world_size, tail, on_error, decoder, made or {})
        return cls(reader, order, batch_size, options)

    def read(self, rows: Int64s) -> Sequence[Buffer | Exception]:
        """The encoded images of some rows, or the errors of reading them."""
        return read_samples(self.reader, rows)

    def treat(
        self,
        epoch: int,
        row: int,
        position: int,
        error: Exception,
        take: Callable[[int], _T],
        images: Reader | None = None,
    ) -> Treated[_T]:
        """Treat a bad sample as the function `treat` does, with substitutes from the epoch."""

        def others() -> list[int]:
            others: list[int] = self.others(epoch, np.array([position], np.int64))[0].tolist()
            return others

        return treat(self.reader, self.options.on_error, (row, position), error, others, take, images)

    def settle(
        self,
        epoch: int,
        positions: Int64s,
        rows: Int64s,
        values: Iterable[_T | Exception],
        take: Callable[[int, int], _T],
    ) -> Settled[_T]:
        """The samples of a batch after bad ones were treated.

        values: the values of the samples at `positions`, or errors. take: makes the value of another sample from (row,
        position). Raises BadSampleError.
        """
        places: list[int] = []
        kept: list[int] = []
        made: list[_T] = []
        bad: list[BadSample] = []
        for place, (row, position, value) in enumerate(zip(rows.tolist(), positions.tolist(), values, strict=True)):
            if isinstance(value, Exception):
                treated = self.treat(epoch, row, position, value, partial(_at, take, position))
                bad += treated.bad
                if treated.value is None:
                    continue
                row, value = treated.row, treated.value
            places.append(place)
            kept.append(row)
            made.append(value)
        return Settled(np.array(places, np.int64), np.array(kept, np.int64), made, bad)


# --- defaults ---------------------------------------------------------------------------------------------------
def choose_order(samples: int, order: Order | None, shuffle: bool, seed: int | None) -> Order:
    """The order of a loader's arguments; its seed is also that of augmentation and states.

    Raises ValueError for an order with another seed or another number of samples.
    """
    if order is None:
        return Shuffled(samples, seed or 0) if shuffle else Sequential(samples, seed or 0)
    ordered = order.spec().get("samples", samples)
    if ordered != samples:
        raise ValueError(
            f"the order is for {ordered} samples, but the reader has {samples}: make it with len(reader); to use some "
            f"of the samples, use reader.select(…)"
        )
    if seed is None or seed == order.seed:
        return order
    if order.seed:
        raise ValueError(
            f"seed={seed}, but the order has seed {order.seed}: a run needs a single seed to be resumed; leave out "
            f"seed=, or give the order the same seed"
        )
    return order.with_seed(seed)


def choose_tail(order: Order) -> Tail:
    """The default tail: "exact" for `Sequential`, "drop_last" for all other orders."""
    return "exact" if isinstance(order, Sequential) else "drop_last"


def check_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise ValueError for an argument that is not one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} is one of {', '.join(map(str, allowed))}, not {value!r}")


# --- bad samples ------------------------------------------------------------------------------------------------
def for_decoding(reader: Reader) -> Reader:
    """`reader.for_decoding()`; other objects with a reader's interface are returned unchanged."""
    return reader.for_decoding() if isinstance(reader, Reader) else reader


def decoder_name(name: str, exact_colours: bool, geometry: str = "") -> str:
    """A decoder's name in resume tokens, with the options that change pixels: exact colours, and `Recipe.geometry`."""
    return ", ".join(filter(None, (name, "exact colours" if exact_colours else "", geometry)))


def read_sample(reader: Reader, row: int) -> Buffer | Exception:
    """The encoded image of a row, or the error of reading it."""
    try:
        return reader.read(row)
    except SAMPLE_ERRORS as error:
        return error


def read_samples(reader: Reader, rows: Sequence[int] | Int64s) -> Sequence[Buffer | Exception]:
    """The encoded images of some rows, or the errors of reading them."""
    try:
        return reader.read_many(rows)
    except SAMPLE_ERRORS:
        return [read_sample(reader, int(row)) for row in rows]


def bad_sample(reader: Reader, on_error: OnError, row: int, position: int, error: Exception) -> BadSample:
    """The record of a sample that is skipped or replaced. Raises BadSampleError with on_error="raise".

    Raises StaleIndexError if the set was replaced since it was opened: its samples are not bad.
    """
    if isinstance(reader, Reader) and (explained := reader.table.columns.explained(error)) is not error:
        raise explained from error
    if on_error == "raise":
        raise name_sample(reader, row, f"{error}; {_ADVICE}") from error
    return BadSample(row, position, reader.keys[row], str(error))


def _at(take: Callable[[int, int], _T], position: int, row: int) -> _T:
    return take(row, position)


class Treated(NamedTuple, Generic[_T]):
    """The result for a bad sample: the row that is used, and its value; None if the sample is skipped."""

    row: int
    value: _T | None
    bad: tuple[BadSample, ...]


def treat(
    reader: Reader,
    on_error: OnError,
    place: tuple[int, int],
    error: Exception,
    others: Callable[[], Iterable[int]],
    take: Callable[[int], _T],
    images: Reader | None = None,
) -> Treated[_T]:
    """Treat the sample at `place`, (row, position), which failed with `error`, by on_error.

    others: returns the rows that may replace it.
    take: makes the value of a row; raises SAMPLE_ERRORS.
    images: the reader of the image; if it read a damaged copy from a cache, the copy is dropped and the sample is taken
        again.

    Raises BadSampleError.
    """
    row, position = place
    if images is not None and isinstance(images, Reader) and images.drop_damaged(row):
        try:
            return Treated(row, take(row), ())
        except SAMPLE_ERRORS as again:
            error = again
    bad = bad_sample(reader, on_error, row, position, error)
    if on_error == "skip":
        return Treated(row, None, (bad,))
    return Treated(*substitute(others(), error, take), (bad,))


def name_sample(reader: Reader, row: int, reason: str) -> BadSampleError:
    """The error that names a sample."""
    return BadSampleError(f"sample {row} ({reader.keys[row]}): {reason}")


def substitutes(seed: int, epoch: int, positions: Int64s, count: Int64s) -> Int64s:
    """Draw substitutes for n positions: int64 [n, 16] below `count` (int64 [n]), in the order in which to try them."""
    draws = Draws(seed, epoch, positions).uniform(_SUBSTITUTE_STREAM, _SUBSTITUTES)
    chosen: Int64s = (draws * count[:, None]).astype(np.int64)
    return chosen


def substitutes_of_row(row: int, rows: Sequence[int]) -> list[int]:
    """The substitutes, among `rows`, of a row without a position; always the same."""
    chosen = substitutes(0, 0, np.array([row], np.int64), np.array([len(rows)], np.int64))[0]
    return [rows[i] for i in chosen.tolist()]


def substitute(rows: Iterable[int], error: Exception, take: Callable[[int], _T]) -> tuple[int, _T]:
    """The first row for which `take` does not fail, and its value. Raises BadSampleError if all fail."""
    tried = 0
    for row in rows:
        try:
            return row, take(row)
        except SAMPLE_ERRORS:
            tried += 1
    raise BadSampleError(f"{tried} substitutes of a bad sample are bad, too; its own error: {error}") from error


def summarise(bad: Sequence[BadSample], epoch: int, on_error: OnError) -> str:
    """The warning at the end of an epoch; "" without bad samples. bad: sorted by position."""
    if not bad:
        return ""
    first = bad[0]
    return (
        f"epoch {epoch}: {len(bad)} bad samples were {_DONE[on_error]}, the first is sample {first.index} "
        f"({first.key}): {first.reason}; see bad_samples"
    )
