"""The classes of the images of ILSVRC that are in no folder of a class: from a table, or from the development kit."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from cache.errors import FormatError, MissingExtraError, SourceError
from cache.messages import listed, plural
from packer.formats.ustar import walk
from packer.sources.base import FieldNames, SourceListing, SplitListing
from packer.sources.known_folders import SOLUTION
from packer.sources.streams import StreamWindow, UnpackedStream, compression_of
from packer.sources.tables import open_table
from readers.sample import NO_LABEL
from readers.tree import has_image_suffix, key_of_name

__all__ = ["give_labels", "read_kit", "read_solution", "with_labels"]

_IMAGE, _CLASS = "ImageId", "PredictionString"
_TRUTH, _META = re.compile(r".*/ILSVRC(\d{4})_validation_ground_truth\.txt"), "/data/meta.mat"
_MAX_KIT_BYTES = 64 << 20


def give_labels(listing: SourceListing, solution: Mapping[str, str], where: str) -> None:
    """Give the images without a label the one of a table (name without suffix -> class), and number all classes.

    Those of train come first, so that an image of train has the same label whatever the table has.
    """
    before = listing.classes
    new_classes = sorted({*solution.values()}.difference(before))
    listing.classes = (*before, *new_classes)
    numbers = {name: number for number, name in enumerate(listing.classes)}
    new = np.array([*(numbers[name] for name in before), NO_LABEL], np.int64)
    listing.warnings = [text for text in listing.warnings if "has a label" not in text]
    if before and new_classes:
        count = plural(len(new_classes), "class")
        listing.warnings.append(f"{where}: {count} of val that train lacks: {listed(new_classes)}; they follow its own")
    for name, part in listing.splits.items():
        labels = new[part.labels]  # -1 is the last one
        unlabelled = np.array([row for row in np.flatnonzero(labels == NO_LABEL).tolist() if name != "test"
                               and has_image_suffix(part.names[row][0])], np.int64)  # fmt: skip
        for row in unlabelled.tolist():
            stem = PurePosixPath(key_of_name(part.names[row][0])).name
            labels[row] = numbers.get(solution.get(stem, ""), NO_LABEL)
        missing = int((labels[unlabelled] == NO_LABEL).sum())
        if missing:
            listing.warnings.append(
                f"{where}: {plural(missing, 'image')} of {name} without a label: put {SOLUTION}, or the development "
                f"kit (ILSVRC2012_devkit_t12.tar.gz) for archives, there"
            )
        listing.splits[name] = with_labels(part, labels, part.names)


def with_labels(part: SplitListing, labels: npt.NDArray[Any], names: FieldNames) -> SplitListing:
    """A split with other labels and names."""
    return SplitListing(part.root, part.keys, labels, names, part.bytes, part.places, part.stamps)


def read_solution(path: Path) -> dict[str, str]:
    """The class of each image of val, by its name without a suffix. Raises SourceError."""
    table = open_table(path)
    if {_IMAGE, _CLASS} - {*table.columns}:
        raise SourceError(f"{path}: has the columns {', '.join(table.columns)}, expected {_IMAGE} and {_CLASS}")
    found: dict[str, str] = {}
    for line, row in table.rows():
        name, words = str(row[_IMAGE]), str(row[_CLASS]).split()
        if not words or not (words[0].isascii() and words[0].isalnum()):
            raise SourceError(
                f"{table.where(line)}: {row[_CLASS]!r:.40} does not begin with a synset such as n03995372"
            )
        if found.setdefault(name, words[0]) != words[0]:
            raise SourceError(f"{table.where(line)}: {name!r} for the second time, with another class")
    return found


def read_kit(path: Path) -> dict[str, str]:
    """The class of each image of val, by its name without a suffix, from the development kit. Raises SourceError."""
    truth, meta, year = b"", b"", "2012"
    compression = compression_of(path)
    try:
        with StreamWindow(UnpackedStream(path, compression or "gzip")) as window:
            for member in walk(window):
                match = _TRUTH.fullmatch(member.name)
                if (match or member.name.endswith(_META)) and member.size > _MAX_KIT_BYTES:
                    raise SourceError(f"{path}: {member.name} has {member.size:,} bytes, expected {_MAX_KIT_BYTES:,}")
                if match:
                    truth, year = window.read(member.offset, member.size), match[1]
                elif member.name.endswith(_META):
                    meta = window.read(member.offset, member.size)
    except FormatError as error:
        raise SourceError(str(error)) from error
    if not truth or not meta:
        raise SourceError(f"{path}: holds no data/ILSVRC{year}_validation_ground_truth.txt and {_META[1:]}")
    synsets = _synsets(meta, path)
    lines = truth.decode("ascii", "replace").split()
    unknown = next((number for number, text in enumerate(lines, 1) if text not in synsets), None)
    if unknown is not None:
        raise SourceError(
            f"{path}: image {unknown} is of the class {lines[unknown - 1]!r:.20}, which meta.mat does not have"
        )
    return {f"ILSVRC{year}_val_{number:08d}": synsets[text] for number, text in enumerate(lines, 1)}


def _synsets(meta: bytes, path: Path) -> dict[str, str]:
    """The synset of each number, as text, by meta.mat."""
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise MissingExtraError("scipy", "ilsvrc", "reading meta.mat of the development kit") from error
    try:
        rows = loadmat(io.BytesIO(meta), squeeze_me=True, variable_names=["synsets"])["synsets"].ravel()
        return {str(int(row["ILSVRC2012_ID"])): str(row["WNID"]) for row in rows}
    except Exception as error:  # what scipy raises for damage is of any kind
        raise SourceError(f"{path}: its meta.mat cannot be read: {error!r:.200}") from error
