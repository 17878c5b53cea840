"""One object store or web server, through obstore: the only file that knows it.

Every call is bounded: `Patience` holds the seconds a request may take, body included, and how long it is tried again
(5xx, resets, time-outs; obstore's own retries with growing, jittered pauses). A body that breaks off in the middle is
asked for again here. Credentials, endpoints and proxies are obstore's business: it reads AWS_*, GOOGLE_* and AZURE_*
and the files and services that belong to them.

obstore runs threads of its own, which a forked child does not have: a call there would wait for ever. Such a child
must not come here; see `cache.remote.courier`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from cache.errors import ChangedError, MissingError, MissingExtraError, RemoteError, TruncatedError
from cache.remote.obstore_errors import translated
from cache.remote.url import RemoteUrl, client_options

__all__ = ["CRC_ATTRIBUTE", "Facts", "ObjectStore", "Patience", "Span"]

_T = TypeVar("_T")
CRC_ATTRIBUTE = "crc32c"  # what our uploads write beside an object: 8 hex digits, the CRC32C of its bytes
_BODY_TRIES = 2  # obstore has tried for itself, where the server gives ETags
_PART_BYTES = 8 << 20
_MOST_PARTS = 9000  # S3 takes 10,000


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait. seconds: one request, body included. retries: of one request, within 2 * seconds."""

    seconds: float = 30.0
    retries: int = 6

    def __post_init__(self) -> None:
        if not 0 < self.seconds <= 3600 or not 0 <= self.retries <= 100:
            raise ValueError(f"{self}: seconds must be above 0 and at most 3600, retries from 0 to 100")

    @property
    def most_seconds(self) -> float:
        """The longest that one read can take, whatever happens."""
        return _BODY_TRIES * 3 * self.seconds + 10

    @classmethod
    def from_environment(cls) -> Patience:
        """PACKER_REMOTE_TIMEOUT (seconds) and PACKER_REMOTE_RETRIES over the defaults. Raises ValueError."""
        try:
            seconds = float(os.environ.get("PACKER_REMOTE_TIMEOUT", cls().seconds))
            return cls(seconds, int(os.environ.get("PACKER_REMOTE_RETRIES", cls().retries)))
        except ValueError as error:
            raise ValueError(f"PACKER_REMOTE_TIMEOUT or PACKER_REMOTE_RETRIES: {error}") from error


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of an object. etag: "" where the server gives none. modified: seconds since the epoch."""

    bytes: int
    etag: str
    modified: float


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [start, stop) of an object. etag, bytes: what the object must have, where that is known."""

    path: str
    start: int
    stop: int
    etag: str = ""
    bytes: int | None = None

    def __str__(self) -> str:
        return f"{self.path}, bytes {self.start} to {self.stop}"


