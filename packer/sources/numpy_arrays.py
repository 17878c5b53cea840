"""NumPy arrays: images as uint8 [n, height, width], [n, height, width, channels] or [n, channels, height, width].

    images.npy, labels.npy        in a folder; also x.npy and y.npy, and with a split: train_images.npy, x_train.npy
    x.npz                         both in one file, as numpy.savez and savez_compressed write it
    images.npy                    the path of the images themselves; labels.npy in the same folder is read, too

Labels are integers or class names, [n] or [n, 1]; names are numbered in sorted order. Images become PNG. Other numbers
[n, …] are samples without an image: the field `array`, with their dtype; so are images under a name that states none,
such as x, in another dtype. Both are read one at a time, so that the size of an array does not matter. Nothing is
unpickled. If both the second and the last dimension could be the channels (1, 3 or 4), the last one is taken.

    .npy    93 "NUMPY", version, length of the header, header (dtype, order and shape), values

(See the documentation of numpy.lib.format.)
"""

from __future__ import annotations

import io
import math
import os
import re
import tokenize
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import numpy as np
import numpy.typing as npt

from cache.errors import SourceError
from cache.messages import listed
from packer.sources.base import SourceListing, refusing
from packer.sources.layouts import splits_of_arrays
from packer.sources.pixels import ArrayBlock, PixelBlock, PixelSource, ZipMember, check_image_bytes
from packer.sources.shards import split_of_name
from packer.sources.streams import ByteFile, PlainFile
from packer.sources.tables import Table, number_labels
from readers.table import NO_LABEL

__all__ = ["NumpySource"]

_CHANNELS = (1, 3, 4)
_HEAD_BYTES, _MAX_HEADER_BYTES = 12, 10_000
_MAX_MEMBERS = 1000
_MAX_LABEL_BYTES = 1 << 30
_MAX_IMAGES = 1 << 31
_MAX_RATIO = 1032  # of deflate
_SAVE = "if its values run from 0 to 1, save  (255 * x).round().astype('uint8')"


class _Array(NamedTuple):
    """An array in a file. member: its name in a .npz, else "". start: the offset of its values."""

    path: Path
    member: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int

    @property
    def name(self) -> str:
        return f"{self.path}: {self.member}" if self.member else str(self.path)

    def open(self) -> ByteFile:
        return ZipMember(self.path, self.member) if self.member else PlainFile(self.path)


