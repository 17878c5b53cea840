"""How many frames or pages a file holds: of those after the first, readers decode none.

    GIF     images (see `readers.headers.gif`)          WebP    chunks ANMF
    PNG     acTL before the pixels says how many        TIFF    directories, each with the offset of the next

Sources: those of the format modules; for acTL, W3C PNG (third edition), 11.3.6.1. The pictures that some cameras put
behind a JPEG (MPF) are not counted: previews and gain maps, mostly.
"""

from __future__ import annotations

import struct

from readers.errors import BadSampleError
from readers.headers import gif, png, tiff, webp
from readers.headers.header import Buffer

__all__ = ["frames"]

_COUNTS = {"gif": gif.frames, "png": png.frames, "webp": webp.frames, "tiff": tiff.frames}


def frames(data: Buffer, media: str) -> int:
    """Frames or pages, 1 or more; those up to the damage of a damaged file. Never raises."""
    count = _COUNTS.get(media)
    try:
        return max(1, count(data)) if count is not None else 1
    except (BadSampleError, LookupError, struct.error):
        return 1
