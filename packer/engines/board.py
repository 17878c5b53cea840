"""Progress and stop of a run, as files that all nodes see.

    <folder>/.run-<16 hex digits>.tmp/stop    "0"; "1" when the run ends early, and no file at all when it is over
    <folder>/.run-<16 hex digits>.tmp/<task>  samples, source bytes and samples left out so far, three uint64

The process that runs a command makes the directory and removes it. A task writes its file in place, twice a second at
most. `stop` exists from the beginning, since a network filesystem may remember for a while that a name is missing, and
each look opens it again, which is when such a filesystem asks its server. A task that is run twice at the same time
writes the same file from two nodes; then progress is that of either.
"""

from __future__ import annotations

import errno
import os
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from cache.errors import WorkerError
from cache.files import Folder, read_regular

__all__ = ["Board", "Progress", "TaskCounter"]

Progress: TypeAlias = "tuple[int, int, int]"  # samples, source bytes, samples left out

_STOP = "stop"
_ATTEMPTS = 3
_DONE = struct.Struct("<QQQ")
_WRITE_SECONDS = _LOOK_SECONDS = 0.5
_READ_SECONDS = 2.0
_APPEAR_SECONDS, _LATE_SECONDS = 10.0, 0.5
_GONE = (errno.ENOENT, errno.ESTALE, errno.ENOTDIR)


class Board:
    """The files of one run, in a directory of its own in `folder`; close it, or use it with `with`.

    path: that directory; None where it cannot be made, and progress is that of whole tasks.
    """

    def __init__(self, folder: Path) -> None:
        self.path: Path | None = Path(os.path.abspath(folder)) / f".run-{os.urandom(8).hex()}.tmp"
        try:
            with Folder(folder) as parent, parent.folder(self.path.name, create=True) as files:
                files.write(_STOP, b"0", durable=False)
        except OSError:
            self.path = None
        self._running: set[int] = set()
        self._finished = self._seen = (0, 0, 0)
        self._read_at = 0.0

    def begin(self, task: int) -> None:
        """A task has been handed out."""
        self._running.add(task)

    def end(self, task: int, done: Progress) -> None:
        """A task has ended, after so much."""
        self._running.discard(task)
        self._finished = _sum(self._finished, done)

    def totals(self) -> Progress:
        """(samples, source bytes, samples left out) so far in this run."""
        now = time.monotonic()
        if now >= self._read_at:
            self._seen = _sum(*map(self._read, sorted(self._running)))
            self._read_at = now + _READ_SECONDS
        return _sum(self._finished, self._seen)

    def _read(self, task: int) -> Progress:
        if self.path is None:
            return 0, 0, 0
        try:
            samples, source_bytes, left_out = _DONE.unpack(read_regular(self.path / str(task), _DONE.size))
        except (OSError, struct.error):  # not begun, or being written
            return 0, 0, 0
        return samples, source_bytes, left_out

    def stop(self) -> None:
        """Have all tasks end soon."""
        if self.path is not None:
            with suppress(OSError), open(self.path / _STOP, "r+b") as file:
                file.write(b"1")

    def close(self) -> None:
        """Remove the files; what still works for this run stops."""
        for _ in range(_ATTEMPTS if self.path is not None else 0):  # a task may write its file meanwhile
            assert self.path is not None
            with suppress(OSError), Folder(self.path.parent) as parent:
                parent.remove_tree(self.path.name)
                return

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _sum(*parts: Progress) -> Progress:
    return sum(part[0] for part in parts), sum(part[1] for part in parts), sum(part[2] for part in parts)


class TaskCounter:
    """What a task, on any node, reports to the board at `path`; None: to none.

    done: samples, source bytes and samples left out so far.
    """

    def __init__(self, path: Path | None, task: int) -> None:
        self._path, self._task = path, task
        self._look_at = self._write_at = 0.0
        self._stopped = False
        self.done: Progress = (0, 0, 0)

    def check_visible(self) -> None:
        """Raises WorkerError where this machine does not see the board, or no longer.

        A network filesystem may remember for a while that a directory was missing; the name of a board it has never
        heard before.
        """
        started = time.monotonic()
        while self._path is not None and not (self._path / _STOP).exists():
            folder = self._path.parent
            if time.monotonic() > started + (_LATE_SECONDS if folder.exists() else _APPEAR_SECONDS):
                raise WorkerError(
                    f"{os.uname().nodename} does not see {self._path} (is that command over?); all workers must see "
                    f"source and output at the same paths, on a shared filesystem"
                )
            time.sleep(0.1)

    def report(self, samples: int, payload_bytes: int, left_out: int = 0) -> None:
        self.done = _sum(self.done, (samples, payload_bytes, left_out))
        now = time.monotonic()
        if self._path is not None and now >= self._write_at:
            self._write_at = now + _WRITE_SECONDS
            with suppress(OSError):
                descriptor = os.open(self._path / str(self._task), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
                try:
                    os.pwrite(descriptor, _DONE.pack(*self.done), 0)
                finally:
                    os.close(descriptor)

    def stopped(self) -> bool:
        now = time.monotonic()
        if self._path is not None and not self._stopped and now >= self._look_at:
            self._look_at = now + _LOOK_SECONDS
            try:
                with open(self._path / _STOP, "rb") as file:
                    self._stopped = file.read(1) != b"0"
            except OSError as error:
                self._stopped = error.errno in _GONE
        return self._stopped
