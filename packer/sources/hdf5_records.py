"""An HDF5 file made elsewhere, read through h5py; `hdf5_layouts` says what such files look like.

Top-level groups that are called like splits are the splits; otherwise the file is one split, read off its
name. Raw pixels are encoded as PNG in the workers, which keeps every pixel; only then do images get larger or
smaller. A shard of a packed set is no source by itself: it is adopted as it is.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from packer.conversion.arena import Arena
from packer.formats.hdf5_flat import as_text
from packer.formats.hdf5_guard import DAMAGED, check_claim, check_data_set, refuse_other_files, translated
from packer.sources.base import FieldNames, Objects, SourceListing, check_names
from packer.sources.hdf5_layouts import NAME_IT, Hdf5Keys, images_in, items_in, labels_for, list_images
from packer.sources.members import ArchiveMember, list_members
from packer.sources.names import split_of_file
from packer.sources.streams import file_stamp
from readers.errors import BadSampleError, FormatError, PackerError, SourceError
from readers.sample import NO_LABEL
from readers.strings import Names
from readers.tree import SPLIT_NAMES

__all__ = ["HDF5Source"]

_CHUNK_CACHE_BYTES = 64 << 20


class HDF5Source:
    """The images in the file at `root`.

    image_key, label_key: data sets (or the group of an image's own data sets; the attribute that is its
    label), None for the usual ones. label_offset is subtracted from the labels.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        image_key: str | None = None,
        label_key: str | None = None,
        label_offset: int = 0,
    ) -> None:
        self.root = Path(root)
        self.keys = Hdf5Keys(image_key, label_key, label_offset)
        self._stamp: tuple[int, int] | None = None

    @property
    def title(self) -> str:
        return f"HDF5 file {self.root}"

    def list(self, split: str | None) -> SourceListing:
        self._stamp = file_stamp(self.root)
        try:
            with translated(self.root), _opened(self.root) as file:
                nowhere = refuse_other_files(file, self.root)
                listing = self._list(file, split)
        except FormatError as error:
            raise SourceError(str(error)) from error
        listing.left_out += [(name, "a soft link that leads nowhere") for name in nowhere]
        for part in listing.splits.values():
            check_names([*part.keys, *(names[0] for names in part.names if names[0])], str(self.root))
            part.stamps = np.full(len(part), self._stamp[1], np.int64)
        return listing

    def _list(self, file: Any, split: str | None) -> SourceListing:
        if as_text(file.attrs.get("format", "")) == "packer":
            raise SourceError(
                f"{self.root}: a shard of a packed set; convert the whole set, or make one of this shard "
                f"without copying:  packer index {self.root}"
            )
        groups = self._splits(file)
        if split is not None and groups and split not in groups:
            raise SourceError(f"{self.root}: no split {split!r}; it has {', '.join(groups)}")
        if not groups:
            images = images_in(file, self.root, self.keys.image)
            if not isinstance(images, h5py.Dataset):
                return self._list_items(images or file, split)
            groups = {split or split_of_file(self.root.name): file}
        listing = SourceListing({}, {"image": "image"})
        for name, group in groups.items():
            if split in (None, name):
                images = images_in(group, self.root, self.keys.image)
                part = listing.splits[name] = list_images(images, group, self.root, self.keys)
                part.root = "" if group == file else name
        if not any(listing.splits.values()):
            raise SourceError(f"{self.root}: no images")
        return listing

    def _splits(self, file: Any) -> dict[str, Any]:
        """Groups called like splits with a data set of all their images."""
        found = {name: file[name] for name in SPLIT_NAMES if isinstance(file.get(name), h5py.Group)}
        if self.keys.image is None:
            return {
                name: group
                for name, group in found.items()
                if isinstance(images_in(group, self.root, None), h5py.Dataset)
            }
        return {name: group for name, group in found.items() if self.keys.image in group}

    def _list_items(self, group: Any, split: str | None) -> SourceListing:
        items = items_in(group)
        if not items:
            raise SourceError(f"{self.root}: no data set of images found; name it with  {NAME_IT}")
        for item in items:
            check_claim(item, self.root)
        start = len(str(group.name).rstrip("/")) + 1
        members = [
            ArchiveMember(str(item.name)[start:], item.nbytes, (number, str(item.name)))
            for number, item in enumerate(items)
        ]
        if split is None and not any(member.name.partition("/")[0] in SPLIT_NAMES for member in members):
            split = split_of_file(self.root.name)
        left_out: list[tuple[str, str]] = []
        listing = list_members(members, split, self.root, left_out, "tree")
        listing.skip_strays = False
        labels = self._item_labels(items, group)
        for part in listing.splits.values():
            numbers = [number for number, _ in part.places]
            if labels is not None:
                part.labels = np.array([labels[number] for number in numbers], np.int64)
                listing.classes = ()
            names = [
                f"{name}.png" if items[number].ndim == 3 else name
                for (name,), number in zip(part.names, numbers, strict=True)
            ]
            part.names = FieldNames(Names.of(names))
            part.places = Objects.of(("item", name) for _, name in part.places)
        return listing

    def _item_labels(self, items: Sequence[Any], group: Any) -> Sequence[int] | None:
        """Labels by item, from attributes or from a data set of them; None where the file has neither."""
        attribute = self.keys.label or "label"
        found = [item.attrs.get(attribute) for item in items]
        if any(value is not None for value in found):
            try:
                return [NO_LABEL if value is None else int(value) - self.keys.label_offset for value in found]
            except (TypeError, ValueError) as error:
                raise SourceError(f"{self.root}: an attribute {attribute!r} is no whole number: {error}") from error
        for beside in (group, group.parent):
            labels = labels_for(items[0], beside, len(items), self.keys)
            if any(label != NO_LABEL for label in labels):
                return labels
        return None

    def paths(self, listing: SourceListing) -> Iterator[Path]:
        yield self.root

    def open(self) -> Hdf5Reader:
        if self._stamp is not None and file_stamp(self.root) != self._stamp:
            raise SourceError(f"{self.root}: has changed since it was listed; run the same command again")
        return Hdf5Reader(self.root)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        file = h5py.File(path, "r", rdcc_nbytes=_CHUNK_CACHE_BYTES)
    except OSError as error:
        raise SourceError(f"{path}: cannot be opened as HDF5, damaged or truncated: {error}") from error
    with file:
        yield file


