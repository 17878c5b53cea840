"""A page that any web server with Range requests can show: `packer view SET --export DIR`.

    DIR/index.html, *.js, *.css     the page, as `packer view` serves it
    DIR/orders/SPLIT/NAME.npy       orders, uint32
    DIR/runs/SPLIT/NAME.json        their runs, where they are long
    DIR/thumbnails/SPLIT.npy, …     small pictures for the grid, which is made of the images themselves without them
    DIR/view.json                   what the page reads first; written last, removed first

The columns and shards are not copied: view.json names those of the set, relative to the page where the set is on this
machine, else by its address. So the folder to serve is one that holds both.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from cache.errors import OutputError
from cache.files import atomic_write
from cache.messages import Silent, Watcher
from cache.remote import is_remote, parse_url
from packer.output import Result, local_output, output_errors
from packer.viewer.answers import page_files
from packer.viewer.columns import Column
from packer.viewer.document import FORMAT, SplitView, View
from packer.viewer.places import open_place
from packer.viewer.thumbnails import FOLDER as THUMBNAILS
from packer.viewer.thumbnails import write_thumbnails
from readers.headers import MEDIA
from readers.packed import PackedColumns

__all__ = ["VIEW_FILE", "ViewExport", "export_view"]

VIEW_FILE, _INDEX = "view.json", "index.html"
_MOST_UNASKED = 10_000  # samples that have thumbnails without being asked for
_MOST_INLINE = 20_000  # characters of a list in view.json


@dataclass(frozen=True, slots=True)
class ViewExport(Result):
    """What was written. serve: the folder that a web server has to serve, which holds the page and the set.

    page: the page below it, as in its address. bytes: of all files.
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
    watcher: Watcher | None = None,
) -> ViewExport:
    """Write a page that shows a packed set by ranges of its files, without packer.

    place: the set, by its directory or its address.
    output: a directory, new or empty, or with an earlier page.
    split: only this one.
    url: where browsers find the set; default its place relative to `output`, or its address if that is https://.
    overwrite: replace an earlier page.
    thumbnails: write small pictures too, some 8 kB and 3 ms of a CPU each; None: for up to 10,000 samples. Without them
        the grid reads the images themselves.

    Raises DatasetError, UnknownNameError, StaleIndexError, RemoteError, OutputError.
    """
    folder = Path(os.path.realpath(local_output(output).expanduser()))
    with output_errors():
        _check(folder, overwrite)
    opened = open_place(place, split)
    view = View(opened)
    try:
        if opened.dataset is None:
            raise OutputError(
                f"{opened.address}: only packed sets can be exported: pages read samples by ranges of shards; run  "
                f"packer convert  first, or look at it as it is with  packer view"
            )
        base = _base(opened.address, folder, url)
        with output_errors():
            return _write(view, folder, base, _Thumbnails(_wants(thumbnails, view), watcher or Silent()))
    finally:
        view.close()


def _check(folder: Path, overwrite: bool) -> None:
    """Raise OutputError where there is something else than a page."""
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


class _Thumbnails(NamedTuple):
    wanted: bool
    watcher: Watcher


def _wants(thumbnails: bool | None, view: View) -> bool:
    if thumbnails is not None:
        return thumbnails
    return sum(len(split.reader) for split in view.splits.values()) <= _MOST_UNASKED


@dataclass(frozen=True)
class _Base:
    """Where browsers find the set: url ends with "/". local: its directory, where the url is relative."""

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
    given = address if url is None else url
    parts = urlsplit(given)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise OutputError(
            f"{parse_url(given) if is_remote(given) else repr(given)}: browsers read https:// and http:// alone; name "
            f"the address at which they find the set with url="
        )
    if parts.query or parts.fragment or not all(" " < letter < "\x7f" and letter not in "\"';," for letter in given):
        raise OutputError(f"{given!r}: not the plain address of a folder, as https://host/sets/name/")
    return _Base(given.rstrip("/") + "/")


def _write(view: View, folder: Path, base: _Base, thumbnails: _Thumbnails) -> ViewExport:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / VIEW_FILE).unlink(missing_ok=True)
    for old in (folder / THUMBNAILS).glob("*.npy"):
        old.unlink()
    writing = _Writing(folder)
    for name, data in page_files(*filter(None, (base.origin,))).items():
        writing.write(name, data)
    splits = {name: _split(split, view, base, writing) for name, split in view.splits.items()}
    if thumbnails.wanted:
        for name, split in view.splits.items():
            if "image" in split.reader.fields:
                columns, size = write_thumbnails(split.reader, quote(name, safe=""), folder, thumbnails.watcher)
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
    """Writes files below a folder, and counts them."""

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
    reader = next(iter(view.splits.values())).reader
    classes: dict[str, Any] = {"classes": list(view.classes)}
    if sum(map(len, view.classes)) > _MOST_INLINE:
        writing.write("classes.json", _json(classes["classes"]))
        classes = {"classes": None, "classes_url": "classes.json"}
    return {
        "format": FORMAT,
        "name": view.place.name,
        "address": base.url if base.local is None else view.place.name,
        "set": None if base.local is None else base.url,
        "origin": base.origin or None,
        "container": view.place.container,
        "live": False,
        **classes,
        "fields": [{"name": name, "kind": reader.kinds[name]} for name in reader.fields],
        "media": list(MEDIA),
        "splits": splits,
        "can": {"where": False, "batches": False, "damaged": False},
    }


def _split(split: SplitView, view: View, base: _Base, writing: _Writing) -> dict[str, Any]:
    assert view.place.dataset is not None
    info, part = view.place.dataset.splits[split.name], quote(split.name, safe="")
    orders: dict[str, Any] = {"stored": None}
    for name in split.order_names:
        if not split.needs_scan(name):
            orders[name] = _order(split, name, f"{part}/{name}", writing)
    columns = split.reader.table.columns
    assert isinstance(columns, PackedColumns)
    described = {}
    for name, values in split.columns().items():
        entry = Column(values).described(f"{base.url}{quote(info.index)}/{quote(name)}.npy")
        size = (columns.index.directory / f"{name}.npy").stat().st_size
        described[name] = {
            **entry,
            "start": size - values.nbytes,
        }  # as in the file: another tool may have written its header
    shards: Any = [
        {"url": base.url + quote(shard.path), "bytes": shard.bytes, "path": shard.path} for shard in info.shards
    ]
    where: dict[str, Any] = {"shards": shards}
    if len(_json(shards)) > _MOST_INLINE:
        writing.write(f"runs/{part}/shards.json", _json(shards))
        where = {"shards": None, "shards_url": f"runs/{quote(part)}/shards.json"}
    return {
        "samples": len(split.reader),
        "bytes": int(split.sizes.sum()),
        "columns": described,
        **where,
        "orders": orders,
        "histograms": split.histograms(),
    }


def _order(split: SplitView, name: str, path: str, writing: _Writing) -> dict[str, Any]:
    order = split.order(name)
    column = Column(order.values)
    writing.write(f"orders/{path}.npy", column.read(0, column.size))
    runs = [list(run) for run in order.runs]
    entry = {"url": f"orders/{quote(path)}.npy", "start": len(column.header), "count": len(order.values)}
    if len(_json(runs)) <= _MOST_INLINE:
        return {**entry, "runs": runs}
    writing.write(f"runs/{path}.json", _json(runs))
    return {**entry, "runs_url": f"runs/{quote(path)}.json"}
