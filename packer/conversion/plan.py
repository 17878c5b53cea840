"""The plan of a conversion: which sample goes into which shard, before a byte is written.

The plan follows from the listing and the options alone, never from the number of workers, so the output is
byte-identical and a conversion can be resumed. Its fingerprint shows whether an unfinished conversion is the same.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache.errors import BadNameError, SourceError
from packer.conversion.options import ConvertOptions, Reencode
from packer.formats.base import Format, ShardSpec
from packer.sources.base import SourceListing, SplitListing
from readers.headers import SUFFIX
from readers.layout import FieldName, SplitName
from readers.opening.tree import Keys
from readers.table import repeated

__all__ = [
    "Plan",
    "PlannedShard",
    "check_listing",
    "check_splits",
    "cut",
    "default_shard_bytes",
    "make_plan",
    "renamed",
]

_VERSION = 1
_BLOCK = 4096
_ASSUMED_BYTES = 128 << 10  # of a sample, if a source knows no sizes
_LARGE_SHARD_BYTES = 1 << 30
_SMALL_SHARD_BYTES = 64 << 20
_WANTED_SHARDS = 8


class PlannedShard(NamedTuple):
    """One shard: its split, file name, and the samples in it (indices into the listing)."""

    split: str
    name: str
    indices: npt.NDArray[np.int64] | range
    source_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """All shards, their specs by split, and a fingerprint of listing and options."""

    shards: tuple[PlannedShard, ...]
    specs: dict[str, ShardSpec]
    fingerprint: str

    @property
    def source_bytes(self) -> int:
        return sum(shard.source_bytes for shard in self.shards)

    @property
    def samples(self) -> int:
        return sum(len(shard.indices) for shard in self.shards)


def make_plan(listing: SourceListing, options: ConvertOptions, container: Format) -> Plan:
    """Plan every split of a listing. Raises SourceError if it cannot be packed."""
    if options.shards.shuffle is not None and not listing.shuffles:
        raise SourceError(
            "a source that unpacks from front to back cannot be read in shuffled order; convert it without shuffle, "
            "and then convert the result with shuffle=SEED (or unpack it first, with gunzip, unzstd or unxz)"
        )
    _check_words(listing)
    shards, specs = [], {}
    for split, part in listing.splits.items():
        sizes = part.bytes if part.bytes.any() else np.full(len(part), _ASSUMED_BYTES)
        if options.images.encoding is not None and len(part):
            _check_new_names(part.names.columns[0], part.keys, options.images.encoding, split)
        order = None
        if options.shards.shuffle is not None:
            # The stream of RandomState is frozen, that of Generator is not (NEP 19).
            order = np.random.RandomState(options.shards.shuffle).permutation(len(part)).astype(np.int64, copy=False)
            sizes = sizes[order]
        bounds = cut(sizes, options.shards.bytes, options.shards.samples)
        fields = options.packed_fields(listing.fields)
        specs[split] = ShardSpec(split, fields, listing.classes, options.shards.label_offset, len(bounds) - 1)
        for number, (first, stop) in enumerate(itertools.pairwise(bounds)):
            name = container.shard_name(split, number, len(bounds) - 1)
            indices = range(first, stop) if order is None else order[first:stop]
            shards.append(PlannedShard(split, name, indices, int(sizes[first:stop].sum())))
    return Plan(tuple(shards), specs, _fingerprint(listing, options))


def _check_words(listing: SourceListing) -> None:
    """Raise SourceError for names of splits and fields that cannot be part of a file name."""
    try:
        for split in listing.splits:
            SplitName(split)
        for field in listing.fields:
            FieldName(field)
    except BadNameError as error:
        raise SourceError(f"the source cannot be packed as it is: {error}") from error
    check_splits(listing.splits, "the source")


def check_splits(names: Iterable[str], where: str) -> None:
    """Raise SourceError for names of splits that some filesystems cannot distinguish."""
    folded: dict[str, str] = {}
    for name in dict.fromkeys(names):
        other = folded.setdefault(name.casefold(), name)
        if other != name:
            raise SourceError(
                f"{where}: has the splits {other!r} and {name!r}, whose names differ only in case; rename one of them"
            )


def cut(sizes: npt.NDArray[np.int64], shard_bytes: int | None, samples_per_shard: int | None) -> list[int]:
    """Where shards begin and end: k + 1 ascending positions from 0 to n, for k shards.

    With samples_per_shard every shard except the last has that many. Otherwise shards have about equal bytes: at most
    shard_bytes each, give or take a sample; without either, 8 shards, but none under 64 MiB or over 1 GiB.
    """
    n = len(sizes)
    if samples_per_shard is not None:
        return [*range(0, n, samples_per_shard), n] if n else [0, 0]
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if n else 0
    if shard_bytes is None:
        shard_bytes = default_shard_bytes(total)
    count = max(1, min(n, -(-total // shard_bytes)))
    targets = [total * number // count for number in range(1, count)]
    inner = (np.searchsorted(ends, targets) + 1).tolist()
    bounds = [0]
    for number, bound in enumerate(inner):
        bounds.append(min(max(bound, bounds[-1] + 1), n - (count - 1 - number)))
    return [*bounds, n]


def default_shard_bytes(total: int) -> int:
    """The default shard size of a split with `total` bytes: an eighth, from 64 MiB to 1 GiB."""
    return min(_LARGE_SHARD_BYTES, max(_SMALL_SHARD_BYTES, -(-total // _WANTED_SHARDS)))


def _fingerprint(listing: SourceListing, options: ConvertOptions) -> str:
    digest = hashlib.blake2b(digest_size=16)
    settings = options.to_json()
    if settings["decode"] == "RGB":
        del settings["decode"]  # as before this option existed
    settings.pop("checksums", None)  # does not change the bytes of the shards
    del settings["on_error"]  # shards without a bad sample are the same under every policy; parts with one are checked
    digest.update(json.dumps([_VERSION, settings, dict(listing.fields), listing.classes]).encode())
    for name, part in listing.splits.items():
        digest.update(json.dumps([name, part.root, len(part)]).encode())
        for columns in ((part.keys,), part.names.columns):
            for first in range(0, len(part), _BLOCK):
                texts = zip(*(column[first : first + _BLOCK] for column in columns), strict=True)
                flat = "\0".join(itertools.chain.from_iterable(texts))
                digest.update(("\0" * (first > 0) + flat).encode())
        for numbers in (part.labels, part.bytes, part.stamps):
            for first in range(0, len(part), _BLOCK):
                digest.update(numbers[first : first + _BLOCK].astype(np.int64).tobytes())
    return digest.hexdigest()


def check_listing(listing: SplitListing, where: str) -> None:
    """Refuse keys that occur twice, since a container keeps one sample per key."""
    if isinstance(listing.keys, Keys):  # unique by construction
        return
    seen: dict[str, int] = {}
    for i in repeated(lambda: listing.keys, len(listing)).tolist():
        first = seen.setdefault(listing.keys[i], i)
        if first != i:
            raise SourceError(
                f"{where}: samples {first} and {i} have the same key {listing.keys[i]!r}; keys must be unique"
            )


def _check_new_names(names: Sequence[str], keys: Sequence[str], options: Reencode, where: str) -> None:
    """Raise SourceError if a re-encoded file could get the name of another one."""
    codec = "png" if options.codec == "keep" else options.codec
    count = len(names)

    def all_names() -> Iterator[str]:
        """The present and the future names; a unique string for each that cannot conflict."""
        for i, name in enumerate(names):
            yield name or f"\0\0{i}"
        for i, (name, key) in enumerate(zip(names, keys, strict=True)):
            new = renamed(name, key, codec)
            yield new if name and new != name else f"\0{i}"

    taken: dict[str, str] = {}
    for i in repeated(all_names, 2 * count).tolist():
        name = names[i % count]
        new = name if i < count else renamed(name, keys[i % count], codec)
        other = taken.setdefault(new, name)
        if other != name:
            raise SourceError(
                f"{where}: {name} and {other} would both be called {new} when re-encoded; rename one of them"
            )


def renamed(name: str, key: str, codec: str) -> str:
    """A file name with another suffix, appended to the whole name if that is the key, since others begin alike."""
    dot = name.rfind(".")
    codec = "png" if codec == "raw" else codec  # raw pixels are extracted as PNG
    stem = name[:dot] if dot > name.rfind("/") + 1 and name != key else name
    return f"{stem}.{SUFFIX[codec]}" if name else name
