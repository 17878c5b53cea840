"""Changes that write shards: append a source, repack a set, add a field.

All new shards and indexes become the set at once; see `packer.sets.change`.
"""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cache.errors import SourceError
from cache.messages import Silent, Watcher, plural, quoted
from packer import __version__
from packer.columns import PartColumns, PartMeta, load_part
from packer.conversion.choice import select
from packer.conversion.ops import check_fields, check_ops, recorded_op
from packer.conversion.options import ConvertOptions, Images, Reencode, Run, Shards, refuse_others, takes_old_names
from packer.conversion.pack import ShardTask, check_room, pack_shard
from packer.conversion.plan import Plan, check_listing, check_splits, make_plan
from packer.conversion.result import refuse_unlike
from packer.documents import has_checksums
from packer.formats import format_named, writable_formats
from packer.formats.base import Arena
from packer.output import local_output, output_errors
from packer.sets.change import Change
from packer.sets.pieces import (
    Piece,
    PieceColumns,
    check_alike,
    check_targets,
    decode_of,
    open_pieces,
    renumbering,
    target_forms,
    unified_classes,
    unified_fields,
)
from packer.sets.table import SaveResult, SetTable, Step, operation, origin_of, table, write_table
from packer.sources import Source, open_source
from packer.sources.base import (
    ListingBuilder,
    SomeSamples,
    SourceListing,
    SplitListing,
    check_names,
    place_name,
    stored_title,
)
from packer.sources.layouts import ONE_CLASS
from packer.sources.manifest import ManifestReader
from packer.sources.packed import PackedSource
from packer.sources.tables import RESERVED_FIELDS
from packer.workers import Workers, run_shards, without_gc
from readers.fields import KINDS, check_field
from readers.headers import SUFFIX
from readers.layout import PIXELS, AdoptedKeys, DatasetInfo, FieldName, ShardInfo, SplitInfo, read_dataset_info
from readers.table import ABSENT, NO_LABEL, Buffer, Strings
from readers.where import ERASED, parse_where

__all__ = ["EXISTING", "add_field", "append", "reshard"]


# --- new shards, packed by the workers of a conversion into the working folder of a change --------------------------


def options_like(root: Path, info: DatasetInfo, shards: Shards, decode: str = "") -> ConvertOptions:
    """The options of a conversion into shards like those of a set. Raises SourceError if that is impossible."""
    wrong = "" if info.format in writable_formats() else f"its {info.format} shards cannot be written"
    if info.adopted != AdoptedKeys():
        wrong = "its shards name things in their own way"
    if info.label_offset < 0:
        wrong = f"its labels have the offset {info.label_offset}"
    if wrong:
        raise SourceError(
            f"{root}: {wrong}, so nothing can be added to them; run  packer reshard {quoted(root)} -o DIR  first"
        )
    if PIXELS in info.fields.values():
        raise SourceError(
            f"{root}: its images are raw pixels, so nothing can be added to them; run  packer convert {quoted(root)} "
            f"--to {quoted(info.format)} -o DIR  first, which packs them as PNG"
        )
    shards = replace(shards, label_offset=info.label_offset, checksums=has_checksums(info))
    return ConvertOptions(info.format, images=Images(decode=decode or decode_of(info)), shards=shards)


def recorded_options(root: Path, info: DatasetInfo, options: ConvertOptions) -> ConvertOptions:
    """`options`, with those that the set was packed with: checks, re-encoding, ops, and the choice of samples.

    Raises SourceError if those in dataset.json cannot be read.
    """
    recorded = info.made.get("options")
    recorded = recorded if isinstance(recorded, dict) else {}
    where = recorded.get("where")
    try:
        if isinstance(where, str) and ERASED in where:
            raise ValueError(f"an erasure has removed the values of the expression {where}")
        images = replace(
            options.images,
            check=recorded.get("check", options.images.check),
            reencode=Reencode(**recorded["reencode"]) if recorded.get("reencode") else None,
            ops=tuple(map(recorded_op, recorded.get("ops") or ())),
        )
        check_ops(images.ops)
        return replace(options, where=None if where is None else parse_where(where).text, images=images)
    except (ValueError, TypeError) as error:
        raise SourceError(
            f"{root}: the options that it was packed with cannot be repeated ({error}); pack the source by itself with "
            f"packer convert, and append or merge that set"
        ) from error


