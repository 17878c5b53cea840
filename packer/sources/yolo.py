"""Sets for YOLO: images, and a text file for each with a line an object.

    images/train/1.jpg, labels/train/1.txt     or  train/images/1.jpg, train/labels/1.txt,  or without splits
    data.yaml                                  names: the classes, a list or by number; kpt_shape: [n, 2 or 3] of poses
    classes.txt                                the names, one a line, without a data.yaml

A line has a class number and parts of the width and height of the image as it is displayed:

    5 numbers              class, centre x and y, width, height
    7 and more, odd        class, x and y of an outline of three points or more; its box is the smallest around it
    with kpt_shape         class, centre x and y, width, height, then x, y (and whether it is labelled) of n points

    image         as it is
    boxes         in pixels
    box_labels    int64 [k]
    mask          classes as `packer.sources.objects.class_mask` paints them, where any file has outlines
    points        float32 [k, n, 2], NaN where a point is not labelled, where data.yaml has a kpt_shape
    json          {"outlines": [[[x, y], …] or null for each box]} in pixels, where any file has outlines

An image without a label file has no objects, as in training with YOLO; in a split without labels they are not known.
The paths in data.yaml are not followed: the folders say which image is in which split.

Place: path and bytes of the image, and of its labels; path None where there are none, bytes -1 where they are unknown.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cache.errors import BadSampleError, MissingExtraError, SourceError
from cache.files import read_regular
from cache.messages import plural
from cache.node import usable_cpus
from packer.formats.base import Arena
from packer.sources.base import ListingBuilder, SourceListing, check_names
from packer.sources.folder import FolderSource, read_file
from packer.sources.known_folders import yolo_parts
from packer.sources.lookups import wanted_split
from packer.sources.objects import Grid, class_mask, displayed_grid, outline_pixels
from readers.examine import scan
from readers.fields import encode_field
from readers.sample import Buffer
from readers.tree import TreeFile, has_image_suffix, unique_keys

__all__ = ["YoloSource", "open_yolo"]

_YAMLS = ("data.yaml", "data.yml", "dataset.yaml", "dataset.yml")
_NAMES = ("classes.txt", "labels/classes.txt", "obj.names")
_MAX_TEXT_BYTES = 1 << 20
_MAX_LABEL_BYTES = 16 << 20
_MAX_CLASSES = 65_534
_MAX_POINTS = 1024
_SLACK = 0.01  # of the width or height, by which programs overshoot
_KINDS = {"boxes": "boxes", "box_labels": "array", "mask": "mask", "points": "points", "json": "json"}


def open_yolo(root: str | os.PathLike[str], layout: str = "auto") -> YoloSource | FolderSource:
    """The source; with layout="tree" the classes that its folders are then."""
    return FolderSource(root, layout) if layout == "tree" else YoloSource(root)


class _Part(NamedTuple):
    """The files of a split.

    is_known: whether it has labels.
    pairs: each image with its labels; the paths of images are relative to their folder, others to the root.
    alone: paths of labels without an image.
    """

    is_known: bool
    pairs: list[tuple[TreeFile, TreeFile | None]]
    alone: list[str]


class YoloSource:
    """See the module."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self._fields: dict[str, str] = {}
        self._names: tuple[str, ...] = ()
        self._pose: tuple[int, int] = (0, 0)
        self._read_from: list[Path] = []

    @property
    def title(self) -> str:
        return f"YOLO set {self.root}"

    def list(self, split: str | None) -> SourceListing:
        parts = yolo_parts(self.root)
        if not parts:
            raise SourceError(f"{self.root}: no folder images in it, nor in its splits")
        if parts[0][0] == "":
            parts = [(split or "train", *parts[0][1:])]
        split = wanted_split(split, [name for name, _, _ in parts], str(self.root))
        self._names, self._pose, self._read_from = _names_and_pose(self.root)
        found = {name: self._files_of(images, labels) for name, images, labels in parts}
        texts = [label for part in found.values() for _, label in part.pairs if label is not None]
        has_outlines = not self._pose[0] and any(self._has_outline(label) for label in texts)
        names = ["boxes", "box_labels", *["mask", "json"] * has_outlines, *["points"] * bool(self._pose[0])]
        self._fields = {"image": "image"} | {name: kind for name, kind in _KINDS.items() if name in names}
        listing = SourceListing({}, self._fields, self._names)
        for name, images, _ in parts:
            if split in (None, name):
                builder = ListingBuilder(len(self._fields))
                for image, label in found[name].pairs:
                    self._add(builder, images, image, label, found[name].is_known)
                part = builder.build(images)
                check_names((names[0] for names in part.names), str(self.root))
                part.keys = unique_keys(part.names.columns[0])
                listing.splits[name] = part
        if not any(len(part) for part in listing.splits.values()):
            raise SourceError(f"{self.root}: no images in {', '.join(images for _, images, _ in parts)}")
        if not self._names:
            listing.warnings.append(f"{self.root}: no names of the classes in {', '.join((*_YAMLS, *_NAMES))}")
        alone = [path for part in found.values() for path in part.alone]
        listing.left_out += [(path, "labels without an image") for path in alone]
        if alone:
            count = plural(len(alone), "label file")
            listing.warnings.append(f"{self.root}: {count} without an image, such as {alone[0]!r}")
        return listing

    def _files_of(self, images: str, labels: str) -> _Part:
        is_known = (self.root / labels).is_dir()
        texts: dict[str, TreeFile] = {}
        for file in scan(self.root / labels, [], usable_cpus()) if is_known else ():
            if file.path.endswith(".txt") and file.path != "classes.txt":
                texts[file.path[:-4]] = file._replace(path=f"{labels}/{file.path}")
        pictures = [file for file in scan(self.root / images, [], usable_cpus()) if has_image_suffix(file.path)]
        stems = [image.path.rpartition(".")[0] for image in pictures]
        alone = [texts[stem].path for stem in texts.keys() - set(stems)]
        return _Part(is_known, list(zip(pictures, map(texts.get, stems), strict=True)), sorted(alone))

    def _has_outline(self, label: TreeFile) -> bool:
        try:
            return any(len(words) > 5 for words in _lines_of(self._text(label)))
        except BadSampleError:  # the worker says what is wrong with it
            return False

    def _text(self, label: TreeFile) -> bytes:
        try:
            return read_regular(self.root / label.path, _MAX_LABEL_BYTES)
        except OSError as error:
            raise BadSampleError(f"cannot be read: {error.strerror or error}") from error

    def _add(
        self, builder: ListingBuilder, folder: str, image: TreeFile, label: TreeFile | None, is_known: bool
    ) -> None:
        text = (label.path, label.bytes) if label is not None else (None, 0 if is_known else -1)
        total = max(0, image.bytes) + max(0, text[1])
        mark = (image.mtime_ns * 1_000_003 + (label.mtime_ns if label is not None else 0)) % (1 << 63)
        names = [image.path, *([""] * (len(self._fields) - 1))]
        builder.add(names, (f"{folder}/{image.path}", image.bytes, *text), total, mark)

    def open(self) -> AbstractContextManager[YoloReader]:
        return nullcontext(YoloReader(self.root, self._fields, len(self._names), self._pose))

    def paths(self, listing: SourceListing) -> Iterator[Path]:
        yield from self._read_from
        for part in listing.splits.values():
            for image, _, label, _ in part.places:
                yield self.root / image
                if label is not None:
                    yield self.root / label


