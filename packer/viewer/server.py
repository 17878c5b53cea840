"""The server of the page: HTTP on 127.0.0.1, for those who have the token, which is the first part of each path.

    GET /<token>/<path>[?query]     Host: 127.0.0.1 or localhost, any port (an ssh tunnel has its own)
    200, 206, 304, 400, 403, 404, 405, 415, 416

A page of another site cannot read anything: it does not know the token, and is not allowed to (no CORS); under a name
that leads here (DNS rebinding) its Host is refused. What is sent is never taken for another type than it says, and the
page may load nothing from elsewhere. Errors are JSON.

This is a browser's server for one person on one machine. `cache.serving` is the one for many nodes: it sends ranges
alone, for a token in a header, which an <img> cannot send.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import threading
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from urllib.parse import parse_qs, unquote, urlsplit

from cache.errors import ServingError
from packer.viewer.answers import Answer, Query, error_answer

__all__ = ["Site", "ViewServer"]

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src {origins}; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # the address has the token
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}
_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE)
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_PIECE_BYTES = 1 << 20
_MOST_PATH = 16 << 10
_POLL_SECONDS = 0.1
_IDLE_SECONDS = 60
_TOKEN_BYTES = 24
_MOST_FIELDS = 64


class Site(Protocol):
    """What is served. Several threads call it.

    page: the path of the page, ending with "/", or "". origins: other servers that it may read.
    """

    page: str
    origins: tuple[str, ...]

    def answer(self, parts: list[str], query: Query) -> Answer: ...


class ViewServer:
    """Serves until it is closed. Raises ServingError where it cannot listen.

    url: of the page, with the token.
    """

    def __init__(self, site: Site, port: int = 0) -> None:
        self.site = site
        self.token = secrets.token_urlsafe(_TOKEN_BYTES)
        self._mark = secrets.token_hex(8)  # what is the same for this server may be another thing for the next
        try:
            self._server = _Server(("127.0.0.1", port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ServingError(f"127.0.0.1, port {port}: cannot listen there: {reason}; leave port out") from error
        self._server.owner = self
        self.policy = _POLICY.format(origins=" ".join(("'self'", *site.origins)))
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name="packer-view", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/{self.token}/{self.site.page}"

    def close(self) -> None:
        """Stop listening. Answers under way are not waited for."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> ViewServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def etag(self, path: str) -> str:
        """Of what is the same for as long as this server runs."""
        return f'"{hashlib.blake2b((self._mark + path).encode("utf-8", "replace"), digest_size=12).hexdigest()}"'


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 128
    owner: ViewServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away is not worth a traceback."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_SECONDS
    disable_nagle_algorithm = True  # or each answer waits for 40 ms
    wbufsize = 1 << 16
    server: _Server

    def version_string(self) -> str:
        return "packer"

    def log_message(self, format: str, *arguments: Any) -> None:
        """Addresses have the token: nothing is written."""

    def do_GET(self) -> None:
        self._respond(with_body=True)

    def do_HEAD(self) -> None:
        self._respond(with_body=False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):  # every other method
            return self._refuse_method
        raise AttributeError(name)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Of a request that is not HTTP."""
        self.close_connection = True
        self._send(error_answer(code, "BadRequest", HTTPStatus(code).phrase), with_body=True)

    def _refuse_method(self) -> None:
        self.close_connection = True  # a body may follow
        self._send(error_answer(405, "MethodNotAllowed", "only GET and HEAD are answered"), with_body=True)

    def _respond(self, with_body: bool) -> None:
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self.close_connection = True
        answer = self._decide()
        with suppress(ConnectionError, TimeoutError):
            self._send(answer, with_body)

    def _decide(self) -> Answer:
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not _HOST.fullmatch(hosts[0].strip()):
            return error_answer(403, "Forbidden", "this server answers to 127.0.0.1 and localhost only")
        try:
            address = urlsplit(self.path)
            token, slash, rest = address.path.removeprefix("/").partition("/")
            given = token.encode("utf-8", "surrogateescape")
        except ValueError:
            return error_answer(400, "BadRequest", "the address cannot be read")
        if not hmac.compare_digest(given, self.server.owner.token.encode()):
            return error_answer(404, "NotFound", "there is nothing here")
        if not slash or len(self.path) > _MOST_PATH:
            return error_answer(404, "NotFound", "the address ends with the token and a slash")
        try:
            query = parse_qs(address.query, keep_blank_values=True, max_num_fields=_MOST_FIELDS, errors="strict")
            parts = [unquote(part, errors="strict") for part in rest.split("/")]
        except ValueError:
            return error_answer(400, "BadRequest", "the address cannot be read")
        return self.server.owner.site.answer(parts, query)

    def _send(self, answer: Answer, with_body: bool) -> None:
        size = answer.body.size
        start, stop, status = 0, size, answer.status
        etag = self.server.owner.etag(self.path) if answer.kept and status == 200 else ""
        if etag and self.headers.get("If-None-Match", "") == etag:
            status, stop = 304, 0
        elif status == 200 and (asked := self._range(size, etag)) is not None:
            start, stop = asked
            status = 206 if start < stop else 416
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Security-Policy", self.server.owner.policy)
        self.send_header("Cache-Control", "private, max-age=3600, immutable" if etag else "no-store")
        if etag:
            self.send_header("ETag", etag)
        if answer.status == 200:
            self.send_header("Accept-Ranges", "bytes")
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        if status == 416:
            self.send_header("Content-Range", f"bytes */{size}")
            start = stop = 0
        if status != 304:
            self.send_header("Content-Type", answer.type)
            self.send_header("Content-Length", str(stop - start))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if with_body and status != 304:
            for first in range(start, stop, _PIECE_BYTES):
                self.wfile.write(answer.body.read(first, min(first + _PIECE_BYTES, stop)))

    def _range(self, size: int, etag: str) -> tuple[int, int] | None:
        """The bytes [start, stop) that are asked for; None for all; start = stop for bytes that are not there."""
        found = _RANGE.fullmatch(self.headers.get("Range", ""))
        if found is None or not (found[1] or found[2]) or self.headers.get("If-Range", etag) != etag:
            return None
        if not found[1]:
            return max(0, size - int(found[2])), size
        start, stop = int(found[1]), min(size, int(found[2]) + 1) if found[2] else size
        return (start, stop) if start < stop else (0, 0)
