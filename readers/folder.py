"""A reader over plain files: the same protocol as the packed sets, and the baseline for every comparison."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from cache.page import prefetch
from readers.criteria import checked_indices
from readers.errors import BadSampleError, SourceError, StaleIndexError, UnknownNameError
from readers.headers import MEDIA, ImageHeader, read_header
from readers.sample import NO_LABEL, Buffer, ImageInfo, Sample
from readers.selection import Selectable
from readers.stream import stream_ahead
from readers.tree import arrange, has_image_suffix, scan, unique_keys

__all__ = ["FolderReader"]


class FolderReader(Selectable):
    """Random access to the images of a folder tree (see `readers.tree` for the layouts it knows).

    Files count as images by their suffix, as in torchvision; none is opened before it is read. Raises SourceError
    for a tree that cannot be used and StaleIndexError for a file that has gone.
    """

    fields: tuple[str, ...] = ("image",)

    def __init__(self, path: str | os.PathLike[str], split: str | None = None) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise SourceError(f"{self.path}: not a directory")
        files = scan(self.path, [])
        images = np.fromiter(map(has_image_suffix, files.paths()), np.bool_, len(files))
        splits, self.classes = arrange(files.take(np.flatnonzero(images)), split, self.path, [])
        self.split = "train" if split is None and "train" in splits else next(iter(splits))
        part = splits[self.split]
        if not part.names:
            raise SourceError(f"{self.path}: no image files found")
        self.names = list(part.names)
        self.labels: npt.NDArray[np.int64] = part.labels.astype(np.int64)
        self.keys: list[str] = list(unique_keys(self.names))
        self._sizes = np.maximum(part.files.column(0), 0)
        self._times = np.stack([part.files.column(1), part.files.column(2)], axis=1)
        self._folder = os.path.join(self.path, part.root) if part.root else os.fspath(self.path)
        self._info: ImageInfo | None = None
        self._fingerprint = ""

    @property
    def info(self) -> ImageInfo:
        """Image dimensions and coding; the first use reads every file."""
        if self._info is None:
            self._info = self.image_info(range(len(self)))
        return self._info

    @property
    def fingerprint(self) -> str:
        """Of the names, labels and classes, 32 hex digits; not of what the files hold, which nobody has read."""
        if not self._fingerprint:
            text = json.dumps([self.split, list(self.classes), self.names])
            digest = hashlib.blake2b(text.encode(), digest_size=16)
            digest.update(self.labels.astype("<i8").data)
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    @property
    def files_fingerprint(self) -> str:
        """Of where the files are and what they were when they were listed: real path, sizes, times; 32 hex digits.

        For caches, which keep bytes under it: unlike `fingerprint`, it changes when a file is rewritten.
        """
        digest = hashlib.blake2b(os.fsencode(os.path.realpath(self._folder)), digest_size=16)
        for column in (self._sizes, self._times):
            digest.update(column.astype("<i8").data)
        return digest.hexdigest()

    def is_current(self, index: int) -> bool:
        """Whether a file is still what it was when it was listed, by its size and times."""
        try:
            status = os.stat(f"{self._folder}/{self.names[index]}")
        except OSError:
            return False
        found = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        return found == (self._sizes[index], *self._times[index].tolist())

    def sizes(self, field: str = "image") -> npt.NDArray[np.int64]:
        """Bytes of each file when the folder was listed, int64 [n]; 0 for a file that could not be examined."""
        self._check_field(field)
        return self._sizes

    def image_info(self, indices: Sequence[int] | npt.NDArray[Any]) -> ImageInfo:
        """Image dimensions and coding of some samples, in the order asked for; reads their files."""
        headers = [_header(self.read(i)) for i in checked_indices(indices, self).tolist()]
        return ImageInfo(
            np.array([h.height for h in headers], np.uint32),
            np.array([h.width for h in headers], np.uint32),
            np.array([h.components for h in headers], np.uint8),
            np.array([h.process for h in headers], np.uint8),
            np.array([h.orientation for h in headers], np.uint8),
            np.array([MEDIA.index(h.media) for h in headers], np.uint8),
        )

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"FolderReader({str(self.path)!r}, split={self.split!r}, {len(self)} samples)"

    def read(self, index: int, field: str = "image") -> bytes:
        """The whole file."""
        self._check_field(field)
        try:
            name = self.names[index]
        except IndexError:
            raise IndexError(f"sample {index} is outside the {len(self)} of {self}") from None
        try:
            with open(f"{self._folder}/{name}", "rb", buffering=0) as file:
                return file.read()
        except OSError as error:
            raise StaleIndexError(f"{self._folder}/{name}: cannot be read any more: {error.strerror}") from error

    def read_many(self, indices: Sequence[int] | npt.NDArray[Any], field: str = "image") -> list[Buffer]:
        """The files of many samples, in the order asked for."""
        return [self.read(int(i), field) for i in indices]

    def prefetch(self, indices: Sequence[int] | npt.NDArray[Any], field: str = "image") -> None:
        """Ask the kernel to read these files into the page cache."""
        for i in indices:
            try:
                descriptor = os.open(f"{self._folder}/{self.names[int(i)]}", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue  # the read that follows says what is wrong
            try:
                prefetch(descriptor, ((0, 0),))
            finally:
                os.close(descriptor)

    def stream(self, indices: Iterable[int] | None = None, field: str = "image") -> Iterator[Buffer]:
        """The files of samples in a known order, with the kernel asked ahead."""
        order = range(len(self)) if indices is None else indices
        return stream_ahead(self, order, field, lambda block: self.prefetch(block, field))

    def sample(self, index: int) -> Sample:
        """One sample with all its fields."""
        data = self.read(index)
        label = int(self.labels[index])
        return Sample(self.keys[index], None if label == NO_LABEL else label, {"image": data})

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    def close(self) -> None:
        """Nothing stays open between reads."""

    def __enter__(self) -> FolderReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_field(self, field: str) -> None:
        if field != "image":
            raise UnknownNameError(f"{self.path}: no field {field!r}; it has image")


def _header(data: bytes) -> ImageHeader:
    """Zeros for a header that cannot be read: decoding says what is wrong, and with which sample."""
    try:
        return read_header(data)
    except BadSampleError:
        return ImageHeader("", 0, 0, 0, 0, 0)
