"""Columns of labels in data sets of Hugging Face that hold no class numbers, but numbers with fractions or lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from packer.sources.hub_files import class_names
from packer.sources.tables import Table
from packer.sources.targets import Targets, targets_of

__all__ = ["hub_targets"]


def hub_targets(root: Path, column: str, kind: Any, feature: Any, values: Callable[[], Iterator[Any]]) -> Targets:
    """What a column holds. A list of ClassLabels, or of texts, is 1 at the place of each class.

    kind: its type in pyarrow. feature: of `datasets`, if it is known. values: gives those of all rows, which only texts
    need. Raises SourceError.
    """
    import pyarrow as pa

    inner = feature[0] if isinstance(feature, list) and feature else None
    if isinstance(feature, Mapping):
        inner = feature.get("feature")
    if isinstance(inner, Mapping) and inner.get("_type") == "ClassLabel":
        names = class_names(inner, f"{root}: {column!r}")
        return Targets(len(names), classes=names)
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if is_list and (pa.types.is_string(kind.value_type) or pa.types.is_large_string(kind.value_type)):
        found = targets_of(lambda: enumerate(values(), 1), Table(root / column, ()))
        return found or Targets(0)
    return Targets(0, "") if is_list else Targets(-1)
