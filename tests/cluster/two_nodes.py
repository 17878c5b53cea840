"""A real Slurm cluster of two nodes on one machine, private to the process that starts it and ended with that process.

    with Cluster(folder) as cluster:
        cluster.run("srun", "--nodes=2", "hostname")

The cluster lives in private Linux namespaces: processes, mounts, network, host names and shared memory. So it meets no
other Slurm and no port in use, and it ends as a whole: when the first process of the namespace ends, the kernel ends
the others and drops the mounts. The first process ends when its standard input is closed, so also when pytest is
killed. The files are in `folder`.

The nodes are n9 and n10: Slurm lists them in this order, alphabetical sorting reverses it. Each node has a separate
host name, /dev/shm and `local/`, 32 CPUs that the machine does not have, and 4 GPUs that are /dev/null. Nothing is
installed.

proctrack: with "linuxproc" a signal to a step reaches all processes of the step; in a batch step that includes srun,
which kills its tasks at once. With "cgroup", as on most clusters, the signal reaches the tasks alone. "cgroup" makes
directories in the freezer hierarchy of cgroup v1 and removes them at the end.

As a program, `two_nodes.py --check` prints what is missing, and `two_nodes.py FOLDER PROCTRACK` is the first process.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

__all__ = ["FREEZER", "NODES", "Cluster", "missing"]

NODES = ("n9", "n10")
FREEZER = Path("/sys/fs/cgroup/freezer")
_SPACES = ("--mount", "--pid", "--net", "--uts", "--ipc")
_PROGRAMS = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "srun": "slurm-wlm",
    "munged": "munge",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "ip": "iproute2",
}
_START_SECONDS = 60.0
_LOG = logging.getLogger("two_nodes")

_CONF = """
ClusterName=two
SlurmctldHost=ctl(10.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=/run/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdSpoolDir={folder}/spool.%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
MpiDefault=none
PropagateResourceLimits=NONE
SlurmdTimeout=15
KillWait=10
ReturnToService=2
GresTypes=gpu
NodeName=n9 NodeAddr=10.0.0.9 Port=17009 CPUs=32 Sockets=1 CoresPerSocket=32 ThreadsPerCore=1 RealMemory=12000 \
Gres=gpu:4
NodeName=n10 NodeAddr=10.0.0.10 Port=17010 CPUs=32 Sockets=1 CoresPerSocket=32 ThreadsPerCore=1 RealMemory=12000 \
Gres=gpu:4
PartitionName=main Nodes=n9,n10 Default=YES MaxTime=INFINITE
"""
_HOSTS = "127.0.0.1 localhost\n10.0.0.1 ctl\n10.0.0.9 n9\n10.0.0.10 n10\n"


def missing() -> str:
    """The reason why a cluster cannot start here, or ""."""
    lacking = sorted({package for program, package in _PROGRAMS.items() if shutil.which(program) is None})
    if lacking:
        return f"no Slurm here: apt-get install {' '.join(lacking)}"
    if os.geteuid() != 0:
        return "Slurm's daemons and their namespaces need root here"
    probe = ["unshare", *_SPACES, "--fork", "--kill-child", "--mount-proc", "true"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    return f"no namespaces here: {done.stderr.strip()}" if done.returncode else ""


class Cluster:
    """The cluster, while the context is open. local: the disk of each node. work: the folder where commands run."""

    def __init__(self, folder: Path, proctrack: str = "linuxproc") -> None:
        self.proctrack = proctrack
        self.folder, self.local, self.work = folder, folder / "local", folder / "work"
        self._outer: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Cluster:
        self.work.mkdir()
        command = ["unshare", *_SPACES, "--fork", "--kill-child", "--mount-proc"]
        with open(self.folder / "machine.log", "wb") as log:
            self._outer = subprocess.Popen(
                [*command, sys.executable, __file__, str(self.folder), self.proctrack],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self.wait(self._is_up, _START_SECONDS, "the cluster to be up")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        outer = self._outer
        if outer is not None and outer.stdin is not None:
            outer.stdin.close()
            try:
                outer.wait(20)
            except subprocess.TimeoutExpired:
                outer.kill()  # the child of unshare ends with it, and the namespace with the child
                outer.wait(20)
        if self.proctrack == "cgroup":
            for node in NODES:
                for folder, _, _ in os.walk(FREEZER / f"slurm_{node}", topdown=False):
                    os.rmdir(folder)  # the kernel refuses while a process is inside

    def run(
        self, *command: object, seconds: float = 120, check: bool = True, environ: Mapping[str, str] | None = None
    ) -> str:
        """Run a command on the machine that jobs are submitted from; returns the output of both streams."""
        done = subprocess.run(
            [*self._inside(), *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            check=False,
            env=self._environ(environ),
        )
        assert not check or done.returncode == 0, f"{command}: status {done.returncode}: {done.stdout}"
        return done.stdout

    def submit(self, *command: object, environ: Mapping[str, str] | None = None) -> str:
        """Submit a job with `sbatch`; returns its id. Its output goes to <job>.out in the folder."""
        output = self.folder / "%A.out"
        return self.run("sbatch", "--parsable", f"--output={output}", *command, environ=environ).split()[-1]

    def state(self, job: str) -> str:
        """The state of a job in Slurm's terms: PENDING, RUNNING, COMPLETED, …"""
        told = self.run("scontrol", "--oneliner", "show", "job", job)
        return next(word.partition("=")[2] for word in told.split() if word.startswith("JobState="))

    def output(self, job: str) -> str:
        path = self.folder / f"{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def ended(self, job: str, seconds: float) -> str:
        """Wait until a job has ended; returns its state."""

        def over() -> str:
            state = self.state(job)
            return "" if state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED") else state

        final: str = self.wait(over, seconds, f"job {job} to end", lambda: self.output(job))
        return final

    def on(self, node: str, *command: object, check: bool = True) -> str:
        """Run a command where the processes of a node run, whatever state Slurm has for the node."""
        target = self.run("pgrep", "-f", f"^slurmd -D -N {node}$").split()[0]
        return self.run("nsenter", "--target", target, "--mount", "--uts", "--", *command, check=check)

    def switch_off(self, node: str) -> None:
        """Pull the plug of a node: daemon and tasks end at once, disk and memory are gone. Slurm is not notified."""
        target = self.run("pgrep", "-f", f"^slurmd -D -N {node}$").split()[0]
        script = "me=$(readlink /proc/$1/ns/uts); for p in /proc/[0-9]*; do " \
            '[ "$(readlink $p/ns/uts)" = "$me" ] && echo ${p#/proc/}; done | xargs kill -KILL'  # fmt: skip
        self.run("sh", "-c", script, "sh", target)

    def switch_on(self, node: str) -> None:
        daemon = 'exec "$@" < /dev/null >> "$0" 2>&1'
        self.run("sh", "-c", daemon, self.folder / "machine.log", "setsid", "--fork", *_node(self.folder, node))

    def left(self, node: str) -> list[str]:
        """The files on the disk of a node."""
        return self.on(node, "find", self.local, "/dev/shm", "-type", "f").split()

    def processes(self) -> str:
        """The processes of a node other than the daemons, by pid and command."""
        daemons = ("slurm", ": slurmscriptd", "munged", "unshare", "nsenter", "ps ")
        lines = self.run("ps", "-eo", "pid=,args=").splitlines()
        return "\n".join(
            line for line in lines if __file__ not in line and not line.split(None, 1)[1].startswith(daemons)
        )

    def wait(self, condition: Callable[[], object], seconds: float, why: str, more: Callable[[], str] = str) -> object:
        started = time.monotonic()
        while not (value := condition()):
            if time.monotonic() > started + seconds:
                raise AssertionError(f"waited {seconds:.0f} s for {why}\n{more()}\n{self._logs()}")
            time.sleep(0.2)
        _LOG.info("%s: %.0f s", why, time.monotonic() - started)
        return value

    # --- inside -------------------------------------------------------------------------------------------------
    def _environ(self, more: Mapping[str, str] | None) -> dict[str, str]:
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        paths = {"PATH": path, "PYTHONPATH": str(Path(__file__).parents[2])}
        return {**plain, **paths, "SLURM_CONF": str(self.folder / "slurm.conf"), **(more or {})}

    def _inside(self) -> list[str]:
        return ["nsenter", "--target", self._first(), *_SPACES, "--", "env", f"--chdir={self.work}"]

    def _first(self) -> str:
        """The pid of the first process of the namespaces, as seen from outside; "" before there is one."""
        outer = self._outer
        if outer is None or outer.poll() is not None:
            raise AssertionError(f"the cluster is not running\n{self._logs()}")
        return Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().strip()

    def _is_up(self) -> bool:
        if not self._first() or not (self.folder / "gres.conf").exists():
            return False
        nodes = self.run("sinfo", "--noheader", "--Node", "--format=%N %T", check=False)
        return all(f"{node} idle" in nodes for node in NODES)

    def _logs(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)


def _main(folder: Path, proctrack: str) -> None:
    """The first process of the namespaces: start all daemons, wait for the end of standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is meant for the process at the other end of standard input
    socket.sethostname("ctl")
    (folder / "hosts").write_text(_HOSTS)
    (folder / "slurm.conf").write_text(_CONF.format(folder=folder, proctrack=proctrack))
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\nCgroupPlugin=cgroup/v1\n")
    for name in ("state", "local", "devices"):
        (folder / name).mkdir(mode=0o755)
    _call("ip", "link", "set", "lo", "up")
    for number in (1, 9, 10):
        _call("ip", "address", "add", f"10.0.0.{number}/32", "dev", "lo")
    _call("mount", "--bind", str(folder / "hosts"), "/etc/hosts")
    devices = folder / "devices"
    _call("mount", "-t", "tmpfs", "-o", "size=1m,dev", "tmpfs", str(devices))
    for number in range(4):
        _call("mknod", "-m", "666", str(devices / f"gpu{number}"), "c", "1", "3")
    gres = "\n".join(f"NodeName={node} Name=gpu File={devices}/gpu[0-3]" for node in NODES)
    (folder / "gres.conf").write_text(gres + "\n")
    _call("mount", "-t", "tmpfs", "-o", "size=8m,mode=755", "tmpfs", "/run")  # munged requires traversable parents
    munge = Path("/run/munge")
    munge.mkdir(mode=0o755)
    key = munge / "key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    files = [f"--{name}-file={munge / name}" for name in ("key", "log", "pid", "seed")]
    _start("munged", "--foreground", f"--socket={munge / 'socket'}", *files)
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    _start("slurmctld", "-D")
    for node in NODES:
        _start(*_node(folder, node))
    while not select.select([sys.stdin], [], [], 0.5)[0]:  # a read returns only at the end of standard input
        while _reap():
            pass


def _node(folder: Path, node: str) -> list[str]:
    """The command that is a node: an empty disk, empty memory, a separate host name."""
    tmpfs = "mount -t tmpfs -o size=1g tmpfs"
    script = f"hostname {node} && {tmpfs} {folder}/local && {tmpfs} /dev/shm && exec slurmd -D -N {node}"
    return ["unshare", "--mount", "--uts", "sh", "-c", script]


def _reap() -> bool:
    """Reap orphans: the first process of a namespace is the parent of every process whose parent has ended."""
    try:
        return os.waitpid(-1, os.WNOHANG)[0] > 0
    except ChildProcessError:
        return False


def _start(*command: str) -> None:
    subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)


def _call(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(missing() or 0)
    _main(Path(sys.argv[1]), sys.argv[2])
