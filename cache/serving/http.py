"""A server of GET and HEAD over HTTP/1.1, in which everything is bounded.

One thread waits for all connections; what is slow is done by a few others. Bounded are the connections, the bytes of a
request's head, answers at a time, and the seconds that a client may take to send a request or to receive the answer. A
connection has little time until its first request. Requests have no bodies.

Who answers is a subclass: `cache.serving.server` for other nodes, the server of `packer view` for a browser.
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
import socket
import ssl
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import formatdate
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from cache.errors import ServingError

_T = TypeVar("_T")
_CLOSE_SECONDS = 1.0
_OTHER_FILES = 512  # shards, maps, what a program has
_REQUEST = re.compile(r"(GET|HEAD|[A-Z]{3,10}) /([!-~]*) HTTP/1\.[01]")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([ -~\t]*)")
_ONCE = ("authorization", "host", "if-match", "if-none-match", "if-range", "range")


@dataclass(frozen=True)
class Limits:
    """connections: open at a time, or as many as this process may have files open.
    answers: read or sent at a time.
    threads: that read.

    head_bytes: of a request. range_bytes: of the answer to one, where ranges alone are sent.
    first_seconds: for the first request of a connection, which shows the token. idle_seconds: for each further one.
    send_seconds: for a client to receive an answer, or a piece of it.
    """

    connections: int = 16384
    answers: int = 64
    threads: int = 16
    head_bytes: int = 8 << 10
    range_bytes: int = 64 << 20
    first_seconds: float = 10.0
    idle_seconds: float = 120.0
    send_seconds: float = 30.0


class Request(NamedTuple):
    """path: without the slash at its begin. headers: by their names in lower case."""

    method: str
    path: str
    headers: dict[str, str]


class HttpServer(ABC):
    """Serves from a thread of its own until it is closed; a subclass answers.

    port: at which it listens.
    """

    def __init__(self, listening: socket.socket, limits: Limits, name: str, tls: ssl.SSLContext | None = None) -> None:
        self._socket, self._limits, self._tls = listening, limits, tls
        self._most = min(limits.connections, _files_to_open())
        self.port: int = listening.getsockname()[1]
        self._pool = ThreadPoolExecutor(limits.threads, thread_name_prefix=f"{name}-read")
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._answers = asyncio.Semaphore(limits.answers)
        self._connections: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @abstractmethod
    async def _answer(self, request: Request | None, writer: asyncio.StreamWriter) -> bool:
        """Answer one request, None for what is none; whether the connection may bring another."""

    @abstractmethod
    def _refusal(self) -> bytes:
        """The answer to a connection more than there may be."""

    def close(self) -> None:
        """End: connections are closed, those in the middle of an answer too. Does nothing the second time."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()

    def __enter__(self: _T) -> _T:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def _in_thread(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """The result of work that may take long."""
        return await self._loop.run_in_executor(self._pool, work, *arguments)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._main())
        finally:
            self._loop.close()
            self._pool.shutdown(wait=False, cancel_futures=True)

    async def _main(self) -> None:
        patience: dict[str, Any] = {"ssl_handshake_timeout": self._limits.first_seconds} if self._tls else {}
        server = await asyncio.start_server(
            self._connected, sock=self._socket, limit=self._limits.head_bytes, ssl=self._tls, backlog=1024, **patience
        )
        await self._stopping.wait()
        server.close()
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:  # those of connections accepted just now, too
            for writer in list(self._connections):
                writer.transport.abort()
            _, waiting = await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)
            for task in waiting:  # for a slow read
                task.cancel()
        for writer in self._connections:  # of tasks that were cancelled while they closed theirs
            writer.transport.abort()
        await asyncio.sleep(0)  # in which transports close their sockets

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        limits = self._limits
        self._connections.add(writer)
        try:
            goes_on = len(self._connections) <= self._most
            if not goes_on:
                writer.write(self._refusal())
            seconds = limits.first_seconds
            while goes_on:
                with self._within(writer, seconds):
                    head = await reader.readuntil(b"\r\n\r\n")
                goes_on = await self._answer(_parsed(head), writer)
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


@lru_cache(1)
def http_date(now: int) -> str:
    """A time as headers have it."""
    return formatdate(now, usegmt=True)


def _parsed(head: bytes) -> Request | None:
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
    return Request(request[1], request[2], headers)


def _files_to_open() -> int:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if files == resource.RLIM_INFINITY else max(files - _OTHER_FILES, files // 2)


def listen(host: str, port: int, advice: str) -> socket.socket:
    """A socket that listens at an address of this machine. Raises ServingError, which ends with `advice`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        number = getattr(error, "errno", None)
        reason = os.strerror(number) if number and number > 0 else error
        raise ServingError(f"{host}, port {port}: cannot listen there: {reason}; {advice}") from error
