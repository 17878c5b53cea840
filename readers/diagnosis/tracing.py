"""A diagnosis as a trace: its lines, and what each of their steps waited for, copied and ran, as tracks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from readers.trace import Trace

__all__ = ["RUNGS", "trace_calls", "trace_waits"]

RUNGS = "diagnosis: lines"


def trace_calls(trace: Trace | None, name: str, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function itself, or one that adds each call to the track `name`."""
    if trace is None:
        return function

    def traced(batch: Any) -> Any:
        with trace.span(f"diagnosis: {name}", name):
            return function(batch)

    return traced


def trace_waits(trace: Trace | None, batches: Iterator[Any]) -> Iterator[Any]:
    """The batches, each wait for one added to the track `wait`."""
    if trace is None:
        return batches
    return _waits(trace, batches)


def _waits(trace: Trace, batches: Iterator[Any]) -> Iterator[Any]:
    while True:
        start = time.perf_counter_ns()
        try:
            batch = next(batches)
        except StopIteration:
            return
        trace.add("diagnosis: wait", "wait", start, time.perf_counter_ns())
        yield batch
