"""MNIST-style files of images and labels, plain or compressed: MNIST, Fashion-MNIST, KMNIST, EMNIST.

    train-images-idx3-ubyte      the images of train; also train-images.idx3-ubyte, and with .gz
    train-labels-idx1-ubyte      their labels
    t10k-…, test-…               of test
    emnist-letters-train-…       a set among several: name one of its files, and the whole set is taken
    emnist-letters-mapping.txt   `1 65 97`: a label, and the characters of its class

in a folder, or in its `raw` or `MNIST/raw` and the like, where torchvision puts them. If a file exists both plain and
compressed, the plain one is read. Images become PNG in their stored orientation: those of EMNIST are transposed, as for
every reader of these files.

    file    0, 0, type (8: uint8), dimensions, then a big-endian uint32 for each, then the values

(http://yann.lecun.com/exdb/mnist, "the IDX file format")
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cache.errors import SourceError
from cache.messages import listed, quoted
from packer.sources.base import SourceListing, read_text
from packer.sources.layouts import IdxName, idx_folder, idx_name
from packer.sources.pixels import PixelBlock, PixelSource, check_image_bytes
from packer.sources.streams import compression_of, open_bytes
from readers.table import NO_LABEL

__all__ = ["IdxSource"]

_SPLITS = {"train": "train", "t10k": "test", "test": "test"}
_UINT8 = 8
_MAX_MAPPING_BYTES = 1 << 20
_MAX_RATIO = 1032  # of deflate


class IdxSource(PixelSource):
    """The files of the set at `root`: a folder, or one of the files. label_offset: subtracted from the labels."""

    kind = "IDX files"

    def __init__(self, root: str | os.PathLike[str], label_offset: int = 0) -> None:
        super().__init__(root)
        self.label_offset = label_offset

    def list_files(self, split: str | None) -> SourceListing:
        self._folder = self.root.parent if self.root.is_file() else idx_folder(self.root) or self.root
        names = sorted(os.listdir(self._folder))
        twins = [name for name in names if name.endswith(".gz") and name.removesuffix(".gz") in names]
        parts = {name: part for name in names if (part := idx_name(name)) and name not in twins}
        prefix = self._prefix(parts)
        own = {(part.split, part.is_images): name for name, part in parts.items() if part.prefix == prefix}
        listing, every = self.begin(), []
        for word in sorted({word for word, is_images in own if is_images}, reverse=True):  # train first
            every.append(self._add(listing, _SPLITS[word], own[word, True], own.get((word, False))))
        self._number(listing, prefix, np.concatenate(every))
        for name in names:
            part = idx_name(name)
            if self._folder / name in self._stamps or name == f"{prefix}mapping.txt":
                continue
            reason = "compressed, next to the same file unpacked" if name in twins else "no images"
            reason = "of another set" if part is not None and part.prefix != prefix else reason
            listing.left_out.append((name, "not a file of images or labels" if part is None else reason))
        return listing

    def _prefix(self, parts: Mapping[str, IdxName]) -> str:
        """The common prefix of the file names of the set."""
        if self.root.is_file():
            own = idx_name(self.root.name)
            if own is None:
                raise SourceError(
                    f"{self.root}: an IDX file whose name does not show its content; expected "
                    f"train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte or the like"
                )
            return own.prefix
        first: dict[str, str] = {
            part.prefix: name for name, part in sorted(parts.items(), reverse=True) if part.is_images
        }
        if len(first) > 1:
            prefixes = sorted(first)
            raise SourceError(
                f"{self.root}: has the sets {listed([p.rstrip('-') for p in prefixes], 20)}; name a file of one of "
                f"them, for example  packer convert {quoted(self._folder / first[prefixes[0]])}"
            )
        if not first:
            raise SourceError(f"{self.root}: no file of images such as train-images-idx3-ubyte")
        return next(iter(first))

    def _add(self, listing: SourceListing, split: str, name: str, labels_name: str | None) -> npt.NDArray[np.int64]:
        """Add a split; returns the labels in its file."""
        path = self.note(self._folder / name)
        compression, (count, height, width), start = _header(path, 3)
        check_image_bytes(path, height * width)
        labels = np.full(count, NO_LABEL, np.int64)
        if labels_name is not None:
            labels_path = self.note(self._folder / labels_name)
            packed, (size,), first = _header(labels_path, 1)
            if size != count:
                raise SourceError(f"{labels_path}: has {size:,} labels, but {name} has {count:,} images")
            with open_bytes(labels_path, packed) as file:
                labels = np.frombuffer(file.read(first, count), np.uint8).astype(np.int64)
            if count and int(labels.min()) < self.label_offset:
                raise SourceError(f"{labels_path}: has the label {labels.min()}, below the offset {self.label_offset}")
            labels -= self.label_offset
        self.add(listing, split, [PixelBlock(path, count, height, width, start=start, compression=compression)], labels)
        return labels

    def _number(self, listing: SourceListing, prefix: str, labels: npt.NDArray[np.int64]) -> None:
        """Take the class names from the mapping of an EMNIST set, or warn about labels that count from 1."""
        path = self._folder / f"{prefix}mapping.txt"
        names = _read_mapping(self.note(path)) if path.exists() else {}
        if len(labels) and int(labels.min()) == 1:
            listing.warnings.append(
                f"{self.root}: labels run from 1 to {int(labels.max())} and none is 0; to count from 0:  "
                f"--source-label-offset 1  (in Python: packer.open_source(path, label_offset=1))"
            )
            return
        moved = [names.get(label + self.label_offset, "") for label in range(len(names))]
        if len({*moved} - {""}) == len(names) > int(labels.max(initial=-1)):
            listing.classes = tuple(moved)


def _header(path: Path, dimensions: int) -> tuple[str, tuple[int, ...], int]:
    """(compression, shape, start of the values). Raises SourceError if the file has another number of values."""
    compression = compression_of(path)
    with open_bytes(path, compression) as file:
        head = file.read(0, 4 + 4 * dimensions)
    if head[:4] != bytes((0, 0, _UINT8, dimensions)):
        raise SourceError(
            f"{path}: begins with {head[:4].hex(' ')}, expected 00 00 08 {dimensions:02x}: an IDX file of uint8 with "
            f"{dimensions} dimensions"
        )
    shape = struct.unpack(f">{dimensions}I", head[4:])
    size, file_bytes = len(head) + math.prod(shape), path.stat().st_size
    if not compression and file_bytes != size:
        raise SourceError(f"{path}: has {file_bytes:,} bytes, expected {size:,} for {list(shape)}: truncated?")
    if compression and (compression != "gzip" or size > _MAX_RATIO * file_bytes):
        raise SourceError(
            f"{path}: {file_bytes:,} bytes of {compression} claim {size:,}, more than gzip unpacks to; unpack it first"
        )
    return compression, shape, len(head)


def _read_mapping(path: Path) -> dict[int, str]:
    """Class names by label, as characters."""
    names: dict[int, str] = {}
    for number, line in enumerate(read_text(path, _MAX_MAPPING_BYTES).splitlines(), 1):
        words = line.split()
        if words and not (len(words) > 1 and all(re.fullmatch(r"\d{1,4}", word) for word in words)):
            raise SourceError(f"{path}: line {number}: {line!r:.40}, expected a label and the codes of its characters")
        if words:
            names[int(words[0])] = chr(int(words[1]))
    return names
