"""One object store or web server, through obstore: the only file that knows it.

Every call is bounded: `Patience` has the seconds of one request, body included, and how often it is retried (5xx,
resets, time-outs; obstore's own retries with growing, jittered pauses). A body that breaks off in the middle is
requested again here. Credentials, endpoints and proxies are obstore's: it reads AWS_*, GOOGLE_* and AZURE_* and the
files and services that belong to them.

obstore runs threads of its own, which a forked child does not have: a call there would wait for ever. Forked children
use `cache.remote.client`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from cache.errors import (
    AddressError,
    CertificateError,
    ChangedError,
    DeniedError,
    ExistsError,
    MissingError,
    MissingExtraError,
    NoBucketError,
    RemoteError,
    SlowError,
    TruncatedError,
    UnsupportedError,
)
from cache.remote.url import RemoteUrl, client_options

__all__ = ["CRC_ATTRIBUTE", "Facts", "ObjectStore", "Patience", "Span", "translated"]

_T = TypeVar("_T")
CRC_ATTRIBUTE = "crc32c"  # metadata that uploads give an object: 8 hex digits, the CRC32C of its bytes
_BODY_TRIES = 2  # obstore retries bodies itself where the server sends ETags
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
        """The longest time that one read can take."""
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
    """The objects below one address. Threads may share it. Raises RemoteError and its kinds, MissingExtraError."""

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
        be written with it; they do not support `create` (UnsupportedError).
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
        """Remove an object; one that is not there is fine."""
        with self._asking("DELETE", path), suppress(FileNotFoundError):
            self._obs.delete(self._store, path)

    # --- inside -------------------------------------------------------------------------------------------------
    def _collected(self, result: Any, most_bytes: int, what: str) -> bytes:
        """The body of an answer; more than so many bytes, whatever its headers say, are a RemoteError."""
        parts, total = [], 0
        for part in result.stream(min_chunk_size=most_bytes + 1):  # an honest body is one part, and not copied again
            total += len(part)
            if total > most_bytes:
                raise RemoteError(
                    f"{self.url.at(what)}: the server sends more than the {most_bytes:,} bytes that were requested; "
                    f"do not trust what is there"
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
        """Translates errors of a call of obstore."""
        try:
            yield
        except RemoteError:
            raise
        except Exception as error:
            raise translated(error, f"{self.url.at(path)} ({verb})", str(error)) from error


def _again(once: Callable[[], _T]) -> _T:
    """Request once more where a body broke off."""
    for _ in range(_BODY_TRIES - 1):
        try:
            return once()
        except TruncatedError:
            pass
    return once()


def _facts(meta: Mapping[str, Any]) -> Facts:
    return Facts(int(meta["size"]), str(meta.get("e_tag") or ""), meta["last_modified"].timestamp())


# --- errors of obstore --------------------------------------------------------------------------------------------
_KINDS: dict[str, tuple[type[RemoteError], str]] = {
    "FileNotFoundError": (MissingError, "there is no such object; check the address"),
    "NotFoundError": (MissingError, "there is no such object; check the address"),
    "PermissionDeniedError": (DeniedError, "access was denied; check credentials and the rights they give: {set}"),
    "UnauthenticatedError": (DeniedError, "credentials are missing or wrong; set {set}"),
    "PreconditionError": (ChangedError, "is no longer the object that was read before; open it again"),
    "AlreadyExistsError": (ExistsError, "is there already"),
    "NotSupportedError": (UnsupportedError, "the server does not support this request"),
    "NotImplementedError": (UnsupportedError, "the server does not support this request"),
    "InvalidPathError": (AddressError, "is not a valid address"),
    "UnknownConfigurationKeyError": (AddressError, "the configuration has a key that obstore does not know"),
}


_PREFIXES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or for a public bucket AWS_SKIP_SIGNATURE=true",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS to an account's file, or for a public bucket GOOGLE_SKIP_SIGNATURE=true",
    "az": "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_KEY, or for a public "
    "container AZURE_SKIP_SIGNATURE=true",
    "https": "user name and password in the address, as https://user:password@host/path",
}
# Patterns of obstore's debug text of failed connections and of clients that cannot be created, in this order.
_CAUSES: tuple[tuple[str, type[RemoteError], str], ...] = (
    (r"127\.0\.0\.1:0,", DeniedError, "the server redirects to another host, which must not get the session token"),
    (
        r"UnknownIssuer|CaUsedAsEndEntity|BadSignature",
        CertificateError,
        "TLS: no authority that this machine trusts has signed the server's certificate; if it is a private one, set "
        "{prefix}ROOT_CERTIFICATE to the file of its certificate",
    ),
    (
        r"InvalidCertificate\(\s*(Expired|NotValidYet)",
        CertificateError,
        "TLS: the server's certificate has expired or is not valid yet; renew it, and check this machine's clock",
    ),
    (
        r"NotValidForName",
        CertificateError,
        "TLS: the server's certificate is for another host; check the endpoint",
    ),
    (
        r"builder error[\s\S]*InvalidCertificate|No certificates found",
        CertificateError,
        "TLS: {prefix}ROOT_CERTIFICATE or {prefix}PROXY_CA_CERTIFICATE holds no PEM certificate that can be read",
    ),
    (r"InvalidCertificate\(", CertificateError, "TLS: the server's certificate is not accepted"),
    (
        r"InvalidMessage|InvalidContentType|CorruptMessage",
        CertificateError,
        "TLS: the server does not speak TLS there; check the port, or whether the endpoint is http",
    ),
    (
        r"AlertReceived|HandshakeFailure|PeerIncompatible|NoApplicationProtocol",
        CertificateError,
        "TLS: the server refuses the connection",
    ),
    (
        r"allow_http|BadScheme",
        AddressError,
        "the endpoint is http; allow that with {prefix}ALLOW_HTTP=true, or use https",
    ),
    (r"Invalid Access Key|InvalidAccessKey", DeniedError, "the key in AZURE_STORAGE_ACCOUNT_KEY is not base64"),
    (r"MissingAccount|Account must be specified", DeniedError, "set AZURE_STORAGE_ACCOUNT_NAME"),
    (
        r"OpenCredentials|DecodeCredentials|ServiceAccount|service account",
        DeniedError,
        "the file that GOOGLE_APPLICATION_CREDENTIALS names is missing or is not an account's",
    ),
    (
        r"ReadPem|Error reading pem|KeyRejected",
        DeniedError,
        "the private key in the file that GOOGLE_APPLICATION_CREDENTIALS names cannot be read",
    ),
    (r"dns error", RemoteError, "no host of that name is known; check the endpoint and the region"),
    (
        r"ConnectionRefused",
        RemoteError,
        "error sending request: nothing listens there; check the endpoint and its port",
    ),
)


def translated(error: BaseException, where: str, says: str) -> RemoteError:
    """The RemoteError for an error of obstore. where: printable address and range. says: its text without secrets."""
    detail, scheme = _detail(says), where.partition("://")[0]
    set_these = _CREDENTIALS.get(scheme, _CREDENTIALS["https"])
    if "NoSuchBucket" in says or "ContainerNotFound" in says or "The specified bucket does not exist" in says:
        return NoBucketError(f"{where}: there is no such bucket; check the address, the endpoint and the region")
    if "169.254.169.254" in says or "metadata.google.internal" in says:  # where a cloud has them
        return DeniedError(
            f"{where}: no credentials were found, neither in the environment nor from a cloud that this machine is of; "
            f"set {set_these}"
        )
    if "416 Range Not Satisfiable" in says:
        return ChangedError(f"{where}: the object is shorter than that; it changed since it was indexed")
    kind, meaning = _KINDS.get(type(error).__name__, (RemoteError, ""))
    if kind is UnsupportedError and "GET" in where:
        meaning = "the server ignores ranges; download the set, or stage it from a server that serves ranges"
    if kind is not RemoteError:
        return kind(f"{where}: {meaning.format(set=set_these)} ({detail})")
    for pattern, kind, meaning in _CAUSES:
        if re.search(pattern, says):
            return kind(f"{where}: {meaning.format(prefix=_PREFIXES.get(scheme, 'PACKER_HTTP_'))} ({detail})")
    if re.search(r"TimedOut|timed out|deadline has elapsed", says):
        return SlowError(f"{where}: no whole answer in time ({detail}); PACKER_REMOTE_TIMEOUT sets the seconds")
    if re.search(r"IncompleteMessage|UnexpectedEof|end of file before|IncompleteBody|response body", says):
        return TruncatedError(f"{where}: the answer broke off ({detail}); try again")
    return RemoteError(f"{where}: {detail}; check the network, the endpoint and the region")


def _detail(says: str) -> str:
    """The first line of a message, and the error code of the server, in about 300 characters at most."""
    line = says.partition("\n")[0].partition(": <?xml")[0].strip().rstrip(":;. ")
    code = re.search(r"<Code>([A-Za-z]{1,60})</Code>", says)
    shown = line if len(line) <= 300 else line[:297] + "..."
    return f"{shown}, {code[1]}" if code and code[1] not in shown else shown
