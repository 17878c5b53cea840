"""An HTTP/1.1 server for GET and HEAD with bounds on everything.

One thread handles all connections; a few other threads do slow work. There are limits on the number of connections, the
bytes of a request's head, concurrent answers, and the seconds that a client may take to send a request or to receive
the answer. The first request of a connection has a short time limit. Requests have no bodies.

Subclasses answer the requests: `Server` below for other nodes, the server of `packer view` for a browser.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import os
import pickle
import re
import secrets
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, TypeAlias, TypeVar

from cache.errors import AddressError, PackerError, ServingError
from cache.files import Folder, PathError, atomic_write, read_regular
from cache.remote import RemoteUrl, parse_url
from cache.system import require, resource

_T = TypeVar("_T")
_CLOSE_SECONDS = 1.0
_OTHER_FILES = 512  # reserved for shards, memory maps and the files of the program
_REQUEST = re.compile(r"(GET|HEAD|[A-Z]{3,10}) /([!-~]*) HTTP/1\.[01]")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([ -~\t]*)")
_ONCE = ("authorization", "host", "if-match", "if-none-match", "if-range", "range")


@dataclass(frozen=True)
class Limits:
    """connections: how many may be open, at most the number of files that this process may open.
    answers: how many are read or sent at a time.
    threads: for reading.

    head_bytes: of a request. range_bytes: of the answer to a range request, if only ranges are served.
    first_seconds: for the first request of a connection, which shows the token. idle_seconds: for each later one.
    send_seconds: for a client to receive an answer, or one piece of it.
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
    """path: without the leading slash. headers: by their names in lower case."""

    method: str
    path: str
    headers: dict[str, str]


class HttpServer(ABC):
    """Serves from a separate thread until it is closed; subclasses answer.

    port: the port that it listens on.
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
        """Answer a request, or None for an invalid one; returns whether the connection stays open."""

    @abstractmethod
    def _refusal(self) -> bytes:
        """The answer to a connection above the limit."""

    def close(self) -> None:
        """Close all connections, including those in the middle of an answer. A second call does nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()

    def __enter__(self: _T) -> _T:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def _in_thread(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """The result of slow work, done in a thread."""
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
        # Stop accepting, then close the connections, and the server last: asyncio (3.11) would leave the socket of a
        # connection that is still being set up open.
        self._loop.remove_reader(self._socket)
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:  # including just accepted connections
            for writer in list(self._connections):
                writer.transport.abort()
            _, waiting = await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)
            for task in waiting:  # blocked on a slow read
                task.cancel()
        for writer in self._connections:  # of tasks that were cancelled while closing
            writer.transport.abort()
        await asyncio.sleep(0)  # lets transports close their sockets
        server.close()

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
            pass  # the client has gone or sends no request, or this server is being closed
        finally:
            writer.close()  # bytes already written are still sent
            with suppress(OSError), self._within(writer, limits.send_seconds):
                await writer.wait_closed()
            self._connections.discard(writer)

    @contextmanager
    def _within(self, writer: asyncio.StreamWriter, seconds: float) -> Iterator[None]:
        """Abort the connection if the block takes longer than `seconds`."""
        timer = self._loop.call_later(seconds, writer.transport.abort)
        try:
            yield
        finally:
            timer.cancel()


@lru_cache(1)
def http_date(now: int) -> str:
    """A time in the format of HTTP headers; now: seconds since the epoch."""
    return formatdate(now, usegmt=True)


def _parsed(head: bytes) -> Request | None:
    """Parse the head of a request, up to its empty line; None if it is malformed or announces a body."""
    first, *rest = head[:-4].decode("latin-1").split("\r\n")
    request = _REQUEST.fullmatch(first)
    headers: dict[str, str] = {}
    for line in rest:
        match = _HEADER.fullmatch(line)
        if match is None or (match[1].lower() in headers and match[1].lower() in _ONCE):
            return None
        headers[match[1].lower()] = match[2].strip(" \t")
    if request is None or "transfer-encoding" in headers or headers.get("content-length", "0") != "0":
        return None
    return Request(request[1], request[2], headers)