class Hdf5Reader:
    """Reads images of one file; h5py is opened in the worker, where it is used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._context = _opened(path)
        self._file: Any = None
        self._data_sets: dict[str, Any] = {}

    def read(self, place: tuple[Any, ...], arena: Arena) -> Sequence[bytes]:
        layout, name, *where = place
        try:
            if layout == "item":
                return (_item(self._data_set(name)[()]),)
            data = self._data_sets.get(name)
            if data is None:
                data = self._data_sets[name] = self._data_set(name)
            if layout == "ranges":
                return (data[where[0] : where[1]].tobytes(),)
            array = data[where[0]]
            if layout == "elements":
                return (array.tobytes(),)
            return (_png(np.moveaxis(array, 0, -1) if layout == "pixels-first" else array),)
        except PackerError:
            raise
        except DAMAGED as error:
            raise BadSampleError(f"cannot be read from {name}: {error or type(error).__name__}") from error

    def _data_set(self, name: str) -> Any:
        data = self._file[name]
        check_data_set(data, self._path)
        return data

    def __enter__(self) -> Hdf5Reader:
        self._file = self._context.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._data_sets.clear()
        self._context.__exit__(None, None, None)


def _item(value: Any) -> bytes:
    """The image in a data set of its own: bytes of an opaque scalar or of a 1-D array, or pixels."""
    array = np.asarray(value)
    return _png(array) if array.ndim == 3 else array.tobytes()


def _png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """8-bit pixels [height, width] or [height, width, channels] as PNG, which is lossless."""
    from PIL import Image

    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    memory = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(memory, "PNG")
    return memory.getvalue()
