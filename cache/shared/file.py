"""Segments as files of a tmpfs, shared by all processes of one user and job on the node.

`packer-cache-<uid>-<24 hex digits of the identity>`, mode 0600. A segment is created under a temporary name (16 more
digits), locked, linked to its name, and only then given its space and header. A process that opens it meanwhile waits
for the lock, so processes that start at once use the same segment, and only one of them reserves memory. A creator that
dies leaves a file without magic, which the next creator of any segment removes.

Space is reserved when the segment is created, so touching a page never fails (SIGBUS). A process that finds a segment
in use accepts its capacity. A segment without users is replaced if it is damaged or smaller than requested, and taken
over otherwise.

The name can be guessed, so another user may create a file of that name first. Files of other users, links, and other
kinds of files are left alone, and the next of four names is tried; so it is if the creator of a segment has been
stopped. All processes try the names in the same order, so later ones still find the same segment.

The last user removes the file; if all are killed, it stays until the next `open` or `cache.clean_caches`.

Without a writable tmpfs, a segment has no name (memfd): it is memory of this process and its children. Every `open`
creates a new one. A forked child inherits it; a pickled copy opens it through /proc/<pid>/fd of the process that
pickled it, which must still run and belong to the same user. The kernel frees the memory with its last mapping, so
nothing is left behind, and `persist` has no effect. Seals fix the size.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from cache.errors import CacheBusyError, CacheDirectoryError, CacheError, CacheFullError, ForeignCacheError
from cache.filesystem import is_in_memory
from cache.locks import ByteLocks, is_at, wait_shared
from cache.node import available_memory_bytes
from cache.shared.layout import MAGIC, PERSIST_AT, USE, Segment, Spec, begins_like_ours, map_segment, read_header
from cache.system import fcntl

NAME = re.compile(r"packer-cache-(\d+)-[0-9a-f]{24}(\.[0-9a-f]{16})?")
_ATTEMPTS = 1000
_NAMES = 4
STANDSTILL_SECONDS = 5.0  # while the file of a creator does not grow; reserving a terabyte takes minutes
_ATTACH_SECONDS = 10.0
_STEP_BYTES = 1 << 30
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG)


class FileBackend:
    """One file per segment in `spec.directory`."""

    name = "file"

    def attach(self, spec: Spec) -> tuple[Segment, ByteLocks]:
        return _attach(spec, list(_names(spec)))

    def leave_last(self, segment: Segment) -> None:
        assert segment.path is not None
        if not is_at(segment.anchor.number, segment.path):
            return
        if segment.persist:
            segment.seal()
        else:
            segment.path.unlink()

    def ticket(self, segment: Segment) -> Mapping[str, Any]:
        assert segment.path is not None
        return {"name": segment.path.name}

    def attach_again(self, spec: Spec, ticket: Mapping[str, Any]) -> tuple[Segment, ByteLocks]:
        return _attach(spec, sorted(_names(spec), key=lambda name: name != ticket["name"]))


class MemfdBackend:
    """One anonymous file per `open`."""

    name = "memfd"

    def attach(self, spec: Spec) -> tuple[Segment, ByteLocks]:
        layout = spec.layout
        try:
            lock = ByteLocks(os.memfd_create("packer-cache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        except OSError as error:
            raise CacheFullError(error.errno, f"no anonymous memory: {error.strerror}") from error
        _reserve(lock, layout.total_bytes, "memfd", in_memory=True)
        fcntl.fcntl(lock.number, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        segment = map_segment(lock, layout)
        segment.begin(spec)
        lock.try_shared(USE)
        return segment, lock

    def leave_last(self, segment: Segment) -> None:
        """Nothing to do: the kernel frees the memory."""

    def ticket(self, segment: Segment) -> Mapping[str, Any]:
        facts = os.fstat(segment.anchor.number)
        return {"path": f"/proc/{os.getpid()}/fd/{segment.anchor.number}", "inode": (facts.st_dev, facts.st_ino)}

    def attach_again(self, spec: Spec, ticket: Mapping[str, Any]) -> tuple[Segment, ByteLocks]:
        path = str(ticket["path"])
        try:
            lock = ByteLocks(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        except OSError as error:
            reason = f"the process that pickled the cache must still have it open ({error.strerror})"
            raise ForeignCacheError(error.errno, reason, path) from error
        facts = os.fstat(lock.number)
        file = read_header(lock.number, path) if (facts.st_dev, facts.st_ino) == tuple(ticket["inode"]) else None
        if file is None or file[2] != spec.identity.digest:
            raise ForeignCacheError(f"{path} is another file now; open the cache again and pickle the new one")
        wait_shared(lock, USE, _ATTACH_SECONDS, path)
        return map_segment(lock, file[0]), lock


def open_file(path: Path) -> ByteLocks | None:
    """The segment file at a path; None if it does not exist. Raises ForeignCacheError for any other file."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        lock = ByteLocks(os.open(path, flags))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ForeignCacheError(error.errno, f"cannot be opened as a segment: {error.strerror}", str(path)) from error
    facts = os.fstat(lock.number)
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        mode = f"{stat.filemode(facts.st_mode)} of user {facts.st_uid}"
        raise ForeignCacheError(
            f"{path} is {mode}, expected -rw------- of user {os.geteuid()}; remove it, or choose another directory"
        )
    return lock


def remove_unused(path: Path, *, persistent: bool = False) -> bool:
    """Remove a segment without users, with `persistent` also a persistent one; returns whether it was removed."""
    lock = open_file(path)
    if lock is None or not begins_like_ours(lock.number):
        return False
    if (
        not lock.try_exclusive(USE)
        or not is_at(lock.number, path)
        or (os.pread(lock.number, 8, PERSIST_AT) not in (bytes(8), b"") and not persistent)
    ):
        return False
    path.unlink()
    return True


