"""The machine under a benchmark: its page cache, its free memory, and the memory of processes.

Nothing in this module is timed.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import resource
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

__all__ = [
    "Clock",
    "chill",
    "cpu_seconds",
    "cpu_seconds_of",
    "cpu_seconds_of_tree",
    "files_below",
    "fio",
    "folder_bytes",
    "has_gpu",
    "kilobytes_of",
    "list_tree",
    "memory_of_self",
    "peak_memory",
    "prime",
    "pss_of_tree",
    "reset_peak",
    "sync_below",
    "system_cpu_seconds",
    "warm",
]

_BLOCK_BYTES = 1 << 22
_MB = 1e6


class Clock:
    """Wall time, and CPU time of this process and its descendants, since the clock was made."""

    def __init__(self) -> None:
        self._cpu, self._started = cpu_seconds_of_tree(), time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started

    def figures(self, count: int) -> dict[str, float]:
        """The rate "images_s" and the CPU microseconds per image "cpu_us" of `count` images."""
        seconds, cpu = self.seconds, cpu_seconds_of_tree() - self._cpu
        return {"images_s": count / seconds, "cpu_us": 1e6 * cpu / count}


def list_tree(root: str | os.PathLike[str]) -> list[tuple[str, int]]:
    """(path, label) of every file of `root/<class>/`, sorted: for contenders that do not list files themselves."""
    files = []
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    for label, name in enumerate(classes):
        folder = os.path.join(root, name)
        files += [(os.path.join(folder, file), label) for file in sorted(os.listdir(folder))]
    return files


def files_below(root: str | os.PathLike[str]) -> list[str]:
    """Every file below a folder, or the file itself."""
    if os.path.isfile(root):
        return [os.fspath(root)]
    return sorted(os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names)


def has_gpu() -> bool:
    """Whether torch finds a GPU. torch is not imported on machines without GPU devices."""
    if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")):
        return False
    import torch

    return torch.cuda.is_available()


def folder_bytes(root: str | os.PathLike[str]) -> int:
    """Apparent size of all files below a folder."""
    return sum(os.path.getsize(path) for path in files_below(root))


def warm(roots: Iterable[str | os.PathLike[str]]) -> None:
    """Read every file below the folders into the page cache."""
    block = bytearray(_BLOCK_BYTES)
    for root in roots:
        for path in files_below(root):
            with open(path, "rb", buffering=0) as file:
                while file.readinto(block):
                    pass


def chill(roots: Iterable[str | os.PathLike[str]]) -> str:
    """Empty the page cache (as root), or drop the files below the folders from it; returns a name of what was done."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
        return "drop_caches"
    except OSError:
        pass
    for root in roots:
        for path in files_below(root):
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    return "fadvise"


def sync_below(root: str | os.PathLike[str]) -> None:
    """Sync every file below a folder, and its directories, to the disk."""
    for path in [*files_below(root), *(folder for folder, _, _ in os.walk(root))]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def fio(files: Iterable[Path], block: int, depth: int = 1, *, direct: bool = False, mode: str = "randread") -> float:
    """Reads/s of fio in one process, each block once: through the page cache, or from the device (`direct`).

    files: whole, cut into blocks of `block` bytes (direct: rounded up to 4 KiB). Raises FileNotFoundError without fio.
    """
    size, engine = (-(-block // 4096) * 4096, "libaio") if direct else (block, "psync")
    options = [f"--bs={size}", f"--iodepth={depth}", f"--direct={direct:d}", f"--ioengine={engine}", "--invalidate=0"]
    command = ["fio", "--name=read", f"--rw={mode}", "--readonly", "--output-format=json", *options]
    command.append("--filename=" + ":".join(map(str, files)))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["jobs"][0]["read"]["iops"])


def prime(size_bytes: int) -> float:
    """Touch `size_bytes` of free memory and free it at once; returns the seconds of that.

    A virtual machine may return free memory to its host; the first touch of a page then costs several times as much as
    the timed work. Touched pages stay with the machine for some seconds.
    """
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    size = min(size_bytes, available * 3 // 4)
    started = time.perf_counter()
    if size > 0:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
        mmap.mmap(-1, size, flags=flags).close()
    return time.perf_counter() - started


def reset_peak() -> None:
    """Reset the peak memory of this process, which includes the memory that `prime` touched."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> dict[str, float]:
    """Peak resident memory in MB since `reset_peak`: of this process, and of its largest child that has ended.

    A child's figure includes the memory of this process at the fork.
    """
    own = kilobytes_of("/proc/self/status")["VmHWM"] / 1e3
    child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / _MB
    return {"peak_self_mb": own, "peak_child_mb": child, "peak_mb": max(own, child)}


def memory_of_self() -> dict[str, float]:
    """The current memory of this process in MB: private (anonymous) memory, and mapped pages of files.

    Pages of files belong to the page cache and are shared by all processes that map them.
    """
    values = kilobytes_of("/proc/self/smaps_rollup")
    return {"private_mb": values["Anonymous"] / 1e3, "file_mb": (values["Rss"] - values["Anonymous"]) / 1e3}


def kilobytes_of(path: str) -> dict[str, float]:
    """The lines "Name: number kB" of a file of /proc, in units of 1,000 bytes."""
    rows = (line.replace(":", " ").split() for line in Path(path).read_text().splitlines())
    return {row[0]: int(row[1]) * 1.024 for row in rows if row[-1:] == ["kB"]}


def pss_of_tree(without: int = 0) -> float:
    """PSS in MB of this process and its descendants, except the process `without`: a page that n processes share counts
    1/n for each.

    PSS includes mapped pages of files and shared memory.
    """
    total = 0.0
    for pid in _tree():
        if pid == without:
            continue
        with contextlib.suppress(OSError):
            total += kilobytes_of(f"/proc/{pid}/smaps_rollup").get("Pss", 0)
    return total / 1e3


def cpu_seconds_of_tree() -> float:
    """User and system CPU time of this process and its descendants, and of ended children that were waited for."""
    return sum(cpu_seconds_of(pid) for pid in _tree())


def cpu_seconds_of(pid: int) -> float:
    """CPU time of a process and of the children that it has waited for; 0 for a process that does not exist."""
    try:
        return sum(map(int, _stat(pid)[11:15])) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return 0.0


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _tree() -> list[int]:
    """The ids of this process and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                children.setdefault(int(_stat(int(entry.name))[1]), []).append(int(entry.name))
    pids = [os.getpid()]
    for pid in pids:
        pids += children.get(pid, [])
    return pids


def cpu_seconds() -> float:
    """User and system CPU time of this process and of its ended children."""
    return sum(os.times()[:4])


def system_cpu_seconds() -> float:
    """CPU time of all processes of this machine since it started, with the time that the host took (steal)."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = ticks[3] + ticks[4]
    return (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK")
