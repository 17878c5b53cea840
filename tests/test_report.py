"""Reports: one self-contained file, in which no text from outside is markup."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from math import inf, nan
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image
from suites.browser import Browser, find_chromium
from suites.programs import run_packer, run_python

import readers
from packer.tools.diagnose.ladder import Advice, Diagnosis, Rung, StageCost, StepTime, diagnosis_lines, verdict_lines
from packer.tools.monitor.record import Mark, Series, Usage
from packer.tools.report import Page, charts, svg_image, write_page
from packer.tools.report.pages import diagnosis_page

HOSTILE = "<script>alert(1)</script>\"'&\u202e\x1b[2J</style>"


class Elements(HTMLParser):
    """The elements of a page; fails if tags are not nested."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags, self.open, self.text = list[tuple[str, dict[str, Any]]](), list[str](), ""
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open += [] if tag in ("meta", "br") else [tag]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def time_of(ms: float) -> StepTime:
    return StepTime(ms / 1e3, 0.97 * ms / 1e3, 1.05 * ms / 1e3, 0.0, 100, 0.5)


def diagnosis(name: str = "Resize") -> Diagnosis:
    """A diagnosis with every section; `name` stands for every name from outside."""
    stages = ["step", "copy", "collate", "transform 2", "read", "storage"]
    times = [20.0, 20.2, 20.9, 39.0, 39.4, 41.0]
    rungs = tuple(Rung(s, name, time_of(ms), s != "read") for s, ms in zip(stages, times, strict=True))
    costs = tuple(StageCost(s, name, 0.001, 0.002, True, 0.02, 0.01, name) for s in stages)
    return Diagnosis(
        rungs, costs, "transform 2", f"transform 2 ({name}) limits training", 0.021, 8, 2, 4.2, 2, 1.5,
        notes=(name,),
        advice=(Advice("workers", name, name, name, 0.021, 0.02),),
        usage=Usage("node", 1.7e9, 1.0, (Series("cpu busy", "share", 1.0), Series(name[:200] or "x", "bytes/s")),
                    np.arange(1.0, 41.0), np.ones(40), np.stack([np.linspace(0, 1, 40), np.linspace(0, 9e6, 40)], 1),
                    tuple(Mark(stage, 6.0 * i) for i, stage in enumerate(stages))),
    )  # fmt: skip


@pytest.mark.parametrize("name", [HOSTILE, "x" * 10_000, "", "変換" * 40], ids=range(4))
def test_a_page_is_self_contained_and_names_are_text(name: str) -> None:
    html = diagnosis_page(diagnosis(name), f"Diagnosis of {name}", f"packer diagnose {name}").render()
    page = Elements(html)
    assert not {tag for tag, _ in page.tags} & {"script", "img", "link", "iframe", "object", "a", "base", "form"}
    assert not [names for _, names in page.tags if any(key.startswith("on") for key in names)]
    assert not re.search(r"(?:src|href)\s*=\s*[\"'](?!#|data:image/png;base64,)|url\((?!#)|@import", html)
    assert "\u202e" not in html and "\x1b" not in html
    policy = next(names for _, names in page.tags if "http-equiv" in names)
    assert policy["content"].startswith("default-src 'none'")
    assert len(html) < 400_000
    identifiers = [names["id"] for _, names in page.tags if "id" in names]
    assert len(identifiers) == len({*identifiers}), "two elements share an id"
    used = set(re.findall(r"(?:href=\"|url\()#([\w.-]+)", html))
    assert used <= {*identifiers}
    if name == HOSTILE:
        assert "<script>alert(1)</script>" in page.text, "the name is not shown literally"


def test_the_same_values_give_the_same_page() -> None:
    """Also with matplotlib settings of the user, and with other hash seeds."""
    import matplotlib

    names = ("bbb", "a", "cc")
    pages = [diagnosis_page(diagnosis(), "a", "b").render()]
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "svg.fonttype": "path"}):
        pages += [diagnosis_page(diagnosis(), "a", "b").render()]
    first, again = (re.sub("<dd>[^<]*</dd>", "", page) for page in pages)
    assert first == again and "</html>" in first
    script = f"from packer.tools.report import charts; print(charts.bars({names!r}, {{'': [1.0, 2.0, 3.0]}}).wide)"
    drawn_elsewhere = run_python("-c", script, env={**os.environ, "PYTHONHASHSEED": "7"}, check=True).stdout
    assert drawn_elsewhere == charts.bars(names, {"": [1.0, 2.0, 3.0]}).wide + "\n"


