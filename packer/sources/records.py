"""A TFRecord file of tf.train.Example made elsewhere, plain or compressed as a whole.

`record_features` says which feature means what. ImageNet's records count labels from 1: label_offset 1 makes
them count from 0. Where the records name every class, the classes get these names. The split is read off the
file's name (train-00000-of-00008.tfrecord). Features that are no part of a sample stay behind, with a
warning.

The file is walked once, and checksums are verified on the way; a record whose data is damaged is a bad
sample. Place: (start of the record's data, its bytes, the byte range of each field in it); offsets are those
of the unpacked file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from struct import Struct
from types import TracebackType
from typing import TypeAlias

from crc32c import crc32c

from packer.conversion.arena import Arena
from packer.formats.checksum import masked_crc
from packer.formats.window import Window
from packer.sources.base import ListingBuilder, SourceListing, check_names
from packer.sources.names import split_of_file
from packer.sources.record_features import (
    IMAGE_FEATURES,
    LABEL_FEATURES,
    ExampleKeys,
    ExampleSample,
    read_example,
)
from packer.sources.streams import (
    ByteFile,
    PlainFile,
    StreamKeeper,
    StreamWindow,
    UnpackedStream,
    compression_of,
    file_stamp,
)
from readers.errors import BadSampleError, FormatError, SourceError
from readers.sample import NO_LABEL, Buffer

__all__ = ["TFRecordSource"]

_LENGTH, _CRC = Struct("<Q"), Struct("<I")
_HEAD_BYTES = 12
_MAX_RECORD_BYTES = 1 << 31  # that of a protocol buffer

# Start of the record's data, its bytes, and the range of each field in it; None where the data is damaged.
Place: TypeAlias = tuple[int, int, "tuple[tuple[int, int] | None, ...] | None"]


class TFRecordSource:
    """The records of the file at `root`.

    image_key, label_key: features, None for the usual ones. label_offset is subtracted from the labels.
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
        self.keys = ExampleKeys(
            (image_key,) if image_key else IMAGE_FEATURES,
            (label_key,) if label_key else LABEL_FEATURES,
            label_offset,
        )
        self._keeper = StreamKeeper(self.root)
        self._stamp: tuple[int, int] | None = None

    @property
    def title(self) -> str:
        return f"TFRecord file {self.root}"

    def list(self, split: str | None) -> SourceListing:
        self._stamp = file_stamp(self.root)
        compression = compression_of(self.root)
        walked = _Walk(self.root, self.keys)
        try:
            stream = UnpackedStream(self.root, compression) if compression else None
            with StreamWindow(stream) if stream else Window(self.root) as window:
                walked.run(window)
        except FormatError as error:
            raise SourceError(str(error)) from error
        listing = walked.listing(split or split_of_file(self.root.name), self._stamp[1])
        listing.shuffles = not compression
        return listing

    def paths(self, listing: SourceListing) -> Iterator[Path]:
        yield self.root

    def open(self) -> RecordReader:
        if self._stamp is not None and file_stamp(self.root) != self._stamp:
            raise SourceError(f"{self.root}: has changed since it was listed; run the same command again")
        return RecordReader(self._keeper)