def pack(
    change: Change,
    source: Source,
    listing: SourceListing,
    options: ConvertOptions,
    name_of: Callable[[str], str],
    workers: Workers,
    watcher: Watcher,
) -> NewShards:
    """Pack all samples of a listing into the working folder of a change.

    name_of: the name of the shards of a split.

    Shards get unused names: those of a second run are "train.2-…". Shards without samples are left out. Raises
    OutputError if the disk has not enough room, and the errors of a conversion.
    """
    container = format_named(options.to)
    plan = make_plan(listing, options, container)
    shards = []
    for split, run in itertools.groupby(plan.shards, lambda shard: shard.split):
        of_split = list(run)
        first = 2 if change.info is not None and name_of(split) in change.info.splits else 1
        for number in itertools.count(first):
            stem = name_of(split) + (f".{number}" if number > 1 else "")
            names = [container.shard_name(stem, i, len(of_split)) for i in range(len(of_split))]
            if not any(map(change.place.kind, names)):
                break
        shards += [shard._replace(name=name) for shard, name in zip(of_split, names, strict=True)]
    check_room(change.root, plan.source_bytes, options)
    tasks = (
        ShardTask.of(
            source,
            listing,
            options,
            change.root,
            (shard.name, plan.specs[shard.split], SomeSamples(listing.splits[shard.split], shard.indices)),
        )
        for shard in shards
    )
    size = sum(len(shard.indices) for shard in shards), plan.source_bytes
    folder = change.work.path
    metas = run_shards(pack_shard, tasks, len(shards), workers, watcher, size, source=source, folder=folder)
    refuse_unlike(source.title, metas)
    splits: dict[str, list[PartMeta]] = {}
    for shard, meta in zip(shards, metas, strict=True):
        if meta.shard.samples:
            splits.setdefault(shard.split, []).append(meta)
    new = NewShards(plan, splits)
    change.moves |= {meta.shard.path: meta.shard.path for meta in new.metas}
    return new


@dataclass(frozen=True, slots=True)
class NewShards:
    """Shards in a working folder: the facts of their parts, by split."""

    plan: Plan
    splits: Mapping[str, list[PartMeta]]

    @property
    def metas(self) -> list[PartMeta]:
        return [meta for metas in self.splits.values() for meta in metas]

    @property
    def targets(self) -> dict[str, str]:
        """Dtype and shape of labels that are not class numbers, by field."""
        return {name: form for meta in self.metas for name, form in meta.targets.items() if name != "image"}

    @property
    def written_bytes(self) -> int:
        return sum(meta.shard.bytes for meta in self.metas)

    def of_split(self, change: Change, split: str) -> tuple[list[ShardInfo], list[Path]]:
        """The shards of a split, and their parts."""
        shards = [meta.shard for meta in self.splits.get(split, ())]
        return shards, [change.work.path / f"{shard.path}.part" for shard in shards]


def extended_index(
    change: Change,
    split: str,
    piece: Piece | None,
    new: tuple[Sequence[ShardInfo], Sequence[Path]],
    info: DatasetInfo,
    *,
    root: str,
) -> SplitInfo:
    """Write the index of a split: its existing columns (`piece`, all of it), then those of new shards.

    new: the new shards and their parts; fewer parts if shards have one field only.
    info: the new description, with the fields of all samples; its split, if there is one, is in the old state.
    root: the folder of the source tree.
    """
    shards, parts = new
    known = info.splits[split].shards if piece is not None else ()
    columns: list[Path | PartColumns] = list(parts)
    counts = [shard.samples for shard in shards[: len(parts)]]
    numbers = list(range(len(known), len(known) + len(parts)))
    if piece is not None:
        columns.insert(0, PieceColumns(piece, np.arange(max(1, len(known))), info.separate))
        counts.insert(0, len(piece))
        numbers.insert(0, 0)
    everything = (*known, *shards)
    return change.write_index(
        split, columns, counts, info.fields, everything, root=root, separate=info.separate, numbers=numbers
    )


