"""Reports: one file that needs nothing else, in which nothing that comes from outside is markup."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from suites.programs import run_packer

import readers
from packer.report import Page, charts, write_page
from packer.report.diagnosis import diagnosis_page
from readers.diagnosis.batch_sizes import BatchSize, BatchSizes
from readers.diagnosis.findings import Advice, Applied, Change, Payload, PayloadFact, PayloadField
from readers.diagnosis.ladder import Diagnosis, Rung, StageCost
from readers.diagnosis.places import Place, Places
from readers.diagnosis.reads import PlaceReads, Reads
from readers.diagnosis.text import diagnosis_lines, verdict_lines
from readers.diagnosis.timing import StepTime

HOSTILE = "<script>alert(1)</script>\"'&\u202e\x1b[2J</style>"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Elements(HTMLParser):
    """What a page is made of; fails where tags are not nested."""

    VOID = ("meta", "br", "use", "path", "rect")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags, self.open, self.text = list[tuple[str, dict[str, Any]]](), list[str](), ""
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID or tag in ("use", "path", "rect"):
            self.open += [] if tag == "meta" else [tag]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def time_of(ms: float) -> StepTime:
    return StepTime(ms / 1e3, 0.97 * ms / 1e3, 1.05 * ms / 1e3, 0.0, 100, 0.5)


def diagnosis(name: str = "Resize") -> Diagnosis:
    """One with every section; `name` is wherever a name comes from outside."""
    stages = ["step", "copy", "collate", "transform 2", "read", "storage"]
    times = [20.0, 20.2, 20.9, 39.0, 39.4, 41.0]
    rungs = tuple(Rung(s, name, time_of(ms), s != "read") for s, ms in zip(stages, times, strict=True))
    costs = tuple(StageCost(s, name, 0.001, 0.002, True, 0.02, 0.01, name) for s in stages)
    change = Change("workers", 4, name)
    reads = PlaceReads(Reads(0.001, 0.002, 0.003, 1e8, 9), Reads(0.01, 0.02, 0.03, 1e8, 9))
    field = PayloadField(name, "float32", (8, None), 1_000_000, None, (PayloadFact("uint8", name, 750_000),))
    return Diagnosis(
        rungs, costs, "transform 2", f"transform 2 ({name}) starves the training", 0.021, 8, 2, 4.2, 2, 1.5,
        notes=(name,),
        payload=Payload(4, 1_000_000, 750_000, (field,), (name,)),
        advice=(Advice("workers", name, ("a",), name, name, 0.021, 0.02, change),),
        applied=(Applied(change, "workers", 0.041, 0.021, 0.022, True),
                 Applied(change, "workers", 0.041, None, None, False, name)),
        places=Places((Place(name, "shards", "ext4", 9, 9, reads, reads), Place("/b", "shards", error=name)), 8, 0, 0.0,
                      name, (name,)),
        batch_sizes=BatchSizes((BatchSize(8, time_of(10), time_of(20), 800, 400, 0.5, 999), BatchSize(16, error=name),
                                BatchSize(32, time_of(30), time_of(40), 1000, 800, 0.2, 4000)), None, 8, name),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["Resize", HOSTILE, "x" * 10_000, "", "変換" * 40], ids=range(5))
def test_a_page_is_whole_and_names_are_text(name: str) -> None:
    html = diagnosis_page(diagnosis(name), f"Diagnosis of {name}", f"packer diagnose {name}").render()
    page = Elements(html)
    assert not {tag for tag, _ in page.tags} & {"script", "img", "link", "iframe", "object", "a", "base", "form"}
    assert not [names for _, names in page.tags if any(key.startswith("on") for key in names)]
    assert not re.search(r"(?:src|href)\s*=\s*[\"'](?!#)|url\((?!#)|@import", html)
    assert "\u202e" not in html and "\x1b" not in html
    policy = next(names for _, names in page.tags if "http-equiv" in names)
    assert policy["content"].startswith("default-src 'none'")
    assert len(html) < 400_000
    identifiers = [names["id"] for _, names in page.tags if "id" in names]
    assert len(identifiers) == len({*identifiers}), "no two charts share a name"
    used = set(re.findall(r"(?:href=\"|url\()#([\w.-]+)", html))
    assert used <= {*identifiers}
    if name == HOSTILE:
        assert "<script>alert(1)</script>" in page.text, "it is shown as it is"


def test_the_same_values_give_the_same_page() -> None:
    pages = [re.sub("<dd>[^<]*</dd>", "", diagnosis_page(diagnosis(), "a", "b").render()) for _ in range(2)]
    assert pages[0] == pages[1]


def test_what_is_not_known_has_no_section() -> None:
    few = Diagnosis(tuple(Rung(s, "", time_of(9)) for s in ("step", "loading")), (), "", "fine", 0.02, None, 1, None, 2,
                    None)  # fmt: skip
    page = Elements(diagnosis_page(few, "a", "b").render())
    sections = [section for section in ("Payload", "Batch sizes", "Where the data are") if section in page.text]
    assert not sections and "The ladder" in page.text and "images/s" not in page.text


@pytest.mark.parametrize("values", [[nan, inf, None], [0.0, 0.0, 0.0], [1e-12, 1e12, 5.0], [-1.0, 2.0, 3.0]])
def test_charts_draw_any_values(values: list[float | None]) -> None:
    points = [charts.Point(f"p{i}", value, value) for i, value in enumerate(values) if value is not None]
    cells = [None if value is None else value for value in values]
    drawn = [
        charts.bars(list("abc"), {"x": values}, low=values, high=values, unit="ms"),
        charts.stacked_bars(list("abc"), {"x": values, "y": values}),
        charts.scatter(points, x="x", y="y", frontier=("low", "high"), log_y=True),
        charts.lines([1, 2, 3], {"x": values}, x_label="x", y_label="y"),
        charts.heat_map(list("ab"), [0, 1, 2], [cells, cells], marks=[charts.Mark(1, "m")]),
    ]
    for chart in drawn:
        for svg in (chart.wide, chart.narrow):
            Elements(svg)
            assert "nan" not in svg and "inf" not in re.sub("inherit", "", svg) and 'role="img"' in svg


def test_labels_that_fit_are_not_cut() -> None:
    names = ["step", "augment", "storage", "transform 12"]
    assert all(f">{name}<" in charts.bars(names, {"x": [1.0, 2.0, 3.0, 4.0]}).wide for name in names)


def test_rows_have_a_cell_for_each_heading() -> None:
    with pytest.raises(ValueError, match="a row of 1 cells, expected 2"):
        Page("a").table(["x", "y"], [["1"]])


@pytest.mark.parametrize("width", [60, 80, 140])
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
    page = Elements(report.read_text())
    assert "train.py:batches" in page.text and "packer diagnose" in page.text
    done = run_packer("diagnose", f"{script}:batches", *options, "--html", tmp_path / "no" / "report.html")
    assert done.returncode == 2 and "there is no directory" in done.stderr


# --- in a browser ----------------------------------------------------------------------------------------------------
@pytest.fixture
def chromium(tmp_path: Path) -> Any:
    if CHROMIUM is None:
        assert os.environ.get("PACKER_TEST_CHROMIUM") != "required", "no Chromium was found"
        pytest.skip("needs Chromium")

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr")
        return subprocess.run(
            [CHROMIUM, *options, f"--user-data-dir={tmp_path / 'profile'}", *map(str, arguments)],
            capture_output=True, text=True, timeout=90, check=True,
        )  # fmt: skip

    return run


def test_a_browser_shows_the_page_at_two_widths(chromium: Any, tmp_path: Path) -> None:
    from PIL import Image

    path = tmp_path / "report.html"
    write_page(path, diagnosis_page(diagnosis(HOSTILE), "Diagnosis", "packer diagnose"))
    done = chromium("--dump-dom", path.as_uri())
    assert "CONSOLE" not in done.stderr, "no errors, and nothing that the page's policy forbids"
    shown = Elements(done.stdout)
    titles = ["The ladder", "What to change", "What a batch carries", "Batch sizes", "Where the data are"]
    assert all(title in shown.text for title in titles)
    for width in (1280, 400):
        picture = tmp_path / f"{width}.png"
        chromium(f"--window-size={width},6000", f"--screenshot={picture}", path.as_uri())
        with Image.open(picture) as image:
            assert image.size == (width, 6000)
            pixels = image.convert("L")
            surface = pixels.getpixel((2, 2))
            edges = [pixels.crop((x, 0, x + 4, 6000)).getextrema() for x in (0, width - 4)]
            assert edges == [(surface, surface)] * 2, "nothing reaches the edges of the window"
            assert pixels.crop((0, 0, width, 600)).getextrema()[0] < 100, "there is text"


def test_a_report_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(readers.MissingExtraError, match=r"packer-vision\[report\]"):
        charts.bars(["a"], {"x": [1.0]})
