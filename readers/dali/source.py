"""Which bytes each batch of a DALI pipeline gets: a function of DALI's (epoch, iteration) and nothing else.

DALI calls a source with the number of the batch, several batches ahead, from several processes, again after a restored
checkpoint, and past the end of an epoch. So a source remembers nothing: DALI's epoch e is epoch `start.epoch` + e of
the order, and only the first begins at a cursor. What lies past the end raises StopIteration, however often it is asked
for.

What a batch of n samples is made of, in this order:

    encoded   n arrays uint8 [bytes], views of the reader's memory: nothing is copied in this process
    label     int64 [n, 1], -1 without one

and where the source has a list of `readers.augment` ops, what they do to each image, drawn by (seed, epoch, position):

    box       int64 [n, 4]    top, left, height, width in the upright image; only if some op crops before the resize
    resized   float32 [n, 4]  height, width it is resized to; the final crop's place in the room it has, 0..1 (y, x),
                              or in pixels, where crops may reach beyond the image
    flips     int32 [n, 2]    left and right, top and bottom
    step      float32 [n, k]  for each op on pixels, its parameters

The memory behind `encoded` must stay as it is until DALI has used it. A reader does not touch memory that somebody
looks at, so the source holds the arrays of the batches that DALI may have under way.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cache.ranks import rank_and_world_size
from readers.augment.ops import Op
from readers.augment.recipe import Plan, Recipe
from readers.errors import BadSampleError
from readers.headers import MEDIA, exif_orientation
from readers.order import Order, ResumeToken, Schedule
from readers.order.base import Int64s
from readers.order.choice import choose_order, choose_tail
from readers.order.schedule import Tail
from readers.sample import Buffer, ImageInfo, Reader

__all__ = ["DECODER", "BatchSource", "Columns", "SampleSource", "Source", "foreign_media"]

DECODER = "dali"  # named in resume tokens
# What DALI cannot decode, though our own decoder can.
_FOREIGN = {
    "gif": "DALI does not decode GIF images",
    "pixels": "its bytes are pixels, which DALI does not take: have readers.cached keep 'encoded' or 'recoded:…'",
}
_ORDER_AT_ONCE = 1024
Columns = tuple[npt.NDArray[Any], ...]
_ADVICE = "packer verify --deep finds damaged images, and reader.select(…) leaves samples out"


class _Start(NamedTuple):
    """Where DALI's epoch 0 begins; after a resume the order may be the one that the epoch began with."""

    epoch: int
    cursor: int
    order: Order


