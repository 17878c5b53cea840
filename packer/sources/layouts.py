"""Recognising what a folder or a file is, by names and a few bytes: fast, and without a reader of any format.

A folder may contain millions of images, so only the first files that the system lists are examined, and only a few
folders below.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cache.errors import SourceError
from cache.messages import plural, quoted
from packer.formats import REGISTRY as FORMATS
from packer.formats.tar import OTHER_EXTENSIONS
from packer.sources.tables import TABLE_SUFFIXES, is_field_name
from readers.layout import DATASET_FILE
from readers.opening.tree import SPLIT_NAMES, TreeFiles, TreeSplit, has_image_suffix

__all__ = [
    "COCO_KINDS",
    "COCO_NAME",
    "LACKING",
    "LAYOUTS",
    "ONE_CLASS",
    "ROBOFLOW",
    "SOLUTION",
    "YOLO_NAMES",
    "YOLO_YAMLS",
    "CelebaFiles",
    "IdxName",
    "MainField",
    "celeba_files",
    "check_layout",
    "coco_files",
    "find_solution",
    "head_of",
    "idx_folder",
    "idx_name",
    "ilsvrc_tars",
    "is_arrays",
    "is_beton",
    "is_cifar",
    "is_coco",
    "is_hub_set",
    "is_idx",
    "is_ilsvrc",
    "is_no_class",
    "is_npz",
    "is_shards",
    "is_voc",
    "is_yolo",
    "lacking_in_train",
    "main_named",
    "main_of",
    "mds_folders",
    "metadata_files",
    "parquet_files",
    "shard_files",
    "shows_main",
    "splits_of_arrays",
    "yolo_folders",
]


_LOOKED_AT = 512
_HEAD_BYTES, _TAIL_BYTES, _MAX_FOOTER_BYTES = 512, 8, 64 << 20


def entries_of(folder: Path) -> Iterator[os.DirEntry[str]]:
    """The entries of a folder that are not hidden, in system order; none if it cannot be listed."""
    with suppress(OSError), os.scandir(folder) as entries:
        yield from (entry for entry in entries if entry.name[:1] != ".")


def first_entries(folder: Path, count: int | None = _LOOKED_AT) -> list[os.DirEntry[str]]:
    """Up to `count` of these entries, by name."""
    return sorted(islice(entries_of(folder), count), key=lambda entry: entry.name)


def first_names(folder: Path, count: int | None = _LOOKED_AT) -> list[str]:
    """The names of `first_entries`."""
    return [entry.name for entry in first_entries(folder, count)]


def head_of(path: Path, count: int = _HEAD_BYTES) -> bytes:
    """The first bytes of a regular file; b"" if it is not one, or cannot be read."""
    try:
        return read_up_to(path, count) if path.is_file() else b""
    except OSError:
        return b""


def read_up_to(path: Path, count: int, from_end: int = 0) -> bytes:
    """Up to `count` bytes of a file, from the start, or from `from_end` bytes before the end."""
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - from_end) if from_end else 0)
        return file.read(count)


# --- CIFAR --------------------------------------------------------------------------------------------------------
_CIFAR = (
    ("batches.meta.txt", "data_batch_1.bin"),
    ("fine_label_names.txt", "train.bin"),
    ("batches.meta", "data_batch_1"),
    ("meta", "train", "test"),
)


def is_cifar(root: Path) -> bool:
    """Whether a folder has CIFAR-10 or CIFAR-100 as published, in either version."""
    return any(all((root / name).is_file() for name in names) for names in _CIFAR)


# --- MNIST --------------------------------------------------------------------------------------------------------
_IDX = re.compile(r"((?:.*-)?)(train|t10k|test)-(images|labels)[-.]idx([13])-ubyte(?:\.gz)?")
_IDX_BELOW = ("", "raw", "MNIST/raw", "FashionMNIST/raw", "KMNIST/raw", "EMNIST/raw")


class IdxName(NamedTuple):
    """prefix: of a set among several, with its "-". split: as in the file name."""

    prefix: str
    split: str
    is_images: bool


def idx_name(name: str) -> IdxName | None:
    """The meaning of a file name of MNIST and similar sets; None for any other file."""
    match = _IDX.fullmatch(name)
    if match is None or (match[3] == "images") != (match[4] == "3"):
        return None
    return IdxName(match[1], match[2], match[3] == "images")


def idx_folder(root: Path) -> Path | None:
    """The folder of such image files, at or below `root`; None if there is none."""
    for below in _IDX_BELOW:
        if any((part := idx_name(name)) and part.is_images for name in first_names(root / below)):
            return root / below
    return None


def is_idx(head: bytes) -> bool:
    """Whether a file begins like one of MNIST's image files."""
    return head[:4] == b"\0\0\x08\x03" and head[4:8] != bytes(4)  # a TFRecord has zeros there


