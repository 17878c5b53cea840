"""The time of an epoch from its traffic and what the machine delivers.

All ranks wait for each other at the end of a step, so the slowest node decides when the batches of a step are there:

    filesystem   bytes of all nodes / filesystem
    requests     requests of all nodes / filesystem_requests
    network      of one node, the larger of what it receives and what it sends / node
    latency      the most requests of a rank, `outstanding` at a time * latency
    disk         bytes of a node / disk, of a staged copy only: memory costs nothing here

The largest of them is the time to read a step. Ranks have up to `prefetch` batches ahead, so reading of step s begins
when step s - prefetch has begun and step s - 1 is read; a step begins when its batches are read, staged, and the step
before it has ended. Copying continues meanwhile at the rate of a node's share of the filesystem, of its network or of
its disk, whichever is least, and is taken to leave the rest of the reads undisturbed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from readers.simulation.job import Job, Machine
from readers.simulation.tally import Traffic

__all__ = ["RESOURCES", "Clock", "Copying", "run_epoch"]

Floats: TypeAlias = npt.NDArray[np.floating[Any]]
RESOURCES = ("filesystem", "requests", "network", "latency", "disk")


@dataclass(frozen=True, slots=True)
class Copying:
    """Bytes that each node copies from the filesystem during its first epoch, and the time that it takes."""

    node_bytes: float
    seconds: float

    @classmethod
    def of(cls, node_bytes: float, job: Job, machine: Machine) -> Copying:
        return cls(node_bytes, node_bytes / min(machine.filesystem / job.nodes, machine.node, machine.disk))


@dataclass(frozen=True, slots=True)
class Clock:
    """An epoch. binds: what it waits for: one of RESOURCES, "staging", or "GPU" where it is never starved for long.

    first_step: seconds until the first step begins.
    waited: seconds in which no step ran, the first one's included.
    """

    seconds: float
    first_step: float
    waited: float
    binds: str


def run_epoch(traffic: Traffic, job: Job, machine: Machine, *, is_staged: bool, copying: Copying | None) -> Clock:
    """An epoch whose traffic is of some of the nodes. is_staged: what is local is on a disk. copying: meanwhile."""
    costs = _costs(traffic, job, machine, is_staged)
    reading = np.max(np.stack(list(costs.values())), axis=0)
    rate = 0.0 if copying is None else copying.seconds / copying.node_bytes
    arrives = traffic.staged.astype(np.float64) * rate
    begins = _begins(reading, arrives, job)
    seconds = begins[-1] + job.step_seconds
    waited = seconds - len(reading) * job.step_seconds
    return Clock(seconds, begins[0], waited, _binding(costs, reading, arrives, job, waited))


def _costs(traffic: Traffic, job: Job, machine: Machine, is_staged: bool) -> dict[str, Floats]:
    """Seconds of each step by resource."""
    whole = job.nodes / traffic.source.shape[1]
    received = (traffic.source + traffic.peers).max(axis=1)
    return {
        "filesystem": traffic.source.sum(axis=1) * whole / machine.filesystem,
        "requests": traffic.requests.sum(axis=1) * whole / machine.filesystem_requests,
        "network": np.maximum(received, traffic.served.max(axis=1)) / machine.node,
        "latency": -(-traffic.most_requests // machine.outstanding) * machine.latency_seconds,
        "disk": traffic.local.max(axis=1) / (machine.disk if is_staged else math.inf),
    }


def _begins(reading: Floats, arrives: Floats, job: Job) -> list[float]:
    """When each step begins."""
    begins: list[float] = []
    read = 0.0
    for step, (seconds, arrival) in enumerate(zip(reading.tolist(), arrives.tolist(), strict=True)):
        earliest = begins[step - job.prefetch] if step >= job.prefetch else 0.0
        read = max(read, earliest, arrival) + seconds
        begins.append(max(read, begins[-1] + job.step_seconds if begins else 0.0))
    return begins


def _binding(
    costs: dict[str, Floats],
    reading: Floats,
    arrives: Floats,
    job: Job,
    waited: float,
) -> str:
    steps = len(reading)
    if waited <= 0.05 * steps * job.step_seconds:
        return "GPU"
    if float(arrives.max()) > float(reading.sum()) / 2 and float(arrives.max()) > 0.5 * waited:
        return "staging"
    return max(costs, key=lambda name: float(costs[name].sum()))
