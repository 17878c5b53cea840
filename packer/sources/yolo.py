"""Sets for YOLO: images, and a text file for each with a line an object.

    images/train/1.jpg, labels/train/1.txt     or  train/images/1.jpg, train/labels/1.txt,  or without splits
    train/1.jpg, train/1.txt                   labels beside their images, as LabelImg and Darknet have them
    data.yaml                                  names: the classes, a list or by number; kpt_shape: [n, 2 or 3] of poses;
                                               train, val, test: the splits
    classes.txt, obj.names, _darknet.labels    the names, one a line, without a data.yaml
    obj.data                                   train, valid: the splits, as in Darknet, without a data.yaml

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

The splits of data.yaml are folders, or text files with a path a line, or lists of these. They count from `path`, which
counts from the folder of data.yaml; a line of a text file may also count from the folder of that. A path that leads out
of the source is refused, but for the "../" that Roboflow writes; a link in the source may lead anywhere. A set is often
moved after its data.yaml was written: where nothing that it names is there, folders are the splits, with a warning. The
labels of an image are found as Ultralytics finds them: "labels" for the last "images" of its path; else beside it.

Place: path and bytes of the image, and of its labels; path None where there are none, bytes -1 where they are unknown.
"""

from __future__ import annotations

import os
import posixpath
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cache.errors import BadSampleError, SourceError
from cache.files import read_regular
from cache.messages import listed, plural
from cache.node import usable_cpus
from packer.formats.base import Arena
from packer.sources.base import ListingBuilder, SourceListing, check_names, plain_yaml, wanted_split
from packer.sources.folder import FolderSource, read_file
from packer.sources.layouts import YOLO_NAMES, YOLO_YAMLS, yolo_folders
from packer.sources.objects import Grid, class_mask, displayed_grid, outline_pixels
from readers.fields import encode_field
from readers.opening.tree import SPLIT_NAMES, TreeFile, TreeFiles, has_image_suffix, scan, unique_keys
from readers.table import Buffer

__all__ = ["YoloSource", "open_yolo"]

_DARKNET = "obj.data"
_MAX_TEXT_BYTES = 1 << 20
_MAX_LIST_BYTES = 256 << 20
_MAX_LABEL_BYTES = 16 << 20
_MAX_CLASSES = 65_534
_MAX_POINTS = 1024
_MAX_PATHS = 10_000
_ABOVE = re.compile(r"\A(?:\.\./)+")
_SLACK = 0.01  # of the width or height, by which programs overshoot
_KINDS = {"boxes": "boxes", "box_labels": "array", "mask": "mask", "points": "points", "json": "json"}


def open_yolo(root: str | os.PathLike[str], layout: str = "auto") -> YoloSource | FolderSource:
    """The source; with layout="tree" the classes that its folders are then."""
    return FolderSource(root, layout) if layout == "tree" else YoloSource(root)


class _About(NamedTuple):
    """What the set says of itself.

    pose: points, and numbers of each. base: what paths of splits count from, relative to the root.
    splits: the paths of each, as they are written, in the file `path`. read_from: the files that say so.
    """

    names: tuple[str, ...] = ()
    pose: tuple[int, int] = (0, 0)
    base: str = ""
    splits: Mapping[str, Sequence[str]] = {}
    path: Path | None = None
    read_from: Sequence[Path] = ()
    warnings: Sequence[str] = ()


class _Part(NamedTuple):
    """A split.

    folder: that the names of its images count from, relative to the root.
    is_known: whether it has labels.
    pairs: each image with its labels; paths are relative to the root.
    """

    folder: str
    is_known: bool
    pairs: list[tuple[TreeFile, TreeFile | None]]


