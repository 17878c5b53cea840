"""A chart as an SVG file of its own, for a page in Markdown: with its colours, light and dark, and its legend."""

from __future__ import annotations

import re
from html import escape

from packer.report.style import COLOURS, FONT, RAMP
from packer.report.svg import Chart, clean, text_width

__all__ = ["svg_image"]

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
        f'font-family="{escape(FONT)}" color="var(--ink)" fill="currentColor">'
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
