"""CelebA as it is published: aligned faces in one folder, and lists of what they are.

    img_align_celeba/000001.jpg …     the images; also in Img/
    list_eval_partition.txt           `000001.jpg 0`: 0 is train, 1 val, 2 test; also in Eval/
    list_attr_celeba.txt              the number of images, the names of the attributes, then `000001.jpg -1 1 …`, also
                                      in Anno/: a field "json", {"Bald":-1,…}; without it there is none
    identity_CelebA.txt               `000001.jpg 2880`; also in Anno/

Labels are given on request: label_column="identity" or the name of an attribute, whose labels are 1 where the list has
1 and 0 where it has -1. Images that the partition does not name are left out. A list that names an image twice, one
outside of the folder, or one that the partition lacks, is refused with its line; a missing image is a bad sample.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cache.errors import SourceError
from cache.files import open_regular
from cache.messages import listed, plural
from packer.sources.base import SourceListing
from packer.sources.folder import FolderSource
from packer.sources.layouts import CelebaFiles, celeba_files
from packer.sources.manifest import ManifestListing, ManifestSource
from packer.sources.tables import Columns, Row, Table

__all__ = ["CelebaSource", "open_celeba"]

IDENTITY = "identity"
_SPLITS = {"0": "train", "1": "val", "2": "test"}
_MAX_LINE = 64 << 10
_MAX_ATTRIBUTES = 4096
_MAX_DIGITS = 9
_PATH, _SPLIT, _LABEL = "image name", "image part", "image label"  # no attribute has a space in its name


def open_celeba(
    root: str | os.PathLike[str], layout: str = "auto", label_column: str | None = None
) -> CelebaSource | FolderSource:
    """The source; with layout="tree" the folder of a single class that it is without its lists."""
    if layout == "tree":
        if label_column is not None:
            raise SourceError(f"{root}: label_column={label_column!r} is for CelebA's lists, not for layout='tree'")
        return FolderSource(root, layout)
    return CelebaSource(root, label_column=label_column)


class CelebaSource(ManifestSource):
    """See the module. label_column: "identity", an attribute, or None for no labels."""

    def __init__(self, root: str | os.PathLike[str], *, label_column: str | None = None) -> None:
        files = celeba_files(Path(root))
        if files is None:
            raise SourceError(f"{root}: no img_align_celeba and list_eval_partition.txt in it")
        super().__init__(root, label_column=label_column, folder=files.images)
        self.files: CelebaFiles = files

    @property
    def title(self) -> str:
        return f"CelebA {self.root}"

    def list(self, split: str | None) -> SourceListing:
        rows = dict[str, int]()
        for line, name, _ in _rows(self.files.partition, 1):
            if rows.setdefault(name, len(rows)) != len(rows) - 1:
                raise SourceError(f"{self.files.partition}: line {line}: {name!r} for the second time")
        if not rows:
            raise SourceError(f"{self.files.partition}: no rows")
        attributes = None if self.files.attributes is None else _read_attributes(self.files.attributes, rows)
        names = () if attributes is None else attributes.names
        labels = self._labels(rows, attributes)
        table = _CelebaTable(self.files.partition, (_PATH, _SPLIT, *names), attributes, labels)
        columns = Columns(_PATH, _LABEL if labels is not None else None, _SPLIT, {}, names, {}, frozenset())
        listing = ManifestListing(table, columns, self.folder, split).listing()
        for entry in sorted(os.scandir(self.folder), key=lambda entry: entry.name):
            if entry.name not in rows:
                reason = f"not in {self.files.partition.name}"
                listing.left_out.append((entry.name.encode(errors="backslashreplace").decode(), reason))
        return listing

    def paths(self, listing: SourceListing) -> Iterator[str | os.PathLike[str]]:
        yield from (path for path in self.files[1:] if path is not None)
        yield from list(super().paths(listing))[1:]

    def _labels(self, rows: dict[str, int], attributes: _Attributes | None) -> npt.NDArray[np.int64] | None:
        """Of each row of the partition."""
        wanted = self.label_column
        if wanted is None:
            return None
        if wanted == IDENTITY and self.files.identities is not None:
            return _read_identities(self.files.identities, rows)
        names = () if attributes is None else attributes.names
        if attributes is None or wanted not in names:
            known = [IDENTITY] * (self.files.identities is not None) + [*names]
            raise SourceError(
                f"{self.root}: no labels called {wanted!r} (label_column={wanted!r}); its lists have "
                f"{listed(known, 50) or 'none'}"
            )
        return (attributes.values[:, names.index(wanted)] > 0).astype(np.int64)


@dataclass(frozen=True)
class _Attributes:
    """values: -1 or 1, int8 [rows of the partition, names]."""

    names: tuple[str, ...]
    values: npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class _CelebaTable(Table):
    """The partition, with what the other lists say of each image."""

    attributes: _Attributes | None
    labels: npt.NDArray[np.int64] | None

    def rows(self) -> Iterator[tuple[int, Row]]:
        for number, (line, name, values) in enumerate(_rows(self.path, 1)):
            row: dict[str, Any] = {_PATH: name, _SPLIT: _SPLITS.get(values[0])}
            if row[_SPLIT] is None:
                raise SourceError(f"{self.where(line)}: {values[0]!r} is not a part: 0 (train), 1 (val) or 2 (test)")
            if self.attributes is not None:
                row |= zip(self.attributes.names, self.attributes.values[number].tolist(), strict=True)
            if self.labels is not None:
                row[_LABEL] = int(self.labels[number])
            yield line, row


def _read_attributes(path: Path, rows: dict[str, int]) -> _Attributes:
    lines = _lines(path)
    _, first = next(lines, (1, ""))
    number, header = next(lines, (2, ""))
    names = tuple(header.split())
    if not first.isdecimal() or not 0 < len(names) <= _MAX_ATTRIBUTES or len(set(names)) < len(names):
        raise SourceError(
            f"{path}: line {number}: expected the number of images, and then a line with the names of the attributes"
        )
    values = np.zeros((len(rows), len(names)), np.int8)
    for line, row, found in _of_rows(path, len(names), rows, skip=2):
        if not {*found} <= {"-1", "1"}:
            raise SourceError(f"{path}: line {line}: attributes are -1 or 1")
        values[row] = np.array(found, np.int8)
    return _Attributes(names, values)


def _read_identities(path: Path, rows: dict[str, int]) -> npt.NDArray[np.int64]:
    labels = np.zeros(len(rows), np.int64)
    for line, row, (found,) in _of_rows(path, 1, rows):
        if not (found.isascii() and found.isdecimal() and len(found) <= _MAX_DIGITS):
            raise SourceError(f"{path}: line {line}: {found!r} is not the number of a person")
        labels[row] = int(found)
    return labels


def _of_rows(path: Path, count: int, rows: dict[str, int], skip: int = 0) -> Iterator[tuple[int, int, list[str]]]:
    """(line, row of the partition, values) of each line; every row has one."""
    seen = np.zeros(len(rows), np.bool_)
    for line, name, values in _rows(path, count, skip):
        row = rows.get(name)
        if row is None:
            raise SourceError(f"{path}: line {line}: {name!r} is not in the partition of the images")
        if seen[row]:
            raise SourceError(f"{path}: line {line}: {name!r} for the second time")
        seen[row] = True
        yield line, row, values
    if not seen.all():
        missing = next(name for name, row in rows.items() if not seen[row])
        raise SourceError(f"{path}: no line for {missing!r}; {plural(int((~seen).sum()), 'image')} have none")


def _rows(path: Path, count: int, skip: int = 0) -> Iterator[tuple[int, str, list[str]]]:
    """(line, name of an image, `count` values) of each line."""
    for line, text in _lines(path):
        words = text.split()
        if line <= skip or not words:
            continue
        if len(words) != 1 + count:
            raise SourceError(f"{path}: line {line}: {len(words)} words, expected a name and {count} values")
        name = words[0]
        if "/" in name or name in (".", "..") or "\0" in name:
            raise SourceError(f"{path}: line {line}: {name!r} is not the name of a file in the folder of the images")
        yield line, name, words[1:]


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8") as file:
            number = 0
            while text := file.readline(_MAX_LINE):
                number += 1
                if len(text) == _MAX_LINE:
                    raise SourceError(f"{path}: line {number}: longer than {_MAX_LINE:,} characters")
                yield number, text.strip()
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SourceError(f"{path}: not UTF-8 text; not a list of CelebA") from error
