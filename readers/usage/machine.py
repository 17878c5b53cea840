"""The probes of a machine, opened and closed together: /proc, control groups, and GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from cache.errors import MissingExtraError
from readers.usage.amd import open_gpus as open_amd
from readers.usage.gpus import GpuProbe
from readers.usage.nvidia import open_gpus as open_nvidia
from readers.usage.probes import machine_probes
from readers.usage.readings import Files, Probe

__all__ = ["Machine"]

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
