"""One object store or web server, through obstore; no other file imports obstore.

Every call is bounded: `Patience` sets the seconds of one request, body included, and the number of retries (5xx,
    resets, time-outs; obstore retries with growing, jittered pauses). A body that breaks off is requested again here.
    Credentials, endpoints and proxies are left to obstore, which reads AWS_*, GOOGLE_* and AZURE_* and the files and
    services that belong to them.

obstore runs its own threads, which a forked child does not have, so a call there would wait forever. Forked children
load obstore's library once more, with threads of its own.
"""

from __future__ import annotations

import base64
import functools
import ipaddress
import os
import re
import shutil
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import unquote_to_bytes

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
from cache.node import reading_processes
from cache.system import at_fork

# Addresses in object stores and on web servers, and the HTTP options from the environment.
#
# Addresses are parsed once, and printed without their secrets.
#
#     s3://bucket/path    gs://bucket/path    az://container/path    https://host/path    http://host:port/path
#
# Credentials for stores come from the environment, which obstore reads; only an https address may contain a user name
# and password, which are never printed or written to disk.
#
# obstore ignores all HTTP options of the environment (time-outs, proxies, certificates) when it is passed any, so all
# of them are passed from here.


SCHEMES = ("s3", "gs", "az", "https", "http")
_REMOTE = re.compile(r"([a-z][a-z0-9]*)://", re.IGNORECASE)
_PARTS = re.compile(r"([a-z0-9]+)://([^/]*)/?(.*)", re.DOTALL)
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:@\[\]]*)(:[0-9]*)?")
_PREFIXES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_", "http": "PACKER_HTTP_", "https": "PACKER_HTTP_"}
NOWHERE = "127.0.0.1:0"  # no server can listen on port 0
_FLAGS = ("allow_http", "allow_invalid_certificates", "http1_only")
_TEXTS = ("proxy_url", "proxy_excludes", "user_agent")
_CERTIFICATES = ("root_certificate", "proxy_ca_certificate")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
# Also not public, though `ipaddress` of some Python versions says so: metadata servers of Azure and Oracle,
# IPv4-compatible addresses, local NAT64, Teredo and other tunnels, site-local addresses.
_NOT_PUBLIC = tuple(
    map(ipaddress.ip_network, ("168.63.129.16", "192.0.0.0/24", "::/96", "64:ff9b:1::/48", "2001::/23", "fec0::/10"))
)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_MOST_CERTIFICATE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class RemoteUrl:
    """One address. host: bucket, container, or host and port. path: without leading and trailing slashes; may be "".

    bearer: a token for a server of `cache.serving`, which is reached without a proxy.
    """

    scheme: str
    host: str
    path: str
    userinfo: str = field(default="", repr=False)
    bearer: str = field(default="", repr=False)

    @property
    def is_http(self) -> bool:
        return self.scheme in ("http", "https")

    @property
    def name(self) -> str:
        """The last component of the path, for messages."""
        return self.path.rpartition("/")[2] or self.host.partition(":")[0]

    def login(self) -> str:
        """The value of the Authorization header (RFC 7617, RFC 6750); "" without a password and a token."""
        if self.bearer:
            return f"Bearer {self.bearer}"
        return "Basic " + base64.b64encode(unquote_to_bytes(self.userinfo)).decode() if self.userinfo else ""

    def at(self, path: str) -> str:
        """The printable address of an object below this one."""
        return f"{self}/{path}" if path else str(self)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}" + (f"/{self.path}" if self.path else "")


def is_remote(place: str | os.PathLike[str] | RemoteUrl) -> bool:
    """Whether this is an address rather than a local path."""
    if isinstance(place, RemoteUrl):
        return True
    match = _REMOTE.match(place) if isinstance(place, str) else None
    return match is not None and _is_scheme(match[1].lower())


def _is_scheme(name: str) -> bool:
    """Whether this is the scheme of a store: one of SCHEMES, or one that another distribution adds."""
    return name in SCHEMES or name in _installed_schemes()


def _installed_schemes() -> tuple[str, ...]:
    from cache.plugins import installed_names

    return installed_names("packer.stores", SCHEMES)


