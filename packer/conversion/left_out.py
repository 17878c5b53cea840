"""What a source has that is not in the set: counted by reason, warned of, or all there is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from cache.errors import SourceError, UnknownNameError
from cache.messages import listed, plural
from packer.columns import PartMeta
from packer.conversion.plan import Plan
from packer.sources.base import SourceListing
from packer.sources.contents import NOT_FETCHED, advice
from readers.tree import has_image_suffix

__all__ = ["count_by_action", "count_by_reason", "link_warnings", "refuse_nothing", "refuse_unknown", "refuse_unlike"]

_EXPECTED = (
    "hidden",
    "beside ",
    "outside the splits",
    "metadata of ",
)  # images may be left out for these without a warning
_FOREIGN = "image, byte 0: found "
_NOT_CHOSEN = "for which `where` is false"
_UNREADABLE = "damaged, or not an image that is read"


def count_by_reason(listing: SourceListing, metas: Iterable[PartMeta]) -> dict[str, int]:
    """Files by why they are left out, the most frequent reason first; damage of all kinds is one reason."""
    counts = Counter(reason for _, reason in listing.left_out)
    not_chosen = listing.not_chosen
    for meta in metas:
        counts.update(_kind(item.reason, item.action) for item in meta.left_out)
        not_chosen += meta.not_chosen
    if not_chosen:
        counts[_NOT_CHOSEN] = not_chosen
    return dict(counts.most_common())


def count_by_action(metas: Iterable[PartMeta]) -> dict[str, int]:
    """Samples that were planned and are not packed, by what was done with them."""
    counts: Counter[str] = Counter()
    for meta in metas:
        counts.update(item.action or "not packed" for item in meta.left_out)
        if meta.not_chosen:
            counts["not chosen"] += meta.not_chosen
    return dict(counts)


def refuse_unknown(title: str, metas: Sequence[PartMeta]) -> None:
    """Raise UnknownNameError where `where` looks at a column that no sample has."""
    seen = dict.fromkeys(name for meta in metas for name in meta.seen)
    unknown = sorted({name for meta in metas for name in meta.asked}.difference(seen))
    if unknown:
        raise UnknownNameError(
            f"{title}: where: no sample has {unknown[0]!r} in its field json, so no set is made; there are "
            f"{listed(sorted(seen), 20) or 'none'}"
        )


def refuse_unlike(title: str, metas: Sequence[PartMeta]) -> None:
    """Raise SourceError where the targets of two shards differ in dtype or shape."""
    known: dict[str, tuple[str, str]] = {}
    for meta in metas:
        for name, found in meta.targets.items():
            expected, shard = known.setdefault(name, (found, meta.shard.path))
            if found != expected:
                if name == "image":
                    raise SourceError(
                        f"{title}: the images in {meta.shard.path} have {found}, those in {shard} {expected}; raw "
                        f"images of a set have one size: give ops that make it (--op Resize:256 --op CenterCrop:256)"
                    )
                raise SourceError(
                    f"{title}: the labels ({name}) in {meta.shard.path} are {found}, those in {shard} {expected}: all "
                    f"labels of a set are alike; correct them in the source"
                )


def _kind(reason: str, action: str) -> str:
    if not action:
        return reason
    if reason.startswith(NOT_FETCHED):
        return reason.partition(": http")[0].partition(" (")[0]
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
    """Raise SourceError where no sample is left, with what the source holds and which command takes that.

    metas are parallel to the shards of `plan`.
    """
    if any(meta.shard.samples for meta in metas):
        return
    if any(meta.not_chosen for meta in metas):
        found = listed([f"{count:,} {reason}" for reason, count in count_by_reason(listing, metas).items()], 3)
        raise SourceError(f"{title}: no sample is left, so no set is made: {found}")
    files = list(listing.left_out)
    for shard, meta in zip(plan.shards, metas, strict=True):
        folder = listing.splits[shard.split].root
        for item in meta.left_out:
            files.append((f"{folder}/{item.name}".lstrip("/"), _kind(item.reason, item.action)))
    seen = advice(str(root), files, count_by_reason(listing, metas))
    raise SourceError(f"{title}: no images, so no set is made; found\n  {seen or 'nothing'}")
