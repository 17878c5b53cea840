"""Nodes as processes, each with directories and a server process of its own; the source is a web server that counts."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from remote_servers import Proxy
from suites.programs import run_packer

import readers
from readers.order import NodeLocal

ROOT = Path(__file__).resolve().parents[1]
_NODE = """
import hashlib, json, sys, warnings
import readers
from readers.order import Shuffled
from readers.order.schedule import make_schedule

warnings.simplefilter("always")
warnings.showwarning = lambda message, *where: print("warned", str(message).partition(":")[0], file=sys.stderr)
url, folder, place, node = *sys.argv[1:4], int(sys.argv[4])
with readers.open(url, "train") as plain:
    order = Shuffled(len(plain), seed=5)
    with (
        readers.cached(plain, 1.0, partition=(node, 2), directory=place) as kept,
        readers.share(kept, folder, node=node, nodes=2, host="127.0.0.1", timeout_seconds=0.5) as reader,
    ):
        print("ready", flush=True)
        for epoch in map(int, sys.stdin):
            schedule = make_schedule(order, epoch, 4, node, 2, "exact")
            rows = [int(i) for step in range(schedule.steps()) for i in order.indices(epoch, schedule.positions(step))]
            digests = {row: hashlib.sha256(reader.read(row)).hexdigest() for row in rows}
            stats = reader.store.stats()
            print(json.dumps({"digests": digests, "near": stats.near, "far": stats.far}), flush=True)
"""


class Node:
    """A process that reads its share of each epoch that it is given."""

    def __init__(self, url: str, tmp_path: Path, number: int) -> None:
        self.kills, place = 0, tmp_path / f"node-{number}"
        (place / "memory").mkdir(parents=True)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PACKER_CACHE_DIR": str(place / "indexes")}
        arguments = [url, tmp_path / "job", place / "memory", number]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _NODE, *map(str, arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def read(self, epoch: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{epoch}\n")
        self.process.stdin.flush()

    def said(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return line.strip() if line == "ready\n" else json.loads(line)

    @property
    def server(self) -> int:
        """The process of its server; 0 where there is none now."""
        found = [
            int(child)
            for thread in Path(f"/proc/{self.process.pid}/task").iterdir()
            for child in (thread / "children").read_text().split()
        ]
        return found[0] if found else 0

    def kill_server(self) -> None:
        if server := self.server:
            os.kill(server, signal.SIGKILL)
            self.kills += 1

    def end(self) -> tuple[int, str]:
        """Its status, and what it has said on stderr."""
        _, said = self.process.communicate(timeout=300)
        return self.process.returncode, said


@pytest.fixture
def nodes(web: Proxy, packed: Path, tmp_path: Path) -> Iterator[list[Node]]:
    made = [Node(f"{web.url}/{packed.name}", tmp_path, number) for number in range(2)]
    yield made
    for node in made:
        node.process.kill()
        node.process.communicate()


def gets(web: Proxy) -> Counter[str]:
    return Counter(line for line in web.gets(r"\.tar") if "bytes=" in line)


def read_epoch(nodes: list[Node], epoch: int, truth: dict[str, str]) -> list[dict[str, Any]]:
    """What each node said of an epoch, in which every sample came once, on one of the nodes."""
    for node in nodes:
        node.read(epoch)
    said = [node.said() for node in nodes]
    assert said[0]["digests"] | said[1]["digests"] == truth
    assert len(said[0]["digests"]) + len(said[1]["digests"]) == len(truth)
    return said


@pytest.fixture
def truth(packed: Path) -> dict[str, str]:
    with readers.open(packed, "train") as local:
        return {str(row): hashlib.sha256(local.read(row)).hexdigest() for row in range(len(local))}


def test_two_nodes_read_the_source_once(nodes: list[Node], web: Proxy, truth: dict[str, str], tmp_path: Path) -> None:
    """In the first epoch, and not at all in the second; after one server was killed, what that would have given, until
    it was started again."""
    assert [node.said() for node in nodes] == ["ready", "ready"]
    for epoch in range(2):
        said = read_epoch(nodes, epoch, truth)
        assert len(gets(web)) == len(truth) and set(gets(web).values()) == {1}
        assert sum(one["near"] for one in said) >= len(truth) // 4 and [one["far"] for one in said] == [0, 0]
    os.kill(nodes[1].server, signal.SIGKILL)
    first = read_epoch(nodes, 2, truth)
    assert first[0]["far"] > 0 == first[1]["far"], "the first asks the second, whose server is gone"
    assert sum(gets(web).values()) == len(truth) + first[0]["far"]
    until, epoch = time.monotonic() + 300, 3
    while (said := read_epoch(nodes, epoch, truth))[0]["near"] == first[0]["near"]:
        assert time.monotonic() < until
        epoch += 1
    assert said[0]["far"] + len(truth) == sum(gets(web).values())
    (status, ours), (other, its) = (node.end() for node in nodes)
    assert (status, other) == (0, 0)
    assert ours.count("warned") == 1 and "node 1 is left out" in ours
    assert its.count("warned") == 1 and "the process that serves node 1 had ended" in its
    assert [path.name for path in tmp_path.glob("job/*/*")] == ["token"]
    assert [*tmp_path.glob("node-*/memory/*")] == [], "no cache stays"


@pytest.mark.faults
def test_servers_killed_at_random(nodes: list[Node], truth: dict[str, str]) -> None:
    rng, epoch, until = random.Random(1), 0, time.monotonic() + 300
    assert [node.said() for node in nodes] == ["ready", "ready"]
    while sum(node.kills for node in nodes) < 6:
        assert time.monotonic() < until
        timer = threading.Timer(rng.uniform(0, 0.2), nodes[rng.randrange(2)].kill_server)
        timer.start()
        said = read_epoch(nodes, epoch, truth)
        timer.join()
        epoch += 1
    counts = {name: sum(one[name] for one in said) for name in ("near", "far")}
    print(f"\n6 servers of 2 nodes killed in {epoch} epochs, no sample lost; reads of the other and instead: {counts}")
    assert [node.end()[0] for node in nodes] == [0, 0]


def test_serve_in_the_foreground(source: Path, tmp_path: Path) -> None:
    """Until SIGTERM, or as long as a command runs; then its address is gone, and it says what it has served."""
    (tmp_path / "memory").mkdir()
    command = [sys.executable, "-m", "packer", "serve", str(source), str(tmp_path / "job"), "--part", "0/2"]
    command += ["--host", "127.0.0.1", "--cache", "100%", "--json"]
    with ExitStack() as stack:
        plain = stack.enter_context(readers.open(source, "train"))
        served = stack.enter_context(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        )
        assert served.stdout is not None and served.stderr is not None
        said = json.loads("".join(iter(served.stdout.readline, "}\n")) + "}")
        assert said["node"] == 0 and said["nodes"] == 2 and said["url"].startswith("http://127.0.0.1:")
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
        (["--part", "0/2", "--cache", "much"], 2, "much"),
    ],
)
def test_serve_ends_with_a_status(source: Path, tmp_path: Path, options: list[str], status: int, message: str) -> None:
    done = run_packer("serve", source, tmp_path / "job", *options)
    assert done.returncode == status and message in done.stderr and "Traceback" not in done.stderr, done.stderr