# --- samples that are not images ----------------------------------------------------------------------------------
class MainField(NamedTuple):
    """The first field of a source's samples: its name, its kind, and the suffixes of its files; () for images."""

    name: str = "image"
    kind: str = "image"
    suffixes: tuple[str, ...] = ()


_MAIN_FIELDS = tuple(
    MainField(name, "file" if name == "audio" else name, tuple(f".{extension}" for extension in extensions.split(";")))
    for name, extensions in OTHER_EXTENSIONS.items()
)


def shows_main(main: MainField) -> Callable[[str], bool]:
    """Whether a file has the main field, by its name."""
    return (lambda name: name.lower().endswith(main.suffixes)) if main.suffixes else has_image_suffix


def main_of(names: Iterable[str]) -> MainField:
    """The main field for these file names: images if any is named like one, or no kind is known; else the commonest."""
    counts = dict.fromkeys(_MAIN_FIELDS, 0)
    unnamed = 0
    for name in names:
        last = name.rpartition("/")[2]
        if has_image_suffix(name) or last == DATASET_FILE:  # a packed set has arrays, too
            return MainField()
        unnamed += "." not in last
        for main in _MAIN_FIELDS:
            counts[main] += name.lower().endswith(main.suffixes)
    most = max(_MAIN_FIELDS, key=lambda main: counts[main])
    return most if counts[most] > unnamed else MainField()


def main_named(fields: Mapping[str, str], where: object) -> MainField | None:
    """The main field of a folder, from {"cloud:file": ".las,.laz"}; None if empty. Raises SourceError."""
    if not fields:
        return None
    (name, suffix), *more = fields.items()
    name, _, kind = name.partition(":")
    suffixes = tuple(suffix.lower().split(","))
    if more or not all(suffix[:1] == "." and suffix[1:] for suffix in suffixes):
        raise SourceError(
            f"{where}: a folder takes one field, with the extensions of its files: --field cloud:file=.las,.laz"
        )
    if not is_field_name(name) or kind not in ("array", "file", "text", "json", ""):
        raise SourceError(
            f"{where}: the field of a folder is NAME:array, NAME:file, NAME:text or NAME:json, not {name!r}"
        )
    return MainField(name, kind or "file", suffixes)


# --- NumPy --------------------------------------------------------------------------------------------------------
_ARRAY_IMAGES = ("images", "image", "imgs", "x", "data", "arr_0")
_ARRAY_LABELS = ("labels", "label", "y", "targets", "target", "arr_1")
_ARRAY_SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}


def splits_of_arrays(names: Iterator[str] | list[str]) -> dict[str, tuple[str, str]]:
    """By split, the names (without .npy) of its images and labels; "" for no labels. A split "" means no splits.

    `images` and `labels`, `x` and `y`, with the split before or after: train_images, x_train.
    """
    arrays: dict[str, dict[str, str]] = {}
    for name in names:
        words = [word for word in re.split(r"[_\-. ]", name.lower()) if word]
        split = next((_ARRAY_SPLITS[word] for word in words if word in _ARRAY_SPLITS), "")
        rest = "_".join(word for word in words if word not in _ARRAY_SPLITS)
        for kind, known in (("images", _ARRAY_IMAGES), ("labels", _ARRAY_LABELS)):
            if rest in known:
                arrays.setdefault(split, {}).setdefault(kind, name)
    order = [split for split in ("", *dict.fromkeys(_ARRAY_SPLITS.values())) if "images" in arrays.get(split, ())]
    return {split: (arrays[split]["images"], arrays[split].get("labels", "")) for split in order}


