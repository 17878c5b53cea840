"""The examples of training frameworks, killed and continued, and Grain over our readers, in a separate process.

The ranks are forked. In the process of other tests they would inherit the threads of those tests, and accelerate's
state for a process. Grain's threads outlive its iterators, so it comes last.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from suites.programs import run_cases

KILLS, GRAIN = (Path(__file__).parent / name for name in ("training_kill_cases.py", "grain_cases.py"))


def test_killed_examples_continue_and_grain_reads_our_sets() -> None:
    run_cases(KILLS, GRAIN)


@pytest.mark.faults
def test_examples_continue_after_random_kills() -> None:
    """TRIALS kills of each framework (200): hours."""
    run_cases(KILLS, which="faults", seconds=None)


@pytest.mark.faults
def test_grain_with_workers_and_checkpoints() -> None:
    run_cases(GRAIN, which="faults")
