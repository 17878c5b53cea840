"""The wheel and the source archive: their metadata, their files, and that they work where nothing else is installed.

Run by `make test-wheels`, with every Python from 3.10 to 3.14 that is on the PATH or below ~/.pyenv.
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

pytestmark = pytest.mark.wheels
ROOT = Path(__file__).parent.parent
VERSIONS = [f"3.{minor}" for minor in range(10, 15)]
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
    """A Python of this version that starts; a shim of pyenv may not."""
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    for python in (*map(str, reversed(installed)), shutil.which(f"python{version}")):
        if python and subprocess.run([python, "-c", "import venv"], capture_output=True).returncode == 0:
            return python
    return None


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source archive, made from a copy of the checkout."""
    made = tmp_path_factory.mktemp("dist")
    copy = tmp_path_factory.mktemp("checkout") / "packer"
    names = ("packer", "readers", "cache", "pyproject.toml", "README.md", "LICENSE")
    for name in names:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            copy.mkdir(exist_ok=True)
            shutil.copy(source, copy / name)
    run(sys.executable, "-m", "build", "--outdir", made, copy, cwd=made)
    return made


def test_the_metadata_is_what_an_index_accepts(built: Path) -> None:
    shown = run(sys.executable, "-m", "twine", "check", "--strict", *sorted(built.iterdir()), cwd=built)
    assert shown.count("PASSED") == 2


def test_every_module_is_in_both_and_nothing_else(built: Path) -> None:
    ours = {
        str(path.relative_to(ROOT))
        for top in ("packer", "readers", "cache")
        for path in (ROOT / top).rglob("*")
        if path.suffix in (".py", ".typed")
    }
    (wheel,), (archive,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as file:
        assert {name for name in file.namelist() if ".dist-info/" not in name} == ours
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert ours <= names and {"README.md", "LICENSE", "pyproject.toml"} <= names


@pytest.mark.parametrize("version", VERSIONS)
def test_it_works_in_a_bare_environment(version: str, built: Path, tmp_path: Path) -> None:
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
