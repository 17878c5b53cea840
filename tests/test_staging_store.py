"""The directory of staged copies: quota, cleaning, locks, and what is never touched: held, foreign, forged."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Hanging, files_of
from suites.staging import Notes, assert_whole, refused, size_of, staged, start, wait_for

import packer
import readers
from cache.errors import StagingError as NodeError
from cache.locks import FlockFile, is_locked
from cache.staging.sources import FolderSource, Manifest, StagedFile, inside


@pytest.fixture(scope="module")
def sets(tree: Path, pack: Callable[..., Path]) -> list[Path]:
    """Three sets of about the same size."""
    return [pack(tree, samples_per_shard=n + 5) for n in range(3)]


def test_least_recently_used_copies_make_room(sets: list[Path], tmp_path: Path) -> None:
    quota = 2 * max(map(size_of, sets)) + 1000
    local = []
    for second, one in enumerate((0, 1, 0, 2), 1_000_000_000):  # set1 is then the one that was not used for longest
        notes = Notes()
        local.append(staged(sets[one], tmp_path, quota_bytes=quota, watcher=notes))
        os.utime(local[-1] / ".staging/users", (second, second))
    assert not local[1].exists() and f"quota: removed {local[1]}" in notes
    assert_whole(local[0], sets[0])
    assert_whole(local[3], sets[2])
    assert [copy.path for copy in packer.staged_copies(tmp_path)] == [str(local[0]), str(local[3])]


def test_held_copies_are_never_removed(sets: list[Path], tmp_path: Path) -> None:
    """Neither by this process's own locks nor by those of another."""
    quota = 2 * max(map(size_of, sets)) + 1000
    other = start(sets[0], tmp_path, linger=60)
    wait_for(
        lambda: any(copy.in_use and copy.bytes == copy.wanted_bytes for copy in packer.staged_copies(tmp_path)), ""
    )
    with readers.stage(sets[1], tmp_path) as mine:
        refused(r"the quota is [\d,]+; in use: set-\w+, set-", sets[2], tmp_path, quota_bytes=quota)
        cleaned = packer.clean_staged(target=tmp_path)
        assert not cleaned.removed and len(cleaned.kept) == 2
        assert_whole(mine, sets[1])
    other.kill()
    other.communicate()
    with readers.stage(sets[2], tmp_path, quota_bytes=quota) as path:
        assert_whole(path, sets[2])
    assert len(packer.clean_staged(target=tmp_path).removed) == 2


def test_the_last_one_cleans_up(sets: list[Path], tmp_path: Path) -> None:
    with readers.stage(sets[0], tmp_path, cleanup="atexit") as one:
        with readers.stage(sets[0], tmp_path, cleanup="atexit") as two:
            assert one == two
        assert_whole(one, sets[0])
    assert not one.exists() and sorted(path.name for path in one.parent.iterdir()) == [".packer-staged", "lock"]


def test_clean_one_set(sets: list[Path], tmp_path: Path) -> None:
    local = [staged(source, tmp_path) for source in sets[:2]]
    assert len(packer.clean_staged(target=tmp_path, dry_run=True).removed) == 2 and local[0].exists()
    result = packer.clean_staged(sets[0], tmp_path)
    assert [copy.path for copy in result.removed] == [str(local[0])]
    assert not local[0].exists() and local[1].exists()


def test_files_of_others_stay(sets: list[Path], tmp_path: Path) -> None:
    """In the target, in our directory, and in a copy."""
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
    """Between looking for the marker and at the other files, which are there by then."""
    (marker,) = [path for path in staged(sets[0], tmp_path).parent.glob(".*") if path.is_file()]
    marker.rename(tmp_path / "marker")
    listed = Path.iterdir

    def write_and_list(folder: Path) -> object:
        if folder == marker.parent and not marker.exists():
            (tmp_path / "marker").rename(marker)
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", write_and_list)
    assert_whole(staged(sets[1], tmp_path), sets[1])


