"""One drawing by matplotlib as an SVG element for the middle of an HTML page.

Text stays text, so that it can be searched, selected and read aloud. Colours become CSS variables of the page, which
knows whether it is light or dark: matplotlib draws with the placeholders below. Numbers are pixels: a point is one.
No state of pyplot and no settings of the user take part, and the same drawing always gives the same bytes.
"""

from __future__ import annotations

import hashlib
import io
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from cache.errors import MissingExtraError
from cache.messages import printable, shortened

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "GRID",
    "INK",
    "MUTED",
    "SERIES",
    "STRONG",
    "SURFACE",
    "Chart",
    "clean",
    "draw",
    "require_charts",
    "text_width",
]

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
