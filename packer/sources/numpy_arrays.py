"""Arrays of NumPy: images as uint8 [n, height, width], [n, height, width, channels] or [n, channels, height, width].

    images.npy, labels.npy        in a folder; also x.npy and y.npy, and with a split: train_images.npy, x_train.npy
    x.npz                         both in one file, as numpy.savez and savez_compressed write it
    images.npy                    alone; its labels are in the file beside it

Labels are whole numbers [n] or [n, 1], or names, whose classes are sorted. Pixels become PNG. Nothing is unpickled, and
an array is read an image at a time, however large it is. Of one that could be either, the last dimension is that of the
channels (1, 3 or 4).

    .npy    93 "NUMPY", version, the length of the header, the header: dtype, order and shape; then the values

(numpy.lib.format documents it.)
"""

from __future__ import annotations

import io
import math
import os
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile

import numpy as np
import numpy.typing as npt

from cache.errors import SourceError
from packer.sources.file_sets import PixelBlock, PixelSets, PixelSource, PixelSplit, ZipMember, check_image_bytes
from packer.sources.layouts import splits_of_arrays
from packer.sources.shards import split_of_name
from packer.sources.streams import PlainFile
from packer.sources.tables import Table, number_labels
from readers.table import NO_LABEL

__all__ = ["NumpySource"]

_CHANNELS = (1, 3, 4)
_HEAD_BYTES = 12
_MAX_HEADER_BYTES = 10_000
_MAX_MEMBERS = 1000
_MAX_LABEL_BYTES = 1 << 30
_MAX_IMAGES = 1 << 31
_MAX_RATIO = 1032  # of deflate
_MAX_LABEL = 1 << 53


class _Array(NamedTuple):
    """Where an array is, and what it is. start: of its values."""

    path: Path
    member: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int

    @property
    def name(self) -> str:
        return _where(self.path, self.member)


class NumpySource(PixelSource):
    """The arrays at `root`: a folder, a .npz, or the .npy of the images."""

    kind = "NumPy arrays"

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__(Path(root))

    def find(self, split: str | None) -> PixelSets:
        names = self._names()
        wanted = splits_of_arrays(list(names))
        if not wanted:
            raise SourceError(
                f"{self.root}: no arrays called images and labels, or x and y (train_images, x_train); it has "
                f"{', '.join(names) or 'none'}"
            )
        if len(wanted) > 1 and "" in wanted:
            raise SourceError(f"{self.root}: {wanted['']} belongs to no split, but others do; move it away")
        chosen = {name or split or split_of_name(self.root.stem): pair for name, pair in wanted.items()}
        images = {name: self._image_block(names[pair[0]]) for name, pair in chosen.items()}
        labels, classes = self._labels(names, chosen, images)
        found = PixelSets({name: PixelSplit([block], labels[name]) for name, block in images.items()}, classes)
        used = {array for pair in wanted.values() for array in pair}
        found.left_out = [(where, "no array of images or labels") for name, where in names.items() if name not in used]
        return found

    def _names(self) -> dict[str, str]:
        """The arrays: name without .npy -> name of the file or member."""
        if self.root.is_dir():
            files = [path.name for path in sorted(self.root.iterdir()) if path.suffix == ".npy"]
        elif self.root.suffix == ".npy" or not _is_zip(self.root):
            files = [self.root.name]
            beside = [path.name for path in sorted(self.root.parent.glob("*.npy"))]
            pairs = splits_of_arrays([name.removesuffix(".npy") for name in beside])
            own = self.root.name.removesuffix(".npy")
            files += [f"{labels}.npy" for images, labels in pairs.values() if images == own and labels]
            if own not in {images for images, _ in pairs.values()}:
                return {"images": self.root.name}
        else:
            files = list(_members(self.note(self.root)))
        return {name.removesuffix(".npy"): name for name in files}

    def _open(self, name: str) -> tuple[Path, str]:
        """(path, member) of an array."""
        if self.root.is_dir():
            return self.note(self.root / name), ""
        if _is_zip(self.root):
            return self.root, name
        return self.note(self.root.parent / name), ""

    def _image_block(self, name: str) -> PixelBlock:
        array = _read_header(*self._open(name))
        shape = array.shape
        if array.dtype != np.uint8:
            raise SourceError(
                f"{array.name}: an array of {array.dtype}, expected images of uint8; if its values run from 0 to 1, "
                f"save  (255 * x).round().astype('uint8')"
            )
        if len(shape) == 3:
            height, width, channels, planes = shape[1], shape[2], 0, False
        elif len(shape) == 4 and shape[3] in _CHANNELS:
            height, width, channels, planes = shape[1], shape[2], shape[3], False
        elif len(shape) == 4 and shape[1] in _CHANNELS:
            height, width, channels, planes = shape[2], shape[3], shape[1], True
        else:
            raise SourceError(
                f"{array.name}: an array {list(shape)}, expected images [n, height, width], with 1, 3 or 4 channels "
                f"[n, height, width, channels] or [n, channels, height, width]"
            )
        check_image_bytes(array.name, height * width * max(1, channels))
        if shape[0] > _MAX_IMAGES:
            raise SourceError(f"{array.name}: claims {shape[0]:,} images")
        return PixelBlock(
            array.path, shape[0], height, width, channels, start=array.start, planes=planes, member=array.member
        )

    def _labels(
        self, names: dict[str, str], chosen: dict[str, tuple[str, str]], images: dict[str, PixelBlock]
    ) -> tuple[dict[str, npt.NDArray[np.int64]], tuple[str, ...]]:
        """Labels by split, and the names of classes where labels are names."""
        found: dict[str, npt.NDArray[Any]] = {}
        for split, (_, name) in chosen.items():
            if name:
                found[split] = self._read_labels(names[name], images[split].count)
        kinds = {"number" if its.dtype.kind in "iub" else "name" for its in found.values()}
        if len(kinds) > 1:
            raise SourceError(f"{self.root}: the labels of some splits are numbers and those of others are names")
        labels = {name: np.full(block.count, NO_LABEL, np.int64) for name, block in images.items()}
        if "name" not in kinds:
            return labels | {name: its.astype(np.int64) for name, its in found.items()}, ()
        every = np.concatenate([its.astype(str) for its in found.values()])
        numbers, classes, _ = number_labels(every.tolist(), range(1, len(every) + 1), Table(self.root, ()))
        rest = np.array(numbers, np.int64)
        for name, its in found.items():
            labels[name], rest = rest[: len(its)], rest[len(its) :]
        return labels, classes

    def _read_labels(self, name: str, count: int) -> npt.NDArray[Any]:
        array = _read_header(*self._open(name))
        shape = array.shape[:1] if array.shape[1:] == (1,) else array.shape
        if shape != (count,) or array.dtype.kind not in "iubUS":
            raise SourceError(
                f"{array.name}: an array {list(array.shape)} of {array.dtype}, expected {count:,} labels, which are "
                f"whole numbers or names"
            )
        size = count * array.dtype.itemsize
        if size > _MAX_LABEL_BYTES:
            raise SourceError(f"{array.name}: {size:,} bytes of labels, expected at most {_MAX_LABEL_BYTES:,}")
        labels = np.frombuffer(_read(array.path, array.member, array.start, size), array.dtype)
        if labels.dtype.kind in "iu" and len(labels):
            wrong = (labels < NO_LABEL) | (labels > _MAX_LABEL)
            if wrong.any():
                position = int(np.flatnonzero(wrong)[0])
                raise SourceError(f"{array.name}: label {position} is {labels[position]}: classes count from 0")
        return np.char.decode(labels, "utf-8", "replace") if labels.dtype.kind == "S" else labels


