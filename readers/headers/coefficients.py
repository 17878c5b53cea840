"""The header of an image that is kept as quantised DCT coefficients: `readers.coefficients.layout` says what follows.

Such images exist in caches only, for the decoders of this package. In a file or a shard they are not an image: `sniff`
and `parse_header` refuse them.
"""

from __future__ import annotations

import struct

from readers.headers.base import Buffer, ImageHeader, bad, truncated

__all__ = ["HEADER", "MAGIC", "MEDIUM", "VERSION", "parse_coefficients_header"]

MEDIUM = "coefficients"
MAGIC = b"\x89DCT\r\n\x1a\n"
VERSION = 1
HEADER = struct.Struct("<8sIHHBBBBI")


def parse_coefficients_header(data: Buffer) -> ImageHeader:
    """The size, the components and the orientation; what else the header says is not looked at. Raises BadSampleError.

    Sizes are as stored, before the orientation is applied; the process is 0.
    """
    if len(data) < HEADER.size:
        raise truncated(MEDIUM, 0, f"a header of {HEADER.size} bytes", data)
    magic, _, height, width, version, components, _, orientation, _ = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise bad(MEDIUM, 0, f"the magic {MAGIC.hex(' ')}", magic.hex(" "))
    if version != VERSION:
        raise bad(MEDIUM, 16, f"version {VERSION}", f"{version}; empty the cache that wrote it")
    if not height or not width:
        raise bad(MEDIUM, 12, "a height and a width of 1 to 65535", f"{height} and {width}")
    if components not in (1, 3):
        raise bad(MEDIUM, 17, "1 or 3 components", components)
    if not 1 <= orientation <= 8:
        raise bad(MEDIUM, 19, "an orientation of 1 to 8", orientation)
    return ImageHeader(MEDIUM, height, width, components, 0, orientation)
