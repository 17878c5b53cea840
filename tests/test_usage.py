"""`packer.monitor`: readings of a machine and its GPUs, marks, gauges, bounded memory, and the record file."""

from __future__ import annotations

import json
import os
import resource
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pynvml
import pytest
from suites.staging import wait_for
from usage_doubles import DISKS, LUSTRE, MEMINFO, NET, NFS, STAT, FakeMachine, NvmlLibrary, amdsmi_module, last

import packer
import readers
from packer.tools.monitor import Sampler, Usage, load
from packer.tools.monitor.record import Buffer
from readers import Threads
from readers.augment import CenterCrop, Resize
from readers.loader import ImageLoader

SCRATCH, PORT = "proc/fs/lustre/llite/scratch-ffff8f0c12345678/stats", "sys/class/infiniband/mlx5_0/ports/1/counters"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    """A machine to sample, which sees all GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return FakeMachine(tmp_path / "root", monkeypatch)


# --- the machine -----------------------------------------------------------------------------------------------------
def test_counters_become_rates_and_shares(machine: FakeMachine) -> None:
    """Bytes are counted once, not again for partitions, mapped disks, loop devices or bonds."""

    def write(disk: tuple[int, int, int], network: tuple[int, int], nfs: tuple[int, int], lustre: int, io: int) -> None:
        machine.write(
            meminfo=MEMINFO, diskstats=DISKS.format(*disk), net__dev=NET.format(*network),
            self__mountstats=NFS.format(*nfs), pressure__io=f"some avg10=0.00 total={io}\nfull total=0\n",
        )  # fmt: skip
        machine.put(SCRATCH, LUSTRE.format(1000 + lustre, lustre // 2000))
        machine.put(f"{PORT}/port_rcv_data", f"{lustre // 20}\n")

    write((0, 0, 0), (0, 0), (0, 0), 0, 0)
    machine.folders("sys/class/net/eth0/device", "sys/class/net/bond0/bonding", "sys/block/sda/device")
    machine.folders("sys/block/dm-0/slaves/sda1")
    sampler = machine.sampler()
    write((2000, 1000, 500), (500, 50), (4000, 400), 20_000, 500_000)
    machine.write(stat=STAT.format(150, 200))
    machine.now += 2.0
    usage = sampler.stop()
    assert last(usage) == {
        "cpu busy": 1.0, "cpu iowait": 0.0, "cpu steal": 0.0, "cpu0 busy": 1.0,
        "memory used": 400 * 1024, "page cache": 200 * 1024,
        "sda read": 512_000, "sda write": 256_000, "sda busy": 0.25,
        "eth0 in": 250, "eth0 out": 25, "mlx5_0 in": 2000,
        "nfs /data read": 2000, "nfs /data write": 200, "lustre scratch read": 10_000, "lustre scratch write": 5,
        "io pressure": 0.25,
    }  # fmt: skip
    full = {series.name: series.full for series in usage.series}
    assert full["memory used"] == 1000 * 1024 and full["eth0 in"] == 125e6 and full["sda read"] is None


def test_a_counter_that_falls_has_no_value(machine: FakeMachine) -> None:
    """It wrapped, or the device was removed and came back. A container has no physical cards: its interfaces count."""
    machine.write(net__dev=NET.format(5000, 100))
    machine.folders("sys/class/net/bond0/bonding")
    sampler = machine.sampler()
    for received, expected in ((10, None), (110, 100.0)):
        machine.write(net__dev=NET.format(received, 200))
        values = last(machine.sample(sampler).usage())
        assert values.get("eth0 in") == expected and "bond0 in" not in values


def test_cpus_come_and_go(machine: FakeMachine) -> None:
    sampler = machine.sampler()
    without = "".join(line for line in STAT.format(150, 200).splitlines(True) if not line.startswith("cpu0"))
    for text, online, expected in (
        (without, "1", None), (STAT.format(200, 300), "0-1", None), (STAT.format(250, 400), "0-1", 1.0),
    ):  # fmt: skip
        machine.write(stat=text)
        machine.put("sys/devices/system/cpu/online", online)
        assert last(machine.sample(sampler).usage()).get("cpu0 busy") == expected


GROUPS = {
    "0::/job": {
        "job/memory.current": "5000", "job/memory.max": "max", "memory.max": "8000",
        "job/memory.stat": "anon 1000\ninactive_file 1500\nactive_file 500\n",
        "job/cpu.stat": "usage_usec {cpu}000000\nnr_periods 9\nthrottled_usec 500000\n",
        "job/io.stat": "8:0 rbytes={read} wbytes=0 rios=1\n253:0 rbytes={read} wbytes=0\n7:0 \n",
    },
    "4:memory:/job\n2:cpu,cpuacct:/job\n3:blkio:/job\n0::/\n": {
        "memory/job/memory.usage_in_bytes": "5000", "memory/job/memory.limit_in_bytes": "9223372036854771712",
        "memory/memory.limit_in_bytes": "8000",
        "memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 1500\ntotal_active_file 500\n",
        "cpu/job/cpu.stat": "nr_periods 9\nnr_throttled 3\nthrottled_time 500000000\n",
        "cpu/job/cpuacct.usage": "{cpu}000000000", "cpuacct/job/cpuacct.usage": "{cpu}000000000",
        "blkio/job/blkio.throttle.io_service_bytes": "8:0 Read {read}\n8:0 Write 0\n8:0 Sync 1\nTotal 9\n",
    },
}  # fmt: skip


@pytest.mark.parametrize("membership", GROUPS, ids=["v2", "v1"])
def test_control_groups_of_both_versions(machine: FakeMachine, membership: str) -> None:
    def write(cpu: int, read: int) -> None:
        for name, text in GROUPS[membership].items():
            machine.put(f"sys/fs/cgroup/{name}", text.replace("{cpu}", str(cpu)).replace("{read}", str(read)))

    machine.write(self__cgroup=membership)
    machine.folders("sys/block/sda/device")
    machine.put("sys/block/sda/dev", "8:0\n")
    write(10, 100)
    sampler = machine.sampler()
    write(13, 300)
    machine.now += 2.0
    usage = sampler.stop()
    job = {name: value for name, value in last(usage).items() if name.startswith("job")}
    assert job == {
        "job memory": 3000, "job cpus": 1.5, "job throttled": 0.0, "job disk read": 100, "job disk write": 0,
    }  # fmt: skip
    assert next(series.full for series in usage.series if series.name == "job memory") == 8000


def test_processes_include_their_children() -> None:
    """From the first time they are seen; the end of a process does not reduce the total."""
    work = "import sys; input(); [sum(range(10**6)) for _ in range(5)]; print('x', flush=True); sys.stdin.read()"
    shell = f"{sys.executable} -c {shlex.quote(work)}; read end"
    with subprocess.Popen(["sh", "-c", shell], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        sampler, begun = Sampler(process=process.pid), time.monotonic()
        sampler.sample()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"work\n")
        process.stdin.flush()
        assert process.stdout.read(1) == b"x"
        sampler.sample()
        usage = sampler.stop()
        process.communicate()
    used = np.nansum(usage.column("processes cpus") * usage.durations)
    assert 0 < used < time.monotonic() - begun


def test_a_machine_without_proc_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packer.tools.monitor.machine.ROOT", tmp_path)
    with pytest.raises(readers.SourceError, match="Linux only"):
        Sampler()


def test_a_sample_of_this_machine_is_plausible() -> None:
    with Sampler(interval=0.05) as sampler:
        seen = threading.Event()
        sampler.gauge("calls", lambda: [seen.set(), 3.0][1])
        assert seen.wait(300)
    percentiles = sampler.usage().percentiles()
    assert 0 <= percentiles["cpu busy"].p50 <= 1 and percentiles["calls"] == (3.0,) * 7
    assert sampler.notes == () or "gpu" in sampler.notes[0].lower()


# --- GPUs ------------------------------------------------------------------------------------------------------------
def put_nvml(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch, broken: int = 0) -> NvmlLibrary:
    machine.folders("proc/driver/nvidia")
    library = NvmlLibrary(broken)
    monkeypatch.setattr(pynvml, "nvmlLib", library)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return library


def gpus_of(machine: FakeMachine) -> tuple[Sampler, dict[str, float]]:
    sampler = machine.sampler()
    for _ in range(5):
        machine.sample(sampler)
    return sampler, {name: value for name, value in last(sampler.stop()).items() if name.startswith("gpu")}


def test_each_nvidia_gpu_reports_its_supported_values(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    library = put_nvml(machine, monkeypatch)
    sampler, values = gpus_of(machine)
    assert values == {
        "gpu0 busy": 0.22, "gpu0 memory": 1 << 30, "gpu0 power": 350.5, "gpu0 decoder": 0.5, "gpu0 in": 1e6,
        "gpu0 out": 1e4, "gpu1 memory": 2 << 30, "gpu1 decoder": 0.5, "gpu1 in": 1e6, "gpu1 out": 1e4,
    }  # fmt: skip
    full = {series.name: series.full for series in sampler.usage().series}
    assert full["gpu0 memory"] == 80 << 30 and full["gpu0 power"] == 700 and sampler.notes == ()
    calls = library.throughput_calls
    assert calls == [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1], "each call takes 20 ms, so only one GPU a sample"
    assert library.initialised == 0, "NVML was not shut down"


@pytest.mark.parametrize(("visible", "numbers"), [("1", "1"), ("GPU-0a", "0"), ("MIG-x", "01"), ("", "01")])
def test_only_gpus_of_the_job_are_sampled(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch, visible: str, numbers: str
) -> None:
    put_nvml(machine, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert {name[3] for name in gpus_of(machine)[1]} == set(numbers)


def test_amd_gpus(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.folders("sys/module/amdgpu")
    module = amdsmi_module()
    monkeypatch.setitem(sys.modules, "amdsmi", module)
    sampler, values = gpus_of(machine)
    assert values == {
        "gpu0 busy": 0.4, "gpu0 memory": 1 << 30, "gpu0 power": 300, "gpu0 pcie": 1e9, "gpu1 memory": 1 << 30,
    }  # fmt: skip
    assert not module.initialised and sampler.notes == ()


@pytest.mark.parametrize(
    ("driver", "package", "words"),
    [
        ("proc/driver/nvidia", "pynvml", ["nvidia-ml-py", "gpu-monitor"]),
        ("sys/module/amdgpu", "amdsmi", ["amdsmi", "gpu-monitor-amd"]),
        ("proc/driver/nvidia", "", ["Driver Not Loaded"]),
    ],
)
def test_a_gpu_that_cannot_be_queried_is_a_note(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch, driver: str, package: str, words: list[str]
) -> None:
    """The package is missing, or the driver does not answer."""
    put_nvml(machine, monkeypatch, broken=pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    (machine.root / "proc/driver/nvidia").rmdir()
    machine.folders(driver)
    if package:
        monkeypatch.setitem(sys.modules, package, None)
    sampler, values = gpus_of(machine)
    assert not values and all(word in sampler.notes[0] for word in words) and "cpu busy" in sampler.usage().names


# --- in training code -------------------------------------------------------------------------------------------------
def test_marks_counts_and_gauges_of_training_code(machine: FakeMachine) -> None:
    sampler, queue = machine.sampler(), iter([1.0, "broken", 3.0])
    sampler.gauge("queue", lambda: next(queue), 4)  # type: ignore[arg-type,return-value]
    for epoch in range(4):
        sampler.mark(f"epoch {epoch}")
        for _ in range(5):
            sampler.step(images=32)
        machine.sample(sampler, 2.0)
    usage = sampler.stop()
    assert usage.column("queue").tolist()[::2] == [1, 3] and np.isnan(usage.column("queue")[[1, 3]]).all()
    assert usage.column("steps").tolist()[1:] == [2.5] * 3 and usage.column("images").tolist()[1:] == [80] * 3
    assert [(mark.name, mark.seconds) for mark in usage.marks] == [(f"epoch {n}", 2.0 * n) for n in range(4)]
    assert [mark for mark, _ in usage.spans()] == list(usage.marks)
    assert [span.times.tolist() for _, span in usage.spans()] == [[2.0], [4.0], [6.0], [8.0]]


def test_a_failing_probe_is_only_noted(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.write(meminfo=MEMINFO)
    sampler = machine.sampler()
    monkeypatch.setattr("psutil.virtual_memory", lambda: 1 // 0)
    for _ in range(3):
        machine.sample(sampler)
    assert len(sampler.stop().times) == 3 and len(sampler.notes) == 1
    assert "memory could not be read: ZeroDivisionError" in sampler.notes[0]


def test_a_hanging_probe_blocks_nothing_else(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a GPU that has fallen off the bus: marks are still taken, and the run can end."""
    monkeypatch.setattr("packer.tools.monitor.sampler._PATIENCE_SECONDS", 0.05)
    sampler, hangs, go = machine.sample(machine.sampler()), threading.Event(), threading.Event()
    sampler.gauge("stuck", lambda: [hangs.set(), go.wait(300)][1])
    thread = threading.Thread(target=machine.sample, args=(sampler,))
    thread.start()
    assert hangs.wait(300)
    sampler.mark("meanwhile")
    usage = sampler.stop()
    go.set()
    thread.join()
    assert len(usage.times) == len(sampler.usage().times) == 1 and [mark.name for mark in usage.marks] == ["meanwhile"]
    assert "did not end" in sampler.notes[0]


