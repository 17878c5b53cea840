"""What the files of COCO list, as columns: images, where each annotation is, categories. See `packer.sources.coco`."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cache.errors import BadNameError, SourceError
from packer.sources.base import ListingBuilder, SplitListing, check_names
from packer.sources.json_parts import JsonPart
from packer.sources.lookups import size_and_time
from readers.layout import RelativePath
from readers.strings import repeated
from readers.tree import unique_keys

__all__ = ["CocoCategories", "CocoImages"]

_MAX_CLASSES = 65_534  # a mask has 16 bits
_MAX_KEYPOINTS = 1024
_LOOKED_AT = 20
_NO_ID = -(1 << 63)
_KINDS = {"boxes": "boxes", "box_labels": "array", "mask": "mask", "points": "points", "caption": "text"}


class CocoCategories:
    """The categories of all files, and what their annotations have.

    classes: the number of each id, once `number` was called. keypoints: the most that an object has.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._names: dict[int, str] = {}
        self._has: set[str] = set()
        self.classes: dict[int, int] = {}
        self.keypoints = 0

    def add(self, part: JsonPart, path: Path) -> None:
        """A category."""
        number, name = _id(part, "id", path), part.value.get("name")
        if not isinstance(name, str) or not name or "\0" in name or not name.isprintable():
            raise _bad(path, part, f"a category called {name!r:.40}")
        if self._names.setdefault(number, name) != name:
            raise _bad(path, part, f"the category {number} is {name!r:.40} here and {self._names[number]!r:.40} before")

    def look_at(self, annotation: dict[str, Any]) -> None:
        """Note what an annotation has."""
        if annotation.get("caption"):
            self._has.add("caption")
        if annotation.get("bbox"):
            self._has |= {"boxes", "box_labels"}
            if annotation.get("segmentation"):
                self._has.add("mask")
            keypoints = annotation.get("keypoints")
            if isinstance(keypoints, list) and keypoints:
                self._has.add("points")
                self.keypoints = max(self.keypoints, len(keypoints) // 3)

    def number(self) -> tuple[str, ...]:
        """Number the classes by rising id. Returns their names."""
        self.classes = {number: place for place, number in enumerate(sorted(self._names))}
        names = tuple(self._names[number] for number in self.classes)
        twice = (
            next((name for name in sorted(names) if names.count(name) > 1), None)
            if len(set(names)) < len(names)
            else None
        )
        if twice is not None or len(names) > _MAX_CLASSES or self.keypoints > _MAX_KEYPOINTS:
            what = (
                f"two categories are called {twice!r}"
                if twice
                else f"{len(names):,} categories, {self.keypoints:,} keypoints"
            )
            raise SourceError(
                f"{self._where}: {what}; expected different names, at most {_MAX_CLASSES:,} and {_MAX_KEYPOINTS:,}"
            )
        return names

    def fields(self) -> dict[str, str]:
        """Names and kinds of the fields of a sample."""
        return {"image": "image"} | {name: _KINDS[name] for name in _KINDS if name in self._has} | {"json": "json"}


class CocoImages:
    """The images of a part, and where the records of each are.

    names: relative to `folder`, in the order of the lists.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self.names: list[str] = []
        self.folder = Path()
        self._rows: dict[int, int] = {}
        self._records = array("q")  # file, offset and length of each image
        self._lists = array("q")  # the file that listed each image last
        self._known = bytearray()
        self._notes = array("q")  # image id, file, offset, length, category or _NO_ID, own id or _NO_ID
        self._path, self._file, self._has_objects = Path(), 0, False
        self._first_note = 0

    def begin(self, path: Path, number: int, has_objects: bool) -> None:
        """The next file. has_objects: whether it says of each of its images what is in it."""
        self._path, self._file, self._has_objects = path, number, has_objects

    def add_image(self, part: JsonPart) -> None:
        number = _id(part, "id", self._path)
        name = part.value.get("file_name")
        try:
            name = str(RelativePath(name if isinstance(name, str) else ""))
        except BadNameError as error:
            raise _bad(self._path, part, f"file_name {error}") from error
        row = self._rows.setdefault(number, len(self.names))
        if row == len(self.names):
            self.names.append(name)
            self._records.extend((self._file, part.offset, part.length))
            self._lists.append(self._file)
            self._known.append(self._has_objects)
            return
        if self._lists[row] == self._file:
            raise _bad(self._path, part, f"the image {number} for the second time")
        if self.names[row] != name:
            raise _bad(self._path, part, f"the image {number} is {name!r} here and {self.names[row]!r} in another file")
        self._lists[row] = self._file
        self._known[row] |= self._has_objects

    def add_annotation(self, part: JsonPart, categories: CocoCategories) -> None:
        image = _id(part, "image_id", self._path)
        value = part.value
        if value.get("segmentation") and not value.get("bbox"):
            raise _bad(self._path, part, "a segmentation without a bbox")
        category = _id(part, "category_id", self._path) if value.get("bbox") else _NO_ID
        own = _id(part, "id", self._path) if "id" in value else _NO_ID
        self._notes.extend((image, self._file, part.offset, part.length, category, own))
        categories.look_at(value)

    def find(self, folders: Sequence[Path]) -> bool:
        """Take the first folder that has any of the first images. Raises SourceError where nothing is listed."""
        if not self.names:
            raise SourceError(f"{self._path}: lists no images; not a file of COCO")
        for folder in folders:
            if any((folder / name).exists() for name in self.names[:_LOOKED_AT]):
                self.folder = folder
                return True
        return False

    def locate(self, categories: CocoCategories) -> None:
        """Find the image of each annotation. Raises SourceError for one without, or of no category, or twice there."""
        for row in repeated(lambda: self.names, len(self.names)).tolist():
            if self.names.index(self.names[row]) != row:
                raise SourceError(
                    f"{self._where}: two images have the file_name {self.names[row]!r}; a set holds each once"
                )
        notes = np.frombuffer(self._notes, np.int64).reshape(-1, 6)
        ids = np.fromiter(self._rows, np.int64, len(self._rows))
        order = np.argsort(ids)
        at = np.minimum(np.searchsorted(ids, notes[:, 0], sorter=order), len(ids) - 1)
        rows = order[at]
        self._refuse(notes, ids[rows] != notes[:, 0], "is of the image {0}, which is not listed")
        known = np.array([*categories.classes, _NO_ID], np.int64)
        self._refuse(notes, ~np.isin(notes[:, 4], known), "is of the category {4}, which is not listed")
        by_id = np.lexsort((notes[:, 5], notes[:, 1]))
        pairs = notes[by_id][:, (1, 5)]
        twice = np.zeros(len(notes), np.bool_)
        twice[by_id[1:]] = (pairs[1:] == pairs[:-1]).all(1) & (pairs[1:, 1] != _NO_ID)
        self._refuse(notes, twice, "has the id {5}, as another one has")
        self._order = np.argsort(rows, kind="stable")
        self._ends = np.searchsorted(rows[self._order], np.arange(len(ids) + 1))

    def _refuse(self, notes: Any, wrong: Any, why: str) -> None:
        first = next(iter(np.flatnonzero(wrong).tolist()), None)
        if first is not None:
            found = notes[first].tolist()
            raise SourceError(
                f"{self._where}: the annotation at byte {found[2]} of file {found[1]} " + why.format(*found)
            )

    def listing(self, fields: int, stamp: int) -> SplitListing:
        """The split. fields: how many a sample has; stamp: of the files."""
        builder = ListingBuilder(fields)
        notes = np.frombuffer(self._notes, np.int64).reshape(-1, 6)
        more = ("",) * (fields - 1)
        for row, name in enumerate(self.names):
            its = notes[self._order[self._ends[row] : self._ends[row + 1]], 1:4]
            path = os.path.join(self.folder, name)
            size, time = size_and_time(path)
            place = (path, size, bool(self._known[row]), *self._records[3 * row : 3 * row + 3], *its.ravel().tolist())
            total = max(0, size) + self._records[3 * row + 2] + int(its[:, 2].sum())
            builder.add((name, *more), place, total, (stamp * 1_000_003 + time) % (1 << 63))
        part = builder.build()
        check_names(self.names, self._where)
        part.keys = unique_keys(part.names.columns[0])
        return part


def _id(part: JsonPart, member: str, path: Path) -> int:
    value = part.value.get(member) if isinstance(part.value, dict) else None
    if type(value) is not int or abs(value) >= 1 << 62:
        raise _bad(path, part, f"{member} is {value!r:.40}, expected a whole number")
    return value


def _bad(path: Path, part: JsonPart, what: str) -> SourceError:
    return SourceError(f"{path}: byte {part.offset}: {part.member}: {what}")
