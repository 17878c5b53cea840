"""Damaged coefficients and JPEGs never make the codec read or write outside its memory.

`tests/coefficient_fuzz.py` runs in separate processes, with protected pages around images and pixels. The long runs are
marked `faults`: TRIALS (default 100,000) is their length, SEED makes them repeatable. They build the codec with
AddressSanitizer and UndefinedBehaviorSanitizer, too, by gcc, for each variant that this CPU has.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from readers.coefficients import unsupported_reason

if unsupported_reason():
    pytest.skip(unsupported_reason(), allow_module_level=True)

PROGRAM = Path(__file__).parent / "coefficient_fuzz.py"
ROOT = PROGRAM.parent.parent
TRIALS = int(os.environ.get("TRIALS", "100000"))
SEED = os.environ.get("SEED", "1")
KINDS = ("decode", "encode", "strips", "affine", "files")


def fuzz(target: str, trials: int, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, PROGRAM, target, str(trials), SEED]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, **environ}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=7200, check=False)


def check(done: subprocess.CompletedProcess[str], target: str, trials: int) -> None:
    """No fault occurs, and most trials reach the codec's loops."""
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
    counts = eval(done.stdout)
    reached = (
        "decoded",
        "encoded",
        "refused by the decoder",
        "left to libjpeg by the decoder",
        "refused by the encoder",
    )
    assert sum(counts.values()) == trials and sum(counts.get(how, 0) for how in reached) > trials / 2, counts
    assert max(counts.get(how, 0) for how in ("decoded", "encoded")) > trials / 20, counts
    print(f"\n{target}: {trials:,} trials, seed {SEED}: {done.stdout.strip()}")


@pytest.mark.parametrize("target", KINDS)
def test_damage_never_leads_outside_of_the_memory(target: str) -> None:
    check(fuzz(target, 1000), target, 1000)


@pytest.mark.parametrize("target", ["read", "write", "read-facts"])
def test_an_access_outside_of_the_memory_ends_the_process(target: str) -> None:
    """The assumptions of the other tests."""
    assert fuzz(target, 1).returncode == -signal.SIGSEGV


@pytest.mark.faults
@pytest.mark.parametrize("target", KINDS)
def test_damage_never_leads_outside_of_the_memory_for_long(target: str) -> None:
    check(fuzz(target, TRIALS), target, TRIALS)


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a program that loads the codec with sanitizers."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc, with its sanitizers")
    folder = tmp_path_factory.mktemp("sanitized")
    sources = sorted((ROOT / "readers/coefficients/_codec").glob("*.c"))
    flags = [
        "-std=c11",
        "-O1",
        "-g",
        "-fPIC",
        "-shared",
        "-fwrapv",
        "-ffp-contract=off",
        "-fsanitize=address,undefined",
    ]
    include = f"-I{sysconfig.get_path('include')}"
    command = ["gcc", *flags, include, *sources, "-o", folder / "native.so", "-lm"]
    subprocess.run(command, check=True, timeout=600)
    library = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    return {"CODEC": str(folder), "LD_PRELOAD": library.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0"}


@pytest.mark.faults
@pytest.mark.parametrize("variant", ["avx2", "avx2_tables", "sse4", "neon", "plain"])
@pytest.mark.parametrize("target", KINDS)
def test_damage_causes_no_sanitizer_report(target: str, variant: str, sanitized: dict[str, str]) -> None:
    done = fuzz(target, max(100, TRIALS // 10), VARIANT=variant, **sanitized)
    if "no variant" in done.stderr:
        pytest.skip(f"this CPU has no variant {variant}")
    check(done, f"{target}, {variant}, sanitized", max(100, TRIALS // 10))


@pytest.mark.faults
@pytest.mark.parametrize("target", ["read", "write", "read-facts"])
def test_sanitizers_report_planted_faults(target: str, sanitized: dict[str, str]) -> None:
    done = fuzz(f"{target}-heap", 1, **sanitized)
    assert (
        done.returncode
        and f"{target[:5].strip('-').upper()} of size" in done.stderr
        and "heap-buffer-overflow" in done.stderr
    )
