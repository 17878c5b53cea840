"""Plain files as a reader: the table from a scan of names and sizes, the store whole files."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np

from cache.errors import SourceError
from cache.stores import LooseFiles
from readers.examine import scan
from readers.index import MemoryColumns
from readers.reader import Reader
from readers.strings import Strings
from readers.table import Table
from readers.tree import arrange, has_image_suffix, unique_keys

__all__ = ["open_folder"]


class _FolderColumns(MemoryColumns):
    """The files of a scan, without header facts."""

    path: Path
    split: str
    paths: Strings

    def names(self, field: str) -> Strings:
        return Strings.of(f"={path}" for path in self.paths)

    def fingerprint(self) -> str:
        """32 hex digits over names, labels and classes; not over the content of the files, which nothing has read."""
        text = json.dumps([self.split, list(self.classes), list(self.paths)])
        digest = hashlib.blake2b(text.encode(), digest_size=16)
        digest.update(self.column("label").data)
        return digest.hexdigest()


def open_folder(path: str | os.PathLike[str], split: str | None = None) -> Reader:
    """Open a folder of image files; see `readers.tree` for the supported layouts.

    Files are images by their suffix, as in torchvision; none is opened before it is read. Raises SourceError for a tree
    that cannot be used; reading raises StaleIndexError for a file that was removed.
    """
    root = Path(path)
    if not root.is_dir():
        raise SourceError(f"{root}: not a directory")
    files = scan(root, [])
    images = np.fromiter(map(has_image_suffix, files.paths()), np.bool_, len(files))
    splits, classes = arrange(files.take(np.flatnonzero(images)), split, root, [])
    name = "train" if split is None and "train" in splits else next(iter(splits))
    part = splits[name]
    if not part.names:
        raise SourceError(f"{root}: no image files found")
    sizes = np.maximum(part.files.column(0), 0)
    times = np.stack([part.files.column(1), part.files.column(2)], axis=1)
    names = Strings.of(part.names)
    columns = _FolderColumns(
        Strings.of(unique_keys(part.names)),
        {"label": part.labels, "shard": np.arange(len(sizes)), "image.length": sizes},
        classes=classes,
        shard_bytes=sizes,
        title=f"{os.path.abspath(root)} ({name})",
    )
    columns.path, columns.split, columns.paths = root, name, names
    where = os.path.join(root, part.root) if part.root else os.fspath(root)
    return Reader(Table(columns), LooseFiles(where, names, sizes, times))