def is_arrays(root: Path) -> bool:
    """Whether a folder has arrays of images as .npy files."""
    names = [name.removesuffix(".npy") for name in first_names(root) if name.endswith(".npy")]
    images = [root / f"{images}.npy" for images, _ in splits_of_arrays(names).values()]
    return any(
        head_of(path, 6) in (b"\x93NUMPY", b"") for path in images
    )  # for an empty array, reading reports the problem


def is_npz(head: bytes) -> bool:
    """Whether a zip archive begins with a NumPy array, by the name of its first member."""
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
    """The Parquet files of a data set's repository, in order: in `root`, in `data`, and, if the folder is a repository
    (by README.md or .gitattributes), up to two folders below either."""
    depth = _depth(root)
    return sorted({*_parquet_below(root, depth), *_parquet_below(root / "data", depth)})


def _depth(root: Path) -> int:
    """How many folders below `root` the files may be, in a repository or with numbered files in split folders."""
    is_repository = any((root / name).exists() for name in _REPOSITORY)
    below = [root / name / split for name in first_names(root, _FEW_FOLDERS) for split in ("", *SPLIT_NAMES)]
    return 2 if is_repository or any((folder / "0000.parquet").is_file() for folder in below) else 0


def _parquet_below(folder: Path, depth: int) -> Iterator[Path]:
    names = first_names(folder, None)
    yield from (folder / name for name in names if name.endswith(_PARQUET))
    if depth and len(names) <= _MOST_FOLDERS:
        for name in names:
            if "." not in name and (folder / name).is_dir():
                yield from _parquet_below(folder / name, depth - 1)


def is_hub_set(root: Path) -> bool:
    """Whether a Parquet file, or the files of a folder, contain images.

    Damaged files and undownloaded ones in a folder count as such: reading reports the problem.
    """
    if root.is_file():
        return root.name.lower().endswith(_PARQUET) and _has_images(root) is True
    depth = _depth(root)
    return any(_has_image_parquet(folder, depth) for folder in (root, root / "data"))


def _has_image_parquet(folder: Path, depth: int) -> bool:
    """Whether the first Parquet file of a folder, or of one below, contains images."""
    names = first_names(folder)
    path = next((folder / name for name in names if name.endswith(_PARQUET)), None)
    if path is not None:
        return _has_images(path) is not False
    below = (folder / name for name in names[:_MOST_FOLDERS] if "." not in name) if depth else ()
    return any(path.is_dir() and _has_image_parquet(path, depth - 1) for path in below)


def _has_images(path: Path) -> bool | None:
    """By the footer: columns of bytes, or features of `datasets`; None if it is damaged."""
    try:
        tail = read_up_to(path, _TAIL_BYTES, _TAIL_BYTES) if path.is_file() else b""
        length = int.from_bytes(tail[:4], "little")
        if tail[4:] != b"PAR1" or not 0 < length <= _MAX_FOOTER_BYTES:
            return None
        footer = read_up_to(path, length, _TAIL_BYTES + length)
    except OSError:
        return None
    # A name in the schema is stored as its length in one byte, and its characters.
    return b"\x05bytes" in footer or (b"huggingface" in footer and b'"Image"' in footer)


def metadata_files(root: Path) -> list[Path]:
    """The tables of `imagefolder`, in `root` or its splits, whose rows name files; [] if there are none."""
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


