"""Nodes that read from one another: together they read the source once, and a node that fails, hangs or returns wrong
bytes costs time and no sample; retries and warnings; nodes as processes."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cached_sources import SlowStore
from conftest import tree_of
from remote_servers import Proxy
from set_cases import pack_tree
from suites.programs import run_packer

import packer
import readers
from cache.errors import DamagedSampleError, ServingError, SlowError
from cache.serving import Rendezvous, Server
from cache.stores import Extents, Store
from cache.stores.copied import Copied, Neighbours, RowOwners
from readers.order import NodeLocal, Shuffled
from readers.order.schedule import make_schedule
from readers.reader import Reader
from readers.staging import PayloadRanges

_LOCAL = {"host": "127.0.0.1", "serve": False, "wait_seconds": 0}


class Cluster:
    """Nodes in this process: each has a separate store over a counted source, and a server; all use the folder
    `job`."""

    def __init__(self, root: Path, own: Sequence[Reader], counted: Sequence[SlowStore], **options: Any) -> None:
        self.own, self.counted, self.nodes = own, counted, len(own)
        options = {**_LOCAL, "nodes": self.nodes, **options}
        self.shared = [readers.share(reader, root / "job", node=node, **options) for node, reader in enumerate(own)]
        self.servers = [] if options["serve"] else [reader.serve(Server) for reader in self.shared]
        self.readers = [reader.__enter__() for reader in self.shared]

    @property
    def source_reads(self) -> Counter[int]:
        return Counter(row for counted in self.counted for row in counted.reads)

    def close(self) -> None:
        for shared, reader in zip(self.shared, self.readers, strict=True):
            reader.close()
            shared.close()


@pytest.fixture
def truth(source: Path) -> list[bytes]:
    with readers.open(source, "train") as reader:
        return [bytes(data) for data in reader.read_many(range(len(reader)))]


@pytest.fixture
def cluster(source: Path, tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Makes nodes, each of which has its part of the samples in a cache, or in a staged copy."""
    with ExitStack() as stack:

        def cached(nodes: int, **options: Any) -> Cluster:
            counted, own = [], []
            for node in range(nodes):
                plain = readers.open(source, "train")
                counted.append(SlowStore(plain.store))
                (tmp_path / f"memory-{node}").mkdir()
                below = Reader(plain.table, counted[-1])
                kept = readers.cached(below, 1.0, partition=(node, nodes), directory=tmp_path / f"memory-{node}")
                own.append(stack.enter_context(kept))
            made = Cluster(tmp_path, own, counted, **options)
            stack.callback(made.close)
            return made

        def staged(nodes: int, overlap: bool, **options: Any) -> tuple[Cluster, list[Path]]:
            counted, own, copies = [], [], []
            for node in range(nodes):
                staging = readers.stage(
                    source, tmp_path / f"disk-{node}", part=(node, nodes), overlap=overlap, any_filesystem=True
                )
                copies.append(stack.enter_context(staging))
                plain = readers.open(copies[-1], "train", fallback=source)
                counted.append(SlowStore(plain.store.source))
                own.append(Reader(plain.table, Copied(plain.store.copy, counted[-1])))
            made = Cluster(tmp_path, own, counted, **options)
            stack.callback(made.close)
            return made, copies

        yield lambda nodes, kind="cached", **options: (staged if kind == "staged" else cached)(nodes, **options)


def epoch(cluster: Cluster, order: Any, number: int, truth: list[bytes], batch: int = 5) -> list[int]:
    """All nodes read their shares of an epoch, with batches announced a step ahead; returns the samples read,
    sorted."""
    came: list[int] = []
    for node, reader in enumerate(cluster.readers):
        schedule = make_schedule(order, number, batch, node, cluster.nodes, "exact")
        steps = [order.indices(number, schedule.positions(step)) for step in range(schedule.steps())]
        for step, rows in enumerate(steps):
            if batch > 1 and step + 1 < len(steps):
                reader.prefetch(steps[step + 1])
            assert [bytes(data) for data in reader.read_many(rows)] == [truth[row] for row in rows]
            came += rows.tolist()
    return sorted(came)


