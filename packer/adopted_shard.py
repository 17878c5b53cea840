"""A shard made elsewhere: its index columns, a reader of it, and the class names on which several shards agree."""

from __future__ import annotations

import os
from collections import Counter as Counted
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from crc32c import crc32c

from cache.checksums import file_sha256
from cache.errors import FormatError, SourceError
from cache.messages import Counter, listed
from cache.stores import Files, Shards
from packer.columns import PartMeta, ShardColumns, load_meta, load_part, save_part
from packer.conversion.images import adopted_image
from packer.conversion.pack import Cancelled
from packer.formats import REGISTRY, format_named, format_of_file
from packer.formats.base import Located, LocateOptions, PackedSample, Payloads, Window
from packer.found_shards import FoundShard, FoundShards
from packer.sources.shards import ClassNames, classes_in_order, located_samples
from readers.headers import ImageHeader
from readers.index import ABSENT, MemoryColumns
from readers.layout import ShardInfo
from readers.pixels import PIXELS
from readers.reader import Reader
from readers.sample import NO_LABEL
from readers.strings import Strings
from readers.table import Table

__all__ = ["AdoptTask", "class_names", "key_prefix", "locate_shard", "make_keys_unique", "open_shard"]

_REPORT_SAMPLES = 256
_MOST_NAMES = 5


@dataclass(frozen=True, slots=True)
class AdoptTask:
    """One shard to locate: a worker writes its part."""

    shard: Path
    relative: str
    format: str
    options: LocateOptions
    part: Path
    checksums: bool

    @property
    def title(self) -> str:
        """Its name in the log."""
        return str(self.shard)


class _LocatedColumns:
    """The columns of located samples. The image comes first; another field is added with the first sample that has it.

    fields: those that any sample has.
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
    """Read the samples of one shard without an index: HDF5, TFRecord, tar or any other format that is registered.

    path: the shard, which stays where and as it is.
    image_key, label_key: what the shard calls them; None for the format's usual names.
    label_offset: is subtracted from the labels.
    fields: further field name -> key in the shard.

    The samples are located each time, and have no checksums: `packer.index` adopts shards permanently. Raises
    SourceError (no such file, no samples), FormatError (a broken shard, or of no known format) and NotFlatError (no
    flat byte ranges; `packer.convert` takes it).
    """
    shard = Path(path)
    if not shard.is_file():
        raise SourceError(f"{shard}: not a file; a packed set is opened with readers.open")
    options = LocateOptions(image_key, label_key, dict(fields or {}), label_offset)
    located = _LocatedColumns()
    for sample in located_samples(format_of_file(shard), shard, options):
        if sample.pixels is not None:
            raise FormatError(f"{shard}: holds raw pixels: open the set, or index the shard with  packer index")
        located.add(sample, {}, None)
    if not len(located.samples):
        raise SourceError(f"{shard}: has no samples")
    names = tuple(located.payloads)
    arrays = located.samples.arrays(located.payloads)
    wanted = ["label", *(f"{name}.{column}" for name in names for column in ("offset", "length"))]
    columns = MemoryColumns(
        Strings(arrays["key"], arrays["key.offset"]),
        {name: arrays[name] for name in wanted},
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
                    f"{path}: holds the label {sample.label} after subtracting the label offset; labels start at 0"
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
    """What comes, with a slash, before the keys of a shard (its path in the set) where several shards share keys."""
    path = PurePosixPath(shard)  # x.tfrecord-00000-of-00008 has no such suffix, and no two are alike without theirs
    return str(path.with_suffix("")) if path.suffix in REGISTRY.suffixes() else shard


def make_keys_unique(shards: Sequence[tuple[str, Path]]) -> bool:
    """Put the shard's name in front of every key of these (name, part) pairs if any key occurs twice.

    Returns whether that was needed. Raises FormatError where a key occurs twice in one shard.
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
    found: FoundShards, metas: Mapping[FoundShard, PartMeta], given: Sequence[str] | None, label_offset: int
) -> tuple[tuple[str, ...], list[str]]:
    """The names by label, () where there are none, and warnings.

    Raises FormatError where shards disagree, or there are fewer names than labels.
    """
    if given is not None:
        _check_enough(given, metas, "classes has")
        return tuple(given), []
    # With another offset, other names belong to the labels.
    known = found.known.classes if found.known and found.known.label_offset == label_offset else ()
    if known and not found.new:
        return known, []
    stated = _stated_names(found, metas)
    if known:
        for label, name in stated.items():
            if label < len(known) and name != known[label]:
                raise FormatError(
                    f"{found.new[0].path}: does not belong to this set: label {label} is {name!r} there and "
                    f"{known[label]!r} in the set ({listed(known, _MOST_NAMES)}); index it apart "
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
        hint = f", or say label_offset={first} if labels count from there"
    return (), [f"class names are left out: {fault}; give all names with classes=NAMES{hint}"]


def _stated_names(found: FoundShards, metas: Mapping[FoundShard, PartMeta]) -> dict[int, str]:
    """The class names that the shards state. Raises FormatError where they disagree."""
    stated: dict[int, tuple[str, FoundShard]] = {}
    for shard in found.shards:
        names = _names_in(shard, metas[shard])
        for label, name in names.items():
            other_name, other = stated.setdefault(label, (name, shard))
            if other_name != name:
                raise FormatError(
                    f"{other.path} and {shard.path} are of different sets: label {label} is {other_name!r} in one and "
                    f"{name!r} in the other ({listed(_names_in(other, metas[other]).values(), _MOST_NAMES)}; "
                    f"{listed(names.values(), _MOST_NAMES)}); index them apart, or give the names "
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
            f"{len(names)}; give all names, one a line and in the order of the labels, with classes=NAMES"
        )
