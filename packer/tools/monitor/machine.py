"""The probes of a machine for each sample: by psutil, by the libraries of GPU vendors, and from /proc and /sys.

A probe puts its values into `Readings`. Values that are missing on this machine, or not readable by this user, are left
out. Virtual devices are left out if they would count bytes twice: partitions, device-mapper and RAID devices on top of
their disks, bonds and bridges on top of their network cards.

Formats of the files that psutil does not read: Linux documentation "Control Group v2" and "PSI"; nfsstat's mountstats;
Lustre Operations Manual, "llite".
"""

from __future__ import annotations

import contextlib
import glob
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import psutil

from cache.errors import MissingExtraError, SourceError
from cache.node import cgroup_folders
from cache.system import affinity
from packer.tools.monitor.record import Series

__all__ = ["CpuSeconds", "Machine", "Readings", "cpu_seconds"]

ROOT = Path("/")  # directory with proc and sys


class Readings:
    """The values of one sample, from gauges, and from the increase of counters since the previous sample.

    A counter that decreased, because it wrapped or its device was removed and added again, has no value in the sample.
    """

    def __init__(self) -> None:
        self.series: dict[str, Series] = {}
        self.values: dict[str, float] = {}
        self._before: dict[str, tuple[float, float]] = {}
        self._now: dict[str, tuple[float, float]] = {}
        self._time = 0.0

    def begin(self, now: float) -> None:
        """Begin a sample at a time in seconds."""
        self._time, self.values = now, {}
        self._before, self._now = self._now, {}

    def gauge(self, name: str, value: float, unit: str = "1", full: float | None = None) -> None:
        if name not in self.series or self.series[name].full is None:
            self.series[name] = Series(name[:200], unit, full if full is None or full > 0 else None)
        self.values[name] = value

    def rate(self, name: str, counter: float, unit: str = "bytes/s", full: float | None = None) -> None:
        """Set a rate: the increase of a counter per second."""
        self._gained(name, counter, self._time, unit, full)

    def share(self, name: str, part: float, whole: float | None = None) -> None:
        """Set a share: the increase of a counter over that of another, by default over the time in seconds."""
        self._gained(name, part, self._time if whole is None else whole, "share", 1.0)

    def _gained(self, name: str, part: float, whole: float, unit: str, full: float | None) -> None:
        before, self._now[name] = self._before.get(name), (part, whole)
        value = math.nan
        if before is not None and part >= before[0] and whole > before[1]:
            value = (part - before[0]) / (whole - before[1])
            value = min(value, 1.0) if unit == "share" else value
        self.gauge(name, value, unit, full)


Probe: TypeAlias = Callable[[Readings], None]


class Machine:
    """The probes of this machine, by subject. process: the first process of the job.

    note: the reason why GPUs cannot be read, else "". Raises SourceError without /proc/stat.
    """

    def __init__(self, process: int) -> None:
        if not _exists("proc/stat"):
            raise SourceError(f"nothing to sample: no {ROOT / 'proc/stat'} here; utilisation is read on Linux only")
        self.note, self._close = "", contextlib.ExitStack()
        self.probes: dict[str, Probe] = {
            "CPUs": _cpus, "memory": _memory, "disks": _disks, "network": _network, "file systems": _file_systems,
            "pressure": _pressure, "the control group": _ControlGroup(), "processes": _Processes(process),
        }  # fmt: skip
        for driver, open_gpus in (("proc/driver/nvidia", _nvidia_gpus), ("sys/module/amdgpu", _amd_gpus)):
            if not (ROOT / driver).exists():
                continue
            try:
                self.probes = {"GPUs": _Gpus(_visible(open_gpus(self._close))), **self.probes}
                return
            except MissingExtraError as error:
                self.note = str(error)
            except Exception as error:  # a library that does not fit its driver may raise anything
                self.note = f"the GPUs cannot be read: {type(error).__name__}: {' '.join(str(error).split())}"

    def close(self) -> None:
        with suppress(Exception):  # the driver may have been unloaded
            self._close.close()


# --- The machine.
@dataclass(frozen=True)
class CpuSeconds:
    """CPU seconds since boot. busy: neither idle nor waiting for I/O nor taken by the hypervisor (steal)."""

    busy: float = 0.0
    iowait: float = 0.0
    steal: float = 0.0
    total: float = 0.0


