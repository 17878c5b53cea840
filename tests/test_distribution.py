"""Installation: one free package name, commands that also work from a checkout, and no shadowed import."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
from pathlib import Path

import pytest
from suites.programs import run_python

import packer
from cache import errors
from cache.errors import (
    DISTRIBUTION,
    ChangedError,
    DeniedError,
    MissingExtraError,
    NoRoomError,
    PackerError,
    RemoteError,
    StaleIndexError,
    UnknownNameError,
    install_command,
)

ROOT = Path(packer.__file__).resolve().parent.parent
TEXTS = [
    path
    for pattern in (
        "*.md",
        "*.toml",
        "packer/**/*.py",
        "readers/**/*.py",
        "cache/**/*.py",
        "examples/**/*",
        "docs/*.md",
    )
    for path in sorted(ROOT.glob(pattern))
    if path.is_file() and path.suffix in (".md", ".toml", ".py", ".sbatch", ".sh")
]


def test_the_name_of_the_distribution_is_stated_once() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(rf'^name = "{DISTRIBUTION}"$', text, re.MULTILINE), "pyproject.toml has another name"


def test_no_text_installs_a_package_of_another_project() -> None:
    """`pip install packer`, `readers` or `cache` would download and run the code of strangers."""
    wrong = re.compile(r"pip install[^\n`]*['\" ](packer|readers|cache)(\[|['\"\s`]|$)")
    commands = [f"{path}: {match[0]}" for path in TEXTS for match in wrong.finditer(path.read_text(encoding="utf-8"))]
    assert not commands, f"installs another project's package: {commands}"


def test_extras_in_texts_exist() -> None:
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]")[2]
    extras = set(re.findall(r"^([\w-]+) = \[", declared.partition("\n[project.scripts]")[0], re.MULTILINE))
    for path in TEXTS:
        for names in re.findall(rf"{DISTRIBUTION}\[([a-z0-9,-]+)\]", path.read_text(encoding="utf-8")):
            assert set(names.split(",")) <= extras, f"{path} names the extras {names}; there are {sorted(extras)}"


def test_a_missing_extra_names_the_command() -> None:
    message = str(MissingExtraError("obstore", "remote", "s3://"))
    assert message == f"s3:// needs obstore: run  {install_command('remote')}"


def test_errors_pass_between_processes() -> None:
    """Pools and forked readers pickle errors."""
    missing = MissingExtraError("obstore", "remote", "s3://")
    for error in (missing, NoRoomError("full"), DeniedError("who?"), UnknownNameError("split 'x'")):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == str(error)


def test_a_changed_object_is_a_stale_index_and_a_remote_error() -> None:
    assert issubclass(ChangedError, StaleIndexError) and issubclass(ChangedError, RemoteError)
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) > 30 and all(issubclass(kind, PackerError) for kind in kinds)


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return run_python(*command, cwd=folder, env=environment)


def test_the_command_of_an_uninstalled_checkout_needs_no_package_index(tmp_path: Path) -> None:
    script = "from cache.errors import install_command; print(install_command('remote'))"
    done = run(tmp_path, "-S", "-c", script)  # -S: no site-packages, so no package is installed
    assert done.stdout.strip() == f"pip install -e '{ROOT}[remote]'", done.stderr


@pytest.mark.parametrize(
    ("shadow", "command", "name"),
    [
        ("cache.py", ("-c", "import readers"), "cache"),
        ("cache/__init__.py", ("-c", "import packer"), "cache"),
        ("readers.py", ("-m", "packer", "--version"), "readers"),
        ("readers/__init__.py", ("-c", "import packer"), "readers"),
    ],
)
def test_a_shadowed_import_names_the_shadowing_file(
    tmp_path: Path, shadow: str, command: tuple[str, ...], name: str
) -> None:
    path = tmp_path / shadow
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    done = run(tmp_path, *command)
    assert done.returncode == 1, f"{shadow} was not noticed: {done.stdout}"
    last = done.stderr.strip().splitlines()[-1]
    assert f"needs its own package `{name}`, but {path} hides it; rename that file or folder" in last, done.stderr
