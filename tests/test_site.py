"""The pages of docs: links are valid, in the repository and on the site; the chart shows the measured values.

`make site` builds the site itself, with warnings as errors.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs/site"))
PAGES = [*(path for path in ROOT.glob("*.md")), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/seeds/*.md")]
PAGES += [*ROOT.glob("examples/**/*.md"), *ROOT.glob("benchmarks/*.md")]
CODE = re.compile(r"^ *(`{3,}).*?^ *\1 *$|<!--.*?-->", re.MULTILINE | re.DOTALL)


def prose(path: Path) -> str:
    return CODE.sub("", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    """The anchors of the headings of a page, as code forges and MyST make them."""
    names: list[str] = []
    for heading in re.findall(r"^#+ +(.*?) *$", prose(path), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        names.append(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return {*names}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings(path: Path) -> None:
    text = re.sub(r"`[^`]+`(?!\])", "", prose(path))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        if "://" in file or file.startswith(("mailto:", "reference/")):  # docs/reference is generated from the code
            continue
        place = path.parent / file if file else path
        assert place.exists(), f"{path.name}: {target}: there is no such file"
        if anchor and place.suffix == ".md":
            assert anchor in anchors(place), f"{path.name}: {target}: no heading of that name"


def test_every_page_is_in_the_navigation() -> None:
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    trees = re.findall(r"^```\{toctree\}(.*?)^```", index, re.MULTILINE | re.DOTALL)
    entries = [line for tree in trees for line in re.findall(r"^[\w/-]+$", tree, re.MULTILINE)]
    listed = {*entries}
    assert len(listed) == len(entries), "a page is in the toctrees of docs/index.md twice"
    pages = {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in ROOT.glob("docs/**/*.md")}
    missing = {page for page in pages if not page.startswith(("reference/", "seeds/"))} - listed - {"index"}
    assert not missing, f"add to the toctrees of docs/index.md: {sorted(missing)}"


def test_the_figure_shows_the_table() -> None:
    from chart import FIGURE, drawn, rows_of

    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    rows = rows_of(page)
    assert len(rows) >= 6 and {name for name, _, is_ours in rows if is_ours} >= {"ImageLoader"}
    assert FIGURE.read_text(encoding="utf-8") == drawn(page), "run  python docs/site/chart.py"


def test_links_of_a_page_are_rewritten_for_the_site(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="sphinx is not installed: make site")
    from links import rewritten

    (tmp_path / "docs").mkdir()
    (tmp_path / "examples").mkdir()
    (tmp_path / "cache").mkdir()
    (tmp_path / "examples/README.md").touch()
    text = "[a](../README.md#x) [b](../examples) [s](seeds/x.md) [`c`](../cache/) [d](https://x.y/z) `[g](../cache)`\n"
    page = rewritten(text, tmp_path / "docs", tmp_path, tmp_path / "docs")
    expected = "[a](index.md#x) [b](howto.md#training-scripts) s `c` [d](https://x.y/z) `[g](../cache)`\n"
    assert page == expected
