"""The original files of a packed set: the tree that it was packed from, by names, and as files to stage.

What was a file keeps its name below the split's folder. What was none gets a name from its key: `key.json` for the
field json, `key.boxes.npy` for boxes, `key.jpg` and so on for an image. Names come from the set and are not trusted:
who writes a file checks its path.

Staged, they are below a folder of their own, `TREE`: the copy's own records would pass for a class in a tree without
splits, since torchvision takes every folder for one.
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import NamedTuple

from crc32c import crc32c

from cache.errors import PackerError, StagingError, StagingSourceError
from cache.staging import Manifest, StagedFile
from readers.headers import MEDIA, SUFFIX, sniff
from readers.index import decode_name
from readers.layout import KIND_SUFFIXES
from readers.names import shortened
from readers.pixels import PIXELS
from readers.reader import Reader
from readers.sample import NO_LABEL, Buffer
from readers.staged_files import SetFiles

__all__ = [
    "AS_FILES",
    "LABELS_FILE",
    "LABELS_HEADER",
    "TREE",
    "LabelRow",
    "Originals",
    "are_class_folders",
    "label_table",
    "original_files",
    "without_apostrophe",
]

LABELS_FILE = "labels.csv"
LABELS_HEADER = ("path", "label", "class", "split")
AS_FILES = " as files"
TREE = "files"
_FORMULA = re.compile("'*[=+@\t\r-]")
_GROUP = 32  # samples that are read together
_MOST_GROUPS = 32  # that wait: of one that is only copied in part the rest is never asked for


def original_files(reader: Reader, index: int) -> Iterator[tuple[str, str]]:
    """(field, path of its file relative to the tree) of each payload of a sample."""
    key, root = reader.keys[index], reader.split_info.root
    for field in reader.fields:
        if reader.has(index, field):
            name = decode_name(reader.table.columns.names(field)[index], key)
            name = name or f"{key}.{_suffix(reader, index, field)}"
            yield field, f"{root}/{name}" if root else name


def _suffix(reader: Reader, index: int, field: str) -> str:
    kind = reader.dataset.fields[field]
    if kind == PIXELS:
        return "png"
    if KIND_SUFFIXES.get(kind):
        return "json" if field == "json" else f"{field}.{KIND_SUFFIXES[kind]}"
    media = MEDIA[int(reader.image_info([index]).media[0])] if field == reader.fields[0] else ""
    suffix = SUFFIX.get(media or sniff(reader.read(index, field)), "bin")
    return suffix if kind == "image" else f"{field}.{suffix}"


def are_class_folders(reader: Reader) -> bool:
    """Whether the first folder of every labelled file of a split has the name of its class."""
    labels, classes, keys = reader.labels.tolist(), reader.classes, reader.keys
    names = reader.table.columns.names(reader.fields[0])
    for i, label in enumerate(labels):
        if label == NO_LABEL:
            continue
        folder, slash, _ = (decode_name(names[i], keys[i]) or keys[i]).partition("/")
        if not slash or label >= len(classes) or folder != classes[label]:
            return False
    return True


class LabelRow(NamedTuple):
    """One file: its path below the tree, the number and the name of its class, its split."""

    path: str
    label: str
    name: str
    split: str

    @classmethod
    def of(cls, reader: Reader, index: int, path: str) -> LabelRow | None:
        """The row of a sample; None where it has no label."""
        label = int(reader.labels[index])
        if label == NO_LABEL:
            return None
        return cls(path, str(label), reader.classes[label] if label < len(reader.classes) else "", reader.split)


def label_table(rows: Iterable[LabelRow]) -> bytes:
    """labels.csv, which `packer convert` reads as a manifest.

    An apostrophe comes before what a spreadsheet would take for a formula; `without_apostrophe` removes it.
    """
    text = io.StringIO(newline="")
    table = csv.writer(text)
    table.writerow(LABELS_HEADER)
    table.writerows([f"'{cell}" if _FORMULA.match(cell) else cell for cell in row] for row in rows)
    return text.getvalue().encode()


def without_apostrophe(cell: str) -> str:
    """A cell of labels.csv as it was before `label_table` wrote it."""
    return cell[1:] if cell[:1] == "'" and _FORMULA.match(cell) else cell


class _Place(NamedTuple):
    """Where a file comes from: the split's number in a list, the sample, the field."""

    reader: int
    sample: int
    field: str


