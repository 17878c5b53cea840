"""Output of commands on stderr: progress, notes, log lines, versions; and flags instead of arguments in messages."""

from __future__ import annotations

import functools
import logging
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any, TextIO, TypeVar

import click

from cache.messages import Done, Silent, Watcher, human_bytes, human_seconds, printable
from cache.system import resource
from packer import __version__

__all__ = [
    "ProgressDisplay",
    "learn_flags",
    "progress_line",
    "stop_logging",
    "verbose_option",
    "version_lines",
    "watcher",
    "width",
    "with_flags",
]


_ARGUMENT = re.compile(r"\b([a-z][a-z_]*)=('[^']*'|[A-Za-z0-9_]+)")
_flags: dict[str, str] = {}


def learn_flags(command: click.Command | None) -> None:
    """Remember the options of a command and its subcommands."""
    for part in command.commands.values() if isinstance(command, click.Group) else ():
        learn_flags(part)
    for option in command.params if command is not None else ():
        if isinstance(option, click.Option):
            _flags[str(option.name)] = max(option.opts, key=len)


def with_flags(message: str) -> str:
    """The message with flags instead of arguments, except after "(in Python:"."""

    def flag(match: re.Match[str]) -> str:
        name, value = match[1], match[2].strip("'")
        if name not in _flags:
            return match[0]
        return _flags[name] if value == "True" else f"{_flags[name]} {value}"

    text, mark, rest = message.partition("(in Python:")
    return _ARGUMENT.sub(flag, text) + mark + rest


# ------------------------------------------------------------------------------
# Progress, notes and log lines on stderr: a bar on a terminal, an occasional line elsewhere, nothing with --json.
#
# A bar is a line without a newline, which the next one overwrites. Notes and log lines, from any thread, clear it
# first.


_BAR, _LEAST_BAR = 24, 4
_COLUMNS = 80
_TERMINAL_SECONDS = 0.2
_LINE_SECONDS = 10.0


def watcher(json: bool) -> Watcher:
    """The watcher that a command passes to the library."""
    return Silent() if json else ProgressDisplay(sys.stderr)


def width(stream: TextIO | None = None, other: int = 100) -> int:
    """Columns of the terminal behind a stream, stdout by default; `other` if it is not a terminal."""
    try:
        return os.get_terminal_size((stream or sys.stdout).fileno()).columns or other
    except (OSError, ValueError):
        return other


