"""The system's Open MPI and MPICH on two nodes: ranks, staging, and the shared cache. See nodes.py."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
from conversions import Conversion, kill, processes_of
from nodes import Nodes
from services import begin, end, need, wait
from test_shared_cache import RANKS as SHARED_CACHE

import readers
from packer.testing.samples import files_of

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
LIBRARIES = Path("/usr/lib/x86_64-linux-gnu")

# Each rank stages the set, which copies it once a node, and reads its share; rank 0 prints the results of all as JSON.
READ = """
import hashlib, json, os, sys
from mpi4py import MPI
import readers
from cache.launchers import launched
world, found = MPI.COMM_WORLD, launched(os.environ)
node = world.Split_type(MPI.COMM_TYPE_SHARED)
assert (found.rank, found.world_size, found.nodes) == (world.rank, world.size, int(sys.argv[3])), found
assert (found.local_rank, found.local_world_size) == (node.rank, node.size), found
with (staging := readers.stage(sys.argv[1], sys.argv[2], part="node" if sys.argv[4:] else None)) as local:
    with readers.open(local, "train", fallback=sys.argv[1]) as reader:
        read = {i: hashlib.sha256(reader.read(i)).hexdigest() for i in range(world.rank, len(reader), world.size)}
said = world.gather({"host": os.uname().nodename, "copied": staging.counts.copied, "read": read})
if world.rank == 0:
    print("FOUND", json.dumps([MPI.Get_library_version().split()[0], said]), flush=True)
"""


PYTHON = (sys.executable, "-m", "mpi4py")  # an error of one rank ends the whole job


@dataclass(frozen=True)
class Mpi:
    """How an MPI implementation starts ranks on nodes."""

    launch: tuple[str, ...]
    environ: dict[str, str]
    hosts: tuple[str, ...]

    def command(self, nodes: Nodes, ranks: int, *command: object) -> list[str]:
        """The command line that starts a command on `ranks` ranks, evenly on the nodes."""
        each = ranks // len(self.hosts)
        hosts = ",".join(f"{host}:{each}" for host in self.hosts)
        words = [word.format(agent=nodes.agent, hosts=hosts, ranks=ranks) for word in self.launch]
        return nodes["n1"].command(*words, *command)

    def run(self, nodes: Nodes, ranks: int, *command: object) -> str:
        done = subprocess.run(
            self.command(nodes, ranks, *command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, **self.environ},
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def start(self, nodes: Nodes, ranks: int, log: Path, *command: object) -> subprocess.Popen[bytes]:
        return begin(self.command(nodes, ranks, *command), log, environ=self.environ)


def _openmpi(folder: Path) -> Mpi:
    need("mpirun.openmpi", package="openmpi-bin libopenmpi-dev")
    launch = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "{ranks}", "--host", "{hosts}"]
    launch += ["--mca", "plm_rsh_agent", "{agent}", "--mca", "btl", "self,vader,tcp", "--mca", "btl_tcp_if_include"]
    launch += ["eth0", "--mca", "oob_tcp_if_include", "eth0", "--mca", "btl_vader_single_copy_mechanism", "none"]
    for name in ("MPI4PY_MPIABI", "MPI4PY_LIBMPI", "PYTHONPATH", "TMPDIR"):
        launch += ["-x", name]
    environ = {"MPI4PY_MPIABI": "openmpi", "MPI4PY_LIBMPI": str(LIBRARIES / "libmpi.so.40")}
    return Mpi(tuple(launch), environ, ("n1", "n2"))


def _mpich(folder: Path) -> Mpi:
    """On one node: Debian 12's MPICH 4.0.2 often never returns from MPI_Finalize of ranks on two of these nodes."""
    need("mpiexec.mpich", package="mpich")
    (folder / "libmpi.so.12").symlink_to(LIBRARIES / "libmpich.so.12")  # the library name that mpi4py's wheel looks for
    launch = ("mpiexec.mpich", "-launcher", "rsh", "-launcher-exec", "{agent}", "-hosts", "{hosts}", "-n", "{ranks}")
    return Mpi(launch, {"MPI4PY_MPIABI": "mpich", "LD_LIBRARY_PATH": str(folder)}, ("n1",))


KINDS = {"openmpi": _openmpi, "mpich": _mpich}


