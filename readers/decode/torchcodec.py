"""JPEGs by torchcodec: nvJPEG on CUDA devices, libjpeg-turbo on the CPU. Needs `pip install 'packer-vision[gpu]'`.

`torchcodec.decoders.decode_jpeg` (0.16 and later) takes a list and turns images by their EXIF orientation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cache.errors import MissingExtraError
from readers.decode.backend import ListDecoder

__all__ = ["open_torchcodec"]


def open_torchcodec(device: torch.device) -> ListDecoder:
    """Raises MissingExtraError where torchcodec is missing, older, or cannot be loaded beside this torch."""
    try:
        from torchcodec.decoders import decode_jpeg
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingExtraError("torchcodec >= 0.16", "gpu", f"decoding on {device.type}") from error

    def call(encoded: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        pixels: Sequence[torch.Tensor] = decode_jpeg(encoded, mode="RGB", device=device)
        return pixels

    return ListDecoder(f"torchcodec/{device.type}", device, call, turns=True)
