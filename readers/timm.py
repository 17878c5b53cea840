"""timm: its reader interface over a reader of ours, for its data sets, loaders and scripts.

    dataset = timm.data.ImageDataset("", reader=TimmReader(readers.open("imagenet-hdf5", "train")))
    loader = timm.data.create_loader(dataset, (3, 224, 224), 256, is_training=True)

timm decodes with Pillow and augments by itself; its samplers do not resume in the middle of an epoch. timm itself is
not imported here.
"""

from __future__ import annotations

import io

from cache.errors import BadSampleError
from readers.reader import Reader
from readers.sample import NO_LABEL

__all__ = ["TimmReader"]


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
