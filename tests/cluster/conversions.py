"""Conversions that last some seconds, a local conversion to compare them with, and their processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from suites.programs import run_packer

from packer.testing.samples import files_of, make_image

__all__ = ["OPTIONS", "Conversion", "kill", "processes_of"]

OPTIONS = ("--to", "tar", "--samples-per-shard", "2", "--shuffle", "5", "--reencode", "webp", "--quality", "80")
SHARDS = 60


class Conversion:
    """A tree of images, and the files of the set that one process packs from it."""

    def __init__(self, folder: Path) -> None:
        self.tree, local = folder / "tree", folder / "local"
        for number in range(2 * SHARDS):
            path = self.tree / "train" / "abc"[number % 3] / f"{number:03d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(make_image(number, (480, 360)))
        done = run_packer("convert", self.tree, *OPTIONS, "-o", local, "--workers", "1")
        assert done.returncode == 0, done.stderr
        self.files = files_of(local)

    def command(self, out: Path, *more: object) -> list[str]:
        """The same conversion with another output folder and further options."""
        return [str(w) for w in (sys.executable, "-m", "packer", "convert", self.tree, *OPTIONS, "-o", out, *more)]

    def start(self, out: Path, *more: object) -> subprocess.Popen[str]:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(self.command(out, *more), stdin=subprocess.DEVNULL, text=True, **streams)  # type: ignore

    def shards(self, out: Path) -> int:
        """The number of shards that an unfinished conversion has written."""
        return len(list(out.rglob("*.tar")))


def processes_of(*words: str) -> list[int]:
    """The processes other than this one with all these words in their command line."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if all(word in line for word in words) and int(path.parts[2]) != os.getpid():
                pids.append(int(path.parts[2]))
    return sorted(pids)


def kill(process: int) -> bool:
    """Kill a process; returns whether it existed."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
        return True
    return False
