"""The result of a conversion."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cache.errors import SourceError, UnknownNameError
from cache.messages import listed, plural
from packer.columns import PartMeta
from packer.conversion.plan import Plan
from packer.output import Result
from packer.sources.base import SourceListing
from packer.sources.contents import NOT_FETCHED, advice
from readers.layout import DatasetInfo
from readers.opening.tree import has_image_suffix

__all__ = [
    "ConvertResult",
    "Summary",
    "count_by_action",
    "link_warnings",
    "refuse_nothing",
    "refuse_unknown",
    "refuse_unlike",
]


# ------------------------------------------------------------------------------
# Files of a source that are not in the set: counted by reason, in warnings, and in the error if no sample is left.


_EXPECTED = ("hidden", "metadata of ")  # reasons for which images may be left out without a warning
_FOREIGN = "image, byte 0: found "
_NOT_INSTALLED = "is not read by any installed package"
_NOT_CHOSEN = "for which `where` is false"
_UNREADABLE = "damaged, or not an image that is read"


def count_by_reason(listing: SourceListing, metas: Iterable[PartMeta]) -> dict[str, int]:
    """Left-out files by reason, the most frequent first; all kinds of damage are one reason."""
    counts = Counter(reason for _, reason in listing.left_out)
    not_chosen = listing.not_chosen
    for meta in metas:
        counts.update(_kind(item.reason, item.action) for item in meta.left_out)
        not_chosen += meta.not_chosen
    if not_chosen:
        counts[_NOT_CHOSEN] = not_chosen
    return dict(counts.most_common())


def count_by_action(metas: Iterable[PartMeta]) -> dict[str, int]:
    """Planned samples that are not packed, by the reason."""
    counts: Counter[str] = Counter()
    for meta in metas:
        counts.update(item.action or "not packed" for item in meta.left_out)
        if meta.not_chosen:
            counts["not chosen"] += meta.not_chosen
    return dict(counts)


def refuse_unknown(title: str, metas: Sequence[PartMeta]) -> None:
    """Raise UnknownNameError if `where` uses a column that no sample has."""
    seen = dict.fromkeys(name for meta in metas for name in meta.seen)
    unknown = sorted({name for meta in metas for name in meta.asked}.difference(seen))
    if unknown:
        raise UnknownNameError(
            f"{title}: where: no sample has {unknown[0]!r} in its field json, so no set is made; there are "
            f"{listed(sorted(seen), 20) or 'none'}"
        )


def refuse_unlike(title: str, metas: Sequence[PartMeta]) -> None:
    """Raise SourceError if the targets of two shards differ in dtype or shape."""
    known: dict[str, tuple[str, str]] = {}
    for meta in metas:
        for name, form in meta.targets.items():
            expected, shard = known.setdefault(name, (form, meta.shard.path))
            if form != expected:
                if name == "image":
                    raise SourceError(
                        f"{title}: the images in {meta.shard.path} have {form}, those in {shard} {expected}; raw "
                        f"images of a set have one size: set it by ops (--op Resize:256 --op CenterCrop:256)"
                    )
                raise SourceError(
                    f"{title}: the labels ({name}) in {meta.shard.path} are {form}, those in {shard} {expected}: all "
                    f"labels of a set have one dtype and shape; correct them in the source"
                )


def _kind(reason: str, action: str) -> str:
    if not action:
        return reason
    if reason.startswith(NOT_FETCHED):
        return reason.partition(": http")[0].partition(" (")[0]
    if _NOT_INSTALLED in reason:
        return reason
    if reason.startswith(_FOREIGN):
        return reason.removeprefix(_FOREIGN).partition(";")[0]
    return reason if reason.startswith("is ") and len(reason) < 30 else _UNREADABLE


def link_warnings(listing: SourceListing) -> list[str]:
    """A warning for each reason for which files with names of images are left out."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in listing.left_out:
        if has_image_suffix(name) and not reason.startswith(_EXPECTED):
            by_reason.setdefault(reason, []).append(name)
    return [
        f"{plural(len(names), 'file')} with names of images left out, such as {names[0]!r}: {reason}"
        for reason, names in by_reason.items()
    ]


def refuse_nothing(title: str, root: object, listing: SourceListing, plan: Plan, metas: Sequence[PartMeta]) -> None:
    """Raise SourceError if no sample is left, with the content of the source and the command for it.

    metas are parallel to the shards of `plan`.
    """
    if any(meta.shard.samples for meta in metas):
        return
    if any(meta.not_chosen for meta in metas):
        reasons = listed([f"{count:,} {reason}" for reason, count in count_by_reason(listing, metas).items()], 3)
        raise SourceError(f"{title}: no sample is left, so no set is made: {reasons}")
    files = list(listing.left_out)
    for shard, meta in zip(plan.shards, metas, strict=True):
        folder = listing.splits[shard.split].root
        for item in meta.left_out:
            files.append((f"{folder}/{item.name}".lstrip("/"), _kind(item.reason, item.action)))
    seen = advice(str(root), files, count_by_reason(listing, metas))
    noun = "images" if "image" in listing.fields else "samples"
    raise SourceError(f"{title}: no {noun}, so no set is made; found\n  {seen or 'nothing'}")


@dataclass(frozen=True, slots=True)
class ConvertResult(Result):
    """The result of a conversion. Times are in seconds, sizes in bytes; splits maps names to numbers of samples.

    left_out counts files by their treatment, left_out_reasons by the reason.
    expected_bytes, expected_seconds: of a dry run: bytes of all shards, and the time with these workers, estimated by
        packing some samples into a temporary directory; None if that failed.
    undecided: of a dry run, the part of `where` that can be evaluated only when samples are read.
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
    """Creates the results of a conversion into `out`, to the format `to`, that began at `started` (perf_counter)."""

    out: Path
    to: str
    started: float

    def of_set(
        self, info: DatasetInfo, listing: SourceListing, metas: Sequence[PartMeta] = (), resumed: int = 0
    ) -> ConvertResult:
        """The result for a complete set; without metas, it existed before."""
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
