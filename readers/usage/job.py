"""What the job itself uses: its control group and its processes, apart from what others do on the machine."""

from __future__ import annotations

import os

from cache.node import cgroup_folders
from readers.usage.proc import cgroup_disks, disk_counters, is_stacked, key_values, process_times
from readers.usage.readings import Files, Readings

__all__ = ["Cgroup", "Processes"]

_PROCESSES_EVERY = 4  # samples after which processes are looked for again
_FIRST = 20  # samples in which they are looked for each time: workers are started
_MOST_PROCESSES = 256
_CGROUP_FILES = (
    "cpu.stat", "cpuacct.usage", "memory.current", "memory.usage_in_bytes", "memory.stat", "io.stat",
    "blkio.throttle.io_service_bytes",
)  # fmt: skip


class Cgroup:
    """Memory, CPU time, throttling and bytes of disks of the control group that this process is in, v1 or v2.

    "job memory" is without the page cache of files, which the kernel drops before it kills processes.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._paths: dict[str, str] = {}
        limits = []
        root, membership = files.root / "sys/fs/cgroup", files.text("proc/self/cgroup")
        for controller in ("cpu", "cpuacct", "memory", "blkio"):
            for folder in cgroup_folders(root, membership, (controller,)):
                below = folder.relative_to(files.root)
                for name in _CGROUP_FILES:
                    if (folder / name).is_file():
                        self._paths.setdefault(name, str(below / name))
                found = (files.number(str(below / name)) for name in ("memory.max", "memory.limit_in_bytes"))
                limits += [limit for limit in found if limit is not None and limit < 1 << 60]  # v1 has no "max"
        self._limit = min(limits, default=None)
        self._disks = {
            disk.number for name, disk in disk_counters(files.text("proc/diskstats")).items() if not is_stacked(name)
        }

    def __call__(self, readings: Readings) -> None:
        used = self._number("memory.current", "memory.usage_in_bytes")
        if used is not None:
            stat = key_values(self._text("memory.stat"))  # v1 counts groups below it in "total_…" only
            cache = sum(stat.get(f"total_{kind}", stat.get(kind, 0)) for kind in ("inactive_file", "active_file"))
            readings.gauge("job memory", max(0, used - cache), "bytes", self._limit)
        cpu = key_values(self._text("cpu.stat"))
        nanoseconds = self._number("cpuacct.usage")
        if "usage_usec" in cpu or nanoseconds is not None:
            seconds = cpu["usage_usec"] / 1e6 if nanoseconds is None else nanoseconds / 1e9
            readings.rate("job cpus", seconds, "cores")
        if cpu.get("nr_periods"):  # there is a quota
            micro, nano = cpu.get("throttled_usec"), cpu.get("throttled_time", 0)
            readings.share("job throttled", nano / 1e9 if micro is None else micro / 1e6)
        disks = cgroup_disks(self._text("io.stat") or self._text("blkio.throttle.io_service_bytes"))
        found = [counters for number, counters in disks.items() if number in self._disks]
        if found:
            readings.rate("job disk read", sum(read for read, _ in found))
            readings.rate("job disk write", sum(written for _, written in found))

    def _text(self, name: str) -> str:
        return self._files.text(self._paths[name]) if name in self._paths else ""

    def _number(self, *names: str) -> int | None:
        text = next((self._text(name).strip() for name in names if name in self._paths), "")
        return int(text) if text.isdecimal() else None


class Processes:
    """CPU time, and bytes read, of a process and those below it, from when they are first seen.

    "processes read" is what they asked for, from the page cache or not, and from pipes, too; "processes storage" what
    that made the kernel fetch. Processes that begin and end between two searches are not seen.
    """

    def __init__(self, files: Files, first: int) -> None:
        self._files, self._first, self._count = files, first, 0
        self._processes: list[int] = []
        self._before: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._gained = [0, 0, 0]
        self._ticks = os.sysconf("SC_CLK_TCK")

    def __call__(self, readings: Readings) -> None:
        if self._count < _FIRST or self._count % _PROCESSES_EVERY == 0:
            self._processes = self._tree()
        self._count += 1
        now: dict[tuple[int, int], tuple[int, int, int]] = {}
        for process in self._processes:
            times = process_times(self._files.once(f"proc/{process}/stat"))
            if times is not None:  # a number is used again: only with its beginning it names a process
                counters = key_values(self._files.once(f"proc/{process}/io"))
                now[process, times[1]] = times[0], counters.get("rchar", 0), counters.get("read_bytes", 0)
        for key, values in now.items():
            for number, (new, old) in enumerate(zip(values, self._before.get(key, values), strict=True)):
                self._gained[number] += max(0, new - old)
        self._before = now
        if now:
            readings.rate("processes cpus", self._gained[0] / self._ticks, "cores")
            readings.rate("processes read", self._gained[1])
            readings.rate("processes storage", self._gained[2])

    def _tree(self) -> list[int]:
        """The processes; without CONFIG_PROC_CHILDREN in the kernel only the first of them."""
        found, waiting = list[int](), [self._first]
        while waiting and len(found) < _MOST_PROCESSES:
            process = waiting.pop()
            found.append(process)
            for thread in self._files.names(f"proc/{process}/task"):
                text = self._files.once(f"proc/{process}/task/{thread}/children")
                waiting += [int(word) for word in text.split() if word.isdecimal()]
        return found
