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

import weakref
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from readers.feed import Feed, FeedOptions, OnError, Start, choose_order, choose_tail
from readers.loop import Ahead, Position
from readers.order import Order
from readers.order.schedule import Tail
from readers.reader import Reader
from readers.rocal.graph import PREFETCH
from readers.rocal.vet import Limits, limits_of
from readers.rocal.work import SourceBatch, SourceWork, padding_batch

__all__ = ["DECODER", "PADDING_BATCHES", "RocalSource", "SourceOptions", "external_source"]

DECODER = "rocal"
# In real runs of the CPU backend, two were enough for every wrong batch of about 120 epochs to be one of them.
PADDING_BATCHES = 2
# More than rocAL can have under way: its queues before and behind the decoder, and the batch that is being decoded.
_HELD_PER_DEPTH, _HELD_MORE = 2, 2
_MAX_SIDE = 1024
Fed = tuple[list[npt.NDArray[np.uint8]], npt.NDArray[np.int32], list[int]]


def external_source(
    reader: Reader,
    batch_size: int,
    *,
    order: Order | None = None,
    shuffle: bool = True,
    seed: int | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    tail: Tail | None = None,
    on_error: OnError = "raise",
    convert: bool = True,
    quality: int = 95,
    max_height: int | None = None,
    max_width: int | None = None,
    ahead: int = 3,
    prefetch: int = PREFETCH,
) -> RocalSource:
    """The samples of `reader` for rocAL, in batches of exactly `batch_size`.

    order, shuffle, seed, rank, world_size, tail, on_error: as in `readers.loader.ImageLoader`, with the same samples in
    the same order. convert: images that rocAL does not decode (PNG and other media, CMYK, EXIF-rotated, very large) are
    encoded again as JPEGs of `quality` (95 to 100), 4:4:4; otherwise they are bad samples. max_height, max_width: of
    decoded images, in pixels; by default the largest of the set, at most 1024: rocAL enlarges smaller ones and keeps
    batch_size x max_height x max_width x 3 bytes several times. ahead: batches read ahead by a thread. prefetch: the
    prefetch_queue_depth of the pipeline, for which rocAL leaves 2 alone.

    Raises ValueError, DatasetError where the index knows no sizes. Needs no rocAL itself.
    """
    if batch_size < 2:
        raise ValueError(f"rocAL needs a batch_size of 2 or more, not {batch_size}")
    order = choose_order(len(reader), order, shuffle, seed)
    feed = Feed(
        reader, order, batch_size, FeedOptions(rank, world_size, choose_tail(tail, order), on_error, DECODER)
    ).ranked()
    limits = _limits_for(reader, max_height, max_width)
    return RocalSource(feed, SourceOptions(limits, convert, quality, ahead, prefetch))


@dataclass(frozen=True)
class SourceOptions:
    """What `external_source` takes besides what a feed is made of. Raises ValueError."""

    limits: Limits
    convert: bool
    quality: int
    ahead: int
    prefetch: int

    def __post_init__(self) -> None:
        if not 95 <= self.quality <= 100:
            raise ValueError(f"quality is 95 to 100, not {self.quality}: what is encoded again should not show it")
        if self.ahead < 1:
            raise ValueError(f"ahead is 1 or more, not {self.ahead}")
        if self.prefetch != PREFETCH:
            raise ValueError(
                f"prefetch is {PREFETCH}, not {self.prefetch}: rocAL hangs at the end of an epoch with deeper queues, "
                f"and has none of 1; `ahead` says how many batches are read before rocAL asks"
            )
        if min(self.limits) < 1:
            raise ValueError(f"max_height and max_width are 1 or more, not {self.limits}")


class RocalSource(Position):
    """An iterator as rocAL wants it, see `external_source`. One thread at a time may use it."""

    def __init__(self, feed: Feed, options: SourceOptions) -> None:
        super().__init__(feed)
        self.options = options
        self.grey_is_grey = False  # whether the pipeline makes normalised images, and of grey ones grey ones
        self._converted: Counter[str] = Counter()
        self._ahead: Ahead[SourceBatch] | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._steps = self._untaken = 0  # batches of the epoch under way, and those of them that have not been taken
        self._running = False
        self._ready: SourceBatch | None = None
        self._padding = padding_batch(feed.batch_size, options.limits)
        self._held: deque[Fed] = deque(maxlen=_HELD_PER_DEPTH * options.prefetch + _HELD_MORE)
        feed.schedule()

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
            self._position = self._position._replace(cursor=batch.cursor)
        fed = (batch or self._padding).feed()
        self._held.append(fed)
        return fed

    # --- epochs -------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Begin the next epoch, or go on where `load_state_dict` said; what is left of one under way is given up."""
        self.stop()
        if self._begun:
            self._seek(Start(self.epoch + 1))
        feed, options = self._feed.at(self._position), self.options
        work = SourceWork(feed, options.limits, options.convert, options.quality)
        self._bad, self._converted = [], Counter()
        self._steps = self._untaken = feed.steps()
        self._ahead = Ahead(work.make, self._steps, options.ahead, "packer-rocal-ahead")
        self._finalizer = weakref.finalize(self, self._ahead.stop)
        self._running = self._begun = True

    @property
    def steps(self) -> int:
        """Batches of the epoch under way, those that have been taken included."""
        return self._steps

    def prepare(self) -> SourceBatch | None:
        """The batch that `next` will give, None for padding. Raises here what is wrong with it, and not under rocAL."""
        if self._ready is None and self._untaken and self._ahead is not None:
            self._ready = self._ahead.take()
            self._untaken -= 1
        return self._ready

    def finish(self) -> None:
        """An epoch has been seen to its end; the next `start` begins the one after it."""
        self.stop()
        self._warn(stacklevel=3)
        self._seek(Start(self.epoch + 1))

    def stop(self) -> None:
        """End the reading thread: from now on `next` gives padding. Idempotent."""
        if self._finalizer is not None:
            self._finalizer()
        self._ahead = self._finalizer = self._ready = None
        self._untaken, self._running = 0, False

    # --- where it is ----------------------------------------------------------------------------------------------
    @property
    def converted(self) -> dict[str, int]:
        """How many images of the current or last epoch were encoded again for rocAL, by reason."""
        return dict(self._converted)

    def __len__(self) -> int:
        """Batches of the epoch under way on this rank, or of the next one; padding does not count."""
        if self._running:
            return self._steps
        return self._feed.at(Start() if self._begun else self._position).steps()

    def close(self) -> None:
        """Join the reading thread and let go of what was held. Idempotent."""
        self.stop()
        self._held.clear()

    def _interrupt(self) -> None:
        self.stop()


def _limits_for(reader: Reader, max_height: int | None, max_width: int | None) -> Limits:
    """Limits of decoded images; those not given are the largest of the set, at most 1024. Raises DatasetError."""
    if max_height is not None and max_width is not None:
        return Limits(max_height, max_width)
    found = limits_of(reader, cap=_MAX_SIDE)
    return Limits(found.height if max_height is None else max_height, found.width if max_width is None else max_width)
