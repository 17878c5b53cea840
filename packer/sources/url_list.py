"""Lists of image URLs: a table with a column of URLs, or a text file with one per line.

    url         named by path_column, else the first of URL_COLUMNS, else the first of PATH_COLUMNS
    label       named by label_column, else as in a manifest
    split       named by split_column, else a column called split or subset
    key         a column called key or __key__, whose values must be distinct; without one, keys are numbers, 000000042
    caption     a column called caption, text or alt_text: a text field
    metadata    all other columns, in the field json, with the URL up to its query, which may contain a signature

Images are fetched while they are packed, some of them ahead of time, all in one process, so that the rate limits apply
to all requests together. An image that cannot be fetched is a bad sample: with on_error="skip" it is left out, and
left-out.jsonl records its URL (without the query), the status and the reason. Resuming a conversion does not fetch the
images of completed shards again.

Place: the URL, and the bytes of the other fields, None if missing.
"""

from __future__ import annotations

import os
import random
import re
import socket
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import urljoin, urlsplit

import numpy as np

from cache.errors import BadSampleError, MissingExtraError, SourceError
from cache.remote import is_public
from packer.formats.base import Arena
from packer.registry import HEAD_BYTES
from packer.sources.base import FileSource, ListingBuilder, SourceListing, check_names, checked_name
from packer.sources.contents import NOT_FETCHED, is_stray
from packer.sources.tables import (
    LABEL_COLUMNS,
    PATH_COLUMNS,
    SPLIT_COLUMNS,
    URL_COLUMNS,
    NamedColumns,
    first_column,
    is_missing,
    json_payload,
    number_labels,
    open_url_table,
    split_of_value,
)
from readers.layout import RelativePath
from readers.table import Buffer, repeated

__all__ = ["FetchOptions", "Fetcher", "Pace", "without_query"]


# ------------------------------------------------------------------------------
# Fetching images from web servers: retries, rate limits per host and for all hosts, and limits on responses.
#
#     response                                  action
#     200 with an image                         it is the sample
#     301, 302, 303, 307, 308                   up to 5 redirects are followed; every URL is checked as the first was
#     429, 503, … with Retry-After              no request to the host for that long, then a retry; fails if over 2 min
#     408, 425, 429, 5xx, no connection,        retry after 0.5 s, 1 s, 2 s, … plus a random delay of up to the same
#     timeout, incomplete body                  length
#     anything else                             failure
#
# Only http and https URLs without a user name are requested. Unless `private` is set, hosts that resolve to this
# machine or a private network are refused after connecting and before sending a request: otherwise, an untrusted list
# could make this machine send requests to servers that are not reachable from outside. If the environment configures a
# proxy, this check is left to the proxy. The timeout applies to a request as a whole, however slowly a server sends.