def _where(path: Path, member: str) -> str:
    return f"{path}: {member}" if member else str(path)


def _is_zip(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(2) == b"PK"
    except OSError:
        return False


def _members(path: Path) -> dict[str, int]:
    """The arrays in a .npz. Raises SourceError where a member claims more than it can unpack to."""
    try:
        with ZipFile(path) as archive:
            entries = archive.infolist()
        size = path.stat().st_size
    except (BadZipFile, OSError, ValueError, EOFError, NotImplementedError) as error:
        raise SourceError(f"{path}: not a .npz, or truncated: {error}") from error
    names = [entry.filename for entry in entries]
    if len(names) > _MAX_MEMBERS or len(set(names)) < len(names):
        raise SourceError(f"{path}: has {len(names)} members, expected at most {_MAX_MEMBERS}, each name once")
    for entry in entries:
        if entry.compress_type not in (ZIP_STORED, ZIP_DEFLATED) or entry.flag_bits & 1:
            raise SourceError(f"{path}: {entry.filename!r} is encrypted, or compressed in another way than deflate")
        if entry.file_size > _MAX_RATIO * max(1, min(entry.compress_size, size)):
            raise SourceError(
                f"{path}: {entry.filename!r} claims {entry.file_size:,} bytes, more than {entry.compress_size:,} can "
                f"unpack to: damaged, or a decompression bomb"
            )
    return {name: entry.file_size for name, entry in zip(names, entries, strict=True) if name.endswith(".npy")}


def _read(path: Path, member: str, offset: int, length: int) -> bytes:
    """Bytes of an array's file, piece by piece: a false length takes no memory."""
    file = ZipMember(path, member) if member else PlainFile(path)
    parts = []
    try:
        while length:
            part = bytearray(min(length, 1 << 20))
            file.read_into(offset, memoryview(part))
            parts.append(bytes(part))
            offset, length = offset + len(part), length - len(part)
    finally:
        file.close()
    return b"".join(parts)


def _read_header(path: Path, member: str) -> _Array:
    """The header of an array. Raises SourceError where it is none that can be read."""
    where = _where(path, member)
    head = _read(path, member, 0, _HEAD_BYTES)
    if head[:6] != b"\x93NUMPY" or head[6] not in (1, 2, 3):
        raise SourceError(f"{where}: not an array of NumPy")
    width = 2 if head[6] == 1 else 4
    length = int.from_bytes(head[8 : 8 + width], "little")
    if length > _MAX_HEADER_BYTES:
        raise SourceError(f"{where}: claims a header of {length:,} bytes")
    text = io.BytesIO(_read(path, member, 8, width + length))
    try:
        read = np.lib.format.read_array_header_1_0 if head[6] == 1 else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(text, max_header_size=_MAX_HEADER_BYTES)
    except Exception as error:  # of Python's own parser, which numpy uses: ValueError, TokenError, MemoryError, …
        raise SourceError(f"{where}: has a header that cannot be read: {error}") from error
    if dtype.hasobject or dtype.names:
        raise SourceError(f"{where}: holds objects, which are pickled, and are not read; save an array of numbers")
    if is_fortran and len(shape) > 1:
        raise SourceError(f"{where}: is in the order of Fortran; save  numpy.ascontiguousarray(x)")
    array = _Array(path, member, dtype, tuple(shape), 8 + width + length)
    size = array.start + math.prod(array.shape) * dtype.itemsize
    found = _members(path)[member] if member else path.stat().st_size
    if found < size:
        raise SourceError(f"{where}: has {found:,} bytes, expected {size:,} for {list(shape)}: truncated?")
    return array
