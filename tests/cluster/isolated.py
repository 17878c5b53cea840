"""Run a program in private Linux namespaces: processes, mounts, network, host name and shared memory.

    isolated.py pytest -m cluster tests/cluster

The only network is loopback, and all its ports are free. So the program meets no servers of other users, and no client
can reach another machine, not even the addresses where clouds hand out credentials. When the program ends, or
isolated.py is killed, the kernel ends all processes that were started inside and drops their mounts. Needs root.

Inside, PACKER_TEST_ISOLATED is "1". /tmp is that of the machine; /run is empty.
"""

from __future__ import annotations

import os
import subprocess
import sys

__all__ = ["IS_ISOLATED"]

IS_ISOLATED = os.environ.get("PACKER_TEST_ISOLATED") == "1"
_SPACES = ("--mount", "--pid", "--net", "--uts", "--ipc")
_PREPARE = (
    "ip link set lo up && hostname localhost && mount -t tmpfs -o size=64m,mode=755 tmpfs /run"
    ' && mount -t tmpfs -o size=4g,mode=1777 tmpfs /dev/shm && exec "$@"'
)


def _main(command: list[str]) -> int:
    if not command:
        sys.exit("usage: isolated.py PROGRAM [ARGUMENT ...]")
    if os.geteuid() != 0:
        sys.exit("isolated.py: namespaces need root here")
    # The kernel ends unshare together with this process, and with unshare every process inside.
    unshare = ["setpriv", "--pdeathsig", "KILL", "unshare", *_SPACES, "--fork", "--kill-child", "--mount-proc"]
    environ = {**os.environ, "PACKER_TEST_ISOLATED": "1"}
    return subprocess.call([*unshare, "sh", "-c", _PREPARE, "sh", *command], env=environ)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
