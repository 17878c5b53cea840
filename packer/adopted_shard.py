"""What the shards to adopt hold: their index columns, made by workers, and the class names that they state together."""

from __future__ import annotations

from collections import Counter as Counted
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from crc32c import crc32c

from cache.errors import FormatError
from cache.messages import Counter
from packer.columns import PartMeta, ShardColumns, load_meta, load_part, save_part, string_columns
from packer.conversion.images import adopted_image
from packer.formats import REGISTRY, format_named
from packer.formats.base import Located, LocateOptions, PackedSample, Payloads
from packer.formats.files import Window
from packer.found_shards import FoundShard, FoundShards
from packer.sources.shards import ClassNames, classes_in_order, field_kinds, located_samples
from readers.index import ABSENT
from readers.layout import ShardInfo
from readers.sample import NO_LABEL
from readers.strings import Strings

__all__ = ["AdoptTask", "class_names", "key_prefix", "locate_shard", "make_keys_unique"]

_REPORT_SAMPLES = 256


@dataclass(frozen=True, slots=True)
class AdoptTask:
    """One shard to locate: a worker writes its part."""

    shard: Path
    relative: str
    format: str
    options: LocateOptions
    part: Path


def locate_shard(task: AdoptTask, counter: Counter) -> PartMeta:
    """Locate one shard, checksum every sample, parse every image header, and write the part."""
    path = task.shard
    located = list(located_samples(format_named(task.format), path, task.options))
    found = dict.fromkeys(name for sample in located for name in sample.ranges)
    fields = list(field_kinds(found))
    columns = ShardColumns(fields)
    payloads = {name: Payloads() for name in fields}
    unreadable = done = 0
    classes = ClassNames()
    remarks: dict[str, tuple[int, str]] = {}
    with Window(path) as window:
        file_crc = window.checksum()
        for number, sample in enumerate(located):
            header = None
            for name in fields:
                offset, length = sample.ranges.get(name, (ABSENT, 0))
                payload = window.read(offset, length) if offset != ABSENT else b""
                payloads[name].append(offset, length, crc32c(payload))
                done += length
                if name == "image" and offset != ABSENT:
                    header, kinds = adopted_image(payload)
                    unreadable += header is None
                    for kind in kinds:
                        before, first = remarks.get(kind, (0, sample.key))
                        remarks[kind] = (before + 1, first)
            classes.add(sample)
            names = tuple(sample.names.get(name, "") for name in fields)
            columns.add(PackedSample(sample.key, sample.label, (), names, header))
            if number % _REPORT_SAMPLES == 0:
                counter.report(_REPORT_SAMPLES, done)
                done = 0
        counter.report(0, done)
        info = ShardInfo(task.relative, window.size, len(located), file_crc)
    _check_labels(located, path)
    size = sum(sum(column.length) for column in payloads.values())
    max_label = max((sample.label for sample in located), default=NO_LABEL)
    class_names = {str(label): name for label, name in classes.names.items()}
    meta = PartMeta(info, size, (), tuple(found), unreadable, class_names, classes.conflict, max_label, remarks)
    save_part(task.part, columns.arrays(payloads), meta)
    return load_meta(task.part)


def key_prefix(shard: str) -> str:
    """What stands, with a slash, before the keys of a shard (its path in the set) where several shards share keys."""
    path = PurePosixPath(shard)  # x.tfrecord-00000-of-00008 has no such suffix, and no two are alike without theirs
    return str(path.with_suffix("")) if path.suffix in REGISTRY.suffixes() else shard


def make_keys_unique(shards: Sequence[tuple[str, Path]]) -> bool:
    """Put the shard's name in front of every key of these (name, part) pairs if any key occurs twice.

    Says whether that was needed. Raises FormatError where a key occurs twice in one shard.
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
        keys = [f"{name}/{key}" for key in Strings(arrays["key"], arrays["key.offset"])]
        save_part(path, arrays | string_columns("key", keys), load_meta(path))
    return True


def _check_labels(located: Sequence[Located], path: Path) -> None:
    lowest = min((sample.label for sample in located), default=0)
    if lowest < NO_LABEL:
        raise FormatError(f"{path}: holds the label {lowest} after subtracting the label offset; labels start at 0")


_NAMED = 5


def class_names(
    found: FoundShards, metas: Mapping[FoundShard, PartMeta], given: Sequence[str] | None, label_offset: int
) -> tuple[tuple[str, ...], list[str]]:
    """The names by label, () where there are none, and warnings.

    Raises FormatError where shards disagree, or there are fewer names than labels.
    """
    if given is not None:
        _check_enough(given, metas, "--classes has")
        return tuple(given), []
    # With another offset, other names belong to the labels.
    known = found.known.classes if found.known and found.known.label_offset == label_offset else ()
    if known and not found.new:
        return known, []
    told = _told(found, metas)
    if known:
        for label, name in told.items():
            if label < len(known) and name != known[label]:
                raise FormatError(
                    f"{found.new[0].path}: does not belong to this set: label {label} is {name!r} there and "
                    f"{known[label]!r} in the set ({_shown(known)}); index it apart with -o, or give all names with "
                    f"--classes"
                )
        known += tuple(_in_a_row(told, len(known)))
        _check_enough(known, metas, "the set has")
        return known, []
    names, wrong = classes_in_order(told)
    if not wrong:
        if names:
            _check_enough(names, metas, "the shards have")
        return names, []
    first = min(told)
    hint = f", or say --label-offset {first} if labels count from there" if first > 0 else ""
    if first > 0:
        wrong += f", and the first is {first} ({told[first]})"
    return (), [f"class names are left out: {wrong}; give all names with --classes{hint}"]


def _told(found: FoundShards, metas: Mapping[FoundShard, PartMeta]) -> dict[int, str]:
    """What the shards say; they must not disagree."""
    told: dict[int, tuple[str, FoundShard]] = {}
    for shard in found.shards:
        names = _names_of(shard, metas[shard])
        for label, name in names.items():
            other_name, other = told.setdefault(label, (name, shard))
            if other_name != name:
                raise FormatError(
                    f"{other.path} and {shard.path} are of different sets: label {label} is {other_name!r} in one and "
                    f"{name!r} in the other ({_shown(list(_names_of(other, metas[other]).values()))}; "
                    f"{_shown(list(names.values()))}); index them apart, or give the names with --classes"
                )
    return {label: name for label, (name, _) in told.items()}


def _names_of(shard: FoundShard, meta: PartMeta) -> dict[int, str]:
    if shard.spec is not None:
        return dict(enumerate(shard.spec.classes))
    if meta.class_conflict:
        raise FormatError(f"{shard.path}: {meta.class_conflict}; give the names with --classes")
    return {int(label): name for label, name in sorted(meta.class_names.items(), key=lambda item: int(item[0]))}


def _in_a_row(names: Mapping[int, str], first: int) -> list[str]:
    found = []
    while first in names:
        found.append(names[first])
        first += 1
    return found


def _check_enough(names: Sequence[str], metas: Mapping[FoundShard, PartMeta], who: str) -> None:
    shard, meta = max(metas.items(), key=lambda item: item[1].max_label)
    if meta.max_label >= len(names):
        raise FormatError(
            f"{shard.path}: has the label {meta.max_label}, so {meta.max_label + 1} class names are needed; {who} "
            f"{len(names)}; give all names, one a line and in the order of the labels, with --classes"
        )


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")
