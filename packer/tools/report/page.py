"""A page of HTML: one file that loads nothing, runs no script, and fits a wide screen, a phone, paper and the dark.

Everything that is given is text and is escaped; only charts, which are drawn here, are markup.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from cache.files import atomic_write
from packer.tools.report.charts import COLOURS, FONT_FAMILY, POLICY, RAMP, STYLE, Chart, clean, text_width

__all__ = ["Page", "svg_image", "write_page"]

_CELL, _TEXT, _CODE = 160, 2000, 20_000
_NUMBER = re.compile(r"(–|[<>~]?\s?[+−-]?[\d.,]+\s?\S{0,10}( ?[–±] ?[\d.,]+\s?\S{0,10})?)?")


class Page:
    """A report that grows from the top to the bottom.

    title: of the page. lead: the result in a sentence, which is shown first.
    """

    def __init__(self, title: str, *, lead: str = "") -> None:
        self._title = clean(title)
        self._parts: list[str] = []
        self._open: list[str] = []  # tags of the section that is open
        self._sections = 0
        self._lead = lead

    def figures(self, items: Sequence[tuple[str, str, str]]) -> None:
        """The few numbers that matter, in large: (value, what it is, a word more or "")."""
        boxes = (
            f'<div class="figure"><span class="value">{_text(value, 40)}</span>'
            f'<span class="label">{_text(label)}</span>'
            + (f'<span class="note">{_text(note)}</span>' if note else "")
            + "</div>"
            for value, label, note in items
        )
        self._parts.append(f'<div class="figures">{"".join(boxes)}</div>')

    def section(self, title: str, *, collapsed: bool = False) -> None:
        """Begin a section. collapsed: only its title is shown until it is clicked; on paper all of it."""
        self._close()
        self._sections += 1
        name = f"section-{self._sections}"
        if collapsed:
            self._parts.append(f'<details class="section" id="{name}"><summary><h2>{_text(title)}</h2></summary>')
            self._open = ["details"]
        else:
            self._parts.append(f'<section class="section" id="{name}"><h2>{_text(title)}</h2>')
            self._open = ["section"]

    def text(self, text: str) -> None:
        """A paragraph."""
        self._parts.append(f"<p>{_text(text, _TEXT)}</p>")

    def points(self, items: Sequence[str]) -> None:
        """A list of sentences."""
        self._parts.append("<ul>" + "".join(f"<li>{_text(item, _TEXT)}</li>" for item in items) + "</ul>")

    def facts(self, items: Sequence[tuple[str, str]]) -> None:
        """Names and values, as of an environment."""
        rows = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value, _TEXT)}</dd>" for name, value in items)
        self._parts.append(f"<dl>{rows}</dl>")

    def code(self, code: str) -> None:
        """Lines of code or a command; one click selects all of it."""
        self._parts.append(f"<pre><code>{escape(clean(code, _CODE))}</code></pre>")

    def chart(self, chart: Chart, caption: str = "") -> None:
        """A chart, with its legend above and a caption below it."""
        legend = ""
        if chart.scale:
            legend = '<div class="scale"><span>0 %</span><span class="ramp"></span><span>100 %</span></div>'
        elif chart.legend:
            keys = (
                f'<li><span class="key k{1 + number % 7}"></span>{_text(name, 60)}</li>'
                for number, name in enumerate(chart.legend)
            )
            legend = f'<ul class="legend">{"".join(keys)}</ul>'
        caption = f"<figcaption>{_text(caption, _TEXT)}</figcaption>" if caption else ""
        drawings = f'<div class="wide">{chart.wide}</div><div class="narrow">{chart.narrow}</div>'
        self._parts.append(f"<figure>{legend}{drawings}{caption}</figure>")

    def table(
        self, headings: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str = "", strong: Sequence[int] = ()
    ) -> None:
        """A table; columns of numbers are aligned right, and one that is too wide scrolls. strong: rows to look at.

        Raises ValueError for a row that has not a cell for each heading.
        """
        for row in rows:
            if len(row) != len(headings):
                raise ValueError(f"a row of {len(row)} cells, expected {len(headings)}: {row!r}")
        right = [bool(rows) and all(_NUMBER.fullmatch(row[column]) for row in rows) for column in range(len(headings))]
        marks = [' class="number"' if is_right else "" for is_right in right]
        head = "".join(f'<th scope="col"{mark}>{_text(name)}</th>' for name, mark in zip(headings, marks, strict=True))
        body = "".join(
            ('<tr class="strong">' if number in strong else "<tr>")
            + "".join(f"<td{mark}>{_text(cell, _CELL)}</td>" for cell, mark in zip(row, marks, strict=True))
            + "</tr>"
            for number, row in enumerate(rows)
        )
        caption = f"<caption>{_text(caption, _TEXT)}</caption>" if caption else ""
        table = f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        self._parts.append(f'<div class="table" tabindex="0">{table}</div>')

    def card(self, title: str, *, badge: str = "", why: str = "", code: str = "", note: str = "") -> None:
        """A piece of advice: what to do, what it gains (badge), why, how as code, and what to mind."""
        parts = [f"<h3>{_text(title)}{f'<span class=badge>{_text(badge, 60)}</span>' if badge else ''}</h3>"]
        parts += [f"<p>{_text(why, _TEXT)}</p>"] if why else []
        parts += [f"<pre><code>{escape(clean(code, _CODE))}</code></pre>"] if code else []
        parts += [f'<p class="note">{_text(note, _TEXT)}</p>'] if note else []
        self._parts.append(f'<article class="card">{"".join(parts)}</article>')

    def render(self) -> str:
        """The whole document."""
        lead = f'<p class="lead">{_text(self._lead, _TEXT)}</p>' if self._lead else ""
        end = "".join(f"</{tag}>" for tag in self._open)
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            '<meta name="color-scheme" content="light dark">\n'
            f"<title>{escape(self._title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
            f"<header><h1>{escape(self._title)}</h1>{lead}</header>\n" + "\n".join(self._parts) + f"{end}\n</main>\n"
            "</body>\n</html>\n"
        )

    def _close(self) -> None:
        self._parts += [f"</{tag}>" for tag in self._open]
        self._open = []


def write_page(path: Path, page: Page) -> None:
    """Write a page; the file is whole or not there. Raises OSError."""
    atomic_write(path, page.render().encode())


def _text(text: str, most: int = 300) -> str:
    return escape(clean(text, most))


# --- A chart as an SVG file of its own, for a page in Markdown: with its colours, light and dark, and its legend.
_SIZE = re.compile(r'viewBox="0 0 ([\d.]+) ([\d.]+)"')
_MARGIN, _LINE, _FONT_SIZE, _KEY = 12.0, 24.0, 13.0, 18.0


def svg_image(chart: Chart) -> str:
    """The wide drawing of a chart below its legend, as a document. Lengths are pixels."""
    found = _SIZE.search(chart.wide)
    assert found is not None  # as `draw` writes it
    width, height = float(found[1]), float(found[2])
    legend, top = _legend(chart, width)
    drawing = chart.wide.replace("<svg ", f'<svg height="{height:g}" ', 1)
    outer = f"0 0 {width + 2 * _MARGIN:g} {top + height + 2 * _MARGIN:g}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{outer}" width="{width + 2 * _MARGIN:g}" '
        f'font-family="{escape(FONT_FAMILY)}" color="var(--ink)" fill="currentColor">'
        f"<title>{escape(clean(chart.alt, 300))}</title><style>{COLOURS} :root {{ color: var(--ink); }}</style>"
        f'<rect width="100%" height="100%" fill="var(--surface)"/>{legend}'
        f'<g transform="translate({_MARGIN:g} {_MARGIN + top:g})">{drawing}</g></svg>\n'
    )


def _legend(chart: Chart, width: float) -> tuple[str, float]:
    """The keys of the series in lines, or the scale of a heat map; and the height that they take."""
    if chart.scale:
        return _scale(), _LINE
    parts, x, y = [], 0.0, 0.0
    for number, name in enumerate(clean(name, 60) for name in chart.legend):
        room = _KEY + text_width(name, _FONT_SIZE) + _KEY
        if x and x + room > width:
            x, y = 0.0, y + _LINE
        left, middle = _MARGIN + x, _MARGIN + y + _FONT_SIZE / 2
        colour = f"var(--series-{1 + number % 7})"
        parts.append(
            f'<rect x="{left:g}" y="{middle - 6:g}" width="12" height="12" rx="2" fill="{colour}"/>'
            f'<text x="{left + _KEY:g}" y="{middle + 5:g}" font-size="{_FONT_SIZE:g}">{escape(name)}</text>'
        )
        x += room
    return "".join(parts), y + _LINE if parts else 0.0


def _scale() -> str:
    last = len(RAMP) - 1
    stops = "".join(f'<stop offset="{i / last:g}" stop-color="{colour}"/>' for i, colour in enumerate(RAMP))
    y = _MARGIN + 11
    return (
        f'<defs><linearGradient id="ramp">{stops}</linearGradient></defs>'
        f'<text x="{_MARGIN:g}" y="{y:g}" font-size="{_FONT_SIZE:g}">0 %</text>'
        f'<rect x="{_MARGIN + 36:g}" y="{_MARGIN:g}" width="140" height="12" rx="2" fill="url(#ramp)"/>'
        f'<text x="{_MARGIN + 184:g}" y="{y:g}" font-size="{_FONT_SIZE:g}">100 %</text>'
    )
