"""What users read and write: the progress of work, counts, sizes, and foreign text made safe for a terminal.

>>> plural(1, "shard"), plural(1200, "class"), plural(0, "directory")
('1 shard', '1,200 classes', '0 directories')
>>> printable("a\\x1b[2Jb")
'a\\\\x1b[2Jb'
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from itertools import islice
from typing import Protocol

__all__ = [
    "Counter",
    "Done",
    "Silent",
    "Watcher",
    "bar",
    "human_bytes",
    "human_seconds",
    "json_printable",
    "listed",
    "parse_size",
    "plural",
    "printable",
    "shortened",
]

Done = Callable[[], tuple[int, int]]  # (samples, bytes) so far
# C0 (but for tab and newline), DEL, C1, what turns the direction of text round, separators, and halves of surrogates.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_UNITS = {"": 1} | {unit: 10 ** (3 * n) for n, unit in enumerate("kmgt", 1)}
_UNITS |= {f"{unit}i": 1 << 10 * n for n, unit in enumerate("kmgt", 1)}


class Watcher(Protocol):
    """Shows the progress of work. Calls come from the thread that works."""

    def note(self, text: str) -> None:
        """Something that users should know: a warning, a stage, the directory that was chosen."""

    def begin(self, samples: int, total_bytes: int, done: Done, *, waiting: bool = False) -> None:
        """Work on so many samples and bytes (0: unknown, or not counted) begins; `done` returns both so far.

        waiting: another process does the work, and this one waits for it.
        """

    def end(self) -> None:
        """The work is over, whether it succeeded or not."""


class Silent:
    """A watcher that shows nothing."""

    def note(self, text: str) -> None: ...

    def begin(self, samples: int, total_bytes: int, done: Done, *, waiting: bool = False) -> None: ...

    def end(self) -> None: ...


class Counter(Protocol):
    """Where a worker reports progress, and learns whether it should stop."""

    def report(self, samples: int, payload_bytes: int) -> None: ...

    def stopped(self) -> bool: ...


def plural(count: int, noun: str) -> str:
    """A count with its noun: "1 shard", "1,200 classes"."""
    if count == 1:
        return f"1 {noun}"
    if noun.endswith(("s", "x", "ch", "sh")):
        noun += "es"
    elif noun.endswith("y") and noun[-2:-1] not in "aeiou":
        noun = f"{noun[:-1]}ies"
    else:
        noun += "s"
    return f"{count:,} {noun}"


def listed(names: Collection[str], most: int = 3) -> str:
    """The first few of some names: "a, b, c, …"."""
    return ", ".join(islice(names, most)) + (", …" if len(names) > most else "")


def printable(text: str) -> str:
    r"""`text` with control characters as escapes (\x1b, \u202e), so that names of files move no cursor.

    Lines and tabs stay.
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def json_printable(text: str) -> str:
    """The same for a JSON document, as JSON's own escapes."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def parse_size(text: str) -> int:
    """Bytes of a size such as "1GiB", "256MB", "4096". Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a valid size; write it as 256MiB or 1GiB")
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


def bar(share: float, width: int = 30) -> str:
    """A bar of `share` (0 to 1) of the width; at least a sliver for more than nothing."""
    eighths = round(share * width * 8)
    if share > 0:
        eighths = max(1, eighths)
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]


def human_bytes(size: float) -> str:
    """Bytes with a decimal unit: 1.34 GB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    raise AssertionError


def human_seconds(seconds: float) -> str:
    """A duration: 0.4 s, 12 s, 3:05 min, 2:10 h."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes}:{rest:02d} min"
    return f"{minutes // 60}:{minutes % 60:02d} h"


def shortened(text: str, most: int) -> str:
    """A text of at most `most` characters, without its middle where it is longer: "transf…rm 2"."""
    if len(text) <= most:
        return text
    end = (most - 1) // 2
    return f"{text[: most - 1 - end]}…{text[len(text) - end :]}" if most > 2 else text[:most]
