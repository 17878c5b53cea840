"""Images as quantised DCT coefficients: JPEGs without entropy coding, of which any box can be decoded separately.

    encode     a JPEG  ──►  bytes, or None if the JPEG itself should be kept
    decode     these bytes, a region  ──►  the pixels of libjpeg-turbo, bit for bit
    decode_resized  …, a size, flips  ──►  the same, as torch resizes them; decode_boxes: of several images at once

`layout` documents the bytes, docs/cache.md what is kept and its cost. Importing this package takes
numpy alone; `encode` and `decode` need the compiled codec, which is built when the package is installed
(`unsupported_reason` says why it is missing).
"""

from readers.coefficients.compiled import unsupported_reason
from readers.coefficients.decode import (
    Scaling,
    decode,
    decode_boxes,
    decode_jpeg,
    decode_resized,
    tabulate_boxes,
)
from readers.coefficients.encode import encode, encode_strictly, lend
from readers.coefficients.layout import MAGIC, parse_coefficients
from readers.coefficients.markers import Refused

__all__ = [
    "MAGIC",
    "Refused",
    "Scaling",
    "decode",
    "decode_boxes",
    "decode_jpeg",
    "decode_resized",
    "encode",
    "encode_strictly",
    "lend",
    "parse_coefficients",
    "tabulate_boxes",
    "unsupported_reason",
]
