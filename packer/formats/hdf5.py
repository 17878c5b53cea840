"""HDF5 shards: one contiguous 1-D uint8 data set per field, so that every sample is one flat byte range.

    /<field>/data     uint8  [bytes]  contiguous; all samples one after the other
    /<field>/offset   uint64 [n]      first byte in data; 2^64 - 1 if the sample lacks the field
    /<field>/length   uint64 [n]
    /<field>/name     UTF-8  [n]      original file names (fixed length, deflated); only if there are any
    /image            uint8  [n, height, width, 3]  contiguous, instead of its group: raw pixels (kind "pixels"),
                      whose names are in /image_name
    /label            int64  [n]      label + label_offset; -1 for none
    /key              UTF-8  [n]
    root attributes   format "packer", version 1, split, fields and kinds, label_offset, classes
                      (as the data set /classes if they do not fit an attribute)

Contiguous data sets cannot grow, and the size of a shard's data is known only after its last sample. So the image bytes
are streamed to the place that HDF5 will choose for them (the first large object of a file is at byte 4096); then h5py
writes the same file with the right sizes and no content, as a sparse skeleton, and its metadata is copied around the
streamed bytes. Further fields are spooled to separate files and copied in. Memory stays constant.
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from cache.checksums import crc32c_combine
from cache.errors import BadSampleError, FormatError, NotFlatError, PackerError
from cache.messages import quoted
from cache.system import pread
from packer.formats.base import (
    Format,
    GatherFile,
    Located,
    LocateOptions,
    PackedSample,
    Payloads,
    ShardSpec,
    WrittenShard,
    key_by_number,
    png_of,
    without_offset,
)
from readers.fields import encode_field
from readers.layout import FIELD_KINDS, PIXELS
from readers.opening.tree import SPLIT_NAMES, TreeFiles, arrange, has_image_suffix, unique_keys
from readers.table import ABSENT, NO_LABEL, NamesBuilder

__all__ = ["FORMAT"]


# ------------------------------------------------------------------------------
# Foreign HDF5 files: no other file is opened, and no more memory is taken than the file's content can fill.
#
# A part of an HDF5 file may be in another file: behind an external link, in the raw files of a data set with external
# storage, or in the sources of a virtual data set. HDF5 opens these when a shape or a value is requested, and blocks
# forever on a named pipe. So links and creation properties, which are in the file itself, are examined first, and such
# a file is refused. The rest of this section finds data sets that are one flat byte range, and reads the small tables
# in their groups and the images that are not flat.


_MAX_RATIO = 1032  # of deflate: the best compression of bytes that are not all equal
_ALWAYS_FINE_BYTES = 64 << 20
_MAX_VALUE_BYTES = 1 << 31


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn errors of h5py into a FormatError that names the file at `path`.

    All exceptions are caught: for a damaged file, the type of h5py's error depends on the damaged byte.
    """
    try:
        yield
    except PackerError:
        raise
    except MemoryError as error:
        raise FormatError(f"{path}: needs more memory than there is; it may claim more data than it has") from error
    except Exception as error:
        raise FormatError(
            f"{path}: HDF5 cannot read it, damaged or truncated: {error or type(error).__name__}"
        ) from error


def refuse_other_files(file: Any, path: Path) -> list[str]:
    """Raise NotFlatError if a part of an open file is in another file, which is not opened.

    Returns the names of dangling soft links; a circular link is an error.
    """
    soft, external, strange = [], [], []

    def see_link(name: bytes, info: Any) -> None:
        if info.type == h5py.h5l.TYPE_SOFT:
            soft.append(as_text(name))
        elif info.type == h5py.h5l.TYPE_EXTERNAL:
            external.append(name)
        elif info.type != h5py.h5l.TYPE_HARD:
            strange.append(as_text(name))

    # HDF5 must not be called, and no exception raised, during its own walk.
    file.id.links.visit(see_link, info=True)
    if external:
        other, inside = map(as_text, file.id.links.get_val(external[0]))
        raise NotFlatError(
            f"{path}: /{as_text(external[0])} is a link to another file, {other!r} ({inside}); only the content of "
            f"the file itself is read: name that file instead, or merge all into one file with  "
            f"h5repack --merge {quoted(path)} NEW.h5"
        )
    if strange:
        raise NotFlatError(f"{path}: /{strange[0]} is a link of an unknown kind")
    reason = file.visititems(lambda _, item: _elsewhere(item, path) if isinstance(item, h5py.Dataset) else None)
    if reason:
        raise NotFlatError(reason)
    return [name for name in soft if _leads_nowhere(file, name, path)]


def _leads_nowhere(file: Any, name: str, path: Path) -> bool:
    try:
        return file.get(name) is None
    except RuntimeError as error:
        raise FormatError(f"{path}: /{name} is a soft link that leads back to itself") from error


