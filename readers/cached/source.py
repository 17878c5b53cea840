"""What a reader under a cache knows without reading: header facts and checksums."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from readers.errors import BadSampleError
from readers.headers import MEDIA, ImageHeader, read_header
from readers.sample import Buffer, ImageInfo, Reader
from readers.selection import SelectedReader
from readers.shards import ShardReader

__all__ = ["checksums", "content_fingerprint", "freshness", "indexed", "info_of", "title_of"]


def indexed(reader: Reader) -> bool:
    """Whether header facts come from an index; of other readers they are taken from the images themselves."""
    if isinstance(reader, SelectedReader):
        return indexed(reader.base)
    return isinstance(reader, ShardReader)


def checksums(reader: Reader, field: str) -> npt.NDArray[Any] | None:
    """CRC32C of a field by sample, uint32 [n]; None where no index has them."""
    if isinstance(reader, ShardReader):
        return reader.index.field_column(field, "crc32c")
    if isinstance(reader, SelectedReader):
        found = checksums(reader.base, field)
        return None if found is None else found[reader.indices]
    return None


def content_fingerprint(reader: Reader) -> str:
    """The reader's fingerprint; where that knows only names, as of a folder, one of the files as they were listed."""
    if indexed(reader):
        return reader.fingerprint
    files: str = getattr(reader, "files_fingerprint", "")
    digest = hashlib.blake2b(f"{reader.fingerprint}\0{files}\0".encode(), digest_size=16)
    for field in reader.fields:
        digest.update(np.ascontiguousarray(reader.sizes(field), "<i8").data)
    return digest.hexdigest()


def freshness(reader: Reader) -> Callable[[int], bool] | None:
    """What tells whether the file of a sample is still the one that was listed; None where there are no such files."""
    if indexed(reader) or not getattr(reader, "files_fingerprint", ""):
        return None
    found: Callable[[int], bool] = reader.is_current  # type: ignore[attr-defined]  # of `readers.sample.Listed`
    return found


def title_of(reader: Reader) -> str:
    """What people call the set: its directory or address, the split, and that only some of it was selected."""
    if isinstance(reader, SelectedReader):
        return f"{len(reader):,} samples of {title_of(reader.base)}"
    path, split = getattr(reader, "path", None), getattr(reader, "split", "")
    where = getattr(reader, "url", None) or (os.path.abspath(path) if path is not None else type(reader).__name__)
    return f"{where} ({split})" if split else str(where)


def info_of(images: Iterable[Buffer | None]) -> ImageInfo:
    """What the headers of images say; zeros for None, and for a header that cannot be read."""
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
