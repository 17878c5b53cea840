"""The command line as a user meets it: what each command does, prints and says as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import files_of, tree_of
from suites.programs import run_packer

import readers
from cache.messages import bar, human_bytes, human_seconds, parse_size
from packer.cli.screen import progress_line
from packer.inspection import compare_orders
from readers.order import Shuffled
from readers.order.quality import shuffle_quality


def run(*arguments: object, **options: Any) -> str:
    """What a command that succeeds prints."""
    done = run_packer(*arguments, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_main_job(tree: Path, tmp_path: Path) -> None:
    done = run_packer("convert", tree, "--to", "hdf5", "--workers", 2, cwd=tmp_path)
    assert done.stdout.startswith("images-hdf5: 45 samples (train 36, val 9), 3 classes, "), done.stderr
    assert "in 2 hdf5 shards" in done.stdout and f"listing image folder {tree}" in done.stderr
    checked = run("verify", "images-hdf5", "--deep", "--against", tree, cwd=tmp_path)
    assert checked.startswith("images-hdf5: OK: 45 samples")
    shown = run("inspect", "images-hdf5", cwd=tmp_path)
    for text in ("hdf5 set, 3 classes", "train: 36 samples in 1 shard", "cat", "median", "duplicates: none"):
        assert text in shown
    assert run("extract", "images-hdf5", "-o", "back", cwd=tmp_path).startswith("back: 45 files")
    assert files_of(tmp_path / "back") == files_of(tree)
    again = run("index", "images-hdf5", cwd=tmp_path)
    assert again.startswith("images-hdf5: 45 samples (train 36, val 9) in 2 hdf5 shards")


def test_json_is_one_document_and_nothing_else(tree: Path, tmp_path: Path) -> None:
    done = run_packer("convert", tree, "--to", "tar", "-o", tmp_path / "set", "--json", "--samples-per-shard", 12)
    value = json.loads(done.stdout)
    assert (value["samples"], value["shards"], value["format"], done.stderr) == (45, 4, "tar", "")
    for command in (("inspect",), ("verify",), ("index",), ("extract", "-o", tmp_path / "back")):
        done = run_packer(command[0], tmp_path / "set", *command[1:], "--json")
        assert done.stderr == "" and isinstance(json.loads(done.stdout), dict)


def test_damage_is_named_and_exits_with_1(tree: Path, tmp_path: Path) -> None:
    run("convert", tree, "--to", "tar", "-o", tmp_path / "set")
    shard = tmp_path / "set/val-000000.tar"
    shard.write_bytes(shard.read_bytes()[:-1])
    done = run_packer("verify", tmp_path / "set")
    assert done.returncode == 1 and done.stdout.startswith("DAMAGED val: val-000000.tar:")
    assert json.loads(run_packer("verify", tmp_path / "set", "--json").stdout)["ok"] is False


def test_orders_are_compared(packed: Path) -> None:
    shown = run("order", packed, "--split", "train", "--block-bytes", "4KiB", "--window", 2)
    for text in ("stored order", "2 blocks", "global shuffle", "8.19 kB", "████"):
        assert text in shown
    reports = json.loads(run("order", packed, "--split", "val", "--json"))
    names = ["stored order", "16 blocks", "64 blocks", "256 blocks", "global shuffle"]
    assert [report["name"] for report in reports] == names
    assert all(report["amplification"]["1048576"] >= 1 for report in reports) and reports[-1]["quality"] == 1
    with readers.open(packed, "train") as reader:
        memory = {report.memory_bytes for report in compare_orders(packed, "train")}
        assert memory == {0, int(reader.sizes().sum())}, "an order needs no more memory than the split has bytes"


@pytest.mark.parametrize("samples", [50, 400, 9469])
def test_a_global_shuffle_mixes_as_well_as_a_global_shuffle(samples: int) -> None:
    assert [shuffle_quality(Shuffled(samples, seed)) for seed in range(5)] == [1.0] * 5


def test_messages_name_the_flags_of_the_command(tree: Path, tmp_path: Path) -> None:
    line = ("convert", tree, "-o", tmp_path / "set", "--workers", "1", "--to")
    run(*line, "tar")
    again = run_packer(*line, "hdf5")
    assert again.returncode == 1 and "pass --overwrite to replace it" in again.stderr
    bad = run_packer(
        "convert", tree_of(tmp_path / "bad", {"c/1.jpg": b"no image"}), "--to", "tar", "-o", tmp_path / "o"
    )
    assert "c/1.jpg: " in bad.stderr and "--on-error skip or --on-error quarantine" in bad.stderr


def test_a_pipe_that_is_closed_early(packed: Path) -> None:
    command = f"{sys.executable} -m packer inspect {packed} --json | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300, check=False)
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def test_texts() -> None:
    sizes = ["0 B", "999 B", "1.34 kB", "55 MB", "1.5 TB"]
    assert [human_bytes(x) for x in (0, 999, 1340, 55_039_085, 1.5e12)] == sizes
    assert [human_seconds(x) for x in (0.44, 12.3, 185, 7800)] == ["0.4 s", "12 s", "3:05 min", "2:10 h"]
    assert [bar(x, 4) for x in (0, 1e-6, 0.5, 1)] == ["", "▏", "██", "████"]
    assert progress_line(200, 1000, (50, 500), 2.0) == " 50%  50/200 samples, 25/s  250 B/s  2.0 s left"
    assert progress_line(0, 0, (50, 0, 3), 2.0) == "50 samples, 25/s, 3 left out  2.0 s"
    assert [parse_size(x) for x in ("1GiB", "256MB", "4096", "1.5k")] == [1 << 30, 256_000_000, 4096, 1500]


# --- packer cache -------------------------------------------------------------------------------------------------
@pytest.fixture
def cached(tmp_path: Path) -> Callable[..., str]:
    """Runs `packer cache` on the folder tmp_path."""
    return lambda *arguments: run("cache", *arguments, "--target", tmp_path)


def test_a_cache_from_warm_to_clean(packed: Path, tmp_path: Path, cached: Callable[..., str]) -> None:
    done = cached("warm", packed, "--capacity", "50%", "--keep", "decoded:16")
    assert "18 of 36 samples of train kept as decoded-resize_size_16" in done and "samples/s" in done
    with readers.open(packed, "train") as base:
        reader = readers.cached(base, 0.5, "decoded:16", persist=True, directory=tmp_path)
        assert reader.stats().present == 18
        reader.read_many(range(36))
        listed = cached("ls")
        for text in ("decoded-resize_size_16 image", "set (train)", "50%", "█", "python", "job", "\n0  "):
            assert text in listed, listed
        assert cached("clean", "--all").startswith(f"{tmp_path}: 0 caches removed"), "it is in use"
        reader.close()
    (report,) = json.loads(cached("ls", "--json"))
    assert (report["hits"], report["passed"], report["hit_rate"], report["persist"]) == (18, 18, 0.5, True)
    assert report["users"] == [] and report["set"].endswith("/train") and report["title"] == f"{packed} (train)"
    shown = cached("stats", f"{packed.name} (tr")
    for text in (f"set      {packed} (train)", "job      0", "36: 18 hits", "18 passed through",
                 "stays when it is not in use", "state    unused"):  # fmt: skip
        assert text in shown
    assert "unused, persists" in cached("ls") and json.loads(cached("clean", "--json")) == []
    kept = cached("clean", packed)
    assert "0 caches removed" in kept and f"kept {report['name']}: persists; --all removes it" in kept
    assert "1 cache would be removed" in cached("clean", packed, "--all", "--dry-run")
    assert "no cache 'other'" in run_packer("cache", "clean", "other", "--target", tmp_path).stderr
    assert "unused, persists" in cached("ls"), "nothing was removed so far"
    gone = cached("clean", packed, "--all")
    assert "1 cache removed" in gone and report["name"] in gone
    assert cached("ls") == cached("stats") == f"{tmp_path}: no caches\n"


def test_warm_prints_json_and_nothing_else(packed: Path, tmp_path: Path) -> None:
    line = ("cache", "warm", packed, "--split", "val", "--json", "--target", tmp_path)
    done = run_packer(*line)
    result, again = json.loads(done.stdout), json.loads(run(*line))
    assert done.stderr == "" and (result["split"], result["samples"], result["present"]) == ("val", 9, 9)
    assert again["present"] == 9 and again["used_bytes"] == result["used_bytes"]


def test_ls_names_job_and_set(packed: Path, tmp_path: Path, cached: Callable[..., str]) -> None:
    """Of a path too long for the table the end is shown."""
    deep = tmp_path / ("long" * 40)
    deep.mkdir()
    (deep / "set").symlink_to(packed)
    for number, path in enumerate((packed, deep / "set")):
        with readers.open(path, "val") as base:
            readers.cached(base, "1MiB", persist=True, directory=tmp_path, job=f"job-{number}").close()
    header, *lines = cached("ls").splitlines()
    assert header.split()[:2] == ["job", "set"] and len(lines) == 2
    for number, line in enumerate(sorted(lines)):
        assert line.startswith(f"job-{number}  ") and "set (val)" in line
    assert str(deep)[:40] not in "".join(lines) and cached("stats", "longlong").count("long" * 40) == 1
