"""How long work is watched: what a command line, a notebook or nothing at all implements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["Counter", "Done", "Silent", "Watcher"]

Done = Callable[[], tuple[int, int]]  # (samples, bytes) so far


class Watcher(Protocol):
    """Sees work go by. Calls come from the thread that works."""

    def note(self, text: str) -> None:
        """Something worth telling: a warning, a stage, the directory that was chosen."""

    def begin(self, samples: int, total_bytes: int, done: Done, *, waiting: bool = False) -> None:
        """Work on so many samples and bytes (0: unknown, or not counted) begins; `done` gives both so far.

        waiting: another process does it, and this one waits for it.
        """

    def end(self) -> None:
        """That work is over, whether it succeeded or not."""


class Silent:
    """A watcher that says nothing."""

    def note(self, text: str) -> None:
        """Ignored."""

    def begin(self, samples: int, total_bytes: int, done: Done, *, waiting: bool = False) -> None:
        """Ignored."""

    def end(self) -> None:
        """Ignored."""


class Counter(Protocol):
    """Where a worker reports progress, and learns that it should stop."""

    def report(self, samples: int, payload_bytes: int) -> None: ...

    def stopped(self) -> bool: ...
