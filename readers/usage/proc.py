"""The texts of /proc and of control groups as numbers.

Each function takes the text of one file, and leaves out what it does not understand: kernels add fields and lines, CPUs
and disks come and go, and a file may be empty. Counters are as the kernel gives them: they count from boot, or from the
moment when a device appeared, so a later value may be smaller.

Formats: proc(5); Linux documentation "I/O statistics fields", "Control Group v2", "PSI"; nfsstat's mountstats; Lustre
Operations Manual, "llite".
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = [
    "CpuTimes",
    "DiskCounters",
    "cgroup_disks",
    "cpu_times",
    "disk_counters",
    "is_stacked",
    "key_values",
    "lustre_counters",
    "meminfo",
    "net_counters",
    "nfs_counters",
    "pressure",
    "process_times",
]

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
