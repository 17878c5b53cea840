"""How commands fail and what they print: one message, JSON on request, no traceback, no control characters."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import make_jpeg, tree_of
from suites.programs import run_packer, run_python

import packer as library
from cache.messages import json_printable, plural, printable
from packer.cli.screen import progress_line

PACKER = [sys.executable, "-m", "packer"]


NO_SET = "not a packed set (no dataset.json); make one with  packer convert"
FAILURES = [
    ("convert {bad} --to tar -o {out}", 1, "BadSampleError", "a/1.jpg"),
    ("convert {bad}", 1, "BadSampleError", "a/1.jpg"),
    ("convert nowhere --to tar", 2, "UsageError", "Path 'nowhere' does not exist"),
    ("convert {bad} --to lmdb", 2, "UsageError", "'lmdb' is not one of 'hdf5', 'tfrecord', 'tar' (h5 for hdf5, "),
    ("convert {bad} --to tar --shard-size big", 2, "UsageError", "'big' is not a valid size; write it as 256MiB"),
    ("convert {bad} --to tar --max-side 9 --resize-short 9", 2, "UsageError", "exclude each other"),
    ("convert {packed} --to hdf5 --split test", 1, "UnknownNameError", "no split 'test'; it has train, val"),
    ("index {bad}", 1, "SourceError", "no shards found"),
    ("index {bad}/a/1.jpg", 1, "FormatError", "1.jpg"),
    ("inspect {bad}", 1, "DatasetError", NO_SET),
    ("verify {bad}", 1, "DatasetError", NO_SET),
    ("extract {bad} -o {out}", 1, "DatasetError", NO_SET),
    ("export-index {bad} --for dali", 1, "DatasetError", NO_SET),
    ("order {bad}", 1, "DatasetError", NO_SET),
    ("order {packed} --split test", 1, "UnknownNameError", "no split 'test'"),
    ("stage {bad} --target {out}", 1, "DatasetError", NO_SET),
    ("cache warm {bad} --target {memory}", 1, "DatasetError", NO_SET),
    ("cache warm {packed} --capacity lots --target {memory}", 2, "UsageError", "'lots' is not a valid size"),
    (
        "cache warm {packed} --keep gold --target {memory}",
        2,
        "UsageError",
        "keep is encoded, recoded:SIDE",
    ),
    ("cache warm {packed} --capacity 10 --target {memory}", 1, "OutputError", "a capacity of 10 bytes keeps no sample"),
    ("cache warm {packed} --split test --target {memory}", 1, "UnknownNameError", "no split 'test'; it has train, val"),
    ("cache stats nothing --target {memory}", 1, "UnknownNameError", "no cache 'nothing'; it has none"),
    ("cache ls --target nowhere", 2, "UsageError", "'nowhere' does not exist"),
    ("cache purge", 2, "UsageError", "No such command"),
    ("frobnicate", 2, "UsageError", "No such command"),
]


@pytest.mark.parametrize(("line", "status", "kind", "text"), FAILURES, ids=[line for line, *_ in FAILURES])
def test_a_failure_is_one_clear_message_and_json_on_request(
    packed: Path, tmp_path: Path, line: str, status: int, kind: str, text: str
) -> None:
    folders = {"bad": tree_of(tmp_path / "bad", {"a/1.jpg": b"no image"}), "out": tmp_path / "out"}
    (tmp_path / "memory").mkdir()
    arguments = line.format(packed=packed, memory=tmp_path / "memory", **folders).split()
    done = run_packer(*arguments, "--json", cwd=tmp_path)
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["status"], error["type"]) == (status, status, kind), done.stderr
    assert text in error["message"] and text in done.stderr.replace("\n", " ") and "Traceback" not in done.stderr
    assert not list((tmp_path / "memory").iterdir()) and not (tmp_path / "out/dataset.json").exists()


def test_without_json_stdout_is_for_results(tmp_path: Path) -> None:
    for arguments in (("inspect", tmp_path), ("frobnicate",)):
        assert run_packer(*arguments).stdout == ""


def test_an_unexpected_error_is_one_line_that_says_how_to_report_it(tmp_path: Path) -> None:
    script = (
        "import sys, packer.inspection as i, packer.cli.look as c\n"
        "def broken(path): raise ZeroDivisionError('by zero')\n"
        "c.inspect = broken\n"
        "from packer.cli import main\n"
        f"main(['inspect', {str(tmp_path)!r}])\n"
    )
    done = run_python("-c", script)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "unexpected ZeroDivisionError: by zero; this is a defect of packer" in done.stderr
    overwritten = script.replace("ZeroDivisionError('by zero')", "AttributeError(\"module 'readers' has no x\")")
    assert "another package may have overwritten" in run_python("-c", overwritten).stderr
    shown = run_python("-c", script, env={**os.environ, "PACKER_TRACEBACK": "1"})
    assert "Traceback" in shown.stderr


@pytest.mark.parametrize("stage", ["numpy", "h5py", "packer.cli.convert", "click"])
def test_ctrl_c_while_a_command_starts_ends_it_without_a_traceback(tree: Path, tmp_path: Path, stage: str) -> None:
    """Interrupted in the middle of the import of `stage`."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {stage!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    done = run_packer(
        *("convert", tree, "--to", "hdf5", "-o", tmp_path / "out"), env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr.strip().splitlines()[-1] == "packer: interrupted; run the same command again to continue"
    assert "Traceback" not in done.stderr


