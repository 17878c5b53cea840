"""COCO: images, and files of JSON that say what is in them.

    annotations/<kind>_<part>.json    kinds: instances, person_keypoints, captions, image_info; parts: train2017, …
    <part>/, images/<part>/           the images of a part
    <part>/_annotations.coco.json     as Roboflow exports it: annotations next to the images, in train, valid and test
    x.json                            one file by itself; its images are in `folder`, or next to it

A part is a split: train2017 is called train, unless there are several of train. Parts whose images are not there are
skipped with a warning. Every image of the lists is a sample, also without annotations.

    image         as it is
    boxes         of every annotation with a bbox, crowds included, in the order of the file: x, y, width, height
                  become two corners
    box_labels    int64 [k]: the class; classes are the categories of all files by rising id
    mask          classes as `packer.sources.objects.class_mask` paints them, where any file has segmentations
    points        float32 [k, n, 2], for the rows of boxes, NaN for a keypoint without a label, where any file has some
    caption       one a line
    json          the records as they are: {"image": {…}, "instances": [{…}], "captions": …}, by the kind of their file

Listing reads each file once, part by part, and keeps of an annotation where it is; workers read it there. Place: path
of the image, its bytes, whether its objects are known, and for its record and each annotation: file, offset, length.
"""

from __future__ import annotations

import json
import os
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np

from cache.errors import BadNameError, BadSampleError, SourceError
from cache.files import PathError, open_regular
from packer.formats.base import Arena
from packer.sources.base import (
    ListingBuilder,
    SourceListing,
    SplitListing,
    check_names,
    file_stamp,
    size_and_time,
    wanted_split,
)
from packer.sources.folder import FolderSource, read_file
from packer.sources.layouts import COCO_KINDS, COCO_NAME, ROBOFLOW, coco_files
from packer.sources.objects import Grid, class_mask, decode_counts, grid_of, outline_pixels, pixels_of_counts
from packer.sources.shards import split_of_name
from packer.sources.streams import PlainFile
from readers.fields import encode_field
from readers.layout import RelativePath
from readers.opening.tree import has_image_suffix, unique_keys
from readers.table import Buffer, repeated

__all__ = ["json_parts"]


# ------------------------------------------------------------------------------
# The parts of a large JSON file, one at a time: the elements of the arrays at its top, and its other members.
#
#     {"images": [{…}, {…}], "categories": [{…}], "info": {…}}   gives images {…}, images {…}, categories {…}, info {…}
#
# So a file of half a gigabyte takes the memory of its largest part. A part says where its bytes are in the file, by
# which it is read again later. Members may come in any order, and one that occurs twice is an error.


_STEP_BYTES = 1 << 20
_MAX_PART_BYTES = 64 << 20
_blanks = re.compile(r"[ \t\r\n]*").match


class JsonPart(NamedTuple):
    """The value of a member, or of an element of a member that is an array; its bytes are [offset, offset + length).

    is_element: which of these it is.
    """

    member: str
    value: Any
    offset: int
    length: int
    is_element: bool


