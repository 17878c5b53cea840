"""Helpers for the tests of remote sets: environment, an uploaded set, and a proxy in front of it."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from remote_servers import FileServer, Proxy, make_bucket, s3_server

from cache.remote import Remote

BUCKET = "bucket"


@pytest.fixture(scope="session")
def s3() -> Iterator[tuple[str, int]]:
    """An S3 on loopback with one bucket."""
    with s3_server() as where:
        make_bucket(where, BUCKET)
        yield where


@pytest.fixture
def proxy(s3: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The proxy through which obstore reaches the S3, with short timeouts and a separate index cache."""
    made = Proxy(s3)
    environment = {
        "AWS_ENDPOINT_URL": made.url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "not-a-secret",
        "AWS_REGION": "us-east-1",
        "PACKER_REMOTE_TIMEOUT": "2",
        "PACKER_REMOTE_RETRIES": "2",
        "PACKER_CACHE_DIR": str(tmp_path / "index-cache"),
    }
    for name in list(os.environ):
        if name.startswith("AWS_") or name.lower() in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    yield made
    made.close()


def put_files(folder: Path, url: str) -> None:
    """Put every file of a folder below an address unchanged, dataset.json last."""
    store = Remote(url).store
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in sorted(files, key=lambda path: path.name == "dataset.json"):
        store.put(path.relative_to(folder).as_posix(), path.read_bytes(), crc32c=0)


@pytest.fixture
def web(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy before a web server over the parent folder of `packed`."""
    monkeypatch.setenv("PACKER_REMOTE_TIMEOUT", "2")
    monkeypatch.setenv("PACKER_REMOTE_RETRIES", "2")
    monkeypatch.setenv("PACKER_CACHE_DIR", str(tmp_path / "index-cache"))
    server = FileServer(packed.parent)
    made = Proxy(server.address)
    yield made
    made.close()
    server.close()


@pytest.fixture(scope="session")
def packed(tree: Path, pack: Callable[..., Path]) -> Path:
    """The tree as tar shards of 8 samples; read-only."""
    return pack(tree, samples_per_shard=8)


@pytest.fixture
def address(proxy: Proxy, packed: Path, request: pytest.FixtureRequest) -> str:
    """The same set in the S3, under a name of this test alone."""
    url = f"s3://{BUCKET}/{request.node.name.replace('[', '-').replace(']', '')}/set"
    put_files(packed, url)
    proxy.log.clear()
    return url


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem and three certificates that it has issued: good, expired, and for another host; each with its key in the
    same file."""
    pytest.importorskip("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    folder, now = tmp_path_factory.mktemp("tls"), datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    authority = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "an authority of the tests")])
    for name, days, host in (
        ("ca", 9, ""),
        ("good", 9, "127.0.0.1"),
        ("expired", -1, "127.0.0.1"),
        ("other", 9, "::1"),
    ):
        key = authority if not host else ec.generate_private_key(ec.SECP256R1())
        subject = issuer if not host else x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        made = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        made = made.not_valid_before(now - 9 * day).not_valid_after(now + days * day)
        made = made.add_extension(x509.BasicConstraints(ca=not host, path_length=None), critical=True)
        if host:
            names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
            made = made.add_extension(names, critical=False)
        pem = made.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        if host:
            formats = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
            pem += key.private_bytes(*formats)
        (folder / f"{name}.pem").write_bytes(pem)
    return folder