_REDIRECTS = (301, 302, 303, 307, 308)
_AGAIN = (408, 425, 429, 500, 502, 503, 504)
_MAX_REDIRECTS = 5
_MAX_PAUSE_SECONDS = 120.0
_FIRST_PAUSE_SECONDS = 0.5
_READ_BYTES = 1 << 16
_MOST_HOSTS = 1 << 16
_HEADERS = {"User-Agent": "packer", "Accept": "image/*,*/*;q=0.5", "Accept-Encoding": "identity"}


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """Limits on requests to web servers.

    rate: requests per second to all hosts together, None for no limit.
    host_rate: requests per second to each host.
    threads: the number of simultaneous requests.
    attempts: the maximum number of attempts per image.
    timeout: seconds for a request as a whole.
    max_bytes: the maximum size of an image.
    private: whether requests to hosts in private networks and to this machine are allowed.
    """

    rate: float | None = None
    host_rate: float = 20.0
    threads: int = 32
    attempts: int = 5
    timeout: float = 30.0
    max_bytes: int = 64 << 20
    private: bool = False

    def __post_init__(self) -> None:
        for name in ("host_rate", "timeout"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be over 0, not {getattr(self, name)}")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ValueError(f"rate must be over 0, not {self.rate}")
        for name in ("threads", "attempts", "max_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


class Pace:
    """Limits the rate of requests to each host and to all hosts together, evenly spaced. Threads share it."""

    def __init__(
        self,
        rate: float | None,
        host_rate: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._every, self._host_every = 1 / rate if rate else 0.0, 1 / host_rate
        self._clock, self._sleep = clock, sleep
        self._next = 0.0
        self._next_of: dict[str, float] = {}
        self._lock = threading.Lock()

    def wait(self, host: str) -> None:
        """Wait until a request to `host` may be sent."""
        with self._lock:
            now = self._clock()
            if len(self._next_of) > _MOST_HOSTS:
                self._next_of = {name: at for name, at in self._next_of.items() if at > now}
            start = max(now, self._next)
            self._next = start + self._every
            start = max(start, self._next_of.get(host, 0.0))
            self._next_of[host] = start + self._host_every
        if start > now:
            self._sleep(start - now)

    def hold(self, host: str, seconds: float) -> None:
        """Send no request to `host` for some seconds."""
        with self._lock:
            until = self._clock() + seconds
            self._next_of[host] = max(until, self._next_of.get(host, 0.0))


class _Answer(NamedTuple):
    """The outcome of an attempt: the image, or the reason why there is none.

    redirect: the next URL. again: whether a retry may succeed. pause: seconds to wait, as stated by the server.
    """

    data: bytes = b""
    reason: str = ""
    redirect: str = ""
    again: bool = False
    pause: float | None = None


class _Request:
    """A request in progress, which another thread ends after `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.connection: Any = None
        self.is_ended = False
        self.timer = threading.Timer(seconds, self.end)
        self.timer.daemon = True

    def uses(self, connection: Any) -> None:
        """Record the connection in use. Raises ConnectionAbortedError if the request has been ended."""
        self.connection = connection
        if self.is_ended:
            raise ConnectionAbortedError("ended")

    def end(self) -> None:
        """End the request by shutting down its connection, which makes reads from it fail."""
        self.is_ended = True
        sock = getattr(self.connection, "sock", None)
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class Fetcher:
    """Fetches images. Threads share it. Raises MissingExtraError without urllib3.

    sleep: waits for a number of seconds; by default, `stop` ends the wait.
    """

    def __init__(
        self, options: FetchOptions, pace: Pace | None = None, sleep: Callable[[float], object] | None = None
    ) -> None:
        self.options = options
        self._stopped = threading.Event()
        self._sleep = sleep or self._stopped.wait
        self._pace = pace or Pace(options.rate, options.host_rate, sleep=self._sleep)
        self._http = _urllib3()
        self._thread = threading.local()
        self._under_way: set[_Request] = set()
        self._pool = self._manager("")
        proxies = urllib.request.getproxies()
        self._proxies: dict[str, Any] = {
            scheme: self._manager(proxies[scheme]) for scheme in ("http", "https") if scheme in proxies
        }

    def fetch(self, url: str) -> bytes:
        """Fetch the bytes of an image. Raises BadSampleError with the reason why the last attempt failed."""
        reason, count = "", 0
        pause = _FIRST_PAUSE_SECONDS
        while count < self.options.attempts and not self._stopped.is_set():
            count += 1
            answer = self._follow(url)
            if answer.data:
                return answer.data
            reason = answer.reason
            if not answer.again or (answer.pause or 0) > _MAX_PAUSE_SECONDS:
                break
            if answer.pause is not None:
                self._pace.hold(_host(url), answer.pause)
            elif count < self.options.attempts:
                self._sleep(pause * (1 + random.random()))
                pause = min(2 * pause, _MAX_PAUSE_SECONDS)
        attempts = f" ({count} attempts)" if count > 1 else ""
        raise BadSampleError(f"{NOT_FETCHED}{reason}{attempts}: {without_query(url)}")

    def stop(self) -> None:
        """End the requests of all threads, and make no more."""
        self._stopped.set()
        for request in list(self._under_way):
            request.end()

    def _follow(self, url: str) -> _Answer:
        """Make one attempt, following redirects."""
        for _ in range(_MAX_REDIRECTS + 1):
            problem = check_url(url)
            if problem:
                return _Answer(reason=problem)
            self._pace.wait(_host(url))
            answer = self._ask(url)
            if not answer.redirect:
                return answer
            url = answer.redirect
        return _Answer(reason=f"more than {_MAX_REDIRECTS} redirects")

    def _ask(self, url: str) -> _Answer:
        errors = self._http.exceptions
        request = self._thread.request = _Request(self.options.timeout)
        self._under_way.add(request)
        request.is_ended = self._stopped.is_set()
        request.timer.start()
        try:
            response = self._pool_for(url).urlopen(
                "GET", url, headers=_HEADERS, redirect=False, retries=False, preload_content=False,
                timeout=self.options.timeout,
            )  # fmt: skip
            try:
                return self._answer(url, response)
            finally:
                response.close()
        except _PrivateError as error:
            return _Answer(reason=str(error))
        except (errors.LocationParseError, UnicodeError) as error:
            return _Answer(reason=f"not a valid address ({error})")
        except (errors.HTTPError, OSError, ValueError) as error:
            late = request.is_ended or (
                isinstance(error, errors.TimeoutError) and not isinstance(error, errors.NewConnectionError)
            )
            reason = (
                f"no full answer in {self.options.timeout:g} s" if late else f"the connection failed ({_short(error)})"
            )
            return _Answer(reason=reason, again=not isinstance(error, errors.SSLError))
        finally:
            request.timer.cancel()
            self._under_way.discard(request)

    def _answer(self, url: str, response: Any) -> _Answer:
        status, headers = response.status, response.headers
        if status in _REDIRECTS and headers.get("Location"):
            try:
                return _Answer(redirect=urljoin(url, headers["Location"]))
            except ValueError as error:
                return _Answer(reason=f"a redirect to an invalid address ({_short(error)})")
        if status != 200:
            pause = None
            with suppress(self._http.exceptions.InvalidHeader, ValueError, OverflowError):
                pause = self._http.Retry().get_retry_after(response)
            return _Answer(
                reason=f"HTTP {status} {_short(response.reason)}".strip(), again=status in _AGAIN, pause=pause
            )
        if headers.get("Content-Encoding", "identity") != "identity":
            return _Answer(
                reason=f"the answer is compressed with {headers['Content-Encoding']:.20}, which was not requested"
            )
        return self._body(response)

    def _body(self, response: Any) -> _Answer:
        most, parts, count = self.options.max_bytes, [], 0
        announced = response.headers.get("Content-Length", "")
        if announced.isdecimal() and int(announced[:20]) > most:
            return _Answer(reason=f"more than {most:,} bytes")
        while part := response.read1(_READ_BYTES):
            parts.append(part)
            count += len(part)
            if count > most:
                return _Answer(reason=f"more than {most:,} bytes")
        if announced.isdecimal() and count < int(announced[:20]):
            return _Answer(reason=f"{count:,} of {announced[:20]} bytes arrived", again=True)
        data = b"".join(parts)
        if is_stray(data[:HEAD_BYTES], ""):
            kind = response.headers.get("Content-Type", "") or "of no stated type"
            return _Answer(reason=f"not an image ({_short(kind)})" if data else "an empty answer")
        return _Answer(data)

    def _pool_for(self, url: str) -> Any:
        parts = urlsplit(url)
        proxy = self._proxies.get(parts.scheme.lower())
        return self._pool if proxy is None or urllib.request.proxy_bypass(parts.hostname or "") else proxy

    def _manager(self, proxy: str) -> Any:
        """A manager of connection pools, to servers or to a proxy.

        A connection registers with the current request of its thread; unless it is to a proxy or `private` is set, it
        refuses private addresses.
        """
        http, thread = self._http, self._thread
        is_checked = not proxy and not self.options.private

        def pool_of(kind: Any) -> Any:
            class Connection(kind.ConnectionCls):  # type: ignore[misc]
                def connect(self) -> None:
                    super().connect()
                    thread.request.uses(self)
                    if is_checked:
                        _check_address(self.sock.getpeername()[0], self.host)

                def request(self, *args: Any, **options: Any) -> None:
                    thread.request.uses(self)
                    super().request(*args, **options)

            return type(kind.__name__, (kind,), {"ConnectionCls": Connection})

        options = {"num_pools": 256, "maxsize": self.options.threads}
        manager = http.ProxyManager(proxy, **options) if proxy else http.PoolManager(**options)
        manager.pool_classes_by_scheme = {
            "http": pool_of(http.HTTPConnectionPool),
            "https": pool_of(http.HTTPSConnectionPool),
        }
        return manager


class _PrivateError(Exception):
    """A host in a private network."""


def check_url(url: str) -> str:
    """The reason why a URL cannot be requested, "" if it can."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"not a valid address ({error})"
    if parts.scheme.lower() not in ("http", "https"):
        return f"not an address of http or https, but of {parts.scheme[:20]!r}"
    if not host or parts.username is not None or not url.isprintable() or " " in url:
        return "not a valid address (no host, a user name, or letters that an address does not have)"
    return ""


def without_query(url: str) -> str:
    """A URL as stored and displayed: without query, fragment and user name, since these may contain credentials."""
    scheme, slashes, rest = re.split("[?#]", url, maxsplit=1)[0].partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{slashes}{host.rpartition('@')[2]}{slash}{path}"


def _host(url: str) -> str:
    return (urlsplit(url).hostname or "").lower()


def _check_address(address: str, host: str) -> None:
    if not is_public(address):
        raise _PrivateError(f"{host} is {address}, in a private network: pass private=True to allow such hosts")


def _short(text: object) -> str:
    return " ".join(str(text).split())[:120]


def _urllib3() -> ModuleType:
    try:
        import urllib3
    except ImportError as error:
        raise MissingExtraError("urllib3", "urls", "fetching images from a list of addresses") from error
    return urllib3


Place: TypeAlias = "tuple[Any, ...]"

_KEYS, _CAPTIONS = ("key", "__key__"), ("caption", "text", "alt_text")
_AHEAD = 4  # images per thread that may be fetched or requested ahead of time
_AHEAD_BYTES = 256 << 20


class UrlListSource(FileSource):
    """The images in the list of URLs at `root`. Columns: see the module. options: those of `FetchOptions`."""

    kind = "list of addresses"

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        path_column: str | None = None,
        label_column: str | None = None,
        split_column: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root)
        self.columns = NamedColumns(path_column, label_column, split_column)
        self.options = FetchOptions(**options)
        self._fetcher: Fetcher | None = None

    def list_files(self, split: str | None) -> SourceListing:
        table = open_url_table(self.root)
        url, label, named_split = self.columns.checked(table)
        url = url or first_column(table.columns, (*URL_COLUMNS, *PATH_COLUMNS))
        if url is None:
            raise SourceError(
                f"{self.root}: no column of addresses ({', '.join(URL_COLUMNS)}); name it with  path_column='COLUMN'"
            )
        label = label or first_column(table.columns, LABEL_COLUMNS, (url, named_split))
        taken = (url, named_split, label)
        by = named_split or first_column(table.columns, SPLIT_COLUMNS, taken)
        key, caption = (first_column(table.columns, names, taken) for names in (_KEYS, _CAPTIONS))
        metadata = [url, *(name for name in table.columns if name not in {*taken, by, key, caption})]
        fields = {"image": "image"} | ({"caption": "text"} if caption is not None else {}) | {"json": "json"}
        parts: dict[str, ListingBuilder] = {}
        labels: list[Any] = []
        lines: list[int] = []
        for line, row in table.rows():
            where, address = table.where(line), row.get(url)
            if not isinstance(address, str) or not address.strip():
                raise SourceError(f"{where}: no address in the column {url!r}")
            name = split or "train" if by is None else split_of_value(row.get(by), f"{where}: column {by!r}")
            words = row.get(caption) if caption is not None else None
            text = None if is_missing(words) else " ".join(str(words).split()).encode("utf-8", "replace")
            record = json_payload({**row, url: without_query(address.strip())}, metadata)
            place = (address.strip(), *([] if caption is None else [text]), record)
            own = f"{len(lines):09d}"
            if key is not None:
                value = row.get(key)
                own = checked_name(RelativePath, "" if value is None else str(value), f"{where}: column {key!r}")
            # Labels are known when all rows have been read; until then, the position of the row stands for its label.
            builder = parts.setdefault(name, ListingBuilder(len(fields)))
            builder.add([""] * len(fields), place, 0, key=own, label=len(lines))
            lines.append(line)
            labels.append(row.get(label) if label is not None else None)
        if not lines:
            raise SourceError(f"{self.root}: no addresses")
        numbers, classes, warnings = number_labels(labels, lines, table)
        listing = SourceListing({}, fields, classes, warnings=warnings, json_listed=True, max_workers=1)
        for name, builder in parts.items():
            part = listing.splits[name] = builder.build()
            part.labels = np.array(numbers, np.int64)[part.labels]
            check_names(part.keys, str(self.root))
            if len(repeated(lambda keys=part.keys: keys, len(part))):  # type: ignore[misc]
                raise SourceError(f"{self.root}: keys occur twice in {name}; rename the column of keys")
        return listing

    @contextmanager
    def open_files(self) -> Iterator[UrlReader]:
        if self._fetcher is None:  # kept for the next shards, with its connections and rate limits
            self._fetcher = Fetcher(self.options)
        with ThreadPoolExecutor(self.options.threads, thread_name_prefix="fetch") as pool:
            reader = UrlReader(self._fetcher, pool)
            try:
                yield reader
            except BaseException:
                self._fetcher.stop()
                self._fetcher = None
                raise
            finally:
                reader.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_fetcher": None}


class UrlReader:
    """Fetches images, ahead of time if they are expected.

    Images fetched and not yet read take up to 256 MiB, plus up to one image per thread.
    """

    def __init__(self, fetcher: Fetcher, pool: ThreadPoolExecutor) -> None:
        self._fetcher, self._pool = fetcher, pool
        self._expected: deque[str] = deque()
        self._ahead: deque[tuple[str, Future[bytes | None]]] = deque()
        self._most = _AHEAD * fetcher.options.threads
        self._room = threading.Condition()
        self._bytes = self._sent = self._read = 0  # the latter two are counts of images
        self._is_closed = False

    def expect(self, places: Sequence[Place]) -> None:
        """Announce the places that `read` will be called with next, in this order."""
        self._expected.extend(place[0] for place in places)

    def read(self, place: Place, arena: Arena) -> Sequence[Buffer | None]:
        url, *fields = place
        self._send()
        while self._ahead and self._ahead[0][0] != url:  # expected, but skipped
            self._next()
        image = self._next() if self._ahead else self._fetcher.fetch(url)
        if image is None:
            raise BadSampleError(f"{NOT_FETCHED}stopped: {without_query(url)}")
        return (image, *fields)

    def close(self) -> None:
        """Make no further requests; those in progress are not ended."""
        with self._room:
            self._is_closed = True
            self._room.notify_all()
        for _, future in self._ahead:
            future.cancel()

    def _send(self) -> None:
        while self._expected and len(self._ahead) < self._most:
            url = self._expected.popleft()
            self._ahead.append((url, self._pool.submit(self._fetch, url, self._sent)))
            self._sent += 1

    def _fetch(self, url: str, number: int) -> bytes | None:
        """Fetch an image in a thread, once there is memory for it or it is the next to be read. None after `close`."""
        with self._room:
            self._room.wait_for(lambda: self._bytes < _AHEAD_BYTES or number <= self._read or self._is_closed)
            if self._is_closed:
                return None
        data = self._fetcher.fetch(url)
        with self._room:
            self._bytes += len(data)
        return data

    def _next(self) -> bytes | None:
        """The image that was requested first. Raises BadSampleError."""
        data: bytes | None = None
        try:
            data = self._ahead.popleft()[1].result()
            return data
        finally:
            with self._room:
                self._read += 1
                self._bytes -= len(data or b"")
                self._room.notify_all()
