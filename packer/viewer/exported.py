"""Serving a page that was exported, with the files of its set: those, and no others.

The page and its view.json are not trusted. What they may name is the page's own files, and the shards and columns that
the dataset.json of the set names. A page that reads its set from another server gets no file but its own.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from cache.errors import DatasetError
from cache.files import open_regular, read_regular
from packer.viewer.answers import PAGE_TYPES, Answer, Query, error_answer
from packer.viewer.columns import Bytes
from packer.viewer.export import VIEW_FILE
from packer.viewer.thumbnails import FOLDER as THUMBNAILS
from readers.layout import read_dataset_info

__all__ = ["ExportSite", "is_export"]

_MOST_BYTES = 64 << 20  # of view.json
_MOST_FILES = 100_000
_ORIGIN = re.compile(r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?")


def is_export(place: Path) -> bool:
    """Whether a directory holds a page that was exported."""
    return (place / VIEW_FILE).is_file() and (place / "index.html").is_file()


@dataclass(frozen=True)
class _File:
    """A file that is read by ranges. size: as it was when it was looked up."""

    path: Path
    size: int

    def read(self, start: int, stop: int) -> bytes:
        with open_regular(self.path) as file:
            return os.pread(file.fileno(), stop - start, start)


class ExportSite:
    """The files below a folder that an exported page may read, by their paths. Raises DatasetError.

    page: the path of the page, ending with "/", or "". origins: other servers that the page reads.
    """

    def __init__(self, folder: Path) -> None:
        folder = Path(os.path.realpath(folder))
        document = _document(folder)
        origin, of_set = document.get("origin"), document.get("set")
        self.origins: tuple[str, ...] = (origin,) if isinstance(origin, str) and _ORIGIN.fullmatch(origin) else ()
        root = None
        if not self.origins and isinstance(of_set, str):
            root = Path(os.path.normpath(folder / unquote(of_set)))
        top = folder if root is None else Path(os.path.commonpath([folder, root]))
        self.page = "" if top == folder else quote(folder.relative_to(top).as_posix()) + "/"
        files = [*_page_files(folder), *(() if root is None else _set_files(root))]
        self._files = {path.relative_to(top).as_posix(): path for path in files}

    def answer(self, parts: Sequence[str], query: Query) -> Answer:
        name = "/".join(parts)
        if name == unquote(self.page):
            name += "index.html"
        path = self._files.get(name)
        if path is None:
            return error_answer(404, "NotFound", "there is no such thing here")
        kind = PAGE_TYPES.get(path.suffix, "application/octet-stream")
        try:
            if path.suffix in PAGE_TYPES:
                return Answer(200, kind, Bytes(read_regular(path, _MOST_BYTES)))
            return Answer(200, kind, _File(path, path.stat().st_size), kept=True)
        except OSError as error:
            return error_answer(404, type(error).__name__, f"{name} cannot be read: {error.strerror or error}")


def _document(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_regular(folder / VIEW_FILE, _MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise DatasetError(f"{folder / VIEW_FILE}: cannot be read: {error}; export the page again") from error
    if not isinstance(found, dict):
        raise DatasetError(f"{folder / VIEW_FILE}: not the document of a page; export it again")
    return found


def _page_files(folder: Path) -> Iterator[Path]:
    """The files of the page; no link is followed."""
    count = 0
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name in ("orders", "runs", THUMBNAILS) or place != str(folder)]
        for name in names:
            path = Path(place, name)
            count += 1
            if count > _MOST_FILES:
                raise DatasetError(f"{folder}: has more than {_MOST_FILES:,} files, so it is not an exported page")
            if path.suffix in (*PAGE_TYPES, ".npy") and not path.is_symlink():
                yield path


def _set_files(root: Path) -> Iterator[Path]:
    """The shards and columns that dataset.json names. Raises DatasetError."""
    info = read_dataset_info(root)
    for split in info.splits.values():
        yield from (root / shard.path for shard in split.shards)
        yield from (root / split.index / name for name in info.index_files(split))
