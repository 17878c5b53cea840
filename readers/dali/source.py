"""External sources for DALI pipelines: each batch is a pure function of DALI's (epoch, iteration).

DALI calls a source with the number of the batch, several batches ahead, from several processes, again after a restored
checkpoint, and past the end of an epoch. So a source has no state. DALI's epoch e is epoch `feed.start.epoch` + e of
the order, and only the first one begins at a cursor. Every call past the end of an epoch raises StopIteration.

A batch of n samples consists of, in this order:

    encoded   n arrays uint8 [bytes], views of the memory of the reader: nothing is copied in this process
    label     int64 [n, 1], -1 for none

With a list of `readers.augment` ops, a batch also has their parameters for each image, drawn by (seed, epoch,
position):

    box       int64 [n, 4]    top, left, height, width in the upright image; only if some op crops before the resize
    resized   float32 [n, 4]  height and width of the resized box; the position (y, x) of the final crop in its margin,
                              0..1, or in pixels if crops may extend beyond the image
    flips     int32 [n, 2]    left and right, top and bottom
    step      float32 [n, k]  for each op on pixels, the result of `Op.dali_parameters`

These columns occur once for each part of the list (`readers.augment.recipe`). In parts before the last, `resized` is
[n, 6], with the position of the crop in pixels and its height and width; `resized` and `flips` are only sent if the
part resizes, crops or flips. In the last part, the height and width of the crop are appended if they differ between
batches (`ResizeToBucket`); they are the same for all images of a batch.

If bad samples are skipped or replaced, the last column is

    row       int64 [n, 1]    the rows of the samples

The memory of `encoded` must not change until DALI has used it. A reader does not reuse memory with references to it,
so the source keeps the arrays of all batches that DALI may still use.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError
from readers.augment.geometry import Plan
from readers.augment.ops import Op
from readers.augment.recipe import Part, Recipe, made_of
from readers.batch import Fields
from readers.decode.region import has_clean_header
from readers.feed import (
    BadSample,
    Feed,
    OnError,
    Settled,
    bad_sample,
    name_sample,
)
from readers.headers import MEDIA, exif_orientation, parse_header, read_header
from readers.options import Ranks, accepts_old_names
from readers.order import Order
from readers.order.base import Int64s
from readers.reader import Reader
from readers.table import Buffer, ImageInfo, upright_sides

DECODER = "dali"  # the name of the decoder in resume tokens
# Media that only the decoder of this package decodes.
_FOREIGN = {
    **{media: f"DALI does not decode {media.upper()} images" for media in ("gif", "avif", "heif", "jxl")},
    "pixels": "its bytes are pixels, which DALI does not take: have readers.cached keep 'encoded' or 'recoded:…'",
}
_FOREIGN_CODES = [MEDIA.index(media) for media in _FOREIGN]


class _Samples(NamedTuple):
    """The samples of a batch: their rows, their encoded images, and the plan of the ops for them."""

    rows: Int64s
    data: list[Buffer]
    plan: Plan | None


class Source:
    """The batches of one rank. Immutable, so it can be pickled and shared.

    The arguments are those of `readers.loader.ImageLoader`, except:

    augment: ops; their parameters become part of each batch. `pipeline` refuses ops that DALI cannot execute.
    on_error: "raise"; "skip" (smaller batches; a batch of only bad samples is an error, because DALI does not accept
        empty batches); or "substitute" (another sample). With "skip" and "substitute", the header and the end of every
        image are checked before DALI gets it.

    Raises ValueError.
    """

    @accepts_old_names
    def __init__(
        self,
        reader: Reader,
        batch_size: int,
        *,
        augment: Sequence[Op] | None = None,
        order: Order | None = None,
        shuffle: bool = True,
        seed: int | None = None,
        ranks: Ranks | None = None,
        on_error: OnError = "raise",
    ) -> None:
        ordering = {"order": order, "shuffle": shuffle, "seed": seed, "ranks": ranks, "on_error": on_error}
        made = made_of("a graph of DALI draws by itself" if augment is None else [augment], "RGB", on_error)
        feed = Feed.of(reader, batch_size, DECODER, **ordering, made=made)  # type: ignore[arg-type]
        Fields(("label",), reader).refuse_targets("DALI")
        self.feed = feed.ranked()
        self.feed.schedule()
        self.recipe = None if augment is None else Recipe(augment)
        self.undecodable: Mapping[int, str] = {}

    @property
    def on_error(self) -> OnError:
        return self.feed.options.on_error

    # --- where it begins ------------------------------------------------------------------------------------------
    def over(self, feed: Feed) -> Source:
        """A copy of the source over another feed."""
        other = copy.copy(self)
        other.feed = feed
        return other

    def resumed(self, state: Mapping[str, Any]) -> Source:
        """A source that continues from the position of `state`, on any number of ranks.

        state: from `state_after`, or of an ImageLoader. Raises ResumeError for a state of another set or another kind
        of order; warns if the state is of another decoder.
        """
        return self.over(self.feed.resumed(state))

    def state_after(self, epoch: int, steps: int) -> dict[str, Any]:
        """The state for `resumed` after `steps` batches, on every rank, of DALI's epoch `epoch`."""
        return self.feed.token(self.feed.or_next(self.feed.after(steps, self._number(epoch))))

    def without(self, undecodable: Mapping[int, str]) -> Source:
        """A copy of the source that treats these rows as bad samples. undecodable: why DALI failed on each row."""
        other = copy.copy(self)
        other.undecodable = {**self.undecodable, **undecodable}
        return other

    # --- batches --------------------------------------------------------------------------------------------------
    def steps(self, epoch: int = 0) -> int:
        """Number of steps of DALI's epoch `epoch`, the same on every rank."""
        return self.feed.steps(self._number(epoch))

    def batches(self, epoch: int = 0) -> int:
        """Number of steps in which this rank has samples; with tail="exact" it may have none in the last step."""
        return self.feed.batches(self._number(epoch))

    def samples_of(self, epoch: int, step: int) -> tuple[Int64s, Int64s]:
        """(positions, rows) of a batch, int64 [n] each. Raises StopIteration past the end of the epoch."""
        try:
            positions, rows = self.feed.rows(self._number(epoch), step)
        except IndexError:
            raise StopIteration from None
        if not len(rows):
            raise StopIteration
        return positions, rows

    def batch(self, epoch: int, step: int) -> tuple[Any, ...]:
        """A batch in the form that the module describes. Raises StopIteration, BadSampleError, and reader errors."""
        return self._parts(self._read(epoch, *self.samples_of(epoch, step)))

    def images(self, epoch: int, step: int) -> Iterator[tuple[int, Buffer]]:
        """(row, encoded image) for each sample of a batch. Raises as `batch` does."""
        samples = self._read(epoch, *self.samples_of(epoch, step))
        return zip(samples.rows.tolist(), samples.data, strict=True)

    def sample(self, epoch: int, step: int, row: int) -> tuple[Any, ...]:
        """One sample of a batch; row: its place in the batch. Raises as `batch` does.

        Also raises StopIteration from the first partial batch on, because DALI expects full batches of single samples.
        """
        positions, rows = self.samples_of(epoch, step)
        if len(positions) < self.feed.batch_size:
            raise StopIteration
        parts = self._parts(self._read(epoch, positions[row : row + 1], rows[row : row + 1]))
        return tuple(part[0] for part in parts)

    def kept(self, epoch: int, step: int, returned: Int64s) -> Int64s:
        """The places, int64 [n], of the samples of a batch that a pipeline returned, replaced ones included.

        returned: the rows that it returned.
        """
        rows = self.samples_of(epoch, step)[1]
        if self.on_error == "substitute":
            return np.arange(len(rows), dtype=np.int64)
        places, rest = [], returned.tolist()[::-1]
        for i, row in enumerate(rows.tolist()):
            if rest and rest[-1] == row:
                rest.pop()
                places.append(i)
        return np.array(places, np.int64)

    def bad_samples_of(self, epoch: int, step: int, returned: Int64s) -> list[BadSample]:
        """The samples of a batch that were skipped or replaced. returned: the rows that a pipeline returned."""
        positions, rows = self.samples_of(epoch, step)
        kept = self.kept(epoch, step, returned)
        missing = np.setdiff1d(np.arange(len(rows)), kept[rows[kept] == returned]).tolist()
        if not missing:
            return []
        positions, rows = positions[missing], rows[missing]
        faults, _ = self._examine(epoch, positions, rows, self.feed.read(rows))
        unknown = BadSampleError("it was bad when it was read")
        samples = enumerate(zip(rows.tolist(), positions.tolist(), strict=True))
        reader = self.feed.reader
        return [
            bad_sample(reader, self.on_error, row, position, faults.get(i, unknown)) for i, (row, position) in samples
        ]

    def plan(self, epoch: int, positions: Int64s, rows: Int64s) -> tuple[ImageInfo | None, Plan | None]:
        """The header values of some samples and the plan of the ops for them; (None, None) without ops."""
        if self.recipe is None:
            return None, None
        info = self.feed.reader.image_info(rows)
        heights, widths = np.maximum(1, upright_sides(info))
        return info, self.recipe.plan(self.feed.seed, self._number(epoch), positions, heights, widths)

    # --- inside ---------------------------------------------------------------------------------------------------
    def _number(self, epoch: int) -> int:
        """The number of DALI's epoch in the order."""
        return self.feed.start.epoch + epoch

    def _parts(self, samples: _Samples) -> tuple[Any, ...]:
        arrays = [np.frombuffer(data, np.uint8) for data in samples.data]
        labels = np.array(self.feed.reader.labels[samples.rows], np.int64).reshape(-1, 1)
        columns = () if samples.plan is None or self.recipe is None else _plan_columns(samples.plan, self.recipe)
        return (arrays, labels, *columns, *(() if self.on_error == "raise" else (samples.rows.reshape(-1, 1),)))

    def _read(self, epoch: int, positions: Int64s, rows: Int64s) -> _Samples:
        """Read these samples; bad ones are left out or replaced. Raises BadSampleError."""
        data = list(self.feed.read(rows))
        faults, plan = self._examine(epoch, positions, rows, data)
        if not faults:
            self._check_shapes(rows, plan)
            return _Samples(rows, data, plan)  # type: ignore[arg-type]  # none is an Exception
        first = int(rows[0])
        values: Iterator[Buffer | Exception] = (faults.get(i, image) for i, image in enumerate(data))
        take = partial(self._read_one, epoch)
        settled: Settled[Buffer] = self.feed.settle(self._number(epoch), positions, rows, values, take)
        positions, rows = positions[settled.places], settled.rows
        if not len(rows):
            raise name_sample(
                self.feed.reader,
                first,
                f"it is the first of {len(faults)} samples of a batch that are all bad, so that on_error='skip' leaves "
                f"none of it, and DALI takes no empty batch; use on_error='substitute'",
            )
        return _Samples(rows, settled.values, self.plan(epoch, positions, rows)[1])

    def _check_shapes(self, rows: Int64s, plan: Plan | None) -> None:
        """Raise BadSampleError for a batch with results of different sizes."""
        if plan is None or self.recipe is None or self.recipe.out_size is not None:
            return
        shapes = np.stack([plan.boxes.out_height, plan.boxes.out_width], axis=1)
        other = int(np.argmax((shapes != shapes[0]).any(axis=1)))
        if other:
            first, second = (f"{shapes[i][0]} x {shapes[i][1]} pixels" for i in (0, other))
            raise name_sample(
                self.feed.reader,
                int(rows[other]),
                f"it has {second} in a batch of images of {first}: make the order of the buckets of these ops, with  "
                f"Bucketed(buckets.of(reader.info), …)",
            )

    def _read_one(self, epoch: int, row: int, position: int) -> Buffer:
        """The image of a row at this position. Raises BadSampleError if the sample is bad."""
        rows = np.array([row], np.int64)
        (data,) = self.feed.read(rows)
        faults, _ = self._examine(epoch, np.array([position], np.int64), rows, [data])
        if faults or isinstance(data, Exception):
            raise BadSampleError(str(faults[0])) from faults[0]
        return data

    def _examine(
        self, epoch: int, positions: Int64s, rows: Int64s, data: Sequence[Buffer | Exception]
    ) -> tuple[dict[int, Exception], Plan | None]:
        """The errors of the bad ones of these samples, by place; and the plan of the ops for all of them."""
        info, plan = self.plan(epoch, positions, rows)
        faults: dict[int, Exception] = {}
        reasons: dict[int, str] = {}
        for i, (row, payload) in enumerate(zip(rows.tolist(), data, strict=True)):
            if isinstance(payload, Exception):
                faults[i] = payload
            elif row in self.undecodable or not len(payload):
                reasons[i] = self.undecodable.get(row, "its image has no bytes")
        if info is not None and plan is not None:
            for i in np.flatnonzero((info.height == 0) | (info.width == 0)).tolist():
                if not isinstance(payload := data[i], Exception):
                    reasons.setdefault(i, f"its header cannot be read: {refusal(payload)}")
            for i in np.flatnonzero(np.isin(info.media, _FOREIGN_CODES)).tolist():
                reasons.setdefault(i, _FOREIGN[MEDIA[info.media[i]]])
            for i, error in plan.boxes.bad.items():
                reasons.setdefault(i, str(error))
            # Boxes are of upright images, and DALI turns images by EXIF only.
            for i in np.flatnonzero(info.orientation > 1).tolist():
                payload = data[i]
                if not isinstance(payload, Exception) and exif_orientation(payload) != info.orientation[i]:
                    reasons.setdefault(i, "its orientation does not come from EXIF, and DALI reads no XMP or text")
        if self.on_error != "raise":
            for i, payload in enumerate(data):
                if not isinstance(payload, Exception) and i not in reasons and (reason := refusal(payload)):
                    reasons[i] = reason
        return {i: BadSampleError(reason) for i, reason in reasons.items()} | faults, plan


