"""Which samples of a source are packed, and into which splits: by class and `where`, and dealt by shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

import numpy as np

from cache.errors import SourceError
from cache.messages import quoted
from packer.conversion.where import listed_facts, select
from packer.sets.deal import as_groups, deal, deal_groups
from packer.sources.base import SourceListing
from readers.layout import SplitName
from readers.sample import NO_LABEL
from readers.where import group_values, parse_where

__all__ = ["Choice"]


@dataclass(frozen=True)
class Choice:
    """classes: only those of these names, whose labels are then 0, 1, … in this order; None for all.

    where: only those for which this is true (`packer.conversion.where`); None for all.

    fractions: the share of each new split, which sum to 1; None leaves the splits as they are.
    seed: of the draw.
    stratify: every class in these shares.
    group: the column whose values are not divided, or "folder"; see `SetTable.split`.

    Raises ValueError and BadNameError.
    """

    classes: Sequence[str] | None = None
    fractions: Mapping[str, float] | None = None
    seed: int = 0
    stratify: bool = False
    where: str | None = None
    group: str | None = None

    def __post_init__(self) -> None:
        if self.classes is not None and (not self.classes or len({*self.classes}) < len(self.classes)):
            raise ValueError(f"classes are one or more names, each once, not {list(self.classes)!r:.200}")
        names = parse_where(self.where).names if self.where is not None else ()
        if self.fractions is None:
            if self.stratify or self.seed or self.group is not None:
                raise ValueError("seed, stratify and group say how samples are dealt by fractions: give fractions, too")
            return
        if "split" in names:
            raise ValueError(
                "fractions deal the samples of one split, so where cannot distinguish splits: leave one out"
            )
        for name in self.fractions:
            SplitName(name)
        deal(np.zeros(0, np.int64), list(self.fractions.values()), self.seed)  # checks both

    def of(self, listing: SourceListing) -> SourceListing:
        """The listing of what is chosen. Raises SourceError where nothing is."""
        if self.classes is not None:
            listing = self._of_classes(listing, self.classes)
        if self.where is not None:
            listing = select(listing, self.where)
        return listing if self.fractions is None else self._dealt(listing, self.fractions)

    def _of_classes(self, listing: SourceListing, classes: Sequence[str]) -> SourceListing:
        for name in classes:
            if name not in listing.classes:
                near = get_close_matches(name, listing.classes, 3)
                meant = f"did you mean {' or '.join(near)}?" if near else f"it has {len(listing.classes)} classes"
                raise SourceError(f"the source has no class {name!r}; {meant}")
        numbers = {name: number for number, name in enumerate(classes)}
        new = np.array([*(numbers.get(name, NO_LABEL) for name in listing.classes), NO_LABEL], np.int64)
        splits = {}
        for name, part in listing.splits.items():
            chosen = part.take(np.flatnonzero(new[part.labels] != NO_LABEL))
            chosen.labels = new[chosen.labels]
            if len(chosen):
                splits[name] = chosen
        if not splits:
            raise SourceError(f"the source has no sample of {', '.join(classes)}")
        return replace(listing, splits=splits, classes=tuple(classes))

    def _dealt(self, listing: SourceListing, fractions: Mapping[str, float]) -> SourceListing:
        if len(listing.splits) != 1:
            raise SourceError(
                f"the source has the splits {', '.join(listing.splits)}; name the one to deal by its shares with split="
            )
        if self.stratify and listing.late_labels:
            raise SourceError(
                "the labels of this source are known only when its samples are read, so that classes cannot be dealt "
                "alike: leave stratify out, or deal the packed set with  packer split --stratify"
            )
        ((split, part),) = listing.splits.items()
        labels = np.asarray(part.labels, np.int64) if self.stratify else np.zeros(len(part), np.int64)
        if self.group is None:
            of = deal(labels, list(fractions.values()), self.seed)
        else:
            if self.group != "folder" and not listing.json_listed and "json" in listing.fields:
                raise SourceError(
                    f"the columns of this source are known only when its samples are read, so that {self.group!r} "
                    f"cannot keep samples together: deal the packed set with  packer split --group {quoted(self.group)}"
                )
            values = group_values(listed_facts(listing)[split], self.group)
            of = deal_groups(
                as_groups(values, part.keys, self.group, "the source"), labels, [*fractions.values()], self.seed
            )
        splits = {name: part.take(np.flatnonzero(of == number)) for number, name in enumerate(fractions)}
        empty = [name for name, chosen in splits.items() if not len(chosen)]
        if empty:
            whole = "" if self.group is None else f", since no {self.group} may be in two splits"
            raise SourceError(f"no sample of {len(part):,} would be in {empty[0]!r}{whole}")
        return replace(listing, splits=splits)
