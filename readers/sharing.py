"""Sharing: what each node holds of a set, read by the other nodes over the cluster's network and not from the source.

    with readers.share(reader, "/home/me/job") as reader:        # every process of every node calls it
        loader = ImageLoader(reader, 256, order=…)

Node g holds part g of the samples, as `readers.order.NodeLocal` deals them: in a cache (`readers.cached` with
`partition`), or in a staged copy with its source as fallback (`readers.stage` with `part`). The first process of each
node starts a server for that node; a read of a sample of another node's part asks its server, which reads through the
cache or the copy of its node. What a server does not answer, or answers with bytes that do not have the CRC32C of the
index, is read from the source (`cache.stores.neighbours`).

A server has a process of its own, which ends with the context or with the process that started it; where it was killed,
it is started again. `packer serve` is the same in the foreground, for nodes where nothing else runs.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from cache.errors import MissingExtraError, ServingError
from cache.launchers import job_name
from cache.messages import listed, plural
from cache.node import detect_ranks
from cache.remote.store import Patience
from cache.serving import Rendezvous, Server, ServerProcess, ServeTerms, own_address, read_token
from cache.stores import Buffer, Int64s, Shards, Store, StoreOver
from cache.stores.copied import Copied
from cache.stores.neighbours import Neighbours, RowOwners, ShardOwners
from cache.stores.remote import RemoteFiles
from readers.index import ABSENT, Columns
from readers.order import NodeLocal
from readers.packed import Checked
from readers.reader import Reader
from readers.staged_files import shard_owners

__all__ = ["PayloadRanges", "ShareOptions", "Shared", "share"]

_S = TypeVar("_S", Server, ServerProcess)
_LONGEST_PAUSE_SECONDS = 60.0
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class ShareOptions:
    """How nodes share what they hold. Raises ValueError.

    node, nodes: the number of this node and how many there are; default: as the launcher numbers them.
    serve: whether this process serves its node; None: the first of the node does. False where `packer serve` does.
    host: the address to listen at: a name or an address of this machine, or a network in which it has one, as
        "10.1.0.0/16", the same text for all nodes; None: the address of this machine's own name.
    port: 0 for a free one.
    certificate, key: PEM files, to speak TLS; clients trust the authorities in PACKER_HTTP_ROOT_CERTIFICATE.
    token: a file with the token, which is the user's alone; None: one is made in the folder.
    timeout_seconds: how long a node may take to answer before its samples are read from the source.
    wait_seconds: how long to wait until all nodes are there.
    """

    node: int | None = None
    nodes: int | None = None
    serve: bool | None = None
    host: str | None = None
    port: int = 0
    certificate: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    token: str | os.PathLike[str] | None = None
    timeout_seconds: float = 5.0
    wait_seconds: float = 60.0

    def __post_init__(self) -> None:
        if (self.node is None) != (self.nodes is None):
            raise ValueError(f"give both node and nodes or neither, not {self.node} and {self.nodes}")
        if self.node is not None and self.nodes is not None and not 0 <= self.node < self.nodes:
            raise ValueError(f"node {self.node} is outside the {self.nodes} nodes")
        if not 0 < self.timeout_seconds <= 3600 or not 0 <= self.wait_seconds <= 86400:
            raise ValueError("timeout_seconds is above 0 and at most 3600, wait_seconds from 0 to 86400")
        if self.key is not None and self.certificate is None:
            raise ValueError("key is that of a certificate: give both")

    def numbering(self) -> tuple[int, int, bool]:
        """(node, nodes, whether this process serves it)."""
        ranks = detect_ranks()
        serves = ranks.local_rank == 0 if self.serve is None else self.serve
        if self.node is not None and self.nodes is not None:
            return self.node, self.nodes, serves
        return ranks.node, ranks.nodes, serves


class Shared:
    """A context manager that serves this node, where this process is to, and returns the reader over all nodes."""

    def __init__(self, reader: Reader, folder: str | os.PathLike[str], options: ShareOptions) -> None:
        _check(reader)
        self.reader, self.folder, self.options = reader, folder, options
        self.node, self.nodes, self._serves = options.numbering()
        self._server: ServerProcess | Server | None = None
        self._owner = os.getpid()
        self._rendezvous: Rendezvous | None = None
        self._url = ""
        self._lock, self._ending = threading.Lock(), threading.Event()

    @property
    def url(self) -> str:
        """The address at which this process serves; "" where it does not."""
        return self._url

    def serve(self, start: Callable[[PayloadRanges, ServeTerms], _S]) -> _S:
        """Start the server of this node, in a process or here, and say where it is. Raises ServingError."""
        options, (rendezvous, token) = self.options, self._meet()
        host = own_address(options.host)
        certificate, key = (None if path is None else Path(path) for path in (options.certificate, options.key))
        prefix = _prefix(self.reader, self.node, self.nodes)
        terms = ServeTerms(prefix, token, host, options.port, certificate, key)
        self._server = server = start(PayloadRanges(self.reader), terms)
        shown = options.host if terms.scheme == "https" and options.host and "/" not in options.host else host
        self._url = f"{terms.scheme}://{f'[{shown}]' if ':' in shown else shown}:{server.port}"
        rendezvous.publish(self.node, self._url)
        return server

    def close(self) -> None:
        """End the server; other nodes then read this one's part from the source. Does nothing in a forked child."""
        if os.getpid() != self._owner:
            return
        self._ending.set()
        with self._lock:
            server, self._server = self._server, None
            if server is not None:
                if self._rendezvous is not None:
                    self._rendezvous.withdraw(self.node, self._url)
                server.close()
            self._url = ""

    def __enter__(self) -> Reader:
        if self.nodes == 1:
            return self.reader
        if importlib.util.find_spec("obstore") is None:
            raise MissingExtraError("obstore", "remote", "reading from other nodes")
        try:
            if self._serves and self._server is None:
                self._ending = threading.Event()
                watched = self.serve(ServerProcess), self._ending
                threading.Thread(target=self._watch, args=watched, name="packer-share", daemon=True).start()
            return self._open()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _watch(self, server: ServerProcess, ending: threading.Event) -> None:
        """Start the server again where its process was killed, after a pause that doubles if that comes soon again."""
        pause, since = 0.5, time.monotonic()
        while True:
            server.wait()
            server.close()
            lasted = time.monotonic() - since > 2 * _LONGEST_PAUSE_SECONDS
            pause = 1.0 if lasted else min(2 * pause, _LONGEST_PAUSE_SECONDS)
            if ending.wait(pause):
                return
            since = time.monotonic()
            with self._lock:
                if ending.is_set():
                    return
                try:
                    server = self.serve(ServerProcess)
                except ServingError as error:
                    outcome = str(error)
                else:
                    outcome = "it was started again"
            warnings.warn(f"the process that serves node {self.node} had ended: {outcome}", stacklevel=2)

    def _meet(self) -> tuple[Rendezvous, str]:
        """The folder of this set and job, and the token in it."""
        made = Rendezvous.make(self.folder, job_name(os.environ), _set_name(self.reader), self.nodes)
        self._rendezvous = made
        given = self.options.token
        return made, made.token() if given is None else read_token(Path(given))

    def _open(self) -> Reader:
        reader, options, (rendezvous, token) = self.reader, self.options, self._meet()
        missing = rendezvous.wait(options.wait_seconds)
        if missing:
            nodes = f"{plural(len(missing), 'node')} ({listed([str(node) for node in missing])})"
            warnings.warn(
                f"{rendezvous.path}: {nodes} of {self.nodes} have not said where they listen, so the source is read "
                f"for them until they do",
                stacklevel=4,
            )
        connect = _Connect(rendezvous, token, reader.table.columns, _set_name(reader), options.timeout_seconds)
        store = Neighbours(reader.store, self.node, _owners(reader, self.nodes), connect, options.timeout_seconds)
        return Reader(reader.table, store)


