"""The examples of training frameworks, killed and continued: `training_kill_cases.py`, in a process of its own.

Their ranks are forked. In the process of other tests they would inherit those tests' threads, and the state that
accelerate keeps for a process.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from suites.programs import run_python

CASES = Path(__file__).parent / "training_kill_cases.py"


@pytest.mark.parametrize("which", ["not faults", pytest.param("faults", marks=pytest.mark.faults)])
def test_what_was_killed_continues(which: str) -> None:
    """With -m faults, TRIALS kills of each (200), which takes hours."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    options = ("-q", "-s", "-rs", "-p", "no:cacheprovider", "-m", which)
    seconds = 600 if which == "not faults" else None
    done = run_python("-m", "pytest", *options, CASES, env=environment, cwd=CASES.parent.parent, timeout=seconds)
    print(done.stdout)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]
