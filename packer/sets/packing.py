"""Changes that write shards: append a source, pack a set again; `packer.sets.fields` adds a field.

All shards and indexes that are new become the set at once; see `packer.sets.change`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

import readers
from cache.errors import BadSampleError, DamagedSampleError, SourceError, StaleIndexError
from cache.messages import Silent, Watcher, parse_size, plural
from packer import __version__
from packer.comparison import check_columns
from packer.conversion.choice import select
from packer.conversion.ops import check_fields
from packer.conversion.plan import ConvertOptions, Reencode, check_listing, check_splits, make_plan
from packer.formats import format_named, writable_formats
from packer.formats.base import Arena, png_of
from packer.output import local_output, output_errors
from packer.sets.change import Change
from packer.sets.pieces import open_pieces
from packer.sets.save import SaveResult, operation, origin_of, write_table
from packer.sets.shards import Indexes, NewShards, options_like, pack, recorded_options, result_of
from packer.sets.table import SetTable, Step, table
from packer.sets.unify import (
    check_alike,
    check_targets,
    decode_of,
    renumbering,
    target_forms,
    unified_classes,
    unified_fields,
)
from packer.sources import Source, open_source
from packer.sources.base import FieldNames, NumberPlaces, SourceListing, SplitListing, stored_title
from packer.sources.layouts import ONE_CLASS
from packer.workers import Workers, without_gc
from readers.decode import decode_image
from readers.index import decode_name
from readers.layout import DATASET_FILE, AdoptedKeys, DatasetInfo, ShardInfo, read_dataset_info
from readers.pixels import PIXELS
from readers.sample import NO_LABEL, Buffer
from readers.strings import Names

__all__ = ["EXISTING", "append", "reshard"]


# ------------------------------------------------------------------------------
# A packed set as a source, so that every format converts to every other.


class PackedSource:
    """A directory with dataset.json. The index is verified at the start, every sample as it is read.

    raw: hand out raw pixels as they are; otherwise as PNG.
    """

    def __init__(self, root: str | os.PathLike[str], *, raw: bool = False) -> None:
        self.root, self._raw = Path(root), raw

    @property
    def title(self) -> str:
        return f"packed set {self.root}"

    def list(self, split: str | None) -> SourceListing:
        info = read_dataset_info(self.root)
        names = list(info.splits) if split is None else [info.split(split, self.root)[0]]
        fields = {name: "image" if kind == PIXELS else kind for name, kind in info.fields.items()}
        listing = SourceListing({}, fields, info.classes)
        for name in names:
            check_columns(self.root, info.splits[name])
            with readers.open(self.root, name) as reader:
                listing.splits[name] = _list_split(reader, list(info.splits).index(name))
        if not listing.splits:
            raise SourceError(f"{self.root}: has no splits")
        return listing

    @contextmanager
    def open(self) -> Iterator[PackedReader]:
        with ExitStack() as opened:
            yield PackedReader(self.root, opened, self._raw)

    def paths(self, listing: SourceListing) -> Iterator[Path]:
        yield self.root / DATASET_FILE
        for split in read_dataset_info(self.root).splits.values():
            yield from (self.root / shard.path for shard in split.shards)
            yield from (self.root / split.index).iterdir()


def _list_split(reader: readers.Reader, number: int) -> SplitListing:
    """Place of a sample: (number of the split, index of the sample)."""
    keys, table = Names.of(reader.keys), reader.table
    names = [Names.of(map(decode_name, table.columns.names(field), keys)) for field in reader.fields]
    sizes = sum((table.field_column(field, "length").astype(np.int64) for field in reader.fields), np.int64(0))
    return SplitListing(
        reader.split_info.root,
        keys,
        np.array(reader.labels),
        FieldNames(*names),
        sizes,
        NumberPlaces(np.stack((np.full(len(reader), number), np.arange(len(reader))), axis=1)),
        table.field_column(reader.fields[0], "crc32c").astype(np.int64),
    )


class PackedReader:
    """Reads samples of any split, and checks them."""

    def __init__(self, root: Path, opened: ExitStack, raw: bool) -> None:
        self._root, self._opened, self._raw = root, opened, raw
        self._splits = list(read_dataset_info(root).splits)
        self._readers: dict[int, readers.Reader] = {}

    def read(self, place: tuple[int, int], arena: Arena) -> Sequence[Buffer | None]:
        split, index = place
        reader = self._readers.get(split)
        try:
            if reader is None:
                opened = readers.open(self._root, self._splits[split], verify=True)
                reader = self._readers[split] = self._opened.enter_context(opened)
            found = [reader.read(index, field) if reader.has(index, field) else None for field in reader.fields]
        except DamagedSampleError as error:
            raise BadSampleError(str(error)) from error
        except StaleIndexError as error:
            raise SourceError(str(error)) from error
        kinds = reader.kinds
        return [
            png_of(decode_image(data)) if data is not None and kinds[field] == PIXELS and not self._raw else data
            for field, data in zip(reader.fields, found, strict=True)
        ]


EXISTING = ("raise", "skip")


def append(
    path: str | os.PathLike[str],
    source: str | os.PathLike[str] | Source,
    *,
    split: str | None = None,
    existing: str = "raise",
    on_error: str = "raise",
    shard_size: int | str | None = None,
    workers: int | None = None,
    engine: Executor | None = None,
    dry_run: bool = False,
    watcher: Watcher | None = None,
) -> SaveResult:
    """Add the samples of a source to a packed set, in shards of their own; the shards that are there stay as they are.

    path: the set.
    source: anything that `packer.convert` takes. The shards of a packed set that is like this one (`packer.sets.unify`)
        are linked, and no byte of them is written.
    split: the only split to take, or the name for a source without splits.
    existing: samples whose key the split has already are an error ("raise"), or left out ("skip").
    on_error: what to do with unreadable images ("raise", "skip").
    shard_size: bytes, or "1GiB"; default as in a conversion.
    workers: processes; default the CPUs this process may use.
    engine: where shards are packed, if not in processes of this machine; see `packer.open_engine`.
    dry_run: list and count only.

    Classes are unified by name: those of the set keep their numbers, new ones come behind them. The options that the
    set was packed with hold for the new samples, as dataset.json has them: re-encoding, ops, `where`, check. Another
    append to the same set waits. Raises SourceError, BadSampleError, OutputError, DatasetError, WorkerError.
    """
    if existing not in EXISTING or on_error not in EXISTING:
        raise ValueError(f"existing and on_error must be one of {', '.join(EXISTING)}, not {existing!r}, {on_error!r}")
    root, watcher, crew = Path(path), watcher or Silent(), Workers(workers, engine)
    info = read_dataset_info(root)
    options = recorded_options(root, info, replace(options_like(root, info, shard_size), on_error=on_error))
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
    check_fields(options.ops, listing.fields)
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
        new = pack(change, opened, appending.listing, options, lambda name: name, crew, watcher)
        check_targets({str(root): target_forms(root, change.info), opened.title: new.targets})
        change.commit(*appending.write(change, new))
        return appending.result(new)


def reshard(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    to: str | None = None,
    shard_size: int | str | None = None,
    shuffle: int | None = None,
    workers: int | None = None,
    engine: Executor | None = None,
    dry_run: bool = False,
    watcher: Watcher | None = None,
) -> SaveResult:
    """Pack the samples of a set again, into another set, or in its own place.

    output: a new directory; default the set itself, whose old shards stay until `packer.prune`, for its readers.
    to: the format, by default that of the set.
    shard_size: bytes, or "1GiB"; default as in a conversion.
    shuffle: seed of a random order.
    workers, engine: as of `append`.

    The bytes of the payloads are the same, but for raw pixels, which are PNG in other shards than HDF5. What no sample
    uses any more is left behind, and the shards say again what the index says. Raises as `append` does.
    """
    root, watcher, crew = Path(path), watcher or Silent(), Workers(workers, engine)
    target = root if output is None else local_output(output)
    info = read_dataset_info(root)
    wanted = to or (info.format if info.format in writable_formats() else "")
    if not wanted:
        raise ValueError(f"{info.format} shards cannot be written; choose a format with to=FORMAT")
    size = parse_size(shard_size) if isinstance(shard_size, str) else shard_size
    checksums = info.made.get("options", {}).get("checksums") is not False
    raw = Reencode("raw") if PIXELS in info.fields.values() and wanted == "hdf5" else None
    options = ConvertOptions(
        wanted, shard_bytes=size, shuffle=shuffle, decode=decode_of(info), checksums=checksums, reencode=raw
    )
    source = PackedSource(root, raw=raw is not None)
    if dry_run:
        return _resharded(root, info, options, source.list(None), None)
    with Change(target, watcher, new=output is not None) as change, output_errors(target):
        info, listing = read_dataset_info(root), source.list(None)
        new = pack(change, source, listing, options, lambda name: name, crew, watcher)
        fields = options.packed_fields(listing.fields)
        indexes = Indexes(change, fields, ())
        splits = {
            name: indexes.write(name, None, *new.of_split(change, name), root=part.root)
            for name, part in listing.splits.items()
        }
        made = origin_of(info, payload_bytes=sum(meta.payload_bytes for meta in new.metas))
        made = {name: value for name, value in made.items() if name != "indexed_by"} | {"by": f"packer {__version__}"}
        made["options"] = made["options"] | {"to": options.to}
        if PIXELS in info.fields.values() and raw is None:  # they are PNG now
            made["options"] |= {"reencode": asdict(Reencode("png"))}
        arguments = {"to": options.to} | ({} if shuffle is None else {"shuffle": shuffle})
        count = sum(map(len, listing.splits.values()))
        changed = DatasetInfo(options.to, fields, listing.classes, splits, 0, made, AdoptedKeys())
        history = (*info.history, operation("reshard", arguments, (count, count)))
        change.commit(replace(changed, history=history, documents=info.documents), new.moves | indexes.moves, {})
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
    """The table of a source that is a packed set, could be one with that at `root`, and was packed with its options."""
    if not isinstance(source, PackedSource):
        return None
    info = read_dataset_info(source.root)
    try:
        check_alike({str(root): read_dataset_info(root), str(source.root): info})
        same = recorded_options(source.root, info, options)
    except SourceError:
        return None
    is_packed_so = options.encoding is None or (same.reencode, same.ops) == (options.reencode, options.ops)
    return table(source.root) if is_packed_so and options.where in (None, same.where) else None


def _shown(options: ConvertOptions) -> str:
    """What samples are packed with besides the options of every set; "" where there is nothing."""
    reencode = options.reencode and [
        f"{name} {value}" for name, value in asdict(options.reencode).items() if value not in (None, "keep")
    ]
    ops = [repr(op) for op in options.ops]
    return ", ".join([*(reencode or ()), *ops, *([f"where {options.where}"] if options.where else ())])


def _append_set(root: Path, other: SetTable, existing: str, dry_run: bool, watcher: Watcher) -> SaveResult:
    """Link the shards of another set."""

    def joined() -> tuple[SetTable | None, int]:
        mine, there = table(root), {}
        for name in [name for name in mine.splits if name in other.splits]:
            known = frozenset(mine.keys(name))
            there[name] = np.flatnonzero([key in known for key in other.keys(name)])
            if len(there[name]) and existing == "raise":
                raise _existing(str(other.root), len(there[name]), name, root, other.keys(name)[int(there[name][0])])
        skipped = sum(map(len, there.values()))
        if skipped == len(other):
            return None, skipped
        more = mine.concat(other.without(there, "append", {}) if skipped else other)
        step = Step("append", {"source": stored_title(PackedSource(other.root))}, (len(mine), len(more)))
        return replace(more, steps=(step,)), skipped

    if dry_run:
        found, skipped = joined()
        return replace((found or table(root)).save(dry_run=True), operations=("append",), skipped=skipped)
    with Change(root, watcher) as change:
        found, skipped = joined()
        result = table(root).save(dry_run=True) if found is None else write_table(change, found, watcher)
        return replace(result, operations=("append",), skipped=skipped, dry_run=False)


def _existing(title: str, count: int, split: str, root: Path, key: str) -> SourceError:
    return SourceError(
        f"{title}: of the split {split}, {plural(count, 'key')} can be found in {root} already, such as {key!r}; leave "
        f"such samples out with existing='skip', or name another split with split=NAME"
    )


class _Append:
    """The samples of a listing as they are added to a set. Their labels are renumbered, in the listing."""

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
        """How many are added."""
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
        """Leave out samples whose keys are there already, or raise SourceError; how many were left out."""
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

    def write(
        self, change: Change, new: NewShards
    ) -> tuple[DatasetInfo, dict[str, str], dict[str, tuple[Path, ShardInfo]]]:
        """What `Change.commit` takes; the indexes are in its working folder."""
        info, indexes = self._info, Indexes(change, self._fields, self._info.separate)
        added = sum(meta.shard.samples for meta in new.metas)
        if not added:
            raise SourceError(f"{self._title}: no sample of it can be read, so none is appended")
        splits = dict(info.splits)
        for name in dict.fromkeys([*info.splits, *new.splits]):
            shards, parts = new.of_split(change, name)
            if name in info.splits and (parts or tuple(self._fields) != tuple(info.fields)):
                known, root = info.splits[name].shards, info.splits[name].root
                splits[name] = indexes.write(name, self._pieces[name], shards, parts, known=known, root=root)
            elif parts:
                splits[name] = indexes.write(name, None, shards, parts, root=self.listing.splits[name].root)
        made = origin_of(info, payload_bytes=self._payload_bytes(new))
        arguments = {"source": self._stored_title}
        changed = replace(info, fields=self._fields, classes=self._classes, splits=splits, made=made)
        history = (*info.history, operation("append", arguments, (self._before, self._before + added)))
        self._info = replace(changed, history=history)
        return self._info, new.moves | indexes.moves, {}

    def _payload_bytes(self, new: NewShards) -> int:
        tables = [piece.table for piece in self._pieces.values()]
        known = sum(int(table.field_column(name, "length").sum()) for table in tables for name in table.fields)
        return known + sum(meta.payload_bytes for meta in new.metas)

    def result(self, new: NewShards | None) -> SaveResult:
        found = result_of(self._root, "append", self._info, self._before, new)
        left_out = len(self.listing.left_out)
        if new is not None:
            return replace(
                found, skipped=self._skipped, left_out=left_out + sum(len(meta.left_out) for meta in new.metas)
            )
        counts = {name: part.samples for name, part in self._info.splits.items()}
        for name, part in self.listing.splits.items():
            counts[name] = counts.get(name, 0) + len(part)
        return replace(
            found,
            splits=counts,
            samples=sum(counts.values()),
            classes=len(self._classes),
            skipped=self._skipped,
            left_out=left_out,
        )
