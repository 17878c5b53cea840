"""Which shards are missing, by the names of those that are there.

    train-00003-of-00008.tfrecord     says that there are eight
    train-000003.tar                  has all from the lowest number to the highest before and behind it, by custom

Numbers of a tar count as such where they are padded with zeros to three digits or more, or where they start at 0, so
that years and dates are none.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

__all__ = ["missing_shards"]

_OF = re.compile(r"(?P<head>.*-)(?P<number>\d+)(?P<of>-of-(?P<count>\d+).*)", re.DOTALL)
_TAR = re.compile(r"(?P<head>.*?)(?P<number>\d+)\.tar", re.DOTALL)
_NAMED = 3
_MOST_DIGITS = 9


def missing_shards(names: Iterable[str]) -> tuple[int, list[str]]:
    """How many shards the names of those that are there call for beside them, and some of their names."""
    count, some = 0, list[str]()
    told: dict[tuple[str, str], dict[int, str]] = {}
    for name in names:
        match = _OF.fullmatch(name) or _TAR.fullmatch(name)
        if match is not None and len(match["number"]) <= _MOST_DIGITS:
            told.setdefault((match["head"], match.groupdict().get("of") or ".tar"), {})[int(match["number"])] = match[
                "number"
            ]
    for (head, tail), found in told.items():
        wanted = _numbers_of_count(found, tail) if tail != ".tar" else _numbers_of_tars(found)
        missing = len(wanted) - sum(number in wanted for number in found)
        if missing > 0:
            count += missing
            width = max(map(len, found.values())) if len({*map(len, found.values())}) == 1 else 0
            gone = (f"{head}{number:0{width}d}{tail}" for number in wanted if number not in found)
            some += itertools.islice(gone, _NAMED - len(some))
    return count, some


def _numbers_of_count(found: dict[int, str], tail: str) -> range:
    match = re.match(r"-of-(\d+)", tail)
    assert match is not None
    count = int(match[1]) if len(match[1]) <= _MOST_DIGITS else 0
    return range(1, count + 1) if count in found and 0 not in found else range(count)


def _numbers_of_tars(found: dict[int, str]) -> range:
    lowest = min(found)
    padded = found[lowest].startswith("0") and len(found[lowest]) >= 3
    return range(lowest, max(found) + 1) if padded or (lowest == 0 and found[0] == "0") else range(0)
