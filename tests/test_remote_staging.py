"""Staging from addresses: the bytes, faults on the way, and sources that change."""

from __future__ import annotations

import pickle
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import files_of
from remote_servers import Fault, Proxy
from remote_suite import put_files
from suites.programs import run_packer
from suites.staging import Notes, staged, staged_files_of

import packer
import readers
from cache.remote import Remote
from cache.staging import sources as staging_remote
from readers.order import staged_first


def data_of(copy: Path) -> dict[str, bytes]:
    return {name: data for name, data in files_of(copy).items() if not name.startswith(".staging/")}


def test_the_whole_set(address: str, packed: Path, proxy: Proxy, tmp_path: Path) -> None:
    with (staging := readers.stage(address, tmp_path)) as local:
        assert data_of(local) == staged_files_of(packed)
        assert staging.counts.copied == len(staged_files_of(packed)) and len(proxy.gets(r"\.tar")) == 7, (
            "one GET a shard"
        )
    proxy.log.clear()
    with (staging := readers.stage(address, tmp_path)) as again:
        assert again == local and staging.counts.copied == 0 and len(proxy.log) == 1
    assert [copy.source for copy in packer.staged_copies(tmp_path)] == [address]
    assert [copy.path for copy in packer.clean_staged(address, tmp_path).removed] == [str(local)]


def test_from_a_web_server(web: Proxy, packed: Path, tmp_path: Path) -> None:
    with readers.stage(f"{web.url}/set", tmp_path, splits=("val",)) as local:
        names = {name for name in data_of(local) if not name.startswith("val.index/")}
        assert names == {"dataset.json", "val-000000.tar", "val-000001.tar"}


def test_part_of_it_with_the_address_behind(address: str, packed: Path, tmp_path: Path) -> None:
    with readers.stage(address, tmp_path, part=(1, 2), splits=("train",)) as local:
        assert not (local / "train-000000.tar").exists() and (local / "train-000004.tar").exists()
        with readers.open(local, "train", fallback=address) as reader, readers.open(packed, "train") as whole:
            assert [bytes(reader.read(i)) for i in range(36)] == [bytes(whole.read(i)) for i in range(36)]


def test_in_the_background_and_in_the_order_of_training(
    address: str, packed: Path, proxy: Proxy, tmp_path: Path
) -> None:
    """Everything is fetched once: reads wait for the shard and fetch no samples of it."""
    with readers.open(packed, "train") as whole:
        order = staged_first(whole.split_info, seed=5)
        expected = [bytes(whole.read(i)) for i in range(36)]
    with (
        readers.stage(address, tmp_path, splits=("train",), background=True, order=order) as local,
        readers.open(local, "train", fallback=address, patience_seconds=60) as reader,
    ):
        indices = order.indices(0, np.arange(36)).tolist()
        reader.prefetch(indices)
        assert [bytes(reader.read(i)) for i in indices] == [expected[i] for i in indices]
        assert pickle.loads(pickle.dumps(reader)).store.source.patience_seconds == 60
    assert len(proxy.gets(r"train-.*\.tar")) == 5, "one GET a shard"


def test_patience_for_nothing(address: str, packed: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="patience_seconds is for a local copy"):
        readers.open(address, "train", patience_seconds=1)
    with pytest.raises(ValueError, match="patience_seconds must be 0 or more"):
        readers.open(tmp_path, "train", fallback=address, patience_seconds=-1)
    local = staged(address, tmp_path, part=(1, 2), splits=("train",))
    with readers.open(local, "train", fallback=address, patience_seconds=1000) as reader:
        assert len(reader.read_many(range(36))) == 36, "the other half does not arrive"
        counted = reader.store.stats()
        assert counted.local + counted.source == 36 and counted.local > 0 < counted.source


