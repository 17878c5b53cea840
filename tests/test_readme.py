"""The README's code runs, on a small tree in imagenette2's place."""

from __future__ import annotations

import importlib.util
import re
import shutil
import warnings
from pathlib import Path

import pytest
from suites.programs import run_python

import packer
from packer.cli.group import cli

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
    commands = [cli.get_command(None, name) for name in cli.list_commands(None)]  # type: ignore[arg-type]
    named = set(re.findall(r"`packer ([a-z][a-z-]+)", text))
    assert named <= {command.name for command in commands if command}, "the README names a command that does not exist"
    options = {"--help", "--version"}
    while commands:
        command = commands.pop()
        commands += getattr(command, "commands", {}).values()
        options.update(*(param.opts for param in command.params)) if command else None
    missing = set(re.findall(r"(--[a-z][a-z-]+)", text)) - options
    assert not missing, f"the README names {missing}"
