"""Trees of images whose folders are not classes: recognised by their names, and refused or warned about.

    ILSVRC, COCO, Pascal VOC, YOLO     in a folder of the tree, or in an archive: each is a source by itself
    COCO without annotations           train2017, val2017
    images with their masks            images, and masks, annotations or labels, where classes would be
    Tiny ImageNet                      val/images, and classes in train: labels are in a text file

What is certainly wrong is a SourceError that says what to run instead; what may be right is a warning: a single class,
a class called as folders of annotations are, images without a label next to images with one. layout="tree" takes
the folders for classes without a warning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cache.errors import SourceError
from cache.messages import plural, quoted
from packer.sources.tables import TABLE_SUFFIXES
from readers.tree import TreeFiles, TreeSplit, has_image_suffix

__all__ = [
    "LACKING",
    "LAYOUTS",
    "ONE_CLASS",
    "CelebaFiles",
    "celeba_files",
    "check_layout",
    "is_no_class",
    "lacking_in_train",
]

LAYOUTS = ("auto", "tree")
LACKING = " that train lacks: "
ONE_CLASS = "one class only"
_YEAR = re.compile(r"(train|val|test|unlabeled)20\d\d")
_PICTURES = ("images", "image", "imgs", "img", "jpegimages")
_COMPANIONS = (
    *("labels", "annotations", "annotation", "masks", "mask", "segmentation", "segmentations", "segmentationclass"),
    *("segmentationobject", "ground_truth", "groundtruth", "gt", "bboxes", "depth"),
)
_BESIDE = (".txt", ".json", ".xml", ".caption")
_SHOWN = 5


class CelebaFiles(NamedTuple):
    """Where the parts of CelebA are. attributes, identities: None where they are missing."""

    images: Path
    partition: Path
    attributes: Path | None
    identities: Path | None


def celeba_files(root: Path) -> CelebaFiles | None:
    """The parts of CelebA below a directory: all in it, or in Img, Eval and Anno as they are published.

    None where the images or their partition are missing: then it is a tree like any other.
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
    files: TreeFiles, splits: Mapping[str, TreeSplit], classes: Sequence[str], where: str, whole: bool
) -> list[str]:
    """Warnings about a tree that is being taken for splits and classes. Raises SourceError where it is none.

    whole: `splits` are all that the tree has, so that a class may be missed.
    """
    folders = _folders(files)
    for recognise in (_ilsvrc, _coco, _voc, _pairs, _tiny_imagenet):
        found = recognise(folders, splits, classes)
        if found is not None:
            what, folder, *split = found
            raise SourceError(
                f"{where}: {what}; {_command(where, folder, *split)}; to take its folders for classes all the same, "
                f"pass  layout='tree'"
            )
    images = {name: _are_images(part) for name, part in splits.items()}
    labels = {name: part.labels[images[name]] for name, part in splits.items()}
    others = [path for name, part in splits.items() for path in part.files.take(np.flatnonzero(~images[name])).paths()]
    at_root = [number for number in files.used_folders() if not files.folders[number]]
    if all(part.root for part in splits.values()):
        others += files.take(np.flatnonzero(np.isin(files.in_folders(), at_root))).paths()
    warnings = [*_warnings(splits, labels, classes, where, whole), *_unread(splits, others, where)]
    return [f"{where}: {warning}" for warning in warnings]


def is_no_class(folder: str) -> bool:
    """Whether a folder of images is called as those are that are no class: images, train2017."""
    return folder.lower() in _PICTURES or _YEAR.fullmatch(folder) is not None


def _command(where: str, folder: str, split: str = "") -> str:
    """What to run for a folder of the tree, or for images of it as a split."""
    if Path(where).is_dir():
        named = f" --split {quoted(split)}" if split else ""
        return f"run  packer convert {quoted(Path(where, folder))}{named}"
    return f"unpack it, and run  packer convert  on {f'its folder {folder!r}' if folder else 'that folder'}"


