"""What a source is told, and the defaults that depend on the reader and the job."""

from __future__ import annotations

from dataclasses import dataclass

from readers.order.schedule import Tail
from readers.rocal.graph import PREFETCH
from readers.rocal.vet import Limits, limits_of
from readers.rocal.work import OnError
from readers.sample import Reader

__all__ = ["SourceOptions", "limits_for"]

_MAX_SIDE = 1024
_ON_ERROR = ("raise", "skip", "substitute")


@dataclass(frozen=True)
class SourceOptions:
    """The options of `external_source`, checked. Raises ValueError."""

    limits: Limits
    seed: int
    rank: int
    world_size: int
    tail: Tail
    on_error: OnError
    convert: bool
    quality: int
    ahead: int
    prefetch: int

    def __post_init__(self) -> None:
        if self.on_error not in _ON_ERROR:
            raise ValueError(f"on_error is one of {', '.join(_ON_ERROR)}, not {self.on_error!r}")
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


def limits_for(reader: Reader, max_height: int | None, max_width: int | None) -> Limits:
    """Limits of decoded images; those not given are the largest of the set, at most 1024. Raises DatasetError."""
    if max_height is not None and max_width is not None:
        return Limits(max_height, max_width)
    found = limits_of(reader, cap=_MAX_SIDE)
    return Limits(found.height if max_height is None else max_height, found.width if max_width is None else max_width)
