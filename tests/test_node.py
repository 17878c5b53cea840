"""The CPUs and memory that this process may use, and its page cache. Page cache is free memory, a tmpfs is not.

Control files are as two kernels wrote them, and of a control group of this machine where one can be made.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from suites.programs import run_python

import cache
from cache.node import available_memory_bytes, usable_cpus

MIB = 1 << 20
LIMIT = 64 * MIB


@pytest.fixture
def many_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))


def control_files(root: Path, **files: str) -> Path:
    """Write control files: a__b__cpu_max="…" is a/b/cpu.max."""
    for name, text in files.items():
        *folders, last = name.split("__")
        path = root.joinpath(*folders)
        path.mkdir(parents=True, exist_ok=True)
        (path / last.replace("_", ".", 1)).write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("files", "membership", "expected"),
    [
        ({}, "0::/\n", 64),
        ({"cpu_max": "200000 100000"}, "0::/\n", 2),
        ({"job__cpu_max": "250000 100000"}, "0::/job\n", 3),  # part of a CPU still is one
        ({"job__cpu_max": "50000 100000"}, "0::/job\n", 1),
        ({"job__cpu_max": "max 100000"}, "0::/job\n", 64),
        ({"job__cpu_max": "800000 100000", "job__task__cpu_max": "max 100000"}, "0::/job/task\n", 8),
        ({"job__cpu_max": "800000 100000", "job__task__cpu_max": "400000 100000"}, "0::/job/task\n", 4),
        ({"other__cpu_max": "100000 100000"}, "0::/job\n", 64),
        ({"job__cpu_max": "100000 100000"}, "0::/job/gone\n", 1),
        ({"job__cpu_max": ""}, "0::/job\n", 64),
        ({"job__cpu_max": "lots 100000"}, "0::/job\n", 64),
        ({"job__cpu_max": "100000 0"}, "0::/job\n", 64),
        ({"job__cpu_max": "1"}, "0::/job\n", 64),
        ({"cpu__job__cpu_cfs_quota_us": "300000", "cpu__job__cpu_cfs_period_us": "100000"}, "4:cpu,cpuacct:/job\n", 3),
        ({"cpu__job__cpu_cfs_quota_us": "-1", "cpu__job__cpu_cfs_period_us": "100000"}, "4:cpu,cpuacct:/job\n", 64),
        ({"cpu__cpu_cfs_quota_us": "300000", "cpu__cpu_cfs_period_us": "0"}, "4:cpu:/\n", 64),
        ({"cpu_max": "100000 100000"}, "", 64),
        ({"cpu_max": "100000 100000"}, "nonsense\n1:name=systemd:/x\n", 64),
        ({"cpu_max": "500000 100000"}, "0::/../../other\n", 5),
    ],
)
def test_cpus_of_a_control_group(
    tmp_path: Path, many_cpus: None, files: dict[str, str], membership: str, expected: int
) -> None:
    assert usable_cpus({}, control_files(tmp_path, **files), membership) == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, 64),
        ({"SLURM_CPUS_PER_TASK": "6"}, 6),
        ({"SLURM_CPUS_ON_NODE": "12"}, 12),
        ({"SLURM_CPUS_PER_TASK": "6", "SLURM_CPUS_ON_NODE": "12"}, 12),  # a batch script; tasks are in test_cpus.py
        ({"SLURM_CPUS_PER_TASK": "100"}, 64),
        ({"SLURM_CPUS_PER_TASK": ""}, 64),
        ({"SLURM_CPUS_PER_TASK": "all", "SLURM_CPUS_ON_NODE": "12"}, 12),
        ({"SLURM_CPUS_PER_TASK": "-4"}, 64),
        ({"SLURM_CPUS_PER_TASK": "0"}, 64),
        ({"SLURM_CPUS_PER_TASK": "²"}, 64),
    ],
)
def test_cpus_of_a_slurm_task(tmp_path: Path, many_cpus: None, environ: dict[str, str], expected: int) -> None:
    assert usable_cpus(environ, tmp_path, "0::/\n") == expected


def test_the_smallest_limit_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = control_files(tmp_path, cpu_max="300000 100000")
    for mask, environ, expected in ((2, {}, 2), (9, {}, 3), (9, {"SLURM_CPUS_PER_TASK": "2"}, 2)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, n=mask: set(range(n)))
        assert usable_cpus(environ, root, "0::/\n") == expected


def test_cpus_of_this_process() -> None:
    assert 1 <= usable_cpus() <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("files", "membership", "expected"),
    [
        ({"job__memory_max": "1000000", "job__memory_current": "400000"}, "0::/job\n", 600_000),
        ({"job__memory_max": "1000000", "job__memory_current": "2000000"}, "0::/job\n", 0),
        ({"memory_max": "700000", "memory_current": "1", "job__memory_max": "max"}, "0::/job\n", 699_999),
        (
            {"memory__job__memory_limit_in_bytes": "5000", "memory__job__memory_usage_in_bytes": "4000"},
            "9:memory:/job\n",
            1000,
        ),
    ],
)
def test_memory_of_a_control_group(tmp_path: Path, files: dict[str, str], membership: str, expected: int) -> None:
    assert available_memory_bytes(control_files(tmp_path, **files), membership) == expected


def test_memory_of_the_node(tmp_path: Path) -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    unlimited = control_files(tmp_path, memory_max="max", memory_current="5")
    assert 0 < available_memory_bytes(unlimited, "0::/\n") <= total
    assert 0 <= available_memory_bytes() <= total


# A group of 512 MiB that has read a file of 1 GiB and holds 40 MiB in a tmpfs: memory.stat, shortened.
V1_STAT = """cache 518225920
rss 2027520
shmem 41943040
inactive_file 475987968
active_file 270336
total_cache 518225920
total_shmem 41943040
total_inactive_anon 41807872
total_inactive_file 475987968
total_active_file 270336
"""
V2_STAT = """anon 2162688
file 518225920
shmem 41943040
inactive_anon 41807872
inactive_file 475987968
active_file 270336
"""
USED = 529_530_880
FREE = (512 * MIB - USED) + 475_987_968 + 270_336


@pytest.mark.parametrize(
    ("files", "membership", "expected"),
    [
        ({"memory__job__memory_stat": V1_STAT}, "7:memory:/job\n", FREE),
        ({"memory__job__memory_stat": V1_STAT.replace("\ninactive_file 475987968", "\ninactive_file 4096")},
         "7:memory:/job\n", FREE),  # of a v1 group, the totals count, which include the groups below it
        ({"memory__job__memory_notes": ""}, "7:memory:/job\n", 512 * MIB - USED),
        ({"job__memory_stat": V2_STAT}, "0::/job\n", FREE),
        ({"job__memory_notes": ""}, "0::/job\n", 512 * MIB - USED),
    ],
)  # fmt: skip
def test_page_cache_is_free_memory_and_a_tmpfs_is_not(
    tmp_path: Path, files: dict[str, str], membership: str, expected: int
) -> None:
    version_1 = "memory" in membership
    names = ("memory__job__memory_limit_in_bytes", "memory__job__memory_usage_in_bytes")
    names = names if version_1 else ("job__memory_max", "job__memory_current")
    limits = dict(zip(names, (str(512 * MIB), str(USED)), strict=True))
    assert available_memory_bytes(control_files(tmp_path, **limits, **files), membership) == expected


def test_numbers_that_disagree_do_not_exceed_the_limit(tmp_path: Path) -> None:
    """The kernel counts in batches: for a moment the parts may be more than the whole."""
    files = {"memory_max": str(100 * MIB), "memory_current": str(5 * MIB), "memory_stat": f"inactive_file {20 * MIB}"}
    assert available_memory_bytes(control_files(tmp_path, **files), "0::/\n") == 100 * MIB


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
    try:
        done = run_python("-c", INSIDE, group, tmp_path / "file", in_memory)
    finally:
        in_memory.unlink(missing_ok=True)
    assert done.returncode == 0, done.stderr
    begun, read, filled = map(int, done.stdout.split())
    assert LIMIT // 2 < begun <= LIMIT
    assert read > begun - 8 * MIB, "a file that was read has taken the room"
    assert read - 20 * MIB < filled < read - 12 * MIB, "what lies in a tmpfs is not room"


# --- the page cache ---
def filesystem_of(path: Path) -> str:
    """The type of the filesystem that a path is on, by the longest mount point above it."""
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    return max((len(point), kind) for point, kind in mounts if path.is_relative_to(point))[1]


@pytest.fixture
def large_file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "large"
    path.write_bytes(os.urandom((1 << 20) + 777))
    yield path
    path.unlink()


def test_page_cache(large_file: Path) -> None:
    data = large_file.read_bytes()
    assert cache.resident_bytes(large_file) == len(data)
    if filesystem_of(large_file) in ("tmpfs", "ramfs"):
        pytest.skip("files of a tmpfs are nowhere but in memory, so they cannot be dropped")
    cache.drop(large_file)
    assert cache.resident_bytes(large_file) < len(data) // 4, "drop() left the file in the page cache"
    with open(large_file, "rb") as file:
        assert os.pread(file.fileno(), 10, 500_000) == data[500_000:500_010]
    assert 0 < cache.resident_bytes(large_file) <= len(data)
    assert large_file.read_bytes() == data, "drop() lost bytes"


def test_page_cache_of_odd_files(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert cache.resident_bytes(tmp_path / "empty") == 0
    cache.drop(tmp_path / "empty")
    for function in (cache.drop, cache.resident_bytes):
        with pytest.raises(FileNotFoundError):
            function(tmp_path / "missing")


def test_prefetch_and_write_behind_are_only_hints(large_file: Path) -> None:
    data = large_file.read_bytes()
    with open(large_file, "r+b", buffering=0) as file:
        descriptor = file.fileno()
        cache.prefetch(descriptor, ())
        cache.prefetch(descriptor, ((0, 0), (10, 100), (1 << 40, 5)))
        file.write(b"new")
        cache.write_behind(descriptor, 0, 3)
        cache.write_behind(descriptor, 1 << 40, 0)
        assert file.tell() == 3, "a hint moved the file's position"
        assert os.fstat(descriptor).st_size == len(data), "a hint changed the file's size"
    assert large_file.read_bytes() == b"new" + data[3:]
    cache.write_behind(descriptor, 0, 3)  # closed: it promises nothing and raises nothing
    with pytest.raises(OSError, match="Bad file descriptor"):
        cache.prefetch(descriptor, ((0, 1),))
