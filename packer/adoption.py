"""`packer.index`: make a set of shards that lie there already, without copying them; or rebuild an index.

    find      which shards, of which set, in which splits        nothing is written
    locate    every sample, its checksum and its image's header  into the working folder
    compare   what the set that is there has, with what would be; a loss is refused unless it is accepted
    commit    indexes under new names, links, and dataset.json   which alone makes them the set

Shards stay where they are and as they are; with another output directory, links lead to them. A kill or an error at any
moment leaves the set that was there whole, since its own index is not touched before dataset.json names another.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from cache.errors import FormatError, OutputError, SourceError
from cache.node import usable_cpus
from cache.progress import Silent, Watcher
from cache.text import plural
from packer import __version__
from packer.adopted_shard import AdoptTask, class_names, key_prefix, locate_shard, make_keys_unique
from packer.columns import PartMeta, column_files, is_index, remove_index, write_index
from packer.conversion.commit import write_dataset_info
from packer.conversion.images import remarks_of
from packer.conversion.journal import Journal
from packer.formats.base import LocateOptions
from packer.found_shards import FoundShard, FoundShards, find_shards, listed, losses
from packer.output import local_output, output_errors
from packer.sources.shards import field_kinds
from packer.workers import run_shards
from readers.index import column_names
from readers.layout import AdoptedKeys, DatasetInfo, ShardInfo, SplitInfo
from readers.names import FieldName, SplitName

__all__ = ["IndexCommit", "IndexResult", "index"]


@dataclass(frozen=True, slots=True)
class IndexResult:
    """What was adopted: splits maps names to samples; unreadable counts images whose header cannot be parsed."""

    output: Path
    format: str
    splits: dict[str, int]
    shards: int
    samples: int
    unreadable: int
    warnings: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "output": str(self.output)}


def index(
    shards: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    split: str | None = None,
    image_key: str | None = None,
    label_key: str | None = None,
    fields: Mapping[str, str] | None = None,
    label_offset: int | None = None,
    classes: Sequence[str] | None = None,
    accept_loss: bool = False,
    workers: int | None = None,
    watcher: Watcher | None = None,
) -> IndexResult:
    """Adopt WebDataset tars, TFRecords of tf.train.Example or flat HDF5 files, or rebuild the index of a set.

    shards: files, or directories of them, or one such. output: where dataset.json and the index go; default beside
    the shards, otherwise links to the shards are made there. split: of all shards; default read off each file name.
    image_key, label_key, fields (field -> key): what the shards call things; kept in dataset.json. label_offset:
    subtracted from their labels. classes: names by label. accept_loss: go on where shards are missing, or the set that
    is there would lose some, samples, splits, classes or fields; otherwise that is an OutputError that says how many.
    Raises FormatError (broken), NotFlatError (cannot be adopted), SourceError, BadNameError (of a split or field).
    """
    split = SplitName(split) if split is not None else None
    named: dict[str, str] = {FieldName(name): key for name, key in (fields or {}).items()}
    if isinstance(shards, (str, os.PathLike)):
        shards = (shards,)
    place = local_output(output) if output is not None else None
    found = find_shards([Path(shard) for shard in shards], place, split, image_key)
    keys = AdoptedKeys(image_key, label_key, named)
    return _Adoption(found, keys, label_offset, accept_loss, watcher or Silent()).run(workers or usable_cpus(), classes)


class _Adoption:
    def __init__(
        self, found: FoundShards, keys: AdoptedKeys, label_offset: int | None, accept_loss: bool, watcher: Watcher
    ) -> None:
        self._found, self._accept_loss, self._watcher = found, accept_loss, watcher
        before = found.known.adopted if found.known else AdoptedKeys()
        self._keys = AdoptedKeys(
            keys.image_key or before.image_key, keys.label_key or before.label_key, {**before.fields, **keys.fields}
        )
        self._label_offset = _label_offset(found, label_offset)
        self._warnings: list[str] = []

    def run(self, workers: int, classes: Sequence[str] | None) -> IndexResult:
        self._compare_names()
        out = self._found.out
        made_folder = not out.exists()
        try:
            with Journal(out, beside_shards=True) as journal:
                journal.empty()
                metas = self._locate(journal, workers)
                with output_errors():
                    info = self._describe(journal, metas, classes)
                    self._compare(info, given_classes=classes is not None)
                    IndexCommit(journal, self._found).run(info)
        finally:
            if made_folder:
                with contextlib.suppress(OSError):
                    out.rmdir()  # of a run that failed: there is nothing in it
        unreadable = sum(meta.unreadable for meta in metas.values())
        if unreadable:
            self._warnings.append(f"{plural(unreadable, 'image')} without a readable header")
        self._warnings += remarks_of(meta.remarks for meta in metas.values())
        return IndexResult(
            output=out,
            format=self._found.format,
            splits={name: part.samples for name, part in info.splits.items()},
            shards=len(self._found.shards),
            samples=sum(part.samples for part in info.splits.values()),
            unreadable=unreadable,
            warnings=tuple(self._warnings),
        )

    # --- locate -------------------------------------------------------------------------------------------------
    def _locate(self, journal: Journal, workers: int) -> dict[FoundShard, PartMeta]:
        """Locate every shard; its part goes into the working folder."""
        keys = self._keys
        options = LocateOptions(keys.image_key, keys.label_key, keys.fields, self._label_offset)
        shards = self._found.shards
        tasks = [
            AdoptTask(shard.path, shard.name, self._found.format, options, _part(journal, n))
            for n, shard in enumerate(shards)
        ]
        size = sum(shard.path.stat().st_size for shard in shards)
        metas = run_shards(locate_shard, tasks, len(tasks), workers, self._watcher, 0, size)
        if not any(meta.shard.samples for meta in metas):
            count = plural(len(tasks), f"{self._found.format} shard")
            raise SourceError(f"{shards[0].path.parent}: {count}, but not one sample in them, so no set is made")
        return dict(zip(shards, metas, strict=True))

    def _describe(
        self, journal: Journal, metas: Mapping[FoundShard, PartMeta], classes: Sequence[str] | None
    ) -> DatasetInfo:
        """The set as it would be, with its indexes in the working folder under the names `<split>.index`."""
        names, warnings = class_names(self._found, metas, classes, self._label_offset)
        self._warnings += warnings
        kinds = self._fields(metas)
        known, parts = self._found.known, {shard: _part(journal, n) for n, shard in enumerate(self._found.shards)}
        splits = {}
        for name, shards in self._found.splits.items():
            if make_keys_unique([(key_prefix(shard.name), parts[shard]) for shard in shards]):
                self._warnings.append(f"{name}: shards share keys, so each key got its shard's name in front")
            counts = [metas[shard].shard.samples for shard in shards]
            mine = [parts[shard] for shard in shards]
            columns = write_index(journal.work, f"{name}.index", mine, counts, list(kinds), scratch=journal.work)
            root = known.splits[name].root if known and name in known.splits else ""
            infos = tuple(metas[shard].shard for shard in shards)
            splits[name] = SplitInfo(sum(counts), infos, f"{name}.index", root, columns)
        made = dict(known.made) if known else {"source": "shards made elsewhere"}
        return DatasetInfo(
            format=self._found.format,
            fields=kinds,
            classes=names,
            splits=splits,
            label_offset=self._label_offset,
            made=made | {"indexed_by": f"packer {__version__}"},
            adopted=self._keys,
        )

    def _fields(self, metas: Mapping[FoundShard, PartMeta]) -> dict[str, str]:
        """Name -> kind, the image first: as the shards say it, as the set did, or as the name suggests."""
        told: dict[str, str] = dict(self._found.known.fields) if self._found.known else {}
        for shard in self._found.shards:
            for name, kind in (shard.spec.fields if shard.spec else {}).items():
                if told.setdefault(name, kind) != kind:
                    raise FormatError(
                        f"{shard.path}: says that the field {name} is {kind!r}, other shards of the set that it is "
                        f"{told[name]!r}; index them apart"
                    )
        specs = [shard.spec is not None for shard in self._found.shards]
        foreign = (meta.fields for shard, meta in metas.items() if shard.spec is None)
        found = dict.fromkeys(itertools.chain.from_iterable(foreign))
        if "image" not in found and not any(specs) and any(meta.shard.samples for meta in metas.values()):
            raise FormatError(
                f"{self._found.shards[0].path}: no sample has an image; name it with --image-key (there are: "
                f"{', '.join(sorted(found)) or 'no fields'})"
            )
        here = {name: None for shard in self._found.shards if shard.spec for name in shard.spec.fields} | found
        ordered = [name for name in told if name in here] + [name for name in here if name not in told]
        if "image" in here or not any(specs):
            ordered = ["image", *(name for name in ordered if name != "image")]
        return {name: told.get(name) or field_kinds([name])[name] for name in ordered}

    # --- compare ------------------------------------------------------------------------------------------------
    def _compare_names(self) -> None:
        """What can be told before hours of reading: shards that are not there, and a dataset.json that is damaged."""
        there = self._found.there
        if there and there.info is None:
            self._refuse([f"what its dataset.json says, which cannot be read ({there.fault})"])
        if there and there.info:
            old = {shard.path: shard for split in there.info.splits.values() for shard in split.shards}
            splits = {
                name: SplitInfo(0, tuple(old[shard.name] for shard in shards if shard.name in old), "")
                for name, shards in self._found.splits.items()
            }
            classes = there.info.classes if self._found.origin is there else ()
            self._refuse(losses(there.info, replace(there.info, splits=splits, classes=classes)))
        count, some = self._found.missing()
        if count and not self._accept_loss:
            raise SourceError(
                f"{self._found.shards[0].path.parent}: {plural(count, 'shard')} of this set {_are(count)} missing "
                f"by the names of the others ({listed(some)}); bring them back, or add --accept-loss for a set without"
            )

    def _compare(self, info: DatasetInfo, given_classes: bool) -> None:
        """Refuse what would lose something of the set that is there."""
        there = self._found.there
        if there and there.info:
            old = replace(there.info, classes=()) if given_classes else there.info
            self._refuse(losses(old, info))
        elif there is None:
            self._compare_leftovers(info)
        if self._found.known and self._found.new:
            new = [shard.name for shard in self._found.new]
            self._warnings.append(f"{plural(len(new), 'shard')} new to the set ({listed(new)})")

    def _compare_leftovers(self, info: DatasetInfo) -> None:
        """An index whose dataset.json was lost still says how many samples there were."""
        found = []
        for name, split in info.splits.items():
            samples = _samples_of(self._found.out / split.index)
            if samples > split.samples:
                lost = plural(samples - split.samples, "sample")
                found.append(f"{lost} of {name}, whose index has {samples}, while the shards hold {split.samples}")
        self._refuse(found)

    def _refuse(self, lost: Sequence[str]) -> None:
        if lost and not self._accept_loss:
            out = self._found.out
            raise OutputError(
                f"{out}: there is a set here, and it would lose {'; '.join(lost)}. Nothing was changed. Name all its "
                f"shards ( packer index {out} ), bring back what is missing or damaged, choose another output with -o, "
                f"or add --accept-loss"
            )


def _part(journal: Journal, number: int) -> Path:
    return journal.folder / f"{number}.part"


def _label_offset(found: FoundShards, given: int | None) -> int:
    """What is subtracted from labels: as given, as the shards say, or as the set does that they belong to."""
    told = {shard.spec.label_offset: shard.path for shard in found.shards if shard.spec}
    if given is not None and told and told.keys() != {given}:
        offset, path = next((offset, path) for offset, path in told.items() if offset != given)
        raise FormatError(f"{path}: says itself that its labels have the offset {offset}; leave --label-offset out")
    if len(told) > 1:
        (first, path), (second, other), *_ = told.items()
        raise FormatError(f"{path} has labels with the offset {first}, {other} with {second}; index them apart")
    if given is not None:
        return given
    return next(iter(told), found.known.label_offset if found.known else 0)


def _samples_of(index: Path) -> int:
    """The samples of an index without a dataset.json; 0 where there is none that can be read."""
    try:
        return len(np.load(index / "label.npy", mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, TypeError, EOFError, SyntaxError):
        return 0


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


_OF_CONVERSION = ("by", "plan", "payload_bytes", "left_out")


class IndexCommit:
    """Put what was made in the working folder in its place. Until dataset.json is replaced, the old set is whole."""

    def __init__(self, journal: Journal, found: FoundShards) -> None:
        self._place, self._work, self._found = journal.place, journal.work, found
        old = found.there.info if found.there else None
        self._old = old
        self._used = [split.index for split in old.splits.values()] if old else []

    def run(self, info: DatasetInfo) -> None:
        retargeted = [shard for shard in self._found.shards if self._must_link(shard, info)]
        splits = {name: replace(split, index=self._put(name, info)) for name, split in info.splits.items()}
        for number, shard in enumerate(retargeted):
            self._work.symlink(f"{number}.link", shard.path.resolve())
            self._work.rename(f"{number}.link", shard.name, self._place)
        self._place.sync()
        new = replace(info, splits=splits, made=self._made(info))
        if self._old is None or replace(new, made=self._old.made) != self._old:
            write_dataset_info(self._place, new, scratch=self._work)
        self._tidy({split.index for split in splits.values()}, list(splits))

    def _tidy(self, used: set[str], splits: Sequence[str]) -> None:
        """Remove indexes that dataset.json does not name: the old ones, and what a run that was cut off has left."""
        names = [name for split in splits for name in _names(split, 1)]
        left = [name for name in names if self._place.kind(name) == "folder" and is_index(self._place, name)]
        for name in dict.fromkeys([*self._used, *left]):
            if name not in used:
                with contextlib.suppress(OSError):  # nobody reads it any more
                    remove_index(self._place, name)

    def _put(self, split: str, info: DatasetInfo) -> str:
        """Move the index of a split into the set under a name that the set there does not use, or leave its own where
        that has the same bytes; returns the name."""
        names = _names(split, len(self._used) + 1)
        current = self._old.splits[split].index if self._old and split in self._old.splits else names[0]
        if self._has(current, split, info):
            return current
        name = next(name for name in names if name not in self._used)
        if not is_index(self._place, name):
            raise OutputError(f"{self._place.path / name}: holds other things than an index and is in the way; move it")
        remove_index(self._place, name)
        self._work.rename(f"{split}.index", name, self._place)
        return name

    def _has(self, name: str, split: str, info: DatasetInfo) -> bool:
        try:
            return column_files(self._place.path / name, column_names(info.fields)) == info.splits[split].columns
        except FormatError:
            return False

    def _must_link(self, shard: FoundShard, info: DatasetInfo) -> bool:
        """Whether a link to a shard must be made. Raises OutputError where something else has its name."""
        target = self._place.path / shard.name
        if os.path.realpath(shard.path) == os.path.realpath(target):
            return False
        kind = self._place.kind(shard.name)
        if not kind:
            return True
        old = _shard_named(self._old, shard.name)
        if kind == "link" and old is not None and old == _shard_named(info, shard.name):
            return True  # the shard was moved, and is what it was
        raise OutputError(
            f"{target}: is in the way of a link to {shard.path}; choose another output with -o, or move it elsewhere"
        )

    def _made(self, info: DatasetInfo) -> Mapping[str, Any]:
        """How the set was made; not by a conversion any more where its shards are others."""
        same = self._found.known and _shards_of(self._found.known) == _shards_of(info)
        return info.made if same else {name: value for name, value in info.made.items() if name not in _OF_CONVERSION}


def _names(split: str, others: int) -> list[str]:
    """What the index of a split may be called."""
    return [f"{split}.index", *(f"{split}.index-{number}" for number in range(2, others + 2))]


def _shards_of(info: DatasetInfo) -> list[ShardInfo]:
    return [shard for split in info.splits.values() for shard in split.shards]


def _shard_named(info: DatasetInfo | None, name: str) -> ShardInfo | None:
    return next((shard for shard in _shards_of(info) if shard.path == name), None) if info else None
