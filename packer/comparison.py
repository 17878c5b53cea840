"""Compare a packed set with the source it came from, sample by sample: every byte of every field, and the labels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import readers
from cache.errors import BadSampleError, DatasetError
from cache.files import read_regular
from cache.messages import Watcher
from packer.conversion.arena import Arena
from packer.problems import Problem, Problems
from packer.sources.base import Slice, Source, SourceListing, SourceReader, SplitListing
from readers.index import decode_name
from readers.layout import MAX_JSON_BYTES, DatasetInfo, read_dataset_info
from readers.names import REPORT_FILE

__all__ = ["compare"]


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
                here = "source" if split in listing.splits else "set"
                found.add(Problem(split, str(root), f"the split is only in the {here}"))
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
        self._reported = set(_left_out(root))
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
                        self._sample(reader, index, block, i, source, arena)
                    elif (split, name) in self._reported:
                        self.left_out += 1
                    else:
                        self._wrong(split, f"{name} is in the source, but not in the set")
            for name, index in packed.items():
                self._wrong(split, "is not in the source", index, name)

    def _sample(
        self, reader: readers.Reader, index: int, part: Slice, i: int, source: SourceReader, arena: Arena
    ) -> None:
        key, split = reader.keys[index], reader.split
        try:
            payloads = source.read(part.places[i], arena)
        except BadSampleError as error:
            self._wrong(split, f"cannot be read from the source: {error}", index, key)
            return
        for field, payload in zip(self._listing.fields, payloads, strict=True):
            packed = reader.read(index, field) if field in reader.fields and reader.has(index, field) else None
            if payload != packed:
                what = "differs from the source" if field == "image" else f"field {field} differs from the source"
                self._wrong(split, what, index, key)
        label = int(reader.labels[index])
        if _class(self._set_classes, label) != _class(self._source_classes, part.labels[i]):
            expected = _class(self._source_classes, part.labels[i])
            self._wrong(split, f"has the label {label}, the source says {expected}", index, key)

    def _wrong(self, split: str, what: str, index: int | None = None, key: str | None = None) -> None:
        self._found.add(Problem(split, str(self._root), what, index, key))


def _file_name(reader: readers.Reader, index: int) -> str:
    key = reader.keys[index]
    return decode_name(reader.table.columns.names(reader.fields[0])[index], key) or key


def _class(classes: tuple[str, ...], label: int) -> str | int:
    return classes[label] if 0 <= label < len(classes) else label


def _left_out(root: Path) -> Iterator[tuple[str, str]]:
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
