"""Charts of a report: bars and heat maps, drawn by matplotlib, each in two widths.

A chart is an SVG element inside a page. Its text stays text, so that it can be searched, selected and read aloud. Its
colours are CSS variables of the page, which is light or dark; matplotlib draws with placeholder colours. The state of
pyplot and the user's settings are not used, so the same values always give the same bytes.

Values that are None or not finite are shown as missing. Names are untrusted and are shortened to fit. Series differ by
position, not by colour alone.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any, TypeAlias

from cache.errors import MissingExtraError
from cache.messages import printable, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "COLOURS",
    "STYLE",
    "Chart",
    "Mark",
    "bars",
    "clean",
    "heat_map",
    "number",
    "require_charts",
    "svg_image",
]

Value: TypeAlias = float | None

STYLE = files("packer.tools.report").joinpath("style.css").read_text("utf-8")
COLOURS = STYLE.partition("/* --- the page --- */")[0]
_ALT = 1500
_LARGE = 1e10
_ROW = 18  # pixels per bar, with the space around it
_INK, _MUTED, _SURFACE, _STRONG = "#000001", "#000002", "#000003", "#000004"
_SERIES = ("#000011", "#000012", "#000013", "#000014", "#000015", "#000016", "#000017")
_VARIABLES = {_INK: "currentColor", _MUTED: "var(--muted)", _SURFACE: "var(--surface)"}
_VARIABLES |= {_STRONG: "var(--strong)"} | {colour: f"var(--series-{i})" for i, colour in enumerate(_SERIES, 1)}
_PLACEHOLDER = re.compile(f"(?<=fill: |roke: )({'|'.join(_VARIABLES)})")
# Removed from an SVG file: comments, metadata, styles, unused ids (several charts would share them), and whitespace.
_NEEDLESS = re.compile(r'<!--.*?-->|<(metadata|style)\b.*?</\1>| id="[\w.]+_\d+"|(?<=>)\s+(?=<)', re.DOTALL)
_NO_TEXT = re.compile("[\ufffe\uffff]")  # characters invalid in XML that `printable` does not escape
# Settings unrelated to drawing; setting them would start a user interface or give a warning.
_NO_SETTINGS = ("backend", "interactive", "toolbar", "webagg", "tk.", "date.epoch", "timezone", "figure.max_open")
_SETTINGS = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": ["DejaVu Sans"],
    "text.color": _INK,
    "axes.edgecolor": _MUTED,
    "axes.labelcolor": _MUTED,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.bottom": False,
    "axes.axisbelow": True,
    "xtick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.major.size": 0,
    "xtick.labelcolor": _MUTED,
    "ytick.labelcolor": _INK,
    "legend.frameon": False,
}


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing in two widths; the page shows the one that fits.

    wide, narrow: SVG elements. alt: the content of the chart as text, for screen readers.
    """

    wide: str
    narrow: str
    alt: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A labelled time on a chart. at: seconds."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class _Size:
    """The size of a drawing.

    width: pixels; a phone shows a narrow chart a little larger, a page at 400 % a little smaller. font: font size.
    names: longest row name that fits, in characters. ticks: number of ticks on a time axis.
    """

    width: int
    font: int
    names: int
    ticks: int


_SIZES = _Size(820, 13, 36, 8), _Size(340, 14, 12, 4)


def number(value: Value, unit: str = "", *, like: float | None = None) -> str:
    """A number with its unit, or a dash for a missing value: "41.5 ms", "1,230 ms", "–".

    It has three significant digits, or the decimals of three significant digits of `like`, so that the numbers of one
    chart are comparable.
    """
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value if like is None or like == 0 else like)
    decimals = 0 if size >= 99.95 or size == 0 else min(6, 2 - math.floor(math.log10(size)))
    shown = (f"{value:,.{decimals}f}" if abs(value) < _LARGE else f"{value:.2e}").replace("-", "−")
    return f"{shown}{'' if unit == '%' else ' '}{unit}" if unit else shown


