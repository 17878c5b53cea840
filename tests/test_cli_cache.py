"""`packer cache` as a user types it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from suites.programs import run_packer

import readers

packer = partial(run_packer, "cache")


@pytest.fixture
def memory(tmp_path: Path) -> tuple[str, Path]:
    return "--target", tmp_path


def test_from_warm_to_clean(packed: Path, memory: tuple[str, Path]) -> None:
    done = packer("warm", packed, "--capacity", "50%", "--keep", "decoded:16", *memory)
    assert done.returncode == 0, done.stderr
    assert "18 of 36 samples of train kept as decoded-resize_size_16" in done.stdout and "samples/s" in done.stdout
    with readers.open(packed, "train") as base:
        reader = readers.cached(base, 0.5, "decoded:16", persist=True, directory=memory[1])
        assert reader.stats().present == 18
        reader.read_many(range(36))
        listed = packer("ls", *memory)
        for text in ("decoded-resize_size_16 image", "set (train)", "50%", "█", "python", "job", "\n0  "):
            assert text in listed.stdout, listed.stdout
        assert packer("clean", "--all", *memory).stdout.startswith(f"{memory[1]}: 0 caches removed"), "it is in use"
        reader.close()
    (report,) = json.loads(packer("ls", "--json", *memory).stdout)
    assert (report["hits"], report["passed"], report["hit_rate"], report["persist"]) == (18, 18, 0.5, True)
    assert report["users"] == [] and report["set"].endswith("/train") and report["title"] == f"{packed} (train)"
    shown = packer("stats", f"{packed.name} (tr", *memory).stdout
    for text in (
        f"set      {packed} (train)",
        "job      0",
        "36: 18 hits",
        "18 passed through",
        "stays when nobody uses it",
        "used by  nobody",
    ):
        assert text in shown
    assert "nobody, persists" in packer("ls", *memory).stdout
    assert json.loads(packer("clean", "--json", *memory).stdout) == []
    gone = packer("clean", "--all", *memory)
    assert gone.returncode == 0 and "1 cache removed" in gone.stdout and report["name"] in gone.stdout
    assert packer("ls", *memory).stdout == packer("stats", *memory).stdout == f"{memory[1]}: no caches\n"


def test_warm_speaks_json_and_says_nothing_else(packed: Path, memory: tuple[str, Path]) -> None:
    done = packer("warm", packed, "--split", "val", "--json", *memory)
    result: dict[str, Any] = json.loads(done.stdout)
    assert done.stderr == "" and (result["split"], result["samples"], result["present"]) == ("val", 9, 9)
    again = json.loads(packer("warm", packed, "--split", "val", "--json", *memory).stdout)
    assert again["present"] == 9 and again["used_bytes"] == result["used_bytes"]
    packer("clean", "--all", *memory)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("warm", "{packed}", "--capacity", "lots"), 2, "'lots' is not a valid size"),
        (("warm", "{packed}", "--keep", "gold"), 2, "keep is encoded, recoded:SIDE"),
        (("warm", "{packed}", "--capacity", "10"), 1, "no room for a cache"),
        (("warm", "{packed}", "--split", "test"), 1, "no split 'test'; it has train, val"),
        (("warm", "nowhere"), 2, "Path 'nowhere' does not exist"),
        (("warm", "{tmp}"), 1, "not a packed set"),
        (("stats", "nothing"), 1, "no cache 'nothing'; it has none"),
        (("ls", "--target", "nowhere"), 2, "'nowhere' does not exist"),
        (("purge",), 2, "No such command"),
    ],
)
def test_one_clear_message(packed: Path, tmp_path: Path, arguments: tuple[str, ...], status: int, message: str) -> None:
    given = [argument.format(packed=packed, tmp=tmp_path) for argument in arguments]
    done = run_packer("cache", *given, *([] if "--target" in given or given == ["purge"] else ["--target", tmp_path]))
    assert done.returncode == status, done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr and done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_ls_names_job_and_set(packed: Path, memory: tuple[str, Path]) -> None:
    """Whatever its length: of a path too long for the table the end is shown."""
    deep = memory[1] / ("long" * 40)
    deep.mkdir()
    for number, path in enumerate((packed, deep / "set")):
        if number:
            path.symlink_to(packed)
        with readers.open(path, "val") as base:
            readers.cached(base, "1MiB", persist=True, directory=memory[1], job=f"job-{number}").close()
    lines = packer("ls", *memory).stdout.splitlines()
    assert lines[0].split()[:2] == ["job", "set"] and len(lines) == 3
    for number, line in enumerate(sorted(lines[1:])):
        assert line.startswith(f"job-{number}  ") and "set (val)" in line
    assert str(deep)[:40] not in "".join(lines) and packer("stats", "longlong", *memory).stdout.count("long" * 40) == 1
    packer("clean", "--all", *memory)
