"""Files below a folder that the user chose, and nowhere else; reading regular files.

A name from a dataset.json, an archive or a key may be "../x", or lead through a planted link. `Folder` holds an open
directory and resolves every name below it component by component, without following links. Links in the path of the
folder itself are followed, since the user chose it. Files are written atomically, and only regular files are read, so
no call blocks on a FIFO.

    temporary names    .<16 hex digits>.tmp, created exclusively, so that they never overwrite a file
    a file             write under a temporary name, fsync, rename, fsync of the folder
    a lock             flock, see `cache.locks`

Errors are OSErrors that name the whole path; `PathError` means a forbidden name or an unexpected kind of file.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias

from cache.locks import BusyError as BusyError
from cache.locks import Lock as Lock
from cache.locks import is_at, take_lock
from cache.system import CLOEXEC, DIRECTORY, NOFOLLOW, NONBLOCK, READ, require

_Bytes: TypeAlias = bytes | bytearray | memoryview
_FOLDER = os.O_RDONLY | DIRECTORY | NOFOLLOW | CLOEXEC
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | NOFOLLOW | CLOEXEC
_LOCK = os.O_RDWR | os.O_CREAT | NOFOLLOW | NONBLOCK | CLOEXEC
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link", stat.S_IFIFO: "FIFO"}
_CHUNK_BYTES = 1 << 20
_LOCK_WAIT_SECONDS, _LONGEST_LOCK_WAIT_SECONDS = 0.01, 0.5


class PathError(OSError):
    """A name leads out of its folder, or a file is not of the expected kind."""


class FileState(NamedTuple):
    """Identifies a file and its content on every node that mounts it, until something writes to it.

    A new hard link or a change of permissions changes `changed_ns` only.
    """

    inode: int
    bytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileState:
        """The state from the result of a `stat`."""
        return cls(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> FileState:
        """The state of the file at a path. Raises OSError. Opens the file, since NFS answers `stat` from its cache."""
        descriptor = os.open(path, READ)
        try:
            return cls.of(os.fstat(descriptor))
        finally:
            os.close(descriptor)


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading, following links. Raises PathError for a directory, FIFO, device or socket."""
    with _naming(os.fspath(path)):
        return _regular(os.open(path, READ), os.fspath(path))


