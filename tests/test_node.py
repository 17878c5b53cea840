"""The resources of a node for a process: CPUs, memory, the page cache. Page cache counts as free memory, a tmpfs does
not.

Control files are copies from two kernels, and those of a control group of this machine where one can be made.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from suites.programs import run_python
from suites.warm import FSYNC

import readers
from cache.filesystem import drop, filesystem_type, prefetch, write_behind
from cache.node import available_memory_bytes, usable_cpus
from readers.loader import ImageLoader

MIB = 1 << 20
LIMIT = 64 * MIB
NODE = 32  # CPUs of the node, or the part that a container or a user allows
STEP = "SLURM_STEP_ID=0 SLURM_PROCID=0 "


def env(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


def step(tasks: int, on_node: int, per_task: int | None = None) -> dict[str, str]:
    """The environment of the first of several srun tasks on one node."""
    return env(STEP) | batch(tasks, on_node, per_task)


def batch(tasks: int, on_node: int, per_task: int | None) -> dict[str, str]:
    """The environment of a batch script, outside any job step."""
    text = f"SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NNODES=1 SLURM_NTASKS={tasks} SLURM_STEP_TASKS_PER_NODE={tasks} "
    return env(f"{text} SLURM_CPUS_ON_NODE={on_node}" + (f" SLURM_CPUS_PER_TASK={per_task}" if per_task else ""))


def torchrun(ranks: int) -> dict[str, str]:
    return env(f"RANK=0 WORLD_SIZE={ranks} LOCAL_RANK=0 LOCAL_WORLD_SIZE={ranks}")


def mpirun(ranks: int) -> dict[str, str]:
    return {
        f"OMPI_COMM_WORLD_{name}": value
        for name, value in env(f"RANK=0 SIZE={ranks} LOCAL_RANK=0 LOCAL_SIZE={ranks}").items()
    }


CASES = [
    # name, environment, CPUs of the process mask, expected
    ("a workstation", {}, 32, 32),
    ("torchrun on a workstation", torchrun(4), 32, 8),
    ("torchrun with more ranks than CPUs", torchrun(64), 32, 1),
    ("torchrun that binds its ranks", torchrun(4), 8, 8),
    ("mpirun that binds to cores", mpirun(4), 1, 1),
    ("mpirun that binds to sockets", mpirun(8), 16, 4),
    ("srun -n4 -c8, bound", step(4, 32, 8), 8, 8),
    ("srun -n4 -c8, not bound", step(4, 32, 8), 32, 8),
    ("srun -n4 -c2 on a node of our own", step(4, 32, 2), 32, 2),
    ("srun -n4, not bound", step(4, 4), 32, 1),
    ("srun -n4 on a node of our own", step(4, 32), 32, 8),
    ("srun -n4 of a job with -c8, on 4 CPUs", step(4, 4, 8), 32, 1),
    ("srun -n1 -c32 torchrun", {**step(1, 32, 32), **torchrun(4)}, 32, 8),
    ("srun -n1 torchrun on a node of our own", {**step(1, 32), **torchrun(4)}, 32, 8),
    ("srun -n2 -c16, two torchruns", {**step(2, 32, 16), **torchrun(2)}, 32, 8),
    ("sbatch -n1 -c32, torchrun", {**batch(1, 32, 32), **torchrun(4)}, 32, 8),
    ("sbatch -n4 -c8, torchrun", {**batch(4, 32, 8), **torchrun(4)}, 32, 8),
    ("sbatch -n4 -c8, mpirun by a step of one task", {**step(1, 32, 8), **mpirun(4)}, 32, 8),
    ("sbatch -n4 -c8, one process", batch(4, 16, 8), 32, 16),
    ("qsub -l select=2:ncpus=8, the script", {"PBS_JOBID": "7", "NCPUS": "8"}, 32, 8),
    ("qsub -l select=1:ncpus=8, mpiexec", {"PBS_JOBID": "7", "NCPUS": "8", **mpirun(4)}, 32, 2),
    ("qsub -l nodes=2:ppn=6 of Torque", {"PBS_JOBID": "7", "PBS_NUM_PPN": "6"}, 32, 6),
    ("NCPUS without PBS", {"NCPUS": "8"}, 32, 32),
    ("bsub -n8 on two hosts, the script", {"LSB_MCPU_HOSTS": "a 4 b 4"}, 32, 4),
    ("bsub -n8 on two hosts, blaunch", {"LSB_MCPU_HOSTS": "a 6 b 2", "LSF_PM_TASKID": "7"}, 32, 1),
    ("bsub -n2 with 16 CPUs a slot, bound", {"LSB_MCPU_HOSTS": "a 1 b 1", "LSB_AFFINITY_HOSTFILE": "/f"}, 16, 16),
    ("bsub -n8, mpirun", {"LSB_MCPU_HOSTS": "a 8", **mpirun(4)}, 32, 2),
    ("qsub -pe smp 4 of Grid Engine", {"NSLOTS": "4", "JOB_ID": "1"}, 32, 4),
    ("qsub -pe mpi 64 of Grid Engine", {"NSLOTS": "64", "NHOSTS": "2", "JOB_ID": "1"}, 32, 32),
    ("a shell with CPUs per task alone", {"SLURM_CPUS_PER_TASK": "6"}, 32, 6),
    ("more CPUs per task than there are", {"SLURM_CPUS_PER_TASK": "100"}, 32, 32),
    *((f"CPUs per task {text!r}", {"SLURM_CPUS_PER_TASK": text}, 32, 32) for text in ("", "-4", "0", "²")),
    ("CPUs per task 'all'", {"SLURM_CPUS_PER_TASK": "all", "SLURM_CPUS_ON_NODE": "12"}, 32, 12),
    ("a step whose variables contradict each other", {**step(4, 32, 8), "SLURM_PROCID": "9"}, 32, 32),
]


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The CPUs in the mask of this process; its parent may use the whole node."""
    sizes = {"own": NODE}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(NODE if pid else sizes["own"])))
    return sizes


