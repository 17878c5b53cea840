"""Where to stage: the first directory that is writable, local, ours and large enough.

In order: what the user names (then nothing else is tried), $SLURM_TMPDIR, $TMPDIR, and what sites provide without a
variable: /mnt/bb/$USER (Frontier's NVMe), /local, /scratch/local, /dev/shm. A directory where the set is already, or
is being staged by another process of the node, is taken at once, so that all ranks of a node agree.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cache.errors import NoRoomError, NoTargetError
from cache.staging.leader import no_room
from cache.staging.mounts import filesystem_type, free_space, is_local

__all__ = ["Choice", "Need", "Target", "candidates", "choose", "expand"]

_SITES = ("/mnt/bb/$USER", "/local", "/scratch/local", "/dev/shm")


@dataclass(frozen=True, slots=True)
class Target:
    """A directory that may be staged to, and who named it."""

    path: Path
    named_by: str


@dataclass(frozen=True, slots=True)
class Need:
    """What a target must have free. joins: the set is there, or on its way; nothing is asked of it then."""

    bytes: int
    inodes: int
    joins: bool = False
    evictable_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """The target that was taken, and why those before it were not: (path, reason)."""

    target: Target
    filesystem: str
    free_bytes: int
    refused: tuple[tuple[str, str], ...]


def candidates(to: str | os.PathLike[str] | None, environ: Mapping[str, str] | None = None) -> list[Target]:
    """The directories to look at, in order. Raises NoTargetError where `to` names a variable that is not set."""
    env = os.environ if environ is None else environ
    if to is not None:
        return [Target(expand(os.fspath(to), env), "the user")]
    found = [Target(Path(env[name]), f"${name}") for name in ("SLURM_TMPDIR", "TMPDIR") if env.get(name)]
    for site in _SITES:
        if "$USER" not in site or env.get("USER"):
            found.append(Target(Path(site.replace("$USER", env.get("USER", ""))), "the usual places"))
    return found


def expand(text: str, environ: Mapping[str, str]) -> Path:
    """A path with $NAME, ${NAME} and ~ replaced; absolute. Raises NoTargetError for a variable that is not set."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if not environ.get(name):
            raise NoTargetError(f"the target {text!r} names ${name}, which is not set here")
        return environ[name]

    path = re.sub(r"\$(?:(\w+)|\{(\w+)\})", value, text)
    if not path:
        raise NoTargetError("the target is an empty path")
    return Path(path).expanduser().absolute()


def choose(targets: list[Target], need: Callable[[Path], Need], *, make: bool, any_filesystem: bool = False) -> Choice:
    """The first fit target. make: create the directory where it is missing. Raises NoTargetError, NoRoomError."""
    refused: list[tuple[str, str]] = []
    short: NoRoomError | None = None
    for target in targets:
        try:
            filesystem = _usable(target.path, make, any_filesystem)
            wanted, free = need(target.path), free_space(target.path, filesystem)
        except (OSError, NoTargetError) as error:
            refused.append((str(target.path), error.strerror or str(error)))
            continue
        available = free.bytes + wanted.evictable_bytes
        if wanted.joins or (wanted.bytes <= available and wanted.inodes <= free.inodes):
            return Choice(target, filesystem, free.bytes, tuple(refused))
        short = no_room(target.path, wanted.bytes, available, wanted.inodes, free.inodes)
        refused.append((str(target.path), str(short).partition(": ")[2].rpartition("; ")[0]))
    if short is not None and len(targets) == 1:
        raise short
    if len(targets) == 1:
        path, why = refused[0]
        raise NoTargetError(f"{why if why.startswith(path) else f'{path}: {why}'}; choose another directory with  --to")
    reasons = "; ".join(f"{path} ({why})" for path, why in refused)
    kind = NoTargetError if short is None else NoRoomError
    raise kind(f"nowhere to stage to: {reasons}; name a directory of this node with  --to")


def _usable(path: Path, make: bool, any_filesystem: bool) -> str:
    """The filesystem type of a directory that can be written to. Raises NoTargetError, OSError."""
    if path.exists() and not path.is_dir():
        raise NoTargetError("not a directory")
    if make:
        path.mkdir(parents=True, exist_ok=True)
    if not path.is_dir():
        raise NoTargetError("no such directory")
    filesystem = filesystem_type(path)
    if not any_filesystem and not is_local(filesystem):
        raise NoTargetError(f"a {filesystem} filesystem, which is not local to this node")
    if not os.access(path, os.W_OK | os.X_OK) or os.statvfs(path).f_flag & os.ST_RDONLY:
        raise NoTargetError("not writable")
    return filesystem
