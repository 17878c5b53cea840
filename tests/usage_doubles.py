"""A fake machine for the tests of utilisation: files of /proc and /sys, which psutil reads, too, a clock, and GPU
libraries.

NVML is doubled below nvidia-ml-py: the real Python code runs on a library whose functions fill ctypes values and return
codes as NVML does. AMD SMI's package cannot be imported without its library, so its module is doubled: calls raise its
exceptions, and values that a board lacks are "N/A" or the largest value of their type.
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

    def write(self, **files: str) -> None:
        """Write files of /proc by name; "/" in it as "__"."""
        for name, text in files.items():
            self.put(f"proc/{name.replace('__', '/')}", text)

    def put(self, path: str, text: str = "") -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def folders(self, *paths: str) -> None:
        for path in paths:
            (self.root / path).mkdir(parents=True, exist_ok=True)

    def sampler(self, path: Path | None = None) -> Sampler:
        return Sampler(path, clock=lambda: self.now, process=7)

    def sample(self, sampler: Sampler, seconds: float = 1.0) -> Sampler:
        """A sample after this many seconds."""
        self.now += seconds
        sampler.sample()
        return sampler


# For two boards, the values that each NVML function puts into the arguments after the handle; None: not supported.
NVML: dict[str, tuple[Any, Any]] = {
    "UtilizationRates": ([{"gpu": 22, "memory": 5}], None),
    "MemoryInfo": ([{"total": 80 << 30, "used": 1 << 30}], [{"total": 80 << 30, "used": 2 << 30}]),
    "PowerUsage": ([{"value": 350_500}], None),
    "EnforcedPowerLimit": ([{"value": 700_000}], None),
    "DecoderUtilization": ([{"value": 50}, {"value": 167_000}], [{"value": 50}, {"value": 167_000}]),
    "UUID": ([{"value": b"GPU-0abc"}], [{"value": b"GPU-1abc"}]),
}


class NvmlLibrary:
    """libnvidia-ml with two boards without a JPEG decoder. broken: the return value of its start function."""

    def __init__(self, broken: int = 0) -> None:
        self.broken, self.initialised, self.throughput_calls = broken, 0, list[int]()
        self.nvmlErrorString = lambda code: b"Driver Not Loaded" if code == broken else b"Not Supported"
        self._boards: dict[Any, int] = {}

    def __getattr__(self, name: str) -> Any:
        boards = NVML.get(name.removeprefix("nvmlDeviceGet"))
        if boards is None:
            raise AttributeError(name)

        def ask(handle: Any, *pointers: Any) -> int:
            if (board := boards[self._board(handle)]) is None:
                return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
            for pointer, values in zip(pointers, board, strict=False):
                for field, value in values.items():
                    setattr(getattr(pointer, "_obj", pointer), field, value)
            return 0

        return ask

    def _board(self, handle: Any) -> int:
        return self._boards[ctypes.cast(handle, ctypes.c_void_p).value]

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
        self._boards[ctypes.cast(device._obj, ctypes.c_void_p).value] = index.value
        return 0

    def nvmlDeviceGetPcieThroughput(self, handle: Any, counter: Any, kilobytes: Any) -> int:
        self.throughput_calls.append(self._board(handle))
        kilobytes._obj.value = 1000 if counter.value == pynvml.NVML_PCIE_UTIL_RX_BYTES else 10
        return 0


# For two boards, the return value of each amdsmi function; the second board only knows its memory.
AMD: dict[str, tuple[Any, Any]] = {
    "gpu_device_uuid": ("00ff74a0-0000-1000-80e9-000000000000", "10ff74a0-0000-1000-80e9-000000000000"),
    "gpu_activity": ({"gfx_activity": 40}, {"gfx_activity": "N/A"}),
    "gpu_vram_usage": ({"vram_total": 65536, "vram_used": 1024},) * 2,
    "power_info": tuple({"current_socket_power": "N/A", "average_socket_power": watts} for watts in (300, 0xFFFFFFFF)),
    "pcie_info": ({"pcie_static": {}, "pcie_metric": {"pcie_bandwidth": 8000}}, None),
}


def amdsmi_module() -> types.ModuleType:
    """A module with the amdsmi functions in use."""
    module: Any = types.ModuleType("amdsmi")

    def function(boards: tuple[Any, Any]) -> Any:
        def ask(handle: Any) -> Any:
            if not module.initialised or boards[handle.board] is None:
                raise RuntimeError("Error code:\n\t2 | AMDSMI_STATUS_NOT_SUPPORTED")
            return boards[handle.board]

        return ask

    module.initialised = False
    module.amdsmi_init = lambda: setattr(module, "initialised", True)
    module.amdsmi_shut_down = lambda: setattr(module, "initialised", False)
    module.amdsmi_get_processor_handles = lambda: [types.SimpleNamespace(board=board) for board in range(2)]
    for name, boards in AMD.items():
        setattr(module, f"amdsmi_get_{name}", function(boards))
    return module


def last(usage: Usage) -> dict[str, float]:
    """The values of the last sample, without unknown ones."""
    values = dict(zip(usage.names, usage.values[-1].tolist(), strict=True))
    return {name: pytest.approx(value, rel=1e-5) for name, value in values.items() if not math.isnan(value)}
