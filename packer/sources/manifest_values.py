"""The values of a manifest as the containers keep them: labels as numbers, other columns as JSON.

Labels. Where every label is a whole number (also 3.0 or "3.0", which is what a column with gaps becomes in
pandas, and true and false) they are class numbers, kept as they are, and the classes have no names. Where most
labels are names, every label is one; classes are the sorted names, and a label is the position of its name. Numbers
among names are names, too, with a warning; a name, or a fraction, among numbers is an error, since a single one would
otherwise renumber all others. No label, which is NO_LABEL: a missing value, NaN, the number -1, and among numbers
what pandas takes for a missing value ("NA", "None", "null").

JSON. One object for each sample, compact, UTF-8, keys in the order of the columns. What JSON has no words
for: NaN and infinities become null; dates, times and timestamps ISO 8601 text; bytes base64; anything else
its text.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterable, Sequence
from datetime import date, time
from typing import Any

from cache.text import plural
from packer.sources.manifest_columns import is_missing
from packer.sources.tables import Row, Table
from readers.errors import SourceError
from readers.sample import NO_LABEL

__all__ = ["json_payload", "number_labels"]

_NUMBER = re.compile(r"(-?[0-9]{1,18})(?:\.0+)?")
_FRACTION = re.compile(r"[-+]?(?:[0-9]+[.,]?[0-9]*|[.,][0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?inf(?:inity)?", re.I)
_NOT_A_NUMBER = ("nan", "<na>", "-nan")
_MISSING = ("na", "n/a", "#n/a", "none", "null", "nil", "-", "?")
_FEWEST_NAMES = 10  # names that are less than a tenth of the numbers are mistakes, however many there are
_MAX_LABEL = 1 << 53  # beyond it floats, and with them the labels of many a table, are not exact


def number_labels(
    values: Sequence[Any], lines: Sequence[int], table: Table
) -> tuple[list[int], tuple[str, ...], list[str]]:
    """Labels and class names of all rows of a table, and warnings. lines: the number of the row of each value.

    Raises SourceError, naming the row, for a label that is neither a whole number nor a name, or does not fit the rest.
    """
    numbers = [_as_number(value) for value in values]
    strays = [i for i, number in enumerate(numbers) if number is None and not _means_none(values[i])]
    if not strays:
        for number, line in zip(numbers, lines, strict=True):
            if number is not None and not NO_LABEL <= number <= _MAX_LABEL:
                raise SourceError(
                    f"{table.where(line)}: the label {number} is out of range: classes count from 0 to 2^53"
                )
        return [NO_LABEL if number is None else number for number in numbers], (), []
    names = [_as_name(value, line, table) for value, line in zip(values, lines, strict=True)]
    rows = [i for i, number in enumerate(numbers) if number is not None and names[i]]
    _refuse_strays(names, rows, strays, lines, table)
    classes = tuple(sorted(set(names) - {""}))
    positions = {name: number for number, name in enumerate(classes)} | {"": NO_LABEL}
    warnings = []
    if rows:
        warnings.append(
            f"{table.path}: labels are names, so the whole numbers among them ({plural(len(rows), 'row')}, the first "
            f"in {table.unit} {lines[rows[0]]}: {names[rows[0]]!r}) are names too"
        )
    return [positions[name] for name in names], classes, warnings


def _refuse_strays(
    names: Sequence[str], rows: Sequence[int], strays: Sequence[int], lines: Sequence[int], table: Table
) -> None:
    """Raise SourceError where labels are numbers (in `rows`) but for some strays, rather than names."""
    fractions = [i for i in strays if _FRACTION.fullmatch(names[i])]
    found, meant = {names[i] for i in strays}, {names[i] for i in rows}
    if len(fractions) == len(strays):
        what = "is not a whole number; labels are class numbers or names"
    elif rows and (len(found) <= len(meant) or len(strays) * _FEWEST_NAMES < len(rows)):
        be = "is a whole number" if len(rows) == 1 else "are whole numbers"
        what = f"is a name, but {plural(len(rows), 'other label')} {be}"
    else:
        return
    more = f" (and so for {plural(len(strays) - 1, 'more row')})" if len(strays) > 1 else ""
    raise SourceError(
        f"{table.where(lines[strays[0]])}: the label {names[strays[0]]!r} {what}{more}; write a whole number there, or "
        f"nothing where there is no label; to have classes by name, write a name in every row, such as class_3 for 3"
    )


def _means_none(value: Any) -> bool:
    """Whether text among class numbers is what pandas, R or SQL write for a missing value."""
    return isinstance(value, str) and value.strip().casefold() in _MISSING


def _as_number(value: Any) -> int | None:
    """The class number that a label is, None where it is no whole number."""
    if is_missing(value):
        return NO_LABEL
    if isinstance(value, str):
        text = value.strip()
        match = _NUMBER.fullmatch(text)
        return int(match[1]) if match else NO_LABEL if text.casefold() in ("", *_NOT_A_NUMBER) else None
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    return None


def _as_name(value: Any, line: int, table: Table) -> str:
    """The class name that a label is, "" for none."""
    if is_missing(value):
        return ""
    if isinstance(value, str):
        name = value.strip()
        if "\0" in name or not _is_text(name):
            raise SourceError(f"{table.where(line)}: the label {name!r} is not text that could be a class name")
        return "" if name.casefold() in _NOT_A_NUMBER else name
    if isinstance(value, int):
        return str(value)
    raise SourceError(
        f"{table.where(line)}: the label {value!r:.60} is a {type(value).__name__}, expected a whole number "
        f"or a name; another column can be named with  --label-column"
    )


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def json_payload(row: Row, columns: Iterable[str]) -> bytes | None:
    """The JSON object of a row; None where the row has none of the columns."""
    found = {column: row[column] for column in columns if column in row}
    if not found:
        return None
    try:
        text = json.dumps(found, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_convert)
    except ValueError:
        text = json.dumps(_finite(found), ensure_ascii=False, separators=(",", ":"), default=_convert)
    try:
        return text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: legal in JSON only as an escape
        return json.dumps(json.loads(text), separators=(",", ":")).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _convert(value: Any) -> str:
    if isinstance(value, (date, time)):
        return value.isoformat()
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode()
    return str(value)
