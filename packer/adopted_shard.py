"""Make the index columns of a shard that lies there already: what a worker of `packer.index` does."""

from __future__ import annotations

from collections import Counter as Counted
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from crc32c import crc32c

from packer.columns import PartMeta, ShardColumns, load_meta, load_part, save_part, string_columns
from packer.conversion.images import adopted_image
from packer.formats import REGISTRY, format_named
from packer.formats.base import Located, LocateOptions, PackedSample, Payloads
from packer.formats.window import Window
from packer.sources.shards import ClassNames, field_kinds, located_samples
from packer.watch import Counter
from readers.errors import FormatError
from readers.index import ABSENT
from readers.layout import ShardInfo
from readers.sample import NO_LABEL
from readers.strings import Strings

__all__ = ["AdoptTask", "key_prefix", "locate_shard", "make_keys_unique"]

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
