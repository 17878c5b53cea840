"""A new permutation of all samples in each epoch: the reference for how well an order mixes."""

from __future__ import annotations

from dataclasses import dataclass

from readers.order.base import Int64s, PlainOrder, Spec, check_samples
from readers.order.keys import check_counter
from readers.order.permutation import Permutation

__all__ = ["Shuffled"]


@dataclass(frozen=True)
class Shuffled(PlainOrder):
    """Every sample once an epoch, in an order of (seed, epoch). O(1) memory for any number of samples below 2^62."""

    samples: int
    seed: int = 0

    def __post_init__(self) -> None:
        check_samples(self.samples)
        check_counter("seed", self.seed)

    def __len__(self) -> int:
        return self.samples

    def indices(self, epoch: int, positions: Int64s) -> Int64s:
        return Permutation(self.samples, self.seed, epoch).forward(positions)

    def positions(self, epoch: int, samples: Int64s) -> Int64s:
        """Where in the epoch these samples come: the inverse of `indices`."""
        return Permutation(self.samples, self.seed, epoch).inverse(samples)

    def spec(self) -> Spec:
        return {"kind": "shuffled", "samples": self.samples}
