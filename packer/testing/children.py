"""Work that is done in forked children, which may be killed, limited, or run out of time."""

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
    """Let this process take so much more address space than it has: a forked child has all that the tests loaded."""
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (has + more_bytes, has + more_bytes))


def end_of(
    work: Callable[[], str], outcomes: Sequence[str] = ("done",), *, seconds: int = 60, memory_bytes: int = 0
) -> str:
    """How `work` ends in a child: the outcome that it returns, "traceback" (which is printed), or "signal N".

    memory_bytes: what the child may take more than it has; 0 for any amount.
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
    """Run in a child, which must not raise."""
    with forked(work):
        pass


def killed_in_child(work: Callable[[], object]) -> None:
    """Run in a child, which must be killed meanwhile."""
    with pytest.raises(AssertionError, match="the child ended with -9"):
        in_child(work)


def crashes_at(step: int, work: Callable[[], object]) -> bool:
    """Run in a child that exits at the n-th call that changes the disk; whether it came that far."""

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
    """A child runs `work`, which must not raise, while this process does what is in the block."""
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
