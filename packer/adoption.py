"""`packer.index`: make a set of existing shards without copying them, or rebuild an index.

    find      which shards, of which set, in which splits        nothing is written
    locate    every sample, its checksum and its image's header  into the working folder
    compare   the set that exists with the new one; a loss is refused unless it is accepted
    commit    indexes under unused names, links, and dataset.json, which alone makes them the set

Shards stay where and as they are; with another output directory, links lead to them. A kill or an error at any
moment leaves the old set whole, since its indexes are not touched before dataset.json names others; then they are
removed. An index whose bytes exist already is left where it is, so that a second run changes nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from cache.errors import FormatError, OutputError, SourceError
from cache.messages import Silent, Watcher, listed, plural, quoted
from packer import __version__
from packer.adopted_shard import AdoptTask, class_names, key_prefix, locate_shard, make_keys_unique
from packer.columns import PartMeta, column_files, is_index, remove_index, write_index
from packer.conversion.images import remarks_of
from packer.conversion.journal import Journal
from packer.documents import repair_documents, write_dataset_info
from packer.formats.base import LocateOptions
from packer.found_shards import FoundShard, FoundShards, find_shards, losses
from packer.output import Result, local_output, output_errors
from packer.sources.shards import field_kinds
from packer.workers import Workers, run_shards
from readers.history import EDITS
from readers.layout import AdoptedKeys, DatasetInfo, ShardInfo, SplitInfo
from readers.names import FieldName, SplitName

__all__ = ["IndexResult", "index"]

_RUN = os.urandom(4).hex()
_OF_CONVERSION = ("by", "plan", "payload_bytes", "left_out")


@dataclass(frozen=True, slots=True)
class IndexResult(Result):
    """What was adopted: splits maps names to samples; unreadable counts images whose header cannot be parsed."""

    output: Path
    format: str
    splits: dict[str, int]
    shards: int
    samples: int
    unreadable: int
    warnings: tuple[str, ...] = field(default=())


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
    checksums: bool = True,
    workers: int | None = None,
    engine: Executor | None = None,
    watcher: Watcher | None = None,
) -> IndexResult:
    """Adopt WebDataset tars, TFRecords of tf.train.Example or flat HDF5 files, or rebuild the index of a set.

    shards: files, or directories of them, or one such.
    output: where dataset.json and the index go; default the folder of the shards, otherwise links to them are made.
    split: of all shards; default read from each file name.
    image_key, label_key: what the shards call image and label; kept in dataset.json.
    fields: further field name -> key in the shards; kept in dataset.json.
    label_offset: subtracted from the labels.
    classes: names by label.
    accept_loss: continue where shards are missing, or the existing set would lose shards, samples, splits, classes or
    fields; otherwise that is an OutputError that says how many.
    checksums: write SHA256SUMS, for  sha256sum -c , unless the set was made without.
    workers: processes; default the CPUs this process may use.
    engine: where shards are located, if not in processes of this machine; see `packer.open_engine`.

    Raises FormatError (broken), NotFlatError (cannot be adopted), SourceError, BadNameError (of a split or field).
    """
    split = SplitName(split) if split is not None else None
    named: dict[str, str] = {FieldName(name): key for name, key in (fields or {}).items()}
    if isinstance(shards, (str, os.PathLike)):
        shards = (shards,)
    folder = local_output(output) if output is not None else None
    found = find_shards([Path(shard) for shard in shards], folder, split, image_key)
    keys = AdoptedKeys(image_key, label_key, named)
    adoption = _Adoption(found, keys, label_offset, accept_loss, checksums, watcher or Silent())
    return adoption.run(Workers(workers, engine), classes)


class _Adoption:
    def __init__(
        self,
        found: FoundShards,
        keys: AdoptedKeys,
        label_offset: int | None,
        accept_loss: bool,
        checksums: bool,
        watcher: Watcher,
    ) -> None:
        made = found.known.made.get("options", {}) if found.known else {}
        self._checksums = checksums and made.get("checksums") is not False
        self._found, self._accept_loss, self._watcher = found, accept_loss, watcher
        before = found.known.adopted if found.known else AdoptedKeys()
        self._keys = AdoptedKeys(
            keys.image_key or before.image_key, keys.label_key or before.label_key, {**before.fields, **keys.fields}
        )
        self._label_offset = _label_offset(found, label_offset)
        self._warnings: list[str] = []

    def run(self, workers: Workers, classes: Sequence[str] | None) -> IndexResult:
        self._compare_names()
        out = self._found.out
        is_new = not out.exists()
        try:
            with Journal(out, beside_shards=True) as journal:
                journal.empty()
                metas = self._locate(journal, workers)
                with output_errors():
                    info = self._describe(journal, metas, classes)
                    self._compare(info, given_classes=classes is not None)
                    _Commit(journal, self._found).run(info)
        finally:
            if is_new:
                with contextlib.suppress(OSError):
                    out.rmdir()  # empty if the run failed
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
    def _locate(self, journal: Journal, workers: Workers) -> dict[FoundShard, PartMeta]:
        """Locate every shard; its part goes into the working folder."""
        keys = self._keys
        options = LocateOptions(keys.image_key, keys.label_key, keys.fields, self._label_offset)
        shards = self._found.shards
        tasks = [
            AdoptTask(shard.path, shard.name, self._found.format, options, _part(journal, n), self._checksums)
            for n, shard in enumerate(shards)
        ]
        size = sum(shard.path.stat().st_size for shard in shards)
        metas = run_shards(locate_shard, tasks, len(tasks), workers, self._watcher, (0, size), folder=journal.folder)
        if not any(meta.shard.samples for meta in metas):
            count = plural(len(tasks), f"{self._found.format} shard")
            raise SourceError(f"{shards[0].path.parent}: {count} without a single sample, so no set is made")
        return dict(zip(shards, metas, strict=True))

    def _describe(
        self, journal: Journal, metas: Mapping[FoundShard, PartMeta], classes: Sequence[str] | None
    ) -> DatasetInfo:
        """The new set, with its indexes in the working folder under the names `<split>.index`."""
        names, warnings = class_names(self._found, metas, classes, self._label_offset)
        self._warnings += warnings
        kinds = self._fields(metas)
        known, parts = self._found.known, {shard: _part(journal, n) for n, shard in enumerate(self._found.shards)}
        splits = {}
        for name, shards in self._found.splits.items():
            if make_keys_unique([(key_prefix(shard.name), parts[shard]) for shard in shards]):
                self._warnings.append(f"{name}: shards share keys, so each key got its shard's name in front")
            infos = tuple(metas[shard].shard for shard in shards)
            counts = [info.samples for info in infos]
            split_parts = [parts[shard] for shard in shards]
            columns = write_index(journal.work, f"{name}.index", split_parts, counts, list(kinds), scratch=journal.work)
            root = known.splits[name].root if known and name in known.splits else ""
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
            history=known.history if known else (),
            retired=there.info.retired if (there := self._found.there) and there.info else (),
            documents=there.info.documents if there and there.info else (),
        )

    def _fields(self, metas: Mapping[FoundShard, PartMeta]) -> dict[str, str]:
        """Name -> kind, the image first: as the shards say, else as the set did, else as the name suggests."""
        kinds: dict[str, str] = dict(self._found.known.fields) if self._found.known else {}
        specs = {shard: shard.spec.fields for shard in self._found.shards if shard.spec}
        for shard, fields in specs.items():
            for name, kind in fields.items():
                if kinds.setdefault(name, kind) != kind:
                    raise FormatError(
                        f"{shard.path}: says that the field {name} is {kind!r}, other shards of the set that it is "
                        f"{kinds[name]!r}; index them apart"
                    )
        foreign = dict.fromkeys(itertools.chain.from_iterable(m.fields for s, m in metas.items() if s not in specs))
        if "image" not in foreign and not specs and any(meta.shard.samples for meta in metas.values()):
            raise FormatError(
                f"{self._found.shards[0].path}: no sample has an image; name it with image_key=KEY (there are: "
                f"{', '.join(sorted(foreign)) or 'no fields'})"
            )
        present = {name: None for fields in specs.values() for name in fields} | foreign
        ordered = [name for name in kinds if name in present] + [name for name in present if name not in kinds]
        if "image" in present or not specs:
            ordered = ["image", *(name for name in ordered if name != "image")]
        return {name: kinds.get(name) or field_kinds([name])[name] for name in ordered}

    # --- compare ------------------------------------------------------------------------------------------------
    def _compare_names(self) -> None:
        """Refuse before hours of reading what file names show: missing shards, and a damaged dataset.json."""
        there, known = self._found.there, self._found.known
        if known and (known.edited or known.separate):
            what = [EDITS[name] for name in known.edited] + [
                f"the field {name} is in shards of its own" for name in known.separate
            ]
            raise OutputError(
                f"{self._found.shards[0].path.parent}: the index of this set cannot be rebuilt from its shards, which "
                f"do not say all of it: {'; '.join(what)}. Take the index from a copy of the set, or make the set "
                f"again as its history says ( packer inspect )"
            )
        if there and there.info is None:
            self._refuse([f"what its dataset.json says, which cannot be read ({there.fault})"])
        if there and there.info:
            old = {shard.path: shard for shard in _shards_of(there.info)}
            splits = {
                name: SplitInfo(0, tuple(old[shard.name] for shard in shards if shard.name in old), "")
                for name, shards in self._found.splits.items()
            }
            classes = there.info.classes if self._found.origin is there else ()
            self._refuse(losses(there.info, replace(there.info, splits=splits, classes=classes)))
        count, some = self._found.missing()
        if count and not self._accept_loss:
            raise SourceError(
                f"{self._found.shards[0].path.parent}: {plural(count, 'shard')} of this set "
                f"{'is' if count == 1 else 'are'} missing by the names of the others ({listed(some)}); bring them "
                f"back, or pass accept_loss=True for a set without"
            )

    def _compare(self, info: DatasetInfo, given_classes: bool) -> None:
        """Refuse a loss of the set that exists."""
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
        """Refuse a loss of samples of an index whose dataset.json is gone."""
        lost = []
        for name, split in info.splits.items():
            samples = _samples_of(self._found.out / split.index)
            if samples > split.samples:
                count = plural(samples - split.samples, "sample")
                lost.append(f"{count} of {name}, whose index has {samples}, while the shards hold {split.samples}")
        self._refuse(lost)

    def _refuse(self, lost: Sequence[str]) -> None:
        if lost and not self._accept_loss:
            out = self._found.out
            raise OutputError(
                f"{out}: there is a set here, and it would lose {'; '.join(lost)}. Nothing was changed. Name all its "
                f"shards ( packer index {quoted(out)} ), bring "
                f"back what is missing or damaged, choose another output=DIR, "
                f"or pass accept_loss=True"
            )


class _Commit:
    """Move what is in the working folder into the set; the old set is whole until dataset.json is replaced."""

    def __init__(self, journal: Journal, found: FoundShards) -> None:
        self._place, self._work, self._found = journal.place, journal.work, found
        self._old = found.there.info if found.there else None
        self._used = [split.index for split in self._old.splits.values()] if self._old else []
        self._retired = [retired.path for retired in self._old.retired] if self._old else []

    def run(self, info: DatasetInfo) -> None:
        to_link = [shard for shard in self._found.shards if self._needs_link(shard, info)]
        splits = {name: self._moved(name, info) for name in info.splits}
        for number, shard in enumerate(to_link):
            self._work.link(f"{number}.link", shard.path.resolve())
            self._work.rename(f"{number}.link", shard.name, self._place)
        self._place.sync()
        made = info.made
        if not self._found.known or _shards_of(self._found.known) != _shards_of(
            info
        ):  # no longer those of a conversion
            made = {name: value for name, value in made.items() if name not in _OF_CONVERSION}
        new = replace(info, splits=splits, made=made)
        if self._old is None or replace(new, made=self._old.made).to_json() != self._old.to_json():
            write_dataset_info(self._place, new, scratch=self._work)
        else:
            repair_documents(self._place, scratch=self._work)
        self._remove_unused({split.index for split in splits.values()}, list(splits))

    def _moved(self, name: str, info: DatasetInfo) -> SplitInfo:
        """A split whose index is in the set."""
        return replace(info.splits[name], index=self._move_index(name, info))

    def _remove_unused(self, used: set[str], splits: Sequence[str]) -> None:
        """Remove indexes that dataset.json does not name: the old ones, and those of interrupted runs."""
        names = [name for split in splits for name in _index_names(split, 1)]
        left = [name for name in names if self._place.kind(name) == "folder" and is_index(self._place, name)]
        for name in dict.fromkeys([*self._used, *left]):
            if name not in used and name not in self._retired:
                with contextlib.suppress(OSError):  # an unused index does no harm
                    remove_index(self._place, name)

    def _move_index(self, split: str, info: DatasetInfo) -> str:
        """Move the index of a split into the set under a name that the old set does not use; returns the name.

        Where the old set has an index of the same bytes, that is left where it is.
        """
        names = _index_names(split, len(self._used) + len(self._retired) + 1)
        current = self._old.splits[split].index if self._old and split in self._old.splits else names[0]
        with contextlib.suppress(FormatError):
            if column_files(self._place.path / current, info.column_names) == info.splits[split].columns:
                return current
        name = next(name for name in names if name not in (*self._used, *self._retired))
        if not is_index(self._place, name):
            raise OutputError(f"{self._place.path / name}: holds other things than an index and is in the way; move it")
        remove_index(self._place, name)
        self._work.rename(f"{split}.index", name, self._place)
        return name

    def _needs_link(self, shard: FoundShard, info: DatasetInfo) -> bool:
        """Whether a link to a shard must be made. Raises OutputError where something else has its name."""
        target = self._place.path / shard.name
        if os.path.realpath(shard.path) == os.path.realpath(target):
            return False
        kind = self._place.kind(shard.name)
        if not kind:
            return True
        old = [known for known in _shards_of(self._old) if known.path == shard.name]
        if kind == "link" and old and old[0] in _shards_of(info):
            return True  # the shard was moved, and is unchanged
        raise OutputError(
            f"{target}: is in the way of a link to {shard.path}; choose another output=DIR, or move it elsewhere"
        )


def _part(journal: Journal, number: int) -> Path:
    return journal.folder / f"{_RUN}-{number}.part"  # not that of a worker which outlived another run


def _index_names(split: str, others: int) -> list[str]:
    """Names that the index of a split may have."""
    return [f"{split}.index", *(f"{split}.index-{number}" for number in range(2, others + 2))]


def _shards_of(info: DatasetInfo | None) -> list[ShardInfo]:
    return [shard for split in info.splits.values() for shard in split.shards] if info else []


def _label_offset(found: FoundShards, given: int | None) -> int:
    """What is subtracted from labels: as given, as the shards say, or as the set does that they belong to."""
    stated = {shard.spec.label_offset: shard.path for shard in found.shards if shard.spec}
    for offset, path in stated.items():
        if given is not None and offset != given:
            raise FormatError(f"{path}: says itself that its labels start at {offset}; leave out label_offset={given}")
    if len(stated) > 1:
        (first, path), (second, other), *_ = stated.items()
        raise FormatError(f"{path} has labels with the offset {first}, {other} with {second}; index them apart")
    if given is not None:
        return given
    return next(iter(stated), found.known.label_offset if found.known else 0)


def _samples_of(index: Path) -> int:
    """The samples of an index without a dataset.json; 0 where there is none that can be read."""
    try:
        return len(np.load(index / "label.npy", mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, TypeError, EOFError, SyntaxError):
        return 0