def strict_json(text: str | bytes) -> Any:
    """A value, in which there is no NaN or Infinity: they are not JSON. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def json_parts(path: Path) -> Iterator[JsonPart]:
    """The parts of the object in a file. Raises SourceError where it is not one, or where a part is over 64 MiB."""
    try:
        with open_regular(path) as file:
            yield from _Text(path, file).parts()
    except PathError as error:
        raise SourceError(f"{path}: {error}") from error
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from error


class _Text:
    """A window of the file: one letter a byte, so that positions are offsets."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._text, self._start, self._at = "", 0, 0  # letters, offset of the first, position of the next
        self._is_whole = False
        self._decoder = json.JSONDecoder()

    def parts(self) -> Iterator[JsonPart]:
        self._expect("{")
        seen: set[str] = set()
        is_last = self._next_is("}")
        while not is_last:
            name, offset, _ = self._value()
            if not isinstance(name, str) or name in seen:
                raise self._bad(offset, f"{name!r:.40} where a new name of a member should be")
            seen.add(name)
            self._expect(":")
            if self._next_is("["):
                yield from self._elements(name)
            else:
                yield JsonPart(name, *self._value(), False)
            is_last = self._ends("}")
        if self._next():
            raise self._bad(self._start + self._at, "more than one value")

    def _elements(self, member: str) -> Iterator[JsonPart]:
        is_last = self._next_is("]")
        while not is_last:
            yield JsonPart(member, *self._value(), True)
            is_last = self._ends("]")

    def _value(self) -> tuple[Any, int, int]:
        """(value, offset, bytes) of the next value."""
        self._next()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
                if end < len(self._text) or self._is_whole:
                    break
                problem: Exception | None = None  # a number may continue behind the window
            except (ValueError, RecursionError) as error:
                problem = error
            if self._is_whole or len(self._text) - self._at > _MAX_PART_BYTES or isinstance(problem, RecursionError):
                what = "is not JSON" if self._is_whole else f"is not JSON, or over {_MAX_PART_BYTES:,} bytes"
                raise self._bad(self._start + self._at, f"a value that {what} ({problem})")
            self._read()
        text, offset = self._text[self._at : end], self._start + self._at
        self._at = end
        if not text.isascii():
            try:
                value = json.loads(text.encode("latin-1").decode())
            except ValueError as error:
                raise self._bad(offset, f"text that is not UTF-8 ({error})") from error
        return value, offset, len(text)

    def _next(self) -> str:
        """The next letter that is not blank, "" at the end; it stays."""
        while True:
            self._at = _blanks(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text) or self._is_whole:
                return self._text[self._at : self._at + 1]
            self._read()

    def _next_is(self, letter: str) -> bool:
        """Whether the next letter is this one, which is then passed."""
        found = self._next() == letter
        self._at += found
        return found

    def _expect(self, letter: str) -> None:
        if not self._next_is(letter):
            raise self._bad(self._start + self._at, f"{self._next()!r}, expected {letter!r}")

    def _ends(self, letter: str) -> bool:
        """Whether the object or array ends here; else a comma is passed."""
        if self._next_is(letter):
            return True
        self._expect(",")
        return False

    def _read(self) -> None:
        """Drop what is done, and double what is ahead."""
        ahead = self._text[self._at :]
        more = self._file.read(max(_STEP_BYTES, len(ahead)))
        self._is_whole = not more
        self._start, self._at, self._text = self._start + self._at, 0, ahead + more.decode("latin-1")

    def _bad(self, offset: int, found: str) -> SourceError:
        return SourceError(f"{self._path}: byte {offset}: {found}; not a JSON object, or cut short")


# ------------------------------------------------------------------------------
# Annotations of COCO as fields: what a worker makes of the records of one image. See `packer.sources.coco`.


_MAX_MEMBERS = 1 << 20  # points of an outline, or runs of a mask


class CocoFile(NamedTuple):
    """A file of annotations: what kind it is, and its bytes and time when it was listed."""

    kind: str
    path: str
    stamp: tuple[int, int]

    @property
    def has_objects(self) -> bool:
        """Whether an image without annotations in it is known to have none."""
        return self.kind not in ("image_info", "captions")


