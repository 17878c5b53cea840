"""Is an index what it was when it was written, and does it say what the shards say?

dataset.json has size and CRC32C of every file of an index, so one flipped byte of any column shows without a look at
the shards. Sets of earlier versions lack them; for those, and beside the checksums, each sample's key, label, byte
ranges, file names and image header are compared with what the shard itself says.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import readers
from cache.errors import BadSampleError, DatasetError, FormatError, PackerError
from packer.adopted_shard import key_prefix
from packer.columns import header_row
from packer.formats.base import Located
from packer.formats.files import Window
from packer.problems import Problem, Problems
from readers.headers import read_header
from readers.index import Index, encode_name
from readers.layout import ColumnFile, DatasetInfo, SplitInfo
from readers.sample import Buffer, ImageInfo

__all__ = ["check_columns", "check_index", "header_difference", "sample_difference"]


def check_index(root: Path, info: DatasetInfo, split: str, found: Problems, remedy: str = "") -> bool:
    """Check every column of a split's index: its checksum, its length, and that samples lie in the order of shards.

    remedy: what to do about damage; default rebuilding the index. Returns whether the index is sound enough to look
    into the shards with it.
    """
    remedy = remedy or _remedy(root)
    files = info.splits[split]
    damaged = _damaged_columns(root, files)
    for name, what in damaged:
        found.add(Problem(split, f"{files.index}/{name}", what + remedy))
    try:
        with readers.open(root, split) as reader:
            Index(root / files.index, files.samples).check(reader.fields)
            counts = [shard.samples for shard in files.shards]
            expected = np.repeat(np.arange(len(counts), dtype=np.uint32), counts)
            if np.array_equal(reader.table.column("shard"), expected):
                return True
            if not damaged:
                found.add(Problem(split, files.index, "the column shard does not fit dataset.json" + remedy))
    except PackerError as error:
        if not damaged:
            found.add(Problem(split, files.index, str(error)))
    return False


def check_columns(root: Path, split: SplitInfo) -> None:
    """Raise DatasetError where a file of a split's index is not what dataset.json says. Sets without checksums pass."""
    for name, what in _damaged_columns(root, split):
        raise DatasetError(f"{root / split.index / name}: {what}{_remedy(root)}")


def _damaged_columns(root: Path, split: SplitInfo) -> list[tuple[str, str]]:
    """(file, what is wrong with it) of those that differ from dataset.json."""
    wrong = []
    for name, known in split.columns.items():
        what = _difference(root / split.index / name, known)
        if what:
            wrong.append((name, what))
    return wrong


def _difference(path: Path, known: ColumnFile) -> str:
    try:
        with Window(path) as window:
            if window.size != known.bytes:
                return f"has {window.size} bytes, dataset.json says {known.bytes}"
            crc = window.checksum()
    except FormatError as error:
        return "missing index column" if not path.exists() else str(error)
    return "" if crc == known.crc32c else f"its CRC32C is {crc:08x}, dataset.json says {known.crc32c:08x}"


def _remedy(root: Path) -> str:
    return f"; rebuild it with  packer index {root}"


def sample_difference(reader: readers.Reader, index: int, sample: Located, shard: str) -> str:
    """How what the index says of a sample differs from what its shard says; "" where it does not."""
    # keys that several adopted shards shared carry the name of their shard
    if reader.keys[index] not in (sample.key, f"{key_prefix(shard)}/{sample.key}", f"{Path(shard).stem}/{sample.key}"):
        return f"the shard says the key {sample.key!r}"
    if sample.label != int(reader.labels[index]):
        return f"the shard says the label {sample.label}, the index {int(reader.labels[index])}"
    for name in reader.fields:
        indexed = reader.byte_range(index, name)
        expected = None if indexed is None else indexed[1:]
        if sample.ranges.get(name) != expected:
            return f"field {name}: the shard has it at {sample.ranges.get(name)}, the index says {expected}"
        stored = reader.table.columns.names(name)[index]
        named = encode_name(sample.names.get(name, ""), sample.key)
        if stored != named:
            return f"field {name}: the shard says the file name {named!r:.200}, the index {stored!r:.200}"
    return ""


def header_difference(info: ImageInfo, index: int, image: Buffer | None) -> str:
    """How the header columns of a sample differ from its image (None: it has none); "" where they do not."""
    try:
        header = None if image is None else read_header(image)
    except BadSampleError:
        header = None  # adopted shards may hold what has no readable header
    for name, value in header_row(header).items():
        stored = int(getattr(info, name)[index])
        if stored != value:
            return f"the image's header says {name} {value}, the index {stored}"
    return ""
