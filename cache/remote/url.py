"""Addresses in object stores and on web servers, and the options of the environment for them.

Addresses are parsed once, and printed without their secrets.

    s3://bucket/path    gs://bucket/path    az://container/path    https://host/path    http://host:port/path

Credentials for stores come from the environment, which obstore reads; only an https address may contain a user name and
password, which are never printed or written to a disk.

obstore ignores the environment's HTTP options (time-outs, proxies, certificates) when it is given any, so all of them
are passed from here.
"""

from __future__ import annotations

import base64
import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from cache.errors import AddressError, CertificateError

__all__ = ["NOWHERE", "SCHEMES", "RemoteUrl", "client_options", "is_public", "is_remote", "parse_url"]

SCHEMES = ("s3", "gs", "az", "https", "http")
_REMOTE = re.compile(rf"({'|'.join(SCHEMES)})://", re.IGNORECASE)
_PARTS = re.compile(r"([a-z0-9]+)://([^/]*)/?(.*)", re.DOTALL)
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:@\[\]]*)(:[0-9]*)?")
_PREFIXES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_", "http": "PACKER_HTTP_", "https": "PACKER_HTTP_"}
NOWHERE = "127.0.0.1:0"  # nothing can listen there
_FLAGS = ("allow_http", "allow_invalid_certificates", "http1_only")
_TEXTS = ("proxy_url", "proxy_excludes", "user_agent")
_CERTIFICATES = ("root_certificate", "proxy_ca_certificate")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
# Not public either, though `ipaddress` of some versions of Python says so: metadata servers of Azure and Oracle,
# IPv4-compatible addresses, local NAT64, Teredo and other tunnels, site-local addresses.
_NOT_PUBLIC = tuple(
    map(ipaddress.ip_network, ("168.63.129.16", "192.0.0.0/24", "::/96", "64:ff9b:1::/48", "2001::/23", "fec0::/10"))
)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_MOST_CERTIFICATE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class RemoteUrl:
    """One address. host: bucket, container, or host and port. path: without slashes at its ends; "" for none.

    bearer: a token for a server of this project's (`cache.serving`), which is reached without any proxy.
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
        """The last part, for people."""
        return self.path.rpartition("/")[2] or self.host.partition(":")[0]

    def login(self) -> str:
        """The value of an Authorization header (RFC 7617, RFC 6750) for what is known of both; "" for nothing."""
        if self.bearer:
            return f"Bearer {self.bearer}"
        return "Basic " + base64.b64encode(unquote_to_bytes(self.userinfo)).decode() if self.userinfo else ""

    def at(self, path: str) -> str:
        """The printable address of something below this one."""
        return f"{self}/{path}" if path else str(self)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}" + (f"/{self.path}" if self.path else "")


def is_remote(place: str | os.PathLike[str] | RemoteUrl) -> bool:
    """Whether this is an address, and no path of this machine."""
    return isinstance(place, RemoteUrl) or (isinstance(place, str) and _REMOTE.match(place) is not None)


def is_public(address: str) -> bool:
    """Whether a numeric address is of the public internet, and not of this machine, a private network or a cloud's
    metadata. An IPv6 address that leads to an IPv4 address (mapped, NAT64, 6to4) is judged by that one."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return is_public(str(found.ipv4_mapped))
        inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF) if found in _NAT64 else found.sixtofour
        if inner is not None:
            return is_public(str(inner))
    return found.is_global and not found.is_multicast and not any(found in network for network in _NOT_PUBLIC)


def parse_url(place: str | os.PathLike[str] | RemoteUrl) -> RemoteUrl:
    """Parse an address. Raises AddressError, without secrets in its message."""
    if isinstance(place, RemoteUrl):
        return place
    text = os.fspath(place)
    match = _PARTS.fullmatch(text[: text.find("://")].lower() + text[text.find("://") :])
    if match is None or match[1] not in SCHEMES:
        shown = re.sub(r"//.*@", "//***@", text, flags=re.DOTALL)
        raise AddressError(f"{shown!r} is not an address of the kinds {', '.join(f'{name}://' for name in SCHEMES)}")
    userinfo, _, host = match[2].rpartition("@")
    scheme, path = match[1], match[3].strip("/")
    url = RemoteUrl(scheme, host, path, userinfo)
    # The unexpected parts in the next two may be of a password, so they are not shown.
    if ":" in host and not url.is_http:
        raise AddressError(
            f"{scheme}://***: the name of a bucket has no colon, and credentials do not belong in the address; set "
            f"them in the environment"
        )
    if "@" in userinfo or ("@" in path and ":" in host) or not _HOST.fullmatch(host):
        raise AddressError(
            f"{scheme}://***: what is before the path is not user:password@host:port; write @, : and / in a user name "
            f"or password, and @ in a path, as %40, %3A and %2F"
        )
    if not host:
        raise AddressError(f"{url}: names no {'host' if url.is_http else 'bucket'}")
    if userinfo and not url.is_http:
        raise AddressError(f"{url}: credentials do not belong in the address; set them in the environment")
    if set(path) & set("?#"):
        bare = RemoteUrl(scheme, host, re.split("[?#]", path)[0])
        raise AddressError(f"{bare}: has a query after it; give the address of the set's folder, without ? and #")
    if not f"{host}{path}".isprintable() or any(part in ("", ".", "..") for part in path.split("/") if path):
        raise AddressError(f"{str(url)!r}: has empty, dotted or unprintable parts")
    return url


def client_options(url: RemoteUrl, seconds: float, environ: Mapping[str, str]) -> dict[str, Any]:
    """HTTP options of obstore for an address; seconds: of one request. Raises CertificateError."""
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
    if url.bearer:  # past the proxies of the environment, and to no other host
        host = _HOST.fullmatch(url.host)
        options |= {"proxy_url": f"http://{NOWHERE}", "proxy_excludes": host[1].strip("[]") if host else url.host}
    if url.scheme == "s3" and environ.get("AWS_SESSION_TOKEN"):
        options.update(_fence(options, environ))
    return options


def _certificates(variable: str, value: str) -> str:
    """PEM text: the value of the variable, or of the file that it names."""
    if "-----BEGIN" in value:
        return value
    path = Path(value).expanduser()
    try:
        with open(path, "rb") as file:
            text = file.read(_MOST_CERTIFICATE_BYTES).decode("ascii", "replace")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CertificateError(
            f"{variable}: neither the text of a PEM certificate nor a file that can be read: {value[:200]!r} ({reason})"
        ) from error
    if "-----BEGIN" not in text:
        raise CertificateError(f"{variable}: {path} has no PEM certificate (no line -----BEGIN CERTIFICATE-----)")
    return text


def _fence(options: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Keep a session token from following a redirect to another host.

    The client drops only the Authorization header there, and has no switch for redirects. But hosts other than those of
    the endpoint can be sent through a proxy, and there is none at `NOWHERE`. Nothing is lost: a request is signed for
    its host. Where a real proxy is configured, that one is used.
    """
    if "proxy_url" in options or any(environ.get(name) or environ.get(name.upper()) for name in _PROXIES):
        return {}
    endpoints = [value for name, value in environ.items() if name.upper().startswith("AWS_ENDPOINT")]
    hosts = [match[1] for value in endpoints if (match := re.match(r"https?://(?:[^/@]*@)?(\[[^]]*\]|[^/:]*)", value))]
    return {"proxy_url": f"http://{NOWHERE}", "proxy_excludes": ",".join([*hosts, "amazonaws.com", "amazonaws.com.cn"])}
