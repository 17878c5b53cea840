"""Plug-ins: entry points of other distributions, each loaded when it is needed; a broken one causes a warning.

packer.commands   click commands                        packer.formats, packer.sources, packer.engines   entries
packer.forms      functions from parameters to a form   packer.stores    store classes, by scheme of an address
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

__all__ = ["installed_callable", "installed_names", "installed_points", "load_point"]

_T = TypeVar("_T")


def installed_points(group: str, taken: Collection[str]) -> list[EntryPoint]:
    """The entry points that other distributions define in a group, except those whose name is taken."""
    points: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        if point.name in taken or point.name in points:
            owner = "packer" if point.name in taken else _distribution(points[point.name])
            _warn_of(point, f"the name is taken by {owner}")
        else:
            points[point.name] = point
    return list(points.values())


def load_point(point: EntryPoint, kind: type[_T]) -> _T | None:
    """Load an entry point, an object of this kind with the same name; None, with a warning, if it is broken."""
    value = _loaded(point)
    if value is None or (isinstance(value, kind) and getattr(value, "name", None) == point.name):
        return value
    _warn_of(point, f"it is {value!r:.80}, expected a {kind.__name__} named {point.name!r}")
    return None


@cache
def installed_names(group: str, taken: tuple[str, ...]) -> tuple[str, ...]:
    """The names of a group, sorted, except those that are taken."""
    return tuple(sorted(point.name for point in installed_points(group, taken)))


@cache
def installed_callable(group: str, taken: tuple[str, ...], name: str) -> Any:
    """The function or class of this name; None, with a warning, if it is broken."""
    point = next((point for point in installed_points(group, taken) if point.name == name), None)
    value = None if point is None else _loaded(point)
    if point is None or value is None or callable(value):
        return value
    _warn_of(point, f"it is {value!r:.80}, expected a function or a class")
    return None


def _loaded(point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:
        _warn_of(point, f"it cannot be imported: {error!r:.200}")
        return None


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist else "an unknown distribution"


def _warn_of(point: EntryPoint, reason: str) -> None:
    warnings.warn(
        f"{_distribution(point)}: the entry point {point.name} = {point.value!r} of {point.group} is left out, because "
        f"{reason}; repair or uninstall that distribution",
        stacklevel=4,
    )
