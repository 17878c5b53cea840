"""Readers over a cache in shared memory, which all processes of a node share. See docs/cache.md.

form      the form in which images are kept, and compression
store     the cache as a store over any other; which samples are kept, and their bytes
fill      filling the cache, before or ahead of its readers
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from cache import SharedByteCache
from cache.errors import CacheError, CacheFullError
from cache.node import detect_ranks
from cache.stores.base import Payloads, layer
from readers.caching.fill import FillAhead, prefill
from readers.caching.form import Coefficients, Decoded, Encoded, Form, KeepLike, Recoded, as_form, rate_of, with_rate
from readers.caching.store import (
    CHECKS,
    Cached,
    CachedStats,
    CacheSettings,
    Capacity,
    Check,
    Originals,
    Slots,
    Subset,
    agree,
    budget,
    measure,
)
from readers.headers import first_deep
from readers.order import NodeLocal, Order
from readers.reader import Reader, depth_warning, read_good
from readers.table import Table

__all__ = [
    "Backend",
    "CachedReader",
    "CachedStats",
    "Capacity",
    "Coefficients",
    "Decoded",
    "Encoded",
    "Recoded",
    "cached",
]

Backend: TypeAlias = Literal["file", "memfd", "mpi"]
_ANY_JOB = "0"


class CachedReader(Reader):
    """A reader over a cache, as `readers.cached` returns it.

    With keep "recoded…" or "decoded…", resume tokens treat the reader as another set, because the pixels differ
    slightly.
    """

    _ahead: FillAhead | None = None

    def _setup(self) -> None:
        super()._setup()
        cache = layer(self.store, Cached)
        assert cache is not None
        self._cache = cache

    def prefill(
        self,
        threads: int | None = None,
        *,
        order: Order | None = None,
        epoch: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Fill the cache now; returns the number of samples that have a slot.

        threads: default: one per CPU that this process may use.
        order, epoch: the order to fill in; default: as stored.
        progress: called with the samples and bytes done so far, from any of the threads, one at a time.

        Processes that fill the same cache share the work. Samples that cannot be read are skipped: reading one raises.
        """
        return prefill(self.table, self._cache, threads, order, epoch, progress)

    def fill_ahead(self, order: Order, epoch: int, start: int = 0) -> FillAhead:
        """Fill the cache in the background, ahead of its readers, in the order of an epoch from position `start` on.

        Uses one thread of low priority, which ends with the epoch, when the cache is full, when the reader is closed,
        or by `stop()`. A second call stops the thread of the first.
        """
        if self._ahead is not None:
            self._ahead.stop()
        self._ahead = FillAhead(self.table, self._cache, order, epoch, start)
        return self._ahead

    def stats(self) -> CachedStats:
        """Statistics of the cache over all its processes."""
        return self._cache.stats()

    @property
    def keep(self) -> Form:
        """The form that images are kept in."""
        return self._cache.form

    @property
    def kept(self) -> Subset:
        """The samples that have a slot in the cache."""
        return self._cache.subset

    def close(self) -> None:
        """Leave the cache and close the store below."""
        if self._ahead is not None:
            self._ahead.stop()
            self._ahead = None
        super().close()