def test_the_queue_of_a_loader_can_be_watched(tree: Path) -> None:
    reader = readers.open_folder(tree, "train")
    loader = ImageLoader(reader, 2, augment=[Resize(8), CenterCrop(8)], threads=Threads(1, prefetch=2))
    assert loader.ready == 0
    batches = iter(loader)
    next(batches)
    wait_for(lambda: loader.ready == 2, "two batches")
    for _ in batches:
        pass
    assert loader.ready == 0


@pytest.mark.parametrize(("rank", "nodes", "name"), [(0, 1, "run.jsonl"), (1, 1, None), (2, 2, "run.node1.jsonl")])
def test_each_node_has_one_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, nodes: int, name: str | None
) -> None:
    values = {"RANK": rank, "WORLD_SIZE": 2 * nodes, "LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2,
              "GROUP_RANK": rank // 2}  # fmt: skip
    for variable, value in values.items():
        monkeypatch.setenv(variable, str(value))
    with packer.monitor(tmp_path / "run.jsonl") as usage:
        usage.mark("begin")
    assert [path.name for path in tmp_path.iterdir()] == ([name] if name else [])


# --- memory ----------------------------------------------------------------------------------------------------------
def test_a_long_run_needs_the_memory_of_a_short_one() -> None:
    """Rows are merged into means by time; no time is lost."""
    buffer, rows = Buffer(8), []
    for number in range(1000):
        rows.append(buffer.add(number + 1.0, 1.0, [number, *([7.0] if number > 500 else [])]))
    times, durations, values = buffer.arrays()
    assert len(times) <= 9 and times[-1] == 1000 and durations.sum() == 1000
    assert np.average(values[:, 0], weights=durations) == pytest.approx(np.arange(1000).mean())
    assert np.nanmin(values[:, 1]) == 7.0 and np.isnan(values[0, 1])
    assert len([row for row in rows if row]) < 8 * 9, "the file grows faster than the logarithm of the time"


def test_percentiles_count_time_and_not_samples(machine: FakeMachine) -> None:
    sampler = machine.sampler()
    sampler.gauge("queue", lambda: machine.now)
    for seconds in (1.0, 1.0, 8.0):
        machine.sample(sampler, seconds)
    queue = sampler.stop().percentiles()["queue"]
    assert queue == (101, 110, 110, 110, 110, 110, pytest.approx(0.1 * (101 + 102) + 0.8 * 110))


def test_heat_rows_are_shares_of_the_limit(machine: FakeMachine) -> None:
    """Every second of 256 cores is busy; eight share a row."""

    def write(second: int) -> None:
        ticks = (100 + 100 * second, 0)
        cores = (f"cpu{n} {ticks[1 - n % 2]} 0 0 {ticks[n % 2]} 0 0 0 0 0 0\n" for n in range(256))
        machine.write(stat="cpu 1 1 1 1\n" + "".join(cores))

    write(0)
    sampler = machine.sampler()
    for second in range(1, 5):
        write(second)
        sampler.gauge("queue", lambda second=second: float(second), 8)  # type: ignore[misc]
        machine.sample(sampler)
    rows = {row.name: row for row in sampler.stop().summary(most_cores=32).heat_rows(columns=2)}
    assert len([name for name in rows if "–" in name]) == 32 and rows["cpu0–7 busy"].values == (0.5, 0.5)
    assert rows["queue"].values == (1.5 / 8, 3.5 / 8) and rows["queue"].full == 8
    assert list(rows)[-1] == "cpu248–255 busy"


# --- the file --------------------------------------------------------------------------------------------------------
@pytest.fixture
def recorded(machine: FakeMachine, tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl"
    sampler = machine.sampler(path)
    for number in range(5):
        sampler.mark(f"épo\u202ech {number}\n")
        if number == 2:
            machine.write(meminfo=MEMINFO)
        machine.write(stat=STAT.format(150 + 10 * number, 200))
        machine.sample(sampler, 0.5)
    sampler.stop()
    return path


def test_a_record_is_restored_from_lines_and_from_json(recorded: Path, tmp_path: Path) -> None:
    usage = load(recorded)
    assert len(usage.times) == 5 and "memory used" in usage.names and np.isnan(usage.column("memory used")[0])
    document = json.loads(json.dumps({"verdict": "", "usage": usage.to_dict()}, allow_nan=False))
    (tmp_path / "diagnosis.json").write_text(json.dumps(document, indent=1))
    again: Usage = load(tmp_path / "diagnosis.json")
    for name in ("host", "interval", "series", "marks"):
        assert getattr(again, name) == getattr(usage, name)
    assert np.allclose(again.values, usage.values, rtol=1e-4, equal_nan=True) and np.allclose(again.times, usage.times)


def test_the_file_of_a_killed_process_is_complete_up_to_a_line(recorded: Path) -> None:
    """Cut anywhere after the first line."""
    whole, data = load(recorded), recorded.read_bytes()
    for cut in range(data.index(b"\n") + 1, len(data), 7):
        recorded.write_bytes(data[:cut])
        usage = load(recorded)
        assert np.array_equal(usage.times, whole.times[: len(usage.times)])


HEAD = '{"packer usage": 1, "host": "a", "started": 1, "interval": 0.5}\n'
DOCUMENT = """{"usage": {"host": "a", "started": 1, "interval": 1, "marks": [], "times": [1, 2],
"series": [{"name": "x", "unit": "1"}], "durations": [0.5, 0.5], "values": {"x": [1, null]}}}"""
SERIES = '{"series": [{"name": "x", "unit": "share", "full": 1}]}\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "neither a record"),
        ("PNG", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"usage": {"durations": 3}}', "do not fit together: KeyError"),
        (DOCUMENT.replace('[{"name": "x", "unit": "1"}]', "3"), "do not fit together"),
        (DOCUMENT.replace("[0.5, 0.5]", "[0.5]"), "do not fit together"),
        (DOCUMENT.replace("[1, null]", '["1", null]'), "expected a number"),
        (HEAD.replace("1,", "2,", 1), "version 2"),
        (HEAD.replace('"a"', "7"), "expected a name"),
        (HEAD.replace("0.5", "1e999"), "expected a number"),
        (HEAD + "[1]\n", "line 2: expected a JSON object"),
        (HEAD + SERIES.replace("share", "furlongs"), "a unit of share"),
        (HEAD + SERIES + SERIES, "two series have the same name"),
        (HEAD + '{"series": [' + ", ".join(f'{{"name": "{n}", "unit": "1"}}' for n in range(5000)) + "]}\n", "4,096"),
        (HEAD + '{"t": 1, "d": 1, "v": [1]}\n', "more than 0 values"),
        (HEAD + SERIES + '{"t": 1, "d": 1, "v": [NaN]}\n', "line 3: not JSON"),
        (HEAD + SERIES + '{"t": 1, "d": 1, "v": [1]}\n' * 2, "do not increase"),
        (HEAD + '{"mark": "' + "x" * 300 + '", "t": 1}\n', "at most 200"),
    ],
)
def test_files_that_are_not_records_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(readers.FormatError, match=r"run\.jsonl: ") as caught:
        load(path)
    assert words in str(caught.value) and len(str(caught.value)) < 400


