"""A fake machine for the tests of utilisation: files of /proc and /sys, which psutil reads, too, a clock, and libraries
of GPUs.

NVML is doubled below nvidia-ml-py: its own Python code runs, on a library whose functions fill ctypes values and return
codes as NVML's do. AMD SMI's package cannot be imported without its library, so its module is doubled: calls raise its
exceptions, and what a board lacks is "N/A" or the largest value of its type.
"""

from __future__ import annotations

import ctypes
import math
import types
from pathlib import Path
from typing import Any

import psutil
import pynvml
import pytest

from packer.tools.monitor import Sampler, Usage

STAT = """cpu  300 0 100 1000 60 0 0 40 7 0
cpu0 {0} 0 50 500 30 0 0 20 7 0
cpu1 {1} 0 50 500 30 0 0 20 0 0
intr 48647395 0 0 0
ctxt 106108305
"""
MEMINFO = """MemTotal:       1000 kB
MemFree:          300 kB
MemAvailable:     600 kB
Buffers:           20 kB
Cached:           250 kB
Active:           100 kB
Inactive:         100 kB
Shmem:             70 kB
HugePages_Total:       2
"""
DISKS = """   7       0 loop0 9 0 9 0 0 0 0 0 0 0 0 0 0 0 0 0 0
   8       0 sda 100 5 {0} 80 50 3 {1} 20 0 {2} 100 1 2 3 4 5 6
   8       1 sda1 100 5 {0} 80 50 3 {1} 20 0 {2} 100
   8       2 sda2 4 4 4 4
 253       0 dm-0 100 0 {0} 80 50 0 {1} 20 0 {2} 100
"""
NET = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier
    lo: 9999 1 0 0 0 0 0 0 9999 1 0 0 0 0 0 0
  eth0:{0} 1 0 0 0 0 0 0 {1} 1 0 0 0 0 0 0
 bond0: {0} 1 0 0 0 0 0 0 {1} 1 0 0 0 0 0 0
"""
NFS = """device proc mounted on /proc with fstype proc
device server:/export mounted on /data with fstype nfs4 statvers=1.1
\topts:\trw,vers=4.2,rsize=1048576
\tbytes:\t11 22 0 0 {0} {1} 3 4
\tper-op statistics
\t        NULL: 1 1 0 44 24 0 0 0 0
"""
LUSTRE = """snapshot_time             1698765432.123456789 secs.nsecs
read_bytes                45 samples [bytes] 1 4194304 {0} 999999
write_bytes               2 samples [bytes] 1 10 {1}
ioctl                     4 samples [reqs]
"""


class FakeMachine:
    """Files below `root`, and a clock that stands still until `pass_time`."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.now = root, 100.0
        self.write(stat=STAT.format(100, 200))
        cards = {name: types.SimpleNamespace(speed=1000 if name == "eth0" else 0) for name in ("lo", "eth0", "bond0")}
        monkeypatch.setattr("packer.tools.monitor.machine.ROOT", root)
        monkeypatch.setattr(psutil, "PROCFS_PATH", str(root / "proc"))
        monkeypatch.setattr(psutil, "net_if_stats", lambda: cards)

    def clock(self) -> float:
        return self.now

    def pass_time(self, seconds: float = 1.0) -> None:
        self.now += seconds

    def write(self, **files: str) -> None:
        """Files of /proc by name; "/" in it as "__"."""
        for name, text in files.items():
            self.put(f"proc/{name.replace('__', '/')}", text)

    def put(self, path: str, text: str = "") -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def folder(self, path: str) -> None:
        (self.root / path).mkdir(parents=True, exist_ok=True)


