"""Charts of a report: bars, stacked bars, points, heat maps and lines, each in two widths.

Values that are None or not finite are missing, and shown as such. Names come from anywhere and are cut to fit. Series
differ in place, line or marker too, not in colour alone; the colours are of M. Okabe and K. Ito, "Color Universal
Design", darkened where they are too faint on white.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar
from xml.etree import ElementTree

from cache.errors import MissingExtraError
from cache.messages import printable, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "FONT_FAMILY", "POLICY", "RAMP", "STYLE", "Chart", "clean", "require_charts", "text_width"]

Value: TypeAlias = float | None
_Frame = TypeVar("_Frame", "Rows", "Plot")

_ALT = 1500
_LARGE = 1e10
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (9, 3)), (0, (3, 1, 1, 1, 1, 1)))


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
    reaches = _known([value for found in (*values.values(), highs) for value in found])
    top = max([*reaches, line[0] if line else 0.0]) or 1.0

    def paint(figure: Figure, frame: Rows) -> None:
        axes = frame.axes(figure, top)
        for place, found in enumerate(values.values()):
            for row, value in enumerate(found):
                y, reach, is_strong = frame.bar_at(row, place), value or 0.0, row in strong
                colour = STRONG if is_strong and len(values) == 1 else SERIES[place % len(SERIES)]
                _bar(axes, y, 0.0, reach, frame.thick, colour)
                start, end = lows[row], highs[row]
                if place == 0 and start is not None and end is not None:
                    _interval(axes, y, start, end, frame.thick)
                    reach = max(reach, end)
                frame.write_value(axes, reach, y, number(value, unit, like=top), strong=is_strong)
        frame.write_labels(axes, strong)
        if line is not None:
            frame.draw_reference(axes, line[0], clean(line[1], 60))

    texts = [number(value, unit, like=top) for found in values.values() for value in found]
    legend = list(values) if len(values) > 1 else []
    return _both(
        lambda narrow: Rows(narrow, rows, many=len(values), texts=texts, has_line=line is not None),
        paint,
        _table_in_words(rows, values, unit),
        legend,
    )


def stacked_bars(
    labels: Sequence[str], series: Mapping[str, Sequence[Value]], *, unit: str = "", total: bool = True
) -> Chart:
    """A horizontal bar for each label, of the parts that the series give. total: write the sum at its end."""
    rows, values = _series(labels, series)
    sums = [sum(max(0.0, found[row] or 0.0) for found in values.values()) for row in range(len(rows))]
    top = max([*sums, 0.0]) or 1.0

    def paint(figure: Figure, frame: Rows) -> None:
        axes = frame.axes(figure, top)
        for row in range(len(rows)):
            left, y = 0.0, frame.bar_at(row, 0)
            for place, found in enumerate(values.values()):
                width = max(0.0, found[row] or 0.0)
                _bar(axes, y, left, width, frame.thick, SERIES[place % len(SERIES)])
                left += width
            if total:
                frame.write_value(axes, left, y, number(left, unit, like=top))
        frame.write_labels(axes)

    texts = [number(value, unit, like=top) for value in sums] if total else []
    return _both(
        lambda narrow: Rows(narrow, rows, texts=texts), paint, _table_in_words(rows, values, unit), list(values)
    )


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
    is_sparse = len(x) <= 24

    def paint(figure: Figure, frame: Plot) -> None:
        axes = frame.axes(figure, x_label, y_label)
        for place, found in enumerate(values.values()):
            axes.plot(
                list(x),
                [math.nan if value is None else value for value in found],
                color=SERIES[place % len(SERIES)],
                linestyle=_DASHES[place % len(_DASHES)],
                linewidth=2,
                marker=_MARKERS[place % len(_MARKERS)] if is_sparse else "",
                markersize=8,
                markeredgecolor=SURFACE,
            )
        if log_x:
            axes.set_xscale("log")
        elif marks:
            axes.set_xlim(*span)
        if from_zero:
            known = _known([value for found in values.values() for value in found])
            axes.set_ylim(min([0.0, *known]), 1.06 * max([0.0, *known]) or 1.0)
        frame.ticks(axes, log_x=log_x, at=x if log_x and len(x) <= 8 else ())
        frame.draw_marks(axes)

    shown = "; ".join(
        f"{name} from {number(known[0])} to {number(known[-1])}, at most {number(max(known))}"
        for name, found in values.items()
        if (known := _known(found))
    )
    legend = list(values) if len(values) > 1 else []
    return _both(
        lambda narrow: Plot(narrow, marks=() if log_x else marks, span=span),
        paint,
        f"{y_label} against {x_label}: {shown}",
        legend,
    )


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

    def paint(figure: Figure, frame: Plot) -> None:
        axes = frame.map_axes(figure, x_label)
        shown = [[math.nan if cell is None else cell for cell in row] for row in cells]
        extent = (*span, len(names), 0.0)
        axes.imshow(shown, cmap="viridis", vmin=0, vmax=1, interpolation="none", aspect="auto", extent=extent)
        for row in range(1, len(names)):
            axes.axhline(row, color=SURFACE, linewidth=1)
        frame.ticks(axes)
        frame.draw_marks(axes)

    means = "; ".join(
        f"{name} {number(100 * sum(known) / len(known) if (known := _known(row)) else None, '%')}"
        for name, row in zip(names, cells, strict=True)
    )
    return _both(lambda narrow: Plot(narrow, rows=names, marks=marks, span=span), paint, f"means: {means}", scale=True)


# --- parts -----------------------------------------------------------------------------------------------------------
def _both(
    frame: Callable[[bool], _Frame],
    paint: Callable[[Figure, _Frame], None],
    alt: str,
    legend: Sequence[str] = (),
    *,
    scale: bool = False,
) -> Chart:
    """The chart in both widths. legend: names of series."""
    alt = clean(alt, _ALT)

    def drawn(size: _Frame) -> str:
        return draw(size.width, size.height, lambda figure: paint(figure, size), alt)

    return Chart(drawn(frame(False)), drawn(frame(True)), alt, tuple(legend), scale)


def _bar(axes: Axes, y: float, left: float, width: float, thick: float, colour: str) -> None:
    axes.barh([y], [width], height=thick, left=left, color=colour, edgecolor=SURFACE, linewidth=1)


def _interval(axes: Axes, y: float, low: float, high: float, thick: float) -> None:
    axes.plot([low, high], [y, y], color=INK, linewidth=1.5, solid_capstyle="butt")
    for end in (low, high):
        axes.plot([end, end], [y - thick / 4, y + thick / 4], color=INK, linewidth=1.5, solid_capstyle="butt")


def _finite(value: Value) -> Value:
    return None if value is None or not math.isfinite(value) else float(value)


def _series(labels: Sequence[str], series: Mapping[str, Sequence[Value]]) -> tuple[list[str], dict[str, list[Value]]]:
    """Labels and series made safe to draw. Raises ValueError where a series has not a value for each label."""
    for name, found in series.items():
        if len(found) != len(labels):
            raise ValueError(f"{name}: {len(found)} values, expected one for each of {len(labels)} labels")
    values = {clean(name, 60): [_finite(value) for value in found] for name, found in series.items()}
    return [clean(label, 60) for label in labels], values


def _known(values: Sequence[Value]) -> list[float]:
    return [value for value in values if value is not None]


def _table_in_words(rows: Sequence[str], series: Mapping[str, Sequence[Value]], unit: str) -> str:
    """ "step: added 20.0 ms, if free 0 ms; copy: …"."""
    return "; ".join(
        f"{row}: " + ", ".join(f"{name} {number(found[i], unit)}".strip() for name, found in series.items())
        for i, row in enumerate(rows)
    )


# --- The frames of charts: where labels, bars, axes and marks are, in pixels.
# A wide chart is for 820 pixels, a narrow one for 340, which a phone shows a little larger and a page at 400 % a little
# smaller. Room for text is estimated, on the safe side: browsers choose the fonts.
WIDE, NARROW = 820, 340
FONT, NARROW_FONT = 13, 14
Align: TypeAlias = Literal["left", "center", "right"]
_LANES = 6


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that began at a time, as a rung of a ladder or a training step."""

    at: float
    label: str


