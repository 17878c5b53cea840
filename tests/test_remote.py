"""Packed sets at addresses, read and staged: the bytes, the number of requests, changes in between, failing servers,
and messages that name the cause and the variable that fixes it, and no secret."""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import ssl
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import files_of
from crc32c import crc32c
from remote_servers import Fault, FileServer, Proxy
from remote_suite import BUCKET, put_files
from suites.programs import Notes, run_packer
from suites.staging import staged, staged_files_of
from torch.utils.data import DataLoader, Dataset

import packer
import readers
from cache.errors import (
    AddressError,
    CertificateError,
    DeniedError,
    MissingError,
    RemoteError,
    TruncatedError,
    UnsupportedError,
)
from cache.remote import Patience, Remote, Span, parallel_gets, parse_url, translated
from cache.staging import sources as staging_remote
from cache.stores.remote import Ahead
from packer.testing.children import in_child
from readers.augment import RandomResizedCrop
from readers.loader import ImageLoader
from readers.order import BlockShuffled, Woven, staged_first
from readers.torch import EpochSampler, ImageDataset, ImageStream


def everything(reader: readers.Reader) -> list[bytes]:
    return [bytes(reader.read(i)) for i in range(len(reader))]


@pytest.fixture
def local(packed: Path) -> readers.Reader:
    return readers.open(packed, "train")


@pytest.fixture
def reader(address: str) -> Iterator[readers.Reader]:
    with readers.open(address, "train") as reader:
        yield reader


