"""`external_source`: a `RocalSource` with the defaults of `ImageLoader`."""

from __future__ import annotations

from cache.ranks import rank_and_world_size
from readers.order import Order
from readers.order.choice import choose_order, choose_tail
from readers.order.schedule import Tail
from readers.rocal.graph import PREFETCH
from readers.rocal.options import SourceOptions, limits_for
from readers.rocal.source import RocalSource
from readers.rocal.work import OnError
from readers.sample import Reader

__all__ = ["external_source"]


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
    order, limits = choose_order(len(reader), order, shuffle, seed), limits_for(reader, max_height, max_width)
    rank, world_size = rank_and_world_size(rank, world_size, order.groups)
    options = SourceOptions(
        limits, order.seed, rank, world_size, choose_tail(tail, order), on_error, convert, quality, ahead, prefetch
    )
    return RocalSource(reader, batch_size, order, options)
