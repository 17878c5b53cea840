"""The documents that the page reads: `view.json`, and those of orders.

Orders are computed when they are first asked for, and kept. What takes reading every sample (damaged ones; all that no
index says of a source) is begun by asking for it, and answered with how far it is until it is there.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from cache.errors import PackerError, UnknownNameError
from packer.viewer.columns import Column, columns_of
from packer.viewer.orders import (
    BINNED,
    Histogram,
    OrderColumn,
    Run,
    by_class,
    by_key,
    by_medium,
    by_number,
    histogram,
    same_bytes,
    values_of,
)
from packer.viewer.places import Place
from packer.viewer.scan import Scan
from readers.criteria import TableFacts, json_columns, json_payloads
from readers.headers import MEDIA
from readers.index import MemoryColumns
from readers.reader import Reader
from readers.sample import NO_LABEL, ImageInfo
from readers.where import parse_where

__all__ = ["FORMAT", "Pending", "SplitView", "View", "order_document"]

FORMAT = 1
_MOST_CLASSES = 200  # bars of a histogram
_MOST_INLINE = 100_000  # characters of a list in view.json; a longer one has a file of its own
_KEPT_SELECTIONS = 16
_HEADER_NAMES = {"width", "height", "min_side", "max_side", "pixels", "aspect", "medium", "orientation", "components"}


class Pending(Exception):
    """What is asked for takes reading every sample, which is under way."""

    def __init__(self, scan: Scan) -> None:
        super().__init__("every sample is being read")
        self.scan = scan


class SplitView:
    """One split: its reader, its columns, its orders and its histograms."""

    def __init__(self, name: str, reader: Reader) -> None:
        if len(reader) >= 1 << 32:
            raise ValueError(f"{reader}: has more samples than can be shown (2^32); give a part of it")
        self.name, self.reader = name, reader
        self.scan = Scan(reader)
        self.indexed = not isinstance(reader.table.columns, MemoryColumns)
        self._lock = threading.RLock()
        self._orders: dict[str, OrderColumn] = {}
        self._selections: OrderedDict[str, OrderColumn] = OrderedDict()
        self._histograms: dict[str, dict[str, Any]] = {}
        self._edges: dict[str, Histogram] = {}

    # --- what is known ----------------------------------------------------------------------------------------------
    @property
    def info(self) -> ImageInfo | None:
        """Header facts; None before they are known."""
        if self.indexed or self.reader.table.has_headers:
            return self.reader.info
        return self.scan.facts()[0] if self.scan.finished else None

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Bytes of the images, 0 where they are not known."""
        if "image" not in self.reader.fields:
            return np.zeros(len(self.reader), np.int64)
        return self.scan.facts()[1] if not self.indexed and self.scan.finished else self.reader.sizes()

    @property
    def checksums(self) -> npt.NDArray[np.uint32] | None:
        """CRC32C of the images; None before they are known."""
        if self.indexed:
            known = self.reader.table.columns.has_checksums and "image" in self.reader.fields
            return self.reader.table.field_column("image", "crc32c") if known else None
        return self.scan.facts()[2] if self.scan.finished else None

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """By the names of the files of an index."""
        return columns_of(self.reader, self.info)

    # --- orders -----------------------------------------------------------------------------------------------------
    @property
    def order_names(self) -> list[str]:
        """Those that there are, besides the stored one."""
        labelled = self.reader.labels >= 0
        names = ["class"] if labelled.any() else []
        names += [*BINNED, "media"] if "image" in self.reader.fields else []
        names += ["key"] if "key" in self.columns() else []
        names += ["unlabelled"] if not labelled.all() else []
        return [*names, "duplicates", "damaged"]

    def order(self, name: str) -> OrderColumn:
        """An order, computed if this is the first time. Raises Pending, and UnknownNameError."""
        with self._lock:
            if name in self._selections:
                return self._selections[name]
            if name not in self._orders:
                if name not in self.order_names:
                    raise UnknownNameError(f"there is no order {name!r}; there are {', '.join(self.order_names)}")
                self._orders[name] = self._computed(name)
            return self._orders[name]

    def needs_scan(self, name: str) -> bool:
        """Whether an order takes reading every sample, which has not been done."""
        if self.scan.finished:
            return False
        if name == "damaged" or (name == "duplicates" and self.checksums is None):
            return True
        return (name in ("size", "side", "aspect", "media") and self.info is None) or (
            name == "bytes" and not self.sizes.any()
        )

    def _computed(self, name: str) -> OrderColumn:
        if self.needs_scan(name):
            self.scan.start()
            raise Pending(self.scan)
        reader = self.reader
        if name == "class":
            return by_class(reader.labels, reader.classes)
        if name == "key":
            return by_key(reader.table.columns.keys())
        if name == "unlabelled":
            return OrderColumn(np.flatnonzero(reader.labels == NO_LABEL).astype(np.uint32), [])
        if name == "damaged":
            return OrderColumn(self.scan.faulty().astype(np.uint32), [])
        if name == "duplicates":
            sums = self.checksums
            known = np.zeros(len(reader), np.uint32) if sums is None else sums
            return same_bytes(np.zeros_like(self.sizes) if sums is None else self.sizes, known, reader.keys)
        info = self.info
        if name == "media":
            assert info is not None
            return by_medium(info.media)
        values = values_of(name, info, self.sizes)
        if values is None:
            values = np.full(len(reader), np.nan)
        return by_number(values, self._histogram(name, values).edges)

    def select(self, text: str) -> tuple[str, OrderColumn]:
        """(name, the order) of the samples for which an expression of `readers.where` is true.

        Raises ValueError, UnknownNameError and Pending.
        """
        where = parse_where(text)
        with self._lock:
            known = {its.runs[0].name: name for name, its in self._selections.items()}
            if text in known:
                return known[text], self._selections[known[text]]
            if where.names & _HEADER_NAMES and self.info is None:
                self.scan.start()
                raise Pending(self.scan)
            facts = TableFacts(
                self.reader.table,
                self._headers,
                self.name,
                columns=lambda names: json_columns(json_payloads(self.reader, np.arange(len(self.reader))), names),
            )
            chosen = np.flatnonzero(where.mask(facts)).astype(np.uint32)
            number = 1 + max((int(name.removeprefix("where-")) for name in self._selections), default=0)
            name = f"where-{number}"
            self._selections[name] = OrderColumn(chosen, [Run(text, 0, len(chosen))])
            while len(self._selections) > _KEPT_SELECTIONS:
                self._selections.popitem(last=False)
            return name, self._selections[name]

    def _headers(self) -> ImageInfo:
        info = self.info
        assert info is not None
        return info

    # --- histograms -------------------------------------------------------------------------------------------------
    def histograms(self) -> dict[str, Any]:
        """Those that need no sample to be read, as documents have them."""
        with self._lock:
            for name, (title, unit) in BINNED.items():
                if name not in self._histograms and "image" in self.reader.fields:
                    values = values_of(name, self.info, self.sizes)
                    if values is not None:
                        found = self._histogram(name, values)
                        numbers = {"edges": found.edges.tolist(), "counts": found.counts.tolist()}
                        self._histograms[name] = {"title": title, "unit": unit, **numbers, "order": name}
            if "media" not in self._histograms and self.info is not None and "image" in self.reader.fields:
                counts = np.bincount(self.info.media, minlength=len(MEDIA))
                found_media = [(name, int(count)) for name, count in zip(MEDIA[1:], counts[1:], strict=False) if count]
                self._histograms["media"] = _named("medium", "media", found_media)
            labels = self.reader.labels
            if "class" not in self._histograms and (labels >= 0).any() and int(labels.max()) < _MOST_CLASSES:
                runs = [run for run in self.order("class").runs if run.name]
                self._histograms["class"] = _named("class", "class", [(run.name, run.samples) for run in runs])
            return dict(self._histograms)

    def _histogram(self, name: str, values: npt.NDArray[np.float64]) -> Histogram:
        if name not in self._edges:
            self._edges[name] = histogram(values)
        return self._edges[name]


