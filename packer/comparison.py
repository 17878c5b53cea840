"""Compare an index with its checksums and with its shards, and a packed set with its source; list the differences.

dataset.json has size and CRC32C of every file of an index, so that damage of any column is found without its shards.
Sets of earlier versions lack them; for those, and in addition, each sample's key, label, byte ranges, file names and
image header are compared with what the shard itself says. With a source every byte of every field is compared, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import readers
from cache.errors import BadSampleError, DatasetError, FormatError, PackerError
from cache.files import read_regular
from cache.messages import Watcher, quoted
from packer.adopted_shard import key_prefix
from packer.columns import HEADER_COLUMNS, header_values
from packer.formats.base import Arena, Located, Window
from packer.sources.base import Slice, Source, SourceListing, SourceReader, SplitListing
from readers.headers import read_header
from readers.index import ABSENT, Index, decode_name, encode_name
from readers.layout import MAX_JSON_BYTES, DatasetInfo, SplitInfo, read_dataset_info
from readers.names import REPORT_FILE
from readers.sample import Buffer, ImageInfo

__all__ = [
    "MAX_PROBLEMS",
    "LocatedRows",
    "Problem",
    "Problems",
    "check_columns",
    "check_index",
    "compare",
    "header_difference",
    "sample_difference",
]


MAX_PROBLEMS = 10_000
_REBUILD = "rebuild it with  packer index {}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault: in which shard, what, and the index and key of the sample if it is about one."""

    split: str
    shard: str
    what: str
    index: int | None = None
    key: str | None = None

    def __str__(self) -> str:
        sample = "" if self.index is None else f" sample {self.index} ({self.key})"
        return f"{self.split}: {self.shard}:{sample} {self.what}"


@dataclass(slots=True)
class Problems:
    """A list of problems, which is capped, and their count, which is not."""

    problems: list[Problem] = field(default_factory=list)
    count: int = 0

    def add(self, problem: Problem) -> None:
        self.count += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)


def check_index(root: Path, info: DatasetInfo, split: str, found: Problems, remedy: str = "") -> bool:
    """Check every column of a split's index: its checksum, its length, and that samples are in the order of shards.

    remedy: what to do about damage; default rebuilding the index.

    Returns whether the index is sound enough to check the shards with it.
    """
    remedy = remedy or _REBUILD.format(quoted(root))
    files = info.splits[split]
    damaged = list(_damaged_columns(root, files))
    for name, what in damaged:
        found.add(Problem(split, f"{files.index}/{name}", f"{what}; {remedy}"))
    try:
        with readers.open(root, split) as reader:
            Index(root / files.index, files.samples).check(reader.fields, info.separate)
            counts = [shard.samples for shard in files.shards]
            expected = np.repeat(np.arange(len(counts), dtype=np.uint32), counts)
            wrong = [] if np.array_equal(reader.table.column("shard"), expected) else ["shard"]
            for name in info.separate:
                if int(reader.table.shard_column(name).max(initial=0)) >= max(1, len(counts)):
                    wrong.append(f"{name}.shard")
            if not wrong:
                return True
            if not damaged:
                found.add(Problem(split, files.index, f"the column {wrong[0]} does not fit dataset.json; {remedy}"))
    except PackerError as error:
        if not damaged:
            found.add(Problem(split, files.index, str(error)))
    return False


def check_columns(root: Path, split: SplitInfo) -> None:
    """Raise DatasetError where a file of a split's index is not what dataset.json says. Sets without checksums pass."""
    for name, what in _damaged_columns(root, split):
        raise DatasetError(f"{root / split.index / name}: {what}; {_REBUILD.format(quoted(root))}")


def _damaged_columns(root: Path, split: SplitInfo) -> Iterator[tuple[str, str]]:
    """(file, what is wrong with it) of those that differ from dataset.json."""
    for name, known in split.columns.items():
        path = root / split.index / name
        try:
            with Window(path) as window:
                if window.size != known.bytes:
                    yield name, f"has {window.size} bytes, dataset.json says {known.bytes}"
                elif (crc := window.checksum()) != known.crc32c:
                    yield name, f"its CRC32C is {crc:08x}, dataset.json says {known.crc32c:08x}"
        except FormatError as error:
            yield name, str(error) if path.exists() else "missing index column"


