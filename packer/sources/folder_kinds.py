"""What a folder or a file is, by names and a few bytes: quickly, and without a reader of any format.

A folder is looked at before anything is known of it, and may hold millions of images: of each folder only the first
files that the system names are looked at, and only a few folders below.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from readers.tree import SPLIT_NAMES

__all__ = [
    "IdxName",
    "first_names",
    "head_of",
    "idx_folder",
    "idx_name",
    "is_arrays",
    "is_beton",
    "is_cifar",
    "is_hub_set",
    "is_idx",
    "is_npz",
    "mds_folders",
    "metadata_files",
    "parquet_files",
    "splits_of_arrays",
]

_LOOKED_AT = 512
_HEAD_BYTES = 512
_TAIL_BYTES = 8
_MAX_FOOTER_BYTES = 64 << 20


def first_names(folder: Path, count: int = _LOOKED_AT) -> list[str]:
    """The names of up to `count` files and folders in a folder, in order; [] where it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in islice(entries, count))
    except OSError:
        return []


def head_of(path: Path, count: int = _HEAD_BYTES) -> bytes:
    """The first bytes of a regular file; b"" where it is none, or cannot be read."""
    try:
        if not path.is_file():
            return b""
        with open(path, "rb") as file:
            return file.read(count)
    except OSError:
        return b""


# --- CIFAR --------------------------------------------------------------------------------------------------------
_CIFAR = (
    ("batches.meta.txt", "data_batch_1.bin"),
    ("fine_label_names.txt", "train.bin"),
    ("batches.meta", "data_batch_1"),
    ("meta", "train", "test"),
)


def is_cifar(root: Path) -> bool:
    """Whether a folder holds CIFAR-10 or CIFAR-100 as published, in either version."""
    return any(all((root / name).is_file() for name in names) for names in _CIFAR)


# --- MNIST --------------------------------------------------------------------------------------------------------
_IDX = re.compile(r"((?:.*-)?)(train|t10k|test)-(images|labels)[-.]idx([13])-ubyte(?:\.gz)?")
_IDX_BELOW = ("", "raw", "MNIST/raw", "FashionMNIST/raw", "KMNIST/raw", "EMNIST/raw")


class IdxName(NamedTuple):
    """prefix: of a set among several, with its "-". split: as the name has it."""

    prefix: str
    split: str
    is_images: bool


def idx_name(name: str) -> IdxName | None:
    """What a file of MNIST or its relatives is by its name; None for any other file."""
    match = _IDX.fullmatch(name)
    if match is None or (match[3] == "images") != (match[4] == "3"):
        return None
    return IdxName(match[1], match[2], match[3] == "images")


def idx_folder(root: Path) -> Path | None:
    """The folder of such files of images, at or below `root`; None where it has none."""
    for below in _IDX_BELOW:
        if any((part := idx_name(name)) and part.is_images for name in first_names(root / below)):
            return root / below
    return None


def is_idx(head: bytes) -> bool:
    """Whether a file begins like one of MNIST's images."""
    return head[:4] == b"\0\0\x08\x03" and head[4:8] != bytes(4)  # a TFRecord has zeros there


# --- NumPy --------------------------------------------------------------------------------------------------------
_ARRAY_IMAGES = ("images", "image", "imgs", "x", "data", "arr_0")
_ARRAY_LABELS = ("labels", "label", "y", "targets", "target", "arr_1")
_ARRAY_SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}


def splits_of_arrays(names: Iterator[str] | list[str]) -> dict[str, tuple[str, str]]:
    """By split, the names (without .npy) of its images and labels; "" for no labels. A split "" is no split at all.

    `images` and `labels`, `x` and `y`, with the split before or after: train_images, x_train.
    """
    found: dict[str, dict[str, str]] = {}
    for name in names:
        words = [word for word in re.split(r"[_\-. ]", name.lower()) if word]
        split = next((_ARRAY_SPLITS[word] for word in words if word in _ARRAY_SPLITS), "")
        rest = "_".join(word for word in words if word not in _ARRAY_SPLITS)
        for kind, known in (("images", _ARRAY_IMAGES), ("labels", _ARRAY_LABELS)):
            if rest in known:
                found.setdefault(split, {}).setdefault(kind, name)
    order = [split for split in ("", *dict.fromkeys(_ARRAY_SPLITS.values())) if "images" in found.get(split, ())]
    return {split: (found[split]["images"], found[split].get("labels", "")) for split in order}


def is_arrays(root: Path) -> bool:
    """Whether a folder holds arrays of images as .npy files."""
    names = [name.removesuffix(".npy") for name in first_names(root) if name.endswith(".npy")]
    images = [root / f"{images}.npy" for images, _ in splits_of_arrays(names).values()]
    return any(
        head_of(path, 6) in (b"\x93NUMPY", b"") for path in images
    )  # of an empty one, reading says what is wrong


def is_npz(head: bytes) -> bool:
    """Whether a zip archive begins with an array of NumPy: the name of its first member says so."""
    name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    return head[:4] == b"PK\3\4" and name.endswith(b".npy")


