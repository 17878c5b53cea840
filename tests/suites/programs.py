"""Python programs and commands of packer, run as users run them: what they say is captured, and they end in time."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from cache.messages import Silent

__all__ = ["Notes", "run_packer", "run_python"]


class Notes(Silent):
    """Collects the notes of a command."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


def run_python(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Python with arguments, such as "-c" and a script. options: of subprocess.run, beyond the usual ones."""
    usual = {"capture_output": True, "text": True, "timeout": 180, "check": False}
    return subprocess.run([sys.executable, *map(str, arguments)], **{**usual, **options})


def run_packer(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """A command of packer."""
    return run_python("-m", "packer", *arguments, **options)
