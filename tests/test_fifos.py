"""A FIFO in place of a file of a set: every command fails at once, and none waits for a writer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Hanging

import packer
import readers
from cache.errors import PackerError
from readers.staging import set_files


@pytest.fixture(scope="module")
def whole(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set with files that were left out; read only."""
    root = tmp_path_factory.mktemp("fifos")
    shutil.copytree(tree / "val", root / "source/val")
    (root / "source/val/cat/broken.jpg").write_bytes(b"\xff\xd8\xff")
    packer.convert(root / "source", to="tar", output=root / "set", run=packer.Run(workers=1, on_error="skip"))
    return root / "set"


def read_all(root: Path) -> None:
    with readers.open(root) as reader:
        reader.table.columns.check()
        for i in range(len(reader)):
            reader.read(i)


def checked(root: Path, against: Path | None = None) -> None:
    result = packer.verify(root, against=against, workers=1)
    if not result.ok:
        raise readers.DatasetError(result.problems[0].what)


COMMANDS: dict[str, Callable[[Path, Path], object]] = {
    "read": lambda root, out: read_all(root),
    "inspect": lambda root, out: packer.inspect(root),
    "verify": lambda root, out: checked(root),
    "extract": lambda root, out: packer.extract(root, out),
    "convert": lambda root, out: packer.convert(root, to="hdf5", output=out, run=packer.Run(workers=1)),
    "overwrite": lambda root, out: packer.convert(root.parent / "source", to="hdf5", output=root, overwrite=True),
    "export-index": lambda root, out: packer.export_index(root, "dali", output=out),
    "stage": lambda root, out: set_files(root),
}
READ = {  # what reads which file; the others do without
    "dataset.json": set(COMMANDS),
    "val.index/label.npy": {"read", "verify", "extract", "convert", "inspect"},
    "val.index/key.npy": {"read", "verify", "extract", "convert"},
    "val-000000.tar": {"read", "verify", "extract", "convert", "export-index"},
    "left-out.jsonl": {"against"},
}


@pytest.mark.parametrize("name", READ)
def test_a_fifo_in_a_set_is_an_error_at_once(whole: Path, tmp_path: Path, hanging: Hanging, name: str) -> None:
    root = tmp_path / "set"
    shutil.copytree(whole, root)
    shutil.copytree(whole.parent / "source", tmp_path / "source")
    (root / name).unlink()
    os.mkfifo(root / name)
    commands = COMMANDS | {"against": lambda root, out: checked(root, tmp_path / "source")}
    for command, call in commands.items():
        if command in READ[name]:
            with pytest.raises(PackerError, match=name.rpartition("/")[2]):
                hanging(lambda: call(root, tmp_path / command))  # noqa: B023
        elif command not in ("overwrite", "against"):
            hanging(lambda: call(root, tmp_path / command))  # noqa: B023