class YoloSource:
    """See the module."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self._fields: dict[str, str] = {}
        self._about = _About()
        self._read_from: Sequence[Path] = ()

    @property
    def title(self) -> str:
        return f"YOLO set {self.root}"

    def list(self, split: str | None) -> SourceListing:
        self._about = about = _read_about(self.root)
        listing = SourceListing({}, {}, about.names, warnings=[*about.warnings])
        files = _Files(self.root, scan(self.root, listing.left_out, usable_cpus()))
        splits = _Splits(self.root, about, files)
        parts = {name: files.part(*found) for name, found in splits.folders(split or "train").items()}
        self._read_from = [*about.read_from, *splits.read_from]
        listing.warnings += splits.warnings
        split = wanted_split(split, parts, str(self.root))
        texts = [label for part in parts.values() for _, label in part.pairs if label is not None]
        has_outlines = not about.pose[0] and any(self._has_outline(label) for label in texts)
        names = ["boxes", "box_labels", *["mask", "json"] * has_outlines, *["points"] * bool(about.pose[0])]
        listing.fields = self._fields = {"image": "image"} | {name: _KINDS[name] for name in _KINDS if name in names}
        for name, found in parts.items():
            if split in (None, name):
                builder = ListingBuilder(len(self._fields))
                for image, label in found.pairs:
                    self._add(builder, found.folder, image, label, found.is_known)
                part = builder.build(found.folder)
                check_names((names[0] for names in part.names), str(self.root))
                part.keys = unique_keys(part.names.columns[0])
                listing.splits[name] = part
        if not any(len(part) for part in listing.splits.values()):
            raise SourceError(f"{self.root}: no images in {', '.join(part.folder or '.' for part in parts.values())}")
        if not about.names:
            listing.warnings.append(f"{self.root}: no names of the classes in {', '.join((*YOLO_YAMLS, *YOLO_NAMES))}")
        listing.left_out += files.left_out(parts.values(), {*map(str, self._read_from)})
        alone = [path for path, reason in listing.left_out if reason == _ALONE]
        if alone:
            count = plural(len(alone), "label file")
            listing.warnings.append(f"{self.root}: {count} without an image, such as {alone[0]!r}")
        return listing

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
        names = [image.path[len(folder) + 1 if folder else 0 :], *([""] * (len(self._fields) - 1))]
        builder.add(names, (image.path, image.bytes, *text), total, mark)

    def open(self) -> AbstractContextManager[YoloReader]:
        return nullcontext(YoloReader(self.root, self._fields, len(self._about.names), self._about.pose))

    def paths(self, listing: SourceListing) -> Iterator[Path]:
        yield from self._read_from
        for part in listing.splits.values():
            for image, _, label, _ in part.places:
                yield self.root / image
                if label is not None:
                    yield self.root / label


class _Splits:
    """Finds the images of each split. warnings: what it does not follow; read_from: the lists that name images."""

    def __init__(self, root: Path, about: _About, files: _Files) -> None:
        self._root, self._about, self._files, self._bases = root, about, files, _bases(root)
        self.warnings: list[str] = []
        self.read_from: list[Path] = []

    def folders(self, one: str) -> dict[str, tuple[str, list[int]]]:
        """The folder, and the numbers of the images, of each split. one: the name of what has no splits."""
        files, warnings = self._files, self.warnings
        found: dict[str, tuple[str, list[int]]] = {}
        missing: list[str] = []
        for name, texts in self._about.splits.items():
            paths = [(text, self._resolved(name, text)) for text in texts]
            missing += [f"{name}: {text!r}" for text, path in paths if path is None]
            if there := list(dict.fromkeys(path for _, path in paths if path is not None)):
                found[name] = self._images_of(there)
        if missing:
            seen = f"splits are those of the folders: {listed([*yolo_folders(self._root)])}" if not found else ""
            what = f"what it names is not below its folder: {listed(missing)}"
            warnings.append(f"{self._about.path}: {what}; {seen or 'images that no other split names are left out'}")
        if found:
            return _without_shared(found, files, self._about.path, warnings)
        folders = yolo_folders(self._root) or {"": ""}
        return {name or one: (folder, files.below(folder)) for name, folder in folders.items()}

    def _resolved(self, name: str, text: str) -> str | None:
        """The file or folder that a path of data.yaml means, relative to the root; None where it is not there.

        Raises SourceError where it is outside of the root.
        """
        there = next((path for path in self._meant(text) if os.path.exists(self._root / path)), None)
        if there is None and os.path.exists(self._root / self._about.base / text):
            raise SourceError(
                f"{self._about.path}: {name}: {text!r:.200} leads out of {self._root}, where nothing is read; put a "
                f"link to it there, and name the link, or convert the folder that holds both"
            )
        return there

    def _meant(self, text: str, folder: str | None = None) -> Iterator[str]:
        """What a path may mean, relative to the root, the likeliest first. folder: of the list that has it, or None.

        The name of a folder above the set, "../" or "data/", is left out where Roboflow and Darknet write it.
        """
        plain = _ABOVE.sub("", text)
        folders = () if folder is None else (folder,)
        if folder is None or not text.startswith("./"):
            folders = (*folders, self._about.base, "")
        for path in dict.fromkeys((text, plain, text.removeprefix("data/"))):
            for place in dict.fromkeys(folders):
                inside = _inside(self._bases, posixpath.join(place, path))
                if inside is not None:
                    yield inside

    def _images_of(self, paths: Sequence[str]) -> tuple[str, list[int]]:
        """The folder, and the numbers of the images, of folders and lists."""
        files = self._files
        rows: list[int] = []
        for path in paths:
            is_folder = os.path.isdir(self._root / path)
            rows += files.below(path) if is_folder else self._named_in(path)
        if len(paths) == 1 and os.path.isdir(self._root / paths[0]):
            return paths[0], rows
        chosen = sorted(set(rows))
        above = {posixpath.dirname(files.images[row].path) for row in chosen}
        return posixpath.commonpath(above) if above and "" not in above else "", chosen

    def _named_in(self, path: str) -> list[int]:
        """The numbers of the images that a text file names, one a line."""
        rows_of = self._files.rows
        where, folder, rows = self._root / path, posixpath.dirname(path), []
        for line, text in enumerate(_text_of(where, _MAX_LIST_BYTES).splitlines(), 1):
            if not (text := text.strip()):
                continue
            row = next((rows_of[path] for path in self._meant(text, folder) if path in rows_of), None)
            if row is None:
                raise SourceError(
                    f"{where}: line {line}: {text!r:.200} is not the path of an image below {self._root}; paths count "
                    f"from the folder of this list, or from that one"
                )
            rows.append(row)
        self.read_from.append(where)
        again = len(rows) - len(set(rows))
        if again:
            self.warnings.append(f"{where}: {plural(again, 'line')} that repeat an image; a set holds a sample once")
        return rows


_ALONE = "labels without an image"


class _Files:
    """The files of the set. images: in the order of a walk; rows: the number of each, by its path; texts: by path."""

    def __init__(self, root: Path, files: TreeFiles) -> None:
        self._root = root
        self.images = [file for file in files if has_image_suffix(file.path)]
        self.rows = {image.path: row for row, image in enumerate(self.images)}
        self.texts = {file.path: file for file in files if file.path.endswith(".txt") and not _is_names(file.path)}
        self._others = [path for path in files.paths() if not has_image_suffix(path) and path not in self.texts]
        self._sorted = sorted(self.rows)

    def below(self, folder: str) -> list[int]:
        """The numbers of the images in a folder, and in those below."""
        if not folder:
            return list(range(len(self.images)))
        ends = (f"{folder}/", f"{folder}0")  # "0" follows "/"
        first, stop = (bisect_left(self._sorted, end) for end in ends)
        return sorted(self.rows[path] for path in self._sorted[first:stop])

    def part(self, folder: str, rows: Sequence[int]) -> _Part:
        """A split of these images, with their labels."""
        pairs = [(self.images[row], self._label_of(self.images[row].path)) for row in rows]
        labels = next(_label_paths(f"{folder}/x.jpg".lstrip("/")))
        has_folder = "images" in folder.split("/") and (self._root / labels).parent.is_dir()
        return _Part(folder, has_folder or any(label is not None for _, label in pairs), pairs)

    def _label_of(self, path: str) -> TreeFile | None:
        return next((self.texts[label] for label in _label_paths(path) if label in self.texts), None)

    def left_out(self, parts: Iterable[_Part], read_from: set[str]) -> list[tuple[str, str]]:
        """The files that are neither in a split nor read for one, with the reason."""
        used = {file.path for part in parts for pair in part.pairs for file in pair if file is not None}
        folders = {posixpath.dirname(image.path) for image in self.images}
        unnamed = [(image.path, "in no split") for image in self.images if image.path not in used]
        alone = []
        for path in self.texts:
            if path not in used and str(self._root / path) not in read_from:
                beside = posixpath.dirname(path) in folders and posixpath.dirname(path) != ""
                is_label = beside or "labels" in path.split("/")[:-1]
                alone.append((path, _ALONE if is_label else _NOT_READ))
        others = [(path, _NOT_READ) for path in self._others if str(self._root / path) not in read_from]
        return unnamed + alone + others


def _is_names(path: str) -> bool:
    return posixpath.basename(path) == "classes.txt"


_NOT_READ = "not an image, nor labels"


def _label_paths(path: str) -> Iterator[str]:
    """Where the labels of an image may be: "labels" for the last, or first, "images" of its path; else beside it."""
    stem = path.rpartition(".")[0]
    parts = stem.split("/")
    places = [place for place, name in enumerate(parts[:-1]) if name == "images"]
    for place in dict.fromkeys((*places[-1:], *places[:1])):
        yield "/".join((*parts[:place], "labels", *parts[place + 1 :])) + ".txt"
    if not places:
        yield f"{stem}.txt"


def _without_shared(
    found: dict[str, tuple[str, list[int]]], files: _Files, where: Path | None, warnings: list[str]
) -> dict[str, tuple[str, list[int]]]:
    """The splits as they are, with a warning where two have the same images."""
    owner: dict[int, str] = {}
    for name, (_, rows) in found.items():
        shared = [row for row in rows if owner.setdefault(row, name) != name]
        if shared:
            count = plural(len(shared), "image")
            other = owner[shared[0]]
            warnings.append(
                f"{where}: {count} in both {other} and {name}, such as {files.images[shared[0]].path!r}; both have them"
            )
    return found


def _bases(root: Path) -> tuple[str, ...]:
    """What absolute paths below the root may begin with."""
    return tuple(dict.fromkeys((os.path.abspath(root), os.path.realpath(root))))


def _inside(bases: Sequence[str], path: str) -> str | None:
    """A path relative to the root, "" for that itself; None where it leads out of it. bases: see `_bases`."""
    for base in bases:
        whole = os.path.normpath(os.path.join(base, path))
        if whole == base:
            return ""
        if whole.startswith(base.rstrip("/") + "/"):
            return whole[len(base.rstrip("/")) + 1 :]
    return None


def _read_about(root: Path) -> _About:
    path = next((root / name for name in YOLO_YAMLS if (root / name).exists()), None)
    listed_names = {root / name: _names_in(root / name) for name in YOLO_NAMES if (root / name).exists()}
    if path is not None:
        about = _read_yaml(root, path)
        others = [other for other, names in listed_names.items() if names != about.names]
        if others:
            warning = f"{others[0]}: has other classes than {path.name}, whose names are taken"
            about = about._replace(warnings=(*about.warnings, warning))
        return about._replace(read_from=(path, *listed_names))
    if len(set(listed_names.values())) > 1:
        raise SourceError(f"{root}: {', '.join(map(str, listed_names))} have different classes; keep the right one")
    names = next(iter(listed_names.values()), ())
    if not (root / _DARKNET).exists():
        return _About(names, read_from=(*listed_names,))
    path = root / _DARKNET
    pairs = (line.partition("=") for line in _text_of(path, _MAX_TEXT_BYTES).splitlines())
    values = {key.strip(): value.strip() for key, _, value in pairs}
    splits = {split: [values[key]] for key, split in (("train", "train"), ("valid", "val")) if values.get(key)}
    return _About(names, splits=splits, path=path, read_from=(path, *listed_names))


def _read_yaml(root: Path, path: Path) -> _About:
    content = plain_yaml(_text_of(path, _MAX_TEXT_BYTES), path, "yolo", f"reading {path.name}")
    if not isinstance(content, dict):
        raise SourceError(f"{path}: holds no mapping; expected one with the names of the classes")
    names, shape = content.get("names"), content.get("kpt_shape", [0, 0])
    if isinstance(names, dict) and sorted(map(str, names)) == sorted(map(str, range(len(names)))):
        names = [names.get(number, names.get(str(number))) for number in range(len(names))]
    if not isinstance(names, list):
        raise SourceError(f"{path}: names is {names!r:.80}, expected a list, or a mapping from numbers from 0 on")
    if content.get("nc", len(names)) != len(names):
        raise SourceError(f"{path}: nc is {content['nc']!r:.40}, but there are {len(names)} names")
    good = isinstance(shape, list) and len(shape) == 2 and all(type(number) is int for number in shape)
    if not good or not (shape == [0, 0] or (0 < shape[0] <= _MAX_POINTS and shape[1] in (2, 3))):
        raise SourceError(f"{path}: kpt_shape is {shape!r:.80}, expected [points, 2 or 3]")
    splits = {name: _paths(content[name], name, path) for name in SPLIT_NAMES if content.get(name)}
    base, warnings = "", []
    if stated := "".join(_paths(content["path"], "path", path)[:1]) if content.get("path") else "":
        inside = _inside(_bases(root), stated)
        if inside is not None and os.path.isdir(root / inside):
            base = inside
        elif inside is None and os.path.isdir(root / stated):
            warnings.append(f"{path}: path: {stated!r} is another folder; splits are those below {root}")
    checked = _checked(names, path)
    return _About(checked, (shape[0], shape[1]), base, splits, path, warnings=warnings)


def _paths(value: Any, name: str, path: Path) -> list[str]:
    """One path or several. Raises SourceError."""
    found = value if isinstance(value, list) else [value]
    if len(found) > _MAX_PATHS or not all(isinstance(text, str) and text and "\0" not in text for text in found):
        raise SourceError(f"{path}: {name} is {value!r:.80}, expected a path, or a list of paths, up to {_MAX_PATHS:,}")
    return found


def _names_in(path: Path) -> tuple[str, ...]:
    return _checked([line.strip() for line in _text_of(path, _MAX_TEXT_BYTES).split("\n") if line.strip()], path)


def _text_of(path: Path, most: int) -> str:
    try:
        return read_regular(path, most).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path}: cannot be read as UTF-8 text: {error}") from error


def _checked(names: Sequence[Any], path: Path) -> tuple[str, ...]:
    for name in names:
        if not (isinstance(name, str) and name and name.isprintable()):
            raise SourceError(f"{path}: {name!r:.80} is not the name of a class; expected different texts")
    if len(set(names)) < len(names) or len(names) > _MAX_CLASSES:
        raise SourceError(f"{path}: the names of the classes are not up to {_MAX_CLASSES:,} different texts")
    return tuple(names)


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
