"""Reading packed sets from an S3 and a web server: the bytes, the number of requests, processes, and what changes."""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c
from remote_servers import Fault, Proxy
from remote_suite import BUCKET, put_files
from torch.utils.data import DataLoader, Dataset

import packer
import readers
from cache.remote import Remote, parallel_gets
from packer.testing.children import in_child
from readers.augment import RandomResizedCrop
from readers.loader import ImageLoader
from readers.torch import ImageDataset


def everything(reader: readers.Reader) -> list[bytes]:
    return [bytes(reader.read(i)) for i in range(len(reader))]


@pytest.fixture
def local(packed: Path) -> readers.Reader:
    return readers.open(packed, "train")


def test_a_remote_set_is_the_local_one(address: str, local: readers.Reader) -> None:
    with readers.open(f"{address}/", "train") as reader:
        assert everything(reader) == everything(local)
        assert reader.fingerprint == local.fingerprint and reader[3] == local[3]
        assert reader.byte_range(9) == (f"{address}/{local.split_info.shards[1].path}", *local.byte_range(9)[1:])  # type: ignore[index]


def test_requests_are_few(address: str, proxy: Proxy) -> None:
    with readers.open(address, "train") as reader:
        fetched = len(proxy.log)
        assert fetched == 1 + 15 + 1, "dataset.json, a GET for each column, and a look whether dataset.json is the same"
        reader.read(0)
        assert len(proxy.gets()) == 1 and len(proxy.log) == fetched + 1 and "bytes=" in proxy.log[-1]
        proxy.log.clear()
        reader.read_many(list(range(len(reader)))[::-1])
        assert len(proxy.log) == len(reader.split_info.shards) == 5, "neighbours are fetched together"
    proxy.log.clear()
    with readers.open(address, "train") as reader:
        assert len(proxy.log) == 1, "the index is here already"


def test_prefetch_reads_once(address: str, proxy: Proxy, local: readers.Reader) -> None:
    with readers.open(address, "train") as reader:
        proxy.log.clear()
        reader.prefetch(range(0, 36, 2))
        got = reader.read_many(range(0, 36, 2))
        assert [bytes(data) for data in got] == [bytes(data) for data in local.read_many(range(0, 36, 2))]
        before = len(proxy.gets())
        assert before == 5, "one range a shard, and none again for the reading"
        reader.prefetch([1, 3, 1])
        assert bytes(reader.read(3)) == bytes(local.read(3)) and bytes(reader.read(1)) == bytes(local.read(1))
        assert len(proxy.gets()) == before + 1
        assert bytes(reader.read(1)) == bytes(local.read(1)) and len(proxy.gets()) == before + 2


def test_a_loader_asks_ahead_and_once_for_each_sample(address: str, proxy: Proxy, local: readers.Reader) -> None:
    proxy.delay = 0.02
    with readers.open(address, "train") as reader:
        proxy.log.clear()
        loader = ImageLoader(reader, 4, seed=1, augment=[RandomResizedCrop(16)])
        batches = iter(loader)
        images, labels = next(batches)
        for _ in range(2):  # batches are read by other threads, so each later GET was announced by one of the first
            next(batches)
        asked = len(proxy.gets())
        rest = list(batches)
        assert len(rest) == 6 and asked == len(proxy.gets()) <= 36, "all of the epoch was asked for by then"
        ranges = [line.split()[1:] for line in proxy.gets()]
        assert len({tuple(one) for one in ranges}) == len(ranges)
    expected = next(iter(ImageLoader(local, 4, seed=1, augment=[RandomResizedCrop(16)])))
    assert (images == expected[0]).all() and (labels == expected[1]).all()


def test_ranks_and_workers_share_the_requests_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parallel_gets() == 128
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


def test_a_forked_child_meets_the_same_errors(address: str, proxy: Proxy) -> None:
    """And gets what its parent has announced."""
    with readers.open(address, "train") as reader:
        expected = bytes(reader.read(0))
        reader.prefetch([3, 4, 5])

        def child() -> None:
            assert bytes(reader.read(0)) == expected and len(reader.read(3)) > 0
            with pytest.raises(readers.RemoteError, match=r"access was denied.*") as caught:
                reader.read(9)
            assert type(caught.value).__name__ == "DeniedError" and "train-000001.tar, bytes" in str(caught.value)

        proxy.faults.append(Fault("status", where="train-000001", times=9, status=403))
        in_child(child)
        assert len(reader.read(5)) > 0


