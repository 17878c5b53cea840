"""Where samples come from: a registry of entries, chosen by what a path is; their modules are loaded on use.

Another package adds a source through the entry point `packer.sources` (see `packer.registry`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from cache.errors import SourceError
from packer.formats import REGISTRY as FORMATS
from packer.formats.ustar import header_sum
from packer.registry import HEAD_BYTES, Entry, Registry
from packer.sources import folder_kinds
from packer.sources.base import Source
from packer.sources.known_folders import is_coco, is_ilsvrc, is_shards, is_voc, is_yolo
from packer.sources.tree_layouts import LAYOUTS, celeba_files
from packer.sources.url_tables import is_url_list
from readers.layout import DATASET_FILE

__all__ = ["FETCH_OPTIONS", "REGISTRY", "Source", "SourceEntry", "default_output_name", "open_source", "plain_name"]

FETCH_OPTIONS = ("rate", "host_rate", "threads", "attempts", "timeout", "max_bytes", "private")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".pq")


@dataclass(frozen=True, kw_only=True)
class SourceEntry(Entry):
    """A kind of source. `home` is a class, or a function, that takes the path and the options.

    options: the arguments of `open_source` that it takes.
    folders: whether it takes every directory that no other entry takes.
    inside: it takes a directory with a file of this name, if the content of that file is right.
    by_name: whether it is recognised by the name alone, since the content is text.
    reads: whether it takes a file of such a name.
    compressed: whether a compressed file is one by what it unpacks to.
    recognises: identifies a directory, or a file, by more than the file `inside`, or the first bytes.
    """

    options: frozenset[str] = frozenset()
    folders: bool = False
    inside: str = ""
    by_name: bool = False
    reads: Callable[[Path], bool] | None = field(default=None, compare=False)
    compressed: bool = False
    recognises: Callable[[Path], bool] | None = field(default=None, compare=False)

    def kind_of(self, head: bytes) -> str:
        """What a file that begins with `head` is called in a message: "tar archive"."""
        return _kind(self.title)

    def is_folder(self, path: Path) -> bool:
        """Whether a directory is one of these."""
        if self.recognises is not None and self.recognises(path):
            return True
        file_path = path / self.inside
        if not self.inside or not file_path.exists():
            return False
        if not file_path.is_file():
            return not file_path.is_dir()  # a FIFO, for example: opening it says what is wrong
        if not self.magic and self.claims is None:
            return True
        with open(file_path, "rb") as file:
            return self.is_content(file.read(HEAD_BYTES))

    def is_file(self, path: Path) -> bool:
        """Whether a file is one of these, whatever it begins with."""
        if self.by_name and self.is_name(path.name) and (self.reads is None or self.reads(path)):
            return True
        return self.recognises is not None and self.recognises(path)


class _ShardEntry(SourceEntry):
    """Shards of every format."""

    def is_content(self, head: bytes) -> bool:
        return FORMATS.of_content(head) is not None

    def is_name(self, name: str) -> bool:
        return FORMATS.of_name(name) is not None

    def kind_of(self, head: bytes) -> str:
        entry = FORMATS.of_content(head)
        return _kind(entry.title if entry else self.title)


def _kind(title: str) -> str:
    """A title without its article and without "file": "HDF5", "tar archive", "LMDB"."""
    return title.partition(" ")[2].partition(" (")[0].removesuffix(" file").removesuffix(" environment")


def _is_celeba(path: Path) -> bool:
    """Whether a directory has the images and the partition of CelebA."""
    return celeba_files(path) is not None


def _is_tar(head: bytes) -> bool:
    """Whether a first tar member has the right checksum."""
    field = head[148:156].strip(b" \0")
    is_octal = len(head) >= HEAD_BYTES and field.isdigit() and not field.strip(b"01234567")
    return is_octal and int(field, 8) == header_sum(head)


REGISTRY = Registry(
    "packer.sources",
    SourceEntry,
    (
        SourceEntry(
            name="folder",
            title="an image folder",
            home="packer.sources.folder:FolderSource",
            folders=True,
            options=frozenset({"layout"}),
        ),
        SourceEntry(name="set", title="a packed set", home="packer.sources.packed:PackedSource", inside=DATASET_FILE),
        SourceEntry(
            name="lmdb",
            title="an LMDB environment",
            home="packer.sources.lmdb:LmdbSource",
            magic=((16, b"\xde\xc0\xef\xbe"),),
            suffixes=(".mdb", ".lmdb"),
            inside="data.mdb",
            options=frozenset({"layout"}),
        ),
        SourceEntry(
            name="celeba",
            title="CelebA's folder",
            home="packer.sources.celeba:open_celeba",
            recognises=_is_celeba,
            options=frozenset({"layout", "label_column"}),
        ),
        SourceEntry(
            name="huggingface",
            title="a Hugging Face data set (.parquet)",
            home="packer.sources.huggingface:HuggingFaceSource",
            recognises=folder_kinds.is_hub_set,
            options=frozenset({"label_column", "split_column"}),
        ),
        SourceEntry(
            name="imagefolder",
            title="an imagefolder with metadata.csv, .jsonl or .parquet",
            home="packer.sources.image_folder:ImageFolderSource",
            recognises=lambda path: bool(folder_kinds.metadata_files(path)),
            options=frozenset({"label_column", "split_column", "fields"}),
        ),
        SourceEntry(
            name="mds",
            title="an MDS set (index.json of MosaicML's streaming)",
            home="packer.sources.mds:MdsSource",
            recognises=lambda path: bool(folder_kinds.mds_folders(path)),
            options=frozenset({"label_column", "split_column"}),
        ),
        SourceEntry(
            name="beton",
            title="an FFCV file (.beton)",
            home="packer.sources.beton:BetonSource",
            claims=folder_kinds.is_beton,
            suffixes=(".beton",),
            options=frozenset({"label_column"}),
        ),
        SourceEntry(
            name="cifar",
            title="CIFAR's folder",
            home="packer.sources.cifar:CifarSource",
            recognises=folder_kinds.is_cifar,
            options=frozenset({"label_column"}),
        ),
        SourceEntry(
            name="idx",
            title="an IDX file (MNIST and its relatives, or their folder)",
            home="packer.sources.idx:IdxSource",
            claims=folder_kinds.is_idx,
            recognises=lambda path: folder_kinds.idx_folder(path) is not None,
            compressed=True,
            options=frozenset({"label_offset"}),
        ),
        SourceEntry(
            name="numpy",
            title="a NumPy file (.npz, .npy, or a folder of images.npy and labels.npy)",
            home="packer.sources.numpy_arrays:NumpySource",
            magic=((0, b"\x93NUMPY"),),
            claims=folder_kinds.is_npz,
            suffixes=(".npz", ".npy"),
            recognises=folder_kinds.is_arrays,
        ),
        SourceEntry(
            name="coco",
            title="COCO's folder, or a file of its annotations",
            home="packer.sources.coco:open_coco",
            recognises=is_coco,
            suffixes=(".json",),
            by_name=True,
            options=frozenset({"layout", "folder"}),
        ),
        SourceEntry(
            name="voc",
            title="Pascal VOC's folder",
            home="packer.sources.voc:open_voc",
            recognises=is_voc,
            options=frozenset({"layout", "image_sets"}),
        ),
        SourceEntry(
            name="yolo",
            title="a folder of images and labels for YOLO",
            home="packer.sources.yolo:open_yolo",
            recognises=is_yolo,
            options=frozenset({"layout"}),
        ),
        SourceEntry(
            name="ilsvrc",
            title="ILSVRC's folder",
            home="packer.sources.ilsvrc:open_ilsvrc",
            recognises=is_ilsvrc,
            options=frozenset({"layout"}),
        ),
        SourceEntry(
            name="shards",
            title="a folder of shards made elsewhere",
            home="packer.sources.shard_folder:open_shards",
            recognises=is_shards,
            options=frozenset({"layout", "image_key", "label_key", "label_offset", "fields"}),
        ),
        SourceEntry(
            name="urls",
            title="a list of addresses of images (.txt, or a table)",
            home="packer.sources.url_list:UrlListSource",
            suffixes=(*_TABLES, ".txt"),
            by_name=True,
            reads=is_url_list,
            options=frozenset({"path_column", "label_column", "split_column", *FETCH_OPTIONS}),
        ),
        SourceEntry(
            name="manifest",
            title="a manifest (.csv, .tsv, .jsonl, .ndjson, .parquet)",
            home="packer.sources.manifest:ManifestSource",
            suffixes=_TABLES,
            by_name=True,
            options=frozenset({"path_column", "label_column", "split_column", "fields", "folder"}),
        ),
        SourceEntry(
            name="tar",
            title="a tar archive (.tar, .tar.gz, .tar.bz2, .tar.xz, .tar.zst)",
            home="packer.sources.tar_archive:TarSource",
            claims=_is_tar,
            suffixes=(".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".tzst"),
            compressed=True,
            options=frozenset({"layout", "image_key", "label_key", "label_offset"}),
        ),
        SourceEntry(
            name="zip",
            title="a zip archive",
            home="packer.sources.zip_archive:ZipSource",
            magic=((0, b"PK\3\4"), (0, b"PK\5\6")),
            suffixes=(".zip",),
            options=frozenset({"layout"}),
        ),
        _ShardEntry(
            name="shard",
            title=", ".join(entry.title for entry in FORMATS.own),
            home="packer.sources.shards:ShardSource",
            suffixes=tuple(suffix for entry in FORMATS.own for suffix in entry.suffixes),
            compressed=True,
            options=frozenset({"image_key", "label_key", "label_offset", "fields"}),
        ),
    ),
)


def open_source(
    path: str | os.PathLike[str],
    *,
    path_column: str | None = None,
    label_column: str | None = None,
    split_column: str | None = None,
    fields: Mapping[str, str] | None = None,
    folder: str | os.PathLike[str] | None = None,
    image_key: str | None = None,
    label_key: str | None = None,
    label_offset: int = 0,
    layout: str = "auto",
    **more: Any,
) -> Source:
    """The source at `path`: a folder, a packed set, a manifest, an archive, a shard made elsewhere, …

    path_column, label_column, folder: of a manifest (`packer.sources.manifest`); the first two also of a list of
    addresses, label_column of CelebA, CIFAR-100 and what has columns or fields (Hugging Face, MDS, FFCV), folder of a
    file of COCO.
    split_column: whose values are the splits: of a manifest, a list of addresses, Hugging Face, MDS.
    fields: field -> column of a manifest, or key in a shard.
    image_key, label_key, label_offset (subtracted from the labels): of a shard; label_offset also of IDX files.
    layout: "tree" takes the folders of a tree, or of an archive, for classes also where they look like something else
    (`packer.sources.tree_layouts`).
    more: image_sets of Pascal VOC (`packer.sources.voc`), the options of a list of addresses
    (`packer.sources.fetching.FetchOptions`), and those of sources that other packages add.
    Raises SourceError for a missing or unknown file, or for an option of another kind of source.
    """
    root = Path(path)
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, not {layout!r}")
    if not root.exists():
        raise SourceError(f"{root}: no such file or directory")
    entry = _entry_of(root, layout)
    if entry is None:
        known = ", ".join(entry.title for entry in REGISTRY)
        raise SourceError(f"{root}: no kind of source that packer knows: {known}")
    usual: dict[str, Any] = {"label_offset": 0, "layout": "auto"}
    asked = more | {
        "path_column": path_column,
        "label_column": label_column,
        "split_column": split_column,
        "fields": fields or None,
        "folder": folder,
    }
    asked |= {"image_key": image_key, "label_key": label_key, "label_offset": label_offset, "layout": layout}
    given = {name: value for name, value in asked.items() if value != usual.get(name)}
    for name in given.keys() - entry.options - {"layout"}:
        takers = " or ".join(other.title.partition(" (")[0] for other in REGISTRY if name in other.options)
        raise SourceError(f"{root}: {name} can be given for {takers or 'no source'} only, and this is {entry.title}")
    return cast(Source, entry.load()(root, **{name: given[name] for name in given.keys() & entry.options}))


def _entry_of(root: Path, layout: str) -> SourceEntry | None:
    if root.is_dir():
        found = next((entry for entry in REGISTRY if entry.is_folder(root)), None)
        if layout == "tree" and found is not None and found.recognises is not None:
            found = None
        return found or next(entry for entry in REGISTRY if entry.folders)
    if not root.is_file():
        return None
    named = next((entry for entry in REGISTRY if entry.is_file(root)), None)
    return named or _entry_of_content(root) or _entry_of_name(root.name)


def _entry_of_content(root: Path) -> SourceEntry | None:
    from packer.sources.streams import compression_of, unpacked_head

    compressed, head = bool(compression_of(root)), unpacked_head(root, HEAD_BYTES)
    return next((entry for entry in REGISTRY if (entry.compressed or not compressed) and entry.is_content(head)), None)


def _entry_of_name(name: str) -> SourceEntry | None:
    plain = _without_compression(name)
    entries = (entry for entry in REGISTRY if not entry.by_name and (entry.compressed or plain == name))
    return next((entry for entry in entries if entry.is_name(plain)), None)


def _without_compression(name: str) -> str:
    stem, dot, suffix = name.rpartition(".")
    return stem if stem and (dot + suffix).lower() in _COMPRESSED else name


def plain_name(path: Path) -> str:
    """The name of a source without the suffixes of its kind: x.tar.gz, x.csv and x.h5 are x."""
    name = _without_compression(path.name)
    stem, dot, suffix = name.rpartition(".")
    known = (*REGISTRY.suffixes(), *FORMATS.suffixes())
    return stem if stem and (dot + suffix).lower() in known else name


def default_output_name(source: object, to: str) -> str:
    """`<source name>-<format>`, in the current directory."""
    is_path = isinstance(source, (str, os.PathLike))  # a Path has a `root` too, which is "/"
    root = Path(str(source if is_path else getattr(source, "root", source))).resolve()
    return f"{root.name if root.is_dir() else plain_name(root)}-{to}"
