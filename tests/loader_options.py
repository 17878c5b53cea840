"""Options of a loader from a flat dictionary, so that tests can vary them one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from readers import Decode, Ranks, Threads, Views

_KINDS = {"ranks": Ranks, "decode": Decode, "threads": Threads}


def grouped(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, grouped into `Ranks`, `Decode`, `Threads` and `Views`."""
    made = dict(options)
    for parameter, kind in _KINDS.items():
        chosen = {f.name: made.pop(f.name) for f in fields(kind) if f.name in options}  # type: ignore[arg-type]
        if chosen:
            value = made.get(parameter)
            whole = value if isinstance(value, kind) else kind() if value is None else kind(value)
            made[parameter] = replace(whole, **chosen)  # type: ignore[type-var]
    if "views" in made:
        views = made.pop("views")
        made["augment"] = Views(made.get("augment", ()), views) if isinstance(views, int) else Views(views)
    return made
