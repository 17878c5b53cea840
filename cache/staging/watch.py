"""How staging is watched: what a command line or nothing at all implements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["SilentStaging", "StagingWatcher"]


class StagingWatcher(Protocol):
    """Sees staging go by. Calls come from the thread that stages."""

    def note(self, text: str) -> None:
        """Something worth telling: the target that was chosen, a copy that was removed."""

    def copying(self, total_bytes: int, done_bytes: Callable[[], int]) -> None:
        """This process begins to copy."""

    def waiting(self, total_bytes: int, done_bytes: Callable[[], int]) -> None:
        """Another process of the node copies, and this one begins to wait for it."""

    def copied(self) -> None:
        """That is over, well or not."""


class SilentStaging:
    """A watcher that says nothing."""

    def note(self, text: str) -> None:
        """Ignored."""

    def copying(self, total_bytes: int, done_bytes: Callable[[], int]) -> None:
        """Ignored."""

    def waiting(self, total_bytes: int, done_bytes: Callable[[], int]) -> None:
        """Ignored."""

    def copied(self) -> None:
        """Ignored."""
