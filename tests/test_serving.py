"""The server of byte ranges: its answers, and that it neither reveals other data nor keeps any request."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cache.errors import CertificateError, DamagedSampleError, DeniedError, RemoteError, ServingError
from cache.remote import Patience, Remote, RemoteUrl, Span
from cache.serving import Limits, Rendezvous, Server, ServerProcess, ServeSettings, own_address, read_token
from packer.testing.children import forked

TOKEN = "0123456789abcdef"
DATA = {"0": bytes(range(256)) * 8192, "1": b"one"}
ROOT = Path(__file__).resolve().parents[1]


class Objects:
    """DATA, of which the object "1" cannot be read."""

    def size(self, name: str) -> int | None:
        return len(DATA[name]) if name in DATA else None

    def read(self, name: str, start: int, stop: int) -> list[memoryview]:
        if name == "1":
            raise DamagedSampleError("a secret path")
        middle = (start + stop) // 2
        return [memoryview(DATA[name])[start:middle], memoryview(DATA[name])[middle:stop]]

    def close(self) -> None:
        """Record the call; no file is open."""
        if "CLOSED" in os.environ:
            Path(os.environ["CLOSED"]).touch()


SETTINGS = ServeSettings("set-2-0", TOKEN, "127.0.0.1", limits=Limits(connections=3, range_bytes=1 << 20))


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    """Starts servers, with other settings or limits."""
    started: list[Server] = []

    def start(settings: ServeSettings = SETTINGS, **limits: Any) -> Server:
        started.append(Server(Objects(), replace(settings, limits=replace(settings.limits, **limits))))
        return started[-1]

    before = set(threading.enumerate())
    yield start
    for server in started:
        server.close()
        server.close()
    left = [thread.name for thread in set(threading.enumerate()) - before if thread.name == "packer-serve"]
    assert not left, "a closed server left a thread"


def connected(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=300)


def received(connection: socket.socket) -> bytes:
    """All bytes until the server closes the connection."""
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def request(path: str = "/set-2-0/0", *, method: str = "GET", token: str | None = TOKEN, **headers: str) -> bytes:
    """A request that asks to close the connection after its answer."""
    lines = [f"{method} {path} HTTP/1.1", "Host: node"]
    lines += [] if token is None else [f"Authorization: Bearer {token}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


LAST = b"x\r\n\r\n"  # not a request, so the connection is closed after the earlier answers


def answers(server: Server, *requests: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """Status, headers and body of each answer on one connection, up to that of LAST."""
    with connected(server) as connection:
        connection.sendall(b"".join(requests) + LAST)
        data, parsed = received(connection), []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        first, *rest = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in rest)}
        size = 0 if first.startswith("HTTP/1.1 200") else int(headers["content-length"])
        parsed.append((int(first.split()[1]), headers, data[:size]))
        data = data[size:]
    return parsed


def test_ranges(start: Any) -> None:
    server = start()
    replies = answers(
        server,
        request(Range="bytes=5-9"),
        request(Range=f"bytes={len(DATA['0']) - 3}-"),
        request(Range="bytes=2097150-999999999999999999"),
        request(method="HEAD"),
        request(Range="bytes=0-0", If_Match="*"),
    )
    assert [(status, body) for status, _, body in replies[:2]] == [(206, b"\5\6\7\10\11"), (206, b"\xfd\xfe\xff")]
    assert replies[0][1]["content-range"] == f"bytes 5-9/{len(DATA['0'])}"
    assert [status for status, _, _ in replies] == [206, 206, 206, 200, 206, 400]
    etag = replies[0][1]["etag"]
    assert replies[3][1]["content-length"] == str(len(DATA["0"])) and replies[3][1]["etag"] == etag
    again = answers(server, request(Range="bytes=0-1", If_Match=etag), request(Range="bytes=0-1", If_Match='"other"'))
    assert [status for status, _, _ in again] == [206, 412, 400]
    assert server.stats.answers == 6 and server.stats.sent_bytes == 5 + 3 + 2 + 1 + 2


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (request("/set-2-0/2", Range="bytes=0-1"), 404),
        (request("/set-2-0/", Range="bytes=0-1"), 404),
        (request("/set-2-0", Range="bytes=0-1"), 404),
        (request("/", Range="bytes=0-1"), 404),
        (request("/set-2-1/0", Range="bytes=0-1"), 404),
        (request("/set-2-0/../../etc/passwd", Range="bytes=0-1"), 404),
        (request("/set-2-0/%30", Range="bytes=0-1"), 404),
        (request("/set-2-0/1", Range="bytes=0-1"), 503),
        (request("/set-2-0/0"), 413),
        (request(Range="bytes=0-"), 413),
        (request(Range=f"bytes=0-{1 << 20}"), 413),
        (request(Range="bytes=0-1,4-5"), 413),
        (request(Range="bytes=-5"), 413),
        (request(Range="bytes=9-3"), 416),
        (request(Range="bytes=2097152-"), 416),
    ],
)
def test_unavailable_ranges_leave_the_connection_open(start: Any, sent: bytes, status: int) -> None:
    server = start()
    replies = answers(server, sent, request(Range="bytes=0-1"))
    assert [code for code, _, _ in replies] == [status, 206, 400]
    assert replies[0][2] == b"" and b"secret" not in repr(replies).encode()
    assert server.stats.missing == 1


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (request(token=None, Range="bytes=0-1"), 401),
        (request(token="", Range="bytes=0-1"), 401),
        (request(token=TOKEN[:-1], Range="bytes=0-1"), 401),
        (request(token=TOKEN + "0", Range="bytes=0-1"), 401),
        (request(token="\xe4" * 16, Range="bytes=0-1"), 400),
        (request("/nothing", token=TOKEN.upper()), 401),
        (request(method="PUT", Range="bytes=0-1"), 405),
        (request(method="DELETE"), 405),
        (request(Range="bytes=0-1", Content_Length="5"), 400),
        (request(Range="bytes=0-1", Transfer_Encoding="chunked"), 400),
        (request(Range="bytes=0-1", RANGE="bytes=0-2"), 400),
        (request(Range="bytes=0-1", AUTHORIZATION=f"Bearer {TOKEN}"), 400),
        (request("/set-2-0/0 x", Range="bytes=0-1"), 400),
        (request(Range="bytes=0-1").replace(b"HTTP/1.1", b"HTTP/2"), 400),
        (request(Range="bytes=0-1").replace(b"Host: node", b"Host node"), 400),
        (request(Range="bytes=0-1").replace(b"Host: node", b" folded: line"), 400),
        (b"\r\n\r\n", 400),
        (bytes(range(1, 9)) + b"\r\n\r\n", 400),
    ],
)
def test_refused_requests_close_the_connection(start: Any, sent: bytes, status: int) -> None:
    server = start()
    replies = answers(server, sent, request(Range="bytes=0-1"))
    assert [code for code, _, _ in replies] == [status] and replies[0][1]["connection"] == "close"
    assert server.stats.refused == 1 and server.stats.sent_bytes == 0


def test_greedy_clients_are_disconnected(start: Any) -> None:
    """Headers without end, slow senders and receivers, more connections than allowed."""
    with connected(start()) as connection:
        connection.sendall(b"GET /" + b"a" * (1 << 20))
        assert received(connection) == b""
    server = start(first_seconds=0.05, idle_seconds=0.05)
    for sent in (b"", b"GET /set", request(Range="bytes=0-1")):
        with connected(server) as connection:
            connection.sendall(sent)
            assert received(connection).count(b"HTTP/1.1") == sent.count(b"\r\n\r\n")
    server = start()
    kept = [connected(server) for _ in range(3)]
    for connection in kept:  # an answer shows that it is open
        connection.sendall(request(Range="bytes=0-1"))
        assert connection.recv(1 << 12).startswith(b"HTTP/1.1 206")
    with connected(server) as refused:
        assert received(refused).startswith(b"HTTP/1.1 503")
    for connection in kept:
        connection.close()
    until = time.monotonic() + 300
    while [status for status, _, _ in answers(server, request(Range="bytes=0-1"))] != [206, 400]:
        assert time.monotonic() < until
    server = start(send_seconds=0.05, range_bytes=1 << 21, answers=1)
    with connected(server) as connection:
        connection.sendall(request(Range="bytes=0-2097151") * 20)
        assert [status for status, _, _ in answers(server, request(Range="bytes=0-1"))] == [206, 400], (
            "other clients are not served"
        )
        time.sleep(1)  # many times the timeout of the server
        assert len(received(connection)) < 20 << 21


def test_connections_made_during_close_are_closed(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    unclosed: list[object] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)  # raised in a finalizer, so the hook sees it
        monkeypatch.setattr(sys, "unraisablehook", unclosed.append)
        for count in range(0, 30, 5):
            server, clients = start(connections=64), []
            closing = threading.Timer(count / 10_000, server.close)
            closing.start()
            with suppress(OSError):
                while len(clients) < 64:
                    clients.append(connected(server))
            closing.join()
            for client in clients:
                client.close()
            del server
            gc.collect()
    assert not unclosed


def remote(server: Server, token: str = TOKEN, scheme: str = "http") -> Remote:
    return Remote(RemoteUrl(scheme, f"127.0.0.1:{server.port}", "set-2-0", bearer=token), Patience(5, 0))


def test_the_client_ignores_proxies(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    server = start(connections=64)
    data, facts = remote(server).read(Span("0", 1000, 500_000))
    assert bytes(data) == DATA["0"][1000:500_000] and facts.bytes == len(DATA["0"])
    assert bytes(remote(start(server.settings)).read(Span("0", 0, 9, facts.etag))[0]) == DATA["0"][:9], "restarted"
    with pytest.raises(DeniedError) as error:
        remote(server, "another-token-00").read(Span("0", 0, 9))
    assert "another-token" not in str(error.value) and TOKEN not in repr(server.settings)
    assert "another-token" not in repr(remote(server, "another-token-00").url)
    with pytest.raises(RemoteError):
        remote(server).read(Span("1", 0, 3))


def test_tls(start: Any, certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKER_HTTP_ROOT_CERTIFICATE", str(certificates / "ca.pem"))
    good = start(replace(SETTINGS, certificate=certificates / "good.pem"), connections=64)
    assert bytes(remote(good, scheme="https").read(Span("0", 0, 9))[0]) == DATA["0"][:9]
    with connected(good) as plain:
        plain.sendall(request(Range="bytes=0-1"))
        assert b"206" not in received(plain)
    expired = start(replace(SETTINGS, certificate=certificates / "expired.pem"))
    with pytest.raises(CertificateError, match="expired"):
        remote(expired, scheme="https").read(Span("0", 0, 9))
    with pytest.raises(ServingError, match="not a certificate and key"):
        start(replace(SETTINGS, certificate=certificates / "ca.pem"))


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", r"127\.0\.0\.1"),
        ("localhost", r"127\.0\.0\.1"),
        ("::1", "::1"),
        ("127.0.0.0/8", r"127\.0\.0\.1"),
        (None, "the name of this machine, localhost, resolves to 127.0.0.1, where no other node can reach it"),
        ("0.0.0.0", "every network"),
        ("::", "every network"),
        ("198.51.100.0/24", "no address in the network 198.51.100.0/24"),
        ("127.0.0.1/33", "not a network"),
        ("no-such-host.invalid", "cannot be resolved"),
    ],
)
def test_the_listening_address(host: str | None, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    if " " not in expected:
        assert re.fullmatch(expected, own_address(host))
        return
    with pytest.raises(ServingError, match=expected):
        own_address(host)


# --- the server's process -------------------------------------------------------------------------------------------
_PARENT = """
import sys
sys.path[:0] = sys.argv[1:]
from test_serving import Objects, ServerProcess, SETTINGS
server = ServerProcess(Objects(), SETTINGS)
print(server.port, server.pid, flush=True)
sys.stdin.read()
"""


def test_the_process_of_a_server_ends_with_its_parent(tmp_path: Path) -> None:
    """The child also closes the objects that it serves, since it may be their last user."""
    command = [sys.executable, "-c", _PARENT, str(ROOT), str(ROOT / "tests")]
    environment = {**os.environ, "CLOSED": str(tmp_path / "closed")}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        port, pid = map(int, parent.stdout.readline().split())
        with socket.create_connection(("127.0.0.1", port), timeout=300) as connection:
            connection.sendall(request(Range="bytes=5-9"))
            assert b"206 Partial" in connection.recv(1 << 12)
            parent.send_signal(signal.SIGKILL)
            received(connection)
    until = time.monotonic() + 300
    while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < until
    assert (tmp_path / "closed").exists()


def test_the_process_of_a_server_ends_although_a_fork_holds_its_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a DataLoader worker does; the server closes the objects it serves, and was not killed."""
    monkeypatch.setenv("CLOSED", str(tmp_path / "closed"))
    server = ServerProcess(Objects(), SETTINGS)

    end, there = os.pipe()

    def child() -> None:
        server.close()  # has no effect here
        os.read(end, 1)

    with forked(child):
        try:
            assert server.alive
            server.close()
            assert not server.alive and (tmp_path / "closed").exists()
        finally:
            os.write(there, b"x")
    os.close(end)
    os.close(there)


