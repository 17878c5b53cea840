"""A Slurm cluster of two nodes in a test; see two_nodes.py."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from two_nodes import Cluster, missing

__all__ = ["ROOT", "running"]

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def running(proctrack: str) -> Iterator[Cluster]:
    """The cluster, with the examples of this repository in the folder where jobs run."""
    lacks = missing()
    if lacks:
        pytest.skip(lacks)
    folder = Path(tempfile.mkdtemp(prefix="packer-slurm-"))
    try:
        with Cluster(folder, proctrack) as cluster:
            (cluster.work / "examples").symlink_to(ROOT / "examples")
            yield cluster
    finally:
        shutil.rmtree(folder)
