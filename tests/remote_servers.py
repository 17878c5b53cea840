"""Servers on loopback for the tests of remote sets: an S3 (moto), a web server with ranges, and a proxy that injects
faults on the way to either.

The S3 runs in a separate process, because its packages emit warnings, which are errors in the tests. No request leaves
127.0.0.1.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import re
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_MOTO = """
import ssl, sys, threading
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
context = None
if len(sys.argv) > 1:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(sys.argv[1])
app = DomainDispatcherApplication(create_backend_app)
server = make_server("127.0.0.1", 0, app, threaded=True, ssl_context=context)
print("127.0.0.1", server.port, flush=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
sys.stdin.read()
"""


@contextlib.contextmanager
def s3_server(certificate: Path | None = None) -> Iterator[tuple[str, int]]:
    """An S3-compatible server, which ends with this process. certificate: a PEM file of certificate and key, for
    TLS."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _MOTO, *([] if certificate is None else [str(certificate)])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        assert process.stdin is not None and process.stdout is not None
        try:
            host, port = process.stdout.readline().split()
            yield host, int(port)
        finally:
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def make_bucket(where: tuple[str, int], name: str) -> None:
    connection = http.client.HTTPConnection(*where, timeout=300)
    connection.request("PUT", f"/{name}")
    assert connection.getresponse().status == 200
    connection.close()


@dataclass
class Fault:
    """A fault of requests whose "METHOD path" matches `where`, `times` times, after `skip` good ones.

    kind: "slow" (seconds before the answer), "stall" (half of the body, then silence for `seconds`), "status", "reset"
    (instead of an answer), "reset-body" (in the middle), "truncate" (half of the body, then the end), "flood" (a body
    of 1 GiB under otherwise correct headers; `sent` counts the bytes sent).
    """

    kind: str
    where: str = r"^GET .*train-"
    times: int = 1
    skip: int = 0
    status: int = 500
    seconds: float = 0.0
    body: bytes = b"<Error><Code>Injected</Code></Error>"
    sent: int = 0


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128  # with the 5 of socketserver a client with many connections waits a second to reconnect

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors: clients disconnect in these tests."""


class Proxy:
    """Forwards requests after `delay` seconds and records them in `log` as "METHOD path range"."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self.upstream, self.delay = upstream, 0.0
        self.faults: list[Fault] = []
        self.log: list[str] = []
        self.lock = threading.Lock()
        handler = type("Handler", (_ProxyHandler,), {"proxy": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.host, self.port = self._server.server_address[:2]
        self.url = f"http://{self.host}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def gets(self, pattern: str = "train-") -> list[str]:
        """The GET requests for objects whose path matches."""
        return [line for line in self.log if line.startswith("GET") and re.search(pattern, line)]

    def heal(self) -> None:
        self.faults.clear()
        self.log.clear()
        self.delay = 0.0

    def fault_for(self, request: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.where, request):
                    if fault.skip > 0:
                        fault.skip -= 1
                        return None
                    fault.times -= 1
                    return fault
        return None

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _ProxyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    proxy: Proxy

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing."""

    def _any(self) -> None:
        proxy, request = self.proxy, f"{self.command} {self.path}"
        with proxy.lock:
            proxy.log.append(f"{request} {self.headers.get('Range', '')}".strip())
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = proxy.fault_for(request)
        time.sleep(proxy.delay + (fault.seconds if fault is not None and fault.kind == "slow" else 0.0))
        if fault is not None and fault.kind == "status":
            return self._answer(fault.status, [("Content-Type", "application/xml")], fault.body)
        if fault is not None and fault.kind == "reset":
            return self._reset()
        status, headers, data = self._upstream(body)
        if fault is None or fault.kind == "slow":
            return self._answer(status, headers, data)
        if fault.kind == "flood":
            return self._flood(fault, status, headers)
        self._start(status, headers, len(data))
        self.wfile.write(data[: len(data) // 2])
        self.wfile.flush()
        if fault.kind == "stall":
            time.sleep(fault.seconds)
        if fault.kind == "reset-body":
            return self._reset()
        self.close_connection = True
        return None

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _any

    def _upstream(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(*self.proxy.upstream, timeout=300)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() != "connection":
                    connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def _start(self, status: int, headers: list[tuple[str, str]], length: int) -> None:
        self.send_response_only(status)
        told = {name.lower() for name, _ in headers}
        for name, value in headers:
            if name.lower() not in ("transfer-encoding", "connection", "date"):
                self.send_header(name, value)
        if "content-length" not in told:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes) -> None:
        self._start(status, headers, len(data))
        if self.command != "HEAD":
            self.wfile.write(data)

    def _flood(self, fault: Fault, status: int, headers: list[tuple[str, str]]) -> None:
        honest = [(name, value) for name, value in headers if name.lower() != "content-length"]
        self._start(status, honest, 1 << 30)
        self.close_connection = True
        with contextlib.suppress(OSError):
            for _ in range(1024):
                self.wfile.write(bytes(1 << 20))
                fault.sent += 1 << 20

    def _reset(self) -> None:
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()


class FileServer:
    """A plain web server over a folder: GET and HEAD, ranges, ETags if wanted; no listings, no conditions. PUT, DELETE
    and MKCOL of WebDAV, where `writable`."""

    def __init__(
        self,
        root: Path,
        *,
        etags: bool = True,
        ranges: bool = True,
        password: str = "",
        writable: bool = False,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        options = {"root": root, "etags": etags, "ranges": ranges, "login": password, "writable": writable}
        handler = type("Handler", (_FileHandler,), options)
        self._server = _Server(("127.0.0.1", 0), handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.address: tuple[str, int] = self._server.server_address[:2]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _FileHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    root: Path
    etags: bool
    ranges: bool
    login: str
    writable: bool

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing."""

    def _any(self) -> None:
        path = self.root / self.path.lstrip("/")
        if self.login and self.headers.get("Authorization") != self.login:
            return self._send(401, b"", {"WWW-Authenticate": "Basic"})
        if not path.is_file():
            return self._send(404, b"not found", {})
        data = path.read_bytes()
        more = {"Last-Modified": self.date_time_string(int(path.stat().st_mtime)), "Accept-Ranges": "bytes"}
        if self.etags:
            more["ETag"] = f'"{hashlib.md5(data).hexdigest()}"'
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if match is None or not self.ranges:
            return self._send(200, data, more)
        start, stop = int(match[1]), min(len(data), int(match[2] or len(data)) + 1)
        if start >= len(data):
            return self._send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
        return self._send(206, data[start:stop], {**more, "Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"})

    do_GET = do_HEAD = _any

    def _write(self) -> None:
        path, data = self.root / self.path.strip("/"), self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if not self.writable:
            return self._send(405, b"", {})
        if self.command == "DELETE":
            there = path.is_file()
            path.unlink(missing_ok=True)
            return self._send(204 if there else 404, b"", {})
        if not path.parent.is_dir():
            return self._send(409, b"", {})
        if self.command == "PUT":
            path.write_bytes(data)
        else:
            path.mkdir(exist_ok=True)
        return self._send(201, b"", {})

    do_PUT = do_DELETE = do_MKCOL = _write

    def _send(self, status: int, data: bytes, more: dict[str, str]) -> None:
        self.send_response_only(status)
        for name, value in more.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)
