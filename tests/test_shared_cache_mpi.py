"""The shared cache in an MPI window: the suite on one rank, and three ranks with children. Skipped without mpi4py."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from suites.shared_caches import CAPACITY, HAS_MPI, MPIEXEC, SLOTS, SharedCacheSuite

from cache import SharedByteCache
from cache.errors import CacheFullError

RANKS = """
import os
from mpi4py import MPI
from cache import SharedByteCache

world = MPI.COMM_WORLD
cache = SharedByteCache.open(fingerprint="f", kind="k", slots=30, capacity_bytes=100_000, backend="mpi", comm=world)
mine = range(world.rank, 30, world.size)
assert all(cache.put(slot, bytes([slot]) * 1000) for slot in mine if slot < 20)
world.Barrier()
assert all(cache.get(slot) == bytes([slot]) * 1000 for slot in range(20)), "bytes of the other ranks"
assert cache.stats().puts == 20 and cache.stats().users == world.size
world.Barrier()  # a child is one more user
child = os.fork()
if child == 0:
    ok = cache.get(0) is not None and all(cache.put(slot, b"of a child") for slot in mine if slot >= 20)
    os._exit(0 if ok else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
world.Barrier()
assert all(cache.get(slot) == b"of a child" for slot in range(20, 30))
try:
    SharedByteCache.open(fingerprint="f", kind=f"k{world.rank}", slots=30, capacity_bytes=1, backend="mpi")
except ValueError as error:
    assert "must open the same cache" in str(error)
else:
    raise AssertionError("ranks that disagree got a cache")
view = cache.get(0)
cache.close()
assert view == bytes(1000)
world.Barrier()
print("good", flush=True)
"""


@pytest.mark.skipif(not HAS_MPI, reason="mpi4py is not installed")
class TestMpi(SharedCacheSuite):
    def open(self, **options: Any) -> SharedByteCache:
        given = {"fingerprint": "set", "kind": "encoded", "slots": SLOTS, "capacity_bytes": CAPACITY}
        return SharedByteCache.open(**{**given, "backend": "mpi", **options})

    def test_it_cannot_be_pickled(self) -> None:
        with self.open() as cache, pytest.raises(TypeError, match="MPI window"):
            pickle.dumps(cache)

    def test_no_room(self) -> None:
        with pytest.raises(CacheFullError, match="no room for a window"):
            self.open(capacity_bytes=1 << 39)


@pytest.mark.skipif(not HAS_MPI or MPIEXEC is None, reason="mpi4py or mpiexec is not installed")
def test_three_ranks(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    command = [str(MPIEXEC), "-n", "3", sys.executable, str(script)]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environ)
    assert done.returncode == 0 and done.stdout.count("good") == 3, done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == [script], "the lock's file has no name any more"


@pytest.mark.skipif(HAS_MPI, reason="mpi4py is installed")
def test_without_mpi4py() -> None:
    with pytest.raises(ImportError, match="pip install 'packer"):
        SharedByteCache.open(fingerprint="f", kind="k", slots=1, capacity_bytes=1, backend="mpi")