def open_store(url: RemoteUrl, patience: Patience) -> ObjectStore:
    """The store of an address.

    obstore's, or for other schemes the class that another distribution names by an entry point of packer.stores; it has
    the methods of `ObjectStore`. Raises RemoteError, MissingExtraError.
    """
    if url.scheme in SCHEMES:
        return ObjectStore(url, patience)
    from cache.plugins import installed_callable

    kind = installed_callable("packer.stores", SCHEMES, url.scheme)
    if kind is None:
        raise UnsupportedError(f"{url}: the package that reads {url.scheme}:// is broken; repair or reinstall it")
    store: ObjectStore = kind(url, patience)
    return store


def is_public(address: str) -> bool:
    """Whether a numeric address belongs to the public internet, not to this machine, a private network or a cloud's
    metadata service. IPv6 addresses that lead to an IPv4 address (mapped, NAT64, 6to4) are judged by the latter."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return is_public(str(ip.ipv4_mapped))
        inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else ip.sixtofour
        if inner is not None:
            return is_public(str(inner))
    return ip.is_global and not ip.is_multicast and not any(ip in network for network in _NOT_PUBLIC)


def parse_url(place: str | os.PathLike[str] | RemoteUrl) -> RemoteUrl:
    """Parse an address. Raises AddressError, whose message contains no secrets."""
    if isinstance(place, RemoteUrl):
        return place
    text = os.fspath(place)
    match = _PARTS.fullmatch(text[: text.find("://")].lower() + text[text.find("://") :])
    if match is None or not _is_scheme(match[1]):
        shown = re.sub(r"//.*@", "//***@", text, flags=re.DOTALL)
        kinds = ", ".join(f"{name}://" for name in (*SCHEMES, *_installed_schemes()))
        raise AddressError(f"{shown!r} is not an address of the kinds {kinds}")
    userinfo, _, host = match[2].rpartition("@")
    scheme, path = match[1], match[3].strip("/")
    url = RemoteUrl(scheme, host, path, userinfo)
    # The unexpected parts in the next two messages may come from a password, so they are not shown.
    if ":" in host and not url.is_http:
        raise AddressError(
            f"{scheme}://***: the name of a bucket has no colon, and credentials do not belong in the address; set "
            f"them in the environment"
        )
    if "@" in userinfo or ("@" in path and ":" in host) or not _HOST.fullmatch(host):
        raise AddressError(
            f"{scheme}://***: the part before the path is not user:password@host:port; write @, : and / in a user name "
            f"or password, and @ in a path, as %40, %3A and %2F"
        )
    if not host:
        raise AddressError(f"{url}: has no {'host' if url.is_http else 'bucket'}")
    if userinfo and not url.is_http:
        raise AddressError(f"{url}: credentials do not belong in the address; set them in the environment")
    if set(path) & set("?#"):
        bare = RemoteUrl(scheme, host, re.split("[?#]", path)[0])
        raise AddressError(f"{bare}: has a query; give the address of the set's folder, without ? and #")
    if not f"{host}{path}".isprintable() or any(part in ("", ".", "..") for part in path.split("/") if path):
        raise AddressError(f"{str(url)!r}: has empty, dotted or unprintable parts")
    return url


def client_options(url: RemoteUrl, seconds: float, environ: Mapping[str, str]) -> dict[str, Any]:
    """HTTP options of obstore for an address; seconds: time-out of one request. Raises CertificateError."""
    prefix = _PREFIXES[url.scheme]
    options: dict[str, Any] = {
        "timeout": timedelta(seconds=seconds),
        "connect_timeout": timedelta(seconds=min(5.0, seconds)),
    }
    for name in _FLAGS:
        if (value := environ.get(prefix + name.upper())) is not None:
            options[name] = value.strip().lower() in ("1", "true", "yes", "on", "y", "t")
    for name in _TEXTS:
        if value := environ.get(prefix + name.upper()):
            options[name] = value
    for name in _CERTIFICATES:
        if value := environ.get(prefix + name.upper()):
            options[name] = _certificates(prefix + name.upper(), value)
    if url.scheme == "http":
        options["allow_http"] = True
    if url.login():
        options["default_headers"] = {"Authorization": url.login()}
    if url.bearer:  # bypass the proxies of the environment, and reach no other host
        host = _HOST.fullmatch(url.host)
        options |= {"proxy_url": f"http://{NOWHERE}", "proxy_excludes": host[1].strip("[]") if host else url.host}
    if url.scheme == "s3" and environ.get("AWS_SESSION_TOKEN"):
        options.update(_fence(options, environ))
    return options


def _certificates(variable: str, value: str) -> str:
    """PEM text: the value of the variable, or the content of the file that it names."""
    if "-----BEGIN" in value:
        return value
    path = Path(value).expanduser()
    try:
        with open(path, "rb") as file:
            text = file.read(_MOST_CERTIFICATE_BYTES).decode("ascii", "replace")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CertificateError(
            f"{variable}: neither the text of a PEM certificate nor a readable file: {value[:200]!r} ({reason})"
        ) from error
    if "-----BEGIN" not in text:
        raise CertificateError(f"{variable}: {path} has no PEM certificate (no line -----BEGIN CERTIFICATE-----)")
    return text


def _fence(options: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Proxy options that keep a session token from following a redirect to another host.

    On a redirect the client drops only the Authorization header, and it cannot turn redirects off. So hosts other than
    the endpoint are sent to a proxy at `NOWHERE`, where none listens. Nothing is lost, since a request is signed for
    its host. If a real proxy is configured, that one is used.
    """
    if "proxy_url" in options or any(environ.get(name) or environ.get(name.upper()) for name in _PROXIES):
        return {}
    endpoints = [value for name, value in environ.items() if name.upper().startswith("AWS_ENDPOINT")]
    hosts = [match[1] for value in endpoints if (match := re.match(r"https?://(?:[^/@]*@)?(\[[^]]*\]|[^/:]*)", value))]
    return {"proxy_url": f"http://{NOWHERE}", "proxy_excludes": ",".join([*hosts, "amazonaws.com", "amazonaws.com.cn"])}


