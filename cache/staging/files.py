"""What is to be staged: a plain list of files, handed in by whoever knows what they mean.

A manifest names every file of a source that may ever be staged: path relative to it, size, and CRC32C where
it is known. Nothing here knows shards or data sets. A request takes some of a manifest's files; its `last` file is put
in place when all others of the request are there, so that it can vouch for them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

from cache.errors import StagingError
from cache.staging.sources import Source, StagedFile

__all__ = ["INNER_FOLDER", "Manifest", "inside", "total_bytes"]

INNER_FOLDER = ".staging"


@dataclass(frozen=True)
class Manifest:
    """A source and its files.

    name: of the set, for people. fingerprint: at least 16 hex digits that change whenever the files do; it names the
    directory of the copy. Raises StagingError for a path that leads outside, or comes twice.
    """

    source: Source
    name: str
    fingerprint: str
    files: tuple[StagedFile, ...] = field(repr=False)
    last: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch("[0-9a-f]{16,128}", self.fingerprint):
            raise StagingError(f"{self.source}: fingerprint {self.fingerprint!r} is not made of 16 hex digits or more")
        for file in self.files:
            if not inside(file.path):
                raise StagingError(f"{self.source}: the path {file.path!r} leads outside the set")
        if len(self.by_path) != len(self.files):
            raise StagingError(f"{self.source}: names a file twice")

    @cached_property
    def by_path(self) -> Mapping[str, StagedFile]:
        return {file.path: file for file in self.files}

    @property
    def folder_name(self) -> str:
        """Of the copy's directory: the set's name in plain letters, and its fingerprint."""
        plain = re.sub(r"[^A-Za-z0-9._-]+", "_", self.name).strip("._-")[:80] or "set"
        return f"{plain}-{self.fingerprint[:16]}"


def inside(path: Any) -> bool:
    """Whether a relative path stays in its directory and out of our own folder there."""
    if not isinstance(path, str) or not path or "\0" in path:
        return False
    parts = PurePosixPath(path).parts
    return (
        bool(parts) and parts[0] not in ("/", INNER_FOLDER) and ".." not in parts and str(PurePosixPath(path)) == path
    )


def total_bytes(files: Any) -> int:
    """Bytes of some files together."""
    return sum(file.bytes for file in files)
