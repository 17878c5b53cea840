"""An `ImageLoader` with one option changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from readers.augment.ops import Normalize
from readers.augment.ops.color import channel_factors
from readers.diagnosis.changed_dataloader import ChangedLoader, expand
from readers.diagnosis.changes import change_at, change_reader
from readers.diagnosis.findings import Change
from readers.loader import ImageLoader
from readers.order.base import Int64s, Order, PlainOrder, Spec

__all__ = ["Repeated", "change_imageloader"]

_ENDLESS = 1 << 40


@dataclass(frozen=True)
class Repeated(PlainOrder):
    """Some samples again and again, in an epoch that does not end. rows: of a reader of so many samples, int64 [n]."""

    rows: Int64s
    samples: int
    seed: int = 0

    def __len__(self) -> int:
        return _ENDLESS - _ENDLESS % len(self.rows)

    def spec(self) -> Spec:
        return {"kind": "repeated", "samples": self.samples}

    def _samples_at(self, epoch: int, positions: Int64s) -> Int64s:
        return np.asarray(self.rows[positions % len(self.rows)], np.int64)


def change_imageloader(loader: ImageLoader, change: Change, batches: int) -> ChangedLoader | None:
    """The loader with one change; None if it has no such option. batches: that a cache is filled with.

    Raises PackerError, OSError and ValueError.
    """
    known: dict[str, dict[str, Any]] = {
        "workers": {"threads": change.value},
        "prefetch": {"prefetch": change.value},
        "pin_memory": {"pin_memory": bool(change.value)},
        "batch_size": {"batch_size": change.value},
        "device": {"device": change.value},
    }
    if change.kind in known:
        return ChangedLoader(loader.with_options(**known[change.kind]))
    if change.kind == "uint8":
        return _uint8(loader, str(change.value))
    count = min(len(loader.reader), batches * loader.batch_size, len(loader.order))
    rows = np.unique(loader.order.indices(0, np.arange(count, dtype=np.int64)))
    changed = change_reader(loader.reader, change, rows.tolist())
    if changed is None:
        return None
    order: Order = loader.order
    if changed.rows is not None:
        order = Repeated(np.asarray(changed.rows, np.int64), len(changed.reader))
    return ChangedLoader(loader.over(changed.reader, order), close=changed.close)


def _uint8(loader: ImageLoader, path: str) -> ChangedLoader | None:
    """Without its conversion to floats, which then is done where the step is."""
    if loader.dtype == torch.uint8 or loader.recipe.batch_ops:
        return None
    ops = [op for op in loader.recipe.ops if not isinstance(op, Normalize)]
    steps, offsets = channel_factors(loader.recipe.normalize)
    grid = tuple(zip(offsets, steps, strict=True))
    made = loader.with_options(augment=ops, dtype=None)
    return ChangedLoader(made, lambda batch: change_at(batch, path, lambda leaf: expand(leaf, grid)))
