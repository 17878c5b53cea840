"""Leaving segments on SIGTERM, for programs that ask for it.

A library installs no signal handlers by itself, and the default action of SIGTERM runs no atexit: the segment of a job
that is cancelled stays until somebody opens or cleans it. With this it goes with the last process, as at a normal end.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

from cache.shared.membership import leave_all

__all__ = ["remove_on_sigterm"]


def remove_on_sigterm() -> None:
    """From now on SIGTERM leaves all segments of this process, and then does what it did before.

    Children that are forked later inherit it. Calling it again changes nothing. Raises ValueError outside the main
    thread.
    """
    before = signal.getsignal(signal.SIGTERM)
    if getattr(before, "leaves_caches", False):
        return

    def leave(number: int, frame: FrameType | None) -> None:
        if before == signal.SIG_IGN:
            return
        leave_all()
        if callable(before):
            before(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    leave.leaves_caches = True  # type: ignore[attr-defined]
    signal.signal(signal.SIGTERM, leave)
