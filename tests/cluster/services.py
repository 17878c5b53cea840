"""Loopback servers for the cluster tests: started, waited for, and stopped with the test in any case."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from isolated import IS_ISOLATED

__all__ = ["answers", "begin", "end", "free_port", "need", "service", "wait"]

_START_SECONDS = 120.0


def need(*programs: str, package: str = "") -> None:
    """Skip the test where a program is missing, or where the program would run next to servers of other users."""
    if not IS_ISOLATED:
        pytest.skip("needs an isolated network: make test-cluster")
    lacking = [program for program in programs if shutil.which(program) is None]
    if lacking:
        pytest.skip(f"{', '.join(lacking)} not found; install {package or ', '.join(lacking)}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def wait(test: Callable[[], object], why: str, seconds: float = _START_SECONDS, more: Callable[[], str] = str) -> None:
    """Call a function until it returns true. Raises AssertionError after `seconds`."""
    end_of_wait = time.monotonic() + seconds
    while not test():
        assert time.monotonic() < end_of_wait, f"waited {seconds:.0f} s for {why}\n{more()}"
        time.sleep(0.05)


def answers(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server listens on this port."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), 2):
        return True
    return False


def begin(
    command: Sequence[object], log: Path, *, environ: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a process that leads a process group. log: a file for both output streams."""
    with open(log, "wb") as output:
        return subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(environ or {})},
            cwd=cwd,
        )


def end(process: subprocess.Popen[bytes], seconds: float = 10.0) -> None:
    """End a process that leads a process group, and the whole group."""
    for number, patience in ((signal.SIGTERM, seconds), (signal.SIGKILL, seconds)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    process.wait(seconds)


@contextlib.contextmanager
def service(
    command: Sequence[object],
    is_up: Callable[[], object],
    log: Path,
    *,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """A server that runs until the context ends, started as by `begin`. is_up: says whether it is ready."""
    process = begin(command, log, environ=environ, cwd=cwd)
    log_end = lambda: log.read_text(errors="replace")[-3000:]  # noqa: E731
    try:

        def up() -> object:
            assert process.poll() is None, f"{command[0]} has ended with status {process.returncode}\n{log_end()}"
            return is_up()

        wait(up, f"{command[0]} to start", more=log_end)
        yield process
    finally:
        end(process)
