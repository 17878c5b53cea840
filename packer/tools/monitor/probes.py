"""What is read of a machine for each sample: CPUs, memory, disks, network, pressure, file systems.

A probe reads files below a root directory and puts what it finds into `Readings`. What a machine does not have, or does
not let this user read, is left out. Virtual devices are left out where they would count bytes twice: partitions and
device-mapper or RAID devices over the disks that they are made of, bonds and bridges over their network cards.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from cache.errors import MissingExtraError, PipelineError
from cache.node import cgroup_folders
from packer.tools.monitor.record import Series

__all__ = ["Machine", "Readings", "cpu_times", "key_values", "meminfo", "net_counters", "pressure", "process_times"]

_FIND_EVERY = 20  # samples after which mounts are looked for again
_PARTITION = re.compile(r"(?:[hsv]d[a-z]+|xvd[a-z]+)\d+|(?:nvme\d+n\d+|mmcblk\d+)p\d+")
_NO_DISK = re.compile(r"(?:loop|ram|zram|fd|sr|nbd)\d+")


def machine_probes(files: Files, process: int, cpus: Iterable[int] | None = None) -> list[Probe]:
    """The probes of this machine. process: the first one of the job. cpus: those that it may use, None for all."""
    own: list[Probe] = [Cgroup(files), Processes(files, process)]
    return [
        _Cpus(files, cpus), _Memory(files), _Disks(files), _Network(files), _Remote(files), _Pressure(files), *own,
    ]  # fmt: skip


class _Cpus:
    """ "cpu busy", iowait and steal of the CPUs of the job together; busy of each core of the machine.

    The iowait of a single core says nothing: a process that waits is on none (proc(5)).
    """

    def __init__(self, files: Files, cpus: Iterable[int] | None) -> None:
        self._files, self._cpus = files, None if cpus is None else frozenset(cpus)

    def __call__(self, readings: Readings) -> None:
        times = cpu_times(self._files.text("proc/stat"))
        own = [found for number, found in times.items() if self._cpus is None or number in self._cpus]
        if own:
            total = sum(found.total for found in own)
            readings.share("cpu busy", sum(found.busy for found in own), total)
            readings.share("cpu iowait", sum(found.iowait for found in own), total)
            readings.share("cpu steal", sum(found.steal for found in own), total)
        for number, found in times.items():
            readings.share(f"cpu{number} busy", found.busy, found.total)


class _Memory:
    """ "memory used": of the machine, without page cache; "page cache": without what is in tmpfs."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def __call__(self, readings: Readings) -> None:
        found = meminfo(self._files.text("proc/meminfo"))
        total = found.get("MemTotal")
        if total and "MemAvailable" in found:
            readings.gauge("memory used", total - found["MemAvailable"], "bytes", total)
        if total and "Cached" in found:
            cached = found["Cached"] + found.get("Buffers", 0) - found.get("Shmem", 0)
            readings.gauge("page cache", max(0, cached), "bytes", total)


class _Disks:
    """Bytes and busy time of whole physical disks."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._seen: set[str] = set()
        self._physical: set[str] = set()

    def __call__(self, readings: Readings) -> None:
        disks = disk_counters(self._files.text("proc/diskstats"))
        if set(disks) != self._seen:
            self._seen, self._physical = set(disks), {name for name in disks if self._is_physical(name)}
        for name in self._physical:
            disk = disks[name]
            readings.rate(f"{name} read", disk.read_bytes)
            readings.rate(f"{name} write", disk.written_bytes)
            readings.share(f"{name} busy", disk.busy)

    def _is_physical(self, name: str) -> bool:
        if _NO_DISK.fullmatch(name) or _PARTITION.fullmatch(name):
            return False
        if not self._files.names("sys/block"):
            return not is_stacked(name)
        return self._files.exists(f"sys/block/{name}") and not self._files.names(f"sys/block/{name}/slaves")


class _Network:
    """Bytes of network cards; where there are none, as in a container, of interfaces that are not over others.

    InfiniBand counts apart: what is read by RDMA, as Lustre does, passes no interface. Its ports count words
    of 4 bytes.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._seen: set[str] = set()
        self._chosen: dict[str, float | None] = {}
        self._ports: list[tuple[str, str]] = []

    def __call__(self, readings: Readings) -> None:
        cards = net_counters(self._files.text("proc/net/dev"))
        if set(cards) != self._seen:
            self._seen, self._chosen = set(cards), self._choose(cards)
            found = self._files.names("sys/class/infiniband")
            self._ports = [
                (device, f"sys/class/infiniband/{device}/ports/{port}/counters")
                for device in found
                for port in self._files.names(f"sys/class/infiniband/{device}/ports")
            ]
        for name, full in self._chosen.items():
            received, sent = cards[name]
            readings.rate(f"{name} in", received, full=full)
            readings.rate(f"{name} out", sent, full=full)
        for device, folder in self._ports:
            for what, counter in (("in", "port_rcv_data"), ("out", "port_xmit_data")):
                text = self._files.text(f"{folder}/{counter}").strip()
                if text.isdecimal():
                    readings.rate(f"{device} {what}", 4 * int(text))

    def _choose(self, cards: Iterable[str]) -> dict[str, float | None]:
        """Interfaces that count, with the bytes a second of their links."""
        below = "sys/class/net"
        cards = [name for name in cards if name != "lo"]
        over = {name for name in cards if any(self._files.exists(f"{below}/{name}/{kind}") for kind in
                                              ("bonding", "bridge", "team"))}  # fmt: skip
        physical = [name for name in cards if self._files.exists(f"{below}/{name}/device")]
        chosen = physical or [name for name in cards if name not in over]
        speeds = {name: self._files.number(f"{below}/{name}/speed") for name in chosen}
        return {name: 1e6 / 8 * speed if speed else None for name, speed in speeds.items()}


