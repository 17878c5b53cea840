"""Shards made elsewhere, of any format: what the format locates in them, read where it is.

So `packer convert` of a shard and `packer index` of it agree on keys, labels, classes, splits and fields. A file that
is compressed as a whole is walked and read as a stream, where its format can be; images that are not one byte range are
read by the format itself. A sample that is damaged is a bad sample.

Where the shard names every class, the classes get these names; where it has names only, labels are their positions in
sorted order, or the numbers that they all are. The split is what the shard says, or is read off the
name of the file (train-00000-of-00008.tfrecord). A shard of a packed set is not a source by itself: it is adopted as it
is.

A folder of shards of one format is a source, too: all in it, or in a folder a split. Samples come in the order of the
names of the files; where no name says a split, all are train. Where a key occurs in several shards, keys begin with the
name of their shard. A gap in the numbers of the names is a warning.

Place: number of the file, then why a sample cannot be read, or where the format finds its image, or None; then (offset,
length, field) in file order.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

import numpy as np

from cache.errors import BadSampleError, FormatError, SourceError
from cache.messages import plural, quoted
from packer.formats import format_of_head
from packer.formats.base import (
    Arena,
    Format,
    Located,
    LocateOptions,
    PlaceReader,
    WalkedFormat,
    key_by_number,
    shard_stem,
)
from packer.registry import HEAD_BYTES
from packer.sources.base import (
    FieldNames,
    FileSource,
    ListingBuilder,
    SourceListing,
    SplitListing,
    check_names,
    safe_name,
)
from packer.sources.layouts import shard_files
from packer.sources.streams import (
    PlainFile,
    StreamKeeper,
    StreamWindow,
    UnpackedStream,
    compression_of,
    unpacked_head,
)
from readers.opening.tree import SPLIT_NAMES
from readers.table import NO_LABEL, Buffer, NamesBuilder, Strings, repeated

__all__ = [
    "ClassNames",
    "ShardSource",
    "classes_in_order",
    "field_kinds",
    "located_samples",
    "missing_shards",
    "split_of_name",
]

_OF = re.compile(r"(?P<head>.*-)(?P<number>\d+)(?P<tail>-of-\d+.*)", re.DOTALL)
_TAR = re.compile(r"(?P<head>.*?)(?P<number>\d+)(?P<tail>\.tar)", re.DOTALL)
_NAMES_IN_MESSAGE = 3
_MOST_DIGITS = 9

Place: TypeAlias = tuple[Any, ...]
_FIRST_NAME = -2  # in place of the label of a sample that has the first name only; -3 the second, and so on


def located_samples(container: Format, path: Path, options: LocateOptions) -> Iterator[Located]:
    """What a format locates in a file, under keys and names that can be packed."""
    return map(_packable, container.locate(path, options))


def _packable(sample: Located) -> Located:
    names = {field: _safe(name) for field, name in sample.names.items()}
    return sample._replace(key=_safe(sample.key), names={field: name for field, name in names.items() if name})


def _safe(name: str) -> str:
    """A name as it is, where it can be that of a file below a folder."""
    leads_out = name[:1] == "/" or (".." in name and ".." in PurePosixPath(name).parts)
    return safe_name(name) if leads_out else name


def split_of_name(name: str) -> str:
    """The split that a shard's file name says: train-000000.tar, imagenet_val-00001-of-00008.tfrecord; else "train"."""
    words = "".join(letter if letter.isascii() and letter.isalpha() else " " for letter in name.lower()).split()
    return next((word for word in words if word in SPLIT_NAMES), "train")


def field_kinds(names: Iterable[str], main: str = "image") -> dict[str, str]:
    """Fields of these names and their kinds: the main one first, which is called as its kind, then as they come."""
    return {main: main} | {name: "json" if name == "json" else "file" for name in names if name != main}