# ------------------------------------------------------------------------------
# Folders of known layouts, recognised by names, for the registry of sources.
#
# COCO              annotations/instances_train2017.json and the like, or train/_annotations.coco.json
# Pascal VOC        JPEGImages, with Annotations or ImageSets
# YOLO              images next to text files of labels, alone or in each split; a data.yaml with names and splits;
#                   images with such text files next to them, and the class names
# ILSVRC            Data/CLS-LOC; ILSVRC2012_img_train.tar and the like; images with LOC_val_solution.csv
# shards            files of one container format, and no images, in the folder or in its splits


COCO_KINDS = ("instances", "person_keypoints", "captions", "image_info")
COCO_NAME = re.compile(rf"({'|'.join(COCO_KINDS)})_([A-Za-z0-9][A-Za-z0-9_.-]*)\.json")
ROBOFLOW = "_annotations.coco.json"
_PART = re.compile(rf"({'|'.join(SPLIT_NAMES)})(20\d\d)?")
YOLO_YAMLS = ("data.yaml", "data.yml", "dataset.yaml", "dataset.yml")
YOLO_NAMES = tuple(
    f"{folder}{name}"
    for folder in ("", "labels/", *(f"{split}/" for split in SPLIT_NAMES))
    for name in ("classes.txt", "obj.names", "_darknet.labels")
)
_YAML_KEYS = (re.compile(rb"^names\s*:", re.M), re.compile(rb"^(?:train|val)\s*:", re.M))
_BOX = re.compile(rb"\s*\d+(?:\s+-?[\d.]+(?:e-?\d+)?){4,}\s*(?:\n|$)")
SOLUTION = "LOC_val_solution.csv"
_TAR = re.compile(r"ILSVRC\d{4}_img_(train|val|test)(?:_\w+)?\.tar")
_ABOVE = {"val": 3, "CLS-LOC": 2}  # folders of ILSVRC, and how far above them its root is at most
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_BRANCHES_LOOKED_AT = 1000


def coco_files(root: Path) -> dict[str, dict[str, Path]]:
    """The annotation files of COCO below a directory: part -> kind -> path; empty if there are none."""
    by_part: dict[str, dict[str, Path]] = {}
    for name in first_names(root / "annotations", None):
        match = COCO_NAME.fullmatch(name)
        if match is not None:
            by_part.setdefault(match[2], {})[match[1]] = root / "annotations" / name
    by_part = {part: {kind: kinds[kind] for kind in COCO_KINDS if kind in kinds} for part, kinds in by_part.items()}
    for part in SPLIT_NAMES:
        if (root / part / ROBOFLOW).exists():
            by_part.setdefault(part, {})["annotations"] = root / part / ROBOFLOW
    return by_part


def is_coco(root: Path) -> bool:
    """Whether a directory has annotations of COCO, or is a JSON file."""
    return bool(coco_files(root)) or (root.is_file() and root.name.lower().endswith(".json"))


def is_voc(root: Path) -> bool:
    """Whether a directory has the layout of Pascal VOC."""
    return (root / "JPEGImages").is_dir() and ((root / "Annotations").is_dir() or (root / "ImageSets").is_dir())


def is_yolo(root: Path) -> bool:
    """Whether a directory has images and text files of labels, next to each other, or in splits named by a file."""
    for folder in yolo_folders(root).values():
        labels = "/".join("labels" if part == "images" else part for part in folder.split("/"))
        if labels != folder and (root / folder).is_dir() and _has_texts(root / labels):
            return True
    for name in YOLO_YAMLS:
        head = head_of(root / name, 1 << 16)
        if all(key.search(head) for key in _YAML_KEYS):
            return True
    return any((root / name).is_file() for name in YOLO_NAMES) and _has_boxes_beside(root)


def _has_boxes_beside(folder: Path, depth: int = 2) -> bool:
    """Whether the text files next to the first images have boxes of YOLO."""
    entries = first_entries(folder, _BRANCHES_LOOKED_AT)
    for entry in entries:
        if has_image_suffix(entry.name):
            head = head_of(Path(entry.path).with_suffix(".txt"))
            if head.strip():
                return _BOX.match(head) is not None
    return depth > 0 and any(_has_boxes_beside(Path(entry.path), depth - 1) for entry in entries if entry.is_dir())


