"""Several sources as one: splits and classes of the same name are merged, and samples have the fields of all sources.

If two sources have the same key in a split, every key of that split is prefixed with the name of its source: that of
its folder or file, with a number if several have the same name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from cache.errors import SourceError
from cache.messages import listed
from packer.formats.base import Arena
from packer.registry import HEAD_BYTES
from packer.sources.base import (
    AheadReader,
    FieldNames,
    LabellingReader,
    Places,
    Source,
    SourceListing,
    SourceReader,
    SplitListing,
)
from packer.sources.layouts import LACKING, lacking_in_train
from readers.table import NO_LABEL, Buffer, NamesBuilder, repeated

__all__ = ["SeveralSources"]

_MOST_TITLES = 3
_Ints = npt.NDArray[np.int64]


class SeveralSources:
    """Two or more sources, joined. names: the prefixes of their keys, used where keys are ambiguous."""

    def __init__(self, sources: Sequence[Source], names: Sequence[str]) -> None:
        self._sources = tuple(sources)
        self._names = [name if names.count(name) == 1 else f"{name}-{i}" for i, name in enumerate(names)]
        self._listings: list[SourceListing] = []
        self._fields: list[list[int]] = []  # per source: its field number for each joined field, or -1

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources that are joined."""
        return self._sources

    @property
    def isolated(self) -> bool:
        return any(getattr(source, "isolated", False) for source in self._sources)

    @property
    def title(self) -> str:
        return listed([source.title for source in self._sources], _MOST_TITLES)

    def list(self, split: str | None) -> SourceListing:
        self._refuse_twice()
        listings = self._listings = [source.list(split) for source in self._sources]
        fields: dict[str, str] = {}
        for source, listing in zip(self._sources, listings, strict=True):
            for name, kind in listing.fields.items():
                if fields.setdefault(name, kind) != kind:
                    raise SourceError(
                        f"{source.title}: the field {name!r} is {kind}, that of the sources before is {fields[name]}; "
                        f"give it another name"
                    )
        self._fields = [
            [list(listing.fields).index(name) if name in listing.fields else -1 for name in fields]
            for listing in listings
        ]
        classes = self._unify(listings)
        numbers = {name: number for number, name in enumerate(classes)}
        parts: dict[str, list[tuple[int, SplitListing]]] = {}
        for i, listing in enumerate(listings):
            for name, part in listing.splits.items():
                parts.setdefault(name, []).append((i, part))
        joined = SourceListing(
            {},
            fields,
            classes,
            [(f"{self._names[i]}/{name}", why) for i, other in enumerate(listings) for name, why in other.left_out],
            list(chain.from_iterable(listing.warnings for listing in listings)),
            skip_strays=any(listing.skip_strays for listing in listings),
            shuffles=all(listing.shuffles for listing in listings),
            estimated=any(listing.estimated for listing in listings),
            max_workers=min((other.max_workers for other in listings if other.max_workers is not None), default=None),
        )
        for name, members in parts.items():
            joined.splits[name] = self._join(members, numbers, len(fields))
        others = [warning for warning in joined.warnings if LACKING not in warning]
        if len(others) < len(joined.warnings):  # one source may have what another lacks
            labels = {name: part.labels for name, part in joined.splits.items()}
            joined.warnings = others + [f"{self.title}: {text}" for text in lacking_in_train(labels, classes)]
        return joined

    def _refuse_twice(self) -> None:
        """Raise SourceError if a source is given twice with the same options."""
        seen = set()
        for source in self._sources:
            if hasattr(source, "root"):
                options = {name: value for name, value in vars(source).items() if name not in ("root", "file")}
                place = os.path.realpath(source.root), type(source), repr(sorted(options.items()))
                if place in seen:
                    raise SourceError(f"{source.title}: is given twice, which would repeat every sample")
                seen.add(place)

    def _unify(self, listings: Sequence[SourceListing]) -> tuple[str, ...]:
        """All class names. Raises SourceError if one source has class names and another only label numbers."""
        labelled = [
            any(len(part) and int(part.labels.max()) > NO_LABEL for part in listing.splits.values())
            for listing in listings
        ]
        if any(listing.classes for listing in listings):
            for source, listing, has_labels in zip(self._sources, listings, labelled, strict=True):
                if has_labels and not listing.classes:
                    raise SourceError(
                        f"{source.title}: its labels are numbers, but those of another source have names, so the "
                        f"classes cannot be joined; give it class names first, as in a .csv"
                    )
        return tuple(dict.fromkeys(chain.from_iterable(listing.classes for listing in listings)))

    def _join(self, parts: Sequence[tuple[int, SplitListing]], numbers: dict[str, int], fields: int) -> SplitListing:
        def all_keys() -> Iterator[str]:
            return chain.from_iterable(part.keys for _, part in parts)

        total = sum(len(part) for _, part in parts)
        prefixed = len(parts) > 1 and bool(len(repeated(all_keys, total)))
        keys, names, labels = NamesBuilder(), [NamesBuilder() for _ in range(fields)], []
        for i, part in parts:
            prefix = f"{self._names[i]}/" if prefixed else ""
            classes = self._listings[i].classes
            new = np.array([*(numbers[name] for name in classes), NO_LABEL], np.int64)
            labels.append(new[part.labels] if classes else part.labels.astype(np.int64))
            for key in part.keys:
                keys.append(prefix + key)
            for column, number in zip(names, self._fields[i], strict=True):
                if number < 0:
                    column.extend([""] * len(part))
                    continue
                for name in part.names.columns[number]:
                    column.append(prefix + name if name else "")
        roots = {part.root for _, part in parts}
        return SplitListing(
            roots.pop() if len(roots) == 1 else "",
            keys.build(),
            np.concatenate(labels),
            FieldNames(*(column.build() for column in names)),
            np.concatenate([part.bytes for _, part in parts]),
            _JoinedPlaces(
                [(i, part.places) for i, part in parts],
                np.repeat(np.arange(len(parts)), [len(part) for _, part in parts]),
                np.concatenate([np.arange(len(part), dtype=np.int64) for _, part in parts]),
            ),
            np.concatenate([part.stamps for _, part in parts]),
        )

    @contextmanager
    def open(self) -> Iterator[_Reader]:
        with ExitStack() as opened:
            yield _Reader(self._sources, self._fields, opened)

    def paths(self, listing: SourceListing) -> Iterator[str | os.PathLike[str]]:
        for source, own in zip(self._sources, self._listings, strict=True):
            yield from source.paths(own)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_listings": []}


