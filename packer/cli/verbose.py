"""-v: what the library logs, on stderr, each line with the seconds since the command began.

The packages log through `logging`, to loggers called after their modules: what was listed and planned, which directory
was chosen, each shard and file when it is done. Programs that use them see the same by logging.basicConfig.
"""

from __future__ import annotations

import logging
import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any, TypeVar

import click

from cache.messages import human_bytes, human_seconds
from packer import __version__
from packer.cli.progress import screen_of

__all__ = ["start_logging", "stop_logging", "verbose_option", "version_lines"]

F = TypeVar("F", bound=Callable[..., Any])
_PACKAGES = ("packer", "readers", "cache")
_SHOWN = ("numpy", "h5py", "pillow", "simplejpeg", "crc32c", "zstandard", "click")
_SHOWN_EXTRAS = ("torch", "obstore", "pyarrow", "numba")
_log = logging.getLogger(__name__)


class _Lines(logging.Handler):
    """Writes the records of this process, not of workers that it forks, above the progress bar."""

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
    """Show what is logged from now on."""
    if _handlers:
        return
    _handlers.append(_Lines())
    for name in _PACKAGES:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.addHandler(_handlers[0])
    _log.info("%s; %s", ", ".join(version_lines()[:2]), os.getcwd())


def stop_logging() -> None:
    """Log what the command took, and show nothing any more."""
    if not _handlers:
        return
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
    """Versions of packer, of Python, and of the packages that decide what is read and written."""
    found = {name: _version(name) for name in (*_SHOWN, *_SHOWN_EXTRAS)}
    return [
        f"packer {__version__}",
        f"Python {platform.python_version()} on {platform.system()} {platform.machine()}",
        ", ".join(f"{name} {found[name] or 'missing'}" for name in _SHOWN),
        ", ".join(f"{name} {found[name]}" for name in _SHOWN_EXTRAS if found[name]) or "no extras",
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
                       help="Log what is done to stderr: files, decisions, times.")  # fmt: skip
    return log(command)