class ObjectStore:
    """What lies below one address. Threads may share it. Raises RemoteError and its kinds, MissingExtraError."""

    def __init__(self, url: RemoteUrl, patience: Patience) -> None:
        try:
            import obstore
            import obstore.store
        except ImportError as error:
            raise MissingExtraError("obstore", "remote", f"{url.scheme}://") from error
        self.url, self._obs = url, obstore
        retry: Any = {"max_retries": patience.retries, "retry_timeout": timedelta(seconds=2 * patience.seconds)}
        retry["backoff"] = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 2}
        options: Any = client_options(url, patience.seconds, os.environ)
        try:
            self._store: Any = obstore.store.from_url(str(url), client_options=options, retry_config=retry)
        except Exception as error:
            raise translated(error, str(url), str(error)) from error

    def read(self, span: Span) -> tuple[Any, Facts]:
        """The bytes of a span, in one GET, and the facts of its object. Raises ChangedError, TruncatedError, …"""
        return _again(lambda: self._read_once(span))

    def _read_once(self, span: Span) -> tuple[Any, Facts]:
        options: Any = {"range": (span.start, span.stop)}
        if span.etag and not span.etag.startswith("W/"):  # a weak ETag never matches, by RFC 9110
            options["if_match"] = span.etag
        with self._asking("GET", str(span)):
            result = self._obs.get(self._store, span.path, options=options)
            facts, found = _facts(result.meta), result.range
            self._check(span, facts)
            data = self._collected(result, span.stop - span.start, str(span))
        if tuple(found) != (span.start, span.stop) or len(data) != span.stop - span.start:
            raise TruncatedError(f"{self.url.at(str(span))}: {len(data)} bytes of {found} came; try again")
        return data, facts

    def whole(self, path: str, most_bytes: int, cut: bool = False) -> tuple[bytes, Facts]:
        """A whole small object. One of more than `most_bytes` is a RemoteError; or cut there, in one ranged GET."""
        return _again(lambda: self._whole_once(path, most_bytes, cut))

    def _whole_once(self, path: str, most_bytes: int, cut: bool) -> tuple[bytes, Facts]:
        options: Any = {"range": (0, most_bytes)} if cut else None
        with self._asking("GET", path):
            result = self._obs.get(self._store, path, options=options)
            facts = _facts(result.meta)
            if facts.bytes > most_bytes and not cut:
                raise RemoteError(f"{self.url.at(path)}: {facts.bytes} bytes, at most {most_bytes} expected")
            expected = min(facts.bytes, most_bytes)
            data = self._collected(result, expected, path)
        if len(data) != expected:
            raise TruncatedError(f"{self.url.at(path)}: {len(data)} bytes of {facts.bytes} came")
        return data, facts

    def head(self, path: str) -> tuple[Facts, Mapping[str, str]]:
        """Size, ETag and time of an object, and its attributes. Raises MissingError, …"""
        with self._asking("HEAD", path):
            result = self._obs.get(self._store, path, options={"head": True})
            return _facts(result.meta), {str(name): str(value) for name, value in result.attributes.items()}

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """(path, bytes) of every object below a folder."""
        with self._asking("list", prefix):
            for page in self._obs.list(self._store, prefix=prefix or None):
                yield from ((meta["path"], meta["size"]) for meta in page)

    def put(self, path: str, content: bytes | Path, *, crc32c: int, create: bool = False) -> None:
        """Write an object whole or not at all. create: only where there is none yet. Raises ExistsError, …

        Large files go up in parts. Parts of an upload that was killed stay in a hidden state, and cost, until the
        bucket's rules remove them. To web servers (WebDAV) a file goes by one request, through memory, and nothing can
        be written beside it; they know no `create` (UnsupportedError).
        """
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        part = max(_PART_BYTES, -(-size // _MOST_PARTS))
        options: dict[str, Any] = {"mode": "create"} if create else {"chunk_size": part, "max_concurrency": 4}
        if self.url.is_http and not create:
            options = {"use_multipart": False}
        with self._asking("PUT", path):
            try:
                self._obs.put(self._store, path, content, attributes={CRC_ATTRIBUTE: f"{crc32c:08x}"}, **options)
            except Exception as error:
                if self.url.is_http and "409 Conflict" in str(error):  # by RFC 4918 the folder is missing
                    raise MissingError(
                        f"{self.url.at(path)} (PUT): the server has no folder {self.url}; make it there first"
                    ) from error
                raise

    def delete(self, path: str) -> None:
        """Remove an object; one that is not there is no error."""
        with self._asking("DELETE", path), suppress(FileNotFoundError):
            self._obs.delete(self._store, path)

    # --- inside -------------------------------------------------------------------------------------------------
    def _collected(self, result: Any, most_bytes: int, what: str) -> bytes:
        """The body of an answer, which has at most so many bytes whatever its headers say."""
        parts, total = [], 0
        for part in result.stream(min_chunk_size=most_bytes + 1):  # an honest body is one part, and not copied again
            total += len(part)
            if total > most_bytes:
                raise RemoteError(
                    f"{self.url.at(what)}: the server sends more than the {most_bytes:,} bytes it was asked for; "
                    f"what is there must not be trusted"
                )
            parts.append(part)
        return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)

    def _check(self, span: Span, facts: Facts) -> None:
        where = self.url.at(span.path)
        if span.bytes is not None and facts.bytes != span.bytes:
            raise ChangedError(f"{where}: has {facts.bytes} bytes, {span.bytes} expected: it was changed or truncated")
        if span.etag and facts.etag and facts.etag != span.etag:
            raise ChangedError(f"{where}: has the ETag {facts.etag}, {span.etag} expected: it changed while being read")

    @contextmanager
    def _asking(self, verb: str, path: str) -> Iterator[None]:
        """Around a call of obstore: its errors become those of this project."""
        try:
            yield
        except RemoteError:
            raise
        except Exception as error:
            raise translated(error, f"{self.url.at(path)} ({verb})", str(error)) from error


def _again(once: Callable[[], _T]) -> _T:
    """Ask again where a body broke off."""
    for _ in range(_BODY_TRIES - 1):
        try:
            return once()
        except TruncatedError:
            pass
    return once()


def _facts(meta: Mapping[str, Any]) -> Facts:
    return Facts(int(meta["size"]), str(meta.get("e_tag") or ""), meta["last_modified"].timestamp())
