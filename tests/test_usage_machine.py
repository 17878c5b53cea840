"""What is read of a machine and its GPUs for each sample."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pynvml
import pytest
from usage_doubles import DISKS, LUSTRE, MEMINFO, NET, NFS, STAT, FakeMachine, NvmlLibrary, amdsmi_module, last, sampler

import readers
from packer.tools.monitor import Sampler
from packer.tools.monitor.probes import cpu_times, key_values, net_counters, pressure, process_times


def test_counters_become_rates_and_shares(machine: FakeMachine) -> None:
    machine.write(
        meminfo=MEMINFO, diskstats=DISKS.format(0, 0, 0), net__dev=NET.format(0, 0), self__mountstats=NFS.format(0, 0),
        self__mounts="server:/export /data nfs4 rw 0 0\n", pressure__io="some avg10=0.00 total=0\nfull total=0\n",
    )  # fmt: skip
    machine.put("proc/fs/lustre/llite/scratch-ffff8f0c12345678/stats", LUSTRE.format(1000, 0))
    machine.put("sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_data", "0\n")
    machine.put("sys/class/net/eth0/speed", "1000\n")
    machine.folder("sys/class/net/eth0/device")
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
    without = "".join(line for line in STAT.format(150, 200).splitlines(True) if not line.startswith("cpu1"))
    for text, expected in ((without, None), (STAT.format(200, 300), None), (STAT.format(250, 400), 1.0)):
        machine.pass_time()
        machine.write(stat=text)
        found.sample()
        assert last(found.usage()).get("cpu1 busy") == expected


@pytest.mark.parametrize("virtual", [True, False])
def test_bytes_are_counted_once(machine: FakeMachine, virtual: bool) -> None:
    """Not for partitions, mapped disks, loops or bonds; where /sys says so, by what it says."""
    machine.write(diskstats=DISKS.format(1, 1, 1), net__dev=NET.format(1, 1))
    if virtual:
        for name in ("sda", "dm-0", "nvme0n1", "loop0"):
            machine.folder(f"sys/block/{name}/slaves")
        machine.folder("sys/block/dm-0/slaves/sda1")
        machine.folder("sys/class/net/bond0/bonding")
    found = sampler(machine)
    machine.pass_time()
    names = {name.split()[0] for name in found.stop().names}
    assert names == {"cpu", "cpu0", "cpu1", "sda", "eth0", *(() if virtual else ("bond0",))}


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

    machine.write(self__cgroup=membership, diskstats=DISKS.format(0, 0, 0))
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


def test_processes_count_with_their_children(machine: FakeMachine) -> None:
    """From when they are seen; a process that ended takes nothing away, a number that is used again is another one."""

    def process(number: int, ticks: int, start: int = 5, children: str = "") -> None:
        fields = f"S 1 1 1 0 -1 0 0 0 0 0 {ticks} 0 0 0 20 0 1 0 {start} 0 0"
        machine.write(**{f"{number}__stat": f"{number} (a) b) {fields}\n", f"{number}__io": f"rchar: {ticks * 10}\n"})
        machine.put(f"proc/{number}/task/{number}/children", children)

    hertz = os.sysconf("SC_CLK_TCK")
    process(7, 100, children="8 ")
    process(8, 50)
    found = sampler(machine)
    cores = []
    for step in ((7, 100 + hertz, 5, "8 "), (8, 50 + hertz), (8, 50 + 9 * hertz, 6)):
        process(*step)
        machine.pass_time()
        found.sample()
        cores.append(last(found.usage())["processes cpus"])
    assert cores == [1.0, 1.0, 0.0]
    assert np.nansum(found.stop().column("processes read")) == 20 * hertz


def test_lines_that_are_odd_are_skipped() -> None:
    assert cpu_times("cpu0 1 2 3\ncpux 1 2 3 4 5\ncpu1 1 2 3 4 junk\nintr 5\n") == {1: (6, 0, 0, 10)}
    assert cpu_times("cpu2 1 2 3 10 5 1 1 4 9 9\n") == {2: (8, 5, 4, 27)}, "guests are part of user and nice"
    assert net_counters("nonsense\n eth0: 1 2\n a:b: 1 0 0 0 0 0 0 0 2\n") == {"a:b": (1, 2)}
    assert pressure("some avg10=0.00\nfull total=x\n") == {}
    assert key_values("a 1\nb: 2\nc x\nd 1 2\n") == {"a": 1, "b": 2} and process_times("7 (x) S 1") is None


@pytest.mark.parametrize("root", ["empty", "missing"])
def test_a_machine_without_proc_is_an_error(tmp_path: Path, root: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(readers.SourceError, match="Linux only"):
        Sampler(root=tmp_path / root)


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