class NvmlLibrary:
    """libnvidia-ml with two boards; the second has no utilisation, no power meter and no JPEG decoder."""

    def __init__(self, *, broken: int = 0) -> None:
        self.broken = broken
        self.initialised = 0
        self.throughput_calls: list[int] = []
        self.nvmlErrorString = lambda code: b"Driver Not Loaded" if code == broken else b"Not Supported"
        self._handles: dict[int, int] = {}

    def nvmlInitWithFlags(self, flags: Any) -> int:
        self.initialised += not self.broken
        return self.broken

    def nvmlShutdown(self) -> int:
        self.initialised -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> int:
        device._obj.contents = pynvml.struct_c_nvmlDevice_t()
        self._handles[_address(device._obj)] = index.value
        return 0

    def _number(self, handle: Any) -> int:
        return int(self._handles[_address(handle)])

    def nvmlDeviceGetUtilizationRates(self, handle: Any, rates: Any) -> int:
        if self._number(handle) == 1:
            return pynvml.NVML_ERROR_NOT_SUPPORTED
        rates._obj.gpu, rates._obj.memory = 22, 5
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total, memory._obj.used = 80 << 30, (self._number(handle) + 1) << 30
        return 0

    def nvmlDeviceGetPowerUsage(self, handle: Any, milliwatts: Any) -> int:
        milliwatts._obj.value = 350_500
        return pynvml.NVML_ERROR_NOT_SUPPORTED if self._number(handle) == 1 else 0

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any, milliwatts: Any) -> int:
        milliwatts._obj.value = 700_000
        return pynvml.NVML_ERROR_NOT_SUPPORTED if self._number(handle) == 1 else 0

    def nvmlDeviceGetDecoderUtilization(self, handle: Any, share: Any, period: Any) -> int:
        share._obj.value, period._obj.value = 50, 167_000
        return 0

    def nvmlDeviceGetPcieThroughput(self, handle: Any, counter: Any, kilobytes: Any) -> int:
        self.throughput_calls.append(self._number(handle))
        kilobytes._obj.value = 1000 if counter.value == pynvml.NVML_PCIE_UTIL_RX_BYTES else 10
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, text: Any, size: Any) -> int:
        text.value = f"GPU-{self._number(handle)}abc".encode()
        return 0


def _address(device: Any) -> int:
    return int(ctypes.cast(device, ctypes.c_void_p).value or 0)


def amdsmi_module(boards: int = 2) -> types.ModuleType:
    """A module with the functions of amdsmi that are used; the second board knows nothing but its memory."""
    module: Any = types.ModuleType("amdsmi")

    class AmdSmiException(Exception):
        pass

    class Handle:
        def __init__(self, number: int) -> None:
            self.number = number

    def checked(function: Any) -> Any:
        def call(handle: Any) -> Any:
            if not isinstance(handle, Handle) or not module.initialised:
                raise AmdSmiException("Error code:\n\t32 | AMDSMI_STATUS_NOT_INIT")
            return function(handle.number)

        return call

    def init(flag: Any = None) -> None:
        module.initialised = True

    def shut_down() -> None:
        module.initialised = False

    def pcie(number: int) -> Any:
        if number:
            raise AmdSmiException("Error code:\n\t2 | AMDSMI_STATUS_NOT_SUPPORTED")
        return {"pcie_static": {}, "pcie_metric": {"pcie_bandwidth": 8000}}

    module.initialised = False
    module.AmdSmiException = AmdSmiException
    module.amdsmi_init, module.amdsmi_shut_down = init, shut_down
    module.amdsmi_get_processor_handles = lambda: [Handle(number) for number in range(boards)]
    module.amdsmi_get_gpu_device_uuid = checked(lambda number: f"{number}0ff74a0-0000-1000-80e9-000000000000")
    module.amdsmi_get_gpu_activity = checked(lambda number: {"gfx_activity": "N/A" if number else 40})
    module.amdsmi_get_gpu_vram_usage = checked(lambda number: {"vram_total": 65536, "vram_used": 1024})
    module.amdsmi_get_power_info = checked(
        lambda number: {"current_socket_power": "N/A", "average_socket_power": 0xFFFFFFFF if number else 300}
    )
    module.amdsmi_get_pcie_info = checked(pcie)
    return module


def sampler(machine: FakeMachine, path: Path | None = None, **options: Any) -> Sampler:
    return Sampler(path, clock=machine.clock, process=7, **options)


def last(usage: Usage) -> dict[str, float]:
    """The values of the last sample, without those that are not known."""
    values = dict(zip(usage.names, usage.values[-1].tolist(), strict=True))
    return {name: pytest.approx(value, rel=1e-5) for name, value in values.items() if not math.isnan(value)}