def test_unknown_values_have_no_section() -> None:
    few = Diagnosis(tuple(Rung(s, "", time_of(9)) for s in ("step", "loading")), (), "", "fine", 0.02, None, 1, None, 2,
                    None)  # fmt: skip
    page = Elements(diagnosis_page(few, "a", "b").render())
    sections = [section for section in ("What to change", "The machine during the run") if section in page.text]
    assert not sections and "The ladder" in page.text and "images/s" not in page.text


@pytest.mark.parametrize("values", [[nan, inf, None], [0.0, 0.0, 0.0], [1e-12, 1e300, 5.0], [-1.0, 2.0, 3.0]])
def test_charts_draw_any_values(values: list[float | None]) -> None:
    cells = [None if value is None else value for value in values]
    drawn = [
        charts.bars(list("abc"), {"x": values}, low=values, high=values, unit="ms"),
        charts.bars(list("abc"), {"x": values, "y": values}),
        charts.heat_map(list("ab"), [0, 1, 2], [cells, cells], marks=[charts.Mark(1, "m")]),
    ]
    for chart in drawn:
        for svg in (chart.wide, chart.narrow):
            Elements(svg)
            assert "nan" not in svg and "inf" not in re.sub("inherit", "", svg) and 'role="img"' in svg


def test_a_chart_as_a_file_has_its_legend_and_its_colours() -> None:
    names = ["<b>training</b>", "loading " * 9, "x" * 50, "the rest"]
    bars = charts.bars(["a"], {name: [1.0] for name in names})
    root = ElementTree.fromstring(svg_image(bars))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "<b>training</b>" in texts and "the rest" in texts
    used = set(re.findall(r"var\((--[\w-]+)\)", svg_image(bars)))
    assert used and all(f"{name}: #" in svg_image(bars) for name in used)
    assert "100 %" in svg_image(charts.heat_map(["a"], [0, 1], [[0.0, 1.0]]))


@pytest.mark.parametrize(
    ("value", "shown"),
    [(41.49, "41.5 ms"), (1234.4, "1,234 ms"), (0.1234, "0.123 ms"), (0, "0 ms"), (-2.5, "−2.50 ms"), (None, "–"),
     (nan, "–"), (inf, "–"), (99.99, "100 ms"), (1e-9, "0.000000 ms")],
)  # fmt: skip
def test_numbers_have_three_digits(value: float | None, shown: str) -> None:
    assert charts.number(value, "ms") == shown


def drawn(chart: Any) -> list[str]:
    """The texts of a chart, in both widths."""
    return re.findall(r"<text[^>]*>([^<]*)<", chart.wide + chart.narrow)


def test_charts_show_their_values_and_names() -> None:
    two = {"added": [1.0, None], "if free": [0.5, nan]}
    chart = charts.bars(["read", "decode"], two, unit="ms", strong=[1], line=(0.7, "the step"))
    assert {"read", "decode", "1.00 ms", "0.50 ms", "–", "the step"} <= set(drawn(chart))
    assert {"added", "if free"} <= set(drawn(chart)) and "read: added 1.00 ms, if free 0.500 ms" in chart.alt
    chart = charts.heat_map(
        ["CPU 0"], [0.0, 1.0], [[0.5, None]], marks=[charts.Mark(1.0, "read"), charts.Mark(1.1, "decode")]
    )
    assert {"CPU 0", "read", "decode", "seconds"} <= set(drawn(chart)) and "CPU 0 50.0%" in chart.alt


@pytest.mark.parametrize(
    "draw",
    [
        lambda: charts.bars(["a"], {"x": [1, 2]}),
        lambda: charts.heat_map([], [], []),
        lambda: charts.heat_map(["a"], [0.0, 1.0], [[1]]),
    ],
)  # fmt: skip
def test_charts_refuse_values_that_do_not_match(draw: Any) -> None:
    with pytest.raises(ValueError, match="values"):
        draw()


def test_rows_have_a_cell_for_each_heading() -> None:
    with pytest.raises(ValueError, match="a row of 1 cells, expected 2"):
        Page("a").table(["x", "y"], [["1"]])


