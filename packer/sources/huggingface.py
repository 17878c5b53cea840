"""A data set of Hugging Face in Parquet: images in it as `struct{bytes, path}`, or as bytes.

A repository's folder, or one file. The columns have the roles of `packer.sources.targets`: ClassLabels have their
names, an image keeps its bytes, its path is the sample's name where all paths of a split differ, and what is neither
image nor label is in the field json.

Listing reads the labels and the paths alone. Rows are read a batch at a time and in the order of the files, since a row
group is unpacked from its start; each image is then a view of the batch. Before a row group is read, the headers of its
pages say how much memory that takes (`packer.sources.parquet`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cache.errors import BadNameError, BadSampleError, SourceError
from cache.files import read_regular
from cache.messages import listed, quoted
from packer.formats.base import Arena
from packer.sources.base import (
    FieldNames,
    NumberPlaces,
    SourceListing,
    SplitListing,
    check_names,
    plain_yaml,
    safe_name,
)
from packer.sources.file_sets import FilesSource, numbered_keys, numbered_names, split_named, splits_by_value
from packer.sources.layouts import parquet_files
from packer.sources.parquet import (
    BinaryColumn,
    batches_of,
    has_child,
    open_parquet,
    parquet_file,
    row_bytes,
    translated,
)
from packer.sources.shards import split_of_name
from packer.sources.tables import Table, column_values, json_payload, number_labels
from packer.sources.targets import CAPTION_COLUMNS, Roles, Targets, choose_roles, targets_of
from readers.fields import check_field, encode_field
from readers.headers import sniff
from readers.layout import SplitName
from readers.opening.tree import unique_keys
from readers.table import NO_LABEL, Buffer, Names, Strings

__all__ = ["HuggingFaceSource"]


# ------------------------------------------------------------------------------
# The files of a data set on the Hugging Face Hub: which splits they are, and what their columns mean.
#
#     data/train-00000-of-00008.parquet     split and number, as `push_to_hub` names them; also without data/
#     small/train-00000-of-00001.parquet    of one data set among several in a repository
#     default/train/0000.parquet            as in the branch of converted data sets
#     train.parquet                         a file for each split
#
# Features are in the metadata of each file, under the key "huggingface", as JSON; where a file has none, in the
# header of README.md, in YAML.


_SHARD = re.compile(r"(.+?)-(\d{5})-of-(\d{5})(?:-[0-9a-f]+)?")
_KEYWORDS = ("train", "validation", "valid", "val", "dev", "test")
_MAX_README_BYTES = 16 << 20
_MAX_YAML_BYTES = 4 << 20
_MAX_CLASSES = 1 << 24
_LFS = b"version https://git-lfs"


class HubFile(NamedTuple):
    """A file, its split, and where it is among `of` files of that: 0 where its name does not say."""

    path: Path
    split: str
    number: int = 0
    of: int = 0


def splits_of(root: Path) -> dict[str, list[Path]]:
    """The Parquet files of each split, in order, of a file or a folder.

    Raises SourceError where the folder holds several data sets, or where files of a split are missing.
    """
    if root.is_file():
        return {_of_name(root.stem) or split_of_name(root.name): [root]}
    found: dict[str, list[HubFile]] = {}
    for path in parquet_files(root):
        config, file = _place(root, path)
        found.setdefault(config, []).append(file)
    if not found:
        raise SourceError(f"{root}: no Parquet files")
    if len(found) > 1:
        folders = sorted(str(_folder_of(root, config)) for config in found)
        raise SourceError(
            f"{root}: holds {len(found)} data sets: {listed(sorted(found), 20)}; name the folder of the one that is "
            f"meant, for example  packer convert {quoted(folders[0])}"
        )
    splits: dict[str, list[HubFile]] = {}
    for file in next(iter(found.values())):
        splits.setdefault(file.split, []).append(file)
    return {name: _whole(root, name, files) for name, files in _ordered(splits).items()}


def _ordered(splits: Mapping[str, list[HubFile]]) -> dict[str, list[HubFile]]:
    """train, validation and test first, in this order."""
    rank = {name: number for number, name in enumerate(_KEYWORDS)}
    return {name: splits[name] for name in sorted(splits, key=lambda name: (rank.get(name, len(rank)), name))}


def _place(root: Path, path: Path) -> tuple[str, HubFile]:
    """(the data set that a file belongs to, "" for the only one; the file)."""
    folders = list(path.relative_to(root).parts[:-1])
    if folders[:1] == ["data"]:
        del folders[0]
    match = _SHARD.fullmatch(path.stem)
    if match:
        file = HubFile(path, match[1], int(match[2]), int(match[3]))
    elif path.stem.isdecimal() and folders:
        file = HubFile(path, folders.pop())
    else:
        named = _of_name(path.stem)
        last = _of_name(folders[-1]) if folders and not named else ""
        file = HubFile(path, named or last or "train")
        if last:
            folders.pop()
    try:
        return "/".join(folders), file._replace(split=SplitName(file.split))
    except BadNameError as error:
        raise SourceError(f"{path}: {error}") from error


def _of_name(stem: str) -> str:
    """The split that a name begins with or is: "" for none."""
    words = [word for word in re.split(r"[-_. \d]+", stem.lower()) if word]
    return next((word for word in words if word in _KEYWORDS), "")


def _folder_of(root: Path, config: str) -> Path:
    return root / "data" / config if (root / "data" / config).is_dir() and config else root / config


def _whole(root: Path, split: str, files: Sequence[HubFile]) -> list[Path]:
    """The paths of a split's files. Raises SourceError where some are missing."""
    counts = {file.of for file in files}
    if counts != {0}:
        count = max(counts)
        missing = sorted(set(range(count)) - {file.number for file in files})
        if len(counts) > 1 or len(files) != count or missing:
            such = f", the first of them {split}-{missing[0]:05d}-of-{count:05d}" if missing else ""
            raise SourceError(
                f"{root}: has {len(files)} files of {split}, but their names speak of "
                f"{listed(sorted(map(str, counts)))}{such}; download the rest, or remove those of another version"
            )
    for file in files:
        with open(file.path, "rb") as opened:
            if opened.read(len(_LFS)) == _LFS:
                raise SourceError(f"{file.path}: a pointer of Git LFS and not the file; run  git lfs pull")
    return [file.path for file in files]