def share(reader: Reader, folder: str | os.PathLike[str], **options: Any) -> Shared:
    """Read what other nodes hold from them; a context manager that returns the reader to train with.

    reader: of this node: over a cache of its part of the samples, or a staged copy of its part with the source as
        fallback. All nodes share the same set, and samples as they are: a cache that converts images goes over the
        reader that this returns, and a selection is made of that.
    folder: of the file system that all nodes see, where they find each other; each job and set has its own below it.
    options: those of `ShareOptions`.

    With one node it returns `reader`. Raises ValueError, MissingExtraError, and on entering ServingError; warns where
    nodes are missing. Bytes travel unencrypted unless a certificate is given.
    """
    return Shared(reader, folder, ShareOptions(**options))


def _check(reader: Reader) -> None:
    """Raise ValueError for a reader that cannot be shared."""
    if reader.table.rows is not None:
        raise ValueError("share the whole reader, and select from what share returns: nodes own parts of the whole")
    if reader.table.forms or reader.store.for_decoding() is not reader.store:
        raise ValueError(
            "this reader's cache converts images, and nodes share them as they are: share the reader below it, and "
            "cache what share returns, as  readers.cached(shared, keep=…)"
        )
    if not reader.table.columns.has_checksums or reader.store.tracks_files:
        raise ValueError(
            f"{reader.table.title}: has no checksums, by which wrong bytes of another node would be noticed; pack it "
            f"with  packer convert"
        )


