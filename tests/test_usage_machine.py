"""What is read of a machine and its GPUs for each sample."""

from __future__ import annotations

import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pynvml
import pytest
from usage_doubles import DISKS, LUSTRE, MEMINFO, NET, NFS, STAT, FakeMachine, NvmlLibrary, amdsmi_module, last, sampler

import readers
from packer.tools.monitor import Sampler


def test_counters_become_rates_and_shares(machine: FakeMachine) -> None:
    machine.write(
        meminfo=MEMINFO, diskstats=DISKS.format(0, 0, 0), net__dev=NET.format(0, 0), self__mountstats=NFS.format(0, 0),
        pressure__io="some avg10=0.00 total=0\nfull total=0\n",
    )  # fmt: skip
    machine.put("proc/fs/lustre/llite/scratch-ffff8f0c12345678/stats", LUSTRE.format(1000, 0))
    machine.put("sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_data", "0\n")
    for device in ("class/net/eth0", "block/sda"):
        machine.folder(f"sys/{device}/device")
    found = sampler(machine)
    machine.write(
        stat=STAT.format(150, 200), diskstats=DISKS.format(2000, 1000, 500), net__dev=NET.format(500, 50),
        self__mountstats=NFS.format(4000, 400), pressure__io="some avg10=0.00 total=500000\nfull total=0\n",
    )  # fmt: skip
    machine.put("proc/fs/lustre/llite/scratch-ffff8f0c12345678/stats", LUSTRE.format(21000, 10))
    machine.put("sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_data", "1000\n")
    machine.pass_time(2.0)
    usage = found.stop()
    assert last(usage) == {
        "cpu busy": 1.0, "cpu iowait": 0.0, "cpu steal": 0.0, "cpu0 busy": 1.0,
        "memory used": 400 * 1024, "page cache": 200 * 1024,
        "sda read": 512_000, "sda write": 256_000, "sda busy": 0.25,
        "eth0 in": 250, "eth0 out": 25, "mlx5_0 in": 2000,
        "nfs /data read": 2000, "nfs /data write": 200, "lustre scratch read": 10_000, "lustre scratch write": 5,
        "io pressure": 0.25,
    }  # fmt: skip
    full = {one.name: one.full for one in usage.series}
    assert full["memory used"] == 1000 * 1024 and full["eth0 in"] == 125e6 and full["sda read"] is None


def test_a_counter_that_falls_has_no_value(machine: FakeMachine) -> None:
    """It wrapped, or the device was removed and came back."""
    machine.write(net__dev=NET.format(5000, 100))
    found = sampler(machine)
    for received, expected in ((10, None), (110, 100.0)):
        machine.pass_time()
        machine.write(net__dev=NET.format(received, 200))
        found.sample()
        assert last(found.usage()).get("eth0 in") == expected


def test_cpus_come_and_go(machine: FakeMachine) -> None:
    found = sampler(machine)
    without = "".join(line for line in STAT.format(150, 200).splitlines(True) if not line.startswith("cpu0"))
    for text, online, expected in (
        (without, "1", None),
        (STAT.format(200, 300), "0-1", None),
        (STAT.format(250, 400), "0-1", 1.0),
    ):
        machine.pass_time()
        machine.write(stat=text)
        machine.put("sys/devices/system/cpu/online", online)
        found.sample()
        assert last(found.usage()).get("cpu0 busy") == expected


@pytest.mark.parametrize("card", [True, False])
def test_bytes_are_counted_once(machine: FakeMachine, card: bool) -> None:
    """Not for partitions, mapped disks, loops or bonds; in a container, for interfaces that are not over others."""
    machine.write(diskstats=DISKS.format(1, 1, 1), net__dev=NET.format(1, 1))
    machine.folder("sys/block/sda/device")
    machine.folder("sys/block/dm-0/slaves/sda1")
    machine.folder("sys/class/net/bond0/bonding")
    if card:
        machine.folder("sys/class/net/eth0/device")
    found = sampler(machine)
    machine.pass_time()
    assert {name.split()[0] for name in found.stop().names} == {"cpu", "cpu0", "cpu1", "sda", "eth0"}


@pytest.mark.parametrize(
    ("membership", "files"),
    [
        (
            "0::/job",
            {
                "job/memory.current": "5000", "job/memory.max": "max", "memory.max": "8000",
                "job/memory.stat": "anon 1000\ninactive_file 1500\nactive_file 500\n",
                "job/cpu.stat": "usage_usec {cpu}000000\nnr_periods 9\nthrottled_usec 500000\n",
                "job/io.stat": "8:0 rbytes={read} wbytes=0 rios=1\n253:0 rbytes={read} wbytes=0\n7:0 \n",
            },
        ),
        (
            "4:memory:/job\n2:cpu,cpuacct:/job\n3:blkio:/job\n0::/\n",
            {
                "memory/job/memory.usage_in_bytes": "5000", "memory/job/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.limit_in_bytes": "8000",
                "memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 1500\ntotal_active_file 500\n",
                "cpu/job/cpu.stat": "nr_periods 9\nnr_throttled 3\nthrottled_time 500000000\n",
                "cpu/job/cpuacct.usage": "{cpu}000000000", "cpuacct/job/cpuacct.usage": "{cpu}000000000",
                "blkio/job/blkio.throttle.io_service_bytes": "8:0 Read {read}\n8:0 Write 0\n8:0 Sync 1\nTotal 9\n",
            },
        ),
    ],
    ids=["v2", "v1"],
)  # fmt: skip
def test_control_groups_of_both_versions(machine: FakeMachine, membership: str, files: dict[str, str]) -> None:
    def write(cpu: int, read: int) -> None:
        for name, text in files.items():
            machine.put(f"sys/fs/cgroup/{name}", text.replace("{cpu}", str(cpu)).replace("{read}", str(read)))

    machine.write(self__cgroup=membership)
    machine.folder("sys/block/sda/device")
    machine.put("sys/block/sda/dev", "8:0\n")
    write(10, 100)
    found = sampler(machine)
    write(13, 300)
    machine.pass_time(2.0)
    usage = found.stop()
    job = {name: value for name, value in last(usage).items() if name.startswith("job")}
    assert job == {
        "job memory": 3000, "job cpus": 1.5, "job throttled": 0.0, "job disk read": 100, "job disk write": 0,
    }  # fmt: skip
    assert next(one.full for one in usage.series if one.name == "job memory") == 8000