def _named(title: str, order: str, bars: list[tuple[str, int]]) -> dict[str, Any]:
    names, counts = [name for name, _ in bars], [count for _, count in bars]
    return {"title": title, "unit": "", "names": names, "counts": counts, "order": order}


def order_document(order: OrderColumn, url: str) -> dict[str, Any]:
    """An order as documents have it."""
    runs = [list(run) for run in order.runs]
    return {"url": url, "start": len(Column(order.values).header), "count": len(order.values), "runs": runs}


class View:
    """A place, and what is shown of it."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.splits = {name: SplitView(name, reader) for name, reader in place.splits.items()}
        self._warming = threading.Thread(target=self._warm, name="packer-view-warm", daemon=True)
        self._warming.start()

    def _warm(self) -> None:
        """Compute what view.json takes while the browser starts; what is wrong is said to who asks."""
        for split in self.splits.values():
            with suppress(PackerError):
                split.histograms()

    def close(self) -> None:
        """End what runs in the background, and close the place."""
        self._warming.join()
        for split in self.splits.values():
            split.scan.stop()
        self.place.close()

    @property
    def classes(self) -> tuple[str, ...]:
        return next((split.reader.classes for split in self.splits.values() if split.reader.classes), ())

    def document(self, batches: dict[str, Any] | None) -> dict[str, Any]:
        """`view.json` where a server answers. batches: what its previews can do."""
        first = next(iter(self.splits.values()))
        kinds = first.reader.kinds
        classes: dict[str, Any] = {"classes": list(self.classes)}
        if sum(map(len, self.classes)) > _MOST_INLINE:
            classes = {"classes": None, "classes_url": "classes.json"}
        return {
            "format": FORMAT,
            "name": self.place.name,
            "address": self.place.address,
            "container": self.place.container,
            "live": True,
            **classes,
            "fields": [{"name": name, "kind": kinds[name]} for name in first.reader.fields],
            "media": list(MEDIA),
            "splits": {name: self._split_document(split) for name, split in self.splits.items()},
            "can": {"where": True, "batches": batches or False, "damaged": True},
        }

    def _split_document(self, split: SplitView) -> dict[str, Any]:
        part = quote(split.name, safe="")
        columns = split.columns()
        orders: dict[str, Any] = {"stored": None}
        for name in split.order_names:
            orders[name] = {"pending": True, "document": f"order/{part}/{name}.json", "scan": split.needs_scan(name)}
        return {
            "samples": len(split.reader),
            "bytes": int(split.sizes.sum()),
            "columns": {
                name: Column(values).described(f"column/{part}/{quote(name, safe='')}.npy")
                for name, values in columns.items()
            },
            "shards": self._shards(split),
            "orders": orders,
            "histograms": split.histograms(),
        }

    def _shards(self, split: SplitView) -> list[dict[str, Any]]:
        """No longer than view.json can bear; every sample names its own."""
        if self.place.dataset is None:
            return []
        shards = self.place.dataset.splits[split.name].shards
        if sum(len(shard.path) + 40 for shard in shards) > _MOST_INLINE:
            return []
        return [{"url": None, "bytes": shard.bytes, "path": shard.path} for shard in shards]