def _has_texts(folder: Path, depth: int = 4) -> bool:
    entries = first_entries(folder, _BRANCHES_LOOKED_AT)
    if any(entry.name.endswith(".txt") and entry.name != "classes.txt" for entry in entries):
        return True
    return depth > 0 and any(_has_texts(Path(entry.path), depth - 1) for entry in entries if entry.is_dir())


def yolo_folders(root: Path) -> dict[str, str]:
    """The image folder of each split, by folder names; "" for the split if there are no splits."""
    inside = {name: f"{name}/images" for name in SPLIT_NAMES if (root / name / "images").is_dir()}
    if inside:
        return inside
    if (root / "images").is_dir():
        folders = [entry.name for entry in first_entries(root / "images", None) if entry.is_dir()]
        matches = [match for name in folders if (match := _PART.fullmatch(name))]
        short = [match[1] for match in matches]
        names = [match[0] if short.count(match[1]) > 1 else match[1] for match in matches]
        return {name: f"images/{match[0]}" for name, match in zip(names, matches, strict=True)} or {"": "images"}
    return {name: name for name in SPLIT_NAMES if (root / name).is_dir()} or {"": ""}


def is_ilsvrc(root: Path) -> bool:
    """Whether a directory is the root of ILSVRC, or has its archives, or images and the table of their classes."""
    if (root / "Data/CLS-LOC").is_dir() or ilsvrc_tars(root):
        return True
    if find_solution(root) is None:
        return False
    named = root.name == "CLS-LOC" or (root / "val").is_dir()
    return named or any(has_image_suffix(entry.name) for entry in first_entries(root, _BRANCHES_LOOKED_AT))


def find_solution(root: Path) -> Path | None:
    """The table of the val classes of ILSVRC: in a directory, or above one of its folders."""
    folders = [root, *list(root.absolute().parents)[: _ABOVE.get(root.name, 0)]]
    return next((folder / SOLUTION for folder in folders if (folder / SOLUTION).is_file()), None)


def ilsvrc_tars(root: Path) -> dict[str, Path]:
    """The archives of ILSVRC in a directory: split -> path; empty if there are none."""
    matches = filter(None, (_TAR.fullmatch(entry.name) for entry in entries_of(root)))
    tars = {match[1]: root / match[0] for match in sorted(matches, key=lambda match: match[0])}
    return {split: tars[split] for split in ("train", "val", "test") if split in tars}


def is_shards(root: Path) -> bool:
    """Whether a directory has shards, and neither images nor folders other than splits."""
    has_shards = False
    for entry in entries_of(root):
        if entry.is_dir():
            if entry.name not in SPLIT_NAMES or not is_shards(Path(entry.path)):
                return False
            has_shards = True
        elif has_image_suffix(entry.name):
            return False
        else:
            has_shards = has_shards or is_shard_name(entry.name)
    return has_shards


def is_shard_name(name: str) -> bool:
    """Whether a file is named like a shard, which may be compressed."""
    stem, dot, suffix = name.rpartition(".")
    entry = FORMATS.of_name(stem if (dot + suffix).lower() in _COMPRESSED else name)
    return entry is not None and any(suffix in name.lower() for suffix in entry.suffixes)


def shard_files(root: Path) -> Iterator[tuple[str, Path]]:
    """(split by the folder, or "", path) of each shard, in the order of their names."""
    for entry in first_entries(root, None):
        if entry.is_dir():
            yield from ((entry.name, path) for _, path in shard_files(Path(entry.path)))
        elif is_shard_name(entry.name):
            yield "", Path(entry.path)