def cached(
    reader: Reader,
    capacity: Capacity = "auto",
    keep: KeepLike = "encoded",
    *,
    fields: Sequence[str] | None = None,
    partition: tuple[int, int] | Literal["node"] | None = None,
    check: Check = "never",
    compress: bool = True,
    directory: str | os.PathLike[str] = "/dev/shm",
    backend: Backend = "file",
    persist: bool = False,
    job: str | None = None,
    comm: Any = None,
) -> CachedReader:
    """The same samples, kept in shared memory once this process or any other of the node has read them.

    capacity: "auto" (the whole set, or as much as memory allows), bytes (an int, or a text such as "20GiB"), or a share
        of the set (a float from 0 to 1, or a text such as "25%"). Samples that do not fit are read from the set; they
        are the same in every process and every epoch.
    keep: "encoded", "recoded:256@90" or `Recoded(256, 90)`, "decoded:256" or `Decoded([Resize(256)])`, or
        "coefficients": JPEGs without their Huffman coding, which decode to the same pixels (for ImageLoader and
        ImageDataset; other consumers read below the cache). Needs the compiled codec.
    fields: the fields to keep (default: all).
    partition: (node, nodes) keeps only this node's contiguous part, as `readers.order.NodeLocal` assigns it; "node"
        takes both numbers from the launcher.
    check: when payloads are checked against their CRC32C: "never", on the "first" hit of this process, or "always";
        damaged payloads are dropped and read again.
    compress: store uncompressed payloads (BMP, raw arrays, text) as zstd if that saves a tenth.
    directory, backend, job, comm: see `cache.SharedByteCache.open`.
    persist: keep the memory filled after the last process has ended, until `packer cache clean`; a later job that
        opens the same cache with persist=True starts with it.

    A cached reader may be cached again in another directory: memory over a local disk over the set. Without memory,
    all samples are read from the set, with a warning. It also warns if "auto" keeps little because /dev/shm is small,
    if the compiled codec is missing, and if the first image has more than the 8 bits that are kept. Raises ValueError
    and UnknownNameError for invalid arguments, and MissingExtraError.
    """
    if check not in CHECKS:
        raise ValueError(f"check is one of {', '.join(CHECKS)}, not {check!r}")
    table, form = reader.table, as_form(keep)
    if (form.converts or form.is_for_decoders) and "image" not in table.fields:
        raise ValueError(f"keep={keep!r} is for images, but this set has {', '.join(table.fields)}: use keep='encoded'")
    slots = _slots(table, fields, partition)
    if form.is_for_decoders and not _can_decode():
        capacity = 0
    measures = measure(Reader(Table(table.columns, None, table.forms), reader.store), slots, form, compress)
    try:
        threshold, size = budget(capacity, measures, Path(directory) if backend == "file" else None)
    except CacheError as error:
        _warn(f"all samples are read without a cache: {error}")
        threshold = size = 0
    settings = CacheSettings(threshold, tuple(measures.shares), rate_of(measures.form))
    shared: SharedByteCache | None = None
    if size:
        # The name of a cache has its job's name; a cache that outlives its job must not have one.
        job = _ANY_JOB if persist and job is None else job
        where = {"directory": Path(directory), "backend": backend, "job": job, "persist": persist, "comm": comm}
        shared = _open_shared(reader, _kind(form.kind, slots, table, compress), len(slots), size, where)
    if shared is not None:
        agreed = agree(shared, settings)
        if agreed is None:
            _warn(f"all samples are read without a cache: another process of {shared!r} has not published its settings")
            shared.close()
            shared = None
        settings = agreed or settings
    if shared is not None and form.converts and not form.is_for_decoders and "image" in slots.fields:
        _warn_of_depth(reader, form)
    form = with_rate(form, settings.rate)
    if form.is_for_decoders:
        below = Cached(reader.decoding or reader.store, shared, slots, settings, form, table.columns, check)
        return CachedReader(table, Originals(below, reader.store), below)
    store = Cached(reader.store, shared, slots, settings, form, table.columns, check)
    forms = (*table.forms, form) if form.converts else table.forms
    return CachedReader(Table(table.columns, table.rows, forms), store)


def _can_decode() -> bool:
    """Whether this machine can decode coefficients; warns if not."""
    from readers.coefficients import unsupported_reason  # loads crc32c

    reason = unsupported_reason()
    if reason:
        _warn(f"all samples are read without a cache of coefficients: {reason}")
    return not reason


def _warn_of_depth(reader: Reader, form: Form) -> None:
    """Warn if the first image has more than the 8 bits that are kept."""
    if len(reader) and first_deep(image for image in read_good(reader, [0]) if image is not None) == 0:
        _warn(f"{depth_warning(reader, 0, f'a cache that keeps images {form.kind}')}, over a cache with keep='encoded'")


def _slots(table: Table, fields: Sequence[str] | None, partition: tuple[int, int] | str | None) -> Slots:
    names = tuple(table.fields if fields is None else fields)
    numbers = tuple(table.number(name) for name in names)
    if not names:
        raise ValueError("fields is empty: name at least one field to keep, or leave it out to keep all")
    part = range(len(table))
    if partition == "node":
        ranks = detect_ranks()
        partition = ranks.node, ranks.nodes
    if partition is not None:
        if isinstance(partition, str) or not 0 <= partition[0] < partition[1]:
            raise ValueError(f"partition is 'node', or (node, nodes) with 0 <= node < nodes, not {partition!r}")
        node, nodes = partition
        part = NodeLocal(len(table), nodes).local_part(node)
    rows = part if table.rows is None else np.unique(table.rows[part.start : part.stop])
    return Slots(names, numbers, Payloads(len(table.fields)), Subset(rows))


def _kind(kept: str, slots: Slots, table: Table, compress: bool) -> str:
    """A text that distinguishes the caches of one set."""
    rows = slots.subset.rows
    if isinstance(rows, range):
        part = f" of samples {rows.start}-{rows.stop}" if len(rows) != len(table) else ""
    else:
        part = f" of {len(rows)} rows {hashlib.blake2b(np.ascontiguousarray(rows).data, digest_size=8).hexdigest()}"
    return f"{kept} {'+'.join(slots.fields)}{part}{'' if compress else ' uncompressed'}"


def _identity(reader: Reader) -> str:
    """The table's fingerprint; for a folder, also the state of its files when they were listed."""
    state = reader.store.state
    if not state:
        return reader.fingerprint
    return hashlib.blake2b(f"{reader.fingerprint}\0{state}".encode(), digest_size=16).hexdigest()


def _open_shared(reader: Reader, kind: str, slots: int, size: int, where: dict[str, Any]) -> SharedByteCache | None:
    try:
        return SharedByteCache.open(
            fingerprint=_identity(reader),
            kind=kind,
            slots=slots,
            capacity_bytes=size,
            title=reader.table.title,
            **where,
        )
    except CacheFullError as error:
        _warn(
            f"no room for a cache of {size:,} bytes in {where['directory']}, so all samples are read without a cache: "
            f"{error}; choose a smaller capacity, or see  packer cache ls"
        )
    except (CacheError, OSError) as error:
        _warn(f"a cache of {size:,} bytes cannot be opened, so all samples are read without a cache: {error}")
    return None


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)
