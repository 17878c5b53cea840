"""`Sampler`: reads what the machine does, twice a second, in a thread; and `monitor`, for training code.

    with packer.monitor("run.jsonl") as usage:
        for epoch in range(90):
            usage.mark(f"epoch {epoch}")
            for images, labels in loader:
                train(images, labels)
                usage.step(images=len(images))

Nothing that goes wrong in a probe reaches the training: what cannot be read has no value, and a record that cannot be
written any more (a full disk) ends with a note.
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
from types import TracebackType
from typing import Any

from cache.errors import SourceError
from cache.node import detect_ranks
from packer.tools.monitor.probes import Machine, Readings
from packer.tools.monitor.record import Buffer, Limits, Mark, RecordFile, Series, Usage

__all__ = ["INTERVAL", "Sampler", "monitor"]

INTERVAL = 0.5
_PATIENCE_SECONDS = 10.0
_REST = 0.1  # of an interval
_LEAST_SECONDS = 1e-4  # between two samples: times in files have microseconds
_log = logging.getLogger(__name__)


class Sampler:
    """Samples of this machine, from `start` to `stop`, or inside `with`.

    path: a file that is written meanwhile; `packer.tools.monitor.load` reads it. None: only memory.
    interval: seconds between samples.
    process: the first process of the job, whose CPU time and reads are counted with those of its children; by default
        this one.
    root: where proc and sys are, for tests. clock: seconds, steady.
    capacity: rows in memory; see `packer.tools.monitor.record`.

    Raises SourceError where there is nothing to read, OutputError and OSError for the file, ValueError.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        interval: float = INTERVAL,
        process: int | None = None,
        root: str | os.PathLike[str] = "/",
        clock: Callable[[], float] = time.monotonic,
        capacity: int = 8192,
    ) -> None:
        if not 0.01 <= interval <= 3600:
            raise ValueError(f"interval={interval}: expected seconds from 0.01 to 3600")
        self.interval = interval
        self.notes: tuple[str, ...] = ()
        self.cpu_seconds = 0.0  # that sampling took, on a CPU
        self.samples = 0
        self._machine = Machine(Path(root), os.getpid() if process is None else process)
        self._clock, self._host = clock, socket.gethostname()[: Limits.NAME] or "?"
        self._start, self._started = clock(), time.time()
        self._last = self._start
        self._readings, self._buffer = Readings(), Buffer(capacity)
        self._gauges: dict[str, tuple[Callable[[], float], float | None]] = {}
        self._counts = {"steps": 0, "images": 0}
        self._marks: list[Mark] = []
        self._sampling = threading.Lock()  # during a sample, which may take long
        self._lock = threading.Lock()  # of marks, rows and the file
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._file: RecordFile | None = None
        if not self._machine.probes:
            raise SourceError(f"nothing to sample: no {Path(root) / 'proc'} here; utilisation is read on Linux only")
        if self._machine.note:
            self.notes = (self._machine.note,)
        if path is not None:
            head = {"host": self._host, "started": self._started, "interval": interval}
            self._file = RecordFile(path, head)
        self._read(self._start)  # what counters begin with

    # --- what the training says -----------------------------------------------------------------------------------
    def mark(self, name: str) -> None:
        """Note that something begins here: an epoch, an evaluation. At most 100,000 times."""
        mark = Mark(str(name)[: Limits.NAME] or "?", self._clock() - self._start)
        with self._lock:
            if len(self._marks) < Limits.MARKS:
                self._marks.append(mark)
                self._write(lambda file: file.mark(mark))

    def step(self, images: int = 0) -> None:
        """A step of the training is done, with so many images: the series "steps" and "images", a second."""
        self._counts["steps"] += 1
        self._counts["images"] += images

    def gauge(self, name: str, read: Callable[[], float], full: float | None = None) -> None:
        """Sample a number of your own: read() is called in the thread of the sampler, and may raise.

        full: the most that it can be.
        """
        self._gauges[str(name)[: Limits.NAME] or "?"] = (read, full)

    # --- sampling -------------------------------------------------------------------------------------------------
    def start(self) -> Sampler:
        """Sample in a thread from now on."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="packer-usage", daemon=True)
            self._thread.start()
        return self

    def sample(self) -> None:
        """Take a sample now: of the time since the one before it."""
        with self._sampling:
            self._sample()

    def stop(self) -> Usage:
        """Take a last sample and end; the whole record. In a forked child nothing happens.

        Where a sample does not end, as if a driver hangs, the record ends with the one before it.
        """
        if os.getpid() == self._process and not self._ended.is_set():
            is_free = self._sampling.acquire(timeout=_PATIENCE_SECONDS)
            try:
                if not is_free:
                    self._note("a sample did not end: the record ends before it")
                elif not self._buffer.columns or self._clock() - self._last > _REST * self.interval:
                    self._sample()  # a much shorter one would only have odd rates
                self._ended.set()
                with self._lock:
                    if (row := self._buffer.flush()) is not None:
                        self._write_row(row)
                    if self._file is not None:
                        self._file.close()
            finally:
                if is_free:
                    self._machine.close()
                    self._sampling.release()
            if is_free and self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join(_PATIENCE_SECONDS)
        return self.usage()

    def usage(self) -> Usage:
        """The record so far."""
        with self._lock:
            times, durations, values = self._buffer.arrays()
            series = self._series()[: values.shape[1]]
            marks = tuple(sorted(self._marks, key=lambda mark: mark.seconds))
        return Usage(self._host, self._started, self.interval, series, times, durations, values, marks)

    def __enter__(self) -> Sampler:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
            if self._ended.is_set():  # while a probe hung
                return
            row = self._buffer.add(now - self._start, duration, values)
            if row is not None:
                self._write_row(row)

    def _read(self, now: float) -> None:
        start = time.thread_time()
        readings = self._readings
        readings.begin(now)
        for name, count in self._counts.items():
            if count or name in readings.series:
                readings.rate(name, count, "1/s")
        for name, (read, full) in list(self._gauges.items()):
            readings.gauge(name, _number(read), "1", full)
        for probe in self._machine.probes:
            try:
                probe(readings)
            except Exception as error:
                self._note(f"{type(probe).__name__.strip('_').lower()} could not be read: {error!r}")
        self.cpu_seconds += time.thread_time() - start
        self.samples += 1

    def _series(self) -> tuple[Series, ...]:
        return tuple(self._readings.series.values())[: Limits.SERIES]

    def _write_row(self, row: tuple[float, float, Any]) -> None:
        end, duration, values = row
        self._write(lambda file: file.row(self._series(), end, duration, values.tolist()))

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
    """A `Sampler` for training code, to be used with `with`: marks, steps and gauges are those of this process.

    Each node has one record, by the first of its ranks; the others only take marks. With several nodes, the number of
    the node is in the name of the file: run.jsonl becomes run.node1.jsonl.

    path: of the record; None keeps it in memory, see `Sampler.usage`. Raises as `Sampler` does.
    """
    ranks = detect_ranks()
    if ranks.local_rank > 0:
        path = None
    elif path is not None and ranks.nodes > 1:
        path = Path(path).with_name(f"{Path(path).stem}.node{ranks.node}{Path(path).suffix}")
    return Sampler(path, interval=interval)


def _number(read: Callable[[], float]) -> float:
    """What a user's function returns; NaN where it raises, or returns something else."""
    try:
        value = float(read())
    except Exception:
        return math.nan
    return value if abs(value) < 1e18 else math.nan
