"""`labels.csv` beside extracted files: what their folders do not tell. Columns path, label, class, split.

Splits that are extracted one after the other, at the same time even, share the file: rows are added to those that are
there. A table of another kind is somebody's own.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import NamedTuple

from cache.errors import OutputError
from cache.files import Folder

__all__ = ["LABELS_FILE", "LabelRow", "add_labels"]

LABELS_FILE = "labels.csv"
_MAX_BYTES = 1 << 32
_LOCK, _LOCK_SECONDS = "labels.lock", 120.0


class LabelRow(NamedTuple):
    """One file: its path below the folder, the number and the name of its class, its split."""

    path: str
    label: str
    name: str
    split: str


_HEADER = ["path", "label", "class", "split"]


def add_labels(place: Folder, rows: Iterable[LabelRow], overwrite: bool, shared: Folder, scratch: Folder) -> None:
    """Add rows to the labels.csv of `place`; a row of the same file in the same split is replaced under `overwrite`.

    shared: a folder of all who write here, for the lock; scratch: one of our own. Raises OutputError where the file
    is not one of ours, or says something else of a file.
    """
    with shared.lock(_LOCK, _LOCK_SECONDS):
        known = {} if overwrite and not _is_ours(place) else _read(place)
        for row in rows:
            found = known.setdefault((row.path, row.split), row)
            if found == row:
                continue
            if not overwrite:
                raise OutputError(
                    f"{place.path / LABELS_FILE}: says {found.label} {found.name!r} of {row.path!r}, the set says "
                    f"{row.label} {row.name!r}; add --overwrite, or choose another output"
                )
            known[row.path, row.split] = row
        text = io.StringIO(newline="")
        table = csv.writer(text)
        table.writerow(_HEADER)
        table.writerows(known.values())
        place.write(LABELS_FILE, text.getvalue().encode(), scratch=scratch)
        shared.unlink(_LOCK)


def _is_ours(place: Folder) -> bool:
    try:
        _read(place)
    except OutputError:
        return False
    return True


def _read(place: Folder) -> dict[tuple[str, str], LabelRow]:
    """The rows that are there, by path and split."""
    where = place.path / LABELS_FILE
    kind = place.kind(LABELS_FILE)
    if not kind:
        return {}
    if kind != "file":
        raise OutputError(f"{where}: is in the way (a {kind})")
    try:
        header, *rows = csv.reader(io.StringIO(place.read(LABELS_FILE, _MAX_BYTES).decode(), newline=""), strict=True)
        if header != _HEADER:
            raise ValueError(f"its columns are {', '.join(header)[:80]}")
        found = [LabelRow(*row) for row in rows]
    except (ValueError, TypeError, csv.Error) as error:
        raise OutputError(
            f"{where}: is there, and no table of labels that packer wrote ({error}); add --overwrite to replace it, or "
            f"choose another output"
        ) from error
    return {(row.path, row.split): row for row in found}
