"""`packer monitor` and `packer diagnose --compare`: the usage of a command, and two records side by side."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from suites.programs import run_packer

import packer
from packer.tools.monitor import Mark, Series, Usage, load
from packer.tools.monitor.record import compare, read_usage, usage_lines
from packer.tools.report.pages import comparison_page, usage_page

READY = "import os, sys, time; print('ready', flush=True); "


SLOW = {"cpu_busy": 1.0, "gpu0_busy": 0.5, "steps": [1] * 5 + [3] * 5, "images": 100.0, "sda_read": 4e6}
FAST = {"cpu_busy": 0.5, "gpu0_busy": 1.0, "steps": 4.0, "images": 150.0, "eth0_in": 7e6}


# --- packer monitor --------------------------------------------------------------------------------------------------
def test_a_monitored_command_keeps_input_output_and_status(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    html = tmp_path / "run.html"
    options = ("--output", path, "--interval", "20ms", "--html", html)
    done = run_packer(
        "monitor", *options, "--", "sh", "-c", "read x; echo got $x --json; sleep 0.3; exit 7", input="hello\n"
    )
    assert done.returncode == 7 and done.stdout == "got hello --json\n"
    assert "cpu busy" in done.stderr and str(path) in done.stderr and "cpu busy" in load(path).names
    assert "exit status" in html.read_text() and html.read_text().count("<svg") == 2


def test_the_record_as_json_follows_the_output_of_the_command() -> None:
    done = run_packer("monitor", "--json", "--", "sh", "-c", "echo first; sleep 0.3")
    first, _, rest = done.stdout.partition("\n")
    document = json.loads(rest)
    assert first == "first" and document["command"][0] == "sh" and document["status"] == 0
    assert document["percentiles"]["cpu busy"]["p99"] <= 1 and Usage.from_dict(document).seconds > 0


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("--", "no-such-command"), 1, "no-such-command: cannot be run"),
        (("--interval", "1ms", "--", "true"), 2, "--interval 0.001: expected seconds"),
        (("--output", "no/such/run.jsonl", "--", "echo", "ran"), 1, "no/such/run.jsonl"),
        (("--output", __file__, "--", "echo", "ran"), 1, "not replaced"),
        (("--html", "no/such/report.html", "--", "echo", "ran"), 2, "no directory no/such"),
        ((), 2, "COMMAND"),
    ],
)
def test_a_command_is_not_run_if_its_record_cannot_be_written(arguments: Any, status: int, words: str) -> None:
    done = run_packer("monitor", *arguments)
    assert done.returncode == status and words in done.stderr and "ran" not in done.stdout
    assert "Traceback" not in done.stderr


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    """Starts a monitored Python program and waits until it reports that it is ready."""
    programs: list[subprocess.Popen[str]] = []

    def start(program: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "packer", "monitor", "--interval", "20ms", "--output", tmp_path / "run.jsonl"]
        command += ["--", sys.executable, "-c", READY + program]
        options: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        programs.append(subprocess.Popen(list(map(str, command)), **options))
        assert programs[-1].stdout is not None and programs[-1].stdout.readline() == "ready\n"
        return programs[-1]

    yield start
    for program in programs:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
        program.communicate(timeout=300)


def test_the_table_of_a_killed_command_is_printed(started: Any) -> None:
    program = started("os.kill(os.getpid(), 9)")
    _, shown = program.communicate(timeout=300)
    assert program.returncode == 128 + 9 and "cpu busy" in shown


def test_a_signal_goes_to_the_command(started: Any) -> None:
    program = started(
        "import signal; signal.signal(15, lambda number, frame: sys.exit(3)); print('set', flush=True); time.sleep(600)"
    )
    assert program.stdout.readline() == "set\n"
    program.send_signal(signal.SIGTERM)
    _, shown = program.communicate(timeout=300)
    assert program.returncode == 3 and "cpu busy" in shown


def test_a_record_is_complete_when_the_monitor_is_killed(started: Any, tmp_path: Path) -> None:
    program = started(
        "path = sys.argv[0]\n"
        f"while open({str(tmp_path / 'run.jsonl')!r}).read().count('\"t\"') < 3: time.sleep(0.01)\n"
        "print('enough', flush=True); time.sleep(600)"
    )
    assert program.stdout.readline() == "enough\n"
    os.killpg(program.pid, signal.SIGKILL)
    program.wait(300)
    usage = load(tmp_path / "run.jsonl")
    assert len(usage.times) >= 3 and "processes cpus" in usage.names


# --- the content of a record -----------------------------------------------------------------------------------------
def usage_of(marks: tuple[Mark, ...] = (), full: dict[str, float] | None = None, **columns: Any) -> Usage:
    """Ten samples of one second; a column is a number or ten of them. "_" in names stands for a space."""
    units = {"busy": "share", "iowait": "share", "pressure": "share", "throttled": "share", "memory": "bytes",
             "used": "bytes", "steps": "1/s", "images": "1/s"}  # fmt: skip
    names = [name.replace("_", " ") for name in columns]
    series = [Series(name, units.get(name.split()[-1], "bytes/s"), (full or {}).get(name)) for name in names]
    values = np.stack([np.broadcast_to(np.array(column, float), (10,)) for column in columns.values()], 1)
    return Usage("host", 0.0, 1.0, tuple(series), np.arange(1.0, 11), np.ones(10), values, marks)


@pytest.mark.parametrize(
    ("columns", "full", "words"),
    [
        ({"cpu_busy": 0.98, "gpu0_busy": 0.22}, {}, ["CPUs are 98 % busy", "the GPU is 22 %", "the input pipeline is "
            "the limit"]),
        ({"cpu_busy": 0.98}, {}, ["98 %", "the CPUs are the limit"]),
        ({"cpu_busy": 0.3, "gpu0_busy": 0.97, "gpu1_busy": 0.93}, {}, ["GPUs are 95 % busy", "fast enough"]),
        ({"cpu_busy": 0.1, "gpu0_busy": 0.3, "sda_busy": 0.95, "sda_read": 140e6}, {},
         ["sda reads 140 MB/s steadily", "95 %", "CPUs are 90 % idle", "storage is the limit"]),
        ({"cpu_busy": 0.1, "sda_busy": 0.5, "sda_read": [0] * 8 + [9e8] * 2, "io_pressure": 0.4}, {},
         ["sda reads 180 MB/s,", "storage is the limit"]),
        ({"cpu_busy": 0.1, "nfs_/data_read": 9e7}, {}, ["nfs /data gives 90 MB/s steadily", "storage is the limit"]),
        ({"cpu_busy": 0.1, "io_pressure": 0.5}, {}, ["wait for I/O 50 %", "storage is the limit"]),
        ({"cpu_busy": 0.1, "eth0_in": 118e6}, {"eth0 in": 125e6}, ["eth0 receives 118 MB/s, 94 % of its link"]),
        ({"cpu_busy": 0.5, "job_throttled": 0.4, "gpu0_busy": 0.5}, {}, ["quota stops the job 40 %", "more CPUs"]),
        ({"cpu_busy": 0.1, "gpu0_busy": 0.1, "sda_busy": 0.0, "sda_read": 0}, {}, ["too few workers"]),
        ({"cpu_busy": 0.1, "sda_busy": 0.9, "sda_read": 1.0, "sda_write": 5e8}, {}, ["sda writes 500 MB/s", "storage"]),
        ({"cpu_busy": 0.1, "eth0_in": 118e6}, {}, ["no limit is seen"]),
        ({"cpu_busy": 0.95, "job_memory": 990.0}, {"job memory": 1000.0}, ["the limit; memory is nearly full"]),
        ({"cpu_busy": np.nan}, {}, ["too short"]),
    ],
)  # fmt: skip
def test_a_record_is_summarised_in_a_sentence(
    columns: dict[str, Any], full: dict[str, float], words: list[str]
) -> None:
    sentence = read_usage(usage_of(full=full, **columns))
    assert all(word in sentence for word in words), sentence


def test_reports_have_heat_maps_and_escape_names(tmp_path: Path) -> None:
    """Also for a record without a sample."""
    marked = usage_of((Mark("<b>one</b>", 1.0), Mark("two", 5.0)), **SLOW)
    empty = replace(marked, times=marked.times[:0], durations=marked.durations[:0], values=marked.values[:0])
    both = comparison_page(compare(marked, usage_of(**FAST)), ("a<i>", "b")).render()
    page = usage_page(marked, "What <b> used", [("command", "<b>")], ["a note"]).render()
    assert page.count("<svg") == 2 and both.count("<svg") == 4, "each chart needs a wide and a narrow version"
    assert "<b>" not in page and "<i>" not in both and "&lt;b&gt;one" in page
    assert "1/s\u00a0…\u00a01/s\u00a0…\u00a01/s" in page and "3/s\u00a0…\u00a03/s" in page
    assert "Nothing was sampled" in usage_page(empty, "nothing").render()


@pytest.mark.parametrize(("columns", "most"), [(200, 110), (80, 80)])
def test_a_table_fits_the_terminal(columns: int, most: int) -> None:
    lines = usage_lines(usage_of(tuple(Mark(f"epoch {n}", 0.2 * n) for n in range(40)), **SLOW), columns)
    table = lines[: lines.index("")]
    assert max(map(len, table)) <= most and len(table) == 6 and ("p90" in table[0]) == (columns > 80)
    assert lines[-3].startswith("marks: epoch 0 at 0.0 s, ") and lines[-3].endswith("and 28 more")


# --- packer diagnose --compare ---------------------------------------------------------------------------------------
def test_two_records_are_compared_series_by_series_and_span_by_span() -> None:
    first = usage_of((Mark("start", 0.0), Mark("epoch", 5.0), Mark("only in A", 9.0)), **SLOW)
    result = compare(first, usage_of((Mark("epoch", 2.0, images=640.0),), **FAST))
    rows = {row.name: row for row in result.rows}
    assert list(rows) == ["steps", "images", "gpu0 busy", "cpu busy", "sda read", "eth0 in"]
    assert rows["images"].ratio == 1.5 and rows["sda read"].b is None and rows["eth0 in"].ratio is None
    (span,) = result.spans
    assert (span.name, span.seconds, span.steps, span.images) == ("epoch", (4.0, 8.0), (3.0, 4.0), (100.0, 640.0))
    assert result.verdict.startswith("B makes 150 images a second, A 100: +50%. A: CPUs are 100 % busy")


def test_a_diagnosis_records_each_of_its_lines() -> None:
    result = packer.diagnose([np.zeros(8)] * 3, simulate_step=0.001, seconds=0.5)
    assert result.usage is not None
    rates = {mark.name: (mark.steps, mark.images) for mark in result.usage.marks}
    lines = {rung.stage: (rung.time.per_second, 8 * rung.time.per_second) for rung in result.rungs}
    assert lines.items() <= rates.items() and all(len(span.times) for _, span in result.usage.spans())
    again = Usage.from_dict(json.loads(json.dumps(result.to_dict()))["usage"])
    both = compare(again, again)
    assert [span.name for span in both.spans] == [mark.name for mark in result.usage.marks]
    assert re.match(r"B makes \S+ images a second in '\w+', A \S+: \+0%\. ", both.verdict)


def test_the_command_compares_a_record_with_the_json_of_a_diagnosis(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(usage_of(**SLOW).to_dict()))
    document = {"verdict": "", "usage": usage_of((Mark("\x1b[2J<b>", 1.0),), **FAST).to_dict()}
    (tmp_path / "b.json").write_text(json.dumps(document, indent=1))
    shown = run_packer("diagnose", "--compare", tmp_path / "a.json", tmp_path / "b.json")
    assert shown.returncode == 0 and "+50%" in shown.stdout and "\x1b" not in shown.stdout
    result = json.loads(run_packer("diagnose", "--json", "--compare", *sorted(tmp_path.iterdir())).stdout)
    assert {row["name"]: row["ratio"] for row in result["series"]}["gpu0 busy"] == 2.0


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ((__file__,), 2, "requires 2 arguments"),
        ((__file__, "nowhere.jsonl"), 2, "nowhere.jsonl"),
        ((__file__, __file__), 1, "neither a record"),
    ],
)
def test_records_that_cannot_be_compared(arguments: Any, status: int, words: str) -> None:
    done = run_packer("diagnose", "--compare", *arguments)
    assert done.returncode == status and words in done.stderr and "Traceback" not in done.stderr