# --- MosaicML MDS -------------------------------------------------------------------------------------------------
def mds_folders(root: Path) -> dict[str, Path]:
    """The folders with an index of MDS shards: "" for `root` itself, or by the names of splits below it."""

    def is_index(folder: Path) -> bool:
        head = head_of(folder / "index.json")
        return head.lstrip()[:1] == b"{" and b'"shards"' in head and b'"column_' in head

    if is_index(root):
        return {"": root}
    return {name: root / name for name in SPLIT_NAMES if is_index(root / name)}


# --- Hugging Face -------------------------------------------------------------------------------------------------
_REPOSITORY = ("README.md", ".gitattributes", "dataset_infos.json", "refs")
_METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
_MOST_FOLDERS, _FEW_FOLDERS = 256, 32
_PARQUET = (".parquet", ".pq")


def parquet_files(root: Path) -> list[Path]:
    """The Parquet files of a repository of a data set, in order: in `root`, in `data`, and where the folder is a
    repository (by README.md or .gitattributes), up to two folders below either."""
    depth = _depth(root)
    return sorted({*_parquet_below(root, depth), *_parquet_below(root / "data", depth)})


def _depth(root: Path) -> int:
    """How many folders below the files may be: in a repository, and where folders of splits have numbered files."""
    is_repository = any((root / name).exists() for name in _REPOSITORY)
    below = [root / name / split for name in first_names(root, _FEW_FOLDERS) for split in ("", *SPLIT_NAMES)]
    return 2 if is_repository or any((folder / "0000.parquet").is_file() for folder in below) else 0


def _parquet_below(folder: Path, depth: int) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            found = [entry.name for entry in entries if entry.name[:1] != "."]
    except OSError:
        return
    for name in found:
        if name.endswith(_PARQUET):
            yield folder / name
    if depth and len(found) <= _MOST_FOLDERS:
        for name in found:
            if "." not in name and (folder / name).is_dir():
                yield from _parquet_below(folder / name, depth - 1)


def is_hub_set(root: Path) -> bool:
    """Whether a Parquet file, or the files of a folder, hold images.

    Of a folder, files that are damaged, or were not downloaded, are taken for some: reading says what is wrong.
    """
    if root.is_file():
        return root.name.lower().endswith(_PARQUET) and _contents_of_parquet(root) == "images"
    depth = _depth(root)
    return any(_has_image_parquet(folder, depth) for folder in (root, root / "data"))


def _has_image_parquet(folder: Path, depth: int) -> bool:
    """Whether the first Parquet file of a folder, or of one below, holds images."""
    names = first_names(folder)
    path = next((folder / name for name in names if name.endswith(_PARQUET)), None)
    if path is not None:
        return _contents_of_parquet(path) != "other"
    below = (folder / name for name in names[:_MOST_FOLDERS] if "." not in name) if depth else ()
    return any(path.is_dir() and _has_image_parquet(path, depth - 1) for path in below)


def _contents_of_parquet(path: Path) -> str:
    """ "images", by what the footer says: columns of bytes, or features of `datasets`; else "other", or "damaged"."""
    try:
        if not path.is_file():
            return "damaged"
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            tail = file.read(_TAIL_BYTES)
            length = int.from_bytes(tail[:4], "little")
            if tail[4:] != b"PAR1" or not 0 < length <= min(size - _TAIL_BYTES, _MAX_FOOTER_BYTES):
                return "damaged"
            file.seek(size - _TAIL_BYTES - length)
            footer = file.read(length)
    except OSError:
        return "damaged"
    # A name in the schema is its length in one byte, and its letters.
    has_images = b"\x05bytes" in footer or (b"huggingface" in footer and b'"Image"' in footer)
    return "images" if has_images else "other"


def metadata_files(root: Path) -> list[Path]:
    """The tables of `imagefolder`, in `root` or its splits, whose rows name files; [] where there are none."""
    folders = [root, *(root / name for name in SPLIT_NAMES)]
    paths = [folder / name for folder in folders for name in _METADATA]
    return [path for path in paths if b"file_name" in head_of(path, 1 << 16)]


# --- FFCV ---------------------------------------------------------------------------------------------------------
_BETON = Struct("<HHIQQB16s")  # the header, and of the first field its type and its name
_BETON_VERSION, _BETON_TYPES, _LEAST_PAGE_BYTES = 2, (*range(7), 255), 1 << 21


def is_beton(head: bytes) -> bool:
    """Whether a file begins like one of FFCV, which has no magic number."""
    if len(head) < _BETON.size:
        return False
    version, fields, page_bytes, _, _, kind, name = _BETON.unpack_from(head)
    pages = page_bytes >= _LEAST_PAGE_BYTES and not page_bytes & (page_bytes - 1)
    named = name.rstrip(b"\0").isascii() and b"\0" not in name.rstrip(b"\0")
    return bool(version == _BETON_VERSION and 0 < fields <= 256 and pages and kind in _BETON_TYPES and named)
