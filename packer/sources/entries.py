"""The kinds of sources, in the order in which they are asked whether they recognise a path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packer.formats import REGISTRY as FORMATS
from packer.formats.tar import header_sum
from packer.registry import HEAD_BYTES, Entry, Registry
from packer.sources.layouts import (
    celeba_files,
    head_of,
    idx_folder,
    is_arrays,
    is_beton,
    is_cifar,
    is_coco,
    is_hub_set,
    is_idx,
    is_ilsvrc,
    is_npz,
    is_shards,
    is_voc,
    is_yolo,
    mds_folders,
    metadata_files,
)
from packer.sources.tables import is_url_list
from readers.layout import DATASET_FILE

__all__ = ["FETCH_OPTIONS", "REGISTRY", "SourceEntry"]

FETCH_OPTIONS = ("rate", "host_rate", "threads", "attempts", "timeout", "max_bytes", "private")
_TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".pq")
_TARS = (".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".tzst")
_LMDB = b"\xde\xc0\xef\xbe"
_SHARD_OPTIONS = "image_key label_key label_offset"


@dataclass(frozen=True, kw_only=True)
class SourceEntry(Entry):
    """A kind of source. `home` is a class, or a function, that takes the path and the options.

    options: the arguments of `open_source` that it takes.
    recognises: identifies a directory, or a file by more than its first bytes; asked before any entry's magic number.
    is_text: whether its files are text, so that the name of a binary file does not count.
    is_tree: whether it is a tree of files, whose folders become classes with `layout="tree"`.
    compressed: whether a compressed file is recognised by its unpacked content.
    """

    options: frozenset[str] = frozenset()
    recognises: Callable[[Path], bool] | None = field(default=None, compare=False)
    is_text: bool = False
    is_tree: bool = True
    compressed: bool = False

    def kind_of(self, head: bytes) -> str:
        """The kind of a file that begins with `head`, for messages: "tar archive"."""
        return _kind(self.title)


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


def _is_tar(head: bytes) -> bool:
    """Whether the first tar header has the right checksum."""
    field = head[148:156].strip(b" \0")
    is_octal = len(head) >= HEAD_BYTES and field.isdigit() and not field.strip(b"01234567")
    return is_octal and int(field, 8) == header_sum(head)


def _entry(name: str, title: str, home: str, options: str = "", **about: Any) -> SourceEntry:
    """home: below packer.sources. options: names, separated by blanks."""
    home, taken = f"packer.sources.{home}", frozenset(options.split())
    return SourceEntry(name=name, title=title, home=home, options=taken, **about)


def _is_table(path: Path) -> bool:
    return path.is_file() and path.name.lower().endswith(_TABLES)


def _is_lmdb(path: Path) -> bool:
    """Whether a directory has the file of an environment; if that is not a regular file, opening it reports so."""
    inside = path / "data.mdb"
    return head_of(inside)[16:20] == _LMDB if inside.is_file() else inside.exists() and not inside.is_dir()


_OWN = (
    # --- folders, and their content
    _entry(
        "set", "a packed set", "packed:PackedSource", is_tree=False,
        recognises=lambda path: (path / DATASET_FILE).exists(),
    ),
    _entry(
        "lmdb", "an LMDB environment", "lmdb:LmdbSource", "layout",
        recognises=_is_lmdb, magic=((16, _LMDB),), suffixes=(".mdb", ".lmdb"), is_tree=False,
    ),
    _entry(
        "celeba", "CelebA's folder", "celeba:CelebaSource", "label_column",
        recognises=lambda path: celeba_files(path) is not None,
    ),
    _entry(
        "huggingface", "a Hugging Face data set (.parquet)", "huggingface:HuggingFaceSource",
        "label_column split_column", recognises=is_hub_set,
    ),
    _entry(
        "imagefolder", "an imagefolder with metadata.csv, .jsonl or .parquet", "image_folder:ImageFolderSource",
        "label_column split_column fields", recognises=lambda path: bool(metadata_files(path)),
    ),
    _entry(
        "mds", "an MDS set (index.json of MosaicML's streaming)", "mds:MdsSource",
        "label_column split_column", recognises=lambda path: bool(mds_folders(path)),
    ),
    _entry(
        "beton", "an FFCV file (.beton)", "beton:BetonSource", "label_column",
        claims=is_beton, suffixes=(".beton",),
    ),
    _entry("cifar", "CIFAR's folder", "cifar:CifarSource", "label_column", recognises=is_cifar),
    _entry(
        "idx", "an IDX file (MNIST and its relatives, or their folder)", "idx:IdxSource", "label_offset",
        claims=is_idx, recognises=lambda path: idx_folder(path) is not None, compressed=True,
    ),
    _entry(
        "numpy", "a NumPy file (.npz, .npy, or a folder of images.npy and labels.npy)", "numpy_arrays:NumpySource",
        "image_key label_key", magic=((0, b"\x93NUMPY"),), claims=is_npz, suffixes=(".npz", ".npy"),
        recognises=is_arrays,
    ),
    _entry(
        "coco", "COCO's folder, or a file of its annotations", "coco:CocoSource", "folder",
        recognises=is_coco, suffixes=(".json",),
    ),
    _entry("voc", "Pascal VOC's folder", "voc:VocSource", "image_sets", recognises=is_voc),
    _entry("yolo", "a folder of images and labels for YOLO", "yolo:YoloSource", recognises=is_yolo),
    _entry("ilsvrc", "ILSVRC's folder", "ilsvrc:open_ilsvrc", recognises=is_ilsvrc),
    _entry(
        "shards", "a folder of shards made elsewhere", "shards:ShardSource", f"fields {_SHARD_OPTIONS}",
        recognises=is_shards,
    ),
    _entry(
        "folder", "a folder of images, arrays or audio", "folder:FolderSource", "layout fields",
        recognises=Path.is_dir,
    ),
    # --- files, by their names and content
    _entry(
        "urls", "a list of addresses of images (.txt, or a table)", "url_list:UrlListSource",
        " ".join(("path_column", "label_column", "split_column", *FETCH_OPTIONS)),
        suffixes=(*_TABLES, ".txt"), recognises=is_url_list, is_text=True,
    ),
    _entry(
        "manifest", "a manifest (.csv, .tsv, .jsonl, .ndjson, .parquet)", "manifest:ManifestSource",
        "path_column label_column split_column fields folder", suffixes=_TABLES, recognises=_is_table, is_text=True,
    ),
    _entry(
        "tar", "a tar archive (.tar, .tar.gz, .tar.bz2, .tar.xz, .tar.zst)", "tar_archive:TarSource",
        f"layout {_SHARD_OPTIONS}", claims=_is_tar, suffixes=_TARS, compressed=True,
    ),
    _entry(
        "zip", "a zip archive", "zip_archive:ZipSource", "layout",
        magic=((0, b"PK\3\4"), (0, b"PK\5\6")), suffixes=(".zip",),
    ),
    _ShardEntry(
        name="shard",
        title=", ".join(entry.title for entry in FORMATS.own),
        home="packer.sources.shards:ShardSource",
        options=frozenset({*_SHARD_OPTIONS.split(), "fields"}),
        suffixes=tuple(suffix for entry in FORMATS.own for suffix in entry.suffixes),
        compressed=True,
    ),
)  # fmt: skip

REGISTRY = Registry("packer.sources", SourceEntry, _OWN)
