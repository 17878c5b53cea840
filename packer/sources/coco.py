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

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeAlias

from cache.errors import SourceError
from packer.sources.base import SourceListing
from packer.sources.coco_listing import CocoCategories, CocoImages
from packer.sources.coco_records import CocoFile, CocoReader
from packer.sources.folder import FolderSource
from packer.sources.json_parts import json_parts
from packer.sources.known_folders import COCO_KINDS, COCO_NAME, ROBOFLOW, coco_files
from packer.sources.lookups import file_stamp, wanted_split
from packer.sources.shards import split_of_name
from packer.sources.streams import PlainFile
from readers.tree import has_image_suffix

__all__ = ["CocoSource", "open_coco"]

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
