"""`packer.index`: make a set of existing shards without copying them, or rebuild an index.

    find      the shards, their set and their splits               nothing is written
    locate    every sample, its checksum and its image's header    into the working folder
    compare   the existing set with the new one; a loss is refused unless it is accepted
    commit    indexes under unused names, links, and dataset.json, which alone makes them the set

Shards are neither moved nor changed; with another output directory, links lead to them. After a kill or an error the
old set is intact, since its indexes are removed only after dataset.json names the new ones. An index whose bytes exist
already is kept, so that a second run changes nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections import Counter as Counted
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePosixPath

import numpy as np
from crc32c import crc32c

from cache.checksums import file_sha256
from cache.errors import BadNameError, DatasetError, FormatError, NotFlatError, OutputError, SourceError
from cache.messages import Counter, Silent, Watcher, listed, plural, quoted
from cache.stores import Files, Shards
from packer import __version__
from packer.columns import (
    PartMeta,
    ShardColumns,
    column_files,
    is_index,
    load_meta,
    load_part,
    remove_index,
    save_part,
    write_index,
)
from packer.conversion.images import adopted_image, remarks_of
from packer.conversion.journal import Journal
from packer.conversion.pack import Cancelled
from packer.documents import has_checksums, repair_documents, write_dataset_info
from packer.formats import REGISTRY, format_named, format_of_file
from packer.formats.base import Format, Located, LocateOptions, PackedSample, Payloads, ShardSpec, Window
from packer.output import Result, local_output, output_errors
from packer.sources.shards import (
    ClassNames,
    classes_in_order,
    field_kinds,
    located_samples,
    missing_shards,
    split_of_name,
)
from packer.workers import Workers, run_shards
from readers.headers import ImageHeader
from readers.layout import (
    DATASET_FILE,
    EDITS,
    PIXELS,
    AdoptedKeys,
    DatasetInfo,
    FieldName,
    ShardInfo,
    ShardPath,
    SplitInfo,
    SplitName,
    read_dataset_info,
)
from readers.reader import Reader
from readers.table import ABSENT, NO_LABEL, MemoryColumns, Strings, Table

__all__ = [
    "AdoptTask",
    "IndexResult",
    "class_names",
    "index",
    "key_prefix",
    "locate_shard",
    "make_keys_unique",
    "open_shard",
]

_log = logging.getLogger(__name__)


# --- one shard: its index columns, a reader of it, and the class names stated by several shards ----------------------


_REPORT_SAMPLES = 256
_MOST_NAMES = 5


@dataclass(frozen=True, slots=True)
class AdoptTask:
    """One shard to locate; a worker writes its part."""

    shard: Path
    relative: str
    format: str
    options: LocateOptions
    part: Path
    checksums: bool

    @property
    def title(self) -> str:
        """The name of the task in the log."""
        return str(self.shard)


class _LocatedColumns:
    """The columns of located samples. The image comes first; other fields are added with the first sample that has one.

    fields: the fields of any sample.
    """

    def __init__(self) -> None:
        self.samples = ShardColumns(["image"])
        self.payloads = {"image": Payloads()}
        self.fields: dict[str, None] = {}
        self.classes = ClassNames()

    def add(self, sample: Located, checksums: Mapping[str, int], header: ImageHeader | None) -> None:
        for name in sample.ranges:
            self.fields[name] = None
            if name not in self.payloads:
                self.samples.add_field(name)
                self.payloads[name] = Payloads()
                for _ in range(len(self.samples)):
                    self.payloads[name].append(ABSENT, 0, 0)
        for name, payloads in self.payloads.items():
            payloads.append(*sample.ranges.get(name, (ABSENT, 0)), checksums.get(name, 0))
        names = tuple(sample.names.get(name, "") for name in self.payloads)
        self.samples.add(PackedSample(sample.key, sample.label, (), names, header))
        self.classes.add(sample)


def open_shard(
    path: str | os.PathLike[str],
    *,
    image_key: str | None = None,
    label_key: str | None = None,
    label_offset: int = 0,
    fields: Mapping[str, str] | None = None,
) -> Reader:
    """Read the samples of one shard without an index: HDF5, TFRecord, tar or any other registered format.

    path: the shard, which is neither moved nor changed.
    image_key, label_key: their names in the shard; None for the format's usual names.
    label_offset: subtracted from the labels.
    fields: further field name -> key in the shard.

    The samples are located on each call, and have no checksums; `packer.index` adopts shards permanently. Raises
    SourceError (no such file, no samples), FormatError (a broken shard, or an unknown format) and NotFlatError (no flat
    byte ranges; use `packer.convert`).
    """
    shard = Path(path)
    if not shard.is_file():
        raise SourceError(f"{shard}: not a file; open a packed set with readers.open")
    options = LocateOptions(image_key, label_key, dict(fields or {}), label_offset)
    located = _LocatedColumns()
    for sample in located_samples(format_of_file(shard), shard, options):
        if sample.pixels is not None:
            raise FormatError(f"{shard}: has raw pixels: open the set, or index the shard with  packer index")
        located.add(sample, {}, None)
    if not len(located.samples):
        raise SourceError(f"{shard}: has no samples")
    names = tuple(located.payloads)
    arrays = located.samples.arrays(located.payloads)
    names_needed = ["label", *(f"{name}.{column}" for name in names for column in ("offset", "length"))]
    columns = MemoryColumns(
        Strings(arrays["key"], arrays["key.offset"]),
        {name: arrays[name] for name in names_needed},
        names,
        located.classes.in_order()[0],
        names={name: Strings(arrays[f"{name}.name"], arrays[f"{name}.name.offset"]) for name in names},
        shard_bytes=[shard.stat().st_size],
        title=str(shard),
    )
    return Reader(Table(columns), Files(shard.parent, Shards((shard.name,), (shard.stat().st_size,))))


def locate_shard(task: AdoptTask, counter: Counter) -> PartMeta:
    """Locate one shard, checksum every sample, parse every image header, and write the part."""
    path = task.shard
    located = _LocatedColumns()
    unreadable = done_bytes = payload_bytes = 0
    max_label = NO_LABEL
    remarks: dict[str, tuple[int, str]] = {}
    with Window(path) as window:
        file_crc = window.checksum()
        for number, sample in enumerate(located_samples(format_named(task.format), path, task.options)):
            if sample.label < NO_LABEL:
                raise FormatError(
                    f"{path}: has the label {sample.label} after subtracting the label offset; labels start at 0"
                )
            header, checksums = None, {}
            for name, (offset, length) in sample.ranges.items():
                payload = window.read(offset, length)
                checksums[name] = crc32c(payload)
                done_bytes += length
                if name == "image" and sample.pixels is not None:
                    header = ImageHeader(PIXELS, *sample.pixels, 3, 0, 1)
                elif name == "image":
                    header, kinds = adopted_image(payload)
                    unreadable += header is None
                    for kind in kinds:
                        count, first = remarks.get(kind, (0, sample.key))
                        remarks[kind] = (count + 1, first)
            if sample.label == NO_LABEL and sample.class_name:
                count, first = remarks.get("unnumbered", (0, sample.key))
                remarks["unnumbered"] = (count + 1, first)
            located.add(sample, checksums, header)
            max_label = max(max_label, sample.label)
            if number % _REPORT_SAMPLES == 0:
                counter.report(_REPORT_SAMPLES, done_bytes)
                payload_bytes += done_bytes
                done_bytes = 0
                if counter.stopped():
                    raise Cancelled
        counter.report(0, done_bytes)
    meta = PartMeta(
        ShardInfo(
            task.relative, window.size, len(located.samples), file_crc, file_sha256(path) if task.checksums else ""
        ),
        payload_bytes + done_bytes,
        fields=tuple(located.fields),
        unreadable=unreadable,
        class_names={str(label): name for label, name in located.classes.names.items()},
        class_conflict=located.classes.conflict,
        max_label=max_label,
        remarks=remarks,
    )
    save_part(task.part, located.samples.arrays(located.payloads), meta)
    return load_meta(task.part)


def key_prefix(shard: str) -> str:
    """The prefix, before a slash, of the keys of a shard (its path in the set) if several shards share keys."""
    path = PurePosixPath(shard)  # x.tfrecord-00000-of-00008 has no such suffix, and stays unique with its own
    return str(path.with_suffix("")) if path.suffix in REGISTRY.suffixes() else shard


def make_keys_unique(shards: Sequence[tuple[str, Path]]) -> bool:
    """Prefix every key of these (name, part) pairs with the shard's name if any key occurs twice.

    Returns whether that was needed. Raises FormatError if a key occurs twice in one shard.
    """
    seen: set[str] = set()
    total = 0
    for name, path in shards:
        with load_part(path) as part:
            keys = list(Strings(part["key"], part["key.offset"]))
        if len(set(keys)) != len(keys):
            twice = next(key for key, count in Counted(keys).items() if count > 1)
            raise FormatError(f"{name}: the key {twice!r} occurs twice in this shard; repack it with  packer convert")
        seen.update(keys)
        total += len(keys)
    if len(seen) == total:
        return False
    for name, path in shards:
        with load_part(path) as part:
            arrays = {column: part[column] for column in part.files if column != "meta"}
        unique = Strings.of(f"{name}/{key}" for key in Strings(arrays["key"], arrays["key.offset"]))
        save_part(path, arrays | {"key": unique.blob, "key.offset": unique.offsets}, load_meta(path))
    return True


def class_names(
    located: FoundShards, metas: Mapping[FoundShard, PartMeta], requested: Sequence[str] | None, label_offset: int
) -> tuple[tuple[str, ...], list[str]]:
    """The class names by label, () if there are none, and warnings.

    Raises FormatError if shards disagree, or if there are fewer names than labels.
    """
    if requested is not None:
        _check_enough(requested, metas, "classes has")
        return tuple(requested), []
    # With another offset, the names belong to other labels.
    known = located.known.classes if located.known and located.known.label_offset == label_offset else ()
    if known and not located.new:
        return known, []
    stated = _stated_names(located, metas)
    if known:
        for label, name in stated.items():
            if label < len(known) and name != known[label]:
                raise FormatError(
                    f"{located.new[0].path}: does not belong to this set: label {label} is {name!r} there and "
                    f"{known[label]!r} in the set ({listed(known, _MOST_NAMES)}); index it separately "
                    f"with output=DIR, or give all names with classes=NAMES"
                )
        while len(known) in stated:
            known += (stated[len(known)],)
        _check_enough(known, metas, "the set has")
        return known, []
    names, fault = classes_in_order(stated)
    if not fault:
        if names:
            _check_enough(names, metas, "the shards have")
        return names, []
    first = min(stated)
    hint = ""
    if first > 0:
        fault += f", and the first is {first} ({stated[first]})"
        hint = f", or pass label_offset={first} if labels start there"
    return (), [f"class names are left out: {fault}; give all names with classes=NAMES{hint}"]


def _stated_names(located: FoundShards, metas: Mapping[FoundShard, PartMeta]) -> dict[int, str]:
    """The class names that the shards state. Raises FormatError if they disagree."""
    stated: dict[int, tuple[str, FoundShard]] = {}
    for shard in located.shards:
        names = _names_in(shard, metas[shard])
        for label, name in names.items():
            other_name, other = stated.setdefault(label, (name, shard))
            if other_name != name:
                raise FormatError(
                    f"{other.path} and {shard.path} are of different sets: label {label} is {other_name!r} in one and "
                    f"{name!r} in the other ({listed(_names_in(other, metas[other]).values(), _MOST_NAMES)}; "
                    f"{listed(names.values(), _MOST_NAMES)}); index them separately, or give the names "
                    f"with classes=NAMES"
                )
    return {label: name for label, (name, _) in stated.items()}


def _names_in(shard: FoundShard, meta: PartMeta) -> dict[int, str]:
    if shard.spec is not None:
        return dict(enumerate(shard.spec.classes))
    if meta.class_conflict:
        raise FormatError(f"{shard.path}: {meta.class_conflict}; give the names with classes=NAMES")
    return dict(sorted((int(label), name) for label, name in meta.class_names.items()))


def _check_enough(names: Sequence[str], metas: Mapping[FoundShard, PartMeta], who: str) -> None:
    shard, meta = max(metas.items(), key=lambda item: item[1].max_label)
    if meta.max_label >= len(names):
        raise FormatError(
            f"{shard.path}: has the label {meta.max_label}, so {meta.max_label + 1} class names are needed; {who} "
            f"{len(names)}; give all names, one per line and in the order of the labels, with classes=NAMES"
        )


_RUN = os.urandom(4).hex()
_OF_CONVERSION = ("by", "plan", "payload_bytes", "left_out")


@dataclass(frozen=True, slots=True)
class IndexResult(Result):
    """The adopted set. splits: samples by split name; unreadable: images whose header cannot be parsed."""

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
    checksums: bool = False,
    workers: int | None = None,
    engine: Executor | None = None,
    watcher: Watcher | None = None,
) -> IndexResult:
    """Adopt WebDataset tars, TFRecords of tf.train.Example or flat HDF5 files, or rebuild the index of a set.

    shards: a file or directory, or several.
    output: directory of dataset.json and the index; default the folder of the shards. Another folder gets links to
        the shards.
    split: of all shards; by default read from each file name.
    image_key, label_key: names of image and label in the shards; kept in dataset.json.
    fields: further field name -> key in the shards; kept in dataset.json.
    label_offset: subtracted from the labels.
    classes: class names in the order of the labels.
    accept_loss: continue if shards are missing, or if the existing set would lose shards, samples, splits, classes or
        fields; by default an OutputError states the loss.
    checksums: write SHA256SUMS, for  sha256sum -c ; a rebuilt index keeps it.
    workers: number of processes; default the CPUs that this process may use.
    engine: an executor to locate shards with, by default local processes; see `packer.open_engine`.

    Raises FormatError (broken), NotFlatError (cannot be adopted), SourceError, BadNameError (of a split or field).
    """
    split = SplitName(split) if split is not None else None
    named: dict[str, str] = {FieldName(name): key for name, key in (fields or {}).items()}
    if isinstance(shards, (str, os.PathLike)):
        shards = (shards,)
    folder = local_output(output) if output is not None else None
    located = find_shards([Path(shard) for shard in shards], folder, split, image_key)
    keys = AdoptedKeys(image_key, label_key, named)
    adoption = _Adoption(located, keys, label_offset, accept_loss, checksums, watcher or Silent())
    return adoption.run(Workers(workers, engine), classes)


class _Adoption:
    def __init__(
        self,
        located: FoundShards,
        keys: AdoptedKeys,
        label_offset: int | None,
        accept_loss: bool,
        checksums: bool,
        watcher: Watcher,
    ) -> None:
        self._checksums = checksums or (located.known is not None and has_checksums(located.known))
        self._found, self._accept_loss, self._watcher = located, accept_loss, watcher
        before = located.known.adopted if located.known else AdoptedKeys()
        self._keys = AdoptedKeys(
            keys.image_key or before.image_key, keys.label_key or before.label_key, {**before.fields, **keys.fields}
        )
        self._label_offset = _label_offset(located, label_offset)
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
                self._warnings.append(f"{name}: shards share keys, so each key was prefixed with its shard's name")
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
        """Name -> kind, the image first: from the shards, else from the set, else from the name."""
        kinds: dict[str, str] = dict(self._found.known.fields) if self._found.known else {}
        specs = {shard: shard.spec.fields for shard in self._found.shards if shard.spec}
        for shard, fields in specs.items():
            for name, kind in fields.items():
                if kinds.setdefault(name, kind) != kind:
                    raise FormatError(
                        f"{shard.path}: states that the field {name} is {kind!r}, but other shards of the set state "
                        f"{kinds[name]!r}; index them separately"
                    )
        foreign = dict.fromkeys(itertools.chain.from_iterable(m.fields for s, m in metas.items() if s not in specs))
        if "image" not in foreign and not specs and any(meta.shard.samples for meta in metas.values()):
            raise FormatError(
                f"{self._found.shards[0].path}: no sample has an image; name it with image_key=KEY (there are: "
                f"{', '.join(sorted(foreign)) or 'no fields'}); sets of arrays or audio are made by  packer convert"
            )
        present = {name: None for fields in specs.values() for name in fields} | foreign
        ordered = [name for name in kinds if name in present] + [name for name in present if name not in kinds]
        if "image" in present or not specs:
            ordered = ["image", *(name for name in ordered if name != "image")]
        return {name: kinds.get(name) or field_kinds([name])[name] for name in ordered}

    # --- compare ------------------------------------------------------------------------------------------------
    def _compare_names(self) -> None:
        """Refuse, before hours of reading, what file names show: missing shards, and a damaged dataset.json."""
        there, known = self._found.there, self._found.known
        if known and (known.edited or known.separate):
            edits = [EDITS[name] for name in known.edited] + [
                f"the field {name} is in separate shards" for name in known.separate
            ]
            raise OutputError(
                f"{self._found.shards[0].path.parent}: the index of this set cannot be rebuilt from its shards, which "
                f"do not contain all of it: {'; '.join(edits)}. Restore the index from a copy of the set, or make the "
                f"set again according to its history ( packer inspect )"
            )
        if there and there.info is None:
            self._refuse([f"the content of its dataset.json, which cannot be read ({there.fault})"])
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
                f"{'is' if count == 1 else 'are'} missing by the names of the others ({listed(some)}); restore them, "
                f"or pass accept_loss=True for a set without them"
            )

    def _compare(self, info: DatasetInfo, given_classes: bool) -> None:
        """Refuse a loss in the existing set."""
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
        """Refuse a loss of samples in an index without a dataset.json."""
        lost = []
        for name, split in info.splits.items():
            samples = _samples_of(self._found.out / split.index)
            if samples > split.samples:
                count = plural(samples - split.samples, "sample")
                lost.append(f"{count} of {name}, whose index has {samples}, while the shards have {split.samples}")
        self._refuse(lost)

    def _refuse(self, lost: Sequence[str]) -> None:
        if lost and not self._accept_loss:
            out = self._found.out
            raise OutputError(
                f"{out}: has a set, which would lose {'; '.join(lost)}. Nothing was changed. Name all its "
                f"shards ( packer index {quoted(out)} ), restore missing or damaged shards, choose another "
                f"output=DIR, or pass accept_loss=True"
            )


class _Commit:
    """Move the content of the working folder into the set; the old set is intact until dataset.json is replaced."""

    def __init__(self, journal: Journal, located: FoundShards) -> None:
        self._place, self._work, self._found = journal.place, journal.work, located
        self._old = located.there.info if located.there else None
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
        ):  # these facts of a conversion no longer apply
            made = {name: value for name, value in made.items() if name not in _OF_CONVERSION}
        new = replace(info, splits=splits, made=made)
        if self._old is None or replace(new, made=self._old.made).to_json() != self._old.to_json():
            write_dataset_info(self._place, new, scratch=self._work)
        else:
            repair_documents(self._place, scratch=self._work)
        self._remove_unused({split.index for split in splits.values()}, list(splits))

    def _moved(self, name: str, info: DatasetInfo) -> SplitInfo:
        """A split whose index has been moved into the set."""
        return replace(info.splits[name], index=self._move_index(name, info))

    def _remove_unused(self, used: set[str], splits: Sequence[str]) -> None:
        """Remove indexes that dataset.json does not name: old ones, and those of interrupted runs."""
        names = [name for split in splits for name in _index_names(split, 1)]
        left = [name for name in names if self._place.kind(name) == "folder" and is_index(self._place, name)]
        for name in dict.fromkeys([*self._used, *left]):
            if name not in used and name not in self._retired:
                with contextlib.suppress(OSError):  # an unused index does no harm
                    remove_index(self._place, name)

    def _move_index(self, split: str, info: DatasetInfo) -> str:
        """Move the index of a split into the set under a name that the old set does not use; returns the name.

        If the old set has an index with the same bytes, that one is kept instead.
        """
        names = _index_names(split, len(self._used) + len(self._retired) + 1)
        current = self._old.splits[split].index if self._old and split in self._old.splits else names[0]
        with contextlib.suppress(FormatError):
            if column_files(self._place.path / current, info.column_names) == info.splits[split].columns:
                return current
        name = next(name for name in names if name not in (*self._used, *self._retired))
        if not is_index(self._place, name):
            raise OutputError(f"{self._place.path / name}: has other files than an index, and is in the way; move it")
        remove_index(self._place, name)
        self._work.rename(f"{split}.index", name, self._place)
        return name

    def _needs_link(self, shard: FoundShard, info: DatasetInfo) -> bool:
        """Whether a link to a shard must be made. Raises OutputError if its name is taken."""
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
    return journal.folder / f"{_RUN}-{number}.part"  # never the part of a worker that outlived another run


def _index_names(split: str, others: int) -> list[str]:
    """Possible names for the index of a split."""
    return [f"{split}.index", *(f"{split}.index-{number}" for number in range(2, others + 2))]


def _shards_of(info: DatasetInfo | None) -> list[ShardInfo]:
    return [shard for split in info.splits.values() for shard in split.shards] if info else []


def _label_offset(located: FoundShards, requested: int | None) -> int:
    """The offset to subtract from labels: as given, or as stated by the shards, or by the set that they belong to."""
    stated = {shard.spec.label_offset: shard.path for shard in located.shards if shard.spec}
    for offset, path in stated.items():
        if requested is not None and offset != requested:
            raise FormatError(f"{path}: states that its labels start at {offset}; leave out label_offset={requested}")
    if len(stated) > 1:
        (first, path), (second, other), *_ = stated.items()
        raise FormatError(f"{path} has labels with the offset {first}, {other} with {second}; index them separately")
    if requested is not None:
        return requested
    return next(iter(stated), located.known.label_offset if located.known else 0)


def _samples_of(index: Path) -> int:
    """The number of samples of an index without a dataset.json; 0 if there is no readable one."""
    try:
        return len(np.load(index / "label.npy", mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, TypeError, EOFError, SyntaxError):
        return 0


# --- finding the shards of a set, and what a change would lose of the existing set ----------------------------------
@dataclass(frozen=True, eq=False)
class FoundShard:
    """A file, its path in the set (its path inside the set, else the name of its link), and its facts about the set."""

    path: Path
    name: str
    split: str
    spec: ShardSpec | None


@dataclass(frozen=True)
class FoundShards:
    """The shards in the order of the new set, and the directory of the new set.

    there: the set that is in `out` now.
    origin: the set that the shards belong to, in `out` or in the folder of a shard; it has facts that shards lack.
    """

    out: Path
    format: str
    shards: tuple[FoundShard, ...]
    there: ExistingSet | None
    origin: ExistingSet | None

    @cached_property
    def splits(self) -> dict[str, list[FoundShard]]:
        """The shards by split, with splits in the order of the original set."""
        names = [shard.split for shard in self.shards]
        info = self.known
        order = dict.fromkeys([*(name for name in (info.splits if info else ()) if name in names), *names])
        return {name: [shard for shard in self.shards if shard.split == name] for name in order}

    @property
    def known(self) -> DatasetInfo | None:
        """The description of the set that the shards belong to."""
        return self.origin.info if self.origin else None

    @property
    def new(self) -> list[FoundShard]:
        """Shards that are new to the set they belong to."""
        return [shard for shard in self.shards if self.origin and not self.origin.has(shard.path)]

    def missing(self) -> tuple[int, list[str]]:
        """The number of missing shards, as far as the names of the others show, and some of the missing names.

        0 if a set lists its shards; see `losses`.
        """
        if self.known:
            return 0, []
        count, some = missing_shards(shard.path.name for shard in self.shards)
        for split, shards in self.splits.items():
            total = max((shard.spec.shards for shard in shards if shard.spec), default=0)
            if total > len(shards) and not count:
                return total - len(shards), [f"{split} has {total} shards, here: {len(shards)}"]
        return count, some


def find_shards(paths: Sequence[Path], output: Path | None, split: str | None, image_key: str | None) -> FoundShards:
    """Find the shards in files and directories. Raises SourceError, FormatError, OutputError (duplicate names)."""
    files = list(dict.fromkeys(Path(os.path.abspath(path)) for path in _files(paths)))
    if not files:
        raise SourceError(
            f"{', '.join(map(str, paths))}: no shards found (files ending in {', '.join(REGISTRY.suffixes())})"
        )
    out = output if output is not None else _common_folder(paths, files)
    there = _find_set(out)
    candidates = [there, *(_find_set(folder) for folder in dict.fromkeys(file.parent for file in files))]
    origin = next((located for located in candidates if located and any(map(located.has, files))), None)
    if origin:
        place = {path: number for number, path in enumerate(origin.split_of)}
        files.sort(key=lambda file: place.get(os.path.realpath(file), len(place)))
    format_name = _one_format(files)
    if origin and origin.info:
        image_key = image_key or origin.info.adopted.image_key
    container, options = format_named(format_name), LocateOptions(image_key)
    shards = []
    for file in files:
        spec = None if image_key else _spec(format_name, file, origin)
        own = "" if spec else _own_split(file, container, options)
        shards.append(FoundShard(file, _path_in_set(file, out), split or _split_of(file, origin, spec, own), spec))
    _check_names(shards)
    located = FoundShards(out, format_name, tuple(shards), there, origin)
    splits = ", ".join(f"{name} {len(part):,}" for name, part in located.splits.items())
    _log.info("%s (%s); the index goes to %s", plural(len(shards), f"{format_name} shard"), splits, out)
    if origin:
        _log.info("they belong to the set in %s, whose dataset.json describes their content", origin.root)
    return located


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            known = _find_set(path)
            splits = known.info.splits.values() if known and known.info else ()
            yield from (path / s.path for part in splits for s in part.shards if os.path.lexists(path / s.path))
            retired = {path / old.path for old in known.info.retired} if known and known.info else set()
            candidates = (p for p in path.iterdir() if REGISTRY.of_name(p.name) and not p.is_dir())
            yield from sorted(p for p in candidates if p not in retired)
        elif path.is_file():
            yield path
        else:
            raise SourceError(f"{path}: no such file or directory")


def _one_format(paths: Sequence[Path]) -> str:
    names = {path: format_of_file(path).name for path in paths}
    first = names[paths[0]]
    for path, name in names.items():
        if name != first:
            raise SourceError(f"{path} is {name}, {paths[0]} is {first}; index one format at a time")
    return first


def _common_folder(paths: Sequence[Path], files: Sequence[Path]) -> Path:
    if len(paths) == 1 and paths[0].is_dir():
        return paths[0]
    folders = {path.parent for path in files}
    if len(folders) > 1:
        raise SourceError("the shards are in several folders; choose the folder of the index with output=DIR")
    return folders.pop()


def _spec(format_name: str, path: Path, origin: ExistingSet | None) -> ShardSpec | None:
    """A shard's facts about its set; None if they are damaged but the dataset.json of the set has them, too."""
    try:
        return format_named(format_name).describe(path)
    except FormatError:
        if origin and origin.has(path):
            return None
        raise


