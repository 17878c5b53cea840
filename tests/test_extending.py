"""The diffs of docs/extending.md, applied to a copy of the packages: what they add works, and touches one place.

Each has an implementation in one new file (a launcher needs none), a few lines in one registry, and tests, which
subclass the suites of packer.testing. All are applied together; then their tests run there, and commands use them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import make_jpeg, tree_of
from suites.programs import run_python

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/extending.md"
DIFFS = sorted((ROOT / "docs/extending").glob("*.diff"))
PACKAGES = ("packer", "readers", "cache")
REGISTRIES = {
    "engine": "packer/engines/__init__.py",
    "format": "packer/formats/__init__.py",
    "launcher": "cache/launchers.py",
    "op": "readers/augment/ops/__init__.py",
    "source": "packer/sources/entries.py",
}
MOST_LINES = 8  # in a registry
SLOW = "flip or truncated or any_samples or dies or results_come or run_twice or a_set_is or worker_of_its_own"
SCRIPT = """
import sys
import packer, readers
from packer.cli.group import cli
from cache.node import detect_ranks, usable_cpus
import readers.augment

def run(*line):
    cli.main(list(line), standalone_mode=False)

run("convert", "images.sqlar", "--to", "msgpack", "-o", "set", "--engine", "hosts", "--scheduler", "here,there")
run("verify", "set", "--deep", "--against", "images.sqlar")
run("inspect", "set")
run("extract", "set", "-o", "again")
run("convert", "set", "--to", "tar", "-o", "as-tar")
run("index", "set/train-00000.msgpack", "-o", "adopted")
assert len(readers.open("adopted", verify=True).read_many(range(8))) == 8
assert "RandomPosterize" in readers.augment.__all__
ranks = detect_ranks()
assert (ranks.rank, ranks.world_size, ranks.launcher) == (1, 2, "htcondor"), ranks
assert usable_cpus() == 1
"""


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages and tests with all diffs."""
    if shutil.which("git") is None:
        pytest.skip("git, which applies the diffs, is not installed")
    copy = tmp_path_factory.mktemp("checkout")
    for name in (*PACKAGES, "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("golden", "*_double"))  # compiled, too
    shutil.copy(ROOT / "pyproject.toml", copy)
    for diff in DIFFS:
        applied = git(copy, "apply", diff)
        assert applied.returncode == 0, f"{diff.name} does not apply; write it again for the code as it is\n{applied}"
    return copy


def git(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}  # the copy is in no repository
    command = ["git", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False)


def in_copy(folder: Path, *arguments: object, **environ: str) -> str:
    """What Python says in the copy, with a program `ssh` that runs commands on this machine."""
    program = folder / "bin/ssh"
    program.parent.mkdir(exist_ok=True)
    program.write_text('#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n')
    program.chmod(0o755)
    paths = {"PYTHONPATH": f"{folder}:{folder / 'tests'}", "PATH": f"{program.parent}:{os.environ['PATH']}"}
    done = run_python(*arguments, cwd=folder, env={**os.environ, **paths, **environ})
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_the_page_names_every_diff() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert {diff.stem for diff in DIFFS} == set(REGISTRIES)
    assert set(re.findall(r"\(extending/(\w+)\.diff\)", text)) == set(REGISTRIES)


@pytest.mark.parametrize("diff", DIFFS, ids=lambda diff: str(diff.stem))
def test_a_diff_is_one_file_and_lines_of_one_registry(diff: Path) -> None:
    changes = re.split(r"^diff --git a/(\S+) b/\S+\n", diff.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    of = {name: body for name, body in zip(changes[::2], changes[1::2], strict=True) if name.startswith(PACKAGES)}
    new = [name for name, body in of.items() if body.startswith("new file")]
    assert set(of) - set(new) == {REGISTRIES[diff.stem]} and len(new) == (diff.stem != "launcher")
    lines = of[REGISTRIES[diff.stem]].splitlines()[2:]
    assert sum(line.startswith("+") for line in lines) <= MOST_LINES
    assert not any(line.startswith("-") for line in lines), "a registry loses lines"


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.faults)], ids=["quick", "slow"])
def test_what_they_add_passes_the_suites(patched: Path, slow: bool) -> None:
    chosen = "Hosts or worker or host or osteriz or every_op or launchers or test_format_msgpack or sqlar"
    files = ["format_msgpack", "sources_sqlar", "engine_hosts", "ops", "ranks", *(["dali_ops"] if slow else [])]
    said = in_copy(
        patched, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/test_{name}.py" for name in files),
        "-k", f"({chosen}) and {'' if slow else 'not '}({SLOW}{' or dali' if slow else ''})",
    )  # fmt: skip
    ran = int(re.findall(r"(\d+) passed", said)[0])
    assert "failed" not in said and ran > (8 if slow else 120), said


def test_commands_use_what_they_add(patched: Path, tmp_path: Path) -> None:
    images = {f"{name}/{number}.jpg": make_jpeg(number) for number in range(4) for name in ("cat", "dog")}
    tree_of(tmp_path / "images", images)
    script = (
        "import sys; sys.path.insert(0, 'tests'); from test_sources_sqlar import archive; from pathlib import Path;"
        "root = Path(sys.argv[1]); archive(root / 'images.sqlar', [(str(p.relative_to(root / 'images')), "
        "p.stat().st_size, p.read_bytes()) for p in sorted((root / 'images').rglob('*.jpg'))])"
    )
    in_copy(patched, "-c", script, tmp_path)
    condor = {"_CONDOR_SLOT": "1", "_CONDOR_PROCNO": "1", "_CONDOR_NPROCS": "2", "OMP_NUM_THREADS": "1"}
    in_copy(patched, "-c", f"import os; os.chdir({str(tmp_path)!r})\n{SCRIPT}", **condor)
    found = {str(path.relative_to(tmp_path / "again")): path.read_bytes() for path in tmp_path.glob("again/**/*.jpg")}
    assert found == images
