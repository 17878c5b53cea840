"""The comparison of benchmarks/pipeline.py in the docs: tables of docs/performance.md, and docs/figures/feeding.svg.

    python docs/site/chart.py [FIGURES.json]

FIGURES.json: the file of `pipeline.py --out`; the tables are written from the last run of each kind of batch. The
chart is drawn from the first table of the page.
"""

from __future__ import annotations

import html
import json
import re
import sys
import textwrap
from pathlib import Path
from statistics import median
from typing import Any

__all__ = ["drawn", "rows_of", "tables"]

DOCS = Path(__file__).parent.parent
FIGURE = DOCS / "figures/feeding.svg"
BEGIN, END = "<!-- tables of benchmarks/pipeline.py: python docs/site/chart.py FIGURES.json -->\n", "<!-- end -->\n"
KINDS = {"u8": "uint8", "f32": "float32, normalised"}
LINE, LEFT, WIDE = 27, 300, 400
# In colours that can be read on white and on black.
STYLE = "text{font:14px system-ui,sans-serif;fill:#7a7f85}.ours{font-weight:600;fill:#12946b}"


def rows_of(page: str) -> list[tuple[str, float, bool]]:
    """(name, images/s, whether it is packer's) of each row of the first table."""
    table = page.partition(BEGIN)[2].partition("\n| uint8")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (\*\*)?(.+?)(?:\*\*)? \| ([\d,]+) \(", table, re.MULTILINE)
    return [(name.replace("`", ""), float(rate.replace(",", "")), bool(bold)) for bold, name, rate in rows]


def drawn(page: str) -> str:
    rows = rows_of(page)
    most, height = max(rate for _, rate, _ in rows), LINE * len(rows) + 8
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDE + 70} {height}" role="img">',
        "<title>Images a second, by loader</title>",
        f"<style>{STYLE}</style>",
    ]
    for number, (name, rate, ours) in enumerate(rows):
        y, width = 4 + LINE * number, round(WIDE * rate / most)
        mark, fill = (' class="ours"', "#12946b") if ours else ("", "#9aa3ab")
        lines += [
            f'<text{mark} x="{LEFT - 10}" y="{y + 17}" text-anchor="end">{html.escape(name)}</text>',
            f'<rect x="{LEFT}" y="{y + 3}" width="{width}" height="{LINE - 7}" rx="2" fill="{fill}"/>',
            f'<text{mark} x="{LEFT + width + 8}" y="{y + 17}">{rate:,.0f}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def tables(runs: list[dict[str, Any]]) -> str:
    """A table for each kind of batch. runs: from `report.save`."""
    last = {kind: run for run in runs for kind in KINDS if any(name.endswith(f"[{kind}]") for name in run["results"])}
    return "\n".join(_table(last[kind], kind) for kind in KINDS if kind in last)


def _table(run: dict[str, Any], kind: str) -> str:
    """A table of rates. A ratio is the median over rounds of the ratio to the best peer of the round. FFCV reads JPEGs
    that it re-encoded, so it is not a rival."""
    ran = {name: rounds for name, rounds in run["results"].items() if all("images_s" in figures for figures in rounds)}
    rows = {name.removesuffix(f" [{kind}]"): rounds for name, rounds in ran.items() if name.endswith(f"[{kind}]")}
    peers = [rounds for name, rounds in rows.items() if not name.startswith(("ours:", "FFCV"))]
    best = [max(figures["images_s"] for figures in together) for together in zip(*peers, strict=True)]

    def middle(name: str, key: str = "images_s") -> float:
        return median(figures[key] for figures in rows[name])

    lines = [
        f"| {KINDS[kind]} | images/s (min–max) | CPU µs an image | first batch | of the best peer |",
        "|---" * 5 + "|",
    ]
    for name in sorted(rows, key=middle, reverse=True):
        rates = [figures["images_s"] for figures in rows[name]]
        times = median(rate / most for rate, most in zip(rates, best, strict=True))
        ours = "**" * name.startswith("ours: ")
        lines.append(
            f"| {ours}{name.removeprefix('ours: ')}{ours} | {median(rates):,.0f} ({min(rates):,.0f}–{max(rates):,.0f}) "
            f"| {middle(name, 'cpu_us'):,.0f} | {middle(name, 'first_s'):.2f} s "
            f"| {'' if name.startswith('FFCV') else f'{ours}{times:.2f}{ours}'} |"
        )
    given, rounds = run["settings"], [figures for name in rows for figures in rows[name]]
    versions = dict(sorted((name, version) for figures in rounds for name, version in figures["versions"].items()))
    versions.pop("packer-vision", None)
    others = [figures["others_cpus"] for figures in rounds]
    text = (
        f"`python benchmarks/pipeline.py --tree TREE --work OUT`, {run['time'][:10]}, commit {run['commit']}: at least "
        f"{given['batches']} batches and {float(given['seconds']):.0f} s a round, {len(best)} interleaved rounds, "
        f"{given['workers']} threads or worker processes a row; other processes kept {median(others):.2f} CPUs busy "
        f"(at most {max(others):.2f}). " + ", ".join(" ".join(pair) for pair in versions.items()) + "."
    )
    lines += ["", textwrap.fill(text, 150, break_on_hyphens=False), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    page = (DOCS / "performance.md").read_text(encoding="utf-8")
    if sys.argv[1:]:
        before, rest = page.split(BEGIN)
        page = f"{before}{BEGIN}\n{tables(json.loads(Path(sys.argv[1]).read_text()))}\n{END}{rest.split(END)[1]}"
        (DOCS / "performance.md").write_text(page, encoding="utf-8")
    FIGURE.write_text(drawn(page), encoding="utf-8")
