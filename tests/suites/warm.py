"""Commands of packer as forks of one process that has imported what they need, so that a start costs no second of CPU.

For what a command does, prints and returns. What depends on how Python starts needs a process of its own: see
`programs.run_packer`, which takes that for variables and limits that only a new interpreter heeds.
"""

from __future__ import annotations

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
from typing import Any

__all__ = ["run_warm"]

_AT_START = ("PYTHON", "LD_", "OMP_", "MKL_", "OPENBLAS_", "MALLOC_", "NUMBA_")
_LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_AS, resource.RLIMIT_NPROC)
_PACKAGES = ("packer.cli", "packer.sources", "packer.formats", "readers.headers")
_lock = threading.Lock()
_servers: dict[int, tuple[socket.socket, Any, Any]] = {}  # of a process: the channel, what a fork keeps, the child


def run_warm(
    arguments: list[str], cwd: Any, env: dict[str, str], timeout: float
) -> subprocess.CompletedProcess[str] | None:
    """A command that has ended, or None where it needs a process of its own. Raises subprocess.TimeoutExpired."""
    if not _lock.acquire(blocking=False):
        return None
    try:
        if os.getpid() not in _servers:
            _servers[os.getpid()] = _start()
        channel, at_start, _ = _servers[os.getpid()]
        if at_start != _fixed(env):
            return None
        os.umask(umask := os.umask(0))
        cpus = sorted(os.sched_getaffinity(0))
        job = {"arguments": arguments, "cwd": str(cwd or os.getcwd()), "env": env, "umask": umask, "cpus": cpus}
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            socket.send_fds(channel, [json.dumps(job).encode()], [out.fileno(), err.fileno()])
            pid, status = int(channel.recv(64)), None
            channel.settimeout(timeout)
            try:
                status = int(channel.recv(64))
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                channel.settimeout(None)
                channel.recv(64)
                raise subprocess.TimeoutExpired(arguments, timeout) from None
            finally:
                channel.settimeout(None)
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode())
        return subprocess.CompletedProcess(["packer", *arguments], status, *texts)
    finally:
        _lock.release()


def _fixed(env: dict[str, str]) -> Any:
    """What a fork cannot change any more."""
    variables = {name: value for name, value in env.items() if name.startswith(_AT_START)}
    return variables, [resource.getrlimit(limit) for limit in _LIMITS], os.geteuid()


def _start() -> tuple[socket.socket, Any, Any]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    line = f"import sys; sys.path.append({os.path.dirname(os.path.dirname(__file__))!r})"
    line += f"; from suites.warm import serve; serve({theirs.fileno()})"
    with theirs:
        server = subprocess.Popen([sys.executable, "-c", line], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    return ours, _fixed(dict(os.environ)), server


def serve(descriptor: int) -> None:
    """Fork for each command that comes, until the other side is gone."""
    for package in map(importlib.import_module, _PACKAGES):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
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
