"""COCO: images, and JSON files that annotate them.

    annotations/<kind>_<part>.json    kinds: instances, person_keypoints, captions, image_info; parts: train2017, …
    <part>/, images/<part>/           the images of a part
    <part>/_annotations.coco.json     as Roboflow exports it: annotations next to the images, in train, valid and test
    x.json                            a single file; its images are in `folder`, or next to it

A part is a split: train2017 is called train, unless there are several of train. Parts without images are skipped with a
warning. Every listed image is a sample, even without annotations.

    image         unchanged
    boxes         of every annotation with a bbox, crowds included, in the order of the file: x, y, width, height
    box_labels    int64 [k]: the class; classes are the categories of all files by ascending id
    mask          classes as painted by `packer.sources.objects.class_mask`, if any file has segmentations
    points        float32 [k, n, 2], for the rows of boxes, NaN for an unlabelled keypoint, if any file has keypoints
    caption       one per line
    json          the original records: {"image": {…}, "instances": [{…}], "captions": …}, by the kind of their file

Listing reads each file once, part by part, and keeps only the position of an annotation; workers read it there. Place:
the image; whether its objects are known, and for its record and each annotation: file, offset, length.
"""

from __future__ import annotations

import json
import os
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from cache.errors import BadSampleError, SourceError
from cache.files import open_regular
from packer.sources.base import SourceListing, checked_name, refusing, wanted_split
from packer.sources.layouts import COCO_KINDS, COCO_NAME, ROBOFLOW, coco_files
from packer.sources.objects import (
    AnnotatedSource,
    Grid,
    class_mask,
    decode_counts,
    grid_of,
    outline_pixels,
    pixels_of_counts,
)
from packer.sources.shards import split_of_name
from packer.sources.streams import PlainFile
from readers.layout import RelativePath
from readers.opening.tree import has_image_suffix
from readers.table import Buffer, repeated

__all__ = ["CocoSource", "json_parts"]


# ------------------------------------------------------------------------------
# Streaming a large JSON file: the elements of the arrays at its top level, and its other members, one at a time.
#
#     {"images": [{…}, {…}], "categories": [{…}], "info": {…}}   gives images {…}, images {…}, categories {…}, info {…}
#
# So a file of half a gigabyte takes the memory of its largest part. A part records the position of its bytes in the
# file, for reading it again later. Members may come in any order, and one that occurs twice is an error.


_STEP_BYTES = 1 << 20
_MAX_PART_BYTES = 64 << 20
_blanks = re.compile(r"[ \t\r\n]*").match


class JsonPart(NamedTuple):
    """The value of a member, or an element of a member that is an array; its bytes are [offset, offset + length).

    is_element: whether it is an element.
    """

    member: str
    value: Any
    offset: int
    length: int
    is_element: bool


def json_parts(path: Path) -> Iterator[JsonPart]:
    """The parts of the object in a file. Raises SourceError if it is not an object, or if a part is over 64 MiB."""
    with refusing(path), open_regular(path) as file:
        yield from _Text(path, file).parts()


