"""HTTP options of obstore's clients, from the environment: time-outs, proxies, certificates, and where tokens may go.

obstore forgets the environment's HTTP options when it is handed some, so all of them are handed on from here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from cache.errors import CertificateError
from cache.remote.url import RemoteUrl

__all__ = ["NOWHERE", "PREFIXES", "client_options"]

PREFIXES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_", "http": "PACKER_HTTP_", "https": "PACKER_HTTP_"}
NOWHERE = "127.0.0.1:0"  # nothing can listen there
_FLAGS = ("allow_http", "allow_invalid_certificates", "http1_only")
_TEXTS = ("proxy_url", "proxy_excludes", "user_agent")
_CERTIFICATES = ("root_certificate", "proxy_ca_certificate")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_MOST_CERTIFICATE_BYTES = 16 << 20


def client_options(url: RemoteUrl, seconds: float, environ: Mapping[str, str]) -> dict[str, Any]:
    """For an address, with at most so many seconds a request. Raises CertificateError."""
    prefix = PREFIXES[url.scheme]
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
    if url.userinfo:
        options["default_headers"] = {"Authorization": url.login()}
    if url.scheme == "s3" and environ.get("AWS_SESSION_TOKEN"):
        options.update(_fence(options, environ))
    return options


def _certificates(variable: str, value: str) -> str:
    """PEM text, which the variable has or the file that it names."""
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
        raise CertificateError(f"{variable}: {path} holds no PEM certificate (no line -----BEGIN CERTIFICATE-----)")
    return text


def _fence(options: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Keep a session token from following a redirect to another host.

    The client drops only the Authorization header on its way there. It has no switch for redirects; but hosts other
    than those of the endpoint can be sent through a proxy, and there is none at `NOWHERE`. Nothing is lost by that: a
    request is signed for its host. Where a real proxy is configured, that one is used and decides.
    """
    if "proxy_url" in options or any(environ.get(name) or environ.get(name.upper()) for name in _PROXIES):
        return {}
    endpoints = [value for name, value in environ.items() if name.upper().startswith("AWS_ENDPOINT")]
    hosts = [match[1] for value in endpoints if (match := re.match(r"https?://(?:[^/@]*@)?(\[[^]]*\]|[^/:]*)", value))]
    return {"proxy_url": f"http://{NOWHERE}", "proxy_excludes": ",".join([*hosts, "amazonaws.com", "amazonaws.com.cn"])}
