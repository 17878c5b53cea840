"""CelebA as published: aligned faces in one folder, and lists about them.

    img_align_celeba/000001.jpg …     the images; also in Img/
    list_eval_partition.txt           `000001.jpg 0`: 0 is train, 1 val, 2 test; also in Eval/
    list_attr_celeba.txt              the number of images, the names of the attributes, then `000001.jpg -1 1 …`, also
                                      in Anno/: a field "json", {"Bald":-1,…}; without it there is none
    identity_CelebA.txt               `000001.jpg 2880`; also in Anno/

Labels are given on request: label_column="identity", or the name of an attribute, with label 1 for 1 in the list and 0
for -1. Images that the partition does not name are left out. A list that names an image twice, one outside the folder,
or one that the partition lacks, is refused, naming the line; a missing image is a bad sample.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cache.errors import SourceError
from cache.messages import listed, plural
from packer.sources.base import SourceListing, refusing
from packer.sources.layouts import CelebaFiles, celeba_files
from packer.sources.manifest import ManifestListing, ManifestSource
from packer.sources.tables import Columns, Row, Table

__all__ = ["CelebaSource"]

IDENTITY = "identity"
_SPLITS = {"0": "train", "1": "val", "2": "test"}
_MAX_LINE = 64 << 10
_MAX_ATTRIBUTES = 4096
_MAX_DIGITS = 9
_PATH, _SPLIT, _LABEL = "image name", "image part", "image label"  # no attribute has a space in its name


class CelebaSource(ManifestSource):
    """See the module. label_column: "identity", an attribute, or None for no labels."""

    kind = "CelebA"

    def __init__(self, root: str | os.PathLike[str], *, label_column: str | None = None) -> None:
        files = celeba_files(Path(root))
        if files is None:
            raise SourceError(f"{root}: no img_align_celeba and list_eval_partition.txt in it")
        super().__init__(root, label_column=label_column, folder=files.images)
        self.files: CelebaFiles = files

    def list_files(self, split: str | None) -> SourceListing:
        for path in self.files[1:]:
            if path is not None:
                self.note(path)
        parts = {name: values[0] for _, name, values in _rows(self.files.partition, 1)}
        if not parts:
            raise SourceError(f"{self.files.partition}: no rows")
        names, attributes = self._attributes(parts)
        labels = self._labels(parts, names, attributes)
        table = _CelebaTable(self.files.partition, (_PATH, _SPLIT, *names), attributes, labels)
        columns = Columns(_PATH, _LABEL if self.label_column else None, _SPLIT, {}, names, {}, frozenset())
        listing = ManifestListing(table, columns, self.folder, split).listing()
        for name in sorted(os.listdir(self.folder)):
            if name not in parts:
                reason = f"not in {self.files.partition.name}"
                listing.left_out.append((name.encode(errors="backslashreplace").decode(), reason))
        return listing

    def _attributes(self, parts: Collection[str]) -> tuple[tuple[str, ...], dict[str, array[int]]]:
        """(their names; -1 or 1 for each of them, by image)."""
        path = self.files.attributes
        if path is None:
            return (), {}
        lines = _lines(path)
        _, first = next(lines, (1, ""))
        number, header = next(lines, (2, ""))
        names = tuple(header.split())
        if not first.isdecimal() or not 0 < len(names) <= _MAX_ATTRIBUTES or len(set(names)) < len(names):
            raise SourceError(
                f"{path}: line {number}: expected the number of images, and then a line with the names of attributes"
            )
        attributes = {}
        for line, name, values in _rows(path, len(names), parts, skip=2):
            if not {*values} <= {"-1", "1"}:
                raise SourceError(f"{path}: line {line}: attributes are -1 or 1")
            attributes[name] = array("b", map(int, values))
        return names, attributes

    def _labels(
        self, parts: Collection[str], names: tuple[str, ...], attributes: Mapping[str, array[int]]
    ) -> dict[str, int]:
        column, path = self.label_column, self.files.identities
        if column is None:
            return {}
        if column in names:
            return {name: int(values[names.index(column)] > 0) for name, values in attributes.items()}
        if column != IDENTITY or path is None:
            known = [IDENTITY] * (path is not None) + [*names]
            raise SourceError(
                f"{self.root}: no labels called {column!r} (label_column={column!r}); its lists have "
                f"{listed(known, 50) or 'none'}"
            )
        labels = {}
        for line, name, (number,) in _rows(path, 1, parts):
            if not (number.isascii() and number.isdecimal() and len(number) <= _MAX_DIGITS):
                raise SourceError(f"{path}: line {line}: {number!r} is not the number of a person")
            labels[name] = int(number)
        return labels


@dataclass(frozen=True, slots=True)
class _CelebaTable(Table):
    """The partition, with the values from the other lists for each image."""

    attributes: Mapping[str, array[int]]
    labels: Mapping[str, int]

    def rows(self) -> Iterator[tuple[int, Row]]:
        for line, name, (part,) in _rows(self.path, 1):
            if part not in _SPLITS:
                raise SourceError(f"{self.where(line)}: {part!r} is not a part: 0 (train), 1 (val) or 2 (test)")
            more = zip(self.columns[2:], self.attributes.get(name, ()), strict=False)
            yield line, {_PATH: name, _SPLIT: _SPLITS[part], _LABEL: self.labels.get(name), **dict(more)}


def _rows(
    path: Path, count: int, known: Collection[str] | None = None, skip: int = 0
) -> Iterator[tuple[int, str, list[str]]]:
    """(line, name of an image, `count` values) of each line, one for each known image."""
    seen: set[str] = set()
    for line, text in _lines(path):
        words = text.split()
        if line <= skip or not words:
            continue
        name, problem = words[0], ""
        if len(words) != 1 + count:
            problem = f"{len(words)} words, expected a name and {count} values"
        elif "/" in name or name in (".", "..") or "\0" in name:
            problem = f"{name!r} is not the name of a file in the folder of the images"
        elif name in seen:
            problem = f"{name!r} for the second time"
        elif known is not None and name not in known:
            problem = f"{name!r} is not in the partition of the images"
        if problem:
            raise SourceError(f"{path}: line {line}: {problem}")
        seen.add(name)
        yield line, name, words[1:]
    if known is not None and len(seen) < len(known):
        missing = next(name for name in known if name not in seen)
        raise SourceError(f"{path}: no line for {missing!r}; {plural(len(known) - len(seen), 'image')} have none")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with refusing(path, "not a list of CelebA, or not UTF-8"), open(path, encoding="utf-8") as file:
        number = 0
        while text := file.readline(_MAX_LINE):
            number += 1
            if len(text) == _MAX_LINE:
                raise SourceError(f"{path}: line {number}: longer than {_MAX_LINE:,} characters")
            yield number, text.strip()
