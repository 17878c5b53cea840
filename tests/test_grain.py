"""Grain over our readers: `grain_cases.py`, in a process of its own, since Grain's threads outlive its iterators."""

from __future__ import annotations

from pathlib import Path

import pytest
from suites.programs import run_cases

CASES = Path(__file__).parent / "grain_cases.py"


def test_grain_reads_our_sets() -> None:
    run_cases(CASES)


@pytest.mark.faults
def test_grain_with_workers_and_its_own_checkpoints() -> None:
    run_cases(CASES, "faults")