def _files_to_open() -> int:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if files == resource.RLIM_INFINITY else max(files - _OTHER_FILES, files // 2)


def listen(host: str, port: int, advice: str) -> socket.socket:
    """A socket that listens at an address of this machine. Raises ServingError, whose message ends with `advice`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        number = getattr(error, "errno", None)
        reason = os.strerror(number) if number and number > 0 else error
        raise ServingError(f"{host}, port {port}: cannot listen there: {reason}; {advice}") from error


# A server of byte ranges: HTTP/1.1, GET and HEAD, one range per request, for clients that have the token.
#
#     GET /<prefix>/<name>            Authorization: Bearer <token>      Range: bytes=<first>-<last>
#     206, Content-Range, ETag        the bytes [first, last]
#
# There are no listings, no paths and no request bodies: a name is a word that `Ranges` knows, or the answer is 404. A
# failed read is a 503 without a reason, and the client reads elsewhere. After a malformed request, or one without the
# token, the connection is closed.


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
    """The objects that are served, each with a name and a size. Several threads call it."""

    def size(self, name: str) -> int | None:
        """Bytes of an object; None if there is no object of this name."""

    def read(self, name: str, start: int, stop: int) -> Sequence[_Buffer]:
        """Bytes [start, stop) of an object, in pieces; the range is inside it. Raises PackerError or OSError."""

    def close(self) -> None:
        """Close everything; called by the owner, not by the server."""


@dataclass(frozen=True)
class ServeSettings:
    """Parameters of a server.

    prefix: the first component of each path; it names the set and the node, so that their bytes cannot be mistaken for
        those of others.
    host: the address of this machine to listen on. port: 0 for a free one.
    certificate, key: PEM files, for TLS.
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
    """Answers with a body, their bytes, and requests without one. refused: wrong token or malformed request."""

    answers: int = 0
    sent_bytes: int = 0
    missing: int = 0
    refused: int = 0


class _Answer(NamedTuple):
    """status; if it is 200 or 206, the object's name and size, and the range that is sent."""

    status: int
    name: str = ""
    size: int = 0
    start: int = 0
    stop: int = 0


class Server(HttpServer):
    """Serves until it is closed. Raises ServingError if it cannot listen."""

    def __init__(self, ranges: Ranges, settings: ServeSettings) -> None:
        self.ranges, self.settings = ranges, settings
        self.stats = ServerStats()
        tls = _tls(settings)
        advice = "name an address of this machine with host=, and a free port or 0 with port="
        super().__init__(listen(settings.host, settings.port, advice), settings.limits, "packer-serve", tls)

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
        """The answer to a request, determined from its head alone."""
        sent = request.headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(sent, f"Bearer {self.settings.token}".encode("latin-1")):
            return _Answer(401)
        if request.method not in ("GET", "HEAD"):
            return _Answer(405)
        prefix, _, name = request.path.partition("/")
        size = self.ranges.size(name) if prefix == self.settings.prefix else None
        if size is None:
            return _Answer(404)
        if request.headers.get("if-match", "*") not in ("*", self._etag(name, size)):
            return _Answer(412)
        if request.method == "HEAD":
            return _Answer(200, name, size, 0, size)
        match = _RANGE.fullmatch(request.headers.get("range", ""))
        if match is None:
            return _Answer(413)  # whole objects are too large
        start, stop = int(match[1]), min(size, int(match[2] or size) + 1)
        if start >= stop:
            return _Answer(416, name, size)
        return (
            _Answer(206, name, size, start, stop) if stop - start <= self.settings.limits.range_bytes else _Answer(413)
        )

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
        """The same in all processes that serve this state of the set, also after a restart: the prefix names it."""
        return f'"{self.settings.prefix.rpartition("-")[0]}-{name}-{size:x}"'

    def _count(self, answer: _Answer) -> None:
        old = self.stats
        sent = answer.stop - answer.start if answer.status == 206 else 0
        self.stats = ServerStats(
            old.answers + (answer.status in (200, 206)),
            old.sent_bytes + sent,
            old.missing + (answer.status in (404, 412, 413, 416, 503)),
            old.refused + (answer.status in (400, 401, 405)),
        )


def _tls(settings: ServeSettings) -> ssl.SSLContext | None:
    if settings.certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.certificate, settings.key)
    except (OSError, ssl.SSLError) as error:
        raise ServingError(
            f"{settings.certificate}: not a certificate and key in PEM files: {error.strerror or error}"
        ) from error
    return context


# The server in a separate process, so that training threads and answers do not wait for each other.
#
#     this process                                    server
#     ServeSettings and Ranges, pickled  ──►  its input      opens the Ranges, listens
#     port, or the error              ◄──  its output     serves until a line or the end of its input, at the latest
#                                                         with this process
#
# `own_address` returns the address at which other nodes reach this one.


