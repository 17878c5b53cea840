"""Staging: a copy is the set, made once per node, found again, checked, and printed as one line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from suites.programs import run_packer
from suites.staging import Notes, assert_whole, refused, result, size_of, start

import packer
import readers
from cache.filesystem import filesystem_type, free_space, is_local
from cache.staging.session import candidates


def stage_command(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("TMPDIR", "SLURM_TMPDIR")}
    return run_packer("stage", *arguments, env={**clean, **environ})


@pytest.mark.parametrize("to", ["hdf5", "tfrecord", "tar"])
def test_a_copy_is_the_set(tree: Path, pack: Callable[..., Path], tmp_path: Path, to: str) -> None:
    source = pack(tree, to, samples_per_shard=7)
    with readers.stage(source, tmp_path) as local:
        assert local.parent.parent == tmp_path
        assert_whole(local, source)
    assert_whole(local, source)  # cleanup="never" is the default


def test_it_is_found_again(source: Path, tmp_path: Path) -> None:
    with (first := readers.stage(source, tmp_path)) as local:
        assert (first.counts.copied_bytes, first.counts.found) == (size_of(source), 0)
    for verify in (False, True):
        with (again := readers.stage(source, tmp_path, verify=verify)) as found:
            assert found == local and again.counts.copied == 0 and again.counts.damaged == 0
            assert again.counts.found == first.counts.copied


def test_eight_processes_copy_once(source: Path, tmp_path: Path) -> None:
    processes = [start(source, tmp_path, bytes_per_second=150_000) for _ in range(8)]
    results = [result(process) for process in processes]
    assert len({one["path"] for one in results}) == 1
    assert sum(one["copied_bytes"] for one in results) == size_of(source)
    assert sorted(one["copied"] > 0 for one in results) == [False] * 7 + [True]
    assert_whole(Path(results[0]["path"]), source)


def test_another_state_of_the_source_is_another_copy(source: Path, tree: Path, tmp_path: Path) -> None:
    source = shutil.copytree(source, tmp_path / "set")
    with readers.stage(source, tmp_path / "node") as old:
        packer.convert(
            tree, to="tar", output=source, run=packer.Run(workers=1), shards=packer.Shards(samples=5), overwrite=True
        )
        notes = Notes()
        with readers.stage(source, tmp_path / "node", watcher=notes) as new:
            assert new != old and old.is_dir() and "source has changed" not in notes  # it is in use
            assert_whole(new, source)
        with pytest.raises(readers.StaleIndexError, match="another state of"):
            readers.open(old, "train", fallback=source)
    notes = Notes()
    with readers.stage(source, tmp_path / "node", watcher=notes) as again:
        assert again == new and not old.exists() and f"its source has changed: removed {old}" in notes


def test_the_target_is_found(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path / "missing"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "here"))
    (tmp_path / "here").mkdir()
    notes = Notes()
    with readers.stage(source, watcher=notes, cleanup="atexit") as local:
        assert local.is_relative_to(tmp_path / "here")
    assert not local.exists()
    assert f"not {tmp_path / 'missing'}: no such directory" in notes
    assert f"staging to {tmp_path / 'here'} (" in notes and "named by $TMPDIR" in notes


def test_candidates_are_in_order() -> None:
    found = candidates(None, {"SLURM_TMPDIR": "/a", "TMPDIR": "/b", "USER": "me"})
    assert [str(target.path) for target in found] == [
        "/a", "/b", "/mnt/bb/me", "/local", "/scratch/local", "/dev/shm",
    ]  # fmt: skip
    assert [str(target.path) for target in candidates("$X/${Y}z", {"X": "/x", "Y": "y"})] == ["/x/yz"]


def test_filesystems() -> None:
    table = (
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:5 / /lustre rw shared:1 - lustre a@tcp:/b rw\n"
        "3 1 0:6 / /lustre/with\\040space rw - tmpfs t rw\n4 1 0:7 / /home rw - fuse.sshfs x rw\n"
    )
    assert [filesystem_type(Path(path), table) for path in ("/x", "/lustre/y", "/lustre/with space/z", "/home")] == [
        "ext4", "lustre", "tmpfs", "fuse.sshfs",
    ]  # fmt: skip
    assert [is_local(kind) for kind in ("ext4", "xfs", "tmpfs", "overlay", "zfs", "")] == [True] * 6
    assert not any(is_local(kind) for kind in ("nfs4", "lustre", "gpfs", "beegfs", "fuse.sshfs", "fuse", "ceph"))
    assert free_space(Path("/"), "ext4").bytes > 0


def test_a_shared_filesystem_is_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cache.staging.session.filesystem_type", lambda path: "lustre")
    refused("a lustre filesystem, which is not local", source, tmp_path)
    with readers.stage(source, tmp_path, any_filesystem=True) as local:
        assert_whole(local, source)


def test_the_command(source: Path, tmp_path: Path) -> None:
    done = stage_command(source, "--target", "$HERE/a", HERE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    local = Path(done.stdout.rstrip("\n"))
    assert done.stdout.count("\n") == 1 and local.is_relative_to(tmp_path / "a")
    assert f"packer: staging to {tmp_path / 'a'} (" in done.stderr and "files copied" in done.stderr
    assert_whole(local, source)
    listed = stage_command("ls", "--target", tmp_path / "a").stdout
    assert str(local) in listed and str(source) in listed and "in use" not in listed
    script = (
        f'test "$PACKER_STAGED" = {local} && {sys.executable} -m packer stage clean --target {tmp_path / "a"}; exit 7'
    )
    run = stage_command(source, "--target", tmp_path / "a", "--cleanup", "atexit", "--", "bash", "-c", script)
    assert (run.returncode, run.stdout) == (7, f"kept {local}: in use\n"), run.stderr
    assert not local.exists() and f"cleaned up: removed {local}" in run.stderr
    assert stage_command("ls", "--target", tmp_path / "a").stdout == "no staged copies\n"
    shown = stage_command("--help").stdout
    for text in ("--target", "--split", "--part", "--fraction", "--quota", "--cleanup", "--bandwidth", "ls", "clean"):
        assert text in shown


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("nowhere",), 2, "Path 'nowhere' does not exist"),
        (("{tree}",), 1, "not a packed set (no dataset.json)"),
        (("{source}", "--target", "$NOT_SET/x"), 1, "names $NOT_SET, which is not set here"),
        (("{source}", "--target", "{tmp}", "--part", "2/2"), 2, "'2/2' is neither I/N"),
        (("{source}", "--target", "{tmp}", "--fraction", "0"), 2, "0.0 is not in the range"),
        (("{source}", "--target", "{tmp}", "--split", "test"), 1, "no split 'test'; it has train, val"),
        (("{source}", "--target", "{tmp}", "--cleanup", "atexit"), 2, "--cleanup atexit needs a COMMAND"),
        (("{source}", "--target", "{tmp}", "--quota", "10kB"), 1, "the quota is 10,000"),
        (
            ("{source}", "--target", "{source}/dataset.json"),
            1,
            "dataset.json: not a directory; choose another directory with --target DIR",
        ),
        (("{source}", "--target", "/proc/nothing"), 1, "/proc/nothing"),
        (("{source}", "--target", "/no-such-disk"), 1, "/no-such-disk: no such directory, and none is made in /"),
        (
            ("{source}", "--target", "{tmp}/no-such-disk/here"),
            1,
            "no-such-disk to make it in; choose another directory with --target DIR",
        ),
        (("{source}", "--target", "{tmp}", "--", "no-such-program"), 1, "no-such-program: cannot be run"),
        (("ls", "--target", "$NOT_SET"), 1, "names $NOT_SET"),
    ],
)
def test_one_clear_message(
    tree: Path, source: Path, tmp_path: Path, arguments: tuple[str, ...], status: int, message: str
) -> None:
    done = stage_command(*(argument.format(tree=tree, source=source, tmp=tmp_path) for argument in arguments))
    assert (done.returncode, done.stdout) == (status, ""), done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr


def test_options_are_checked() -> None:
    for options in ({"fraction": 0.0}, {"part": (2, 2)}, {"part": "all"}, {"cleanup": "maybe"}, {"threads": 0}):
        with pytest.raises(ValueError):
            readers.StageOptions(**options)
