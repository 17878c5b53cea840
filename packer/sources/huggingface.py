"""A data set of Hugging Face in Parquet, with images as `struct{bytes, path}`, or as bytes.

A repository's folder, or one file. The columns have the roles of `packer.sources.columns`: ClassLabels have class
names, an image keeps its bytes, its path is the sample's name if all paths of a split differ, and columns that are
neither image nor label are in the field json.

Listing reads only labels and paths. Rows are read a batch at a time, in the order of the files, since a row group must
be unpacked from its start; each image is then a view of the batch. A row group is refused if its footer says that it
unpacks to much more than images do. pyarrow may crash on a damaged file, so the source is `isolated`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cache.errors import BadSampleError, SourceError
from cache.messages import listed, quoted
from packer.sources.base import checked_name, plain_yaml, read_text, refusing, safe_name
from packer.sources.columns import CAPTION_COLUMNS, ColumnSource, Row, Rows, Targets, is_mask, targets_of
from packer.sources.layouts import head_of, parquet_files
from packer.sources.shards import split_of_name
from packer.sources.tables import Table, column_values, parquet_file
from readers.headers import sniff
from readers.layout import SplitName

__all__ = ["HuggingFaceSource"]


# ------------------------------------------------------------------------------
# The files of a data set on the Hugging Face Hub: their splits, and the meaning of their columns.
#
#     data/train-00000-of-00008.parquet     split and number, as `push_to_hub` names them; also without data/
#     small/train-00000-of-00001.parquet    of one of several data sets in a repository
#     default/train/0000.parquet            as in the branch of converted data sets
#     train.parquet                         one file per split
#
# Features are JSON in the metadata of each file, under the key "huggingface"; if a file has none, YAML in the
# header of README.md.


_SHARD = re.compile(r"(.+?)-(\d{5})-of-(\d{5})(?:-[0-9a-f]+)?")
_KEYWORDS = ("train", "validation", "valid", "val", "dev", "test")
_MAX_README_BYTES = 16 << 20
_MAX_YAML_BYTES = 4 << 20
_MAX_CLASSES = 1 << 24
_LFS = b"version https://git-lfs"


class HubFile(NamedTuple):
    """A file, its split, and its number among `of` files of the split: 0 if its name does not state it."""

    path: Path
    split: str
    number: int = 0
    of: int = 0


def splits_of(root: Path) -> dict[str, list[Path]]:
    """The Parquet files of each split, in order, of a file or a folder.

    Raises SourceError if the folder has several data sets, or if files of a split are missing.
    """
    if root.is_file():
        return {_of_name(root.stem) or split_of_name(root.name): [root]}
    configs: dict[str, list[HubFile]] = {}
    for path in parquet_files(root):
        config, file = _place(root, path)
        configs.setdefault(config, []).append(file)
    if not configs:
        raise SourceError(f"{root}: no Parquet files")
    if len(configs) > 1:
        folders = sorted(str(_folder_of(root, config)) for config in configs)
        raise SourceError(
            f"{root}: has {len(configs)} data sets: {listed(sorted(configs), 20)}; name the folder of one of them, "
            f"for example  packer convert {quoted(folders[0])}"
        )
    splits: dict[str, list[HubFile]] = {}
    for file in next(iter(configs.values())):
        splits.setdefault(file.split, []).append(file)
    return {name: _whole(root, name, files) for name, files in _ordered(splits).items()}


def _ordered(splits: Mapping[str, list[HubFile]]) -> dict[str, list[HubFile]]:
    """Order the splits: train, validation and test first."""
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
    return "/".join(folders), file._replace(split=checked_name(SplitName, file.split, path))


def _of_name(stem: str) -> str:
    """The split that a name is or begins with; "" if none."""
    words = [word for word in re.split(r"[-_. \d]+", stem.lower()) if word]
    return next((word for word in words if word in _KEYWORDS), "")


def _folder_of(root: Path, config: str) -> Path:
    return root / "data" / config if (root / "data" / config).is_dir() and config else root / config


def _whole(root: Path, split: str, files: Sequence[HubFile]) -> list[Path]:
    """The paths of a split's files. Raises SourceError if some are missing."""
    counts = {file.of for file in files}
    if counts != {0}:
        count = max(counts)
        missing = sorted(set(range(count)) - {file.number for file in files})
        if len(counts) > 1 or len(files) != count or missing:
            first = f", the first of them {split}-{missing[0]:05d}-of-{count:05d}" if missing else ""
            raise SourceError(
                f"{root}: has {len(files)} files of {split}, but their names state "
                f"{listed(sorted(map(str, counts)))}{first}; download the rest, or remove those of another version"
            )
    for file in files:
        if head_of(file.path, len(_LFS)) == _LFS:
            raise SourceError(f"{file.path}: a pointer of Git LFS and not the file; run  git lfs pull")
    return [file.path for file in files]


