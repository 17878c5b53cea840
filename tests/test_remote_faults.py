"""Network and server failures end in the right bytes, or in an error that says what to do."""

from __future__ import annotations

import base64
import gc
import os
import traceback
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from remote_servers import Fault, FileServer, Proxy
from suites.programs import run_packer, run_python

import readers
from cache.errors import DeniedError, RemoteError, SlowError, TruncatedError
from cache.remote import Courier, Patience, Remote, Span, parse_url, translated
from cache.stores.remote import Ahead


@pytest.fixture
def reader(address: str) -> Iterator[readers.Reader]:
    with readers.open(address, "train") as reader:
        yield reader


@pytest.mark.parametrize(
    "fault",
    [
        Fault("status", status=500),
        Fault("status", status=503, times=2),
        Fault("status", status=429),
        Fault("reset", times=2),
        Fault("reset-body"),
        Fault("truncate"),
        Fault("slow", seconds=0.5),
        Fault("slow", seconds=2.5),
        Fault("stall", seconds=2.5),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.status}-{fault.times}-{fault.seconds}",
)
def test_faults_that_pass(fault: Fault, reader: readers.Reader, proxy: Proxy, packed: Path) -> None:
    with readers.open(packed, "train") as local:
        fault.times, times = fault.times, fault.times
        proxy.faults.append(fault)
        assert bytes(reader.read(3)) == bytes(local.read(3))
        fault.times = times
        assert list(map(bytes, reader.read_many([9, 1]))) == list(map(bytes, local.read_many([9, 1])))
        fault.times = times
        reader.prefetch([5])
        assert bytes(reader.read(5)) == bytes(local.read(5))
        assert fault.times == 0


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (Fault("status", status=500), readers.RemoteError, r"after 2 retries.*500.*check the network"),
        (Fault("status", status=403), readers.RemoteError, "access was denied; check credentials"),
        (Fault("status", status=401), readers.RemoteError, "credentials are missing or wrong"),
        (Fault("status", status=404), readers.StaleIndexError, "there is no such object"),
        (Fault("status", status=412), readers.StaleIndexError, "no longer the object that was read before"),
        (Fault("reset"), readers.RemoteError, "error sending request"),
        (Fault("reset-body"), readers.RemoteError, "the answer broke off"),
        (Fault("truncate"), readers.RemoteError, "the answer broke off"),
        (Fault("slow", seconds=3), readers.RemoteError, "no whole answer in time.*PACKER_REMOTE_TIMEOUT"),
        (Fault("stall", seconds=3), readers.RemoteError, "no whole answer in time"),
    ],
    ids=lambda value: f"{value.kind}-{value.status}" if isinstance(value, Fault) else "",
)
def test_faults_that_stay(
    fault: Fault, kind: type[Exception], message: str, reader: readers.Reader, proxy: Proxy, address: str
) -> None:
    """The message names the object and the range; the reader works again afterwards."""
    fault.times = 99
    proxy.faults.append(fault)
    with pytest.raises(kind, match=f"(?s){message}") as caught:
        reader.read(3)
    start = reader.byte_range(3)[1]  # type: ignore[index]
    assert f"{address}/train-000000.tar, bytes {start} to" in str(caught.value)
    assert "not-a-secret" not in str(caught.value) and "\n" not in str(caught.value)
    if fault.kind not in ("slow", "stall"):  # each costs seconds
        with pytest.raises(kind):
            reader.read_many([3, 30])
        reader.prefetch([4])
        with pytest.raises(kind):
            reader.read(4)
    proxy.heal()
    assert len(reader.read(3)) > 0 and len(reader.read(4)) > 0


@pytest.mark.parametrize("what", ["dataset.json", "train.index/label.npy"])
def test_faults_while_opening(what: str, address: str, proxy: Proxy, tmp_path: Path) -> None:
    """A partly fetched index is never used."""
    proxy.faults.append(Fault("status", where=what, times=99))
    with pytest.raises(readers.RemoteError, match=what):
        readers.open(address, "train")
    assert not list(tmp_path.rglob("*.npy"))
    proxy.heal()
    proxy.faults.append(Fault("truncate", where=what, times=1))
    with readers.open(address, "train") as reader:
        assert len(reader.labels) == 36


