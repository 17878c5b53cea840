"""The README's code runs, on a small tree in imagenette2's place."""

from __future__ import annotations

import importlib.util
import re
import shutil
import warnings
from pathlib import Path

import pytest
from suites.programs import run_packer, run_python

import packer

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"^```python *(\w*)\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def place(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("readme")
    shutil.copytree(tree, root / "imagenette2")
    for number in range(12, 110):  # sample 900 is asked for
        for name in ("cat", "dog", "owl"):
            for copy in range(4):
                target = root / f"imagenette2/train/{name}/{name}_{number:03d}{copy}.JPEG"
                shutil.copy(root / f"imagenette2/train/{name}/{name}_000.JPEG", target)
    for to in ("hdf5", "tfrecord", "tar"):
        count = -(-len(list((root / "imagenette2/train").rglob("*.JPEG"))) // 8)
        packer.convert(
            root / "imagenette2", to=to, output=root / f"imagenette2-{to}", workers=1, samples_per_shard=count
        )
    return root


def test_there_is_code_to_run() -> None:
    assert len(BLOCKS) == 9


@pytest.mark.parametrize(("needs", "code"), BLOCKS, ids=lambda value: value[:24].split("\n")[0])
def test_python_blocks(place: Path, needs: str, code: str) -> None:
    if needs and importlib.util.find_spec(needs) is None:
        compile(code, "README", "exec")
        pytest.skip(f"{needs} is not installed; the block was only compiled")
    with warnings.catch_warnings():
        done = run_python("-c", code, cwd=place)
    assert done.returncode == 0, done.stderr


def test_commands_named_in_the_readme_exist() -> None:
    text = README.read_text(encoding="utf-8")
    commands = (
        "convert",
        "index",
        "inspect",
        "verify",
        "extract",
        "order",
        "cache",
        "stage",
        "parity",
        "diagnose",
        "export-index",
    )
    assert set(re.findall(rf"packer ({'|'.join(commands)})\b", text)) == set(commands)
    helped = {
        name: run_packer(name, "--help").stdout for name in ("convert", "index", "stage", "diagnose", "export-index")
    }
    for option in set(re.findall(r"(--(?!deep|against|json|help)[a-z][a-z-]+)", text)):
        assert any(option in shown for shown in helped.values()), f"the README names {option}"