def _reserve(descriptor: ByteLocks, size: int, where: str, *, in_memory: bool) -> None:
    """Reserve the pages of a file. Raises CacheFullError, with errno."""
    room = available_memory_bytes() if in_memory else size
    if size > room:  # the kernel would make room by killing a process
        reason = (
            f"no room for a cache segment of {size} bytes: {room} bytes of memory are free; ask for a smaller capacity"
        )
        raise CacheFullError(errno.ENOMEM, reason, where)
    try:
        for start in range(0, size, _STEP_BYTES):  # in steps, since a signal makes tmpfs restart the call
            os.posix_fallocate(descriptor.number, start, min(_STEP_BYTES, size - start))
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        reason = f"no room for a cache segment of {size} bytes ({error.strerror}): ask for a smaller capacity"
        raise CacheFullError(error.errno, reason, where) from error


def _names(spec: Spec) -> Iterator[str]:
    """The names of a segment, in the order in which they are tried."""
    digest = spec.identity.digest
    for _ in range(_NAMES):
        yield f"packer-cache-{spec.identity.uid}-{digest.hex()[:24]}"
        digest = hashlib.sha256(digest).digest()


def _attach(spec: Spec, names: list[str]) -> tuple[Segment, ByteLocks]:
    """The segment under the first usable name."""
    refused: list[CacheError] = []
    for name in names:
        try:
            segment = _attach_at(spec.directory / name, spec)
        except (ForeignCacheError, CacheBusyError) as error:
            refused.append(error)
            continue
        if refused:
            reasons = "; ".join(map(str, refused))
            warnings.warn(f"the cache is made under another name, {name}, because {reasons}", stacklevel=6)
        return segment
    raise refused[0]


def _blocks(lock: ByteLocks) -> int:
    return os.fstat(lock.number).st_blocks


def _attach_at(path: Path, spec: Spec) -> tuple[Segment, ByteLocks]:
    for _ in range(_ATTEMPTS):  # others may create or remove it between any two steps; each round one makes progress
        lock = open_file(path)
        if lock is None:
            lock = _link(path)
            segment = _create(lock, path, spec) if lock else None
        elif lock.try_exclusive(USE):
            segment = None if not is_at(lock.number, path) else _take_over(lock, path, spec)
        else:
            wait_shared(lock, USE, STANDSTILL_SECONDS, str(path), partial(_blocks, lock))
            segment = None if not is_at(lock.number, path) else _join(lock, path, spec)
        if lock is not None and segment is not None:
            lock.try_shared(USE)
            return segment, lock
    raise CacheBusyError(f"{path} is created and removed again and again by other processes")


def _link(path: Path) -> ByteLocks | None:
    """Create an empty file, locked before another process can see it; None if another process was faster."""
    nonce = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        lock = ByteLocks(os.open(nonce, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise _directory_error(path.parent, error) from error
    try:
        if not lock.try_exclusive(USE):
            return None  # another process is removing it
        os.link(nonce, path)
    except (FileExistsError, FileNotFoundError):
        return None
    except OSError as error:
        raise _directory_error(path.parent, error) from error
    finally:
        nonce.unlink(missing_ok=True)
    return lock


def _directory_error(directory: Path, error: OSError) -> CacheError:
    if error.errno in _NO_ROOM:
        return CacheFullError(error.errno, f"no room for a cache segment ({error.strerror})", str(directory))
    reason = f"no cache segments can be made there ({error.strerror}); name another tmpfs"
    return CacheDirectoryError(error.errno, reason, str(directory))


def _sweep(directory: Path) -> None:
    """Remove the remains of killed creators: unlocked files of this user without a magic."""
    for path in directory.glob(f"packer-cache-{os.geteuid()}-*"):
        with contextlib.suppress(OSError):
            lock = open_file(path) if NAME.fullmatch(path.name) else None
            if lock is None or not (_is_half_create(lock) and lock.try_exclusive(USE)):
                continue
            if _is_half_create(lock) and is_at(lock.number, path):
                path.unlink()


def _is_half_create(lock: ByteLocks) -> bool:
    head = os.pread(lock.number, len(MAGIC), 0)
    return head == bytes(len(head))


def _create(lock: ByteLocks, path: Path, spec: Spec) -> Segment:
    try:
        _sweep(path.parent)
        _reserve(lock, spec.layout.total_bytes, str(path), in_memory=is_in_memory(path.parent))
        segment = map_segment(lock, spec.layout, path)
        segment.begin(spec)
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    return segment


def _take_over(lock: ByteLocks, path: Path, spec: Spec) -> Segment | None:
    """Take over a segment without users; None if it was unusable and has been removed."""
    try:
        header = read_header(lock.number, str(path))
    except ForeignCacheError:
        if not begins_like_ours(lock.number):
            raise
        header = None
    if header is None or header[0].capacity_bytes < spec.capacity_bytes or header[2] != spec.identity.digest:
        path.unlink()
        return None
    segment = map_segment(lock, header[0], path)
    segment.unseal(spec.persist)
    return segment


def _join(lock: ByteLocks, path: Path, spec: Spec) -> Segment | None:
    """Join a segment that is in use; None if its creator died before it was ready."""
    header = read_header(lock.number, str(path))
    if header is None:
        return None
    if header[2] != spec.identity.digest:
        raise ForeignCacheError(f"{path} is a segment of {header[1]}, expected {spec.identity}")
    segment = map_segment(lock, header[0], path)
    segment.resume(spec.persist)
    return segment
