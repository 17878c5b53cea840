"""Several nodes on one machine, and several jobs on one node.

A node is a mount namespace with a tmpfs of its own at the same path, and no network; its ranks have Slurm's variables.
Where the kernel allows no namespaces to this user, that test is skipped.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from suites.staging import DEADLINE, SCRIPT, SLOWLY, assert_whole, copy_of, leader_of, result, size_of, start, wait_for

import packer
import readers
from readers.staging import StageOptions, set_files

NODES, RANKS = 3, 2
# Ranks of one node, started in its namespace; prints what they staged and read, and the shards on the node, as JSON.
NODE = """
import json, os, subprocess, sys
node, nodes, ranks, script, source, to, options = json.loads(sys.argv[1])
processes = []
for local in range(ranks):
    slurm = {"JOB_ID": 7, "STEP_ID": 0, "PROCID": node * ranks + local, "NTASKS": nodes * ranks, "LOCALID": local,
             "NODEID": node, "NNODES": nodes, "TASKS_PER_NODE": f"{ranks}(x{nodes})", "TMPDIR": to}
    env = {**os.environ, **{f"SLURM_{name}": str(value) for name, value in slurm.items()}}
    command = [sys.executable, "-c", script, source, "$SLURM_TMPDIR", options]
    processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True))
said = [process.communicate(timeout=300)[0].splitlines() for process in processes]
staged = [json.loads(lines[0]) for lines in said]
shards = sorted(name for name in os.listdir(staged[0]["path"]) if name.endswith(".tar"))
whole = {name: os.path.getsize(os.path.join(staged[0]["path"], name)) for name in shards}
print(json.dumps({"staged": staged, "read": [json.loads(lines[1]) for lines in said], "shards": whole}))
"""


def in_namespace(command: list[str], place: Path) -> list[str]:
    """A command with a tmpfs of its own at `place`, in user, mount and network namespaces of its own."""
    script = 'mount -t tmpfs -o size=20m tmpfs "$0" && exec "$@"'
    return ["unshare", "--user", "--map-root-user", "--mount", "--net", "sh", "-c", script, str(place), *command]


@pytest.fixture(scope="module")
def namespaces(tmp_path_factory: pytest.TempPathFactory) -> None:
    try:
        command = in_namespace(["true"], tmp_path_factory.mktemp("probe"))
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    except FileNotFoundError:
        pytest.skip("unshare (util-linux) is not installed")
    if done.returncode:
        pytest.skip(f"no namespaces for this user: {done.stderr.strip()}")


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("part", [None, "node"])
def test_each_node_stages_once(source: Path, tmp_path: Path, part: str | None) -> None:
    options = json.dumps({"part": part, "bytes_per_second": 4 * SLOWLY})
    nodes = []
    for node in range(NODES):
        given = json.dumps([node, NODES, RANKS, SCRIPT, str(source), str(tmp_path), options])
        command = in_namespace([sys.executable, "-c", NODE, given], tmp_path)
        nodes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    said: list[dict[str, Any]] = []
    for process in nodes:
        out, errors = process.communicate(timeout=2 * DEADLINE)
        assert process.returncode == 0, errors
        said.append(json.loads(out))
    files = set_files(source)
    for node, one in enumerate(said):
        options = StageOptions(part=(node, NODES) if part else None)
        expected = {file.path: file.bytes for file in files.shards(options)}
        assert one["shards"] == expected
        assert sorted(rank["copied"] > 0 for rank in one["staged"]) == [False] * (RANKS - 1) + [True]
        moved = sum(rank["copied_bytes"] for rank in one["staged"])
        assert moved == sum(expected.values()) + sum(f.bytes for f in [*files.index(options), files.head])
        assert one["read"] == [said[0]["read"][0]] * RANKS and len(one["read"][0]) == 36
    assert len({rank["path"] for one in said for rank in one["staged"]}) == 1
    assert list(tmp_path.iterdir()) == []  # it was only in their namespaces


def test_two_jobs_stage_one_set_at_once(source: Path, tmp_path: Path) -> None:
    """With other options and other ends: bytes move once, and cleaning up leaves what the other job uses."""
    two = start(source, tmp_path, {"SLURM_JOB_ID": "2"}, cleanup="atexit", bytes_per_second=SLOWLY, linger=DEADLINE)
    wait_for(lambda: leader_of(tmp_path), "the one that copies")
    one = start(source, tmp_path, {"SLURM_JOB_ID": "1"}, cleanup="atexit", splits=["train"], bytes_per_second=SLOWLY)
    first = result(one)
    wait_for(lambda: all(copy.bytes == copy.wanted_bytes for copy in packer.staged_copies(tmp_path)), "the other job")
    local = Path(first["path"])
    wait_for((local / "dataset.json").exists, "the end of its copying")
    assert_whole(local, source)
    assert [copy.in_use for copy in packer.staged_copies(tmp_path)] == [True]
    two.terminate()  # a job that is killed cleans nothing up, and loses nothing
    out, _ = two.communicate(timeout=DEADLINE)
    second = json.loads(out.splitlines()[0])
    assert second["path"] == first["path"]
    assert first["copied_bytes"] + second["copied_bytes"] == size_of(source)
    with readers.stage(source, tmp_path, cleanup="atexit") as again:
        assert_whole(again, source)
    assert copy_of(tmp_path) is None
