"""Signals while a copy is made, while a command runs that it is held for, and while it is let go of.

    copying        the first signal stops the copying; the copy is let go of in good order, cleaned up if asked for
    COMMAND runs   SIGTERM and SIGUSR1 go to it; a terminal sends Ctrl-C to both
    afterwards     nothing: batch systems send SIGTERM several times, and a second one must not end the cleaning up

Some senders signal every process of a job: a terminal, `kill -- -PGID`, Slurm with some of its plugins. Others signal
only the one that they started: Slurm with proctrack/cgroup, `docker stop`. What COMMAND has already got is not passed
on, because programs such as torchrun take a second SIGTERM as an order to leave their children alone. Which of both it
was shows a witness: a second process next to COMMAND that does nothing, so a signal which ends it was sent to all.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import click

__all__ = ["HeldSignals", "undisturbed"]

_PASSED_ON = (signal.SIGTERM, signal.SIGUSR1)
_WITNESS_SECONDS = 0.2  # how long a signal to all takes to reach all
_SAME_SECONDS = 1.0  # signals that close together have the same sender


class HeldSignals:
    """The signals of a command line that stages; see above. `caught` is the one that stopped the copying, 0 for none.

    begun: whether there is a copying that `stop` ends; before that a signal raises KeyboardInterrupt. A handler must
    not take locks that the interrupted code may hold, so what it has to do is done by a thread.
    """

    def __init__(self, begun: Callable[[], bool], stop: Callable[[], None]) -> None:
        self.caught = 0
        self._begun, self._stop = begun, stop
        self._came: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._act: Callable[[int, float], None] = self._stop_copying

    @contextmanager
    def taken(self) -> Iterator[None]:
        """While this is open, signals are treated as above. Only for the main thread."""
        thread = threading.Thread(target=self._work, name="signals", daemon=True)
        thread.start()
        try:
            with _handled(self._on_signal):
                yield
        finally:
            self._came.put(None)
            thread.join()

    def run(self, arguments: tuple[str, ...], staged: Path) -> int:
        """Run a command with PACKER_STAGED set; returns its status, 128 + n where signal n ended it.

        Raises ClickException where it cannot be started.
        """
        try:
            with _Witness() as witness:
                child = subprocess.Popen(arguments, env={**os.environ, "PACKER_STAGED": str(staged)})

                def pass_on(number: int, at: float) -> None:
                    if number in _PASSED_ON and not witness.saw(number, at):
                        child.send_signal(number)

                self._act = pass_on
                if self.caught:  # between the end of the copying and this moment
                    child.send_signal(self.caught)
                status = child.wait()
                self.done()
        except OSError as error:
            raise click.ClickException(f"{arguments[0]}: cannot be run: {error.strerror}") from error
        return status if status >= 0 else 128 - status

    def done(self) -> None:
        """From now on signals change nothing."""
        self._act = _nothing

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._act == self._stop_copying and not self.caught:
            self.caught = number
            if not self._begun():
                self.done()
                raise KeyboardInterrupt
        self._came.put(partial(self._act, number, time.monotonic()))

    def _work(self) -> None:
        while (act := self._came.get()) is not None:
            act()

    def _stop_copying(self, number: int, at: float) -> None:
        self._stop()


@contextmanager
def undisturbed() -> Iterator[None]:
    """SIGTERM, SIGUSR1 and SIGINT change nothing inside: for what should not be left half done."""
    with _handled(lambda number, frame: None):
        yield


class _Witness:
    """A process that does nothing until this one closes its input, or ends.

    `saw` is asked by a thread. After the end of the `with` block it starts no process: between fork and exec a process
    has a copy of every descriptor of this one, so the locks of the copy would stay taken while it is cleaned up.
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
        except OSError:  # without a witness all is passed on
            self._process = None

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            process.wait()

    def saw(self, number: int, at: float) -> bool:
        """Whether a signal that came here at that time was sent to all."""
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
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Signals that ask to end go to a handler, but for those that are ignored, as under nohup."""
    before: dict[signal.Signals, Any] = {}
    try:
        for number in (*_PASSED_ON, signal.SIGINT):
            if callable(now := signal.getsignal(number)) or now == signal.SIG_DFL:
                before[number] = now
                signal.signal(number, handler)
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, was)


def _nothing(number: int, at: float) -> None:
    """What a signal does that came too late."""
