"""`readers.cached`: from what is asked to a reader over a cache that all processes of the node share."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import cache
from readers.cached.choice import EVERYTHING, Choice, chosen_below
from readers.cached.keep import KeepLike, as_keep
from readers.cached.measure import Measures, measure
from readers.cached.packing import Packing
from readers.cached.reader import CachedReader
from readers.cached.shelf import CHECKS, Check, Shelf
from readers.cached.source import checksums, content_fingerprint, freshness, title_of
from readers.cached.store import Slots, Store, Terms, agreed
from readers.errors import UnknownNameError
from readers.order import NodeLocal
from readers.sample import Reader
from readers.units import parse_size

__all__ = ["Backend", "Capacity", "Place", "cached"]

Backend: TypeAlias = Literal["file", "memfd", "mpi"]
Capacity: TypeAlias = int | float | str
_TERMS_BYTES = 4096
_SLACK = 200  # one part in so many is left for payloads that are stored again after their bytes went wrong
_ANY_JOB = "0"


@dataclass(frozen=True)
class Place:
    """Where the memory is, and for whom: what `cache.SharedByteCache.open` takes besides sizes and names."""

    directory: str | os.PathLike[str] = "/dev/shm"
    backend: Backend = "file"
    persist: bool = False
    job: str | None = None
    comm: Any = None


def cached(
    reader: Reader,
    capacity: Capacity = "auto",
    keep: KeepLike = "encoded",
    *,
    fields: Sequence[str] | None = None,
    partition: tuple[int, int] | None = None,
    check: Check = "never",
    compress: bool = True,
    directory: str | os.PathLike[str] = "/dev/shm",
    backend: Backend = "file",
    persist: bool = False,
    job: str | None = None,
    comm: Any = None,
) -> CachedReader:
    """The same samples, kept in shared memory once they have been read: by this process or any other of the node.

    capacity: "auto" (the whole set, or what memory allows), bytes (an int, or a text such as "20GiB"), or a share of
    the set (a float from 0 to 1, or a text such as "25%"). What does not fit passes through; which samples those are is
    the same in every process and every epoch. keep: "encoded", "recoded:256@90" or `Recoded(256, 90)`, "decoded:256" or
    `Decoded([Resize(256)])`. fields: the fields to keep (default: all). partition: (node, nodes) keeps only this node's
    contiguous part, that of `readers.order.NodeLocal`. check: when payloads are checked against their CRC32C: "never",
    on the "first" hit of this process, or "always"; wrong ones are dropped and read again. compress: store what is not
    compressed already (BMP, raw arrays, text) as zstd where that saves a tenth.

    directory, backend, job, comm: see `cache.SharedByteCache.open`. persist: the memory stays filled when the last
    process has gone, until `packer cache clean`; a later job that asks for the same with persist=True begins with it.

    Where the memory cannot be had, everything passes through, with one warning; there is one, too, where "auto" keeps
    little because /dev/shm was made small. Raises ValueError and UnknownNameError for arguments that mean nothing.
    """
    if check not in CHECKS:
        raise ValueError(f"check is one of {', '.join(CHECKS)}, not {check!r}")
    form = as_keep(keep)
    slots = _slots(reader, fields, partition)
    measures = measure(reader, slots, form, compress)
    packings = {name: found.packing for name, found in measures.fields.items() if found.packing is not None}
    where = Path(directory) if backend == "file" else None
    try:
        threshold, size = _budget(capacity, measures, packings, where)
    except cache.CacheError as error:
        _warn(f"everything passes through, without a cache: {error}")
        threshold = size = 0
    terms = Terms(threshold, packings, measures.rate)
    store: Store | None = None
    if size:
        place = Place(directory, backend, persist, job, comm)
        store = _opened(reader, _kind(form.kind, slots, len(reader), compress), slots, size, place)
    if store is not None:
        theirs = agreed(store, slots, terms)
        if theirs is None:
            _warn(f"everything passes through: {store!r} is held up by a process that does not say what is kept in it")
            store.close()
            store = None
        terms = theirs or terms
    sums = {name: found for name in slots.fields if (found := checksums(reader, name)) is not None}
    used = sums if check != "never" else {}
    return CachedReader(reader, Shelf(store, slots, terms, form, check, used, freshness(reader)))


def _slots(reader: Reader, fields: Sequence[str] | None, partition: tuple[int, int] | None) -> Slots:
    names = tuple(reader.fields if fields is None else fields)
    for name in names:
        if name not in reader.fields:
            raise UnknownNameError(f"{reader}: no field {name!r}; it has {', '.join(reader.fields)}")
    if not names:
        raise ValueError("fields: name at least one field to keep, or leave it out to keep all")
    if partition is None:
        return Slots(names, 0, len(reader))
    node, nodes = partition
    if not 0 <= node < nodes:
        raise ValueError(f"partition is (node, nodes) with 0 <= node < nodes, not {partition!r}")
    part = NodeLocal(len(reader), nodes).local_part(node)
    return Slots(names, part.start, part.stop)


def _budget(
    capacity: Capacity, measures: Measures, packings: dict[str, Packing], directory: Path | None
) -> tuple[int, int]:
    """(threshold, bytes to reserve); 0 bytes for no cache."""
    slots, weights = measures.slots, measures.weights()
    terms = _TERMS_BYTES + sum(len(packing.dictionary) + 64 for packing in packings.values())
    asked, share = _asked(capacity)
    if slots.start == slots.stop or share == 0 or asked == 0:
        return 0, 0
    if share is not None:
        wanted = round(share * (slots.stop - slots.start))
        threshold = chosen_below(slots.start, slots.stop, wanted, lambda run: run * 0 + 1)
        kept = Choice(slots.start, slots.stop, threshold).total(weights)
        return threshold, terms + kept + kept // _SLACK
    payload = Choice(slots.start, slots.stop, EVERYTHING).total(weights)
    whole = terms + payload + payload // _SLACK
    room = cache.budget(directory) if asked is None else None
    table = cache.SharedByteCache.table_bytes(len(slots))
    limit = min(whole, max(0, room.bytes - table) if room is not None else asked or 0)
    if limit >= whole:
        return EVERYTHING, whole
    threshold = chosen_below(slots.start, slots.stop, max(0, limit - terms - limit // _SLACK), weights)
    kept = sum(len(run) for run in Choice(slots.start, slots.stop, threshold).kept())
    if room is not None and (room.is_cramped or not kept):
        _warn(f"the cache keeps {kept:,} of {slots.stop - slots.start:,} samples: {_limited(room, directory, whole)}")
    return (threshold, limit) if kept else (0, 0)


def _limited(room: cache.Budget, directory: Path | None, whole: int) -> str:
    """What leaves so little room, and what to do."""
    if room.is_cramped:
        return (
            f"{directory} has {room.size_bytes or 0:,} bytes, the set takes {whole:,}; start a container with "
            f"--shm-size (or --ipc=host), or name a larger tmpfs with directory="
        )
    found = room.memory_bytes if room.memory_bytes is not None else room.directory_bytes
    if room.memory_bytes is not None and room.directory_bytes is not None:
        found = min(room.memory_bytes, room.directory_bytes)
    where = "of memory" if found == room.memory_bytes else f"in {directory}"
    return f"only {found:,} bytes {where} are free, which is the margin; ask for more, or see  packer cache ls"


def _asked(capacity: Capacity) -> tuple[int | None, float | None]:
    """(bytes, None), (None, share) or, for "auto", (None, None)."""
    if isinstance(capacity, bool) or not isinstance(capacity, int | float | str):
        raise ValueError(f'capacity is "auto", bytes, a text such as "20GiB", or a share from 0 to 1, not {capacity!r}')
    if capacity == "auto":
        return None, None
    if isinstance(capacity, str) and capacity.strip().endswith("%"):
        capacity = float(capacity.strip()[:-1]) / 100
    if isinstance(capacity, float):
        if not 0 <= capacity <= 1:
            raise ValueError(f"capacity as a share is from 0 to 1, not {capacity}; bytes are an int")
        return None, capacity
    size = parse_size(capacity) if isinstance(capacity, str) else capacity
    if size < 0:
        raise ValueError(f"capacity is {size} bytes, expected 0 or more")
    return size, None


def _kind(kept: str, slots: Slots, samples: int, compress: bool) -> str:
    """What makes two caches of one set different ones."""
    part = f" of samples {slots.start}-{slots.stop}" if (slots.start, slots.stop) != (0, samples) else ""
    return f"{kept} {'+'.join(slots.fields)}{part}{'' if compress else ' uncompressed'}"


def _opened(reader: Reader, kind: str, slots: Slots, size: int, place: Place) -> Store | None:
    try:
        store: Store = cache.SharedByteCache.open(
            fingerprint=content_fingerprint(reader),
            kind=kind,
            slots=len(slots),
            capacity_bytes=size,
            directory=Path(place.directory),
            backend=place.backend,
            # Jobs have names of their own; what is to outlive one must not be under it.
            job=_ANY_JOB if place.persist and place.job is None else place.job,
            persist=place.persist,
            comm=place.comm,
            title=title_of(reader),
        )
    except cache.CacheFullError as error:
        _warn(
            f"no room for a cache of {size:,} bytes in {place.directory}, so everything passes through: {error}; ask "
            f"for a smaller capacity, or see  packer cache ls"
        )
        return None
    except (cache.CacheError, OSError) as error:
        _warn(f"no cache of {size:,} bytes can be had, so everything passes through: {error}")
        return None
    return store


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)