_START_SECONDS = 120.0
_END_SECONDS = 5.0
_BOOT = "from cache.serving import serve; serve(sys.stdin.buffer, sys.stdout.buffer)"
_END = b"\n"
_ANY_PORT = 9  # the discard service; no packet is sent


def _start_child(code: str) -> tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes]]:
    """Run `code` in a new interpreter with the import path of this one. Returns the process, its input and output."""
    boot = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); {code}"
    command = [sys.executable, "-c", boot, json.dumps([path or os.getcwd() for path in sys.path])]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    return process, process.stdin, process.stdout


class ServerProcess:
    """A server in another process. Raises ServingError if it does not start.

    ranges: is pickled; the other process opens its own copy.
    """

    def __init__(self, ranges: Ranges, settings: ServeSettings) -> None:
        try:
            work = pickle.dumps((settings, ranges))
        except Exception as error:
            raise ServingError(f"this reader cannot be opened by the process that serves it: {error}") from error
        self._owner = os.getpid()
        self._process, self._input, self._output = _start_child(_BOOT)
        timer = threading.Timer(_START_SECONDS, self._process.kill)
        timer.start()
        try:
            self._input.write(work)
            self._input.flush()
            line = self._output.readline(1 << 16)
        except OSError:
            line = b""
        finally:
            timer.cancel()
        try:
            self.port = int(json.loads(line)["port"])
        except (ValueError, KeyError, TypeError):
            self.close()
            raise ServingError(_reason(line, self._process.returncode)) from None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> None:
        """Wait until the server process has ended."""
        self._process.wait()

    def close(self) -> None:
        """Stop the server. Does nothing in a forked child."""
        if os.getpid() != self._owner:
            return
        with suppress(OSError, ValueError):  # it has ended, or is closed already
            self._input.write(_END)  # closing is not enough: a forked process may have a copy of the pipe
        with suppress(OSError):
            self._input.close()
        self._output.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _reason(line: bytes, status: int | None) -> str:
    try:
        return str(json.loads(line)["error"])
    except (ValueError, KeyError, TypeError):
        return f"the process that serves this node has ended with status {status}, or did not start in time"


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """The main function of the server's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; this one ends with its input
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each connection is an open file
    try:
        settings, ranges = pickle.load(requests)
        server = Server(ranges, settings)
    except Exception as error:
        known = isinstance(error, PackerError)
        problem = str(error) if known else f"the process that serves this node cannot open the reader: {error!r}"
        _say(answers, {"error": problem})
        os._exit(1)
    _say(answers, {"port": server.port})
    requests.read(len(_END))
    server.close()
    ranges.close()  # the last user of a cache removes it
    os._exit(0)  # without waiting for reads in flight


def _say(answers: IO[bytes], content: dict[str, object]) -> None:
    try:
        answers.write(json.dumps(content).encode() + b"\n")
        answers.flush()
    except OSError:
        pass


def own_address(host: str | None = None) -> str:
    """The address of this machine to listen on.

    host: a name or address of this machine; or a network such as 10.1.0.0/16, for this machine's address in it, so that
        all nodes can use the same value; None for the address of this machine's host name. Raises ServingError.
    """
    if host is not None and "/" in host:
        return _address_in(host)
    name = host or socket.gethostname()
    try:
        addresses = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ServingError(
            f"{name!r} cannot be resolved on this machine; name an address or a network of this machine with host=, "
            f"such as 10.1.0.0/16"
        ) from error
    address = str(sorted(addresses, key=lambda one: one[0] != socket.AF_INET)[0][4][0])
    known = ipaddress.ip_address(address.partition("%")[0])
    if known.is_loopback and host is None:
        raise ServingError(
            f"the name of this machine, {name}, resolves to {address}, where no other node can reach it; name an "
            f"address or a network of this machine with host=, such as 10.1.0.0/16"
        )
    if known.is_unspecified:
        raise ServingError(f"{name}: means every network of this machine; name one network, such as 10.1.0.0/16")
    return address


def _address_in(text: str) -> str:
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        raise ServingError(f"{text!r} is not a network such as 10.1.0.0/16") from error
    family = socket.AF_INET if network.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # No packet is sent: connecting makes the kernel choose the source address.
            probe.connect((str(network.network_address + (1 if network.num_addresses > 1 else 0)), _ANY_PORT))
            address = str(probe.getsockname()[0])
        except OSError:
            address = ""
    if not address or ipaddress.ip_address(address) not in network:
        raise ServingError(f"this machine ({socket.gethostname()}) has no address in the network {text}")
    return address


# A folder on the filesystem that the nodes of a job share: a token, and the address of each node.
#
#     <folder>/<job>-<set>-<nodes>/     mode 0700: only its user may read and write it
#       token                           64 hex digits and a newline, mode 0600; created by the first process
#       0, 1, …                         the address at which node 0, 1, … listens, one line
#
# The token is sent to the addresses in these files, so a folder in which others can write is refused. A node that
# restarts rewrites its file.


_TOKEN_BYTES = 32
_MOST_BYTES = 4096
_LEAST_TOKEN = 16
_MAKING_SECONDS = 10.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Rendezvous:
    """The folder of one set, shared by the nodes of one job. Raises ServingError."""

    path: Path
    nodes: int

    @classmethod
    def make(cls, folder: str | os.PathLike[str], job: str, name: str, nodes: int) -> Rendezvous:
        """Create the folder if it is missing. name: of the set, in letters and digits."""
        require("serving samples to other nodes", hasattr(os, "geteuid"))
        plain = "".join(letter if letter.isalnum() or letter in "._" else "_" for letter in job)[:64].lstrip(".")
        path = Path(folder).expanduser().absolute() / f"{plain or '0'}-{name}-{nodes}"
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = path.lstat()
        except OSError as error:
            raise ServingError(
                f"{path}: cannot be created: {error.strerror}; name a folder that all nodes see"
            ) from error
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise ServingError(
                f"{path}: is not a directory of this user alone (mode 0700), so the token is not safe "
                f"there; remove it, or name another folder"
            )
        return cls(path, nodes)

    def token(self) -> str:
        """The token that all nodes share; the first process creates it."""
        text = secrets.token_hex(_TOKEN_BYTES)
        try:
            with Folder(self.path) as folder, folder.create("token") as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(f"{text}\n".encode())
            return text
        except FileExistsError:
            pass
        except OSError as error:
            raise ServingError(f"{self.path / 'token'}: cannot be written: {error.strerror}") from error
        until = time.monotonic() + _MAKING_SECONDS
        while True:
            try:
                return read_token(self.path / "token", 2 * _TOKEN_BYTES)
            except ServingError:
                if time.monotonic() > until:
                    raise
            time.sleep(_POLL_SECONDS)  # another process is writing it

    def publish(self, node: int, url: str) -> None:
        """Record the address of a node."""
        try:
            atomic_write(self.path / str(node), f"{url}\n".encode(), mode=0o600)
        except OSError as error:
            raise ServingError(f"{self.path / str(node)}: cannot be written: {error.strerror}") from error

    def withdraw(self, node: int, url: str) -> None:
        """Remove the address of a node, unless it has changed."""
        published = self.find(node)
        if published is not None and str(published) == url:
            try:
                (self.path / str(node)).unlink(missing_ok=True)
            except OSError:
                pass  # other nodes find that no server listens there

    def find(self, node: int) -> RemoteUrl | None:
        """The address of a node; None if there is none, or no valid one."""
        try:
            url = parse_url(read_regular(self.path / str(node), _MOST_BYTES).decode("ascii").strip())
        except (OSError, ValueError, AddressError):
            return None
        return url if url.is_http and not url.userinfo else None

    def wait(self, seconds: float) -> list[int]:
        """Wait until every node has published its address; returns the nodes that have not."""
        until = time.monotonic() + seconds
        while missing := [node for node in range(self.nodes) if self.find(node) is None]:
            if time.monotonic() > until:
                break
            time.sleep(_POLL_SECONDS)
        return missing


def read_token(path: Path, length: int | None = None) -> str:
    """The token in a file that only this user can access: one line of at least 16 letters and digits, or `length`.

    Raises ServingError, whose message does not contain the token.
    """
    try:
        status = os.stat(path)
        text = read_regular(path, _MOST_BYTES).decode("ascii").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = str(error) if isinstance(error, PathError) else getattr(error, "strerror", None) or "not plain text"
        raise ServingError(f"{path}: the token cannot be read: {reason}") from error
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ServingError(
            f"{path}: others may read or change this token (owner {status.st_uid}, mode "
            f"{stat.S_IMODE(status.st_mode):04o}); run  chmod 600 {path} , or remove it so that a new one is made"
        )
    if len(text) < _LEAST_TOKEN or not (text.isascii() and text.isalnum()) or len(text) != (length or len(text)):
        raise ServingError(
            f"{path}: is not a token, which is one line of {_LEAST_TOKEN} or more letters and digits; remove it so "
            f"that a new one is made"
        )
    return text
