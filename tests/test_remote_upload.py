"""Uploading and converting to addresses, S3 and a web server, and verifying uploaded sets."""

from __future__ import annotations

import contextlib
import json
import shutil
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import files_of
from remote_servers import Fault, FileServer, Proxy
from remote_suite import BUCKET
from suites.programs import run_packer

import packer
import readers
from cache.remote import CRC_ATTRIBUTE, ObjectStore, Remote


@pytest.fixture
def target(proxy: Proxy, request: pytest.FixtureRequest) -> str:
    """An unused address."""
    return f"s3://{BUCKET}/{request.node.name.replace('[', '-').replace(']', '')}/set"


def there(url: str) -> dict[str, bytes]:
    remote = Remote(url)
    return {path: remote.whole(path, 1 << 30)[0] for path, _ in remote.store.list()}


def puts(proxy: Proxy) -> list[str]:
    return [line.split()[1].split("/set/")[1] for line in proxy.log if line.startswith("PUT")]


def test_upload(target: str, packed: Path, proxy: Proxy) -> None:
    done = packer.upload(packed, target)
    assert there(target) == files_of(packed)
    assert done.sent == len(files_of(packed)) - 1 and done.found == 0 and puts(proxy)[-1] == "dataset.json"
    proxy.log.clear()
    again = packer.upload(packed, target)
    assert again.sent == 0 and again.found == done.sent and puts(proxy) == []
    command = run_packer("upload", packed, target, "--json")
    assert json.loads(command.stdout)["found"] == done.sent, command.stderr
    facts, attributes = Remote(target).head("train-000000.tar")
    assert int(attributes[CRC_ATTRIBUTE], 16) == readers.open(packed, "train").split_info.shards[0].crc32c
    assert facts.bytes == (packed / "train-000000.tar").stat().st_size
    with readers.open(target, "val") as reader, readers.open(packed, "val") as local:
        assert [bytes(reader.read(i)) for i in range(9)] == [bytes(local.read(i)) for i in range(9)]


class Recorder:
    """Records the announced work and how much of it was done."""

    total = done = -1

    def note(self, text: str) -> None:
        pass

    def begin(self, samples: int, total_bytes: int, done: Any, *, waiting: bool = False) -> None:
        self.total, self.ask = total_bytes, done

    def end(self) -> None:
        self.done = self.ask()[1]


def test_an_interrupted_upload_is_resumed(target: str, packed: Path, proxy: Proxy) -> None:
    """Progress counts the bytes of this run only: bytes of an earlier run would give impossible rates."""
    proxy.faults.append(Fault("status", where="^PUT .*train-000003", times=99))
    with pytest.raises(readers.RemoteError, match=r"train-000003.tar \(PUT\)"):
        packer.upload(packed, target)
    with pytest.raises(readers.DatasetError, match="no packed set"):
        readers.open(target)
    sent = set(there(target))
    assert sent and "dataset.json" not in sent
    proxy.heal()
    recorder = Recorder()
    done = packer.upload(packed, target, watcher=recorder)
    assert there(target) == files_of(packed) and done.found == len(sent) and not sent & set(puts(proxy))
    left = sum(len(data) for path, data in files_of(packed).items() if path not in sent and path != "dataset.json")
    assert 0 < left == recorder.total == recorder.done == done.sent_bytes
    packer.upload(packed, target, watcher=recorder)
    assert (recorder.total, recorder.done) == (0, 0), "bytes were left to send"


def test_temporary_faults_of_an_upload(target: str, packed: Path, proxy: Proxy) -> None:
    """Also where the answer to the commit is lost: the retry finds the same dataset.json."""
    proxy.faults += [Fault("status", where="^PUT .*train-0", times=2, status=503), Fault("reset", where="^PUT .*val-0")]
    proxy.faults.append(Fault("reset-body", where="^PUT .*dataset.json"))
    packer.upload(packed, target)
    assert there(target) == files_of(packed) and all(fault.times == 0 for fault in proxy.faults)