def _split_of(path: Path, origin: ExistingSet | None, spec: ShardSpec | None, own: str) -> str:
    if origin and origin.has(path):
        return origin.split_of[os.path.realpath(path)]
    try:
        return SplitName(spec.split if spec else own or split_of_name(path.name))
    except BadNameError as error:
        raise FormatError(f"{path}: {error}; or name it with split=NAME") from error


def _own_split(path: Path, container: Format, options: LocateOptions) -> str:
    """The split that a file states for its samples; "" if none."""
    first, *others = container.splits(path, options) or ("",)
    if others:
        raise NotFlatError(
            f"{path}: has the splits {', '.join((first, *others))}, but an indexed shard belongs to one; run  "
            f"packer convert {quoted(path)} --to hdf5|tfrecord|tar"
        )
    return first


def _path_in_set(path: Path, out: Path) -> str:
    folder, inside = Path(os.path.realpath(path.parent)), Path(os.path.realpath(out))
    try:
        return ShardPath((folder / path.name).relative_to(inside).as_posix())
    except BadNameError as error:
        raise SourceError(f"{path}: {error}; move or rename it") from error
    except ValueError:
        return ShardPath(path.name)


def _check_names(shards: Sequence[FoundShard]) -> None:
    """Raise OutputError if two links would have the same name."""
    by_name: dict[str, Path] = {}
    for shard in shards:
        other = by_name.setdefault(shard.name, shard.path)
        if other != shard.path:
            raise OutputError(
                f"{other} and {shard.path} have the same name, so one folder cannot hold links to both; rename one, "
                f"or index each folder separately"
            )