class Rows:
    """The frame of bars: labels beside them, or above them where it is narrow.

    many: bars of each label. texts: what is written at the ends of bars. has_line: a line with a name crosses them.
    """

    def __init__(
        self, narrow: bool, names: Sequence[str], *, many: int = 1, texts: Sequence[str] = (), has_line: bool = False
    ) -> None:
        self.narrow, self.names, self.many = narrow, names, many
        self.width, self.font = (NARROW, NARROW_FONT) if narrow else (WIDE, FONT)
        self.thick = 16
        self.head = self.font + 7 if narrow else 4
        self.row = self.head + many * (self.thick + 2) + (10 if narrow else 6)
        self.top = self.font + 14 if has_line else 2
        self.height = self.top + max(1, len(names)) * self.row + 2
        widest = max([text_width(name, self.font) for name in names], default=0.0)
        self.left = 1 if narrow else math.ceil(min(0.36 * self.width, widest + 14))
        self.right = 10 + max([text_width(text, self.font) for text in texts], default=0.0)
        self.scale = 1.0  # units of the axis in a pixel

    def axes(self, figure: Figure, top: float) -> Axes:
        """Axes from 0 to `top`; y is in pixels from the top."""
        inner = self.width - self.left - self.right
        axes = figure.add_axes((self.left / self.width, 0.0, inner / self.width, 1.0))
        axes.set_axis_off()
        axes.set_xlim(0, top)
        axes.set_ylim(self.height, 0)
        for row in range(len(self.names)):
            start = self.bar_at(row, 0) - self.thick / 2 - 2 if self.narrow else self.top + row * self.row
            end = self.bar_at(row, self.many - 1) + self.thick / 2 + 2 if self.narrow else start + self.row
            axes.plot([0, 0], [start, end], color=MUTED, linewidth=1, clip_on=False)
        self.scale = top / inner
        return axes

    def bar_at(self, row: int, place: int) -> float:
        """The middle of a bar."""
        return self.top + row * self.row + self.head + place * (self.thick + 2) + self.thick / 2

    def write_value(self, axes: Axes, x: float, y: float, text: str, *, strong: bool = False) -> None:
        self._write(axes, x + 6 * self.scale, y, text, strong=strong)

    def write_labels(self, axes: Axes, strong: Sequence[int] = ()) -> None:
        for row, name in enumerate(self.names):
            if self.narrow:
                y = self.top + row * self.row + self.font / 2 + 3
                self._write(axes, 0, y, fitted(name, self.width, self.font), strong=row in strong)
            else:
                y = (self.bar_at(row, 0) + self.bar_at(row, self.many - 1)) / 2
                shown = fitted(name, self.left - 12, self.font)
                self._write(axes, -8 * self.scale, y, shown, strong=row in strong, align="right")

    def draw_reference(self, axes: Axes, x: float, text: str) -> None:
        """A dashed line at x, with its name above it, all of which is inside."""
        axes.plot([x, x], [self.top - 5, self.height], color=INK, linewidth=1, dashes=(3, 3), clip_on=False)
        shown = fitted(text, self.width - 8, self.font)
        half = text_width(shown, self.font) / 2
        middle = min(max(self.left + x / self.scale, half), self.width - half)
        self._write(axes, (middle - self.left) * self.scale, self.font / 2 + 2, shown, align="center")

    def _write(self, axes: Axes, x: float, y: float, text: str, *, strong: bool = False, align: Align = "left") -> None:
        _write(axes, x, y, text, self.font, fontweight="bold" if strong else "normal", ha=align)


