"""An exported page for any web server with Range requests: `packer view SET --export DIR`.

    DIR/index.html, *.js, *.css     the page, the same that `packer view` serves
    DIR/orders/SPLIT/NAME.npy       orders, uint32, and columns of predictions
    DIR/runs/SPLIT/NAME.json        long lists: runs of an order, shards
    DIR/classes.json                class names, if the list is long
    DIR/thumbnails/SPLIT.npy, …     thumbnails for the grid, which otherwise shows the full images
    DIR/view.json                   the document that the page reads first; written last, removed first

Columns and shards are not copied: view.json refers to the set, relative to the page if the set is on this machine, else
by its address. The web server must therefore serve a folder that contains both the page and the set.
"""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import numpy as np

from cache.errors import BadSampleError, DatasetError, OutputError
from cache.files import Folder, atomic_write, read_regular
from cache.messages import Silent, Watcher, quoted
from cache.node import usable_cpus
from cache.remote import is_remote, parse_url
from cache.system import pread
from packer.output import Result, local_output, output_errors
from packer.tools.view.answers import PAGE_TYPES, Answer, Query, error_answer, page_files
from packer.tools.view.document import FORMAT, Bytes, Column, SplitView, View, open_view
from packer.tools.view.samples import thumbnail
from readers.layout import PIXELS, read_dataset_info
from readers.opening.packed import PackedColumns
from readers.reader import Reader

__all__ = [
    "ExportSite",
    "ViewExport",
    "export_view",
    "is_export",
]


# --- Thumbnails in separate files, for pages without a server that decodes images.
# thumbnails/SPLIT.npy           uint8, concatenated JPEGs; no bytes for an image that cannot be decoded
# thumbnails/SPLIT.offset.npy    uint64, n + 1: thumbnail i is bytes offset[i] to offset[i + 1]
FOLDER = "thumbnails"
_SIDE = 200  # pixels; the page draws them up to 180 wide
_AHEAD = 64
_HEADER_BYTES = 128  # header of a one-dimensional array of any length


def write_thumbnails(reader: Reader, name: str, page: Path, watcher: Watcher) -> tuple[dict[str, Any], int]:
    """Write the thumbnails of a split below a page, and return their columns for view.json, and the bytes written.

    name: name of the files. Raises OSError, and PackerError if the set cannot be read. Damaged images have no
    thumbnail.
    """
    offsets = np.zeros(len(reader) + 1, np.uint64)
    done = 0
    waiting: deque[Future[bytes]] = deque()
    with Folder(page / FOLDER, create=True) as folder, ThreadPoolExecutor(usable_cpus()) as pool:
        watcher.begin(len(reader), 0, lambda: (done, 0, 0))
        try:
            with folder.writing(f"{name}.npy") as file:
                file.write(bytes(_HEADER_BYTES))
                for index in range(len(reader) + _AHEAD):
                    if index < len(reader):
                        waiting.append(pool.submit(_picture, reader, index))
                    if index >= _AHEAD and waiting:
                        data = waiting.popleft().result()
                        file.write(data)
                        offsets[done + 1] = offsets[done] + np.uint64(len(data))
                        done += 1
                pictures = Column(
                    np.broadcast_to(np.uint8(0), int(offsets[-1]))
                )  # only for the header; the values are already in the file
                assert len(pictures.header) == _HEADER_BYTES
                file.seek(0)
                file.write(pictures.header)
            column = Column(offsets)
            folder.write(f"{name}.offset.npy", column.read(0, column.size))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            watcher.end()
    url = f"{FOLDER}/{quote(name)}"
    columns = {
        "thumbnail": pictures.described(f"{url}.npy"),
        "thumbnail.offset": column.described(f"{url}.offset.npy"),
    }
    return columns, pictures.size + column.size


def _picture(reader: Reader, index: int) -> bytes:
    try:
        return thumbnail(reader, index, _SIDE) if reader.has(index, reader.main) else b""
    except BadSampleError:
        return b""


VIEW_FILE, _INDEX = "view.json", "index.html"
_MOST_UNASKED = 10_000  # samples up to which thumbnails are written by default
_MOST_INLINE = 20_000  # characters of a list in view.json


@dataclass(frozen=True, slots=True)
class ViewExport(Result):
    """The result of an export.

    path: the folder of the page. serve: the folder for the web server, which contains the page and the set, if the set
    is on this machine. page: path of the page below `serve`, as in a URL. samples, files, bytes: totals.
    """

    path: Path
    serve: Path
    page: str
    samples: int
    files: int
    bytes: int


