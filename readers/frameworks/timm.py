"""timm: its reader interface over a `Reader`, for its data sets, loaders and scripts.

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
    """`timm.data.create_dataset`, in which the name "packer" stands for the packed set at `root`, a path or an address.

    Of timm's options, those of map-style data sets count: input_img_mode, load_bytes, transform and target_transform.
    Raises what `readers.open` raises, and ValueError.
    """
    import timm.data

    if name != _NAME:
        return timm.data.create_dataset(name, root, split, **options)
    if root is None:
        raise ValueError("name='packer' needs root=, the directory or the address of a packed set")
    chosen = {option: value for option, value in options.items() if option in _TAKEN}
    return timm.data.ImageDataset(root, reader=TimmReader(readers.open(root, split)), **chosen)


class TimmReader:
    """What timm asks of a reader. Samples are (file, label), the label None where there is none."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.class_to_idx = reader.class_to_idx

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> tuple[io.BytesIO, int | None]:
        """Raises BadSampleError where the set cannot be read: for an OSError timm takes the sample that follows."""
        try:
            image = self.reader.read(index)
        except OSError as error:
            raise BadSampleError(f"sample {index} ({self.reader.keys[index]}): {error}") from error
        label = int(self.reader.labels[index])
        return io.BytesIO(image), None if label == NO_LABEL else label

    def filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        """The name that the image's file had; its key where it came from no file. A set has no absolute names."""
        name = self.reader.name(index) or self.reader.keys[index]
        return name.rpartition("/")[2] if basename else name

    def filenames(self, basename: bool = False, absolute: bool = False) -> list[str]:
        return [self.filename(index, basename) for index in range(len(self))]