_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])
CRC_ATTRIBUTE = "crc32c"  # metadata of uploaded objects: the CRC32C of their bytes in 8 hex digits
_BODY_TRIES = 2  # obstore retries bodies itself where the server sends ETags
_PART_BYTES = 8 << 20
_MOST_PARTS = 9000  # S3 takes 10,000


@dataclass(frozen=True, slots=True)
class Patience:
    """Time limits. seconds: of one request, body included. retries: of one request, within 2 * seconds."""

    seconds: float = 30.0
    retries: int = 6

    def __post_init__(self) -> None:
        if not 0 < self.seconds <= 3600 or not 0 <= self.retries <= 100:
            raise ValueError(f"{self}: seconds must be above 0 and at most 3600, retries from 0 to 100")

    @property
    def most_seconds(self) -> float:
        """The longest time that one read can take, in seconds."""
        return _BODY_TRIES * 3 * self.seconds + 10

    @classmethod
    def from_environment(cls) -> Patience:
        """The defaults, overridden by PACKER_REMOTE_TIMEOUT (seconds) and PACKER_REMOTE_RETRIES. Raises ValueError."""
        try:
            seconds = float(os.environ.get("PACKER_REMOTE_TIMEOUT", cls().seconds))
            return cls(seconds, int(os.environ.get("PACKER_REMOTE_RETRIES", cls().retries)))
        except ValueError as error:
            raise ValueError(f"PACKER_REMOTE_TIMEOUT or PACKER_REMOTE_RETRIES: {error}") from error


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about an object. etag: "" if the server sends none. modified: seconds since the epoch."""

    bytes: int
    etag: str
    modified: float


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [start, stop) of an object. etag, bytes: the expected ETag and size of the object, if known."""

    path: str
    start: int
    stop: int
    etag: str = ""
    bytes: int | None = None

    def __str__(self) -> str:
        return f"{self.path}, bytes {self.start} to {self.stop}"


def _again(once: _F) -> _F:
    """Repeat a request whose body broke off."""

    @functools.wraps(once)
    def call(*arguments: Any) -> Any:
        for _ in range(_BODY_TRIES - 1):
            with suppress(TruncatedError):
                return once(*arguments)
        return once(*arguments)

    return cast(_F, call)


