"""TLS, credentials and passwords: messages name the cause and the variable that fixes it, and no secret."""

from __future__ import annotations

import json
import os
import ssl
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from remote_servers import FileServer, s3_server

import packer
import readers
from cache.errors import AddressError, CertificateError, DeniedError, MissingError, RemoteError
from cache.remote import Remote, parse_url, translated


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No credentials but those of a test, no proxies, little patience."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_", "PACKER_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PACKER_REMOTE_TIMEOUT", "2")
    monkeypatch.setenv("PACKER_REMOTE_RETRIES", "0")
    monkeypatch.setenv("PACKER_CACHE_DIR", str(tmp_path / "index-cache"))


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials of S3, so that the metadata address of a cloud is not asked for them."""
    for name, value in {"ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "not-a-secret", "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)


# --- TLS -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def serving(packed: Path, certificates: Path) -> Iterator[Callable[[str], str]]:
    """Serves the folder above `packed` with a certificate of that name ("": without TLS); returns host and port."""
    servers: list[FileServer] = []

    def serve(name: str) -> str:
        context = None
        if name:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificates / f"{name}.pem")
        servers.append(FileServer(packed.parent, tls=context))
        return f"127.0.0.1:{servers[-1].address[1]}"

    yield serve
    for server in servers:
        server.close()


@pytest.mark.parametrize("given", ["path", "text"])
def test_a_root_certificate_is_a_path_or_text(
    serving: Any, certificates: Path, packed: Path, monkeypatch: pytest.MonkeyPatch, keys: None, given: str
) -> None:
    ca = certificates / "ca.pem"
    for prefix in ("PACKER_HTTP_", "AWS_"):
        monkeypatch.setenv(f"{prefix}ROOT_CERTIFICATE", str(ca) if given == "path" else ca.read_text())
    host = serving("good")
    with readers.open(f"https://{host}/set", "train") as reader, readers.open(packed, "train") as local:
        assert bytes(reader.read(3)) == bytes(local.read(3))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://{host}")
    with pytest.raises(MissingError):  # it speaks HTTP through TLS, and has no such bucket
        Remote("s3://bucket/nothing").head("a")


def test_an_s3_behind_tls(
    certificates: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: None
) -> None:
    """There and back: uploaded, read and staged, with the private authority's certificate named by its path."""
    ca = certificates / "ca.pem"
    with s3_server(certificates / "good.pem") as (host, port):
        connection = HTTPSConnection(host, port, timeout=300, context=ssl.create_default_context(cafile=str(ca)))
        connection.request("PUT", "/bucket")
        assert connection.getresponse().status == 200
        connection.close()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://{host}:{port}")
        monkeypatch.setenv("AWS_ROOT_CERTIFICATE", str(ca))
        monkeypatch.setenv("PACKER_REMOTE_RETRIES", "2")
        packer.upload(packed, "s3://bucket/set")
        with readers.open("s3://bucket/set", "train") as reader, readers.open(packed, "train") as local:
            assert list(map(bytes, reader.read_many(range(36)))) == list(map(bytes, local.read_many(range(36))))
        with readers.stage("s3://bucket/set", tmp_path / "to") as copy:
            assert (copy / "train-000000.tar").read_bytes() == (packed / "train-000000.tar").read_bytes()


@pytest.mark.parametrize(
    ("certificate", "trusted", "message"),
    [
        ("good", False, "no authority that this machine trusts.*private one, set {}ROOT_CERTIFICATE to the file"),
        ("expired", True, "the server's certificate has expired.*clock"),
        ("other", True, "certificate is for another host; check the endpoint"),
        ("", True, "the server does not speak TLS there; check the port"),
    ],
)
@pytest.mark.parametrize("scheme", ["https", "s3", "az", "gs"])
def test_failures_of_tls_say_so(
    serving: Any, certificates: Path, monkeypatch: pytest.MonkeyPatch, keys: None, tmp_path: Path,
    certificate: str, trusted: bool, message: str, scheme: str,
) -> None:  # fmt: skip
    host = serving(certificate)
    prefix = {"https": "PACKER_HTTP_", "s3": "AWS_", "az": "AZURE_", "gs": "GOOGLE_"}[scheme]
    if trusted:
        monkeypatch.setenv(f"{prefix}ROOT_CERTIFICATE", str(certificates / "ca.pem"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://{host}")
    for name, value in {"ACCOUNT_NAME": "a", "ACCOUNT_KEY": "bm90IGEgc2VjcmV0", "ENDPOINT": f"https://{host}"}.items():
        monkeypatch.setenv(f"AZURE_STORAGE_{name}", value)
    account = {"gcs_base_url": f"https://{host}", "disable_oauth": True, "client_email": "", "private_key": "",
               "private_key_id": "", "type": "service_account"}  # fmt: skip
    (tmp_path / "account.json").write_text(json.dumps(account))
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "account.json"))
    address = f"https://{host}/set" if scheme == "https" else f"{scheme}://bucket/set"
    with pytest.raises(CertificateError, match=f"TLS: .*{message.format(prefix)}") as caught:
        Remote(address).head("dataset.json")
    assert "check the network" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("none.pem", "neither the text of a PEM certificate nor a file that can be read.*No such file"),
        ("empty.pem", "no PEM certificate"),
        ("-----BEGIN CERTIFICATE-----\nxx\n-----END CERTIFICATE-----\n", "no PEM certificate"),
    ],
)
def test_a_root_certificate_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: None, value: str, message: str
) -> None:
    (tmp_path / "empty.pem").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_ROOT_CERTIFICATE", value)
    with pytest.raises(CertificateError, match=f"(?s)AWS_ROOT_CERTIFICATE.*{message}"):
        Remote("s3://bucket/set").head("a")


