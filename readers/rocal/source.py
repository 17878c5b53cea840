"""`RocalSource`: samples of any reader for `fn.external_source(…, mode=EXTSOURCE_RAW_COMPRESSED)`.

    source = external_source(reader, 128, seed=1)
    encoded, _ = fn.external_source(source, mode=types.EXTSOURCE_RAW_COMPRESSED,
                                    max_height=source.max_height, max_width=source.max_width)

    next(source) -> images, labels, lengths
        images    list of exactly batch_size contiguous uint8 arrays, each a whole JPEG that rocAL decodes
        labels    int32 [batch_size]; -1 where a sample has none, and in padding
        lengths   list of batch_size ints: the bytes of each

rocAL keeps addresses and no references, so the source holds the last batches. Behind the batches of an epoch come
padding batches, PADDING_BATCHES of which `n` declares: whatever rocAL drops or mixes up at the end of an epoch is then
padding. `RocalLoader` takes them off again.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from readers.order import Order, ResumeToken, Schedule
from readers.rocal.ahead import Ahead
from readers.rocal.options import SourceOptions
from readers.rocal.work import BadSample, SourceBatch, SourceWork, padding_batch
from readers.sample import Reader

__all__ = ["DECODER", "PADDING_BATCHES", "RocalSource"]

DECODER = "rocal"
# In real runs of the CPU backend, two were enough for every wrong batch of about 120 epochs to be one of them.
PADDING_BATCHES = 2
# More than rocAL can have under way: its queues before and behind the decoder, and the batch that is being decoded.
_HELD_PER_DEPTH, _HELD_MORE = 2, 2
Fed = tuple[list[npt.NDArray[np.uint8]], npt.NDArray[np.int32], list[int]]


class RocalSource:
    """An iterator as rocAL wants it, see `external_source`. One thread at a time may use it."""

    def __init__(self, reader: Reader, batch_size: int, order: Order, options: SourceOptions) -> None:
        self.reader, self.batch_size, self.order, self.options = reader, batch_size, order, options
        self.seed = options.seed
        self.grey_is_grey = False  # whether the pipeline makes normalised images, and of grey ones grey ones
        self._epoch = self._cursor = 0
        self._resumed: Order | None = None
        self._bad: list[BadSample] = []
        self._converted: Counter[str] = Counter()
        self._ahead: Ahead[SourceBatch] | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._steps = self._left = 0  # batches of the epoch under way, and those of them that have not been taken
        self._running = self._begun = False
        self._ready: SourceBatch | None = None
        self._padding = padding_batch(batch_size, options.limits)
        self._held: deque[Fed] = deque(maxlen=_HELD_PER_DEPTH * options.prefetch + _HELD_MORE)
        self._schedule(order)

    # --- what rocAL asks ----------------------------------------------------------------------------------------
    @property
    def n(self) -> int:
        """Images that rocAL is told of: those of the epoch to come, or under way, and the padding."""
        return (len(self) + PADDING_BATCHES) * self.batch_size

    @property
    def max_height(self) -> int:
        """For `fn.external_source`: no decoded image is higher."""
        return self.options.limits.height

    @property
    def max_width(self) -> int:
        return self.options.limits.width

    def __iter__(self) -> RocalSource:
        return self

    def __next__(self) -> Fed:
        """The next batch, or padding where the epoch has none; begins an epoch if none is under way."""
        if not self._running and not self._begun:
            self.start()
        batch = self.prepare()
        self._ready = None
        if batch is not None:
            self._bad.extend(batch.bad)
            self._converted.update(batch.converted)
            self._cursor = batch.cursor
        fed = (batch or self._padding).feed()
        self._held.append(fed)
        return fed

    # --- epochs -------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Begin the next epoch, or go on where `load_state_dict` said; what is left of one under way is given up."""
        self.stop()
        if self._begun:
            self._seek(self._epoch + 1, 0, None)
        order, cursor = self._resumed or self.order, self._cursor
        schedule = self._schedule(order)
        steps = schedule.steps(cursor)
        work = SourceWork(
            self.reader,
            order,
            lambda step: schedule.positions(step, cursor),
            lambda step: schedule.cursor_after(step, cursor),
            self.batch_size,
            self.seed,
            self._epoch,
            self.options.on_error,
            self.options.limits,
            self.options.convert,
            self.options.quality,
        )
        self._bad, self._converted = [], Counter()
        self._ahead = Ahead(work.make, steps, self.options.ahead)
        self._finalizer = weakref.finalize(self, self._ahead.stop)
        self._steps = self._left = steps
        self._running = self._begun = True

    @property
    def steps(self) -> int:
        """Batches of the epoch under way, those that have been taken included."""
        return self._steps

    def prepare(self) -> SourceBatch | None:
        """The batch that `next` will give, None for padding. Raises here what is wrong with it, and not under rocAL."""
        if self._ready is None and self._left and self._ahead is not None:
            self._ready = self._ahead.take()
            self._left -= 1
        return self._ready

    def finish(self) -> None:
        """An epoch has been seen to its end; the next `start` begins the one after it."""
        self.stop()
        self._seek(self._epoch + 1, 0, None)
        if self._bad:
            first = self.bad_samples[0]
            done = "skipped" if self.options.on_error == "skip" else "replaced"
            warnings.warn(
                f"epoch {self._epoch - 1}: {len(self._bad)} bad samples were {done}, the first is sample "
                f"{first.index} ({first.key}): {first.reason}; see bad_samples",
                stacklevel=3,
            )

    def stop(self) -> None:
        """End the reading thread: from now on `next` gives padding. Idempotent."""
        if self._finalizer is not None:
            self._finalizer()
        self._ahead = self._finalizer = self._ready = None
        self._left, self._running = 0, False

    # --- where it is --------------------------------------------------------------------------------------------
    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self._epoch

    @property
    def bad_samples(self) -> tuple[BadSample, ...]:
        """The samples skipped or replaced in the current or, between epochs, the last one, on this rank."""
        return tuple(sorted(self._bad, key=lambda sample: sample.position))

    @property
    def converted(self) -> dict[str, int]:
        """How many images of the current or last epoch were encoded again for rocAL, by reason."""
        return dict(self._converted)

    def set_epoch(self, epoch: int) -> None:
        """Begin next at the start of `epoch`."""
        if epoch < 0:
            raise ValueError(f"an epoch is 0 or more, not {epoch}")
        self.stop()
        self._seek(epoch, 0, None)

    def state_dict(self) -> dict[str, Any]:
        """A resume token, as `ImageLoader.state_dict`: the same on every rank, and good for any number of ranks."""
        order, epoch, cursor = self._resumed or self.order, self._epoch, self._cursor
        if not self._schedule(order).steps(cursor):
            order, epoch, cursor = self.order, epoch + 1, 0
        samples = len(self.reader)
        fingerprint = self.reader.fingerprint
        return ResumeToken(self.seed, epoch, cursor, fingerprint, DECODER, order.spec(), samples).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin next where `state` was taken. Raises ResumeError; warns where another decoder made it."""
        token = ResumeToken.from_dict(state)
        spec, samples = self.order.spec(), len(self.reader)
        token.check(fingerprint=self.reader.fingerprint, order_spec=spec, decoder=DECODER, samples=samples)
        self.stop()
        self.seed, self.order = token.seed, self.order.with_seed(token.seed)
        self._seek(token.epoch, token.cursor, token.resumed(self.order))

    def __len__(self) -> int:
        """Batches of the epoch under way on this rank, or of the next one; padding does not count."""
        if self._running:
            return self._steps
        if self._begun:
            return self._schedule(self.order).steps()
        return self._schedule(self._resumed or self.order).steps(self._cursor)

    def close(self) -> None:
        """Join the reading thread and let go of what was held. Idempotent."""
        self.stop()
        self._held.clear()

    def _schedule(self, order: Order) -> Schedule:
        options = self.options
        return Schedule(order, self.batch_size, options.rank, options.world_size, options.tail)

    def _seek(self, epoch: int, cursor: int, order: Order | None) -> None:
        self._epoch, self._cursor, self._resumed, self._begun = epoch, cursor, order, False