def bars(
    labels: Sequence[str],
    series: Mapping[str, Sequence[Value]],
    *,
    unit: str = "",
    low: Sequence[Value] | None = None,
    high: Sequence[Value] | None = None,
    strong: Sequence[int] = (),
    line: tuple[float, str] | None = None,
) -> Chart:
    """A chart of horizontal bars from 0, one for each label and series.

    unit: written after each value, such as "ms".
    low, high: ends of the interval of each bar of the first series.
    strong: numbers of the highlighted labels.
    line: a reference value for the bars, and its name.
    """
    rows, values = _series(labels, series)
    ends = [[_finite(value) for value in each or [None] * len(rows)] for each in (low, high)]
    top = max([*_known([v for column in (*values.values(), *ends) for v in column]), line[0] if line else 0.0]) or 1.0
    many = max(1, len(values))

    def paint(axes: Axes, size: _Size) -> None:
        _name_rows(axes, rows, many, size, strong)
        for place, (name, column) in enumerate(values.items()):
            y = [row * (many + 0.5) + place for row in range(len(rows))]
            colours = [_STRONG if row in strong and many == 1 else _SERIES[place % 7] for row in range(len(rows))]
            lengths = [max(0.0, value or 0.0) / top for value in column]
            around: Any = None
            if place == 0 and low is not None and high is not None:
                around = [[0.0 if end is None else max(0.0, sign * (end / top - length))
                           for end, length in zip(each, lengths, strict=True)]
                          for sign, each in zip((-1, 1), ends, strict=True)]  # fmt: skip
            how: Any = {"xerr": around, "ecolor": _INK, "capsize": 3} if around else {}
            drawn = axes.barh(y, lengths, height=0.85, color=colours, label=name, **how)
            shown = axes.bar_label(drawn, [number(value, unit, like=top) for value in column], padding=6)
            for row, text in enumerate(shown):
                text.set_fontweight("bold" if row in strong else "normal")
        if line is not None:
            axes.axvline(line[0] / top, color=_INK, linewidth=1, linestyle=(0, (3, 3)), label=clean(line[1], 40))

    height = _rows_height(len(rows), many)
    return _chart(height, paint, _table_in_words(rows, values, unit), legend=many > 1 or line is not None)


