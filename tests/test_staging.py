"""Staging: a copy equals the set, is made once per node, as a whole, in part, as files, or in the background in the
order of training; it is reused, checked, and limited in size; copies in use, foreign and forged files stay
untouched."""

from __future__ import annotations

import csv
import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Hanging, files_of, make_jpeg, tree_of
from suites.programs import Notes, run_packer
from suites.staging import SLOWLY, assert_whole, copy_of, refused, result, size_of, staged, start, wait_for

import packer
import readers
from cache.errors import StagingError as NodeError
from cache.filesystem import filesystem_type, free_space, is_local
from cache.locks import FlockFile, is_locked
from cache.staging import copies, session
from cache.staging.session import candidates
from cache.staging.sources import FolderSource, Manifest, StagedFile, inside
from cache.stores.copied import CopyStats
from packer.testing.samples import overwrite
from readers import Ranks
from readers.augment import Resize
from readers.opening.packed import open_copied
from readers.order import NodeLocal, Order, Shuffled, StagedFirst, staged_first
from readers.staging import StageOptions, set_files


def stage_command(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command without the variables of a job."""
    clean = {name: value for name, value in os.environ.items() if name not in ("TMPDIR", "SLURM_TMPDIR")}
    return run_packer("stage", *arguments, env=clean)


@pytest.mark.parametrize("to", ["hdf5", "tar"])
def test_a_copy_equals_the_set_and_is_reused(
    tree: Path, pack: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    source = pack(tree, to, samples_per_shard=7)
    monkeypatch.setattr("cache.staging.session.filesystem_type", lambda path: "lustre")
    refused("a lustre filesystem, which is not local", source, tmp_path)
    with (first := readers.stage(source, tmp_path, any_filesystem=True)) as local:
        assert local.parent.parent == tmp_path
        assert (first.counts.copied_bytes, first.counts.found) == (size_of(source), 0)
    assert_whole(local, source)  # cleanup="never" is the default
    monkeypatch.undo()
    for verify in (False, True):
        with (again := readers.stage(source, tmp_path, verify=verify)) as reused:
            assert reused == local and again.counts.copied == 0 and again.counts.damaged == 0
            assert again.counts.found == first.counts.copied


def test_eight_processes_copy_once(source: Path, tmp_path: Path) -> None:
    processes = [start(source, tmp_path, bytes_per_second=150_000) for _ in range(8)]
    results = [result(process) for process in processes]
    assert len({outcome["path"] for outcome in results}) == 1
    assert sum(outcome["copied_bytes"] for outcome in results) == size_of(source)
    assert sorted(outcome["copied"] > 0 for outcome in results) == [False] * 7 + [True]
    assert_whole(Path(results[0]["path"]), source)


def test_another_state_of_the_source_is_another_copy(source: Path, tree: Path, tmp_path: Path) -> None:
    source = shutil.copytree(source, tmp_path / "set")
    with readers.stage(source, tmp_path / "node") as old:
        packer.convert(
            tree, to="tar", output=source, run=packer.Run(workers=1), shards=packer.Shards(samples=5), overwrite=True
        )
        notes = Notes()
        with readers.stage(source, tmp_path / "node", watcher=notes) as new:
            assert new != old and old.is_dir() and "source has changed" not in notes  # in use
            assert_whole(new, source)
        with pytest.raises(readers.StaleIndexError, match="another version of"):
            readers.open(old, "train", fallback=source)
    notes = Notes()
    with readers.stage(source, tmp_path / "node", watcher=notes) as again:
        assert again == new and not old.exists() and f"its source has changed: removed {old}" in notes


def test_the_choice_of_a_target(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path / "missing"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "here"))
    (tmp_path / "here").mkdir()
    notes = Notes()
    with readers.stage(source, watcher=notes, cleanup="atexit") as local:
        assert local.is_relative_to(tmp_path / "here")
    assert not local.exists()
    assert f"not {tmp_path / 'missing'}: no such directory" in notes
    assert f"staging to {tmp_path / 'here'} (" in notes and "named by $TMPDIR" in notes
    targets = [str(place.path) for place in candidates(None, {"SLURM_TMPDIR": "/a", "TMPDIR": "/b", "USER": "me"})]
    assert targets == ["/a", "/b", "/mnt/bb/me", "/local", "/scratch/local", "/dev/shm"]
    assert [str(target.path) for target in candidates("$X/${Y}z", {"X": "/x", "Y": "y"})] == ["/x/yz"]


def test_filesystems() -> None:
    table = (
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:5 / /lustre rw shared:1 - lustre a@tcp:/b rw\n"
        "3 1 0:6 / /lustre/with\\040space rw - tmpfs t rw\n4 1 0:7 / /home rw - fuse.sshfs x rw\n"
    )
    kinds = [filesystem_type(Path(path), table) for path in ("/x", "/lustre/y", "/lustre/with space/z", "/home")]
    assert kinds == ["ext4", "lustre", "tmpfs", "fuse.sshfs"]
    assert all(is_local(kind) for kind in ("ext4", "xfs", "tmpfs", "overlay", "zfs", ""))
    assert not any(is_local(kind) for kind in ("nfs4", "lustre", "gpfs", "beegfs", "fuse.sshfs", "fuse", "ceph"))
    assert free_space(Path("/"), "ext4").bytes > 0


def test_the_command(source: Path, tmp_path: Path) -> None:
    done = run_packer("stage", source, "--target", "$HERE/a", env={**os.environ, "HERE": str(tmp_path)})
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
    run = run_packer("stage", source, "--target", tmp_path / "a", "--cleanup", "atexit", "--", "bash", "-c", script)
    assert (run.returncode, run.stdout) == (7, f"kept {local}: in use\n"), run.stderr
    assert not local.exists() and f"cleaned up: removed {local}" in run.stderr
    assert stage_command("ls", "--target", tmp_path / "a").stdout == "no staged copies\n"
    done = stage_command(source, "--target", tmp_path / "b", "--as", "files", "--cleanup", "atexit", "--", "ls")
    assert done.returncode == 0 and not [*tmp_path.glob("b/packer-staged-*/*-files-*")], "the copy was not cleaned up"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("nowhere",), 2, "Path 'nowhere' does not exist"),
        (("{tree}",), 1, "not a packed set (no dataset.json)"),
        (("{source}", "--target", "$NOT_SET/x"), 1, "names $NOT_SET, which is not set"),
        (("{source}", "--target", "{tmp}", "--part", "2/2"), 2, "'2/2' is neither I/N"),
        (("{source}", "--target", "{tmp}", "--fraction", "0"), 2, "0.0 is not in the range"),
        (("{source}", "--target", "{tmp}", "--split", "test"), 1, "no split 'test'; it has train, val"),
        (("{source}", "--target", "{tmp}", "--cleanup", "atexit"), 2, "--cleanup atexit needs a COMMAND"),
        (("{source}", "--target", "{tmp}", "--quota", "10kB"), 1, "the quota is 10,000"),
        (("{source}", "--target", "{source}/dataset.json"), 1, "not a directory; choose another"),
        (("{source}", "--target", "/proc/nothing"), 1, "/proc/nothing"),
        (("{source}", "--target", "/no-such-disk"), 1, "/no-such-disk: no such directory, and none is created in /"),
        (("{source}", "--target", "{tmp}/no/here"), 1, "to create it in; choose another directory with --target DIR"),
        (("{source}", "--target", "{tmp}", "--", "no-such-program"), 1, "no-such-program: cannot be run"),
        (("ls", "--target", "$NOT_SET"), 1, "names $NOT_SET"),
    ],
)
def test_one_clear_message(
    tree: Path, source: Path, tmp_path: Path, arguments: tuple[str, ...], status: int, message: str
) -> None:
    done = stage_command(*(argument.format(tree=tree, source=source, tmp=tmp_path) for argument in arguments))
    assert (done.returncode, done.stdout) == (status, "") and message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fraction": 0.0}, "fraction"),
        ({"part": (2, 2)}, "part"),
        ({"part": "all"}, "part"),
        ({"cleanup": "maybe"}, "cleanup"),
        ({"threads": 0}, "threads"),
        ({"form": "files", "fraction": 0.5}, "whole splits"),
        ({"form": "files", "part": (0, 2)}, "whole splits"),
        ({"form": "files", "background": True}, "whole splits"),
        ({"form": "zip"}, "shards, files"),
        ({"order": Shuffled(36)}, "needs background=True"),
        ({"background": True, "resume": {}}, "give the order, too"),
    ],
)
def test_invalid_options_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        readers.stage(tmp_path, **options)


@pytest.fixture(scope="module")
def sets(tree: Path, pack: Callable[..., Path]) -> list[Path]:
    """Three sets of about the same size."""
    return [pack(tree, samples_per_shard=n + 5) for n in range(3)]


def test_least_recently_used_copies_make_room(sets: list[Path], tmp_path: Path) -> None:
    quota = 2 * max(map(size_of, sets)) + 1000
    local = []
    for second, number in enumerate((0, 1, 0, 2), 1_000_000_000):  # set1 is then the least recently used
        notes = Notes()
        local.append(staged(sets[number], tmp_path, quota_bytes=quota, watcher=notes))
        os.utime(local[-1] / ".staging/users", (second, second))
    assert not local[1].exists() and f"quota: removed {local[1]}" in notes
    assert_whole(local[0], sets[0])
    assert_whole(local[3], sets[2])
    assert [copy.path for copy in packer.staged_copies(tmp_path)] == [str(local[0]), str(local[3])]


def test_copies_in_use_are_never_removed(sets: list[Path], tmp_path: Path) -> None:
    """Neither under locks of this process nor under locks of another."""
    quota = 2 * max(map(size_of, sets)) + 1000
    other = start(sets[0], tmp_path, linger=60)
    wait_for(
        lambda: any(copy.in_use and copy.bytes == copy.wanted_bytes for copy in packer.staged_copies(tmp_path)), ""
    )
    with readers.stage(sets[1], tmp_path) as in_use:
        refused(r"the quota is [\d,]+; in use: set-\w+, set-", sets[2], tmp_path, quota_bytes=quota)
        cleaned = packer.clean_staged(target=tmp_path)
        assert not cleaned.removed and len(cleaned.kept) == 2
        assert_whole(in_use, sets[1])
    other.kill()
    other.communicate()
    with readers.stage(sets[2], tmp_path, quota_bytes=quota) as path:
        assert_whole(path, sets[2])
    assert len(packer.clean_staged(target=tmp_path).removed) == 2


def test_the_last_user_or_a_command_cleans_up(sets: list[Path], tmp_path: Path) -> None:
    with readers.stage(sets[0], tmp_path, cleanup="atexit") as first:
        with readers.stage(sets[0], tmp_path, cleanup="atexit") as two:
            assert first == two
        assert_whole(first, sets[0])
    assert not first.exists() and sorted(path.name for path in first.parent.iterdir()) == [".packer-staged", "lock"]
    local = [staged(source, tmp_path) for source in sets[:2]]
    assert len(packer.clean_staged(target=tmp_path, dry_run=True).removed) == 2 and local[0].exists()
    assert [copy.path for copy in packer.clean_staged(sets[0], tmp_path).removed] == [str(local[0])]
    assert not local[0].exists() and local[1].exists()


def test_foreign_files_stay(sets: list[Path], tmp_path: Path) -> None:
    """In the target, in the directory of packer, and in a copy."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "dataset.json").write_text("precious")
    with readers.stage(sets[0], tmp_path) as local:
        store = local.parent
        (tmp_path / "mine").write_text("1")
        (store / "notes").write_text("2")
        (store / "folder").mkdir()
        (store / "folder/x").write_text("3")
        (store / "link").symlink_to(outside)
        (local / "thesis.txt").write_text("4")
        (local / "train.index/link").symlink_to(outside)
    result = packer.clean_staged(target=tmp_path)
    assert sorted(Path(path).name for path in result.foreign) == ["link", "thesis.txt"]
    left = {Path(name).name: data for name, data in files_of(store).items() if ".staging" not in name}
    assert left == {".packer-staged": left[".packer-staged"], "lock": b"", "notes": b"2", "x": b"3", "thesis.txt": b"4"}
    assert (outside / "dataset.json").read_text() == "precious" and (tmp_path / "mine").exists()
    assert_whole(staged(sets[0], tmp_path), sets[0])


def test_a_marker_that_another_process_writes_meanwhile_counts(
    sets: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between looking for the marker and for the other files, which exist by then."""
    (marker,) = [path for path in staged(sets[0], tmp_path).parent.glob(".*") if path.is_file()]
    marker.rename(tmp_path / "marker")
    listed = Path.iterdir

    def write_and_list(folder: Path) -> object:
        if folder == marker.parent and not marker.exists():
            (tmp_path / "marker").rename(marker)
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", write_and_list)
    assert_whole(staged(sets[1], tmp_path), sets[1])


def test_a_forged_marker_is_ignored(sets: list[Path], tmp_path: Path) -> None:
    local = staged(sets[0], tmp_path / "node")
    home = tmp_path / "home"
    shutil.copytree(local.parent, home / local.parent.name)  # all markers copied, for other directories
    before = files_of(home)
    with pytest.raises(readers.StagingError, match="has files but not the marker of a staging directory"):
        packer.clean_staged(target=home)
    refused("has files but not the marker", sets[0], home)
    shutil.copytree(local, local.parent / "copied")  # and a copied copy inside packer's directory
    assert len(packer.clean_staged(target=tmp_path / "node").removed) == 1
    assert files_of(home) == before and (local.parent / "copied/dataset.json").exists()


def test_symbolic_links_are_not_followed(sets: list[Path], tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x").write_text("precious")
    (tmp_path / "node").mkdir()
    name = f"packer-staged-{os.geteuid()}"
    (tmp_path / "node" / name).symlink_to(outside)
    refused("is not a directory that belongs to this user alone", sets[0], tmp_path / "node")
    (tmp_path / "node" / name).unlink()
    local = staged(sets[0], tmp_path / "node")
    shutil.rmtree(local)
    local.symlink_to(outside)
    refused("is not a directory of this user alone", sets[0], tmp_path / "node")
    assert packer.clean_staged(target=tmp_path / "node").removed == ()
    local.unlink()
    local.mkdir(mode=0o700)
    (local / ".staging").symlink_to(outside)
    refused(r"\.staging: is a symbolic link", sets[0], tmp_path / "node")
    (local / ".staging").unlink()
    with readers.stage(sets[0], tmp_path / "node", splits=("val",)) as local:
        (local / "train.index").symlink_to(outside)
        refused(r"train.index: is not a directory of this user alone", sets[0], tmp_path / "node")
    (local / "val-000000.tar").unlink()
    (local / "val-000000.tar").symlink_to(outside / "x")  # a link in place of a file is replaced, not followed
    (local / "train.index").unlink()
    assert_whole(staged(sets[0], tmp_path / "node"), sets[0])
    assert files_of(outside) == {"x": b"precious"}


def test_a_record_that_names_paths_outside(sets: list[Path], tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    local = staged(sets[0], tmp_path / "node")
    record = json.loads((local / ".staging/copy.json").read_text())
    record["files"].append(["../../../victim", 8, None])
    (local / ".staging/copy.json").write_text(json.dumps(record))
    assert packer.clean_staged(target=tmp_path / "node").removed == ()
    assert (tmp_path / "victim").read_text() == "precious" and local.exists()


def test_directories_of_others_are_refused(sets: list[Path], tmp_path: Path) -> None:
    store = tmp_path / f"packer-staged-{os.geteuid()}"
    store.mkdir(mode=0o700)
    store.chmod(0o777)
    refused("belongs to this user alone", sets[0], tmp_path)
    assert list(store.iterdir()) == []
    if os.geteuid() == 0:
        store.chmod(0o700)
        os.chown(store, 12345, 12345)
        refused("belongs to this user alone", sets[0], tmp_path)


INNER = ("copy.json", "ready.json", "leader", "users", "progress", "part-1-1")


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", b"", b'{"kind": 3}', b"\xff" * 100])
@pytest.mark.parametrize("name", [*(f"*/.staging/{name}" for name in INNER), ".packer-staged", "lock"])
def test_records_that_are_not_regular_files(
    sets: list[Path], tmp_path: Path, hanging: Hanging, name: str, kind: str | bytes
) -> None:
    """No such record is trusted, no link is followed, no pipe blocks: staging succeeds, or names the file."""
    (tmp_path / "victim").write_text("precious")
    local = staged(sets[0], tmp_path / "node")
    (local / "train-000001.tar").unlink()  # so that a file is left to copy
    place = Path(str(local.parent / name).replace("*", local.name))
    place.unlink(missing_ok=True)
    if kind == "link":
        place.symlink_to(tmp_path / "victim")
    elif kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    else:
        place.write_bytes(kind)  # type: ignore[arg-type]
    try:
        hanging(lambda: assert_whole(staged(sets[0], tmp_path / "node"), sets[0]))
    except readers.StagingError as error:
        where = {"copy.json": local, ".packer-staged": local.parent}.get(place.name, place)
        assert str(where) in str(error)
        assert isinstance(kind, str) or place.name in ("copy.json", ".packer-staged")
    assert (tmp_path / "victim").read_text() == "precious"


def test_interrupted_removals_are_finished(sets: list[Path], tmp_path: Path) -> None:
    """Killed after some files or after the last one; a directory with other files is left unchanged."""
    local = staged(sets[0], tmp_path)
    moved = local.with_name(f"removing-1-{local.name}")
    local.rename(moved)
    (moved / "dataset.json").unlink()
    for name in ("removing-2-x", "removing-3-x/.staging", "removing-4-x"):
        (local.parent / name).mkdir(parents=True)
    (local.parent / "removing-4-x/thesis.txt").touch()
    staged(sets[1], tmp_path)
    assert [path.name for path in local.parent.glob("removing-*")] == ["removing-4-x"]


def test_paths_of_a_manifest() -> None:
    assert [inside(path) for path in ("a", "a/b", "a/../b", "/a", "", "..", "a/", "./a", ".staging/x", "a\0", 3)] == [
        True, True, *[False] * 9,
    ]  # fmt: skip
    file = StagedFile("a", 1)
    for bad in ({"files": (StagedFile("../a", 1),)}, {"files": (file, file)}, {"fingerprint": "../../x"}):
        with pytest.raises(NodeError):
            Manifest(
                **{"source": FolderSource(Path("/s")), "name": "s", "fingerprint": "0" * 16, "files": (file,), **bad}
            )
    assert Manifest(FolderSource(Path("/s")), "../ä b/…", "0" * 20, (file,)).folder_name == "b-" + "0" * 16


def test_locks(tmp_path: Path) -> None:
    a, b = FlockFile(tmp_path / "lock"), FlockFile(tmp_path / "lock")
    assert a.take() and a.take() and not b.take() and not b.take(shared=True) and is_locked(tmp_path / "lock")
    a.release()
    assert a.take(shared=True) and b.take(shared=True) and is_locked(tmp_path / "lock")
    a.release()
    b.release()
    assert not is_locked(tmp_path / "lock") and not is_locked(tmp_path / "none")
    assert not FlockFile(tmp_path / "no/such/folder").take()
    (tmp_path / "link").symlink_to(tmp_path / "lock")
    with pytest.raises(NodeError, match="cannot be opened for locking"):
        FlockFile(tmp_path / "link").take()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("inherited", [False, True])
def test_a_forked_child_keeps_only_the_locks_of_readers(tmp_path: Path, shared: bool, inherited: bool) -> None:
    lock = FlockFile(tmp_path / "lock", inherited=inherited)
    assert lock.take(shared=shared)
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    try:
        lock.release()
        assert is_locked(tmp_path / "lock") == (shared and inherited), "at once, even before the child has run"
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


@pytest.mark.parametrize("to", ["hdf5", "tfrecord", "tar"])
def test_staged_files_are_the_original_tree(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    source = packer.convert(
        tree, to=to, output=tmp_path / "set", run=packer.Run(workers=1), shards=packer.Shards(shuffle=5, samples=7)
    ).output
    reads, read_many = list[int](), readers.Reader.read_many

    def counted(self: readers.Reader, indices: Any, field: str = "image") -> Any:
        reads.append(len(np.asarray(indices)))
        return read_many(self, indices, field)

    with monkeypatch.context() as patch:
        patch.setattr(readers.Reader, "read_many", counted)
        with (first := readers.stage(source, tmp_path / "node", form="files", threads=4)) as local:
            assert files_of(local) == files_of(tree) and first.path == local
            assert sum(reads) == 45 and len(reads) <= 8, "neighbours are read separately"
        patch.setattr(copies, "MAX_RECORD_BYTES", 1000)
        with pytest.raises(readers.StagingError, match="the limit is 1,000"):
            staged(source, tmp_path / "other", form="files")
    with (again := readers.stage(source, tmp_path / "node", form="files", verify=True)) as reused:
        assert reused == local and again.counts.copied == 0 and again.counts.found == first.counts.copied == 45
    with readers.stage(source, tmp_path / "node") as shards:
        assert shards != local and local.is_dir(), "one copy of the set replaced the other"
    assert len(packer.clean_staged(local, tmp_path / "node").removed) == 1, "not found by the printed directory"
    assert len(packer.clean_staged(source, tmp_path / "node").removed) == 1
    with readers.open(source, "train") as reader:
        overwrite(reader, 3, bytes(reader.read(3))[::-1])
    with pytest.raises(readers.StagingError, match=r"CRC32C.*run  packer verify"):
        staged(source, tmp_path / "node", form="files")


def test_partial_files_are_completed(source: Path, tree: Path, tmp_path: Path) -> None:
    with readers.stage(source, tmp_path, form="files", splits="val") as local:
        assert {name.partition("/")[0] for name in files_of(local)} == {"val"}
    with readers.stage(source, tmp_path, form="files") as whole:
        damaged, missing = sorted(path for path in whole.rglob("*.JPEG"))[:2]
        damaged.write_bytes(damaged.read_bytes()[::-1])
        missing.unlink()
    with (mended := readers.stage(source, tmp_path, form="files", verify=True)) as whole:
        assert (mended.counts.copied, mended.counts.damaged) == (2, 1)
        assert files_of(whole) == files_of(tree)


def test_labels_that_folders_do_not_show_are_in_a_table(tmp_path: Path) -> None:
    tree_of(tmp_path / "images", {f"{i}.jpg": make_jpeg(i) for i in range(4)})
    (tmp_path / "labels.csv").write_text("path,label\n" + "".join(f"images/{i}.jpg,{i % 2}\n" for i in range(4)))
    source = packer.convert(
        tmp_path / "labels.csv", to="tar", output=tmp_path / "set", run=packer.Run(workers=1)
    ).output
    with readers.stage(source, tmp_path / "node", form="files") as local:
        rows = [*csv.DictReader((local / "labels.csv").read_text().splitlines())]
        with readers.open(source) as reader:
            assert {row["path"]: int(row["label"]) for row in rows} == {
                reader.name(i): int(reader.labels[i]) for i in range(4)
            }
        assert all((local / row["path"]).is_file() for row in rows)


def shards_in(local: Path) -> list[str]:
    return sorted(path.name for path in local.glob("*.tar"))


@pytest.fixture(scope="module")
def fives(tree: Path, pack: Callable[..., Path]) -> Path:
    """Ten shards."""
    return pack(tree, samples_per_shard=5)


def assert_reads(local: Path, fives: Path) -> None:
    for split in ("train", "val"):
        with readers.open(local, split, fallback=fives) as copy, readers.open(fives, split) as original:
            everything = list(range(len(original)))
            assert [copy.read(i) for i in everything] == [original.read(i) for i in everything]
            assert [bytes(x) for x in copy.read_many(everything[::-1])] == [
                bytes(x) for x in original.read_many(everything[::-1])
            ]
            assert copy.fingerprint == original.fingerprint and copy.keys[3] == original.keys[3]
            assert [bytes(x) for x in copy.stream()] == [bytes(x) for x in original.stream()]


def test_splits(fives: Path, tmp_path: Path) -> None:
    with readers.stage(fives, tmp_path, splits=("valid",)) as local:  # another name of val
        assert shards_in(local) == ["val-000000.tar", "val-000001.tar"]
        assert not (local / "train.index").exists()
        assert len(readers.open(local, "val")) == 9
        assert_reads(local, fives)
    with readers.stage(fives, tmp_path, splits=("train",)) as same:
        assert same == local and len(shards_in(local)) == 10
        assert_whole(local, fives)
    with pytest.raises(readers.UnknownNameError, match="no split 'test'"):
        readers.stage(fives, tmp_path, splits=("test",)).__enter__()


@pytest.mark.parametrize("nodes", [1, 3, 50])
def test_the_share_of_a_node_is_that_of_the_node_local_order(fives: Path, nodes: int) -> None:
    """Every sample of local_part is in a staged shard, and every staged shard has one of these samples. Without overlap
    each shard is staged once, on the first node that has one of its samples."""
    files = set_files(fives)
    reader = readers.open(fives, "train")
    column = reader.table.column("shard")
    seen: set[str] = set()
    for node in range(nodes):
        staged = [file.path for file in files.shards(StageOptions(splits=("train",), part=(node, nodes)))]
        part = NodeLocal(len(reader), nodes=nodes).local_part(node)
        needed = {reader.split_info.shards[number].path for number in np.unique(column[part.start : part.stop])}
        assert set(staged) == needed and len(staged) == len(needed)
        once = [file.path for file in files.shards(StageOptions(splits=("train",), part=(node, nodes), overlap=False))]
        assert set(once) == needed - seen and len(once) == len(needed - seen)
        seen |= needed
    assert seen == {shard.path for shard in reader.split_info.shards}


def test_each_node_reads_its_part_from_its_copy(fives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for node in range(3):
        slurm = {"STEP_ID": 0, "PROCID": 2 * node, "NTASKS": 6, "LOCALID": 0, "NODEID": node, "NNODES": 3}
        for name, value in slurm.items():
            monkeypatch.setenv(f"SLURM_{name}", str(value))
        with readers.stage(fives, tmp_path / f"node{node}", part="node") as local:
            assert 0 < len(shards_in(local)) < 10
            with readers.open(local, "train", fallback=tmp_path / "nowhere") as reader:
                for i in NodeLocal(len(reader), nodes=3).local_part(node):
                    assert reader.read(i)
            assert_reads(local, fives)


@pytest.mark.parametrize(("fraction", "train", "val"), [(1e-9, 1, 1), (0.3, 3, 1), (0.99, 8, 2), (1.0, 8, 2)])
def test_a_fraction(fives: Path, tmp_path: Path, fraction: float, train: int, val: int) -> None:
    with readers.stage(fives, tmp_path, fraction=fraction) as local:
        names = shards_in(local)
        assert (sum("train" in name for name in names), sum("val" in name for name in names)) == (train, val)
        assert_reads(local, fives)


def test_without_a_fallback_a_missing_shard_is_named(fives: Path, tmp_path: Path) -> None:
    with readers.stage(fives, tmp_path, fraction=0.3) as local, readers.open(local, "train") as reader:
        assert reader.read(0)
        with pytest.raises(readers.StaleIndexError, match=r"train-000007.tar: shard cannot be opened"):
            reader.read(len(reader) - 1)


def test_training_starts_while_staging_goes_on(fives: Path, tmp_path: Path) -> None:
    staging = readers.stage(fives, tmp_path, background=True, bytes_per_second=100_000)
    with staging as local:
        reader = readers.open(local, "train", fallback=fives)
        assert len(shards_in(local)) < 10 and not staging.wait(0.0)
        assert_reads(local, fives)
        assert not reader.store.copy.has(7) and reader.read(len(reader) - 1)
        borrowed = reader.byte_range(len(reader) - 1)
        assert borrowed is not None and borrowed[0].parent == fives
        assert staging.wait(300) and reader.store.copy.has(7)
        before = reader.store.stats().local
        wait_for(
            lambda: reader.read(len(reader) - 1) and reader.store.stats().local > before, "the reader to move over"
        )
        assert reader.byte_range(len(reader) - 1)[0] == local / "train-000007.tar"  # type: ignore[index]
        assert staging.counts.copied_bytes == size_of(fives)
        assert_whole(local, fives)


def test_a_background_error_does_not_stop_training(fives: Path, tmp_path: Path) -> None:
    """The thread ends with its context."""
    with readers.stage(fives, tmp_path, background=True, bytes_per_second=20_000) as local:
        assert any(thread.name == "staging" for thread in threading.enumerate())
    assert not any(thread.name.startswith("stag") for thread in threading.enumerate())
    assert len(shards_in(local)) < 10 and not list((local / ".staging").glob("part-*"))
    own = Path(shutil.copytree(fives, tmp_path / "own"))
    staging = readers.stage(own, tmp_path / "node", background=True, bytes_per_second=SLOWLY, threads=1)
    with staging as local:
        reader = readers.open(local, "train", fallback=fives)
        own.rename(tmp_path / "away")
        with pytest.raises(readers.StagingError, match="is the source still there"):
            staging.wait(300)
        assert all(reader.read(i) for i in range(len(reader)))


def test_the_fallback_reader_is_pickled_and_closed(fives: Path, tmp_path: Path) -> None:
    with readers.stage(fives, tmp_path, fraction=0.3) as local:
        reader = readers.open(local, "train", fallback=fives, verify=True)
        last = reader.read(len(reader) - 1)
        reader.close()
        assert reader.read(len(reader) - 1) == last
        again = pickle.loads(pickle.dumps(reader))
        copied = again.store.source
        assert again.read(len(reader) - 1) == last and copied.copy.has(0) and not copied.copy.has(7)
        mapped = readers.open(local, "train", fallback=fives, backend="mmap")
        assert bytes(mapped.read(len(reader) - 1)) == last
        few = open_copied(local, "train", fallback=fives, open_shards=1)
        assert [few.read(i) for i in range(len(few))] == [reader.read(i) for i in range(len(few))]


def test_without_a_local_copy(fives: Path, tmp_path: Path) -> None:
    assert_reads(tmp_path / "nothing", fives)
    with pytest.raises(readers.DatasetError, match="no such directory"):
        readers.open(tmp_path / "nothing", fallback=tmp_path / "neither")


FOREVER = 1000.0  # seconds of patience: a wait that does not end by itself exceeds all limits of tests
BATCH = 4


@pytest.fixture(scope="module")
def order(source: Path) -> StagedFirst:
    with readers.open(source, "train") as reader:
        return staged_first(reader.split_info, seed=3, window=3)


def read_epoch(reader: readers.Reader, order: Order, step: Callable[[int], Any] = lambda position: None) -> None:
    for position in range(0, len(order), BATCH):
        step(position)
        reader.read_many(order.indices(0, np.arange(position, min(position + BATCH, len(order)))))


def open_staged(local: Path, source: Path, patience_seconds: float = 0.0) -> readers.Reader:
    return readers.open(local, "train", fallback=source, patience_seconds=patience_seconds)


def order_of_arrival(local: Path) -> list[str]:
    ready = json.loads((local / ".staging/ready.json").read_text())["files"]
    return sorted((name for name in ready if name.endswith(".tar")), key=lambda name: float(ready[name][2]))


def names(source: Path, shards: Any) -> list[str]:
    with readers.open(source, "train") as reader:
        return [reader.split_info.shards[number].path for number in shards]


def test_shards_arrive_in_the_order_of_training(source: Path, order: StagedFirst, tmp_path: Path) -> None:
    staging = readers.stage(source, tmp_path, background=True, order=order, threads=1)
    with staging as local:
        assert staging.wait(300)
        arrived = order_of_arrival(local)
        assert arrived[:9] == names(source, order.shards()) != sorted(arrived[:9])
        assert all(name.startswith("val") for name in arrived[9:]) and len(arrived) == 12
        assert_whole(local, source)


def test_readers_in_step_with_staging_read_the_copy_without_waiting(
    source: Path, order: StagedFirst, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One shard is let through, then as many samples as it has are read: no timing, no patience.

    The window of three shards needs one shard more, half a window.
    """
    gate, transfer = threading.Semaphore(0), session.transfer

    def gated(source: Any, file: StagedFile, *arguments: Any) -> int:
        while file.path.endswith(".tar") and not gate.acquire(timeout=0.05):
            arguments[-1].check()
        return transfer(source, file, *arguments)

    monkeypatch.setattr(session, "transfer", gated)
    shares = {}
    for name, epoch_order in (("first", order), ("global", Shuffled(36, 3))):
        options = {"order": order} if name == "first" else {}
        gate = threading.Semaphore(1)
        with readers.stage(source, tmp_path / name, background=True, threads=1, **options) as local:
            reader = open_staged(local, source)

            def one_more(position: int, reader: readers.Reader = reader, gate: threading.Semaphore = gate) -> None:
                gate.release()
                arrived = min(9, position // BATCH + 2)
                wait_for(lambda: sum(map(reader.store.copy.has, range(9))) >= arrived, "a shard")
                reader.store.close()  # check the copy now, not in a second

            read_epoch(reader, epoch_order, one_more)
            shares[name] = reader.store.stats().local_share
    assert shares["first"] == 1.0 and 0.3 < shares["global"] < 0.8


def loaders(order: Order, local: Path, source: Path, world: int) -> list[Any]:
    """One ImageLoader a rank; skips the test without PyTorch."""
    pytest.importorskip("torch")
    from readers.loader import ImageLoader

    return [
        ImageLoader(
            open_staged(local, source, FOREVER), BATCH, order=order, ranks=Ranks(rank, world, "exact"),
            augment=[Resize((8, 8))], fields=("image", "index"), threads=1,
        )
        for rank in range(world)
    ]  # fmt: skip


def test_an_epoch_is_resumed_on_another_node(source: Path, order: StagedFirst, tmp_path: Path) -> None:
    """Two ranks stop during staging; three continue elsewhere, where shards come in the order of the remaining
    samples."""
    seen: list[int] = []
    with readers.stage(source, tmp_path / "a", background=True, order=order, bytes_per_second=SLOWLY) as local:
        states = []
        for loader in loaders(order, local, source, 2):
            batches = iter(loader)
            for _ in range(2):
                seen += next(batches)[1].tolist()
            states.append(loader.state_dict())
            del batches
        assert states[0] == states[1] and states[0]["cursor"] == 16
    assert len(set(seen)) == 16
    staging = readers.stage(source, tmp_path / "b", background=True, order=order, resume=states[0], threads=1)
    with staging as local:
        for loader in loaders(order.with_seed(8), local, source, 3):
            loader.load_state_dict(states[0])
            for _, indices in loader:
                seen += indices.tolist()
            assert loader.reader.store.stats().local_share == 1
        assert staging.wait(300)
        assert order_of_arrival(local)[:9] == names(source, order.shards(0, 16))
    assert sorted(seen) == list(range(36)) and order.shards(0, 16).tolist() != order.shards().tolist()


def test_readers_stop_waiting(source: Path, order: StagedFirst, tmp_path: Path) -> None:
    """With a leader that copies nothing, and without a leader; after a failed wait no reader waits again."""
    local = staged(source, tmp_path, background=True, order=order, bytes_per_second=10_000)
    lock = FlockFile(local / ".staging/leader")
    for patience, locked in ((0.2, True), (FOREVER, False)):
        assert not locked or lock.take()
        reader = open_staged(local, source, patience)
        assert len(reader.read(0))
        waited = reader.store.stats().waited_seconds
        read_epoch(reader, order)
        assert reader.store.stats().source == 37 and reader.store.stats().local == 0
        assert reader.store.stats().waited_seconds == waited >= 0.2
        lock.release()


def test_shards_that_are_waited_for_are_not_announced(
    source: Path, order: StagedFirst, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would read the samples from the source, in addition to staging."""
    announced: list[Path] = []

    def note(descriptor: int, ranges: Any) -> None:
        announced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).parent)

    monkeypatch.setattr("cache.stores.files.prefetch", note)
    some = staged(source, tmp_path / "some", fraction=0.3)
    none_yet = staged(source, tmp_path / "all", background=True, order=order, bytes_per_second=10_000)
    for local, patience, places in (
        (some, FOREVER, {some, source}),  # the rest is never staged
        (none_yet, FOREVER, set()),
        (none_yet, 0.0, {source}),
    ):
        announced.clear()
        reader = open_staged(local, source, patience)
        reader.prefetch(range(36))
        assert set(announced) == places
        with pytest.raises(IndexError):
            reader.prefetch([36])


def test_no_read_waits_for_a_shard_that_is_not_staged(source: Path, tmp_path: Path) -> None:
    with readers.stage(source, tmp_path, fraction=0.3) as local:
        lock = FlockFile(local / ".staging/leader")
        assert lock.take()
        reader = open_staged(local, source, FOREVER)
        read_epoch(reader, Shuffled(36))
        assert 0 < reader.store.stats().local < 36 and reader.store.stats().waited_seconds < 1
        lock.release()
    nothing = open_staged(tmp_path / "nothing", source, FOREVER)
    read_epoch(nothing, Shuffled(36))
    assert nothing.store.stats().source == 36


def test_a_wait_outlives_the_leader(source: Path, order: StagedFirst, tmp_path: Path) -> None:
    """The copying process is killed while this one waits for a shard; a thread of this process copies it."""
    first = start(source, tmp_path, background=True, bytes_per_second=SLOWLY, linger=60)
    wait_for(lambda: (path := copy_of(tmp_path)) and (path / "dataset.json").exists(), "the index")
    staging = readers.stage(source, tmp_path, background=True, order=order, bytes_per_second=SLOWLY)
    with staging as local:
        reader = open_staged(local, source, FOREVER)

        def kill(position: int) -> None:
            if position == BATCH:
                first.kill()

        read_epoch(reader, order, kill)
        first.communicate()
        assert reader.store.stats().local_share > 0.9 and reader.store.stats().waited_seconds > 0
        assert staging.wait(300)
        assert_whole(local, source)


@pytest.mark.parametrize("backend", ["pread", "mmap"])
def test_every_way_to_read_is_counted(source: Path, tmp_path: Path, backend: Any) -> None:
    with readers.stage(source, tmp_path, fraction=0.3) as local:
        reader = readers.open(local, "train", fallback=source, backend=backend)
        assert isinstance(reader, readers.Reader) and reader.store.stats() == CopyStats()
        assert reader.store.stats().local_share == 0
        copied = sum(shard.samples for n, shard in enumerate(reader.split_info.shards) if reader.store.copy.has(n))
        reader.read_many(list(range(-36, 0)))
        assert (reader.store.stats().local, reader.store.stats().source) == (copied, 36 - copied) and 0 < copied < 36
        assert len(list(reader.stream())) == len(list(reader)) == 36
        for index in (0, -1):
            reader.read(index)
        assert (reader.store.stats().local, reader.store.stats().source) == (3 * copied + 1, 3 * (36 - copied) + 1)
        assert reader.store.stats().local_share == (3 * copied + 1) / 110
        assert pickle.loads(pickle.dumps(reader)).store.stats() == CopyStats()
        for index in (36, -37):
            for read in (reader.read, lambda i: reader.read_many([i])):
                with pytest.raises(IndexError):
                    read(index)
        assert reader.store.stats().local + reader.store.stats().source == 110


def test_incompatible_options(source: Path, order: StagedFirst, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="patience_seconds needs a fallback"):
        readers.open(source, "train", patience_seconds=1)
    with pytest.raises(ValueError, match="0 or more, not nan"):
        open_staged(source, source, float("nan"))
    other = StagedFirst(np.array([0, 5, 36]))
    refused("no split has the 2 shards with 36 samples", source, tmp_path, background=True, order=other)
    token = loaders(Shuffled(36), source, source, 1)[0].state_dict()
    with pytest.raises(readers.ResumeError, match="cannot continue with kind=staged-first"):
        readers.stage(source, tmp_path, background=True, order=order, resume=token).__enter__()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_ends_all_waiting(
    source: Path, order: StagedFirst, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training continues from the source, and `wait` raises the error."""
    transfer, third = session.transfer, names(source, order.shards())[2]

    def full(source: Any, file: StagedFile, *arguments: Any) -> int:
        if file.path == third:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return transfer(source, file, *arguments)

    monkeypatch.setattr(session, "transfer", full)
    staging = readers.stage(source, tmp_path, background=True, order=order, threads=1)
    with staging as local:
        reader = open_staged(local, source, FOREVER)
        read_epoch(reader, order)
        assert reader.store.stats().local <= 8 and reader.store.stats().source >= 28
        with pytest.raises(readers.StagingError, match="No space left on device during the copy; make room"):
            staging.wait(300)