@pytest.fixture(scope="module")
def other(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out, shards = tmp_path_factory.mktemp("other") / "set", packer.Shards(samples=12, shuffle=3)
    return packer.convert(packed, to="tar", output=out, run=packer.Run(workers=1), shards=shards).output


def test_another_set_at_the_address(target: str, packed: Path, other: Path, proxy: Proxy) -> None:
    packer.upload(packed, target)
    with pytest.raises(readers.OutputError, match="holds another set; pass overwrite=True"):
        packer.upload(other, target)
    assert there(target) == files_of(packed)
    proxy.log.clear()
    done = packer.upload(other, target, overwrite=True)
    assert there(target) == files_of(other) and done.removed > 0
    writes = [line.split()[1].rpartition("/")[2] for line in proxy.log if line.startswith(("PUT", "POST", "DELETE"))]
    assert "delete" in writes[0] or proxy.log[0].startswith("DELETE"), "a partly replaced set is not a set"
    assert writes.index("dataset.json") > max(i for i, name in enumerate(writes) if name.startswith("train-"))


def test_foreign_objects_stay(target: str, packed: Path, proxy: Proxy) -> None:
    url = f"{proxy.url}/{target.removeprefix('s3://')}/train-000000.tar"
    headers = {"Content-Type": "application/octet-stream"}
    urllib.request.urlopen(urllib.request.Request(url, b"foreign", headers, method="PUT")).close()
    with pytest.raises(readers.OutputError, match="packer did not write"):
        packer.upload(packed, target)
    assert there(target)["train-000000.tar"] == b"foreign" and "dataset.json" not in there(target)


def test_two_uploads_to_one_address(target: str, packed: Path, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second upload commits just before the commit of the first."""
    text, put = (other / "dataset.json").read_bytes(), ObjectStore.put

    def commit_before(self: Any, path: str, content: Any, **options: Any) -> None:
        if path == "dataset.json":
            put(self, path, text, crc32c=0, create=True)
        put(self, path, content, **options)

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "put", commit_before)
        with pytest.raises(readers.OutputError, match="another upload has written a set there in the meantime"):
            packer.upload(packed, target)
    assert there(target)["dataset.json"] == text


def test_large_files_go_in_parts(target: str, packed: Path, tmp_path: Path, proxy: Proxy) -> None:
    path = tmp_path / "large"
    path.write_bytes(bytes(range(256)) * (18 << 12))
    store = Remote(target).store
    store.put("large", path, crc32c=5)
    assert Remote(target).whole("large", 1 << 30)[0] == path.read_bytes()
    assert sum("partNumber" in line for line in proxy.log) == 3
    assert Remote(target).head("large")[1][CRC_ATTRIBUTE] == "00000005"


def test_damaged_files_are_not_committed(
    target: str, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damaged in transit, or on this machine."""
    put = ObjectStore.put

    def replace_after(self: Any, path: str, content: Any, **options: Any) -> None:
        put(self, path, content, **options)
        if path == "train-000000.tar":
            put(self, path, b"another", crc32c=1)

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "put", replace_after)
        with pytest.raises(readers.OutputError, match=r"train-000000.tar: differs from the uploaded file"):
            packer.upload(packed, target)
    copy = Path(shutil.copytree(packed, tmp_path / "copy"))
    shard = copy / "train-000001.tar"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(readers.OutputError, match=f"{shard.name}: does not match dataset.json; run  packer verify"):
        packer.upload(copy, f"{target}/copy")
    assert not any(name.endswith("dataset.json") for name in there(target))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """The folder of a set on a web server with WebDAV, and its address."""
    (tmp_path / "served" / "set").mkdir(parents=True)
    server = FileServer(tmp_path / "served", writable=True)
    yield tmp_path / "served" / "set", f"http://127.0.0.1:{server.address[1]}/set"
    server.close()


def test_a_web_server(folder: tuple[Path, str], packed: Path, tree: Path, tmp_path: Path) -> None:
    """The server stores no checksums, so files are read back."""
    served, url = folder
    done = packer.upload(packed, url)
    assert files_of(served) == files_of(packed) and done.sent == len(files_of(packed)) - 1
    again = packer.upload(packed, url)
    assert (again.sent, again.found) == (0, done.sent)
    shard = served / "train-000000.tar"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    (served / "dataset.json").unlink()
    with pytest.raises(readers.OutputError, match=r"packer did not write .*; remove it, or choose") as caught:
        packer.upload(packed, url)
    assert not (served / "dataset.json").exists() and "pass overwrite=True" not in str(caught.value)
    repaired = packer.upload(packed, url, overwrite=True)
    assert repaired.sent == 1 and files_of(served) == files_of(packed)
    run, shards = packer.Run(workers=1, work=tmp_path / "work"), packer.Shards(samples=100)
    made = packer.convert(tree, "tar", url, overwrite=True, run=run, shards=shards)
    assert made.output == url and files_of(served) == files_of(tmp_path / "work"), "files of the old set stay"


def test_a_web_server_that_misbehaves(
    folder: tuple[Path, str], packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server accepts no files, has no such folder, or changes the data."""
    served, url = folder
    server = FileServer(tmp_path)
    with contextlib.closing(server), pytest.raises(readers.RemoteError, match=r"PUT.*405"):
        packer.upload(packed, f"http://127.0.0.1:{server.address[1]}/set")
    with pytest.raises(readers.RemoteError, match=r"the server has no folder http.*/deeper/?; make it there first"):
        packer.upload(packed, url + "/some/deeper")
    put = ObjectStore.put

    def damaged(self: Any, path: str, content: Any, **options: Any) -> None:
        put(self, path, bytes(content.stat().st_size) if path == "train-000001.tar" else content, **options)

    monkeypatch.setattr(ObjectStore, "put", damaged)
    with pytest.raises(readers.OutputError, match=r"train-000001\.tar: differs from the uploaded file"):
        packer.upload(packed, url)
    assert not (served / "dataset.json").exists()


# --- convert and verify ---------------------------------------------------------------------------------------------
def test_convert_to_an_address(
    target: str, tree: Path, packed: Path, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resumed after failed uploads; no message advises to replace the objects at the address."""
    monkeypatch.chdir(tmp_path)

    def convert(samples: int = 8, to: str = "tar", overwrite: bool = False, **run: Any) -> Any:
        shards = packer.Shards(samples=samples)
        return packer.convert(tree, to, target, shards=shards, run=packer.Run(workers=1, **run), overwrite=overwrite)

    times = []
    for overwrite in (False, True):
        proxy.faults.append(Fault("status", where="^PUT .*train-000002", times=99))
        with pytest.raises(readers.RemoteError, match="train-000002"):
            convert(overwrite=overwrite)
        (kept,) = tmp_path.glob(".packer-upload*")
        times.append((kept / "train-000000.tar").stat().st_mtime_ns)
        proxy.heal()
    assert times[0] == times[1], "a complete shard was made again"
    message = rf"remove {kept.name}, or name another directory with work=DIR \(overwrite=True would also replace"
    with pytest.raises(readers.OutputError, match=message) as caught:
        convert(9)
    assert "pass overwrite=True" not in str(caught.value)
    done = convert()
    assert str(done.output) == target and done.uploaded_bytes > 0 and not kept.exists()
    for name, data in files_of(packed).items():
        assert not name.endswith(".tar") or there(target)[name] == data
    with pytest.raises(ValueError, match="work is for an output at an address"):
        packer.convert(tree, to="tar", output=tmp_path / "x", run=packer.Run(work=tmp_path / "y"))
    work = tmp_path / "work"
    assert convert(work=work).already_done and (work / "dataset.json").exists()
    with pytest.raises(readers.OutputError, match="holds another set"):
        convert(9, work=tmp_path / "work2")
    convert(to="hdf5", work=work, overwrite=True)
    with readers.open(target, "train") as reader:
        assert reader.dataset.format == "hdf5" and len(reader) == 36


def test_verify(target: str, packed: Path, proxy: Proxy) -> None:
    packer.upload(packed, target)
    result = packer.verify(target)
    assert result.ok and result.samples == 45 and result.shards == 7 and str(result.path) == target
    data = (packed / "train-000001.tar").read_bytes()
    store = Remote(target).store
    store.put("train-000001.tar", data[:-1] + b"x", crc32c=0)
    store.put("train-000002.tar", data[:-5], crc32c=0)
    store.delete("train-000003.tar")
    problems = [str(problem) for problem in sorted(packer.verify(target).problems, key=str)]
    for text, message in zip(problems, ("CRC32C of the whole file is", "bytes, ", "no such object"), strict=True):
        assert message in text
    with pytest.raises(readers.RemoteError, match="need local files; run  packer stage"):
        packer.verify(target, deep=True)
    proxy.faults.append(Fault("status", where="train-000004", times=99))
    with pytest.raises(readers.RemoteError, match="500"):
        packer.verify(target)


def test_the_commands(target: str, tree: Path, tmp_path: Path, proxy: Proxy) -> None:
    run = partial(run_packer, cwd=tmp_path)
    done = run("convert", str(tree), "--to", "tar", "-o", target, "--workers", "1", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["output"] == target, done.stderr
    done = run("verify", target)
    assert done.returncode == 0 and done.stdout.startswith(f"{target}: OK")
    for command in (("convert", target, "--to", "hdf5"), ("extract", target, "-o", "out")):
        done = run(*command)
        assert done.returncode == 2 and f"packer stage {target}" in done.stderr
    done = run("cache", "warm", target, "--split", "val", "--target", str(tmp_path), "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["present"] == 9, done.stderr
    Remote(target).store.delete("train-000000.tar")
    done = run("verify", target)
    assert done.returncode == 1 and "DAMAGED train: train-000000.tar" in done.stdout
    for wrong, status, message in [
        ("s3://no-such-bucket/set", 1, "there is no such bucket"),
        ("ftp://host/set", 2, "not an address of the kinds"),
    ]:
        done = run("convert", str(tree), "--to", "tar", "-o", wrong, "--workers", "1")
        assert done.returncode == status and message in done.stderr and "Traceback" not in done.stderr
