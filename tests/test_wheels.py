"""The wheel and the source archive: their metadata, their files, and that they work without other packages.

`make test-wheels` runs the tests with the mark `wheels`, with every Python from 3.11 to 3.14 on the PATH or below
~/.pyenv: they need the package index.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
VERSIONS = [f"3.{minor}" for minor in range(11, 15)]
USE = """
import io, sys
from pathlib import Path
import numpy as np
from PIL import Image
import packer, readers
for name in ("cat", "dog"):
    Path("images", name).mkdir(parents=True)
    for number in range(4):
        pixels = np.random.default_rng(number).integers(0, 256, (48, 64, 3), np.uint8)
        Image.fromarray(pixels).save(f"images/{name}/{number}.jpg")
for to in ("hdf5", "tfrecord", "tar"):
    out = packer.convert("images", to).output
    assert packer.verify(out, deep=True, against="images").ok
    with readers.open(out) as reader:
        assert [sample.label for sample in reader] == [0] * 4 + [1] * 4
        assert bytes(reader.read(7)) == Path("images/dog/3.jpg").read_bytes()
"""


def run(*command: object, cwd: Path) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_CONSTRAINT"))}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=clean, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def interpreter(version: str) -> str | None:
    """A Python of this version that starts; a pyenv shim may not."""
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    for python in (*map(str, reversed(installed)), shutil.which(f"python{version}")):
        if python and subprocess.run([python, "-c", "import venv"], capture_output=True).returncode == 0:
            return python
    return None


def tracked() -> list[str]:
    """The files of the project by git; in a source archive all existing files."""
    if (ROOT / ".git").exists():
        listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
        return [name for name in listed if name and (ROOT / name).is_file()]
    return [
        str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file() and "__pycache__" not in str(path)
    ]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project to build in."""
    copy = tmp_path_factory.mktemp("checkout") / "packer"
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def made(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as `built`, by the installed setuptools: in a second, without the network."""
    setuptools = pytest.importorskip("setuptools", "77", reason="it builds the wheel")
    assert setuptools.__version__
    folder = tmp_path_factory.mktemp("made")
    code = f"from setuptools import build_meta as b; b.build_wheel({str(folder)!r}); b.build_sdist({str(folder)!r})"
    run(sys.executable, "-c", code, cwd=checkout)
    return folder


def test_both_archives_have_all_files_and_no_others(made: Path) -> None:
    names = {name for name in tracked() if not name.startswith(".")}
    (wheel,), (archive,) = made.glob("*.whl"), made.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as file:
        packages = {name for name in names if name.startswith(("packer/", "readers/", "cache/"))}
        packages -= {name for name in packages if name.startswith("readers/coefficients/_codec/")}
        made_here = {"readers/coefficients/native.abi3.so"} if any(map(shutil.which, ("clang", "gcc", "cc"))) else set()
        assert {name for name in file.namelist() if ".dist-info/" not in name} == packages | made_here
    with tarfile.open(archive) as file:
        inside = {name.partition("/")[2] for name in file.getnames()} - {""}
    extra = ("PKG-INFO", "setup.cfg", "packer_vision.egg-info")
    assert names - inside == set(), "not in the source archive: MANIFEST.in"
    files = {name for name in inside - names if not any(other.startswith(f"{name}/") for other in inside)}
    assert {name for name in files if not name.startswith(extra)} == set()


def test_the_wheel_works_without_the_checkout(made: Path, tmp_path: Path) -> None:
    """Its files in a separate folder, and the packages that it needs."""
    (wheel,) = made.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "site")
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path / 'site')!r}]\n{USE}assert packer.__file__.startswith(sys.path[0])"
    )
    run(sys.executable, "-c", code, cwd=tmp_path)


@pytest.fixture(scope="module")
def built(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source archive, as `python -m build` makes them in an isolated environment."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, checkout, cwd=folder)
    return folder


@pytest.mark.wheels
def test_an_index_accepts_the_metadata(built: Path) -> None:
    shown = run(sys.executable, "-m", "twine", "check", "--strict", *sorted(built.iterdir()), cwd=built)
    assert shown.count("PASSED") == 2


@pytest.mark.wheels
@pytest.mark.parametrize("version", VERSIONS)
def test_the_wheel_works_in_a_bare_environment(version: str, built: Path, tmp_path: Path) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    run(python, "-m", "venv", tmp_path / "env", cwd=tmp_path)
    bare = tmp_path / "env/bin"
    (wheel,) = built.glob("*.whl")
    run(bare / "pip", "install", "-q", "--only-binary", ":all:", wheel, cwd=tmp_path)
    run(bare / "python", "-W", "error", "-c", USE, cwd=tmp_path)
    assert "8 samples" in run(bare / "packer", "verify", "images-hdf5", cwd=tmp_path)
    assert f"Python {version}" in run(bare / "packer", "doctor", cwd=tmp_path)
