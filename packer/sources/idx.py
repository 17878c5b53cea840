"""MNIST's files of images and labels, plain or compressed: MNIST, Fashion-MNIST, KMNIST, EMNIST.

    train-images-idx3-ubyte      the images of train; also train-images.idx3-ubyte, and with .gz
    train-labels-idx1-ubyte      their labels
    t10k-…, test-…               of test
    emnist-letters-train-…       a set among several: name one of its files, and all of that set are taken
    emnist-letters-mapping.txt   `1 65 97`: a label, and the characters of its class

in a folder, or in its `raw` or `MNIST/raw` and the like, where torchvision puts them. Of a file that is there both
plain and compressed, the plain one is read. Images become PNG and stay as they are stored: those of EMNIST lie on their
side, as every reader of these files sees them.

    file    0, 0, type (8: uint8), dimensions, then a big-endian uint32 for each, then the values

(http://yann.lecun.com/exdb/mnist, "the IDX file format")
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cache.errors import SourceError
from cache.files import read_regular
from cache.messages import listed, quoted
from packer.sources.file_sets import PixelBlock, PixelSets, PixelSource, PixelSplit, check_image_bytes
from packer.sources.layouts import idx_folder, idx_name
from packer.sources.streams import PlainFile, UnpackedStream, compression_of
from readers.table import NO_LABEL

__all__ = ["IdxSource"]

_SPLITS = {"train": "train", "t10k": "test", "test": "test"}
_UINT8 = 8
_MAX_MAPPING_BYTES = 1 << 20
_MAX_RATIO = 1032  # of deflate
_STEP = 1 << 20


class IdxSource(PixelSource):
    """The files of the set at `root`: a folder, or one of the files. label_offset: is subtracted from the labels."""

    kind = "IDX files"

    def __init__(self, root: str | os.PathLike[str], label_offset: int = 0) -> None:
        super().__init__(Path(root))
        self.label_offset = label_offset

    def find(self, split: str | None) -> PixelSets:
        names, prefix = self._chosen()
        found = PixelSets({})
        splits: dict[str, PixelSplit] = {}
        for name in names:
            part = idx_name(name)
            if part is not None and part.prefix == prefix and part.is_images and self._is_first(name, names):
                splits[_SPLITS[part.split]] = self._split(name, names)
        found.splits = dict(sorted(splits.items(), reverse=True))  # train first
        self._leave_out(found, names, prefix)
        found.classes = self._classes(prefix, found)
        return found

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return self.root.parent if self.root.is_file() else idx_folder(self.root) or self.root

    def _chosen(self) -> tuple[list[str], str]:
        """The files of the folder, in order, and the prefix of those of the set."""
        names = sorted(os.listdir(self.folder))
        parts = [part for name in names if (part := idx_name(name)) and part.is_images]
        if self.root.is_file():
            own = idx_name(self.root.name)
            if own is None:
                raise SourceError(
                    f"{self.root}: an IDX file whose name does not say what it is; expected "
                    f"train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte or the like"
                )
            return names, own.prefix
        prefixes = sorted({part.prefix for part in parts})
        if len(prefixes) > 1:
            first = next(name for name in names if (part := idx_name(name)) and part.is_images)
            raise SourceError(
                f"{self.root}: has the sets {listed([p.rstrip('-') for p in prefixes], 20)}; name a file of the one "
                f"that is meant, for example  packer convert {quoted(self.folder / first)}"
            )
        if not prefixes:
            raise SourceError(f"{self.root}: no file of images such as train-images-idx3-ubyte")
        return names, prefixes[0]

    def _is_first(self, name: str, names: Sequence[str]) -> bool:
        """Whether the file is not the compressed twin of another one."""
        return not (name.endswith(".gz") and name.removesuffix(".gz") in names)

    def _leave_out(self, found: PixelSets, names: Sequence[str], prefix: str) -> None:
        for name in names:
            part = idx_name(name)
            if self.folder / name in self._stamps:
                continue
            if part is None:
                reason = "" if name == f"{prefix}mapping.txt" else "not a file of images or labels"
            elif part.prefix != prefix:
                reason = "of another set"
            else:
                reason = (
                    "compressed, next to the same file unpacked" if not self._is_first(name, names) else "no images"
                )
            if reason:
                found.left_out.append((name, reason))

    def _split(self, name: str, names: Sequence[str]) -> PixelSplit:
        path = self.note(self.folder / name)
        compression, shape, start = _header(path, 3)
        count, height, width = shape
        check_image_bytes(path, height * width)
        block = PixelBlock(path, count, height, width, start=start, compression=compression)
        labels_name = next(
            (other for other in names if self._are_labels(name, other) and self._is_first(other, names)), None
        )
        if labels_name is None:
            return PixelSplit([block], np.full(count, NO_LABEL, np.int64))
        labels_path = self.note(self.folder / labels_name)
        labels = _read_labels(labels_path)
        if len(labels) != count:
            raise SourceError(f"{labels_path}: has {len(labels):,} labels, but {name} has {count:,} images")
        if len(labels) and int(labels.min()) < self.label_offset:
            raise SourceError(f"{labels_path}: has the label {labels.min()}, below the offset {self.label_offset}")
        return PixelSplit([block], labels - self.label_offset)

    def _are_labels(self, images: str, other: str) -> bool:
        part, its = idx_name(images), idx_name(other)
        return bool(part and its and not its.is_images and its[:2] == part[:2])

    def _classes(self, prefix: str, found: PixelSets) -> tuple[str, ...]:
        """The names in the mapping of an EMNIST set, and warnings about its labels."""
        labels = np.concatenate([part.labels for part in found.splits.values()])
        path = self.folder / f"{prefix}mapping.txt"
        names = _read_mapping(self.note(path)) if path.exists() else {}
        if len(labels) and int(labels.min()) == 1:
            found.warnings.append(
                f"{self.root}: labels run from 1 to {int(labels.max())} and none is 0; to count from 0:  "
                f"--source-label-offset 1  (in Python: packer.open_source(path, label_offset=1))"
            )
            return ()
        moved = {label - self.label_offset: name for label, name in names.items()}
        if not moved or sorted(moved) != list(range(len(moved))) or len(set(moved.values())) < len(moved):
            return ()
        return tuple(moved[label] for label in range(len(moved))) if int(labels.max()) < len(moved) else ()


def _header(path: Path, dimensions: int) -> tuple[str, tuple[int, ...], int]:
    """(compression, shape, where the values begin). Raises SourceError where the file is not of this many values."""
    compression = compression_of(path)
    file = UnpackedStream(path, compression) if compression else PlainFile(path)
    try:
        head = bytearray(4 + 4 * dimensions)
        file.read_into(0, memoryview(head))
        if head[:4] != bytes((0, 0, _UINT8, dimensions)):
            raise SourceError(
                f"{path}: begins with {bytes(head[:4]).hex(' ')}, expected 00 00 08 {dimensions:02x}: an IDX file of "
                f"uint8 with {dimensions} dimensions"
            )
        shape = struct.unpack(f">{dimensions}I", head[4:])
        size = len(head) + math.prod(shape)
        found = path.stat().st_size
        if not compression and found != size:
            raise SourceError(f"{path}: has {found:,} bytes, expected {size:,} for {list(shape)}: truncated?")
        if compression and (compression != "gzip" or size > _MAX_RATIO * found):
            raise SourceError(
                f"{path}: {found:,} bytes of {compression} claim {size:,}, more than gzip unpacks to; unpack it first"
            )
        return compression, shape, len(head)
    finally:
        file.close()


def _read_labels(path: Path) -> npt.NDArray[np.int64]:
    compression, (count,), start = _header(path, 1)
    file = UnpackedStream(path, compression) if compression else PlainFile(path)
    parts = []
    try:
        for first in range(0, count, _STEP):  # piece by piece: a false count takes no memory
            part = bytearray(min(_STEP, count - first))
            file.read_into(start + first, memoryview(part))
            parts.append(np.frombuffer(part, np.uint8))
    finally:
        file.close()
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)


def _read_mapping(path: Path) -> dict[int, str]:
    """Class names by label, as characters."""
    names: dict[int, str] = {}
    try:
        text = read_regular(path, _MAX_MAPPING_BYTES).decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path}: cannot be read: {error}") from error
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if words and not (len(words) > 1 and all(re.fullmatch(r"\d{1,4}", word) for word in words)):
            raise SourceError(f"{path}: line {number}: {line!r:.40}, expected a label and the codes of its characters")
        if words:
            names[int(words[0])] = chr(int(words[1]))
    return names
