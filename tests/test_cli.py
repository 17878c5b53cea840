"""The command line as a user meets it: exit status, one message, JSON, progress."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import files_of, make_jpeg

from cache.text import parse_size
from packer.cli.text import bar, human_bytes, human_seconds, progress_line


def packer(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "packer", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd, check=False)


def test_the_main_job(tree: Path, tmp_path: Path) -> None:
    done = packer("convert", tree, "--to", "hdf5", "--workers", 2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("images-hdf5: 45 samples (train 36, val 9), 3 classes, ")
    assert "in 2 hdf5 shards" in done.stdout
    assert f"listing image folder {tree}" in done.stderr

    checked = packer("verify", "images-hdf5", "--deep", "--against", tree, cwd=tmp_path)
    assert (checked.returncode, checked.stdout[:18]) == (0, "images-hdf5: OK: 4"), checked.stderr

    shown = packer("inspect", "images-hdf5", cwd=tmp_path)
    assert shown.returncode == 0
    for text in ("hdf5 set, 3 classes", "train: 36 samples in 1 shard", "cat", "median", "duplicates: none"):
        assert text in shown.stdout

    back = packer("extract", "images-hdf5", "-o", "back", cwd=tmp_path)
    assert back.returncode == 0 and back.stdout.startswith("back: 45 files")
    assert files_of(tmp_path / "back") == files_of(tree)

    again = packer("index", "images-hdf5", cwd=tmp_path)
    assert again.returncode == 0
    assert again.stdout.startswith("images-hdf5: 45 samples (train 36, val 9) in 2 hdf5 shards")


def test_json_is_one_document_and_nothing_else(tree: Path, tmp_path: Path) -> None:
    done = packer("convert", tree, "--to", "tar", "-o", tmp_path / "set", "--json", "--samples-per-shard", 12)
    value = json.loads(done.stdout)
    assert (value["samples"], value["shards"], value["format"], done.stderr) == (45, 4, "tar", "")
    for command in ("inspect", "verify", "index"):
        result = packer(command, tmp_path / "set", "--json")
        assert result.returncode == 0 and result.stderr == ""
        assert isinstance(json.loads(result.stdout), dict)
    assert json.loads(packer("extract", tmp_path / "set", "-o", tmp_path / "back", "--json").stdout)["files"] == 45


def test_orders_are_compared(tree: Path, tmp_path: Path) -> None:
    packer("convert", tree, "--to", "hdf5", "-o", tmp_path / "set")
    shown = packer("order", tmp_path / "set", "--block-bytes", "4KiB", "--window", 2)
    assert shown.returncode == 0, shown.stderr
    for text in ("stored order", "2 blocks", "global shuffle", "8.19 kB", "████"):
        assert text in shown.stdout
    reports = json.loads(packer("order", tmp_path / "set", "--split", "val", "--json").stdout)
    names = ["stored order", "16 blocks", "64 blocks", "256 blocks", "global shuffle"]
    assert [report["name"] for report in reports] == names
    assert all(report["amplification"]["1048576"] >= 1 for report in reports) and reports[-1]["quality"] > 0.5
    refused = packer("order", tmp_path / "set", "--split", "nothing")
    assert refused.returncode == 1 and "no split 'nothing'" in refused.stderr and "Traceback" not in refused.stderr


def test_damage_exits_with_1(tree: Path, tmp_path: Path) -> None:
    packer("convert", tree, "--to", "tar", "-o", tmp_path / "set")
    shard = tmp_path / "set/val-000000.tar"
    shard.write_bytes(shard.read_bytes()[:-1])
    done = packer("verify", tmp_path / "set")
    assert done.returncode == 1
    assert done.stdout.startswith("DAMAGED val: val-000000.tar:")
    assert "were indexed" in done.stdout
    assert json.loads(packer("verify", tmp_path / "set", "--json").stdout)["ok"] is False


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("convert", "{tree}"), 2, "Missing option '--to'"),
        (("convert", "nowhere", "--to", "tar"), 2, "Path 'nowhere' does not exist"),
        (("convert", "{tree}", "--to", "zip"), 2, "is not one of 'hdf5', 'tfrecord', 'tar'"),
        (
            ("convert", "{tree}", "--to", "tar", "--shard-size", "big"),
            2,
            "'big' is not a valid size; write it as 256MiB",
        ),
        (
            ("convert", "{tree}", "--to", "tar", "--max-side", "9", "--resize-short", "9"),
            2,
            "exclude each other",
        ),
        (("convert", "{tree}", "--to", "tar", "--split", "test"), 1, "no split 'test'; it has train, val"),
        (("verify", "{tree}"), 1, "not a packed set (no dataset.json); make one with  packer convert"),
        (("inspect", "{tree}"), 1, "not a packed set"),
        (("extract", "{tree}", "-o", "x"), 1, "not a packed set"),
        (("index", "{tree}"), 1, "no shards found"),
        (("frobnicate",), 2, "No such command"),
    ],
)
def test_one_clear_message(tree: Path, tmp_path: Path, arguments: tuple[str, ...], status: int, message: str) -> None:
    done = packer(*(argument.format(tree=tree) for argument in arguments), cwd=tmp_path)
    assert done.returncode == status
    assert message in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    assert files_of(tmp_path) == {}


def test_a_bad_image_is_named(tmp_path: Path) -> None:
    (tmp_path / "src/c").mkdir(parents=True)
    (tmp_path / "src/c/a.jpg").write_bytes(make_jpeg(1)[:100])
    (tmp_path / "src/c/b.jpg").write_bytes(make_jpeg(2))
    done = packer("convert", tmp_path / "src", "--to", "tar", "-o", tmp_path / "set")
    assert done.returncode == 1
    assert "c/a.jpg: jpeg image" in done.stderr and "Traceback" not in done.stderr
    done = packer("convert", tmp_path / "src", "--to", "tar", "-o", tmp_path / "set", "--on-error", "quarantine")
    assert done.returncode == 0
    assert "left out: 1 quarantined" in done.stdout


def test_messages_name_the_flags_of_the_command(tree: Path, tmp_path: Path) -> None:
    line = ("convert", tree, "-o", tmp_path / "set", "--workers", "1")
    assert packer(*line, "--to", "tar").returncode == 0
    again = packer(*line, "--to", "hdf5")
    assert again.returncode == 1 and "pass --overwrite to replace it" in again.stderr, again.stderr
    (tmp_path / "bad/c").mkdir(parents=True)
    (tmp_path / "bad/c/1.jpg").write_bytes(b"no image")
    bad = packer("convert", tmp_path / "bad", "--to", "tar", "-o", tmp_path / "out", "--workers", "1")
    assert "--on-error skip or --on-error quarantine" in bad.stderr, bad.stderr


def test_help_lists_every_command_and_option() -> None:
    top = packer("--help").stdout
    for command in ("convert", "index", "inspect", "verify", "extract"):
        assert command in top
        assert packer(command, "--help").returncode == 0
    shown = packer("convert", "--help").stdout
    for option in ("--shard-size", "--on-error", "--resize-short", "--label-offset", "--dry-run", "--json"):
        assert option in shown
    assert packer("--version").stdout == "packer, version 0.1.0\n"


def test_a_reader_that_goes_away(tree: Path, tmp_path: Path) -> None:
    packer("convert", tree, "--to", "tar", "-o", tmp_path / "set")
    command = f"{sys.executable} -m packer inspect {tmp_path / 'set'} --json | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def test_a_terminal_gets_a_bar(tree: Path, tmp_path: Path) -> None:
    master, slave = pty.openpty()
    script = (
        "import sys, time\nfrom packer.cli.text import ProgressDisplay\n"
        "shown = ProgressDisplay(sys.stderr)\nshown.begin(100, 0, lambda: (50, 1000))\n"
        "time.sleep(0.5)\nshown.end()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stderr=slave)
    os.close(slave)
    assert process.wait(timeout=60) == 0
    text = os.read(master, 10_000).decode()
    os.close(master)
    assert "████████████░░░░░░░░░░░░" in text and "50/100 samples" in text and " left" in text
    assert text.endswith("\r\x1b[K")


def test_texts() -> None:
    assert [human_bytes(x) for x in (0, 999, 1340, 55_039_085, 1.5e12)] == [
        "0 B", "999 B", "1.34 kB", "55 MB", "1.5 TB",
    ]  # fmt: skip
    assert [human_seconds(x) for x in (0.44, 12.3, 185, 7800)] == ["0.4 s", "12 s", "3:05 min", "2:10 h"]
    assert [bar(x, 4) for x in (0, 1e-6, 0.5, 1)] == ["", "▏", "██", "████"]
    line = progress_line(200, 1000, 50, 500, 2.0)
    assert line == " 50%  50/200 samples, 25/s  250 B/s  2.0 s left"
    assert [parse_size(x) for x in ("1GiB", "256MB", "4096", "1.5k")] == [1 << 30, 256_000_000, 4096, 1500]