def test_a_server_that_cannot_start_says_why(start: Any) -> None:
    port = start().port
    with pytest.raises(ServingError, match=f"port {port}: cannot listen there: .*in use; name an address"):
        start(replace(SETTINGS, port=port))
    with pytest.raises(ServingError, match=r"198\.51\.100\.1, port 0: cannot listen there"):
        ServerProcess(Objects(), replace(SETTINGS, host="198.51.100.1"))
    with pytest.raises(ServingError, match="cannot be opened by the process that serves it"):
        ServerProcess(threading.Lock(), SETTINGS)  # type: ignore[arg-type]


# --- the folder where nodes meet ------------------------------------------------------------------------------------
def test_all_processes_share_one_token(tmp_path: Path) -> None:
    def token(_: int) -> str:
        return Rendezvous.make(tmp_path / "new", "job/7", "set", 4).token()

    with ThreadPoolExecutor(8) as pool:
        (shared,) = set(pool.map(token, range(32)))
    made = Rendezvous.make(tmp_path / "new", "job/7", "set", 4)
    assert re.fullmatch("[0-9a-f]{64}", shared) and made.path.name == "job_7-set-4"
    assert (made.path / "token").stat().st_mode & 0o777 == 0o600 and made.path.stat().st_mode & 0o777 == 0o700
    assert Rendezvous.make(tmp_path / "new", "8", "set", 4).token() != shared, "two jobs share a token"
    (tmp_path / "0-set-2").mkdir()
    (tmp_path / "0-set-2").chmod(0o777)
    with pytest.raises(ServingError, match="not a directory of this user alone"):
        Rendezvous.make(tmp_path, "0", "set", 2)
    (tmp_path / "file").touch()
    with pytest.raises(ServingError, match="cannot be created"):
        Rendezvous.make(tmp_path / "file", "0", "set", 2)


