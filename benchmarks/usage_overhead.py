"""Utilisation: CPU time per sample, on this machine and on a simulated one with many cores, disks and network cards.

    python benchmarks/usage_overhead.py [--samples 500] [--rounds 5]

The simulated machine is a temporary directory of files with the texts of /proc, so its cost is that of reading and
parsing them; the kernel's work to make the texts is in the first figure only.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import psutil

from packer.tools.monitor import Sampler, machine
from packer.tools.monitor.sampler import INTERVAL


def measure(samples: int, root: Path) -> tuple[float, int]:
    """CPU seconds per sample, with writing, and the number of series. root: the directory of proc and sys."""
    clock = iter(range(1 << 62))
    machine.ROOT, psutil.PROCFS_PATH = root, str(root / "proc")
    with tempfile.TemporaryDirectory() as folder:
        sampler = Sampler(Path(folder) / "run.jsonl", clock=lambda: next(clock) * INTERVAL)
        for _ in range(20):
            sampler.sample()
        start = time.process_time()
        for _ in range(samples):
            sampler.sample()
        seconds = (time.process_time() - start) / samples
        return seconds, len(sampler.stop().series)


def large_machine(root: Path, cores: int, disks: int) -> None:
    """Write the files of a machine with `cores` cores and `disks` disks."""
    (root / "proc/net").mkdir(parents=True)
    lines = [f"cpu{core} 1000 0 500 90000 100 0 50 0 0 0" for core in range(cores)]
    (root / "proc/stat").write_text("\n".join(["cpu 1 0 1 9 1 0 1 0 0 0", *lines, "intr " + "0 " * 4000, ""]))
    names = [f"nvme{number}n1" for number in range(disks)]
    for device in (*(f"block/{name}" for name in names), *(f"class/net/eth{number}" for number in range(8))):
        (root / "sys" / device / "device").mkdir(parents=True)
    rows = [f" 259 {number} {name} 1 0 8 1 1 0 8 1 0 1 1 0 0 0 0 0 0" for number, name in enumerate(names)]
    (root / "proc/diskstats").write_text("\n".join([*rows, ""]))
    cards = [f"  eth{number}: 1 1 0 0 0 0 0 0 1 1 0 0 0 0 0 0" for number in range(8)]
    (root / "proc/net/dev").write_text("\n".join(["Inter-| Receive", " face |bytes", *cards, ""]))
    names = ("MemTotal", "MemFree", "MemAvailable", "Buffers", "Cached", "Shmem", "Active", "Inactive")
    (root / "proc/meminfo").write_text("".join(f"{name}: 1000 kB\n" for name in names))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        large_machine(Path(folder), 256, 32)
        for name, root in ((f"this machine, {os.cpu_count()} cores", "/"), ("256 cores", folder)):
            results = [measure(options.samples, Path(root)) for _ in range(options.rounds)]
            seconds = statistics.median(each[0] for each in results)
            cost = f"{1e6 * seconds:.0f} us a sample of {results[0][1]} series"
            print(f"{name}: {cost}, {seconds / INTERVAL:.3%} of a core at {INTERVAL} s")


if __name__ == "__main__":
    main()