def result_of(root: Path, name: str, info: DatasetInfo, before: int, new: NewShards | None) -> SaveResult:
    """The result of a change that has written shards, or would write them."""
    shards = {shard.path: shard for split in info.splits.values() for shard in split.shards}
    return SaveResult(
        output=root,
        operations=(name,),
        splits={split: part.samples for split, part in info.splits.items()},
        classes=len(info.classes),
        samples=sum(part.samples for part in info.splits.values()),
        samples_before=before,
        shards=len(shards),
        shard_bytes=sum(shard.bytes for shard in shards.values()),
        payload_bytes=int(info.made.get("payload_bytes", 0)),
        written_bytes=new.written_bytes if new is not None else 0,
        dry_run=new is None,
    )


EXISTING = ("raise", "skip")


@takes_old_names
def append(
    path: str | os.PathLike[str],
    source: str | os.PathLike[str] | Source,
    *,
    split: str | None = None,
    existing: str = "raise",
    shards: Shards = Shards(),
    run: Run = Run(),
    dry_run: bool = False,
    watcher: Watcher | None = None,
) -> SaveResult:
    """Add the samples of a source to a packed set, in new shards; existing shards do not change.

    path: the set.
    source: any source of `packer.convert`. The shards of a packed set that is like this one (`packer.sets.pieces`) are
        linked, and no byte of them is written.
    split: the only split to take, or the name for a source without splits.
    existing: samples whose key exists in the split are an error ("raise"), or are left out ("skip").
    shards: size or samples of the new shards.
    run: workers or an engine, and the treatment of unreadable images ("raise", "skip").
    dry_run: list and count only.

    Classes are unified by name: those of the set keep their numbers, new ones follow. The options in dataset.json that
    the set was packed with are applied to the new samples: re-encoding, ops, `where`, check. Another append to the same
    set waits. Raises SourceError, BadSampleError, OutputError, DatasetError, WorkerError.
    """
    on_error = run.on_error
    if existing not in EXISTING or on_error not in EXISTING:
        raise ValueError(f"existing and on_error must be one of {', '.join(EXISTING)}, not {existing!r}, {on_error!r}")
    refuse_others(shards, "size", "samples")
    refuse_others(run, "workers", "engine", "on_error")
    root, watcher = Path(path), watcher or Silent()
    info = read_dataset_info(root)
    options = recorded_options(root, info, replace(options_like(root, info, shards), on_error=on_error))
    opened = open_source(source) if isinstance(source, (str, os.PathLike)) else source
    other = _alike(root, opened, options)
    if other is not None:
        return _append_set(root, other if split is None else other.of_split(split), existing, dry_run, watcher)
    watcher.note(f"listing {opened.title}")
    with without_gc():
        listing = opened.list(split)
    for warning in listing.warnings:
        if ONE_CLASS not in warning or not set(listing.classes) <= set(info.classes):
            watcher.note(f"warning: {warning}")
    for part in listing.splits.values():
        check_listing(part, opened.title)
    check_fields(options.images.ops, listing.fields)
    again = _shown(options)
    if again:
        watcher.note(f"packing as this set was packed: {again}")
    if dry_run:
        return _Append(root, info, opened, listing, existing, options.where).result(None)
    with Change(root, watcher) as change, output_errors(root):
        assert change.info is not None
        appending = _Append(root, change.info, opened, listing, existing, options.where)
        if not appending.samples:
            return replace(appending.result(None), dry_run=False)
        new = pack(change, opened, appending.listing, options, lambda name: name, run.crew, watcher)
        check_targets({str(root): target_forms(root, change.info), opened.title: new.targets})
        change.commit(appending.write(change, new))
        return appending.result(new)