class CocoReader:
    """Reads images, and makes fields of the records of each.

    files, opened: the files of annotations. fields: names and kinds. classes: the number of each category's id.
    keypoints: of an object.
    """

    def __init__(
        self,
        files: Sequence[CocoFile],
        opened: Sequence[PlainFile],
        fields: Mapping[str, str],
        classes: Mapping[int, int],
        keypoints: int,
    ) -> None:
        self._files, self._opened = files, opened
        self._fields, self._classes, self._keypoints = fields, classes, keypoints

    def read(self, place: tuple[Any, ...], arena: Arena) -> Sequence[Buffer | None]:
        path, size, is_known, *numbers = place
        try:
            image: Buffer = read_file(path, size, arena)
        except BadSampleError as error:
            raise BadSampleError(f"{path!r} {error}") from error
        texts = [(numbers[i], self._text(*numbers[i : i + 3])) for i in range(0, len(numbers), 3)]
        try:
            found = self._values(image, texts, is_known)
        except BadSampleError as error:
            raise BadSampleError(f"{self._files[texts[-1][0]].path}: {error}") from error
        payloads: list[Buffer | None] = [image]
        for name, kind in [*self._fields.items()][1:]:
            payloads.append(encode_field(kind, found[name]) if found.get(name) is not None else None)
        return payloads

    def _text(self, file: int, offset: int, length: int) -> bytes:
        data = bytearray(length)
        self._opened[file].read_into(offset, memoryview(data))
        return bytes(data)

    def _values(self, image: Buffer, texts: Sequence[tuple[int, bytes]], is_known: bool) -> dict[str, Any]:
        """The value of each field, None where there is none. texts: the image's record, then those of annotations."""
        record = _record(texts[0][1])
        size = record.get("height"), record.get("width")
        grid = grid_of(image, size if None not in size else None)
        objects: dict[Any, dict[str, Any]] = {}
        captions: list[str] = []
        by_kind: dict[str, list[bytes]] = {}
        for number, text in texts[1:]:
            by_kind.setdefault(self._files[number].kind, []).append(text)
            annotation = _record(text)
            caption = annotation.get("caption")
            if isinstance(caption, str):
                captions.append(" ".join(caption.split()))
            if annotation.get("bbox"):
                objects.setdefault(annotation.get("id", object()), {}).update(annotation)
        groups = [b'"image":' + texts[0][1], *(b'"%s":[%s]' % (k.encode(), b",".join(v)) for k, v in by_kind.items())]
        values: dict[str, Any] = {"json": b"{" + b",".join(groups) + b"}"}
        if captions:
            values["caption"] = captions
        if is_known:
            values |= self._objects(list(objects.values()), grid)
        return values

    def _objects(self, records: Sequence[Mapping[str, Any]], grid: Grid) -> dict[str, Any]:
        boxes = np.array([numbers_of(record["bbox"], 4, "bbox") for record in records], np.float64).reshape(-1, 4)
        if (boxes[:, 2:] < 0).any():
            raise BadSampleError(
                f"a bbox has a negative width or height: {boxes[(boxes[:, 2:] < 0).any(1)][0].tolist()}"
            )
        boxes[:, 2:] += boxes[:, :2]
        labels = [self._classes[record["category_id"]] for record in records]
        values: dict[str, Any] = {"boxes": grid.boxes(boxes), "box_labels": np.array(labels, np.int64)}
        if "mask" in self._fields:
            drawn = [(label, _pixels(record, grid)) for label, record in zip(labels, records, strict=True)]
            values["mask"] = class_mask([pair for pair in drawn if pair[1] is not None], len(self._classes), grid)
        if "points" in self._fields:
            points = np.full((len(records), self._keypoints, 2), np.nan)
            for row, record in enumerate(records):
                self._fill_points(points[row], record.get("keypoints"))
            values["points"] = grid.points(points)
        return values

    def _fill_points(self, points: Any, keypoints: Any) -> None:
        if keypoints:
            found = np.array(numbers_of(keypoints, len(keypoints), "keypoints"))
            if len(found) % 3 or len(found) > 3 * self._keypoints:
                raise BadSampleError(f"keypoints have {len(found)} numbers, expected x, y and v of each")
            triples = found.reshape(-1, 3)
            labelled = triples[:, 2] > 0
            points[: len(triples)][labelled] = triples[labelled, :2]


