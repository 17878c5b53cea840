"""The command line. Commands parse, call, print; the work is in the library.

Results go to stdout, progress and messages to stderr. Exit status: 0 done, 1 failed or damage found, 2 usage,
130 interrupted. With --json, a failure is a JSON document on stdout too: {"error": {"type", "message", "status"}}.

This file imports next to nothing, so that Ctrl-C is handled from the start; the commands are in `packer.cli.group`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from packer.cli.interrupt import leave

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit. Errors are one line on stderr."""
    _open_closed_streams()
    before = signal.getsignal(signal.SIGINT)
    careful = before is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    try:
        if careful:  # an interrupted import may swallow the exception, or turn it into another one
            signal.signal(signal.SIGINT, leave)
        from packer.cli.group import run

        run(arguments)
    except KeyboardInterrupt:
        leave(signal.SIGINT, None)
    finally:
        if careful and signal.getsignal(signal.SIGINT) is leave:
            signal.signal(signal.SIGINT, before)


def _open_closed_streams() -> None:
    """Open closed standard streams on /dev/null, so that a shard cannot get their descriptors."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, that of the closed stream
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