class ClassNames:
    """The names of classes by label, as samples say them."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.conflict = ""

    def add(self, sample: Located) -> None:
        if sample.label != NO_LABEL and sample.class_name:
            name = self.names.setdefault(sample.label, sample.class_name)
            if name != sample.class_name:
                self.conflict = f"label {sample.label} is {name!r} in one sample and {sample.class_name!r} in another"

    def in_order(self) -> tuple[tuple[str, ...], str]:
        """See `classes_in_order`."""
        return ((), self.conflict) if self.conflict else classes_in_order(self.names)


def classes_in_order(names: Mapping[int, str]) -> tuple[tuple[str, ...], str]:
    """The names of all labels from 0 on, () where there are none; and why they are left out, "" where they are not."""
    found = tuple(names[label] for label in sorted(names))
    missing = next((label for label in range(len(found)) if label not in names), None)
    if missing is not None:
        return (), f"the shards have none for label {missing}"
    if len(set(found)) < len(found):
        return (), f"two labels are called {next(name for name in found if found.count(name) > 1)!r}"
    return found, ""


class ShardFile:
    """A shard, which may be compressed as a whole, and its format."""

    def __init__(self, path: Path) -> None:
        entry = format_of_head(unpacked_head(path, HEAD_BYTES), path.name)
        if entry is None:
            raise SourceError(f"{path}: not a shard of a known format")
        self.path, self.kind = path, entry.title.partition(" ")[2]
        self.container: Format = entry.load()
        self.compression = compression_of(path)

    def samples(self, options: LocateOptions) -> Iterator[Located]:
        """What the format locates. Raises SourceError and FormatError."""
        if not self.compression:
            if self.container.describe(self.path) is not None:
                raise SourceError(
                    f"{self.path}: a shard of a packed set; convert the whole set, or make one of this shard "
                    f"without copying:  packer index {quoted(self.path)}"
                )
            yield from located_samples(self.container, self.path, options)
            return
        if not isinstance(self.container, WalkedFormat):
            raise SourceError(
                f"{self.path}: a compressed {self.container.name} file cannot be read as a stream; unpack it first"
            )
        with StreamWindow(UnpackedStream(self.path, self.compression)) as window:
            yield from map(_packable, self.container.walk(window, options))


def _list_shards(files: Sequence[tuple[str, ShardFile]], where: Path, options: LocateOptions) -> SourceListing:
    """The listing of shards, each with the split of the samples that name none. Raises SourceError."""
    found = _Samples(where)
    for split, file in files:
        found.begin(file.path, split)
        try:
            for sample in file.samples(options):
                found.add(sample)
        except FormatError as error:
            raise SourceError(str(error)) from error
    listing = found.listing()
    listing.shuffles = not any(file.compression for _, file in files)
    return listing


class ShardSource(FileSource):
    """The samples of the shard at `root`, or of the shards in that folder, which are of one format.

    image_key, label_key: what they call them, None for the usual names.
    label_offset: is subtracted from the labels.
    fields: further field -> key in a shard.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        image_key: str | None = None,
        label_key: str | None = None,
        label_offset: int = 0,
        fields: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(root)
        self.options = LocateOptions(
            image_key, label_key, dict(fields or {}), label_offset, check_payload=True, lenient=True
        )
        self._shards: list[ShardFile] = []
        self._keepers: list[StreamKeeper] = []
        self._fields = 1
        self.kind = "folder of shards"
        if not self.root.is_dir():
            self._shards = [ShardFile(self.root)]
            self.kind = self._shards[0].kind

    def list_files(self, split: str | None) -> SourceListing:
        if not self.root.is_dir():
            files = [(split or split_of_name(self.root.name), self._shards[0])]
        else:
            files = self._files(split or "train")
        self._shards = [file for _, file in files]
        self._keepers = [StreamKeeper(self.note(file.path)) for file in self._shards]
        listing = _list_shards(files, self.root, self.options)
        self._fields = len(listing.fields)
        count, some = missing_shards(file.path.name for file in self._shards) if self.root.is_dir() else (0, [])
        if count:
            missing = plural(count, "shard")
            listing.warnings.append(f"{self.root}: by their names {missing} are missing, such as {', '.join(some)}")
        return listing

    def _files(self, one: str) -> list[tuple[str, ShardFile]]:
        """The shards of a folder, each with the split of the samples that name none."""
        files = [(folder, ShardFile(path)) for folder, path in shard_files(self.root)]
        kinds = {file.kind: file.path for _, file in files}
        if len(kinds) != 1:
            names = ", ".join(f"{path.name} ({kind})" for kind, path in kinds.items())
            what = f"shards of several formats: {names}; keep each in a separate folder" if kinds else "no shards in it"
            raise SourceError(f"{self.root}: {what}")
        names_of = [file.path.name.lower() for _, file in files]
        says_splits = any(folder for folder, _ in files) or any(
            split_of_name(name) != "train" or "train" in name for name in names_of
        )
        return [(folder or split_of_name(file.path.name) if says_splits else one, file) for folder, file in files]

    @contextmanager
    def open_files(self) -> Iterator[ShardReader]:
        with ExitStack() as opened:
            pairs = zip(self._shards, self._keepers, strict=True)
            yield ShardReader([_OpenedShard(file, keeper, opened) for file, keeper in pairs], self._fields)


