"""What a process may still take of memory: page cache is room, a tmpfs is not. Files as two kernels wrote them, and a
control group of this machine where one can be made."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache.node import available_memory_bytes

MIB = 1 << 20
LIMIT = 64 * MIB

# A group of 512 MiB that has read a file of 1 GiB and holds 40 MiB in a tmpfs: memory.stat, shortened.
V1_STAT = """cache 518225920
rss 2027520
shmem 41943040
mapped_file 135168
dirty 0
inactive_anon 41807872
active_anon 2162688
inactive_file 475987968
active_file 270336
unevictable 0
hierarchical_memory_limit 536870912
total_cache 518225920
total_rss 2027520
total_shmem 41943040
total_inactive_anon 41807872
total_active_anon 2162688
total_inactive_file 475987968
total_active_file 270336
total_unevictable 0
"""
V2_STAT = """anon 2162688
file 518225920
kernel 9437184
shmem 41943040
file_mapped 135168
file_dirty 0
inactive_anon 41807872
active_anon 2162688
inactive_file 475987968
active_file 270336
unevictable 0
slab_reclaimable 4194304
"""
USED = 529_530_880
EXPECTED = (512 * MIB - USED) + 475_987_968 + 270_336


@pytest.mark.parametrize("version", [1, 2])
def test_page_cache_counts_as_room_and_a_tmpfs_does_not(tmp_path: Path, version: int) -> None:
    folder = tmp_path / ("memory/job" if version == 1 else "job")
    folder.mkdir(parents=True)
    names = ("limit_in_bytes", "usage_in_bytes") if version == 1 else ("max", "current")
    for name, value in zip(names, (512 * MIB, USED), strict=True):
        (folder / f"memory.{name}").write_text(f"{value}\n")
    membership = "7:memory:/job\n" if version == 1 else "0::/job\n"
    without = 512 * MIB - USED
    assert available_memory_bytes(tmp_path, membership) == without, "without memory.stat there is nothing to add"
    (folder / "memory.stat").write_text(V1_STAT if version == 1 else V2_STAT)
    assert available_memory_bytes(tmp_path, membership) == EXPECTED


def test_a_v1_group_counts_those_below_it(tmp_path: Path) -> None:
    folder = tmp_path / "memory" / "job"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{512 * MIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{USED}\n")
    (folder / "memory.stat").write_text(V1_STAT.replace("\ninactive_file 475987968", "\ninactive_file 4096"))
    assert available_memory_bytes(tmp_path, "7:memory:/job\n") == EXPECTED


def test_numbers_that_disagree_do_not_exceed_the_limit(tmp_path: Path) -> None:
    """The kernel counts in batches: for a moment the parts may be more than the whole."""
    for name, value in (("max", 100 * MIB), ("current", 5 * MIB), ("stat", f"inactive_file {20 * MIB}")):
        (tmp_path / f"memory.{name}").write_text(f"{value}\n")
    assert available_memory_bytes(tmp_path, "0::/\n") == 100 * MIB


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of this machine (v1) with a limit."""
    folder = Path(f"/sys/fs/cgroup/memory/packer-test-{os.getpid()}")
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(LIMIT))
    except OSError as error:
        pytest.skip(f"no control group (v1) can be made: {error}")
    yield folder
    folder.rmdir()


INSIDE = """
import os, sys
from cache import available_memory_bytes
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
begun = available_memory_bytes()
with open(sys.argv[2], "wb") as file:
    for _ in range(48):
        file.write(os.urandom(1 << 20))
    os.fsync(file.fileno())
with open(sys.argv[2], "rb") as file:
    while file.read(1 << 20): pass
read = available_memory_bytes()
with open(sys.argv[3], "wb") as file:
    file.write(bytes(16 << 20))
print(begun, read, available_memory_bytes())
"""


def test_in_a_real_control_group(group: Path, tmp_path: Path) -> None:
    in_memory = Path(f"/dev/shm/packer-test-{os.getpid()}")
    command = [sys.executable, "-c", INSIDE, group, tmp_path / "file", in_memory]
    try:
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, check=False)
    finally:
        in_memory.unlink(missing_ok=True)
    assert done.returncode == 0, done.stderr
    begun, read, filled = map(int, done.stdout.split())
    assert LIMIT // 2 < begun <= LIMIT
    assert read > begun - 8 * MIB, "a file that was read has taken the room"
    assert read - 20 * MIB < filled < read - 12 * MIB, "what lies in a tmpfs is not room"
