"""HDF5 files made elsewhere: where their encoded images lie.

Two flat layouts are located:

    one data set    1-D uint8 with all images, beside it "offsets" (n + 1, or n) and for n offsets "lengths";
                    labels in a data set of n numbers
    one per image   every 1-D uint8 data set is an image; its label is its attribute "label"

The image data set is named by `image_key` or found: "images", "image", "data", "encoded" or "jpeg", or the only
one of a fitting kind. Everything else (vlen, compressed, chunked) is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from packer.formats.base import Located, LocateOptions
from packer.formats.hdf5_flat import flat_start, not_flat, read_strings
from packer.formats.hdf5_guard import check_claim, read_table
from readers.errors import FormatError, NotFlatError
from readers.sample import NO_LABEL

__all__ = [
    "IMAGE_NAMES",
    "KEY_NAMES",
    "LABEL_NAMES",
    "LENGTH_NAMES",
    "OFFSET_NAMES",
    "find_images",
    "find_labels",
    "find_table",
    "locate_foreign",
    "per_image_data_sets",
]

IMAGE_NAMES = ("images", "image", "image/data", "data", "encoded", "jpeg", "jpegs")
LABEL_NAMES = ("labels", "label", "targets", "target", "y")
OFFSET_NAMES = ("offsets", "offset", "starts", "start")
LENGTH_NAMES = ("lengths", "length", "sizes", "size", "nbytes")
KEY_NAMES = ("keys", "key", "names", "filenames", "paths")


def locate_foreign(file: Any, path: Path, options: LocateOptions) -> Iterator[Located]:
    """Samples of a file in either flat layout."""
    images = find_images(file, path, options.image_key)
    if images is None or isinstance(images, h5py.Group):
        yield from _per_image(images or file, path, options)
        return
    if images.dtype != np.uint8 or images.ndim != 1:
        raise NotFlatError(not_flat(images, path, f"holds {_kind(images)}"))
    start = flat_start(images, path)
    offsets = find_table(images, OFFSET_NAMES)
    if offsets is None:
        raise FormatError(
            f"{path}: {images.name} has no table of offsets beside it (one of {', '.join(OFFSET_NAMES)}), so the "
            f"samples in it cannot be told apart"
        )
    bounds = read_table(offsets, path).astype(np.uint64)
    lengths_table = find_table(images, LENGTH_NAMES)
    if lengths_table is not None:
        lengths = read_table(lengths_table, path).astype(np.uint64)
    else:
        if len(bounds) == 0 or int(bounds[-1]) != images.shape[0]:
            bounds = np.append(bounds, np.uint64(images.shape[0]))
        lengths = bounds[1:] - bounds[:-1]
        bounds = bounds[:-1]
    size = np.uint64(images.shape[0])
    if len(lengths) != len(bounds) or bool((lengths > size).any()) or bool((bounds > size - lengths).any()):
        raise FormatError(f"{path}: the offsets of {images.name} do not fit its {size} bytes")
    labels = find_labels(file, images, len(lengths), options)
    keys_table = find_table(images, KEY_NAMES)
    keys = None
    if keys_table is not None and len(keys_table) == len(lengths):
        check_claim(keys_table, path)
        keys = read_strings(keys_table)
    for i in range(len(lengths)):
        key = keys[i] if keys else f"{path.stem}/{i:08d}"
        yield Located(key, labels[i], {"image": (start + int(bounds[i]), int(lengths[i]))}, {})


def find_images(file: Any, path: Path, image_key: str | None) -> Any:
    """The data set (or group) of images; None where every image has a data set of its own."""
    if image_key:
        found = file.get(image_key)
        if found is None:
            raise FormatError(f"{path}: no {image_key!r}; it has {', '.join(_names(file)) or 'nothing'}")
        return found
    for name in IMAGE_NAMES:
        found = file.get(name)
        if isinstance(found, h5py.Dataset):
            return found
    return None


def find_table(images: Any, names: tuple[str, ...]) -> Any:
    """A one-dimensional data set with one of these names in the same group as `images`."""
    group = images.parent
    for name in names:
        found = group.get(name)
        if isinstance(found, h5py.Dataset) and found.ndim == 1:
            return found
    return None


def find_labels(file: Any, images: Any, n: int, options: LocateOptions) -> list[int]:
    """n labels, NO_LABEL where the file has none."""
    if options.label_key:
        table = file.get(options.label_key)
        if not isinstance(table, h5py.Dataset):
            raise FormatError(
                f"{file.filename}: no data set {options.label_key!r}; it has {', '.join(_names(file)) or 'nothing'}"
            )
    else:
        table = find_table(images, LABEL_NAMES)
    if table is None:
        return [NO_LABEL] * n
    if table.shape != (n,) or table.dtype.kind not in "iu":
        raise FormatError(
            f"{file.filename}: {table.name} has shape {table.shape} and dtype {table.dtype}, expected {n} whole numbers"
        )
    labels = [int(value) - options.label_offset for value in read_table(table, Path(file.filename))]
    if max(labels, default=0) >= 1 << 63:
        raise FormatError(f"{file.filename}: {table.name} holds the label {max(labels)}, which is no int64")
    return labels


def per_image_data_sets(group: Any) -> list[Any]:
    """Every one-dimensional uint8 data set below a group, sorted by name."""
    found: list[Any] = []

    def visit(_: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and item.dtype == np.uint8 and item.ndim == 1:
            found.append(item)

    group.visititems(visit)
    return sorted(found, key=lambda item: str(item.name))


def _per_image(group: Any, path: Path, options: LocateOptions) -> Iterator[Located]:
    data_sets = per_image_data_sets(group)
    if not data_sets:
        raise FormatError(
            f"{path}: no data set of encoded images found; it has {', '.join(_names(group)) or 'nothing'}; "
            f"name it with  --image-key"
        )
    for data in data_sets:
        start = flat_start(data, path)
        label = data.attrs.get(options.label_key or "label")
        yield Located(
            str(data.name).lstrip("/"),
            NO_LABEL if label is None else _whole_number(label, data, path) - options.label_offset,
            {"image": (start, int(data.shape[0]))},
            {},
        )


def _whole_number(label: Any, data: Any, path: Path) -> int:
    value = np.asarray(label)
    if value.size != 1 or value.dtype.kind not in "iu" or int(value.ravel()[0]) >= 1 << 63:
        raise FormatError(f"{path}: the label of {data.name} is {label!r:.80}, expected a whole number")
    return int(value.ravel()[0])


def _names(group: Any) -> list[str]:
    names: list[str] = []
    group.visit(names.append)
    return names[:20]


def _kind(data: Any) -> str:
    base = h5py.check_vlen_dtype(data.dtype)
    if base is not None:
        return f"variable-length arrays of {base}"
    return f"an array of {data.dtype} with shape {data.shape}"