class ObjectStore:
    """The objects below one address; thread-safe. Raises RemoteError and its subclasses, MissingExtraError."""

    def __init__(self, url: RemoteUrl, patience: Patience) -> None:
        try:
            self._obs, make_store = _obstore()
        except ImportError as error:
            raise MissingExtraError("obstore", "remote", f"{url.scheme}://") from error
        self.url = url
        retry: Any = {"max_retries": patience.retries, "retry_timeout": timedelta(seconds=2 * patience.seconds)}
        retry["backoff"] = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 2}
        options: Any = client_options(url, patience.seconds, os.environ)
        try:
            self._store: Any = make_store(str(url), client_options=options, retry_config=retry)
        except Exception as error:
            raise translated(error, str(url), str(error)) from error
        _stores.add(self)

    @_again
    def read(self, span: Span) -> tuple[memoryview, Facts]:
        """The bytes of a span, by one GET, and the facts of its object. Raises ChangedError, TruncatedError, …"""
        options: Any = {"range": (span.start, span.stop)}
        if span.etag and not span.etag.startswith("W/"):  # a weak ETag never matches, by RFC 9110
            options["if_match"] = span.etag
        with self._asking("GET", str(span)):
            result = self._obs.get(self._store, span.path, options=options)
            facts, received = _facts(result.meta), result.range
            self._check(span, facts)
            data = self._collected(result, span.stop - span.start, str(span))
        if tuple(received) != (span.start, span.stop) or len(data) != span.stop - span.start:
            raise TruncatedError(f"{self.url.at(str(span))}: received {len(data)} bytes of {received}; try again")
        return data, facts

    @_again
    def whole(self, path: str, most_bytes: int, cut: bool = False) -> tuple[bytes, Facts]:
        """A whole small object. If it has more than `most_bytes`: RemoteError, or with `cut` its first bytes."""
        options: Any = {"range": (0, most_bytes)} if cut else None
        with self._asking("GET", path):
            result = self._obs.get(self._store, path, options=options)
            facts = _facts(result.meta)
            if facts.bytes > most_bytes and not cut:
                raise RemoteError(f"{self.url.at(path)}: {facts.bytes} bytes, expected at most {most_bytes}")
            expected = min(facts.bytes, most_bytes)
            data = bytes(self._collected(result, expected, path))
        if len(data) != expected:
            raise TruncatedError(f"{self.url.at(path)}: received {len(data)} bytes of {facts.bytes}")
        return data, facts

    def head(self, path: str) -> tuple[Facts, Mapping[str, str]]:
        """Facts and attributes of an object. Raises MissingError, …"""
        with self._asking("HEAD", path):
            result = self._obs.get(self._store, path, options={"head": True})
            return _facts(result.meta), {str(name): str(value) for name, value in result.attributes.items()}

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """(path, bytes) of every object below a folder."""
        with self._asking("list", prefix):
            for page in self._obs.list(self._store, prefix=prefix or None):
                yield from ((meta["path"], meta["size"]) for meta in page)

    def put(self, path: str, content: bytes | Path, *, crc32c: int, create: bool = False) -> None:
        """Write an object atomically. create: only if it does not exist yet. Raises ExistsError, …

        Large files are uploaded in parts. If an upload is killed, its parts stay hidden, and are charged for, until the
        bucket's rules remove them. A web server (WebDAV) gets a file in one request, from memory, and does not support
        `create` (UnsupportedError).
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
                if self.url.is_http and "409 Conflict" in str(error):  # RFC 4918: the folder is missing
                    raise MissingError(
                        f"{self.url.at(path)} (PUT): the server has no folder {self.url}; make it there first"
                    ) from error
                raise

    def delete(self, path: str) -> None:
        """Remove an object, if it exists."""
        with self._asking("DELETE", path), suppress(FileNotFoundError):
            self._obs.delete(self._store, path)

    # --- inside -------------------------------------------------------------------------------------------------
    def _collected(self, result: Any, most_bytes: int, span: str) -> memoryview:
        """The body of an answer. Raises RemoteError if it has more than `most_bytes`, whatever its headers say."""
        parts, total = [], 0
        for part in result.stream(min_chunk_size=most_bytes + 1):  # a body of valid size is one part, and not copied
            total += len(part)
            if total > most_bytes:
                raise RemoteError(
                    f"{self.url.at(span)}: the server sends more than the {most_bytes:,} bytes that were requested; "
                    f"do not trust this server"
                )
            parts.append(part)
        return memoryview(parts[0] if len(parts) == 1 else b"".join(parts)).toreadonly()

    def _check(self, span: Span, facts: Facts) -> None:
        where = self.url.at(span.path)
        if span.bytes is not None and facts.bytes != span.bytes:
            raise ChangedError(f"{where}: has {facts.bytes} bytes, expected {span.bytes}: it was changed or truncated")
        if span.etag and facts.etag and facts.etag != span.etag:
            raise ChangedError(f"{where}: has the ETag {facts.etag}, expected {span.etag}: it changed while being read")

    @contextmanager
    def _asking(self, verb: str, path: str) -> Iterator[None]:
        """Translate errors of a call of obstore."""
        try:
            yield
        except RemoteError:
            raise
        except Exception as error:
            raise translated(error, f"{self.url.at(path)} ({verb})", str(error)) from error


def _facts(meta: Mapping[str, Any]) -> Facts:
    return Facts(int(meta["size"]), str(meta.get("e_tag") or ""), meta["last_modified"].timestamp())


# --- errors of obstore --------------------------------------------------------------------------------------------
_KINDS: dict[str, tuple[type[RemoteError], str]] = {
    "FileNotFoundError": (MissingError, "there is no such object; check the address"),
    "NotFoundError": (MissingError, "there is no such object; check the address"),
    "PermissionDeniedError": (DeniedError, "access was denied; check the credentials and their rights: {set}"),
    "UnauthenticatedError": (DeniedError, "credentials are missing or wrong; set {set}"),
    "PreconditionError": (ChangedError, "has changed since it was read; open it again"),
    "AlreadyExistsError": (ExistsError, "exists already"),
    "NotSupportedError": (UnsupportedError, "the server does not support this request"),
    "NotImplementedError": (UnsupportedError, "the server does not support this request"),
    "InvalidPathError": (AddressError, "is not a valid address"),
    "UnknownConfigurationKeyError": (AddressError, "the configuration has a key that obstore does not know"),
}


_STORE_PREFIXES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or for a public bucket AWS_SKIP_SIGNATURE=true",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS to a service account's file, or for a public bucket "
    "GOOGLE_SKIP_SIGNATURE=true",
    "az": "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_KEY, or for a public "
    "container AZURE_SKIP_SIGNATURE=true",
    "https": "user name and password in the address, as https://user:password@host/path",
}
# Patterns of obstore's debug text for failed connections and for clients that cannot be created; the first match
# counts.
_CAUSES: tuple[tuple[str, type[RemoteError], str], ...] = (
    (r"127\.0\.0\.1:0,", DeniedError, "the server redirects to another host, which must not get the session token"),
    (
        r"UnknownIssuer|CaUsedAsEndEntity|BadSignature",
        CertificateError,
        "TLS: the server's certificate is not signed by an authority that this machine trusts; if it is private, set "
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
        "TLS: {prefix}ROOT_CERTIFICATE or {prefix}PROXY_CA_CERTIFICATE contains no readable PEM certificate",
    ),
    (r"InvalidCertificate\(", CertificateError, "TLS: the server's certificate is not accepted"),
    (
        r"InvalidMessage|InvalidContentType|CorruptMessage",
        CertificateError,
        "TLS: the server does not speak TLS; check the port, or whether the endpoint is http",
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
        "the file named by GOOGLE_APPLICATION_CREDENTIALS is missing or is not a service account's file",
    ),
    (
        r"ReadPem|Error reading pem|KeyRejected",
        DeniedError,
        "the private key in the file named by GOOGLE_APPLICATION_CREDENTIALS cannot be read",
    ),
    (r"dns error", RemoteError, "the host name is unknown; check the endpoint and the region"),
    (
        r"ConnectionRefused",
        RemoteError,
        "error sending request: no server listens there; check the endpoint and its port",
    ),
)


def translated(error: BaseException, where: str, text: str) -> RemoteError:
    """The RemoteError for an error of obstore. where: printable address and range. text: its text, without secrets."""
    detail, scheme = _detail(text), where.partition("://")[0]
    set_these = _CREDENTIALS.get(scheme, _CREDENTIALS["https"])
    if "NoSuchBucket" in text or "ContainerNotFound" in text or "The specified bucket does not exist" in text:
        return NoBucketError(f"{where}: there is no such bucket; check the address, the endpoint and the region")
    if "169.254.169.254" in text or "metadata.google.internal" in text:  # metadata services of clouds
        return DeniedError(
            f"{where}: no credentials, neither in the environment nor from the cloud of this machine; set {set_these}"
        )
    if "416 Range Not Satisfiable" in text:
        return ChangedError(f"{where}: the object is shorter than that; it has changed since it was indexed")
    kind, meaning = _KINDS.get(type(error).__name__, (RemoteError, ""))
    if kind is UnsupportedError and "GET" in where:
        meaning = "the server ignores ranges; download the set, or stage it from a server that serves ranges"
    if kind is not RemoteError:
        return kind(f"{where}: {meaning.format(set=set_these)} ({detail})")
    for pattern, kind, meaning in _CAUSES:
        if re.search(pattern, text):
            return kind(f"{where}: {meaning.format(prefix=_STORE_PREFIXES.get(scheme, 'PACKER_HTTP_'))} ({detail})")
    if re.search(r"TimedOut|timed out|deadline has elapsed", text):
        return SlowError(f"{where}: no complete answer in time ({detail}); set PACKER_REMOTE_TIMEOUT to more seconds")
    if re.search(r"IncompleteMessage|UnexpectedEof|end of file before|IncompleteBody|response body", text):
        return TruncatedError(f"{where}: the answer broke off ({detail}); try again")
    return RemoteError(f"{where}: {detail}; check the network, the endpoint and the region")


def _detail(text: str) -> str:
    """The first line of a message, and the error code of the server, cut to about 300 characters."""
    line = text.partition("\n")[0].partition(": <?xml")[0].strip().rstrip(":;. ")
    code = re.search(r"<Code>([A-Za-z]{1,60})</Code>", text)
    shown = line if len(line) <= 300 else line[:297] + "..."
    return f"{shown}, {code[1]}" if code and code[1] not in shown else shown


# Remote: the objects below one address, for a process and all its threads, also in forks and pickled copies.
#
#     with Remote("s3://bucket/set") as remote:
#         text, facts = remote.whole("dataset.json", 1 << 20)
#         parts = remote.read_many([Span("train-000000.tar", 0, 1024), …])      # in parallel, in this order
#
# All addresses of a process share one pool of threads, which is created on first use. No read waits longer than
# `Patience.most_seconds` for the network.
#
# obstore's threads do not survive a fork, and the library cannot start others. So a process that was forked after
# obstore was imported loads a copy of the library's file, which has a state of its own, on its first read (0.04 s).
# Stores of the parent's library are kept and never used: dropping one could wait for a lock of a thread that is gone.


_MOST_PARALLEL, _LEAST_PARALLEL = 256, 8
_NODE_PARALLEL = 512
_LIBRARY = "obstore._obstore"
_V = TypeVar("_V")


def parallel_gets() -> int:
    """The largest number of concurrent GETs of this process: its share of the node's 512, from 8 to 256.

    With GETs of 100 ms and 100 kB, 256 of them reach 256 MB/s. With lower latency fewer are in flight at a time.
    """
    return max(_LEAST_PARALLEL, min(_MOST_PARALLEL, _NODE_PARALLEL // reading_processes()))


class _Process:
    """The thread pool of this process, and its copy of the library if it was forked with obstore imported."""

    def __init__(self, forked: bool) -> None:
        self.forked = forked
        self.lock = threading.Lock()
        self.pool: ThreadPoolExecutor | None = None
        self.library: Any = None


_process = _Process(False)
_stores: weakref.WeakSet[ObjectStore] = weakref.WeakSet()  # of this process
_inherited: list[ObjectStore] = []  # of processes before it


def _after_fork() -> None:
    """A child has neither the parent's threads nor those of obstore."""
    global _process
    _process = _Process(_process.forked or _LIBRARY in sys.modules)
    _inherited.extend(_stores)
    _stores.clear()


