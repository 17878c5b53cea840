"""Ctrl-C: before a command is loaded, while it runs, and when it is over."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from types import FrameType

__all__ = ["INTERRUPTED", "leave", "leave_at_once", "started"]

INTERRUPTED = "packer: interrupted; run the same command again to continue"
_STATUS = 128 + signal.SIGINT


def started() -> None:
    """A command is loaded and begins: from here on Ctrl-C is a KeyboardInterrupt, after which things are tidied up."""
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def leave_at_once() -> None:
    """The command has been interrupted and is over: another Ctrl-C ends what is left, and none comes too late."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(_STATUS))
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def leave(number: int, frame: FrameType | None) -> None:
    """End now: nothing is loaded that has to be tidied up."""
    os.write(2, f"{INTERRUPTED}\n".encode())
    os._exit(_STATUS)
