"""Describe a set from its index alone; no image is read.

`packer.inspect` counts and describes; `packer.compare_orders` compares ways to shuffle a set by the bytes they read and
by how well they mix it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import readers
from cache.messages import plural
from packer.output import Result, set_root, set_title
from readers.headers import MEDIA
from readers.layout import read_dataset_info
from readers.order import Order, Sequential, Shuffled, block_shuffled, woven
from readers.order.quality import mixing, read_amplification, requests_per_sample, shuffle_quality
from readers.table import NO_LABEL

__all__ = ["InspectResult", "OrderReport", "SplitReport", "compare_orders", "inspect"]

_PERCENTILES = (0, 5, 25, 50, 75, 95, 100)
_EXAMPLES = 5
# Bytes fetched by a read: a page of a local disk, and a request to a parallel file system or object store.
_REQUESTS = (4 << 10, 1 << 20)
_WINDOWS = (16, 64, 256)
_PROCESSES = {0xC0: "baseline", 0xC1: "extended", 0xC2: "progressive"}


@dataclass(frozen=True, slots=True)
class SplitReport:
    """One split. Sizes are bytes.

    size_percentiles: maps 0, 5, 25, 50, 75, 95 and 100 to bytes of the image field.
    dimensions: percentiles of width and height in pixels.
    media: images by kind.
    coding: images by the features that a decoder must know.
    label_counts: samples by label; unlabelled: samples without one.
    """

    samples: int
    shards: int
    shard_bytes: int
    payload_bytes: int
    field_samples: dict[str, int]
    size_percentiles: dict[int, int]
    dimensions: dict[str, dict[int, int]]
    media: dict[str, int]
    coding: dict[str, int]
    label_counts: dict[int, int]
    unlabelled: int


@dataclass(frozen=True, slots=True)
class InspectResult(Result):
    """A set. duplicates counts samples whose image has the size and CRC32C of another one; examples name some.

    edited, separate, history: changes of the set since it was packed; see `readers.layout`.
    retired: remaining indexes and shards of earlier states.
    """

    path: Path | str
    format: str
    fields: Mapping[str, str]
    classes: tuple[str, ...]
    label_offset: int
    fingerprint: str
    made: Mapping[str, Any]
    splits: dict[str, SplitReport]
    duplicates: int
    duplicate_examples: tuple[tuple[str, ...], ...]
    edited: tuple[str, ...] = ()
    separate: tuple[str, ...] = ()
    history: tuple[Mapping[str, Any], ...] = ()
    retired: tuple[str, ...] = ()


def inspect(path: str | os.PathLike[str]) -> InspectResult:
    """Describe a packed set, in a directory or at an address. Raises DatasetError if there is no set."""
    root = set_root(path)
    info = read_dataset_info(root)
    opened = {name: readers.open(path, name) for name in info.splits}
    duplicates, examples = _duplicates(opened)
    return InspectResult(
        path=set_title(path),
        format=info.format,
        fields=info.fields,
        classes=info.classes,
        label_offset=info.label_offset,
        fingerprint=info.fingerprint(),
        made=info.made,
        splits={name: _report(reader) for name, reader in opened.items()},
        duplicates=duplicates,
        duplicate_examples=examples,
        edited=info.edited,
        separate=info.separate,
        history=tuple(asdict(operation) for operation in info.history),
        retired=tuple(retired.path for retired in info.retired),
    )


def _report(reader: readers.Reader) -> SplitReport:
    lengths = {field: reader.table.field_column(field, "length") for field in reader.fields}
    labels, info = reader.labels, reader.info
    known = labels[labels != NO_LABEL]
    values, counts = np.unique(known, return_counts=True)
    sized = info.height > 0
    return SplitReport(
        samples=len(reader),
        shards=len(reader.split_info.shards),
        shard_bytes=sum(shard.bytes for shard in reader.split_info.shards),
        payload_bytes=sum(int(column.sum()) for column in lengths.values()),
        field_samples={field: _present(reader, field) for field in reader.fields},
        size_percentiles=_percentiles(lengths[reader.fields[0]]),
        dimensions={"width": _percentiles(info.width[sized]), "height": _percentiles(info.height[sized])},
        media=_named_counts(info.media, lambda code: MEDIA[code] if 0 < code < len(MEDIA) else "unknown"),
        coding=_coding(reader),
        label_counts=dict(zip(values.tolist(), counts.tolist(), strict=True)),
        unlabelled=len(labels) - len(known),
    )


def _present(reader: readers.Reader, field: str) -> int:
    offsets = reader.table.field_column(field, "offset")
    return int((offsets != np.uint64(2**64 - 1)).sum())


def _percentiles(values: npt.NDArray[Any]) -> dict[int, int]:
    if len(values) == 0:
        return {}
    found = np.percentile(values, _PERCENTILES, method="nearest")
    return {percent: int(value) for percent, value in zip(_PERCENTILES, found, strict=True)}


def _named_counts(codes: npt.NDArray[Any], name: Any) -> dict[str, int]:
    values, counts = np.unique(codes, return_counts=True)
    return {name(int(code)): int(count) for code, count in zip(values, counts, strict=True)}


def _coding(reader: readers.Reader) -> dict[str, int]:
    """Counts of what a decoder must know: JPEG process, colour, and orientations other than upright."""
    info = reader.info
    jpeg = info.media == MEDIA.index("jpeg")
    found = _named_counts(info.process[jpeg], lambda code: f"jpeg {_PROCESSES.get(code, f'SOF {code:#x}')}")
    found |= _named_counts(info.components[info.media > 0], lambda count: plural(count, "component"))
    rotated = int((info.orientation > 1).sum())
    if rotated:
        found["rotated by EXIF"] = rotated
    return found


def _duplicates(opened: Mapping[str, readers.Reader]) -> tuple[int, tuple[tuple[str, ...], ...]]:
    """Samples, over all splits, whose first field has the length and CRC32C of another sample's."""
    marks, splits = [], []
    for name, reader in opened.items():
        field = reader.fields[0]
        length = reader.table.field_column(field, "length").astype(np.uint64)
        crc = reader.table.field_column(field, "crc32c").astype(np.uint64)
        marks.append((length << np.uint64(32)) ^ crc)
        splits.append((name, len(reader)))
    if not marks:
        return 0, ()
    _values, first, inverse, counts = np.unique(
        np.concatenate(marks), return_index=True, return_inverse=True, return_counts=True
    )
    repeated = np.flatnonzero(counts > 1)
    examples = []
    for group in repeated[np.argsort(first[repeated])][:_EXAMPLES]:
        members = np.flatnonzero(inverse == group)[:_EXAMPLES]
        examples.append(tuple(_sample_name(int(i), splits, opened) for i in members))
    return int(counts[repeated].sum() - len(repeated)), tuple(examples)


