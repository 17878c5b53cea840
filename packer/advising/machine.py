"""What this machine offers: CPUs, memory, the kind of filesystem that a source is on, directories to stage to."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cache.errors import CacheDirectoryError
from cache.filesystem import Budget, cache_budget, filesystem_type, free_space, is_local
from cache.node import available_memory_bytes, usable_cpus
from cache.staging import candidates

__all__ = ["Directory", "Machine", "look", "staging_directories"]


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory that `packer stage` would try. refused: why it cannot be used, "" where it can."""

    path: str
    named_by: str
    filesystem: str
    free_bytes: int
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the processes of this node may use together.

    cpus: that this process may keep busy. memory_bytes: free for it. cache_bytes: the largest cache in shared memory.
    filesystem: type of the one that the source is on, and whether it is this node's own.
    output_filesystem, output_is_local: those of the current directory, where sets are packed to.
    directories: where a set can be staged to, in the order in which they are tried.
    assumed: whether the memory was given, and is not what is free now.
    """

    cpus: int
    memory_bytes: int
    cache_bytes: int
    filesystem: str
    is_local: bool
    output_filesystem: str = ""
    output_is_local: bool = True
    directories: tuple[Directory, ...] = ()
    assumed: bool = False


def look(source: Path, node_memory: int | None = None) -> Machine:
    """Examine this machine. node_memory: bytes of the nodes of the job, where that is not this machine.

    Of a node's memory half is taken as the size of its /dev/shm, which is the usual one.
    """
    memory = available_memory_bytes() if node_memory is None else node_memory
    if node_memory is not None:
        room = Budget(node_memory // 2, node_memory // 2, node_memory).bytes
    else:
        try:
            room = cache_budget().bytes
        except CacheDirectoryError:
            room = 0
    kind, output = filesystem_type(source), filesystem_type(Path())
    return Machine(
        usable_cpus(),
        memory,
        room,
        kind,
        is_local(kind),
        output,
        is_local(output),
        tuple(staging_directories()),
        node_memory is not None,
    )


def staging_directories() -> list[Directory]:
    """Where a set can be staged to, in the order in which they are tried."""
    found: dict[str, Directory] = {}
    for path, named_by in candidates(None):
        if str(path) not in found:
            found[str(path)] = _examined(path, named_by)
    return list(found.values())


def _examined(path: Path, named_by: str) -> Directory:
    kind, free, refused = "", 0, ""
    try:
        if not path.is_dir():
            refused = "no such directory"
        else:
            kind = filesystem_type(path)
            free = free_space(path, kind).bytes
            if not is_local(kind):
                refused = f"a {kind} filesystem, which is not local to this node"
            elif not os.access(path, os.W_OK | os.X_OK):
                refused = "not writable"
    except OSError as error:
        refused = error.strerror or str(error)
    return Directory(str(path), named_by, kind, free, refused)