@takes_old_names
def reshard(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    to: str | None = None,
    shards: Shards = Shards(),
    run: Run = Run(),
    dry_run: bool = False,
    watcher: Watcher | None = None,
) -> SaveResult:
    """Repack the samples of a set, into another set or in place.

    output: a new directory; default the set itself, whose old shards are kept for its readers until `packer.prune`.
    to: the format, by default that of the set.
    shards: size or samples of the new shards, and the seed of a random order.
    run: workers or an engine.

    Payloads keep their bytes, except raw pixels, which become PNG in shards other than HDF5. Unused bytes are left out,
    and the shards agree with the index again. Raises the errors of `append`.
    """
    refuse_others(shards, "size", "samples", "shuffle")
    refuse_others(run, "workers", "engine")
    root, watcher = Path(path), watcher or Silent()
    target = root if output is None else local_output(output)
    info = read_dataset_info(root)
    format = to or (info.format if info.format in writable_formats() else "")
    if not format:
        raise ValueError(f"{info.format} shards cannot be written; choose a format with to=FORMAT")
    raw = Reencode("raw") if PIXELS in info.fields.values() and format == "hdf5" else None
    images, shuffle = Images(decode=decode_of(info), reencode=raw), shards.shuffle
    options = ConvertOptions(format, images=images, shards=replace(shards, checksums=has_checksums(info)))
    source = PackedSource(root, raw=raw is not None)
    if dry_run:
        return _resharded(root, info, options, source.list(None), None)
    with Change(target, watcher, new=output is not None) as change, output_errors(target):
        info, listing = read_dataset_info(root), source.list(None)
        new = pack(change, source, listing, options, lambda name: name, run.crew, watcher)
        fields = options.packed_fields(listing.fields)
        made = origin_of(info, payload_bytes=sum(meta.payload_bytes for meta in new.metas))
        made = {name: value for name, value in made.items() if name != "indexed_by"} | {"by": f"packer {__version__}"}
        made["options"] = made["options"] | {"to": options.to}
        if PIXELS in info.fields.values() and raw is None:  # raw pixels have become PNG
            made["options"] |= {"reencode": asdict(Reencode("png"))}
        arguments = {"to": options.to} | ({} if shuffle is None else {"shuffle": shuffle})
        count = sum(map(len, listing.splits.values()))
        changed = DatasetInfo(options.to, fields, listing.classes, {}, 0, made, AdoptedKeys())
        splits = {
            name: extended_index(change, name, None, new.of_split(change, name), changed, root=part.root)
            for name, part in listing.splits.items()
        }
        history = (*info.history, operation("reshard", arguments, (count, count)))
        changed = replace(changed, splits=splits, history=history, documents=info.documents)
        change.commit(changed)
        return replace(_resharded(root, changed, options, listing, new), output=target)


def _resharded(
    root: Path, info: DatasetInfo, options: ConvertOptions, listing: SourceListing, new: NewShards | None
) -> SaveResult:
    if new is not None:
        return result_of(root, "reshard", info, sum(map(len, listing.splits.values())), new)
    size = sum(int(part.bytes.sum()) for part in listing.splits.values())
    shards = len(make_plan(listing, options, format_named(options.to)).shards)
    result = result_of(root, "reshard", info, sum(map(len, listing.splits.values())), None)
    return replace(result, shards=shards, shard_bytes=size, payload_bytes=size)


def _alike(root: Path, source: Source, options: ConvertOptions) -> SetTable | None:
    """The table of a source that is a packed set with the options of the set at `root`, and can be joined to it."""
    if not isinstance(source, PackedSource):
        return None
    info = read_dataset_info(source.root)
    try:
        check_alike({str(root): read_dataset_info(root), str(source.root): info})
        same = recorded_options(source.root, info, options)
    except SourceError:
        return None
    is_packed_so = options.images.encoding is None or (same.images.reencode, same.images.ops) == (
        options.images.reencode,
        options.images.ops,
    )
    return table(source.root) if is_packed_so and options.where in (None, same.where) else None


def _shown(options: ConvertOptions) -> str:
    """The options that samples are packed with beyond the defaults; "" if there are none."""
    reencode = options.images.reencode and [
        f"{name} {value}" for name, value in asdict(options.images.reencode).items() if value not in (None, "keep")
    ]
    ops = [repr(op) for op in options.images.ops]
    return ", ".join([*(reencode or ()), *ops, *([f"where {options.where}"] if options.where else ())])