class Plot:
    """The frame of what has two axes.

    rows: the names of a heat map's. marks: what began when, within the span of x; their names are above the axes, in as
    many lanes as it takes.
    """

    def __init__(
        self, narrow: bool, *, rows: Sequence[str] = (), marks: Sequence[Mark] = (), span: tuple[float, float] = (0, 1)
    ) -> None:
        self.narrow, self.rows, self.marks, self.span = narrow, rows, marks, span
        self.width, self.font = (NARROW, NARROW_FONT) if narrow else (WIDE, FONT)
        self.line = self.font + 5
        self.row = 24 if len(rows) <= 24 else max(14, 600 // len(rows))
        self.left, self.right = (52, 14) if narrow else (64, 24)
        if rows:
            widest = max(text_width(row, self.font) for row in rows)
            self.left = math.ceil(min((0.3 if narrow else 0.25) * self.width, widest + 12))
        self.inner_width = self.width - self.left - self.right
        self.inner = len(rows) * self.row if rows else (230 if narrow else 300)
        self.lanes = self._lanes()
        self.above = 6 + (1 + max(self.lanes, default=-1)) * self.line + (0 if rows else self.line + 4)
        self.below = 2 * self.line + 12
        self.height = self.above + self.inner + self.below

    def _lanes(self) -> list[int]:
        """For the name of each mark the first lane, from the bottom, in which there is room for it; -1: nowhere."""
        span, ends, lanes = self.span, [-math.inf] * _LANES, list[int]()
        for mark in self.marks:
            x = self.inner_width * (mark.at - span[0]) / ((span[1] - span[0]) or 1.0)
            width = text_width(self._short(mark.label), self.font)
            x = min(x, self.inner_width + self.right - width)
            lane = next((lane for lane, end in enumerate(ends) if end <= x), -1)
            if lane >= 0:
                ends[lane] = x + width + 6
            lanes.append(lane)
        return lanes

    def _short(self, label: str) -> str:
        return fitted(clean(label, 24), self.inner_width / 2, self.font)

    def draw_marks(self, axes: Axes) -> None:
        span = self.span
        for mark, lane in zip(self.marks, self.lanes, strict=True):
            top = 1 + (lane + 0.5) * self.line / self.inner
            where = (mark.at - span[0]) / ((span[1] - span[0]) or 1.0)
            transform = axes.transAxes
            axes.plot(
                [where, where], [0, max(1.0, top)], transform=transform, color=INK, linewidth=1, clip_on=False, zorder=3
            )
            if lane >= 0:
                shown = self._short(mark.label)
                last = 1 + (self.right - text_width(shown, self.font)) / self.inner_width
                x = min(where + 4 / self.inner_width, last)
                _write(axes, x, top, shown, self.font, transform=transform)

    def axes(self, figure: Figure, x_label: str, y_label: str) -> Axes:
        axes = self.map_axes(figure, x_label)
        axes.grid(color=GRID, linewidth=1)
        axes.set_axisbelow(True)
        y = 1 + (self.above - self.font / 2 - 3) / self.inner
        axes.text(
            -self.left / self.inner_width, y, fitted(clean(y_label), self.width, self.font), transform=axes.transAxes,
            fontsize=self.font, color=MUTED, va="center_baseline",
        )  # fmt: skip
        return axes

    def map_axes(self, figure: Figure, x_label: str) -> Axes:
        width, height = self.width, self.height
        axes = figure.add_axes((self.left / width, self.below / height, self.inner_width / width, self.inner / height))
        axes.set_facecolor("none")
        for spine in axes.spines.values():
            spine.set_visible(False)
        label = fitted(clean(x_label), width - self.left, self.font)
        axes.set_xlabel(label, fontsize=self.font, color=MUTED, loc="right")
        return axes

    def ticks(self, axes: Axes, *, log_x: bool = False, at: Sequence[float] = ()) -> None:
        """Few enough ticks for the width; at: exactly these on the axis of x."""
        axes.tick_params(which="both", length=0, pad=6, labelsize=self.font, labelcolor=MUTED)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: tick(value))
            axis.set_minor_formatter(lambda value, _: "")
        if not log_x:
            axes.locator_params(axis="x", nbins=4 if self.narrow else 8)
        axes.locator_params(axis="y", nbins=6)
        if at:
            axes.set_xticks(list(at))
            axes.set_xticks([], minor=True)
        if self.rows:
            every = -(-(self.font + 2) // self.row)
            places = range(0, len(self.rows), every)
            names = [fitted(self.rows[place], self.left - 10, self.font) for place in places]
            axes.set_yticks([place + 0.5 for place in places], names)


def _write(axes: Axes, x: float, y: float, text: str, size: int, **options: Any) -> None:
    """Text on a plate of the page's colour, so that lines do not cross it."""
    plate = {"facecolor": SURFACE, "edgecolor": "none", "pad": 1}
    axes.text(x, y, text, fontsize=size, color=INK, va="center_baseline", zorder=4, bbox=plate, **options)


def fitted(text: str, room: float, size: float) -> str:
    """A text without its middle, if it is wider than `room`."""
    while len(text) > 3 and text_width(text, size) > room:
        text = clean(text, len(text) - 2 if "…" in text else len(text) - 1)
    return text


def tick(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace("-", "−")
    return f"{value:.3g}".replace("-", "−")


# --- One drawing by matplotlib as an SVG element for the middle of an HTML page.
# Text stays text, so that it can be searched, selected and read aloud. Colours become CSS variables of the page, which
# knows whether it is light or dark: matplotlib draws with the placeholders below. Numbers are pixels: a point is one.
# No state of pyplot and no settings of the user take part, and the same drawing always gives the same bytes.
INK, MUTED, GRID, SURFACE, STRONG = "#000001", "#000002", "#000003", "#000004", "#000005"
SERIES = ("#000011", "#000012", "#000013", "#000014", "#000015", "#000016", "#000017")
_COLOURS = {INK: "currentColor", MUTED: "var(--muted)", GRID: "var(--grid)", SURFACE: "var(--surface)"}
_COLOURS |= {STRONG: "var(--strong)"} | {colour: f"var(--series-{i})" for i, colour in enumerate(SERIES, 1)}
_MARKER = re.compile("|".join(_COLOURS))
_REFERENCE = re.compile(r"#([A-Za-z_][\w.-]*)")
_SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "packer", "text.parse_math": False, "font.family": ["DejaVu Sans"]}
# Settings that are not about drawing; setting them would start a user interface or give a warning.
_NO_SETTINGS = ("backend", "interactive", "toolbar", "webagg", "tk.", "date.epoch", "timezone", "figure.max_open")
_NARROW, _WIDE = frozenset(" ijlftrI.,:;'|!()[]/-"), frozenset("mwMW@%…—")
_NO_TEXT = re.compile("[\ufffe\uffff]")  # characters that XML does not have, beyond those that `printable` escapes


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing in two widths, of which the page shows the one that fits.

    wide, narrow: SVG elements. alt: what the chart says, for those who do not see it. legend: names of the series, in
    the order of the colours. scale: whether it has colours from 0 to 100 %, as a heat map.
    """

    wide: str
    narrow: str
    alt: str
    legend: tuple[str, ...] = ()
    scale: bool = False


def require_charts() -> None:
    """Raises MissingExtraError where matplotlib is not installed."""
    _matplotlib()


def draw(width: int, height: int, paint: Callable[[Figure], None], alt: str) -> str:
    """What `paint` draws on a figure of so many pixels, as an SVG element. Raises MissingExtraError."""
    matplotlib = _matplotlib()
    from matplotlib.figure import Figure

    settings = {k: v for k, v in matplotlib.rcParamsDefault.items() if not k.startswith(_NO_SETTINGS)} | _SETTINGS
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # the browser has other fonts
        figure = Figure(figsize=(width / 72, height / 72), dpi=72, facecolor="none")
        paint(figure)
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _inline(file.getvalue(), alt)


def clean(text: object, most: int = 300) -> str:
    """Foreign text made safe to show: control characters as escapes, the middle of long ones left out."""
    whole = str(text)
    if len(whole) > 4 * most:  # escapes only make it longer
        whole = shortened(whole, 4 * most)
    return shortened(_NO_TEXT.sub("\ufffd", printable(whole)), most)


def text_width(text: str, size: float) -> float:
    """About how wide a text is at most, in pixels: as in DejaVu Sans, which is wider than most, in bold."""
    return size * sum(map(_character_width, text))


def _character_width(character: str) -> float:
    """In widths of the letter M or less."""
    if character in _NARROW:
        return 0.46
    if character in _WIDE or ord(character) >= 0x1100:
        return 1.1
    return 0.72 if character.islower() or character.isdecimal() else 0.85


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtraError("matplotlib", "report", "drawing charts") from error
    return matplotlib


def _inline(document: bytes, alt: str) -> str:
    """The element of a page that an SVG file is: without metadata, styles, fonts and names that others may have."""
    root = ElementTree.fromstring(document)
    prefix = "c" + hashlib.blake2b(document, digest_size=5).hexdigest()
    used = {
        name
        for element in root.iter()
        for key, value in element.attrib.items()
        if key.endswith("href") or value.startswith("url(")
        for name in _REFERENCE.findall(value)
    }
    names = {name: f"{prefix}-{number}" for number, name in enumerate(sorted(used))}
    for parent in root.iter():
        parent.tag = _local(parent.tag)
        parent[:] = [child for child in parent if _local(child.tag) not in ("metadata", "style")]
        parent.tail = None
        if parent.tag != "text":
            parent.text = None
        parent.attrib = dict(_attributes(parent.attrib, names))
    size = root.attrib.pop("width").removesuffix("pt"), root.attrib.pop("height").removesuffix("pt")
    root.attrib = {"viewBox": f"0 0 {size[0]} {size[1]}", "width": size[0], "role": "img", "aria-label": alt}
    return ElementTree.tostring(root, encoding="unicode")


def _local(tag: str) -> str:
    return tag.rpartition("}")[2]


def _attributes(attributes: dict[str, str], names: dict[str, str]) -> list[tuple[str, str]]:
    """Those of an element, with names and colours of the page."""
    kept = []
    for key, value in ((_local(key), value) for key, value in attributes.items()):
        if key == "id":
            if value not in names:
                continue
            value = names[value]
        elif value.startswith(("#", "url(")):
            value = _REFERENCE.sub(lambda found: "#" + names[found[1]], value)
        elif key == "style":
            value = _MARKER.sub(lambda found: _COLOURS[found[0]], "; ".join(map(_without_font, value.split("; "))))
        elif key == "d":
            value = " ".join(value.split())
        kept.append((key, value))
    return kept


def _without_font(declaration: str) -> str:
    """A CSS declaration, of fonts only the size; matplotlib before 3.10 writes all of a font in one."""
    if declaration.startswith("font-family"):
        return "font-family: inherit"
    if declaration.startswith("font:"):
        found = re.search(r"([\d.]+)px", declaration)
        weight = "; font-weight: 700" if re.search(r"\b(700|bold)\b", declaration) else ""
        return f"font-size: {found[1] if found else 13}px{weight}"
    return declaration


# --- How a page looks: its style sheet, and what a browser may load for it.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
FONT_FAMILY = 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif'
RAMP = ("#440154", "#414487", "#2a788e", "#22a884", "#7ad151", "#fde725")  # of heat maps: viridis of matplotlib
# Colours of series: see packer.tools.report.charts. Each has a contrast of 3:1 or more to the surface of its mode.
COLOURS = """
:root {
  --surface: #ffffff; --raised: #f4f6f8; --ink: #1a2027; --muted: #56616d; --grid: #dfe4e9; --strong: #c2410c;
  --series-1: #0072b2; --series-2: #c77700; --series-3: #00875f; --series-4: #b0548b; --series-5: #5b6b7b;
  --series-6: #3f51b5; --series-7: #8a6d00;
}
@media (prefers-color-scheme: dark) {
  :root {
    --surface: #14181d; --raised: #1e242b; --ink: #e8ecf0; --muted: #a3aeb9; --grid: #343c45; --strong: #ff8a4c;
    --series-1: #4aa8e0; --series-2: #f0a830; --series-3: #2fbf95; --series-4: #de8fbd; --series-5: #93a3b3;
    --series-6: #8f9df0; --series-7: #d0b84a;
  }
}
"""
STYLE = (
    f"""{COLOURS}
body {{ font: 16px/1.5 {FONT_FAMILY}; }}
.ramp {{ width: 140px; height: 12px; border-radius: 2px; background: linear-gradient(90deg, {", ".join(RAMP)}); }}
"""
    + """
* { box-sizing: border-box; }
html { background: var(--surface); color: var(--ink); -webkit-text-size-adjust: 100%; }
body { margin: 0; }
main { max-width: 860px; margin: 0 auto; padding: 24px 20px 64px; overflow-wrap: anywhere; }
h1 { font-size: 1.05rem; font-weight: 600; color: var(--muted); margin: 0 0 .4rem; }
h2 { font-size: 1.25rem; margin: 0 0 .6rem; }
h3 { font-size: 1.02rem; margin: 0 0 .4rem; }
p, ul, dl { margin: .5rem 0; }
ul { padding-left: 1.2rem; }
.lead { font-size: 1.45rem; line-height: 1.3; font-weight: 600; margin: 0; }
.section { margin-top: 2.4rem; padding-top: 1.4rem; border-top: 1px solid var(--grid); }
.figures { display: flex; flex-wrap: wrap; gap: 12px; margin: 1.4rem 0 0; }
.figure { flex: 1 1 200px; background: var(--raised); border-radius: 8px; padding: 12px 16px; }
.figure span { display: block; }
.value { font-size: 1.8rem; font-weight: 650; line-height: 1.2; font-variant-numeric: tabular-nums; }
.label { font-size: .95rem; }
.note, figcaption, caption { color: var(--muted); font-size: .9rem; }
figure { margin: 1rem 0; }
figure svg { display: block; width: 100%; height: auto; overflow: visible; }
figcaption { margin-top: .5rem; }
.wide { display: none; }
.narrow { max-width: 480px; }
@media (min-width: 860px) { .wide { display: block; } .narrow { display: none; } }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; list-style: none; padding: 0; margin: 0 0 .6rem;
  font-size: .9rem; }
