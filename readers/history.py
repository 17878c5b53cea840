"""What was done to a set since it was packed, and what of its earlier states is still there: members of dataset.json.

    "edited": ["labels", "samples"]    what the index says otherwise than the shards: EDITS
    "separate": ["mask"]               fields in shards of their own, which are listed with 0 samples; the index has
                                       a column <field>.shard.npy for each
    "history": [{"operation": "append", "arguments": {"source": "new"}, "date": "2026-01-31T12:00:00Z",
                 "version": "packer 0.1.0", "samples": [before, after]}, …]
    "retired": [{"path": "train.index", "since": "2026-01-31T12:00:00Z", "content": "36-0a1b2c3d"}, …]

Retired files are those of earlier states; readers that opened the set before it was changed need them, and know them by
`DatasetInfo.contents`. History is for
people: an entry that is not of this form is left out. Times are UTC.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from readers.names import FieldName, ShardPath

__all__ = [
    "EDITS",
    "Operation",
    "Retired",
    "now",
    "parse_edited",
    "parse_history",
    "parse_made",
    "parse_retired",
    "parse_separate",
]

EDITS = {
    "keys": "the index has other keys",
    "labels": "the index has other labels",
    "samples": "the index has other samples, or another order",
}
"""What an index can say otherwise than its shards."""
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


@dataclass(frozen=True, slots=True)
class Operation:
    """One change of a set. date: UTC, ISO 8601. samples: before and after."""

    operation: str
    arguments: Mapping[str, Any]
    date: str
    version: str
    samples: tuple[int, int]

    def to_json(self) -> dict[str, Any]:
        return {
            "operation": self.operation,
            "arguments": dict(self.arguments),
            "date": self.date,
            "version": self.version,
            "samples": list(self.samples),
        }


@dataclass(frozen=True, slots=True)
class Retired:
    """A shard, or the folder of an index, that the set does not use since then.

    content: what `DatasetInfo.contents` said of it; "" in sets of earlier versions.
    """

    path: str
    since: str
    content: str = ""

    @property
    def age_seconds(self) -> float:
        since = datetime.strptime(self.since, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
        return (datetime.now(timezone.utc) - since).total_seconds()


def now() -> str:
    """The time as dataset.json has it."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_edited(value: Any) -> tuple[str, ...]:
    """Names of EDITS. Raises ValueError."""
    names = _texts(value, "edited")
    unknown = [name for name in names if name not in EDITS]
    if unknown:
        raise ValueError(f"edited names {unknown[0]!r:.80}, this packer knows {', '.join(EDITS)}; upgrade packer")
    return tuple(sorted(set(names)))


def parse_separate(value: Any, fields: Iterable[str]) -> tuple[str, ...]:
    """Names of fields. Raises ValueError."""
    names, known = _texts(value, "separate"), list(fields)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"separate names {unknown[0]!r:.80}, the fields are {', '.join(known)}")
    return tuple(FieldName(name) for name in known if name in names)


def parse_retired(value: Any) -> tuple[Retired, ...]:
    """Raises ValueError, BadNameError."""
    if not isinstance(value, list):
        raise ValueError(f"retired must be a list, found {value!r:.80}")
    found = []
    for item in value:
        item = item if isinstance(item, dict) else {}
        path, since, content = item.get("path"), item.get("since"), item.get("content", "")
        if (
            not isinstance(content, str)
            or not isinstance(path, str)
            or not isinstance(since, str)
            or not _is_time(since)
        ):
            raise ValueError(f"retired must have paths and times, found {item!r:.80}")
        found.append(Retired(ShardPath(path), since, content))
    return tuple(found)


def parse_history(value: Any) -> tuple[Operation, ...]:
    """The entries that are of the expected form."""
    found = []
    for item in value if isinstance(value, list) else ():
        if not isinstance(item, dict):
            continue
        texts = [item[name] for name in ("operation", "date", "version") if isinstance(item.get(name), str)]
        arguments: Any = item.get("arguments")
        samples: Any = item.get("samples")
        counts = isinstance(samples, list) and len(samples) == 2 and all(type(n) is int and n >= 0 for n in samples)
        if len(texts) == 3 and isinstance(arguments, dict) and counts:
            found.append(Operation(texts[0], arguments, texts[1], texts[2], (samples[0], samples[1])))
    return tuple(found)


def _texts(value: Any, what: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{what} must be a list of names, found {value!r:.80}")
    return value


def _is_time(text: str) -> bool:
    try:
        return bool(_TIME.fullmatch(text)) and bool(datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ"))
    except ValueError:
        return False


def parse_made(value: Any) -> dict[str, Any]:
    """How the set was made; members that are not of the expected type are ignored."""
    made: dict[str, Any] = value if isinstance(value, dict) else {}
    return {name: member for name, member in made.items() if _is_valid_member(name, member)}


def _is_valid_member(name: str, member: Any) -> bool:
    if name in ("by", "indexed_by", "source", "plan"):
        return isinstance(member, str)
    if name == "payload_bytes":
        return _is_count(member)
    if name == "left_out":
        return isinstance(member, dict) and all(map(_is_count, member.values()))
    return name != "options" or (isinstance(member, dict) and isinstance(member.get("split", ""), str))


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
