"""docs/format.md is correct: columns are written and read as in its table, and its programs read samples."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import tree_of

import packer
import readers
from readers.table import Index

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
SAMPLE = 7
COLUMNS = {
    name: (dtype, length)
    for name, dtype, length in re.findall(r"^\| `([\w.]+\.npy)` \| (\w+) \| (n|n \+ 1|bytes) \|", PAGE, re.MULTILINE)
}


def columns_of(fields: dict[str, bool]) -> dict[str, tuple[str, str]]:
    """The columns that the page lists for these fields; a field is true if it has separate shards."""
    columns = {}
    for name, column in COLUMNS.items():
        for field, is_separate in fields.items():
            if name != "FIELD.shard.npy" or is_separate:
                columns[name.replace("FIELD", field)] = column
    return columns


def test_columns_are_written_and_read_as_in_the_table(source: Path, tmp_path: Path) -> None:
    with readers.open(source, "train") as reader:
        notes = {f"masks/train/{key}.txt": str(key).encode() for key in reader.keys}
    shutil.copytree(source, tmp_path / "set")
    packer.add_field(tmp_path / "set", tree_of(tmp_path, notes) / "masks", name="note")
    index = next(path for path in (tmp_path / "set").glob("train.index*") if (path / "note.shard.npy").exists())
    samples, columns = 36, {}
    for path in index.iterdir():
        column = np.load(path)
        assert column.ndim == 1
        length = {samples: "n", samples + 1: "n + 1"}.get(len(column), "bytes")
        columns[path.name] = (str(column.dtype), length)
    expected = columns_of({"image": False, "note": True})
    assert columns == expected
    for name, (dtype, length) in expected.items():
        np.save(tmp_path / name, np.zeros({"n": 3, "n + 1": 4, "bytes": 0}[length], dtype))
    Index(tmp_path, 3, ["image", "note"], ["note"]).check()


def test_the_program_of_the_page_reads_a_sample(
    tree: Path, pack: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = next(block for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S) if "def look_up" in block)
    place = pack(tree, "hdf5", samples_per_shard=4)
    (tmp_path / "imagenette2-hdf5").symlink_to(place)
    monkeypatch.chdir(tmp_path)
    read: dict[str, object] = {}
    exec(compile(code, "format.md", "exec"), read)
    with readers.open(place, "train") as reader:
        assert read["jpeg"] == bytes(reader.read(SAMPLE))


@pytest.fixture(scope="module")
def read_sample(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, int], bytes | str]:
    """Runs examples/read_sample.c, compiled, in a set: returns the bytes of a row, or the error message."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler called cc")
    program = tmp_path_factory.mktemp("c") / "read_sample"
    strict = ["-std=c11", "-D_XOPEN_SOURCE=700", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([compiler, *strict, "-o", program, ROOT / "examples" / "read_sample.c"], check=True, timeout=300)

    def read(place: Path, row: int) -> bytes | str:
        shards = sorted(path.name for path in place.glob("train-*"))
        command = [program, "train.index", str(row), *shards]
        done = subprocess.run(command, cwd=place, capture_output=True, check=False, timeout=300)
        assert (done.returncode, done.stdout) == (1, b"") or done.returncode == 0
        return done.stderr.decode() if done.returncode else done.stdout

    return read


@pytest.mark.parametrize("to", ["hdf5", "tfrecord", "tar"])
def test_the_c_program_reads_samples(
    to: str, tree: Path, pack: Callable[..., Path], read_sample: Callable[[Path, int], bytes | str]
) -> None:
    place = pack(tree, to, samples_per_shard=4)
    with readers.open(place, "train") as reader:
        for row in (*range(5), len(reader) - 1):
            assert read_sample(place, row) == bytes(reader.read(row))


def test_the_c_program_refuses_damaged_bytes_and_missing_rows(
    source: Path, tmp_path: Path, read_sample: Callable[[Path, int], bytes | str]
) -> None:
    shutil.copytree(source, tmp_path / "set")
    shard = tmp_path / "set" / "train-000001.tar"
    damaged = bytearray(shard.read_bytes())
    with readers.open(source, "train") as reader:
        place = reader.byte_range(SAMPLE)
    assert place is not None
    damaged[place[1] + 100] ^= 1
    shard.write_bytes(damaged)
    assert "damaged" in str(read_sample(tmp_path / "set", SAMPLE))
    assert "no such row" in str(read_sample(tmp_path / "set", 36))