@pytest.mark.parametrize(("environ", "own", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_only_shared_cpus_are_divided_by_the_ranks(
    masks: dict[str, int], tmp_path: Path, environ: dict[str, str], own: int, expected: int
) -> None:
    masks["own"] = own
    assert usable_cpus(environ, tmp_path, "0::/\n") == expected


def test_a_mask_or_quota_that_the_launcher_also_has_is_shared(
    masks: dict[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As under taskset, or in the cpuset of a container; the smallest limit counts."""
    (tmp_path / "cpu.max").write_text("800000 100000")
    for masks["own"], environ, expected in (
        (NODE, {}, 8),
        (NODE, torchrun(4), 2),
        (2, {}, 2),
        (9, {}, 8),
        (9, {"SLURM_CPUS_PER_TASK": "2"}, 2),
    ):
        assert usable_cpus(environ, tmp_path, "0::/\n") == expected
    (tmp_path / "cpu.max").unlink()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert usable_cpus(torchrun(4), tmp_path, "0::/\n") == 2


def test_a_loader_in_a_task_has_the_threads_of_the_task(
    masks: dict[str, int], tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in step(4, 32, 8).items():
        monkeypatch.setenv(name, value)
    with readers.open_folder(tree / "train") as reader:
        assert ImageLoader(reader, 2).threads == 8


def control_files(root: Path, **files: str) -> Path:
    """Write control files: a__b__cpu_max="…" is the file a/b/cpu.max."""
    for name, text in files.items():
        *folders, last = name.split("__")
        path = root.joinpath(*folders)
        path.mkdir(parents=True, exist_ok=True)
        (path / last.replace("_", ".", 1)).write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("files", "membership", "expected"),
    [
        ({}, "0::/\n", NODE),
        ({"cpu_max": "200000 100000"}, "0::/\n", 2),
        ({"job__cpu_max": "250000 100000"}, "0::/job\n", 3),  # part of a CPU counts as one
        ({"job__cpu_max": "50000 100000"}, "0::/job\n", 1),
        ({"job__cpu_max": "max 100000"}, "0::/job\n", NODE),
        ({"job__cpu_max": "800000 100000", "job__task__cpu_max": "max 100000"}, "0::/job/task\n", 8),
        ({"job__cpu_max": "800000 100000", "job__task__cpu_max": "400000 100000"}, "0::/job/task\n", 4),
        ({"other__cpu_max": "100000 100000"}, "0::/job\n", NODE),
        ({"job__cpu_max": "100000 100000"}, "0::/job/gone\n", 1),
        ({"job__cpu_max": ""}, "0::/job\n", NODE),
        ({"job__cpu_max": "lots 100000"}, "0::/job\n", NODE),
        ({"job__cpu_max": "100000 0"}, "0::/job\n", NODE),
        ({"job__cpu_max": "1"}, "0::/job\n", NODE),
        ({"cpu__job__cpu_cfs_quota_us": "300000", "cpu__job__cpu_cfs_period_us": "100000"}, "4:cpu,cpuacct:/job\n", 3),
        ({"cpu__job__cpu_cfs_quota_us": "-1", "cpu__job__cpu_cfs_period_us": "100000"}, "4:cpu,cpuacct:/job\n", NODE),
        ({"cpu__cpu_cfs_quota_us": "300000", "cpu__cpu_cfs_period_us": "0"}, "4:cpu:/\n", NODE),
        ({"cpu_max": "100000 100000"}, "", NODE),
        ({"cpu_max": "100000 100000"}, "nonsense\n1:name=systemd:/x\n", NODE),
        ({"cpu_max": "500000 100000"}, "0::/../../other\n", 5),
    ],
)
def test_cpus_of_a_control_group(
    tmp_path: Path, masks: dict[str, int], files: dict[str, str], membership: str, expected: int
) -> None:
    assert usable_cpus({}, control_files(tmp_path, **files), membership) == expected


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
V1 = {"memory__job__memory_limit_in_bytes": str(512 * MIB), "memory__job__memory_usage_in_bytes": str(USED)}
V2 = {"job__memory_max": str(512 * MIB), "job__memory_current": str(USED)}


@pytest.mark.parametrize(
    ("files", "membership", "expected"),
    [
        ({"job__memory_max": "1000000", "job__memory_current": "400000"}, "0::/job\n", 600_000),
        ({"job__memory_max": "1000000", "job__memory_current": "2000000"}, "0::/job\n", 0),
        ({"memory_max": "700000", "memory_current": "1", "job__memory_max": "max"}, "0::/job\n", 699_999),
        (V1, "7:memory:/job\n", 512 * MIB - USED),
        (V2, "0::/job\n", 512 * MIB - USED),
        # Page cache is free, a tmpfs is not. In a v1 group the totals count, which include the groups below it.
        ({**V1, "memory__job__memory_stat": V1_STAT}, "7:memory:/job\n", FREE),
        (
            {**V1, "memory__job__memory_stat": V1_STAT.replace("\ninactive_file 475987968", "\ninactive_file 4096")},
            "7:memory:/job\n",
            FREE,
        ),
        ({**V2, "job__memory_stat": V2_STAT}, "0::/job\n", FREE),
        # The kernel counts in batches: for a moment the parts may exceed the total.
        (
            {**V2, "job__memory_current": str(5 * MIB), "job__memory_stat": f"inactive_file {20 * MIB}"},
            "0::/job\n",
            512 * MIB,
        ),
    ],
)
def test_memory_of_a_control_group(tmp_path: Path, files: dict[str, str], membership: str, expected: int) -> None:
    assert available_memory_bytes(control_files(tmp_path, **files), membership) == expected


def test_memory_of_the_node(tmp_path: Path) -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    unlimited = control_files(tmp_path, memory_max="max", memory_current="5")
    assert 0 < available_memory_bytes(unlimited, "0::/\n") <= total and 0 <= available_memory_bytes() <= total
    assert 1 <= usable_cpus() <= (os.cpu_count() or 1)


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
    assert read > begun - 8 * MIB, "a file in the page cache counts as used"
    assert read - 20 * MIB < filled < read - 12 * MIB, "files in a tmpfs are not free memory"


# --- the page cache ----
def resident_bytes(path: Path) -> int:
    """Bytes of a file in the page cache, in whole pages, by mincore(2)."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        states = (ctypes.c_ubyte * -(-len(view) // mmap.PAGESIZE))()
        start = ctypes.addressof(ctypes.c_char.from_buffer(view))
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(view)), states) == 0
        return min(len(view), sum(state & 1 for state in states) * mmap.PAGESIZE)


@pytest.fixture
def large_file(tmp_path: Path) -> Path:
    path = tmp_path / "large"
    path.write_bytes(os.urandom((1 << 20) + 777))
    return path


def test_dropped_pages_are_read_again(large_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", FSYNC)  # unwritten pages cannot be dropped
    data = large_file.read_bytes()
    assert resident_bytes(large_file) == len(data)
    if filesystem_type(large_file) in ("tmpfs", "ramfs"):
        pytest.skip("files of a tmpfs exist only in memory, so their pages cannot be dropped")
    drop(large_file)
    (large_file.parent / "empty").touch()
    drop(large_file.parent / "empty")
    with pytest.raises(FileNotFoundError):
        drop(large_file.parent / "missing")
    assert resident_bytes(large_file) < len(data) // 4, "drop() left the file in the page cache"
    with open(large_file, "rb") as file:
        assert os.pread(file.fileno(), 10, 500_000) == data[500_000:500_010]
    assert 0 < resident_bytes(large_file) <= len(data)
    assert large_file.read_bytes() == data, "drop() lost bytes"


def test_prefetch_and_write_behind_are_only_hints(large_file: Path) -> None:
    data = large_file.read_bytes()
    with open(large_file, "r+b", buffering=0) as file:
        descriptor = file.fileno()
        prefetch(descriptor, ())
        prefetch(descriptor, ((0, 0), (10, 100), (1 << 40, 5)))
        file.write(b"new")
        write_behind(descriptor, 0, 3)
        write_behind(descriptor, 1 << 40, 0)
        assert file.tell() == 3, "a hint moved the file's position"
        assert os.fstat(descriptor).st_size == len(data), "a hint changed the file's size"
    assert large_file.read_bytes() == b"new" + data[3:]
    write_behind(descriptor, 0, 3)  # closed: a hint has no effect and raises no error
    with pytest.raises(OSError, match="Bad file descriptor"):
        prefetch(descriptor, ((0, 1),))