def _elsewhere(data: Any, path: Path) -> str | None:
    """The error for a data set whose bytes are in other files, or None. Its shape is not requested."""
    properties = data.id.get_create_plist()
    if properties.get_layout() == h5py.h5d.VIRTUAL:
        where = "is a virtual data set, whose bytes are in other files"
    elif properties.get_external_count():
        where = f"has its bytes in an external file, {as_text(properties.get_external(0)[0])!r}"
    else:
        return None
    return (
        f"{path}: {data.name} {where}; only the content of the file itself is read: put all into one file with  "
        f"h5repack -l CONTI {quoted(path)} NEW.h5"
    )


def check_claim(data: Any, path: Path, count: int = 1) -> None:
    """Raise FormatError if a data set, or one of its `count` values, is larger than the stored bytes allow.

    A data set may claim any size; unwritten parts are read as zeros and take as much memory as written ones.
    """
    size = data.size * data.dtype.itemsize
    stored = data.id.get_storage_size()
    if size > _ALWAYS_FINE_BYTES and size > _MAX_RATIO * stored:
        raise FormatError(
            f"{path}: {data.name} claims {size:,} bytes, but {stored:,} are stored: damaged, or never written"
        )
    if size // max(1, count) > _MAX_VALUE_BYTES:
        raise FormatError(
            f"{path}: {data.name} has values of {size // count:,} bytes, expected at most {_MAX_VALUE_BYTES:,}"
        )


def read_table(data: Any, path: Path) -> npt.NDArray[Any]:
    """All values of a small data set of numbers or strings."""
    check_claim(data, path)
    return np.asarray(data[:])