# --- features -----------------------------------------------------------------------------------------------------
def features_in(metadata: Mapping[bytes, bytes] | None, path: Path) -> dict[str, Any] | None:
    """Column -> feature, as written by `datasets` to a Parquet file: {"_type": "ClassLabel", "names": […]}."""
    text = (metadata or {}).get(b"huggingface")
    if text is None:
        return None
    with refusing(path, "its features cannot be read"):
        features = json.loads(text)["info"]["features"]
        return dict(features) if features is not None else None


def readme_features(root: Path) -> dict[str, Any] | None:
    """The features in the README.md of a repository, or above a folder of it, in the same form; None if it has none."""
    folders = [root if root.is_dir() else root.parent]
    folders += [*folders[0].parents][:2]
    path = next((folder / "README.md" for folder in folders if (folder / "README.md").is_file()), None)
    if path is None:
        return None
    text = read_text(path, _MAX_README_BYTES)
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
    """Convert a feature of README.md to the form of those in files."""
    if dtype == "image":
        return {"_type": "Image"}
    if isinstance(dtype, dict) and isinstance(dtype.get("class_label"), dict):
        names = dtype["class_label"].get("names")
        if isinstance(names, dict):
            names = [names[key] for key in sorted(names, key=lambda key: int(key) if str(key).isdecimal() else -1)]
        return {"_type": "ClassLabel", "names": names}
    return {"_type": "Value", "dtype": dtype if isinstance(dtype, str) else ""}


def class_names(feature: Mapping[str, Any], where: object) -> tuple[str, ...]:
    """The class names of a ClassLabel, () if it only states their number. Raises SourceError."""
    names = feature.get("names") or ()
    good = isinstance(names, list | tuple) and len(names) <= _MAX_CLASSES
    names = tuple(map(str, names)) if good else ()
    if not good or len(set(names)) < len(names) or any(not name or "\0" in name for name in names):
        raise SourceError(f"{where}: its class names are {feature.get('names')!r:.80}, expected each once")
    return names


# ------------------------------------------------------------------------------
# The content of the columns of a file, and their rows.


_MAX_ROWS = 4096
_BATCH_BYTES, _DICTIONARY_BYTES = 32 << 20, 256 << 20
_BOMB_BYTES, _BOMB_RATIO = 64 << 20, 1000  # images are hardly compressible


def has_child(kind: Any, name: str) -> bool:
    """Whether a type is a struct with a field of this name."""
    import pyarrow as pa

    return bool(pa.types.is_struct(kind)) and kind.get_field_index(name) >= 0


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def content_of(name: str, kind: Any, feature: Any, where: object) -> str:
    """The kind of content of a column (`packer.sources.columns`), by its type and feature; "" if it is ignored."""
    import pyarrow as pa

    feature_type = feature.get("_type") if isinstance(feature, dict) else None
    if feature_type in ("Audio", "Video", "Pdf", "Nifti") or (_is_list(kind) and has_child(kind.value_type, "bytes")):
        return ""
    if has_child(kind, "bytes") or feature_type == "Image":
        if _is_text(kind):
            raise SourceError(f"{where}: the column {name!r} has paths of images, not images; embed them")
        return "image"
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return "class" if feature_type == "ClassLabel" else "integer"
    if pa.types.is_floating(kind):
        return "number"
    if _is_text(kind):
        return "text"
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return "bytes"
    return "texts" if name in CAPTION_COLUMNS and _is_list(kind) and _is_text(kind.value_type) else "value"


