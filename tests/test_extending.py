"""Extensions by third parties: the diffs of docs/extending.md, or a separate distribution with entry points.

Each diff has an implementation in one new file (a launcher needs none), a few lines in one registry, and tests that
subclass the suites of packer.testing. All diffs are applied together to a copy of the packages, in which their tests
run and commands use them. The same files, with an entry point each, form a separate distribution.
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
SLOW = "flip or truncated or any_samples or dies or results_come or run_twice or a_set_is or separate_worker"
IMAGES = {f"{name}/{number}.jpg": make_jpeg(number) for number in range(4) for name in ("cat", "dog")}
COMMANDS = """
import sqlite3, sys
from contextlib import closing
from pathlib import Path
import packer, readers
from packer.cli.group import cli

def run(*line):
    cli.main(list(line), standalone_mode=False)

with closing(sqlite3.connect("images.sqlar")) as database, database:
    database.execute("CREATE TABLE sqlar(name TEXT PRIMARY KEY, mode INT, mtime INT, sz INT, data BLOB)")
    for path in sorted(Path("images").rglob("*.jpg")):
        row = (str(path.relative_to("images")), 33188, 0, path.stat().st_size, path.read_bytes())
        database.execute("INSERT INTO sqlar VALUES(?, ?, ?, ?, ?)", row)
