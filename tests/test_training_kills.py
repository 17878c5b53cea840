"""The examples of training frameworks, killed and continued, and Grain over our readers, in a process of their own.

Their ranks are forked. In the process of other tests they would inherit those tests' threads, and the state that
accelerate keeps for a process. Grain's threads outlive its iterators, so it comes last.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from suites.programs import run_cases

KILLS, GRAIN = (Path(__file__).parent / name for name in ("training_kill_cases.py", "grain_cases.py"))


def test_what_was_killed_continues_and_grain_reads_our_sets() -> None:
    run_cases(KILLS, GRAIN)


@pytest.mark.faults
def test_what_is_killed_at_random_continues() -> None:
    """TRIALS kills of each framework (200): hours."""
    run_cases(KILLS, which="faults", seconds=None)


@pytest.mark.faults
def test_grain_with_workers_and_its_own_checkpoints() -> None:
    run_cases(GRAIN, which="faults")
