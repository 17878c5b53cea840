"""The command line: one file per command. Commands parse, call, print; the work is in the library.

Results go to stdout, progress and messages to stderr. Exit status: 0 done, 1 failed or damage found, 2 usage,
130 interrupted. With --json, a failure is a JSON document on stdout too: {"error": {"type", "message", "status"}}.

This file imports next to nothing, so that Ctrl-C is understood from the first moment on; `packer.cli.group` has the
commands.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from types import FrameType

__all__ = ["INTERRUPTED", "leave_at_once", "main", "started"]

INTERRUPTED = "packer: interrupted; run the same command again to continue"
_STATUS = 128 + signal.SIGINT


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit. Errors of ours, and of the system, are one line on stderr."""
    _open_closed_streams()
    before = signal.getsignal(signal.SIGINT)
    careful = before is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    try:
        if careful:  # an import that is interrupted may swallow the exception, or make another of it
            signal.signal(signal.SIGINT, _leave)
        from packer.cli.group import run

        run(arguments)
    except KeyboardInterrupt:
        _leave(signal.SIGINT, None)
    finally:
        if careful and signal.getsignal(signal.SIGINT) is _leave:
            signal.signal(signal.SIGINT, before)


def started() -> None:
    """A command is loaded and begins: from here on Ctrl-C is a KeyboardInterrupt, after which things are tidied up."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def leave_at_once() -> None:
    """The command has been interrupted and is over: another Ctrl-C ends what is left, and none comes too late."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(_STATUS))
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, f"{INTERRUPTED}\n".encode())
    os._exit(_STATUS)


def _open_closed_streams() -> None:
    """Open stdin, stdout and stderr on nothing where they are closed: a shard must not get their numbers."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
