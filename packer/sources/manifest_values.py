"""The values of a manifest as the containers keep them: labels as numbers, other columns as JSON.

Labels. Where every label is a whole number (also 3.0 or "3.0", which is what a column with gaps becomes in
pandas, and true and false) they are class numbers, kept as they are, and the classes have no names. Otherwise
every label is a name; classes are the sorted names, and a label is the position of its name. A missing label,
and the number -1, is NO_LABEL.

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

from packer.sources.manifest_columns import is_missing
from packer.sources.tables import Row, Table
from readers.errors import SourceError
from readers.sample import NO_LABEL

__all__ = ["json_payload", "number_labels"]

_NUMBER = re.compile(r"(-?[0-9]{1,18})(?:\.0+)?")
_MAX_LABEL = 1 << 53  # beyond it floats, and with them the labels of many a table, are not exact


def number_labels(values: Sequence[Any], lines: Sequence[int], table: Table) -> tuple[list[int], tuple[str, ...]]:
    """Labels and class names of all rows of a table. lines: the number of the row of each value.

    Raises SourceError, naming the row, for a label that is neither a whole number nor a name.
    """
    numbers = [_as_number(value) for value in values]
    if all(number is not None for number in numbers):
        for number, line in zip(numbers, lines, strict=True):
            if number is not None and not NO_LABEL <= number <= _MAX_LABEL:
                raise SourceError(
                    f"{table.where(line)}: the label {number} is out of range: classes count from 0 to 2^53"
                )
        return [number for number in numbers if number is not None], ()
    names = [_as_name(value, line, table) for value, line in zip(values, lines, strict=True)]
    classes = tuple(sorted(set(names) - {""}))
    positions = {name: number for number, name in enumerate(classes)} | {"": NO_LABEL}
    return [positions[name] for name in names], classes


def _as_number(value: Any) -> int | None:
    """The class number that a label is, None where it is no whole number."""
    if is_missing(value):
        return NO_LABEL
    if isinstance(value, str):
        match = _NUMBER.fullmatch(value.strip())
        return int(match[1]) if match else NO_LABEL if not value.strip() else None
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
            raise SourceError(f"{table.where(line)}: the label {name!r} is no text that could be a class name")
        return name
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