def _names_and_pose(root: Path) -> tuple[tuple[str, ...], tuple[int, int], list[Path]]:
    """(names of the classes, (points of a pose, numbers of each), the files that say so)."""
    path = next((root / name for name in _YAMLS if (root / name).exists()), None)
    if path is not None:
        content = _yaml(path)
        names, shape = content.get("names"), content.get("kpt_shape", [0, 0])
        if isinstance(names, dict) and sorted(map(str, names)) == sorted(map(str, range(len(names)))):
            names = [names.get(number, names.get(str(number))) for number in range(len(names))]
        if not isinstance(names, list):
            raise SourceError(f"{path}: names is {names!r:.80}, expected a list, or a mapping from numbers from 0 on")
        good = isinstance(shape, list) and len(shape) == 2 and all(type(number) is int for number in shape)
        if not good or not (shape == [0, 0] or (0 < shape[0] <= _MAX_POINTS and shape[1] in (2, 3))):
            raise SourceError(f"{path}: kpt_shape is {shape!r:.80}, expected [points, 2 or 3]")
        return _checked(names, path), (shape[0], shape[1]), [path]
    path = next((root / name for name in _NAMES if (root / name).exists()), None)
    if path is None:
        return (), (0, 0), []
    try:
        text = read_regular(path, _MAX_TEXT_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    return _checked([line.strip() for line in text.splitlines() if line.strip()], path), (0, 0), [path]


def _checked(names: Sequence[Any], path: Path) -> tuple[str, ...]:
    good = all(isinstance(name, str) and name and name.isprintable() for name in names)
    if not good or len(set(names)) < len(names) or len(names) > _MAX_CLASSES:
        raise SourceError(f"{path}: the names of the classes are not up to {_MAX_CLASSES:,} different texts")
    return tuple(names)


def _yaml(path: Path) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise MissingExtraError("PyYAML", "yolo", f"reading {path.name}") from error
    try:
        content = yaml.safe_load(read_regular(path, _MAX_TEXT_BYTES))
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise SourceError(f"{path}: cannot be read as YAML: {str(error)[:200]}") from error
    if not isinstance(content, dict):
        raise SourceError(f"{path}: holds no mapping; expected one with the names of the classes")
    return content


def _lines_of(text: bytes) -> Iterator[list[str]]:
    """The words of each line that has some."""
    try:
        lines = text.decode().splitlines()
    except UnicodeDecodeError as error:
        raise BadSampleError(f"is not UTF-8 text: {error}") from error
    return (words for line in lines if (words := line.split()))


class YoloReader:
    """Reads images with their labels. classes: how many have names, 0 for none. pose: points, and numbers of each."""

    def __init__(self, root: Path, fields: Mapping[str, str], classes: int, pose: tuple[int, int]) -> None:
        self._root, self._fields, self._classes, self._pose = root, fields, classes, pose

    def read(self, place: tuple[str, int, str | None, int], arena: Arena) -> Sequence[Buffer | None]:
        path, size, label, label_bytes = place
        image = self._file(path, size, arena)
        payloads: list[Buffer | None] = [image, *([None] * (len(self._fields) - 1))]
        if label is None and label_bytes < 0:
            return payloads
        text = b"" if label is None else bytes(self._file(label, label_bytes, arena))
        try:
            values = self._values(text, displayed_grid(image))
        except BadSampleError as error:
            raise BadSampleError(f"{label}: {error}") from error
        return [image, *(encode_field(kind, values[name]) for name, kind in [*self._fields.items()][1:])]

    def _file(self, path: str, size: int, arena: Arena) -> Buffer:
        try:
            return read_file(os.path.join(self._root, path), size, arena)
        except BadSampleError as error:
            raise BadSampleError(f"{path!r} {error}") from error

    def _values(self, text: bytes, grid: Grid) -> dict[str, Any]:
        scale = np.array([grid.width, grid.height], np.float64)
        labels: list[int] = []
        boxes: list[Any] = []
        outlines: list[Any] = []
        points = []
        for line, words in enumerate(_lines_of(text), 1):
            numbers = self._numbers(words, line)
            labels.append(int(numbers[0]))
            rest = numbers[1:]
            outline = None
            if len(rest) == 4 or self._pose[0]:
                centre, half = rest[:2], rest[2:4] / 2
                boxes.append([*((centre - half) * scale), *((centre + half) * scale)])
            else:
                outline = rest.reshape(-1, 2) * scale
                boxes.append([*outline.min(0), *outline.max(0)])
            outlines.append(outline)
            if self._pose[0]:
                points.append(self._points(rest[4:]) * scale)
        drawn = [(n, outline_pixels(o, grid)) for n, o in zip(labels, outlines, strict=True) if o is not None]
        values: dict[str, Any] = {
            "boxes": grid.boxes(np.array(boxes, np.float64).reshape(-1, 4)),
            "box_labels": np.array(labels, np.int64),
            "json": {"outlines": [None if outline is None else outline.tolist() for outline in outlines]},
        }
        if "points" in self._fields:
            values["points"] = grid.points(np.array(points, np.float64).reshape(-1, self._pose[0], 2))
        if "mask" in self._fields:
            values["mask"] = class_mask(drawn, max(self._classes, *labels, 0) + 1, grid)
        return values

    def _numbers(self, words: Sequence[str], line: int) -> Any:
        """A class, and at least four parts of the image. Raises BadSampleError."""
        try:
            numbers = np.array([float(word) for word in words])
        except ValueError as error:
            raise BadSampleError(f"line {line}: {error}") from error
        count, (points, each) = len(numbers), self._pose
        if points and count != 5 + points * each:
            raise BadSampleError(f"line {line}: {count} numbers, expected {5 + points * each} for {points} points")
        if not points and count != 5 and (count < 7 or count % 2 == 0):
            what = (
                "as with a confidence, which labels do not have" if count == 6 else "for neither a box nor an outline"
            )
            raise BadSampleError(f"line {line}: {count} numbers, {what}")
        most = self._classes or _MAX_CLASSES
        if not numbers[0].is_integer() or not 0 <= numbers[0] < most:
            raise BadSampleError(f"line {line}: {words[0]!r:.40} is not the number of a class, 0 to {most - 1}")
        parts = numbers[1:].copy()
        if points and each == 3:
            parts[6::3] = 0  # whether a point is labelled
        if not ((parts >= -_SLACK) & (parts <= 1 + _SLACK)).all():
            raise BadSampleError(f"line {line}: a number is not a part of the image, 0 to 1: in pixels?")
        return numbers

    def _points(self, numbers: Any) -> Any:
        found = numbers.reshape(self._pose)
        labelled = found[:, 2] > 0 if self._pose[1] == 3 else (found != 0).any(1)
        return np.where(labelled[:, None], found[:, :2], np.nan)
