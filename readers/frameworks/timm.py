"""The reader interface of timm over a `Reader`, for the data sets, loaders and scripts of timm.

    dataset = timm.data.ImageDataset("", reader=TimmReader(readers.open("imagenet-hdf5", "train")))
    loader = timm.data.create_loader(dataset, (3, 224, 224), 256, is_training=True)

The training and validation scripts of timm accept packed sets if they import `create_dataset` from this module:

    python train.py --dataset packer --data-dir imagenet-hdf5 --train-split train --val-split val …

timm decodes with Pillow and has its own augmentation. It ignores the EXIF orientation, replaces a sample that it cannot
decode by the next one, and its samplers cannot resume in the middle of an epoch. Only `create_dataset` imports timm.
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
    """`timm.data.create_dataset`, which also accepts the name "packer", for the packed set at `root` (path or address).

    For a packed set, only the options of map-style data sets are used: input_img_mode, load_bytes, transform and
    target_transform. Raises as `readers.open` does, and ValueError without `root`.
    """
    import timm.data

    if name != _NAME:
        return timm.data.create_dataset(name, root, split, **options)
    if root is None:
        raise ValueError("name='packer' needs root=, the directory or address of a packed set")
    chosen = {option: value for option, value in options.items() if option in _TAKEN}
    return timm.data.ImageDataset(root, reader=TimmReader(readers.open(root, split)), **chosen)


class TimmReader:
    """A reader for timm. A sample is (file, label): the image as a binary file, and the class number, None for none."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.class_to_idx = reader.class_to_idx

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> tuple[io.BytesIO, int | None]:
        """One sample. Raises BadSampleError if the set cannot be read: after an OSError, timm would silently use the
        next sample."""
        try:
            image = self.reader.read(index)
        except OSError as error:
            raise BadSampleError(f"sample {index} ({self.reader.keys[index]}): {error}") from error
        label = int(self.reader.labels[index])
        return io.BytesIO(image), None if label == NO_LABEL else label

    def filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        """The name of the source file of an image, or its key if it has none; never absolute."""
        name = self.reader.name(index) or self.reader.keys[index]
        return name.rpartition("/")[2] if basename else name

    def filenames(self, basename: bool = False, absolute: bool = False) -> list[str]:
        return [self.filename(index, basename) for index in range(len(self))]
