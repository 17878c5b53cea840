"""Nodes on one machine, each with a separate network address, host name, /dev/shm and disk.

    with Nodes(folder, 2) as nodes:
        nodes["n1"].run("hostname")

A node is a set of Linux namespaces, joined to the others by a bridge. Its disk, empty at first, is `local` in the
folder, at the same path on each node; everything else is shared. A node is switched off as if its plug were pulled.
Runs only inside isolated.py, where nothing outside can be reached and nothing stays behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

from services import wait

__all__ = ["Node", "Nodes"]

_SPACES = ("--mount", "--net", "--uts", "--ipc")


class Node:
    """One node. Its name resolves on all nodes."""

    def __init__(self, name: str, address: str, local: Path) -> None:
        self.name, self.address, self.local = name, address, local
        self._first: subprocess.Popen[bytes] | None = None

    def switch_on(self) -> None:
        script = (
            f"hostname {self.name} && mount -t tmpfs -o size=2g tmpfs /dev/shm && "
            f"mount -t tmpfs -o size=4g tmpfs {self.local} && exec sleep infinity"
        )
        command = ["unshare", *_SPACES, "sh", "-c", script]
        self._first = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        host = Path(f"/proc/{self.pid}/ns/uts")
        wait(lambda: host.readlink() != Path("/proc/self/ns/uts").readlink(), f"node {self.name}")
        link = f"to-{self.name}"
        _call("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(self.pid))
        _call("ip", "link", "set", link, "master", "nodes", "up")
        wait(lambda: self.run("hostname", check=False).strip() == self.name, f"node {self.name}")
        for arguments in (f"addr add {self.address}/24 dev eth0", "link set eth0 up", "link set lo up"):
            self.run("ip", *arguments.split())

    def switch_off(self) -> None:
        """End all processes at once; the disk and the address go, too."""
        if self._first is None:
            return
        self.kill_processes(spared=0)
        self._first.wait(20)
        self._first = None
        subprocess.run(["ip", "link", "del", f"to-{self.name}"], stderr=subprocess.DEVNULL, check=False)

    def kill_processes(self, spared: int | None = None) -> None:
        """End all processes at once; disk and network stay. spared: a process to keep, by default the first one of the
        node."""
        spared = self.pid if spared is None else spared
        host = Path(f"/proc/{self.pid}/ns/uts").readlink()
        for path in Path("/proc").glob("[0-9]*/ns/uts"):
            with contextlib.suppress(OSError):
                if path.readlink() == host and int(path.parts[2]) != spared:
                    os.kill(int(path.parts[2]), signal.SIGKILL)

    @property
    def pid(self) -> int:
        """The pid of the node's first process."""
        assert self._first is not None, f"node {self.name} is off"
        return self._first.pid

    def command(self, *command: object) -> list[str]:
        """The command line that runs a command on the node, in the current directory."""
        inside = ["nsenter", "--target", str(self.pid), *_SPACES, "--", "env", f"--chdir={os.getcwd()}"]
        return [*inside, *map(str, command)]

    def run(
        self, *command: object, seconds: float = 120, check: bool = True, environ: Mapping[str, str] | None = None
    ) -> str:
        """Run a command to its end; returns the output of both streams."""
        done = subprocess.run(
            self.command(*command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            check=False,
            env={**os.environ, **(environ or {})},
        )
        assert not check or done.returncode == 0, f"{self.name}: {command}: status {done.returncode}: {done.stdout}"
        return done.stdout


class Nodes:
    """The nodes n1, n2, … while the context is open. agent: a program like rsh that launchers use to start processes on
    nodes."""

    def __init__(self, folder: Path, count: int) -> None:
        self.local, self.agent = folder / "local", folder / "agent"
        self._folder = folder
        self._nodes = {f"n{i}": Node(f"n{i}", f"10.0.0.{10 + i}", self.local) for i in range(1, count + 1)}

    def __getitem__(self, name: str) -> Node:
        return self._nodes[name]

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def __enter__(self) -> Nodes:
        self.local.mkdir()
        hosts = self._folder / "hosts"
        lines = ["127.0.0.1 localhost", "10.0.0.1 head", *(f"{node.address} {node.name}" for node in self)]
        hosts.write_text("\n".join(lines) + "\n")
        _call("mount", "--bind", str(hosts), "/etc/hosts")
        _call("ip", "link", "add", "nodes", "type", "bridge")
        _call("ip", "addr", "add", "10.0.0.1/24", "dev", "nodes")
        _call("ip", "link", "set", "nodes", "up")
        try:
            for node in self:
                node.switch_on()
            pids = " ".join(f"{node.name}) pid={node.pid};;" for node in self)
            self.agent.write_text(
                '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\n'
                f"case $1 in {pids} *) exit 1;; esac\nshift\n"
                f'exec nsenter --target $pid {" ".join(_SPACES)} -- sh -c "cd {os.getcwd()}; $*"\n'
            )
            self.agent.chmod(0o755)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in self:
            node.switch_off()
        with contextlib.suppress(subprocess.CalledProcessError):
            _call("ip", "link", "del", "nodes")
            _call("umount", "/etc/hosts")


def _call(*command: str) -> None:
    subprocess.run(command, check=True)
