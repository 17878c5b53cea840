"""Where a set's dataset.json is to be read: its directory, or the one that keeps it for an address."""

from __future__ import annotations

import os
from pathlib import Path

from cache.remote import Remote, is_remote
from readers.remote import RemoteHome, remote_errors

__all__ = ["set_root"]


def set_root(path: str | os.PathLike[str]) -> tuple[Path, Path | str]:
    """(directory with dataset.json, what to call the set in results). Raises DatasetError, RemoteError."""
    if not is_remote(path):
        return Path(path), Path(path)
    with remote_errors():
        remote = Remote(str(path))
    return RemoteHome(remote).path, str(remote.url)