class _Text:
    """A window of the file: one character per byte, so that positions are offsets."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._text, self._start, self._at = "", 0, 0  # characters, offset of the first, position of the next
        self._is_whole = False
        self._decoder = json.JSONDecoder()

    def parts(self) -> Iterator[JsonPart]:
        seen: set[str] = set()
        for _ in self._items("{", "}"):
            name, *_ = self._value()
            if not isinstance(name, str) or name in seen:
                raise self._bad(f"{name!r:.40} where a new name of a member should be")
            seen.add(name)
            self._take(":")
            if self._next() == "[":
                for _ in self._items("[", "]"):
                    yield JsonPart(name, *self._value(), True)
            else:
                yield JsonPart(name, *self._value(), False)
        if self._next():
            raise self._bad("more than one value")

    def _items(self, first: str, last: str) -> Iterator[None]:
        """Iterate over items; stops before each."""
        self._take(first)
        if self._next() != last:
            yield
            while self._next() == ",":
                self._at += 1
                yield
        self._take(last)

    def _take(self, letter: str) -> None:
        if self._next() != letter:
            raise self._bad(f"{self._next()!r}, expected {letter!r}")
        self._at += 1

    def _value(self) -> tuple[Any, int, int]:
        """(value, offset, bytes) of the next value."""
        self._next()
        while True:
            problem: Exception | None = None
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
                if end < len(self._text) or self._is_whole:  # else a number may continue after the window
                    break
            except (ValueError, RecursionError) as error:
                problem = error
            if self._is_whole or len(self._text) - self._at > _MAX_PART_BYTES or isinstance(problem, RecursionError):
                raise self._bad(f"a value that is not JSON, or over {_MAX_PART_BYTES:,} bytes ({problem})")
            self._read()
        text, offset = self._text[self._at : end], self._start + self._at
        self._at = end
        if not text.isascii():
            try:
                value = json.loads(text.encode("latin-1"))
            except ValueError as error:
                raise self._bad(f"text that is not UTF-8 ({error})") from error
        return value, offset, len(text)

    def _next(self) -> str:
        """The next character that is not blank, "" at the end, without consuming it."""
        while True:
            self._at = _blanks(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text) or self._is_whole:
                return self._text[self._at : self._at + 1]
            self._read()

    def _read(self) -> None:
        """Drop the parsed part of the window, and double the rest."""
        ahead = self._text[self._at :]
        more = self._file.read(max(_STEP_BYTES, len(ahead)))
        self._is_whole = not more
        self._start, self._at, self._text = self._start + self._at, 0, ahead + more.decode("latin-1")

    def _bad(self, problem: str) -> SourceError:
        return SourceError(f"{self._path}: byte {self._start + self._at}: {problem}; not a JSON object, or cut short")


# ------------------------------------------------------------------------------
# The listed data, as columns: images, and the position of each annotation.


_MAX_CLASSES = 65_534  # a mask has 16 bits
_MAX_KEYPOINTS = 1024
_MAX_MEMBERS = 1 << 20  # points of an outline, or runs of a mask
_LOOKED_AT = 20
_NO_ID = -(1 << 63)
_KINDS = {"image": "image", "boxes": "boxes", "box_labels": "array", "mask": "mask", "points": "points",
          "caption": "text", "json": "json"}  # fmt: skip
_YEAR = re.compile(r"(train|val|test|unlabeled)(?:20\d\d)?")
_UNKNOWN = ("image_info", "captions")  # kinds of files without information about objects


class _Part:
    """The images of a part, and the positions of their records.

    names: relative to `folder`, in the order of the lists.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.folder = Path()
        self.rows: dict[int, int] = {}  # by id
        self.records = array("q")  # file, offset and length of each image
        self.notes = array("q")  # image id, file, offset, length, category or _NO_ID, own id or _NO_ID
        self.known = bytearray()
        self._lists = array("q")  # the file that listed each image last

    def add(self, part: JsonPart, path: Path, file: int, is_known: bool) -> None:
        """Add an image of a file; is_known: whether the file states the objects of each of its images."""
        number = _id(part, "id", path)
        name = part.value.get("file_name")
        where = f"{path}: byte {part.offset}: {part.member}: file_name"
        name = str(checked_name(RelativePath, name if isinstance(name, str) else "", where))
        row = self.rows.setdefault(number, len(self.names))
        if row == len(self.names):
            self.names.append(name)
            self.records.extend((file, part.offset, part.length))
            self._lists.append(file)
            self.known.append(is_known)
        elif self._lists[row] == file or self.names[row] != name:
            raise _bad(path, part, f"the image {number} for the second time, {self.names[row]!r} before")
        self._lists[row] = file
        self.known[row] |= is_known

    def locate(self, classes: Mapping[int, int], where: object, files: Sequence[tuple[str, Path]]) -> list[Any]:
        """For each image the files, offsets and lengths of its annotations. files: (kind, path) by number.

        Raises SourceError for an annotation of an unknown image or category, and for duplicates.
        """
        for row in repeated(lambda: self.names, len(self.names)).tolist():
            if self.names.index(self.names[row]) != row:
                raise SourceError(f"{where}: two images have the file_name {self.names[row]!r}; a set holds each once")
        notes = np.frombuffer(self.notes, np.int64).reshape(-1, 6)
        ids = np.fromiter(self.rows, np.int64, len(self.rows))
        order = np.argsort(ids)
        rows = order[np.minimum(np.searchsorted(ids, notes[:, 0], sorter=order), len(ids) - 1)]
        by_id = np.lexsort((notes[:, 5], notes[:, 1]))
        pairs = notes[by_id][:, (1, 5)]
        twice = np.zeros(len(notes), np.bool_)
        twice[by_id[1:]] = (pairs[1:] == pairs[:-1]).all(1) & (pairs[1:, 1] != _NO_ID)
        for wrong, why in (
            (ids[rows] != notes[:, 0], "is of the image {0}, which is not listed"),
            (~np.isin(notes[:, 4], [*classes, _NO_ID]), "is of the category {4}, which is not listed"),
            (twice, "has the id {5}, as another one has"),
        ):
            if wrong.any():
                first = notes[np.argmax(wrong)].tolist()
                path = files[first[1]][1]
                raise SourceError(f"{path}: the annotation at byte {first[2]} {why.format(*first)}")
        order = np.argsort(rows, kind="stable")
        ends = np.searchsorted(rows[order], np.arange(len(ids) + 1))
        return [notes[order[a:b], 1:4] for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]


