"""The samples as they are stored: for validation, and for seeing what shuffling costs."""

from __future__ import annotations

from dataclasses import dataclass

from readers.order.base import Int64s, PlainOrder, Spec, check_samples, checked_positions
from readers.order.keys import check_counter

__all__ = ["Sequential"]


@dataclass(frozen=True)
class Sequential(PlainOrder):
    """Sample = position, in every epoch; the seed changes nothing."""

    samples: int
    seed: int = 0

    def __post_init__(self) -> None:
        check_samples(self.samples)
        check_counter("seed", self.seed)

    def __len__(self) -> int:
        return self.samples

    def indices(self, epoch: int, positions: Int64s) -> Int64s:
        return checked_positions(positions, self.samples)

    def spec(self) -> Spec:
        return {"kind": "sequential", "samples": self.samples}