def cpu_seconds() -> dict[int, CpuSeconds]:
    """CPU seconds of each online CPU, by its number."""
    cpus = []
    for cpu in psutil.cpu_times(percpu=True):
        steal = getattr(cpu, "steal", 0.0)
        total = cpu.idle + cpu.iowait + steal + (busy := cpu.user + cpu.nice + cpu.system + cpu.irq + cpu.softirq)
        cpus.append(CpuSeconds(busy, cpu.iowait, steal, total))
    ranges = [part.partition("-") for part in _text("sys/devices/system/cpu/online").strip().split(",") if part]
    numbers = [number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)]
    return dict(zip(numbers if len(numbers) == len(cpus) else range(len(cpus)), cpus, strict=True))


def _cpus(readings: Readings) -> None:
    """Read busy, iowait and steal of the CPUs that this process may use, and busy of each CPU of the machine.

    The iowait of a single CPU is meaningless, because a waiting process is on no CPU (proc(5)).
    """
    cpus, own = cpu_seconds(), affinity()
    usable = [cpu for number, cpu in cpus.items() if number in own]
    total = sum(cpu.total for cpu in usable)
    for kind in ("busy", "iowait", "steal"):
        readings.share(f"cpu {kind}", sum(getattr(cpu, kind) for cpu in usable), total)
    for number, cpu in cpus.items():
        readings.share(f"cpu{number} busy", cpu.busy, cpu.total)


def _memory(readings: Readings) -> None:
    """Read "memory used" of the machine, without page cache, and "page cache", without tmpfs."""
    memory = psutil.virtual_memory()
    readings.gauge("memory used", memory.total - memory.available, "bytes", memory.total)
    readings.gauge("page cache", max(0, memory.cached + memory.buffers - memory.shared), "bytes", memory.total)


def _disks(readings: Readings) -> None:
    """Read bytes and busy time of whole physical disks."""
    for name, disk in psutil.disk_io_counters(perdisk=True, nowrap=False).items():
        if _exists(f"sys/block/{name}/device"):
            readings.rate(f"{name} read", disk.read_bytes)
            readings.rate(f"{name} write", disk.write_bytes)
            readings.share(f"{name} busy", disk.busy_time / 1000)


def _network(readings: Readings) -> None:
    """Read bytes of network cards; without any, as in a container, of interfaces that are not on top of others.

    InfiniBand is counted separately, because RDMA reads, as of Lustre, bypass interfaces. Its ports count words of 4
    bytes.
    """
    counters, links = psutil.net_io_counters(pernic=True, nowrap=False), psutil.net_if_stats()
    cards = [name for name in counters if name != "lo"]
    kinds = ("bonding", "bridge", "team")
    plain = (name for name in cards if not any(_exists(f"sys/class/net/{name}/{kind}") for kind in kinds))
    for name in [name for name in cards if _exists(f"sys/class/net/{name}/device")] or plain:
        full = links[name].speed * 1e6 / 8 if name in links else None
        readings.rate(f"{name} in", counters[name].bytes_recv, full=full)
        readings.rate(f"{name} out", counters[name].bytes_sent, full=full)
    for port in _matching("sys/class/infiniband/*/ports/*/counters"):
        for direction, counter in (("in", "port_rcv_data"), ("out", "port_xmit_data")):
            if (words := _number(f"{port}/{counter}")) is not None:
                readings.rate(f"{port.split('/')[-4]} {direction}", 4 * words)


def _file_systems(readings: Readings) -> None:
    """Read bytes of NFS mounts, as sent by servers, and of Lustre, as read by programs, including from its cache."""
    mount = ""
    for words in _lines("proc/self/mountstats"):
        if words[0] == "device":
            mount = words[4] if words[7:8] in (["nfs"], ["nfs4"]) else ""
        elif words[0] == "bytes:" and mount:
            readings.rate(f"nfs {mount} read", int(words[5]))
            readings.rate(f"nfs {mount} write", int(words[6]))
    for folder in ("proc/fs/lustre/llite", "sys/kernel/debug/lustre/llite"):
        for file in _matching(f"{folder}/*/stats"):  # scratch-ffff8f0c12345678: file system and kernel address
            mounted = file.split("/")[-2]
            name = mounted.rpartition("-")[0] or mounted
            for words in _lines(file):
                if words[0] in ("read_bytes", "write_bytes") and len(words) > 6:
                    readings.rate(f"lustre {name} {words[0].removesuffix('_bytes')}", int(words[6]))