def _id(part: JsonPart, member: str, path: Path) -> int:
    value = part.value.get(member) if isinstance(part.value, dict) else None
    if type(value) is not int or abs(value) >= 1 << 62:
        raise _bad(path, part, f"{member} is {value!r:.40}, expected a whole number")
    return value


def _bad(path: Path, part: JsonPart, problem: str) -> SourceError:
    return SourceError(f"{path}: byte {part.offset}: {part.member}: {problem}")


class CocoSource(AnnotatedSource):
    """See the module. folder: of the images; None for the usual places."""

    kind = "COCO"

    def __init__(self, root: str | os.PathLike[str], *, folder: str | os.PathLike[str] | None = None) -> None:
        super().__init__(root)
        self.folder = None if folder is None else Path(folder)
        self._files: list[tuple[str, Path]] = []  # (kind, path)
        self._opened: list[PlainFile] = []
        self._classes: dict[int, int] = {}  # class number by category id
        self._keypoints = 0

    def list_files(self, split: str | None) -> SourceListing:
        parts = coco_files(self.root) if self.root.is_dir() else _alone(self.root)
        if not parts:
            raise SourceError(f"{self.root}: no annotations/{{{','.join(COCO_KINDS)}}}_PART.json in it")
        split_of = {next(iter(parts)): split} if split and not self.root.is_dir() else _split_names(parts)
        listing = SourceListing({}, {})
        self._files, self._keypoints, names = [], 0, dict[int, str]()
        has = {"image", "json"}
        splits = {}
        for part, paths in parts.items():
            images = self._read(part, paths, names, has, listing.warnings)
            if images is not None:
                splits[split_of[part]] = images
        if not splits:
            raise SourceError(f"{self.root}: no images; {'; '.join(listing.warnings)}")
        self._classes = {number: place for place, number in enumerate(sorted(names))}
        listing.classes = tuple(names[number] for number in self._classes)
        twice = next((name for name in listing.classes if listing.classes.count(name) > 1), None)
        if twice is not None or len(names) > _MAX_CLASSES or self._keypoints > _MAX_KEYPOINTS:
            problem = f"{len(names):,} categories, {self._keypoints:,} keypoints" if twice is None else ""
            raise SourceError(
                f"{self.root}: {problem or f'two categories are called {twice!r}'}; expected different names, at most "
                f"{_MAX_CLASSES:,} and {_MAX_KEYPOINTS:,}"
            )
        listing.fields = self.fields = {name: kind for name, kind in _KINDS.items() if name in has}
        chosen = wanted_split(split, splits, str(self.root))
        for name, images in splits.items():
            notes = images.locate(self._classes, self.root, self._files)
            if chosen in (None, name):
                self.add(listing, str(name), self._samples(images, notes))
        listing.left_out = self._unlisted([*splits.values()])
        return listing

    def _read(
        self, part: str, paths: Mapping[str, Path], names: dict[int, str], has: set[str], warnings: list[str]
    ) -> _Part | None:
        """The images of a part and their annotations; None, with a warning, if the images are missing.

        names: of the categories, by id; those of these files are added. has: the fields that any image has.
        """
        images, before = _Part(), len(self._files)
        for kind, path in paths.items():
            number = len(self._files)
            self._files.append((kind, self.note(path)))
            for piece in json_parts(path):
                if piece.member == "categories" and piece.is_element:
                    own, name = _id(piece, "id", path), piece.value.get("name")
                    if not isinstance(name, str) or not name or not name.isprintable():
                        raise _bad(path, piece, f"a category called {name!r:.40}")
                    if names.setdefault(own, name) != name:
                        raise _bad(path, piece, f"the category {own} is {name!r:.40} here, {names[own]!r:.40} before")
                elif piece.member == "images" and piece.is_element:
                    images.add(piece, path, number, kind not in _UNKNOWN)
                elif piece.member == "annotations" and piece.is_element:
                    self._add_note(images, piece, path, number, has)
        if not images.names:
            raise SourceError(f"{next(iter(paths.values()))}: lists no images; not a COCO file")
        folders = self._folders_of(part)
        for folder in folders:
            if any((folder / name).exists() for name in images.names[:_LOOKED_AT]):
                images.folder = folder
                return images
        for _, path in self._files[before:]:
            self._stamps.pop(path)
        del self._files[before:]
        where = ", ".join(dict.fromkeys(map(str, folders)))
        warnings.append(f"{self.root}: {part} is skipped: its images (such as {images.names[0]!r}) are not in {where}")
        return None

    def _add_note(self, images: _Part, part: JsonPart, path: Path, file: int, has: set[str]) -> None:
        image, value = _id(part, "image_id", path), part.value
        if value.get("segmentation") and not value.get("bbox"):
            raise _bad(path, part, "a segmentation without a bbox")
        category = _id(part, "category_id", path) if value.get("bbox") else _NO_ID
        own = _id(part, "id", path) if "id" in value else _NO_ID
        images.notes.extend((image, file, part.offset, part.length, category, own))
        has |= {"caption"} if value.get("caption") else set()
        if value.get("bbox"):
            has |= {"boxes", "box_labels"} | ({"mask"} if value.get("segmentation") else set())
            keypoints = value.get("keypoints")
            if isinstance(keypoints, list) and keypoints:
                has.add("points")
                self._keypoints = max(self._keypoints, len(keypoints) // 3)

    def _folders_of(self, part: str) -> Sequence[Path]:
        """Possible folders of the images of a part, the likeliest first."""
        names = dict.fromkeys((part, _plain(part)))
        if self.folder is not None:
            return [self.folder, *(self.folder / name for name in names)]
        if not self.root.is_dir():
            above = (self.root.parent, self.root.parent.parent)
            return [folder / name for folder in above for name in ("", "images", *names)]
        below = [self.root / above / name for name in names for above in ("", "images")]
        return [*below, self.root / "images", self.root]

    def _samples(self, images: _Part, notes: Sequence[Any]) -> Iterator[Any]:
        for row, (name, objects) in enumerate(zip(images.names, notes, strict=True)):
            times: list[int] = []
            file = self.file(os.path.join(images.folder, name), times)
            record = images.records[3 * row : 3 * row + 3].tolist()
            place = (bool(images.known[row]), *record, *objects.ravel().tolist())
            yield {"image": name}, [file], place, record[2] + int(objects[:, 2].sum()), times

    def file(self, path: str, stamps: list[int]) -> Any:
        return super().file(os.path.abspath(path), stamps)

    def _unlisted(self, parts: Sequence[_Part]) -> list[tuple[str, str]]:
        """Files in the folders of images that no list names, and annotation files that are not read."""
        named: dict[Path, set[str]] = {}
        for images in parts:
            named.setdefault(images.folder, set()).update(images.names)
        left_out = []
        for folder, names in named.items():
            for name in sorted(os.listdir(folder)):
                if has_image_suffix(name) and name not in names:
                    left_out.append((name.encode(errors="backslashreplace").decode(), "not in the annotations"))
        others = sorted(path.name for path in (self.root / "annotations").glob("*.json"))
        reason = "unsupported kind of annotations"
        return left_out + [(f"annotations/{name}", reason) for name in others if not COCO_NAME.fullmatch(name)]

    @contextmanager
    def open_files(self) -> Iterator[CocoSource]:
        with ExitStack() as opened:
            self._opened = [opened.enter_context(PlainFile(path)) for _, path in self._files]
            yield self
        self._opened = []

    # --- the fields of a sample ---
    def values(self, image: Buffer, files: Sequence[Buffer | None], place: Any) -> Mapping[str, Any]:
        is_known, *numbers = place[1]
        at = zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
        texts = [(number, self._opened[number].read(offset, length)) for number, offset, length in at]
        record = _record(texts[0][1])
        size = record.get("height"), record.get("width")
        grid = grid_of(image, size if None not in size else None)
        objects: dict[Any, dict[str, Any]] = {}
        captions: list[str] = []
        by_kind: dict[str, list[bytes]] = {}
        for number, text in texts[1:]:
            by_kind.setdefault(self._files[number][0], []).append(text)
            annotation = _record(text)
            caption = annotation.get("caption")
            if isinstance(caption, str):
                captions.append(" ".join(caption.split()))
            if annotation.get("bbox"):
                objects.setdefault(annotation.get("id", object()), {}).update(annotation)
        groups = [b'"image":' + texts[0][1], *(b'"%s":[%s]' % (k.encode(), b",".join(v)) for k, v in by_kind.items())]
        values = {"json": b"{" + b",".join(groups) + b"}", "caption": captions or None}
        return values | (self._objects(list(objects.values()), grid) if is_known else {})

    def _objects(self, records: Sequence[Mapping[str, Any]], grid: Grid) -> dict[str, Any]:
        boxes = np.array([_numbers(record["bbox"], 4, "bbox") for record in records], np.float64).reshape(-1, 4)
        if (negative := (boxes[:, 2:] < 0).any(1)).any():
            raise BadSampleError(f"a bbox has a negative width or height: {boxes[negative][0].tolist()}")
        boxes[:, 2:] += boxes[:, :2]
        labels = [self._classes[record["category_id"]] for record in records]
        values: dict[str, Any] = {"boxes": grid.boxes(boxes), "box_labels": np.array(labels, np.int64)}
        if "mask" in self.fields:
            drawn = [(label, _pixels(record, grid)) for label, record in zip(labels, records, strict=True)]
            values["mask"] = class_mask([pair for pair in drawn if pair[1] is not None], len(self._classes), grid)
        if "points" in self.fields:
            points = np.full((len(records), self._keypoints, 2), np.nan)
            for row, record in enumerate(records):
                keypoints = record.get("keypoints") or []
                numbers = _numbers(keypoints, len(keypoints) // 3 * 3, "keypoints (x, y and v of each)")
                triples = np.array(numbers).reshape(-1, 3)
                labelled = np.flatnonzero(triples[:, 2] > 0)
                points[row, labelled] = triples[labelled, :2]
            values["points"] = grid.points(points)
        return values


def _alone(path: Path) -> dict[str, dict[str, Path]]:
    """A single file, treated like one in annotations."""
    match = COCO_NAME.fullmatch(path.name)
    if match is not None:
        return {match[2]: {match[1]: path}}
    return {path.parent.name if path.name == ROBOFLOW else path.stem: {"annotations": path}}


def _split_names(parts: Mapping[str, Any]) -> dict[str, str]:
    """The split of each part."""
    plain = {part: _plain(part) for part in parts}
    if len(parts) == 1:
        return {part: name if _YEAR.fullmatch(part) else split_of_name(part) for part, name in plain.items()}
    return {part: part if [*plain.values()].count(name) > 1 else name for part, name in plain.items()}


def _plain(part: str) -> str:
    match = _YEAR.fullmatch(part)
    return match[1] if match else part


def _record(text: bytes) -> dict[str, Any]:
    """Parse a record; NaN and Infinity are refused, since they are not JSON."""
    try:
        record = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise BadSampleError(f"the record {text[:60]!r} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise SourceError(f"the record {text[:60]!r} is not the one that was listed: the file has changed")
    return record


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _numbers(value: Any, count: int, subject: str) -> list[float]:
    """A list of `count` numbers. Raises BadSampleError."""
    good = isinstance(value, list) and len(value) == count <= _MAX_MEMBERS
    if not good or not all(type(number) in (int, float) for number in value):
        raise BadSampleError(f"{subject} is {value!r:.60}, expected {count} numbers")
    try:
        return [float(number) for number in value]
    except OverflowError as error:
        raise BadSampleError(f"{subject} has a number beyond all images") from error


def _pixels(record: Mapping[str, Any], grid: Grid) -> Any:
    """The pixels of an object, bool [height, width]; None if it has no outline."""
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
        pixels |= outline_pixels(np.array(_numbers(outline, length & ~1, "an outline")).reshape(-1, 2), grid)
    return pixels
