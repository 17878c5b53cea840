"""Serving a page that was exported, with the files of its set: those, and no others.

The directory is not trusted. The page itself, with its scripts and its policy, comes from this package, whatever the
directory has under those names. Of the directory come numbers and documents (.npy, .json), which the page reads as
data, and of the set the shards and columns that its dataset.json names. The set must be in the folder that holds the
page; no link is followed. A page that reads its set from another server gets no file but its own.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from cache.errors import DatasetError
from cache.files import Folder, read_regular
from cache.messages import quoted
from packer.viewer.answers import PAGE_TYPES, Answer, Query, error_answer, page_files
from packer.viewer.columns import Bytes
from packer.viewer.document import FORMAT
from packer.viewer.export import VIEW_FILE
from packer.viewer.thumbnails import FOLDER as THUMBNAILS
from readers.layout import read_dataset_info

__all__ = ["ExportSite", "is_export"]

_MOST_BYTES = 64 << 20  # of view.json
_ORIGIN = re.compile(r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?")
_DATA = re.compile(rf"((orders|runs|{THUMBNAILS})/([^/]+/)*)?[^/]+\.(json|npy)")


def is_export(place: Path) -> bool:
    """Whether a directory holds a page that was exported."""
    return (place / VIEW_FILE).is_file() and (place / "index.html").is_file()


@dataclass(frozen=True)
class _File:
    """A file that is read by ranges. size: as it was when it was looked up."""

    folder: Folder
    name: str
    size: int

    def read(self, start: int, stop: int) -> bytes:
        with self.folder.open(self.name) as file:
            return os.pread(file.fileno(), stop - start, start)


class ExportSite:
    """What an exported page may read, by paths below the folder that holds both it and its set. Raises DatasetError.

    page: the path of the page, ending with "/", or "". origins: other servers that the page reads.
    """

    def __init__(self, folder: Path) -> None:
        folder = Path(os.path.realpath(folder))
        document = _document(folder)
        origin, of_set = document.get("origin"), document.get("set")
        self.origins: tuple[str, ...] = (origin,) if isinstance(origin, str) and _ORIGIN.fullmatch(origin) else ()
        self._own = {name: (PAGE_TYPES[Path(name).suffix], data) for name, data in page_files(*self.origins).items()}
        self._page, self._set, self._prefix = Folder(folder), None, ""
        self._of_set: frozenset[str] = frozenset()
        top = folder
        if not self.origins and isinstance(of_set, str):
            root = _set_folder(folder, of_set)
            top = Path(os.path.commonpath([folder, root]))
            self._set, self._prefix = Folder(root), "" if root == top else f"{root.relative_to(top).as_posix()}/"
            self._of_set = _set_files(root)
        self.page = "" if top == folder else quote(folder.relative_to(top).as_posix()) + "/"

    def answer(self, parts: Sequence[str], query: Query) -> Answer:
        path, page = "/".join(parts), unquote(self.page)
        name = path.removeprefix(page) or "index.html"
        if path.startswith(page) and name in self._own:
            kind, data = self._own[name]
            return Answer(200, kind, Bytes(data))
        try:
            if path.startswith(page) and _DATA.fullmatch(name):
                if name.endswith(".json"):
                    return Answer(200, PAGE_TYPES[".json"], Bytes(self._page.read(name, _MOST_BYTES)))
                return _ranges(self._page, name)
            if self._set is not None and path.removeprefix(self._prefix) in self._of_set:
                return _ranges(self._set, path.removeprefix(self._prefix))
        except OSError as error:
            return error_answer(404, type(error).__name__, f"{path} cannot be read: {error.strerror or error}")
        return error_answer(404, "NotFound", "there is no such thing here")


def _ranges(folder: Folder, name: str) -> Answer:
    with folder.open(name) as file:
        size = os.fstat(file.fileno()).st_size
    return Answer(200, "application/octet-stream", _File(folder, name, size), kept=True)


def _document(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_regular(folder / VIEW_FILE, _MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise DatasetError(f"{folder / VIEW_FILE}: cannot be read: {error}; export the page again") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise DatasetError(f"{folder / VIEW_FILE}: not the document of a page of this version; export it again")
    return found


def _set_folder(folder: Path, of_set: str) -> Path:
    """The folder of the set by its path from the page. Raises DatasetError where it is not in the folder of both."""
    root = Path(os.path.realpath(folder / unquote(of_set)))
    parent = folder.parent
    is_near = root.is_relative_to(parent) if parent != Path(parent.anchor) else root.parent == parent
    if not is_near:
        raise DatasetError(
            f"{folder / VIEW_FILE}: reads the set {root}, and here a page may read a set in {parent} only; to "
            f"look at that set run  packer view {quoted(root)}  , or serve both with another web server"
        )
    return root


def _set_files(root: Path) -> frozenset[str]:
    """The shards and columns that dataset.json names, by their paths in the set. Raises DatasetError."""
    info = read_dataset_info(root)
    splits = info.splits.values()
    columns = (f"{split.index}/{name}" for split in splits for name in info.column_names)
    return frozenset((*columns, *(shard.path for split in splits for shard in split.shards)))
