"""JPEGs by torchcodec: nvJPEG on CUDA devices, libjpeg-turbo on the CPU. Needs `pip install 'packer-vision[gpu]'`.

`torchcodec.decoders.decode_jpeg` (0.16 and later) takes a list and turns images by their EXIF orientation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from cache.errors import MissingExtraError

__all__ = ["load_torchcodec"]


def load_torchcodec(device: torch.device) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
    """The function that decodes a list of images, uint8 [bytes] on the CPU, to uint8 [3, height, width] on `device`.

    Raises MissingExtraError where torchcodec is missing, older, or cannot be loaded with this torch.
    """
    try:
        from torchcodec.decoders import decode_jpeg
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingExtraError("torchcodec >= 0.16", "gpu", f"decoding on {device.type}") from error

    return lambda encoded: decode_jpeg(encoded, mode="RGB", device=device)