class _Walk:
    """Collects the samples of a file."""

    def __init__(self, path: Path, keys: ExampleKeys) -> None:
        self._path, self._keys = path, keys
        self._found: list[tuple[int, int, ExampleSample]] = []
        self._class_names: dict[int, set[str]] = {}
        self._left_behind: dict[str, None] = {}

    def run(self, window: Window) -> None:
        for start, data, whole in _records(window):
            sample = ExampleSample()
            if whole:
                try:
                    sample = read_example(memoryview(data), self._keys)
                    self._note(sample)
                except FormatError as error:
                    raise SourceError(f"{self._path}: the record at byte {start}: {error}") from error
            self._found.append((start, len(data), sample))

    def _note(self, sample: ExampleSample) -> None:
        if not self._found and "image" not in (sample.ranges or ()):
            raise FormatError(
                f"no image ({', '.join(self._keys.image)}); it has "
                f"{', '.join(sample.left_behind) or 'nothing else'}; name the image with  "
                f"--image-key KEY  (in Python: packer.open_source(path, image_key=KEY))"
            )
        if sample.label != NO_LABEL and sample.class_name:
            self._class_names.setdefault(sample.label, set()).add(sample.class_name)
        self._left_behind |= dict.fromkeys(sample.left_behind)
        sample.left_behind = []

    def listing(self, split: str, stamp: int) -> SourceListing:
        if not self._found:
            raise SourceError(f"{self._path}: no records")
        extra = {name for _, _, sample in self._found for name in sample.ranges or ()} - {"image"}
        kinds = {"image": "image"} | dict.fromkeys(sorted(extra - {"json"}), "file")
        kinds |= {"json": "json"} if "json" in extra else {}
        keys = [sample.key or self._numbered(number) for number, (_, _, sample) in enumerate(self._found)]
        numbered = len(set(keys)) < len(keys)
        builder = ListingBuilder(len(kinds))
        for number, (start, size, sample) in enumerate(self._found):
            ranges = None if sample.ranges is None else tuple(sample.ranges.get(name) for name in kinds)
            key = self._numbered(number) if numbered else keys[number]
            names = [""] * len(kinds) if numbered else [sample.names.get(name, "") for name in kinds]
            builder.add(names, (start, size, ranges), size, key=key, label=sample.label, stamp=stamp)
        part = builder.build()
        listing = SourceListing({split: part}, kinds, self._classes())
        if numbered:
            listing.warnings.append(f"{self._path}: keys or file names occur twice; samples are called by number")
        check_names([*part.keys, *(name for names in part.names for name in names if name)], str(self._path))
        listing.warnings += self._warnings(part.labels.tolist())
        return listing

    def _numbered(self, number: int) -> str:
        return f"{self._path.name.partition('.')[0]}/{number:08d}"

    def _classes(self) -> tuple[str, ...]:
        """Names of the classes, where every label from 0 on has just one."""
        named = {label: next(iter(names)) for label, names in self._class_names.items() if len(names) == 1}
        classes = tuple(named[label] for label in sorted(named))
        whole = sorted(self._class_names) == list(range(len(classes)))
        return classes if whole and len(set(classes)) == len(classes) else ()

    def _warnings(self, labels: Sequence[int]) -> Iterator[str]:
        if self._left_behind:
            yield f"{self._path}: features left behind: {', '.join(sorted(self._left_behind))}"
        if min((label for label in labels if label != NO_LABEL), default=0) == 1:
            yield (
                f"{self._path}: labels run from 1 to {max(labels)} and none is 0, as in ImageNet's records; "
                f"to count from 0:  --source-label-offset 1  (in Python: packer.open_source(path, label_offset=1))"
            )


def _records(window: Window) -> Iterator[tuple[int, bytes, bool]]:
    """(start, data, whether its checksum is right) of every record.

    Raises FormatError where the file is broken.
    """
    position = 0
    while head := _up_to(window, position, _HEAD_BYTES):
        if len(head) < _HEAD_BYTES:
            raise FormatError(f"{window.path}: ends inside the record at byte {position}: truncated?")
        length = int(_LENGTH.unpack_from(head)[0])
        if masked_crc(crc32c(head[:8])) != _CRC.unpack_from(head, 8)[0]:
            raise FormatError(f"{window.path}: wrong checksum of a length at byte {position}: damaged, or no TFRecord")
        if length > _MAX_RECORD_BYTES:
            raise FormatError(
                f"{window.path}: the record at byte {position} has {length} bytes, too many for an Example"
            )
        start = position + _HEAD_BYTES
        record = window.read(start, length + 4)
        data = record[:length]
        yield start, data, masked_crc(crc32c(data)) == _CRC.unpack_from(record, length)[0]
        position = start + length + 4


def _up_to(window: Window, offset: int, length: int) -> bytes:
    if isinstance(window, StreamWindow):
        return window.read_up_to(offset, length)
    return window.read(offset, min(length, window.size - offset))


class RecordReader:
    """Reads records of one file."""

    def __init__(self, keeper: StreamKeeper) -> None:
        self._keeper = keeper
        compression = compression_of(keeper.path)
        self._stream = keeper.take(compression) if compression else None
        self._file: ByteFile = self._stream or PlainFile(keeper.path)

    def read(self, place: Place, arena: Arena) -> Sequence[Buffer | None]:
        start, size, ranges = place
        if ranges is None:
            raise BadSampleError(f"the record at byte {start} has a wrong checksum: damaged")
        if ranges[0] is None:
            raise BadSampleError(f"the record at byte {start} has no image")
        self._file.read_into(start, arena.rest()[:size])
        data = arena.take(size)
        return [None if part is None else data[part[0] : part[1]] for part in ranges]

    def __enter__(self) -> RecordReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None and kind is None:
            self._keeper.leave(self._stream)
        else:
            self._file.close()
