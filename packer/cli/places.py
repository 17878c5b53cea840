"""What `packer diagnose --places` and `--batch-sizes` take and print."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import click

from cache.stores import LooseFiles
from packer.cli.held import cleaning_up
from packer.cli.text import bar, human_bytes, watcher, width
from readers.diagnosis.batch_sizes import BatchSize, BatchSizes, measure_batch_sizes
from readers.diagnosis.places import Place, Places, compare_packed, measure_places
from readers.diagnosis.reads import PlaceReads
from readers.reader import Reader

__all__ = [
    "batch_sizes_lines",
    "batch_sizes_of",
    "batch_sizes_option",
    "packing_notes",
    "places_lines",
    "places_of",
    "places_option",
]

F = TypeVar("F", bound=Callable[..., Any])
_BAR = 20
_MOST_SECONDS = 20.0
_BATCH_SIZE = 64
_LARGEST = 1 << 24


class _Directories(click.ParamType):  # type: ignore[type-arg]
    """Directories, separated by commas. What is wrong with one is a line of the result."""

    name = "directories"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        found = [os.path.expanduser(part) for part in value.split(",") if part]
        if not found:
            self.fail(f"{value!r} names no directory; give some, as /local,/dev/shm", param, ctx)
        return tuple(dict.fromkeys(found))


class _Sizes(click.ParamType):  # type: ignore[type-arg]
    """Batch sizes, separated by commas."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        parts = [part.strip() for part in value.split(",")]
        if not all(part.isascii() and part.isdecimal() and 0 < int(part) < _LARGEST for part in parts):
            self.fail(f"{value!r} are not valid batch sizes; give some, as 32,64,128", param, ctx)
        return tuple(map(int, parts))


batch_sizes_option = click.option("--batch-sizes", type=_Sizes(), metavar="N,N", help="Measure the loop with batches "
    "of these sizes, too. A simulated step takes as much longer as its batch is larger.")  # fmt: skip
places_option = click.option("--places", type=_Directories(), metavar="DIR,DIR", help="Copy a sample of the set to "
    "each of these directories, and compare how fast it is read there and where the set is.")  # fmt: skip


def places_of(loader: Any, directories: tuple[str, ...], batch_size: int | None, **options: Any) -> Places:
    """Measure the places for a reader, or for that of a loader; the copies are removed after a signal, too."""
    reader = next((found for found in _readers(loader) if isinstance(found, Reader)), None)
    if reader is None:
        raise click.UsageError(
            f"--places is for a DATASET, or for a loader over a reader of this package, not for {type(loader).__name__}"
        )
    size = batch_size or getattr(loader, "batch_size", None) or _BATCH_SIZE
    with cleaning_up():
        return measure_places(
            reader,
            directories,
            batch_size=size,
            seconds=min(options["seconds"], _MOST_SECONDS),
            watcher=watcher(options["as_json"]),
        )


def packing_notes(reader: Reader, batch_size: int) -> tuple[str, ...]:
    """What packing would gain, if the reader is that of a folder of files."""
    if not isinstance(reader.store, LooseFiles):
        return ()
    with cleaning_up():
        note = compare_packed(reader, batch_size)
    return (note,) if note else ()


def _readers(loader: Any) -> Iterator[Any]:
    yield loader
    yield getattr(loader, "reader", None)
    yield getattr(getattr(loader, "dataset", None), "reader", None)


def places_lines(places: Places) -> list[str]:
    """A table with a line for the first read and one for the second, in each place; then what to do."""
    first = places.rows[0]
    longest = max((row.first.batch.p50 for row in places.rows if row.first), default=1.0)
    names = [row.path if i else "here" for i, row in enumerate(places.rows)]
    room = max(5, *map(len, names))
    lines = [
        f"places: reads of {human_bytes(first.bytes / max(1, first.samples))}, batches of {places.batch_size}; ms",
        f"{'':{room}s} {'':16s} {'one sample':>23s} {'':7s} {'a batch':>17s}",
        f"{'place':{room}s} {'read':16s} {'p50':>7s} {'p90':>7s} {'p99':>7s} {'MB/s':>7s} {'p50':>8s} {'p99':>8s}",
    ]
    for name, row in zip(names, places.rows, strict=True):
        lines += _rows(name, room, row, longest)
    lines += [f"here is {first.path}", "", *_wrapped(places.advice)]
    return [*lines, *(f"  {command}" for command in places.commands)]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, max(_BAR, width()), break_on_hyphens=False, break_long_words=False)


def _rows(name: str, room: int, row: Place, longest: float) -> Iterator[str]:
    if row.error:
        yield f"{name:{room}s} {row.error}"
        return
    warm = "warm" if row.cold or row.filesystem not in ("tmpfs", "ramfs") else "memory"
    for pages, reads in (("cold", row.cold), (warm, row.warm)):
        if reads is not None:
            shown = bar(reads.batch.p50 / longest, _BAR)
            yield f"{name:{room}s} {f'{row.form} {pages}':16s} {_figures(reads)}  {shown}"
            name = ""
    facts = [row.filesystem, f"opening a file takes {1e6 * row.opening.p50:.0f} µs" if row.opening else "", row.note]
    if row.holds is not None and row.holds < 1:
        facts.append(f"room for {row.holds:.0%} of the set")
    yield f"{'':{room}s} {', '.join(filter(None, facts))}"


def _figures(reads: PlaceReads) -> str:
    single, batch = reads.single, reads.batch
    times = " ".join(f"{1e3 * seconds:7.3f}" for seconds in (single.p50, single.p90, single.p99))
    return f"{times} {single.bytes_per_second / 1e6:7,.0f} {1e3 * batch.p50:8.2f} {1e3 * batch.p99:8.2f}"


def batch_sizes_of(
    loader: Any, sizes: tuple[int, ...], step: Callable[[Any], object] | None, as_json: bool, **options: Any
) -> BatchSizes:
    """Measure the loop at several sizes."""
    seconds = min(options.pop("seconds"), _MOST_SECONDS)
    return measure_batch_sizes(loader, sizes, step, seconds=seconds, watcher=watcher(as_json), **options)


def batch_sizes_lines(result: BatchSizes) -> list[str]:
    """A line for each size, then what follows from them."""
    most = max(row.images for row in result.rows)
    lines = [
        f"{'':7s} {'the step alone':>20s} {'with the loader':>20s}",
        f"{'batch':>7s} {'ms':>9s} {'images/s':>10s} {'ms':>9s} {'images/s':>10s} {'waits':>6s} {'a batch':>8s}",
    ]
    lines += [_size_line(row, most) for row in result.rows]
    if result.scaled_from is not None:
        lines += _wrapped(
            f"the simulated step is that of a batch of {result.scaled_from}, and longer or shorter in proportion to "
            f"the batch; a real one often gains from larger batches"
        )
    return [*lines, "", *_wrapped(result.advice)]


def _size_line(row: BatchSize, most: float) -> str:
    if row.step is None or row.full is None:
        return f"{row.batch_size:7d} {row.error}"
    figures = " ".join(
        f"{1e3 * time.seconds:9.2f} {images:10,.0f}"
        for time, images in ((row.step, row.step_images), (row.full, row.images))
    )
    memory = f", {human_bytes(row.device_bytes)} of the device" if row.device_bytes is not None else ""
    shown = bar(row.images / most, _BAR)
    return f"{row.batch_size:7d} {figures} {row.waiting:6.0%} {human_bytes(row.bytes):>8s}  {shown}{memory}"