def batch_rows(path: Path, group: Any, columns: Sequence[str]) -> int:
    """How many rows of a row group fit into memory at a time, by its footer. Raises SourceError for a bomb.

    The values of a row are in a page, or, if they are numbers of dictionary entries, in the dictionary.
    """
    rows = _MAX_ROWS
    for chunk in _chunks(group, columns):
        packed, unpacked = max(1, chunk.total_compressed_size), max(1, chunk.total_uncompressed_size)
        if unpacked > _BOMB_BYTES and unpacked > _BOMB_RATIO * packed:
            raise SourceError(
                f"{path}: {chunk.path_in_schema}: {packed:,} bytes that unpack to {unpacked:,}: a decompression bomb"
            )
        rows = min(rows, _BATCH_BYTES * group.num_rows // unpacked)
        if chunk.has_dictionary_page:
            dictionary = (chunk.data_page_offset - chunk.dictionary_page_offset) * unpacked // packed
            rows = min(rows, _DICTIONARY_BYTES // max(1, dictionary))
    return max(1, rows)


def _chunks(group: Any, columns: Sequence[str]) -> list[Any]:
    """The chunks of these columns, or of parts of columns."""
    chunks = map(group.column, range(group.num_columns))
    return [chunk for chunk in chunks if f"{chunk.path_in_schema}.".startswith(tuple(f"{name}." for name in columns))]


def batches_of(file: Any, path: Path, number: int, columns: Sequence[str]) -> Iterator[Any]:
    """The rows of a row group, in batches, read without threads, since workers may have been forked."""
    rows = batch_rows(path, file.metadata.row_group(number), columns)
    return file.iter_batches(rows, row_groups=[number], columns=list(columns), use_threads=False)  # type: ignore[no-any-return]


class HuggingFaceSource(ColumnSource):
    """The files at `root`, a folder or a Parquet file. Place: (number of the file, row group, row in it)."""

    kind = "Hugging Face data set"
    isolated = True
    shuffles = False
    estimated = True

    def find(self, split: str | None) -> Mapping[str, Sequence[int]]:
        splits = splits_of(self.root)
        if self.root.is_file() and split is not None:
            splits = dict.fromkeys((split,), next(iter(splits.values())))
        self.files = [self.note(path) for paths in splits.values() for path in paths]
        number = iter(range(len(self.files)))
        return {name: [next(number) for _ in paths] for name, paths in splits.items()}

    def contents(self) -> dict[str, str]:
        path = self.files[0]
        with parquet_file(path) as file:
            self._schema = schema = file.schema_arrow
            features = features_in(schema.metadata, path)
            self._features = features if features is not None else readme_features(self.root) or {}
            contents = {
                column.name: content_of(column.name, column.type, self._features.get(column.name), path)
                for column in schema
            }
            self._left = [name for name, content in contents.items() if not content]
            contents = {name: content for name, content in contents.items() if content}
            masks = [name for name, content in contents.items() if content == "image" and "mask" in name.lower()]
            doubtful = [*masks, *(name for name, content in contents.items() if content == "bytes")]
            batch: Any = next(batches_of(file, path, 0, doubtful), None) if doubtful and file.num_row_groups else None
            for name in doubtful if batch is not None and batch.num_rows else ():
                value = _BinaryColumn(batch.column(name)).value(0)
                if value is not None and contents[name] == "image":
                    contents[name] = "mask" if is_mask(value) else "image"
                elif value is not None and sniff(value):
                    contents[name] = "image"
        return contents

    def warnings(self) -> list[str]:
        left = listed([*map(repr, self._left)], 20)
        return [f"{self.files[0]}: left behind: {left}, with several images, or sound or video"] if left else []

    def class_names(self, column: str) -> tuple[str, ...]:
        feature = self._features.get(column)
        is_class = isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
        return class_names(feature, f"{self.root}: {column!r}") if is_class and feature else ()

    def target_of(self, column: str) -> Targets:
        """A list of ClassLabels, or of texts, becomes a vector with 1 for each class."""
        kind, feature = self._schema.field(column).type, self._features.get(column)
        inner = feature[0] if isinstance(feature, list) and feature else None
        inner = feature.get("feature") if isinstance(feature, Mapping) else inner
        if isinstance(inner, Mapping) and inner.get("_type") == "ClassLabel":
            names = class_names(inner, f"{self.root}: {column!r}")
            return Targets(len(names), classes=names)
        if _is_list(kind) and _is_text(kind.value_type):
            values = [value for i in range(len(self.files)) for value in self.read_rows(i, [column]).values[column]]
            return targets_of(lambda: enumerate(values, 1), Table(self.root / column, ())) or Targets(0)
        return Targets(0, "") if _is_list(kind) else Targets(-1)

    def read_rows(self, part: int, columns: Sequence[str]) -> Rows:
        path, image = self.files[part], self.roles.columns["image"]
        needed = [*self.roles.columns.values(), *self.roles.metadata]
        with parquet_file(path) as file:
            kinds = {column.name: column.type for column in file.schema_arrow}
            for name in {*needed, *columns}:
                if kinds.get(name) != self._schema.field(name).type:
                    raise SourceError(f"{path}: its column {name!r} is missing, or not as in {self.root}'s first file")
            places: list[Any] = [np.empty((0, 3), np.int64)]
            sizes: list[Any] = [np.empty(0, np.int64)]
            if file.metadata.num_rows > path.stat().st_size:  # an image has more than one byte
                raise SourceError(f"{path}: claims {file.metadata.num_rows:,} rows: damaged")
            paths = [f"{image}.path"] if has_child(self._schema.field(image).type, "path") else []
            values: dict[str, list[Any]] = {name: [] for name in (*columns, *paths)}
            for number in range(file.num_row_groups):
                group = file.metadata.row_group(number)
                rows = np.arange(group.num_rows, dtype=np.int64)
                places.append(np.column_stack((np.full_like(rows, part), np.full_like(rows, number), rows)))
                unpacked = sum(chunk.total_uncompressed_size for chunk in _chunks(group, needed))
                sizes.append(np.full_like(rows, min(max(1, unpacked // max(1, len(rows))), 1 << 30)))
                for batch in batches_of(file, path, number, [*columns, *paths]) if values else ():
                    for name in columns:
                        values[name] += column_values(path, name, batch.column(name))
                    for name in paths:
                        values[name] += column_values(path, name, batch.column(image).field("path"))
        count = sum(map(len, sizes))
        if any(len(read) != count for read in values.values()):
            raise SourceError(f"{path}: its pages have other rows than the {count:,} of its footer: damaged")
        names = [safe_name(value or "") for value in values[paths[0]]] if paths else None
        return Rows(np.concatenate(places), np.concatenate(sizes), values, names)

    @contextmanager
    def open_rows(self) -> Iterator[Callable[[Any], Row]]:
        yield _Reader(self).row


class _Reader:
    """Reads rows, ideally in order: a batch is in memory, followed by the rest of its row group."""

    def __init__(self, source: HuggingFaceSource) -> None:
        self._source = source
        self._columns = [*source.roles.columns.values(), *source.roles.metadata]
        self._at = (-1, -1)
        self._batches: Iterator[tuple[int, Any]] = iter(())
        self._first, self._stop = 0, 0  # rows of the batch
        self._batch: Any = None
        self._read: dict[str, Any] = {}  # columns of the batch

    def row(self, place: tuple[int, int, int]) -> Row:
        number, group, row = place
        if self._at != (number, group) or row < self._first:
            self._at, self._first, self._stop = (number, group), 0, 0
            self._batches = self._batches_of(number, group)
        while row >= self._stop:
            self._first, self._batch = next(self._batches)
            self._stop, self._read = self._first + self._batch.num_rows, {}
        at = row - self._first
        return lambda column, kind: self._value(column, kind, at)

    def _batches_of(self, number: int, group: int) -> Iterator[tuple[int, Any]]:
        path, first = self._source.files[number], 0
        with parquet_file(path) as file:
            for batch in batches_of(file, path, group, self._columns):
                yield first, batch
                first += batch.num_rows
        raise SourceError(f"{path}: row group {group} has {first:,} rows, but claims more: damaged")

    def _value(self, name: str, kind: str, at: int) -> Any:
        column: Any = self._read.get(name)
        is_binary = kind in ("image", "mask", "file")
        if column is None:
            array = self._batch.column(name)
            column = _BinaryColumn(array) if is_binary else column_values(self._source.root, name, array)
            self._read[name] = column
        if not is_binary:
            return column[at]
        value = column.value(at)
        if value is None and name == self._source.roles.columns["image"]:
            whole = column.column[at].as_py()
            path = whole.get("path") if isinstance(whole, dict) else None
            fault = (
                f"has no bytes, only the path {path!r:.100}; embed the images (push_to_hub does, or save with bytes)"
            )
            raise BadSampleError(fault if path else "has no image: the column is null")
        return value


class _BinaryColumn:
    """A column of bytes, or of structs with bytes, whose values are views."""

    def __init__(self, column: Any) -> None:
        import pyarrow as pa

        self.column = column
        values = column.field("bytes") if pa.types.is_struct(column.type) else column
        if not (pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type)):
            values = values.cast(pa.large_binary())
        width = np.int64 if pa.types.is_large_binary(values.type) else np.int32
        _, offsets, data = values.buffers()
        start = values.offset * np.dtype(width).itemsize
        self._offsets = np.frombuffer(offsets, width, len(values) + 1, start).tolist()
        self._data = memoryview(data) if data is not None else memoryview(b"")
        self._valid = (values.is_valid().to_numpy(False) & column.is_valid().to_numpy(False)).tolist()

    def value(self, row: int) -> memoryview | None:
        """The bytes in a row; None for null."""
        return self._data[self._offsets[row] : self._offsets[row + 1]] if self._valid[row] else None
