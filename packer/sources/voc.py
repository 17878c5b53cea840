"""Pascal VOC: images, an XML annotation for each, lists of the splits, and masks.

    JPEGImages/2007_000027.jpg             the images
    Annotations/2007_000027.xml            objects (`packer.sources.objects`)
    ImageSets/Main/train.txt, val.txt …    the image names of a split; trainval if there is neither train nor val
    SegmentationClass/2007_000027.png      the class of each pixel: the field mask
    SegmentationObject/2007_000027.png     the object of each pixel: the field instance_mask

    image         the file, unchanged
    boxes         those of all objects, difficult ones included. Corners are inclusive and counted from 1, so a box
                  extends from xmin - 1 to xmax
    box_labels    int64 [k]: the class. If only the 20 classes of VOC occur, they are numbered as in VOC, so that the
                  value in a mask is the class + 1; other names are numbered in sorted order
    json          the annotation: difficult, truncated, pose, parts

Without lists, all images are one split. An image without an annotation has no field boxes; if its annotation has no
objects, the field is empty. Annotations and masks refer to stored pixels, unless their size says otherwise, and are
rotated with the image. Masks are otherwise unchanged.

Files of a sample: the image, the annotation, the class mask and the object mask; a missing one is None.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cache.errors import BadSampleError, SourceError
from cache.files import read_regular
from packer.sources.base import SourceListing, checked_name, of_sample, read_text, refusing
from packer.sources.objects import MAX_XML_BYTES, AnnotatedSource, Grid, grid_of, parse_objects
from readers.fields import decode_field
from readers.headers import read_header
from readers.layout import RelativePath
from readers.opening.tree import SPLIT_NAMES, has_image_suffix
from readers.table import Buffer

__all__ = ["VocSource"]

IMAGES, ANNOTATIONS, SETS = "JPEGImages", "Annotations", "ImageSets"
_MASKS = {"mask": "SegmentationClass", "instance_mask": "SegmentationObject"}
_CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog"),
    *("horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
_MAX_LIST_BYTES = 64 << 20


class VocSource(AnnotatedSource):
    """The Pascal VOC set at `root`. image_sets: the folder in ImageSets to use, by default Main, else Segmentation."""

    kind = "Pascal VOC"

    def __init__(self, root: str | os.PathLike[str], *, image_sets: str | None = None) -> None:
        super().__init__(root)
        self.image_sets = image_sets
        self._classes: dict[str, int] = {}

    def list_files(self, split: str | None) -> SourceListing:
        images, annotations = self._files_of(IMAGES), self._files_of(ANNOTATIONS)
        masks = {field: self._files_of(folder) for field, folder in _MASKS.items()}
        lists = self._lists(list(images), split)
        boxes = {"boxes": "boxes", "box_labels": "array"} if annotations else {}
        fields = {"image": "image"} | boxes | {field: "mask" for field, files in masks.items() if files}
        self.fields = fields | ({"json": "json"} if annotations else {})
        listed = {name for names in lists.values() for name in names}
        self._classes = {name: number for number, name in enumerate(self._class_names(annotations, listed))}
        listing = SourceListing({}, self.fields, tuple(self._classes))
        for part, names in lists.items():
            self.add(listing, part, self._samples(names, images, annotations, masks))
        listing.left_out = [(file, "in no list of the splits") for name, file in images.items() if name not in listed]
        return listing

    def _samples(self, names: Iterable[str], images: Any, annotations: Any, masks: Mapping[str, Any]) -> Iterator[Any]:
        folders = (IMAGES, ANNOTATIONS, *_MASKS.values())
        for name in names:
            times: list[int] = []
            image = images.get(name, f"{name}.jpg")
            there = (image, annotations.get(name), *(mask_files.get(name) for mask_files in masks.values()))
            files = [
                None if file is None else self.file(f"{folder}/{file}", times)
                for folder, file in zip(folders, there, strict=True)
            ]
            of_masks = {field: file[0] for field, file in zip(_MASKS, files[2:], strict=True) if file is not None}
            yield {"image": image} | of_masks, files, None, 0, times

    def _files_of(self, folder: str) -> dict[str, str]:
        """The files of a folder: name without suffix -> name, sorted."""
        if not (self.root / folder).exists():
            return {}
        with refusing(self.root / folder, "cannot be listed"):
            names = sorted(os.listdir(self.root / folder))
        files: dict[str, str] = {}
        for name in names:
            stem, _, suffix = name.rpartition(".")
            if name[:1] == "." or not (suffix.lower() == "xml" if folder == ANNOTATIONS else has_image_suffix(name)):
                continue
            if files.setdefault(stem, name) != name:
                raise SourceError(f"{self.root / folder}: {files[stem]!r} and {name!r} have the same name; remove one")
        return files

    def _lists(self, images: Sequence[str], split: str | None) -> dict[str, Sequence[str]]:
        """The image names of each split."""
        chosen = None if self.image_sets is None else checked_name(RelativePath, self.image_sets, "image_sets")
        folders = [self.root / SETS / name for name in ((chosen,) if chosen else ("Main", "Segmentation"))]
        folder = next((folder for folder in folders if folder.is_dir()), folders[0])
        names = [name for name in SPLIT_NAMES if (folder / f"{name}.txt").is_file()]
        if not {"train", "val"} & {*names} and (folder / "trainval.txt").is_file():
            names.append("trainval")
        if not names and chosen is not None:
            raise SourceError(f"{self.root}: no lists in {SETS}/{chosen} (image_sets={self.image_sets!r})")
        if not names and not images:
            raise SourceError(f"{self.root}: no images in {IMAGES}")
        return {name: _names_of(self.note(folder / f"{name}.txt")) for name in names} or {split or "train": images}

    def _class_names(self, annotations: Mapping[str, str], listed: set[str]) -> tuple[str, ...]:
        """The class names of all objects. Damaged annotations are skipped here; a worker reports them."""
        names: set[str] = set()
        for stem in annotations.keys() & listed:
            try:
                names.update(parse_objects(_read(self.root / ANNOTATIONS / annotations[stem])).names)
            except BadSampleError:
                continue
        return _CLASSES if names <= {*_CLASSES} else tuple(sorted(names))

    def values(self, image: Buffer, files: Sequence[Buffer | None], place: Any) -> Mapping[str, Any]:
        annotation, *masks = files
        values: dict[str, Any] = {}
        size = None
        if annotation is not None:
            objects = parse_objects(bytes(annotation))
            size = objects.size
            unknown = next((name for name in objects.names if name not in self._classes), None)
            if unknown is not None:
                raise BadSampleError(
                    f"an object called {unknown!r}, a class that was not there when the source was listed"
                )
            corners = objects.corners - np.array([1.0, 1.0, 0.0, 0.0])
            corners[:, :2] = np.where(corners[:, :2] == -1, 0, corners[:, :2])  # from tools that count from 0
            labels = np.array([self._classes[name] for name in objects.names], np.int64)
            values = {"boxes": grid_of(image, size).boxes(corners), "box_labels": labels, "json": objects.record}
        for field, data in zip(_MASKS, masks, strict=True):
            if data is not None:
                values[field] = _mask(data, grid_of(image, size), field)
        return values


def _read(path: Path) -> bytes:
    with of_sample(path):
        return read_regular(path, MAX_XML_BYTES)


def _names_of(path: Path) -> Sequence[str]:
    """The image names in a list of a split. Raises SourceError for a repeated name."""
    line_of: dict[str, int] = {}
    for line, content in enumerate(read_text(path, _MAX_LIST_BYTES, "not UTF-8 text").splitlines(), 1):
        words = content.split()
        if not words:
            continue
        name = str(checked_name(RelativePath, words[0], f"{path}: line {line}"))
        if "/" in name or len(words) > 1:
            raise SourceError(f"{path}: line {line}: {content!r:.80} is not the name of an image")
        if line_of.setdefault(name, line) != line:
            raise SourceError(f"{path}: line {line}: {name!r} for the second time")
    return list(line_of)


def _mask(data: Buffer, grid: Grid, field: str) -> Any:
    """A mask, rotated as the image is displayed. Raises BadSampleError if it differs in size from the image."""
    header = read_header(data)
    if (header.height, header.width) != (grid.height, grid.width):
        raise BadSampleError(
            f"its {field} has {header.width} x {header.height} pixels, the image {grid.width} x {grid.height}"
        )
    return data if grid.orientation == 1 else grid.mask(decode_field("mask", data))
