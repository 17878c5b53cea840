"""Files below a folder: no link is followed to read, write or remove a file, and no access waits for a FIFO."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache.checksums import crc32c, crc32c_combine, file_checksum
from cache.files import BusyError, Folder, PathError, atomic_write, is_temporary, open_regular, read_regular


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    with Folder(tmp_path / "chosen", create=True) as opened:
        yield opened


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder of another user, with one file in it, which must not change."""
    path = tmp_path / "outside"
    path.mkdir()
    (path / "theirs").write_bytes(b"theirs")
    return path


VERBS = {
    "folder": lambda folder, name: folder.folder(name, create=True),
    "read": lambda folder, name: folder.read(name, 100),
    "create": lambda folder, name: folder.create(name).close(),
    "write": lambda folder, name: folder.write(name, b"ours"),
    "rename": lambda folder, name: folder.rename("ours", name),
    "link": lambda folder, name: folder.link(name, "ours"),
    "hard link": lambda folder, name: folder.link(name, folder.path / "ours", hard=True),
    "unlink": lambda folder, name: folder.unlink(name),
    "remove_folder": lambda folder, name: folder.remove_folder(name),
    "remove_tree": lambda folder, name: folder.remove_tree(name),
    "lock": lambda folder, name: folder.lock(name),
    "lstat": lambda folder, name: folder.lstat(name),
}


@pytest.mark.parametrize("verb", VERBS)
def test_no_name_leads_out_of_the_folder(folder: Folder, outside: Path, verb: str) -> None:
    folder.write("ours", b"ours")
    (folder.path / "link").symlink_to(outside)
    before = sorted(folder.names())
    for name in ("../outside/theirs", "a/../../outside", "/etc/passwd", str(outside), "..", ".", "", "a//b", "a\0b"):
        with pytest.raises(PathError, match="not a valid name of a file in this folder"):
            VERBS[verb](folder, name)
    with pytest.raises(PathError, match=r"chosen/link: is a link, expected a folder"):
        VERBS[verb](folder, "link/theirs")
    assert [path.name for path in outside.iterdir()] == ["theirs"] and sorted(folder.names()) == before
    assert (outside / "theirs").read_bytes() == b"theirs"


def test_a_file_appears_whole_or_not_at_all(folder: Folder, outside: Path) -> None:
    folder.folder("a/b", create=True).close()
    folder.write("a/b/x", b"first")
    with folder.writing("x"):
        (name,) = set(folder.names()) - {"a"}
        assert is_temporary(name) and not any(map(is_temporary, ("x.tmp", ".x.tmp", f".{'0' * 15}.tmp", "")))
    with pytest.raises(RuntimeError), folder.writing("a/b/x") as file:
        file.write(b"half")
        raise RuntimeError
    assert folder.read("a/b/x", 10) == b"first"
    (folder.path / "a/b/link").symlink_to(outside / "theirs")
    with folder.folder("a") as scratch:
        folder.write("a/b/link", b"ours", scratch=scratch)
    assert folder.read("a/b/link", 10) == b"ours" and (outside / "theirs").read_bytes() == b"theirs"
    with folder.folder("a/b") as deep, folder.folder("a") as above:
        assert deep.names() == ["link", "x"] and above.names() == ["b"], "a temporary file was left"
    folder.link("dangling", outside / "new")
    with pytest.raises(FileExistsError, match="dangling"):
        folder.create("dangling")
    assert not (outside / "new").exists()
    (folder.path.parent / "way").symlink_to(folder.path)
    with Folder(folder.path.parent / "way/a") as reached:
        assert reached.names() == ["b"], "the folder itself may be reached through links"