def sample_difference(reader: readers.Reader, index: int, sample: Located, shard: str) -> str:
    """How what the index says of a sample differs from what its shard says; "" where it does not."""
    if not _is_key(reader.keys[index], sample.key, shard):
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


def _is_key(key: str, of_shard: str, shard: str) -> bool:
    """Whether a key is that of a sample in a shard: keys that several adopted shards shared have the shard's name in
    front, or the last parts of its name where a set made of others has it in a folder."""
    prefix = key.removesuffix(f"/{of_shard}")
    return key == of_shard or (
        prefix != key and f"/{key_prefix(shard)}".endswith((f"/{prefix}", f"/{Path(prefix).stem}"))
    )


class LocatedRows:
    """The samples of an edited index whose payloads are in one shard, to compare with what its format locates there.

    first, stop: the samples of the split for which `dataset.json` lists the shard. number: of the shard in that list.
    """

    def __init__(self, reader: readers.Reader, first: int, stop: int, number: int) -> None:
        info, table = reader.dataset, reader.table
        self._reader, self._edited, self._shard = reader, info.edited, reader.split_info.shards[number].path
        self._rows: dict[tuple[str, int, int], list[int]] = {}
        for name in reader.fields:
            rows = np.arange(first, stop)
            if name in info.separate:
                rows = np.flatnonzero(table.shard_column(name) == number)
            offset = table.field_column(name, "offset")[rows]
            length = table.field_column(name, "length")[rows]
            there = offset != np.uint64(ABSENT)
            for row, *place in zip(rows[there].tolist(), offset[there].tolist(), length[there].tolist(), strict=True):
                self._rows.setdefault((name, place[0], place[1]), []).append(row)

    def differences(self, sample: Located) -> Iterator[tuple[int, str]]:
        """(sample, how the index differs from the shard); payloads that no sample has are not counted."""
        for name, place in sample.ranges.items():
            for row in self._rows.pop((name, *place), ()):
                yield from ((row, what) for what in self._compared(row, name, sample))

    def _compared(self, row: int, of: str, sample: Located) -> Iterator[str]:
        reader, key = self._reader, self._reader.keys[row]
        if "keys" not in self._edited and not _is_key(key, sample.key, self._shard):
            yield f"the shard says the key {sample.key!r}"
        if "labels" not in self._edited and of not in reader.dataset.separate and sample.label != reader.labels[row]:
            yield f"the shard says the label {sample.label}, the index {int(reader.labels[row])}"
        name, stored = sample.names.get(of, ""), reader.table.columns.names(of)[row]
        if stored != encode_name(name, sample.key) and decode_name(stored, key) != name:
            yield f"field {of}: the shard says the file name {name!r:.200}, the index {stored!r:.200}"

    def missing(self) -> Iterator[tuple[int, str]]:
        """(sample, what is wrong) of payloads that are not where the index puts them."""
        for (name, offset, length), rows in self._rows.items():
            for row in rows:
                yield row, f"field {name}: the shard has none at {offset} of {length} bytes, where the index puts it"


def header_difference(info: ImageInfo, index: int, image: Buffer | None) -> str:
    """How the header columns of a sample differ from its image (None: it has none); "" where they do not."""
    try:
        header = None if image is None else read_header(image)
    except BadSampleError:
        header = None  # adopted shards may hold what has no readable header
    for name, value in zip(HEADER_COLUMNS, header_values(header), strict=True):
        stored = int(getattr(info, name)[index])
        if stored != value:
            return f"the image's header says {name} {value}, the index {stored}"
    return ""