@pytest.mark.parametrize("kind", ["status", "reset", "reset-body", "truncate", "slow"])
def test_faults_that_pass(kind: str, address: str, packed: Path, proxy: Proxy, tmp_path: Path) -> None:
    proxy.faults.append(Fault(kind, times=2, seconds=2.5))
    with readers.stage(address, tmp_path) as local:
        assert data_of(local) == staged_files_of(packed)
    assert proxy.faults[0].times == 0


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault("status", times=99), "500"),
        (Fault("status", times=99, status=403), "access was denied"),
        (Fault("status", times=99, status=404), "no such object"),
        (Fault("truncate", times=99), "broke off"),
        (Fault("stall", times=99, seconds=3), "in time"),
        (Fault("reset", times=99), "error sending request"),
    ],
    ids=lambda value: f"{value.kind}-{value.status}" if isinstance(value, Fault) else "",
)
def test_faults_that_stay(fault: Fault, message: str, address: str, packed: Path, proxy: Proxy, tmp_path: Path) -> None:
    """Whole files stay, and the same call continues with the rest once the server is well."""
    fault.where = "train-000003"
    proxy.faults.append(fault)
    with pytest.raises(readers.StagingError, match=message) as caught, readers.stage(address, tmp_path, threads=1):
        pass
    assert f"{address}/train-000003.tar" in str(caught.value) and "bytes 0 to" in str(caught.value)
    store = next(tmp_path.glob("packer-staged-*"))
    here = {path.name for path in store.rglob("*.tar")}
    assert here == {f"train-00000{i}.tar" for i in range(3)} and not list(store.rglob("part-*"))
    assert not list(store.rglob("dataset.json")), "nothing half-copied looks whole"
    proxy.heal()
    with (staging := readers.stage(address, tmp_path)) as local:
        assert data_of(local) == staged_files_of(packed) and staging.counts.found >= 3
    assert not any("train-000000" in line for line in proxy.gets()), "whole shards are not fetched again"


def test_large_files_go_in_parts_of_one_object(
    address: str, packed: Path, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging_remote, "_GET_BYTES", 4096)
    with readers.stage(address, tmp_path) as local:
        assert data_of(local) == staged_files_of(packed)
        size = (packed / "train-000000.tar").stat().st_size
    assert len(proxy.gets("train-000000.tar")) == -(-size // 4096) > 2
    changed = bytearray((packed / "train-000001.tar").read_bytes())
    changed[-1] ^= 1

    def swap() -> None:
        while not proxy.gets("train-000001.tar"):
            time.sleep(0.001)
        Remote(address).store.put("train-000001.tar", bytes(changed), crc32c=0)

    proxy.log.clear()
    proxy.delay = 0.05
    thread = threading.Thread(target=swap)
    thread.start()
    with (
        pytest.raises(readers.StagingError, match=r"train-000001.tar.*(no longer the object|changed|CRC32C)"),
        readers.stage(address, tmp_path / "other", threads=1),
    ):
        pass
    thread.join()


def test_a_shard_that_was_replaced(address: str, packed: Path, tmp_path: Path) -> None:
    """By one of the same size: its checksum is not that of dataset.json."""
    changed = bytearray((packed / "train-000001.tar").read_bytes())
    changed[-1] ^= 1
    Remote(address).store.put("train-000001.tar", bytes(changed), crc32c=0)
    with (
        pytest.raises(readers.StagingError, match=r"train-000001.tar: the CRC32C of its bytes"),
        readers.stage(address, tmp_path),
    ):
        pass


def test_a_changed_set_is_another_copy(address: str, packed: Path, tmp_path: Path) -> None:
    first = staged(address, tmp_path / "to")
    other = tmp_path / "other"
    packer.convert(
        packed, to="tar", output=other, run=packer.Run(workers=1), shards=packer.Shards(samples=12, shuffle=3)
    )
    put_files(other, address)
    notes = Notes()
    with readers.stage(address, tmp_path / "to", watcher=notes) as second:
        assert second != first and data_of(second) == staged_files_of(other)
    assert "its source has changed" in notes and not first.exists()


def test_bandwidth(address: str, packed: Path, tmp_path: Path) -> None:
    """The cap is on what comes over the network, counted by the same pace as for local sources."""
    with readers.stage(address, tmp_path, background=True, bytes_per_second=20_000) as local:
        assert not (local / "train-000004.tar").exists() and (local / "dataset.json").exists()


def test_the_command(address: str, proxy: Proxy, packed: Path, tmp_path: Path) -> None:
    done = run_packer("stage", address, "--target", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert data_of(Path(done.stdout.strip())) == staged_files_of(packed)
    for wrong, status, message in [
        ("s3://user:secret@bucket/x", 2, "credentials do not belong"),
        ("s3://bucket/nothing", 1, "no packed set"),
        ("s3://no-such-bucket/x", 1, "no such bucket"),
    ]:
        done = run_packer("stage", wrong, "--target", str(tmp_path))
        assert done.returncode == status and message in done.stderr and "secret" not in done.stderr
        assert "Traceback" not in done.stderr and done.stdout == ""
    done = run_packer("inspect", address)
    assert done.returncode == 0 and done.stdout.startswith(f"{address}: tar set") and "36 samples" in done.stdout
    done = run_packer("order", address, "--split", "train", "--json")
    assert done.returncode == 0 and "global shuffle" in done.stdout
