"""How long work is watched: what a command line, a notebook or nothing at all implements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["Counter", "Silent", "Watcher"]


class Watcher(Protocol):
    """Sees work go by. `packer.cli.progress` draws it."""

    def note(self, text: str) -> None:
        """Something worth telling: a warning, a stage."""

    def packing(self, samples: int, total_bytes: int, done: Callable[[], tuple[int, int]]) -> None:
        """Work on so many samples (0: unknown) and bytes begins; `done` gives both so far."""

    def packed(self) -> None:
        """That work is over, well or not."""


class Silent:
    """A watcher that says nothing."""

    def note(self, text: str) -> None:
        """Ignored."""

    def packing(self, samples: int, total_bytes: int, done: Callable[[], tuple[int, int]]) -> None:
        """Ignored."""

    def packed(self) -> None:
        """Ignored."""


class Counter(Protocol):
    """Where a worker reports progress, and learns that it should stop."""

    def report(self, samples: int, payload_bytes: int) -> None: ...

    def stopped(self) -> bool: ...