at_fork(after_in_child=_after_fork)


def _obstore() -> tuple[Any, Callable[..., Any]]:
    """obstore as this process can use it, and its function that makes stores. Raises ImportError, UnsupportedError."""
    process = _process
    if not process.forked:
        import obstore
        import obstore.store

        return obstore, obstore.store.from_url
    with process.lock:
        if process.library is None:
            process.library = _load_again()
        return process.library, process.library._store.from_url


def _load_again() -> Any:
    """Load obstore's library from a copy of its file, since the system loads a file that it knows only once."""
    modules = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "obstore"}
    try:
        with open(modules[_LIBRARY].__file__ or "", "rb") as file, open(os.memfd_create("obstore"), "wb") as copy:
            shutil.copyfileobj(file, copy, 1 << 20)
            copy.flush()
            # With the number of the process, as a path that was loaded before a fork would not be loaded again.
            loader = ExtensionFileLoader(_LIBRARY, f"/proc/{os.getpid()}/fd/{copy.fileno()}")
            library = module_from_spec(cast(ModuleSpec, spec_from_loader(_LIBRARY, loader)))
            loader.exec_module(library)
        return library
    except (AttributeError, OSError, ImportError) as error:
        raise UnsupportedError(
            f"a forked process cannot read from addresses here ({error}): start processes with "
            f"multiprocessing_context='spawn'"
        ) from error
    finally:
        sys.modules.update(modules)  # the library has put its own there