def _set_name(reader: Reader) -> str:
    return hashlib.blake2b(reader.fingerprint.encode(), digest_size=8).hexdigest()


def _prefix(reader: Reader, node: int, nodes: int) -> str:
    """Of the paths that a node serves: another set, or a job with other parts, meets a 404."""
    return f"{_set_name(reader)}-{nodes}-{node}"


def _owners(reader: Reader, nodes: int) -> RowOwners | ShardOwners:
    """Of a staged copy, which has whole shards, by shard; otherwise by sample."""
    columns, order = reader.table.columns, NodeLocal(len(reader), nodes)
    store = reader.store
    while isinstance(store, StoreOver) and not isinstance(store, Copied):
        store = store.source
    if isinstance(store, Copied):
        numbers = [columns.column("shard"), *map(columns.shard_column, columns.separate)]
        return ShardOwners(np.maximum(shard_owners(numbers, order, len(columns.shard_bytes)), 0))
    starts = [order.local_part(node).start for node in range(nodes)]
    return RowOwners(np.array([*starts, len(reader)], np.int64) * len(columns.fields))


@dataclass(frozen=True)
class _Connect:
    """Connects to the node of a number, for `Neighbours`."""

    rendezvous: Rendezvous
    token: str
    columns: Columns
    name: str
    timeout_seconds: float

    def __call__(self, node: int) -> Store | None:
        url = self.rendezvous.find(node)
        if url is None:
            return None
        url = replace(url, path=f"{self.name}-{self.rendezvous.nodes}-{node}", bearer=self.token)
        sizes = [int(size) for size in self.columns.shard_bytes]
        shards = Shards([str(number) for number in range(len(sizes))], sizes)
        store = RemoteFiles(url, shards, patience=Patience(self.timeout_seconds, 1), gap_bytes=0)
        return Checked(store, self.columns)


# --- what a node serves --------------------------------------------------------------------------------------------
class PayloadRanges:
    """The payloads of a reader as ranges of its shards, which are called "0", "1", …: `cache.serving.Ranges`.

    Only what payloads cover is served, and read by their rows, so that a cache finds them. Raises ServingError for
    other ranges.
    """

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def size(self, name: str) -> int | None:
        sizes = self.reader.table.columns.shard_bytes
        return int(sizes[int(name)]) if _NUMBER.fullmatch(name) and int(name) < len(sizes) else None

    def read(self, name: str, start: int, stop: int) -> Sequence[Buffer]:
        shard, at = int(name), start
        found: list[tuple[int, int, int, int]] = []
        while at < stop:
            payload = next((one for field in self._fields if (one := field.find(shard, at)) is not None), None)
            if payload is None:
                raise ServingError(f"shard {name}: no payload covers byte {at}")
            row, offset, length = payload
            found.append((row, shard, offset, length))
            at = offset + length
        read_one = self.reader.store.read_one  # seldom more than one, for which `read` would plan
        return [memoryview(read_one(*one))[max(0, start - one[2]) : stop - one[2]] for one in found]

    def close(self) -> None:
        self.reader.close()

    @cached_property
    def _fields(self) -> list[_Field]:
        columns = self.reader.table.columns
        return [_Field(columns, number) for number in range(len(columns.fields))]

    def __getstate__(self) -> dict[str, Any]:
        return {"reader": self.reader}


class _Field:
    """Where the payloads of one field are, by place. Without copies where they are stored in the order of the rows."""

    def __init__(self, columns: Columns, number: int) -> None:
        field = columns.fields[number]
        shard, offset = columns.shard_column(field), columns.field_column(field, "offset")
        length = columns.field_column(field, "length")
        self._width, self._number = len(columns.fields), number
        self._order: Int64s | None = None
        rises = (shard[1:] > shard[:-1]) | ((shard[1:] == shard[:-1]) & (offset[1:] >= offset[:-1]))
        if not (rises.all() and (offset != ABSENT).all()):
            self._order = np.lexsort((offset, shard))
            self._order = self._order[offset[self._order] != ABSENT]
            shard, offset, length = (column[self._order] for column in (shard, offset, length))
        self._offset, self._length = offset, length
        self._bounds = np.searchsorted(shard, np.arange(len(columns.shard_bytes) + 1))

    def find(self, shard: int, at: int) -> tuple[int, int, int] | None:
        """(row, offset, length) of the payload that covers a byte of a shard, the row as extents have it."""
        first, stop = int(self._bounds[shard]), int(self._bounds[shard + 1])
        place = first + int(np.searchsorted(self._offset[first:stop], np.uint64(at), side="right")) - 1
        if place < first or at >= int(self._offset[place]) + int(self._length[place]):
            return None
        row = place if self._order is None else int(self._order[place])
        return row * self._width + self._number, int(self._offset[place]), int(self._length[place])
