"""Utilisation over time: what is read of a machine, the record of it, and its file."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pynvml
import pytest
from suites.staging import wait_for
from usage_doubles import DISKS, LUSTRE, MEMINFO, NET, NFS, STAT, FakeMachine, NvmlLibrary, amdsmi_module

import readers
from readers.augment import CenterCrop, Resize
from readers.loader import ImageLoader
from readers.usage import Sampler, Usage, load, save
from readers.usage.buffer import Buffer
from readers.usage.proc import cpu_times, key_values, net_counters, pressure, process_times


def sampler(machine: FakeMachine, path: Path | None = None, **options: Any) -> Sampler:
    return Sampler(path, root=machine.root, clock=machine.clock, process=7, **options)


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path / "root")


def last(usage: Usage) -> dict[str, float]:
    """The values of the last sample, without those that are not known."""
    values = dict(zip(usage.names, usage.values[-1].tolist(), strict=True))
    return {name: pytest.approx(value, rel=1e-5) for name, value in values.items() if not math.isnan(value)}


# --- what is read ----------------------------------------------------------------------------------------------------
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
        assert seen.wait(30)
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


# --- the sampler -----------------------------------------------------------------------------------------------------
def test_a_training_marks_counts_and_gauges(machine: FakeMachine) -> None:
    found, queue = sampler(machine), iter([1.0, "broken", 3.0])
    found.gauge("queue", lambda: next(queue), 4)  # type: ignore[arg-type,return-value]
    for epoch in range(4):
        found.mark(f"epoch {epoch}")
        for _ in range(5):
            found.step(images=32)
        machine.pass_time(2.0)
        found.sample()
    usage = found.stop()
    assert usage.column("queue").tolist()[::2] == [1, 3] and np.isnan(usage.column("queue")[[1, 3]]).all()
    assert usage.column("steps").tolist()[1:] == [2.5] * 3 and usage.column("images").tolist()[1:] == [80] * 3
    assert [(mark.name, mark.seconds) for mark in usage.marks] == [(f"epoch {n}", 2.0 * n) for n in range(4)]
    spans = usage.spans()
    assert [mark for mark, _ in spans] == list(usage.marks)
    assert [span.times.tolist() for _, span in spans] == [[2.0], [4.0], [6.0], [8.0]]


def test_a_probe_that_fails_is_noted_and_no_more(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.write(meminfo=MEMINFO)
    found = sampler(machine)
    monkeypatch.setattr("readers.usage.probes.meminfo", lambda text: 1 // 0)
    for _ in range(3):
        machine.pass_time()
        found.sample()
    usage = found.stop()
    assert len(found.notes) == 1 and "ZeroDivisionError" in found.notes[0] and len(usage.times) == 3


def test_a_probe_that_hangs_keeps_no_one_waiting(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a GPU that has fallen off the bus: marks are taken, and the end comes."""
    monkeypatch.setattr("readers.usage.sampler._PATIENCE_SECONDS", 0.05)
    found, hangs, go = sampler(machine), threading.Event(), threading.Event()
    machine.pass_time()
    found.sample()
    machine.pass_time()
    found.gauge("stuck", lambda: [hangs.set(), go.wait(60)][1])
    thread = threading.Thread(target=found.sample)
    thread.start()
    assert hangs.wait(60)
    found.mark("meanwhile")
    usage = found.stop()
    go.set()
    thread.join()
    assert len(usage.times) == len(found.usage().times) == 1 and [mark.name for mark in usage.marks] == ["meanwhile"]
    assert "did not end" in found.notes[0]


def test_the_queue_of_a_loader_can_be_watched(tree: Path) -> None:
    reader = readers.open_folder(tree, "train")
    loader = ImageLoader(reader, 2, augment=[Resize(8), CenterCrop(8)], prefetch=2, threads=1)
    assert loader.ready == 0
    batches = iter(loader)
    next(batches)
    wait_for(lambda: loader.ready == 2, "two batches")
    for _ in batches:
        pass
    assert loader.ready == 0


def test_a_forked_child_leaves_the_record_alone(machine: FakeMachine, tmp_path: Path) -> None:
    found = sampler(machine, tmp_path / "run.jsonl")
    machine.pass_time()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            found.mark("child")
            machine.pass_time()
            found.sample()
            found.stop()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    found.mark("parent")
    found.stop()
    usage = load(tmp_path / "run.jsonl")
    assert [mark.name for mark in usage.marks] == ["parent"] and len(usage.times) == 1


