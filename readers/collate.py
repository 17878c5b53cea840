"""Values of fields as tensors, and of several samples as what a batch has.

    mask                 one tensor [n, h, w], uint8, or int32 where a mask has 16 or 32 bits; a list where they differ
                         in size, or where a sample of the set has none
    target               one tensor [n] or [n, k]
    boxes, points, array a list of tensors: samples may have different numbers of them
    text, json, file     a list
    image                a list of tensors, uint8 [3, h, w]

None stands for the field of a sample that lacks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from cache.errors import BadSampleError

# Types that torch lacks, or has without arithmetic, and those that hold their values.
_WIDER = {"uint16": np.int32, "uint32": np.int64}


def to_tensor(kind: str, value: Any) -> Any:
    """A value of `readers.fields` with tensors in place of arrays; an image is [3, h, w]. Raises BadSampleError."""
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype == np.uint64:
        if value.size and int(value.max()) >= 1 << 63:
            raise BadSampleError(f"holds {int(value.max())}, and torch has no numbers of 2^63 and more")
        value = value.astype(np.int64)
    tensor = torch.from_numpy(np.asarray(value, _WIDER.get(value.dtype.name, value.dtype), order="C"))
    return tensor.permute(2, 0, 1) if kind == "image" else tensor


def stack_targets(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Targets as [n] or [n, k]. Raises BadSampleError where they differ in shape."""
    shapes = {tuple(value.shape) for value in values}
    if len(shapes) > 1:
        raise BadSampleError(f"targets of the shapes {sorted(map(list, shapes))} in one batch: they are no labels")
    return torch.stack(list(values)) if values else torch.empty(0)


def stack_masks(masks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Masks of one size, as [n, h, w] in the wider of their types."""
    wide = any(mask.dtype != torch.uint8 for mask in masks)
    return torch.stack([mask.to(torch.int32) for mask in masks] if wide else list(masks))