def _sample_name(position: int, splits: Sequence[tuple[str, int]], opened: Mapping[str, readers.Reader]) -> str:
    for name, count in splits:
        if position < count:
            return f"{name}/{opened[name].keys[position]}"
        position -= count
    raise IndexError(position)


@dataclass(frozen=True, slots=True)
class OrderReport(Result):
    """One order.

    amplification: bytes fetched per byte used, by bytes of a request.
    requests: GETs a sample, where the set is remote.
    quality: 1 mixes as well as a global shuffle, 0 not at all: one batch of 256.
    mixing: the same over 1, 4, 16 and 64 batches in a row, as far as an epoch has them.
    memory_bytes: memory of a reader that reads every block once; 0 without blocks.
    """

    name: str
    spec: Mapping[str, Any]
    amplification: dict[int, float]
    quality: float
    memory_bytes: int
    requests: float
    mixing: dict[int, float]


def compare_orders(
    path: str | os.PathLike[str],
    split: str | None = None,
    *,
    block_bytes: int = 8 << 20,
    windows: Sequence[int] = _WINDOWS,
    seed: int = 0,
) -> list[OrderReport]:
    """Stored order, block shuffles over these windows (in blocks), `Woven` and the global shuffle, for one split.

    Reads the index and no image. Raises DatasetError, UnknownNameError, and ValueError for sizes below 1.
    """
    if block_bytes < 1 or not windows or min(windows) < 1:
        raise ValueError(f"block_bytes ({block_bytes}) and windows ({tuple(windows)}) must be at least 1")
    with readers.open(path, split) as reader:
        whole = int(reader.sizes().sum())  # the most that memory can take
        orders: list[tuple[str, Order, int]] = [("stored order", Sequential(len(reader)), 0)]
        for window in windows:
            order = block_shuffled(reader, seed, block_bytes=block_bytes, window=window)
            orders.append((f"{window} blocks", order, min(window * block_bytes, whole)))
        order_of_blocks = woven(reader, seed)
        memory = min(order_of_blocks.open * (256 << 10), whole)
        orders.append((f"woven, {order_of_blocks.open} open", order_of_blocks, memory))
        orders.append(("global shuffle", Shuffled(len(reader), seed), 0))
        return [_order_report(name, order, memory, reader) for name, order, memory in orders]


def _order_report(name: str, order: Order, memory: int, reader: readers.Reader) -> OrderReport:
    amplification = {size: read_amplification(order, reader, request_bytes=size) for size in _REQUESTS}
    requests, over_many = requests_per_sample(order, reader), mixing(order)
    return OrderReport(name, order.spec(), amplification, shuffle_quality(order), memory, requests, over_many)
