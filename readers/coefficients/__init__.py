"""Images kept as quantised DCT coefficients: JPEGs whose entropy coding is undone once, so that any box decodes alone.

    encode     a JPEG  ──►  bytes, or None where the JPEG itself is to be kept
    decode     these bytes, a region  ──►  pixels, those of libjpeg-turbo to the bit
    decode_resized  …, a size, flips  ──►  the same, as torch resizes them

`layout` says what the bytes are, docs/coefficients.md what is kept and what it costs. Importing this package takes
numpy alone; the first `encode` or `decode` needs numba (`pip install 'packer-vision[coefficients]'`) and a CPU with
AVX2 and BMI2 instructions.
"""

from readers.coefficients.compiled import unsupported_reason
from readers.coefficients.decode import Scaling, decode, decode_resized
from readers.coefficients.encode import encode, encode_strictly
from readers.coefficients.layout import MAGIC, parse_coefficients
from readers.coefficients.markers import Refused

__all__ = [
    "MAGIC",
    "Refused",
    "Scaling",
    "decode",
    "decode_resized",
    "encode",
    "encode_strictly",
    "parse_coefficients",
    "unsupported_reason",
]