# --- reads from the source by all nodes -----------------------------------------------------------------------------
def test_caches_of_a_part_each_read_the_source_once(
    cluster: Any, truth: list[bytes], certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a global shuffle, over all nodes and epochs, including the first; over TLS."""
    monkeypatch.setenv("PACKER_HTTP_ROOT_CERTIFICATE", str(certificates / "ca.pem"))
    made = cluster(3, certificate=certificates / "good.pem")
    assert made.shared[0].url.startswith("https://127.0.0.1:")
    for number in range(2):
        assert epoch(made, Shuffled(len(truth), seed=7), number, truth) == list(range(len(truth)))
        assert made.source_reads == Counter(range(len(truth)))
    for node, reader in enumerate(made.readers):
        part = NodeLocal(len(truth), 3).local_part(node)
        assert set(made.counted[node].reads) == set(part), "a sample was read by a node other than its owner"
        stats = reader.store.stats()
        assert stats.own + stats.near > 0 == stats.far == stats.failures and stats.left_out == ()
    assert sum(reader.store.stats().near for reader in made.readers) > len(truth)


@pytest.mark.parametrize(("nodes", "overlap"), [(2, False), (4, True)])
def test_staged_parts_read_the_source_once(
    cluster: Any, source: Path, truth: list[bytes], nodes: int, overlap: bool
) -> None:
    """All epochs of a node-local order, with exchanges; without overlap shards are staged once, otherwise except at
    boundaries."""
    made, copies = cluster(nodes, "staged", overlap=overlap)
    order = NodeLocal(len(truth), nodes, exchange_every=2, seed=3)
    for number in range(4):
        assert epoch(made, order, number, truth) == list(range(len(truth)))
    assert made.source_reads == Counter()
    times = Counter(path.name for copy in copies for path in copy.glob("train-*.tar"))
    assert set(times) == {path.name for path in source.glob("train-*.tar")}
    assert max(times.values()) == (2 if overlap and len(truth) // nodes % 4 else 1)
    for reader in made.readers:
        stats = reader.store.stats()
        assert stats.near > 0 == stats.far and stats.own + stats.near == 4 * len(truth) // nodes


def test_local_samples_are_not_requested_from_other_nodes(
    cluster: Any, truth: list[bytes], tmp_path: Path, source: Path
) -> None:
    """With a copy of the whole set, and with a cache above the shared reader."""
    made, _ = cluster(2, "staged", overlap=True)
    with readers.stage(source, tmp_path / "whole", any_filesystem=True) as local:
        whole = readers.open(local, "train", fallback=source)
        with readers.share(whole, tmp_path / "job", node=0, nodes=2, **_LOCAL) as reader:
            assert list(map(bytes, reader.read_many(range(len(truth))))) == truth
            assert reader.store.stats().near == 0 and reader.store.stats().own == len(truth)
            reader.close()
    (tmp_path / "above").mkdir()
    with readers.cached(made.readers[0], 1.0, directory=tmp_path / "above") as above:
        for _ in range(2):
            assert list(map(bytes, above.read_many(range(len(truth))))) == truth
        near = made.readers[0].store.stats().near
        assert 0 < near < len(truth) and above.stats().hits == len(truth)
    assert made.source_reads == Counter()


# --- nodes that fail ------------------------------------------------------------------------------------------------
class Wrong:
    """The ranges of another node, with other bytes of the same length; or an error instead."""

    def __init__(self, ranges: Any, how: str) -> None:
        self.ranges, self.how = ranges, how

    def size(self, name: str) -> int | None:
        size: int | None = self.ranges.size(name)
        return size

    def read(self, name: str, start: int, stop: int) -> Any:
        pieces = [bytes(piece) for piece in self.ranges.read(name, start, stop)]
        if self.how == "nothing":
            raise OSError("a disk that fails")
        if self.how == "short":
            return [pieces[0][1:]]
        return [bytes([pieces[0][0] ^ 1]) + pieces[0][1:], *pieces[1:]] if self.how == "a bit" else pieces

    def close(self) -> None:
        """The node itself closes its ranges."""


@pytest.fixture
def fail(tmp_path: Path) -> Iterator[Callable[[Cluster, int, str], None]]:
    """Makes a node of a cluster fail in the chosen way."""
    with ExitStack() as stack:

        def fail(made: Cluster, node: int, how: str) -> None:
            server, meeting = made.servers[node], next((tmp_path / "job").iterdir())
            served, ranges, url = server.settings, PayloadRanges(made.own[node]), ""
            if how == "gone":
                server.close()
                return
            if how == "hangs":
                listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
                url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            elif how == "nowhere":
                (meeting / str(node)).unlink()
                return
            else:
                served = replace(served, prefix="0-0-0") if how == "another set" else served
                other = stack.enter_context(Server(Wrong(ranges, how), replace(served, port=0)))
                url = f"http://127.0.0.1:{other.port}"
            Rendezvous(meeting, made.nodes).publish(node, url)

        yield fail


HOW = (
    "gone", "hangs", "nowhere", "nothing", "short", "a bit", "another set",
)  # fmt: skip


@pytest.mark.parametrize("how", HOW)
def test_a_node_that_fails_costs_no_sample(cluster: Any, fail: Any, truth: list[bytes], how: str, hanging: Any) -> None:
    made = cluster(3, timeout_seconds=0.2)
    fail(made, 2, how)

    def work() -> None:
        with pytest.warns(UserWarning, match=r"node 2 is not asked for .* read from the source") as warned:
            for _ in range(3):
                assert [bytes(data) for data in made.readers[0].read_many(range(len(truth)))] == truth
        assert len(warned) == 1, "not one warning"

    hanging(work)
    stats = made.readers[0].store.stats()
    assert stats.left_out == (2,) and stats.far == len(truth), "a third of the samples, three times"
    assert made.readers[1].store.stats().failures == 0, "another process knows of the failure"


def test_a_restarted_node_is_asked_again(cluster: Any, truth: list[bytes], hanging: Any) -> None:
    """At another port, with the samples in its cache."""
    made = cluster(2, timeout_seconds=0.05)
    reader, part = made.readers[0], list(NodeLocal(len(truth), 2).local_part(1))
    made.readers[1].read_many(part)
    made.shared[1].close()
    with pytest.warns(UserWarning, match="node 1 is not asked"):
        reader.read_many(part)
    assert reader.store.stats().left_out == (1,)
    made.servers[1] = made.shared[1].serve(Server)
    made.own[1].prefill()
    before = list(made.counted[1].reads)

    def until_it_answers() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # no second warning
            while not reader.store.stats().near:
                assert [bytes(data) for data in reader.read_many(part)] == [truth[row] for row in part]

    hanging(until_it_answers)
    assert reader.store.stats().left_out == () and made.counted[1].reads == before


@pytest.mark.parametrize("trials", [5, pytest.param(200, marks=pytest.mark.faults)])
def test_nodes_killed_at_random_lose_no_sample(cluster: Any, truth: list[bytes], trials: int) -> None:
    rng = random.Random(1)
    made = cluster(3, timeout_seconds=0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(trials):
            victim = rng.randrange(3)
            timer = threading.Timer(rng.uniform(0, 0.05), made.shared[victim].close)
            timer.start()
            assert epoch(made, Shuffled(len(truth), seed=1), number, truth) == list(range(len(truth)))
            timer.join()
            made.shared[victim].serve(Server)


def test_threads_of_a_loader_count_one_failure(cluster: Any, fail: Any, truth: list[bytes], hanging: Any) -> None:
    made = cluster(2, timeout_seconds=0.2)
    fail(made, 1, "hangs")

    def work() -> None:
        def read(seed: int) -> None:
            rows = random.Random(seed).choices(range(len(truth)), k=20)
            assert [bytes(data) for data in made.readers[0].read_many(rows)] == [truth[row] for row in rows]

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with pytest.warns(UserWarning, match="node 1 is not asked") as warned:
        hanging(work)
    assert len(warned) == 1 and made.readers[0].store.stats().failures == 1


# --- other jobs and missing nodes -----------------------------------------------------------------------------------
def test_jobs_in_one_folder_do_not_mix(
    source: Path, tmp_path: Path, truth: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for job in ("1", "2"):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        plain = readers.open(source, "train")
        made.append(readers.share(plain, tmp_path, node=int(job) - 1, nodes=2, **_LOCAL))
        made[-1].serve(Server)
    with pytest.warns(UserWarning, match=r"1 node \(0\) of 2 have not published their address"), made[1] as reader:
        with pytest.warns(UserWarning, match="node 0 is not asked .* it has not published its address"):
            assert list(map(bytes, reader.read_many(range(len(truth))))) == truth
        assert reader.store.stats().near == 0
    made[0].close()
    assert len(list(tmp_path.iterdir())) == 2 and [path.name for path in tmp_path.glob("*/[0-9]*")] == []


def test_a_single_node_shares_no_samples(source: Path, tmp_path: Path) -> None:
    with readers.open(source, "train") as plain, readers.share(plain, tmp_path / "job", node=0, nodes=1) as reader:
        assert reader is plain and not (tmp_path / "job").exists()


@pytest.mark.parametrize(
    ("reader", "options", "message"),
    [
        (lambda r, p: r.select(indices=[1, 2]), {}, "select from the shared reader"),
        (lambda r, p: readers.cached(r, 1.0, "recoded:16@90", directory=p), {}, "share the reader below it"),
        (lambda r, p: readers.open_folder(p / "tree"), {}, "has no checksums"),
        (lambda r, p: r, {"node": 1}, "both node and nodes or neither"),
        (lambda r, p: r, {"node": 2, "nodes": 2}, "node 2 is outside the 2 nodes"),
        (lambda r, p: r, {"timeout_seconds": 0}, "timeout_seconds is above 0"),
        (lambda r, p: r, {"wait_seconds": float("nan")}, "wait_seconds from 0"),
        (lambda r, p: r, {"key": "key.pem"}, "give both"),
    ],
)
def test_readers_that_cannot_be_shared(
    source: Path, jpeg: Any, tmp_path: Path, reader: Any, options: dict[str, Any], message: str
) -> None:
    tree_of(tmp_path / "tree", {"a/1.jpg": jpeg(1), "b/2.jpg": jpeg(2)})
    with (
        readers.open(source, "train") as plain,
        reader(plain, tmp_path) as other,
        pytest.raises(ValueError, match=message),
    ):
        readers.share(other, tmp_path / "job", **options)


def test_an_unsafe_token_or_folder_starts_no_server(source: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("0" * 64)
    (tmp_path / "token").chmod(0o644)
    options = {"node": 0, "nodes": 2, "host": "127.0.0.1", "serve": True}
    with readers.open(source, "train") as plain:
        with pytest.raises(ServingError, match="others may read or change this token"):
            readers.share(plain, tmp_path / "job", token=tmp_path / "token", **options).__enter__()
        with pytest.raises(ServingError, match="cannot listen there"):
            readers.share(plain, tmp_path / "job", **{**options, "host": "198.51.100.1"}).__enter__()
    assert [path.name for path in (tmp_path / "job").glob("*/[0-9]*")] == []


# --- the ranges of a node -------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def fields(tmp_path_factory: pytest.TempPathFactory, jpeg_of: Any = None) -> Path:
    """Two fields, one in separate shards that not all samples have, in an order other than that of the shards."""
    root = tmp_path_factory.mktemp("fields")
    pack_tree(root / "set", "hdf5", {"train": {"cat": 12, "dog": 9}}, samples_per_shard=5)
    keys = packer.table(root / "set").keys("train")
    notes = {f"{key}.txt": f"a note on {key}".encode() for i, key in enumerate(keys) if i % 3}
    packer.add_field(
        root / "set", tree_of(root / "notes", notes), "note", shards=packer.Shards(size=150), run=packer.Run(workers=1)
    )
    packer.drop(root / "set", where="width == 48")
    return root / "set"


def test_every_payload_is_a_range(fields: Path) -> None:
    """As a whole, in parts, and with its neighbours; bytes outside payloads are not served."""
    with readers.open(fields, "train") as reader:
        ranges = PayloadRanges(reader)
        sizes = reader.table.columns.shard_bytes
        covered = {number: np.zeros(size, np.bool_) for number, size in enumerate(sizes)}
        whole = {}
        for field in reader.fields:
            for i in range(len(reader)):
                if not reader.has(i, field):
                    continue
                (_, shard, offset, length) = (int(c[0]) for c in reader.table.extents([i], field))
                data = bytes(reader.read(i, field))
                covered[shard][offset : offset + length] = True
                whole.setdefault(shard, {})[offset] = data
                assert b"".join(ranges.read(str(shard), offset, offset + length)) == data
                assert b"".join(ranges.read(str(shard), offset + 1, offset + length - 1)) == data[1:-1]
        runs = 0
        for shard, payloads in whole.items():
            assert ranges.size(str(shard)) == sizes[shard]
            for offset, data in payloads.items():
                if (after := payloads.get(offset + len(data))) is not None:
                    runs += 1
                    stop = offset + len(data) + len(after)
                    assert b"".join(ranges.read(str(shard), offset + 2, stop - 3)) == (data + after)[2:-3]
            (gaps,) = np.nonzero(~covered[shard])
            for at in (0, *gaps[:: max(1, len(gaps) // 50)].tolist()):
                with pytest.raises(ServingError, match=f"no payload covers byte {at}"):
                    ranges.read(str(shard), at, at + 1)
        assert runs > 5
        for name in ("", "-1", "00", "1e1", "x", str(len(sizes)), "9" * 9, "../0"):
            assert ranges.size(name) is None


def test_fields_of_samples_come_from_other_nodes(fields: Path, tmp_path: Path) -> None:
    plain = [readers.open(fields, "train") for _ in range(2)]
    made = Cluster(tmp_path, plain, [])
    try:
        for i, sample in enumerate(plain[0]):
            received = made.readers[1].sample(i)
            assert {name: bytes(data) for name, data in received.fields.items()} == {
                name: bytes(data) for name, data in sample.fields.items()
            }
        assert made.readers[1].store.stats().near > 0 == made.readers[1].store.stats().far
    finally:
        made.close()


ROOT = Path(__file__).resolve().parents[1]


def gets(web: Proxy) -> Counter[str]:
    return Counter(line for line in web.gets(r"\.tar") if "bytes=" in line)


def children() -> set[int]:
    """The child processes of this one."""
    pids: set[int] = set()
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended
            pids.update(map(int, (thread / "children").read_text().split()))
    return pids


@pytest.mark.parametrize("kills", [1, pytest.param(4, marks=pytest.mark.faults)])
def test_killed_server_processes_are_restarted(web: Proxy, packed: Path, tmp_path: Path, kills: int) -> None:
    """All nodes together read the source once in all epochs; after the servers were killed, also the samples of their
    caches, until the servers were restarted."""
    with ExitStack() as stack:
        local = stack.enter_context(readers.open(packed, "train"))
        truth, own = [bytes(local.read(row)) for row in range(len(local))], []
        for node in range(2):
            (tmp_path / f"memory-{node}").mkdir()
            plain = stack.enter_context(readers.open(f"{web.url}/{packed.name}", "train"))
            kept = readers.cached(plain, 1.0, partition=(node, 2), directory=tmp_path / f"memory-{node}")
            own.append(stack.enter_context(kept))
        before = children()
        with pytest.warns(UserWarning, match="have not published their address"):  # the first node meets no other
            made = Cluster(tmp_path, own, [], serve=True, timeout_seconds=0.5)
        stack.callback(made.close)
        counts = lambda: [(stats.near, stats.far) for stats in (reader.store.stats() for reader in made.readers)]  # noqa: E731
        number = 0

        def read_epoch() -> None:
            nonlocal number
            assert epoch(made, Shuffled(len(truth), seed=5), number, truth, 1) == list(range(len(truth)))
            number += 1
            assert sum(gets(web).values()) == len(truth) + sum(far for _, far in counts())

        for _ in range(2):
            read_epoch()
        assert set(gets(web).values()) == {1} and sum(near for near, _ in counts()) >= len(truth) // 2
        with pytest.warns(UserWarning) as warned:
            for _ in range(kills):
                for server in children() - before:
                    os.kill(server, signal.SIGKILL)
                near = counts()
                read_epoch()
                assert all(far > 0 for _, far in counts())
                until = time.monotonic() + 300
                while any(now[0] == then[0] for now, then in zip(counts(), near, strict=True)):
                    assert time.monotonic() < until
                    read_epoch()
        texts = [str(warning.message) for warning in warned]
        for node in range(2):
            assert any(f"node {node} is not asked" in text for text in texts)
            started = f"the server process of node {node} has ended: it was started again"
            assert sum(started in text for text in texts) == kills
    assert [path.name for path in tmp_path.glob("job/*/*")] == ["token"]
    assert [*tmp_path.glob("memory-*/*")] == [], "a cache is left"


def test_serve_in_the_foreground(source: Path, tmp_path: Path) -> None:
    """Until SIGTERM, or as long as a command runs; then its address is removed, and it prints what it has served."""
    (tmp_path / "memory").mkdir()
    command = [sys.executable, "-m", "packer", "serve", str(source), str(tmp_path / "job"), "--part", "0/2"]
    command += ["--host", "127.0.0.1", "--cache", "100%", "--json"]
    with ExitStack() as stack:
        plain = stack.enter_context(readers.open(source, "train"))
        served = stack.enter_context(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        )
        assert served.stdout is not None and served.stderr is not None
        served_at = json.loads("".join(iter(served.stdout.readline, "}\n")) + "}")
        assert served_at["node"] == 0 and served_at["nodes"] == 2 and served_at["url"].startswith("http://127.0.0.1:")
        shared = readers.share(plain, tmp_path / "job", node=1, nodes=2, host="127.0.0.1")
        reader = stack.enter_context(shared)
        part = NodeLocal(len(plain), 2).local_part(0)
        for row in part:
            assert bytes(reader.read(row)) == bytes(plain.read(row))
        assert reader.store.stats().near == len(part)
        reader.close()
        served.send_signal(signal.SIGTERM)
        assert served.wait(300) == 0
        assert f"served {len(part)} ranges" in served.stderr.read()
    assert [path.name for path in (tmp_path / "job").glob("*/*")] == ["token"]


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--part", "0/2", "--host", "127.0.0.1", "--", "sh", "-c", "exit 3"], 3, "served 0 ranges"),
        (["--part", "0/2", "--host", "198.51.100.1"], 1, "198.51.100.1, port 0: cannot listen there"),
        (["--part", "2/2"], 2, "neither I/N"),
    ],
)
def test_serve_ends_with_a_status(source: Path, tmp_path: Path, options: list[str], status: int, message: str) -> None:
    done = run_packer("serve", source, tmp_path / "job", *options)
    assert done.returncode == status and message in done.stderr and "Traceback" not in done.stderr, done.stderr


class Answers(Store):
    """The row as bytes, or an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.gate: threading.Event | None = None
        self.asked = threading.Event()

    def read_one(self, row: int, shard: int, offset: int, length: int) -> bytes:
        self.asked.set()
        if self.gate is not None:
            assert self.gate.wait(300)
        if self.error is not None:
            raise self.error
        return b"%d" % row


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """`now` is the time that the store sees."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("cache.stores.copied.time", SimpleNamespace(monotonic=lambda: clock.now))
    yield clock


def rows(*numbers: int) -> Extents:
    column = np.array(numbers, np.int64)
    return Extents(column, column * 0, column, column * 0 + 2)


def neighbours(connect: Callable[[int], Store | None], nodes: int = 2) -> Any:
    """Node 0, with ten rows, and other nodes with ten rows each."""
    return Neighbours(Answers(), 0, RowOwners(np.arange(nodes + 1) * 10), connect, pause_seconds=5.0)


@pytest.mark.parametrize("error", [SlowError("slow"), DamagedSampleError("wrong"), ConnectionError("gone"), None])
def test_pauses_double_and_the_warning_comes_once(clock: Any, error: Exception | None) -> None:
    connected: list[float] = []

    def connect(node: int) -> Store | None:
        connected.append(clock.now - 100)
        return Answers(error) if error is not None else None

    store = neighbours(connect)
    with pytest.warns(UserWarning, match="node 1 is not asked for 5 s, .* read from the source: ") as warned:
        for _ in range(4000):
            store.prefetch(rows(12, 3))
            assert store.read(rows(11, 5)) == [b"11", b"5"] and store.stats().left_out == (1,)
            clock.now += 0.125
    assert connected == [0, 5, 15, 35, 75, 155, 235, 315, 395, 475]
    assert len(warned) == 1 and store.stats().failures == len(connected)
    assert (store.stats().own, store.stats().near, store.stats().far) == (4000, 0, 4000)


def test_one_reader_asks_a_node_that_has_failed(clock: Any) -> None:
    """The others read the source until the node has answered; then all ask it, and its next failure counts as a first
    one."""
    answers: list[Answers] = [Answers(SlowError("slow"))]
    store = neighbours(lambda node: answers[-1])
    with pytest.warns(UserWarning, match="not asked for 5 s"):
        store.read_one(11, 0, 0, 2)
    answers.append(Answers())
    answers[-1].gate = threading.Event()
    clock.now += 5
    trial = threading.Thread(target=store.read_one, args=(12, 0, 0, 2))
    trial.start()
    assert answers[-1].asked.wait(300)
    assert store.read_one(13, 0, 0, 2) == b"13" and store.stats().far == 2, "the node was asked during the trial"
    answers[-1].gate.set()
    trial.join()
    assert store.read_one(14, 0, 0, 2) == b"14" and store.stats().near == 2 and store.stats().left_out == ()
    answers[-1].error = SlowError("slow again")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.read_one(15, 0, 0, 2)
        clock.now += 4.9
        store.read_one(15, 0, 0, 2)
        assert store.stats().far == 4 and store.stats().failures == 2
        answers.append(Answers())
        clock.now += 0.1
        store.read_one(15, 0, 0, 2)
    assert store.stats().near == 3


def test_many_failing_nodes_cause_few_warnings(clock: Any) -> None:
    store = neighbours(lambda node: None, nodes=100)
    with pytest.warns(UserWarning, match="is not asked") as warned:
        assert store.read(rows(*range(0, 1000, 7))) == [b"%d" % row for row in range(0, 1000, 7)]
    assert len(warned) == 8 and len(store.stats().left_out) == 99


def test_errors_of_this_node_are_raised(clock: Any) -> None:
    store = neighbours(lambda node: Answers())
    store.source.error = DamagedSampleError("here")
    with pytest.raises(DamagedSampleError, match="here"):
        store.read(rows(1, 11))
    assert store.read(rows(11)) == [b"11"] and store.stats().failures == 0