def _append_set(root: Path, other: SetTable, existing: str, dry_run: bool, watcher: Watcher) -> SaveResult:
    """Link the shards of another set."""

    def joined() -> tuple[SetTable | None, int]:
        old, there = table(root), {}
        for name in [name for name in old.splits if name in other.splits]:
            known = frozenset(old.keys(name))
            there[name] = np.flatnonzero([key in known for key in other.keys(name)])
            if len(there[name]) and existing == "raise":
                raise _existing(str(other.root), len(there[name]), name, root, other.keys(name)[int(there[name][0])])
        skipped = sum(map(len, there.values()))
        if skipped == len(other):
            return None, skipped
        more = old.concat(other.without(there, "append", {}) if skipped else other)
        step = Step("append", {"source": stored_title(PackedSource(other.root))}, (len(old), len(more)))
        return replace(more, steps=(step,)), skipped

    if dry_run:
        extended, skipped = joined()
        return replace((extended or table(root)).save(dry_run=True), operations=("append",), skipped=skipped)
    with Change(root, watcher) as change:
        extended, skipped = joined()
        result = table(root).save(dry_run=True) if extended is None else write_table(change, extended, watcher)
        return replace(result, operations=("append",), skipped=skipped, dry_run=False)


def _existing(title: str, count: int, split: str, root: Path, key: str) -> SourceError:
    return SourceError(
        f"{title}: {plural(count, 'key')} of the split {split} exist in {root} already, such as {key!r}; leave "
        f"such samples out with existing='skip', or name another split with split=NAME"
    )


class _Append:
    """The samples of a listing, to be added to a set. Their labels are renumbered, in the listing."""

    def __init__(
        self,
        root: Path,
        info: DatasetInfo,
        source: Source,
        listing: SourceListing,
        existing: str,
        where: str | None,
    ) -> None:
        self._root, self._info, self._title, self.listing = root, info, source.title, listing
        self._stored_title = stored_title(source)
        self._pieces = {name: piece for name, (piece,) in open_pieces(root, info).items()}
        self._before = sum(split.samples for split in info.splits.values())
        self._fields = unified_fields({str(root): info.fields, source.title: listing.fields})
        self._classes = self._unify()
        if where is not None:
            self.listing = select(self.listing, where)
        self._skipped = self._compare_keys(existing)

    @property
    def samples(self) -> int:
        """The number of samples to add."""
        return sum(map(len, self.listing.splits.values()))

    def _unify(self) -> tuple[str, ...]:
        parts, listing = self.listing.splits.values(), self.listing
        new = max((int(part.labels.max(initial=NO_LABEL)) for part in parts), default=NO_LABEL)
        old = max((int(p.current_labels.max(initial=NO_LABEL)) for p in self._pieces.values()), default=NO_LABEL)
        known = [(str(self._root), self._info.classes, old), (self._title, listing.classes, new)]
        classes = unified_classes(known)
        if listing.classes:
            numbers = renumbering(listing.classes, classes)
            for part in parts:
                part.labels = numbers[part.labels]
        listing.classes = classes
        return classes

    def _compare_keys(self, existing: str) -> int:
        """Leave out samples with existing keys, or raise SourceError; returns how many were left out."""
        skipped = 0
        for name, part in self.listing.splits.items():
            if name not in self._pieces:
                continue
            known = frozenset(self._pieces[name].keys)
            is_new = np.fromiter((key not in known for key in part.keys), np.bool_, len(part))
            there = np.flatnonzero(~is_new)
            if len(there) and existing == "raise":
                raise _existing(self._title, len(there), name, self._root, part.keys[int(there[0])])
            if len(there):
                self.listing.splits[name] = part.take(np.flatnonzero(is_new))
                skipped += len(there)
        self.listing.splits = {name: part for name, part in self.listing.splits.items() if len(part)}
        check_splits([*self._pieces, *self.listing.splits], self._title)
        return skipped

    def write(self, change: Change, new: NewShards) -> DatasetInfo:
        """Write the indexes; returns the new description."""
        info = replace(self._info, fields=self._fields, classes=self._classes)
        added = sum(meta.shard.samples for meta in new.metas)
        if not added:
            raise SourceError(f"{self._title}: none of its samples can be read, so nothing is appended")
        splits = dict(info.splits)
        for name in dict.fromkeys([*info.splits, *new.splits]):
            of_split, old = new.of_split(change, name), info.splits.get(name)
            if old is not None and (of_split[1] or tuple(info.fields) != tuple(self._info.fields)):
                splits[name] = extended_index(change, name, self._pieces[name], of_split, info, root=old.root)
            elif of_split[1]:
                root = self.listing.splits[name].root
                splits[name] = extended_index(change, name, None, of_split, info, root=root)
        made = origin_of(info, payload_bytes=self._payload_bytes(new))
        arguments = {"source": self._stored_title}
        history = (*info.history, operation("append", arguments, (self._before, self._before + added)))
        self._info = replace(info, splits=splits, made=made, history=history)
        return self._info

    def _payload_bytes(self, new: NewShards) -> int:
        tables = [piece.table for piece in self._pieces.values()]
        known = sum(int(table.field_column(name, "length").sum()) for table in tables for name in table.fields)
        return known + sum(meta.payload_bytes for meta in new.metas)

    def result(self, new: NewShards | None) -> SaveResult:
        changed = result_of(self._root, "append", self._info, self._before, new)
        left_out = len(self.listing.left_out)
        if new is not None:
            return replace(
                changed, skipped=self._skipped, left_out=left_out + sum(len(meta.left_out) for meta in new.metas)
            )
        counts = {name: part.samples for name, part in self._info.splits.items()}
        for name, part in self.listing.splits.items():
            counts[name] = counts.get(name, 0) + len(part)
        return replace(
            changed,
            splits=counts,
            samples=sum(counts.values()),
            classes=len(self._classes),
            skipped=self._skipped,
            left_out=left_out,
        )


