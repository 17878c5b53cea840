"""Access to the server of the page: tokens, hosts, ranges, methods, and its end."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from conftest import make_jpeg, tree_of
from suites.staging import wait_for
from view_client import Client

import packer
from cache.errors import ServingError, SourceError, UnknownNameError
from cache.serving import Limits
from packer.tools.view.answers import Answer
from packer.tools.view.server import ViewServer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tree_of(tmp_path_factory.mktemp("few") / "few", {f"a/{i}.jpg": make_jpeg(i) for i in range(3)})


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[Client]:
    with packer.view(folder) as viewing, Client(viewing.url) as client:
        yield client


@pytest.mark.parametrize(
    "path",
    ["/view.json", "/{reversed}/view.json", "/{shorter}/view.json", "/{token}x/view.json", "/%C3%A9/", "/{token}"],
)
def test_without_the_token_nothing_is_served(client: Client, path: str) -> None:
    token = client.base.strip("/")
    reply = client.ask(path.format(token=token, reversed=token[::-1], shorter=token[:-1]))
    assert reply.status == 404 and b"samples" not in reply.body and token.encode() not in reply.body


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1:80", 200), ("localhost:9999", 200), ("LOCALHOST", 200), ("evil.example:80", 403),
     ("127.0.0.1.evil.example", 403), ("localhost.", 403), ("", 403)],
)  # fmt: skip
def test_under_another_host_name_nothing_is_served(client: Client, host: str, status: int) -> None:
    """An ssh tunnel has another port."""
    assert client.get("view.json", Host=host).status == status


def test_two_host_names_are_refused(folder: Path) -> None:
    with packer.view(folder) as viewing, socket.create_connection(("127.0.0.1", viewing.port), 10) as line:
        path = urlsplit(viewing.url).path
        line.sendall(f"GET {path}view.json HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n".encode())
        assert line.recv(4096).startswith(b"HTTP/1.1 400")


def test_connections_are_limited_and_take_no_threads(folder: Path) -> None:
    """Connections over the limit get an error, and the others are still answered."""
    with packer.view(folder) as viewing, ExitStack() as open_ones:
        with Client(viewing.url) as client:
            assert client.get("view.json").status == 200  # starts the threads that an answer takes
            threads = threading.active_count()
            lines = [socket.create_connection(("127.0.0.1", viewing.port), 30) for _ in range(300)]
            for line in lines:
                open_ones.enter_context(line)
            readable = select.select(lines, [], [], 30)[0]
            while len(readable) < 300 - 127:
                readable = select.select(lines, [], [], 30)[0]
            assert threading.active_count() == threads and client.get("view.json").status == 200
        assert len(readable) == 300 - 127 and all(line.recv(12) == b"HTTP/1.1 503" for line in readable)


def test_a_request_is_limited_in_bytes_and_in_time(folder: Path) -> None:
    class Nothing:
        page, origins = "", ()

        def answer(self, parts: list[str], query: Any) -> Answer:
            return Answer(200)

    for limits, sent in (
        (Limits(first_seconds=600), b"GET / HTTP/1.1\r\nX: " + b"x" * (1 << 20)),
        (Limits(first_seconds=0.1), b"GET / HTTP/1.1\r\nHost: local"),
        (Limits(first_seconds=0.1), b""),
    ):
        with (
            ViewServer(Nothing(), limits=limits) as server,
            socket.create_connection(("127.0.0.1", server.port), 60) as line,
            suppress(ConnectionError),  # once it is closed
        ):
            line.sendall(sent)
            assert line.recv(1) == b""


def test_headers_of_every_answer(client: Client) -> None:
    for path, kind in (
        ("", "text/html; charset=utf-8"),
        ("main.js", "text/javascript; charset=utf-8"),
        ("view.json", "application/json"),
        ("sample/train/0/image", "image/jpeg"),
        ("column/train/label.npy", "application/octet-stream"),
        ("nothing", "application/json"),
    ):
        headers = client.get(path).headers
        assert headers["content-type"] == kind
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert not [name for name in headers if name.startswith("access-control")]
        assert "python" not in headers["server"].lower()


@pytest.mark.parametrize("path", [
    "../view.json", "..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/etc/passwd", "sample/train/0/../0/image", "column",
    "column/train/label", "column/nothing/label.npy", "order/train/nothing.json", "order/train/class.txt", "sample",
    "sample/train/3.json", "sample/train/-1.json", "sample/train/0/mask", "sample/train/0/image/more", "thumb/train/9",
    "index.html/..", ".gitkeep", "%ff%fe", "view.json/", "sample/train/00000000000000000000.json",
])  # fmt: skip
def test_missing_paths_are_not_found(client: Client, path: str) -> None:
    assert client.get(path).status in (400, 404)


def test_requests_cannot_change_anything(folder: Path) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE", "HACK"):
        with packer.view(folder) as viewing, Client(viewing.url) as client:
            reply = client.ask(f"{client.base}view.json", method=method)
            assert reply.status == 405 and "access-control-allow-origin" not in reply.headers


def test_ranges(client: Client) -> None:
    path = "sample/train/0/image"
    whole = client.get(path)
    size, etag = len(whole.body), whole.headers["etag"]
    assert whole.headers["accept-ranges"] == "bytes" and int(whole.headers["content-length"]) == size
    for header, start, stop in (
        ("0-0", 0, 1),
        ("5-9", 5, 10),
        (f"{size - 1}-", size - 1, size),
        ("-7", size - 7, size),
        (f"3-{size + 99}", 3, size),
        (f"-{size + 5}", 0, size),
    ):
        reply = client.get(path, Range=f"bytes={header}")
        assert reply.status == 206 and reply.body == whole.body[start:stop]
        assert reply.headers["content-range"] == f"bytes {start}-{stop - 1}/{size}"
    outside = client.get(path, Range=f"bytes={size}-")
    assert outside.status == 416 and outside.headers["content-range"] == f"bytes */{size}"
    for odd in ("bytes=1-2,5-6", "bytes=-", "items=0-1", "bytes=5-2"):
        assert client.get(path, Range=odd).status in (200, 416)
    assert client.get(path, Range="bytes=0-1", **{"If-Range": etag}).status == 206
    assert client.get(path, Range="bytes=0-1", **{"If-Range": '"other"'}).status == 200
    kept = client.get(path, **{"If-None-Match": etag})
    assert kept.status == 304 and not kept.body
    assert client.ask(client.base + path, method="HEAD").headers["content-length"] == str(size)


def test_a_port_in_use_is_reported_and_a_closed_server_frees_its_port(folder: Path) -> None:
    with packer.view(folder) as viewing, pytest.raises(ServingError, match="cannot listen"):
        packer.view(folder, port=viewing.port)
    viewing.close()  # has no effect
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", viewing.port), 5):
        pass


def view_until(folder: Path, environ: dict[str, str], done: Callable[[Client], None]) -> tuple[str, str]:
    """The address and the output of `packer view`, which ends by Ctrl-C after `done`."""
    command = [sys.executable, "-m", "packer", "view", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        try:
            with Client(url) as client:
                done(client)
        finally:
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 0 and "Traceback" not in errors
    return url, errors


def test_the_command_prints_the_address_and_ends_with_ctrl_c(folder: Path) -> None:
    def look(client: Client) -> None:
        assert client.get("view.json").json["splits"]["train"]["samples"] == 3

    url, errors = view_until(folder, {**os.environ, "SSH_CONNECTION": "10.0.0.1 5 10.0.0.2 22"}, look)
    port = urlsplit(url).port
    assert f"ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}" in errors


def test_the_token_is_not_an_argument_of_the_browser(folder: Path, tmp_path: Path) -> None:
    """The browser gets a file that only this user can read; it redirects to the page and is removed at the end."""
    script, seen = tmp_path / "browser", tmp_path / "seen"
    script.write_text(
        f"#!{sys.executable}\nimport json, os, sys\nfrom urllib.request import url2pathname\n"
        f"path = url2pathname(sys.argv[-1].removeprefix('file://'))\n"
        f"seen = [sys.argv[1:], path, os.stat(path).st_mode & 0o777, open(path).read()]\n"
        f"open({str(seen) + '.new'!r}, 'w').write(json.dumps(seen))\nos.rename({str(seen) + '.new'!r}, {str(seen)!r})\n"
    )
    script.chmod(0o755)
    environ = {**os.environ, "DISPLAY": ":0", "BROWSER": str(script), "HOME": str(tmp_path / "a home")}
    environ.pop("SSH_CONNECTION", None)
    (tmp_path / "a home").mkdir()
    url, _ = view_until(folder, environ, lambda client: wait_for(seen.exists, "the browser"))
    arguments, path, mode, text = json.loads(seen.read_text())
    token = urlsplit(url).path.strip("/")
    assert len(token) == 32 and token not in " ".join(arguments) and f"url={url}" in text
    assert mode == 0o600 and Path(path).parent == tmp_path / "a home" and not Path(path).exists()


def test_sets_that_cannot_be_opened_are_reported(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match=re.escape(str(tmp_path / "empty"))):
        packer.view(tmp_path / "empty")
    with pytest.raises(UnknownNameError, match="no split 'test'; it has train"):
        packer.view(tree_of(tmp_path / "few", {"a/1.jpg": make_jpeg(1)}), split="test")
