"""Progress on stderr: a bar on a terminal, a line now and then elsewhere, nothing with --json."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TextIO

from cache.messages import Done, Silent, Watcher, printable
from packer.cli.flags import with_flags
from packer.cli.text import human_bytes, human_seconds

__all__ = ["ProgressDisplay", "watcher"]

_BAR, _LEAST_BAR = 24, 4
_COLUMNS = 80
_TERMINAL_SECONDS = 0.2
_LINE_SECONDS = 10.0


def watcher(json: bool) -> Watcher:
    """What a command hands to the library."""
    return Silent() if json else ProgressDisplay(sys.stderr)


class ProgressDisplay:
    """Draws progress from a thread of its own, which lives while work goes on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def note(self, text: str) -> None:
        print(f"packer: {printable(with_flags(text))}", file=self._stream, flush=True)

    def begin(self, samples: int, total_bytes: int, done: Done, *, waiting: bool = False) -> None:
        self._stop.clear()
        self._thread = threading.Thread(target=self._draw, args=(samples, total_bytes, done), daemon=True)
        self._thread.start()

    def end(self) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def _draw(self, samples: int, total_bytes: int, done: Done) -> None:
        started = time.monotonic()
        step = _TERMINAL_SECONDS if self._terminal else _LINE_SECONDS
        while not self._stop.wait(step):
            columns = self._columns() if self._terminal else 0
            self._show(progress_line(samples, total_bytes, *done(), time.monotonic() - started, columns))
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _columns(self) -> int:
        """The width of the terminal now: a window may have been resized."""
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or _COLUMNS
        except (OSError, ValueError):
            return _COLUMNS

    def _show(self, line: str) -> None:
        self._stream.write(f"\r{line}\x1b[K" if self._terminal else f"packer: {line}\n")
        self._stream.flush()


def progress_line(
    samples: int, total_bytes: int, done_samples: int, done_bytes: int, seconds: float, columns: int = 0
) -> str:
    """One line: share done, rates, time left. By bytes where their total is known, by samples otherwise.

    columns: width of the terminal; the line stays shorter, as one that wraps is repeated and not overwritten. 0: none.
    """
    if total_bytes:
        share = min(1.0, done_bytes / total_bytes)
    else:
        share = min(1.0, done_samples / samples) if samples else 0.0
    parts = [f"{share:4.0%}"]
    seconds = max(seconds, 1e-9)
    if done_samples:
        of = f"/{samples:,}" if samples else ""
        parts.append(f"{done_samples:,}{of} samples, {done_samples / seconds:,.0f}/s")
    if done_bytes:
        parts.append(f"{human_bytes(done_bytes / seconds)}/s")
    if share > 0:
        parts.append(f"{human_seconds(seconds * (1 - share) / share)} left")
    line = "  ".join(parts)
    if not columns:
        return line
    width = min(_BAR, columns - len(line) - 3)
    if width >= _LEAST_BAR:
        filled = round(share * width)
        line = "█" * filled + "░" * (width - filled) + f"  {line}"
    return line[: max(0, columns - 1)]