def _pressure(readings: Readings) -> None:
    """Read the shares of time in which some task waited for a CPU, for I/O or for memory."""
    for resource in ("cpu", "io", "memory"):
        for words in _lines(f"proc/pressure/{resource}"):
            if words[0] == "some":
                readings.share(f"{resource} pressure", int(words[-1].removeprefix("total=")) / 1e6)


def _exists(path: str) -> bool:
    return os.path.exists(f"{ROOT}/{path}")


def _matching(pattern: str) -> list[str]:
    """The matching paths below `ROOT`, relative to `ROOT`."""
    return glob.glob(pattern, root_dir=ROOT)


def _text(path: str) -> str:
    """The content of a file below `ROOT`; "" if it cannot be read."""
    try:
        with open(f"{ROOT}/{path}", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _lines(path: str) -> Iterator[list[str]]:
    """The words of each line that is not blank."""
    return filter(None, map(str.split, _text(path).splitlines()))


def _number(path: str) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


# --- The job: its control group and its processes, without other work on the machine.
class _ControlGroup:
    """Reads memory, CPU time, throttling and disk bytes of the control group of this process, v1 or v2.

    "job memory" excludes the page cache of files, which the kernel drops before it kills processes.
    """

    def __init__(self) -> None:
        membership, limits = _text("proc/self/cgroup"), list[int]()
        folders = [
            str(folder.relative_to(ROOT))
            for controller in ("cpu", "cpuacct", "memory", "blkio")
            for folder in cgroup_folders(ROOT / "sys/fs/cgroup", membership, (controller,))
        ]
        for folder in folders:
            most = (_number(f"{folder}/{name}") for name in ("memory.max", "memory.limit_in_bytes"))
            limits += [limit for limit in most if limit is not None and limit < 1 << 60]  # v1 has no "max"
        self._limit = min(limits, default=None)
        files = ("cpu.stat", "cpuacct.usage", "memory.current", "memory.usage_in_bytes", "memory.stat", "io.stat",
                 "blkio.throttle.io_service_bytes")  # fmt: skip
        self._paths = {
            name: next((f"{folder}/{name}" for folder in folders if _exists(f"{folder}/{name}")), "") for name in files
        }
        self._disks = {_text(f"{os.path.dirname(path)}/dev").strip() for path in _matching("sys/block/*/device")}

    def __call__(self, readings: Readings) -> None:
        used = _number(self._paths["memory.current"]) or _number(self._paths["memory.usage_in_bytes"])
        if used is not None:
            stat = self._values("memory.stat")  # in v1, only "total_…" includes subgroups
            cache = sum(stat.get(f"total_{kind}", stat.get(kind, 0)) for kind in ("inactive_file", "active_file"))
            readings.gauge("job memory", max(0, used - cache), "bytes", self._limit)
        cpu, nanoseconds = self._values("cpu.stat"), _number(self._paths["cpuacct.usage"])
        if nanoseconds is not None or "usage_usec" in cpu:
            seconds = cpu["usage_usec"] / 1e6 if nanoseconds is None else nanoseconds / 1e9
            readings.rate("job cpus", seconds, "cores")
        if cpu.get("nr_periods"):  # there is a quota
            readings.share("job throttled", cpu.get("throttled_usec", 0) / 1e6 + cpu.get("throttled_time", 0) / 1e9)
        disks = list(self._disk_bytes())
        for direction in ("read", "write"):
            if disks:
                readings.rate(f"job disk {direction}", sum(count for kind, count in disks if kind == direction))

    def _values(self, name: str) -> dict[str, int]:
        return {words[0]: int(words[1]) for words in _lines(self._paths[name]) if words[1:] and words[1].isdecimal()}

    def _disk_bytes(self) -> Iterator[tuple[str, int]]:
        """Yield ("read" or "write", bytes) of physical disks. v2 has a line per disk; v1 also per Read, Write, …"""
        names = {"rbytes": "read", "wbytes": "write", "Read": "read", "Write": "write"}
        for file in ("io.stat", "blkio.throttle.io_service_bytes"):
            for number, *words in _lines(self._paths[file]):
                pairs = [word.split("=") for word in words] if file == "io.stat" else [words]
                for name, count in (pair for pair in pairs if number in self._disks and len(pair) == 2):
                    if name in names:
                        yield names[name], int(count)


class _Processes:
    """Reads the CPU time and the bytes read of a process and its descendants, from when they are first found.

    "processes read" counts all bytes read, including from the page cache and from pipes. "processes storage" counts
    bytes that the kernel fetched from storage. Processes that begin and end between two searches are missed.
    """

    EVERY = 4  # samples between two searches for processes
    FIRST = 20  # initial samples with a search each, while workers start
    MOST = 256

    def __init__(self, first: int) -> None:
        self._first, self._count = first, 0
        self._processes: list[Any] = []
        self._before: dict[Any, tuple[float, int, int]] = {}
        self._gained = [0.0, 0.0, 0.0]

    def __call__(self, readings: Readings) -> None:
        if self._count < self.FIRST or self._count % self.EVERY == 0:
            self._processes = list(self._tree())
        self._count += 1
        now = {}
        for process in self._processes:
            with suppress(psutil.Error), process.oneshot():
                cpu, read, fetched = process.cpu_times(), 0, 0
                with suppress(psutil.AccessDenied):
                    counters = process.io_counters()
                    read, fetched = counters.read_chars, counters.read_bytes
                now[process] = cpu.user + cpu.system, read, fetched
        for process, values in now.items():
            for number, (new, old) in enumerate(zip(values, self._before.get(process, values), strict=True)):
                self._gained[number] += max(0, new - old)
        self._before = now
        if now:
            readings.rate("processes cpus", self._gained[0], "cores")
            readings.rate("processes read", self._gained[1])
            readings.rate("processes storage", self._gained[2])

    def _tree(self) -> Iterator[Any]:
        """Yield the processes; only the first one if the kernel lacks CONFIG_PROC_CHILDREN.

        `psutil.Process.children` would read a file of each process of the machine: 0.1 s with thousands of them.
        """
        numbers = [self._first]
        for number in numbers:
            for file in _matching(f"proc/{number}/task/*/children"):
                numbers += map(int, _text(file).split()[: self.MOST - len(numbers)])
            with suppress(psutil.Error):
                yield psutil.Process(number)


# --- GPUs, by the libraries of their vendors.
@dataclass
class _Gauge:
    """A value of a GPU. read: raises if there is no value. slow: whether reading takes milliseconds.

    A gauge without any value is dropped after `tries` failed reads: a MIG slice has no utilisation, and some boards
    have no power meter.
    """

    what: str
    unit: str
    read: Callable[[], float]
    full: float | None = None
    slow: bool = False
    value: float | None = None
    tries: int = 3


@dataclass
class _Gpu:
    """A GPU and its gauges. number: its number in the vendor's tools. uuid: "" if unknown."""

    number: int
    uuid: str
    gauges: list[_Gauge] = field(default_factory=list)


class _Gpus:
    """Reads all gauges of all GPUs, but slow gauges of only one GPU per sample; those of others keep their value."""

    def __init__(self, gpus: Sequence[_Gpu]) -> None:
        self._gpus, self._count = gpus, 0

    def __call__(self, readings: Readings) -> None:
        for place, gpu in enumerate(self._gpus):
            for gauge in gpu.gauges:
                value = math.nan if gauge.value is None else gauge.value
                if not gauge.slow or self._count % len(self._gpus) == place:
                    try:
                        value = gauge.value = float(gauge.read())
                    except Exception:
                        value, gauge.tries = math.nan, gauge.tries - 1
                readings.gauge(f"gpu{gpu.number} {gauge.what}", value, gauge.unit, gauge.full)
            gpu.gauges = [gauge for gauge in gpu.gauges if gauge.tries > 0 or gauge.value is not None]
        self._count += 1


def _visible(gpus: Sequence[_Gpu]) -> Sequence[_Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES, or its counterpart of ROCm, makes visible to this job.

    All GPUs if it is not set, or names anything other than numbers and beginnings of UUIDs, such as slices of GPUs.
    """
    names = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    text, chosen = next(filter(None, map(os.environ.get, names)), ""), list[_Gpu]()
    for word in filter(None, map(str.strip, text.split(","))):
        fits = [gpu for gpu in gpus if (str(gpu.number) == word if word.isdecimal() else gpu.uuid.startswith(word))]
        if len(fits) != 1:
            return gpus
        chosen += fits
    return chosen or gpus


def _or_none(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception:
        return None


def _nvidia_gpus(close: contextlib.ExitStack) -> list[_Gpu]:
    """The GPUs of NVML, through the package nvidia-ml-py.

    Units are from the NVML API Reference: utilisation in percent of the last sampling period, memory in bytes, power in
    milliwatts, PCIe throughput in KB/s, measured for 20 ms.
    """
    try:
        import pynvml as nvml
    except ImportError as error:
        raise MissingExtraError("nvidia-ml-py", "gpu-monitor", "the utilisation of NVIDIA's GPUs") from error
    nvml.nvmlInit()
    close.callback(nvml.nvmlShutdown)

    def gpu(number: int) -> _Gpu:
        handle = nvml.nvmlDeviceGetHandleByIndex(number)

        def ask(query: str, *arguments: Any) -> Any:
            return getattr(nvml, f"nvmlDeviceGet{query}")(handle, *arguments)

        def received(counter: int) -> Callable[[], float]:
            return lambda: ask("PcieThroughput", counter) * 1000

        memory, power = (_or_none(lambda: ask("MemoryInfo").total), _or_none(lambda: ask("EnforcedPowerLimit") / 1000))
        gauges = [
            _Gauge("busy", "share", lambda: ask("UtilizationRates").gpu / 100, 1.0),
            _Gauge("memory", "bytes", lambda: ask("MemoryInfo").used, memory),
            _Gauge("power", "watts", lambda: ask("PowerUsage") / 1000, power),
            _Gauge("decoder", "share", lambda: ask("DecoderUtilization")[0] / 100, 1.0, slow=True),
            _Gauge("jpeg decoder", "share", lambda: ask("JpgUtilization")[0] / 100, 1.0, slow=True),
            _Gauge("in", "bytes/s", received(nvml.NVML_PCIE_UTIL_RX_BYTES), slow=True),
            _Gauge("out", "bytes/s", received(nvml.NVML_PCIE_UTIL_TX_BYTES), slow=True),
        ]
        return _Gpu(number, _or_none(lambda: ask("UUID")) or "", gauges)

    return list(map(gpu, range(nvml.nvmlDeviceGetCount())))


def _amd_gpus(close: contextlib.ExitStack) -> list[_Gpu]:
    """The GPUs of AMD SMI, through the package amdsmi, in the version of the ROCm installation.

    Units are from its Python API reference: activity in percent, memory in MB (2^20 bytes), power in watts, PCIe
    bandwidth in Mb/s. Importing amdsmi without its library prints to stdout and raises KeyError.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            import amdsmi as smi
    except ImportError as error:
        raise MissingExtraError("amdsmi", "gpu-monitor-amd", "the utilisation of AMD's GPUs") from error
    smi.amdsmi_init()
    close.callback(smi.amdsmi_shut_down)

    def gpu(number: int, handle: Any) -> _Gpu:
        def ask(query: str, names: Sequence[str], most: float) -> float:
            """The first value that the board has; "N/A" or the largest value of the type means that it has none."""
            readings = getattr(smi, f"amdsmi_get_{query}")(handle)
            values = (readings.get("pcie_metric", readings).get(name) for name in names)
            return float(next(value for value in values if isinstance(value, (int, float)) and 0 <= value <= most))

        def memory(name: str) -> float:
            return ask("gpu_vram_usage", [name], 1 << 24) * (1 << 20)

        power = ("current_socket_power", "average_socket_power", "socket_power")
        gauges = [
            _Gauge("busy", "share", lambda: ask("gpu_activity", ["gfx_activity"], 100) / 100, 1.0),
            _Gauge("memory", "bytes", lambda: memory("vram_used"), _or_none(lambda: memory("vram_total"))),
            _Gauge("power", "watts", lambda: ask("power_info", power, 10_000)),
            _Gauge("pcie", "bytes/s", lambda: ask("pcie_info", ["pcie_bandwidth"], 1 << 24) * 1e6 / 8),
        ]
        return _Gpu(number, str(_or_none(lambda: smi.amdsmi_get_gpu_device_uuid(handle)) or ""), gauges)

    return [gpu(number, handle) for number, handle in enumerate(smi.amdsmi_get_processor_handles())]
