"""Directories for rocAL's own readers of tar and TFRecord, made of our shards.

Those readers take directories and use every file in them, so the shards of one split get a directory of their own:

    tar        DIR/shards/x.tar    symbolic links        TFRecord   DIR/x.tfrecord   hard links: rocAL's reader of
               DIR/index/x.idx     sample index                                      labels leaves out symbolic ones

rocAL matches images and labels by file name, without the directories in it, and keeps offsets in 32 bits.

An index is text, `v1.0 SAMPLES` and then a line a sample: repeated `extension offset size name`, blank-separated
(rocAL's webdataset_source_reader.cpp; DALI's tools/wds2idx.py calls the same v1.2). rocAL looks for names in v1.0 only,
and refuses those of v1.2. The index of the directory lists the label and the image alone, as rocAL takes any component
it was not told of for the first one it was, and names them by number.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from cache.errors import DatasetError, FormatError, OutputError
from cache.files import Folder, atomic_write
from readers.headers import MEDIA
from readers.reader import Reader
from readers.rocal.vet import Limits, decodable, limits_of

__all__ = ["Layout", "tar_layout", "tfrecord_layout"]

_Range: TypeAlias = tuple[int, int]  # offset, bytes
_JPEG_EXTENSIONS = ("jpg", "jpeg", "jpe")
_WORDS = {"v1.0": 4, "v1.1": 3, "v1.2": 4}  # of a member, in an index of this version
_MOST_SHARD_BYTES = 1 << 32
_MOST_INDEX_BYTES = 1 << 31


@dataclass(frozen=True)
class Layout:
    """A directory for rocAL's reader of `format`. label_offset: what its labels have more than ours."""

    format: Literal["tar", "tfrecord"]
    shards: Path
    index: Path | None
    samples: int
    label_offset: int
    limits: Limits


def tar_layout(
    reader: Reader,
    directory: str | os.PathLike[str],
    *,
    index_paths: Sequence[str | os.PathLike[str]] | None = None,
    max_side: int = 1024,
) -> Layout:
    """Make `directory` for the tar shards of `reader`.

    index_paths: of the index files (v1.0, v1.1 or v1.2) of the shards, in their order; by default those beside the
    shards, `x.idx` for `x.tar`, where `packer export-index --for rocal` puts them. max_side: limit of decoded heights
    and widths. Raises DatasetError for a set of another format, with images that rocAL does not decode, without labels,
    or with shards of 4 GiB; FormatError for an index that does not fit its shard; OutputError where `directory` exists
    or cannot be made.
    """
    shards = _shards(reader, "tar")
    if index_paths is None:
        index_paths = [shard.with_suffix(".idx") for shard in shards]
    if len(index_paths) != len(shards):
        raise DatasetError(f"{len(shards)} shards need as many index files, found {len(index_paths)}")
    counts = [shard.samples for shard in reader.split_info.shards]
    indexes = [_members(Path(path), shard, n) for path, shard, n in zip(index_paths, shards, counts, strict=True)]

    def fill(root: Path) -> None:
        (root / "shards").mkdir()
        (root / "index").mkdir()
        first = 0
        for number, (shard, members) in enumerate(zip(shards, indexes, strict=True)):
            (root / "shards" / f"{number:06d}.tar").symlink_to(shard.resolve())
            lines = [_line(first + i, *both) for i, both in enumerate(members)]
            text = "".join(f"{line}\n" for line in [f"v1.0 {len(lines)}", *lines])
            atomic_write(root / "index" / f"{number:06d}.idx", text.encode("ascii"))
            first += len(lines)

    root = _make(Path(directory), fill)
    return _layout(reader, "tar", root / "shards", root / "index", max_side)


def tfrecord_layout(reader: Reader, directory: str | os.PathLike[str], *, max_side: int = 1024) -> Layout:
    """Make `directory`, on the file system of the shards, for the TFRecord shards of `reader`; no index is read.

    Raises as `tar_layout` does, and DatasetError where file names (image/filename) have directories.
    """
    shards = _shards(reader, "tfrecord")
    names = (reader.name(index) for index in range(len(reader)))
    if nested := next((name for name in names if "/" in name), None):
        raise DatasetError(
            f"{reader.path}: the file name {nested} has a directory, and rocAL would not find its label; use "
            f"readers.rocal.external_source, or tar shards and tar_layout"
        )

    def fill(root: Path) -> None:
        for number, shard in enumerate(shards):
            os.link(shard.resolve(), root / f"{number:06d}.tfrecord")

    return _layout(reader, "tfrecord", _make(Path(directory), fill), None, max_side)


