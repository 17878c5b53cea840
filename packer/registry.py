"""Registries of formats and sources: entries by name, first those of packer, then those of installed packages.

An entry describes an implementation without importing it: its name, and the first bytes and names of its files. `load`
imports the implementation. Another distribution adds an entry through an entry point:

    [project.entry-points."packer.formats"]          # or "packer.sources"
    myformat = "mypackage.packing:ENTRY"

where ENTRY is a `packer.formats.FormatEntry` (or `packer.sources.SourceEntry`) of that name. Installed entries are
loaded only if none of packer's matches; they cannot replace one of packer's. A broken one is skipped with a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from itertools import chain
from typing import Any, Generic, TypeVar

from cache.plugins import installed_points, load_point

__all__ = ["HEAD_BYTES", "Entry", "Registry"]

HEAD_BYTES = 512
"""Number of first bytes of a file that entries get."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One implementation.

    name: of the implementation.
    title: what its files are, with the article: "a TFRecord file".
    home: "module:object" of the implementation.
    magic: (offset, bytes) pairs, any of which identifies its files.
    suffixes: of its files, in lower case.
    claims: identifies its files by their first HEAD_BYTES if no magic number does.
    """

    name: str
    title: str
    home: str
    magic: tuple[tuple[int, bytes], ...] = ()
    suffixes: tuple[str, ...] = ()
    claims: Callable[[bytes], bool] | None = field(default=None, compare=False)

    def is_content(self, head: bytes) -> bool:
        """Whether a file that begins with `head` is of this kind."""
        known = any(head[at : at + len(magic)] == magic for at, magic in self.magic)
        return known or (self.claims is not None and self.claims(head))

    def is_name(self, name: str) -> bool:
        """Whether a file has one of the suffixes."""
        return name.lower().endswith(self.suffixes)

    def load(self) -> Any:
        """The implementation."""
        module, _, name = self.home.partition(":")
        return getattr(import_module(module), name)


_E = TypeVar("_E", bound=Entry)


class Registry(Generic[_E]):
    """The entries of one kind. Iteration yields packer's entries before it looks for installed ones."""

    def __init__(self, group: str, kind: type[_E], own: Sequence[_E]) -> None:
        self.own = tuple(own)
        self._group, self._kind = group, kind

    def __iter__(self) -> Iterator[_E]:
        yield from self.own
        yield from self._installed

    @cached_property
    def _installed(self) -> tuple[_E, ...]:
        points = installed_points(self._group, {entry.name for entry in self.own})
        entries = (load_point(point, self._kind) for point in points)
        return tuple(entry for entry in entries if entry is not None)

    def names(self) -> tuple[str, ...]:
        return tuple(entry.name for entry in self)

    def get(self, name: str) -> _E | None:
        return next((entry for entry in self if entry.name == name), None)

    def of_content(self, head: bytes) -> _E | None:
        """The first entry that recognises the first bytes of a file."""
        return next((entry for entry in self if entry.is_content(head)), None)

    def of_name(self, name: str) -> _E | None:
        """The first entry with the suffix of a file."""
        return next((entry for entry in self if entry.is_name(name)), None)

    def suffixes(self) -> tuple[str, ...]:
        """The suffixes of all entries."""
        return tuple(dict.fromkeys(chain.from_iterable(entry.suffixes for entry in self)))
