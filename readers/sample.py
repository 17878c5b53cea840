"""What a reader promises, and the sample it hands out.

A reader is anything with this protocol: the packed shards, a plain folder, and whatever wraps one of them. Loaders,
caches and GPU decoders are written against it and do not know which one they have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from readers.errors import BadSampleError
from readers.headers import MEDIA, ImageHeader, read_header

__all__ = ["NO_LABEL", "Buffer", "ImageInfo", "Listed", "Reader", "Sample", "headers_of"]

Buffer: TypeAlias = bytes | memoryview
NO_LABEL = -1


@dataclass(frozen=True, slots=True, repr=False)
class Sample:
    """One sample: its key, its label (None without one) and the bytes of each field it has."""

    key: str
    label: int | None
    fields: Mapping[str, Buffer]

    @property
    def image(self) -> Buffer:
        """The encoded image: the field that nearly every set has."""
        return self.fields["image"]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}: {len(data):,} bytes" for name, data in self.fields.items())
        return f"Sample({self.key!r}, label={self.label}, {{{sizes}}})"


class ImageInfo(NamedTuple):
    """What the header of each image says; arrays of length n. Sizes are as stored, before EXIF orientation.

    media is the position in `readers.headers.MEDIA`; process is the JPEG SOF marker's low byte (0xC0 baseline,
    0xC2 progressive, 0 for other media); orientation is EXIF's 1..8. All are 0 where the header cannot be read.
    """

    height: npt.NDArray[np.uint32]
    width: npt.NDArray[np.uint32]
    components: npt.NDArray[np.uint8]
    process: npt.NDArray[np.uint8]
    orientation: npt.NDArray[np.uint8]
    media: npt.NDArray[np.uint8]


@runtime_checkable
class Reader(Protocol):
    """Random access to n samples. Readers pickle by path, and survive fork and spawn."""

    @property
    def fields(self) -> Sequence[str]:
        """Names of the fields; "image" is the first one."""

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """Class numbers, int64 [n]; NO_LABEL where a sample has none."""

    @property
    def keys(self) -> Sequence[str]:
        """Names of the samples, decoded when asked for."""

    @property
    def classes(self) -> Sequence[str]:
        """Names of the classes; position = label."""

    @property
    def info(self) -> ImageInfo:
        """Image dimensions and coding, by sample."""

    @property
    def fingerprint(self) -> str:
        """A short text that another data set, or other samples of this one, would not have; resume tokens carry it."""

    def sizes(self, field: str = "image") -> npt.NDArray[np.int64]:
        """Encoded bytes of a field by sample, int64 [n]; 0 where a sample lacks it. Reads no payload."""

    def image_info(self, indices: Sequence[int] | npt.NDArray[Any]) -> ImageInfo:
        """`info` for some samples, in the order asked for: what loaders use, as it never reads more than those."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def read(self, index: int, field: str = "image") -> Buffer:
        """The bytes of one field of one sample."""

    def read_many(self, indices: Sequence[int] | npt.NDArray[Any], field: str = "image") -> Sequence[Buffer]:
        """The bytes of many samples, in the order asked for."""

    def prefetch(self, indices: Sequence[int] | npt.NDArray[Any], field: str = "image") -> None:
        """Tell the kernel that these samples will be read soon; returns at once."""

    def stream(self, indices: Iterable[int] | None = None, field: str = "image") -> Iterator[Buffer]:
        """The bytes of samples in a known order, asking the kernel ahead."""

    def close(self) -> None: ...


class Listed(Protocol):
    """What a reader of plain files may have besides: files are rewritten under their names, and caches must notice.

    A reader without these vouches for its bytes with `fingerprint` alone.
    """

    @property
    def files_fingerprint(self) -> str:
        """A short text that other files, or these in another state, would not have; "" where that is unknown."""

    def is_current(self, index: int) -> bool:
        """Whether the file of a sample is still in the state of `files_fingerprint`; asks the file system."""


def headers_of(images: Iterable[Buffer | None]) -> ImageInfo:
    """What the headers of images say; zeros for None, and for a header that cannot be read: decoding says why."""
    found = [_header(image) for image in images]
    return ImageInfo(
        np.array([header.height for header in found], np.uint32),
        np.array([header.width for header in found], np.uint32),
        np.array([header.components for header in found], np.uint8),
        np.array([header.process for header in found], np.uint8),
        np.array([header.orientation for header in found], np.uint8),
        np.array([MEDIA.index(header.media) for header in found], np.uint8),
    )


def _header(image: Buffer | None) -> ImageHeader:
    if image is not None:
        try:
            return read_header(image)
        except BadSampleError:
            pass
    return ImageHeader("", 0, 0, 0, 0, 0)