def as_text(value: Any) -> str:
    """An HDF5 string as str; h5py returns bytes or str."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def flat_start(data: Any, path: Path, dimensions: int = 1) -> int:
    """First byte in the file of contiguous, unfiltered bytes: 1-D uint8, or an opaque scalar.

    Raises NotFlatError with the reason.
    """
    opaque = data.shape == () and data.dtype.kind == "V" and data.dtype.names is None
    if not opaque and (data.dtype != np.uint8 or data.ndim != dimensions):
        expected = f"not {dimensions}-D uint8"
        raise NotFlatError(not_flat(data, path, f"has dtype {data.dtype} and shape {data.shape}, {expected}"))
    if data.chunks is not None:
        how = f"is chunked with {data.compression}" if data.compression else "is chunked"
        raise NotFlatError(not_flat(data, path, how))
    offset = data.id.get_offset()
    if offset is None:
        if data.size == 0:
            return 0
        raise NotFlatError(not_flat(data, path, "has no contiguous storage (compact, or never written)"))
    return int(offset)


def not_flat(data: Any, path: Path, why: str) -> str:
    return f"{path}: {data.name} {why}, so no sample is one byte range; run  packer convert {quoted(path)} --to hdf5"


def read_column(data: Any, n: int, path: Path) -> npt.NDArray[Any]:
    """A one-dimensional data set of n numbers. Raises FormatError for another shape."""
    if data.shape != (n,):
        raise FormatError(f"{path}: {data.name} has shape {data.shape}, expected ({n},)")
    return np.asarray(data[:])


def read_strings(data: Any) -> list[str]:
    """A one-dimensional data set of strings."""
    return [as_text(value) for value in data[:]]


# --- images that are not flat ---
class Hdf5Places:
    """Reads the images of an open file that are not flat."""

    def __init__(self, file: Any, path: Path) -> None:
        self._file, self._path = file, path
        self._last: tuple[str, Any] = "", None

    def read(self, place: tuple[Any, ...]) -> bytes:
        layout, name, *where = place
        try:
            if name != self._last[0]:
                self._last = name, self._data_set(name)
            data = self._last[1]
            if layout == "item":
                value = np.asarray(data[()])
                return png_of(value) if value.ndim == 3 else value.tobytes()
            if layout == "ranges":
                return bytes(data[where[0] : where[1]].tobytes())
            array = data[where[0]]
            if layout == "elements":
                return bytes(array.tobytes())
            if layout == "arrays":
                return bytes(encode_field("array", array))
            return png_of(np.moveaxis(array, 0, -1) if layout == "pixels-first" else array)
        except PackerError:
            raise
        except Exception as error:
            raise BadSampleError(f"cannot be read from {name}: {error or type(error).__name__}") from error

    def _data_set(self, name: str) -> Any:
        data = self._file[name]
        if elsewhere := _elsewhere(data, self._path):
            raise NotFlatError(elsewhere)
        return data


# ------------------------------------------------------------------------------
# Foreign HDF5 files: their layouts of images, labels and names.
#
#     ranges        1-D uint8 with all encoded images; in its group "offsets" (n + 1, or n), and for n offsets "lengths"
#     elements      1-D variable-length uint8, one encoded image each
#     pixels        uint8 [n, H, W], [n, H, W, C] or [n, C, H, W] with C of 1, 3 or 4: raw pixels
#     arrays        any other numbers [n, …]: samples without an image, whose main field is `array`
#     items         a data set per image: 1-D uint8 or an opaque scalar with an encoded image, or pixels [H, W, C]
#
# `ranges` and `items` are flat if they are contiguous and unfiltered; all others have a place, which `PlaceReader`
# reads, and raw pixels become PNG. The data set of all images is named by `image_key`, or has one of IMAGE_NAMES, or is
# the only one of a fitting type. Top-level groups named like splits are the splits.
#
# Labels: a data set of n integers in the group of the images, or in its parent. For items: their attribute "label", or
# such a data set for the items in the order of their names (by number if all names are numbers), or else their groups,
# like the folders of an image tree. Keys and names: a data set of n distinct strings, if any.


IMAGE_NAMES = ("images", "image", "image/data", "data", "encoded", "jpeg", "jpegs")
LABEL_NAMES = ("labels", "label", "targets", "target", "y")
OFFSET_NAMES = ("offsets", "offset", "starts", "start")
LENGTH_NAMES = ("lengths", "length", "sizes", "size", "nbytes")
KEY_NAMES = ("keys", "key", "names", "filenames", "paths")

_NAME_IT = "Name it with  image_key='KEY'"
_CHANNELS = (1, 3, 4)
_ALWAYS_FINE_IMAGES = 1 << 16
_WHOLE = ("elements", "pixels", "pixels-first")
_TABLES = (*LABEL_NAMES, *OFFSET_NAMES, *LENGTH_NAMES)


def locate_foreign(file: Any, path: Path, options: LocateOptions, unused: list[tuple[str, str]]) -> Iterator[Located]:
    """The samples of an open file; items that are not samples are appended to `unused`."""
    groups = _split_groups(file, path, options)
    for name, group in groups.items():
        yield from _together(_images_in(group, path, options), group, path, options, name)
    if groups:
        return
    images = _images_in(file, path, options)
    if isinstance(images, h5py.Dataset):
        yield from _together(images, file, path, options, "")
    else:
        yield from _apart(images or file, path, options, unused)


def splits_of(file: Any, path: Path, options: LocateOptions) -> tuple[str, ...]:
    """The splits of a file, from groups with all their images, or from the first components of item names."""
    groups = _split_groups(file, path, options)
    if groups:
        return tuple(groups)
    images = _images_in(file, path, options)
    if isinstance(images, h5py.Dataset):
        return ()
    tops = {name.partition("/")[0] for name in _tree_names(images or file, _items_in(images or file))[0] if "/" in name}
    return tuple(name for name in SPLIT_NAMES if name in tops)


def _split_groups(file: Any, path: Path, options: LocateOptions) -> dict[str, Any]:
    """Groups named like splits that have a data set of all their images."""
    groups = {name: file[name] for name in SPLIT_NAMES if isinstance(file.get(name), h5py.Group)}
    if options.image_key is not None:
        return {name: group for name, group in groups.items() if options.image_key in group}
    return {name: group for name, group in groups.items() if isinstance(_images_in(group, path, options), h5py.Dataset)}


def _images_in(group: Any, path: Path, options: LocateOptions) -> Any:
    """The data set of all images in a group, or the object named by `image_key`; None if every image has a data set."""
    if options.image_key:
        data_set = group.get(options.image_key)
        if data_set is None:
            raise FormatError(f"{path}: no {options.image_key!r}; it has {_listed(group)}")
        return data_set
    named = (group.get(name) for name in IMAGE_NAMES)
    data_set = next((item for item in named if isinstance(item, h5py.Dataset)), None)
    if data_set is not None:
        return data_set
    members = (group.get(name) for name in group)  # None for a dangling link
    fitting = [item for item in members if isinstance(item, h5py.Dataset) and _layout(item) in _WHOLE]
    if not fitting:
        arrays = [item for name in group if isinstance(item := group.get(name), h5py.Dataset) and _layout(item)]
        fitting = arrays if arrays and not _items_in(group) else []
    if len(fitting) > 1:
        raise FormatError(
            f"{path}: which of these holds the samples: {', '.join(str(item.name) for item in fitting)}? {_NAME_IT}"
        )
    return fitting[0] if fitting else None


def _layout(data: Any) -> str:
    """The layout of a data set by its type and shape; "" if it cannot contain images."""
    shape = data.shape
    if shape is None:
        return ""
    vlen = h5py.check_vlen_dtype(data.dtype)
    if vlen is not None:
        return "elements" if len(shape) == 1 and np.dtype(vlen) in (np.uint8, np.int8) else ""
    arrays = "arrays" if data.dtype.kind in "biufc" and len(shape) > 1 else ""
    if data.dtype != np.uint8:
        return arrays
    if len(shape) == 1:
        return "ranges"
    if len(shape) == 3 or (len(shape) == 4 and shape[3] in _CHANNELS):
        return "pixels"
    return "pixels-first" if len(shape) == 4 and shape[1] in _CHANNELS else arrays


# --- all images in one data set ---
def _together(images: Any, group: Any, path: Path, options: LocateOptions, split: str) -> Iterator[Located]:
    layout, name = _layout(images), str(images.name)
    if not layout or (layout == "arrays" and "image" in name and not options.image_key):
        raise FormatError(
            f"{path}: {name} has {images.dtype} of shape {images.shape}; expected encoded images (1-D uint8 with a "
            f"table of offsets, or variable-length uint8) or 8-bit pixels [n, height, width, channels]; "
            f"image_key='KEY' packs other numbers as arrays"
        )
    start, places, sizes = _ranges(images, path, options) if layout == "ranges" else _elements(images, path, options)
    labels = _labels_for(images, group, len(sizes), options)
    keys, names = _keys(images, path, len(sizes))
    if layout.startswith("pixels"):
        names = [f"{key}.png" for key in keys]
    for i, (place, size) in enumerate(zip(places, sizes, strict=True)):
        ranges, own = {}, None
        if start is not None:
            ranges = {"image": (start + place[0], size)}
        else:
            own = (layout, name, *place)
        own_names = {"image": names[i]} if names[i] and layout != "arrays" else {}
        main = "array" if layout == "arrays" else "image"
        yield Located(keys[i], labels[i], ranges, own_names, split=split, place=own, bytes=size, main=main)


def _ranges(images: Any, path: Path, options: LocateOptions) -> tuple[int | None, list[tuple[int, ...]], list[int]]:
    """First byte of the data in the file (None if not flat), and [start, stop) and size of every image in them."""
    start = None
    try:
        start = flat_start(images, path)
    except NotFlatError:
        if not options.lenient:
            raise
        check_claim(images, path)
    offsets, lengths_table = _table_near(images, OFFSET_NAMES), _table_near(images, LENGTH_NAMES)
    if offsets is None:
        raise FormatError(
            f"{path}: {images.name} has no table of offsets in its group (one of {', '.join(OFFSET_NAMES)}), so the "
            f"images in it cannot be separated"
        )
    starts = read_table(offsets, path).astype(np.uint64)
    size = np.uint64(images.shape[0])
    if lengths_table is not None:
        lengths = read_table(lengths_table, path).astype(np.uint64)
    else:
        if len(starts) == 0 or starts[-1] != size:
            starts = np.append(starts, size)
        lengths, starts = starts[1:] - starts[:-1], starts[:-1]
    if len(lengths) != len(starts) or bool((lengths > size).any()) or bool((starts > size - lengths).any()):
        raise FormatError(f"{path}: the offsets of {images.name} do not fit its {size} bytes")
    return start, list(zip(starts.tolist(), (starts + lengths).tolist(), strict=True)), lengths.tolist()


def _elements(images: Any, path: Path, options: LocateOptions) -> tuple[None, list[tuple[int, ...]], list[int]]:
    """None, and the place and approximate size of every image, for images that are elements of their data set."""
    n, stored = images.shape[0], images.id.get_storage_size()
    if not options.lenient:
        raise NotFlatError(not_flat(images, path, f"holds {_kind(images)}"))
    if n > max(_ALWAYS_FINE_IMAGES, stored):
        raise FormatError(
            f"{path}: {images.name} claims {n:,} images, but {stored:,} bytes are stored: damaged, or never written"
        )
    check_claim(images, path, n)
    # The size of an element is known only when it is read, so assume an equal share of the file.
    share = path.stat().st_size // max(1, n)
    if images.ndim > 1:
        share = prod(images.shape[1:]) * images.dtype.itemsize
    return None, [(i,) for i in range(n)], [share] * n


def _table_near(images: Any, names: tuple[str, ...]) -> Any:
    """A one-dimensional data set with one of these names in the same group as `images`."""
    candidates = (images.parent.get(name) for name in names)
    return next((item for item in candidates if isinstance(item, h5py.Dataset) and item.ndim == 1), None)


def _labels_for(images: Any, group: Any, n: int, options: LocateOptions) -> list[int]:
    """n labels, from the data set of `label_key`, or one next to the images, or one in `group`; else NO_LABEL."""
    file, path = images.file, Path(images.file.filename)
    if options.label_key:
        table = group.get(options.label_key)
        if not isinstance(table, h5py.Dataset):
            raise FormatError(f"{path}: no data set {options.label_key!r}; it has {_listed(file)}")
    else:
        table = _table_near(images, LABEL_NAMES)
        if table is None:
            candidates = (group.get(name) for name in LABEL_NAMES)
            table = next((item for item in candidates if isinstance(item, h5py.Dataset)), None)
    if table is None:
        return [NO_LABEL] * n
    if table.shape != (n,) or table.dtype.kind not in "iu":
        raise FormatError(
            f"{path}: {table.name} has shape {table.shape} and dtype {table.dtype}, expected {n} whole numbers"
        )
    labels = [without_offset(value, options) for value in read_table(table, path).tolist()]
    if max(labels, default=0) >= 1 << 63:
        raise FormatError(f"{path}: {table.name} has the label {max(labels)}, which is not an int64")
    return labels


def _keys(images: Any, path: Path, n: int) -> tuple[list[str], list[str]]:
    """Keys and file names of n samples, from a data set of distinct strings if there is one."""
    table = _table_near(images, KEY_NAMES)
    if table is not None and table.shape == (n,) and h5py.check_string_dtype(table.dtype) is not None:
        check_claim(table, path)
        names = read_strings(table)
        if len(set(names)) == n and "" not in names:
            return (list(unique_keys(names)), names) if all(map(has_image_suffix, names)) else (names, [""] * n)
    return [key_by_number(path, i) for i in range(n)], [""] * n


# --- one data set per image ---
def _apart(group: Any, path: Path, options: LocateOptions, unused: list[tuple[str, str]]) -> Iterator[Located]:
    items = _items_in(group)
    if not items:
        raise FormatError(f"{path}: no data set of images found; it has {_listed(group)}. {_NAME_IT}")
    names, has_classes = _tree_names(group, items)
    splits, classes = arrange(TreeFiles.of(names, [item.nbytes for item in items]), None, path, unused)
    labels = _item_labels(items, group, path, options)
    tops = {name.partition("/")[0] for name in names if "/" in name}
    numbered: list[tuple[int, Located]] = []
    for split, part in splits.items():
        keys = unique_keys(part.names)
        rows = np.asarray(part.files.rows).tolist()
        for key, name, folder_label, number in zip(keys, part.names, part.labels.tolist(), rows, strict=True):
            item = items[number]
            label, class_name = NO_LABEL, ""
            if labels is not None:
                label = labels[number]
            elif has_classes and folder_label != NO_LABEL:
                label, class_name = folder_label, classes[folder_label]
            name = f"{name}.png" if item.ndim == 3 else name
            own = split if split in tops else ""
            numbered.append(
                (number, _item(Located(key, label, {}, {"image": name}, class_name, own), item, path, options))
            )
    yield from (sample for _, sample in sorted(numbered, key=lambda pair: pair[0]))


def _item(sample: Located, item: Any, path: Path, options: LocateOptions) -> Located:
    """The sample with the location of its image."""
    size = int(item.nbytes)  # h5py 3.8 returns a NumPy number
    try:
        return sample._replace(ranges={"image": (flat_start(item, path), size)}, bytes=size)
    except NotFlatError:
        if not options.lenient:
            raise
    check_claim(item, path)
    return sample._replace(place=("item", str(item.name)), bytes=size)


def _items_in(group: Any) -> list[Any]:
    """All data sets below a group with one image each, in the order of their names."""
    items: list[Any] = []

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and name.rpartition("/")[2] not in _TABLES and _is_item(item):
            items.append(item)

    group.visititems(visit)
    by_number = all(_last(item).isdecimal() for item in items)
    return sorted(items, key=_by_number if by_number else lambda item: str(item.name))


def _is_item(item: Any) -> bool:
    if item.shape == ():
        return bool(item.dtype.kind == "V" and item.dtype.names is None)
    pixels = item.ndim == 3 and item.shape[2] in _CHANNELS
    return bool(item.dtype == np.uint8 and (item.ndim == 1 or pixels))


def _last(item: Any) -> str:
    return str(item.name).rpartition("/")[2]


def _by_number(item: Any) -> tuple[str, int]:
    folder, _, name = str(item.name).rpartition("/")
    return folder, int(name)


def _tree_names(group: Any, items: Sequence[Any]) -> tuple[list[str], bool]:
    """The names of items below their group, without an enclosing folder, and whether folders are classes.

    A single folder that contains only images is not a class: it stays in the names.
    """
    start = len(str(group.name).rstrip("/")) + 1
    names = [str(item.name)[start:] for item in items]
    tops = {name.partition("/")[0] if "/" in name else "" for name in names}
    top = next(iter(tops), "")
    if len(tops) > 1 or not top or top in SPLIT_NAMES:
        return names, True
    inside = [name[len(top) + 1 :] for name in names]
    return (inside, True) if any("/" in name for name in inside) else (names, False)


def _item_labels(items: Sequence[Any], group: Any, path: Path, options: LocateOptions) -> Sequence[int] | None:
    """Labels by item, from attributes or from a data set; None if the file has neither."""
    attribute = options.label_key or "label"
    values = [item.attrs.get(attribute) for item in items]
    if any(value is not None for value in values):
        return [
            NO_LABEL if value is None else without_offset(_whole_number(value, item, path), options)
            for value, item in zip(values, items, strict=True)
        ]
    for parent in (group, group.parent):
        labels = _labels_for(items[0], parent, len(items), options)
        if any(label != NO_LABEL for label in labels):
            return labels
    return None


def _whole_number(label: Any, data: Any, path: Path) -> int:
    value = np.asarray(label)
    if value.size != 1 or value.dtype.kind not in "iu" or int(value.ravel()[0]) >= 1 << 63:
        raise FormatError(f"{path}: the label of {data.name} is {label!r:.80}, expected a whole number")
    return int(value.ravel()[0])


def _listed(group: Any) -> str:
    names: list[str] = []
    group.visit(names.append)
    return ", ".join(names[:20]) or "nothing"


def _kind(data: Any) -> str:
    base = h5py.check_vlen_dtype(data.dtype)
    if base is not None:
        return f"variable-length arrays of {base}"
    return f"an array of {data.dtype} with shape {data.shape}"


_DATA_START = 4096  # of the first data set, with the alignment in `_create`; checked for every shard
_SMALL_BYTES = _DATA_START  # smaller data sets are not aligned, so h5py writes them
_COPY_BYTES = 8 << 20
_CHUNK_CACHE_BYTES = 64 << 20
_BLOCK_TEXTS = 4096
_ATTRIBUTE_BYTES = 60_000  # an attribute must stay under 64 KiB
_VERSION = 1


class Hdf5Writer:
    """Writes an HDF5 shard. Image payloads are not copied; further fields are spooled to separate files."""

    def __init__(self, path: Path, spec: ShardSpec) -> None:
        self._path, self._spec = path, spec
        self._skeleton = path.with_name(path.name + "~skeleton")
        self._files = {
            name: GatherFile(path if number == 0 else path.with_name(f"{path.name}.{name}"), _DATA_START)
            for number, name in enumerate(spec.fields)
        }
        self._fields = tuple(self._files.items())
        self._payloads = {name: Payloads() for name in spec.fields}
        self._names = {name: NamesBuilder() for name in spec.fields}
        self._keys = NamesBuilder()
        self._labels = array("q")
        self._pixels = next((name for name, kind in spec.fields.items() if kind == PIXELS), "")
        self._side = (1, 1)  # (height, width) of raw pixels

    def add(self, sample: PackedSample) -> None:
        for number, (field, file) in enumerate(self._fields):
            payload = sample.payloads[number]
            self._names[field].append(sample.names[number])
            if payload is None:
                self._payloads[field].append(ABSENT, 0, 0)
                continue
            length, crc = len(payload), crc32c(payload)
            self._payloads[field].append(file.position - _DATA_START, length, crc)
            file.checksum.add(b"", crc, length)
            file.append((payload,), length)
        if self._pixels and sample.header is not None:
            self._side = sample.header.height, sample.header.width
        self._keys.append(sample.key)
        label = sample.label
        self._labels.append(label if label == NO_LABEL else label + self._spec.label_offset)

    def flush(self) -> None:
        for _, file in self._fields:
            file.flush()

    def finish(self) -> WrittenShard:
        self.flush()
        main = self._fields[0][1]
        try:
            starts = self._write_skeleton()
        except RuntimeError as error:  # a system error while HDF5 closes a file, for example on a full disk
            match = re.search(r"errno = (\d+)", str(error))
            if match is None:
                raise
            raise OSError(int(match[1]), os.strerror(int(match[1])), str(self._skeleton)) from error
        crc, size = self._assemble(main, starts)
        main.sync_and_close()
        for _, spool in self._fields[1:]:
            spool.abort()
        self._skeleton.unlink()
        for field, payloads in self._payloads.items():
            column = np.array(payloads.offset, np.uint64)
            column[column != ABSENT] += np.uint64(starts[field])
            payloads.offset = array("Q", column.tobytes())
        return WrittenShard(size, crc, self._payloads)

    def abort(self) -> None:
        for _, file in self._fields:
            file.abort()
        self._skeleton.unlink(missing_ok=True)

    def _write_skeleton(self) -> dict[str, int]:
        """Write the file without the payloads of large fields; returns where each field's data start (0: empty)."""
        self._skeleton.unlink(missing_ok=True)
        starts = {}
        with _create(self._skeleton) as file:
            for field, gather in self._fields:
                size = gather.position - _DATA_START
                if field == self._pixels:
                    data = _contiguous(file, field, (len(self._labels), *self._side, 3))
                else:
                    data = _contiguous(_group(file, field), "data", (size,))
                starts[field] = data.get_offset() or 0
                if 0 < size < _SMALL_BYTES:
                    small = pread(gather.descriptor, size, _DATA_START)
                    data.write(h5py.h5s.ALL, h5py.h5s.ALL, np.frombuffer(small, np.uint8).reshape(data.shape))
            first, gather = self._fields[0]
            if gather.position - _DATA_START >= _SMALL_BYTES and starts[first] != _DATA_START:
                raise FormatError(
                    f"{self._path}: this HDF5 library put the first data set at byte {starts[first]}, expected "
                    f"{_DATA_START}; report it with the output of  python -c 'import h5py; print(h5py.version.info)'"
                )
            self._write_tables(file)
        return starts

    def _write_tables(self, file: Any) -> None:
        for field, names in self._names.items():
            if field == self._pixels:
                if len(names.build().blob):
                    _write_strings(file, f"{field}_name", names)
                continue
            group = file[field]
            group.create_dataset("offset", data=np.array(self._payloads[field].offset, np.uint64))
            group.create_dataset("length", data=np.array(self._payloads[field].length, np.uint64))
            if len(names.build().blob):
                _write_strings(group, "name", names)
        file.create_dataset("label", data=np.array(self._labels, np.int64))
        _write_strings(file, "key", self._keys)
        spec = self._spec
        file.attrs["format"] = _fixed("packer")
        file.attrs["version"] = _VERSION
        file.attrs["split"] = _fixed(spec.split)
        file.attrs["label_offset"] = spec.label_offset
        file.attrs["fields"] = _fixed_list(spec.fields)
        file.attrs["field_kinds"] = _fixed_list(spec.fields.values())
        classes = _fixed_list(spec.classes)
        if classes.nbytes < _ATTRIBUTE_BYTES:
            file.attrs["classes"] = classes
        else:
            _write_compressed(file, "classes", classes)

    def _assemble(self, main: GatherFile, starts: dict[str, int]) -> tuple[int, int]:
        """Copy the skeleton's metadata and the spooled fields around the streamed bytes.

        Returns the CRC32C and the size of the whole file.
        """
        regions = sorted(
            (starts[field], file.position - _DATA_START, number, file)
            for number, (field, file) in enumerate(self._fields)
            if file.position - _DATA_START >= _SMALL_BYTES
        )
        crc = position = 0
        with open(self._skeleton, "rb") as skeleton:
            size = os.fstat(skeleton.fileno()).st_size
            os.ftruncate(main.descriptor, size)
            for start, length, number, file in regions:
                crc = _copy(skeleton.fileno(), position, main.descriptor, position, start - position, crc)
                if number == 0:
                    crc = crc32c_combine(crc, main.checksum.value(), length)
                else:
                    crc = _copy(file.descriptor, _DATA_START, main.descriptor, start, length, crc)
                position = start + length
            crc = _copy(skeleton.fileno(), position, main.descriptor, position, size - position, crc)
        return crc, size