@pytest.mark.parametrize("width", [60, 140])
def test_the_terminal_is_never_too_narrow(width: int) -> None:
    lines = diagnosis_lines(diagnosis("a long name of a transform"), width)
    assert max(map(len, lines)) <= width
    assert [line.split()[0] for line in lines[1:7]] == ["step", "copy", "collate", "transform", "read*", "storage"]
    assert "images/s" in lines[0]
    assert verdict_lines(diagnosis(), 1000)[-1] == diagnosis().verdict


def test_the_command_writes_a_report(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("batches = [[1.0, 2.0]] * 4\n")
    report = tmp_path / "report.html"
    options = ("--simulate-step", "1ms", "--seconds", "0.3")
    done = run_packer("diagnose", f"{script}:batches", *options, "--html", report)
    assert done.returncode == 0 and f"the report is in {report}" in done.stdout, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == lines[-1] and max(map(len, lines)) <= max(100, len(str(report)) + 20), "verdict at both ends"
    page = Elements(report.read_text())
    assert "train.py:batches" in page.text and "packer diagnose" in page.text
    done = run_packer("diagnose", f"{script}:batches", *options, "--html", tmp_path / "no" / "report.html")
    assert done.returncode == 2 and "there is no directory" in done.stderr


# --- in a browser ----------------------------------------------------------------------------------------------------
SHOWN = """(() => { const texts = [], outside = [], overlaps = [];
    for (const svg of $$("figure svg")) {
        const box = svg.getBoundingClientRect();
        if (!box.width) continue;
        const scale = box.width / svg.viewBox.baseVal.width, boxes = [];
        for (const text of svg.querySelectorAll("text")) {
            const b = text.getBoundingClientRect(), words = text.textContent;
            texts.push(scale * parseFloat(getComputedStyle(text).fontSize));
            if (b.left < box.left - 2 || b.right > box.right + 4 || b.top < box.top - 2 || b.bottom > box.bottom + 4)
                outside.push(words);
            for (const [o, other] of boxes)
                if (b.left < o.right - 1 && o.left < b.right - 1 && b.top < o.bottom - 4 && o.top < b.bottom - 4)
                    overlaps.push(words + " / " + other);
            boxes.push([b, words]);
        }
    }
    return {scroll: document.documentElement.scrollWidth, smallest: Math.min(...texts), drawn: texts.length, outside,
            overlaps}; })()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(find_chromium(), tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.mark.parametrize(
    ("name", "dark"), [("RandomResizedCrop(224)", False), ("W" * 200, False), (HOSTILE, True)], ids=range(3)
)
def test_a_browser_shows_the_whole_report_at_any_width(browser: Browser, tmp_path: Path, name: str, dark: bool) -> None:
    """No content is outside the page or its chart, over other text, or smaller than 11 pixels: light, dark."""
    write_page(tmp_path / "report.html", diagnosis_page(diagnosis(name), "title", "packer diagnose"))
    page = browser.open((tmp_path / "report.html").as_uri(), dark=dark)
    page.wait("$('figure svg')")
    page.call("Emulation.setScrollbarsHidden", hidden=True)
    titles = page.js("$$('h2').map(title => title.textContent)")
    assert {"The ladder", "What to change", "The machine during the run"} <= set(titles)
    for width in (320, 400, 900, 1280):
        page.resize(width, 6000)
        shown = page.js(SHOWN)
        assert shown["drawn"] > 40 and shown["scroll"] <= width and shown["smallest"] >= 11, shown
        assert not shown["outside"] and (name == HOSTILE or not shown["overlaps"]), shown
        page.screenshot(tmp_path / "page.png")
        pixels = Image.open(tmp_path / "page.png").convert("L")
        surface = pixels.getpixel((2, 2))
        assert surface < 60 if dark else surface > 240
        edges = [pixels.crop((x, 0, x + 4, 6000)).getextrema() for x in (0, width - 4)]
        assert edges == [(surface, surface)] * 2, "content reaches the edges of the window"
        least, most = pixels.crop((0, 0, width, 600)).getextrema()
        assert most - least > 140, "no text"
    assert not page.complaints, "errors, or violations of the page's policy"
    page.close()


def test_a_report_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(readers.MissingExtraError, match=r"packer-vision\[report\]"):
        charts.bars(["a"], {"x": [1.0]})
