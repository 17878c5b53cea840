"""The examples of training frameworks, killed and continued: `training_kill_cases.py`, in a process of its own.

Their ranks are forked. In the process of other tests they would inherit those tests' threads, and the state that
accelerate keeps for a process.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from suites.programs import run_cases

CASES = Path(__file__).parent / "training_kill_cases.py"


def test_what_was_killed_continues() -> None:
    run_cases(CASES)


@pytest.mark.faults
def test_what_is_killed_at_random_continues() -> None:
    """TRIALS kills of each framework (200): hours."""
    run_cases(CASES, "faults", None)