def _folders(files: TreeFiles) -> set[str]:
    """Every folder that holds a file, or a folder; "" is the root."""
    found: set[str] = {""}
    for folder in TreeSplit("", files, np.empty(0, np.int32)).folders():
        while folder not in found:
            found.add(folder)
            folder = folder.rpartition("/")[0]
    return found


def _base(folder: str) -> str:
    return folder.rpartition("/")[2]


def _sibling(folder: str, name: str) -> str:
    above = folder.rpartition("/")[0]
    return f"{above}/{name}" if above else name


Found: TypeAlias = "tuple[str, ...] | None"  # what the tree looks like, the folder to convert, and its split


def _above(folder: str) -> str:
    return folder.rpartition("/")[0]


def _ilsvrc(folders: set[str], splits: Mapping[str, TreeSplit], classes: Sequence[str]) -> Found:
    for folder in sorted(folders):
        if folder == "Data/CLS-LOC" or folder.endswith("/Data/CLS-LOC"):
            return "holds the root of ILSVRC (ImageNet), whose classes are in Data/CLS-LOC", _above(_above(folder))
    return None


def _coco(folders: set[str], splits: Mapping[str, TreeSplit], classes: Sequence[str]) -> Found:
    for folder in sorted(folders):
        match = _YEAR.fullmatch(_base(folder))
        if match and _sibling(folder, "annotations") in folders:
            return f"holds COCO ({_base(folder)}), with several labels an image, in JSON files", _above(folder)
        if match and _base(folder) in classes:
            what = f"looks like COCO ({_base(folder)}) without its annotations; for the images alone"
            return what, folder, match[1]
    return None


def _voc(folders: set[str], splits: Mapping[str, TreeSplit], classes: Sequence[str]) -> Found:
    for folder in sorted(folders):
        if _base(folder) == "JPEGImages" and {_sibling(folder, "Annotations"), _sibling(folder, "ImageSets")} & folders:
            return "holds Pascal VOC, whose labels are in Annotations", _above(folder)
    return None


def _pairs(folders: set[str], splits: Mapping[str, TreeSplit], classes: Sequence[str]) -> Found:
    """Images next to what belongs to them, where classes would be, or below the only folder there."""
    for part in splits.values():
        tops = _tops(part)
        base = part.root
        while len(tops) == 1:
            base = f"{base}/{tops[0]}".lstrip("/")
            tops = sorted(folder[len(base) + 1 :] for folder in folders if folder.rpartition("/")[0] == base != folder)
        pictures = [top for top in tops if top.lower() in _PICTURES]
        companions = [top for top in tops if top.lower() in _COMPANIONS]
        if pictures == ["images"] and "labels" in companions and _has_texts(part, f"{base}/labels/".lstrip("/")):
            return "holds images with labels in text files, as for YOLO", _above(base) if base == part.root else base
        if pictures and companions:
            what = f"looks like a set for detection or segmentation: {pictures[0]!r} is next to {companions[0]!r}"
            tip = "(to pack further files with their images, write a .csv with a column for each)"
            return f"{what}, and neither is a class {tip}; for the images alone", f"{base}/{pictures[0]}".lstrip("/")
    return None


def _has_texts(part: TreeSplit, folder: str) -> bool:
    return any(path.startswith(folder) and path.endswith(".txt") for path in part.files.paths())


def _tiny_imagenet(folders: set[str], splits: Mapping[str, TreeSplit], classes: Sequence[str]) -> Found:
    classes_of = {name: _tops(part) for name, part in splits.items()}
    for name, found in classes_of.items():
        if len(found) == 1 and found[0].lower() in _PICTURES and len(classes) > 2:
            others = next((other for other, its in classes_of.items() if len(its) > 1), None)
            if others is not None:
                folder = f"{splits[name].root}/{found[0]}"
                what = f"the only class of {name} is {folder!r}, as in Tiny ImageNet, whose labels are in a text file"
                return (
                    f"{what}: write a .csv of paths, labels and splits; for train alone",
                    splits[others].root,
                    others,
                )
    return None