# --- add a field ----------------------------------------------------------------------------------------------------


_BY_NAME = {"mask": "mask", "boxes": "boxes", "points": "points", "caption": "text", "json": "json"}
_BY_SUFFIX = {"npy": "array", "txt": "text", "json": "json"}
_IMAGES = frozenset(SUFFIX.values()) | {"jpeg", "tiff"}


@takes_old_names
def add_field(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    name: str,
    *,
    kind: str | None = None,
    shards: Shards = Shards(),
    run: Run = Run(),
    dry_run: bool = False,
    watcher: Watcher | None = None,
) -> SaveResult:
    """Add a field to a set, from files whose names without suffix are keys.

    name: of the field, which must be new.
    kind: "mask", "boxes", "points", "array", "text", "json", "image" or "file"; by default from the name of the field
        or the suffix of the files.
    shards: size or samples of the new shards.
    run: workers or an engine.

    Samples without a file lack the field. Raises SourceError if no file belongs to a sample, BadSampleError for a file
    of another kind, and the errors of `packer.append`.
    """
    refuse_others(shards, "size", "samples")
    refuse_others(run, "workers", "engine")
    root, watcher = Path(path), watcher or Silent()
    field: str = FieldName(name)
    if field in RESERVED_FIELDS or field != field.lower():
        raise ValueError(f"{name!r} cannot be the name of a new field: containers use it, or need lower case")
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
    files = _Files(Path(folder), field, _hidden_names(root))
    files.kind = kind or _kind_of(field, files.names)
    if dry_run:
        return _Addition(root, read_dataset_info(root), field, files).result(None)
    with Change(root, watcher) as change, output_errors(root):
        assert change.info is not None
        options = options_like(root, change.info, shards, decode="none")
        addition = _Addition(root, change.info, field, files)
        new = pack(change, files, addition.listing, options, lambda split: f"{split}.{field}", run.crew, watcher)
        change.commit(addition.write(change, new))
        return addition.result(new)


def _kind_of(field: str, names: Sequence[str]) -> str:
    suffix = names[0].rpartition(".")[2].lower()
    return _BY_NAME.get(field) or _BY_SUFFIX.get(suffix) or ("image" if suffix in _IMAGES else "file")


