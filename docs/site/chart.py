"""Draws docs/figures/feeding.svg from a table of docs/performance.md: python docs/site/chart.py."""

from __future__ import annotations

import html
import re
from pathlib import Path

__all__ = ["drawn", "rows_of"]

DOCS = Path(__file__).parent.parent
FIGURE = DOCS / "figures/feeding.svg"
SECTION = "## Feeding a training, ImageNet\n"
LINE, LEFT, WIDE = 27, 300, 400
# In colours that can be read on white and on black.
STYLE = "text{font:14px system-ui,sans-serif;fill:#7a7f85}.ours{font-weight:600;fill:#12946b}"


def rows_of(page: str) -> list[tuple[str, float, bool]]:
    """Of the first table: what, images/s, whether it is ours."""
    table = page.partition(SECTION)[2].partition("\n| uint8")[2].partition("\n\n")[0]
    found = re.findall(r"^\| (\*\*)?(.+?)(?:\*\*)? \| ([\d,]+) \(", table, re.MULTILINE)
    return [(name.replace("`", ""), float(rate.replace(",", "")), bool(bold)) for bold, name, rate in found]


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
        name = re.sub(r",? (reader )?on our tar shards|, its own re-encoded JPEGs", "", name)
        lines += [
            f'<text{mark} x="{LEFT - 10}" y="{y + 17}" text-anchor="end">{html.escape(name)}</text>',
            f'<rect x="{LEFT}" y="{y + 3}" width="{width}" height="{LINE - 7}" rx="2" fill="{fill}"/>',
            f'<text{mark} x="{LEFT + width + 8}" y="{y + 17}">{rate:,.0f}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    FIGURE.write_text(drawn((DOCS / "performance.md").read_text(encoding="utf-8")), encoding="utf-8")
