"""Shards made by other tools, of any format, with the samples that the format locates in them.

`packer convert` and `packer index` therefore agree on a shard's keys, labels, classes, splits and fields. A file that
is compressed as a whole is read as a stream, if its format allows that; images that are not a single byte range are
read by the format itself. A damaged sample is a bad sample.

If a shard names the class of every label, these become the class names. If its labels are names only, they are numbered
in sorted order, or if all names are numbers, they are these numbers. The split is stated in the shard, or follows from
its file name (train-00000-of-00008.tfrecord). A single shard of a packed set is refused: it can be indexed in place.

A source may also be a folder of shards of one format, all in that folder, or in one folder per split. Samples are
ordered by file name. If no file name states a split, all samples belong to one, train. If a key occurs in several
shards, keys are prefixed with the name of their shard. Gaps in the numbering of the files cause a warning.

Place: number of the file; then why the sample cannot be read, or where the format finds its image, or None; then
(offset, length, field) for every field, in file order.
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
_FIRST_NAME = -2  # preliminary label of samples with only a class name: -2 for the first name, -3 for the second, …


def located_samples(container: Format, path: Path, options: LocateOptions) -> Iterator[Located]:
    """The samples that a format locates in a file, with keys and names made safe for packing."""
    return map(_packable, container.locate(path, options))


def _packable(sample: Located) -> Located:
    names = {field: _safe(name) for field, name in sample.names.items()}
    return sample._replace(key=_safe(sample.key), names={field: name for field, name in names.items() if name})


def _safe(name: str) -> str:
    """A name, without a leading "/" and without ".." if it would lead out of a folder."""
    leads_out = name[:1] == "/" or (".." in name and ".." in PurePosixPath(name).parts)
    return safe_name(name) if leads_out else name


def split_of_name(name: str) -> str:
    """The split in a shard's file name: train-000000.tar, imagenet_val-00001-of-00008.tfrecord; else "train"."""
    words = "".join(letter if letter.isascii() and letter.isalpha() else " " for letter in name.lower()).split()
    return next((word for word in words if word in SPLIT_NAMES), "train")


def field_kinds(names: Iterable[str], main: str = "image") -> dict[str, str]:
    """The kinds of fields with these names. The main field, which is image, array or audio, comes first."""
    return {main: "file" if main == "audio" else main} | {
        name: "json" if name == "json" else "file" for name in names if name != main
    }


class ClassNames:
    """Collects the class name of each label from samples."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.conflict = ""

    def add(self, sample: Located) -> None:
        if sample.label != NO_LABEL and sample.class_name:
            name = self.names.setdefault(sample.label, sample.class_name)
            if name != sample.class_name:
                self.conflict = f"label {sample.label} is {name!r} in one sample and {sample.class_name!r} in another"

    def in_order(self) -> tuple[tuple[str, ...], str]:
        """The class names, as `classes_in_order` returns them."""
        return ((), self.conflict) if self.conflict else classes_in_order(self.names)


def classes_in_order(names: Mapping[int, str]) -> tuple[tuple[str, ...], str]:
    """(class names of all labels from 0 on, reason). If there is a reason to leave them out, they are ()."""
    classes = tuple(names[label] for label in sorted(names))
    missing = next((label for label in range(len(classes)) if label not in names), None)
    if missing is not None:
        return (), f"the shards have none for label {missing}"
    if len(set(classes)) < len(classes):
        return (), f"two labels are called {next(name for name in classes if classes.count(name) > 1)!r}"
    return classes, ""


class ShardFile:
    """A shard with its format; it may be compressed as a whole."""

    def __init__(self, path: Path) -> None:
        entry = format_of_head(unpacked_head(path, HEAD_BYTES), path.name)
        if entry is None:
            raise SourceError(f"{path}: not a shard of a known format")
        self.path, self.kind = path, entry.title.partition(" ")[2]
        self.container: Format = entry.load()
        self.compression = compression_of(path)

    def samples(self, options: LocateOptions) -> Iterator[Located]:
        """The samples that the format locates. Raises SourceError and FormatError."""
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
    """The listing of shards. files: (split of the samples that state none, shard). Raises SourceError."""
    samples = _Samples(where)
    for split, file in files:
        samples.begin(file.path, split)
        try:
            for sample in file.samples(options):
                samples.add(sample)
        except FormatError as error:
            raise SourceError(str(error)) from error
    listing = samples.listing()
    listing.shuffles = not any(file.compression for _, file in files)
    return listing


class ShardSource(FileSource):
    """The samples of the shard at `root`, or of a folder of shards of one format.

    image_key, label_key: the keys of image and label in the shards, None for the usual ones.
    label_offset: subtracted from the labels.
    fields: further fields -> their keys in the shards.
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

    def _files(self, split_name: str) -> list[tuple[str, ShardFile]]:
        """(split of the samples that state none, shard) of a folder. split_name: the split if no name states one."""
        files = [(folder, ShardFile(path)) for folder, path in shard_files(self.root)]
        kinds = {file.kind: file.path for _, file in files}
        if len(kinds) != 1:
            names = ", ".join(f"{path.name} ({kind})" for kind, path in kinds.items())
            problem = (
                f"shards of several formats: {names}; keep each in a separate folder" if kinds else "no shards in it"
            )
            raise SourceError(f"{self.root}: {problem}")
        names_of = [file.path.name.lower() for _, file in files]
        says_splits = any(folder for folder, _ in files) or any(
            split_of_name(name) != "train" or "train" in name for name in names_of
        )
        return [
            (folder or split_of_name(file.path.name) if says_splits else split_name, file) for folder, file in files
        ]

    @contextmanager
    def open_files(self) -> Iterator[ShardReader]:
        with ExitStack() as opened:
            pairs = zip(self._shards, self._keepers, strict=True)
            yield ShardReader([_OpenedShard(file, keeper, opened) for file, keeper in pairs], self._fields)


