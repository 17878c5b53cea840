"""Python programs and packer commands, run as users run them, with captured output and a time limit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from cache.messages import Silent
from suites.warm import run_warm

__all__ = ["Notes", "run_cases", "run_packer", "run_python"]


class Notes(Silent):
    """Collects the notes of a command."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)

    def __contains__(self, part: str) -> bool:
        return any(part in line for line in self.lines)


def run_python(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments, such as "-c" and a script. options: further options of subprocess.run."""
    usual = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": 180, "check": False}
    return subprocess.run([sys.executable, *map(str, arguments)], **{**usual, **options})


def run_packer(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a packer command: as a fork of a warm process, or as a new process where it needs one (see `suites.warm`)."""
    if not set(options) - {"cwd", "env", "timeout", "check", "stderr"}:
        environment, seconds = options.get("env") or os.environ, options.get("timeout", 180)
        words, joined = [str(word) for word in arguments], options.get("stderr") == subprocess.STDOUT
        done = run_warm(words, options.get("cwd"), dict(environment), seconds, joined=joined)
        if done is not None:
            if options.get("check"):
                done.check_returncode()
            return done
    return run_python("-m", "packer", *arguments, **options)


def run_cases(*cases: Path, which: str = "not faults", seconds: float | None = 600) -> None:
    """Run the tests of files that are not collected in a separate process: those with the mark, or those without it.

    For tests that leave threads and state in their process, which forks in other tests would inherit, or that such
    state would disturb. Raises AssertionError.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    options = ("-q", "-s", "-rs", "-p", "no:cacheprovider", "-m", which)
    done = run_python("-m", "pytest", *options, *cases, env=environment, cwd=cases[0].parent.parent, timeout=seconds)
    print(done.stdout)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]
