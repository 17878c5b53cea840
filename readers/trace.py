"""A timeline of events in the Trace Event Format, which Perfetto and chrome://tracing open.

    {"traceEvents": [{"ph": "M", "name": "thread_name", "pid": …, "tid": 1, "args": {"name": "packer-loader-0"}}, …,
                     {"ph": "X", "name": "decode", "pid": …, "tid": 1, "ts": 12.5, "dur": 830.1, "args": {…}}, …],
     "displayTimeUnit": "ms", "otherData": {"dropped": 0}}

ts and dur are in microseconds; ts counts from the first event. A track is one row of the timeline, shown as a thread;
its events are consecutive or nested. Source: "Trace Event Format", the Chromium project.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from cache.files import atomic_write

_EVENTS = 200_000


class Event(NamedTuple):
    """An event of a track. start, duration: in nanoseconds, by time.perf_counter_ns. args: details for the viewer."""

    track: str
    name: str
    start: int
    duration: int
    args: dict[str, Any] | None


class Trace:
    """A recorder that keeps the last `limit` events; thread-safe.

    name: the name of the process in the viewer. Raises ValueError for a limit below 1.
    """

    def __init__(self, name: str = "packer", *, limit: int = _EVENTS) -> None:
        if limit < 1:
            raise ValueError(f"limit is at least 1, not {limit}")
        self._name, self._added, self._numbers = name, 0, itertools.count(1)
        self._events: deque[Event] = deque(maxlen=limit)

    @property
    def events(self) -> list[Event]:
        """The kept events, in the order in which they were added."""
        return list(self._events)

    @property
    def dropped(self) -> int:
        """Number of early events that were dropped."""
        return max(0, self._added - len(self._events))

    def add(self, track: str, name: str, start: int, end: int, args: dict[str, Any] | None = None) -> None:
        """Add an event from `start` to `end`, in nanoseconds of time.perf_counter_ns."""
        self._added = next(self._numbers)
        self._events.append(Event(track, name, start, max(0, end - start), args))

    @contextmanager
    def span(self, track: str, name: str, args: dict[str, Any] | None = None) -> Iterator[None]:
        """Record the time of the block as an event."""
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            self.add(track, name, start, time.perf_counter_ns(), args)

    def to_dict(self) -> dict[str, Any]:
        """The content of the trace file, as a dictionary for JSON."""
        events, process = self.events, os.getpid()
        zero = min((event.start for event in events), default=0)
        numbers = {track: number for number, track in enumerate(sorted({event.track for event in events}), 1)}

        def describe(kind: str, number: int, args: dict[str, Any]) -> dict[str, Any]:
            return {"ph": "M", "name": kind, "pid": process, "tid": number, "args": args}

        lines = [describe("process_name", 0, {"name": self._name})]
        for track, number in numbers.items():
            lines.append(describe("thread_name", number, {"name": track}))
            lines.append(describe("thread_sort_index", number, {"sort_index": number}))
        for event in events:
            times = {"ts": (event.start - zero) / 1e3, "dur": event.duration / 1e3}
            args = {} if event.args is None else {"args": event.args}
            lines.append({"ph": "X", "name": event.name, "pid": process, "tid": numbers[event.track], **times, **args})
        return {"traceEvents": lines, "displayTimeUnit": "ms", "otherData": {"dropped": self.dropped}}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace file atomically. Raises OSError."""
        atomic_write(Path(path), json.dumps(self.to_dict()).encode())


class TraceSlot:
    """Holds the current trace; None if no trace is recorded."""

    __slots__ = ("trace",)

    def __init__(self) -> None:
        self.trace: Trace | None = None