class _Samples:
    """Collects the samples of shards, in some 100 bytes each."""

    def __init__(self, path: Path) -> None:
        self._path, self._split = path, ""
        self._files: list[Path] = []
        self._parts: dict[str, _Part] = {}
        self._classes = ClassNames()
        self._unnumbered: dict[str, int] = {}  # class names of samples without a label number
        self._main, self._fields = "image", {"image": 0}
        self._left_out: list[tuple[str, str]] = []
        self._left_behind: dict[str, None] = {}
        self._has_image = False

    def begin(self, path: Path, split: str) -> None:
        """Begin a file. split: of its samples that state none."""
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
        elif sample.main != self._main and (sample.place or self._main != "image"):
            raise FormatError(
                f"{self._files[-1]}: holds {sample.main}s, and files before it {self._main}s; convert it separately"
            )
        self._classes.add(sample)
        label = sample.label
        if label == NO_LABEL and sample.class_name:
            label = _FIRST_NAME - self._unnumbered.setdefault(sample.class_name, len(self._unnumbered))
        for name in sample.ranges:
            self._fields.setdefault(name, len(self._fields))
        self._left_behind |= dict.fromkeys(sample.left_behind)
        has_main = self._main in sample.ranges
        self._has_image |= bool(sample.fault or sample.place or has_main)
        part = self._parts.setdefault(sample.split or self._split, _Part(sample.split))
        part.widen(len(self._fields))
        main = sample.fault or sample.place or (None if has_main else f"the sample has no {self._main}")
        ranges = tuple((*at, self._fields[name]) for name, at in sample.ranges.items())
        size = sum(length for _, length in sample.ranges.values()) or sample.bytes
        names = [sample.names.get(name, "") for name in self._fields]
        place = (len(self._files) - 1, main, *sorted(ranges))
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
            listing.warnings.append(f"{self._path}: features left out: {', '.join(sorted(self._left_behind))}")
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
        """Replace the preliminary labels of samples that have only class names."""
        names = sorted(self._unnumbered)
        if any((part.labels > NO_LABEL).any() for part in listing.splits.values()):
            known = {name: number for number, name in enumerate(listing.classes)}
            unknown = [name for name in names if name not in known]
            if unknown:
                raise SourceError(
                    f"{self._path}: some labels are numbers, others only the name "
                    f"{unknown[0]!r:.80}, whose number no sample has"
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
                listing.warnings.append(f"{self._path}: keys or file names occur twice, so samples are named by number")
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
    """The builder of a split that gains fields while it is filled."""

    def __init__(self, root: str) -> None:
        super().__init__()
        self.root = root

    def widen(self, fields: int) -> None:
        """Add columns of names up to this number of fields."""
        while len(self._names) < fields:
            names = NamesBuilder()
            for _ in range(len(self)):
                names.append("")
            self._names.append(names)


class _OpenedShard:
    """A shard that is opened at the first read."""

    def __init__(self, shard: ShardFile, keeper: StreamKeeper, opened: ExitStack) -> None:
        """opened: closes the files."""
        self._shard, self._keeper, self._opened = shard, keeper, opened

    @cached_property
    def file(self) -> PlainFile | UnpackedStream:
        return self._opened.enter_context(self._keeper.open())

    @cached_property
    def places(self) -> PlaceReader:
        """The format's reader of images that are not a single byte range."""
        return self._opened.enter_context(self._shard.container.open_places(self._shard.path))


class ShardReader:
    """Reads samples of shards; those of a compressed shard in file order."""

    def __init__(self, shards: Sequence[_OpenedShard], fields: int) -> None:
        self._shards, self._fields = shards, fields

    def read(self, place: Place, arena: Arena) -> Sequence[Buffer | None]:
        file, main, *ranges = place
        if isinstance(main, str):
            raise BadSampleError(main)
        payloads: list[Buffer | None] = [None] * self._fields
        for offset, length, number in ranges:  # in file order: a stream is read forward only
            self._shards[file].file.read_into(offset, arena.rest()[:length])
            payloads[number] = arena.take(length)
        if main is not None:
            payloads[0] = self._shards[file].places.read(main)
        return payloads


def missing_shards(names: Iterable[str]) -> tuple[int, list[str]]:
    """The number of shards missing according to the names of those present, and some of the missing names.

    train-00003-of-00008.tfrecord     is one of eight
    train-000003.tar                  is usually part of a series without gaps from its lowest number to its highest

    Numbers of tars are considered only if they are padded with zeros to at least three digits, or start at 0. Years and
    dates in names are not.
    """
    runs: dict[tuple[str, str], dict[int, str]] = {}  # (text before the number, text after it) -> number -> its digits
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
    """All numbers of a series of shards, of which `run` has those present."""
    total = re.match(r"-of-(\d+)", tail)
    if total is not None:
        count = int(total[1]) if len(total[1]) <= _MOST_DIGITS else 0
        return range(1, count + 1) if count in run and 0 not in run else range(count)
    lowest = min(run)
    padded = run[lowest].startswith("0") and len(run[lowest]) >= 3
    return range(lowest, max(run) + 1) if padded or run.get(0) == "0" else range(0)
