"""A server of byte ranges: HTTP/1.1, GET and HEAD, one range a request, for those who have the token.

    GET /<prefix>/<name>            Authorization: Bearer <token>      Range: bytes=<first>-<last>
    206, Content-Range, ETag        the bytes [first, last]

There are no lists, no paths and no bodies of requests: a name is a word that `Ranges` knows, or a 404. What cannot be
read is a 503 without a reason, and the client turns elsewhere. The connection of a request that is not understood, or
has not the token, is closed.

One thread waits for all connections; bytes are read by a few others, since that may take long. Everything is bounded:
connections, bytes of a request's head and of a range, answers at a time, and the seconds that a client may take to send
a request or to receive the answer. A connection has little time until its first request has shown the token.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import re
import resource
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

from cache.errors import PackerError, ServingError

__all__ = ["Limits", "Ranges", "ServeTerms", "Server", "ServerStats"]

_Buffer: TypeAlias = bytes | memoryview
_HEAD_BYTES = 8 << 10
_CLOSE_SECONDS = 1.0
_OTHER_FILES = 512  # shards, maps, what a program has
_REQUEST = re.compile(r"(GET|HEAD|[A-Z]{3,10}) /([!-~]*) HTTP/1\.[01]")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([ -~\t]*)")
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})?")
_ONCE = ("authorization", "range", "if-match")
_REASONS = {
    200: "OK",
    206: "Partial Content",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    412: "Precondition Failed",
    413: "Content Too Large",
    416: "Range Not Satisfiable",
    503: "Service Unavailable",
}
_KEEPS_OPEN = (200, 206, 404, 412, 413, 416, 503)


class Ranges(Protocol):
    """What is served: objects that have a name and a size. Several threads call it."""

    def size(self, name: str) -> int | None:
        """Bytes of an object; None where there is none of this name."""

    def read(self, name: str, start: int, stop: int) -> Sequence[_Buffer]:
        """Bytes [start, stop) of an object, which are inside it, in pieces. Raises PackerError or OSError."""

    def close(self) -> None:
        """Close what is open; for those who opened it, as a server does not."""


@dataclass(frozen=True)
class Limits:
    """connections: open at a time, or as many as this process may have files open.
    answers: read or sent at a time.
    threads: that read.

    range_bytes: of one request.
    first_seconds: for the first request of a connection, which shows the token. idle_seconds: for each further one.
    send_seconds: for a client to receive an answer.
    """

    connections: int = 16384
    answers: int = 64
    threads: int = 16
    range_bytes: int = 64 << 20
    first_seconds: float = 10.0
    idle_seconds: float = 120.0
    send_seconds: float = 30.0


@dataclass(frozen=True)
class ServeTerms:
    """What a server is started with.

    prefix: the first part of each path: it names the set and the node, so that no other's bytes are taken for these.
    host: the address of this machine to listen at. port: 0 for a free one.
    certificate, key: PEM files, to speak TLS.
    """

    prefix: str
    token: str = field(repr=False)
    host: str
    port: int = 0
    certificate: Path | None = None
    key: Path | None = None
    limits: Limits = Limits()

    @property
    def scheme(self) -> str:
        return "http" if self.certificate is None else "https"


@dataclass(frozen=True)
class ServerStats:
    """Answers with bytes, their bytes, and requests that got none. refused: for the token, or not understood."""

    answers: int = 0
    sent_bytes: int = 0
    missing: int = 0
    refused: int = 0


class _Request(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]


class _Answer(NamedTuple):
    """status; the object's name and size, and the range of it that is sent, where the status is 200 or 206."""

    status: int
    name: str = ""
    size: int = 0
    start: int = 0
    stop: int = 0