def test_processes_count_with_their_children() -> None:
    """From when they are seen; a process that ended takes nothing away."""
    work = (
        "import sys; [sum(range(10**6)) for _ in range(5)]; sys.stdout.write('x'); sys.stdout.flush(); sys.stdin.read()"
    )
    shell = f"{sys.executable} -c {shlex.quote(work)}; read end"
    with subprocess.Popen(["sh", "-c", shell], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        found, begun = Sampler(process=process.pid), time.monotonic()
        found.sample()
        assert process.stdout is not None and process.stdout.read(1) == b"x"
        found.sample()
        usage = found.stop()
        process.communicate()
    used = np.nansum(usage.column("processes cpus") * usage.durations)
    assert 0 < used < time.monotonic() - begun


@pytest.mark.parametrize("root", ["empty", "missing"])
def test_a_machine_without_proc_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr("packer.tools.monitor.machine.ROOT", tmp_path / root)
    with pytest.raises(readers.SourceError, match="Linux only"):
        Sampler()


def test_a_sample_of_this_machine_is_plausible() -> None:
    with Sampler(interval=0.05) as usage:
        seen = threading.Event()
        usage.gauge("calls", lambda: [seen.set(), 3.0][1])
        assert seen.wait(300)
    found = usage.usage()
    assert 0 <= found.percentiles()["cpu busy"].p50 <= 1 and found.percentiles()["calls"] == (3.0,) * 7
    assert usage.notes == () or "gpu" in usage.notes[0].lower()


# --- GPUs ------------------------------------------------------------------------------------------------------------
@pytest.fixture
def nvml(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., NvmlLibrary]:
    def put(**options: Any) -> NvmlLibrary:
        machine.folder("proc/driver/nvidia")
        library = NvmlLibrary(**options)
        monkeypatch.setattr(pynvml, "nvmlLib", library)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        return library

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return put


def gpus_of(machine: FakeMachine, samples: int = 5) -> tuple[Sampler, dict[str, float]]:
    found = sampler(machine)
    for _ in range(samples):
        machine.pass_time()
        found.sample()
    return found, {name: value for name, value in last(found.stop()).items() if name.startswith("gpu")}


def test_nvidia_gpus_give_what_each_of_them_has(machine: FakeMachine, nvml: Callable[..., NvmlLibrary]) -> None:
    library = nvml()
    found, values = gpus_of(machine)
    assert values == {
        "gpu0 busy": 0.22, "gpu0 memory": 1 << 30, "gpu0 power": 350.5, "gpu0 decoder": 0.5, "gpu0 in": 1e6,
        "gpu0 out": 1e4, "gpu1 memory": 2 << 30, "gpu1 decoder": 0.5, "gpu1 in": 1e6, "gpu1 out": 1e4,
    }  # fmt: skip
    full = {one.name: one.full for one in found.usage().series}
    assert full["gpu0 memory"] == 80 << 30 and full["gpu0 power"] == 700 and found.notes == ()
    calls = library.throughput_calls
    assert calls == [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1], "each call takes 20 ms: one GPU a sample"
    assert library.initialised == 0, "stop shuts NVML down"


@pytest.mark.parametrize(
    ("visible", "numbers"),
    [("1", {"1"}), ("GPU-0a", {"0"}), ("MIG-x", {"0", "1"}), ("", {"0", "1"}), ("7", {"0", "1"})],
)
def test_only_gpus_of_the_job_are_sampled(
    machine: FakeMachine, nvml: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, visible: str, numbers: str
) -> None:
    nvml()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert {name[3] for name in gpus_of(machine)[1]} == set(numbers)


def test_amd_gpus(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.folder("sys/module/amdgpu")
    module = amdsmi_module()
    monkeypatch.setitem(sys.modules, "amdsmi", module)
    found, values = gpus_of(machine)
    assert values == {
        "gpu0 busy": 0.4, "gpu0 memory": 1 << 30, "gpu0 power": 300, "gpu0 pcie": 1e9, "gpu1 memory": 1 << 30,
    }  # fmt: skip
    assert not module.initialised and found.notes == ()


@pytest.mark.parametrize(
    ("driver", "package", "words"),
    [
        ("proc/driver/nvidia", "pynvml", ["nvidia-ml-py", "gpu-monitor"]),
        ("sys/module/amdgpu", "amdsmi", ["amdsmi", "gpu-monitor-amd"]),
    ],
)
def test_a_gpu_without_its_package_is_a_note(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch, driver: str, package: str, words: list[str]
) -> None:
    machine.folder(driver)
    monkeypatch.setitem(sys.modules, package, None)
    found, values = gpus_of(machine)
    assert not values and all(word in found.notes[0] for word in words) and "cpu busy" in found.usage().names


def test_a_gpu_whose_driver_does_not_answer_is_a_note(machine: FakeMachine, nvml: Callable[..., Any]) -> None:
    nvml(broken=pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    found, values = gpus_of(machine)
    assert not values and "Driver Not Loaded" in found.notes[0]
