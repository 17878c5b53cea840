"""Choosing samples of a source and their splits: by class, by `where`, and by dealing them in shares."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from cache.errors import BadSampleError, SourceError, UnknownNameError
from cache.messages import quoted
from packer.columns import header_values
from packer.conversion.options import Choose
from packer.sets.deal import as_groups, deal, deal_groups
from packer.sources.base import SourceListing, SplitListing
from readers.headers import read_header
from readers.table import NO_LABEL, Buffer, ImageInfo, Table
from readers.where import NUMBERS, TableFacts, Where, complete_columns, group_values, json_columns, parse_where

__all__ = ["SampleWhere", "choose", "select"]


# ------------------------------------------------------------------------------
# `where` in a conversion: conditions on the listing are evaluated before the plan is made, the rest by the workers.
#
# An expression is split at its outermost `and`. Conditions on keys, splits and labels, and on columns of a table that
# the source has read to list it, are evaluated over the columns of the listing; samples that fail one are neither
# planned nor read. Conditions on the bytes, the header or the fields of a sample, and on other columns, are evaluated
# when the sample has been read, as it is in the source: before ops and re-encoding. Samples that fail one keep their
# place in the plan, which stays empty. So the plan still follows from the listing and the options alone. An image with
# an unreadable header is not left out by `where`, but is a bad sample.


_LABELS = frozenset({"label", "class_name"})
_LISTED = frozenset({"key", "split", "folder"})
_MOST_NAMES = 100
_OF_HEADERS = frozenset({*NUMBERS, "medium"} - {"bytes"})


def select(listing: SourceListing, text: str) -> SourceListing:
    """The listing of the samples for which `text` is true, as far as the listing tells; the rest becomes its `where`.

    Raises ValueError, UnknownNameError for a class or field that the source lacks, SourceError if no sample is left.
    """
    where = parse_where(text)
    SampleWhere(text, listing.classes, tuple(listing.fields), "").is_true("", NO_LABEL, [None] * len(listing.fields))
    known = _LISTED if listing.late_labels else _LISTED | _LABELS
    now, later = list[Where](), list[Where]()
    for part in where.conjuncts:
        unlisted = part.names - known
        if listing.json_listed and not part.columns & set(listing.fields):
            unlisted -= part.columns | {"column", "has"}
        (later if unlisted else now).append(part)
    facts = listed_facts(listing)
    splits = {name: _select(part, facts[name], now) for name, part in listing.splits.items()}
    before, after = (sum(map(len, parts.values())) for parts in (listing.splits, splits))
    if before and not after:
        raise SourceError(f"where: {text!r:.200} is false for all {before:,} samples of the source")
    return replace(
        listing,
        splits={name: part for name, part in splits.items() if len(part)},
        where=" and ".join(f"({part.text})" for part in later),
        not_chosen=before - after,
    )


def listed_facts(listing: SourceListing) -> dict[str, TableFacts]:
    """The facts that a listing has about the samples of each split."""

    @cache
    def columns(names: frozenset[str]) -> dict[str, Mapping[str, Sequence[Any]]]:
        if not listing.json_listed:
            return {name: {} for name in listing.splits}
        values = [json_columns(_payloads(part), names) for part in listing.splits.values()]
        complete_columns(values, [len(part) for part in listing.splits.values()])
        return dict(zip(listing.splits, values, strict=True))

    def columns_of(name: str) -> Callable[[Collection[str]], Mapping[str, Sequence[Any]]]:
        return lambda names: columns(frozenset(names))[name]

    return {
        name: _Facts(Table.of(part.keys, None, listing.classes, {}), None, name, part.labels, columns=columns_of(name))
        for name, part in listing.splits.items()
    }


def _payloads(part: SplitListing) -> Iterator[tuple[str, Buffer | None]]:
    return ((key, place[-1]) for some in part.slices() for key, place in zip(some.keys, some.places, strict=True))


def _select(part: SplitListing, facts: TableFacts, conditions: Sequence[Where]) -> SplitListing:
    mask = np.ones(len(part), np.bool_)
    for where in conditions:
        mask &= where.mask(facts)
    return part if mask.all() else part.take(np.flatnonzero(mask))


class _Facts(TableFacts):
    """Facts for expressions before there is a set: from a listing, or from a sample that has been read."""

    def has(self, field: str) -> npt.NDArray[np.bool_]:
        if field not in self._table.fields:
            names = ", ".join(self._table.fields)
            raise UnknownNameError(
                f"no field {field!r}; there are {names}"
                if names
                else f"the source has no field {field!r}, and its table no such column"
            )
        return super().has(field)


class SampleWhere:
    """An expression that is evaluated for one read sample after the other.

    classes, fields, split: of the set.
    wanted: the table columns that it uses; seen: columns that the samples so far had, those and others.
    """

    def __init__(self, text: str, classes: Sequence[str], fields: Sequence[str], split: str) -> None:
        self._where, self._classes, self._fields, self._split = parse_where(text), classes, tuple(fields), split
        self._looks_at_header = bool(self._where.names & _OF_HEADERS)
        self.wanted = self._where.columns - set(fields)
        self.seen: dict[str, None] = {}

    def is_true(self, key: str, label: int, payloads: Sequence[Buffer | None]) -> bool:
        """Whether the expression is true for a sample; True for an image with an unreadable header.

        payloads: in the order of the fields, as they were read.
        """
        header = None
        if self._looks_at_header and payloads[0] is not None:
            try:
                header = read_header(payloads[0])
            except BadSampleError:
                return True  # packing reports the problem
        by_field = dict(zip(self._fields, payloads, strict=True))

        def columns(names: Collection[str]) -> Mapping[str, Sequence[Any]]:
            """The columns; any name is accepted, since another sample may have it."""
            if "json" not in by_field:
                return {}
            read = json_columns([(key, by_field["json"])], names)
            self.seen.update(dict.fromkeys(name for name in read if name in names or len(self.seen) < _MOST_NAMES))
            return {name: read.get(name, (None,)) for name in names}

        sizes = {name: [-1 if payload is None else len(payload)] for name, payload in by_field.items()}
        table = Table.of((key,), (label,), self._classes, sizes)
        info = ImageInfo(*(np.array([value]) for value in header_values(header)))
        return bool(self._where.mask(_Facts(table, lambda: info, self._split, columns=columns))[0])


def choose(listing: SourceListing, choice: Choose) -> SourceListing:
    """The listing of the chosen samples, after the split was chosen. Raises SourceError if none is left."""
    if choice.classes is not None:
        listing = _of_classes(listing, choice.classes)
    if choice.where is not None:
        listing = select(listing, choice.where)
    return listing if choice.fractions is None else _dealt(listing, choice, choice.fractions)


def _of_classes(listing: SourceListing, classes: Sequence[str]) -> SourceListing:
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


def _dealt(listing: SourceListing, choice: Choose, fractions: Mapping[str, float]) -> SourceListing:
    if len(listing.splits) != 1:
        raise SourceError(
            f"the source has the splits {', '.join(listing.splits)}; choose the split to divide with split="
        )
    if choice.stratify and listing.late_labels:
        raise SourceError(
            "the labels of this source are known only after its samples are read, so classes cannot be divided by "
            "shares: leave stratify out, or divide the packed set with  packer split --stratify"
        )
    ((split, part),) = listing.splits.items()
    labels = np.asarray(part.labels, np.int64) if choice.stratify else np.zeros(len(part), np.int64)
    if choice.group is None:
        of = deal(labels, list(fractions.values()), choice.seed)
    else:
        if choice.group != "folder" and not listing.json_listed and "json" in listing.fields:
            raise SourceError(
                f"the columns of this source are known only after its samples are read, so {choice.group!r} cannot "
                f"keep samples together: divide the packed set with  packer split --group {quoted(choice.group)}"
            )
        values = group_values(listed_facts(listing)[split], choice.group)
        of = deal_groups(
            as_groups(values, part.keys, choice.group, "the source"), labels, [*fractions.values()], choice.seed
        )
    splits = {name: part.take(np.flatnonzero(of == number)) for number, name in enumerate(fractions)}
    empty = [name for name, chosen in splits.items() if not len(chosen)]
    if empty:
        whole = "" if choice.group is None else f", since no {choice.group} may be in two splits"
        raise SourceError(f"no sample of {len(part):,} would be in {empty[0]!r}{whole}")
    return replace(listing, splits=splits)
