"""Pages and charts: whole, safe, the same every time, and shown by a browser as they are meant; lines for terminals."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import diagnosis_loaders as planted
import numpy as np
import pytest
from PIL import Image

from cache.errors import MissingExtraError
from cache.messages import bar, shortened
from packer.cli.html import check_html
from packer.report import Page, charts, write_page
from packer.report.charts import Mark, Point, number
from packer.report.diagnosis import diagnosis_page
from readers.diagnosis import Diagnosis, Rung, StageCost, StepTime
from readers.diagnosis.batch_sizes import BatchSize, BatchSizes
from readers.diagnosis.findings import Advice, Applied, Change, Payload, PayloadFact, PayloadField
from readers.diagnosis.places import Place, Places
from readers.diagnosis.reads import PlaceReads, Reads
from readers.diagnosis.text import diagnosis_lines
from readers.usage.record import Mark as UsageMark
from readers.usage.record import Series, Usage

STAGES = ("step", "copy", "transfer", "collate", "transform 2", "transform 1", "read", "storage")
HOSTILE = [
    "<script>alert(1)</script>\"><img src=http://a.example/x onerror=alert(1)>' onload='alert(1)",
    "$\\frac{ a\u202eb\u2066 \x00\x1b[2J\x9b \ufffe\ud800 ]]> --> <!-- &lt;",
    "<" * 10_000, "名前" * 40, "",
]  # fmt: skip
VOID = {"meta", "br", "path", "use", "rect", "image"}
SECTIONS = {
    "What to change", "Changes that were tried", "What a step takes, stage by stage",
    "What each stage costs, read in two ways", "What the batches carry", "Batch sizes", "Where the data lie",
    "What the machine did meanwhile", "Notes", "How it was measured",
}  # fmt: skip


def step_time(milliseconds: float) -> StepTime:
    return StepTime(milliseconds / 1e3, 0.97 * milliseconds / 1e3, 1.04 * milliseconds / 1e3, 0.0, 100, 0.5)


def plain_diagnosis(name: str = "RandomResizedCrop(224)") -> Diagnosis:
    times = [20.1, 20.4, 20.6, 21.0, 39.8, 40.9, 41.1, 41.5]
    rungs = tuple(Rung(stage, name, step_time(ms), ms != 21.0) for stage, ms in zip(STAGES, times, strict=True))
    costs = tuple(
        StageCost(stage, name, 1e-3 * (after - before), 1e-3 * 0.9 * (after - before), stage != "read", 0.03, 0.02,
                  f"hides behind {name}" if stage == "collate" else "")
        for stage, before, after in zip(STAGES, [0.0, *times], times, strict=False)
    )  # fmt: skip
    verdict = f"transform 2 ({shortened(name, 60)}) starves the training; a step takes 41.5 ms, and 20.1 ms if it never"
    return Diagnosis(rungs, costs, "transform 2", f"{verdict} waits", 0.0228, 64, 2, 4.1, 8, 3.9, (f"note of {name}",))


def full_diagnosis(name: str = "RandomResizedCrop(224)") -> Diagnosis:
    """Every part that a diagnosis can have, with `name` wherever a name comes from elsewhere."""
    fact = PayloadFact("uint8", f"{name} fits into uint8", 28_000_000)
    change = Change("workers", 4, f"4 workers for {name}")
    times = np.arange(1.0, 41.0)
    usage = Usage(
        "node", 1.7e9, 1.0, (Series("cpu busy", "share", 1.0), Series(name[:200] or "vda read", "bytes/s")), times,
        np.ones(40), np.stack([np.where(times < 5, np.nan, np.abs(np.sin(times / 5))), 1e6 * times], 1),
        tuple(UsageMark(name[:200] or "step", 4.0 * i) for i in range(9)),
    )  # fmt: skip
    reads = PlaceReads(Reads(2e-4, 5e-4, 9e-4, 2e8, 400), Reads(0.02, 0.03, 0.05, 2e8, 100))
    places = Places(
        (Place("set", "shards", "lustre", 100, 10**7, reads, reads),
         Place(f"/dev/shm/{name}", "shards", "tmpfs", 100, 10**7, None, reads, None, 0.4, "memory is its medium"),
         Place("/nowhere", "shards", error="no such directory")), 64, 1, 0.01, f"{name}: 10 ms less",
        (f"packer stage set --target '{name}'",),
    )  # fmt: skip
    sizes = BatchSizes(
        (*(BatchSize(n, step_time(n / 3), step_time(n / 2), 3000.0, 2000.0, 0.3, 10**6 * n) for n in (32, 64, 128)),
         BatchSize(256, error=name)), 64, 64, "64 are enough",
    )  # fmt: skip
    return replace(
        plain_diagnosis(name),
        pinned=step_time(20.2),
        payload=Payload(4, 38_535_168, 28_000_000, (PayloadField(f"[0].{name}", "float32", (64, 3, None, 224),
                                                                 38_535_168, True, (fact,)),), (name,)),
        advice=(Advice("workers", f"Use {name}", ("PyTorch documentation",), f"because of {name}",
                       f"DataLoader(dataset, num_workers=4)  # {name}", 0.0228, 0.0187, change),),
        applied=(Applied(change, "workers", 0.0415, 0.0228, 0.0231, True),
                 Applied(change, "workers", 0.0231, None, None, False, name)),
        usage=usage,
        places=places,
        batch_sizes=sizes,
    )  # fmt: skip


@cache
def usual_page() -> str:
    return diagnosis_page(full_diagnosis(), "packer diagnose set", [("versions", "packer 1")]).render()


class Checked(HTMLParser):
    """Checks that tags are balanced and loads nothing; collects headings, texts, tags and ids."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.ids: list[str] = []
        self.used: set[str] = set()
        self.feed(document)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attributes)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attributes:
            assert not name.startswith("on"), f"<{tag} {name}>"
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href"):
                assert value and value.startswith(("#", "data:image/png;base64,")), f"<{tag} {name}={value!r}>"
            self.used |= {part.partition(")")[0] for part in (value or "").split("url(#")[1:]}
            if name == "href" and value and value.startswith("#"):
                self.used.add(value[1:])

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


