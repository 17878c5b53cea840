"""Numbers for people, and results for machines."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click

from cache.text import json_printable, printable
from readers.errors import BadNameError
from readers.names import SplitName

__all__ = [
    "Emphasis",
    "bar",
    "human_bytes",
    "human_seconds",
    "json_option",
    "print_json",
    "show",
    "split_name",
    "workers_option",
]

json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, and no progress.")
workers_option = click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Processes. Default: the CPUs this process may really use (affinity, cgroup, Slurm).",
)


def split_name(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """The name of a split that is to be made; a callback of click."""
    try:
        return None if value is None else SplitName(value)
    except BadNameError as error:
        raise click.BadParameter(str(error)) from error


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


class Emphasis(str):
    """A line that `show` prints in yellow, where it prints colours at all."""

    __slots__ = ()


def show(*lines: str) -> None:
    """Print lines on stdout: the only way there but for JSON. What names of files could do to a terminal is escaped."""
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    for line in lines:
        text = printable(line).replace("\n", "\\n")
        click.echo(click.style(text, fg="yellow") if coloured and isinstance(line, Emphasis) else text)


def bar(share: float, width: int = 30) -> str:
    """A bar of `share` (0 to 1) of the width; at least a sliver for more than nothing."""
    eighths = round(share * width * 8)
    if share > 0:
        eighths = max(1, eighths)
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]


def print_json(value: Any) -> None:
    """One JSON document on stdout; control characters are escaped in it as JSON does."""
    click.echo(json_printable(json.dumps(value, indent=1, ensure_ascii=False, default=list)))