def test_nodes_find_each_other(tmp_path: Path) -> None:
    made = Rendezvous.make(tmp_path, "0", "set", 2)
    made.publish(0, "http://10.0.0.1:80")
    assert str(made.find(0)) == "http://10.0.0.1:80" and made.find(1) is None and made.wait(0) == [1]
    made.publish(1, "https://[::1]:80")
    assert made.wait(0) == [] and made.find(1).host == "[::1]:80"
    made.publish(0, "http://10.0.0.1:81")
    made.withdraw(0, "http://10.0.0.1:80")
    assert str(made.find(0)) == "http://10.0.0.1:81", "the address of a restarted server was removed"
    made.withdraw(0, "http://10.0.0.1:81")
    assert made.find(0) is None
    for text in ("", "s3://bucket/set", "http://user:password@host:1", "http://", "/etc/passwd", "\xff", "h" * 5000):
        (made.path / "1").write_text(text, encoding="latin-1")
        assert made.find(1) is None, "an invalid address was used"
    (made.path / "1").unlink()
    os.mkfifo(made.path / "1")
    assert made.find(1) is None


@pytest.mark.parametrize(
    ("mode", "text", "message"),
    [
        (0o600, None, "cannot be read: No such file"),
        (0o640, TOKEN, "others may read or change this token .*mode 0640.*chmod 600"),
        (0o602, TOKEN, "others may read"),
        (0o600, "", "is not a token"),
        (0o600, "short", "is not a token"),
        (0o600, f"{TOKEN} {TOKEN}", "is not a token"),
        (0o600, f"{TOKEN}\nmore", "is not a token"),
        (0o600, "\xe4" * 16, "cannot be read: not plain text"),
        (0o600, "a" * 5000, "at most 4,096"),
    ],
)
def test_a_token_that_is_not_safe_is_refused(tmp_path: Path, mode: int, text: str | None, message: str) -> None:
    path = tmp_path / "token"
    if text is not None:
        path.write_text(text, encoding="latin-1")
        path.chmod(mode)
    with pytest.raises(ServingError, match=message) as error:
        read_token(path)
    assert TOKEN not in str(error.value)