def test_pickled_without_the_index(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: Path, local: readers.Reader
) -> None:
    """As on another machine: it is fetched again; but not another set."""
    with readers.open(address, "train") as reader:
        data = pickle.dumps(reader)
    assert len(data) < 8000 and b"not-a-secret" not in data
    monkeypatch.setenv("PACKER_CACHE_DIR", str(tmp_path / "elsewhere"))
    os.rename(tmp_path / "index-cache", tmp_path / "gone")
    with pickle.loads(data) as again:
        assert again.path.is_relative_to(tmp_path / "elsewhere")
        assert bytes(again.read(1)) == bytes(local.read(1))
    os.rename(tmp_path / "elsewhere", tmp_path / "gone too")
    other = tmp_path / "other"
    packer.convert(packed, to="tar", output=other, run=packer.Run(workers=1), shards=packer.Shards(samples=12))
    put_files(other, address)
    with pytest.raises(readers.StaleIndexError, match="changed since this reader was opened"):
        pickle.loads(data)


def test_a_changed_set_has_another_index(address: str, packed: Path, tmp_path: Path) -> None:
    with readers.open(address, "train") as old:
        other = tmp_path / "other"
        packer.convert(
            packed, to="tar", output=other, run=packer.Run(workers=1), shards=packer.Shards(samples=12, shuffle=3)
        )
        put_files(other, address)
        with readers.open(address, "train") as new, readers.open(other, "train") as expected:
            assert new.path != old.path and list(new.keys) == list(expected.keys)
            assert everything(new) == everything(expected)
        with pytest.raises(readers.StaleIndexError, match=r"bytes, .* expected|no longer the object|changed while"):
            everything(old)


def test_a_shard_that_changes_while_it_is_read(address: str, packed: Path) -> None:
    """Same size, other bytes: detected by the ETag and, before one is known, by the checksum."""
    name = "train-000000.tar"
    changed = bytearray((packed / name).read_bytes())
    for place in range(0, len(changed), 100):
        changed[place] ^= 1
    with readers.open(address, "train") as reader, readers.open(address, "train") as fresh:
        reader.read(0)
        Remote(address).store.put(name, bytes(changed), crc32c=0)
        with pytest.raises(
            readers.StaleIndexError, match=re.escape(f"{address}/{name}, bytes") + ".*no longer the object"
        ):
            reader.read(1)
        with pytest.raises(readers.StaleIndexError):
            reader.read_many([1, 2])
        reader.prefetch([1])
        with pytest.raises(readers.StaleIndexError):
            reader.read(1)
        with pytest.raises(readers.DamagedSampleError, match=f"CRC32C.*packer verify {address}"):
            fresh.read(1)
        with pytest.raises(readers.DamagedSampleError):
            fresh.read_many([1])


@pytest.mark.parametrize("state", ["under way", "done"])
def test_samples_of_a_replaced_set_are_not_bad_ones(address: str, packed: Path, state: str) -> None:
    """Shards of the same sizes, of which this process has not seen one."""
    name = "train-000000.tar"
    changed = bytes(byte ^ 1 for byte in (packed / name).read_bytes())
    text = json.loads((packed / "dataset.json").read_text())
    text["splits"]["train"]["shards"][0]["crc32c"] = f"{crc32c(changed):08x}"
    with readers.open(address, "train") as reader:
        dataset = ImageDataset(reader, on_error="skip")
        Remote(address).store.put(name, changed, crc32c=0)
        if state == "done":
            Remote(address).store.put("dataset.json", json.dumps(text).encode(), crc32c=0)
        else:
            Remote(address).store.delete("dataset.json")
        for read in (lambda: reader.read(1), lambda: reader.read_many([1]), lambda: dataset[1]):
            with pytest.raises(
                readers.StaleIndexError, match=f"^{address}: the set (has been|is being) replaced.*open it again"
            ):
                read()
        assert len(reader.read(9)) > 0, "of a shard that is the same"


