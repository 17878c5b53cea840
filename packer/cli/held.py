"""A command that runs while something is held for it: its exit status, and signals, are passed on."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from types import FrameType

import click

__all__ = ["run_command"]


def run_command(arguments: tuple[str, ...], staged: Path) -> int:
    """Run a command with PACKER_STAGED set; returns its status, 128 + n where signal n ended it.

    SIGTERM and SIGUSR1, which batch systems send before time is up, go to the command, so that it can end by itself and
    this process can clean up after it. A terminal sends Ctrl-C to both.
    """
    try:
        child = subprocess.Popen(arguments, env={**os.environ, "PACKER_STAGED": str(staged)})
    except OSError as error:
        raise click.ClickException(f"{arguments[0]}: cannot be run: {error.strerror}") from error

    def pass_on(number: int, frame: FrameType | None) -> None:
        child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGUSR1)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        status = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status
