"""Charts of a report: bars, stacked bars, points, heat maps and lines, drawn by matplotlib, each in two widths.

A chart is an SVG element for the middle of a page. Its text stays text, so that it can be searched, selected and read
aloud; its colours are CSS variables of the page, which knows whether it is light or dark: matplotlib draws with
placeholders. No state of pyplot and no settings of the user take part, and the same values always give the same bytes.

Values that are None or not finite are missing, and shown as such. Names come from anywhere and are cut to fit. Series
differ in place, line or marker too, not in colour alone.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any, TypeAlias
from xml.etree import ElementTree

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
    "lines",
    "number",
    "require_charts",
    "stacked_bars",
    "svg_image",
]

Value: TypeAlias = float | None

STYLE = files("packer.tools.report").joinpath("style.css").read_text("utf-8")
COLOURS = STYLE.partition("/* --- the page --- */")[0]
_ALT = 1500
_LARGE = 1e10
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (9, 3)), (0, (3, 1, 1, 1, 1, 1)))
_INK, _MUTED, _GRID, _SURFACE, _STRONG = "#000001", "#000002", "#000003", "#000004", "#000005"
_SERIES = ("#000011", "#000012", "#000013", "#000014", "#000015", "#000016", "#000017")
_VARIABLES = {_INK: "currentColor", _MUTED: "var(--muted)", _GRID: "var(--grid)", _SURFACE: "var(--surface)"}
_VARIABLES |= {_STRONG: "var(--strong)"} | {colour: f"var(--series-{i})" for i, colour in enumerate(_SERIES, 1)}
_PLACEHOLDER = re.compile("|".join(_VARIABLES))
_REFERENCE = re.compile(r"#([A-Za-z_][\w.-]*)")
_NO_TEXT = re.compile("[\ufffe\uffff]")  # characters that XML does not have, beyond those that `printable` escapes
# Settings that are not about drawing; setting them would start a user interface or give a warning.
_NO_SETTINGS = ("backend", "interactive", "toolbar", "webagg", "tk.", "date.epoch", "timezone", "figure.max_open")
_SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "packer",
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
    "grid.color": _GRID,
    "xtick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.major.size": 0,
    "xtick.labelcolor": _MUTED,
    "ytick.labelcolor": _INK,
    "legend.frameon": False,
}


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing in two widths, of which the page shows the one that fits.

    wide, narrow: SVG elements. alt: what the chart says, for those who do not see it.
    """

    wide: str
    narrow: str
    alt: str


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that began at a time, as a rung of a ladder or a training step."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class _Size:
    """width: pixels; a phone shows a narrow chart a little larger, a page at 400 % a little smaller. names: the
    longest that fits, in characters."""

    width: int
    font: int
    names: int
    is_narrow: bool = False


_WIDE, _NARROW = _Size(820, 13, 36), _Size(340, 14, 22, True)
_ROW = 18  # pixels of a bar with the space around it
_LANES = 6


