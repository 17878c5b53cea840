"""The server of the page: HTTP on 127.0.0.1, protected by a token, which is the first part of each path.

    GET /<token>/<path>[?query]     Host: 127.0.0.1, localhost or [::1], any port (an ssh tunnel may use another port)
    200, 202, 206, 304, 400, 403, 404, 405, 415, 416, 500, 503

Pages of other sites cannot read anything: they do not know the token, CORS is not allowed, and a Host other than the
above is refused, which prevents DNS rebinding. Browsers may not guess other media types. The page may not load anything
from elsewhere (except data from the server of an exported set), run other scripts or send forms. No browser policy
keeps a script from sending data by opening an address, so only scripts of this package run. Errors are JSON.
Connections, the size of a request and its time are limited, also without the token (`cache.serving`).

This server is for one person's browser on one machine. `cache.serving` serves many nodes: it sends only ranges, for a
token in a header, which an <img> cannot send.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import time
from http import HTTPStatus
from typing import NamedTuple, Protocol
from urllib.parse import parse_qs, unquote

from cache.serving import HttpServer, Limits, Request, http_date, listen
from packer.tools.view.answers import Answer, Query, error_answer

__all__ = ["Site", "ViewServer"]

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src {origins}; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
_HEADERS = {
    "Server": "packer",
    "X-Content-Type-Options": "nosniff",
    "X-DNS-Prefetch-Control": "off",
    "Referrer-Policy": "no-referrer",  # the address has the token
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}
_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE)
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_PIECE_BYTES = 256 << 10
_LIMITS = Limits(connections=128, head_bytes=32 << 10, idle_seconds=60.0, send_seconds=60.0)
_TOKEN_BYTES = 24
_MOST_FIELDS = 64


class Site(Protocol):
    """The content of a server. Several threads call it.

    page: the path of the page, ending with "/", or "". origins: other servers that the page may read.
    """

    page: str
    origins: tuple[str, ...]

    def answer(self, parts: list[str], query: Query) -> Answer: ...


class _Asked(NamedTuple):
    """A request with a valid token: the parts of the path below the token, and the query."""

    parts: list[str]
    query: Query


class ViewServer(HttpServer):
    """A server of a site, which runs until it is closed. Raises ServingError if it cannot listen.

    url: address of the page, with the token.
    """

    def __init__(self, site: Site, port: int = 0, limits: Limits = _LIMITS) -> None:
        self.site = site
        self.token = secrets.token_urlsafe(_TOKEN_BYTES)
        self._mark = secrets.token_hex(8)  # ETags are valid for this server only
        self.policy = _POLICY.format(origins=" ".join(("'self'", *site.origins)))
        super().__init__(listen("127.0.0.1", port, "leave port out"), limits, "packer-view")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/{self.token}/{self.site.page}"

    def _refusal(self) -> bytes:
        answer = error_answer(503, "Busy", "too many connections")
        return self._head(answer, 503, "", 0, answer.body.size, closes=True) + answer.body.read(0, answer.body.size)

    async def _answer(self, request: Request | None, writer: asyncio.StreamWriter) -> bool:
        parsed = self._asked(request)
        headers = request.headers if request is not None else {}
        closes = isinstance(parsed, Answer) or headers.get("connection", "").lower() == "close"
        async with self._answers:
            answer = parsed if isinstance(parsed, Answer) else await self._in_thread(self.site.answer, *parsed)
            start, stop, status = 0, answer.body.size, answer.status
            etag = self._etag(request.path) if request is not None and answer.kept and status == 200 else ""
            if etag and headers.get("if-none-match", "") == etag:
                status, stop = 304, 0
            elif status == 200 and (part := _range(headers, stop, etag)) is not None:
                start, stop = part
                status = 206 if start < stop else 416
            with self._within(writer, self._limits.send_seconds):
                writer.write(self._head(answer, status, etag, start, stop, closes))
                await writer.drain()
            if request is None or request.method != "HEAD":
                for first in range(start, stop, _PIECE_BYTES):
                    piece = await self._in_thread(answer.body.read, first, min(first + _PIECE_BYTES, stop))
                    with self._within(writer, self._limits.send_seconds):
                        writer.write(piece)
                        await writer.drain()
        return not closes

    def _asked(self, request: Request | None) -> Answer | _Asked:
        """The parts and query of a request, or the answer if it is refused."""
        if request is None:
            return error_answer(400, "BadRequest", "the request cannot be read")
        if not _HOST.fullmatch(request.headers.get("host", "")):
            return error_answer(403, "Forbidden", "this server answers to 127.0.0.1 and localhost only")
        if request.method not in ("GET", "HEAD"):
            return error_answer(405, "MethodNotAllowed", "only GET and HEAD are answered")
        token, slash, rest = request.path.partition("/")
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            return error_answer(404, "NotFound", "not found")
        if not slash:
            return error_answer(404, "NotFound", "the address ends with the token and a slash")
        try:
            path, _, text = rest.partition("?")
            query = parse_qs(text, keep_blank_values=True, max_num_fields=_MOST_FIELDS, errors="strict")
            return _Asked([unquote(part, errors="strict") for part in path.split("/")], query)
        except ValueError:
            return error_answer(400, "BadRequest", "the address cannot be read")

    def _head(self, answer: Answer, status: int, etag: str, start: int, stop: int, closes: bool) -> bytes:
        """The head of an answer with the bytes [start, stop) of its body."""
        headers = {**_HEADERS, "Date": http_date(int(time.time())), "Content-Security-Policy": self.policy}
        headers["Cache-Control"] = "private, max-age=3600, immutable" if etag else "no-store"
        if etag:
            headers["ETag"] = etag
        if answer.status == 200:
            headers["Accept-Ranges"] = "bytes"
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{answer.body.size}"
        if status == 416:
            headers["Content-Range"] = f"bytes */{answer.body.size}"
        if status != 304:
            headers |= {"Content-Type": answer.type, "Content-Length": str(stop - start)}
        if closes:
            headers["Connection"] = "close"
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{name}: {headers[name]}" for name in headers)]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def _etag(self, path: str) -> str:
        """The ETag of a path whose content does not change while this server runs."""
        return f'"{hashlib.blake2b((self._mark + path).encode(), digest_size=12).hexdigest()}"'


def _range(headers: dict[str, str], size: int, etag: str) -> tuple[int, int] | None:
    """The requested bytes [start, stop); None for all; start = stop if the range is outside."""
    match = _RANGE.fullmatch(headers.get("range", ""))
    if match is None or not (match[1] or match[2]) or headers.get("if-range", etag) != etag:
        return None
    if not match[1]:
        return max(0, size - int(match[2])), size
    start, stop = int(match[1]), min(size, int(match[2]) + 1) if match[2] else size
    return (start, stop) if start < stop else (0, 0)