def compare(root: Path, source: Source, found: Problems, watcher: Watcher) -> int:
    """Add every difference to `found`. Returns how many files the conversion itself reported as left out."""
    info = read_dataset_info(root)
    options = info.made.get("options", {})
    if options.get("reencode"):
        found.add(Problem("", str(root), "was re-encoded when it was packed, so its bytes cannot equal the source's"))
        return 0
    listing = source.list(options.get("split"))
    comparison = _Comparison(root, info, listing, found)
    total = sum(int(part.bytes.sum()) for part in listing.splits.values())
    watcher.begin(sum(map(len, listing.splits.values())), total, lambda: (comparison.samples, comparison.bytes))
    try:
        for split in sorted(info.splits.keys() | listing.splits.keys()):
            if split not in listing.splits or split not in info.splits:
                side = "source" if split in listing.splits else "set"
                found.add(Problem(split, str(root), f"the split is only in the {side}"))
                continue
            with source.open() as source_reader:
                comparison.run(split, listing.splits[split], source_reader)
    finally:
        watcher.end()
    return comparison.left_out


class _Comparison:
    def __init__(self, root: Path, info: DatasetInfo, listing: SourceListing, found: Problems) -> None:
        self._root, self._listing, self._found = root, listing, found
        # Where one side has no names for its classes, the numbers are compared.
        both_named = bool(info.classes) and bool(listing.classes)
        self._set_classes = info.classes if both_named else ()
        self._source_classes = listing.classes if both_named else ()
        self._reported = set(_read_report(root))
        self.samples = self.bytes = self.left_out = 0

    def run(self, split: str, part: SplitListing, source: SourceReader) -> None:
        arena = Arena(lambda: None)
        with readers.open(self._root, split) as reader:
            packed = {_file_name(reader, i): i for i in range(len(reader))}
            for block in part.slices():
                for i, names in enumerate(block.names):
                    name = names[0] or block.keys[i]
                    index = packed.pop(name, None)
                    self.samples, self.bytes = self.samples + 1, self.bytes + block.bytes[i]
                    if index is not None:
                        arena.begin(block.bytes[i] + 1)
                        self._compare_sample(reader, index, block, i, source, arena)
                    elif (split, name) in self._reported:
                        self.left_out += 1
                    else:
                        self._add(split, f"{name} is in the source, but not in the set")
            for name, index in packed.items():
                self._add(split, "is not in the source", index, name)

    def _compare_sample(
        self, reader: readers.Reader, index: int, part: Slice, i: int, source: SourceReader, arena: Arena
    ) -> None:
        key, split = reader.keys[index], reader.split
        try:
            payloads = source.read(part.places[i], arena)
        except BadSampleError as error:
            self._add(split, f"cannot be read from the source: {error}", index, key)
            return
        for name, payload in zip(self._listing.fields, payloads, strict=True):
            packed = reader.read(index, name) if name in reader.fields and reader.has(index, name) else None
            if payload != packed:
                what = "differs from the source" if name == "image" else f"field {name} differs from the source"
                self._add(split, what, index, key)
        label = int(reader.labels[index])
        if _class(self._set_classes, label) != _class(self._source_classes, part.labels[i]):
            expected = _class(self._source_classes, part.labels[i])
            self._add(split, f"has the label {label}, the source says {expected}", index, key)

    def _add(self, split: str, what: str, index: int | None = None, key: str | None = None) -> None:
        self._found.add(Problem(split, str(self._root), what, index, key))


def _file_name(reader: readers.Reader, index: int) -> str:
    key = reader.keys[index]
    return decode_name(reader.table.columns.names(reader.fields[0])[index], key) or key


def _class(classes: tuple[str, ...], label: int) -> str | int:
    return classes[label] if 0 <= label < len(classes) else label


def _read_report(root: Path) -> Iterator[tuple[str, str]]:
    """(split, name) of every file that the conversion reported as left out."""
    path = root / REPORT_FILE
    try:
        text = read_regular(path, MAX_JSON_BYTES).decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        return
    except OSError as error:
        raise DatasetError(f"the report of what was left out cannot be read: {error}") from error
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            item = json.loads(line)
            yield str(item.get("split", "")), str(item["name"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DatasetError(f"{path}: line {number} is not what packer writes there: {error!r:.200}") from error