class Screen:
    """Writes lines to a stream, and on a terminal a bar below them. Thread-safe."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._lock = threading.Lock()
        self._is_drawn = False

    def line(self, text: str) -> None:
        """Write a line, with control characters escaped."""
        self.draw("", f"{printable(text)}\n")

    def draw(self, text: str, above: str = "") -> None:
        """Replace the last drawing by `text`; "" only removes it. above: whole lines to write before it."""
        with self._lock:
            before = "\r\x1b[K" if self._is_drawn else ""
            self.stream.write(f"{before}{above}{text}")
            self.stream.flush()
            self._is_drawn = bool(text)


@functools.cache
def screen_of(stream: TextIO) -> Screen:
    """The only screen of a stream."""
    return Screen(stream)


class ProgressDisplay:
    """Draws progress from a separate thread."""

    def __init__(self, stream: TextIO) -> None:
        self._screen = screen_of(stream)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def note(self, text: str) -> None:
        self._screen.line(f"packer: {with_flags(text)}")

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
        started, screen = time.monotonic(), self._screen
        while not self._stop.wait(_TERMINAL_SECONDS if screen.is_terminal else _LINE_SECONDS):
            columns = width(screen.stream, _COLUMNS) if screen.is_terminal else 0  # the terminal may have been resized
            line = progress_line(samples, total_bytes, done(), time.monotonic() - started, columns)
            if screen.is_terminal:
                screen.draw(line)
            else:
                screen.line(f"packer: {line}")
        if screen.is_terminal:
            screen.draw("")


def progress_line(samples: int, total_bytes: int, done: tuple[int, ...], seconds: float, columns: int = 0) -> str:
    """One line: share done, samples, rates, time left. By bytes where their total is known, by samples otherwise.

    done: samples and bytes so far, and samples skipped if they are counted.
    columns: width of the terminal, or 0. The line stays shorter, since a wrapped line is not overwritten: parts that do
    not fit are left out, and the remaining space is a bar.
    """
    done_samples, done_bytes, left_out = (*done, 0)[:3]
    total, part = (total_bytes, done_bytes) if total_bytes else (samples, done_samples)
    share = min(1.0, part / total) if total else None
    seconds = max(seconds, 1e-9)
    percent = "" if share is None else f"{share:4.0%}"
    counted = f"{done_samples:,}{f'/{samples:,}' if samples else ''} samples" if done_samples else ""
    missing = f"{left_out:,} left out" if left_out else ""
    pace = f"{done_samples / seconds:,.0f}/s" if done_samples else ""
    flow = f"{human_bytes(done_bytes / seconds)}/s" if done_bytes else ""
    if share is None:
        left = human_seconds(seconds)
    else:
        left = f"{human_seconds(seconds * (1 - share) / share)} left" if share else ""
    for parts in (
        (percent, _list(counted, pace, missing), flow, left),
        (percent, _list(counted, pace, missing), left),
        (percent, _list(counted, missing), left),
        (percent, _list(counted, missing)),
        (percent, counted),
        (percent, left),
        (percent or left,),
    ):
        line = "  ".join(filter(None, parts))
        if not columns or len(line) < columns:
            break
    else:
        return line[: columns - 1]
    room = min(_BAR, columns - len(line) - 3)
    if share is not None and room >= _LEAST_BAR:
        filled = round(share * room)
        line = "█" * filled + "░" * (room - filled) + f"  {line}"
    return line


def _list(*texts: str) -> str:
    return ", ".join(filter(None, texts))


# ------------------------------------------------------------------------------
# -v: the log of the library on stderr; each line begins with the seconds since the command began.
#
# The packages log through `logging`, with loggers named after their modules: what was listed and planned, which
# directory was chosen, each shard and file when it is done. Programs that use them get the same log with
# logging.basicConfig.


F = TypeVar("F", bound=Callable[..., Any])
_PACKAGES = ("packer", "readers", "cache")
_SHOWN = ("numpy", "h5py", "pillow", "simplejpeg", "crc32c", "zstandard", "click", "lazy_loader", "packaging",
          "psutil")  # fmt: skip
_SHOWN_EXTRAS = ("torch", "obstore", "pyarrow")
_log = logging.getLogger(__name__)


class _Lines(logging.Handler):
    """Writes the log records of this process, not of forked workers, above the progress bar."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._started, self._process = time.monotonic(), os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        if os.getpid() != self._process:
            return
        try:
            seconds = time.monotonic() - self._started
            screen_of(sys.stderr).line(f"packer: {seconds:8.3f} s  {record.getMessage()}")
        except Exception:
            self.handleError(record)


_handlers: list[_Lines] = []


def start_logging() -> None:
    """Show log records from now on."""
    if _handlers:
        return
    _handlers.append(_Lines())
    for name in _PACKAGES:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.addHandler(_handlers[0])
    _log.info("%s; %s", ", ".join(version_lines()[:2]), os.getcwd())


def stop_logging() -> None:
    """Log the resources that the command used, then stop showing log records."""
    if not _handlers:
        return
    if sys.platform != "win32":
        own, workers = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
        _log.info(
            "CPU time %s here and %s in other processes; at most %s of memory in one process",
            human_seconds(own.ru_utime + own.ru_stime),
            human_seconds(workers.ru_utime + workers.ru_stime),
            human_bytes(1024 * max(own.ru_maxrss, workers.ru_maxrss)),
        )
    for name in _PACKAGES:
        logger = logging.getLogger(name)
        logger.removeHandler(_handlers[0])
        logger.setLevel(logging.NOTSET)
    _handlers.clear()


def version_lines() -> list[str]:
    """Versions of packer, Python, and the packages that affect how data are read and written."""
    versions = {name: _version(name) for name in (*_SHOWN, *_SHOWN_EXTRAS)}
    return [
        f"packer {__version__}",
        f"Python {platform.python_version()} on {platform.system()} {platform.machine()}",
        ", ".join(f"{name} {versions[name] or 'missing'}" for name in _SHOWN),
        ", ".join(f"{name} {versions[name]}" for name in _SHOWN_EXTRAS if versions[name]) or "no extras",
    ]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _begin(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        start_logging()


def verbose_option(command: F) -> F:
    """-v."""
    log = click.option("-v", "--verbose", is_flag=True, is_eager=True, expose_value=False, callback=_begin,
                       help="Log files, decisions and times to stderr.")  # fmt: skip
    return log(command)
