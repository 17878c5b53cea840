"""What is read of a machine for each sample: CPUs, memory, disks, network, pressure, file systems.

A probe reads files below a root directory and puts what it finds into `Readings`. What a machine does not have, or does
not let this user read, is left out. Virtual devices are left out where they would count bytes twice: partitions and
device-mapper or RAID devices over the disks that they are made of, bonds and bridges over their network cards.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from readers.usage.job import Cgroup, Processes
from readers.usage.proc import (
    cpu_times,
    disk_counters,
    is_stacked,
    lustre_counters,
    meminfo,
    net_counters,
    nfs_counters,
    pressure,
)
from readers.usage.readings import Files, Probe, Readings

__all__ = ["machine_probes"]

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
