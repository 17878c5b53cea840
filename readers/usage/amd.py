"""AMD's GPUs by AMD SMI, through the package amdsmi, of the same version as the ROCm installation.

Units as in the AMD SMI Python API reference: activity in percent, memory in MB (of 2^20 bytes), power in watts, PCIe
bandwidth in Mb/s. What a GPU cannot say is the text "N/A", the largest value of its type, or an exception. Importing
amdsmi without its library prints to stdout and raises KeyError.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from cache.errors import MissingExtraError, PipelineError
from readers.usage.gpus import Gauge, Gpu, visible_devices

__all__ = ["open_gpus"]

_MOST = {"percent": 100, "megabytes": 1 << 24, "watts": 10_000, "megabits": 1 << 24}


def open_gpus() -> tuple[list[Gpu], Callable[[], None]]:
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
    gpus = [_gpu(amdsmi, handle, number) for number, handle in enumerate(handles)]
    return visible_devices(gpus), amdsmi.amdsmi_shut_down


def _gpu(smi: Any, handle: Any, number: int) -> Gpu:
    def power() -> float:
        found = smi.amdsmi_get_power_info(handle)
        for name in ("current_socket_power", "average_socket_power", "socket_power"):  # each board has one of them
            with contextlib.suppress(ValueError):
                return _number(found.get(name), "watts")
        raise ValueError("no power meter")

    def memory(name: str) -> float:
        return _number(smi.amdsmi_get_gpu_vram_usage(handle)[name], "megabytes") * (1 << 20)

    def busy() -> float:
        return _number(smi.amdsmi_get_gpu_activity(handle)["gfx_activity"], "percent") / 100

    def link() -> float:
        found = smi.amdsmi_get_pcie_info(handle)["pcie_metric"]["pcie_bandwidth"]
        return _number(found, "megabits") * 1e6 / 8

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


def _number(value: Any, unit: str) -> float:
    """A plausible number. Raises ValueError for "N/A" and for what stands for it."""
    if not isinstance(value, (int, float)) or not 0 <= value <= _MOST[unit]:
        raise ValueError(f"{value!r}: expected {unit}")
    return float(value)
