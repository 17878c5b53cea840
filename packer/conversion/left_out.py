"""What a conversion leaves out: counted, reported, put aside; and what to say where nothing is left to pack."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence

from cache.errors import SourceError
from cache.files import Folder
from cache.messages import plural
from packer.columns import PartMeta
from packer.conversion.journal import Journal
from packer.conversion.plan import Plan, PlannedShard
from packer.sources.base import SourceListing
from packer.sources.contents import advice
from readers.names import QUARANTINE_FOLDER, REPORT_FILE, RelativePath, shortened
from readers.sample import Buffer
from readers.tree import has_image_suffix

__all__ = [
    "count_by_reason",
    "link_warnings",
    "refuse_nothing",
    "set_aside",
    "write_report",
]

_EXPECTED = ("hidden", "beside ", "metadata of ")  # reasons for which images may be left out without a warning
_FOREIGN = "image, byte 0: found "
_UNREADABLE = "damaged, or not an image that is read"


def count_by_reason(listing: SourceListing, metas: Iterable[PartMeta]) -> dict[str, int]:
    """Files by why they are left out, the most frequent reason first; damage of all kinds is one reason."""
    counts = Counter(reason for _, reason in listing.left_out)
    for meta in metas:
        counts.update(_kind(item.reason, item.action) for item in meta.left_out)
    return dict(counts.most_common())


def _kind(reason: str, action: str) -> str:
    if not action:
        return reason
    if reason.startswith(_FOREIGN):
        return reason.removeprefix(_FOREIGN).partition(";")[0]
    return reason if reason.startswith("is ") and len(reason) < 30 else _UNREADABLE


def link_warnings(listing: SourceListing) -> list[str]:
    """A warning for each reason that a listing has for leaving out files that are called like images."""
    found: dict[str, list[str]] = {}
    for name, reason in listing.left_out:
        if has_image_suffix(name) and not reason.startswith(_EXPECTED):
            found.setdefault(reason, []).append(name)
    return [
        f"{plural(len(names), 'file')} called like images left out, such as {names[0]!r}: {reason}"
        for reason, names in found.items()
    ]


def refuse_nothing(title: str, root: object, listing: SourceListing, plan: Plan, metas: Sequence[PartMeta]) -> None:
    """Raise SourceError where no sample is left, with what the source holds and which command takes that.

    metas are parallel to the shards of `plan`.
    """
    if any(meta.shard.samples for meta in metas):
        return
    files = list(listing.left_out)
    for shard, meta in zip(plan.shards, metas, strict=True):
        folder = listing.splits[shard.split].root
        for item in meta.left_out:
            files.append((f"{folder}/{item.name}".lstrip("/"), _kind(item.reason, item.action)))
    seen = advice(str(root), files, count_by_reason(listing, metas))
    raise SourceError(f"{title}: no images, so no set is made; found\n  {seen or 'nothing'}")


def write_report(
    journal: Journal, shards: Sequence[PlannedShard], metas: Sequence[PartMeta], listing: SourceListing
) -> None:
    """One JSON object a line for every file of the source that is not in the set; no file where there is none."""
    lines = [{"name": name, "reason": reason, "action": "not packed"} for name, reason in listing.left_out]
    for shard, meta in zip(shards, metas, strict=True):
        lines += [
            {
                "split": shard.split,
                "name": item.name,
                "reason": item.reason,
                "action": item.action or "not packed",
            }
            for item in meta.left_out
        ]
    if lines:
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        journal.place.write(REPORT_FILE, text.encode("utf-8", "surrogateescape"), scratch=journal.work)


def set_aside(work: Folder, split: str, name: str, payload: Buffer) -> None:
    """Write `payload` to quarantine/split/name below `work`; names in archives may be longer than those of files.

    Raises BadNameError for a name that leads out, PathError where something is in the way.
    """
    place = RelativePath(shortened(name))
    folder, _, last = f"{QUARANTINE_FOLDER}/{split}/{place}".rpartition("/")
    with work.folder(folder, create=True) as opened:
        opened.write(last, payload)