class _Samples:
    """Collects the samples of files, in some 100 bytes for each."""

    def __init__(self, path: Path) -> None:
        self._path, self._split = path, ""
        self._files: list[Path] = []
        self._parts: dict[str, _Part] = {}
        self._classes = ClassNames()
        self._unnumbered: dict[str, int] = {}  # classes of samples that have only their names
        self._main, self._fields = "image", {"image": 0}
        self._left_out: list[tuple[str, str]] = []
        self._left_behind: dict[str, None] = {}
        self._has_image = False

    def begin(self, path: Path, split: str) -> None:
        """The next file, and the split of its samples that name none."""
        self._files.append(path)
        self._split = split

    def add(self, sample: Located) -> None:
        if sample.left_out:
            self._left_out.append((sample.key, sample.left_out))
            return
        if sample.label < NO_LABEL:
            raise FormatError(
                f"{self._files[-1]}: {sample.key}: the label {sample.label} is out of range: classes count from 0"
            )
        if not self._parts:
            self._main, self._fields = sample.main, {sample.main: 0}
        elif sample.main != self._main:
            raise FormatError(
                f"{self._files[-1]}: holds {sample.main}s, and files before it {self._main}s; convert it apart"
            )
        self._classes.add(sample)
        label = sample.label
        if label == NO_LABEL and sample.class_name:
            label = _FIRST_NAME - self._unnumbered.setdefault(sample.class_name, len(self._unnumbered))
        for name in sample.ranges:
            self._fields.setdefault(name, len(self._fields))
        self._left_behind |= dict.fromkeys(sample.left_behind)
        self._has_image |= bool(sample.fault or sample.place or "image" in sample.ranges)
        part = self._parts.setdefault(sample.split or self._split, _Part(sample.split))
        part.widen(len(self._fields))
        what = sample.fault or sample.place or (None if "image" in sample.ranges else "the sample has no image")
        ranges = tuple((*at, self._fields[name]) for name, at in sample.ranges.items())
        size = sum(length for _, length in sample.ranges.values()) or sample.bytes
        names = [sample.names.get(name, "") for name in self._fields]
        place = (len(self._files) - 1, what, *sorted(ranges))
        part.add(names, place, size, key=sample.key, label=label)

    def listing(self) -> SourceListing:
        if not self._parts:
            raise SourceError(f"{self._path}: no samples")
        if not self._has_image:
            raise SourceError(
                f"{self._path}: no sample has an image; it has {', '.join([*self._fields][1:]) or 'no fields'}; name "
                f"the image with  image_key='KEY'"
            )
        classes, wrong = self._classes.in_order()
        listing = SourceListing({}, field_kinds(self._fields, self._main), classes, self._left_out)
        for name, part in self._parts.items():
            part.widen(len(self._fields))
            listing.splits[name] = self._checked(part.build(part.root), listing)
        if self._unnumbered:
            self._number_names(listing)
        if self._left_behind:
            listing.warnings.append(f"{self._path}: features left behind: {', '.join(sorted(self._left_behind))}")
        labels = np.concatenate([part.labels for part in listing.splits.values()])
        labels = labels[labels != NO_LABEL]
        if wrong and labels.min() == 0:
            listing.warnings.append(f"{self._path}: class names are left out: {wrong}")
        if len(labels) and labels.min() == 1:
            listing.warnings.append(
                f"{self._path}: labels run from 1 to {labels.max()} and none is 0, as in ImageNet's records; "
                f"to count from 0:  --source-label-offset 1  (in Python: packer.open_source(path, label_offset=1))"
            )
        return listing

    def _number_names(self, listing: SourceListing) -> None:
        """Give the samples that have only names of classes their labels."""
        names = sorted(self._unnumbered)
        if any((part.labels > NO_LABEL).any() for part in listing.splits.values()):
            known = {name: number for number, name in enumerate(listing.classes)}
            unknown = [name for name in names if name not in known]
            if unknown:
                raise SourceError(
                    f"{self._path}: some samples have a number for a label, and others only the name "
                    f"{unknown[0]!r:.80}, for which no sample has a number"
                )
        elif all(re.fullmatch("[0-9]{1,9}", name) for name in names):
            known = {name: int(name) for name in names}
        else:
            known = {name: number for number, name in enumerate(names)}
            listing.classes = tuple(names)
        if odd := next((name for name in names if "\0" in name), None):
            raise SourceError(f"{self._path}: the label {odd!r:.80} is not text that could be a class name")
        new = np.array([known[name] for name in self._unnumbered], np.int64)
        for part in listing.splits.values():
            part.labels = np.where(
                part.labels <= _FIRST_NAME, new[np.maximum(_FIRST_NAME - part.labels, 0)], part.labels
            )

    def _checked(self, part: SplitListing, listing: SourceListing) -> SplitListing:
        n = len(part)
        if len(repeated(lambda: part.keys, n)):
            nothing = Strings.of([""] * n)
            keys = self._keys_by_file(part) if len(self._files) > 1 else part.keys
            if len(repeated(lambda: keys, n)):
                listing.warnings.append(f"{self._path}: keys or file names occur twice; samples are called by number")
                keys = self._keys_by_number(part)
            part.keys, part.names = keys, FieldNames(*[nothing] * len(self._fields))
        check_names(part.keys, str(self._path))
        check_names((name for names in part.names for name in names if name), str(self._path))
        return part

    def _keys_by_file(self, part: SplitListing) -> Strings:
        stems = [shard_stem(path) for path in self._files]
        return Strings.of(f"{stems[place[0]]}/{key}" for place, key in zip(part.places, part.keys, strict=True))

    def _keys_by_number(self, part: SplitListing) -> Strings:
        counts = Counter[int]()
        keys = []
        for place in part.places:
            keys.append(key_by_number(self._files[place[0]], counts[place[0]]))
            counts[place[0]] += 1
        return Strings.of(keys)


