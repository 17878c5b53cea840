"""timm's reader interface over a `Reader`, for timm's data sets, loaders and scripts.

    dataset = timm.data.ImageDataset("", reader=TimmReader(readers.open("imagenet-hdf5", "train")))
    loader = timm.data.create_loader(dataset, (3, 224, 224), 256, is_training=True)

Its training and validation scripts take packed sets where they import `create_dataset` from here:

    python train.py --dataset packer --data-dir imagenet-hdf5 --train-split train --val-split val …

timm decodes with Pillow and augments by itself; it does not turn images as EXIF says, goes past a sample that it cannot
decode, and its samplers do not resume in the middle of an epoch. timm itself is imported by `create_dataset` alone.
"""

from __future__ import annotations

import io
from typing import Any

import readers
from cache.errors import BadSampleError
from readers.reader import Reader
from readers.table import NO_LABEL

_NAME = "packer"
_TAKEN = ("input_img_mode", "load_bytes", "transform", "target_transform")


def create_dataset(name: str, root: str | None = None, split: str = "validation", **options: Any) -> Any:
    """`timm.data.create_dataset` that also accepts the name "packer" for the packed set at `root` (path or address).

    Of timm's options only those of map-style data sets are used: input_img_mode, load_bytes, transform and
    target_transform. Raises as `readers.open` does, and ValueError.
    """
    import timm.data

    if name != _NAME:
        return timm.data.create_dataset(name, root, split, **options)
    if root is None:
        raise ValueError("name='packer' needs root=, the directory or address of a packed set")
    chosen = {option: value for option, value in options.items() if option in _TAKEN}
    return timm.data.ImageDataset(root, reader=TimmReader(readers.open(root, split)), **chosen)


class TimmReader:
    """A reader for timm. Samples are (file, label); the label is None if there is none."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.class_to_idx = reader.class_to_idx

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> tuple[io.BytesIO, int | None]:
        """One sample. Raises BadSampleError if the set cannot be read, because after an OSError timm takes the next
        sample."""
        try:
            image = self.reader.read(index)
        except OSError as error:
            raise BadSampleError(f"sample {index} ({self.reader.keys[index]}): {error}") from error
        label = int(self.reader.labels[index])
        return io.BytesIO(image), None if label == NO_LABEL else label

    def filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        """The name of the image's original file, or its key if it came from no file; never absolute."""
        name = self.reader.name(index) or self.reader.keys[index]
        return name.rpartition("/")[2] if basename else name

    def filenames(self, basename: bool = False, absolute: bool = False) -> list[str]:
        return [self.filename(index, basename) for index in range(len(self))]
