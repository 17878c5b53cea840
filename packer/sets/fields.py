"""Add a field to a set: masks, boxes, captions, …, from a folder of files named by the keys.

    masks/cat/001.png          is of the sample cat/001, in any split
    masks/train/cat/001.png    is of the sample cat/001 in train

The bytes of the field go into shards of their own, of the set's format, with the same keys. The shards that are there
stay as they are, and the index says for each sample where its field is.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cache.errors import SourceError
from cache.messages import Silent, Watcher, plural
from packer.columns import load_part
from packer.formats.base import Arena
from packer.output import output_errors
from packer.sets.change import Change
from packer.sets.pieces import open_pieces
from packer.sets.save import SaveResult, operation, origin_of
from packer.sets.shards import Indexes, NewShards, options_like, pack, result_of
from packer.sources.base import ListingBuilder, SourceListing, SplitListing, check_names, place_name
from packer.sources.manifest import ManifestReader
from packer.sources.tables import RESERVED_FIELDS
from packer.workers import Workers
from readers.fields import KINDS, check_field
from readers.headers import SUFFIX
from readers.index import ABSENT
from readers.layout import DatasetInfo, read_dataset_info
from readers.names import FieldName
from readers.sample import NO_LABEL, Buffer
from readers.strings import Strings

__all__ = ["add_field"]

_BY_NAME = {"mask": "mask", "boxes": "boxes", "points": "points", "caption": "text", "json": "json"}
_BY_SUFFIX = {"npy": "array", "txt": "text", "json": "json"}
_IMAGES = frozenset(SUFFIX.values()) | {"jpeg", "tiff"}
_SHOWN = 3


def add_field(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    name: str,
    *,
    kind: str | None = None,
    shard_size: int | str | None = None,
    workers: int | None = None,
    engine: Executor | None = None,
    dry_run: bool = False,
    watcher: Watcher | None = None,
) -> SaveResult:
    """Add a field to a set, from files whose names without suffix are keys.

    name: of the field, which must be new.
    kind: what the files are: "mask", "boxes", "points", "array", "text", "json", "image", "file"; by default what the
        name of the field or their suffix says.
    workers, engine: as of `packer.append`.

    Samples without a file lack the field. Raises SourceError where no file is of a sample, BadSampleError for a file
    that is not of this kind, and as `packer.append` does.
    """
    root, watcher, crew = Path(path), watcher or Silent(), Workers(workers, engine)
    field: str = FieldName(name)
    if field in RESERVED_FIELDS or field != field.lower():
        raise ValueError(f"{name!r} cannot be the name of a field that is added: containers use it, or need lower case")
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
    files = _Files(Path(folder), field, _hidden_names(root))
    files.kind = kind or _kind_of(field, files.names)
    if dry_run:
        return _Addition(root, read_dataset_info(root), field, files).result(None)
    with Change(root, watcher) as change, output_errors(root):
        assert change.info is not None
        options = replace(options_like(root, change.info, shard_size), decode="none")
        addition = _Addition(root, change.info, field, files)
        new = pack(change, files, addition.listing, options, lambda split: f"{split}.{field}", crew, watcher)
        indexes = Indexes(change, addition.info.fields, addition.info.separate)
        info = addition.write(change, new, indexes)
        change.commit(info, new.moves | indexes.moves, {})
        return addition.result(new)


def _kind_of(field: str, names: Sequence[str]) -> str:
    suffix = names[0].rpartition(".")[2].lower()
    return _BY_NAME.get(field) or _BY_SUFFIX.get(suffix) or ("image" if suffix in _IMAGES else "file")


def _hidden_names(root: Path) -> frozenset[str]:
    """The parts of the keys of a set that begin with a dot."""
    pieces = open_pieces(root, read_dataset_info(root))
    keys = (key for (piece,) in pieces.values() for key in piece.keys if key[:1] == "." or "/." in key)
    return frozenset(part for key in keys for part in key.split("/") if part[:1] == ".")


class _Files:
    """The files of a folder, by their paths without suffix, as a source for `pack`."""

    kind = "file"

    def __init__(self, root: Path, field: str, hidden: frozenset[str]) -> None:
        """hidden: names with a dot in front that keys have; other such files and folders are passed over."""
        self.root, self._folder, self._field = root, os.fspath(root), field
        self._by_stem: dict[str, tuple[str, int, int]] = {}
        if not root.is_dir():
            raise SourceError(f"{root}: not a directory; expected one with a file for each sample")
        for above, folders, files in os.walk(root):
            folders[:] = sorted(folder for folder in folders if folder[0] != "." or folder in hidden)
            inside = above[len(str(root)) :].strip("/")
            for file in sorted(file for file in files if file[0] != "." or os.path.splitext(file)[0] in hidden):
                self._add(f"{inside}/{file}" if inside else file)
        if not self._by_stem:
            raise SourceError(f"{root}: no files")
        check_names(self.names, str(root))

    def _add(self, name: str) -> None:
        status = os.stat(f"{self._folder}/{name}")
        if not stat.S_ISREG(status.st_mode):
            raise SourceError(f"{self.root / name}: not a regular file")
        stem = os.path.splitext(name)[0]
        found = self._by_stem.setdefault(stem, (name, status.st_size, status.st_mtime_ns))
        if found[0] != name:
            raise SourceError(f"{self.root}: {found[0]} and {name} would both be of the sample {stem!r}; keep one")

    @property
    def title(self) -> str:
        return f"files of the field {self._field} in {self.root}"

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self._by_stem.values()]

    def of_key(self, key: str, splits: Sequence[str]) -> tuple[str, int, int] | None:
        """(path, bytes, time) of the file of a sample. splits: folders that may stand for its split."""
        stems = [f"{split}/{key}" for split in splits if split] + [key]
        return next((self._by_stem[stem] for stem in stems if stem in self._by_stem), None)

    def __len__(self) -> int:
        return len(self._by_stem)

    def list(self, split: str | None) -> SourceListing:
        raise SourceError(f"{self.title}: have no samples of their own")

    @contextmanager
    def open(self) -> Iterator[_FieldReader]:
        yield _FieldReader(str(self.root), self.kind)

    def paths(self, listing: SourceListing) -> Iterator[Path]:
        yield from (self.root / name for name in self.names)


class _FieldReader(ManifestReader):
    """Reads the file of a sample."""

    def __init__(self, folder: str, kind: str) -> None:
        super().__init__(folder)
        self._kind = kind

    def read(self, place: Any, arena: Arena) -> Sequence[Buffer | None]:
        (payload,) = super().read(place, arena)
        assert payload is not None
        if self._kind == "json":  # other kinds are checked where they are packed
            check_field(self._kind, payload)
        return [payload]


class _Addition:
    """Which sample gets which file, and the columns of the field."""

    def __init__(self, root: Path, info: DatasetInfo, field: str, files: _Files) -> None:
        if field in info.fields:
            raise SourceError(f"{root}: has a field {field!r} already; choose another name")
        self._root, self._before, self._field, self._files = root, info, field, files
        fields = {**info.fields, field: files.kind}
        separate = tuple(name for name in fields if name in (*info.separate, field))
        self.info = replace(info, fields=fields, separate=separate)
        self._pieces = {name: piece for name, (piece,) in open_pieces(root, info).items()}
        self._samples: dict[str, npt.NDArray[np.int64]] = {}  # numbers of those with a file, by split
        self._used: set[str] = set()
        splits = {name: self._list(name) for name in info.splits}
        self.listing = SourceListing({name: part for name, part in splits.items() if len(part)}, {field: files.kind})
        if not self.listing.splits:
            key = next((piece.keys[0] for piece in self._pieces.values() if len(piece)), "")
            raise SourceError(
                f"{files.root}: none of {plural(len(files), 'file')} is of a sample of {root}, such as "
                f"{files.names[0]!r}; expected the key of a sample and any suffix, as {key}.png"
            )

    def _list(self, split: str) -> SplitListing:
        builder, samples = ListingBuilder(), []
        for number, key in enumerate(self._pieces[split].keys):
            found = self._files.of_key(key, (self.info.splits[split].root, split))
            if found is not None:
                name, size, stamp = found
                builder.add((name,), ((name, size),), size, stamp, key=key, label=NO_LABEL)
                samples.append(number)
                self._used.add(name)
        self._samples[split] = np.array(samples, np.int64)
        return builder.build(self.info.splits[split].root)

    def write(self, change: Change, new: NewShards, indexes: Indexes) -> DatasetInfo:
        """Write all indexes; the new description."""
        splits = {}
        for name, old in self.info.splits.items():
            shards, parts = new.of_split(change, name)
            piece = replace(self._pieces[name], extra=self._columns(name, parts, len(old.shards)))
            shards = [replace(shard, samples=0) for shard in shards]
            splits[name] = indexes.write(name, piece, shards, (), known=old.shards, root=old.root)
        samples = sum(split.samples for split in splits.values())
        arguments = {"name": self._field, "kind": self._files.kind, "source": place_name(self._files.root)}
        added = sum(meta.payload_bytes for meta in new.metas)
        made = origin_of(self._before, payload_bytes=int(self._before.made.get("payload_bytes", 0)) + added)
        history = (*self._before.history, operation("add-field", arguments, (samples, samples)))
        self.info = replace(self.info, splits=splits, made=made, history=history)
        return self.info

    def _columns(self, split: str, parts: Sequence[Path], first: int) -> Mapping[str, npt.NDArray[Any]]:
        """The columns of the field, of all samples of a split. first: the number of its first shard."""
        count, samples, field = len(self._pieces[split]), self._samples[split], self._field
        offset, length = np.full(count, ABSENT, np.uint64), np.zeros(count, np.uint64)
        crc, shard, sizes = np.zeros(count, np.uint32), np.zeros(count, np.uint32), np.zeros(count + 1, np.uint64)
        blobs, start = [], 0
        for number, path in enumerate(parts, first):
            with load_part(path) as part:
                rows = samples[start : start + len(part["label"])]
                start += len(rows)
                offset[rows], length[rows] = part[f"{field}.offset"], part[f"{field}.length"]
                crc[rows], shard[rows] = part[f"{field}.crc32c"], number
                names = Strings(part[f"{field}.name"], part[f"{field}.name.offset"])
                sizes[rows + 1] = np.diff(names.offsets)
                blobs.append(names.blob)
        texts = {
            "name": np.concatenate([np.zeros(0, np.uint8), *blobs]),
            "name.offset": np.cumsum(sizes, dtype=np.uint64),
        }
        columns: dict[str, npt.NDArray[Any]] = {"offset": offset, "length": length, "crc32c": crc, "shard": shard}
        return {f"{field}.{name}": column for name, column in (columns | texts).items()}

    def result(self, new: NewShards | None) -> SaveResult:
        before = sum(split.samples for split in self.info.splits.values())
        found = result_of(self._root, "add-field", self.info, before, new)
        return replace(
            found, with_field=sum(map(len, self._samples.values())), unmatched=len(self._files) - len(self._used)
        )
