"""Shared by all commands: options, numbers for people, results."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from cache.errors import BadNameError, RemoteError
from cache.messages import bar, human_bytes, human_seconds, json_printable, parse_size, printable, quoted
from cache.remote import parse_url
from packer.cli.screen import ProgressDisplay, verbose_option, watcher, width
from readers.layout import SplitName

__all__ = [
    "Duration",
    "Emphasis",
    "ProgressDisplay",
    "Rate",
    "SetPlace",
    "Size",
    "bar",
    "human_bytes",
    "human_seconds",
    "json_option",
    "new_split_option",
    "one_of_many",
    "pairs",
    "part_option",
    "print_json",
    "show",
    "show_result",
    "split_option",
    "target_option",
    "threads_option",
    "watcher",
    "width",
    "workers_option",
]

F = TypeVar("F", bound=Callable[..., Any])
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
workers_option = click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Processes. Default: the CPUs this process may really use (affinity, cgroup, Slurm).",
)


def json_option(command: F) -> F:
    """--json and -v, which every command has."""
    document = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, and no progress.")
    return document(verbose_option(command))


def threads_option(help: str) -> Callable[[F], F]:
    """--threads N."""
    return click.option("--threads", type=click.IntRange(min=1), metavar="N", help=help)


def split_option(help: str = "Only this split.") -> Callable[[F], F]:
    """--split SPLIT, of an existing set."""
    return click.option("--split", metavar="SPLIT", help=help)


def new_split_option(help: str) -> Callable[[F], F]:
    """--split SPLIT, which may get a new name."""
    return click.option("--split", callback=_split_name, metavar="SPLIT", help=help)


def part_option(help: str) -> Callable[[F], F]:
    """--part I/N, as (i, n), or node."""
    return click.option("--part", callback=_part, metavar="I/N", help=help)


def _part(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, int] | str | None:
    return value if value is None or value == "node" else one_of_many(value, "nor node")


def one_of_many(value: str, otherwise: str = "") -> tuple[int, int]:
    """I/N as (i, n). Raises BadParameter."""
    number, slash, count = value.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        what = (
            f"is neither I/N, with I from 0 to N - 1, {otherwise}" if otherwise else "is not I/N with I from 0 to N - 1"
        )
        raise click.BadParameter(f"{value!r} {what}; as 0/4")
    return int(number), int(count)


def target_option(help: str, **more: Any) -> Callable[[F], F]:
    """--target DIR."""
    return click.option("--target", metavar="DIR", help=help, **more)


def _split_name(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
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


class Rate(Size):
    """Bytes a second, as 40GB/s."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, float):
            return value
        return float(super().convert(re.sub(r"/s$", "", str(value)), param, ctx))


class Duration(click.ParamType):  # type: ignore[type-arg]
    """A time, as 20ms or 1.5s, in seconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(s|ms|us|µs)", str(value))
        if found is None:
            self.fail(f"{value!r} is not a valid time; write it with its unit, as 20ms or 1.5s", param, ctx)
        return float(found[1]) * _UNITS[found[2]]


class SetPlace(click.ParamType):  # type: ignore[type-arg]
    """A path of this machine, which must exist unless `missing`, or an address of a set.

    local: refuse addresses, with a message that says what to do.
    """

    name = "set"

    def __init__(self, *, missing: bool = False, local: bool = False) -> None:
        self._path, self._local = click.Path(exists=not missing), local

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return self._path.shell_complete(ctx, param, incomplete)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if "://" not in str(value):
            return self._path.convert(value, param, ctx)
        try:
            url = parse_url(value)
        except RemoteError as error:
            self.fail(str(error), param, ctx)
        if self._local:
            self.fail(
                f"the files of {url} are needed here: run  packer stage {quoted(url)}  and name its directory",
                param,
                ctx,
            )
        return value


class Emphasis(str):
    """A line that `show` prints in yellow, where colours are enabled."""

    __slots__ = ()


def show(*lines: str, err: bool = False) -> None:
    """Print lines, with control characters escaped. All output but JSON goes through this function.

    err: on stderr, where stdout is another program's.
    """
    coloured = (
        (sys.stderr if err else sys.stdout).isatty()
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM") != "dumb"
    )
    for line in lines:
        text = printable(line).replace("\n", "\\n")
        click.echo(click.style(text, fg="yellow") if coloured and isinstance(line, Emphasis) else text, err=err)


def show_result(result: Any, as_json: bool, lines: Callable[[], Iterable[str]]) -> None:
    """Print a result, or a list of them, as JSON or as lines for people."""
    if as_json:
        print_json([item.to_dict() for item in result] if isinstance(result, list) else result.to_dict())
    else:
        show(*lines())


def print_json(value: Any) -> None:
    """One JSON document on stdout; control characters are escaped in it as JSON does."""
    click.echo(json_printable(json.dumps(value, indent=1, ensure_ascii=False, default=list)))


def pairs(kind: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, Any], dict[str, Any] | None]:
    """A callback of click for NAME=VALUE, several of them separated by commas or given in turn."""

    def parse(ctx: click.Context, param: click.Parameter, given: Any) -> dict[str, Any] | None:
        found: dict[str, Any] = {}
        for text in given.split(",") if isinstance(given, str) else given or ():
            name, equals, value = text.partition("=")
            try:
                if not name or not equals or name in found:
                    raise ValueError
                found[name] = kind(value)
            except ValueError:
                raise click.BadParameter(f"{text!r} is not NAME=VALUE, each name once") from None
        return found or None

    return parse