class Source:
    """The batches of one rank. Arguments as those of `readers.loader.ImageLoader`; immutable, pickles, may be shared.

    augment: ops whose outcome becomes part of each batch; those that DALI does not execute are refused by `pipeline`.
    Raises ValueError.
    """

    def __init__(
        self,
        reader: Reader,
        batch_size: int,
        *,
        augment: Sequence[Op] | None = None,
        order: Order | None = None,
        shuffle: bool = True,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        tail: Tail | None = None,
    ) -> None:
        order = choose_order(len(reader), order, shuffle, seed)
        rank, world_size = rank_and_world_size(rank, world_size, order.groups)
        self.reader, self.batch_size, self.seed = reader, batch_size, order.seed
        self.recipe = None if augment is None else Recipe(augment)
        self.boxed = self.recipe is not None and self.recipe.boxed
        self.schedule = Schedule(order, batch_size, rank, world_size, choose_tail(tail, order))
        self.start = _Start(0, 0, order)
        self._ahead: dict[tuple[int, int], tuple[Int64s, Int64s]] = {}

    # --- where it begins ----------------------------------------------------------------------------------------
    @property
    def order(self) -> Order:
        """The order of whole epochs."""
        return self.schedule.order

    def starting(self, epoch: int, cursor: int = 0, order: Order | None = None) -> Source:
        """The same source, beginning at `cursor` of `epoch`; order: of that epoch alone."""
        other = copy.copy(self)
        other.start, other._ahead = _Start(epoch, cursor, order or self.order), {}
        return other

    def resumed(self, state: Mapping[str, Any]) -> Source:
        """The source that goes on where `state` was taken, by this one or by an ImageLoader, on any number of ranks.

        Raises ResumeError for a state of another set or another kind of order; warns where another decoder made it.
        """
        token, order = ResumeToken.from_dict(state), self.order
        samples, spec = len(self.reader), order.spec()
        token.check(fingerprint=self.reader.fingerprint, order_spec=spec, decoder=DECODER, samples=samples)
        order = order.with_seed(token.seed)
        other = self.starting(token.epoch, token.cursor, token.resumed(order))
        other.seed = token.seed
        other.schedule = _with_order(self.schedule, order)
        return other

    def state_after(self, epoch: int, steps: int) -> dict[str, Any]:
        """The state after `steps` batches, on every rank, of DALI's epoch `epoch`: what `resumed` takes."""
        schedule, cursor = self._schedule(epoch)
        if steps >= schedule.steps(cursor):
            schedule, cursor, epoch, steps = self.schedule, 0, epoch + 1, 0
        if steps:
            cursor = schedule.cursor_after(steps - 1, cursor)
        spec, fingerprint, samples = schedule.order.spec(), self.reader.fingerprint, len(self.reader)
        return ResumeToken(self.seed, self.start.epoch + epoch, cursor, fingerprint, DECODER, spec, samples).to_dict()

    # --- what it gives ------------------------------------------------------------------------------------------
    def steps(self, epoch: int = 0) -> int:
        """Steps of DALI's epoch `epoch`, the same number on every rank."""
        schedule, cursor = self._schedule(epoch)
        return schedule.steps(cursor)

    def batches(self, epoch: int = 0) -> int:
        """Steps in which this rank has samples: with tail="exact" it may have none in the last."""
        schedule, cursor = self._schedule(epoch)
        steps = schedule.steps(cursor)
        return steps - 1 if steps and not len(schedule.positions(steps - 1, cursor)) else steps

    def samples_of(self, epoch: int, step: int) -> tuple[Int64s, Int64s]:
        """(positions, samples) of a batch, int64 [n] each. Raises StopIteration from the end of the epoch on."""
        found = self._ahead.get((epoch, step))
        if found is None:
            if step >= self.batches(epoch):
                raise StopIteration
            found = self._look_ahead(epoch, step)
        return found

    def batch(self, epoch: int, step: int) -> tuple[Any, ...]:
        """A batch as described at the top of this module. Raises StopIteration, BadSampleError, and what readers do."""
        positions, indices = self.samples_of(epoch, step)
        data = self.reader.read_many(indices)
        self._check_turns(indices, data)
        arrays = [self._array(*pair) for pair in zip(indices.tolist(), data, strict=True)]
        return (arrays, *self.columns(epoch, positions, indices))

    def sample(self, epoch: int, step: int, row: int) -> Columns:
        """One row of a batch. Raises StopIteration from the first batch on that is not full: DALI counts on full ones
        where it asks for samples one by one."""
        positions, indices = self.samples_of(epoch, step)
        if len(positions) < self.batch_size:
            raise StopIteration
        here = slice(row, row + 1)
        index = int(indices[row])
        columns = self.columns(epoch, positions[here], indices[here])
        data = self.reader.read(index)
        self._check_turns(indices[here], [data])
        return (self._array(index, data), *(column[0] for column in columns))

    def columns(self, epoch: int, positions: Int64s, indices: Int64s) -> Columns:
        """All parts of a batch but the encoded images. Reads headers, where there are ops, and no payload."""
        labels = np.array(self.reader.labels[indices], np.int64).reshape(-1, 1)
        if self.recipe is None:
            return (labels,)
        info = self.reader.image_info(indices)
        self._check_headers(info, indices)
        stored = np.array([info.height, info.width], np.int64)
        heights, widths = np.where(info.orientation >= 5, stored[::-1], stored)
        plan = self.recipe.plan(self.seed, self.start.epoch + epoch, positions, heights, widths)
        for row, error in plan.boxes.bad.items():
            raise self.bad(int(indices[row]), str(error)) from error
        return (labels, *_plan_columns(plan, self.recipe)[0 if self.boxed else 1 :])

    def bad(self, index: int, reason: str) -> BadSampleError:
        """The error that names a sample."""
        return BadSampleError(f"sample {index} ({self.reader.keys[index]}): {reason}; {_ADVICE}")

    # --- inside -------------------------------------------------------------------------------------------------
    def _schedule(self, epoch: int) -> tuple[Schedule, int]:
        """The schedule of DALI's epoch `epoch`, and the cursor at which it begins."""
        if epoch:
            return self.schedule, 0
        return _with_order(self.schedule, self.start.order), self.start.cursor

    def _look_ahead(self, epoch: int, step: int) -> tuple[Int64s, Int64s]:
        """Ask the order for many samples at once: it takes hardly longer than for those of a batch."""
        schedule, cursor = self._schedule(epoch)
        count = max(1, min(_ORDER_AT_ONCE // self.batch_size, self.batches(epoch) - step))
        positions = [schedule.positions(step + i, cursor) for i in range(count)]
        indices = schedule.order.indices(self.start.epoch + epoch, np.concatenate(positions))
        parts = np.split(indices, np.cumsum([len(part) for part in positions[:-1]]))
        pairs = zip(positions, parts, strict=True)
        ahead = {(epoch, step + i): pair for i, pair in enumerate(pairs)}
        self._ahead = ahead  # replaced as a whole, so that threads may share the source
        return ahead[epoch, step]

    def _array(self, index: int, data: Buffer) -> npt.NDArray[np.uint8]:
        if not len(data):
            raise self.bad(index, "its image has no bytes")
        return np.frombuffer(data, np.uint8)

    def _check_turns(self, indices: Int64s, data: Sequence[Buffer]) -> None:
        """The box of an image is that of the upright one; DALI turns by EXIF, and by nothing else."""
        if self.recipe is None:
            return
        orientation = self.reader.image_info(indices).orientation
        for row in np.flatnonzero(orientation > 1).tolist():
            if exif_orientation(data[row]) != orientation[row]:
                raise self.bad(int(indices[row]), "its orientation is not told by EXIF, and DALI reads no XMP or text")

    def _check_headers(self, info: ImageInfo, indices: Int64s) -> None:
        for row in np.flatnonzero((info.height == 0) | (info.width == 0)).tolist():
            raise self.bad(int(indices[row]), "its header cannot be read")
        for row, media in enumerate(info.media.tolist()):
            reason = foreign_media(MEDIA[media])
            if reason:
                raise self.bad(int(indices[row]), reason)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ahead": {}}


class BatchSource:
    """What `fn.external_source(…, batch=True, batch_info=True)` calls: whole batches.

    kept: batches that DALI may have under way, whose memory is held. Pickles without them.
    """

    def __init__(self, source: Source, kept: int = 0) -> None:
        self.source = source
        self._held: deque[Any] = deque(maxlen=kept)

    def __call__(self, info: Any) -> tuple[Any, ...]:
        """info: nvidia.dali.types.BatchInfo."""
        batch = self.source.batch(info.epoch_idx, info.iteration)
        self._held.append(batch)
        return batch

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source, "_held": deque(maxlen=self._held.maxlen)}


class SampleSource:
    """What `fn.external_source(…, batch=False)` calls: samples one by one, each perhaps in another process."""

    def __init__(self, source: Source, kept: int = 0) -> None:
        self.source = source
        self._held: deque[Any] = deque(maxlen=kept * source.batch_size)

    def __call__(self, info: Any) -> tuple[Any, ...]:
        """info: nvidia.dali.types.SampleInfo."""
        sample = self.source.sample(info.epoch_idx, info.iteration, info.idx_in_batch)
        self._held.append(sample)
        return sample

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source, "_held": deque(maxlen=self._held.maxlen)}


def foreign_media(media: str) -> str:
    """Why DALI cannot decode images of this medium, one of `readers.headers.MEDIA`; "" where it can."""
    return _FOREIGN.get(media, "")


def _with_order(schedule: Schedule, order: Order) -> Schedule:
    if order is schedule.order:
        return schedule
    return Schedule(order, schedule.batch_size, schedule.rank, schedule.world_size, schedule.tail)


def _plan_columns(plan: Plan, recipe: Recipe) -> Columns:
    """box, resized, flips and steps of a batch."""
    b = plan.boxes
    box = np.stack([b.top, b.left, b.height, b.width], axis=1)
    room = np.maximum(1, np.stack([b.resized_height - b.out_height, b.resized_width - b.out_width]))
    corner = np.stack([b.crop_top, b.crop_left]) / (1 if recipe.hangs_over else room)
    resized = np.stack([b.resized_height, b.resized_width, *corner], axis=1).astype(np.float32)
    flips = np.stack([plan.hflip, plan.vflip], axis=1).astype(np.int32)
    return box, resized, flips, *(parameters.astype(np.float32) for _, parameters in plan.steps)
