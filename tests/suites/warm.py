"""packer commands as forks of one process with all imports done, so that a start does not cost a second of CPU time.

For tests of what a command does, prints and returns. Tests that depend on the start of Python need a new process:
`programs.run_packer` starts one for variables and limits that only a new interpreter heeds, and where the server does
not answer.

No wait is unbounded. The server has one thread, reads no terminal and keeps no stream of pytest open; forks in the
tests close its channel, so that it ends with the process that started it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from typing import Any

__all__ = ["FSYNC", "run_warm", "wait_for_no_disk"]

_AT_START = ("PYTHON", "LD_", "OMP_", "MKL_", "OPENBLAS_", "MALLOC_", "NUMBA_")
_LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_AS, resource.RLIMIT_NPROC)
_PACKAGES = ("packer.cli", "packer.sources", "packer.formats", "readers.headers")
_ANSWER_SECONDS = 60.0  # until a command is forked
FSYNC = os.fsync  # that waits
_lock = threading.Lock()


def wait_for_no_disk() -> None:
    """Disable fsync in this process and its forks. Tests kill processes, not machines: written data stays readable."""

    def fsync(file: Any) -> None:
        os.fstat(file if isinstance(file, int) else file.fileno())

    os.fsync = fsync


class _Server:
    """The server process. fixed: settings that a fork inherits and cannot change."""

    def __init__(self) -> None:
        self.channel, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self.fixed = _fixed(dict(os.environ))
        line = f"import sys; sys.path.append({os.path.dirname(os.path.dirname(__file__))!r})"
        line += f"; from suites.warm import serve; serve({remote.fileno()})"
        quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        # A fork would inherit a thread pool without its threads.
        alone = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        with remote:
            command = [sys.executable, "-c", line]
            self.process = subprocess.Popen(command, pass_fds=[remote.fileno()], env=alone, **quiet)

    def fork(self, job: dict[str, Any], streams: list[int]) -> int:
        """Fork the process of a command. Raises OSError if the server does not answer in time, or has ended."""
        self.channel.settimeout(_ANSWER_SECONDS)
        socket.send_fds(self.channel, [json.dumps(job).encode()], streams)
        return self.answer(_ANSWER_SECONDS)

    def answer(self, seconds: float) -> int:
        """Read an answer. Raises TimeoutError, and ConnectionError if the server has ended."""
        self.channel.settimeout(seconds)
        if not (data := self.channel.recv(64)):
            raise ConnectionError("the process that forks commands has ended")
        return int(data)

    def end(self) -> None:
        self.channel.close()
        self.process.kill()
        self.process.wait()


_server: _Server | None = None


def _forget() -> None:
    """Drop the server in a fork of the tests: it belongs to the parent."""
    global _server, _lock
    if _server is not None:
        _server.channel.close()
    _server, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


def run_warm(
    arguments: list[str], cwd: Any, env: dict[str, str], timeout: float, *, joined: bool = False
) -> subprocess.CompletedProcess[str] | None:
    """A completed command, or None where it needs a new process. joined: stderr goes to the output, too.

    Raises subprocess.TimeoutExpired, and ConnectionError if the server ended during the command.
    """
    global _server
    if not _lock.acquire(blocking=False):
        return None
    try:
        _server = _server or _Server()
        if _server.fixed != _fixed(env):
            return None
        os.umask(umask := os.umask(0))
        cpus = sorted(os.sched_getaffinity(0))
        job = {"arguments": arguments, "cwd": str(cwd or os.getcwd()), "env": env, "umask": umask, "cpus": cpus}
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            try:
                pid = _server.fork(job, [out.fileno(), (out if joined else err).fileno()])
            except OSError:
                _server.end()
                _server = None
                return None
            try:
                status = _server.answer(timeout)
            except TimeoutError:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                _server.end()
                _server = None
                raise subprocess.TimeoutExpired(arguments, timeout) from None
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode())
        return subprocess.CompletedProcess(["packer", *arguments], status, *texts)
    finally:
        _lock.release()


def _fixed(env: dict[str, str]) -> Any:
    """The settings that a fork can no longer change."""
    variables = {name: value for name, value in env.items() if name.startswith(_AT_START)}
    return variables, [resource.getrlimit(limit) for limit in _LIMITS], os.geteuid()


def serve(descriptor: int) -> None:
    """Fork for each incoming command, until the other side disconnects."""
    wait_for_no_disk()
    for package in map(importlib.import_module, _PACKAGES):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    gc.freeze()
    channel = socket.socket(fileno=descriptor)
    while True:
        data, passed, _, _ = socket.recv_fds(channel, 1 << 20, 2)
        if not data:
            return None
        if not (pid := os.fork()):
            channel.close()
            return _run(json.loads(data), passed)
        for file in passed:
            os.close(file)
        channel.send(str(pid).encode())
        channel.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def _run(job: Any, streams: list[int]) -> None:
    for target, file in enumerate(streams, 1):
        os.dup2(file, target)
        os.close(file)
    os.chdir(job["cwd"])
    os.umask(job["umask"])
    os.sched_setaffinity(0, job["cpus"])
    os.environ.clear()
    os.environ.update(job["env"])
    sys.argv = ["packer", *job["arguments"]]
    from packer.cli import main

    main()