class _Remote:
    """Bytes of NFS mounts, as their servers sent them, and of Lustre, as programs read them."""

    def __init__(self, files: Files) -> None:
        self._files, self._count = files, 0
        self._nfs = False
        self._lustre: list[tuple[str, str]] = []

    def __call__(self, readings: Readings) -> None:
        if self._count % _FIND_EVERY == 0:
            self._find()
        self._count += 1
        if self._nfs:
            for mount, (read, written) in nfs_counters(self._files.text("proc/self/mountstats")).items():
                readings.rate(f"nfs {mount} read", read)
                readings.rate(f"nfs {mount} write", written)
        for name, path in self._lustre:
            counters = lustre_counters(self._files.text(path))
            if counters is not None:
                readings.rate(f"lustre {name} read", counters[0])
                readings.rate(f"lustre {name} write", counters[1])

    def _find(self) -> None:
        mounts = self._files.text("proc/self/mounts")
        self._nfs = any(line.split()[2:3] in (["nfs"], ["nfs4"]) for line in mounts.splitlines())
        self._lustre = []
        for folder in ("proc/fs/lustre/llite", "sys/kernel/debug/lustre/llite"):
            if not self._lustre:  # scratch-ffff8f0c12345678: the file system, and an address in the kernel
                found = self._files.names(folder)
                self._lustre = [(name.rpartition("-")[0] or name, f"{folder}/{name}/stats") for name in found]


