"""The file of a record: whole up to its last line, and nothing in it is trusted."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import numpy as np
import pytest
from usage_doubles import MEMINFO, STAT, FakeMachine, sampler

import readers
from packer.tools.monitor import Usage, load


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
DOCUMENT = """{"usage": {"host": "a", "started": 1, "interval": 1, "marks": [], "times": [1, 2],
"series": [{"name": "x", "unit": "1"}], "durations": [0.5, 0.5], "values": {"x": [1, null]}}}"""
SERIES = '{"series": [{"name": "x", "unit": "share", "full": 1}]}\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "neither a record"),
        ("PNG", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"usage": null}', "neither a record"),
        ('{"usage": {"durations": 3}}', "do not fit together: KeyError"),
        (DOCUMENT.replace('[{"name": "x", "unit": "1"}]', "3"), "do not fit together"),
        (DOCUMENT.replace("[0.5, 0.5]", "[0.5]"), "do not fit together"),
        (DOCUMENT.replace('"x":', '"y":'), "do not fit together: KeyError"),
        (DOCUMENT.replace("[1, null]", '["1", null]'), "expected a number"),
        (HEAD.replace("1,", "2,", 1), "version 2"),
        (HEAD.replace('"a"', "7"), "expected a name"),
        (HEAD.replace("0.5", "1e999"), "expected a number"),
        (HEAD + "[1]\n", "line 2: expected a JSON object"),
        (HEAD + SERIES.replace("share", "furlongs"), "a unit of share"),
        (HEAD + SERIES.replace("1}", "-1}"), "a limit above 0"),
        (HEAD + SERIES + SERIES, "two series of the same name"),
        (HEAD + '{"series": [' + ", ".join(f'{{"name": "{n}", "unit": "1"}}' for n in range(5000)) + "]}\n", "4,096"),
        (HEAD + '{"t": 1, "d": 1, "v": [1]}\n', "more than 0 values"),
        (HEAD + SERIES + '{"t": 1, "d": 1, "v": [NaN]}\n', "line 3: not JSON"),
        (HEAD + SERIES + '{"t": 1, "d": 1, "v": [true]}\n', "expected a number, found True"),
        (HEAD + SERIES + '{"t": 1, "d": -1, "v": [1]}\n', "do not increase"),
        (HEAD + SERIES + '{"t": 1, "d": 1, "v": [1]}\n' * 2, "do not increase"),
        (HEAD + '{"mark": "' + "x" * 300 + '", "t": 1}\n', "at most 200"),
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
