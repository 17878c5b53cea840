"""The pages on other libraries and on tasks: their figures are those that were measured, and no task is only prose."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from suites.snippets import RUN, blocks_of

DOCS = Path(__file__).resolve().parent.parent / "docs"
ELSEWHERE = {12, 34, 35, 40, 41}  # tested by test_doctor, test_remote_*, test_advise, test_format_page, coming-from.md
PEERS = ("LitData", "SPDL", "DALI", "FFCV", "Streaming", "WebDataset", "Energon", "Grain", "HF datasets", "torchdata")
PEERS += ("webshart",)


def test_figures_in_the_comparison_are_those_of_performance() -> None:
    measured = (DOCS / "performance.md").read_text(encoding="utf-8")
    text = (DOCS / "comparison.md").read_text(encoding="utf-8")
    figures = set(re.findall(r"\b\d{1,2},\d{3}\b|\b\d\.\d\d?\b(?= (?:of|and not))", text))
    assert len(figures) > 5 and not {figure for figure in figures if figure not in measured}


@pytest.mark.parametrize("name", PEERS)
def test_the_comparison_has_a_column_and_a_word_for_each(name: str) -> None:
    text = (DOCS / "comparison.md").read_text(encoding="utf-8")
    header, *rows = [line for line in text.splitlines() if line.count("|") > 10]
    assert name in [cell.strip() for cell in header.split("|")]
    assert len({row.count("|") for row in [header, *rows]}) == 1, "a row with more or fewer cells"
    better = text.partition("## What others do better")[2].partition("\n## ")[0]
    assert name.removeprefix("HF ") in better


def test_every_task_has_lines_that_run() -> None:
    path = DOCS / "tasks.md"
    numbers = {line: int(found[1]) for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
               if (found := re.match(r"\*\*(\d+)\. ", text))}  # fmt: skip
    assert list(numbers.values()) == list(range(1, len(numbers) + 1)) and len(numbers) >= 30
    ran = {numbers[max(line for line in numbers if line < block.line)]
           for block in blocks_of(path) if block.language in RUN and "parse" not in block.words}  # fmt: skip
    assert set(numbers.values()) - ran == ELSEWHERE
