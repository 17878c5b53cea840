"""Pascal VOC: images, an XML file of objects for each, lists of the splits, and masks.

    JPEGImages/2007_000027.jpg             the images
    Annotations/2007_000027.xml            objects (`packer.sources.objects`)
    ImageSets/Main/train.txt, val.txt …    the names of the images of a split; trainval where there is neither
    SegmentationClass/2007_000027.png      the class of each pixel: a field mask, as it is
    SegmentationObject/2007_000027.png     the object of each pixel: a field instance_mask, as it is

    image         as it is
    boxes         of every object, difficult ones included. Corners are counted from 1 and belong to the box, so it runs
                  from xmin - 1 to xmax
    box_labels    int64 [k]: the class, of the 20 of VOC where only those occur, so that a mask has the class + 1; else
                  of the names that occur, sorted
    json          the annotation: difficult, truncated, pose, parts

Without lists all images are one split. An image without an annotation has no boxes, which is not the same as none.
Annotations and masks count in stored pixels, unless their size says otherwise, and are turned as the image is.

Place: (path, bytes) of the image, the annotation, the mask and the mask of objects, None for one that is not there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from cache.errors import BadNameError, BadSampleError, SourceError
from cache.files import read_regular
from packer.formats.base import Arena
from packer.sources.base import ListingBuilder, SourceListing, check_names, size_and_time, wanted_split
from packer.sources.folder import FolderSource, read_file
from packer.sources.objects import MAX_XML_BYTES, Grid, XmlObjects, grid_of, parse_objects
from readers.fields import decode_field, encode_field
from readers.headers import read_header
from readers.layout import RelativePath
from readers.opening.tree import SPLIT_NAMES, has_image_suffix, unique_keys
from readers.table import Buffer

__all__ = ["VocSource", "open_voc"]

IMAGES, ANNOTATIONS, SETS = "JPEGImages", "Annotations", "ImageSets"
_MASKS = {"mask": "SegmentationClass", "instance_mask": "SegmentationObject"}
_CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog"),
    *("horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
_MAX_LIST_BYTES = 64 << 20


def open_voc(
    root: str | os.PathLike[str], layout: str = "auto", image_sets: str | None = None
) -> VocSource | FolderSource:
    """The source; with layout="tree" the classes that its folders are then."""
    if layout == "tree":
        if image_sets is not None:
            raise SourceError(f"{root}: image_sets={image_sets!r} is for Pascal VOC, not for layout='tree'")
        return FolderSource(root, layout)
    return VocSource(root, image_sets=image_sets)


class VocSource:
    """See the module. image_sets: the folder in ImageSets whose lists count; None: Main, or the first there is."""

    def __init__(self, root: str | os.PathLike[str], *, image_sets: str | None = None) -> None:
        self.root = Path(root)
        self.image_sets = image_sets
        self._fields: dict[str, str] = {}
        self._classes: dict[str, int] = {}

    @property
    def title(self) -> str:
        return f"Pascal VOC {self.root}"

    def list(self, split: str | None) -> SourceListing:
        images = self._files(IMAGES)
        lists = self._lists(list(images), split)
        split = wanted_split(split, lists, str(self.root))
        annotations = self._files(ANNOTATIONS)
        masks = {field: self._files(folder) for field, folder in _MASKS.items()}
        self._fields = {"image": "image"}
        if annotations:
            self._fields |= {"boxes": "boxes", "box_labels": "array"}
        self._fields |= {field: "mask" for field, found in masks.items() if found}
        if annotations:
            self._fields["json"] = "json"
        listed = {name for names in lists.values() for name in names}
        self._classes = {name: number for number, name in enumerate(self._class_names(annotations, listed))}
        listing = SourceListing({}, self._fields, tuple(self._classes))
        for part, names in lists.items():
            if split in (None, part):
                builder = ListingBuilder(len(self._fields))
                for name in names:
                    files = [
                        images.get(name, f"{name}.jpg"),
                        annotations.get(name),
                        *(m.get(name) for m in masks.values()),
                    ]
                    self._add(builder, files)
                listing.splits[part] = builder.build()
                check_names((names[0] for names in listing.splits[part].names), str(self.root))
                listing.splits[part].keys = unique_keys(listing.splits[part].names.columns[0])
        listing.left_out = [(file, "in no list of the splits") for name, file in images.items() if name not in listed]
        return listing

    def _files(self, folder: str) -> dict[str, str]:
        """The files of a folder: name without suffix -> name, sorted."""
        try:
            names = sorted(os.listdir(self.root / folder))
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise SourceError(f"{self.root / folder}: cannot be listed: {error.strerror}") from error
        found: dict[str, str] = {}
        for name in names:
            stem, dot, suffix = name.rpartition(".")
            if name[:1] == "." or not (suffix.lower() == "xml" if folder == ANNOTATIONS else has_image_suffix(name)):
                continue
            if found.setdefault(stem if dot else name, name) != name:
                raise SourceError(f"{self.root / folder}: {found[stem]!r} and {name!r} are of one name; remove one")
        return found

    def _lists(self, images: Sequence[str], split: str | None) -> dict[str, Sequence[str]]:
        """The names of the images of each split."""
        folder = self._folder_of_lists()
        found: dict[str, Path] = {}
        if folder is not None:
            found = {name: folder / f"{name}.txt" for name in SPLIT_NAMES if (folder / f"{name}.txt").is_file()}
            both = folder / "trainval.txt"
            if both.is_file() and not {"train", "val"} & found.keys():
                found["trainval"] = both
        if not found:
            if self.image_sets is not None:
                raise SourceError(f"{self.root}: no lists in {SETS}/{self.image_sets} (image_sets={self.image_sets!r})")
            if not images:
                raise SourceError(f"{self.root}: no images in {IMAGES}")
            return {split or "train": images}
        return {name: _names_of(path) for name, path in found.items()}

    def _folder_of_lists(self) -> Path | None:
        if self.image_sets is not None:
            try:
                return self.root / SETS / RelativePath(self.image_sets)
            except BadNameError as error:
                raise SourceError(f"image_sets: {error}") from error
        candidates = [self.root / SETS / name for name in ("Main", "Segmentation")]
        return next((folder for folder in candidates if folder.is_dir()), None)

    def _class_names(self, annotations: Mapping[str, str], listed: set[str]) -> tuple[str, ...]:
        """Those of all objects. What is wrong with an annotation, its worker says."""
        names: set[str] = set()
        for stem, file in annotations.items():
            if stem in listed:
                try:
                    names.update(read_annotation(self.root / ANNOTATIONS / file).names)
                except BadSampleError:
                    continue
        return _CLASSES if names <= {*_CLASSES} else tuple(sorted(names))

    def _add(self, builder: ListingBuilder, files: Sequence[str | None]) -> None:
        place: list[tuple[str, int] | None] = []
        total = mark = 0
        for folder, name in zip((IMAGES, ANNOTATIONS, *_MASKS.values()), files, strict=True):
            if name is None:
                place.append(None)
                continue
            size, time = size_and_time(self.root / folder / name)
            place.append((f"{folder}/{name}", size))
            total += max(0, size)
            mark = (mark * 1_000_003 + time) % (1 << 63)
        names = [files[0] or "", *([""] * (len(self._fields) - 1))]
        for i, field in enumerate(self._fields):
            if field in _MASKS:
                name = files[2 + list(_MASKS).index(field)]
                names[i] = f"{_MASKS[field]}/{name}" if name is not None else ""
        builder.add(names, tuple(place), total, mark)

    def open(self) -> AbstractContextManager[VocReader]:
        return nullcontext(VocReader(self.root, tuple(self._fields), self._classes))

    def paths(self, listing: SourceListing) -> Iterator[Path]:
        folder = self._folder_of_lists()
        if folder is not None:
            yield from (folder / name for name in sorted(os.listdir(folder)) if name.endswith(".txt"))
        for part in listing.splits.values():
            for place in part.places:
                yield from (self.root / entry[0] for entry in place if entry is not None)


def read_annotation(path: Path) -> XmlObjects:
    """The annotation in a file. Raises BadSampleError."""
    try:
        return parse_objects(read_regular(path, MAX_XML_BYTES))
    except OSError as error:
        raise BadSampleError(f"{path}: cannot be read: {error.strerror or error}") from error
    except BadSampleError as error:
        raise BadSampleError(f"{path}: {error}") from error


def _names_of(path: Path) -> Sequence[str]:
    """The names in a list, without repetition."""
    try:
        text = read_regular(path, _MAX_LIST_BYTES).decode()
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SourceError(f"{path}: not UTF-8 text; not a list of images") from error
    found: dict[str, int] = {}
    for line, content in enumerate(text.splitlines(), 1):
        words = content.split()
        if not words:
            continue
        try:
            name = str(RelativePath(words[0]))
        except BadNameError as error:
            raise SourceError(f"{path}: line {line}: {error}") from error
        if "/" in name or len(words) > 1:
            raise SourceError(f"{path}: line {line}: {content!r:.80} is not the name of an image")
        if found.setdefault(name, line) != line:
            raise SourceError(f"{path}: line {line}: {name!r} for the second time")
    return list(found)


class VocReader:
    """Reads images with what belongs to them."""

    def __init__(self, root: Path, fields: Sequence[str], classes: Mapping[str, int]) -> None:
        self._root, self._fields, self._classes = root, fields, classes

    def read(self, place: Sequence[tuple[str, int] | None], arena: Arena) -> Sequence[Buffer | None]:
        files: list[Buffer | None] = []
        for entry in place:
            try:
                files.append(None if entry is None else read_file(os.path.join(self._root, entry[0]), entry[1], arena))
            except BadSampleError as error:
                raise BadSampleError(f"{entry[0] if entry else ''!r} {error}") from error
        image = files[0]
        assert image is not None
        found: dict[str, Buffer | None] = {"image": image}
        size = None
        if files[1] is not None and place[1] is not None:
            try:
                annotation = parse_objects(bytes(files[1]))
                size = annotation.size
                found |= self._objects(annotation, grid_of(image, size))
            except BadSampleError as error:
                raise BadSampleError(f"{place[1][0]}: {error}") from error
        for field, data in zip(_MASKS, files[2:], strict=True):
            if data is not None:
                found[field] = _mask(data, grid_of(image, size), field)
        return [found.get(field) for field in self._fields]

    def _objects(self, annotation: XmlObjects, grid: Grid) -> dict[str, Buffer | None]:
        unknown = next((name for name in annotation.names if name not in self._classes), None)
        if unknown is not None:
            raise BadSampleError(f"an object called {unknown!r}, as none was when the source was listed")
        corners = annotation.corners - np.array([1.0, 1.0, 0.0, 0.0])
        corners[:, :2] = np.where(corners[:, :2] == -1, 0, corners[:, :2])  # of programs that count from 0
        labels = np.array([self._classes[name] for name in annotation.names], np.int64)
        values: dict[str, Any] = {"boxes": grid.boxes(corners), "box_labels": labels, "json": annotation.record}
        kinds = {"boxes": "boxes", "box_labels": "array", "json": "json"}
        return {name: encode_field(kinds[name], value) for name, value in values.items()}


def _mask(data: Buffer, grid: Grid, field: str) -> Buffer:
    """A mask as it is, or turned as the image is."""
    header = read_header(data)
    if (header.height, header.width) != (grid.height, grid.width):
        raise BadSampleError(
            f"its {field} has {header.width} x {header.height} pixels, the image {grid.width} x {grid.height}"
        )
    if grid.orientation == 1:
        return encode_field("mask", data)
    return encode_field("mask", grid.mask(decode_field("mask", data)))
