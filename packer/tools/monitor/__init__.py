"""Utilisation over time: CPUs, memory, disks, network and GPUs, sampled while a job runs.

    with packer.monitor("run.jsonl") as usage:
        usage.mark("epoch 1")
        …
    print(packer.tools.monitor.load("run.jsonl").percentiles()["cpu busy"].p95)

GPU libraries are imported only when a `Sampler` is made.
"""

from __future__ import annotations

from packer.tools.monitor.record import HeatRow, Mark, Percentiles, Series, Usage, load
from packer.tools.monitor.sampler import Sampler, monitor

__all__ = ["HeatRow", "Mark", "Percentiles", "Sampler", "Series", "Usage", "load", "monitor"]