@pytest.mark.parametrize(("rank", "nodes", "name"), [(0, 1, "run.jsonl"), (1, 1, None), (2, 2, "run.node1.jsonl")])
def test_each_node_has_one_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, nodes: int, name: str | None
) -> None:
    given = {
        "RANK": rank,
        "WORLD_SIZE": 2 * nodes,
        "LOCAL_RANK": rank % 2,
        "LOCAL_WORLD_SIZE": 2,
        "GROUP_RANK": rank // 2,
    }
    for variable, value in given.items():
        monkeypatch.setenv(variable, str(value))
    with readers.monitor(tmp_path / "run.jsonl") as usage:
        usage.mark("begin")
    assert [path.name for path in tmp_path.iterdir()] == ([name] if name else [])


# --- memory ----------------------------------------------------------------------------------------------------------
def test_a_long_run_takes_the_memory_of_a_short_one() -> None:
    """Rows are merged into means by time; nothing of the time is lost."""
    buffer, rows = Buffer(8), []
    for number in range(1000):
        rows.append(buffer.add(number + 1.0, 1.0, [number, *([7.0] if number > 500 else [])]))
    times, durations, values = buffer.arrays()
    assert len(times) <= 9 and times[-1] == 1000 and durations.sum() == 1000
    assert np.average(values[:, 0], weights=durations) == pytest.approx(np.arange(1000).mean())
    assert np.nanmin(values[:, 1]) == 7.0 and np.isnan(values[0, 1])
    assert len([row for row in rows if row]) < 8 * 9, "the file grows with the logarithm of the time"


def test_percentiles_count_time_and_not_samples(machine: FakeMachine) -> None:
    found = sampler(machine)
    found.gauge("queue", lambda: machine.now)
    for seconds in (1.0, 1.0, 8.0):
        machine.pass_time(seconds)
        found.sample()
    queue = found.stop().percentiles()["queue"]
    assert queue == (101, 110, 110, 110, 110, 110, pytest.approx(0.1 * (101 + 102) + 0.8 * 110))


def test_heat_rows_are_shares_of_the_limit(machine: FakeMachine) -> None:
    """Every second core of 256 is busy; eight share a row."""

    def write(seconds: int) -> None:
        ticks = (100 + 100 * seconds, 0)
        machine.write(stat="".join(f"cpu{n} {ticks[1 - n % 2]} 0 0 {ticks[n % 2]}\n" for n in range(256)))

    write(0)
    found = sampler(machine)
    for second in range(1, 5):
        machine.pass_time()
        write(second)
        found.gauge("queue", lambda second=second: float(second), 8)  # type: ignore[misc]
        found.sample()
    rows = {row.name: row for row in found.stop().summary(most_cores=32).heat_rows(columns=2)}
    assert len([name for name in rows if "–" in name]) == 32 and rows["cpu0–7 busy"].values == (0.5, 0.5)
    assert rows["queue"].values == (1.5 / 8, 3.5 / 8) and rows["queue"].full == 8
    assert list(rows)[-1] == "cpu248–255 busy"


