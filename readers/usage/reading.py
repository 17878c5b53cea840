"""What a record says in one sentence: what is busy, what is idle, and so what the run probably waits for.

The sentence follows medians (p50, by time), so a slow start or an evaluation at the end does not decide it. It is a
reading of counters: only a diagnosis, which replaces stages by memory, measures what a stage costs.
"""

from __future__ import annotations

import re

from cache.messages import human_bytes
from readers.usage.record import Percentiles, Usage

__all__ = ["format_value", "read_usage"]

_BUSY = 0.9  # of the CPUs or the GPU
_DISK_BUSY = 0.8
_LINK_FULL = 0.8
_PRESSED = 0.2  # of the time some task waited for I/O
_THROTTLED = 0.1
_NEARLY_FULL = 0.95
_STEADY = 0.5  # of p95: a rate whose median is above this does not come in bursts
_LEAST_RATE = 1e6  # bytes a second: less is not a load
_GPU = re.compile(r"gpu\d+ busy")
_REMOTE = re.compile(r"(?:nfs|lustre) .* read")
_NOTHING = Percentiles(*[0.0] * 7)


def read_usage(usage: Usage) -> str:
    """The sentence, with figures."""
    return _Reading(usage).sentence()


def format_value(value: float | None, unit: str) -> str:
    """A value for people: 98 %, 1.34 GB, 140 MB/s, 2.5."""
    if value is None or value != value:
        return "–"
    if unit == "share":
        return f"{100 * value:.0f} %"
    if unit in ("bytes", "bytes/s"):
        return human_bytes(value) + unit[5:]
    shown = f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{shown} W" if unit == "watts" else shown + unit[1:] if unit == "1/s" else shown


class _Reading:
    def __init__(self, usage: Usage) -> None:
        self._found = usage.percentiles()
        self._full = {one.name: one.full for one in usage.series if one.full}
        gpus = [value.p50 for name, value in self._found.items() if _GPU.fullmatch(name)]
        self._gpu = sum(gpus) / len(gpus) if gpus else None
        self._gpus = "the GPUs are" if len(gpus) > 1 else "the GPU is"

    def sentence(self) -> str:
        if "cpu busy" not in self._found:
            return "too short for a sample: nothing is known"
        memory = self._memory()
        return f"{self._limit()}; {memory}" if memory else self._limit()

    def _limit(self) -> str:
        cpu, gpu = self._of("cpu busy").p50, self._gpu
        if gpu is not None and gpu >= _BUSY:
            return f"{self._gpus} {_percent(gpu)} busy at p50: the input keeps up"
        device = "" if gpu is None else f" while {self._gpus} {_percent(gpu)}"
        if (throttled := self._of("job throttled").p50) >= _THROTTLED:
            return f"the CPU quota stops the job {_percent(throttled)} of the time{device}: ask for more CPUs"
        if cpu >= _BUSY:
            end = "the input starves it" if gpu is not None else "the CPUs are the limit"
            return f"CPUs are {_percent(cpu)} busy at p50{device}: {end}"
        idle = f"CPUs are {_percent(1 - cpu)} idle" + ("" if gpu is None else f" and {self._gpus} {_percent(gpu)} busy")
        if slow := self._storage():
            return f"{slow} while {idle}: storage is the limit"
        if link := self._link():
            return f"{link} while {idle}: the network is the limit"
        end = "no limit is seen"
        if gpu is not None:
            end = "the job waits for something else, as latency, locks or too few workers"
        return f"{idle}, and neither disks nor network are busy: {end}"

    def _storage(self) -> str:
        """What says that storage is waited for: a busy disk, tasks that wait for I/O, or steady reads from a server."""
        disks = {name.removesuffix(" busy"): value.p50 for name, value in self._found.items() if name.endswith(" busy")}
        disks = {name: busy for name, busy in disks.items() if self._rates(name)}
        waits = max(self._of("io pressure").p50, self._of("cpu iowait").p50)
        disk = max(disks, key=lambda name: disks[name], default="")
        if disk and (disks[disk] >= _DISK_BUSY or (waits >= _PRESSED and self._rates(disk)[0][0] > _LEAST_RATE)):
            _, verb, rate = self._rates(disk)[0]
            steadily = " steadily" if self._is_steady(rate) else ""
            value = format_value(rate.p50 if steadily else rate.mean, "bytes/s")
            return f"{disk} {verb} {value}{steadily}, busy {_percent(disks[disk])} of the time,"
        remote = {name: value for name, value in self._found.items() if _REMOTE.fullmatch(name)}
        name = max(remote, key=lambda name: remote[name].p50, default="")
        if name and self._is_steady(remote[name]):
            return f"{name.removesuffix(' read')} gives {format_value(remote[name].p50, 'bytes/s')} steadily"
        return f"tasks wait for I/O {_percent(waits)} of the time" if waits >= _PRESSED else ""

    def _link(self) -> str:
        """A network card that receives what its link can carry."""
        for name, full in self._full.items():
            rate = self._of(name).p50
            if name.endswith(" in") and rate >= _LINK_FULL * full:
                share = _percent(rate / full)
                return f"{name.removesuffix(' in')} receives {format_value(rate, 'bytes/s')}, {share} of its link,"
        return ""

    def _memory(self) -> str:
        """A warning where memory was nearly full."""
        for name in ("job memory", "memory used"):
            full, most = self._full.get(name), self._of(name)
            if full and most.p99 >= _NEARLY_FULL * full:
                return f"memory is nearly full: {human_bytes(most.max)} of {human_bytes(full)}"
        return ""

    def _rates(self, disk: str) -> list[tuple[float, str, Percentiles]]:
        """Mean, verb and percentiles of what a disk reads and writes, the larger first; none if it is not a disk."""
        named = [(f"{disk} read", "reads"), (f"{disk} write", "writes")]
        rates = [(self._of(name).mean, verb, self._of(name)) for name, verb in named if name in self._found]
        return sorted(rates, reverse=True)

    def _of(self, name: str) -> Percentiles:
        return self._found.get(name, _NOTHING)

    @staticmethod
    def _is_steady(rate: Percentiles) -> bool:
        return rate.p50 >= max(_STEADY * rate.p95, _LEAST_RATE)


def _percent(share: float) -> str:
    return format_value(share, "share")