class BatchSource:
    """A callable for `fn.external_source(…, batch=True, batch_info=True)` that returns whole batches.

    kept: number of batches whose memory is kept because DALI may still use it; they are not pickled.
    """

    def __init__(self, source: Source, kept: int = 0) -> None:
        self.source = source
        self._under_way: deque[Any] = deque(maxlen=kept)

    def __call__(self, info: Any) -> tuple[Any, ...]:
        """info: nvidia.dali.types.BatchInfo."""
        batch = self.source.batch(info.epoch_idx, info.iteration)
        self._under_way.append(batch)
        return batch

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source, "_under_way": deque(maxlen=self._under_way.maxlen)}


class SampleSource(BatchSource):
    """A callable for `fn.external_source(…, batch=False)` that returns single samples, in any process."""

    def __init__(self, source: Source, kept: int = 0) -> None:
        super().__init__(source, kept * source.feed.batch_size)

    def __call__(self, info: Any) -> tuple[Any, ...]:
        """info: nvidia.dali.types.SampleInfo."""
        sample = self.source.sample(info.epoch_idx, info.iteration, info.idx_in_batch)
        self._under_way.append(sample)
        return sample


def refusal(data: Buffer) -> str:
    """Why DALI fails on an image, as far as its header and its end show; "" if they are valid.

    Damage between header and end is only found by decoding.
    """
    try:
        media = parse_header(data).media
    except BadSampleError as error:
        try:
            media = read_header(data).media
        except BadSampleError as final:
            return str(final)
        return _FOREIGN.get(media) or f"{error}: our decoder tolerates this damage, DALI does not"
    if media == "jpeg" and not has_clean_header(data):
        return "jpeg image: stray bytes or a damaged segment before its pixels, which only our decoder tolerates"
    return _FOREIGN.get(media, "")