def test_a_missing_or_short_shard(address: str, packed: Path) -> None:
    with readers.open(address, "train") as reader:
        Remote(address).store.delete("train-000000.tar")
        Remote(address).store.put("train-000001.tar", b"short", crc32c=0)
        with pytest.raises(readers.StaleIndexError, match="no such object"):
            reader.read(0)
        with pytest.raises(readers.StaleIndexError, match=r"the object is shorter|has 5 bytes"):
            reader.read(8)
        for number in (0, 1):
            with pytest.raises(readers.StaleIndexError):
                reader.store.check(number)
        reader.store.check(2)


def test_a_copy_with_the_address_behind_it(address: str, packed: Path, tmp_path: Path, proxy: Proxy) -> None:
    copy = tmp_path / "copy"
    with readers.stage(packed, tmp_path / "target", fraction=0.5) as staged:
        os.symlink(staged, copy)
        local = readers.open(packed, "train")
        with readers.open(copy, "train", fallback=address) as reader:
            assert proxy.log == [], "nothing is asked of the source before a shard is missing"
            assert everything(reader) == everything(local)
            assert sorted({line.split()[1][-16:] for line in proxy.gets()}) == ["train-000003.tar", "train-000004.tar"]
            assert [bytes(d) for d in reader.read_many([35, 0])] == [bytes(local.read(35)), bytes(local.read(0))]
    other = tmp_path / "other"
    packer.convert(
        packed, to="tar", output=other, run=packer.Run(workers=1), shards=packer.Shards(samples=12, shuffle=3)
    )
    put_files(other, address)
    with readers.open(copy, "train", fallback=address) as reader:
        reader.read(0)
        with pytest.raises(readers.StaleIndexError, match="a copy of another state of"):
            reader.read(35)


def test_under_a_selection_and_a_cache(address: str, proxy: Proxy, local: readers.Reader, place: Any) -> None:
    with readers.open(address, "train") as reader:
        some = reader.select(labels=["dog"])
        assert [bytes(data) for data in some.read_many([3, 1])] == [bytes(data) for data in local.read_many([15, 13])]
        with readers.cached(reader, **place) as kept:
            assert [bytes(data) for data in kept.read_many(range(36))] == everything(local)
            proxy.log.clear()
            assert [bytes(data) for data in kept.read_many(range(36))] == everything(local)
            assert proxy.log == []


def test_what_is_refused(proxy: Proxy, address: str, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="backend 'mmap' is for local sets"):
        readers.open(address, backend="mmap")
    with pytest.raises(ValueError, match="fallback is for local copies"):
        readers.open(address, fallback=address)
    with pytest.raises(readers.DatasetError, match=r"s3://bucket/nothing/here: no packed set \(no dataset.json\)"):
        readers.open(f"s3://{BUCKET}/nothing/here")
    with pytest.raises(readers.RemoteError, match="there is no such bucket"):
        readers.open("s3://no-such-bucket/set")
    with pytest.raises(readers.UnknownNameError, match="no split 'test'"):
        readers.open(address, "test")
    for wrong, message in [
        ("ftp://host/set", "not an address of the kinds s3://"),
        ("s3://", "names no bucket"),
        ("s3://user:secret@bucket/set", "credentials do not belong in the address"),
        ("https://host/set?sig=secret", "has a query after it"),
        ("s3://bucket/a/../b", "dotted"),
    ]:
        with pytest.raises(readers.RemoteError, match=message) as caught:
            readers.open(wrong)
        assert "secret" not in str(caught.value)
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(readers.MissingExtraError, match=r"pip install 'packer-vision\[remote\]'"):
        readers.open(f"s3://{BUCKET}/other")


def test_where_the_index_goes(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.setenv("PACKER_CACHE_DIR", str(blocked))
    with pytest.raises(readers.OutputError, match="PACKER_CACHE_DIR"):
        readers.open(address, "train")
    monkeypatch.delenv("PACKER_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    with readers.open(address, "train") as reader:
        assert reader.path.parent == tmp_path / "xdg/packer/sets"
        assert sorted(path.name for path in reader.path.iterdir()) == [".lock", "dataset.json", "train.index"]
