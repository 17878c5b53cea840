"""Directories for rocAL's own readers of tar and TFRecord, made of our shards.

Those readers take directories and use every file in them, so the shards of one split get a directory of their own:

    tar        DIR/shards/x.tar    symbolic links        TFRecord   DIR/x.tfrecord   hard links: rocAL's reader of
               DIR/index/x.idx     sample index                                      labels leaves out symbolic ones

An index is text, `v1.2 SAMPLES` and then a line a sample: repeated `extension offset size name`, blank-separated
(DALI's tools/wds2idx.py; rocAL's webdataset_source_reader.cpp). That of the directory lists the label and the image
alone, as rocAL takes any component it was not told of for the first one it was. Some sources of rocAL, those of 2025
among them, look for names where the version is v1.0, and for none in v1.2: `index_version` says which is written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from readers.errors import DatasetError, FormatError, OutputError
from readers.headers import MEDIA
from readers.rocal.vet import Limits, decodable, limits_of
from readers.shards import ShardReader

__all__ = ["IndexVersion", "Layout", "tar_layout", "tfrecord_layout"]

IndexVersion: TypeAlias = Literal["1.2", "1.0"]
_JPEG_EXTENSIONS = ("jpg", "jpeg", "jpe")
_MOST_TFRECORD_BYTES = 1 << 32  # rocAL keeps offsets in 32 bits
_MOST_INDEX_BYTES = 1 << 31


@dataclass(frozen=True)
class Layout:
    """A directory for rocAL's reader of `format`. label_offset: what its labels have more than ours."""

    format: Literal["tar", "tfrecord"]
    shards: Path
    index: Path | None
    extension: str
    samples: int
    label_offset: int
    limits: Limits


def tar_layout(
    reader: ShardReader,
    index_paths: Sequence[str | os.PathLike[str]],
    directory: str | os.PathLike[str],
    *,
    index_version: IndexVersion = "1.2",
    max_side: int = 1024,
) -> Layout:
    """Make `directory` for the tar shards of `reader`, from an index file (v1.1 or v1.2) for each, in their order.

    Write the index files with `packer export-index`. max_side: limit of decoded heights and widths. Raises DatasetError
    for a set of another format or with images that rocAL does not decode, FormatError for an index that does not fit
    its shard, OutputError where `directory` exists.
    """
    if index_version not in ("1.2", "1.0"):
        raise ValueError(f"index_version is 1.2 or 1.0, not {index_version!r}")
    shards = _shards(reader, "tar")
    if len(index_paths) != len(shards):
        raise DatasetError(f"{len(shards)} shards need as many index files, found {len(index_paths)}")
    counts = [shard.samples for shard in reader.split_info.shards]
    pairs = [_checked_index(Path(path), shard, n) for path, shard, n in zip(index_paths, shards, counts, strict=True)]
    extensions = {extension for _, extension in pairs if extension}

    def fill(root: Path) -> None:
        (root / "shards").mkdir()
        (root / "index").mkdir()
        for shard, (lines, _) in zip(shards, pairs, strict=True):
            (root / "shards" / shard.name).symlink_to(shard.resolve())
            text = "".join(f"{line}\n" for line in [f"v{index_version} {len(lines)}", *lines])
            (root / "index" / f"{shard.stem}.idx").write_text(text, encoding="ascii")

    root = _make(Path(directory), fill)
    return _layout(reader, "tar", root / "shards", root / "index", ",".join(sorted(extensions)), max_side)


def tfrecord_layout(reader: ShardReader, directory: str | os.PathLike[str], *, max_side: int = 1024) -> Layout:
    """Make `directory`, on the file system of the shards, for the TFRecord shards of `reader`; no index is read.

    Raises as `tar_layout` does, and DatasetError for shards of 4 GiB and more, whose offsets rocAL cuts off, and for
    samples without a label, for which it ends the process.
    """
    shards = _shards(reader, "tfrecord")
    for shard, told in zip(shards, reader.split_info.shards, strict=True):
        if told.bytes >= _MOST_TFRECORD_BYTES:
            raise DatasetError(
                f"{shard} has {told.bytes} bytes, rocAL reads less than 4 GiB: pack it in smaller shards"
            )

    def fill(root: Path) -> None:
        for shard in shards:
            os.link(shard.resolve(), root / shard.name)

    return _layout(reader, "tfrecord", _make(Path(directory), fill), None, "", max_side)


def _shards(reader: ShardReader, wanted: str) -> list[Path]:
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
    return [reader.path / shard.path for shard in reader.split_info.shards]


def _checked_index(path: Path, shard: Path, samples: int) -> tuple[list[str], str]:
    """Lines of rocAL's index, with the label and the image of each sample, and the extension of the images."""
    try:
        if path.stat().st_size > _MOST_INDEX_BYTES:
            raise FormatError(f"{path}: an index of more than {_MOST_INDEX_BYTES} bytes")
        head, *lines = path.read_text(encoding="ascii").splitlines()
        version, told = head.split()
    except (ValueError, OSError) as error:
        raise FormatError(f"{path}: not a readable index of a tar shard: {error}") from error
    if version not in ("v1.1", "v1.2") or told != str(samples) or len(lines) != samples:
        raise FormatError(
            f"{path}: expected v1.1 or v1.2 and {samples} samples of {shard.name}, found {head[:40]!r} and {len(lines)}"
        )
    extensions: set[str] = set()
    stop = shard.stat().st_size
    chosen = [
        _line(path, number, line.split(), version == "v1.2", stop, extensions, shard.stem)
        for number, line in enumerate(lines, 2)
    ]
    return chosen, ",".join(sorted(extensions))


def _line(path: Path, number: int, words: list[str], named: bool, stop: int, extensions: set[str], stem: str) -> str:
    width = 4 if named else 3
    parts = [words[at : at + width] for at in range(0, len(words), width)]
    kept = []
    for part in parts:
        if len(part) != width or not (part[1].isdecimal() and part[2].isdecimal()):
            raise FormatError(f"{path}, line {number}: expected groups of {width} words, found {' '.join(part)[:60]!r}")
        if int(part[1]) % 512 or int(part[1]) + int(part[2]) > stop:
            raise FormatError(f"{path}, line {number}: {part[1]} and {part[2]} are no range of a member of the shard")
        if part[0] in _JPEG_EXTENSIONS or part[0] == "cls":
            kept.append(part if named else [*part, f"{stem}-{number}.{part[0]}"])
            extensions.update({part[0]} - {"cls"})
    if sorted(part[0] == "cls" for part in kept) != [False, True]:
        raise FormatError(f"{path}, line {number}: expected one cls and one JPEG, found {[part[0] for part in parts]}")
    return " ".join(word for part in kept for word in part)


def _make(directory: Path, fill: Callable[[Path], None]) -> Path:
    """`directory`, whole or not at all. Raises OutputError."""
    building = directory.with_name(f".{directory.name}.{os.getpid()}")
    try:
        if directory.exists():
            raise OutputError(f"{directory} exists; give a new directory, or remove it")
        building.mkdir(parents=True)
        fill(building)
        os.rename(building, directory)
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


def _layout(
    reader: ShardReader, kind: Literal["tar", "tfrecord"], shards: Path, index: Path | None, extension: str, cap: int
) -> Layout:
    offset = reader.dataset.label_offset
    return Layout(kind, shards, index, extension, len(reader), offset, limits_of(reader, cap=cap))
