"""Describe a set from its index alone; no image is read.

`packer.inspect` counts and describes; `packer.compare_orders` compares ways to shuffle a set by the bytes they read and
by how well they mix it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import readers
from cache.messages import plural
from cache.node import available_memory_bytes
from cache.remote import is_remote, parallel_gets
from packer.output import Result, set_root, set_title
from readers.headers import MEDIA
from readers.layout import read_dataset_info
from readers.order import Order, Sequential, Shuffled, block_shuffled, woven
from readers.order.quality import mixing, read_amplification, requests_per_sample, shuffle_quality
from readers.reader import OPEN_BYTES, SAMPLE_ERRORS
from readers.table import NO_LABEL

__all__ = ["InspectResult", "OrderAdvice", "OrderReport", "SplitReport", "compare_orders", "inspect", "recommend_order"]

_PERCENTILES = (0, 5, 25, 50, 75, 95, 100)
_EXAMPLES = 5
# Bytes fetched by one read: a page of a local disk; a request to a parallel filesystem or object store.
_REQUESTS = (4 << 10, 1 << 20)
_ARRAYS = 16
_WINDOWS = (16, 64, 256)
_PROCESSES = {0xC0: "baseline", 0xC1: "extended", 0xC2: "progressive"}


@dataclass(frozen=True, slots=True)
class SplitReport:
    """One split. Sizes are in bytes.

    size_percentiles: the percentiles 0, 5, 25, 50, 75, 95 and 100 of the size of the image field.
    dimensions: percentiles of width and height in pixels.
    media: images by codec. arrays: dtype and shape of up to 16 arrays, for a set of arrays.
    coding: images by features that matter to decoders.
    label_counts: samples by label; unlabelled: samples without a label.
    """

    samples: int
    shards: int
    shard_bytes: int
    payload_bytes: int
    field_samples: dict[str, int]
    size_percentiles: dict[int, int]
    dimensions: dict[str, dict[int, int]]
    media: dict[str, int]
    arrays: dict[str, int]
    coding: dict[str, int]
    label_counts: dict[int, int]
    unlabelled: int


@dataclass(frozen=True, slots=True)
class InspectResult(Result):
    """A set. duplicates: samples whose image has the size and CRC32C of another one; examples names some.

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
        media=_named_counts(info.media, lambda code: MEDIA[code] if 0 < code < len(MEDIA) else "unknown")
        if "image" in reader.fields
        else {},
        arrays=_arrays(reader) if reader.kinds[reader.main] == "array" else {},
        coding=_coding(reader),
        label_counts=dict(zip(values.tolist(), counts.tolist(), strict=True)),
        unlabelled=len(labels) - len(known),
    )


def _arrays(reader: readers.Reader) -> dict[str, int]:
    """Counts of arrays by dtype and shape, in some samples spread over the split."""
    counts: dict[str, int] = {}
    for row in np.unique(np.linspace(0, len(reader) - 1, min(_ARRAYS, len(reader))).astype(np.int64)).tolist():
        try:
            array = reader.array(row)
            name = f"{array.dtype} {list(array.shape)}"
        except SAMPLE_ERRORS:
            name = "unreadable"
        counts[name] = counts.get(name, 0) + 1
    return counts


def _present(reader: readers.Reader, field: str) -> int:
    offsets = reader.table.field_column(field, "offset")
    return int((offsets != np.uint64(2**64 - 1)).sum())


def _percentiles(values: npt.NDArray[Any]) -> dict[int, int]:
    if len(values) == 0:
        return {}
    levels = np.percentile(values, _PERCENTILES, method="nearest")
    return {percent: int(value) for percent, value in zip(_PERCENTILES, levels, strict=True)}


def _named_counts(codes: npt.NDArray[Any], name: Any) -> dict[str, int]:
    values, counts = np.unique(codes, return_counts=True)
    return {name(int(code)): int(count) for code, count in zip(values, counts, strict=True)}


