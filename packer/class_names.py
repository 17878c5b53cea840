"""The class names of adopted shards: what they say, what the set says that they belong to, or what the user says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from packer.columns import PartMeta
from packer.found_shards import FoundShard, FoundShards
from readers.errors import FormatError

__all__ = ["class_names"]

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
    names = tuple(_in_a_row(told, 0))
    if len(names) == len(told):
        if names:
            _check_enough(names, metas, "the shards have")
        return names, []
    if min(told) > 0:
        first = min(told)
        return (), [
            f"class names are left out: the shards have none for label 0, and the first is {first} ({told[first]}); "
            f"give all names with --classes, or say --label-offset {first} if labels count from there"
        ]
    return (), [f"class names are left out: the shards have none for label {len(names)}; give all with --classes"]


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