# --- credentials ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("address", "variables", "message"),
    [
        ("az://box/set", {}, "set AZURE_STORAGE_ACCOUNT_NAME"),
        (
            "az://box/set",
            {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_ACCOUNT_KEY": "not base64!"},
            "the key in AZURE_STORAGE_ACCOUNT_KEY is not base64",
        ),
        ("gs://box/set", {"GOOGLE_APPLICATION_CREDENTIALS": "none.json"}, "GOOGLE_APPLICATION_CREDENTIALS.*missing"),
        ("gs://box/set", {"GOOGLE_APPLICATION_CREDENTIALS": "bad.json"}, "GOOGLE_APPLICATION_CREDENTIALS names is"),
    ],
)
def test_keys_and_files_that_are_not_valid_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, variables: dict[str, str], message: str
) -> None:
    (tmp_path / "bad.json").write_text("{}")
    for name, value in variables.items():
        monkeypatch.setenv(name, str(tmp_path / value) if value.endswith(".json") else value)
    with pytest.raises(DeniedError, match=message) as caught:
        Remote(address).head("dataset.json")
    assert "check the network" not in str(caught.value) and "AWS_" not in str(caught.value)


@pytest.mark.parametrize("says", ["Error performing PUT http://169.254.169.254/latest", "Server returned 401", "403"])
@pytest.mark.parametrize(
    ("scheme", "own", "others"),
    [
        ("s3", "AWS_SECRET_ACCESS_KEY", ("GOOGLE_", "AZURE_")),
        ("gs", "GOOGLE_APPLICATION_CREDENTIALS", ("AWS_", "AZURE_")),
        ("az", "AZURE_STORAGE_ACCOUNT_KEY", ("AWS_", "GOOGLE_")),
        ("https", "https://user:password@host/path", ("AWS_", "GOOGLE_", "AZURE_")),
    ],
)
def test_messages_name_the_variables_of_the_kind_of_store(
    scheme: str, own: str, others: tuple[str, ...], says: str
) -> None:
    kinds = {"401": "UnauthenticatedError", "403": "PermissionDeniedError"}
    name = next((kind for code, kind in kinds.items() if code in says), "GenericError")
    error = translated(type(name, (OSError,), {})(says), f"{scheme}://bucket/set (GET)", says)
    assert isinstance(error, DeniedError) and own in str(error)
    assert not any(other in str(error) for other in others), str(error)


def test_a_host_that_does_not_listen_is_reported(monkeypatch: pytest.MonkeyPatch, keys: None) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(AddressError, match="allow that with AWS_ALLOW_HTTP=true"):
        Remote("s3://bucket/set").head("a")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    with pytest.raises(RemoteError, match="nothing listens there; check the endpoint and its port"):
        Remote("s3://bucket/set").head("a")


# --- secrets -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "address",
    [
        "https://user:HALF@SECRET@host/set",
        "https://user:SECRET@SECRET@host:80/set",
        "https://user:HALF/SECRET@host/set",
        "https://user:80/SECRET@host/set",
        "https://user:SECRET@@host/set",
        "ftp://user:HALF@SECRET@host/set",
        "ftp://user:HALF/SECRET@host/set",
        "s3://AKIA:SECRET@bucket/set",
        "s3://AKIA:HALF/SECRET@bucket/set",
    ],
)
def test_no_part_of_a_password_is_printed(address: str) -> None:
    for call in (parse_url, Remote, readers.open):
        with pytest.raises((AddressError, readers.PackerError)) as caught:
            call(address)
        text = f"{caught.value!r} {caught.value}"
        assert not any(part in text for part in ("SECRET", "HALF", ":80")), text


def test_addresses_that_are_parsed_unchanged() -> None:
    for text, host, path in [
        ("https://user:p%40ss@host:8080/a/b", "host:8080", "a/b"),
        ("https://[::1]:8080/set", "[::1]:8080", "set"),
        ("https://host/@scope/set", "host", "@scope/set"),
        ("s3://bucket/a@b:c/set", "bucket", "a@b:c/set"),
    ]:
        url = parse_url(text)
        assert (url.host, url.path) == (host, path) and "p%40ss" not in str(url)


@pytest.fixture
def redirecting() -> Iterator[tuple[str, list[dict[str, str]]]]:
    """A server that sends everybody to another host; its address, and the headers that arrived there."""
    seen: list[dict[str, str]] = []

    class There(BaseHTTPRequestHandler):
        def log_message(self, format: str, *arguments: object) -> None:
            """Silent."""

        def do_GET(self) -> None:
            seen.append({name.lower(): value for name, value in self.headers.items()})
            self.send_response(404)
            self.end_headers()

        do_HEAD = do_GET

    class Here(There):
        def do_GET(self) -> None:
            self.send_response(307)
            self.send_header("Location", f"http://localhost:{servers[0].server_address[1]}{self.path}")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

    servers = [ThreadingHTTPServer(("127.0.0.1", 0), kind) for kind in (There, Here)]
    threads = [threading.Thread(target=server.serve_forever, args=(0.05,)) for server in servers]
    for thread in threads:
        thread.start()
    yield f"http://127.0.0.1:{servers[1].server_address[1]}", seen
    for server, thread in zip(servers, threads, strict=True):
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_session_token_follows_no_redirect(
    redirecting: tuple[str, list[dict[str, str]]], monkeypatch: pytest.MonkeyPatch, keys: None
) -> None:
    address, seen = redirecting
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    with pytest.raises(MissingError):
        Remote("s3://bucket/set").head("a")
    assert seen and not any("authorization" in headers for headers in seen), "without a token a redirect is followed"
    seen.clear()
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a-token")
    with pytest.raises(DeniedError, match="redirects to another host, which must not get the session token"):
        Remote("s3://bucket/set").head("a")
    assert seen == []