def _coding(reader: readers.Reader) -> dict[str, int]:
    """Counts of features that matter to decoders: JPEG process, colour, and orientations other than upright."""
    info = reader.info
    jpeg = info.media == MEDIA.index("jpeg")
    counts = _named_counts(info.process[jpeg], lambda code: f"jpeg {_PROCESSES.get(code, f'SOF {code:#x}')}")
    counts |= _named_counts(info.components[info.media > 0], lambda count: plural(count, "component"))
    rotated = int((info.orientation > 1).sum())
    if rotated:
        counts["rotated by EXIF"] = rotated
    return counts


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

    amplification: bytes fetched per byte used, by the size of a request in bytes.
    requests: GETs per sample, if the set is remote.
    quality: 1 mixes as well as a global shuffle, 0 not at all, for one batch of 256.
    mixing: the same over 1, 4, 16 and 64 consecutive batches, as far as an epoch has them.
    memory_bytes: memory of a reader that reads every block once; 0 without blocks.
    sample_bytes: bytes fetched per sample.
    use: the line of code that makes it.
    samples_s, first_batch_s: estimates of `recommend_order`, 0 before that, without decoding.
    """

    name: str
    spec: Mapping[str, Any]
    amplification: dict[int, float]
    quality: float
    memory_bytes: int
    requests: float
    mixing: dict[int, float]
    sample_bytes: float = 0.0
    use: str = ""
    samples_s: float = 0.0
    first_batch_s: float = 0.0


@dataclass(frozen=True, slots=True)
class OrderAdvice(Result):
    """The result of `recommend_order`. latency_s: of one read. bandwidth: bytes/s. measured: whether both were."""

    orders: list[OrderReport]
    latency_s: float
    bandwidth: float
    memory_bytes: int
    measured: bool
    recommended: str
    use: str
    reason: str


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
        return _compared(reader, block_bytes, windows, seed)


def _compared(reader: readers.Reader, block_bytes: int, windows: Sequence[int], seed: int) -> list[OrderReport]:
    whole = int(reader.sizes().sum())  # the most memory that blocks can take
    orders: list[tuple[str, Order, int, str]] = [
        ("stored order", Sequential(len(reader)), 0, "Sequential(len(reader))")
    ]
    for window in windows:
        order = block_shuffled(reader, seed, block_bytes=block_bytes, window=window)
        orders.append(
            (
                f"{window} blocks",
                order,
                min(2 * window * block_bytes, whole),  # the next window is read before one ends
                f"block_shuffled(reader, {seed}, {block_bytes}, {window})",
            )
        )
    order_of_blocks = woven(reader, seed)
    memory = min(order_of_blocks.open * (256 << 10), whole)
    orders.append(
        (f"woven, {order_of_blocks.open} open", order_of_blocks, memory, f"woven(reader, {seed}, nodes=ranks)")
    )
    orders.append(("global shuffle", Shuffled(len(reader), seed), 0, f"Shuffled(len(reader), {seed})"))
    return [_order_report(name, order, memory, reader, use) for name, order, memory, use in orders]


def _order_report(name: str, order: Order, memory: int, reader: readers.Reader, use: str) -> OrderReport:
    amplification = {size: read_amplification(order, reader, request_bytes=size) for size in _REQUESTS}
    requests, over_many = requests_per_sample(order, reader), mixing(order)
    fetched = read_amplification(order, reader, request_bytes=1) * float(reader.sizes().mean() if len(reader) else 0)
    return OrderReport(
        name,
        order.spec(),
        amplification,
        shuffle_quality(order),
        memory,
        requests,
        over_many,
        fetched,
        f"readers.order.{use}",
    )


# --- which order to use ---------------------------------------------------------------------------------------------
_BATCH = 256
_GET_SECONDS, _SAMPLE_SECONDS = 0.00025, 2e-6  # of CPU time, if they are not measured
_STREAM_SECONDS = 12e-6  # of CPU time: to announce a sample and to take it, in addition to `read_many`
_LOCAL_READS = 16  # concurrent reads of a local disk
_PROBED_BYTES = 32 << 20


def recommend_order(
    path: str | os.PathLike[str],
    split: str | None = None,
    *,
    latency_s: float | None = None,
    bandwidth: float | None = None,
    memory_bytes: int | None = None,
    need: float = 0.0,
    block_bytes: int = 8 << 20,
    windows: Sequence[int] = _WINDOWS,
    seed: int = 0,
) -> OrderAdvice:
    """`compare_orders` with estimates for the storage of the set, and the order to use there.

    latency_s, bandwidth: seconds of a small read, and bytes per second of large ones; if not given, they are measured
        by reading about 32 MiB of the set (of a local set bypassing the page cache).
    memory_bytes: memory of a process for blocks; by default half of the available memory. A remote set keeps 224 MiB
        at most.
    need: samples per second that training takes, 0 if unknown.

    Recommends the best mixing order that reaches `need`, or half the speed of the fastest shuffle. One process is
    assumed. A sample takes the longer of its share of waiting GETs (up to `parallel_gets` at a time, 1,024 samples
    ahead, 4,096 of whole blocks) and the cost of its bytes, its GETs and itself. Raises like `compare_orders`,
    ValueError, RemoteError.
    """
    for name, value in (("latency_s", latency_s), ("bandwidth", bandwidth), ("memory_bytes", memory_bytes)):
        if value is not None and not 0 < value < 1e15:
            raise ValueError(f"{name} is {value}, expected more than 0")
    if block_bytes < 1 or not windows or min(windows) < 1:
        raise ValueError(f"block_bytes ({block_bytes}) and windows ({tuple(windows)}) must be at least 1")
    with readers.open(path, split) as reader:
        if not len(reader):
            raise ValueError(f"{set_title(path)}: a split without samples has no order to recommend")
        remote, mean = is_remote(path), max(1.0, float(reader.sizes().mean()))
        measured = latency_s is None or bandwidth is None
        probed = _probe(reader, remote) if measured else (0.0, 0.0, _GET_SECONDS, _SAMPLE_SECONDS)
        latency, rate = latency_s or probed[0], bandwidth or probed[1]
        most = available_memory_bytes() // 2 if memory_bytes is None else memory_bytes
        most = min(most, OPEN_BYTES) if remote else most
        width = parallel_gets() * 7 // 8 if remote else _LOCAL_READS
        get, streaming = (probed[2], _STREAM_SECONDS + probed[3]) if remote else (0.0, 0.0)

        def estimated(report: OrderReport) -> OrderReport:
            fits = report.memory_bytes <= most
            requests, size = (report.requests, report.sample_bytes) if fits else (1.0, mean)
            blocks = min(
                _BATCH, max(1, report.memory_bytes and int(report.spec.get("window", report.spec.get("open", _BATCH))))
            )
            gets = blocks if report.memory_bytes and fits else _BATCH * requests
            first = (
                blocks * min(report.memory_bytes / blocks, mean / max(1e-9, requests)) if report.memory_bytes else 0.0
            )
            first = latency + gets * get + max(first, _BATCH * size) / rate
            ahead = 3072 if report.memory_bytes and fits else 768  # when the next are announced
            waiting = max(requests * latency / width, latency / ahead if remote else 0.0)
            seconds = max(waiting, size / rate + requests * get + streaming)
            return replace(report, requests=requests, sample_bytes=size, samples_s=1 / seconds, first_batch_s=first)

        reports = [estimated(report) for report in _compared(reader, block_bytes, windows, seed)]
    return _advised(reports, latency, rate, most, measured, need)


def _advised(
    reports: list[OrderReport], latency: float, rate: float, most: int, measured: bool, need: float
) -> OrderAdvice:
    shuffles = [report for report in reports[1:] if report.memory_bytes <= most]
    fastest = max(report.samples_s for report in shuffles)
    enough = min(need, fastest) if need else fastest / 2
    exact = reports[-1]
    fast = [report for report in shuffles if report.samples_s >= enough]
    best = (
        exact
        if exact in fast
        else max(fast, key=lambda report: (round(report.mixing[1], 1), sum(report.mixing.values())))
    )
    goal = f"the {need:,.0f} that are needed" if need else f"half of the fastest shuffle's {fastest:,.0f}"
    if best is exact:
        reason = f"a global shuffle gives {exact.samples_s:,.0f} samples/s, at least {goal}, and nothing mixes better"
    else:
        least = min(best.mixing.values())
        reason = f"it gives {best.samples_s:,.0f} samples/s, a global shuffle {exact.samples_s:,.0f}"
        reason += f"; one batch mixes {best.mixing[1]:.2f} as well as with a global shuffle"
        if least < 0.8:
            reason += f", but many batches {least:.2f}: pack a set that is sorted with --shuffle"
    if need > fastest:
        reason += f"; no order gives the {need:,.0f} samples/s that are needed: stage or cache the set"
    return OrderAdvice(reports, latency, rate, most, measured, best.name, f"order = {best.use}", reason)


def _probe(reader: readers.Reader, remote: bool) -> tuple[float, float, float, float]:
    """(seconds of a small read, bytes per second of a long run, CPU seconds of a GET, and of a sample)."""
    rows = np.random.default_rng().permutation(len(reader))[: 2 * _BATCH + 6]
    sizes = np.asarray(reader.sizes())[: len(reader)]
    samples = min(len(reader), int(_PROBED_BYTES / max(1.0, float(sizes.mean()))) + 1)
    run = np.random.default_rng().integers(len(reader) - samples + 1) + np.arange(samples)

    def seconds_of(some: npt.NDArray[np.int64]) -> float:
        if not remote:
            for row in some.tolist():
                place, offset, length = reader.byte_range(row)  # type: ignore[misc]
                with open(place, "rb") as file:
                    os.posix_fadvise(file.fileno(), offset, length, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        reader.read_many(some)
        return time.perf_counter() - began

    seconds_of(rows[:1])
    latency = float(np.median([seconds_of(rows[k : k + 1]) for k in range(len(rows) > 1, min(6, len(rows)))]))
    if remote:
        seconds_of(rows[: _BATCH // 2 + 1])  # opens connections
    many = rows[6 : 6 + _BATCH] if len(rows) > 12 else rows
    together = min(seconds_of(many), seconds_of(many))  # the better of two, as other work delays reads
    worked = time.thread_time()
    length = min(seconds_of(run), seconds_of(run))
    worked = (time.thread_time() - worked) / 2 / len(run) if remote else 0.0
    rate = max(1.0, int(sizes[run].sum()) / max(1e-9, length - latency - worked * len(run)))
    get = max(0.0, (together - latency - int(sizes[many].sum()) / rate - worked * len(many)) / len(many))
    return latency, rate, get, worked