def export_view(
    place: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    split: str | None = None,
    url: str | None = None,
    overwrite: bool = False,
    thumbnails: bool | None = None,
    predictions: str | os.PathLike[str] | None = None,
    watcher: Watcher | None = None,
) -> ViewExport:
    """Write a page that shows a packed set without packer, by Range requests to its files.

    place: the set, by its directory or its address.
    output: a new or empty directory, or with `overwrite` one with an earlier page.
    split: the only split to export; None for all.
    url: address of the set for browsers; by default its path relative to `output`, or its http(s) address.
    overwrite: replace an earlier page.
    thumbnails: also write thumbnails, each about 8 kB and 3 ms of CPU time; None: for up to 10,000 samples. Without
        them, the grid reads the full images.
    predictions: as for `view`.

    Raises DatasetError, UnknownNameError, StaleIndexError, RemoteError, OutputError.
    """
    folder = Path(os.path.realpath(local_output(output).expanduser()))
    with output_errors():
        _check(folder, overwrite)
    view = open_view(place, split, predictions)
    opened = view.place
    try:
        if opened.dataset is None:
            raise OutputError(
                f"{opened.address}: only packed sets can be exported: pages read samples by ranges of shards; run  "
                f"packer convert  first, or view it unpacked with  packer view"
            )
        base = _base(opened.address, folder, url)
        with output_errors():
            if thumbnails is None:
                thumbnails = sum(len(split.reader) for split in view.splits.values()) <= _MOST_UNASKED
            return _write(view, folder, base, (watcher or Silent()) if thumbnails else None)
    finally:
        view.close()


def _check(folder: Path, overwrite: bool) -> None:
    """Check the output folder. Raises OutputError for other files, or an earlier page without `overwrite`."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise OutputError(f"{folder}: is not a directory")
    if not any(folder.iterdir()):
        return
    if not (folder / _INDEX).is_file() or not (folder / "orders").is_dir():
        raise OutputError(f"{folder}: holds other files; choose a new directory")
    if not overwrite:
        raise OutputError(f"{folder}: holds a page already; pass overwrite=True, or choose a new directory")


@dataclass(frozen=True)
class _Base:
    """The address of the set for browsers. url: ends with "/". local: directory of the set if the url is relative."""

    url: str
    local: Path | None = None

    @property
    def origin(self) -> str:
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}" if parts.scheme else ""


def _base(address: str, folder: Path, url: str | None) -> _Base:
    if url is None and not is_remote(address):
        root = os.path.realpath(address)
        return _Base(quote(os.path.relpath(root, folder)) + "/", Path(root))
    stated = address if url is None else url
    parts = urlsplit(stated)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        shown = parse_url(stated) if is_remote(stated) else repr(stated)
        raise OutputError(
            f"{shown}: browsers read https:// and http:// only; set url= to the address at which they find the set"
        )
    if parts.query or parts.fragment or not all(" " < letter < "\x7f" and letter not in "\"';," for letter in stated):
        raise OutputError(f"{stated!r}: not the plain address of a folder, as https://host/sets/name/")
    return _Base(stated.rstrip("/") + "/")


def _write(view: View, folder: Path, base: _Base, thumbnails: Watcher | None) -> ViewExport:
    """Write the files of the page. thumbnails: receives the progress of thumbnails; None writes none."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / VIEW_FILE).unlink(missing_ok=True)
    for old in (folder / FOLDER).glob("*.npy"):
        old.unlink()
    writing = _Writing(folder)
    for name, data in page_files(*filter(None, (base.origin,))).items():
        writing.write(name, data)
    splits = {name: _split(split, view, base, writing) for name, split in view.splits.items()}
    if thumbnails is not None:
        for name, split in view.splits.items():
            if split.reader.kinds[split.reader.main] in ("image", "array", PIXELS):
                columns, size = write_thumbnails(split.reader, quote(name, safe=""), folder, thumbnails)
                splits[name]["columns"].update(columns)
                writing.files, writing.bytes = writing.files + len(columns), writing.bytes + size
    writing.write(VIEW_FILE, _json(_document(view, base, splits, writing)))
    serve = Path(os.path.commonpath([folder, base.local])) if base.local is not None else folder
    return ViewExport(
        path=folder,
        serve=serve,
        page="" if serve == folder else quote(folder.relative_to(serve).as_posix()) + "/",
        samples=sum(len(split.reader) for split in view.splits.values()),
        files=writing.files,
        bytes=writing.bytes,
    )