def heat_map(
    rows: Sequence[str],
    times: Sequence[float],
    values: Sequence[Sequence[Value]],
    *,
    marks: Sequence[Mark] = (),
) -> Chart:
    """A heat map of values[row][time], 0 to 1, as colours from dark to bright; missing values are blank.

    times: the start of each column in seconds, ascending; columns are drawn equally wide. marks: lines at times, with
    names if there is room. Raises ValueError without rows or times, or if their numbers do not match the values.
    """
    if not rows or not times or len(values) != len(rows) or any(len(row) != len(times) for row in values):
        raise ValueError(f"a heat map of {len(rows)} rows and {len(times)} times needs as many values, and one of each")
    names = [clean(row, 60) for row in rows]
    cells = [[math.nan if (cell := _finite(value)) is None else min(1.0, max(0.0, cell)) for value in row]
             for row in values]  # fmt: skip
    span = (times[0], times[-1] + ((times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 1.0))
    thickness = 24 if len(rows) <= 24 else max(14, 600 // len(rows))

    def paint(axes: Axes, size: _Size) -> None:
        image = axes.imshow(cells, cmap="viridis", vmin=0, vmax=1, interpolation="none", aspect="auto",
                            extent=(*span, len(names), 0.0))  # fmt: skip
        for row in range(1, len(names)):
            axes.axhline(row, color=_SURFACE, linewidth=1)
        axes.set_xlabel("seconds", loc="right")
        axes.xaxis.set_major_formatter(lambda value, _: _tick(value))
        axes.locator_params(axis="x", nbins=size.ticks)
        axes.spines["left"].set_visible(False)
        places = range(0, len(names), -(-(size.font + 2) // thickness))
        axes.set_yticks([place + 0.5 for place in places], [clean(names[place], size.names) for place in places])
        shown, room = list[Mark](), 2 * size.font * (span[1] - span[0]) / size.width
        for mark in marks:
            axes.axvline(mark.at, color=_INK, linewidth=1, zorder=3)
            if not shown or mark.at - shown[-1].at >= 1.5 * room:
                shown.append(mark)
        if shown:
            above = axes.secondary_xaxis("top")
            above.spines["top"].set_visible(False)
            above.set_xticks([mark.at for mark in shown], [clean(mark.label, 20) for mark in shown], rotation=90)
        axes.set_xlim(*span)
        scale = axes.figure.colorbar(image, ax=axes, location="bottom", aspect=12, shrink=0.25, anchor=(0, 1), pad=0.03)
        scale.set_ticks([0, 1], labels=["0 %", "100 %"])
        scale.outline.set_visible(False)
        if scale.solids is not None:
            scale.solids.set_rasterized(True)

    def mean(row: list[float]) -> str:
        known = [cell for cell in row if not math.isnan(cell)]
        return number(100 * sum(known) / len(known) if known else None, "%")

    means = "; ".join(f"{name} {mean(row)}" for name, row in zip(names, cells, strict=True))
    longest = max((len(clean(mark.label, 20)) for mark in marks), default=0)
    return _chart(len(names) * thickness + 110 + 9 * longest, paint, f"means: {means}")


def require_charts() -> None:
    """Check for matplotlib and Jinja2. Raises MissingExtraError if one is not installed."""
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(error.name or "matplotlib", "report", "reports with charts") from error


def svg_image(chart: Chart) -> str:
    """The wide drawing of a chart as a separate SVG document with its colours, for a Markdown page."""
    head, _, drawing = chart.wide.partition(">")
    width, height = re.findall(r"[\d.]+", head.partition('viewBox="')[2])[2:4]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="{width}" '
        f'height="{height}" viewBox="0 0 {width} {height}" style="color: var(--ink)">'
        f"<title>{escape(clean(chart.alt, 300))}</title><style>{COLOURS}</style>"
        f'<rect width="{width}" height="{height}" fill="var(--surface)"/>{drawing}\n'
    )


def clean(text: object, most: int = 300) -> str:
    """Make untrusted text safe to show: control characters are escaped, and long texts lose their middle."""
    whole = str(text)
    if len(whole) > 4 * most:  # escapes only make the text longer
        whole = shortened(whole, 4 * most)
    return shortened(_NO_TEXT.sub("\ufffd", printable(whole)), most)


# --- parts of charts ------------------------------------------------------------------------------------------------
def _chart(height: int, paint: Callable[[Axes, _Size], None], alt: str, legend: bool = False) -> Chart:
    """Draw a chart in both widths. height: pixels without the legend."""
    alt = clean(alt, _ALT)
    wide, narrow = (_draw(height, paint, alt, legend, size) for size in _SIZES)
    return Chart(wide, narrow, alt)


def _draw(height: int, paint: Callable[[Axes, _Size], None], alt: str, legend: bool, size: _Size) -> str:
    require_charts()
    import matplotlib
    from matplotlib.figure import Figure

    salt = hashlib.blake2b(f"{alt} {size}".encode(), digest_size=8).hexdigest()
    settings: Any = {k: v for k, v in matplotlib.rcParamsDefault.items() if not k.startswith(_NO_SETTINGS)} | _SETTINGS
    settings |= dict.fromkeys(("font.size", "axes.labelsize", "xtick.labelsize", "ytick.labelsize"), size.font)
    settings |= {"legend.fontsize": size.font, "svg.hashsalt": salt}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # the browser has other fonts
        warnings.filterwarnings("ignore", "constrained_layout not applied")
        figure = Figure(dpi=72, facecolor="none", layout="constrained")
        axes = figure.subplots()
        paint(axes, size)
        handles, names = axes.get_legend_handles_labels() if legend else ([], [])
        longest = max([10, *map(len, names)])
        columns = max(1, size.width // (size.font * (4 + longest) * 7 // 10))
        figure.set_size_inches(size.width / 72, (height - (-len(names) // columns) * (size.font + 8)) / 72)
        if names:
            shown = [clean(name, 36) for name in names]
            figure.legend(handles, shown, loc="outside upper left", ncols=columns)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    drawing = file.getvalue().partition("<svg")[2].partition(">")[2]
    drawing = _PLACEHOLDER.sub(lambda match: _VARIABLES[match[0]], _NEEDLESS.sub("", drawing))
    width, tall = (f"{72 * inches:g}" for inches in figure.get_size_inches())
    described = f'viewBox="0 0 {width} {tall}" width="{width}" role="img" aria-label="{escape(alt)}"'
    return f"<svg {described}>{drawing.strip()}"


def _name_rows(axes: Axes, names: Sequence[str], many: int, size: _Size, strong: Sequence[int] = ()) -> None:
    """Write the names of rows next to their bars. many: number of bars per row."""
    step = many + 0.5
    axes.set_xlim(0, 1)
    axes.set_ylim(max(1, len(names)) * step - 0.6, -0.6)
    axes.set_xticks([])
    middles = [row * step + (many - 1) / 2 for row in range(len(names))]
    axes.set_yticks(middles, [clean(name, size.names) for name in names])
    for row in strong:
        axes.get_yticklabels()[row].set_fontweight("bold")


def _rows_height(rows: int, many: int) -> int:
    return max(1, rows) * round((many + 0.8) * _ROW) + 12


def _tick(value: float) -> str:
    return (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}").replace("-", "−")


def _finite(value: Value) -> Value:
    return None if value is None or not math.isfinite(value) else float(value)


def _known(values: Sequence[Value]) -> list[float]:
    return [value for value in values if value is not None]


def _series(labels: Sequence[str], series: Mapping[str, Sequence[Value]]) -> tuple[list[str], dict[str, list[Value]]]:
    """Make labels and series safe to draw. Raises ValueError for a series without one value per label."""
    for name, column in series.items():
        if len(column) != len(labels):
            raise ValueError(f"{name}: {len(column)} values, expected one for each of {len(labels)} labels")
    values = {clean(name, 60): [_finite(value) for value in column] for name, column in series.items()}
    return [clean(label, 60) for label in labels], values


def _table_in_words(rows: Sequence[str], series: Mapping[str, Sequence[Value]], unit: str) -> str:
    """The values as text: "step: added 20.0 ms, if free 0 ms; copy: …"."""
    return "; ".join(
        f"{row}: " + ", ".join(f"{name} {number(column[i], unit)}".strip() for name, column in series.items())
        for i, row in enumerate(rows)
    )