# --- the file --------------------------------------------------------------------------------------------------------
@pytest.fixture
def recorded(machine: FakeMachine, tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl"
    with_file = sampler(machine, path)
    for number in range(5):
        with_file.mark(f"épo\u202ech {number}\n")
        if number == 2:
            machine.write(meminfo=MEMINFO)
        machine.write(stat=STAT.format(150 + 10 * number, 200))
        machine.pass_time(0.5)
        with_file.sample()
    with_file.stop()
    return path


def same(a: Usage, b: Usage) -> None:
    assert (a.host, a.interval, a.series, a.marks) == (b.host, b.interval, b.series, b.marks)
    assert np.allclose(a.values, b.values, rtol=1e-4, equal_nan=True) and np.allclose(a.times, b.times)


def test_a_record_comes_back_from_lines_and_from_json(recorded: Path, tmp_path: Path) -> None:
    usage = load(recorded)
    assert len(usage.times) == 5 and "memory used" in usage.names and np.isnan(usage.column("memory used")[0])
    save(usage, tmp_path / "again.jsonl")
    same(load(tmp_path / "again.jsonl"), usage)
    document = json.loads(json.dumps({"verdict": "", "usage": usage.to_dict()}, allow_nan=False))
    (tmp_path / "diagnosis.json").write_text(json.dumps(document, indent=1))
    same(load(tmp_path / "diagnosis.json"), usage)


def test_the_file_of_a_killed_process_is_whole_up_to_a_line(recorded: Path) -> None:
    """Cut anywhere after the first line."""
    whole, data = load(recorded), recorded.read_bytes()
    for cut in range(data.index(b"\n") + 1, len(data), 7):
        recorded.write_bytes(data[:cut])
        usage = load(recorded)
        assert np.array_equal(usage.times, whole.times[: len(usage.times)])


HEAD = '{"packer usage": 1, "host": "a", "started": 1, "interval": 0.5}\n'
SERIES = '{"series": [{"name": "x", "unit": "share", "full": 1}]}\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "neither a record"),
        ("PNG", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"usage": null}', "neither a record"),
        ('{"usage": {"durations": 3}}', "'series': expected a list"),
        (HEAD.replace("1,", "2,", 1), "version 2"),
        (HEAD.replace('"a"', "7"), "host: expected a text"),
        (HEAD.replace("0.5", "1e999"), "expected a number"),
        (HEAD + "[1]\n", "line 2: expected a JSON object"),
        (HEAD + '{"series": [{"name": "x", "unit": "furlongs"}]}\n', "a unit of share"),
        (HEAD + '{"series": [{"name": "x", "unit": "share", "full": -1}]}\n', "more than 0"),
        (HEAD + SERIES + SERIES, "two series of the same name"),
        (HEAD + '{"series": [' + ", ".join(['{"name": "x", "unit": "1"}'] * 5000) + "]}\n", "at most 4,096"),
        (HEAD + '{"t": 1, "d": 1, "v": [1]}\n', "at most 0 values"),
        (HEAD + SERIES + '{"t": 1, "d": 1, "v": [NaN]}\n', "NaN"),
        (HEAD + SERIES + '{"t": 1, "d": 1, "v": ["1"]}\n', "line 3: a row: expected a number"),
        (HEAD + SERIES + '{"t": 1, "d": 1, "v": [true]}\n', "expected a number, found True"),
        (HEAD + SERIES + '{"t": 1, "d": -1, "v": [1]}\n', "do not increase"),
        (HEAD + SERIES + '{"t": 1, "d": 1, "v": [1]}\n' * 2, "do not increase"),
        (HEAD + SERIES + '{"t": 1, "d": 1, "v": [' + "9" * 5000 + "]}\n", "not JSON"),
        (HEAD + '{"mark": "' + "x" * 300 + '", "t": 1}\n', "at most 200"),
        (HEAD + " " * (1 << 20) + "\n", "a line of more than"),
    ],
)
def test_files_that_are_no_records_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(readers.FormatError, match=r"run\.jsonl: ") as caught:
        load(path)
    assert words in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("content", ["my thesis", '{"packer": 1}'])
def test_other_files_are_not_replaced(machine: FakeMachine, tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(content)
    with pytest.raises(readers.OutputError, match="not replaced"):
        sampler(machine, path)
    assert path.read_text() == content


def test_a_record_replaces_one(machine: FakeMachine, recorded: Path) -> None:
    sampler(machine, recorded).stop()
    assert len(load(recorded).times) == 0


def test_two_runs_do_not_write_one_file(machine: FakeMachine, tmp_path: Path) -> None:
    """A child that was forked meanwhile does not keep the lock."""
    first = sampler(machine, tmp_path / "run.jsonl")
    with pytest.raises(readers.OutputError, match="another process"):
        sampler(machine, tmp_path / "run.jsonl")
    ready, stop = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(stop[1])
        os.write(ready[1], b"x")
        os.read(stop[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    first.stop()
    sampler(machine, tmp_path / "run.jsonl").stop()
    os.close(stop[1])
    os.waitpid(child, 0)
    for descriptor in (*ready, stop[0]):
        os.close(descriptor)


def test_a_full_disk_ends_the_record_and_not_the_run(machine: FakeMachine, tmp_path: Path) -> None:
    path, limits = tmp_path / "run.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    found = sampler(machine, path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, limits[1]))
    try:
        for _ in range(3):
            machine.pass_time()
            found.sample()
        usage = found.stop()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(usage.times) == 3 and ["the record ends here" in note for note in found.notes] == [True]