def test_ctrl_c_again_and_again_ends_a_command_without_a_traceback(tmp_path: Path) -> None:
    tree_of(tmp_path / "in", {f"{number % 3}/{number}.jpg": make_jpeg(number % 7) for number in range(300)})
    line = [*PACKER, "convert", tmp_path / "in", "--to", "tar", "-o", tmp_path / "out", "--samples-per-shard", "1"]
    with subprocess.Popen(line, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        first = child.stderr.readline()
        while child.poll() is None:
            child.send_signal(signal.SIGINT)
            try:
                child.wait(0.02)
            except subprocess.TimeoutExpired:
                continue
        rest = child.stderr.read()
    assert "listing" in first and "Traceback" not in rest, rest
    assert child.returncode == 130, rest


@pytest.mark.parametrize("closed", ["stdout", "stderr", "both"])
def test_closed_streams_are_no_error(packed: Path, closed: str) -> None:
    numbers = {"stdout": (1,), "stderr": (2,), "both": (1, 2)}[closed]
    command = " ".join([*PACKER, "verify", str(packed), *(f"{number}>&-" for number in numbers)])
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_a_shard_never_takes_the_place_of_a_closed_stream(tree: Path, tmp_path: Path) -> None:
    command = " ".join([*PACKER, "convert", str(tree), "--to", "hdf5", "-o", str(tmp_path / "out"), ">&-", "2>&-"])
    assert subprocess.run(["/bin/sh", "-c", command], timeout=120, check=False).returncode == 0
    assert library.verify(tmp_path / "out", deep=True, workers=1).ok


def test_a_full_stdout_is_named(packed: Path) -> None:
    with open("/dev/full", "w") as full:
        done = run_packer("inspect", packed, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr == "packer: No space left on device; " + done.stderr.partition("; ")[2]
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_a_limit_of_file_sizes_is_named_with_the_file_and_what_to_do(tmp_path: Path) -> None:
    tree_of(tmp_path / "in", {f"a/{number}.jpg": make_jpeg(number, (256, 256)) for number in range(40)})
    for to in ("tar", "hdf5", "tfrecord"):
        done = run_packer(
            *("convert", tmp_path / "in", "--to", to, "-o", tmp_path / to, "--workers", 1),
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
        )
        last = done.stderr.strip().splitlines()[-1]
        assert done.returncode == 1 and str(tmp_path / to) in last, done.stderr
        assert "File too large" in last and "run the same command again" in last, done.stderr


HOSTILE = "\x1b[2J\x1b]0;owned\x07\u202egpj.exe\x9b31m"


def test_names_of_files_and_classes_have_no_effect_on_a_terminal(tmp_path: Path) -> None:
    files = {f"{HOSTILE}/{HOSTILE}.jpg": make_jpeg(1), "b/1.jpg": make_jpeg(2), "b/2.jpg": b""}
    convert, out = ("convert", tree_of(tmp_path / "in", files), "--to", "tar", "-o"), tmp_path / f"x{HOSTILE}"
    outputs = [
        run_packer(*convert, out),
        run_packer(*convert, out, "--on-error", "skip"),
        run_packer("convert", tmp_path / HOSTILE, "--to", "tar"),
        run_packer("inspect", out),
        run_packer("verify", out),
        run_packer("inspect", out, "--json"),
        run_packer("extract", out, "-o", tmp_path / "back"),
    ]
    assert [done.returncode for done in outputs] == [1, 0, 2, 0, 0, 0, 0], [done.stderr for done in outputs]
    for done in outputs:
        for text in (done.stdout, done.stderr):
            assert not set(text) & set("\x1b\x07\u202e\x9b"), repr(text)
    assert "\\x1b[2J" in outputs[3].stdout
    assert HOSTILE in json.loads(outputs[5].stdout)["classes"], "JSON has the names as they are"


def test_one_function_escapes_and_one_counts() -> None:
    assert printable("a\tb\nü…") == "a\tb\nü…"
    assert printable("\x1b\x00\x7f\x9b\u202e\udcff") == r"\x1b\x00\x7f\x9b\u202e\udcff"
    assert json.loads(json_printable(json.dumps("\x9b\u202e", ensure_ascii=False))) == "\x9b\u202e"
    counts = [plural(1, "shard"), plural(2, "class"), plural(0, "match"), plural(1000, "copy"), plural(3, "day")]
    assert counts == ["1 shard", "2 classes", "0 matches", "1,000 copies", "3 days"]


@pytest.mark.parametrize("columns", [1, 10, *range(20, 301, 7)])
def test_the_progress_line_is_narrower_than_the_terminal(columns: int) -> None:
    """What does not fit is left out as a whole."""
    line = progress_line(1_281_167, 140_000_000_000, (640_000, 70_000_000_000, 12), 3000.0, columns)
    assert len(line) < columns
    parts = (" 50%", "640,000/1,281,167 samples", "213/s", "12 left out", "23.3 MB/s", "50:00 min left")
    assert all(part in line for part in parts) == (columns >= 80), line
    if columns >= 20:
        rest = re.sub(r"^[█░]{4,24}  ", "", line)
        for part in sorted(parts, key=len, reverse=True):
            rest = rest.replace(part, "", 1)
        assert line.endswith("left") or columns < 62, line
        assert set(rest) <= {" ", ","} and "50%" in line, line
