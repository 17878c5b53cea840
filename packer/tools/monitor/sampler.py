"""`Sampler`, which samples the utilisation of the machine in a thread; and `monitor`, a sampler for training code.

    with packer.monitor("run.jsonl") as usage:
        for epoch in range(90):
            usage.mark(f"epoch {epoch}")
            for images, labels in loader:
                train(images, labels)
                usage.step(images=len(images))

Errors of probes never reach training: a series that cannot be read has no value, and a record that can no longer be
written, as on a full disk, ends with a note.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from cache.node import detect_ranks
from packer.tools.monitor.machine import Machine, Readings
from packer.tools.monitor.record import Buffer, Limits, Mark, RecordFile, Row, Series, Usage

__all__ = ["INTERVAL", "Sampler", "monitor"]

INTERVAL = 0.5
_PATIENCE_SECONDS = 10.0
_REST = 0.1  # of an interval
_LEAST_SECONDS = 1e-4  # between two samples: files store times in microseconds
_log = logging.getLogger(__name__)


class Sampler:
    """Samples this machine from `start` to `stop`, or inside `with`.

    path: the file to write while sampling, for `packer.tools.monitor.load`; None keeps the record in memory only.
    interval: seconds between samples.
    process: the first process of the job, whose CPU time and reads are counted together with those of its children; by
        default this process.
    clock: a monotonic clock, in seconds.

    Raises SourceError if utilisation cannot be read here, OutputError and OSError for the file, ValueError.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        interval: float = INTERVAL,
        process: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0.01 <= interval <= 3600:
            raise ValueError(f"interval={interval}: expected seconds from 0.01 to 3600")
        self.interval = interval
        self._machine, self._readings = Machine(process or os.getpid()), Readings()
        self.notes: tuple[str, ...] = (self._machine.note,) if self._machine.note else ()
        self._clock, self._host = clock, socket.gethostname()[: Limits.NAME] or "?"
        self._start = self._last = clock()
        self._started = time.time()
        self._buffer, self._marks = Buffer(), list[Mark]()
        self._gauges: dict[str, tuple[Callable[[], float], float | None]] = {}
        self._counts = {"steps": 0, "images": 0}
        self._sampling = threading.Lock()  # held during a sample, which may take long
        self._lock = threading.Lock()  # guards marks, rows and the file
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._file: RecordFile | None = None
        if path is not None:
            self._file = RecordFile(path, {"host": self._host, "started": self._started, "interval": interval})
        self._read(self._start)  # the initial values of counters

    def mark(self, name: str) -> None:
        """Mark the beginning of an epoch, an evaluation, …; a record has at most 100,000 marks."""
        mark = Mark(str(name)[: Limits.NAME] or "?", self._clock() - self._start)
        with self._lock:
            if len(self._marks) < Limits.MARKS:
                self._marks.append(mark)
                self._write(lambda file: file.mark(mark))

    def step(self, images: int = 0) -> None:
        """Count a finished training step with this many images, for the rates "steps" and "images"."""
        self._counts["steps"] += 1
        self._counts["images"] += images

    def gauge(self, name: str, read: Callable[[], float], full: float | None = None) -> None:
        """Also sample a user-defined value. read: called in the sampler's thread; it may raise.

        full: the largest possible value.
        """
        self._gauges[str(name)[: Limits.NAME] or "?"] = (read, full)

    def start(self) -> Sampler:
        """Start sampling in a thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="packer-usage", daemon=True)
            self._thread.start()
        return self

    def sample(self) -> None:
        """Take a sample now, of the time since the previous one."""
        with self._sampling:
            self._sample()

    def stop(self) -> Usage:
        """Take a last sample, stop, and return the whole record. In a forked child, only returns the record.

        If a sample does not finish, for example because a driver hangs, the record ends with the previous one.
        """
        if os.getpid() != self._process or self._ended.is_set():
            return self.usage()
        is_free = self._sampling.acquire(timeout=_PATIENCE_SECONDS)
        if not is_free:
            self._note("a sample did not end: the record ends before it")
        elif self._last == self._start or self._clock() - self._last > _REST * self.interval:
            self._sample()  # the rates of a much shorter sample would be meaningless
        self._ended.set()
        with self._lock:
            self._write_row(self._buffer.flush())
            if self._file is not None:
                self._file.close()
        if is_free:
            self._machine.close()
            self._sampling.release()
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join(_PATIENCE_SECONDS)
        return self.usage()

    def usage(self) -> Usage:
        """The record so far."""
        with self._lock:
            times, durations, values = self._buffer.arrays()
            marks = tuple(sorted(self._marks, key=lambda mark: mark.seconds))
            series = self._series()[: values.shape[1]]
        return Usage(self._host, self._started, self.interval, series, times, durations, values, marks)

    def __enter__(self) -> Sampler:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _run(self) -> None:
        due = time.monotonic() + self.interval
        while not self._ended.wait(max(0.0, due - time.monotonic())):
            self.sample()
            due = max(due + self.interval, time.monotonic())

    def _sample(self) -> None:
        now = self._clock()
        if self._ended.is_set() or now - self._last < _LEAST_SECONDS:
            return
        self._read(now)
        duration, self._last = now - self._last, now
        values = [self._readings.values.get(name, math.nan) for name in self._readings.series]
        with self._lock:
            if not self._ended.is_set():  # `stop` may have given up on a slow probe
                self._write_row(self._buffer.add(now - self._start, duration, values))

    def _read(self, now: float) -> None:
        self._readings.begin(now)
        for name, count in self._counts.items():
            if count or name in self._readings.series:
                self._readings.rate(name, count, "1/s")
        for name, (read, full) in list(self._gauges.items()):
            self._readings.gauge(name, _number(read), "1", full)
        for series, probe in self._machine.probes.items():
            try:
                probe(self._readings)
            except OSError:  # missing on this machine, or not readable by this user
                continue
            except Exception as error:
                self._note(f"{series} could not be read: {error!r}")

    def _series(self) -> tuple[Series, ...]:
        return tuple(self._readings.series.values())[: Limits.SERIES]

    def _write_row(self, row: Row | None) -> None:
        if row is not None:
            self._write(lambda file: file.row(self._series(), *row))

    def _write(self, write: Callable[[RecordFile], None]) -> None:
        if self._file is None or os.getpid() != self._process:
            return
        try:
            write(self._file)
        except OSError as error:
            self._note(f"{self._file.path}: {error.strerror}: the record ends here")
            self._file.close()
            self._file = None

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes = (*self.notes, text)
            _log.warning(text)


def monitor(path: str | os.PathLike[str] | None = None, *, interval: float = INTERVAL) -> Sampler:
    """A `Sampler` for training code, for use in a `with` statement. Marks, steps and gauges are those of this process.

    The first rank of each node writes its record; the records of other ranks stay in memory. With several nodes, the
    file name gets the number of the node: run.jsonl becomes run.node1.jsonl.

    path: the file of the record; None keeps it in memory, see `Sampler.usage`. Raises the errors of `Sampler`.
    """
    ranks = detect_ranks()
    if ranks.local_rank > 0:
        path = None
    elif path is not None and ranks.nodes > 1:
        path = Path(path).with_name(f"{Path(path).stem}.node{ranks.node}{Path(path).suffix}")
    return Sampler(path, interval=interval)


def _number(read: Callable[[], float]) -> float:
    """The number that a user's function returns; NaN if it raises or returns anything else."""
    try:
        value = float(read())
    except Exception:
        return math.nan
    return value if abs(value) < 1e18 else math.nan