def _record(text: bytes) -> dict[str, Any]:
    try:
        record = strict_json(text)
    except ValueError as error:
        raise BadSampleError(f"the record {text[:60]!r} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise SourceError(f"the record {text[:60]!r} is not the one that was listed: the file has changed")
    return record


def numbers_of(value: Any, count: int, what: str) -> list[float]:
    """A list of so many numbers. Raises BadSampleError."""
    good = isinstance(value, list) and len(value) == count <= _MAX_MEMBERS
    if not good or not all(type(number) in (int, float) for number in value):
        raise BadSampleError(f"{what} is {value!r:.60}, expected {count} numbers")
    try:
        return [float(number) for number in value]
    except OverflowError as error:
        raise BadSampleError(f"{what} has a number beyond all images") from error


def _pixels(record: Mapping[str, Any], grid: Grid) -> Any:
    """The pixels of an object, bool [height, width]; None where no outline is given."""
    segmentation = record.get("segmentation")
    if not segmentation:
        return None
    if isinstance(segmentation, dict):
        counts, size = segmentation.get("counts"), segmentation.get("size")
        if size != [grid.height, grid.width]:
            raise BadSampleError(f"a mask of runs is for {size!r:.40}, the image has {[grid.height, grid.width]}")
        if not isinstance(counts, (str, list)):
            raise BadSampleError("a mask of runs has no runs")
        return pixels_of_counts(decode_counts(counts) if isinstance(counts, str) else counts, grid)
    if not isinstance(segmentation, list):
        raise BadSampleError(f"segmentation is {segmentation!r:.40}, expected outlines, or runs with a size")
    pixels = np.zeros((grid.height, grid.width), np.bool_)
    for outline in segmentation:
        length = len(outline) if isinstance(outline, list) else -1
        pixels |= outline_pixels(np.array(numbers_of(outline, length & ~1, "an outline")).reshape(-1, 2), grid)
    return pixels


# ------------------------------------------------------------------------------
# What the files of COCO list, as columns: images, where each annotation is, categories. See `packer.sources.coco`.


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


Texts: TypeAlias = list[str]
_YEAR = re.compile(r"(train|val|test|unlabeled)(?:20\d\d)?")


def open_coco(
    root: str | os.PathLike[str], layout: str = "auto", folder: str | os.PathLike[str] | None = None
) -> CocoSource | FolderSource:
    """The source; with layout="tree" the classes that its folders are then."""
    if layout == "tree" and Path(root).is_dir():
        if folder is not None:
            raise SourceError(f"{root}: folder={os.fspath(folder)!r} is for COCO's annotations, not for layout='tree'")
        return FolderSource(root, layout)
    return CocoSource(root, folder=folder)


class CocoSource:
    """See the module. folder: of the images; None for the usual places."""

    def __init__(self, root: str | os.PathLike[str], *, folder: str | os.PathLike[str] | None = None) -> None:
        self.root = Path(root)
        self.folder = None if folder is None else Path(folder)
        self._files: list[CocoFile] = []
        self._fields: dict[str, str] = {}
        self._categories = CocoCategories(str(root))

    @property
    def title(self) -> str:
        return f"COCO {self.root}"

    def list(self, split: str | None) -> SourceListing:
        parts = coco_files(self.root) if self.root.is_dir() else _alone(self.root)
        if not parts:
            raise SourceError(f"{self.root}: no annotations/{{{','.join(COCO_KINDS)}}}_PART.json in it")
        names = {next(iter(parts)): split} if split and not self.root.is_dir() else _split_names(parts)
        listing = SourceListing({}, {})
        self._files, self._categories = [], CocoCategories(str(self.root))
        found = {}
        for part, paths in parts.items():
            images = self._read(part, paths, listing.warnings)
            if images is not None:
                found[names[part]] = images
        if not found:
            raise SourceError(f"{self.root}: no images; {'; '.join(listing.warnings)}")
        split = wanted_split(split, found, str(self.root))
        listing.classes = self._categories.number()
        listing.fields = self._fields = self._categories.fields()
        stamp = sum(file.stamp[1] for file in self._files)
        for name, images in found.items():
            images.locate(self._categories)
            if split in (None, name):
                listing.splits[name] = images.listing(len(self._fields), stamp)
        listing.left_out = _unlisted(list(found.values()), {file.path for file in self._files})
        if self.root.is_dir() and (folder := self.root / "annotations").is_dir():
            others = sorted(path.name for path in folder.glob("*.json") if COCO_NAME.fullmatch(path.name) is None)
            listing.left_out += [(f"annotations/{name}", "annotations of a kind that is not read") for name in others]
        return listing

    def _read(self, part: str, paths: dict[str, Path], warnings: Texts) -> CocoImages | None:
        """The images of a part and their annotations; None, with a warning, where the images are not there."""
        images = CocoImages(str(self.root))
        before = len(self._files)
        for kind, path in paths.items():
            file = CocoFile(kind, str(path), file_stamp(path))
            images.begin(path, len(self._files), file.has_objects)
            for piece in json_parts(path):
                if piece.member == "categories" and piece.is_element:
                    self._categories.add(piece, path)
                elif piece.member == "images" and piece.is_element:
                    images.add_image(piece)
                elif piece.member == "annotations" and piece.is_element:
                    images.add_annotation(piece, self._categories)
            self._files.append(file)
        folders = self._folders_of(part)
        if images.find(folders):
            return images
        del self._files[before:]
        where = ", ".join(dict.fromkeys(map(str, folders)))
        warnings.append(f"{self.root}: {part} is skipped: its images (such as {images.names[0]!r}) are not in {where}")
        return None

    def _folders_of(self, part: str) -> Sequence[Path]:
        """Where the images of a part may be, the likeliest first."""
        match = _YEAR.fullmatch(part)
        names = [part, *([match[1]] if match else [])]
        if self.folder is not None:
            return [self.folder, *(self.folder / name for name in names)]
        if not self.root.is_dir():
            return [
                above / name for above in (self.root.parent, self.root.parent.parent) for name in ("", "images", *names)
            ]
        below = [self.root / above / name for name in names for above in ("", "images")]
        return [*below, self.root / "images", self.root]

    @contextmanager
    def open(self) -> Iterator[CocoReader]:
        with ExitStack() as opened:
            files = []
            for file in self._files:
                if file_stamp(Path(file.path)) != file.stamp:
                    raise SourceError(f"{file.path}: has changed since it was listed; run the same command again")
                files.append(PlainFile(Path(file.path)))
                opened.callback(files[-1].close)
            yield CocoReader(self._files, files, self._fields, self._categories.classes, self._categories.keypoints)

    def paths(self, listing: SourceListing) -> Iterator[str]:
        yield from (file.path for file in self._files)
        for part in listing.splits.values():
            yield from (place[0] for place in part.places)


def _alone(path: Path) -> dict[str, dict[str, Path]]:
    """A file by itself, as if it were in annotations."""
    match = COCO_NAME.fullmatch(path.name)
    if match is not None:
        return {match[2]: {match[1]: path}}
    return {path.parent.name if path.name == ROBOFLOW else path.stem: {"annotations": path}}


def _split_names(parts: dict[str, dict[str, Path]]) -> dict[str, str]:
    """The split of each part."""
    if len(parts) == 1:
        return {part: split_of_name(part) if _YEAR.fullmatch(part) is None else _plain(part) for part in parts}
    plain = [_plain(part) for part in parts]
    return {part: part if plain.count(_plain(part)) > 1 else _plain(part) for part in parts}


def _plain(part: str) -> str:
    match = _YEAR.fullmatch(part)
    return match[1] if match else part


def _unlisted(parts: list[CocoImages], files: set[str]) -> list[tuple[str, str]]:
    """Files in the folders of images that no list names."""
    named: dict[Path, set[str]] = {}
    for images in parts:
        named.setdefault(images.folder, set()).update(images.names)
    found = []
    for folder, names in named.items():
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            is_image = has_image_suffix(entry.name) and entry.name not in names
            if is_image and entry.path not in files:
                found.append((entry.name.encode(errors="backslashreplace").decode(), "not in the annotations"))
    return found