class Originals:
    """A set as its original files, for staging; a source in the sense of `cache.staging.sources`.

    labels.csv is one of them where the folders do not show the labels. Neighbours are read together, once for all
    threads that copy them.

    files: the set as it is packed.
    splits: only these.
    opened: opens a split.

    Raises StagingError where two samples have the same file name.
    """

    def __init__(self, files: SetFiles, splits: Sequence[str], opened: Callable[[str], Reader]) -> None:
        self._title = f"{files.manifest.source}{AS_FILES}"
        self._readers = [opened(name) for name in splits]
        self._places: dict[str, _Place] = {}
        self._groups: dict[tuple[int, int], dict[int, Buffer]] = {}
        self._locks = [threading.Lock() for _ in range(64)]
        if any(PIXELS in reader.kinds.values() for reader in self._readers):
            raise StagingError(f"{files.manifest.source}: raw pixels were never files; stage the shards")
        listed, rows = [], list[LabelRow]()
        for number, reader in enumerate(self._readers):
            for file, row in self._listed(number, reader):
                listed.append(file)
                rows += [row] if row is not None else []
        has_table = rows and not all(map(are_class_folders, self._readers))
        self._table = label_table(rows) if has_table else b""
        if self._table:
            listed.append(StagedFile(f"{TREE}/{LABELS_FILE}", len(self._table), crc32c(self._table)))
        name = f"{files.manifest.name}-files"
        digest = hashlib.blake2b(f"{files.manifest.fingerprint} {AS_FILES} {TREE} {splits}".encode(), digest_size=16)
        try:
            self.manifest = Manifest(self, name, digest.hexdigest(), tuple(listed))
        except StagingError as error:
            raise StagingError(f"{error}; stage one split at a time, or the shards") from error

    def __str__(self) -> str:
        return self._title

    def location(self, file: StagedFile) -> str:
        """See `cache.staging.sources.Source`."""
        place = self._places.get(file.path)
        return f"{self._title}: {file.path}" if place is None else f"{self._title}: sample {place.sample} ({file.path})"

    def chunks(self, file: StagedFile, check: Callable[[], None]) -> Generator[memoryview, None, None]:
        """See `cache.staging.sources.Source`."""
        check()
        place = self._places.get(file.path)
        if place is None:
            yield memoryview(self._table)
            return
        try:
            data = self._payload(place)
        except (PackerError, OSError) as error:
            raise StagingSourceError(f"{self.location(file)}: cannot be read: {error}") from error
        yield memoryview(data)

    def close(self) -> None:
        """Close the set."""
        for reader in self._readers:
            reader.close()

    def _listed(self, number: int, reader: Reader) -> Iterator[tuple[StagedFile, LabelRow | None]]:
        """The files of a split; the row of the label table for the first of a sample."""
        facts = {field: (reader.sizes(field).tolist(), self._checksums(reader, field)) for field in reader.fields}
        for index in range(len(reader)):
            for field, name in original_files(reader, index):
                path = shortened(name)
                staged = f"{TREE}/{path}"
                self._places[staged] = _Place(number, index, field)
                sizes, checksums = facts[field]
                row = LabelRow.of(reader, index, path) if field == reader.fields[0] else None
                yield StagedFile(staged, sizes[index], checksums[index]), row

    @staticmethod
    def _checksums(reader: Reader, field: str) -> list[int]:
        found: list[int] = reader.table.field_column(field, "crc32c").tolist()
        return found

    def _payload(self, place: _Place) -> Buffer:
        """The bytes of one field; those of the first field of a group of samples are read at once."""
        reader = self._readers[place.reader]
        if place.field != reader.fields[0]:
            return reader.read(place.sample, place.field)
        number = place.sample // _GROUP
        group = place.reader, number
        with self._locks[number % len(self._locks)]:
            waiting = self._groups.get(group)
            if waiting is None or place.sample not in waiting:
                some = range(number * _GROUP, min(len(reader), (number + 1) * _GROUP))
                indices = [i for i in some if i >= place.sample and reader.has(i, place.field)]
                waiting = self._groups[group] = dict(zip(indices, reader.read_many(indices), strict=True))
            data = waiting.pop(place.sample)
            if not waiting:
                self._groups.pop(group, None)
            for old in list(self._groups)[:-_MOST_GROUPS]:
                self._groups.pop(old, None)
        return data