def test_a_record_replaces_only_a_record(machine: FakeMachine, recorded: Path) -> None:
    machine.sampler(recorded).stop()
    assert len(load(recorded).times) == 0
    for content in ("my thesis", '{"packer": 1}'):
        recorded.write_text(content)
        with pytest.raises(readers.OutputError, match="not replaced"):
            machine.sampler(recorded)
        assert recorded.read_text() == content


def test_a_forked_child_does_not_touch_the_record(machine: FakeMachine, tmp_path: Path) -> None:
    """The child writes nothing, ends nothing, and does not keep the lock that stops two runs from writing one file."""
    path = tmp_path / "run.jsonl"
    sampler = machine.sampler(path)
    with pytest.raises(readers.OutputError, match="another process"):
        machine.sampler(path)
    machine.now += 1
    ready, stop = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            sampler.mark("child")
            machine.sample(sampler)
            sampler.stop()
            os.close(stop[1])
            os.write(ready[1], b"x")
            os.read(stop[0], 1)
        finally:
            os._exit(0)
    assert os.read(ready[0], 1) == b"x"
    sampler.mark("parent")
    sampler.stop()
    usage = load(path)
    assert [mark.name for mark in usage.marks] == ["parent"] and len(usage.times) == 1
    machine.sampler(path).stop()
    os.close(stop[1])
    os.waitpid(child, 0)
    for descriptor in (*ready, stop[0]):
        os.close(descriptor)


def test_a_full_disk_ends_the_record_and_not_the_run(machine: FakeMachine, tmp_path: Path) -> None:
    path, limits = tmp_path / "run.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    sampler = machine.sampler(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, limits[1]))
    try:
        for _ in range(3):
            machine.sample(sampler)
        usage = sampler.stop()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(usage.times) == 3 and ["the record ends here" in note for note in sampler.notes] == [True]