class Server:
    """Serves from a thread of its own until it is closed. Raises ServingError where it cannot listen.

    port: at which it listens.
    """

    def __init__(self, ranges: Ranges, terms: ServeTerms) -> None:
        self.ranges, self.terms = ranges, terms
        self.stats = ServerStats()
        self._most = min(terms.limits.connections, _files_to_open())
        self._tls = _tls(terms)
        self._socket = _listen(terms)
        self.port: int = self._socket.getsockname()[1]
        self._pool = ThreadPoolExecutor(terms.limits.threads, thread_name_prefix="packer-serve-read")
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._answers = asyncio.Semaphore(terms.limits.answers)
        self._connections: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._run, name="packer-serve", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End: connections are closed, those in the middle of an answer too."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- connections --------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._main())
        finally:
            self._loop.close()
            self._pool.shutdown(wait=False, cancel_futures=True)

    async def _main(self) -> None:
        patience: dict[str, Any] = {"ssl_handshake_timeout": self.terms.limits.first_seconds} if self._tls else {}
        server = await asyncio.start_server(
            self._connected, sock=self._socket, limit=_HEAD_BYTES, ssl=self._tls, backlog=1024, **patience
        )
        await self._stopping.wait()
        server.close()
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:  # those of connections accepted just now, too
            for writer in list(self._connections):
                writer.transport.abort()
            _, waiting = await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)
            for task in waiting:  # for a slow read
                task.cancel()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        limits = self.terms.limits
        self._connections.add(writer)
        try:
            goes_on = len(self._connections) <= self._most
            if not goes_on:
                writer.write(self._head(_Answer(503), closes=True))
            seconds = limits.first_seconds
            while goes_on:
                with self._within(writer, seconds):
                    head = await reader.readuntil(b"\r\n\r\n")
                goes_on = await self._answer(head, writer)
                seconds = limits.idle_seconds
        except (OSError, EOFError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass  # the client has gone, or sends no request; or this server is being closed
        finally:
            writer.close()  # what was answered is still sent
            with suppress(OSError), self._within(writer, limits.send_seconds):
                await writer.wait_closed()
            self._connections.discard(writer)

    @contextmanager
    def _within(self, writer: asyncio.StreamWriter, seconds: float) -> Iterator[None]:
        """Abort the connection where the block takes longer."""
        timer = self._loop.call_later(seconds, writer.transport.abort)
        try:
            yield
        finally:
            timer.cancel()

    # --- requests -----------------------------------------------------------------------------------------------
    async def _answer(self, head: bytes, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; whether the connection may bring another."""
        request = _parsed(head)
        answer = _Answer(400) if request is None else self._decide(request)
        with_body = request is not None and request.method == "GET" and answer.status == 206
        async with self._answers:
            pieces: Sequence[_Buffer] = ()
            if with_body:
                try:
                    pieces = await self._loop.run_in_executor(
                        self._pool, self.ranges.read, answer.name, answer.start, answer.stop
                    )
                except (PackerError, OSError, ValueError, IndexError):
                    answer = _Answer(503)
                if answer.status == 206 and sum(map(len, pieces)) != answer.stop - answer.start:
                    answer, pieces = _Answer(503), ()
            closes = answer.status not in _KEEPS_OPEN
            self._count(answer)
            with self._within(writer, self.terms.limits.send_seconds):
                writer.writelines([self._head(answer, closes), *pieces])
                await writer.drain()
        return not closes

    def _decide(self, request: _Request) -> _Answer:
        """The answer to a request, from its head alone."""
        sent = request.headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(sent, f"Bearer {self.terms.token}".encode("latin-1")):
            return _Answer(401)
        if request.method not in ("GET", "HEAD"):
            return _Answer(405)
        prefix, _, name = request.path.partition("/")
        size = self.ranges.size(name) if prefix == self.terms.prefix else None
        if size is None:
            return _Answer(404)
        if request.headers.get("if-match", "*") not in ("*", self._etag(name, size)):
            return _Answer(412)
        if request.method == "HEAD":
            return _Answer(200, name, size, 0, size)
        found = _RANGE.fullmatch(request.headers.get("range", ""))
        if found is None:
            return _Answer(413)  # whole objects are not sent
        start, stop = int(found[1]), min(size, int(found[2] or size) + 1)
        if start >= stop:
            return _Answer(416, name, size)
        return _Answer(206, name, size, start, stop) if stop - start <= self.terms.limits.range_bytes else _Answer(413)

    def _head(self, answer: _Answer, closes: bool) -> bytes:
        lines = [f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}", f"Date: {_date(int(time.time()))}"]
        lines.append(f"Content-Length: {answer.stop - answer.start}")
        if answer.status == 206:
            lines.append(f"Content-Range: bytes {answer.start}-{answer.stop - 1}/{answer.size}")
        if answer.status == 416:
            lines.append(f"Content-Range: bytes */{answer.size}")
        if answer.status in (200, 206):
            lines += [f"ETag: {self._etag(answer.name, answer.size)}", "Accept-Ranges: bytes"]
            lines.append("Content-Type: application/octet-stream")
        if answer.status == 401:
            lines.append("WWW-Authenticate: Bearer")
        if closes:
            lines.append("Connection: close")
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def _etag(self, name: str, size: int) -> str:
        """The same in every process that serves this set, also after a restart: the prefix names its state."""
        return f'"{self.terms.prefix.rpartition("-")[0]}-{name}-{size:x}"'

    def _count(self, answer: _Answer) -> None:
        old = self.stats
        sent = answer.stop - answer.start if answer.status == 206 else 0
        self.stats = ServerStats(
            old.answers + (answer.status in (200, 206)),
            old.sent_bytes + sent,
            old.missing + (answer.status in (404, 412, 413, 416, 503)),
            old.refused + (answer.status in (400, 401, 405)),
        )


@lru_cache(1)
def _date(now: int) -> str:
    return formatdate(now, usegmt=True)


def _parsed(head: bytes) -> _Request | None:
    """The head of a request, up to its empty line; None for one that is wrong, or announces a body."""
    first, *rest = head[:-4].decode("latin-1").split("\r\n")
    request = _REQUEST.fullmatch(first)
    headers: dict[str, str] = {}
    for line in rest:
        found = _HEADER.fullmatch(line)
        if found is None or (found[1].lower() in headers and found[1].lower() in _ONCE):
            return None
        headers[found[1].lower()] = found[2].strip(" \t")
    if request is None or "transfer-encoding" in headers or headers.get("content-length", "0") != "0":
        return None
    return _Request(request[1], request[2], headers)


def _files_to_open() -> int:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if files == resource.RLIM_INFINITY else max(files - _OTHER_FILES, files // 2)


def _listen(terms: ServeTerms) -> socket.socket:
    family = socket.AF_INET6 if ":" in terms.host else socket.AF_INET
    try:
        return socket.create_server((terms.host, terms.port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        number = getattr(error, "errno", None)
        reason = os.strerror(number) if number and number > 0 else error
        raise ServingError(
            f"{terms.host}, port {terms.port}: cannot listen there: {reason}; name an address of this machine with "
            f"host=, and a free port or 0 with port="
        ) from error


def _tls(terms: ServeTerms) -> ssl.SSLContext | None:
    if terms.certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(terms.certificate, terms.key)
    except (OSError, ssl.SSLError) as error:
        raise ServingError(
            f"{terms.certificate}: not a certificate and key in PEM files that can be read: {error.strerror or error}"
        ) from error
    return context
