"""Tables and sentences for a terminal: nothing is wider than it, and nothing is lost but optional columns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.messages import table, wrapped

WORD = st.text("abcdefgh", min_size=1, max_size=9)
PATH = st.text("abcd/", min_size=1, max_size=40)
NAMES = ["place", "p50", "p90", "MB/s"]
ROWS = [["/scratch/project/images", "0.52", "1.10", "140"], ["/tmp", "0.03", "0.04", "1,200"]]


@given(
    st.lists(st.tuples(st.text("abcd/", min_size=1, max_size=40), WORD, WORD, WORD), min_size=1), st.integers(60, 120)
)
def test_a_table_is_as_wide_as_the_terminal_at_most(rows: list[tuple[str, ...]], width: int) -> None:
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
