"""Small JSON records, written whole or not at all, and believed only in the directory they were made for.

A record of ours names its kind, its version and the inode of its directory. A marker that was copied, or forged by
somebody who may not write here, does not match, and what it would allow is not done.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

__all__ = ["fsync_folder", "is_own_folder", "read_number", "read_record", "write_number", "write_record"]

VERSION = 1
_MAX_BYTES = 1 << 28


def write_record(path: Path, kind: str, folder: Path, content: dict[str, Any]) -> None:
    """Write a record about `folder`: temporary name, fsync, rename. Raises OSError."""
    whole = {"kind": kind, "version": VERSION, "inode": folder.lstat().st_ino, **content}
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        json.dump(whole, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    fsync_folder(path.parent)


def read_record(path: Path, kind: str, folder: Path) -> dict[str, Any] | None:
    """The record of `folder`; None where there is none, or it is not one of that kind, made for that very folder."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_size > _MAX_BYTES:
                return None
            content = json.loads(file.read())
        inode = folder.lstat().st_ino
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or content.get("kind") != kind or content.get("version") != VERSION:
        return None
    return content if content.get("inode") == inode else None


def write_number(path: Path, number: int) -> None:
    """Write a number that need not survive a crash. Raises OSError; follows no link, waits for no pipe."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with open(os.open(path, flags, 0o600), "w", encoding="ascii") as file:
        file.write(f"{number}\n")


def read_number(path: Path) -> int:
    """The number in a file; 0 where there is none."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            return int(file.read(32))
    except (OSError, ValueError, TypeError):
        return 0


def is_own_folder(path: Path) -> bool:
    """Whether a path is a directory (no symbolic link to one) of this user that nobody else may write to."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def fsync_folder(folder: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
