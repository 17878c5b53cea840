"""What a conversion returns."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packer.columns import PartMeta
from packer.conversion.left_out import count_by_reason
from packer.output import Result
from packer.sources.base import SourceListing
from readers.layout import DatasetInfo

__all__ = ["ConvertResult", "Summary"]


@dataclass(frozen=True, slots=True)
class ConvertResult(Result):
    """What a conversion did. Times are seconds, sizes bytes; splits maps names to samples.

    left_out counts files by what was done with them, left_out_reasons by why.
    expected_bytes, expected_seconds: of a dry run: what all shards will have, and the time with these workers, by
    packing some samples into a temporary directory; None where that failed.
    undecided: of a dry run, the part of `where` that is known only of samples that have been read.
    task: (i, n) of one task of several, whose shards and samples these are; `packer.commit` then makes the set.
    """

    output: Path | str
    format: str
    splits: dict[str, int]
    classes: int
    shards: int
    samples: int
    payload_bytes: int
    shard_bytes: int
    seconds: float
    shards_resumed: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    left_out_reasons: dict[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    dry_run: bool = False
    already_done: bool = False
    uploaded_bytes: int = 0
    undecided: str = ""
    expected_bytes: int | None = None
    expected_seconds: float | None = None
    task: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """Makes results of a conversion into `out`, to the format `to`, that began at `started` (perf_counter)."""

    out: Path
    to: str
    started: float

    def of_set(
        self, info: DatasetInfo, listing: SourceListing, metas: Sequence[PartMeta] = (), resumed: int = 0
    ) -> ConvertResult:
        """A set that is whole; without metas, it was before."""
        shards = [shard for split in info.splits.values() for shard in split.shards]
        return self.of(
            listing,
            metas,
            info.made,
            splits={name: split.samples for name, split in info.splits.items()},
            classes=len(info.classes),
            shards=len(shards),
            samples=sum(shard.samples for shard in shards),
            payload_bytes=int(info.made.get("payload_bytes", 0)),
            shard_bytes=sum(shard.bytes for shard in shards),
            shards_resumed=resumed,
            already_done=not metas,
        )

    def of(
        self, listing: SourceListing, metas: Sequence[PartMeta] = (), made: Mapping[str, Any] = {}, **counts: Any
    ) -> ConvertResult:
        """A result with these further counts."""
        left_out = dict(made.get("left_out", {}))
        if listing.left_out:
            left_out["not packed"] = left_out.get("not packed", 0) + len(listing.left_out)
        if listing.not_chosen:
            left_out["not chosen"] = left_out.get("not chosen", 0) + listing.not_chosen
        return ConvertResult(
            output=self.out,
            format=self.to,
            seconds=time.perf_counter() - self.started,
            left_out=left_out,
            left_out_reasons=count_by_reason(listing, metas),
            warnings=(*listing.warnings, *map(str, made.get("remarks", ()))),
            **counts,
        )
