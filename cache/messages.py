"""Formatting for users: progress of work, counts, sizes, tables, and foreign text made safe for a terminal.

>>> plural(1, "shard"), plural(1200, "class"), plural(0, "directory")
('1 shard', '1,200 classes', '0 directories')
>>> printable("a\\x1b[2Jb")
'a\\\\x1b[2Jb'
"""

from __future__ import annotations

import os
import re
import shlex
import textwrap
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import Protocol

Done = Callable[[], "tuple[int, int] | tuple[int, int, int]"]  # (samples, bytes) so far, and optionally samples skipped
# C0 (except tab and newline), DEL, C1, bidirectional controls, separators, and lone surrogates.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_UNITS = {"": 1} | {unit: 10 ** (3 * n) for n, unit in enumerate("kmgt", 1)}
_UNITS |= {f"{unit}i": 1 << 10 * n for n, unit in enumerate("kmgt", 1)}
_LEAST_NAME, _LEAST_TEXT, _LEAST_WIDTH = 12, 30, 20
_LEAST_BAR, _MOST_BAR = 8, 40


class Watcher(Protocol):
    """Shows the progress of work. Its methods are called by the working thread."""

    def note(self, text: str) -> None:
        """Show a message: a warning, a stage, the directory that was chosen."""

    def begin(self, samples: int, total_bytes: int, done: Done, *, waiting: bool = False) -> None:
        """Work on so many samples and bytes begins (0: unknown or not counted).

        done: returns samples and bytes so far, and the number of skipped samples if that is counted.
        waiting: another process does the work, and this one waits for it.
        """

    def end(self) -> None:
        """The work is over, successfully or not."""


class Silent:
    """A watcher that shows nothing."""

    def note(self, text: str) -> None: ...

    def begin(self, samples: int, total_bytes: int, done: Done, *, waiting: bool = False) -> None: ...

    def end(self) -> None: ...


class Counter(Protocol):
    """Receives the progress of a worker, and tells it whether to stop."""

    def report(self, samples: int, payload_bytes: int, left_out: int = 0) -> None:
        """So many more are done; left_out: how many of the samples were skipped."""

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
    """The first few names: "a, b, c, …"."""
    return ", ".join(islice(names, most)) + (", …" if len(names) > most else "")


def printable(text: str) -> str:
    r"""`text` with control characters escaped (\x1b, \u202e), so that file names cannot move the cursor.

    Newlines and tabs are kept.
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def quoted(word: object) -> str:
    r"""A path, key or other word of a suggested command, quoted for a POSIX shell.

    Control characters and undecodable bytes become escapes in $'…', which bash and zsh understand.

    >>> quoted("imagenette2"), quoted("my set"), quoted("a\x1b")
    ('imagenette2', "'my set'", "$'a\\x1b'")
    """
    text = os.fspath(word) if isinstance(word, os.PathLike) else str(word)
    if not _CONTROL.search(text) and "\n" not in text and "\t" not in text:
        return shlex.quote(text)
    escapes = {"\n": "\\n", "\t": "\\t", "\\": "\\\\", "'": "\\'"}
    for control in _CONTROL.findall(text):
        undecodable = "\udc80" <= control <= "\udcff"
        raw = os.fsencode(control) if undecodable else control.encode("utf-8", "surrogatepass")
        escapes[control] = "".join(f"\\x{byte:02x}" for byte in raw)
    return "$'" + "".join(escapes.get(character, character) for character in text) + "'"


def json_printable(text: str) -> str:
    """`printable` for JSON documents, with the escapes of JSON."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def parse_size(text: str) -> int:
    """Bytes of a size such as "1GiB", "256MB", "4096B". Raises ValueError, also for a number without a unit but 0."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?(b?)\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a valid size; write it as 256MiB or 1GiB")
    number, unit, byte = match.groups()
    if not (unit or byte) and float(number):
        raise ValueError(f"{text.strip()!r} has no unit: {number}B, {number}MiB or {number}GiB?")
    return int(float(number) * _UNITS[(unit or "").lower()])


def bar(share: float, width: int = 30) -> str:
    """A bar for `share` (0 to 1) of the width; never empty for a positive share."""
    eighths = round(share * width * 8)
    if share > 0:
        eighths = max(1, eighths)
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]


def human_bytes(size: float) -> str:
    """A number of bytes with a decimal unit: 1.34 GB."""
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
    """The text cut to `most` characters by leaving out its middle: "transf…rm 2"."""
    if len(text) <= most:
        return text
    end = (most - 1) // 2
    return f"{text[: most - 1 - end]}…{text[len(text) - end :]}" if most > 2 else text[:most]


def wrapped(text: str, width: int, indent: str = "  ") -> list[str]:
    """The text as lines of this width; all but the first are indented. Paths and long words are not broken."""
    width = max(_LEAST_WIDTH, width)
    return textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    *,
    left: int = 1,
    bars: Sequence[float] = (),
    optional: Sequence[str] = (),
) -> list[str]:
    """Rows in columns, as lines of at most `width` characters; the headings are the first line.

    If the last heading is "", the last column is free text: it begins after the last non-empty cell of its row, and
    wraps to as many lines as it needs.

    left: how many columns are left-aligned; the others are right-aligned.
    bars: for each row a share, 0 to 1, drawn as a bar after its cells.
    optional: headings of columns to leave out, in this order, until the others fit. Then the first column is cut.
    """
    count = len(headings) - (not headings[-1])
    bar_room = _LEAST_BAR + 2 if bars else 0
    widths = [max(len(row[column]) for row in (headings, *rows)) for column in range(count)]
    columns, waiting = list(range(count)), [headings.index(name) for name in optional if name in headings]

    def missing() -> int:
        return sum(widths[column] + 2 for column in columns) - 2 + bar_room - width

    while waiting and missing() > 0:
        columns.remove(waiting.pop(0))
    widths[0] = min(widths[0], max(_LEAST_NAME, widths[0] - missing()))
    bar_room = max(0, min(_MOST_BAR, _LEAST_BAR - missing()))

    def line(row: Sequence[str], drawn: str = "") -> list[str]:
        cells = [shortened(row[column], widths[column]) for column in columns]
        aligned = [f"{cell:{'<' if n < left else '>'}{widths[n]}}" for n, cell in zip(columns, cells, strict=True)]
        text = row[count] if len(row) > count else ""
        while text and not drawn and len(cells) > 1 and not cells[-1]:
            cells.pop()
        start = "  ".join([*aligned[: len(cells)], drawn] if drawn else aligned[: len(cells)])
        if not text:
            return [start.rstrip()]
        indent = len(start) + 2 if width - len(start) - 2 >= _LEAST_TEXT else 4
        return wrapped(f"{start}  {text}", width, " " * indent)

    lines = line([*headings[:count], ""] if count < len(headings) else headings)
    for number, row in enumerate(rows):
        lines += line(row, bar(bars[number], bar_room) if bars else "")
    return lines