@pytest.fixture(scope="module", params=sorted(KINDS))
def mpi(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mpi:
    made = KINDS[request.param](tmp_path_factory.mktemp(request.param))
    return replace(made, environ={**made.environ, "PYTHONPATH": str(ROOT), "TMPDIR": "/tmp"})


@pytest.fixture(scope="module")
def nodes(mpi: Mpi, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with Nodes(tmp_path_factory.mktemp("nodes"), 2) as nodes:
        yield nodes


@pytest.mark.parametrize("part", [False, True])
def test_eight_ranks_stage_once_a_node_and_read(
    mpi: Mpi, nodes: Nodes, source: Path, tmp_path: Path, part: bool, request: pytest.FixtureRequest
) -> None:
    script = tmp_path / "read.py"
    script.write_text(READ)
    with readers.open(source, "train") as local:
        expected = {str(i): hashlib.sha256(local.read(i)).hexdigest() for i in range(len(local))}
    for number in range(3):
        target = nodes.local / f"{part}-{number}"
        for node in nodes:
            node.run("mkdir", target)
        out = mpi.run(nodes, 8, *PYTHON, script, source, target, len(mpi.hosts), *["part"] * part)
        library, reports = json.loads(next(line for line in out.splitlines() if line.startswith("FOUND"))[5:])
        assert library.startswith("Open") == ("openmpi" in request.node.name), "mpi4py has loaded another MPI"
        assert sorted(rank["host"] for rank in reports) == sorted(mpi.hosts * (8 // len(mpi.hosts)))
        assert {name: digest for rank in reports for name, digest in rank["read"].items()} == expected
        assert sum(len(rank["read"]) for rank in reports) == len(expected)
        copied = [[rank["copied"] for rank in reports if rank["host"] == host] for host in mpi.hosts]
        assert [sum(count > 0 for count in counts) for counts in copied] == [1] * len(mpi.hosts)
        assert part or len({max(counts) for counts in copied}) == 1, "the nodes hold different files"


def test_the_shared_cache_in_a_window_of_a_node(mpi: Mpi, nodes: Nodes, source: Path, tmp_path: Path) -> None:
    """Three ranks of each node, each with a child; each node has a separate window."""
    script = tmp_path / "ranks.py"
    script.write_text(SHARED_CACHE.replace("MPI.COMM_WORLD", "MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)"))
    for _ in range(3):
        out = mpi.run(nodes, 3 * len(mpi.hosts), *PYTHON, script, source)
        assert out.count("good") == 3 * len(mpi.hosts), out


@pytest.fixture(scope="module")
def conversion(tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    need()
    return Conversion(tmp_path_factory.mktemp("conversion"))


@pytest.mark.parametrize("ranks", [2, 4])
def test_convert_as_the_local_engine_does(
    mpi: Mpi, nodes: Nodes, conversion: Conversion, tmp_path: Path, ranks: int
) -> None:
    for number in range(2):
        mpi.run(nodes, ranks, *conversion.command(tmp_path / str(number), "--engine", "mpi"))
        assert files_of(tmp_path / str(number)) == conversion.files


def test_a_rank_that_is_killed_ends_the_job_and_the_same_command_continues(
    mpi: Mpi, nodes: Nodes, conversion: Conversion, tmp_path: Path
) -> None:
    """Any rank is killed, after a random number of shards."""
    draws = random.Random(0)
    for number in range(5):
        out = tmp_path / str(number)
        command = conversion.command(out, "--engine", "mpi")
        job = mpi.start(nodes, 4, tmp_path / f"{number}.log", *command)
        shards = draws.randrange(1, 40)
        wait(partial(_has_shards, conversion, out, shards, job), f"{shards} shards")
        ranks = [pid for pid in processes_of(*command[1:]) if _program(pid) == Path(sys.executable).resolve()]
        assert ranks, "the conversion was over before a rank was killed"
        kill(draws.choice(ranks))
        end(job)
        mpi.run(nodes, 4, *command)
        assert files_of(out) == conversion.files


def _has_shards(conversion: Conversion, out: Path, shards: int, job: subprocess.Popen[bytes]) -> bool:
    return job.poll() is not None or conversion.shards(out) >= shards


def _program(pid: int) -> Path | None:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/exe").readlink()
    return None
