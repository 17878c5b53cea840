"""A sample, and the header facts of images."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError
from cache.stores import Buffer as Buffer

NO_LABEL = -1


@dataclass(frozen=True, slots=True, repr=False)
class Sample:
    """One sample: its key, its label (None without one) and the bytes of each field it has."""

    key: str
    label: int | None
    fields: Mapping[str, Buffer]

    @property
    def image(self) -> Buffer:
        """The encoded image: the field "image"."""
        return self.fields["image"]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}: {len(data):,} bytes" for name, data in self.fields.items())
        return f"Sample({self.key!r}, label={self.label}, {{{sizes}}})"

    def _repr_html_(self) -> str:
        return html_of(self)


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


def html_of(shown: object) -> str:
    """What a notebook shows of a reader or a sample: by `readers.notebook`, which draws on modules that import this."""
    return str(importlib.import_module("readers.notebook").html_of(shown))


def headers_of(images: Iterable[Buffer | None]) -> ImageInfo:
    """What the headers of images say; zeros for None, and for a header that cannot be read: decoding says why."""
    from readers.headers import MEDIA, read_header

    facts = []
    for image in images:
        fact = (0, 0, 0, 0, 0, 0)
        with suppress(BadSampleError):
            if image is not None:
                header = read_header(image)
                fact = (*header[1:], MEDIA.index(header.media))
        facts.append(fact)
    columns = np.array(facts, np.int64).reshape(-1, len(ImageInfo._fields)).T
    dtypes = (np.uint32, np.uint32, np.uint8, np.uint8, np.uint8, np.uint8)
    return ImageInfo._make(column.astype(dtype) for column, dtype in zip(columns, dtypes, strict=True))


def upright_sides(info: ImageInfo) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(heights, widths) of the upright images, int64 [n]; 0 where the header cannot be read."""
    stored = np.array([info.height, info.width], np.int64)
    heights, widths = np.where(info.orientation >= 5, stored[::-1], stored)
    return heights, widths
