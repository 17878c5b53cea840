"""Running functions in forked child processes, which may be killed, or limited in memory and time."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["crashes_at", "end_of", "forked", "in_child", "killed_in_child", "limit_memory"]


def limit_memory(more_bytes: int) -> None:
    """Limit this process to a number of bytes of address space beyond its current size.

    The limit is relative, because a forked child starts with everything that the tests have loaded.
    """
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (has + more_bytes, has + more_bytes))


def end_of(
    work: Callable[[], str], outcomes: Sequence[str] = ("done",), *, seconds: int = 60, memory_bytes: int = 0
) -> str:
    """Run `work` in a child and return how it ended: its return value, "traceback" (printed), "signal N" or "status N".

    outcomes: the possible return values. memory_bytes: the child's limit beyond its initial size, 0 for none.
    """
    child = os.fork()
    if child == 0:
        status = 99
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(seconds)
            if memory_bytes:
                limit_memory(memory_bytes)
            status = outcomes.index(work())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if 0 <= code < len(outcomes):
        return outcomes[code]
    return "traceback" if code == 99 else f"signal {-code}" if code < 0 else f"status {code}"


def in_child(work: Callable[[], object]) -> None:
    """Run `work` in a child; fail the test if it raises."""
    with forked(work):
        pass


def killed_in_child(work: Callable[[], object]) -> None:
    """Run `work` in a child; fail the test unless the child is killed."""
    with pytest.raises(AssertionError, match="the child ended with -9"):
        in_child(work)


def crashes_at(step: int, work: Callable[[], object]) -> bool:
    """Run `work` in a child that exits at its n-th call that changes the disk; returns whether it got that far.

    step: n, counted from 1.
    """

    def work_until() -> str:
        left = itertools.count(step - 1, -1)

        def counted(function: Callable[..., object]) -> Callable[..., object]:
            def call(*arguments: object, **named: object) -> object:
                if next(left) <= 0:
                    os._exit(98)
                return function(*arguments, **named)

            return call

        for name in ("fsync", "rename", "replace", "unlink", "mkdir", "rmdir", "symlink", "link"):
            setattr(os, name, counted(getattr(os, name)))
        work()
        return "done"

    end = end_of(work_until)
    assert end in ("done", "status 98"), f"the child ended by itself at step {step}: {end}"
    return end != "done"


@contextmanager
def forked(work: Callable[[], object]) -> Iterator[None]:
    """Run `work` in a child during the `with` block; fail the test if it raises."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    try:
        yield
    finally:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, f"the child ended with {status}"