def has_size(part: Part) -> bool:
    """Whether `resized` is sent for a part; DALI warns about unused outputs."""
    return part.last or part.interpolation is not None or part.crops_result


def has_flips(part: Part) -> bool:
    """Whether `flips` is sent for a part."""
    return part.last or part.flips


def _plan_columns(plan: Plan, recipe: Recipe) -> tuple[npt.NDArray[Any], ...]:
    """The columns of a plan, part by part, as the module describes them."""
    columns: list[npt.NDArray[Any]] = []
    for made, part in zip((*plan.before, plan), recipe.parts, strict=True):
        b = made.boxes
        corner: npt.NDArray[Any] = np.stack([b.crop_top, b.crop_left])
        if not part.last:
            corner = np.concatenate([corner, np.stack([b.out_height, b.out_width])])
        elif not part.hangs_over:
            corner = corner / np.maximum(1, np.stack([b.resized_height - b.out_height, b.resized_width - b.out_width]))
        if part.last and recipe.out_size is None:
            corner = np.concatenate([corner, np.stack([b.out_height, b.out_width])])
        if part.boxed:
            columns.append(np.stack([b.top, b.left, b.height, b.width], axis=1))
        if has_size(part):
            columns.append(np.stack([b.resized_height, b.resized_width, *corner], axis=1).astype(np.float32))
        if has_flips(part):
            columns.append(np.stack([made.hflip, made.vflip], axis=1).astype(np.int32))
        sides = b.out_height.astype(np.float64), b.out_width.astype(np.float64)
        columns += [op.dali_parameters(numbers, *sides).astype(np.float32) for op, numbers in made.steps]
    return tuple(columns)
