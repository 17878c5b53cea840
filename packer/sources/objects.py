"""The base class of sources of annotated images, with boxes, points and outlines, and the pixel grids they refer to.

    stored       the pixels as stored in the file, which most annotations refer to
    displayed    the pixels after the EXIF orientation, which the boxes, points and masks of a packed set refer to
                 (`readers.fields`)

The image size in an annotation tells which grid it refers to. If that is ambiguous (no size, or an orientation that
keeps height and width), it is the stored grid, because libraries that ignore EXIF decode to it. If the size fits
neither grid, the sample is bad.

Coordinates run from 0 at the left edge of the first pixel to the width at the right edge of the last. A pixel is inside
an outline if its centre is, by the even-odd rule.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeAlias
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError
from packer.formats.base import Arena
from packer.sources.base import FileSource, ListingBuilder, SourceListing, check_names, of_sample, size_and_time
from packer.sources.folder import read_named
from readers.decode.region import upright
from readers.fields import encode_field
from readers.headers import ImageHeader, read_header
from readers.headers.base import MAX_PIXELS
from readers.opening.tree import unique_keys
from readers.table import Buffer

__all__ = [
    "MAX_XML_BYTES",
    "AnnotatedSource",
    "File",
    "Grid",
    "XmlObjects",
    "class_mask",
    "decode_counts",
    "displayed_grid",
    "grid_of",
    "outline_pixels",
    "parse_objects",
    "pixels_of_counts",
]


Floats = npt.NDArray[np.float64]
Pixels = npt.NDArray[np.bool_]

_MAX_COORDINATE = float(1 << 20)
_IGNORED = 255  # the usual value of pixels to be ignored


File: TypeAlias = "tuple[str, int] | None"
"""The path of a file, from the root, and its bytes, -1 where it cannot be examined."""


class AnnotatedSource(FileSource):
    """A source of image files with annotations. `list_files` sets `fields` (name -> kind) and calls `add` per split.

    Place: (the files of the sample, the image first; whatever else `values` needs).
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__(root)
        self.fields: dict[str, str] = {}

    @abstractmethod
    def values(self, image: Buffer, files: Sequence[Buffer | None], place: Any) -> Mapping[str, Any]:
        """The fields of a sample except the image, as bytes or as input of `encode_field`. Raises BadSampleError.

        files: the contents of the sample's other files. place: its place, with all that was listed for it.
        """

    def file(self, path: str, stamps: list[int]) -> File:
        """A file of a sample; its modification time is appended to `stamps`."""
        size, time = size_and_time(self.root / path)
        stamps.append(time)
        return path, size

    def add(
        self,
        listing: SourceListing,
        split: str,
        samples: Iterator[tuple[Mapping[str, str], Sequence[File], Any, int, Sequence[int]]],
        root: str = "",
    ) -> None:
        """Add a split to the listing.

        samples: of each, the names of its fields, its files, the rest of its place, its size without the files, and
        the modification times.
        """
        builder = ListingBuilder(len(self.fields))
        for names, files, place, more_bytes, times in samples:
            size = sum(max(0, file[1]) for file in files if file is not None) + more_bytes
            of_fields = [names.get(name, "") for name in self.fields]
            builder.add(of_fields, (tuple(files), place), size, *times)
        part = builder.build(root)
        check_names((name for names in part.names for name in names if name), str(self.root))
        part.keys = unique_keys(part.names.columns[0])
        listing.splits[split] = part

    def paths(self, listing: SourceListing) -> Iterator[str | os.PathLike[str]]:
        yield from self._stamps
        for part in listing.splits.values():
            for files, _ in part.places:
                yield from (self.root / file[0] for file in files if file is not None)

    def open_files(self) -> AbstractContextManager[AnnotatedSource]:
        return nullcontext(self)

    def read(self, place: tuple[Sequence[File], Any], arena: Arena) -> Sequence[Buffer | None]:
        files = [None if file is None else read_named(self.root, *file, arena) for file in place[0]]
        image = files[0]
        assert image is not None
        with of_sample(next((file[0] for file in place[0][1:] if file is not None), str(self.root))):
            values = self.values(image, files[1:], place)
            return [image, *(
                None if values.get(name) is None else encode_field(kind, values[name])
                for name, kind in [*self.fields.items()][1:]
            )]  # fmt: skip


