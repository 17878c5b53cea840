"""How images lie in HDF5 files made elsewhere, whatever their storage (chunked, compressed, variable-length):

    elements        1-D variable-length uint8, an encoded image each
    ranges          1-D uint8 with all encoded images; "offsets", and perhaps "lengths", beside it
    pixels          uint8 [n, H, W], [n, H, W, C] or [n, C, H, W] with C of 1, 3 or 4: raw pixels, which become PNG
    items           a data set for each image: 1-D uint8 or an opaque scalar with an encoded one, or uint8 [H, W, C]

Labels: a data set of n whole numbers beside the images (or in the group above). Of items: their attribute
"label", or such a data set for the items in order of their names (by number where all names are numbers), or
else their groups, as if these were the folders of an image tree. Names are taken from a data set of n
strings, where there is one. `packer.formats.hdf5_foreign` has the names that such data sets go by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from packer.formats.base import LocateOptions
from packer.formats.hdf5_flat import read_strings
from packer.formats.hdf5_foreign import (
    KEY_NAMES,
    LABEL_NAMES,
    LENGTH_NAMES,
    OFFSET_NAMES,
    find_images,
    find_labels,
    find_table,
)
from packer.formats.hdf5_guard import check_claim, read_table
from packer.sources.base import ListingBuilder, SplitListing
from packer.sources.names import safe_name
from readers.errors import SourceError
from readers.tree import has_image_suffix, unique_keys

__all__ = ["NAME_IT", "Hdf5Keys", "images_in", "items_in", "labels_for", "list_images"]

NAME_IT = "--image-key KEY  (in Python: packer.open_source(path, image_key=KEY))"
_CHANNELS = (1, 3, 4)
_ALWAYS_FINE_IMAGES = 1 << 16
_WHOLE = ("elements", "pixels", "pixels-first")
_TABLES = (*LABEL_NAMES, *OFFSET_NAMES, *LENGTH_NAMES)


@dataclass(frozen=True, slots=True)
class Hdf5Keys:
    """The data sets to take, None for the usual ones; label_offset is subtracted from labels."""

    image: str | None = None
    label: str | None = None
    label_offset: int = 0


def images_in(group: Any, path: Path, image_key: str | None) -> Any:
    """The data set of all images in a group, None where every image has its own, or the group named for these."""
    found = find_images(group, path, image_key)
    if found is not None:
        return found
    members = (group.get(name) for name in group)  # None for a link that leads nowhere
    fitting = [item for item in members if isinstance(item, h5py.Dataset) and _layout(item) in _WHOLE]
    if len(fitting) > 1:
        raise SourceError(
            f"{path}: which of these holds the images: {', '.join(str(item.name) for item in fitting)}? Name "
            f"it with  {NAME_IT}"
        )
    return fitting[0] if fitting else None


def _layout(data: Any) -> str:
    """The layout of a data set by its type and shape; "" for one that holds no images."""
    shape = data.shape
    if shape is None:
        return ""
    vlen = h5py.check_vlen_dtype(data.dtype)
    if vlen is not None:
        return "elements" if len(shape) == 1 and np.dtype(vlen) in (np.uint8, np.int8) else ""
    if data.dtype != np.uint8:
        return ""
    if len(shape) == 1:
        return "ranges"
    if len(shape) == 3 or (len(shape) == 4 and shape[3] in _CHANNELS):
        return "pixels"
    return "pixels-first" if len(shape) == 4 and shape[1] in _CHANNELS else ""


def list_images(images: Any, group: Any, path: Path, keys: Hdf5Keys) -> SplitListing:
    """The samples of a data set of all images. Place: (layout, name of the data set, and where in it)."""
    layout, name = _layout(images), str(images.name)
    if not layout:
        raise SourceError(
            f"{path}: {name} holds {images.dtype} of shape {images.shape}; expected encoded images "
            f"(variable-length uint8, or uint8 with a table of offsets) or 8-bit pixels [n, height, width, "
            f"channels]"
        )
    if layout == "ranges":
        check_claim(images, path)
        bounds = _bounds(images, path)
        places: list[tuple[Any, ...]] = [(layout, name, start, stop) for start, stop in bounds]
        sizes = [stop - start for start, stop in bounds]
    else:
        n = images.shape[0]
        _check_count(images, path)
        places = [(layout, name, i) for i in range(n)]
        # What an element has is known only when it is read: take a fair share of the file.
        share = prod(images.shape[1:]) if layout != "elements" else path.stat().st_size // max(1, n)
        sizes = [share] * n
    labels = labels_for(images, group, len(places), keys)
    found, names = _keys(images, path, len(places))
    suffix = ".png" if layout.startswith("pixels") else ""
    builder = ListingBuilder()
    for key, sample_name, label, size, place in zip(found, names, labels, sizes, places, strict=True):
        builder.add((f"{key}{suffix}" if suffix else sample_name,), place, size, key=key, label=label)
    return builder.build()


def _check_count(images: Any, path: Path) -> None:
    """Refuse a count of images that cannot be true, before a list of them is made."""
    n, stored = images.shape[0], images.id.get_storage_size()
    if n > max(_ALWAYS_FINE_IMAGES, stored):
        raise SourceError(
            f"{path}: {images.name} claims {n:,} images, but {stored:,} bytes are stored: damaged, or never written"
        )
    check_claim(images, path, n)


def _bounds(images: Any, path: Path) -> list[tuple[int, int]]:
    """[start, stop) of every image in a flat data set."""
    size = images.shape[0]
    table, lengths = find_table(images, OFFSET_NAMES), find_table(images, LENGTH_NAMES)
    if table is None:
        raise SourceError(
            f"{path}: {images.name} has no table of offsets beside it (one of {', '.join(OFFSET_NAMES)}), so "
            f"the images in it cannot be told apart"
        )
    starts = [int(value) for value in read_table(table, path)]
    if lengths is not None:
        stops = [start + int(length) for start, length in zip(starts, read_table(lengths, path), strict=False)]
    else:
        starts = starts if starts and starts[-1] == size else [*starts, size]
        starts, stops = starts[:-1], starts[1:]
    if len(starts) != len(stops) or any(not 0 <= a <= b <= size for a, b in zip(starts, stops, strict=True)):
        raise SourceError(f"{path}: the offsets of {images.name} do not fit its {size} bytes")
    return list(zip(starts, stops, strict=True))


def labels_for(images: Any, group: Any, n: int, keys: Hdf5Keys) -> list[int]:
    """n labels, of the data set that was named, or one beside the images, or one in `group`."""
    label_key = keys.label
    if label_key is None and find_table(images, LABEL_NAMES) is None:
        label_key = next((name for name in LABEL_NAMES if isinstance(group.get(name), h5py.Dataset)), None)
    if label_key is not None:
        label_key = f"{str(group.name).rstrip('/')}/{label_key}"
    labels = find_labels(images.file, images, n, LocateOptions(label_key=label_key, label_offset=keys.label_offset))
    if min(labels, default=0) < -1:
        raise SourceError(f"{images.file.filename}: the label {min(labels)} is out of range: classes count from 0")
    return labels


def _keys(images: Any, path: Path, n: int) -> tuple[Sequence[str], list[str]]:
    """Keys and file names of n samples, from the file where it has distinct ones."""
    table = find_table(images, KEY_NAMES)
    if table is not None and table.shape == (n,) and h5py.check_string_dtype(table.dtype) is not None:
        check_claim(table, path)
        names = [safe_name(text) for text in read_strings(table)]
        if len(set(names)) == n and "" not in names:
            return (unique_keys(names), names) if all(map(has_image_suffix, names)) else (names, [""] * n)
    return [f"{path.name.partition('.')[0]}/{i:08d}" for i in range(n)], [""] * n


def items_in(group: Any) -> list[Any]:
    """Every data set below a group that holds one image, in the order of their names."""
    found: list[Any] = []

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and name.rpartition("/")[2] not in _TABLES and _is_item(item):
            found.append(item)

    group.visititems(visit)
    return sorted(found, key=_by_number if all(_last(item).isdecimal() for item in found) else _by_name)


def _is_item(item: Any) -> bool:
    if item.shape == ():
        return bool(item.dtype.kind == "V" and item.dtype.names is None)
    pixels = item.ndim == 3 and item.shape[2] in _CHANNELS
    return bool(item.dtype == np.uint8 and (item.ndim == 1 or pixels))


def _last(item: Any) -> str:
    return str(item.name).rpartition("/")[2]


def _by_name(item: Any) -> str:
    return str(item.name)


def _by_number(item: Any) -> tuple[str, int]:
    folder, _, name = str(item.name).rpartition("/")
    return folder, int(name)
