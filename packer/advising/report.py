"""Advice as a page: points of bytes and of error against images/s, the table, the recommendations with commands."""

from __future__ import annotations

from collections.abc import Iterable

from cache.messages import plural
from packer.advising import Advice, Measured
from packer.advising.text import HEADINGS, described, row_of
from packer.report import Chart, Page, charts

__all__ = ["advice_page"]

_ERRORS = (1, 2, 3, 5)
_FAR = 40


def advice_page(advice: Advice) -> Page:
    """The whole advice. Raises MissingExtraError without matplotlib."""
    choice = advice.recommendations[0].choice
    page = Page(f"What to pack: {advice.title}", lead=f"{choice[0].upper()}{choice[1:]}")
    chosen = advice.measured[advice.chosen]
    cells = dict(zip(HEADINGS, row_of(advice, chosen), strict=True))
    page.figures([
        (cells["images/s"], _rate(advice), chosen.variant.name),
        (cells["an image"], "an image", f"{cells['the set']} in all"),
        (cells["error"] or "0", "mean error of 255", "against the originals"),
    ])  # fmt: skip
    page.section("What to do")
    for number, one in enumerate(advice.recommendations, 1):
        code = "\n".join((*one.commands, *([one.code] if one.code else [])))
        page.card(f"{number}. {one.topic}: {one.choice}", why=one.reason, code=code)
    page.section("Variants")
    page.chart(_of_bytes(advice), "Bytes and speed; colours: mean error against the originals, of 255. Left is small, "
               "up is quick.")  # fmt: skip
    page.chart(_of_error(advice), "Error and speed. Left is near to the originals, up is quick; the line joins what no "
               "other variant beats in both.")  # fmt: skip
    page.table(HEADINGS, [row_of(advice, one) for one in advice.measured], strong=[advice.chosen],
               caption="Error and worst crop: mean difference from the original, of 255. Encoding: the set, on all "
               "CPUs.")  # fmt: skip
    page.section("How it was measured")
    page.points([*described(advice), *advice.notes])
    return page


def _of_bytes(advice: Advice) -> Chart:
    """Of what can be packed: pixels in memory take so much more that the others would be one heap."""
    packed = [one for one in advice.measured if not one.variant.keep]
    packed.sort(key=lambda one: one.error)  # so that the legend rises
    points = [_point(advice, one, one.image_bytes / 1000, _error_of(one)) for one in packed]
    return charts.scatter(points, x="kB an image", y=_rate(advice), log_x=_spans(point.x for point in points))


def _of_error(advice: Advice) -> Chart:
    points = [_point(advice, one, one.error, _kind(one)) for one in advice.measured]
    wide = _spans(point.y for point in points)
    return charts.scatter(points, x="mean error, of 255", y=_rate(advice), frontier=("low", "high"), log_y=wide)


def _spans(values: Iterable[float]) -> bool:
    """Whether values are so far apart that only powers show them all."""
    found = sorted(values)
    return found[-1] > _FAR * found[0]


def _rate(advice: Advice) -> str:
    return f"images/s on {plural(advice.machine.cpus, 'CPU')}"


def _point(advice: Advice, one: Measured, x: float, group: str) -> charts.Point:
    return charts.Point(one.variant.name, x, advice.rate(one), group, one is advice.measured[advice.chosen])


def _error_of(one: Measured) -> str:
    """The error in a few steps: points of one step look alike."""
    if one.psnr is None:
        return "no error"
    least = next((step for step in _ERRORS if one.error < step), None)
    return f"under {least}" if least else f"{_ERRORS[-1]} and more"


def _kind(one: Measured) -> str:
    """What a variant changes: points of a kind look alike."""
    how = one.variant.reencode
    if how is None:
        return "kept in memory" if one.variant.keep else "as it is"
    if how.codec not in ("keep", "jpeg"):
        return "another codec"
    return "smaller" if how.max_side or how.resize_short else "same size"
