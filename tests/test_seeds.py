"""The experiments of benchmarks/seeds: each runs in a small version, passes its checks, and writes a complete page."""

from __future__ import annotations

import json
import math
import re
import textwrap
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from suites.programs import run_python

import packer

ROOT = Path(packer.__file__).resolve().parent.parent
FOLDER, PAGES = ROOT / "benchmarks" / "seeds", ROOT / "docs" / "seeds"
SCRIPTS = sorted(FOLDER.glob("s[0-9][0-9][0-9].py"))
SECONDS = 600  # a script may take this long on a busy machine; on an idle one it takes less than 60

pytest.importorskip("matplotlib", reason="the charts of the pages need matplotlib")


def check_page(folder: Path, name: str) -> dict[str, Any]:
    """The output of a script is complete: the figures of each row or a reason, the page with all of them, its
    charts."""
    facts: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    page = (folder / f"{name}.md").read_text()
    assert facts["checks"] and all(check["holds"] for check in facts["checks"])
    rows, absent = facts["results"], facts["absent"]
    assert rows.keys() > absent.keys(), "no row ran"
    for row, runs in rows.items():
        if row in absent:
            assert absent[row].strip() and not absent[row].startswith("failed"), f"{row}: {absent[row]}"
            assert absent[row] in page, f"the page does not say why {row} did not run"
            continue
        figures = [value for run in runs for key, value in run.items() if key not in ("import_s", "others_cpus")]
        numbers = [value for value in figures if isinstance(value, int | float)]
        assert numbers and all(map(math.isfinite, numbers)) and any(numbers), f"{row} ran without figures"
    for text in (facts["date"], facts["machine"], f"`{facts['command']}`", facts["document"]):
        assert text in page
    assert all(f"{package} {version}" in page for package, version in facts["versions"].items())
    assert all(check["what"] in page and check["found"] in page for check in facts["checks"] + facts["claims"])
    charts = re.findall(r"\]\(([^)]+\.svg)\)", page)
    assert charts and sorted(charts) == sorted(path.name for path in folder.glob(f"{name}-*.svg"))
    for chart in charts:
        assert ElementTree.parse(folder / chart).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    return facts


@pytest.mark.experiments
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_each_experiment_runs_small_and_writes_a_page(script: Path, tmp_path: Path) -> None:
    out, work = tmp_path / "out", tmp_path / "work"
    done = run_python(script, "--smoke", "--out", out, "--work", work, cwd=tmp_path, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-4000:]
    facts = check_page(out, script.stem)
    assert {path.name.partition("-")[0].partition(".")[0] for path in out.iterdir()} == {script.stem}
    assert facts["command"].startswith(f"python benchmarks/seeds/{script.name} --smoke")
    assert str(tmp_path) not in facts["command"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_published_pages_are_complete(script: Path) -> None:
    if not (PAGES / f"{script.stem}.json").exists():
        pytest.skip("not published yet")
    facts = check_page(PAGES, script.stem)
    assert "--smoke" not in facts["command"]


def test_the_index_names_every_script() -> None:
    index = (PAGES / "README.md").read_text()
    assert all(f"[{script.stem}]({script.stem}.md)" in index for script in SCRIPTS)


SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
from experiment import Check, Experiment, main, parser
from harness import NotHere

def fast(arguments, ms): return {{"ms": ms}}
def elsewhere(arguments): raise NotHere("needs a machine of another kind")
def broken(arguments): raise RuntimeError("out of luck")

def check(arguments):
    yield Check("the same samples", found="8 of 8", holds=True)
    yield Check("the same labels", found="{labels} of 8", holds={labels} == 8)

def measure(chosen, arguments): return chosen.function(arguments)

main(Experiment.read(__file__, [fast, elsewhere, broken], measure=measure, check=check), parser("A script."))
"""
TABLE = """
title = "A title"
document = "A document"
about = "About it."
limits = ["Nothing compares."]
claims = [
    {what = "slow takes twice as long", row = "slow", over = "fast", key = "ms", least = 2},
    {what = "fast takes twice as long", row = "fast", over = "slow", key = "ms", least = 2},
    {what = "the rest takes as long", row = "elsewhere", over = "slow", key = "ms", least = 1},
]
rows = [
    {name = "fast", make = "fast", with = {ms = 2.0}},
    {name = "slow", make = "fast", with = {ms = 6.0}, note = "three times as slow"},
    {name = "elsewhere", make = "elsewhere"},
    {name = "broken", make = "broken"},
]

[there]
fast = 1
slow = 4

[[sections]]
name = "times"
title = "Times"
columns = [["ms", "ms"]]
begins = ["fast", "sl"]
base = "fast"
there = true
"""


def run_script(folder: Path, labels: int, *arguments: object) -> Any:
    script = folder / "s999.py"
    script.write_text(textwrap.dedent(SCRIPT).format(folder=str(FOLDER), labels=labels))
    script.with_suffix(".toml").write_text(TABLE)
    return run_python(script, "--smoke", "--out", folder / "out", *arguments, cwd=folder)


def test_a_failed_check_ends_the_run_before_any_measurement(tmp_path: Path) -> None:
    done = run_script(tmp_path, 7)
    assert done.returncode == 1
    assert "FAILS: the same labels: 7 of 8" in done.stderr and "nothing was measured" in done.stderr
    assert "fast" not in done.stderr and not (tmp_path / "out").exists()


def test_the_page_has_tables_claims_and_figures_and_names_skipped_rows(tmp_path: Path) -> None:
    done = run_script(tmp_path, 8, "--skip", "broken")
    assert done.returncode == 0, done.stderr
    facts = check_page(tmp_path / "out", "s999")
    assert facts["absent"] == {"elsewhere": "needs a machine of another kind"}
    page = (tmp_path / "out" / "s999.md").read_text()
    assert "- Holds: slow takes twice as long (3.00 times; there 4.00)" in page
    assert "- **Does not hold**: fast takes twice as long (0.33 times; there 0.25)" in page
    assert "the rest takes" not in page and "## Limits of the comparison\n\nNothing compares." in page
    assert "| slow | 6 | 3.00 | 4 | 4.00 |" in page and "- slow: three times as slow" in page


def test_a_failed_row_fails_the_run(tmp_path: Path) -> None:
    done = run_script(tmp_path, 8)
    assert done.returncode == 1 and "failed: broken" in done.stderr
    assert "failed: RuntimeError: out of luck" in (tmp_path / "out" / "s999.md").read_text()