# --- pages -----------------------------------------------------------------------------------------------------------
def test_a_page_is_whole_and_loads_nothing() -> None:
    document = usual_page()
    page = Checked(document)
    assert set(page.texts) >= SECTIONS and "://" not in document
    assert len(page.ids) == len(set(page.ids)) and page.used <= set(page.ids) and page.used
    assert not {"script", "link", "iframe", "img", "object", "form"} & set(page.tags)
    assert "default-src 'none'" in document.replace("&#x27;", "'") and "<metadata" not in document
    for text in ("RandomResizedCrop(224)", "−18.7 ms a step", "lustre", "~0.180", "38.5 MB"):
        assert any(text in found for found in page.texts), text


def test_parts_without_data_are_left_out() -> None:
    page = Checked(diagnosis_page(plain_diagnosis(), "packer diagnose set").render())
    assert SECTIONS & set(page.texts) == {
        "What a step takes, stage by stage", "What each stage costs, read in two ways", "Notes", "How it was measured",
    }  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE, ids=range(5))
def test_names_from_elsewhere_are_text(name: str) -> None:
    """Escaped, cut where they are long, and without characters that turn text round or move a cursor."""
    document = diagnosis_page(full_diagnosis(name), name, [(name, name)]).render()
    assert set(Checked(document).tags) <= set(Checked(usual_page()).tags) and "alert(1)>" not in document
    assert len(document) < 400_000 and not set(document) & set("\x00\x1b\x9b\u202e\u2066\ufffe")
    assert document.encode()


def test_the_same_result_gives_the_same_page(tmp_path: Path) -> None:
    """Also in another process, whose hashes and ids are others; nothing but the page is left."""
    script = "import test_report, sys; from pathlib import Path; Path(sys.argv[1]).write_text(test_report.usual_page())"
    command = [sys.executable, "-c", script, str(tmp_path / "other.html")]
    subprocess.run(command, cwd=Path(__file__).parent, timeout=100, check=True)
    page = diagnosis_page(full_diagnosis(), "packer diagnose set", [("versions", "packer 1")])
    write_page(tmp_path / "page.html", page)
    assert (tmp_path / "page.html").read_bytes() == (tmp_path / "other.html").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.html", "page.html"]


def test_settings_of_the_user_change_no_chart() -> None:
    import matplotlib

    usual = charts.bars(["a"], {"": [1.0]})
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "svg.fonttype": "path"}):
        assert charts.bars(["a"], {"": [1.0]}) == usual
    assert "matplotlib.pyplot" not in sys.modules


def test_a_missing_package_is_named_before_the_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"matplotlib: run .*\[report\]"):
        check_html(tmp_path / "report.html")
    check_html(None)


def test_tables_refuse_rows_of_another_length() -> None:
    with pytest.raises(ValueError, match="2 cells, expected 1"):
        Page("title").table(["a"], [["b", "c"]])


# --- charts ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("value", "shown"),
    [(41.49, "41.5 ms"), (1234.4, "1,234 ms"), (0.1234, "0.123 ms"), (0, "0 ms"), (-2.5, "−2.50 ms"), (None, "–"),
     (math.nan, "–"), (math.inf, "–"), (99.99, "100 ms"), (1e-9, "0.000000 ms")],
)  # fmt: skip
def test_numbers_have_three_digits(value: float | None, shown: str) -> None:
    assert number(value, "ms") == shown


