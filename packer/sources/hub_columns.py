"""What the columns of a Parquet file of Hugging Face hold: by their types, features of `datasets`, first values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cache.errors import BadSampleError, SourceError
from cache.messages import listed
from packer.sources.parquet_batches import BinaryColumn, batches_of, has_child
from packer.sources.roles import CAPTION_COLUMNS
from readers.fields import check_field
from readers.headers import sniff
from readers.sample import Buffer

__all__ = ["contents_of", "looked_at"]


def contents_of(schema: Any, features: Mapping[str, Any], path: Path) -> tuple[dict[str, str], list[str]]:
    """What the columns hold (`packer.sources.roles`), and warnings about those that are left behind."""
    import pyarrow as pa

    contents: dict[str, str] = {}
    left = []
    for column in schema:
        kind, feature = column.type, features.get(column.name)
        what = feature.get("_type") if isinstance(feature, dict) else None
        if what in ("Audio", "Video", "Pdf", "Nifti") or _is_list_of_images(kind):
            left.append(column.name)
        elif has_child(kind, "bytes") or what == "Image":
            if pa.types.is_string(kind) or pa.types.is_large_string(kind):
                raise SourceError(f"{path}: the column {column.name!r} holds paths of images, not images; embed them")
            contents[column.name] = "image"
        elif what == "ClassLabel" and (pa.types.is_integer(kind)):
            contents[column.name] = "class"
        elif pa.types.is_integer(kind) or pa.types.is_boolean(kind):
            contents[column.name] = "integer"
        elif pa.types.is_floating(kind):
            contents[column.name] = "number"
        elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
            contents[column.name] = "text"
        elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            contents[column.name] = "bytes"
        elif column.name in CAPTION_COLUMNS and pa.types.is_list(kind) and pa.types.is_string(kind.value_type):
            contents[column.name] = "texts"
        else:
            contents[column.name] = "value"
    names = listed(list(map(repr, left)), 20)
    return contents, [f"{path}: left behind: {names}, which hold several images, or sound or video"] if left else []


def _is_list_of_images(kind: Any) -> bool:
    import pyarrow as pa

    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(is_list) and has_child(kind.value_type, "bytes")


def looked_at(file: Any, schema: Any, contents: Mapping[str, str], features: Mapping[str, Any]) -> dict[str, str]:
    """What the first rows say: bytes that are images, images that are masks."""
    names = [name for name, what in contents.items() if what == "bytes" or (what == "image" and "mask" in name.lower())]
    found: dict[str, str] = {}
    if not names or not file.groups:
        return found
    batch = next(iter(batches_of(file, 0, names)), None)
    if batch is None or not batch.num_rows:
        return found
    for name in names:
        value = BinaryColumn(batch.column(name)).value(0)
        if contents[name] == "bytes" and value is not None and sniff(value):
            found[name] = "image"
        if contents[name] == "image" and value is not None and _is_mask(value):
            found[name] = "mask"
    return found


def _is_mask(data: Buffer) -> bool:
    try:
        check_field("mask", data)
    except BadSampleError:
        return False
    return True
