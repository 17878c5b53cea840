"""Fields as tensors, and their form in a batch.

    mask                 one tensor [n, h, w], uint8, or int32 if a mask has 16 or 32 bits; a list if masks differ in
                         size, or if a sample of the set has none
    target               one tensor [n] or [n, k]
    boxes, points, array a list of tensors, whose lengths may differ
    text, json, file     a list
    image                a list of tensors, uint8 [3, h, w]

A missing field is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from cache.errors import BadSampleError

# Dtypes that torch lacks or has without arithmetic, and the wider dtypes that replace them.
_WIDER = {"uint16": np.int32, "uint32": np.int64}


def to_tensor(kind: str, value: Any) -> Any:
    """A value of `readers.fields` as a tensor if it is an array; images become [3, h, w]. Raises BadSampleError."""
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype == np.uint64:
        if value.size and int(value.max()) >= 1 << 63:
            raise BadSampleError(f"holds {int(value.max())}, but torch has no integers of 2^63 and more")
        value = value.astype(np.int64)
    tensor = torch.from_numpy(np.asarray(value, _WIDER.get(value.dtype.name, value.dtype), order="C"))
    return tensor.permute(2, 0, 1) if kind == "image" else tensor


def stack_targets(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Targets stacked as [n] or [n, k]. Raises BadSampleError if they differ in shape."""
    shapes = {tuple(value.shape) for value in values}
    if len(shapes) > 1:
        raise BadSampleError(
            f"targets of one batch have the shapes {sorted(map(list, shapes))}, expected the same shape in all samples"
        )
    return torch.stack(list(values)) if values else torch.empty(0)


def stack_masks(masks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Masks of one size stacked as [n, h, w], uint8 or int32."""
    wide = any(mask.dtype != torch.uint8 for mask in masks)
    return torch.stack([mask.to(torch.int32) for mask in masks] if wide else list(masks))
