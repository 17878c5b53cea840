"""Where a set is: what results call it, and the directory where its dataset.json is to be read."""

from __future__ import annotations

import os
from pathlib import Path

from cache.remote import Remote, is_remote, parse_url
from readers.remote import RemoteHome, remote_errors

__all__ = ["place_told", "set_root"]


def place_told(path: str | os.PathLike[str]) -> Path | str:
    """What results call a set: its directory, or its address without secrets. Raises RemoteError."""
    if not is_remote(path):
        return Path(path)
    with remote_errors():
        return str(parse_url(path))


def set_root(path: str | os.PathLike[str]) -> Path:
    """The directory with dataset.json: the set's, or the one that keeps it for an address.

    Raises DatasetError, RemoteError.
    """
    if not is_remote(path):
        return Path(path)
    with remote_errors():
        return RemoteHome(Remote(str(path))).path
