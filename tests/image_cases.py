"""Images for the tests of headers, decoders and packing, and their pixels by Pillow."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from cache.errors import BadSampleError
from readers.headers import ImageHeader, parse_header, sniff

__all__ = [
    "SIZE",
    "XMP_PREFIX",
    "chunk",
    "encoded",
    "exif_blob",
    "outcome",
    "picture",
    "pillow_rgb",
    "refusal",
    "with_chunks",
    "with_segments",
    "xmp",
]

SIZE = (230, 310)
XMP_PREFIX = b"http://ns.adobe.com/xap/1.0/\0"


def picture(height: int = SIZE[0], width: int = SIZE[1], seed: int = 1) -> Image.Image:
    """Smooth colours with some noise, which show differences in chroma upsampling and clamping."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (9, 12, 3), np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    noise = rng.integers(-20, 20, (height, width, 3))
    return Image.fromarray(np.clip(np.asarray(coarse).astype(int) + noise, 0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str, orientation: int = 1, **options: Any) -> bytes:
    if orientation != 1:
        exif = Image.Exif()
        exif[0x0112] = orientation
        options["exif"] = exif
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def pillow_rgb(data: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


def chunk(kind: bytes, contents: bytes) -> bytes:
    """A PNG chunk."""
    return struct.pack(">I", len(contents)) + kind + contents + struct.pack(">I", zlib.crc32(kind + contents))


def with_chunks(png: bytes, *chunks: bytes, at_the_end: bool = False) -> bytes:
    """A PNG with further chunks, after IHDR or before IEND."""
    place = len(png) - 12 if at_the_end else 33
    return png[:place] + b"".join(chunks) + png[place:]


def with_segments(jpeg: bytes, *contents: bytes, marker: int = 0xE1) -> bytes:
    """A JPEG with further segments, APP1 by default, directly after its start marker."""
    segments = (bytes((0xFF, marker)) + struct.pack(">H", len(content) + 2) + content for content in contents)
    return jpeg[:2] + b"".join(segments) + jpeg[2:]


def exif_blob(orientation: int, kind: int = 3, count: int = 1, order: str = "<") -> bytes:
    """EXIF with this one entry: a number of a TIFF type, or a text for the other types."""
    codes = {3: "H", 4: "I", 6: "b", 8: "h", 9: "i", 11: "f", 12: "d", 13: "I", 16: "Q", 5: "II", 10: "ii"}
    numbers = (orientation, 1) if kind in (5, 10) else (orientation,)
    value = struct.pack(order + codes[kind], *numbers) if kind in codes else bytes([orientation])
    values = value * count
    inline = values.ljust(4, b"\0") if len(values) <= 4 else struct.pack(order + "I", 26)
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "IHHHI", 8, 1, 0x0112, kind, count)
    return head + inline + bytes(4) + (values if len(values) > 4 else b"")


def xmp(orientation: int, *, attribute: bool = True) -> bytes:
    """An XMP packet with the orientation, as an attribute or as an element."""
    element = f"><tiff:Orientation>{orientation}</tiff:Orientation>"
    written = f' tiff:Orientation="{orientation}"/>' if attribute else element
    return f"<x:xmpmeta><rdf:Description{written}</x:xmpmeta>".encode()


def outcome(data: bytes | memoryview) -> ImageHeader | None:
    """The header, or None for a BadSampleError; any other exception fails the test."""
    try:
        header = parse_header(data)
    except BadSampleError as error:
        assert "byte" in str(error) or str(error).startswith("bmp image: ")  # Pillow reads these formats
        return None
    assert header.media == sniff(data) != ""
    assert 1 <= header.height <= 0xFFFFFFFF and 1 <= header.width <= 0xFFFFFFFF
    assert 1 <= header.components <= 255 and 0 <= header.process <= 255 and 1 <= header.orientation <= 8
    return header


def refusal(data: bytes) -> str:
    with pytest.raises(BadSampleError) as caught:
        parse_header(data)
    return str(caught.value)