def drawn(chart: Any) -> list[str]:
    """The texts of a chart, of both widths."""
    return Checked(chart.wide).texts + Checked(chart.narrow).texts


def test_charts_show_their_values_and_names() -> None:
    two = {"added": [1.0, None], "if free": [0.5, math.nan]}
    chart = charts.bars(["read", "decode"], two, unit="ms", strong=[1], line=(0.7, "the step"))
    assert {"read", "decode", "1.00 ms", "0.50 ms", "–", "the step"} <= set(drawn(chart))
    assert chart.legend == ("added", "if free") and "read: added 1.00 ms, if free 0.500 ms" in chart.alt
    assert {"9.00 s", "1.00 s"} <= set(drawn(charts.stacked_bars(["a", "b"], {"x": [4, 1], "y": [5, None]}, unit="s")))
    chart = charts.lines([16, 32, 64], {"a": [1, None, 3]}, x_label="batch", y_label="images/s", log_x=True)
    assert {"16", "32", "64", "batch", "images/s"} <= set(drawn(chart))
    chart = charts.heat_map(["CPU 0"], [0.0, 1.0], [[0.5, None]], marks=[Mark(1.0, "read"), Mark(1.1, "decode")])
    assert {"CPU 0", "read", "decode", "seconds"} <= set(drawn(chart)) and "CPU 0 50.0%" in chart.alt


def test_the_frontier_joins_the_points_that_no_other_beats() -> None:
    points = [Point("small", 1, 10), Point("middle", 2, 20), Point("beaten", 3, 5), Point("large", 4, 30)]
    lines = [
        charts.scatter(
            [point for point in points if point.label != left], x="kB", y="images/s", frontier=("low", "high")
        )
        for left in ("", "beaten", "middle")
    ]
    assert {"small", "middle", "beaten", "large", "kB", "images/s"} <= set(drawn(lines[0]))
    corners = [chart.wide.partition("stroke-dasharray")[0].rpartition('d="')[2].count("L") for chart in lines]
    assert corners == [2, 2, 1]


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


@pytest.mark.parametrize("values", [[], [0.0], [None], [math.inf], [-1.0], [1e300], [1e-300]], ids=str)
def test_charts_of_little_are_drawn(values: list[float | None]) -> None:
    names = [f"row {i}" for i in range(len(values))]
    assert drawn(charts.bars(names, {"": values})) is not None
    assert drawn(charts.stacked_bars(names, {"a": values})) is not None
    assert drawn(charts.lines(range(len(values)), {"a": values}, x_label="x", y_label="y")) is not None
    points = [Point("p", value or 0.0, value or 0.0) for value in values]
    assert drawn(charts.scatter(points, x="x", y="y", log_x=True)) is not None


# --- lines for terminals ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("columns", [60, 80, 140])
@pytest.mark.parametrize(
    "name", ["Resize(256)", "a_name_without_end_" * 20, *HOSTILE[:6]], ids=lambda name: ascii(name)[:20]
)
def test_lines_fit_the_terminal(columns: int, name: str) -> None:
    result = replace(plain_diagnosis(name), pinned=step_time(20.2))
    lines = diagnosis_lines(result, columns, ["more"])
    assert max(map(len, lines)) <= columns and not set("".join(lines)) & set("\x00\x1b\x9b\u202e\u2066")
    words = " ".join(lines)
    assert lines[0].startswith("transform 2") and lines[-1].endswith("waits") and words.count("41.5 ms") == 2
    ladder = [line for line in lines if line.endswith(("█", "▏", "▎", "▍", "▌", "▋", "▊", "▉"))]
    assert len(ladder) == len(STAGES) + 1 and len({line.index("  ", 30) for line in ladder}) == 1
    assert [line.split()[0] for line in ladder][:2] == ["step", "copy"] and "~21.00" in words


@pytest.mark.parametrize(
    ("share", "shown"), [(0, ""), (1e-9, "▏"), (0.5, "██"), (0.53, "██▏"), (1, "████"), (9, "████")]
)
def test_bars_are_made_of_eighths(share: float, shown: str) -> None:
    assert bar(share, 4) == shown


@pytest.mark.parametrize(("most", "shown"), [(9, "transform"), (8, "tran…orm"), (3, "t…m"), (2, "tr"), (0, "")])
def test_long_texts_lose_their_middle(most: int, shown: str) -> None:
    assert shortened("transform", most) == shown


# --- the command -----------------------------------------------------------------------------------------------------
def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "packer", "diagnose", f"{planted.__file__}:plain_loader", "--simulate-step", "1ms",
               "--seconds", "0.5", *map(str, arguments)]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_writes_a_page(tmp_path: Path) -> None:
    done = run("--json", "--html", tmp_path / "report.html")
    assert done.returncode == 0 and str(tmp_path / "report.html") in done.stderr, done.stderr
    document = json.loads(done.stdout)
    texts = Checked((tmp_path / "report.html").read_text()).texts
    assert document["version"] == 1 and document["verdict"] in texts and any("--simulate-step 1ms" in t for t in texts)


