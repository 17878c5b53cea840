"""Each node keeps to its own part of the samples, and every few epochs all parts are exchanged.

A node that holds a copy of its part on local disks, or in memory, reads nothing from the shared file system in
between. Part g is a contiguous slice of the samples; sizes differ by at most one. Position p belongs to node
p mod nodes, to the end of the epoch: the nodes whose parts are larger by one come first, so the positions left over
are theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from readers.order.base import Int64s, PlainOrder, Spec, check_samples, checked_positions
from readers.order.keys import check_counter, derive_keys
from readers.order.permutation import Permutation, permute_each

__all__ = ["NodeLocal"]


@dataclass(frozen=True)
class NodeLocal(PlainOrder):
    """Permuted within each node's part, and over all samples in every `exchange_every`-th epoch.

    Epochs exchange_every - 1, 2 * exchange_every - 1, … are those of `Shuffled`; 1 exchanges in each. A node gets its
    own positions where ranks are numbered node by node. Loaders that find out the rank themselves count so, with the
    nodes' numbers that staging uses, too (`cache.node`); a rank that they are given must be of that kind.
    """

    samples: int
    nodes: int
    exchange_every: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        check_samples(self.samples)
        check_counter("seed", self.seed)
        if self.nodes < 1 or self.exchange_every < 1:
            raise ValueError(f"nodes ({self.nodes}) and exchange_every ({self.exchange_every}) must be at least 1")

    @property
    def groups(self) -> int:
        return self.nodes

    def __len__(self) -> int:
        return self.samples

    def exchanges(self, epoch: int) -> bool:
        """Whether every node needs samples of every part in this epoch."""
        return epoch % self.exchange_every == self.exchange_every - 1

    def local_part(self, node: int) -> range:
        """The samples of a node in the epochs between exchanges."""
        if not 0 <= node < self.nodes:
            raise IndexError(f"node {node} is outside the {self.nodes} of this order")
        size, longer = divmod(self.samples, self.nodes)
        start = node * size + min(node, longer)
        return range(start, start + size + (node < longer))

    def indices(self, epoch: int, positions: Int64s) -> Int64s:
        if self.exchanges(epoch):
            return Permutation(self.samples, self.seed, epoch).forward(positions)
        given = checked_positions(positions, self.samples)
        inside, node = np.divmod(given.ravel(), self.nodes)
        size, longer = divmod(self.samples, self.nodes)
        keys = derive_keys(self.seed, epoch, "node-local")
        chosen = permute_each(inside, size + (node < longer), node, keys)
        return (node * size + np.minimum(node, longer) + chosen).reshape(given.shape)

    def spec(self) -> Spec:
        return {
            "kind": "node-local",
            "samples": self.samples,
            "nodes": self.nodes,
            "exchange_every": self.exchange_every,
        }

    def resumed(self, spec: Mapping[str, Any]) -> NodeLocal:
        """Also from another number of nodes or another rhythm: the parts of this epoch stay as they were dealt.

        Raises ResumeError where anything else differs.
        """
        nodes, every = spec.get("nodes"), spec.get("exchange_every")
        if isinstance(nodes, int) and isinstance(every, int) and nodes >= 1 and every >= 1:
            began = replace(self, nodes=nodes, exchange_every=every)
            if began != self and began.spec() == spec:
                return began
        super().resumed(spec)
        return self
