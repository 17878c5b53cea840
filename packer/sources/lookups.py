"""Small questions that many sources ask: how large a file is, and which split is meant."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Any

from cache.errors import MissingExtraError, SourceError
from readers.layout import same_split

__all__ = ["file_stamp", "plain_yaml", "size_and_time", "wanted_split"]

_MAX_DEPTH = 100


def size_and_time(path: str | os.PathLike[str]) -> tuple[int, int]:
    """(bytes, modification time in ns) of a file; -1 bytes for one that cannot be examined, or is none."""
    try:
        found = os.stat(path)
    except OSError:
        return -1, 0
    return (found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else (-1, 0)


def wanted_split(split: str | None, names: Collection[str], where: str) -> str | None:
    """The one of `names` that is asked for, None for all; val, valid and validation stand for each other.

    Raises SourceError for any other name.
    """
    if split is None or split in names:
        return split
    other = next((name for name in same_split(split) if name in names), None)
    if other is None:
        raise SourceError(f"{where}: no split {split!r}; it has {', '.join(names) or 'none'}")
    return other


def file_stamp(path: Path) -> tuple[int, int]:
    """(bytes, modification time in ns) of a file: where these differ, it is not the file that was listed."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise SourceError(f"{path}: cannot be examined: {error.strerror}") from error
    return found.st_size, found.st_mtime_ns


def plain_yaml(text: str, where: object, extra: str, purpose: str) -> Any:
    """What a YAML text says. Raises SourceError, also for aliases: with them a few bytes stand for any number.

    extra: the one of packer that has PyYAML, for this purpose.
    """
    try:
        import yaml
    except ImportError as error:
        raise MissingExtraError("PyYAML", extra, purpose) from error
    loader, depth = getattr(yaml, "CSafeLoader", yaml.SafeLoader), 0
    try:
        for event in yaml.parse(text, loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > _MAX_DEPTH:
                what = f"nests deeper than {_MAX_DEPTH}" if depth > _MAX_DEPTH else "has aliases (*name)"
                raise ValueError(f"{what}; write out what is meant")
        return yaml.load(text, loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SourceError(f"{where}: cannot be read as YAML: {str(error)[:200]}") from error
