"""Does `packer.diagnose` name the culprit that was planted, and predict what is gained without it?

    python benchmarks/diagnosis.py --runs 10 [--cases "slow reading" "ours: slow decoding"]

Each case is a loader with one slow stage, and the same loader without it (`diagnosis_cases.py`). A run diagnoses the
first and measures the second. The table says how often the culprit was named, and by how much the predicted time of a
step (`bound`) is off the measured one: median and largest error.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from pathlib import Path

from diagnosis_cases import STEP, Case, foreign_cases, our_cases

import packer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=8.0, help="of a diagnosis")
    parser.add_argument("--cases", nargs="*", metavar="NAME", help="default: all")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than CPUs
    with tempfile.TemporaryDirectory() as folder:
        cases = foreign_cases() | our_cases(Path(folder))
        if unknown := set(arguments.cases or ()) - set(cases):
            parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(cases)}")
        print("| planted | named | else | ms a step | predicted | measured | error: median | largest | s |")
        print("|---|---|---|---|---|---|---|---|---|")
        for name in arguments.cases or cases:
            print(f"| {name} | {_row(cases[name], arguments.runs, arguments.seconds)} |", flush=True)


def _row(case: Case, runs: int, seconds: float) -> str:
    found, steps, bounds, without, taken = [], [], [], [], []
    for _ in range(runs):
        step = STEP if case.step is None else case.step()
        start = time.perf_counter()
        result = packer.diagnose(case.make(), seconds=seconds, **{"simulate_step": step, **case.options})
        taken.append(time.perf_counter() - start)
        mended = packer.diagnose(case.without(), seconds=seconds / 2, **{"simulate_step": step, **case.options_without})
        found.append(result.culprit)
        steps.append(result.full.seconds)
        bounds.append(result.bound)
        without.append(mended.full.seconds)
    errors = [abs(bound / real - 1) for bound, real in zip(bounds, without, strict=True)]
    others = ", ".join(sorted({each or "nothing" for each in found if each != case.culprit}))
    times = " | ".join(f"{1e3 * statistics.median(each):.1f}" for each in (steps, bounds, without))
    return (
        f"{found.count(case.culprit)} of {runs} | {others} | {times} | {statistics.median(errors):.0%} | "
        f"{max(errors):.0%} | {statistics.median(taken):.0f}"
    )


if __name__ == "__main__":
    main()