def test_a_page_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    done = run("--html", tmp_path / "missing" / "report.html")
    assert done.returncode == 2 and "make it first" in done.stderr and "ms a step" not in done.stderr + done.stdout


# --- in a browser ----------------------------------------------------------------------------------------------------
PROBE = """<!DOCTYPE html><meta charset="utf-8"><body><script>
const widths = [320, 400, 900, 1280], found = [];
let left = widths.length;
for (const width of widths) {
  const frame = document.createElement("iframe");
  frame.style = `width: ${width}px; height: 3000px; border: 0`;
  frame.onload = () => {
    const page = frame.contentDocument, texts = [], outside = [], overlaps = [];
    for (const svg of page.querySelectorAll("figure svg")) {
      const box = svg.getBoundingClientRect();
      if (!box.width) continue;
      const scale = box.width / svg.viewBox.baseVal.width, boxes = [];
      for (const text of svg.querySelectorAll("text")) {
        const b = text.getBoundingClientRect(), words = text.textContent;
        texts.push(scale * parseFloat(frame.contentWindow.getComputedStyle(text).fontSize));
        if (b.left < box.left - 2 || b.right > box.right + 4 || b.top < box.top - 2 || b.bottom > box.bottom + 4)
          outside.push(words);
        for (const [o, other] of boxes)
          if (b.left < o.right - 1 && o.left < b.right - 1 && b.top < o.bottom - 4 && o.top < b.bottom - 4)
            overlaps.push(words + " / " + other);
        boxes.push([b, words]);
      }
    }
    found.push({width, scroll: page.documentElement.scrollWidth, smallest: Math.min(...texts), outside, overlaps,
                sections: [...page.querySelectorAll("h2")].map(h => h.textContent), drawn: texts.length});
    if (!--left) document.body.textContent = "FOUND" + JSON.stringify(found) + "END";
  };
  frame.src = "report.html";
  document.body.append(frame);
}
</script>"""


@pytest.fixture(scope="module")
def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None and os.environ.get("PACKER_TEST_CHROMIUM") == "required":
        pytest.fail("no Chromium here: install chromium, or run without PACKER_TEST_CHROMIUM=required")
    return found or pytest.skip("no Chromium here, so pages are not shown in a browser")


def browse(chromium: str, tmp_path: Path, file: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Open a file of tmp_path. What goes wrong in the page itself is on stderr, as lines with CONSOLE."""
    command = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
               "--disable-background-networking", "--disable-dev-shm-usage", "--enable-logging=stderr",
               f"--user-data-dir={tmp_path / 'profile'}", *options, f"file://{tmp_path / file}"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    return done


@pytest.mark.parametrize("name", ["RandomResizedCrop(224)", "W" * 200], ids=["usual", "wide"])
def test_a_browser_shows_all_of_it_at_any_width(chromium: str, tmp_path: Path, name: str) -> None:
    """Nothing is beside the page, outside of its chart, over other text, or smaller than 11 pixels."""
    write_page(tmp_path / "report.html", diagnosis_page(full_diagnosis(name), "title", [("versions", name)]))
    (tmp_path / "probe.html").write_text(PROBE)
    shown = browse(chromium, tmp_path, "probe.html", "--allow-file-access-from-files", "--dump-dom").stdout
    for found in json.loads(shown.partition("FOUND")[2].partition("END")[0].replace("&lt;", "<").replace("&amp;", "&")):
        assert set(found["sections"]) == SECTIONS and found["drawn"] > 60
        assert found["scroll"] <= found["width"] and found["smallest"] >= 11, found
        assert not found["outside"] and not found["overlaps"], found


@pytest.mark.parametrize(("scheme", "is_dark"), [("0", True), ("1", False)], ids=["dark", "light"])
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_shows_it_in_the_dark_too(
    chromium: str, tmp_path: Path, width: int, scheme: str, is_dark: bool
) -> None:
    (tmp_path / "report.html").write_text(usual_page())
    shot = tmp_path / "shot.png"
    options = (f"--blink-settings=preferredColorScheme={scheme}", f"--window-size={width},2400", f"--screenshot={shot}")
    browse(chromium, tmp_path, "report.html", *options)
    with Image.open(shot) as image:
        pixels = np.asarray(image.convert("L"))
    assert pixels.shape == (2400, width)
    edge, middle = pixels[:, :8], pixels[:, width // 4 : -width // 4]
    assert (edge.max() < 60) if is_dark else (edge.min() > 240)
    assert middle.std() > 10