# ------------------------------------------------------------------------------
# Image trees whose folders are not classes: recognised by their names, and refused or warned about.
#
#     ILSVRC, COCO, Pascal VOC, YOLO     in a folder of the tree, or in an archive: each is a separate kind of source
#     COCO without annotations           train2017, val2017
#     images with their masks            images, and masks, annotations or labels, instead of classes
#     Tiny ImageNet                      val/images, and classes in train: labels are in a text file
#
# If a tree is certainly wrong, a SourceError says what to run instead; if it may be right, there is a warning: a single
# class, a class named like folders of annotations, unlabelled images next to labelled ones. layout="tree" takes the
# folders as classes without a warning.


LAYOUTS = ("auto", "tree")
LACKING = " that train lacks: "
ONE_CLASS = "one class only"
_YEAR = re.compile(r"(train|val|test|unlabeled)20\d\d")
_PICTURES = ("images", "image", "imgs", "img", "jpegimages")
_COMPANIONS = (
    *("labels", "annotations", "annotation", "masks", "mask", "segmentation", "segmentations", "segmentationclass"),
    *("segmentationobject", "ground_truth", "groundtruth", "gt", "bboxes", "depth"),
)
_SIDECARS = (".txt", ".json", ".xml", ".caption")
_SHOWN = 5


class CelebaFiles(NamedTuple):
    """The paths of the parts of CelebA. attributes, identities: None if missing."""

    images: Path
    partition: Path
    attributes: Path | None
    identities: Path | None


def celeba_files(root: Path) -> CelebaFiles | None:
    """The parts of CelebA below a directory: all in it, or in Img, Eval and Anno as published.

    None if the images or their partition are missing: then it is an ordinary tree.
    """

    def first(kind: str, name: str, exists: Callable[[Path], bool]) -> Path | None:
        return next((path for path in (root / name, root / kind / name) if exists(path)), None)

    images = first("Img", "img_align_celeba", Path.is_dir)
    partition = first("Eval", "list_eval_partition.txt", Path.exists)
    if images is None or partition is None:
        return None
    lists = (first("Anno", name, Path.exists) for name in ("list_attr_celeba.txt", "identity_CelebA.txt"))
    return CelebaFiles(images, partition, *lists)


def check_layout(
    files: TreeFiles,
    splits: Mapping[str, TreeSplit],
    classes: Sequence[str],
    where: str,
    whole: bool,
    is_sample: Callable[[str], bool] = has_image_suffix,
) -> list[str]:
    """Warnings about a tree that is read as splits and classes. Raises SourceError if it is another layout.

    whole: `splits` has all splits of the tree, so that missing classes can be reported. is_sample: by file name.
    """
    folders = _folders(files)
    hint = _known(folders, classes) or _pairs(folders, splits) or _tiny_imagenet(splits, classes)
    if hint is not None:
        problem, folder, *split = hint
        raise SourceError(
            f"{where}: {problem}; {_command(where, folder, *split)}; to use its folders as classes anyway, pass  "
            f"layout='tree'"
        )
    images = {
        name: np.fromiter(map(is_sample, part.files.paths()), np.bool_, len(part.files))
        for name, part in splits.items()
    }
    labels = {name: part.labels[images[name]] for name, part in splits.items()}
    others = [path for name, part in splits.items() for path in part.files.take(np.flatnonzero(~images[name])).paths()]
    at_root = [number for number in files.used_folders() if not files.folders[number]]
    if all(part.root for part in splits.values()):
        others += files.take(np.flatnonzero(np.isin(files.in_folders(), at_root))).paths()
    warnings = [*_warnings(splits, labels, classes, where, whole), *_unread(splits, others, where)]
    if is_sample is has_image_suffix:
        warnings += _outnumbered(sum(map(len, labels.values())), others, where)
    return [f"{where}: {warning}" for warning in warnings]


def is_no_class(folder: str) -> bool:
    """Whether a folder is named like folders of images that are not classes: images, train2017."""
    return folder.lower() in _PICTURES or _YEAR.fullmatch(folder) is not None