def test_a_forged_marker_is_no_marker(sets: list[Path], tmp_path: Path) -> None:
    local = staged(sets[0], tmp_path / "node")
    home = tmp_path / "home"
    shutil.copytree(local.parent, home / local.parent.name)  # all markers copied, for other directories
    before = files_of(home)
    with pytest.raises(readers.StagingError, match="holds files but not the marker of a staging directory"):
        packer.clean_staged(target=home)
    refused("holds files but not the marker", sets[0], home)
    shutil.copytree(local, local.parent / "copied")  # and a copied copy inside our directory
    assert len(packer.clean_staged(target=tmp_path / "node").removed) == 1
    assert files_of(home) == before and (local.parent / "copied/dataset.json").exists()


def test_symbolic_links_lead_nowhere(sets: list[Path], tmp_path: Path) -> None:
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
    (local / "val-000000.tar").symlink_to(outside / "x")  # a link in a file's place is replaced, not followed
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


@pytest.mark.parametrize("name", ["copy.json", "ready.json", "progress"])
@pytest.mark.parametrize("content", [b"", b"[]", b'{"kind": 3}', b"\xff" * 100])
def test_records_are_not_trusted(sets: list[Path], tmp_path: Path, name: str, content: bytes) -> None:
    local = staged(sets[0], tmp_path)
    (local / ".staging" / name).write_bytes(content)
    if name == "copy.json":
        refused("holds files but no marker of staging", sets[0], tmp_path)
        assert packer.staged_copies(tmp_path) == []
    else:
        assert_whole(staged(sets[0], tmp_path), sets[0])


INNER = ("copy.json", "ready.json", "leader", "users", "progress", "part-1-1")


@pytest.mark.parametrize("name", [*(f"*/.staging/{name}" for name in INNER), ".packer-staged", "lock"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_something_in_place_of_a_record(
    sets: list[Path], tmp_path: Path, hanging: Hanging, name: str, kind: str
) -> None:
    """A link is not followed, nothing waits for a pipe: staging succeeds, or names the file in its error."""
    (tmp_path / "victim").write_text("precious")
    local = staged(sets[0], tmp_path / "node")
    (local / "train-000001.tar").unlink()  # so that there is something to copy
    place = Path(str(local.parent / name).replace("*", local.name))
    place.unlink(missing_ok=True)
    if kind == "link":
        place.symlink_to(tmp_path / "victim")
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.mkdir()
    try:
        hanging(lambda: assert_whole(staged(sets[0], tmp_path / "node"), sets[0]))
    except readers.StagingError as error:
        where = {"copy.json": local, ".packer-staged": local.parent}.get(place.name, place)
        assert str(where) in str(error)
    assert (tmp_path / "victim").read_text() == "precious"


def test_interrupted_removals_are_finished(sets: list[Path], tmp_path: Path) -> None:
    """Killed after some files or after the last one; a directory with other files is left alone."""
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
    one, two = FlockFile(tmp_path / "lock"), FlockFile(tmp_path / "lock")
    assert one.take() and one.take() and not two.take() and not two.take(shared=True) and is_locked(tmp_path / "lock")
    one.release()
    assert one.take(shared=True) and two.take(shared=True) and is_locked(tmp_path / "lock")
    one.release()
    two.release()
    assert not is_locked(tmp_path / "lock") and not is_locked(tmp_path / "none")
    assert not FlockFile(tmp_path / "no/such/folder").take()
    (tmp_path / "link").symlink_to(tmp_path / "lock")
    with pytest.raises(NodeError, match="cannot be opened for locking"):
        FlockFile(tmp_path / "link").take()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("inherited", [False, True])
def test_a_forked_child_keeps_a_readers_lock_and_no_other(tmp_path: Path, shared: bool, inherited: bool) -> None:
    lock = FlockFile(tmp_path / "lock", inherited=inherited)
    assert lock.take(shared=shared)
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    try:
        lock.release()
        assert is_locked(tmp_path / "lock") == (shared and inherited), "at once, even if the child has not run yet"
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
