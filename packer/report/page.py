"""A page of HTML: one file that loads nothing, runs no script, and fits a wide screen, a phone, paper and the dark.

Everything that is given is text and is escaped; only charts, which are drawn here, are markup.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from cache.files import atomic_write
from packer.report.style import POLICY, STYLE
from packer.report.svg import Chart, clean

__all__ = ["Page", "write_page"]

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