def _create(path: Path) -> Any:
    """A new HDF5 file whose large objects are aligned to _DATA_START; readable by HDF5 1.8 and later."""
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_alignment(_SMALL_BYTES, _DATA_START)
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    access.set_libver_bounds(h5py.h5f.LIBVER_V18, h5py.h5f.LIBVER_LATEST)
    creation = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    creation.set_obj_track_times(False)  # of the root group, so that equal samples give equal bytes at any time
    return h5py.File(h5py.h5f.create(os.fsencode(path), h5py.h5f.ACC_EXCL, creation, access))


def _group(file: Any, name: str) -> Any:
    """A group without timestamps; create_group of h5py before 3.15 writes them."""
    creation, link = h5py.h5p.create(h5py.h5p.GROUP_CREATE), h5py.h5p.create(h5py.h5p.LINK_CREATE)
    creation.set_obj_track_times(False)
    link.set_char_encoding(h5py.h5t.CSET_ASCII if name.isascii() else h5py.h5t.CSET_UTF8)
    return h5py.Group(h5py.h5g.create(file.id, name.encode(), lcpl=link, gcpl=creation))


def _contiguous(group: Any, name: str, shape: tuple[int, ...]) -> Any:
    """A contiguous uint8 data set that is allocated at once and never filled."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.CONTIGUOUS)
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    plist.set_obj_track_times(False)
    return h5py.h5d.create(group.id, name.encode(), h5py.h5t.STD_U8LE, h5py.h5s.create_simple(shape), plist)


def _fixed(text: str) -> npt.NDArray[Any]:
    """A string of fixed length.

    Variable-length strings are stored in a global heap, where one flipped bit in an object size makes the HDF5 library
    loop forever, so that `verify` would hang instead of reporting the damage.
    """
    encoded = text.encode()
    return np.array(encoded, h5py.string_dtype("utf-8", len(encoded) or 1))


def _fixed_list(texts: Iterable[str]) -> npt.NDArray[Any]:
    encoded = [text.encode() for text in texts]
    return np.array(encoded, h5py.string_dtype("utf-8", max(map(len, encoded), default=0) or 1))


def _write_strings(group: Any, name: str, texts: NamesBuilder) -> None:
    column = texts.build()
    width = max(int(np.diff(column.offsets).max(initial=0)), 1)
    data = np.zeros(len(column), h5py.string_dtype("utf-8", width))
    for first in range(0, len(column), _BLOCK_TEXTS):
        data[first : first + _BLOCK_TEXTS] = [text.encode() for text in column[first : first + _BLOCK_TEXTS]]
    _write_compressed(group, name, data)


def _write_compressed(group: Any, name: str, data: npt.NDArray[Any]) -> None:
    """Write a small data set, compressed.

    A chunk gets its place when it is flushed, by default when the data set is closed. A profiler that keeps a frame, as
    a worker of Dask does, would delay that, and equal samples would give other bytes.
    """
    options: dict[str, Any] = {"compression": "gzip", "compression_opts": 1} if len(data) else {}
    group.create_dataset(name, data=data, dtype=data.dtype, **options).flush()


def _copy(source: int, source_offset: int, target: int, target_offset: int, length: int, crc: int) -> int:
    """Copy bytes between descriptors, and continue the CRC32C."""
    while length > 0:
        block = pread(source, min(length, _COPY_BYTES), source_offset)
        if not block:
            raise FormatError("a temporary file of this conversion shrank while it was being read")
        crc = crc32c(block, crc)
        done = 0
        while done < len(block):
            done += os.pwrite(target, memoryview(block)[done:], target_offset + done)
        source_offset, target_offset = source_offset + len(block), target_offset + len(block)
        length -= len(block)
    return crc


class Hdf5Format(Format):
    """HDF5 files with flat data sets."""

    name = "hdf5"

    def shard_name(self, split: str, number: int, count: int) -> str:
        return f"{split}-{number:05d}-of-{count:05d}.h5"

    def open_writer(self, path: Path, spec: ShardSpec) -> Hdf5Writer:
        return Hdf5Writer(path, spec)

    def describe(self, path: Path) -> ShardSpec | None:
        with translated(path), _open(path) as file:
            return _describe(file, path)

    def locate(self, path: Path, options: LocateOptions) -> Iterator[Located]:
        with translated(path), _open(path) as file:
            spec = _describe(file, path)
            if spec is None or options.image_key:
                broken_links = refuse_other_files(file, path)
                left_out: list[tuple[str, str]] = []
                yield from locate_foreign(file, path, options, left_out)
                if options.lenient:
                    left_out += [(name, "a soft link that leads nowhere") for name in broken_links]
                    yield from (Located(name, NO_LABEL, {}, {}, left_out=reason) for name, reason in left_out)
            else:
                yield from _locate_ours(file, path, spec)

    def splits(self, path: Path, options: LocateOptions) -> tuple[str, ...]:
        with translated(path), _open(path) as file:
            refuse_other_files(file, path)
            return splits_of(file, path, options)

    @contextmanager
    def open_places(self, path: Path) -> Iterator[Hdf5Places]:
        with translated(path), _open(path, _CHUNK_CACHE_BYTES) as file:
            yield Hdf5Places(file, path)


def _open(path: Path, cache_bytes: int | None = None) -> Any:
    if not path.is_file():  # HDF5 would block forever on a named pipe
        raise FormatError(f"{path}: cannot be opened: missing, or not a regular file")
    try:
        return h5py.File(path, "r", locking=False, rdcc_nbytes=cache_bytes)
    except OSError as error:
        raise FormatError(f"{path}: cannot be opened as HDF5, damaged or truncated: {error}") from error


def _describe(file: Any, path: Path) -> ShardSpec | None:
    attributes = file.attrs
    if "format" not in attributes or as_text(attributes["format"]) != "packer":
        return None
    refuse_other_files(file, path)
    if int(attributes["version"]) != _VERSION:
        raise FormatError(f"{path}: version {attributes['version']}, this packer reads {_VERSION}; upgrade packer")
    classes = attributes["classes"] if "classes" in attributes else file["classes"][:] if "classes" in file else []
    fields = dict(zip(map(as_text, attributes["fields"]), map(as_text, attributes["field_kinds"]), strict=True))
    if not set(fields.values()) <= set(FIELD_KINDS):
        raise FormatError(f"{path}: its fields are {fields!r:.80}, expected kinds of {', '.join(FIELD_KINDS)}")
    return ShardSpec(
        split=as_text(attributes["split"]),
        fields=fields,
        classes=tuple(map(as_text, classes)),
        label_offset=int(attributes["label_offset"]),
    )


def _locate_ours(file: Any, path: Path, spec: ShardSpec) -> Iterator[Located]:
    keys = read_strings(file["key"])
    column = read_column(file["label"], len(keys), path)
    if column.dtype.kind not in "iu":
        raise FormatError(f"{path}: /label is {column.dtype}, expected int64")
    labels = column.tolist()
    ranges, names, shape = {}, {}, None
    for field, kind in spec.fields.items():
        if kind == PIXELS:
            ranges[field], shape = _pixel_ranges(file[field], len(keys), path)
            table = file.get(f"{field}_name")
        else:
            ranges[field] = _field_ranges(file[field], field, len(keys), path)
            table = file[field].get("name")
        if table is not None:
            names[field] = read_strings(table)
    for i, key in enumerate(keys):
        yield Located(
            key,
            labels[i] if labels[i] == NO_LABEL else labels[i] - spec.label_offset,
            {field: (int(o[i]), int(n[i])) for field, (o, n) in ranges.items() if int(o[i]) != ABSENT},
            {field: column[i] for field, column in names.items() if column[i]},
            pixels=shape,
        )


def _pixel_ranges(data: Any, n: int, path: Path) -> tuple[tuple[Any, Any], tuple[int, int]]:
    """Offsets and lengths of n raw images of equal size, and (height, width)."""
    if data.dtype != np.uint8 or data.ndim != 4 or data.shape[0] != n or data.shape[3] != 3:
        raise FormatError(
            f"{path}: {data.name} is {data.dtype} {list(data.shape)}, expected uint8 [{n}, height, width, 3]"
        )
    start, (_, height, width, _) = flat_start(data, path, 4), data.shape
    size = height * width * 3
    return (range(start, start + (n + 1) * size, size), [size] * n), (height, width)


def _field_ranges(group: Any, field: str, n: int, path: Path) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    data = group["data"]
    start = flat_start(data, path)
    offset, length = read_column(group["offset"], n, path), read_column(group["length"], n, path)
    if offset.dtype != np.uint64 or length.dtype != np.uint64:
        raise FormatError(f"{path}: /{field}/offset and length are {offset.dtype} and {length.dtype}, expected uint64")
    present = offset != ABSENT
    size = np.uint64(data.shape[0])
    if bool((present & ((length > size) | (offset > size - np.minimum(length, size)))).any()):
        raise FormatError(f"{path}: /{field}/offset and length reach outside the {size} bytes of /{field}/data")
    return np.where(present, offset + np.uint64(start), np.uint64(ABSENT)), length


FORMAT = Hdf5Format()
