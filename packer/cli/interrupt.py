"""Ctrl-C: before a command is loaded, while it runs, and after it has ended."""

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
    """Called when a command begins: from now on Ctrl-C raises KeyboardInterrupt, and the command cleans up."""
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def leave_at_once() -> None:
    """Called after an interrupted command: another Ctrl-C ends the process, and has no effect at exit."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(_STATUS))
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def leave(number: int, frame: FrameType | None) -> None:
    """End the process; nothing that needs cleaning up has been loaded."""
    os.write(2, f"{INTERRUPTED}\n".encode())
    os._exit(_STATUS)