class Grid(NamedTuple):
    """The pixel grid that annotations refer to, and the EXIF orientation that turns it into the displayed image."""

    height: int
    width: int
    orientation: int

    def points(self, points: Floats) -> npt.NDArray[np.float32]:
        """Points [..., 2] of this grid, in the displayed image."""
        x, y = points[..., 0], points[..., 1]
        if self.orientation >= 5:
            mirrored_x, mirrored_y = self.orientation in (6, 7), self.orientation in (7, 8)
            x, y = (self.height - y if mirrored_x else y), (self.width - x if mirrored_y else x)
        else:
            mirrored_x, mirrored_y = self.orientation in (2, 3), self.orientation in (3, 4)
            x, y = (self.width - x if mirrored_x else x), (self.height - y if mirrored_y else y)
        return np.stack([x, y], -1).astype(np.float32)

    def boxes(self, boxes: Floats) -> npt.NDArray[np.float32]:
        """Boxes [k, 4] of this grid (two corners each), in the displayed image.

        Raises BadSampleError for a box outside of the image.
        """
        self._check_boxes(boxes)
        corners = self.points(boxes.reshape(-1, 2, 2))
        return np.concatenate([corners.min(1), corners.max(1)], 1)

    def mask(self, mask: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A mask [height, width] of this grid, for the displayed image."""
        return upright(mask, self.orientation)

    def _check_boxes(self, boxes: Floats) -> None:
        good = np.isfinite(boxes).all(1) & np.all(boxes[:, :2] <= boxes[:, 2:], axis=1)
        with np.errstate(invalid="ignore"):
            inside = (boxes[:, :2] <= (self.width, self.height)).all(1) & (boxes[:, 2:] >= 0).all(1)
        for row in np.flatnonzero(~(good & inside))[:1].tolist():
            problem = f"outside of the image of {self.width} x {self.height}" if good[row] else "not a box"
            raise BadSampleError(f"object {row} has the corners {boxes[row].tolist()}: {problem}")


def grid_of(image: Buffer, size: tuple[Any, Any] | None) -> Grid:
    """The grid that annotations refer to. size: the (height, width) they state, if any. Raises BadSampleError."""
    header = _header_of(image)
    stored = (header.height, header.width)
    if size is None or size == stored:
        return Grid(*stored, header.orientation)
    if size != header.upright_size:
        raise BadSampleError(
            f"has {stored[1]} x {stored[0]} pixels, but its annotations are for {size[1]!r:.20} x {size[0]!r:.20}; was "
            f"it resized?"
        )
    return Grid(*header.upright_size, 1)


def displayed_grid(image: Buffer) -> Grid:
    """The grid of the displayed image. Raises BadSampleError."""
    return Grid(*_header_of(image).upright_size, 1)


def _header_of(image: Buffer) -> ImageHeader:
    header = read_header(image)
    if header.height * header.width > MAX_PIXELS:
        raise BadSampleError(f"has {header.width} x {header.height} pixels, expected at most {MAX_PIXELS:,} of them")
    return header


def outline_pixels(outline: Floats, grid: Grid) -> Pixels:
    """The pixels inside a closed outline [n, 2], bool [height, width]. Raises BadSampleError for an invalid outline."""
    if len(outline) < 3 or not (np.abs(outline) <= _MAX_COORDINATE).all():
        raise BadSampleError(f"an outline of {len(outline)} points has under 3, or lies far outside the image")
    x, y = outline[:, 0] - 0.5, outline[:, 1] - 0.5  # puts the centres of pixels at whole numbers
    next_x, next_y = np.roll(x, -1), np.roll(y, -1)
    bounds = np.ceil([np.minimum(y, next_y), np.maximum(y, next_y)])
    first, stop = np.clip(bounds, 0, grid.height).astype(np.int64)
    rows_of_edge = stop - first
    edge = np.repeat(np.arange(len(x)), rows_of_edge)
    row = np.arange(len(edge)) + np.repeat(first - np.cumsum(rows_of_edge) + rows_of_edge, rows_of_edge)
    crossing = x[edge] + (row - y[edge]) * ((next_x - x)[edge] / (next_y - y)[edge])
    column = np.ceil(np.clip(crossing, 0, grid.width)).astype(np.int64)
    pixels = np.zeros((grid.height, grid.width), np.bool_)
    if not len(row):
        return pixels
    top, left, right = int(row.min()), int(column.min()), int(column.max())
    shape = (int(row.max()) + 1 - top, right + 1 - left)
    changes = np.bincount((row - top) * shape[1] + column - left, minlength=shape[0] * shape[1]).reshape(shape)
    pixels[top : top + shape[0], left:right] = np.cumsum(changes, 1)[:, :-1] % 2 == 1
    return pixels


def pixels_of_counts(counts: Sequence[int], grid: Grid) -> Pixels:
    """Decode a run-length encoded mask: runs of pixels outside and inside in turn, column by column.

    Raises BadSampleError.
    """
    runs = np.array(counts, np.int64) if all(type(n) is int and 0 <= n <= MAX_PIXELS for n in counts) else None
    total = grid.height * grid.width
    if runs is None or int(runs.sum()) != total:
        raise BadSampleError(f"a mask of runs does not have the {total:,} pixels of the image: damaged")
    inside = np.arange(len(runs)) % 2 == 1
    pixels: Pixels = np.repeat(inside, runs).reshape(grid.width, grid.height).T
    return pixels


def decode_counts(text: str) -> list[int]:
    """Decode the run lengths of COCO's compressed text: five bits per character from "0" on, the lowest bits first.

    Bit 5 means that more characters follow; bit 4 of the last one is the sign. From the fourth number on, each is the
    difference from the length two places before. Raises BadSampleError.
    """
    counts: list[int] = []
    value = shift = 0
    for letter in text.encode("latin-1", "replace"):
        bits = letter - 48
        if not 0 <= bits < 64 or shift > 30:
            raise BadSampleError("a mask of runs has invalid letters: damaged")
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            value -= (1 << shift) if bits & 16 else 0
            counts.append(value + (counts[-2] if len(counts) > 2 else 0))
            value = shift = 0
    if shift:
        raise BadSampleError("a mask of runs ends inside a number: damaged")
    return counts


def class_mask(objects: Sequence[tuple[int, Pixels]], classes: int, grid: Grid) -> npt.NDArray[Any]:
    """A class mask: 0 for background, else the class number plus 1; smaller objects are drawn over larger ones."""
    mask = np.zeros((grid.height, grid.width), np.uint8 if classes < _IGNORED else np.uint16)
    for number, pixels in sorted(objects, key=lambda item: -int(item[1].sum())):
        mask[pixels] = number + 1
    return grid.mask(mask)


# ------------------------------------------------------------------------------
# Pascal VOC annotations: one XML file per image, with named objects and their boxes.
#
#     <annotation>
#       <size><width>500</width><height>375</height><depth>3</depth></size>
#       <object><name>dog</name><bndbox><xmin>8</xmin><ymin>11</ymin><xmax>300</xmax><ymax>98</ymax></bndbox></object> …
#
# Annotations have no document type. A file that declares one is refused, since only there can entities be defined that
# expand without bound.


MAX_XML_BYTES = 16 << 20
_CORNERS = ("xmin", "ymin", "xmax", "ymax")


class XmlObjects(NamedTuple):
    """The content of an annotation.

    record: everything: an element is its text, or a mapping of its children. Children of the same name are a list;
    those called object always are.
    size: (height, width) of the image, None if it is missing or 0.
    names, corners: of the objects; the corners are float64 [k, 4], as written.
    """

    record: dict[str, Any]
    size: tuple[int, int] | None
    names: list[str]
    corners: Floats


def parse_objects(data: bytes) -> XmlObjects:
    """Parse an annotation. Raises BadSampleError."""
    if b"<!DOCTYPE" in data or len(data) > MAX_XML_BYTES:
        raise BadSampleError(f"declares a document type or entities, or has over {MAX_XML_BYTES:,} bytes")
    try:
        record = _value_of(ElementTree.fromstring(data))
    except (ElementTree.ParseError, ValueError, LookupError, RecursionError) as error:
        raise BadSampleError(f"is not XML: {error}") from error
    if not isinstance(record, dict):
        raise BadSampleError("is not an annotation: its root holds no elements")
    objects = record.setdefault("object", [])
    record["object"] = objects = objects if isinstance(objects, list) else [objects]
    names, corners = [], []
    for item in objects:
        name, box = (item.get("name"), item.get("bndbox")) if isinstance(item, dict) else (None, None)
        if not isinstance(name, str) or not name or not isinstance(box, dict):
            raise BadSampleError("an object has no name, or not exactly one bndbox")
        names.append(name)
        corners.append([_number(box.get(corner), corner) for corner in _CORNERS])
    size = record.get("size")
    sides = [int(_number(size.get(name, "0"), name)) for name in ("height", "width")] if isinstance(size, dict) else [0]
    known = (sides[0], sides[-1]) if min(sides) >= 1 else None
    return XmlObjects(record, known, names, np.array(corners, np.float64).reshape(-1, 4))


def _value_of(element: ElementTree.Element) -> Any:
    """The text of an element, or a mapping of its children, in which several of the same name are a list."""
    children: dict[str, list[Any]] = {}
    for child in element:
        children.setdefault(child.tag, []).append(_value_of(child))
    if not children:
        return (element.text or "").strip()
    return {name: values if len(values) > 1 else values[0] for name, values in children.items()}


def _number(text: Any, subject: str) -> float:
    try:
        value = float(text)
    except (TypeError, ValueError):
        value = float("nan")
    if not abs(value) < 1 << 32:
        raise BadSampleError(f"{subject} is {text!r:.40}, expected a number of pixels")
    return value