class NumpySource(PixelSource):
    """The samples and labels in the NumPy arrays at `root`: a folder, a .npz, or the .npy with the samples.

    image_key, label_key: the names of the two arrays, without .npy, if they are not among the usual ones.
    """

    kind = "NumPy arrays"

    def __init__(
        self, root: str | os.PathLike[str], image_key: str | None = None, label_key: str | None = None
    ) -> None:
        super().__init__(root)
        self._keys = image_key, label_key

    def list_files(self, split: str | None) -> SourceListing:
        self._sizes: dict[str, int] = {}  # of the members of a .npz
        names = self._names()
        pairs = splits_of_arrays(list(names))
        samples, labels = self._keys
        if samples or (labels and len(pairs) == 1):
            samples = samples or next(iter(pairs.values()))[0]
            paired = dict(pairs.values()).get(samples) or splits_of_arrays(["images", *names])[""][1]
            pairs = {"": (samples, labels or paired)}
        if not pairs or not {name for pair in pairs.values() for name in pair} <= {*names, ""}:
            raise SourceError(
                f"{self.root}: no arrays called {samples or 'images'} and {labels or 'labels'}, or x and y "
                f"(train_images, x_train); it has {listed([*names], 20) or 'none'}: name the array of the samples with "
                f"image_key=NAME, that of the labels with label_key=NAME. An archive of an array a sample is a tar, or "
                f"its folder"
            )
        if len(pairs) > 1 and "" in pairs:
            raise SourceError(f"{self.root}: {pairs['']} belongs to no split, but others do; move it away")
        listing = self.begin()
        every: dict[str, tuple[PixelBlock, list[Any]]] = {}
        for name, (images, labels) in pairs.items():
            block = _block(array := self._array(names[images]), bool(self._keys[0]))
            if (
                isinstance(block, ArrayBlock)
                and not self._keys[0]
                and array.dtype.kind == "f"
                and len(array.shape) in (3, 4)
            ):
                listing.warnings.append(f"{array.name}: packed as arrays of {array.dtype}; for images, {_SAVE}")
            if every and type(block) is not type(next(iter(every.values()))[0]):
                raise SourceError(
                    f"{array.name}: holds images, and another split arrays, or the reverse; convert each separately"
                )
            row_labels = self._read_labels(self._array(names[labels]), block.count) if labels else [None] * block.count
            every[name or split or split_of_name(self.root.stem)] = (block, row_labels)
        values = [value for _, labels in every.values() for value in labels]
        numbers, listing.classes, _ = number_labels(values, range(1, len(values) + 1), Table(self.root, ()))
        rest = np.array(numbers, np.int64)
        for name, (block, _) in every.items():
            self.add(listing, name, [block], rest[: block.count])
            rest = rest[block.count :]
        used = {array for pair in pairs.values() for array in pair}
        listing.left_out = [(at, "no array of images or labels") for name, at in names.items() if name not in used]
        return listing

    def _names(self) -> dict[str, str]:
        """The arrays found: name without .npy -> name of the file or member."""
        if self.root.is_dir():
            files = [path.name for path in sorted(self.root.iterdir()) if path.suffix == ".npy"]
        elif self._is_zip():
            files = self._members()
        else:
            names = [path.name.removesuffix(".npy") for path in sorted(self.root.parent.glob("*.npy"))]
            own = self.root.name.removesuffix(".npy")
            labels = dict(splits_of_arrays(names).values())
            if self._keys[1] in names:
                labels[own] = self._keys[1]
            if own not in labels:
                return {"images": self.root.name}
            files = [self.root.name, *([f"{labels[own]}.npy"] if labels[own] else [])]
        return {name.removesuffix(".npy"): name for name in files}

    def _is_zip(self) -> bool:
        with open(self.root, "rb") as file:
            return file.read(2) == b"PK"

    def _members(self) -> list[str]:
        """The arrays in a .npz. Raises SourceError if a member claims to be larger than it can unpack to."""
        with refusing(self.root, "not a .npz, or truncated"), ZipFile(self.root) as archive:
            entries, size = archive.infolist(), self.root.stat().st_size
        self._sizes = {entry.filename: entry.file_size for entry in entries}
        if len(entries) > _MAX_MEMBERS or len(self._sizes) < len(entries):
            raise SourceError(f"{self.root}: {len(entries)} members, expected at most {_MAX_MEMBERS}, each name once")
        for entry in entries:
            if entry.compress_type not in (ZIP_STORED, ZIP_DEFLATED) or entry.flag_bits & 1:
                raise SourceError(
                    f"{self.root}: {entry.filename!r} is encrypted, or compressed by another method than deflate"
                )
            if entry.file_size > _MAX_RATIO * max(1, min(entry.compress_size, size)):
                raise SourceError(
                    f"{self.root}: {entry.filename!r} claims {entry.file_size:,} bytes, more than "
                    f"{entry.compress_size:,} can unpack to: damaged, or a decompression bomb"
                )
        return [name for name in self._sizes if name.endswith(".npy")]

    def _array(self, name: str) -> _Array:
        """Read the header of an array. Raises SourceError if it is damaged, or the array is of an unsupported kind."""
        if self._sizes:
            array = _Array(self.root, name, np.dtype("u1"), (), 0)
        else:
            folder = self.root if self.root.is_dir() else self.root.parent
            array = _Array(self.note(folder / name), "", np.dtype("u1"), (), 0)
        with array.open() as file:
            head = file.read(0, _HEAD_BYTES)
            width = 2 if head[6] == 1 else 4
            length = int.from_bytes(head[8 : 8 + width], "little")
            if head[:6] != b"\x93NUMPY" or head[6] not in (1, 2, 3) or length > _MAX_HEADER_BYTES:
                raise SourceError(f"{array.name}: not a NumPy array, or claims a header of {length:,} bytes")
            text = io.BytesIO(file.read(8, width + length))
        read = np.lib.format.read_array_header_1_0 if head[6] == 1 else np.lib.format.read_array_header_2_0
        with refusing(array.name, "has a header that cannot be read"):
            try:
                shape, is_fortran, dtype = read(text, max_header_size=_MAX_HEADER_BYTES)
            except (SyntaxError, MemoryError, tokenize.TokenError) as error:  # of Python's own parser
                raise ValueError(str(error)) from error
        if dtype.hasobject or dtype.names:
            raise SourceError(f"{array.name}: holds pickled objects, which are not read; save numbers")
        if is_fortran and len(shape) > 1:
            raise SourceError(f"{array.name}: is in Fortran order; save  numpy.ascontiguousarray(x)")
        array = array._replace(dtype=dtype, shape=tuple(shape), start=8 + width + length)
        size = array.start + math.prod(shape) * dtype.itemsize
        available = self._sizes[name] if array.member else array.path.stat().st_size
        if available < size:
            raise SourceError(f"{array.name}: has {available:,} bytes, expected {size:,} for {list(shape)}: truncated?")
        return array

    def _read_labels(self, array: _Array, count: int) -> list[Any]:
        shape, size = array.shape[:1] if array.shape[1:] == (1,) else array.shape, count * array.dtype.itemsize
        if shape != (count,) or array.dtype.kind not in "iubUS" or size > _MAX_LABEL_BYTES:
            raise SourceError(
                f"{array.name}: an array {list(array.shape)} of {array.dtype}, expected {count:,} labels, which are "
                f"whole numbers or names"
            )
        with array.open() as file:
            labels: npt.NDArray[Any] = np.frombuffer(file.read(array.start, size), array.dtype)
        if labels.dtype.kind in "iu" and count and labels.min() < NO_LABEL:
            at = int(np.argmin(labels))
            raise SourceError(f"{array.name}: label {at} is {labels[at]}: classes count from 0")
        return (np.char.decode(labels, "utf-8", "replace") if labels.dtype.kind == "S" else labels).tolist()  # type: ignore[no-any-return]