def _command(where: str, folder: str, split: str = "") -> str:
    """The command for a folder of the tree, or for its images as a split."""
    if Path(where).is_dir():
        named = f" --split {quoted(split)}" if split else ""
        return f"run  packer convert {quoted(Path(where, folder))}{named}"
    return f"unpack it, and run  packer convert  on {f'its folder {folder!r}' if folder else 'that folder'}"


def _folders(files: TreeFiles) -> set[str]:
    """Every folder that has a file or a folder; "" is the root."""
    folders: set[str] = {""}
    for folder in TreeSplit("", files, np.empty(0, np.int32)).folders():
        while folder not in folders:
            folders.add(folder)
            folder = folder.rpartition("/")[0]
    return folders


Hint: TypeAlias = "tuple[str, ...] | None"  # what the tree seems to be, the folder to convert, and its split


def _known(folders: set[str], classes: Sequence[str]) -> Hint:
    """Whether a folder of the tree is ILSVRC, COCO or Pascal VOC."""
    for folder in sorted(folders):
        above, _, base = folder.rpartition("/")
        names = ("annotations", "Annotations", "ImageSets")
        siblings = {name for name in names if f"{above}/{name}".lstrip("/") in folders}
        year = _YEAR.fullmatch(base)
        if f"/{folder}".endswith("/Data/CLS-LOC"):
            problem = "holds the root of ILSVRC (ImageNet), whose classes are in Data/CLS-LOC"
            return problem, above.rpartition("/")[0]
        if year and "annotations" in siblings:
            return f"holds COCO ({base}), with several labels per image, in JSON files", above
        if year and base in classes:
            return f"looks like COCO ({base}) without its annotations; for the images alone", folder, year[1]
        if base == "JPEGImages" and siblings & {"Annotations", "ImageSets"}:
            return "holds Pascal VOC, whose labels are in Annotations", above
    return None


def _pairs(folders: set[str], splits: Mapping[str, TreeSplit]) -> Hint:
    """Images next to a folder of their companions, at the level of classes, or below a single folder."""
    for part in splits.values():
        tops, base = _tops(part), part.root
        while len(tops) == 1:
            base = f"{base}/{tops[0]}".lstrip("/")
            tops = sorted(folder[len(base) + 1 :] for folder in folders if folder.rpartition("/")[0] == base != folder)
        pictures = [top for top in tops if top.lower() in _PICTURES]
        companions = [top for top in tops if top.lower() in _COMPANIONS]
        labels = f"{base}/labels/".lstrip("/")
        texts = (path for path in part.files.paths() if path.startswith(labels) and path.endswith(".txt"))
        if pictures == ["images"] and "labels" in companions and any(texts):
            above = base.rpartition("/")[0] if base == part.root else base
            return "holds images with labels in text files, as for YOLO", above
        if pictures and companions:
            problem = f"looks like a set for detection or segmentation: {pictures[0]!r} is next to {companions[0]!r}"
            tip = "(to pack further files with their images, write a .csv with a column for each)"
            return f"{problem}, and neither is a class {tip}; for the images alone", f"{base}/{pictures[0]}".lstrip("/")
    return None


def _tiny_imagenet(splits: Mapping[str, TreeSplit], classes: Sequence[str]) -> Hint:
    tops = {name: _tops(part) for name, part in splits.items()}
    whole = next((name for name, subfolders in tops.items() if len(subfolders) > 1), None)
    single = next(
        (name for name, subfolders in tops.items() if len(subfolders) == 1 and subfolders[0].lower() in _PICTURES), None
    )
    if whole is None or single is None or len(classes) < 3:
        return None
    folder = f"{splits[single].root}/{tops[single][0]}"
    problem = f"the only class of {single} is {folder!r}, as in Tiny ImageNet, whose labels are in a text file"
    return f"{problem}: write a .csv of paths, labels and splits; for train alone", splits[whole].root, whole


def _tops(part: TreeSplit) -> list[str]:
    """The folders directly below that of a split in which it has files; sorted."""
    return sorted({folder.partition("/")[0] for folder in part.folders()} - {""})


