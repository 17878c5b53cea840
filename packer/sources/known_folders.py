"""Folders that are known by what is in them, not by classes: a look at names, for the registry of sources.

COCO              annotations/instances_train2017.json and the like, or train/_annotations.coco.json
Pascal VOC        JPEGImages, with Annotations or ImageSets
YOLO              images next to labels that are text files, by themselves or in each split; a data.yaml with names and
                  splits; images with such text files beside them, and the names of the classes
ILSVRC            Data/CLS-LOC; ILSVRC2012_img_train.tar and the like; images with LOC_val_solution.csv
shards            files of one container format, and no images, in the folder or in its splits
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from packer.formats import REGISTRY as FORMATS
from packer.sources.folder_kinds import head_of
from readers.tree import SPLIT_NAMES, has_image_suffix

__all__ = [
    "COCO_KINDS",
    "COCO_NAME",
    "ROBOFLOW",
    "SOLUTION",
    "YOLO_NAMES",
    "YOLO_YAMLS",
    "coco_files",
    "find_solution",
    "ilsvrc_tars",
    "is_coco",
    "is_ilsvrc",
    "is_shards",
    "is_voc",
    "is_yolo",
    "shard_files",
    "yolo_folders",
]

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
_LOOKED_AT = 1000


def _entries(folder: Path, count: int | None = None) -> list[os.DirEntry[str]]:
    """The entries of a folder, not hidden, up to `count` of them; none where it cannot be listed."""
    try:
        with os.scandir(folder) as entries:
            limited = entries if count is None else (entry for entry, _ in zip(entries, range(count), strict=False))
            return [entry for entry in limited if not entry.name.startswith(".")]
    except OSError:
        return []


def coco_files(root: Path) -> dict[str, dict[str, Path]]:
    """The files of COCO's annotations below a directory: part -> kind -> path; empty where there are none."""
    found: dict[str, dict[str, Path]] = {}
    for name in sorted(entry.name for entry in _entries(root / "annotations")):
        match = COCO_NAME.fullmatch(name)
        if match is not None:
            found.setdefault(match[2], {})[match[1]] = root / "annotations" / name
    found = {part: {kind: kinds[kind] for kind in COCO_KINDS if kind in kinds} for part, kinds in found.items()}
    for part in SPLIT_NAMES:
        if (root / part / ROBOFLOW).exists():
            found.setdefault(part, {})["annotations"] = root / part / ROBOFLOW
    return found


def is_coco(root: Path) -> bool:
    """Whether a directory has annotations of COCO."""
    return bool(coco_files(root))


def is_voc(root: Path) -> bool:
    """Whether a directory is one of Pascal VOC."""
    return (root / "JPEGImages").is_dir() and ((root / "Annotations").is_dir() or (root / "ImageSets").is_dir())


def is_yolo(root: Path) -> bool:
    """Whether a directory has images, and labels in text files, next to each other, or in splits that a file names."""
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
    """Whether the first images that have a text file beside them have boxes of YOLO in it."""
    entries = _entries(folder, _LOOKED_AT)
    for entry in entries:
        if has_image_suffix(entry.name):
            head = head_of(Path(entry.path).with_suffix(".txt"))
            if head.strip():
                return _BOX.match(head) is not None
    return depth > 0 and any(_has_boxes_beside(Path(entry.path), depth - 1) for entry in entries if entry.is_dir())


def _has_texts(folder: Path, depth: int = 4) -> bool:
    entries = _entries(folder, _LOOKED_AT)
    if any(entry.name.endswith(".txt") and entry.name != "classes.txt" for entry in entries):
        return True
    return depth > 0 and any(_has_texts(Path(entry.path), depth - 1) for entry in entries if entry.is_dir())


def yolo_folders(root: Path) -> dict[str, str]:
    """The folder of the images of each split, as the folders say it; "" for the split where there are no splits."""
    inside = {name: f"{name}/images" for name in SPLIT_NAMES if (root / name / "images").is_dir()}
    if inside:
        return inside
    if (root / "images").is_dir():
        folders = sorted(entry.name for entry in _entries(root / "images") if entry.is_dir())
        matches = [match for name in folders if (match := _PART.fullmatch(name))]
        short = [match[1] for match in matches]
        names = [match[0] if short.count(match[1]) > 1 else match[1] for match in matches]
        return {name: f"images/{match[0]}" for name, match in zip(names, matches, strict=True)} or {"": "images"}
    return {name: name for name in SPLIT_NAMES if (root / name).is_dir()} or {"": ""}


def is_ilsvrc(root: Path) -> bool:
    """Whether a directory is the root of ILSVRC, has its archives, or has images and the table of their classes."""
    if (root / "Data/CLS-LOC").is_dir() or ilsvrc_tars(root):
        return True
    if find_solution(root) is None:
        return False
    named = root.name == "CLS-LOC" or (root / "val").is_dir()
    return named or any(has_image_suffix(entry.name) for entry in _entries(root, _LOOKED_AT))


def find_solution(root: Path) -> Path | None:
    """The table of the classes of val of ILSVRC: in a directory, or above one of its own."""
    folders = [root, *list(root.absolute().parents)[: _ABOVE.get(root.name, 0)]]
    return next((folder / SOLUTION for folder in folders if (folder / SOLUTION).is_file()), None)


def ilsvrc_tars(root: Path) -> dict[str, Path]:
    """The archives of ILSVRC in a directory: split -> path; empty where there are none."""
    names = sorted(entry.name for entry in _entries(root))
    found = {match[1]: root / name for name in names if (match := _TAR.fullmatch(name))}
    return {split: found[split] for split in ("train", "val", "test") if split in found}


def is_shards(root: Path) -> bool:
    """Whether a directory has shards, and neither images nor folders other than splits."""
    has_shards = False
    for entry in _entries(root):
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
    """Whether a file is called like a shard, which may be compressed."""
    stem, dot, suffix = name.rpartition(".")
    entry = FORMATS.of_name(stem if (dot + suffix).lower() in _COMPRESSED else name)
    return entry is not None and any(suffix in name.lower() for suffix in entry.suffixes)


def shard_files(root: Path) -> Iterator[tuple[str, Path]]:
    """(split that the folder says, or "", path) of each shard, in the order of their names."""
    for entry in sorted(_entries(root), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from ((entry.name, path) for _, path in shard_files(Path(entry.path)))
        elif is_shard_name(entry.name):
            yield "", Path(entry.path)
