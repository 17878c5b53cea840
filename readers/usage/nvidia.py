"""NVIDIA's GPUs by NVML, through the package nvidia-ml-py (module `pynvml`).

Units as in the NVML API Reference: utilisation in percent of the last sampling period (1/6 s to 1 s), memory in bytes,
power in milliwatts, PCIe throughput in KB/s, measured for 20 ms, in which the call waits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from cache.errors import MissingExtraError, PipelineError
from readers.usage.gpus import Gauge, Gpu, visible_devices

__all__ = ["open_gpus"]


def open_gpus() -> tuple[list[Gpu], Callable[[], None]]:
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
