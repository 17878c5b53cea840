"""Sets in object stores over TLS: converted to an address, uploaded, read, staged, verified. See object_servers.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import files_of
from object_servers import SERVERS, Authority, Stored
from PIL import Image
from suites.programs import run_packer

import packer
import readers
from cache.errors import CertificateError

pytestmark = pytest.mark.cluster

CLIENT = ("AWS_", "AZURE_", "GOOGLE_")
PROXIES = ("http_proxy", "https_proxy", "all_proxy")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.made_in(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module", params=sorted(SERVERS))
def server(
    request: pytest.FixtureRequest, authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stored]:
    folder = tmp_path_factory.mktemp(request.param) / "data"
    folder.mkdir()
    with SERVERS[request.param](authority, folder) as stored:
        yield stored


@pytest.fixture
def stored(server: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stored:
    """The server, with an environment that reaches this server and no other."""
    for name in list(os.environ):
        if name.startswith(CLIENT) or name.lower() in PROXIES:
            monkeypatch.delenv(name)
    for name, value in {**server.environ, "PACKER_CACHE_DIR": str(tmp_path / "index-cache")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PACKER_REMOTE_RETRIES", "2")
    return server


@pytest.fixture
def address(stored: Stored, source: Path, request: pytest.FixtureRequest) -> str:
    """An address for a set, unique to this test."""
    name = request.node.originalname
    if stored.takes_uploads:
        packer.upload(source, f"{stored.address}/{name}")
    else:
        for path, data in files_of(source).items():
            stored.put(f"{name}/{path}", data)
    return f"{stored.address}/{name}"


FOR_PEOPLE = ("README.md", "SHA256SUMS", "classes.txt")


def set_files(folder: Path) -> dict[str, bytes]:
    """The files of a set or a copy that dataset.json names; only these files are staged."""
    files = files_of(folder).items()
    return {name: data for name, data in files if not name.startswith(".staging/") and name not in FOR_PEOPLE}


def uploads(stored: Stored) -> None:
    if not stored.takes_uploads:
        pytest.skip("obstore uploads by PUT of Google's XML interface, which the emulator lacks")


def test_convert_to_the_address(stored: Stored, tree: Path, tmp_path: Path) -> None:
    """The objects are the files of a local conversion, and a later upload sends nothing more."""
    uploads(stored)
    options = ("--to", "hdf5", "--workers", "1", "--samples-per-shard", "5")
    local, url = tmp_path / "local", f"{stored.address}/convert"
    assert run_packer("convert", tree, *options, "-o", local).returncode == 0
    done = run_packer("convert", tree, *options, "-o", url, "--work", tmp_path / "work")
    assert done.returncode == 0, done.stderr
    with readers.stage(url, tmp_path / "copy") as copy:
        assert set_files(copy) == set_files(local)
    again = packer.upload(local, url)
    assert (again.sent, again.found) == (0, len(files_of(local)) - 1)
    done = run_packer("verify", url)
    assert done.returncode == 0, done.stderr


def test_large_files_go_up_in_parts(stored: Stored, tmp_path: Path) -> None:
    uploads(stored)
    folder, url = tmp_path / "tree" / "class", f"{stored.address}/large"
    folder.mkdir(parents=True)
    for number in range(3):
        noise = Image.frombytes("RGB", (2000, 1200), os.urandom(3 * 2000 * 1200))
        noise.save(folder / f"{number}.png", compress_level=0)
    packer.convert(folder.parent, "tar", tmp_path / "set", run=packer.Run(workers=1))
    packer.upload(tmp_path / "set", url)
    assert run_packer("verify", url).returncode == 0


def test_read_and_stage(stored: Stored, address: str, source: Path, tmp_path: Path) -> None:
    """Reads one sample at a time and many in one call, also in a forked process."""
    for command in ("verify", "inspect"):
        done = run_packer(command, address)
        assert done.returncode == 0, done.stderr
    done = run_packer("stage", address, "--target", tmp_path, "--verify")
    assert done.returncode == 0, done.stderr
    assert set_files(Path(done.stdout.strip())) == set_files(source)
    with readers.open(address, "train") as reader, readers.open(source, "train") as local:
        everything = [bytes(local.read(i)) for i in range(36)]
        assert [bytes(reader.read(i)) for i in range(36)] == everything
        assert [bytes(data) for data in reader.read_many(range(36))] == everything
        child = os.fork()
        if child == 0:
            os._exit(0 if [bytes(data) for data in reader.read_many(range(36))] == everything else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_another_authority_is_not_trusted(
    stored: Stored, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Authority.made_in(tmp_path)
    for name in stored.environ:
        if name.endswith("ROOT_CERTIFICATE"):
            monkeypatch.setenv(name, str(other.root))
    monkeypatch.setenv("PACKER_CACHE_DIR", str(tmp_path / "empty"))
    with pytest.raises(CertificateError, match="ROOT_CERTIFICATE"):
        readers.open(address, "train")


@pytest.mark.parametrize("server", ["google"], indirect=True)
def test_an_upload_that_the_server_does_not_take_ends_with_its_answer(stored: Stored, source: Path) -> None:
    with pytest.raises(readers.RemoteError, match=r"PUT.*400"):
        packer.upload(source, f"{stored.address}/refused")
