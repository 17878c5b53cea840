"""The frames of charts: where labels, bars, axes and marks are, in pixels, where there is room and where there is not.

A wide chart is for 820 pixels, a narrow one for 340, which a phone shows a little larger and a page at 400 % a little
smaller. Room for text is estimated, on the safe side: browsers choose the fonts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from packer.report.svg import GRID, INK, MUTED, SURFACE, clean, text_width

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Mark", "Plot", "Rows", "fitted", "tick"]

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

    def ticks(self, axes: Axes, *, log_x: bool = False, log_y: bool = False, at: Sequence[float] = ()) -> None:
        """Few enough ticks for the width; at: exactly these on the axis of x."""
        axes.tick_params(which="both", length=0, pad=6, labelsize=self.font, labelcolor=MUTED)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: tick(value))
            axis.set_minor_formatter(lambda value, _: "")
        if not log_x:
            axes.locator_params(axis="x", nbins=4 if self.narrow else 8)
        if not log_y:
            axes.locator_params(axis="y", nbins=6)
        if at:
            axes.set_xticks(list(at))
            axes.set_xticks([], minor=True)
        if self.rows:
            every = -(-(self.font + 2) // self.row)
            places = range(0, len(self.rows), every)
            names = [fitted(self.rows[place], self.left - 10, self.font) for place in places]
            axes.set_yticks([place + 0.5 for place in places], names)

    def label_points(self, axes: Axes, points: Sequence[tuple[str, float, float, bool]]) -> None:
        """Names beside points, strong ones first: where neither a point nor another name is; otherwise not at all."""
        axes.autoscale_view()  # or the transform is still that of empty axes
        places = [axes.transData.transform((x, y)) for _, x, y, _ in points]
        taken = [(x - 7, y - 7, x + 7, y + 7) for x, y in places]
        for (name, _, _, strong), (x, y) in sorted(zip(points, places, strict=True), key=lambda item: not item[0][3]):
            shown = clean(name, 18 if self.narrow else 32)
            width, high = text_width(shown, self.font), self.font + 2
            for left, bottom in (
                (x + 9, y - high / 2), (x - 9 - width, y - high / 2), (x - width / 2, y + 8),
                (x - width / 2, y - 8 - high), (x + 7, y + 6), (x + 7, y - 6 - high), (x - 7 - width, y + 6),
            ):  # fmt: skip
                box = (left, bottom, left + width, bottom + high)
                inside = box[0] >= 2 and box[2] <= self.width - 2
                inside = inside and self.below <= box[1] and box[3] <= self.below + self.inner + 8
                if inside and not any(_overlap(box, other) for other in taken if other != (x - 7, y - 7, x + 7, y + 7)):
                    taken.append(box)
                    axes.annotate(
                        shown, (left, bottom + high / 2), xycoords="figure pixels", fontsize=self.font, color=INK,
                        fontweight="bold" if strong else "normal", va="center_baseline", annotation_clip=False,
                    )  # fmt: skip
                    break


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


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