def test_a_hostile_index(address: str, proxy: Proxy, tmp_path: Path) -> None:
    """Of the wrong length, no array at all, too large, missing: the set cannot be opened, and nothing is kept."""
    remote = Remote(address)
    good, _ = remote.whole("train.index/label.npy", 1 << 20)
    for bad, message in [
        (good[:-8], "train.index.*label.npy"),
        (b"x" * 500, "train.index.*label.npy"),
        (bytes(36 * (1 << 16) + (2 << 20)), "label.npy: has 4456448 bytes, dataset.json says"),
        (None, "missing index column"),
    ]:
        remote.store.delete("train.index/label.npy")
        if bad is not None:
            remote.store.put("train.index/label.npy", bad, crc32c=0)
        with pytest.raises(readers.DatasetError, match=message):
            readers.open(address, "train")
        assert not list(tmp_path.rglob("*.npy"))
    remote.store.put("dataset.json", b'{"kind": "other"}', crc32c=0)
    with pytest.raises(readers.DatasetError, match=f"{address}/dataset.json: kind is 'other'"):
        readers.open(address, "train")


def test_a_set_that_changes_while_it_is_opened(address: str, proxy: Proxy, tmp_path: Path) -> None:
    text, _ = Remote(address).whole("dataset.json", 1 << 20)
    each = Remote.each

    def meanwhile(self: Remote, work: object, items: object) -> object:
        done = each(self, work, items)  # type: ignore[type-var,arg-type]
        Remote(address).store.put("dataset.json", text + b"\n", crc32c=0)
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Remote, "each", meanwhile)
        with pytest.raises(readers.StaleIndexError, match="was changed while its index was fetched; open it again"):
            readers.open(address, "train")
    assert not list(tmp_path.rglob("*.npy"))
    with readers.open(address, "train") as reader:
        assert len(reader.read(0)) > 0


def test_a_server_that_sends_too_much(reader: readers.Reader, proxy: Proxy, address: str) -> None:
    """What is collected is bounded by the range, not by what the server says."""
    fault = Fault("flood", times=99)
    proxy.faults.append(fault)
    with pytest.raises(readers.RemoteError, match=r"sends more than the [\d,]+ bytes that were requested"):
        reader.read(3)
    assert fault.sent < 64 << 20, f"{fault.sent:,} bytes were taken for a read of some thousand"
    proxy.heal()
    proxy.faults.append(Fault("flood", where="label.npy", times=99))
    with pytest.raises(readers.RemoteError, match=r"label.npy: the server sends more than"):
        readers.open(address, "val")


