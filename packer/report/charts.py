"""Charts of a report: bars, stacked bars, points, heat maps and lines, each in two widths.

Values that are None or not finite are missing, and shown as such. Names come from anywhere and are cut to fit. Series
are told apart by place, line or marker too, not by colour alone; the colours are of M. Okabe and
K. Ito, "Color Universal Design", darkened where they are too faint on white.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from packer.report.frames import Mark, Plot, Rows
from packer.report.svg import INK, MUTED, SERIES, STRONG, SURFACE, Chart, clean, draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Mark", "Point", "bars", "heat_map", "lines", "number", "scatter", "stacked_bars"]

Value: TypeAlias = float | None
Better: TypeAlias = Literal["low", "high"]
_Frame = TypeVar("_Frame", Rows, Plot)

_ALT = 1500
_LARGE = 1e10
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (9, 3)), (0, (3, 1, 1, 1, 1, 1)))


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a scatter chart. group: points of one group share colour and marker. strong: the one to look at."""

    label: str
    x: float
    y: float
    group: str = ""
    strong: bool = False


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


def scatter(
    points: Sequence[Point],
    *,
    x: str,
    y: str,
    frontier: tuple[Better, Better] | None = None,
    log_x: bool = False,
    log_y: bool = False,
) -> Chart:
    """Labelled points.

    x, y: what the axes are, with units.
    frontier: for x and y, whether low or high is better: a line joins the points that no other beats in both.
    log_x, log_y: axes by powers of 10; points at 0 or below are left out.
    """
    kept = [point for point in points if _drawable(point.x, log_x) and _drawable(point.y, log_y)]
    groups = list(dict.fromkeys(clean(point.group, 60) for point in kept))
    best = [] if frontier is None else _frontier(kept, *frontier)

    def paint(figure: Figure, frame: Plot) -> None:
        axes = frame.axes(figure, x, y)
        axes.margins(0.12, 0.14)
        if log_x:
            axes.set_xscale("log")
        if log_y:
            axes.set_yscale("log")
        axes.plot([p.x for p in best], [p.y for p in best], color=MUTED, linewidth=1.5, dashes=(4, 3), zorder=1)
        for point in kept:
            place = groups.index(clean(point.group, 60))
            colour = STRONG if point.strong and len(groups) == 1 else SERIES[place % len(SERIES)]
            marker, size = _MARKERS[place % len(_MARKERS)], 12 if point.strong else 8
            axes.plot([point.x], [point.y], marker, color=colour, markersize=size, markeredgecolor=SURFACE)
        frame.ticks(axes, log_x=log_x, log_y=log_y)
        frame.label_points(axes, [(point.label, point.x, point.y, point.strong) for point in kept])

    places = "; ".join(f"{clean(point.label, 60)} at {number(point.x)}, {number(point.y)}" for point in kept)
    return _both(Plot, paint, f"{y} against {x}: {places}", groups if len(groups) > 1 else [])


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


def _frontier(points: Sequence[Point], better_x: Better, better_y: Better) -> list[Point]:
    """The points that no other one beats in both, by x."""
    sign_x, sign_y = (1 if better == "low" else -1 for better in (better_x, better_y))
    found: list[Point] = []
    for point in sorted(points, key=lambda point: (sign_x * point.x, sign_y * point.y)):
        if not found or sign_y * point.y < sign_y * found[-1].y:
            found.append(point)
    return found


def _drawable(value: float, log: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not log)


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
