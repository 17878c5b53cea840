"""Copies of files that could not be packed, put aside under their own names."""

from __future__ import annotations

from cache.files import Folder
from readers.names import QUARANTINE_FOLDER, RelativePath, shortened
from readers.sample import Buffer

__all__ = ["set_aside"]


def set_aside(work: Folder, split: str, name: str, payload: Buffer) -> None:
    """Write `payload` to quarantine/split/name below `work`; names in archives may be longer than those of files.

    Raises BadNameError for a name that leads out, PathError where something is in the way.
    """
    place = RelativePath(shortened(name))
    folder, _, last = f"{QUARANTINE_FOLDER}/{split}/{place}".rpartition("/")
    with work.folder(folder, create=True) as opened:
        opened.write(last, payload)
