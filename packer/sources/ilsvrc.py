"""ILSVRC (ImageNet): classes are folders in train; those of val are in a table, or in the development kit.

    Data/CLS-LOC/{train,val,test}      the images, train in a folder a class
    Annotations/CLS-LOC/{train,val}    boxes of some of them, in XML: fields boxes and box_labels
    LOC_val_solution.csv               `ILSVRC2012_val_00048981,n03995372 85 1 499 272`: the classes of val
    {train,val,test}, or the images    of the same names, next to that table; also val by itself, with it above
    ILSVRC2012_img_train.tar, …        see `packer.sources.ilsvrc_tars`

Classes are the names of the synsets, sorted, as torchvision numbers them. An image of val that the table does not name
has no label, with a warning.

Boxes are counted from 0. Some annotations are for another size than that of the file, so they are taken as parts of the
size that they state; corners are put in order, and inside of the image.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from cache.errors import BadSampleError
from cache.files import read_regular
from packer.formats.base import Arena
from packer.sources.base import FieldNames, Source, SourceListing
from packer.sources.folder import FolderReader, FolderSource
from packer.sources.ilsvrc_labels import give_labels, read_solution, with_labels
from packer.sources.ilsvrc_tars import IlsvrcTarSource
from packer.sources.known_folders import SOLUTION, find_solution, ilsvrc_tars
from packer.sources.lookups import wanted_split
from packer.sources.objects import grid_of
from packer.sources.xml_objects import MAX_XML_BYTES, parse_objects
from readers.fields import encode_field
from readers.sample import Buffer
from readers.strings import Strings
from readers.tree import SPLIT_NAMES, key_of_name

__all__ = ["IlsvrcSource", "open_ilsvrc"]

_DATA, _ANNOTATIONS = "Data/CLS-LOC", "Annotations/CLS-LOC"


def open_ilsvrc(root: str | os.PathLike[str], layout: str = "auto") -> Source:
    """The source; with layout="tree" the classes that its folders are then."""
    if layout == "tree":
        return FolderSource(root, layout)
    return IlsvrcTarSource(root) if ilsvrc_tars(Path(root)) else IlsvrcSource(root)


class IlsvrcSource:
    """See the module."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self.images = self.root / _DATA if (self.root / _DATA).is_dir() else self.root
        self.annotations = self.root / _ANNOTATIONS
        self._has_boxes = self.images != self.root and self.annotations.is_dir()
        self._classes: dict[str, int] = {}

    @property
    def title(self) -> str:
        return f"ILSVRC {self.root}"

    def list(self, split: str | None) -> SourceListing:
        is_val = not any((self.images / name).is_dir() for name in SPLIT_NAMES)
        whole = FolderSource(self.images, "tree").list("val" if is_val else None)
        for name, part in whole.splits.items():  # where the images are next to the table, that is a file among them
            rows = [row for row, names in enumerate(part.names) if names[0] != SOLUTION]
            if len(rows) < len(part):
                whole.splits[name] = part.take(np.array(rows, np.int64))
        table = find_solution(self.root)
        give_labels(whole, {} if table is None else read_solution(table), str(self.root))
        split = wanted_split(split, whole.splits, str(self.root))
        whole.splits = {name: part for name, part in whole.splits.items() if split in (None, name)}
        whole.left_out = [item for item in whole.left_out if item[0] != SOLUTION]
        self._classes = {name: number for number, name in enumerate(whole.classes)}
        if self._has_boxes:
            whole.fields = {"image": "image", "boxes": "boxes", "box_labels": "array"}
            for name, part in whole.splits.items():
                nothing = Strings(np.empty(0, np.uint8), np.zeros(len(part) + 1, np.uint64))
                whole.splits[name] = with_labels(part, part.labels, FieldNames(*part.names.columns, nothing, nothing))
        return whole

    def open(self) -> FolderReader:
        if self._has_boxes:
            return _ReaderWithBoxes(self.images, self.annotations, self._classes)
        return FolderReader(os.fspath(self.images))

    def paths(self, listing: SourceListing) -> Iterator[Path]:
        table = find_solution(self.root)
        if table is not None:
            yield table
        for part in listing.splits.values():
            for path, _ in part.places:
                yield self.images / path
                if self._has_boxes and (annotation := _annotation_of(self.annotations, path)).is_file():
                    yield annotation


def _annotation_of(folder: Path, path: str) -> Path:
    return folder / f"{key_of_name(path)}.xml"


class _ReaderWithBoxes(FolderReader):
    """Reads images, and the annotations of those that have some."""

    def __init__(self, images: Path, annotations: Path, classes: Mapping[str, int]) -> None:
        super().__init__(os.fspath(images))
        self._annotations, self._classes = annotations, classes

    def read(self, place: tuple[str, int], arena: Arena) -> Sequence[Buffer | None]:  # type: ignore[override]
        (image,) = super().read(place, arena)
        path = _annotation_of(self._annotations, place[0])
        try:
            data = read_regular(path, MAX_XML_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return image, None, None
        except OSError as error:
            raise BadSampleError(f"{path}: cannot be read: {error.strerror or error}") from error
        try:
            return image, *self._boxes(image, data)
        except BadSampleError as error:
            raise BadSampleError(f"{path}: {error}") from error

    def _boxes(self, image: Buffer, data: bytes) -> tuple[Buffer, Buffer]:
        found, grid = parse_objects(data), grid_of(image, None)
        unknown = next((name for name in found.names if name not in self._classes), None)
        if unknown is not None:
            raise BadSampleError(f"an object of the class {unknown!r}, which no folder and no line has")
        height, width = found.size or (grid.height, grid.width)
        corners = found.corners.reshape(-1, 2, 2) * (grid.width / width, grid.height / height)
        corners = np.clip(corners, 0, (grid.width, grid.height))
        boxes = grid.boxes(np.concatenate([corners.min(1), corners.max(1)], 1))
        labels = np.array([self._classes[name] for name in found.names], np.int64)
        return encode_field("boxes", boxes), encode_field("array", labels)
