"""Look at an image on its way into a shard, and re-encode it where that was asked for.

What is looked at follows from how the images will be decoded: an image that `readers.decode` could not give so is
refused here, by name, and not in the middle of the training. What it gives only in part is counted as a remark.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from cache.text import plural
from packer.conversion.options import ConvertOptions
from packer.conversion.reencode import reencode
from readers.decode import decode_image, decode_unchanged
from readers.decode.jpeg import check_coding
from readers.decode.pillow import bits_of, without_rgb
from readers.decode.region import check_pixels
from readers.decode.unchanged import without_all_bits
from readers.errors import BadSampleError
from readers.headers import ImageHeader, parse_header, read_header, sniff
from readers.headers.frames import frames
from readers.headers.jpeg import parse_frame
from readers.headers.pillow import opened
from readers.sample import Buffer

__all__ = ["Prepared", "adopted_image", "check_image", "decode_fully", "prepare_image", "remarks_of"]

_DAMAGED, _DEEP, _FRAMES, _NO_RGB = "damaged", "over_8_bits", "further_frames", "without_rgb"
# What to tell of so many images, the first of which is named.
_REMARKS = {
    _DAMAGED: "{images} damaged where it costs no pixels (the first: {first}): kept as they are, decoded by Pillow",
    _DEEP: "{images} of more than 8 bits a channel (the first: {first}): decoding to RGB takes the upper 8 bits, "
    "decode='unchanged' gives them all",
    _FRAMES: "{images} with further frames or pages (the first: {first}): readers decode the first one only",
    _NO_RGB: "{images} that readers cannot decode to RGB (the first: {first}); some can with decode='unchanged'",
}
_FAST_PIXELS = 1 << 25  # what Pillow's own limit need not be asked about
_PNG_BITS = 24


class Prepared(NamedTuple):
    """The bytes to pack, their header, the file name that fits them, and remarks: their kinds."""

    image: Buffer
    header: ImageHeader
    name: str
    remarks: tuple[str, ...]


def prepare_image(image: Buffer, name: str, key: str, options: ConvertOptions) -> Prepared:
    """An image as `options` want it. key: of its sample. Raises BadSampleError."""
    header, remarks = check_image(image, options.decode)
    if options.check == "decode":
        decode_fully(image, options.decode)
    if options.reencode is None:
        return Prepared(image, header, name, remarks)
    made, header, name = reencode(image, header, name, key, options.reencode)
    return Prepared(made, header, name, remarks if made is image else ())


def check_image(image: Buffer, decode: str) -> tuple[ImageHeader, tuple[str, ...]]:
    """The header of an image that will be decoded so, and remarks. Raises BadSampleError."""
    media, frame = sniff(image), 0
    remarks: tuple[str, ...] = ()
    try:
        if media == "jpeg":
            header, frame = parse_frame(image)
        else:
            header = parse_header(image)
    except BadSampleError:
        header, remarks = read_header(image), (_DAMAGED,)
    if decode == "none":
        return header, remarks
    check_pixels(header.height, header.width)
    if frame:
        check_coding(image, header, frame)
        return header, remarks
    bits = image[_PNG_BITS] if media == "png" else 8
    if media == "tiff" or header.height * header.width > _FAST_PIXELS:
        with opened(image, media) as picture:
            reason = without_rgb(picture) if decode == "RGB" else without_all_bits(picture)
            if reason:
                other = decode == "RGB" and not without_all_bits(picture)
                raise BadSampleError(reason + ("; --decode unchanged packs such images" if other else ""))
            bits = max(bits, bits_of(picture))
    if bits > 8 and decode == "RGB":
        remarks += (_DEEP,)
    if frames(image, media) > 1:
        remarks += (_FRAMES,)
    return header, remarks


def adopted_image(image: Buffer) -> tuple[ImageHeader | None, tuple[str, ...]]:
    """The same of an image that is in a shard already, where nothing is refused; no header where there is none."""
    try:
        return check_image(image, "RGB")
    except BadSampleError:
        pass
    try:
        return read_header(image), (_NO_RGB,)
    except BadSampleError:
        return None, ()


def remarks_of(shards: Iterable[Mapping[str, tuple[int, str]]]) -> tuple[str, ...]:
    """What to say of images, from the remarks on those of each shard: (how many, the first) by kind."""
    found: dict[str, tuple[int, str]] = {}
    for remarks in shards:
        for kind, (count, first) in remarks.items():
            so_far, earliest = found.get(kind, (0, first))
            found[kind] = (so_far + count, earliest)
    return tuple(
        _REMARKS[kind].format(images=plural(count, "image"), first=first)
        for kind, (count, first) in sorted(found.items())
    )


def decode_fully(image: Buffer, decode: str) -> None:
    """Decode every pixel, as readers will. Raises BadSampleError where that fails."""
    try:
        if decode == "RGB":
            decode_image(image)
        elif decode == "unchanged":
            decode_unchanged(image)
    except BadSampleError as error:
        raise BadSampleError(f"does not decode: {error}") from error
