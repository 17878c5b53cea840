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
from cache.messages import Silent, Watcher, plural
from cache.node import usable_cpus
from packer.adopted_shard import AdoptTask, class_names, key_prefix, locate_shard, make_keys_unique
from packer.columns import PartMeta
from packer.conversion.images import remarks_of
from packer.conversion.journal import Journal
from packer.engines.local import run_shards
from packer.formats.base import LocateOptions
from packer.found_shards import FoundShard, FoundShards, find_shards, listed, losses
from packer.index_commit import IndexCommit
from packer.index_writer import write_index
from packer.output import local_output, output_errors
from packer.sources.shards import field_kinds
from packer.version import VERSION
from readers.layout import AdoptedKeys, DatasetInfo, SplitInfo
from readers.names import FieldName, SplitName

__all__ = ["IndexResult", "index"]


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
            made=made | {"indexed_by": f"packer {VERSION}"},
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
