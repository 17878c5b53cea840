"""An NFS server (nfs-ganesha), and clients that are separate machines: a user-mode Linux for each.

    with server(folder) as export, Client("a", folder) as client:
        client.run(f"packer stage {export}/set --target /dev/shm/a")

A client runs a separate kernel, so it has the attribute cache and the locks of any NFS client. Its only disk is the
machine's (hostfs), whose files outside the mount it must not share with other clients. It reaches the server through a
private network that ends at loopback. The export is NFS 4.2, mounted at the same path as on the server.

A client runs one command after another. The commands are files in its folder:

    1.sh  the command       1.out  its output       1.status  its status, when it has ended       stop  makes it end
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import TracebackType

import pytest
from services import answers, begin, end, need, service, wait

__all__ = ["Client", "server"]

PORT = 12049
_MODULES = Path("/usr/lib/uml/modules")
_CONF = """
NFS_CORE_PARAM {{ Protocols = 4; NFS_Port = {port}; Enable_NLM = false; Enable_UDP = false;
                  Enable_RQUOTA = false; }}
NFSv4 {{ Graceless = true; Lease_Lifetime = 20; RecoveryRoot = "{folder}/recovery"; }}
EXPORT {{ Export_Id = 1; Path = {folder}/export; Pseudo = /export; Access_Type = RW; Squash = No_Root_Squash;
          SecType = sys; FSAL {{ Name = VFS; }} }}
"""
_INIT = """#!/bin/sh
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t tmpfs tmpfs /dev/shm; mount -t tmpfs tmpfs /run
ip link set lo up; ip addr add 10.0.2.15/24 dev eth0; ip link set eth0 up; ip route add default via 10.0.2.2
hostname {name}
export PATH='{path}' PYTHONPATH='{root}' HOME=/dev/shm LC_ALL=C.UTF-8 PYTHONDONTWRITEBYTECODE=1
mount -t nfs4 -o vers=4.2,port={port},proto=tcp 10.0.2.2:/export {mount} || echo failed > {folder}/mount
echo ok > {folder}/up
cd {root}; number=1
while [ ! -e {folder}/stop ]; do
    if [ -e {folder}/$number.sh ]; then
        sh {folder}/$number.sh > {folder}/$number.out 2>&1 < /dev/null
        echo $? > {folder}/$number.end; mv {folder}/$number.end {folder}/$number.status
        number=$((number + 1))
    else
        sleep 0.1
    fi
done
umount -l {mount}
poweroff -f
"""


@contextlib.contextmanager
def server(folder: Path) -> Iterator[Path]:
    """The exported folder."""
    need("ganesha.nfsd", "linux.uml", "slirp-fullbolt", package="nfs-ganesha nfs-ganesha-vfs user-mode-linux slirp")
    for name in ("export", "recovery"):
        (folder / name).mkdir()
    (folder / "ganesha.conf").write_text(_CONF.format(port=PORT, folder=folder))
    command = ("ganesha.nfsd", "-F", "-f", folder / "ganesha.conf", "-L", "STDERR", "-p")
    Path("/run/ganesha").mkdir(exist_ok=True)
    with service([*command, folder / "ganesha.pid", "-N", "NIV_EVENT"], partial(answers, PORT), folder / "nfs.log"):
        yield folder / "export"


class Client:
    """A machine that has the export mounted while the context is open."""

    def __init__(self, name: str, folder: Path, memory: str = "700M") -> None:
        self.name, self._memory = name, memory
        self._folder = folder / name
        self.mount = folder / "export"
        self._numbers = itertools.count(1)
        self._machine: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Client:
        self._folder.mkdir()
        Path("/lib/modules").mkdir(exist_ok=True)
        for modules in _MODULES.iterdir():
            with contextlib.suppress(FileExistsError):
                (Path("/lib/modules") / modules.name).symlink_to(modules)
        init, root = self._folder / "init", Path(__file__).parents[2]
        words = {
            "name": self.name,
            "folder": self._folder,
            "mount": self.mount,
            "path": os.environ["PATH"],
            "root": root,
            "port": PORT,
        }
        init.write_text(_INIT.format(**words))
        init.chmod(0o755)
        command = ["linux.uml", f"umid=packer-{self.name}-{os.getpid()}", f"mem={self._memory}", "rootfstype=hostfs"]
        command += ["rootflags=/", "rw", f"init={init}", "eth0=slirp,,/usr/bin/slirp-fullbolt", "con0=fd:0,fd:1"]
        self._machine = begin([*command, "con=null", "quiet"], self._folder / "console")
        try:
            self._wait(self._folder / "up", 120)
            assert not (self._folder / "mount").exists(), f"{self.name} could not mount the export\n{self._said()}"
        except BaseException:
            self.__exit__(None, None, None)
            if "put_fp_registers" in self._said():  # Debian 12's: its kernel keeps 2,696 bytes of registers
                pytest.skip("this user-mode Linux does not run on a CPU with AMX")
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._machine is None:
            return
        (self._folder / "stop").touch()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._machine.wait(15)
        self.switch_off()

    def switch_off(self) -> None:
        """Pull the plug of the machine: the server is not notified."""
        if self._machine is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._machine.pid, signal.SIGKILL)
            end(self._machine)
            self._machine = None

    def start(self, command: str) -> int:
        """Begin a shell command; returns its number."""
        number = next(self._numbers)
        script = self._folder / f"{number}.part"
        script.write_text(command.replace("packer ", f"{sys.executable} -m packer ") + "\n")
        script.rename(script.with_suffix(".sh"))
        return number

    def ended(self, number: int, seconds: float = 240) -> tuple[int, str]:
        """Wait for a command; returns its status and its output."""
        self._wait(self._folder / f"{number}.status", seconds)
        text = (self._folder / f"{number}.out").read_text(errors="replace")
        return int((self._folder / f"{number}.status").read_text()), text

    def run(self, command: str, seconds: float = 240) -> str:
        """Run a command that must succeed; returns its output."""
        status, text = self.ended(self.start(command), seconds)
        assert status == 0, f"{self.name}: {command}: status {status}: {text}"
        return text

    def _wait(self, path: Path, seconds: float) -> None:
        started = time.monotonic()

        def is_there() -> bool:
            assert self._machine is None or self._machine.poll() is None, f"{self.name} has ended\n{self._said()}"
            return path.exists()

        wait(is_there, f"{path.name} of client {self.name}, since {started:.0f}", seconds, self._said)

    def _said(self) -> str:
        texts = [*self._folder.glob("console"), *sorted(self._folder.glob("*.out"))]
        return "\n".join(path.read_text(errors="replace")[-1500:] for path in texts)