@dataclass(frozen=True)
class ExistingSet:
    """A directory with a dataset.json. info: None if it cannot be read, for the reason in `fault`."""

    root: Path
    info: DatasetInfo | None
    fault: str = ""

    @cached_property
    def split_of(self) -> dict[str, str]:
        """The split of each shard, by the shard's real path."""
        splits = self.info.splits.items() if self.info else ()
        return {os.path.realpath(self.root / shard.path): name for name, split in splits for shard in split.shards}

    def has(self, path: Path) -> bool:
        """Whether a file is one of the set's shards."""
        return os.path.realpath(path) in self.split_of


def _find_set(root: Path) -> ExistingSet | None:
    """The set in a directory; None if there is no dataset.json."""
    if not os.path.lexists(root / DATASET_FILE):
        return None
    try:
        return ExistingSet(root, read_dataset_info(root))
    except DatasetError as error:
        return ExistingSet(root, None, str(error))


def losses(old: DatasetInfo, new: DatasetInfo) -> list[str]:
    """A description of everything that `old` has and `new`, in the same directory, does not.

    Shards are compared by path. A shard with other bytes counts as lost: without its old checksums, damage could not be
    distinguished from a change.
    """
    now = {shard.path: shard for split in new.splits.values() for shard in split.shards}
    before = [shard for split in old.splits.values() for shard in split.shards]
    gone = [shard for shard in before if shard.path not in now]
    pairs = [(shard, now[shard.path]) for shard in before if shard.path in now]
    lost: list[str] = []
    if gone:
        samples = plural(sum(shard.samples for shard in gone), "sample")
        lost.append(f"{samples} in {plural(len(gone), 'shard')} ({listed([shard.path for shard in gone])})")
    for was, shard in pairs:
        if shard.samples < was.samples:
            samples = plural(was.samples - shard.samples, "sample")
            lost.append(f"{samples} of {was.path}, which had {was.samples} and has {shard.samples}")
    changed = [was.path for was, shard in pairs if (was.bytes, was.crc32c) != (shard.bytes, shard.crc32c)]
    if changed:
        lost.append(
            f"the checksums of {plural(len(changed), 'shard')} ({listed(changed)}), whose bytes are not those that "
            f"were indexed: damaged, or rewritten"
        )
    classes = [name for name in old.classes if name not in new.classes]
    for noun, names in (
        ("split", old.splits.keys() - {name for name, split in new.splits.items() if split.shards}),
        ("class", classes),
        ("field", old.fields.keys() - new.fields.keys()),
    ):
        if names:
            lost.append(f"{plural(len(names), noun)} ({listed(sorted(names))})")
    if not classes and old.classes != new.classes[: len(old.classes)]:
        lost.append("the order of the classes")
    return lost