run("convert", "images.sqlar", "--to", "msgpack", "-o", "set", "--engine", *sys.argv[1:])
run("verify", "set", "--deep", "--against", "images.sqlar")
run("inspect", "set")
run("extract", "set", "-o", "again")
run("convert", "set", "--to", "tar", "-o", "as-tar")
run("index", "set/train-00000.msgpack", "-o", "adopted")
assert len(readers.open("adopted", verify=True).read_many(range(8))) == 8
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with some images, in which commands run."""
    tree_of(tmp_path / "work/images", IMAGES)
    return tmp_path / "work"


def check_extracted(folder: Path) -> None:
    again = folder / "again"
    assert {str(path.relative_to(again)): path.read_bytes() for path in again.rglob("*.jpg")} == IMAGES


# --- diffs --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages and tests with all diffs applied."""
    if shutil.which("git") is None:
        pytest.skip("git, which applies the diffs, is not installed")
    copy = tmp_path_factory.mktemp("checkout")
    for name in (*PACKAGES, "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("golden", "*_double"))  # compiled, too
    shutil.copy(ROOT / "pyproject.toml", copy)
    environ = {**os.environ, "GIT_CEILING_DIRECTORIES": str(copy.parent)}  # the copy is in no repository
    for diff in DIFFS:
        applied = subprocess.run(["git", "apply", str(diff)], cwd=copy, env=environ, capture_output=True, timeout=300)
        assert applied.returncode == 0, f"{diff.name} does not apply; rewrite it for the current code\n{applied}"
    return copy


def in_copy(copy: Path, *arguments: object, cwd: Path | None = None, **environ: str) -> str:
    """The output of Python in the copy, with a program `ssh` that runs commands on this machine."""
    program = copy / "bin/ssh"
    program.parent.mkdir(exist_ok=True)
    program.write_text('#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n')
    program.chmod(0o755)
    paths = {"PYTHONPATH": f"{copy}:{copy / 'tests'}", "PATH": f"{program.parent}:{os.environ['PATH']}"}
    done = run_python(*arguments, cwd=cwd or copy, env={**os.environ, **paths, **environ})
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
def test_additions_pass_the_suites(patched: Path, slow: bool) -> None:
    chosen = "Hosts or worker or host or osteriz or every_op or launchers or test_format_msgpack or sqlar"
    files = ["format_msgpack", "sources_sqlar", "engine_hosts", "ops", "ranks", *(["dali_ops"] if slow else [])]
    output = in_copy(
        patched, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/test_{name}.py" for name in files),
        "-k", f"({chosen}) and {'' if slow else 'not '}({SLOW}{' or dali' if slow else ''})",
    )  # fmt: skip
    ran = int(re.findall(r"(\d+) passed", output)[0])
    assert "failed" not in output and ran > (8 if slow else 60), output


def test_commands_use_the_additions(patched: Path, folder: Path) -> None:
    condor = {"_CONDOR_SLOT": "1", "_CONDOR_PROCNO": "1", "_CONDOR_NPROCS": "2", "OMP_NUM_THREADS": "1"}
    script = COMMANDS + (
        "import readers.augment\nfrom cache.node import detect_ranks, usable_cpus\n"
        "assert 'RandomPosterize' in readers.augment.__all__ and usable_cpus() == 1\n"
        "ranks = detect_ranks()\nassert (ranks.rank, ranks.world_size, ranks.launcher) == (1, 2, 'htcondor'), ranks\n"
    )
    in_copy(patched, "-c", script, "hosts", "--scheduler", "here,there", cwd=folder, **condor)
    check_extracted(folder)


# --- another distribution -----------------------------------------------------------------------------------------
MODULE = '''
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import click
from cache.errors import MissingError
from cache.remote import Facts
from packer.engines import EngineEntry
from packer.formats import FormatEntry
from packer.sources import SourceEntry
from readers.caching.form import Encoded

FORMAT = FormatEntry(name="msgpack", title="a MessagePack stream", home="msgpack_format:FORMAT",
                     magic=((0, bytes.fromhex("df00000001db0000000a7061636b65722e736574")),), suffixes=(".msgpack",),
                     aliases=("heap",))
SOURCE = SourceEntry(name="sqlar", title="a SQLite archive", home="sqlar_source:SqlarSource",
                     magic=((0, b"SQLite format 3\\0"),), suffixes=(".sqlar",), options=frozenset({"layout", "shade"}))

@contextmanager
def open_pool(scheduler):
    with ThreadPoolExecutor(2) as pool:
        yield pool

ENGINE = EngineEntry(name="pool", title="threads", home="thirdparty:open_pool")

def make_plain(parameters):
    if parameters != "again":
        raise ValueError(f"plain takes again, not {parameters!r}")
    return Encoded()

class Shelf:
    """The files below /HOST/PATH of this machine, as shelf://HOST/PATH."""

    def __init__(self, url, patience):
        self.root = f"/{url.host}/{url.path}"

    def read(self, span):
        with open(f"{self.root}/{span.path}", "rb") as file:
            file.seek(span.start)
            return file.read(span.stop - span.start), self.head(span.path)[0]

    def whole(self, path, most_bytes, cut=False):
        facts = self.head(path)[0]
        with open(f"{self.root}/{path}", "rb") as file:
            return file.read(most_bytes), facts

    def head(self, path):
        try:
            found = os.stat(f"{self.root}/{path}")
        except OSError as error:
            raise MissingError(f"{self.root}/{path}: no such file") from error
        return Facts(found.st_size, "", found.st_mtime), {}

@click.command("tidy")
@click.option("--twice", is_flag=True)
def tidy(twice):
    """Put things away."""
    print("tidy\\ntidy" if twice else "tidy")
'''
POINTS = """[packer.formats]
msgpack = thirdparty:FORMAT
[packer.sources]
sqlar = thirdparty:SOURCE
[packer.forms]
plain = thirdparty:make_plain
[packer.stores]
shelf = thirdparty:Shelf
[packer.engines]
pool = thirdparty:ENGINE
[packer.commands]
tidy = thirdparty:tidy
"""
USED = """
from readers.caching.form import as_form

run("tidy", "--twice")
assert packer.convert("images", "heap", "by-alias", run=packer.Run(workers=1)).format == "msgpack"
for wrong in ({"shade": 1}, {"path_column": "x"}):
    try:
        packer.open_source("images", **wrong)
    except readers.SourceError as error:
        print(error)
Path("memory").mkdir()
address = "shelf:/" + str(Path("set").absolute())
with readers.open("set") as near, readers.open(address) as far:
    assert [bytes(far.read(i)) for i in range(8)] == [bytes(near.read(i)) for i in range(8)]
    with readers.cached(far, 1.0, "plain:again", directory="memory", job="a") as kept:
        assert bytes(kept.read(1)) == bytes(near.read(1))
for wrong in ("plain:no", "gold"):
    try:
        as_form(wrong)
    except ValueError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with a distribution: the new files of the diffs, and the module above."""
    files = {
        "thirdparty.py": MODULE,
        "thirdparty-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: thirdparty\nVersion: 1.0\n",
        "thirdparty-1.0.dist-info/entry_points.txt": POINTS,
    }
    for name, diff in (("msgpack_format.py", "format"), ("sqlar_source.py", "source")):
        text = next(path for path in DIFFS if path.stem == diff).read_text(encoding="utf-8")
        body = text.split("new file mode")[1].partition("\ndiff ")[0]
        files[name] = "\n".join(line[1:] for line in body.splitlines() if line[:1] == "+" and line[:3] != "+++")
    site = tmp_path_factory.mktemp("site")
    return tree_of(site, {name: text.encode() for name, text in files.items()})


def python(site: Path, *arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return run_python(*arguments, cwd=cwd, env={"PYTHONPATH": f"{site}:{ROOT}", "PATH": "/usr/bin:/bin"})


def test_a_distribution_adds_the_same_and_its_absence_is_named(folder: Path, installed: Path, tmp_path: Path) -> None:
    """Formats, sources, engines, forms, stores and commands. Without the distribution, its sets can still be read."""
    done = python(installed, "-c", COMMANDS + USED, "pool", cwd=folder)
    assert done.returncode == 0, done.stderr
    check_extracted(folder)
    assert "tidy\ntidy\n" in done.stdout
    assert "shade can be given for a SQLite archive only, and this is a folder of images" in done.stdout
    assert "path_column can be given for a list of addresses of images or a manifest only" in done.stdout
    assert "plain takes again" in done.stdout and "decoded:SIDE, plain or coefficients, not 'gold'" in done.stdout

    nowhere = tmp_path / "nothing"
    script = "import readers; print(len(readers.open('set', verify=True).read_many([0, 1])))"
    assert python(nowhere, "-c", script, cwd=folder).stdout == "2\n"
    done = python(nowhere, "-m", "packer", "verify", "set", cwd=folder)
    assert "no format 'msgpack'" in done.stdout + done.stderr and "Traceback" not in done.stderr
    done = python(nowhere, "-m", "packer", "inspect", f"shelf:/{folder}/set")
    assert done.returncode == 2 and "is not an address of the kinds s3://" in done.stderr, done.stderr


def test_additions_are_in_the_help(installed: Path) -> None:
    assert re.search("Of other packages:\n +tidy +Put things away", python(installed, "-m", "packer", "--help").stdout)
    shown = python(installed, "-m", "packer", "convert", "--help").stdout
    assert "hdf5|tfrecord|tar|msgpack" in shown.replace("\n", "")


def test_a_broken_entry_point_is_one_warning(tmp_path: Path) -> None:
    """The warning names the distribution, the entry point and the error; everything else works. A built-in name is not
    replaced."""
    files = {"thirdparty.py": "raise RuntimeError('not today')"}
    files["thirdparty-1.0.dist-info/METADATA"] = "Metadata-Version: 2.1\nName: thirdparty\nVersion: 1.0\n"
    files["thirdparty-1.0.dist-info/entry_points.txt"] = POINTS + "convert = thirdparty:tidy\n"
    site = tree_of(tmp_path / "site", {name: text.encode() for name, text in files.items()})
    tree_of(tmp_path / "in", {"a.jpg": make_jpeg(1)})
    done = python(site, "-m", "packer", "convert", tmp_path / "in", "--to", "tar", "-o", tmp_path / "out")
    assert done.returncode == 0 and "1 sample" in done.stdout, done.stderr
    (tmp_path / "x.bin").write_bytes(b"nothing known")
    done = python(site, "-m", "packer", "convert", tmp_path / "x.bin", "--to", "tar")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.count("thirdparty: the entry point sqlar = ") == 1 and "not today" in done.stderr
    done = python(site, "-m", "packer", "--help")
    assert done.returncode == 0 and "Pack a source" in done.stdout and "Of other packages" not in done.stdout
    assert done.stderr.count("thirdparty: the entry point tidy = ") == 1
    assert "the entry point convert = 'thirdparty:tidy' of packer.commands is left out" in done.stderr
    assert "the name is taken by packer" in done.stderr