class _Part(ListingBuilder):
    """A split whose fields show while it is filled."""

    def __init__(self, root: str) -> None:
        super().__init__()
        self.root = root

    def widen(self, fields: int) -> None:
        """Have columns for the names of as many fields."""
        while len(self._names) < fields:
            names = NamesBuilder()
            for _ in range(len(self)):
                names.append("")
            self._names.append(names)


class _OpenedShard:
    """A shard that is opened when it is read from first."""

    def __init__(self, shard: ShardFile, keeper: StreamKeeper, opened: ExitStack) -> None:
        """opened: closes what is opened here."""
        self._shard, self._keeper, self._opened = shard, keeper, opened

    @cached_property
    def file(self) -> PlainFile | UnpackedStream:
        return self._opened.enter_context(self._keeper.open())

    @cached_property
    def places(self) -> PlaceReader:
        """Reads images that are not one byte range."""
        return self._opened.enter_context(self._shard.container.open_places(self._shard.path))


class ShardReader:
    """Reads samples of files, and of a compressed one in the order of the file."""

    def __init__(self, shards: Sequence[_OpenedShard], fields: int) -> None:
        self._shards, self._fields = shards, fields

    def read(self, place: Place, arena: Arena) -> Sequence[Buffer | None]:
        file, what, *ranges = place
        if isinstance(what, str):
            raise BadSampleError(what)
        payloads: list[Buffer | None] = [None] * self._fields
        for offset, length, number in ranges:  # in the order of the file: a stream only goes forward
            self._shards[file].file.read_into(offset, arena.rest()[:length])
            payloads[number] = arena.take(length)
        if what is not None:
            payloads[0] = self._shards[file].places.read(what)
        return payloads


def missing_shards(names: Iterable[str]) -> tuple[int, list[str]]:
    """How many further shards the names of these imply, and some of their names.

    train-00003-of-00008.tfrecord     says that there are eight
    train-000003.tar                  belongs, by custom, to a run without gaps from the lowest number to the highest

    The number of a tar counts where it is padded with zeros to three digits or more, or where numbers start at 0, so
    that years and dates do not.
    """
    runs: dict[tuple[str, str], dict[int, str]] = {}  # (before the number, behind it) -> number -> its digits
    for name in names:
        match = _OF.fullmatch(name) or _TAR.fullmatch(name)
        if match is not None and len(match["number"]) <= _MOST_DIGITS:
            runs.setdefault((match["head"], match["tail"]), {})[int(match["number"])] = match["number"]
    count, some = 0, list[str]()
    for (head, tail), run in runs.items():
        expected = _expected_numbers(run, tail)
        missing = len(expected) - sum(number in expected for number in run)
        if missing > 0:
            count += missing
            width = max(map(len, run.values())) if len({*map(len, run.values())}) == 1 else 0
            gone = (f"{head}{number:0{width}d}{tail}" for number in expected if number not in run)
            some += itertools.islice(gone, _NAMES_IN_MESSAGE - len(some))
    return count, some


def _expected_numbers(run: Mapping[int, str], tail: str) -> range:
    """All numbers of the run that shards with these numbers belong to."""
    total = re.match(r"-of-(\d+)", tail)
    if total is not None:
        count = int(total[1]) if len(total[1]) <= _MOST_DIGITS else 0
        return range(1, count + 1) if count in run and 0 not in run else range(count)
    lowest = min(run)
    padded = run[lowest].startswith("0") and len(run[lowest]) >= 3
    return range(lowest, max(run) + 1) if padded or run.get(0) == "0" else range(0)