class _Writing:
    """Writes files below a folder, and counts files and bytes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.files = self.bytes = 0

    def write(self, name: str, data: bytes | memoryview) -> None:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, bytes(data))
        self.files, self.bytes = self.files + 1, self.bytes + len(data)


def _json(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _document(view: View, base: _Base, splits: dict[str, Any], writing: _Writing) -> dict[str, Any]:
    document = view.document(None)
    if "classes_url" in document:
        writing.write(document["classes_url"], _json(list(view.classes)))
    return {
        **document,
        "address": base.url if base.local is None else view.place.name,
        "set": None if base.local is None else base.url,
        "origin": base.origin or None,
        "live": False,
        "splits": splits,
        "can": {"where": False, "batches": False, "damaged": False},
    }


def _split(split: SplitView, view: View, base: _Base, writing: _Writing) -> dict[str, Any]:
    assert view.place.dataset is not None
    info, part = view.place.dataset.splits[split.name], quote(split.name, safe="")
    document, columns = view.split_document(split), split.reader.table.columns
    assert isinstance(columns, PackedColumns)
    for name, values in split.columns().items():  # header lengths may differ, if another tool wrote the file
        size = (columns.directory / f"{name}.npy").stat().st_size
        url = f"{base.url}{quote(info.index)}/{quote(name)}.npy"
        document["columns"][name] |= {"url": url, "start": size - values.nbytes}
    for name, values in split.more_columns.items():
        column = Column(values)
        writing.write(f"orders/{part}/{name}.npy", column.read(0, column.size))
        document["columns"][name]["url"] = f"orders/{quote(part)}/{name}.npy"
    names = (name for name in split.order_names if not split.needs_scan(name))
    document["orders"] = {"stored": None} | {name: _order(split, name, f"{part}/{name}", writing) for name in names}
    shards = [{"url": base.url + quote(shard.path), "bytes": shard.bytes, "path": shard.path} for shard in info.shards]
    if len(_json(shards)) <= _MOST_INLINE:
        return document | {"shards": shards}
    writing.write(f"runs/{part}/shards.json", _json(shards))
    return document | {"shards": None, "shards_url": f"runs/{quote(part)}/shards.json"}


def _order(split: SplitView, name: str, path: str, writing: _Writing) -> dict[str, Any]:
    order = split.order(name)
    column = Column(order.values)
    writing.write(f"orders/{path}.npy", column.read(0, column.size))
    runs = [list(run) for run in order.runs]
    entry = {
        "title": split.title(name),
        "url": f"orders/{quote(path)}.npy",
        "start": len(column.header),
        "count": len(order.values),
    }
    if len(_json(runs)) <= _MOST_INLINE:
        return {**entry, "runs": runs}
    writing.write(f"runs/{path}.json", _json(runs))
    return {**entry, "runs_url": f"runs/{quote(path)}.json"}


# --- Serving an exported page, and only the files of the page and its set.
# The directory is not trusted. The page, with its scripts and its policy, comes from this package, whatever files the
# directory has under those names. The directory provides only .npy and .json files, which the page reads as data, and
# the set only the shards and columns named by its dataset.json. The set must be in the parent folder of the page; links
# are not followed. If a page reads its set from another server, only the files of the page are served.
_MOST_BYTES = 64 << 20  # of view.json
_ORIGIN = re.compile(r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?")
_DATA = re.compile(rf"((orders|runs|{FOLDER})/([^/]+/)*)?[^/]+\.(json|npy)")


def is_export(place: Path) -> bool:
    """Whether a directory contains an exported page."""
    return (place / VIEW_FILE).is_file() and (place / "index.html").is_file()


@dataclass(frozen=True)
class _File:
    """A file, readable by range. size: its size at the request."""

    folder: Folder
    name: str
    size: int

    def read(self, start: int, stop: int) -> bytes:
        with self.folder.open(self.name) as file:
            return pread(file.fileno(), stop - start, start)


class ExportSite:
    """The files that an exported page may read. Raises DatasetError.

    Paths are relative to the folder that contains both the page and its set. page: the path of the page, ending with
    "/", or "". origins: other servers that the page reads.
    """

    def __init__(self, folder: Path) -> None:
        folder = Path(os.path.realpath(folder))
        document = _exported_document(folder)
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
        return error_answer(404, "NotFound", "not found")


def _ranges(folder: Folder, name: str) -> Answer:
    with folder.open(name) as file:
        size = os.fstat(file.fileno()).st_size
    return Answer(200, "application/octet-stream", _File(folder, name, size), kept=True)


def _exported_document(folder: Path) -> dict[str, Any]:
    try:
        document = json.loads(read_regular(folder / VIEW_FILE, _MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise DatasetError(f"{folder / VIEW_FILE}: cannot be read: {error}; export the page again") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise DatasetError(f"{folder / VIEW_FILE}: not the document of a page of this version; export it again")
    return document


def _set_folder(folder: Path, of_set: str) -> Path:
    """The folder of the set, by its path from the page. Raises DatasetError outside the parent folder of the page."""
    root = Path(os.path.realpath(folder / unquote(of_set)))
    parent = folder.parent
    is_near = root.is_relative_to(parent) if parent != Path(parent.anchor) else root.parent == parent
    if not is_near:
        raise DatasetError(
            f"{folder / VIEW_FILE}: reads the set {root}, but this server lets pages read only sets in {parent}; to "
            f"look at that set run  packer view {quoted(root)}  , or serve both with another web server"
        )
    return root


def _set_files(root: Path) -> frozenset[str]:
    """The paths in the set of the shards and columns named by dataset.json. Raises DatasetError."""
    info = read_dataset_info(root)
    splits = info.splits.values()
    columns = (f"{split.index}/{name}" for split in splits for name in info.column_names)
    return frozenset((*columns, *(shard.path for split in splits for shard in split.shards)))
