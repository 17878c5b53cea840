"""Data sets for YOLO: images, and a text file for each of them, with one line per object.

    images/train/1.jpg, labels/train/1.txt     or  train/images/1.jpg, train/labels/1.txt,  or without splits
    train/1.jpg, train/1.txt                   labels next to their images, as in LabelImg and Darknet
    data.yaml                                  names: the classes, as a list or by number; kpt_shape: [n, 2 or 3] for
                                               poses; train, val, test: the splits
    classes.txt, obj.names, _darknet.labels    the class names, one per line, if there is no data.yaml
    obj.data                                   train, valid: the splits, as in Darknet, if there is no data.yaml

A line has a class number, then coordinates as fractions of the width and height of the displayed image:

    5 numbers              class, centre x and y, width, height
    7 and more, odd        class, x and y of three or more points of an outline; the box is its bounding box
    with kpt_shape         class, centre x and y, width, height, then x, y (and whether it is labelled) of n points

    image         the file, unchanged
    boxes         in pixels
    box_labels    int64 [k]
    mask          the class mask drawn by `packer.sources.objects.class_mask`, if any label file has outlines
    points        float32 [k, n, 2], NaN for points that are not labelled, if data.yaml has a kpt_shape
    json          {"outlines": [[[x, y], …] or null for each box]} in pixels, if any label file has outlines

In a split with labels, an image without a label file has no objects, as in YOLO training. In a split without labels,
objects are unknown.

The splits in data.yaml are folders, text files with one path per line, or lists of these. They are relative to `path`,
which is relative to the folder of data.yaml; lines of a text file may also be relative to its folder. Paths that lead
out of the source are refused, except for the "../" that Roboflow writes; links in the source may lead anywhere. Data
sets are often moved after data.yaml was written: if none of its paths exists, the folders are the splits, with a
warning. Labels are found as in Ultralytics: in the path of the image, the last "images" (else the first) becomes
"labels"; without an "images", they are next to the image.

Place: the image, and its label file or None; then whether its split has labels.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cache.errors import BadSampleError, SourceError
from cache.files import read_regular
from cache.messages import listed, plural
from cache.node import usable_cpus
from packer.sources.base import SourceListing, of_sample, plain_yaml, read_text
from packer.sources.layouts import YOLO_NAMES, YOLO_YAMLS, yolo_folders
from packer.sources.objects import AnnotatedSource, class_mask, displayed_grid, outline_pixels
from readers.opening.tree import SPLIT_NAMES, TreeFile, has_image_suffix, scan
from readers.table import Buffer

__all__ = ["YoloSource"]

_DARKNET = "obj.data"
_MAX_TEXT_BYTES, _MAX_LIST_BYTES, _MAX_LABEL_BYTES = 1 << 20, 256 << 20, 16 << 20
_MAX_CLASSES, _MAX_POINTS, _MAX_PATHS = 65_534, 1024, 10_000
_ABOVE = re.compile(r"\A(?:\.\./)+")
_SLACK = 0.01  # the part of the width or height by which coordinates may lie outside, due to imprecise tools
_KINDS = {"image": "image", "boxes": "boxes", "box_labels": "array", "mask": "mask", "points": "points", "json": "json"}
_ALONE, _NOT_READ = "labels without an image", "neither an image nor labels"


class _About(NamedTuple):
    """The metadata of a set, from data.yaml or Darknet's files.

    pose: the number of points, and of values per point. base: the folder that split paths are relative to, from the
    root. splits: the paths of each split, as written in the file `path`.
    """

    names: tuple[str, ...] = ()
    pose: tuple[int, int] = (0, 0)
    base: str = ""
    splits: Mapping[str, Sequence[str]] = {}
    path: Path | None = None


class YoloSource(AnnotatedSource):
    """The YOLO set at `root`."""

    kind = "YOLO set"

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__(root)
        self._about = _About()
        self._bases = dict.fromkeys((os.path.abspath(root), os.path.realpath(root)))  # of absolute paths below the root

    def list_files(self, split: str | None) -> SourceListing:
        listing = SourceListing({}, {})
        warnings = listing.warnings
        self._about = about = self._read_about(warnings)
        tree = list(scan(self.root, listing.left_out, usable_cpus()))
        images = {file.path: file for file in tree if has_image_suffix(file.path)}
        texts = {
            file.path: file
            for file in tree
            if file.path.endswith(".txt") and posixpath.basename(file.path) != "classes.txt"
        }
        splits = self._splits(split or "train", images, warnings)
        labels = {path: next((text for text in _label_paths(path) if text in texts), None) for path in images}
        used = {path for _, paths in splits.values() for path in paths}
        read = {text for path in used if (text := labels[path]) is not None}
        has_outlines = not about.pose[0] and any(self._has_outline(text) for text in sorted(read))
        names = ["image", "boxes", "box_labels", *["mask", "json"] * has_outlines, *["points"] * bool(about.pose[0])]
        listing.fields = self.fields = {name: kind for name, kind in _KINDS.items() if name in names}
        listing.classes = about.names
        if not used:
            raise SourceError(f"{self.root}: no images in {', '.join(folder or '.' for folder, _ in splits.values())}")
        for name, (folder, paths) in splits.items():
            label_folder = (self.root / next(_label_paths(f"{folder}/x.jpg".lstrip("/")))).parent
            has_folder = "images" in folder.split("/") and label_folder.is_dir()
            is_known = has_folder or any(labels[path] is not None for path in paths)
            pairs = ((images[path], texts.get(labels[path] or "")) for path in paths)
            self.add(listing, name, _samples(folder, pairs, is_known), folder)
        if not about.names:
            warnings.append(f"{self.root}: no names of the classes in {', '.join((*YOLO_YAMLS, *YOLO_NAMES))}")
        self._leave_out(listing, tree, used | read, {posixpath.dirname(path) for path in images} - {""})
        return listing

    def _leave_out(self, listing: SourceListing, tree: Sequence[TreeFile], used: set[str], folders: set[str]) -> None:
        """Report the files that are neither in a split nor read for one, with the reason. folders: those of images."""
        alone: list[str] = []
        reasons: dict[str, list[str]] = {"in no split": [], _ALONE: alone, _NOT_READ: []}
        for path in (file.path for file in tree if file.path not in used and self.root / file.path not in self._stamps):
            folder = posixpath.dirname(path)
            is_label = path.endswith(".txt") and posixpath.basename(path) != "classes.txt"
            is_label &= folder in folders or "labels" in folder.split("/")
            reasons["in no split" if has_image_suffix(path) else _ALONE if is_label else _NOT_READ].append(path)
        listing.left_out += [(path, reason) for reason, paths in reasons.items() for path in paths]
        if alone:
            count = plural(len(alone), "label file")
            listing.warnings.append(f"{self.root}: {count} without an image, such as {alone[0]!r}")

    def _has_outline(self, label: str) -> bool:
        try:
            with of_sample(label):
                return any(len(words) > 5 for words in _lines_of(read_regular(self.root / label, _MAX_LABEL_BYTES)))
        except BadSampleError:  # the worker reports it
            return False

    # --- the splits ---
    def _splits(
        self, split_name: str, images: Mapping[str, TreeFile], warnings: list[str]
    ) -> dict[str, tuple[str, Sequence[str]]]:
        """(folder, images) of each split. split_name: the name of a single unnamed split."""
        known: dict[str, tuple[str, Sequence[str]]] = {}
        missing: list[str] = []
        for name, texts in self._about.splits.items():
            paths = {text: self._resolved(name, text) for text in texts}
            missing += [f"{name}: {text!r}" for text, path in paths.items() if path is None]
            if there := list(dict.fromkeys(path for path in paths.values() if path is not None)):
                known[name] = self._images_of(there, images, warnings)
        if missing:
            seen = f"splits are those of the folders: {listed([*yolo_folders(self.root)])}"
            seen = "other images are left out" if known else seen
            problem = f"its paths are not below its folder: {listed(missing)}"
            warnings.append(f"{self._about.path}: {problem}; {seen}")
        owner: dict[str, str] = {}
        for name, (_, members) in known.items():
            if shared := [path for path in members if owner.setdefault(path, name) != name]:
                pair = f"{plural(len(shared), 'image')} in both {owner[shared[0]]} and {name}"
                warnings.append(f"{self._about.path}: {pair}, such as {shared[0]!r}; both have them")
        folders = yolo_folders(self.root) or {"": ""}
        return known or {name or split_name: (folder, _below(folder, images)) for name, folder in folders.items()}

    def _resolved(self, name: str, text: str) -> str | None:
        """The file or folder for a path in data.yaml, relative to the root; None if it does not exist.

        Raises SourceError if it is outside of the root.
        """
        there = next((path for path in self._meant(text) if os.path.exists(self.root / path)), None)
        if there is None and os.path.exists(self.root / self._about.base / text):
            raise SourceError(
                f"{self._about.path}: {name}: {text!r:.200} leads out of {self.root}, and nothing outside it is read; "
                f"put a link there, and name the link, or convert the folder that holds both"
            )
        return there

    def _meant(self, text: str, folder: str | None = None) -> Iterator[str]:
        """The possible locations of a path, relative to the root, the likeliest first.

        folder: that of the list that contains the path, or None. A leading "../" or "data/", which Roboflow and Darknet
        write, is also tried without.
        """
        folders = () if folder is None else (folder,)
        if folder is None or not text.startswith("./"):
            folders = (*folders, self._about.base, "")
        for path in dict.fromkeys((text, _ABOVE.sub("", text), text.removeprefix("data/"))):
            for place in dict.fromkeys(folders):
                inside = self._inside(posixpath.join(place, path))
                if inside is not None:
                    yield inside

    def _inside(self, path: str) -> str | None:
        """A path made relative to the root, "" for the root itself; None if it leads out of the root."""
        for base in self._bases:
            whole = os.path.normpath(os.path.join(base, path))
            if f"{whole}/".startswith(f"{base.rstrip('/')}/"):
                return whole[len(base.rstrip("/")) + 1 :]
        return None

    def _images_of(
        self, paths: Sequence[str], images: Mapping[str, TreeFile], warnings: list[str]
    ) -> tuple[str, Sequence[str]]:
        """(common folder, images) of some folders and lists of images."""
        chosen: list[str] = []
        for path in paths:
            if os.path.isdir(self.root / path):
                chosen += _below(path, images)
            else:
                chosen += self._named_in(path, images, warnings)
        if len(paths) == 1 and os.path.isdir(self.root / paths[0]):
            return paths[0], chosen
        order = {path: number for number, path in enumerate(images)}
        above = {posixpath.dirname(path) for path in chosen}
        folder = posixpath.commonpath(above) if above and "" not in above else ""
        return folder, sorted({*chosen}, key=order.__getitem__)

    def _named_in(self, path: str, images: Mapping[str, TreeFile], warnings: list[str]) -> list[str]:
        """The images listed in a text file, one per line. Raises SourceError for a path without an image."""
        where, paths = self.note(self.root / path), []
        for line, text in enumerate(map(str.strip, read_text(where, _MAX_LIST_BYTES).splitlines()), 1):
            image = next((image for image in self._meant(text, posixpath.dirname(path)) if image in images), None)
            if text and image is None:
                raise SourceError(
                    f"{where}: line {line}: {text!r:.200} is not the path of an image below {self.root}; paths count "
                    f"from the folder of this list, or from that one"
                )
            paths += [image] if text and image is not None else []
        if again := len(paths) - len({*paths}):
            count = plural(again, "line")
            warnings.append(f"{where}: {count} that repeat an image; a set holds a sample once")
        return paths

    # --- metadata ---
    def _read_about(self, warnings: list[str]) -> _About:
        paths = [self.root / name for name in YOLO_NAMES if (self.root / name).exists()]
        lines = {path: read_text(self.note(path), _MAX_TEXT_BYTES).split("\n") for path in paths}
        named = {
            path: _checked([line.strip() for line in content if line.strip()], path) for path, content in lines.items()
        }
        path = next((self.root / name for name in YOLO_YAMLS if (self.root / name).exists()), None)
        if path is not None:
            about = self._read_yaml(self.note(path), warnings)
            if other := next((other for other, names in named.items() if names != about.names), None):
                warnings.append(f"{other}: has other classes than {path.name}, whose names are used")
            return about
        if len({*named.values()}) > 1:
            raise SourceError(f"{self.root}: {', '.join(map(str, named))} have different classes; keep the right one")
        names = next(iter(named.values()), ())
        path = self.root / _DARKNET
        if not path.exists():
            return _About(names)
        pairs = (line.partition("=") for line in read_text(self.note(path), _MAX_TEXT_BYTES).splitlines())
        values = {key.strip(): value.strip() for key, _, value in pairs}
        splits = {split: [values[key]] for key, split in (("train", "train"), ("valid", "val")) if values.get(key)}
        return _About(names, splits=splits, path=path)

    def _read_yaml(self, path: Path, warnings: list[str]) -> _About:
        content = plain_yaml(read_text(path, _MAX_TEXT_BYTES), path, "yolo", f"reading {path.name}")
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
        base = ""
        if stated := "".join(_paths(content["path"], "path", path)[:1]) if content.get("path") else "":
            inside = self._inside(stated)
            if inside is not None and os.path.isdir(self.root / inside):
                base = inside
            elif inside is None and os.path.isdir(self.root / stated):
                warnings.append(f"{path}: path: {stated!r} is another folder; splits are read below {self.root}")
        return _About(_checked(names, path), (shape[0], shape[1]), base, splits, path)

    # --- the fields of a sample ---
    def values(self, image: Buffer, files: Sequence[Buffer | None], place: Any) -> Mapping[str, Any]:
        if files[0] is None and not place[1]:
            return {}
        grid, (points, each) = displayed_grid(image), self._about.pose
        scale = np.array([grid.width, grid.height], np.float64)
        labels: list[int] = []
        boxes, outlines, poses = [], [], []
        for line, words in enumerate(_lines_of(bytes(files[0] or b"")), 1):
            numbers = self._numbers(words, line)
            labels.append(int(numbers[0]))
            rest, outline = numbers[1:], None
            if len(rest) == 4 or points:
                centre, half = rest[:2], rest[2:4] / 2
                boxes.append([*((centre - half) * scale), *((centre + half) * scale)])
            else:
                outline = rest.reshape(-1, 2) * scale
                boxes.append([*outline.min(0), *outline.max(0)])
            outlines.append(outline)
            if points:
                triples = rest[4:].reshape(points, each)
                labelled = triples[:, 2] > 0 if each == 3 else (triples != 0).any(1)
                poses.append(np.where(labelled[:, None], triples[:, :2], np.nan) * scale)
        drawn = [(n, outline_pixels(o, grid)) for n, o in zip(labels, outlines, strict=True) if o is not None]
        values: dict[str, Any] = {
            "boxes": grid.boxes(np.array(boxes, np.float64).reshape(-1, 4)),
            "box_labels": np.array(labels, np.int64),
            "json": {"outlines": [None if outline is None else outline.tolist() for outline in outlines]},
        }
        if points:
            values["points"] = grid.points(np.array(poses, np.float64).reshape(-1, points, 2))
        if "mask" in self.fields:
            values["mask"] = class_mask(drawn, max(len(self._about.names), *labels, 0) + 1, grid)
        return values

    def _numbers(self, words: Sequence[str], line: int) -> Any:
        """The numbers in a line: a class, then at least four fractions of the image. Raises BadSampleError."""
        try:
            numbers = np.array([float(word) for word in words])
        except ValueError as error:
            raise BadSampleError(f"line {line}: {error}") from error
        count, (points, each) = len(numbers), self._about.pose
        if points and count != 5 + points * each:
            raise BadSampleError(f"line {line}: {count} numbers, expected {5 + points * each} for {points} points")
        if not points and count != 5 and (count < 7 or count % 2 == 0):
            expected = (
                "as with a confidence, which labels do not have" if count == 6 else "for neither a box nor an outline"
            )
            raise BadSampleError(f"line {line}: {count} numbers, {expected}")
        most = len(self._about.names) or _MAX_CLASSES
        if not numbers[0].is_integer() or not 0 <= numbers[0] < most:
            raise BadSampleError(f"line {line}: {words[0]!r:.40} is not a class number, expected 0 to {most - 1}")
        parts = numbers[1:].copy()
        if points and each == 3:
            parts[6::3] = 0  # whether a point is labelled: not a coordinate
        if not ((parts >= -_SLACK) & (parts <= 1 + _SLACK)).all():
            raise BadSampleError(f"line {line}: a number is outside 0 to 1, the image; is it in pixels?")
        return numbers


def _samples(folder: str, pairs: Iterator[tuple[TreeFile, TreeFile | None]], is_known: bool) -> Iterator[Any]:
    for image, label in pairs:
        files = [None if file is None else (file.path, file.bytes) for file in (image, label)]
        times = [image.mtime_ns, label.mtime_ns if label is not None else 0]
        yield {"image": image.path[len(folder) + 1 if folder else 0 :]}, files, is_known, 0, times


def _below(folder: str, images: Mapping[str, TreeFile]) -> Sequence[str]:
    """The images in a folder, at any depth."""
    return [path for path in images if not folder or path.startswith(f"{folder}/")]


def _label_paths(path: str) -> Iterator[str]:
    """The possible paths of an image's labels: "labels" for the last or first "images"; else next to the image."""
    stem = path.rpartition(".")[0]
    parts = stem.split("/")
    places = [place for place, name in enumerate(parts[:-1]) if name == "images"]
    for place in dict.fromkeys((*places[-1:], *places[:1])):
        yield "/".join((*parts[:place], "labels", *parts[place + 1 :])) + ".txt"
    if not places:
        yield f"{stem}.txt"


def _paths(value: Any, name: str, path: Path) -> list[str]:
    """The paths in a value of data.yaml: one or a list. Raises SourceError."""
    paths = value if isinstance(value, list) else [value]
    if len(paths) > _MAX_PATHS or not all(isinstance(text, str) and text and "\0" not in text for text in paths):
        raise SourceError(f"{path}: {name} is {value!r:.80}, expected a path, or a list of paths, up to {_MAX_PATHS:,}")
    return paths


def _checked(names: Sequence[Any], path: Path) -> tuple[str, ...]:
    bad = [name for name in names if not (isinstance(name, str) and name and name.isprintable())]
    if bad or len(set(names)) < len(names) or len(names) > _MAX_CLASSES:
        which = f"{bad[0]!r:.80} is not the name of a class; " if bad else ""
        raise SourceError(f"{path}: {which}expected up to {_MAX_CLASSES:,} different texts")
    return tuple(names)


def _lines_of(text: bytes) -> Iterator[list[str]]:
    """The words of each line that is not blank. Raises BadSampleError."""
    try:
        return (words for line in text.decode().splitlines() if (words := line.split()))
    except UnicodeDecodeError as error:
        raise BadSampleError(f"is not UTF-8 text: {error}") from error
