"""Decodes the files named on its standard input with Pillow and with packer, within 2 GiB of address space, and prints
one line of JSON for each: whether the two agree. `test_corpora` runs it on many files a process; the start of a file is
printed, too, so a file that ends the process is known.

    same            the pixels are Pillow's, whole and in part, in the size and orientation that the header says
    refused         Pillow reads it, packer does not, or packing does not take it
    differs         the pixels differ from Pillow's
    by name         it has no 8-bit RGB form, and packer says so; Pillow's would be wrong
    neither         damaged, or not an image
    ours alone      packer reads it, Pillow does not
    not ours        Pillow reads it, in a format that is not supported
    crashed         an exception other than BadSampleError

"Pillow's pixels" are `exif_transpose`, then `convert("RGB")`. For grey with more than 8 bits, where `convert` turns
nearly everything white, they are the upper 8 bits.
"""

from __future__ import annotations

import io
import json
import os
import resource
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from cache.errors import BadSampleError
from packer.conversion.images import check_image
from readers.decode import Region, Scratch, decode_image, decode_unchanged
from readers.headers import read_header, sniff
from readers.headers.base import upright_size
from readers.headers.pillow import PLUGINS, missing_plugin

LIMIT_BYTES = 2 << 30
OURS = {"JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", *PLUGINS.values()}
_BITS_PER_SAMPLE, _PLANAR = 258, 284


def by_pillow(data: bytes) -> tuple[str, Any]:
    """(format, pixels); pixels is None where no 8-bit RGB form exists. Raises Pillow's exceptions."""
    with Image.open(io.BytesIO(data)) as image:
        tags = getattr(image, "tag_v2", {})
        bits = max(tags.get(_BITS_PER_SAMPLE, (8,)), default=8)
        kind = str(image.format)
        in_planes = bits > 8 and tags.get(_PLANAR) == 2 and image.mode not in ("I;16", "I;16B", "I", "F")
        if in_planes and image.info.get("compression") == "raw":
            image.load()
            return kind, None
        turned = ImageOps.exif_transpose(image)
        if turned.mode.startswith("I;16"):
            shift = (bits if bits > 8 else 16) - 8
            return kind, np.repeat((np.asarray(turned) >> shift).astype(np.uint8)[:, :, None], 3, axis=2)
        return kind, None if turned.mode in ("I", "F") and kind in OURS else np.asarray(turned.convert("RGB"))


def compared(data: bytes, pixels: Any, scratch: Scratch) -> str:
    """The fault of packer's pixels, or "". Raises BadSampleError."""
    header = read_header(data)
    size = upright_size(header.height, header.width, header.orientation)
    decoded = decode_image(data, None, scratch, size)
    if decoded.shape != pixels.shape:
        return f"{decoded.shape} instead of {pixels.shape}"
    if not np.array_equal(decoded, pixels):
        return f"differs by up to {int(np.abs(decoded.astype(np.int16) - pixels).max())}"
    height, width = size
    top, left = height // 5, width // 7
    region = Region(top, left, max(1, height // 3), max(1, width // 2))
    part = decode_image(data, region, scratch, size)
    expected = pixels[top : top + region.height, left : left + region.width]
    return "" if np.array_equal(part, expected) else "a part differs"


def verdict(data: bytes, scratch: Scratch) -> tuple[str, str]:
    """(one of the verdicts above, the reason)."""
    pixels: Any = None
    kind, failure = "", ""
    try:
        kind, pixels = by_pillow(data)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    try:
        if pixels is None:
            decode_image(data, None, scratch)
            return ("ours alone", failure) if failure else ("differs", "has no RGB form, and got one")
        wrong = compared(data, pixels, scratch)
        check_image(data, "RGB")
    except BadSampleError as error:
        if failure:
            return "neither", str(error)
        if kind not in OURS:
            return "not ours", kind
        if pixels is None:
            return "by name", str(error)
        return "refused", str(error)
    return ("differs", wrong) if wrong else ("same", "")


def look(path: Path, scratch: Scratch) -> tuple[str, str]:
    try:
        data = path.read_bytes()
        outcome = verdict(data, scratch)
        if sniff(data):
            try:
                decode_unchanged(data)
            except BadSampleError:
                pass
    except Exception as error:
        return "crashed", f"{type(error).__name__}: {error}"
    return outcome


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    out = os.fdopen(os.dup(1), "w")
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # libtiff and libpng write warnings about an image there
        os.dup2(silence, stream)
    for media in PLUGINS:
        missing_plugin(media)  # registers the format with Pillow
    scratch = Scratch()
    for line in sys.stdin:
        path = Path(line.rstrip("\n"))
        print(json.dumps({"begun": str(path)}), file=out, flush=True)
        word, reason = look(path, scratch)
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"path": str(path), "word": word, "reason": reason, "peak": peak_bytes}), file=out, flush=True)


if __name__ == "__main__":
    main()