def _tops(part: TreeSplit) -> list[str]:
    """The folders right under that of a split, in which it has files; sorted."""
    return sorted({folder.partition("/")[0] for folder in part.folders()} - {""})


def _warnings(
    splits: Mapping[str, TreeSplit],
    labels: Mapping[str, npt.NDArray[np.int32]],
    classes: Sequence[str],
    where: str,
    whole: bool,
) -> Iterable[str]:
    unlabelled = {name: int((found < 0).sum()) for name, found in labels.items()}
    labelled = sum(map(len, labels.values())) - sum(unlabelled.values())
    if len(classes) == 1 and labelled:
        folder = next(Path(part.root, classes[0]) for part in splits.values())
        yield f"{ONE_CLASS}, {classes[0]!r}; if that folder is not a class, {_command(where, str(folder))}"
    strange = [name for name in classes if name.lower() in (*_PICTURES, *_COMPANIONS)]
    if strange and len(classes) > 1:
        yield f"taken for classes: {_listed(strange)}; layout='tree'  says that they are"
    for name, count in unlabelled.items():
        if not count or not labelled:
            continue
        if count == len(labels[name]):
            yield f"no image of {name} has a label (they are in no folder of a class), but those of others have"
        else:
            yield f"{plural(count, 'image')} of {name} right under its folder, without a label, next to labelled ones"
    yield from _class_warnings(labels, classes, whole)


def _unread(splits: Mapping[str, TreeSplit], others: Sequence[str], where: str) -> Iterable[str]:
    """What says more of the images and is not read: tables, and files beside them of their names.

    others: the files that are not called like images.
    """
    table = next((path for path in others if path.endswith(TABLE_SUFFIXES)), None)
    if table is not None:
        command = f"packer convert {quoted(Path(where, table))} --folder {quoted(where)}"
        what = f"run  {command}" if Path(where).is_dir() else "unpack it, and convert the table"
        yield f"{table!r} is a table that is not read; if it has the labels of the images, {what}"
    beside = {path.rpartition(".")[0]: path for path in others if path.endswith(_BESIDE)}
    if beside:
        images = (path for part in splits.values() for path in part.files.paths() if has_image_suffix(path))
        named = [beside[stem] for path in images if (stem := path.rpartition(".")[0]) in beside]
        if named:
            count = plural(len(named), "file")
            yield (
                f"{count} called like the image beside it, such as {named[0]!r}, left out: to read boxes of YOLO put "
                f"classes.txt there; of captions write a table for --field caption:text=COLUMN"
            )


def _are_images(part: TreeSplit) -> npt.NDArray[np.bool_]:
    """Which files are called like images."""
    return np.fromiter(map(has_image_suffix, part.files.paths()), np.bool_, len(part.files))


def _class_warnings(labels: Mapping[str, npt.NDArray[np.int32]], classes: Sequence[str], whole: bool) -> Iterable[str]:
    """Of classes that have no image, and of those that there is nothing of in train."""
    found = {name: set(np.flatnonzero(np.bincount(its[its >= 0])).tolist()) for name, its in labels.items()}
    everywhere = set().union(*found.values())
    empty = [name for label, name in enumerate(classes) if label not in everywhere]
    if everywhere and empty and whole:
        yield f"classes without a file called like an image: {_listed(empty)}; they count as labels all the same"
    yield from lacking_in_train(labels, classes)


def lacking_in_train(labels: Mapping[str, npt.NDArray[Any]], classes: Sequence[str]) -> Iterable[str]:
    """Warnings of classes that other splits have. labels: by split."""
    found = {name: set(np.unique(its[its >= 0]).tolist()) for name, its in labels.items()}
    if found.get("train"):
        for name, here in found.items():
            new = [classes[label] for label in sorted(here - found["train"])]
            if new:
                yield f"classes of {name}{LACKING}{_listed(new)}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
