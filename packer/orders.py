"""`packer.compare_orders`: what the ways to shuffle a set cost in bytes read, and how well they mix it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import readers
from readers.order import Order, Sequential, Shuffled, block_shuffled
from readers.order.quality import read_amplification, shuffle_quality

__all__ = ["REQUESTS", "OrderReport", "compare_orders"]

# What one read of a sample fetches: a page of a local disk, and a request to a parallel file system or object store.
REQUESTS = (4 << 10, 1 << 20)
_WINDOWS = (16, 64, 256)


@dataclass(frozen=True, slots=True)
class OrderReport:
    """One order. amplification: bytes fetched per byte used, by bytes of a request. quality: 1 mixes as well as a
    global shuffle, 0 not at all. memory_bytes: what a reader holds to read every block once; 0 for no blocks."""

    name: str
    spec: Mapping[str, Any]
    amplification: dict[int, float]
    quality: float
    memory_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare_orders(
    path: str | os.PathLike[str],
    split: str | None = None,
    *,
    block_bytes: int = 8 << 20,
    windows: Sequence[int] = _WINDOWS,
    seed: int = 0,
) -> list[OrderReport]:
    """Stored order, block shuffles over these windows (in blocks), and the global shuffle, for one split.

    Reads the index and no image. Raises DatasetError, UnknownNameError, and ValueError for sizes below 1.
    """
    if block_bytes < 1 or not windows or min(windows) < 1:
        raise ValueError(f"block_bytes ({block_bytes}) and windows ({tuple(windows)}) must be at least 1")
    with readers.open(path, split) as reader:
        whole = int(reader.sizes().sum())  # nobody holds more than that
        orders: list[tuple[str, Order, int]] = [("stored order", Sequential(len(reader)), 0)]
        for window in windows:
            order = block_shuffled(reader, seed, block_bytes=block_bytes, window=window)
            orders.append((f"{window} blocks", order, min(window * block_bytes, whole)))
        orders.append(("global shuffle", Shuffled(len(reader), seed), 0))
        return [_report(name, order, memory, reader) for name, order, memory in orders]


def _report(name: str, order: Order, memory: int, reader: readers.Reader) -> OrderReport:
    amplification = {size: read_amplification(order, reader, request_bytes=size) for size in REQUESTS}
    return OrderReport(name, order.spec(), amplification, shuffle_quality(order), memory)
