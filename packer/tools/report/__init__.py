"""Reports as one self-contained HTML file with text, tables and charts, for browsers, phones and print.

    page = Page("Diagnosis of train.py", lead="storage limits training")
    page.section("The ladder")
    page.chart(charts.bars(["step", "read"], {"ms a step": [20.0, 41.5]}, unit="ms"), "What each stage adds")
    page.table(["stage", "ms a step"], [["step", "20.0"], ["read", "41.5"]])
    write_page(Path("report.html"), page)

A page loads nothing and runs no script. Its layout is in page.html and style.css. All text is escaped; only charts are
markup. Pages need matplotlib and Jinja2, from the extra `report`; call `require_charts()` before long work to check.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from cache.files import atomic_write
from packer.tools.report import charts
from packer.tools.report.charts import STYLE, Chart, clean, require_charts, svg_image

__all__ = ["Chart", "Page", "charts", "require_charts", "svg_image", "write_page"]

_NUMBER = re.compile(r"(–|[<>~]?\s?[+−-]?[\d.,]+\s?\S{0,10}( ?[–±] ?[\d.,]+\s?\S{0,10})?)?")


@dataclass(frozen=True, slots=True)
class _Section:
    """A section of a page. title: "" for the part above all sections. parts: (kind, value), read by the template."""

    title: str = ""
    collapsed: bool = False
    parts: list[tuple[str, Any]] = field(default_factory=list)


class Page:
    """A report, built from top to bottom.

    title: title of the page. lead: the result as a sentence, shown first.
    """

    def __init__(self, title: str, *, lead: str = "") -> None:
        self.title, self.lead = title, lead
        self.sections = [_Section()]

    def section(self, title: str, *, collapsed: bool = False) -> None:
        """Begin a section. collapsed: shows only the title until it is clicked; in print, all of it."""
        self.sections.append(_Section(title, collapsed))

    def figures(self, items: Sequence[tuple[str, str, str]]) -> None:
        """Add large key figures: (value, label, detail or "")."""
        self._add("figures", items)

    def text(self, text: str) -> None:
        """Add a paragraph."""
        self._add("text", text)

    def points(self, items: Sequence[str]) -> None:
        """Add a list of sentences."""
        self._add("points", items)

    def facts(self, items: Sequence[tuple[str, str]]) -> None:
        """Add a list of names and values."""
        self._add("facts", items)

    def chart(self, chart: Chart, caption: str = "") -> None:
        """Add a chart with a caption below it."""
        self._add("chart", {"chart": chart, "caption": caption})

    def table(
        self, headings: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str = "", strong: Sequence[int] = ()
    ) -> None:
        """Add a table. Columns of numbers are right-aligned; a wide table scrolls. strong: numbers of highlighted rows.

        Raises ValueError for a row without one cell per heading.
        """
        for row in rows:
            if len(row) != len(headings):
                raise ValueError(f"a row of {len(row)} cells, expected {len(headings)}: {row!r}")
        right = [bool(rows) and all(_NUMBER.fullmatch(row[column]) for row in rows) for column in range(len(headings))]
        table = {"headings": headings, "rows": rows, "caption": caption, "strong": strong, "right": right}
        self._add("table", table)

    def pictures(self, items: Sequence[tuple[bytes, str, Sequence[str]]]) -> None:
        """Add PNG images side by side, each with a title and lines below it."""
        self._add(
            "pictures", [("data:image/png;base64," + base64.b64encode(png).decode(), *text) for png, *text in items]
        )

    def card(self, title: str, *, badge: str = "", why: str = "", code: str = "", note: str = "") -> None:
        """Add a recommendation: title, gain (badge), reason, code and a note."""
        self._add("card", {"title": title, "badge": badge, "why": why, "code": code, "note": note})

    def render(self) -> str:
        """The page as an HTML document. Raises MissingExtraError."""
        require_charts()
        from jinja2 import Environment

        environment = Environment(autoescape=True)
        environment.filters["clean"] = clean
        template = files("packer.tools.report").joinpath("page.html").read_text("utf-8")
        return environment.from_string(template).render(page=self, style=STYLE) + "\n"

    def _add(self, kind: str, value: Any) -> None:
        self.sections[-1].parts.append((kind, value))


def write_page(path: Path, page: Page) -> None:
    """Write a page atomically. Raises OSError, MissingExtraError."""
    atomic_write(path, page.render().encode())
