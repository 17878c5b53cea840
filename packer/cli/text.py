"""What all commands share: options, numbers for people, results for machines."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

from cache.errors import BadNameError, RemoteError
from cache.messages import json_printable, parse_size, printable
from cache.remote import parse_url
from readers.names import SplitName

__all__ = [
    "Emphasis",
    "SetPlace",
    "Size",
    "bar",
    "human_bytes",
    "human_seconds",
    "json_option",
    "print_json",
    "show",
    "show_result",
    "split_name",
    "split_option",
    "target_option",
    "threads_option",
    "workers_option",
]

F = TypeVar("F", bound=Callable[..., Any])
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, and no progress.")
workers_option = click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Processes. Default: the CPUs this process may really use (affinity, cgroup, Slurm).",
)


def threads_option(help: str) -> Callable[[F], F]:
    """--threads N."""
    return click.option("--threads", type=click.IntRange(min=1), metavar="N", help=help)


def split_option(help: str = "Only this split.") -> Callable[[F], F]:
    """--split NAME, of a set that is there."""
    return click.option("--split", metavar="NAME", help=help)


def target_option(help: str, **more: Any) -> Callable[[F], F]:
    """--target DIR."""
    return click.option("--target", metavar="DIR", help=help, **more)


def split_name(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """The name of a split that is to be made; a callback of click."""
    try:
        return None if value is None else SplitName(value)
    except BadNameError as error:
        raise click.BadParameter(str(error)) from error


class Size(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes, as 1GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class SetPlace(click.ParamType):  # type: ignore[type-arg]
    """Hands on a path of this machine, which must exist unless `missing`; or an address of ours.

    local: no address will do, and the message says what will.
    """

    name = "set"

    def __init__(self, *, missing: bool = False, local: bool = False) -> None:
        self._path, self._local = click.Path(exists=not missing), local

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if "://" not in str(value):
            return self._path.convert(value, param, ctx)
        try:
            url = parse_url(value)
        except RemoteError as error:
            self.fail(str(error), param, ctx)
        if self._local:
            self.fail(
                f"the files of {url} are needed here: run  packer stage {url}  and name its directory", param, ctx
            )
        return value


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


def show_result(result: Any, as_json: bool, lines: Callable[[], Iterable[str]]) -> None:
    """A result, or a list of them: as JSON, or as the lines that tell people of it."""
    if as_json:
        print_json([item.to_dict() for item in result] if isinstance(result, list) else result.to_dict())
    else:
        show(*lines())


def print_json(value: Any) -> None:
    """One JSON document on stdout; control characters are escaped in it as JSON does."""
    click.echo(json_printable(json.dumps(value, indent=1, ensure_ascii=False, default=list)))