@pytest.fixture(scope="module")
def other(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same samples in other shards."""
    out, shards = tmp_path_factory.mktemp("other") / "set", packer.Shards(samples=12, shuffle=3)
    return packer.convert(packed, to="tar", output=out, run=packer.Run(workers=1), shards=shards).output


def flipped(path: Path, step: int = 0) -> bytes:
    """The bytes of a file, of which every `step`-th, or the last one, is changed."""
    data = bytearray(path.read_bytes())
    for place in range(0, len(data), step) if step else (-1,):
        data[place] ^= 1
    return bytes(data)


# --- reading --------------------------------------------------------------------------------------------------------
def test_a_remote_set_equals_the_local_one_with_few_requests(
    address: str, proxy: Proxy, local: Any, place: Any
) -> None:
    with readers.open(f"{address}/", "train") as reader:
        opened = len(proxy.log)
        assert opened == 1 + 15 + 1, "dataset.json, a GET for each column, and a check that dataset.json is unchanged"
        assert reader.fingerprint == local.fingerprint and reader[3] == local[3]
        assert len(proxy.gets()) == 1 and len(proxy.log) == opened + 1 and "bytes=" in proxy.log[-1]
        assert reader.byte_range(9) == (f"{address}/{local.split_info.shards[1].path}", *local.byte_range(9)[1:])
        proxy.log.clear()
        backwards = list(range(36))[::-1]
        assert list(map(bytes, reader.read_many(backwards))) == everything(local)[::-1]
        assert len(proxy.log) == len(reader.split_info.shards) == 5, "neighbours were fetched separately"
        some = reader.select(labels=["dog"])
        assert [bytes(data) for data in some.read_many([3, 1])] == [bytes(data) for data in local.read_many([15, 13])]
        with readers.cached(reader, **place) as kept:
            kept.read_many(range(36))
            proxy.log.clear()
            assert [bytes(data) for data in kept.read_many(range(36))] == everything(local) and proxy.log == []
    with readers.open(address, "train") as reader:
        assert len(proxy.log) == 1, "a cached index was fetched again"


def test_announced_samples_are_read_once(reader: Any, proxy: Proxy, local: Any) -> None:
    proxy.log.clear()
    reader.prefetch(range(0, 36, 2))
    assert list(map(bytes, reader.read_many(range(0, 36, 2)))) == list(map(bytes, local.read_many(range(0, 36, 2))))
    assert len(proxy.gets()) == 5, "not one range a shard"
    reader.prefetch([1, 3, 1])
    assert bytes(reader.read(3)) == bytes(local.read(3)) and bytes(reader.read(1)) == bytes(local.read(1))
    assert len(proxy.gets()) == 6
    assert bytes(reader.read(1)) == bytes(local.read(1)) and len(proxy.gets()) == 7


def test_announced_samples_are_bounded(address: str, local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the cap the oldest samples are dropped; they are fetched again on demand."""
    monkeypatch.setattr("cache.stores.remote._CAP_BYTES", 1)
    monkeypatch.setattr(Ahead.__init__, "__defaults__", (20_000,))
    with readers.open(address, "train") as reader:
        reader.prefetch(range(36))
        ahead = reader.store.source._announced  # type: ignore[attr-defined]
        first = tuple(int(column[0]) for column in reader.table.extents([0])[1:])
        assert 0 < ahead._held_bytes <= 30_000 and first not in ahead._of
        assert everything(reader) == everything(local)
        assert not ahead and ahead._held_bytes == 0 and not ahead._runs


def test_a_loader_requests_each_sample_ahead_and_once(address: str, proxy: Proxy, local: readers.Reader) -> None:
    proxy.delay = 0.02
    with readers.open(address, "train") as reader:
        proxy.log.clear()
        loader = ImageLoader(reader, 4, seed=1, augment=[RandomResizedCrop(16)])
        batches = iter(loader)
        images, labels = next(batches)
        for _ in range(2):  # batches are read by other threads, so each later GET was announced by one of the first
            next(batches)
        requests = len(proxy.gets())
        rest = list(batches)
        assert len(rest) == 6 and requests == len(proxy.gets()) <= 36, "parts of the epoch were not requested yet"
        ranges = [line.split()[1:] for line in proxy.gets()]
        assert len({tuple(words) for words in ranges}) == len(ranges)
    expected = next(iter(ImageLoader(local, 4, seed=1, augment=[RandomResizedCrop(16)])))
    assert (images == expected[0]).all() and (labels == expected[1]).all()


def test_a_loader_reads_complete_blocks_of_a_woven_order(address: str, proxy: Proxy, local: Any) -> None:
    order = Woven(36, 3, 6, seed=2)
    with readers.open(address, "train") as reader:
        proxy.log.clear()
        came = [labels for _, labels in ImageLoader(reader, 4, order=order, augment=[RandomResizedCrop(16)])]
        visits = np.unique(order.visits(0, np.arange(36)))
        assert len(proxy.gets()) <= len(visits) + 5, "more than one GET a block, and one for each shard boundary"
    assert [list(batch) for batch in came] == [
        local.labels[order.indices(0, np.arange(n, n + 4))].tolist() for n in range(0, 36, 4)
    ]
    with readers.open(address, "train") as reader:
        proxy.log.clear()
        ranks = readers.Ranks(rank=0, world_size=2)
        reader.store.source.gap_bytes = 0  # type: ignore[attr-defined]
        with pytest.warns(UserWarning, match=r"faster is  readers\.order\.woven\(reader, nodes=2\)"):
            list(ImageLoader(reader, 2, order=order, augment=[RandomResizedCrop(16)], ranks=ranks))
        assert sum(map(_range_bytes, proxy.gets())) < sum(local.sizes()), (
            "a block that two ranks share was read completely"
        )


@pytest.mark.parametrize("made", [lambda: Woven(36, 3, 6, seed=2), lambda: BlockShuffled(np.arange(0, 37, 3), 2)])
def test_streams_and_data_sets_read_complete_blocks(address: str, proxy: Proxy, local: Any, made: Any) -> None:
    order = made()
    expected = [bytes(local.read(i)) for i in order.indices(1, np.arange(36)).tolist()]
    with readers.open(address, "train") as reader:
        proxy.log.clear()
        assert [bytes(data) for data in reader.stream(order, epoch=1)] == expected
        assert len(proxy.gets()) <= 26, "12 blocks, some of which are cut at the ends of the epoch"
        dataset = ImageDataset(reader, decode=None, fields=["image"])
        sampler = EpochSampler(order, dataset)
        sampler.set_epoch(1)
        proxy.log.clear()
        came = [item for batch in DataLoader(dataset, 4, sampler=sampler, collate_fn=list) for (item,) in batch]
        assert came == expected and len(proxy.gets()) <= 26


def test_each_worker_announces_its_own_batches(address: str, proxy: Proxy, local: Any) -> None:
    """Also from the middle of an epoch."""
    order = Woven(36, 3, 4, 2, workers=2, batch_size=4)
    with readers.open(address, "train") as reader:
        dataset = ImageDataset(reader, decode=None, fields=["image"])
        stream = ImageStream(dataset, EpochSampler(order, dataset), 4, collate=list)
        for begin in (0, 12):
            stream.load_state_dict(EpochSampler(order, dataset).state_after(begin))
            proxy.log.clear()
            came = [item for batch in DataLoader(stream, None, num_workers=2) for (item,) in batch]
            assert came == [bytes(local.read(i)) for i in order.indices(0, np.arange(begin, 36)).tolist()]
            assert len(proxy.gets()) < 30, "a block was fetched in parts or by several workers"


def test_unused_announced_samples_are_dropped(address: str, local: Any) -> None:
    """Samples before the position of a resumed epoch are not announced, and those of a loop that ended early are
    dropped."""
    order = Woven(36, 3, 6, seed=2)
    with readers.open(address, "train") as reader:
        loader = ImageLoader(reader, 4, order=order, augment=[RandomResizedCrop(16)])
        loader.load_state_dict(EpochSampler(order, reader).state_after(16))
        assert len(list(loader)) == 5
        ahead = reader.store.source._announced  # type: ignore[attr-defined]
        assert not ahead and not ahead._held_bytes
        reader.prefetch([0, 1, 2])
        ahead._cap_bytes = 4 * max(local.sizes())
        for i in range(6, 20, 2):
            reader.prefetch([i])
            reader.read(i)
        reader.prefetch([30])
        assert list(ahead._of) == [key for key in ahead._of if len(ahead._runs) == 1], "dropped samples stay in memory"


def _range_bytes(line: str) -> int:
    first, _, last = line.rpartition("=")[2].partition("-")
    return int(last) - int(first) + 1


def test_ranks_and_workers_share_the_requests_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parallel_gets() == 256
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    assert parallel_gets() == 64
    loader = DataLoader(_Shares(), batch_size=None, num_workers=2)
    assert list(loader) == [32, 32]


class _Shares(Dataset[int]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return parallel_gets()


def test_a_forked_child_meets_the_same_errors(reader: Any, proxy: Proxy) -> None:
    """The child also gets the samples that its parent has announced."""
    expected = bytes(reader.read(0))
    reader.prefetch([3, 4, 5])

    def child() -> None:
        assert bytes(reader.read(0)) == expected and len(reader.read(3)) > 0
        with pytest.raises(DeniedError, match=r"train-000001.tar, bytes.*access was denied"):
            reader.read(9)

    proxy.faults.append(Fault("status", where="train-000001", times=9, status=403))
    in_child(child)
    assert len(reader.read(5)) > 0


def test_forked_children_read_independently(reader: Any, local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also grandchildren, while threads of the parent read, and after a closed connection."""
    expected = [bytes(local.read(i)) for i in range(12)]

    def child() -> None:
        assert [bytes(data) for data in reader.read_many(range(12))] == expected
        reader.close()
        in_child(lambda: check(reader.read(5)))
        check(reader.read(5))

    def check(data: bytes) -> None:
        assert bytes(data) == expected[5]

    import obstore

    with ThreadPoolExecutor(4) as pool:
        busy = [pool.submit(reader.read, i) for i in [0, 1, 2, 3] * 50]
        for _ in range(3):
            in_child(child)
        assert all(future.result() for future in busy)
    check(reader.read(5))
    monkeypatch.setattr(obstore._obstore, "__file__", "/nowhere")

    def cannot() -> None:
        with pytest.raises(UnsupportedError, match="multiprocessing_context='spawn'"):
            reader.read(1)

    in_child(cannot)


def test_pickled_without_the_index(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: Path, local: Any
) -> None:
    """As on another machine: the index is fetched again; the index of another set is refused."""
    with readers.open(address, "train") as reader:
        data = pickle.dumps(reader)
    assert len(data) < 8000 and b"not-a-secret" not in data
    monkeypatch.setenv("PACKER_CACHE_DIR", str(tmp_path / "elsewhere"))
    os.rename(tmp_path / "index-cache", tmp_path / "gone")
    with pickle.loads(data) as again:
        assert again.path.is_relative_to(tmp_path / "elsewhere")
        assert bytes(again.read(1)) == bytes(local.read(1))
    os.rename(tmp_path / "elsewhere", tmp_path / "gone too")
    put_files(other, address)
    with pytest.raises(readers.StaleIndexError, match="changed since this reader was opened"):
        pickle.loads(data)


def test_the_place_of_the_cached_index(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a file").touch()
    monkeypatch.setenv("PACKER_CACHE_DIR", str(tmp_path / "a file"))
    with pytest.raises(readers.OutputError, match="PACKER_CACHE_DIR"):
        readers.open(address, "train")
    monkeypatch.delenv("PACKER_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    with readers.open(address, "train") as reader:
        assert reader.path.parent == tmp_path / "xdg/packer/sets"
        assert sorted(path.name for path in reader.path.iterdir()) == [".lock", "dataset.json", "train.index"]


def test_addresses_that_are_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for options, kind, message in [
        ({"backend": "mmap"}, ValueError, "backend 'mmap' is for local sets"),
        ({"fallback": address}, ValueError, "fallback is for local copies"),
        ({"patience_seconds": 1}, ValueError, "patience_seconds is for a local copy"),
        ({"split": "test"}, readers.UnknownNameError, "no split 'test'"),
    ]:
        with pytest.raises(kind, match=message):  # type: ignore[call-overload]
            readers.open(address, **options)  # type: ignore[call-overload]
    for path, message in [
        ("bucket/no", r"s3://bucket/no: no packed set \(no dataset.json\)"),
        ("none/x", "no such bucket"),
    ]:
        with pytest.raises(readers.PackerError, match=message):
            readers.open(f"s3://{path}")
    for name, value in [("TIMEOUT", "0"), ("TIMEOUT", "soon"), ("TIMEOUT", "nan"), ("RETRIES", "-1")]:
        with monkeypatch.context() as patch, pytest.raises(ValueError, match="PACKER_REMOTE_TIMEOUT or"):
            patch.setenv(f"PACKER_REMOTE_{name}", value)
            Patience.from_environment()
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(readers.MissingExtraError, match=r"pip install 'packer-vision\[remote\]'"):
        readers.open(f"s3://{BUCKET}/other")


# --- concurrent changes ---------------------------------------------------------------------------------------------
def test_a_changed_set_has_another_index(address: str, other: Path) -> None:
    with readers.open(address, "train") as old:
        put_files(other, address)
        with readers.open(address, "train") as new, readers.open(other, "train") as expected:
            assert new.path != old.path and list(new.keys) == list(expected.keys)
            assert everything(new) == everything(expected)
        with pytest.raises(readers.StaleIndexError, match=r"bytes, expected|changed since it was read|changed while"):
            everything(old)


def test_a_shard_that_changes_while_it_is_read(reader: Any, address: str, packed: Path) -> None:
    """Same size, other bytes: detected by the ETag and, before one is known, by the checksum."""
    name = "train-000000.tar"
    with readers.open(address, "train") as fresh:
        reader.read(0)
        Remote(address).store.put(name, flipped(packed / name, 100), crc32c=0)
        Remote(address).store.put("train-000001.tar", b"short", crc32c=0)
        message = re.escape(f"{address}/{name}, bytes") + ".*changed since it was read"
        reader.prefetch([2])
        for call in (lambda: reader.read(1), lambda: reader.read_many([1, 2]), lambda: reader.read(2)):
            with pytest.raises(readers.StaleIndexError, match=message):
                call()
        for call in (lambda: fresh.read(1), lambda: fresh.read_many([1])):
            with pytest.raises(readers.DamagedSampleError, match=f"CRC32C.*packer verify {address}"):
                call()
        with pytest.raises(readers.StaleIndexError):
            fresh.store.check(1)
        fresh.store.check(2)


@pytest.mark.parametrize("state", ["under way", "done"])
def test_samples_of_a_replaced_set_are_not_bad_samples(reader: Any, address: str, packed: Path, state: str) -> None:
    """Shards of the same sizes, one of which this process has not opened before."""
    name = "train-000000.tar"
    changed = flipped(packed / name, 1)
    text = json.loads((packed / "dataset.json").read_text())
    text["splits"]["train"]["shards"][0]["crc32c"] = f"{crc32c(changed):08x}"
    dataset = ImageDataset(reader, on_error="skip")
    Remote(address).store.put(name, changed, crc32c=0)
    if state == "done":
        Remote(address).store.put("dataset.json", json.dumps(text).encode(), crc32c=0)
    else:
        Remote(address).store.delete("dataset.json")
    message = f"^{address}: the set (has been|is being) replaced.*open it again"
    for read in (lambda: reader.read(1), lambda: reader.read_many([1]), lambda: dataset[1]):
        with pytest.raises(readers.StaleIndexError, match=message):
            read()
    assert len(reader.read(9)) > 0, "a sample of an unchanged shard"


def test_a_set_that_changes_while_it_is_opened(address: str, tmp_path: Path) -> None:
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


# --- servers that fail ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "fault",
    [
        Fault("status", status=503, times=2),
        Fault("status", status=429),
        Fault("reset", times=2),
        Fault("reset-body"),
        Fault("truncate"),
        Fault("stall", seconds=2.5),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.status}",
)
def test_temporary_faults(fault: Fault, reader: Any, proxy: Proxy, local: Any) -> None:
    times = fault.times
    proxy.faults.append(fault)
    assert bytes(reader.read(3)) == bytes(local.read(3)) and fault.times == 0
    if fault.kind == "stall":  # costs seconds
        return
    fault.times = times
    assert list(map(bytes, reader.read_many([9, 1]))) == list(map(bytes, local.read_many([9, 1])))
    fault.times = times
    reader.prefetch([5])
    assert bytes(reader.read(5)) == bytes(local.read(5)) and fault.times == 0


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (Fault("status", status=500), readers.RemoteError, r"after 2 retries.*500.*check the network"),
        (Fault("status", status=403), readers.RemoteError, "access was denied; check the credentials"),
        (Fault("status", status=401), readers.RemoteError, "credentials are missing or wrong"),
        (Fault("status", status=404), readers.StaleIndexError, "there is no such object"),
        (Fault("status", status=412), readers.StaleIndexError, "has changed since it was read"),
        (Fault("reset"), readers.RemoteError, "error sending request"),
        (Fault("truncate"), readers.RemoteError, "the answer broke off"),
        (Fault("slow", seconds=3), readers.RemoteError, "no complete answer in time.*PACKER_REMOTE_TIMEOUT"),
    ],
    ids=lambda value: f"{value.kind}-{value.status}" if isinstance(value, Fault) else "",
)
def test_permanent_faults(
    fault: Fault, kind: type[Exception], message: str, proxy: Proxy, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the object and the range; the reader works again afterwards."""
    if fault.kind == "slow":
        monkeypatch.setenv("PACKER_REMOTE_RETRIES", "0")
    with readers.open(address, "train") as reader:
        fault.times = 99
        proxy.faults.append(fault)
        with pytest.raises(kind, match=f"(?s){message}") as caught:
            reader.read(3)
        start = reader.byte_range(3)[1]  # type: ignore[index]
        assert f"{address}/train-000000.tar, bytes {start} to" in str(caught.value)
        assert "not-a-secret" not in str(caught.value) and "\n" not in str(caught.value)
        if fault.kind != "slow":
            with pytest.raises(kind):
                reader.read_many([3, 30])
            reader.prefetch([4])
            with pytest.raises(kind):
                reader.read(4)
        proxy.heal()
        assert len(reader.read(3)) > 0 and len(reader.read(4)) > 0


@pytest.mark.parametrize("pattern", ["dataset.json", "train.index/label.npy"])
def test_faults_while_opening(pattern: str, address: str, proxy: Proxy, tmp_path: Path) -> None:
    """A partly fetched index is never used."""
    proxy.faults.append(Fault("status", where=pattern, times=99))
    with pytest.raises(readers.RemoteError, match=pattern):
        readers.open(address, "train")
    assert not list(tmp_path.rglob("*.npy"))
    proxy.heal()
    proxy.faults.append(Fault("truncate", where=pattern, times=1))
    with readers.open(address, "train") as reader:
        assert len(reader.labels) == 36


def test_a_hostile_index(address: str, tmp_path: Path) -> None:
    """Wrong length, not an array, too large, missing: the set cannot be opened, and no file is kept."""
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


def test_a_server_that_sends_too_much_or_too_little(reader: Any, proxy: Proxy, address: str) -> None:
    """The memory is bounded by the range, not by the length that the server states."""
    fault = Fault("flood", times=99)
    proxy.faults.append(fault)
    with pytest.raises(readers.RemoteError, match=r"sends more than the [\d,]+ bytes that were requested"):
        reader.read(3)
    assert fault.sent < 64 << 20, f"{fault.sent:,} bytes were taken for a read of some thousand"
    proxy.heal()
    proxy.faults.append(Fault("flood", where="label.npy", times=99))
    with pytest.raises(readers.RemoteError, match=r"label.npy: the server sends more than"):
        readers.open(address, "val")
    proxy.heal()
    remote = Remote(address)
    size = remote.head("train-000000.tar")[0].bytes
    with pytest.raises(TruncatedError, match=r"received .*; try again"):
        remote.read(Span("train-000000.tar", size - 5, size + 5))
    before = len(proxy.log)
    assert bytes(remote.read(Span("train-000000.tar", 7, 7))[0]) == b"" and len(proxy.log) == before


def test_a_web_server_without_ranges(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKER_CACHE_DIR", str(tmp_path))
    refused = pytest.raises(readers.RemoteError, match="the server ignores ranges")
    with closing(FileServer(packed.parent, ranges=False)) as server, refused:
        readers.open(f"http://127.0.0.1:{server.address[1]}/set", "train")


def test_a_web_server_without_etags(packed: Path, local: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes and checksums are used instead, and an interrupted body is requested again."""
    monkeypatch.setenv("PACKER_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PACKER_REMOTE_TIMEOUT", "2")
    with closing(FileServer(packed.parent, etags=False)) as server, closing(Proxy(server.address)) as proxy:
        with readers.open(f"{proxy.url}/set", "train") as reader:
            proxy.faults.append(Fault("truncate"))
            assert bytes(reader.read(7)) == bytes(local.read(7)) and len(proxy.gets()) == 2
        with readers.stage(f"{proxy.url}/set", tmp_path / "to", splits=("val",)) as copy:
            names = {name for name in data_of(copy) if not name.startswith("val.index/")}
            assert names == {"dataset.json", "val-000000.tar", "val-000001.tar"}


# --- staging --------------------------------------------------------------------------------------------------------
def data_of(copy: Path) -> dict[str, bytes]:
    return {name: data for name, data in files_of(copy).items() if not name.startswith(".staging/")}


def test_staging_the_whole_set(address: str, packed: Path, proxy: Proxy, tmp_path: Path, other: Path) -> None:
    with (staging := readers.stage(address, tmp_path)) as copy:
        assert data_of(copy) == staged_files_of(packed)
        assert staging.counts.copied == len(staged_files_of(packed))
        assert len(proxy.gets(r"\.tar")) == 7, "not one GET a shard"
    proxy.log.clear()
    with (staging := readers.stage(address, tmp_path)) as again:
        assert again == copy and staging.counts.copied == 0 and len(proxy.log) == 1
    assert [copy.source for copy in packer.staged_copies(tmp_path)] == [address]
    put_files(other, address)
    notes = Notes()
    with readers.stage(address, tmp_path, watcher=notes) as second:
        assert second != copy and data_of(second) == staged_files_of(other)
    assert "its source has changed" in notes and not copy.exists()
    assert [copy.path for copy in packer.clean_staged(address, tmp_path).removed] == [str(second)]


def test_staging_a_part_with_the_address_as_fallback(
    address: str, packed: Path, local: Any, proxy: Proxy, tmp_path: Path, other: Path
) -> None:
    copy = staged(packed, tmp_path, part=(1, 2), splits=("train",))
    assert not (copy / "train-000000.tar").exists() and (copy / "train-000004.tar").exists()
    with readers.open(copy, "train", fallback=address, patience_seconds=1000) as reader:
        assert proxy.log == [], "a request before any shard was missing"
        assert everything(reader) == everything(local), "samples of the other half differ"
        assert {line.split()[1][-16:] for line in proxy.gets()} == {"train-000000.tar", "train-000001.tar"}
        counted = reader.store.stats()
        assert counted.local + counted.source == 36 and counted.local > 0 < counted.source
    put_files(other, address)
    with readers.open(copy, "train", fallback=address) as reader:
        reader.read(35)
        with pytest.raises(readers.StaleIndexError, match="a copy of another version of"):
            reader.read(0)


def test_staging_in_the_order_of_training(address: str, local: Any, proxy: Proxy, tmp_path: Path) -> None:
    """Every byte is fetched once: reads wait for the shard and fetch no samples of it."""
    order = staged_first(local.split_info, seed=5)
    with (
        readers.stage(address, tmp_path, splits=("train",), background=True, order=order) as copy,
        readers.open(copy, "train", fallback=address, patience_seconds=60) as reader,
    ):
        indices = order.indices(0, np.arange(36)).tolist()
        reader.prefetch(indices)
        assert [bytes(reader.read(i)) for i in indices] == [bytes(local.read(i)) for i in indices]
        assert pickle.loads(pickle.dumps(reader)).store.source.patience_seconds == 60
    assert len(proxy.gets(r"train-.*\.tar")) == 5, "not one GET a shard"


@pytest.mark.parametrize(
    ("fault", "message"), [(Fault("status", status=403), "access was denied"), (Fault("truncate"), "broke off")]
)
def test_staging_through_faults(
    fault: Fault, message: str, address: str, packed: Path, proxy: Proxy, tmp_path: Path
) -> None:
    """Complete files stay, and the same call continues with the rest once the server works again, also in between."""
    fault.where, fault.times = "train-000003", 99
    proxy.faults.append(fault)
    with pytest.raises(readers.StagingError, match=message) as caught:
        staged(address, tmp_path, threads=1)
    assert f"{address}/train-000003.tar" in str(caught.value) and "bytes 0 to" in str(caught.value)
    store = next(tmp_path.glob("packer-staged-*"))
    assert {path.name for path in store.rglob("*.tar")} == {f"train-00000{i}.tar" for i in range(3)}
    assert not list(store.rglob("part-*")) and not list(store.rglob("dataset.json")), "a partial copy looks complete"
    proxy.heal()
    proxy.faults.append(Fault("truncate", times=2))
    with (staging := readers.stage(address, tmp_path)) as copy:
        assert data_of(copy) == staged_files_of(packed) and staging.counts.found >= 3
    assert proxy.faults[0].times == 0 and not any("train-000000" in line for line in proxy.gets()), "fetched twice"


def test_staging_objects_that_change(
    address: str, packed: Path, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large object is copied in parts of one version; an object replaced before has another checksum than
    dataset.json."""
    monkeypatch.setattr(staging_remote, "_GET_BYTES", 4096)
    assert data_of(staged(address, tmp_path / "good")) == staged_files_of(packed)
    size = (packed / "train-000000.tar").stat().st_size
    assert len(proxy.gets("train-000000.tar")) == -(-size // 4096) > 2
    changed = flipped(packed / "train-000001.tar")

    def swap() -> None:
        while not proxy.gets("train-000001.tar"):
            time.sleep(0.001)
        Remote(address).store.put("train-000001.tar", changed, crc32c=0)

    proxy.log.clear()
    proxy.delay = 0.05
    thread = threading.Thread(target=swap)
    thread.start()
    with pytest.raises(readers.StagingError, match=r"train-000001.tar.*(changed|CRC32C)"):
        staged(address, tmp_path / "meanwhile", threads=1)
    thread.join()
    with pytest.raises(readers.StagingError, match=r"train-000001.tar: the CRC32C of its bytes"):
        staged(address, tmp_path / "before")


def test_the_commands_for_reading(address: str, packed: Path, tmp_path: Path) -> None:
    with readers.stage(address, tmp_path / "slow", background=True, bytes_per_second=20_000) as copy:
        assert not (copy / "train-000004.tar").exists() and (copy / "dataset.json").exists()
    done = run_packer("stage", address, "--target", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert data_of(Path(done.stdout.strip())) == staged_files_of(packed)
    for wrong, status, message in [
        ("s3://user:secret@bucket/x", 2, "credentials do not belong"),
        ("s3://no-such-bucket/x", 1, "no such bucket"),
    ]:
        done = run_packer("stage", wrong, "--target", str(tmp_path))
        assert done.returncode == status and message in done.stderr and "secret" not in done.stderr
        assert "Traceback" not in done.stderr and done.stdout == ""
    done = run_packer("inspect", address)
    assert done.returncode == 0 and done.stdout.startswith(f"{address}: tar set") and "36 samples" in done.stdout
    done = run_packer("order", address, "--split", "train", "--json")
    assert done.returncode == 0 and "global shuffle" in done.stdout


# --- TLS and credentials --------------------------------------------------------------------------------------------
@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """No credentials, no proxies, short timeouts; sets environment variables."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_", "PACKER_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)

    def setting(prefix: str, **variables: object) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(f"{prefix}{name}", str(value))

    setting("PACKER_", REMOTE_TIMEOUT=2, REMOTE_RETRIES=0, CACHE_DIR=tmp_path / "index-cache")
    return setting


KEYS = {"ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "not-a-secret", "REGION": "us-east-1"}


@pytest.fixture
def serving(packed: Path, certificates: Path) -> Iterator[Callable[[str], str]]:
    """Serves the folder above `packed` with the certificate of that name ("": without TLS); returns host and port."""
    servers: list[FileServer] = []

    def serve(name: str) -> str:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if name else None
        if context is not None:
            context.load_cert_chain(certificates / f"{name}.pem")
        servers.append(FileServer(packed.parent, tls=context))
        return f"127.0.0.1:{servers[-1].address[1]}"

    yield serve
    for server in servers:
        server.close()


@pytest.mark.parametrize("form", ["path", "text"])
def test_a_root_certificate_is_a_path_or_text(
    bare: Any, serving: Any, certificates: Path, local: Any, form: str
) -> None:
    ca, host = certificates / "ca.pem", serving("good")
    for prefix in ("PACKER_HTTP_", "AWS_"):
        bare(prefix, ROOT_CERTIFICATE=ca if form == "path" else ca.read_text())
    with readers.open(f"https://{host}/set", "train") as reader:
        assert bytes(reader.read(3)) == bytes(local.read(3))
    bare("AWS_", **KEYS, ENDPOINT_URL=f"https://{host}")
    with pytest.raises(MissingError):  # the server speaks HTTP over TLS, and has no such bucket
        Remote("s3://bucket/nothing").head("a")


@pytest.mark.parametrize(
    ("scheme", "certificate", "trusted", "message"),
    [
        *(
            (scheme, "good", False, "not signed by an authority that this machine trusts.*set {}ROOT_CERTIFICATE to")
            for scheme in ("https", "s3", "az", "gs")
        ),
        ("s3", "expired", True, "the server's certificate has expired.*clock"),
        ("az", "other", True, "certificate is for another host; check the endpoint"),
        ("gs", "", True, "the server does not speak TLS; check the port"),
        ("https", "", True, "the server does not speak TLS; check the port"),
    ],
)
def test_failures_of_tls_are_named(
    bare: Any, serving: Any, certificates: Path, scheme: str, certificate: str, trusted: bool, message: str
) -> None:
    host = serving(certificate)
    prefix = {"https": "PACKER_HTTP_", "s3": "AWS_", "az": "AZURE_", "gs": "GOOGLE_"}[scheme]
    account = {"gcs_base_url": f"https://{host}", "disable_oauth": True, "client_email": "", "private_key": ""}
    bare("AWS_", **KEYS, ENDPOINT_URL=f"https://{host}")
    bare("AZURE_STORAGE_", ACCOUNT_NAME="a", ACCOUNT_KEY="bm90IGEgc2VjcmV0", ENDPOINT=f"https://{host}")
    bare("GOOGLE_", SERVICE_ACCOUNT_KEY=json.dumps({**account, "private_key_id": "", "type": "service_account"}))
    if trusted:
        bare(prefix, ROOT_CERTIFICATE=certificates / "ca.pem")
    address = f"https://{host}/set" if scheme == "https" else f"{scheme}://bucket/set"
    with pytest.raises(CertificateError, match=f"TLS: .*{message.format(prefix)}") as caught:
        Remote(address).head("dataset.json")
    assert "check the network" not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "variables", "kind", "message"),
    [
        ("az://box/set", {}, DeniedError, "set AZURE_STORAGE_ACCOUNT_NAME"),
        (
            "az://box/set",
            {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_ACCOUNT_KEY": "not base64!"},
            DeniedError,
            "the key in AZURE_STORAGE_ACCOUNT_KEY is not base64",
        ),
        (
            "gs://box/set",
            {"GOOGLE_APPLICATION_CREDENTIALS": "no.json"},
            DeniedError,
            "APPLICATION_CREDENTIALS.*missing",
        ),
        (
            "gs://box/set",
            {"GOOGLE_APPLICATION_CREDENTIALS": "bad"},
            DeniedError,
            "named by GOOGLE_APPLICATION_CREDENTIALS is",
        ),
        (
            "s3://box/set",
            {"AWS_ROOT_CERTIFICATE": "none.pem"},
            CertificateError,
            "nor a readable file.*No such",
        ),
        ("s3://box/set", {"AWS_ROOT_CERTIFICATE": "bad"}, CertificateError, "AWS_ROOT_CERTIFICATE.*no PEM certificate"),
        (
            "s3://box/set",
            {"AWS_ROOT_CERTIFICATE": "-----BEGIN CERTIFICATE-----\nxx\n-----END CERTIFICATE-----\n"},
            CertificateError,
            "no readable PEM certificate",
        ),
        (
            "s3://box/set",
            {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"},
            AddressError,
            "allow that with AWS_ALLOW_HTTP=true",
        ),
        (
            "s3://box/set",
            {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_ALLOW_HTTP": "true"},
            RemoteError,
            "no server listens there; check the endpoint and its port",
        ),
    ],
)
def test_variables_that_are_not_valid_are_named(
    bare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, variables: Any, kind: Any, message: str
) -> None:
    (tmp_path / "bad").write_text("{}")
    monkeypatch.chdir(tmp_path)
    if address.startswith("s3"):
        bare("AWS_", **KEYS)
    bare("", **variables)
    with pytest.raises(kind, match=f"(?s){message}") as caught:
        Remote(address).head("dataset.json")
    if kind is DeniedError:
        assert "check the network" not in str(caught.value) and "AWS_" not in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "own", "others"),
    [
        ("s3", "AWS_SECRET_ACCESS_KEY", ("GOOGLE_", "AZURE_")),
        ("gs", "GOOGLE_APPLICATION_CREDENTIALS", ("AWS_", "AZURE_")),
        ("az", "AZURE_STORAGE_ACCOUNT_KEY", ("AWS_", "GOOGLE_")),
        ("https", "https://user:password@host/path", ("AWS_", "GOOGLE_", "AZURE_")),
    ],
)
def test_messages_name_the_variables_of_the_kind_of_store(scheme: str, own: str, others: tuple[str, ...]) -> None:
    """Without variables, obstore queries the metadata services of clouds, which the user has not asked for."""
    for kind, text in [
        ("GenericError", "Error performing PUT http://169.254.169.254/latest/api/token in 1ms"),
        ("GenericError", "Error performing PUT http://metadata.google.internal/x in 1ms - Server returned 403"),
        ("UnauthenticatedError", "Server returned 401"),
        ("PermissionDeniedError", "403"),
    ]:
        error = translated(type(kind, (OSError,), {})(text), f"{scheme}://bucket/set (GET)", text)
        assert isinstance(error, DeniedError) and f"{scheme}://bucket/set (GET)" in str(error) and own in str(error)
        assert not any(other in str(error) for other in (*others, "169.254")), str(error)
        assert kind != "GenericError" or scheme != "s3" or "AWS_SKIP_SIGNATURE=true" in str(error)


# --- secrets --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ftp://host/set", "not an address of the kinds s3://"),
        ("s3://", "has no bucket"),
        ("s3://user:SECRET@bucket/set", "credentials do not belong in the address"),
        ("https://host/set?sig=SECRET", "has a query"),
        ("s3://bucket/a/../b", "dotted"),
        ("https://user:HALF@SECRET@host/set", "."),
        ("https://user:SECRET@SECRET@host:80/set", "."),
        ("https://user:HALF/SECRET@host/set", "."),
        ("https://user:80/SECRET@host/set", "."),
        ("https://user:SECRET@@host/set", "."),
        ("ftp://user:HALF@SECRET@host/set", "."),
        ("ftp://user:HALF/SECRET@host/set", "."),
        ("s3://AKIA:HALF/SECRET@bucket/set", "."),
    ],
)
def test_no_part_of_a_password_is_printed(address: str, message: str) -> None:
    for call in (parse_url, readers.open):
        with pytest.raises((AddressError, readers.PackerError), match=message) as caught:
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


def test_a_password_is_used_and_never_printed(bare: Any, packed: Path, tmp_path: Path) -> None:
    login = "Basic " + base64.b64encode(b"user:hunter2").decode()
    with closing(FileServer(packed.parent, password=login)) as server:
        url = f"http://user:hunter2@127.0.0.1:{server.address[1]}/set"
        with readers.open(url, "train") as reader:
            assert len(reader.read(0)) > 0 and "hunter2" not in f"{reader!r} {reader.byte_range(0)}"
        staged(url, tmp_path / "to")
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


def test_a_session_token_follows_no_redirect(bare: Any) -> None:
    seen: list[str] = []

    class Redirecting(BaseHTTPRequestHandler):
        """Redirects every request to another name of its host; requests that arrive there are in `seen`."""

        def log_message(self, format: str, *arguments: object) -> None:
            """Log nothing."""

        def do_HEAD(self) -> None:
            there = self.headers["Host"].startswith("localhost")
            if there:
                seen.append(str(self.headers).lower())
            self.send_response(404 if there else 307)
            self.send_header("Location", f"http://localhost:{server.server_address[1]}{self.path}")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_HEAD

    with ThreadingHTTPServer(("127.0.0.1", 0), Redirecting) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        bare("AWS_", **KEYS, ENDPOINT_URL=f"http://127.0.0.1:{server.server_address[1]}", ALLOW_HTTP="true")
        with pytest.raises(MissingError):
            Remote("s3://bucket/set").head("a")
        assert seen and not any("authorization" in headers for headers in seen), "redirect not followed"
        seen.clear()
        bare("AWS_", SESSION_TOKEN="a-token")
        with pytest.raises(DeniedError, match="redirects to another host, which must not get the session token"):
            Remote("s3://bucket/set").head("a")
        server.shutdown()
        thread.join()
    assert seen == []
