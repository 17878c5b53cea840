"""What a batch or an item is made of: fields of a set, and what is known of each sample without reading it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from readers.errors import UnknownNameError
from readers.sample import Reader

__all__ = ["checked_fields"]

_KNOWN = ("image", "label", "key", "index")


def checked_fields(
    fields: Sequence[str] | Mapping[str, str], reader: Reader
) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """The fields, and the names that they get where dictionaries are asked for. Raises UnknownNameError."""
    if isinstance(fields, str):
        raise UnknownNameError(f"fields are a list of names, not {fields!r}: write  fields=({fields!r},)")
    known = [*_KNOWN, *(name for name in reader.fields if name not in _KNOWN)]
    names = tuple(fields) if isinstance(fields, Mapping) else None
    wanted = tuple(fields.values()) if isinstance(fields, Mapping) else tuple(fields)
    for name in wanted:
        if name not in known:
            raise UnknownNameError(f"no field {name!r}; a batch can have {', '.join(known)}")
    return wanted, names
