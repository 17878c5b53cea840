"""A server of byte ranges: HTTP/1.1, GET and HEAD, one range a request, for those who have the token.

    GET /<prefix>/<name>            Authorization: Bearer <token>      Range: bytes=<first>-<last>
    206, Content-Range, ETag        the bytes [first, last]

There are no lists, no paths and no bodies of requests: a name is a word that `Ranges` knows, or a 404. What cannot be
read is a 503 without a reason, and the client turns elsewhere. The connection of a request that is not understood, or
has not the token, is closed.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

from cache.errors import PackerError, ServingError
from cache.serving.http import HttpServer, Limits, Request, http_date, listen

__all__ = ["Ranges", "ServeTerms", "Server", "ServerStats"]

_Buffer: TypeAlias = bytes | memoryview
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})?")
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
    limits: Limits = field(default_factory=Limits)

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


class _Answer(NamedTuple):
    """status; the object's name and size, and the range of it that is sent, where the status is 200 or 206."""

    status: int
    name: str = ""
    size: int = 0
    start: int = 0
    stop: int = 0


class Server(HttpServer):
    """Serves until it is closed. Raises ServingError where it cannot listen."""

    def __init__(self, ranges: Ranges, terms: ServeTerms) -> None:
        self.ranges, self.terms = ranges, terms
        self.stats = ServerStats()
        tls = _tls(terms)
        advice = "name an address of this machine with host=, and a free port or 0 with port="
        super().__init__(listen(terms.host, terms.port, advice), terms.limits, "packer-serve", tls)

    def _refusal(self) -> bytes:
        return self._head(_Answer(503), closes=True)

    async def _answer(self, request: Request | None, writer: asyncio.StreamWriter) -> bool:
        answer = _Answer(400) if request is None else self._decide(request)
        with_body = request is not None and request.method == "GET" and answer.status == 206
        async with self._answers:
            pieces: Sequence[_Buffer] = ()
            if with_body:
                try:
                    pieces = await self._in_thread(self.ranges.read, answer.name, answer.start, answer.stop)
                except (PackerError, OSError, ValueError, IndexError):
                    answer = _Answer(503)
                if answer.status == 206 and sum(map(len, pieces)) != answer.stop - answer.start:
                    answer, pieces = _Answer(503), ()
            closes = answer.status not in _KEEPS_OPEN
            self._count(answer)
            with self._within(writer, self._limits.send_seconds):
                writer.writelines([self._head(answer, closes), *pieces])
                await writer.drain()
        return not closes

    def _decide(self, request: Request) -> _Answer:
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
        lines = [f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}", f"Date: {http_date(int(time.time()))}"]
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