class Remote:
    """Reads and writes objects below an address. Pickles as its address; the copy opens its own connection.

    Every method raises RemoteError and its subclasses, and MissingExtraError if obstore is not installed.
    """

    def __init__(self, url: str | RemoteUrl, patience: Patience | None = None) -> None:
        self.url = parse_url(url)
        self.patience = patience or Patience.from_environment()
        self._store: ObjectStore | None = None
        self._process: _Process | None = None

    def __repr__(self) -> str:
        return f"Remote({str(self.url)!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "patience": self.patience, "_store": None, "_process": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    # --- reading ------------------------------------------------------------------------------------------------
    def read(self, span: Span) -> tuple[Any, Facts]:
        """The bytes of one span (bytes-like), by one GET, and the facts of its object. An empty span needs no GET."""
        if span.start >= span.stop:
            return b"", Facts(span.bytes or 0, span.etag, 0.0)
        data, facts = self.store.read(span)
        return data, facts

    def read_many(self, spans: Sequence[Span]) -> list[tuple[Any, Facts]]:
        """Read many spans, `parallel_gets()` at a time; results in the order of the spans."""
        return self.each(self.read, spans)

    def submit(self, span: Span) -> Future[tuple[Any, Facts]]:
        """Start a read. Raises RuntimeError while the interpreter shuts down."""
        return _pool().submit(self.read, span)

    def whole(self, path: str, most_bytes: int, cut: bool = False) -> tuple[bytes, Facts]:
        """A whole object of at most `most_bytes`; with `cut` the first `most_bytes` of a larger one, by one GET."""
        data, facts = self.store.whole(path, most_bytes, cut)
        return data, facts

    def head(self, path: str) -> tuple[Facts, Mapping[str, str]]:
        """Facts and attributes of an object."""
        facts, attributes = self.store.head(path)
        return facts, attributes

    def each(self, work: Callable[[_T], _V], items: Iterable[_T]) -> list[_V]:
        """Call `work`, which uses this object, for each item in parallel; the first error stops it."""
        waiting = list(items)
        if len(waiting) == 1:
            return [work(waiting[0])]
        futures: list[Future[_V]] = [_pool().submit(work, item) for item in waiting]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            wait(futures)  # requests in flight end before the caller cleans up

    # --- writing ------------------------------------------------------------------------------------------------
    @property
    def store(self) -> ObjectStore:
        """The store of this process."""
        if self._store is None or self._process is not _process:
            self._store, self._process = open_store(self.url, self.patience), _process
        return self._store

    # --- life ---------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Close the connection; the next call connects again."""
        self._store = None

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _pool() -> ThreadPoolExecutor:
    process = _process
    with process.lock:
        if process.pool is None:
            process.pool = ThreadPoolExecutor(parallel_gets(), thread_name_prefix="remote")
        return process.pool
