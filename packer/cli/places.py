"""`packer diagnose --places DIR,…` and `--batch-sizes N,…`: what they take."""

from __future__ import annotations

import os
from typing import Any

import click

from packer.cli.held import cleaning_up
from packer.cli.text import watcher
from readers.diagnosis.facts import reader_of
from readers.diagnosis.places import Places, measure_places
from readers.reader import Reader

__all__ = ["MOST_SECONDS", "batch_sizes_option", "places_of", "places_option"]

MOST_SECONDS = 20.0
_BATCH_SIZE = 64
_LARGEST = 1 << 24


def _directories(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """Directories, separated by commas. What is wrong with one is a line of the result."""
    if value is None:
        return None
    found = [os.path.expanduser(part) for part in value.split(",") if part]
    if not found:
        raise click.BadParameter(f"{value!r} names no directory; give some, as /local,/dev/shm")
    return tuple(dict.fromkeys(found))


def _sizes(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Batch sizes, separated by commas."""
    parts = [] if value is None else [part.strip() for part in value.split(",")]
    if not all(part.isascii() and part.isdecimal() and 0 < int(part) < _LARGEST for part in parts):
        raise click.BadParameter(f"{value!r} are not valid batch sizes; give some, as 32,64,128")
    return tuple(map(int, parts)) or None


batch_sizes_option = click.option("--batch-sizes", callback=_sizes, metavar="N,…", help="Measure the loop with batches "
    "of these sizes, too. A simulated step takes as much longer as its batch is larger.")  # fmt: skip
places_option = click.option("--places", callback=_directories, metavar="DIR,…", help="Copy a sample of the set to "
    "each of these directories, and compare how fast it is read there and where the set is.")  # fmt: skip


def places_of(loader: Any, as_json: bool, options: dict[str, Any]) -> Places:
    """Measure the places for a reader, or for that of a loader; the copies are removed after a signal, too."""
    reader = loader if isinstance(loader, Reader) else reader_of(loader)
    if reader is None:
        raise click.UsageError(
            f"--places is for a SET, or for a loader over a reader of this package, not for {type(loader).__name__}"
        )
    size = options["batch_size"] or getattr(loader, "batch_size", None) or _BATCH_SIZE
    seconds = min(options["seconds"], MOST_SECONDS)
    with cleaning_up():
        return measure_places(reader, options["places"], batch_size=size, seconds=seconds, watcher=watcher(as_json))
