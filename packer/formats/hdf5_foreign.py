"""HDF5 files made elsewhere: how they store images, labels and names.

    ranges        1-D uint8 with all encoded images; in its group "offsets" (n + 1, or n), and for n offsets "lengths"
    elements      1-D variable-length uint8, an encoded image each
    pixels        uint8 [n, H, W], [n, H, W, C] or [n, C, H, W] with C of 1, 3 or 4: raw pixels
    items         a data set for each image: 1-D uint8 or an opaque scalar with an encoded one, or pixels [H, W, C]

`ranges` and `items` are flat where they are contiguous and unfiltered; everything else has a place, which `PlaceReader`
reads, and raw pixels become PNG. The data set of all images is named by `image_key`, or has one of IMAGE_NAMES, or is
the only one of a fitting type. Top-level groups that are called like splits are the splits.

Labels: a data set of n whole numbers in the group of the images, or in its parent. Of items: their attribute "label",
or such a data set for the items in the order of their names (by number where all names are numbers), or else their
groups, as if these were the folders of an image tree. Keys and names: a data set of n distinct strings, if any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from cache.errors import FormatError, NotFlatError
from packer.formats.base import Located, LocateOptions, key_by_number, without_offset
from packer.formats.hdf5_guard import (
    check_claim,
    flat_start,
    not_flat,
    read_strings,
    read_table,
)
from readers.sample import NO_LABEL
from readers.tree import SPLIT_NAMES, TreeFiles, arrange, has_image_suffix, unique_keys

__all__ = ["locate_foreign", "splits_of"]

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
    """The samples of an open file; those of its items that the tree leaves out are appended to `unused`."""
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
    """The splits that a file names, by groups of all their images, or at the top of the names of items."""
    groups = _split_groups(file, path, options)
    if groups:
        return tuple(groups)
    images = _images_in(file, path, options)
    if isinstance(images, h5py.Dataset):
        return ()
    tops = {name.partition("/")[0] for name in _tree_names(images or file, _items_in(images or file))[0] if "/" in name}
    return tuple(name for name in SPLIT_NAMES if name in tops)


def _split_groups(file: Any, path: Path, options: LocateOptions) -> dict[str, Any]:
    """Groups called like splits with a data set of all their images."""
    found = {name: file[name] for name in SPLIT_NAMES if isinstance(file.get(name), h5py.Group)}
    if options.image_key is not None:
        return {name: group for name, group in found.items() if options.image_key in group}
    return {name: group for name, group in found.items() if isinstance(_images_in(group, path, options), h5py.Dataset)}


def _images_in(group: Any, path: Path, options: LocateOptions) -> Any:
    """The data set of all images in a group, None where every image has its own, or the group named for these."""
    if options.image_key:
        found = group.get(options.image_key)
        if found is None:
            raise FormatError(f"{path}: no {options.image_key!r}; it has {_listed(group)}")
        return found
    named = (group.get(name) for name in IMAGE_NAMES)
    found = next((item for item in named if isinstance(item, h5py.Dataset)), None)
    if found is not None:
        return found
    members = (group.get(name) for name in group)  # None for a link that leads nowhere
    fitting = [item for item in members if isinstance(item, h5py.Dataset) and _layout(item) in _WHOLE]
    if len(fitting) > 1:
        raise FormatError(
            f"{path}: which of these holds the images: {', '.join(str(item.name) for item in fitting)}? {_NAME_IT}"
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


# --- all images in one data set ---
def _together(images: Any, group: Any, path: Path, options: LocateOptions, split: str) -> Iterator[Located]:
    layout, name = _layout(images), str(images.name)
    if not layout:
        raise FormatError(
            f"{path}: {name} holds {images.dtype} of shape {images.shape}; expected encoded images (1-D uint8 with a "
            f"table of offsets, or variable-length uint8) or 8-bit pixels [n, height, width, channels]"
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
        yield Located(
            keys[i], labels[i], ranges, {"image": names[i]} if names[i] else {}, split=split, place=own, bytes=size
        )


def _ranges(images: Any, path: Path, options: LocateOptions) -> tuple[int | None, list[tuple[int, ...]], list[int]]:
    """First byte of the data in the file (None: it is not flat), [start, stop) of every image in it, and its bytes."""
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
    """The same of images that are elements of their data set."""
    n, stored = images.shape[0], images.id.get_storage_size()
    if not options.lenient:
        raise NotFlatError(not_flat(images, path, f"holds {_kind(images)}"))
    if n > max(_ALWAYS_FINE_IMAGES, stored):
        raise FormatError(
            f"{path}: {images.name} claims {n:,} images, but {stored:,} bytes are stored: damaged, or never written"
        )
    check_claim(images, path, n)
    # What an element has is known only when it is read: take a fair share of the file.
    share = path.stat().st_size // max(1, n) if images.ndim == 1 else prod(images.shape[1:])
    return None, [(i,) for i in range(n)], [share] * n


def _table_near(images: Any, names: tuple[str, ...]) -> Any:
    """A one-dimensional data set with one of these names in the same group as `images`."""
    found = (images.parent.get(name) for name in names)
    return next((item for item in found if isinstance(item, h5py.Dataset) and item.ndim == 1), None)


def _labels_for(images: Any, group: Any, n: int, options: LocateOptions) -> list[int]:
    """n labels, of the named data set, or one in the group of the images, or one in `group`; else NO_LABEL."""
    file, path = images.file, Path(images.file.filename)
    if options.label_key:
        table = group.get(options.label_key)
        if not isinstance(table, h5py.Dataset):
            raise FormatError(f"{path}: no data set {options.label_key!r}; it has {_listed(file)}")
    else:
        table = _table_near(images, LABEL_NAMES)
        if table is None:
            found = (group.get(name) for name in LABEL_NAMES)
            table = next((item for item in found if isinstance(item, h5py.Dataset)), None)
    if table is None:
        return [NO_LABEL] * n
    if table.shape != (n,) or table.dtype.kind not in "iu":
        raise FormatError(
            f"{path}: {table.name} has shape {table.shape} and dtype {table.dtype}, expected {n} whole numbers"
        )
    labels = [without_offset(value, options) for value in read_table(table, path).tolist()]
    if max(labels, default=0) >= 1 << 63:
        raise FormatError(f"{path}: {table.name} holds the label {max(labels)}, which is not an int64")
    return labels


def _keys(images: Any, path: Path, n: int) -> tuple[list[str], list[str]]:
    """Keys and file names of n samples, from the file where it has distinct ones."""
    table = _table_near(images, KEY_NAMES)
    if table is not None and table.shape == (n,) and h5py.check_string_dtype(table.dtype) is not None:
        check_claim(table, path)
        names = read_strings(table)
        if len(set(names)) == n and "" not in names:
            return (list(unique_keys(names)), names) if all(map(has_image_suffix, names)) else (names, [""] * n)
    return [key_by_number(path, i) for i in range(n)], [""] * n


# --- a data set for each image ---
def _apart(group: Any, path: Path, options: LocateOptions, unused: list[tuple[str, str]]) -> Iterator[Located]:
    items = _items_in(group)
    if not items:
        raise FormatError(f"{path}: no data set of images found; it has {_listed(group)}. {_NAME_IT}")
    names, has_classes = _tree_names(group, items)
    splits, classes = arrange(TreeFiles.of(names, [item.nbytes for item in items]), None, path, unused)
    labels = _item_labels(items, group, path, options)
    tops = {name.partition("/")[0] for name in names if "/" in name}
    found: list[tuple[int, Located]] = []
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
            found.append(
                (number, _item(Located(key, label, {}, {"image": name}, class_name, own), item, path, options))
            )
    yield from (sample for _, sample in sorted(found, key=lambda pair: pair[0]))


def _item(sample: Located, item: Any, path: Path, options: LocateOptions) -> Located:
    """The sample with where its image is."""
    size = int(item.nbytes)  # h5py 3.8 gives a number of NumPy
    try:
        return sample._replace(ranges={"image": (flat_start(item, path), size)}, bytes=size)
    except NotFlatError:
        if not options.lenient:
            raise
    check_claim(item, path)
    return sample._replace(place=("item", str(item.name)), bytes=size)


def _items_in(group: Any) -> list[Any]:
    """Every data set below a group that holds one image, in the order of their names."""
    found: list[Any] = []

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and name.rpartition("/")[2] not in _TABLES and _is_item(item):
            found.append(item)

    group.visititems(visit)
    by_number = all(_last(item).isdecimal() for item in found)
    return sorted(found, key=_by_number if by_number else lambda item: str(item.name))


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
    """The names of items below their group, without a folder around all of a tree, and whether folders are classes.

    One folder with nothing but images in it is not a class: it stays in the names.
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
    """Labels by item, from attributes or from a data set of them; None where the file has neither."""
    attribute = options.label_key or "label"
    found = [item.attrs.get(attribute) for item in items]
    if any(value is not None for value in found):
        return [
            NO_LABEL if value is None else without_offset(_whole_number(value, item, path), options)
            for value, item in zip(found, items, strict=True)
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