def _hidden_names(root: Path) -> frozenset[str]:
    """The components of the keys of a set that begin with a dot."""
    pieces = open_pieces(root, read_dataset_info(root))
    keys = (key for (piece,) in pieces.values() for key in piece.keys if key[:1] == "." or "/." in key)
    return frozenset(part for key in keys for part in key.split("/") if part[:1] == ".")


class _Files:
    """The files of a folder, by their paths without suffix, as a source for `pack`."""

    kind = "file"

    def __init__(self, root: Path, field: str, hidden: frozenset[str]) -> None:
        """hidden: components of keys that begin with a dot; other such files and folders are skipped."""
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
        known = self._by_stem.setdefault(stem, (name, status.st_size, status.st_mtime_ns))
        if known[0] != name:
            raise SourceError(f"{self.root}: {known[0]} and {name} would both belong to the sample {stem!r}; keep one")

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
        if self._kind == "json":  # other kinds are checked when they are packed
            check_field(self._kind, payload)
        return [payload]


class _Addition:
    """The file of each sample, and the columns of the field."""

    def __init__(self, root: Path, info: DatasetInfo, field: str, files: _Files) -> None:
        if field in info.fields:
            raise SourceError(f"{root}: has a field {field!r} already; choose another name")
        self._root, self._before, self._field, self._files = root, info, field, files
        fields = {**info.fields, field: files.kind}
        separate = tuple(name for name in fields if name in (*info.separate, field))
        self.info = replace(info, fields=fields, separate=separate)
        self._pieces = {name: piece for name, (piece,) in open_pieces(root, info).items()}
        self._samples: dict[str, npt.NDArray[np.int64]] = {}  # numbers of samples with a file, by split
        self._used: set[str] = set()
        splits = {name: self._list(name) for name in info.splits}
        self.listing = SourceListing({name: part for name, part in splits.items() if len(part)}, {field: files.kind})
        if not self.listing.splits:
            key = next((piece.keys[0] for piece in self._pieces.values() if len(piece)), "")
            raise SourceError(
                f"{files.root}: none of {plural(len(files), 'file')} belongs to a sample of {root}, such as "
                f"{files.names[0]!r}; expected the key of a sample and any suffix, such as {key}.png"
            )

    def _list(self, split: str) -> SplitListing:
        builder, samples = ListingBuilder(), []
        for number, key in enumerate(self._pieces[split].keys):
            file = self._files.of_key(key, (self.info.splits[split].root, split))
            if file is not None:
                name, size, stamp = file
                builder.add((name,), ((name, size),), size, stamp, key=key, label=NO_LABEL)
                samples.append(number)
                self._used.add(name)
        self._samples[split] = np.array(samples, np.int64)
        return builder.build(self.info.splits[split].root)

    def write(self, change: Change, new: NewShards) -> DatasetInfo:
        """Write all indexes; returns the new description."""
        splits = {}
        for name, old in self.info.splits.items():
            shards, parts = new.of_split(change, name)
            piece = replace(self._pieces[name], extra=self._columns(name, parts, len(old.shards)))
            shards = [replace(shard, samples=0) for shard in shards]
            splits[name] = extended_index(change, name, piece, (shards, ()), self.info, root=old.root)
        samples = sum(split.samples for split in splits.values())
        arguments = {"name": self._field, "kind": self._files.kind, "source": place_name(self._files.root)}
        added = sum(meta.payload_bytes for meta in new.metas)
        made = origin_of(self._before, payload_bytes=int(self._before.made.get("payload_bytes", 0)) + added)
        history = (*self._before.history, operation("add-field", arguments, (samples, samples)))
        self.info = replace(self.info, splits=splits, made=made, history=history)
        return self.info

    def _columns(self, split: str, parts: Sequence[Path], first: int) -> Mapping[str, npt.NDArray[Any]]:
        """The columns of the field, for all samples of a split. first: the number of its first shard."""
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
        changed = result_of(self._root, "add-field", self.info, before, new)
        return replace(
            changed, with_field=sum(map(len, self._samples.values())), unmatched=len(self._files) - len(self._used)
        )