class _JoinedPlaces(Sequence[Any]):
    """Places of several sources, each with the number of its source.

    which, inside: for every place, the number of its part and its position in that part.
    """

    def __init__(self, parts: Sequence[tuple[int, Places]], which: _Ints, inside: _Ints) -> None:
        self._parts, self._which, self._inside = parts, which, inside

    def __len__(self) -> int:
        return len(self._which)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            source, places = self._parts[int(self._which[index])]
            return source, places[int(self._inside[index])]
        return [self[i] for i in range(*index.indices(len(self)))]

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def take(self, indices: _Ints) -> _JoinedPlaces:
        """The places at `indices` only, so that little is sent to a worker."""
        which, inside = self._which[indices], self._inside[indices].copy()
        parts = []
        for number, (source, places) in enumerate(self._parts):
            of_source = np.flatnonzero(which == number)
            parts.append((source, places.take(inside[of_source])))
            inside[of_source] = np.arange(len(of_source))
        return _JoinedPlaces(parts, which, inside)


class _Reader:
    """Reads samples of any source. A source is opened when its first sample is read."""

    def __init__(self, sources: Sequence[Source], fields: Sequence[Sequence[int]], opened: ExitStack) -> None:
        self._sources, self._fields, self._opened = sources, fields, opened
        self._readers: dict[int, SourceReader] = {}

    def read(self, place: tuple[int, Any], arena: Arena) -> Sequence[Buffer | None]:
        number, inner = place
        payloads = self._reader(number).read(inner, arena)
        return [payloads[i] if i >= 0 else None for i in self._fields[number]]

    def head(self, place: tuple[int, Any]) -> bytes:
        """The first bytes of a sample's file; for readers without `head`, those of its first field."""
        number, inner = place
        reader = self._reader(number)
        head = getattr(reader, "head", None)
        if head is not None:
            return bytes(head(inner))
        payload = reader.read(inner, Arena(lambda: None))[0]
        return b"" if payload is None else bytes(payload[:HEAD_BYTES])

    def expect(self, places: Sequence[tuple[int, Any]]) -> None:
        """Announce the next samples to the readers that fetch ahead."""
        for number in {number for number, _ in places}:
            reader = self._reader(number)
            if isinstance(reader, AheadReader):
                reader.expect([inner for of, inner in places if of == number])

    def _reader(self, number: int) -> SourceReader:
        reader = self._readers.get(number)
        if reader is None:
            source = self._sources[number]
            reader = self._readers[number] = self._opened.enter_context(source.open())
            if isinstance(reader, LabellingReader):
                raise SourceError(f"{source.title}: its labels come with its samples; convert it separately")
        return reader