def _block(array: _Array, is_named: bool) -> PixelBlock:
    """The block of images or other arrays in an array. Raises SourceError if it has neither.

    is_named: it was chosen by name, and not as images by their usual name.
    """
    shape, kind = array.shape, array.dtype.kind
    planes = len(shape) == 4 and shape[3] not in _CHANNELS
    sides = (shape[2], shape[3], shape[1]) if planes else (*shape[1:], 0)[:3]
    is_images = array.dtype == np.uint8 and len(shape) in (3, 4) and (len(shape) == 3 or sides[2] in _CHANNELS)
    if not (is_images or is_named) and re.search("image|imgs", (array.member or array.path.name).lower()):
        raise SourceError(
            f"{array.name}: an array {list(shape)} of {array.dtype}, expected images of uint8: [n, height, width], "
            f"with 1, 3 or 4 channels [n, height, width, channels] or [n, channels, height, width]; {_SAVE}, or pack "
            f"it as arrays, by naming it:  image_key={(array.member or array.path.name).removesuffix('.npy')!r}"
        )
    if len(shape) < 2 or kind not in "biufc" or not 0 < array.dtype.itemsize <= 16 or shape[0] > _MAX_IMAGES:
        raise SourceError(
            f"{array.name}: an array {list(shape)} of {array.dtype}, expected images of uint8, or other numbers [n, …]"
        )
    check_image_bytes(array.name, math.prod(shape[1:]) * array.dtype.itemsize)
    options: Any = {"start": array.start, "member": array.member}
    if not is_images:
        return ArrayBlock(array.path, shape[0], 0, 0, dtype=array.dtype.str, shape=shape[1:], **options)
    height, width, channels = sides
    return PixelBlock(array.path, shape[0], height, width, channels, planes=planes, **options)
