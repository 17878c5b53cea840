"""Shared by all commands: options, numbers for people, results, and progress on stderr.

Progress is a bar on a terminal, a line now and then elsewhere, and nothing with --json.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TextIO, TypeVar

import click
from click.shell_completion import CompletionItem

from cache.errors import BadNameError, RemoteError
from cache.messages import (
    Done,
    Silent,
    Watcher,
    bar,
    human_bytes,
    human_seconds,
    json_printable,
    parse_size,
    printable,
)
from cache.remote import parse_url
from packer.cli.group import with_flags
from readers.names import SplitName

__all__ = [
    "Duration",
    "Emphasis",
    "ProgressDisplay",
    "SetPlace",
    "Size",
    "bar",
    "human_bytes",
    "human_seconds",
    "json_option",
    "pairs",
    "part_option",
    "print_json",
    "show",
    "show_result",
    "split_name",
    "split_option",
    "target_option",
    "threads_option",
    "watcher",
    "width",
    "workers_option",
]

F = TypeVar("F", bound=Callable[..., Any])
_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
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
    """--split NAME, of an existing set."""
    return click.option("--split", metavar="NAME", help=help)


def part_option(help: str) -> Callable[[F], F]:
    """--part I/N, as (i, n), or node."""
    return click.option("--part", callback=_part, metavar="I/N", help=help)


def _part(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, int] | str | None:
    if value is None or value == "node":
        return value
    node, slash, nodes = value.partition("/")
    if not (slash and node.isdecimal() and nodes.isdecimal() and int(node) < int(nodes)):
        raise click.BadParameter(f"{value!r} is neither i/n, with i from 0 to n - 1, nor node")
    return int(node), int(nodes)


def target_option(help: str, **more: Any) -> Callable[[F], F]:
    """--target DIR."""
    return click.option("--target", metavar="DIR", help=help, **more)


def split_name(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """The name of a new split; a callback of click."""
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


class Duration(click.ParamType):  # type: ignore[type-arg]
    """A time, as 20ms or 1.5s, in seconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(s|ms|us|µs|)", str(value))
        if found is None:
            self.fail(f"{value!r} is not a valid time: expected a number and a unit, as 20ms or 1.5s", param, ctx)
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
                f"the files of {url} are needed here: run  packer stage {url}  and name its directory", param, ctx
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


def width(stream: TextIO | None = None, other: int = 100) -> int:
    """Columns of the terminal that a stream is, stdout by default; `other` where it is not one."""
    try:
        return os.get_terminal_size((stream or sys.stdout).fileno()).columns or other
    except (OSError, ValueError):
        return other


def show_result(result: Any, as_json: bool, lines: Callable[[], Iterable[str]]) -> None:
    """Print a result, or a list of them, as JSON or as lines for people."""
    if as_json:
        print_json([item.to_dict() for item in result] if isinstance(result, list) else result.to_dict())
    else:
        show(*lines())


def print_json(value: Any) -> None:
    """One JSON document on stdout; control characters are escaped in it as JSON does."""
    click.echo(json_printable(json.dumps(value, indent=1, ensure_ascii=False, default=list)))


_BAR, _LEAST_BAR = 24, 4
_COLUMNS = 80
_TERMINAL_SECONDS = 0.2
_LINE_SECONDS = 10.0


def watcher(json: bool) -> Watcher:
    """The watcher that a command passes to the library."""
    return Silent() if json else ProgressDisplay(sys.stderr)


class ProgressDisplay:
    """Draws progress, from a thread that runs during the work."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def note(self, text: str) -> None:
        print(f"packer: {printable(with_flags(text))}", file=self._stream, flush=True)

    def begin(self, samples: int, total_bytes: int, done: Done, *, waiting: bool = False) -> None:
        self._stop.clear()
        self._thread = threading.Thread(target=self._draw, args=(samples, total_bytes, done), daemon=True)
        self._thread.start()

    def end(self) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def _draw(self, samples: int, total_bytes: int, done: Done) -> None:
        started = time.monotonic()
        step = _TERMINAL_SECONDS if self._terminal else _LINE_SECONDS
        while not self._stop.wait(step):
            columns = width(self._stream, _COLUMNS) if self._terminal else 0  # it may have been resized
            self._show(progress_line(samples, total_bytes, *done(), time.monotonic() - started, columns))
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _show(self, line: str) -> None:
        self._stream.write(f"\r{line}\x1b[K" if self._terminal else f"packer: {line}\n")
        self._stream.flush()


def progress_line(
    samples: int, total_bytes: int, done_samples: int, done_bytes: int, seconds: float, columns: int = 0
) -> str:
    """One line: share done, rates, time left. By bytes where their total is known, by samples otherwise.

    columns: width of the terminal; the line stays shorter, as one that wraps is repeated and not overwritten. 0: none.
    """
    if total_bytes:
        share = min(1.0, done_bytes / total_bytes)
    else:
        share = min(1.0, done_samples / samples) if samples else 0.0
    parts = [f"{share:4.0%}"]
    seconds = max(seconds, 1e-9)
    if done_samples:
        of = f"/{samples:,}" if samples else ""
        parts.append(f"{done_samples:,}{of} samples, {done_samples / seconds:,.0f}/s")
    if done_bytes:
        parts.append(f"{human_bytes(done_bytes / seconds)}/s")
    if share > 0:
        parts.append(f"{human_seconds(seconds * (1 - share) / share)} left")
    line = "  ".join(parts)
    if not columns:
        return line
    width = min(_BAR, columns - len(line) - 3)
    if width >= _LEAST_BAR:
        filled = round(share * width)
        line = "█" * filled + "░" * (width - filled) + f"  {line}"
    return line[: max(0, columns - 1)]


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