class _Pressure:
    """Shares of the time in which some task waited for a CPU, for I/O or for memory (PSI)."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def __call__(self, readings: Readings) -> None:
        for what in ("cpu", "io", "memory"):
            waited = pressure(self._files.text(f"proc/pressure/{what}"))
            if "some" in waited:
                readings.share(f"{what} pressure", waited["some"])


# --- The values of a sample, and the files that they are read from.
Probe = Callable[["Readings"], None]

_FILE_BYTES = 4 << 20
_CHUNK_BYTES = 1 << 16


class Readings:
    """The values of one sample, from gauges and from what counters and their clocks gained since the one before.

    A counter that fell, because it wrapped or its device was removed and came back, has no value in this sample.
    """

    def __init__(self) -> None:
        self.series: dict[str, Series] = {}
        self.values: dict[str, float] = {}
        self._before: dict[str, tuple[float, float]] = {}
        self._now: dict[str, tuple[float, float]] = {}
        self._time = 0.0

    def begin(self, now: float) -> None:
        """A new sample, at a time in seconds."""
        self._time, self.values = now, {}
        self._before, self._now = self._now, {}

    def gauge(self, name: str, value: float, unit: str = "1", full: float | None = None) -> None:
        if name not in self.series or self.series[name].full is None:
            self.series[name] = Series(name[:200], unit, full if full is None or full > 0 else None)
        self.values[name] = value

    def rate(self, name: str, counter: float, unit: str = "bytes/s", full: float | None = None) -> None:
        """What a counter gained, a second."""
        self._gained(name, counter, self._time, unit, full)

    def share(self, name: str, part: float, whole: float | None = None) -> None:
        """What one counter gained of what another did; by default of the time, in seconds."""
        self._gained(name, part, self._time if whole is None else whole, "share", 1.0)

    def _gained(self, name: str, part: float, whole: float, unit: str, full: float | None) -> None:
        before, self._now[name] = self._before.get(name), (part, whole)
        value = math.nan
        if before is not None and part >= before[0] and whole > before[1]:
            value = (part - before[0]) / (whole - before[1])
            value = min(value, 1.0) if unit == "share" else value
        self.gauge(name, value, unit, full)


class Files:
    """Small files below a root that are read again and again, through descriptors that stay open."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root
        self._open: dict[str, int] = {}

    def text(self, path: str) -> str:
        """The content of a file, at most 4 MiB of it; "" where it cannot be read."""
        try:
            if path not in self._open:
                self._open[path] = os.open(self.root / path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            parts, size = [], 0
            while size < _FILE_BYTES and (part := os.pread(self._open[path], _CHUNK_BYTES, size)):
                parts.append(part)
                size += len(part)
            return b"".join(parts).decode("utf-8", "replace")
        except OSError:
            self._forget(path)
            return ""

    def once(self, path: str) -> str:
        """The same through a descriptor that is closed again, for what there may be many of."""
        text = self.text(path)
        self._forget(path)
        return text

    def names(self, path: str) -> list[str]:
        """The names in a directory, sorted; none where it cannot be read."""
        try:
            return sorted(os.listdir(self.root / path))
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        return (self.root / path).exists()

    def number(self, path: str) -> int | None:
        """The whole number that is all of a file, read once; None where there is none, or it is negative."""
        try:
            text = (self.root / path).read_text().strip()
        except (OSError, ValueError):
            return None
        return int(text) if text.isdecimal() else None

    def close(self) -> None:
        for path in list(self._open):
            self._forget(path)

    def _forget(self, path: str) -> None:
        descriptor = self._open.pop(path, None)
        if descriptor is not None:
            os.close(descriptor)


# --- The texts of /proc and of control groups as numbers.
# Each function takes the text of one file, and leaves out what it does not understand: kernels add fields and lines,
# CPUs and disks come and go, and a file may be empty. Counters are as the kernel gives them: they count from boot, or
# from the moment when a device appeared, so a later value may be smaller.
#
# Formats: proc(5); Linux documentation "I/O statistics fields", "Control Group v2", "PSI"; nfsstat's mountstats; Lustre
# Operations Manual, "llite".
_STACKED = re.compile(r"dm-\d+|md\d+")
_SECTOR_BYTES = 512  # in /proc/diskstats, of any device
_TICKS = 8  # user nice system idle iowait irq softirq steal; the guest's ticks that follow are part of user's


class CpuTimes(NamedTuple):
    """Clock ticks of one CPU. busy: neither idle nor taken by the hypervisor (steal)."""

    busy: int
    iowait: int
    steal: int
    total: int


class DiskCounters(NamedTuple):
    """number: "major:minor". busy: seconds in which a request was under way."""

    number: str
    read_bytes: int
    written_bytes: int
    busy: float


def cpu_times(text: str) -> dict[int, CpuTimes]:
    """/proc/stat: of each CPU that is online."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("cpu"):
            break  # all that follows is not about single CPUs, and may be long
        name, *words = line.split()
        ticks = _whole(words[:_TICKS])
        if name[3:].isdecimal() and len(ticks) >= 4:
            user, nice, system, idle, iowait, irq, softirq, steal = ticks + [0] * (_TICKS - len(ticks))
            busy = user + nice + system + irq + softirq
            found[int(name[3:])] = CpuTimes(busy, iowait, steal, busy + idle + iowait + steal)
    return found


def meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo: bytes by name."""
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdecimal():
            found[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return found


def disk_counters(text: str) -> dict[str, DiskCounters]:
    """/proc/diskstats: of each device and partition. Partitions of old kernels, with four counters, are left out."""
    found = {}
    for line in text.splitlines():
        words = line.split()
        numbers = _whole(words[3:14])
        if len(numbers) == 11:
            number = ":".join(words[:2])
            found[words[2]] = DiskCounters(
                number, numbers[2] * _SECTOR_BYTES, numbers[6] * _SECTOR_BYTES, numbers[9] / 1000
            )
    return found


def is_stacked(name: str) -> bool:
    """Whether a disk of this name is made of others, as device-mapper and RAID make them."""
    return _STACKED.fullmatch(name) is not None


def net_counters(text: str) -> dict[str, tuple[int, int]]:
    """/proc/net/dev: bytes (received, sent) by interface."""
    found = {}
    for line in text.splitlines():
        name, colon, rest = line.rpartition(":")  # some kernels put no space after it
        numbers = _whole(rest.split())
        if colon and len(numbers) >= 9:
            found[name.strip()] = numbers[0], numbers[8]
    return found


def pressure(text: str) -> dict[str, float]:
    """A pressure file: seconds in which "some" or all ("full") tasks waited."""
    found = {}
    for line in text.splitlines():
        kind, *words = line.split()
        totals = [word[6:] for word in words if word.startswith("total=") and word[6:].isdecimal()]
        if totals:
            found[kind] = int(totals[0]) / 1e6
    return found


def nfs_counters(text: str) -> dict[str, tuple[int, int]]:
    """/proc/self/mountstats: bytes (read from, written to) the server by mount point, of NFS."""
    found, mount = {}, None
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["device"]:
            is_nfs = len(words) >= 8 and words[6] == "fstype" and words[7] in ("nfs", "nfs4")
            mount = words[4] if is_nfs else None
        elif words[:1] == ["bytes:"] and mount is not None:
            numbers = _whole(words[1:])
            if len(numbers) >= 6:
                found[mount] = numbers[4], numbers[5]
    return found


def lustre_counters(text: str) -> tuple[int, int] | None:
    """llite/*/stats of Lustre: bytes (read, written) by programs, from its cache or not; None without such lines."""
    sums = {}
    for line in text.splitlines():
        words = line.split()  # name, count, "samples", "[bytes]", min, max, sum
        if len(words) >= 7 and words[0] in ("read_bytes", "write_bytes") and words[6].isdecimal():
            sums[words[0]] = int(words[6])
    return (sums.get("read_bytes", 0), sums.get("write_bytes", 0)) if sums else None


def cgroup_disks(text: str) -> dict[str, tuple[int, int]]:
    """io.stat (v2) or blkio.throttle.io_service_bytes (v1): bytes (read, written) by "major:minor"."""
    found: dict[str, tuple[int, int]] = {}
    for line in text.splitlines():
        number, *words = line.split()
        if ":" not in number:
            continue
        read, written = found.get(number, (0, 0))
        if len(words) == 2 and words[1].isdecimal():  # v1: a line for each of Read, Write, Sync, …
            read, written = (int(words[1]) if words[0] == "Read" else read), written
            written = int(words[1]) if words[0] == "Write" else written
        else:
            values = dict(word.partition("=")[::2] for word in words)
            read, written = (
                _number(values.get(name, ""), old) for name, old in (("rbytes", read), ("wbytes", written))
            )
        found[number] = read, written
    return found


def key_values(text: str) -> dict[str, int]:
    """Lines of a name and a whole number, with or without a colon: cpu.stat, memory.stat, /proc/PID/io."""
    words = (line.replace(":", " ", 1).split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdecimal()}


def process_times(text: str) -> tuple[int, int] | None:
    """/proc/PID/stat: clock ticks (on a CPU, at which it began); None where it cannot be read.

    The name of a program may have spaces and brackets, so fields are counted from the last bracket.
    """
    numbers = text.rpartition(")")[2].split()
    ticks = _whole(numbers[11:13] + numbers[19:20])
    return (ticks[0] + ticks[1], ticks[2]) if len(ticks) == 3 else None


def _whole(words: list[str]) -> list[int]:
    """The numbers before the first word that is not one."""
    if "".join(words).isdecimal():
        return [int(word) for word in words]
    found = []
    for word in words:
        if not word.isdecimal():
            break
        found.append(int(word))
    return found


def _number(word: str, default: int) -> int:
    return int(word) if word.isdecimal() else default


# --- What the job itself uses: its control group and its processes, apart from what others do on the machine.
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


# --- GPUs for a record: what their vendors' libraries say, as values of a sample.
# A vendor's library is asked by one file each, which gives `Gpu`s: functions that give a number, or raise. A function
# that raises gives no value in this sample; one that never gave a value is dropped after the first samples, since many
# GPUs lack one or the other (a MIG slice has no utilisation, some boards have no power meter).
_TRIES = 3


@dataclass(frozen=True)
class Gauge:
    """Something that a GPU can be asked. read: raises where it has no answer. slow: takes milliseconds, so GPUs are
    asked in turns."""

    what: str
    unit: str
    read: Callable[[], float]
    full: float | None = None
    slow: bool = False


@dataclass(frozen=True)
class Gpu:
    """number: as its vendor's tools count. uuid: "" where it has none."""

    number: int
    gauges: Sequence[Gauge]
    uuid: str = ""


@dataclass
class _State:
    gpu: Gpu
    failures: dict[str, int] = field(default_factory=dict)
    known: dict[str, float] = field(default_factory=dict)


def visible_devices(gpus: Sequence[Gpu], environ: Mapping[str, str] | None = None) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES or its counterpart of ROCm leaves to this job; all of them without it.

    All of them, too, if it names something else than numbers and the beginnings of UUIDs, as slices of GPUs.
    """
    env = os.environ if environ is None else environ
    names = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    text = next((env[name] for name in names if env.get(name)), "")
    chosen = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        fits = [gpu for gpu in gpus if (word.isdecimal() and gpu.number == int(word))
                or (not word.isdecimal() and gpu.uuid.startswith(word))]  # fmt: skip
        if len(fits) != 1:
            return list(gpus)
        chosen += fits
    return chosen or list(gpus)


class GpuProbe:
    """Reads all gauges of all GPUs, slow ones of one GPU a sample; the others keep their last value."""

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self._asked = [_State(gpu) for gpu in gpus]
        self._count = 0

    def __call__(self, readings: Readings) -> None:
        for number, asked in enumerate(self._asked):
            for gauge in asked.gpu.gauges:
                if gauge.what in asked.known or asked.failures.get(gauge.what, 0) < _TRIES:
                    turn = not gauge.slow or self._count % len(self._asked) == number
                    value = self._read(asked, gauge) if turn else asked.known.get(gauge.what, math.nan)
                    readings.gauge(f"gpu{asked.gpu.number} {gauge.what}", value, gauge.unit, gauge.full)
        self._count += 1

    @staticmethod
    def _read(asked: _State, gauge: Gauge) -> float:
        try:
            value = float(gauge.read())
        except Exception:
            asked.failures[gauge.what] = asked.failures.get(gauge.what, 0) + 1
            return math.nan
        asked.known[gauge.what] = value
        return value


# --- NVIDIA's GPUs by NVML, through the package nvidia-ml-py (module `pynvml`).
# Units as in the NVML API Reference: utilisation in percent of the last sampling period (1/6 s to 1 s), memory in
# bytes, power in milliwatts, PCIe throughput in KB/s, measured for 20 ms, in which the call waits.
def open_nvidia() -> tuple[list[Gpu], Callable[[], None]]:
    """The GPUs that this job may use, and what closes the library. Raises MissingExtraError, PipelineError."""
    try:
        import pynvml
    except ImportError as error:
        raise MissingExtraError("nvidia-ml-py", "gpu-monitor", "the utilisation of NVIDIA's GPUs") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise PipelineError(f"NVML cannot be used: {error}") from error
    try:
        gpus = [_gpu(pynvml, number) for number in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        pynvml.nvmlShutdown()
        raise PipelineError(f"NVML cannot list the GPUs: {error}") from error
    return visible_devices(gpus), partial(_close, pynvml)


def _gpu(nvml: Any, number: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(number)
    gauges = [
        Gauge("busy", "share", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100, 1.0),
        Gauge("memory", "bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used, _or_none(
            nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total)),
        Gauge("power", "watts", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000, _or_none(
            nvml, lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000)),
        Gauge("decoder", "share", lambda: nvml.nvmlDeviceGetDecoderUtilization(handle)[0] / 100, 1.0, True),
        Gauge("jpeg decoder", "share", lambda: nvml.nvmlDeviceGetJpgUtilization(handle)[0] / 100, 1.0, True),
    ]  # fmt: skip
    for what, counter in (("in", nvml.NVML_PCIE_UTIL_RX_BYTES), ("out", nvml.NVML_PCIE_UTIL_TX_BYTES)):
        read = partial(nvml.nvmlDeviceGetPcieThroughput, handle, counter)
        gauges.append(Gauge(what, "bytes/s", lambda read=read: read() * 1000, slow=True))  # type: ignore[misc]
    return Gpu(number, gauges, _or_none(nvml, lambda: nvml.nvmlDeviceGetUUID(handle)) or "")


def _or_none(nvml: Any, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except nvml.NVMLError:
        return None


def _close(nvml: Any) -> None:
    try:
        nvml.nvmlShutdown()
    except nvml.NVMLError:  # the driver was unloaded
        pass


# --- AMD's GPUs by AMD SMI, through the package amdsmi, of the same version as the ROCm installation.
# Units as in the AMD SMI Python API reference: activity in percent, memory in MB (of 2^20 bytes), power in watts, PCIe
# bandwidth in Mb/s. What a GPU cannot say is the text "N/A", the largest value of its type, or an exception. Importing
# amdsmi without its library prints to stdout and raises KeyError.
_MOST = {"percent": 100, "megabytes": 1 << 24, "watts": 10_000, "megabits": 1 << 24}


def open_amd() -> tuple[list[Gpu], Callable[[], None]]:
    """The GPUs that this job may use, and what closes the library. Raises MissingExtraError, PipelineError."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            import amdsmi
    except ImportError as error:
        raise MissingExtraError("amdsmi", "gpu-monitor-amd", "the utilisation of AMD's GPUs") from error
    except (KeyError, OSError, AttributeError) as error:
        raise PipelineError(f"amdsmi does not find a libamd_smi.so that fits it: {error!r}") from error
    try:
        amdsmi.amdsmi_init()
        handles = amdsmi.amdsmi_get_processor_handles()
    except amdsmi.AmdSmiException as error:
        raise PipelineError(f"AMD SMI cannot be used: {' '.join(str(error).split())}") from error
    gpus = [_gpu_amd(amdsmi, handle, number) for number, handle in enumerate(handles)]
    return visible_devices(gpus), amdsmi.amdsmi_shut_down


def _gpu_amd(smi: Any, handle: Any, number: int) -> Gpu:
    def power() -> float:
        found = smi.amdsmi_get_power_info(handle)
        for name in ("current_socket_power", "average_socket_power", "socket_power"):  # each board has one of them
            with contextlib.suppress(ValueError):
                return _number_amd(found.get(name), "watts")
        raise ValueError("no power meter")

    def memory(name: str) -> float:
        return _number_amd(smi.amdsmi_get_gpu_vram_usage(handle)[name], "megabytes") * (1 << 20)

    def busy() -> float:
        return _number_amd(smi.amdsmi_get_gpu_activity(handle)["gfx_activity"], "percent") / 100

    def link() -> float:
        found = smi.amdsmi_get_pcie_info(handle)["pcie_metric"]["pcie_bandwidth"]
        return _number_amd(found, "megabits") * 1e6 / 8

    try:
        total: float | None = memory("vram_total")
    except (smi.AmdSmiException, ValueError, KeyError):
        total = None
    try:
        uuid = str(smi.amdsmi_get_gpu_device_uuid(handle))
    except (smi.AmdSmiException, AttributeError):
        uuid = ""
    gauges = [
        Gauge("busy", "share", busy, 1.0),
        Gauge("memory", "bytes", lambda: memory("vram_used"), total),
        Gauge("power", "watts", power),
        Gauge("pcie", "bytes/s", link),
    ]
    return Gpu(number, gauges, uuid)


def _number_amd(value: Any, unit: str) -> float:
    """A plausible number. Raises ValueError for "N/A" and for what stands for it."""
    if not isinstance(value, (int, float)) or not 0 <= value <= _MOST[unit]:
        raise ValueError(f"{value!r}: expected {unit}")
    return float(value)


# --- The probes of a machine, opened and closed together: /proc, control groups, and GPUs.
_DRIVERS = (("proc/driver/nvidia", open_nvidia), ("sys/module/amdgpu", open_amd))


class Machine:
    """What can be sampled below `root`.

    probes: none where there is no /proc/stat. note: on GPUs that cannot be read, "" for none.
    """

    def __init__(self, root: Path, process: int) -> None:
        self._files = Files(root)
        self._close: Callable[[], None] = lambda: None
        self.note = ""
        self.probes: list[Probe] = []
        if not self._files.text("proc/stat"):
            return
        cpus = os.sched_getaffinity(0) if root == Path("/") else None
        self._open_gpus(root)
        self.probes += machine_probes(self._files, process, cpus)

    def close(self) -> None:
        self._files.close()
        self._close()

    def _open_gpus(self, root: Path) -> None:
        for driver, open_gpus in _DRIVERS:
            if not (root / driver).exists():
                continue
            try:
                gpus, self._close = open_gpus()
            except MissingExtraError as error:
                self.note = str(error)
            except Exception as error:  # a library that does not fit its driver may raise anything
                self.note = f"the GPUs cannot be read: {type(error).__name__}: {error}"
            else:
                self.probes.append(GpuProbe(gpus))
                return
