"""The ways to pack images that are measured: which ones make sense for the images of a sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cache.errors import MissingExtraError
from cache.messages import plural
from packer.conversion.plan import Reencode
from readers.coefficients.compiled import load_functions, unsupported_reason
from readers.headers import ImageHeader

__all__ = ["Choices", "Variant", "choose_coefficients", "choose_variants"]

_TRAINED_SIDE, _KEPT_SIDE = 224, 256  # of ImageNet recipes: resized to the second, cropped to the first
_MAX_SIDES = (500, 400, 256)  # for crops of 224 pixels
_LARGE_SIDE = 1000  # in addition, for images more than half as large again
_QUALITIES = (95, 90, 85)
_ALMOST_ALL = 0.9  # of the images made smaller: keeping the bytes of the others makes no difference
_PLAIN_MEDIA = ("bmp", "tiff", "gif")  # which packing can only write as PNG


@dataclass(frozen=True, slots=True)
class Choices:
    """What to try. image_size: side of the crops that training takes, in pixels.

    max_sides, qualities: what to try of each; () for the usual ones.
    """

    image_size: int = _TRAINED_SIDE
    max_sides: tuple[int, ...] = ()
    qualities: tuple[int, ...] = ()

    @property
    def short_side(self) -> int:
        """The short side of what training resizes images to before it crops them, as 256 for 224."""
        return round(self.image_size * _KEPT_SIDE / _TRAINED_SIDE)


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to pack images, or to keep them in memory.

    reencode: as conversion takes it; None for the bytes as they are.
    keep: a form of `readers.cached` in place of it; such images exist in memory only.
    """

    name: str
    reencode: Reencode | None = None
    keep: str = ""

    @property
    def is_original(self) -> bool:
        return self.reencode is None and not self.keep

    @property
    def flags(self) -> tuple[str, ...]:
        """The options of `packer convert` that make it."""
        how = self.reencode
        if how is None:
            return ()
        plain = how == Reencode(how.codec)
        flags = ["--reencode", how.codec] if how.codec != "keep" or plain else []
        for name, value in (("max-side", how.max_side), ("resize-short", how.resize_short), ("quality", how.quality)):
            flags += [f"--{name}", str(value)] if value is not None else []
        return tuple(flags)

    @property
    def suffix(self) -> str:
        """Part of the name of a set of such images: "max500-q90"."""
        how = self.reencode
        if how is None:
            return ""
        parts = [how.codec if how.codec != "keep" else ""]
        for letter, value in (("max", how.max_side), ("short", how.resize_short), ("q", how.quality)):
            parts.append(f"{letter}{value}" if value is not None else "")
        return "-".join(part for part in parts if part) or "png"


def choose_variants(headers: Sequence[ImageHeader], choices: Choices) -> tuple[list[Variant], list[str]]:
    """The variants for images with these headers, the images as they are first; and why some are missing."""
    sides = choices.max_sides or _usual_sides(headers, choices.image_size)
    short, qualities = choices.short_side, choices.qualities or _QUALITIES
    jpegs = all(header.media == "jpeg" for header in headers)
    codec = "keep" if jpegs else "jpeg"
    found, notes = [Variant("as it is")], list[str]()
    if any(header.media in _PLAIN_MEDIA for header in headers):
        found.append(Variant("png, where it is not compressed", Reencode("keep")))
    resizes: list[tuple[str, int | None, int | None]] = [("same size", None, None)]
    resizes += [(f"max side {side}", side, None) for side in sides] + [(f"short side {short}", None, short)]
    smaller, idle = "", list[str]()
    for name, max_side, resize_short in resizes:
        changed = _changed(headers, max_side, resize_short)
        flag = f"--max-side {max_side}" if max_side else f"--resize-short {resize_short}"
        if (max_side or resize_short) and not changed:
            idle.append(flag)
            continue
        if changed and (changed < _ALMOST_ALL * len(headers) or not jpegs):
            some = f"{name}, others kept" if changed < len(headers) else name
            found.append(Variant(some, Reencode("keep", max_side, resize_short)))
        for quality in qualities:
            found.append(Variant(f"{name}, q{quality}", Reencode(codec, max_side, resize_short, quality)))
        if not smaller and changed:
            smaller = name
            notes += _notes_on(flag, changed, len(headers))
    if idle:
        notes.append(f"{', '.join(idle)}: no image of the sample is larger, so nothing would change")
    middle = sorted(qualities)[len(qualities) // 2]
    side = next((side for side in sides if _changed(headers, side, None)), None)
    name = f"webp, max side {side}" if side else "webp, same size"
    found.append(Variant(f"{name}, q{middle}", Reencode("webp", side, None, middle)))
    found.append(Variant(f"pixels, short side {short}", keep=f"decoded:{short}"))
    return found, notes


def choose_coefficients(headers: Sequence[ImageHeader]) -> tuple[list[Variant], list[str]]:
    """What a cache keeps of JPEGs without a loss, where this machine decodes it; and why it is missing.

    Compiles the decoder, where that has not been done.
    """
    if all(header.media != "jpeg" for header in headers):
        return [], []
    try:
        reason = unsupported_reason()
        if not reason:
            load_functions()
    except MissingExtraError as error:
        reason = str(error)
    if reason:
        return [], [f"coefficients in memory were not measured: {reason}"]
    return [Variant("coefficients", keep="coefficients")], []


def _usual_sides(headers: Sequence[ImageHeader], image_size: int) -> tuple[int, ...]:
    """Longest sides to try, the largest first."""
    longest = sorted(max(header.height, header.width) for header in headers)
    large = round(_LARGE_SIDE * image_size / _TRAINED_SIDE)
    usual = [round(side * image_size / _TRAINED_SIDE) for side in _MAX_SIDES]
    return (large, *usual) if longest[len(longest) // 2] > 1.5 * large else tuple(usual)


def _changed(headers: Sequence[ImageHeader], max_side: int | None, short_side: int | None) -> int:
    """How many images are made smaller."""
    if max_side is not None:
        return sum(max(header.height, header.width) > max_side for header in headers)
    return sum(short_side is not None and min(header.height, header.width) > short_side for header in headers)


def _notes_on(flag: str, changed: int, count: int) -> list[str]:
    if changed == count:
        return []
    return [f"{flag} makes {changed} of {plural(count, 'image')} smaller; with a quality, the others are encoded again"]