# --- features -----------------------------------------------------------------------------------------------------
def features_in(metadata: Mapping[bytes, bytes] | None, path: Path) -> dict[str, Any] | None:
    """Column -> feature, as `datasets` writes it into a Parquet file: {"_type": "ClassLabel", "names": […]}."""
    text = (metadata or {}).get(b"huggingface")
    if text is None:
        return None
    try:
        features = json.loads(text)["info"]["features"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SourceError(f"{path}: its features cannot be read: {error!r:.80}") from error
    return dict(features) if isinstance(features, dict) else None


def readme_features(root: Path) -> dict[str, Any] | None:
    """The features in the README.md of a repository, or above a folder of it, in the same form; None for none."""
    folders = [root if root.is_dir() else root.parent]
    folders += [*folders[0].parents][:2]
    path = next((folder / "README.md" for folder in folders if (folder / "README.md").is_file()), None)
    if path is None:
        return None
    try:
        text = read_regular(path, _MAX_README_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path}: cannot be read: {error}") from error
    match = re.match(r"---\r?\n(.*?)\r?\n---", text, re.DOTALL)
    if match is None or "dataset_info" not in match[1] or len(match[1]) > _MAX_YAML_BYTES:
        return None
    header = plain_yaml(match[1], f"{path}: its header", "parquet", f"reading the names of classes in {path}")
    infos = header.get("dataset_info") if isinstance(header, dict) else None
    infos = infos if isinstance(infos, list) else [infos]
    names = {root.name, "default"} if len(infos) > 1 else set()
    for info in infos:
        if isinstance(info, dict) and (not names or info.get("config_name") in names):
            return {
                str(item["name"]): _feature(item.get("dtype"))
                for item in info.get("features") or ()
                if isinstance(item, dict) and "name" in item
            }
    return None


def _feature(dtype: Any) -> dict[str, Any]:
    """A feature of README.md in the form of those in files."""
    if dtype == "image":
        return {"_type": "Image"}
    if isinstance(dtype, dict) and isinstance(dtype.get("class_label"), dict):
        names = dtype["class_label"].get("names")
        if isinstance(names, dict):
            names = [names[key] for key in sorted(names, key=lambda key: int(key) if str(key).isdecimal() else -1)]
        return {"_type": "ClassLabel", "names": names}
    return {"_type": "Value", "dtype": dtype if isinstance(dtype, str) else ""}


def class_names(feature: Mapping[str, Any], where: object) -> tuple[str, ...]:
    """The names of the classes of a ClassLabel, () where it has only a number of them. Raises SourceError."""
    names = feature.get("names") or ()
    good = isinstance(names, list | tuple) and len(names) <= _MAX_CLASSES
    names = tuple(map(str, names)) if good else ()
    if not good or len(set(names)) < len(names) or any(not name or "\0" in name for name in names):
        raise SourceError(f"{where}: the names of its classes are {feature.get('names')!r:.80}, expected each once")
    return names


# ------------------------------------------------------------------------------
# Columns of labels in data sets of Hugging Face that hold no class numbers, but numbers with fractions or lists.


def hub_targets(root: Path, column: str, kind: Any, feature: Any, values: Callable[[], Iterator[Any]]) -> Targets:
    """What a column holds. A list of ClassLabels, or of texts, is 1 at the place of each class.

    kind: its type in pyarrow. feature: of `datasets`, if it is known. values: gives those of all rows, which only texts
    need. Raises SourceError.
    """
    import pyarrow as pa

    inner = feature[0] if isinstance(feature, list) and feature else None
    if isinstance(feature, Mapping):
        inner = feature.get("feature")
    if isinstance(inner, Mapping) and inner.get("_type") == "ClassLabel":
        names = class_names(inner, f"{root}: {column!r}")
        return Targets(len(names), classes=names)
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if is_list and (pa.types.is_string(kind.value_type) or pa.types.is_large_string(kind.value_type)):
        found = targets_of(lambda: enumerate(values(), 1), Table(root / column, ()))
        return found or Targets(0)
    return Targets(0, "") if is_list else Targets(-1)


# ------------------------------------------------------------------------------
# What the columns of a Parquet file of Hugging Face hold: by their types, features of `datasets`, first values.


def contents_of(schema: Any, features: Mapping[str, Any], path: Path) -> tuple[dict[str, str], list[str]]:
    """What the columns hold (`packer.sources.targets`), and warnings about those that are left behind."""
    import pyarrow as pa

    contents: dict[str, str] = {}
    left = []
    for column in schema:
        kind, feature = column.type, features.get(column.name)
        what = feature.get("_type") if isinstance(feature, dict) else None
        if what in ("Audio", "Video", "Pdf", "Nifti") or _is_list_of_images(kind):
            left.append(column.name)
        elif has_child(kind, "bytes") or what == "Image":
            if pa.types.is_string(kind) or pa.types.is_large_string(kind):
                raise SourceError(f"{path}: the column {column.name!r} holds paths of images, not images; embed them")
            contents[column.name] = "image"
        elif what == "ClassLabel" and (pa.types.is_integer(kind)):
            contents[column.name] = "class"
        elif pa.types.is_integer(kind) or pa.types.is_boolean(kind):
            contents[column.name] = "integer"
        elif pa.types.is_floating(kind):
            contents[column.name] = "number"
        elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
            contents[column.name] = "text"
        elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            contents[column.name] = "bytes"
        elif column.name in CAPTION_COLUMNS and pa.types.is_list(kind) and pa.types.is_string(kind.value_type):
            contents[column.name] = "texts"
        else:
            contents[column.name] = "value"
    names = listed(list(map(repr, left)), 20)
    return contents, [f"{path}: left behind: {names}, which hold several images, or sound or video"] if left else []


def _is_list_of_images(kind: Any) -> bool:
    import pyarrow as pa

    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(is_list) and has_child(kind.value_type, "bytes")


def looked_at(file: Any, schema: Any, contents: Mapping[str, str], features: Mapping[str, Any]) -> dict[str, str]:
    """What the first rows say: bytes that are images, images that are masks."""
    names = [name for name, what in contents.items() if what == "bytes" or (what == "image" and "mask" in name.lower())]
    found: dict[str, str] = {}
    if not names or not file.groups:
        return found
    batch = next(iter(batches_of(file, 0, names)), None)
    if batch is None or not batch.num_rows:
        return found
    for name in names:
        value = BinaryColumn(batch.column(name)).value(0)
        if contents[name] == "bytes" and value is not None and sniff(value):
            found[name] = "image"
        if contents[name] == "image" and value is not None and _is_mask(value):
            found[name] = "mask"
    return found


def _is_mask(data: Buffer) -> bool:
    try:
        check_field("mask", data)
    except BadSampleError:
        return False
    return True


_MAX_LABEL = 1 << 53
_ROWS = "rows"  # what keys of numbers begin with where a column names the splits


@dataclass(frozen=True, slots=True)
class _File:
    """groups: of which rows the row groups are, and how many bytes a row has in them on average."""

    path: Path
    split: str
    group_rows: tuple[int, ...]
    row_bytes: tuple[int, ...]


class HuggingFaceSource(FilesSource):
    """The files at `root`, a folder or a Parquet file.

    label_column: None takes the first ClassLabel. split_column: its values are the splits, instead of the files.
    """

    kind = "Hugging Face data set"

    def __init__(
        self, root: str | os.PathLike[str], label_column: str | None = None, split_column: str | None = None
    ) -> None:
        super().__init__(Path(root))
        self.label_column, self.split_column = label_column, split_column
        self.files: list[_File] = []
        self.roles: Roles | None = None
        self.targets: Targets | None = None

    def list_files(self, split: str | None) -> SourceListing:
        found = splits_of(self.root)
        wanted = split
        if self.split_column is not None:
            found, split = {_ROWS: [path for paths in found.values() for path in paths]}, None
        if split is not None:
            only = len(found) == 1 and self.root.is_file()
            split = split if only else split_named(split, found, self.root)
            found = {split: next(iter(found.values()))} if only else found
        first = next(iter(found.values()))[0]
        with parquet_file(self.note(first)) as file:
            schema, features = file.schema_arrow, features_in(file.schema_arrow.metadata, first)
            features = features if features is not None else readme_features(self.root) or {}
            contents, left = contents_of(schema, features, first)
            contents |= looked_at(file, schema, contents, features)
            self._check_split_column(contents)
        self.roles = roles = choose_roles(contents, self.label_column, self.root)
        self.files = []
        listing = SourceListing({}, roles.fields, warnings=left, shuffles=False, estimated=True)
        labels: dict[str, list[Any]] = {}
        values: list[Any] = []
        for name, paths in found.items():
            parts = [self._list_file(path, name, schema) for path in paths]
            labels[name] = [part[0] for part in parts]
            values += [part[2] for part in parts]
            if split in (None, name):
                listing.splits[name] = self._split(name, [part[1] for part in parts])
        self._number_labels(listing, labels, features)
        if roles.target is not None:
            column = roles.columns[roles.target]
            every = [path for paths in found.values() for path in paths]
            feature, kind = features.get(column), schema.field(column).type
            self.targets = hub_targets(self.root, column, kind, feature, lambda: _values(every, column))
            listing.classes = self.targets.classes
        return listing if self.split_column is None else self._dealt(listing, values, features, wanted)

    def _check_split_column(self, contents: dict[str, str]) -> None:
        """Take the column of splits out of `contents`. Raises SourceError where it cannot be one."""
        name = self.split_column
        if name is None or name == self.label_column:
            return
        if contents.pop(name, None) not in ("class", "integer", "text"):
            possible = [name for name, what in contents.items() if what in ("class", "integer", "text")]
            raise SourceError(
                f"{self.root}: no column {name!r} of names (split_column={name!r}); splits could be in "
                f"{', '.join(possible) or 'none'}"
            )

    def _dealt(
        self, listing: SourceListing, parts: Sequence[Any], features: Mapping[str, Any], wanted: str | None
    ) -> SourceListing:
        """The listing with the splits that a column names. parts: its values by file."""
        column = self.split_column or ""
        values = [value for part in parts for value in column_values(self.root, column, part)]
        feature = features.get(column) or {}
        if feature.get("_type") == "ClassLabel":
            names = class_names(feature, f"{self.root}: {column!r}")
            values = [names[value] if isinstance(value, int) and 0 <= value < len(names) else value for value in values]
        listing.splits = splits_by_value(listing.splits[_ROWS], values, f"{self.root}: column {column!r}")
        if wanted is not None:
            wanted = split_named(wanted, listing.splits, self.root)
            listing.splits = {wanted: listing.splits[wanted]}
        return listing

    def _list_file(self, path: Path, split: str, schema: Any) -> tuple[Any, Any, Any]:
        """(labels, paths of images, splits) of a file, as arrays of pyarrow, which is added to `files`."""
        roles = self._roles()
        with parquet_file(self.note(path)) as file:
            its = file.schema_arrow
            for column in {*roles.columns.values(), roles.label, self.split_column, *roles.metadata} - {None}:
                if column not in its.names or its.field(column).type != schema.field(column).type:
                    raise SourceError(
                        f"{path}: its column {column!r} is missing, or not as in {self.root}'s first file"
                    )
            needed = self._columns()
            rows = tuple(group.rows for group in file.groups)
            sizes = tuple(row_bytes(group, needed) for group in file.groups)
            self.files.append(_File(path, split, rows, sizes))
            return self._read_columns(file, sum(rows))

    def _read_columns(self, file: Any, rows: int) -> tuple[Any, Any, Any]:
        """(labels, paths of images, splits) of all rows, None where there are no such columns."""
        import pyarrow as pa

        label, image = self._roles().label, self._roles().columns["image"]
        has_path = has_child(file.schema_arrow.field(image).type, "path")
        split = self.split_column
        columns = [name for name in dict.fromkeys((label, split)) if name is not None] + [f"{image}.path"] * has_path
        batches = [batch for n in range(len(file.groups)) for batch in batches_of(file, n, columns)] if columns else []
        if columns and sum(batch.num_rows for batch in batches) != rows:
            raise SourceError(f"{file.path}: its pages have other rows than the {rows:,} of its footer: damaged")
        paths = [batch.column(image).field("path") for batch in batches] if has_path else None

        def column(name: str | None) -> Any:
            chunks = [] if name is None else [batch.column(name) for batch in batches]
            return None if name is None else pa.chunked_array(chunks, file.schema_arrow.field(name).type)

        whole = None if paths is None else pa.chunked_array(paths, pa.string() if not paths else paths[0].type)
        return column(label), whole, column(split)

    def _split(self, split: str, paths: Sequence[Any]) -> SplitListing:
        """The listing of a split. Places: (number of the file, row group, row in it)."""
        numbers = [number for number, file in enumerate(self.files) if file.split == split]
        places, sizes = [], []
        for number in numbers:
            file = self.files[number]
            for group, (rows, size) in enumerate(zip(file.group_rows, file.row_bytes, strict=True)):
                column = np.arange(rows, dtype=np.int64)
                places.append(np.column_stack((np.full(rows, number), np.full(rows, group), column)))
                sizes.append(np.full(rows, size))
        count = sum(map(len, places))
        if not count:
            raise SourceError(f"{self.root}: no rows in {split}")
        fields = len(self._roles().fields)
        keys: Any = numbered_keys(split, count)
        names = numbered_names(count, fields)
        found = _distinct_names(self.root, paths, count)
        if found is not None:
            check_names(found, str(self.root))
            keys = unique_keys(found)
            names = FieldNames(found, *numbered_names(count, max(1, fields - 1)).columns[: fields - 1])
        return SplitListing(
            "",
            keys,
            np.full(count, NO_LABEL, np.int64),
            names,
            np.concatenate(sizes).astype(np.int64),
            NumberPlaces(np.concatenate(places).astype(np.int64)),
            np.zeros(count, np.int64),
        )

    def _number_labels(
        self, listing: SourceListing, labels: Mapping[str, list[Any]], features: Mapping[str, Any]
    ) -> None:
        """Labels of all samples, over all splits: a name means the same in each."""
        label = self._roles().label
        if label is None:
            return
        feature = features.get(label) or {}
        if feature.get("_type") == "ClassLabel":
            listing.classes = class_names(feature, f"{self.root}: {label!r}")
        every = (part for parts in labels.values() for part in parts)
        values = [value for part in every for value in column_values(self.root, label, part)]
        rows = Table(self.root / label, ())
        numbers, classes, warnings = number_labels(values, range(1, len(values) + 1), rows)
        listing.classes, listing.warnings = listing.classes or classes, listing.warnings + warnings
        found, first = np.array(numbers, np.int64), 0
        most = len(listing.classes) - 1 if listing.classes else _MAX_LABEL
        wrong = np.flatnonzero(found > most)
        if len(wrong):
            raise SourceError(
                f"{self.root}: row {wrong[0] + 1} has the {label!r} {found[wrong[0]]}, the last is {most}"
            )
        for name, parts in labels.items():
            count = sum(map(len, parts))
            if name in listing.splits:
                listing.splits[name].labels = found[first : first + count]
            first += count

    def _columns(self) -> list[str]:
        """The columns of all fields."""
        roles = self._roles()
        return [*roles.columns.values(), *roles.metadata]

    def _roles(self) -> Roles:
        assert self.roles is not None
        return self.roles

    @contextmanager
    def open(self) -> Iterator[HuggingFaceReader]:
        with closing(HuggingFaceReader(self)) as reader:
            yield reader


class HuggingFaceReader:
    """Reads rows, best in their order: a batch of them is in memory, and the rest of its row group comes after it."""

    def __init__(self, source: HuggingFaceSource) -> None:
        assert source.roles is not None
        self._source, self._roles, self._columns = source, source.roles, source._columns()
        self._file: Any = None
        self._group = (-1, -1)
        self._batches: Iterator[Any] = iter(())
        self._batch: _Batch | None = None

    def read(self, place: tuple[int, int, int], arena: Arena) -> Sequence[Buffer | None]:
        number, group, row = place
        if self._group != (number, group) or (self._batch is not None and row < self._batch.first):
            self._start(number, group)
        path = self._source.files[number].path
        while self._batch is None or row >= self._batch.first + self._batch.rows:
            first = self._batch.first + self._batch.rows if self._batch else 0
            with translated(path):
                found = next(self._batches, None)
            if found is None:
                raise SourceError(f"{path}: row group {group} has {first:,} rows, but claims more: damaged")
            self._batch = _Batch(found, first, self._roles, path, self._source.targets)
        return self._batch.payloads(row - self._batch.first)

    def _start(self, number: int, group: int) -> None:
        path = self._source.files[number].path
        if self._group[0] != number:
            self.close()
            self._source.check(path)
            self._file = open_parquet(path)
        self._group, self._batch = (number, group), None
        self._batches = batches_of(self._file, group, self._columns)

    def close(self) -> None:
        self._group, self._batch, self._batches = (-1, -1), None, iter(())
        if self._file is not None:
            self._file.close()
            self._file = None


class _Batch:
    """Rows of a row group from `first` on."""

    def __init__(self, batch: Any, first: int, roles: Roles, path: Path, targets: Targets | None) -> None:
        self.first, self.rows, self._roles = first, batch.num_rows, roles
        self._binary = {
            field: BinaryColumn(batch.column(column))
            for field, column in roles.columns.items()
            if field not in ("caption", roles.target)
        }
        self._targets = targets
        self._labels = column_values(path, "label", batch.column(roles.columns[roles.target])) if roles.target else []
        caption = roles.columns.get("caption")
        self._texts = column_values(path, caption, batch.column(caption)) if caption is not None else []
        self._rest = {name: column_values(path, name, batch.column(name)) for name in roles.metadata}

    def payloads(self, row: int) -> list[Buffer | None]:
        found: list[Buffer | None] = []
        for field in self._roles.fields:
            if field == "json":
                record = {name: values[row] for name, values in self._rest.items()}
                found.append(json_payload(record, self._roles.metadata))
            elif field == self._roles.target and self._targets is not None:
                found.append(self._targets.payload(self._labels[row]))
            elif field == "caption":
                text = self._texts[row]
                found.append(None if text is None else encode_field("text", text))
            else:
                found.append(self._binary[field].value(row))
        if found[0] is None:
            raise BadSampleError(self._binary["image"].why(row))
        return found


def _values(paths: Sequence[Path], column: str) -> Iterator[Any]:
    """Those of a column in some files."""
    for path in paths:
        with parquet_file(path) as file:
            for group in range(len(file.groups)):
                for batch in batches_of(file, group, [column]):
                    yield from column_values(path, column, batch.column(column))


def _distinct_names(root: Path, paths: Sequence[Any], count: int) -> Strings | None:
    """The names of a split's images, by their paths; None where some have none, or two the same."""
    if any(part is None for part in paths):
        return None
    values = (path for part in paths for chunk in part.chunks for path in column_values(root, "path", chunk))
    found = Names.of(safe_name(path or "") for path in values)
    return found if len(found) == count and "" not in set(found) and len(set(found)) == count else None