.key { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 6px; }
.k1 { background: var(--series-1); } .k2 { background: var(--series-2); } .k3 { background: var(--series-3); }
.k4 { background: var(--series-4); } .k5 { background: var(--series-5); } .k6 { background: var(--series-6); }
.k7 { background: var(--series-7); }
.scale { display: flex; align-items: center; gap: 8px; font-size: .9rem; color: var(--muted); margin-bottom: .4rem; }
.table { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; line-height: 1.4; }
caption { text-align: left; padding-bottom: .4rem; }
th, td { text-align: left; vertical-align: top; padding: 6px 12px 6px 0; border-bottom: 1px solid var(--grid); }
th { font-weight: 600; color: var(--muted); vertical-align: bottom; overflow-wrap: normal; }
td { overflow-wrap: break-word; max-width: 26em; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
td.number { white-space: nowrap; }
td:first-child { min-width: 6.5em; }
th.number { min-width: 4.2em; }
tr.strong td { font-weight: 650; }
pre { background: var(--raised); border-radius: 6px; padding: 10px 12px; overflow-x: auto; margin: .6rem 0; }
code { font: .88rem/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  user-select: all; }
.card { border: 1px solid var(--grid); border-radius: 8px; padding: 14px 16px; margin: 1rem 0; break-inside: avoid; }
.badge { display: inline-block; margin-left: 10px; padding: 0 10px; border-radius: 999px; background: var(--raised);
  font-size: .85rem; font-weight: 600; }
dl { display: grid; grid-template-columns: minmax(7rem, max-content) 1fr; gap: 4px 16px; font-size: .92rem; }
dt { color: var(--muted); }
dd { margin: 0; }
summary { cursor: pointer; }
summary h2 { display: inline; }
details > :nth-child(2) { margin-top: 1rem; }
@media (max-width: 480px) {
  main { padding: 16px 16px 40px; }
  .lead { font-size: 1.2rem; }
  dl { grid-template-columns: 1fr; }
  dt { margin-top: 6px; }
}
@media print {
  main { max-width: none; padding: 0; }
  .wide { display: block; } .narrow { display: none; }
  .table, pre { overflow: visible; }
  pre { white-space: pre-wrap; }
  .section { border-top-color: #ccc; }
  figure, tr { break-inside: avoid; }
}
"""
)