# --- web servers -----------------------------------------------------------------------------------------------------
def test_a_web_server_without_ranges(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKER_CACHE_DIR", str(tmp_path))
    refused = pytest.raises(readers.RemoteError, match="the server ignores ranges")
    with closing(FileServer(packed.parent, ranges=False)) as server, refused:
        readers.open(f"http://127.0.0.1:{server.address[1]}/set", "train")


def test_a_web_server_without_etags(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes and checksums must do, and a body that breaks off is requested again."""
    monkeypatch.setenv("PACKER_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PACKER_REMOTE_TIMEOUT", "2")
    with closing(FileServer(packed.parent, etags=False)) as server, closing(Proxy(server.address)) as proxy:
        with readers.open(f"{proxy.url}/set", "train") as reader, readers.open(packed, "train") as local:
            proxy.faults.append(Fault("truncate"))
            assert bytes(reader.read(7)) == bytes(local.read(7)) and len(proxy.gets()) == 2
        with readers.stage(f"{proxy.url}/set", tmp_path / "to") as copy:
            assert (copy / "train-000000.tar").read_bytes() == (packed / "train-000000.tar").read_bytes()


def test_a_password_is_used_and_never_printed(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PACKER_REMOTE_RETRIES", "0")
    login = "Basic " + base64.b64encode(b"user:hunter2").decode()
    with closing(FileServer(packed.parent, password=login)) as server:
        url = f"http://user:hunter2@127.0.0.1:{server.address[1]}/set"
        with readers.open(url, "train") as reader:
            assert len(reader.read(0)) > 0 and "hunter2" not in f"{reader!r} {reader.byte_range(0)}"
        with readers.stage(url, tmp_path / "to"):
            pass
        kept = [path for path in tmp_path.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]
        assert not kept and "hunter2" not in str(list(tmp_path.rglob("*")))
        texts = []
        for wrong in (url + "x", url.replace("hunter2", "hunter22"), "http://user:hunter2@127.0.0.1:1/set"):
            with pytest.raises(readers.PackerError) as caught:
                readers.open(wrong, "train")
            texts.append("".join(traceback.format_exception(caught.value)))
        assert "hunter2" not in "".join(texts) and "credentials are missing or wrong" in texts[1]
        done = run_packer("inspect", url)
        assert done.returncode == 0 and "hunter2" not in done.stdout + done.stderr


# --- the parts -------------------------------------------------------------------------------------------------------
def test_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in [("TIMEOUT", "0"), ("TIMEOUT", "soon"), ("TIMEOUT", "nan"), ("RETRIES", "-1")]:
        with monkeypatch.context() as patch, pytest.raises(ValueError, match="PACKER_REMOTE_TIMEOUT or"):
            patch.setenv(f"PACKER_REMOTE_{name}", value)
            Patience.from_environment()


def test_a_courier_that_dies(address: str) -> None:
    """Its callers get an error, and the next call starts another."""
    courier = Courier()
    url, patience = parse_url(address), Patience(2, 0)
    data, facts = courier.ask(url, patience, "whole", "dataset.json", 1 << 20)
    assert data.startswith(b"{") and facts.bytes == len(data)
    courier._process.kill()
    with pytest.raises(RemoteError, match="has ended; try again"):
        while True:  # until the kill is seen
            courier.ask(url, patience, "head", "dataset.json")
    assert not courier.alive
    courier.close()


def test_a_courier_that_does_not_answer(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cache.remote._BOOT", "import time; time.sleep(60)")
    monkeypatch.setattr("cache.remote._START_SECONDS", -15.9)
    courier = Courier()
    with pytest.raises(SlowError, match="did not answer and was ended"):
        courier.ask(parse_url(address), Patience(1, 0), "head", "dataset.json")
    assert not courier.alive


def test_a_courier_ends_with_its_process(address: str) -> None:
    script = (
        "import os, sys, readers\n"
        "reader = readers.open(sys.argv[1], 'train'); reader.read(0)\n"
        "if os.fork() == 0:\n"
        "    reader.read(1)\n"
        "    from cache import remote\n"
        "    print(remote._process.courier._process.pid, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "os.wait()\n"
    )
    done = run_python("-c", script, address)
    assert done.returncode == 0, done.stderr
    pid = int(done.stdout)
    for _ in range(1000):
        if not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]:
            return
        os.sched_yield()
        gc.collect()
    raise AssertionError("the courier outlived its process")


def test_what_was_announced_is_bounded(address: str, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the cap the oldest go; they are read again when they are wanted."""
    monkeypatch.setattr("cache.stores.remote._CAP_BYTES", 1)
    monkeypatch.setattr(Ahead.__init__, "__defaults__", (20_000,))
    with readers.open(address, "train") as reader, readers.open(packed, "train") as local:
        reader.prefetch(range(36))
        held = reader.store.source._announced  # type: ignore[attr-defined]
        first = tuple(int(column[0]) for column in reader.table.extents([0])[1:])
        assert 0 < held._held_bytes <= 30_000 and first not in held._of
        assert [bytes(reader.read(i)) for i in range(36)] == [bytes(local.read(i)) for i in range(36)]
        assert not held and held._held_bytes == 0 and not held._runs


def test_reading_beyond_the_end(address: str, proxy: Proxy) -> None:
    remote = Remote(address)
    size = remote.head("train-000000.tar")[0].bytes
    with pytest.raises(TruncatedError, match="came; try again"):
        remote.read(Span("train-000000.tar", size - 5, size + 5))
    before = len(proxy.log)
    assert bytes(remote.read(Span("train-000000.tar", 7, 7))[0]) == b"" and len(proxy.log) == before


@pytest.mark.parametrize("host", ["169.254.169.254/latest/api/token", "metadata.google.internal/computeMetadata"])
def test_no_credentials(host: str) -> None:
    """Without any, obstore asks the services that machines of a cloud have, and says that they do not answer."""
    says = f"Generic error: Error performing PUT http://{host} in 1ms - Server returned 403"
    error = translated(OSError(says), "s3://bucket/set (GET)", says)
    assert isinstance(error, DeniedError) and "s3://bucket/set (GET): no credentials were found" in str(error)
    assert "169.254" not in str(error)  # the user has asked nothing of this address
    assert "AWS_SKIP_SIGNATURE=true" in str(error)
