"""Damaged coefficients and JPEGs make no compiled function read or write outside of its memory.

`tests/coefficient_fuzz.py` runs in processes of their own, with pages around the memory that no one may touch. The long
run is marked `faults`; TRIALS (default 100,000) is its length, SEED makes it repeatable.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from coefficient_cases import Compiled

from readers.coefficients import unsupported_reason

pytest.importorskip("numba", reason="needs numba: pip install 'packer-vision[coefficients]'")
if unsupported_reason():
    pytest.skip(unsupported_reason(), allow_module_level=True)

PROGRAM = Path(__file__).parent / "coefficient_fuzz.py"
TRIALS = int(os.environ.get("TRIALS", "100000"))
SEED = os.environ.get("SEED", "1")


def fuzz(compiled: Compiled, what: str, trials: int, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, PROGRAM, what, str(trials), SEED]
    paths = os.pathsep.join([str(PROGRAM.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, **compiled.environ, "PYTHONPATH": paths, **environ}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600, check=False)


@pytest.mark.parametrize("what", ["decode", "encode", "strips"])
def test_damage_never_leads_outside_of_the_memory(compiled: Compiled, what: str) -> None:
    done = fuzz(compiled, what, 2000)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    counts = eval(done.stdout)
    assert sum(counts.values()) == 2000 and all(counts.get(how, 101) > 100 for how in ("decoded", "encoded")), counts
    assert what == "strips" or min(counts.values()) > 100, counts


def test_an_access_outside_of_the_memory_ends_the_process(compiled: Compiled) -> None:
    """What the other tests rely on."""
    assert fuzz(compiled, "beyond", 200).returncode == -signal.SIGSEGV


@pytest.mark.faults
@pytest.mark.parametrize("what", ["decode", "encode", "strips"])
def test_damage_never_leads_outside_of_the_memory_for_long(compiled: Compiled, what: str) -> None:
    done = fuzz(compiled, what, TRIALS)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    print(f"\n{what}: {TRIALS:,} trials, seed {SEED}: {done.stdout.strip()}")


@pytest.mark.faults
@pytest.mark.parametrize("what", ["decode", "encode", "strips"])
def test_damage_never_leads_outside_of_an_array(compiled: Compiled, tmp_path: Path, what: str) -> None:
    """The same, compiled so that every index of an array is checked."""
    done = fuzz(compiled, what, TRIALS // 10, NUMBA_BOUNDSCHECK="1", PACKER_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
