"""A list of addresses of images: a table with a column of them, or a text file with one a line.

    url         named by path_column, else the first of URL_COLUMNS, or a column of paths that holds addresses
    label       named by label_column, else as in a manifest
    split       a column called split or subset
    key         a column called key, if its values are different; else the number of the row, 000000042
    caption     a column called caption, text or alt_text: a field of text
    metadata    all other columns, in the field json, with the address up to its query, which may be a signature

Images are fetched while they are packed (`packer.sources.fetching`), some ahead of the one that is written, in one
process, so that the limits hold for all of them. What cannot be fetched is a bad sample: with on_error="skip" it is
left out, and left-out.jsonl has the address (without a query), the status and the reason. Shards that are whole are
not fetched again when the same conversion runs once more.

Place: the address, and the bytes of the other fields, None for none.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np

from cache.errors import BadNameError, BadSampleError, SourceError
from packer.formats.base import Arena
from packer.sources.base import FileSource, ListingBuilder, SourceListing, check_names
from packer.sources.contents import NOT_FETCHED
from packer.sources.fetching import Fetcher, FetchOptions, without_query
from packer.sources.file_sets import split_of_value
from packer.sources.lookups import wanted_split
from packer.sources.manifest_columns import NamedColumns
from packer.sources.tables import Row, is_missing, json_payload, number_labels
from packer.sources.url_tables import UrlTable, open_url_table
from readers.layout import RelativePath
from readers.sample import Buffer
from readers.strings import repeated

__all__ = ["UrlListSource"]

Place: TypeAlias = "tuple[Any, ...]"

_AHEAD = 4  # requests that are sent or done before they are needed, for each thread
_AHEAD_BYTES = 256 << 20


class UrlListSource(FileSource):
    """See the module. The options are those of `packer.sources.fetching.FetchOptions`."""

    kind = "list of addresses"

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        path_column: str | None = None,
        label_column: str | None = None,
        split_column: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root)
        self.columns = NamedColumns(path_column, label_column, split_column)
        self.options = FetchOptions(**options)
        self._fetcher: Fetcher | None = None

    def list_file(self, split: str | None) -> SourceListing:
        listed = _Rows(open_url_table(self.root, self.columns), split or "train")
        listing = listed.listing()
        if listed.table.split is not None:
            split = wanted_split(split, listing.splits, str(self.root))
            listing.splits = {name: part for name, part in listing.splits.items() if split in (None, name)}
        listing.max_workers = 1
        return listing

    @contextmanager
    def open_file(self) -> Iterator[UrlReader]:
        if self._fetcher is None:  # kept from shard to shard, with its connections and its pace
            self._fetcher = Fetcher(self.options)
        with ThreadPoolExecutor(self.options.threads, thread_name_prefix="fetch") as pool:
            reader = UrlReader(self._fetcher, pool)
            try:
                yield reader
            except BaseException:
                self._fetcher.stop()
                self._fetcher = None
                raise
            finally:
                reader.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_fetcher": None}


class _Rows:
    """Puts the listing together, row by row."""

    def __init__(self, table: UrlTable, split: str) -> None:
        self.table, self._split = table, split
        self._fields = {"image": "image"}
        if table.caption is not None:
            self._fields["caption"] = "text"
        self._fields["json"] = "json"
        self._parts: dict[str, ListingBuilder] = {}
        self._keys: dict[str, list[str]] = {}

    def listing(self) -> SourceListing:
        labels: list[Any] = []
        lines: list[int] = []
        for line, row in self.table.rows():
            self._add(line, row, len(lines))
            lines.append(line)
            labels.append(row.get(self.table.label) if self.table.label is not None else None)
        if not lines:
            raise SourceError(f"{self.table.table.path}: no addresses")
        numbers, classes, warnings = number_labels(labels, lines, self.table.table)
        listing = SourceListing({}, self._fields, classes, warnings=warnings, json_listed=True)
        for name, builder in self._parts.items():
            part = builder.build()
            part.labels = np.array(numbers, np.int64)[part.labels]
            check_names(part.keys, str(self.table.table.path))
            if len(repeated(lambda keys=part.keys: keys, len(part))):  # type: ignore[misc]
                raise SourceError(f"{self.table.table.path}: keys occur twice in {name}; rename the column of keys")
            listing.splits[name] = part
        return listing

    def _add(self, line: int, row: Row, position: int) -> None:
        table = self.table
        url = row.get(table.url)
        if not isinstance(url, str) or not url.strip():
            raise SourceError(f"{table.table.where(line)}: no address in the column {table.url!r}")
        part = self._parts.setdefault(self._split_of(line, row), ListingBuilder(len(self._fields)))
        caption = row.get(table.caption) if table.caption is not None else None
        words = None if is_missing(caption) else " ".join(str(caption).split()).encode("utf-8", "replace")
        words_of = [] if table.caption is None else [words]
        metadata = json_payload({**row, table.url: without_query(url.strip())}, (table.url, *table.metadata))
        # The label follows when those of all rows are known; until then, it is the position of the row.
        names = [""] * len(self._fields)
        part.add(names, (url.strip(), *words_of, metadata), 0, key=self._key_of(line, row, position), label=position)

    def _key_of(self, line: int, row: Row, position: int) -> str:
        if self.table.key is None:
            return f"{position:09d}"
        try:
            return RelativePath(str(row.get(self.table.key, "")))
        except BadNameError as error:
            raise SourceError(f"{self.table.table.where(line)}: column {self.table.key!r}: {error}") from error

    def _split_of(self, line: int, row: Row) -> str:
        if self.table.split is None:
            return self._split
        return split_of_value(row.get(self.table.split), f"{self.table.table.where(line)}: column {self.table.split!r}")


class UrlReader:
    """Fetches images, those that are expected next ahead of time.

    Those that are done and not read yet have at most 256 MiB, and as much as `threads` images in addition.
    """

    def __init__(self, fetcher: Fetcher, pool: ThreadPoolExecutor) -> None:
        self._fetcher, self._pool = fetcher, pool
        self._expected: deque[str] = deque()
        self._ahead: deque[tuple[str, Future[bytes | None]]] = deque()
        self._most = _AHEAD * fetcher.options.threads
        self._room = threading.Condition()
        self._bytes = self._sent = self._read = 0  # the latter two are counts of images
        self._is_closed = False

    def expect(self, places: Sequence[Place]) -> None:
        """The places that `read` will be called with next, in this order."""
        self._expected.extend(place[0] for place in places)

    def read(self, place: Place, arena: Arena) -> Sequence[Buffer | None]:
        url, *fields = place
        self._send()
        while self._ahead and self._ahead[0][0] != url:  # passed over
            self._next()
        image = self._next() if self._ahead else self._fetcher.fetch(url)
        if image is None:
            raise BadSampleError(f"{NOT_FETCHED}stopped: {without_query(url)}")
        return (image, *fields)

    def close(self) -> None:
        """Send no more requests."""
        with self._room:
            self._is_closed = True
            self._room.notify_all()
        for _, future in self._ahead:
            future.cancel()

    def _send(self) -> None:
        while self._expected and len(self._ahead) < self._most:
            url = self._expected.popleft()
            self._ahead.append((url, self._pool.submit(self._fetch, url, self._sent)))
            self._sent += 1

    def _fetch(self, url: str, number: int) -> bytes | None:
        """In a thread: the image, when there is room for it, or when it is the next to be read."""
        with self._room:
            self._room.wait_for(lambda: self._bytes < _AHEAD_BYTES or number <= self._read or self._is_closed)
            if self._is_closed:
                return None
        data = self._fetcher.fetch(url)
        with self._room:
            self._bytes += len(data)
        return data

    def _next(self) -> bytes | None:
        """The image that was sent for first. Raises BadSampleError."""
        data: bytes | None = None
        try:
            data = self._ahead.popleft()[1].result()
            return data
        finally:
            with self._room:
                self._read += 1
                self._bytes -= len(data or b"")
                self._room.notify_all()