def read_regular(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """The content of a file of at most `max_bytes`; follows links. Raises PathError as `open_regular` does."""
    return read_with_state(path, max_bytes)[0]


def read_with_state(path: str | os.PathLike[str], max_bytes: int) -> tuple[bytes, FileState]:
    """`read_regular`, and the state of the file when it was opened."""
    with open_regular(path) as file:
        state = FileState.of(os.fstat(file.fileno()))
        return _read(file, max_bytes, os.fspath(path)), state


def atomic_write(path: Path, content: _Bytes, *, mode: int = 0o666) -> None:
    """Write a whole file durably: afterwards its bytes and its name are on the disk; see `Folder.writing`."""
    with Folder(path.parent) as folder, folder.writing(path.name, mode=mode) as file:
        file.write(content)


def sync_file(file: BinaryIO | int) -> None:
    """Flush the bytes of an open file to the disk; use `Folder.sync` for its name."""
    if not isinstance(file, int):
        file.flush()
        file = file.fileno()
    os.fsync(file)


def is_temporary(name: str) -> bool:
    """Whether this is the name of a temporary file of `Folder`; a killed process leaves them behind."""
    digits = name[1:-4]
    return name[:1] == "." and name[-4:] == ".tmp" and len(digits) == 16 and not digits.strip("0123456789abcdef")


class Folder:
    """An open directory; names are relative to it, with "/" between components. Close it, or use it in a `with`.

    create: create missing directories, parents included.
    """

    def __init__(self, path: str | os.PathLike[str], *, create: bool = False) -> None:
        self.path = Path(path)
        self.descriptor = -1
        require("writing sets", os.open in os.supports_dir_fd)
        with _naming(os.fspath(path)):
            if create and not self.path.exists():
                self.path.mkdir(parents=True, exist_ok=True)
            self.descriptor = os.open(path, os.O_RDONLY | DIRECTORY | CLOEXEC)

    def folder(self, name: str, *, create: bool = False) -> Folder:
        """The directory `name` below this one; no component may be a link."""
        return self._below(self._parts(name), create)

    def names(self) -> list[str]:
        """The names in the directory, sorted."""
        with _naming(self.path):
            return sorted(os.listdir(self.descriptor))

    def lstat(self, name: str) -> os.stat_result | None:
        """The status of the file of this name, without following a link; None if it does not exist."""
        try:
            with self._parent(name) as (parent, last), _naming(self.path / name):
                return os.stat(last, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def kind(self, name: str) -> str:
        """ "file", "folder", "link" or another kind; "" if it does not exist."""
        status = self.lstat(name)
        return _kind(status.st_mode) if status is not None else ""

    def open(self, name: str) -> BinaryIO:
        """Open a regular file for reading, without following a link."""
        with self._parent(name) as (parent, last), _naming(self.path / name):
            return _regular(self._open(parent, last, READ | NOFOLLOW, name), os.fspath(self.path / name))

    def read(self, name: str, max_bytes: int) -> bytes:
        """The content of a regular file of at most `max_bytes`."""
        with self.open(name) as file:
            return _read(file, max_bytes, os.fspath(self.path / name))

    def create(self, name: str) -> BinaryIO:
        """Create a file for reading and writing. Raises FileExistsError if the name is taken, even by a link."""
        with self._parent(name) as (parent, last), _naming(self.path / name):
            return open(os.open(last, _NEW, 0o666, dir_fd=parent), "w+b")

    def write(self, name: str, content: _Bytes, *, durable: bool = True, scratch: Folder | None = None) -> None:
        """Write a whole file atomically; see `writing`."""
        with self.writing(name, durable=durable, scratch=scratch) as file:
            file.write(content)

    @contextmanager
    def writing(
        self,
        name: str,
        *,
        durable: bool = True,
        sync_name: bool = True,
        scratch: Folder | None = None,
        temporary: str = "",
        mode: int = 0o666,
    ) -> Iterator[BinaryIO]:
        """A file that gets its name when the block succeeds, and is removed when it fails.

        An existing file of that name is replaced; if it is a link, the link itself is replaced.

        durable: flush the file and its name to the disk at the end.
        sync_name: False if the caller syncs the folder itself, once for many files.
        scratch: a folder on the same filesystem for the temporary file; by default the folder of the file.
        temporary: the temporary name; by default a random one.
        mode: permissions, before the umask.
        """
        with self._parent(name) as (parent, last):
            there = parent if scratch is None else scratch.descriptor
            temporary = temporary or f".{os.urandom(8).hex()}.tmp"
            with _naming(self.path / name):
                descriptor = os.open(temporary, _NEW, mode, dir_fd=there)
            try:
                with open(descriptor, "w+b") as file:
                    yield file
                    with _naming(self.path / name):
                        file.flush()
                        if durable:
                            sync_file(file)
                with _naming(self.path / name):
                    os.rename(temporary, last, src_dir_fd=there, dst_dir_fd=parent)
                    if durable and sync_name:
                        os.fsync(parent)
            except BaseException:
                _unlink(temporary, there)
                raise

    def rename(self, name: str, new: str, to: Folder | None = None, *, durable: bool = False) -> None:
        """Rename `name` to `new`, in the folder `to` if given, replacing a file of that name.

        durable: flush the new name to the disk.
        """
        target = to or self
        with self._parent(name) as (parent, last), target._parent(new) as (other, new_last), _naming(self.path / name):
            os.rename(last, new_last, src_dir_fd=parent, dst_dir_fd=other)
            if durable:
                os.fsync(other)

    def link(self, name: str, target: str | os.PathLike[str], *, hard: bool = False) -> None:
        """Create a symbolic or hard link to `target`. Raises FileExistsError if the name is taken."""
        with self._parent(name) as (parent, last), _naming(self.path / name):
            if hard:
                os.link(target, last, dst_dir_fd=parent)
            else:
                os.symlink(target, last, dir_fd=parent)

    def unlink(self, name: str) -> bool:
        """Remove a file, or a link itself; returns whether it existed."""
        try:
            with self._parent(name) as (parent, last), _naming(self.path / name):
                os.unlink(last, dir_fd=parent)
        except FileNotFoundError:
            return False
        return True

    def remove_folder(self, name: str) -> bool:
        """Remove an empty directory; returns False if it is not empty."""
        try:
            with self._parent(name) as (parent, last), _naming(self.path / name):
                os.rmdir(last, dir_fd=parent)
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise
        return True

    def remove_tree(self, name: str) -> None:
        """Remove a directory and everything in it, if it exists, without following links.

        Raises PathError if it is not a directory.
        """
        kind = self.kind(name)
        if not kind:
            return
        if kind != "folder":
            raise PathError(f"{self.path / name}: is a {kind}, expected a folder to remove; remove it yourself")
        with self._parent(name) as (parent, last), _naming(self.path / name):
            try:
                for _, folders, files, descriptor in os.fwalk(last, False, dir_fd=parent, follow_symlinks=False):
                    for file in files:
                        _unlink(file, descriptor)
                    for folder in folders:
                        _remove_entry(folder, descriptor)
                _remove_entry(last, parent)
            except RecursionError as error:
                raise PathError(f"{self.path / name}: its folders are nested too deeply; remove it yourself") from error

    def sync(self) -> None:
        """Flush the names in the directory to the disk."""
        with _naming(self.path):
            os.fsync(self.descriptor)

    def lock(self, name: str, wait_seconds: float = 0.0, *, shared: bool = False) -> Lock:
        """Take the lock of the file `name`, exclusively or shared; the file is created if it is missing.

        Raises BusyError if another process holds it for longer than `wait_seconds`, FileNotFoundError if this directory
        has been removed, PathError if `name` is not a regular file. See `Lock.supported`.
        """
        path = os.fspath(self.path / name)
        end, pause = time.monotonic() + wait_seconds, _LOCK_WAIT_SECONDS
        while True:
            with (
                self._parent(name) as (parent, last),
                _naming(path),
                _regular(self._open(parent, last, _LOCK, name), path) as file,
            ):
                lock = take_lock(file.fileno(), shared=shared)
                if lock is not None and is_at(file.fileno(), last, parent):
                    return lock
            if lock is not None:
                lock.release()
            elif time.monotonic() >= end:
                raise BusyError(errno.EAGAIN, "locked by another process", path)
            else:
                time.sleep(pause)
                pause = min(1.2 * pause, _LONGEST_LOCK_WAIT_SECONDS)

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _parts(self, name: str) -> list[str]:
        parts = name.split("/")
        try:
            whole = bool(os.fsencode(name)) and "\0" not in name
        except UnicodeEncodeError:
            whole = False
        if not whole or any(part in ("", ".", "..") for part in parts):
            raise PathError(f"{self.path}: {name!r} is not a valid name of a file in this folder")
        return parts

    def _below(self, parts: list[str], create: bool) -> Folder:
        folder = Folder.__new__(Folder)
        folder.path, folder.descriptor = self.path, -1
        with _naming(self.path):
            folder.descriptor = os.dup(self.descriptor)
        for part in parts:
            folder.path = folder.path / part
            with _naming(folder.path):
                if create:
                    with suppress(FileExistsError):
                        os.mkdir(part, dir_fd=folder.descriptor)
                below = self._open_folder(part, folder)
            os.close(folder.descriptor)
            folder.descriptor = below
        return folder

    def _open_folder(self, part: str, folder: Folder) -> int:
        try:
            return os.open(part, _FOLDER, dir_fd=folder.descriptor)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            kind = _kind(os.stat(part, dir_fd=folder.descriptor, follow_symlinks=False).st_mode)
            raise PathError(
                f"{folder.path}: is a {kind}, expected a folder; nothing below it is read, written or removed"
            ) from error

    @contextmanager
    def _parent(self, name: str) -> Iterator[tuple[int, str]]:
        """The open directory of the last component of `name`, and that component."""
        *above, last = self._parts(name)
        if not above:
            yield self.descriptor, last
            return
        with self._below(above, create=False) as folder:
            yield folder.descriptor, last

    def _open(self, parent: int, last: str, flags: int, name: str) -> int:
        try:
            return os.open(last, flags, 0o666, dir_fd=parent)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise PathError(f"{self.path / name}: is a link, which is not followed; remove it") from error
            if error.errno == errno.ENXIO:
                raise PathError(f"{self.path / name}: is a socket or a device, expected a regular file") from error
            raise


def _regular(descriptor: int, path: str) -> BinaryIO:
    """Wrap the descriptor if it is of a regular file; otherwise close it and raise."""
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise PathError(f"{path}: is a {_kind(mode)}, expected a regular file")
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _read(file: BinaryIO, max_bytes: int, path: str) -> bytes:
    """The whole file, read in steps, since its size may be wrong or change."""
    with _naming(path):
        size = os.fstat(file.fileno()).st_size
        parts: list[bytes] = []
        total = 0
        while size <= max_bytes and total <= max_bytes:
            part = file.read(_CHUNK_BYTES)
            if not part:
                return b"".join(parts)
            parts.append(part)
            total += len(part)
    raise PathError(f"{path}: {max(size, total):,} bytes, expected at most {max_bytes:,}")


def _kind(mode: int) -> str:
    return "socket" if stat.S_ISSOCK(mode) else _KINDS.get(stat.S_IFMT(mode), "device")


def _unlink(name: str, parent: int) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=parent)


def _remove_entry(name: str, parent: int) -> None:
    """Remove an empty directory, or a link to a directory."""
    try:
        os.rmdir(name, dir_fd=parent)
    except NotADirectoryError:
        _unlink(name, parent)


@contextmanager
def _naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Make errors of the system name the whole path, not only its last component."""
    try:
        yield
    except (PathError, BusyError):
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None
