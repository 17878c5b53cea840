"""Millions of files: listed and planned, and converted by four tasks. For `make test-cluster ENTRIES=10000000`."""

from __future__ import annotations

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cluster_report import Trial
from suites.programs import run_packer, run_python

import readers

pytestmark = pytest.mark.cluster

ENTRIES = int(os.environ.get("ENTRIES") or 0)
ROOT = Path(__file__).parents[2]
TASKS = 4
SECONDS = 6 * 3600


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not ENTRIES:
        pytest.skip("only with ENTRIES=10000000, which takes an hour and 15 GB")
    return tmp_path_factory.mktemp("scale")


def test_listed_and_planned_in_1_gb_and_5_minutes(work: Path, trial: Trial) -> None:
    """Of ten million; of fewer in as much less, but 100 MB and 10 s at least."""
    with trial:
        out = work / "figures.json"
        options = ("--work", work, "--samples", ENTRIES, "--only", "plan", "--out", out)
        done = run_python(ROOT / "benchmarks" / "scale.py", *options, timeout=SECONDS)
        assert done.returncode == 0, done.stderr
        (found,) = json.loads(out.read_text())[-1]["results"]["plan"]
        assert found["own_mb"] + found["child_mb"] <= max(100, ENTRIES / 1e7 * 1000), found
        assert found["wall_s"] <= max(10, ENTRIES / 1e7 * 300), found


def test_converted_by_four_tasks(work: Path, trial: Trial) -> None:
    tree, out = work / f"tree-{ENTRIES}" / "tree", work / "set"
    options = ("--to", "tfrecord", "-o", out, "--workers", 1, "--samples-per-shard", max(1, -(-ENTRIES // 64)))

    def run(task: int) -> subprocess.CompletedProcess[str]:
        return run_packer("convert", tree, *options, "--task", f"{task}/{TASKS}", timeout=SECONDS)

    with trial:
        with ThreadPoolExecutor(TASKS) as pool:
            for done in pool.map(run, range(TASKS)):
                assert done.returncode == 0, done.stderr
        done = run_packer("commit", out, timeout=SECONDS)
        assert done.returncode == 0, done.stderr
        with readers.open(out, "train") as reader:
            assert len(reader) == ENTRIES
            assert bytes(reader.read(ENTRIES - 1)).startswith(b"\xff\xd8")
