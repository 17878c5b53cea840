"""Tables and sentences for a terminal: no line is wider than it, and only optional columns are dropped."""

from __future__ import annotations

import gzip
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import packer
import readers
from cache.errors import PackerError
from cache.messages import quoted, table, wrapped

WORD = st.text("abcdefgh", min_size=1, max_size=9)
PATH = st.text("abcd/", min_size=1, max_size=40)
NAMES = ["place", "p50", "p90", "MB/s"]
ROWS = [["/scratch/project/images", "0.52", "1.10", "140"], ["/tmp", "0.03", "0.04", "1,200"]]


@given(
    st.lists(st.tuples(st.text("abcd/", min_size=1, max_size=40), WORD, WORD, WORD), min_size=1), st.integers(60, 120)
)
def test_a_table_is_at_most_as_wide_as_the_terminal(rows: list[tuple[str, ...]], width: int) -> None:
    lines = table(NAMES, rows, width, bars=[1.0] * len(rows))
    assert len(lines) == len(rows) + 1 and max(map(len, lines)) <= width
    for line, (_, *cells) in zip(lines[1:], rows, strict=True):
        assert line.split()[-4:-1] == cells and line.endswith("█" * 8)


@pytest.mark.parametrize(
    ("width", "headings", "name"),
    [
        (80, NAMES, "/scratch/project/images"),
        (38, ["place", "p50", "MB/s"], "/scratch/project/images"),
        (31, ["place", "p50"], "/scratch/project/images"),
        (20, ["place"], "/scratch/p…ct/images"),
    ],
)
def test_optional_columns_make_room(width: int, headings: list[str], name: str) -> None:
    lines = table(NAMES, ROWS, width, optional=("p90", "MB/s", "p50"))
    assert lines[0].split() == headings and lines[1].split()[0] == name and max(map(len, lines)) <= width


def test_a_text_begins_after_the_cells_of_its_row() -> None:
    rows = [["read", "1.0", "2.0", "what it is " * 5], ["copy", "", "", "it failed"], ["", "", "", "a remark"]]
    lines = table(["stage", "added", "if free", ""], rows, 60)
    assert lines[0] == "stage  added  if free" and lines[-2].split() == ["copy", "it", "failed"]
    assert lines[1].startswith("read     1.0      2.0  what it is") and lines[2].startswith(" " * 23 + "it is")
    assert lines[-1].strip() == "a remark" and " ".join(lines).split().count("what") == 5


def test_paths_are_never_split() -> None:
    path = "/a-rather/long-path/of-a/data-set/that-is/copied"
    assert wrapped(f"the set is at {path}, and read from there", 30)[1] == f"  {path},"


# --- commands that messages suggest -----------------------------------------------------------------------------------


def test_a_command_with_a_hostile_name_is_one_word_of_the_shell(tmp_path: Path) -> None:
    name = tmp_path / "a b;$(touch x)'\n\x1b[2J"
    printed = subprocess.run(
        ["bash", "-c", f"printf %s {quoted(name)}"], stdout=subprocess.PIPE, check=True, cwd=tmp_path
    )
    assert printed.stdout == os.fsencode(name) and not list(tmp_path.iterdir())


@pytest.fixture
def hostile_place(tmp_path: Path, tree: Path) -> Path:
    """A folder with two sets, one of them damaged, a table and a compressed shard; its name is a shell command."""
    place = tmp_path / "a b;$(touch x)"
    for to, name in (("tar", "tar"), ("hdf5", "set")):
        packer.convert(tree, to=to, output=place / name, run=packer.Run(workers=1))
    (place / "tar/classes.txt").write_text("cat\n")
    shard = next((place / "set").glob("train*.h5"))
    shard.write_bytes(shard.read_bytes().replace(b"\xff\xd9", b"\xff\xd8"))
    (place / "table.csv").write_text("a,b\n1,2\n")
    (place / "shard.tar").write_bytes(gzip.compress(b"\0" * 1024))
    return place


def _read(place: Path) -> None:
    with readers.open(place / "set", "train", verify=True) as reader:
        reader.read(0)


SUGGESTING: dict[str, Callable[[Path], object]] = {
    "contents of a folder": lambda place: packer.convert(place, to="tar"),
    "index of another library": lambda place: packer.export_index(place / "set", "dali"),
    "damaged sample": _read,
    "changed document": lambda place: print(*(problem.what for problem in packer.verify(place / "tar").problems)),
    "compressed shard": lambda place: packer.index(place / "shard.tar"),
    "sets of two formats": lambda place: packer.merge([place / "tar", place / "set"], output=place / "out"),
}


@pytest.mark.parametrize("name", SUGGESTING)
def test_a_suggested_command_names_exactly_the_file(
    hostile_place: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        SUGGESTING[name](hostile_place)
        text = capsys.readouterr().out
    except PackerError as error:
        text = str(error)
    commands = re.findall(r"packer [a-z-]+ '.*?'(?=  | --|$)", text, re.MULTILINE)
    assert commands and all(os.path.exists(shlex.split(command)[2]) for command in commands), text