def _shards(reader: Reader, wanted: str) -> list[Path]:
    """The shards of a set that rocAL's own readers can take. Raises DatasetError."""
    if reader.dataset.format != wanted:
        raise DatasetError(f"{reader.path} has {reader.dataset.format} shards, expected {wanted}: packer convert")
    bad = np.flatnonzero(~decodable(reader.info))
    if len(bad):
        first = int(bad[0])
        raise DatasetError(
            f"{reader.path}: {len(bad)} images are not upright JPEGs of 1 or 3 components, the first is sample "
            f"{first} ({reader.keys[first]}, {MEDIA[int(reader.info.media[first])] or 'unknown'}); rocAL would show "
            f"others in their place: use readers.rocal.external_source, which converts them"
        )
    unlabelled = np.flatnonzero(reader.labels < 0)
    if len(unlabelled):
        raise DatasetError(f"{reader.path}: {len(unlabelled)} samples have no label, as rocAL's readers need")
    for shard in reader.split_info.shards:
        if shard.bytes >= _MOST_SHARD_BYTES:
            told = f"{shard.path} has {shard.bytes} bytes"
            raise DatasetError(f"{told}, rocAL reads less than 4 GiB: pack smaller shards")
    return [reader.path / shard.path for shard in reader.split_info.shards]


def _members(path: Path, shard: Path, samples: int) -> list[tuple[_Range, _Range]]:
    """Label and image of each sample, by an index file. Raises FormatError."""
    try:
        if path.stat().st_size > _MOST_INDEX_BYTES:
            raise FormatError(f"{path}: an index of more than {_MOST_INDEX_BYTES} bytes")
        head, *lines = path.read_text(encoding="ascii").splitlines()
        version, told = head.split()
        stop = shard.stat().st_size
    except FormatError:
        raise
    except (ValueError, OSError) as error:
        told = f"{path}: not a readable index of {shard.name}: {error}"
        raise FormatError(f"{told}; write it with  packer export-index {shard.parent} --for rocal") from error
    if version not in _WORDS or told != str(samples) or len(lines) != samples:
        raise FormatError(
            f"{path}: expected v1.0, v1.1 or v1.2 and {samples} samples of {shard.name}, found {head[:40]!r} and "
            f"{len(lines)} lines of samples"
        )
    width = _WORDS[version]
    return [_parsed(f"{path}, line {number}", line.split(), width, stop) for number, line in enumerate(lines, 2)]


def _parsed(where: str, words: Sequence[str], width: int, stop: int) -> tuple[_Range, _Range]:
    """(label, image) of one line; its other members do not count."""
    labels, images = [], []
    for at in range(0, len(words), width):
        extension, *numbers = words[at : at + width]
        if len(numbers) != width - 1 or not (numbers[0].isdecimal() and numbers[1].isdecimal()):
            raise FormatError(f"{where}: expected groups of {width} words, found {' '.join(words[at : at + 4])[:60]!r}")
        found = int(numbers[0]), int(numbers[1])
        if found[0] % 512 or sum(found) > stop:
            raise FormatError(f"{where}: {found[0]} and {found[1]} are no range of a member of the shard")
        if extension == "cls":
            labels.append(found)
        elif extension.lower() in _JPEG_EXTENSIONS:
            images.append(found)
    if len(labels) != 1 or len(images) != 1:
        raise FormatError(f"{where}: expected one cls and one JPEG, found {len(labels)} and {len(images)}")
    return labels[0], images[0]


def _line(number: int, label: _Range, image: _Range) -> str:
    return f"cls {label[0]} {label[1]} {number:09d}.cls jpg {image[0]} {image[1]} {number:09d}.jpg"


def _make(directory: Path, fill: Callable[[Path], None]) -> Path:
    """`directory`, whole or not at all. Raises OutputError."""
    building = directory.with_name(f".{directory.name}.{os.getpid()}")
    try:
        if directory.exists():
            raise OutputError(f"{directory} exists; give a new directory, or remove it")
        building.mkdir(parents=True)
        fill(building)
        with Folder(directory.parent) as parent:
            for folder in (path for path in (building, *building.iterdir()) if path.is_dir()):
                with Folder(folder) as made:
                    made.sync()
            parent.rename(building.name, directory.name, durable=True)
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(
            f"{directory} cannot be made: {error}; hard links need the file system of the shards, so choose one "
            f"there, or copy the set first (packer stage)"
        ) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return directory


def _layout(reader: Reader, kind: Literal["tar", "tfrecord"], shards: Path, index: Path | None, cap: int) -> Layout:
    offset = reader.dataset.label_offset
    return Layout(kind, shards, index, len(reader), offset, limits_of(reader, cap=cap))