def _warnings(
    splits: Mapping[str, TreeSplit],
    labels: Mapping[str, npt.NDArray[np.int32]],
    classes: Sequence[str],
    where: str,
    whole: bool,
) -> Iterable[str]:
    unlabelled = {name: int((numbers < 0).sum()) for name, numbers in labels.items()}
    labelled = sum(map(len, labels.values())) - sum(unlabelled.values())
    if len(classes) == 1 and labelled:
        folder = next(Path(part.root, classes[0]) for part in splits.values())
        yield f"{ONE_CLASS}, {classes[0]!r}; if that folder is not a class, {_command(where, str(folder))}"
    strange = [name for name in classes if name.lower() in (*_PICTURES, *_COMPANIONS)]
    if strange and len(classes) > 1:
        yield f"folders taken as classes: {_listed(strange)}; if they are classes, pass  layout='tree'"
    for name, count in unlabelled.items() if labelled else ():
        if count == len(labels[name]) > 0:
            yield f"no image of {name} has a label (none is in a class folder), but images of other splits have"
        elif count:
            yield f"{plural(count, 'image')} of {name} directly in its folder without a label, next to labelled ones"
    used = {label for numbers in labels.values() for label in _used(numbers)}
    empty = [name for label, name in enumerate(classes) if label not in used]
    if used and empty and whole:
        yield f"classes without a file named like an image: {_listed(empty)}; they still get label numbers"
    yield from lacking_in_train(labels, classes)


def _unread(splits: Mapping[str, TreeSplit], others: Sequence[str], where: str) -> Iterable[str]:
    """Further information about the images that is not read: tables, and files named like images next to them.

    others: the files that are not named like images.
    """
    table = next((path for path in others if path.endswith(TABLE_SUFFIXES)), None)
    if table is not None:
        command = f"packer convert {quoted(Path(where, table))} --folder {quoted(where)}"
        remedy = f"run  {command}" if Path(where).is_dir() else "unpack it, and convert the table"
        yield f"{table!r} is a table, which is not read; if it has the labels of the images, {remedy}"
    sidecars = {path.rpartition(".")[0]: path for path in others if path.endswith(_SIDECARS)}
    paths = (path for part in splits.values() for path in part.files.paths()) if sidecars else ()
    stems = (path.rpartition(".")[0] for path in paths if has_image_suffix(path))
    named = [sidecars[stem] for stem in stems if stem in sidecars]
    if named:
        yield (
            f"{plural(len(named), 'file')} left out, named like an image in the same folder, such as {named[0]!r}: to "
            f"read boxes of YOLO add classes.txt; for captions write a table, and use --field caption:text=COLUMN"
        )


def _outnumbered(images: int, others: Sequence[str], where: str) -> Iterable[str]:
    """A warning if more files than images would be the samples of a tree without images (`main_of`)."""
    main = main_of(others)
    count = sum(map(shows_main(main), others))
    if main.suffixes and count > images:
        field = f"--field {main.name}:{main.kind}={','.join(main.suffixes)}"
        yield (
            f"{plural(count, f'{main.name} file')} left out, next to {plural(images, 'file')} named like an image; if "
            f"they are the samples, {'' if Path(where).is_dir() else 'unpack it, and '}pass  {field}"
        )


def lacking_in_train(labels: Mapping[str, npt.NDArray[Any]], classes: Sequence[str]) -> Iterable[str]:
    """Warnings about classes that only other splits have. labels: by split."""
    used = {name: set(_used(numbers)) for name, numbers in labels.items()}
    if used.get("train"):
        for name, own in used.items():
            new = [classes[label] for label in sorted(own - used["train"])]
            if new:
                yield f"classes of {name}{LACKING}{_listed(new)}"


def _used(labels: npt.NDArray[Any]) -> list[int]:
    """The labels that occur, in ascending order; np.unique would import modules, which is slower than a small tree."""
    return list(np.flatnonzero(np.bincount(labels[labels >= 0])).tolist())


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