def number(value: Value, unit: str = "", *, like: float | None = None) -> str:
    """A number and its unit; a dash for a missing value: "41.5 ms", "1,230 ms", "–".

    Three digits, or as many decimals as three digits of `like` have, so that numbers of one chart compare.
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
    """Horizontal bars from 0, one for each label, or a group of them where there are several series.

    unit: as "ms"; written after each value.
    low, high: ends of the interval of each bar of the first series.
    strong: numbers of the labels to look at.
    line: a value that the bars are to be compared with, and its name.
    """
    rows, values = _series(labels, series)
    lows, highs = ([_finite(value) for value in ends or [None] * len(rows)] for ends in (low, high))
    known = _known([value for column in (*values.values(), highs) for value in column])
    top = max([*known, line[0] if line else 0.0]) or 1.0

    def paint(axes: Axes, size: _Size) -> None:
        places = _row_places(axes, rows, len(values), size, strong)
        for place, (name, column) in enumerate(values.items()):
            y = [row + place for row in places]
            colours = [_STRONG if row in strong and len(values) == 1 else _SERIES[place % 7] for row in range(len(y))]
            lengths = [max(0.0, value or 0.0) / top for value in column]
            axes.barh(y, lengths, height=0.85, color=colours, label=name)
            ends = list(lengths)
            for row, (start, end) in enumerate(zip(lows, highs, strict=True)):
                if place == 0 and start is not None and end is not None:
                    reach = [max(0.0, start) / top, max(0.0, end) / top]
                    axes.plot(reach, [y[row]] * 2, color=_INK, linewidth=1.5, marker="|", markersize=7)
                    ends[row] = max(ends[row], *reach)
            for row, end in enumerate(ends):
                weight = "bold" if row in strong else "normal"
                _write(axes, number(column[row], unit, like=top), (end, y[row]), (6, 0), size, weight=weight)
        if line is not None:
            axes.axvline(line[0] / top, color=_INK, linewidth=1, linestyle=(0, (3, 3)))
            where = (line[0] / top, 1.0)
            _write(axes, clean(line[1], 40), where, (0, 8), size, x_transform=True, ha="center")

    height = _rows_height(len(rows), len(values)) + (24 if line else 0)
    return _both(height, paint, _table_in_words(rows, values, unit), list(values) if len(values) > 1 else [])


def stacked_bars(
    labels: Sequence[str], series: Mapping[str, Sequence[Value]], *, unit: str = "", total: bool = True
) -> Chart:
    """A horizontal bar for each label, of the parts that the series give. total: write the sum at its end."""
    rows, values = _series(labels, series)
    sums = [sum(max(0.0, column[row] or 0.0) for column in values.values()) for row in range(len(rows))]
    top = max([*sums, 0.0]) or 1.0

    def paint(axes: Axes, size: _Size) -> None:
        places = _row_places(axes, rows, 1, size)
        left = [0.0] * len(rows)
        for place, (name, column) in enumerate(values.items()):
            widths = [max(0.0, value or 0.0) / top for value in column]
            axes.barh(places, widths, height=0.85, left=left, color=_SERIES[place % 7], edgecolor=_SURFACE, label=name)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        for row, value in enumerate(sums if total else ()):
            _write(axes, number(value, unit, like=top), (left[row], places[row]), (6, 0), size)

    return _both(_rows_height(len(rows), 1), paint, _table_in_words(rows, values, unit), list(values))


def lines(
    x: Sequence[float],
    series: Mapping[str, Sequence[Value]],
    *,
    x_label: str,
    y_label: str,
    from_zero: bool = True,
    log_x: bool = False,
    marks: Sequence[Mark] = (),
) -> Chart:
    """A line for each series over the same x; it is broken where a value is missing.

    x: rising numbers. from_zero: y begins at 0. log_x: x by powers, with a tick at each of few values. marks: vertical
    lines at places of x, with names; not with log_x.
    """
    _, values = _series([str(place) for place in x], series)
    span = (x[0], x[-1]) if x else (0.0, 1.0)

    def paint(axes: Axes, size: _Size) -> None:
        for place, (name, column) in enumerate(values.items()):
            axes.plot(
                list(x),
                [math.nan if value is None else value for value in column],
                color=_SERIES[place % 7],
                linestyle=_DASHES[place % len(_DASHES)],
                linewidth=2,
                marker=_MARKERS[place % 7] if len(x) <= 24 else "",
                markersize=8,
                markeredgecolor=_SURFACE,
                label=name,
            )
        if log_x:
            axes.set_xscale("log")
        if from_zero:
            known = _known([value for column in values.values() for value in column])
            axes.set_ylim(min([0.0, *known]), 1.06 * max([0.0, *known]) or 1.0)
        _label_axes(axes, size, x_label, log_x)
        if log_x and len(x) <= 8:
            axes.set_xticks(list(x))
            axes.set_xticks([], minor=True)
        axes.grid(linewidth=1)
        axes.set_ylabel(clean(y_label, 40), fontsize=size.font)
        _draw_marks(axes, () if log_x else marks, span, size)

    shown = "; ".join(
        f"{name} from {number(known[0])} to {number(known[-1])}, at most {number(max(known))}"
        for name, column in values.items()
        if (known := _known(column))
    )
    return _both(360, paint, f"{y_label} against {x_label}: {shown}", list(values) if len(values) > 1 else [])


def heat_map(
    rows: Sequence[str],
    times: Sequence[float],
    values: Sequence[Sequence[Value]],
    *,
    x_label: str = "seconds",
    marks: Sequence[Mark] = (),
) -> Chart:
    """values[row][time], 0 to 1, as colours from dark to bright; missing ones are left open.

    times: where each column begins, rising; columns are drawn equally wide. marks: lines at times, with names.
    Raises ValueError without rows or times, or where their numbers are not those of the values.
    """
    if not rows or not times or len(values) != len(rows) or any(len(row) != len(times) for row in values):
        raise ValueError(f"a heat map of {len(rows)} rows and {len(times)} times needs as many values, and one of each")
    names = [clean(row, 60) for row in rows]
    cells = [
        [None if (cell := _finite(value)) is None else min(1.0, max(0.0, cell)) for value in row] for row in values
    ]
    span = (times[0], times[-1] + ((times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 1.0))
    thickness = 24 if len(rows) <= 24 else max(14, 600 // len(rows))

    def paint(axes: Axes, size: _Size) -> None:
        shown = [[math.nan if cell is None else cell for cell in row] for row in cells]
        image = axes.imshow(
            shown, cmap="viridis", vmin=0, vmax=1, interpolation="none", aspect="auto", extent=(*span, len(names), 0.0)
        )
        for row in range(1, len(names)):
            axes.axhline(row, color=_SURFACE, linewidth=1)
        _label_axes(axes, size, x_label)
        axes.spines["left"].set_visible(False)
        places = range(0, len(names), -(-(size.font + 2) // thickness))
        axes.set_yticks(
            [place + 0.5 for place in places], [clean(names[place], 12 if size.is_narrow else 36) for place in places]
        )
        _draw_marks(axes, marks, span, size)
        scale = axes.figure.colorbar(image, ax=axes, location="top", aspect=12, shrink=0.25, anchor=(0, 1), pad=0.03)
        scale.set_ticks([0, 1], labels=["0 %", "100 %"], fontsize=size.font)
        scale.outline.set_visible(False)
        if scale.solids is not None:
            scale.solids.set_rasterized(True)

    means = "; ".join(
        f"{name} {number(100 * sum(known) / len(known) if (known := _known(row)) else None, '%')}"
        for name, row in zip(names, cells, strict=True)
    )
    lanes = min(_LANES, len(marks)) * (_NARROW.font + 4)
    return _both(len(names) * thickness + 110 + lanes, paint, f"means: {means}")


def require_charts() -> None:
    """Raises MissingExtraError where matplotlib or Jinja2 is not installed."""
    _matplotlib()
    try:
        import jinja2  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("jinja2", "report", "reports as pages") from error


def svg_image(chart: Chart) -> str:
    """The wide drawing of a chart as a document of its own, for a page in Markdown, with its colours."""
    root = ElementTree.fromstring(chart.wide)
    _, _, width, height = root.attrib["viewBox"].split()
    del root.attrib["role"], root.attrib["aria-label"]
    root.attrib |= {"xmlns": "http://www.w3.org/2000/svg", "height": height, "style": "color: var(--ink)"}
    title, style = ElementTree.Element("title"), ElementTree.Element("style")
    title.text, style.text = clean(chart.alt, 300), COLOURS
    surface = ElementTree.Element("rect", {"width": width, "height": height, "fill": "var(--surface)"})
    root[:] = [title, style, surface, *root]
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def clean(text: object, most: int = 300) -> str:
    """Foreign text made safe to show: control characters as escapes, the middle of long ones left out."""
    whole = str(text)
    if len(whole) > 4 * most:  # escapes only make it longer
        whole = shortened(whole, 4 * most)
    return shortened(_NO_TEXT.sub("\ufffd", printable(whole)), most)


# --- parts of charts
def _both(height: int, paint: Callable[[Axes, _Size], None], alt: str, legend: Sequence[str] = ()) -> Chart:
    """The chart in both widths. height: pixels without the legend, whose names are those of series."""
    alt = clean(alt, _ALT)
    wide, narrow = (_draw(height, paint, alt, legend, size) for size in (_WIDE, _NARROW))
    return Chart(wide, narrow, alt)


def _draw(height: int, paint: Callable[[Axes, _Size], None], alt: str, legend: Sequence[str], size: _Size) -> str:
    matplotlib = _matplotlib()
    from matplotlib.figure import Figure

    columns = max(1, size.width // (size.font * (4 + max(map(len, legend), default=0)) * 7 // 10))
    rows = -(-len(legend) // columns)
    settings = {k: v for k, v in matplotlib.rcParamsDefault.items() if not k.startswith(_NO_SETTINGS)} | _SETTINGS
    settings |= dict.fromkeys(("font.size", "xtick.labelsize", "ytick.labelsize", "legend.fontsize"), size.font)
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # the browser has other fonts
        warnings.filterwarnings("ignore", "constrained_layout not applied")
        figsize = (size.width / 72, (height + rows * (size.font + 8)) / 72)
        figure = Figure(figsize=figsize, dpi=72, facecolor="none", layout="constrained")
        axes = figure.subplots()
        paint(axes, size)
        if legend:
            handles, names = axes.get_legend_handles_labels()
            figure.legend(handles, [clean(name, 36) for name in names], loc="outside upper left", ncols=columns)
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _inline(file.getvalue(), alt)


def _row_places(axes: Axes, names: Sequence[str], many: int, size: _Size, strong: Sequence[int] = ()) -> list[float]:
    """Where the first bar of each label is. Labels are beside their bars, or above them where it is narrow."""
    step = many + (1.3 if size.is_narrow else 0.5)
    places = [row * step for row in range(len(names))]
    axes.set_xlim(0, 1)
    axes.set_ylim(max(1, len(names)) * step - 0.6, -1.4 if size.is_narrow else -0.6)
    axes.set_xticks([])
    middles = [place + (many - 1) / 2 for place in places]
    shown = [clean(name, size.names) for name in names]
    axes.set_yticks(middles, ["" for _ in shown] if size.is_narrow else shown)
    for row, name in enumerate(shown):
        weight = "bold" if row in strong else "normal"
        if size.is_narrow:
            _write(axes, name, (0, places[row] - 0.95), (0, 0), size, weight=weight)
        else:
            axes.get_yticklabels()[row].set_fontweight(weight)
    return places


def _rows_height(rows: int, many: int) -> int:
    return max(1, rows) * round((many + 1.3) * _ROW) + 12


def _write(
    axes: Axes,
    text: str,
    where: tuple[float, float],
    offset: tuple[float, float],
    size: _Size,
    *,
    x_transform: bool = False,
    **options: Any,
) -> None:
    """Text on a plate of the page's colour, so that lines do not cross it. offset: pixels, right and up.

    x_transform: y is in shares of the height.
    """
    plate = {"facecolor": _SURFACE, "edgecolor": "none", "pad": 1}
    coordinates: Any = axes.get_xaxis_transform() if x_transform else "data"
    axes.annotate(
        text, where, offset, xycoords=coordinates, textcoords="offset points", fontsize=size.font, va="center_baseline",
        zorder=4, bbox=plate, annotation_clip=False, **options,
    )  # fmt: skip


def _label_axes(axes: Axes, size: _Size, x_label: str, log_x: bool = False) -> None:
    axes.set_xlabel(clean(x_label, 40), loc="right", fontsize=size.font)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: _tick(value))
        axis.set_minor_formatter(lambda value, _: "")
    if not log_x:
        axes.locator_params(axis="x", nbins=4 if size.is_narrow else 8)
    axes.locator_params(axis="y", nbins=6)


def _draw_marks(axes: Axes, marks: Sequence[Mark], span: tuple[float, float], size: _Size) -> None:
    """Lines at times, with names above the axes in as many lanes as it takes; those without room have none."""
    if not marks:
        return
    axes.set_xlim(*span)
    pixels = 0.6 * size.width / ((span[1] - span[0]) or 1.0)  # a time has, at least
    ends = [-math.inf] * _LANES
    for mark in marks:
        axes.axvline(mark.at, color=_INK, linewidth=1, zorder=3)
        label = clean(mark.label, 20)
        width, at = 0.75 * size.font * len(label), (mark.at - span[0]) * pixels
        left = at - width if at > 0.3 * size.width else at
        lane = next((lane for lane, end in enumerate(ends) if end <= left), None)
        if lane is not None:
            ends[lane] = left + width + 8
            side = "right" if left < at else "left"
            offset = (-2 if left < at else 2, 10 + lane * (size.font + 4))
            _write(axes, label, (mark.at, 1.0), offset, size, x_transform=True, ha=side)


def _tick(value: float) -> str:
    return (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}").replace("-", "−")


def _finite(value: Value) -> Value:
    return None if value is None or not math.isfinite(value) else float(value)


def _series(labels: Sequence[str], series: Mapping[str, Sequence[Value]]) -> tuple[list[str], dict[str, list[Value]]]:
    """Labels and series made safe to draw. Raises ValueError where a series has not a value for each label."""
    for name, column in series.items():
        if len(column) != len(labels):
            raise ValueError(f"{name}: {len(column)} values, expected one for each of {len(labels)} labels")
    values = {clean(name, 60): [_finite(value) for value in column] for name, column in series.items()}
    return [clean(label, 60) for label in labels], values


def _known(values: Sequence[Value]) -> list[float]:
    return [value for value in values if value is not None]


def _table_in_words(rows: Sequence[str], series: Mapping[str, Sequence[Value]], unit: str) -> str:
    """ "step: added 20.0 ms, if free 0 ms; copy: …"."""
    return "; ".join(
        f"{row}: " + ", ".join(f"{name} {number(column[i], unit)}".strip() for name, column in series.items())
        for i, row in enumerate(rows)
    )


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtraError("matplotlib", "report", "drawing charts") from error
    return matplotlib


def _inline(document: bytes, alt: str) -> str:
    """The element of a page that an SVG file is: without metadata and styles, its names its own."""
    root = ElementTree.fromstring(document)
    prefix = "c" + hashlib.blake2b(document, digest_size=5).hexdigest()
    for element in root.iter():
        element.tag = _local(element.tag)
        element[:] = [child for child in element if _local(child.tag) not in ("metadata", "style")]
        element.tail = None
        if element.tag != "text":
            element.text = None
        attributes = {_local(key): value for key, value in element.attrib.items()}
        for key, value in attributes.items():
            if key == "id":
                attributes[key] = f"{prefix}-{value}"
            elif key == "style":
                attributes[key] = _PLACEHOLDER.sub(lambda match: _VARIABLES[match[0]], value)
            elif value.startswith(("#", "url(")):
                attributes[key] = _REFERENCE.sub(rf"#{prefix}-\1", value)
        element.attrib = attributes
    size = root.attrib.pop("width").removesuffix("pt"), root.attrib.pop("height").removesuffix("pt")
    root.attrib = {"viewBox": f"0 0 {size[0]} {size[1]}", "width": size[0], "role": "img", "aria-label": alt}
    return ElementTree.tostring(root, encoding="unicode")


def _local(tag: str) -> str:
    return tag.rpartition("}")[2]
