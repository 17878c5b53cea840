"""Signals of a command line that runs a COMMAND: while a copy is staged for it, while it runs, and afterwards.

    staging        the first signal stops it; the copy is released, and removed if that was requested
    COMMAND runs   SIGTERM and SIGUSR1 are passed on; a terminal sends Ctrl-C to both
    afterwards     ignored: batch systems send SIGTERM several times, and a second one must not stop the cleanup

Some senders signal every process of a job: a terminal, `kill -- -PGID`, Slurm with some of its plugins. Others signal
only the process that they started: Slurm with proctrack/cgroup, `docker stop`. A signal that COMMAND has already
received is not passed on, because after a second SIGTERM programs such as torchrun abandon their children. To tell the
two apart, a witness runs next to COMMAND: an idle process. If the signal ends it, too, it was sent to all.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType, TracebackType
from typing import Any

import click

__all__ = ["CommandSignals", "cleaning_up", "undisturbed"]

_PASSED_ON = (signal.SIGTERM, *([signal.SIGUSR1] if sys.platform != "win32" else []))
_WITNESS_SECONDS = 0.2  # until a signal has reached all processes
_SAME_SECONDS = 1.0  # signals within this time have the same sender


class CommandSignals:
    """The signals of a command line that runs another; see the module.

    caught: the signal that stopped staging, or 0.
    begun: whether staging has begun, so that `stop` can end it; before that a signal raises KeyboardInterrupt.

    A signal handler must not take locks that the interrupted code may hold, so a thread does the work.
    """

    def __init__(self, begun: Callable[[], bool], stop: Callable[[], None]) -> None:
        self.caught = 0
        self._begun, self._stop = begun, stop
        self._actions: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._act: Callable[[int, float], None] = self._stop_copying

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Handle signals while the context is open. Only for the main thread."""
        thread = threading.Thread(target=self._work, name="signals", daemon=True)
        thread.start()
        try:
            with _handled(self._on_signal):
                yield
        finally:
            self._actions.put(None)
            thread.join()

    def run(self, arguments: tuple[str, ...], variables: Mapping[str, str]) -> int:
        """Run a command with these additional variables; returns its status, 128 + n if signal n ended it.

        Raises ClickException if it cannot be started.
        """
        try:
            with _Witness() as witness:
                child = subprocess.Popen(arguments, env={**os.environ, **variables})

                def pass_on(number: int, at: float) -> None:
                    if number in _PASSED_ON and not witness.saw(number, at):
                        child.send_signal(number)

                self._act = pass_on
                if self.caught:  # between the end of staging and this moment
                    child.send_signal(self.caught)
                status = child.wait()
                self.ignore()
        except OSError as error:
            raise click.ClickException(f"{arguments[0]}: cannot be run: {error.strerror}") from error
        return status if status >= 0 else 128 - status

    def ignore(self) -> None:
        """Ignore signals from now on."""
        self._act = _nothing

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._act == self._stop_copying and not self.caught:
            self.caught = number
            if not self._begun():
                self.ignore()
                raise KeyboardInterrupt
        self._actions.put(partial(self._act, number, time.monotonic()))

    def _work(self) -> None:
        while (act := self._actions.get()) is not None:
            act()

    def _stop_copying(self, number: int, at: float) -> None:
        self._stop()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore SIGTERM, SIGUSR1 and SIGINT inside the block, for work that must be finished."""
    with _handled(lambda number, frame: None):
        yield


class _Stopped(BaseException):
    """Raised in the block by the first signal."""


@contextmanager
def cleaning_up() -> Iterator[None]:
    """Let a signal end the block like an exception, so that it cleans up; further signals are ignored.

    Raises Abort after Ctrl-C, and Exit with 128 + n after another signal n.
    """
    caught = 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal caught
        if not caught:
            caught = number
            raise _Stopped

    try:
        with _handled(stop, *([signal.SIGHUP] if sys.platform != "win32" else [])):
            yield
    except _Stopped:
        if caught == signal.SIGINT:
            raise click.Abort from None
        click.echo(f"packer: stopped by {signal.Signals(caught).name}", err=True)
        raise click.exceptions.Exit(128 + caught) from None


class _Witness:
    """An idle process, until this one closes its input or ends.

    A thread calls `saw`. After the `with` block no process is started: between fork and exec a process has a copy of
    every descriptor of this one, so the locks of the staged copy would stay locked during the cleanup.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._saw_at = float("-inf")
        self._lock = threading.Lock()
        self._ended = False

    def __enter__(self) -> _Witness:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._ended = True
            self._stop()

    def _start(self) -> None:
        try:
            self._process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        except OSError:  # without a witness every signal is passed on
            self._process = None

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            process.wait()

    def saw(self, number: int, at: float) -> bool:
        """Whether a signal that arrived here at that time was sent to all processes."""
        with self._lock:
            if self._ended or at - self._saw_at < _SAME_SECONDS:
                return True
            if self._process is None:
                return False
            try:
                ended = self._process.wait(_WITNESS_SECONDS)
            except subprocess.TimeoutExpired:
                return False
            self._stop()
            self._start()
            if ended == -number:
                self._saw_at = at
            return ended == -number


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None], *more: signal.Signals) -> Iterator[None]:
    """Handle signals that request an end, except those that are ignored, as under nohup."""
    before: dict[signal.Signals, Any] = {}
    try:
        for number in (*_PASSED_ON, signal.SIGINT, *more):
            if callable(now := signal.getsignal(number)) or now == signal.SIG_DFL:
                before[number] = now
                signal.signal(number, handler)
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, was)


def _nothing(number: int, at: float) -> None:
    """The handler of a late signal: does nothing."""