def test_a_file_is_renamed_after_its_bytes_are_on_the_disk(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsync, rename, fsync of the folder: a crash leaves the old file or the new one."""
    steps: list[str] = []
    fsync, rename = os.fsync, os.rename

    def synced(descriptor: int) -> None:
        steps.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def renamed(*names: str, **folders: int) -> None:
        steps.append("rename")
        rename(*names, **folders)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    atomic_write(folder.path / "a", b"whole", mode=0o600)
    assert steps == ["file", "rename", "folder"] and (folder.path / "a").stat().st_mode & 0o777 == 0o600
    steps.clear()
    with folder.writing("b", sync_name=False, temporary="part-1") as file:
        assert "part-1" in folder.names()
        file.write(b"one of many")
    assert steps == ["file", "rename"]
    folder.rename("b", "c", durable=True)
    assert steps == ["file", "rename", "rename", "folder"] and folder.names() == ["a", "c"]


def test_the_checksum_of_a_file(tmp_path: Path) -> None:
    data = os.urandom(3_000_001)
    (tmp_path / "a").write_bytes(data)
    looks: list[None] = []
    assert file_checksum(tmp_path / "a", lambda: looks.append(None)) == crc32c(data) and len(looks) == 3
    head, tail = data[:1_000_000], data[1_000_000:]
    assert crc32c_combine(crc32c(head), crc32c(tail), len(tail)) == crc32c(data)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PathError, match="is a FIFO"):
        file_checksum(tmp_path / "pipe")


@pytest.mark.parametrize("kind", ["FIFO", "socket", "folder", "device"])
def test_only_regular_files_are_read_without_waiting(
    folder: Folder, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder.path / "x"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        monkeypatch.chdir(folder.path)  # the path of a socket is limited to 108 bytes
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind("x")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    done: list[str] = []

    def read() -> None:
        for reading in (
            lambda: open_regular(path).close(),
            lambda: read_regular(path, 10),
            lambda: folder.read("x", 9),
        ):
            try:
                reading()
            except OSError as error:
                done.append(str(error))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(300)
    assert len(done) == 3 and all(str(path) in message for message in done), f"a {kind} was read, or waited for: {done}"


def test_a_file_over_the_cap_is_not_read(folder: Folder) -> None:
    folder.write("x", b"0123456789")
    assert folder.read("x", 10) == read_regular(folder.path / "x", 10) == b"0123456789"
    with pytest.raises(PathError, match=r"x: 10 bytes, expected at most 9"):
        folder.read("x", 9)
    assert read_regular("/proc/self/status", 1 << 20), "a file without a stated size was not read"
    with pytest.raises(PathError, match=r"expected at most 10"):
        read_regular("/proc/self/status", 10)


def test_a_tree_is_removed_without_following_its_links(folder: Folder, outside: Path) -> None:
    folder.folder("tree/a/b", create=True).close()
    for name in ("tree/x", "tree/a/x", "tree/a/b/x"):
        folder.write(name, b"")
    folder.link("tree/a/to_folder", outside)
    folder.link("tree/to_file", outside / "theirs")
    folder.remove_tree("tree")
    folder.remove_tree("tree")
    assert folder.names() == [] and (outside / "theirs").exists()
    folder.link("tree", outside)
    with pytest.raises(PathError, match="tree: is a link, expected a folder to remove"):
        folder.remove_tree("tree")
    assert (outside / "theirs").exists()


def test_missing_files(folder: Folder) -> None:
    assert folder.lstat("a/b") is None and folder.kind("a") == "" and not folder.unlink("a/b")
    with pytest.raises(FileNotFoundError, match=r"chosen/a"):
        folder.read("a/b", 1)
    with pytest.raises(FileNotFoundError, match=r"chosen/a"):
        folder.folder("a")
    assert folder.remove_folder("a")
    folder.write("b", b"")
    folder.folder("c/d", create=True).close()
    assert (folder.kind("b"), folder.kind("c"), folder.remove_folder("c")) == ("file", "folder", False)


HOLD = """
import sys
from cache.files import Folder
folder = Folder(sys.argv[1])
lock = folder.lock("lock")
print("held", flush=True)
sys.stdin.read()
"""


def test_a_lock_keeps_other_processes_out_and_ends_with_its_process(folder: Folder) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, folder.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(BusyError, match="lock"):
            folder.lock("lock")
        with pytest.raises(BusyError):
            folder.lock("lock", wait_seconds=0.05)
    finally:
        other.kill()
        other.communicate(timeout=300)
    with folder.lock("lock", wait_seconds=30) as lock:
        assert lock.supported


def test_the_lock_of_a_removed_file_is_not_used(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """In forced order: we open the file, its holder removes it, we lock it; then another process comes."""
    import fcntl

    real, removed = fcntl.flock, []

    def flock(descriptor: int, operation: int) -> None:
        if not removed:
            removed.append((folder.path / "lock").unlink())
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with folder.lock("lock"):
        assert removed and (folder.path / "lock").exists()
        with pytest.raises(BusyError):
            folder.lock("lock")
    folder.path.joinpath("lock").unlink()
    folder.path.rmdir()
    with pytest.raises(FileNotFoundError):
        folder.lock("lock")


def test_a_lock_that_is_not_a_file_is_refused(folder: Folder, outside: Path) -> None:
    folder.link("lock", outside / "theirs")
    with pytest.raises(PathError, match="is a link, which is not followed"):
        folder.lock("lock")
    folder.unlink("lock")
    os.mkfifo(folder.path / "lock")
    with pytest.raises(PathError, match="is a FIFO, expected a regular file"):
        folder.lock("lock")
