"""Where samples come from: one file per kind of source, chosen by what a path is. Importing this loads little."""

from __future__ import annotations

import os
from pathlib import Path

from packer.sources.base import Source
from readers.errors import SourceError

__all__ = ["Source", "default_output_name", "open_source"]


def open_source(path: str | os.PathLike[str]) -> Source:
    """The source at `path`. Raises SourceError where there is none, or it is of no kind we know."""
    from packer.sources.folder import FolderSource
    from packer.sources.packed import PackedSource

    root = Path(path)
    if not root.exists():
        raise SourceError(f"{root}: no such file or directory")
    if root.is_dir():
        return PackedSource(root) if PackedSource.fits(root) else FolderSource(root)
    raise SourceError(f"{root}: no kind of source that packer knows")


def default_output_name(source: object, to: str) -> str:
    """`<source name>-<format>`, in the current directory."""
    root = getattr(source, "root", source)
    name = Path(str(root)).resolve().name
    return f"{name}-{to}"
